/* placement_check.c: attention whose results lie where they may: out in the place of q, and dq, dk and dv between each
 * other's rows as views of one tensor, where they have the bits of those in tensors of their own; and dk and dv of 16
 * bits in float32, which round to them, added to what is there too. By every kernel of this machine, of a CUDA device
 * or of the emulated one. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"
#include "subjects.h"

/* DQKV: dq, dk and dv in one tensor. */
enum { Q, K, V, MASK, BIAS, START, END, CU_Q, CU_K, OUT, LSE, DOUT, DQ, DK, DV, DQKV, WIDE_DK, WIDE_DV, NUM_TENSORS };

/* spoiled: keys that are hidden hold NaN, so that rows are done again. With as many keys as rows, gradients too. */
static const struct form {
    const char *what;
    fdm_dtype dtype;
    int64_t batch, heads, heads_kv, rows, keys, head_dim;
    int causal, mask, bias, intervals, packed, spoiled;
} forms[] = {
    {"causal", FDM_FLOAT16, 2, 4, 2, 150, 200, 64, 1, 0, 0, 0, 0, 0},
    {"NaN after some rows' last key", FDM_FLOAT16, 2, 4, 2, 150, 200, 64, 1, 0, 0, 0, 0, 1},
    {"mask", FDM_BFLOAT16, 1, 3, 3, 130, 300, 128, 0, 1, 0, 0, 0, 0},
    {"mask over NaN", FDM_BFLOAT16, 1, 3, 3, 130, 300, 128, 0, 1, 0, 0, 0, 1},
    {"bias", FDM_BFLOAT16, 1, 2, 1, 200, 150, 96, 0, 0, 1, 0, 0, 1},
    {"columns that are no multiple of 16 bytes", FDM_FLOAT16, 1, 2, 2, 70, 90, 37, 1, 0, 0, 0, 0, 0},
    {"intervals", FDM_FLOAT16, 1, 2, 1, 200, 700, 64, 1, 0, 0, 1, 0, 1},
    {"head dim 256", FDM_FLOAT16, 1, 2, 2, 140, 200, 256, 1, 0, 0, 0, 0, 1},
    {"head dim 512", FDM_BFLOAT16, 1, 2, 1, 100, 130, 512, 1, 0, 0, 0, 0, 1},
    {"head dim 1024", FDM_FLOAT16, 1, 2, 2, 70, 100, 1024, 1, 0, 0, 0, 0, 1},
    {"one row", FDM_BFLOAT16, 2, 8, 2, 1, 2100, 64, 0, 0, 0, 0, 0, 0},
    {"a few rows of few heads", FDM_FLOAT16, 1, 2, 1, 5, 1500, 128, 1, 0, 0, 0, 0, 1},
    {"rows that keys are split for", FDM_FLOAT16, 1, 2, 2, 128, 2000, 64, 0, 0, 0, 0, 0, 0},
    {"packed", FDM_FLOAT16, 3, 4, 2, 100, 130, 64, 1, 0, 0, 0, 1, 1},
    {"packed, head dim 128", FDM_BFLOAT16, 3, 2, 2, 100, 130, 128, 0, 0, 0, 0, 1, 0},
    {"packed, few rows", FDM_BFLOAT16, 3, 8, 1, 3, 600, 128, 0, 0, 0, 0, 1, 0},
    {"float32", FDM_FLOAT32, 1, 2, 1, 100, 150, 64, 1, 0, 0, 0, 0, 1},
    {"float32, one row", FDM_FLOAT32, 1, 4, 1, 1, 1100, 64, 0, 0, 0, 0, 0, 0},
    {"float32, mask and bias", FDM_FLOAT32, 1, 2, 2, 60, 90, 200, 0, 1, 1, 0, 0, 1},
    {"float64", FDM_FLOAT64, 1, 2, 1, 9, 15, 8, 1, 1, 1, 0, 0, 1},
    {"as many keys as rows", FDM_FLOAT16, 2, 4, 2, 140, 140, 64, 1, 0, 0, 0, 0, 0},
    {"as many keys as rows, head dim 128", FDM_BFLOAT16, 1, 2, 2, 200, 200, 128, 0, 1, 0, 0, 0, 1},
    {"as many keys as rows, head dim 40", FDM_FLOAT16, 1, 3, 1, 90, 90, 40, 1, 0, 0, 1, 0, 0},
    {"as many keys as rows, packed", FDM_FLOAT16, 3, 2, 2, 100, 100, 64, 1, 0, 0, 0, 1, 1},
    {"as many keys as rows, float32", FDM_FLOAT32, 1, 2, 1, 70, 70, 64, 1, 0, 0, 0, 0, 1},
    {"as many keys as rows, float64", FDM_FLOAT64, 1, 2, 1, 9, 9, 8, 1, 0, 1, 0, 0, 0},
};
enum { NUM_FORMS = sizeof forms / sizeof forms[0] };

