/* gpu_family.h: a family of CUDA kernels as a list of algorithms: choice, reasons, preparation and the way to each. */
#ifndef FDM_GPU_FAMILY_H
#define FDM_GPU_FAMILY_H

#include "contract/family.h"
#include "cuda/cuda.h"
#include "cuda/request_constants.h"
#include "gpu/block_mask.h"
#include "gpu/features.h"
#include "gpu/forward_params.h"
#include "gpu/gpu_launches.h"

/* One kernel of a family. */
struct gpu_algorithm {
    struct kernel_info info;
    const char *const *parameters; /* PLAN_PARAMETERS of the list in the kernel's contract */
    uint32_t features;             /* GPU_FEATURE_*: those that it takes; a problem that asks another is refused */
    int chosen_freely;             /* 0: runs only by name */
    int writes_lse_low;            /* forward: beside a bias it leaves what lse has rounded away, by scores.cuh */
    /* NULL when the device and problem can be taken; else a clause that says why not, in `text` or constant. */
    const char *(*refusal)(const fdm_device *device, const fdm_problem *problem, char *text, size_t size);
    /* NULL when it is to be preferred to the kernels and families after it, given that it can; else a clause that says
     * what suits the problem better. No function: always preferred. */
    const char *(*passed_over)(const fdm_device *device, const fdm_problem *problem);
    /* The variant-th way (from 0) to run the problem: fills tile, stages, shared and workspace bytes, choice code and
     * parameters; 0 when there are no more ways. Variant 0 is the one chosen freely. */
    int (*fill)(const fdm_device *device, const fdm_problem *problem, int32_t variant, fdm_plan *plan);
    int32_t (*scheduler)(const fdm_plan *plan); /* enum scheduler of a variant; NULL: there is one order */
    /* 1 for a choice code of this kernel, also one that fill() does not give as it stands for what another code gives.
     * NULL: its codes are those fill() gives. */
    int (*has_code)(const char *code);
    /* fill() for a code that has_code() knows; 0 with the reason in the plan when the problem cannot have it. */
    int (*fill_code)(const fdm_device *device, const fdm_problem *problem, const char *code, fdm_plan *plan);
    /* Whether fill() can have made the plan, which may come from a file, for the problem. */
    int (*valid)(const fdm_plan *plan, const fdm_problem *problem);
    /* Adds what a valid plan launches, in order, at most FAMILY_LAUNCHES_MAX kernels. Decides nothing. */
    fdm_status (*launch)(const fdm_plan *plan, struct gpu_launches *launches);
    /* 1 where its own launch appends new keys and turns by rotary embeddings. NULL: a launch before it does. */
    int (*appends)(const fdm_plan *plan);
};

/* What `struct family` calls the list of a family of CUDA kernels: its algorithms in order of preference. */
struct gpu_list {
    int32_t arch_min, arch_max; /* compute capability, 80 = 8.0; arch_max 0: none */
    const struct gpu_algorithm *const *algorithms;
};

/* The entries of `struct family`, for families whose list is a struct gpu_list. */
const struct kernel_info *gpu_family_kernel(const struct family *family, int32_t index);
const char *const *gpu_family_parameters(const struct family *family, int32_t index);
int gpu_family_available(const struct family *family, int32_t index);
int gpu_family_chosen_freely(const struct family *family, int32_t index);
int gpu_family_choose(const struct family *family, const struct plan_request *request, fdm_plan *plan,
                      struct refusals *refusals);
int gpu_family_variant(const struct family *family, const struct plan_request *request, int32_t index, int32_t number,
                       fdm_plan *plan, struct refusals *refusals);
fdm_status gpu_family_check(const struct family *family, const fdm_plan *plan, const fdm_problem *problem);
fdm_status gpu_family_prepare(const struct family *family, const fdm_plan *plan);
int32_t gpu_family_launches(const struct family *family, const fdm_plan *plan, struct cuda_kernel_request *requests);
fdm_status gpu_family_execute(const struct family *family, const fdm_plan *plan, const struct attention *attention,
                              void *workspace, const fdm_launch *launch);

/* Blocks of a launch, all in one dimension: the others of a grid end at 65535. A kernel whose work may be more than a
 * grid has blocks walks it with a stride of the grid; the others' plans refuse such problems. */
static inline uint32_t gpu_grid(int64_t blocks) { return blocks < INT32_MAX ? (uint32_t)blocks : (uint32_t)INT32_MAX; }

/* What every such family's struct says besides its name and list. */
#define GPU_FAMILY_ENTRIES                                                                                     \
    .device_type = FDM_CUDA, .kernel = gpu_family_kernel, .parameters = gpu_family_parameters,                 \
    .available = gpu_family_available, .chosen_freely = gpu_family_chosen_freely, .choose = gpu_family_choose, \
    .variant = gpu_family_variant, .check = gpu_family_check, .prepare = gpu_family_prepare,                   \
    .launches = gpu_family_launches, .execute = gpu_family_execute

