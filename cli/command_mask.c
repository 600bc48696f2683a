/* command_mask.c: fdm mask: builds masks from tensors in files. */
#include <getopt.h>
#include <math.h>
#include <string.h>

#include "cli.h"
#include "json_writer.h"
#include "output_file.h"
#include "tensor_file.h"

static const char help[] =
    "usage: fdm mask KIND FILE.safetensors [OPTION ...]\n"
    "       fdm mask KIND --bias BIAS.npy [OPTION ...]\n"
    "\n"
    "Builds a mask from tensors of these names in the files:\n"
    "\n"
    "  topk       bias, padding          -> interval_start, interval_end: the causal top-W mask\n"
    "  create     bias, attention_mask   -> mask: the W largest biases of each row that the attention mask shows\n"
    "  dense      interval_start, _end, row_start, _end, block_mask -> mask: of all that are there\n"
    "  intervals  mask                   -> interval_start, interval_end; exit code 1 where there are none that say "
    "it\n"
    "  rules      document_ids, prefix_lengths, window_sizes, int32 -> interval_start, interval_end: of all that are "
    "there\n"
    "  blocks     mask, or as dense      -> blocks, int32: of each block the mask shows 0 nothing, 1 a part, 2 all\n"
    "\n"
    "  --bias --padding --attention-mask --mask --interval-start --interval-end FILE.npy, or a pipe\n"
    "  --document-ids --prefix-lengths --window-sizes FILE.npy, or a pipe: [B, S], [B], [H, 2]\n"
    "  --row-start --row-end --block-mask FILE.npy, or a pipe: int32 [B, h, n, Sq], bool blocks of 64 or 128\n"
    "  --topk W           keys of a row; create: 0 = those with a bias above 0. --window W is the same\n"
    "  --rows N           topk, dense, rules: rows of the query (as many as there are keys)\n"
    "  --keys N           rules, dense: keys, where no document_ids or intervals say them\n"
    "  --min X            create: the bias of a hidden key    (float32's lowest)\n"
    "  --smooth N         create: keep or drop blocks of N keys together\n"
    "  --block-q N --block-k N   blocks: rows and keys of one (128, 128)\n"
    "  --device DEVICE    cpu, cuda, cuda:N, emulated:sm_90   (cpu)\n"
    "  --out FILE         write it, as .safetensors; exit code 3 when it cannot be written\n"
    "  --json\n"
    "\n"
    "example: fdm mask topk --bias bias.npy --topk 512 --out intervals.safetensors\n";

enum role {
    BIAS,
    PADDING,
    SHOWN,
    MASK,
    START,
    END,
    BLOCKS,
    IDS,
    PREFIXES,
    WINDOWS,
    ROW_START,
    ROW_END,
    BLOCK_MASK,
    NUM_ROLES
};
static const char *const names[NUM_ROLES] = {
    "bias",         "padding",        "attention_mask", "mask",      "interval_start", "interval_end", "blocks",
    "document_ids", "prefix_lengths", "window_sizes",   "row_start", "row_end",        "block_mask"};
enum kind { TOPK, CREATE, DENSE, INTERVALS, OF_BLOCKS, RULES, NUM_KINDS };
enum { WAYS = 1 << START | 1 << END | 1 << ROW_START | 1 << ROW_END | 1 << BLOCK_MASK };
static const struct {
    const char *name;
    unsigned needs, takes, makes; /* bits of roles */
} kinds[NUM_KINDS] = {{"topk", 1 << BIAS, 1 << PADDING, 1 << START | 1 << END},
                      {"create", 1 << BIAS, 1 << SHOWN, 1 << MASK},
                      {"dense", 0, WAYS, 1 << MASK},
                      {"intervals", 1 << MASK, 0, 1 << START | 1 << END},
                      {"blocks", 0, 1 << MASK | WAYS, 1 << BLOCKS},
                      {"rules", 0, 1 << IDS | 1 << PREFIXES | 1 << WINDOWS, 1 << START | 1 << END}};

struct request {
    enum kind kind;
    struct tensor_file file;
    struct file_tensor tensors[NUM_ROLES]; /* data NULL: there is none */
    fdm_tensor views[NUM_ROLES];           /* on the device */
    struct device_choice device;
    int64_t topk, rows, keys, smooth, block_q, block_k, block;
    double min_value;
    int json, of_ways; /* of_ways: the mask is made of intervals and blocks */
    int32_t exact;     /* of intervals */
    const char *out;
};

