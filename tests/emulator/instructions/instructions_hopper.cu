/* instructions_hopper.cu: each wrapper of src/cuda/ptx that needs compute capability 9.0, on given operands, in
 * clusters of two blocks. */
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/prefetch.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "instructions/instructions.h"

#define BARRIER_OFFSET (INSTRUCTION_SHARED - 64)

__device__ __forceinline__ void try_cluster(const struct instruction_arguments &a, uint32_t *out, uint32_t shared) {
    const uint32_t rank = cluster_ctarank(), thread = threadIdx.x, there = mapa_shared(shared, rank ^ 1);
    const uint32_t *in = a.in + thread * 4;
    st_cluster_4(there + thread * 16, in[0] + rank);
    st_cluster_4(there + thread * 16 + 4, in[1]);
    st_shared_4(shared + thread * 16 + 8, in[2] ^ rank);
    st_shared_4(shared + thread * 16 + 12, in[3]);
    barrier_cluster_arrive();
    barrier_cluster_wait();
    out[0] = ld_shared_4(shared + (thread ^ 5) * 16);
    out[1] = ld_cluster_4(there + (thread ^ 9) * 16 + 8);
    ld_shared_8(out[2], out[3], shared + (thread ^ 3) * 16 + 8);
    for (int n = 0; n < 4; n++) { /* each thread arrives in the other block */
        if (n < 2)
            mbarrier_arrive_cluster(mapa_shared(shared + BARRIER_OFFSET + 8, rank ^ 1));
        else
            mbarrier_arrive_remote(mapa_shared(shared + BARRIER_OFFSET + 8, rank ^ 1));
        mbarrier_wait_cluster(shared + BARRIER_OFFSET + 8, n % 2);
        out[4 + n] = n;
        barrier_cluster_arrive_relaxed();
        barrier_cluster_wait();
    }
    const uint32_t written = INSTRUCTION_THREADS * 16, come = BARRIER_OFFSET;
    if (thread == 0)
        mbarrier_arrive_expect_tx(shared + come, INSTRUCTION_THREADS * 24);
    st_async_16(there + written + thread * 16, in[0], in[1], in[2] + rank, in[3], there + come);
    st_async_8(there + 2 * written + thread * 8, in[3] ^ rank, in[2], there + come);
    mbarrier_wait_cluster(shared + come, 0);
    for (int n = 0; n < 4; n++)
        out[8 + n] = ld_shared_4(shared + written + (thread ^ 6) * 16 + n * 4);
    ld_shared_8(out[12], out[13], shared + 2 * written + (thread ^ 10) * 8);
    const uint32_t sent = 3 * written, came = BARRIER_OFFSET + 16;
    if (thread == 0)
        mbarrier_arrive_expect_tx(shared + came, written);
    fence_proxy_async(); /* what the other block has sent is read by the copy */
    __syncthreads();
    if (thread == 0)
        cp_async_bulk_cluster(there + sent, shared + written, written, there + came);
    mbarrier_wait_cluster(shared + came, 0);
    out[14] = ld_shared_4(shared + sent + (thread ^ 12) * 16);
    out[15] = ld_shared_4(shared + sent + (thread ^ 12) * 16 + 8);
    barrier_cluster_arrive(); /* the other block's barrier is there until all has come */
    barrier_cluster_wait();
}

__device__ __forceinline__ void dump(const struct instruction_arguments &a, uint32_t *out, uint32_t shared) {
    const uint32_t step = a.tile_bytes / 4 / INSTRUCTION_OUT + 1;
    for (uint32_t i = 0; i < INSTRUCTION_OUT; i++) {
        const uint32_t word = (i * INSTRUCTION_THREADS + threadIdx.x) % (a.tile_bytes / 4);
        out[i] = ld_shared_4(shared + word * 4);
    }
    (void)step;
}

__device__ __forceinline__ void try_copies(const struct instruction_arguments &a, uint32_t *out, uint32_t shared) {
    const uint32_t full = shared + BARRIER_OFFSET, rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        const bool bulk = INSTRUCTION == TRY_BULK;
        if (!bulk)
            prefetch_tensormap(&a.map);
        mbarrier_arrive_expect_tx(full, a.tile_bytes);
        if (bulk)
            cp_async_bulk_prefetch(a.in + rank * 64, a.tile_bytes);
        if (bulk)
            cp_async_bulk(shared, a.in + rank * 64, a.tile_bytes, full);
        if (INSTRUCTION == TRY_TILE)
            cp_async_bulk_tensor_3d(shared, &a.map, full, a.at[0], a.at[1], a.at[2]);
        if (INSTRUCTION == TRY_TILE_4D)
            cp_async_bulk_tensor_4d(shared, &a.map, full, a.at[0], a.at[1], a.at[2], a.at[3]);
        if (INSTRUCTION == TRY_MULTICAST && rank == 1)
            cp_async_bulk_tensor_3d_multicast(shared, &a.map, full, a.at[0], a.at[1], a.at[2], 3);
    }
    mbarrier_wait(full, 0);
    dump(a, out, shared);
}

