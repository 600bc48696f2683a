/* named_cases.c: problems that are listed, not drawn: lengths around tiles, groups of heads, windows, packed sequences,
 * head dims, and every way to run them, for kernels of a family that few drawn problems reach. Each is a row of a list
 * that loops write; no case may be refused. */
#include <stdlib.h>
#include <string.h>

#include "named_cases.h"

static struct named_case *cases;
static int64_t num_cases, max_cases;
struct named_case named_next;

void named_begin(const char *kernel, fdm_pass pass, int64_t head_dim, fdm_dtype dtype) {
    named_next = (struct named_case){.kernel = kernel,
                                     .pass = pass,
                                     .dtype = dtype,
                                     .batch = 1,
                                     .heads = 1,
                                     .heads_kv = 1,
                                     .seqlen_q = 160,
                                     .seqlen_k = 160,
                                     .head_dim = head_dim,
                                     .head_dim_v = head_dim,
                                     .window_left = -1,
                                     .window_right = -1};
}

void named_shape(int64_t batch, int64_t heads, int64_t heads_kv, int64_t seqlen_q, int64_t seqlen_k) {
    named_next.batch = batch;
    named_next.heads = heads;
    named_next.heads_kv = heads_kv;
    named_next.seqlen_q = seqlen_q;
    named_next.seqlen_k = seqlen_k;
}

void named_window(int64_t left, int64_t right) {
    named_next.window_left = left;
    named_next.window_right = right;
}

void named_add(const char *group) {
    if (num_cases == max_cases) {
        max_cases = max_cases ? 2 * max_cases : 256;
        cases = realloc(cases, (size_t)max_cases * sizeof *cases);
        if (!cases)
            exit(2);
    }
    named_next.group = group;
    cases[num_cases++] = named_next;
}

static const int64_t head_dims[] = {256, 128};
/* Everything twice: bfloat16 and float16, head dims of both tiles, without and with a causal mask. */
#define BEGIN(d, type) named_begin(kernel, pass, head_dims[d], named_dtypes[type])

static void add_lengths(const char *kernel, fdm_pass pass) {
    static const int64_t lengths[][2] = {{1, 1},     {64, 64},   {127, 127}, {128, 128}, {129, 129}, {255, 256},
                                         {256, 256}, {257, 257}, {384, 130}, {130, 384}, {1, 300}};
    FOR_EACH(lengths, n)
    FOR_EACH(head_dims, d)
    FOR_EACH(named_dtypes, type)
    for (int causal = 0; causal < 2; causal++) {
        BEGIN(d, type);
        named_next.seqlen_q = lengths[n][0];
        named_next.seqlen_k = lengths[n][1];
        named_next.causal = causal;
        named_add("lengths");
    }
}

static void add_groups(const char *kernel, fdm_pass pass) {
    static const int64_t groups[] = {2, 3, 4, 8};
    FOR_EACH(groups, n)
    FOR_EACH(head_dims, d)
    for (int causal = 0; causal < 2; causal++) {
        BEGIN(d, n % 2);
        named_next.heads_kv = n % 2 + 1;
        named_next.heads = groups[n] * named_next.heads_kv;
        named_next.causal = causal;
        named_add("groups");
    }
}

static void add_windows(const char *kernel, fdm_pass pass) {
    static const int64_t windows[][2] = {{0, 0}, {17, 0}, {100, 30}, {-1, 40}, {33, -1}};
    FOR_EACH(windows, n)
    FOR_EACH(head_dims, d)
    for (int varlen = 0; varlen < 2; varlen++) {
        BEGIN(d, n % 2);
        named_next.seqlen_q = 290;
        named_next.seqlen_k = 333;
        named_next.window_left = windows[n][0];
        named_next.window_right = windows[n][1];
        named_next.varlen = varlen;
        named_next.batch = 1 + 2 * varlen;
        named_add("windows");
    }
}

static void add_packed(const char *kernel, fdm_pass pass) {
    static const int64_t lengths[][2] = {{40, 40}, {128, 128}, {200, 150}, {150, 300}};
    FOR_EACH(lengths, n)
    FOR_EACH(head_dims, d)
    FOR_EACH(named_dtypes, type)
    for (int causal = 0; causal < 2; causal++) {
        BEGIN(d, type);
        named_next.seqlen_q = lengths[n][0];
        named_next.seqlen_k = lengths[n][1];
        named_next.batch = 4;
        named_next.heads = 2;
        named_next.varlen = named_next.rest = 1;
        named_next.causal = causal;
        named_next.dlse = n % 2;
        named_add("packed");
    }
}

