/* named_forms.c: listed problems with one thing each that no drawing misses, in few keys and rows. The faults of
 * broken_texts.c need them; drawn problems have such things now and then. */
#include "named_cases.h"

int named_sees(enum named_form hides, int64_t row, int64_t key) {
    switch (hides) {
    case HIDES_SQUARES: return (row / 64 + key / 64) % 2 == 0;
    case HIDES_KEYS: return key % 8 != 3;
    case HIDES_FROM_ONE_ROW: return row > 0;
    case HIDES_ABOVE_LAST_ROW: return row % 128 == 127;
    default: return 1;
    }
}

enum { FORWARD = FDM_FORWARD, BACKWARD = FDM_BACKWARD, BF16 = FDM_BFLOAT16, F16 = FDM_FLOAT16, F32 = FDM_FLOAT32 };
enum { PLAN = 1, NO_PLAN, PER_ROW = 1, PER_KEY, IN_LSE = 1, NOT_IN_LSE };
#define FORM(about, of, way, type, dim, rows, keys)                                                     \
    .group = about, .kernel = of, .pass = (fdm_pass)(way), .dtype = (fdm_dtype)(type), .head_dim = dim, \
    .seqlen_q = rows, .seqlen_k = keys
static const struct named_case forms[] = {
    /* tiles of which a part is hidden, the first or the last, by a block mask, a mask and a mask plan */
    {FORM("squares of blocks", "mma.forward", FORWARD, BF16, 64, 200, 304), .blocks = 1, .hides = HIDES_SQUARES,
     .kept = NO_PLAN},
    {FORM("squares of blocks", "mma.forward32", FORWARD, F32, 32, 200, 304), .blocks = 1, .hides = HIDES_SQUARES,
     .kept = NO_PLAN},
    {FORM("squares of blocks", "hopper.forward", FORWARD, F16, 64, 300, 304), .blocks = 1, .bias = PER_ROW,
     .hides = HIDES_SQUARES, .kept = NO_PLAN},
    {FORM("squares of blocks", "mma.backward", BACKWARD, BF16, 64, 140, 208), .blocks = 1, .hides = HIDES_SQUARES,
     .kept = NO_PLAN},
    {FORM("squares of a mask", "hopper.forward", FORWARD, BF16, 64, 300, 304), .mask = PER_ROW, .hides = HIDES_SQUARES,
     .kept = NO_PLAN},
    {FORM("squares of a plan", "hopper.forward", FORWARD, F16, 64, 300, 304), .mask = PER_ROW, .hides = HIDES_SQUARES,
     .kept = PLAN},
    {FORM("squares of a plan", "mma.forward", FORWARD, BF16, 64, 200, 304), .blocks = 1, .hides = HIDES_SQUARES,
     .kept = PLAN},
    {FORM("squares of a plan", "mma.backward32", BACKWARD, F32, 32, 140, 208), .mask = PER_ROW, .hides = HIDES_SQUARES,
     .kept = PLAN},
    {FORM("last row of a tile", "mma.forward", FORWARD, BF16, 64, 256, 128), .mask = PER_ROW,
     .hides = HIDES_ABOVE_LAST_ROW, .kept = NO_PLAN},
    {FORM("last row of a tile", "hopper.forward", FORWARD, F16, 64, 256, 128), .mask = PER_ROW,
     .hides = HIDES_ABOVE_LAST_ROW, .kept = NO_PLAN},
    /* NaN in keys that no row sees, beside those that rows see */
    {FORM("NaN in hidden keys", "hopper.forward", FORWARD, BF16, 64, 70, 112), .mask = PER_ROW, .hides = HIDES_KEYS,
     .spoils = 1},
    {FORM("NaN in hidden keys", "mma.backward", BACKWARD, F16, 64, 70, 112), .mask = PER_ROW, .hides = HIDES_KEYS,
     .spoils = 1},
    {FORM("NaN in hidden keys", "mma.backward32", BACKWARD, F32, 32, 70, 112), .mask = PER_ROW, .hides = HIDES_KEYS,
     .spoils = 1},
    {FORM("NaN in hidden keys", "hopper.backward", BACKWARD, BF16, 64, 70, 112), .mask = PER_ROW, .hides = HIDES_KEYS,
     .spoils = 1},
    {FORM("NaN in hidden keys", "hopper.backward", BACKWARD, F16, 64, 70, 112), .mask = PER_KEY, .hides = HIDES_KEYS,
     .spoils = 1},
    /* a row of NaN that sees keys, and one that sees none */
    {FORM("NaN in a row", "mma.forward", FORWARD, BF16, 64, 70, 112), .wants_nan = 1},
    {FORM("NaN without keys", "mma.decode", FORWARD, F16, 64, 4, 112), .bias = PER_ROW, .hides = HIDES_FROM_ONE_ROW,
     .wants_nan = 1},
    {FORM("NaN without keys", "mma.forward", FORWARD, BF16, 64, 70, 112), .bias = PER_ROW, .hides = HIDES_FROM_ONE_ROW,
     .wants_nan = 1},
    {FORM("NaN without keys", "mma.backward", BACKWARD, F16, 64, 100, 50), .causal = 1, .wants_nan = 1},
    /* sinks, and a number of rows that 4 does not divide */
    {FORM("ordinary sinks", "mma.forward", FORWARD, BF16, 64, 70, 112), .sink = IN_LSE},
    {FORM("ordinary sinks", "mma.decode", FORWARD, F16, 64, 3, 112), .sink = IN_LSE},
    {FORM("ordinary sinks", "hopper.forward", FORWARD, BF16, 64, 70, 112), .sink = IN_LSE},
    {FORM("ordinary sinks", "mma.backward", BACKWARD, F16, 64, 70, 112), .sink = IN_LSE},
    {FORM("ordinary sinks", "mma.backward32", BACKWARD, F32, 32, 70, 112), .sink = IN_LSE},
    {FORM("ordinary sinks", "hopper.backward", BACKWARD, BF16, 64, 70, 112), .sink = NOT_IN_LSE},
    {FORM("sinks alone", "mma.backward", BACKWARD, BF16, 64, 100, 50), .causal = 1, .wants_nan = 1, .sink = IN_LSE},
    {FORM("NaN beside sinks", "mma.backward32", BACKWARD, F32, 32, 70, 112), .mask = PER_ROW, .hides = HIDES_KEYS,
     .spoils = 1, .sink = NOT_IN_LSE},
    {FORM("rows of no sequence", "mma.forward", FORWARD, F16, 64, 40, 50), .varlen = 1},
    {FORM("rows of no sequence", "mma.backward", BACKWARD, BF16, 64, 40, 50), .varlen = 1},
    /* more keys than a list holds */
    {FORM("a long list", "hopper.gather", FORWARD, BF16, 64, 66, 9000), .mask = PER_KEY, .hides = HIDES_KEYS},
    {FORM("keys in splits", "hopper.forward", FORWARD, F16, 64, 5, 700), .choice = "_Split_"},
    {FORM("exponentials on the FMA pipe", "hopper.forward", FORWARD, BF16, 64, 70, 112), .choice = "_Exp1of2_"},
    {FORM("wide columns", "mma.backward_d1024", BACKWARD, BF16, 512, 70, 70)},
};
#undef FORM

void named_forms(void) {
    FOR_EACH(forms, n) {
        const struct named_case *f = &forms[n];
        named_next = *f;
        named_shape(f->varlen ? 3 : 1, f->sink ? 2 : 1, 1, f->seqlen_q, f->seqlen_k);
        named_window(-1, -1);
        named_next.head_dim_v = f->head_dim;
        named_next.rest = f->varlen;
        named_add(f->group);
    }
}
