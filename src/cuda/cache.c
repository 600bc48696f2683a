/* cache.c: one file for each compiled kernel: a header with a checksum, then the machine code. */
#define _GNU_SOURCE /* mkostemp */
#include "cuda/cache.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/settings.h"

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
                              const struct cuda_kernel_request *request) {
    struct cache_key key;
    for (int half = 0; half < 2; half++) {
        uint64_t hash = hash_bytes(half ? 0x9e3779b97f4a7c15ull : 0xcbf29ce484222325ull, &source->closure[half], 8);
        hash = hash_text(hash, FDM_VERSION);
        hash = hash_text(hash, compiler->identity);
        hash = hash_text(hash, arch);
        hash = hash_text(hash, request->file);
        hash = hash_text(hash, request->entry);
        for (int32_t i = 0; i < request->num_constants; i++) {
            hash = hash_text(hash, request->constants[i].name);
            hash = hash_bytes(hash, &request->constants[i].value, sizeof request->constants[i].value);
        }
        key.half[half] = hash_end(hash);
    }
    return key;
}

fdm_status fdm_cache_folder(char *path, size_t size) {
    const char *own = setting_get(SETTING_CACHE_DIR), *xdg = setting_get_foreign("XDG_CACHE_HOME"),
               *home = setting_get_foreign("HOME");
    int written = own    ? snprintf(path, size, "%s", own)
                  : xdg  ? snprintf(path, size, "%s/flash_dmattn", xdg)
                  : home ? snprintf(path, size, "%s/.cache/flash_dmattn", home)
                         : 0;
    if (written <= 0)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "there is no cache folder: none of FLASH_DMATTN_CACHE_DIR, XDG_CACHE_HOME and HOME is set");
    return (size_t)written < size
               ? FDM_OK
               : error_set(FDM_ERROR_INVALID_ARGUMENT, "the path has %d bytes; size is %zu", written, size);
}

struct entry_header {
    char magic[8];
    uint64_t key[2];
    uint64_t code_bytes, checksum; /* of the code and of the resources */
    struct cuda_resources resources;
    uint32_t zero; /* the header has no padding: each of its bytes is looked at */
};
_Static_assert(sizeof(struct entry_header) == 64, "no padding");
static const char magic[8] = "fdmcub2";

static uint64_t checksum_of(const struct entry_header *header, const void *code) {
    uint64_t hash = hash_bytes(0xcbf29ce484222325ull, &header->resources, sizeof header->resources);
    return hash_end(hash_bytes(hash, code, (size_t)header->code_bytes));
}

enum { PATH_BYTES = 640, CODE_BYTES_MAX = 64 << 20 };

static int entry_path(const struct cache_key *key, char *path) {
    char folder[512];
    if (fdm_cache_folder(folder, sizeof folder))
        return 0;
    snprintf(path, PATH_BYTES, "%s/%016llx%016llx.cubin", folder, (unsigned long long)key->half[0],
             (unsigned long long)key->half[1]);
    return 1;
}

static int read_entry(FILE *file, const struct cache_key *key, struct cuda_binary *binary) {
    struct entry_header header;
    if (fread(&header, sizeof header, 1, file) != 1 || memcmp(header.magic, magic, sizeof magic) != 0 ||
        memcmp(header.key, key->half, sizeof header.key) != 0 || header.code_bytes == 0 ||
        header.code_bytes > CODE_BYTES_MAX || header.zero != 0)
        return 0;
    void *code = memory_allocate((size_t)header.code_bytes);
    if (!code)
        return 0;
    if (fread(code, 1, (size_t)header.code_bytes, file) != header.code_bytes || fgetc(file) != EOF ||
        checksum_of(&header, code) != header.checksum) {
        memory_release(code);
        return 0;
    }
    *binary = (struct cuda_binary){code, (size_t)header.code_bytes, header.resources};
    return 1;
}

/* Only regular files: a pipe in the entry's place would have no end. */
static FILE *open_entry(const char *path) {
    struct stat facts;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return NULL;
    FILE *stream = fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) ? fdopen(file, "rb") : NULL;
    if (!stream)
        close(file);
    return stream;
}

int cache_load(const struct cache_key *key, struct cuda_binary *binary) {
    char path[PATH_BYTES];
    FILE *file = entry_path(key, path) ? open_entry(path) : NULL;
    if (!file)
        return 0;
    int sound = read_entry(file, key, binary);
    fclose(file);
    return sound;
}

/* The folder and those above it, as mkdir -p; only the user may look into what is new. */
static void make_folder(char *path) {
    for (char *at = path + 1; *at; at++)
        if (*at == '/') {
            *at = 0;
            mkdir(path, 0700);
            *at = '/';
        }
    mkdir(path, 0700);
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

int cache_store(const struct cache_key *key, const struct cuda_binary *binary) {
    char path[PATH_BYTES], temporary[PATH_BYTES + 16], folder[512];
    struct entry_header header = {
        .key = {key->half[0], key->half[1]}, .code_bytes = binary->bytes, .resources = binary->resources};
    if (fdm_cache_folder(folder, sizeof folder) || !entry_path(key, path) || !may_write(sizeof header + binary->bytes))
        return 0;
    make_folder(folder);
    /* a random name: process numbers come again, in containers most of all, and killed processes leave files */
    snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    int file = mkostemp(temporary, O_CLOEXEC);
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
