/* merge.c: stub. */
typedef int stub_merge;
