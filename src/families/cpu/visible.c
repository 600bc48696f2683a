/* visible.c: finds the keys a block of lanes can see, and which lanes see them.
 *
 * Rows rise along lanes, so causal, window and an interval each leave a key visible to one range of lanes; the bits of
 * a panel are that range. A dense mask, row intervals, a block mask and a tree are turned into bits some keys ahead,
 * and combined with it. */
#include "families/cpu/visible.h"

#include "problem/block_views.h"
#include "problem/interval_views.h"
#include "problem/tree.h"

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

/* ---- bias ---- */

int bias_has_rows(const struct attention *attention) {
    const struct score_view *view = &attention->bias;
    const int64_t group = attention->problem->heads / attention->problem->heads_kv;
    return view->data && (view->row != 0 || (view->group < group && view->head != 0));
}

/* The bias of key 0 where each key has one for the whole block; NULL where it has not, or there is none. */
static const char *key_bias(const struct lane_block *block) {
    const struct score_view *view = &block->attention->bias;
    if (!view->data || bias_has_rows(block->attention))
        return NULL;
    return view->data + (block->batch * view->batch + block->head[0] / view->group * view->head) *
                            fdm_dtype_bytes(block->attention->problem->bias_dtype);
}

/* Whether the key's own bias is -inf: nobody sees it. */
static int is_barred(const struct key_walk *walk, int64_t key) {
    const struct attention *attention = walk->block->attention;
    return bias_bars(walk->key_bias, attention->problem->bias_dtype, key * attention->bias.key);
}

