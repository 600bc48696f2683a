/* types.cuh: fixed-width integers and dtype tags for kernels; NVRTC without a toolkit has no <stdint.h>. */
#ifndef FDM_PTX_TYPES_CUH
#define FDM_PTX_TYPES_CUH

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#    include <stdint.h>
#endif

#endif
