/* tensor_product.c: tcgen05.mma and tcgen05.commit: a warp's products wait in a queue until a commit, or the seed, has
 * them made. */
#include <stdlib.h>
#include <string.h>

#include "emulated_launch.h"
#include "tensor_memory.h"

enum { K = 16, N_MAX = 256, ROWS_OF_ATOM = 8, ATOM_BYTES = 1024, ROW_BYTES = 128 };

/* ---- what a product is told ---- */

static void wrong_field(const char *of, const char *field, unsigned value, const char *must, place at) {
    finding("wrong descriptor", at, "%s: %s is %u, and %s", of, field, value, must);
}

static unsigned bits(uint64_t x, int from, int count) { return (unsigned)(x >> from & ((1ull << count) - 1)); }

static void check_matrix(uint64_t d, const char *of, int mn_major, place at) {
    if (bits(d, 46, 3) != 1)
        wrong_field(of, "the version (bits 46-48)", bits(d, 46, 3), "must be 1", at);
    if (bits(d, 49, 3))
        wrong_field(of, "the base offset (bits 49-51)", bits(d, 49, 3), "the emulator takes 0 alone", at);
    if (bits(d, 52, 1))
        wrong_field(of, "the mode of offsets (bit 52)", 1, "compute capability 10.0 has 0 alone", at);
    if (bits(d, 61, 3) != 2)
        wrong_field(of, "the swizzle (bits 61-63)", bits(d, 61, 3), "the emulator takes 2 alone, 128 bytes", at);
    if (bits(d, 14, 2) || bits(d, 30, 2) || bits(d, 53, 8))
        wrong_field(of, "what is reserved (bits 14-15, 30-31, 53-60)", 1, "must be 0", at);
    if (bits(d, 32, 14) * 16 % ATOM_BYTES || (mn_major && bits(d, 16, 14) * 16 % ATOM_BYTES))
        wrong_field(of, "an offset (bits 16-29, 32-45) in bytes",
                    bits(d, 32, 14) * 16 % ATOM_BYTES ? bits(d, 32, 14) * 16 : bits(d, 16, 14) * 16,
                    "swizzled groups begin at multiples of 1024", at);
}

static void check_shape(int group, const struct product *p) {
    const uint32_t s = p->shape;
    const char *const of = "the shape";
    const int step = group == 2 && p->from_tensor ? 32 : 16;
    if (bits(s, 4, 2) != 1)
        wrong_field(of, "the type of the sums (bits 4-5)", bits(s, 4, 2), "the emulator takes 1 alone, float32", p->at);
    if (bits(s, 7, 3) > 1 || bits(s, 7, 3) != bits(s, 10, 3))
        wrong_field(of, "a type of operands (bits 7-9, 10-12)", bits(s, 10, 3),
                    "the emulator takes 0 or 1, the same for both", p->at);
    if (bits(s, 13, 2))
        wrong_field(of, "a negation (bits 13-14)", bits(s, 13, 2), "the emulator has none", p->at);
    if (bits(s, 0, 4) || bits(s, 6, 1) || bits(s, 23, 1) || bits(s, 29, 3))
        wrong_field(of, "what is for other kinds (bits 0-3, 6, 23, 29-31)", 1, "must be 0", p->at);
    if (p->n < 16 || p->n > N_MAX || p->n % step)
        wrong_field(of, "n (bits 17-22, times 8)", (unsigned)p->n,
                    "must be a multiple of 16 (32 in a pair with a in "
                    "tensor memory) up to 256",
                    p->at);
    if (p->m != 128 && (p->m != 256 || group != 2))
        wrong_field(of, "m (bits 24-28, times 16)", (unsigned)p->m, "the emulator takes 128, and 256 of a pair", p->at);
    if (p->from_tensor && p->a_mn_major)
        wrong_field(of, "the order of a (bit 15)", 1, "in tensor memory a is K-major", p->at);
}

/* ---- operands in shared memory ---- */

/* The address in the block's window of the 16 bytes that hold row `row`, chunk `chunk` of eight along k; MN-major: of
 * row `row` of K, chunk `chunk` of eight along M or N. */
