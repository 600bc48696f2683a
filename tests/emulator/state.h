/* state.h: what the files of the emulated device share: threads, warps, blocks, clusters, grids, clocks. */
#ifndef FDM_EMULATOR_STATE_H
#define FDM_EMULATOR_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "emulated_settings.h"
#include "emulator.h"

enum {
    LANES = 32,
    CLUSTER_MAX = 16,
    THREADS_MAX = 1024,
    WARPS_MAX = THREADS_MAX / LANES,
    SLOTS_USUAL = 4,        /* clusters of a grid that live at once, at most */
    SLOTS_MAX = 8,          /* and with those of a programmatic launch, or of a cooperative one */
    MBARRIERS_MAX = 64,     /* of a block */
    BARRIERS_MAX = 16,      /* named ones of a block; 0 is that of __syncthreads() */
    RESERVED_BYTES = 1024,  /* of a block's window that are not the kernel's */
    WINDOW_BYTES = 1 << 18, /* of a block */
    WARPGROUPS_MAX = WARPS_MAX / 4,
    READERS_MAX = 64,  /* that a word of shared memory knows apart */
    TENSOR_WARPS = 16, /* of a block, at most, where there is tensor memory */
    /* A block's components past its threads: mbarriers, products, copies from shared memory, what warps have read, and
     * their loads and their stores of tensor memory. */
    AGENT_PRODUCTS = MBARRIERS_MAX,
    AGENT_BULK = AGENT_PRODUCTS + WARPS_MAX, /* of products one for each warp: it waits for its own part alone */
    AGENT_READS = AGENT_BULK + 1,
    AGENT_TENSOR = AGENT_READS + WARPS_MAX,
    NUM_AGENTS = AGENT_TENSOR + 2 * TENSOR_WARPS
};

enum { FOUR_PARTS = 16 };

typedef uint32_t place; /* of a line of a kernel's text, or of an instruction */

/* ---- clocks: who knows what of whom ----
 *
 * A component for each thread of a cluster, each mbarrier (bytes that TMA brings), each warpgroup's
 * products, and each block's copies from shared memory. */
struct clocks {
    uint32_t references, width;
    uint32_t at[];
};
/* What joins clocks: the sum of those who came, and what was added last. */
struct gather {
    struct clocks *sum, *last, *covered, *proxy_sum, *proxy_last, *proxy_covered;
};
/* Who touches memory. */
struct actor {
    uint32_t component, clock, proxy_clock;
    const struct clocks *known, *proxy;
    struct thread *thread; /* NULL: an asynchronous agent */
    unsigned slot;         /* of a reader: the cluster's warp, or past them an agent */
    uint32_t sequence, reads;
    int four; /* an agent whose parts are `component` and the three after it */
};

/* ---- threads ---- */

struct copy {
    uint32_t shared, bytes, size, group, clock;
    const unsigned char *global;
    place at;
    int moved;   /* the bytes are there */
    int arrives; /* at an mbarrier, which tells of it as of the time when it was asked for */
};
struct thread {
    struct emu_dim index; /* in the block */
    void *stack_pointer;
    unsigned char *stack; /* lowest address */
    struct warp *warp;
    struct block *block;
    unsigned number, lane; /* of the block; of the warp */
    int ended;
    struct {
        const char *what; /* NULL: runs or may run */
        uint32_t object, detail;
        place at;
    } wait;
    /* clocks */
    uint32_t component, clock, proxy_clock;
    struct clocks *known, *proxy_known;
    /* tensor memory: what was known at the last tcgen05.fence::after_thread_sync, and the loads and stores of the warp
     * that were complete at the last ::before_thread_sync */
    struct clocks *tensor_known;
    uint32_t tensor_published[2];
    /* cp.async */
    struct copy *copies;
    uint32_t num_copies, max_copies, copy_group;
    /* bulk copies from shared memory */
    uint32_t bulk_group, bulk_ticks[32];
    /* barriers */
    uint32_t cluster_phase;
    int cluster_arrived, result;
    uint32_t warpgroup_round;
    /* a plain write over somebody's bytes: told when it has changed them */
    struct {
        const char *kind;
        unsigned char *memory; /* NULL: nothing is suspected */
        uint32_t bytes;
        unsigned char before[16];
        char text[300];
        place at;
    } suspect;
};

