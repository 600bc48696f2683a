/* hopper_pages.cuh: the producer of hopper_forward.cu where the keys lie in a KV cache.
 *
 * A tile of keys is copied in parts of 1 << part_shift rows, each of which lies in one page: the page is a multiple of
 * a part, or a cache without a table is one page a sequence. Lane n of the producer's warp has part n of every tile: it
 * loads the number of the part's page a tile ahead, copies the part of K, and a step later that of V.
 *
 * A part whose page is not in the cache, or that begins behind the last key, is copied from outside of the map: its
 * rows are zeros. The word of a stage of K has a bit for each part whose keys no row sees because their page is none.
 * Rows of a part behind the last key are what the page holds: consumers hide the keys and clear the values.
 *
 * Packed sequences of unlike lengths: the places of a sequence follow those of the one before, so that few of them
 * have no rows. Sequence b begins at block begin_of(b) of rows, and each block has a place for every head. */
#ifndef FDM_HOPPER_PAGES_CUH
#define FDM_HOPPER_PAGES_CUH

struct cache_producer : producer {
    struct part {
        int page, row;
    };
    struct cached_keys keys; /* of the item's sequence; new keys lie in the cache, too */
    const int lane;

    __device__ __forceinline__ cache_producer(const struct hopper_forward_params &params, uint32_t shared)
        : producer(params, shared), keys({}), lane((int)threadIdx.x) {}

    __device__ __forceinline__ bool has_part() const { return lane << a.part_shift < BLOCK_N; }
    /* The lane's part of a tile. The load of the page's number may be in flight. */
    __device__ __forceinline__ struct page_row find_part(int tile) const {
        return find_page_row(a.in.cache, keys, has_part() ? tile * BLOCK_N + (lane << a.part_shift) : -1);
    }
    __device__ __forceinline__ bool is_missing(const struct page_row &at) const { return has_no_page(a.in.cache, at); }
    __device__ __forceinline__ struct part part_at(const struct page_row &at) const {
        const bool there = at.row != NO_ROW && !is_missing(at);
        return {there ? (int)at.page : a.in.cache.num_pages, there ? at.row : 0};
    }

    template <int count>
    __device__ __forceinline__ void load_parts(uint32_t to, const struct cuda_tensor_map *map, uint32_t barrier,
                                               const struct part &from, int head) {
        if (lane == 0)
            mbarrier_arrive_expect_tx(barrier, count * panels<BLOCK_N>::BYTES);
        __syncwarp();
        if (!has_part())
            return;
        const panels<BLOCK_N> rows = panels<BLOCK_N>{to}.rows(lane << a.part_shift);
#pragma unroll
        for (int n = 0; n < count; n++)
            cp_async_bulk_tensor_4d(rows.panel(n).at, map, barrier, n * 64, from.row, head, from.page);
    }
    __device__ __forceinline__ void load_k_parts(const struct part &from, uint32_t missing, int head) {
        const k_stages to = k_ring(base);
        to.wait_empty(step);
        if (lane == 0)
            st_shared_4(step_word(base, step), missing);
        load_parts<Q_PANELS>(to.tile(step), &a.k_map, to.full(step), from, head);
    }
    __device__ __forceinline__ void load_v_parts(uint32_t count, const struct part &from, int head) {
        const v_stages to = v_ring(base);
        to.wait_empty(count);
        load_parts<V_PANELS>(to.tile(count), &a.v_map, to.full(count), from, head);
    }

    __device__ __forceinline__ void request_at_end() {
        if (lane == 0)
            scheduler.request_at_end(a);
    }
    __device__ __forceinline__ void load_cached_item(const struct item_facts &f) {
        const int head = f.head / a.in.group;
        if (lane == 0)
            load_q(f);
        struct page_row next = find_part(f.last_tile - 1);
        struct part before = {};
#pragma unroll 1
        for (int tile = f.last_tile - 1; tile >= f.first_tile; tile--, step++) {
            const struct part own = part_at(next);
            const uint32_t missing = __ballot_sync(0xffffffff, is_missing(next));
            if (tile == f.first_tile)
                request_at_end();
            next = find_part(tile - 1);
            load_k_parts(own, missing, head);
            if (tile < f.last_tile - 1)
                load_v_parts(step - 1, before, head);
            before = own;
        }
        if (f.first_tile < f.last_tile)
            load_v_parts(step - 1, before, head);
    }
    __device__ __forceinline__ void run_cached_item(struct item_facts &f, const struct sequence &s) {
        find_tiles(a.in, s, BLOCK_M, f);
        if (lane == 0)
            publish(f);
        if (f.first_tile >= f.last_tile)
            request_at_end();
        load_cached_item(f);
        item++;
    }
    __device__ __forceinline__ int begin_of(int b) const {
        const int row = min(max(a.in.cu_seqlens_q[b], 0), a.in.total_q);
        return (int)((int64_t)row * PACKED_HEADS / BLOCK_M) + b;
    }
    /* The item of a place, the longest of a head first; batch -1: it has none. The warp looks for the last sequence
     * that begins no later. */
    __device__ __forceinline__ struct work_item packed_item_at(int place) const {
        const int block = place / a.in.heads;
        int low = 0, high = a.in.batch;
        while (high - low > 1) {
            const int step = (high - low + 31) / 32, b = low + lane * step;
            const uint32_t before = __ballot_sync(0xffffffff, b < high && begin_of(b) <= block);
            low += max(31 - __clz((int)before), 0) * step;
            high = min(high, low + step);
        }
        const int begin = begin_of(low), blocks = begin_of(low + 1) - begin, own = place - begin * a.in.heads;
        if (own < 0 || own >= blocks * a.in.heads)
            return {0, 0, -1};
        return {blocks - 1 - own % blocks, own / blocks, low};
    }
    __device__ __forceinline__ bool has_place() const {
        return VARLEN ? scheduler.place < a.items : scheduler.valid(a);
    }
    __device__ __forceinline__ void advance() {
        scheduler.next = __shfl_sync(0xffffffff, scheduler.next, 0); /* which lane 0 has requested */
        scheduler.advance();
    }

    __device__ __forceinline__ void run_cache() {
        scheduler.initial();
        for (; has_place(); advance()) {
            const struct work_item work = VARLEN ? packed_item_at(scheduler.place) : item_at(a, scheduler.place);
            if (lane == 0)
                scheduler.request_at_begin(a);
            if (work.batch >= 0) {
                struct sequence s = find_sequence_q(a.in, work.batch);
                const int first_row = work.row_block * BLOCK_M;
                if (first_row < s.seqlen_q * PACKED_HEADS) {
                    keys = find_cached_keys(a.in, work.batch);
                    keys.cached = s.seqlen_k = keys.seqlen_k;
                    s.diagonal = s.seqlen_k - s.seqlen_q;
                    struct item_facts f = {first_row, work.head, work.batch, 0, 0, s.seqlen_q, s.seqlen_k, s.q_begin};
                    run_cached_item(f, s);
                    continue;
                }
            }
            request_at_end(); /* it is passed over */
        }
        if (lane == 0)
            publish({-1, 0, 0, 0, 0, 0, 0, 0});
    }
};

#endif
