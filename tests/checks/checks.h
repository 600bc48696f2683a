/* checks.h: random attention problems that every kernel is run on and compared with the float64 reference. */
#ifndef FDM_CHECKS_H
#define FDM_CHECKS_H

#include <stdint.h>
#include <stdio.h>

#include "flash_dmattn.h"
#include "options.h"

/* The tensors of a trial. What the forward writes lies between OUT and LSE_LOW, what the backward writes from DQ on. */
#define CHECK_ROLES(X)              \
    X(Q, "q")                       \
    X(K, "k")                       \
    X(V, "v")                       \
    X(MASK, "mask")                 \
    X(BIAS, "bias")                 \
    X(START, "interval_start")      \
    X(END, "interval_end")          \
    X(ROW_START, "row_start")       \
    X(ROW_END, "row_end")           \
    X(BLOCKS, "block_mask")         \
    X(TREE, "tree")                 \
    X(CU_Q, "cu_seqlens_q")         \
    X(CU_K, "cu_seqlens_k")         \
    X(SINK, "sink")                 \
    X(USED_Q, "seqused_q")          \
    X(USED_K, "seqused_k")          \
    X(Q_GIVEN, "q")                 \
    X(CACHE_K, "cache of k")        \
    X(CACHE_V, "cache of v")        \
    X(TABLE, "block_table")         \
    X(PAGE_START, "page_start")     \
    X(CACHE_ROW, "cache_row")       \
    X(LENGTHS, "lengths")           \
    X(FIRST_KEY, "first_key")       \
    X(K_NEW, "k_new")               \
    X(V_NEW, "v_new")               \
    X(CU_NEW, "cu_seqlens_new")     \
    X(COS, "rotary_cos")            \
    X(SIN, "rotary_sin")            \
    X(ROTARY_START, "rotary_start") \
    X(OUT, "out")                   \
    X(LSE, "lse")                   \
    X(LSE_LOW, "lse_low")           \
    X(DOUT, "dout")                 \
    X(DLSE, "dlse")                 \
    X(DQ, "dq")                     \
    X(DK, "dk")                     \
    X(DV, "dv")                     \
    X(DBIAS, "dbias")               \
    X(DSINK, "dsink")
#define CHECK_ROLE(role, name) role,
enum role { CHECK_ROLES(CHECK_ROLE) NUM_ROLES };
extern const char *const role_names[NUM_ROLES];

/* A tensor between two unreadable pages, flush with one of them; bytes that are not elements hold NaN patterns. A far
 * one's outermost axis has a stride of up to 4 GB, and only the pages of its pieces can be touched. */
struct guarded {
    fdm_tensor tensor;
    int64_t shape[4], strides[4];
    char *map; /* NULL = absent */
    size_t map_bytes, data_bytes;
    char *data;  /* first byte of the tensor's span */
    char *saved; /* its pieces as they were before a kernel ran */
    size_t num_pieces, piece_bytes, piece_step;
};

/* What a head's elements of an output are like: the largest error of the baseline, and the sum of squares. */
struct head_facts {
    double worst_baseline, square, count;
};

/* What masks and biases of a named case hide: one thing that no drawing can miss. */
enum named_form {
    HIDES_AS_DRAWN,
    HIDES_SQUARES,       /* every other one of 64 rows and 64 keys, as on a chessboard */
    HIDES_KEYS,          /* one of eight, from all rows */
    HIDES_FROM_ONE_ROW,  /* all keys, from the first row */
    HIDES_ABOVE_LAST_ROW /* all keys from all rows but the last of 128 */
};

