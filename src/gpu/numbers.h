/* numbers.h: numbers that kernels have in common; for C and CUDA C. */
#ifndef FDM_NUMBERS_H
#define FDM_NUMBERS_H

#define LOG2_E    1.4426950408889634f /* log2(e): devices compute powers of 2 */
#define LN_2      0.6931471805599453f /* ln(2) */
#define UNBOUNDED 0x7fffffff          /* a row or key that none reaches */
#define MINUS_INF (-__int_as_float(0x7f800000))

#endif
