/* companion_kept.c: choices that were measured, and a thread's last plan of each operation. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "companions/companion.h"
#include "tuning/store.h"
#include "tuning/wish.h"

fdm_status companion_key(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                         char *key) {
    char class[COMPANION_CLASS_BYTES + 32], words[COMPANION_CLASS_BYTES];
    operation->name_class(problem, words);
    snprintf(class, sizeof class, "%s: %s", operation->name, words);
    return tuning_key_of(device, class, 1, key);
}

/* The way that was measured best, where the kernel still has it. */
static fdm_status find_way(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                           const struct tuning_choice *best, struct fdm_companion_choice *choice) {
    fdm_status status = FDM_OK;
    for (int32_t n = 0; !status; n++)
        if (!(status = companion_variant(operation, device, problem, best->kernel, n, choice)) &&
            strcmp(choice->choice, best->choice) == 0)
            return FDM_OK;
    return status == FDM_ERROR_UNSUPPORTED
               ? status
               : error_set(FDM_ERROR_UNSUPPORTED, "%s has no way %s for this problem", best->kernel, best->choice);
}

static void apply_kept(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                       struct fdm_companion_choice *choice) {
    char key[TUNING_KEY_BYTES], maker[TUNING_MAKER_BYTES], day[32], words[256];
    struct tuning_entry entry;
    struct fdm_companion_choice tuned;
    if (companion_key(operation, device, problem, key) || tuning_maker(device, maker) ||
        !tuning_find(key, maker, &entry) || entry.num_best == 0)
        return;
    const size_t used = strlen(choice->reason), left = sizeof choice->reason - used;
    const struct tuning_choice *best = &entry.best[entry.chosen < 0 ? 0 : entry.chosen];
    tuning_name_day(entry.date, day, sizeof day);
    if (entry.chosen < 0) {
        snprintf(choice->reason + used, left, "; measured %s: no other way is faster than %s", day, entry.rule.choice);
    } else if (find_way(operation, device, problem, best, &tuned)) {
        snprintf(choice->reason + used, left, "; rule: %s, measured %s, is passed over: %s", best->choice, day,
                 fdm_last_error());
    } else {
        snprintf(words, sizeof words, "measured %s: %.1f %% less time than %s %s", day,
                 100 * (1 - best->seconds / entry.rule.seconds), entry.rule.kernel, entry.rule.choice);
        *choice = tuned;
        snprintf(choice->reason, sizeof choice->reason, "%s", words);
    }
}

/* Planning and looking for a kept choice cost microseconds that the same call again need not spend. */
static _Thread_local struct kept_plan {
    const struct companion_operation *operation;
    fdm_device_id device;
    int wish;
    uint32_t generation;
    char problem[COMPANION_PROBLEM_BYTES];
    struct fdm_companion_choice choice;
} kept_plans[2];

static struct kept_plan *place_of(const struct companion_operation *operation) {
    return kept_plans[0].operation == operation || !kept_plans[0].operation ? &kept_plans[0] : &kept_plans[1];
}

fdm_status companion_plan(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                          const char *kernel, int64_t tune, struct fdm_companion_choice *choice, int *measures) {
    struct kept_plan *kept = place_of(operation);
    const uint32_t generation = tuning_generation();
    int wish;
    fdm_status status = tuning_wish(tune, kernel != NULL || !device->present, &wish);
    *measures = wish == TUNING_MEASURES;
    if (!status && kept->operation == operation && !kernel && device->present && kept->wish == wish &&
        kept->device.index == device->id.index && kept->generation == generation &&
        memcmp(kept->problem, problem, operation->problem_bytes) == 0) {
        *choice = kept->choice;
        return FDM_OK;
    }
    if (status || (status = tuning_check_older_names()) ||
        (status = companion_choose(operation, device, problem, kernel, choice)))
        return status;
    if (wish)
        apply_kept(operation, device, problem, choice);
    if (!kernel && device->present) {
        *kept = (struct kept_plan){operation, device->id, wish, generation, {0}, *choice};
        memcpy(kept->problem, problem, operation->problem_bytes);
    }
    return FDM_OK;
}