enum {
    OPT_TOPK = 256,
    OPT_ROWS,
    OPT_KEYS,
    OPT_SMOOTH,
    OPT_BLOCK_Q,
    OPT_BLOCK_K,
    OPT_MIN,
    OPT_DEVICE,
    OPT_OUT,
    OPT_JSON,
    OPT_HELP,
    OPT_FILE
};

static const struct option options[] = {{"topk", required_argument, 0, OPT_TOPK},
                                        {"window", required_argument, 0, OPT_TOPK}, /* its old name */
                                        {"rows", required_argument, 0, OPT_ROWS},
                                        {"keys", required_argument, 0, OPT_KEYS},
                                        {"smooth", required_argument, 0, OPT_SMOOTH},
                                        {"block-q", required_argument, 0, OPT_BLOCK_Q},
                                        {"block-k", required_argument, 0, OPT_BLOCK_K},
                                        {"min", required_argument, 0, OPT_MIN},
                                        {"device", required_argument, 0, OPT_DEVICE},
                                        {"out", required_argument, 0, OPT_OUT},
                                        {"json", no_argument, 0, OPT_JSON},
                                        {"help", no_argument, 0, OPT_HELP},
                                        {"bias", required_argument, 0, OPT_FILE + BIAS},
                                        {"padding", required_argument, 0, OPT_FILE + PADDING},
                                        {"attention-mask", required_argument, 0, OPT_FILE + SHOWN},
                                        {"mask", required_argument, 0, OPT_FILE + MASK},
                                        {"interval-start", required_argument, 0, OPT_FILE + START},
                                        {"interval-end", required_argument, 0, OPT_FILE + END},
                                        {"document-ids", required_argument, 0, OPT_FILE + IDS},
                                        {"prefix-lengths", required_argument, 0, OPT_FILE + PREFIXES},
                                        {"window-sizes", required_argument, 0, OPT_FILE + WINDOWS},
                                        {"row-start", required_argument, 0, OPT_FILE + ROW_START},
                                        {"row-end", required_argument, 0, OPT_FILE + ROW_END},
                                        {"block-mask", required_argument, 0, OPT_FILE + BLOCK_MASK},
                                        {0}};

/* ---- options and files ---- */

/* 1, or 0 after a complaint. */
static int set_option(struct request *r, int option, const char *text) {
    switch (option) {
    case OPT_TOPK: return parse_integer("--topk", text, 0, INT32_MAX, &r->topk);
    case OPT_ROWS: return parse_integer("--rows", text, 0, INT32_MAX, &r->rows);
    case OPT_KEYS: return parse_integer("--keys", text, 0, INT32_MAX, &r->keys);
    case OPT_SMOOTH: return parse_integer("--smooth", text, 1, INT32_MAX, &r->smooth);
    case OPT_BLOCK_Q: return parse_integer("--block-q", text, 1, INT32_MAX, &r->block_q);
    case OPT_BLOCK_K: return parse_integer("--block-k", text, 1, INT32_MAX, &r->block_k);
    case OPT_MIN: return parse_real("--min", text, &r->min_value);
    case OPT_DEVICE: return parse_device(text, &r->device);
    case OPT_OUT: return safetensors_may_be(r->out = text);
    case OPT_JSON: return r->json = 1;
    default: return tensor_file_read(text, names[option - OPT_FILE], &r->file);
    }
}

static int parse_kind(const char *text, enum kind *kind) {
    for (int i = 0; i < NUM_KINDS; i++)
        if (strcmp(text, kinds[i].name) == 0) {
            *kind = (enum kind)i;
            return 1;
        }
    return complain(0, "'%s' is no kind of mask; fdm mask --help lists them", text);
}

static int take_tensors(struct request *r) {
    for (int i = 0; i < NUM_ROLES; i++) {
        const struct file_tensor *tensor = tensor_file_find(&r->file, names[i]);
        if (tensor && (kinds[r->kind].needs | kinds[r->kind].takes) >> i & 1)
            r->tensors[i] = *tensor;
        if (!r->tensors[i].data && kinds[r->kind].needs >> i & 1)
            return complain(0, "%s is missing; fdm mask %s needs it", names[i], kinds[r->kind].name);
    }
    if (r->topk < 0 && (r->kind == TOPK || r->kind == CREATE))
        return complain(0, "mask %s needs --topk W", kinds[r->kind].name);
    return 1;
}

