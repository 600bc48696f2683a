/* cache.c: one file for each compiled kernel: a header with a checksum, then the machine code. */
#define _GNU_SOURCE /* mkostemp, O_NOFOLLOW */
#include "cuda/cache.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/memory.h"
#include "cuda/cache_folder.h"

/* FNV-1a with a final mix (Fowler, Noll, Vo; the mix of SplitMix64): for names and damage, not against forgery. */
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3ull;
    return hash;
}
static uint64_t hash_text(uint64_t hash, const char *text) { return hash_bytes(hash, text, strlen(text) + 1); }
static uint64_t hash_end(uint64_t hash) {
    hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9ull;
    hash = (hash ^ hash >> 27) * 0x94d049bb133111ebull;
    return hash ^ hash >> 31;
}

struct cache_key cache_key_of(const struct cuda_compiler *compiler, const char *arch, const struct cuda_source *source,
                              const struct cuda_kernel_request *request, const char *const *options) {
    struct cache_key key;
    for (int half = 0; half < 2; half++) {
        uint64_t hash = hash_bytes(half ? 0x9e3779b97f4a7c15ull : 0xcbf29ce484222325ull, &source->closure[half], 8);
        hash = hash_text(hash, FDM_VERSION);
        hash = hash_text(hash, arch);
        hash = hash_text(hash, request->file);
        hash = hash_text(hash, request->entry);
        for (int32_t i = 0; i < request->num_constants; i++) {
            hash = hash_text(hash, request->constants[i].name);
            hash = hash_bytes(hash, &request->constants[i].value, sizeof request->constants[i].value);
        }
        for (int32_t i = 0; options[i]; i++)
            hash = hash_text(hash, options[i]);
        key.half[half] = hash_end(hash);
    }
    key.compiler = compiler ? hash_end(hash_text(0xcbf29ce484222325ull, compiler->identity)) | 1 : 0;
    return key;
}

/* ---- entries ---- */

struct entry_header {
    char magic[8];
    uint64_t key[3];
    uint64_t code_bytes, checksum; /* of the header, with a checksum of 0, and of the code */
    struct cuda_resources resources;
    int32_t compiler_major; /* the header has no padding: each of its bytes is looked at */
};
_Static_assert(sizeof(struct entry_header) == 72, "no padding");
static const char magic[8] = "fdmcub3";

static uint64_t checksum_of(const struct entry_header *header, const void *code) {
    struct entry_header plain = *header;
    plain.checksum = 0;
    const uint64_t hash = hash_bytes(0xcbf29ce484222325ull, &plain, sizeof plain);
    return hash_end(hash_bytes(hash, code, (size_t)header->code_bytes));
}

enum { PATH_BYTES = CACHE_FOLDER_BYTES + 1 + CACHE_NAME_BYTES, CODE_BYTES_MAX = 64 << 20 };

/* "HALFHALF-", then the compiler's part. */
static void entry_name(const struct cache_key *key, char *name) {
    snprintf(name, CACHE_NAME_BYTES, "%016llx%016llx-%016llx.cubin", (unsigned long long)key->half[0],
             (unsigned long long)key->half[1], (unsigned long long)key->compiler);
}
enum { NAME_PREFIX = 33 };

static int read_entry(FILE *file, const struct cache_key *key, struct cuda_binary *binary) {
    struct entry_header header;
    if (fread(&header, sizeof header, 1, file) != 1 || memcmp(header.magic, magic, sizeof magic) != 0 ||
        memcmp(header.key, key->half, sizeof key->half) != 0 || (key->compiler && header.key[2] != key->compiler) ||
        header.code_bytes == 0 || header.code_bytes > CODE_BYTES_MAX)
        return 0;
    void *code = memory_allocate((size_t)header.code_bytes);
    if (!code)
        return 0;
    if (fread(code, 1, (size_t)header.code_bytes, file) != header.code_bytes || fgetc(file) != EOF ||
        checksum_of(&header, code) != header.checksum) {
        memory_release(code);
        return 0;
    }
    *binary = (struct cuda_binary){code, (size_t)header.code_bytes, header.resources, header.compiler_major};
    return 1;
}

