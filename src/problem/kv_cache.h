/* kv_cache.h: the KV cache of a call: where its keys lie, and on the CPU appending and rotary embeddings. */
#ifndef FDM_KV_CACHE_H
#define FDM_KV_CACHE_H

#include "problem/problem.h"
#include "problem/tensor.h"

/* Fields of a cache in a problem, after its extents were checked. */
fdm_status cache_validate(const fdm_problem *problem);

/* Shapes of k and the table: sets pages and seqlen_k of the problem. max_seqlen_k: 0 = the cache's room. */
fdm_status cache_describe(const fdm_cache *cache, const fdm_tensor *k, int64_t max_seqlen_k, fdm_problem *problem);
/* All else of a cache, for a problem whose batch is set. On the CPU a page, row or list outside of the cache is an
 * error. seqused_k of `attention` is set before. has_slots: fdm_append_tensors gives slots, so that nothing says which
 * keys the new ones follow. */
fdm_status cache_resolve(const fdm_cache *cache, const fdm_tensor *k, const fdm_tensor *v, int has_slots,
                         fdm_problem *problem, struct attention *attention);
/* Key j of sequence b in the cache, whether it is there or is to be written; count: to the end of the page. */
struct key_place cache_place_in_pages(const struct attention *attention, int64_t b, int64_t j);
/* On the CPU: whether lengths, tables and rows name what lies in the cache. */
fdm_status cache_check_pages(const struct attention *attention);

/* Sets what a cache says of sequence b: its keys, how many of them lie in the cache, the first one that is visible. */
void cache_sequence(const struct attention *attention, int64_t b, struct sequence *sequence);

/* On the CPU, before attention: new keys are turned and written, and q is turned. What is turned lies in a workspace of
 * cache_workspace() bytes, which `turned`, a copy of the call's attention, is made to point to; the work is done in
 * items of any order, cache_begin() says how many. */
int64_t cache_workspace(const fdm_problem *problem);
int64_t cache_begin(struct attention *turned, char *workspace);
/* turned NULL: keys are turned in the cache, and q into out. */
int64_t cache_items(const struct attention *attention);
void cache_run_item(const struct attention *attention, const struct attention *turned, int64_t item);
/* New key t to where slot t says. */
void cache_write_slots(const struct attention *attention, const struct index_view *slots);

/* q, k, v or one of their kin, [B, S, H, D] or packed [total, H, D], of the extents `dense`, without its first where
 * packed (problem.c). */
fdm_status problem_resolve_matrix(const fdm_tensor *tensor, const char *name, enum tensor_role role, int packed,
                                  const int64_t *dense, fdm_problem *problem, struct matrix_view *view);

/* One of int32 or int64 indices. */
int64_t cache_index(const struct index_view *view, int64_t row, int64_t column);
/* The row `from` turned as at `position` into `to`, which may be the same. */
void cache_turn_row(const struct rotary_view *rotary, fdm_dtype dtype, int64_t depth, int64_t position,
                    const char *from, char *to);
/* [n] or [n, columns] of int32, or where wide may be, int64; data NULL where the tensor is. */
fdm_status cache_indices(const fdm_tensor *tensor, const char *name, int32_t ndim, const int64_t *shape,
                         int may_be_wide, const fdm_tensor *beside, struct index_view *view);

#endif