static int check_axes(const struct request *r, enum role role, int32_t least, int32_t most) {
    const int32_t ndim = r->tensors[role].ndim;
    return (ndim >= least && ndim <= most) ||
           complain(0, "%s has %d axes; it needs %d%s", names[role], ndim, most, least < most ? ", or one less" : "");
}

/* ---- outputs ---- */

static void make(struct request *r, enum role role, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    struct file_tensor *t = &r->tensors[role];
    *t = (struct file_tensor){.dtype = dtype, .ndim = ndim};
    snprintf(t->name, sizeof t->name, "%s", names[role]);
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    t->bytes = (size_t)(file_tensor_elements(t) * fdm_dtype_bytes(dtype));
    t->data = allocate_or_exit(t->bytes);
}

static int make_intervals(struct request *r, const int64_t shape[3]) {
    make(r, START, FDM_INT32, 3, shape);
    make(r, END, FDM_INT32, 3, shape);
    return 1;
}

/* Of rules: the larger of the batches and the heads that they have; document_ids or --keys say the keys. */
static int make_of_rules(struct request *r) {
    const struct file_tensor *ids = &r->tensors[IDS], *prefixes = &r->tensors[PREFIXES],
                             *windows = &r->tensors[WINDOWS];
    if ((ids->data && !check_axes(r, IDS, 2, 2)) || (prefixes->data && !check_axes(r, PREFIXES, 1, 1)) ||
        (windows->data && !check_axes(r, WINDOWS, 2, 2)))
        return 0;
    if (!ids->data && !prefixes->data && !windows->data)
        return complain(0, "no rule is given; fdm mask rules takes document_ids, prefix_lengths and window_sizes");
    if (!ids->data && r->keys < 0)
        return complain(0, "mask rules needs --keys N without document_ids");
    if (ids->data && r->keys >= 0 && r->keys != ids->shape[1])
        return complain(0, "--keys is %lld, but document_ids have %lld keys", (long long)r->keys,
                        (long long)ids->shape[1]);
    const int64_t of_ids = ids->data ? ids->shape[0] : 1, of_prefixes = prefixes->data ? prefixes->shape[0] : 1;
    const int64_t keys = ids->data ? ids->shape[1] : r->keys, heads = windows->data ? windows->shape[0] : 1;
    r->rows = r->rows < 0 ? keys : r->rows;
    return make_intervals(r, (const int64_t[3]){of_ids > of_prefixes ? of_ids : of_prefixes, heads, keys});
}

/* One of a pair is there without the other, or has another shape. 1, or 0 after a complaint. */
static int check_pair(const struct request *r, enum role first) {
    const struct file_tensor *start = &r->tensors[first], *end = &r->tensors[first + 1];
    if (!start->data != !end->data)
        return complain(0, "%s is missing; %s is one of a pair", names[start->data ? first + 1 : first],
                        names[start->data ? first : first + 1]);
    if (start->data && (start->dtype != FDM_INT32 || end->dtype != FDM_INT32))
        return complain(0, "%s is %s and %s %s; they must be int32", names[first], fdm_dtype_name(start->dtype),
                        names[first + 1], fdm_dtype_name(end->dtype));
    return !start->data ||
           (check_axes(r, first, first == START ? 3 : 4, first == START ? 3 : 4) && end->ndim == start->ndim &&
            memcmp(start->shape, end->shape, (size_t)start->ndim * sizeof *start->shape) == 0) ||
           complain(0, "%s and %s have different shapes", names[first], names[first + 1]);
}

static int64_t blocks_of(int64_t length, int64_t size) { return (length + size - 1) / size; }

/* 64 or 128: the size of blocks that gives a block mask its extents beside these rows and keys; 0: none does. */
static int64_t block_size(const struct file_tensor *blocks, int64_t rows, int64_t keys) {
    for (int64_t size = 64; size <= 128; size *= 2)
        if (blocks->shape[2] == blocks_of(rows, size) && blocks->shape[3] == blocks_of(keys, size))
            return size;
    return 0;
}

