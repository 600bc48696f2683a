/* arena.c: tensors between unreadable pages, poisoned wherever there is no element. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "checks.h"
#include "pages.h"

int64_t guarded_elements(const struct guarded *g) {
    int64_t n = 1;
    for (int32_t i = 0; i < g->tensor.ndim; i++)
        n *= g->shape[i];
    return n;
}

size_t guarded_offset(const struct guarded *g, int64_t n) {
    int64_t offset = 0;
    for (int32_t i = g->tensor.ndim - 1; i >= 0; i--) {
        offset += n % g->shape[i] * g->strides[i];
        n /= g->shape[i];
    }
    return (size_t)(offset * fdm_dtype_bytes(fdm_dtype_of(&g->tensor)));
}

/* In which order axes lie in memory, the outermost first; returns whether nothing lies between them. A named case's far
 * axis is the outermost. */
static int draw_order(const struct guarded *g, struct trial *trial, int loose, int32_t order[4]) {
    const int32_t ndim = g->tensor.ndim;
    const int32_t movable = loose & 2 && !trial->neat && random_below(trial, 4) == 0 ? ndim : ndim - 1;
    const int tight = random_below(trial, 3) == 0;
    for (int32_t i = movable - 1; i > 0 && !tight; i--) {
        const int32_t j = (int32_t)random_below(trial, i + 1), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    for (int32_t i = 1; i < ndim - 1 && trial->apart; i++)
        if (g->shape[order[i]] == trial->apart) {
            const int32_t axis = order[i];
            order[i] = order[0];
            order[0] = axis;
        }
    return tight;
}

/* The outermost axis' elements far from each other: beyond what 32 bits can say, in elements or in bytes. Of far 2
 * there are so few that a device has room for them. */
static void draw_pieces(struct guarded *g, struct trial *trial, int32_t axis, int64_t bytes) {
    enum { FEW_PIECES = 3 };
    static const int64_t steps[] = {(1ll << 31) + 64, 1ll << 27, 1ll << 30, 1ll << 32};
    const int64_t step = steps[trial->far > 1 ? 0 : random_below(trial, 4)], pieces = g->shape[axis];
    const int drawn = trial->apart ? pieces == trial->apart : random_below(trial, 2) != 0;
    if (!drawn || pieces < 2 || (trial->far > 1 && pieces > FEW_PIECES) || g->strides[axis] == 0)
        return;
    g->num_pieces = (size_t)pieces;
    g->piece_step = (size_t)step;
    g->strides[axis] = step / bytes;
}

/* Axes in a random order of memory, gaps between rows. loose, bit 0: some axes have stride 0; bit 1: the last axis may
 * move too. Neat trials keep the last axis and have strides of 16 bytes, which other paths of some kernels want. */
static int64_t draw_strides(struct guarded *g, struct trial *trial, int64_t bytes, int loose) {
    int32_t ndim = g->tensor.ndim, order[4] = {0, 1, 2, 3};
    const int tight = draw_order(g, trial, loose, order);
    int64_t span = 1, last = 0;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        int32_t axis = order[i];
        g->strides[axis] = span;
        if (loose & 1 && axis != ndim - 1 && random_below(trial, 12) == 0)
            g->strides[axis] = 0;
        else
            span *= g->shape[axis] ? g->shape[axis] : 1;
        if (!tight && i > 0 && random_below(trial, 2))
            span += random_below(trial, 4);
        if (trial->neat)
            span = (span * bytes + 15) / 16 * 16 / bytes;
    }
    g->num_pieces = 1;
    if (trial->far && ndim > 1)
        draw_pieces(g, trial, order[0], bytes);
    for (int32_t i = 0; i < ndim; i++)
        last += (g->shape[i] > 0 ? g->shape[i] - 1 : 0) * g->strides[i];
    return last + 1;
}

size_t guarded_bytes(const struct guarded *g) { return g->num_pieces * g->piece_bytes; }

/* Makes the pages of the pieces readable and writable, and poisons them. */
static void open_pieces(struct guarded *g, size_t page) {
    for (size_t n = 0; n < g->num_pieces; n++) {
        const uintptr_t first = (uintptr_t)(g->data + n * g->piece_step) / page * page;
        const uintptr_t last = ((uintptr_t)(g->data + n * g->piece_step + g->piece_bytes) + page - 1) / page * page;
        if (last > first && !pages_open((void *)first, last - first)) {
            perror("fdm-checks: pages");
            exit(2);
        }
        memset((void *)first, 0xff, last - first);
    }
}

