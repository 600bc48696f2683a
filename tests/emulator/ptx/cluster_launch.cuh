/* cluster_launch.cuh: stand-ins for the wrappers of src/cuda/ptx/cluster_launch.cuh. */
#ifndef FDM_PTX_CLUSTER_LAUNCH_CUH
#define FDM_PTX_CLUSTER_LAUNCH_CUH

#include "cuda/ptx/types.cuh"

inline void clusterlaunchcontrol_try_cancel(uint32_t shared, uint32_t barrier, EMU_AT) {
    emu_try_cancel(shared, barrier, 0, EMU_HERE);
}
inline void clusterlaunchcontrol_try_cancel_multicast(uint32_t shared, uint32_t barrier, EMU_AT) {
    emu_try_cancel(shared, barrier, 1, EMU_HERE);
}
inline bool clusterlaunchcontrol_query_cancel(uint32_t shared, uint32_t &x, uint32_t &y, uint32_t &z, EMU_AT) {
    unsigned index[3];
    const bool canceled = emu_query_cancel(shared, index, EMU_HERE);
    x = index[0], y = index[1], z = index[2];
    return canceled;
}

#endif
