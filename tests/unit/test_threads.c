/* test_threads.c: executor, OpenMP runtime and own pool: each index once, nested, concurrent, forked, pinned, limited.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "device/pool.h"
#include "device/quota.h"
#include "device/threads.h"

/* ThreadSanitizer follows neither threads started after a fork nor libgomp's. */
#if defined(__SANITIZE_THREAD__)
#    define TSAN 1
#elif defined(__has_feature)
#    if __has_feature(thread_sanitizer)
#        define TSAN 1
#    endif
#endif
#ifndef TSAN
#    define TSAN 0
#endif
/* A lock of AddressSanitizer's allocator that another thread holds during a fork stays locked in the child: with GCC 12
 * its threads wait for it forever. */
#if defined(__SANITIZE_ADDRESS__)
#    define FORKS 0
#else
#    define FORKS (!TSAN)
#endif

enum { INDICES = 37 };

struct counts {
    atomic_int calls[INDICES];
    atomic_int nested_calls;
};

static void count_body(void *argument, int32_t index) {
    atomic_fetch_add(&((struct counts *)argument)->calls[index], 1);
}

/* A wrong count must also be visible in a forked child, where cmocka cannot report: 1 = each index was called once. */
static int runs_each_once(const fdm_executor *executor, int32_t num_threads) {
    struct counts counts = {0};
    threads_run(executor, num_threads, count_body, &counts);
    for (int i = 0; i < INDICES; i++)
        if (atomic_load(&counts.calls[i]) != (i < num_threads))
            return 0;
    return 1;
}

static void test_each_index_once(void **state) {
    (void)state;
    for (int repeat = 0; repeat < 200; repeat++)
        for (int32_t n = 0; n <= INDICES; n += n < 4 ? 1 : 11)
            assert_true(runs_each_once(NULL, n));
}

/* Sleeping threads must wake up too. */
static void test_after_a_pause(void **state) {
    (void)state;
    for (int repeat = 0; repeat < 20; repeat++) {
        usleep(500);
        assert_true(runs_each_once(NULL, 2 + repeat % 3));
    }
}

static void nested_inner(void *argument, int32_t index) {
    (void)index;
    atomic_fetch_add(&((struct counts *)argument)->nested_calls, 1);
}
static void nested_body(void *argument, int32_t index) {
    count_body(argument, index);
    threads_run(NULL, 3, nested_inner, argument);
}

static void test_nested(void **state) {
    (void)state;
    struct counts counts = {0};
    threads_run(NULL, 4, nested_body, &counts);
    for (int i = 0; i < 4; i++)
        assert_int_equal(atomic_load(&counts.calls[i]), 1);
    assert_int_equal(atomic_load(&counts.nested_calls), 12);
}

static void *caller(void *argument) {
    (void)argument;
    for (int repeat = 0; repeat < 300; repeat++)
        if (!runs_each_once(NULL, 3))
            return "an index was not called exactly once";
    return NULL;
}

static void test_two_callers(void **state) {
    (void)state;
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, caller, NULL), 0);
    for (int i = 0; i < 2; i++) {
        void *result;
        pthread_join(threads[i], &result);
        assert_null(result);
    }
}

/* The body runs on more than one thread: index 1 waits until index 0 has begun, and the other way round. */
static void meet_body(void *argument, int32_t index) {
    struct counts *counts = argument;
    atomic_store(&counts->calls[index], 1);
    for (int i = 0; i < 20000 && !atomic_load(&counts->calls[1 - index]); i++)
        usleep(100);
    if (atomic_load(&counts->calls[1 - index]))
        atomic_fetch_add(&counts->nested_calls, 1);
}

static void test_really_parallel(void **state) {
    (void)state;
    struct counts counts = {0};
    threads_run(NULL, 2, meet_body, &counts);
    assert_int_equal(atomic_load(&counts.nested_calls), 2);
}

static void test_pool_directly(void **state) {
    (void)state;
    for (int repeat = 0; repeat < 100; repeat++) {
        struct counts counts = {0};
        assert_int_equal(pool_run(1 + repeat % 5 + 1, repeat & 1, count_body, &counts), 1);
        for (int i = 0; i < INDICES; i++)
            assert_int_equal(atomic_load(&counts.calls[i]), i < 1 + repeat % 5 + 1);
    }
}

static void test_shutdown_and_again(void **state) {
    (void)state;
    for (int repeat = 0; repeat < 20; repeat++) {
        assert_true(runs_each_once(NULL, 4));
        threads_shutdown();
    }
    threads_shutdown();
}

/* ---- executors ---- */

