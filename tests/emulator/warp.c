/* warp.c: where lanes meet: the last of a mask executes for all and goes on. */
#include <string.h>

#include "emulated_launch.h"
#include "state.h"

const char *const operation_names[] = {
    [OP_SYNCWARP] = "__syncwarp",
    [OP_SHUFFLE] = "a shuffle",
    [OP_VOTE] = "a vote",
    [OP_REDUCE] = "a reduction",
    [OP_ELECT] = "elect",
    [OP_LDMATRIX] = "ldmatrix",
    [OP_STMATRIX] = "stmatrix",
    [OP_MMA] = "mma",
    [OP_WGMMA] = "wgmma",
    [OP_WGMMA_FENCE] = "wgmma.fence",
    [OP_WGMMA_COMMIT] = "wgmma.commit",
    [OP_WGMMA_WAIT] = "wgmma.wait_group",
    [OP_SETMAXNREG] = "setmaxnreg",
    [OP_TENSOR_ALLOC] = "tcgen05.alloc",
    [OP_TENSOR_DEALLOC] = "tcgen05.dealloc",
    [OP_TENSOR_RELINQUISH] = "tcgen05.relinquish_alloc_permit",
    [OP_TENSOR_LOAD] = "tcgen05.ld",
    [OP_TENSOR_STORE] = "tcgen05.st",
    [OP_TENSOR_WAIT] = "tcgen05.wait",
};

static void finish(struct warp *w, struct meeting *m) {
    struct meeting done = *m;
    *m = w->meetings[--w->num_meetings];
    if (done.mask == w->live) /* what the lanes have read so far is read when the warp goes on */
        w->sequence++;
    progress();
    if (done.operation >= OP_TENSOR_ALLOC)
        tensor_execute(w, &done);
    else if (done.operation >= OP_WGMMA)
        warpgroup_execute(w, &done);
    else
        warp_execute(w, &done);
    for (unsigned left = done.mask; left; left &= left - 1) {
        struct thread *t = &w->threads[__builtin_ctz(left)];
        if (t != CURRENT && t->wait.what == operation_names[done.operation])
            wake(t);
    }
}

static struct meeting *meeting_of(struct warp *w, int operation, unsigned mask, place at, struct thread *t) {
    for (int i = 0; i < w->num_meetings; i++) {
        struct meeting *m = &w->meetings[i];
        const int same = m->operation == operation && m->mask == mask && (operation == OP_SYNCWARP || m->at == at);
        if (same && !(m->arrived >> t->lane & 1))
            return m;
        if (m->mask & mask) {
            finding("divergence", at,
                    "lanes 0x%x of warp %u wait at %s of %s (mask 0x%x), but lane %u comes to %s with "
                    "mask 0x%x",
                    m->arrived, w->number, operation_names[m->operation], place_text(m->at), m->mask, t->lane,
                    operation_names[operation], mask);
            thread_fail();
        }
    }
    if (w->num_meetings == (int)(sizeof w->meetings / sizeof w->meetings[0])) {
        finding("divergence", at, "the lanes of warp %u wait at eight places", w->number);
        thread_fail();
    }
    struct meeting *m = &w->meetings[w->num_meetings++];
    m->operation = operation;
    m->mask = mask;
    m->arrived = 0;
    m->at = at;
    return m;
}

void meet(int operation, unsigned mask, void *operands, place at) {
    struct thread *t = CURRENT;
    struct warp *w = t->warp;
    mask &= w->exists;
    if (!(mask >> t->lane & 1)) {
        finding("wrong mask", at, "lane %u comes to %s whose mask 0x%x does not name it", t->lane,
                operation_names[operation], mask);
        thread_fail();
    }
    if (mask & ~w->live) {
        finding("wrong mask", at, "%s names lanes 0x%x, which have ended", operation_names[operation], mask & ~w->live);
        mask &= w->live;
    }
    shadow_settle(t);
    struct meeting *m = meeting_of(w, operation, mask, at, t);
    m->arrived |= 1u << t->lane;
    m->operands[t->lane] = operands;
    if (m->arrived != mask) {
        wait_for(operation_names[operation], 0, mask, at);
        return;
    }
    finish(w, m);
    yield_warp();
}

/* Those who wait for a lane that has ended would wait for ever. */
void warp_lane_ended(struct thread *t) {
    struct warp *w = t->warp;
    for (int i = 0; i < w->num_meetings; i++)
        if (w->meetings[i].mask >> t->lane & 1) {
            struct meeting *m = &w->meetings[i];
            finding("wrong mask", m->at, "lane %u of warp %u ends while others wait for it at %s", t->lane, w->number,
                    operation_names[m->operation]);
            m->mask &= ~(1u << t->lane);
            if (m->mask && m->arrived == m->mask) {
                finish(w, m);
                i = -1;
            }
        }
}