/* Only regular files: a pipe in the entry's place would have no end. */
static FILE *open_entry(int folder, const char *name) {
    struct stat facts;
    int file = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (file < 0)
        return NULL;
    FILE *stream = fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && !cache_is_foreign(&facts, name)
                       ? fdopen(file, "rb")
                       : NULL;
    if (!stream)
        close(file);
    return stream;
}

static int load_entry(int folder, const char *name, const struct cache_key *key, struct cuda_binary *binary) {
    static const struct timespec now[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_NOW}};
    FILE *file = open_entry(folder, name);
    if (!file)
        return 0;
    const int valid = read_entry(file, key, binary);
    if (valid)
        (void)futimens(fileno(file), now); /* used, so that it stays; in a folder of root's it may be refused */
    fclose(file);
    return valid;
}

static int load_any(int folder, const struct cache_key *key, int32_t max_major, struct cuda_binary *binary) {
    struct cache_walk walk;
    char name[CACHE_NAME_BYTES];
    int valid = 0;
    entry_name(key, name);
    if (!cache_walk_begin(&walk, folder))
        return 0;
    while (!valid && cache_walk_next(&walk)) {
        valid = strncmp(walk.name, name, NAME_PREFIX) == 0 && load_entry(folder, walk.name, key, binary);
        if (valid && max_major > 0 && binary->compiler_major > max_major) { /* the driver would not take it */
            memory_release(binary->code);
            *binary = (struct cuda_binary){0};
            valid = 0;
        }
    }
    cache_walk_end(&walk);
    return valid;
}

int cache_load(const struct cache_key *key, int32_t max_major, struct cuda_binary *binary) {
    char path[CACHE_FOLDER_BYTES], name[CACHE_NAME_BYTES];
    const int folder = cache_folder_open(0, path);
    if (folder < 0)
        return 0;
    entry_name(key, name);
    const int valid = key->compiler ? load_entry(folder, name, key, binary) : load_any(folder, key, max_major, binary);
    close(folder);
    return valid;
}

static int write_all(int file, const void *data, size_t bytes) {
    const char *at = data;
    while (bytes > 0) {
        ssize_t written = write(file, at, bytes);
        if (written <= 0)
            return 0;
        at += written;
        bytes -= (size_t)written;
    }
    return 1;
}

/* Past the process's limit on files a write would raise a signal that ends the process. */
static int may_write(size_t bytes) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

/* A temporary file beside the entry, and its name into `temporary`; -1 when there is none. */
static int make_temporary(const char *path, char *temporary, size_t size) {
    /* a random name: process numbers come again, in containers most of all, and killed processes leave files */
    snprintf(temporary, size, "%s.XXXXXX", path);
    return mkostemp(temporary, O_CLOEXEC);
}

static int write_entry(const char *path, const struct cache_key *key, const struct cuda_binary *binary) {
    char temporary[PATH_BYTES + 8];
    struct entry_header header = {.key = {key->half[0], key->half[1], key->compiler},
                                  .code_bytes = binary->bytes,
                                  .resources = binary->resources,
                                  .compiler_major = binary->compiler_major};
    const int file = make_temporary(path, temporary, sizeof temporary);
    if (file < 0)
        return 0;
    memcpy(header.magic, magic, sizeof magic);
    header.checksum = checksum_of(&header, binary->code);
    int whole =
        write_all(file, &header, sizeof header) && write_all(file, binary->code, binary->bytes) && fsync(file) == 0;
    whole = close(file) == 0 && whole;
    if (whole && rename(temporary, path) == 0)
        return 1;
    unlink(temporary);
    return 0;
}

int cache_store(const struct cache_key *key, const struct cuda_binary *binary) {
    char path[CACHE_FOLDER_BYTES], name[CACHE_NAME_BYTES], whole[PATH_BYTES];
    const size_t bytes = sizeof(struct entry_header) + binary->bytes;
    const int folder = (int64_t)bytes <= cache_limit() && may_write(bytes) ? cache_folder_open(1, path) : -1;
    if (folder < 0)
        return 0;
    entry_name(key, name);
    snprintf(whole, sizeof whole, "%s/%s", path, name);
    const int written = write_entry(whole, key, binary);
    if (written)
        cache_evict(folder);
    close(folder);
    return written;
}