/* ---- tensors, contiguous, on the host and where the kernel runs ---- */

static fdm_device_id place;
static struct {
    int64_t shape[4];
    size_t bytes;
    char *here, *there; /* on the host what is there before a call; where it runs */
    fdm_tensor tensor;
} t[NUM_TENSORS];

static void set(int n, int64_t i, double x) {
    const fdm_dtype dtype = fdm_dtype_of(&t[n].tensor);
    char *at = t[n].here + i * fdm_dtype_bytes(dtype);
    switch (dtype) {
    case FDM_FLOAT64: *(double *)(void *)at = x; break;
    case FDM_FLOAT32: *(float *)(void *)at = (float)x; break;
    case FDM_FLOAT16: *(uint16_t *)(void *)at = float_to_float16((float)x); break;
    case FDM_BFLOAT16: *(uint16_t *)(void *)at = float_to_bfloat16((float)x); break;
    case FDM_INT32: *(int32_t *)(void *)at = (int32_t)x; break;
    default: *at = x != 0;
    }
}

static void make(int n, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    int64_t elements = 1;
    for (int32_t i = 0; i < ndim; i++)
        elements *= t[n].shape[i] = shape[i];
    t[n].bytes = (size_t)(elements * fdm_dtype_bytes(dtype));
    if (fdm_memory_allocate(host, t[n].bytes, (void **)&t[n].here) ||
        fdm_memory_allocate(place, t[n].bytes, (void **)&t[n].there))
        fail("allocating");
    t[n].tensor = (fdm_tensor){
        .data = t[n].there, .device = place, .ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = t[n].shape};
    for (int64_t i = 0; i < elements; i++)
        set(n, i, 2 * random_number());
}

static void upload(void) {
    for (int n = 0; n < NUM_TENSORS; n++)
        if (fdm_memory_copy(t[n].there, place, t[n].here, host, t[n].bytes))
            fail("uploading");
}

static void release(void) {
    for (int n = 0; n < NUM_TENSORS; n++) {
        fdm_memory_release(host, t[n].here);
        fdm_memory_release(place, t[n].there);
    }
    memset(t, 0, sizeof t);
}

/* ---- problems ---- */

/* Keys that mask, bias and intervals hide. */
static int is_hidden(int64_t key) { return key % 16 == 4 && key > 16; }

static void make_tensors(const struct form *f) {
    const int packed = f->packed;
    const int64_t rows = packed ? f->batch * f->rows + 7 : f->rows, keys = packed ? f->batch * f->keys + 7 : f->keys;
    const int64_t q[4] = {f->batch, rows, f->heads, f->head_dim}, k[4] = {f->batch, keys, f->heads_kv, f->head_dim};
    const int64_t qkv[4] = {f->batch, rows, f->heads + 2 * f->heads_kv, f->head_dim};
    const int64_t pairs[4] = {1, f->heads, f->rows, f->keys}, lse[3] = {f->batch, f->heads, rows};
    const int64_t ends[3] = {f->batch, f->heads_kv, keys}, offsets[1] = {f->batch + 1};
    static const int like_q[] = {Q, OUT, DOUT, DQ}, like_k[] = {K, V, DK, DV};
    for (int i = 0; i < 4; i++) {
        make(like_q[i], f->dtype, 4 - packed, q + packed);
        make(like_k[i], f->dtype, 4 - packed, k + packed);
    }
    make(DQKV, f->dtype, 4 - packed, qkv + packed);
    make(WIDE_DK, FDM_FLOAT32, 4 - packed, k + packed);
    make(WIDE_DV, FDM_FLOAT32, 4 - packed, k + packed);
    make(LSE, f->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32, 3 - packed, lse + packed);
    make(MASK, FDM_BOOL, 4, pairs);
    make(BIAS, f->dtype, 4, pairs);
    make(START, FDM_INT32, 3 - packed, ends + packed);
    make(END, FDM_INT32, 3 - packed, ends + packed);
    make(CU_Q, FDM_INT32, 1, offsets);
    make(CU_K, FDM_INT32, 1, offsets);
}

