/* fake_memory.c: memory, copies and events of the pretended driver. */
#include <stdlib.h>

#include "fake_state.h"

static struct allocation *allocation_of(cu_context device, cu_address address, size_t bytes) {
    for (struct allocation *a = fake_state.allocations; a; a = a->next)
        if (a->device == device && address >= (cu_address)(uintptr_t)a->memory &&
            address - (cu_address)(uintptr_t)a->memory + bytes <= a->bytes)
            return a;
    return NULL;
}
static void *pointer_of(cu_address address) { return (void *)(uintptr_t)address; }

static cu_result memory_allocate(cu_address *memory, size_t bytes) {
    cu_result result = fake_begin("cuMemAlloc", CONTEXT);
    if (!result && bytes == 0)
        result = INVALID_VALUE;
    if (!result && (bytes > fake_state.memory_limit || fake_current()->memory_used > fake_state.memory_limit - bytes))
        result = CU_ERROR_OUT_OF_MEMORY;
    struct allocation *made = result ? NULL : calloc(1, sizeof *made);
    if (made) {
        *made = (struct allocation){fake_state.allocations, fake_current(),
                                    aligned_alloc(256, (bytes + 255) / 256 * 256), bytes};
        fake_state.allocations = made;
        fake_current()->memory_used += bytes;
        fake_state.live.allocations++;
        *memory = (cu_address)(uintptr_t)made->memory;
    }
    return fake_end(result);
}

static cu_result memory_free(cu_address memory) {
    cu_result result = fake_begin("cuMemFree", CONTEXT);
    struct allocation *found = result ? NULL : allocation_of(fake_current(), memory, 0);
    if (!result && (!found || pointer_of(memory) != found->memory))
        result = INVALID_VALUE;
    if (!result) {
        fake_finish(fake_current());
        struct allocation **link = &fake_state.allocations;
        while (*link != found)
            link = &(*link)->next;
        *link = found->next;
        fake_current()->memory_used -= found->bytes;
        fake_state.live.allocations--;
        free(found->memory);
        free(found);
    }
    return fake_end(result);
}

static cu_result copy_to_device(cu_address to, const void *from, size_t bytes) {
    cu_result result = fake_begin("cuMemcpyHtoD", CONTEXT);
    if (!result && (!from || !allocation_of(fake_current(), to, bytes)))
        result = INVALID_VALUE;
    if (!result) {
        fake_finish(fake_current());
        memcpy(pointer_of(to), from, bytes);
    }
    return fake_end(result);
}

static cu_result copy_to_host(void *to, cu_address from, size_t bytes) {
    cu_result result = fake_begin("cuMemcpyDtoH", CONTEXT);
    if (!result && (!to || !allocation_of(fake_current(), from, bytes)))
        result = INVALID_VALUE;
    if (!result) {
        fake_finish(fake_current());
        memcpy(to, pointer_of(from), bytes);
    }
    return fake_end(result);
}

static void enqueue(struct pending work) {
    if (fake_current()->num_pending == PENDING_MAX)
        fake_finish(fake_current());
    fake_current()->pending[fake_current()->num_pending++] = work;
}

static cu_result copy_on_device(cu_address to, cu_address from, size_t bytes) {
    cu_result result = fake_begin("cuMemcpyDtoD", CONTEXT);
    if (!result && (!allocation_of(fake_current(), from, bytes) || !allocation_of(fake_current(), to, bytes)))
        result = INVALID_VALUE;
    if (!result)
        enqueue((struct pending){pointer_of(to), pointer_of(from), 0, bytes});
    return fake_end(result);
}

static cu_result memory_fill(cu_address memory, unsigned char value, size_t bytes) {
    cu_result result = fake_begin("cuMemsetD8", CONTEXT);
    if (!result && !allocation_of(fake_current(), memory, bytes))
        result = INVALID_VALUE;
    if (!result)
        enqueue((struct pending){pointer_of(memory), NULL, value, bytes});
    return fake_end(result);
}

/* ---- events ---- */

static cu_result event_create(cu_event *event, unsigned flags) {
    cu_result result = fake_begin("cuEventCreate", CONTEXT);
    if (!result && flags != 0)
        result = INVALID_VALUE;
    if (!result) {
        *event = calloc(1, sizeof **event);
        (*event)->device = fake_current();
        fake_state.live.events++;
    }
    return fake_end(result);
}

static cu_result event_record(cu_event event, cu_stream stream) {
    cu_result result = fake_begin("cuEventRecord", CONTEXT);
    (void)stream;
    if (!result && event->device != fake_current())
        result = INVALID_HANDLE;
    if (!result)
        event->recorded = 1;
    return fake_end(result);
}

static cu_result event_synchronize(cu_event event) {
    cu_result result = fake_begin("cuEventSynchronize", CONTEXT);
    if (!result)
        fake_finish(event->device);
    return fake_end(result);
}

static cu_result event_elapsed(float *milliseconds, cu_event from, cu_event to) {
    cu_result result = fake_begin("cuEventElapsedTime", CONTEXT);
    if (!result && (!from->recorded || !to->recorded))
        result = INVALID_HANDLE;
    if (!result)
        *milliseconds = 1.5f;
    return fake_end(result);
}

static cu_result event_destroy(cu_event event) {
    cu_result result = fake_begin("cuEventDestroy", CONTEXT);
    free(event); /* also where it fails: the caller cannot try again */
    fake_state.live.events--;
    return fake_end(result);
}

static cu_result tensor_map_encode(void *map, int dtype, unsigned rank, void *address,
                                   const unsigned long long *extents, const unsigned long long *stride_bytes,
                                   const unsigned *box, const unsigned *element_strides, int interleave, int swizzle,
                                   int l2_promotion, int out_of_bounds_fill) {
    cu_result result = fake_begin("cuTensorMapEncodeTiled", DRIVER);
    if (!result)
        memset(map, 0, 128);
    return fake_end(result);
}

void fake_fill_memory(struct cuda_driver *driver) {
    driver->memory_allocate = memory_allocate;
    driver->memory_free = memory_free;
    driver->copy_to_device = copy_to_device;
    driver->copy_to_host = copy_to_host;
    driver->copy_on_device = copy_on_device;
    driver->memory_fill = memory_fill;
    driver->event_create = event_create;
    driver->event_record = event_record;
    driver->event_synchronize = event_synchronize;
    driver->event_elapsed = event_elapsed;
    driver->event_destroy = event_destroy;
    driver->tensor_map_encode = tensor_map_encode;
}