void guarded_make(struct guarded *g, struct trial *trial, fdm_dtype dtype, int32_t ndim, const int64_t *shape,
                  int loose) {
    const size_t page = page_bytes(), bytes = (size_t)fdm_dtype_bytes(dtype);
    *g = (struct guarded){.tensor = {.device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(dtype)}};
    memcpy(g->shape, shape, (size_t)ndim * sizeof *shape);
    g->tensor.shape = g->shape;
    g->tensor.strides = g->strides;
    g->data_bytes = (size_t)draw_strides(g, trial, (int64_t)bytes, loose) * bytes;
    if (trial->neat)
        g->data_bytes = (g->data_bytes + 15) / 16 * 16;
    g->piece_bytes = g->data_bytes - (g->num_pieces - 1) * g->piece_step;
    size_t inside = (g->data_bytes + page - 1) / page * page;
    g->map_bytes = inside + 2 * page;
    g->map = pages_reserve(g->map_bytes);
    if (!g->map) {
        perror("fdm-checks: guard pages");
        exit(2);
    }
    g->data = g->map + page + (random_below(trial, 2) ? inside - g->data_bytes : 0);
    open_pieces(g, page);
    g->tensor.data = g->data;
    g->saved = malloc(guarded_bytes(g) + 1);
}

void guarded_free(struct guarded *g) {
    if (g->map)
        pages_release(g->map, g->map_bytes);
    free(g->saved);
    *g = (struct guarded){0};
}

void guarded_poison(struct guarded *g) {
    for (size_t n = 0; g->map && n < g->num_pieces; n++)
        memset(g->data + n * g->piece_step, 0xff, g->piece_bytes);
}

void guarded_copy(char *to, const struct guarded *g) {
    for (size_t n = 0; n < g->num_pieces; n++)
        memcpy(to + n * g->piece_bytes, g->data + n * g->piece_step, g->piece_bytes);
}

void guarded_save(struct guarded *g) {
    if (g->map)
        guarded_copy(g->saved, g);
}

int guarded_intact(const struct guarded *g, int is_output) {
    if (!g->map)
        return 1;
    int intact = 1;
    for (size_t n = 0; !is_output && n < g->num_pieces; n++)
        intact &= memcmp(g->saved + n * g->piece_bytes, g->data + n * g->piece_step, g->piece_bytes) == 0;
    if (!is_output)
        return intact;
    size_t bytes = (size_t)fdm_dtype_bytes(fdm_dtype_of(&g->tensor));
    char *element = calloc(1, guarded_bytes(g) + 1);
    int64_t elements = guarded_elements(g);
    for (int64_t n = 0; n < elements; n++) {
        const size_t at = guarded_offset(g, n), piece = g->num_pieces > 1 ? at / g->piece_step : 0;
        memset(element + piece * g->piece_bytes + (at - piece * g->piece_step), 1, bytes);
    }
    for (size_t n = 0; n < g->num_pieces; n++)
        for (size_t i = 0; i < g->piece_bytes; i++)
            intact &= element[n * g->piece_bytes + i] || g->data[n * g->piece_step + i] == (char)0xff;
    free(element);
    return intact;
}

double guarded_get(const struct guarded *g, int64_t n) {
    const void *at = g->data + guarded_offset(g, n);
    switch (fdm_dtype_of(&g->tensor)) {
    case FDM_FLOAT64: return *(const double *)at;
    case FDM_FLOAT16: return float16_to_float(*(const uint16_t *)at);
    case FDM_BFLOAT16: return bfloat16_to_float(*(const uint16_t *)at);
    case FDM_BOOL: return *(const uint8_t *)at != 0;
    case FDM_INT32: return *(const int32_t *)at;
    case FDM_UINT32: return *(const uint32_t *)at;
    case FDM_INT64: return (double)*(const int64_t *)at;
    default: return *(const float *)at;
    }
}

void guarded_set(struct guarded *g, int64_t n, double value) {
    void *at = g->data + guarded_offset(g, n);
    switch (fdm_dtype_of(&g->tensor)) {
    case FDM_FLOAT64: *(double *)at = value; break;
    case FDM_FLOAT16: *(uint16_t *)at = float_to_float16((float)value); break;
    case FDM_BFLOAT16: *(uint16_t *)at = float_to_bfloat16((float)value); break;
    case FDM_BOOL: *(uint8_t *)at = value != 0; break;
    case FDM_INT32: *(int32_t *)at = (int32_t)value; break;
    case FDM_UINT32: *(uint32_t *)at = (uint32_t)value; break;
    case FDM_INT64: *(int64_t *)at = (int64_t)value; break;
    default: *(float *)at = (float)value;
    }
}
