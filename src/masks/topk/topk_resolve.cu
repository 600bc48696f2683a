/* topk_resolve.cu: the rows that see each key, from the bounds of the chunks, for topk_intervals.
 *
 * Idea: in a chunk of keys that arrive in order, those below the bound at its beginning never have a place; the others
 * are candidates. Those leave that are below the bound at its end: some that were there before (at most as many as
 * there are candidates) and some candidates. With the candidates they decide the chunk by themselves; the keys that
 * stay only take places. Sorted together, a key at rank r leaves at the candidate that fills the places left by the r
 * keys above it: the k-th, in order of index, among the candidates above. A wavelet tree (Grossi, Gupta, Vitter 2003)
 * over the candidates' numbers in rank order answers it: a level a bit from the highest; a level puts the numbers with
 * a 0 before those with a 1, and a query goes to the side that holds its answer.
 *
 * A block a chunk; the chunks with most keys before them first. Shared memory: 2 CHUNK words of 8 bytes, which a
 * bitonic network (Batcher 1968) sorts, two in each lane's registers between its steps from warp to warp; numbers and
 * places of CHUNK candidates; words of ballots. A thread an arrival, a number of the tree and a query: no more than
 * CHUNK keys leave. Of random biases few are candidates, and network and tree are small. */
#include "masks/topk/topk_keys.cuh"

#define NUM_WARPS     (CHUNK / 32)
#define EVERY_LANE    0xffffffffu
#define NEVER_DROPPED 0x7fffffff

/* ---- sort ---- */

/* The larger of the word at a place and its partner's where that belongs there, else the smaller. */
__device__ __forceinline__ uint64_t exchanged(uint64_t mine, uint64_t other, bool wants_larger) {
    return (other > mine) == wants_larger ? other : mine;
}

/* The steps of up to 32 of a network's stage, by a warp whose lanes hold words `lane` and 32 + lane of its 64. place:
 * of the first in all. */
