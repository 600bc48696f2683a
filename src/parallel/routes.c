/* routes.c: whose rows go where, in tables that every rank makes alike. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "parallel/ranks_plan.h"

/* Calls visit() for each part of `needed` that lies in one range of an owner. */
struct visit {
    const fdm_layout *owners;
    int32_t only;             /* an owner, or -1 */
    struct route_pair *pairs; /* NULL: counted alone */
    int64_t *at;              /* by owner: where its next pair goes, or how many it has */
};

static void walk(const struct visit *v, const struct range_list *needed) {
    int64_t place = 0;
    for (int64_t n = 0; n < needed->count; n++) {
        const fdm_range want = needed->data[n];
        for (int64_t k = layout_range_at(v->owners, want.first);
             k < v->owners->num_ranges && v->owners->sorted[k].first < want.end; k++) {
            const struct owned_range *own = &v->owners->sorted[k];
            const int64_t first = own->first > want.first ? own->first : want.first;
            const int64_t end = own->end < want.end ? own->end : want.end;
            const int64_t local = own->place + first - own->first, read = place + first - want.first;
            if (v->only >= 0 && own->owner != v->only)
                continue;
            if (v->pairs)
                v->pairs[v->at[own->owner]] =
                    (struct route_pair){{local, local + end - first}, {read, read + end - first}};
            v->at[own->owner]++;
        }
        place += want.end - want.first;
    }
}

/* begin[n] holds how many pairs peer n has; becomes where they begin. */
static struct route_pair *place_pairs(int64_t *begin, int32_t ranks) {
    int64_t count = 0;
    for (int32_t r = 0; r <= ranks; r++) {
        const int64_t own = r < ranks ? begin[r] : 0;
        begin[r] = count;
        count += own;
    }
    return memory_allocate((size_t)(count + 1) * sizeof(struct route_pair));
}

static int make_receives(const fdm_layout *owners, const struct range_list *needed, struct routes *receives,
                         int64_t *at) {
    const int32_t ranks = owners->ranks;
    struct visit v = {.owners = owners, .only = -1, .at = receives->begin};
    memset(receives->begin, 0, ((size_t)ranks + 1) * sizeof *receives->begin);
    walk(&v, needed);
    if (!(receives->pairs = place_pairs(receives->begin, ranks)))
        return 0;
    memcpy(at, receives->begin, (size_t)ranks * sizeof *at);
    v.pairs = receives->pairs;
    v.at = at;
    walk(&v, needed);
    return 1;
}

static int make_sends(const fdm_layout *owners, const struct range_list *needed, int32_t rank, struct routes *sends,
                      int64_t *at) {
    const int32_t ranks = owners->ranks;
    struct visit v = {.owners = owners, .only = rank, .at = at};
    for (int32_t peer = 0; peer < ranks; peer++) {
        at[rank] = 0;
        walk(&v, &needed[peer]);
        sends->begin[peer] = at[rank];
    }
    if (!(sends->pairs = place_pairs(sends->begin, ranks)))
        return 0;
    v.pairs = sends->pairs;
    for (int32_t peer = 0; peer < ranks; peer++) {
        at[rank] = sends->begin[peer];
        walk(&v, &needed[peer]);
    }
    return 1;
}

fdm_status routes_make(const fdm_layout *owners, const struct range_list *needed, int32_t rank, struct routes *sends,
                       struct routes *receives) {
    const size_t ranks = (size_t)owners->ranks;
    int64_t *at = memory_allocate(ranks * sizeof *at);
    sends->begin = memory_allocate((ranks + 1) * sizeof *sends->begin);
    receives->begin = memory_allocate((ranks + 1) * sizeof *receives->begin);
    const int fits = at && sends->begin && receives->begin && make_receives(owners, &needed[rank], receives, at) &&
                     make_sends(owners, needed, rank, sends, at);
    memory_release(at);
    return fits ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the routes of %d ranks", owners->ranks);
}

void routes_release(struct routes *routes) {
    memory_release(routes->pairs);
    memory_release(routes->begin);
    *routes = (struct routes){0};
}

int64_t routes_rows(const struct routes *routes, int32_t peer) {
    int64_t rows = 0;
    for (int64_t i = routes->begin[peer]; i < routes->begin[peer + 1]; i++)
        rows += routes->pairs[i].read.end - routes->pairs[i].read.first;
    return rows;
}
