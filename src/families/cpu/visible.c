/* visible.c: finds the keys a block of lanes can see, and which lanes see them.
 *
 * Rows rise along lanes, so causal, window and an interval each leave a key visible to one range of lanes; the bits of
 * a panel are that range. A dense mask is read 64 keys at a time and combined with it. */
#include "visible.h"

enum { CHUNK_KEYS = 64 };

struct lane_range {
    int64_t first, last; /* first <= lane < last; may be empty or beyond the block */
};

static int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }

void lane_block_init(struct lane_block *block, const struct attention *attention, const struct cpu_kernels *kernels,
                     int64_t batch, int64_t kv_head, int64_t first, int32_t count) {
    block->attention = attention;
    block->kernels = kernels;
    block->sequence = attention_sequence(attention, batch);
    block->batch = batch;
    block->kv_head = kv_head;
    block->first = first;
    block->group = attention->problem->heads / attention->problem->heads_kv;
    block->num_lanes = count;
    block->num_panels = (count + CPU_LANES - 1) / CPU_LANES;
    int64_t row = first / block->group, head = first % block->group;
    for (int32_t lane = 0; lane < count; lane++) {
        block->row[lane] = row;
        block->head[lane] = kv_head * block->group + head;
        if (++head == block->group) {
            head = 0;
            row++;
        }
    }
}

/* Lanes of rows first_row <= row < last_row. */
static struct lane_range lanes_of_rows(const struct lane_block *block, int64_t first_row, int64_t last_row) {
    return (struct lane_range){first_row * block->group - block->first, last_row * block->group - block->first};
}

/* Lanes that causal and window let see key j. Windows are cut to where they still mean "unbounded". */
static struct lane_range lanes_of_key(const struct lane_block *block, int64_t j) {
    const fdm_problem *p = block->attention->problem;
    const int64_t far = INT64_C(1) << 40;
    int64_t shift = block->sequence.seqlen_k - block->sequence.seqlen_q;
    int64_t right = p->window_right >= 0 ? lower(p->window_right, far) : far;
    int64_t left = p->window_left >= 0 ? lower(p->window_left, far) : far;
    if (p->causal)
        right = 0;
    return lanes_of_rows(block, higher(j - right - shift, 0),
                         lower(j + left - shift, block->sequence.seqlen_q - 1) + 1);
}

/* Bits first .. last-1 of the panel's word; both relative to the panel, any value. */
static uint64_t range_bits(int64_t first, int64_t last) {
    first = first > 0 ? first : 0;
    last = last < CPU_LANES ? last : CPU_LANES;
    return first < last ? ~UINT64_C(0) >> (CPU_LANES - (last - first)) << first : 0;
}

static uint64_t panel_lanes(const struct lane_block *block, int32_t panel) {
    return range_bits(0, lane_block_panel_lanes(block, panel));
}

/* How a tensor's heads meet the query heads of a KV group: one for all of them, or one each. */
static int64_t heads_in_group(const struct lane_block *block, int64_t shared_by) {
    return shared_by < block->group ? block->group / shared_by : 1;
}

/* Lanes of a panel that read head t of those heads: every group-th lane. */
static uint64_t lanes_of_head(const struct lane_block *block, int32_t panel, int64_t heads, int64_t t) {
    if (heads == 1)
        return ~UINT64_C(0);
    int64_t share = block->group / heads, begin = block->first + (int64_t)panel * CPU_LANES;
    uint64_t bits = 0;
    for (int64_t of = t * share; of < (t + 1) * share; of++)
        for (int64_t lane = (of - begin % block->group + block->group) % block->group; lane < CPU_LANES;
             lane += block->group)
            bits |= UINT64_C(1) << lane;
    return bits;
}

/* ---- intervals ---- */

struct interval_reader {
    const int32_t *start, *end; /* of key 0 of this sequence and the group's first head */
    int64_t start_head, end_head, start_key, end_key, heads;
};

static struct interval_reader interval_reader(const struct lane_block *block) {
    const struct interval_view *view = &block->attention->intervals;
    int64_t head = block->kv_head * block->group / view->group, begin = block->sequence.k_begin;
    return (struct interval_reader){
        view->start + block->batch * view->start_batch + head * view->start_head + begin * view->start_key,
        view->end + block->batch * view->end_batch + head * view->end_head + begin * view->end_key,
        view->start_head,
        view->end_head,
        view->start_key,
        view->end_key,
        heads_in_group(block, view->group)};
}

/* Whether any row first_row .. last_row is in the key's interval, for some head of the group. */
static int interval_meets(const struct interval_reader *r, int64_t j, int32_t first_row, int32_t last_row) {
    int met = 0;
    for (int64_t t = 0; t < r->heads; t++) {
        int32_t start = r->start[j * r->start_key + t * r->start_head];
        int32_t end = r->end[j * r->end_key + t * r->end_head];
        met |= (start <= last_row) & (end > first_row) & (start < end);
    }
    return met;
}

