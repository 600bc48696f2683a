/* test_overlap.c: which tensors have a byte in common: layouts of real calls, and random ones against a map of bytes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "problem/tensor.h"

enum { AXES = 6, BYTES = 1 << 18 };
static char memory[BYTES];

/* A tensor with room for its own shape and strides. */
struct layout {
    int64_t shape[AXES], strides[AXES];
    fdm_tensor tensor;
};

/* At an element of `memory`; strides NULL: contiguous. */
static fdm_tensor *lay(struct layout *l, fdm_dtype dtype, int64_t first, int32_t ndim, const int64_t *shape,
                       const int64_t *strides) {
    memcpy(l->shape, shape, (size_t)ndim * sizeof *shape);
    if (strides)
        memcpy(l->strides, strides, (size_t)ndim * sizeof *strides);
    l->tensor = (fdm_tensor){.data = memory,
                             .device = {FDM_CPU, 0},
                             .ndim = ndim,
                             .dtype = fdm_data_type_of(dtype),
                             .shape = l->shape,
                             .strides = strides ? l->strides : NULL,
                             .byte_offset = (uint64_t)(first * fdm_dtype_bytes(dtype))};
    return &l->tensor;
}

/* Either way round. */
static void assert_overlap(const fdm_tensor *a, const fdm_tensor *b, int expected) {
    assert_int_equal(tensors_overlap(a, b), expected);
    assert_int_equal(tensors_overlap(b, a), expected);
}

static void spans(void **state) {
    (void)state;
    struct layout a, b;
    const int64_t shape[4] = {2, 3, 4, 5}, elements = 2 * 3 * 4 * 5;
    const fdm_tensor *t = lay(&a, FDM_FLOAT32, 10, 4, shape, NULL);
    assert_overlap(t, lay(&b, FDM_FLOAT32, 10, 4, shape, NULL), 1);
    assert_overlap(t, lay(&b, FDM_FLOAT32, 11, 4, shape, NULL), 1);            /* an element further */
    assert_overlap(t, lay(&b, FDM_FLOAT32, 15, 4, shape, NULL), 1);            /* a row further */
    assert_overlap(t, lay(&b, FDM_FLOAT32, 9 + elements, 4, shape, NULL), 1);  /* the last element */
    assert_overlap(t, lay(&b, FDM_FLOAT32, 10 + elements, 4, shape, NULL), 0); /* behind it */
    assert_overlap(t, lay(&b, FDM_FLOAT32, 500, 4, shape, NULL), 0);
    /* Other dtypes over the same bytes: element n of 4 bytes is elements 2n and 2n + 1 of 2. */
    const int64_t one[1] = {1};
    assert_overlap(t, lay(&b, FDM_BFLOAT16, 19, 1, one, NULL), 0);
    assert_overlap(t, lay(&b, FDM_BFLOAT16, 20, 1, one, NULL), 1);
    assert_overlap(t, lay(&b, FDM_BFLOAT16, 21, 1, one, NULL), 1);
    assert_overlap(t, lay(&b, FDM_FLOAT64, 4, 1, one, NULL), 0);
    assert_overlap(t, lay(&b, FDM_FLOAT64, 5, 1, one, NULL), 1);
    assert_overlap(t, lay(&b, FDM_BOOL, 39, 1, one, NULL), 0);
    assert_overlap(t, lay(&b, FDM_BOOL, 43, 1, one, NULL), 1);
}

/* Nothing is in an empty tensor, whatever its address and strides. */
static void empty(void **state) {
    (void)state;
    struct layout a, b;
    const int64_t some[3] = {4, 5, 6}, none[3] = {4, 0, 6}, far[3] = {INT64_MAX, INT64_MAX / 3, INT64_MAX / 5};
    const fdm_tensor *t = lay(&a, FDM_FLOAT16, 0, 3, some, NULL);
    assert_overlap(t, lay(&b, FDM_FLOAT16, 0, 3, none, NULL), 0);
    assert_overlap(t, lay(&b, FDM_FLOAT16, 0, 3, none, far), 0);
    b.shape[0] = 0, b.shape[1] = 5;
    assert_overlap(t, &b.tensor, 0);
    assert_overlap(&b.tensor, &b.tensor, 0);
    b.tensor.data = NULL;
    assert_overlap(t, &b.tensor, 0);
}

