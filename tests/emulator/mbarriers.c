/* mbarriers.c: barriers in shared memory, which count arrivals and bytes. */
#include "emulated_launch.h"
#include "state.h"

enum { BARRIER_BYTES = 8, COUNT_MAX = (1 << 20) - 1 };
static const char *const at_mbarrier = "an mbarrier's phase";

static int checks(void) { return emulated_settings_now.check; }

static struct mbarrier *find(struct block *b, uint32_t offset) {
    for (unsigned i = 0; i < b->num_mbarriers; i++)
        if (b->mbarriers[i].offset == offset)
            return &b->mbarriers[i];
    return NULL;
}

struct mbarrier *mbarrier_at(struct block *b, uint32_t offset, const char *what, place at) {
    struct mbarrier *m = find(b, offset);
    if (!m) {
        finding("wrong mbarrier", at, "%s: no mbarrier was initialised at shared offset %d", what,
                (int)offset - RESERVED_BYTES);
        thread_fail();
    }
    return m;
}

static struct mbarrier *named(uint32_t address, const char *what, struct block **b, place at) {
    uint32_t offset;
    if (!shared_range(address, BARRIER_BYTES, BARRIER_BYTES, what, b, &offset, at))
        thread_fail();
    return mbarrier_at(*b, offset, what, at);
}

/* The running thread must have been told of the initialisation. */
void mbarrier_check_use(const struct mbarrier *m, const char *what, place at) {
    const struct actor a = actor_of(CURRENT);
    if (checks() && !shadow_knows(&a, m->initialiser, m->initialised_clock))
        finding("race", at, "%s: the mbarrier was initialised by %s at %s, and nothing orders this use after it", what,
                component_text(CURRENT->block->cluster, m->initialiser), place_text(m->initialised_at));
}

void emu_mbarrier_init(unsigned barrier, unsigned arrivals, EMU_PLACE) {
    struct block *b;
    uint32_t offset;
    const place at = HERE;
    if (!shared_range(barrier, BARRIER_BYTES, BARRIER_BYTES, "mbarrier.init", &b, &offset, at))
        thread_fail();
    if (arrivals < 1 || arrivals > COUNT_MAX)
        finding("wrong mbarrier", at, "mbarrier.init with a count of %u", arrivals);
    struct mbarrier *m = find(b, offset);
    if (m) {
        finding("wrong mbarrier", at, "the mbarrier of %s is initialised again", place_text(m->initialised_at));
        gather_clear(&m->now);
        gather_clear(&m->done);
    } else if (b->num_mbarriers == MBARRIERS_MAX) {
        finding("wrong mbarrier", at, "a block has more than %d mbarriers", MBARRIERS_MAX);
        thread_fail();
    } else {
        m = &b->mbarriers[b->num_mbarriers++];
    }
    const struct actor a = actor_of(CURRENT);
    shadow_write(b, offset, BARRIER_BYTES, &a, NULL, at);
    shadow_settle(CURRENT);
    CURRENT->suspect.memory = NULL;
    const uint32_t number = (uint32_t)(m - b->mbarriers);
    *m = (struct mbarrier){.offset = offset, .count = arrivals, .pending = arrivals, .initialised_at = at, .ticks = 1};
    m->component = agent_component(b, number);
    m->initialiser = CURRENT->component;
    m->initialised_clock = CURRENT->clock;
    if (checks())
        shadow_mark(b, offset, number + 1);
}

void emu_mbarrier_invalidate(unsigned barrier, EMU_PLACE) {
    struct block *b;
    struct mbarrier *m = named(barrier, "mbarrier.inval", &b, HERE);
    shadow_mark(b, m->offset, 0);
    m->offset = 0;
}

/* ---- phases ---- */

static int has_waited_for(const struct thread *t, const struct block *b, const struct mbarrier *m) {
    return t->wait.what == at_mbarrier && t->block == b && t->wait.object == m->offset - RESERVED_BYTES &&
           t->wait.detail != (m->phase & 1);
}

static void check_phase(struct block *b, struct mbarrier *m) {
    if (m->pending || m->bytes)
        return;
    const uint32_t width = b->cluster->width;
    m->phase++;
    m->pending = m->count;
    progress();
    if (checks()) {
        gather_set(&m->now, m->component, m->ticks++, width);
        gather_add_gather(&m->done, &m->now, width);
        gather_clear(&m->now);
    }
    for (unsigned i = 0; i < b->num_threads; i++)
        if (has_waited_for(&b->threads[i], b, m))
            wake(&b->threads[i]);
}

/* by: what the arriving thread has released; NULL: all that the running one has done. */
void mbarrier_arrive_by(struct block *b, struct mbarrier *m, uint32_t arrivals, int64_t bytes, const struct gather *by,
                        place at) {
    m->bytes += bytes;
    if (arrivals > m->pending) {
        finding("wrong mbarrier", at,
                "%u arrivals at the mbarrier at shared offset %d, but its phase %u waits for %u of %u", arrivals,
                (int)m->offset - RESERVED_BYTES, m->phase, m->pending, m->count);
        thread_fail();
    }
    m->pending -= arrivals;
    if (checks() && by)
        gather_add_gather(&m->now, by, b->cluster->width);
    else if (checks())
        gather_add(&m->now, CURRENT);
    check_phase(b, m);
}

