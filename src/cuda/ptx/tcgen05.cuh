/* tcgen05.cuh: matrix products of one block or of a pair of blocks, and the tensor memory that holds their sums (PTX
 * ISA, "TensorCore 5th generation instructions"); compute capability 10.0 alone, target sm_100a.
 *
 * `group` is .cta_group: 1, or 2 for a pair, the two blocks of a cluster whose ranks differ in bit 0; a kernel uses one
 * of them throughout. Tensor memory is 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. */
#ifndef FDM_PTX_TCGEN05_CUH
#define FDM_PTX_TCGEN05_CUH

#include "cuda/ptx/types.cuh"
#include "cuda/tcgen05_descriptors.h"

#define ARCH_SPECIFIC 1 /* what includes this is compiled for sm_100a: scripts/embed_sources.py looks for this line */

/* ---- allocation, by one whole warp; with group 2 by one of each block ---- */

/* `columns`, a power of two from 32 to 512; their first address is written to `shared`. Waits until there are as many.
 */
template <int group> __device__ __forceinline__ void tcgen05_alloc(uint32_t shared, uint32_t columns) {
    if constexpr (group == 1)
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                     :
                     : "r"(shared), "r"(columns)
                     : "memory");
    else
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;"
                     :
                     : "r"(shared), "r"(columns)
                     : "memory");
}
/* All that was allocated is given back before the block ends. */
template <int group> __device__ __forceinline__ void tcgen05_dealloc(uint32_t tensor, uint32_t columns) {
    if constexpr (group == 1)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" : : "r"(tensor), "r"(columns) : "memory");
    else
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" : : "r"(tensor), "r"(columns) : "memory");
}
/* The block allocates no more. */
template <int group> __device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
    if constexpr (group == 1)
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" : : : "memory");
    else
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" : : : "memory");
}

/* ---- products, by one thread; with group 2 by one of the pair ----
 *
 * d = a * b + (add ? d : 0), 16 elements of K. b and a by tcgen05_k_major or tcgen05_mn_major: of a pair each block
 * holds its half of the rows of a and of the columns of b at the same addresses. shape: of tcgen05_shape. */
template <int group>
__device__ __forceinline__ void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, bool add) {
    if constexpr (group == 1)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
                     "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}"
                     :
                     : "r"(d), "l"(a), "l"(b), "r"(shape), "r"((uint32_t)add)
                     : "memory");
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
                     "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}"
                     :
                     : "r"(d), "l"(a), "l"(b), "r"(shape), "r"((uint32_t)add)
                     : "memory");
}
/* The same with a in tensor memory: the pair of elements 2k, 2k+1 of a row in column k. */
template <int group>
__device__ __forceinline__ void tcgen05_mma_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t shape, bool add) {
    if constexpr (group == 1)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
                     "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n}"
                     :
                     : "r"(d), "r"(a), "l"(b), "r"(shape), "r"((uint32_t)add)
                     : "memory");
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
                     "tcgen05.mma.cta_group::2.kind::f16 [%0], [%1], %2, %3, p;\n}"
                     :
                     : "r"(d), "r"(a), "l"(b), "r"(shape), "r"((uint32_t)add)
                     : "memory");
}
/* One arrival at the mbarrier when all products of this thread so far are complete. */
template <int group> __device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
    if constexpr (group == 1)
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                     :
                     : "r"(barrier)
                     : "memory");
    else
        asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                     :
                     : "r"(barrier)
                     : "memory");
}
/* The same at that barrier of each block of the cluster whose bit is set in `blocks`. */
template <int group> __device__ __forceinline__ void tcgen05_commit_multicast(uint32_t barrier, uint16_t blocks) {
    if constexpr (group == 1)
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
                     "[%0], %1;"
                     :
                     : "r"(barrier), "h"(blocks)
                     : "memory");
    else
        asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
                     "[%0], %1;"
                     :
                     : "r"(barrier), "h"(blocks)
                     : "memory");
}
/* Around what orders threads, an mbarrier or another: this thread's tensor memory accesses before it come before, and
 * those after it after. */
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" : : : "memory");
}
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" : : : "memory");
}

/* ---- registers and tensor memory: register i of lane l of warp w is column i of lane 32 (w % 4) + l ----
 *
 * By one whole warp. `tensor` names the warp's first lane and the first column. An inline instruction names each
 * register, so each count has a text of its own: TCGEN05_R* and TCGEN05_D* are the first registers as text and as
 * operands. */
#define TCGEN05_R1  "%0"
#define TCGEN05_R2  TCGEN05_R1 ", %1"
#define TCGEN05_R4  TCGEN05_R2 ", %2, %3"
#define TCGEN05_R8  TCGEN05_R4 ", %4, %5, %6, %7"
#define TCGEN05_R16 TCGEN05_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TCGEN05_R32 TCGEN05_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TCGEN05_R64                                                                                     \
    TCGEN05_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48" \
                ", %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TCGEN05_R128                                                                                         \
    TCGEN05_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81" \
                ", %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99" \
                ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114" \
                ", %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TCGEN05_D1(c, i)   c(r[i])