static uint32_t chunk_address(uint64_t d, int mn_major, uint32_t row, uint32_t chunk) {
    const uint32_t start = bits(d, 0, 14) * 16, leading = bits(d, 16, 14) * 16, stride = bits(d, 32, 14) * 16;
    uint32_t at = start + row / ROWS_OF_ATOM * stride + row % ROWS_OF_ATOM * ROW_BYTES;
    at += mn_major ? chunk / 8 * leading + chunk % 8 * 16 : chunk * 16;
    return at ^ (at >> 7 & 7) << 4;
}

/* What a product will read of block b's shared memory: `rows` of M or N by 16. */
static void touch_operand(struct block *b, uint64_t d, int mn_major, int rows, const struct actor *agent,
                          const struct actor *issuer, place at) {
    const uint32_t outer = mn_major ? K : (uint32_t)rows, inner = mn_major ? (uint32_t)rows / 8 : K / 8;
    const uint32_t rank = (b->rank + 1) << 24;
    for (uint32_t i = 0; i < outer; i++)
        for (uint32_t c = 0; c < inner; c += 2) { /* an aligned pair of chunks stays one */
            struct block *of;
            uint32_t offset;
            const uint32_t address = chunk_address(d, mn_major, i, c) & ~31u;
            if (!shared_range(rank | address, 32, 16, "an operand of tcgen05.mma", &of, &offset, at))
                thread_fail();
            shadow_async_read(of, offset, 32, agent, issuer, at);
        }
}

static float element(uint16_t x, int f16) {
    if (f16)
        return half_table[x];
    const uint32_t widened = (uint32_t)x << 16;
    float y;
    memcpy(&y, &widened, sizeof y);
    return y;
}

/* `to` has `row_step` between neighbours of M or N, and `k_step` between those of K. */
static void gather_operand(const struct block *b, uint64_t d, int mn_major, int rows, int f16, float *to,
                           uint32_t row_step, uint32_t k_step) {
    const uint32_t outer = mn_major ? K : (uint32_t)rows, inner = mn_major ? (uint32_t)rows / 8 : K / 8;
    for (uint32_t i = 0; i < outer; i++)
        for (uint32_t c = 0; c < inner; c++) {
            uint16_t chunk[8];
            const uint32_t address = chunk_address(d, mn_major, i, c);
            if (address > WINDOW_BYTES - 16)
                continue;
            memcpy(chunk, b->window + address, sizeof chunk);
            float *at = to + (mn_major ? i * k_step + c * 8 * row_step : i * row_step + c * 8 * k_step);
            const uint32_t step = mn_major ? row_step : k_step;
            for (uint32_t e = 0; e < 8; e++)
                at[e * step] = element(chunk[e], f16);
        }
}

static void gather_from_tensor(const struct tensor *t, const struct product *p, float *to) {
    for (uint32_t lane = 0; lane < TENSOR_LANES; lane++)
        for (uint32_t k = 0; k < K; k += 2) {
            uint32_t pair;
            memcpy(&pair, &t->words[lane][(p->a_tensor & 0xffff) + k / 2], sizeof pair);
            to[lane * K + k] = element((uint16_t)pair, p->f16);
            to[lane * K + k + 1] = element((uint16_t)(pair >> 16), p->f16);
        }
}

/* ---- the product ---- */

typedef float eight __attribute__((vector_size(32)));

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("arch=x86-64-v3", "default")))
#endif
static void
multiply_lanes(float *restrict sums, const float *restrict a, const float *restrict b, int lanes, int n, int add) {
    for (int lane = 0; lane < lanes; lane += 4)
        for (int from = 0; from < n; from += 8) {
            float *to = sums + (size_t)lane * TENSOR_COLUMNS + from;
            const float *factor = a + lane * K;
            eight s0 = {0}, s1 = s0, s2 = s0, s3 = s0; /* four lanes keep the adders busy */
            if (add) {
                memcpy(&s0, to, sizeof s0);
                memcpy(&s1, to + TENSOR_COLUMNS, sizeof s1);
                memcpy(&s2, to + 2 * TENSOR_COLUMNS, sizeof s2);
                memcpy(&s3, to + 3 * TENSOR_COLUMNS, sizeof s3);
            }
            for (int k = 0; k < K; k++) {
                eight row;
                memcpy(&row, b + k * N_MAX + from, sizeof row);
                s0 += row * factor[k];
                s1 += row * factor[K + k];
                s2 += row * factor[2 * K + k];
                s3 += row * factor[3 * K + k];
            }
            memcpy(to, &s0, sizeof s0);
            memcpy(to + TENSOR_COLUMNS, &s1, sizeof s1);
            memcpy(to + 2 * TENSOR_COLUMNS, &s2, sizeof s2);
            memcpy(to + 3 * TENSOR_COLUMNS, &s3, sizeof s3);
        }
}

