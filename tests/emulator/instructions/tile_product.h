/* tile_product.h: sizes of a product by tcgen05 that is tried; for C and CUDA C. */
#ifndef FDM_TILE_PRODUCT_H
#define FDM_TILE_PRODUCT_H

#define TILE_K       64
#define TILE_THREADS 128
#define TILE_SHARED  (66 << 10) /* bytes */

#endif
