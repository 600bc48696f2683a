/* wgmma.c: products of a warpgroup and its registers.
 *
 * From issue to wait the sums belong to the product: they are taken out of the threads' variables, which hold a marked
 * NaN meanwhile, and come back when a warp waits. */
#include <stdlib.h>
#include <string.h>

#include "emulated_launch.h"
#include "wgmma.h"

static const uint32_t MARK = 0x7fc0dead;
static const char *const for_others = "wgmma: the other warps of the warpgroup";
static const char *const for_registers = "setmaxnreg.inc: registers of the block";

struct request {
    int n, type, add, a_transposed, b_transposed, has_a;
    float *d;
    const unsigned *a;
    uint64_t a_matrix, b_matrix;
};
struct wait_request {
    int pending, registers, more;
};

static struct warpgroup *group_of(struct warp *w) {
    struct block *b = w->block;
    const unsigned number = w->number / WARPS;
    if (!b->warpgroups[number]) {
        struct warpgroup *g = calloc(1, sizeof *g);
        g->block = b;
        g->number = number;
        g->component = agent_component(b, AGENT_PRODUCTS + WARPS * number);
        b->warpgroups[number] = g;
    }
    return b->warpgroups[number];
}

/* ---- the sums ---- */

/* Of thread t the sums 4i .. 4i+3: row 16 (t / 32) + t % 32 / 4, columns 8i + 2 (t % 4) and its neighbour; eight below.
 */
static float *sum_at(struct sums *s, unsigned thread, unsigned i) {
    const unsigned row = thread / LANES * 16 + thread % LANES / 4 + i % 4 / 2 * 8;
    return &s->values[row * (unsigned)s->n + i / 4 * 8 + thread % 4 * 2 + i % 2];
}

static struct sums *sums_of(struct warpgroup *g, const struct request *r, int *fresh) {
    struct sums *unused = NULL;
    *fresh = 0;
    for (int i = 0; i < SUMS_MAX; i++) {
        struct sums *s = &g->sums[i];
        if (s->n && s->d[0] == r->d)
            return s;
        if (!s->n && !unused)
            unused = s;
    }
    *fresh = 1;
    return unused;
}

static void take_sums(struct warpgroup *g, struct sums *s, const struct request *r, place at) {
    int unset = 0;
    s->n = r->n;
    s->published = 0;
    s->at = at;
    for (unsigned t = 0; t < WARPS * LANES; t++) {
        s->d[t] = ((const struct request *)g->operands[t])->d;
        for (unsigned i = 0; i < (unsigned)r->n / 2; i++) {
            *sum_at(s, t, i) = s->d[t][i];
            unset |= ((const int32_t *)s->d[t])[i] == UNWRITTEN;
            memcpy(&s->d[t][i], &MARK, sizeof MARK);
        }
    }
    if (unset && r->add)
        finding("register read before it was written", at, "a sum of this wgmma was never set");
}

static void give_sums(struct sums *s, unsigned warp, struct warp *w) {
    int touched = 0;
    for (unsigned lane = 0; lane < LANES; lane++) {
        const unsigned t = warp * LANES + lane;
        for (unsigned i = 0; i < (unsigned)s->n / 2; i++) {
            touched |= memcmp(&s->d[t][i], &MARK, sizeof MARK) != 0;
            s->d[t][i] = *sum_at(s, t, i);
        }
    }
    if (touched)
        finding("register touched", s->at, "warp %u has written sums of this wgmma before it waited for it", w->number);
    s->published |= 1u << warp;
    if (s->published == (1u << WARPS) - 1)
        s->n = 0;
}

/* ---- issue ---- */

static struct actor weakest(struct warpgroup *g, struct clocks **known, struct clocks **proxy) {
    const uint32_t width = g->block->cluster->width;
    struct actor a = actor_of(CURRENT);
    *known = clocks_make(width);
    *proxy = clocks_make(width);
    for (unsigned w = 0; w < WARPS; w++) {
        const struct thread *t = &g->block->threads[(g->number * WARPS + w) * LANES];
        for (uint32_t i = 0; i < width; i++) {
            const uint32_t k = i == t->component ? t->clock : t->known->at[i];
            const uint32_t p = i == t->component ? t->proxy_clock : t->proxy_known->at[i];
            (*known)->at[i] = w && (*known)->at[i] < k ? (*known)->at[i] : k;
            (*proxy)->at[i] = w && (*proxy)->at[i] < p ? (*proxy)->at[i] : p;
        }
    }
    a.component = ~0u;
    a.known = *known;
    a.proxy = *proxy;
    return a;
}

