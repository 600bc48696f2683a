/* softmax_plan.c: which softmax kernel takes a problem, in which shape, and its launch. */
#include "companions/softmax/softmax_plan.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "tuning/class.h"

/* The numbers of a choice. */
struct parameters {
    int32_t vector, threads, lanes, chunks, ring; /* constants */
    int32_t pieces;                               /* of a row */
    int32_t groups;                               /* of blocks */
    union {
        int32_t lag;   /* softmax.ring: a constant */
        int32_t early; /* others: softmax.resident, or softmax.split's second launch, may begin early */
    };
};
_Static_assert(sizeof(struct parameters) == sizeof((fdm_companion_choice *)0)->parameters, "a choice holds them");
static struct parameters parameters_of(const fdm_companion_choice *choice) {
    struct parameters parameters;
    memcpy(&parameters, choice->parameters, sizeof parameters);
    return parameters;
}
static void set_parameters(fdm_companion_choice *choice, struct parameters parameters) {
    memcpy(choice->parameters, &parameters, sizeof parameters);
}

static const fdm_softmax_problem *problem_of(const void *problem) { return problem; }

static int64_t chunks_of(const fdm_softmax_problem *p, int32_t vector) {
    return softmax_chunks(p->columns, fdm_dtype_bytes(p->dtype), !vector || p->aligned == 2);
}
/* SOFTMAX_*, but for the one of softmax.resident alone. */
static int32_t vector_of(const fdm_softmax_problem *p) {
    const int whole = p->aligned == 2 && p->columns * fdm_dtype_bytes(p->dtype) % 16 == 0;
    return whole ? SOFTMAX_WHOLE : p->aligned ? SOFTMAX_SHIFTED : SOFTMAX_ELEMENTS;
}
static int32_t shared_bytes_of(const fdm_softmax_problem *p, struct parameters at) {
    return softmax_shared_bytes(at.chunks * at.ring, p->pass == FDM_BACKWARD);
}
/* A maximum and a sum of each piece of a row. */
static int64_t sums_bytes(const fdm_softmax_problem *p, int32_t pieces) {
    return (p->rows * pieces * 8 + 63) / 64 * 64;
}
static int64_t at_least_1(int64_t x) { return x < 1 ? 1 : x; }

/* ---- softmax.resident: threads and registers that hold a row ---- */

struct shape {
    int32_t lanes, chunks, cluster;
};

/* Few loads of each thread and many threads, then more loads, then more blocks: what is small leaves room for other
 * rows on the multiprocessor, whose loads hide this one's arithmetic. The backward has two inputs, so half as many
 * chunks of each, and takes them sooner. */
static void double_until_it_fits(const fdm_softmax_problem *p, int64_t n, struct shape *s) {
    const int32_t backward = p->pass == FDM_BACKWARD, most = backward ? 4 : 8;
    const int32_t wide = backward ? 32 : p->dtype != FDM_FLOAT32 ? 64 : SOFTMAX_MAX_LANES; /* of 2 chunks each */
    while (s->lanes < 8 && s->lanes < n)
        s->lanes *= 2;
    while (s->chunks < 2 && (int64_t)s->lanes * s->chunks < n)
        s->chunks *= 2;
    while (s->lanes < wide && (int64_t)s->lanes * s->chunks < n)
        s->lanes *= 2;
    while (s->chunks < (wide < SOFTMAX_MAX_LANES ? 4 : most) && (int64_t)s->lanes * s->chunks < n)
        s->chunks *= 2;
    while (s->lanes < SOFTMAX_MAX_LANES && (int64_t)s->lanes * s->chunks < n)
        s->lanes *= 2;
    while (s->chunks < most && (int64_t)s->lanes * s->chunks < n)
        s->chunks *= 2;
}
/* Threads without chunks keep others from the multiprocessor, so that less is under way: of a row that fills three
 * quarters or less, three chunks a thread (forward), or fewer warps. */
