/* clocks.c: vector clocks of the threads of a cluster, shared while they are equal.
 *
 * A thread's clock is a common vector, whose component for the thread itself is not looked at, and a number of its own.
 * After a barrier all threads share one vector, so that a barrier costs one vector and not one for each thread. A
 * second vector says what of this the asynchronous proxy has been told (fence.proxy.async). */
#include <stdlib.h>
#include <string.h>

#include "state.h"

enum { KEPT_MAX = 256 };
static struct clocks *kept[KEPT_MAX];
static unsigned num_kept;
static uint32_t kept_width;

uint32_t cluster_width(unsigned num_blocks, unsigned num_threads) { return num_blocks * (num_threads + NUM_AGENTS); }

uint32_t agent_component(const struct block *b, unsigned agent) {
    return b->cluster->num_blocks * b->num_threads + b->rank * NUM_AGENTS + agent;
}

/* Of the warp's loads of tensor memory, or of its stores. */
uint32_t tensor_component(const struct warp *w, unsigned stores) {
    return agent_component(w->block, AGENT_TENSOR + 2 * (w->number % TENSOR_WARPS) + stores);
}

struct clocks *clocks_make(uint32_t width) {
    struct clocks *c;
    if (width != kept_width) {
        while (num_kept)
            free(kept[--num_kept]);
        kept_width = width;
    }
    c = num_kept ? kept[--num_kept] : malloc(sizeof *c + (width + 16) * sizeof c->at[0]);
    c->references = 1;
    c->width = width;
    return c;
}
struct clocks *clocks_keep(struct clocks *c) {
    c->references++;
    return c;
}
void clocks_drop(struct clocks *c) {
    if (!c || --c->references)
        return;
    if (c->width == kept_width && num_kept < KEPT_MAX)
        kept[num_kept++] = c;
    else
        free(c);
}
void clocks_forget(void) {
    while (num_kept)
        free(kept[--num_kept]);
    kept_width = 0;
}

static uint32_t width_of(const struct thread *t) { return t->block->cluster->width; }

static struct clocks *copy_of(const struct clocks *from, uint32_t width) {
    struct clocks *to = clocks_make(width);
    memcpy(to->at, from->at, width * sizeof to->at[0]);
    return to;
}
/* The same vector, to be changed by its one owner. */
static struct clocks *own(struct clocks *c, uint32_t width) {
    if (c->references == 1)
        return c;
    struct clocks *mine = copy_of(c, width);
    c->references--;
    return mine;
}

static void join(struct clocks *restrict to, const struct clocks *restrict from, uint32_t width) {
    for (uint32_t i = 0; i < width; i++)
        to->at[i] = to->at[i] > from->at[i] ? to->at[i] : from->at[i];
}

static void add(struct clocks **sum, struct clocks **last, struct clocks *known, uint32_t component, uint32_t clock,
                uint32_t width) {
    if (!*sum) {
        *sum = copy_of(known, width);
    } else if (*last != known) {
        *sum = own(*sum, width);
        join(*sum, known, width);
    } else {
        *sum = own(*sum, width);
    }
    if (*last != known) {
        clocks_drop(*last);
        *last = clocks_keep(known);
    }
    if ((*sum)->at[component] < clock)
        (*sum)->at[component] = clock;
}

/* What the thread has done so far is known to whom the sum is given. */
void gather_add(struct gather *g, struct thread *t) {
    const uint32_t width = width_of(t);
    add(&g->sum, &g->last, t->known, t->component, t->clock, width);
    add(&g->proxy_sum, &g->proxy_last, t->proxy_known, t->component, t->proxy_clock, width);
    if (g->sum->at[t->warp->reads] < t->warp->sequence)
        g->sum->at[t->warp->reads] = t->warp->sequence;
    for (unsigned stores = 0; stores < 2; stores++)
        if (t->tensor_published[stores]) {
            uint32_t *at = &g->sum->at[tensor_component(t->warp, stores)];
            *at = *at > t->tensor_published[stores] ? *at : t->tensor_published[stores];
        }
    t->clock++;
}

