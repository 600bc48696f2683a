/* archive.c: an archive is a header, a table of its entries in the order of their keys, and the entries as they lie in
 * the cache. It is opened anew for each kernel that no cache has: a file that is replaced meanwhile is never mixed. */
#include "cuda/archive.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/settings.h"
#include "base/struct_bytes.h"
#include "cuda/cache_folder.h"
#include "system/system.h"

struct header {
    char magic[8], version[24]; /* version: of the library, 0 behind it */
    uint64_t count, checksum;   /* of the header, with a checksum of 0, and of the table */
};
struct row {
    struct cache_key key;
    uint64_t begin, bytes; /* of the entry in the file */
};
_Static_assert(sizeof(struct header) == 48 && sizeof(struct row) == 40, "no padding");
static const char magic[8] = "fdmkar1";
enum { ROWS_MAX = 1 << 20 };

static uint64_t checksum_of(const struct header *header, const struct row *rows) {
    struct header plain = *header;
    plain.checksum = 0;
    return cache_checksum(cache_checksum(0, &plain, sizeof plain), rows, (size_t)header->count * sizeof *rows);
}

/* ---- reading ---- */

static const char damaged[] = "is damaged";

/* The table, to be released; NULL, and `why` says why, or is NULL where memory is short. */
static struct row *read_table(FILE *file, int64_t bytes, uint64_t *count, const char **why) {
    struct header header;
    *why = damaged;
    if (fread(&header, sizeof header, 1, file) != 1 || memcmp(header.magic, magic, sizeof magic) != 0 ||
        header.count > ROWS_MAX || (int64_t)(sizeof header + header.count * sizeof(struct row)) > bytes)
        return NULL;
    if (strncmp(header.version, FDM_VERSION, sizeof header.version) != 0) {
        *why = "is of another version of flash_dmattn";
        return NULL;
    }
    struct row *rows = memory_allocate((size_t)header.count * sizeof *rows + 1);
    if (!rows) {
        *why = NULL;
        return NULL;
    }
    if (fread(rows, sizeof *rows, (size_t)header.count, file) == header.count &&
        checksum_of(&header, rows) == header.checksum) {
        *count = header.count;
        *why = NULL;
        return rows;
    }
    memory_release(rows);
    return NULL;
}

/* The first of the rows whose key's halves are not below these. */
static uint64_t find_row(const struct row *rows, uint64_t count, const struct cache_key *key) {
    uint64_t first = 0;
    while (count > 0) {
        const uint64_t half = count / 2;
        const struct cache_key *at = &rows[first + half].key;
        const int below = at->half[0] < key->half[0] || (at->half[0] == key->half[0] && at->half[1] < key->half[1]);
        first += below ? half + 1 : 0;
        count = below ? count - half - 1 : half;
    }
    return first;
}

/* 1: found; 0: not. `why` receives a clause where the archive is damaged. */
static int search(FILE *file, int64_t bytes, const struct cache_key *wanted, int32_t max_major,
                  struct cuda_binary *binary, const char **why) {
    uint64_t count = 0;
    int found = 0;
    struct row *rows = read_table(file, bytes, &count, why);
    for (uint64_t n = rows ? find_row(rows, count, wanted) : 0; n < count && !found; n++) {
        struct cache_key key;
        if (!cache_is_wanted(&rows[n].key, wanted))
            break;
        if (rows[n].begin > (uint64_t)bytes || rows[n].bytes > (uint64_t)bytes - rows[n].begin ||
            fseek(file, (long)rows[n].begin, SEEK_SET) || !cache_read_entry(file, &key, binary)) {
            *why = damaged;
            continue;
        }
        found = cache_is_wanted(&key, wanted) && (max_major == 0 || binary->compiler_major <= max_major);
        if (!found)
            cuda_binary_release(binary);
    }
    memory_release(rows);
    return found;
}

/* trusted: 1: whose it is was decided by who installed this library beside it. */
static int load_from(const char *path, int trusted, const struct cache_key *wanted, int32_t max_major,
                     struct cuda_binary *binary) {
    struct system_file_facts facts;
    const char *why = NULL;
    FILE *file = system_open_file(path, &facts);
    if (!file) {
        if (!trusted) /* who names one wants it */
            cache_log_ignored(path, "cannot be read");
        return 0;
    }
    const int found =
        (trusted || !cache_is_foreign(&facts, path)) && search(file, facts.bytes, wanted, max_major, binary, &why);
    if (why)
        cache_log_ignored(path, why);
    fclose(file);
    return found;
}

/* "FOLDER/kernels-sm_90.fdm" of the folder that this library lies in. */
static int path_beside(const char *arch, char *path, size_t size) {
    if (!system_path_of(magic, path, size))
        return 0;
    char *slash = strrchr(path, '/');
    const size_t folder = slash ? (size_t)(slash - path) + 1 : 0;
    const int digits = (int)strcspn(arch, "af"); /* "sm_90a" and "sm_100f" lie with their architecture's */
    const int written = snprintf(path + folder, size - folder, "kernels-%.*s.fdm", digits, arch);
    return written > 0 && (size_t)written < size - folder;
}

int archive_load(const struct cache_key *key, const char *arch, int32_t max_major, struct cuda_binary *binary) {
    char path[1024];
    struct cache_key any = *key;
    any.compiler = 0;
    const char *named = setting_get(SETTING_KERNEL_ARCHIVE);
    return (named && load_from(named, 0, &any, max_major, binary)) ||
           (path_beside(arch, path, sizeof path) && load_from(path, 1, &any, max_major, binary));
}

