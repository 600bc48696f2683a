/* tile_plan.h: what hides keys by ranges of rows, as bits: for each tile of 64 query rows and 64 keys whether some row
 * sees some key, and whether all rows see all keys. The contract of tile_plan.cu; for C and CUDA C. */
#ifndef FDM_TILE_PLAN_H
#define FDM_TILE_PLAN_H

#include "gpu/forward_params.h"

#define TILE_PLAN_TILE  64 /* rows, and keys, of a tile */
#define TILE_PLAN_WARPS 32 /* of a block: a tile of keys each */

/* Of a head of the plan: tiles of which a row sees a key, and those of which some row sees at least half of the keys,
 * each counted for its 64 rows. */
struct tile_counts {
    int32_t seen, dense;
};
/* Most tiles are not worth loading whole. */
#define TILES_ARE_SCATTERED(counts) (2 * (int64_t)(counts).dense < (counts).seen)

/* The plan, as kernels read it. Rows of words: [batch][head][tile of rows][key_words]; bit n of word w stands for the
 * tile of keys 32 w + n. */
struct tile_plan {
    uint32_t *seen, *full;
    struct tile_counts *counts; /* [batch][head] */
    int64_t batch, head;        /* heads from one to the next; 0 where they share the plan */
    int32_t key_words, row_tiles;
    int32_t group, num_heads; /* query heads that share a head of the plan; its heads of all batches */
};

struct tile_plan_params {
    struct gpu_forward_params in;
    struct tile_plan plan;
    int32_t heads;             /* of a batch of the plan */
    int32_t row_words, blocks; /* words of 32 tiles of rows; blocks of all heads, one a word */
    int32_t reserved;
};

#endif
