/* mma_decode_merge.cuh: the end of a block of mma_decode.cu: it merges its warps' results, and those of a cluster's
 * blocks. It uses the constants and macros of mma_decode.cu. */
#ifndef FDM_MMA_DECODE_MERGE_CUH
#define FDM_MMA_DECODE_MERGE_CUH

/* Which keys, rows and columns are a warp's. */
struct warp_part {
    int key_group, row, share;
};
/* The warps' results side by side, [KEY_GROUPS][ROWS]: PART_WIDTH floats of O, a maximum, a sum. */
struct parts {
    float *outs, *maxima, *sums;
};
__device__ __forceinline__ void leave_parts(const struct warp_state &w, const struct parts &p, int num_rows,
                                            const struct warp_part &own) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = own.row + lane / 4 + half * 8, part = own.key_group * ROWS + row;
        float sum = w.row_sum[half];
        sum = quad_sum(sum);
        if (row >= num_rows)
            continue;
        if (lane % 4 == 0 && own.share == 0) {
            p.maxima[part] = w.row_max[half] * (IN_LOG2 ? LN_2 : 1.0f);
            p.sums[part] = sum;
        }
#pragma unroll
        for (int n = 0; n < OUT_TILES; n++)
            *(float2 *)&p.outs[part * PART_WIDTH + (own.share * OUT_TILES + n) * 8 + lane % 4 * 2] =
                make_float2(w.o[0][n][half * 2], w.o[0][n][half * 2 + 1]);
    }
}

/* The weight of a part whose maximum is `own`. Where all scores are NaN no part has a maximum, and the sums are NaN:
 * they keep weight. */
__device__ __forceinline__ float weight_of(float own, float most) {
    return own == most ? 1.0f : ex2_approx((own - most) * LOG2_E);
}

__device__ __forceinline__ float4 times(float factor, float4 x) {
    return make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w);
}

/* The sink of a packed row. It is read before the wait for the row's parts. */
__device__ __forceinline__ uint32_t sink_of(const struct gpu_forward_params &a, const struct place &at, int row) {
    return SINK ? read_sink(a.sink, at.head_kv * a.group + (at.first_row + row) % a.group) : 0;
}

/* Stores four neighbouring columns of a packed row of the output from their sums, and with the first its lse. */
__device__ __forceinline__ void store_columns(const struct gpu_forward_params &a, const struct place &at, int row,
                                              int column, float4 x, float most, float sum, uint32_t sink) {
    const int packed = at.first_row + row, head = at.head_kv * a.group + packed % a.group;
    const int64_t i = at.q_begin + packed / a.group;
    char *to = a.out.data + (at.batch * a.out.batch + i * a.out.row + head * a.out.head + column) * ELEMENT_BYTES;
    const float inverse = end_softmax(
        a, column == 0, at.batch, head, i, sum, [&] { return most; }, [&](float x) { return logf(x); }, sink);
    x = times(inverse, x);
#if DTYPE == GPU_FLOAT32
    *(float4 *)to = x;
#else
    *(uint2 *)to = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
#endif
}

/* Stores the same of the split's result, not divided by the sum, and with the first its maximum and sum. */
__device__ __forceinline__ void leave_columns(const struct gpu_forward_params &a, const struct place &at, int row,
                                              int column, float4 x, float most, float sum) {
    const int64_t all_rows = VARLEN ? (int64_t)a.heads * a.total_q : (int64_t)a.batch * a.heads * a.seqlen_q;
    const int packed = at.first_row + row, i = packed / a.group, head = at.head_kv * a.group + packed % a.group;
    const int64_t place =
        VARLEN ? head * (int64_t)a.total_q + at.q_begin + i : ((int64_t)at.batch * a.heads + head) * a.seqlen_q + i;
    const int64_t slot = at.split * all_rows + place;
    *(float4 *)&a.partial_out[slot * a.head_dim_v + column] = x;
    if (column == 0)
        *(float2 *)&a.partial_rows[2 * slot] = make_float2(most, sum);
}
/* Stores the result of a split whose keys no row sees. */
__device__ __forceinline__ void leave_nothing(const struct gpu_forward_params &a, const struct place &at) {
    for (int index = threadIdx.x; index < at.num_rows * (HEAD_DIM_V / 4); index += THREADS)
        if (index % (HEAD_DIM_V / 4) * 4 < a.head_dim_v)
            leave_columns(a, at, index / (HEAD_DIM_V / 4), index % (HEAD_DIM_V / 4) * 4, make_float4(0, 0, 0, 0),
                          MINUS_INF, 0);
}

__device__ __forceinline__ void add_weighted(float4 &sum, float weight, float4 x) {
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
}

/* MMA_MERGE_CLUSTER: each block of the cluster merges a fair share of the pieces, which all write to it by st.async:
 * [num_splits][fair] of four columns, then as many maxima and sums. */
struct inbox {
    uint32_t come, pieces, rows; /* an mbarrier where Q was, and the bytes that it waits for */
    int fair, mine;

