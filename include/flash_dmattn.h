/* flash_dmattn.h: exact attention with any mask, forward and backward, in plain C.
 *
 * SPDX-License-Identifier: BSD-3-Clause
 *
 *     S    = softmax_scale * Q K^T
 *     S    = softcap * tanh(S / softcap)          if softcap > 0
 *     S    = S + bias
 *     S_ij = -inf                                 where key j is not visible to row i
 *     P    = softmax(S);  out = P V;  lse_i = log sum_j exp(S_ij)
 *
 * A row that sees no key has out = 0 and lse = +inf, and gradients of zero. The sinks of a head join each row's sum:
 * lse_i = log(sum_n exp(sink_nh) + sum_j exp(S_ij)), P_ij = exp(S_ij - lse_i).
 *
 * The short way, one call on caller-described tensors:
 *
 *     fdm_options options = fdm_options_default();
 *     options.causal = 1;
 *     fdm_tensors t = {.struct_bytes = sizeof t, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
 *     if (fdm_attention_forward(&t, &options, NULL) != FDM_OK)
 *         fprintf(stderr, "%s\n", fdm_last_error());
 *
 * The long way, which allocates nothing, is describe -> plan -> execute:
 *
 *     fdm_problem problem;
 *     fdm_plan plan = {.struct_bytes = sizeof plan};
 *     fdm_describe(FDM_FORWARD, &t, &options, &problem);        shapes, dtypes, strides: checked once
 *     fdm_plan_attention(&device, &problem, &options, &plan);   a pure function; a value one can keep and print
 *     fdm_execute(&plan, &t, workspace, plan.workspace_bytes, NULL);
 *
 * Every function is thread-safe; none prints, exits, or throws. A function that fails returns a status other than
 * FDM_OK, leaves its outputs unwritten, and leaves one sentence in fdm_last_error().
 *
 * Structs that grow. A later version may add fields at the end of a struct that begins with `struct_bytes`. The caller
 * sets struct_bytes to the struct's sizeof before the call, in structs that a function writes too:
 *
 *     fdm_device device = {.struct_bytes = sizeof device};
 *
 * A program works with every later library of the same soname. A field that its struct lacks counts as 0, and a
 * function writes no byte behind the struct. A program also works with an older library while the fields that the
 * library lacks are 0: the library writes 0 there, and refuses another value.
 *
 * fdm_problem, fdm_softmax_problem, fdm_gemm_problem and fdm_companion_choice are parts of plans. Their size stays: a
 * field that a later version adds takes the place of `reserved` words. Reserved words are 0.
 *
 * fdm_tensor, fdm_data_type and fdm_device_id have DLPack's layout. fdm_executor and fdm_allocator are complete: they
 * hold what a host lends and no more. None of these five changes.
 */
#ifndef FLASH_DMATTN_H
#define FLASH_DMATTN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FDM_VERSION_MAJOR 0
#define FDM_VERSION_MINOR 1
#define FDM_VERSION_PATCH 0
#define FDM_VERSION       "0.1.0"

#ifdef __cplusplus
#    define FDM_ZERO \
        {}
#else
#    define FDM_ZERO \
        { 0 }
#endif

#if defined(_WIN32)
#    define FDM_API __declspec(dllexport)
#else
#    define FDM_API __attribute__((visibility("default")))
#endif

/* ---- 1. Status ------------------------------------------------------------------------------------------------- */

/* Stable values: new ones are added at the end, none is ever renumbered. */
typedef enum fdm_status {
    FDM_OK = 0,
    FDM_ERROR_INVALID_ARGUMENT = 1, /* an argument is wrong whatever the machine */
    FDM_ERROR_UNSUPPORTED = 2,      /* valid, but no kernel of this version and device takes it */
    FDM_ERROR_OUT_OF_MEMORY = 3,
    FDM_ERROR_WORKSPACE = 4, /* the workspace given is missing, misaligned or too small */
    FDM_ERROR_SYSTEM = 5,    /* the operating system, a driver or a file refused */
    FDM_ERROR_INTERNAL = 6,  /* a defect of this library */
    FDM_ERROR_REMOTE = 7     /* another rank failed, ended or was late; outputs are undefined */
} fdm_status;

/* The sentence of this thread's last failure, "" when there was none. Valid until this thread's next failing call. */
FDM_API const char *fdm_last_error(void);
/* "invalid argument" etc.; never NULL. */
FDM_API const char *fdm_status_name(fdm_status status);
/* "0.1.0" of the library that was loaded (FDM_VERSION is that of the header). */
FDM_API const char *fdm_version(void);

/* ---- 2. Tensors ------------------------------------------------------------------------------------------------ */

/* The layout of these three structs is DLPack's DLDevice, DLDataType and DLTensor (v0.2 to v1.x): a DLTensor * may be
 * passed as fdm_tensor *. Nothing is owned: data, shape and strides stay the caller's. Of the members one struct has
 * other names: `type` and `index` of a device are DLPack's `device_type` and `device_id`.
 *
 * A tensor that a function writes has no byte in common with any other tensor of the call, or the call is an error that
 * names both. Views of one tensor are apart where they lie between each other's rows, as dq, dk and dv of
 * dqkv [B, S, 3, H, D] do. A comment says where a result may take an input's place: same address, shape, strides. */
typedef struct fdm_device_id {
    int32_t type;  /* DLPack's device_type: FDM_CPU or FDM_CUDA */
    int32_t index; /* DLPack's device_id */
} fdm_device_id;

enum { FDM_CPU = 1, FDM_CUDA = 2 };

typedef struct fdm_data_type {
    uint8_t code; /* DLPack: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool */
    uint8_t bits;
    uint16_t lanes; /* always 1 */
} fdm_data_type;

typedef struct fdm_tensor {
    void *data;
    fdm_device_id device;
    int32_t ndim;
    fdm_data_type dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL means C-contiguous. 0 is a broadcast axis (inputs only). */
    uint64_t byte_offset;
} fdm_tensor;

typedef enum fdm_dtype {
    FDM_FLOAT32 = 0,
    FDM_FLOAT16 = 1,
    FDM_BFLOAT16 = 2,
    FDM_FLOAT64 = 3, /* reference family only */
    FDM_BOOL = 4,    /* DLPack bool; uint8 is taken as bool too, non-zero = true */
    FDM_INT32 = 5,
    FDM_INT64 = 6,  /* of block_table, page_start and slots */
    FDM_UINT32 = 7, /* of tree */
    FDM_NO_DTYPE = -1
} fdm_dtype;

FDM_API const char *fdm_dtype_name(fdm_dtype dtype);      /* "float32", "bfloat16", ... */
FDM_API fdm_dtype fdm_dtype_from_name(const char *name);  /* also "fp32", "bf16", ...; FDM_NO_DTYPE if unknown */
FDM_API fdm_dtype fdm_dtype_of(const fdm_tensor *tensor); /* FDM_NO_DTYPE if this library has no name for it */
FDM_API int64_t fdm_dtype_bytes(fdm_dtype dtype);         /* bytes of one element */
FDM_API fdm_data_type fdm_data_type_of(fdm_dtype dtype);  /* the DLPack triple */

/* The KV cache of a forward call: with one, k and v of fdm_tensors are the cache, and keys are numbered within their
 * sequence. What a cache does not have is NULL. The axes are those of fdm_tensors; P pages or rows of the cache, N new
 * keys, R dims that turn.
 *
 *     k, v                  [P, page, Hkv, D|Dv]     in pages of any size: key j of sequence b is row j % page of page
 *                                                    block_table[b, j / page]
 *                           [P, Sc, Hkv, D|Dv]       without block_table: key j is row j of row b
 *     block_table           [P', columns]            int32 or int64. With page_start it is [n], one list behind the
 *                                                    other: sequence b has the pages from page_start[b] on
 *     page_start            [B] or [B + 1]           int32 or int64; [B + 1] says where a list ends, too
 *     cache_row             [B]                      int32: the row of the table, or of a cache without one, that
 *                                                    belongs to sequence b; NULL: row b. Two sequences may share one
 *     lengths               [B]                      int32: keys before appending; or seqused_k of fdm_tensors: keys
 *                                                    after it. Where both are NULL, which no new key may be beside, the
 *                                                    cache is full
 *     first_key             [B]                      int32: keys before it are not visible (left padding)
 *     k_new, v_new          [B, N, Hkv, D|Dv]        appended behind the last key, then attended to
 *                           [total_new, Hkv, D|Dv]   with cu_seqlens_new [B + 1], int32, as cu_seqlens of packed calls
 *     rotary_cos, _sin      [n, R / 2]               q's dtype or float32, R even and at most D
 *     rotary_start          [B]                      int32: the position that turns the first new key; NULL: the length
 *                                                    before appending
 *
 * A negative length says that there is no sequence: it has no keys, nothing is appended, and its rows see none. A
 * length beyond the room is cut to it, and new keys beyond are dropped. Room is what the table's columns, or the list,
 * or the cache's rows hold, and at most max_seqlen_k of the options, which is this room by default. Row i of a
 * sequence's Sq rows is at position (keys after appending) - Sq + i for causal and windows. mask and bias are
 * [B|1, H|Hkv|1, Sq|1, max_seqlen_k|1], their last axis the key's number. Rows of the cache that belong to no key, and
 * entries of the table behind a sequence's last key, may hold anything.
 *
 * With rotary_cos the new keys are turned before they are written, and q before it is multiplied, by rotary embeddings
 * in float32 (float64 of float64), rounded once: elements (2t, 2t + 1) of a row are a pair where rotary_interleaved is
 * 1, else (t, t + R/2); elements from R on stay. New key t turns by row rotary_start + t of the tables, row i of q by
 * rotary_start + i under causal or a window, else by rotary_start; rows that they lack are their first or last one.
 *
 * Appending writes to k and v, whose type says const. Both must then lie apart from all other tensors and from each
 * other. Pages or rows that several sequences hold may be read; appended to by two at a time, they keep the keys of
 * one. On the CPU a page outside of the cache is an error; on CUDA devices its keys are not visible, and new keys are
 * not written there. On these `fault`, int32 [4], keeps one fault where its first word is 0: 1 a length without room,
 * 2 a page or 3 a cache_row that is none, 4 a page_start outside of the table; its sequence, column and value. A launch
 * more looks for it, whose kernel the first such call compiles. */
typedef struct fdm_cache {
    uint32_t struct_bytes;      /* sizeof(fdm_cache) */
    int32_t rotary_interleaved; /* 0 or 1 */
    const fdm_tensor *block_table, *page_start, *cache_row;
    const fdm_tensor *lengths, *first_key;
    const fdm_tensor *k_new, *v_new, *cu_seqlens_new;
    const fdm_tensor *rotary_cos, *rotary_sin, *rotary_start;
    fdm_tensor *fault;
} fdm_cache;