static void check_operands(struct warpgroup *g, const struct product_record *p) {
    const struct block *b = g->block;
    struct clocks *known, *proxy;
    if (!emulated_settings_now.check)
        return;
    const struct actor issuer = weakest(g, &known, &proxy);
    const struct actor agent = {.component = g->component,
                                .clock = p->number,
                                .four = 1,
                                .slot =
                                    b->cluster->num_blocks * b->num_warps + b->rank * (WARPGROUPS_MAX + 1) + g->number};
    matrix_touch(g->block, p->b_matrix, p->n, p->b_transposed, &agent, &issuer, p->at);
    if (!p->has_a)
        matrix_touch(g->block, p->a_matrix, 64, p->a_transposed, &agent, &issuer, p->at);
    clocks_drop(known);
    clocks_drop(proxy);
}

static void check_fences(struct warpgroup *g, int fresh, place at) {
    for (unsigned w = 0; w < WARPS; w++) {
        struct warp *warp = &g->block->warps[g->number * WARPS + w];
        if (fresh && !warp->fenced)
            finding("wgmma fence missing", at,
                    "the sums were touched since the last product, and no wgmma.fence came after");
    }
}

static void issue(struct warpgroup *g, place at) {
    const struct request *first = g->operands[0];
    int fresh;
    struct sums *s = sums_of(g, first, &fresh);
    if (!s || g->issued - g->executed == PRODUCTS_MAX) {
        finding("wrong wgmma", at, "more products under way than the emulator keeps");
        thread_fail();
    }
    if (!fresh && s->n != first->n)
        finding("wrong wgmma", at, "sums under way are used again with another shape");
    check_fences(g, fresh, at);
    if (fresh)
        take_sums(g, s, first, at);
    struct product_record *p = &g->products[g->issued % PRODUCTS_MAX];
    *p = (struct product_record){.n = first->n, .type = first->type, .add = first->add, .has_a = first->has_a};
    p->a_transposed = first->a_transposed;
    p->b_transposed = first->b_transposed;
    p->a_matrix = first->a_matrix;
    p->b_matrix = first->b_matrix;
    p->sums = s;
    p->at = at;
    p->number = ++g->issued;
    s->last = g->issued;
    s->published = 0;
    for (unsigned t = 0; t < WARPS * LANES; t++) {
        const struct request *r = g->operands[t];
        if (r->d != s->d[t] || r->b_matrix != first->b_matrix || (!r->has_a && r->a_matrix != first->a_matrix))
            finding("wrong wgmma", at, "thread %u of the warpgroup gives other operands than its first", t);
        if (r->has_a) {
            memcpy(p->a[t], r->a, sizeof p->a[t]);
            p->a_from[t] = r->a;
        }
    }
    check_operands(g, p);
    const enum emulated_mode mode = emulated_settings_now.mode;
    if (mode == EMULATED_EARLY || (mode == EMULATED_RANDOM && chance(2)))
        products_execute(g, g->issued);
}

static void note_request(struct warp *w, struct meeting *m) {
    struct warpgroup *g = group_of(w);
    const unsigned warp = w->number % WARPS;
    if (g->arrived && g->at != m->at) {
        finding("divergence", m->at, "a warp of the warpgroup comes to this wgmma, others to that of %s",
                place_text(g->at));
        thread_fail();
    }
    g->at = m->at;
    g->arrived |= 1u << warp;
    memcpy(&g->operands[warp * LANES], m->operands, sizeof m->operands);
    if (g->arrived != (1u << WARPS) - 1)
        return;
    g->arrived = 0;
    g->round++;
    issue(g, m->at);
    for (unsigned t = 0; t < WARPS * LANES; t++) {
        struct thread *other = &g->block->threads[g->number * WARPS * LANES + t];
        if (other->wait.what == for_others)
            wake(other);
    }
}

void emu_wgmma(int n, int type, float *d, const unsigned *a, unsigned long long a_matrix, unsigned long long b_matrix,
               int add, int a_transposed, int b_transposed, EMU_PLACE) {
    struct thread *t = CURRENT;
    struct request r = {n, type, add, a_transposed, b_transposed, a != NULL, d, a, a_matrix, b_matrix};
    const place at = HERE;
    struct warpgroup *g = group_of(t->warp);
    const uint32_t round = g->round;
    if (t->block->num_warps < (g->number + 1) * WARPS || n < 8 || n > 256 || n % 8) {
        finding("wrong wgmma", at, "m64n%dk16 in a warpgroup of fewer than four warps, or of a wrong shape", n);
        thread_fail();
    }
    meet(OP_WGMMA, ~0u, &r, at);
    while (g->round == round)
        wait_for(for_others, 0, 0, at);
}

/* ---- groups ---- */

