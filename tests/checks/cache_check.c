/* cache_check.c: fdm_cache_append() on a CUDA device, or on the emulated one, against the CPU, bit for bit; and one
 * plan of attention on a cache with lists that change between its executions, against the CPU.
 *
 * What only a device takes, a page or a row of the table outside of the cache, the CPU gets in other words: such a page
 * is one more page of its cache, which a mask hides, and such a row is a sequence that is none. A kernel that
 * appends by itself gives the bits that it gives behind a launch of append.cu. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/elements.h"
#include "device_check.h"
#include "flash_dmattn.h"
#include "gpu/cache_fault.h"
#include "subjects.h"

enum {
    Q,
    Q_OUT,
    CACHE_K,
    CACHE_V,
    K_NEW,
    V_NEW,
    TABLE,
    PAGE_START,
    CACHE_ROW,
    LENGTHS,
    FIRST_KEY,
    CU_NEW,
    CU_Q,
    COS,
    SIN,
    ROTARY_START,
    SLOTS,
    POSITIONS,
    LSE,
    MASK,
    FAULT,
    NUM_TENSORS
};
enum { BATCH_MAX = 5, POSITIONS_MAX = 40 };

/* A tensor on the host and on the device. The host's may have one page more than the device's. */
static struct both {
    int present;
    fdm_dtype dtype;
    int32_t ndim;
    int64_t shape[4], host_shape[4], strides[4], bytes;
    char *here, *there, *image; /* image: what the device gets */
    fdm_tensor host_tensor, device_tensor;
} t[NUM_TENSORS];

static struct scene {
    fdm_dtype dtype;
    int64_t batch, heads, heads_kv, head_dim, head_dim_v, page, pages, columns, seqlen_q, new_rows, bound;
    int packed_q, packed_new, paged, slots, ragged, latent;
    fdm_cache host_cache, device_cache;
} s;

static int64_t pick(const int64_t *list, int64_t count) { return list[below(count)]; }
#define PICK(...) pick((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

/* ---- tensors ---- */

static void release_all(void) {
    for (int n = 0; n < NUM_TENSORS; n++) {
        if (!t[n].present)
            continue;
        fdm_memory_release(cuda, t[n].there);
        free(t[n].here);
        free(t[n].image);
        t[n].present = 0;
    }
}

/* Rows of `padding` elements more than they have; two of four axes may lie the other way round. */
static struct both *make(int n, fdm_dtype dtype, int32_t ndim, const int64_t *shape, int64_t padding, int swapped,
                         int64_t more_on_host) {
    struct both *b = &t[n];
    int64_t step = 1;
    *b = (struct both){.present = 1, .dtype = dtype, .ndim = ndim};
    for (int32_t i = ndim - 1; i >= 0; i--) {
        const int32_t axis = swapped && ndim == 4 && (i == 1 || i == 2) ? 3 - i : i;
        b->strides[axis] = step;
        step *= shape[axis] + (i == ndim - 1 ? padding : 0);
    }
    for (int32_t i = 0; i < ndim; i++)
        b->shape[i] = b->host_shape[i] = shape[i];
    b->host_shape[0] += more_on_host;
    b->bytes = step * fdm_dtype_bytes(dtype);
    const size_t on_host = (size_t)(b->host_shape[0] * b->strides[0] * fdm_dtype_bytes(dtype));
    b->here = calloc(1, on_host + 64);
    b->image = calloc(1, (size_t)b->bytes + 64);
    if (!b->here || !b->image || fdm_memory_allocate(cuda, (size_t)b->bytes + 64, (void **)&b->there))
        fail("allocating");
    b->host_tensor = (fdm_tensor){b->here, host, ndim, fdm_data_type_of(dtype), b->host_shape, b->strides, 0};
    b->device_tensor = (fdm_tensor){b->there, cuda, ndim, fdm_data_type_of(dtype), b->shape, b->strides, 0};
    return b;
}

