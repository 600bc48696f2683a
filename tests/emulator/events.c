/* events.c: what has been asked for and has not happened yet; one of them happens when the seed says so, or when
 * nothing else can. */
#include <stdlib.h>

#include "emulated_launch.h"
#include "state.h"

enum { HAPPENS = 48 };
static struct event *events; /* the newest first */
static uint32_t num_events;

struct event *events_first(void) {
    return events;
}

struct event *event_add(struct cluster *c, void (*happen)(struct event *), size_t data_bytes, place at) {
    struct event *e = calloc(1, sizeof *e + data_bytes);
    e->cluster = c;
    e->cluster_number = c->number;
    e->happen = happen;
    e->at = at;
    e->data = e + 1;
    e->next = events;
    events = e;
    num_events++;
    return e;
}

static void unlink_event(struct event *e) {
    struct event **link = &events;
    while (*link != e)
        link = &(*link)->next;
    *link = e->next;
    num_events--;
}

void event_remove(struct event *e) {
    unlink_event(e);
    free(e);
}

static void happen(struct event *e) {
    unlink_event(e);
    progress();
    e->happen(e);
    free(e);
}

int event_happen(void) {
    if (!num_events || device.failed)
        return 0;
    uint32_t n = random_below(num_events);
    struct event *e = events;
    while (n--)
        e = e->next;
    happen(e);
    return 1;
}

void event_maybe(void) {
    if (num_events && emulated_settings_now.mode == EMULATED_RANDOM && chance(HAPPENS))
        event_happen();
}

void event_now_or_later(struct event *e) {
    const enum emulated_mode mode = emulated_settings_now.mode;
    if (mode == EMULATED_EARLY || (mode == EMULATED_RANDOM && chance(3)))
        happen(e);
}

/* What touches no block's memory any more happens now. */
void events_of_cluster_ended(struct cluster *c) {
    for (struct event *e = events, *next; e; e = next) {
        next = e->next;
        if (e->cluster != c || e->cluster_number != c->number)
            continue;
        if (e->block) {
            finding("block ended too early", e->at, "block (%u,%u,%u) has ended while %s", e->block->index.x,
                    e->block->index.y, e->block->index.z, e->loss);
            event_remove(e);
        } else {
            happen(e);
            next = events; /* what happened may have asked for more */
        }
    }
}

/* All of one kind in a cluster, the oldest first. */
void events_flush(struct cluster *c, void (*of)(struct event *)) {
    for (;;) {
        struct event *oldest = NULL;
        for (struct event *e = events; e; e = e->next)
            if (e->happen == of && e->cluster == c)
                oldest = e;
        if (!oldest)
            return;
        happen(oldest);
    }
}

void events_forget(void) {
    while (events)
        event_remove(events);
}