struct trial {
    uint64_t seed;
    uint64_t random;
    uint64_t way, way_random; /* what decides about specialisations comes from the way alone */
    int of_ways;              /* 1: there are few ways (struct ways) */
    fdm_dtype dtype;
    fdm_options options;
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, total_q, total_k;
    int varlen;
    int neat;    /* 1: addresses and strides are multiples of 16 bytes */
    int plain;   /* 1: 16-bit, neat, causal at most: every forward kernel takes it where its head dims fit */
    int keyed;   /* 1: 16-bit, neat, and intervals, masks and biases without rows over several tiles */
    int scored;  /* 1: the same, but masks and biases have rows, which are neat too */
    int lengthy; /* 1: many keys and few rows, or many rows and few keys */
    int latent;  /* 1: 16-bit and plain, D 576, Dv 512; V is the first columns of K */
    int mild;    /* 1: scores are of ordinary size */
    int huge;    /* 1: some biases are so low that a float32 beside them has few digits left for the scores, or none */
    int far;     /* some tensors are far: 1 by any number of pieces, which seldom fit on a device; 2 by a few */
    int named;   /* 1: of named_case(): no axis is shared by a stride of 0 */
    int many; /* named: all keys are hidden from most heads, or most sequences are empty; not from the first ones, the
               * last ones and those around number 65536 */
    int rest; /* named: rows of no sequence lie before the first one and after the last */
    enum named_form hides;          /* named: which pairs masks and biases hide; 0: those that are drawn */
    int keeps_plan;                 /* 1: a call on a device gets a mask plan */
    int spoils;                     /* 1: what nobody sees holds NaN and inf */
    int64_t apart;                  /* named: axes of so many elements are far; 0: none is */
    int alike;                      /* 1: a bias has q's dtype */
    int shares;                     /* named: heads (1) or batches (2) or both (3) share the bias */
    int wants_nan;                  /* named: 1: the first query row of a head holds NaN */
    int nan_row, nan_key;           /* 1: a query row, a key that rows may see, holds NaN; 2: a row that sees none */
    int64_t nan_batch, nan_head_kv; /* which */
    int contradicts; /* varlen, 1: devices get cu_seqlens that leave the tensors, the CPU refuses them first */
    struct guarded g[NUM_ROLES];
    double *truth[NUM_ROLES];     /* outputs of the reference, dense in the tensor's shape */
    double *baseline[NUM_ROLES];  /* outputs of the straightforward float32 computation */
    double *magnitude[NUM_ROLES]; /* gradients: error that rounding may leave in each element however small it is; LSE:
                                   * the row's largest weight, 0 where it sees no key */
    struct head_facts *clean[NUM_ROLES]; /* beside a NaN: of each head where the NaN is not there; else NULL */
    struct serving *serving;             /* serving.c: the call has a cache; NULL: it has none */
    fdm_cache cache;
    fdm_tensor latent_v; /* of calls, in K or the cache of K */
    int64_t latent_shape[4];
    char forms[3][56]; /* of mask, bias and intervals, where they have one (structure.h) */
    char text[640];    /* the problem in one line */
};

/* named_cases.c: a problem of a list, and the kernel and the way (fdm_plan_variant) to run it. */
struct named_case {
    const char *kernel, *group, *choice; /* choice: words of its way's choice code, where the case names them */
    fdm_pass pass;
    int32_t variant;
    fdm_dtype dtype;
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right;
    int causal, varlen, dlse, deterministic, dbias, mask, bias; /* mask, bias: 1 with rows, 2 one for all rows */
    int intervals, shares; /* intervals: 1 of any kind, 2 documents; shares: of a bias, as in struct trial */
    int rows;              /* row intervals: 1 of any heads, 2 of heads that share keys alike */
    int blocks;            /* the same of a block mask */
    int many, rest, apart; /* as in struct trial */
    int refused;           /* for its strides: no kernel of the name takes it */
    enum named_form hides; /* as in struct trial */
    int kept;              /* a mask plan that the call gets: 1 one, 2 none; 0: every other case has one */
    int spoils;            /* 1: what nobody sees holds NaN and inf; 0: it does in every other case */
    int wants_nan;         /* as in struct trial */
    int sink;              /* learnable sinks, and in a backward their gradient: 1 in lse, 2 not in it */
    double softcap;
};
/* NULL past the last. */
const struct named_case *named_case(int64_t number);
/* named_forms.c: whether a row sees a key. */
int named_sees(enum named_form hides, int64_t row, int64_t key);

