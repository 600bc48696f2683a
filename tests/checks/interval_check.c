/* interval_check.c: builders of key intervals other than top-W on a CUDA device, or on the emulated one, against the
 * CPU, bit for bit: windows, prefixes, documents, rules that hold at once, and dense masks with strides, broadcast axes
 * and holes. Nothing is written beside the intervals. Rules are compared with their definition row by row too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_check.h"
#include "flash_dmattn.h"
#include "subjects.h"

enum { KEYS_MAX = 700, ROWS_MAX = 300, HEADS_MAX = 2, ROOM = 4 };

/* start and end, on the host and on the device, for two heads and batches and their strides. */
enum { ELEMENTS = HEADS_MAX * HEADS_MAX * (KEYS_MAX + ROOM) * 2 };
struct pair {
    int32_t here[2][ELEMENTS], back[2][ELEMENTS];
    int32_t *there[2];
    int64_t shape[3], strides[3];
    fdm_tensor tensor[2];
};
static struct pair pair;

static void make_pair(int64_t batch, int64_t heads, int64_t keys) {
    const int64_t step = 1 + below(2), room = below(ROOM);
    const int64_t shape[3] = {batch, heads, keys},
                  strides[3] = {heads * (keys + room) * step, (keys + room) * step, step};
    memcpy(pair.shape, shape, sizeof shape);
    memcpy(pair.strides, strides, sizeof strides);
    memset(pair.here, 0xa5, sizeof pair.here);
    for (int i = 0; i < 2; i++) {
        if (fdm_memory_copy(pair.there[i], cuda, pair.here[i], host, sizeof pair.here[i]))
            fail("copying");
        pair.tensor[i] = (fdm_tensor){.device = host,
                                      .ndim = 3,
                                      .dtype = fdm_data_type_of(FDM_INT32),
                                      .shape = pair.shape,
                                      .strides = pair.strides};
    }
}

static void place(fdm_device_id device) {
    for (int i = 0; i < 2; i++) {
        pair.tensor[i].device = device;
        pair.tensor[i].data = device.type == FDM_CUDA ? pair.there[i] : pair.here[i];
    }
}

/* The device has run; the CPU has too. */
static int is_right(void) {
    for (int i = 0; i < 2; i++)
        if (fdm_memory_copy(pair.back[i], host, pair.there[i], cuda, sizeof pair.back[i]))
            fail("copying back");
    return memcmp(pair.here, pair.back, sizeof pair.here) == 0;
}

static int64_t side(int64_t keys) {
    static const int64_t sides[] = {-1, 0, INT64_MAX, 1};
    return below(2) ? sides[below(4)] : below(keys + 9);
}

static int window_or_prefix(void) {
    const int64_t keys = below(KEYS_MAX), rows = below(3) ? keys : below(2 * KEYS_MAX), left = side(keys),
                  right = side(keys), prefix = below(2 * keys + 2);
    const int causal = (int)below(2), is_window = below(3) != 0;
    make_pair(1 + below(HEADS_MAX), 1 + below(HEADS_MAX), keys);
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        if (is_window ? fdm_window_intervals(rows, causal, left, right, &pair.tensor[0], &pair.tensor[1], NULL)
                      : fdm_prefix_intervals(rows, prefix, &pair.tensor[0], &pair.tensor[1], NULL))
            fail("window or prefix");
    }
    return is_right();
}

static int documents(int32_t *there) {
    int32_t offsets[20] = {0};
    int64_t count = 1 + below(20), stride = 1;
    for (int64_t n = 1; n < count; n++)
        offsets[n] = offsets[n - 1] + (int32_t)below(2 * KEYS_MAX / 40);
    const int64_t keys = offsets[count - 1];
    const int causal = (int)below(2);
    fdm_tensor cu = {
        .device = cuda, .ndim = 1, .dtype = fdm_data_type_of(FDM_INT32), .shape = &count, .strides = &stride};
    make_pair(1, 1 + below(HEADS_MAX), keys);
    if (fdm_memory_copy(there, cuda, offsets, host, sizeof offsets))
        fail("copying");
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        cu.device = n ? host : cuda;
        cu.data = n ? offsets : there;
        if (fdm_document_intervals(&cu, causal, &pair.tensor[0], &pair.tensor[1], NULL))
            fail("documents");
    }
    return is_right();
}

