/* test_masks_on_device.c: builders of masks and the slots of top-W on a pretended driver: what reaches the
 * device, and that nothing is allocated, waited for or left behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda_call.h"
#include "scenario.h"

enum { HEADS = 6, SLOTS = 40, MEMORY = 1 << 26 };
static const fdm_device_id device = {FDM_CUDA, 0};

/* Nothing is read: tensors lie apart from each other, and their elements beyond the workspace nowhere. */
struct masks {
    void *memory;
    int64_t used; /* tensors so far */
    int64_t pair[3], by_key[3], dense[4], rows[4], blocks[4], slots[3], token[3], offsets, keys;
    fdm_tensor bias, start, end, mask, cu_seqlens, key, slot_bias, length;
};

static fdm_tensor tensor_of(struct masks *m, int32_t ndim, int64_t *shape, fdm_dtype dtype) {
    return (fdm_tensor){.data = m->memory,
                        .device = device,
                        .ndim = ndim,
                        .dtype = fdm_data_type_of(dtype),
                        .shape = shape,
                        .byte_offset = (uint64_t)++m->used << 40};
}

static fdm_status make(struct masks *m, int64_t keys) {
    *m = (struct masks){.pair = {2, 3, keys},
                        .by_key = {2, keys, 3},
                        .dense = {2, 3, 50, keys},
                        .rows = {2, 3, 1, keys},
                        .blocks = {2, 3, 4, (keys + 31) / 32},
                        .slots = {2, 3, SLOTS},
                        .token = {2, 3, 1},
                        .offsets = 5,
                        .keys = keys};
    const fdm_status status = fdm_memory_allocate(device, MEMORY, &m->memory);
    m->bias = tensor_of(m, 3, m->pair, FDM_FLOAT32);
    m->start = tensor_of(m, 3, m->pair, FDM_INT32);
    m->end = tensor_of(m, 3, m->pair, FDM_INT32);
    m->mask = tensor_of(m, 4, m->dense, FDM_BOOL);
    m->cu_seqlens = tensor_of(m, 1, &m->offsets, FDM_INT32);
    m->key = tensor_of(m, 3, m->slots, FDM_INT32);
    m->slot_bias = tensor_of(m, 3, m->slots, FDM_FLOAT32);
    m->length = tensor_of(m, 2, m->token, FDM_INT32);
    return status;
}

static void done(struct masks *m) {
    assert_int_equal(fdm_memory_release(device, m->memory), FDM_OK);
    assert_int_equal(fake_driver()->live().allocations, 0);
    assert_int_equal(fake_driver()->depth(), 0);
}

enum builder {
    TOPK,
    WINDOW,
    PREFIX,
    DOCUMENTS,
    RULES,
    TO_MASK,
    CREATE,
    BLOCKS,
    FROM_MASK,
    FILL,
    APPEND,
    KEY_BIAS,
    KEY_BIAS_BACKWARD,
    NUM_BUILDERS
};