__device__ __forceinline__ void sort_in_warp(uint64_t &first, uint64_t &second, int place, int size) {
    const bool first_falls = !(place & size), second_falls = !(place + 32 & size);
    if (size > 32) {
        const uint64_t larger = first > second ? first : second, smaller = first > second ? second : first;
        first = first_falls ? larger : smaller;
        second = first_falls ? smaller : larger;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        if (step < size) {
            const bool low = !(place & step);
            first = exchanged(first, __shfl_xor_sync(EVERY_LANE, first, step), low == first_falls);
            second = exchanged(second, __shfl_xor_sync(EVERY_LANE, second, step), low == second_falls);
        }
}

/* The first `count` words, a power of 2 from 64 to 2 CHUNK, descending. The caller has written the words; they can be
 * read when it returns. A word stays in its lane's registers but for steps from warp to warp. */
__device__ __forceinline__ void sort_words(uint64_t *words, int count) {
    const int thread = (int)threadIdx.x, place = thread / 32 * 64 + thread % 32;
    const bool has_words = place < count; /* the whole warp or none of it */
    __syncthreads();
    uint64_t first = words[place], second = words[place + 32];
    if (has_words)
        for (int size = 2; size <= 64; size *= 2)
            sort_in_warp(first, second, place, size);
    for (int size = 128; size <= count; size *= 2) {
        words[place] = first;
        words[place + 32] = second;
        for (int step = size / 2; step >= 64; step /= 2) {
            __syncthreads();
            const int low = thread / step * step * 2 + thread % step, high = low + step;
            if (high < count) {
                const uint64_t x = words[low], y = words[high];
                if ((x < y) == !(low & size)) {
                    words[low] = y;
                    words[high] = x;
                }
            }
        }
        __syncthreads();
        first = words[place];
        second = words[place + 32];
        if (has_words)
            sort_in_warp(first, second, place, size);
    }
    words[place] = first; /* places that no other thread reads before the barrier */
    words[place + 32] = second;
    __syncthreads();
}

/* ---- ranks ---- */

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

/* The wanted-th (from 0) smallest of the first `count` numbers, each below `bound`, a power of 2, for each thread's
 * query; the numbers are overwritten. By the whole block; marked has a word for each warp. */
__device__ __forceinline__ uint32_t smallest_of_first(uint32_t *numbers, uint32_t *marked, uint32_t bound,
                                                      uint32_t count, uint32_t wanted) {
    uint32_t number = numbers[threadIdx.x], first = 0, last = count, answer = 0;
    for (uint32_t bit = bound / 2; bit > 0; bit /= 2) {
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

/* What the sorted words say of ranks: how many stay, and which of the upper and lower CHUNK are candidates'. */
struct ranks {
    struct marks upper, lower;
    uint32_t staying;
};

/* The candidates among the sorted words, and their numbers in rank order: how many candidates came before. marked has
 * two words for each warp; with the next barrier numbers and words may be read by all and marked be overwritten. */
__device__ __forceinline__ struct ranks rank_candidates(const struct topk_params &a, const uint64_t *words,
                                                        const struct marks &candidates, uint32_t *numbers,
                                                        uint32_t *marked, int32_t begin, uint64_t threshold) {
    const uint32_t thread = threadIdx.x;
    const uint64_t upper = words[thread], lower = words[CHUNK + thread];
    const int32_t upper_index = upper ? index_of(a, upper) - begin : -1;
    const int32_t lower_index = lower ? index_of(a, lower) - begin : -1;
    const uint32_t upper_ballot = __ballot_sync(EVERY_LANE, upper_index >= 0);
    const uint32_t lower_ballot = __ballot_sync(EVERY_LANE, lower_index >= 0);
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
    const uint32_t upper_number = marked_before(candidates, upper_index >= 0 ? (uint32_t)upper_index : 0);
    const uint32_t lower_number = marked_before(candidates, lower_index >= 0 ? (uint32_t)lower_index : 0);
    if (upper_index >= 0)
        numbers[upper_place] = upper_number;
    if (lower_index >= 0)
        numbers[lower_place] = lower_number;
    if (thread >= candidates.total)
        numbers[thread] = CHUNK - 1; /* stays behind all of its level */
    return r;
}

/* ---- the chunk ---- */

/* Of a key that arrives: its first row, and its last unless it is a candidate that leaves. bound: where the chunk
 * begins; last: behind all keys. */
__device__ __forceinline__ void write_arrival(const struct topk_params &a, const struct topk_row &row, int32_t j,
                                              uint64_t key, uint64_t bound, uint64_t last) {
    const int32_t first_row = (int32_t)(j - a.row_shift);
    *at(a.start, row, j) = first_row;
    if (key < bound) /* padded, or below as many as there are places */
        *at(a.end, row, j) = first_row;
    else if (key >= last)
        *at(a.end, row, j) = NEVER_DROPPED;
}

/* What is kept before the chunk, of the keys that matter to its span. */
__device__ __forceinline__ struct topk_bound bound_before(const struct topk_params &a, const struct topk_row &row,
                                                          const struct topk_span &span, int32_t number) {
    const int32_t in_span = a.span / CHUNK;
    if (number % in_span > 0)
        return a.chunk_bounds[(int64_t)row.number * a.num_chunks + number - 1];
    struct topk_bound bound = {1, span.listed, 0};
    if (number > 0)
        bound.threshold = a.span_bounds[(int64_t)row.number * a.num_spans + number / in_span - 1].threshold;
    return bound;
}

/* A power of 2. */
__device__ __forceinline__ uint32_t round_up_to_power(uint32_t x, uint32_t least) {
    return x <= least ? least : 2u << (31 - __clz((int)(x - 1)));
}

extern "C" __global__ void __launch_bounds__(CHUNK, 1) topk_resolve(const __grid_constant__ struct topk_params a) {
    __shared__ uint64_t words[2 * CHUNK];
    __shared__ uint32_t numbers[CHUNK]; /* of the candidates, in rank order */
    __shared__ uint32_t places[CHUNK];  /* of candidate n: its key, from the first of the chunk */
    __shared__ uint32_t marked[2 * NUM_WARPS], listed;
    const uint32_t thread = threadIdx.x;
    const int32_t number = a.num_chunks - 1 - (int32_t)blockIdx.x / a.num_rows, begin = number * CHUNK;
    const struct topk_row row = topk_row_of(a, (int32_t)blockIdx.x % a.num_rows);
    const struct topk_span span = topk_span_of(a, row, number / (a.span / CHUNK));
    const struct topk_bound before = bound_before(a, row, span, number);
    const uint64_t threshold = a.chunk_bounds[(int64_t)row.number * a.num_chunks + number].threshold;

    /* The candidates of those that arrive, in words 0 ..; behind them those that were there and leave. */
    const int32_t j = begin + (int32_t)thread;
    const uint64_t arrival = j < a.num_keys ? key_of(a, row, j) : 0;
    const bool is_candidate = arrival >= before.threshold; /* which is above 0 */
    const uint32_t ballot = __ballot_sync(EVERY_LANE, is_candidate);
    if (thread % 32 == 0)
        marked[thread / 32] = ballot;
    if (thread == 0)
        listed = 0;
    words[thread] = words[CHUNK + thread] = 0;
    __syncthreads();
    const struct marks candidates = read_marks(marked);
    const uint32_t own = marked_before(candidates, thread);
    if (is_candidate) {
        words[own] = arrival;
        places[own] = thread;
    }
    visit_span(a, row, span, begin, [&](uint64_t key) {
        if (before.threshold <= key && key < threshold) {
            const uint32_t place = candidates.total + atomicAdd(&listed, 1u);
            if (place < 2 * CHUNK)
                words[place] = key;
        }
    });
    if (j < a.num_keys) {
        const struct topk_bound *last = a.num_spans > 1 ? a.span_bounds + (int64_t)(row.number + 1) * a.num_spans - 1
                                                        : a.chunk_bounds + (int64_t)(row.number + 1) * a.num_chunks - 1;
        write_arrival(a, row, j, arrival, before.threshold, last->threshold);
    }
    __syncthreads();
    sort_words(words, (int)round_up_to_power(candidates.total + listed, 64));
    const int32_t room = span.room - (before.kept - (int32_t)listed);
    const struct ranks r = rank_candidates(a, words, candidates, numbers, marked, begin, threshold);

    /* The keys that leave are the last ranks; a thread each. */
    const uint32_t rank = r.staying + thread;
    const uint64_t leaver = rank < 2 * CHUNK ? words[rank] : 0;
    const uint32_t above = marked_before(r.upper, rank) + marked_before(r.lower, rank > CHUNK ? rank - CHUNK : 0);
    const int32_t missing = room - (int32_t)(rank - above); /* places that candidates above have to fill */
    const bool asks = leaver && missing > 0;
    __syncthreads(); /* the numbers are written, the marks read */
    const uint32_t filler = smallest_of_first(numbers, marked, round_up_to_power(candidates.total, 1), asks ? above : 0,
                                              asks ? (uint32_t)missing - 1 : 0);
    if (leaver) {
        const int32_t key = index_of(a, leaver), filled = asks ? begin + (int32_t)places[filler] : key;
        *at(a.end, row, key) = (int32_t)(max(key, filled) - a.row_shift);
    }
}
