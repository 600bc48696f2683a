/* emulated_launch.h: what the pretended driver asks of the emulated device. */
#ifndef FDM_EMULATED_LAUNCH_H
#define FDM_EMULATED_LAUNCH_H

#include <stddef.h>

#include "emulated_settings.h"

struct kernel;
struct emulated_launch {
    struct kernel *kernel;
    unsigned grid[3], block[3], shared_bytes, limit_bytes, cluster;
    int programmatic, cooperative;
    void **parameters;
};
/* The parameters are copied. The result is that of what had to run before: 0 or a number of the driver. */
int emulated_enqueue(const struct emulated_launch *launch);
int emulated_run(void);
void emulated_begin(void);
double emulated_seconds(void);

extern struct emulated emulated, emulated_settings_now;

#endif
