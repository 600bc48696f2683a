/* decode.c: the forward pass for few query rows and many keys ("flash decoding", split along the keys).
 *
 * The keys of each sequence are cut into chunks, whose length depends on the problem alone, or as options say on the
 * sequence, so that results do not depend on threads. An item is one chunk for some neighbouring KV heads: where the
 * heads of a key lie side by side in memory (bshd), walking blocks of keys outside and heads inside reads memory in
 * order, which is worth 40 % of the bandwidth. Each (chunk, KV head) leaves a partial result in the workspace: maximum,
 * sum and unnormalised output of its rows. Whoever finishes the last chunk of a KV head combines them, in the order of
 * the chunks. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/half.h"
#include "base/integers.h"
#include "device/isa.h"
#include "device/threads.h"
#include "families/cpu/cpu_family.h"
#include "families/cpu/decode_call.h"
#include "families/cpu/key_rows.h"

enum {
    VARIED_KEYS = 256,       /* keys of one head before the next head's turn, where visibility varies */
    CHUNK_KEYS_MAX = 4096,   /* a multiple of VARIED_KEYS, as is every chunk */
    AHEAD_BYTES = 128 << 10, /* of K and V, read while the block before is computed; both fit half of a second cache */
    BLOCK_KEYS_MIN = 16,
    PARTIALS_WANTED = 256, /* (KV head, chunk) pairs that keep any machine busy */
    PART_KEYS = 1024,      /* beside invariance: keys of a chunk, or more where they would be more chunks than these */
    PARTS_MAX = 32,
    CACHE_LINE_FLOATS = 16,
};

static int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
/* ---- shape of the work ---- */

static const struct cpu_kernels *kernels_of(const fdm_problem *problem, const fdm_plan *plan) {
    return cpu_isa_kernels(cpu_plan_isa(plan), problem->dtype);
}

int cpu_decode_suits(const fdm_problem *problem) {
    return problem->pass == FDM_FORWARD && problem->invariance < FDM_INVARIANCE_SCHEDULE &&
           problem->dtype != FDM_FLOAT64 && problem->heads_kv > 0 &&
           problem->seqlen_q * (problem->heads / problem->heads_kv) <= DECODE_HEAD_ROWS;
}

static int64_t padded_rows(int64_t rows, int32_t most) {
    int64_t padded = 0;
    while (padded < rows)
        padded += decode_step_rows(rows - padded, most);
    return padded;
}

/* Chunks that options ask for, of a sequence of seqlen_k keys. */
static int64_t wanted_chunks(const fdm_problem *problem, int64_t seqlen_k) {
    const int64_t chunks =
        problem->num_splits ? problem->num_splits : smaller((seqlen_k + PART_KEYS - 1) / PART_KEYS, PARTS_MAX);
    return chunks > 1 ? chunks : 1;
}
/* Keys of a chunk of such a sequence. */
static int64_t chunk_keys_of(const fdm_problem *problem, int64_t seqlen_k) {
    const int64_t pairs = problem->batch * problem->heads_kv;
    const int64_t chunks = pairs > 0 ? (PARTIALS_WANTED + pairs - 1) / pairs : 1;
    if (problem->split_keys)
        return problem->split_keys;
    if (problem_fixes_splits(problem))
        return round_up((seqlen_k - 1) / wanted_chunks(problem, seqlen_k) + 1, VARIED_KEYS);
    return smaller(round_up(problem->seqlen_k / chunks + 1, VARIED_KEYS), CHUNK_KEYS_MAX);
}
static int64_t chunks_of_length(const fdm_problem *problem, int64_t seqlen_k) {
    const int64_t keys = chunk_keys_of(problem, seqlen_k);
    return seqlen_k > 0 ? (seqlen_k + keys - 1) / keys : 1;
}
/* The most that a sequence has. A longer one may have fewer, since chunks are rounded. */
static int64_t chunks_at_most(const fdm_problem *problem) {
    if (!problem_fixes_splits(problem) || problem->split_keys)
        return chunks_of_length(problem, problem->seqlen_k);
    const int64_t rounded = (problem->seqlen_k + VARIED_KEYS - 1) / VARIED_KEYS;
    return smaller(wanted_chunks(problem, problem->seqlen_k), rounded > 1 ? rounded : 1);
}