/* Runs, and sometimes a key with two of them. */
static void draw_mask(uint8_t *mask, int64_t columns, int64_t rows, int64_t keys, int64_t row_stride) {
    memset(mask, 0, (size_t)(columns * rows * row_stride));
    const int holes = below(3) == 0;
    for (int64_t c = 0; c < columns; c++)
        for (int64_t j = 0; j < keys; j++) {
            const int64_t first = below(rows + 1), last = below(4) ? first + below(rows + 1 - first) : rows;
            for (int64_t i = first; i < last; i++)
                mask[(c * rows + i) * row_stride + j] = (uint8_t)(1 + below(255));
            if (holes && rows > 0 && below(keys) == 0)
                mask[(c * rows + below(rows)) * row_stride + j] ^= 1;
        }
}

static int dense_mask(int32_t *exact_there, uint8_t *there) {
    static uint8_t mask[HEADS_MAX * ROWS_MAX * (KEYS_MAX + ROOM)];
    const int64_t heads = 1 + below(HEADS_MAX), rows = below(ROWS_MAX), keys = 1 + below(below(2) ? 40 : KEYS_MAX);
    const int64_t row_stride = keys + below(ROOM);
    int64_t shape[4] = {1 + below(2), heads, rows, keys}, strides[4] = {0, rows * row_stride, row_stride, 1};
    int32_t exact_here = 7, exact_back = 7;
    fdm_tensor t = {.ndim = 4, .dtype = fdm_data_type_of(FDM_BOOL), .shape = shape, .strides = strides};
    draw_mask(mask, heads, rows, keys, row_stride);
    make_pair(shape[0], heads, keys);
    if (fdm_memory_copy(there, cuda, mask, host, sizeof mask))
        fail("copying");
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        t.device = n ? host : cuda;
        t.data = n ? mask : there;
        if (fdm_intervals_from_mask(&t, &pair.tensor[0], &pair.tensor[1], n ? &exact_here : exact_there, NULL))
            fail("dense mask");
    }
    if (fdm_memory_copy(&exact_back, host, exact_there, cuda, sizeof exact_back))
        fail("copying back");
    return (exact_back != 0) == (exact_here != 0) && (!exact_here || is_right());
}

/* ---- rules that hold at once ---- */

enum { SEQUENCES_MAX = 3, RULE_NUMBERS = 2 * SEQUENCES_MAX * KEYS_MAX };
enum { IDS, PREFIXES, WINDOWS, GIVEN_START, GIVEN_END, CU_Q, CU_K, NUM_RULES };
struct rule {
    int32_t here[RULE_NUMBERS];
    int64_t shape[3], strides[3];
    fdm_tensor tensor;
    int32_t of_heads; /* that axis; -1: there is none */
    int is_given;
};
static struct rule rule[NUM_RULES];

/* Axes of extent 1 or of the extents; the last one has its own. That of heads may have half of them. */
static void shape_rule(int which, int32_t ndim, const int64_t *extents, int32_t of_heads) {
    struct rule *r = &rule[which];
    int64_t count = 1 + below(2);
    for (int32_t axis = ndim - 1; axis >= 0; axis--) {
        r->shape[axis] = axis < ndim - 1 && below(3) == 0 ? 1 : extents[axis];
        if (axis == of_heads && r->shape[axis] % 2 == 0 && below(2))
            r->shape[axis] /= 2;
        r->strides[axis] = count;
        count *= r->shape[axis];
    }
    r->is_given = 1;
    r->of_heads = of_heads;
    r->tensor =
        (fdm_tensor){.ndim = ndim, .dtype = fdm_data_type_of(FDM_INT32), .shape = r->shape, .strides = r->strides};
}

/* `heads`: those of the intervals that are written. */
static int32_t *at_rule(int64_t heads, int which, int64_t first, int64_t second, int64_t third) {
    struct rule *r = &rule[which];
    int64_t place[3] = {first, second, third}, offset = 0;
    if (r->is_given && r->of_heads >= 0)
        place[r->of_heads] /= heads / r->shape[r->of_heads];
    for (int32_t axis = 0; axis < r->tensor.ndim; axis++)
        offset += r->shape[axis] == 1 ? 0 : place[axis] * r->strides[axis];
    return r->here + offset;
}

