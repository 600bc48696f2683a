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

/* The one that begins there. Another may end there. */
static struct allocation *allocation_at(cu_context device, cu_address address) {
    struct allocation *a = fake_state.allocations;
    while (a && (a->device != device || a->memory != pointer_of(address)))
        a = a->next;
    return a;
}

static cu_result memory_allocate(cu_address *memory, size_t bytes) {
    cu_result result = fake_begin("cuMemAlloc", CONTEXT);
    if (!result && bytes == 0)
        result = INVALID_VALUE;
    if (!result && (bytes > fake_state.memory_limit || fake_current()->memory_used > fake_state.memory_limit - bytes))
        result = CU_ERROR_OUT_OF_MEMORY;
    struct allocation *made = result ? NULL : calloc(1, sizeof *made);
    if (made) {
        unsigned char *own = fake_hooks ? fake_hooks->allocate(bytes) : aligned_alloc(256, (bytes + 255) / 256 * 256);
        *made = (struct allocation){fake_state.allocations, fake_current(), own, bytes};
        if (!own) {
            free(made);
            return fake_end(CU_ERROR_OUT_OF_MEMORY);
        }
        fake_state.allocations = made;
        fake_current()->memory_used += bytes;
        fake_state.live.allocations++;
        *memory = (cu_address)(uintptr_t)made->memory;
    }
    return fake_end(result);
}

static cu_result memory_free(cu_address memory) {
    cu_result result = fake_begin("cuMemFree", CONTEXT);
    struct allocation *found = result ? NULL : allocation_at(fake_current(), memory);
    if (!result && !found)
        result = INVALID_VALUE;
    if (!result) {
        fake_finish(fake_current());
        struct allocation **link = &fake_state.allocations;
        while (*link != found)
            link = &(*link)->next;
        *link = found->next;
        fake_current()->memory_used -= found->bytes;
        fake_state.live.allocations--;
        fake_hooks ? fake_hooks->release(found->memory, found->bytes) : free(found->memory);
        free(found);
    }
    return fake_end(result);
}

static cu_result copy_to_device(cu_address to, const void *from, size_t bytes) {
    cu_result result = fake_begin("cuMemcpyHtoD", CONTEXT);
    if (!result && (!from || !allocation_of(fake_current(), to, bytes)))
        result = INVALID_VALUE;
    if (!result && !(result = fake_finish(fake_current())))
        memcpy(pointer_of(to), from, bytes);
    return fake_end(result);
}

static cu_result copy_to_host(void *to, cu_address from, size_t bytes) {
    cu_result result = fake_begin("cuMemcpyDtoH", CONTEXT);
    if (!result && (!to || !allocation_of(fake_current(), from, bytes)))
        result = INVALID_VALUE;
    if (!result && !(result = fake_finish(fake_current())))
        memcpy(to, pointer_of(from), bytes);
    return fake_end(result);
}

static cu_result enqueue(struct pending work) {
    cu_result result = 0;
    if (fake_hooks || fake_current()->num_pending == PENDING_MAX)
        result = fake_finish(fake_current());
    fake_current()->pending[fake_current()->num_pending++] = work;
    return result;
}

static cu_result copy_on_device(cu_address to, cu_address from, size_t bytes) {
    cu_result result = fake_begin("cuMemcpyDtoD", CONTEXT);
    if (!result && (!allocation_of(fake_current(), from, bytes) || !allocation_of(fake_current(), to, bytes)))
        result = INVALID_VALUE;
    if (!result)
        result = enqueue((struct pending){pointer_of(to), pointer_of(from), 0, bytes});
    return fake_end(result);
}

static cu_result memory_fill(cu_address memory, unsigned char value, size_t bytes) {
    cu_result result = fake_begin("cuMemsetD8", CONTEXT);
    if (!result && !allocation_of(fake_current(), memory, bytes))
        result = INVALID_VALUE;
    if (!result)
        result = enqueue((struct pending){pointer_of(memory), NULL, value, bytes});
    return fake_end(result);
}