/* By TMA. The bytes may come before they are announced. */
void mbarrier_bytes_came(struct block *b, struct mbarrier *m, uint32_t bytes, place at) {
    m->bytes -= bytes;
    if (m->bytes < 0 && m->pending == 0)
        finding("wrong mbarrier", at, "more bytes come to the mbarrier at shared offset %d than its phase %u announced",
                (int)m->offset - RESERVED_BYTES, m->phase);
    check_phase(b, m);
}

/* An arrival in another block comes at a time of its own. */
struct remote {
    struct block *block;
    uint32_t offset, arrivals, bytes;
    struct gather released;
};
static void arrive_now(struct event *e) {
    struct remote *r = e->data;
    mbarrier_arrive_by(r->block, mbarrier_at(r->block, r->offset, "mbarrier.arrive", e->at), r->arrivals, r->bytes,
                       &r->released, e->at);
    gather_clear(&r->released);
}

/* What a cluster barrier orders before what follows it. */
void mbarrier_remote_arrivals(struct cluster *c) { events_flush(c, arrive_now); }

static void arrive(unsigned barrier, unsigned arrivals, unsigned bytes, int may_be_remote, place at) {
    struct block *b;
    struct thread *t = CURRENT;
    shadow_settle(t);
    struct mbarrier *m = named(barrier, "mbarrier.arrive", &b, at);
    mbarrier_check_use(m, "mbarrier.arrive", at);
    if (!may_be_remote && b != t->block)
        finding("wrong mbarrier", at, "mbarrier.arrive.expect_tx.shared::cta at another block's barrier");
    if (b == t->block) {
        mbarrier_arrive_by(b, m, arrivals, bytes, NULL, at);
    } else {
        struct event *e = event_add(b->cluster, arrive_now, sizeof(struct remote), at);
        struct remote *r = e->data;
        *r = (struct remote){b, m->offset, arrivals, bytes, {0}};
        e->block = b;
        e->loss = "an arrival from another block is on its way";
        if (checks())
            gather_add(&r->released, t);
        event_now_or_later(e);
    }
    yield_warp();
}

void emu_mbarrier_arrive(unsigned barrier, unsigned arrivals, unsigned bytes, EMU_PLACE) {
    arrive(barrier, arrivals, bytes, bytes == 0, HERE);
}
void emu_mbarrier_arrive_cluster(unsigned address, unsigned bytes, EMU_PLACE) { arrive(address, 1, bytes, 1, HERE); }

void emu_mbarrier_expect(unsigned barrier, unsigned bytes, EMU_PLACE) {
    struct block *b;
    struct mbarrier *m = named(barrier, "mbarrier.expect_tx", &b, HERE);
    m->bytes += bytes;
    check_phase(b, m);
}

static void acquire(struct mbarrier *m) {
    if (checks())
        gather_take(&m->done, CURRENT);
}

static struct mbarrier *own_barrier(unsigned barrier, const char *what, struct block **b, place at) {
    struct mbarrier *m = named(barrier, what, b, at);
    mbarrier_check_use(m, what, at);
    if (*b != CURRENT->block) {
        finding("wrong mbarrier", at, "%s: a thread can only wait at a barrier of its own block", what);
        thread_fail();
    }
    return m;
}

void emu_mbarrier_wait(unsigned barrier, unsigned parity, EMU_PLACE) {
    struct block *b;
    const place at = HERE;
    shadow_settle(CURRENT);
    struct mbarrier *m = own_barrier(barrier, "mbarrier.try_wait", &b, at);
    const uint32_t offset = m->offset;
    if (parity > 1)
        finding("wrong mbarrier", at, "mbarrier.try_wait with parity %u", parity);
    if (parity != (m->phase & 1) && m->phase == 0)
        (void)0; /* the phase before the first counts as ended: how producers begin */
    while (parity == (m->phase & 1)) {
        wait_for(at_mbarrier, offset - RESERVED_BYTES, parity, at);
        m = mbarrier_at(b, offset, "mbarrier.try_wait", at);
    }
    acquire(m);
    yield_warp();
}

int emu_mbarrier_test(unsigned barrier, unsigned parity, EMU_PLACE) {
    struct block *b;
    struct mbarrier *m = own_barrier(barrier, "mbarrier.test_wait", &b, HERE);
    if (parity == (m->phase & 1)) {
        poll(HERE);
        return 0;
    }
    acquire(m);
    return 1;
}

/* ---- fences ---- */

void emu_fence(int kind, EMU_PLACE) {
    struct thread *t = CURRENT;
    struct block *b = t->block;
    (void)emu_file, (void)emu_line;
    shadow_settle(t);
    if (kind == EMU_FENCE_MEMORY)
        return;
    for (unsigned i = 0; i < b->num_mbarriers; i++)
        b->mbarriers[i].fenced = 1;
    if (kind == EMU_FENCE_PROXY_ASYNC && checks())
        clocks_fence_proxy(t);
}
