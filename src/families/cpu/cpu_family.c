/* cpu_family.c: the CPU's kernels, the choice of instruction set and block sizes, and the way to each pass. */
#include "families/cpu/cpu_family.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "device/isa.h"
#include "device/threads.h"
#include "families/cpu/visible.h"
#include "families/families.h"
#include "problem/kv_cache.h"

/* One algorithm: a kernel for each instruction set, in the order of enum cpu_isa; the last, for AMX alone. */
struct algorithm {
    fdm_pass pass;
    const char *tag; /* in choice codes, "" or "DECODE_", so that one pass' codes are unique */
    int many_blocks; /* whether blocks of any number of query lanes may be asked for */
    int (*takes_tables)(const struct cpu_kernels *kernels); /* whether the table has what it calls */
    int (*suits)(const fdm_problem *problem);               /* preferred to the ones after it */
    void (*blocks)(const fdm_problem *problem, const struct cpu_kernels *kernels, int32_t *block_m, int32_t *block_n);
    int64_t (*workspace)(const fdm_problem *problem, const fdm_plan *plan);
    fdm_status (*execute)(const fdm_plan *plan, const struct attention *attention, void *workspace,
                          const fdm_launch *launch);
};

static int has_forward(const struct cpu_kernels *k) { return k->score && k->softmax && k->accumulate; }
static int has_backward(const struct cpu_kernels *k) { return k->score && k->gradient && k->outer && k->accumulate; }
static int has_decode(const struct cpu_kernels *k) { return k->decode && k->round_row; }
static int has_overlap(const struct cpu_kernels *k) { return has_forward(k) && k->overlap; }
static int suits_all(const fdm_problem *problem) {
    (void)problem;
    return 1;
}

/* Lanes: 512 share each packed block of keys (256: 5 % slower, measured, with top-W intervals too); fewer where that
 * leaves too few items to spread over cores: 8, since at S 512 (H 4, D 128, bfloat16) 256 lanes were 16 % faster than
 * the 128 of 16 items on two cores; a machine with many cores would want more. Keys: a score tile of 64 x 64 floats and
 * a panel fit in the first-level cache together. Operands of bfloat16 take less of it, and with 128 keys AMX was 10 %
 * faster (float16 and float32, in parts, were not). A bias of every pair is read in pieces as long as a block: with 256
 * keys float32 and bfloat16 were 3 to 5 % faster than with 64 and 128 (AMD Zen 5, S 2048), float16 no slower. */
static void forward_blocks(const fdm_problem *p, const struct cpu_kernels *kernels, int32_t *block_m,
                           int32_t *block_n) {
    enum { ITEMS_WANTED = 8 };
    const int64_t lanes = p->seqlen_q * (p->heads / p->heads_kv), columns = p->batch * p->heads_kv;
    *block_m = p->invariance ? 2 * CPU_LANES : CPU_BLOCK_LANES_MAX; /* beside invariance, of any batch */
    while (!p->invariance && *block_m > CPU_LANES && (lanes + *block_m - 1) / *block_m * columns < ITEMS_WANTED)
        *block_m /= 2;
    const int bias_of_pairs = p->has_bias && p->bias_shape[2] > 1;
    *block_n = bias_of_pairs ? 256 : p->dtype == FDM_BFLOAT16 && kernels->weights_bytes(64) > 0 ? 128 : 64;
}

static const struct algorithm algorithms[] = {
    {FDM_FORWARD, "DECODE_", 0, has_decode, cpu_decode_suits, cpu_decode_blocks, cpu_decode_workspace, cpu_decode},
    {FDM_FORWARD, "", 1, has_forward, suits_all, forward_blocks, cpu_forward_workspace, cpu_forward},
    {FDM_BACKWARD, "", 1, has_backward, suits_all, cpu_backward_blocks, cpu_backward_workspace, cpu_backward},
    {FDM_FORWARD, "OVERLAP_", 1, has_overlap, suits_all, forward_blocks, cpu_forward_overlap_workspace,
     cpu_forward_overlap},
};
enum {
    NUM_ALGORITHMS = sizeof algorithms / sizeof algorithms[0],
    NUM_CHOSEN_FREELY = NUM_ALGORITHMS - 1, /* the last runs only by name */
    NUM_KERNELS = NUM_CHOSEN_FREELY * CPU_ISA_COUNT + 1
};