static void drop_idle_threads(int backward, int64_t n, struct shape *s) {
    const int32_t quarter = s->lanes * s->chunks / 4;
    if (!backward && s->lanes <= 64 && quarter > 0 && quarter * 3 >= n)
        *s = (struct shape){quarter, 3, 1};
    for (int32_t eighths = 5; eighths <= 6; eighths++) {
        const int32_t fewer = s->lanes / 8 * eighths;
        if (fewer > 32 && fewer % 32 == 0 && (int64_t)fewer * s->chunks >= n) {
            s->lanes = fewer;
            return;
        }
    }
}
/* Blocks of a cluster are half as large where 16 hold the row, so that four on a multiprocessor hide each other; two of
 * 320 threads are better than three of 256. 0: the row is longer than the registers of such a cluster, of the backward
 * of whole blocks. */
static int shape_of(const fdm_device *device, const fdm_softmax_problem *p, struct shape *s) {
    const int64_t n = at_least_1(chunks_of(p, p->aligned > 0));
    const int32_t backward = p->pass == FDM_BACKWARD, cluster_max = device->compute_major < 9 ? 1 : SOFTMAX_CLUSTER_MAX;
    *s = (struct shape){1, 1, 1};
    double_until_it_fits(p, n, s);
    if (cluster_max > 1 && (int64_t)s->lanes * s->chunks < n) {
        const int64_t halves = (int64_t)(SOFTMAX_MAX_LANES / 2) * s->chunks * cluster_max;
        if (!backward && n > halves)
            return 0; /* softmax.ring takes 0.92 of the time that clusters of 16 whole blocks do (an H200, 16 bits) */
        if (n <= halves)
            s->lanes = n <= 2 * 320 * s->chunks ? 320 : SOFTMAX_MAX_LANES / 2;
        const int64_t blocks = ceil_div(n, s->lanes * s->chunks);
        s->cluster = blocks < cluster_max ? (int32_t)blocks : cluster_max;
    } else {
        drop_idle_threads(backward, n, s);
    }
    return (int64_t)s->lanes * s->chunks * s->cluster >= n;
}

static const char *resident_refusal(const fdm_device *device, const void *problem) {
    struct shape s;
    return shape_of(device, problem_of(problem), &s) ? NULL : "a row is longer than the registers of a cluster hold";
}

static const char few_rows[] = "so few rows leave most multiprocessors idle";

static const char *resident_passed_over(const fdm_device *device, const void *problem) {
    struct shape s;
    const fdm_softmax_problem *p = problem;
    shape_of(device, p, &s);
    const int large = s.lanes > SOFTMAX_MAX_LANES / 2 || s.cluster > 1;
    return large && p->rows * s.cluster * s.lanes < device->num_sms / 2 * SOFTMAX_MAX_LANES ? few_rows : NULL;
}

static void resident_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    const fdm_softmax_problem *p = problem;
    struct shape s;
    shape_of(device, p, &s);
    const int32_t threads = s.lanes <= 32 ? 128 : s.lanes;
    const int full = vector_of(p) == SOFTMAX_WHOLE && (int64_t)s.lanes * s.chunks * s.cluster == chunks_of(p, 1);
    const int early = device->compute_major >= 9 && threads >= SOFTMAX_EARLY_THREADS;
    set_parameters(choice, (struct parameters){.vector = full ? SOFTMAX_FULL : vector_of(p),
                                               .threads = threads,
                                               .lanes = s.lanes,
                                               .chunks = s.chunks,
                                               .pieces = s.cluster,
                                               .early = early});
    snprintf(choice->choice, sizeof choice->choice, "%d-lanes x %d-chunks, %d-block%s", s.lanes, s.chunks, s.cluster,
             s.cluster > 1 ? "s" : "");
}

/* ---- softmax.ring: blocks that share a row, and what of it each has ---- */

struct ring {
    int32_t pieces, groups, chunks, ring, lag;
};

/* With `ring` pieces in a block's shared memory. A row's pieces are as few as fit, or as many as give every block some,
 * and then those with which the last turn of the groups wastes the least. 0: the row is too long. */
