/* mbarrier_test.cuh: asks barriers of mbarrier.cuh without waiting (PTX ISA, "mbarrier.test_wait"). */
#ifndef FDM_PTX_MBARRIER_TEST_CUH
#define FDM_PTX_MBARRIER_TEST_CUH

#include "cuda/ptx/types.cuh"

/* Whether the phase of this parity is over; if so, what its arrivals released is seen. */
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

#endif
