/* balance.c: swap search: which blocks of rows go to which rank, so that all have the same work and few keys travel.
 *
 * It begins contiguous. While the heaviest rank is above the mean, it exchanges one of its blocks with a lighter one of
 * another rank: the exchange with the least growth of fetched keys for the balance gained. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "parallel/layout.h"

enum {
    PAIRS_LOOKED_AT = 48, /* of two ranks' blocks, by how well each evens them out */
    RANKS_LOOKED_AT = 8   /* the lightest */
};

struct search {
    int64_t blocks, key_blocks, words; /* words: of 64 blocks of keys */
    int32_t ranks;
    double *work;   /* [blocks] */
    uint64_t *seen; /* [blocks][words]: blocks of keys that some row of the block sees */
    int32_t *part;  /* [blocks] */
    double *loads;  /* [ranks] */
    int32_t *users; /* [ranks][key_blocks]: how many of the rank's blocks see it */
    uint64_t *any;  /* [ranks][words]: users above 0 */
    uint64_t *one;  /* [ranks][words]: users of 1 */
};

static int bit(const uint64_t *words, int64_t n) { return (int)(words[n / 64] >> n % 64 & 1); }

static void set_bit(uint64_t *words, int64_t n, int value) {
    const uint64_t mask = 1ull << n % 64;
    words[n / 64] = value ? words[n / 64] | mask : words[n / 64] & ~mask;
}

/* ---- blocks ---- */

static void add_work(struct search *s, const fdm_rank_mask *mask, double weight, int64_t block, int64_t *sums) {
    rank_mask_sums(mask, sums);
    for (int64_t b = 0; b < s->blocks; b++) {
        const int64_t end = (b + 1) * block < mask->seqlen_q ? (b + 1) * block : mask->seqlen_q;
        s->work[b] += weight * (double)(sums[end] - sums[b * block]);
    }
}

static void add_seen(struct search *s, const fdm_rank_mask *mask, int64_t block, int32_t *steps) {
    const int64_t lists = mask->num_lists ? mask->num_lists : 1;
    for (int64_t k = 0; k < s->key_blocks; k++) {
        const int64_t end = (k + 1) * block < mask->seqlen_k ? (k + 1) * block : mask->seqlen_k;
        int64_t seen = 0;
        memset(steps, 0, (size_t)(s->blocks + 1) * sizeof *steps);
        for (int64_t list = 0; list < lists; list++)
            for (int64_t j = k * block; j < end; j++) {
                const fdm_range rows = rank_mask_rows(mask, list, j);
                if (rows.first < rows.end) {
                    steps[rows.first / block]++;
                    steps[(rows.end - 1) / block + 1]--;
                }
            }
        for (int64_t b = 0; b < s->blocks; b++)
            if ((seen += steps[b]) > 0)
                set_bit(s->seen + b * s->words, k, 1);
    }
}

/* ---- ranks ---- */

static void count_block(struct search *s, int32_t rank, int64_t block, int32_t sign) {
    const uint64_t *seen = s->seen + block * s->words;
    for (int64_t k = 0; k < s->key_blocks; k++)
        if (bit(seen, k)) {
            const int32_t users = s->users[rank * s->key_blocks + k] += sign;
            set_bit(s->any + rank * s->words, k, users > 0);
            set_bit(s->one + rank * s->words, k, users == 1);
        }
}

/* How many more blocks of keys of others the rank needs; blocks of rows bring their own keys. */
static int64_t growth(const struct search *s, int32_t rank, int64_t goes, int64_t comes) {
    const uint64_t *any = s->any + rank * s->words, *one = s->one + rank * s->words;
    const uint64_t *leaving = s->seen + goes * s->words, *coming = s->seen + comes * s->words;
    int64_t more = 0;
    for (int64_t w = 0; w < s->words; w++)
        more += __builtin_popcountll(coming[w] & ~any[w]) - __builtin_popcountll(leaving[w] & one[w] & ~coming[w]);
    return more + (goes < s->key_blocks && bit(any, goes)) - (comes < s->key_blocks && bit(any, comes));
}

struct exchange {
    double cost, gained;
    int64_t mine, yours;
    int32_t light;
};

/* More balance first; then the earlier blocks. */
static int evens_better(const struct exchange *a, const struct exchange *b) {
    return a->gained != b->gained ? a->gained > b->gained
           : a->mine != b->mine   ? a->mine < b->mine
                                  : a->yours < b->yours;
}

static int costs_less(const struct exchange *a, const struct exchange *b) {
    return a->cost != b->cost ? a->cost < b->cost : a->mine != b->mine ? a->mine < b->mine : a->yours < b->yours;
}

/* Keeps the best ones, sorted. */
static int32_t keep(struct exchange *kept, int32_t count, const struct exchange *more) {
    if (count == PAIRS_LOOKED_AT && !evens_better(more, &kept[count - 1]))
        return count;
    int32_t at = count < PAIRS_LOOKED_AT ? count : count - 1;
    for (; at > 0 && evens_better(more, &kept[at - 1]); at--)
        kept[at] = kept[at - 1];
    kept[at] = *more;
    return count < PAIRS_LOOKED_AT ? count + 1 : count;
}

