/* compile_problems.c: problems for the compile matrix. */
#include "compile_problems.h"

#include <string.h>

const struct feature features[NUM_FEATURES] = {
    {"dtype", 2},   {"head_dim", 13},      {"head_dim_v", 3}, {"length", 5}, {"window", 2},
    {"mask", 3},    {"bias", 5},           {"intervals", 7},  {"varlen", 2}, {"softcap", 2},
    {"aligned", 2}, {"scores_aligned", 2}, {"sink", 2},       {"keys", 4}};
static const int64_t head_dims[13] = {64, 128, 256, 16, 40, 96, 176, 192, 224, 240, 512, 1024, 320};
/* Two of one query row: many keys and few; the last of 32 query rows and many keys. */
static const int64_t lengths[5] = {4096, 512, 16, 8, 32};

/* Lengths on the device; a cache whose keys lie side by side; one in pages, to which keys are appended. */
enum { KEYS_OF_CALL, KEYS_USED, KEYS_IN_ROWS, KEYS_IN_PAGES };
static void choose_keys(int32_t choice, fdm_problem *p) {
    p->has_seqused_q = p->has_seqused_k = choice == KEYS_USED;
    if (choice < KEYS_IN_ROWS)
        return;
    p->has_cache = 1;
    p->total_k = 0;
    p->num_pages = (int32_t)p->batch;
    if (choice == KEYS_IN_ROWS)
        return;
    p->page_size = 16;
    p->max_pages = (int32_t)p->seqlen_k / 16;
    p->num_pages *= p->max_pages;
    p->new_rows = p->batch;
    p->rotary_dim = (int32_t)p->head_dim / 2;
}

fdm_problem problem_of(const int32_t *choice) {
    fdm_problem p = fdm_problem_default();
    p.dtype = choice[DTYPE] ? FDM_FLOAT16 : FDM_BFLOAT16;
    p.batch = 2;
    p.heads = 8;
    p.heads_kv = 2;
    p.head_dim = head_dims[choice[HEAD_DIM]];
    p.head_dim_v = choice[HEAD_DIM_V] == 0 ? p.head_dim : choice[HEAD_DIM_V] == 1 ? 64 : 128;
    const int64_t length = lengths[choice[LENGTH]];
    p.seqlen_q = length <= 16 ? 1 : length;
    p.seqlen_k = length == 16 ? 4096 : length == 8 ? 2048 : length == 32 ? 8192 : length;
    p.causal = choice[WINDOW];
    p.has_mask = choice[MASK] > 0;
    p.mask_shape[2] = choice[MASK] == 2 ? p.seqlen_q : 1;
    p.mask_shape[3] = p.has_mask ? p.seqlen_k : 1;
    p.has_bias = choice[BIAS] > 0;
    p.bias_dtype = choice[BIAS] > 2 ? FDM_FLOAT32 : p.dtype;
    p.bias_shape[2] = choice[BIAS] == 2 || choice[BIAS] == 4 ? p.seqlen_q : 1;
    p.bias_shape[3] = p.has_bias ? p.seqlen_k : 1;
    p.has_intervals = choice[INTERVALS] & 1;
    p.has_row_intervals = choice[INTERVALS] / 2 % 2;
    p.block_mask_size = choice[INTERVALS] & 4 ? 64 : 0;
    p.varlen = choice[VARLEN];
    p.total_q = p.varlen ? 2 * p.seqlen_q : 0;
    p.total_k = p.varlen ? 2 * p.seqlen_k : 0;
    p.softcap = choice[SOFTCAP] ? 30 : 0;
    p.softmax_scale = 0.1;
    p.aligned = !choice[ALIGNED];
    p.scores_aligned = !choice[SCORES_ALIGNED];
    p.needs_lse = 1;
    p.has_sink = choice[SINKS];
    choose_keys(choice[KEYS], &p);
    return p;
}

