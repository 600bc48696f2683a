/* decode_rows.c: the query rows of a KV head in a decode pass, and which keys they see. */
#include <math.h>

#include "base/half.h"
#include "families/cpu/decode_call.h"
#include "problem/tree.h"

static const uint8_t *score_row(const struct score_view *view, int64_t batch, int64_t head, int64_t i, int64_t bytes) {
    if (!view->data)
        return NULL;
    return (const uint8_t *)view->data +
           (batch * view->batch + head / view->group * view->head + i * view->row) * bytes;
}

static void init_row(struct decode_row *row, const struct decode_head *head, int64_t flat) {
    const struct attention *a = head->job->attention;
    const fdm_problem *problem = head->job->problem;
    int64_t i = flat / head->job->group, h = head->kv_head * head->job->group + flat % head->job->group;
    *row = (struct decode_row){.i = i, .head = h, .range = problem_key_range(problem, &head->sequence, i)};
    row->mask = score_row(&a->mask, head->batch, h, i, 1);
    row->bias = (const char *)score_row(&a->bias, head->batch, h, i, fdm_dtype_bytes(problem->bias_dtype));
    row->blocks = score_row(&a->block_mask, head->batch, h, i / (problem->block_mask_size | 1), 1);
    row->tree = tree_row(a, &head->sequence, head->batch, i);
    row->ranges = row_ranges_of(a, &head->sequence, head->batch, h, i);
    row->range = row_ranges_cut(&row->ranges, row->range);
    if (row->ranges.count == 1)
        row->ranges = (struct row_ranges){0};
    const struct interval_view *v = &a->intervals;
    if (v->start) {
        int64_t k = head->sequence.k_begin;
        row->start = v->start + head->batch * v->start_batch + h / v->group * v->start_head + k * v->start_item;
        row->end = v->end + head->batch * v->end_batch + h / v->group * v->end_head + k * v->end_item;
    }
}

void decode_head_init(struct decode_head *head, const struct decode_job *job, int64_t batch, int64_t kv_head) {
    head->job = job;
    head->batch = batch;
    head->kv_head = kv_head;
    head->sequence = attention_sequence(job->attention, batch);
    head->num_rows = (int32_t)(head->sequence.seqlen_q * job->group);
    for (int32_t r = 0; r < head->num_rows; r++) {
        struct decode_row *row = &head->rows[r], *before = row - 1;
        init_row(row, head, r);
        row->same_as_previous = r > 0 && row->i == before->i && row->mask == before->mask &&
                                row->bias == before->bias && row->blocks == before->blocks &&
                                row->start == before->start && row->end == before->end &&
                                row->range.first == before->range.first && row->range.last == before->range.last &&
                                row->ranges.start == before->ranges.start && row->ranges.end == before->ranges.end;
    }
}

static float bias_value(const char *row, int64_t offset, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        return ((const float *)(const void *)row)[offset];
    uint16_t bits = ((const uint16_t *)(const void *)row)[offset];
    return dtype == FDM_FLOAT16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

/* What is added to the score of key j: the bias, or -inf where the key is not visible. */
static float key_bias(const struct decode_head *head, const struct decode_row *row, int64_t j) {
    const struct attention *a = head->job->attention;
    if (j < row->range.first || j >= row->range.last || (row->mask && !row->mask[j * a->mask.key]))
        return -INFINITY;
    if (row->start &&
        !(row->start[j * a->intervals.start_item] <= row->i && row->i < row->end[j * a->intervals.end_item]))
        return -INFINITY;
    if (row->ranges.start && !row_ranges_hold(&row->ranges, j))
        return -INFINITY;
    if (row->tree && !tree_holds(a, &head->sequence, row->tree, j))
        return -INFINITY;
    if (row->blocks && !row->blocks[j / head->job->problem->block_mask_size * a->block_mask.key])
        return -INFINITY;
    return row->bias ? bias_value(row->bias, j * a->bias.key, head->job->problem->bias_dtype) : 0;
}

void decode_take_key(struct decode_keys *keys, const struct decode_head *head, int64_t j) {
    float value[DECODE_HEAD_ROWS];
    int visible = 0;
    for (int32_t r = 0; r < head->num_rows; r++) {
        value[r] = head->rows[r].same_as_previous ? value[r - 1] : key_bias(head, &head->rows[r], j);
        visible |= !(value[r] == -INFINITY);
    }
    if (!visible)
        return;
    int32_t most = head->job->kernels->max_rows;
    for (int32_t first = 0, rows; first < head->num_rows; first += rows) {
        rows = decode_step_rows(head->num_rows - first, most);
        float *bias = keys->bias + first * DECODE_KEYS + keys->num_keys * rows;
        for (int32_t r = 0; r < rows; r++)
            bias[r] = first + r < head->num_rows ? value[first + r] : 0;
    }
    keys->key[keys->num_keys++] = (int32_t)j;
}

int decode_sees_all(const struct decode_head *head, int64_t first, int64_t last) {
    if (head->rows[0].mask || head->rows[0].bias || head->rows[0].start || head->rows[0].ranges.start ||
        head->rows[0].blocks)
        return 0;
    if (head->rows[0].tree && last > head->sequence.seqlen_k - head->sequence.seqlen_q)
        return 0;
    for (int32_t r = 0; r < head->num_rows; r++)
        if (first < head->rows[r].range.first || last > head->rows[r].range.last)
            return 0;
    return 1;
}

int decode_sees_none(const struct decode_head *head, int64_t first, int64_t last) {
    for (int32_t r = 0; r < head->num_rows; r++)
        if (first < head->rows[r].range.last && last > head->rows[r].range.first)
            return 0;
    return 1;
}

int64_t decode_seen_from(const struct decode_head *head, int64_t j, int64_t last) {
    const int64_t size = head->job->problem->block_mask_size, step = head->job->attention->block_mask.key;
    int seen = !size;
    while (!seen && j < last && j % size == 0) {
        for (int32_t r = 0; r < head->num_rows; r++)
            seen |= !head->rows[r].blocks || head->rows[r].blocks[j / size * step];
        j += seen ? 0 : size;
    }
    return j;
}
