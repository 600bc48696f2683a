/* ranks_plan.c: what a rank does, decided before bytes move, alike on every rank. */
#include "parallel/ranks_plan.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"
#include "cuda/side_stream.h"
#include "parallel/ranks_call.h"
#include "parallel/ranks_local.h"
#include "problem/problem.h"

/* FNV-1a (Fowler, Noll, Vo). */
uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    const uint8_t *at = bytes;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}
static const uint64_t hash_start = 0xcbf29ce484222325u;

enum scores_kind scores_kind_of(int present, const int64_t *shape, const fdm_problem *whole) {
    if (!present)
        return SCORES_NONE;
    if (shape[2] > 1 || (whole->seqlen_q == 1 && shape[3] != whole->seqlen_k))
        return SCORES_OF_ROWS;
    return shape[3] == whole->seqlen_k && whole->seqlen_k != 1 ? SCORES_OF_KEYS : SCORES_CONSTANT;
}

/* ---- what is refused ---- */

static fdm_status check_problem(const fdm_problem *p, const fdm_layout *rows, const fdm_layout *keys,
                                const fdm_rank_mask *mask, const fdm_device *device) {
    if (p->varlen || p->has_cache || p->has_seqused_q || p->has_seqused_k)
        return error_set(FDM_ERROR_UNSUPPORTED, "packed sequences, lengths and caches are not computed over ranks");
    if (p->has_row_intervals || p->block_mask_size || p->has_tree)
        return error_set(FDM_ERROR_UNSUPPORTED, "row intervals, block masks and trees are not computed over ranks");
    if (device->id.type != FDM_CPU && device->id.type != FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED, "ranks compute on CPUs and CUDA devices; the device is %s",
                         device->name);
    if (p->seqlen_q != rows->total || p->seqlen_k != keys->total)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the problem has %lld rows and %lld keys, the layouts %lld, %lld",
                         (long long)p->seqlen_q, (long long)p->seqlen_k, (long long)rows->total,
                         (long long)keys->total);
    if (p->causal != mask->causal || p->window_left != mask->window_left || p->window_right != mask->window_right ||
        (p->has_intervals ? p->interval_batch * p->interval_heads : 0) != mask->num_lists)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the mask differs from the problem's in causal, window or the number of interval lists");
    if (p->needs_dsink)
        return error_set(FDM_ERROR_UNSUPPORTED, "the gradient of a sink is not computed over ranks");
    if (p->add_dkv || p->dkv_float32)
        return error_set(FDM_ERROR_UNSUPPORTED, "dk and dv over ranks have q's dtype, and are not added to");
    return FDM_OK;
}

static fdm_status check_scores(const fdm_ranks_plan *plan) {
    const fdm_problem *p = &plan->problem;
    if (!p->needs_dbias)
        return FDM_OK;
    if (plan->bias_kind == SCORES_CONSTANT)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "the gradient of a bias without rows and keys is not computed over ranks");
    if (plan->bias_kind == SCORES_OF_KEYS && p->bias_dtype != FDM_FLOAT32 && p->bias_dtype != FDM_FLOAT64)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "bias is %s; over ranks a bias of keys whose gradient is wanted is float32 or float64",
                         fdm_dtype_name(p->bias_dtype));
    return FDM_OK;
}

/* ---- keys and algorithm ---- */

/* Needed keys of all ranks; one range where a mask or bias has a column for every key. */
static fdm_status find_needed(const fdm_ranks_plan *plan, const fdm_layout *rows, const fdm_rank_mask *mask,
                              int all_keys, struct range_list *needed) {
    const int has_rows = plan->mask_kind == SCORES_OF_ROWS || plan->bias_kind == SCORES_OF_ROWS;
    fdm_status status = all_keys ? FDM_OK : rank_mask_needed(mask, rows, needed);
    int fits = 1;
    for (int32_t r = 0; !status && r < rows->ranks; r++) {
        struct range_list *list = &needed[r];
        if (all_keys && layout_rows(rows, r))
            fits &= range_list_add(list, 0, mask->seqlen_k);
        else if (has_rows && list->count > 1)
            list->data[0].end = list->data[list->count - 1].end, list->count = 1;
    }
    return fits ? status : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the keys of %d ranks", rows->ranks);
}

