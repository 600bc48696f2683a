/* append_launch.h: new keys into a KV cache and rotary embeddings on CUDA devices: before the attention of the same
 * call, and alone. */
#ifndef FDM_GPU_APPEND_LAUNCH_H
#define FDM_GPU_APPEND_LAUNCH_H

#include "cuda/cuda.h"
#include "gpu/append.h"
#include "problem/problem.h"

/* Whether a call of attention appends or turns, in a launch of its own before those of its kernel. */
static inline int append_precedes(const fdm_problem *p) { return p->has_cache && (p->new_rows || p->rotary_dim); }

/* The bytes of turned rows: what the call's kernel reads in the place of q and new keys. */
int64_t append_workspace_bytes(const fdm_problem *problem);
/* APPEND_*: which dims are pairs. */
int32_t append_rotary_constant(const fdm_problem *problem);
void append_request(const fdm_problem *problem, struct cuda_kernel_request *request);

/* The launch before attention; `turned` becomes the call that the kernel computes. */
fdm_status append_before(int32_t device, const struct attention *attention, char *workspace, void *stream,
                         struct attention *turned);
/* fdm_cache_append(): keys are turned in the cache, and q into the call's out. slots: data NULL where lengths say where
 * new keys go. */
fdm_status append_alone(int32_t device, const struct attention *attention, const struct index_view *slots,
                        void *stream);

/* cache_fault.cu, before anything of the call is launched; nothing where the call has no `fault`. */
fdm_status cache_fault_look(int32_t device, const struct attention *attention, void *stream);

#endif
