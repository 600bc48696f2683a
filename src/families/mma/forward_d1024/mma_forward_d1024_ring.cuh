/* mma_forward_d1024_ring.cuh: the ring of slices of K and V, for mma_forward_d1024.cu, which defines its constants
 * before including this: every thread copies its share of each slot, and every warp reads it. */
#ifndef FDM_MMA_FORWARD_D1024_RING_CUH
#define FDM_MMA_FORWARD_D1024_RING_CUH

/* Which chunk of a tile of ROWS rows a thread copies: 16 bytes of a row, and the same of every panel of 64 columns and
 * of every COPY_ROWS-th row. Where there are fewer rows, the other threads take every other panel. */
struct chunk_place {
    int32_t row, panel, chunk;
};
template <int ROWS> __device__ __forceinline__ chunk_place find_chunk() {
    const int32_t thread = (int32_t)tid_x_reread();
    return {(thread >> 3) % (ROWS < COPY_ROWS ? ROWS : COPY_ROWS), ROWS < COPY_ROWS ? (thread >> 3) / ROWS : 0,
            thread & 7};
}
/* Offsets of that chunk in a swizzled tile, and in global memory. */
template <int PITCH> __device__ __forceinline__ uint32_t chunk_shared(chunk_place p) {
    return (uint32_t)(p.row * PITCH + p.panel * 128 + ((p.chunk ^ (p.row & 7)) << 4));
}
__device__ __forceinline__ int64_t chunk_global(chunk_place p, int64_t row_bytes) {
    return p.row * row_bytes + p.panel * 128 + p.chunk * 16;
}

/* The distance from the first chunk of a tile to that of this thread. */
template <int ROWS, int PITCH>
__device__ __forceinline__ void place_chunk(const char *&global, uint32_t &shared, int64_t row_bytes) {
    const chunk_place p = find_chunk<ROWS>();
    global += chunk_global(p, row_bytes);
    shared += chunk_shared<PITCH>(p);
}

/* Copies a thread's chunks of ROWS rows of COLUMNS elements into a swizzled tile. */
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void copy_chunks(uint32_t shared, const char *global, int64_t row_bytes) {
    constexpr int PANELS = COLUMNS / 64, STEP = ROWS < COPY_ROWS ? COPY_ROWS / ROWS : 1;
#pragma unroll
    for (int i = 0; i < ROWS; i += COPY_ROWS) {
#pragma unroll
        for (int panel = 0; panel < PANELS; panel += STEP) {
            if (panel + STEP > PANELS && panel + find_chunk<ROWS>().panel >= PANELS)
                continue;
            cp_async_16(shared + (uint32_t)(i * COLUMNS * 2 + panel * 128), global + panel * 128);
        }
        global += COPY_ROWS * row_bytes;
    }
}
/* The same, with zeros beyond `rows` and `columns`. */
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void copy_cut_chunks(uint32_t shared, const char *global, int64_t row_bytes, int32_t rows,
                                                int32_t columns) {
    constexpr int PANELS = COLUMNS / 64, STEP = ROWS < COPY_ROWS ? COPY_ROWS / ROWS : 1;
    const chunk_place p = find_chunk<ROWS>();
#pragma unroll 1
    for (int i = 0; i < ROWS; i += COPY_ROWS) {
#pragma unroll 1
        for (int panel = 0; panel + p.panel < PANELS; panel += STEP)
            cp_async_16_fill(shared + (uint32_t)(i * COLUMNS * 2 + panel * 128), global + panel * 128,
                             p.row + i < rows && (p.panel + panel) * 64 + p.chunk * 8 < columns ? 16 : 0);
        global += COPY_ROWS * row_bytes;
    }
}

/* Copies a tile of ROWS rows and COLUMNS columns, of which `rows` and `columns` exist; the rest becomes 0. PLACED:
 * the addresses are those of this thread's chunk, else those of the first. */
template <int ROWS, int COLUMNS, bool PLACED>
__device__ __forceinline__ void copy_tile(uint32_t shared, const char *global, int64_t row_bytes, int32_t rows,
                                          int32_t columns) {
    if (!PLACED)
        place_chunk<ROWS, COLUMNS * 2>(global, shared, row_bytes);
    if (rows >= ROWS && columns >= COLUMNS)
        copy_chunks<ROWS, COLUMNS>(shared, global, row_bytes);
    else
        copy_cut_chunks<ROWS, COLUMNS>(shared, global, row_bytes, rows, columns);
}

/* Copies a tile of columns from `column` on of the keys from `key` on of a cache in pages, of which the sequence sees
 * those from `padding` on. Keys without a place, and columns past the last, become 0. */
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void copy_paged_tile(uint32_t shared, const gpu_forward_params &a,
                                                const cached_keys &sequence, const gpu_matrix &pages,
                                                const gpu_matrix &added, int32_t batch, int32_t head, int32_t padding,
                                                int32_t key, int32_t column, int32_t columns) {
    constexpr int PANELS = COLUMNS / 64, STEP = ROWS < COPY_ROWS ? COPY_ROWS / ROWS : 1;
    const chunk_place p = find_chunk<ROWS>();
    shared += chunk_shared<COLUMNS * 2>(p);
    key += p.row;
    column += p.panel * 64 + p.chunk * 8;
#pragma unroll 1
    for (int i = 0; i < ROWS; i += COPY_ROWS) {
        const char *row = 0;
        if (key + i >= padding)
            row = row_address<2>(a.cache, find_page_row(a.cache, sequence, key + i), pages, added, batch, head);
#pragma unroll 1
        for (int panel = 0; panel + p.panel < PANELS; panel += STEP) {
            const bool inside = row && column + panel * 64 < columns;
            cp_async_16_fill(shared + (uint32_t)(i * COLUMNS * 2 + panel * 128),
                             inside ? row + (column + panel * 64) * 2 : pages.data, inside ? 16 : 0);
        }
    }
}