static cu_result memory_fill_async(cu_address memory, unsigned char value, size_t bytes, cu_stream stream) {
    (void)stream;
    cu_result result = fake_begin("cuMemsetD8Async", CONTEXT);
    if (!result && !allocation_of(fake_current(), memory, bytes))
        result = INVALID_VALUE;
    if (!result)
        enqueue((struct pending){pointer_of(memory), NULL, value, bytes});
    return fake_end(result);
}

static cu_result stream_query(cu_stream stream) {
    (void)stream;
    cu_result result = fake_begin("cuStreamQuery", CONTEXT);
    if (!result)
        result = fake_finish(fake_current());
    return fake_end(result);
}

/* ---- events ---- */

static cu_result event_create(cu_event *event, unsigned flags) {
    cu_result result = fake_begin("cuEventCreate", CONTEXT);
    if (!result && flags != 0 && flags != CU_EVENT_DISABLE_TIMING)
        result = INVALID_VALUE;
    if (!result) {
        *event = calloc(1, sizeof **event);
        (*event)->device = fake_current();
        (*event)->timed = !flags;
        fake_state.live.events++;
    }
    return fake_end(result);
}

static cu_result event_record(cu_event event, cu_stream stream) {
    cu_result result = fake_begin("cuEventRecord", CONTEXT);
    if (!result && event->device != fake_current())
        result = INVALID_HANDLE;
    if (!result)
        fake_note(&(struct fake_order){.kind = FAKE_RECORDED, .stream = stream, .event = event});
    if (!result && fake_hooks && event->timed) {
        result = fake_finish(event->device);
        event->seconds = fake_hooks->seconds();
    }
    if (!result)
        event->recorded = 1;
    if (fake_state.planted)
        event->seconds = fake_state.planted_seconds;
    return fake_end(result);
}

static cu_result event_synchronize(cu_event event) {
    cu_result result = fake_begin("cuEventSynchronize", CONTEXT);
    if (!result)
        result = fake_finish(event->device);
    return fake_end(result);
}

static cu_result event_elapsed(float *milliseconds, cu_event from, cu_event to) {
    cu_result result = fake_begin("cuEventElapsedTime", CONTEXT);
    if (!result && (!from->recorded || !to->recorded || !from->timed || !to->timed))
        result = INVALID_HANDLE;
    if (!result)
        *milliseconds = fake_hooks || fake_state.planted ? (float)((to->seconds - from->seconds) * 1e3) : 1.5f;
    return fake_end(result);
}

static cu_result event_destroy(cu_event event) {
    cu_result result = fake_begin("cuEventDestroy", CONTEXT);
    free(event); /* also where it fails: the caller cannot try again */
    fake_state.live.events--;
    return fake_end(result);
}

/* ---- streams ---- */

static cu_result stream_priorities(int *least, int *greatest) {
    cu_result result = fake_begin("cuCtxGetStreamPriorityRange", CONTEXT);
    if (!result)
        *least = 0, *greatest = -5;
    return fake_end(result);
}

static cu_result stream_create(cu_stream *stream, unsigned flags, int priority) {
    cu_result result = fake_begin("cuStreamCreateWithPriority", CONTEXT);
    if (!result && (flags > CU_STREAM_NON_BLOCKING || priority > 0 || priority < -5))
        result = INVALID_VALUE;
    if (!result) {
        *stream = calloc(1, sizeof **stream);
        (*stream)->device = fake_current();
        fake_state.live.streams++;
    }
    return fake_end(result);
}

static cu_result stream_wait(cu_stream stream, cu_event event, unsigned flags) {
    cu_result result = fake_begin("cuStreamWaitEvent", CONTEXT);
    if (!result && flags != 0)
        result = INVALID_VALUE;
    if (!result && event->device != fake_current())
        result = INVALID_HANDLE;
    if (!result)
        fake_note(&(struct fake_order){.kind = FAKE_WAITED, .stream = stream, .event = event});
    return fake_end(result);
}