/* draw.c: 1: cu_seqlens that contradict the tensors, in what the library must cut off; 0: as they were. Whether any do.
 */
int trial_contradict(struct trial *trial, int on);
uint64_t random_bits(struct trial *trial);
int64_t random_below(struct trial *trial, int64_t n);
/* One of some values. */
int64_t random_pick(struct trial *trial, const int64_t *values, int64_t count);
#define PICK(trial, ...) \
    random_pick(trial, (const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))
/* Rows of q (CU_Q) or k (CU_K) of sequence b, of the one that is dense: all. */
int64_t trial_length(const struct trial *trial, enum role role, int64_t b, int dense);
/* Whether masks hide a long stretch of keys. */
int trial_hides_many(const struct trial *trial);
/* draw_intervals.c. documents: the key intervals are those of documents. */
void draw_intervals(struct trial *trial, int documents);
void draw_row_intervals(struct trial *trial, int of_keys); /* of_keys: heads that share keys share them */
void draw_block_mask(struct trial *trial, int of_keys);
void draw_tree(struct trial *trial);
/* The problem of a seed. */
void trial_draw(struct trial *trial, uint64_t seed, struct ways ways);
/* The number-th of the named cases. */
void trial_of_case(struct trial *trial, const struct named_case *named, uint64_t number);
void trial_free(struct trial *trial);

/* serving.c: draws lengths and a cache for a drawn problem; 0: it has neither. The cache is filled when the truth is
 * there, and what the call is to append erased behind guarded_save(), so that the saved bytes are what must be there
 * afterwards. */
int trial_serve(struct trial *trial);
/* Makes V the first columns of K, in values, and for calls of a forward in memory too. */
void trial_share_values(struct trial *trial);
void trial_serve_fill(struct trial *trial);
void trial_serve_erase(struct trial *trial);
void trial_serve_free(struct trial *trial);
int64_t trial_serve_bound(const struct trial *trial); /* max_seqlen_k of the call */
/* The tensors of the call that is checked: trial_tensors(), or those of the cache. */
fdm_tensors trial_call(struct trial *trial, fdm_pass pass);

/* mask_plan_check.c: makes the mask plan of every other trial's call on the device, and compares its bits with the
 * CPU's; made->memory stays NULL where there is none. 0: it is wrong, and said. */
int mask_plan_make(struct trial *trial, const fdm_plan *plan, const fdm_tensors *tensors, fdm_tile_plan *made);

/* arena.c */
void guarded_make(struct guarded *g, struct trial *trial, fdm_dtype dtype, int32_t ndim, const int64_t *shape,
                  int loose);
void guarded_free(struct guarded *g);
void guarded_poison(struct guarded *g);
void guarded_save(struct guarded *g);
/* 1 when every byte is as saved (input), or every byte that is no element is (output). */
int guarded_intact(const struct guarded *g, int is_output);
int64_t guarded_elements(const struct guarded *g);
/* Bytes of all pieces; their copy. */
size_t guarded_bytes(const struct guarded *g);
void guarded_copy(char *to, const struct guarded *g);
/* Byte offset of the n-th element in C order. */
size_t guarded_offset(const struct guarded *g, int64_t n);
double guarded_get(const struct guarded *g, int64_t n);
void guarded_set(struct guarded *g, int64_t n, double value);

/* variants.c: after the rules' plan the choice code of the way to run the trial; "" for the rules' own. */
void trial_variant(const struct trial *trial, const fdm_plan *rules, char *code, size_t size);

