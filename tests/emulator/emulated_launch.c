/* emulated_launch.c: grids of the stream, their clusters and blocks, and the memory of blocks.
 *
 * A launch waits until somebody wants its results or a launch comes that may not overlap it: so a programmatic launch
 * finds the one ahead of it still there. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "emulated_launch.h"
#include "state.h"

struct emulated emulated_settings_now;

/* ---- memory of blocks: made once for each slot, kept ---- */

static unsigned char *windows; /* of all slots */
static uint32_t next_serial = 1;

static void prepare_block(struct block *b, const struct cluster *c) {
    const size_t number = (size_t)c->slot * CLUSTER_MAX + b->rank;
    if (!windows)
        windows = mmap(NULL, (size_t)SLOTS_MAX * CLUSTER_MAX * 2 * WINDOW_BYTES, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    b->window = windows + number * 2 * WINDOW_BYTES; /* an unreadable half after it */
    mprotect(b->window, WINDOW_BYTES, PROT_READ | PROT_WRITE);
    b->threads = calloc(THREADS_MAX, sizeof *b->threads);
    b->words = calloc(WINDOW_BYTES / 4, sizeof *b->words);
}

int in_window(uintptr_t address) {
    return address - (uintptr_t)windows < (uintptr_t)SLOTS_MAX * CLUSTER_MAX * 2 * WINDOW_BYTES;
}

struct block *block_of_window(uintptr_t address) {
    if (!in_window(address))
        return NULL;
    const size_t number = (address - (uintptr_t)windows) / (2 * WINDOW_BYTES);
    return device.slots[number / CLUSTER_MAX].blocks[number % CLUSTER_MAX];
}

/* The readers of a word: a place for each warp of the cluster and for each of its agents. Large and seldom full, so the
 * pages are the system's, given when they are first written: MALLOC_PERTURB_, as Meson sets it, has malloc() and
 * calloc() write all of them, 11 GB. */
static size_t readers_bytes(unsigned slots) { return (size_t)WINDOW_BYTES / 4 * slots * sizeof(struct reader); }

static void prepare_readers(struct cluster *c, unsigned num_threads) {
    unsigned slots = c->num_blocks * ((num_threads + LANES - 1) / LANES + WARPGROUPS_MAX + 1);
    slots = slots < READERS_MAX ? slots : READERS_MAX;
    if (c->agent_slots != slots)
        for (unsigned r = 0; r < CLUSTER_MAX; r++)
            if (c->blocks[r] && c->blocks[r]->readers) {
                munmap(c->blocks[r]->readers, readers_bytes(c->agent_slots));
                c->blocks[r]->readers = NULL;
            }
    c->agent_slots = slots;
    for (unsigned r = 0; r < c->num_blocks; r++)
        if (!c->blocks[r]->readers)
            c->blocks[r]->readers = mmap(NULL, readers_bytes(slots), PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/* ---- clusters ---- */

static void begin_thread(struct block *b, unsigned number, struct grid *g) {
    struct thread *t = &b->threads[number];
    struct copy *copies = t->copies;
    const uint32_t max_copies = t->max_copies;
    memset(t, 0, sizeof *t);
    t->copies = copies;
    t->max_copies = max_copies;
    const struct emu_dim s = g->block_size;
    t->index = (struct emu_dim){number % s.x, number / s.x % s.y, number / s.x / s.y};
    t->number = number;
    t->lane = number % LANES;
    t->block = b;
    t->warp = &b->warps[number / LANES];
    t->component = b->rank * b->num_threads + number;
    t->clock = 1;
    t->known = clocks_keep(b->cluster->beginning);
    t->proxy_known = clocks_keep(b->cluster->beginning);
    t->tensor_known = clocks_keep(b->cluster->beginning);
}

static void begin_warps(struct block *b, struct grid *g) {
    const int least = g->kernel->bounds[0] && g->kernel->bounds[1] ? g->kernel->bounds[1] : 1;
    const int registers = 65536 / least / (int)(b->num_warps * LANES) / 8 * 8;
    b->registers_free = 0;
    for (unsigned w = 0; w < b->num_warps; w++) {
        struct warp *warp = &b->warps[w];
        memset(warp, 0, sizeof *warp);
        const unsigned lanes = b->num_threads - w * LANES < LANES ? b->num_threads - w * LANES : LANES;
        warp->block = b;
        warp->threads = &b->threads[w * LANES];
        warp->number = w;
        warp->reads = agent_component(b, AGENT_READS + w);
        warp->exists = warp->live = lanes == LANES ? ~0u : (1u << lanes) - 1;
        warp->place_in_list = -1;
        warp->registers = registers > 255 ? 255 / 8 * 8 : registers;
    }
}

static void begin_block(struct cluster *c, unsigned rank, struct grid *g, uint64_t first) {
    struct block *b = c->blocks[rank];
    const uint64_t number = first + rank;
    b->cluster = c;
    b->index = (struct emu_dim){(unsigned)(number % g->size[0]), (unsigned)(number / g->size[0] % g->size[1]),
                                (unsigned)(number / g->size[0] / g->size[1])};
    b->num_threads = b->live = g->threads;
    b->num_warps = (g->threads + LANES - 1) / LANES;
    b->started = 1;
    b->serial = next_serial++;
    b->dependents_launched = 0;
    b->knowledge = knowledge_begin(b->knowledge);
    b->static_begin = (RESERVED_BYTES + g->shared_bytes + 127) / 128 * 128;
    if (g->shared_bytes)
        b->static_begin += 128; /* a gap that belongs to nobody */
    memset(b->window, 0xff, b->static_begin + 65536 < WINDOW_BYTES ? b->static_begin + 65536 : WINDOW_BYTES);
    for (int i = 0; i < BARRIERS_MAX; i++)
        gather_clear(&b->barriers[i].gather);
    memset(b->barriers, 0, sizeof b->barriers);
    for (unsigned i = 0; i < b->num_mbarriers; i++) {
        gather_clear(&b->mbarriers[i].now);
        gather_clear(&b->mbarriers[i].done);
    }
    memset(b->mbarriers, 0, sizeof b->mbarriers);
    b->num_mbarriers = 0;
    b->bulk_component = agent_component(b, AGENT_BULK);
    b->bulk_ticks = 1;
    tensor_block_begins(b);
    begin_warps(b, g);
    for (unsigned i = 0; i < b->num_threads; i++)
        begin_thread(b, i, g);
}

static void begin_cluster(struct cluster *c, struct grid *g) {
    const unsigned blocks = g->cluster ? g->cluster : 1;
    static uint64_t clusters;
    c->grid = g;
    c->active = 1;
    c->number = ++clusters;
    c->num_blocks = c->live = blocks;
    c->arrived = c->phase = 0;
    c->dependents_counted = 0;
    c->cancel_failed = 0;
    gather_clear(&c->gather);
    for (unsigned r = 0; r < blocks; r++)
        if (!c->blocks[r]) {
            c->blocks[r] = calloc(1, sizeof *c->blocks[r]);
            c->blocks[r]->rank = r;
            prepare_block(c->blocks[r], c);
        }
    prepare_readers(c, g->threads);
    const uint32_t width = cluster_width(blocks, g->threads);
    c->width = width;
    clocks_drop(c->beginning);
    c->beginning = clocks_make(width);
    memset(c->beginning->at, 0, width * sizeof(uint32_t));
    const uint64_t first = g->next_cluster++ * blocks;
    for (unsigned r = 0; r < blocks; r++)
        begin_block(c, r, g, first);
    for (unsigned r = 0; r < blocks; r++)
        for (unsigned i = 0; i < c->blocks[r]->num_threads; i++)
            thread_start(&c->blocks[r]->threads[i]);
}

/* ---- grids ---- */

static int may_begin(const struct grid *g) {
    if (!g->before)
        return 1;
    const struct grid *b = g->before;
    return b->ended || (g->programmatic && b->next_cluster == b->num_clusters && b->dependents == b->num_clusters);
}

static int slots_wanted; /* of this run */

static struct cluster *free_slot(int slots) {
    for (int i = 0; i < slots; i++)
        if (!device.slots[i].active)
            return &device.slots[i];
    return NULL;
}

/* The grid that the next cluster is taken from: the oldest with some left, or one that may overlap it. */
static struct grid *next_grid(void) {
    for (struct grid *g = device.first; g; g = g->next)
        if (g->next_cluster < g->num_clusters)
            return may_begin(g) ? g : NULL;
    return NULL;
}

int start_clusters(void) {
    int started = 0;
    struct grid *g;
    struct cluster *c;
    while (!device.failed && (g = next_grid()) &&
           (c = free_slot(g->programmatic || g->cooperative ? SLOTS_MAX : slots_wanted))) {
        if (!g->begun)
            g->first_serial = next_serial;
        g->begun = 1;
        begin_cluster(c, g);
        started = 1;
    }
    return started;
}

static void end_threads(struct block *b) {
    for (unsigned i = 0; i < b->num_threads; i++) {
        clocks_drop(b->threads[i].known);
        clocks_drop(b->threads[i].proxy_known);
        clocks_drop(b->threads[i].tensor_known);
        b->threads[i].tensor_known = NULL;
    }
}

/* A grid's successor waits for the first arrival of every block, or its end. */
static void count_dependents(struct cluster *c) {
    unsigned launched = 0;
    if (c->dependents_counted)
        return;
    for (unsigned r = 0; r < c->num_blocks; r++)
        launched += c->blocks[r]->dependents_launched || c->blocks[r]->live == 0;
    if (launched == c->num_blocks) {
        c->grid->dependents++;
        c->dependents_counted = 1;
    }
}
void emu_launch_dependents(EMU_PLACE) {
    struct block *b = CURRENT->block;
    (void)emu_file, (void)emu_line;
    if (!b->dependents_launched) {
        b->dependents_launched = 1;
        count_dependents(b->cluster);
        progress();
        if (emulated_settings_now.mode == EMULATED_EARLY || chance(2))
            start_clusters();
    }
    yield_warp();
}

void emu_grid_wait(EMU_PLACE) {
    const struct grid *g = CURRENT->block->cluster->grid;
    for (const struct grid *b = g->before; b && !b->ended;)
        wait_for("griddepcontrol.wait: the grid before has not ended", 0, 0, HERE);
}

static void wake_dependents(const struct grid *ended) {
    for (unsigned s = 0; s < SLOTS_MAX; s++)
        for (unsigned r = 0;
             device.slots[s].active && device.slots[s].grid->before == ended && r < device.slots[s].num_blocks; r++)
            for (unsigned i = 0; i < device.slots[s].blocks[r]->num_threads; i++) {
                struct thread *t = &device.slots[s].blocks[r]->threads[i];
                if (t->wait.what && strncmp(t->wait.what, "griddep", 7) == 0)
                    wake(t);
            }
}

static void end_cluster(struct cluster *c) {
    struct grid *g = c->grid;
    c->active = 0;
    if (++g->clusters_ended == g->num_clusters) {
        g->ended = 1;
        wake_dependents(g);
    }
    events_of_cluster_ended(c);
    for (unsigned r = 0; r < c->num_blocks; r++)
        end_threads(c->blocks[r]);
    start_clusters();
}

void block_thread_ended(struct thread *t) {
    struct block *b = t->block;
    b->live--;
    barrier_release_ended(b);
    cluster_barrier_check(b->cluster);
    if (b->live == 0) {
        wgmma_block_ended(b);
        tensor_block_ended(b);
        count_dependents(b->cluster);
        if (--b->cluster->live == 0)
            end_cluster(b->cluster);
    }
}

/* ---- the stream ---- */

double emulated_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void forget_grids(void) {
    while (device.first) {
        struct grid *g = device.first;
        device.first = g->next;
        for (int i = 0; i < 8; i++)
            free(g->parameters[i]);
        free(g);
    }
    device.last = NULL;
}

/* After a failure: nothing lives any more. */
static void give_up(void) {
    events_forget();
    for (unsigned i = 0; i < SLOTS_MAX; i++) {
        struct cluster *c = &device.slots[i];
        for (unsigned r = 0; c->active && r < c->num_blocks; r++) {
            wgmma_block_ended(c->blocks[r]);
            end_threads(c->blocks[r]);
        }
        c->active = 0;
        c->beginning = NULL;
    }
    device.num_runnable = 0;
}

static uint64_t runs; /* with this seed */
void emulated_begin(void) { runs = 0; }

/* Runs what is enqueued. 0, or 719 where the text was at fault. */
int emulated_run(void) {
    if (!device.first)
        return 0;
    const int64_t findings = device.findings;
    const double from = emulated_seconds();
    emulated_settings_now = emulated;
    device.random = (emulated.seed + ++runs * 0x9e3779b97f4a7c15ull) | 1;
    for (int i = 0; i < 8; i++)
        random_below(2);
    device.failed = 0;
    device.idle = device.steps = 0;
    slots_wanted = 1 + (int)random_below(SLOTS_USUAL);
    for (unsigned i = 0; i < SLOTS_MAX; i++)
        device.slots[i].slot = i;
    schedule();
    if (device.failed)
        give_up();
    if (emulated.trace)
        for (const struct grid *g = device.first; g; g = g->next)
            fprintf(stderr, "emulated: %s grid %ux%ux%u of %u threads, %.1f ms, %llu switches, %d clusters at once\n",
                    g->kernel->name, g->size[0], g->size[1], g->size[2], g->threads, (emulated_seconds() - from) * 1e3,
                    (unsigned long long)device.steps, slots_wanted);
    if (emulated.banks)
        banks_report();
    forget_grids();
    global_releases_forget();
    enum { LAUNCH_FAILED = 719 };
    return device.failed || device.findings > findings ? LAUNCH_FAILED : 0;
}

int emulated_enqueue(const struct emulated_launch *l) {
    enum { COOPERATIVE_LAUNCH_TOO_LARGE = 720 };
    int result = 0;
    if (l->cooperative &&
        (uint64_t)l->grid[0] * l->grid[1] * l->grid[2] > SLOTS_MAX * (uint64_t)(l->cluster + !l->cluster))
        return COOPERATIVE_LAUNCH_TOO_LARGE;
    if (device.first && !l->programmatic)
        result = emulated_run();
    struct grid *g = calloc(1, sizeof *g);
    g->kernel = l->kernel;
    memcpy(g->size, l->grid, sizeof g->size);
    g->block_size = (struct emu_dim){l->block[0], l->block[1], l->block[2]};
    g->threads = l->block[0] * l->block[1] * l->block[2];
    g->cluster = l->cluster;
    g->shared_bytes = l->shared_bytes;
    g->limit_bytes = l->limit_bytes;
    g->programmatic = l->programmatic;
    g->cooperative = l->cooperative;
    g->num_clusters = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2] / (l->cluster ? l->cluster : 1);
    g->before = device.last;
    for (int i = 0; i < 8 && l->kernel->sizes[i]; i++) {
        const size_t bytes = (l->kernel->sizes[i] + 127) / 128 * 128;
        g->parameters[i] = aligned_alloc(128, bytes);
        memcpy(g->parameters[i], l->parameters[i], l->kernel->sizes[i]);
    }
    if (device.last)
        device.last->next = g;
    else
        device.first = g;
    device.last = g;
    return result;
}