/* Appends visible keys of next .. last-1 to the block until it is full; returns the first key not looked at. */
static int64_t collect_by_intervals(const struct lane_block *block, struct key_block *keys, int64_t next, int64_t last,
                                    int32_t block_keys) {
    const struct interval_reader r = interval_reader(block);
    const int32_t first_row = (int32_t)block->row[0], last_row = (int32_t)block->row[block->num_lanes - 1];
    int32_t n = keys->num_keys;
    for (; next < last && n < block_keys; next++) {
        keys->key[n] = (int32_t)next;
        n += interval_meets(&r, next, first_row, last_row);
    }
    keys->num_keys = n;
    return next;
}

/* ---- dense mask ---- */

struct mask_reader {
    const uint8_t *rows[CPU_BLOCK_LANES_MAX]; /* of key 0; where the mask varies with the row */
    int64_t heads;                            /* of the mask, in the group */
    const uint8_t *base;                      /* row 0 of the group's first head, key 0 */
};

static void mask_reader_init(struct mask_reader *reader, const struct lane_block *block) {
    const struct score_view *view = &block->attention->mask;
    const uint8_t *batch = (const uint8_t *)view->data + block->batch * view->batch;
    reader->heads = heads_in_group(block, view->group);
    reader->base = batch + block->kv_head * block->group / view->group * view->head;
    if (view->row != 0)
        for (int32_t lane = 0; lane < block->num_lanes; lane++)
            reader->rows[lane] = batch + block->head[lane] / view->group * view->head + block->row[lane] * view->row;
}

/* visible[panel][k] = mask bits of key first + k, k < count <= CHUNK_KEYS. */
static void mask_chunk(const struct mask_reader *reader, const struct lane_block *block, int64_t first, int32_t count,
                       uint64_t visible[CPU_PANELS_MAX][CHUNK_KEYS]) {
    const struct score_view *view = &block->attention->mask;
    for (int32_t panel = 0; panel < block->num_panels; panel++) {
        if (view->row != 0) {
            const uint8_t *rows[CPU_LANES];
            int32_t lanes = lane_block_panel_lanes(block, panel);
            for (int32_t l = 0; l < lanes; l++)
                rows[l] = reader->rows[panel * CPU_LANES + l] + first * view->key;
            block->kernels->mask_bits(visible[panel], rows, view->key, count, lanes);
            continue;
        }
        for (int32_t k = 0; k < count; k++)
            visible[panel][k] = 0;
        for (int64_t t = 0; t < reader->heads; t++) {
            uint64_t lanes = lanes_of_head(block, panel, reader->heads, t);
            const uint8_t *row = reader->base + t * view->head + first * view->key;
            for (int32_t k = 0; k < count; k++)
                visible[panel][k] |= row[k * view->key] ? lanes : 0;
        }
    }
}

/* ---- bits ---- */

/* Bits of one key in every panel: causal, window and intervals. */
static void key_bits(const struct lane_block *block, const struct interval_reader *intervals, int64_t j,
                     uint64_t bits[CPU_PANELS_MAX]) {
    struct lane_range seen = lanes_of_key(block, j);
    int64_t heads = intervals ? intervals->heads : 1;
    for (int32_t panel = 0; panel < block->num_panels; panel++)
        bits[panel] = 0;
    for (int64_t t = 0; t < heads; t++) {
        struct lane_range range = seen;
        if (intervals) {
            struct lane_range held =
                lanes_of_rows(block, intervals->start[j * intervals->start_key + t * intervals->start_head],
                              intervals->end[j * intervals->end_key + t * intervals->end_head]);
            range = (struct lane_range){higher(seen.first, held.first), lower(seen.last, held.last)};
        }
        for (int32_t panel = 0; panel < block->num_panels; panel++) {
            int64_t begin = (int64_t)panel * CPU_LANES;
            uint64_t lanes = range_bits(range.first - begin, range.last - begin);
            bits[panel] |= heads == 1 ? lanes : lanes & lanes_of_head(block, panel, heads, t);
        }
    }
    for (int32_t panel = 0; panel < block->num_panels; panel++)
        bits[panel] &= panel_lanes(block, panel);
}

/* The state of each panel from the bits of the block's keys. */
static void set_states(const struct lane_block *block, struct key_block *keys) {
    for (int32_t panel = 0; panel < block->num_panels; panel++) {
        uint64_t any = 0, all = ~UINT64_C(0);
        for (int32_t k = 0; k < keys->num_keys; k++) {
            any |= keys->visible[panel][k];
            all &= keys->visible[panel][k];
        }
        keys->state[panel] = !any ? PANEL_SKIP : all == panel_lanes(block, panel) ? PANEL_FULL : PANEL_PARTIAL;
    }
}

/* ---- the walk ---- */

void key_walk_init(struct key_walk *walk, const struct lane_block *block, int32_t block_keys) {
    const fdm_problem *p = block->attention->problem;
    struct key_range top = problem_key_range(p, &block->sequence, block->row[0]);
    struct key_range bottom = problem_key_range(p, &block->sequence, block->row[block->num_lanes - 1]);
    *walk = (struct key_walk){block, top.first, bottom.last, block_keys};
}

