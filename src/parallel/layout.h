/* layout.h: where rows lie, and what follows from it under a mask: pairs of each rank and the keys it needs. */
#ifndef FDM_PARALLEL_LAYOUT_H
#define FDM_PARALLEL_LAYOUT_H

#include "flash_dmattn.h"

enum {
    LAYOUT_BLOCK = 256,
    KEY_PAGE = 16,   /* keys are fetched in pages: a hole of fewer costs more as a message of its own */
    KEY_BLOCK = 128, /* the first key of a window is rounded down to it, as kernels walk keys */
    RANKS_MAX = 1 << 16
};

/* A range and whose it is. */
struct owned_range {
    int64_t first, end;
    int64_t place; /* of its first row in the owner's shard */
    int32_t owner;
};

struct fdm_layout {
    int32_t ranks;
    int64_t total, block;
    int64_t num_ranges;
    fdm_range *ranges;          /* by rank, in the order of the rank's rows */
    int64_t *begin;             /* [ranks + 1]: where a rank's ranges begin */
    struct owned_range *sorted; /* by position */
};
int64_t layout_rows(const fdm_layout *layout, int32_t rank);
/* The first of the sorted ranges that ends beyond a position; num_ranges where none does. */
int64_t layout_range_at(const fdm_layout *layout, int64_t position);

/* Ranges that grow. add() joins a range with the last one where they touch, and returns 0 where there is no memory. */
struct range_list {
    fdm_range *data;
    int64_t count, room;
};
int range_list_add(struct range_list *list, int64_t first, int64_t end);
void range_list_release(struct range_list *list);
int64_t ranges_size(const fdm_range *ranges, int64_t count);
/* Of the positions that a rank needs, how many belong to others by the layout of the keys. */
int64_t layout_fetched(const fdm_layout *keys, const struct range_list *needed, int32_t rank);

/* ---- rank_mask.c ---- */

/* Checks a caller's mask against a layout's rows and keys. `whole` receives it with today's fields. */
fdm_status rank_mask_read(const fdm_rank_mask *mask, int64_t seqlen_q, int64_t seqlen_k, fdm_rank_mask *whole);
/* The rows that see key j, of a list of intervals; first >= end: none. Within 0 .. seqlen_q. */
fdm_range rank_mask_rows(const fdm_rank_mask *mask, int64_t list, int64_t j);
/* The keys that causal mask and window leave to a range of rows; empty ones are (0, 0). */
fdm_range rank_mask_span(const fdm_rank_mask *mask, fdm_range rows);
/* sums[i], i from 0 to seqlen_q: visible pairs of the rows before i, over all lists. */
void rank_mask_sums(const fdm_rank_mask *mask, int64_t *sums);
/* needed[r]: the sorted keys that some row of rank r sees. The caller releases each list, in a failure too. */
fdm_status rank_mask_needed(const fdm_rank_mask *mask, const fdm_layout *layout, struct range_list *needed);

/* ---- balance.c ---- */

/* part[block]: the rank of each block of rows. */
fdm_status balance_blocks(const fdm_layout_wish *wish, const fdm_rank_mask *masks, int64_t block, int32_t *part);

#endif