/* Of key intervals, row intervals and a block mask that hold at once: the larger of the batches and of the heads. */
static int make_of_ways(struct request *r) {
    static const enum role ways[] = {START, ROW_START, BLOCK_MASK};
    const struct file_tensor *start = &r->tensors[START], *rows = &r->tensors[ROW_START],
                             *blocks = &r->tensors[BLOCK_MASK];
    if (!check_pair(r, START) || !check_pair(r, ROW_START) || (blocks->data && !check_axes(r, BLOCK_MASK, 4, 4)))
        return 0;
    if (!start->data && !rows->data && !blocks->data)
        return complain(0,
                        "no mask is given; fdm mask %s takes %sinterval_start and _end, row_start and _end, and "
                        "block_mask",
                        kinds[r->kind].name, r->kind == DENSE ? "" : "mask, ");
    r->keys = start->data ? start->shape[2] : r->keys;
    if (r->keys < 0)
        return complain(0, "mask %s needs --keys N without interval_start", kinds[r->kind].name);
    r->rows = rows->data ? rows->shape[3] : r->rows < 0 ? r->keys : r->rows;
    r->block = blocks->data ? block_size(blocks, r->rows, r->keys) : 64;
    if (!r->block || (blocks->data && blocks->dtype != FDM_BOOL))
        return complain(0,
                        "block_mask must be bool, [B, h, %lld, %lld] for blocks of 64 or [B, h, %lld, %lld] for "
                        "blocks of 128 of the %lld rows and %lld keys",
                        (long long)blocks_of(r->rows, 64), (long long)blocks_of(r->keys, 64),
                        (long long)blocks_of(r->rows, 128), (long long)blocks_of(r->keys, 128), (long long)r->rows,
                        (long long)r->keys);
    int64_t shape[4] = {1, 1, r->rows, r->keys};
    for (int axis = 0; axis < 2; axis++)
        for (int i = 0; i < 3; i++) {
            const int64_t extent = r->tensors[ways[i]].data ? r->tensors[ways[i]].shape[axis] : 1;
            shape[axis] = extent != 1 ? extent : shape[axis];
        }
    for (int i = 0; i < 3; i++)
        if (r->tensors[ways[i]].data &&
            ((r->tensors[ways[i]].shape[0] != 1 && r->tensors[ways[i]].shape[0] != shape[0]) ||
             (r->tensors[ways[i]].shape[1] < 1 || shape[1] % r->tensors[ways[i]].shape[1])))
            return complain(0, "%s does not fit the batch %lld and the %lld heads of the others", names[ways[i]],
                            (long long)shape[0], (long long)shape[1]);
    make(r, MASK, FDM_BOOL, 4, shape);
    return 1;
}

/* 1, or 0 after a complaint about the inputs' axes. */
static int make_outputs(struct request *r) {
    const int64_t *bias = r->tensors[BIAS].shape, *mask = r->tensors[MASK].shape;
    const struct file_tensor *padding = &r->tensors[PADDING], *shown = &r->tensors[SHOWN];
    if (r->kind == TOPK) {
        if (!check_axes(r, BIAS, 3, 4) || (padding->data && !check_axes(r, PADDING, 2, 2)))
            return 0;
        const int64_t keys = bias[r->tensors[BIAS].ndim - 1], batch = padding->data ? padding->shape[0] : 1;
        r->rows = r->rows < 0 ? keys : r->rows;
        return make_intervals(r, (const int64_t[3]){bias[0] == 1 ? batch : bias[0], bias[1], keys});
    }
    if (r->kind == CREATE) {
        if (!check_axes(r, BIAS, 4, 4))
            return 0;
        int64_t shape[4];
        if (shown->data && shown->ndim != 2 && !check_axes(r, SHOWN, 4, 4))
            return 0;
        for (int axis = 0; axis < 4; axis++) {
            const int64_t other = shown->data && (shown->ndim == 4 || axis == 0) ? shown->shape[axis] : 1;
            shape[axis] = other == 1 || axis == 3 ? bias[axis] : other;
        }
        make(r, MASK, FDM_BOOL, 4, shape);
        return 1;
    }
    if (r->kind == RULES)
        return make_of_rules(r);
    r->of_ways = r->kind == DENSE || (r->kind == OF_BLOCKS && !r->tensors[MASK].data);
    if (r->of_ways && !make_of_ways(r))
        return 0;
    if (r->kind == DENSE)
        return 1;
    if (!check_axes(r, MASK, 4, 4))
        return 0;
    if (r->kind == INTERVALS)
        return make_intervals(r, (const int64_t[3]){mask[0], mask[1], mask[3]});
    const int64_t q = (mask[2] + r->block_q - 1) / r->block_q, k = (mask[3] + r->block_k - 1) / r->block_k;
    make(r, BLOCKS, FDM_BOOL, 4, (const int64_t[4]){mask[0], mask[1], q, k});
    return 1;
}

