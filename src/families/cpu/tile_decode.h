/* tile_decode.h: one step of decode over the vector operations of an instruction set; included by isa/decode_*.c.
 *
 * The includer defines ACCUMULATORS, the vectors of sums that stay in registers; vec_sum_each(a), whose lane l is the
 * sum over the lanes of a[l]; and where it helps the macro vec_keep(a), which is a, kept in a register where the
 * compiler would rather load it again for every use.
 *
 * Scores of VECTOR_WIDTH (key, row) pairs are accumulated at once, one vector each, and summed across lanes together by
 * transposing additions. They lie as [key][row], so with rows a divisor of VECTOR_WIDTH every vector of scores has the
 * same pattern of rows in its lanes and softmax needs lanes folded only once per step. */
#include "families/cpu/decode.h"
#include "families/cpu/vector_ops.h"

#ifndef vec_keep
#    define vec_keep(a) (a)
#endif

/* Rows of a step, at most: each has sums of two slots of V, and a vector of scores has whole keys. */
enum { MAX_ROWS = ACCUMULATORS / 2 < VECTOR_WIDTH ? ACCUMULATORS / 2 : VECTOR_WIDTH };

/* ---- loading rows ---- */

INLINE vec load_elements(const char *row, int32_t first, fdm_dtype dtype) {
    return dtype == FDM_FLOAT32   ? vec_load((const float *)(const void *)row + first)
           : dtype == FDM_FLOAT16 ? vec_load_f16((const uint16_t *)(const void *)row + first)
                                  : vec_load_bf16((const uint16_t *)(const void *)row + first);
}

INLINE int32_t slots_of(int32_t depth) { return (depth + VECTOR_WIDTH - 1) / VECTOR_WIDTH; }

/* Slots that are taken by twos: those of whole pairs. */
INLINE int32_t slots_of_pairs(int32_t depth) { return depth / (2 * VECTOR_WIDTH) * 2; }

/* The first element of a slot that is no half of a pair. */
INLINE int32_t slot_first(int32_t slot, int32_t depth) {
    int32_t first = slot * VECTOR_WIDTH;
    return first + VECTOR_WIDTH <= depth || depth < VECTOR_WIDTH ? first : depth - VECTOR_WIDTH;
}

/* Slot n of num_slots that begin with element `first`: one, or whole pairs. */
INLINE vec load_slot(const char *row, int32_t first, int n, int num_slots, fdm_dtype dtype) {
    if (dtype != FDM_BFLOAT16 || num_slots == 1)
        return load_elements(row, first + n * VECTOR_WIDTH, dtype);
    vec pairs = vec_load_pairs(row + (first + n / 2 * 2 * VECTOR_WIDTH) * 2);
    return n % 2 == 0 ? vec_low_bf16(pairs) : vec_high_bf16(pairs);
}

/* A row shorter than a slot is read from a copy with zeros behind it. */
struct short_row {
    char bytes[VECTOR_WIDTH * sizeof(float)];
};
INLINE const char *readable_row(struct short_row *copy, const char *row, int32_t depth, fdm_dtype dtype) {
    if (depth >= VECTOR_WIDTH)
        return row;
    memset(copy, 0, sizeof *copy);
    return memcpy(copy->bytes, row, (size_t)depth * (dtype == FDM_FLOAT32 ? 4 : 2));
}

static void load_row(float *slots, const void *row, int32_t depth, fdm_dtype dtype) {
    struct short_row copy;
    const char *readable = readable_row(&copy, row, depth, dtype);
    int32_t count = slots_of(depth), overlap = depth < VECTOR_WIDTH ? 0 : count * VECTOR_WIDTH - depth, slot = 0;
    for (; slot < slots_of_pairs(depth); slot++)
        vec_store(slots + slot * VECTOR_WIDTH, load_slot(readable, slot / 2 * 2 * VECTOR_WIDTH, slot % 2, 2, dtype));
    for (; slot < count; slot++)
        vec_store(slots + slot * VECTOR_WIDTH, load_elements(readable, slot_first(slot, depth), dtype));
    memset(slots + (count - 1) * VECTOR_WIDTH, 0, (size_t)overlap * sizeof(float));
}

/* ---- the rows of a step, and reading ahead ---- */

enum { CACHE_LINE_BYTES = 64 };

INLINE int32_t element_bytes(fdm_dtype dtype) { return dtype == FDM_FLOAT32 ? 4 : 2; }
INLINE int32_t smaller_of(int32_t a, int32_t b) { return a < b ? a : b; }

/* K or V of a step: the address of each key's row, and the last one again for tiles that go past it. Without a stream
 * to ask for, a row is asked for while the one `distance` before it is read. */