/* Bytes at random, NaN among them; then every element a number of few digits. */
static void draw_numbers(struct both *b, double scale) {
    for (int64_t n = 0; n < b->bytes / fdm_dtype_bytes(b->dtype); n++)
        element_store(b->here, n, b->dtype, scale * (double)(below(33) - 16));
    memcpy(b->image, b->here, (size_t)b->bytes);
}
static void draw_turns(struct both *b) {
    for (int64_t n = 0; n < b->bytes / fdm_dtype_bytes(b->dtype); n++)
        element_store(b->here, n, b->dtype, (double)(below(2001) - 1000) / 1000);
    memcpy(b->image, b->here, (size_t)b->bytes);
}

/* An index of the host's and the device's list. */
static void set(int n, int64_t index, int64_t on_host, int64_t on_device) {
    struct both *b = &t[n];
    if (b->dtype == FDM_INT64) {
        ((int64_t *)(void *)b->here)[index] = on_host;
        ((int64_t *)(void *)b->image)[index] = on_device;
    } else {
        ((int32_t *)(void *)b->here)[index] = (int32_t)on_host;
        ((int32_t *)(void *)b->image)[index] = (int32_t)on_device;
    }
}

static fdm_tensor *of(int n, int on_device) {
    return !t[n].present ? NULL : on_device ? &t[n].device_tensor : &t[n].host_tensor;
}

static void upload(void) {
    for (int n = 0; n < NUM_TENSORS; n++)
        if (t[n].present && fdm_memory_copy(t[n].there, cuda, t[n].image, host, (size_t)t[n].bytes))
            fail("copying");
}
static void download(int n) {
    if (fdm_memory_copy(t[n].image, host, t[n].there, cuda, (size_t)t[n].bytes))
        fail("copying");
}

/* ---- a scene ---- */

/* Of a kernel for prompts: tiles of rows and of keys, in few specialisations. 2: of a latent cache. */
static void draw_prompts(int prompts) {
    s.dtype = FDM_BFLOAT16;
    s.head_dim = s.head_dim_v = PICK(64, 128);
    s.page = PICK(16, 16, 48, 64);
    s.columns = 1 + below(s.page == 16 ? 20 : 6);
    s.seqlen_q = 1 + below(below(2) ? 20 : 150);
    s.new_rows = below(2) * (1 + below(s.seqlen_q));
    if (prompts < 2)
        return;
    s.latent = s.heads_kv = 1;
    s.heads = PICK(5, 16, 80);
    s.head_dim = 576, s.head_dim_v = 512;
    s.seqlen_q = 1 + below(4), s.new_rows = 0;
}

static void draw_sizes(int attends, int in_16_bits, int prompts) {
    const int64_t unit = attends ? 8 : 1;
    s = (struct scene){.dtype = (fdm_dtype)PICK(FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16)};
    if (in_16_bits && s.dtype == FDM_FLOAT32)
        s.dtype = FDM_BFLOAT16;
    s.batch = 1 + below(BATCH_MAX);
    s.heads_kv = 1 + below(3);
    s.heads = s.heads_kv * PICK(1, 2, 4);
    s.head_dim = attends ? PICK(16, 64, 72, 128) : unit * PICK(2, 7, 8, 16, 20, 64);
    s.head_dim_v = attends ? PICK(8, 64, 128) : PICK(1, 8, 24, 64);
    s.paged = attends || below(4) != 0;
    s.page = s.paged ? PICK(1, 2, 3, 5, 16, 64) : 1 + below(60);
    s.columns = s.paged ? 1 + below(s.page < 16 ? 60 : 5) : 1;
    s.seqlen_q = 1 + below(4);
    if (prompts)
        draw_prompts(prompts);
    s.pages = s.paged ? s.batch * s.columns : s.batch;
    s.bound = s.page * s.columns;
    s.slots = !attends && below(3) == 0;
    s.ragged = s.paged && !s.slots && below(2);
    s.packed_q = s.slots || below(2);
    s.packed_new = s.slots || below(2);
    if (!prompts)
        s.new_rows = s.slots ? 1 + below(4) : below(5);
}

