/* occupancy.h: how many blocks of a kernel a multiprocessor holds at once, in theory. */
#ifndef FDM_OCCUPANCY_H
#define FDM_OCCUPANCY_H

#include "flash_dmattn.h"

struct block_needs {
    int32_t threads, registers; /* of a block; of a thread */
    int64_t shared_bytes;       /* of a block, dynamic and static */
};
struct occupancy {
    int32_t blocks, warps; /* resident at once; 0: the device cannot run such a block */
    int32_t warps_most;    /* what the device has room for */
    char bound[32]; /* what allows no more: "registers", "shared memory", "warps", "blocks", two of them, or "what one
                     * block may have" */
};
/* device: a CUDA device from 8.0 on. */
struct occupancy occupancy_of(const fdm_device *device, const struct block_needs *needs);

#endif
