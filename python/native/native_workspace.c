/* native_workspace.c: workspace of attention calls, kept between them so that pages are not faulted in every time. */
#include "native.h"

#include <stdlib.h>

#ifdef _WIN32
#    include <malloc.h>
static void *take_aligned(size_t bytes) { return _aligned_malloc(bytes, 64); }
static void free_aligned(void *memory) { _aligned_free(memory); }
#else
static void *take_aligned(size_t bytes) { return aligned_alloc(64, bytes); }
static void free_aligned(void *memory) { free(memory); }
#endif

/* Buffers above this go back to the system after the call. */
static const size_t keep_bytes = (size_t)256 << 20;

/* Guarded by the GIL; one per concurrent caller, further callers allocate. */
static struct native_workspace idle[4];
enum { NUM_IDLE = sizeof idle / sizeof idle[0] };

struct native_workspace native_workspace_take(void) {
    int largest = 0;
    for (int i = 1; i < NUM_IDLE; i++)
        largest = idle[i].bytes > idle[largest].bytes ? i : largest;
    struct native_workspace taken = idle[largest];
    idle[largest] = (struct native_workspace){NULL, 0};
    return taken;
}

void native_workspace_return(struct native_workspace workspace) {
    for (int i = 0; i < NUM_IDLE && workspace.bytes <= keep_bytes; i++)
        if (!idle[i].memory) {
            idle[i] = workspace;
            return;
        }
    free_aligned(workspace.memory);
}

static void *allocate(void *context, size_t bytes) {
    struct native_workspace *workspace = context;
    if (bytes <= workspace->bytes)
        return workspace->memory;
    free_aligned(workspace->memory);
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    *workspace = (struct native_workspace){take_aligned(rounded), rounded};
    if (!workspace->memory)
        workspace->bytes = 0;
    return workspace->memory;
}

static void release(void *context, void *memory) {}

fdm_allocator native_allocator(struct native_workspace *workspace) {
    return (fdm_allocator){workspace, allocate, release};
}
