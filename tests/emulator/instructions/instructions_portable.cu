/* instructions_portable.cu: each wrapper of src/cuda/ptx that runs on compute capability 8.0, on given operands. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mbarrier_test.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/special.cuh"
#include "instructions/instructions.h"

struct task {
    const uint32_t *in;
    uint32_t *out;
    uint32_t shared;
    int thread;
};

__device__ __forceinline__ void try_ldmatrix(const struct task &t) {
    for (int i = t.thread; i < 2048; i += INSTRUCTION_THREADS)
        st_shared_4(t.shared + i * 4, t.in[i]);
    __syncthreads();
    for (int n = 0; n < 8; n++) {
        const uint32_t address = t.shared + t.in[n * 128 + t.thread] % 512 * 16;
        uint32_t r[4] = {0, 0, 0, 0}, two[2];
        if (INSTRUCTION == TRY_LDMATRIX_X4)
            ldmatrix_x4(r, address);
        if (INSTRUCTION == TRY_LDMATRIX_X4_TRANS)
            ldmatrix_x4_trans(r, address);
        if (INSTRUCTION == TRY_LDMATRIX_X2)
            ldmatrix_x2(two, address), r[0] = two[0], r[1] = two[1];
        if (INSTRUCTION == TRY_LDMATRIX_X2_TRANS)
            ldmatrix_x2_trans(two, address), r[0] = two[0], r[1] = two[1];
        for (int i = 0; i < 4; i++)
            t.out[n * 4 + i] = r[i];
    }
}

__device__ __forceinline__ void try_mma(const struct task &t) {
    for (int n = 0; n < 5; n++) {
        const uint32_t *in = t.in + n * 1280 + t.thread * 10;
        const uint32_t a[4] = {in[0], in[1], in[2], in[3]};
        uint32_t half[2] = {in[6], in[7]};
        float c[4];
        for (int i = 0; i < 4; i++)
            c[i] = (float)(int)(in[6 + i % 4] % 2048u) / 1024 - 1;
        if (INSTRUCTION == TRY_MMA_BF16)
            mma_m16n8k16_bf16(c, a, in[4], in[5]);
        if (INSTRUCTION == TRY_MMA_F16)
            mma_m16n8k16_f16(c, a, in[4], in[5]);
        if (INSTRUCTION == TRY_MMA_TF32)
            mma_m16n8k8_tf32(c, a, in[4], in[5]);
        if (INSTRUCTION == TRY_MMA_F16_F16) {
            mma_m16n8k16_f16_f16(half, a, in[4], in[5]);
            for (int i = 0; i < 4; i++)
                c[i] = cvt_f32_f16((uint16_t)(half[i / 2] >> i % 2 * 16));
        }
        for (int i = 0; i < 4; i++)
            t.out[n * 4 + i] = __float_as_uint(c[i]);
    }
}

__device__ __forceinline__ void try_approximate(const struct task &t) {
    for (int n = 0; n < 16; n++) {
        const float x = __uint_as_float(t.in[n * 128 + t.thread]);
        t.out[n * 4] = __float_as_uint(ex2_approx(x));
        t.out[n * 4 + 1] = __float_as_uint(lg2_approx(fabsf(x)));
        t.out[n * 4 + 2] = __float_as_uint(tanh_accurate(x));
    }
}

__device__ __forceinline__ void try_conversions(const struct task &t) {
    for (int n = 0; n < 8; n++) {
        const uint32_t x = t.in[n * 256 + t.thread * 2], y = t.in[n * 256 + t.thread * 2 + 1];
        t.out[n * 8] = cvt_bf16x2(__uint_as_float(x), __uint_as_float(y));
        t.out[n * 8 + 1] = cvt_f16x2(__uint_as_float(x), __uint_as_float(y));
        t.out[n * 8 + 2] = __float_as_uint(cvt_f32_f16((uint16_t)x));
        t.out[n * 8 + 3] = __float_as_uint(cvt_f32_bf16((uint16_t)y));
        t.out[n * 8 + 4] = cvt_tf32(__uint_as_float(y));
        t.out[n * 8 + 5] = zero_bytes(x);
    }
}

__device__ __forceinline__ void try_shared(const struct task &t) {
    const uint32_t own = t.shared + t.thread * 32, other = t.shared + (t.thread + 37) % INSTRUCTION_THREADS * 32;
    const uint32_t *in = t.in + t.thread * 8;
    st_shared_16(own, in[0], in[1], in[2], in[3]);
    for (int i = 4; i < 8; i++)
        st_shared_4(own + i * 4, in[i]);
    __syncthreads();
    uint32_t r[4];
    ld_shared_16(r, other + 16);
    for (int i = 0; i < 4; i++)
        t.out[i] = r[i];
    ld_shared_8(t.out[4], t.out[5], other + 8);
    t.out[6] = ld_shared_4(other + 4);
    t.out[7] = ld_shared_2(other + 2);
}

__device__ __forceinline__ void try_cp_async(const struct task &t) {
    const uint32_t own = t.shared + t.thread * 48;
    cp_async_16(own, t.in + t.thread * 4);
    cp_async_commit();
    cp_async_16_fill(own + 16, t.in + 1024 + t.thread * 4, t.in[t.thread] % 17);
    cp_async_commit();
    for (int i = 0; i < 4; i++)
        cp_async_4_fill(own + 32 + i * 4, t.in + 2048 + t.thread * 4 + i, t.in[t.thread + 200] >> i & 1 ? 4 : 0);
    cp_async_commit();
    cp_async_wait<2>();
    t.out[0] = ld_shared_4(own + 4);
    cp_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < 12; i++)
        t.out[1 + i] = ld_shared_4(t.shared + (t.thread + 51) % INSTRUCTION_THREADS * 48 + i * 4);
}

__device__ __forceinline__ void try_barriers(const struct task &t) {
    for (int n = 0; n < 8; n++) {
        st_shared_4(t.shared + t.thread * 4, t.in[n * 128 + t.thread]);
        if (t.thread / 32 == 3) /* warp 3 goes on at once; warp 2 waits for it */
            barrier_arrive(4, 64);
        else if (t.thread / 32 == 2)
            barrier_sync(4, 64);
        barrier_sync(1 + t.thread / 64, 64);
        t.out[n * 2] = ld_shared_4(t.shared + (t.thread ^ 33) * 4);
        t.out[n * 2 + 1] = barrier_red_or(3, INSTRUCTION_THREADS, t.in[n * 128 + t.thread] % 256 == 0);
    }
}