static void fill_tensors(const struct form *f) {
    const int64_t columns = f->heads_kv * f->head_dim, of_k = (int64_t)t[K].bytes / fdm_dtype_bytes(f->dtype);
    const int64_t all_keys = f->packed ? of_k : f->keys, of_ends = (int64_t)t[END].bytes / 4;
    for (int64_t i = 0; f->spoiled && i < of_k; i++)
        if (is_hidden(i / columns % all_keys))
            set(i % 2 ? K : V, i, NAN);
    for (int64_t i = 0; i < f->heads * f->rows * f->keys; i++) {
        const int64_t key = i % f->keys, row = i / f->keys % f->rows;
        const int hidden = is_hidden(key) || (row == 3 && key < 40);
        set(MASK, i, !hidden && random_number() < 0.6);
        if (hidden)
            set(BIAS, i, -INFINITY);
    }
    for (int64_t i = 0; i < of_ends; i++) {
        set(START, i, (double)below(f->rows));
        set(END, i, is_hidden(i % all_keys) ? 0 : (double)below(f->rows + 40));
    }
    for (int64_t b = 0; b <= f->batch; b++) { /* rows of no sequence at both ends, one sequence a row short */
        set(CU_Q, b, (double)(3 + b * f->rows - (b == 1)));
        set(CU_K, b, (double)(2 + b * f->keys - (b == 1)));
    }
}

static fdm_tensors tensors_of(const struct form *f, fdm_pass pass) {
    const int backward = pass == FDM_BACKWARD;
    return (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
                         .q = &t[Q].tensor,
                         .k = &t[K].tensor,
                         .v = &t[V].tensor,
                         .mask = f->mask ? &t[MASK].tensor : NULL,
                         .bias = f->bias ? &t[BIAS].tensor : NULL,
                         .interval_start = f->intervals ? &t[START].tensor : NULL,
                         .interval_end = f->intervals ? &t[END].tensor : NULL,
                         .cu_seqlens_q = f->packed ? &t[CU_Q].tensor : NULL,
                         .cu_seqlens_k = f->packed ? &t[CU_K].tensor : NULL,
                         .out = &t[OUT].tensor,
                         .lse = &t[LSE].tensor,
                         .dout = backward ? &t[DOUT].tensor : NULL,
                         .dq = backward ? &t[DQ].tensor : NULL,
                         .dk = backward ? &t[DK].tensor : NULL,
                         .dv = backward ? &t[DV].tensor : NULL};
}

static fdm_options options_of(const struct form *f) {
    fdm_options options = fdm_options_default();
    options.causal = f->causal;
    options.deterministic = 1;
    options.max_seqlen_q = f->packed ? f->rows + 1 : 0;
    options.max_seqlen_k = f->packed ? f->keys + 1 : 0;
    return options;
}

/* out and lse that a backward reads: those of the CPU. */
static void make_results(const struct form *f) {
    const fdm_tensors tensors = tensors_of(f, FDM_FORWARD);
    const fdm_options options = options_of(f);
    for (int n = 0; n < NUM_TENSORS; n++)
        t[n].tensor.data = t[n].here, t[n].tensor.device = host;
    if (fdm_attention_forward(&tensors, &options, NULL))
        fail("the CPU's forward");
    for (int n = 0; n < NUM_TENSORS; n++)
        t[n].tensor.data = t[n].there, t[n].tensor.device = place;
}

/* ---- results ---- */

/* A result, and the number of the tensor in whose memory it lies. */
struct result {
    int memory;
    int64_t strides[4];
    fdm_tensor tensor;
};

static struct result own(int n) { return (struct result){.memory = n, .tensor = t[n].tensor}; }

/* Where a tensor is some heads of DQKV, from `head` on; its strides are set where it stays. */
static struct result view(int n, int64_t head) {
    struct result r = {.memory = DQKV, .tensor = t[n].tensor};
    const int32_t ndim = r.tensor.ndim;
    const int64_t columns = t[DQKV].shape[ndim - 1], row = t[DQKV].shape[ndim - 2] * columns;
    const int64_t strides[4] = {t[DQKV].shape[ndim - 3] * row, row, columns, 1};
    memcpy(r.strides, strides + 4 - ndim, (size_t)ndim * sizeof *strides);
    r.tensor.data = t[DQKV].there;
    r.tensor.byte_offset = (uint64_t)(head * columns * fdm_dtype_bytes(fdm_dtype_of(&r.tensor)));
    return r;
}

