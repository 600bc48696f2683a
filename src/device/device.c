/* device.c: facts of a device, queried or by name. */
#include "device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/settings.h"
#include "base/struct_bytes.h"
#include "cuda/cuda.h"
#include "device/isa.h"
#include "device/threads.h"

/* The CPU with this instruction set as its best one; by its name a kernel may ask for those up to `highest`. */
static void describe_cpu(fdm_device *device, enum cpu_isa isa, enum cpu_isa highest) {
    int64_t caches[3];
    cpu_cache_bytes(caches);
    *device = (fdm_device){.id = {FDM_CPU, 0},
                           .present = cpu_isa_refusal(isa) == NULL,
                           .num_threads = threads_available(),
                           .l1_bytes = caches[0],
                           .l2_bytes = caches[1],
                           .l3_bytes = caches[2]};
    snprintf(device->isa, sizeof device->isa, "%s", cpu_isa_name(isa));
    if (highest > isa)
        snprintf(device->isa_by_name, sizeof device->isa_by_name, "%s", cpu_isa_name(highest));
    snprintf(device->name, sizeof device->name, "cpu:%s", cpu_isa_name(isa));
}

fdm_status device_facts(int32_t type, int32_t index, fdm_device *device) {
    if (type == FDM_CUDA)
        return cuda_device_facts(index, device);
    if (type != FDM_CPU)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "device type is %d; it must be FDM_CPU (1) or FDM_CUDA (2)", type);
    if (index != 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "CPU index is %d; there is one CPU device, index 0", index);
    const fdm_status status = setting_check(SETTING_CPU_ISA);
    if (status)
        return status;
    const struct cpu_isas isas = cpu_isas();
    describe_cpu(device, isas.best, isas.highest);
    return FDM_OK;
}

fdm_status fdm_device_query(int32_t type, int32_t index, fdm_device *device) {
    fdm_device facts;
    const fdm_status status = device_facts(type, index, &facts);
    return status ? status : STRUCT_WRITE(fdm_device, device, &facts);
}

/* ":smem=160K" after an architecture name; text starts at the colon. */
static fdm_status parse_shared(const char *name, const char *text, fdm_device *device) {
    char *end;
    long long kilobytes = strncmp(text, ":smem=", 6) == 0 ? strtoll(text + 6, &end, 10) : 0;
    if (kilobytes < 1 || kilobytes > 1024 || strcmp(end, "K") != 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "device '%s' has an unknown suffix '%s'; write e.g. sm_90:smem=160K", name, text);
    device->shared_bytes = kilobytes << 10;
    return FDM_OK;
}

static fdm_status named_device(const char *name, fdm_device *device) {
    if (strcmp(name, "cpu") == 0)
        return device_facts(FDM_CPU, 0, device);
    if (strncmp(name, "cpu:", 4) == 0) {
        int isa = cpu_isa_from_name(name + 4);
        if (isa < 0)
            return error_set(
                FDM_ERROR_INVALID_ARGUMENT,
                "device '%s' names no instruction set; known are scalar, neon, avx2, avx512, avx512_bf16, amx", name);
        describe_cpu(device, (enum cpu_isa)isa, (enum cpu_isa)isa);
        return FDM_OK;
    }
    size_t length = strcspn(name, ":");
    for (int32_t i = 0; i < device_table_length; i++) {
        const struct device_row *row = &device_table[i];
        if (strlen(row->name) != length || strncmp(row->name, name, length) != 0)
            continue;
        *device = (fdm_device){.id = {FDM_CUDA, 0},
                               .compute_major = row->compute_major,
                               .compute_minor = row->compute_minor,
                               .num_sms = row->num_sms,
                               .shared_bytes = row->shared_bytes,
                               .l2_bytes = row->l2_bytes,
                               .bandwidth = row->bandwidth,
                               .registers_per_sm = row->registers_per_sm,
                               .threads_per_sm = row->threads_per_sm};
        snprintf(device->name, sizeof device->name, "%s", name);
        return name[length] ? parse_shared(name, name + length, device) : FDM_OK;
    }
    return error_set(FDM_ERROR_INVALID_ARGUMENT,
                     "device '%s' is unknown; known are cpu[:isa], sm_80, sm_86, sm_89, sm_90, sm_100, sm_120", name);
}

fdm_status fdm_device_from_name(const char *name, fdm_device *device) {
    fdm_device named;
    const fdm_status status = name ? named_device(name, &named) : error_set(FDM_ERROR_INVALID_ARGUMENT, "name is NULL");
    return status ? status : STRUCT_WRITE(fdm_device, device, &named);
}