static void add_features(const char *kernel, fdm_pass pass) {
    FOR_EACH(head_dims, d)
    FOR_EACH(named_dtypes, type)
    for (int causal = 0; causal < 2; causal++)
        for (int feature = pass == FDM_FORWARD; feature < 2; feature++) {
            BEGIN(d, type);
            named_next.causal = causal;
            named_next.heads = 2;
            named_next.softcap = feature ? 7 : 0;
            named_next.dlse = !feature;
            named_add(feature ? "softcap" : "dlse");
        }
}

/* Masks and biases, with rows and without. */
static void add_scores(const char *kernel, fdm_pass pass) {
    FOR_EACH(head_dims, d)
    FOR_EACH(named_dtypes, type)
    for (int causal = 0; causal < 2; causal++)
        for (int kind = 1; kind < 7; kind++) {
            const int rows = kind < 4 ? 1 : 2; /* struct named_case */
            BEGIN(d, type);
            named_next.heads = 4;
            named_next.heads_kv = 2;
            named_next.seqlen_q = 140;
            named_next.seqlen_k = 400;
            named_next.causal = causal;
            named_next.mask = (kind % 3 != 2) * rows;
            named_next.bias = (kind % 3 != 1) * rows;
            named_add("scores");
        }
}

static void add_head_dims(const char *kernel, fdm_pass pass) {
    static const int64_t dims[][2] = {{8, 8},     {40, 40},   {72, 128},  {96, 96},  {128, 64},
                                      {136, 136}, {192, 128}, {200, 256}, {256, 64}, {24, 248}};
    FOR_EACH(dims, n)
    for (int causal = 0; causal < 2; causal++) {
        BEGIN(0, n % 2);
        named_next.head_dim = dims[n][0];
        named_next.head_dim_v = dims[n][1];
        named_next.causal = causal;
        named_add("head dims");
    }
}

/* Every way to run, with more items than are run at once where there are few multiprocessors. variants: of each head
 * dim. */
static void add_variants(const char *kernel, fdm_pass pass, const int32_t *variants) {
    FOR_EACH(head_dims, d)
    for (int32_t variant = 0; variant < variants[d]; variant++)
        for (int kind = 0; kind < 4; kind++) {
            BEGIN(d, (size_t)variant % 2);
            named_next.variant = variant;
            named_next.batch = 2;
            named_next.heads = 3;
            named_next.heads_kv = kind % 2 ? 1 : 3;
            named_next.seqlen_q = 300;
            named_next.seqlen_k = 280;
            named_next.causal = kind % 2;
            named_next.varlen = kind / 2;
            named_add("ways to run");
        }
}

/* A last block with rows of its first warpgroup alone, and rows that see the last keys of a block only, beside a bias:
 * who has nothing to do in a step passes it, and must not wait for who has. */
static void add_idle_warpgroups(void) {
    static const int64_t lengths[][2] = {{188, 192}, {64, 700}, {130, 520}, {320, 320}, {257, 1000}};
    static const int64_t dims[] = {64, 96, 128, 192, 256};
    FOR_EACH(lengths, n)
    FOR_EACH(dims, d)
    for (int window = 0; window < 3; window++)
        for (int scores = 1; scores < (dims[d] > 192 ? 3 : 4); scores++) { /* both do not fit beside the widest heads */
            named_begin("hopper.forward", FDM_FORWARD, dims[d], named_dtypes[n % 2]);
            named_next.heads = 2;
            named_next.seqlen_q = lengths[n][0];
            named_next.seqlen_k = (lengths[n][1] + 15) / 16 * 16;
            named_next.causal = window < 2;
            named_next.window_left = window ? 40 : -1;
            named_next.window_right = window == 2 ? 20 : -1;
            named_next.mask = scores & 1;
            named_next.bias = scores >> 1;
            named_add("idle warpgroups");
        }
}

