/* store.c: measured choices in memory and in files. */
#include "tuning/store.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/memory.h"
#include "base/settings.h"
#include "cuda/cache.h"
#include "cuda/cache_folder.h"

static const char subfolder[] = "tuned", suffix[] = ".tune";
enum { STORE_BYTES_MAX = 16 << 20 };

static void name_of(const char *key, char name[SYSTEM_NAME_BYTES]) {
    const uint64_t half = cache_checksum(0, key, strlen(key)), other = cache_checksum(1, key, strlen(key));
    snprintf(name, SYSTEM_NAME_BYTES, "%016llx%016llx%s", (unsigned long long)half, (unsigned long long)other, suffix);
}

static void say_ignored(const char *name, const char *why) {
    int log;
    if (!setting_read_flag(SETTING_LOG, &log) && log)
        fprintf(stderr, "flash_dmattn: the measured choice in %s is not used: it %s\n", name, why);
}

/* ---- files ---- */

static int open_folder(int make, struct system_folder *folder) {
    const char *foreign;
    if (cache_folder_open_below(subfolder, make, folder, &foreign))
        return 1;
    if (foreign)
        say_ignored("the cache folder", foreign);
    return 0;
}

/* NULL and the entry, or why it is not used; "" where there is none. */
static const char *read_file(const struct system_folder *folder, const char *name, int used,
                             struct tuning_entry *entry) {
    char line[TUNING_LINE_BYTES];
    struct system_file_facts facts;
    FILE *file = system_open_in(folder, name, &facts);
    if (!file)
        return "";
    const size_t length = fread(line, 1, sizeof line, file);
    const char *why = facts.foreign ? facts.foreign
                      : length == 0 || line[length - 1] != '\n' || !tuning_read_line(line, length - 1, entry)
                          ? "is damaged"
                          : NULL;
    if (!why && used)
        system_touch(file);
    fclose(file);
    return why;
}

static int load(const char *key, const char *maker, struct tuning_entry *entry) {
    char name[SYSTEM_NAME_BYTES];
    struct system_folder folder;
    if (!open_folder(0, &folder))
        return 0;
    name_of(key, name);
    const char *why = read_file(&folder, name, 1, entry);
    if (!why && strcmp(entry->key, key) != 0)
        why = "is of another class";
    if (!why && strcmp(entry->maker, maker) != 0)
        why = "was measured by another version of the library, its kernels, the driver or NVRTC";
    if (why && *why)
        say_ignored(name, why);
    system_close_folder(&folder);
    return !why;
}

static int save(const struct tuning_entry *entry) {
    char line[TUNING_LINE_BYTES], name[SYSTEM_NAME_BYTES];
    struct system_folder folder;
    tuning_write_line(entry, line);
    const size_t length = strlen(line);
    if (!system_may_write(length + 1) || !open_folder(1, &folder))
        return 0;
    name_of(entry->key, name);
    const int written = system_replace_in(&folder, name, line, length, "\n", 1);
    if (written)
        cache_evict(&folder, suffix, STORE_BYTES_MAX);
    system_close_folder(&folder);
    return written;
}

void tuning_visit(int (*visit)(void *argument, const struct tuning_entry *entry, const char *name, const char *why),
                  void *argument) {
    struct system_folder folder;
    struct system_walk walk;
    struct tuning_entry entry;
    if (!open_folder(0, &folder))
        return;
    const int walks = system_begin_walk(&walk, &folder);
    int done = !walks;
    while (!done && cache_walk_to(&walk, suffix)) {
        const char *why = strstr(walk.name, suffix)[sizeof suffix - 1] ? "" : read_file(&folder, walk.name, 0, &entry);
        done = (!why || *why) && visit(argument, why ? NULL : &entry, walk.name, why);
    }
    if (walks)
        system_end_walk(&walk);
    system_close_folder(&folder);
}

int64_t tuning_forget_files(void) {
    struct system_folder folder;
    struct system_walk walk;
    int64_t count = 0, left = 0;
    if (open_folder(0, &folder)) {
        const int walks = system_begin_walk(&walk, &folder);
        while (walks && cache_walk_to(&walk, suffix))
            system_remove_in(&folder, walk.name) ? count++ : left++;
        if (walks)
            system_end_walk(&walk);
        system_close_folder(&folder);
    }
    tuning_forget_memory();
    return left ? -1 : count;
}

/* ---- memory ---- */

/* A place for each class that was asked for, found by its key's hash; a class that falls on a taken place takes it. */
enum { PLACES = 256 };
static struct {
    pthread_mutex_t lock;
    struct place {
        uint64_t hash[2];
        struct tuning_entry *entry; /* NULL: there is none */
    } places[PLACES];
} memory = {.lock = PTHREAD_MUTEX_INITIALIZER};
static atomic_uint generation = 1;

uint32_t tuning_generation(void) { return atomic_load_explicit(&generation, memory_order_relaxed); }

/* The place of a key, emptied where it was another's; *known: 1 where it was this one's. Under the lock. */
static struct place *place_of(const char *key, const char *maker, int *known) {
    const size_t length = strlen(key);
    const uint64_t first = cache_checksum(cache_checksum(2, maker, strlen(maker)), key, length),
                   second = cache_checksum(first, key, length) | 1;
    struct place *place = &memory.places[first % PLACES];
    *known = place->hash[0] == first && place->hash[1] == second;
    if (!*known) {
        memory_release(place->entry);
        *place = (struct place){{first, second}, NULL};
    }
    return place;
}

static int remember(struct place *place, const struct tuning_entry *entry) {
    if (!place->entry)
        place->entry = memory_allocate(sizeof *place->entry);
    if (place->entry)
        *place->entry = *entry;
    return place->entry != NULL;
}

int tuning_find(const char *key, const char *maker, struct tuning_entry *entry) {
    int known;
    pthread_mutex_lock(&memory.lock);
    struct place *place = place_of(key, maker, &known);
    if (!known && load(key, maker, entry))
        remember(place, entry);
    const int found = place->entry != NULL;
    if (found)
        *entry = *place->entry;
    pthread_mutex_unlock(&memory.lock);
    return found;
}

void tuning_remember(const struct tuning_entry *entry) {
    int known;
    pthread_mutex_lock(&memory.lock);
    remember(place_of(entry->key, entry->maker, &known), entry);
    pthread_mutex_unlock(&memory.lock);
    atomic_fetch_add(&generation, 1);
}

int tuning_keep(const struct tuning_entry *entry) {
    tuning_remember(entry);
    return save(entry);
}

void tuning_forget_memory(void) {
    pthread_mutex_lock(&memory.lock);
    for (int i = 0; i < PLACES; i++) {
        memory_release(memory.places[i].entry);
        memory.places[i] = (struct place){{0, 0}, NULL};
    }
    pthread_mutex_unlock(&memory.lock);
    atomic_fetch_add(&generation, 1);
}
