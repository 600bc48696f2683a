/* dense_on_cpu.h: dense masks on the CPU; the arguments have been checked. */
#ifndef FDM_DENSE_ON_CPU_H
#define FDM_DENSE_ON_CPU_H

#include "flash_dmattn.h"

/* start, end [B, h, Sk] as mask [B, h, Sq, Sk]. */
void intervals_to_mask(const fdm_tensor *start, const fdm_tensor *end, const fdm_tensor *mask);
/* blocks [B, h, tiles of rows, tiles of keys]: what mask [B, h, Sq, Sk] shows of each: 0 nothing, 1 some, 2 all. */
void blocks_of_mask(const fdm_tensor *mask, int64_t block_q, int64_t block_k, const fdm_tensor *blocks);

struct mask_choice {
    int64_t window;     /* keys that a row keeps; 0: those with a bias above 0 */
    double hidden_bias; /* of keys that are not shown, and of NaN; a value of the bias' dtype */
    int64_t block_size; /* of keys that are kept or dropped together; 1: none */
};
/* Strides: along B, h, Sq and Sk of the mask that is made, in elements; 0 where the extent is 1. */
struct mask_source {
    const fdm_tensor *bias, *shown; /* shown NULL: all keys are shown */
    int64_t bias_strides[4], shown_strides[4];
    int64_t first_shown; /* the key that `shown` begins with, also below 0; those before it are shown */
};
/* orders: Sk numbers of workspace. */
void create_mask(const struct mask_source *source, const struct mask_choice *choice, const fdm_tensor *mask,
                 uint64_t *orders);

#endif