struct key_rows {
    const char *row[DECODE_KEYS + VECTOR_WIDTH];
    struct short_row copies[DECODE_KEYS];
    int32_t last, distance;
};

INLINE void find_rows(struct key_rows *rows, const struct decode_step *step, const char *const *given, int32_t depth,
                      fdm_dtype dtype) {
    for (int32_t key = 0; key < step->num_keys; key++)
        rows->row[key] = readable_row(&rows->copies[key], given[key], depth, dtype);
    rows->last = step->num_keys - 1;
    for (int key = 0; key < VECTOR_WIDTH; key++)
        rows->row[step->num_keys + key] = rows->row[rows->last];
    rows->distance = (dtype == FDM_FLOAT32 ? 8192 : 12288) / (depth * element_bytes(dtype)); /* measured; at least 8 */
}

INLINE void next_run(struct decode_stream *stream) {
    if (stream->starts)
        stream->next = *stream->starts ? *stream->starts++ : NULL;
    else
        stream->next += stream->left + stream->skip; /* what is left is 0, or less where runs are no whole lines */
    stream->left = stream->run;
}

/* Asks for the next lines of the stream, few at a time: of long bursts the core drops a part. They go to the second
 * cache: requests for the first wait in its few miss buffers and hold up what is read from it. */
INLINE void ask_stream(struct decode_stream *stream, int count) {
    if (stream->left >= count * CACHE_LINE_BYTES) { /* nearly always: no run ends before the last of them */
#pragma GCC unroll 16
        for (int i = 0; i < count; i++)
            __builtin_prefetch(stream->next + i * CACHE_LINE_BYTES, 0, 2);
        stream->next += count * CACHE_LINE_BYTES;
        stream->left -= count * CACHE_LINE_BYTES;
        if (stream->left == 0)
            next_run(stream);
        return;
    }
#pragma GCC unroll 1
    for (int i = 0; i < count; i++) {
        if (!stream->next)
            return;
        __builtin_prefetch(stream->next, 0, 2);
        stream->next += CACHE_LINE_BYTES;
        stream->left -= CACHE_LINE_BYTES;
        if (stream->left <= 0)
            next_run(stream);
    }
}

/* While keys first .. first + count - 1 are read at byte `at` of their rows: asks for that line of the rows that are
 * `distance` further. They are for one use: the outer caches do not get them. */
INLINE void ask_rows(const struct key_rows *rows, int32_t first, int count, int64_t at) {
    for (int t = 0; t < count; t++)
        __builtin_prefetch(rows->row[smaller_of(first + t + rows->distance, rows->last)] + at, 0, 0);
}

/* ---- scores ---- */

/* acc[t * rows + r] += num_slots slots of key t, from `element` on, times those of query row r. Queries stay in
 * registers while there are registers for them. */
INLINE void score_slots(vec acc[VECTOR_WIDTH], const char *const *row, const float *q, int32_t element, int num_slots,
                        int rows, fdm_dtype dtype) {
#pragma GCC unroll 2
    for (int n = 0; n < num_slots; n++) {
        vec queries[VECTOR_WIDTH];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            queries[r] = vec_keep(vec_load(q + n * VECTOR_WIDTH + r * DECODE_ROW_MAX));
#pragma GCC unroll 16
        for (int t = 0; t < VECTOR_WIDTH / rows; t++) {
            vec k = load_slot(row[t], element, n, num_slots, dtype);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[t * rows + r] = vec_fma(k, queries[r], acc[t * rows + r]);
        }
    }
}

/* VECTOR_WIDTH / rows keys, from the first-th on. */
INLINE vec score_tile(const struct decode_step *step, const struct key_rows *k, struct decode_stream *ahead,
                      int32_t first, int rows, fdm_dtype dtype) {
    const int keys = VECTOR_WIDTH / rows, per_line = CACHE_LINE_BYTES / (VECTOR_WIDTH * element_bytes(dtype)),
              slots_at_once = per_line < 2 ? per_line : 2;
    const int32_t depth = step->head_dim, slots = slots_of(depth), pairs = slots_of_pairs(depth);
    const int32_t lines = depth / VECTOR_WIDTH / per_line * per_line; /* slots of whole lines */
    const char *row[VECTOR_WIDTH];
    vec acc[VECTOR_WIDTH];
#pragma GCC unroll 16
    for (int t = 0; t < keys; t++)
        row[t] = k->row[first + t];
#pragma GCC unroll 16
    for (int t = 0; t < VECTOR_WIDTH; t++)
        acc[t] = vec_set(0);
    int32_t slot = 0;
    for (; slot < lines; slot += per_line) {
        if (ahead->next)
            ask_stream(ahead, keys);
        else
            ask_rows(k, first, keys, (int64_t)slot * VECTOR_WIDTH * element_bytes(dtype));
#pragma GCC unroll 2
        for (int n = 0; n < per_line; n += slots_at_once)
            score_slots(acc, row, step->q + (slot + n) * VECTOR_WIDTH, (slot + n) * VECTOR_WIDTH, slots_at_once, rows,
                        dtype);
    }
    for (; slot < pairs; slot += 2)
        score_slots(acc, row, step->q + slot * VECTOR_WIDTH, slot * VECTOR_WIDTH, 2, rows, dtype);
    for (; slot < slots; slot++)
        score_slots(acc, row, step->q + slot * VECTOR_WIDTH, slot_first(slot, depth), 1, rows, dtype);
    return vec_sum_each(acc);
}