static int any_barred(const struct key_walk *walk, int64_t first, int64_t last) {
    int barred = 0;
    for (; walk->key_bias && first < last; first++)
        barred |= is_barred(walk, first);
    return barred;
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
        view->start + block->batch * view->start_batch + head * view->start_head + begin * view->start_item,
        view->end + block->batch * view->end_batch + head * view->end_head + begin * view->end_item,
        view->start_head,
        view->end_head,
        view->start_item,
        view->end_item,
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

/* Appends keys that some row's interval holds and no bias bars, until the block is full. intervals NULL: any row's. */
static void collect_keys(struct key_walk *walk, struct key_block *keys, const struct interval_reader *intervals) {
    const struct lane_block *block = walk->block;
    const int32_t first_row = (int32_t)block->row[0], last_row = (int32_t)block->row[block->num_lanes - 1];
    int32_t n = keys->num_keys;
    for (; walk->next < walk->last && n < walk->block_keys; walk->next++) {
        const int barred = walk->key_bias && is_barred(walk, walk->next);
        keys->key[n] = (int32_t)walk->next;
        n += (!intervals || interval_meets(intervals, walk->next, first_row, last_row)) & !barred;
    }
    keys->num_keys = n;
}

/* ---- row intervals ---- */

static struct row_ranges ranges_of_lane(const struct lane_block *block, int32_t lane) {
    return row_ranges_of(block->attention, &block->sequence, block->batch, block->head[lane], block->row[lane]);
}

/* Narrows the walk to the keys between the first and the last that a lane's ranges hold. */
static void cut_to_rows(struct key_walk *walk) {
    struct key_range hull = {walk->last, walk->next};
    if (walk->next >= walk->last) /* the window leaves no key: the two may have changed places */
        return;
    for (int32_t lane = 0; lane < walk->block->num_lanes; lane++) {
        const struct row_ranges ranges = ranges_of_lane(walk->block, lane);
        const struct key_range own = row_ranges_cut(&ranges, (struct key_range){walk->next, walk->last});
        if (own.first < own.last) {
            hull.first = lower(hull.first, own.first);
            hull.last = higher(hull.last, own.last);
        }
    }
    walk->next = hull.first;
    walk->last = hull.last;
}

/* Takes from a panel's bits of the window the lanes whose ranges do not hold the key. */
static void keep_rows(const struct lane_block *block, const struct mask_window *window, int32_t panel, uint64_t *bits) {
    const int64_t count = window->last - window->first;
    const int32_t lanes = lane_block_panel_lanes(block, panel);
    uint64_t held[CPU_MASK_KEYS_MAX] = {0};
    for (int32_t n = 0; n < block->attention->problem->row_ranges; n++) {
        uint64_t changes[CPU_MASK_KEYS_MAX + 1] = {0}, now = 0; /* lanes whose range begins or ends there */
        for (int32_t l = 0; l < lanes; l++) {
            const struct row_ranges ranges = ranges_of_lane(block, panel * CPU_LANES + l);
            const int64_t start = higher(ranges.start[n * ranges.start_step] - window->first, 0);
            const int64_t end = lower(ranges.end[n * ranges.end_step] - window->first, count);
            if (start < end) {
                changes[start] ^= UINT64_C(1) << l;
                changes[end] ^= UINT64_C(1) << l;
            }
        }
        for (int64_t k = 0; k < count; k++) {
            now ^= changes[k];
            held[k] |= now;
        }
    }
    for (int64_t k = 0; k < count; k++)
        bits[k] &= held[k];
}

/* ---- block mask ---- */

/* Whether a lane's block mask holds key j: one row of each block of rows, and each head. */
static int block_meets(const struct lane_block *block, int64_t j) {
    const int64_t size = block->attention->problem->block_mask_size, last = block->row[block->num_lanes - 1];
    const int64_t heads = block->attention->block_mask.group >= block->group ? 1 : block->group;
    int met = 0;
    for (int64_t row = block->row[0]; row <= last && !met; row = (row / size + 1) * size)
        for (int64_t t = 0; t < heads && !met; t++)
            met = block_mask_holds(block->attention, block->batch, block->kv_head * block->group + t, row, j);
    return met;
}

/* From `key` on the first key, up to `last`, whose block a lane's block mask holds (1) or none's does (0). */
static int64_t next_block(const struct lane_block *block, int64_t key, int64_t last, int met) {
    const int64_t size = block->attention->problem->block_mask_size;
    if (!block->attention->block_mask.data)
        return met ? key : last;
    while (key < last && block_meets(block, key) != met)
        key = (key / size + 1) * size;
    return lower(key, last);
}

/* Takes from a panel's bits of the window the lanes whose block mask does not hold the key. */
static void keep_blocks(const struct lane_block *block, const struct mask_window *window, int32_t panel,
                        uint64_t *bits) {
    const int64_t size = block->attention->problem->block_mask_size;
    const int32_t lanes = lane_block_panel_lanes(block, panel);
    for (int64_t key = window->first, end; key < window->last; key = end) {
        uint64_t held = 0;
        end = lower((key / size + 1) * size, window->last);
        for (int32_t l = 0; l < lanes; l++) {
            const int32_t lane = panel * CPU_LANES + l;
            held |= (uint64_t)block_mask_holds(block->attention, block->batch, block->head[lane], block->row[lane], key)
                    << l;
        }
        for (int64_t k = key; k < end; k++)
            bits[k - window->first] &= held;
    }
}

/* ---- tree ---- */

/* Takes from a panel's bits of the window the lanes whose tree does not hold the key. */
static void keep_tree(const struct lane_block *block, const struct mask_window *window, int32_t panel, uint64_t *bits) {
    const struct attention *a = block->attention;
    const struct sequence *s = &block->sequence;
    const int32_t lanes = lane_block_panel_lanes(block, panel);
    for (int32_t l = 0; l < lanes; l++) {
        const uint32_t *row = tree_row(a, s, block->batch, block->row[panel * CPU_LANES + l]);
        for (int64_t key = higher(window->first, s->seqlen_k - s->seqlen_q); key < window->last; key++)
            bits[key - window->first] &= ~((uint64_t)!tree_holds(a, s, row, key) << l);
    }
}

/* ---- dense mask ---- */

static void mask_reader_init(struct mask_reader *reader, const struct lane_block *block) {
    const struct score_view *view = &block->attention->mask;
    const uint8_t *batch = (const uint8_t *)view->data + block->batch * view->batch;
    reader->heads = heads_in_group(block, view->group);
    reader->base = batch + block->kv_head * block->group / view->group * view->head;
    if (view->row != 0)
        for (int32_t lane = 0; lane < block->num_lanes; lane++)
            reader->rows[lane] = batch + block->head[lane] / view->group * view->head + block->row[lane] * view->row;
}

/* The dense mask's bits of one panel; all of them without a mask. */
static void mask_bits(const struct mask_reader *reader, const struct lane_block *block, struct mask_window *window,
                      int32_t panel) {
    const struct score_view *view = &block->attention->mask;
    const int32_t count = (int32_t)(window->last - window->first);
    uint64_t *bits = window->bits[panel];
    if (!view->data) {
        for (int32_t k = 0; k < count; k++)
            bits[k] = ~UINT64_C(0);
        return;
    }
    if (view->row != 0) {
        const uint8_t *rows[CPU_LANES];
        int32_t lanes = lane_block_panel_lanes(block, panel);
        for (int32_t l = 0; l < lanes; l++)
            rows[l] = reader->rows[panel * CPU_LANES + l] + window->first * view->key;
        block->kernels->mask_bits(bits, rows, view->key, count, lanes);
        return;
    }
    for (int32_t k = 0; k < count; k++)
        bits[k] = 0;
    for (int64_t t = 0; t < reader->heads; t++) {
        uint64_t lanes = lanes_of_head(block, panel, reader->heads, t);
        const uint8_t *row = reader->base + t * view->head + window->first * view->key;
        for (int32_t k = 0; k < count; k++)
            bits[k] |= row[k * view->key] ? lanes : 0;
    }
}

/* The window's bits of one panel. */
static void window_panel(const struct mask_reader *reader, const struct lane_block *block, struct mask_window *window,
                         int32_t panel) {
    mask_bits(reader, block, window, panel);
    if (block->attention->row_intervals.start)
        keep_rows(block, window, panel, window->bits[panel]);
    if (block->attention->block_mask.data)
        keep_blocks(block, window, panel, window->bits[panel]);
    if (block->attention->tree.data)
        keep_tree(block, window, panel, window->bits[panel]);
}

/* Whether a mask, row intervals, a block mask or a tree make bits of windows. */
static int has_windows(const struct attention *attention) {
    return attention->mask.data || attention->row_intervals.start || attention->block_mask.data || attention->tree.data;
}

/* Asks for the bytes that mask_bits() will read: rows are far apart, where the hardware does not foresee them. Inline:
 * gcc drops the call of a function that does nothing but prefetch. */
static inline __attribute__((always_inline)) void mask_prefetch(const struct mask_reader *reader,
                                                                const struct lane_block *block,
                                                                const struct mask_window *window, int32_t panel) {
    const struct score_view *view = &block->attention->mask;
    if (!view->data || view->row == 0 || view->key != 1)
        return;
    const int32_t first = panel * CPU_LANES, last = first + lane_block_panel_lanes(block, panel);
    for (int32_t lane = first; lane < last; lane++)
        for (int64_t key = window->first; key < window->last; key += 64)
            __builtin_prefetch(reader->rows[lane] + key, 0, 2);
}

/* From the first key on that a block mask does not hide, to the next that it does. */
static void window_open(const struct lane_block *block, struct mask_window *window, int64_t first, int64_t last) {
    window->first = next_block(block, first, last, 1);
    window->last = next_block(block, window->first, lower(last, window->first + CPU_MASK_KEYS_MAX), 0);
    window->steps = 0;
}

/* Even steps ask for a panel's bytes, odd ones turn them into bits. */
static void window_step(struct key_walk *walk, struct mask_window *window) {
    const int32_t panel = window->steps / 2;
    if (window->steps++ % 2 == 0)
        mask_prefetch(&walk->reader, walk->block, window, panel);
    else
        window_panel(&walk->reader, walk->block, window, panel);
}

void key_walk_ahead(struct key_walk *walk) {
    struct mask_window *window = &walk->windows[!walk->window];
    if (has_windows(walk->block->attention) && window->first < window->last &&
        window->steps < 2 * walk->block->num_panels)
        window_step(walk, window);
}

static int window_holds(const struct mask_window *window, int64_t key) {
    return window->first <= key && key < window->last;
}

/* The window of the next key. Moving into one completes it, and opens the one after it. */
static const struct mask_window *mask_window(struct key_walk *walk) {
    struct mask_window *window = &walk->windows[walk->window];
    if (window_holds(window, walk->next))
        return window;
    walk->window = !walk->window;
    window = &walk->windows[walk->window];
    if (!window_holds(window, walk->next))
        window_open(walk->block, window, walk->next, walk->last);
    for (window->steps |= 1; window->steps < 2 * walk->block->num_panels; window->steps += 2)
        window_panel(&walk->reader, walk->block, window, window->steps / 2);
    window_open(walk->block, &walk->windows[!walk->window], window->last, walk->last);
    return window;
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
    walk->block = block;
    walk->next = top.first;
    walk->last = bottom.last;
    walk->block_keys = block_keys;
    walk->key_bias = key_bias(block);
    if (block->attention->row_intervals.start)
        cut_to_rows(walk);
    if (!has_windows(block->attention))
        return;
    if (block->attention->mask.data)
        mask_reader_init(&walk->reader, block);
    walk->window = 0;
    window_open(block, &walk->windows[0], 0, 0);
    window_open(block, &walk->windows[1], 0, 0);
}

/* No mask of keys, rows or blocks, no intervals, no tree, no barred key: the next keys as they stand; most panels need
 * no bits. */
static void take_range(struct key_walk *walk, struct key_block *keys) {
    const struct lane_block *block = walk->block;
    int64_t first = walk->next, last = lower(walk->last, first + walk->block_keys);
    if (block->attention->problem->invariance == FDM_INVARIANCE_SCHEDULE) /* wherever the first row's keys begin */
        last = lower(walk->last, (first / walk->block_keys + 1) * walk->block_keys);
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

/* Keeps those of the block's keys that a lane sees by interval, causal and window together; those before `first` stay.
 */
static void keep_seen(const struct lane_block *block, struct key_block *keys, const struct interval_reader *intervals,
                      int32_t first) {
    int32_t n = first;
    for (int32_t k = first; k < keys->num_keys; k++) {
        uint64_t bits[CPU_PANELS_MAX], any = 0;
        key_bits(block, intervals, keys->key[k], bits);
        for (int32_t panel = 0; panel < block->num_panels; panel++) {
            keys->visible[panel][n] = bits[panel];
            any |= bits[panel];
        }
        keys->key[n] = keys->key[k];
        n += any != 0;
    }
    keys->num_keys = n;
}

static void take_by_intervals(struct key_walk *walk, struct key_block *keys, const struct interval_reader *intervals) {
    while (walk->next < walk->last && keys->num_keys < walk->block_keys) {
        const int32_t first = keys->num_keys;
        collect_keys(walk, keys, intervals);
        keep_seen(walk->block, keys, intervals, first);
    }
}

/* Whether causal and window leave keys first .. first+count-1 visible to all lanes. */
static int range_is_open(const struct lane_block *block, int64_t first, int32_t count) {
    return lanes_of_key(block, first + count - 1).first <= 0 && lanes_of_key(block, first).last >= block->num_lanes;
}

/* Appends the visible ones of keys .. last-1, whose mask bits are there, while there is room; the walk goes on behind
 * the last key taken or dropped. */
static void append_masked(struct key_walk *walk, struct key_block *keys, const struct interval_reader *intervals,
                          int64_t last) {
    const struct lane_block *block = walk->block;
    const int32_t panels = block->num_panels;
    const int open = !intervals && range_is_open(block, walk->next, (int32_t)(last - walk->next));
    const struct mask_window *window = &walk->windows[walk->window];
    uint64_t bits[CPU_PANELS_MAX];
    for (int32_t panel = 0; panel < panels; panel++)
        bits[panel] = panel_lanes(block, panel);
    for (; walk->next < last && keys->num_keys < walk->block_keys; walk->next++) {
        uint64_t any = 0;
        const int32_t n = keys->num_keys;
        if (!open)
            key_bits(block, intervals, walk->next, bits);
        for (int32_t panel = 0; panel < panels; panel++) {
            keys->visible[panel][n] = bits[panel] & window->bits[panel][walk->next - window->first];
            any |= keys->visible[panel][n];
        }
        keys->key[n] = (int32_t)walk->next;
        keys->num_keys += any != 0 && !(walk->key_bias && is_barred(walk, walk->next));
    }
}

/* Keys are appended 64 at a time, so that most of them find causal and window open. */
static void take_by_mask(struct key_walk *walk, struct key_block *keys, const struct interval_reader *intervals) {
    while ((walk->next = next_block(walk->block, walk->next, walk->last, 1)) < walk->last &&
           keys->num_keys < walk->block_keys) {
        const struct mask_window *window = mask_window(walk);
        const int64_t last = lower(lower(window->last, walk->last), walk->next + 64);
        append_masked(walk, keys, intervals, last);
    }
}

int key_walk_next(struct key_walk *walk, struct key_block *keys) {
    const struct attention *attention = walk->block->attention;
    struct interval_reader reader, *intervals = NULL;
    keys->num_keys = keys->num_doubtful = 0;
    if (walk->next >= walk->last)
        return 0;
    if (attention->intervals.start) {
        reader = interval_reader(walk->block);
        intervals = &reader;
    }
    const int windows = has_windows(attention),
              whole = !windows && !intervals &&
                      !any_barred(walk, walk->next, lower(walk->last, walk->next + walk->block_keys));
    if (whole)
        take_range(walk, keys);
    else if (windows)
        take_by_mask(walk, keys, intervals);
    else
        take_by_intervals(walk, keys, intervals);
    if (keys->num_keys == 0)
        return 0;
    if (!whole)
        set_states(walk->block, keys);
    keys->contiguous = keys->key[keys->num_keys - 1] - keys->key[0] == keys->num_keys - 1;
    return 1;
}
