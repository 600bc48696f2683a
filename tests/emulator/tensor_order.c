/* tensor_order.c: which accesses to tensor memory something orders.
 *
 * PTX ISA, "Memory consistency model for 5th generation of TensorCore operations". A load or store is complete for its
 * own warp when it has been waited for; for others when the warp's tcgen05.fence::before_thread_sync follows, one of
 * its threads releases, and who acquires has its own ::after_thread_sync. A product is complete when the mbarrier of
 * its commit says so; a commit has the first fence in it. Products of one thread with the same sums and shape follow
 * each other; by later texts of the ISA a product's operand in tensor memory is also read before a later product writes
 * there, which `unordered` takes back. */
#include "emulated_launch.h"
#include "tensor_memory.h"

static const char race[] = "race in tensor memory";

static unsigned agent_of(const struct cluster *c, uint32_t component, uint32_t *rank) {
    const uint32_t from = component - c->num_blocks * c->blocks[0]->num_threads;
    *rank = from / NUM_AGENTS;
    return from % NUM_AGENTS;
}

static int is_product(const struct cluster *c, uint32_t component) {
    uint32_t rank;
    return agent_of(c, component, &rank) < AGENT_TENSOR;
}

static uint32_t write_clock(const struct cluster *c, const struct cell *x) {
    uint32_t rank;
    if (!x->accumulator)
        return x->write_clock;
    const unsigned warp = agent_of(c, x->writer, &rank) - AGENT_PRODUCTS;
    return c->blocks[rank]->tensor->queues[warp]->accumulators[x->accumulator - 1].last;
}

/* ---- an access, and an earlier one that it must come after ---- */

struct access {
    const char *what; /* "this tcgen05.ld" */
    const struct cluster *cluster;
    const struct warp *warp;      /* of a load or store: its own are ordered by waits */
    const struct clocks *known;   /* at the fence */
    const struct clocks *general; /* without it */
    place at;
};
struct earlier {
    uint32_t component, clock, column;
    place at;
};

static int is_own(const struct access *a, uint32_t component, unsigned *stores) {
    for (*stores = 0; a->warp && *stores < 2; ++*stores)
        if (component == tensor_component(a->warp, *stores))
            return 1;
    return 0;
}

static int ordered(const struct access *a, const struct earlier *e) {
    unsigned stores;
    if (is_own(a, e->component, &stores))
        return a->warp->tensor_waited[stores] >= e->clock;
    return a->known->at[e->component] >= e->clock;
}

static int published(const struct warp *w, unsigned stores, uint32_t clock) {
    for (unsigned lane = 0; lane < LANES; lane++)
        if (w->threads[lane].tensor_published[stores] >= clock)
            return 1;
    return 0;
}

static void tell(const struct access *a, const struct earlier *e) {
    uint32_t rank;
    const unsigned agent = agent_of(a->cluster, e->component, &rank);
    const char *who = component_text(a->cluster, e->component), *where = place_text(e->at);
    if (agent < AGENT_TENSOR) {
        if (a->general->at[e->component] >= e->clock)
            finding("tcgen05 fence missing", a->at,
                    "%s has no tcgen05.fence::after_thread_sync between it and the end of the product of %s at %s on "
                    "column %u",
                    a->what, who, where, e->column);
        else
            finding(race, a->at, "column %u: %s while the product of %s at %s is under way", e->column, a->what, who,
                    where);
        return;
    }
    const unsigned stores = (agent - AGENT_TENSOR) % 2;
    const struct warp *w = &a->cluster->blocks[rank]->warps[(agent - AGENT_TENSOR) / 2];
    if (w->tensor_waited[stores] < e->clock)
        finding(race, a->at, "column %u: %s while the %s at %s is under way: no tcgen05.wait::%s came after it",
                e->column, a->what, who, where, stores ? "st" : "ld");
    else if (!is_own(a, e->component, &(unsigned){0}) && !published(w, stores, e->clock))
        finding("tcgen05 fence missing", a->at,
                "column %u: before %s the %s at %s has no tcgen05.fence::before_thread_sync behind it", e->column,
                a->what, who, where);
    else if (a->general->at[e->component] >= e->clock)
        finding("tcgen05 fence missing", a->at,
                "column %u: %s has no tcgen05.fence::after_thread_sync between it and what told of the %s at %s",
                e->column, a->what, who, where);
    else
        finding(race, a->at, "column %u: nothing orders %s after the %s at %s", e->column, a->what, who, where);
}

/* 1 with a finding: nothing orders the two. */
static int open(const struct access *a, uint32_t component, uint32_t clock, uint32_t column, place at) {
    const struct earlier e = {component, clock, column, at};
    if (!clock || ordered(a, &e))
        return 0;
    tell(a, &e);
    return 1;
}

static int open_writer(const struct access *a, const struct cell *x, uint32_t column) {
    return x->written && open(a, x->writer, write_clock(a->cluster, x), column, x->written_at);
}

static int open_loads(const struct access *a, const struct columns *c, const struct cell *x, uint32_t column) {
    const struct block *b = c->tensor->block;
    for (unsigned i = 0; i < QUARTER_WARPS; i++)
        if (x->reads[i] &&
            open(a, tensor_component(&b->warps[c->quarter + QUARTERS * i], 0), x->reads[i], column, x->read_at))
            return 1;
    return 0;
}