__device__ __forceinline__ void try_mbarriers(const struct task &t) {
    const uint32_t data = t.shared + 64, full = t.shared, empty = t.shared + 8;
    if (t.thread == 0) {
        mbarrier_init(full, INSTRUCTION_THREADS);
        mbarrier_init(empty, INSTRUCTION_THREADS);
    }
    __syncthreads();
    for (int n = 0; n < 8; n++) {
        if (n)
            mbarrier_wait(empty, (n - 1) % 2);
        cp_async_16(data + t.thread * 16, t.in + n * 512 + t.thread * 4);
        cp_async_mbarrier_arrive_noinc(full);
        while (n % 2 && !mbarrier_test(full, 1))
            ;
        mbarrier_wait(full, n % 2);
        t.out[n] = ld_shared_4(data + (t.thread + 77) % INSTRUCTION_THREADS * 16 + t.in[n] % 4 * 4);
        mbarrier_arrive(empty);
    }
}

__device__ __forceinline__ void try_global(const struct task &t, const struct instruction_arguments &a) {
    red_add(a.sums + t.in[t.thread] % 64, (float)(t.in[t.thread + 128] % 1024u));
    uint32_t x[4], y[4];
    ld_global_16(x, t.in + t.in[t.thread] % 32 * 4, t.thread % 3);
    ld_global_16_once(y, t.in + t.in[t.thread + 128] % 32 * 4, t.thread % 5);
    const uint32_t half = ld_global_2_early((const char *)t.in + t.in[t.thread] % 64 * 2);
    t.out[3] = x[0] ^ x[3] ^ y[1] ^ y[2] ^ half ^ ld_global_4_early(t.in + t.in[t.thread] % 64);
    if (t.thread == 0) {
        uint64_t *const both = (uint64_t *)(a.flags + 2); /* the second block waits for the first one's bits */
        if (blockIdx.x == 0)
            st_relaxed_8(both, (uint64_t)(t.in[1] | 1) << 32 | t.in[2]);
        uint64_t seen = 0;
        while (!(seen = ld_relaxed_8(both)))
            ;
        t.out[1] = (uint32_t)seen, t.out[2] = (uint32_t)(seen >> 32);
        while (ld_acquire(a.flags) != (int)blockIdx.x)
            ;
        t.out[4] = (uint32_t)ld_relaxed(a.flags);
        t.out[0] = blockIdx.x ? a.out[(int64_t)(blockIdx.x - 1) * INSTRUCTION_THREADS * INSTRUCTION_OUT] + 3 : t.in[0];
        st_release(a.flags, (int)blockIdx.x + 1);
    }
}