/* No mask and no intervals: the next keys as they stand; most panels need no bits. */
static void take_range(struct key_walk *walk, struct key_block *keys) {
    const struct lane_block *block = walk->block;
    int64_t first = walk->next, last = lower(walk->last, first + walk->block_keys);
    keys->num_keys = (int32_t)(last - first);
    for (int32_t k = 0; k < keys->num_keys; k++)
        keys->key[k] = (int32_t)(first + k);
    walk->next = last;
    struct lane_range low = lanes_of_key(block, first), high = lanes_of_key(block, last - 1);
    for (int32_t panel = 0; panel < block->num_panels; panel++) {
        int64_t begin = (int64_t)panel * CPU_LANES, end = begin + lane_block_panel_lanes(block, panel);
        keys->state[panel] = low.first >= end || high.last <= begin   ? PANEL_SKIP
                             : high.first <= begin && low.last >= end ? PANEL_FULL
                                                                      : PANEL_PARTIAL;
        if (keys->state[panel] != PANEL_PARTIAL)
            continue;
        uint64_t lanes = panel_lanes(block, panel);
        for (int32_t k = 0; k < keys->num_keys; k++) {
            struct lane_range range = lanes_of_key(block, first + k);
            keys->visible[panel][k] = range_bits(range.first - begin, range.last - begin) & lanes;
        }
    }
}

static void take_by_intervals(struct key_walk *walk, struct key_block *keys) {
    const struct lane_block *block = walk->block;
    const struct interval_reader intervals = interval_reader(block);
    walk->next = collect_by_intervals(block, keys, walk->next, walk->last, walk->block_keys);
    for (int32_t k = 0; k < keys->num_keys; k++) {
        uint64_t bits[CPU_PANELS_MAX];
        key_bits(block, &intervals, keys->key[k], bits);
        for (int32_t panel = 0; panel < block->num_panels; panel++)
            keys->visible[panel][k] = bits[panel];
    }
}

/* Whether causal and window leave keys first .. first+count-1 visible to all lanes. */
static int range_is_open(const struct lane_block *block, int64_t first, int32_t count) {
    return lanes_of_key(block, first + count - 1).first <= 0 && lanes_of_key(block, first).last >= block->num_lanes;
}

/* Appends the chunk's visible keys while there is room; the walk goes on behind the last key taken or dropped. */
static void append_chunk(struct key_walk *walk, struct key_block *keys, const struct interval_reader *intervals,
                         int32_t count, uint64_t mask[CPU_PANELS_MAX][CHUNK_KEYS]) {
    const struct lane_block *block = walk->block;
    const int32_t panels = block->num_panels;
    const int open = !intervals && range_is_open(block, walk->next, count);
    uint64_t bits[CPU_PANELS_MAX];
    for (int32_t panel = 0; panel < panels; panel++)
        bits[panel] = panel_lanes(block, panel);
    for (int32_t k = 0; k < count && keys->num_keys < walk->block_keys; k++) {
        uint64_t any = 0;
        int32_t n = keys->num_keys;
        if (!open)
            key_bits(block, intervals, walk->next, bits);
        for (int32_t panel = 0; panel < panels; panel++) {
            keys->visible[panel][n] = bits[panel] & mask[panel][k];
            any |= keys->visible[panel][n];
        }
        keys->key[n] = (int32_t)walk->next++;
        keys->num_keys += any != 0;
    }
}

static void take_by_mask(struct key_walk *walk, struct key_block *keys) {
    const struct lane_block *block = walk->block;
    struct mask_reader reader;
    struct interval_reader intervals;
    int has_intervals = block->attention->intervals.start != NULL;
    mask_reader_init(&reader, block);
    if (has_intervals)
        intervals = interval_reader(block);
    while (walk->next < walk->last && keys->num_keys < walk->block_keys) {
        uint64_t mask[CPU_PANELS_MAX][CHUNK_KEYS];
        int32_t count = (int32_t)lower(CHUNK_KEYS, walk->last - walk->next);
        mask_chunk(&reader, block, walk->next, count, mask);
        append_chunk(walk, keys, has_intervals ? &intervals : NULL, count, mask);
    }
}

int key_walk_next(struct key_walk *walk, struct key_block *keys) {
    const struct attention *attention = walk->block->attention;
    keys->num_keys = 0;
    if (walk->next >= walk->last)
        return 0;
    if (attention->mask.data)
        take_by_mask(walk, keys);
    else if (attention->intervals.start)
        take_by_intervals(walk, keys);
    else
        take_range(walk, keys);
    if (keys->num_keys == 0)
        return 0;
    if (attention->mask.data || attention->intervals.start)
        set_states(walk->block, keys);
    keys->contiguous = keys->key[keys->num_keys - 1] - keys->key[0] == keys->num_keys - 1;
    return 1;
}