/* The tensors of one call; what a problem does not have is NULL. B batches, H query heads, Hkv KV heads (H is a
 * multiple of Hkv), Sq query rows, Sk keys, D head dim of q and k, Dv head dim of v and out; "1" may stand for an axis
 * that all share, "x|1" means either.
 *
 * Dense call:
 *
 *     q, dq                          [B, Sq, H, D]
 *     k, dk                          [B, Sk, Hkv, D]                 dk, dv: q's dtype; or float32, where that is of
 *     v, dv                          [B, Sk, Hkv, Dv]                16 bits: sums that nothing rounds, on the CPU
 *     out, dout                      [B, Sq, H, Dv]
 *     lse, dlse                      [B, H, Sq]                      float32 (float64 where q is float64)
 *     mask                           [B|1, H|Hkv|1, Sq|1, Sk|1]      bool, true = visible
 *     bias                           [B|1, H|Hkv|1, Sq|1, Sk|1]      q's dtype or float32
 *     dbias                          shape and dtype of bias
 *     interval_start, interval_end   [B|1, H|Hkv|1, Sk]              int32; rows start <= i < end see key j
 *     row_start, row_end             [B|1, H|Hkv|1, n, Sq]           int32; row i sees keys start <= j < end of one
 *                                                                    of its n ranges, n from 1 to 4
 *     block_mask                     [B|1, H|Hkv|1, Sq/b, Sk/b]      bool, true = the b rows and b keys of a block see
 *                                                                    each other, as far as the other masks say. Axes
 *                                                                    are rounded up; their extents say whether b is 64
 *                                                                    or 128
 *     tree                           [B, Sq, words]                  uint32 or int32, a bit for each of Sq rows: words
 *                                                                    are Sq / 32, rounded up
 *     sink, dsink                    [H] or [n, H]                   float32, float16, bfloat16 (float64 with float64)
 *
 * A sink is a logit without a value: not scaled, capped, biased or masked. It may be infinite: -inf changes no bit.
 *
 * Packed call: sequences of unlike lengths one behind the other. A call with cu_seqlens_q is packed:
 *
 *     cu_seqlens_q, cu_seqlens_k     [B + 1]                         int32, contiguous; sequence b is rows
 *                                                                    cu_seqlens[b] .. cu_seqlens[b + 1] - 1
 *     q, dq                          [total_q, H, D]
 *     k, dk                          [total_k, Hkv, D]
 *     v, dv                          [total_k, Hkv, Dv]
 *     out, dout                      [total_q, H, Dv]
 *     lse, dlse                      [H, total_q]
 *     mask, bias                     [B|1, H|Hkv|1, max_seqlen_q|1, max_seqlen_k|1]    indices within the sequence
 *     interval_start, interval_end   [H|Hkv|1, total_k]                                rows within the sequence
 *     row_start, row_end             [H|Hkv|1, n, total_q]                             keys within the sequence
 *     block_mask                     [B|1, H|Hkv|1, max_seqlen_q/b, max_seqlen_k/b]    blocks within the sequence
 *     tree                           [total_q, max_seqlen_q / 32]                      rounded up
 *
 * cu_seqlens begin with 0 or above, never fall, and end with at most total_q and total_k; no sequence is longer than
 * max_seqlen_q or max_seqlen_k.
 *
 * - On the CPU cu_seqlens lie in host memory; values that break these rules are an error.
 * - On a CUDA device they lie in device memory, and only the kernels read them. Kernels cut each sequence to the packed
 *   tensor and to max_seqlen, so that nothing outside of tensors and workspace is read or written, whatever cu_seqlens
 *   hold. cu_seqlens must not fall: sequences would overlap, results would be undefined, and a deterministic backward
 *   might not end.
 *
 * Lengths within a call: seqused_q, seqused_k [B] int32 say how many of a sequence's rows and keys count, in dense and
 * packed calls; negative: none. Causal and windows align to what counts. Beside a cache, cu_seqlens_q alone makes q,
 * out and lse packed.
 *
 * Rows before the first sequence, after the last one, those that a cut leaves over, and rows and keys that seqused
 * does not count belong to no sequence. Their out is 0, their lse +inf, and their gradients are 0; what q, k, v and
 * dout hold there has no effect.
 *
 * A tree says which rows of a draft see each other. The last Sq keys of a sequence are its draft, Sq its rows that
 * count: row i sees key t of the draft where bit t % 32 of word t / 32 of its row is set, and every earlier key as far
 * as the other masks say. Its own bit is the caller's to set; bits of t >= Sq do not count. A tree stands in place of
 * causal, beside which it is an error, and belongs to forward calls.
 *
 * NaN and inf. What a key holds has no effect on anything where no row sees it, whatever hides it: NaN and inf in its
 * rows of k and v included; nor has what a row holds that sees no key. A row whose scores hold a NaN gets a NaN lse and
 * out, and so do the gradients it touches. A NaN or inf in a key that some rows see may also reach rows of the same
 * tile that do not see it, and one in a row the gradients of keys there that it does not see.
 *
 * q, k, v, out and their gradients need a contiguous last axis. Every other stride is free; those of outputs are
 * positive, and no two elements of an output may overlap. out may take q's place. Elements need their own alignment. */
typedef struct fdm_tile_plan fdm_tile_plan; /* section 11 */
typedef struct fdm_tensors {
    uint32_t struct_bytes; /* sizeof(fdm_tensors) */
    const fdm_tensor *q, *k, *v;
    const fdm_tensor *mask, *bias, *interval_start, *interval_end;
    const fdm_tensor *cu_seqlens_q, *cu_seqlens_k;
    fdm_tensor *out, *lse;         /* forward: written (lse may be NULL). backward: read, both needed */
    const fdm_tensor *dout, *dlse; /* backward: gradients flowing in; dlse may be NULL */
    fdm_tensor *dq, *dk, *dv;      /* backward: written; each may be NULL when it is not wanted */
    fdm_tensor *dbias;             /* backward: written; NULL when it is not wanted */
    /* [B, H, Sq], dtype of lse: what lse has rounded away, so that lse + lse_low is the logarithm to twice the digits.
     * May be NULL; neither written nor read where there is no bias. forward: written. backward: read; needed for right
     * gradients of rows whose every visible key has a bias of -1e4 or below: beside such a number lse alone has lost
     * the logarithm of the number of keys (at -1e6 weights are off by 3 %, at -1e9 each of n equal keys has weight 1).
     */
    fdm_tensor *lse_low;
    const fdm_tensor *sink;
    fdm_tensor *dsink; /* as dbias */
    const fdm_tensor *seqused_q, *seqused_k;
    const fdm_cache *cache; /* forward; NULL: k and v are the call's own */
    const fdm_tensor *row_start, *row_end;
    const fdm_tensor *block_mask;
    /* NULL, or what fdm_mask_plan() made of the masks of this call, which are given beside it all the same. Forward and
     * backward then do not look for hidden tiles again. */
    const fdm_tile_plan *mask_plan;
    const fdm_tensor *tree; /* forward */
} fdm_tensors;

/* ---- 3. Options ------------------------------------------------------------------------------------------------ */

typedef struct fdm_executor fdm_executor;

/* What is made of choices that fdm_tune() has kept. */
typedef enum fdm_tune_wish {
    FDM_TUNE_DEFAULT = 0, /* FLASH_DMATTN_TUNE: unset uses what was kept, 1 is FDM_TUNE_MEASURE, 0 FDM_TUNE_RULES */
    /* The one-call form also measures a class of problems at its first use, outside of captures, which may take the
     * compilation and two seconds. */
    FDM_TUNE_MEASURE = 1,
    FDM_TUNE_RULES = 2, /* the rules alone */
    /* What was kept, else the way that the model predicts to be surely faster than that of the rules: for a device that
     * is not there, too. The companions have no model: as FDM_TUNE_DEFAULT. */
    FDM_TUNE_PREDICT = 3
} fdm_tune_wish;

/* On what the bits of a row of out and lse may depend, besides the row's own numbers, head counts, head dims, dtype,
 * masks of the call, alignment of its tensors, device and library version. */
typedef enum fdm_invariance {
    FDM_INVARIANCE_NONE = 0, /* on everything that a plan depends on: batch, bounds, lengths */
    /* On its own sequence's length and rows, and on whether max_seqlen_q rows of a KV head are many (above 64 on CUDA
     * devices, 16 on the CPU); not on other sequences, the batch, max_seqlen_k, pages, their size and number. */
    FDM_INVARIANCE_BATCH = 1,
    /* On the keys that it sees alone: not on how rows are cut into calls, so that a prompt in chunks and rows one by
     * one have the bits of one call. Keys are not split. */
    FDM_INVARIANCE_SCHEDULE = 2
} fdm_invariance;

typedef struct fdm_options {
    uint32_t struct_bytes;     /* sizeof(fdm_options); fdm_options_default() sets it */
    int32_t has_softmax_scale; /* 0: softmax_scale = D^-0.5 of q's own D */
    int32_t causal;            /* 0 or 1; bottom-right aligned: j <= i + Sk - Sq */
    int32_t deterministic;     /* 1: same bits for the same inputs, device and version (the CPU always is) */
    double softmax_scale;      /* finite; 0 and negative are legal */
    double softcap;            /* 0 = none; finite and >= 0 */
    int64_t window_left;       /* -1 = unbounded, >= 0: j >= i + Sk - Sq - left */
    int64_t window_right;      /* -1 = unbounded, >= 0: j <= i + Sk - Sq + right */
    int64_t max_seqlen_q;      /* varlen: an upper bound on every sequence's rows; 0 = found from cu_seqlens */
    int64_t max_seqlen_k;      /* the same of keys; with a cache at most these count, 0 = its room */
    int32_t num_threads;       /* CPU: at most this many; 0 = FLASH_DMATTN_NUM_THREADS, else what the process may use */
    const char *kernel;        /* force one kernel by name or choice code; NULL = FLASH_DMATTN_KERNEL, else chosen */
    const char *family;        /* force a family ("cpu", "reference"); NULL = chosen */
    const fdm_executor *executor; /* CPU: threads of the host; NULL = libgomp where loaded, else an own pool */
    void *stream;                 /* CUDA: stream of the one-call form; NULL = the legacy default stream */
    int64_t lse_without_sink;     /* 1: lse and dlse are those of the sum without sinks, as fdm_merge() takes them */
    int64_t tune; /* fdm_tune_wish; a call that is deterministic or forces a kernel or family looks at no kept choice */
    int64_t add_dkv;   /* backward: 1: dk and dv, float32 or float64, are added to what is there */
    int64_t sm_margin; /* CUDA: multiprocessors that a plan leaves to others, such as a copy; at least one stays */
    /* forward, all three: how far bits of a row depend on the rest of the call, and into how many parts keys are split.
     * A kernel that cannot have them refuses. */
    int64_t invariance; /* fdm_invariance */
    int64_t num_splits; /* 1: keys are not split; n: into n parts of equal numbers of tiles; 0 = planned */
    int64_t split_keys; /* keys of a part, a multiple of 64; 0 = planned. Only one of the two is given */
} fdm_options;

/* No softcap, window, causal mask or forced kernel; the scale is D^-0.5. */
static inline fdm_options fdm_options_default(void) {
    fdm_options options = FDM_ZERO;
    options.struct_bytes = sizeof options;
    options.window_left = options.window_right = -1;
    return options;
}

/* Threads that a host lends. run() calls body(argument, index) for index 0 .. num_threads-1, possibly concurrently (a
 * serial loop is legal), and returns when all have returned. */
