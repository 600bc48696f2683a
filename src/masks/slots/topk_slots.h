/* topk_slots.h: the keys of a top-W mask that are kept while tokens are generated, a slot each; for C and CUDA C. */
#ifndef FDM_TOPK_SLOTS_H
#define FDM_TOPK_SLOTS_H

#ifndef __CUDACC__
#    include <stdint.h>
#endif

/* Strides in elements, 0 where the extent is 1. */
struct slot_scores { /* [B, h, S]: biases, or int32; step: along the last axis */
    char *data;
    int64_t batch, head, step;
};
struct slot_rows {            /* [B, S, h, D]: keys or values, the last axis contiguous */
    char *data;               /* NULL: there are none */
    int64_t batch, row, head; /* strides in bytes */
    int64_t row_bytes;        /* D times an element's bytes, a multiple of 2 */
};

struct slot_call {
    struct slot_scores bias; /* of the new tokens */
    struct slot_scores end;  /* fill: of key intervals; the kept keys end at INT32_MAX */
    const uint8_t *real;     /* append: [B], not zero = a real token; NULL: all are */
    int64_t real_batch;
    struct slot_rows k, v;      /* of the new tokens; with a block table: [num_pages, page_size, h, D] */
    const int32_t *block_table; /* fill: [B, n] pages; NULL: k and v are not in pages */
    int64_t table_batch, table_page;
    struct slot_scores slot_bias, slot_key; /* [B, h, W]; the number of the slot's key, -1 = an empty slot */
    struct slot_scores length;              /* [B, h, 1] int32: tokens so far */
    struct slot_rows slot_k, slot_v;        /* [B, W, h, D] */
    struct slot_scores slot;                /* append: [B, h, 1] int32: which slot the token got, -1 = none; or NULL */
    int32_t batch, heads, window, num_tokens; /* num_tokens: of a fill */
    int32_t dtype;                            /* of the biases: enum fdm_dtype */
    int32_t page_size;                        /* 0: no pages */
};

#ifndef __CUDACC__
void topk_append_on_cpu(const struct slot_call *call);
void topk_fill_on_cpu(const struct slot_call *call);
/* Whether the page of a kept key is not in 0 .. num_pages - 1; *page is the first such. */
int topk_page_is_missing(const struct slot_call *call, int64_t num_pages, int32_t *page);
#endif

#endif
