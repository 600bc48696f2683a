/* checks_device.c: runs a trial on a CUDA device. Everything of a trial lies in one block, so that one copy brings it
 * there and one copy brings it back; before and after each tensor is a zone that must come back as it went. Of a far
 * trial each piece goes by itself, with its zones. */
#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum { ZONE = 256, ZONE_BYTE = 0xa5 };
static const fdm_device_id cuda = {FDM_CUDA, 0}, host = {FDM_CPU, 0};

/* Kept between trials and grown when one needs more; the image on the host has what goes in one copy. */
static char *block, *image;
static size_t block_bytes, image_bytes;

/* A far trial may need more than a device has, and is none for it then. */
static int reserve(const struct trial *t, size_t bytes) {
    const size_t room = t->far ? bytes : bytes + bytes / 2;
    void *memory = NULL;
    if (bytes > image_bytes && !t->far) {
        free(image);
        image = malloc(room);
        image_bytes = image ? room : 0;
    }
    if (bytes > block_bytes) {
        fdm_memory_release(cuda, block);
        block_bytes = fdm_memory_allocate(cuda, room, &memory) ? 0 : room;
        block = memory;
    }
    if (bytes > block_bytes || (bytes > image_bytes && !t->far)) {
        if (!t->far)
            printf("WRONG no memory for a trial on the device: %s\n", fdm_last_error());
        return 0;
    }
    return 1;
}

/* Where a latent call has its V: in K, or in the cache of K. Any other role is where it is. */
static int keys_of(const struct trial *t, int role) {
    return !t->latent ? role : role == CACHE_V ? CACHE_K : role == V && !t->g[CACHE_K].map ? K : role;
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
    if (!reserve(t, copy->bytes + (1 << 20)))
        return 0;
    for (int i = 0; i < NUM_ROLES; i++) {
        copy->tensors[i] = keys_of(t, i) != i ? t->latent_v : t->g[i].tensor;
        copy->tensors[i].device = cuda;
        copy->tensors[i].data = block + copy->offsets[keys_of(t, i)];
    }
    return 1;
}

