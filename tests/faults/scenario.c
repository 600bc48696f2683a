/* scenario.c: runs tests in processes of their own, and says how to run one again. */
#define _GNU_SOURCE /* nftw */
#include "scenario.h"

#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { PAST_THE_END = 77, WALK_MAX = 500, ENVIRONMENT_BYTES = 512, SECONDS_MAX = 200 };

int scenario_past_the_end;
static char tests_folder[256], program[300], folder[64];
static void (*wanted)(void);

/* ---- the parent ---- */

/* The environment with the walk's number and the tests' folder in place. */
static void spell(const char *text, int n, char *out, size_t size) {
    size_t used = 0;
    for (; *text && used + 1 < size; text++) {
        if (*text == '%')
            used += (size_t)snprintf(out + used, size - used, "%d", n);
        else if (*text == '@')
            used += (size_t)snprintf(out + used, size - used, "%s", tests_folder);
        else
            out[used++] = *text;
    }
    out[used] = 0;
}

static void become(const struct scenario *scenario, char *environment, int output) {
    char library_path[300];
    snprintf(library_path, sizeof library_path, "%s/faults", tests_folder);
    setenv("LD_LIBRARY_PATH", library_path, 1);
    for (char *rest, *pair = strtok_r(environment, " ", &rest); pair; pair = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(pair, '=');
        *value = 0;
        setenv(pair, value + 1, 1);
    }
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    alarm(SECONDS_MAX);
    execl(program, program, scenario->name, (char *)NULL);
    _exit(126);
}

/* A run's output where it failed, and in any case what it did not cover. */
static void show(FILE *output, int failed) {
    char line[512];
    rewind(output);
    while (fgets(line, sizeof line, output))
        if (failed || strstr(line, "not covered"))
            print_error("    %s", line);
}

/* The exit code of one run; its output is shown where it failed. */
static int run_once(const struct scenario *scenario, int n) {
    char environment[ENVIRONMENT_BYTES], shown[ENVIRONMENT_BYTES];
    int status = 0;
    spell(scenario->environment ? scenario->environment : "", n, environment, sizeof environment);
    memcpy(shown, environment, sizeof shown);
    FILE *output = tmpfile();
    assert_non_null(output);
    pid_t child = fork();
    if (child == 0)
        become(scenario, environment, fileno(output));
    assert_int_equal(waitpid(child, &status, 0), child);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    const int failed = code != 0 && code != PAST_THE_END;
    show(output, failed);
    if (failed)
        print_error("replay (exit code %d): LD_LIBRARY_PATH=%s/faults %s %s %s\n", code, tests_folder, shown, program,
                    scenario->name);
    fclose(output);
    return code;
}

static void run_in_process(void **state) {
    const struct scenario *scenario = *state;
    int n = 1, code = run_once(scenario, n);
    while (scenario->walk && code == 0 && n < WALK_MAX)
        code = run_once(scenario, ++n);
    assert_int_equal(code, scenario->walk ? PAST_THE_END : 0);
    if (scenario->walk) /* something was there to fail */
        assert_true(n > 1);
}

/* ---- the child ---- */

static void run_here(void **state) {
    (void)state;
    wanted();
}

static int remove_entry(const char *path, const struct stat *facts, int kind, struct FTW *level) {
    (void)facts, (void)kind, (void)level;
    return remove(path);
}

const char *scenario_folder(void) {
    if (!*folder) {
        /* in memory where there is such a folder: the cache waits for the disk after each entry */
        snprintf(folder, sizeof folder, "%s/fdm-faults-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        assert_non_null(mkdtemp(folder));
    }
    return folder;
}

void scenario_fork(void (*body)(void)) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        body(); /* a failing assertion ends in main() with a code of its own */
        *folder = 0;
        exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static int child_main(const struct scenario *scenario) {
    const struct CMUnitTest test = {scenario->name, run_here, NULL, NULL, NULL};
    wanted = scenario->run;
    int failures = _cmocka_run_group_tests(scenario->name, &test, 1, NULL, NULL);
    if (*folder)
        nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return failures ? failures : scenario_past_the_end ? PAST_THE_END : 0;
}

int scenarios_main(int argc, char **argv, const struct scenario *scenarios, int count) {
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0 || length >= (ssize_t)sizeof tests_folder)
        return 2;
    snprintf(tests_folder, sizeof tests_folder, "%.*s", (int)(strrchr(program, '/') - program), program);
    struct CMUnitTest *tests = calloc((size_t)count, sizeof *tests);
    for (int i = 0; i < count; i++) {
        if (argc > 1 && strcmp(argv[1], scenarios[i].name) == 0) {
            free(tests);
            return child_main(&scenarios[i]);
        }
        tests[i] = (struct CMUnitTest){scenarios[i].name, run_in_process, NULL, NULL, (void *)(uintptr_t)&scenarios[i]};
    }
    int failures = argc > 1 ? 2 : _cmocka_run_group_tests("scenarios", tests, (size_t)count, NULL, NULL);
    free(tests);
    return failures;
}
