/* companion.c: the walk over an operation's kernels, and the workspace of a call. */
#include "companions/companion.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/struct_bytes.h"

/* "a: why; b: why", as much as there is room for. */
static void add_reason(char *reasons, size_t size, const char *name, const char *why) {
    const size_t used = strlen(reasons);
    snprintf(reasons + used, size - used, "%s%s: %s", used ? "; " : "", name, why);
}

static void take(const struct companion_operation *operation, int32_t index, const fdm_device *device,
                 const void *problem, struct fdm_companion_choice *choice) {
    choice->kernel_index = index;
    snprintf(choice->kernel, sizeof choice->kernel, "%s", operation->kernels[index].name);
    operation->kernels[index].fill(device, problem, choice);
}

static fdm_status choose_forced(const struct companion_operation *operation, const fdm_device *device,
                                const void *problem, const char *name, struct fdm_companion_choice *choice) {
    for (int32_t i = 0; i < operation->num_kernels; i++) {
        const struct companion_kernel *k = &operation->kernels[i];
        if (strcmp(k->name, name) != 0)
            continue;
        const char *refused = k->refusal(device, problem);
        if (refused)
            return error_set(FDM_ERROR_UNSUPPORTED, "kernel '%s' cannot run it: %s", name, refused);
        take(operation, i, device, problem, choice);
        snprintf(choice->reason, sizeof choice->reason, "asked for by name");
        return FDM_OK;
    }
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "kernel is '%s', which is no kernel of %s", name, operation->name);
}

fdm_status companion_choose(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                            const char *kernel, struct fdm_companion_choice *choice) {
    char reasons[sizeof choice->reason] = "";
    *choice = (struct fdm_companion_choice){.device = device->id};
    if (device->id.type != FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED, "%s runs on CUDA devices only, but the device is %s", operation->name,
                         device->name);
    if (device->compute_major < 8)
        return error_set(FDM_ERROR_UNSUPPORTED, "the CUDA device has compute capability %d.%d; 8.0 is the lowest",
                         device->compute_major, device->compute_minor);
    if (kernel)
        return choose_forced(operation, device, problem, kernel, choice);
    for (int32_t i = 0; i < operation->num_kernels; i++) {
        const struct companion_kernel *k = &operation->kernels[i];
        if (!k->chosen_freely)
            continue;
        const char *why = k->refusal(device, problem);
        if (!why && k->passed_over)
            why = k->passed_over(device, problem);
        if (!why) {
            take(operation, i, device, problem, choice);
            snprintf(choice->reason, sizeof choice->reason, "%s%s%s takes it", reasons, *reasons ? "; " : "", k->name);
            return FDM_OK;
        }
        add_reason(reasons, sizeof reasons, k->name, why);
    }
    return error_set(FDM_ERROR_UNSUPPORTED, "no kernel of %s takes the problem: %s", operation->name, reasons);
}

fdm_status companion_variant(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                             const char *kernel, int32_t number, struct fdm_companion_choice *choice) {
    const fdm_status status = companion_choose(operation, device, problem, kernel, choice);
    if (status || number == 0)
        return status;
    const struct companion_kernel *k = &operation->kernels[choice->kernel_index];
    struct fdm_companion_choice other = *choice;
    memset(other.parameters, 0, sizeof other.parameters);
    other.shared_bytes = other.workspace_bytes = 0;
    if (number < 0 || !k->variant || !k->variant(device, problem, number, &other))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has no variant %d for this problem", kernel, number);
    *choice = other;
    return FDM_OK;
}

fdm_status companion_kernel_at(const struct companion_operation *operation, int32_t index, const char **name,
                               const char **description) {
    if (index < 0 || index >= operation->num_kernels)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "index is %d; %s has %d kernels", index, operation->name,
                         operation->num_kernels);
    *name = operation->kernels[index].name;
    *description = operation->kernels[index].description;
    return FDM_OK;
}

fdm_status companion_prepare(const struct fdm_companion_choice *choice, const struct cuda_kernel_request *requests,
                             int32_t count, const char *part) {
    const struct cuda_kernel *loaded[COMPANION_REQUESTS_MAX];
    return count ? cuda_kernels_get(choice->device.index, requests, count, loaded)
                 : error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's %s is not its kernel's", part);
}

fdm_status companion_check_reserved(const int64_t problem[8], const fdm_companion_choice *choice) {
    return struct_is_zero(problem, 8 * sizeof *problem) &&
                   (!choice || struct_is_zero(choice->reserved, sizeof choice->reserved))
               ? FDM_OK
               : error_set(FDM_ERROR_INVALID_ARGUMENT, "reserved words of the %s are not 0; " FDM_NEWER_FIELD,
                           choice ? "plan" : "problem");
}

fdm_status companion_check_workspace(const struct fdm_companion_choice *choice, const void *workspace, size_t bytes) {
    if (choice->workspace_bytes > 0 && (!workspace || bytes < (size_t)choice->workspace_bytes))
        return error_set(FDM_ERROR_WORKSPACE, "workspace has %zu bytes; the plan needs %lld", workspace ? bytes : 0,
                         (long long)choice->workspace_bytes);
    if ((uintptr_t)workspace % 64)
        return error_set(FDM_ERROR_WORKSPACE, "workspace starts at an address that is not a multiple of 64");
    return FDM_OK;
}

fdm_status companion_once(const struct fdm_companion_choice *choice, const fdm_allocator *allocator,
                          companion_execute execute, const void *plan, const void *call, void *stream) {
    void *workspace = NULL;
    if (choice->workspace_bytes > 0 && !allocator)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "allocator is NULL, but this call needs %lld bytes of workspace on the CUDA device",
                         (long long)choice->workspace_bytes);
    if (choice->workspace_bytes > 0 &&
        !(workspace = allocator->allocate(allocator->context, (size_t)choice->workspace_bytes)))
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a workspace of %lld bytes",
                         (long long)choice->workspace_bytes);
    const fdm_status status = execute(plan, call, workspace, (size_t)choice->workspace_bytes, stream);
    if (workspace)
        allocator->release(allocator->context, workspace);
    return status;
}
