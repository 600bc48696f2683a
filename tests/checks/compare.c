/* compare.c: row by row, never by tensor: a dead row of 64 elements hides in every whole-tensor tolerance. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"

/* A row is right when its largest error is at most 2x the largest row error of the baseline in the same head, plus
 * slack * eps of the output's dtype times max(|row|, root mean square of the head). slack was set by running the
 * scalar, AVX2 and AVX-512 kernels on 4,000 seeds: the smallest power of two without a failure, doubled. */
static const struct {
    double float32, narrow;
} slack[NUM_ROLES] = {
    [OUT] = {64, 2}, [DQ] = {128, 4}, [DK] = {128, 4}, [DV] = {64, 4}, [DBIAS] = {128, 4}, [DSINK] = {128, 4}};

/* Sums in float16 round at every step: 16 products at a time, to a score of a row's head dim or a value of 64 keys. */
enum { FLOAT16_SUMS = 64 };

int sums_in_float16(const char *kernel) { return strstr(kernel, "_F16Acc") != NULL; }

/* Part of the exponentials on the FMA pipe: each is off by 1.1e-4 at most, and so is a sum of them. */
static double exp2_error(const char *kernel) { return strstr(kernel, "_Exp") ? 1.1e-4 : 0; }

static double eps_of(fdm_dtype dtype) {
    return dtype == FDM_BFLOAT16 ? 0x1p-8 : dtype == FDM_FLOAT16 ? 0x1p-11 : 0x1p-24;
}

/* Smallest step of the dtype near 0. */
static double step_of(fdm_dtype dtype) { return dtype == FDM_FLOAT16 ? 0x1p-24 : 0x1p-126; }

static void report(const struct trial *t, const char *kernel, enum role role, int64_t n, double have, double want,
                   double limit) {
    if (checks_quiet)
        return;
    printf("WRONG %s %s at element %lld: %.9g instead of %.9g (limit %.3g)\n  %s\n  replay: %s --kernel %s "
           "--seed %llu\n",
           kernel, role_names[role], (long long)n, have, want, limit, t->text, checks_program(), kernel,
           (unsigned long long)t->seed);
}

/* Rows of a head: out, dq, dk, dv are [.., S, H, D] with head stride D; dbias [B, h, Sq, Sk]. dsink has a row for each
 * element. */
struct layout {
    int64_t rows, width, heads; /* row r belongs to head r % heads, or to r / (rows of a head) where heads is 0 */
};

static struct layout layout_of(const struct trial *t, enum role role) {
    const struct guarded *g = &t->g[role];
    int32_t ndim = g->tensor.ndim;
    int64_t width = g->shape[ndim - 1], elements = guarded_elements(g);
    if (role == DSINK)
        return (struct layout){elements, 1, elements};
    return (struct layout){width ? elements / width : 0, width, role == DBIAS ? 1 : g->shape[ndim - 2]};
}

static struct head_facts facts_of(const struct trial *t, enum role role, const struct layout *l, int64_t head) {
    struct head_facts f = {0, 0, 0};
    if (t->clean[role])
        return t->clean[role][head];
    for (int64_t r = head; r < l->rows; r += l->heads)
        for (int64_t n = r * l->width; n < (r + 1) * l->width; n++) {
            double want = t->truth[role][n], error = fabs(t->baseline[role][n] - want);
            if (isnan(error)) /* a NaN sink's */
                continue;
            f.worst_baseline = error > f.worst_baseline ? error : f.worst_baseline;
            f.square += want * want;
            f.count++;
        }
    return f;
}

void trial_keep_facts(struct trial *t) {
    for (int role = OUT; role < NUM_ROLES; role++)
        if (t->truth[role] && role != LSE && role != LSE_LOW) {
            const struct layout l = layout_of(t, (enum role)role);
            struct head_facts *facts = calloc((size_t)l.heads + 1, sizeof *facts);
            for (int64_t head = 0; head < l.heads; head++)
                facts[head] = facts_of(t, (enum role)role, &l, head);
            t->clean[role] = facts;
        }
}

/* Of a row of out. */
static double largest_weight(const struct trial *t, int64_t row) {
    const int64_t rows = t->varlen ? t->total_q : t->seqlen_q, h = row % t->heads, i = row / t->heads;
    return t->magnitude[LSE][t->varlen ? h * rows + i : (i / rows * t->heads + h) * rows + i % rows];
}

/* What rounding may leave in an element; 0 where the baseline was NaN. */
static double magnitude_of(const struct trial *t, enum role role, int64_t n) {
    return t->magnitude[role] && !isnan(t->magnitude[role][n]) ? t->magnitude[role][n] : 0;
}