/* Of the rank that fetches most, and this one's own. */
static int64_t count_fetched(fdm_ranks_plan *plan, const fdm_layout *keys, const struct range_list *needed) {
    int64_t most = 0;
    for (int32_t r = 0; r < keys->ranks; r++) {
        const int64_t fetched = layout_fetched(keys, &needed[r], r);
        most = fetched > most ? fetched : most;
        if (r == plan->rank)
            plan->keys_fetched = fetched;
        plan->table_hash = hash_bytes(plan->table_hash, &fetched, sizeof fetched);
    }
    return most;
}

static const char *why_no_ring(const fdm_ranks_plan *plan) {
    const fdm_problem *p = &plan->problem;
    const int is_16_bit = p->dtype == FDM_FLOAT16 || p->dtype == FDM_BFLOAT16;
    return p->needs_dbias                                             ? "the gradient of a bias is wanted"
           : p->has_bias && is_16_bit && p->bias_dtype != FDM_FLOAT32 ? "the bias is not float32"
           : p->pass == FDM_BACKWARD && p->dtype == FDM_FLOAT64       ? "float64 has no gradients in parts"
                                                                      : NULL;
}

/* Of the rank that fetches most: keys of others that it holds at a time. */
static int64_t gather_bytes(const fdm_ranks_plan *plan, int64_t most_fetched) {
    const fdm_problem *p = &plan->problem;
    const struct head_sets sets = head_sets_of(p->heads_kv, 1, most_fetched ? HEAD_SETS_MAX : 1);
    int64_t heads = 0;
    for (int32_t slot = 0; slot < plan->slots; slot++)
        heads += head_sets_most(&sets, plan->slots, slot);
    return most_fetched * p->batch * heads * (p->head_dim + p->head_dim_v) * fdm_dtype_bytes(p->dtype);
}

/* Parts of dk and dv are added by the kernels. */
static fdm_status check_sums(const fdm_ranks_plan *plan) {
    const fdm_problem *p = &plan->problem;
    const int has_parts = p->needs_dk || p->needs_dv;
    if (plan->device.id.type == FDM_CUDA && p->dtype == FDM_FLOAT32 && has_parts)
        return error_set(
            FDM_ERROR_UNSUPPORTED,
            "q is float32; on CUDA devices dk and dv over ranks are of 16-bit tensors, but by ulysses and the ring");
    return FDM_OK;
}

static fdm_status choose_algorithm(fdm_ranks_plan *plan, const fdm_layout *rows, int64_t most_fetched,
                                   fdm_rank_algorithm wished, int64_t memory) {
    const fdm_problem *p = &plan->problem;
    const int64_t depth = p->head_dim + p->head_dim_v;
    const int has_rows = plan->mask_kind == SCORES_OF_ROWS || plan->bias_kind == SCORES_OF_ROWS;
    int64_t most_rows = 0;
    for (int32_t r = 0; r < rows->ranks; r++)
        most_rows = layout_rows(rows, r) > most_rows ? layout_rows(rows, r) : most_rows;
    const int64_t by_keys = most_fetched * p->heads_kv * depth;
    const int64_t by_heads = most_rows * (p->heads + p->heads_kv) * depth * (plan->ranks - 1) / plan->ranks;
    const char *why_not = p->heads_kv % plan->ranks ? "KV heads are no multiple of ranks"
                          : has_rows                ? "a mask or bias has a row axis"
                          : p->needs_dbias          ? "the gradient of a bias is wanted"
                          : plan->ranks == 1        ? "there is one rank"
                                                    : NULL;
    const char *no_ring = why_no_ring(plan);
    const int must_ring = memory && gather_bytes(plan, most_fetched) > memory && (why_not || by_heads >= by_keys);
    if (wished == FDM_RANKS_ULYSSES && why_not)
        return error_set(FDM_ERROR_UNSUPPORTED, "ulysses cannot run this problem: %s", why_not);
    if (wished == FDM_RANKS_BOTH && (has_rows || p->needs_dbias))
        return error_set(FDM_ERROR_UNSUPPORTED, "both cannot run this problem: %s",
                         has_rows ? "a mask or bias has a row axis" : "the gradient of a bias is wanted");
    if (wished == FDM_RANKS_RING && no_ring)
        return error_set(FDM_ERROR_UNSUPPORTED, "the ring cannot run this problem: %s", no_ring);
    if (!wished && must_ring && !no_ring) {
        snprintf(plan->reason, sizeof plan->reason, "gather holds %lld bytes of keys of other ranks, more than %lld",
                 (long long)gather_bytes(plan, most_fetched), (long long)memory);
        wished = plan->algorithm = FDM_RANKS_RING;
        return FDM_OK;
    }
    if (wished)
        snprintf(plan->reason, sizeof plan->reason, "%s was asked for", fdm_rank_algorithm_name(wished));
    else if (why_not)
        snprintf(plan->reason, sizeof plan->reason, "no ulysses: %s", why_not);
    else
        snprintf(plan->reason, sizeof plan->reason,
                 "of one row of a batch the busiest rank receives %lld numbers by gather, %lld by ulysses",
                 (long long)by_keys, (long long)by_heads);
    plan->algorithm = wished ? wished : !why_not && by_heads < by_keys ? FDM_RANKS_ULYSSES : FDM_RANKS_GATHER;
    return plan->algorithm == FDM_RANKS_ULYSSES || plan->algorithm == FDM_RANKS_RING ? FDM_OK : check_sums(plan);
}

