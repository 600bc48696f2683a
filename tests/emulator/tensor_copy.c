/* tensor_copy.c: TMA: tiles and runs of bytes to and from shared memory. */
#include <stdlib.h>
#include <string.h>

#include "emulated_launch.h"
#include "fake_cuda.h"
#include "state.h"

enum { DIMENSIONS = 5 };
static const uint32_t type_bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

/* One copy: a tile of a tensor, or (rank 0) bytes that touch. */
struct transfer {
    struct fake_tensor_map map;
    int rank, kind;
    int32_t at[DIMENSIONS];
    uint32_t offset, bytes;
    unsigned char *global;
    struct block *block, *of_mbarrier;
    struct block *from; /* a copy between blocks: whose shared memory it reads */
    uint32_t from_offset;
    uint32_t mbarrier, clock; /* a load's, in `of_mbarrier` */
    struct thread *thread;    /* a store's */
    uint32_t group;
    unsigned char *staged;
};

/* Where the swizzle puts 16 bytes: of the address the bits from 7 on change the bits from 4 on. */
static uint32_t swizzled(uint32_t address, int swizzle) {
    const uint32_t bits = swizzle == 3 ? 7 : swizzle == 2 ? 3 : swizzle == 1 ? 1 : 0;
    return address ^ (address >> 7 & bits) << 4;
}

/* ---- walking a tile, one row of the innermost axis after the other ---- */

struct row {
    unsigned char *global; /* of the row's first element; NULL: outside of the tensor */
    int32_t first, count;  /* elements of the row that are inside */
};

static struct row row_of(const struct transfer *t, uint32_t number) {
    const struct fake_tensor_map *m = &t->map;
    struct row r = {NULL, 0, 0};
    int64_t offset = 0;
    for (int i = 1; i < t->rank; i++) {
        const int64_t at = (int64_t)t->at[i] + number % m->box[i];
        number /= m->box[i];
        if (at < 0 || at > (int64_t)m->last[i])
            return r;
        offset += at * (int64_t)m->stride_bytes[i - 1];
    }
    const int64_t from = t->at[0], size = (int64_t)m->last[0] + 1;
    const int64_t first = from < 0 ? -from : 0, end = size - from < m->box[0] ? size - from : m->box[0];
    if (end <= first)
        return r;
    r.global = (unsigned char *)(uintptr_t)m->address + offset + from * type_bytes[m->type];
    r.first = (int32_t)first;
    r.count = (int32_t)(end - first);
    return r;
}

static uint32_t num_rows(const struct transfer *t) {
    uint32_t rows = 1;
    for (int i = 1; i < t->rank; i++)
        rows *= t->map.box[i];
    return rows;
}

static uint32_t tile_bytes(const struct fake_tensor_map *m) {
    uint32_t bytes = type_bytes[m->type];
    for (int i = 0; i < m->rank; i++)
        bytes *= m->box[i];
    return bytes;
}

/* A row between its place in shared memory, 16 bytes at a time, and `dense`. */
static void shared_row(const struct transfer *t, uint32_t number, unsigned char *dense, int to_shared) {
    const uint32_t row_bytes = t->map.box[0] * type_bytes[t->map.type];
    for (uint32_t at = 0; at < row_bytes; at += 16) {
        unsigned char *shared = t->block->window + swizzled(t->offset + number * row_bytes + at, t->map.swizzle);
        to_shared ? memcpy(shared, dense + at, 16) : memcpy(dense + at, shared, 16);
    }
}

static void load_tile(struct transfer *t, place at) {
    const uint32_t bytes = type_bytes[t->map.type], rows = num_rows(t);
    unsigned char dense[4096];
    for (uint32_t n = 0; n < rows; n++) {
        const struct row r = row_of(t, n);
        memset(dense, 0, t->map.box[0] * bytes);
        if (r.count && global_range(r.global + (size_t)r.first * bytes, (size_t)r.count * bytes, "a tile's copy", at)) {
            global_read(t->block, r.global + (size_t)r.first * bytes, (size_t)r.count * bytes, at);
            memcpy(dense + (size_t)r.first * bytes, r.global + (size_t)r.first * bytes, (size_t)r.count * bytes);
        }
        shared_row(t, n, dense, 1);
    }
}

/* ---- loads ---- */

