/* host_overhead.c: what one warm call costs the host: tiny problems on a CUDA device, calls back to back on one stream.
 *
 * Usage: host-overhead [--device N] [--calls N] [--batches N] [--current] [--first forward|backward,D,CAUSAL]
 * A batch is `calls` calls on the host's clock, then a wait that is not counted; calls are few enough for the stream's
 * queue. Printed: quartiles over the batches, in microseconds a call. "execute" has a plan that was made before; "all"
 * is describe, plan and execute, with a workspace lent from memory that is there. With --current the device's context
 * is current on the thread, as it is in programs that use the CUDA runtime. */
#include <dlfcn.h>
#include <getopt.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "flash_dmattn.h"

enum { BATCHES_MAX = 10000 };

struct shape {
    const char *name;
    fdm_pass pass;
    int64_t batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim;
    int32_t causal;
};
static const struct shape shapes[] = {
    {"forward", FDM_FORWARD, 1, 64, 64, 2, 2, 64, 0},
    {"forward, causal, D 128", FDM_FORWARD, 2, 128, 128, 4, 2, 128, 1},
    {"forward, one row", FDM_FORWARD, 2, 1, 512, 4, 1, 128, 1},
    {"backward", FDM_BACKWARD, 1, 64, 64, 2, 2, 64, 0},
    {"backward, causal, D 128", FDM_BACKWARD, 2, 128, 128, 4, 2, 128, 1},
};

struct call {
    fdm_device_id device;
    int64_t q_shape[4], k_shape[4], lse_shape[3];
    fdm_tensor q, k, v, out, lse, dout, dq, dk, dv;
    fdm_tensors tensors;
    fdm_options options;
    fdm_plan plan;
    void *memory, *workspace;
    size_t bytes;
};

static int fail(const char *what) {
    fprintf(stderr, "host-overhead: %s: %s\n", what, fdm_last_error());
    return 1;
}

static void lay_out(struct call *c, fdm_tensor *t, fdm_dtype dtype, int32_t ndim, int64_t *shape) {
    size_t bytes = (size_t)fdm_dtype_bytes(dtype);
    for (int32_t i = 0; i < ndim; i++)
        bytes *= (size_t)shape[i];
    *t = (fdm_tensor){.data = c->memory ? (char *)c->memory + c->bytes : NULL,
                      .device = c->device,
                      .ndim = ndim,
                      .dtype = fdm_data_type_of(dtype),
                      .shape = shape};
    c->bytes += (bytes + 255) / 256 * 256;
}

static void lay_out_all(struct call *c, fdm_pass pass) {
    fdm_tensor *rows[] = {&c->q, &c->out, &c->dout, &c->dq}, *keys[] = {&c->k, &c->v, &c->dk, &c->dv};
    c->bytes = 0;
    for (int i = 0; i < 4; i++)
        lay_out(c, rows[i], FDM_BFLOAT16, 4, c->q_shape);
    for (int i = 0; i < 4; i++)
        lay_out(c, keys[i], FDM_BFLOAT16, 4, c->k_shape);
    lay_out(c, &c->lse, FDM_FLOAT32, 3, c->lse_shape);
    c->tensors = (fdm_tensors){
        .struct_bytes = sizeof(fdm_tensors), .q = &c->q, .k = &c->k, .v = &c->v, .out = &c->out, .lse = &c->lse};
    if (pass == FDM_BACKWARD) {
        c->tensors.dout = &c->dout;
        c->tensors.dq = &c->dq;
        c->tensors.dk = &c->dk;
        c->tensors.dv = &c->dv;
    }
}

/* Tensors of zeros. */
static int make_tensors(struct call *c, const struct shape *s, int32_t device) {
    *c = (struct call){.device = {FDM_CUDA, device},
                       .q_shape = {s->batch, s->seqlen_q, s->heads, s->head_dim},
                       .k_shape = {s->batch, s->seqlen_k, s->heads_kv, s->head_dim},
                       .lse_shape = {s->batch, s->heads, s->seqlen_q},
                       .options = fdm_options_default(),
                       .plan = {.struct_bytes = sizeof c->plan}};
    c->options.causal = s->causal;
    lay_out_all(c, s->pass);
    if (fdm_memory_allocate(c->device, c->bytes, &c->memory))
        return fail("tensors");
    lay_out_all(c, s->pass);
    return fdm_memory_fill(c->device, c->memory, 0, c->bytes) || fdm_synchronize(c->device) ? fail("tensors") : 0;
}
static int make_plan(struct call *c, fdm_pass pass) {
    fdm_device facts = {.struct_bytes = sizeof facts};
    fdm_problem problem;
    return fdm_device_query(FDM_CUDA, c->device.index, &facts) ||
                   fdm_describe(pass, &c->tensors, &c->options, &problem) ||
                   fdm_plan_attention(&facts, &problem, &c->options, &c->plan)
               ? fail("the plan")
               : 0;
}
static int make_workspace(struct call *c) {
    const size_t bytes = (size_t)c->plan.workspace_bytes;
    return bytes > 0 && fdm_memory_allocate(c->device, bytes, &c->workspace) ? fail("workspace") : 0;
}
/* Tensors, a plan, its workspace, its kernels loaded. */
static int make(struct call *c, const struct shape *s, int32_t device) {
    if (make_tensors(c, s, device) || make_plan(c, s->pass))
        return 1;
    return fdm_prepare(&c->plan) ? fail(s->name) : make_workspace(c);
}