/* Of a pair with m 128 a block has 64 rows: lanes 64 to 127 hold them again, with the second half of the columns. */
static int is_folded(const struct queue *q, const struct product *p) { return q->group == 2 && p->m == 128; }
static uint32_t sums_columns(const struct queue *q, const struct product *p) {
    return (uint32_t)(is_folded(q, p) ? p->n / 2 : p->n);
}

static struct block *block_of_group(const struct queue *q, unsigned i) {
    const struct cluster *c = q->block->cluster;
    return q->group == 2 ? c->blocks[(q->block->rank & ~1u) + i] : q->block;
}

static void make_product(struct queue *q, const struct product *p) {
    static float a[TENSOR_LANES * K], b[K * N_MAX];
    const unsigned blocks = (unsigned)q->group;
    const int rows = p->m / (int)blocks, of_b = p->n / (int)blocks;
    for (unsigned i = 0; i < blocks; i++)
        if (block_of_group(q, i)->live == 0) {
            finding("block has ended", p->at, "block %u of the pair has ended while the product is under way", i);
            return;
        }
    for (unsigned i = 0; i < blocks; i++)
        gather_operand(block_of_group(q, i), p->b, p->b_mn_major, of_b, p->f16, b + i * (unsigned)of_b, 1, N_MAX);
    for (unsigned i = 0; i < blocks; i++) {
        struct tensor *t = block_of_group(q, i)->tensor;
        if (p->from_tensor)
            gather_from_tensor(t, p, a);
        else
            gather_operand(t->block, p->a, p->a_mn_major, rows, p->f16, a, K, 1);
        float *sums = &t->words[0][p->d & 0xffff];
        if (!is_folded(q, p)) {
            multiply_lanes(sums, a, b, TENSOR_LANES, p->n, p->add);
            continue;
        }
        if (!p->from_tensor)
            memcpy(a + 64 * K, a, 64 * K * sizeof *a);
        multiply_lanes(sums, a, b, 64, p->n / 2, p->add);
        multiply_lanes(sums + 64 * TENSOR_COLUMNS, a + 64 * K, b + p->n / 2, 64, p->n / 2, p->add);
    }
}

/* ---- the queue ---- */

static int overlap(uint32_t a, uint32_t a_count, uint32_t b, uint32_t b_count) {
    return a < b + b_count && b < a + a_count;
}

/* The later one waits for the earlier. What nothing orders is found when it is asked for. */
static int follows(const struct queue *q, const struct product *earlier, const struct product *later) {
    const uint32_t sums = sums_columns(q, later), before = sums_columns(q, earlier);
    if (overlap(later->d & 0xffff, sums, earlier->d & 0xffff, before))
        return 1;
    if (later->from_tensor && overlap(later->a_tensor & 0xffff, K / 2, earlier->d & 0xffff, before))
        return 1;
    return earlier->from_tensor && !emulated_settings_now.unordered &&
           overlap(later->d & 0xffff, sums, earlier->a_tensor & 0xffff, K / 2);
}

static int is_ready(const struct queue *q, uint32_t i) {
    for (uint32_t j = 0; j < i; j++)
        if (follows(q, &q->pending[j], &q->pending[i]))
            return 0;
    return 1;
}

/* One that may be made now: the first, or in random mode now and then another. */
static uint32_t next_product(const struct queue *q, uint32_t count) {
    if (emulated_settings_now.mode == EMULATED_RANDOM && count > 1 && chance(4)) {
        const uint32_t i = random_below(count);
        return is_ready(q, i) ? i : 0;
    }
    return 0;
}

/* All up to number `upto`. */
void products_of_tensor(struct queue *q, uint32_t upto) {
    uint32_t count = 0;
    while (count < q->num_pending && q->pending[count].number <= upto)
        count++;
    while (count) {
        const uint32_t i = next_product(q, count);
        const struct product p = q->pending[i];
        memmove(&q->pending[i], &q->pending[i + 1], (--q->num_pending - i) * sizeof p);
        count--;
        make_product(q, &p);
    }
}

