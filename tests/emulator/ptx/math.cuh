/* math.cuh: stand-ins for the wrappers of src/cuda/ptx/math.cuh; what is no instruction there is the same text here. */
#ifndef FDM_PTX_MATH_CUH
#define FDM_PTX_MATH_CUH

#include "cuda/ptx/types.cuh"

inline float ex2_approx(float x) { return emu_ex2(x); }
inline float lg2_approx(float x) { return emu_lg2(x); }
inline float tanh_accurate(float x) {
    float t = fabsf(x), y;
    if (t < 0.25f) {
        float s = x * x;
        return x + x * s * (-0.33333334f + s * (0.13333334f + s * (-0.053968254f + s * 0.021869489f)));
    }
    y = 1.0f - 2.0f / (1.0f + ex2_approx(2.8853900817779268f * t));
    return x < 0 ? -y : y;
}
inline uint32_t emu_to_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x)
        return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t cvt_bf16x2(float low, float high) { return emu_to_bf16(high) << 16 | emu_to_bf16(low); }
inline uint32_t cvt_f16x2(float low, float high) { return (uint32_t)emu_to_f16(high) << 16 | emu_to_f16(low); }
inline float cvt_f32_f16(uint16_t x) { return emu_from_f16(x); }
inline float cvt_f32_bf16(uint16_t x) { return __uint_as_float((uint32_t)x << 16); }
inline uint32_t cvt_tf32(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u)
        return x != x ? 0x7fffffffu : bits;
    return (bits + 0x1000) & 0xffffe000u;
}
#if __CUDA_ARCH__ >= 1000
inline float2 add_f32x2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 mul_f32x2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 fma_f32x2(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
inline float2 add_rm_f32x2(float2 a, float2 b) { return {emu_add_down(a.x, b.x), emu_add_down(a.y, b.y)}; }
inline float max_3(float a, float b, float c) { return fmaxf(fmaxf(a, b), c); }
#endif
inline uint32_t zero_bytes(uint32_t x) { return (x - 0x01010101u) & ~x & 0x80808080u; }

#endif
