/* gemm_check.c: every gemm kernel on a CUDA device, or on the emulated one, against float64: layouts, dtypes, alpha and
 * beta, batches, extents around tiles, nothing written beside C, no NaN taken from beside A, B or C. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device_array.h"
#include "device_check.h"
#include "subjects.h"

struct trial {
    const char *kernel;
    fdm_dtype dtype;
    int64_t batch, m, n, k;
    int a_columns, b_columns, out_columns; /* 1: contiguous */
    int padding;                           /* elements between rows; 8: still multiples of 16 bytes */
    int offset;                            /* elements from a multiple of 256 bytes */
    int shared_b, in_place, accumulate16;
    double alpha, beta;
};

/* [batch, rows, columns] with contiguous rows or columns. */
static void make(struct device_array *x, const struct trial *t, int64_t batch, int64_t rows, int64_t columns,
                 int columns_contiguous) {
    const int64_t inner = columns_contiguous ? rows : columns, outer = columns_contiguous ? columns : rows;
    const int64_t pitch = (t->padding % 8 ? inner : (inner + 7) / 8 * 8) + t->padding,
                  whole = (outer * pitch + 7) / 8 * 8;
    const int64_t shape[3] = {batch, rows, columns};
    const int64_t strides[3] = {whole, columns_contiguous ? 1 : pitch, columns_contiguous ? pitch : 1};
    array_make(x, t->dtype, 3, shape, strides, t->offset);
}

/* Whole numbers and halves: sums of products are exact in float32, so that float64 says what is right but for the last
 * rounding; sums in float16 stay small. */
static void fill(struct device_array *x, int small) {
    for (int64_t i = 0; i < array_elements(x); i++)
        array_set(x, i, small ? floor(3 * random_number()) / 8 : floor(8 * random_number()) / 4);
}

static double truth_of(const struct trial *t, const struct device_array *a, const struct device_array *b,
                       const struct device_array *c, int64_t z, int64_t i, int64_t j, double *size) {
    double sum = 0, old = 0;
    *size = 0;
    for (int64_t k = 0; k < t->k; k++) {
        const double product =
            array_get(a, (z * t->m + i) * t->k + k) * array_get(b, ((t->shared_b ? 0 : z) * t->k + k) * t->n + j);
        sum += product, *size += fabs(product);
    }
    if (t->beta != 0)
        old = t->beta * array_get(c, (z * t->m + i) * t->n + j);
    *size = fabs(t->alpha) * *size + fabs(old);
    return t->alpha * sum + old;
}

/* All elements, or many of large products. */
static int is_right(const struct trial *t, const struct device_array *a, const struct device_array *b,
                    const struct device_array *c, const struct device_array *out) {
    const int64_t all = t->batch * t->m * t->n, most = 1 + (int64_t)(2e8 / (double)(t->k + 1));
    const int64_t count = all < most ? all : most, step = count ? all / count : 1;
    const double eps = t->accumulate16 ? 4e-3 : t->dtype == FDM_FLOAT16 ? 1.01 * 0x1p-11 : 1.01 * 0x1p-8;
    for (int64_t n = 0; n < count; n++) {
        const int64_t index = n * step + (step > 1 ? n % step : 0), j = index % t->n, i = index / t->n % t->m;
        double size;
        const double want = truth_of(t, a, b, c, index / t->n / t->m, i, j, &size), have = array_get(out, index);
        if (!(fabs(have - want) <= eps * (t->accumulate16 ? size : fabs(want)) + 1e-6 * size)) {
            printf("WRONG row %lld, column %lld of batch %lld is %.9g, should be %.9g\n", (long long)i, (long long)j,
                   (long long)(index / t->n / t->m), have, want);
            return 0;
        }
    }
    return 1;
}

/* The tiles that were met: what a rule chooses is what is checked. */
enum { CHOICES_MAX = 64 };
static char choices[CHOICES_MAX][64];
static int32_t num_choices;
static void note_choice(const fdm_gemm_tensors *tensors, const fdm_gemm_options *options) {
    fdm_gemm_problem problem;
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    fdm_device device = {.struct_bytes = sizeof device};
    if (fdm_describe_gemm(tensors, options, &problem) || fdm_device_query(FDM_CUDA, 0, &device) ||
        fdm_plan_gemm(&device, &problem, options->kernel, &plan))
        return;
    for (int32_t i = 0; i < num_choices; i++)
        if (strcmp(choices[i], plan.choice.choice) == 0)
            return;
    if (num_choices < CHOICES_MAX)
        memcpy(choices[num_choices++], plan.choice.choice, sizeof choices[0]);
}

