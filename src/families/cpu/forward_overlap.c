/* forward_overlap.c: the forward's walk with the softmax of one panel beside the tile products of its neighbours.
 *
 * The panels that see keys, block after block, are one stream. A turn takes three that follow each other: the softmax
 * of one, the values of the one before, the scores of the one after (struct cpu_overlap). So a panel has its scores in
 * one turn, its weights in the next and its part of the output in the third; the stream goes on over the ends of key
 * blocks, and only its first and last turns have nothing to overlap.
 *
 * A key block is packed when the scores of its first panel are next. Then the turn before it may still need the values
 * of the block before, and the one before that of yet another: three sets of values. One score tile serves, since
 * scores are stored over those that have become weights. */
#include <string.h>

#include "families/cpu/cpu_family.h"
#include "families/cpu/forward_call.h"

_Static_assert((int)CPU_OVERLAP_SHARES == (int)FORWARD_SHARES, "a share of a turn goes with a share of prefetching");

enum { VALUES = 3, WEIGHTS = 2, STAGES = 3 };

/* A panel on its way. */
struct stage {
    struct cpu_softmax_step step;
    int32_t panel;
    const char *values;
};

struct forward_pipeline {
    struct cpu_overlap turn;
    struct stage stages[STAGES];
    struct stage *before, *now, *next; /* NULL = none */
    int32_t panel;                     /* of the thread's key block, not looked at yet */
    int32_t stages_made;
    uint64_t visible[CPU_BLOCK_KEYS_MAX]; /* of now, where the thread's key block is already the next */
    char *values[VALUES], *weights[WEIGHTS];
};

size_t forward_pipeline_layout(char *base, struct forward_thread *thread, const struct cpu_kernels *kernels,
                               const fdm_problem *problem, int32_t block_n) {
    struct forward_pipeline unused, *pipeline = base ? (struct forward_pipeline *)(void *)base : &unused;
    size_t used = 0;
    cpu_take(base, &used, sizeof *pipeline);
    pipeline->values[0] = thread->packed_values;
    for (int i = 1; i < VALUES; i++)
        pipeline->values[i] = cpu_take(base, &used, kernels->values_bytes(block_n, (int32_t)problem->head_dim_v));
    pipeline->weights[0] = thread->weights;
    for (int i = 1; i < WEIGHTS; i++)
        pipeline->weights[i] = cpu_take(base, &used, kernels->weights_bytes(block_n));
    thread->pipeline = pipeline;
    return used;
}

/* A set of values that neither panel on its way needs. */
static char *free_values(const struct forward_pipeline *pipeline) {
    int i = 0;
    while ((pipeline->before && pipeline->before->values == pipeline->values[i]) ||
           (pipeline->now && pipeline->now->values == pipeline->values[i]))
        i++;
    return pipeline->values[i];
}

/* The walk's next key block; 0 at the end. The bits of the panel whose softmax is to come are kept. */
static int next_block(const struct forward_call *call, struct forward_thread *thread) {
    struct forward_pipeline *pipeline = thread->pipeline;
    struct cpu_softmax_step *now = pipeline->now ? &pipeline->now->step : NULL;
    if (now && now->visible && now->visible != pipeline->visible)
        now->visible = memcpy(pipeline->visible, now->visible, (size_t)now->num_keys * sizeof *pipeline->visible);
    if (!key_walk_next(&thread->walk, &thread->keys))
        return 0;
    thread->packed_values = free_values(pipeline);
    forward_pack_keys(call, thread);
    pipeline->panel = 0;
    return 1;
}

/* The next panel that sees keys; NULL at the end. */
static struct stage *next_stage(const struct forward_call *call, struct forward_thread *thread) {
    struct forward_pipeline *pipeline = thread->pipeline;
    for (;;) {
        if (pipeline->panel == thread->block.num_panels && !next_block(call, thread))
            return NULL;
        const int32_t panel = pipeline->panel++;
        key_walk_ahead(&thread->walk);
        if (thread->keys.state[panel] != PANEL_SKIP) {
            struct stage *stage = &pipeline->stages[pipeline->stages_made % STAGES];
            *stage = (struct stage){forward_softmax_step(call, thread, panel), panel, thread->packed_values};
            stage->step.weights = pipeline->weights[pipeline->stages_made++ % WEIGHTS];
            return stage;
        }
        for (int32_t share = 0; share < FORWARD_SHARES; share++)
            forward_prefetch(call, thread, panel, share);
    }
}

static void set_turn(const struct forward_call *call, const struct forward_thread *thread) {
    const fdm_problem *p = call->attention->problem;
    const struct stage *before = thread->pipeline->before, *now = thread->pipeline->now;
    const struct stage *next = thread->pipeline->next;
    struct cpu_overlap *turn = &thread->pipeline->turn;
    turn->now = now ? &now->step : NULL;
    turn->next = next ? &next->step : NULL;
    turn->keys = thread->packed_keys;
    turn->panel = next ? thread->panels + (size_t)next->panel * thread->panel_bytes : NULL;
    turn->depth = (int32_t)p->head_dim;
    turn->acc = NULL;
    if (!before)
        return;
    turn->acc = thread->acc + (size_t)before->panel * (size_t)p->head_dim_v * CPU_LANES;
    turn->values = before->values;
    turn->weights = before->step.weights;
    turn->acc_keys = before->step.num_keys;
    turn->acc_lanes = before->step.num_lanes;
    turn->acc_depth = (int32_t)p->head_dim_v;
}

void forward_walk_overlapped(const struct forward_call *call, struct forward_thread *thread) {
    struct forward_pipeline *pipeline = thread->pipeline;
    struct cpu_overlap *turn = &pipeline->turn;
    pipeline->before = pipeline->now = NULL;
    pipeline->panel = thread->block.num_panels;
    pipeline->stages_made = 0;
    pipeline->next = next_stage(call, thread);
    while (pipeline->before || pipeline->now || pipeline->next) {
        set_turn(call, thread);
        if (turn->acc)
            call->kernels->shrink(turn->acc, thread->shrink, turn->acc_lanes, turn->acc_depth);
        for (int32_t share = 0; share < FORWARD_SHARES; share++) {
            if (pipeline->next)
                forward_prefetch(call, thread, pipeline->next->panel, share);
            call->kernels->overlap(turn, share);
        }
        pipeline->before = pipeline->now;
        pipeline->now = pipeline->next;
        pipeline->next = pipeline->now ? next_stage(call, thread) : NULL;
    }
}