static int ring_with(const fdm_device *device, const fdm_softmax_problem *p, int32_t ring, int32_t lag,
                     struct ring *s) {
    enum { STATIC_BYTES = 2048, CANDIDATES = 16, OVERHEAD = 256 };
    const int32_t vector = vector_of(p), unit = softmax_shared_bytes(1, p->pass == FDM_BACKWARD);
    const int32_t chunks_max = (int32_t)(device->shared_bytes - STATIC_BYTES) / unit / ring, blocks = device->num_sms;
    const int32_t pieces_max = blocks < SOFTMAX_RING_PIECES_MAX ? blocks : SOFTMAX_RING_PIECES_MAX;
    const int64_t n = at_least_1(chunks_of(p, vector)), rows = at_least_1(p->rows);
    if (chunks_max < 1 || ceil_div(n, chunks_max * SOFTMAX_MAX_LANES) > pieces_max)
        return 0;
    const int64_t to_fit = ceil_div(n, chunks_max * SOFTMAX_MAX_LANES), tiles = ceil_div(n, SOFTMAX_MAX_LANES);
    const int64_t to_fill = rows * to_fit < blocks ? pieces_max / rows : 0, least = to_fill > tiles ? tiles : to_fill;
    const int32_t first = (int32_t)(least > to_fit ? least : to_fit);
    int64_t best = INT64_MAX;
    for (int32_t pieces = first; pieces <= pieces_max && pieces < first + CANDIDATES; pieces++) {
        const int32_t share = softmax_share((int32_t)n, pieces, vector), groups = blocks / pieces;
        const int32_t chunks = (int32_t)ceil_div(share, SOFTMAX_MAX_LANES);
        const int64_t cost = ceil_div(rows, groups) * (share + OVERHEAD);
        if (cost >= best || chunks > chunks_max)
            continue;
        best = cost;
        *s = (struct ring){pieces, rows < groups ? (int32_t)rows : groups, chunks, ring, lag};
    }
    return best < INT64_MAX;
}

static int has_bulk_copies(const fdm_device *device, const fdm_softmax_problem *p) {
    return device->compute_major >= 9 && vector_of(p) == SOFTMAX_WHOLE;
}

/* Many small pieces, so that a row's sums have four or five turns to meet; else few large ones, with bulk copies one
 * more of them in registers. */
static int ring_of_kind(const fdm_device *device, const fdm_softmax_problem *p, int32_t kind, struct ring *s) {
    return kind == 0 ? ring_with(device, p, 7, p->pass == FDM_BACKWARD ? 5 : 4, s)
                     : ring_with(device, p, 3, has_bulk_copies(device, p) ? 3 : 2, s);
}
static int ring_of(const fdm_device *device, const fdm_softmax_problem *p, struct ring *s) {
    return ring_of_kind(device, p, 0, s) || ring_of_kind(device, p, 1, s);
}

static const char *ring_refusal(const fdm_device *device, const void *problem) {
    struct ring s;
    return ring_of(device, problem_of(problem), &s) ? NULL : "a row is longer than the device's shared memory";
}

static const char *ring_passed_over(const fdm_device *device, const void *problem) {
    struct ring s;
    return ring_of(device, problem_of(problem), &s) && s.groups * s.pieces < device->num_sms / 2 ? few_rows : NULL;
}

static void fill_ring(const fdm_device *device, const fdm_softmax_problem *p, struct ring s,
                      fdm_companion_choice *choice) {
    const int bulk = has_bulk_copies(device, p); /* by a warp besides */
    const struct parameters parameters = {.vector = vector_of(p),
                                          .threads = SOFTMAX_MAX_LANES + SOFTMAX_RING_SHARERS + (bulk ? 32 : 0),
                                          .lanes = SOFTMAX_MAX_LANES,
                                          .chunks = s.chunks,
                                          .ring = s.ring,
                                          .pieces = s.pieces,
                                          .groups = s.groups,
                                          .lag = s.lag};
    set_parameters(choice, parameters);
    choice->shared_bytes = shared_bytes_of(p, parameters);
    choice->workspace_bytes = sums_bytes(p, s.pieces);
    snprintf(choice->choice, sizeof choice->choice, "%d-pieces of %d-chunks, %d-groups, ring of %d", s.pieces, s.chunks,
             s.groups, s.ring);
}

