"""mutations.py: one-line changes of host code, each with the test that must fail for it; scripts/mutate.py makes them.

A line stands here without its indentation, and exactly once in its file: whoever changes such a line changes it here too.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    kind: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    # workspaces
    Mutation(
        "a workspace a byte short", "src/attention.c",
        "if (plan->workspace_bytes > 0 && (!workspace || workspace_bytes < (size_t)plan->workspace_bytes))",
        "if (plan->workspace_bytes > 0 && (!workspace || workspace_bytes + 1 < (size_t)plan->workspace_bytes))",
        "test_plans"),
    Mutation(
        "a misaligned workspace", "src/attention.c",
        "if ((uintptr_t)workspace % 64)",
        "if ((uintptr_t)workspace % 32)",
        "test_plans"),
    Mutation(
        "a plan's workspace too small", "src/families/hopper/backward/hopper_backward.c",
        "plan->shared_bytes == shared_bytes(t, p) && plan->workspace_bytes >= workspace_bytes(plan, p);",
        "plan->shared_bytes == shared_bytes(t, p) && plan->workspace_bytes + 64 >= workspace_bytes(plan, p);",
        "test_plans"),
    Mutation(
        "a companion's workspace a byte short", "src/companions/companion.c",
        "if (choice->workspace_bytes > 0 && (!workspace || bytes < (size_t)choice->workspace_bytes))",
        "if (choice->workspace_bytes > 0 && (!workspace || bytes + 1 < (size_t)choice->workspace_bytes))",
        "test_companions"),
    Mutation(
        "top-W's workspace a byte short", "src/masks/intervals/masks.c",
        "if (workspace && bytes < needed)",
        "if (workspace && bytes + 1 < needed)",
        "test_companions"),
    # keys of the cache, and of kernels in memory
    Mutation(
        "half of the constants not in the key", "src/cuda/cache.c",
        "for (int32_t i = 0; i < request->num_constants; i++) {",
        "for (int32_t i = 0; i < request->num_constants; i += 2) {",
        "test_cuda_cache"),
    Mutation(
        "half of a constant not in the key", "src/cuda/cache.c",
        "hash = hash_bytes(hash, &request->constants[i].value, sizeof request->constants[i].value);",
        "hash = hash_bytes(hash, &request->constants[i].value, 4);",
        "test_cuda_cache"),
    Mutation(
        "the architecture not in the key", "src/cuda/cache.c",
        "hash = hash_text(hash, arch);",
        "(void)arch;",
        "test_cuda_cache"),
    Mutation(
        "the compiler's size and time not in the key", "src/cuda/cache.c",
        "key.compiler = compiler ? hash_end(hash_text(0xcbf29ce484222325ull, compiler->identity)) | 1 : 0;",
        "key.compiler = compiler ? hash_end(hash_text(0xcbf29ce484222325ull, compiler->path)) | 1 : 0;",
        "test_cuda_cache"),
    Mutation(
        "a constant that kernels in memory are not known by", "src/cuda/loaded_kernels.c",
        "if (kernel->values[i] != request->constants[i].value)",
        "if (i != 20 && kernel->values[i] != request->constants[i].value)",
        "test_cuda_reuse"),
    Mutation(
        "a constant that kernels in flight are not known by", "src/cuda/loaded_kernels.c",
        "if (a->constants[i].value != b->constants[i].value)",
        "if (i != 0 && a->constants[i].value != b->constants[i].value)",
        "test_cuda_reuse"),
    # plans and tensors
    Mutation(
        "fields compared by half", "src/attention.c",
        "return memcmp(planned, now, bytes) != 0;",
        "return memcmp(planned, now, bytes / 2) != 0;",
        "test_plans"),
    Mutation(
        "a field missing in the comparison", "src/problem/problem_fields.h",
        "X(has_lse_low, FIELD_INT32, 0, SAME_OUTPUTS)           \\",
        "X(has_lse_low, FIELD_INT32, 0, OF_PLAN) \\",
        "test_plans"),
    Mutation(
        "a field missing in gemm's comparison", "src/companions/gemm/gemm.c",
        "planned->accumulate_float16 == now->accumulate_float16 && planned->mappable <= now->mappable;",
        "planned->accumulate_float16 == now->accumulate_float16;",
        "test_companions"),
    Mutation(
        "a field missing in softmax's comparison", "src/companions/softmax/softmax.c",
        "planned->negative_scale == now->negative_scale && planned->aligned <= now->aligned;",
        "planned->aligned <= now->aligned;",
        "test_companions"),
    Mutation(
        "a kernel that is not asked whether it can", "src/gpu/gpu_family.c",
        "why = refusal_of(algorithm_of(family, plan->kernel_index), &device, p, text, sizeof text);",
        "why = NULL;",
        "test_plans"),
    # grids
    Mutation(
        "grids fold one too late", "src/gpu/gpu_backward.c",
        "int gpu_folds_grids(const fdm_problem *p) { return p->batch > 65535 || p->heads > 65535; }",
        "int gpu_folds_grids(const fdm_problem *p) { return p->batch > 65536 || p->heads > 65536; }",
        "test_cuda_limits"),
    Mutation(
        "a folded grid's second extent", "src/gpu/gpu_backward.c",
        "a->grid_y = (uint32_t)y;",
        "a->grid_y = (uint32_t)z;",
        "test_cuda_limits"),
    # where tensors lie
    Mutation(
        "aligned to 8 bytes", "src/problem/tensor.c",
        "if ((uintptr_t)tensor_data(tensor) % 16)",
        "if ((uintptr_t)tensor_data(tensor) % 8)",
        "test_places"),
    Mutation(
        "rows of a mask 2^31 bytes apart", "src/problem/problem.c",
        "return view->key == 1 && view->row * bytes <= INT32_MAX &&",
        "return view->key == 1 &&",
        "test_places"),
    Mutation(
        "v not looked at for tensor maps", "src/problem/problem.c",
        "p.keys_mappable = tensor_mappable(t->k) && tensor_mappable(t->v);",
        "p.keys_mappable = tensor_mappable(t->k);",
        "test_places"),
    Mutation(
        "a plan for tensor maps with tensors of none", "src/problem/problem_fields.h",
        "X(keys_mappable, FIELD_INT32, 1, FACT_KEYS_MAPPABLE)   \\",
        "X(keys_mappable, FIELD_INT32, 1, OF_PLAN) \\",
        "test_plans"),
    # statuses of errors
    Mutation(
        "the status of a full device", "src/cuda/driver.c",
        "fdm_status status = result == CU_ERROR_OUT_OF_MEMORY ? FDM_ERROR_OUT_OF_MEMORY : FDM_ERROR_SYSTEM;",
        "fdm_status status = FDM_ERROR_SYSTEM;",
        "test_cuda_faults"),
    Mutation(
        "the status of a misaligned workspace", "src/companions/companion.c",
        "return error_set(FDM_ERROR_WORKSPACE, \"workspace starts at an address that is not a multiple of 64\");",
        "return error_set(FDM_ERROR_INVALID_ARGUMENT, \"workspace starts at an address that is not a multiple of 64\");",
        "test_companions"),
    # problems
    Mutation(
        "a head dim of 0", "src/problem/problem.c",
        "{\"head_dim of q\", p->head_dim, 1, 65536},",
        "{\"head_dim of q\", p->head_dim, 0, 65536},",
        "test_bad_input"),
    Mutation(
        "a packed length of 2^31", "src/problem/problem.c",
        "{\"packed length of k\", p->total_k, 0, INT32_MAX},",
        "{\"packed length of k\", p->total_k, 0, INT64_MAX},",
        "test_bad_input"),
    Mutation(
        "a window below -1", "src/problem/problem.c",
        "if (p->window_left < -1 || p->window_right < -1)",
        "if (p->window_left < -1 || p->window_right < -2)",
        "test_bad_input"),
    Mutation(
        "a window one key too long", "src/problem/problem.c",
        "range.first = row - problem->window_left;",
        "range.first = row - problem->window_left - 1;",
        "test_visible"),
    Mutation(
        "cu_seqlens that fall", "src/problem/lengths.c",
        "if (cu[b + 1] < cu[b])",
        "if (cu[b + 1] < 0)",
        "test_bad_input"),
    # JSON of plans
    Mutation(
        "a field that JSON does not carry whole", "src/problem/problem_fields.h",
        "X(bias_shape, FIELD_SHAPE, FIELD_ONES, SAME_SCORES)    \\",
        "X(bias_shape, FIELD_INT64, FIELD_ONES, SAME_SCORES) \\",
        "test_plan_json"),
    Mutation(
        "an integer above 32 bits", "src/plan/plan_json.c",
        "if (*value < least || *value > most)",
        "if (*value < least)",
        "test_plan_json"),
    Mutation(
        "a key that stands twice", "src/plan/plan_json.c",
        "if (seen[index]++)",
        "if (seen[index]++ > 1)",
        "test_plan_json"),
    # structs of other headers
    Mutation(
        "a field behind a smaller struct", "src/base/struct_bytes.c",
        "memcpy((char *)given + sizeof has, (const char *)whole + sizeof has, (has < bytes ? has : bytes) - sizeof has);",
        "memcpy((char *)given + sizeof has, (const char *)whole + sizeof has, bytes - sizeof has);",
        "test_older_header"),
    Mutation(
        "a field that is not known", "src/base/struct_bytes.c",
        "if (has > bytes && !struct_is_zero((const char *)given + bytes, has - bytes)) {",
        "if (has > bytes && !struct_is_zero((const char *)given + bytes, 0)) {",
        "test_newer_header"),
    # settings, instruction sets, threads
    Mutation(
        "the unit of a size", "src/base/settings.c",
        "const int shift = unit ? 10 * (int)(unit - units + 1) : 0;",
        "const int shift = unit ? 10 * (int)(unit - units) : 0;",
        "test_cuda_reuse"),
    Mutation(
        "a set above the setting", "src/device/isa.c",
        "if (limit >= 0 && (int)isa > limit)",
        "if (limit >= 0 && (int)isa > limit + 1)",
        "test_isa"),
    Mutation(
        "a kernel that its name does not run", "src/families/cpu/cpu_family.c",
        "return by_name > (int)best ? (enum cpu_isa)by_name : best;",
        "return best;",
        "checks-emulated-intel"),
    Mutation(
        "a quota of CPUs rounded down", "src/device/quota.c",
        "return whole + (whole * period < quota);",
        "return whole;",
        "test_threads"),
    Mutation(
        "a plan kept for another kernel", "src/plan/plan.c",
        "(forced.tune && kept->generation != tuning_generation()) || !same_name(forced.kernel, kept->kernel) ||",
        "(forced.tune && kept->generation != tuning_generation()) ||",
        "test_kept_plans"),
    Mutation(
        "more threads than are asked for", "src/device/threads.c",
        "limit(&count, wanted);",
        "limit(&count, wanted + 1);",
        "test_threads"),
    # rules, masks, merge
    Mutation(
        "a rule's bound of shared memory", "src/families/mma/backward/mma_rules.c",
        "{.takes = {.column = MMA_SM90, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH, .limit_min = KB(176)},",
        "{.takes = {.column = MMA_SM90, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH, .limit_min = KB(160)},",
        "test_rules"),
    Mutation(
        "which of two equal keys top-W keeps", "src/masks/topk/topk.c",
        "return a.bias < b.bias || (a.bias == b.bias && a.index > b.index);",
        "return a.bias < b.bias || (a.bias == b.bias && a.index < b.index);",
        "test_masks"),
    Mutation(
        "a window's last row", "src/masks/intervals/intervals.c",
        "set_ramp(end, 0, num_keys, rule->left + 1 - rule->row_shift);",
        "set_ramp(end, 0, num_keys, rule->left - rule->row_shift);",
        "test_masks"),
    Mutation(
        "a document's last key", "src/masks/intervals/intervals.c",
        "end.data[j * end.stride] = last;",
        "end.data[j * end.stride] = last - 1;",
        "test_masks"),
    Mutation(
        "a part without keys in a merge", "src/merge.c",
        "const double part2 = two.is_empty ? 0 : two.share * load(in2 + d * step2, m->dtype);",
        "const double part2 = two.share * load(in2 + d * step2, m->dtype);",
        "test_merge"),
    # whom the cache trusts
    Mutation(
        "files that a group may write", "src/system/posix_files.c",
        "return s->st_mode & (S_IWGRP | S_IWOTH) ? \"may be written by others than its owner\" : NULL;",
        "return s->st_mode & S_IWOTH ? \"may be written by others than its owner\" : NULL;",
        "test_cuda_reuse"),
    Mutation(
        "another user's files", "src/system/posix_files.c",
        "if (s->st_uid != geteuid() && s->st_uid != 0)",
        "if (s->st_uid != geteuid() && s->st_uid == 0)",
        "test_cuda_reuse"),
    Mutation(
        "an entry with more behind it", "src/cuda/cache.c",
        "if (valid && fgetc(file) != EOF) {",
        "if (valid && fgetc(file) == -2) {",
        "test_cuda_cache"),
    # row intervals
    Mutation(
        "a row's range a key longer", "src/families/cpu/visible.c",
        "const int64_t end = lower(ranges.end[n * ranges.end_step] - window->first, count);",
        "const int64_t end = lower(ranges.end[n * ranges.end_step] - window->first + 1, count);",
        "test_visible"),
    Mutation(
        "a walk that ends before a row's last key", "src/problem/interval_views.c",
        "hull.last = end > hull.last ? end : hull.last;",
        "hull.last = end > hull.last ? end - 1 : hull.last;",
        "test_visible"),
]