/* ---- the call ---- */

static const fdm_device_id host = {FDM_CPU, 0};

/* Tensors where the call wants them; inputs are copied to a CUDA device, which keeps them until the process ends. */
static fdm_status place(struct request *r) {
    for (int i = 0; i < NUM_ROLES; i++) {
        struct file_tensor *t = &r->tensors[i];
        r->views[i] = (fdm_tensor){t->data, r->device.id, t->ndim, fdm_data_type_of(t->dtype), t->shape, NULL, 0};
        if (!t->data || r->device.id.type == FDM_CPU)
            continue;
        fdm_status status = fdm_memory_allocate(r->device.id, t->bytes + 1, &r->views[i].data);
        if (status || (status = fdm_memory_copy(r->views[i].data, r->device.id, t->data, host, t->bytes)))
            return status;
    }
    return FDM_OK;
}

static fdm_status topk(struct request *r) {
    fdm_tensor *padding = r->tensors[PADDING].data ? &r->views[PADDING] : NULL;
    const size_t bytes = fdm_topk_intervals_workspace(&r->views[BIAS], padding);
    void *workspace = NULL;
    fdm_status status = r->device.id.type == FDM_CPU ? FDM_OK : fdm_memory_allocate(r->device.id, bytes, &workspace);
    return status ? status
                  : fdm_topk_intervals(&r->views[BIAS], padding, r->topk, r->rows, &r->views[START], &r->views[END],
                                       workspace, bytes, NULL);
}

static fdm_status intervals(struct request *r) {
    void *exact = &r->exact;
    fdm_status status = r->device.id.type == FDM_CPU ? FDM_OK : fdm_memory_allocate(r->device.id, 4, &exact);
    if (status || (status = fdm_intervals_from_mask(&r->views[MASK], &r->views[START], &r->views[END], exact, NULL)))
        return status;
    return fdm_memory_copy(&r->exact, host, exact, r->device.id, sizeof r->exact);
}

static fdm_status rules(struct request *r) {
    fdm_tensor *given[NUM_ROLES];
    for (int i = 0; i < NUM_ROLES; i++)
        given[i] = r->tensors[i].data ? &r->views[i] : NULL;
    const fdm_key_rules all = {.struct_bytes = sizeof all,
                               .document_ids = given[IDS],
                               .prefix_lengths = given[PREFIXES],
                               .window_sizes = given[WINDOWS]};
    return fdm_rule_intervals(&all, r->rows, &r->views[START], &r->views[END], NULL);
}

/* Where the list of (b, h) begins in a tensor of `length` elements a list. */
static int64_t list_of(const struct file_tensor *t, const int64_t *shape, int64_t b, int64_t h, int64_t length) {
    return ((t->shape[0] == 1 ? 0 : b) * t->shape[1] + h / (shape[1] / t->shape[1])) * length;
}

static int in_a_range(const struct request *r, int64_t list, int64_t i, int64_t j) {
    const int32_t *start = r->tensors[ROW_START].data, *end = r->tensors[ROW_END].data;
    int held = 0;
    for (int64_t n = 0; n < r->tensors[ROW_START].shape[2]; n++) {
        const int64_t at = list + n * r->rows + i;
        held |= start[at] <= j && j < end[at];
    }
    return held;
}

