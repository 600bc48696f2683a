/* wgmma.cuh: matrix products of a warpgroup (four warps, the first a multiple of four) and its registers (PTX ISA,
 * "Asynchronous warpgroup level matrix instructions"); compute capability 9.0 alone, target sm_90a. */
#ifndef FDM_PTX_WGMMA_CUH
#define FDM_PTX_WGMMA_CUH

#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/types.cuh"

#define ARCH_SPECIFIC 1 /* what includes this is compiled for sm_90a: scripts/embed_sources.py looks for this line */

/* A matrix in shared memory as TMA leaves it with the 128-byte swizzle: rows of 128 bytes, eight of them
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

/* ---- m64nNk16: d = a * b + (add ? d : 0), a 64 x 16, b 16 x n ----
 *
 * An inline instruction names each accumulator, so each n has a text of its own. WGMMA_R and WGMMA_D are the first 1 to
 * 16 groups of eight accumulators, as text and as operands. */
#define WGMMA_R1  "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_R2  WGMMA_R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_R3  WGMMA_R2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_R4  WGMMA_R3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R5  WGMMA_R4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_R6  WGMMA_R5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R7  WGMMA_R6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_R8  WGMMA_R7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R9  WGMMA_R8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_R10 WGMMA_R9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_R11 WGMMA_R10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_R12 WGMMA_R11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R13 WGMMA_R12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_R14 WGMMA_R13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_R15 WGMMA_R14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_R16 WGMMA_R15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_8(i)                                                                                              \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define WGMMA_D1  WGMMA_8(0)
#define WGMMA_D2  WGMMA_D1, WGMMA_8(8)
#define WGMMA_D3  WGMMA_D2, WGMMA_8(16)
#define WGMMA_D4  WGMMA_D3, WGMMA_8(24)
#define WGMMA_D5  WGMMA_D4, WGMMA_8(32)
#define WGMMA_D6  WGMMA_D5, WGMMA_8(40)
#define WGMMA_D7  WGMMA_D6, WGMMA_8(48)
#define WGMMA_D8  WGMMA_D7, WGMMA_8(56)
#define WGMMA_D9  WGMMA_D8, WGMMA_8(64)
#define WGMMA_D10 WGMMA_D9, WGMMA_8(72)
#define WGMMA_D11 WGMMA_D10, WGMMA_8(80)
#define WGMMA_D12 WGMMA_D11, WGMMA_8(88)
#define WGMMA_D13 WGMMA_D12, WGMMA_8(96)
#define WGMMA_D14 WGMMA_D13, WGMMA_8(104)
#define WGMMA_D15 WGMMA_D14, WGMMA_8(112)
#define WGMMA_D16 WGMMA_D15, WGMMA_8(120)

template <bool f16, int n> struct wgmma_shape;
/* o0 .. o6: the numbers of the operands after the accumulators. */
#define WGMMA_SHAPE(n, f16, type, groups, o0, o1, o2, o3, o4, o5, o6)                                                  \
    template <> struct wgmma_shape<f16, n> {                                                                           \
        template <int transposed_a, int transposed>                                                                    \
        static __device__ __forceinline__ void shared(float (&d)[n / 2], uint64_t a, uint64_t b, bool add) {           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" o2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n          \
                         "k16.f32." type "." type " {" WGMMA_R##groups "}, %" o0 ", %" o1 ", p, 1, 1, %" o3 ", %" o4   \
                                                                       ";\n}"                                          \
                         : WGMMA_D##groups                                                                             \
                         : "l"(a), "l"(b), "r"((uint32_t)add), "n"(transposed_a), "n"(transposed)                      \
                         : "memory");                                                                                  \
        }                                                                                                              \
        template <int transposed>                                                                                      \
        static __device__ __forceinline__ void registers(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b,        \
                                                         bool add) {                                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" o5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n          \
                         "k16.f32." type "." type " {" WGMMA_R##groups "}, {%" o0 ", %" o1 ", %" o2 ", %" o3 "}, %" o4 \
                                                                       ", p, 1, 1, %" o6 ";\n}"                        \
                         : WGMMA_D##groups                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((uint32_t)add), "n"(transposed)     \
                         : "memory");                                                                                  \
        }                                                                                                              \
    };
#define WGMMA_SHAPES(n, groups, o0, o1, o2, o3, o4, o5, o6)           \
    WGMMA_SHAPE(n, false, "bf16", groups, o0, o1, o2, o3, o4, o5, o6) \
    WGMMA_SHAPE(n, true, "f16", groups, o0, o1, o2, o3, o4, o5, o6)
WGMMA_SHAPES(16, 1, "8", "9", "10", "11", "12", "13", "14")
WGMMA_SHAPES(32, 2, "16", "17", "18", "19", "20", "21", "22")
WGMMA_SHAPES(48, 3, "24", "25", "26", "27", "28", "29", "30")
WGMMA_SHAPES(64, 4, "32", "33", "34", "35", "36", "37", "38")
WGMMA_SHAPES(80, 5, "40", "41", "42", "43", "44", "45", "46")
WGMMA_SHAPES(96, 6, "48", "49", "50", "51", "52", "53", "54")
WGMMA_SHAPES(112, 7, "56", "57", "58", "59", "60", "61", "62")
WGMMA_SHAPES(128, 8, "64", "65", "66", "67", "68", "69", "70")
WGMMA_SHAPES(144, 9, "72", "73", "74", "75", "76", "77", "78")
WGMMA_SHAPES(160, 10, "80", "81", "82", "83", "84", "85", "86")
WGMMA_SHAPES(176, 11, "88", "89", "90", "91", "92", "93", "94")
WGMMA_SHAPES(192, 12, "96", "97", "98", "99", "100", "101", "102")
WGMMA_SHAPES(208, 13, "104", "105", "106", "107", "108", "109", "110")
WGMMA_SHAPES(224, 14, "112", "113", "114", "115", "116", "117", "118")
WGMMA_SHAPES(240, 15, "120", "121", "122", "123", "124", "125", "126")
WGMMA_SHAPES(256, 16, "128", "129", "130", "131", "132", "133", "134")

/* The product of a warpgroup for float16 (f16) or bfloat16. a: in shared memory, K-major, or MN-major with
 * `transposed_a`. b: in shared memory, K-major, or MN-major with `transposed`. Of thread t the accumulators 4i .. 4i+3
 * are those of row 16 (t / 32 % 4) + t % 32 / 4, columns 8i + 2 (t % 4) and its right neighbour, and the same eight
 * rows below. */
template <bool f16, int transposed, int transposed_a = 0, int count>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[count], uint64_t a, uint64_t b, bool add) {
    wgmma_shape<f16, 2 * count>::template shared<transposed_a, transposed>(d, a, b, add);
}
/* The same with a in registers: of each warp its 16 x 16, as mma_m16n8k16_bf16 takes it. They may be written again when
 * a wgmma_wait_group has covered the product. */
template <bool f16, int transposed, int count>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[count], const uint32_t (&a)[4], uint64_t b, bool add) {
    wgmma_shape<f16, 2 * count>::template registers<transposed>(d, a, b, add);
}

#endif