static void make_tensors(int attends) {
    const int64_t unit = s.dtype == FDM_FLOAT32 ? 4 : 8, padding = below(2) * (attends ? unit : 1 + below(8));
    const int64_t q[4] = {s.batch, s.seqlen_q, s.heads, s.head_dim},
                  packed_q[3] = {s.batch * s.seqlen_q + 2, s.heads, s.head_dim};
    const int64_t out[4] = {s.batch, s.seqlen_q, s.heads, s.head_dim_v},
                  packed_out[3] = {packed_q[0], s.heads, s.head_dim_v};
    const int64_t lists[1] = {s.batch}, offsets[1] = {s.batch + 1}, rows[2] = {POSITIONS_MAX, s.head_dim / 2};
    const int swapped = (int)below(2), turns = !s.latent && below(2) == 0;
    for (int of_v = 0; of_v < 2; of_v++) {
        const int64_t depth = of_v ? s.head_dim_v : s.head_dim;
        const int64_t cache[4] = {s.pages, s.page, s.heads_kv, depth},
                      added[4] = {s.batch, s.new_rows, s.heads_kv, depth},
                      packed[3] = {s.batch * s.new_rows + 2, s.heads_kv, depth};
        draw_numbers(make(CACHE_K + of_v, s.dtype, 4, cache, padding, swapped, s.paged), 0.125);
        if (s.new_rows)
            draw_numbers(
                make(K_NEW + of_v, s.dtype, s.packed_new ? 3 : 4, s.packed_new ? packed : added, padding, 0, 0), 0.125);
    }
    if (s.latent) { /* v is the first columns of k */
        t[CACHE_V].host_tensor = t[CACHE_K].host_tensor, t[CACHE_V].host_tensor.shape = t[CACHE_V].host_shape;
        t[CACHE_V].device_tensor = t[CACHE_K].device_tensor, t[CACHE_V].device_tensor.shape = t[CACHE_V].shape;
    }
    if (attends || turns)
        draw_numbers(make(Q, s.dtype, s.packed_q ? 3 : 4, s.packed_q ? packed_q : q, 0, 0, 0), 0.125);
    if (attends || turns)
        draw_numbers(make(Q_OUT, s.dtype, s.packed_q ? 3 : 4,
                          attends ? (s.packed_q ? packed_out : out) : (s.packed_q ? packed_q : q), 0, 0, 0),
                     0.125);
    if (turns)
        for (int n = COS; n <= SIN; n++)
            draw_turns(make(n, below(2) ? s.dtype : FDM_FLOAT32, 2, rows, 0, 0, 0));
    if (turns)
        t[SIN].dtype == t[COS].dtype ? (void)0 : draw_turns(make(SIN, t[COS].dtype, 2, rows, 0, 0, 0));
    if (turns) { /* some of the dims */
        const int64_t pairs = 1 + below(s.head_dim / 2);
        t[COS].shape[1] = t[SIN].shape[1] = t[COS].host_shape[1] = t[SIN].host_shape[1] = pairs;
    }
    if (s.packed_q && !s.slots && t[Q].present)
        make(CU_Q, FDM_INT32, 1, offsets, 0, 0, 0);
    if (s.slots)
        return;
    make(FAULT, FDM_INT32, 1, (const int64_t[]){4}, 0, 0, 0);
    make(LENGTHS, FDM_INT32, 1, lists, 0, 0, 0);
    if (s.packed_new && s.new_rows)
        make(CU_NEW, FDM_INT32, 1, offsets, 0, 0, 0);
    if (below(2))
        make(CACHE_ROW, FDM_INT32, 1, lists, 0, 0, 0);
    if (attends && !s.latent && below(2))
        make(FIRST_KEY, FDM_INT32, 1, lists, 0, 0, 0);
    if (turns && below(2))
        make(ROTARY_START, FDM_INT32, 1, lists, 0, 0, 0);
}