static struct decode_layout make_layout(const fdm_problem *problem, const struct decode_kernels *kernels,
                                        int32_t num_threads) {
    struct decode_layout layout = {0};
    int64_t pairs = problem->batch * problem->heads_kv;
    layout.num_chunks = chunks_at_most(problem);
    int64_t group = problem->heads_kv > 0 ? problem->heads / problem->heads_kv : 1;
    layout.rows = padded_rows(problem->seqlen_q * group, kernels->max_rows);
    layout.acc_row = round_up(problem->head_dim_v, DECODE_LANES_MAX);
    layout.partial_floats = round_up(layout.rows * (layout.acc_row + 2), CACHE_LINE_FLOATS);
    layout.queries_floats = problem->heads_kv * layout.rows * DECODE_ROW_MAX;
    layout.pending = pairs * layout.num_chunks * layout.partial_floats * (int64_t)sizeof(float);
    layout.queries = layout.pending + round_up(pairs * (int64_t)sizeof(atomic_int), 64);
    layout.bytes = layout.queries + num_threads * layout.queries_floats * (int64_t)sizeof(float);
    return layout;
}

void cpu_decode_blocks(const fdm_problem *problem, const struct cpu_kernels *kernels, int32_t *block_m,
                       int32_t *block_n) {
    *block_m = decode_step_rows(problem->seqlen_q * (problem->heads / problem->heads_kv), kernels->decode->max_rows);
    *block_n = DECODE_KEYS;
}

int64_t cpu_decode_workspace(const fdm_problem *problem, const fdm_plan *plan) {
    return make_layout(problem, kernels_of(problem, plan)->decode, plan->num_threads).bytes;
}

static float *partial_of(const struct decode_job *job, int64_t batch, int64_t kv_head, int64_t chunk) {
    int64_t index = (batch * job->problem->heads_kv + kv_head) * job->layout.num_chunks + chunk;
    return (float *)(void *)(job->workspace + job->layout.partials) + index * job->layout.partial_floats;
}

static atomic_int *pending_of(const struct decode_job *job, int64_t batch, int64_t kv_head) {
    return (atomic_int *)(void *)(job->workspace + job->layout.pending) + batch * job->problem->heads_kv + kv_head;
}

/* Chunks of a sequence: at least one, so that somebody writes the rows of a sequence without keys. */
static int64_t chunks_of(const struct decode_job *job, const struct sequence *sequence) {
    return chunks_of_length(job->problem, sequence->seqlen_k);
}

/* ---- partial results ---- */

/* K and V of the block after the present one; beside a cache, where the rows of its keys begin. */
struct read_ahead {
    struct decode_stream k, v;
    const char *starts[2][DECODE_KEYS + 1];
};

static void find_key_rows(const struct decode_head *head, const struct decode_keys *keys, int of_values,
                          const char **rows) {
    struct key_run run = {.attention = head->job->attention,
                          .sequence = &head->sequence,
                          .batch = head->batch,
                          .kv_head = head->kv_head,
                          .of_values = of_values};
    for (int32_t k = 0; k < keys->num_keys; k++)
        rows[k] = key_address(&run, keys->key[k]);
}

static void run_steps(const struct decode_head *head, const struct decode_keys *keys, int with_bias, float *partial,
                      const float *q, struct read_ahead *ahead) {
    const struct decode_job *job = head->job;
    const fdm_problem *p = job->problem;
    const char *k[DECODE_KEYS], *v[DECODE_KEYS];
    struct decode_stream none[2] = {{0}, {0}};
    struct decode_step step = {.k = k,
                               .v = v,
                               .num_keys = keys->num_keys,
                               .head_dim = (int32_t)p->head_dim,
                               .head_dim_v = (int32_t)p->head_dim_v,
                               .dtype = p->dtype,
                               .scale = (float)p->softmax_scale,
                               .softcap = (float)p->softcap,
                               .acc_row = job->layout.acc_row};
    find_key_rows(head, keys, 0, k);
    find_key_rows(head, keys, 1, v);
    for (int32_t first = 0; first < head->num_rows; first += step.num_rows) {
        step.num_rows = decode_step_rows(head->num_rows - first, job->kernels->max_rows);
        step.q = q + first * DECODE_ROW_MAX;
        step.k_ahead = first == 0 ? &ahead->k : &none[0]; /* later rows find K and V in a cache */
        step.v_ahead = first == 0 ? &ahead->v : &none[1];
        step.bias = with_bias ? keys->bias + first * DECODE_KEYS : NULL;
        step.max = partial + first;
        step.sum = partial + job->layout.rows + first;
        step.acc = partial + 2 * job->layout.rows + first * job->layout.acc_row;
        job->kernels->step(&step);
    }
}

