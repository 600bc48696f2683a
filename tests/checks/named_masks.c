/* named_masks.c: listed problems whose masks hide tiles: plans of tiles, keys that they hide, intervals of wide
 * heads, row intervals and block masks. */
#include <string.h>

#include "named_cases.h"

/* Tiles of keys that are full, hidden or seen in part, by documents or by a mask that all rows share: several blocks of
 * rows and words of tiles, for each tile of the kernel. */
void named_tile_plans(void) {
    static const struct {
        int64_t dims[2], batch, heads, seqlen_q, seqlen_k;
        int causal, window, varlen, mask, softcap;
    } rows[] = {
        {{64, 128}, 1, 1, 450, 450, 0, 0, 0, 0, 0},  {{128, 256}, 1, 2, 330, 330, 1, 0, 0, 0, 0},
        {{64, 256}, 1, 1, 130, 2400, 0, 0, 0, 0, 1}, {{128, 176}, 2, 1, 200, 200, 0, 0, 1, 0, 0},
        {{64, 128}, 2, 1, 200, 200, 1, 0, 1, 0, 1},  {{64, 128}, 1, 1, 330, 330, 0, 1, 0, 0, 0},
        {{128, 256}, 2, 1, 150, 300, 0, 0, 0, 2, 0}, {{64, 128}, 2, 1, 200, 200, 1, 0, 1, 2, 0},
    };
    FOR_EACH(rows, n)
    for (int d = 0; d < 2; d++) {
        named_begin("hopper.forward", FDM_FORWARD, rows[n].dims[d], named_dtypes[(n + (size_t)d) % 2]);
        named_shape(rows[n].batch, rows[n].heads, 1, rows[n].seqlen_q, rows[n].seqlen_k);
        named_next.causal = rows[n].causal;
        if (rows[n].window)
            named_window(150, 70);
        named_next.varlen = rows[n].varlen;
        named_next.mask = rows[n].mask;
        named_next.intervals = rows[n].mask ? 0 : 2;
        named_next.softcap = rows[n].softcap ? 7 : 0;
        named_add("tile plans");
    }
}

/* Tiles of keys that documents or a mask that all rows share hide from blocks of rows, of kernels that look at each
 * key, with a mask plan and without; in a plan of more than a word, and in one that the call makes. */
void named_seen_tiles(void) {
    static const struct {
        const char *name;
        fdm_pass pass;
        fdm_dtype dtype;
    } kernels[] = {{"mma.forward", FDM_FORWARD, FDM_BFLOAT16},
                   {"mma.forward32", FDM_FORWARD, FDM_FLOAT32},
                   {"mma.backward32", FDM_BACKWARD, FDM_FLOAT32},
                   {"mma.backward_d1024", FDM_BACKWARD, FDM_FLOAT16}};
    static const struct {
        int64_t batch, heads, heads_kv, seqlen_q, seqlen_k;
        int causal, varlen, mask;
    } rows[] = {
        {1, 2, 2, 330, 330, 0, 0, 0}, {1, 2, 1, 130, 2400, 1, 0, 0}, {2, 1, 1, 200, 330, 0, 1, 0},
        {2, 1, 1, 70, 600, 0, 0, 2},  {1, 1, 1, 130, 8200, 0, 0, 0},
    };
    FOR_EACH(kernels, k)
    FOR_EACH(rows, n)
    for (int d = 0; d < 2; d++) {
        named_begin(kernels[k].name, kernels[k].pass, d ? 64 : 32, kernels[k].dtype);
        named_shape(rows[n].batch, rows[n].heads, rows[n].heads_kv, rows[n].seqlen_q, rows[n].seqlen_k);
        named_next.causal = rows[n].causal;
        named_next.varlen = rows[n].varlen;
        named_next.mask = rows[n].mask;
        named_next.intervals = rows[n].mask ? 0 : 2;
        named_add("seen tiles");
    }
}

/* Intervals of head dims above 128, in a backward: documents (2), and scattered keys (1), which are sorted: several
 * blocks of rows and of keys, sequences that end within them, groups of heads, divided and not; masks of keys (0). */
