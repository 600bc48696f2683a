/* class.h: the classes of problems and devices that one measured choice stands for. */
#ifndef FDM_TUNING_CLASS_H
#define FDM_TUNING_CLASS_H

#include "flash_dmattn.h"

enum { TUNING_KEY_BYTES = 896, TUNING_MAKER_BYTES = 128 };

/* The upper edge of a length's class: eighths of an octave up to 4096, quarters above; up to 8 the length itself. */
int64_t tuning_length_edge(int64_t length);
/* The same in quarters of an octave, for batches x heads. */
int64_t tuning_batch_edge(int64_t count);
/* The device and the problem's class in words. num_threads: of the CPU. */
fdm_status tuning_key(const fdm_device *device, const fdm_problem *problem, int32_t num_threads,
                      char key[TUNING_KEY_BYTES]);
/* The same of a class that is said in words already: of what is no attention. */
fdm_status tuning_key_of(const fdm_device *device, const char *class, int32_t num_threads, char key[TUNING_KEY_BYTES]);
/* What made a choice: library, kernels' sources, driver and NVRTC. What another made is not used. */
fdm_status tuning_maker(const fdm_device *device, char maker[TUNING_MAKER_BYTES]);

#endif