struct fdm_executor {
    void *context;
    int32_t num_threads;
    void (*run)(void *context, int32_t num_threads, void (*body)(void *argument, int32_t index), void *argument);
};

/* ---- 4. The one-call form -------------------------------------------------------------------------------------- */

/* allocate() returns 64-byte aligned memory or NULL; release() gives it back. NULL instead of an allocator means malloc
 * (CPU only). The only functions of the library that may allocate are these two. */
typedef struct fdm_allocator {
    void *context;
    void *(*allocate)(void *context, size_t bytes);
    void (*release)(void *context, void *memory);
} fdm_allocator;

FDM_API fdm_status fdm_attention_forward(const fdm_tensors *tensors, const fdm_options *options,
                                         const fdm_allocator *allocator);
FDM_API fdm_status fdm_attention_backward(const fdm_tensors *tensors, const fdm_options *options,
                                          const fdm_allocator *allocator);

/* Combines two results for the same queries over disjoint sets of keys.
 *
 *     out1, out2, out               [B, S, H, Dv]
 *     lse1, lse2, lse               [B, H, S]        float32 (float64 beside float64)
 *     lse_low1, lse_low2, lse_low   [B, H, S], dtype of lse, or NULL
 *
 * An infinite lse1 or lse2, of either sign, says that the part saw no key: what else the part holds in that row does
 * not count, not even NaN. Where both are infinite, out is 0 and lse +inf. Otherwise a NaN in a part makes NaN: in
 * lse1, lse2 and their low parts in the whole row and in lse, in out1 and out2 in that element.
 *
 * lse + lse_low is the logarithm of a sum to twice the digits. Without lse_low1 and lse_low2, which fdm_tensors
 * describes, parts whose every key has a bias of -1e4 or below get wrong shares: 1000 and 3000 equal keys beside -1e9
 * count alike. lse_low NULL: not wanted. It is 0 where lse is infinite.
 *
 * out may take the place of out1 or out2, lse of lse1 or lse2, lse_low of lse_low1 or lse_low2. Every stride is free;
 * all tensors are on one device. On a CUDA device: float32, float16 and bfloat16, enqueued on `stream` (NULL: the
 * legacy default stream); the first call of a dtype compiles or loads a kernel. On the CPU `stream` is ignored. */
typedef struct fdm_merge_tensors {
    uint32_t struct_bytes; /* sizeof(fdm_merge_tensors) */
    const fdm_tensor *out1, *lse1, *lse_low1;
    const fdm_tensor *out2, *lse2, *lse_low2;
    fdm_tensor *out, *lse, *lse_low;
} fdm_merge_tensors;
FDM_API fdm_status fdm_merge(const fdm_merge_tensors *tensors, void *stream);

/* ---- 5. Describe ----------------------------------------------------------------------------------------------- */

typedef enum fdm_pass { FDM_FORWARD = 0, FDM_BACKWARD = 1 } fdm_pass;

/* What to compute, without data. Filled by fdm_describe(), or by hand from fdm_problem_default(). */
typedef struct fdm_problem {
    fdm_pass pass;
    fdm_dtype dtype;
    int64_t batch, heads, heads_kv;
    int64_t seqlen_q, seqlen_k; /* varlen: the maxima */
    int64_t head_dim, head_dim_v;
    int64_t total_q, total_k; /* varlen: rows in the packed tensors; dense: 0 */
    double softmax_scale;     /* resolved: never "default" */
    double softcap;
    int64_t window_left, window_right; /* -1 = unbounded */
    int32_t causal;
    int32_t varlen;
    int32_t deterministic;
    int32_t needs_lse;                    /* forward: lse is written */
    int32_t needs_dq, needs_dk, needs_dv; /* backward */
    int32_t needs_dbias, has_dlse;        /* backward */
    int32_t has_lse_low;                  /* beside a bias. forward: lse_low is written; backward: it is read */
    int32_t has_intervals, has_mask, has_bias;
    fdm_dtype bias_dtype;
    int64_t interval_batch, interval_heads; /* extents, 1 = broadcast */
    int64_t mask_shape[4];
    int64_t bias_shape[4];
    int32_t aligned;        /* 1: every address and stride of q, k, v, out and gradients is a multiple of 16 bytes, and
                               their rows are less than 2^31 bytes apart */
    int32_t scores_aligned; /* 1: keys of mask and bias are contiguous, and the same holds for their other strides */
    /* 1: tensor maps for TMA (compute capability 9.0 and above) can say where these tensors lie: addresses
     * are multiples of 16 bytes, and so are strides of axes longer than 1, which are above 0 and below 2^40 bytes.
     * Empty tensors count as such. */
    int32_t q_mappable;      /* of q, and in the backward of dout; 0 where out takes the place of a packed q */
    int32_t keys_mappable;   /* of k and v */
    int32_t scores_mappable; /* of mask and bias, whose keys are contiguous then */
    int32_t has_sink, needs_dsink;
    fdm_dtype sink_dtype;
    int32_t num_sinks; /* of a head: n of [n, H], 1 of [H] */
    int32_t lse_without_sink;
    int32_t has_seqused_q, has_seqused_k;
    int64_t new_rows;                       /* of k_new: appended by the call; 0 = none */
    int32_t has_cache;                      /* seqlen_k: the most keys of a sequence */
    int32_t page_size, num_pages;           /* of k: rows of a page, 0 = no pages; pages, or rows of the cache */
    int32_t max_pages;                      /* columns of the table; ragged: its entries */
    int32_t ragged_pages;                   /* 1: page_start is given */
    int32_t has_first_key, has_cache_row;   /* flags */
    int32_t rotary_dim, rotary_interleaved; /* 0: nothing turns */
    int32_t dkv_float32;                    /* 1: dk and dv are float32 beside a dtype of 16 bits */
    int32_t add_dkv;
    int32_t has_row_intervals;
    int64_t row_interval_batch, row_interval_heads; /* extents, 1 = broadcast */
    int32_t row_ranges;                             /* of a row: n of [B, h, n, Sq] */
    int32_t invariance, num_splits, split_keys;     /* as in fdm_options; of a forward */
    int32_t block_mask_size;                        /* 64 or 128: rows and keys of its blocks; 0 = no block mask */
    int32_t block_mask_batch, block_mask_heads;     /* extents, 1 = broadcast */
    int8_t has_tree;
    int8_t value_in_key; /* 1: v is the first columns of k: the same address and strides, head_dim_v below head_dim */
    int8_t reserved[2];  /* 0 */
} fdm_problem;

/* Float32, B 1, H 1, D 64, no mask, every gradient wanted, aligned. */
FDM_API fdm_problem fdm_problem_default(void);
FDM_API fdm_status fdm_problem_validate(const fdm_problem *problem);
FDM_API fdm_status fdm_describe(fdm_pass pass, const fdm_tensors *tensors, const fdm_options *options,
                                fdm_problem *problem);

/* ---- 6. Devices ------------------------------------------------------------------------------------------------ */

/* Facts a plan may depend on; a value. CPU: isa and caches. CUDA: architecture and limits. */
typedef struct fdm_device {
    uint32_t struct_bytes; /* sizeof(fdm_device) */
    fdm_device_id id;
    int32_t present; /* 1: queried on this machine. 0: named, from the table */
    char name[64];   /* "cpu:avx512_bf16", "sm_90" */
    char isa[32];    /* CPU: the best instruction set kernels may use */
    /* CPU: the highest instruction set that a kernel's name may ask for, where it is above isa: "avx512_bf16" beside
     * "avx512" on Intel's processors without AMX, where it is slower. "" = isa. */
    char isa_by_name[32];
    int32_t num_threads;                  /* CPU: what this process may use (affinity and cgroup) */
    int32_t compute_major, compute_minor; /* CUDA */
    int32_t num_sms;
    int32_t registers_per_sm, threads_per_sm; /* CUDA */
    int32_t nvrtc_version; /* CUDA, 10.x, present: of the NVRTC that would compile, 12080 for 12.8; 0 = unknown */
    int64_t l1_bytes, l2_bytes, l3_bytes;
    int64_t shared_bytes; /* CUDA: opt-in shared memory of a block */
    int64_t bandwidth;    /* CUDA: peak of device memory, bytes a second; 0 = unknown */
} fdm_device;

/* type FDM_CPU (index 0) or FDM_CUDA. */
FDM_API fdm_status fdm_device_query(int32_t type, int32_t index, fdm_device *device);
/* "cpu", "cpu:avx2", "sm_90", "sm_90:smem=160K". Need not be present on this machine. */
FDM_API fdm_status fdm_device_from_name(const char *name, fdm_device *device);

/* 1 when the device is a CUDA device of compute capability 8.9 (or 9.0) and later, else 0; of NULL 0. */
FDM_API int32_t fdm_supports_sm89_features(const fdm_device *device);
FDM_API int32_t fdm_supports_sm90_features(const fdm_device *device);

/* Classes of opt-in shared memory of a block. */
typedef enum fdm_memory_tier {
    FDM_MEMORY_LOW = 0,
    FDM_MEMORY_MEDIUM = 1, /* from 144 KB */
    FDM_MEMORY_HIGH = 2    /* from 176 KB */
} fdm_memory_tier;

/* What an architecture offers to kernels, as 0 or 1. */
typedef struct fdm_arch_config {
    uint32_t struct_bytes; /* sizeof(fdm_arch_config) */
    fdm_memory_tier tier;
    int32_t async_copy;    /* cp.async, from 8.0 */
    int32_t float8;        /* 8-bit floating-point matrix products, from 8.9 */
    int32_t bulk_copy;     /* TMA and thread-block clusters, from 9.0 */
    int32_t warpgroup_mma; /* wgmma, 9.0 only */
    int32_t tensor_memory; /* tcgen05, 10.x only */
    int64_t shared_bytes;  /* the device's own opt-in limit */
} fdm_arch_config;

/* CUDA devices from 8.0 on; below, FDM_ERROR_UNSUPPORTED. */
FDM_API fdm_status fdm_arch_optimization_config(const fdm_device *device, fdm_arch_config *config);

/* ---- 7. Plan --------------------------------------------------------------------------------------------------- */

/* A plan is a value without pointers: copy it, keep it, print it, execute it as often as wanted, from any thread. */
enum { FDM_PLAN_PARAMETERS = 16 };
typedef struct fdm_plan {
    uint32_t struct_bytes; /* sizeof(fdm_plan) */
    fdm_problem problem;
    fdm_device_id device;
    char family[16];                         /* "cpu", "reference" */
    char kernel[48];                         /* "cpu.forward.avx512" */
    char choice[64];                         /* choice code: names the tile that is launched, "CPU_AVX512_256x128" */
    int32_t kernel_index;                    /* row in the family's list */
    int32_t block_m, block_n;                /* query rows x keys of one step; 0 where it does not apply */
    int32_t stages;                          /* 0 where it does not apply */
    int32_t v_in_registers;                  /* -1 where it does not apply */
    int32_t num_threads;                     /* CPU */
    int64_t shared_bytes;                    /* -1 where it does not apply */
    int64_t workspace_bytes;                 /* what fdm_execute() needs; 64-byte aligned */
    int32_t parameters[FDM_PLAN_PARAMETERS]; /* the kernel's own, which its JSON names; 0 beyond them */
    char reason[512];                        /* why this kernel, and why not the ones before it */
} fdm_plan;

