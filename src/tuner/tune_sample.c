/* tune_sample.c: rows of a tuner's outputs on the host, and how far two results are from each other. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "tuner/tune_data.h"
#include "tuner/tune_pattern.h"

enum { CHUNKS = 48, CHUNK_ELEMENTS = 4096, ROW_MAX = 256 };

static int is_output(const struct tune_data *data, int role) {
    const int forward = data->problem->pass == FDM_FORWARD;
    return data->memory[role] && (forward ? role == TUNE_OUT || role == TUNE_LSE : role >= TUNE_DQ);
}

/* Of an output: how many chunks are looked at, and of how many elements each. */
struct spread {
    int64_t elements, chunks, length, row;
};
static struct spread spread_of(const struct tune_data *data, int role) {
    const fdm_tensor *t = &data->views[role];
    const int64_t last = role == TUNE_LSE ? 1 : t->ndim > 1 ? t->strides[t->ndim - 2] : t->shape[0];
    struct spread s = {.elements = (int64_t)data->bytes[role] / fdm_dtype_bytes(fdm_dtype_of(t)), .row = last};
    if (s.row > ROW_MAX || s.row < 1)
        s.row = ROW_MAX;
    s.length = CHUNK_ELEMENTS / s.row * s.row;
    s.chunks = s.elements / s.length;
    if (s.chunks > CHUNKS)
        s.chunks = CHUNKS;
    if (s.chunks == 0 && s.elements > 0) {
        s.chunks = 1;
        s.length = s.elements;
    }
    return s;
}

/* The first chunk begins at the start, the last one ends at the end; each begins with a row. */
static int64_t begin_of(const struct spread *s, int64_t chunk) {
    if (s->chunks < 2)
        return 0;
    if (chunk == s->chunks - 1)
        return s->elements - s->length;
    return (int64_t)((double)(s->elements - s->length) / (double)(s->chunks - 1) * (double)chunk) / s->row * s->row;
}

/* The first place whole: new keys that a way does not write are then not there from a way before it. */
static fdm_status fill_cache_again(const struct tune_data *data) {
    return data->memory[TUNE_K_NEW]
               ? tune_pattern_fill(data->device, data->places, data->place_bytes, data->problem->dtype)
               : FDM_OK;
}

fdm_status tune_data_poison(const struct tune_data *data) {
    fdm_status status = fill_cache_again(data);
    for (int i = 0; i < TUNE_ROLES && !status; i++) {
        const int is_sum = data->problem->add_dkv && (i == TUNE_DK || i == TUNE_DV);
        if (is_output(data, i))
            status = fdm_memory_fill(data->device, data->memory[i], is_sum ? 0 : 0xff, data->bytes[i]);
    }
    return status;
}

static void to_floats(const void *from, fdm_dtype dtype, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++)
        switch (dtype) {
        case FDM_FLOAT64: to[i] = (float)((const double *)from)[i]; break;
        case FDM_FLOAT32: to[i] = ((const float *)from)[i]; break;
        case FDM_FLOAT16: to[i] = float16_to_float(((const uint16_t *)from)[i]); break;
        default: to[i] = bfloat16_to_float(((const uint16_t *)from)[i]);
        }
}

fdm_status tune_data_sample(const struct tune_data *data, struct tune_sample *sample) {
    const fdm_device_id host = {FDM_CPU, 0};
    double *chunk = memory_allocate(CHUNK_ELEMENTS * sizeof *chunk);
    sample->count = 0;
    for (int i = 0; i < TUNE_ROLES; i++)
        if (is_output(data, i))
            sample->count += spread_of(data, i).chunks * spread_of(data, i).length;
    if (!sample->values)
        sample->values = memory_allocate((size_t)sample->count * sizeof *sample->values);
    fdm_status status =
        chunk && sample->values ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a sample of the results");
    float *to = sample->values;
    for (int i = 0; i < TUNE_ROLES && !status; i++) {
        const fdm_dtype dtype = fdm_dtype_of(&data->views[i]);
        const struct spread s = is_output(data, i) ? spread_of(data, i) : (struct spread){0};
        for (int64_t c = 0; c < s.chunks && !status; c++, to += s.length) {
            const char *from = (const char *)data->memory[i] + begin_of(&s, c) * fdm_dtype_bytes(dtype);
            if (!(status =
                      fdm_memory_copy(chunk, host, from, data->device, (size_t)(s.length * fdm_dtype_bytes(dtype)))))
                to_floats(chunk, dtype, s.length, to);
        }
    }
    memory_release(chunk);
    return status;
}

static double magnitude_of(const float *values, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += isfinite(values[i]) ? (double)values[i] * (double)values[i] : 0;
    return count ? sqrt(sum / (double)count) : 0;
}

static double row_difference(const float *have, const float *want, int64_t count, double floor) {
    double worst = 0, largest = floor;
    for (int64_t i = 0; i < count; i++) {
        const double difference = fabs((double)have[i] - (double)want[i]);
        if (have[i] == want[i] || (isnan(have[i]) && isnan(want[i])))
            continue;
        if (!isfinite(difference))
            return INFINITY;
        worst = fmax(worst, difference);
        largest = isfinite(want[i]) ? fmax(largest, fabs((double)want[i])) : largest;
    }
    return worst > 0 ? worst / largest : 0;
}

double tune_data_difference(const struct tune_data *data, const struct tune_sample *have,
                            const struct tune_sample *want) {
    double worst = 0;
    int64_t at = 0;
    for (int i = 0; i < TUNE_ROLES; i++) {
        const struct spread s = is_output(data, i) ? spread_of(data, i) : (struct spread){0};
        const int64_t count = s.chunks * s.length;
        const double floor = magnitude_of(want->values + at, count);
        for (int64_t row = 0; row < count; row += s.row) {
            const int64_t width = count - row < s.row ? count - row : s.row;
            worst = fmax(worst, row_difference(have->values + at + row, want->values + at + row, width, floor));
        }
        at += count;
    }
    return worst;
}