static void make_tables(int attends) {
    const int64_t table[2] = {s.batch, s.columns}, flat[1] = {s.batch * s.columns};
    const int64_t ends[1] = {s.batch + (t[CACHE_ROW].present ? 0 : 1)}, mask[4] = {s.batch, 1, 1, s.bound};
    const int64_t total = t[K_NEW].present ? s.batch * s.new_rows + 2
                          : t[Q].present   ? t[Q].shape[0]
                                           : 0,
                  all[1] = {total};
    const fdm_dtype wide = below(2) ? FDM_INT32 : FDM_INT64;
    if (s.slots && t[K_NEW].present)
        make(SLOTS, wide, 1, all, 0, 0, 0);
    if (s.slots && t[COS].present && total)
        make(POSITIONS, wide, 1, all, 0, 0, 0);
    if (s.slots && t[Q].present && t[Q].shape[0] != total) { /* a position for each key and each row */
        t[Q].shape[0] = t[Q].host_shape[0] = t[Q_OUT].shape[0] = t[Q_OUT].host_shape[0] = total;
        const int64_t q[3] = {total, s.heads, s.head_dim};
        for (int n = Q; n <= Q_OUT; n++) {
            fdm_memory_release(cuda, t[n].there);
            free(t[n].here), free(t[n].image);
            draw_numbers(make(n, s.dtype, 3, q, 0, 0, 0), 0.125);
        }
    }
    if (s.paged && !s.slots)
        make(TABLE, wide, s.ragged ? 1 : 2, s.ragged ? flat : table, 0, 0, 0);
    if (s.ragged)
        make(PAGE_START, below(2) ? FDM_INT32 : FDM_INT64, 1, ends, 0, 0, 0);
    if (attends && s.packed_q) {
        const int64_t rows[2] = {s.heads, t[Q].shape[0]};
        make(LSE, FDM_FLOAT32, 2, rows, 0, 0, 0);
    } else if (attends) {
        const int64_t rows[3] = {s.batch, s.heads, s.seqlen_q};
        make(LSE, FDM_FLOAT32, 3, rows, 0, 0, 0);
    }
    if (attends)
        make(MASK, FDM_BOOL, 4, mask, 0, 0, 0);
}

/* ---- lists, drawn anew for each execution ---- */

static int64_t nowhere(void) { return PICK(-1, INT32_MIN, INT32_MAX, -123, s.pages, s.pages + 7); }

static void draw_offsets(int n, int64_t most, int64_t total) {
    int64_t at = below(2);
    for (int64_t b = 0; t[n].present && b <= s.batch; b++) {
        set(n, b, at, at);
        at += below(most + 1);
        at = at < total ? at : total;
    }
}

/* Pages of all sequences in any order; some are none. */
static void draw_table(int64_t b, int64_t list) {
    for (int64_t c = 0; c < s.columns && s.paged; c++) {
        const int64_t page = (b * s.columns + c) * 10007 % s.pages, there = below(12) ? page : nowhere();
        const int is_none = there != page;
        set(TABLE, list * s.columns + c, is_none ? s.pages : page, there);
        for (int64_t n = 0; n < s.page && t[MASK].present; n++)
            t[MASK].here[b * s.bound + c * s.page + n] = (char)!is_none;
    }
}