/* Strides of axes of extent 1 lead nowhere, those of 0 nowhere else. */
static void odd_strides(void **state) {
    (void)state;
    struct layout a, b;
    const int64_t one[3] = {1, 4, 1}, strange[3] = {7, 2, 1000000}, shared[3] = {9, 4, 9}, nought[3] = {0, 2, 0};
    const fdm_tensor *t = lay(&a, FDM_FLOAT32, 0, 3, one, strange); /* elements 0, 2, 4, 6 */
    assert_overlap(t, lay(&b, FDM_FLOAT32, 1, 3, one, strange), 0); /* 1, 3, 5, 7 */
    assert_overlap(t, lay(&b, FDM_FLOAT32, 2, 3, one, strange), 1);
    assert_overlap(t, lay(&b, FDM_FLOAT32, 0, 3, shared, nought), 1);
    assert_overlap(t, lay(&b, FDM_FLOAT32, 1, 3, shared, nought), 0);
    assert_overlap(t, lay(&b, FDM_FLOAT32, 6, 3, shared, nought), 1);
    assert_overlap(t, lay(&b, FDM_FLOAT32, 8, 3, shared, nought), 0);
}

enum { B = 2, S = 3, H = 2, D = 4, KINDS = 5, APART = 2 };

/* Part `which` of a tensor qkv, [B, S, H, D]: of [B, S, 3, H, D], [B, S, H, 3, D], [3, B, S, H, D], [B, 3, H, S, D], or
 * of three heads a group, [B, S, 3 H, D]. */
static fdm_tensor *part_of(struct layout *l, int kind, int which) {
    static const int64_t shape[4] = {B, S, H, D};
    static const int64_t strides[KINDS][4] = {{S * 3 * H * D, 3 * H * D, D, 1},
                                              {S * H * 3 * D, H * 3 * D, 3 * D, 1},
                                              {S * H * D, H * D, D, 1},
                                              {3 * H * S * D, D, S * D, 1},
                                              {S * 3 * H * D, 3 * H * D, 3 * D, 1}};
    static const int64_t steps[KINDS] = {H * D, D, B * S * H * D, H * S * D, D};
    return lay(l, FDM_BFLOAT16, 32 + which * steps[kind], 4, shape, strides[kind]);
}

static void interleaved_parts(void **state) {
    (void)state;
    struct layout parts[3], moved, whole;
    const int64_t all[1] = {3 * B * S * H * D};
    for (int kind = 0; kind < KINDS; kind++) {
        for (int i = 0; i < 3; i++)
            part_of(&parts[i], kind, i);
        for (int i = 0; i < 3; i++) {
            for (int j = 0; j < 3; j++)
                assert_overlap(&parts[i].tensor, &parts[j].tensor, i == j);
            assert_overlap(&parts[i].tensor, lay(&whole, FDM_BFLOAT16, 32, 1, all, NULL), 1);
            /* An element too far: into the part behind, and still in this one; rows an element longer: the same. */
            for (int longer = 0; longer < 2; longer++) {
                part_of(&moved, kind, i);
                moved.shape[3] += longer;
                moved.tensor.byte_offset += longer ? 0 : 2;
                assert_overlap(&parts[i].tensor, &moved.tensor, 1);
                assert_overlap(&parts[(i + 1) % 3].tensor, &moved.tensor, i < 2 || kind != APART);
                assert_overlap(&parts[(i + 2) % 3].tensor, &moved.tensor, 0);
            }
        }
    }
}

/* Half of the heads and of the rows, and lse between rows of out. */
static void parts_of_parts(void **state) {
    (void)state;
    struct layout a, b;
    const int64_t half[4] = {B, S, H / 2, D}, rows[4] = {B, S, H, D}, strides[4] = {S * H * D, H * D, D, 1};
    const fdm_tensor *t = lay(&a, FDM_FLOAT32, 0, 4, half, strides);
    assert_overlap(t, lay(&b, FDM_FLOAT32, D, 4, half, strides), 0);
    assert_overlap(t, lay(&b, FDM_FLOAT32, 0, 4, rows, strides), 1);
    const int64_t even[4] = {1, 2, H, D}, every_second[4] = {0, 2 * H * D, D, 1};
    t = lay(&a, FDM_FLOAT32, 0, 4, even, every_second);
    assert_overlap(t, lay(&b, FDM_FLOAT32, H * D, 4, even, every_second), 0);
    assert_overlap(t, lay(&b, FDM_FLOAT32, 2 * H * D, 4, even, every_second), 1);
    /* Rows of D elements of 2 bytes, and behind each its lse in 4: a row is D + 2 such elements, or half as many. */
    const int64_t apart[4] = {S * H * (D + 2), H * (D + 2), D + 2, 1}, lse[3] = {B, H, S},
                  lse_strides[3] = {S * H * (D + 2) / 2, (D + 2) / 2, H * (D + 2) / 2};
    t = lay(&a, FDM_FLOAT16, 0, 4, rows, apart);
    assert_overlap(t, lay(&b, FDM_FLOAT32, D / 2, 3, lse, lse_strides), 0);
    assert_overlap(t, lay(&b, FDM_FLOAT32, D / 2 - 1, 3, lse, lse_strides), 1);
    assert_overlap(t, lay(&b, FDM_FLOAT32, D / 2 + 1, 3, lse, lse_strides), 1);
}