struct layout {
    int64_t batch, heads, keys, rows; /* rows: of dense sequences */
    int packed, of_documents;
};

static void draw_offsets(struct layout *l) {
    int64_t extent = l->batch + 1;
    for (int which = CU_Q; which <= CU_K; which++) {
        shape_rule(which, 1, &extent, -1);
        rule[which].strides[0] = 1;
        int32_t at = (int32_t)below(3);
        for (int64_t b = 0; b <= l->batch; b++, at += (int32_t)below(KEYS_MAX / (SEQUENCES_MAX + 1)))
            rule[which].here[b] = at;
    }
    l->keys = rule[CU_K].here[l->batch] + below(3);
}

static void draw_ids(const struct layout *l) {
    const int64_t extents[2] = {l->batch, l->keys};
    shape_rule(IDS, 2, extents, -1);
    for (int64_t b = 0; b < rule[IDS].shape[0]; b++) {
        int32_t id = (int32_t)below(5) - 2;
        for (int64_t j = 0; j < l->keys; j++, id += below(12) == 0)
            *at_rule(l->heads, IDS, b, j, 0) = id;
    }
}

static void draw_rules(struct layout *l) {
    const int64_t windows[2] = {l->heads, 2}, given[3] = {l->batch, l->heads, l->keys};
    if (l->of_documents)
        draw_ids(l);
    if (below(2)) {
        shape_rule(PREFIXES, 1, &l->batch, -1);
        for (int64_t b = 0; b < l->batch; b++)
            *at_rule(l->heads, PREFIXES, b, 0, 0) = (int32_t)below(l->keys + 20) - 10;
    }
    if (below(2)) {
        shape_rule(WINDOWS, 2, windows, 0);
        for (int64_t n = 0; n < 2 * l->heads; n++)
            *at_rule(l->heads, WINDOWS, n / 2, n % 2, 0) = below(5) ? (int32_t)below(l->keys + 9) - 1 : INT32_MAX;
    }
    for (int which = GIVEN_START; which <= GIVEN_END && (which > GIVEN_START ? rule[GIVEN_START].is_given : below(2));
         which++) {
        shape_rule(which, 3 - l->packed, given + l->packed, 1 - l->packed);
        for (int64_t n = 0; n < RULE_NUMBERS; n++)
            rule[which].here[n] = below(9) ? (int32_t)below(l->rows + 1) : which == GIVEN_START ? INT32_MIN : INT32_MAX;
    }
}

/* The definition: whether row i of sequence b sees its key j, which lies at `at`. */
static int sees(const struct layout *l, int64_t b, int64_t h, int64_t i, int64_t j, int64_t at, int64_t shift) {
    const int64_t place = i + shift;
    const int32_t *window = at_rule(l->heads, WINDOWS, h, 0, 0);
    int seen = !rule[IDS].is_given || *at_rule(l->heads, IDS, b, i, 0) == *at_rule(l->heads, IDS, b, j, 0);
    seen &= !rule[PREFIXES].is_given || j < *at_rule(l->heads, PREFIXES, b, 0, 0) || j <= place;
    if (rule[WINDOWS].is_given)
        seen &= (window[0] < 0 || j >= place - window[0]) &&
                (*at_rule(l->heads, WINDOWS, h, 1, 0) < 0 || j <= place + *at_rule(l->heads, WINDOWS, h, 1, 0));
    if (rule[GIVEN_START].is_given)
        seen &= l->packed
                    ? *at_rule(l->heads, GIVEN_START, h, at, 0) <= i && i < *at_rule(l->heads, GIVEN_END, h, at, 0)
                    : *at_rule(l->heads, GIVEN_START, b, h, at) <= i && i < *at_rule(l->heads, GIVEN_END, b, h, at);
    return seen;
}

static int shows(int64_t place, int64_t i) { return pair.here[0][place] <= i && i < pair.here[1][place]; }

