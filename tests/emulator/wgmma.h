/* wgmma.h: a warpgroup's products under way, shared by wgmma.c and wgmma_product.c. */
#ifndef FDM_EMULATOR_WGMMA_H
#define FDM_EMULATOR_WGMMA_H

#include "state.h"

enum { WARPS = 4, SUMS_MAX = 8, PRODUCTS_MAX = 256, N_MAX = 256 };

/* The sums of one variable; n 0: not in use. */
struct sums {
    int n;
    unsigned published; /* warps that have them back */
    uint32_t last;      /* the newest product on them */
    place at;
    float *d[WARPS * LANES];
    float values[64 * N_MAX];
};
struct product_record {
    int n, type, add, a_transposed, b_transposed, has_a;
    uint64_t a_matrix, b_matrix;
    struct sums *sums;
    uint32_t number;
    place at;
    unsigned a[WARPS * LANES][4];
    const unsigned *a_from[WARPS * LANES];
};
struct warpgroup {
    struct block *block;
    unsigned number, arrived;
    uint32_t component, round, issued, executed;
    place at;
    void *operands[WARPS * LANES];
    struct sums sums[SUMS_MAX];
    struct product_record products[PRODUCTS_MAX];
};

/* All products up to number `upto`, in order. */
void products_execute(struct warpgroup *g, uint32_t upto);
/* What a product will read of a matrix of `rows` (or columns) by 16. */
void matrix_touch(struct block *b, uint64_t matrix, int rows, int transposed, const struct actor *agent,
                  const struct actor *issuer, place at);

#endif
