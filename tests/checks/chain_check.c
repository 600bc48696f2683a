/* chain_check.c: attention after attention on one stream of a CUDA device, or of the emulated one, while nobody waits:
 * each takes the result before it as its queries and among its keys, and all share one workspace. A launch that may
 * begin before the one ahead has ended must wait for it before it reads or writes. Compared with the CPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"
#include "flash_dmattn.h"
#include "subjects.h"

enum { LINKS = 4, HEADS_KV = 2 };

static const struct form {
    int64_t heads, keys, head_dim;
    const char *what;
} forms[] = {
    {2, 512, 64, "splits of one tile"},
    {8, 1000, 128, "splits of one tile, ragged"},
    {2, 2600, 64, "a ring and a cluster"},
    {2, 9000, 64, "a ring and a second kernel"},
};

/* The first queries, then room for the results, last one first, then K, then V. */
struct memory {
    size_t bytes, k_at, v_at;
    char *data;
};

/* One link: its result lies before its keys, where they begin for the next one. */
struct link {
    int64_t q_shape[4], k_shape[4];
    fdm_tensor q, k, v, out;
    fdm_tensors tensors;
    fdm_options options;
};
static void make_link(struct link *l, const struct form *f, const struct memory *m, fdm_device_id device, int number) {
    const uint64_t row_bytes = (uint64_t)(f->heads * f->head_dim * 2);
    *l = (struct link){.q_shape = {1, 1, f->heads, f->head_dim},
                       .k_shape = {1, f->keys, HEADS_KV, f->head_dim},
                       .options = fdm_options_default()};
    l->q = (fdm_tensor){
        .data = m->data, .device = device, .ndim = 4, .dtype = fdm_data_type_of(FDM_FLOAT16), .shape = l->q_shape};
    l->k = l->v = l->out = l->q;
    l->k.shape = l->v.shape = l->k_shape;
    l->k.byte_offset = m->k_at - row_bytes * (uint64_t)number;
    l->v.byte_offset = m->v_at;
    l->out.byte_offset = l->k.byte_offset - row_bytes;
    l->q.byte_offset = number ? l->k.byte_offset : 0;
    l->tensors = (fdm_tensors){.struct_bytes = sizeof(fdm_tensors), .q = &l->q, .k = &l->k, .v = &l->v, .out = &l->out};
}

/* Returns the choice code of the plan. */
static const char *run_on_device(const struct form *f, const struct memory *m) {
    struct link l;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    static fdm_plan plan = {.struct_bytes = sizeof plan};
    void *workspace;
    make_link(&l, f, m, cuda, 0);
    l.options.kernel = "mma.decode";
    if (fdm_device_query(FDM_CUDA, 0, &device) || fdm_describe(FDM_FORWARD, &l.tensors, &l.options, &problem) ||
        fdm_plan_attention(&device, &problem, &l.options, &plan) || fdm_prepare(&plan) ||
        fdm_memory_allocate(cuda, (size_t)plan.workspace_bytes + 64, &workspace))
        fail("planning");
    for (int n = 0; n < LINKS; n++) {
        make_link(&l, f, m, cuda, n);
        if (fdm_execute(&plan, &l.tensors, workspace, (size_t)plan.workspace_bytes, NULL))
            fail("executing");
    }
    if (fdm_synchronize(cuda))
        fail("synchronising");
    fdm_memory_release(cuda, workspace);
    return plan.choice;
}

static int check(const struct form *f) {
    const size_t q_bytes = (size_t)(f->heads * f->head_dim * 2),
                 k_bytes = (size_t)(f->keys * HEADS_KV * f->head_dim * 2);
    struct memory want = {.bytes = (1 + LINKS) * q_bytes + 2 * k_bytes, .k_at = (1 + LINKS) * q_bytes};
    want.v_at = want.k_at + k_bytes;
    struct memory there = want, have = want;
    void *memory = NULL;
    want.data = malloc(want.bytes);
    have.data = malloc(want.bytes);
    if (!want.data || !have.data || fdm_memory_allocate(cuda, want.bytes, &memory))
        fail("allocating");
    there.data = memory;
    for (size_t n = 0; n < want.bytes / 2; n++)
        ((uint16_t *)(void *)want.data)[n] = float_to_float16((float)random_number());
    if (fdm_memory_copy(there.data, cuda, want.data, host, want.bytes))
        fail("copying");
    const char *choice = run_on_device(f, &there);
    for (int n = 0; n < LINKS; n++) {
        struct link l;
        make_link(&l, f, &want, host, n);
        if (fdm_attention_forward(&l.tensors, &l.options, NULL))
            fail("on the CPU");
    }
    if (fdm_memory_copy(have.data, host, there.data, cuda, want.bytes))
        fail("copying");
    double worst = 0;
    for (size_t n = 0; n < want.bytes / 2; n++) {
        const double error = fabs(float16_to_float(((uint16_t *)(void *)have.data)[n]) -
                                  float16_to_float(((uint16_t *)(void *)want.data)[n]));
        worst = error > worst || isnan(error) ? error : worst;
    }
    const int right = worst < 1e-3;
    printf("%s %s by %s, %d links, largest error %.1e\n", right ? "right" : "WRONG", f->what, choice, LINKS, worst);
    free(want.data);
    free(have.data);
    fdm_memory_release(cuda, memory);
    return !right;
}

int chain_checks(const struct options *o) {
    const int64_t repeat = (int64_t)given_or(o->repeat, 1);
    int wrong = 0;
    if (!has_device())
        return EXIT_NO_DEVICE;
    for (int64_t n = 0; n < repeat; n++)
        for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++)
            wrong += check(&forms[i]);
    return exit_code(repeat, wrong);
}