static void load_now(struct event *e) {
    struct transfer *t = e->data;
    if (t->rank)
        load_tile(t, e->at);
    else if (t->from)
        memcpy(t->block->window + t->offset, t->from->window + t->from_offset, t->bytes);
    else if (global_range(t->global, t->bytes, "a bulk copy", e->at))
        memcpy(t->block->window + t->offset, t->global, t->bytes);
    struct mbarrier *m = mbarrier_at(t->of_mbarrier, t->mbarrier, "a copy's end", e->at);
    shadow_land(t->block, t->offset, t->bytes, m->component, m->ticks, 0, e->at);
    mbarrier_bytes_came(t->of_mbarrier, m, t->bytes, e->at);
}

static void ask_for_load(const struct transfer *model, struct block *b, uint32_t offset, struct block *of_barrier,
                         uint32_t barrier, place at) {
    const struct actor a = actor_of(CURRENT);
    if (b->live == 0) {
        finding("block has ended", at, "a copy to block %u of the cluster, which has ended", b->rank);
        return;
    }
    struct mbarrier *m = mbarrier_at(of_barrier, barrier, "a copy", at);
    mbarrier_check_use(m, "a copy", at);
    if (!m->fenced)
        finding("proxy fence missing", at,
                "the mbarrier of %s was initialised without a fence.mbarrier_init or "
                "fence.proxy.async before TMA uses it",
                place_text(m->initialised_at));
    shadow_flight(b, offset, model->bytes, &a, 1, at);
    struct event *e = event_add(b->cluster, load_now, sizeof *model, at);
    struct transfer *t = e->data;
    *t = *model;
    t->block = b;
    t->of_mbarrier = of_barrier;
    t->offset = offset;
    t->mbarrier = barrier;
    e->block = b;
    e->loss = "a copy to its shared memory is under way";
    event_now_or_later(e);
}

/* blocks: 0, EMU_PAIR, or EMU_MULTICAST and a bit for each block. */
static void load(const struct transfer *model, unsigned shared, unsigned barrier, unsigned blocks, uint32_t align,
                 place at) {
    struct block *b, *of_barrier;
    uint32_t offset, barrier_offset;
    shadow_settle(CURRENT);
    if (!shared_range(shared, model->bytes, align, "a copy's destination", &b, &offset, at) ||
        !shared_range(barrier, 8, 8, "a copy's mbarrier", &of_barrier, &barrier_offset, at))
        thread_fail();
    if (blocks & EMU_PAIR ? b->rank / 2 != of_barrier->rank / 2 : b != of_barrier)
        finding("wrong mbarrier", at, "a copy's destination and its mbarrier lie in two blocks%s",
                blocks & EMU_PAIR ? " that are no pair" : "");
    if (!(blocks & EMU_MULTICAST)) {
        ask_for_load(model, b, offset, of_barrier, barrier_offset, at);
    } else {
        struct cluster *c = b->cluster;
        if ((blocks & (EMU_MULTICAST - 1)) >> c->num_blocks)
            finding("bad address", at, "a multicast to blocks 0x%x of a cluster of %u", blocks & (EMU_MULTICAST - 1),
                    c->num_blocks);
        for (unsigned r = 0; r < c->num_blocks; r++)
            if (blocks >> r & 1)
                ask_for_load(model, c->blocks[r], offset, c->blocks[r], barrier_offset, at);
    }
    yield_warp();
}

/* The map as it was encoded; 0 with a finding where it is none. */
static int read_map(struct transfer *t, int rank, const void *map, const int *coordinates, place at) {
    *t = (struct transfer){.rank = rank};
    memcpy(&t->map, map, sizeof t->map);
    if ((uintptr_t)map % 64 || memcmp(t->map.word, "tiled", 6) != 0 || t->map.rank != rank) {
        finding("wrong tensor map", at, "the copy of rank %d has no such map (%s, rank %d)", rank,
                memcmp(t->map.word, "tiled", 6) ? "not encoded" : "encoded", t->map.rank);
        return 0;
    }
    for (int i = 0; i < rank; i++)
        t->at[i] = coordinates[i];
    t->bytes = tile_bytes(&t->map);
    const int64_t first = (int64_t)coordinates[0] * type_bytes[t->map.type];
    if (first % 16) { /* seen on an H200: CUDA_ERROR_ILLEGAL_INSTRUCTION */
        finding("misaligned", at, "a tile that begins %lld bytes into the innermost axis, no multiple of 16",
                (long long)first);
        return 0;
    }
    return 1;
}

