/* cuda_device.c: attention on a CUDA device in three steps, compared with the CPU; it needs no CUDA toolkit.
 * It ends with exit code 77 where there is no device.
 * cc -std=c11 cuda_device.c $(pkg-config --cflags --libs flash_dmattn) -lm */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <flash_dmattn.h>

enum { ROWS = 64, HEADS = 2, HEAD_DIM = 64, COUNT = ROWS * HEADS * HEAD_DIM, NO_DEVICE = 77 };

static const fdm_device_id cpu = {FDM_CPU, 0}, cuda = {FDM_CUDA, 0};
static float host[4][COUNT], result[COUNT]; /* q, k, v, and out as the CPU has it; out of the device */

static void check(fdm_status status) {
    if (status == FDM_OK)
        return;
    fprintf(stderr, "cuda_device: %s: %s\n", fdm_status_name(status), fdm_last_error());
    exit(1);
}

int main(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    if (fdm_device_query(FDM_CUDA, 0, &device) != FDM_OK) {
        printf("cuda_device: skipped: %s\n", fdm_last_error());
        return NO_DEVICE;
    }

    int64_t shape[4] = {1, ROWS, HEADS, HEAD_DIM}; /* [B, S, H, D] */
    fdm_tensor on_host[4], on_device[4];
    for (int t = 0; t < 4; t++) {
        void *memory;
        for (int i = 0; i < COUNT; i++)
            host[t][i] = sinf((float)(t * COUNT + i));
        check(fdm_memory_allocate(cuda, sizeof host[t], &memory));
        check(fdm_memory_copy(memory, cuda, host[t], cpu, sizeof host[t]));
        on_host[t] = (fdm_tensor){.data = host[t], .device = cpu, .ndim = 4, .shape = shape};
        on_host[t].dtype = fdm_data_type_of(FDM_FLOAT32);
        on_device[t] = on_host[t];
        on_device[t].data = memory;
        on_device[t].device = cuda;
    }
    fdm_tensors tensors = {.struct_bytes = sizeof tensors, .q = &on_device[0], .k = &on_device[1], .v = &on_device[2]};
    tensors.out = &on_device[3];
    fdm_options options = fdm_options_default();
    options.causal = 1;

    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    void *workspace = NULL;
    check(fdm_describe(FDM_FORWARD, &tensors, &options, &problem));
    check(fdm_plan_attention(&device, &problem, &options, &plan));
    if (plan.workspace_bytes > 0)
        check(fdm_memory_allocate(cuda, (size_t)plan.workspace_bytes, &workspace));
    check(fdm_execute(&plan, &tensors, workspace, (size_t)plan.workspace_bytes, NULL));
    check(fdm_synchronize(cuda));
    check(fdm_memory_copy(result, cpu, on_device[3].data, cuda, sizeof result));
    check(fdm_memory_release(cuda, workspace));
    for (int t = 0; t < 4; t++)
        check(fdm_memory_release(cuda, on_device[t].data));

    tensors.q = &on_host[0], tensors.k = &on_host[1], tensors.v = &on_host[2], tensors.out = &on_host[3];
    check(fdm_attention_forward(&tensors, &options, NULL));
    double squares = 0;
    for (int i = 0; i < COUNT; i++)
        squares += pow((double)result[i] - (double)host[3][i], 2);
    printf("cuda_device: %s on %s, distance from the CPU %.1e\n", plan.kernel, device.name, sqrt(squares));
    return sqrt(squares) < 1e-3 ? 0 : 1; /* 1 for NaN, too */
}