/* Its elements one after the other; returns what is behind them. */
static char *gather(const struct result *r, char *to) {
    const fdm_tensor *x = &r->tensor;
    const size_t bytes = (size_t)fdm_dtype_bytes(fdm_dtype_of(x));
    char *image = malloc(t[r->memory].bytes);
    if (!image || fdm_memory_copy(image, host, t[r->memory].there, place, t[r->memory].bytes))
        fail("downloading");
    int64_t count = 1;
    for (int32_t i = 0; i < x->ndim; i++)
        count *= x->shape[i];
    for (int64_t n = 0; n < count; n++, to += bytes) {
        int64_t rest = n, at = 0;
        for (int32_t i = x->ndim - 1; i >= 0; rest /= x->shape[i--])
            at += rest % x->shape[i] * r->strides[i];
        memcpy(to, image + x->byte_offset + (size_t)(x->strides ? at : n) * bytes, bytes);
    }
    free(image);
    return to;
}

/* Runs the plan and returns the elements of its results, *bytes of them; NULL where it fails. */
static char *run(const fdm_plan *plan, const fdm_tensors *tensors, const struct result *results, int count,
                 size_t *bytes) {
    void *workspace = NULL;
    size_t most = 0;
    for (int i = 0; i < count; i++)
        most += t[results[i].memory].bytes;
    char *elements = malloc(most), *end = elements;
    if (!elements || fdm_memory_allocate(place, (size_t)plan->workspace_bytes + 64, &workspace))
        fail("allocating");
    upload();
    const int failed =
        fdm_execute(plan, tensors, workspace, (size_t)plan->workspace_bytes, NULL) || fdm_synchronize(place);
    for (int i = 0; !failed && i < count; i++)
        end = gather(&results[i], end);
    *bytes = (size_t)(end - elements);
    fdm_memory_release(place, workspace);
    if (!failed)
        return elements;
    printf("WRONG %s\n", fdm_last_error());
    free(elements);
    return NULL;
}

/* Whether the results in their places are the bits of those in tensors of their own. */
static int is_right(const fdm_plan *plan, const struct form *f) {
    const int backward = plan->problem.pass == FDM_BACKWARD, count = backward ? 3 : 2;
    fdm_tensors tensors = tensors_of(f, plan->problem.pass);
    struct result apart[3], placed[3];
    size_t bytes = 0, placed_bytes = 0;
    if (backward) {
        apart[0] = own(DQ), apart[1] = own(DK), apart[2] = own(DV);
        placed[0] = view(DQ, 0), placed[1] = view(DK, f->heads), placed[2] = view(DV, f->heads + f->heads_kv);
        for (int i = 0; i < count; i++)
            placed[i].tensor.strides = placed[i].strides;
    } else {
        apart[0] = own(OUT), apart[1] = placed[1] = own(LSE);
        placed[0] = own(Q);
    }
    char *a = run(plan, &tensors, apart, count, &bytes);
    if (backward)
        tensors.dq = &placed[0].tensor, tensors.dk = &placed[1].tensor, tensors.dv = &placed[2].tensor;
    else
        tensors.out = &t[Q].tensor;
    char *b = run(plan, &tensors, placed, count, &placed_bytes);
    const int right = a && b && bytes == placed_bytes && memcmp(a, b, bytes) == 0;
    free(a);
    free(b);
    return right;
}

/* ---- float32 gradients of 16-bit tensors ---- */

static uint16_t rounded(float x, fdm_dtype dtype) {
    return dtype == FDM_FLOAT16 ? float_to_float16(x) : float_to_bfloat16(x);
}

/* dk and dv in float32, one behind the other, by the way of the kernel that `like` is; NULL where it has none. */
static float *run_wide(const fdm_device *device, const struct form *f, const fdm_plan *like, int add, size_t *bytes,
                       int *refused) {
    fdm_tensors tensors = tensors_of(f, FDM_BACKWARD);
    fdm_options options = options_of(f);
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    const struct result results[] = {own(WIDE_DK), own(WIDE_DV)};
    tensors.dk = &t[WIDE_DK].tensor, tensors.dv = &t[WIDE_DV].tensor;
    options.add_dkv = add;
    options.kernel = like->choice;
    if (fdm_describe(FDM_BACKWARD, &tensors, &options, &problem))
        fail("describing");
    *refused = fdm_plan_attention(device, &problem, &options, &plan) == FDM_ERROR_UNSUPPORTED;
    return *refused ? NULL : (float *)(void *)run(&plan, &tensors, results, 2, bytes);
}