void emu_tma_load(int rank, unsigned shared, const void *map, unsigned barrier, const int *at, unsigned blocks,
                  EMU_PLACE) {
    struct transfer model;
    const place here = HERE;
    if (!read_map(&model, rank, map, at, here))
        thread_fail();
    load(&model, shared, barrier, blocks, 128, here);
}

void emu_bulk_load(unsigned shared, const void *global, unsigned bytes, unsigned barrier, unsigned blocks, EMU_PLACE) {
    const place at = HERE;
    struct transfer model = {.global = (unsigned char *)(uintptr_t)global, .bytes = bytes};
    if (bytes % 16 || (uintptr_t)global % 16 || bytes == 0) {
        finding("misaligned", at, "a bulk copy of %u bytes from %p: both must be multiples of 16", bytes, global);
        thread_fail();
    }
    load(&model, shared, barrier, blocks, 16, at);
}

/* Its source counts as read when a thread has waited for the phase that is under way now. */
void emu_bulk_send(unsigned address, unsigned shared, unsigned bytes, unsigned barrier, EMU_PLACE) {
    const place at = HERE;
    struct block *b, *of_barrier;
    uint32_t offset, barrier_offset;
    shadow_settle(CURRENT);
    if (bytes % 16 || bytes == 0) {
        finding("misaligned", at, "a bulk copy of %u bytes: they must be a multiple of 16", bytes);
        thread_fail();
    }
    if (!shared_range(shared, bytes, 16, "a copy's source", &b, &offset, at) ||
        !shared_range(barrier, 8, 8, "a copy's mbarrier", &of_barrier, &barrier_offset, at))
        thread_fail();
    if (b != CURRENT->block) {
        finding("bad address", at, "a copy between blocks reads the shared memory of another block");
        thread_fail();
    }
    const struct mbarrier *m = mbarrier_at(of_barrier, barrier_offset, "a copy", at);
    const struct actor issuer = actor_of(CURRENT);
    const struct actor agent = {.component = m->component,
                                .clock = m->ticks,
                                .slot = b->cluster->num_blocks * b->num_warps + b->rank * (WARPGROUPS_MAX + 1) +
                                        WARPGROUPS_MAX};
    shadow_async_read(b, offset, bytes, &agent, &issuer, at);
    const struct transfer model = {.from = b, .from_offset = offset, .bytes = bytes};
    load(&model, address, barrier, 0, 16, at);
}

/* ---- stores: shared memory is read first, global memory written later ---- */

static void add_elements(unsigned char *to, const unsigned char *from, uint32_t count, int type) {
    enum { FLOAT16 = 6, FLOAT32 = 7 };
    for (uint32_t i = 0; i < count; i++)
        if (type == FLOAT32) {
            float x, y;
            memcpy(&x, to + 4 * i, 4);
            memcpy(&y, from + 4 * i, 4);
            x += y;
            memcpy(to + 4 * i, &x, 4);
        } else {
            uint16_t x, y;
            memcpy(&x, to + 2 * i, 2);
            memcpy(&y, from + 2 * i, 2);
            x = type == FLOAT16 ? emu_to_f16(half_table[x] + half_table[y]) : add_bf16(x, y);
            memcpy(to + 2 * i, &x, 2);
        }
}

static void put(struct transfer *t, unsigned char *to, const unsigned char *from, uint32_t count, uint32_t bytes,
                place at) {
    if (!global_range(to, (size_t)count * bytes, "a copy's destination", at))
        return;
    global_write(t->block, NULL, to, (size_t)count * bytes, t->kind == EMU_REDUCE_ADD, at);
    if (t->kind == EMU_REDUCE_ADD)
        add_elements(to, from, count, t->rank ? t->map.type : 7);
    else
        memcpy(to, from, (size_t)count * bytes);
}

static void write_now(struct event *e) {
    struct transfer *t = e->data;
    if (!t->rank) {
        put(t, t->global, t->staged, t->bytes / 4, 4, e->at);
    } else {
        const uint32_t bytes = type_bytes[t->map.type], rows = num_rows(t), row_bytes = t->map.box[0] * bytes;
        for (uint32_t n = 0; n < rows; n++) {
            const struct row r = row_of(t, n);
            if (r.count)
                put(t, r.global + (size_t)r.first * bytes, t->staged + (size_t)n * row_bytes + (size_t)r.first * bytes,
                    (uint32_t)r.count, bytes, e->at);
        }
    }
    free(t->staged);
}

