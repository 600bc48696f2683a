/* machine_posix.c: machine.h on Linux and macOS. */
#define _GNU_SOURCE /* mkdtemp, nftw */
#include "machine.h"

#include <ftw.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "system/system.h"

extern char **environ;

void machine_set(const char *name, const char *value) { value ? setenv(name, value, 1) : unsetenv(name); }

int machine_make_folder(char *path, size_t size) {
    return snprintf(path, size, "/tmp/fdm-test-XXXXXX") < (int)size && mkdtemp(path);
}

static int remove_one(const char *path, const struct stat *facts, int kind, struct FTW *place) {
    (void)facts, (void)kind, (void)place;
    return remove(path);
}
int machine_remove_all(const char *path) { return nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS) == 0; }

int machine_cut(const char *path, long bytes) { return truncate(path, bytes) == 0; }

int machine_let_others_write(const char *path, int others) {
    struct stat facts;
    return stat(path, &facts) == 0 && chmod(path, (facts.st_mode & 0700) | (others ? 0022 : 0)) == 0;
}

int machine_run_myself(const char *word, int count) {
    char path[1024], copy[64];
    char *words[] = {path, copy, NULL};
    int fine = 0, status;
    snprintf(copy, sizeof copy, "%s", word);
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length > 0)
        path[length] = 0;
    else if (!system_path_of(machine_set, path, sizeof path))
        return 0;
    int started = 0;
    for (pid_t child; started < count && posix_spawn(&child, path, NULL, NULL, words, environ) == 0;)
        started++;
    for (int n = 0; n < started; n++)
        fine += wait(&status) > 0 && status == 0;
    return fine;
}