/* ---- what follows ---- */

/* Where heads are exchanged: of a rank's own ones. Several sets are worth their launches where they hide messages. */
static struct head_sets sets_of_share(const fdm_ranks_plan *plan) {
    return head_sets_of(plan->problem.heads_kv / plan->head_ranks, 1, plan->slots > 1 ? HEAD_SETS_MAX : 1);
}

static fdm_status make_ulysses(fdm_ranks_plan *plan, const fdm_layout *rows, const fdm_layout *keys,
                               const fdm_rank_mask *mask, struct range_list *needed) {
    fdm_range all_rows = {0, rows->total}, all_keys = {0, keys->total};
    fdm_status status = FDM_OK;
    for (int which = 0; which < 2 && !status; which++) {
        for (int32_t r = 0; r < plan->ranks; r++)
            needed[r] = (struct range_list){which ? &all_keys : &all_rows, 1, 1};
        status = which ? routes_make(keys, needed, plan->rank, &plan->sends, &plan->receives)
                       : routes_make(rows, needed, plan->rank, &plan->row_sends, &plan->row_receives);
    }
    memset(needed, 0, (size_t)plan->ranks * sizeof *needed); /* they were borrowed */
    plan->head_ranks = plan->ranks;
    plan->buffer_rows = keys->total;
    plan->query_rows = rows->total;
    plan->sets = sets_of_share(plan);
    return status ? status : pieces_whole(&plan->pieces, mask);
}

/* Rows of the ranks that exchange heads with rank `first` and those after it. */
static int add_rows_of(const fdm_layout *rows, int32_t first, int32_t count, struct range_list *list) {
    int fits = 1;
    for (int64_t n = 0; n < rows->num_ranges; n++)
        if (rows->sorted[n].owner >= first && rows->sorted[n].owner < first + count)
            fits &= range_list_add(list, rows->sorted[n].first, rows->sorted[n].end);
    return fits;
}

/* What some rank of those needs: of sorted lists the ranges that begin first, one after the other. */
static int add_keys_of(const struct range_list *needed, int32_t count, struct range_list *list) {
    int fits = 1;
    for (int64_t from = 0;;) { /* keys before it are done */
        fdm_range next = {INT64_MAX, 0};
        for (int32_t r = 0; r < count; r++)
            for (int64_t n = 0; n < needed[r].count; n++) {
                const fdm_range each = needed[r].data[n];
                const int64_t first = each.first > from ? each.first : from;
                if (each.end > from && (first < next.first || (first == next.first && each.end > next.end)))
                    next = (fdm_range){first, each.end};
            }
        if (next.first == INT64_MAX)
            return fits;
        fits &= range_list_add(list, next.first, next.end);
        from = next.end;
    }
}

static int32_t head_ranks_of(const fdm_ranks_plan *plan, int32_t wished) {
    int32_t most = 1;
    for (int32_t n = 1; n <= 8 && n <= plan->ranks; n++)
        if (plan->ranks % n == 0 && plan->problem.heads_kv % n == 0)
            most = n;
    return wished ? wished : most;
}