/* Adds keys first .. last-1 to the partial result. */
static void add_block(const struct decode_head *head, int64_t first, int64_t last, float *partial, const float *q,
                      struct read_ahead *ahead) {
    struct decode_keys keys = {.num_keys = 0};
    if (decode_sees_none(head, first, last))
        return;
    if (last - first <= DECODE_KEYS && decode_sees_all(head, first, last)) {
        for (; first < last; first++)
            keys.key[keys.num_keys++] = (int32_t)first;
        run_steps(head, &keys, 0, partial, q, ahead);
        return;
    }
    for (int64_t j = decode_seen_from(head, first, last); j < last; j = decode_seen_from(head, j + 1, last)) {
        decode_take_key(&keys, head, j);
        if (keys.num_keys == DECODE_KEYS) {
            run_steps(head, &keys, 1, partial, q, ahead);
            keys.num_keys = 0;
        }
    }
    if (keys.num_keys > 0)
        run_steps(head, &keys, 1, partial, q, ahead);
}

static void load_queries(const struct decode_head *head, float *q) {
    const struct decode_job *job = head->job;
    const struct matrix_view *view = &job->attention->q;
    int64_t bytes = fdm_dtype_bytes(job->problem->dtype);
    memset(q, 0, (size_t)(job->layout.rows * DECODE_ROW_MAX) * sizeof *q);
    for (int32_t r = 0; r < head->num_rows; r++) {
        const struct decode_row *row = &head->rows[r];
        int64_t offset =
            head->batch * view->batch + (head->sequence.q_begin + row->i) * view->row + row->head * view->head;
        job->kernels->load_row(q + r * DECODE_ROW_MAX, view->data + offset * bytes, (int32_t)job->problem->head_dim,
                               job->problem->dtype);
    }
}

/* ---- combining the chunks of one KV head ---- */

/* Slots to elements, in place: pairs of bfloat16 slots are merged, and the last slot overlaps the one before it. */
static void slots_to_row(float *slots, int64_t depth, int32_t lanes, fdm_dtype dtype) {
    int64_t tail = depth % lanes;
    if (depth > lanes && tail)
        memmove(slots + depth - tail, slots + depth - tail + lanes - tail, (size_t)tail * sizeof *slots);
    if (dtype != FDM_BFLOAT16)
        return;
    for (float *pair = slots; pair + 2 * lanes <= slots + depth; pair += 2 * lanes) {
        float even_odd[2 * DECODE_LANES_MAX];
        memcpy(even_odd, pair, 2 * (size_t)lanes * sizeof *pair);
        for (int32_t i = 0; i < lanes; i++) {
            pair[2 * i] = even_odd[i];
            pair[2 * i + 1] = even_odd[lanes + i];
        }
    }
}

static void store_row(const struct decode_head *head, const struct decode_row *row, float *slots) {
    const struct decode_job *job = head->job;
    const struct attention *a = job->attention;
    int64_t i = head->sequence.q_begin + row->i, depth = job->problem->head_dim_v;
    int64_t offset = head->batch * a->out.batch + i * a->out.row + row->head * a->out.head;
    slots_to_row(slots, depth, job->kernels->lanes, job->problem->dtype);
    job->store->round_row(a->out.data + offset * fdm_dtype_bytes(job->problem->dtype), slots, (int32_t)depth,
                          job->problem->dtype);
}

static void combine_row(const struct decode_head *head, int32_t r) {
    const struct decode_layout *layout = &head->job->layout;
    const float *first = partial_of(head->job, head->batch, head->kv_head, 0);
    int64_t chunks = chunks_of(head->job, &head->sequence);
    float slots[DECODE_ROW_MAX] = {0}, max = -INFINITY, sum = 0;
    for (int64_t c = 0; c < chunks; c++)
        max = fmaxf(max, first[c * layout->partial_floats + r]);
    for (int64_t c = 0; c < chunks; c++) {
        const float *partial = first + c * layout->partial_floats;
        if (partial[r] == -INFINITY && partial[layout->rows + r] == 0)
            continue;
        const float *acc = partial + 2 * layout->rows + r * layout->acc_row;
        float weight = expf(partial[r] - max);
        sum += weight * partial[layout->rows + r];
        for (int64_t d = 0; d < layout->acc_row; d++)
            slots[d] += weight * acc[d];
    }
    const struct decode_row *row = &head->rows[r];
    const float factor = cpu_end_row(head->job->attention, head->batch, row->head, head->sequence.q_begin + row->i, max,
                                     max == -INFINITY && sum == 0 ? 0 : sum);
    for (int64_t d = 0; d < layout->acc_row; d++)
        slots[d] *= factor;
    store_row(head, row, slots);
}