struct meeting {
    int operation;
    unsigned mask, arrived;
    place at;
    void *operands[LANES];
};
struct warp {
    struct block *block;
    struct thread *threads; /* of lane 0 */
    unsigned number, exists, live, runnable;
    int place_in_list; /* of runnable warps; -1 = not there */
    int num_meetings;
    struct meeting meetings[8];
    uint32_t sequence, reads; /* instructions of the whole warp so far; the component that tells of them */
    /* wgmma */
    uint32_t commits, waited_group;
    uint32_t group_end[64];
    uint32_t products_done;
    int fenced; /* since the last product was waited for */
    int registers;
    /* loads and stores of tensor memory */
    uint32_t tensor_issued[2], tensor_waited[2];
    int tensor_pending, tensor_waits;
    struct {
        uint32_t generation;
        place at;
    } barrier_line[BARRIERS_MAX];
};

/* ---- barriers ---- */

struct barrier {
    uint32_t expected, arrived, generation;
    int kind, value, result;
    struct gather gather;
};
struct mbarrier {
    uint32_t offset; /* 0: none */
    uint32_t count, pending, phase;
    int64_t bytes; /* announced and not yet there */
    int fenced;
    uint32_t component, ticks;
    struct gather now, done;
    uint32_t initialiser, initialised_clock;
    place initialised_at;
};

/* ---- shared memory as the shadow knows it, four bytes at a time ---- */

struct reader {
    uint32_t clock, sequence;         /* of its warp; ~0: of no warp */
    uint16_t reads, component, bytes; /* bytes: and FOUR_PARTS */
    place at;
};
struct word {
    uint32_t serial; /* of the block that it was last touched by */
    uint32_t write_clock, writer;
    place written_at, flight_at;
    uint8_t written, last_bytes, in_flight, plain; /* bytes; plain: not by TMA */
    uint16_t marked;                               /* 1 + the mbarrier that lies here */
    uint64_t readers;
};

struct block {
    struct cluster *cluster;
    struct emu_dim index;
    unsigned rank, num_threads, live, started;
    struct thread *threads;
    struct warp warps[WARPS_MAX];
    unsigned num_warps;
    unsigned char *window; /* address 0 of the block's shared memory */
    struct word *words;
    struct reader *readers;
    uint32_t serial, static_begin;
    struct block_knowledge *knowledge; /* of other blocks, in global memory */
    struct barrier barriers[BARRIERS_MAX];
    struct mbarrier mbarriers[MBARRIERS_MAX];
    unsigned num_mbarriers;
    struct warpgroup *warpgroups[WARPGROUPS_MAX];
    uint32_t bulk_component, bulk_ticks;
    int registers_free;
    int dependents_launched;
    struct tensor *tensor; /* NULL: was never used */
};
struct cluster {
    struct grid *grid;
    int active, dependents_counted;
    unsigned slot, num_blocks, live;
    uint64_t number;
    struct clocks *beginning;
    struct block *blocks[CLUSTER_MAX];
    uint32_t width, arrived, phase;
    struct gather gather;
    unsigned agent_slots;
    int cancel_failed; /* somebody has seen that there are no more clusters */
};

/* A kernel of a loaded module. */
struct kernel {
    char name[96];
    void (*enter)(void **parameters);
    const unsigned long *sizes; /* of its parameters, ended by 0 */
    const int *bounds;          /* threads, blocks; 0 where not said */
    const char *file;           /* of the module, for addr2line */
    uintptr_t base, end;
    unsigned num_statics;
    struct {
        const void *key;
        uint32_t offset, bytes;
    } statics[16];
    uint32_t statics_end;
};
struct grid {
    struct grid *next;
    struct kernel *kernel;
    void *parameters[8];
    unsigned size[3], threads, cluster, shared_bytes, limit_bytes;
    struct emu_dim block_size;
    int programmatic, cooperative, arch;
    uint64_t num_clusters, next_cluster, clusters_ended, dependents, blocks_ended;
    int begun, ended;
    int tensor_group;      /* .cta_group of its tcgen05 instructions; 0: there was none */
    uint32_t first_serial; /* of its blocks */
    struct grid *before;   /* what griddepcontrol.wait waits for; NULL: has ended */
};

