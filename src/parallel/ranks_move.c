/* ranks_move.c: rows of one rank for another: packed, sent, received, and put in their places. */
#include <string.h>

#include "base/error.h"
#include "base/half.h"
#include "parallel/ranks_call.h"
#include "problem/tensor.h"

char *call_take(struct ranks_call *call, int64_t bytes) {
    char *taken = call->at;
    call->at += (bytes + 63) / 64 * 64;
    return taken;
}

/* ---- parts ---- */

static struct part part_with(const fdm_tensor *t, int32_t batch, int32_t row, int32_t head, int64_t width) {
    const int64_t unit = fdm_dtype_bytes(fdm_dtype_of(t));
    return (struct part){.data = tensor_data(t),
                         .batch = tensor_stride(t, batch) * unit,
                         .row = tensor_stride(t, row) * unit,
                         .head = tensor_stride(t, head) * unit,
                         .batches = t->shape[batch],
                         .heads = t->shape[head],
                         .width = width * unit};
}

struct part part_of_matrix(const fdm_tensor *t) {
    return part_with(t, 0, 1, 2, t->shape[3]);
}
struct part part_of_rows(const fdm_tensor *t) {
    return part_with(t, 0, 2, 1, 1);
}
struct part part_of_keys(const fdm_tensor *t) {
    return part_with(t, 0, 3, 1, 1);
}

fdm_range heads_of(int64_t heads, fdm_range heads_kv, int64_t all_kv) {
    if (heads == 1 && all_kv > 1)
        return (fdm_range){0, 1};
    return (fdm_range){heads_kv.first * heads / all_kv, heads_kv.end * heads / all_kv};
}

fdm_range part_heads(const fdm_ranks_plan *plan, const struct part *part, struct heads h, int32_t peer) {
    const int64_t first = h.by_peer ? h.first + peer % h.by_peer * h.count : h.first;
    return heads_of(part->heads, (fdm_range){first, first + h.count}, plan->problem.heads_kv);
}

int64_t part_row_bytes(const fdm_ranks_plan *plan, const struct part *part, struct heads h) {
    const fdm_range heads = part_heads(plan, part, h, plan->rank);
    return part->batches * (heads.end - heads.first) * part->width;
}

/* ---- copies ---- */

/* Between rows of a part and [rows][batches][heads][width]; to_part: into the part. */
static void copy_part(const struct part *p, fdm_range rows, fdm_range heads, char *packed, int to_part) {
    const int64_t count = heads.end - heads.first, touch = p->head == p->width || count <= 1;
    const int64_t runs = touch ? 1 : count, bytes = touch ? count * p->width : p->width;
    for (int64_t i = rows.first; i < rows.end; i++)
        for (int64_t b = 0; b < p->batches; b++)
            for (int64_t h = 0; h < runs; h++, packed += bytes) {
                char *own = p->data + b * p->batch + i * p->row + (heads.first + h) * p->head;
                memcpy(to_part ? own : packed, to_part ? packed : own, (size_t)bytes);
            }
}

void add_floats(char *sum, const char *part, int64_t bytes, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT64)
        for (int64_t i = 0; i < bytes / 8; i++)
            ((double *)(void *)sum)[i] += ((const double *)(const void *)part)[i];
    else
        for (int64_t i = 0; i < bytes / 4; i++)
            ((float *)(void *)sum)[i] += ((const float *)(const void *)part)[i];
}

static void store_row(char *to, fdm_dtype dtype, const char *from, int64_t count, fdm_dtype from_dtype) {
    if (dtype == from_dtype) {
        memcpy(to, from, (size_t)(count * fdm_dtype_bytes(dtype)));
        return;
    }
    const float *values = (const float *)(const void *)from;
    for (int64_t d = 0; d < count; d++)
        ((uint16_t *)(void *)to)[d] = dtype == FDM_FLOAT16 ? float_to_float16(values[d]) : float_to_bfloat16(values[d]);
}

