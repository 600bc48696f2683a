/* kept_choice.c: what a plan makes of a choice that was measured: a wish, which every refusal stands above. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "plan/plan.h"
#include "tuning/store.h"
#include "tuning/wish.h"

static void append(fdm_plan *plan, const char *first, const char *second) {
    const size_t used = strlen(plan->reason);
    snprintf(plan->reason + used, sizeof plan->reason - used, "%s%s", first, second);
}

int plan_apply_kept(const fdm_device *device, fdm_plan *plan) {
    char key[TUNING_KEY_BYTES], maker[TUNING_MAKER_BYTES], day[32], words[256];
    struct tuning_entry entry;
    fdm_plan tuned;
    if (tuning_key(device, &plan->problem, plan->num_threads, key) || tuning_maker(device, maker) ||
        !tuning_find(key, maker, &entry) || entry.num_best == 0)
        return 0;
    tuning_name_day(entry.date, day, sizeof day);
    const struct tuning_choice *best = &entry.best[entry.chosen < 0 ? 0 : entry.chosen];
    if (entry.chosen < 0) {
        snprintf(words, sizeof words, "; measured %s: no other way is faster than %s", day, entry.rule.choice);
        append(plan, words, "");
    } else if (plan_of_choice(device, &plan->problem, best->kernel, best->choice,
                              best->num_threads < plan->num_threads ? best->num_threads : plan->num_threads, &tuned)) {
        snprintf(words, sizeof words, "; rule: %s, measured %s, is passed over: ", best->choice, day);
        append(plan, words, fdm_last_error());
    } else {
        snprintf(words, sizeof words, "measured %s: %.1f %% less time than %s; ", day,
                 100 * (1 - best->seconds / entry.rule.seconds), entry.rule.choice);
        const fdm_plan rules = *plan;
        *plan = tuned;
        snprintf(plan->reason, sizeof plan->reason, "%s", words);
        append(plan, *tuned.reason ? tuned.reason : rules.reason, "");
    }
    return 1;
}
