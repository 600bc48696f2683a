/* test_merge_on_device.c: fdm_merge() on a pretended driver: what reaches the device, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda_call.h"
#include "scenario.h"

enum { B = 3, S = 100, H = 7, ROWS = B * S * H, THREADS = 256, NUM_TENSORS = 9, HEAD_DIM_MAX = 4096 };
enum { OUT1, LSE1, LSE_LOW1, OUT2, LSE2, LSE_LOW2, OUT, LSE, LSE_LOW }; /* as in fdm_merge_tensors */

/* All tensors on device 0. */
struct merge_call {
    int64_t out_shape[4], lse_shape[3], out_strides[4];
    fdm_tensor t[NUM_TENSORS];
    void *memory;
};

static fdm_status make(struct merge_call *c, fdm_dtype dtype, int64_t head_dim) {
    const fdm_device_id device = {FDM_CUDA, 0};
    *c = (struct merge_call){.out_shape = {B, S, H, head_dim},
                             .lse_shape = {B, H, S},
                             .out_strides = {S * H * head_dim, H * head_dim, head_dim, 1}};
    const fdm_status status = fdm_memory_allocate(device, 256, &c->memory);
    for (int i = 0; i < NUM_TENSORS; i++) { /* nothing is read: they may lie where they like, apart */
        const int of_rows = i % 3 != OUT1;
        c->t[i] = (fdm_tensor){.data = c->memory, .device = device, .ndim = of_rows ? 3 : 4};
        c->t[i].dtype = fdm_data_type_of(!of_rows ? dtype : dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32);
        c->t[i].shape = of_rows ? c->lse_shape : c->out_shape;
        c->t[i].strides = of_rows ? NULL : c->out_strides;
        c->t[i].byte_offset = (uint64_t)i << 44;
    }
    return status;
}

static fdm_status run(struct merge_call *c, void *stream) {
    fdm_tensor *t[NUM_TENSORS];
    for (int i = 0; i < NUM_TENSORS; i++)
        t[i] = c->t[i].data ? &c->t[i] : NULL;
    const fdm_merge_tensors tensors = {sizeof tensors, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]};
    return fdm_merge(&tensors, stream);
}

static void done(struct merge_call *c) {
    assert_int_equal(fdm_memory_release((fdm_device_id){FDM_CUDA, 0}, c->memory), FDM_OK);
    assert_int_equal(fake_driver()->live().allocations, 0);
    assert_int_equal(fake_driver()->depth(), 0);
}

/* The launch of a call that works, which takes `chunks` threads a row. */
static void assert_launched(fdm_dtype dtype, int64_t head_dim, uint64_t odd_bytes, int64_t chunks) {
    struct merge_call c;
    const int64_t before = fake_driver()->num_launches(), rows = chunks >= THREADS ? 1 : THREADS / chunks;
    assert_int_equal(make(&c, dtype, head_dim), FDM_OK);
    c.t[OUT2].byte_offset += odd_bytes;
    assert_int_equal(run(&c, &c), FDM_OK);
    assert_int_equal(fake_driver()->num_launches(), before + 1);
    const struct fake_launch launch = fake_driver()->launch(before);
    assert_string_equal(launch.entry, "merge");
    assert_int_equal(launch.block[0], THREADS);
    assert_int_equal(launch.grid[0], (ROWS + rows - 1) / rows);
    assert_int_equal(launch.grid[1] * launch.grid[2], 1);
    assert_ptr_equal(launch.stream, &c);
    assert_ptr_equal(launch.first_member, c.memory);
    done(&c);
}

static void launches(void) {
    use_fake_compiler();
    assert_launched(FDM_BFLOAT16, 64, 0, 8);
    assert_launched(FDM_BFLOAT16, 64, 2, 64); /* an address that is no multiple of 16 */
    assert_launched(FDM_FLOAT16, 64, 0, 8);
    assert_launched(FDM_FLOAT32, 64, 0, 16);
    assert_launched(FDM_FLOAT32, 3, 0, 3);
    assert_launched(FDM_BFLOAT16, 20, 0, 20); /* rows start at multiples of 8 bytes */
    assert_launched(FDM_FLOAT32, 1024, 0, 256);
    assert_launched(FDM_FLOAT32, HEAD_DIM_MAX, 0, 1024);
    assert_launched(FDM_FLOAT32, 0, 0, 1);                /* lse alone */
    assert_int_equal(fake_compiler()->num_compiled(), 5); /* each dtype by vectors, two by elements */
}

/* A stride on the last axis, and heads before rows, are taken as they are. */
static void any_strides(void) {
    struct merge_call c;
    use_fake_compiler();
    assert_int_equal(make(&c, FDM_FLOAT16, 8), FDM_OK);
    const int64_t last[4] = {S * H * 16, H * 16, 16, 2}, heads_first[4] = {H * S * 8, 8, S * 8, 1};
    memcpy(c.out_strides, last, sizeof last);
    assert_int_equal(run(&c, NULL), FDM_OK);
    assert_int_equal(fake_driver()->launch(0).grid[0], (ROWS + 31) / 32);
    memcpy(c.out_strides, heads_first, sizeof heads_first);
    assert_int_equal(run(&c, NULL), FDM_OK);
    assert_int_equal(fake_driver()->launch(1).grid[0], (ROWS + 255) / 256);
    done(&c);
}