/* Keys whose rows begin in the middle of a memory sector, as they lie and copied. */
static void add_copies(void) {
    static const int64_t dims[][2] = {{72, 72}, {104, 104}, {200, 200}, {248, 96}, {64, 24}};
    FOR_EACH(dims, n)
    for (int32_t variant = 0; variant < 2; variant++)
        for (int kind = 0; kind < 4; kind++) {
            named_begin("hopper.forward", FDM_FORWARD, dims[n][0], named_dtypes[n % 2]);
            named_next.head_dim_v = dims[n][1];
            named_next.variant = variant;
            named_next.batch = 2;
            named_next.heads = 3;
            named_next.heads_kv = kind % 2 ? 1 : 3;
            named_next.seqlen_q = 200;
            named_next.seqlen_k = 304;
            named_next.causal = kind % 2;
            named_next.varlen = kind == 2;
            named_next.mask = kind == 3;
            named_add("copies");
        }
}

/* Few query rows of groups of heads: heads packed in a tile, keys split, both and neither. */
static void add_short(void) {
    static const int64_t groups[] = {2, 4, 8, 12}, rows[] = {5, 17, 33, 100}, dims[] = {64, 128, 256};
    FOR_EACH(dims, d)
    FOR_EACH(rows, n)
    for (int32_t variant = 0; variant < 4; variant++)
        for (int kind = 0; kind < 3; kind++) {
            named_begin("hopper.forward", FDM_FORWARD, dims[d], named_dtypes[n % 2]);
            named_next.variant = variant;
            named_next.batch = kind == 2 ? 2 : 1;
            named_next.heads = groups[(n + d) % 4];
            named_next.seqlen_q = rows[n];
            named_next.seqlen_k = 600 + 100 * (int64_t)n;
            named_next.causal = kind > 0;
            named_next.window_left = kind == 1 && n % 2 ? 300 : -1;
            named_next.varlen = kind == 2;
            named_add("few rows, splits");
        }
}

/* More splits than a warp has lanes, and where there are enough multiprocessors than two warps have. */
static void add_many_splits(void) {
    static const int64_t lengths[] = {24000, 30001}, dims[] = {16, 64};
    FOR_EACH(lengths, n)
    FOR_EACH(dims, d) {
        named_begin("mma.decode", FDM_FORWARD, dims[d], named_dtypes[n]);
        named_next.seqlen_q = 1;
        named_next.seqlen_k = lengths[n];
        named_add("many splits");
        named_begin("hopper.forward", FDM_FORWARD, dims[d], named_dtypes[n]);
        named_next.seqlen_q = 100;
        named_next.seqlen_k = lengths[n] / 2;
        named_next.causal = (int)d;
        named_add("many splits");
    }
}

/* Several blocks of keys that add to the same rows, in any order and in a fixed one, and whose warpgroups see few or no
 * rows of a step. */
static void add_orders(void) {
    static const int64_t lengths[][2] = {{150, 650}, {330, 330}, {260, 700}}, dims[] = {64, 96, 128};
    FOR_EACH(lengths, n)
    FOR_EACH(dims, d)
    for (int deterministic = 0; deterministic < 2; deterministic++)
        for (int window = 0; window < 3; window++) {
            named_begin("hopper.backward", FDM_BACKWARD, dims[d], named_dtypes[n % 2]);
            named_next.batch = n == 2 ? 2 : 1;
            named_next.heads = 2;
            named_next.heads_kv = n == 1 ? 1 : 2;
            named_next.seqlen_q = lengths[n][0];
            named_next.seqlen_k = lengths[n][1];
            named_next.causal = window == 1;
            named_next.window_left = window == 2 ? 150 : -1;
            named_next.window_right = window == 2 ? 20 : -1;
            named_next.varlen = n == 2;
            named_next.deterministic = deterministic;
            named_add("orders of additions");
        }
}

/* The backward in two kernels: what it takes besides causal masks and windows, several blocks of rows and keys, with
 * another dtype, lengths and head dims each. */