static fdm_status run(struct masks *m, enum builder builder, void *stream) {
    const fdm_topk_slots slots = {sizeof slots, &m->key, &m->slot_bias, &m->length, NULL, NULL};
    fdm_tensor token = tensor_of(m, 2, m->token, FDM_FLOAT32), rows = tensor_of(m, 4, m->rows, FDM_FLOAT32);
    fdm_tensor blocks = tensor_of(m, 4, m->blocks, FDM_BOOL), prefixes = tensor_of(m, 1, m->pair, FDM_INT32);
    const fdm_key_rules rules = {.struct_bytes = sizeof rules, .prefix_lengths = &prefixes};
    fdm_tensor dt = tensor_of(m, 3, m->by_key, FDM_BFLOAT16), a = tensor_of(m, 1, &m->pair[1], FDM_FLOAT32);
    fdm_tensor ddt = tensor_of(m, 3, m->by_key, FDM_BFLOAT16), da = tensor_of(m, 1, &m->pair[1], FDM_FLOAT32);
    switch (builder) {
    case TOPK: return fdm_topk_intervals(&m->bias, NULL, SLOTS, m->keys, &m->start, &m->end, m->memory, MEMORY, stream);
    case WINDOW: return fdm_window_intervals(50, 1, 8, -1, &m->start, &m->end, stream);
    case PREFIX: return fdm_prefix_intervals(50, 8, &m->start, &m->end, stream);
    case RULES: return fdm_rule_intervals(&rules, 50, &m->start, &m->end, stream);
    case DOCUMENTS: return fdm_document_intervals(&m->cu_seqlens, 1, &m->start, &m->end, stream);
    case TO_MASK: return fdm_intervals_to_mask(&m->start, &m->end, &m->mask, stream);
    case CREATE: return fdm_create_mask(&rows, NULL, SLOTS, -1, 1, &m->mask, stream);
    case BLOCKS: return fdm_mask_blocks(&m->mask, 16, 32, &blocks, stream);
    case FROM_MASK: return fdm_intervals_from_mask(&m->mask, &m->start, &m->end, m->memory, stream);
    case FILL: return fdm_topk_fill(&m->bias, &m->end, NULL, NULL, NULL, &slots, stream);
    case KEY_BIAS: return fdm_key_bias(&dt, &a, NULL, 1, &m->bias, stream);
    case KEY_BIAS_BACKWARD: return fdm_key_bias_backward(&dt, &a, NULL, 1, &m->bias, &ddt, &da, stream);
    default: return fdm_topk_append(&token, NULL, NULL, NULL, &slots, NULL, stream);
    }
}

static void assert_launched(struct masks *m, enum builder builder, int count, const char *const *entries,
                            const int64_t *blocks) {
    const int64_t before = fake_driver()->num_launches();
    assert_int_equal(run(m, builder, m), FDM_OK);
    assert_int_equal(fake_driver()->num_launches(), before + count);
    for (int i = 0; i < count; i++) {
        const struct fake_launch launch = fake_driver()->launch(before + i);
        assert_string_equal(launch.entry, entries[i]);
        assert_int_equal(launch.grid[0], blocks[i]);
        assert_int_equal(launch.grid[1] * launch.grid[2], 1);
        assert_ptr_equal(launch.stream, m);
    }
    assert_int_equal(fake_driver()->live().allocations, 1); /* ours */
}

static void launches(void) {
    static const char *const topk[] = {"topk_threshold", "topk_carry", "topk_threshold", "topk_resolve"};
    static const char *const few[] = {"topk_threshold", "topk_resolve"};
    static const char *const rules[] = {"interval_rules"}, *const runs[] = {"intervals_from_mask"};
    static const char *const joined[] = {"key_rules"};
    static const char *const dense[][1] = {{"intervals_to_mask"}, {"create_mask"}, {"block_mask"}};
    static const char *const key_bias[] = {"key_bias"}, *const backward[] = {"key_bias_backward"};
    static const char *const fill[] = {"topk_fill"}, *const append[] = {"topk_append"};
    struct masks m;
    use_fake_compiler();
    assert_int_equal(make(&m, 100000), FDM_OK); /* 7 spans of 16384, 98 chunks of 1024 */
    assert_launched(&m, TOPK, 4, topk, (int64_t[]){7 * HEADS, 7 * HEADS, 98 * HEADS, 98 * HEADS});
    done(&m);
    assert_int_equal(make(&m, 8192), FDM_OK);
    assert_launched(&m, TOPK, 2, few, (int64_t[]){8 * HEADS, 8 * HEADS});
    done(&m);
    assert_int_equal(make(&m, 1000), FDM_OK); /* chunks of 128; 256 keys a block; 32 keys a block */
    assert_launched(&m, TOPK, 2, few, (int64_t[]){8 * HEADS, 8 * HEADS});
    for (enum builder n = WINDOW; n <= DOCUMENTS; n++)
        assert_launched(&m, n, 1, rules, (int64_t[]){4});
    assert_launched(&m, RULES, 1, joined, (int64_t[]){(1000 * HEADS + 255) / 256}); /* a key of a head a thread */
    assert_launched(&m, TO_MASK, 1, dense[0], (int64_t[]){HEADS});                  /* 1024 keys and 64 rows a block */
    assert_launched(&m, CREATE, 1, dense[1], (int64_t[]){50 * HEADS});
    assert_launched(&m, BLOCKS, 1, dense[2], (int64_t[]){8 * 4 * HEADS}); /* four tiles of keys a block */
    assert_launched(&m, FROM_MASK, 1, runs, (int64_t[]){32 * HEADS});
    assert_launched(&m, FILL, 1, fill, (int64_t[]){HEADS});
    assert_launched(&m, APPEND, 1, append, (int64_t[]){HEADS});
    assert_launched(&m, KEY_BIAS, 1, key_bias, (int64_t[]){32 * HEADS / 8}); /* 32 keys of a head a warp */
    assert_launched(&m, KEY_BIAS_BACKWARD, 1, backward, (int64_t[]){8 * 3}); /* eight blocks a head */
    done(&m);
}

