/* scheduler.c: which thread goes on: lanes of one warp in turn, then a random warp; and what it means that none can.
 *
 * One thread of the host runs the whole device, so that one seed replays everything. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulated_launch.h"
#include "state.h"

enum { STACK_BYTES = 128 << 10, STACKS_MAX = SLOTS_MAX * CLUSTER_MAX * THREADS_MAX / 2, COLOUR = 1088, COLOURS = 15 };
enum { HOP = 16, IDLE_EVENT = 2000, IDLE_MAX = 400000 };
static const uint64_t CANARY = 0x6b6e617274735f65ull;

struct device_state device;

struct emu_dim emu_thread_index(void) {
    return CURRENT->index;
}
struct emu_dim emu_block_index(void) {
    return CURRENT->block->index;
}
struct emu_dim emu_block_size(void) {
    return CURRENT->block->cluster->grid->block_size;
}
struct emu_dim emu_grid_size(void) {
    const unsigned *size = CURRENT->block->cluster->grid->size;
    return (struct emu_dim){size[0], size[1], size[2]};
}
unsigned emu_cluster_rank(void) { return CURRENT->block->rank; }
unsigned emu_cluster_size(void) { return CURRENT->block->cluster->num_blocks; }

uint32_t random_below(uint32_t n) {
    uint64_t x = device.random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    device.random = x;
    return (uint32_t)((x * 0x2545f4914f6cdd1dull >> 32) * n >> 32);
}
int chance(uint32_t one_in) { return random_below(one_in) == 0; }
void progress(void) { device.idle = 0; }

/* ---- the list of warps that have a runnable lane ---- */

static void list_add(struct warp *w) {
    if (device.num_runnable == device.max_runnable) {
        device.max_runnable = 2 * device.max_runnable + 64;
        device.runnable = realloc(device.runnable, device.max_runnable * sizeof *device.runnable);
    }
    w->place_in_list = (int)device.num_runnable;
    device.runnable[device.num_runnable++] = w;
}
static void list_remove(struct warp *w) {
    struct warp *last = device.runnable[--device.num_runnable];
    device.runnable[w->place_in_list] = last;
    last->place_in_list = w->place_in_list;
    w->place_in_list = -1;
}
static void make_runnable(struct thread *t) {
    if (!t->warp->runnable)
        list_add(t->warp);
    t->warp->runnable |= 1u << t->lane;
}
static void make_idle(struct thread *t) {
    t->warp->runnable &= ~(1u << t->lane);
    if (!t->warp->runnable && t->warp->place_in_list >= 0)
        list_remove(t->warp);
}

void wake(struct thread *t) {
    t->wait.what = NULL;
    progress();
    make_runnable(t);
}

/* ---- switching ---- */

static struct thread *pick(struct warp *prefer) {
    for (;;) {
        if (device.failed)
            return NULL;
        event_maybe();
        if (device.num_runnable == 0) {
            if (start_clusters() || event_happen())
                continue;
            for (unsigned i = 0; i < SLOTS_MAX; i++)
                if (device.slots[i].active) {
                    deadlock_report();
                    device.failed = 1;
                    break;
                }
            return NULL;
        }
        struct warp *w = prefer && prefer->runnable ? prefer : device.runnable[random_below(device.num_runnable)];
        return &w->threads[__builtin_ctz(w->runnable)];
    }
}

static void go_to(void **save, struct thread *next) {
    device.steps++;
    device.current = next;
    emu_stack_switch(save, next ? next->stack_pointer : device.host_stack);
}

static void switch_from(struct thread *t, struct warp *prefer) {
    struct thread *next = pick(prefer);
    if (next != t)
        go_to(&t->stack_pointer, next);
}

void schedule(void) {
    struct thread *next = pick(NULL);
    if (next)
        go_to(&device.host_stack, next);
    device.current = NULL;
}

void wait_for(const char *what, uint32_t object, uint32_t detail, place at) {
    struct thread *t = CURRENT;
    shadow_settle(t);
    t->wait.what = what;
    t->wait.object = object;
    t->wait.detail = detail;
    t->wait.at = at;
    make_idle(t);
    switch_from(t, t->warp);
}

void yield_warp(void) {
    if (chance(HOP)) {
        shadow_settle(CURRENT);
        switch_from(CURRENT, NULL);
    }
}

void yield_at_access(void) {
    enum { ONE_IN = 8 };
    if (emulated_settings_now.switches && chance(ONE_IN)) {
        shadow_settle(CURRENT);
        switch_from(CURRENT, NULL);
    }
}

void poll(place at) {
    struct thread *t = CURRENT;
    shadow_settle(t);
    if (++device.idle % IDLE_EVENT == 0)
        event_happen();
    if (device.idle > IDLE_MAX) {
        t->wait.what = "asks again and again";
        t->wait.at = at;
        deadlock_report();
        thread_fail();
    }
    const unsigned later = t->warp->runnable & ~((2u << t->lane) - 1); /* what they do may be what it waits for */
    if (later)
        go_to(&t->stack_pointer, &t->warp->threads[__builtin_ctz(later)]);
    else
        switch_from(t, NULL);
}

/* ---- threads ---- */

static unsigned char *stacks;

static void thread_main(void) {
    struct thread *t = CURRENT;
    struct grid *g = t->block->cluster->grid;
    void *parameters[sizeof g->parameters / sizeof g->parameters[0]]; /* on its own stack, which it may read */
    memcpy(parameters, g->parameters, sizeof parameters);
    g->kernel->enter(parameters);
    thread_end();
}