/* ---- the device ---- */

struct device_state {
    struct grid *first, *last; /* of the stream, in order */
    struct cluster slots[SLOTS_MAX];
    struct warp **runnable;
    unsigned num_runnable, max_runnable;
    struct thread *current;
    void *host_stack;
    uint64_t random, steps, idle;
    int64_t clock;
    int failed; /* the grid cannot go on */
    int64_t findings;
};
extern struct device_state device;
#define CURRENT device.current

/* scheduler.c */
uint32_t random_below(uint32_t n);
void schedule(void);                                                         /* runs until nothing lives, or fails */
void wait_for(const char *what, uint32_t object, uint32_t detail, place at); /* until woken */
void wake(struct thread *t);
void yield_warp(void); /* another warp may go on */
void yield_at_access(void);
void poll(place at); /* the caller asks again and again */
void progress(void);
void thread_start(struct thread *t);
_Noreturn void thread_end(void);
_Noreturn void thread_fail(void); /* the grid is given up */
void emu_stack_switch(void **save, void *to);
uint32_t agent_component(const struct block *b, unsigned agent);
void deadlock_report(void);
int on_a_stack(uintptr_t address);

/* emulated_launch.c */
void block_thread_ended(struct thread *t);
int start_clusters(void);
struct block *block_of_window(uintptr_t address);
int in_window(uintptr_t address);

/* warp.c, warp_data.c */
void meet(int operation, unsigned mask, void *operands, place at);
void warp_execute(struct warp *w, struct meeting *m);
void data_execute(struct warp *w, struct meeting *m);
void warp_lane_ended(struct thread *t);
enum {
    OP_SYNCWARP,
    OP_SHUFFLE,
    OP_VOTE,
    OP_REDUCE,
    OP_ELECT,
    OP_LDMATRIX,
    OP_STMATRIX,
    OP_MMA,
    OP_WGMMA,
    OP_WGMMA_FENCE,
    OP_WGMMA_COMMIT,
    OP_WGMMA_WAIT,
    OP_SETMAXNREG,
    OP_TENSOR_ALLOC,
    OP_TENSOR_DEALLOC,
    OP_TENSOR_RELINQUISH,
    OP_TENSOR_LOAD,
    OP_TENSOR_STORE,
    OP_TENSOR_WAIT
};
extern const char *const operation_names[];

/* barriers.c, mbarriers.c */
void barrier_release_ended(struct block *b);
void cluster_barrier_check(struct cluster *c);
struct mbarrier *mbarrier_at(struct block *b, uint32_t offset, const char *what, place at);
void mbarrier_arrive_by(struct block *b, struct mbarrier *m, uint32_t arrivals, int64_t bytes, const struct gather *by,
                        place at);
void mbarrier_check_use(const struct mbarrier *m, const char *what, place at);
void mbarrier_remote_arrivals(struct cluster *c);
void mbarrier_bytes_came(struct block *b, struct mbarrier *m, uint32_t bytes, place at);

/* copies.c */
void copies_land(struct thread *t, uint32_t below_group);
void copies_thread_ended(struct thread *t);

/* events.c: what happens at a time of its own */
struct event {
    struct event *next;
    struct cluster *cluster;
    uint64_t cluster_number;
    void (*happen)(struct event *e);
    struct block *block; /* whose shared memory it touches; NULL: of no block */
    const char *loss;    /* what goes wrong where that block ends before */
    place at;
    void *data;
};
struct event *event_add(struct cluster *c, void (*happen)(struct event *), size_t data_bytes, place at);
void event_remove(struct event *e);
struct event *events_first(void);
int event_happen(void); /* one of them; 0: there is none */
void event_maybe(void); /* in random mode */
void event_now_or_later(struct event *e);
void events_of_cluster_ended(struct cluster *c);
void events_forget(void);
void events_flush(struct cluster *c, void (*of)(struct event *));
int chance(uint32_t one_in);

