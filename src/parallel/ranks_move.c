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
    const int64_t first = h.by_peer ? h.first + peer % h.by_peer * h.share : h.first;
    return heads_of(part->heads, (fdm_range){first, first + h.count}, plan->problem.heads_kv);
}

int64_t part_row_bytes(const fdm_ranks_plan *plan, const struct part *part, struct heads h) {
    const fdm_range heads = part_heads(plan, part, h, plan->rank);
    return part->batches * (heads.end - heads.first) * part->width;
}

char *call_take_slot(struct ranks_call *call, const struct part *part, struct heads heads, int64_t rows, int32_t slot) {
    heads.count = head_sets_most(&call->plan->sets, call->plan->slots, slot);
    return call_take(call, rows * part_row_bytes(call->plan, part, heads));
}

/* ---- moves ---- */

/* sum += part, of float32 or float64. */
static void add_floats(char *sum, const char *part, int64_t bytes, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT64)
        for (int64_t i = 0; i < bytes / 8; i++)
            ((double *)(void *)sum)[i] += ((const double *)(const void *)part)[i];
    else
        for (int64_t i = 0; i < bytes / 4; i++)
            ((float *)(void *)sum)[i] += ((const float *)(const void *)part)[i];
}

static float widened(uint16_t x, fdm_dtype dtype) {
    return dtype == FDM_FLOAT16 ? float16_to_float(x) : bfloat16_to_float(x);
}

static void move_element(const struct move *m, const char *from, char *to) {
    if (m->action == MOVE_COPY)
        memcpy(to, from, (size_t)m->width);
    else if (m->action == MOVE_ADD)
        add_floats(to, from, m->width, m->dtype);
    else if (m->action == MOVE_WIDEN)
        for (int64_t d = 0; d < m->width / 2; d++)
            ((float *)(void *)to)[d] = widened(((const uint16_t *)(const void *)from)[d], m->dtype);
    else
        for (int64_t d = 0; d < m->width / 4; d++)
            ((uint16_t *)(void *)to)[d] = m->dtype == FDM_FLOAT16
                                              ? float_to_float16(((const float *)(const void *)from)[d])
                                              : float_to_bfloat16(((const float *)(const void *)from)[d]);
}

static void move_on_host(struct move m) {
    if (m.from.head == m.width && m.to.head == move_to_width(&m)) /* they touch */
        m.width *= m.heads, m.heads = m.heads ? 1 : 0;
    for (int64_t i = 0; i < m.rows; i++)
        for (int64_t b = 0; b < m.batches; b++)
            for (int64_t h = 0; h < m.heads; h++)
                move_element(&m, m.from.data + i * m.from.row + b * m.from.batch + h * m.from.head,
                             m.to.data + i * m.to.row + b * m.to.batch + h * m.to.head);
}

void call_move(struct ranks_call *call, const struct move *move) {
    const fdm_device_id id = call->plan->device.id;
    if (call->counting || call->status)
        return;
    if (id.type == FDM_CUDA)
        call->status = rows_on_device(id.index, move, call->stream);
    else
        move_on_host(*move);
}

void call_clear(struct ranks_call *call, char *memory, int64_t bytes) {
    const fdm_device_id id = call->plan->device.id;
    if (call->counting || call->status || bytes <= 0)
        return;
    if (id.type == FDM_CUDA)
        call->status = cuda_memory_fill_async(id.index, memory, 0, (size_t)bytes, call->stream);
    else
        memset(memory, 0, (size_t)bytes);
}

/* [rows][batches][heads][width] */
static struct rows_place packed_place(char *data, int64_t batches, int64_t heads, int64_t width) {
    return (struct rows_place){data, batches * heads * width, heads * width, width};
}

static struct rows_place place_of(const struct part *p, fdm_range rows, fdm_range heads) {
    return (struct rows_place){p->data + rows.first * p->row + heads.first * p->head, p->row, p->batch, p->head};
}

/* Between rows of a part and [rows][batches][heads][width]; to_part: into the part. */
static void copy_part(struct ranks_call *call, const struct part *p, fdm_range rows, fdm_range heads, char *packed,
                      int to_part) {
    const int64_t count = heads.end - heads.first;
    const struct rows_place own = place_of(p, rows, heads), other = packed_place(packed, p->batches, count, p->width);
    const struct move move = {.action = MOVE_COPY,
                              .from = to_part ? other : own,
                              .to = to_part ? own : other,
                              .rows = rows.end - rows.first,
                              .batches = p->batches,
                              .heads = count,
                              .width = p->width};
    call_move(call, &move);
}