static void release(struct call *c) {
    fdm_memory_release(c->device, c->workspace);
    fdm_memory_release(c->device, c->memory);
}

static void *lend(void *context, size_t bytes) {
    struct call *c = context;
    return bytes <= (size_t)c->plan.workspace_bytes ? c->workspace : NULL;
}
static void take_back(void *context, void *memory) { (void)context, (void)memory; }

static fdm_status run_plan(struct call *c) {
    return fdm_execute(&c->plan, &c->tensors, c->workspace, (size_t)c->plan.workspace_bytes, NULL);
}
static fdm_status run_all(struct call *c) {
    const fdm_allocator allocator = {c, lend, take_back};
    return c->plan.problem.pass == FDM_FORWARD ? fdm_attention_forward(&c->tensors, &c->options, &allocator)
                                               : fdm_attention_backward(&c->tensors, &c->options, &allocator);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int measure(struct call *c, fdm_status (*run)(struct call *), int64_t calls, int64_t batches, double *samples) {
    for (int64_t b = -2; b < batches; b++) { /* two to warm up */
        const double from = now();
        for (int64_t i = 0; i < calls; i++)
            if (run(c))
                return fail("a call");
        const double took = (now() - from) / (double)calls;
        if (fdm_synchronize(c->device))
            return fail("waiting");
        samples[b < 0 ? 0 : b] = took;
    }
    qsort(samples, (size_t)batches, sizeof *samples, compare);
    return 0;
}

/* problem: "forward,64,1": pass, head dim, causal. */
static int first_call(const char *problem, int32_t device) {
    char pass[16];
    long long head_dim;
    int causal;
    if (sscanf(problem, "%15[a-z],%lld,%d", pass, &head_dim, &causal) != 3) {
        fprintf(stderr, "host-overhead: --first takes a pass, a head dim and 0 or 1: forward,128,1\n");
        return 2;
    }
    const struct shape s = {
        problem, strcmp(pass, "backward") ? FDM_FORWARD : FDM_BACKWARD, 1, 4096, 4096, 16, 16, head_dim, causal};
    struct call call;
    double at[5];
    int failed = make_tensors(&call, &s, device);
    at[0] = now();
    failed = failed || make_plan(&call, s.pass);
    at[1] = now();
    failed = failed || (fdm_prepare(&call.plan) && fail("the kernels"));
    at[2] = now();
    failed = failed || make_workspace(&call) || run_plan(&call) || fdm_synchronize(call.device);
    at[3] = now();
    failed = failed || run_plan(&call) || fdm_synchronize(call.device);
    at[4] = now();
    if (!failed)
        printf("plan %.3f kernels %.3f run %.3f all %.3f second %.3f\n", (at[1] - at[0]) / 1e3, (at[2] - at[1]) / 1e3,
               (at[3] - at[2]) / 1e3, (at[3] - at[0]) / 1e3, (at[4] - at[3]) / 1e3);
    release(&call);
    return failed;
}

static int make_current(int64_t device) {
    void *context, *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned), (*retain)(void **, int), (*set)(void *);
    if (!library || !(*(void **)&init = dlsym(library, "cuInit")) ||
        !(*(void **)&retain = dlsym(library, "cuDevicePrimaryCtxRetain")) ||
        !(*(void **)&set = dlsym(library, "cuCtxSetCurrent")) || init(0) || retain(&context, (int)device) ||
        set(context)) {
        fprintf(stderr, "host-overhead: the device's context cannot be made current\n");
        return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"device", required_argument, 0, 'd'},  {"calls", required_argument, 0, 'c'},
        {"batches", required_argument, 0, 'b'}, {"current", no_argument, 0, 'u'},
        {"first", required_argument, 0, 'f'},   {0}};
    static double samples[BATCHES_MAX];
    int64_t calls = 200, batches = 100, device = 0;
    const char *first = NULL;
    int option, current = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'u') {
            current = 1;
            continue;
        }
        if (option == 'f') {
            first = optarg;
            continue;
        }
        int64_t *value = option == 'd' ? &device : option == 'c' ? &calls : option == 'b' ? &batches : NULL;
        if (!value)
            return 2;
        *value = strtoll(optarg, NULL, 10);
    }
    if (calls < 1 || batches < 1 || batches > BATCHES_MAX || optind < argc) {
        fprintf(stderr,
                "usage: host-overhead [--device N] [--calls N] [--batches 1..%d] [--current] [--first PASS,D,CAUSAL]\n",
                BATCHES_MAX);
        return 2;
    }
    if (current && make_current(device))
        return 1;
    if (first)
        return first_call(first, (int32_t)device);
    printf("%-28s %-8s %8s %8s %8s  us a call\n", "problem", "what", "25 %", "median", "75 %");
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        static const char *const names[2] = {"execute", "all"};
        fdm_status (*const runs[2])(struct call *) = {run_plan, run_all};
        struct call call;
        int failed = make(&call, &shapes[i], (int32_t)device);
        for (int r = 0; r < 2 && !failed; r++) {
            failed = measure(&call, runs[r], calls, batches, samples);
            if (!failed)
                printf("%-28s %-8s %8.3f %8.3f %8.3f  %s\n", shapes[i].name, names[r], samples[batches / 4],
                       samples[batches / 2], samples[batches * 3 / 4], call.plan.kernel);
        }
        release(&call);
        if (failed)
            return 1;
    }
    return 0;
}
