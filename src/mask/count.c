/* count.c: stub. */
typedef int stub_count;