static struct exchange best_of(const struct search *s, int32_t heavy, int32_t light) {
    struct exchange kept[PAIRS_LOOKED_AT], best = {.cost = HUGE_VAL, .mine = -1, .yours = -1};
    const double apart = s->loads[heavy] - s->loads[light];
    int32_t count = 0;
    for (int64_t mine = 0; mine < s->blocks; mine++)
        for (int64_t yours = 0; s->part[mine] == heavy && yours < s->blocks; yours++) {
            const double moved = s->work[mine] - s->work[yours];
            if (s->part[yours] != light || !(moved > 0 && moved < apart))
                continue;
            const double gained = moved < apart - moved ? moved : apart - moved;
            const struct exchange pair = {.gained = gained, .mine = mine, .yours = yours, .light = light};
            count = keep(kept, count, &pair);
        }
    for (int32_t i = 0; i < count; i++) {
        struct exchange *e = &kept[i];
        const int64_t more = growth(s, heavy, e->mine, e->yours) + growth(s, light, e->yours, e->mine);
        e->cost = ((double)(more > 0 ? more : 0) + 1) / e->gained;
        best = costs_less(e, &best) ? *e : best;
    }
    return best;
}

static void do_exchange(struct search *s, int32_t heavy, const struct exchange *e) {
    const struct {
        int32_t rank;
        int64_t goes, comes;
    } sides[] = {{heavy, e->mine, e->yours}, {e->light, e->yours, e->mine}};
    for (int i = 0; i < 2; i++) {
        count_block(s, sides[i].rank, sides[i].goes, -1);
        count_block(s, sides[i].rank, sides[i].comes, 1);
        s->part[sides[i].comes] = sides[i].rank;
        s->loads[sides[i].rank] += s->work[sides[i].comes] - s->work[sides[i].goes];
    }
}

/* The lightest other ranks, lighter first. */
static int32_t lightest(const struct search *s, int32_t heavy, int32_t list[RANKS_LOOKED_AT]) {
    int32_t count = 0;
    for (int32_t r = 0; r < s->ranks; r++) {
        if (r == heavy || (count == RANKS_LOOKED_AT && !(s->loads[r] < s->loads[list[count - 1]])))
            continue;
        int32_t at = count < RANKS_LOOKED_AT ? count++ : count - 1;
        for (; at > 0 && s->loads[r] < s->loads[list[at - 1]]; at--)
            list[at] = list[at - 1];
        list[at] = r;
    }
    return count;
}

static void run_search(struct search *s, double tolerance) {
    double mean = 0;
    for (int64_t b = 0; b < s->blocks; b++)
        mean += s->work[b];
    mean /= s->ranks;
    for (int64_t turn = 0; turn < 4 * s->blocks; turn++) {
        struct exchange best = {.cost = HUGE_VAL, .mine = -1};
        int32_t heavy = 0, others[RANKS_LOOKED_AT];
        for (int32_t r = 1; r < s->ranks; r++)
            heavy = s->loads[r] > s->loads[heavy] ? r : heavy;
        if (s->loads[heavy] <= (1 + tolerance) * mean)
            return;
        const int32_t count = lightest(s, heavy, others);
        for (int32_t i = 0; i < count; i++) {
            const struct exchange found = best_of(s, heavy, others[i]);
            if (found.mine >= 0 && (best.mine < 0 || costs_less(&found, &best) ||
                                    (!costs_less(&best, &found) && found.light < best.light)))
                best = found;
        }
        if (best.mine < 0)
            return;
        do_exchange(s, heavy, &best);
    }
}

/* ---- memory ---- */

static void release(struct search *s) {
    void *all[] = {s->work, s->seen, s->loads, s->users, s->any, s->one};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        memory_release(all[i]);
}

static void *zeros(int64_t count, size_t bytes) {
    void *memory = memory_allocate((size_t)count * bytes);
    if (memory)
        memset(memory, 0, (size_t)count * bytes);
    return memory;
}

static int allocate(struct search *s) {
    s->work = zeros(s->blocks, sizeof *s->work);
    s->seen = zeros(s->blocks * s->words, sizeof *s->seen);
    s->loads = zeros(s->ranks, sizeof *s->loads);
    s->users = zeros(s->ranks * s->key_blocks, sizeof *s->users);
    s->any = zeros(s->ranks * s->words, sizeof *s->any);
    s->one = zeros(s->ranks * s->words, sizeof *s->one);
    return s->work && s->seen && s->loads && s->users && s->any && s->one;
}

fdm_status balance_blocks(const fdm_layout_wish *w, const fdm_rank_mask *masks, int64_t block, int32_t *part) {
    const int64_t blocks = (w->total + block - 1) / block, key_blocks = (masks[0].seqlen_k + block - 1) / block;
    struct search s = {
        .blocks = blocks, .key_blocks = key_blocks, .words = (key_blocks + 63) / 64, .ranks = w->ranks, .part = part};
    int64_t *sums = memory_allocate((size_t)(w->total + 1) * sizeof *sums);
    int32_t *steps = memory_allocate((size_t)(blocks + 1) * sizeof *steps);
    const int fits = allocate(&s) && sums && steps;
    if (fits) {
        for (int32_t i = 0; i < w->num_masks; i++) {
            add_work(&s, &masks[i], w->weights ? w->weights[i] : 1, block, sums);
            add_seen(&s, &masks[i], block, steps);
        }
        for (int32_t r = 0; r < w->ranks; r++)
            for (int64_t b = blocks * r / w->ranks; b < blocks * (r + 1) / w->ranks; b++) {
                part[b] = r;
                s.loads[r] += s.work[b];
                count_block(&s, r, b, 1);
            }
        run_search(&s, w->tolerance > 0 ? w->tolerance : 0.02);
    }
    release(&s);
    memory_release(sums);
    memory_release(steps);
    return fits ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory to balance %lld blocks", (long long)blocks);
}
