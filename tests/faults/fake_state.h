/* fake_state.h: what the files of the pretended driver share. */
#ifndef FDM_FAKE_STATE_H
#define FDM_FAKE_STATE_H

#include "cuda/driver.h"
#include "fake_cuda.h"
#include "injection.h"

enum {
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    CAPTURE_UNSUPPORTED = 900,
    STICKY_FROM = 700,
    STICKY_TO = 730
};

enum { DEVICES_MAX = 8, PENDING_MAX = 64, STACK_MAX = 16, FUNCTIONS_MAX = 4, NAME_BYTES = 64 };

/* Work that has been enqueued and not been waited for. */
struct pending {
    unsigned char *to;
    const unsigned char *from; /* NULL: a fill */
    unsigned char value;
    size_t bytes;
};
struct cu_context {
    int major, minor, shared_bytes, num_pending;
    cu_result sticky;
    char name[NAME_BYTES];
    size_t memory_used;
    struct pending pending[PENDING_MAX];
};
struct cu_function {
    cu_context device;
    struct cu_module *module;
    int max_shared_bytes, max_cluster;
    char entry[NAME_BYTES];
    struct kernel *kernel; /* of hooks */
};
struct cu_module {
    cu_module next; /* unloaded ones stay too, without their text */
    cu_context device;
    char *text;       /* of a pretended cubin; NULL: an ELF file, whose names are not looked at */
    void *executable; /* of hooks */
    int num_functions;
    struct cu_function functions[FUNCTIONS_MAX];
};
struct cu_stream { /* that the driver made; whatever else stands for one is an address */
    cu_context device;
};
struct cu_event {
    cu_context device;
    int recorded, timed;
    double seconds; /* of hooks, or planted */
};
struct allocation {
    struct allocation *next;
    cu_context device;
    unsigned char *memory;
    size_t bytes;
};

/* Used between fake_begin() and fake_end(). */
extern struct fake_state {
    int ready, initialized, version, lacks, asked, num_devices, no_stride_0;
    size_t memory_limit;
    struct injection injection;
    struct cu_context devices[DEVICES_MAX], foreign;
    cu_module modules;
    struct allocation *allocations;
    struct fake_live live;
    int global_captures; /* streams that are captured in the mode that binds every thread */
    struct fake_launch *launches;
    int64_t num_launches, max_launches;
    struct fake_order *orders;
    int64_t num_orders, max_orders;
    int64_t counts[64];
    double (*planted)(const struct fake_launch *launch, const void *parameters);
    double planted_seconds; /* so far */
} fake_state;
enum fake_needs { NOTHING, DRIVER, CONTEXT };
/* Takes the lock, writes the call down, and says whether it fails before it does anything; end gives the lock back. */
cu_result fake_begin(const char *function, enum fake_needs needs);
cu_result fake_end(cu_result result);
cu_context fake_current(void);
/* Writes down what orders streams. */
void fake_note(const struct fake_order *order);
/* What was enqueued on the device happens; 0, or what a kernel that was executed ended with. */
cu_result fake_finish(cu_context device);

/* Put in place by a driver that executes kernels (tests/emulator); NULL: launches are written down, and no more. */
struct fake_hooks {
    cu_result (*load)(cu_module module, const void *image); /* an ELF file */
    cu_result (*function)(cu_function function, const char *name);
    cu_result (*launch)(const struct fake_launch *launch, cu_function function, void **parameters);
    cu_result (*finish)(void); /* what was launched runs */
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory, size_t bytes);
    double (*seconds)(void); /* a clock */
};
extern const struct fake_hooks *fake_hooks;

/* The driver's table is filled in parts. */
void fake_fill_kernels(struct cuda_driver *driver);
void fake_fill_memory(struct cuda_driver *driver);

#endif
