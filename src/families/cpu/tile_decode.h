/* tile_decode.h: one step of decode over the vector operations of an instruction set; included by isa/decode_*.c.
 *
 * The includer defines ACCUMULATORS, the vectors of sums that stay in registers, and vec_sum_each(a), whose lane l is
 * the sum over the lanes of a[l].
 *
 * Scores of VECTOR_WIDTH (key, row) pairs are accumulated at once, one vector each, and summed across lanes together by
 * transposing additions. They lie as [key][row], so with rows a divisor of VECTOR_WIDTH every vector of scores has the
 * same pattern of rows in its lanes and softmax needs lanes folded only once per step. */
#include "families/cpu/decode.h"
#include "families/cpu/vector_ops.h"

/* ---- loading rows ---- */

INLINE vec load_elements(const char *row, int32_t first, fdm_dtype dtype) {
    return dtype == FDM_FLOAT32   ? vec_load((const float *)(const void *)row + first)
           : dtype == FDM_FLOAT16 ? vec_load_f16((const uint16_t *)(const void *)row + first)
                                  : vec_load_bf16((const uint16_t *)(const void *)row + first);
}

INLINE int32_t slots_of(int32_t depth) { return (depth + VECTOR_WIDTH - 1) / VECTOR_WIDTH; }

/* The first element of a slot. */
INLINE int32_t slot_first(int32_t slot, int32_t depth) {
    int32_t first = slot * VECTOR_WIDTH;
    return first + VECTOR_WIDTH <= depth || depth < VECTOR_WIDTH ? first : depth - VECTOR_WIDTH;
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
    int32_t count = slots_of(depth), overlap = depth < VECTOR_WIDTH ? 0 : count * VECTOR_WIDTH - depth;
    for (int32_t slot = 0; slot < count; slot++)
        vec_store(slots + slot * VECTOR_WIDTH, load_elements(readable, slot_first(slot, depth), dtype));
    memset(slots + (count - 1) * VECTOR_WIDTH, 0, (size_t)overlap * sizeof(float));
}

/* ---- reading ahead ---- */

enum { CACHE_LINE_BYTES = 64 };

INLINE int32_t element_bytes(fdm_dtype dtype) { return dtype == FDM_FLOAT32 ? 4 : 2; }
INLINE int32_t smaller_of(int32_t a, int32_t b) { return a < b ? a : b; }

/* What a step asks for while it reads a row: the next bytes of its stream, or, without one, the row this many before
 * that row is read. Either way memory always has requests, and never so many at once that some are dropped. */
INLINE int32_t rows_ahead(int32_t depth, fdm_dtype dtype) {
    const int32_t rows = (dtype == FDM_FLOAT32 ? 8192 : 12288) / (depth * element_bytes(dtype));
    return rows > 0 ? rows : 1;
}

INLINE const char *stream_take(struct decode_stream *stream, int32_t bytes) {
    const char *taken = stream->next;
    stream->next += bytes;
    stream->left -= bytes;
    if (stream->left <= 0) {
        stream->next += stream->left + stream->skip;
        stream->left = stream->run;
    }
    return taken;
}

/* Row `index` of this step's, or its last one. */
INLINE const char *row_ahead(const struct decode_step *step, int32_t index, const char *rows, int64_t stride) {
    return rows + step->keys[smaller_of(index, step->num_keys - 1)] * stride;
}

/* The line of a slot, slots `stride` slots apart. What is far ahead goes to the second cache: requests for the first
 * wait in its few miss buffers and hold up what is read from it. Rows soon to be read are for one use: the outer caches
 * do not get them. */
INLINE void prefetch_slot(const char *row, int32_t slot, int32_t stride, fdm_dtype dtype, int far) {
    const int32_t bytes = VECTOR_WIDTH * element_bytes(dtype);
    if (bytes < CACHE_LINE_BYTES && slot % (CACHE_LINE_BYTES / bytes) != 0)
        return;
    if (far)
        __builtin_prefetch(row + slot * stride * bytes, 0, 2);
    else
        __builtin_prefetch(row + slot * stride * bytes, 0, 0);
}

/* ---- scores ---- */

