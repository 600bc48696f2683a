/* hopper_probe_device.c: the probe's products on the first device 9.0; they must be exact.
 *
 * Usage: hopper-probe            exit code 0, 1, or 77 where there is no such device
 *        hopper-probe --serial   under a tool that lets one kernel run at a time */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"
#include "hopper_probe_run.h"

static int32_t first_hopper(void) {
    fdm_device d = {.struct_bytes = sizeof d};
    for (int32_t i = 0; i < cuda_device_count(); i++)
        if (cuda_device_facts(i, &d) == FDM_OK && d.compute_major == 9 && d.compute_minor == 0)
            return i;
    return -1;
}

struct counts {
    int64_t wrong, stale; /* not exactly right; of those, zero, as of operands that were not there yet */
};
static fdm_status compare(const struct hopper_probe *p, struct counts *counts) {
    const int64_t count = (int64_t)p->batch * p->m * p->n;
    float *c = malloc((size_t)count * sizeof *c), *truth = malloc((size_t)count * sizeof *c);
    *counts = (struct counts){0, 0};
    const fdm_status status = c && truth ? hopper_probe_run(p, c) : FDM_ERROR_OUT_OF_MEMORY;
    if (!status) {
        hopper_probe_truth(p, truth);
        for (int64_t i = 0; i < count; i++) {
            counts->wrong += !(c[i] == truth[i]);
            counts->stale += c[i] == 0 && truth[i] != 0;
        }
    }
    free(c);
    free(truth);
    return status;
}

static int check_products(int32_t device) {
    static const struct hopper_probe problems[] = {
        {.m = 450, .n = 120, .k = 1000, .batch = 2}, /* past the end of every axis, and around the ring */
        {.m = 256, .n = 128, .k = 64, .batch = 1},   /* one step */
        {.m = 1, .n = 8, .k = 8, .batch = 1},
        {.m = 129, .n = 64, .k = 448, .batch = 3, .broadcast = 1}, /* the ring exactly once */
        {.m = 700, .n = 128, .k = 2048, .batch = 2},
    };
    int failed = 0;
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++)
        for (int variant = 0; variant < 4; variant++) {
            struct hopper_probe p = problems[i];
            p.device = device;
            p.transposed = variant % 2;
            p.in_registers = variant / 2;
            p.waits = 1;
            struct counts counts;
            const fdm_status status = compare(&p, &counts);
            failed += status || counts.wrong > 0;
            printf("%s m %d, n %d, k %d, batch %d%s%s%s: ", status || counts.wrong > 0 ? "WRONG" : "exact", p.m, p.n,
                   p.k, p.batch, p.transposed ? ", b transposed" : "", p.in_registers ? ", a in registers" : "",
                   p.broadcast ? ", b broadcast" : "");
            status ? printf("%s\n", fdm_last_error()) : printf("%lld elements differ\n", (long long)counts.wrong);
        }
    return failed;
}

/* Without its wait the product finds zeros: it began before the kernel ahead of it had ended. */
static int check_early_begin(int32_t device) {
    const struct hopper_probe p = {.device = device, .m = 256, .n = 128, .k = 64, .batch = 1, .waits = 0};
    struct counts counts;
    const fdm_status status = compare(&p, &counts);
    const int early = !status && counts.stale > 0 && counts.stale == counts.wrong;
    printf("%s\n", early    ? "exact only by its wait: the second kernel began early"
                   : status ? fdm_last_error()
                            : "WRONG: the second kernel did not begin early, so its wait was not tested");
    return !early;
}

static int check_device(int serial) {
    const int32_t device = first_hopper();
    if (device < 0) {
        printf("skipped: %s\n",
               cuda_device_count() > 0 ? "no CUDA device has compute capability 9.0" : fdm_last_error());
        return 77;
    }
    int failed = check_products(device);
    if (serial)
        printf("not covered: whether a programmatic launch begins early\n");
    else
        failed += check_early_begin(device);
    double seconds[3];
    if (hopper_probe_host_cost(device, 200, seconds) || hopper_probe_host_cost(device, 200, seconds)) /* warm */
        printf("WRONG: %s\n", fdm_last_error()), failed++;
    else
        printf(
            "the host needs %.2f us for a launch, %.2f with a cluster and an early begin, %.2f for two tensor maps\n",
            seconds[0] * 1e6, seconds[1] * 1e6, seconds[2] * 1e6);
    return failed > 0;
}

int main(int argc, char **argv) {
    const int serial = argc == 2 && strcmp(argv[1], "--serial") == 0;
    if (argc > 1 && !serial) {
        fprintf(stderr, "usage: hopper-probe [--serial]\n");
        return 2;
    }
    return check_device(serial);
}
