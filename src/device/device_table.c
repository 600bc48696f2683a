/* device_table.c: rows of named CUDA architectures; a device that is present is asked instead. */
#include "device/device.h"

/* Shared memory, registers and threads: CUDA C++ Programming Guide, "Compute Capabilities". Multiprocessors,
 * second-level cache and bandwidth are those of one part of the architecture, from NVIDIA's architecture white papers
 * and data sheets; a plan for a named device is for that part. Published figures of the B200's cache differ, so it is
 * unknown here. */
#define GB 1000000000LL
const struct device_row device_table[] = {
    {"sm_80", 8, 0, 108, 163 << 10, 40 << 20, 2039 * GB, 65536, 2048, "A100 SXM 80 GB"},
    {"sm_86", 8, 6, 84, 99 << 10, 6 << 20, 768 * GB, 65536, 1536, "GA102: RTX A6000"},
    {"sm_89", 8, 9, 142, 99 << 10, 96 << 20, 960 * GB, 65536, 1536, "AD102: RTX 6000 Ada"},
    {"sm_90", 9, 0, 132, 227 << 10, 50 << 20, 4800 * GB, 65536, 2048, "H200 SXM; H100 SXM but for its 3350 GB/s"},
    {"sm_100", 10, 0, 148, 227 << 10, 0, 8000 * GB, 65536, 2048, "B200"},
    {"sm_120", 12, 0, 170, 99 << 10, 96 << 20, 1792 * GB, 65536, 1536, "GB202: RTX 5090"},
};
const int32_t device_table_length = sizeof device_table / sizeof device_table[0];