static void ring_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    struct ring s;
    ring_of(device, problem, &s);
    fill_ring(device, problem, s, choice);
}

/* The rules', and few large pieces where those are many small ones. */
static int ring_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice) {
    struct ring s, other;
    const int both = ring_of_kind(device, problem, 0, &s) && ring_of_kind(device, problem, 1, &other);
    if (number == 0)
        ring_fill(device, problem, choice);
    else if (number == 1 && both)
        fill_ring(device, problem, other, choice);
    return number == 0 || (number == 1 && both);
}

/* ---- softmax.split ---- */

static const char *nothing_against(const fdm_device *device, const void *problem) { return NULL; }

static void split_with(const fdm_device *device, const fdm_softmax_problem *p, int32_t blocks_per_sm,
                       fdm_companion_choice *choice) {
    enum { THREADS = 256, CHUNKS = 4 };
    const int32_t vector = vector_of(p), chunks = p->pass == FDM_BACKWARD ? CHUNKS / 2 : CHUNKS;
    const int64_t batches = at_least_1(ceil_div(chunks_of(p, vector), THREADS * chunks));
    int64_t pieces = ceil_div((int64_t)device->num_sms * blocks_per_sm, at_least_1(p->rows));
    pieces = pieces > batches ? batches : pieces;
    pieces = pieces > SOFTMAX_PIECES_MAX ? SOFTMAX_PIECES_MAX : at_least_1(pieces);
    set_parameters(choice, (struct parameters){.vector = vector,
                                               .threads = THREADS,
                                               .lanes = THREADS,
                                               .chunks = chunks,
                                               .pieces = (int32_t)pieces,
                                               .early = device->compute_major >= 9});
    choice->workspace_bytes = sums_bytes(p, (int32_t)pieces);
    snprintf(choice->choice, sizeof choice->choice, "%d-pieces", (int32_t)pieces);
}

enum { BLOCKS_PER_SM = 8 };
static void split_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    split_with(device, problem, BLOCKS_PER_SM, choice);
}

/* The rules' blocks of a multiprocessor, and more and fewer where that makes other pieces. */
static int split_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice) {
    static const int32_t blocks[] = {BLOCKS_PER_SM, 2 * BLOCKS_PER_SM, BLOCKS_PER_SM / 2, BLOCKS_PER_SM / 4};
    int32_t seen[4], count = 0;
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        int known = 0;
        split_with(device, problem, blocks[i], choice);
        for (int32_t j = 0; j < count; j++)
            known |= seen[j] == parameters_of(choice).pieces;
        if (known)
            continue;
        seen[count++] = parameters_of(choice).pieces;
        if (count == number + 1)
            return 1;
    }
    return 0;
}

/* ---- the ladder ---- */

static const char *vector_refusal(const fdm_device *device, const void *problem) {
    return problem_of(problem)->aligned ? NULL : "rows of the tensors begin differently far from multiples of 16 bytes";
}
static const char *naive_refusal(const fdm_device *device, const void *problem) {
    return problem_of(problem)->pass == FDM_BACKWARD ? "it is for the forward" : NULL;
}

static void fill_block_a_row(fdm_companion_choice *choice, int32_t vector) {
    set_parameters(choice,
                   (struct parameters){.vector = vector, .threads = 256, .lanes = 256, .chunks = 1, .pieces = 1});
    snprintf(choice->choice, sizeof choice->choice, "256-threads");
}
static void vector_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    fill_block_a_row(choice, vector_of(problem));
}
static void elements_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    fill_block_a_row(choice, 0);
}

