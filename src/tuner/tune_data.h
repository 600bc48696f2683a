/* tune_data.h: the tensors that a tuner runs a problem on: random inputs in several places, outputs, and what a result
 * is compared by. */
#ifndef FDM_TUNE_DATA_H
#define FDM_TUNE_DATA_H

#include "flash_dmattn.h"

enum tune_role {
    TUNE_Q,
    TUNE_K,
    TUNE_V,
    TUNE_DOUT,
    TUNE_ROTATING, /* those before lie at several places, so that a call finds none of them in the L2 cache */
    TUNE_MASK = TUNE_ROTATING,
    TUNE_BIAS,
    TUNE_START,
    TUNE_END,
    TUNE_ROW_START,
    TUNE_ROW_END,
    TUNE_BLOCKS,
    TUNE_CU_Q,
    TUNE_CU_K,
    TUNE_USED_Q,
    TUNE_USED_K,
    TUNE_TREE,
    TUNE_TABLE, /* of a cache, as those up to TUNE_SIN are */
    TUNE_PAGE_START,
    TUNE_CACHE_ROW,
    TUNE_CACHE_LENGTHS,
    TUNE_FIRST_KEY,
    TUNE_K_NEW,
    TUNE_V_NEW,
    TUNE_CU_NEW,
    TUNE_COS,
    TUNE_SIN,
    TUNE_SINK,
    TUNE_DLSE,
    TUNE_OUT,
    TUNE_LSE,
    TUNE_LSE_LOW,
    TUNE_DQ,
    TUNE_DK,
    TUNE_DV,
    TUNE_DBIAS,
    TUNE_DSINK,
    TUNE_ROLES
};

/* Tensors are contiguous but for what fills their rows to 16 bytes; data NULL: the problem does not have it.
 * Everything lies on the device. */
struct tune_data {
    const fdm_problem *problem;
    fdm_device_id device;
    fdm_tensor views[TUNE_ROLES];
    fdm_cache cache; /* of these views */
    int64_t shapes[TUNE_ROLES][4], strides[TUNE_ROLES][4];
    size_t bytes[TUNE_ROLES];
    void *places, *memory[TUNE_ROLES]; /* of the rotating tensors, and of each other */
    size_t place_bytes;
    int32_t num_places;
};

/* Makes them; `window` is W of the key intervals, which are those of top-W (of packed sequences: of a window), and of
 * row intervals, which together are a causal window of W keys. Three blocks in four of a block mask are seen.
 * Lengths within a call and those of a cache fall from all to half of what there is room for. The backward's out and
 * lse are those of a forward. tune_data_release() after failures too. */
fdm_status tune_data_make(const fdm_device *device, const fdm_problem *problem, int64_t window, struct tune_data *data);
void tune_data_release(struct tune_data *data);

/* The same of an operation that is no attention: named operands of up to three axes, of which those of rotating roles
 * and a mask are random inputs, and that of TUNE_OUT is the output. */
struct tune_operand {
    enum tune_role role;
    fdm_dtype dtype;
    int32_t ndim;
    int64_t shape[3];
    int32_t columns_contiguous; /* 1: the last two axes change places in memory */
};
fdm_status tune_data_make_of(const fdm_device *device, const struct tune_operand *operands, int32_t count,
                             struct tune_data *data);
/* The tensor of a role in the number-th call, NULL: there is none. */
fdm_tensor *tune_data_tensor(struct tune_data *data, enum tune_role role, int64_t number);

/* The tensors of the number-th call. The views belong to `data` and change with the next call of this function. */
fdm_tensors tune_data_tensors(struct tune_data *data, int64_t number);

/* Evenly spread rows of every output, as floats on the host. */
struct tune_sample {
    int64_t count;
    float *values;
};
/* Fills the outputs with NaN bytes, those that are added to with 0. A cache that is appended to gets back what lay in
 * its first place before. */
fdm_status tune_data_poison(const struct tune_data *data);
/* sample->values NULL: allocated here, for memory_release(). */
fdm_status tune_data_sample(const struct tune_data *data, struct tune_sample *sample);
/* The largest error of a row over the larger of its own magnitude and its tensor's root mean square; infinite where one
 * of the two holds a NaN. */
double tune_data_difference(const struct tune_data *data, const struct tune_sample *have,
                            const struct tune_sample *want);

#endif