INLINE void score_all(const struct decode_step *step, float *s, int rows, fdm_dtype dtype) {
    struct key_rows k;
    struct decode_stream ahead = *step->k_ahead;
    find_rows(&k, step, step->k, step->head_dim, dtype);
    for (int32_t key = 0; key < step->num_keys; key += VECTOR_WIDTH / rows) {
        vec score = vec_mul(score_tile(step, &k, &ahead, key, rows, dtype), vec_set(step->scale));
        if (step->softcap > 0)
            score = vec_mul(vec_tanh(vec_mul(score, vec_set(1.0f / step->softcap))), vec_set(step->softcap));
        if (step->bias) {
            const vec bias = vec_load(step->bias + key * rows);
            score = vec_select(vec_barred(bias), bias, vec_add(score, bias));
        }
        vec_store(s + key * rows, score);
    }
    for (int32_t i = step->num_keys * rows; i % VECTOR_WIDTH; i++)
        s[i] = -INFINITY;
    *step->k_ahead = ahead;
}

/* ---- softmax ---- */

/* Scores to weights exp(score - max); updates max and sum; shrink[row] is what earlier sums are to be multiplied by. */
INLINE void softmax(const struct decode_step *step, float *s, float *shrink, int rows) {
    int32_t count = step->num_keys * rows;
    float lanes[VECTOR_WIDTH], top[VECTOR_WIDTH];
    vec max = vec_set(-INFINITY), sum = vec_set(0);
    for (int32_t i = 0; i < count; i += VECTOR_WIDTH)
        max = vec_max(max, vec_load(s + i));
    vec_store(lanes, max);
    for (int r = 0; r < rows; r++) {
        float old = step->max[r], now = old;
        for (int lane = r; lane < VECTOR_WIDTH; lane += rows)
            now = lanes[lane] > now ? lanes[lane] : now;
        /* A row that has seen no key keeps the maximum -inf and subtracts 0. */
        top[r] = now > -INFINITY ? now : 0;
        shrink[r] = old > -INFINITY ? expf(old - now) : 0;
        step->max[r] = now;
    }
    for (int lane = rows; lane < VECTOR_WIDTH; lane++)
        top[lane] = top[lane % rows];
    max = vec_load(top);
    for (int32_t i = 0; i < count; i += VECTOR_WIDTH) {
        vec weight = vec_exp2(vec_mul(vec_sub(vec_load(s + i), max), vec_set(LOG2_E)));
        vec_store(s + i, weight);
        sum = vec_add(sum, weight);
    }
    vec_store(lanes, sum);
    for (int r = 0; r < rows; r++) {
        float total = 0;
        for (int lane = r; lane < VECTOR_WIDTH; lane += rows)
            total += lanes[lane];
        step->sum[r] = step->sum[r] * shrink[r] + total;
    }
}

/* ---- weighted sums of V ---- */

/* acc[r * num_slots + n] += the weight of row r times slot n. What there is less of, weights or slots, is held in
 * registers. */
INLINE void add_key(vec acc[ACCUMULATORS], const char *row, const float *weights, int32_t element, int num_slots,
                    int rows, fdm_dtype dtype) {
    vec held[ACCUMULATORS];
    const int hold_weights = rows < num_slots, outer = hold_weights ? num_slots : rows,
              inner = hold_weights ? rows : num_slots;
#pragma GCC unroll 8
    for (int i = 0; i < inner; i++)
        held[i] = hold_weights ? vec_set(weights[i]) : load_slot(row, element, i, num_slots, dtype);
#pragma GCC unroll 8
    for (int o = 0; o < outer; o++) {
        vec other = hold_weights ? load_slot(row, element, o, num_slots, dtype) : vec_set(weights[o]);
#pragma GCC unroll 8
        for (int i = 0; i < inner; i++) {
            vec *sum = hold_weights ? &acc[i * num_slots + o] : &acc[o * num_slots + i];
            *sum = vec_fma(held[i], other, *sum);
        }
    }
}