/* Even and odd bytes whose strides fit into no order: every look is in vain, and there is no end of them. */
static void gives_up(void **state) {
    (void)state;
    struct layout a, b;
    const int64_t shape[4] = {9, 9, 9, 9}, even[4] = {202, 146, 118, 86}, other[4] = {194, 158, 122, 94};
    assert_overlap(lay(&a, FDM_BOOL, 0, 4, shape, even), lay(&b, FDM_BOOL, 1, 4, shape, other), 0);
    assert_overlap(lay(&a, FDM_BOOL, 0, 4, shape, even), lay(&b, FDM_BOOL, 0, 4, shape, other), 1);
}

static void same(void **state) {
    (void)state;
    struct layout a, b;
    const int64_t shape[3] = {2, 3, 4}, other[3] = {2, 4, 3}, strides[3] = {12, 4, 1}, turned[3] = {12, 1, 3};
    const fdm_tensor *t = lay(&a, FDM_FLOAT32, 3, 3, shape, NULL);
    assert_true(tensors_same(t, lay(&b, FDM_FLOAT32, 3, 3, shape, strides)));
    assert_false(tensors_same(t, lay(&b, FDM_FLOAT32, 4, 3, shape, NULL)));
    assert_false(tensors_same(t, lay(&b, FDM_FLOAT32, 3, 3, other, NULL)));
    assert_false(tensors_same(t, lay(&b, FDM_FLOAT32, 3, 3, shape, turned)));
    assert_false(tensors_same(t, lay(&b, FDM_FLOAT32, 3, 2, shape, NULL)));
    assert_false(tensors_same(lay(&a, FDM_FLOAT16, 0, 3, shape, NULL), lay(&b, FDM_FLOAT32, 0, 3, shape, NULL)));
    const int64_t one[3] = {1, 3, 4}, strange[3] = {99, 4, 1};
    assert_true(tensors_same(lay(&a, FDM_FLOAT16, 0, 3, one, NULL), lay(&b, FDM_FLOAT16, 0, 3, one, strange)));
    assert_true(tensors_same(&a.tensor, lay(&b, FDM_FLOAT16, 0, 2, one + 1, strange + 1)));
    assert_true(tensors_same(&b.tensor, &a.tensor));
    assert_false(tensors_same(&a.tensor, lay(&b, FDM_FLOAT16, 0, 1, one + 1, strange + 1)));
    assert_false(tensors_same(&b.tensor, &a.tensor));
}

