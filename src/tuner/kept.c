/* kept.c: the list of kept choices, and files of them for other machines. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/struct_bytes.h"
#include "cuda/cache_folder.h"
#include "device/device.h"
#include "system/streams.h"
#include "tuning/store.h"

static fdm_status check_folder(void) {
    char path[CACHE_FOLDER_BYTES];
    const fdm_status status = cache_check_settings();
    return status ? status : fdm_cache_folder(path, sizeof path);
}

/* ---- the list ---- */

struct wanted {
    int32_t index;
    fdm_kept_choice *found; /* NULL: not yet */
    fdm_kept_choice room;
};

/* Of devices that are here, whether the maker is this process'. */
static int is_older(const struct tuning_entry *entry) {
    char maker[TUNING_MAKER_BYTES];
    fdm_device device;
    const int cuda = strncmp(entry->key, "cpu", 3) != 0;
    return !device_facts(cuda ? FDM_CUDA : FDM_CPU, 0, &device) && !tuning_maker(&device, maker) &&
           strcmp(maker, entry->maker) != 0;
}

static int take(void *argument, const struct tuning_entry *entry, const char *name, const char *why) {
    struct wanted *w = argument;
    if (w->index-- > 0)
        return 0;
    w->found = &w->room;
    fdm_kept_choice *c = &w->room;
    snprintf(c->file, sizeof c->file, "%s", name);
    snprintf(c->ignored, sizeof c->ignored, "%s", why ? why : "");
    if (!entry)
        return 1;
    const struct tuning_choice *best = entry->chosen < 0 ? &entry->rule : &entry->best[entry->chosen];
    memcpy(c->kernel, best->kernel, sizeof c->kernel);
    memcpy(c->choice, best->choice, sizeof c->choice);
    memcpy(c->rule_kernel, entry->rule.kernel, sizeof c->rule_kernel);
    memcpy(c->rule_choice, entry->rule.choice, sizeof c->rule_choice);
    memcpy(c->key, entry->key, sizeof c->key);
    memcpy(c->maker, entry->maker, sizeof c->maker);
    c->num_samples = best->num_samples;
    c->num_threads = best->num_threads;
    c->seconds = best->seconds;
    c->rule_seconds = entry->rule.seconds;
    c->date = entry->date;
    if (is_older(entry))
        snprintf(c->ignored, sizeof c->ignored,
                 "was measured by another version of the library, its kernels, the "
                 "driver or NVRTC");
    return 1;
}

fdm_status fdm_tune_kept(int32_t index, fdm_kept_choice *choice) {
    struct wanted w = {.index = index < 0 ? 0 : index};
    fdm_status status = STRUCT_CHECK(fdm_kept_choice, choice);
    if (status || (status = check_folder()))
        return status;
    if (index >= 0)
        tuning_visit(take, &w);
    return w.found
               ? STRUCT_WRITE(fdm_kept_choice, choice, w.found)
               : error_set(FDM_ERROR_INVALID_ARGUMENT, "index is %d; the list of kept choices has none of it", index);
}

/* ---- files for other machines ---- */

struct export {
    FILE *file;
    int64_t count;
    int failed;
};

static int export_one(void *argument, const struct tuning_entry *entry, const char *name, const char *why) {
    struct export *e = argument;
    char line[TUNING_LINE_BYTES];
    (void)name, (void)why;
    if (!entry)
        return 0;
    tuning_write_line(entry, line);
    const size_t length = strlen(line);
    line[length] = '\n';
    e->failed = fwrite(line, 1, length + 1, e->file) != length + 1;
    e->count++;
    return e->failed;
}

fdm_status fdm_tune_export(const char *path, int64_t *count) {
    if (!path || !count)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", path ? "count" : "path");
    const fdm_status status = check_folder();
    if (status)
        return status;
    struct system_output output;
    struct export e = {.file = system_look_at_output(path, &output) ? system_begin_output(&output) : NULL};
    if (e.file) {
        errno = 0;
        tuning_visit(export_one, &e);
        e.failed = !system_end_output(&output, e.file, e.failed ? errno : 0);
    }
    if (!e.file || e.failed)
        return error_set(FDM_ERROR_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
    *count = e.count;
    return FDM_OK;
}

fdm_status fdm_tune_import(const char *path, int64_t *count) {
    char line[TUNING_LINE_BYTES];
    struct tuning_entry entry;
    if (!path || !count)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", path ? "count" : "path");
    fdm_status status = check_folder();
    FILE *file = status ? NULL : system_open_text(path);
    if (!file)
        return status ? status : error_set(FDM_ERROR_SYSTEM, "%s cannot be read: %s", path, strerror(errno));
    *count = 0;
    while (!status && fgets(line, sizeof line, file)) {
        const size_t length = strcspn(line, "\n");
        if (!line[length] || !tuning_read_line(line, length, &entry))
            status = error_set(FDM_ERROR_INVALID_ARGUMENT, "%s:%lld: it is no kept choice, or is damaged", path,
                               (long long)*count + 1);
        else if (!tuning_keep(&entry))
            status = error_set(FDM_ERROR_SYSTEM, "%s:%lld: it cannot be kept in the cache folder", path,
                               (long long)*count + 1);
        else
            ++*count;
    }
    fclose(file);
    return status;
}

fdm_status fdm_tune_forget(int64_t *count) {
    const fdm_status status = check_folder();
    if (status)
        return status;
    const int64_t removed = tuning_forget_files();
    if (removed < 0)
        return error_set(FDM_ERROR_SYSTEM, "a kept choice cannot be removed: %s", strerror(errno));
    if (count)
        *count = removed;
    return FDM_OK;
}
