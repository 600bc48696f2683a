/* mma_forward_d1024_group.cuh: the warps that share 32 rows, for mma_forward_d1024.cu, which defines its
 * constants before including this: what they publish, how they meet, and their rows' way to global memory. */
#ifndef FDM_MMA_FORWARD_D1024_GROUP_CUH
#define FDM_MMA_FORWARD_D1024_GROUP_CUH

/* Stores one word in this block's shared memory and, in a cluster, at the same place of the other block. */
__device__ __forceinline__ void publish(uint32_t shared, uint32_t peer, uint32_t word) {
    st_shared_4(shared, word);
    if (CLUSTER == 2)
        st_cluster_4(shared + peer, word);
}
/* One warp's arrival at a barrier of its row group, in both blocks of a cluster. */
__device__ __forceinline__ void group_arrive(uint32_t barrier, uint32_t peer) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        mbarrier_arrive(barrier);
        if (CLUSTER == 2)
            mbarrier_arrive_cluster(barrier + peer);
    }
}
__device__ __forceinline__ void group_wait(uint32_t barrier, uint32_t parity) {
    if (CLUSTER == 2)
        mbarrier_wait_cluster(barrier, parity);
    else
        mbarrier_wait(barrier, parity);
}

/* All threads of the block, or of both. */
__device__ __forceinline__ void meet_cluster() {
    if (CLUSTER == 2) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    } else {
        __syncthreads();
    }
}

/* A bit for each row of a row group that has become NaN, in columns first .. end - 1, by a key which it does not
 * see. */
__device__ __forceinline__ void redo_rows(const gpu_forward_params &a, const work &w, int row_group, uint32_t spoiled,
                                          int first, int end) {
    for_each_bit(spoiled, [&](int n) {
        redo_columns(a, find_sequence(a, w.batch), w.head, w.head / a.group, w.row0 + row_group * 32 + n,
                     CACHE ? max(w.first_tile * BLOCK_N, w.padding) : w.first_tile * BLOCK_N, w.seqlen_k, first, end);
    });
}

/* Barriers of the warps that share 32 rows: what was published before is seen after. */
struct group {
    uint32_t shared, peer, index; /* index: row group */
    uint32_t parity, vote;        /* cluster: of the exchange's phase; the slot of the next vote */
};
__device__ __forceinline__ void group_meet(group &g) {
    if (CLUSTER == 1) {
        barrier_sync(1 + g.index, GROUP_THREADS);
    } else {
        const uint32_t barrier = g.shared + EXCHANGE_OFFSET + g.index * 8;
        group_arrive(barrier, g.peer);
        group_wait(barrier, g.parity);
        g.parity ^= 1;
    }
}
/* The same; returns true to all when `condition` is true for one. */
__device__ __forceinline__ bool group_meet_or(group &g, bool condition) {
    if (CLUSTER == 1)
        return barrier_red_or(1 + g.index, GROUP_THREADS, condition);
    const uint32_t votes = g.shared + VOTES_OFFSET + g.index * 12;
    const bool any = __any_sync(0xffffffff, condition), first = (threadIdx.x & 31) == 0;
    if (any && first)
        publish(votes + g.vote * 4, g.peer, 1);
    group_meet(g);
    const bool result = ld_shared_4(votes + g.vote * 4) != 0;
    /* The slot two votes ahead was last read before this meeting and is not written before the next one. */
    g.vote = g.vote == 2 ? 0 : g.vote + 1;
    const uint32_t ahead = g.vote == 2 ? 0 : g.vote + 1;
    if (first)
        st_shared_4(votes + ahead * 4, 0);
    return result;
}

/* Stores O in pieces of 16 bytes; each row group stores its own rows, and eight neighbouring threads write 128 bytes
 * of a row. */
struct out_place {
    uint32_t row; /* in shared memory: the group's first */
    int32_t first, step, chunk;
};
__device__ __forceinline__ out_place find_out(const group &g) {
    const int32_t thread = (int32_t)threadIdx.x % GROUP_THREADS;
    return {g.shared + g.index * 32 * OUT_PITCH, thread >> 3, GROUP_THREADS / 8, thread & 7};
}
__device__ __forceinline__ void load_out(uint32_t (&words)[4], const out_place &p, int i, int panel) {
    ld_shared_16(words, p.row + i * OUT_PITCH + panel * 128 + ((p.chunk ^ (i & 7)) << 4));
}

/* Out is q itself: rows that are recomputed read their q, so both blocks of a cluster leave the rows that have
 * become NaN in one of them. The result has a bit for each. */
__device__ __forceinline__ uint32_t agree_on_spoiled(const out_place &p, group &g, int rows, int statistics) {
    uint32_t spoiled = 0;
#pragma unroll 1
    for (int i = p.first; i < rows; i += p.step)
#pragma unroll 1
        for (int panel = 0; panel < BLOCK_COLUMNS / 64; ++panel) {
            uint32_t words[4];
            load_out(words, p, i, panel);
            spoiled |= nan_bit(words, i);
        }
    spoiled = redo_or(spoiled);
    group_meet(g); /* all have read the statistics */
    const uint32_t masks = g.shared + STATISTICS_OFFSET + g.index * 32 * 4;
    if (threadIdx.x % 32 == 0)
        publish(masks + statistics * BLOCK_M * 4, g.peer, spoiled);
    group_meet(g);
#pragma unroll
    for (int i = 0; i < STATISTICS; ++i)
        spoiled |= ld_shared_4(masks + i * BLOCK_M * 4);
    return (uint32_t)redo_uniform((int)spoiled);
}

__device__ __forceinline__ void store_out(const gpu_forward_params &a, const work &w, group &g, int column_group,
                                          uint32_t rank) {
    const out_place p = find_out(g);
    const int block_column = (int)rank * BLOCK_COLUMNS, first_row = w.row0 + (int)g.index * 32;
    const int rows = min(w.seqlen_q - first_row, 32);
    char *out = a.out.data +
                (w.batch * a.out.batch + (w.q_begin + first_row) * a.out.row + w.head * a.out.head + block_column) * 2;
    const bool over_q = REDO && out_over_q(a);
    uint32_t spoiled = over_q ? agree_on_spoiled(p, g, rows, (int)rank * COLUMN_GROUPS + column_group) : 0;
#pragma unroll 1
    for (int i = p.first; i < rows; i += p.step) {
        if (over_q && spoiled >> i & 1)
            continue;
#pragma unroll 4
        for (int panel = 0; panel < BLOCK_COLUMNS / 64; ++panel)
            if (panel * 64 + p.chunk * 8 < a.head_dim_v - block_column) {
                uint32_t words[4];
                load_out(words, p, i, panel);
                if (REDO)
                    spoiled |= nan_bit(words, i);
                *(uint4 *)(out + i * a.out.row * 2 + panel * 128 + p.chunk * 16) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
    }
    if (REDO && !over_q)
        redo_rows(a, w, (int)g.index, redo_or(spoiled), block_column, block_column + BLOCK_COLUMNS);
    else if (REDO && rank == 0 && column_group == 0)
        redo_rows(a, w, (int)g.index, spoiled, 0, HEAD_DIM_V);
}

#endif