static void add_two_kernels(void) {
    static const int64_t lengths[][2] = {{200, 200}, {70, 330}}, dims[][2] = {{256, 256}, {136, 160}, {256, 64}};
    FOR_EACH(dims, d)
    FOR_EACH(lengths, n)
    for (int causal = 0; causal < 2; causal++) {
        named_begin("hopper.backward_2pass", FDM_BACKWARD, dims[d][0], named_dtypes[(n + d) % 2]);
        named_next.head_dim_v = dims[d][1];
        named_next.heads = 2;
        named_next.heads_kv = n == 1 ? 1 : 2;
        named_next.seqlen_q = lengths[n][0];
        named_next.seqlen_k = lengths[n][1];
        named_next.causal = causal;
        named_next.softcap = 7;
        named_next.dlse = n == 1;
        named_add("softcap, two kernels");
        named_next.varlen = 1; /* some sequences are empty */
        named_next.batch = 4;
        named_next.softcap = causal ? 7 : 0;
        named_add("packed, two kernels");
        named_next.varlen = named_next.softcap = 0;
        named_next.batch = 1;
        named_next.seqlen_k = 66 * (1 + (int64_t)d); /* the first rows see no key */
        named_next.window_right = causal ? -1 : 3;
        named_add("empty rows, two kernels");
    }
    FOR_EACH(dims, d)
    FOR_EACH(lengths, n)
    for (int causal = 0; causal < 2; causal++)
        for (int kind = 1; kind < 5; kind++) { /* mask, bias, both; the gradient of a bias */
            named_begin("hopper.backward_2pass", FDM_BACKWARD, dims[d][0], named_dtypes[(n + d) % 2]);
            named_next.head_dim_v = dims[d][1];
            named_next.batch = kind == 4 ? 1 : 2;
            named_next.heads = named_next.heads_kv = kind == 4 ? 1 : 2;
            named_next.heads *= kind == 2 && n ? 2 : 1;
            named_next.seqlen_q = lengths[n][0];
            named_next.seqlen_k = (lengths[n][1] + 15) / 16 * 16;
            named_next.causal = causal;
            named_next.mask = kind % 2;
            named_next.bias = kind > 1;
            named_next.dbias = kind == 4;
            named_next.dlse = n == 1;
            named_add("scores, two kernels");
        }
}

/* A fixed order where masks or intervals say which blocks of keys come to which rows, and where several heads or
 * batches add to one bias' gradient: more blocks than live at a time, and lists of more than 32 of them. */
static void add_listed_orders(void) {
    static const int64_t dims[] = {64, 128};
    static const struct {
        int64_t batch, heads, heads_kv, seqlen_q, seqlen_k;
        int causal, varlen, mask, bias, intervals, shares;
    } rows[] = {
        {1, 2, 2, 260, 1104, 0, 0, 0, 0, 1, 0}, {1, 2, 2, 600, 600, 1, 0, 0, 0, 1, 0},
        {2, 1, 1, 150, 656, 0, 1, 2, 0, 1, 0},  {1, 1, 1, 70, 4400, 0, 0, 0, 0, 1, 0},
        {1, 2, 2, 200, 656, 0, 0, 1, 0, 0, 0},  {1, 2, 2, 400, 400, 1, 0, 1, 0, 0, 0},
        {1, 1, 1, 66, 4240, 0, 0, 1, 0, 0, 0},  {2, 3, 3, 200, 400, 0, 0, 0, 1, 0, 1},
        {3, 2, 1, 200, 272, 0, 0, 0, 1, 0, 2},  {2, 2, 2, 300, 304, 1, 0, 0, 1, 0, 3},
        {2, 2, 2, 200, 400, 0, 0, 1, 1, 0, 3},  {2, 3, 3, 200, 304, 1, 0, 1, 1, 0, 1},
        {2, 3, 3, 200, 400, 0, 0, 0, 1, 1, 3},  {3, 2, 2, 200, 272, 0, 0, 1, 1, 1, 2},
    };
    FOR_EACH(rows, n)
    FOR_EACH(dims, d) {
        named_begin("hopper.backward", FDM_BACKWARD, dims[d], named_dtypes[n % 2]);
        named_shape(rows[n].batch, rows[n].heads, rows[n].heads_kv, rows[n].seqlen_q, rows[n].seqlen_k);
        named_next.causal = rows[n].causal;
        named_next.varlen = rows[n].varlen;
        named_next.mask = rows[n].mask;
        named_next.bias = rows[n].bias;
        named_next.intervals = rows[n].intervals;
        named_next.shares = rows[n].shares;
        named_next.dbias = rows[n].bias;
        named_next.deterministic = 1;
        named_add("orders of listed blocks");
    }
}

/* Rows of few chunks of 16 bytes, of which a warp stores several at a time. */
static void add_narrow_rows(void) {
    static const int64_t dims[] = {8, 16, 24, 32, 64};
    FOR_EACH(dims, n)
    for (int gathers = 0; gathers < 2; gathers++) {
        named_begin(gathers ? "hopper.gather" : "hopper.forward", FDM_FORWARD, dims[n], named_dtypes[n % 2]);
        named_shape(1, 2, 1, 150, 150);
        named_next.causal = 1;
        named_next.intervals = gathers ? 1 : 0;
        named_add("narrow rows");
    }
}

