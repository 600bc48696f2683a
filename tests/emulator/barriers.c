/* barriers.c: barriers of a block, by number, and of a cluster. */
#include <string.h>

#include "emulated_launch.h"
#include "state.h"

static const char *const at_barrier = "a barrier of the block";
static const char *const at_cluster = "barrier.cluster.wait";

static void join(struct gather *g, struct thread *t) {
    if (emulated_settings_now.check)
        gather_add(g, t);
}

static void complete(struct block *b, unsigned number) {
    struct barrier *bar = &b->barriers[number];
    bar->result = bar->value;
    bar->generation++;
    bar->arrived = 0;
    progress();
    for (unsigned i = 0; i < b->num_threads; i++) {
        struct thread *t = &b->threads[i];
        if (t->wait.what != at_barrier || t->wait.object != number)
            continue;
        t->result = bar->result;
        if (emulated_settings_now.check)
            gather_take(&bar->gather, t);
        wake(t);
    }
}

/* One thread comes; 1: it was the last one. */
static int come(struct block *b, unsigned number, unsigned expected, int kind, int value, place at) {
    struct thread *t = CURRENT;
    struct barrier *bar = &b->barriers[number % BARRIERS_MAX];
    struct warp *w = t->warp;
    shadow_settle(t);
    if (number >= BARRIERS_MAX || expected % LANES || expected > (b->num_threads + LANES - 1) / LANES * LANES) {
        finding("wrong barrier", at, "barrier %u of %u threads in a block of %u", number, expected, b->num_threads);
        thread_fail();
    }
    if (bar->arrived == 0) {
        bar->expected = expected;
        bar->kind = kind;
        bar->value = kind == EMU_AND;
        gather_clear(&bar->gather);
    } else if (bar->expected != expected) {
        finding("wrong barrier", at, "barrier %u is asked to wait for %u threads, but those before said %u", number,
                expected, bar->expected);
    }
    if (w->barrier_line[number].generation == bar->generation + 1 && w->barrier_line[number].at != at)
        finding("divergence", at, "a lane of warp %u comes to barrier %u here, others of the warp at %s", w->number,
                number, place_text(w->barrier_line[number].at));
    w->barrier_line[number].generation = bar->generation + 1;
    w->barrier_line[number].at = at;
    bar->value = kind == EMU_OR ? bar->value || value : kind == EMU_AND ? bar->value && value : bar->value + !!value;
    join(&bar->gather, t);
    return ++bar->arrived >= bar->expected;
}

static int sync(unsigned number, unsigned expected, int kind, int value, place at) {
    struct thread *t = CURRENT;
    struct block *b = t->block;
    if (come(b, number, expected, kind, value, at)) {
        struct barrier *bar = &b->barriers[number];
        complete(b, number);
        t->result = bar->result;
        if (emulated_settings_now.check)
            gather_take(&bar->gather, t);
        yield_warp();
    } else {
        wait_for(at_barrier, number, expected, at);
    }
    return t->result;
}

static unsigned all_threads(const struct block *b) { return (b->num_threads + LANES - 1) / LANES * LANES; }

int emu_syncthreads(int kind, int value, EMU_PLACE) {
    struct block *b = CURRENT->block;
    struct barrier *bar = &b->barriers[0];
    /* threads that have ended, and those of a last warp that is not whole, do not count */
    const unsigned missing = all_threads(b) - b->live;
    if (bar->arrived == 0 && missing) {
        const int first = come(b, 0, all_threads(b), kind, value, HERE);
        bar->arrived += missing;
        if (first || bar->arrived >= bar->expected) {
            complete(b, 0);
            CURRENT->result = bar->result;
            return bar->result;
        }
        wait_for(at_barrier, 0, all_threads(b), HERE);
        return CURRENT->result;
    }
    return sync(0, all_threads(b), kind, value, HERE);
}

int emu_barrier_sync(unsigned barrier, unsigned threads, int kind, int value, EMU_PLACE) {
    return sync(barrier, threads, kind, value, HERE);
}

void emu_barrier_arrive(unsigned barrier, unsigned threads, EMU_PLACE) {
    struct block *b = CURRENT->block;
    if (come(b, barrier, threads, EMU_OR, 0, HERE))
        complete(b, barrier);
    yield_warp();
}

/* A thread has ended: barrier 0 no longer waits for it. */
void barrier_release_ended(struct block *b) {
    struct barrier *bar = &b->barriers[0];
    if (bar->arrived > 0 && ++bar->arrived >= bar->expected)
        complete(b, 0);
}

/* ---- clusters ---- */

static unsigned live_threads(const struct cluster *c) {
    unsigned live = 0;
    for (unsigned r = 0; r < c->num_blocks; r++)
        live += c->blocks[r]->live;
    return live;
}

/* Threads that have ended count as arrived. */
void cluster_barrier_check(struct cluster *c) {
    if (c->arrived == 0 || c->arrived < live_threads(c))
        return;
    mbarrier_remote_arrivals(c);
    c->arrived = 0;
    c->phase++;
    progress();
    for (unsigned r = 0; r < c->num_blocks; r++)
        for (unsigned i = 0; i < c->blocks[r]->num_threads; i++) {
            struct thread *t = &c->blocks[r]->threads[i];
            if (t->wait.what == at_cluster && t->cluster_phase != c->phase)
                wake(t);
        }
}

void emu_cluster_arrive(EMU_PLACE) {
    struct thread *t = CURRENT;
    struct cluster *c = t->block->cluster;
    shadow_settle(t);
    if (t->cluster_arrived) {
        finding("wrong barrier", HERE, "barrier.cluster.arrive twice without a wait");
        thread_fail();
    }
    t->cluster_arrived = 1;
    t->cluster_phase = c->phase;
    if (c->arrived == 0)
        gather_clear(&c->gather);
    join(&c->gather, t);
    c->arrived++;
    cluster_barrier_check(c);
    yield_warp();
}

void emu_cluster_wait(EMU_PLACE) {
    struct thread *t = CURRENT;
    struct cluster *c = t->block->cluster;
    if (!t->cluster_arrived) {
        finding("wrong barrier", HERE, "barrier.cluster.wait without an arrive");
        thread_fail();
    }
    while (t->cluster_phase == c->phase)
        wait_for(at_cluster, 0, c->phase, HERE);
    t->cluster_arrived = 0;
    if (emulated_settings_now.check)
        gather_take(&c->gather, t);
}
