/* forward_call.h: what the files of the CPU's forward share: a call, what its threads work on, and steps of the walk.
 */
#ifndef FDM_CPU_FORWARD_CALL_H
#define FDM_CPU_FORWARD_CALL_H

#include <stdatomic.h>

#include "families/cpu/visible.h"

struct forward_pipeline;

/* What a thread works on. The buffers lie behind it in its share of the workspace. */
struct forward_thread {
    struct lane_block block;
    struct key_walk walk;
    struct key_block keys;
    const void *rows[CPU_BLOCK_LANES_MAX]; /* addresses for packing, of lanes or keys */
    const void *bias_rows[CPU_BLOCK_LANES_MAX];
    float bias_keys[CPU_BLOCK_KEYS_MAX];
    float max[CPU_BLOCK_LANES_MAX], sum[CPU_BLOCK_LANES_MAX], shrink[CPU_LANES];
    char *panels, *packed_keys, *packed_values, *weights; /* weights NULL: the score tile serves */
    float *s, *acc;
    size_t panel_bytes;
    int32_t careful;                   /* 1: the item is done again, see run_block() in forward.c */
    struct forward_pipeline *pipeline; /* of the overlapped way; NULL = panels run one after another */
};

enum bias_kind { BIAS_NONE, BIAS_KEYS, BIAS_ROWS };

struct forward_call {
    const struct attention *attention;
    const struct cpu_kernels *kernels;
    char *workspace;
    size_t thread_bytes;
    int32_t block_m, block_n;
    int64_t lane_blocks, num_items; /* lane blocks of the longest sequence */
    enum bias_kind bias_kind;
    int overlapped;
    atomic_llong next_item;
};

/* K and V of the thread's key block into packed_keys and packed_values. */
void forward_pack_keys(const struct forward_call *call, struct forward_thread *thread);

/* Asks for a share of what comes after the panel, at each of the FORWARD_SHARES steps of each panel: rows are far
 * apart, where the hardware's own prefetching does not follow, and more requests at a time than the core can have open
 * hold it up. Only neighbouring keys can be foreseen. */
enum { FORWARD_SHARES = 4 };
void forward_prefetch(const struct forward_call *call, const struct forward_thread *thread, int32_t panel,
                      int32_t share);

/* The step of a panel of the thread's key block, without a bias; weights, shrink and s are the thread's. */
struct cpu_softmax_step forward_softmax_step(const struct forward_call *call, struct forward_thread *thread,
                                             int32_t panel);

/* forward_overlap.c: the bytes of a pipeline, laid out at base (NULL: the bytes alone), and the walk over all keys of
 * the thread's lanes with it. */
size_t forward_pipeline_layout(char *base, struct forward_thread *thread, const struct cpu_kernels *kernels,
                               const fdm_problem *problem, int32_t block_n);
void forward_walk_overlapped(const struct forward_call *call, struct forward_thread *thread);

#endif