static void nothing_to_do(void) {
    struct masks m;
    use_fake_compiler();
    assert_int_equal(make(&m, 0), FDM_OK);
    for (enum builder n = TOPK; n <= BLOCKS; n++)
        assert_int_equal(run(&m, n, NULL), FDM_OK);
    assert_int_equal(run(&m, KEY_BIAS, NULL), FDM_OK);
    assert_int_equal(fake_driver()->num_launches(), 0);
    assert_int_equal(run(&m, KEY_BIAS_BACKWARD, NULL), FDM_OK); /* no keys: da is 0, which is written */
    assert_int_equal(fake_driver()->num_launches(), 1);
    done(&m);
}

static void refusals(void) {
    struct masks m;
    use_fake_compiler();
    assert_int_equal(make(&m, 100), FDM_OK);
    m.pair[2] = m.keys = ((int64_t)1 << 30) + 1; /* reserved nowhere: nothing is launched */
    m.pair[0] = 1;
    fdm_tensor bias = m.bias;
    assert_refused(fdm_topk_intervals(&bias, NULL, 3, 9, &m.start, &m.end, m.memory, SIZE_MAX, NULL),
                   FDM_ERROR_UNSUPPORTED, "on CUDA devices top-W takes at most 2^30 keys");
    m.start.device.index = 1;
    assert_refused(run(&m, WINDOW, NULL), FDM_ERROR_INVALID_ARGUMENT,
                   "end is on DLPack device 2:0, but start is on 2:1");
    assert_int_equal(fake_driver()->num_launches(), 0);
    done(&m);
}

/* The n-th call of any function: a sentence, nothing left behind, and the next call works. */
static void every_call_fails(void) {
    static const char *const opening[] = {"cuGetProcAddress", "cuInit", "cuDriverGetVersion", "cuDeviceGetCount"};
    struct masks m;
    use_fake_compiler();
    fdm_status status = make(&m, 100000);
    const int made = status == FDM_OK;
    for (enum builder n = TOPK; made && !status && n < NUM_BUILDERS; n++)
        status = run(&m, n, NULL);
    const char *failed = fake_driver()->injected();
    if (!*failed) {
        assert_int_equal(status, FDM_OK);
        scenario_past_the_end = 1;
        return;
    }
    if (status)
        assert_sentence();
    for (int i = 0; i < 4; i++)
        if (strcmp(failed, opening[i]) == 0)
            return; /* remembered for the process */
    if (!made)
        assert_int_equal(make(&m, 100000), FDM_OK);
    for (enum builder n = TOPK; n < NUM_BUILDERS; n++)
        assert_int_equal(run(&m, n, NULL), FDM_OK);
}

static const struct scenario scenarios[] = {
    {"launches", launches, NULL, 0},
    {"nothing_to_do", nothing_to_do, NULL, 0},
    {"refusals", refusals, "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448", 0},
    {"every_call_fails", every_call_fails, "FAKE_CUDA_FAIL=*:1:%", 1},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
