/* hopper_copies.c: which matrices are copied before the forward, and the copies. */
#include "families/hopper/pipeline/hopper_copies.h"

#include "gpu/copy_rows.h"

enum { SECTOR_BYTES = 32, WORKSPACE_ALIGNMENT = 256 };

static int64_t row_elements(int64_t columns) { return gpu_round_up(columns, 16); }
/* Bytes from row to row of a copy: TMA is slow where rows of 128 bytes lie across lines of L2. */
static int64_t row_step(int64_t columns) { return gpu_round_up(columns, 64); }
static int64_t q_rows(const fdm_problem *p) { return p->varlen ? p->total_q : p->seqlen_q; }
static int64_t k_rows(const fdm_problem *p) { return p->varlen ? p->total_k : p->seqlen_k; }
static int64_t batches(const fdm_problem *p) { return p->varlen ? 1 : p->batch; }

/* ---- which ---- */

int32_t hopper_copies_needed(const fdm_problem *p) {
    return p->aligned && p->q_mappable && p->keys_mappable ? 0 : HOPPER_COPY_ALL;
}

int32_t hopper_copies_possible(const fdm_problem *p) {
    if (p->has_cache) /* of which few rows are the call's */
        return 0;
    return (p->head_dim % 16 ? HOPPER_COPY_K : 0) | (p->head_dim_v % 16 ? HOPPER_COPY_V : 0);
}

/* Query rows that see a key, on average. */
static int64_t rows_of_key(const fdm_problem *p) {
    const int64_t rows = p->causal || p->window_right >= 0 || p->window_left >= 0 ? p->seqlen_q / 2 : p->seqlen_q;
    const int64_t window = p->window_left >= 0 ? p->window_left + (p->causal ? 0 : p->window_right) + 1 : rows;
    return window < rows && (p->causal || p->window_right >= 0) ? window : rows;
}

/* Estimates in clocks of a multiprocessor for a key of a head (docs/lab/hopper_forward.md). TMA takes 4 for a row of
 * 128 bytes, and 6 where every other row begins in the middle of a sector. Products of block_m rows take 2 D block_m
 * / 1500, those of wider heads / 1680. A copy takes one for each 10 bytes, with what L2 must write back; another
 * launch takes 4 us of all multiprocessors. */
int32_t hopper_copies_that_pay(const fdm_problem *p, int32_t block_m) {
    enum { DIRECT = 4, SPLIT = 2, PRODUCTS_A_CLOCK = 1500, PRODUCTS_A_CLOCK_OF_WIDE = 1680, BYTES_A_CLOCK = 10 };
    const double launch = 132 * 7000.0;
    const int32_t copies = hopper_copies_possible(p);
    const int64_t d = row_elements(p->head_dim), dv = row_elements(p->head_dim_v), panels = (d + 63) / 64;
    const int64_t panels_v = (dv + 63) / 64, keys = k_rows(p) * batches(p) * p->heads_kv;
    const double loads = (double)(DIRECT * (panels + panels_v) + (copies & HOPPER_COPY_K ? SPLIT * panels : 0) +
                                  (copies & HOPPER_COPY_V ? SPLIT * panels_v : 0));
    const double products = (double)(block_m * (d + dv)) / (d + dv > 384 ? PRODUCTS_A_CLOCK_OF_WIDE : PRODUCTS_A_CLOCK);
    const double bytes =
        4.0 * (double)((copies & HOPPER_COPY_K ? d : 0) + (copies & HOPPER_COPY_V ? dv : 0)) / BYTES_A_CLOCK;
    const double blocks = (double)((rows_of_key(p) + block_m - 1) / block_m * (p->heads / p->heads_kv));
    return (double)keys * (blocks * (loads - products) - bytes) > launch && loads > 1.2 * products ? copies : 0;
}

/* ---- the copies ---- */

/* Describes one matrix: the caller's, and the address of its copy. */
struct copied {
    struct matrix_view *view; /* of the attention that is replaced */
    int64_t rows, heads, columns;
    int32_t bit;
};
enum { COPY_K, COPY_V, COPY_Q, COPY_OUT, NUM_COPIED };