/* Keys that lie in runs, in a backward: documents of several blocks of keys, for each tile, alone, beside causal and
 * window, beside what makes dS of P in float32, and where groups of heads are divided. */
static void add_runs(void) {
    static const struct {
        int64_t dims, batch, heads, heads_kv, seqlen_q, seqlen_k;
        int causal, window, mask, bias, softcap;
    } rows[] = {
        {64, 1, 1, 1, 1100, 1100, 0, 0, 0, 0, 0}, {128, 1, 1, 1, 900, 900, 1, 0, 0, 0, 0},
        {32, 1, 2, 2, 330, 1200, 0, 0, 0, 0, 0},  {96, 1, 1, 1, 800, 800, 0, 1, 0, 0, 0},
        {64, 1, 8, 1, 200, 520, 1, 0, 0, 0, 0},   {128, 1, 4, 1, 600, 600, 0, 0, 0, 0, 0},
        {64, 1, 1, 1, 600, 600, 0, 0, 0, 0, 1},   {128, 2, 1, 1, 600, 600, 0, 0, 2, 0, 0},
        {64, 2, 1, 1, 600, 600, 1, 0, 0, 2, 0},   {128, 1, 2, 1, 600, 600, 1, 0, 0, 0, 1},
    };
    FOR_EACH(rows, n) {
        named_begin("hopper.backward", FDM_BACKWARD, rows[n].dims, named_dtypes[n % 2]);
        named_shape(rows[n].batch, rows[n].heads, rows[n].heads_kv, rows[n].seqlen_q, rows[n].seqlen_k);
        named_next.causal = rows[n].causal;
        if (rows[n].window)
            named_window(150, 70);
        named_next.mask = rows[n].mask;
        named_next.bias = named_next.dbias = rows[n].bias;
        named_next.softcap = rows[n].softcap ? 7 : 0;
        named_next.intervals = 2;
        named_add("runs of keys");
    }
}

/* A kernel of any family, and what says there which pairs are seen: masks and biases with rows (1), without (2), or
 * none (0). rows_apart: whether it takes rows that are 2^31 bytes apart. only_packed: whether hidden keys take it as
 * long as others, but not the empty sequences of a packed call. */
struct any_kernel {
    const char *name;
    fdm_pass pass;
    fdm_dtype dtype;
    int scores, rows_apart, only_scored, only_packed;
};
static const struct any_kernel any_kernels[] = {
    {"cpu.forward", FDM_FORWARD, FDM_FLOAT32, 2, 1, 0, 0},
    {"cpu.decode", FDM_FORWARD, FDM_FLOAT32, 2, 1, 0, 0},
    {"cpu.backward", FDM_BACKWARD, FDM_FLOAT32, 2, 1, 0, 0},
    {"mma.forward", FDM_FORWARD, FDM_FLOAT16, 2, 1, 0, 0},
    {"mma.decode", FDM_FORWARD, FDM_FLOAT16, 2, 0, 0, 0},
    {"mma.forward_d1024", FDM_FORWARD, FDM_FLOAT16, 2, 0, 0, 1},
    {"mma.forward32", FDM_FORWARD, FDM_FLOAT32, 2, 1, 0, 0},
    {"mma.split-q", FDM_FORWARD, FDM_FLOAT16, 0, 0, 0, 0},
    {"mma.backward", FDM_BACKWARD, FDM_FLOAT16, 2, 1, 0, 0},
    {"mma.backward_d1024", FDM_BACKWARD, FDM_FLOAT16, 2, 1, 0, 0},
    {"mma.backward32", FDM_BACKWARD, FDM_FLOAT32, 2, 1, 0, 0},
    {"hopper.forward", FDM_FORWARD, FDM_FLOAT16, 1, 1, 0, 0},
    {"hopper.gather", FDM_FORWARD, FDM_FLOAT16, 2, 0, 1, 0},
    {"hopper.backward", FDM_BACKWARD, FDM_FLOAT16, 2, 0, 0, 0},
    {"hopper.backward_2pass", FDM_BACKWARD, FDM_FLOAT16, 1, 0, 0, 0},
    {"blackwell.forward", FDM_FORWARD, FDM_FLOAT16, 1, 0, 0, 0},
    {"blackwell.backward", FDM_BACKWARD, FDM_FLOAT16, 0, 0, 0, 0},
};

