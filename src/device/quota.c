/* quota.c: reads the CPU quotas of the process's control groups (Linux cgroups v1 and v2). */
#include "device/quota.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "system/files.h"

enum { QUOTA_PATH_MAX = 4096, QUOTA_LINE_MAX = 8192 };

/* One hierarchy that may limit CPU time: where it is mounted, which group the mount shows, and which group we are in.
 * Empty mount or group = the hierarchy is absent. */
struct hierarchy {
    int version; /* 1 or 2 */
    char mount[QUOTA_PATH_MAX], mount_root[QUOTA_PATH_MAX], group[QUOTA_PATH_MAX];
};

/* Whether `word` is one of the comma-separated words of `list`. */
static int list_has(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, word, length) == 0 && (at[length] == ',' || at[length] == 0))
            return 1;
    }
    return 0;
}

static int read_line(const char *root, const char *folder, const char *name, char *line, int size) {
    char path[3 * QUOTA_PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s%s%s", root, folder, name) >= sizeof path)
        return 0;
    struct system_file_facts facts;
    FILE *file = system_open_file(path, &facts);
    if (!file)
        return 0;
    int got = fgets(line, size, file) != NULL;
    fclose(file);
    return got;
}

/* Lines "id:controllers:group"; v2 is "0::group" (cgroups(7)). */
static void find_group(FILE *file, struct hierarchy *h, char *line) {
    while (fgets(line, QUOTA_LINE_MAX, file)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group || strlen(group + 1) >= sizeof h->group)
            continue;
        *controllers++ = 0;
        *group++ = 0;
        int matches = h->version == 2 ? strcmp(line, "0") == 0 && !*controllers : list_has(controllers, "cpu");
        if (matches)
            strcpy(h->group, group);
    }
}

/* Lines "id parent device root mount options [tags] - type source super_options" (proc_pid_mountinfo(5)). */
static void find_mount(FILE *file, struct hierarchy *h, char *line) {
    while (fgets(line, QUOTA_LINE_MAX, file)) {
        char root[QUOTA_PATH_MAX], mount[QUOTA_PATH_MAX], type[64], super_options[1024];
        const char *dash = strstr(line, " - ");
        if (!dash || sscanf(line, "%*s %*s %*s %4095s %4095s", root, mount) != 2 ||
            sscanf(dash, " - %63s %*s %1023s", type, super_options) != 2)
            continue;
        int matches = h->version == 2 ? strcmp(type, "cgroup2") == 0
                                      : strcmp(type, "cgroup") == 0 && list_has(super_options, "cpu");
        if (matches && !*h->mount) {
            strcpy(h->mount, mount);
            strcpy(h->mount_root, root);
        }
    }
}

static int find_hierarchy(const char *root, struct hierarchy *h, char *line) {
    static const char *const names[2] = {"/proc/self/cgroup", "/proc/self/mountinfo"};
    for (int i = 0; i < 2; i++) {
        char path[QUOTA_PATH_MAX];
        if ((size_t)snprintf(path, sizeof path, "%s%s", root, names[i]) >= sizeof path)
            return 0;
        struct system_file_facts facts;
        FILE *file = system_open_file(path, &facts);
        if (!file)
            return 0;
        (i == 0 ? find_group : find_mount)(file, h, line);
        fclose(file);
    }
    return *h->mount && *h->group;
}

/* CPUs of one group, rounded up; 0 = no limit. */
static int32_t group_cpus(const char *root, const char *folder, int version) {
    char line[128];
    double quota = 0, period = 0;
    if (version == 2) {
        if (!read_line(root, folder, "/cpu.max", line, sizeof line) || sscanf(line, "%lf %lf", &quota, &period) != 2)
            return 0; /* absent, or "max 100000" */
    } else {
        if (!read_line(root, folder, "/cpu.cfs_quota_us", line, sizeof line) || sscanf(line, "%lf", &quota) != 1 ||
            !read_line(root, folder, "/cpu.cfs_period_us", line, sizeof line) || sscanf(line, "%lf", &period) != 1)
            return 0;
    }
    if (!(quota > 0 && period > 0 && quota / period < 1e6))
        return 0; /* v1 writes -1 for "no limit" */
    int32_t whole = (int32_t)(quota / period);
    return whole + (whole * period < quota);
}

/* The smallest quota between our group and the top of the mount. */
static int32_t hierarchy_cpus(const char *root, const struct hierarchy *h) {
    const char *group = h->group;
    size_t shown = strcmp(h->mount_root, "/") == 0 ? 0 : strlen(h->mount_root);
    if (strncmp(group, h->mount_root, shown) == 0 && (group[shown] == '/' || group[shown] == 0))
        group += shown;
    else
        group = ""; /* a container that sees only its own group, at the mount itself */
    char folder[2 * QUOTA_PATH_MAX];
    size_t top = strlen(h->mount);
    snprintf(folder, sizeof folder, "%s%s", h->mount, strstr(group, "/..") ? "" : group);
    int32_t least = 0;
    for (;;) {
        int32_t cpus = group_cpus(root, folder, h->version);
        if (cpus > 0 && (least == 0 || cpus < least))
            least = cpus;
        char *slash = strrchr(folder + top, '/');
        if (!slash)
            return least;
        *slash = 0;
    }
}

int32_t quota_cpus(const char *root) {
    struct hierarchy *h = memory_allocate(sizeof *h + QUOTA_LINE_MAX);
    if (!h)
        return 0;
    int32_t least = 0;
    for (int version = 1; version <= 2; version++) {
        memset(h, 0, sizeof *h);
        h->version = version;
        int32_t cpus = find_hierarchy(root, h, (char *)(h + 1)) ? hierarchy_cpus(root, h) : 0;
        if (cpus > 0 && (least == 0 || cpus < least))
            least = cpus;
    }
    memory_release(h);
    return least;
}