static void draw_lists(void) {
    int64_t total = t[K_NEW].present ? t[K_NEW].shape[0] : 0;
    const int64_t turn = below(s.batch);
    draw_offsets(CU_NEW, s.new_rows, total);
    draw_offsets(CU_Q, s.seqlen_q, t[Q].present ? t[Q].shape[0] : 0);
    for (int64_t n = 0; t[SLOTS].present && n < total; n++) {
        const int64_t slot = below(8) ? n * 10007 % (s.pages * s.page) : PICK(-1, -7, s.pages * s.page * 2, INT32_MAX);
        const int64_t once = n < s.pages * s.page || slot < 0 ? slot : -1;
        set(SLOTS, n, once >= s.pages * s.page ? -1 : once, once);
    }
    for (int64_t n = 0; t[POSITIONS].present && n < t[POSITIONS].shape[0]; n++) {
        const int64_t position = below(POSITIONS_MAX + 6) - 3;
        set(POSITIONS, n, position, position);
    }
    for (int64_t b = 0; b < s.batch && !s.slots; b++) {
        const int64_t list = t[CACHE_ROW].present ? (b + turn) % s.batch : b;
        const int64_t length = below(4) ? below(s.bound + 1) : PICK(-1, INT32_MIN, s.bound, s.bound + 3, INT32_MAX);
        const int is_none = t[CACHE_ROW].present && below(6) == 0, no_start = is_none && s.ragged && below(2);
        const int64_t first = below(s.bound / 2 + 1), start = below(POSITIONS_MAX);
        set(LENGTHS, b, is_none ? -1 : length, length);
        if (t[CACHE_ROW].present)
            set(CACHE_ROW, b, list, is_none && !no_start ? PICK(-1, INT32_MIN, INT32_MAX, s.batch) : list);
        if (t[FIRST_KEY].present)
            set(FIRST_KEY, b, first, first);
        if (t[ROTARY_START].present)
            set(ROTARY_START, b, start, start);
        if (s.ragged)
            set(PAGE_START, list, list * s.columns, no_start ? PICK(-5, s.pages + 1) : list * s.columns);
        draw_table(b, list);
    }
    if (s.ragged && t[PAGE_START].shape[0] > s.batch)
        set(PAGE_START, s.batch, s.batch * s.columns, s.batch * s.columns);
}

static fdm_cache cache_of(int on_device, int interleaved) {
    return (fdm_cache){.struct_bytes = sizeof(fdm_cache),
                       .rotary_interleaved = interleaved,
                       .block_table = of(TABLE, on_device),
                       .page_start = of(PAGE_START, on_device),
                       .cache_row = of(CACHE_ROW, on_device),
                       .lengths = of(LENGTHS, on_device),
                       .first_key = of(FIRST_KEY, on_device),
                       .k_new = of(K_NEW, on_device),
                       .v_new = of(V_NEW, on_device),
                       .cu_seqlens_new = of(CU_NEW, on_device),
                       .rotary_cos = of(COS, on_device),
                       .rotary_sin = of(SIN, on_device),
                       .rotary_start = of(ROTARY_START, on_device),
                       .fault = of(FAULT, on_device)};
}

static void begin_scene(int attends, int in_16_bits, int prompts, char *about, size_t bytes) {
    release_all();
    draw_sizes(attends, in_16_bits, prompts);
    make_tensors(attends);
    make_tables(attends);
    const int interleaved = (int)below(2);
    s.host_cache = cache_of(0, interleaved);
    s.device_cache = cache_of(1, interleaved);
    snprintf(about, bytes, "%s B %lld H %lld/%lld D %lld/%lld, %lld pages of %lld%s%s, %lld new%s%s%s%s",
             fdm_dtype_name(s.dtype), (long long)s.batch, (long long)s.heads, (long long)s.heads_kv,
             (long long)s.head_dim, (long long)s.head_dim_v, (long long)s.pages, (long long)s.page,
             s.ragged ? " ragged" : "", t[CACHE_ROW].present ? " cache_row" : "", (long long)s.new_rows,
             s.packed_new ? " packed" : "", s.slots ? " by slots" : "",
             !t[COS].present ? ""
             : interleaved   ? ", rotary interleaved"
                             : ", rotary in halves",
             t[Q].present && s.packed_q ? ", q packed" : "");
}