static struct access access_of(const char *what, const struct thread *t, const struct warp *warp, place at) {
    return (struct access){what, t->block->cluster, warp, t->tensor_known, t->known, at};
}

/* What a lane knows where it is not what the lane before knew; 0: the same. */
static int next_lane(const struct warp *w, unsigned lane) {
    return lane == 0 || w->threads[lane].tensor_known != w->threads[lane - 1].tensor_known;
}

/* ---- loads and stores ---- */

static int check_load(const struct access *a, const struct columns *c) {
    for (uint32_t i = c->first; i < c->first + c->count; i++) {
        const struct cell *x = &c->tensor->cells[c->quarter][i];
        if (!x->written) {
            finding("tensor memory read before it was written", a->at, "column %u of lanes from %u on", i,
                    c->quarter * LANES);
            return 1;
        }
        if (open_writer(a, x, i))
            return 1;
    }
    return 0;
}

void order_load(struct columns c, struct warp *w, uint32_t number, place at) {
    for (unsigned lane = 0; lane < LANES; lane++) {
        const struct access a = access_of("this tcgen05.ld", &w->threads[lane], w, at);
        if (next_lane(w, lane) && check_load(&a, &c))
            break;
    }
    for (uint32_t i = c.first; i < c.first + c.count; i++) {
        struct cell *x = &c.tensor->cells[c.quarter][i];
        x->reads[w->number / QUARTERS] = number;
        x->read_at = at;
    }
}

static int check_store(const struct access *a, const struct columns *c) {
    for (uint32_t i = c->first; i < c->first + c->count; i++) {
        const struct cell *x = &c->tensor->cells[c->quarter][i];
        if (open_writer(a, x, i) || open_loads(a, c, x, i) ||
            open(a, x->operand_reader, x->operand_read, i, x->operand_at))
            return 1;
    }
    return 0;
}

static void set_writer(struct cell *x, uint32_t component, uint32_t clock, int accumulator, place at) {
    *x = (struct cell){.writer = component,
                       .write_clock = clock,
                       .accumulator = (uint16_t)(accumulator + 1),
                       .written = 1,
                       .written_at = at};
}

void order_store(struct columns c, struct warp *w, uint32_t number, place at) {
    for (unsigned lane = 0; lane < LANES; lane++) {
        const struct access a = access_of("this tcgen05.st", &w->threads[lane], w, at);
        if (next_lane(w, lane) && check_store(&a, &c))
            break;
    }
    for (uint32_t i = c.first; i < c.first + c.count; i++)
        set_writer(&c.tensor->cells[c.quarter][i], tensor_component(w, 1), number, -1, at);
}

/* ---- products ---- */

void order_operand(struct columns c, const struct queue *q, const struct product *p) {
    const struct access a = access_of("this product, which reads it,", CURRENT, NULL, p->at);
    int told = 0;
    for (uint32_t i = c.first; i < c.first + c.count; i++) {
        struct cell *x = &c.tensor->cells[c.quarter][i];
        if (!told && !x->written) {
            finding("tensor memory read before it was written", p->at, "column %u of lanes from %u on, by a product", i,
                    c.quarter * LANES);
            told = 1;
        }
        told = told || open_writer(&a, x, i);
        x->operand_reader = q->component;
        x->operand_read = p->number;
        x->operand_at = p->at;
    }
}

static int check_sums(const struct access *a, const struct columns *c, const struct cell *x, const struct queue *q,
                      const struct product *p, int accumulator, uint32_t i) {
    const int same = x->written && x->writer == q->component && x->accumulator == accumulator + 1;
    if (p->add && !x->written) {
        finding("tensor memory read before it was written", p->at, "sums in column %u that a product adds to", i);
        return 1;
    }
    if (!same && x->written && is_product(a->cluster, x->writer) &&
        a->general->at[x->writer] < write_clock(a->cluster, x)) {
        finding("columns overlap", p->at,
                "column %u belongs to the product of %s, which is under way with other sums or another shape", i,
                place_text(x->written_at));
        return 1;
    }
    if ((!same && open_writer(a, x, i)) || open_loads(a, c, x, i))
        return 1;
    return (emulated_settings_now.unordered || x->operand_reader != q->component) &&
           open(a, x->operand_reader, x->operand_read, i, x->operand_at);
}

void order_sums(struct columns c, const struct queue *q, const struct product *p, int accumulator) {
    const struct access a = access_of("this product, which writes it,", CURRENT, NULL, p->at);
    int told = 0;
    for (uint32_t i = c.first; i < c.first + c.count; i++) {
        struct cell *x = &c.tensor->cells[c.quarter][i];
        told = told || check_sums(&a, &c, x, q, p, accumulator, i);
        set_writer(x, q->component, p->number, accumulator, p->at);
    }
}

/* What touches the columns must be over for the warp that gives them back. 1: it is not. */
int order_dealloc(struct columns c, const struct thread *t, place at) {
    struct access a = access_of("this tcgen05.dealloc", t, t->warp, at);
    a.known = t->known;
    for (uint32_t i = c.first; emulated_settings_now.check && i < c.first + c.count; i++) {
        const struct cell *x = &c.tensor->cells[c.quarter][i];
        if (open_writer(&a, x, i) || open_loads(&a, &c, x, i) ||
            open(&a, x->operand_reader, x->operand_read, i, x->operand_at))
            return 1;
    }
    return 0;
}
