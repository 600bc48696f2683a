/* topk_params.h: exact causal top-W on CUDA devices. The contract of topk_threshold.cu, topk_carry.cu and
 * topk_resolve.cu; for C and CUDA C.
 *
 * The keys of a head are cut into chunks of CHUNK keys, a block each; where there are many keys, spans of many chunks
 * are cut first. The bound at the end of a chunk (or span) tells the W best keys up to there from the others, so a key
 * leaves in the first chunk whose bound is above it. As many keys leave a chunk as arrive in it, or fewer. */
#ifndef FDM_TOPK_PARAMS_H
#define FDM_TOPK_PARAMS_H

#include "gpu/forward_params.h"

/* Constants: DTYPE of the bias (GPU_FLOAT32 ..), CHUNK: keys of a chunk and threads of a block, 32 .. 1024. */
#define TOPK_CONSTANTS(X) X(DTYPE) X(CHUNK)

/* A key as a number: the bits of its bias, so that larger is better, above its inverted index; no two are equal. 0: no
 * key, or a padded one. */
struct topk_bound {
    uint64_t threshold; /* of the keys that may be kept here, those at or above it are */
    int32_t kept;       /* how many they are */
    int32_t reserved;
};
/* At the beginning of a span: keys that leave within it, and places that they and those that arrive share. */
struct topk_carried {
    int32_t listed, room;
};

struct topk_tensor { /* [B, h, Sk] int32; strides in elements */
    int32_t *data;
    int64_t batch, head, key;
};

struct topk_params {
    const char *bias; /* [B, h, Sk]; strides in elements, 0 where the extent is 1 */
    int64_t bias_batch, bias_head, bias_key;
    const uint8_t *padding; /* [B, Sk], not zero = a real key; NULL: all are */
    int64_t padding_batch, padding_key;
    struct topk_tensor start, end;
    struct topk_bound *span_bounds;        /* [rows, num_spans]; NULL where there is one span */
    struct topk_bound *chunk_bounds;       /* [rows, num_chunks] */
    struct topk_carried *carries;          /* [rows, num_spans] */
    uint64_t *carried;                     /* [rows, num_spans, span] */
    int64_t row_shift;                     /* key less row: Sk - Sq */
    int32_t num_keys, num_heads, num_rows; /* rows: of all batches and heads */
    int32_t index_bits;                    /* of a key's number */
    int32_t window;                        /* W */
    int32_t span, num_spans, num_chunks;   /* keys of a span: a multiple of CHUNK, or all of them */
    int32_t of_spans;                      /* topk_threshold: bounds of spans, not of chunks */
};

#endif
