/* selection_table.c: prints tables of docs/backward-tiles.md and docs/selection.md from the data that the library
 * chooses by. */
#include <stdio.h>

#include "device/device.h"
#include "families/mma/backward/mma_rules.h"

static int64_t bytes_of(const struct mma_backward_row *row, int32_t stages, int32_t v_in_registers) {
    return mma_backward_shared_bytes(row->shape.block_m, row->shape.block_n, stages, v_in_registers,
                                     row->takes.head_dim_max, row->takes.head_dim_max);
}

static void print_bytes(const struct mma_backward_row *row) {
    const int doubled = row->shape.variant == MMA_DOUBLE_BUFFERED || row->shape.variant == MMA_DOUBLE_IF_IT_FITS;
    printf("%.4g", (double)bytes_of(row, doubled ? 2 : 1, row->shape.variant == MMA_V_IN_REGISTERS) / 1024);
    if (row->shape.variant == MMA_DOUBLE_IF_IT_FITS)
        printf(" or %.4g", (double)bytes_of(row, 1, 0) / 1024);
}

static const char *code_of(const struct mma_backward_row *row) {
    for (int32_t i = 0; i < mma_backward_code_count; i++) {
        const struct mma_backward_code *code = &mma_backward_codes[i];
        if (code->column == row->takes.column && code->block_m == row->shape.block_m &&
            code->block_n == row->shape.block_n && code->v_in_registers == (row->shape.variant == MMA_V_IN_REGISTERS))
            return code->code;
    }
    return "none";
}

static void print_lengths(int32_t lengths) {
    static const struct {
        int32_t length;
        const char *name;
    } names[] = {{MMA_LONG, "long"}, {MMA_MEDIUM, "medium"}, {MMA_STANDARD, "standard"}};
    const char *separator = "";
    if (lengths == MMA_ANY_LENGTH) {
        printf("any");
        return;
    }
    for (int i = 0; i < 3; i++)
        if (lengths & names[i].length) {
            printf("%s%s", separator, names[i].name);
            separator = ", ";
        }
}

static void print_rows(void) {
    printf("| for | D <= | length | device has | tile | variant | KB | code | because "
           "|\n|---|---|---|---|---|---|---|---|---|\n");
    for (int32_t i = 0; i < mma_backward_row_count; i++) {
        const struct mma_backward_row *row = &mma_backward_rows[i];
        printf("| %s | %d | ", mma_column_name(row->takes.column), row->takes.head_dim_max);
        print_lengths(row->takes.lengths);
        if (row->takes.limit_min)
            printf(" | >= %.4g KB", (double)row->takes.limit_min / 1024);
        else
            printf(" | any");
        printf(" | %dx%d | %s | ", row->shape.block_m, row->shape.block_n, mma_variant_name(row->shape.variant));
        print_bytes(row);
        printf(" | `%s` | %s |\n", code_of(row), row->reason);
    }
}

static void print_codes(void) {
    printf("\n| code | query rows | keys | V in registers |\n|---|---|---|---|\n");
    for (int32_t i = 0; i < mma_backward_code_count; i++) {
        const struct mma_backward_code *code = &mma_backward_codes[i];
        printf("| `%s` | %d | %d | %s |\n", code->code, code->block_m, code->block_n,
               code->v_in_registers ? "yes" : "no");
    }
}

static void print_devices(void) {
    printf("\n| name | compute capability | multiprocessors | shared memory, KB | L2, MB | memory, GB/s | threads | "
           "part |\n"
           "|---|---|---|---|---|---|---|---|\n");
    for (int32_t i = 0; i < device_table_length; i++) {
        const struct device_row *row = &device_table[i];
        printf("| `%s` | %d.%d | %d | %d | ", row->name, row->compute_major, row->compute_minor, row->num_sms,
               (int)(row->shared_bytes >> 10));
        if (row->l2_bytes)
            printf("%d", (int)(row->l2_bytes >> 20));
        else
            printf("unknown");
        printf(" | %d | %d | %s |\n", (int)(row->bandwidth / 1000000000), row->threads_per_sm, row->part);
    }
}

int main(void) {
    print_rows();
    print_codes();
    print_devices();
    return 0;
}