/* Ranks first .. first + head_ranks - 1 exchange heads; such groups gather keys. */
static fdm_status make_both(fdm_ranks_plan *plan, const fdm_layout *rows, const fdm_layout *keys,
                            const fdm_rank_mask *mask, const struct range_list *needed, int32_t wished) {
    const int32_t share = head_ranks_of(plan, wished), groups = share > 0 ? plan->ranks / share : 1;
    if (share < 1 || plan->ranks % share || plan->problem.heads_kv % share)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "head_ranks is %d; it must divide the %d ranks and the %lld KV heads", share, plan->ranks,
                         (long long)plan->problem.heads_kv);
    const size_t bytes = (size_t)plan->ranks * sizeof(struct range_list);
    struct range_list *own = memory_allocate(2 * bytes), *each = memory_allocate(2 * bytes);
    int fits = own && each;
    if (own)
        memset(own, 0, 2 * bytes);
    for (int32_t g = 0; fits && g < groups; g++)
        fits &= add_rows_of(rows, g * share, share, &own[g]) &
                add_keys_of(needed + g * share, share, &own[plan->ranks + g]);
    for (int32_t n = 0; fits && n < 2 * plan->ranks; n++) /* they are borrowed */
        each[n] = own[n / plan->ranks * plan->ranks + n % plan->ranks / share];
    fdm_status status =
        fits ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the rows of %d ranks", plan->ranks);
    if (!status)
        status = routes_make(rows, each, plan->rank, &plan->row_sends, &plan->row_receives);
    if (!status)
        status = routes_make(keys, each + plan->ranks, plan->rank, &plan->sends, &plan->receives);
    if (!status) {
        const struct range_list *mine = &each[plan->rank], *seen = &each[plan->ranks + plan->rank];
        plan->head_ranks = share;
        plan->query_rows = ranges_size(mine->data, mine->count);
        plan->buffer_rows = ranges_size(seen->data, seen->count);
        plan->sets = sets_of_share(plan);
        status = pieces_make(&plan->pieces, mask, mine->data, mine->count, seen);
    }
    for (int32_t n = 0; own && n < 2 * plan->ranks; n++)
        range_list_release(&own[n]);
    memory_release(own);
    memory_release(each);
    return status;
}

static fdm_status make_ring(fdm_ranks_plan *plan, const fdm_layout *rows, const fdm_layout *keys,
                            const fdm_rank_mask *mask, const struct range_list *needed) {
    const int has_columns = plan->mask_kind == SCORES_OF_ROWS || plan->bias_kind == SCORES_OF_ROWS;
    plan->sets = (struct head_sets){1, {plan->problem.heads_kv}};
    return ring_steps_make(plan, rows, keys, mask, needed, has_columns);
}

static fdm_status make_gather(fdm_ranks_plan *plan, const fdm_layout *rows, const fdm_layout *keys,
                              const fdm_rank_mask *mask, const struct range_list *needed, int64_t most_fetched) {
    const fdm_problem *p = &plan->problem;
    const int shared = p->needs_dbias && plan->bias_kind == SCORES_OF_ROWS && p->bias_shape[1] == 1;
    const int32_t most = most_fetched && !shared ? HEAD_SETS_MAX : 1; /* a shared gradient is rounded once */
    const int64_t first = rows->begin[plan->rank];
    plan->buffer_rows = ranges_size(needed[plan->rank].data, needed[plan->rank].count);
    plan->sets = head_sets_of(p->heads_kv, 1, most);
    const fdm_status status = routes_make(keys, needed, plan->rank, &plan->sends, &plan->receives);
    return status ? status
                  : pieces_make(&plan->pieces, mask, rows->ranges + first, rows->begin[plan->rank + 1] - first,
                                &needed[plan->rank]);
}

/* The kernel that one rank would run on the whole problem: calls that run the same have its bits. */
static void choose_kernel(fdm_ranks_plan *plan) {
    fdm_options options = problem_options(&plan->problem);
    fdm_plan whole = {.struct_bytes = sizeof whole};
    options.num_threads = plan->num_threads;
    if (plan->problem.dtype != FDM_FLOAT64 && !fdm_plan_attention(&plan->device, &plan->problem, &options, &whole))
        snprintf(plan->choice, sizeof plan->choice, "%s", whole.choice);
}

static fdm_status count_once(fdm_ranks_plan *plan, int unaligned, struct ranks_call *call) {
    struct local_tensors local;
    char *const start = (char *)((uintptr_t)1 << 50); /* no memory is there */
    local_describe(plan, unaligned, &local);
    *call = (struct ranks_call){.plan = plan, .tensors = &local.tensors, .counting = 1, .base = start, .at = start};
    const fdm_status status = ranks_run(call, plan->algorithm);
    plan->call_bytes = call->call_bytes > plan->call_bytes ? call->call_bytes : plan->call_bytes;
    return status;
}

