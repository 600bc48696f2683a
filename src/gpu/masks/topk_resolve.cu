/* topk_resolve.cu: the rows that see each key, from the bounds of the chunks, for topk_intervals.
 *
 * Idea: in a chunk of keys that arrive in order, those leave that are below the bound at its end: some that were there
 * before (at most as many as arrive) and some that arrive. With the arrivals they decide the chunk by themselves; the
 * keys that stay only take places. Sorted together, a key at rank r leaves at the arrival that fills the places left by
 * the r keys above it: the k-th arrival, in order of index, among the arrivals above. A wavelet tree (Grossi, Gupta,
 * Vitter 2003) over the arrivals' numbers in rank order answers it: a level a bit from the highest; a level puts the
 * numbers with a 0 before those with a 1, and a query goes to the side that holds its answer.
 *
 * A block a chunk; the chunks with most keys before them first. Shared memory: 2 CHUNK words of 8 bytes, which a
 * bitonic network (Batcher 1968) sorts; CHUNK numbers; words of ballots. A thread an arrival, a number of the tree and
 * a query: no more than CHUNK keys leave. */
#include "gpu/masks/topk_keys.cuh"

#define NUM_WARPS     (CHUNK / 32)
#define EVERY_LANE    0xffffffffu
#define NEVER_DROPPED 0x7fffffff

/* Descending. The caller has written the words; they can be read when it returns. */
__device__ __forceinline__ void sort_words(uint64_t *words) {
    __syncthreads();
    for (int size = 2; size <= 2 * CHUNK; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            if (size > 64 && step >= 32) /* else a warp's 64 words are its own, in the step before too */
                __syncthreads();
            else
                __syncwarp();
            const int low = (int)threadIdx.x / step * step * 2 + (int)threadIdx.x % step, high = low + step;
            const uint64_t x = words[low], y = words[high];
            const bool falling = !(low & size);
            if ((x < y) == falling) {
                words[low] = y;
                words[high] = x;
            }
        }
    __syncthreads();
}

/* Marks of CHUNK places: lane n of every warp holds the marks of places 32n .. 32n + 31 and how many are before. */
struct marks {
    uint32_t word, before, total;
};

/* The words are written, with a barrier. */
__device__ __forceinline__ struct marks read_marks(const uint32_t *words) {
    const uint32_t lane = threadIdx.x % 32;
    struct marks m = {lane < NUM_WARPS ? words[lane] : 0, 0, 0};
    const uint32_t upto = warp_sum_upto((uint32_t)__popc(m.word));
    m.before = upto - (uint32_t)__popc(m.word);
    m.total = __shfl_sync(EVERY_LANE, upto, 31);
    return m;
}
/* How many places before `place` (0 .. CHUNK) are marked; by whole warps. */
__device__ __forceinline__ uint32_t marked_before(const struct marks &m, uint32_t place) {
    const uint32_t word = __shfl_sync(EVERY_LANE, m.word, (int)(place / 32 % 32));
    const uint32_t before = __shfl_sync(EVERY_LANE, m.before, (int)(place / 32 % 32));
    return place < CHUNK ? before + (uint32_t)__popc(word & ((1u << place % 32) - 1)) : m.total;
}

/* The wanted-th (from 0) smallest of the first `count` numbers, each below CHUNK, for each thread's query; numbers[n]
 * is overwritten. By the whole block; marked has a word for each warp. */
__device__ __forceinline__ uint32_t smallest_of_first(uint32_t *numbers, uint32_t *marked, uint32_t count,
                                                      uint32_t wanted) {
    uint32_t number = numbers[threadIdx.x], first = 0, last = count, answer = 0;
    for (uint32_t bit = CHUNK / 2; bit > 0; bit /= 2) {
        const bool zero = !(number & bit);
        const uint32_t ballot = __ballot_sync(EVERY_LANE, zero);
        if (threadIdx.x % 32 == 0)
            marked[threadIdx.x / 32] = ballot;
        __syncthreads();
        const struct marks zeros = read_marks(marked);
        const uint32_t mine = marked_before(zeros, threadIdx.x);
        const uint32_t from = marked_before(zeros, first), to = marked_before(zeros, last);
        numbers[zero ? mine : zeros.total + threadIdx.x - mine] = number;
        if (wanted < to - from) {
            first = from;
            last = to;
        } else {
            wanted -= to - from;
            first = zeros.total + first - from;
            last = zeros.total + last - to;
            answer |= bit;
        }
        __syncthreads();
        number = numbers[threadIdx.x];
    }
    return answer;
}

__device__ __forceinline__ int32_t *at(const struct topk_tensor &t, const struct topk_row &row, int32_t j) {
    return t.data + row.batch * t.batch + row.head * t.head + j * t.key;
}

/* What the sorted words say of ranks: how many stay, and which of the upper and lower CHUNK are arrivals'. */
struct ranks {
    struct marks upper, lower;
    uint32_t staying;
};

/* The arrivals among the sorted words, and their numbers in rank order. marked has two words for each warp; with the
 * next barrier numbers and words may be read by all and marked be overwritten. */