static const struct algorithm *algorithm_of(int32_t index) { return &algorithms[index / CPU_ISA_COUNT]; }
static enum cpu_isa isa_of(int32_t index) {
    return index == NUM_KERNELS - 1 ? CPU_ISA_AMX : (enum cpu_isa)(index % CPU_ISA_COUNT);
}
enum cpu_isa cpu_plan_isa(const fdm_plan *plan) { return isa_of(plan->kernel_index); }

static const struct kernel_info infos[NUM_KERNELS] = {
    {"cpu.decode.scalar", "few query rows, keys in chunks, plain C", FDM_FORWARD},
    {"cpu.decode.neon", "few query rows, keys in chunks, Advanced SIMD", FDM_FORWARD},
    {"cpu.decode.avx2", "few query rows, keys in chunks, AVX2 and FMA", FDM_FORWARD},
    {"cpu.decode.avx512", "few query rows, keys in chunks, AVX-512", FDM_FORWARD},
    {"cpu.decode.avx512_bf16", "none: decode is bound by memory, cpu.decode.avx512 serves", FDM_FORWARD},
    {"cpu.decode.amx", "none: decode is bound by memory, cpu.decode.avx512 serves", FDM_FORWARD},
    {"cpu.forward.scalar", "blocked online softmax, plain C", FDM_FORWARD},
    {"cpu.forward.neon", "blocked online softmax, float32 on Advanced SIMD", FDM_FORWARD},
    {"cpu.forward.avx2", "blocked online softmax, float32 on AVX2 and FMA", FDM_FORWARD},
    {"cpu.forward.avx512", "blocked online softmax, float32 on AVX-512", FDM_FORWARD},
    {"cpu.forward.avx512_bf16", "blocked online softmax, bfloat16 dot products of AVX-512", FDM_FORWARD},
    {"cpu.forward.amx", "blocked online softmax, bfloat16 tiles of AMX", FDM_FORWARD},
    {"cpu.backward.scalar", "five products by query blocks, plain C", FDM_BACKWARD},
    {"cpu.backward.neon", "five products by query blocks, float32 on Advanced SIMD", FDM_BACKWARD},
    {"cpu.backward.avx2", "five products by query blocks, float32 on AVX2 and FMA", FDM_BACKWARD},
    {"cpu.backward.avx512", "five products by query blocks, float32 on AVX-512", FDM_BACKWARD},
    {"cpu.backward.avx512_bf16", "five products by query blocks, bfloat16 dot products of AVX-512", FDM_BACKWARD},
    {"cpu.backward.amx", "five products by query blocks, bfloat16 tiles of AMX", FDM_BACKWARD},
    {"cpu.forward.amx_overlap", "by name: softmax between tile products; never timed", FDM_FORWARD},
};

static int available(const struct family *family, int32_t index) {
    (void)family;
    const enum cpu_isa isa = isa_of(index);
    return !cpu_isa_refusal(isa) && algorithm_of(index)->takes_tables(cpu_isa_kernels(isa, FDM_FLOAT32));
}

/* ---- choice ---- */

/* Why algorithm a cannot run the problem on isa; NULL when it can. */
static const char *refusal(const struct algorithm *a, enum cpu_isa isa, const fdm_problem *p) {
    const struct cpu_kernels *kernels = cpu_isa_kernels(isa, p->dtype);
    if (!kernels)
        return "this build has no such instruction set";
    if (!(kernels->dtypes >> p->dtype & 1) || !a->takes_tables(kernels))
        return "it does not take this dtype and pass";
    if (!a->suits(p))
        return p->invariance == FDM_INVARIANCE_SCHEDULE ? "it splits keys, which invariance 2 does not allow"
                                                        : "it has too many query rows per KV head for it";
    if (p->invariance == FDM_INVARIANCE_SCHEDULE && p->window_left >= 0 && kernels->key_multiple > 1)
        return "it takes neighbouring keys together, from wherever a window begins";
    return NULL;
}