/* The same roles that the host's struct has. */
fdm_tensors device_tensors(struct device_copy *copy, const fdm_tensors *h) {
    fdm_tensor *d = copy->tensors;
    if (h->cache) {
        const fdm_cache *c = h->cache;
#define IN_CACHE(member, role) copy->cache.member = c->member ? &d[role] : NULL
        copy->cache = *c;
        IN_CACHE(block_table, TABLE);
        IN_CACHE(page_start, PAGE_START);
        IN_CACHE(cache_row, CACHE_ROW);
        IN_CACHE(lengths, LENGTHS);
        IN_CACHE(first_key, FIRST_KEY);
        IN_CACHE(k_new, K_NEW);
        IN_CACHE(v_new, V_NEW);
        IN_CACHE(cu_seqlens_new, CU_NEW);
        IN_CACHE(rotary_cos, COS);
        IN_CACHE(rotary_sin, SIN);
        IN_CACHE(rotary_start, ROTARY_START);
#undef IN_CACHE
    }
    const enum role q = h->cache && copy->cache.rotary_cos ? Q_GIVEN : Q;
    const enum role used_k = h->cache ? LENGTHS : USED_K;
#define ON_DEVICE(member, role) .member = h->member ? &d[role] : NULL
    return (fdm_tensors){sizeof(fdm_tensors),
                         ON_DEVICE(q, q),
                         ON_DEVICE(k, h->cache ? CACHE_K : K),
                         ON_DEVICE(v, h->cache ? CACHE_V : V),
                         ON_DEVICE(mask, MASK),
                         ON_DEVICE(bias, BIAS),
                         ON_DEVICE(interval_start, START),
                         ON_DEVICE(interval_end, END),
                         ON_DEVICE(row_start, ROW_START),
                         ON_DEVICE(row_end, ROW_END),
                         ON_DEVICE(block_mask, BLOCKS),
                         ON_DEVICE(tree, TREE),
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
                         ON_DEVICE(lse_low, LSE_LOW),
                         ON_DEVICE(sink, SINK),
                         ON_DEVICE(dsink, DSINK),
                         ON_DEVICE(seqused_q, USED_Q),
                         ON_DEVICE(seqused_k, used_k),
                         .cache = h->cache ? &copy->cache : NULL};
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

/* Where the block has moved, a plan is still right: it is for the alignment of addresses, which has not changed. */
static int make_room(const struct trial *t, struct device_copy *copy, size_t bytes) {
    if (!reserve(t, bytes))
        return 0;
    for (int i = 0; i < NUM_ROLES; i++)
        copy->tensors[i].data = block + copy->offsets[keys_of(t, i)];
    return 1;
}

/* ---- a far trial: piece by piece, each with zones of its own ---- */

static fdm_status bring(char *there, const char *here, size_t bytes) {
    char *with_zones = malloc(bytes + 2 * ZONE);
    memset(with_zones, ZONE_BYTE, bytes + 2 * ZONE);
    memcpy(with_zones + ZONE, here, bytes);
    const fdm_status status = fdm_memory_copy(there - ZONE, cuda, with_zones, host, bytes + 2 * ZONE);
    free(with_zones);
    return status;
}

static fdm_status take_back(char *here, char *there, size_t bytes, int *intact) {
    char *with_zones = malloc(bytes + 2 * ZONE);
    const fdm_status status = fdm_memory_copy(with_zones, host, there - ZONE, cuda, bytes + 2 * ZONE);
    memcpy(here, with_zones + ZONE, bytes);
    for (size_t n = 0; n < ZONE && !status; n++)
        *intact &=
            (unsigned char)with_zones[n] == ZONE_BYTE && (unsigned char)with_zones[ZONE + bytes + n] == ZONE_BYTE;
    free(with_zones);
    return status;
}

static fdm_status transfer_pieces(const struct trial *t, const struct device_copy *copy, int to_device, int *intact) {
    fdm_status status = FDM_OK;
    for (int i = 0; i < NUM_ROLES; i++)
        for (size_t n = 0; t->g[i].map && n < t->g[i].num_pieces && !status; n++) {
            const size_t at = n * t->g[i].piece_step, bytes = t->g[i].piece_bytes;
            char *here = t->g[i].data + at, *there = block + copy->offsets[i] + at;
            status = to_device ? bring(there, here, bytes) : take_back(here, there, bytes, intact);
        }
    return status;
}

static int execute_far(struct trial *t, struct device_copy *copy, const fdm_plan *plan, const fdm_tensors *tensors,
                       fdm_status *status) {
    const size_t bytes = (size_t)plan->workspace_bytes;
    int intact = 1;
    if (!make_room(t, copy, copy->bytes + bytes + 2 * ZONE))
        return 1;
    char *workspace = malloc(bytes + 1), *there = block + copy->bytes + ZONE;
    memset(workspace, 0xff, bytes + 1);
    if (!(*status = transfer_pieces(t, copy, 1, &intact)) && !(*status = bring(there, workspace, bytes)) &&
        !(*status = fdm_execute(plan, tensors, there, bytes, NULL)) && !(*status = fdm_synchronize(cuda)) &&
        !(*status = transfer_pieces(t, copy, 0, &intact)))
        *status = take_back(workspace, there, bytes, &intact);
    free(workspace);
    return intact;
}

int device_execute(struct trial *t, struct device_copy *copy, const fdm_plan *plan, const fdm_tensors *tensors,
                   fdm_status *status) {
    const size_t workspace = copy->bytes, end = workspace + (size_t)plan->workspace_bytes, all = end + ZONE;
    *status = FDM_ERROR_OUT_OF_MEMORY;
    if (t->far)
        return execute_far(t, copy, plan, tensors, status);
    if (!make_room(t, copy, all))
        return 1;
    memset(image, ZONE_BYTE, all);
    memset(image + workspace, 0xff, (size_t)plan->workspace_bytes);
    transfer(t, copy, 1);
    fdm_tensors with_plan = *tensors;
    fdm_tile_plan mask_plan = {0};
    if ((*status = fdm_memory_copy(block, cuda, image, host, all)))
        return 1;
    if (!mask_plan_make(t, plan, tensors, &mask_plan))
        return -1;
    with_plan.mask_plan = mask_plan.memory ? &mask_plan : NULL;
    if ((*status = fdm_execute(plan, &with_plan, block + workspace, (size_t)plan->workspace_bytes, NULL)) ||
        (*status = fdm_synchronize(cuda)) || (*status = fdm_memory_copy(image, host, block, cuda, all)))
        return 1;
    transfer(t, copy, 0);
    return zones_intact(t, copy, end);
}
