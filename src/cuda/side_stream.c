/* side_stream.c: a second stream of a device and the events between it and the caller's. */
#include "cuda/side_stream.h"

#include "base/error.h"
#include "base/memory.h"
#include "cuda/driver.h"

struct cuda_side_stream {
    int32_t device;
    cu_stream stream;
    cu_event marks[CUDA_SIDE_MARKS], before; /* before: on the caller's stream */
};

static cu_result create(const struct cuda_driver *driver, struct cuda_side_stream *side) {
    cu_event *const events[] = {&side->marks[0], &side->marks[1], &side->before};
    int least = 0, greatest = 0;
    cu_result result = driver->stream_priorities(&least, &greatest);
    if (!result)
        result = driver->stream_create(&side->stream, CU_STREAM_NON_BLOCKING, greatest);
    for (int i = 0; i < CUDA_SIDE_MARKS + 1 && !result; i++)
        result = driver->event_create(events[i], CU_EVENT_DISABLE_TIMING);
    return result;
}

static void destroy(const struct cuda_driver *driver, const struct cuda_side_stream *side) {
    const cu_event events[] = {side->marks[0], side->marks[1], side->before};
    for (int i = 0; i < CUDA_SIDE_MARKS + 1; i++)
        if (events[i])
            driver->event_destroy(events[i]);
    if (side->stream)
        driver->stream_destroy(side->stream);
}

fdm_status cuda_side_create(int32_t device, struct cuda_side_stream **side) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    *side = NULL;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter_relaxed(driver, device, &scope)))
        return status;
    struct cuda_side_stream *made = memory_allocate(sizeof *made);
    if (!made) {
        status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a stream");
    } else {
        *made = (struct cuda_side_stream){.device = device};
        const cu_result result = create(driver, made);
        if (result) {
            destroy(driver, made);
            memory_release(made);
            status = cuda_driver_error(driver, result, "making a CUDA stream");
        } else {
            *side = made;
        }
    }
    cuda_context_leave(driver, &scope);
    return status;
}

void cuda_side_release(struct cuda_side_stream *side) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    if (!side)
        return;
    if (!cuda_driver_get(&driver)) {
        const fdm_status outside = cuda_context_enter_relaxed(driver, side->device, &scope);
        destroy(driver, side); /* outside too: they know their context */
        if (!outside)
            cuda_context_leave(driver, &scope);
    }
    memory_release(side);
}

void *cuda_side_handle(const struct cuda_side_stream *side) { return side->stream; }

/* Records an event on one stream, lets another wait for it, or both. */
static fdm_status join(const struct cuda_side_stream *side, cu_event event, cu_stream from, int records, cu_stream to,
                       int waits) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter(driver, side->device, &scope)))
        return status;
    cu_result result = records ? driver->event_record(event, from) : 0;
    if (!result && waits)
        result = driver->stream_wait(to, event, 0);
    cuda_context_leave(driver, &scope);
    return result ? cuda_driver_error(driver, result, "joining two CUDA streams") : FDM_OK;
}

fdm_status cuda_side_follow(struct cuda_side_stream *side, void *stream) {
    return join(side, side->before, stream, 1, side->stream, 1);
}

fdm_status cuda_side_mark(struct cuda_side_stream *side, int32_t mark) {
    return join(side, side->marks[mark], side->stream, 1, NULL, 0);
}

fdm_status cuda_side_await(struct cuda_side_stream *side, int32_t mark, void *stream) {
    return join(side, side->marks[mark], NULL, 0, stream, 1);
}
