/* fake_nccl.h: what tests set and ask in the pretended NCCL (fake_nccl.c): ranks are threads of one process.
 *
 * It is a shared library named libnccl.so.2 and exports one variable, `fake_nccl`. Communicators are non-blocking: a
 * call begins an operation, which is done when every peer has come, or fails when one has left. Its environment:
 *
 *     FAKE_NCCL_VERSION   22809 = 2.28.9, the default
 *     FAKE_NCCL_FAIL      "FUNCTION:RESULT:NTH": see injection.h */
#ifndef FDM_FAKE_NCCL_H
#define FDM_FAKE_NCCL_H

#include <stdint.h>

struct fake_nccl {
    const char *(*injected)(void);                     /* "" = none */
    void (*delay)(int polls);                          /* operations are in progress for so many polls more */
    int (*live)(void);                                 /* communicators that are not aborted */
    void *(*callers)(int ranks, int rank, int device); /* a communicator of the caller's own, of one world */
    void (*release_callers)(void *comm);
    void *(*last_stream)(void); /* of a message */
};

#endif