static void wait_products(struct warp *w, int pending, place at) {
    struct warpgroup *g = group_of(w);
    if (w->commits <= (uint32_t)pending)
        return;
    const uint32_t upto = w->group_end[(w->commits - 1 - (uint32_t)pending) % 64];
    if (upto <= w->products_done)
        return;
    products_execute(g, upto);
    for (unsigned lane = 0; emulated_settings_now.strict && lane < LANES; lane++)
        for (uint32_t n = w->products_done; n < upto; n++) {
            const struct product_record *p = &g->products[n % PRODUCTS_MAX];
            const unsigned t = w->number % WARPS * LANES + lane;
            if (p->has_a && memcmp(p->a_from[t], p->a[t], sizeof p->a[t]) != 0)
                finding("register touched", p->at, "thread %u has written an operand of this wgmma before it waited",
                        t);
        }
    w->products_done = upto;
    for (int i = 0; i < SUMS_MAX; i++) {
        struct sums *s = &g->sums[i];
        if (s->n && s->last <= upto && !(s->published >> w->number % WARPS & 1)) {
            give_sums(s, w->number % WARPS, w);
            w->fenced = 0;
        }
    }
    if (emulated_settings_now.check)
        for (unsigned lane = 0; lane < LANES; lane++)
            clocks_learn(&w->threads[lane], g->component + w->number % WARPS, upto);
    (void)at;
}

static void set_registers(struct warp *w, const struct wait_request *r, place at) {
    struct block *b = w->block;
    if (r->registers % 8 || r->registers < 24 || r->registers > 256)
        finding("wrong setmaxnreg", at, "setmaxnreg of %d registers", r->registers);
    if (r->more ? r->registers < w->registers : r->registers > w->registers)
        finding("wrong setmaxnreg", at, "setmaxnreg.%s to %d registers from %d", r->more ? "inc" : "dec", r->registers,
                w->registers);
    b->registers_free += (w->registers - r->registers) * LANES;
    w->registers = r->registers;
    for (unsigned i = 0; !r->more && i < b->num_threads; i++)
        if (b->threads[i].wait.what == for_registers)
            wake(&b->threads[i]);
}

void warpgroup_execute(struct warp *w, struct meeting *m) {
    const struct wait_request *r = m->operands[0];
    switch (m->operation) {
    case OP_WGMMA: note_request(w, m); break;
    case OP_WGMMA_FENCE: w->fenced = 1; break;
    case OP_WGMMA_COMMIT: w->group_end[w->commits++ % 64] = group_of(w)->issued; break;
    case OP_WGMMA_WAIT: wait_products(w, r->pending, m->at); break;
    default: set_registers(w, r, m->at);
    }
}

void emu_wgmma_fence(EMU_PLACE) { meet(OP_WGMMA_FENCE, ~0u, NULL, HERE); }
void emu_wgmma_commit(EMU_PLACE) { meet(OP_WGMMA_COMMIT, ~0u, NULL, HERE); }
void emu_wgmma_wait(int pending, EMU_PLACE) {
    struct wait_request r = {.pending = pending};
    meet(OP_WGMMA_WAIT, ~0u, &r, HERE);
}

void emu_setmaxnreg(int registers, int more, EMU_PLACE) {
    struct thread *t = CURRENT;
    struct wait_request r = {.registers = registers, .more = more};
    while (more && (registers - t->warp->registers) * LANES > t->block->registers_free)
        wait_for(for_registers, (uint32_t)registers, (uint32_t)t->block->registers_free, HERE);
    meet(OP_SETMAXNREG, ~0u, &r, HERE);
}

/* ---- ends, and registers that are touched ---- */

void wgmma_thread_ended(struct thread *t) {
    const struct warpgroup *g = t->block->warpgroups[t->warp->number / WARPS];
    if (g && t->lane == 0 && t->warp->products_done < g->issued)
        finding("wgmma not waited for", g->products[(g->issued - 1) % PRODUCTS_MAX].at,
                "warp %u ends with products under way", t->warp->number);
}

void wgmma_block_ended(struct block *b) {
    for (int i = 0; i < WARPGROUPS_MAX; i++) {
        free(b->warpgroups[i]);
        b->warpgroups[i] = NULL;
    }
}

void wgmma_touch(struct thread *t, uintptr_t address, uint32_t bytes, int write, place at) {
    struct warpgroup *g = t->block->warpgroups[t->warp->number / WARPS];
    if (!g || g->issued == t->warp->products_done)
        return;
    const unsigned n = t->number % (WARPS * LANES);
    for (int i = 0; i < SUMS_MAX; i++) {
        const struct sums *s = &g->sums[i];
        const uintptr_t from = (uintptr_t)s->d[n];
        if (s->n && !(s->published >> t->warp->number % WARPS & 1) && address + bytes > from &&
            address < from + (size_t)s->n / 2 * sizeof(float))
            finding("register touched", at, "a sum of the wgmma of %s is %s before its wait", place_text(s->at),
                    write ? "written" : "read");
    }
}