FDM_API fdm_status fdm_plan_attention(const fdm_device *device, const fdm_problem *problem, const fdm_options *options,
                                      fdm_plan *plan);
/* The variant-th way (from 0, which is the one that is chosen freely) in which a kernel that fdm_kernel_list() names
 * can run the problem, for tuners, checks and compile matrices. FDM_ERROR_INVALID_ARGUMENT past the last variant,
 * FDM_ERROR_UNSUPPORTED when the kernel cannot run the problem; the sentence says why. */
FDM_API fdm_status fdm_plan_variant(const fdm_device *device, const fdm_problem *problem, const char *kernel,
                                    int32_t variant, fdm_plan *plan);
/* The time that a plan takes, predicted by a model of the device's facts whose constants were fitted to measurements
 * (docs/tuning.md); nothing is run, and the device need not be present. */
enum { FDM_PREDICTION_FEATURES = 8 };
typedef struct fdm_prediction {
    uint32_t struct_bytes;                    /* sizeof(fdm_prediction) */
    int32_t num_samples;                      /* problems that the constants of this way were fitted to */
    double seconds;                           /* 0: the model has no constants for it */
    double residual;                          /* root mean square of predicted / measured - 1 over those problems */
    double features[FDM_PREDICTION_FEATURES]; /* what the constants multiply */
    char name[128];                           /* of the constants */
} fdm_prediction;
/* window: W of key intervals, those of a top-W; 0 = an eighth of the keys. FDM_ERROR_UNSUPPORTED for plans of the
 * CPU. */
FDM_API fdm_status fdm_plan_predict(const fdm_device *device, const fdm_plan *plan, int64_t window,
                                    fdm_prediction *prediction);
/* One object of JSON. Writes at most size bytes with the final 0; *needed is the size that holds all. buffer may be
 * NULL with size 0. */
FDM_API fdm_status fdm_plan_to_json(const fdm_plan *plan, char *buffer, size_t size, size_t *needed);
/* Strict: unknown, missing or repeated keys are errors. */
FDM_API fdm_status fdm_plan_from_json(const char *json, size_t length, fdm_plan *plan);

/* The kernels this library knows, by index from 0; FDM_ERROR_INVALID_ARGUMENT past the end. */
typedef struct fdm_kernel_info {
    uint32_t struct_bytes; /* sizeof(fdm_kernel_info) */
    fdm_pass pass;
    const char *family, *name, *description;
    int32_t available;   /* 1: this machine can run it, and FLASH_DMATTN_CPU_ISA allows it; its name is enough */
    int32_t device_type; /* FDM_CPU or FDM_CUDA */
} fdm_kernel_info;
FDM_API fdm_status fdm_kernel_list(int32_t index, fdm_kernel_info *info);

/* ---- 8. Execute ------------------------------------------------------------------------------------------------ */

typedef struct fdm_launch {
    uint32_t struct_bytes;        /* sizeof(fdm_launch) */
    void *stream;                 /* CUDA stream; ignored on the CPU */
    const fdm_executor *executor; /* CPU threads; NULL = libgomp where loaded, else an own pool */
} fdm_launch;

/* Runs a plan on tensors that match its problem. workspace: at least plan->workspace_bytes, 64-byte aligned, on the
 * plan's device, not shared with a call in flight; may be NULL when workspace_bytes is 0. launch may be NULL. */
FDM_API fdm_status fdm_execute(const fdm_plan *plan, const fdm_tensors *tensors, void *workspace,
                               size_t workspace_bytes, const fdm_launch *launch);

/* Compiles or loads the plan's kernels now, so that no later call does. Nothing to do on the CPU. */
FDM_API fdm_status fdm_prepare(const fdm_plan *plan);

/* What a kernel that a plan launches takes of a CUDA device, and how much of it is resident at once in theory. */
typedef struct fdm_kernel_resources {
    uint32_t struct_bytes; /* sizeof(fdm_kernel_resources) */
    int32_t threads;       /* of a block */
    int32_t registers;     /* of a thread */
    int32_t spill_bytes;   /* written to and read from local memory because registers were short */
    int32_t blocks_per_sm; /* resident on one multiprocessor; 0: the device cannot run such a block */
    int32_t warps_per_sm;  /* the same in warps */
    int32_t max_warps;     /* what a multiprocessor has room for */
    char entry[48];        /* "mma_forward" */
    char bound[32];        /* what allows no more: "registers", "shared memory", "warps", "blocks", or two of them */
    int64_t shared_bytes;  /* of a block, dynamic and static */
} fdm_kernel_resources;

/* Of each kernel that the plan launches on `device`, which need not be present: compiled by NVRTC where the cache does
 * not have it, which takes seconds. kernels has room for `size`; 8 are always enough. The first one's struct_bytes
 * counts for all. *count receives their number, 0 for plans of the CPU. FDM_ERROR_UNSUPPORTED without NVRTC. */
FDM_API fdm_status fdm_plan_resources(const fdm_plan *plan, const fdm_device *device, fdm_kernel_resources *kernels,
                                      int32_t size, int32_t *count);

/* ---- 9. Device memory and time, for callers without a CUDA toolkit of their own --------------------------------- */

/* type FDM_CPU or FDM_CUDA; 64-byte aligned (256 on CUDA), uninitialised; release takes NULL too. */
FDM_API fdm_status fdm_memory_allocate(fdm_device_id device, size_t bytes, void **memory);
FDM_API fdm_status fdm_memory_release(fdm_device_id device, void *memory);
/* Between host and device, or within either; both return when done, after all work enqueued on the device before. */
FDM_API fdm_status fdm_memory_copy(void *to, fdm_device_id to_device, const void *from, fdm_device_id from_device,
                                   size_t bytes);
FDM_API fdm_status fdm_memory_fill(fdm_device_id device, void *memory, uint8_t value, size_t bytes);
/* Waits for all work on the device; the first place that reports a kernel's fault. */
FDM_API fdm_status fdm_synchronize(fdm_device_id device);

/* A stopwatch: CUDA events on the stream, the monotonic clock on the CPU. stop() waits for the work between. One call
 * of start and stop at a time. */
typedef struct fdm_timer fdm_timer;
FDM_API fdm_status fdm_timer_create(fdm_device_id device, fdm_timer **timer);
FDM_API fdm_status fdm_timer_start(fdm_timer *timer, void *stream);
FDM_API fdm_status fdm_timer_stop(fdm_timer *timer, void *stream, double *seconds);
FDM_API void fdm_timer_release(fdm_timer *timer);

/* ---- 10. Tuning ------------------------------------------------------------------------------------------------- */

/* Times the ways in which a device that is present can run a problem, the choice of the rules among them, on random
 * tensors that it allocates there and gives back. Kernels are compiled before any is timed. Samples are taken in turns,
 * each of at least a millisecond of work between two events of the default stream, on inputs that the L2 cache does not
 * hold. All get one sample; those within 1.3 times the fastest go on to five, and the best three to fifteen. It ends
 * early when one is ahead of the others by more than their quartiles, and when `seconds` of device time are spent. What
 * a problem does not say is made up: lengths within a call and of a cache fall from the longest to half of it.
 *
 * A way whose outputs differ from those of the rules' choice by more than twice the bound of the checks is not timed. A
 * row says so. The best is another than the rules' where it takes at least 1 % less time, and less by more than both
 * spreads. What is kept is a wish: a plan whose device and class it is of takes it where the kernel does, and its
 * reason says when it was measured, or why it was passed over. docs/tuning.md has the classes. */
enum { FDM_TUNE_SAMPLES = 15 };
typedef struct fdm_tune_options {
    uint32_t struct_bytes; /* sizeof(fdm_tune_options) */
    int32_t exhaustive;    /* 1: every way gets `rounds` samples, but those that take three times the best one's time */
    int32_t compile_only;  /* 1: kernels are made ready, and nothing is timed */
    int32_t max_variants;  /* besides the rules' choice; 0 = 12, or all where exhaustive */
    int32_t rounds;        /* exhaustive: 1 to FDM_TUNE_SAMPLES; 0 = 5 */
    int32_t keep;          /* 1: the best is kept for later calls of the problem's class, on disk where that can be */
    double seconds;        /* of device time at most; 0 = 2, or no limit where exhaustive */
    int64_t window;        /* the W of key intervals, which are those of a top-W; 0 = an eighth of the keys */
    /* Called between steps with what is done, or NULL: "compiling", "timing". */
    void (*progress)(void *context, const char *step, int32_t done, int32_t count);
    void *context;
    void *stream; /* CUDA: whose calls are timed; NULL = the legacy default stream */
} fdm_tune_options;

typedef enum fdm_tune_state {
    FDM_TUNE_TIMED = 0,
    FDM_TUNE_NOT_TIMED = 1, /* the limit of time came first */
    FDM_TUNE_WRONG = 2,     /* its results differ from those of the rules' choice */
    FDM_TUNE_FAILED = 3     /* it could not be compiled or run */
} fdm_tune_state;

typedef struct fdm_tune_row {
    uint32_t struct_bytes; /* sizeof(fdm_tune_row); of an array the first one's counts */
    fdm_tune_state state;
    char kernel[48], choice[64];
    int32_t is_rule; /* 1: the choice of the rules */
    int32_t num_samples;
    int32_t num_threads, reserved;               /* CPU; 0 */
    double seconds, quartile_low, quartile_high; /* of a call: the samples' median and quartiles; 0: not timed */
    double difference;                           /* of its results from the rules' choice, as the checks count it */
    double samples[FDM_TUNE_SAMPLES];            /* seconds of a call, in the order of rounds */
    char why[160];                               /* of a row that is wrong or failed */
} fdm_tune_row;

typedef struct fdm_tune_result {
    uint32_t struct_bytes;  /* sizeof(fdm_tune_result) */
    int32_t num_rows;       /* the rules' choice is row 0 */
    int32_t best;           /* its row; 0 where the rules' choice stays */
    int32_t num_places;     /* where the inputs lay in turn */
    double compile_seconds; /* on the clock */
    double device_seconds;  /* of all samples */
    int32_t kept;           /* 1: in a file and memory. 2: in this process' memory alone */
    int32_t reserved;       /* 0 */
} fdm_tune_result;

/* options NULL: the defaults. rows has room for `size`; ways that find none are left out. */
FDM_API fdm_status fdm_tune(const fdm_device *device, const fdm_problem *problem, const fdm_tune_options *options,
                            fdm_tune_row *rows, int32_t size, fdm_tune_result *result);