/* ---- what moves no memory ---- */

struct shuffle {
    unsigned value, lane, width, result;
    int kind;
};
struct vote {
    int kind, condition;
    unsigned result;
};
struct reduction {
    int kind;
    unsigned value, result;
};

static unsigned source_lane(const struct shuffle *s, unsigned lane) {
    const unsigned first = lane / s->width * s->width, last = first + s->width - 1;
    const unsigned from = s->kind == EMU_SHUFFLE_INDEX ? first + s->lane % s->width
                          : s->kind == EMU_SHUFFLE_XOR ? lane ^ s->lane
                          : s->kind == EMU_SHUFFLE_UP  ? lane - s->lane
                                                       : lane + s->lane;
    const int inside = s->kind == EMU_SHUFFLE_UP    ? (int)from >= (int)first
                       : s->kind == EMU_SHUFFLE_XOR ? from <= last
                                                    : from >= first && from <= last;
    return inside ? from : lane;
}

static void shuffle(struct warp *w, struct meeting *m) {
    (void)w;
    for (unsigned left = m->mask; left; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        struct shuffle *s = m->operands[lane];
        const unsigned from = source_lane(s, lane) % LANES;
        if (m->mask >> from & 1)
            s->result = ((struct shuffle *)m->operands[from])->value;
        else
            finding("wrong mask", m->at,
                    "lane %u takes the value of lane %u, which the shuffle's mask 0x%x does not name", lane, from,
                    m->mask);
    }
}

static void vote(struct meeting *m) {
    unsigned ballot = 0;
    for (unsigned left = m->mask; left; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        ballot |= (unsigned)(((struct vote *)m->operands[lane])->condition != 0) << lane;
    }
    for (unsigned left = m->mask; left; left &= left - 1) {
        struct vote *v = m->operands[__builtin_ctz(left)];
        v->result = v->kind == EMU_ANY ? ballot != 0 : v->kind == EMU_ALL ? ballot == m->mask : ballot;
    }
}

static unsigned combine(int kind, unsigned a, unsigned b) {
    switch (kind) {
    case EMU_MIN_S32: return (int)a < (int)b ? a : b;
    case EMU_MAX_S32: return (int)a < (int)b ? b : a;
    case EMU_MIN_U32: return a < b ? a : b;
    case EMU_MAX_U32: return a < b ? b : a;
    case EMU_ADD: return a + b;
    case EMU_BITS_AND: return a & b;
    case EMU_BITS_OR: return a | b;
    default: return a ^ b;
    }
}

static void reduce(struct meeting *m) {
    const struct reduction *first = m->operands[__builtin_ctz(m->mask)];
    unsigned sum = first->value;
    for (unsigned left = m->mask & (m->mask - 1); left; left &= left - 1)
        sum = combine(first->kind, sum, ((struct reduction *)m->operands[__builtin_ctz(left)])->value);
    for (unsigned left = m->mask; left; left &= left - 1)
        ((struct reduction *)m->operands[__builtin_ctz(left)])->result = sum;
}

static void elect(struct meeting *m) {
    for (unsigned left = m->mask; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        *(unsigned *)m->operands[lane] = lane == __builtin_ctz(m->mask);
    }
}

void warp_execute(struct warp *w, struct meeting *m) {
    switch (m->operation) {
    case OP_SYNCWARP:
        if (emulated_settings_now.check)
            clocks_join_warp(w, m->mask);
        break;
    case OP_SHUFFLE: shuffle(w, m); break;
    case OP_VOTE: vote(m); break;
    case OP_REDUCE: reduce(m); break;
    case OP_ELECT: elect(m); break;
    default: data_execute(w, m);
    }
}

void emu_syncwarp(unsigned mask, EMU_PLACE) { meet(OP_SYNCWARP, mask, NULL, HERE); }

unsigned emu_shuffle(int kind, unsigned mask, unsigned value, unsigned lane, unsigned width, EMU_PLACE) {
    struct shuffle s = {value, lane, width ? width : LANES, value, kind};
    meet(OP_SHUFFLE, mask, &s, HERE);
    return s.result;
}
unsigned emu_vote(int kind, unsigned mask, int condition, EMU_PLACE) {
    struct vote v = {kind, condition, 0};
    meet(OP_VOTE, mask, &v, HERE);
    return v.result;
}
unsigned emu_reduce(int kind, unsigned mask, unsigned value, EMU_PLACE) {
    struct reduction r = {kind, value, 0};
    meet(OP_REDUCE, mask, &r, HERE);
    return r.result;
}
unsigned emu_elect(unsigned mask, EMU_PLACE) {
    unsigned elected = 0;
    meet(OP_ELECT, mask, &elected, HERE);
    return elected;
}
