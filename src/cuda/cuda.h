/* cuda.h: the CUDA runtime that all CUDA families share: kernels by source and constants, and their launch.
 *
 * libcuda and NVRTC are opened at run time; nothing here needs them to build or to load. Knows nothing of attention. */
#ifndef FDM_CUDA_H
#define FDM_CUDA_H

#include "cuda/tensor_map.h"
#include "flash_dmattn.h"

/* A named integer that specialises a kernel: becomes -DNAME=value and part of the cache key. */
struct cuda_constant {
    const char *name;
    int64_t value;
};
enum { CUDA_CONSTANTS_MAX = 48 };

/* One specialisation of one kernel. A source with instructions that one architecture alone has (it includes
 * cuda/ptx/wgmma.cuh) is compiled for that architecture's own target, sm_90a instead of sm_90. `file` is a path below
 * src/ of a source embedded in the library
 * ("families/mma/forward/mma_forward.cu"); `entry` an extern "C" __global__ function in it that takes one struct by
 * value. Both strings and the constants' names must be literals or live as long as the library. */
struct cuda_kernel_request {
    const char *file, *entry;
    int32_t num_constants;
    struct cuda_constant constants[CUDA_CONSTANTS_MAX];
    int32_t shared_bytes; /* dynamic shared memory of a launch; set once, when the kernel is loaded */
    int32_t cluster;      /* blocks of a launch's clusters, where they are more than the 8 that every device takes */
    /* For reports and tests; no part of what the kernel is known by. */
    int32_t threads;         /* of a launch's blocks */
    int32_t spill_bytes_max; /* that its specialisations may spill; 0 but where its registers cannot hold everything */
};

struct cuda_kernel; /* loaded on one device; lives until the process ends */

/* The kernels of one call, from memory, from the disk cache, or compiled (all misses in parallel). Thread-safe. A hit
 * in memory costs well below a microsecond and no driver call. */
fdm_status cuda_kernels_get(int32_t device, const struct cuda_kernel_request *requests, int32_t count,
                            const struct cuda_kernel **kernels);

struct cuda_launch {
    const struct cuda_kernel *kernel;
    uint32_t grid[3];
    uint32_t threads;            /* of a block, one-dimensional */
    uint32_t cluster;            /* blocks of a cluster along x; 0 or 1 = none */
    int32_t programmatic_launch; /* 1: may begin before the kernel ahead of it in the stream has ended */
    int32_t cooperative;         /* 1: all blocks run at once, or the launch fails */
    void *stream;                /* CUstream; NULL = the legacy default stream */
    const void *arguments;       /* the kernel's struct */
    size_t arguments_bytes;
};
/* Enqueues; no allocation, no synchronisation. Capturable. Makes the device's primary context current for the call when
 * it is not, and restores what was. */
fdm_status cuda_launch(const struct cuda_launch *launch);
/* Gets one kernel and enqueues `blocks` blocks of the request's threads, in a line. */
fdm_status cuda_run(int32_t device, const struct cuda_kernel_request *request, uint32_t blocks, const void *arguments,
                    size_t arguments_bytes, void *stream);

/* A tensor in device memory and the tile of it that one copy moves, axes from the innermost on; what lies outside of
 * the tensor arrives as zeros and counts as bytes of the tile. */
enum cuda_map_type { CUDA_MAP_UINT8, CUDA_MAP_FLOAT16, CUDA_MAP_BFLOAT16, CUDA_MAP_FLOAT32 };
enum { CUDA_MAP_RANK_MAX = 5 };
struct cuda_tensor_layout {
    enum cuda_map_type type;
    int32_t rank;                            /* 1 .. 5 */
    const void *address;                     /* a multiple of 16 */
    int64_t extents[CUDA_MAP_RANK_MAX];      /* elements: 1 .. 2^32 */
    int64_t stride_bytes[CUDA_MAP_RANK_MAX]; /* multiples of 16 below 2^40; [0] is not looked at: elements touch */
    int32_t box[CUDA_MAP_RANK_MAX];          /* the tile: 1 .. 256 each; its rows are a multiple of 16 bytes */
    int32_t swizzle_bytes;                   /* 0, 32, 64 or 128: the most that a row of the tile has */
    int32_t l2_bytes;                        /* what a miss brings to L2: 0 (the sectors asked for), 64, 128 or 256 */
};
/* One map for each layout. Nothing is enqueued or waited for, but the driver wants a context: all maps of a call in one
 * go enter it once. A sentence names what is wrong with a layout, and no map is written then. */
fdm_status cuda_tensor_maps_make(int32_t device, const struct cuda_tensor_layout *layouts, int32_t count,
                                 struct cuda_tensor_map *maps);

/* Compiled resources of a kernel, for plans, checks and reports. */
struct cuda_resources {
    int32_t registers, spill_bytes, static_shared_bytes, max_threads;
    int32_t remarks; /* the assembler's complaints about wgmma and setmaxnreg (C75xx): serialised, or not heeded */
};
fdm_status cuda_kernel_resources(const struct cuda_kernel *kernel, struct cuda_resources *resources);

/* Compiles without a device, for compile matrices: arch "sm_90", "sm_80", ..., of which a source with
 * instructions of one architecture takes the target with an "a". resources may be NULL. */
fdm_status cuda_compile_only(const char *arch, const struct cuda_kernel_request *request,
                             struct cuda_resources *resources);

/* The same for reports: from the disk cache where the kernel is there, else compiled and put there. */
fdm_status cuda_resources_for(const char *arch, const struct cuda_kernel_request *request,
                              struct cuda_resources *resources);

/* Number of CUDA devices; 0 when there is no driver (the sentence says which). */
int32_t cuda_device_count(void);
/* Facts of a present device. */
fdm_status cuda_device_facts(int32_t index, fdm_device *device);
/* The name of a present device's product, and the version of its driver, 13000 for 13.0. */
fdm_status cuda_device_product(int32_t index, char *name, size_t size, int32_t *driver_version);
/* A hash of all kernels' sources. */
uint64_t cuda_sources_hash(void);
/* Whether work on the stream is captured, or cannot be timed now for a capture's sake. */
int cuda_is_capturing(int32_t device, void *stream);

/* Memory, copies and time; the public fdm_memory_* and fdm_timer_* functions end here for FDM_CUDA. */
fdm_status cuda_memory_allocate(int32_t device, size_t bytes, void **memory);
fdm_status cuda_memory_release(int32_t device, void *memory);
/* direction: 0 host to device, 1 device to host, 2 within the device. Returns when done. */
fdm_status cuda_memory_copy(int32_t device, void *to, const void *from, size_t bytes, int32_t direction);
fdm_status cuda_memory_fill(int32_t device, void *memory, uint8_t value, size_t bytes);
/* Enqueued on the stream; capturable. */
fdm_status cuda_memory_fill_async(int32_t device, void *memory, uint8_t value, size_t bytes, void *stream);
fdm_status cuda_synchronize(int32_t device);
/* *done: 1 where all work on the stream has ended. */
fdm_status cuda_stream_done(int32_t device, void *stream, int32_t *done);
struct cuda_event;
fdm_status cuda_event_create(int32_t device, struct cuda_event **event);
fdm_status cuda_event_record(struct cuda_event *event, void *stream);
fdm_status cuda_event_elapsed(struct cuda_event *from, struct cuda_event *to, double *seconds); /* waits for `to` */
void cuda_event_release(struct cuda_event *event);

#endif