static const char *problem_refusal(const fdm_problem *p) {
    if (p->dtype == FDM_FLOAT64)
        return "float64 is computed by the reference family only";
    if (p->head_dim > CPU_HEAD_DIM_MAX || p->head_dim_v > CPU_HEAD_DIM_MAX)
        return "head dims are at most 256";
    if (p->seqlen_q > INT32_MAX || p->seqlen_k > INT32_MAX)
        return "sequences are shorter than 2^31";
    if (p->invariance == FDM_INVARIANCE_SCHEDULE &&
        (p->has_mask || p->has_bias || p->has_intervals || p->has_row_intervals || p->block_mask_size || p->has_tree))
        return "keys that masks, biases, intervals or trees hide are left out by blocks of rows, which invariance 2 "
               "does not "
               "allow";
    return NULL;
}

/* "CPU_AVX512_256x64": the instruction set, query lanes x keys of one step. */
static void choice_code(char *code, size_t size, const struct algorithm *a, enum cpu_isa isa, int32_t block_m,
                        int32_t block_n) {
    char upper[16];
    snprintf(upper, sizeof upper, "%s", cpu_isa_name(isa));
    for (char *c = upper; *c; c++)
        *c = (char)(*c >= 'a' && *c <= 'z' ? *c - 'a' + 'A' : *c);
    snprintf(code, size, "CPU_%s_%s%dx%d", upper, a->tag, block_m, block_n);
}

/* Of the algorithm, and behind it of what a cache needs. */
static int64_t own_workspace(const struct algorithm *a, const fdm_problem *p, const fdm_plan *plan) {
    return (a->workspace(p, plan) + 63) / 64 * 64;
}
static int64_t whole_workspace(const struct algorithm *a, const fdm_problem *p, const fdm_plan *plan) {
    return p->has_cache ? own_workspace(a, p, plan) + cache_workspace(p) : a->workspace(p, plan);
}

static void fill(const struct plan_request *request, int32_t index, int32_t block_m, fdm_plan *plan) {
    const struct algorithm *a = algorithm_of(index);
    const enum cpu_isa isa = isa_of(index);
    a->blocks(request->problem, cpu_isa_kernels(isa, request->problem->dtype), &plan->block_m, &plan->block_n);
    if (block_m > 0)
        plan->block_m = block_m;
    plan->kernel_index = index;
    snprintf(plan->kernel, sizeof plan->kernel, "%s", infos[index].name);
    choice_code(plan->choice, sizeof plan->choice, a, isa, plan->block_m, plan->block_n);
    plan->workspace_bytes = whole_workspace(a, request->problem, plan);
}

/* A forced kernel: a kernel's name, or a choice code with any of the block sizes there are. */
static int choose_forced(const struct plan_request *request, enum cpu_isa highest, fdm_plan *plan,
                         struct refusals *refusals) {
    const char *why = "is not a kernel of this family for this pass";
    for (int32_t i = 0; i < NUM_KERNELS; i++) {
        const struct algorithm *a = algorithm_of(i);
        const enum cpu_isa isa = isa_of(i);
        int named = strcmp(infos[i].name, request->kernel) == 0;
        if (named && a->pass != request->problem->pass)
            why = "is for the other pass";
        else if (named && !cpu_isa_kernels(isa, request->problem->dtype))
            why = "uses an instruction set that this build does not have";
        if (a->pass != request->problem->pass || !cpu_isa_kernels(isa, request->problem->dtype))
            continue;
        int32_t most = a->many_blocks ? CPU_BLOCK_LANES_MAX : 0; /* decode's step is what it is */
        for (int32_t block_m = 0; block_m <= most; block_m = block_m ? 2 * block_m : CPU_LANES) {
            if (!refusal(a, isa, request->problem))
                fill(request, i, block_m, plan);
            if (!named && strcmp(plan->choice, request->kernel) != 0)
                continue;
            why = isa > highest ? "needs an instruction set above the device's" : refusal(a, isa, request->problem);
            if (!why) {
                snprintf(plan->reason, sizeof plan->reason, "kernel '%s' was asked for", request->kernel);
                return 1;
            }
            named = 1;
        }
    }
    return family_refuse(refusals, request->kernel, why);
}

