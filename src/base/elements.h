/* elements.h: one element of a tensor of any floating-point dtype, as float64. */
#ifndef FDM_ELEMENTS_H
#define FDM_ELEMENTS_H

#include "base/half.h"
#include "flash_dmattn.h"

static inline double element_load(const void *data, int64_t index, fdm_dtype dtype) {
    switch (dtype) {
    case FDM_FLOAT64: return ((const double *)data)[index];
    case FDM_FLOAT16: return float16_to_float(((const uint16_t *)data)[index]);
    case FDM_BFLOAT16: return bfloat16_to_float(((const uint16_t *)data)[index]);
    default: return ((const float *)data)[index];
    }
}

static inline void element_store(void *data, int64_t index, fdm_dtype dtype, double value) {
    switch (dtype) {
    case FDM_FLOAT64: ((double *)data)[index] = value; break;
    case FDM_FLOAT16: ((uint16_t *)data)[index] = float_to_float16((float)value); break;
    case FDM_BFLOAT16: ((uint16_t *)data)[index] = float_to_bfloat16((float)value); break;
    default: ((float *)data)[index] = (float)value;
    }
}

#endif
