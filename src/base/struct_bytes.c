/* struct_bytes.c: reads and writes structs of callers by the size that they record. */
#include "base/struct_bytes.h"

#include <stddef.h>
#include <string.h>

#include "base/error.h"

/* A later version's field must not take the place of padding, which a program has not set. */
#define ENDS_WITH(type, member)                                                          \
    _Static_assert(offsetof(type, member) + sizeof(((type *)0)->member) == sizeof(type), \
                   #type " ends in padding, or not with its last member")
ENDS_WITH(fdm_cache, fault);
ENDS_WITH(fdm_tensors, tree);
ENDS_WITH(fdm_tile_plan, problem);
ENDS_WITH(fdm_append_tensors, stream);
ENDS_WITH(fdm_options, split_keys);
ENDS_WITH(fdm_merge_tensors, lse_low);
ENDS_WITH(fdm_device, bandwidth);
ENDS_WITH(fdm_arch_config, shared_bytes);
ENDS_WITH(fdm_plan, reason);
ENDS_WITH(fdm_kernel_info, device_type);
ENDS_WITH(fdm_launch, executor);
ENDS_WITH(fdm_kernel_resources, shared_bytes);
ENDS_WITH(fdm_key_rules, cu_seqlens_k);
ENDS_WITH(fdm_topk_slots, v);
ENDS_WITH(fdm_setting_info, value);
ENDS_WITH(fdm_cache_info, ignored);
ENDS_WITH(fdm_softmax_tensors, dx);
ENDS_WITH(fdm_softmax_options, tune);
ENDS_WITH(fdm_softmax_plan, choice);
ENDS_WITH(fdm_gemm_tensors, out);
ENDS_WITH(fdm_gemm_options, tune);
ENDS_WITH(fdm_gemm_plan, choice);
ENDS_WITH(fdm_prediction, name);
ENDS_WITH(fdm_tune_options, stream);
ENDS_WITH(fdm_tune_row, why);
ENDS_WITH(fdm_tune_result, reserved);
ENDS_WITH(fdm_kept_choice, ignored);
ENDS_WITH(fdm_rank_mask, interval_end);
ENDS_WITH(fdm_layout_wish, range_counts);
ENDS_WITH(fdm_links, sums_bandwidth);
ENDS_WITH(fdm_rank_forecast, seconds);
ENDS_WITH(fdm_ranks_forecast, reason);
ENDS_WITH(fdm_communicator, reserved);
ENDS_WITH(fdm_ranks_options, memory_bytes);
ENDS_WITH(fdm_ranks_plan_info, reason);

/* Other numbers are of memory that nobody set: sizes are multiples of the alignment, and far below the limit. */
enum { ALIGNMENT = _Alignof(uint32_t), LIMIT = 1 << 16 };

fdm_status struct_check(const void *given, const char *name, const char *type) {
    if (!given)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    const uint32_t bytes = *(const uint32_t *)given;
    if (bytes > 0 && bytes <= LIMIT && bytes % ALIGNMENT == 0)
        return FDM_OK;
    const int by_default = strstr(type, "_options") != NULL;
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s->struct_bytes is %u; it must be sizeof(%s)%s%s%s", name, bytes,
                     type, by_default ? ", as " : "", by_default ? type : "", by_default ? "_default() sets it" : "");
}

const void *struct_read(const void *given, void *room, size_t bytes, const char *name, const char *type) {
    if (struct_check(given, name, type))
        return NULL;
    const uint32_t has = *(const uint32_t *)given;
    if (has == bytes)
        return given;
    if (has > bytes && !struct_is_zero((const char *)given + bytes, has - bytes)) {
        error_set(FDM_ERROR_INVALID_ARGUMENT,
                  "%s has %u bytes, and those from the %zu-th on are not 0; " FDM_NEWER_FIELD, name, has, bytes);
        return NULL;
    }
    memset(room, 0, bytes);
    memcpy(room, given, has < bytes ? has : bytes);
    *(uint32_t *)room = (uint32_t)bytes;
    return room;
}

fdm_status struct_write(void *given, const void *whole, size_t bytes, const char *name, const char *type) {
    const fdm_status status = struct_check(given, name, type);
    if (status)
        return status;
    const uint32_t has = *(const uint32_t *)given;
    memcpy((char *)given + sizeof has, (const char *)whole + sizeof has, (has < bytes ? has : bytes) - sizeof has);
    if (has > bytes)
        memset((char *)given + bytes, 0, has - bytes);
    return FDM_OK;
}
