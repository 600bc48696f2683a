/* fake_cuda.h: what tests ask and set in the pretended driver (fake_cuda.c) and the pretended compiler (fake_nvrtc.c).
 *
 * The driver is a shared library named libcuda.so.1 and exports one variable, `fake_cuda`. Host memory is its device
 * memory; launches do nothing but are written down; copies within a device and fills happen when something waits for
 * them. Its environment, read at its first call:
 *
 *     FAKE_CUDA_DEVICES   "MAJOR.MINOR:SHARED_BYTES[:NAME],..."   (default: one device 9.0 with 232448 bytes)
 *     FAKE_CUDA_VERSION   13000 = CUDA 13.0, the default
 *     FAKE_CUDA_LACKS     n: the n-th function that is asked for is not there
 *     FAKE_CUDA_FAIL      "FUNCTION:RESULT:NTH": see injection.h; the two that give an error's text never count as any
 *     FAKE_CUDA_MEMORY    bytes of a device (default: no limit)
 *     FAKE_CUDA_NO_STRIDE_0   1: tensor maps with a stride of 0 are refused
 *
 * A RESULT from 700 to 729 is sticky as in the driver: every later call that needs the context fails with it. While a
 * stream is captured it refuses what is not enqueued, as the strictest of drivers does, and the capture is lost. The
 * compiler reads FAKE_NVRTC_FAIL and exports `fake_nvrtc`. */
#ifndef FDM_FAKE_CUDA_H
#define FDM_FAKE_CUDA_H

#include <stdint.h>

struct fake_launch {
    char entry[64];
    int device, max_shared_bytes; /* the function's own limit when it was launched */
    unsigned grid[3], block[3], shared_bytes;
    unsigned cluster; /* 0 = no such attribute */
    int programmatic;
    void *stream;
    void *first_member; /* of the argument struct: every kernel's is a pointer */
    int cooperative;
};
/* What was enqueued that orders streams, and launches between. */
struct fake_order {
    enum { FAKE_LAUNCHED, FAKE_RECORDED, FAKE_WAITED } kind;
    char entry[64];       /* of a launch */
    void *stream, *event; /* event: recorded on the stream, or waited for by it */
};
/* What the pretended driver writes into a tensor map: the layout, as it was handed over. */
struct fake_tensor_map {
    uint64_t address, stride_bytes[4];
    uint32_t last[5]; /* extents less one */
    uint16_t box[5];
    uint8_t type, rank, swizzle, l2_promotion;
    char word[8]; /* "tiled" */
};
struct fake_live {
    int64_t contexts_retained, modules, events, streams, allocations;
};

struct fake_cuda {
    void (*inject)(const char *function, int result, int64_t nth);
    const char *(*injected)(void);          /* the function that was made to fail last, "" = none */
    int64_t (*count)(const char *function); /* calls so far, failed ones too */
    int64_t (*num_launches)(void);          /* those that succeeded */
    struct fake_launch (*launch)(int64_t index);
    struct fake_live (*live)(void);
    int (*depth)(void);                 /* contexts on this thread's stack */
    void (*push_foreign_context)(void); /* a context that is nobody's primary one, on this thread */
    int (*pop_foreign_context)(void);   /* 1: it was on top */
    void (*begin_capture)(int mode);    /* of a stream by this thread: 0 global, 1 of the thread, 2 relaxed */
    int (*end_capture)(void);           /* 1: nothing was tried that it forbids */
    int (*capture_mode)(void);          /* this thread's own, which it may exchange; 0 at first */
    void *(*foreign_stream)(void);      /* a stream of the context that is nobody's primary one */
    /* From now on the time between two events is the sum of what this function says of the launches between. It gets
     * the kernel's parameters too and may write where they point; what was enqueued before has happened. NULL: none. */
    void (*plant)(double (*seconds)(const struct fake_launch *launch, const void *parameters));
    int64_t (*num_orders)(void);
    struct fake_order (*order)(int64_t index);
};

struct fake_nvrtc {
    void (*inject)(const char *function, int result, int64_t nth);
    const char *(*injected)(void);
    int64_t (*num_compiled)(void);    /* programs, with the same or other options */
    int64_t (*num_distinct)(void);    /* of them, those that differ in name or options */
    void (*cached)(int on);           /* 1: what follows comes from a cache and has no log, unless that is forbidden */
    void (*hold)(const char *option); /* programs with this option are not ready until another is held, or "" */
    int64_t (*num_held)(void);        /* that wait */
};

#endif
