/* ring.cuh: rings of stages in shared memory, between those who fill a stage and those who read it.
 *
 * A stage has a full and an empty mbarrier. Who fills and who reads count what has passed, each for itself; a count
 * names the stage, and the parity of the phase that ends when the stage is full. */
#ifndef FDM_CUDA_RING_CUH
#define FDM_CUDA_RING_CUH

#include "cuda/ptx/mbarrier.cuh"

/* A place in a ring, for who does not count by himself. Where stages are a power of two it is the count. */
template <int stages, bool counts = (stages & (stages - 1)) == 0> struct ring_place {
    uint32_t count;

    __device__ __forceinline__ ring_place() : count(0) {}
    __device__ __forceinline__ uint32_t stage() const { return count % stages; }
    __device__ __forceinline__ uint32_t parity() const { return count / stages & 1; }
    __device__ __forceinline__ void next() { count++; }
};
template <int stages> struct ring_place<stages, false> {
    uint32_t at, phase;

    __device__ __forceinline__ ring_place() : at(0), phase(0) {}
    __device__ __forceinline__ uint32_t stage() const { return at; }
    __device__ __forceinline__ uint32_t parity() const { return phase; }
    __device__ __forceinline__ void next() {
        if (++at == stages) {
            at = 0;
            phase ^= 1;
        }
    }
};

/* An mbarrier for each stage, from address `at` on, `each` bytes from one to the next. A count or a ring_place names a
 * stage. */
template <int stages, int each = 8> struct stage_barriers {
    enum { BYTES = 8 * stages }; /* of its own */
    uint32_t at;

    static __device__ __forceinline__ uint32_t stage(uint32_t count) { return count % stages; }
    static __device__ __forceinline__ uint32_t parity(uint32_t count) { return count / stages & 1; }
    template <bool counts> static __device__ __forceinline__ uint32_t stage(ring_place<stages, counts> place) {
        return place.stage();
    }
    template <bool counts> static __device__ __forceinline__ uint32_t parity(ring_place<stages, counts> place) {
        return place.parity();
    }

    /* By one thread; arrivals: that end a phase. */
    __device__ __forceinline__ void init(int n, uint32_t arrivals) const { mbarrier_init(at + each * n, arrivals); }
    template <class place> __device__ __forceinline__ uint32_t barrier(place p) const { return at + each * stage(p); }
    /* Waits for the phase of a place; for the one before it, which of the first `stages` has ended. */
    template <class place> __device__ __forceinline__ void wait(place p) const { mbarrier_wait(barrier(p), parity(p)); }
    template <class place> __device__ __forceinline__ void wait_before(place p) const {
        mbarrier_wait(barrier(p), parity(p) ^ 1);
    }
    template <class place> __device__ __forceinline__ void arrive(place p) const { mbarrier_arrive(barrier(p)); }
    /* One arrival of a warp. */
    template <class place> __device__ __forceinline__ void arrive_warp(place p) const {
        if (threadIdx.x % 32 == 0)
            arrive(p);
    }
};

/* The full barriers from address `barriers` on, then the empty ones; what the stages hold, `tile_bytes` each, from
 * address `tiles` on. */
template <int stages, int tile_bytes = 0, int each = 8> struct ring {
    enum { BYTES = 16 * stages }; /* of its barriers */
    uint32_t barriers, tiles;

    template <class place> static __device__ __forceinline__ uint32_t stage(place p) {
        return stage_barriers<stages, each>::stage(p);
    }
    __device__ __forceinline__ stage_barriers<stages, each> full() const { return {barriers}; }
    __device__ __forceinline__ stage_barriers<stages, each> empty() const { return {barriers + each * stages}; }
    /* By one thread, of a stage; fills, reads: the arrivals after which it is full, and empty. */
    __device__ __forceinline__ void init(int n, uint32_t fills, uint32_t reads) const {
        full().init(n, fills);
        empty().init(n, reads);
    }
    template <class place> __device__ __forceinline__ uint32_t tile(place p) const {
        return tiles + stage(p) * tile_bytes;
    }
    template <class place> __device__ __forceinline__ uint32_t full(place p) const { return full().barrier(p); }
    template <class place> __device__ __forceinline__ uint32_t empty(place p) const { return empty().barrier(p); }
    template <class place> __device__ __forceinline__ void wait_full(place p) const { full().wait(p); }
    template <class place> __device__ __forceinline__ void wait_empty(place p) const { empty().wait_before(p); }
    /* A warp is done with a stage. */
    template <class place> __device__ __forceinline__ void release(place p) const { empty().arrive_warp(p); }
};

#endif