/* More batches or heads than a grid has blocks along its second and third axis, which is 65535, of kernels that take
 * masks: all keys are hidden from most of them, which takes a block little time. */
static void add_many(const struct any_kernel *kernel) {
    enum { MANY = 65537 };
    for (int axis = 0; axis < (kernel->only_packed ? 1 : 3) && kernel->scores; axis++) {
        named_begin(kernel->name, kernel->pass, 8, kernel->dtype);
        named_next.seqlen_q = kernel->scores == 1 ? 2 : 1;
        named_next.seqlen_k = 16;
        named_next.batch = axis == 0 ? MANY : 1;
        named_next.heads = axis > 0 ? MANY : 1;
        named_next.heads_kv = axis > 1 ? MANY : 1;
        named_next.mask = kernel->only_packed ? 0 : kernel->scores;
        named_next.varlen = kernel->only_packed;
        named_next.many = 1;
        /* So many heads of a group are no few rows, and most kernels of Hopper take no masks of their own. */
        if (axis != 1 || !(strstr(kernel->name, "decode") ||
                           strstr("hopper.gather hopper.backward hopper.backward_2pass", kernel->name)))
            named_add("more than 65535");
    }
}

/* Batches, heads and rows that lie 2^31 bytes apart. */
static void add_apart(const struct any_kernel *kernel) {
    enum { BATCHES, HEADS, ROWS, AXES };
    for (int axis = 0; axis < AXES; axis++)
        for (int scored = kernel->only_scored; scored < (kernel->scores ? 2 : 1); scored++) {
            named_begin(kernel->name, kernel->pass, 64, kernel->dtype);
            named_next.batch = axis == BATCHES ? 2 : 1;
            named_next.heads = named_next.heads_kv = axis == HEADS ? 3 : 1;
            named_next.seqlen_q = axis == ROWS ? 3 : strstr(kernel->name, "decode") ? 4 : 70;
            named_next.seqlen_k = axis == ROWS ? 3 : 112;
            named_next.apart = axis == BATCHES ? 2 : 3;
            named_next.causal = scored;
            named_next.mask = named_next.bias = scored * kernel->scores;
            named_next.refused = axis == ROWS && !kernel->rows_apart;
            if (axis != ROWS || kernel->scores == 2 || !scored) /* a mask of three keys has no rows of 16 bytes */
                named_add("2^31 bytes apart");
        }
}

static void list_cases(void) {
    static const struct {
        const char *name;
        fdm_pass pass;
        int32_t variants[2];
    } kernels[] = {{"blackwell.forward", FDM_FORWARD, {6, 12}}, {"blackwell.backward", FDM_BACKWARD, {3, 3}}};
    FOR_EACH(kernels, k) {
        const char *kernel = kernels[k].name;
        const fdm_pass pass = kernels[k].pass;
        add_lengths(kernel, pass);
        add_groups(kernel, pass);
        add_windows(kernel, pass);
        add_packed(kernel, pass);
        add_features(kernel, pass);
        if (pass == FDM_FORWARD)
            add_scores(kernel, pass);
        add_head_dims(kernel, pass);
        add_variants(kernel, pass, kernels[k].variants);
    }
    static void (*const others[])(void) = {add_idle_warpgroups,  add_copies,      add_short,         add_many_splits,
                                           add_orders,           add_two_kernels, add_listed_orders, named_tile_plans,
                                           named_wide_intervals, add_narrow_rows, add_runs,          named_seen_tiles};
    FOR_EACH(others, n)
    others[n]();
    FOR_EACH(any_kernels, n) {
        add_apart(&any_kernels[n]);
        add_many(&any_kernels[n]);
        for (int runs = 1; runs <= 3; runs++)
            if (strstr("mma.forward32 mma.decode hopper.forward mma.backward32 hopper.backward_2pass",
                       any_kernels[n].name))
                named_rows(any_kernels[n].name, any_kernels[n].pass, any_kernels[n].dtype == FDM_FLOAT32, runs);
    }
    named_forms(); /* at the end: numbers of the others, and so what is drawn for them, stay as they were */
}

const struct named_case *named_case(int64_t number) {
    if (!cases)
        list_cases();
    return number >= 0 && number < num_cases ? &cases[number] : NULL;
}