void part_store(struct ranks_call *call, const struct part *to, fdm_dtype dtype, fdm_range heads, int64_t rows,
                char *sums, fdm_dtype sums_dtype) {
    const int64_t count = heads.end - heads.first;
    const int64_t width = to->width / fdm_dtype_bytes(dtype) * fdm_dtype_bytes(sums_dtype);
    const struct move move = {.action = dtype == sums_dtype ? MOVE_COPY : MOVE_ROUND,
                              .dtype = dtype,
                              .from = packed_place(sums, to->batches, count, width),
                              .to = place_of(to, (fdm_range){0, rows}, heads),
                              .rows = rows,
                              .batches = to->batches,
                              .heads = count,
                              .width = width};
    call_move(call, &move);
}

void part_add(struct ranks_call *call, const struct part *from, fdm_range heads, int64_t rows, char *sums,
              fdm_dtype dtype) {
    const int64_t count = heads.end - heads.first;
    const struct move move = {.action = MOVE_ADD,
                              .dtype = dtype,
                              .from = place_of(from, (fdm_range){0, rows}, heads),
                              .to = packed_place(sums, from->batches, count, from->width),
                              .rows = rows,
                              .batches = from->batches,
                              .heads = count,
                              .width = from->width};
    call_move(call, &move);
}

void part_widen(struct ranks_call *call, const struct part *from, fdm_dtype dtype, int64_t rows, char *to) {
    const struct move move = {.action = MOVE_WIDEN,
                              .dtype = dtype,
                              .from = place_of(from, (fdm_range){0, rows}, (fdm_range){0, from->heads}),
                              .to = packed_place(to, from->batches, from->heads, 2 * from->width),
                              .rows = rows,
                              .batches = from->batches,
                              .heads = from->heads,
                              .width = from->width};
    call_move(call, &move);
}

void packed_add(struct ranks_call *call, char *sums, const char *parts, fdm_range rows, int64_t row_bytes,
                fdm_dtype dtype) {
    const int64_t first = rows.first * row_bytes;
    const struct move move = {.action = MOVE_ADD,
                              .dtype = dtype,
                              .from = packed_place((char *)(uintptr_t)parts + first, 1, 1, row_bytes),
                              .to = packed_place(sums + first, 1, 1, row_bytes),
                              .rows = rows.end - rows.first,
                              .batches = 1,
                              .heads = 1,
                              .width = row_bytes};
    call_move(call, &move);
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
    if (call->counting || call->status || call->plan->ranks == 1)
        return call->status;
    const fdm_status status = c->exchange(c->context, sends->messages, (int32_t)sends->count, receives->messages,
                                          (int32_t)receives->count, call->stream);
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
                copy_part(call, part, pair->owned, heads, to, 0);
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

typedef void visit_rows(struct ranks_call *call, const struct travel *t, int32_t n, fdm_range owned, fdm_range heads,
                        char *rows, void *argument);

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
                    visit(call, t, n, pair->owned, heads, t->buffers[n] + pair->read.first * bytes, argument);
                    continue;
                }
                visit(call, t, n, pair->owned, heads, at, argument);
                at += rows_of(pair->owned) * bytes;
            }
        }
}

static void place_rows(struct ranks_call *call, const struct travel *t, int32_t n, fdm_range owned, fdm_range heads,
                       char *rows, void *unused) {
    (void)unused;
    copy_part(call, &t->parts[n], owned, heads, rows, 1);
}

void travel_place(struct ranks_call *call, const struct travel *travel, const char *staging) {
    visit_back(call, travel, staging, place_rows, NULL);
}

struct sums {
    char *const *sums;
    fdm_dtype dtype;
};

static void add_rows(struct ranks_call *call, const struct travel *t, int32_t n, fdm_range owned, fdm_range heads,
                     char *rows, void *argument) {
    const struct sums *s = argument;
    const struct part *part = &t->parts[n];
    const int64_t count = rows_of(heads), all = t->heads.by_peer ? part->heads : count;
    const int64_t first = t->heads.by_peer ? heads.first : 0, row = part->batches * all * part->width;
    const struct move move = {
        .action = MOVE_ADD,
        .dtype = s->dtype,
        .from = packed_place(rows, part->batches, count, part->width),
        .to = packed_place(s->sums[n] + owned.first * row + first * part->width, part->batches, all, part->width),
        .rows = rows_of(owned),
        .batches = part->batches,
        .heads = count,
        .width = part->width};
    call_move(call, &move);
}

void travel_add(struct ranks_call *call, const struct travel *travel, const char *staging, char *const *sums) {
    struct sums s = {sums, call->plan->problem.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32};
    visit_back(call, travel, staging, add_rows, &s);
}
