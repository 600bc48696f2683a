/* first_use.c: FLASH_DMATTN_TUNE=1: a class of problems is measured when it is first called. */
#include "tuner/first_use.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/settings.h"
#include "cuda/cuda.h"
#include "device/device.h"
#include "plan/plan.h"
#include "tuning/store.h"

static void say(const char *key, const fdm_tune_result *result, fdm_status status) {
    int log;
    if (setting_read_flag(SETTING_LOG, &log) || !log)
        return;
    if (status)
        fprintf(stderr, "flash_dmattn: could not measure %s: %s\n", key, fdm_last_error());
    else
        fprintf(stderr, "flash_dmattn: measured %s: %.1f s of compilation, %.2f s of device time, %s\n", key,
                result->compile_seconds, result->device_seconds,
                result->kept == 1 ? "kept" : "kept by this process alone");
}

/* An entry of no choices: nothing is known, and no call tries again. */
static void give_up(const char *key, const char *maker) {
    struct tuning_entry none = {.chosen = -1};
    snprintf(none.key, sizeof none.key, "%s", key);
    snprintf(none.maker, sizeof none.maker, "%s", maker);
    tuning_remember(&none);
}

int tune_class(const fdm_device *device, tune_function tune, const void *problem, void *stream, const char *key) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const fdm_tune_options own = {.struct_bytes = sizeof own, .keep = 1, .stream = stream};
    fdm_tune_result result = {.struct_bytes = sizeof result};
    struct tuning_entry entry;
    char maker[TUNING_MAKER_BYTES];
    if (tuning_maker(device, maker) || tuning_find(key, maker, &entry) ||
        (device->id.type == FDM_CUDA && cuda_is_capturing(device->id.index, stream)))
        return 0;
    pthread_mutex_lock(&lock);
    if (!tuning_find(key, maker, &entry)) {
        const fdm_status status = tune(device, problem, &own, &result);
        if (status || !result.kept)
            give_up(key, maker);
        say(key, &result, status);
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

/* On the CPU, threads that the caller lends or limits are not those that would be timed. */
static int is_as_timed(const fdm_options *options) { return !options || (!options->num_threads && !options->executor); }

static fdm_status tune(const fdm_device *device, const void *problem, const fdm_tune_options *options,
                       fdm_tune_result *result) {
    return fdm_tune(device, problem, options, NULL, 0, result);
}

int tune_first_use(fdm_device_id id, const fdm_problem *problem, const fdm_options *options) {
    char key[TUNING_KEY_BYTES];
    fdm_device device;
    fdm_plan plan;
    if ((id.type == FDM_CPU && !is_as_timed(options)) || device_facts(id.type, id.index, &device) ||
        plan_by_rules(&device, problem, NULL, &plan) || tuning_key(&device, problem, plan.num_threads, key))
        return 0;
    device.struct_bytes = sizeof device;
    return tune_class(&device, tune, problem, options ? options->stream : NULL, key);
}