static void check_apart(void **state) {
    (void)state;
    struct layout l[4];
    const int64_t shape[2] = {4, 8};
    for (int i = 0; i < 4; i++)
        lay(&l[i], FDM_FLOAT32, 32 * i, 2, shape, NULL);
    struct named_tensor all[5] = {{"x", &l[0].tensor, 0, 0},
                                  {"y", &l[1].tensor, 0, 0},
                                  {"none", NULL, 1, 0},
                                  {"out", &l[2].tensor, 1, 1u << 0},
                                  {"sum", &l[3].tensor, 1, 0}};
    assert_int_equal(tensors_check_apart(all, 5), FDM_OK);
    all[1].tensor = all[0].tensor; /* what is read may be what it likes */
    assert_int_equal(tensors_check_apart(all, 5), FDM_OK);
    all[3].tensor = all[0].tensor; /* also y now */
    assert_int_equal(tensors_check_apart(all, 5), FDM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(fdm_last_error(),
                        "out overlaps y in memory; it is written, and must lie apart from every other tensor");
    all[1].tensor = &l[1].tensor;
    assert_int_equal(tensors_check_apart(all, 5), FDM_OK);
    l[2].tensor.byte_offset = l[0].tensor.byte_offset + 4;
    all[3].tensor = &l[2].tensor;
    assert_int_equal(tensors_check_apart(all, 5), FDM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(fdm_last_error(),
                        "out overlaps x in memory; it is written, and must lie apart from every other "
                        "tensor, or be exactly x");
    all[3].tensor = all[4].tensor;
    assert_int_equal(tensors_check_apart(all, 5), FDM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(fdm_last_error(),
                        "out overlaps sum in memory; it is written, and must lie apart from every other tensor");
    all[3].written = all[4].written = 0;
    assert_int_equal(tensors_check_apart(all, 5), FDM_OK);
}

/* ---- random layouts ---- */

static uint64_t state_of_random = 1;
static int64_t random_below(int64_t n) {
    state_of_random = state_of_random * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state_of_random >> 33) % (uint64_t)n);
}

/* Nested strides in any order with gaps between, or any strides; now and then a stride of 0. */
static fdm_tensor *random_layout(struct layout *l) {
    static const fdm_dtype dtypes[] = {FDM_BOOL, FDM_FLOAT16, FDM_FLOAT32, FDM_FLOAT64};
    const int32_t ndim = (int32_t)random_below(5);
    const int nested = random_below(3) > 0;
    int64_t shape[AXES] = {0}, strides[AXES] = {0}, reach = 1;
    for (int32_t axis = 0; axis < ndim; axis++)
        shape[axis] = random_below(20) ? 1 + random_below(4) : 0;
    for (int32_t axis = ndim - 1; axis >= 0; axis--) {
        strides[axis] = nested ? reach * (1 + random_below(3)) + random_below(3) : random_below(24);
        strides[axis] = random_below(8) ? strides[axis] : 0;
        reach = nested && strides[axis] ? strides[axis] * shape[axis] : reach;
    }
    if (ndim > 1 && random_below(2)) {
        const int64_t extent = shape[0], stride = strides[0];
        shape[0] = shape[ndim - 1], strides[0] = strides[ndim - 1];
        shape[ndim - 1] = extent, strides[ndim - 1] = stride;
    }
    return lay(l, dtypes[random_below(4)], random_below(64), ndim, shape, random_below(4) ? strides : NULL);
}

static char used[BYTES];

/* Sets `used` at each byte of a tensor to `value`; -1: nothing. Returns whether one was set before. */
static int mark(const fdm_tensor *t, int value) {
    const int64_t bytes = fdm_dtype_bytes(fdm_dtype_of(t));
    int64_t count = 1;
    int was = 0;
    for (int32_t axis = 0; axis < t->ndim; axis++)
        count *= t->shape[axis];
    for (int64_t n = 0; n < count; n++) {
        int64_t rest = n, place = tensor_data(t) - memory;
        for (int32_t axis = t->ndim - 1; axis >= 0; axis--) {
            place += rest % t->shape[axis] * tensor_stride(t, axis) * bytes;
            rest /= t->shape[axis];
        }
        assert_in_range(place, 0, BYTES - bytes);
        for (int64_t byte = place; byte < place + bytes; byte++) {
            was |= used[byte];
            used[byte] = (char)(value < 0 ? used[byte] : value);
        }
    }
    return was;
}

static void random_layouts(void **state) {
    (void)state;
    int64_t overlaps = 0, between = 0;
    for (int n = 0; n < 300000; n++) {
        struct layout l[2];
        const fdm_tensor *a = random_layout(&l[0]), *b = random_layout(&l[1]);
        mark(a, 1);
        const int expected = mark(b, -1);
        mark(a, 0);
        if (tensors_overlap(a, b) != expected || tensors_overlap(b, a) != expected) {
            char shapes[2][96], strides[2][96];
            for (int i = 0; i < 2; i++) {
                tensor_shape_text(shapes[i], sizeof shapes[i], l[i].shape, l[i].tensor.ndim);
                tensor_shape_text(strides[i], sizeof strides[i], l[i].strides, l[i].tensor.ndim);
            }
            fail_msg("pair %d: %s at byte %d, %s, strides %s, and %s at byte %d, %s, strides %s: overlap %d", n,
                     fdm_dtype_name(fdm_dtype_of(a)), (int)a->byte_offset, shapes[0], a->strides ? strides[0] : "none",
                     fdm_dtype_name(fdm_dtype_of(b)), (int)b->byte_offset, shapes[1], b->strides ? strides[1] : "none",
                     expected);
        }
        overlaps += expected;
        between += !expected && a->byte_offset < b->byte_offset + 64 && b->byte_offset < a->byte_offset + 64;
    }
    assert_true(overlaps > 30000 && between > 30000); /* both answers were asked for */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spans),          cmocka_unit_test(empty),
        cmocka_unit_test(odd_strides),    cmocka_unit_test(interleaved_parts),
        cmocka_unit_test(parts_of_parts), cmocka_unit_test(gives_up),
        cmocka_unit_test(same),           cmocka_unit_test(check_apart),
        cmocka_unit_test(random_layouts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
