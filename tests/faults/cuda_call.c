/* cuda_call.c: small attention calls for the pretended devices. */
#include "cuda_call.h"

#include <dirent.h>
#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "cuda/cuda.h"
#include "scenario.h"

const struct fake_cuda *fake_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    const struct fake_cuda *fake = dlsym(library, "fake_cuda");
    assert_non_null(fake);
    return fake;
}

static void compiler_file(char *path, size_t size, int major) {
    snprintf(path, size, "%s/lib/python3.11/site-packages/nvidia/cu%d/lib/libnvrtc.so.%d", scenario_folder(), major,
             major);
}

const struct fake_nvrtc *fake_compiler(void) {
    char path[300];
    compiler_file(path, sizeof path, 13);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    const struct fake_nvrtc *fake = dlsym(library, "fake_nvrtc");
    assert_non_null(fake);
    return fake;
}

void install_compiler(const char *target, int major) {
    char path[300];
    compiler_file(path, sizeof path, major);
    for (char *at = path + 1; *at; at++)
        if (*at == '/') {
            *at = 0;
            mkdir(path, 0755);
            *at = '/';
        }
    assert_int_equal(symlink(target, path), 0);
    setenv("VIRTUAL_ENV", scenario_folder(), 1);
}

void use_fresh_cache(void) {
    char path[128];
    snprintf(path, sizeof path, "%s/cache", scenario_folder());
    setenv("FLASH_DMATTN_CACHE_DIR", path, 1);
}

void use_fake_compiler(void) {
    char path[300];
    snprintf(path, sizeof path, "%s/libfake_nvrtc.so", getenv("LD_LIBRARY_PATH"));
    install_compiler(path, 13);
    use_fresh_cache();
}

/* ---- calls ---- */

static fdm_tensor tensor(fdm_device_id device, fdm_dtype dtype, int32_t ndim, int64_t *shape, char *memory,
                         size_t *used) {
    size_t bytes = (size_t)fdm_dtype_bytes(dtype);
    for (int32_t i = 0; i < ndim; i++)
        bytes *= (size_t)shape[i];
    fdm_tensor made = {.data = memory ? memory + *used : NULL,
                       .device = device,
                       .ndim = ndim,
                       .dtype = fdm_data_type_of(dtype),
                       .shape = shape};
    *used = (*used + bytes + 255) / 256 * 256;
    return made;
}

static size_t lay_out(struct cuda_call *c, int masked) {
    size_t used = 0;
    c->q = tensor(c->device, FDM_BFLOAT16, 4, c->q_shape, c->memory, &used);
    c->k = tensor(c->device, FDM_BFLOAT16, 4, c->k_shape, c->memory, &used);
    c->v = tensor(c->device, FDM_BFLOAT16, 4, c->k_shape, c->memory, &used);
    c->out = tensor(c->device, FDM_BFLOAT16, 4, c->q_shape, c->memory, &used);
    c->lse = tensor(c->device, FDM_FLOAT32, 3, c->lse_shape, c->memory, &used);
    c->mask = tensor(c->device, FDM_BOOL, 4, c->mask_shape, c->memory, &used);
    c->dq = tensor(c->device, FDM_BFLOAT16, 4, c->q_shape, c->memory, &used);
    c->dk = tensor(c->device, FDM_BFLOAT16, 4, c->k_shape, c->memory, &used);
    c->dv = tensor(c->device, FDM_BFLOAT16, 4, c->k_shape, c->memory, &used);
    c->tensors = (fdm_tensors){
        .struct_bytes = sizeof(fdm_tensors), .q = &c->q, .k = &c->k, .v = &c->v, .out = &c->out, .lse = &c->lse};
    c->tensors.mask = masked ? &c->mask : NULL;
    return used;
}

fdm_status cuda_call_make(struct cuda_call *c, enum cuda_call_kind kind, int32_t device) {
    static const int64_t sizes[NUM_CALL_KINDS][3] = {[CALL_FORWARD] = {300, 64, 64},
                                                     [CALL_MASKED] = {300, 64, 64},
                                                     [CALL_DECODE] = {1, 4096, 64},
                                                     [CALL_WIDE] = {64, 64, 1024}};
    const int64_t rows = sizes[kind][0], keys = sizes[kind][1], head_dim = sizes[kind][2], batch = 2, heads = 4;
    *c = (struct cuda_call){.device = {FDM_CUDA, device},
                            .q_shape = {batch, rows, heads, head_dim},
                            .k_shape = {batch, keys, heads / 2, head_dim},
                            .lse_shape = {batch, heads, rows},
                            .mask_shape = {batch, 1, rows, keys},
                            .options = fdm_options_default()};
    c->options.softcap = kind == CALL_WIDE ? 30 : 0;
    c->options.family = "mma"; /* whose launches tests know on every architecture */
    c->bytes = lay_out(c, kind == CALL_MASKED || kind == CALL_WIDE);
    fdm_status status = fdm_memory_allocate(c->device, c->bytes, &c->memory);
    if (!status) {
        lay_out(c, kind == CALL_MASKED || kind == CALL_WIDE);
        status = fdm_memory_fill(c->device, c->memory, 0, c->bytes);
    }
    return status;
}

static _Thread_local fdm_status workspace_status;
fdm_status cuda_call_workspace_status(void) { return workspace_status; }

