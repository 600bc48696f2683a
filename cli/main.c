/* main.c: the command line tool: picks the subcommand. */
#include <string.h>

#include "cli.h"
#include "output_file.h"
#include "system/streams.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"info", command_info, "this machine, its kernels and the settings, as the library sees them"},
    {"plan", command_plan, "which kernel a problem gets on a device, and why"},
    {"attend", command_attend, "run attention on tensors in files, forward and backward, and check it"},
    {"mask", command_mask, "build masks from biases, key intervals or masks in files"},
    {"bench", command_bench, "time every kernel by name on one problem"},
    {"tune", command_tune, "time the variants of a problem on this machine"},
    {"cache", command_cache, "the folder of compiled kernels"},
};
enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(FILE *stream) {
    fprintf(stream, "fdm %s: exact attention with any mask\n\nusage: fdm COMMAND [OPTION ...]\n\n", fdm_version());
    for (int i = 0; i < NUM_COMMANDS; i++)
        fprintf(stream, "  %-8s %s\n", commands[i].name, commands[i].summary);
    fputs(
        "\nfdm COMMAND --help explains one. Exit code: 0 fine, 1 wrong result, failed check or no plan, 2 bad usage,\n"
        "3 results that cannot be written.\n",
        stream);
}

/* getopt starts its own complaints with argv[0]. */
static int run_command(int index, int argc, char **argv) {
    static char name[] = "fdm";
    argv[0] = name;
    return commands[index].run(argc, argv);
}

static int run(int argc, char **argv) {
    if (argc < 2)
        return complain(EXIT_USAGE, "no command; fdm --help lists them");
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return EXIT_FINE;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("fdm %s\n", fdm_version());
        return EXIT_FINE;
    }
    for (int i = 0; i < NUM_COMMANDS; i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return run_command(i, argc - 1, argv + 1);
    return complain(EXIT_USAGE, "'%s' is no command; fdm --help lists them", argv[1]);
}

int main(int argc, char **argv) {
    system_start();
    return output_finish(run(argc, argv));
}