/* On the host: a mask of one batch and head from everything that is given. */
static void write_plane(struct request *r, int64_t b, int64_t h, uint8_t *mask) {
    const int64_t *shape = r->tensors[MASK].shape;
    const struct file_tensor *keys = &r->tensors[START], *rows = &r->tensors[ROW_START],
                             *blocks = &r->tensors[BLOCK_MASK];
    const int64_t key_list = keys->data ? list_of(keys, shape, b, h, r->keys) : 0;
    const int64_t row_list = rows->data ? list_of(rows, shape, b, h, rows->shape[2] * r->rows) : 0;
    const int64_t block_list = blocks->data ? list_of(blocks, shape, b, h, blocks->shape[2] * blocks->shape[3]) : 0;
    const int32_t *start = keys->data, *end = r->tensors[END].data;
    const uint8_t *shown = blocks->data;
    for (int64_t i = 0; i < r->rows; i++)
        for (int64_t j = 0; j < r->keys; j++)
            *mask++ = (!start || (start[key_list + j] <= i && i < end[key_list + j])) &&
                      (!rows->data || in_a_range(r, row_list, i, j)) &&
                      (!shown || shown[block_list + i / r->block * blocks->shape[3] + j / r->block]);
}

static fdm_status dense(struct request *r) {
    fdm_tensor *const v = r->views;
    if (!r->tensors[ROW_START].data && !r->tensors[BLOCK_MASK].data)
        return fdm_intervals_to_mask(&v[START], &v[END], &v[MASK], NULL);
    const struct file_tensor *mask = &r->tensors[MASK];
    for (int64_t n = 0; n < mask->shape[0] * mask->shape[1]; n++)
        write_plane(r, n / mask->shape[1], n % mask->shape[1], (uint8_t *)mask->data + n * r->rows * r->keys);
    if (r->device.id.type == FDM_CPU)
        return FDM_OK;
    return fdm_memory_copy(v[MASK].data, r->device.id, mask->data, host, mask->bytes); /* results are copied back */
}

static fdm_status call(struct request *r) {
    fdm_tensor *const v = r->views;
    switch (r->kind) {
    case TOPK: return topk(r);
    case CREATE:
        return fdm_create_mask(&v[BIAS], r->tensors[SHOWN].data ? &v[SHOWN] : NULL, r->topk, r->min_value, r->smooth,
                               &v[MASK], NULL);
    case DENSE: return dense(r);
    case INTERVALS: return intervals(r);
    case RULES: return rules(r);
    default: break;
    }
    const fdm_status status = r->of_ways ? dense(r) : FDM_OK;
    return status ? status : fdm_mask_blocks(&v[MASK], r->block_q, r->block_k, &v[BLOCKS], NULL);
}

static fdm_status run(struct request *r) {
    fdm_status status = place(r);
    if (!status)
        status = call(r);
    for (int i = 0; !status && i < NUM_ROLES; i++)
        if (kinds[r->kind].makes >> i & 1 && r->device.id.type != FDM_CPU)
            status = fdm_memory_copy(r->tensors[i].data, host, r->views[i].data, r->device.id, r->tensors[i].bytes);
    return status;
}

/* ---- what comes out ---- */

/* A mask that no intervals say: which key it is that more than one run of rows sees. */
static int complain_about_runs(const struct request *r) {
    const struct file_tensor *t = &r->tensors[MASK];
    const int64_t rows = t->shape[2], keys = t->shape[3];
    for (int64_t column = 0; column < t->shape[0] * t->shape[1] * keys; column++) {
        const uint8_t *mask = (const uint8_t *)t->data + column / keys * rows * keys + column % keys;
        int64_t runs = 0;
        for (int64_t i = 0; i < rows; i++)
            runs += mask[i * keys] && (i == 0 || !mask[(i - 1) * keys]);
        if (runs > 1)
            return complain(EXIT_WRONG,
                            "key %lld of batch %lld, head %lld is seen by %lld separate runs of rows; key intervals "
                            "say one run a key, so this mask stays dense",
                            (long long)(column % keys), (long long)(column / keys / t->shape[1]),
                            (long long)(column / keys % t->shape[1]), (long long)runs);
    }
    return complain(EXIT_WRONG, "the mask has no key intervals, but each key's rows are one run");
}

/* Bytes as int32: safetensors' readers take a uint8 of ours for a bool. */
static void widen_blocks(struct request *r) {
    const struct file_tensor bytes = r->tensors[BLOCKS];
    make(r, BLOCKS, FDM_INT32, 4, bytes.shape);
    for (size_t n = 0; n < bytes.bytes; n++)
        ((int32_t *)r->tensors[BLOCKS].data)[n] = ((const uint8_t *)bytes.data)[n];
}

