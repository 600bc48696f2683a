/* cluster_launch.cuh: clusters of this grid that have not begun, taken by those that run (PTX ISA,
 * "clusterlaunchcontrol"); compute capability 10.0 and above. */
#ifndef FDM_PTX_CLUSTER_LAUNCH_CUH
#define FDM_PTX_CLUSTER_LAUNCH_CUH

#include "cuda/ptx/types.cuh"

/* Asks for one such cluster, which then never begins. By one thread: the 16 bytes of the answer come to `shared`, a
 * multiple of 16, by the asynchronous proxy, and count at `barrier`. No more is asked after an answer without one. */
__device__ __forceinline__ void clusterlaunchcontrol_try_cancel(uint32_t shared, uint32_t barrier) {
    asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];"
                 :
                 : "r"(shared), "r"(barrier)
                 : "memory");
}
/* The same; the answer comes to that place and counts at that barrier of every block of the cluster. */
__device__ __forceinline__ void clusterlaunchcontrol_try_cancel_multicast(uint32_t shared, uint32_t barrier) {
    asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
                 ".multicast::cluster::all.b128 [%0], [%1];"
                 :
                 : "r"(shared), "r"(barrier)
                 : "memory");
}
/* Whether the answer at `shared` has a cluster, and the blockIdx of its first block. */
__device__ __forceinline__ bool clusterlaunchcontrol_query_cancel(uint32_t shared, uint32_t &x, uint32_t &y,
                                                                  uint32_t &z) {
    uint32_t canceled;
    asm volatile("{\n.reg .pred p;\n.reg .b128 answer;\nld.shared.b128 answer, [%4];\n"
                 "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, answer;\nselp.b32 %0, 1, 0, p;\n"
                 "mov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
                 "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, %2, %3, _}, answer;\n}"
                 : "=&r"(canceled), "=&r"(x), "=&r"(y), "=&r"(z)
                 : "r"(shared)
                 : "memory");
    return canceled != 0;
}

#endif
