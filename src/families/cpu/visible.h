/* visible.h: walks the keys that a block of query lanes can see, in blocks of packed keys, dropping the others.
 *
 * A block of lanes belongs to one sequence and one KV head; lane l is query head `head[l]` at row `row[l]` of the
 * sequence. The walk visits keys in rising order and yields blocks of at most `block_keys` of them; a key no lane of
 * the block can see is dropped before any work is done for it, wherever causal, window, intervals of keys or rows, the
 * dense mask, the block mask, the tree or a key's own bias of -inf say so ("compaction", exact). For each panel of the
 * block it yields one of "skip", "full" (every lane sees every key of the block: no bits needed) and "partial" with one
 * uint64_t per key. */
#ifndef FDM_CPU_VISIBLE_H
#define FDM_CPU_VISIBLE_H

#include "families/cpu/kernels.h"
#include "problem/problem.h"

enum { CPU_PANELS_MAX = 8, CPU_BLOCK_LANES_MAX = CPU_PANELS_MAX * CPU_LANES };

struct lane_block {
    const struct attention *attention;
    const struct cpu_kernels *kernels;
    struct sequence sequence;
    int64_t batch, kv_head;
    int64_t first; /* flat index of lane 0; rows do not fall along lanes */
    int64_t group; /* query heads of the KV head */
    int32_t num_lanes, num_panels;
    int64_t row[CPU_BLOCK_LANES_MAX];
    int64_t head[CPU_BLOCK_LANES_MAX];
};

/* Fills the block from flat lane indices first .. first+count-1, where flat index f is row f / group, head
 * kv_head*group + f % group. */
void lane_block_init(struct lane_block *block, const struct attention *attention, const struct cpu_kernels *kernels,
                     int64_t batch, int64_t kv_head, int64_t first, int32_t count);
static inline int32_t lane_block_panel_lanes(const struct lane_block *block, int32_t panel) {
    int32_t left = block->num_lanes - panel * CPU_LANES;
    return left < CPU_LANES ? left : CPU_LANES;
}

enum panel_state { PANEL_SKIP, PANEL_FULL, PANEL_PARTIAL };

struct key_block {
    int32_t num_keys;
    int32_t contiguous;              /* keys are key[0], key[0]+1, ... */
    int32_t key[CPU_BLOCK_KEYS_MAX]; /* index within the sequence, rising */
    int32_t num_doubtful;            /* 0 before key_block_doubt() */
    int32_t doubtful[CPU_BLOCK_KEYS_MAX];
    enum panel_state state[CPU_PANELS_MAX];
    uint64_t visible[CPU_PANELS_MAX][CPU_BLOCK_KEYS_MAX]; /* where state is PANEL_PARTIAL */
};

/* Where the dense mask's bytes lie for the lanes of a block. */
struct mask_reader {
    const uint8_t *rows[CPU_BLOCK_LANES_MAX]; /* of key 0; where the mask varies with the row */
    int64_t heads;                            /* of the mask, in the group */
    const uint8_t *base;                      /* row 0 of the group's first head, key 0 */
};

/* Bits of the dense mask, row intervals, the block mask and the tree for keys first .. last-1; steps counts what
 * key_walk_ahead() has done for it. */
struct mask_window {
    int64_t first, last;
    int32_t steps;
    uint64_t bits[CPU_PANELS_MAX][CPU_MASK_KEYS_MAX];
};

struct key_walk {
    const struct lane_block *block;
    int64_t next, last;   /* keys not yet looked at */
    int32_t block_keys;   /* <= CPU_BLOCK_KEYS_MAX */
    const char *key_bias; /* bias of the sequence's key 0 where each key has one for the whole block; else NULL */
    int32_t window;       /* the one of `windows` that the walk is in; the other is the one after it */
    struct mask_reader reader;
    struct mask_window windows[2];
};

/* After it, `next` may be raised and `last` lowered, and `last` raised again when the walk has come to its end. */
void key_walk_init(struct key_walk *walk, const struct lane_block *block, int32_t block_keys);
/* 1 and the next block, or 0 at the end. */
int key_walk_next(struct key_walk *walk, struct key_block *keys);
/* A share of the work for later blocks, to be called now and then while one is computed: mask bytes are asked for, and
 * turned into bits when they are there. Nothing depends on it but time. */
void key_walk_ahead(struct key_walk *walk);

/* Whether element `at` of a bias is -inf. */
static inline int bias_bars(const char *bias, fdm_dtype dtype, int64_t at) {
    switch (dtype) {
    case FDM_FLOAT32: return ((const uint32_t *)(const void *)bias)[at] == 0xff800000u;
    case FDM_BFLOAT16: return ((const uint16_t *)(const void *)bias)[at] == 0xff80;
    default: return ((const uint16_t *)(const void *)bias)[at] == 0xfc00;
    }
}

/* Whether there is a bias that differs among the query rows, or query heads, of a KV head. */
int bias_has_rows(const struct attention *attention);
/* The walk does not look at such a bias: a key that it hides from all lanes stays in the block, where it has no effect
 * as long as its K and V are finite. This lists the keys that may be such: the last lane does not see them. */
void key_block_doubt(struct key_block *keys, const struct lane_block *block);
/* rows: addresses of K or V of all keys of the block. Of doubtful keys that no lane sees and that are not finite they
 * become those of zeros; 1 where there was one. To be called when the rows have been packed, which has brought them
 * into a cache; then they are to be packed again. */
int key_block_hide(const struct key_block *keys, const struct lane_block *block, const void **rows, int32_t depth);

#endif