/* Ways in which features of the backward meet. */
struct backward_set {
    int32_t window, mask, bias, intervals, varlen, softcap, unaligned, unmapped, deterministic, heads_of_bias, sinks;
};
static const struct backward_set sets[] = {
    {0},
    {.window = 1},
    {.window = 1, .varlen = 1},
    {.window = 1, .deterministic = 1},
    {.window = 1, .bias = 2, .deterministic = 1},
    {.mask = 2, .varlen = 1, .deterministic = 1},
    {.window = 1, .intervals = 1},
    {.mask = 1, .intervals = 1},
    {.window = 1, .mask = 2},
    {.window = 1, .bias = 1},
    {.window = 1, .bias = 2, .heads_of_bias = 8},
    {.window = 1, .bias = 4},
    {.window = 1, .bias = 3, .intervals = 1},
    {.window = 1, .softcap = 1},
    {.window = 1, .unmapped = 1},
    {.window = 1, .bias = 2, .intervals = 1, .unmapped = 1},
    {.window = 1, .mask = 2, .bias = 2, .intervals = 1, .varlen = 1, .softcap = 1, .unaligned = 1},
    {.window = 1, .mask = 2, .bias = 4, .intervals = 1, .softcap = 1, .heads_of_bias = 8},
    {.window = 1, .bias = 2},
    {.window = 1, .mask = 2, .bias = 2},
    {.window = 1, .intervals = 1, .deterministic = 1},
    {.mask = 1, .bias = 1, .intervals = 1, .varlen = 1, .deterministic = 1},
    {.window = 1, .mask = 2, .bias = 2, .deterministic = 1},
    {.mask = 2, .bias = 2, .intervals = 1, .deterministic = 1},
    {.varlen = 1, .softcap = 1},
    {.window = 1, .mask = 2, .bias = 2, .heads_of_bias = 8},
    {.window = 1, .sinks = 1},
    {.window = 1, .sinks = 1},
    {.window = 1, .varlen = 1, .sinks = 1},
    {.bias = 2, .deterministic = 1, .sinks = 1},
    {.bias = 1, .varlen = 1, .sinks = 1},
    {.mask = 2, .bias = 4, .softcap = 1, .unaligned = 1, .sinks = 1},
    {.window = 1, .intervals = 2},
    {.intervals = 2, .varlen = 1, .deterministic = 1},
    {.window = 1, .mask = 2, .bias = 2, .intervals = 2},
    {.window = 1, .mask = 2, .bias = 2, .intervals = 3, .varlen = 1, .softcap = 1, .unaligned = 1},
    {.mask = 2, .bias = 2, .intervals = 2, .deterministic = 1},
    {.window = 1, .intervals = 2, .softcap = 1},
    {.intervals = 2, .deterministic = 1},
    {.window = 1, .intervals = 3},
    {.window = 1, .mask = 1, .bias = 1, .intervals = 2},
    {.window = 1, .intervals = 4},
    {.intervals = 4, .varlen = 1, .deterministic = 1},
    {.window = 1, .mask = 2, .bias = 2, .intervals = 6, .varlen = 1, .softcap = 1, .unaligned = 1},
    {.window = 1, .mask = 1},
    {.window = 1, .mask = 1, .varlen = 1},
    {.intervals = 1, .varlen = 1}};
int32_t backward_sets(void) { return sizeof sets / sizeof sets[0]; }

int32_t backward_head_dims(void) { return features[HEAD_DIM].num_values; }

fdm_problem backward_problem(int32_t set, int32_t head_dim, int32_t length) {
    const struct backward_set *s = &sets[set];
    int32_t choice[NUM_FEATURES] = {0};
    choice[DTYPE] = set % 2;
    choice[HEAD_DIM] = head_dim;
    choice[LENGTH] = length;
    choice[WINDOW] = s->window;
    choice[MASK] = s->mask;
    choice[BIAS] = s->bias;
    choice[INTERVALS] = s->intervals;
    choice[VARLEN] = s->varlen;
    choice[SOFTCAP] = s->softcap;
    choice[ALIGNED] = s->unaligned;
    fdm_problem p = problem_of(choice);
    p.pass = FDM_BACKWARD;
    p.heads_kv = length ? p.heads_kv : p.heads; /* of few blocks groups are split */
    p.needs_dbias = p.has_bias;
    p.deterministic = s->deterministic;
    p.q_mappable = !s->unmapped;
    p.has_sink = p.needs_dsink = s->sinks;
    if (s->heads_of_bias) {
        p.bias_shape[0] = p.batch;
        p.bias_shape[1] = p.heads;
    }
    return p;
}

