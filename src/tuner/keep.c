/* keep.c: a measurement as an entry of the store. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tuner/tuner.h"
#include "tuning/store.h"

static struct tuning_choice choice_of(const fdm_tune_row *row) {
    struct tuning_choice c = {.seconds = row->seconds,
                              .quartile_low = row->quartile_low,
                              .quartile_high = row->quartile_high,
                              .num_samples = row->num_samples,
                              .num_threads = row->num_threads};
    memcpy(c.kernel, row->kernel, sizeof c.kernel);
    memcpy(c.choice, row->choice, sizeof c.choice);
    return c;
}

/* The fastest that were timed, the winner first of all, whatever luck the others had with fewer samples. */
static void fill_best(const struct tuner *t, int32_t best, struct tuning_entry *entry) {
    const fdm_tune_row *taken[TUNING_BEST];
    entry->chosen = best ? 0 : -1;
    while (entry->num_best < TUNING_BEST) {
        const fdm_tune_row *next = entry->num_best == 0 ? &t->candidates[best].row : NULL;
        for (int32_t i = 0; i < t->count && entry->num_best > 0; i++) {
            const fdm_tune_row *row = &t->candidates[i].row;
            int used = row->state != FDM_TUNE_TIMED;
            for (int32_t j = 0; j < entry->num_best; j++)
                used |= taken[j] == row;
            if (!used && (!next || row->seconds < next->seconds))
                next = row;
        }
        if (!next)
            return;
        taken[entry->num_best] = next;
        entry->best[entry->num_best++] = choice_of(next);
    }
}

int32_t tune_keep(const struct tuner *t, const fdm_device *device, int32_t best) {
    struct tuning_entry entry = {.date = (int64_t)time(NULL), .rule = choice_of(&t->candidates[0].row)};
    if (t->operation->key(device, t->problem, t->candidates[0].row.num_threads, entry.key) ||
        tuning_maker(device, entry.maker))
        return 0;
    fill_best(t, best, &entry);
    return tuning_keep(&entry) ? 1 : 2;
}
