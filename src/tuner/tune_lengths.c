/* tune_lengths.c: how many rows and keys the sequences of a tuned problem have, and what the rows of a tree see. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "tuner/tune_contents.h"

static const fdm_device_id host = {FDM_CPU, 0};

fdm_status tune_fill_numbers(struct tune_data *data, enum tune_role role, tune_number number, const int32_t *ends) {
    const int64_t count = (int64_t)(data->bytes[role] / sizeof(int32_t));
    int32_t *numbers = memory_allocate(data->bytes[role] + 1);
    if (!numbers)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %lld numbers", (long long)count);
    for (int64_t i = 0; i < count; i++)
        numbers[i] = number(data->problem, ends, i);
    const fdm_status status = fdm_memory_copy(data->memory[role], data->device, numbers, host, data->bytes[role]);
    memory_release(numbers);
    return status;
}

void tune_make_ends(int64_t batch, int64_t longest, int64_t total, int32_t *ends) {
    int64_t left = total;
    ends[0] = 0;
    for (int64_t b = 0; b < batch; b++) {
        const double share = batch > 1 ? (double)b / (double)(batch - 1) : 0;
        const double mean = (double)total / (double)batch, spread = fmin((double)longest - mean, mean);
        int64_t length = b == 0 ? longest : (int64_t)(mean + spread * (1 - 2 * share));
        length = length > longest ? longest : length;
        length = length > left || b == batch - 1 ? (left > longest ? longest : left) : length;
        ends[b + 1] = ends[b] + (int32_t)length;
        left -= length;
    }
}

int64_t tune_length_used(int64_t length, int64_t b, int64_t batch) {
    return batch > 1 ? length - length / 2 * b / (batch - 1) : length;
}

/* ---- shapes ---- */

void tune_set_lengths(struct tune_data *data) {
    const fdm_problem *p = data->problem;
    const int64_t batch[1] = {p->batch}, ends[1] = {p->batch + 1};
    const int64_t tree[3] = {p->batch, p->varlen ? p->total_q : p->seqlen_q, (p->seqlen_q + 31) / 32};
    if (p->varlen)
        tune_set_shape(data, TUNE_CU_Q, FDM_INT32, 1, ends);
    if (p->varlen && !p->has_cache)
        tune_set_shape(data, TUNE_CU_K, FDM_INT32, 1, ends);
    if (p->has_seqused_q)
        tune_set_shape(data, TUNE_USED_Q, FDM_INT32, 1, batch);
    if (p->has_seqused_k)
        tune_set_shape(data, TUNE_USED_K, FDM_INT32, 1, batch);
    if (p->has_tree)
        tune_set_shape(data, TUNE_TREE, FDM_INT32, p->varlen ? 2 : 3, p->varlen ? tree + 1 : tree);
}

/* ---- contents ---- */

int32_t tune_end(const fdm_problem *p, const int32_t *ends, int64_t index) {
    (void)p;
    return ends[index];
}

/* Of packed sequences between these ends; those of a dense call are as long as the longest. */
static int64_t length_of(const fdm_problem *p, const int32_t *ends, int64_t b, int64_t longest) {
    return p->varlen ? ends[b + 1] - ends[b] : longest;
}
static int32_t used_rows(const fdm_problem *p, const int32_t *ends, int64_t b) {
    return (int32_t)tune_length_used(length_of(p, ends, b, p->seqlen_q), b, p->batch);
}
static int32_t used_keys(const fdm_problem *p, const int32_t *ends, int64_t b) {
    return (int32_t)tune_length_used(length_of(p, ends, b, p->seqlen_k), b, p->batch);
}

/* Rows of a draft are a binary tree: each sees itself and what its parent sees. */
static fdm_status fill_tree(struct tune_data *data, const int32_t *ends) {
    const fdm_problem *p = data->problem;
    const size_t words = (size_t)(p->seqlen_q + 31) / 32;
    uint32_t *bits = memory_allocate(data->bytes[TUNE_TREE] + 1);
    if (!bits)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the trees of %lld drafts", (long long)p->batch);
    memset(bits, 0, data->bytes[TUNE_TREE]);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0; i < length_of(p, ends, b, p->seqlen_q); i++) {
            uint32_t *first = bits + (size_t)(p->varlen ? ends[b] : b * p->seqlen_q) * words;
            uint32_t *row = first + (size_t)i * words;
            if (i)
                memcpy(row, first + (size_t)(i - 1) / 2 * words, words * sizeof *row);
            row[i / 32] |= 1u << i % 32;
        }
    const fdm_status status =
        fdm_memory_copy(data->memory[TUNE_TREE], data->device, bits, host, data->bytes[TUNE_TREE]);
    memory_release(bits);
    return status;
}

fdm_status tune_fill_lengths(struct tune_data *data) {
    const fdm_problem *p = data->problem;
    fdm_status status = FDM_OK;
    if (!p->varlen && !p->has_seqused_q && !p->has_seqused_k && !p->has_tree)
        return FDM_OK;
    int32_t *ends = memory_allocate((size_t)(p->batch + 1) * sizeof *ends);
    if (!ends)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %lld lengths", (long long)p->batch);
    tune_make_ends(p->varlen ? p->batch : 0, p->seqlen_q, p->total_q, ends);
    if (p->varlen)
        status = tune_fill_numbers(data, TUNE_CU_Q, tune_end, ends);
    if (!status && p->has_seqused_q)
        status = tune_fill_numbers(data, TUNE_USED_Q, used_rows, ends);
    if (!status && p->has_tree)
        status = fill_tree(data, ends);
    tune_make_ends(p->varlen ? p->batch : 0, p->seqlen_k, p->total_k, ends);
    if (!status && data->memory[TUNE_CU_K])
        status = tune_fill_numbers(data, TUNE_CU_K, tune_end, ends);
    if (!status && p->has_seqused_k && !p->has_cache) /* tune_cache.c counts the keys of a cache */
        status = tune_fill_numbers(data, TUNE_USED_K, used_keys, ends);
    memory_release(ends);
    return status;
}