void part_store(const struct ranks_call *call, const struct part *to, fdm_dtype dtype, fdm_range heads, int64_t rows,
                const char *sums, fdm_dtype sums_dtype) {
    const int64_t count = to->width / fdm_dtype_bytes(dtype), bytes = count * fdm_dtype_bytes(sums_dtype);
    for (int64_t i = 0; !call->counting && i < rows; i++)
        for (int64_t b = 0; b < to->batches; b++)
            for (int64_t h = heads.first; h < heads.end; h++, sums += bytes)
                store_row(to->data + b * to->batch + i * to->row + h * to->head, dtype, sums, count, sums_dtype);
}

double element_value(const char *at, fdm_dtype dtype) {
    switch (dtype) {
    case FDM_FLOAT16: return float16_to_float(*(const uint16_t *)(const void *)at);
    case FDM_BFLOAT16: return bfloat16_to_float(*(const uint16_t *)(const void *)at);
    case FDM_FLOAT32: return *(const float *)(const void *)at;
    default: return *(const double *)(const void *)at;
    }
}

void part_widen(const struct part *from, fdm_dtype dtype, int64_t rows, float *to) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t b = 0; b < from->batches; b++)
            for (int64_t h = 0; h < from->heads; h++) {
                const char *row = from->data + b * from->batch + i * from->row + h * from->head;
                for (int64_t d = 0; d < from->width; d += fdm_dtype_bytes(dtype))
                    *to++ = (float)element_value(row + d, dtype);
            }
}

/* ---- messages ---- */

struct queue {
    fdm_message *messages;
    int64_t count, bytes;
};

static void add_message(struct ranks_call *call, struct queue *q, int32_t peer, char *memory, int64_t bytes) {
    if (!bytes)
        return;
    if (!call->counting)
        q->messages[q->count] = (fdm_message){.peer = peer, .memory = memory, .bytes = (size_t)bytes};
    q->count++;
    q->bytes += bytes;
}

static fdm_status exchange(struct ranks_call *call, const struct queue *sends, const struct queue *receives) {
    fdm_communicator *c = call->communicator;
    const int64_t most = sends->count > receives->count ? sends->count : receives->count;
    call->num_messages = most > call->num_messages ? most : call->num_messages;
    call->bytes_sent += sends->bytes;
    call->bytes_received += receives->bytes;
    if (call->counting || call->plan->ranks == 1)
        return FDM_OK;
    const fdm_status status = c->exchange(c->context, sends->messages, (int32_t)sends->count, receives->messages,
                                          (int32_t)receives->count, call->launch ? call->launch->stream : NULL);
    if (!status)
        return FDM_OK;
    c->broken = 1;
    return error_set(FDM_ERROR_REMOTE,
                     "a peer of rank %d failed, ended or was late, so that results of this call are undefined; the "
                     "communicator takes no more calls",
                     call->plan->rank);
}

static int64_t rows_of(fdm_range range) { return range.end - range.first; }

fdm_status travel_there(struct ranks_call *call, const struct travel *t, char *staging) {
    const fdm_ranks_plan *plan = call->plan;
    struct queue sends = {call->sends, 0, 0}, receives = {call->receives, 0, 0};
    for (int32_t peer = 0; peer < plan->ranks; peer++)
        for (int32_t n = 0; n < t->count; n++) {
            const struct part *part = &t->parts[n];
            const fdm_range heads = part_heads(plan, part, t->heads, peer);
            const int64_t own_bytes = part_row_bytes(plan, part, t->heads);
            const int64_t bytes = part->batches * rows_of(heads) * part->width;
            for (int64_t i = t->sends->begin[peer]; i < t->sends->begin[peer + 1]; i++) {
                const struct route_pair *pair = &t->sends->pairs[i];
                char *to = peer == plan->rank ? t->buffers[n] + pair->read.first * own_bytes : staging;
                if (!call->counting)
                    copy_part(part, pair->owned, heads, to, 0);
                if (peer == plan->rank)
                    continue;
                add_message(call, &sends, peer, staging, rows_of(pair->owned) * bytes);
                staging += rows_of(pair->owned) * bytes;
            }
            for (int64_t i = t->receives->begin[peer]; peer != plan->rank && i < t->receives->begin[peer + 1]; i++) {
                const fdm_range read = t->receives->pairs[i].read;
                add_message(call, &receives, peer, t->buffers[n] + read.first * own_bytes, rows_of(read) * own_bytes);
            }
        }
    return exchange(call, &sends, &receives);
}

