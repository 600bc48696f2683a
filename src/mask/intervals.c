/* intervals.c: stub. */
typedef int stub_intervals;