/* The producer's side of the ring: every thread copies its share of each slot. */
struct loader {
    const gpu_forward_params &a;
    const cached_keys *sequence; /* PAGED */
    int32_t batch, head, padding;
    const char *k, *v;   /* row 0 of the sequence, this block's columns of v; KEEP_CHUNKS: this thread's chunk of it */
    uint32_t k_to, v_to; /* KEEP_CHUNKS: its bytes in a slice */
    int64_t k_row_bytes, v_row_bytes;
    int32_t seqlen_k, head_dim, columns_v;
    uint32_t shared, rank;
    int32_t tile, last_tile, slot, stage;
    uint32_t parity; /* of the phase of the stage's "empty" that must have ended */

    __device__ __forceinline__ loader(const gpu_forward_params &params, const work &w, const char *shared_memory,
                                      uint32_t cluster_rank)
        : a(params), sequence((const cached_keys *)(shared_memory + SEQUENCE_OFFSET)), batch(w.batch),
          head(w.head / params.group), padding(w.padding), k_to(0), v_to(0), k_row_bytes(params.k.row * 2),
          v_row_bytes(params.v.row * 2), seqlen_k(w.seqlen_k), head_dim(params.head_dim),
          shared(shared_address(shared_memory)), rank(cluster_rank), tile(w.first_tile), last_tile(w.last_tile),
          slot(0), stage(0), parity(1) {
        const int32_t block_column = (int32_t)rank * BLOCK_COLUMNS, row = CACHE ? w.list : w.batch;
        k = a.k.data + (row * a.k.batch + w.k_begin * a.k.row + head * a.k.head) * 2;
        v = a.v.data + (row * a.v.batch + w.k_begin * a.v.row + head * a.v.head + block_column) * 2;
        columns_v = a.head_dim_v - block_column;
        if (KEEP_CHUNKS) {
            place_chunk<BLOCK_KEYS, K_PITCH>(k, k_to, k_row_bytes);
            place_chunk<SLICE_KEYS, V_PITCH>(v, v_to, v_row_bytes);
        }
    }
    __device__ __forceinline__ void load_next() {
        if (tile >= last_tile)
            return;
        mbarrier_wait(shared + EMPTY_OFFSET + stage * 8, parity);
        const uint32_t slice = shared + RING_OFFSET + (uint32_t)(stage * STAGE_BYTES);
        if (slot < K_SLOTS) {
            const int32_t key = tile * BLOCK_N + (int32_t)rank * BLOCK_KEYS, d = slot * SLICE_D;
            if (PAGED)
                copy_paged_tile<BLOCK_KEYS, SLICE_D>(slice, a, *sequence, a.k, a.cache.k_new, batch, head, padding, key,
                                                     d, head_dim);
            else
                copy_tile<BLOCK_KEYS, SLICE_D, KEEP_CHUNKS>(slice + k_to, k + (key * k_row_bytes + d * 2), k_row_bytes,
                                                            seqlen_k - key, head_dim - d);
        } else {
            const int32_t v_slot = slot - K_SLOTS;
            const int32_t key = tile * BLOCK_N + v_slot / SLICE_PARTS * SLICE_KEYS;
            const int32_t column = v_slot % SLICE_PARTS * PART_COLUMNS;
            if (PAGED)
                copy_paged_tile<SLICE_KEYS, PART_COLUMNS>(slice, a, *sequence, a.v, a.cache.v_new, batch, head, padding,
                                                          key, column, columns_v);
            else
                copy_tile<SLICE_KEYS, PART_COLUMNS, KEEP_CHUNKS>(slice + v_to, v + (key * v_row_bytes + column * 2),
                                                                 v_row_bytes, seqlen_k - key, columns_v - column);
        }
        cp_async_mbarrier_arrive_noinc(shared + FULL_OFFSET + stage * 8);
        if (++slot == SLOTS) {
            slot = 0;
            ++tile;
        }
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* The consumer's side. */
struct ring {
    uint32_t shared;
    int32_t stage;
    uint32_t parity;

    __device__ __forceinline__ void wait() const { mbarrier_wait(shared + FULL_OFFSET + stage * 8, parity); }
    __device__ __forceinline__ uint32_t slice() const { return shared + RING_OFFSET + (uint32_t)(stage * STAGE_BYTES); }
    /* Called after the warp's last load from the slice. */
    __device__ __forceinline__ void release() {
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            mbarrier_arrive(shared + EMPTY_OFFSET + stage * 8);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#endif
