/* device_table.c: rows of named CUDA architectures; a device that is present is asked instead. */
#include "device.h"

/* Shared memory: CUDA C++ Programming Guide, "Compute Capabilities", maximum per block after opt-in. SM counts: the
 * full data-centre or flagship part of each architecture; a plan for a named device is for that part. */
const struct device_row device_table[] = {
    {"sm_80", 8, 0, 108, 163 << 10, "A100"},   {"sm_86", 8, 6, 84, 99 << 10, "GA102"},
    {"sm_89", 8, 9, 142, 99 << 10, "AD102"},   {"sm_90", 9, 0, 132, 227 << 10, "H100 and H200 SXM"},
    {"sm_100", 10, 0, 148, 227 << 10, "B200"}, {"sm_120", 12, 0, 170, 99 << 10, "GB202"},
};
const int32_t device_table_length = sizeof device_table / sizeof device_table[0];
