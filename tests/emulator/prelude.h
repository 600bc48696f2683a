/* prelude.h: CUDA C++ as the host's compiler needs to see it; put before a kernel's text, includes emulator.h alone.
 *
 * What a macro cannot do (shared memory, a kernel's entry) text.c writes into the text itself. */
#ifndef FDM_EMULATOR_PRELUDE_H
#define FDM_EMULATOR_PRELUDE_H

#include "emulator.h"

#define __CUDACC__     1
#define __CUDACC_RTC__ 1
#define __device__
#define __host__
#define __global__
#define __constant__    static const
#define __forceinline__ inline
#define __noinline__    __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

/* Every wrapper and builtin that can be waited at or found at fault takes the place of its call. */
#define EMU_AT   const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_HERE emu_file, emu_line

typedef unsigned long size_t;
typedef unsigned long uintptr_t;

#define threadIdx (emu_thread_index())
#define blockIdx  (emu_block_index())
#define blockDim  (emu_block_size())
#define gridDim   (emu_grid_size())
#define warpSize  32

struct uint2 {
    unsigned x, y;
} __align__(8);
struct uint3 {
    unsigned x, y, z;
};
struct uint4 {
    unsigned x, y, z, w;
} __align__(16);
struct int2 {
    int x, y;
} __align__(8);
struct int4 {
    int x, y, z, w;
} __align__(16);
struct float2 {
    float x, y;
} __align__(8);
struct float3 {
    float x, y, z;
};
struct float4 {
    float x, y, z, w;
} __align__(16);
struct ulonglong2 {
    unsigned long long x, y;
} __align__(16);
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define EMU_MIN_MAX(A, B, R)                                     \
    inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; } \
    inline R max(A a, B b) { return (R)a < (R)b ? (R)b : (R)a; }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(int, unsigned, unsigned)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(long long, int, long long)
