/* command_cache.c: fdm cache. */
#include <getopt.h>
#include <string.h>

#include "cli.h"

int command_cache(int argc, char **argv) {
    static const struct option options[] = {{"json", no_argument, 0, 'j'}, {"help", no_argument, 0, 'h'}, {0}};
    int option, json = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'h') {
            puts(
                "usage: fdm cache [list|clear] [--json]\n\nThe folder of kernels compiled at run time. CPU kernels are "
                "compiled into the library, so this version's cache is always empty.\n\nexample: fdm cache list");
            return EXIT_FINE;
        }
        if (option == '?')
            return EXIT_USAGE;
        json = 1;
    }
    const char *action = optind < argc ? argv[optind] : "list";
    if (optind + 1 < argc || (strcmp(action, "list") != 0 && strcmp(action, "clear") != 0))
        return complain(EXIT_USAGE, "cache takes 'list' or 'clear', not '%s'", argv[argc - 1]);
    puts(json ? "{\"entries\": []}" : "no entries: CPU kernels are compiled into the library");
    return EXIT_FINE;
}
