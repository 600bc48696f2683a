/* compile_problems.h: the problems that compile_matrix.c compiles kernels for: values of features, and how many each
 * has.
 */
#ifndef FDM_COMPILE_PROBLEMS_H
#define FDM_COMPILE_PROBLEMS_H

#include "problem/problem.h"

struct feature {
    const char *name;
    int32_t num_values;
};
/* In the order of struct choice's values. */
enum {
    DTYPE,
    HEAD_DIM,
    HEAD_DIM_V,
    LENGTH,
    WINDOW,
    MASK,
    BIAS,
    INTERVALS,
    VARLEN,
    SOFTCAP,
    ALIGNED,
    SCORES_ALIGNED,
    SINKS,
    KEYS,
    NUM_FEATURES
};
extern const struct feature features[NUM_FEATURES];

/* The problem of a choice: for each feature the number of a value. */
fdm_problem problem_of(const int32_t *choice);

/* The backward's: each head dim that it takes, with one of its sets of features, long or short. */
int32_t backward_head_dims(void);
int32_t backward_sets(void);
fdm_problem backward_problem(int32_t set, int32_t head_dim, int32_t length);

/* Few query rows of many sequences, each with a mask of its own: each head dim with each other feature. `kernel`: the
 * one asked for, NULL for all. */
int32_t decode_problems(const char *kernel);
fdm_problem decode_problem(int32_t number);

/* Latent KV caches: each place of the keys with sets of other features. */
int32_t latent_problems(const char *kernel);
fdm_problem latent_problem(int32_t number);

#endif