static fdm_status count_workspace(fdm_ranks_plan *plan) {
    struct ranks_call call;
    fdm_status status = count_once(plan, 1, &call);
    if (!status)
        status = count_once(plan, 0, &call);
    const size_t plans = status ? 0 : (size_t)call.num_calls * sizeof *plan->call_plans;
    if (plans && plan->device.id.type == FDM_CUDA && !(plan->call_plans = memory_allocate(plans)))
        status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the plans of %d calls", call.num_calls);
    if (!status) /* calls are known now */
        status = count_once(plan, 0, &call);
    plan->messages_max = call.num_messages;
    plan->num_calls = call.num_calls;
    plan->bytes_sent = call.bytes_sent;
    plan->bytes_received = call.bytes_received;
    plan->workspace_bytes = (size_t)(call.at - call.base);
    const size_t messages = 2 * (size_t)plan->messages_max * sizeof(fdm_message);
    if (plan->device.id.type == FDM_CPU)
        plan->workspace_bytes += messages + 2 * 64;
    else if (!status && !(plan->messages = memory_allocate(messages)))
        status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %lld messages", (long long)plan->messages_max);
    return status;
}

static uint64_t layout_hash_of(const fdm_layout *layout) {
    uint64_t hash = hash_bytes(hash_start, &layout->ranks, sizeof layout->ranks);
    hash = hash_bytes(hash, layout->begin, ((size_t)layout->ranks + 1) * sizeof *layout->begin);
    return hash_bytes(hash, layout->ranges, (size_t)layout->num_ranges * sizeof *layout->ranges);
}

static uint64_t mask_hash_of(const fdm_rank_mask *m) {
    const int64_t words[] = {m->causal, m->seqlen_q, m->seqlen_k, m->window_left, m->window_right, m->num_lists};
    const size_t bytes = (size_t)(m->num_lists * m->seqlen_k) * sizeof *m->interval_start;
    uint64_t hash = hash_bytes(hash_start, words, sizeof words);
    if (!bytes)
        return hash;
    hash = hash_bytes(hash, m->interval_start, bytes);
    return hash_bytes(hash, m->interval_end, bytes);
}

static fdm_status intervals_to_device(fdm_ranks_plan *plan, int64_t lists) {
    fdm_status status = pieces_to_device(&plan->pieces, lists, plan->device.id.index);
    for (int32_t t = 0; plan->steps && t < plan->ranks; t++)
        for (int64_t n = 0; !status && n < plan->steps[t].num_folds; n++)
            status = pieces_to_device(&plan->steps[t].folds[n], lists, plan->device.id.index);
    return status;
}

/* A plan of a device that is not there has none. */
static fdm_status make_side(fdm_ranks_plan *plan) {
    const int32_t stages = plan->algorithm == FDM_RANKS_RING ? plan->ranks : plan->sets.count;
    if (stages < 2)
        plan->slots = 1;
    return plan->slots > 1 && cuda_device_count() > plan->device.id.index
               ? cuda_side_create(plan->device.id.index, &plan->side)
               : FDM_OK;
}

static fdm_status fill_plan(fdm_ranks_plan *plan, const fdm_layout *rows, const fdm_layout *keys,
                            const fdm_rank_mask *mask, const fdm_ranks_options *options, struct range_list *needed) {
    const fdm_problem *p = &plan->problem;
    plan->mask_kind = scores_kind_of(p->has_mask, p->mask_shape, p);
    plan->bias_kind = scores_kind_of(p->has_bias, p->bias_shape, p);
    plan->layout_hash = layout_hash_of(rows) ^ (3 * layout_hash_of(keys));
    plan->mask_hash = mask_hash_of(mask);
    plan->table_hash = hash_start;
    plan->slots = plan->device.id.type == FDM_CUDA && plan->ranks > 1 ? RANKS_SLOTS_MAX : 1;
    fdm_status status = check_scores(plan);
    if (!status)
        status = find_needed(plan, rows, mask, options->all_keys, needed);
    const int64_t most = status ? 0 : count_fetched(plan, keys, needed);
    if (!status)
        status = choose_algorithm(plan, rows, most, options->algorithm, options->memory_bytes);
    if (status)
        return status;
    plan->head_ranks = 1;
    if (plan->algorithm == FDM_RANKS_GATHER) {
        status = make_gather(plan, rows, keys, mask, needed, most);
    } else if (plan->algorithm == FDM_RANKS_BOTH) {
        status = make_both(plan, rows, keys, mask, needed, options->head_ranks);
    } else if (plan->algorithm == FDM_RANKS_RING) {
        status = make_ring(plan, rows, keys, mask, needed);
    } else {
        for (int32_t r = 0; r < plan->ranks; r++)
            range_list_release(&needed[r]);
        status = make_ulysses(plan, rows, keys, mask, needed);
    }
    if (!status && !options->other_kernel && plan->algorithm != FDM_RANKS_RING) /* whose parts are of another dtype */
        choose_kernel(plan);
    if (!status && plan->device.id.type == FDM_CUDA)
        status = intervals_to_device(plan, mask->num_lists ? mask->num_lists : 1);
    if (!status)
        status = make_side(plan);
    return status ? status : count_workspace(plan);
}

