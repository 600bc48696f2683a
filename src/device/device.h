/* device.h: facts of a device, queried, and of CUDA devices by name. */
#ifndef FDM_DEVICE_H
#define FDM_DEVICE_H

#include "flash_dmattn.h"

/* fdm_device_query() without the caller's struct_bytes. */
fdm_status device_facts(int32_t type, int32_t index, fdm_device *device);

struct device_row {
    const char *name;
    int32_t compute_major, compute_minor;
    int32_t num_sms;
    int64_t shared_bytes; /* opt-in shared memory of one block */
    int64_t l2_bytes;     /* 0 = unknown */
    int64_t bandwidth;    /* device memory, bytes a second */
    int32_t registers_per_sm, threads_per_sm;
    const char *part; /* the product that num_sms, l2_bytes and bandwidth are of */
};

extern const struct device_row device_table[];
extern const int32_t device_table_length;

#endif