fdm_status travel_back(struct ranks_call *call, const struct travel *t, char *staging) {
    const fdm_ranks_plan *plan = call->plan;
    struct queue sends = {call->sends, 0, 0}, receives = {call->receives, 0, 0};
    for (int32_t peer = 0; peer < plan->ranks; peer++)
        for (int32_t n = 0; peer != plan->rank && n < t->count; n++) {
            const struct part *part = &t->parts[n];
            const int64_t own_bytes = part_row_bytes(plan, part, t->heads);
            const int64_t bytes = part->batches * rows_of(part_heads(plan, part, t->heads, peer)) * part->width;
            for (int64_t i = t->receives->begin[peer]; i < t->receives->begin[peer + 1]; i++) {
                const fdm_range read = t->receives->pairs[i].read;
                add_message(call, &sends, peer, t->buffers[n] + read.first * own_bytes, rows_of(read) * own_bytes);
            }
            for (int64_t i = t->sends->begin[peer]; i < t->sends->begin[peer + 1]; i++) {
                const int64_t size = rows_of(t->sends->pairs[i].owned) * bytes;
                add_message(call, &receives, peer, staging, size);
                staging += size;
            }
        }
    return exchange(call, &sends, &receives);
}

int64_t travel_bytes(const struct ranks_call *call, const struct travel *t) {
    const fdm_ranks_plan *plan = call->plan;
    int64_t bytes = 0;
    for (int32_t peer = 0; peer < plan->ranks; peer++)
        for (int32_t n = 0; peer != plan->rank && n < t->count; n++)
            bytes += routes_rows(t->sends, peer) * t->parts[n].batches * t->parts[n].width *
                     rows_of(part_heads(plan, &t->parts[n], t->heads, peer));
    return bytes;
}

/* ---- what came back ---- */

typedef void visit_rows(const struct travel *t, int32_t n, fdm_range owned, fdm_range heads, char *rows,
                        void *argument);

static void visit_back(struct ranks_call *call, const struct travel *t, const char *staging, visit_rows *visit,
                       void *argument) {
    const fdm_ranks_plan *plan = call->plan;
    char *at = (char *)(uintptr_t)staging;
    for (int32_t peer = 0; !call->counting && peer < plan->ranks; peer++)
        for (int32_t n = 0; n < t->count; n++) {
            const struct part *part = &t->parts[n];
            const fdm_range heads = part_heads(plan, part, t->heads, peer);
            const int64_t bytes = part->batches * rows_of(heads) * part->width;
            for (int64_t i = t->sends->begin[peer]; i < t->sends->begin[peer + 1]; i++) {
                const struct route_pair *pair = &t->sends->pairs[i];
                if (peer == plan->rank) {
                    visit(t, n, pair->owned, heads, t->buffers[n] + pair->read.first * bytes, argument);
                    continue;
                }
                visit(t, n, pair->owned, heads, at, argument);
                at += rows_of(pair->owned) * bytes;
            }
        }
}

static void place_rows(const struct travel *t, int32_t n, fdm_range owned, fdm_range heads, char *rows, void *unused) {
    (void)unused;
    copy_part(&t->parts[n], owned, heads, rows, 1);
}

void travel_place(struct ranks_call *call, const struct travel *travel, const char *staging) {
    visit_back(call, travel, staging, place_rows, NULL);
}

struct sums {
    char *const *sums;
    fdm_dtype dtype;
};

static void add_rows(const struct travel *t, int32_t n, fdm_range owned, fdm_range heads, char *rows, void *argument) {
    const struct sums *s = argument;
    const struct part *part = &t->parts[n];
    const int64_t bytes = rows_of(heads) * part->width;
    const int64_t all = t->heads.by_peer ? part->heads * part->width : bytes;
    char *to = s->sums[n] + owned.first * part->batches * all + (t->heads.by_peer ? heads.first * part->width : 0);
    for (int64_t i = 0; i < rows_of(owned) * part->batches; i++)
        add_floats(to + i * all, rows + i * bytes, bytes, s->dtype);
}

void travel_add(struct ranks_call *call, const struct travel *travel, const char *staging, char *const *sums) {
    struct sums s = {sums, call->plan->problem.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32};
    visit_back(call, travel, staging, add_rows, &s);
}