/* ---- items ---- */

static void clear_partial(const struct decode_layout *layout, float *partial) {
    for (int64_t r = 0; r < layout->rows; r++)
        partial[r] = -INFINITY;
    memset(partial + layout->rows, 0, (size_t)(layout->rows * (layout->acc_row + 1)) * sizeof *partial);
}

static void finish_chunk(const struct decode_head *head) {
    if (atomic_fetch_sub(pending_of(head->job, head->batch, head->kv_head), 1) > 1)
        return;
    for (int32_t r = 0; r < head->num_rows; r++)
        combine_row(head, r);
}

/* One chunk of keys of some neighbouring KV heads. */
struct decode_item {
    int64_t batch, chunk, first_head, last_head;
    struct sequence sequence;
    int64_t first_key, last_key; /* the same where the sequence has fewer chunks */
};

static struct decode_item item_of(const struct decode_job *job, int64_t index) {
    const struct decode_layout *layout = &job->layout;
    int64_t groups = (job->problem->heads_kv + job->heads_per_item - 1) / job->heads_per_item;
    struct decode_item item = {.batch = index / groups / layout->num_chunks,
                               .chunk = index / groups % layout->num_chunks,
                               .first_head = index % groups * job->heads_per_item};
    item.last_head = smaller(item.first_head + job->heads_per_item, job->problem->heads_kv);
    item.sequence = attention_sequence(job->attention, item.batch);
    const int64_t keys = chunk_keys_of(job->problem, item.sequence.seqlen_k);
    item.first_key = smaller(item.chunk * keys, item.sequence.seqlen_k);
    item.last_key = smaller(item.first_key + keys, item.sequence.seqlen_k);
    return item;
}

/* The head that an item begins with, at the rows of the item's keys. */
static struct key_run run_of(const struct decode_job *job, const struct decode_item *item, int of_values) {
    return (struct key_run){.attention = job->attention,
                            .sequence = &item->sequence,
                            .batch = item->batch,
                            .kv_head = item->first_head,
                            .of_values = of_values};
}

/* Rows of `count` keys from `key` on of the item's heads, in `starts` beside a cache; nothing where heads do not lie
 * side by side. */
static struct decode_stream rows_from(const struct decode_job *job, const struct decode_item *item, int64_t key,
                                      int64_t count, int of_values, const char **starts) {
    const struct matrix_view *view = of_values ? &job->attention->v : &job->attention->k;
    const int64_t bytes = fdm_dtype_bytes(job->problem->dtype), heads = item->last_head - item->first_head;
    const int64_t depth = of_values ? job->problem->head_dim_v : job->problem->head_dim;
    struct decode_stream stream = {0};
    if (heads > 1 && view->head != depth)
        return stream;
    struct key_run run = run_of(job, item, of_values);
    stream.next = key_address(&run, key);
    stream.left = stream.run = heads * depth * bytes;
    stream.skip = view->row * bytes - stream.run;
    if (job->problem->has_cache) {
        for (int64_t n = 1; n < count; n++)
            starts[n - 1] = key_address(&run, key + n);
        starts[count - 1] = NULL;
        stream.starts = starts;
    }
    return stream;
}

/* The block from `key` on of the item. */
static void read_ahead(const struct decode_job *job, const struct decode_item *item, int64_t key,
                       struct read_ahead *ahead) {
    const int64_t count = smaller(job->block_keys, item->last_key - key);
    ahead->k = ahead->v = (struct decode_stream){0};
    if (count < 1)
        return;
    ahead->k = rows_from(job, item, key, count, 0, ahead->starts[0]);
    ahead->v = rows_from(job, item, key, count, 1, ahead->starts[1]);
}

/* Blocks of keys outside, heads inside: see the top. While a block is computed, the next one is read into a cache in
 * the order of memory; after the last block that is the first one of the item `after`. */
static void run_blocks(const struct decode_job *job, const struct decode_item *item, const struct decode_item *after,
                       float *queries) {
    const fdm_problem *p = job->problem;
    int varied = p->has_mask || p->has_bias || p->has_intervals || p->block_mask_size ||
                 (p->has_row_intervals && p->row_ranges > 1);
    int64_t block = varied ? VARIED_KEYS : job->block_keys;
    struct decode_head head;
    struct read_ahead ahead;
    ahead.k = ahead.v = (struct decode_stream){0};
    for (int64_t j = item->first_key; j < item->last_key; j += block) {
        int64_t next = j + block;
        if (!varied && next < item->last_key)
            read_ahead(job, item, next, &ahead);
        else if (!varied)
            read_ahead(job, after, after->first_key, &ahead);
        for (int64_t h = item->first_head; h < item->last_head; h++) {
            decode_head_init(&head, job, item->batch, h);
            add_block(&head, j, smaller(next, item->last_key), partial_of(job, item->batch, h, item->chunk),
                      queries + h * job->layout.rows * DECODE_ROW_MAX, &ahead);
        }
    }
}

