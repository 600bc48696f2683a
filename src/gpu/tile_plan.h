/* tile_plan.h: what hides pairs by ranges of rows or of keys, as bits: for each tile of 64 query rows and 64 keys
 * whether some row sees some key, and whether all rows see all keys. The contract of tile_plan.cu; for C and CUDA C. */
#ifndef FDM_TILE_PLAN_H
#define FDM_TILE_PLAN_H

#include "cuda/constants.h"
#include "gpu/forward_params.h"

#define TILE_PLAN_TILE  64 /* rows, and keys, of a tile */
#define TILE_PLAN_WARPS 32 /* of a block: a tile of keys each */

/* Numbers at the plan's start that are 0 when the kernels that read the plan begin, for counts of items. */
#define TILE_PLAN_ITEM_COUNTS 2

/* Blocks of rows that are put in order at most; more of a head are taken from the last rows on. */
#define TILE_PLAN_ORDERED 4096

/* Of a head of the plan: tiles of which a row sees a key, and those of which some row sees at least half of the keys,
 * each counted for its 64 rows; words that are written. */
struct tile_counts {
    int32_t seen, dense, words;
};
/* Most tiles are not worth loading whole. */
#define TILES_ARE_SCATTERED(counts) (2 * (int64_t)(counts).dense < (counts).seen)

/* The plan, as kernels read it. Rows of words: [batch][head][tile of rows][key_words]; bit n of word w stands for the
 * tile of keys 32 w + n. */
struct tile_plan {
    uint32_t *seen, *full;
    struct tile_counts *counts; /* [batch][head] */
    int32_t *order;             /* [batch][head][row_tiles]: blocks of rows, those that see most tiles first */
    int64_t batch, head;        /* heads from one to the next; 0 where they share the plan */
    int32_t key_words, row_tiles;
    int32_t group, num_heads; /* query heads that share a head of the plan; its heads of all batches */
};

/* The head of the plan that a query head has. */
GPU_INLINE int32_t tile_plan_head(const struct tile_plan *p, int32_t head, int32_t batch) {
    return (int32_t)(batch * p->batch + head / p->group * p->head);
}

struct tile_plan_params {
    struct gpu_forward_params in;
    struct tile_plan plan;
    const int32_t *keys, *sorted; /* key_sort.h's order of keys, which holds where `sorted` points at 1; NULL: none */
    int32_t heads;                /* of a batch of the plan */
    int32_t row_words, blocks;    /* words of 32 tiles of rows; blocks of all heads, one a word */
    int32_t block_tiles;          /* tiles of rows in a block of rows of `order`; 0: none is wanted */
    int32_t counted;              /* 1: counts are wanted, also for an order, and are 0 when the kernel begins */
    int32_t keys_head;            /* keys from head to head; from here on: no key */
    int32_t *item_counts;         /* TILE_PLAN_ITEM_COUNTS numbers that become 0; NULL: none */
};

#endif