static int compare_rows(const struct trial *t, const char *kernel, enum role role) {
    const struct layout l = layout_of(t, role);
    const fdm_dtype dtype = fdm_dtype_of(&t->g[role].tensor);
    const double factor = (dtype == FDM_FLOAT32 ? slack[role].float32 : slack[role].narrow) * eps_of(dtype);
    for (int64_t head = 0; head < l.heads; head++) {
        struct head_facts f = facts_of(t, role, &l, head);
        double rms = f.count > 0 ? sqrt(f.square / f.count) : 0, square = 0, baseline_square = 0, doubt = 0;
        int64_t told = 0; /* elements of rows that are not 0 */
        for (int64_t r = head; r < l.rows; r += l.heads) {
            double largest = rms, row_square = 0;
            for (int64_t n = r * l.width; n < (r + 1) * l.width; n++)
                largest = fabs(t->truth[role][n]) > largest ? fabs(t->truth[role][n]) : largest;
            double row_limit = 2 * f.worst_baseline + factor * largest + 4 * step_of(dtype);
            row_limit *= sums_in_float16(kernel) ? FLOAT16_SUMS : 1;
            for (int64_t n = r * l.width; n < (r + 1) * l.width; n++) {
                double limit = row_limit + magnitude_of(t, role, n);
                double have = guarded_get(&t->g[role], n), want = t->truth[role][n];
                if (isnan(have) && (isnan(want) || trial_may_be_nan(t, role, n)))
                    continue;
                if (isnan(want)) /* unless the NaN came with weights below 1e-30 alone, the baseline is NaN, too */
                    want = t->baseline[role][n];
                const double error = fabs(have - want);
                if (!(error <= limit)) {
                    report(t, kernel, role, n, have, want, limit);
                    return 0;
                }
                square += error * error;
                row_square += want * want;
                doubt += magnitude_of(t, role, n) * magnitude_of(t, role, n);
                baseline_square += (t->baseline[role][n] - want) * (t->baseline[role][n] - want);
            }
            /* The largest weight of a row is 1 in the baseline; relative to an older maximum it is rounded once, in all
             * rows of the same keys alike. */
            const double weight = role == OUT ? 0.5 * eps_of(dtype) * largest_weight(t, r) : 0;
            baseline_square += weight * weight * row_square;
            told += row_square > 0 ? l.width : 0;
        }
        /* Roundings that maxima hide show in the mean: many elements, 16-bit output. Where the baseline is exact (rows
         * of one key, equal weights), one rounding of each weight is still allowed: eps / 2 / sqrt(3). */
        double ratio = role == OUT ? 1.2 : 1.3, rounding = 0.29 * eps_of(dtype) * rms;
        if (f.count > 0 && sqrt(baseline_square / f.count) < rounding)
            baseline_square = rounding * rounding * f.count;
        if (told >= 20000 && dtype != FDM_FLOAT32 && !sums_in_float16(kernel) &&
            sqrt(square / f.count) >
                ratio * sqrt(baseline_square / f.count) + 0.05 * eps_of(dtype) * rms + 0.1 * sqrt(doubt / f.count)) {
            report(t, kernel, role, -1, sqrt(square / f.count), sqrt(baseline_square / f.count), ratio);
            return 0;
        }
    }
    return 1;
}

static int compare_lse(const struct trial *t, const char *kernel) {
    int64_t elements = guarded_elements(&t->g[LSE]);
    for (int64_t n = 0; n < elements; n++) {
        double have = guarded_get(&t->g[LSE], n), want = t->truth[LSE][n];
        double size = fabs(want) > 1 ? fabs(want) : 1, eps = sums_in_float16(kernel) ? 0x1p-6 : 4e-6;
        double limit = 2 * fabs(t->baseline[LSE][n] - want) + eps * size + exp2_error(kernel);
        if (t->head_dim > 128) /* sums of so many terms are cut off: sum_doubt() in truth.c */
            limit += magnitude_of(t, LSE_LOW, n);
        int right = isinf(want) ? have == want : isnan(want) ? isnan(have) : fabs(have - want) <= limit;
        right |= isnan(have) && trial_may_be_nan(t, LSE, n);
        if (!right) {
            report(t, kernel, LSE, n, have, want, limit);
            return 0;
        }
    }
    return 1;
}

/* Against the baseline's, since no float64 holds both numbers beside the lowest bias: lse + lse_low is the logarithm.
 * Of its two terms, the largest score and the logarithm of a sum, the latter is at most log Sk, and 4e-6 of it may be
 * off. */
static int compare_lse_low(const struct trial *t, const char *kernel) {
    const int64_t elements = t->g[LSE_LOW].map ? guarded_elements(&t->g[LSE_LOW]) : 0;
    for (int64_t n = 0; n < elements; n++) {
        const double lse = t->baseline[LSE][n], low = guarded_get(&t->g[LSE_LOW], n), want = t->baseline[LSE_LOW][n];
        const double have = isinf(lse) ? low : guarded_get(&t->g[LSE], n) - lse + low;
        const double size = fmax(fmax(fabs(want), 1), fmin(fabs(lse), log((double)t->seqlen_k)));
        const double limit = t->magnitude[LSE_LOW][n] + 4e-6 * size + exp2_error(kernel);
        if (!(fabs(have - want) <= limit) && !isnan(t->truth[LSE][n]) && !trial_may_be_nan(t, LSE_LOW, n)) {
            report(t, kernel, LSE_LOW, n, have, want, limit);
            return 0;
        }
    }
    return 1;
}

int trial_compare(const struct trial *t, fdm_pass pass, const char *kernel) {
    if (pass == FDM_FORWARD)
        return compare_lse(t, kernel) && compare_lse_low(t, kernel) && compare_rows(t, kernel, OUT);
    int right = 1;
    for (int role = DQ; role < NUM_ROLES && right; role++)
        right = !t->g[role].map || compare_rows(t, kernel, (enum role)role);
    return right;
}