__device__ __forceinline__ void try_control(const struct task &t) {
    griddepcontrol_wait();
    griddepcontrol_wait_after(t.in[t.thread]);
    griddepcontrol_launch_dependents();
    t.out[0] = tid_x_reread();
    exit_if(t.in[t.thread] % 3 == 0);
    t.out[1] = 1 + tid_x_reread() + ctaid_x_reread();
}

/* Opaque values stay what they are. */
__device__ __forceinline__ void try_opaque(const struct task &t) {
    uint32_t x = t.in[t.thread], y = t.in[t.thread + 128], z = x + y;
    int n = (int)x, m = (int)y, k = n ^ m;
    float *out = (float *)t.out;
    z = opaque(z);
    opaque_pair(x, y);
    k = opaque(k);
    opaque_pair(n, m);
    out = opaque(out);
    t.out[0] = x * 3 + y;
    t.out[1] = z;
    t.out[2] = (uint32_t)n * 5 + (uint32_t)m;
    t.out[3] = (uint32_t)k;
    opaque_memory();
    out[4] = __uint_as_float(t.out[0]);
}

extern "C" __global__ void __launch_bounds__(INSTRUCTION_THREADS)
    instructions_portable(const __grid_constant__ struct instruction_arguments a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const int thread = threadIdx.x;
    const struct task t = {a.in, a.out + ((int64_t)blockIdx.x * INSTRUCTION_THREADS + thread) * INSTRUCTION_OUT,
                           shared_address(memory), thread};
    if (INSTRUCTION <= TRY_LDMATRIX_X2_TRANS)
        try_ldmatrix(t);
    else if (INSTRUCTION <= TRY_MMA_TF32)
        try_mma(t);
    else if (INSTRUCTION == TRY_APPROXIMATE)
        try_approximate(t);
    else if (INSTRUCTION == TRY_CONVERSIONS)
        try_conversions(t);
    else if (INSTRUCTION == TRY_SHARED)
        try_shared(t);
    else if (INSTRUCTION == TRY_CP_ASYNC)
        try_cp_async(t);
    else if (INSTRUCTION == TRY_BARRIERS)
        try_barriers(t);
    else if (INSTRUCTION == TRY_MBARRIERS)
        try_mbarriers(t);
    else if (INSTRUCTION == TRY_GLOBAL)
        try_global(t, a);
    else if (INSTRUCTION == TRY_CONTROL)
        try_control(t);
    else if (INSTRUCTION == TRY_OPAQUE)
        try_opaque(t);
}
