/* tune_pattern.c: a block of random numbers, copied over and over. */
#include "tuner/tune_pattern.h"

#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"

/* A prime number of 16 bytes: rows of different heads do not repeat each other. */
enum { BLOCK_BYTES = 16 * 65521 };

/* splitmix64 (Steele, Lea, Flood). */
static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Sum of four uniform numbers: mean 0, variance 1. */
static double next_normal(uint64_t *state) {
    const uint64_t z = next_random(state);
    const double sum =
        (double)(z & 0xffff) + (double)(z >> 16 & 0xffff) + (double)(z >> 32 & 0xffff) + (double)(z >> 48);
    return (sum / 65535 - 2) * 1.7320508075688772;
}

static void make_block(void *block, size_t bytes, fdm_dtype dtype) {
    uint64_t state = 1;
    const size_t elements = bytes / (size_t)fdm_dtype_bytes(dtype);
    for (size_t i = 0; i < elements; i++)
        switch (dtype) {
        case FDM_BOOL: ((uint8_t *)block)[i] = next_random(&state) % 4 != 0; break;
        case FDM_FLOAT64: ((double *)block)[i] = next_normal(&state); break;
        case FDM_FLOAT32: ((float *)block)[i] = (float)next_normal(&state); break;
        case FDM_FLOAT16: ((uint16_t *)block)[i] = float_to_float16((float)next_normal(&state)); break;
        default: ((uint16_t *)block)[i] = float_to_bfloat16((float)next_normal(&state));
        }
}

fdm_status tune_pattern_fill(fdm_device_id device, void *memory, size_t bytes, fdm_dtype dtype) {
    const fdm_device_id host = {FDM_CPU, 0};
    const size_t first = bytes < BLOCK_BYTES ? bytes : BLOCK_BYTES;
    void *block = memory_allocate(first);
    if (!block)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %zu bytes of random numbers", first);
    make_block(block, first, dtype);
    fdm_status status = fdm_memory_copy(memory, device, block, host, first);
    memory_release(block);
    for (size_t done = first; done < bytes && !status;) {
        const size_t more = bytes - done < done ? bytes - done : done;
        status = fdm_memory_copy((char *)memory + done, device, memory, device, more);
        done += more;
    }
    return status;
}
