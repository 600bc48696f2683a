/* hopper_probe_run.h: one product on the kernels of hopper_probe.cu, and what it must give. */
#ifndef FDM_HOPPER_PROBE_RUN_H
#define FDM_HOPPER_PROBE_RUN_H

#include "flash_dmattn.h"

struct hopper_probe {
    int32_t device;
    int32_t m, n, k, batch; /* k, and n where b is transposed, multiples of 8 */
    int32_t transposed;     /* of b */
    int32_t in_registers;   /* of a */
    int32_t broadcast;      /* 1: all batches have the same b, by a stride of 0 */
    int32_t waits;          /* 0: the product does not wait for its operands, which are zeros until they are written */
};
/* c: [batch][m][n], on the host. */
fdm_status hopper_probe_run(const struct hopper_probe *probe, float *c);
/* Seconds of the host for one launch of each of the two kernels, many of each without waiting: plain, and with a
 * cluster and an early begin; then for the two tensor maps of a product. */
fdm_status hopper_probe_host_cost(int32_t device, int32_t times, double seconds[3]);
/* The same, exactly: sums in 64-bit integers. */
void hopper_probe_truth(const struct hopper_probe *probe, float *c);

#endif
