/* occupancy.c: the arithmetic of the CUDA C++ Programming Guide, "Compute Capabilities" and "Multiprocessor Level". */
#include "device/occupancy.h"

#include <stdio.h>
#include <string.h>

/* The same for every architecture from 8.0 on. */
enum {
    WARP = 32,
    REGISTERS_AT_A_TIME = 256, /* given to a warp */
    PARTITIONS = 4,            /* of a multiprocessor, each with its share of the registers and its own warps */
    SHARED_AT_A_TIME = 128,
    SHARED_RESERVED = 1024, /* of each block, by the system; the opt-in limit of a block leaves it out */
    REGISTERS_OF_A_BLOCK = 65536,
    REGISTERS_OF_A_THREAD = 255,
    THREADS_OF_A_BLOCK = 1024
};

/* Resident blocks of a multiprocessor; an architecture that is not here has those of the one before it. */
static const struct {
    int32_t major, minor, blocks;
} block_limits[] = {{8, 0, 32}, {8, 6, 16}, {8, 9, 24}, {9, 0, 32}, {10, 0, 32}, {12, 0, 24}};

static int32_t most_blocks(const fdm_device *device) {
    int32_t blocks = block_limits[0].blocks;
    for (size_t i = 0; i < sizeof block_limits / sizeof block_limits[0]; i++)
        if (block_limits[i].major * 100 + block_limits[i].minor <= device->compute_major * 100 + device->compute_minor)
            blocks = block_limits[i].blocks;
    return blocks;
}

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

struct occupancy occupancy_of(const fdm_device *device, const struct block_needs *needs) {
    const int64_t warps = round_up(needs->threads, WARP) / WARP;
    const int64_t registers = round_up((int64_t)needs->registers * WARP, REGISTERS_AT_A_TIME);
    const int64_t warps_by_registers =
        registers > 0 ? device->registers_per_sm / PARTITIONS / registers * PARTITIONS : INT32_MAX;
    const int64_t shared = round_up(needs->shared_bytes, SHARED_AT_A_TIME) + SHARED_RESERVED;
    const struct {
        const char *name;
        int64_t blocks;
    } limits[] = {{"registers", warps > 0 ? warps_by_registers / warps : 0},
                  {"shared memory", (device->shared_bytes + SHARED_RESERVED) / shared},
                  {"warps", warps > 0 ? device->threads_per_sm / WARP / warps : 0},
                  {"blocks", most_blocks(device)}};
    int64_t least = limits[0].blocks;
    for (int i = 1; i < 4; i++)
        least = limits[i].blocks < least ? limits[i].blocks : least;
    if (needs->threads > THREADS_OF_A_BLOCK || needs->registers > REGISTERS_OF_A_THREAD ||
        registers * warps > REGISTERS_OF_A_BLOCK)
        least = 0;
    struct occupancy result = {
        .blocks = (int32_t)least, .warps = (int32_t)(least * warps), .warps_most = device->threads_per_sm / WARP};
    for (int i = 0, named = 0; i < 4 && named < 2; i++)
        if (limits[i].blocks == least) {
            size_t used = strlen(result.bound);
            snprintf(result.bound + used, sizeof result.bound - used, "%s%s", named++ ? " and " : "", limits[i].name);
        }
    if (!*result.bound)
        snprintf(result.bound, sizeof result.bound, "what one block may have");
    return result;
}