static void refusals(void) {
    struct merge_call c;
    use_fake_compiler();
    assert_int_equal(make(&c, FDM_FLOAT64, 8), FDM_OK);
    assert_refused(run(&c, NULL), FDM_ERROR_UNSUPPORTED, "out1 is float64, which is merged on the CPU only");
    done(&c);
    assert_int_equal(make(&c, FDM_FLOAT32, 8), FDM_OK);
    for (int i = 1; i < NUM_TENSORS; i++) {
        static const char *const words[] = {"",
                                            "lse1 is on DLPack device 1:0, but out1 is on 2:0",
                                            "lse_low1 is",
                                            "out2 is",
                                            "lse2 is",
                                            "lse_low2 is",
                                            "out is",
                                            "lse is",
                                            "lse_low is"};
        c.t[i].device.type = FDM_CPU;
        assert_refused(run(&c, NULL), FDM_ERROR_INVALID_ARGUMENT, words[i]);
        c.t[i].device.type = FDM_CUDA;
    }
    c.t[LSE2].device.index = 1;
    assert_refused(run(&c, NULL), FDM_ERROR_INVALID_ARGUMENT, "lse2 is on DLPack device 2:1, but out1 is on 2:0");
    c.t[LSE2].device.index = 0;
    c.out_shape[0] = c.lse_shape[0] = (int64_t)1 << 24; /* reserved nowhere: nothing is launched */
    assert_refused(run(&c, NULL), FDM_ERROR_UNSUPPORTED, "merge on CUDA devices takes fewer than 2^31 of both");
    c.out_shape[0] = c.lse_shape[0] = 0;
    assert_int_equal(run(&c, NULL), FDM_OK);
    assert_int_equal(fake_driver()->num_launches(), 0);
    done(&c);
}

/* Any of the low parts may be absent; one kernel does without. */
static void low_parts(void) {
    struct merge_call c;
    use_fake_compiler();
    for (int given = 0; given < 8; given++) {
        assert_int_equal(make(&c, FDM_FLOAT16, 64), FDM_OK);
        for (int i = 0; i < 3; i++)
            if (!(given >> i & 1))
                c.t[LSE_LOW1 + 3 * i].data = NULL;
        assert_int_equal(run(&c, NULL), FDM_OK);
        done(&c);
    }
    assert_int_equal(fake_driver()->num_launches(), 8);
    assert_int_equal(fake_compiler()->num_compiled(), 1);
}

/* The result may take the place of a part; anything else is not enqueued. */
static void places(void) {
    struct merge_call c;
    use_fake_compiler();
    for (int part = OUT1; part <= OUT2; part += 3) {
        assert_int_equal(make(&c, FDM_BFLOAT16, 64), FDM_OK);
        for (int i = 0; i < 3; i++)
            c.t[OUT + i].byte_offset = c.t[part + i].byte_offset;
        assert_int_equal(run(&c, NULL), FDM_OK);
        c.t[OUT].byte_offset += 128;
        assert_refused(run(&c, NULL), FDM_ERROR_INVALID_ARGUMENT,
                       part == OUT1 ? "out overlaps out1 in memory" : "out overlaps out2 in memory");
        done(&c);
    }
    assert_int_equal(make(&c, FDM_BFLOAT16, 64), FDM_OK);
    c.t[LSE_LOW].byte_offset = c.t[LSE1].byte_offset;
    assert_refused(run(&c, NULL), FDM_ERROR_INVALID_ARGUMENT, "lse_low overlaps lse1 in memory");
    done(&c);
    assert_int_equal(fake_driver()->num_launches(), 2);
}

static void device_is_too_old(void) {
    struct merge_call c;
    use_fake_compiler();
    assert_int_equal(make(&c, FDM_FLOAT16, 8), FDM_OK);
    assert_refused(run(&c, NULL), FDM_ERROR_UNSUPPORTED, "compute capability 7.5; 8.0 is the lowest");
    done(&c);
}

/* The n-th call of any function: a sentence, nothing left behind, and the next call works. */
static void every_call_fails(void) {
    static const char *const opening[] = {"cuGetProcAddress", "cuInit", "cuDriverGetVersion", "cuDeviceGetCount"};
    struct merge_call c;
    use_fake_compiler();
    fdm_status status = make(&c, FDM_BFLOAT16, 64);
    const int made = status == FDM_OK;
    if (made)
        status = run(&c, NULL);
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
            return;                                                 /* remembered for the process */
    assert_int_equal(memory_live(), fake_driver()->live().modules); /* a record for each kernel */
    if (made)
        assert_int_equal(run(&c, NULL), FDM_OK);
    else
        assert_int_equal(make(&c, FDM_BFLOAT16, 64), FDM_OK);
}

static void compiler_fails(void) {
    struct merge_call c;
    use_fake_compiler();
    assert_int_equal(make(&c, FDM_BFLOAT16, 64), FDM_OK);
    fake_compiler()->inject("nvrtcCompileProgram", 6, 1);
    const fdm_status status = run(&c, NULL);
    assert_true(status != FDM_OK);
    assert_sentence();
    assert_int_equal(run(&c, NULL), FDM_OK);
    done(&c);
}

static const struct scenario scenarios[] = {
    {"launches", launches, NULL, 0},
    {"any_strides", any_strides, NULL, 0},
    {"refusals", refusals, "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448", 0},
    {"low_parts", low_parts, NULL, 0},
    {"places", places, NULL, 0},
    {"device_is_too_old", device_is_too_old, "FAKE_CUDA_DEVICES=7.5:65536", 0},
    {"every_call_fails", every_call_fails, "FAKE_CUDA_FAIL=*:1:%", 1},
    {"compiler_fails", compiler_fails, NULL, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
