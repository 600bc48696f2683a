/* ranks_stages.c: in which order the stages of a call over ranks are enqueued, and what waits for what. */
#include "cuda/side_stream.h"
#include "parallel/ranks_call.h"

static void *own_stream(const struct ranks_call *call) { return call->launch ? call->launch->stream : NULL; }

/* The stream of moves and exchanges, behind what the caller's has now. */
static fdm_status go_aside(struct ranks_call *call) {
    struct cuda_side_stream *side = call->plan->side;
    if (call->counting || !side)
        return FDM_OK;
    call->stream = cuda_side_handle(side);
    return cuda_side_follow(side, own_stream(call));
}

static fdm_status mark(struct ranks_call *call, int32_t stage) {
    struct cuda_side_stream *side = call->plan->side;
    return call->counting || !side ? FDM_OK : cuda_side_mark(side, stage % 2);
}

/* The caller's stream, behind what a stage's mark remembers. */
static fdm_status come_back(struct ranks_call *call, int32_t stage) {
    struct cuda_side_stream *side = call->plan->side;
    if (call->counting || !side)
        return FDM_OK;
    call->stream = own_stream(call);
    return cuda_side_await(side, stage % 2, call->stream);
}

/* On the side stream a stage's bytes come behind those that go back of the stage two before it, and behind its
 * computation: so a mark says that the stage's buffers, of both ways, are its own. */
static fdm_status run_all(struct ranks_call *call, const struct stages *s) {
    fdm_status status = go_aside(call);
    for (int32_t n = 0, sent = 0; !status && n < s->count; n++) {
        for (; !status && sent < n + call->plan->slots && sent < s->count; sent++)
            if (!(status = s->there(s->context, sent)) && !(status = call->status))
                status = mark(call, sent);
        if (!status)
            status = come_back(call, n);
        if (!status && !(status = s->compute(s->context, n)) && !(status = call->status))
            status = go_aside(call);
        if (!status && s->back && !(status = s->back(s->context, n)))
            status = call->status;
    }
    return status;
}

/* The caller's stream ends behind all of it, also after a failure: the workspace is the caller's again. */
fdm_status stages_run(struct ranks_call *call, const struct stages *stages) {
    const fdm_status status = run_all(call, stages), marked = mark(call, 0), joined = come_back(call, 0);
    return status ? status : marked ? marked : joined;
}