/* VECTOR_WIDTH / rows keys, from the first-th on; past the last key the last one is read again. */
INLINE vec score_tile(const struct decode_step *step, int32_t first, int rows, fdm_dtype dtype) {
    const int keys = VECTOR_WIDTH / rows;
    const char *row[VECTOR_WIDTH], *ahead[VECTOR_WIDTH];
    struct short_row copies[VECTOR_WIDTH];
    vec acc[VECTOR_WIDTH];
    const int32_t depth = step->head_dim, slots = slots_of(depth), distance = rows_ahead(depth, dtype);
    const int32_t row_bytes = depth * element_bytes(dtype);
    const int far = step->k_ahead->next != NULL;
#pragma GCC unroll 16
    for (int t = 0; t < keys; t++) {
        int32_t key = first + t < step->num_keys ? first + t : step->num_keys - 1;
        row[t] = readable_row(&copies[t], step->k + step->keys[key] * step->k_row, depth, dtype);
        ahead[t] = far ? stream_take(step->k_ahead, row_bytes)
                       : row_ahead(step, first + t + distance, step->k, step->k_row);
    }
    /* Rows without a gap are asked for in the order of memory, others side by side. */
    const int dense = ahead[keys - 1] - ahead[0] == (keys - 1) * (int64_t)row_bytes;
    for (int t = keys - 1; dense && t > 0; t--)
        ahead[t] = ahead[0] + t * CACHE_LINE_BYTES;
    const int32_t stride = dense ? keys : 1;
#pragma GCC unroll 16
    for (int t = 0; t < VECTOR_WIDTH; t++)
        acc[t] = vec_set(0);
    for (int32_t slot = 0; slot < slots; slot++) {
        const float *q = step->q + slot * VECTOR_WIDTH;
        int32_t element = slot_first(slot, depth);
        vec queries[VECTOR_WIDTH];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            queries[r] = vec_load(q + r * DECODE_ROW_MAX);
#pragma GCC unroll 16
        for (int t = 0; t < keys; t++) {
            vec k = load_elements(row[t], element, dtype);
            prefetch_slot(ahead[t], slot, stride, dtype, far);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[t * rows + r] = vec_fma(k, queries[r], acc[t * rows + r]);
        }
    }
    return vec_sum_each(acc);
}

INLINE void score_all(const struct decode_step *step, float *s, int rows, fdm_dtype dtype) {
    for (int32_t key = 0; key < step->num_keys; key += VECTOR_WIDTH / rows) {
        vec score = vec_mul(score_tile(step, key, rows, dtype), vec_set(step->scale));
        if (step->softcap > 0)
            score = vec_mul(vec_tanh(vec_mul(score, vec_set(1.0f / step->softcap))), vec_set(step->softcap));
        if (step->bias)
            score = vec_add(score, vec_load(step->bias + key * rows));
        vec_store(s + key * rows, score);
    }
    for (int32_t i = step->num_keys * rows; i % VECTOR_WIDTH; i++)
        s[i] = -INFINITY;
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

/* Adds keys first .. last-1 to num_slots slots of every row. More slots than one do not overlap. */
INLINE void accumulate_slots(const struct decode_step *step, const float *s, const float *shrink, int32_t first,
                             int32_t last, int32_t slot, int num_slots, int rows, fdm_dtype dtype) {
    const int32_t distance = rows_ahead(step->head_dim_v, dtype);
    const int32_t element = num_slots > 1 ? slot * VECTOR_WIDTH : slot_first(slot, step->head_dim_v);
    const int32_t slot_bytes = VECTOR_WIDTH * element_bytes(dtype);
    const int far = step->v_ahead->next != NULL;
    float *sums = step->acc + slot * VECTOR_WIDTH;
    vec acc[ACCUMULATORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int n = 0; n < num_slots; n++) {
            vec sum = vec_load(sums + r * step->acc_row + n * VECTOR_WIDTH);
            acc[r * num_slots + n] = first == 0 ? vec_mul(sum, vec_set(shrink[r])) : sum;
        }
    for (int32_t key = first; key < last; key++) {
        struct short_row copy;
        const char *row = readable_row(&copy, step->v + step->keys[key] * step->v_row, step->head_dim_v, dtype);
        const char *ahead = far ? stream_take(step->v_ahead, num_slots * slot_bytes)
                                : row_ahead(step, key + distance, step->v, step->v_row) + slot * slot_bytes;
        vec v[ACCUMULATORS];
#pragma GCC unroll 8
        for (int n = 0; n < num_slots; n++) {
            prefetch_slot(ahead, n, 1, dtype, far);
            v[n] = load_elements(row, element + n * VECTOR_WIDTH, dtype);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec weight = vec_set(s[key * rows + r]);
#pragma GCC unroll 8
            for (int n = 0; n < num_slots; n++)
                acc[r * num_slots + n] = vec_fma(weight, v[n], acc[r * num_slots + n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int n = 0; n < num_slots; n++)
            vec_store(sums + r * step->acc_row + n * VECTOR_WIDTH, acc[r * num_slots + n]);
}

/* Some keys at a time, so that the slots of a row of V are read soon after one another. */
INLINE void accumulate_all(const struct decode_step *step, const float *s, const float *shrink, int rows,
                           fdm_dtype dtype) {
    enum { KEYS = 16 };
    const int most = ACCUMULATORS / rows < 8 ? ACCUMULATORS / rows : 8;
    const int32_t slots = slots_of(step->head_dim_v), whole = step->head_dim_v / VECTOR_WIDTH;
    for (int32_t first = 0; first < step->num_keys; first += KEYS) {
        const int32_t last = smaller_of(first + KEYS, step->num_keys);
        int32_t slot = 0;
        for (; slot + most <= whole; slot += most)
            accumulate_slots(step, s, shrink, first, last, slot, most, rows, dtype);
        for (; slot < slots; slot++)
            accumulate_slots(step, s, shrink, first, last, slot, 1, rows, dtype);
    }
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
    case 8: step_rows(step, VECTOR_WIDTH < 8 ? VECTOR_WIDTH : 8, dtype); break; /* only where 8 divides the width */
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
