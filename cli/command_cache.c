/* command_cache.c: fdm cache: the kernels compiled at run time. */
#include <errno.h>
#include <getopt.h>
#include <string.h>

#include "cache_build.h"
#include "cli.h"
#include "json_writer.h"
#include "system/files.h"

static const char help[] =
    "usage: fdm cache [list|clear] [--json]\n       fdm cache pack FILE\n       fdm cache build --device NAME [--set "
    "common|FILE]\n\nThe folder of CUDA kernels compiled at run time: lists or "
    "removes its entries, makes one file of them for other machines, or compiles kernels ahead (fdm cache build "
    "--help). An entry that is damaged, or of other sources or "
    "another library version, is never used; nor is one that others than you and root own or may write. Beyond "
    "FLASH_DMATTN_CACHE_SIZE (default 1G) the entries not used for longest are removed.\n\nexample: fdm cache list";

struct totals {
    int64_t entries, bytes;
    int code; /* of the command */
};

/* Looks at, or removes, the folder's entries; a folder that is not there is empty. */
static struct totals walk(const char *path, int clear, struct json_writer *json, int print) {
    struct totals totals = {0, 0, EXIT_FINE};
    struct system_folder folder;
    struct system_walk walk;
    struct system_file_facts facts;
    const int opened = system_open_folder(&folder, path, &facts), walks = opened && system_begin_walk(&walk, &folder);
    if (!walks && errno != ENOENT && errno != ENOTDIR)
        totals.code = complain(EXIT_USAGE, "%s cannot be read: %s", path, strerror(errno));
    while (walks && system_walk_on(&walk)) {
        if (!strstr(walk.name, ".cubin") || !walk.facts.regular)
            continue;
        if (clear && !system_remove_in(&folder, walk.name)) {
            if (!totals.code) /* one line is enough */
                totals.code = complain(EXIT_WRITE, "%s/%s cannot be removed: %s", path, walk.name, strerror(errno));
            continue;
        }
        totals.entries++;
        totals.bytes += walk.facts.bytes;
        if (json) {
            json_open(json, NULL, '{');
            json_put_text(json, "name", walk.name);
            json_put_integer(json, "bytes", walk.facts.bytes);
            json_close(json, '}');
        } else if (print) {
            printf("%s %lld bytes\n", walk.name, (long long)walk.facts.bytes);
        }
    }
    if (walks)
        system_end_walk(&walk);
    if (opened)
        system_close_folder(&folder);
    return totals;
}

static int pack(const char *path) {
    int64_t entries, bytes;
    const fdm_status status = fdm_cache_pack(path, &entries, &bytes);
    if (status)
        return fail(status);
    printf("%s: %lld entries, %lld bytes\n", path, (long long)entries, (long long)bytes);
    return EXIT_FINE;
}

int command_cache(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "build") == 0)
        return command_cache_build(argc - 1, argv + 1);
    static const struct option options[] = {{"json", no_argument, 0, 'j'}, {"help", no_argument, 0, 'h'}, {0}};
    int option, json = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'h') {
            puts(help);
            return EXIT_FINE;
        }
        if (option == '?')
            return EXIT_USAGE;
        json = 1;
    }
    const char *action = optind < argc ? argv[optind] : "list";
    int clear = strcmp(action, "clear") == 0;
    if (strcmp(action, "pack") == 0)
        return optind + 2 == argc ? pack(argv[optind + 1])
                                  : complain(EXIT_USAGE, "cache pack takes one file, the archive that it writes");
    if (optind + 1 < argc || (!clear && strcmp(action, "list") != 0))
        return complain(EXIT_USAGE, "cache takes 'list', 'clear', 'pack' or 'build', not '%s'", argv[argc - 1]);
    fdm_cache_info info = {.struct_bytes = sizeof info};
    const fdm_status status = fdm_cache_query(&info);
    if (status)
        return fail(status);
    struct json_writer w = {.stream = stdout};
    if (json) {
        json_open(&w, NULL, '{');
        json_open(&w, "entries", '[');
    }
    struct totals totals = walk(info.folder, clear, json ? &w : NULL, !clear);
    if (json) {
        json_close(&w, ']');
        json_put_text(&w, "folder", info.folder);
        json_put_integer(&w, "limit_bytes", info.limit_bytes);
        json_put_integer(&w, "ignored", info.num_ignored);
        json_put_text(&w, "why_ignored", *info.ignored ? info.ignored : NULL);
        json_close(&w, '}');
        printf("\n");
    } else {
        printf("%lld entries, %lld bytes%s", (long long)totals.entries, (long long)totals.bytes,
               clear ? " removed\n" : "");
        if (!clear)
            printf(" of at most %lld, in %s\n", (long long)info.limit_bytes, info.folder);
        if (!clear && *info.ignored)
            printf("%lld entries are ignored: %s\n", (long long)info.num_ignored, info.ignored);
    }
    return totals.code;
}