static void serial_run(void *context, int32_t n, void (*body)(void *, int32_t), void *argument) {
    ++*(int *)context;
    for (int32_t i = n - 1; i >= 0; i--)
        body(argument, i);
}

static void test_executor(void **state) {
    (void)state;
    int used = 0;
    fdm_executor executor = {&used, 5, serial_run};
    assert_true(runs_each_once(&executor, 5));
    assert_int_equal(used, 1);
    fdm_executor without_run = {NULL, 5, NULL};
    assert_true(runs_each_once(&without_run, 5));
}

static void test_counts(void **state) {
    (void)state;
    int32_t available = threads_available();
    fdm_executor one = {NULL, 1, serial_run}, none = {NULL, 0, serial_run}, many = {NULL, 100000, serial_run};
    assert_true(available >= 1);
    assert_int_equal(threads_for(1, NULL), 1);
    assert_int_equal(threads_for(0, &one), 1);
    assert_int_equal(threads_for(0, &none), 1);
    assert_int_equal(threads_for(0, &many), available);
    assert_int_equal(threads_for(100000, &many), available);
}

static void test_affinity(void **state) {
    (void)state;
    cpu_set_t old, one;
    assert_int_equal(sched_getaffinity(0, sizeof old, &old), 0);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); cpu++)
        if (CPU_ISSET(cpu, &old))
            CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    int32_t available = threads_available(), count = threads_for(0, NULL);
    int each_once = runs_each_once(NULL, 4);
    assert_int_equal(sched_setaffinity(0, sizeof old, &old), 0);
    assert_int_equal(available, 1);
    assert_int_equal(count, 1);
    assert_true(each_once);
}

/* ---- fork ---- */