static void *lend(void *context, size_t bytes) {
    void *memory = NULL;
    return fdm_memory_allocate(*(fdm_device_id *)context, bytes, &memory) ? NULL : memory;
}
static void take_back(void *context, void *memory) {
    workspace_status = fdm_memory_release(*(fdm_device_id *)context, memory);
}

fdm_status cuda_call_run(struct cuda_call *c, void *stream) {
    fdm_allocator allocator = {&c->device, lend, take_back};
    c->options.stream = stream;
    workspace_status = FDM_OK;
    return fdm_attention_forward(&c->tensors, &c->options, &allocator);
}

fdm_status cuda_call_run_backward(struct cuda_call *call, fdm_plan *plan) {
    fdm_device facts = {.struct_bytes = sizeof facts};
    fdm_problem problem;
    fdm_tensors t = call->tensors;
    t.dout = t.out;
    t.dq = &call->dq;
    t.dk = &call->dk;
    t.dv = &call->dv;
    fdm_status status = fdm_device_query(FDM_CUDA, call->device.index, &facts);
    if (!status && !(status = fdm_describe(FDM_BACKWARD, &t, NULL, &problem)) &&
        !(status = fdm_plan_attention(&facts, &problem, NULL, plan))) {
        void *workspace = NULL;
        const size_t bytes = (size_t)plan->workspace_bytes;
        if (!(status = fdm_memory_allocate(call->device, bytes, &workspace))) {
            status = fdm_execute(plan, &t, workspace, bytes, NULL);
            fdm_memory_release(call->device, workspace);
        }
    }
    return status;
}

void cuda_call_release(struct cuda_call *c) { fdm_memory_release(c->device, c->memory); }

fdm_status cuda_call_once(enum cuda_call_kind kind, int32_t device, void *stream) {
    struct cuda_call call;
    fdm_status status = cuda_call_make(&call, kind, device);
    if (!status)
        status = cuda_call_run(&call, stream);
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", fdm_last_error());
    cuda_call_release(&call);
    if (status) /* releasing may have had a sentence of its own */
        assert_true(*sentence);
    return status;
}

/* ---- kernels and the cache ---- */

fdm_status get_kernel(int32_t device, int64_t number) {
    const struct cuda_kernel *kernel = NULL;
    struct cuda_resources resources;
    const struct cuda_kernel_request request = {.file = "gpu/combine_splits.cu",
                                                .entry = "combine_splits",
                                                .num_constants = 2,
                                                .constants = {{"DTYPE", 2}, {"NUMBER", number}}};
    fdm_status status = cuda_kernels_get(device, &request, 1, &kernel);
    if (!status) {
        assert_int_equal(cuda_kernel_resources(kernel, &resources), FDM_OK);
        assert_int_equal(resources.registers, 40);
        assert_int_equal(resources.spill_bytes, 24);
        assert_int_equal(resources.remarks, 1);
        assert_int_equal(resources.max_threads, 1024);
    }
    assert_int_equal(fake_driver()->depth(), 0);
    return status;
}

int count_entries(char *path, size_t size) {
    const char *folder = getenv("FLASH_DMATTN_CACHE_DIR");
    DIR *directory = opendir(folder);
    int entries = 0;
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (entry->d_name[0] != '.') {
            entries++;
            if (path)
                snprintf(path, size, "%s/%s", folder, entry->d_name);
        }
    if (directory)
        closedir(directory);
    return entries;
}

/* ---- what must hold ---- */

void assert_sentence(void) {
    const char *sentence = fdm_last_error();
    size_t length = strlen(sentence);
    assert_in_range(length, 10, 510);
    assert_null(strstr(sentence, "(null)"));
    assert_null(strchr(sentence, '\n'));
    assert_true(sentence[length - 1] != ' ' && sentence[length - 1] != ':');
}

void assert_refused(fdm_status status, fdm_status wanted, const char *words) {
    assert_sentence();
    if (status != wanted || !strstr(fdm_last_error(), words))
        print_error("status %d, %s\n", status, fdm_last_error());
    assert_int_equal(status, wanted);
    assert_non_null(strstr(fdm_last_error(), words));
}

void assert_cpu_works(void) {
    float q[4] = {1, 2, 3, 4}, k[4] = {0, 0, 0, 0}, v[4] = {5, 6, 7, 8}, out[4] = {0}, lse[1] = {1};
    int64_t shape[4] = {1, 1, 1, 4}, lse_shape[3] = {1, 1, 1};
    fdm_tensor t[5];
    float *const data[] = {q, k, v, out, lse};
    for (int i = 0; i < 5; i++)
        t[i] = (fdm_tensor){.data = data[i],
                            .device = {FDM_CPU, 0},
                            .ndim = i < 4 ? 4 : 3,
                            .dtype = fdm_data_type_of(FDM_FLOAT32),
                            .shape = i < 4 ? shape : lse_shape};
    fdm_tensors all = {.struct_bytes = sizeof all, .q = &t[0], .k = &t[1], .v = &t[2], .out = &t[3], .lse = &t[4]};
    assert_int_equal(fdm_attention_forward(&all, NULL, NULL), FDM_OK);
    assert_memory_equal(out, v, sizeof v);
    assert_true(fabsf(lse[0]) < 1e-6f);
}
