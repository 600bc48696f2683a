/* command_plan.c: fdm plan. */
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cache_build.h"
#include "cli.h"
#include "companion_run.h"
#include "json_writer.h"
#include "kernel_names.h"
#include "plan_predicted.h"
#include "plan_ranks.h"
#include "plan_tiles.h"

static const char help[] =
    "usage: fdm plan [OPTION ...]\n"
    "       fdm plan --op gemm|softmax [OPTION ...]    fdm plan --op gemm --help explains it\n"
    "\n"
    "Prints which kernel a problem gets on a device, and why. The device need not be present.\n"
    "\n"
    "  --device NAME      cpu, cpu:ISA, sm_90, sm_90:smem=160K, ...  (cpu)\n"
    "  --pass PASS        forward or backward                        (forward)\n"
    "  --batch N  --heads N  --heads-kv N                            (1, 8, as heads)\n"
    "  --seqlen-q N  --seqlen-k N                                    (1024, as seqlen-q)\n"
    "  --head-dim N  --head-dim-v N                                  (64, as head-dim)\n"
    "  --dtype NAME       fp32, bf16, fp16, fp64                     (fp32)\n"
    "  --causal  --window L,R  --softcap X  --scale X\n"
    "  --mask  --bias  --intervals                 a dense mask, a full bias, key intervals\n"
    "  --key-mask  --key-bias                      a mask without rows and heads, one bias a key\n"
    "  --row-intervals N  --block-mask N           N ranges of keys a row; a mask of blocks of 64 or 128\n"
    "  --tree             a draft's rows say by bits which of its keys they see\n"
    "  --varlen           sequences packed one after the other; batch is their number, seqlen the longest\n"
    "  --topk W           key intervals as of a top-W of one bias a key, causal\n"
    "  --total N          packed rows in all, of unlike lengths  (batch x seqlen)\n"
    "  --sink  --seqused                           a learnable sink for each head; lengths on the device\n"
    "  --page-size N  --max-pages N                a KV cache in pages, and the columns of its table\n"
    "  --page-lists                                pages in lists one behind the other, in place of a table's rows\n"
    "  --cache  --cache-row  --left-padding        a KV cache without pages; each sequence names its row; hidden keys "
    "first\n"
    "  --value-in-key     v is the first head-dim-v columns of k, as in a latent cache\n"
    "  --append  --rotary N                        the call appends seqlen-q keys, and rotates N dims of q and k\n"
    "  --invariance 1|2   equal bits whatever else is in a call, or however rows are cut into calls\n"
    "  --num-splits N  --split-keys N              parts of the keys, or the keys of a part\n"
    "  --threads N  --family NAME  --kernel CODE                     force a family, a kernel by name or choice code\n"
    "  --explain  each step of the choice on its own line\n"
    "  --variants         every kernel that takes the problem there, and its choice codes\n"
    "  --predict          CUDA: every variant, by predicted time\n"
    "  --tune WISH        kept, rules, or predict: what was kept, else the model's choice where it is surely faster\n"
    "  --resources        CUDA: compiles the kernels and prints registers, spill, shared memory and resident warps\n"
    "  --json\n"
    "\n" PLAN_RANKS_HELP "\n"
    "examples: fdm plan --seqlen-q 4096 --head-dim 128 --dtype bf16 --causal\n"
    "          fdm plan --device cpu:avx2 --pass backward --json\n"
    "          fdm plan --device sm_90 --pass backward --seqlen-q 8192 --head-dim 128 --dtype bf16 --explain\n"
    "          fdm plan --device sm_86 --head-dim 128 --dtype fp16 --resources\n"
    "          fdm plan --batch 64 --heads 32 --heads-kv 8 --seqlen-q 1 --page-size 16 --max-pages 512 --append\n"
    "          fdm plan --device sm_90 --seqlen-q 131072 --heads 64 --heads-kv 8 --head-dim 128 --dtype bf16 --causal "
    "--ranks 64\n";