/* 1 right, 0 wrong, -1 the kernel refuses. */
static int run(const struct trial *t) {
    struct device_array a, b, c, out;
    make(&a, t, t->batch, t->m, t->k, t->a_columns);
    make(&b, t, t->shared_b ? 1 : t->batch, t->k, t->n, t->b_columns);
    make(&c, t, t->batch, t->m, t->n, t->out_columns);
    make(&out, t, t->batch, t->m, t->n, t->out_columns);
    fill(&a, t->accumulate16);
    fill(&b, t->accumulate16);
    if (t->beta != 0)
        fill(&c, t->accumulate16); /* else NaN, which is not read */
    array_upload(&a);
    array_upload(&b);
    array_upload(&c);
    array_upload(&out);
    const fdm_gemm_tensors tensors = {sizeof tensors, &a.tensor, &b.tensor, &c.tensor,
                                      t->in_place ? &c.tensor : &out.tensor};
    const fdm_gemm_options options = {.struct_bytes = sizeof options,
                                      .alpha = t->alpha,
                                      .beta = t->beta,
                                      .accumulate_float16 = t->accumulate16,
                                      .kernel = t->kernel};
    const fdm_status status = fdm_gemm(&tensors, &options, &device_allocator);
    note_choice(&tensors, &options);
    int right = status == FDM_ERROR_UNSUPPORTED ? -1 : !status && fdm_synchronize(cuda) == 0;
    if (right == 0)
        printf("WRONG %s\n", fdm_last_error());
    if (right > 0) {
        struct device_array result = t->in_place ? c : out;
        result.host = malloc(result.bytes);
        if (!result.host)
            exit(1);
        memcpy(result.host, t->in_place ? c.host : out.host, result.bytes);
        right = array_download(&result);
        if (!right)
            printf("WRONG a byte beside the elements was written\n");
        right = right && is_right(t, &a, &b, &c, &result);
        free(result.host);
    }
    array_release(&a);
    array_release(&b);
    array_release(&c);
    array_release(&out);
    return right;
}

static int counts[3]; /* wrong, right, refused */
static int met, every = 1,
                from; /* problems of this kernel; those are run whose number is `from` more than a multiple */
static int counting;  /* 1: they are only counted */

static const char *name_of(const char *kernel) { return kernel ? kernel : "chosen"; }

static void check(const struct trial *t) {
    static time_t said;
    const time_t now = time(NULL);
    if (met++ % every != from % every || counting)
        return;
    if (now >= said + 10) {
        printf("%s, problem %d: %lld x [%lld, %lld, %lld]\n", name_of(t->kernel), met - 1, (long long)t->batch,
               (long long)t->m, (long long)t->n, (long long)t->k);
        fflush(stdout);
        said = now;
    }
    const int right = run(t);
    counts[right < 0 ? 2 : right]++;
    if (right == 0)
        printf("WRONG %s %s, %lld x [%lld, %lld, %lld], %s%s%s, padding %d, offset %d,%s%s%s alpha %g, beta %g\n",
               name_of(t->kernel), fdm_dtype_name(t->dtype), (long long)t->batch, (long long)t->m, (long long)t->n,
               (long long)t->k, t->a_columns ? "T" : "N", t->b_columns ? "T" : "N", t->out_columns ? "T" : "N",
               t->padding, t->offset, t->shared_b ? " shared b," : "", t->in_place ? " in place," : "",
               t->accumulate16 ? " float16 sums," : "", t->alpha, t->beta);
    fflush(stdout);
}

