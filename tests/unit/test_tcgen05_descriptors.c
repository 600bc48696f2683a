/* test_tcgen05_descriptors.c: each field of the numbers that tell tcgen05.mma of its operands, and whole ones that were
 * worked out by hand from the PTX ISA. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cuda/tcgen05_descriptors.h"

static unsigned field(uint64_t of, int from, int to) {
    return (unsigned)(of >> from & ((1ull << (to - from + 1)) - 1));
}

/* What both kinds of matrix have: address, stride, leading offset, and the rest as 128-byte swizzle wants it. */
static void check_matrix(uint64_t d, uint32_t address, unsigned leading) {
    assert_int_equal(field(d, 0, 13), address / 16);
    assert_int_equal(field(d, 14, 15), 0);
    assert_int_equal(field(d, 16, 29), leading / 16);
    assert_int_equal(field(d, 30, 31), 0);
    assert_int_equal(field(d, 32, 45), 1024 / 16);
    assert_int_equal(field(d, 46, 48), 1);
    assert_int_equal(field(d, 49, 51), 0);
    assert_int_equal(field(d, 52, 52), 0);
    assert_int_equal(field(d, 53, 60), 0);
    assert_int_equal(field(d, 61, 63), 2);
}

static void matrices_have_each_field(void **state) {
    (void)state;
    for (uint32_t address = 0; address < 227 << 10; address += 32) {
        check_matrix(tcgen05_k_major(address), address, 16); /* no leading offset: 1 is written there */
        check_matrix(tcgen05_mn_major(address, 8192), address, 8192);
    }
    check_matrix(tcgen05_mn_major(1024, 16384), 1024, 16384);
    check_matrix(tcgen05_mn_major(1024, 0), 1024, 0);
    /* an address in another block's window is the same one in each block of a pair */
    check_matrix(tcgen05_k_major(1u << 24 | 0x12400), 0x12400, 16);
    check_matrix(tcgen05_mn_major(1u << 24 | 0x12400, 4096), 0x12400, 4096);
    assert_true(tcgen05_k_major(0) == 0x4000404000010000ull);
    assert_true(tcgen05_k_major(0x1460) == 0x4000404000010146ull);
    assert_true(tcgen05_mn_major(0x8000, 16384) == 0x4000404004000800ull);
}

static void check_shape(int f16, int m, int n, int a_mn_major, int b_mn_major) {
    const uint32_t s = tcgen05_shape(f16, m, n, a_mn_major, b_mn_major);
    assert_int_equal(field(s, 0, 3), 0);
    assert_int_equal(field(s, 4, 5), 1);
    assert_int_equal(field(s, 6, 6), 0);
    assert_int_equal(field(s, 7, 9), !f16);
    assert_int_equal(field(s, 10, 12), !f16);
    assert_int_equal(field(s, 13, 14), 0);
    assert_int_equal(field(s, 15, 15), a_mn_major);
    assert_int_equal(field(s, 16, 16), b_mn_major);
    assert_int_equal(field(s, 17, 22), n / 8);
    assert_int_equal(field(s, 23, 23), 0);
    assert_int_equal(field(s, 24, 28), m / 16);
    assert_int_equal(field(s, 29, 31), 0);
}

static void shapes_have_each_field(void **state) {
    (void)state;
    for (int bits = 0; bits < 8; bits++)
        for (int m = 64; m <= 256; m *= 2)
            for (int n = 16; n <= 256; n += 16)
                check_shape(bits & 1, m, n, bits >> 1 & 1, bits >> 2);
    assert_int_equal(tcgen05_shape(0, 256, 128, 0, 0), 0x10200490);
    assert_int_equal(tcgen05_shape(0, 256, 128, 0, 1), 0x10210490);
    assert_int_equal(tcgen05_shape(0, 256, 256, 0, 1), 0x10410490);
    assert_int_equal(tcgen05_shape(0, 128, 128, 0, 0), 0x08200490);
    assert_int_equal(tcgen05_shape(0, 128, 256, 0, 1), 0x08410490);
    assert_int_equal(tcgen05_shape(1, 256, 128, 0, 0), 0x10200010);
    assert_int_equal(tcgen05_shape(1, 128, 256, 1, 1), 0x08418010);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(matrices_have_each_field),
                                       cmocka_unit_test(shapes_have_each_field)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
