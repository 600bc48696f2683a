/* subjects.h: what fdm-checks can check, a function a subject. Each returns the exit code of the program. */
#ifndef FDM_SUBJECTS_H
#define FDM_SUBJECTS_H

#include "options.h"

int attention_checks(const struct options *options);
/* The same with lengths on the device, caches, appending and rotary embeddings. */
int serving_checks(const struct options *options);
/* Appending to a cache by itself, and one plan for all lengths. */
int cache_checks(const struct options *options);
/* Bits that do not depend on the rest of a call. */
int invariance_checks(const struct options *options);
int cases_checks(const struct options *options);
/* Kernels of the CPU with a fault, or with --emulate texts of CUDA kernels with one: 0 when every fault was found. */
int broken_checks(const struct options *options);
int broken_texts(const struct options *options);
int topk_checks(const struct options *options);
int interval_checks(const struct options *options);
int dense_checks(const struct options *options);
int same_mask_checks(const struct options *options);
int slots_checks(const struct options *options);
int key_bias_checks(const struct options *options);
int merge_checks(const struct options *options);
int chain_checks(const struct options *options);
int placement_checks(const struct options *options);
int softmax_checks(const struct options *options);
int gemm_checks(const struct options *options);
int compile_checks(const struct options *options);

#endif
