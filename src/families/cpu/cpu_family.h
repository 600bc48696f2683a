/* cpu_family.h: what the CPU family's files share: rows, passes, and the walk over visible keys. */
#ifndef FDM_CPU_FAMILY_H
#define FDM_CPU_FAMILY_H

#include "contract/family.h"
#include "families/cpu/kernels.h"

/* The instruction set of the plan's kernel. */
enum cpu_isa cpu_plan_isa(const fdm_plan *plan);

/* The next bytes of a workspace that is being laid out, in steps of 64; base NULL only counts. */
static inline void *cpu_take(char *base, size_t *used, size_t bytes) {
    char *at = base ? base + *used : NULL;
    *used += (bytes + 63) / 64 * 64;
    return at;
}

/* One pass: its workspace and its execution. */
int64_t cpu_forward_workspace(const fdm_problem *problem, const fdm_plan *plan);
fdm_status cpu_forward(const fdm_plan *plan, const struct attention *attention, void *workspace,
                       const fdm_launch *launch);
/* The same results with the softmax of one panel beside the products of others, where the table has `overlap`. */
int64_t cpu_forward_overlap_workspace(const fdm_problem *problem, const fdm_plan *plan);
fdm_status cpu_forward_overlap(const fdm_plan *plan, const struct attention *attention, void *workspace,
                               const fdm_launch *launch);
/* The end of row i (packed: of the packed tensor), whose P are relative to max and have this sum, 0 where it sees no
 * key: lse and what its rounding leaves are stored where they are wanted. Returns what the sums of P V are to be
 * multiplied by. */
float cpu_end_row(const struct attention *attention, int64_t batch, int64_t head, int64_t i, float max, float sum);
/* Whether the decode pass takes the problem: a forward pass with few query rows per KV head. */
int cpu_decode_suits(const fdm_problem *problem);
void cpu_decode_blocks(const fdm_problem *problem, const struct cpu_kernels *kernels, int32_t *block_m,
                       int32_t *block_n);
int64_t cpu_decode_workspace(const fdm_problem *problem, const fdm_plan *plan);
fdm_status cpu_decode(const fdm_plan *plan, const struct attention *attention, void *workspace,
                      const fdm_launch *launch);
/* Block sizes of a free choice: query lanes and keys of one step. */
void cpu_backward_blocks(const fdm_problem *problem, const struct cpu_kernels *kernels, int32_t *block_m,
                         int32_t *block_n);
int64_t cpu_backward_workspace(const fdm_problem *problem, const fdm_plan *plan);
fdm_status cpu_backward(const fdm_plan *plan, const struct attention *attention, void *workspace,
                        const fdm_launch *launch);

#endif