/* Choices that are kept in files, by index from 0, in no order; FDM_ERROR_INVALID_ARGUMENT past the last. */
typedef struct fdm_kept_choice {
    uint32_t struct_bytes;                 /* sizeof(fdm_kept_choice) */
    int32_t num_samples;                   /* of the choice */
    int32_t num_threads, reserved;         /* CPU; 0 */
    char kernel[48], choice[64];           /* of the rules where they stay */
    char rule_kernel[48], rule_choice[64]; /* of the rules then */
    double seconds, rule_seconds;          /* medians */
    int64_t date;                          /* seconds since 1970 */
    char key[896];                         /* the device and the class of problems, in words */
    char maker[128];                       /* library, kernels' sources, driver and NVRTC that it was measured with */
    char file[128];                        /* its name in the folder "tuned" of fdm_cache_folder() */
    char ignored[128];                     /* why it is not used; "" where it is */
} fdm_kept_choice;
FDM_API fdm_status fdm_tune_kept(int32_t index, fdm_kept_choice *choice);
/* Writes all whole choices to a file, a line each, or takes those of such a file in; *count receives how many. A line
 * that is damaged is an error that names it, and those before it are taken in. */
FDM_API fdm_status fdm_tune_export(const char *path, int64_t *count);
FDM_API fdm_status fdm_tune_import(const char *path, int64_t *count);
/* Removes all. count may be NULL. */
FDM_API fdm_status fdm_tune_forget(int64_t *count);

/* ---- 11. Masks as key intervals -------------------------------------------------------------------------------- */

/* The bias of a dynamic mask, a number a key and head of what a projection gives for them: a softplus(dt), or
 * exp(a softplus(dt)) where exponential is not 0.
 *
 *     dt        [B, S, h]              floating, each of its own dtype; float64 on the CPU only
 *     a         [h]
 *     padding   [B, S] or NULL         bool, true = a real key; the bias of others is -inf: no row sees them
 *     bias      [B, h, S]              written
 *
 * On one device, with any strides; one kernel on CUDA devices, where they compute in float32. */
FDM_API fdm_status fdm_key_bias(const fdm_tensor *dt, const fdm_tensor *a, const fdm_tensor *padding,
                                int32_t exponential, fdm_tensor *bias, void *stream);
/* Its gradients ddt [B, S, h] and da [h], written, each NULL where it is not wanted, of dbias [B, h, S]. da is summed
 * in one order. Where dbias is 0, as of keys that no row sees, dt has no part in it, not even NaN. One kernel. */
FDM_API fdm_status fdm_key_bias_backward(const fdm_tensor *dt, const fdm_tensor *a, const fdm_tensor *padding,
                                         int32_t exponential, const fdm_tensor *dbias, fdm_tensor *ddt, fdm_tensor *da,
                                         void *stream);

/* Exact causal top-W of a bias of the key alone. Row i sees the `window` keys j <= i of largest bias; of equals the
 * smaller index wins, and NaN ranks lowest. Key j gets the rows start_j <= i < end_j that see it.
 *
 *     bias         [B|1, h, Sk] or [B|1, h, 1, Sk]    float32, float16 or bfloat16
 *     padding      [B, Sk] or NULL                    bool, true = a real key; others are never visible, nor counted
 *     start, end   [B, h, Sk]                         int32, written; B is the larger of bias' and padding's
 *
 * Rows are 0 .. seqlen_q - 1. A key that no row sees gets a start past every row; one that is never dropped an end of
 * INT32_MAX. All tensors are on one device, with any strides; the CPU and CUDA devices give the same numbers.
 * fdm_topk_intervals_workspace() says how many bytes of workspace, at a multiple of 16, a bias takes on its device (0
 * for one that is not legal). On the CPU, where the time is O(Sk log W) a head, workspace NULL allocates them. On CUDA
 * devices the workspace is device memory; the work is enqueued on `stream` (a CUstream, NULL = the default stream), can
 * be captured, and nothing waits for it. */
FDM_API fdm_status fdm_topk_intervals(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window,
                                      int64_t seqlen_q, fdm_tensor *start, fdm_tensor *end, void *workspace,
                                      size_t workspace_bytes, void *stream);
FDM_API size_t fdm_topk_intervals_workspace(const fdm_tensor *bias, const fdm_tensor *padding);
/* The others write start, end [B, h, Sk], the same for all of B and h, on their device, by one kernel on CUDA devices.
 *
 * Attention inside documents, where Sq = Sk: causal, or with causal 0 to the whole document. cu_seqlens [n + 1], int32,
 * rises from 0 to Sk. On CUDA devices it is not checked: keys from its last on are never visible. */
FDM_API fdm_status fdm_document_intervals(const fdm_tensor *cu_seqlens, int32_t causal, fdm_tensor *start,
                                          fdm_tensor *end, void *stream);
/* Causal and window (-1 = unbounded) for Sq rows, bottom-right aligned. */
FDM_API fdm_status fdm_window_intervals(int64_t seqlen_q, int32_t causal, int64_t window_left, int64_t window_right,
                                        fdm_tensor *start, fdm_tensor *end, void *stream);
/* Prefix LM: keys below `prefix` are visible to every row, the others causally. */
FDM_API fdm_status fdm_prefix_intervals(int64_t seqlen_q, int64_t prefix, fdm_tensor *start, fdm_tensor *end,
                                        void *stream);
/* Rules that hold at once: a row sees a key where all that are given let it. Each may be NULL; all are int32. */
typedef struct fdm_key_rules {
    uint32_t struct_bytes;                           /* sizeof(fdm_key_rules) */
    const fdm_tensor *document_ids;                  /* [B|1, Sk], rising, Sq = Sk: keys of the row's own document */
    const fdm_tensor *prefix_lengths;                /* [B|1]: keys below it, and the others causally */
    const fdm_tensor *window_sizes;                  /* [n, 2]: (left, right) of each head, -1 = unbounded */
    const fdm_tensor *interval_start, *interval_end; /* [B|1, n, Sk], packed [n, total_k] */
    const fdm_tensor *cu_seqlens_q, *cu_seqlens_k;   /* [B + 1]: packed; without document_ids */
} fdm_key_rules;
/* start, end [B, h, Sk], packed [h, total_k], written; h is a multiple of each n, and head i reads a rule's head
 * i / (h / n). Packed: seqlen_q is ignored, and no row sees keys of no sequence. One kernel on CUDA devices, where the
 * values of rules are not checked: ids must not fall. */
FDM_API fdm_status fdm_rule_intervals(const fdm_key_rules *rules, int64_t seqlen_q, fdm_tensor *start, fdm_tensor *end,
                                      void *stream);
/* A dense bool mask [B, h, Sq, Sk] as intervals. *exact, on the mask's device, becomes 0 when some key's rows are not
 * one interval, else another number; with 0 start and end are unwritten on the CPU and without meaning on CUDA
 * devices. */
FDM_API fdm_status fdm_intervals_from_mask(const fdm_tensor *mask, fdm_tensor *start, fdm_tensor *end, int32_t *exact,
                                           void *stream);
/* And back: intervals [B, h, Sk] as a dense bool mask [B, h, Sq, Sk], written. One kernel on CUDA devices. */
FDM_API fdm_status fdm_intervals_to_mask(const fdm_tensor *start, const fdm_tensor *end, fdm_tensor *mask,
                                         void *stream);
/* What a dense bool mask [B, h, Sq, Sk] shows of each block of block_q rows and block_k keys: 0 nothing, 1 a part, 2
 * all of it; without a 1 the blocks are the whole mask. blocks [B, h, ceil(Sq / block_q), ceil(Sk / block_k)], uint8 or
 * bool, contiguous, written. One kernel on CUDA devices. */
FDM_API fdm_status fdm_mask_blocks(const fdm_tensor *mask, int64_t block_q, int64_t block_k, fdm_tensor *blocks,
                                   void *stream);
/* A block mask of lists: the row r of blocks holds blocks indices[b, h, r, 0 .. counts[b, h, r] - 1].
 *
 *     counts     [B, h, Q]       int32
 *     indices    [B, h, Q, n]    int32; behind a row's count they may be anything
 *     blocks     [B, h, Q, K]    bool, written
 *
 * On the CPU a count above n, or an index outside of 0 .. K - 1, is an error. On CUDA devices one kernel reads the
 * lists: there such a count is n, a negative one 0, and such an index names no block. */
FDM_API fdm_status fdm_blocks_from_lists(const fdm_tensor *counts, const fdm_tensor *indices, fdm_tensor *blocks,
                                         void *stream);
/* The dense mask of flash-dmattn 1.2: each row keeps the `window` keys of largest bias, of equals the smaller index;
 * window 0 keeps those with a bias above 0. Unlike fdm_topk_intervals() it takes biases and masks with a row axis, and
 * knows of no order of rows: a causal mask is given as attention_mask.
 *
 *     bias             [B|1, h|1, Sq|1, Sk]                   floating; float64 on the CPU only
 *     attention_mask   [B|1, h|1, Sq|1, Sk|1], or [B|1, n]    bool, or NULL: all keys are visible
 *     mask             [B, h, Sq, Sk]                         bool, written
 *
 * An attention_mask [B|1, n] is of the newest n keys; older keys are visible. A key that is not visible, or whose bias
 * is NaN, has the bias min_value (rounded to the bias' dtype); keys of that bias are never kept. block_size above 1: a
 * block of block_size keys is kept whole where more than half of it is, else dropped whole, whatever attention_mask
 * hides. One kernel on CUDA devices; on the CPU 8 bytes a key are allocated. */
FDM_API fdm_status fdm_create_mask(const fdm_tensor *bias, const fdm_tensor *attention_mask, int64_t window,
                                   double min_value, int64_t block_size, fdm_tensor *mask, void *stream);

/* The keys of a top-W mask that are kept while tokens are generated. The bound that a key must pass only rises, so a
 * key that is dropped never comes back: W slots a head hold all that later rows see, in any order, and attention of a
 * row is that to slots.k and slots.v with slots.bias, without a mask or an order: no larger than W, however long the
 * sequence. All on one device and the caller's; written by the functions below, fdm_topk_fill() first.
 *
 *     key      [B, h, W] int32             the number of the slot's key, counted from 0; -1 = an empty slot
 *     bias     [B, h, W] the bias' dtype   its bias; -inf in an empty slot, which hides it
 *     length   [B, h] int32                tokens so far
 *     k, v     [B, W, h, D|Dv]             their rows, last axis contiguous; both may be NULL
 */
typedef struct fdm_topk_slots {
    uint32_t struct_bytes; /* sizeof(fdm_topk_slots) */
    fdm_tensor *key, *bias, *length, *k, *v;
} fdm_topk_slots;
/* The slots after a prompt of S tokens: bias [B, h, S], and end [B, h, S] of its intervals by fdm_topk_intervals() with
 * W the number of slots; k, v [B, S, h, D|Dv], or NULL as in slots. S = 0 empties all slots. block_table [B, n] int32,
 * or NULL: k and v lie in pages [num_pages, page_size, h, D|Dv], token t of sequence b in row t % page_size of page
 * block_table[b, t / page_size]. Only the pages of kept keys are looked up; on CUDA devices they are not checked. One
 * kernel there. */
FDM_API fdm_status fdm_topk_fill(const fdm_tensor *bias, const fdm_tensor *end, const fdm_tensor *k,
                                 const fdm_tensor *v, const fdm_tensor *block_table, const fdm_topk_slots *slots,
                                 void *stream);
/* One more token of each head: bias [B, h], k, v [B, 1, h, D|Dv]. It takes an empty slot, or the slot of the worst key
 * when it is better. real [B] bool, or NULL: false = a token that is never visible, nor counted. slot [B, h] int32, or
 * NULL, receives the slot that it got, -1 when none. One kernel on CUDA devices. */
