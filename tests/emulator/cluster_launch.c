/* cluster_launch.c: clusters of the grid that have not begun, taken by one that runs. */
#include <string.h>

#include "emulated_launch.h"
#include "state.h"

/* The 16 bytes of an answer. No kernel may look into them: they are not those of a device. */
struct answer {
    uint32_t key, x, y, z;
};
enum { ANSWER_BYTES = 16, TAKEN = 0x3c5a9d17, NONE = 0x51e20b6f, SCRAMBLE = 0x2b7e1516 };

struct request {
    struct block *block;
    uint32_t offset, mbarrier;
    struct answer answer;
};

static void answer_now(struct event *e) {
    struct request *r = e->data;
    struct block *b = r->block;
    if (b->live == 0) {
        finding("block has ended", e->at, "clusterlaunchcontrol answers block %u of the cluster, which has ended",
                b->rank);
        return;
    }
    struct mbarrier *m = mbarrier_at(b, r->mbarrier, "clusterlaunchcontrol.try_cancel", e->at);
    memcpy(b->window + r->offset, &r->answer, ANSWER_BYTES);
    shadow_land(b, r->offset, ANSWER_BYTES, m->component, m->ticks, 0, e->at);
    mbarrier_bytes_came(b, m, ANSWER_BYTES, e->at);
}

/* The next cluster, which then never begins. Now and then none although there is one: a device may do so too. */
static struct answer take_cluster(struct grid *g, unsigned blocks) {
    enum { REFUSES = 64 };
    struct answer a = {NONE, random_below(1u << 31), random_below(1u << 31), random_below(1u << 31)};
    if (g->next_cluster == g->num_clusters || chance(REFUSES))
        return a;
    const uint64_t first = g->next_cluster++ * blocks;
    g->clusters_ended++;
    g->dependents++;
    progress();
    a = (struct answer){TAKEN, (uint32_t)(first % g->size[0]), (uint32_t)(first / g->size[0] % g->size[1]),
                        (uint32_t)(first / g->size[0] / g->size[1])};
    a.x ^= SCRAMBLE, a.y ^= SCRAMBLE, a.z ^= SCRAMBLE;
    return a;
}

void emu_try_cancel(unsigned shared, unsigned barrier, int multicast, EMU_PLACE) {
    struct cluster *c = CURRENT->block->cluster;
    struct block *own = CURRENT->block, *of, *of_barrier;
    uint32_t offset, barrier_offset;
    const place at = HERE;
    const struct actor a = actor_of(CURRENT);
    shadow_settle(CURRENT);
    if (!shared_range(shared, ANSWER_BYTES, ANSWER_BYTES, "clusterlaunchcontrol.try_cancel", &of, &offset, at) ||
        !shared_range(barrier, 8, 8, "clusterlaunchcontrol.try_cancel", &of_barrier, &barrier_offset, at))
        thread_fail();
    if (of != own || of_barrier != own)
        finding("wrong cluster launch", at, "clusterlaunchcontrol.try_cancel with an address of another block");
    if (c->cancel_failed)
        finding("wrong cluster launch", at,
                "clusterlaunchcontrol.try_cancel after the cluster has seen an answer without a cluster");
    const struct answer answer = take_cluster(c->grid, c->num_blocks);
    for (unsigned r = 0; r < c->num_blocks; r++) {
        struct block *b = c->blocks[r];
        if (!multicast && b != own)
            continue;
        const struct mbarrier *m = mbarrier_at(b, barrier_offset, "clusterlaunchcontrol.try_cancel", at);
        mbarrier_check_use(m, "clusterlaunchcontrol.try_cancel", at);
        shadow_proxy_reads(b, offset, ANSWER_BYTES, &a, at);
        if (!m->fenced)
            finding("proxy fence missing", at, "the mbarrier of %s was initialised without a fence.mbarrier_init",
                    place_text(m->initialised_at));
        shadow_flight(b, offset, ANSWER_BYTES, &a, 1, at);
        struct event *e = event_add(c, answer_now, sizeof(struct request), at);
        *(struct request *)e->data = (struct request){b, offset, barrier_offset, answer};
        e->block = b;
        e->loss = "an answer of clusterlaunchcontrol is on its way";
        event_now_or_later(e);
    }
    yield_warp();
}

int emu_query_cancel(unsigned shared, unsigned *index, EMU_PLACE) {
    struct answer a;
    const place at = HERE;
    emu_shared_load(&a, shared, ANSWER_BYTES, emu_file, emu_line);
    index[0] = index[1] = index[2] = 0;
    if (a.key != TAKEN && a.key != NONE)
        finding("wrong cluster launch", at, "clusterlaunchcontrol.query_cancel of bytes that are no answer");
    if (a.key != TAKEN) {
        CURRENT->block->cluster->cancel_failed = 1;
        return 0;
    }
    index[0] = a.x ^ SCRAMBLE, index[1] = a.y ^ SCRAMBLE, index[2] = a.z ^ SCRAMBLE;
    return 1;
}
