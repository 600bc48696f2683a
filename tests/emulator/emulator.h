/* emulator.h: what a kernel's text, compiled for the host, asks of the emulated device; in C and in C++, no includes.
 *
 * An address of shared memory is the 32-bit number of the device: an offset in the block's window, whose first 1024
 * bytes are not the kernel's; the top byte is 0 for the block's own and rank + 1 for a block of the cluster. Every
 * function that a wrapper stands for takes the place of the call in the kernel's text. */
#ifndef FDM_EMULATOR_H
#define FDM_EMULATOR_H

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

struct emu_dim {
    unsigned x, y, z;
};
/* The special registers of the running thread; a thread's never change. */
#define EMU_CONSTANT __attribute__((const))
EMU_CONSTANT struct emu_dim emu_thread_index(void);
EMU_CONSTANT struct emu_dim emu_block_index(void);
EMU_CONSTANT struct emu_dim emu_block_size(void);
EMU_CONSTANT struct emu_dim emu_grid_size(void);
EMU_CONSTANT unsigned emu_cluster_rank(void);
EMU_CONSTANT unsigned emu_cluster_size(void);

#define EMU_PLACE const char *emu_file, int emu_line
enum { EMU_SHUFFLE_INDEX, EMU_SHUFFLE_XOR, EMU_SHUFFLE_UP, EMU_SHUFFLE_DOWN };
enum { EMU_ANY, EMU_ALL, EMU_BALLOT };
enum { EMU_OR, EMU_AND, EMU_COUNT };
enum { EMU_MIN_S32, EMU_MAX_S32, EMU_MIN_U32, EMU_MAX_U32, EMU_ADD, EMU_BITS_AND, EMU_BITS_OR, EMU_BITS_XOR };
enum { EMU_BF16, EMU_F16, EMU_TF32, EMU_F16_SUM_F16 };
enum { EMU_FENCE_PROXY_ASYNC, EMU_FENCE_MBARRIER_INIT, EMU_FENCE_MEMORY };
enum { EMU_STORE, EMU_REDUCE_ADD };

/* Shared memory. */
void *emu_dynamic_shared(unsigned align);
void *emu_static_shared(const void *key, unsigned bytes, unsigned align);
unsigned emu_shared_address(const void *pointer);
void *emu_shared_pointer(unsigned address);
unsigned emu_mapa(unsigned address, unsigned rank, EMU_PLACE);
void emu_shared_load(void *to, unsigned address, unsigned bytes, EMU_PLACE);
void emu_shared_store(unsigned address, const void *from, unsigned bytes, EMU_PLACE);

/* Warps. */
void emu_syncwarp(unsigned mask, EMU_PLACE);
unsigned emu_shuffle(int kind, unsigned mask, unsigned value, unsigned lane, unsigned width, EMU_PLACE);
unsigned emu_vote(int kind, unsigned mask, int condition, EMU_PLACE);
unsigned emu_reduce(int kind, unsigned mask, unsigned value, EMU_PLACE);
unsigned emu_elect(unsigned mask, EMU_PLACE);
void emu_ldmatrix(unsigned *r, int count, int transposed, unsigned address, EMU_PLACE);
void emu_stmatrix(unsigned address, const unsigned *r, int count, int transposed, EMU_PLACE);
void emu_mma(int type, void *c, const unsigned *a, unsigned b0, unsigned b1, EMU_PLACE);

/* Barriers. */
int emu_syncthreads(int kind, int value, EMU_PLACE);
int emu_barrier_sync(unsigned barrier, unsigned threads, int kind, int value, EMU_PLACE);
void emu_barrier_arrive(unsigned barrier, unsigned threads, EMU_PLACE);
void emu_cluster_arrive(EMU_PLACE);
void emu_cluster_wait(EMU_PLACE);
void emu_mbarrier_init(unsigned barrier, unsigned arrivals, EMU_PLACE);
void emu_mbarrier_invalidate(unsigned barrier, EMU_PLACE);
void emu_mbarrier_arrive(unsigned barrier, unsigned arrivals, unsigned bytes, EMU_PLACE);
void emu_mbarrier_arrive_cluster(unsigned address, unsigned bytes, EMU_PLACE);
void emu_mbarrier_expect(unsigned barrier, unsigned bytes, EMU_PLACE);
void emu_mbarrier_wait(unsigned barrier, unsigned parity, EMU_PLACE);
int emu_mbarrier_test(unsigned barrier, unsigned parity, EMU_PLACE);
void emu_fence(int kind, EMU_PLACE);