static cu_result stream_destroy(cu_stream stream) {
    cu_result result = fake_begin("cuStreamDestroy", CONTEXT);
    free(stream); /* also where it fails: the caller cannot try again */
    fake_state.live.streams--;
    return fake_end(result);
}

/* The limits of cuTensorMapEncodeTiled (CUDA Driver API, "Tensor Map Object Management"), without interleaving. */
static int takes_map(int dtype, unsigned rank, const void *address, const unsigned long long *extents,
                     const unsigned long long *stride_bytes, const unsigned *box, const unsigned *element_strides,
                     int swizzle) {
    static const unsigned bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
    if (dtype < 0 || dtype > 9 || rank < 1 || rank > 5 || !address || (uintptr_t)address % 16)
        return 0;
    for (unsigned i = 0; i < rank; i++)
        if (extents[i] < 1 || extents[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || element_strides[i] != 1)
            return 0;
    for (unsigned i = 0; i + 1 < rank; i++)
        if (stride_bytes[i] % 16 || stride_bytes[i] >= 1ull << 40 || (fake_state.no_stride_0 && !stride_bytes[i]))
            return 0;
    const unsigned row = box[0] * bytes[dtype];
    return row % 16 == 0 && swizzle >= 0 && swizzle <= 3 && (swizzle == 0 || row <= 16u << swizzle);
}

static cu_result tensor_map_encode(void *map, int dtype, unsigned rank, void *address,
                                   const unsigned long long *extents, const unsigned long long *stride_bytes,
                                   const unsigned *box, const unsigned *element_strides, int interleave, int swizzle,
                                   int l2_promotion, int out_of_bounds_fill) {
    cu_result result = fake_begin("cuTensorMapEncodeTiled", CONTEXT);
    if (!result && (!map || (uintptr_t)map % 64 || interleave || l2_promotion < 0 || l2_promotion > 3 ||
                    out_of_bounds_fill < 0 || out_of_bounds_fill > 1 ||
                    !takes_map(dtype, rank, address, extents, stride_bytes, box, element_strides, swizzle)))
        result = INVALID_VALUE;
    if (!result) {
        struct fake_tensor_map written = {.address = (uintptr_t)address,
                                          .type = (uint8_t)dtype,
                                          .rank = (uint8_t)rank,
                                          .swizzle = (uint8_t)swizzle,
                                          .l2_promotion = (uint8_t)l2_promotion,
                                          .word = "tiled"};
        for (unsigned i = 0; i < rank; i++) {
            written.last[i] = (uint32_t)(extents[i] - 1);
            written.box[i] = (uint16_t)box[i];
            if (i > 0)
                written.stride_bytes[i - 1] = stride_bytes[i - 1];
        }
        memset(map, 0, 128);
        memcpy(map, &written, sizeof written);
    }
    return fake_end(result);
}
_Static_assert(sizeof(struct fake_tensor_map) <= 128, "it is written into a map");

void fake_fill_memory(struct cuda_driver *driver) {
    driver->memory_allocate = memory_allocate;
    driver->memory_free = memory_free;
    driver->copy_to_device = copy_to_device;
    driver->copy_to_host = copy_to_host;
    driver->copy_on_device = copy_on_device;
    driver->memory_fill = memory_fill;
    driver->memory_fill_async = memory_fill_async;
    driver->stream_query = stream_query;
    driver->event_create = event_create;
    driver->event_record = event_record;
    driver->event_synchronize = event_synchronize;
    driver->event_elapsed = event_elapsed;
    driver->event_destroy = event_destroy;
    driver->stream_priorities = stream_priorities;
    driver->stream_create = stream_create;
    driver->stream_wait = stream_wait;
    driver->stream_destroy = stream_destroy;
    driver->tensor_map_encode = tensor_map_encode;
}
