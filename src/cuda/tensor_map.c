/* tensor_map.c: checks a tensor's layout against TMA's limits and has the driver encode it. */
#include "cuda/tensor_map.h"

#include "base/error.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"

_Static_assert(sizeof(struct cuda_tensor_map) == 128 && _Alignof(struct cuda_tensor_map) == 64, "CUtensorMap");

/* CUtensorMapDataType, and the bytes of an element. */
static const struct {
    int number, bytes;
} types[] = {
    [CUDA_MAP_UINT8] = {0, 1}, [CUDA_MAP_FLOAT16] = {6, 2}, [CUDA_MAP_BFLOAT16] = {9, 2}, [CUDA_MAP_FLOAT32] = {7, 4}};
enum { NUM_TYPES = sizeof types / sizeof types[0] };

/* CUtensorMapSwizzle, CUtensorMapL2promotion: 0 for none, then one number for each doubling from the smallest. */
static int number_of(int32_t bytes, int32_t smallest) {
    int number = 1;
    if (bytes == 0)
        return 0;
    while (number < 3 && bytes != smallest << (number - 1))
        number++;
    return bytes == smallest << (number - 1) ? number : -1;
}

#define REFUSE(...) error_set(FDM_ERROR_INVALID_ARGUMENT, "a tensor map's " __VA_ARGS__)

static fdm_status check_tensor(const struct cuda_tensor_layout *t) {
    if ((unsigned)t->type >= NUM_TYPES)
        return REFUSE("type is %d; there are %d", (int)t->type, NUM_TYPES);
    if (t->rank < 1 || t->rank > CUDA_MAP_RANK_MAX)
        return REFUSE("rank is %d; it must be 1 to %d", t->rank, CUDA_MAP_RANK_MAX);
    if (!t->address || (uintptr_t)t->address % 16)
        return REFUSE("address is %p; it must be a multiple of 16 and not 0", t->address);
    for (int32_t i = 0; i < t->rank; i++)
        if (t->extents[i] < 1 || t->extents[i] > 1ll << 32)
            return REFUSE("extent %d is %lld; it must be 1 to 2^32", i, (long long)t->extents[i]);
    for (int32_t i = 1; i < t->rank; i++)
        if (t->stride_bytes[i] < 0 || t->stride_bytes[i] % 16 || t->stride_bytes[i] >= 1ll << 40)
            return REFUSE("stride %d is %lld bytes; it must be a multiple of 16 from 0 to below 2^40", i,
                          (long long)t->stride_bytes[i]);
    return FDM_OK;
}

static fdm_status check_tile(const struct cuda_tensor_layout *t) {
    const int32_t row = t->box[0] * types[t->type].bytes;
    for (int32_t i = 0; i < t->rank; i++)
        if (t->box[i] < 1 || t->box[i] > 256)
            return REFUSE("box %d is %d; it must be 1 to 256", i, t->box[i]);
    if (row % 16)
        return REFUSE("box has rows of %d bytes; they must be a multiple of 16", row);
    if (number_of(t->swizzle_bytes, 32) < 0)
        return REFUSE("swizzle is %d bytes; it must be 0, 32, 64 or 128", t->swizzle_bytes);
    if (t->swizzle_bytes && row > t->swizzle_bytes)
        return REFUSE("box has rows of %d bytes; with this swizzle they have at most %d", row, t->swizzle_bytes);
    if (number_of(t->l2_bytes, 64) < 0)
        return REFUSE("L2 promotion is %d bytes; it must be 0, 64, 128 or 256", t->l2_bytes);
    return FDM_OK;
}

/* Bytes from one index of axis i to the next. No load takes the step of an axis of extent 1, and callers say 0; a
 * driver that refuses that is told what a contiguous tensor would have. */
static unsigned long long stride_of(const struct cuda_tensor_layout *t, int32_t i) {
    const int64_t limit = 1ll << 40, extent = t->extents[i - 1];
    const int64_t before = i > 1 ? t->stride_bytes[i - 1] : types[t->type].bytes;
    if (t->stride_bytes[i] > 0 || t->extents[i] > 1)
        return (unsigned long long)t->stride_bytes[i];
    if (before < 1 || before > (limit - 16) / extent)
        return 16;
    return (unsigned long long)(extent * before + 15) / 16 * 16;
}

static cu_result encode(const struct cuda_driver *driver, const struct cuda_tensor_layout *t,
                        struct cuda_tensor_map *map) {
    enum { NOT_INTERLEAVED = 0, OUTSIDE_IS_ZERO = 0 };
    unsigned long long extents[CUDA_MAP_RANK_MAX], strides[CUDA_MAP_RANK_MAX];
    unsigned box[CUDA_MAP_RANK_MAX], steps[CUDA_MAP_RANK_MAX];
    for (int32_t i = 0; i < t->rank; i++) {
        extents[i] = (unsigned long long)t->extents[i];
        box[i] = (unsigned)t->box[i];
        steps[i] = 1;
        if (i > 0)
            strides[i - 1] = stride_of(t, i);
    }
    return driver->tensor_map_encode(map, types[t->type].number, (unsigned)t->rank, (void *)(uintptr_t)t->address,
                                     extents, strides, box, steps, NOT_INTERLEAVED, number_of(t->swizzle_bytes, 32),
                                     number_of(t->l2_bytes, 64), OUTSIDE_IS_ZERO);
}

fdm_status cuda_tensor_maps_make(int32_t device, const struct cuda_tensor_layout *layouts, int32_t count,
                                 struct cuda_tensor_map *maps) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    fdm_status status = FDM_OK;
    for (int32_t i = 0; i < count; i++)
        if ((status = check_tensor(&layouts[i])) || (status = check_tile(&layouts[i])))
            return status;
    if ((status = cuda_driver_get(&driver)) || (status = cuda_context_enter_relaxed(driver, device, &scope)))
        return status;
    cu_result result = 0;
    for (int32_t i = 0; i < count && !result; i++)
        result = encode(driver, &layouts[i], &maps[i]);
    cuda_context_leave(driver, &scope);
    return result ? cuda_driver_error(driver, result, "making a tensor map") : FDM_OK;
}
