/* math.cuh: approximate functions and conversions (PTX ISA, "Floating point instructions", "cvt"). */
#ifndef FDM_PTX_MATH_CUH
#define FDM_PTX_MATH_CUH

#include "cuda/ptx/types.cuh"

/* 2^x, relative error 2^-22; subnormal results are 0; ex2(-inf) = 0. */
__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float lg2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* tanh by exponentials: relative error about 2^-21, also near 0, where tanh.approx has 2^-11. */
__device__ __forceinline__ float tanh_accurate(float x) {
    float t = fabsf(x), y;
    if (t < 0.25f) { /* odd Taylor series to x^9: next term 0.0089 x^11 */
        float s = x * x;
        return x + x * s * (-0.33333334f + s * (0.13333334f + s * (-0.053968254f + s * 0.021869489f)));
    }
    y = 1.0f - 2.0f / (1.0f + ex2_approx(2.8853900817779268f * t));
    return x < 0 ? -y : y;
}
/* Two floats to one register, `low` in the lower half; round to nearest even. */
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ float cvt_f32_f16(uint16_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ float cvt_f32_bf16(uint16_t x) { return __uint_as_float((uint32_t)x << 16); }
/* Rounds to tf32: 10 explicit mantissa bits, to nearest, ties away. */
__device__ __forceinline__ uint32_t cvt_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ >= 1000
/* Two at once; to nearest. */
__device__ __forceinline__ float2 add_f32x2(float2 a, float2 b) {
    float2 d;
    asm("{\n.reg .b64 d, a, b;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\nadd.rn.f32x2 d, a, b;\nmov.b64 {%0, %1}, "
        "d;\n}"
        : "=f"(d.x), "=f"(d.y)
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
    return d;
}
__device__ __forceinline__ float2 mul_f32x2(float2 a, float2 b) {
    float2 d;
    asm("{\n.reg .b64 d, a, b;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\nmul.rn.f32x2 d, a, b;\nmov.b64 {%0, %1}, "
        "d;\n}"
        : "=f"(d.x), "=f"(d.y)
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
    return d;
}
__device__ __forceinline__ float2 fma_f32x2(float2 a, float2 b, float2 c) {
    float2 d;
    asm("{\n.reg .b64 d, a, b, c;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\nmov.b64 c, {%6, %7};\nfma.rn.f32x2 d, "
        "a, b, c;\nmov.b64 {%0, %1}, d;\n}"
        : "=f"(d.x), "=f"(d.y)
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
    return d;
}
/* Rounds down; subnormal numbers are 0. */
__device__ __forceinline__ float2 add_rm_f32x2(float2 a, float2 b) {
    float2 d;
    asm("{\n.reg .b64 d, a, b;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\nadd.rm.ftz.f32x2 d, a, b;\nmov.b64 {%0, "
        "%1}, d;\n}"
        : "=f"(d.x), "=f"(d.y)
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
    return d;
}
/* One instruction from PTX 8.8 (NVRTC 12.9) on; 12.8, the first that knows 10.0, makes two of it. */
__device__ __forceinline__ float max_3(float a, float b, float c) {
#    if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209
    float y;
    asm("max.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
#    else
    return fmaxf(fmaxf(a, b), c);
#    endif
}
#endif

/* Not zero when one of the four bytes is. */
__device__ __forceinline__ uint32_t zero_bytes(uint32_t x) { return (x - 0x01010101u) & ~x & 0x80808080u; }

#endif