struct request {
    const char *device;
    fdm_problem problem;
    fdm_options options;
    int caches, appends, has_heads_kv, has_seqlen_k, has_head_dim_v, has_scale, has_key_mask, has_key_bias;
    int64_t topk, total; /* 0 = not said */
    int explain, variants, predict, resources, json;
    struct ranks_request ranks;
};

enum {
    OPT_DEVICE = 256,
    OPT_PASS,
    OPT_BATCH,
    OPT_HEADS,
    OPT_HEADS_KV,
    OPT_SEQLEN_Q,
    OPT_SEQLEN_K,
    OPT_HEAD_DIM,
    OPT_HEAD_DIM_V,
    OPT_PAGE_SIZE,
    OPT_MAX_PAGES,
    OPT_ROTARY,
    OPT_INVARIANCE,
    OPT_NUM_SPLITS,
    OPT_SPLIT_KEYS,
    OPT_ROW_INTERVALS,
    OPT_BLOCK_MASK,
    OPT_TREE,
    OPT_TOPK,
    OPT_TOTAL,
    OPT_DTYPE,
    OPT_CAUSAL,
    OPT_WINDOW,
    OPT_SOFTCAP,
    OPT_SCALE,
    OPT_MASK,
    OPT_BIAS,
    OPT_KEY_MASK,
    OPT_KEY_BIAS,
    OPT_INTERVALS,
    OPT_SINK,
    OPT_SEQUSED,
    OPT_APPEND,
    OPT_CACHE,
    OPT_CACHE_ROW,
    OPT_LEFT_PADDING,
    OPT_PAGE_LISTS,
    OPT_VALUE_IN_KEY,
    OPT_VARLEN,
    OPT_THREADS,
    OPT_FAMILY,
    OPT_KERNEL,
    OPT_EXPLAIN,
    OPT_VARIANTS,
    OPT_PREDICT,
    OPT_TUNE,
    OPT_RESOURCES,
    OPT_JSON,
    OPT_RANKS,
    OPT_NODES,
    OPT_LAYOUT,
    OPT_ALGORITHM,
    OPT_NODE_BANDWIDTH,
    OPT_NODE_LATENCY,
    OPT_NET_BANDWIDTH,
    OPT_NET_LATENCY,
    OPT_TFLOPS,
    OPT_HOST_START,
    OPT_HOST_EXCHANGE,
    OPT_SUMS_BANDWIDTH,
    OPT_MEMORY,
    OPT_HELP
};

