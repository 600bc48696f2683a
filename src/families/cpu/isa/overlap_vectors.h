/* overlap_vectors.h: the vector work of an overlapped turn, cut into units that fit between tile products.
 *
 * A unit is the weights of two keys of `now`, or the maxima of a few keys of `next`, in all lanes: 100 to 300
 * micro-operations, so that the processor's window (512) holds products on both sides of it. What a strip of the
 * softmax keeps in registers lies in the turn between units. */
#ifndef FDM_CPU_OVERLAP_VECTORS_H
#define FDM_CPU_OVERLAP_VECTORS_H

#include "families/cpu/isa/bfloat16_operands.h"

enum { RAISE_KEYS = 16 }; /* keys of a unit of maxima: about as long as a pair of weights */

INLINE int32_t overlap_units(const struct cpu_overlap *t) {
    const int32_t pairs = t->now ? (t->now->num_keys + 1) / 2 : 0;
    return pairs + (t->next ? (t->next->num_keys + RAISE_KEYS - 1) / RAISE_KEYS : 0);
}

/* ---- maxima of next ---- */

INLINE void raise_vectors(struct cpu_overlap *t, int32_t last, int32_t lane, int vectors, enum softmax_mode mode) {
    vec top[SOFTMAX_VECTORS];
    for (int v = 0; v < vectors; v++)
        top[v] = vec_load(t->top + lane + v * VECTOR_WIDTH);
    for (int32_t key = t->raised; key < last; key++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const int32_t column = lane + v * VECTOR_WIDTH;
            vec x = vec_load(t->next->s + (size_t)key * CPU_LANES + column);
            top[v] = softmax_higher(t->next, key, column, x, top[v], mode);
        }
    for (int v = 0; v < vectors; v++)
        vec_store(t->top + lane + v * VECTOR_WIDTH, top[v]);
}

INLINE void raise_lanes(struct cpu_overlap *t, int32_t last, enum softmax_mode mode) {
    int32_t lane = 0;
    for (; lane + (SOFTMAX_VECTORS - 1) * VECTOR_WIDTH < t->next->num_lanes; lane += SOFTMAX_VECTORS * VECTOR_WIDTH)
        raise_vectors(t, last, lane, SOFTMAX_VECTORS, mode);
    for (; lane < t->next->num_lanes; lane += VECTOR_WIDTH)
        raise_vectors(t, last, lane, 1, mode);
}

static __attribute__((noinline)) void raise_keys(struct cpu_overlap *t) {
    const int32_t last = least(t->scored, t->raised + RAISE_KEYS);
    if (t->next->visible)
        raise_lanes(t, last, SOFTMAX_MASKED);
    else
        raise_lanes(t, last, SOFTMAX_PLAIN);
    t->raised = last;
}

/* ---- weights of now ---- */

INLINE void weigh_vectors(struct cpu_overlap *t, int two, int32_t lane, int vectors, enum softmax_mode mode) {
    vec base[SOFTMAX_VECTORS], sum[SOFTMAX_VECTORS];
    for (int v = 0; v < vectors; v++) {
        base[v] = vec_load(t->base + lane + v * VECTOR_WIDTH);
        sum[v] = vec_load(t->sum + lane + v * VECTOR_WIDTH);
    }
    softmax_pair(t->now, t->weighed, two, lane, vectors, mode, base, base, sum); /* these modes need no origin */
    for (int v = 0; v < vectors; v++)
        vec_store(t->sum + lane + v * VECTOR_WIDTH, sum[v]);
}

INLINE void weigh_lanes(struct cpu_overlap *t, int two, enum softmax_mode mode) {
    int32_t lane = 0;
    for (; lane + (SOFTMAX_VECTORS - 1) * VECTOR_WIDTH < t->now->num_lanes; lane += SOFTMAX_VECTORS * VECTOR_WIDTH)
        weigh_vectors(t, two, lane, SOFTMAX_VECTORS, mode);
    for (; lane < t->now->num_lanes; lane += VECTOR_WIDTH)
        weigh_vectors(t, two, lane, 1, mode);
}

static __attribute__((noinline)) void weigh_pair(struct cpu_overlap *t) {
    const int two = t->weighed + 1 < t->now->num_keys;
    if (t->now->visible && two)
        weigh_lanes(t, 1, SOFTMAX_MASKED);
    else if (t->now->visible)
        weigh_lanes(t, 0, SOFTMAX_MASKED);
    else if (two)
        weigh_lanes(t, 1, SOFTMAX_PLAIN);
    else
        weigh_lanes(t, 0, SOFTMAX_PLAIN);
    t->weighed += 2;
}

/* All weights of keys before `last`. */
INLINE void weigh_until(struct cpu_overlap *t, int32_t last) {
    while (t->now && t->weighed < least(last, t->now->num_keys))
        weigh_pair(t);
}

/* ---- between the products ---- */

/* One unit, maxima first; 0 where none is ready. */
INLINE int overlap_unit(struct cpu_overlap *t) {
    if (t->raised < t->scored)
        raise_keys(t);
    else if (t->now && t->weighed < t->now->num_keys)
        weigh_pair(t);
    else
        return 0;
    return 1;
}

/* The units due at this place, so that all places get the same share. NULL = nothing goes between these products. */
INLINE void overlap_place(struct cpu_overlap *t) {
    if (!t)
        return;
    for (t->due += t->units; t->due >= t->places && overlap_unit(t);)
        t->due -= t->places;
}

/* ---- before and after ---- */

INLINE void overlap_begin(struct cpu_overlap *t, int32_t places) {
    t->weighed = t->scored = t->raised = t->due = 0;
    t->places = places;
    t->units = overlap_units(t);
    for (int32_t lane = 0; t->now && lane < t->now->num_lanes; lane += VECTOR_WIDTH) {
        const vec max = softmax_raised(t->now, lane, vec_load(t->top + lane), SOFTMAX_PLAIN);
        vec_store(t->max + lane, max);
        vec_store(t->base + lane, vec_mul(softmax_origin(max), vec_set(-LOG2_E)));
        vec_store(t->sum + lane, vec_set(0.0f));
    }
    for (int32_t lane = 0; lane < CPU_LANES; lane += VECTOR_WIDTH)
        vec_store(t->top + lane, vec_set(-INFINITY));
}

/* What the places left over, and the end of the softmax. */
INLINE void overlap_end(struct cpu_overlap *t) {
    t->scored = t->next ? t->next->num_keys : 0;
    while (overlap_unit(t)) {
    }
    if (!t->now)
        return;
    for (int32_t lane = 0; lane < t->now->num_lanes; lane += VECTOR_WIDTH)
        softmax_finish(t->now, lane, vec_load(t->max + lane), vec_load(t->sum + lane));
    clear_weights_padding(t->now);
}

#endif