/* Operands in shared memory: a 64 x 64, b 256 x 64 (or 64 x 256 in runs of 64 columns); one step of 16 of K. */
__device__ __forceinline__ void try_wgmma(const struct instruction_arguments &a, uint32_t *out, uint32_t shared) {
    constexpr bool transposed =
        INSTRUCTION == TRY_WGMMA_SHARED_T || INSTRUCTION == TRY_WGMMA_REGISTERS_T || INSTRUCTION == TRY_WGMMA_BOTH_T;
    constexpr bool registers = INSTRUCTION == TRY_WGMMA_REGISTERS || INSTRUCTION == TRY_WGMMA_REGISTERS_T;
    const uint32_t b = shared + 8192;
    for (uint32_t i = threadIdx.x; i < 10240; i += INSTRUCTION_THREADS)
        st_shared_4(shared + i * 4, a.in[i]);
    fence_proxy_async();
    fence_proxy_async_global();
    __syncthreads();
    float d[WGMMA_N / 2];
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; i++)
        d[i] = (float)(int)(threadIdx.x + i) / 64;
    const uint32_t *in = a.in + 10240 + threadIdx.x * 4;
    const uint32_t fragments[4] = {in[0], in[1], in[2], in[3]};
    const uint64_t matrix = wgmma_descriptor(b + (transposed ? 2048 : 32), transposed ? 8192 : 0);
    wgmma_fence();
    if constexpr (registers)
        wgmma_m64k16<WGMMA_F16, transposed>(d, fragments, matrix, true);
    else if constexpr (INSTRUCTION == TRY_WGMMA_BOTH_T)
        wgmma_m64k16<WGMMA_F16, 1, 1>(d, wgmma_descriptor(shared + 2048, 8192), matrix, true);
    else
        wgmma_m64k16<WGMMA_F16, transposed>(d, wgmma_descriptor(shared + 64, 0), matrix, true);
    wgmma_commit_group();
    wgmma_wait_group<0>(d);
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; i++)
        out[i] = __float_as_uint(d[i]);
    setmaxnreg_dec<168>();
    setmaxnreg_inc<168>();
}

__device__ __forceinline__ void try_stmatrix(const struct instruction_arguments &a, uint32_t *out, uint32_t shared) {
    const uint32_t *in = a.in + threadIdx.x * 4;
    const uint32_t r[4] = {in[0], in[1], in[2], in[3]}, row = threadIdx.x * 5 % INSTRUCTION_THREADS; /* each once */
    if (INSTRUCTION == TRY_STMATRIX)
        stmatrix_x4(shared + row * 16, r);
    else
        stmatrix_x4_trans(shared + row * 16, r);
    __syncthreads();
    for (int i = 0; i < 4; i++)
        out[i] = ld_shared_4(shared + threadIdx.x * 16 + i * 4);
}

/* Both blocks add whole numbers, in two groups, to the same sums; and store them, each for itself. */
__device__ __forceinline__ void try_bulk_add(const struct instruction_arguments &a, uint32_t *out, uint32_t shared) {
    const uint32_t number = __float_as_uint((float)(a.in[threadIdx.x] % 64));
    if (threadIdx.x < 64)
        st_shared_4(shared + threadIdx.x * 4, number);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_reduce_async_bulk_add(a.sums, shared, 256);
        cp_async_bulk_store(out, shared, 256);
        cp_async_bulk_commit();
        cp_reduce_async_bulk_add(a.sums, shared + 128, 128);
        cp_async_bulk_commit();
        cp_async_bulk_wait_read<1>();
        st_shared_4(shared + 64, 0); /* the first group has read it, and the second does not */
        cp_async_bulk_wait_read<0>();
        cp_async_bulk_wait<0>();
    }
}

/* A tile of the operands over the first of them, by one block; all of them are results. */
__device__ __forceinline__ void try_store(const struct instruction_arguments &a, uint32_t *out, uint32_t shared) {
    constexpr uint32_t WORDS = 72 * 20 * 3 / 2; /* of the tensor */
    if (cluster_ctarank() != 0)
        return;
    for (uint32_t i = threadIdx.x; i < (uint32_t)a.tile_bytes / 4; i += INSTRUCTION_THREADS)
        st_shared_4(shared + i * 4, a.in[INSTRUCTION_IN - 1 - i]);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_3d_store(&a.map, shared, a.at[0], a.at[1], a.at[2]);
        cp_async_bulk_commit();
        cp_async_bulk_wait<0>();
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < WORDS; i += INSTRUCTION_THREADS)
        out[i / INSTRUCTION_THREADS] = a.in[i];
}

extern "C" __global__ void __launch_bounds__(INSTRUCTION_THREADS, 3) __cluster_dims__(2, 1, 1)
    instructions_hopper(const __grid_constant__ struct instruction_arguments a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory);
    uint32_t *out = a.out + ((int64_t)blockIdx.x * INSTRUCTION_THREADS + threadIdx.x) * INSTRUCTION_OUT;
    if (threadIdx.x == 0) {
        mbarrier_init(shared + BARRIER_OFFSET, 1);
        mbarrier_init(shared + BARRIER_OFFSET + 8, INSTRUCTION_THREADS);
        mbarrier_init(shared + BARRIER_OFFSET + 16, 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (INSTRUCTION == TRY_CLUSTER)
        try_cluster(a, out, shared);
    else if (INSTRUCTION <= TRY_BULK)
        try_copies(a, out, shared);
    else if (INSTRUCTION <= TRY_WGMMA_REGISTERS_T || INSTRUCTION == TRY_WGMMA_BOTH_T)
        try_wgmma(a, out, shared);
    else if (INSTRUCTION == TRY_STMATRIX || INSTRUCTION == TRY_STMATRIX_TRANS)
        try_stmatrix(a, out, shared);
    else if (INSTRUCTION == TRY_BULK_ADD)
        try_bulk_add(a, out, shared);
    else if (INSTRUCTION == TRY_TILE_STORE)
        try_store(a, out, shared);
    else
        red_add_4(a.sums + a.in[threadIdx.x] % 16 * 4, 1, (float)threadIdx.x, 2, 3);
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