FDM_API fdm_status fdm_topk_append(const fdm_tensor *bias, const fdm_tensor *real, const fdm_tensor *k,
                                   const fdm_tensor *v, const fdm_topk_slots *slots, fdm_tensor *slot, void *stream);

/* Visible pairs of a problem on its tensors: what "useful FLOPs" counts. -inf biases are not looked at. */
FDM_API fdm_status fdm_count_visible(const fdm_problem *problem, const fdm_tensors *tensors, int64_t *pairs);

/* Which tiles of 64 query rows and 64 keys the masks of a call show: made once, and read by its forward, its backward
 * and those of other layers. Biases are not looked at.
 *
 *     fdm_tile_plan plan = {.struct_bytes = sizeof plan, .memory_bytes = fdm_mask_plan_bytes(&problem)};
 *     fdm_memory_allocate(q.device, plan.memory_bytes, &plan.memory);
 *     fdm_mask_plan(&tensors, &options, &plan, stream);
 *     tensors.mask_plan = &plan;
 *
 * A call takes a plan that was made on its device for its batch, heads, lengths, causal, window, and extents of each
 * kind of mask; it refuses another, and says what differs. What masks, intervals and cu_seqlens hold is not compared:
 * after a change there the plan must be made anew, or results are wrong. Nothing outside of tensors is read or written
 * then, either.
 *
 * On CUDA devices the work is enqueued on `stream` and can be captured; a dense mask is read once. There the kernels
 * that look at tiles before they begin read the plan: hopper.forward, and those whose tiles a dense mask, row intervals
 * or a block mask hides. On the CPU a call checks the plan and finds tiles by itself. */
struct fdm_tile_plan {
    uint32_t struct_bytes; /* sizeof(fdm_tile_plan) */
    int32_t reserved;      /* 0 */
    void *memory;          /* the caller's, on the tensors' device, at a multiple of 64 */
    uint64_t memory_bytes; /* at least fdm_mask_plan_bytes() */
    /* Written by fdm_mask_plan(). seen, full: within memory, [batches, heads, row_tiles, key_words]; batches and heads
     * are 1 where all share the masks. Bit n of word w stands for keys 64 (32 w + n) .. + 63. seen: 0 where no row of
     * the tile sees a key of it; of several masks at once it may be 1 there, too. full: 1 only where all rows see all
     * keys. */
    fdm_device_id device;
    int64_t batches, heads, row_tiles, key_words;
    const uint32_t *seen, *full;
    fdm_problem problem; /* whose masks they are */
};
/* Bytes of its memory; 0 for a problem that is not legal. */
FDM_API size_t fdm_mask_plan_bytes(const fdm_problem *problem);
/* Fills *plan from q, k, v, the masks and the packing of `tensors`; outputs may be NULL. options NULL: the defaults.
 * Without memory, and with memory_bytes 0, it writes memory_bytes alone, as many as the call needs.
 * FDM_ERROR_UNSUPPORTED for a call with a cache or a tree. */
FDM_API fdm_status fdm_mask_plan(const fdm_tensors *tensors, const fdm_options *options, fdm_tile_plan *plan,
                                 void *stream);

/* Writes new keys and values into a cache, and turns queries, without attention.
 *
 *     k, v         the cache, as in fdm_cache; written
 *     cache        k_new and v_new, and where they go: behind `lengths`, with the members that a call of attention
 *                  would have; beside slots k_new, v_new and the rotary tables alone
 *     slots        [total_new]     int32 or int64: k_new [total_new, Hkv, D] goes to row slot % page of page
 *                                  slot / page; a slot below 0 or beyond the cache is left out. Of equal slots
 *                                  one is kept
 *     positions    [total_new]     int32 or int64: the position of each new key, and of each row of q, of which there
 *                                  are as many; NULL: as in fdm_cache. Beside slots needed where anything turns
 *     q, q_out     [B, Sq, H, D], or packed [total_q, H, D] with cu_seqlens_q or slots: turned as for causal attention;
 *                  q_out may be q. NULL: none
 *
 * On the CPU at once. On a CUDA device by one kernel, enqueued on `stream`; the first call of a form compiles or loads
 * it. There float32, float16 and bfloat16 are taken, and what names a place outside of the cache is left out. */
typedef struct fdm_append_tensors {
    uint32_t struct_bytes; /* sizeof(fdm_append_tensors) */
    fdm_tensor *k, *v;
    const fdm_cache *cache;
    const fdm_tensor *slots, *positions;
    const fdm_tensor *q, *cu_seqlens_q;
    fdm_tensor *q_out;
    void *stream; /* CUDA stream; NULL = the legacy default stream; ignored on the CPU */
} fdm_append_tensors;
FDM_API fdm_status fdm_cache_append(const fdm_append_tensors *tensors);

/* ---- 12. Settings ---------------------------------------------------------------------------------------------- */

/* A call that reads an environment variable of a value that is not allowed fails with FDM_ERROR_INVALID_ARGUMENT, and
 * the sentence names the variable, the value and what is allowed. An empty variable counts as unset.
 *
 * By index from 0: the variables that the library reads; then those of the environment that begin with FLASH_DMATTN_
 * and that it does not read, misspelt ones as a rule. FDM_ERROR_INVALID_ARGUMENT past the last. */
typedef struct fdm_setting_info {
    uint32_t struct_bytes;   /* sizeof(fdm_setting_info) */
    int32_t valid;           /* 1: unset or allowed. A choice code of the right form may still be none of a problem's */
    char name[64];           /* cut where it is longer */
    const char *description; /* what it is for; NULL: the library does not read it */
    const char *allowed;     /* "a whole number from 1 to 2147483647"; NULL: the library does not read it */
    const char *value;       /* now; NULL when unset or empty. The environment's. */
} fdm_setting_info;
FDM_API fdm_status fdm_setting_list(int32_t index, fdm_setting_info *info);

/* The folder of kernels compiled at run time (FLASH_DMATTN_CACHE_DIR, else flash_dmattn in the XDG cache folder), and
 * the compiler that would make them: NVRTC is found without being opened. FDM_ERROR_UNSUPPORTED when there is none;
 * FDM_ERROR_INVALID_ARGUMENT when `size` is too small. */
FDM_API fdm_status fdm_cache_folder(char *path, size_t size);
FDM_API fdm_status fdm_compiler_path(char *path, size_t size);

/* That folder: what it holds, and what of it is not used. Entries that were not used for longest are removed where they
 * pass the limit. FDM_ERROR_UNSUPPORTED when there is none; one that has not been made yet is empty. */
typedef struct fdm_cache_info {
    uint32_t struct_bytes; /* sizeof(fdm_cache_info) */
    int32_t num_ignored;   /* entries that others than the user and root own or may write, or whose folder is so */
    char folder[512];
    int64_t num_entries, bytes; /* of all, ignored ones too */
    int64_t limit_bytes;        /* FLASH_DMATTN_CACHE_SIZE, else 2^30 */
    char ignored[256];          /* one sentence that names the folder or such an entry; "" when there is none */
} fdm_cache_info;
FDM_API fdm_status fdm_cache_query(fdm_cache_info *info);

/* Writes that folder's whole entries as one file. A library of this version takes kernels from it that
 * FLASH_DMATTN_KERNEL_ARCHIVE names, or that lies beside it as "kernels-sm_90.fdm", without NVRTC. Either number may be
 * NULL. FDM_ERROR_UNSUPPORTED where there is nothing to pack. */
FDM_API fdm_status fdm_cache_pack(const char *path, int64_t *num_entries, int64_t *bytes);

/* Joins the library's own threads; they are started again when needed. Not while a call is in flight. */
FDM_API void fdm_shutdown(void);

/* ---- 13. Companions: what a kernel of another operation is chosen by ------------------------------------------- */

/* The companions are other operations on CUDA devices, with entries of their own. A plan of theirs holds one of these,
 * a value without pointers. */
typedef struct fdm_companion_choice {
    fdm_device_id device;
    char kernel[48];         /* "softmax.resident" */
    char choice[64];         /* the kernel's shape in words */
    int32_t kernel_index;    /* row in the operation's list */
    int32_t parameters[8];   /* the kernel's own */
    int64_t shared_bytes;    /* of a block, dynamic */
    int64_t workspace_bytes; /* what executing needs; 64-byte aligned */
    char reason[512];        /* why this kernel, and why not the ones before it */
    int64_t reserved[8];     /* 0 */
} fdm_companion_choice;

/* ---- 14. Softmax along rows ------------------------------------------------------------------------------------ */

/*     z = scale * x;  z_j = -inf where the mask is 0
 *     softmax:       out = exp(z) / sum exp(z);  dx = scale * out * (dout - sum(out * dout))
 *     log-softmax:   out = z - log sum exp(z);   dx = scale * (dout - exp(out) * sum(dout)),  0 where out is -inf,
 *                    whose dout is in no sum
 *
 * along the last axis of float32, float16 or bfloat16 tensors of 1 to 4 axes on a CUDA device, float32 inside. A row of
 * nothing but -inf gives 0 (log-softmax: -inf) and a dx of 0. The last axis is contiguous, every other stride free;
 * rows and columns are fewer than 2^30. mask: bool, its shape that of x, or 1 on any axis. */
typedef struct fdm_softmax_tensors {
    uint32_t struct_bytes;      /* sizeof(fdm_softmax_tensors) */
    const fdm_tensor *x, *mask; /* forward; mask may be NULL */
    fdm_tensor *out;            /* forward: written. backward: read */
    const fdm_tensor *dout;     /* backward */
    fdm_tensor *dx;             /* backward: written */
} fdm_softmax_tensors;

typedef struct fdm_softmax_options {
    uint32_t struct_bytes; /* sizeof(fdm_softmax_options); fdm_softmax_options_default() sets it */
    int32_t log;           /* 1: log-softmax */
    double scale;          /* finite; 0 counts as the smallest positive number, so that -inf stays hidden */
    const char *kernel;    /* force one kernel by name; NULL = chosen */
    void *stream;          /* of fdm_softmax(); NULL = the legacy default stream */
    int64_t tune;          /* fdm_tune_wish, of fdm_softmax(); a call that forces a kernel looks at no kept choice */
} fdm_softmax_options;
/* scale 1, softmax, chosen. */
static inline fdm_softmax_options fdm_softmax_options_default(void) {
    fdm_softmax_options options = FDM_ZERO;
    options.struct_bytes = sizeof options;
    options.scale = 1;
    return options;
}

/* What to compute, without data. Filled by fdm_describe_softmax(), or by hand to plan for shapes alone. */
typedef struct fdm_softmax_problem {
    fdm_pass pass;
    fdm_dtype dtype;
    int64_t rows, columns;
    int32_t log, has_mask;
    int32_t negative_scale;
    /* 2: addresses and row strides are multiples of 16 bytes; 1: those of all tensors leave the same remainder; 0 */
    int32_t aligned;
    int64_t reserved[8]; /* 0 */
} fdm_softmax_problem;