static struct queue *queue_of(struct thread *t, int group, place at) {
    struct tensor *tensor = tensor_of(t->block);
    const unsigned warp = t->warp->number;
    struct queue *q = tensor->queues[warp];
    if (!q) {
        q = calloc(1, sizeof *q);
        *q = (struct queue){.block = t->block,
                            .issuer = t,
                            .component = agent_component(t->block, AGENT_PRODUCTS + warp),
                            .group = group,
                            .last_accumulator = -1};
        tensor->queues[warp] = q;
    }
    if (q->issuer != t) {
        finding("wrong tcgen05", at, "lanes %u and %u of warp %u multiply: the emulator takes one of a warp",
                q->issuer->lane, t->lane, warp);
        thread_fail();
    }
    return q;
}

static int accumulator_of(struct queue *q, const struct product *p) {
    int i = 0;
    for (; i < ACCUMULATORS_MAX && q->accumulators[i].last; i++)
        if (q->accumulators[i].d == p->d && q->accumulators[i].m == p->m && q->accumulators[i].n == p->n)
            return i;
    if (i == ACCUMULATORS_MAX) {
        finding("wrong tcgen05", p->at, "a warp multiplies into more than %d places", ACCUMULATORS_MAX);
        thread_fail();
    }
    q->accumulators[i] = (struct accumulator){p->d, p->m, p->n, 0};
    return i;
}

static void check_columns(const struct queue *q, const struct product *p) {
    const uint32_t column = p->d & 0xffff, count = sums_columns(q, p);
    for (unsigned i = 0; i < (unsigned)q->group; i++) {
        struct block *b = block_of_group(q, i);
        if (b->live == 0) {
            finding("block has ended", p->at, "block %u of the pair has ended, and it is to multiply", i);
            thread_fail();
        }
        const struct tensor *t = tensor_of(b);
        if (p->d >> 16 || !tensor_is_allocated(t, column, count)) {
            finding("wrong columns", p->at, "sums at 0x%x: columns %u to %u of block %u are not all allocated", p->d,
                    column, column + count - 1, b->rank);
            thread_fail();
        }
        if (p->from_tensor && (p->a_tensor >> 16 || !tensor_is_allocated(t, p->a_tensor & 0xffff, K / 2))) {
            finding("wrong columns", p->at, "an operand at 0x%x, where block %u has allocated nothing", p->a_tensor,
                    b->rank);
            thread_fail();
        }
        if (p->from_tensor && overlap(column, count, p->a_tensor & 0xffff, K / 2))
            finding("columns overlap", p->at, "the sums and the operand of one product");
    }
}

static uint32_t version_of(const struct queue *q) {
    uint32_t version = 0;
    for (unsigned i = 0; i < (unsigned)q->group; i++)
        version += block_of_group(q, i)->tensor->version;
    return version;
}

/* Who touched the tensor memory, and the shared memory, that the product touches. */
static void check_order(struct queue *q, const struct product *p, int accumulator) {
    const struct actor issuer = actor_of(CURRENT);
    const struct cluster *c = q->block->cluster;
    const struct actor agent = {.component = q->component,
                                .clock = p->number,
                                .slot = c->num_blocks * q->block->num_warps + q->block->rank * (WARPGROUPS_MAX + 1) +
                                        CURRENT->warp->number / 4};
    /* the same sums again, and nobody else was here */
    const int again = accumulator == q->last_accumulator && version_of(q) == q->version;
    for (unsigned i = 0; i < (unsigned)q->group; i++) {
        struct tensor *t = block_of_group(q, i)->tensor;
        for (unsigned quarter = 0; quarter < QUARTERS; quarter++) {
            if (p->from_tensor)
                order_operand((struct columns){t, quarter, p->a_tensor & 0xffff, K / 2}, q, p);
            if (!again)
                order_sums((struct columns){t, quarter, p->d & 0xffff, sums_columns(q, p)}, q, p, accumulator);
        }
        touch_operand(t->block, p->b, p->b_mn_major, p->n / q->group, &agent, &issuer, p->at);
        if (!p->from_tensor)
            touch_operand(t->block, p->a, p->a_mn_major, p->m / q->group, &agent, &issuer, p->at);
        t->version += !again;
    }
    q->last_accumulator = accumulator;
    q->version = version_of(q);
}

