/* cache.cuh: the keys of a sequence in a KV cache: how many there are, and where each lies.
 *
 * The host does not see lengths, tables and rows: they may name what is not there. Lengths are cut to the room, and a
 * page outside of the cache or a list that is none counts as keys that are not visible, so that nothing outside the
 * tensors is read or written whatever they hold. */
#ifndef FDM_GPU_CACHE_CUH
#define FDM_GPU_CACHE_CUH

#include "gpu/forward_params.h"

/* Loads an index. A negative one of 4 bytes becomes a large number, which no page has. The load is in flight until the
 * index is used. */
__device__ __forceinline__ uint64_t index_bits(const char *at, int bytes) {
    uint64_t index;
    if (bytes == 8)
        index = *(const uint64_t *)at;
    else
        index = *(const uint32_t *)at;
    return index;
}
__device__ __forceinline__ int64_t index_at(const struct gpu_indices &list, int64_t row) {
    const char *at = list.data + row * list.row * list.bytes;
    return list.bytes == 8 ? *(const int64_t *)at : *(const int32_t *)at;
}
/* An element of int32 [B]. */
__device__ __forceinline__ int index_of(const struct gpu_indices &list, int batch) {
    return ((const int32_t *)list.data)[batch * list.row];
}

/* The number in the list, limited to 0 .. most; without a list, `most`. */
__device__ __forceinline__ int used_of(const struct gpu_indices &used, int batch, int most) {
    return used.data ? min(max(index_of(used, batch), 0), most) : most;
}

/* The keys of a sequence: how many there are, how many of them the call does not append, the first visible one, the row
 * in k_new of its first new one; its row of the table, and the address of its first entry. */
struct cached_keys {
    int seqlen_k, cached, first_key, new_begin, list;
    bool is_list, is_range; /* the row is there; of a ragged table, the list lies within it */
    int64_t wanted;         /* keys after appending, whatever room there is; below 0: there is no sequence */
    const char *entries;
};
__device__ __forceinline__ struct cached_keys find_cached_keys(const struct gpu_forward_params &a, int batch) {
    const struct gpu_cache &c = a.cache;
    struct cached_keys s = {};
    s.list = c.cache_row.data ? index_of(c.cache_row, batch) : batch;
    s.entries = c.table.data;
    int64_t columns = 1, first = 0;
    const bool is_list = s.list >= 0 && s.list < c.num_lists;
    s.is_list = s.is_range = is_list;
    if (c.table.data && !c.page_start.data)
        columns = c.max_pages;
    if (c.table.data && c.page_start.data && is_list) {
        first = index_at(c.page_start, s.list);
        const int64_t end = c.has_ends ? index_at(c.page_start, s.list + 1) : c.max_pages;
        columns = first >= 0 && first <= end ? min(end, (int64_t)c.max_pages) - first : -1;
        s.is_range = columns >= 0 && end >= 0;
    }
    const int64_t room = is_list && columns > 0 ? min(columns * c.page_rows, (int64_t)a.seqlen_k) : 0;
    int64_t added = c.seqlen_new;
    if (c.cu_seqlens_new) {
        s.new_begin = min(max(c.cu_seqlens_new[batch], 0), c.total_new);
        added = max(min(c.cu_seqlens_new[batch + 1], c.total_new) - s.new_begin, 0);
    }
    const int64_t before = c.lengths.data     ? index_of(c.lengths, batch)
                           : a.seqused_k.data ? index_of(a.seqused_k, batch) - added
                                              : room;
    s.wanted = before < 0 ? -1 : before + added;
    s.seqlen_k = before < 0 ? 0 : (int)min(before + added, room);
    s.cached = before < 0 ? 0 : (int)min(before, room);
    s.first_key = c.first_key.data ? max(index_of(c.first_key, batch), 0) : 0;
    s.entries += (c.page_start.data ? first * c.table.column : s.list * c.table.row) * c.table.bytes;
    return s;
}

/* The place of a key: its row in a page, -1 - n for row n of the new keys, or NO_ROW; and the entry of the table that
 * names its page. */
#define NO_ROW (-0x7fffffff - 1)
struct page_entry {
    const char *at; /* NULL: the page is the list, or there is none */
    int row;
};
__device__ __forceinline__ struct page_entry find_page_entry(const struct gpu_cache &c, const struct cached_keys &s,
                                                             int key) {
    if (key < 0 || key >= s.seqlen_k)
        return {0, NO_ROW};
    struct page_entry entry = {0, key};
    if (c.table.data) {
        const uint32_t column = (uint32_t)key / (uint32_t)c.page_rows;
        entry.at = s.entries + (int64_t)column * c.table.column * c.table.bytes;
        entry.row -= (int)(column * (uint32_t)c.page_rows);
    }
    if (key >= s.cached)
        entry.row = -1 - (s.new_begin + key - s.cached);
    return entry;
}

/* The same with the number of the page, whose load may be in flight. */
struct page_row {
    uint64_t page;
    int row;
};
__device__ __forceinline__ struct page_row find_page_row(const struct gpu_cache &c, const struct cached_keys &s,
                                                         int key) {
    const struct page_entry entry = find_page_entry(c, s, key);
    return {entry.at ? index_bits(entry.at, c.table.bytes) : (uint32_t)s.list, entry.row};
}

/* Keeps in shared memory what find_page_entry() and find_page_row() read, field by field. */
__device__ __forceinline__ void keep_cached_keys(struct cached_keys *kept, const struct cached_keys &found) {
    kept->seqlen_k = found.seqlen_k;
    kept->cached = found.cached;
    kept->new_begin = found.new_begin;
    kept->list = found.list;
    kept->entries = found.entries;
}
/* Whether the cache has no page for a key that is there: the key is not visible. */
__device__ __forceinline__ bool has_no_page(const struct gpu_cache &c, const struct page_row &at) {
    return at.row != NO_ROW && at.page >= (uint64_t)c.num_pages;
}

/* The key's address in the pages of one KV head, or in the new rows. It is NULL where the cache has no such page: the
 * key is not visible. */
template <int element_bytes>
__device__ __forceinline__ const char *row_address(const struct gpu_cache &c, const struct page_row &at,
                                                   const struct gpu_matrix &pages, const struct gpu_matrix &added,
                                                   int batch, int head) {
    if (at.row == NO_ROW || at.page >= (uint64_t)c.num_pages)
        return (const char *)0;
    const int64_t in_pages = (int64_t)at.page * pages.batch + at.row * pages.row + head * pages.head;
    const int64_t in_new = batch * added.batch + (int64_t)(-1 - at.row) * added.row + head * added.head;
    return at.row >= 0 ? pages.data + in_pages * element_bytes : added.data + in_new * element_bytes;
}

#endif