static const struct option options[] = {{"device", required_argument, 0, OPT_DEVICE},
                                        {"pass", required_argument, 0, OPT_PASS},
                                        {"batch", required_argument, 0, OPT_BATCH},
                                        {"heads", required_argument, 0, OPT_HEADS},
                                        {"heads-kv", required_argument, 0, OPT_HEADS_KV},
                                        {"seqlen-q", required_argument, 0, OPT_SEQLEN_Q},
                                        {"seqlen-k", required_argument, 0, OPT_SEQLEN_K},
                                        {"head-dim", required_argument, 0, OPT_HEAD_DIM},
                                        {"head-dim-v", required_argument, 0, OPT_HEAD_DIM_V},
                                        {"page-size", required_argument, 0, OPT_PAGE_SIZE},
                                        {"max-pages", required_argument, 0, OPT_MAX_PAGES},
                                        {"rotary", required_argument, 0, OPT_ROTARY},
                                        {"invariance", required_argument, 0, OPT_INVARIANCE},
                                        {"num-splits", required_argument, 0, OPT_NUM_SPLITS},
                                        {"split-keys", required_argument, 0, OPT_SPLIT_KEYS},
                                        {"row-intervals", required_argument, 0, OPT_ROW_INTERVALS},
                                        {"block-mask", required_argument, 0, OPT_BLOCK_MASK},
                                        {"topk", required_argument, 0, OPT_TOPK},
                                        {"total", required_argument, 0, OPT_TOTAL},
                                        {"dtype", required_argument, 0, OPT_DTYPE},
                                        {"causal", no_argument, 0, OPT_CAUSAL},
                                        {"window", required_argument, 0, OPT_WINDOW},
                                        {"softcap", required_argument, 0, OPT_SOFTCAP},
                                        {"scale", required_argument, 0, OPT_SCALE},
                                        {"mask", no_argument, 0, OPT_MASK},
                                        {"bias", no_argument, 0, OPT_BIAS},
                                        {"key-mask", no_argument, 0, OPT_KEY_MASK},
                                        {"key-bias", no_argument, 0, OPT_KEY_BIAS},
                                        {"intervals", no_argument, 0, OPT_INTERVALS},
                                        {"sink", no_argument, 0, OPT_SINK},
                                        {"tree", no_argument, 0, OPT_TREE},
                                        {"seqused", no_argument, 0, OPT_SEQUSED},
                                        {"append", no_argument, 0, OPT_APPEND},
                                        {"cache", no_argument, 0, OPT_CACHE},
                                        {"cache-row", no_argument, 0, OPT_CACHE_ROW},
                                        {"left-padding", no_argument, 0, OPT_LEFT_PADDING},
                                        {"page-lists", no_argument, 0, OPT_PAGE_LISTS},
                                        {"value-in-key", no_argument, 0, OPT_VALUE_IN_KEY},
                                        {"varlen", no_argument, 0, OPT_VARLEN},
                                        {"threads", required_argument, 0, OPT_THREADS},
                                        {"family", required_argument, 0, OPT_FAMILY},
                                        {"kernel", required_argument, 0, OPT_KERNEL},
                                        {"explain", no_argument, 0, OPT_EXPLAIN},
                                        {"variants", no_argument, 0, OPT_VARIANTS},
                                        {"predict", no_argument, 0, OPT_PREDICT},
                                        {"tune", required_argument, 0, OPT_TUNE},
                                        {"resources", no_argument, 0, OPT_RESOURCES},
                                        {"json", no_argument, 0, OPT_JSON},
                                        {"ranks", required_argument, 0, OPT_RANKS},
                                        {"nodes", required_argument, 0, OPT_NODES},
                                        {"layout", required_argument, 0, OPT_LAYOUT},
                                        {"algorithm", required_argument, 0, OPT_ALGORITHM},
                                        {"node-bandwidth", required_argument, 0, OPT_NODE_BANDWIDTH},
                                        {"node-latency", required_argument, 0, OPT_NODE_LATENCY},
                                        {"net-bandwidth", required_argument, 0, OPT_NET_BANDWIDTH},
                                        {"net-latency", required_argument, 0, OPT_NET_LATENCY},
                                        {"tflops", required_argument, 0, OPT_TFLOPS},
                                        {"host-start", required_argument, 0, OPT_HOST_START},
                                        {"host-exchange", required_argument, 0, OPT_HOST_EXCHANGE},
                                        {"sums-bandwidth", required_argument, 0, OPT_SUMS_BANDWIDTH},
                                        {"memory", required_argument, 0, OPT_MEMORY},
                                        {"help", no_argument, 0, OPT_HELP},
                                        {0}};

static int set_names(struct request *r, int option, const char *text) {
    if (option == OPT_PASS) {
        int backward = strcmp(text, "backward") == 0;
        r->problem.pass = backward ? FDM_BACKWARD : FDM_FORWARD;
        return backward || strcmp(text, "forward") == 0 ||
               complain(0, "--pass is '%s'; it must be forward or backward", text);
    }
    r->problem.dtype = fdm_dtype_from_name(text);
    return r->problem.dtype != FDM_NO_DTYPE ||
           complain(0, "--dtype is '%s'; it must be fp32, bf16, fp16 or fp64", text);
}