/* What the thread knows of others alone. */
void gather_add_known(struct gather *g, struct thread *t) {
    const uint32_t width = width_of(t);
    add(&g->sum, &g->last, t->known, t->component, 0, width);
    add(&g->proxy_sum, &g->proxy_last, t->proxy_known, t->component, 0, width);
}

static void join_sums(struct clocks **to, struct clocks *from, uint32_t width) {
    if (!from)
        return;
    if (!*to) {
        *to = clocks_keep(from);
        return;
    }
    *to = own(*to, width);
    join(*to, from, width);
}
void gather_add_gather(struct gather *g, const struct gather *from, uint32_t width) {
    join_sums(&g->sum, from->sum, width);
    join_sums(&g->proxy_sum, from->proxy_sum, width);
}

/* A component of the sum, whatever came so far. */
void gather_set(struct gather *g, uint32_t component, uint32_t clock, uint32_t width) {
    struct clocks **sums[2] = {&g->sum, &g->proxy_sum};
    for (int i = 0; i < 2; i++) {
        if (!*sums[i]) {
            *sums[i] = clocks_make(width);
            memset((*sums[i])->at, 0, width * sizeof(uint32_t));
        }
        *sums[i] = own(*sums[i], width);
        if ((*sums[i])->at[component] < clock)
            (*sums[i])->at[component] = clock;
    }
}

static int covers(const struct clocks *a, const struct clocks *b, uint32_t width) {
    uint32_t more = 0;
    for (uint32_t i = 0; i < width; i++)
        more |= b->at[i] > a->at[i];
    return !more;
}

/* covered: a vector that is known to hold nothing newer than `from`, which most that come have too. */
static void take(struct clocks *from, struct clocks **covered, struct clocks **known, uint32_t width) {
    if (!from || from == *known)
        return;
    if ((covered && *covered == *known) || covers(from, *known, width)) {
        if (covered && *covered != *known) {
            clocks_drop(*covered);
            *covered = clocks_keep(*known);
        }
        clocks_drop(*known);
        *known = clocks_keep(from);
        return;
    }
    *known = own(*known, width);
    join(*known, from, width);
}
void gather_take(struct gather *g, struct thread *t) {
    take(g->sum, &g->covered, &t->known, width_of(t));
    take(g->proxy_sum, &g->proxy_covered, &t->proxy_known, width_of(t));
}

void gather_clear(struct gather *g) {
    clocks_drop(g->sum);
    clocks_drop(g->last);
    clocks_drop(g->proxy_sum);
    clocks_drop(g->proxy_last);
    clocks_drop(g->covered);
    clocks_drop(g->proxy_covered);
    *g = (struct gather){0};
}

/* Lanes that meet at __syncwarp. */
void clocks_join_warp(struct warp *w, unsigned mask) {
    struct gather g = {0};
    for (unsigned m = mask; m; m &= m - 1)
        gather_add(&g, &w->threads[__builtin_ctz(m)]);
    for (unsigned m = mask; m; m &= m - 1)
        gather_take(&g, &w->threads[__builtin_ctz(m)]);
    gather_clear(&g);
}

void clocks_learn(struct thread *t, uint32_t component, uint32_t clock) {
    const uint32_t width = width_of(t);
    if (t->known->at[component] < clock) {
        t->known = own(t->known, width);
        t->known->at[component] = clock;
    }
    if (t->proxy_known->at[component] < clock) {
        t->proxy_known = own(t->proxy_known, width);
        t->proxy_known->at[component] = clock;
    }
}

void clocks_fence_proxy(struct thread *t) {
    take(t->known, NULL, &t->proxy_known, width_of(t));
    t->proxy_clock = t->clock;
}