/* 1 when a forked child can run bodies too. Asserts nothing: it is called inside a body. */
static int child_works(void) {
    pid_t child = fork();
    if (child == 0) {
        alarm(20); /* a hang is a failure */
        int good = runs_each_once(NULL, 4) && runs_each_once(NULL, 2);
        threads_shutdown();
        _exit(good ? 0 : 1);
    }
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void test_fork(void **state) {
    (void)state;
    if (!FORKS)
        skip();
    assert_true(runs_each_once(NULL, 4));
    assert_true(child_works());
    assert_true(runs_each_once(NULL, 4));
}

static void fork_body(void *argument, int32_t index) {
    count_body(argument, index);
    if (index == 0 && child_works())
        atomic_fetch_add(&((struct counts *)argument)->nested_calls, 1);
}

/* The child of a call in flight has a pool that nobody will ever release. */
static void test_fork_inside(void **state) {
    (void)state;
    if (!FORKS)
        skip();
    struct counts counts = {0};
    threads_run(NULL, 2, fork_body, &counts);
    assert_int_equal(atomic_load(&counts.nested_calls), 1);
}

/* ---- cgroup quotas on recorded text ---- */

static void put(const char *root, const char *path, const char *text) {
    char full[1024];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = strchr(full + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void remove_tree(const char *root) {
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    assert_int_equal(system(command), 0);
}

struct quota_case {
    const char *name, *cgroup, *mountinfo;
    const char *files[4][2]; /* path below the root, text */
    int32_t expected;
};

static const char mount_v2[] = "25 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
                               "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
static const char mount_v1[] = "32 31 0:29 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
                               "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n";

static const struct quota_case quota_cases[] = {
    {"no files at all", NULL, NULL, {{NULL}}, 0},
    {"v2 without limit", "0::/user.slice\n", mount_v2, {{"/sys/fs/cgroup/user.slice/cpu.max", "max 100000\n"}}, 0},
    {"v2 rounds up", "0::/a/b\n", mount_v2, {{"/sys/fs/cgroup/a/b/cpu.max", "250000 100000\n"}}, 3},
    {"v2 whole", "0::/a/b\n", mount_v2, {{"/sys/fs/cgroup/a/b/cpu.max", "200000 100000\n"}}, 2},
    {"v2 below one", "0::/a\n", mount_v2, {{"/sys/fs/cgroup/a/cpu.max", "1000 100000\n"}}, 1},
    {"v2 parent is tighter",
     "0::/a/b/c\n",
     mount_v2,
     {{"/sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n"}, {"/sys/fs/cgroup/a/cpu.max", "400000 100000\n"}},
     4},
    {"v2 own is tighter",
     "0::/a/b\n",
     mount_v2,
     {{"/sys/fs/cgroup/a/b/cpu.max", "300000 100000\n"}, {"/sys/fs/cgroup/a/cpu.max", "800000 100000\n"}},
     3},
    {"v2 in a namespace, group at the mount", "0::/\n", mount_v2, {{"/sys/fs/cgroup/cpu.max", "600000 100000\n"}}, 6},
    {"v2 outside the namespace", "0::/../x\n", mount_v2, {{"/sys/fs/cgroup/cpu.max", "500000 100000\n"}}, 5},
    {"v2 bind-mounted group",
     "0::/docker/id/sub\n",
     "35 24 0:30 /docker/id /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
     {{"/sys/fs/cgroup/sub/cpu.max", "700000 100000\n"}},
     7},
    {"v1",
     "3:cpuset:/z\n4:cpu,cpuacct:/x/y\n0::/\n",
     mount_v1,
     {{"/sys/fs/cgroup/cpu,cpuacct/x/y/cpu.cfs_quota_us", "150000\n"},
      {"/sys/fs/cgroup/cpu,cpuacct/x/y/cpu.cfs_period_us", "100000\n"}},
     2},
    {"v1 without limit",
     "4:cpuacct,cpu:/x\n",
     mount_v1,
     {{"/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "-1\n"},
      {"/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n"}},
     0},
    {"v1 container that sees the host's path",
     "4:cpu,cpuacct:/docker/id\n",
     "33 31 0:30 /docker/id /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
     {{"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "900000\n"}, {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}},
     9},
    {"nonsense", "0::\n::::\n\n0:\n", "x\n - \n- -\n", {{"/sys/fs/cgroup/cpu.max", "100000 100000\n"}}, 0},
    {"nonsense numbers", "0::/\n", mount_v2, {{"/sys/fs/cgroup/cpu.max", "100000 0\n"}}, 0},
};

static void test_quota(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof quota_cases / sizeof quota_cases[0]; i++) {
        const struct quota_case *c = &quota_cases[i];
        char root[] = "/tmp/fdm_quota_XXXXXX";
        assert_non_null(mkdtemp(root));
        if (c->cgroup)
            put(root, "/proc/self/cgroup", c->cgroup);
        if (c->mountinfo)
            put(root, "/proc/self/mountinfo", c->mountinfo);
        for (int f = 0; f < 4 && c->files[f][0]; f++)
            put(root, c->files[f][0], c->files[f][1]);
        int32_t cpus = quota_cpus(root);
        remove_tree(root);
        if (cpus != c->expected)
            fail_msg("%s: %d CPUs, expected %d", c->name, cpus, c->expected);
    }
}

/* ---- again with an OpenMP runtime in the process (last: it stays) ---- */

static void *find_openmp(void) {
    void *library = dlopen("libgomp.so.1", RTLD_LAZY);
    if (!library) {
        print_message("libgomp.so.1 is not installed\n");
        skip();
    }
    return library;
}

static void test_openmp_obeys_max_threads(void **state) {
    (void)state;
    void *library = find_openmp();
    void (*set_num_threads)(int);
    *(void **)&set_num_threads = dlsym(library, "omp_set_num_threads");
    assert_non_null(set_num_threads);
    if (!TSAN) {
        set_num_threads(1);
        assert_int_equal(threads_for(0, NULL), 1);
    }
    set_num_threads(64);
    assert_int_equal(threads_for(0, NULL), threads_available());
}

static void in_team(void *argument) {
    atomic_int *counts = argument; /* threads asked for more than 1; wrong runs */
    if (threads_for(0, NULL) != 1)
        atomic_fetch_add(&counts[0], 1);
    if (!runs_each_once(NULL, 4))
        atomic_fetch_add(&counts[1], 1);
}

static void test_inside_openmp_team(void **state) {
    (void)state;
    if (TSAN)
        skip();
    void *openmp_library = find_openmp();
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    *(void **)&parallel = dlsym(openmp_library, "GOMP_parallel");
    atomic_int counts[2] = {0};
    parallel(in_team, counts, 2, 0);
    assert_int_equal(atomic_load(&counts[0]), 0);
    assert_int_equal(atomic_load(&counts[1]), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quota),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_affinity),
        cmocka_unit_test(test_executor),
        cmocka_unit_test(test_each_index_once),
        cmocka_unit_test(test_after_a_pause),
        cmocka_unit_test(test_really_parallel),
        cmocka_unit_test(test_nested),
        cmocka_unit_test(test_two_callers),
        cmocka_unit_test(test_pool_directly),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_fork_inside),
        cmocka_unit_test(test_shutdown_and_again),
        cmocka_unit_test(test_openmp_obeys_max_threads),
        cmocka_unit_test(test_inside_openmp_team),
        cmocka_unit_test(test_each_index_once),
        cmocka_unit_test(test_really_parallel),
        cmocka_unit_test(test_nested),
        cmocka_unit_test(test_two_callers),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_shutdown_and_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