static int set_extent(struct request *r, int option, const char *name, const char *text) {
    int64_t value;
    if (!parse_integer(name, text, 0, INT32_MAX, &value))
        return 0;
    switch (option) {
    case OPT_BATCH: r->problem.batch = value; break;
    case OPT_HEADS: r->problem.heads = value; break;
    case OPT_HEADS_KV: r->problem.heads_kv = value, r->has_heads_kv = 1; break;
    case OPT_SEQLEN_Q: r->problem.seqlen_q = value; break;
    case OPT_SEQLEN_K: r->problem.seqlen_k = value, r->has_seqlen_k = 1; break;
    case OPT_HEAD_DIM: r->problem.head_dim = value; break;
    case OPT_HEAD_DIM_V: r->problem.head_dim_v = value, r->has_head_dim_v = 1; break;
    case OPT_PAGE_SIZE: r->problem.page_size = (int32_t)value; break;
    case OPT_MAX_PAGES: r->problem.max_pages = (int32_t)value; break;
    case OPT_ROTARY: r->problem.rotary_dim = (int32_t)value; break;
    case OPT_INVARIANCE: r->problem.invariance = (int32_t)value; break;
    case OPT_NUM_SPLITS: r->problem.num_splits = (int32_t)value; break;
    case OPT_SPLIT_KEYS: r->problem.split_keys = (int32_t)value; break;
    case OPT_ROW_INTERVALS: r->problem.row_ranges = (int32_t)value, r->problem.has_row_intervals = 1; break;
    case OPT_BLOCK_MASK: r->problem.block_mask_size = (int32_t)value; break;
    case OPT_TOPK: r->topk = value; break;
    case OPT_TOTAL: r->total = value; break;
    default: r->options.num_threads = (int32_t)value;
    }
    return 1;
}

/* Of --ranks. 1, or 0 after a complaint; -1: it is another option. */
static int set_ranks(struct ranks_request *r, int option, const char *name, const char *text) {
    double *real = NULL;
    switch (option) {
    case OPT_RANKS: return parse_integer(name, text, 2, 65536, &r->ranks);
    case OPT_NODES: return parse_integer(name, text, 1, 65536, &r->nodes);
    case OPT_LAYOUT: r->layout = text; return 1;
    case OPT_ALGORITHM: r->algorithm = text; return 1;
    case OPT_NODE_BANDWIDTH: real = &r->node_bandwidth; break;
    case OPT_NODE_LATENCY: real = &r->node_latency; break;
    case OPT_NET_BANDWIDTH: real = &r->net_bandwidth; break;
    case OPT_NET_LATENCY: real = &r->net_latency; break;
    case OPT_TFLOPS: real = &r->tflops; break;
    case OPT_HOST_START: real = &r->host_start; break;
    case OPT_HOST_EXCHANGE: real = &r->host_exchange; break;
    case OPT_SUMS_BANDWIDTH: real = &r->sums_bandwidth; break;
    case OPT_MEMORY: real = &r->memory; break;
    default: return -1;
    }
    const int may_be_none = option == OPT_HOST_START || option == OPT_HOST_EXCHANGE || option == OPT_SUMS_BANDWIDTH;
    return parse_real(name, text, real) &&
           (*real > 0 || (may_be_none && *real == -1) ||
            complain(0, "--%s is '%s'; it must be above 0%s", name, text, may_be_none ? ", or -1" : ""));
}

static int asks_for_ranks(const struct ranks_request *r) {
    static const struct ranks_request none;
    return memcmp(r, &none, sizeof none) != 0; /* it has no padding */
}