/* Whether float32 gradients round to those of 16 bits, and are added to what is there. *ways counts the kernel's. */
static int is_wide_right(const fdm_device *device, const fdm_plan *plan, const struct form *f, int *ways) {
    const fdm_tensors tensors = tensors_of(f, FDM_BACKWARD);
    const struct result narrow[] = {own(DK), own(DV)};
    size_t bytes = 0, wide_bytes = 0;
    int refused = 0;
    if (f->dtype != FDM_FLOAT16 && f->dtype != FDM_BFLOAT16)
        return 1;
    float *alone = run_wide(device, f, plan, 0, &wide_bytes, &refused);
    if (refused)
        return 1;
    float *added = run_wide(device, f, plan, 1, &wide_bytes, &refused);
    uint16_t *plain = (uint16_t *)(void *)run(plan, &tensors, narrow, 2, &bytes);
    const int64_t count = (int64_t)bytes / 2, of_k = count / 2;
    int right = alone && added && plain && wide_bytes == 2 * bytes;
    for (int64_t i = 0; right && i < count; i++) {
        const float *there = (const float *)(const void *)t[i < of_k ? WIDE_DK : WIDE_DV].here;
        const float before = there[i % of_k], both = before + alone[i];
        const int close = fabsf(added[i] - both) <= 1e-5f * (1 + fabsf(before) + fabsf(alone[i]));
        right = (isnan(alone[i]) && isnan(added[i])) || (close && rounded(alone[i], f->dtype) == plain[i]);
    }
    free(alone);
    free(added);
    free(plain);
    ++*ways;
    return right;
}

/* ---- kernels ---- */

/* Gradients in one tensor want as many keys as rows. Blocks of the textbook kernels share the rows of heads that are
 * wider than 128, and read q while another of them writes: out has no business there. */
static int is_left_out(const fdm_kernel_info *kernel, const struct form *f) {
    return (kernel->pass == FDM_BACKWARD && f->rows != f->keys) ||
           (strncmp(kernel->name, "mma.split-", 10) == 0 && f->head_dim > 128);
}

/* Every way of the kernel that this share has, counted in *count, and in *wide those with float32 gradients of 16 bits;
 * returns how many are wrong. */
static int check(const struct form *f, const fdm_kernel_info *kernel, int *count, int *wide) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    int wrong = 0;
    if (is_left_out(kernel, f))
        return 0;
    make_tensors(f);
    fill_tensors(f);
    if (kernel->pass == FDM_BACKWARD)
        make_results(f);
    upload();
    fdm_tensors tensors = tensors_of(f, kernel->pass);
    if (kernel->pass == FDM_FORWARD)
        tensors.out = &t[Q].tensor;
    const fdm_options options = options_of(f);
    if (fdm_device_query(kernel->device_type, 0, &device) || fdm_describe(kernel->pass, &tensors, &options, &problem))
        fail("describing");
    for (int32_t n = 0; fdm_plan_variant(&device, &problem, kernel->name, n, &plan) == FDM_OK; n++) {
        ++*count;
        const int backward = kernel->pass == FDM_BACKWARD;
        if (is_right(&plan, f) && (!backward || is_wide_right(&device, &plan, f, wide)))
            continue;
        printf("WRONG %s, %s, variant %d, %s\n", kernel->name, f->what, n, plan.choice);
        wrong++;
    }
    release();
    return wrong;
}

int placement_checks(const struct options *o) {
    const int with_device = has_device();
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    int wrong = 0, ways = 0, missed = 0;
    for (int32_t k = 0; fdm_kernel_list(k, &kernel) == FDM_OK; k++) {
        if (o->kernel && strcmp(o->kernel, kernel.name) != 0)
            continue;
        const int on_device = kernel.device_type == FDM_CUDA;
        missed += on_device && !with_device;
        if (!kernel.available || (on_device && !with_device))
            continue;
        int count = 0, wide = 0;
        place = on_device ? cuda : host;
        for (uint64_t n = o->share.part; n < NUM_FORMS; n += o->share.parts) {
            begin_case(n + 1);
            wrong += check(&forms[n], &kernel, &count, &wide);
        }
        printf("%s: %d ways", kernel.name, count);
        printf(wide ? ", %d with float32 dk and dv\n" : "\n", wide);
        fflush(stdout);
        ways += count;
    }
    printf("%d ways, %d wrong\n", ways, wrong);
    return wrong ? 1 : ways ? 0 : missed ? EXIT_NO_DEVICE : 1;
}