/* truth.c: both fill outputs of the forward, and of the backward where it is asked for. */
void trial_reference(struct trial *trial, int backward);
void trial_baseline(struct trial *trial, int backward);
/* What the backward reads: the truth, rounded; the baseline's where biases are huge. */
void trial_set_forward_results(struct trial *trial);
fdm_tensors trial_tensors(struct trial *trial, fdm_pass pass);

struct attention;
/* Whether row i of a head sees key j of its sequence; attention: of the trial's tensors. */
int trial_visible(const struct trial *trial, const struct attention *attention, int64_t b, int64_t h, int64_t i,
                  int64_t j);

void trial_free_truth(struct trial *trial);
/* compare.c: keeps the facts of each head. */
void trial_keep_facts(struct trial *trial);

/* spoil.c: before the truth is made: NaN in a row or key, and whether there is one; after it: NaN and inf in what
 * nobody sees. */
int trial_spoil_seen(struct trial *trial);
int trial_wants_nan(const struct trial *trial); /* what it may return, by the seed alone */
void trial_spoil_hidden(struct trial *trial);
/* Whether NaN is right beside the truth in an element of an output. */
int trial_may_be_nan(const struct trial *trial, enum role role, int64_t n);

/* checks_device.c: one trial on a CUDA device: tensors, canary zones and workspace in one block of its memory. */
struct device_copy {
    fdm_tensor tensors[NUM_ROLES]; /* the trial's, with addresses on the device */
    size_t offsets[NUM_ROLES];     /* of the data in the block */
    fdm_cache cache;
    size_t bytes; /* without workspace */
};
/* Lays the trial's tensors out; 0 when there is no memory, with a message unless they are far. */
int device_layout(const struct trial *trial, struct device_copy *copy);
fdm_tensors device_tensors(struct device_copy *copy, const fdm_tensors *host);
/* Uploads, executes, downloads into the trial's tensors. 1 when nothing between the tensors was written. */
int device_execute(struct trial *trial, struct device_copy *copy, const fdm_plan *plan, const fdm_tensors *tensors,
                   fdm_status *status);

/* 1 for the choice code of a variant that sums products in float16: it is compared on mild problems, with wider
 * limits. */
int sums_in_float16(const char *kernel);
/* compare.c: 1 when all outputs of the pass are right; else prints what is not. */
int trial_compare(const struct trial *trial, fdm_pass pass, const char *kernel);

/* checks_emulated.c: the emulated device of this name ("sm_90") instead of a driver; 0 with a message: there is none.
 */
int emulate_device(const char *name);
int is_emulated(void);
/* Prepares one of the rounds that a trial is run in; 0: it has no more. There is one without an emulated device. */
int emulated_round(const struct trial *trial, int round);

/* run_trial.c */
/* Runs a kernel on the trial's tensors; returns 1 when right. `tamper` may change what ran (NULL = nothing). */
typedef void tamper_function(struct trial *trial, fdm_pass pass);
int trial_run(struct trial *trial, fdm_pass pass, const char *kernel, const char *family, int threads,
              tamper_function *before, tamper_function *after);
/* Plans what trial_run() runs. */
fdm_status trial_plan(struct trial *trial, fdm_pass pass, const fdm_tensors *tensors, const char *kernel,
                      const char *family, int threads, fdm_plan *plan);
/* Fills truth and baseline, and spoils what flows back into rows without keys. */
void trial_truth(struct trial *trial, int backward);
/* A copy of the outputs of a pass, and its size. */
void *trial_bits(const struct trial *trial, fdm_pass pass, size_t *bytes);
/* 0: its tensors are far, and the device is a real one, whose memory other programs need too; checks_far takes it. */
int trial_has_room(const struct trial *trial);
/* Whether a family's tensors live on a CUDA device; NULL: the family of a choice code, which only those have here. */
int is_on_device(const char *family);
/* From now on a crash says which problem to run again. */
void trial_catch_crashes(void);
extern int checks_quiet, checks_far;

#endif
