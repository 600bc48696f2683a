/* cpu_ceilings.c: what one core of this machine multiplies and adds in float32 at most, by instruction set: the
 * denominator of "share of the FMA peak". Usage: cpu-ceilings; prints a JSON object of GFLOP/s, of the sets that the
 * library runs here.
 *
 * Twelve sums are in flight, more than two units of four cycles need; the best of nine samples counts, in processor
 * time of this thread. */
#if defined(__x86_64__)
#    include <immintrin.h>
#    include <stdio.h>
#    include <string.h>
#    include <time.h>

#    include "flash_dmattn.h"

enum { SUMS = 12, ROUNDS = 4000000, SAMPLES = 9 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A function that runs ROUNDS x SUMS multiply-adds of one vector type; the sums are used, so that none is dropped. */
#    define FMA_LOOP(name, isa, vector, set, fma)                                                                    \
        __attribute__((target(isa), noinline)) static void name(void) {                                              \
            vector sum[SUMS], a = set(0.999f), b = set(0.001f);                                                      \
            for (int i = 0; i < SUMS; i++)                                                                           \
                sum[i] = set((float)i);                                                                              \
            for (int n = 0; n < ROUNDS; n++) {                                                                       \
                _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) sum[i] = fma(sum[i], a, b);                  \
                __asm__ volatile(""                                                                                  \
                                 : "+x"(sum[0]), "+x"(sum[1]), "+x"(sum[2]), "+x"(sum[3]), "+x"(sum[4]),             \
                                   "+x"(sum[5]));                                                                    \
            }                                                                                                        \
            __asm__ volatile("" : : "x"(sum[6]), "x"(sum[7]), "x"(sum[8]), "x"(sum[9]), "x"(sum[10]), "x"(sum[11])); \
        }

FMA_LOOP(avx2_loop, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps)
FMA_LOOP(avx512_loop, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps)

static double peak(void (*loop)(void), int lanes) {
    double best = 0;
    for (int sample = 0; sample < SAMPLES; sample++) {
        const double begin = seconds();
        loop();
        const double speed = 2.0 * lanes * SUMS * ROUNDS / (seconds() - begin) * 1e-9;
        best = speed > best ? speed : best;
    }
    return best;
}

static int runs_here(const char *kernel) {
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    for (int32_t i = 0; !fdm_kernel_list(i, &info); i++)
        if (strcmp(info.name, kernel) == 0)
            return info.available;
    return 0;
}

int main(void) {
    if (runs_here("cpu.forward.avx2"))
        printf("{\"avx2\": %.1f", peak(avx2_loop, 8));
    if (runs_here("cpu.forward.avx512"))
        printf(", \"avx512\": %.1f", peak(avx512_loop, 16));
    puts(runs_here("cpu.forward.avx2") ? "}" : "{}");
    return 0;
}
#else
#    include <stdio.h>
int main(void) {
    puts("{}");
    return 0;
}
#endif
