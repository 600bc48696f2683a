/* tune_cache.c: the KV cache of a tuned problem: pages in disorder, lengths, new keys, rotary tables. */
#include <math.h>

#include "base/error.h"
#include "base/integers.h"
#include "base/memory.h"
#include "tuner/tune_contents.h"
#include "tuner/tune_pattern.h"

/* What each sequence has of the cache. */
struct share {
    int64_t entries; /* of the table */
    int64_t pages;   /* that keys lie in; a contiguous cache has one, its row */
    int64_t room;    /* keys */
};

/* Sequences have pages of their own, so that their lengths are those that the cache has room for. Where there are fewer
 * pages than sequences, they share pages to read; of those that append, none has a page then. */
static struct share share_of(const fdm_problem *p) {
    const int64_t batch = p->batch > 0 ? p->batch : 1, own = p->num_pages / batch;
    struct share s = {1, 1, p->seqlen_k};
    if (!p->has_cache || !p->page_size)
        return s;
    s.entries = p->ragged_pages ? p->max_pages / batch : p->max_pages;
    s.pages = smaller(s.entries, (p->seqlen_k + p->page_size - 1) / p->page_size);
    s.pages = smaller(s.pages, own > 0 || p->new_rows ? own : p->num_pages > 0);
    s.room = smaller(s.pages * p->page_size, p->seqlen_k);
    return s;
}

int64_t tune_cache_room(const fdm_problem *p) { return share_of(p).room; }

/* New keys are packed where rows are, or where not every sequence has as many. */
static int packs_new(const fdm_problem *p) { return p->varlen || (p->batch > 0 && p->new_rows % p->batch); }

/* ---- shapes ---- */

static void set_new(struct tune_data *data) {
    const fdm_problem *p = data->problem;
    const int packed = packs_new(p);
    const int64_t rows = packed ? p->new_rows : p->batch > 0 ? p->new_rows / p->batch : 0, ends[1] = {p->batch + 1};
    const int64_t k[4] = {p->batch, rows, p->heads_kv, p->head_dim},
                  v[4] = {p->batch, rows, p->heads_kv, p->head_dim_v};
    tune_set_shape(data, TUNE_K_NEW, p->dtype, 4 - packed, k + packed);
    tune_set_shape(data, TUNE_V_NEW, p->dtype, 4 - packed, v + packed);
    if (packed)
        tune_set_shape(data, TUNE_CU_NEW, FDM_INT32, 1, ends);
}

void tune_set_cache(struct tune_data *data) {
    enum { POSITIONS_MAX = 1 << 16 }; /* rows beyond turn by the last one */
    const fdm_problem *p = data->problem;
    const int64_t batch[1] = {p->batch}, starts[1] = {p->batch + !p->has_cache_row},
                  table[2] = {p->batch, p->max_pages}, room = smaller(p->seqlen_k, POSITIONS_MAX),
                  tables[2] = {room > 0 ? room : 1, p->rotary_dim / 2};
    if (!p->has_cache)
        return;
    if (p->page_size)
        tune_set_shape(data, TUNE_TABLE, FDM_INT32, p->ragged_pages ? 1 : 2, p->ragged_pages ? table + 1 : table);
    if (p->ragged_pages)
        tune_set_shape(data, TUNE_PAGE_START, FDM_INT32, 1, starts);
    if (p->has_cache_row)
        tune_set_shape(data, TUNE_CACHE_ROW, FDM_INT32, 1, batch);
    if (!p->has_seqused_k)
        tune_set_shape(data, TUNE_CACHE_LENGTHS, FDM_INT32, 1, batch);
    if (p->has_first_key)
        tune_set_shape(data, TUNE_FIRST_KEY, FDM_INT32, 1, batch);
    if (p->new_rows)
        set_new(data);
    for (int role = TUNE_COS; p->rotary_dim && role <= TUNE_SIN; role++)
        tune_set_shape(data, (enum tune_role)role, FDM_FLOAT32, 2, tables);
}

/* ---- contents ---- */

/* Keys of a sequence after appending, of which it has its new ones at least. */
static int32_t keys_of(const fdm_problem *p, const int32_t *ends, int64_t b) {
    const int64_t room = share_of(p).room, new_keys = smaller(ends[b + 1] - ends[b], room);
    const int64_t keys = tune_length_used(room, b, p->batch);
    if (!p->page_size && b >= p->num_pages && p->new_rows)
        return -1; /* another sequence appends to that row */
    return (int32_t)(keys > new_keys ? keys : new_keys);
}

