/* side_stream.h: a second stream of a device, and how it and the caller's wait for each other on the device. */
#ifndef FDM_CUDA_SIDE_STREAM_H
#define FDM_CUDA_SIDE_STREAM_H

#include <stdint.h>

#include "flash_dmattn.h"

/* Of the device's highest priority; it does not wait for the legacy default stream. One caller at a time. */
struct cuda_side_stream;
enum { CUDA_SIDE_MARKS = 2 };

fdm_status cuda_side_create(int32_t device, struct cuda_side_stream **side);
void cuda_side_release(struct cuda_side_stream *side); /* takes NULL too; what is enqueued still runs */
void *cuda_side_handle(const struct cuda_side_stream *side);

/* These enqueue, and wait for nothing on the host. Capturable: a capture of the caller's stream takes in the side
 * stream when it follows, and wants it back by an await before it ends. */
/* What comes next on the side stream begins when what is on `stream` now has ended. */
fdm_status cuda_side_follow(struct cuda_side_stream *side, void *stream);
/* Remembers what is on the side stream now. */
fdm_status cuda_side_mark(struct cuda_side_stream *side, int32_t mark);
/* What comes next on `stream` begins when what a mark remembers has ended. */
fdm_status cuda_side_await(struct cuda_side_stream *side, int32_t mark, void *stream);

#endif