enum { RESIDENT, RING, SPLIT, VECTOR, ONLINE, NAIVE, NUM_KERNELS };
static const struct companion_kernel kernels[NUM_KERNELS] = {
    [RESIDENT] = {"softmax.resident", "a row read once, held in the registers of a block or a cluster", 1,
                  resident_refusal, resident_passed_over, resident_fill, NULL},
    [RING] = {"softmax.ring", "a row read once, in pieces that pass through the shared memory of many blocks", 1,
              ring_refusal, ring_passed_over, ring_fill, ring_variant},
    [SPLIT] = {"softmax.split", "few or long rows, each in pieces over many blocks, two launches", 1, nothing_against,
               NULL, split_fill, split_variant},
    [VECTOR] = {"softmax.vector", "online, 16 bytes a load, the row read twice", 0, vector_refusal, NULL, vector_fill,
                NULL},
    [ONLINE] = {"softmax.online", "largest element and sum in one pass, the row read twice", 0, nothing_against, NULL,
                elements_fill, NULL},
    [NAIVE] = {"softmax.naive", "safe softmax as written down, the row read three times", 0, naive_refusal, NULL,
               elements_fill, NULL},
};

static void name_class(const void *problem, char text[COMPANION_CLASS_BYTES]) {
    const fdm_softmax_problem *p = problem;
    snprintf(text, COMPANION_CLASS_BYTES, "%s %s, rows %lld, columns %lld, log %d, mask %d, aligned %d",
             p->pass == FDM_BACKWARD ? "backward" : "forward", fdm_dtype_name(p->dtype),
             (long long)tuning_length_edge(p->rows), (long long)tuning_length_edge(p->columns), p->log, p->has_mask,
             p->aligned);
}
const struct companion_operation softmax_operation = {"softmax", NUM_KERNELS, kernels, sizeof(fdm_softmax_problem),
                                                      name_class};
_Static_assert(sizeof(fdm_softmax_problem) <= COMPANION_PROBLEM_BYTES, "a thread's last problem has room");

/* ---- what a plan launches ---- */

static const struct {
    const char *file, *entries[COMPANION_REQUESTS_MAX];
} programs[NUM_KERNELS] = {
    [RESIDENT] = {"companions/softmax/softmax_resident.cu", {"softmax_resident"}},
    [RING] = {"companions/softmax/softmax_ring.cu", {"softmax_ring"}},
    [SPLIT] = {"companions/softmax/softmax_split.cu", {"softmax_split_sums", "softmax_split_write"}},
    [VECTOR] = {"companions/softmax/softmax_online.cu", {"softmax_online"}},
    [ONLINE] = {"companions/softmax/softmax_online.cu", {"softmax_online"}},
    [NAIVE] = {"companions/softmax/softmax_naive.cu", {"softmax_naive"}},
};

/* softmax.ring: no sums are there yet. */
enum { EMPTY_THREADS = 128 };
static struct cuda_kernel_request empty_request(void) {
    struct cuda_kernel_request r = {
        .file = "companions/softmax/softmax_empty.cu", .entry = "softmax_empty", .threads = EMPTY_THREADS};
    GPU_SET_CONSTANTS(&r, SOFTMAX_CONSTANTS, .DTYPE = 0, .BACKWARD = 0, .LOG = 0, .MASK = 0, .FLIP = 0, .VECTOR = 0,
                      .THREADS = EMPTY_THREADS, .LANES = 0, .CHUNKS = 0, .CLUSTER = 0, .RING = 0, .LAG = 0);
    return r;
}

