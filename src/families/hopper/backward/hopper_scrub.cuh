/* hopper_scrub.cuh: sets rows of K and V in shared memory to 0 that must have no effect, once a block, in kernels whose
 * warpgroups own 64 keys each. A matrix lies in panels of 128 bytes a row; a warp tests its own 16 rows, two lanes a
 * row. */
#ifndef FDM_HOPPER_SCRUB_CUH
#define FDM_HOPPER_SCRUB_CUH

#include "cuda/panels.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/special.cuh"
#include "gpu/finite.cuh"

/* Sets row first + thread / 2 of a matrix, whose panels have `rows` rows, to 0 if it is `hidden` or, with `numbers`, if
 * it holds NaN or inf. Bit 2 n of the result says that the warp's n-th row held NaN or inf. The last panel may be
 * unwritten beyond `columns`. */
template <int columns, int rows, bool numbers>
__device__ __forceinline__ uint32_t scrub_rows(uint32_t tile, int first, bool hidden) {
    const int thread = (int)tid_x_reread() % 128;
    const panels<rows> row = {panels<rows>{tile}.rows(first + thread / 2).at + thread % 2 * 64};
    constexpr int count = (columns + 63) / 64;
    uint32_t bad = 0;
#pragma unroll 2
    for (int n = 0; numbers && n < 4 * count; n++) {
        const int place = (n ^ thread / 2 % 4) % 4; /* lanes in different banks */
        uint32_t word[4];
        if (columns % 64 && n / 4 * 64 + ((thread % 2 * 4 + place) ^ thread / 2 % 8) * 8 >= columns)
            continue;
        ld_shared_16(word, row.panel(n / 4).at + place * 16);
        bad |= not_finite(word);
    }
    uint32_t votes = __ballot_sync(0xffffffff, bad);
    votes |= (votes & 0xaaaaaaaau) >> 1 | (votes & 0x55555555u) << 1;
    if (hidden || (votes >> thread % 32 & 1))
#pragma unroll 1
        for (int n = 0; n < 4 * count; n++)
            st_shared_16(row.panel(n / 4).at + n % 4 * 16, 0, 0, 0, 0);
    return votes;
}

/* P becomes NaN where the key is seen and held NaN or inf, by the bits of scrub_rows(). */
template <int count> __device__ __forceinline__ void spoil_p(float (&p)[count], uint32_t votes) {
    if (!votes)
        return;
#pragma unroll
    for (int i = 0; i < count; i++)
        if ((votes >> (2 * ((int)tid_x_reread() % 32 / 4 + i / 2 % 2 * 8)) & 1) && p[i] != 0.0f)
            p[i] = NOT_A_NUMBER;
}

#endif