static void run_item(const struct decode_job *job, const struct decode_item *item, const struct decode_item *after,
                     float *queries) {
    if (item->sequence.seqlen_q == 0 || item->chunk >= chunks_of(job, &item->sequence))
        return;
    struct decode_head head;
    for (int64_t h = item->first_head; h < item->last_head; h++) {
        decode_head_init(&head, job, item->batch, h);
        load_queries(&head, queries + h * job->layout.rows * DECODE_ROW_MAX);
        clear_partial(&job->layout, partial_of(job, item->batch, h, item->chunk));
    }
    run_blocks(job, item, after, queries);
    for (int64_t h = item->first_head; h < item->last_head; h++) {
        decode_head_init(&head, job, item->batch, h);
        finish_chunk(&head);
    }
}

static int64_t take_item(struct decode_job *job) { return atomic_fetch_add(&job->next_item, 1); }

static void work(void *argument, int32_t index) {
    struct decode_job *job = argument;
    float *queries = (float *)(void *)(job->workspace + job->layout.queries) + index * job->layout.queries_floats;
    for (int64_t i = take_item(job), next; i < job->num_items; i = next) {
        next = take_item(job);
        struct decode_item item = item_of(job, i), after = {0};
        if (next < job->num_items)
            after = item_of(job, next);
        run_item(job, &item, &after, queries);
    }
}

static int heads_are_interleaved(const struct attention *attention) { return attention->k.head < attention->k.row; }

/* KV heads of an item: all where they are interleaved in memory, fewer when the threads would go without. */
static int64_t choose_heads_per_item(const struct decode_job *job, int32_t num_threads) {
    int64_t units = job->problem->batch * job->layout.num_chunks, all = job->problem->heads_kv;
    int64_t heads = heads_are_interleaved(job->attention) ? all : 1;
    while (heads > 1 && units * ((all + heads - 1) / heads) < 4 * (int64_t)num_threads)
        heads = (heads + 1) / 2;
    return heads;
}

/* A power of two. It decides the result's last bits, so it does not depend on threads. */
static int64_t choose_block_keys(const struct attention *attention) {
    const fdm_problem *p = attention->problem;
    int64_t heads = p->invariance || heads_are_interleaved(attention) ? p->heads_kv : 1, keys = DECODE_KEYS;
    int64_t key_bytes = heads * (p->head_dim + p->head_dim_v) * fdm_dtype_bytes(p->dtype);
    while (keys > BLOCK_KEYS_MIN && keys * key_bytes > AHEAD_BYTES)
        keys /= 2;
    return keys;
}

fdm_status cpu_decode(const fdm_plan *plan, const struct attention *attention, void *workspace,
                      const fdm_launch *launch) {
    const fdm_problem *problem = attention->problem;
    if (problem->batch == 0 || problem->seqlen_q == 0 || problem->heads_kv == 0)
        return FDM_OK;
    struct decode_job job = {.attention = attention,
                             .problem = problem,
                             .kernels = kernels_of(problem, plan)->decode,
                             .store = kernels_of(problem, plan),
                             .workspace = workspace,
                             .group = problem->heads / problem->heads_kv};
    job.layout = make_layout(problem, job.kernels, plan->num_threads);
    job.block_keys = choose_block_keys(attention);
    job.heads_per_item = choose_heads_per_item(&job, plan->num_threads);
    int64_t groups = (problem->heads_kv + job.heads_per_item - 1) / job.heads_per_item;
    job.num_items = problem->batch * job.layout.num_chunks * groups;
    atomic_init(&job.next_item, 0);
    for (int64_t b = 0; b < problem->batch; b++) {
        struct sequence sequence = attention_sequence(attention, b);
        for (int64_t h = 0; h < problem->heads_kv; h++)
            atomic_init(pending_of(&job, b, h), (int)chunks_of(&job, &sequence));
    }
    threads_run(launch ? launch->executor : NULL, (int32_t)smaller(plan->num_threads, job.num_items), work, &job);
    return FDM_OK;
}