typedef struct fdm_softmax_plan {
    uint32_t struct_bytes; /* sizeof(fdm_softmax_plan) */
    fdm_softmax_problem problem;
    fdm_companion_choice choice;
} fdm_softmax_plan;

FDM_API fdm_status fdm_describe_softmax(fdm_pass pass, const fdm_softmax_tensors *tensors,
                                        const fdm_softmax_options *options, fdm_softmax_problem *problem);
/* kernel: force one by name; NULL = chosen. */
FDM_API fdm_status fdm_plan_softmax(const fdm_device *device, const fdm_softmax_problem *problem, const char *kernel,
                                    fdm_softmax_plan *plan);
/* Tensors that match the plan's problem; scale of the plan's sign. options' kernel is not looked at. */
FDM_API fdm_status fdm_execute_softmax(const fdm_softmax_plan *plan, const fdm_softmax_tensors *tensors,
                                       const fdm_softmax_options *options, void *workspace, size_t workspace_bytes,
                                       void *stream);
/* The three in one call. allocator: device memory, where the plan needs a workspace; NULL where it does not. */
FDM_API fdm_status fdm_softmax(fdm_pass pass, const fdm_softmax_tensors *tensors, const fdm_softmax_options *options,
                               const fdm_allocator *allocator);
/* The variant-th way (from 0) in which a kernel can run the problem; FDM_ERROR_INVALID_ARGUMENT past the last. */
FDM_API fdm_status fdm_plan_softmax_variant(const fdm_device *device, const fdm_softmax_problem *problem,
                                            const char *kernel, int32_t variant, fdm_softmax_plan *plan);
/* fdm_tune() of a softmax. */
FDM_API fdm_status fdm_tune_softmax(const fdm_device *device, const fdm_softmax_problem *problem,
                                    const fdm_tune_options *options, fdm_tune_row *rows, int32_t size,
                                    fdm_tune_result *result);
/* Compiles or loads the plan's kernels now, so that no later call does. */
FDM_API fdm_status fdm_prepare_softmax(const fdm_softmax_plan *plan);
/* The kernels by name, best first, by index from 0; FDM_ERROR_INVALID_ARGUMENT past the end. */
FDM_API fdm_status fdm_softmax_kernel(int32_t index, const char **name, const char **description);

/* ---- 15. Matrix products --------------------------------------------------------------------------------------- */

/*     out = alpha * A B + beta * C
 *
 * of float16 or bfloat16 on a CUDA device, sums in float32. Of each matrix rows or columns are contiguous, so that a
 * transposed one is a view; extents from 0 on. beta 0: C is not read.
 *
 *     a        [m, k] or [batch|1, m, k]
 *     b        [k, n] or [batch|1, k, n]
 *     c        [m, n] or [batch|1, m, n]
 *     out      [m, n] or [batch, m, n]      may take the place of c */
typedef struct fdm_gemm_tensors {
    uint32_t struct_bytes;       /* sizeof(fdm_gemm_tensors) */
    const fdm_tensor *a, *b, *c; /* c may be NULL where beta is 0 */
    fdm_tensor *out;
} fdm_gemm_tensors;

typedef struct fdm_gemm_options {
    uint32_t struct_bytes;      /* sizeof(fdm_gemm_options); fdm_gemm_options_default() sets it */
    int32_t accumulate_float16; /* 1: sums in float16, of float16 operands: faster on some devices, and less exact */
    double alpha, beta;         /* finite */
    const char *kernel;         /* force one kernel by name; NULL = chosen */
    void *stream;               /* of fdm_gemm(); NULL = the legacy default stream */
    int64_t tune;               /* fdm_tune_wish, of fdm_gemm(); a call that forces a kernel looks at no kept choice */
} fdm_gemm_options;
/* alpha 1, beta 0, sums in float32, chosen. */
static inline fdm_gemm_options fdm_gemm_options_default(void) {
    fdm_gemm_options options = FDM_ZERO;
    options.struct_bytes = sizeof options;
    options.alpha = 1;
    return options;
}

/* What to compute, without data. Where out's columns are contiguous, it is the transposed product: m and n change
 * places, and so do a and b. */
typedef struct fdm_gemm_problem {
    fdm_dtype dtype;
    int64_t batch, m, n, k;
    int32_t a_rows_contiguous, b_rows_contiguous; /* 0: columns are */
    int32_t has_c, accumulate_float16;
    int32_t mappable;    /* 1: addresses and strides of a, b and out are multiples of 16 bytes */
    int64_t reserved[8]; /* 0 */
} fdm_gemm_problem;

typedef struct fdm_gemm_plan {
    uint32_t struct_bytes; /* sizeof(fdm_gemm_plan) */
    fdm_gemm_problem problem;
    fdm_companion_choice choice;
} fdm_gemm_plan;

FDM_API fdm_status fdm_describe_gemm(const fdm_gemm_tensors *tensors, const fdm_gemm_options *options,
                                     fdm_gemm_problem *problem);
/* kernel: force one by name; NULL = chosen. */
FDM_API fdm_status fdm_plan_gemm(const fdm_device *device, const fdm_gemm_problem *problem, const char *kernel,
                                 fdm_gemm_plan *plan);
/* Tensors that match the plan's problem. options' kernel is not looked at. */
FDM_API fdm_status fdm_execute_gemm(const fdm_gemm_plan *plan, const fdm_gemm_tensors *tensors,
                                    const fdm_gemm_options *options, void *workspace, size_t workspace_bytes,
                                    void *stream);
/* The three in one call. allocator: device memory, where the plan needs a workspace; NULL where it does not. */
FDM_API fdm_status fdm_gemm(const fdm_gemm_tensors *tensors, const fdm_gemm_options *options,
                            const fdm_allocator *allocator);
/* The variant-th way (from 0) in which a kernel can run the problem; FDM_ERROR_INVALID_ARGUMENT past the last. */
FDM_API fdm_status fdm_plan_gemm_variant(const fdm_device *device, const fdm_gemm_problem *problem, const char *kernel,
                                         int32_t variant, fdm_gemm_plan *plan);
/* fdm_tune() of a product. */
FDM_API fdm_status fdm_tune_gemm(const fdm_device *device, const fdm_gemm_problem *problem,
                                 const fdm_tune_options *options, fdm_tune_row *rows, int32_t size,
                                 fdm_tune_result *result);
/* Compiles or loads the plan's kernels now, so that no later call does. */
FDM_API fdm_status fdm_prepare_gemm(const fdm_gemm_plan *plan);
/* The kernels by name, best first, by index from 0; FDM_ERROR_INVALID_ARGUMENT past the end. */
FDM_API fdm_status fdm_gemm_kernel(int32_t index, const char **name, const char **description);

/* ---- 16. Several ranks: layouts and forecasts ------------------------------------------------------------------- */

/* One attention over several ranks, of which each holds some rows. docs/context-parallel.md has the algorithms. Nothing
 * in this section needs a device or another process. */
typedef struct fdm_range {
    int64_t first, end; /* positions first .. end - 1 */
} fdm_range;

/* Which keys a row sees, in positions of the whole problem; all that is given holds at once. The lists are on the host.
 * Interval j of a list is that of key j: rows interval_start[j] <= i < interval_end[j] see it. */
typedef struct fdm_rank_mask {
    uint32_t struct_bytes;             /* sizeof(fdm_rank_mask); fdm_rank_mask_default() sets it */
    int32_t causal;                    /* 0 or 1; bottom-right aligned */
    int64_t seqlen_q, seqlen_k;        /* of the whole problem */
    int64_t window_left, window_right; /* -1 = unbounded */
    int64_t num_lists;                 /* of intervals: one for each batch and head that has its own; 0 = none */
    const int32_t *interval_start, *interval_end; /* [num_lists, seqlen_k], C-contiguous */
} fdm_rank_mask;
/* Every row sees every key; seqlen_q and seqlen_k are the caller's to fill in. */
static inline fdm_rank_mask fdm_rank_mask_default(void) {
    fdm_rank_mask options = FDM_ZERO;
    options.struct_bytes = sizeof options;
    options.window_left = options.window_right = -1;
    return options;
}

typedef enum fdm_layout_kind {
    FDM_LAYOUT_CONTIGUOUS = 0, /* rank r has the r-th part */
    FDM_LAYOUT_ZIGZAG = 1,     /* of 2 ranks chunks rank r has r and 2 ranks - 1 - r: equal work under a causal mask */
    FDM_LAYOUT_DOCUMENTS = 2,  /* documents of 2 ranks blocks and longer zigzag, others whole, to even the pairs out */
    FDM_LAYOUT_BALANCED = 3,   /* equal work under the given masks, and few keys to fetch, by swap search */
    FDM_LAYOUT_RANGES = 4      /* the caller's own */
} fdm_layout_kind;

/* What a layout is made of. Ranges begin at multiples of `block`, in a layout of documents counted from the document's
 * first row. Ranks may have unlike numbers of rows, or none. */
typedef struct fdm_layout_wish {
    uint32_t struct_bytes; /* sizeof(fdm_layout_wish) */
    fdm_layout_kind kind;
    int32_t ranks;
    int32_t num_masks;           /* balanced: at least 1 */
    int64_t total;               /* rows */
    int64_t block;               /* 0 = 256 */
    const int64_t *cu_seqlens;   /* documents: [num_documents + 1] rows that never fall; the last one is `total` */
    int64_t num_documents;       /* documents */
    const fdm_rank_mask *masks;  /* balanced: those of a model's layers, all with seqlen_q = total and one seqlen_k */
    const double *weights;       /* balanced: how often the model has each mask; NULL = 1 each */
    double tolerance;            /* balanced: of the heaviest rank's work above the mean; 0 = 0.02 */
    const fdm_range *ranges;     /* ranges: those of rank 0, then of rank 1, .., each in the order of the rank's rows */
    const int64_t *range_counts; /* ranges: [ranks], how many each rank has */
} fdm_layout_wish;

/* Where rows lie: a value that never changes once it is made, for any thread. */
typedef struct fdm_layout fdm_layout;
FDM_API fdm_status fdm_layout_create(const fdm_layout_wish *wish, fdm_layout **layout);
FDM_API void fdm_layout_release(fdm_layout *layout); /* takes NULL too */
/* The ranges of a rank, in the order of its rows. They live as long as the layout. */
FDM_API fdm_status fdm_layout_ranges(const fdm_layout *layout, int32_t rank, const fdm_range **ranges, int64_t *count);
/* Of each rank: pairs, the visible pairs of a row and a key, summed over lists of intervals; fetched, the keys that
 * others hold and some row of it sees. Either may be NULL. layout_keys: where keys lie; NULL = as rows. Keys count in
 * pages of 16 where there are intervals, and the first key of a window in blocks of 128. */
FDM_API fdm_status fdm_layout_work(const fdm_layout *layout, const fdm_layout *layout_keys, const fdm_rank_mask *mask,
                                   int64_t *pairs, int64_t *fetched);