void thread_start(struct thread *t) {
    if (!stacks)
        stacks = mmap(NULL, (size_t)STACKS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct cluster *c = t->block->cluster;
    const size_t number =
        ((size_t)c->slot * (STACKS_MAX / SLOTS_MAX) + (size_t)t->block->rank * t->block->num_threads + t->number);
    t->stack = stacks + number * STACK_BYTES;
    memcpy(t->stack, &CANARY, sizeof CANARY);
    uintptr_t top = (uintptr_t)t->stack + STACK_BYTES - 64 - number % COLOURS * COLOUR;
    top &= ~(uintptr_t)63;
#if defined(__x86_64__)
    uintptr_t *frame = (uintptr_t *)(top - 8); /* as after a call */
    *frame = 0;
    *--frame = (uintptr_t)thread_main;
    for (int i = 0; i < 6; i++)
        *--frame = 0;
#elif defined(__aarch64__)
    uintptr_t *frame = (uintptr_t *)(top - 160);
    memset(frame, 0, 160);
    frame[11] = (uintptr_t)thread_main;
#else
#    error "no stack switch for this processor"
#endif
    t->stack_pointer = frame;
    make_runnable(t);
}

int on_a_stack(uintptr_t address) { return address - (uintptr_t)stacks < (uintptr_t)STACKS_MAX * STACK_BYTES; }

_Noreturn void thread_end(void) {
    struct thread *t = CURRENT;
    uint64_t canary;
    memcpy(&canary, t->stack, sizeof canary);
    if (canary != CANARY)
        finding("stack overrun", 0, "the thread's stack of %d bytes was too small", STACK_BYTES);
    shadow_settle(t);
    t->ended = 1;
    progress();
    copies_thread_ended(t);
    wgmma_thread_ended(t);
    make_idle(t);
    struct warp *w = t->warp;
    w->live &= ~(1u << t->lane);
    warp_lane_ended(t);
    block_thread_ended(t);
    void *nowhere;
    go_to(&nowhere, pick(w->block->live ? w : NULL));
    abort();
}

_Noreturn void thread_fail(void) {
    void *nowhere;
    device.failed = 1;
    go_to(&nowhere, NULL);
    abort();
}

void emu_exit(EMU_PLACE) {
    (void)emu_file, (void)emu_line;
    thread_end();
}

void emu_trap(EMU_PLACE) {
    finding("trap", HERE, "the kernel stopped itself");
    thread_fail();
}

long long emu_clock(void) {
    device.clock += 10;
    yield_warp();
    return device.clock;
}

/* ---- nothing can go on ---- */

enum { GROUPS_MAX = 24 };
struct waiters {
    const struct thread *first;
    unsigned count;
};

static int same_wait(const struct thread *a, const struct thread *b) {
    return a->wait.what == b->wait.what && a->wait.object == b->wait.object && a->wait.detail == b->wait.detail &&
           a->wait.at == b->wait.at && a->block == b->block;
}

static void describe_barriers(const struct block *b) {
    for (unsigned i = 0; i < b->num_mbarriers; i++) {
        const struct mbarrier *m = &b->mbarriers[i];
        if (m->offset)
            fprintf(
                stderr,
                "  mbarrier at offset %u of block (%u,%u,%u): phase %u (parity %u), %u of %u arrivals missing, %lld "
                "bytes missing\n",
                m->offset - RESERVED_BYTES, b->index.x, b->index.y, b->index.z, m->phase, m->phase & 1, m->pending,
                m->count, (long long)m->bytes);
    }
}

static void describe_group(const struct waiters *w) {
    const struct thread *t = w->first;
    char detail[96] = "";
    if (t->wait.object)
        snprintf(detail, sizeof detail, " (object %u, detail %u)", t->wait.object, t->wait.detail);
    fprintf(stderr, "  %u thread%s from %s: %s%s at %s\n", w->count, w->count > 1 ? "s" : "", thread_text(t),
            t->wait.what ? t->wait.what : "could run", detail, place_text(t->wait.at));
}

void deadlock_report(void) {
    static struct waiters groups[GROUPS_MAX];
    unsigned num_groups = 0, rest = 0;
    const struct thread *first = NULL;
    for (unsigned s = 0; s < SLOTS_MAX; s++)
        for (unsigned r = 0; device.slots[s].active && r < device.slots[s].num_blocks; r++)
            for (unsigned i = 0; i < device.slots[s].blocks[r]->num_threads; i++) {
                const struct thread *t = &device.slots[s].blocks[r]->threads[i];
                unsigned g = 0;
                if (t->ended)
                    continue;
                first = first ? first : t;
                while (g < num_groups && !same_wait(groups[g].first, t))
                    g++;
                if (g == num_groups && num_groups < GROUPS_MAX)
                    groups[num_groups++] = (struct waiters){t, 0};
                g < num_groups ? groups[g].count++ : rest++;
            }
    finding("deadlock", first ? first->wait.at : 0, "no thread can go on: %u groups wait, the first %s", num_groups,
            first && first->wait.what ? first->wait.what : "for nothing");
    if (emulated_quiet())
        return;
    for (unsigned g = 0; g < num_groups; g++)
        describe_group(&groups[g]);
    if (rest)
        fprintf(stderr, "  and %u threads more\n", rest);
    for (unsigned s = 0; s < SLOTS_MAX; s++)
        for (unsigned r = 0; device.slots[s].active && r < device.slots[s].num_blocks; r++)
            describe_barriers(device.slots[s].blocks[r]);
}
