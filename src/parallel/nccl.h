/* nccl.h: NCCL by name: its functions, types and numbers, of NCCL's manual and public header (2.18 and later). */
#ifndef FDM_PARALLEL_NCCL_H
#define FDM_PARALLEL_NCCL_H

#include <stddef.h>

typedef int nccl_result;
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
enum { NCCL_UINT8 = 1 };
enum { NCCL_OLDEST = 21800, NCCL_UNDEFINED = -2147483647 - 1 };

typedef struct nccl_comm *nccl_comm;
struct nccl_id { /* passed by value */
    char bytes[128];
};

/* ncclConfig_t up to 2.18, which every later library takes. */
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};

/* X(our name, NCCL's name, parameters); all return nccl_result. */
#define NCCL_FUNCTIONS(X)                                                                                        \
    X(get_version, "ncclGetVersion", (int *version))                                                             \
    X(get_id, "ncclGetUniqueId", (struct nccl_id * id))                                                          \
    X(init_rank, "ncclCommInitRankConfig",                                                                       \
      (nccl_comm * comm, int ranks, struct nccl_id id, int rank, struct nccl_config *config))                    \
    X(split, "ncclCommSplit", (nccl_comm comm, int color, int key, nccl_comm *made, struct nccl_config *config)) \
    X(count, "ncclCommCount", (nccl_comm comm, int *count))                                                      \
    X(user_rank, "ncclCommUserRank", (nccl_comm comm, int *rank))                                                \
    X(device_of, "ncclCommCuDevice", (nccl_comm comm, int *device))                                              \
    X(async_error, "ncclCommGetAsyncError", (nccl_comm comm, nccl_result * result))                              \
    X(break_off, "ncclCommAbort", (nccl_comm comm))                                                              \
    X(destroy, "ncclCommDestroy", (nccl_comm comm))                                                              \
    X(group_start, "ncclGroupStart", (void))                                                                     \
    X(group_end, "ncclGroupEnd", (void))                                                                         \
    X(send, "ncclSend", (const void *memory, size_t count, int dtype, int peer, nccl_comm comm, void *stream))   \
    X(receive, "ncclRecv", (void *memory, size_t count, int dtype, int peer, nccl_comm comm, void *stream))      \
    X(all_gather, "ncclAllGather", (const void *mine, void *all, size_t count, int dtype, nccl_comm comm, void *stream))

struct nccl {
#define NCCL_MEMBER(member, name, parameters) nccl_result(*member) parameters;
    NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
    const char *(*error_string)(nccl_result result);
    int version;
};

#endif
