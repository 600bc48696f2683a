/* plan_tiles.c: how many tiles of a problem its masks show, by a mask plan on the CPU. */
#include "plan_tiles.h"

#include <stdio.h>

/* Set bits of words, those of `full` and of `seen` alone. */
static void count_bits(const uint32_t *seen, const uint32_t *full, int64_t words, int64_t *num_full, int64_t *partial) {
    for (int64_t n = 0; n < words; n++)
        for (int bit = 0; bit < 32; bit++) {
            *num_full += full[n] >> bit & 1;
            *partial += seen[n] >> bit & ~(full[n] >> bit) & 1;
        }
}

/* Of one batch and head, with operands of which no element is read. */
void plan_print_tiles(const fdm_problem *p) {
    enum { TILE = 64, MOST_BYTES = 16 << 20 }; /* counted within a second */
    static float nothing[1024];
    int64_t q_shape[4] = {1, p->seqlen_q, 1, 1}, k_shape[4] = {1, p->seqlen_k, 1, 1}, strides[4] = {0, 0, 0, 1};
    const fdm_data_type type = fdm_data_type_of(FDM_FLOAT32);
    const fdm_tensor
        q = {.data = nothing, .device = {FDM_CPU, 0}, .ndim = 4, .dtype = type, .shape = q_shape, .strides = strides},
        k = {.data = nothing, .device = {FDM_CPU, 0}, .ndim = 4, .dtype = type, .shape = k_shape, .strides = strides};
    const fdm_tensors tensors = {.struct_bytes = sizeof tensors, .q = &q, .k = &k, .v = &k};
    fdm_options options = fdm_options_default();
    fdm_problem alone = fdm_problem_default();
    fdm_tile_plan tiles = {.struct_bytes = sizeof tiles};
    int64_t full = 0, partial = 0;
    if (p->varlen || p->has_cache || p->has_mask || p->has_intervals || p->has_row_intervals || p->block_mask_size ||
        p->has_tree || (!p->causal && p->window_left < 0 && p->window_right < 0))
        return;
    options.causal = p->causal;
    options.window_left = p->window_left;
    options.window_right = p->window_right;
    alone.seqlen_q = p->seqlen_q;
    alone.seqlen_k = p->seqlen_k;
    tiles.memory_bytes = fdm_mask_plan_bytes(&alone);
    if (tiles.memory_bytes == 0 || tiles.memory_bytes > MOST_BYTES ||
        fdm_memory_allocate(q.device, tiles.memory_bytes, &tiles.memory))
        return;
    if (!fdm_mask_plan(&tensors, &options, &tiles, NULL)) {
        count_bits(tiles.seen, tiles.full, tiles.row_tiles * tiles.key_words, &full, &partial);
        printf("  tiles      of 64 rows x 64 keys a head: %lld full, %lld partial, of %lld\n", (long long)full,
               (long long)partial, (long long)(tiles.row_tiles * ((p->seqlen_k + TILE - 1) / TILE)));
    }
    fdm_memory_release(q.device, tiles.memory);
}