enum { DECODE_FEATURES = 11 };
int32_t decode_problems(const char *kernel) {
    int32_t narrow = 0; /* head dims up to 256 */
    while (head_dims[narrow] <= 256)
        narrow++;
    return kernel && strcmp(kernel, "mma.decode") != 0 ? 0 : narrow * DECODE_FEATURES * 3;
}
fdm_problem decode_problem(int32_t number) {
    const int32_t feature = number % DECODE_FEATURES, dtype = number / DECODE_FEATURES % 3;
    int32_t choice[NUM_FEATURES] = {0};
    choice[DTYPE] = dtype == 1;
    choice[HEAD_DIM] = number / DECODE_FEATURES / 3;
    fdm_problem p = problem_of(choice);
    p.dtype = p.bias_dtype = dtype == 2 ? FDM_FLOAT32 : p.dtype;
    p.batch = p.heads = 32;
    p.heads_kv = 8;
    p.has_tree = feature > 8;
    p.seqlen_q = p.has_tree ? 8 : 1 + (feature > 3);
    p.has_row_intervals = feature == 6 || feature == 7;
    p.block_mask_size = feature == 8 ? 128 : 0;
    p.has_mask = feature < 7;
    p.mask_shape[0] = p.has_mask ? p.batch : 1;
    p.mask_shape[2] = p.has_mask ? p.seqlen_q : 1;
    p.mask_shape[3] = p.has_mask ? p.seqlen_k : 1;
    p.has_bias = feature == 1;
    p.bias_shape[3] = p.has_bias ? p.seqlen_k : 1;
    p.has_intervals = feature == 2;
    p.softcap = feature == 3 ? 30 : 0;
    p.causal = feature == 5;
    p.window_left = feature == 10 ? 1000 : -1;
    if (feature == 9)
        choose_keys(KEYS_IN_PAGES, &p);
    return p;
}

/* Where keys lie, with sets of other features: plain; causal and packed; causal, capped, with sinks; packed with sinks,
 * and splits. */
enum { LATENT_KEYS = 6, LATENT_SETS = 4 };
int32_t latent_problems(const char *kernel) {
    return kernel && strcmp(kernel, "hopper.latent") != 0 ? 0 : LATENT_KEYS * LATENT_SETS;
}
fdm_problem latent_problem(int32_t number) {
    static const int32_t page_sizes[LATENT_KEYS] = {0, 0, 0, 16, 32, 64};
    const int32_t keys = number / LATENT_SETS, set = number % LATENT_SETS;
    int32_t choice[NUM_FEATURES] = {0};
    choice[DTYPE] = (keys + set) % 2;
    choice[WINDOW] = set == 1 || set == 2;
    choice[SOFTCAP] = set == 2;
    choice[SINKS] = set > 1;
    choice[KEYS] = keys < KEYS_IN_ROWS ? keys : KEYS_IN_ROWS;
    fdm_problem p = problem_of(choice);
    p.head_dim = 576;
    p.head_dim_v = 512;
    p.value_in_key = p.heads_kv = 1;
    p.heads = 128;
    p.batch = set == 3 ? 2 : 64;
    p.seqlen_q = 2;
    p.varlen = p.has_cache && set % 2;
    p.total_q = p.varlen ? 2 * p.batch : 0;
    p.page_size = page_sizes[keys];
    p.max_pages = p.page_size ? (int32_t)p.seqlen_k / p.page_size : 0;
    p.num_pages = p.has_cache ? (int32_t)p.batch * (p.page_size ? p.max_pages : 1) : 0;
    return p;
}