/* Each size of at most so many products with each pair of layouts; the other features in turn. */
static void check_kernel(const char *kernel, const int64_t (*sizes)[4], int32_t count, double most) {
    int turn = 0;
    for (int32_t i = 0; i < count; i++)
        for (int layout = 0;
             layout < 4 &&
             (double)sizes[i][0] * (double)sizes[i][1] * (double)sizes[i][2] * (double)sizes[i][3] <= most;
             layout++, turn++) {
            struct trial t = {.kernel = kernel,
                              .dtype = turn % 2 ? FDM_FLOAT16 : FDM_BFLOAT16,
                              .batch = sizes[i][3],
                              .m = sizes[i][0],
                              .n = sizes[i][1],
                              .k = sizes[i][2],
                              .a_columns = layout & 1,
                              .b_columns = layout >> 1,
                              .out_columns = turn % 7 == 3,
                              .padding = turn % 3 == 0   ? 0
                                         : turn % 3 == 1 ? 8
                                                         : 16,
                              .shared_b = turn % 5 == 2,
                              .alpha = turn % 4 == 1 ? -0.5 : 1,
                              .beta = turn % 3 == 2 ? 0.25 : 0};
            t.in_place = t.beta != 0 && turn % 2;
            check(&t);
            if (layout == turn / 4 % 4) { /* what TMA does not take */
                t.padding = turn % 5;
                t.offset = turn % 3;
                t.accumulate16 = t.dtype == FDM_FLOAT16 && t.k <= 64 &&
                                 (!kernel || strcmp(kernel, "gemm.naive") == 0 || strncmp(kernel, "gemm.mma+", 9) == 0);
                check(&t);
            }
        }
}

int gemm_checks(const struct options *o) {
    enum { BY_NAME_MAX = 1 << 23 }; /* products of a size that all kernels meet where they may be slow */
    /* m, n, k, batch: around tiles of 64 to 256, several items a block, k split, nothing */
    static const int64_t small[][4] = {{1, 8, 8, 1},       {8, 1, 8, 1},        {8, 8, 1, 2},       {0, 8, 8, 1},
                                       {8, 0, 8, 1},       {8, 8, 0, 1},        {8, 8, 8, 0},       {64, 64, 64, 1},
                                       {72, 80, 72, 2},    {128, 256, 128, 1},  {130, 264, 136, 1}, {200, 320, 56, 1},
                                       {56, 128, 2048, 1}, {120, 72, 1032, 2},  {16, 512, 520, 1},  {264, 200, 192, 3},
                                       {512, 768, 64, 1},  {640, 1024, 128, 1}, {1, 1, 700, 1},     {72, 203, 100, 2},
                                       {65, 129, 63, 1},   {1, 200, 1032, 1},   {5, 72, 264, 2},    {9, 129, 600, 1},
                                       {32, 136, 2088, 1}, {3, 64, 4096, 1},    {256, 640, 128, 1}};
    static const int64_t large[][4] = {{1024, 1024, 1024, 1}, {2048, 2048, 512, 1}, {3000, 3080, 320, 1},
                                       {16, 8192, 8192, 1},   {64, 512, 16384, 1},  {4096, 4096, 256, 1},
                                       {5120, 640, 1000, 2},  {128, 192, 8192, 3},  {5120, 5120, 256, 1},
                                       {1, 8192, 8192, 1},    {32, 4096, 1024, 2},  {8, 512, 16384, 1}};
    const char *name, *description;
    const int most = (int)given_or(o->most, 0);
    from = (int)given_or(o->from, o->share.part);
    if (!has_device())
        return EXIT_NO_DEVICE;
    int useless = 0, tried = 0;
    for (int32_t k = -1; k < 0 || fdm_gemm_kernel(k, &name, &description) == FDM_OK; k++) {
        const char *kernel = k < 0 ? NULL : name;
        if (o->kernel && strcmp(name_of(kernel), o->kernel) != 0)
            continue;
        memset(counts, 0, sizeof counts);
        num_choices = met = 0, every = (int)o->share.parts, tried = 1;
        for (counting = most > 0; counting >= 0; counting--) {
            check_kernel(kernel, small, sizeof small / sizeof small[0],
                         kernel && !o->kernel && !o->large ? BY_NAME_MAX : 1e18);
            if (o->large)
                check_kernel(kernel, large, sizeof large / sizeof large[0], 1e18);
            every = most > 0 ? (met + most - 1) / most | 1 : 1; /* odd: layouts come in fours */
            met = 0;
        }
        printf("%s: %d right, %d wrong, %d refused\n", name_of(kernel), counts[1], counts[0], counts[2]);
        for (int32_t i = 0; i < num_choices; i++)
            printf("  %s\n", choices[i]);
        if (counts[0] + counts[1] == 0)
            printf("WRONG %s took no problem of this run\n", name_of(kernel));
        useless |= counts[0] > 0 || counts[1] == 0;
    }
    if (!tried)
        printf("WRONG no kernel is named %s\n", o->kernel);
    return useless || !tried;
}