int32_t softmax_requests(const fdm_softmax_plan *plan, struct cuda_kernel_request *requests) {
    const fdm_softmax_problem *p = &plan->problem;
    const fdm_companion_choice *c = &plan->choice;
    const struct parameters at = parameters_of(c);
    const int backward = p->pass == FDM_BACKWARD;
    if (c->kernel_index < 0 || c->kernel_index >= NUM_KERNELS ||
        strcmp(c->kernel, kernels[c->kernel_index].name) != 0 || c->shared_bytes != shared_bytes_of(p, at))
        return 0;
    const int in_pieces = c->kernel_index == RING || c->kernel_index == SPLIT;
    if (in_pieces && c->workspace_bytes < sums_bytes(p, at.pieces))
        return 0;
    const int clustered = c->kernel_index == RESIDENT && at.pieces > 1;
    int32_t count = 0;
    for (; count < COMPANION_REQUESTS_MAX && programs[c->kernel_index].entries[count]; count++) {
        struct cuda_kernel_request *r = &requests[count];
        *r = (struct cuda_kernel_request){.file = programs[c->kernel_index].file,
                                          .entry = programs[c->kernel_index].entries[count],
                                          .shared_bytes = (int32_t)c->shared_bytes,
                                          .threads = at.threads};
        GPU_SET_CONSTANTS(r, SOFTMAX_CONSTANTS, .DTYPE = p->dtype, .BACKWARD = backward, .LOG = p->log,
                          .MASK = p->has_mask, .FLIP = p->negative_scale, .VECTOR = at.vector, .THREADS = at.threads,
                          .LANES = at.lanes, .CHUNKS = at.chunks, .CLUSTER = clustered, .RING = at.ring,
                          .LAG = at.ring ? at.lag : 0);
        r->cluster = clustered ? SOFTMAX_CLUSTER_MAX : 1;
        /* two to eight numbers of a thread beside 8 chunks and a cluster's sums; with fewer threads it is slower */
        r->spill_bytes_max = clustered && !backward && p->dtype != FDM_FLOAT32 ? 32 : 0;
    }
    if (c->kernel_index == RING)
        requests[count++] = empty_request();
    return count;
}

fdm_status softmax_launch(const fdm_softmax_plan *plan, struct softmax_params *params, void *workspace, void *stream) {
    const struct parameters at = parameters_of(&plan->choice);
    struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
    const struct cuda_kernel *loaded[COMPANION_REQUESTS_MAX];
    int32_t count = softmax_requests(plan, requests);
    if (count == 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's shape or workspace is not its kernel's");
    fdm_status status = cuda_kernels_get(plan->choice.device.index, requests, count, loaded);
    params->chunks = (uint32_t)chunks_of(&plan->problem, at.vector);
    params->pieces = (uint32_t)at.pieces;
    params->partials = workspace;
    const int64_t rows_per_block = at.threads / at.lanes;
    const int is_ring = plan->choice.kernel_index == RING, is_resident = plan->choice.kernel_index == RESIDENT;
    const int64_t groups = is_ring ? at.groups : ceil_div(plan->problem.rows, rows_per_block);
    const int64_t blocks = groups * at.pieces;
    const int has_copier = at.threads > SOFTMAX_MAX_LANES + SOFTMAX_RING_SHARERS; /* from 9.0 on */
    const int early = is_ring ? has_copier : at.early;
    if (!status && is_ring) {
        const int64_t words = (plan->problem.rows * at.pieces + 1) / 2;
        const struct cuda_launch launch = {.kernel = loaded[--count],
                                           .grid = {(uint32_t)ceil_div(words, EMPTY_THREADS), 1, 1},
                                           .threads = EMPTY_THREADS,
                                           .programmatic_launch = early,
                                           .stream = stream,
                                           .arguments = params,
                                           .arguments_bytes = sizeof *params};
        status = cuda_launch(&launch);
    }
    for (int32_t i = 0; !status && i < count; i++) {
        const struct cuda_launch launch = {.kernel = loaded[i],
                                           .grid = {(uint32_t)blocks, 1, 1},
                                           .threads = (uint32_t)at.threads,
                                           .cluster = is_resident ? (uint32_t)at.pieces : 1,
                                           .programmatic_launch = early && (is_ring || is_resident || i > 0),
                                           .cooperative = is_ring,
                                           .stream = stream,
                                           .arguments = params,
                                           .arguments_bytes = sizeof *params};
        status = cuda_launch(&launch);
    }
    return status;
}
