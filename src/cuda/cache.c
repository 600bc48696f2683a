/* cache.c: one file for each compiled kernel: a header with a checksum, then the machine code. */
#include "cuda/cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

uint64_t cache_checksum(uint64_t hash, const void *data, size_t bytes) {
    return hash_end(hash_bytes(hash ^ 0xcbf29ce484222325ull, data, bytes));
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

enum { CODE_BYTES_MAX = 64 << 20 };

/* "HALFHALF-", then the compiler's part. */
static void entry_name(const struct cache_key *key, char *name) {
    snprintf(name, SYSTEM_NAME_BYTES, "%016llx%016llx-%016llx.cubin", (unsigned long long)key->half[0],
             (unsigned long long)key->half[1], (unsigned long long)key->compiler);
}
enum { NAME_PREFIX = 33 };

int cache_is_wanted(const struct cache_key *key, const struct cache_key *wanted) {
    return memcmp(key->half, wanted->half, sizeof key->half) == 0 &&
           (!wanted->compiler || key->compiler == wanted->compiler);
}

int cache_read_entry(FILE *file, struct cache_key *key, struct cuda_binary *binary) {
    struct entry_header header;
    if (fread(&header, sizeof header, 1, file) != 1 || memcmp(header.magic, magic, sizeof magic) != 0 ||
        header.code_bytes == 0 || header.code_bytes > CODE_BYTES_MAX)
        return 0;
    void *code = memory_allocate((size_t)header.code_bytes);
    if (!code)
        return 0;
    if (fread(code, 1, (size_t)header.code_bytes, file) != header.code_bytes ||
        checksum_of(&header, code) != header.checksum) {
        memory_release(code);
        return 0;
    }
    *key = (struct cache_key){{header.key[0], header.key[1]}, header.key[2]};
    *binary = (struct cuda_binary){code, (size_t)header.code_bytes, header.resources, header.compiler_major};
    return 1;
}

void cache_make_header(const struct cache_key *key, const struct cuda_binary *binary,
                       uint8_t made[CACHE_HEADER_BYTES]) {
    struct entry_header header = {.key = {key->half[0], key->half[1], key->compiler},
                                  .code_bytes = binary->bytes,
                                  .resources = binary->resources,
                                  .compiler_major = binary->compiler_major};
    _Static_assert(sizeof header == CACHE_HEADER_BYTES, "what others know of it");
    memcpy(header.magic, magic, sizeof magic);
    header.checksum = checksum_of(&header, binary->code);
    memcpy(made, &header, sizeof header);
}

int cache_read_file(const struct system_folder *folder, const char *name, int used, struct cache_key *key,
                    struct cuda_binary *binary) {
    struct system_file_facts facts;
    FILE *file = system_open_in(folder, name, &facts);
    if (!file)
        return 0;
    int valid = !cache_is_foreign(&facts, name) && cache_read_entry(file, key, binary);
    if (valid && fgetc(file) != EOF) {
        cuda_binary_release(binary);
        valid = 0;
    }
    if (valid && used)
        system_touch(file);
    fclose(file);
    return valid;
}

static int load_entry(const struct system_folder *folder, const char *name, const struct cache_key *wanted,
                      struct cuda_binary *binary) {
    struct cache_key key;
    if (!cache_read_file(folder, name, 1, &key, binary))
        return 0;
    if (cache_is_wanted(&key, wanted))
        return 1;
    cuda_binary_release(binary);
    return 0;
}

static int load_any(const struct system_folder *folder, const struct cache_key *key, int32_t max_major,
                    struct cuda_binary *binary) {
    struct system_walk walk;
    char name[SYSTEM_NAME_BYTES];
    int valid = 0;
    entry_name(key, name);
    if (!system_begin_walk(&walk, folder))
        return 0;
    while (!valid && cache_walk_on(&walk)) {
        valid = strncmp(walk.name, name, NAME_PREFIX) == 0 && load_entry(folder, walk.name, key, binary);
        if (valid && max_major > 0 && binary->compiler_major > max_major) { /* the driver would not take it */
            cuda_binary_release(binary);
            valid = 0;
        }
    }
    system_end_walk(&walk);
    return valid;
}

int cache_load(const struct cache_key *key, int32_t max_major, struct cuda_binary *binary) {
    struct system_folder folder;
    char name[SYSTEM_NAME_BYTES];
    if (!cache_folder_open(0, &folder))
        return 0;
    entry_name(key, name);
    const int valid =
        key->compiler ? load_entry(&folder, name, key, binary) : load_any(&folder, key, max_major, binary);
    system_close_folder(&folder);
    return valid;
}

int cache_store(const struct cache_key *key, const struct cuda_binary *binary) {
    struct system_folder folder;
    char name[SYSTEM_NAME_BYTES];
    uint8_t header[CACHE_HEADER_BYTES];
    const size_t bytes = sizeof header + binary->bytes;
    if ((int64_t)bytes > cache_limit() || !system_may_write(bytes) || !cache_folder_open(1, &folder))
        return 0;
    cache_make_header(key, binary, header);
    entry_name(key, name);
    const int written = system_replace_in(&folder, name, header, sizeof header, binary->code, binary->bytes);
    if (written)
        cache_evict(&folder, ".cubin", cache_limit());
    system_close_folder(&folder);
    return written;
}
