/* wgmma.cuh: matrix products of a warpgroup (four warps, the first a multiple of four) and its registers (PTX ISA,
 * "Asynchronous warpgroup level matrix instructions", "setmaxnreg"); compute capability 9.0 alone, target sm_90a. */
#ifndef FDM_PTX_WGMMA_CUH
#define FDM_PTX_WGMMA_CUH

#include "cuda/ptx/types.cuh"

#define ARCH_SPECIFIC 1 /* what includes this is compiled for sm_90a: scripts/embed_sources.py looks for this line */

/* A matrix in shared memory as the copy engine leaves it with the 128-byte swizzle: rows of 128 bytes, eight of them
 * swizzled together, each such group 1024 bytes after the one before. `address` is a multiple of 1024, plus what is
 * walked inside of a row (K-major: 32 bytes for each 16 elements of K) or over whole groups (MN-major: 2048 bytes for
 * each 16). chunk_bytes: MN-major only, from one run of 64 elements along M or N to the next. */
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t chunk_bytes) {
    constexpr uint64_t SWIZZLE_128 = 1ull << 62, GROUP = (uint64_t)(1024 >> 4) << 32;
    return SWIZZLE_128 | GROUP | (uint64_t)(chunk_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

/* Before the first product, and whenever other instructions have touched its registers. */
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
/* Waits until at most `pending` of the warpgroup's groups are under way; `d`, the sums of those that are done, is not
 * read before. */
template <int pending, int count> __device__ __forceinline__ void wgmma_wait_group(float (&d)[count]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(pending) : "memory");
#pragma unroll
    for (int i = 0; i < count; i++)
        asm volatile("" : "+f"(d[i]) : : "memory");
}

/* d = a * b + (add ? d : 0): a 64 x 16, K-major; b 16 x 128, K-major, or MN-major with `transposed`. Of thread t the
 * sums 4i .. 4i+3 are those of row 16 (t / 32 % 4) + t % 32 / 4, columns 8i + 2 (t % 4) and its right neighbour, and
 * the same eight rows below. */
template <int transposed>
__device__ __forceinline__ void wgmma_m64n128k16_bf16(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, %67;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"((uint32_t)add), "n"(transposed)
        : "memory");
}

/* The same with a in registers: of each warp its 16 x 16, as mma_m16n8k16_bf16 takes it. They may be written again when a
 * wgmma_wait_group has covered the product. */
template <int transposed>
__device__ __forceinline__ void wgmma_m64n128k16_bf16(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((uint32_t)add), "n"(transposed)
        : "memory");
}

/* Of all threads of a warpgroup: gives registers back, or waits for more; counts are multiples of 8 from 24 to 256. */
template <int registers> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(registers));
}
template <int registers> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(registers));
}

#endif