EMU_MIN_MAX(int, long long, long long)
EMU_MIN_MAX(long long, unsigned, long long)
EMU_MIN_MAX(unsigned, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
EMU_MIN_MAX(unsigned long long, long long, unsigned long long)
EMU_MIN_MAX(long long, unsigned long long, unsigned long long)
#undef EMU_MIN_MAX
inline float fmaxf(float a, float b) { return a != a || a < b ? b : a; }
inline float fminf(float a, float b) { return a != a || b < a ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
inline float expf(float x) { return __builtin_expf(x); }
inline float exp2f(float x) { return __builtin_exp2f(x); }
inline float logf(float x) { return __builtin_logf(x); }
inline float log1pf(float x) { return __builtin_log1pf(x); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float tanhf(float x) { return __builtin_tanhf(x); }
inline float __expf(float x) { return emu_ex2(x * 1.4426950408889634f); }
inline float __logf(float x) { return emu_lg2(x) * 0.6931471805599453f; }
inline float __log2f(float x) { return emu_lg2(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isnan(float x) { return x != x; }

template <class To, class From> inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a change of type, not of size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++)
        y |= (x >> i & 1u) << (31 - i);
    return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned long long all = (unsigned long long)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; i++)
        y |= (unsigned)(all >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return y;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((unsigned long long)high << 32 | low) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (n & 31));
}
inline void *memcpy(void *to, const void *from, size_t bytes) { return __builtin_memcpy(to, from, bytes); }
inline void *memset(void *to, int value, size_t bytes) { return __builtin_memset(to, value, bytes); }
template <class T> inline T __ldg(const T *at) { return *at; }
template <class T> inline T __ldcg(const T *at) { return *at; }
template <class T> inline T __ldcs(const T *at) { return *at; }
template <class T> inline void __stcs(T *at, T x) { *at = x; }
template <class T> inline void __stcg(T *at, T x) { *at = x; }

inline size_t __cvta_generic_to_shared(const void *p) { return emu_shared_address(p); }
inline void *__cvta_shared_to_generic(size_t address) { return emu_shared_pointer((unsigned)address); }
inline void __syncthreads(EMU_AT) { emu_syncthreads(EMU_OR, 0, EMU_HERE); }
inline int __syncthreads_or(int x, EMU_AT) { return emu_syncthreads(EMU_OR, x, EMU_HERE); }
inline int __syncthreads_and(int x, EMU_AT) { return emu_syncthreads(EMU_AND, x, EMU_HERE); }
inline int __syncthreads_count(int x, EMU_AT) { return emu_syncthreads(EMU_COUNT, x, EMU_HERE); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_AT) { emu_syncwarp(mask, EMU_HERE); }
inline int __any_sync(unsigned mask, int x, EMU_AT) { return (int)emu_vote(EMU_ANY, mask, x, EMU_HERE); }
inline int __all_sync(unsigned mask, int x, EMU_AT) { return (int)emu_vote(EMU_ALL, mask, x, EMU_HERE); }
inline unsigned __ballot_sync(unsigned mask, int x, EMU_AT) { return emu_vote(EMU_BALLOT, mask, x, EMU_HERE); }
template <class T> inline T emu_shuffle_as(int kind, unsigned mask, T x, unsigned lane, unsigned width, EMU_PLACE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "four or eight bytes");
    unsigned word[sizeof(T) / 4];
    __builtin_memcpy(word, &x, sizeof x);
    for (unsigned i = 0; i < sizeof(T) / 4; i++)
        word[i] = emu_shuffle(kind, mask, word[i], lane, width, EMU_HERE);
    __builtin_memcpy(&x, word, sizeof x);
    return x;
}
template <class T> inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32, EMU_AT) {
    return emu_shuffle_as(EMU_SHUFFLE_INDEX, mask, x, (unsigned)lane, (unsigned)width, EMU_HERE);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int lane, int width = 32, EMU_AT) {
    return emu_shuffle_as(EMU_SHUFFLE_XOR, mask, x, (unsigned)lane, (unsigned)width, EMU_HERE);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T x, unsigned lanes, int width = 32, EMU_AT) {
    return emu_shuffle_as(EMU_SHUFFLE_UP, mask, x, lanes, (unsigned)width, EMU_HERE);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T x, unsigned lanes, int width = 32, EMU_AT) {
    return emu_shuffle_as(EMU_SHUFFLE_DOWN, mask, x, lanes, (unsigned)width, EMU_HERE);
}
inline int __reduce_min_sync(unsigned m, int x, EMU_AT) {
    return (int)emu_reduce(EMU_MIN_S32, m, (unsigned)x, EMU_HERE);
}
inline int __reduce_max_sync(unsigned m, int x, EMU_AT) {
    return (int)emu_reduce(EMU_MAX_S32, m, (unsigned)x, EMU_HERE);
}
inline int __reduce_add_sync(unsigned m, int x, EMU_AT) { return (int)emu_reduce(EMU_ADD, m, (unsigned)x, EMU_HERE); }
inline unsigned __reduce_min_sync(unsigned m, unsigned x, EMU_AT) { return emu_reduce(EMU_MIN_U32, m, x, EMU_HERE); }
inline unsigned __reduce_max_sync(unsigned m, unsigned x, EMU_AT) { return emu_reduce(EMU_MAX_U32, m, x, EMU_HERE); }
inline unsigned __reduce_add_sync(unsigned m, unsigned x, EMU_AT) { return emu_reduce(EMU_ADD, m, x, EMU_HERE); }
inline unsigned __reduce_or_sync(unsigned m, unsigned x, EMU_AT) { return emu_reduce(EMU_BITS_OR, m, x, EMU_HERE); }
inline unsigned __reduce_and_sync(unsigned m, unsigned x, EMU_AT) { return emu_reduce(EMU_BITS_AND, m, x, EMU_HERE); }
inline int atomicAdd(int *at, int x, EMU_AT) { return (int)emu_atomic_add((unsigned *)at, (unsigned)x, EMU_HERE); }
inline unsigned atomicAdd(unsigned *at, unsigned x, EMU_AT) { return emu_atomic_add(at, x, EMU_HERE); }
inline float atomicAdd(float *at, float x, EMU_AT) { return emu_atomic_add_float(at, x, EMU_HERE); }
inline int atomicCAS(int *at, int compare, int x, EMU_AT) {
    return (int)emu_atomic_cas((unsigned *)at, (unsigned)compare, (unsigned)x, EMU_HERE);
}
inline void __threadfence(EMU_AT) { emu_fence(EMU_FENCE_MEMORY, EMU_HERE); }
inline void __threadfence_block(EMU_AT) { emu_fence(EMU_FENCE_MEMORY, EMU_HERE); }
inline void __trap(EMU_AT) { emu_trap(EMU_HERE); }
inline void __nanosleep(unsigned) { emu_clock(); }
inline long long clock64() { return emu_clock(); }
inline unsigned clock() { return (unsigned)emu_clock(); }

template <class T, class Key> inline T &emu_static_as(Key key, unsigned align) {
    return *(T *)emu_static_shared(key(), sizeof(T), align > alignof(T) ? align : alignof(T));
}
#define EMU_KEY                    \
    []() -> const void * {         \
        static const char key = 0; \
        return &key;               \
    }

#endif