void emu_tensor_mma(int group, unsigned d, unsigned long long a, int a_in_tensor, unsigned long long b, unsigned shape,
                    int add, EMU_PLACE) {
    struct product p = {.a = a_in_tensor ? 0 : a,
                        .b = b,
                        .d = d,
                        .a_tensor = a_in_tensor ? (uint32_t)a : 0,
                        .shape = shape,
                        .m = (int)bits(shape, 24, 5) * 16,
                        .n = (int)bits(shape, 17, 6) * 8,
                        .f16 = bits(shape, 7, 3) == 0,
                        .a_mn_major = (int)bits(shape, 15, 1),
                        .b_mn_major = (int)bits(shape, 16, 1),
                        .from_tensor = a_in_tensor,
                        .add = add,
                        .at = HERE};
    const int64_t findings = device.findings;
    shadow_settle(CURRENT);
    tensor_check_group(CURRENT->block, group, p.at);
    struct queue *q = queue_of(CURRENT, group, p.at);
    check_shape(group, &p);
    check_matrix(b, "matrix b", p.b_mn_major, p.at);
    if (!a_in_tensor)
        check_matrix(a, "matrix a", p.a_mn_major, p.at);
    if (device.findings > findings)
        thread_fail();
    check_columns(q, &p);
    const int accumulator = accumulator_of(q, &p);
    p.number = ++q->issued;
    if (emulated_settings_now.check)
        check_order(q, &p, accumulator);
    q->accumulators[accumulator].last = p.number;
    if (q->num_pending == PRODUCTS_PENDING)
        products_of_tensor(q, p.number);
    q->pending[q->num_pending++] = p;
    const enum emulated_mode mode = emulated_settings_now.mode;
    if (mode == EMULATED_EARLY || (mode == EMULATED_RANDOM && chance(8)))
        products_of_tensor(q, p.number);
    yield_warp();
}

/* ---- commit ---- */

struct commit {
    struct queue *queue;
    struct block *block;
    uint32_t upto, offset;
    struct gather released;
};

static void commit_now(struct event *e) {
    struct commit *c = e->data;
    products_of_tensor(c->queue, c->upto);
    if (c->block->live == 0)
        finding("block has ended", e->at, "a commit arrives at block %u of the cluster, which has ended",
                c->block->rank);
    else
        mbarrier_arrive_by(c->block, mbarrier_at(c->block, c->offset, "tcgen05.commit", e->at), 1, 0, &c->released,
                           e->at);
    gather_clear(&c->released);
}

static void commit_to(struct queue *q, struct block *b, uint32_t offset, place at) {
    const struct mbarrier *m = mbarrier_at(b, offset, "tcgen05.commit", at);
    mbarrier_check_use(m, "tcgen05.commit", at);
    if (!m->fenced)
        finding("proxy fence missing", at,
                "the mbarrier of %s was initialised without a fence.mbarrier_init or fence.proxy.async before "
                "tcgen05.commit uses it",
                place_text(m->initialised_at));
    struct event *e = event_add(b->cluster, commit_now, sizeof(struct commit), at);
    struct commit *c = e->data;
    *c = (struct commit){q, b, q->issued, offset, {0}};
    e->block = b;
    e->loss = "the arrival of a tcgen05.commit is on its way";
    if (emulated_settings_now.check) {
        gather_add_known(&c->released, CURRENT);
        gather_set(&c->released, q->component, q->issued, b->cluster->width);
    }
    event_now_or_later(e);
}

void emu_tensor_commit(int group, unsigned barrier, unsigned blocks, EMU_PLACE) {
    struct block *b;
    uint32_t offset;
    const place at = HERE;
    struct cluster *c = CURRENT->block->cluster;
    shadow_settle(CURRENT);
    tensor_check_group(CURRENT->block, group, at);
    struct queue *q = queue_of(CURRENT, group, at);
    if (!shared_range(barrier, 8, 8, "tcgen05.commit", &b, &offset, at))
        thread_fail();
    if (!(blocks & EMU_MULTICAST)) {
        commit_to(q, b, offset, at);
    } else {
        if ((blocks & (EMU_MULTICAST - 1)) >> c->num_blocks || !(blocks & (EMU_MULTICAST - 1)))
            finding("bad address", at, "a commit to blocks 0x%x of a cluster of %u", blocks & (EMU_MULTICAST - 1),
                    c->num_blocks);
        for (unsigned r = 0; r < c->num_blocks; r++)
            if (blocks >> r & 1)
                commit_to(q, c->blocks[r], offset, at);
    }
    yield_warp();
}