/* ---- faults of the device's lists ---- */

static int64_t get(int n, int64_t index) {
    return t[n].dtype == FDM_INT64 ? ((const int64_t *)(const void *)t[n].image)[index]
                                   : ((const int32_t *)(const void *)t[n].image)[index];
}
static int32_t cut(int64_t x) { return (int32_t)(x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x); }

/* How many of a sequence's lists name what is not there; *named: one of them is `fault`. */
static int64_t faults_of(int64_t b, int64_t bound, const int32_t fault[4], int *named) {
    const int64_t list = t[CACHE_ROW].present ? get(CACHE_ROW, b) : b, length = get(LENGTHS, b);
    const int64_t lists = s.ragged ? t[PAGE_START].shape[0] : s.batch, entries = s.batch * s.columns;
    const int64_t added = t[CU_NEW].present ? get(CU_NEW, b + 1) - get(CU_NEW, b) : t[K_NEW].present ? s.new_rows : 0;
    const int has_row = list >= 0 && list < lists;
    const int64_t first = !has_row ? 0 : s.ragged ? get(PAGE_START, list) : list * s.columns;
    const int64_t end = s.ragged && !t[CACHE_ROW].present ? get(PAGE_START, list + 1) : entries;
    const int has_start = !s.ragged || (first >= 0 && first <= end), is_own = fault[1] == b;
    const int64_t columns = !s.paged ? 1 : s.ragged ? end - first : s.columns;
    const int64_t room = columns * s.page < bound ? columns * s.page : bound;
    int64_t count = 0;
    if (length < 0)
        return 0;
    if (!has_row || !has_start) {
        const int32_t want[4] = {has_row ? CACHE_FAULT_PAGE_START : CACHE_FAULT_ROW, (int32_t)b, 0,
                                 cut(has_row ? first : list)};
        *named |= memcmp(fault, want, sizeof want) == 0;
        return 1;
    }
    if (length + added > room) {
        *named |= is_own && fault[0] == CACHE_FAULT_LENGTH && fault[2] == 0 && fault[3] == cut(length + added);
        count++;
    }
    const int64_t keys = length + added < room ? length + added : room;
    const int64_t padding = t[FIRST_KEY].present ? get(FIRST_KEY, b) : 0;
    for (int64_t c = (padding < keys ? padding : keys) / s.page; s.paged && c * s.page < keys; c++) {
        const int64_t page = get(TABLE, first + c);
        if (page >= 0 && page < s.pages)
            continue;
        *named |= is_own && fault[0] == CACHE_FAULT_PAGE && fault[2] == c && fault[3] == cut(page);
        count++;
    }
    return count;
}

/* Whether the device has found one where there are some, and none where there is none. */
static int right_fault(int64_t bound) {
    int32_t fault[4];
    int64_t count = 0;
    int named = 0;
    if (!t[FAULT].present)
        return 1;
    if (fdm_memory_copy(fault, host, t[FAULT].there, cuda, sizeof fault))
        fail("copying");
    for (int64_t b = 0; b < s.batch; b++)
        count += faults_of(b, bound, fault, &named);
    return count ? named : fault[0] == CACHE_FAULT_NONE;
}

/* ---- the two checks ---- */

static int same_bytes(int n) {
    if (!t[n].present)
        return 1;
    download(n);
    return memcmp(t[n].here, t[n].image, (size_t)t[n].bytes) == 0;
}