static int is_as_defined(const struct layout *l) {
    for (int64_t b = 0; b < l->batch; b++)
        for (int64_t h = 0; h < l->heads; h++) {
            const int32_t *q = rule[CU_Q].here + b, *k = rule[CU_K].here + b;
            const int64_t begin = l->packed ? k[0] : 0, keys = l->packed ? k[1] - k[0] : l->keys,
                          rows = l->packed ? q[1] - q[0] : l->rows;
            for (int64_t j = 0; j < keys; j++)
                for (int64_t i = 0; i < rows; i += 1 + below(4)) {
                    const int64_t at = begin + j, place = (l->packed ? 0 : b * pair.strides[0]) + h * pair.strides[1] +
                                                          at * pair.strides[2];
                    if (shows(place, i) != sees(l, b, h, i, j, at, keys - rows))
                        return 0;
                }
        }
    return 1;
}

static int rules(int32_t *there) {
    struct layout l = {1 + below(HEADS_MAX), 1 + below(HEADS_MAX), below(KEYS_MAX / 2),
                       below(ROWS_MAX),      below(3) == 0,        0};
    memset(rule, 0, sizeof rule);
    if (l.packed)
        draw_offsets(&l);
    l.of_documents = !l.packed && below(2);
    l.rows = l.of_documents ? l.keys : l.rows;
    draw_rules(&l);
    make_pair(l.packed ? 1 : l.batch, l.heads, l.keys);
    fdm_tensor outputs[2];
    for (int which = 0; which < NUM_RULES; which++)
        if (fdm_memory_copy(there + which * RULE_NUMBERS, cuda, rule[which].here, host, sizeof rule[which].here))
            fail("copying");
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        for (int i = 0; i < 2; i++) {
            outputs[i] = pair.tensor[i];
            outputs[i].ndim -= l.packed;
            outputs[i].shape += l.packed;
            outputs[i].strides += l.packed;
        }
        const fdm_tensor *all[NUM_RULES];
        for (int which = 0; which < NUM_RULES; which++) {
            rule[which].tensor.device = n ? host : cuda;
            rule[which].tensor.data = n ? rule[which].here : there + which * RULE_NUMBERS;
            all[which] = rule[which].is_given ? &rule[which].tensor : NULL;
        }
        const fdm_key_rules given = {.struct_bytes = sizeof given,
                                     .document_ids = all[IDS],
                                     .prefix_lengths = all[PREFIXES],
                                     .window_sizes = all[WINDOWS],
                                     .interval_start = all[GIVEN_START],
                                     .interval_end = all[GIVEN_END],
                                     .cu_seqlens_q = all[CU_Q],
                                     .cu_seqlens_k = all[CU_K]};
        if (fdm_rule_intervals(&given, l.rows, &outputs[0], &outputs[1], NULL))
            fail("rules");
    }
    return is_right() && is_as_defined(&l);
}

static void *mask, *numbers, *rule_numbers; /* on the device */

static const char *check(const struct options *o, char *about, size_t bytes) {
    static const char *const names[] = {"window or prefix", "documents", "dense mask", "rules"};
    const int64_t kind = below(4);
    snprintf(about, bytes, "%s", names[kind]);
    const int right = kind == 0   ? window_or_prefix()
                      : kind == 1 ? documents(numbers)
                      : kind == 2 ? dense_mask(numbers, mask)
                                  : rules(rule_numbers);
    return right ? NULL : "other intervals than the CPU's, or than those of the definition";
}

int interval_checks(const struct options *o) {
    if (!has_device())
        return EXIT_NO_DEVICE;
    if (fdm_memory_allocate(cuda, sizeof pair.here[0], (void **)&pair.there[0]) ||
        fdm_memory_allocate(cuda, sizeof pair.here[1], (void **)&pair.there[1]) ||
        fdm_memory_allocate(cuda, HEADS_MAX * ROWS_MAX * (KEYS_MAX + ROOM), &mask) ||
        fdm_memory_allocate(cuda, 100, &numbers) ||
        fdm_memory_allocate(cuda, NUM_RULES * sizeof rule[0].here, &rule_numbers))
        fail("allocating");
    const int code = run_cases(o, 400, check);
    fdm_memory_release(cuda, pair.there[0]);
    fdm_memory_release(cuda, pair.there[1]);
    fdm_memory_release(cuda, mask);
    fdm_memory_release(cuda, numbers);
    fdm_memory_release(cuda, rule_numbers);
    return code;
}