#define TCGEN05_D2(c, i)   TCGEN05_D1(c, i), TCGEN05_D1(c, i + 1)
#define TCGEN05_D4(c, i)   TCGEN05_D2(c, i), TCGEN05_D2(c, i + 2)
#define TCGEN05_D8(c, i)   TCGEN05_D4(c, i), TCGEN05_D4(c, i + 4)
#define TCGEN05_D16(c, i)  TCGEN05_D8(c, i), TCGEN05_D8(c, i + 8)
#define TCGEN05_D32(c, i)  TCGEN05_D16(c, i), TCGEN05_D16(c, i + 16)
#define TCGEN05_D64(c, i)  TCGEN05_D32(c, i), TCGEN05_D32(c, i + 32)
#define TCGEN05_D128(c, i) TCGEN05_D64(c, i), TCGEN05_D64(c, i + 64)

template <int count> struct tcgen05_registers;
#define TCGEN05_REGISTERS(n)                                                                                \
    template <> struct tcgen05_registers<n> {                                                               \
        static __device__ __forceinline__ void tcgen05_ld_32x32b(uint32_t (&r)[n], uint32_t tensor) {       \
            asm volatile("tcgen05.ld.sync.aligned.32x32b.x" #n ".b32 {" TCGEN05_R##n "}, [%" #n "];"        \
                         : TCGEN05_D##n("=r", 0)                                                            \
                         : "r"(tensor)                                                                      \
                         : "memory");                                                                       \
        }                                                                                                   \
        static __device__ __forceinline__ void tcgen05_ld_32x32b(float (&r)[n], uint32_t tensor) {          \
            asm volatile("tcgen05.ld.sync.aligned.32x32b.x" #n ".b32 {" TCGEN05_R##n "}, [%" #n "];"        \
                         : TCGEN05_D##n("=f", 0)                                                            \
                         : "r"(tensor)                                                                      \
                         : "memory");                                                                       \
        }                                                                                                   \
        static __device__ __forceinline__ void tcgen05_st_32x32b(uint32_t tensor, const uint32_t (&r)[n]) { \
            asm volatile("tcgen05.st.sync.aligned.32x32b.x" #n ".b32 [%" #n "], {" TCGEN05_R##n "};"        \
                         :                                                                                  \
                         : TCGEN05_D##n("r", 0), "r"(tensor)                                                \
                         : "memory");                                                                       \
        }                                                                                                   \
        static __device__ __forceinline__ void tcgen05_st_32x32b(uint32_t tensor, const float (&r)[n]) {    \
            asm volatile("tcgen05.st.sync.aligned.32x32b.x" #n ".b32 [%" #n "], {" TCGEN05_R##n "};"        \
                         :                                                                                  \
                         : TCGEN05_D##n("f", 0), "r"(tensor)                                                \
                         : "memory");                                                                       \
        }                                                                                                   \
    };
TCGEN05_REGISTERS(1)
TCGEN05_REGISTERS(2)
TCGEN05_REGISTERS(4)
TCGEN05_REGISTERS(8)
TCGEN05_REGISTERS(16)
TCGEN05_REGISTERS(32)
TCGEN05_REGISTERS(64)
TCGEN05_REGISTERS(128)

/* `count` columns, a power of two to 128. The registers are not read before tcgen05_wait_ld. number: uint32_t or float.
 */
template <typename number, int count>
__device__ __forceinline__ void tcgen05_ld_32x32b(number (&r)[count], uint32_t tensor) {
    tcgen05_registers<count>::tcgen05_ld_32x32b(r, tensor);
}
template <typename number, int count>
__device__ __forceinline__ void tcgen05_st_32x32b(uint32_t tensor, const number (&r)[count]) {
    tcgen05_registers<count>::tcgen05_st_32x32b(tensor, r);
}
/* Waits for all of this thread's tcgen05_ld so far; and for its tcgen05_st. */
__device__ __forceinline__ void tcgen05_wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" : : : "memory"); }
/* The same; `r`, which is loaded with it, is not read before. */
template <int count> __device__ __forceinline__ void tcgen05_wait_ld(uint32_t (&r)[count]) {
    tcgen05_wait_ld();
#pragma unroll
    for (int i = 0; i < count; i++)
        asm volatile("" : "+r"(r[i]) : : "memory");
}
template <int count> __device__ __forceinline__ void tcgen05_wait_ld(float (&r)[count]) {
    tcgen05_wait_ld();
#pragma unroll
    for (int i = 0; i < count; i++)
        asm volatile("" : "+f"(r[i]) : : "memory");
}

#endif