static int32_t keys_before(const fdm_problem *p, const int32_t *ends, int64_t b) {
    const int32_t keys = keys_of(p, ends, b), new_keys = ends[b + 1] - ends[b];
    return keys < 0 ? keys : keys > new_keys ? keys - new_keys : 0;
}

/* Left padding of none to three of thirty-two parts of the keys. */
static int32_t first_key(const fdm_problem *p, const int32_t *ends, int64_t b) {
    const int64_t keys = keys_of(p, ends, b);
    return keys > 0 ? (int32_t)(keys * (b % 4) / 32) : 0;
}

/* Rows and lists are those of the sequences from the last on. */
static int32_t cache_row(const fdm_problem *p, const int32_t *ends, int64_t b) {
    const int64_t count = p->page_size ? p->batch : p->num_pages;
    (void)ends;
    return count > 0 ? (int32_t)(count - 1 - b % count) : 0;
}

static int32_t page_start(const fdm_problem *p, const int32_t *ends, int64_t b) {
    (void)ends;
    return (int32_t)(b * share_of(p).entries);
}

/* Pages lie far from each other, as those of a cache that was in use for long. */
static int32_t page_of(const fdm_problem *p, const int32_t *ends, int64_t index) {
    const struct share s = share_of(p);
    const int64_t list = s.entries ? index / s.entries : 0, column = s.entries ? index % s.entries : 0;
    const int64_t prime = p->num_pages % 7919 ? 7919 : 7907; /* it does not divide their number */
    (void)ends;
    return list < p->batch && column < s.pages ? (int32_t)((list * s.pages + column) * prime % p->num_pages) : 0;
}

static fdm_status fill_rotary(struct tune_data *data) {
    const fdm_device_id host = {FDM_CPU, 0};
    const int64_t rows = data->shapes[TUNE_COS][0], pairs = data->shapes[TUNE_COS][1];
    float *table = memory_allocate(data->bytes[TUNE_COS] + 1);
    fdm_status status = FDM_OK;
    if (!table)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the rotary tables of %lld positions", (long long)rows);
    for (int role = TUNE_COS; role <= TUNE_SIN && !status; role++) {
        for (int64_t i = 0; i < rows * pairs; i++) {
            const double angle = (double)(i / pairs) * pow(10000, -(double)(i % pairs) / (double)pairs);
            table[i] = (float)(role == TUNE_COS ? cos(angle) : sin(angle));
        }
        status = fdm_memory_copy(data->memory[role], data->device, table, host, data->bytes[role]);
    }
    memory_release(table);
    return status;
}

static void make_new_ends(const fdm_problem *p, int32_t *ends) {
    const int64_t mean = p->batch > 0 ? (p->new_rows + p->batch - 1) / p->batch : 0,
                  most = smaller(p->seqlen_q, p->new_rows);
    tune_make_ends(p->batch, packs_new(p) && most > mean ? most : mean, p->new_rows, ends);
}

fdm_status tune_fill_cache(struct tune_data *data) {
    static const struct {
        enum tune_role role;
        tune_number number;
    } all[] = {{TUNE_TABLE, page_of},  {TUNE_PAGE_START, page_start},     {TUNE_CACHE_ROW, cache_row},
               {TUNE_USED_K, keys_of}, {TUNE_CACHE_LENGTHS, keys_before}, {TUNE_FIRST_KEY, first_key},
               {TUNE_CU_NEW, tune_end}};
    const fdm_problem *p = data->problem;
    if (!p->has_cache)
        return FDM_OK;
    int32_t *ends = memory_allocate((size_t)(p->batch + 1) * sizeof *ends);
    fdm_status status =
        ends ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %lld lengths", (long long)p->batch);
    if (!status)
        make_new_ends(p, ends);
    for (size_t i = 0; i < sizeof all / sizeof all[0] && !status; i++)
        if (data->memory[all[i].role])
            status = tune_fill_numbers(data, all[i].role, all[i].number, ends);
    if (!status && p->rotary_dim)
        status = fill_rotary(data);
    memory_release(ends);
    return status;
}