static const char *check_append(const struct options *o, char *about, size_t bytes) {
    begin_scene(0, 0, 0, about, bytes);
    draw_lists();
    upload();
    for (int on_device = 0; on_device < 2; on_device++) {
        const fdm_append_tensors call = {.struct_bytes = sizeof call,
                                         .k = of(CACHE_K, on_device),
                                         .v = of(CACHE_V, on_device),
                                         .cache = on_device ? &s.device_cache : &s.host_cache,
                                         .slots = of(SLOTS, on_device),
                                         .positions = of(POSITIONS, on_device),
                                         .q = of(Q, on_device),
                                         .cu_seqlens_q = of(CU_Q, on_device),
                                         .q_out = of(Q_OUT, on_device)};
        if (fdm_cache_append(&call))
            return fdm_last_error();
    }
    fdm_synchronize(cuda);
    return !right_fault(s.ragged ? s.page * s.batch * s.columns : s.bound) ? "another fault"
           : !same_bytes(CACHE_K)                                          ? "another K in the cache"
           : !same_bytes(CACHE_V)                                          ? "another V in the cache"
           : !same_bytes(Q_OUT)                                            ? "another q"
                                                                           : NULL;
}

/* Results of 16-bit elements are rounded at other places here and there. */
static int is_close(int n, double most) {
    download(n);
    for (int64_t i = 0; i < t[n].bytes / fdm_dtype_bytes(t[n].dtype); i++) {
        const double here = element_load(t[n].here, i, t[n].dtype), there = element_load(t[n].image, i, t[n].dtype);
        if (!(fabs(here - there) <= most) && !(isinf(here) && here == there))
            return 0;
    }
    return 1;
}

static fdm_tensors attention_call(int on_device) {
    return (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
                         .q = of(Q, on_device),
                         .k = of(CACHE_K, on_device),
                         .v = of(CACHE_V, on_device),
                         .mask = on_device ? NULL : of(MASK, 0),
                         .cu_seqlens_q = of(CU_Q, on_device),
                         .out = of(Q_OUT, on_device),
                         .lse = of(LSE, on_device),
                         .cache = on_device ? &s.device_cache : &s.host_cache};
}

static const char *execute_both(const fdm_plan *plan, const fdm_options *options, void *workspace) {
    const fdm_tensors call[2] = {attention_call(0), attention_call(1)};
    fdm_options on_host = *options;
    on_host.family = s.latent ? "reference" : NULL; /* for wide heads */
    upload();
    if (fdm_attention_forward(&call[0], &on_host, NULL) ||
        fdm_execute(plan, &call[1], workspace, (size_t)plan->workspace_bytes, NULL) || fdm_synchronize(cuda))
        return fdm_last_error();
    const double most = s.dtype == FDM_FLOAT32 ? 2e-5 : s.dtype == FDM_FLOAT16 ? 4e-3 : 3e-2;
    return !right_fault(s.bound)    ? "another fault"
           : !same_bytes(CACHE_K)   ? "another K in the cache"
           : !same_bytes(CACHE_V)   ? "another V in the cache"
           : !is_close(Q_OUT, most) ? "another out"
           : !is_close(LSE, most)   ? "another lse"
                                    : NULL;
}

/* The plan of a kernel that appends by itself, with appending apart; 0: it does not. */
static int plan_apart(const fdm_device *device, const fdm_plan *plan, fdm_options options, fdm_plan *apart) {
    char code[sizeof plan->choice];
    const size_t length = strlen(plan->choice);
    if (length < 2 || strcmp(plan->choice + length - 2, "_A"))
        return 0;
    snprintf(code, sizeof code, "%.*s", (int)length - 2, plan->choice);
    options.kernel = code;
    if (fdm_plan_attention(device, &plan->problem, &options, apart))
        fail("planning");
    return 1;
}

