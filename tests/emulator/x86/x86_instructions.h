/* x86_instructions.h: each intrinsic that is emulated, on the same operands by the emulation and by the processor. */
#ifndef FDM_X86_INSTRUCTIONS_H
#define FDM_X86_INSTRUCTIONS_H

#include <stdint.h>

union x86_vector {
    float f32[16];
    uint32_t u32[16];
    uint16_t u16[32];
    uint8_t u8[64];
};

struct x86_operands {
    union x86_vector a, b, c;
    union x86_vector tiles[3][16];
    uint64_t mask;
} __attribute__((aligned(64)));

struct x86_result {
    const char *name;
    int floats; /* all NaN are the same */
    union x86_vector bits;
};

enum { X86_RESULTS_MAX = 80 };

/* Each gives the end of what it has written. */
struct x86_instructions {
    struct x86_result *(*avx512)(const struct x86_operands *in, struct x86_result *out);
    struct x86_result *(*avx512_bf16)(const struct x86_operands *in, struct x86_result *out);
    struct x86_result *(*amx)(const struct x86_operands *in, struct x86_result *out);
};

extern const struct x86_instructions x86_emulated, x86_native;

#endif