/* Below amx the processor is Intel's, whose bfloat16 dot product is slower than its float32 FMA. A head of less than a
 * few AMX tiles (16 rows x 16 keys x 32) is done before their packing is. */
static int worth_trying(enum cpu_isa isa, enum cpu_isa best, const fdm_problem *p) {
    if (p->invariance) /* sizes of others do not count */
        return isa != CPU_ISA_AVX512_BF16 || best != CPU_ISA_AMX;
    double num_rows = (double)p->seqlen_q * (double)p->heads / (double)p->heads_kv;
    if (isa == CPU_ISA_AMX && num_rows * (double)p->seqlen_k * (double)p->head_dim < 4 * 16 * 16 * 32)
        return 0;
    return !(isa == CPU_ISA_AVX512_BF16 && best == CPU_ISA_AMX);
}

static void explain(const struct plan_request *request, enum cpu_isa isa, fdm_plan *plan) {
    const int decode = *algorithm_of(plan->kernel_index)->tag != 0;
    const char *by_name = request->device->isa_by_name;
    snprintf(
        plan->reason, sizeof plan->reason,
        decode ? "%s is the best instruction set for %s with few query rows on this device (%s); steps of %d query "
                 "rows and %d keys read memory in order"
               : "%s is the best instruction set for %s of this size on this device (%s); blocks of %d query "
                 "lanes share packed keys, %d at a time",
        cpu_isa_name(isa), fdm_dtype_name(request->problem->dtype), request->device->isa, plan->block_m, plan->block_n);
    const size_t used = strlen(plan->reason);
    if (*by_name && request->problem->dtype == FDM_BFLOAT16)
        snprintf(plan->reason + used, sizeof plan->reason - used, "; %s is slower here and runs by name only", by_name);
}

static enum cpu_isa highest_of(const fdm_device *device, enum cpu_isa best) {
    const int by_name = cpu_isa_from_name(device->isa_by_name);
    return by_name > (int)best ? (enum cpu_isa)by_name : best;
}

static int choose(const struct family *family, const struct plan_request *request, fdm_plan *plan,
                  struct refusals *refusals) {
    (void)family;
    const fdm_problem *p = request->problem;
    int best = request->device->id.type == FDM_CPU ? cpu_isa_from_name(request->device->isa) : -1;
    const char *why = best < 0 ? "it runs on CPUs only" : problem_refusal(p);
    if (why)
        return family_refuse(refusals, NULL, why);
    if (request->kernel)
        return choose_forced(request, highest_of(request->device, (enum cpu_isa)best), plan, refusals);
    for (int32_t i = 0; i < NUM_CHOSEN_FREELY; i++) {
        if (algorithms[i].pass != p->pass || !algorithms[i].suits(p))
            continue;
        for (int isa = best; isa >= 0; isa--) {
            if (refusal(&algorithms[i], (enum cpu_isa)isa, p) ||
                !worth_trying((enum cpu_isa)isa, (enum cpu_isa)best, p))
                continue;
            fill(request, i * CPU_ISA_COUNT + isa, 0, plan);
            explain(request, (enum cpu_isa)isa, plan);
            return 1;
        }
    }
    char clause[100];
    snprintf(clause, sizeof clause, "no instruction set up to %s takes this dtype and pass", request->device->isa);
    return family_refuse(refusals, NULL, clause);
}

