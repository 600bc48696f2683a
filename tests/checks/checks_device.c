/* checks_device.c: runs a trial on a CUDA device. Everything of a trial lies in one block, so that one copy brings it
 * there and one copy brings it back; before and after each tensor is a zone that must come back as it went. */
#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum { ZONE = 256, ZONE_BYTE = 0xa5 };
static const fdm_device_id cuda = {FDM_CUDA, 0}, host = {FDM_CPU, 0};

/* Kept between trials and grown when one needs more. */
static char *block, *image;
static size_t block_bytes;

static int reserve(size_t bytes) {
    if (bytes <= block_bytes)
        return 1;
    fdm_memory_release(cuda, block);
    free(image);
    block_bytes = bytes + bytes / 2;
    image = malloc(block_bytes);
    void *memory = NULL;
    if (!image || fdm_memory_allocate(cuda, block_bytes, &memory)) {
        printf("WRONG no memory for a trial on the device: %s\n", fdm_last_error());
        block_bytes = 0;
        return 0;
    }
    block = memory;
    return 1;
}

/* The trial's tensors one after the other, each as far from a multiple of 256 as on the host. */
int device_layout(const struct trial *t, struct device_copy *copy) {
    size_t at = 0;
    for (int i = 0; i < NUM_ROLES; i++) {
        if (!t->g[i].map)
            continue;
        at = (at + ZONE + 255) / 256 * 256 + (uintptr_t)t->g[i].data % 256;
        copy->offsets[i] = at;
        at += t->g[i].data_bytes;
    }
    copy->bytes = (at + ZONE + 255) / 256 * 256;
    if (!reserve(copy->bytes + (1 << 20)))
        return 0;
    for (int i = 0; i < NUM_ROLES; i++) {
        copy->tensors[i] = t->g[i].tensor;
        copy->tensors[i].device = cuda;
        copy->tensors[i].data = block + copy->offsets[i];
    }
    return 1;
}

/* The same roles that the host's struct has. */
fdm_tensors device_tensors(struct device_copy *copy, const fdm_tensors *h) {
    fdm_tensor *d = copy->tensors;
#define ON_DEVICE(member, role) .member = h->member ? &d[role] : NULL
    return (fdm_tensors){ON_DEVICE(q, Q),
                         ON_DEVICE(k, K),
                         ON_DEVICE(v, V),
                         ON_DEVICE(mask, MASK),
                         ON_DEVICE(bias, BIAS),
                         ON_DEVICE(interval_start, START),
                         ON_DEVICE(interval_end, END),
                         ON_DEVICE(cu_seqlens_q, CU_Q),
                         ON_DEVICE(cu_seqlens_k, CU_K),
                         ON_DEVICE(out, OUT),
                         ON_DEVICE(lse, LSE),
                         ON_DEVICE(dout, DOUT),
                         ON_DEVICE(dlse, DLSE),
                         ON_DEVICE(dq, DQ),
                         ON_DEVICE(dk, DK),
                         ON_DEVICE(dv, DV),
                         ON_DEVICE(dbias, DBIAS),
                         ON_DEVICE(lse_low, LSE_LOW)};
#undef ON_DEVICE
}

/* The tensors' bytes to the image or back. */
static void transfer(struct trial *t, const struct device_copy *copy, int to_image) {
    for (int i = 0; i < NUM_ROLES; i++)
        if (t->g[i].map && to_image)
            memcpy(image + copy->offsets[i], t->g[i].data, t->g[i].data_bytes);
        else if (t->g[i].map)
            memcpy(t->g[i].data, image + copy->offsets[i], t->g[i].data_bytes);
}

/* Bytes of the image that belong to no tensor, up to copy->bytes and after `end`. */
static int zones_intact(const struct trial *t, const struct device_copy *copy, size_t end) {
    size_t from = 0;
    for (int i = 0; i <= NUM_ROLES; i++) {
        if (i < NUM_ROLES && !t->g[i].map)
            continue;
        size_t to = i < NUM_ROLES ? copy->offsets[i] : copy->bytes;
        for (size_t n = from; n < to; n++)
            if ((unsigned char)image[n] != ZONE_BYTE)
                return 0;
        from = i < NUM_ROLES ? to + t->g[i].data_bytes : to;
    }
    for (size_t n = end; n < end + ZONE; n++)
        if ((unsigned char)image[n] != ZONE_BYTE)
            return 0;
    return 1;
}

int device_execute(struct trial *t, struct device_copy *copy, const fdm_plan *plan, const fdm_tensors *tensors,
                   fdm_status *status) {
    const size_t workspace = copy->bytes, end = workspace + (size_t)plan->workspace_bytes, all = end + ZONE;
    char *const before = block;
    *status = FDM_ERROR_OUT_OF_MEMORY;
    if (!reserve(all) || block != before) {
        /* the block moved: the plan is for the alignment of addresses, which is the same in the new one */
        if (!block_bytes)
            return 1;
        for (int i = 0; i < NUM_ROLES; i++)
            copy->tensors[i].data = block + copy->offsets[i];
    }
    memset(image, ZONE_BYTE, all);
    memset(image + workspace, 0xff, (size_t)plan->workspace_bytes);
    transfer(t, copy, 1);
    if ((*status = fdm_memory_copy(block, cuda, image, host, all)) ||
        (*status = fdm_execute(plan, tensors, block + workspace, (size_t)plan->workspace_bytes, NULL)) ||
        (*status = fdm_synchronize(cuda)) || (*status = fdm_memory_copy(image, host, block, cuda, all)))
        return 1;
    transfer(t, copy, 0);
    return zones_intact(t, copy, end);
}
