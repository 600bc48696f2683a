/* cache_fault.cu: looks for a length, page, row or list of a KV cache that names what is not there, and keeps one.
 *
 * Idea: a block looks at the lists of one sequence, its threads at entries of the table side by side. Who finds the
 * first word 0 writes all four; later ones write nothing. Bound by the launch.
 *
 * Grid: sequences, walked with a stride of the grid. */
#include "cuda/ptx/launch.cuh"
#include "gpu/cache.cuh"
#include "gpu/cache_fault.h"

__device__ __forceinline__ void report(int32_t *fault, int kind, int batch, int column, int64_t value) {
    if (atomicCAS(fault, CACHE_FAULT_NONE, kind) != CACHE_FAULT_NONE)
        return;
    fault[1] = batch;
    fault[2] = column;
    fault[3] = (int32_t)min(max(value, (int64_t)-0x7fffffff - 1), (int64_t)0x7fffffff);
}

/* The columns of the table whose keys are visible. */
__device__ __forceinline__ void look_at_pages(const struct cache_fault_params &a, const struct cached_keys &s,
                                              int batch) {
    const struct gpu_cache &c = a.in.cache;
    const int64_t first = min(s.first_key, s.seqlen_k) / c.page_rows;
    for (int64_t column = first + threadIdx.x; column * c.page_rows < s.seqlen_k; column += CACHE_FAULT_THREADS) {
        const char *const at = s.entries + column * c.table.column * c.table.bytes;
        const int64_t page = c.table.bytes == 8 ? *(const int64_t *)at : *(const int32_t *)at;
        if (page < 0 || page >= c.num_pages)
            report(a.fault, CACHE_FAULT_PAGE, batch, (int)column, page);
    }
}

extern "C" __global__ void __launch_bounds__(CACHE_FAULT_THREADS)
    cache_fault(const __grid_constant__ struct cache_fault_params a) {
    const struct gpu_cache &c = a.in.cache;
    griddepcontrol_wait();
    for (int batch = blockIdx.x; batch < a.in.batch; batch += gridDim.x) {
        const struct cached_keys s = find_cached_keys(a.in, batch);
        const bool asks = c.lengths.data || a.in.seqused_k.data;
        if (asks && s.wanted < 0)
            continue;
        if (c.table.data && s.is_list && s.is_range)
            look_at_pages(a, s, batch);
        if (threadIdx.x)
            continue;
        if (!s.is_list)
            report(a.fault, CACHE_FAULT_ROW, batch, 0, s.list);
        else if (!s.is_range)
            report(a.fault, CACHE_FAULT_PAGE_START, batch, 0, index_at(c.page_start, s.list));
        else if (s.wanted > s.seqlen_k)
            report(a.fault, CACHE_FAULT_LENGTH, batch, 0, s.wanted);
    }
}