/* wgmma.c */
void wgmma_thread_ended(struct thread *t);
void wgmma_block_ended(struct block *b);
void wgmma_touch(struct thread *t, uintptr_t address, uint32_t bytes, int write, place at);
void warpgroup_execute(struct warp *w, struct meeting *m);

/* tensor_memory.c */
void tensor_execute(struct warp *w, struct meeting *m);
void tensor_touch(struct thread *t, uintptr_t address, uint32_t bytes, int write, place at);
void tensor_block_begins(struct block *b);
void tensor_block_ended(struct block *b);

/* numbers.c */
enum { UNWRITTEN = (int)0xfefefefe }; /* what the compiler puts into variables that nobody has set */
extern float half_table[65536];
void numbers_prepare(void);
uint16_t add_bf16(uint16_t a, uint16_t b);

/* clocks.c */
struct clocks *clocks_make(uint32_t width);
struct clocks *clocks_keep(struct clocks *c);
void clocks_drop(struct clocks *c);
void gather_add(struct gather *g, struct thread *t);
void gather_add_known(struct gather *g, struct thread *t);
void gather_add_gather(struct gather *g, const struct gather *from, uint32_t width);
void gather_set(struct gather *g, uint32_t component, uint32_t clock, uint32_t width);
void gather_take(struct gather *g, struct thread *t);
void gather_clear(struct gather *g);
void clocks_join_warp(struct warp *w, unsigned mask);
void clocks_learn(struct thread *t, uint32_t component, uint32_t clock);
void clocks_fence_proxy(struct thread *t);
void clocks_forget(void);
uint32_t cluster_width(unsigned num_blocks, unsigned num_threads);
uint32_t tensor_component(const struct warp *w, unsigned stores);

/* shadow.c */
struct actor actor_of(struct thread *t);
void shadow_read(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *by, place at);
void shadow_write(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *by, const void *value,
                  place at);
void shadow_flight(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *by, int by_proxy, place at);
void shadow_mark(struct block *b, uint32_t offset, unsigned mbarrier_plus_one);
void shadow_land(struct block *b, uint32_t offset, uint32_t bytes, uint32_t component, uint32_t clock, int plain,
                 place at);
void shadow_async_read(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *agent,
                       const struct actor *issuer, place at);
void shadow_proxy_reads(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *by, place at);
int shadow_knows(const struct actor *a, uint32_t component, uint32_t clock);
void shadow_settle(struct thread *t);
void *shared_range(uint32_t address, uint32_t bytes, uint32_t align, const char *what, struct block **block,
                   uint32_t *offset, place at);

/* global.c */
int global_range(const void *at, size_t bytes, const char *what, place here);
void global_add(void *memory, size_t bytes);
void global_remove(void *memory);

/* global_shadow.c */
struct block_knowledge *knowledge_begin(struct block_knowledge *k);
void global_read(struct block *b, const void *memory, size_t bytes, place at);
void global_write(struct block *b, struct thread *t, void *memory, size_t bytes, int atomic, place at);
void global_release(struct block *b, const void *at);
void global_acquire(struct block *b, const void *at);
void global_shadow_forget(void);
void global_releases_forget(void);

/* banks.c */
void banks_note(const struct thread *t, uint32_t address, uint32_t bytes, place at);
void banks_report(void);

/* report.c */
int emulated_quiet(void);
place place_of(const char *file, int line);
place place_of_code(uintptr_t code);
const char *place_text(place at); /* "file.cu:12"; good until the fourth call after */
void finding(const char *kind, place at, const char *format, ...) __attribute__((format(printf, 3, 4)));
const char *thread_text(const struct thread *t);
const char *component_text(const struct cluster *c, uint32_t component);

#define HERE   place_of(emu_file, emu_line)
#define EXPORT __attribute__((visibility("default")))

#endif
