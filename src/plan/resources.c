/* resources.c: what the kernels of a plan take of a device. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/struct_bytes.h"
#include "cuda/cuda.h"
#include "device/occupancy.h"
#include "plan/plan.h"

static fdm_status resources_of(const fdm_device *device, const struct cuda_kernel_request *request,
                               fdm_kernel_resources *resources) {
    char arch[32];
    struct cuda_resources compiled;
    snprintf(arch, sizeof arch, "sm_%d%d", device->compute_major, device->compute_minor);
    fdm_status status = cuda_resources_for(arch, request, &compiled);
    if (status)
        return status;
    const struct block_needs needs = {request->threads, compiled.registers,
                                      (int64_t)request->shared_bytes + compiled.static_shared_bytes};
    const struct occupancy occupancy = occupancy_of(device, &needs);
    *resources = (fdm_kernel_resources){.threads = request->threads,
                                        .registers = compiled.registers,
                                        .spill_bytes = compiled.spill_bytes,
                                        .shared_bytes = needs.shared_bytes,
                                        .blocks_per_sm = occupancy.blocks,
                                        .warps_per_sm = occupancy.warps,
                                        .max_warps = occupancy.warps_most};
    snprintf(resources->entry, sizeof resources->entry, "%s", request->entry);
    snprintf(resources->bound, sizeof resources->bound, "%s", occupancy.bound);
    return FDM_OK;
}

fdm_status fdm_plan_resources(const fdm_plan *plan, const fdm_device *device, fdm_kernel_resources *kernels,
                              int32_t size, int32_t *count) {
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    fdm_plan plan_room;
    fdm_device device_room;
    if (!(plan = plan_read(plan, &plan_room)) || !(device = STRUCT_READ(fdm_device, device, &device_room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = STRUCT_CHECK(fdm_kernel_resources, kernels);
    if (status)
        return status;
    if (!count)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "count is NULL");
    const struct family *family = plan_family(plan);
    if (!family || !plan_names_row(plan, family))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the plan names kernel '%s' of family '%s', which this library does not have", plan->kernel,
                         plan->family);
    if (device->id.type != plan->device.type)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan is for DLPack device type %d, but device has type %d",
                         plan->device.type, device->id.type);
    const int32_t launched = family->launches ? family->launches(family, plan, requests) : 0;
    if (family->launches && launched == 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's tile or workspace is not its kernel's");
    if (launched > size)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan launches %d kernels; there is room for %d", launched,
                         size);
    const uint32_t bytes = kernels->struct_bytes; /* from one to the next, in an array of the caller's */
    for (int32_t i = 0; i < launched && !status; i++) {
        fdm_kernel_resources found;
        void *to = (char *)kernels + (size_t)i * bytes; /* an older header's may be aligned to 4 bytes alone */
        if (!(status = resources_of(device, &requests[i], &found))) {
            memcpy(to, &bytes, sizeof bytes);
            status = STRUCT_WRITE(fdm_kernel_resources, to, &found);
        }
    }
    if (!status)
        *count = launched;
    return status;
}