/* The last execution's results are those of another plan, bit for bit; new keys are where they were. */
static const char *execute_again(const fdm_plan *plan) {
    const fdm_tensors call = attention_call(1);
    void *workspace = NULL;
    char *want[2];
    int same = 1;
    for (int n = 0; n < 2; n++) {
        const int results[] = {Q_OUT, LSE};
        struct both *b = &t[results[n]];
        want[n] = malloc((size_t)b->bytes);
        memcpy(want[n], b->image, (size_t)b->bytes);
        memset(b->image, 0x55, (size_t)b->bytes);
        if (fdm_memory_copy(b->there, cuda, b->image, host, (size_t)b->bytes))
            fail("copying");
    }
    if (fdm_memory_allocate(cuda, (size_t)plan->workspace_bytes + 64, &workspace) ||
        fdm_execute(plan, &call, workspace, (size_t)plan->workspace_bytes, NULL) || fdm_synchronize(cuda))
        return fdm_last_error();
    for (int n = 0; n < 2; n++) {
        const int results[] = {Q_OUT, LSE};
        download(results[n]);
        same = same && memcmp(want[n], t[results[n]].image, (size_t)t[results[n]].bytes) == 0;
        free(want[n]);
    }
    fdm_memory_release(cuda, workspace);
    return !same                  ? "other bits with appending apart"
           : !same_bytes(CACHE_K) ? "another K in the cache with appending apart"
           : !same_bytes(CACHE_V) ? "another V in the cache with appending apart"
                                  : NULL;
}

/* One plan, one workspace, and lists that change. */
static const char *check_plan(const struct options *o, char *about, size_t bytes) {
    enum { EXECUTIONS = 3 };
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan}, apart = plan;
    fdm_problem problem;
    fdm_options options = fdm_options_default();
    void *workspace = NULL;
    const char *fault = NULL;
    const int prompts = !o->kernel || strstr(o->kernel, "decode") ? 0 : strstr(o->kernel, "latent") ? 2 : 1;
    begin_scene(1, o->kernel != NULL, prompts, about, bytes); /* a kernel that is named may take no others */
    options.max_seqlen_q = s.packed_q ? s.seqlen_q : 0;
    options.max_seqlen_k = s.bound;
    options.causal = (int32_t)below(2);
    options.window_left = options.causal && !s.latent && below(3) == 0 ? below(s.bound + 1) : -1;
    const fdm_tensors call = attention_call(1);
    options.kernel = o->kernel;
    if (fdm_device_query(FDM_CUDA, 0, &device) || fdm_describe(FDM_FORWARD, &call, &options, &problem))
        return fdm_last_error();
    const fdm_status planned = fdm_plan_attention(&device, &problem, &options, &plan);
    if (planned == FDM_ERROR_UNSUPPORTED && o->kernel) /* a kernel by name does not take every scene */
        return NULL;
    if (planned || fdm_memory_allocate(cuda, (size_t)plan.workspace_bytes + 64, &workspace))
        return fdm_last_error();
    const int has_apart = plan_apart(&device, &plan, options, &apart);
    options.kernel = NULL;
    const size_t used = strlen(about);
    snprintf(about + used, bytes - used, " Sq %lld%s, %s", (long long)s.seqlen_q, options.causal ? " causal" : "",
             plan.choice);
    if (t[COS].present && plan.workspace_bytes) {
        fdm_plan shrunk = plan;
        shrunk.workspace_bytes -= 64;
        if (fdm_execute(&shrunk, &call, workspace, (size_t)plan.workspace_bytes, NULL) != FDM_ERROR_INVALID_ARGUMENT)
            fault = "a plan of too small a workspace is taken";
    }
    for (int n = 0; n < EXECUTIONS && !fault; n++) {
        draw_lists();
        fault = execute_both(&plan, &options, workspace);
        if (!fault && has_apart)
            fault = execute_again(&apart);
    }
    fdm_memory_release(cuda, workspace);
    return fault;
}

static const char *check_either(const struct options *o, char *about, size_t bytes) {
    const int plans = (int)below(2) || (o->kernel && !strstr(o->kernel, "decode"));
    return plans ? check_plan(o, about, bytes) : check_append(o, about, bytes);
}

int cache_checks(const struct options *o) {
    if (!has_device())
        return EXIT_NO_DEVICE;
    const int code = run_cases(o, 40, check_either);
    release_all();
    return code;
}
