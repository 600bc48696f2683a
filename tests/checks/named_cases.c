/* named_cases.c: problems that are listed, not drawn: lengths around tiles, groups of heads, windows, packed sequences,
 * head dims, and every way to run them, for kernels of a family that few drawn problems reach. Each is a row of a list
 * that loops write; no case may be refused. */
#include <stdlib.h>
#include <string.h>

#include "checks.h"

static struct named_case *cases;
static int64_t num_cases, max_cases;
static struct named_case next; /* what a loop has not set is as begin() leaves it */

static void begin(const char *kernel, fdm_pass pass, int64_t head_dim, fdm_dtype dtype) {
    next = (struct named_case){.kernel = kernel,
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

static void shape(int64_t batch, int64_t heads, int64_t heads_kv, int64_t seqlen_q, int64_t seqlen_k) {
    next.batch = batch;
    next.heads = heads;
    next.heads_kv = heads_kv;
    next.seqlen_q = seqlen_q;
    next.seqlen_k = seqlen_k;
}

static void window(int64_t left, int64_t right) {
    next.window_left = left;
    next.window_right = right;
}

static void add(const char *group) {
    if (num_cases == max_cases) {
        max_cases = max_cases ? 2 * max_cases : 256;
        cases = realloc(cases, (size_t)max_cases * sizeof *cases);
        if (!cases)
            exit(2);
    }
    next.group = group;
    cases[num_cases++] = next;
}

static const fdm_dtype dtypes[] = {FDM_BFLOAT16, FDM_FLOAT16};
static const int64_t head_dims[] = {256, 128};
/* Everything twice: bfloat16 and float16, head dims of both tiles, without and with a causal mask. */
#define FOR_EACH(list, at) for (size_t at = 0; at < sizeof(list) / sizeof *(list); at++)
#define BEGIN(d, type)     begin(kernel, pass, head_dims[d], dtypes[type])

static void add_lengths(const char *kernel, fdm_pass pass) {
    static const int64_t lengths[][2] = {{1, 1},     {64, 64},   {127, 127}, {128, 128}, {129, 129}, {255, 256},
                                         {256, 256}, {257, 257}, {384, 130}, {130, 384}, {1, 300}};
    FOR_EACH(lengths, n)
    FOR_EACH(head_dims, d)
    FOR_EACH(dtypes, type)
    for (int causal = 0; causal < 2; causal++) {
        BEGIN(d, type);
        next.seqlen_q = lengths[n][0];
        next.seqlen_k = lengths[n][1];
        next.causal = causal;
        add("lengths");
    }
}

static void add_groups(const char *kernel, fdm_pass pass) {
    static const int64_t groups[] = {2, 3, 4, 8};
    FOR_EACH(groups, n)
    FOR_EACH(head_dims, d)
    for (int causal = 0; causal < 2; causal++) {
        BEGIN(d, n % 2);
        next.heads_kv = n % 2 + 1;
        next.heads = groups[n] * next.heads_kv;
        next.causal = causal;
        add("groups");
    }
}

static void add_windows(const char *kernel, fdm_pass pass) {
    static const int64_t windows[][2] = {{0, 0}, {17, 0}, {100, 30}, {-1, 40}, {33, -1}};
    FOR_EACH(windows, n)
    FOR_EACH(head_dims, d)
    for (int varlen = 0; varlen < 2; varlen++) {
        BEGIN(d, n % 2);
        next.seqlen_q = 290;
        next.seqlen_k = 333;
        next.window_left = windows[n][0];
        next.window_right = windows[n][1];
        next.varlen = varlen;
        next.batch = 1 + 2 * varlen;
        add("windows");
    }
}

static void add_packed(const char *kernel, fdm_pass pass) {
    static const int64_t lengths[][2] = {{40, 40}, {128, 128}, {200, 150}, {150, 300}};
    FOR_EACH(lengths, n)
    FOR_EACH(head_dims, d)
    FOR_EACH(dtypes, type)
    for (int causal = 0; causal < 2; causal++) {
        BEGIN(d, type);
        next.seqlen_q = lengths[n][0];
        next.seqlen_k = lengths[n][1];
        next.batch = 4;
        next.heads = 2;
        next.varlen = next.rest = 1;
        next.causal = causal;
        next.dlse = n % 2;
        add("packed");
    }
}

static void add_features(const char *kernel, fdm_pass pass) {
    FOR_EACH(head_dims, d)
    FOR_EACH(dtypes, type)
    for (int causal = 0; causal < 2; causal++)
        for (int feature = pass == FDM_FORWARD; feature < 2; feature++) {
            BEGIN(d, type);
            next.causal = causal;
            next.heads = 2;
            next.softcap = feature ? 7 : 0;
            next.dlse = !feature;
            add(feature ? "softcap" : "dlse");
        }
}

/* Masks and biases, with rows and without. */
static void add_scores(const char *kernel, fdm_pass pass) {
    FOR_EACH(head_dims, d)
    FOR_EACH(dtypes, type)
    for (int causal = 0; causal < 2; causal++)
        for (int kind = 1; kind < 7; kind++) {
            const int rows = kind < 4 ? 1 : 2; /* struct named_case */
            BEGIN(d, type);
            next.heads = 4;
            next.heads_kv = 2;
            next.seqlen_q = 140;
            next.seqlen_k = 400;
            next.causal = causal;
            next.mask = (kind % 3 != 2) * rows;
            next.bias = (kind % 3 != 1) * rows;
            add("scores");
        }
}

static void add_head_dims(const char *kernel, fdm_pass pass) {
    static const int64_t dims[][2] = {{8, 8},     {40, 40},   {72, 128},  {96, 96},  {128, 64},
                                      {136, 136}, {192, 128}, {200, 256}, {256, 64}, {24, 248}};
    FOR_EACH(dims, n)
    for (int causal = 0; causal < 2; causal++) {
        BEGIN(0, n % 2);
        next.head_dim = dims[n][0];
        next.head_dim_v = dims[n][1];
        next.causal = causal;
        add("head dims");
    }
}

/* Every way to run, with more items than are run at once where there are few multiprocessors. variants: of each head
 * dim. */
static void add_variants(const char *kernel, fdm_pass pass, const int32_t *variants) {
    FOR_EACH(head_dims, d)
    for (int32_t variant = 0; variant < variants[d]; variant++)
        for (int kind = 0; kind < 4; kind++) {
            BEGIN(d, (size_t)variant % 2);
            next.variant = variant;
            next.batch = 2;
            next.heads = 3;
            next.heads_kv = kind % 2 ? 1 : 3;
            next.seqlen_q = 300;
            next.seqlen_k = 280;
            next.causal = kind % 2;
            next.varlen = kind / 2;
            add("ways to run");
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
            begin("hopper.forward", FDM_FORWARD, dims[d], dtypes[n % 2]);
            next.heads = 2;
            next.seqlen_q = lengths[n][0];
            next.seqlen_k = (lengths[n][1] + 15) / 16 * 16;
            next.causal = window < 2;
            next.window_left = window ? 40 : -1;
            next.window_right = window == 2 ? 20 : -1;
            next.mask = scores & 1;
            next.bias = scores >> 1;
            add("idle warpgroups");
        }
}

/* Keys whose rows begin in the middle of a memory sector, as they lie and copied. */
static void add_copies(void) {
    static const int64_t dims[][2] = {{72, 72}, {104, 104}, {200, 200}, {248, 96}, {64, 24}};
    FOR_EACH(dims, n)
    for (int32_t variant = 0; variant < 2; variant++)
        for (int kind = 0; kind < 4; kind++) {
            begin("hopper.forward", FDM_FORWARD, dims[n][0], dtypes[n % 2]);
            next.head_dim_v = dims[n][1];
            next.variant = variant;
            next.batch = 2;
            next.heads = 3;
            next.heads_kv = kind % 2 ? 1 : 3;
            next.seqlen_q = 200;
            next.seqlen_k = 304;
            next.causal = kind % 2;
            next.varlen = kind == 2;
            next.mask = kind == 3;
            add("copies");
        }
}

/* Few query rows of groups of heads: heads packed in a tile, keys split, both and neither. */
static void add_short(void) {
    static const int64_t groups[] = {2, 4, 8, 12}, rows[] = {5, 17, 33, 100}, dims[] = {64, 128, 256};
    FOR_EACH(dims, d)
    FOR_EACH(rows, n)
    for (int32_t variant = 0; variant < 4; variant++)
        for (int kind = 0; kind < 3; kind++) {
            begin("hopper.forward", FDM_FORWARD, dims[d], dtypes[n % 2]);
            next.variant = variant;
            next.batch = kind == 2 ? 2 : 1;
            next.heads = groups[(n + d) % 4];
            next.seqlen_q = rows[n];
            next.seqlen_k = 600 + 100 * (int64_t)n;
            next.causal = kind > 0;
            next.window_left = kind == 1 && n % 2 ? 300 : -1;
            next.varlen = kind == 2;
            add("few rows, splits");
        }
}

/* More splits than a warp has lanes, and where there are enough multiprocessors than two warps have. */
static void add_many_splits(void) {
    static const int64_t lengths[] = {24000, 30001}, dims[] = {16, 64};
    FOR_EACH(lengths, n)
    FOR_EACH(dims, d) {
        begin("mma.decode", FDM_FORWARD, dims[d], dtypes[n]);
        next.seqlen_q = 1;
        next.seqlen_k = lengths[n];
        add("many splits");
        begin("hopper.forward", FDM_FORWARD, dims[d], dtypes[n]);
        next.seqlen_q = 100;
        next.seqlen_k = lengths[n] / 2;
        next.causal = (int)d;
        add("many splits");
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
            begin("hopper.backward", FDM_BACKWARD, dims[d], dtypes[n % 2]);
            next.batch = n == 2 ? 2 : 1;
            next.heads = 2;
            next.heads_kv = n == 1 ? 1 : 2;
            next.seqlen_q = lengths[n][0];
            next.seqlen_k = lengths[n][1];
            next.causal = window == 1;
            next.window_left = window == 2 ? 150 : -1;
            next.window_right = window == 2 ? 20 : -1;
            next.varlen = n == 2;
            next.deterministic = deterministic;
            add("orders of additions");
        }
}

/* The backward in two kernels: what it takes besides causal masks and windows, several blocks of rows and keys, with
 * another dtype, lengths and head dims each. */
static void add_two_kernels(void) {
    static const int64_t lengths[][2] = {{200, 200}, {70, 330}}, dims[][2] = {{256, 256}, {136, 160}, {256, 64}};
    FOR_EACH(dims, d)
    FOR_EACH(lengths, n)
    for (int causal = 0; causal < 2; causal++) {
        begin("hopper.backward_2pass", FDM_BACKWARD, dims[d][0], dtypes[(n + d) % 2]);
        next.head_dim_v = dims[d][1];
        next.heads = 2;
        next.heads_kv = n == 1 ? 1 : 2;
        next.seqlen_q = lengths[n][0];
        next.seqlen_k = lengths[n][1];
        next.causal = causal;
        next.softcap = 7;
        next.dlse = n == 1;
        add("softcap, two kernels");
        next.varlen = 1; /* some sequences are empty */
        next.batch = 4;
        next.softcap = causal ? 7 : 0;
        add("packed, two kernels");
        next.varlen = next.softcap = 0;
        next.batch = 1;
        next.seqlen_k = 66 * (1 + (int64_t)d); /* the first rows see no key */
        next.window_right = causal ? -1 : 3;
        add("empty rows, two kernels");
    }
    FOR_EACH(dims, d)
    FOR_EACH(lengths, n)
    for (int causal = 0; causal < 2; causal++)
        for (int kind = 1; kind < 5; kind++) { /* mask, bias, both; the gradient of a bias */
            begin("hopper.backward_2pass", FDM_BACKWARD, dims[d][0], dtypes[(n + d) % 2]);
            next.head_dim_v = dims[d][1];
            next.batch = kind == 4 ? 1 : 2;
            next.heads = next.heads_kv = kind == 4 ? 1 : 2;
            next.heads *= kind == 2 && n ? 2 : 1;
            next.seqlen_q = lengths[n][0];
            next.seqlen_k = (lengths[n][1] + 15) / 16 * 16;
            next.causal = causal;
            next.mask = kind % 2;
            next.bias = kind > 1;
            next.dbias = kind == 4;
            next.dlse = n == 1;
            add("scores, two kernels");
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
        begin("hopper.backward", FDM_BACKWARD, dims[d], dtypes[n % 2]);
        shape(rows[n].batch, rows[n].heads, rows[n].heads_kv, rows[n].seqlen_q, rows[n].seqlen_k);
        next.causal = rows[n].causal;
        next.varlen = rows[n].varlen;
        next.mask = rows[n].mask;
        next.bias = rows[n].bias;
        next.intervals = rows[n].intervals;
        next.shares = rows[n].shares;
        next.dbias = rows[n].bias;
        next.deterministic = 1;
        add("orders of listed blocks");
    }
}

/* Tiles of keys that are full, hidden or seen in part, by documents or by a mask that all rows share: several blocks of
 * rows and words of tiles, for each tile of the kernel. */
static void add_tile_plans(void) {
    static const struct {
        int64_t dims[2], batch, heads, seqlen_q, seqlen_k;
        int causal, window, varlen, mask, softcap;
    } rows[] = {
        {{64, 128}, 1, 1, 450, 450, 0, 0, 0, 0, 0},  {{128, 256}, 1, 2, 330, 330, 1, 0, 0, 0, 0},
        {{64, 256}, 1, 1, 130, 2400, 0, 0, 0, 0, 1}, {{128, 176}, 2, 1, 200, 200, 0, 0, 1, 0, 0},
        {{64, 128}, 2, 1, 200, 200, 1, 0, 1, 0, 1},  {{64, 128}, 1, 1, 330, 330, 0, 1, 0, 0, 0},
        {{128, 256}, 2, 1, 150, 300, 0, 0, 0, 2, 0}, {{64, 128}, 2, 1, 200, 200, 1, 0, 1, 2, 0},
    };
    FOR_EACH(rows, n)
    for (int d = 0; d < 2; d++) {
        begin("hopper.forward", FDM_FORWARD, rows[n].dims[d], dtypes[(n + (size_t)d) % 2]);
        shape(rows[n].batch, rows[n].heads, 1, rows[n].seqlen_q, rows[n].seqlen_k);
        next.causal = rows[n].causal;
        if (rows[n].window)
            window(150, 70);
        next.varlen = rows[n].varlen;
        next.mask = rows[n].mask;
        next.intervals = rows[n].mask ? 0 : 2;
        next.softcap = rows[n].softcap ? 7 : 0;
        add("tile plans");
    }
}

/* Tiles of keys that documents or a mask that all rows share hide from blocks of rows, of kernels that look at each
 * key, with a mask plan and without; in a plan of more than a word, and in one that the call makes. */
static void add_seen_tiles(void) {
    static const struct {
        const char *name;
        fdm_pass pass;
        fdm_dtype dtype;
    } kernels[] = {{"mma.forward", FDM_FORWARD, FDM_BFLOAT16},
                   {"mma.forward32", FDM_FORWARD, FDM_FLOAT32},
                   {"mma.backward32", FDM_BACKWARD, FDM_FLOAT32},
                   {"mma.backward_d1024", FDM_BACKWARD, FDM_FLOAT16}};
    static const struct {
        int64_t batch, heads, heads_kv, seqlen_q, seqlen_k;
        int causal, varlen, mask;
    } rows[] = {
        {1, 2, 2, 330, 330, 0, 0, 0}, {1, 2, 1, 130, 2400, 1, 0, 0}, {2, 1, 1, 200, 330, 0, 1, 0},
        {2, 1, 1, 70, 600, 0, 0, 2},  {1, 1, 1, 130, 8200, 0, 0, 0},
    };
    FOR_EACH(kernels, k)
    FOR_EACH(rows, n)
    for (int d = 0; d < 2; d++) {
        begin(kernels[k].name, kernels[k].pass, d ? 64 : 32, kernels[k].dtype);
        shape(rows[n].batch, rows[n].heads, rows[n].heads_kv, rows[n].seqlen_q, rows[n].seqlen_k);
        next.causal = rows[n].causal;
        next.varlen = rows[n].varlen;
        next.mask = rows[n].mask;
        next.intervals = rows[n].mask ? 0 : 2;
        add("seen tiles");
    }
}

/* Rows of few chunks of 16 bytes, of which a warp stores several at a time. */
static void add_narrow_rows(void) {
    static const int64_t dims[] = {8, 16, 24, 32, 64};
    FOR_EACH(dims, n)
    for (int gathers = 0; gathers < 2; gathers++) {
        begin(gathers ? "hopper.gather" : "hopper.forward", FDM_FORWARD, dims[n], dtypes[n % 2]);
        shape(1, 2, 1, 150, 150);
        next.causal = 1;
        next.intervals = gathers ? 1 : 0;
        add("narrow rows");
    }
}

/* Intervals of head dims above 128, in a backward: documents (2), and scattered keys (1), which are sorted: several
 * blocks of rows and of keys, sequences that end within them, groups of heads, divided and not; masks of keys (0). */
static void add_wide_intervals(void) {
    static const struct {
        int64_t dims[2], batch, heads, heads_kv, seqlen_q, seqlen_k;
        int kind, causal, window, softcap, varlen;
    } rows[] = {
        {{160, 256}, 1, 1, 1, 330, 330, 2, 0, 0, 0, 0},  {{256, 192}, 1, 1, 1, 450, 450, 2, 1, 0, 0, 0},
        {{256, 256}, 1, 2, 2, 200, 1100, 1, 0, 0, 0, 0}, {{192, 224}, 2, 2, 2, 330, 330, 1, 1, 0, 0, 0},
        {{256, 256}, 1, 4, 1, 200, 330, 2, 0, 1, 0, 0},  {{160, 256}, 2, 1, 1, 130, 2100, 1, 0, 0, 1, 0},
        {{136, 200}, 1, 2, 2, 140, 260, 2, 0, 0, 1, 0},  {{160, 256}, 2, 2, 2, 200, 330, 0, 0, 0, 0, 0},
        {{136, 256}, 2, 2, 2, 130, 200, 0, 1, 0, 0, 1},  {{192, 256}, 3, 4, 2, 150, 200, 2, 1, 0, 0, 1},
    };
    FOR_EACH(rows, n)
    for (int d = 0; d < 2; d++) {
        begin("hopper.backward_2pass", FDM_BACKWARD, rows[n].dims[d], dtypes[(n + (size_t)d) % 2]);
        shape(rows[n].batch, rows[n].heads, rows[n].heads_kv, rows[n].seqlen_q, rows[n].seqlen_k);
        next.causal = rows[n].causal;
        if (rows[n].window)
            window(150, 70);
        next.intervals = rows[n].kind;
        next.mask = rows[n].kind ? 0 : 2;
        next.varlen = next.rest = rows[n].varlen;
        next.softcap = rows[n].softcap ? 7 : 0;
        add("intervals of wide heads");
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
        begin("hopper.backward", FDM_BACKWARD, rows[n].dims, dtypes[n % 2]);
        shape(rows[n].batch, rows[n].heads, rows[n].heads_kv, rows[n].seqlen_q, rows[n].seqlen_k);
        next.causal = rows[n].causal;
        if (rows[n].window)
            window(150, 70);
        next.mask = rows[n].mask;
        next.bias = next.dbias = rows[n].bias;
        next.softcap = rows[n].softcap ? 7 : 0;
        next.intervals = 2;
        add("runs of keys");
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
        begin(kernel->name, kernel->pass, 8, kernel->dtype);
        next.seqlen_q = kernel->scores == 1 ? 2 : 1;
        next.seqlen_k = 16;
        next.batch = axis == 0 ? MANY : 1;
        next.heads = axis > 0 ? MANY : 1;
        next.heads_kv = axis > 1 ? MANY : 1;
        next.mask = kernel->only_packed ? 0 : kernel->scores;
        next.varlen = kernel->only_packed;
        next.many = 1;
        /* So many heads of a group are no few rows, and most kernels of Hopper take no masks of their own. */
        if (axis != 1 || !(strstr(kernel->name, "decode") ||
                           strstr("hopper.gather hopper.backward hopper.backward_2pass", kernel->name)))
            add("more than 65535");
    }
}

/* Batches, heads and rows that lie 2^31 bytes apart. */
static void add_apart(const struct any_kernel *kernel) {
    enum { BATCHES, HEADS, ROWS, AXES };
    for (int axis = 0; axis < AXES; axis++)
        for (int scored = kernel->only_scored; scored < (kernel->scores ? 2 : 1); scored++) {
            begin(kernel->name, kernel->pass, 64, kernel->dtype);
            next.batch = axis == BATCHES ? 2 : 1;
            next.heads = next.heads_kv = axis == HEADS ? 3 : 1;
            next.seqlen_q = axis == ROWS ? 3 : strstr(kernel->name, "decode") ? 4 : 70;
            next.seqlen_k = axis == ROWS ? 3 : 112;
            next.apart = axis == BATCHES ? 2 : 3;
            next.causal = scored;
            next.mask = next.bias = scored * kernel->scores;
            next.refused = axis == ROWS && !kernel->rows_apart;
            if (axis != ROWS || kernel->scores == 2 || !scored) /* a mask of three keys has no rows of 16 bytes */
                add("2^31 bytes apart");
        }
}

/* Row intervals, a block mask or both (runs: bits 0 and 1) beside everything, with hidden tiles and full ones. */
static void add_rows(const char *kernel, fdm_pass pass, int32_t float32, int runs) {
    static const int64_t dims[] = {64, 128}, wide_dims[] = {256, 160};
    enum { OF_NONE, CAUSAL, WINDOW, PACKED, SOFTCAP, OF_MASK, KEY_MASK, INTERVALS, OF_BIAS, KEY_BIAS, PAIRS, KINDS };
    const int decode = strstr(kernel, "decode") != NULL, hopper = strstr(kernel, "hopper") != NULL;
    const int owns = hopper && pass == FDM_BACKWARD, wide = strstr(kernel, "2pass") != NULL;
    FOR_EACH(dims, d)
    for (int kind = OF_NONE; kind < KINDS; kind++) {
        const int alike = owns && kind >= OF_MASK; /* what heads of keys share */
        if (wide ? kind >= OF_BIAS || kind == OF_MASK : hopper && !owns && kind >= KEY_BIAS)
            continue; /* mma's */
        if (runs > 1 && d != (size_t)kind % 2)
            continue;
        begin(kernel, pass, wide ? wide_dims[d] : dims[d], float32 ? FDM_FLOAT32 : dtypes[kind % 2]);
        shape(kind == PACKED ? 3 : 1 + kind % 2, 4, alike ? 4 : 2, decode ? 5 : 200, decode ? 600 : 304);
        next.rows = (runs & 1) * (owns ? 2 : 1);
        next.blocks = runs / 2 * (owns ? 2 : 1);
        next.causal = kind == CAUSAL || kind == PACKED;
        next.mask = kind == OF_MASK || kind == PAIRS ? 1 : kind == KEY_MASK ? 2 : 0;
        next.bias = kind == OF_BIAS ? 1 : kind == KEY_BIAS || kind == PAIRS ? 2 : 0;
        next.intervals = kind == INTERVALS;
        next.varlen = next.rest = kind == PACKED;
        next.softcap = kind == SOFTCAP ? 7 : 0;
        next.dbias = pass == FDM_BACKWARD && next.bias;
        next.deterministic = pass == FDM_BACKWARD && kind % 2;
        window(kind == WINDOW ? 100 : -1, kind == WINDOW ? 30 : -1);
        add(runs == 1 ? "row intervals" : runs == 2 ? "block masks" : "row intervals and block masks");
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
    static void (*const others[])(void) = {add_idle_warpgroups, add_copies,      add_short,         add_many_splits,
                                           add_orders,          add_two_kernels, add_listed_orders, add_tile_plans,
                                           add_wide_intervals,  add_narrow_rows, add_runs,          add_seen_tiles};
    FOR_EACH(others, n)
    others[n]();
    FOR_EACH(any_kernels, n) {
        add_apart(&any_kernels[n]);
        add_many(&any_kernels[n]);
        for (int runs = 1; runs <= 3; runs++)
            if (strstr("mma.forward32 mma.decode hopper.forward mma.backward32 hopper.backward_2pass",
                       any_kernels[n].name))
                add_rows(any_kernels[n].name, any_kernels[n].pass, any_kernels[n].dtype == FDM_FLOAT32, runs);
    }
}

const struct named_case *named_case(int64_t number) {
    if (!cases)
        list_cases();
    return number >= 0 && number < num_cases ? &cases[number] : NULL;
}