/* ---- writing ---- */

struct packing {
    struct row *rows;
    char *entries;
    uint64_t count, bytes; /* of entries */
    uint64_t rows_room, bytes_room;
};

static int compare_rows(const void *a, const void *b) {
    const struct cache_key *x = &((const struct row *)a)->key, *y = &((const struct row *)b)->key;
    for (int n = 0; n < 2; n++)
        if (x->half[n] != y->half[n])
            return x->half[n] < y->half[n] ? -1 : 1;
    return (x->compiler > y->compiler) - (x->compiler < y->compiler);
}

/* What the folder's files would take, into rows_room and bytes_room. */
static int measure(const struct system_folder *folder, struct packing *p) {
    struct system_walk walk;
    if (!system_begin_walk(&walk, folder))
        return 0;
    while (cache_walk_on(&walk)) {
        p->rows_room++;
        p->bytes_room += (uint64_t)walk.facts.bytes;
    }
    system_end_walk(&walk);
    return p->rows_room > 0 && p->rows_room <= ROWS_MAX;
}

/* Entries that are whole and the user's; what came into the folder meanwhile stays out where there is no room. */
static void collect(const struct system_folder *folder, struct packing *p) {
    struct system_walk walk;
    if (!system_begin_walk(&walk, folder))
        return;
    while (cache_walk_on(&walk) && p->count < p->rows_room) {
        struct cache_key key;
        struct cuda_binary binary;
        if (!cache_read_file(folder, walk.name, 0, &key, &binary))
            continue;
        const uint64_t bytes = CACHE_HEADER_BYTES + binary.bytes;
        if (bytes <= p->bytes_room - p->bytes) {
            cache_make_header(&key, &binary, (uint8_t *)p->entries + p->bytes);
            memcpy(p->entries + p->bytes + CACHE_HEADER_BYTES, binary.code, binary.bytes);
            p->rows[p->count++] = (struct row){key, p->bytes, bytes};
            p->bytes += bytes;
        }
        cuda_binary_release(&binary);
    }
    system_end_walk(&walk);
}

/* The file's folder and its name in it. */
static int open_place(const char *path, struct system_folder *folder, char *name) {
    char above[SYSTEM_PATH_BYTES];
    struct system_file_facts facts;
    const char *last = system_last_name(path);
    size_t length = (size_t)(last - path);
    if (length > 1 && path[length - 2] != ':' && path[length - 1] != ':')
        length--; /* the divider, which a root keeps */
    if (!*last || strlen(last) >= SYSTEM_NAME_BYTES - 8 || length >= sizeof above)
        return 0;
    snprintf(above, sizeof above, "%.*s", (int)length, path);
    strcpy(name, last);
    return system_open_folder(folder, length ? above : ".", &facts);
}

static fdm_status write_archive(const char *path, struct packing *p, int64_t *bytes) {
    struct system_folder folder;
    char name[SYSTEM_NAME_BYTES];
    const size_t head_bytes = sizeof(struct header) + (size_t)p->count * sizeof(struct row);
    struct header header = {.count = p->count, .version = FDM_VERSION};
    memcpy(header.magic, magic, sizeof magic);
    for (uint64_t n = 0; n < p->count; n++)
        p->rows[n].begin += head_bytes;
    header.checksum = checksum_of(&header, p->rows);
    char *head = memory_allocate(head_bytes);
    if (!head)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for an archive of %llu kernels",
                         (unsigned long long)p->count);
    memcpy(head, &header, sizeof header);
    memcpy(head + sizeof header, p->rows, (size_t)p->count * sizeof *p->rows);
    int written = 0;
    if (system_may_write(head_bytes + (size_t)p->bytes) && open_place(path, &folder, name)) {
        written = system_replace_in(&folder, name, head, head_bytes, p->entries, (size_t)p->bytes);
        system_close_folder(&folder);
    }
    memory_release(head);
    *bytes = (int64_t)(head_bytes + p->bytes);
    return written ? FDM_OK : error_set(FDM_ERROR_SYSTEM, "the archive %s cannot be written", path);
}

fdm_status fdm_cache_pack(const char *path, int64_t *num_entries, int64_t *bytes) {
    struct system_folder folder;
    struct packing p = {0};
    int64_t written = 0;
    fdm_status status = cache_check_settings();
    if (status)
        return status;
    if (!path || !*path)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "an archive of kernels needs a path");
    if (!cache_folder_open(0, &folder))
        return error_set(FDM_ERROR_UNSUPPORTED, "there is no cache folder of the user's to pack");
    if (!measure(&folder, &p))
        status = error_set(FDM_ERROR_UNSUPPORTED, "the cache folder %s has no compiled kernels", folder.path);
    if (!status) {
        p.rows = memory_allocate((size_t)p.rows_room * sizeof *p.rows);
        p.entries = memory_allocate((size_t)p.bytes_room + 1);
        if (!p.rows || !p.entries)
            status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for an archive of %llu kernels",
                               (unsigned long long)p.rows_room);
    }
    if (!status) {
        collect(&folder, &p);
        qsort(p.rows, (size_t)p.count, sizeof *p.rows, compare_rows);
        status = p.count ? write_archive(path, &p, &written)
                         : error_set(FDM_ERROR_UNSUPPORTED, "the cache folder %s has no whole entry", folder.path);
    }
    system_close_folder(&folder);
    memory_release(p.rows);
    memory_release(p.entries);
    if (num_entries)
        *num_entries = (int64_t)p.count;
    if (bytes)
        *bytes = written;
    return status;
}