/* 1, or 0 after a complaint. */
static int set_option(struct request *r, int option, const char *name, const char *text) {
    fdm_problem *p = &r->problem;
    switch (option) {
    case OPT_DEVICE: r->device = text; return 1;
    case OPT_PASS:
    case OPT_DTYPE: return set_names(r, option, text);
    case OPT_CAUSAL: return p->causal = 1;
    case OPT_WINDOW: return parse_window(text, &p->window_left, &p->window_right);
    case OPT_SOFTCAP: return parse_real(name, text, &p->softcap);
    case OPT_SCALE: return r->has_scale = parse_real(name, text, &p->softmax_scale);
    case OPT_MASK: return p->has_mask = 1;
    case OPT_BIAS: return p->has_bias = 1;
    case OPT_KEY_MASK: return r->has_key_mask = p->has_mask = 1;
    case OPT_KEY_BIAS: return r->has_key_bias = p->has_bias = 1;
    case OPT_INTERVALS: return p->has_intervals = 1;
    case OPT_SINK: return p->has_sink = 1;
    case OPT_TREE: return p->has_tree = 1;
    case OPT_SEQUSED: return p->has_seqused_q = p->has_seqused_k = 1;
    case OPT_APPEND: return r->caches = r->appends = 1;
    case OPT_CACHE: return r->caches = 1;
    case OPT_CACHE_ROW: return r->caches = p->has_cache_row = 1;
    case OPT_LEFT_PADDING: return r->caches = p->has_first_key = 1;
    case OPT_PAGE_LISTS: return p->ragged_pages = 1;
    case OPT_VALUE_IN_KEY: return p->value_in_key = 1;
    case OPT_VARLEN: return p->varlen = 1;
    case OPT_FAMILY: r->options.family = text; return 1;
    case OPT_KERNEL: r->options.kernel = text; return 1;
    case OPT_EXPLAIN: return r->explain = 1;
    case OPT_VARIANTS: return r->variants = 1;
    case OPT_PREDICT: return r->predict = 1;
    case OPT_TUNE:
        r->options.tune = strcmp(text, "rules") == 0     ? FDM_TUNE_RULES
                          : strcmp(text, "predict") == 0 ? FDM_TUNE_PREDICT
                                                         : FDM_TUNE_DEFAULT;
        return r->options.tune || strcmp(text, "kept") == 0 ||
               complain(0, "--tune is '%s'; it must be kept, rules or predict", text);
    case OPT_RESOURCES: return r->resources = 1;
    case OPT_JSON: return r->json = 1;
    default: break;
    }
    const int of_ranks = set_ranks(&r->ranks, option, name, text);
    return of_ranks >= 0 ? of_ranks : set_extent(r, option, name, text);
}

/* Pages enough for every sequence; without --page-size a cache is contiguous. */
static void fill_cache(struct request *r) {
    fdm_problem *p = &r->problem;
    p->has_cache = r->caches || p->page_size || p->max_pages || p->rotary_dim;
    if (!p->has_cache)
        return;
    if (p->page_size && !p->max_pages)
        p->max_pages = (int32_t)((p->seqlen_k + p->page_size - 1) / p->page_size);
    const int64_t room = (int64_t)p->page_size * p->max_pages,
                  pages = p->page_size ? p->batch * p->max_pages : p->batch;
    if (p->page_size && !r->has_seqlen_k)
        p->seqlen_k = room < INT32_MAX ? room : INT32_MAX;
    p->num_pages = (int32_t)(pages < INT32_MAX ? pages : INT32_MAX);
    if (p->ragged_pages)
        p->max_pages = p->num_pages; /* entries of all lists */
    p->new_rows = !r->appends ? 0 : p->varlen && r->total ? r->total : p->batch * p->seqlen_q;
}

static void fill_defaults(struct request *r) {
    fdm_problem *p = &r->problem;
    p->heads_kv = r->has_heads_kv ? p->heads_kv : p->heads;
    p->seqlen_k = r->has_seqlen_k ? p->seqlen_k : p->seqlen_q;
    p->head_dim_v = r->has_head_dim_v ? p->head_dim_v : p->head_dim;
    fill_cache(r);
    if (!r->has_scale && p->head_dim > 0)
        p->softmax_scale = 1 / sqrt((double)p->head_dim);
    const int64_t full[4] = {p->batch, p->heads, p->seqlen_q, p->seqlen_k};
    if (r->topk)
        p->causal = p->has_intervals = p->has_bias = r->has_key_bias = 1;
    if (p->has_mask)
        memcpy(p->mask_shape, full, sizeof full);
    if (r->has_key_mask)
        p->mask_shape[1] = p->mask_shape[2] = 1;
    if (p->has_bias)
        memcpy(p->bias_shape, full, sizeof full);
    if (r->has_key_bias) {
        p->bias_shape[1] = p->heads_kv; /* as masks are made: of each KV head */
        p->bias_shape[2] = 1;
    }
    if (p->has_intervals)
        p->interval_batch = p->batch, p->interval_heads = p->heads_kv;
    if (p->has_row_intervals)
        p->row_interval_batch = p->batch, p->row_interval_heads = p->heads_kv;
    if (p->block_mask_size)
        p->block_mask_batch = (int32_t)p->batch, p->block_mask_heads = (int32_t)p->heads_kv;
    if (p->varlen) {
        p->total_q = r->total ? r->total : p->batch * p->seqlen_q;
        p->total_k = p->has_cache ? 0 : r->total ? r->total : p->batch * p->seqlen_k;
    }
    p->bias_dtype = p->dtype;
    p->needs_dbias = p->has_bias && p->pass == FDM_BACKWARD;
    p->sink_dtype = p->dtype;
    p->needs_dsink = p->has_sink && p->pass == FDM_BACKWARD;
}

