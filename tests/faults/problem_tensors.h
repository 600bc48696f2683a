/* problem_tensors.h: tensors of any problem, zeros in memory that only takes room where it is touched, for tests of
 * plans; and every field of fdm_problem. */
#ifndef FDM_PROBLEM_TENSORS_H
#define FDM_PROBLEM_TENSORS_H

#include <stddef.h>

#include "flash_dmattn.h"

enum { PROBLEM_TENSORS_MAX = 22 };

struct problem_tensors {
    fdm_tensor list[PROBLEM_TENSORS_MAX];
    int64_t shapes[PROBLEM_TENSORS_MAX][4], strides[PROBLEM_TENSORS_MAX][4];
    int32_t count;
    char *memory; /* where the next tensor lies */
    fdm_tensors all;
    fdm_options options;
};

/* Contiguous, each at a multiple of 256 bytes, or an element after it where the problem is not `aligned`. Packed
 * sequences are as long as there are rows left. Tensors of one problem lie where those of another lay: memory may hold
 * what a kernel has written there. */
void problem_tensors_make(struct problem_tensors *tensors, const fdm_problem *problem, fdm_device_id device);

/* What becomes of a plan that says something else than the tensors. */
enum field_rule {
    FIELD_OF_TENSORS, /* refused */
    FIELD_OF_PLAN,    /* the plan says it, and tensors do not */
    FIELD_OF_LENGTHS, /* dense: as FIELD_OF_TENSORS; packed: a bound, which the plan says */
    FIELD_FACT        /* of where tensors lie: they may lie better, not worse */
};
struct problem_field {
    const char *name;
    size_t offset, bytes;
    enum field_rule rule;
};
/* Every member of fdm_problem in its order, each once. */
extern const struct problem_field problem_fields[];
extern const int32_t num_problem_fields;
/* Another value than the one that is there: an integer one more or one less, of flags the other. Of arrays the
 * element-th. How many elements there are is bytes / 8, or 1 where they are fewer. */
void problem_field_change(const struct problem_field *field, int32_t element, fdm_problem *problem);
int32_t problem_field_elements(const struct problem_field *field);

#endif
