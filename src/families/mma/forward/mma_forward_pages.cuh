/* mma_forward_pages.cuh: where the keys of a tile lie in a KV cache, for mma_forward.cu, which defines its constants
 * before including this.
 *
 * Two tiles ahead a thread finds the entry of the table for one key and has it copied to shared memory, beside the
 * key's row in its page: nothing waits for the table, and no register holds it. What is known of the sequence lies
 * there too. Four tiles have places: of tile t those of t + 2 are written while t + 1 is copied and t is multiplied. */
#ifndef FDM_MMA_FORWARD_PAGES_CUH
#define FDM_MMA_FORWARD_PAGES_CUH

#include "cuda/ptx/copy.cuh"
#include "families/mma/forward/mma_forward.h"
#include "gpu/packed.cuh"

constexpr bool PAGED = CACHE == GPU_CACHE_PAGES;
static_assert(!PAGED || STAGES == 2, "tables come with the tile before");
static_assert(sizeof(struct cached_keys) <= MMA_FORWARD_SEQUENCE_BYTES, "the sequence has room");

struct tile_pages {
    uint32_t pages, rows; /* [4][BLOCK_N]: numbers of 8 bytes, and rows */
    struct cached_keys *sequence;

    __device__ __forceinline__ explicit tile_pages(char *shared)
        : pages(shared_address(shared) + MMA_FORWARD_PAGES_OFFSET), rows(pages + 4 * BLOCK_N * 8),
          sequence((struct cached_keys *)(shared + MMA_FORWARD_PAGES_OFFSET + 4 * BLOCK_N * 12)) {}
    /* For the threads that read. */
    __device__ __forceinline__ explicit tile_pages(uint32_t q_tile)
        : pages(q_tile + MMA_FORWARD_PAGES_OFFSET), rows(pages + 4 * BLOCK_N * 8), sequence(0) {}

    /* By all threads of the block. */
    __device__ __forceinline__ void find_sequence(const struct gpu_forward_params &a, int batch) const {
        if (threadIdx.x == 0)
            keep_cached_keys(sequence, find_cached_keys(a, batch));
        __syncthreads();
    }
    /* Finds the entry of this key, which is column n of tile t; -1 is no key. One thread calls it. */
    __device__ __forceinline__ void look_up(const struct gpu_cache &c, int t, int n, int key) const {
        const struct page_entry entry = find_page_entry(c, *sequence, key);
        const uint32_t place = t % 4 * BLOCK_N + n, page = pages + place * 8;
        st_shared_4(rows + place * 4, (uint32_t)entry.row);
        if (entry.at) {
            cp_async_4_fill(page, entry.at, 4);
            cp_async_4_fill(page + 4, c.table.bytes == 8 ? entry.at + 4 : entry.at, c.table.bytes == 8 ? 4 : 0);
        } else {
            st_shared_4(page, (uint32_t)sequence->list);
            st_shared_4(page + 4, 0);
        }
    }
    __device__ __forceinline__ struct page_row find(int t, int n) const {
        const uint32_t place = t % 4 * BLOCK_N + n;
        uint32_t low, high;
        ld_shared_8(low, high, pages + place * 8);
        return {(uint64_t)high << 32 | low, (int)ld_shared_4(rows + place * 4)};
    }
    /* Whether column n of tile t is a key whose page does not exist. */
    __device__ __forceinline__ bool is_missing(const struct gpu_cache &c, int t, int n) const {
        return has_no_page(c, find(t, n));
    }
    /* Whether some column is such a key. A warp calls it. */
    __device__ __forceinline__ bool any_missing(const struct gpu_cache &c, int t) const {
        bool missing = false;
#pragma unroll
        for (int n = 0; n < BLOCK_N; n += 32)
            missing = missing || (n + threadIdx.x % 32 < BLOCK_N && is_missing(c, t, n + threadIdx.x % 32));
        return __any_sync(0xffffffff, missing);
    }
};

#endif