/* Adds the step's keys, whose weights are s [num_keys][rows], to num_slots slots of every row, the first of which holds
 * elements element .. of V. */
INLINE void accumulate_slots(float *sums, int64_t acc_row, const struct key_rows *v, struct decode_stream *ahead,
                             const float *s, const float *shrink, int32_t element, int num_slots, int rows,
                             fdm_dtype dtype) {
    enum { LINES = 2 }; /* to a request; with 4 and 8, float32 waited more for memory */
    const int bytes = num_slots * VECTOR_WIDTH * element_bytes(dtype);
    const int keys = bytes < LINES * CACHE_LINE_BYTES ? LINES * CACHE_LINE_BYTES / bytes : 1;
    vec acc[ACCUMULATORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int n = 0; n < num_slots; n++)
            acc[r * num_slots + n] = vec_mul(vec_load(sums + r * acc_row + n * VECTOR_WIDTH), vec_set(shrink[r]));
    for (int32_t first = 0; first <= v->last; first += keys) {
        const int32_t end = smaller_of(first + keys, v->last + 1);
        if (ahead->next)
            ask_stream(ahead, keys * bytes / CACHE_LINE_BYTES);
        else
            ask_rows(v, first, keys, (int64_t)element * element_bytes(dtype));
        for (int32_t key = first; key < end; key++)
            add_key(acc, v->row[key], s + key * rows, element, num_slots, rows, dtype);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int n = 0; n < num_slots; n++)
            vec_store(sums + r * acc_row + n * VECTOR_WIDTH, acc[r * num_slots + n]);
}

/* Slots that are taken together do not overlap. */
INLINE void accumulate_all(const struct decode_step *step, const float *s, const float *shrink, int rows,
                           fdm_dtype dtype) {
    const int most = ACCUMULATORS / rows < 8 ? ACCUMULATORS / rows : 8;
    const int32_t depth = step->head_dim_v, slots = slots_of(depth), pairs = slots_of_pairs(depth);
    struct key_rows v;
    struct decode_stream ahead = *step->v_ahead;
    find_rows(&v, step, step->v, depth, dtype);
    int32_t slot = 0;
    for (; slot + most <= pairs; slot += most)
        accumulate_slots(step->acc + slot * VECTOR_WIDTH, step->acc_row, &v, &ahead, s, shrink, slot * VECTOR_WIDTH,
                         most, rows, dtype);
    for (; slot < pairs; slot += 2)
        accumulate_slots(step->acc + slot * VECTOR_WIDTH, step->acc_row, &v, &ahead, s, shrink, slot * VECTOR_WIDTH, 2,
                         rows, dtype);
    for (; slot < slots; slot++)
        accumulate_slots(step->acc + slot * VECTOR_WIDTH, step->acc_row, &v, &ahead, s, shrink, slot_first(slot, depth),
                         1, rows, dtype);
    *step->v_ahead = ahead;
}

/* ---- the step, specialised by rows and dtype ---- */

INLINE void step_rows(const struct decode_step *step, int rows, fdm_dtype dtype) {
    float s[DECODE_KEYS * DECODE_ROWS] __attribute__((aligned(64)));
    float shrink[DECODE_ROWS];
    score_all(step, s, rows, dtype);
    softmax(step, s, shrink, rows);
    accumulate_all(step, s, shrink, rows, dtype);
}

INLINE void step_dtype(const struct decode_step *step, fdm_dtype dtype) {
    switch (step->num_rows) {
    case 1: step_rows(step, 1, dtype); break;
    case 2: step_rows(step, 2, dtype); break;
    case 4: step_rows(step, 4, dtype); break;
    case 8:
        if (MAX_ROWS >= 8)
            step_rows(step, MAX_ROWS, dtype);
        break;
    }
}

static void step_float32(const struct decode_step *step) { step_dtype(step, FDM_FLOAT32); }
static void step_float16(const struct decode_step *step) { step_dtype(step, FDM_FLOAT16); }
static void step_bfloat16(const struct decode_step *step) { step_dtype(step, FDM_BFLOAT16); }

static void step(const struct decode_step *step) {
    if (step->dtype == FDM_FLOAT32)
        step_float32(step);
    else if (step->dtype == FDM_FLOAT16)
        step_float16(step);
    else
        step_bfloat16(step);
}