/* Asynchronous copies. */
void emu_cp_async(unsigned shared, const void *global, unsigned bytes, unsigned size, EMU_PLACE);
void emu_cp_async_commit(EMU_PLACE);
void emu_cp_async_wait(int pending, EMU_PLACE);
void emu_cp_async_arrive(unsigned barrier, EMU_PLACE);
/* blocks: EMU_MULTICAST and a bit for each; or EMU_PAIR: the mbarrier may lie in the other block of the pair. */
enum { EMU_MULTICAST = 1 << 16, EMU_PAIR = 1 << 17 };
void emu_tma_load(int rank, unsigned shared, const void *map, unsigned barrier, const int *at, unsigned blocks,
                  EMU_PLACE);
void emu_tma_store(int kind, int rank, const void *map, unsigned shared, const int *at, EMU_PLACE);
void emu_bulk_load(unsigned shared, const void *global, unsigned bytes, unsigned barrier, unsigned blocks, EMU_PLACE);
void emu_bulk_send(unsigned address, unsigned shared, unsigned bytes, unsigned barrier, EMU_PLACE);
void emu_store_async(unsigned address, const void *from, unsigned bytes, unsigned barrier, EMU_PLACE);
void emu_bulk_store(int kind, void *global, unsigned shared, unsigned bytes, EMU_PLACE);
void emu_bulk_commit(EMU_PLACE);
void emu_bulk_wait(int pending, int read, EMU_PLACE);

/* Warpgroups. a: a thread's four registers, or NULL: the descriptor. */
void emu_wgmma(int n, int type, float *d, const unsigned *a, unsigned long long a_matrix, unsigned long long b_matrix,
               int add, int a_transposed, int b_transposed, EMU_PLACE);
void emu_wgmma_fence(EMU_PLACE);
void emu_wgmma_commit(EMU_PLACE);
void emu_wgmma_wait(int pending, EMU_PLACE);
void emu_setmaxnreg(int registers, int more, EMU_PLACE);

/* Tensor memory, and clusters that have not begun. group: .cta_group, 1 or 2. */
void emu_tensor_alloc(int group, unsigned shared, unsigned columns, EMU_PLACE);
void emu_tensor_dealloc(int group, unsigned tensor, unsigned columns, EMU_PLACE);
void emu_tensor_relinquish(int group, EMU_PLACE);
void emu_tensor_mma(int group, unsigned d, unsigned long long a, int a_in_tensor, unsigned long long b, unsigned shape,
                    int add, EMU_PLACE);
void emu_tensor_commit(int group, unsigned barrier, unsigned blocks, EMU_PLACE);
void emu_tensor_fence(int after, EMU_PLACE);
void emu_tensor_load(void *r, int count, unsigned tensor, EMU_PLACE);
void emu_tensor_store(unsigned tensor, const void *r, int count, EMU_PLACE);
void emu_tensor_wait(int stores, EMU_PLACE);
void emu_try_cancel(unsigned shared, unsigned barrier, int multicast, EMU_PLACE);
int emu_query_cancel(unsigned shared, unsigned *index, EMU_PLACE);

/* Global memory, and the rest. */
void emu_red_add(float *at, const float *x, int count, EMU_PLACE);
unsigned emu_atomic_add(unsigned *at, unsigned x, EMU_PLACE);
unsigned emu_atomic_cas(unsigned *at, unsigned compare, unsigned x, EMU_PLACE);
float emu_atomic_add_float(float *at, float x, EMU_PLACE);
unsigned emu_load_acquire(const unsigned *at, EMU_PLACE);
void emu_store_release(unsigned *at, unsigned x, EMU_PLACE);
unsigned emu_load_relaxed(const unsigned *at, EMU_PLACE);
unsigned long long emu_load_relaxed_8(const unsigned long long *at, EMU_PLACE);
void emu_store_relaxed_8(unsigned long long *at, unsigned long long x, EMU_PLACE);
void emu_launch_dependents(EMU_PLACE);
void emu_grid_wait(EMU_PLACE);
void emu_exit(EMU_PLACE);
void emu_trap(EMU_PLACE);
void emu_print(const char *format, ...) __attribute__((format(printf, 1, 2)));
long long emu_clock(void);
float emu_ex2(float x);
float emu_add_down(float a, float b);
float emu_lg2(float x);
unsigned short emu_to_f16(float x);
float emu_from_f16(unsigned short x);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#endif