/* The first is what choose() gives; the others are its blocks of other numbers of query lanes, from the most on. */
static int variant(const struct family *family, const struct plan_request *request, int32_t index, int32_t number,
                   fdm_plan *plan, struct refusals *refusals) {
    if (!choose(family, request, plan, refusals) || number == 0)
        return number == 0 && refusals->count == 0;
    const int32_t chosen = plan->block_m;
    int32_t block_m = algorithm_of(index)->many_blocks ? CPU_BLOCK_LANES_MAX : 0;
    for (; block_m >= CPU_LANES; block_m /= 2)
        if (block_m != chosen && --number == 0)
            break;
    if (block_m < CPU_LANES)
        return 0;
    fill(request, index, block_m, plan);
    return 1;
}

/* Whether fill() can have given these. */
static int has_blocks(const struct algorithm *a, enum cpu_isa isa, const fdm_problem *p, const fdm_plan *plan) {
    int32_t block_m, block_n;
    a->blocks(p, cpu_isa_kernels(isa, p->dtype), &block_m, &block_n);
    for (int32_t m = CPU_LANES; a->many_blocks && m <= CPU_BLOCK_LANES_MAX; m *= 2)
        block_m = m == plan->block_m ? m : block_m;
    return plan->block_m == block_m && plan->block_n == block_n;
}

/* New keys into the cache and rotary embeddings, before the pass. */
struct cached_call {
    const struct attention *given;
    struct attention turned;
    int64_t num_items;
    atomic_llong next_item;
};

static void run_cached(void *argument, int32_t index) {
    struct cached_call *call = argument;
    (void)index;
    for (int64_t item; (item = atomic_fetch_add(&call->next_item, 1)) < call->num_items;)
        cache_run_item(call->given, &call->turned, item);
}

static int64_t lower_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* A plan may come from a file: what it says must be something choose() could have said. */
static fdm_status execute(const struct family *family, const fdm_plan *plan, const struct attention *attention,
                          void *workspace, const fdm_launch *launch) {
    (void)family;
    const struct algorithm *a = algorithm_of(plan->kernel_index);
    const enum cpu_isa isa = cpu_plan_isa(plan);
    const fdm_problem *p = attention->problem;
    if (plan->num_threads < 1 || problem_refusal(p) || refusal(a, isa, p) || !has_blocks(a, isa, p, plan) ||
        whole_workspace(a, p, plan) > plan->workspace_bytes)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the plan's block sizes, threads or workspace are not its kernel's");
    if (!p->has_cache)
        return a->execute(plan, attention, workspace, launch);
    struct cached_call call = {.given = attention, .turned = *attention};
    call.num_items = cache_begin(&call.turned, (char *)workspace + own_workspace(a, p, plan));
    atomic_init(&call.next_item, 0);
    if (call.num_items > 0)
        threads_run(launch ? launch->executor : NULL, (int32_t)lower_of(plan->num_threads, call.num_items), run_cached,
                    &call);
    return a->execute(plan, &call.turned, workspace, launch);
}

/* Nothing is made: it says why the kernel does not run here. */
static fdm_status prepare(const struct family *family, const fdm_plan *plan) {
    (void)family;
    const char *why = cpu_isa_refusal(cpu_plan_isa(plan));
    return why ? error_set(FDM_ERROR_UNSUPPORTED, "kernel '%s' does not run here: %s", plan->kernel, why) : FDM_OK;
}

static const struct kernel_info *kernel(const struct family *family, int32_t index) {
    (void)family;
    return &infos[index];
}

const struct family family_cpu = {.name = "cpu",
                                  .device_type = FDM_CPU,
                                  .num_kernels = NUM_KERNELS,
                                  .kernel = kernel,
                                  .available = available,
                                  .choose = choose,
                                  .variant = variant,
                                  .prepare = prepare,
                                  .execute = execute};