/* How many elements are 0, 1 and 2. */
static void count_values(const struct file_tensor *t, int64_t counts[3]) {
    const int64_t total = file_tensor_elements(t);
    for (int64_t n = 0; n < total; n++)
        counts[t->dtype == FDM_BOOL ? ((const uint8_t *)t->data)[n] : ((const int32_t *)t->data)[n]]++;
}

static void print_tensor(const struct file_tensor *t, enum role role) {
    int64_t n[3] = {0};
    printf("%-14s %s [", t->name, fdm_dtype_name(t->dtype));
    for (int32_t i = 0; i < t->ndim; i++)
        printf("%s%lld", i ? ", " : "", (long long)t->shape[i]);
    printf("]");
    if (role == MASK || role == BLOCKS)
        count_values(t, n);
    if (role == MASK)
        printf(", %lld of %lld pairs visible", (long long)n[1], (long long)(n[0] + n[1]));
    if (role == BLOCKS)
        printf(": %lld of nothing, %lld of a part, %lld of all; %s", (long long)n[0], (long long)n[1], (long long)n[2],
               n[1] ? "blocks alone do not say the mask" : "the blocks are the mask");
    puts("");
}

static void put_tensor(struct json_writer *w, const struct file_tensor *t, enum role role) {
    static const char *const keys[3] = {"nothing", "a_part", "all"};
    int64_t n[3] = {0};
    json_open(w, t->name, '{');
    json_open(w, "shape", '[');
    for (int32_t i = 0; i < t->ndim; i++)
        json_put_integer(w, NULL, t->shape[i]);
    json_close(w, ']');
    if (role == MASK || role == BLOCKS)
        count_values(t, n);
    if (role == MASK)
        json_put_integer(w, "visible_pairs", n[1]);
    for (int i = 0; role == BLOCKS && i < 3; i++)
        json_put_integer(w, keys[i], n[i]);
    json_close(w, '}');
}

static void print_results(const struct request *r) {
    struct json_writer w = {.stream = stdout};
    if (r->json)
        json_open(&w, NULL, '{');
    for (int i = 0; i < NUM_ROLES; i++)
        if (kinds[r->kind].makes >> i & 1)
            r->json ? put_tensor(&w, &r->tensors[i], (enum role)i) : print_tensor(&r->tensors[i], (enum role)i);
    if (!r->json)
        return;
    json_close(&w, '}');
    puts("");
}

static int write_results(const struct request *r) {
    static struct tensor_file results;
    for (int i = 0; i < NUM_ROLES; i++)
        if (kinds[r->kind].makes >> i & 1)
            results.tensors[results.count++] = r->tensors[i];
    return safetensors_write(r->out, &results);
}

int command_mask(int argc, char **argv) {
    static struct request r = {.topk = -1,
                               .rows = -1,
                               .keys = -1,
                               .smooth = 1,
                               .block_q = 128,
                               .block_k = 128,
                               .min_value = -3.4028234663852886e38,
                               .device.id.type = FDM_CPU};
    int option, has_kind = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == OPT_HELP) {
            fputs(help, stdout);
            return EXIT_FINE;
        }
        if (option == '?' || !set_option(&r, option, optarg))
            return EXIT_USAGE;
    }
    if (r.out && !output_check(r.out))
        return EXIT_WRITE;
    for (; optind < argc; optind++, has_kind = 1)
        if (has_kind ? !tensor_file_read(argv[optind], "", &r.file) : !parse_kind(argv[optind], &r.kind))
            return EXIT_USAGE;
    if (!has_kind)
        return complain(EXIT_USAGE, "no kind of mask; fdm mask --help lists them");
    if (!take_tensors(&r) || !make_outputs(&r))
        return EXIT_USAGE;
    const fdm_status status = run(&r);
    if (status)
        return fail(status);
    if (r.kind == INTERVALS && !r.exact)
        return complain_about_runs(&r);
    if (r.kind == OF_BLOCKS)
        widen_blocks(&r);
    if (r.out && !write_results(&r))
        return EXIT_WRITE;
    print_results(&r);
    return EXIT_FINE;
}