__device__ __forceinline__ struct ranks rank_arrivals(const struct topk_params &a, const uint64_t *words,
                                                      uint32_t *numbers, uint32_t *marked, int32_t begin,
                                                      uint64_t threshold) {
    const uint32_t thread = threadIdx.x;
    const uint64_t upper = words[thread], lower = words[CHUNK + thread];
    const bool upper_arrived = upper && index_of(a, upper) >= begin;
    const bool lower_arrived = lower && index_of(a, lower) >= begin;
    const uint32_t upper_ballot = __ballot_sync(EVERY_LANE, upper_arrived);
    const uint32_t lower_ballot = __ballot_sync(EVERY_LANE, lower_arrived);
    if (thread % 32 == 0) {
        marked[thread / 32] = upper_ballot;
        marked[NUM_WARPS + thread / 32] = lower_ballot;
    }
    struct ranks r;
    r.staying = (uint32_t)(__syncthreads_count(upper >= threshold) + __syncthreads_count(lower >= threshold));
    r.upper = read_marks(marked);
    r.lower = read_marks(marked + NUM_WARPS);
    const uint32_t upper_place = marked_before(r.upper, thread);
    const uint32_t lower_place = r.upper.total + marked_before(r.lower, thread);
    if (upper_arrived)
        numbers[upper_place] = (uint32_t)(index_of(a, upper) - begin);
    if (lower_arrived)
        numbers[lower_place] = (uint32_t)(index_of(a, lower) - begin);
    if (thread >= r.upper.total + r.lower.total)
        numbers[thread] = CHUNK - 1; /* stays behind all of its level */
    return r;
}

/* Of a key that arrives: its first row, and its last unless it leaves after it came. last: the bound behind all keys.
 */
__device__ __forceinline__ void write_arrival(const struct topk_params &a, const struct topk_row &row, int32_t j,
                                              uint64_t key, uint64_t last) {
    const int32_t first_row = (int32_t)(j - a.row_shift);
    *at(a.start, row, j) = first_row;
    if (!key)
        *at(a.end, row, j) = first_row;
    else if (key >= last)
        *at(a.end, row, j) = NEVER_DROPPED;
}

extern "C" __global__ void __launch_bounds__(CHUNK, 1) topk_resolve(const __grid_constant__ struct topk_params a) {
    __shared__ uint64_t words[2 * CHUNK];
    __shared__ uint32_t numbers[CHUNK]; /* of the arrivals, from the first of the chunk, best first */
    __shared__ uint32_t marked[2 * NUM_WARPS], listed;
    const uint32_t thread = threadIdx.x;
    const int32_t number = a.num_chunks - 1 - (int32_t)blockIdx.x / a.num_rows, begin = number * CHUNK;
    const struct topk_row row = topk_row_of(a, (int32_t)blockIdx.x % a.num_rows);
    const struct topk_span span = topk_span_of(a, row, number / (a.span / CHUNK));
    const struct topk_bound *bounds = a.chunk_bounds + (int64_t)row.number * a.num_chunks;
    const struct topk_bound before = begin > span.begin ? bounds[number - 1] : topk_bound{1, span.listed, 0};
    const uint64_t threshold = bounds[number].threshold;
    const struct topk_bound *last =
        a.num_spans > 1 ? a.span_bounds + (int64_t)(row.number + 1) * a.num_spans - 1 : bounds + a.num_chunks - 1;

    /* Those that arrive, in words 0 .. CHUNK - 1; those that were there and leave, behind them. */
    const int32_t j = begin + (int32_t)thread;
    const uint64_t arrival = j < a.num_keys ? key_of(a, row, j) : 0;
    if (j < a.num_keys)
        write_arrival(a, row, j, arrival, last->threshold);
    words[thread] = arrival;
    words[CHUNK + thread] = 0;
    if (thread == 0)
        listed = 0;
    __syncthreads();
    visit_span(a, row, span, begin, [&](uint64_t key) {
        if (before.threshold <= key && key < threshold) {
            const uint32_t place = atomicAdd(&listed, 1u);
            if (place < CHUNK)
                words[CHUNK + place] = key;
        }
    });
    sort_words(words);
    const int32_t room = span.room - (before.kept - (int32_t)listed);
    const struct ranks r = rank_arrivals(a, words, numbers, marked, begin, threshold);

    /* The keys that leave are the last ranks; a thread each. */
    const uint32_t rank = r.staying + thread;
    const uint64_t leaver = rank < 2 * CHUNK ? words[rank] : 0;
    const uint32_t above = marked_before(r.upper, rank) + marked_before(r.lower, rank > CHUNK ? rank - CHUNK : 0);
    const int32_t missing = room - (int32_t)(rank - above); /* places that arrivals above have to fill */
    const bool asks = leaver && missing > 0;
    __syncthreads(); /* the numbers are written, the marks read */
    const int32_t filler =
        begin + (int32_t)smallest_of_first(numbers, marked, asks ? above : 0, asks ? (uint32_t)missing - 1 : 0);
    if (leaver) {
        const int32_t key = index_of(a, leaver);
        *at(a.end, row, key) = (int32_t)((asks && filler > key ? filler : key) - a.row_shift);
    }
}
