/* constants.h: the constants that specialise a kernel, from one list: X(NAME) for each. The host gives values by these
 * names (GPU_SET_CONSTANTS), the compiler gets them as -DNAME=value and the cache as its key, and the kernel demands
 * them all: a name that is misspelt on the host, or that the compiler was not given, is a compile error that names it.
 * For C and CUDA C. */
#ifndef FDM_CONSTANTS_H
#define FDM_CONSTANTS_H

/* In the kernel: LIST(GPU_CONSTANT_GIVEN). */
#define GPU_CONSTANT_GIVEN(name) static_assert((name) >= 0, #name);
/* On the host. */
#define GPU_CONSTANT_NAME(name)  #name,
#define GPU_CONSTANT_VALUE(name) int64_t name;

/* A function of a contract, which the host calls and the kernel in constant expressions. */
#ifdef __CUDACC__
#    define GPU_INLINE __host__ __device__ constexpr
#else
#    define GPU_INLINE static inline
#endif

#endif