typedef enum fdm_rank_algorithm {
    FDM_RANKS_AUTO = 0,    /* the one that is forecast to be fastest */
    FDM_RANKS_GATHER = 1,  /* a rank fetches the keys that its rows see, some KV heads at a time */
    FDM_RANKS_ULYSSES = 2, /* heads are exchanged for rows; KV heads are a multiple of ranks */
    FDM_RANKS_BOTH = 3,    /* ranks of a node exchange heads, and those of unlike nodes gather keys */
    FDM_RANKS_RING = 4     /* a rank has the keys of one other at a time, and merges parts of results */
} fdm_rank_algorithm;
FDM_API const char *fdm_rank_algorithm_name(fdm_rank_algorithm algorithm); /* "gather"; never NULL */

/* How ranks are joined. 0 takes the default that the comment says. */
typedef struct fdm_links {
    uint32_t struct_bytes;  /* sizeof(fdm_links) */
    int32_t ranks_per_node; /* 8 */
    double node_bandwidth;  /* bytes a second into a rank from ranks of its node; 348e9: NVLink of two H100, measured */
    double node_latency;    /* seconds; 15e-6, assumed */
    double net_bandwidth;   /* the same between nodes; 45e9: InfiniBand of 400 Gbit/s, assumed */
    double net_latency;     /* seconds; 30e-6, assumed */
    int32_t copy_sms;       /* multiprocessors that a copy takes from attention; 16, assumed */
    int32_t reserved;       /* 0 */
    double flops;           /* of a rank's attention, where the device's model has no constants; 0 = an error then */
    int64_t memory_bytes;   /* that a rank may use for keys of others; 0 = no limit */
    /* Fitted to two H200 under PyTorch (bench/fit_ranks.py). Below 0: none, as where a CUDA graph is replayed. */
    double host_start;     /* seconds of the host before the first kernel; 500e-6 */
    double host_exchange;  /* seconds of the host for each exchange and its calls, beside the device's work; 600e-6 */
    double sums_bandwidth; /* bytes a second of float32 parts of dk and dv, cleared, added and rounded; 200e9 */
} fdm_links;

typedef struct fdm_rank_forecast {
    uint32_t struct_bytes; /* sizeof(fdm_rank_forecast); of an array the first one's counts */
    int32_t rank;
    int64_t rows, pairs;           /* pairs: of one head and batch, or summed over lists of intervals */
    int64_t keys_fetched;          /* of others */
    int64_t node_bytes, net_bytes; /* that it receives, from its node and from others */
    int64_t bytes_sent;
    int64_t memory_bytes;    /* for keys of others and parts of their gradients, at once */
    double work_seconds;     /* of kernels */
    double exchange_seconds; /* of messages, hidden or not */
    double exposed_seconds;  /* of them and of the host's time, what no work hides */
    double seconds;
} fdm_rank_forecast;

typedef struct fdm_ranks_forecast {
    uint32_t struct_bytes; /* sizeof(fdm_ranks_forecast) */
    fdm_rank_algorithm algorithm;
    int32_t ranks, head_ranks; /* head_ranks: that exchange heads; 1 = none */
    int32_t num_sets;          /* of KV heads that travel together */
    int32_t from_model;        /* 1: times of kernels are the device model's; 0: from links.flops */
    double seconds;            /* of the slowest rank */
    double one_rank_seconds;   /* the whole problem on one device */
    double imbalance;          /* most pairs of a rank over the mean, less 1 */
    char reason[400];          /* why this algorithm, and why not the others */
} fdm_ranks_forecast;

/* The time that a problem takes on several ranks, from facts alone: the model of fdm_plan_predict() for kernels, links
 * for messages. problem is that of one rank, whole; of its masks `mask` says which keys rows see (the problem's own
 * flags say which kernels run). ranks: NULL, or room for one of each rank. FDM_ERROR_UNSUPPORTED where a wished
 * algorithm cannot be, or where the model has no constants for the device and links.flops is 0. */
FDM_API fdm_status fdm_forecast_ranks(const fdm_device *device, const fdm_problem *problem, const fdm_layout *layout,
                                      const fdm_layout *layout_keys, const fdm_rank_mask *mask, const fdm_links *links,
                                      fdm_rank_algorithm algorithm, fdm_ranks_forecast *forecast,
                                      fdm_rank_forecast *ranks);

/* ---- 17. Several ranks: communicators and execution ------------------------------------------------------------- */

/* How ranks talk: the caller's (MPI, sockets, a framework's process group), or NCCL by fdm_nccl_communicator(). The
 * library moves no bytes between processes by itself. Functions return FDM_OK or another status; a failure ends the
 * communicator, whose later calls are refused. One call at a time. */
typedef struct fdm_message {
    int32_t peer;
    int32_t reserved; /* 0 */
    void *memory;     /* read of sends, written of receives */
    size_t bytes;     /* above 0 */
} fdm_message;

typedef struct fdm_communicator {
    uint32_t struct_bytes; /* sizeof(fdm_communicator) */
    int32_t ranks, rank;
    int32_t device_type; /* where messages lie: FDM_CPU or FDM_CUDA */
    void *context;       /* of the functions */
    /* Moves all messages of an exchange; those between two ranks arrive in their order. On a CUDA device they are
     * enqueued on `stream`, else they have arrived when it returns. */
    fdm_status (*exchange)(void *context, const fdm_message *sends, int32_t num_sends, const fdm_message *receives,
                           int32_t num_receives, void *stream);
    /* Every rank gets `bytes` bytes of each rank in host memory: all [ranks][bytes]. They are there when it returns. */
    fdm_status (*share)(void *context, const void *mine, size_t bytes, void *all);
    fdm_status (*poll)(void *context); /* FDM_OK while no peer failed; NULL: it cannot tell */
    void (*abort)(void *context);      /* ends what is under way on this rank and its peers; NULL: it cannot */
    int32_t broken;                    /* the library writes 1 after a failure */
    int32_t reserved;                  /* 0 */
} fdm_communicator;

typedef struct fdm_ranks_options {
    uint32_t struct_bytes;        /* sizeof(fdm_ranks_options) */
    int32_t rank;                 /* whose plan it is */
    fdm_rank_algorithm algorithm; /* auto: gather, or ulysses where the busiest rank receives fewer bytes by it */
    int32_t all_keys;             /* 1: every key is fetched, as where the host does not know key intervals */
    int32_t num_threads;          /* CPU: as in fdm_options */
    int32_t other_kernel;         /* 1: a rank's calls run the kernel that is best for them, not the whole problem's */
    int32_t head_ranks;           /* both: ranks in a row that exchange heads; 0 = the most up to 8 that can */
    int32_t sm_margin;            /* CUDA: as in fdm_options */
    int64_t memory_bytes;         /* auto: where gather holds more bytes of other ranks' keys, the ring; 0 = no limit */
} fdm_ranks_options;

/* What one rank does in one call: a value that never changes once it is made. problem is the whole problem, as
 * fdm_describe() gives it for one rank, with masks in global positions; mask says the same of causal mask, window and
 * intervals. The intervals are copied. */
typedef struct fdm_ranks_plan fdm_ranks_plan;
FDM_API fdm_status fdm_plan_ranks(const fdm_device *device, const fdm_problem *problem, const fdm_layout *layout,
                                  const fdm_layout *layout_keys, const fdm_rank_mask *mask,
                                  const fdm_ranks_options *options, fdm_ranks_plan **plan);
FDM_API void fdm_ranks_plan_release(fdm_ranks_plan *plan); /* takes NULL too */

typedef struct fdm_ranks_plan_info {
    uint32_t struct_bytes; /* sizeof(fdm_ranks_plan_info) */
    int32_t ranks, rank;
    fdm_rank_algorithm algorithm;
    int32_t num_sets, num_calls; /* of KV heads; of attention, in all */
    int64_t rows, keys;          /* of the rank */
    int64_t keys_fetched;        /* of others */
    int64_t bytes_received, bytes_sent;
    int64_t workspace_bytes; /* of fdm_execute_ranks(); 64-byte aligned */
    char choice[64];         /* the whole problem's choice code, "" where calls choose freely */
    char reason[200];        /* why this algorithm */
} fdm_ranks_plan_info;
FDM_API fdm_status fdm_ranks_plan_query(const fdm_ranks_plan *plan, fdm_ranks_plan_info *info);

/* Collective, before the first execution: ranks compare what they are about to do. Where they differ, every rank gets
 * FDM_ERROR_INVALID_ARGUMENT and the same sentence. A rank without a plan gives NULL and tells the others so; its own
 * sentence stays. FDM_ERROR_REMOTE: a peer failed or is gone. */
FDM_API fdm_status fdm_agree(const fdm_ranks_plan *plan, fdm_communicator *communicator);

/* Collective. tensors are the rank's own rows: those of fdm_attention_forward() and _backward() with the rank's numbers
 * of rows and keys. Dense calls alone: packed sequences are one sequence of all their rows, with the intervals of
 * fdm_document_intervals(). mask and bias with a row axis have the rank's rows and all keys; without one they have the
 * rank's keys, and their values travel with K and V. Key intervals are those of all keys and all ranks, NULL here: they
 * are the plan's. dsink, and dbias of a bias without rows and keys, are not computed; a bias of keys whose gradient is
 * wanted is float32 or float64. Gather computes dbias, and no other does. The ring has no gradients in float64, and a
 * bias of 16-bit tensors is float32 there. dq, dk, dv and dbias are whole: nothing is left to be summed. A rank that
 * fails ends the communicator, so that its peers do not wait. On CUDA devices work is enqueued on the launch's stream,
 * which also waits for what the plan enqueues on a stream of its own; a plan runs once at a time. The ring's parts are
 * float32, of kernels for float32 tensors. dk and dv of float32 tensors by gather and by both are the CPU's alone.
 * Never run on hardware there. */
FDM_API fdm_status fdm_execute_ranks(const fdm_ranks_plan *plan, const fdm_tensors *tensors, void *workspace,
                                     size_t workspace_bytes, fdm_communicator *communicator, const fdm_launch *launch);

/* Waits for the stream's work, at most `milliseconds`, while the communicator is asked whether peers are well.
 * FDM_ERROR_REMOTE: one failed or was late; the communicator is ended by its abort(). */
FDM_API fdm_status fdm_wait(fdm_communicator *communicator, fdm_device_id device, void *stream, int64_t milliseconds);

/* A communicator over NCCL 2.18 or later, which is opened where the process has loaded it already, else by its name;
 * nothing links to it. nccl: a caller's ncclComm_t, which is split: the copy is this library's to abort, and the
 * caller's stays as it is. Collective. milliseconds: what a call may wait for peers on the host; 0 = 600000.
 * fdm_nccl_release() ends the copy. Never run on hardware so far. */
FDM_API fdm_status fdm_nccl_communicator(void *nccl, int64_t milliseconds, fdm_communicator *communicator);
/* The same of an id of FDM_NCCL_ID_BYTES that one rank got by fdm_nccl_id() and gave to all by other means. device: of
 * this process. */
enum { FDM_NCCL_ID_BYTES = 128 };
FDM_API fdm_status fdm_nccl_id(uint8_t *id);
FDM_API fdm_status fdm_nccl_communicator_of_id(const uint8_t *id, int32_t ranks, int32_t rank, int32_t device,
                                               int64_t milliseconds, fdm_communicator *communicator);
FDM_API void fdm_nccl_release(fdm_communicator *communicator);

#ifdef __cplusplus
}
#endif
#endif