void named_wide_intervals(void) {
    static const struct {
        int64_t dims[2], batch, heads, heads_kv, seqlen_q, seqlen_k;
        int kind, causal, window, softcap, varlen;
    } rows[] = {
        {{160, 256}, 1, 1, 1, 330, 330, 2, 0, 0, 0, 0},  {{256, 192}, 1, 1, 1, 450, 450, 2, 1, 0, 0, 0},
        {{256, 256}, 1, 2, 2, 200, 1100, 1, 0, 0, 0, 0}, {{192, 224}, 2, 2, 2, 330, 330, 1, 1, 0, 0, 0},
        {{256, 256}, 1, 4, 1, 200, 330, 2, 0, 1, 0, 0},  {{160, 256}, 2, 1, 1, 130, 2100, 1, 0, 0, 1, 0},
        {{136, 200}, 1, 2, 2, 140, 260, 2, 0, 0, 1, 0},  {{160, 256}, 2, 2, 2, 200, 330, 0, 0, 0, 0, 0},
        {{136, 256}, 2, 2, 2, 130, 200, 0, 1, 0, 0, 1},  {{192, 256}, 3, 4, 2, 150, 200, 2, 1, 0, 0, 1},
    };
    FOR_EACH(rows, n)
    for (int d = 0; d < 2; d++) {
        named_begin("hopper.backward_2pass", FDM_BACKWARD, rows[n].dims[d], named_dtypes[(n + (size_t)d) % 2]);
        named_shape(rows[n].batch, rows[n].heads, rows[n].heads_kv, rows[n].seqlen_q, rows[n].seqlen_k);
        named_next.causal = rows[n].causal;
        if (rows[n].window)
            named_window(150, 70);
        named_next.intervals = rows[n].kind;
        named_next.mask = rows[n].kind ? 0 : 2;
        named_next.varlen = named_next.rest = rows[n].varlen;
        named_next.softcap = rows[n].softcap ? 7 : 0;
        named_add("intervals of wide heads");
    }
}

/* Row intervals, a block mask or both (runs: bits 0 and 1) beside everything, with hidden tiles and full ones. */
void named_rows(const char *kernel, fdm_pass pass, int32_t float32, int runs) {
    static const int64_t dims[] = {64, 128}, wide_dims[] = {256, 160};
    enum { OF_NONE, CAUSAL, WINDOW, PACKED, SOFTCAP, OF_MASK, KEY_MASK, INTERVALS, OF_BIAS, KEY_BIAS, PAIRS, KINDS };
    const int decode = strstr(kernel, "decode") != NULL, hopper = strstr(kernel, "hopper") != NULL;
    const int owns = hopper && pass == FDM_BACKWARD, wide = strstr(kernel, "2pass") != NULL;
    FOR_EACH(dims, d)
    for (int kind = OF_NONE; kind < KINDS; kind++) {
        const int alike = owns && kind >= OF_MASK; /* what heads of keys share */
        if (wide ? kind >= OF_BIAS || kind == OF_MASK : hopper && !owns && kind >= KEY_BIAS)
            continue; /* mma's */
        if (runs > 1 && d != (size_t)kind % 2)
            continue;
        named_begin(kernel, pass, wide ? wide_dims[d] : dims[d], float32 ? FDM_FLOAT32 : named_dtypes[kind % 2]);
        named_shape(kind == PACKED ? 3 : 1 + kind % 2, 4, alike ? 4 : 2, decode ? 5 : 200, decode ? 600 : 304);
        named_next.rows = (runs & 1) * (owns ? 2 : 1);
        named_next.blocks = runs / 2 * (owns ? 2 : 1);
        named_next.causal = kind == CAUSAL || kind == PACKED;
        named_next.mask = kind == OF_MASK || kind == PAIRS ? 1 : kind == KEY_MASK ? 2 : 0;
        named_next.bias = kind == OF_BIAS ? 1 : kind == KEY_BIAS || kind == PAIRS ? 2 : 0;
        named_next.intervals = kind == INTERVALS;
        named_next.varlen = named_next.rest = kind == PACKED;
        named_next.softcap = kind == SOFTCAP ? 7 : 0;
        named_next.dbias = pass == FDM_BACKWARD && named_next.bias;
        named_next.deterministic = pass == FDM_BACKWARD && kind % 2;
        named_window(kind == WINDOW ? 100 : -1, kind == WINDOW ? 30 : -1);
        named_add(runs == 1 ? "row intervals" : runs == 2 ? "block masks" : "row intervals and block masks");
    }
}