/* ---- public ---- */

static fdm_status make_plan(const fdm_device *device, const fdm_problem *problem, const fdm_layout *rows,
                            const fdm_layout *keys, const fdm_rank_mask *mask, const fdm_ranks_options *options,
                            fdm_ranks_plan **plan) {
    fdm_ranks_plan *made = memory_allocate(sizeof *made);
    struct range_list *needed = memory_allocate((size_t)rows->ranks * sizeof *needed);
    fdm_status status = made && needed ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a plan");
    if (!status) {
        memset(needed, 0, (size_t)rows->ranks * sizeof *needed);
        *made = (fdm_ranks_plan){.device = *device,
                                 .problem = *problem,
                                 .mask = *mask,
                                 .ranks = rows->ranks,
                                 .rank = options->rank,
                                 .num_threads = options->num_threads,
                                 .sm_margin = options->sm_margin,
                                 .rows = layout_rows(rows, options->rank),
                                 .keys = layout_rows(keys, options->rank),
                                 .interval_batch = problem->interval_batch,
                                 .interval_heads = problem->interval_heads};
        made->mask.interval_start = made->mask.interval_end = NULL;
        status = fill_plan(made, rows, keys, mask, options, needed);
        for (int32_t r = 0; r < rows->ranks; r++)
            range_list_release(&needed[r]);
    }
    memory_release(needed);
    if (status && made && needed)
        fdm_ranks_plan_release(made);
    else if (status)
        memory_release(made);
    else
        *plan = made;
    return status;
}

fdm_status fdm_plan_ranks(const fdm_device *device, const fdm_problem *problem, const fdm_layout *layout,
                          const fdm_layout *layout_keys, const fdm_rank_mask *mask, const fdm_ranks_options *options,
                          fdm_ranks_plan **plan) {
    fdm_device device_room;
    fdm_ranks_options options_room;
    fdm_rank_mask whole;
    if (!(device = STRUCT_READ(fdm_device, device, &device_room)) ||
        !(options = STRUCT_READ(fdm_ranks_options, options, &options_room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (!layout || !plan)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", layout ? "plan" : "layout");
    const fdm_layout *keys = layout_keys ? layout_keys : layout;
    if (keys->ranks != layout->ranks || options->rank < 0 || options->rank >= layout->ranks)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "layout has %d ranks and layout_keys %d; the plan is for rank %d",
                         layout->ranks, keys->ranks, options->rank);
    fdm_status status = fdm_problem_validate(problem);
    if (!status)
        status = rank_mask_read(mask, layout->total, keys->total, &whole);
    if (!status)
        status = check_problem(problem, layout, keys, &whole, device);
    return status ? status : make_plan(device, problem, layout, keys, &whole, options, plan);
}

void fdm_ranks_plan_release(fdm_ranks_plan *plan) {
    if (!plan)
        return;
    routes_release(&plan->sends);
    routes_release(&plan->receives);
    routes_release(&plan->row_sends);
    routes_release(&plan->row_receives);
    pieces_release(&plan->pieces);
    ring_steps_release(plan);
    cuda_side_release(plan->side);
    memory_release(plan->messages);
    memory_release(plan->call_plans);
    memory_release(plan);
}

fdm_status fdm_ranks_plan_query(const fdm_ranks_plan *plan, fdm_ranks_plan_info *info) {
    if (!plan)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "plan is NULL");
    fdm_ranks_plan_info made = {.ranks = plan->ranks,
                                .rank = plan->rank,
                                .algorithm = plan->algorithm,
                                .num_sets = plan->sets.count,
                                .num_calls = plan->num_calls,
                                .rows = plan->rows,
                                .keys = plan->keys,
                                .keys_fetched = plan->keys_fetched,
                                .bytes_received = plan->bytes_received,
                                .bytes_sent = plan->bytes_sent,
                                .workspace_bytes = (int64_t)plan->workspace_bytes};
    memcpy(made.choice, plan->choice, sizeof made.choice);
    memcpy(made.reason, plan->reason, sizeof made.reason);
    return STRUCT_WRITE(fdm_ranks_plan_info, info, &made);
}
