/* mask_plan_check.c: the mask plan of a trial on a CUDA device: its bits against those that the CPU finds pair by pair,
 * and nothing written behind its memory. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "checks.h"

enum { ZONE = 256, ZONE_BYTE = 0xa5 };
static const fdm_device_id cuda = {FDM_CUDA, 0}, host = {FDM_CPU, 0};

/* Kept between trials and grown when one needs more. */
static char *there;
static size_t room;

static int reserve(size_t bytes) {
    void *memory = NULL;
    if (bytes <= room)
        return 1;
    fdm_memory_release(cuda, there);
    room = fdm_memory_allocate(cuda, bytes + bytes / 2, &memory) ? 0 : bytes + bytes / 2;
    there = memory;
    return room >= bytes;
}

/* Masks that each hide tiles by themselves: beside each other, or beside a window, tiles may be called seen that are
 * not, and those that end with the keys are not always called full. */
static int is_exact(const fdm_problem *p) {
    const int pairs = (p->has_mask && p->mask_shape[2] != 1) + p->has_row_intervals + (p->block_mask_size > 0);
    const int keys = p->has_intervals || (p->has_mask && p->mask_shape[2] == 1);
    return pairs == 0 || (pairs == 1 && !keys && !p->causal && p->window_left < 0 && p->window_right < 0);
}

static const char *compare(const fdm_tile_plan *have, const fdm_tile_plan *want, const char *bits) {
    const int exact = is_exact(&want->problem);
    const size_t words = (size_t)(want->batches * want->heads * want->row_tiles * want->key_words);
    const uint32_t *seen = (const void *)(bits + ((const char *)have->seen - (const char *)have->memory));
    const uint32_t *full = (const void *)(bits + ((const char *)have->full - (const char *)have->memory));
    for (size_t n = 0; n < words; n++) {
        if (want->seen[n] & ~seen[n])
            return "calls a tile hidden that is seen";
        if (full[n] & ~want->full[n])
            return "calls a tile full that is not";
        if (exact && seen[n] != want->seen[n])
            return "calls a tile seen that is hidden";
    }
    return NULL;
}

/* The plan on the CPU, in memory of its own. */
static const char *against_cpu(struct trial *t, const fdm_options *options, const fdm_tile_plan *have,
                               const char *bits) {
    const fdm_tensors tensors = trial_tensors(t, FDM_FORWARD);
    fdm_tile_plan want = {
        .struct_bytes = sizeof want, .memory = memory_allocate(have->memory_bytes), .memory_bytes = have->memory_bytes};
    const char *fault = fdm_mask_plan(&tensors, options, &want, NULL) ? fdm_last_error() : NULL;
    if (!fault && (want.batches != have->batches || want.heads != have->heads || want.row_tiles != have->row_tiles ||
                   want.key_words != have->key_words))
        fault = "has other extents than on the CPU";
    fault = fault ? fault : compare(have, &want, bits);
    memory_release(want.memory);
    return fault;
}

int mask_plan_make(struct trial *t, const fdm_plan *plan, const fdm_tensors *tensors, fdm_tile_plan *made) {
    fdm_options options = t->options;
    const fdm_problem *p = &plan->problem;
    const size_t bytes = (fdm_mask_plan_bytes(p) + 63) / 64 * 64;
    const char *fault = NULL;
    options.max_seqlen_q = t->varlen ? p->seqlen_q : 0;
    options.max_seqlen_k = t->varlen ? p->seqlen_k : 0;
    if (tensors->cache || tensors->tree || t->far || bytes == 0 || !t->keeps_plan)
        return 1;
    if (t->many && is_emulated()) /* a plan has 1024 threads for each head, which takes minutes there */
        return 1;
    char *bits = malloc(bytes + ZONE);
    memset(bits, ZONE_BYTE, bytes + ZONE);
    *made = (fdm_tile_plan){.struct_bytes = sizeof *made, .memory_bytes = bytes};
    if (!reserve(bytes + ZONE) || fdm_memory_copy(there, cuda, bits, host, bytes + ZONE))
        fault = "finds no memory";
    made->memory = there;
    if (!fault && (fdm_mask_plan(tensors, &options, made, NULL) || fdm_synchronize(cuda) ||
                   fdm_memory_copy(bits, host, there, cuda, bytes + ZONE)))
        fault = fdm_last_error();
    for (size_t n = bytes; n < bytes + ZONE && !fault; n++)
        fault = (unsigned char)bits[n] == ZONE_BYTE ? NULL : "writes behind its memory";
    if (!fault && !t->contradicts)
        fault = against_cpu(t, &options, made, bits);
    free(bits);
    if (fault)
        printf("WRONG the mask plan %s\n  %s\n  replay: %s --kernel %s --seed %llu\n", fault, t->text, checks_program(),
               plan->kernel, (unsigned long long)t->seed);
    return !fault;
}
