/* key_sort.c: the key sort on the host: its kernel and its launch. */
#include "gpu/key_sort.h"
#include "gpu/gpu_family.h"

static void key_sort_request(struct cuda_kernel_request *request) {
    *request =
        (struct cuda_kernel_request){.file = "gpu/key_sort.cu", .entry = "key_sort", .threads = KEY_SORT_THREADS};
}

void key_sort_add(struct gpu_launches *l, const struct gpu_forward_params *a, int32_t *order,
                  const int32_t *scattered) {
    const fdm_problem *p = l->problem;
    const int64_t stride = gpu_round_up(p->seqlen_k, KEY_SORT_KEYS), groups = stride / KEY_SORT_KEYS;
    const struct key_sort_params params = {.intervals = a->intervals,
                                           .order = order,
                                           .stride = stride,
                                           .seqlen_q = a->seqlen_q,
                                           .seqlen_k = a->seqlen_k,
                                           .num_heads = (int32_t)p->interval_heads,
                                           .window_left = a->window_left,
                                           .window_right = a->window_right,
                                           .num_groups = (int32_t)groups,
                                           .num_sorts = groups * p->interval_batch * p->interval_heads,
                                           .scattered = scattered};
    key_sort_request(gpu_add_kernel(l));
    gpu_add_launch(
        l, (struct gpu_launch){.grid = {gpu_grid(params.num_sorts)}, .params = &params, .params_bytes = sizeof params});
}