static void read_now(struct event *e) {
    struct transfer *t = e->data;
    t->staged = malloc(t->bytes);
    if (!t->rank) {
        memcpy(t->staged, t->block->window + t->offset, t->bytes);
    } else {
        const uint32_t row_bytes = t->map.box[0] * type_bytes[t->map.type], rows = num_rows(t);
        for (uint32_t n = 0; n < rows; n++)
            shared_row(t, n, t->staged + (size_t)n * row_bytes, 0);
    }
    struct event *later = event_add(e->cluster, write_now, sizeof *t, e->at);
    *(struct transfer *)later->data = *t;
    event_now_or_later(later);
}

static void ask_for_store(struct transfer *t, unsigned shared, uint32_t align, place at) {
    struct thread *thread = CURRENT;
    shadow_settle(thread);
    if (!shared_range(shared, t->bytes, align, "a copy's source", &t->block, &t->offset, at))
        thread_fail();
    struct block *b = t->block;
    const struct actor issuer = actor_of(thread);
    const struct actor agent = {.component = b->bulk_component,
                                .clock = b->bulk_ticks,
                                .slot = b->cluster->num_blocks * b->num_warps + b->rank * (WARPGROUPS_MAX + 1) +
                                        WARPGROUPS_MAX};
    shadow_async_read(b, t->offset, t->bytes, &agent, &issuer, at);
    thread->bulk_ticks[thread->bulk_group % 32] = b->bulk_ticks++;
    struct event *e = event_add(b->cluster, read_now, sizeof *t, at);
    t->thread = thread;
    t->group = thread->bulk_group;
    *(struct transfer *)e->data = *t;
    e->block = b;
    e->loss = "a copy from its shared memory has not been read: cp.async.bulk.wait_group.read is missing";
    event_now_or_later(e);
    yield_warp();
}

void emu_tma_store(int kind, int rank, const void *map, unsigned shared, const int *at, EMU_PLACE) {
    struct transfer t;
    const place here = HERE;
    if (!read_map(&t, rank, map, at, here))
        thread_fail();
    for (int i = 0; i < rank; i++)
        if (at[i] < 0) { /* seen on an H200: CUDA_ERROR_ILLEGAL_INSTRUCTION, for stores alone */
            finding("wrong copy", here, "a store of a tile that begins %d elements before axis %d", -at[i], i);
            thread_fail();
        }
    t.kind = kind;
    ask_for_store(&t, shared, 128, here);
}

void emu_bulk_store(int kind, void *global, unsigned shared, unsigned bytes, EMU_PLACE) {
    const place at = HERE;
    struct transfer t = {.global = global, .bytes = bytes, .kind = kind};
    if (bytes % 16 || (uintptr_t)global % 16 || bytes == 0) {
        finding("misaligned", at, "a bulk copy of %u bytes to %p: both must be multiples of 16", bytes, global);
        thread_fail();
    }
    ask_for_store(&t, shared, 16, at);
}

void emu_bulk_commit(EMU_PLACE) {
    struct thread *t = CURRENT;
    (void)emu_file, (void)emu_line;
    const uint32_t ticks = t->bulk_ticks[t->bulk_group++ % 32];
    t->bulk_ticks[t->bulk_group % 32] = ticks;
}

/* Those of the thread's groups that are waited for: read, or read and written. */
static void complete(struct thread *t, uint32_t below, void (*stage)(struct event *)) {
    for (struct event *e = events_first(), *next; e; e = next) {
        next = e->next;
        const struct transfer *x = e->data;
        if (e->happen != stage || x->thread != t || e->cluster_number != t->block->cluster->number ||
            (int32_t)(x->group - below) >= 0)
            continue;
        stage(e);
        event_remove(e);
        next = events_first();
    }
}

void emu_bulk_wait(int pending, int read, EMU_PLACE) {
    struct thread *t = CURRENT;
    const uint32_t below = t->bulk_group - (uint32_t)pending;
    (void)emu_file, (void)emu_line;
    shadow_settle(t);
    complete(t, below, read_now);
    if (!read)
        complete(t, below, write_now);
    if (emulated_settings_now.check && t->bulk_group > (uint32_t)pending)
        clocks_learn(t, t->block->bulk_component, t->bulk_ticks[(below - 1) % 32]);
    yield_warp();
}