static void list(const fdm_problem *p, struct attention *a, struct copied *of) {
    of[COPY_K] = (struct copied){&a->k, k_rows(p), p->heads_kv, p->head_dim, HOPPER_COPY_K};
    of[COPY_V] = (struct copied){&a->v, k_rows(p), p->heads_kv, p->head_dim_v, HOPPER_COPY_V};
    of[COPY_Q] = (struct copied){&a->q, q_rows(p), p->heads, p->head_dim, HOPPER_COPY_Q};
    of[COPY_OUT] = (struct copied){&a->out, q_rows(p), p->heads, p->head_dim_v, HOPPER_COPY_Q};
}

static int64_t bytes_of(const fdm_problem *p, const struct copied *c) {
    return gpu_round_up(2 * batches(p) * c->heads * c->rows * row_step(c->columns), WORKSPACE_ALIGNMENT);
}

int64_t hopper_copies_bytes(const fdm_problem *p, int32_t copies) {
    struct attention a;
    struct copied of[NUM_COPIED];
    int64_t bytes = 0;
    list(p, &a, of);
    for (int n = 0; n < NUM_COPIED; n++)
        bytes += copies & of[n].bit ? bytes_of(p, &of[n]) : 0;
    return bytes;
}

static int begins_at_sectors(const struct matrix_view *v) {
    return ((uintptr_t)v->data | (uintptr_t)(2 * v->batch) | (uintptr_t)(2 * v->row) | (uintptr_t)(2 * v->head)) %
               SECTOR_BYTES ==
           0;
}

static struct copy_rows_matrix matrix_of(const fdm_problem *p, const struct copied *c, const struct matrix_view *from,
                                         const struct matrix_view *to, int64_t to_columns) {
    return (struct copy_rows_matrix){.from = {from->data, from->batch, from->row, from->head},
                                     .to = {to->data, to->batch, to->row, to->head},
                                     .rows = (int32_t)c->rows,
                                     .heads = (int32_t)c->heads,
                                     .batches = (int32_t)batches(p),
                                     .columns = (int32_t)c->columns,
                                     .to_columns = (int32_t)to_columns};
}

int32_t hopper_copies_before(struct gpu_launches *l, int32_t copies, void *workspace, struct attention *replaced) {
    const fdm_problem *p = l->problem;
    const int32_t kernel = l->num_kernels;
    struct copy_rows_matrix matrices[COPY_ROWS_MATRICES];
    struct copied of[NUM_COPIED];
    char *to = workspace;
    int32_t count = 0;
    if (copies)
        copy_rows_request(gpu_add_kernel(l));
    if (!l->attention)
        return kernel;
    *replaced = *l->attention;
    list(p, replaced, of);
    for (int n = 0; n < NUM_COPIED; n++) {
        const struct matrix_view own = *of[n].view;
        if (!(copies & of[n].bit) || (copies != HOPPER_COPY_ALL && begins_at_sectors(&own)))
            continue;
        const int64_t row = row_step(of[n].columns), head = of[n].rows * row;
        *of[n].view = (struct matrix_view){to, of[n].heads * head, row, head};
        if (n != COPY_OUT)
            matrices[count++] = matrix_of(p, &of[n], &own, of[n].view, row_elements(of[n].columns));
        to += bytes_of(p, &of[n]);
    }
    copy_rows_add(l, kernel, matrices, count);
    return kernel;
}

void hopper_copies_after(struct gpu_launches *l, int32_t kernel, int32_t copies, const struct attention *replaced) {
    if (!l->attention || !(copies & HOPPER_COPY_Q))
        return;
    struct attention own = *l->attention;
    struct copied of[NUM_COPIED];
    list(l->problem, &own, of);
    struct copy_rows_matrix out =
        matrix_of(l->problem, &of[COPY_OUT], &replaced->out, &l->attention->out, l->problem->head_dim_v);
    out.columns = (int32_t)row_elements(out.columns); /* the workspace holds whole chunks of every row */
    copy_rows_add(l, kernel, &out, 1);
}
