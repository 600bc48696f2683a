/* forward_params.h: what every forward kernel for CUDA devices receives; included by C and by CUDA C.
 *
 * The struct mirrors `struct attention` (problem.h): strides in elements, 0 on broadcast axes, query head h uses head
 * h / group of a tensor. Rows and keys are 32-bit, offsets 64-bit. */
#ifndef FDM_FORWARD_PARAMS_H
#define FDM_FORWARD_PARAMS_H

#ifdef __CUDACC__
#    include "cuda/ptx/types.cuh"
#else
#    include <stdint.h>
#endif

/* The dtype of q, k, v and out in constants: DTYPE. */
#define GPU_FLOAT32  0
#define GPU_FLOAT16  1
#define GPU_BFLOAT16 2

/* The dtype of the bias in constants: BIAS. */
#define GPU_BIAS_NONE    0
#define GPU_BIAS_SAME    1 /* the dtype of q */
#define GPU_BIAS_FLOAT32 2

struct gpu_matrix {
    char *data;
    int64_t batch, row, head;
};
struct gpu_scores {
    const char *data;
    int64_t batch, head, row, key;
    int32_t group, reserved;
};
struct gpu_intervals {
    const int32_t *start, *end;
    int64_t start_batch, start_head, start_key;
    int64_t end_batch, end_head, end_key;
    int32_t group, reserved;
};
/* Row intervals: range n of row i begins n * start_range + i * start_row further than that of row 0. */
struct gpu_row_intervals {
    const int32_t *start, *end;
    int64_t start_batch, start_head, start_range, start_row;
    int64_t end_batch, end_head, end_range, end_row;
    int32_t group, ranges; /* ranges: of a row */
};
/* A block mask: bytes of [B, h, blocks of rows, blocks of keys], 0: hidden. A block has 1 << shift rows and keys. */
struct gpu_blocks {
    const char *data;
    int64_t batch, head, row, key;
    int32_t group, shift, key_blocks, reserved;
};
/* A tree: words of rows, [B, Sq, words]; packed: batch is 0. */
struct gpu_tree {
    const uint32_t *data;
    int64_t batch, row, word;
};
struct gpu_rows {
    float *data;
    int64_t batch, head, row;
};

/* Sinks of a head: element (n, h), strides in elements. */
struct gpu_sink {
    char *data; /* NULL: none */
    int64_t part, head;
    int32_t count, dtype; /* n; GPU_FLOAT32, GPU_FLOAT16 or GPU_BFLOAT16 */
};

/* Indices: element (row, column), strides in elements. */
struct gpu_indices {
    const char *data; /* NULL when absent */
    int64_t row, column;
    int32_t bytes, reserved; /* 4 or 8 */
};

/* CACHE in constants: where the keys of a call lie. */
#define GPU_CACHE_NONE  0 /* in k and v of the call */
#define GPU_CACHE_ROWS  1 /* in a cache, one behind the other from the first: there is no table, and nothing appended */
#define GPU_CACHE_PAGES 2 /* in a cache, a row at a time: by a table, or in the new keys of the call */

/* A KV cache, of which k and v of the parameters are the pages: the batch of both is a page. */
struct gpu_cache {
    struct gpu_indices table, page_start;             /* table absent: a page is a row of the cache */
    struct gpu_indices cache_row, lengths, first_key; /* int32 [B] */
    const int32_t *cu_seqlens_new;                    /* [B + 1]; NULL: each sequence has seqlen_new new keys */
    struct gpu_matrix k_new, v_new;                   /* [B, N, Hkv, D|Dv], or packed; data NULL: nothing is appended */
    int32_t page_rows, num_pages;
    int32_t max_pages, num_lists; /* columns, or entries of a ragged table; rows of table or cache, or lists */
    int32_t has_ends;             /* page_start has one more: where the last list ends */
    int32_t seqlen_new, total_new, reserved;
};

/* Rotary embeddings: of the first `dim` dims of q and of new keys. */
struct gpu_rotary {
    const char *cosines, *sines; /* [num_rows, dim / 2] */
    int64_t cosine_row, sine_row, num_rows;
    struct gpu_indices start; /* int32 [B]; else that of the first new key */
    int32_t dim, is_wide;     /* is_wide: 1: cosines are float32 beside another dtype */
    int32_t moves, reserved;  /* moves: 1: row i of q is i behind the first; 0: all are turned as that */
};

struct gpu_forward_params {
    struct gpu_matrix q, k, v, out;         /* [B, S, heads, D|Dv] */
    struct gpu_rows lse;                    /* [B, H, Sq]; data NULL = not wanted */
    struct gpu_scores mask, bias;           /* [B, h, Sq, Sk] */
    struct gpu_intervals intervals;         /* [B, h, Sk] */
    struct gpu_row_intervals row_intervals; /* [B, h, n, Sq] */
    struct gpu_blocks blocks;
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* [B + 1]; NULL when dense */
    float *partial_out, *partial_rows; /* splits: [num_splits, B, H, Sq, Dv]; [num_splits, B, H, Sq, 2]: maximum of the
                                          scores, sum of P; varlen: B 1, Sq total_q */
    const uint8_t *block_mask; /* block_mask.h: GPU_BLOCK_* of [batch, head, row block, tile] of what hides pairs */
    int64_t block_mask_batch, block_mask_head, block_mask_row; /* strides in bytes, 0 on broadcast axes */
    int32_t block_mask_group;                                  /* query heads that share one of its heads */
    int32_t batch, heads, heads_kv, group;                     /* group = heads / heads_kv */
    int32_t seqlen_q, seqlen_k;                                /* varlen: the maxima */
    int32_t head_dim, head_dim_v;
    int32_t num_splits, total_q;       /* varlen: rows in the packed tensors */
    int32_t window_left, window_right; /* relative to the aligned diagonal, causal folded into right; INT32_MAX =
                                          unbounded */
    float scale;                       /* softmax_scale */
    float softcap, softcap_inverse;    /* 0 = none */
    int32_t heads_per_l2_group;        /* order of the grid: heads whose rows are interleaved */
    struct gpu_rows lse_low;           /* [B, H, Sq]: what lse has rounded away; data NULL = not wanted, or not given */
    struct gpu_sink sink;
    int32_t total_k;                         /* varlen: keys in the packed tensors */
    int32_t lse_without_sink;                /* 1: lse is that of the keys alone */
    struct gpu_indices seqused_q, seqused_k; /* int32 [B]: rows and keys that count */
    struct gpu_cache cache;
    struct gpu_rotary rotary;
    struct gpu_tree tree;
};

#endif