/* The steps of a reason are separated by "; ". */
static void print_steps(const char *reason) {
    for (int step = 1; *reason; step++) {
        const char *end = strstr(reason, "; ");
        int length = end ? (int)(end - reason) : (int)strlen(reason);
        printf("  %d. %.*s\n", step, length, reason);
        reason += length + (end ? 2 : 0);
    }
}

enum { KERNELS_MAX = 8, VARIANTS_MAX = 256 };
struct resources {
    fdm_kernel_resources kernels[KERNELS_MAX];
    int32_t count;
};

/* The plan's object, and in it the kernels where they were asked for. */
static void print_json(const fdm_plan *plan, const struct request *r, const struct resources *resources) {
    static char text[4096];
    fdm_plan_to_json(plan, text, sizeof text, NULL);
    if (!r->resources) {
        puts(text);
        return;
    }
    struct json_writer writer = {.stream = stdout, .needs_comma = 1};
    printf("%.*s", (int)(strrchr(text, '}') - text), text);
    json_open(&writer, "resources", '[');
    for (int32_t i = 0; i < resources->count; i++) {
        const fdm_kernel_resources *k = &resources->kernels[i];
        json_open(&writer, NULL, '{');
        json_put_text(&writer, "entry", k->entry);
        json_put_integer(&writer, "threads", k->threads);
        json_put_integer(&writer, "registers", k->registers);
        json_put_integer(&writer, "spill_bytes", k->spill_bytes);
        json_put_integer(&writer, "shared_bytes", k->shared_bytes);
        json_put_integer(&writer, "blocks_per_sm", k->blocks_per_sm);
        json_put_integer(&writer, "warps_per_sm", k->warps_per_sm);
        json_put_integer(&writer, "max_warps", k->max_warps);
        json_put_text(&writer, "bound", k->bound);
        json_close(&writer, '}');
    }
    json_close(&writer, ']');
    puts("}");
}

static void print_resources(const struct resources *resources) {
    for (int32_t i = 0; i < resources->count; i++) {
        const fdm_kernel_resources *k = &resources->kernels[i];
        printf("  %s: %d threads of %d registers, ", k->entry, k->threads, k->registers);
        k->spill_bytes ? printf("%d bytes spill, ", k->spill_bytes) : printf("no spill, ");
        printf("%lld bytes shared; %d block%s resident, %d of %d warps (%d %%), bound by %s\n",
               (long long)k->shared_bytes, k->blocks_per_sm, k->blocks_per_sm == 1 ? "" : "s", k->warps_per_sm,
               k->max_warps, (100 * k->warps_per_sm + k->max_warps / 2) / k->max_warps, k->bound);
    }
}

static void print_plan(const fdm_plan *plan, const char *device, const struct request *r) {
    printf("%s: kernel %s, choice %s\n", device, plan->kernel, plan->choice);
    if (plan->block_m)
        printf("  block      %d query %s x %d keys\n", plan->block_m, plan->device.type == FDM_CPU ? "lanes" : "rows",
               plan->block_n);
    if (plan->stages)
        printf("  stages     %d\n", plan->stages);
    if (plan->shared_bytes >= 0)
        printf("  shared     %lld bytes%s\n", (long long)plan->shared_bytes,
               plan->v_in_registers == 1 ? ", V in registers" : "");
    printf("  workspace  %lld bytes\n", (long long)plan->workspace_bytes);
    if (plan->device.type == FDM_CPU)
        printf("  threads    %d\n", plan->num_threads);
    plan_print_tiles(&plan->problem);
    r->explain ? print_steps(plan->reason) : (void)printf("  because    %s\n", plan->reason);
}

