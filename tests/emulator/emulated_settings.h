/* emulated_settings.h: how the emulated device behaves, from its environment and from tests. */
#ifndef FDM_EMULATOR_SETTINGS_H
#define FDM_EMULATOR_SETTINGS_H

#include <stdint.h>

/* When what is asynchronous happens. */
enum emulated_mode { EMULATED_EARLY, EMULATED_LATEST, EMULATED_RANDOM };

/* Exported by the emulated driver as `emulated`; read at each start of a grid.
 *
 *     EMULATED_SEED     a number; 1
 *     EMULATED_MODE     early, latest or random (the default)
 *     EMULATED_CHECK    0: results, deadlocks and bounds alone; 1: races too (the default)
 *     EMULATED_STRICT   1: only what PTX promises orders the lanes of a warp
 *     EMULATED_UNORDERED 1: a product's operand in tensor memory and a later product that writes there are not ordered
 *     EMULATED_SWITCH   1: other warps may go on at every access to shared memory
 *     EMULATED_BANKS    1: counts bank conflicts and prints them for each kernel
 *     EMULATED_TRACE    1: prints each launch with its time */
struct emulated {
    uint64_t seed;
    enum emulated_mode mode;
    int check, strict, unordered, switches, banks, trace, quiet;
    int64_t (*findings)(void);         /* so far */
    const char *(*last_finding)(void); /* its sentence */
    void (*begin)(void);               /* the seed begins anew: what follows depends on nothing before */
    void (*forget)(void);              /* findings so far are not told again; counts begin anew */
    int (*found)(const char *kind);    /* since then: how many of the kind */
};

#endif