    __device__ __forceinline__ void open(const struct gpu_forward_params &a, int split, uint32_t barrier, int all) {
        come = barrier;
        fair = (all + a.num_splits - 1) / a.num_splits;
        mine = min(max(all - split * fair, 0), fair);
        if (threadIdx.x == 0) {
            mbarrier_init(come, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(come, a.num_splits * mine * 24);
        }
        __syncwarp();
        barrier_cluster_arrive_relaxed(); /* nothing reads this block's ring any more */
    }
    /* Behind the parts; every block's is open. */
    __device__ __forceinline__ void wait_for_others(const struct gpu_forward_params &a, const float *behind) {
        pieces = shared_address(behind);
        rows = pieces + a.num_splits * fair * 16;
        barrier_cluster_wait();
    }
    __device__ __forceinline__ void send(int split, int index, float4 x, float most, float sum) const {
        const int to = index / fair, place = split * fair + index % fair;
        const uint32_t theirs = mapa_shared(come, to);
        st_async_16(mapa_shared(pieces, to) + place * 16, __float_as_uint(x.x), __float_as_uint(x.y),
                    __float_as_uint(x.z), __float_as_uint(x.w), theirs);
        st_async_8(mapa_shared(rows, to) + place * 8, __float_as_uint(most), __float_as_uint(sum), theirs);
    }
    /* Merges this block's share of the pieces from all blocks of the cluster. */
    __device__ __forceinline__ void merge(const struct gpu_forward_params &a, const struct place &at) const {
        for (int n = threadIdx.x; n < mine; n += THREADS) {
            const int index = at.split * fair + n, row = index / (HEAD_DIM_V / 4),
                      column = index % (HEAD_DIM_V / 4) * 4;
            const uint32_t sink = sink_of(a, at, row);
            mbarrier_wait_cluster(come, 0);
            float maximum[CLUSTER_MAX], part[CLUSTER_MAX], most = MINUS_INF, sum = 0;
            float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int block = 0; block < CLUSTER_MAX; block++) {
                uint32_t low = __float_as_uint(MINUS_INF), high = 0;
                if (block < a.num_splits)
                    ld_shared_8(low, high, rows + (block * fair + n) * 8);
                maximum[block] = __uint_as_float(low);
                part[block] = __uint_as_float(high);
                most = fmaxf(most, maximum[block]);
            }
#pragma unroll
            for (int block = 0; block < CLUSTER_MAX; block++)
                if (block < a.num_splits) {
                    uint32_t o[4];
                    ld_shared_16(o, pieces + (block * fair + n) * 16);
                    const float weight = weight_of(maximum[block], most);
                    sum += weight * part[block];
                    add_weighted(x, weight,
                                 make_float4(__uint_as_float(o[0]), __uint_as_float(o[1]), __uint_as_float(o[2]),
                                             __uint_as_float(o[3])));
                }
            if (column < a.head_dim_v)
                store_columns(a, at, row, column, x, most, sum, sink);
        }
    }
};

/* Ends a block: merges its warps' sums at `memory`, and stores the result to the output, the workspace or the
 * cluster's blocks. */
__device__ __forceinline__ void merge_warps(const struct warp_state &w, const struct gpu_forward_params &a,
                                            const struct place &at, uint32_t barrier, float *memory,
                                            const struct warp_part &own) {
    const int pieces = at.num_rows * (HEAD_DIM_V / 4); /* of four columns */
    const struct parts p = {memory, memory + PART_ROWS * PART_WIDTH, memory + PART_ROWS * PART_WIDTH + PART_ROWS};
    struct inbox in;
    if (MERGE == MMA_MERGE_CLUSTER)
        in.open(a, at.split, barrier, pieces);
    leave_parts(w, p, at.num_rows, own);
    __syncthreads();
    if (MERGE == MMA_MERGE_CLUSTER)
        in.wait_for_others(a, p.sums + PART_ROWS);
    for (int index = threadIdx.x; index < pieces; index += THREADS) {
        const int row = index / (HEAD_DIM_V / 4), column = index % (HEAD_DIM_V / 4) * 4;
        float most = MINUS_INF, sum = 0;
        float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; n++)
            most = fmaxf(most, p.maxima[n * ROWS + row]);
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; n++) {
            const float weight = weight_of(p.maxima[n * ROWS + row], most);
            sum += weight * p.sums[n * ROWS + row];
            add_weighted(x, weight, *(const float4 *)&p.outs[(n * ROWS + row) * PART_WIDTH + column]);
        }
        if (MERGE == MMA_MERGE_CLUSTER)
            in.send(at.split, index, x, most, sum);
        else if (column < a.head_dim_v && MERGE == MMA_MERGE_WORKSPACE)
            leave_columns(a, at, row, column, x, most, sum);
        else if (column < a.head_dim_v)
            store_columns(a, at, row, column, x, most, sum, sink_of(a, at, row));
    }
    if (MERGE == MMA_MERGE_CLUSTER)
        in.merge(a, at);
}

#endif