/* A line for each kernel that takes the problem on this device: its name and its choice codes; as JSON, an object of
 * lists. */
static int print_variants(const fdm_device *device, const struct request *r) {
    char codes[VARIANTS_MAX][KERNEL_CODE_MAX];
    struct json_writer writer = {.stream = stdout};
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    int32_t kernels = 0;
    for (int32_t n = 0; !fdm_kernel_list(n, &kernel); n++) {
        const int32_t count = kernel_variants(device, &r->problem, &kernel, VARIANTS_MAX, codes);
        if (count && !kernels++ && r->json)
            json_open(&writer, NULL, '{');
        if (count)
            r->json ? json_open(&writer, kernel.name, '[') : (void)printf("%s:", kernel.name);
        for (int32_t i = 0; i < count; i++)
            r->json ? json_put_text(&writer, NULL, codes[i]) : (void)printf(" %s", codes[i]);
        if (count)
            r->json ? json_close(&writer, ']') : (void)puts("");
    }
    if (!kernels) {
        fdm_plan plan = {.struct_bytes = sizeof plan};
        const fdm_status status = fdm_plan_attention(device, &r->problem, &r->options, &plan);
        if (status == FDM_ERROR_INVALID_ARGUMENT) /* a setting's */
            return fail(status);
        return complain(EXIT_WRONG, "no kernel takes this problem on %s: fdm plan says why", device->name);
    }
    if (r->json)
        puts("}");
    return EXIT_FINE;
}

/* -1: go on with the request; else the command's exit code. */
static int read_request(int argc, char **argv, struct request *r) {
    int option, index = 0;
    *r = (struct request){.device = "cpu", .problem = fdm_problem_default(), .options = fdm_options_default()};
    r->problem.heads = 8;
    r->problem.seqlen_q = 1024;
    while ((option = getopt_long(argc, argv, "", options, &index)) != -1) {
        if (option == OPT_HELP) {
            fputs(help, stdout);
            return EXIT_FINE;
        }
        if (option == '?' || !set_option(r, option, options[option - OPT_DEVICE].name, optarg))
            return EXIT_USAGE;
    }
    if (optind < argc)
        return complain(EXIT_USAGE, "plan takes no argument '%s'", argv[optind]);
    fill_defaults(r);
    return -1;
}

int plan_problem(int argc, char **argv, fdm_problem *problem, fdm_options *options_of) {
    struct request r;
    optind = 1;
    if (read_request(argc, argv, &r) >= 0)
        return 0;
    *problem = r.problem;
    *options_of = r.options;
    return 1;
}

int command_plan(int argc, char **argv) {
    struct request r;
    if (argc > 2 && strcmp(argv[1], "--op") == 0) {
        if (strcmp(argv[2], "gemm") == 0)
            return plan_gemm(argc - 2, argv + 2);
        if (strcmp(argv[2], "softmax") == 0)
            return plan_softmax(argc - 2, argv + 2);
        return complain(EXIT_USAGE, "--op is '%s'; it must be gemm or softmax, or left out for attention", argv[2]);
    }
    const int code = read_request(argc, argv, &r);
    if (code >= 0)
        return code;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_status status = fdm_device_from_name(r.device, &device);
    if (status || (status = fdm_problem_validate(&r.problem)))
        return fail(status);
    if (asks_for_ranks(&r.ranks))
        return plan_ranks(&r.ranks, &device, &r.problem, r.topk, r.json);
    if (r.variants)
        return print_variants(&device, &r);
    if (r.predict)
        return plan_predicted(&device, &r.problem, &r.options, r.topk, r.json);
    struct resources resources = {.kernels[0].struct_bytes = sizeof resources.kernels[0]};
    status = fdm_plan_attention(&device, &r.problem, &r.options, &plan);
    if (!status && r.resources)
        status = fdm_plan_resources(&plan, &device, resources.kernels, KERNELS_MAX, &resources.count);
    if (status)
        return fail(status);
    if (r.json) {
        print_json(&plan, &r, &resources);
    } else {
        print_plan(&plan, device.name, &r);
        print_resources(&resources);
    }
    return EXIT_FINE;
}