/* Clauses of refusals: of a dtype that is not float32, or not one of 16 bits, and of wider heads, or NULL; of a device
 * whose shared memory no tile fits. */
const char *gpu_shape_refusal(const fdm_problem *problem, int is_float32, int32_t head_dim_max, char *text,
                              size_t size);
const char *gpu_no_tile_fits(const fdm_device *device, char *text, size_t size);
/* Whether the tile of this index takes a problem on a device. */
typedef int (*gpu_fits)(int32_t tile, const fdm_device *device, const fdm_problem *problem);
/* The index of the number-th (from 0) of `count` tiles that fits() takes; -1 where fewer fit. */
int32_t gpu_find_tile(int32_t count, gpu_fits fits, const fdm_device *device, const fdm_problem *problem,
                      int32_t number);
/* NULL where one of them fits, or gpu_no_tile_fits(). */
const char *gpu_tile_refusal(int32_t count, gpu_fits fits, const fdm_device *device, const fdm_problem *problem,
                             char *text, size_t size);
/* The reason of a plan whose tile is the first that fits, and that is complete otherwise; `reason`: of the tile. */
void gpu_give_tile_reason(fdm_plan *plan, const fdm_device *device, const fdm_problem *problem, const char *reason);

/* What a forward kernel reads of its tiles: nothing; the block mask of the plan's tile; or the tile plan of
 * tile_plan_add_of_keys(), where there is one. */
enum gpu_forward_tiles { GPU_TILES_OF_NOTHING, GPU_TILES_OF_MASK, GPU_TILES_OF_KEYS };
/* Adds the last launch of a forward: its own kernel, whose request the caller has filled and which takes struct
 * gpu_forward_params, as `blocks` blocks in clusters of `cluster`. What it reads of its tiles is made before it, at the
 * workspace's start. */
void gpu_add_forward(struct gpu_launches *launches, const fdm_plan *plan, const struct cuda_kernel_request *request,
                     enum gpu_forward_tiles tiles, int64_t blocks, int32_t cluster);

/* The block mask (block_mask.h) of a mask with rows, of row intervals, or of both: its bytes of workspace, and the
 * launches that make it there and tell the parameters where it is. */
int64_t gpu_block_mask_bytes(const fdm_problem *problem, int32_t block_m, int32_t block_n);
void gpu_block_mask_add(struct gpu_launches *launches, int32_t block_m, int32_t block_n, void *workspace,
                        struct gpu_forward_params *params);
/* The same of a mask alone, which may be without rows. */
int64_t block_mask_bytes(const fdm_problem *problem, int32_t block_m, int32_t block_n);
void block_mask_add(struct gpu_launches *launches, int32_t block_m, int32_t block_n, void *block_mask,
                    struct gpu_forward_params *params);
/* That of any mask [B, h, Sq, Sk], with the bytes from one row of tiles to the next. */
void block_mask_request(struct cuda_kernel_request *request);
fdm_status block_mask_of(const struct cuda_kernel *kernel, const struct gpu_scores *mask, int64_t batches,
                         int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int32_t block_m, int32_t block_n,
                         uint8_t *block_mask, int64_t row_bytes, void *stream);

/* The order in which blocks of keys begin (block_order.h): words of each head, and the launch that writes `order`. */
int64_t block_order_stride(const fdm_problem *problem, int32_t block_n);
void block_order_add(struct gpu_launches *launches, const struct gpu_forward_params *params, int32_t block_n,
                     int32_t *order);

/* The key sort (key_sort.h), which writes `order`. scattered: NULL, or the first word of block_order.h: where it is 0
 * nothing is written. */
void key_sort_add(struct gpu_launches *launches, const struct gpu_forward_params *params, int32_t *order,
                  const int32_t *scattered);

/* Copies to other strides (copy_rows.h) by the kernel of that index: of at most COPY_ROWS_MATRICES matrices, of which
 * the caller gives strides and extents. */
struct copy_rows_matrix;
void copy_rows_request(struct cuda_kernel_request *request);
void copy_rows_add(struct gpu_launches *launches, int32_t kernel, const struct copy_rows_matrix *matrices,
                   int32_t count);

/* A call's tensors as the kernels' parameters. */
struct gpu_cache gpu_cache_of(const struct attention *attention);
struct gpu_matrix gpu_matrix_of(const struct matrix_view *view);
struct gpu_sink gpu_sink_of(const struct sink_view *view, const fdm_problem *problem);
void gpu_fill_forward(const struct attention *attention, struct gpu_forward_params *params);

#endif
