/* command_info.c: fdm info. */
#include <getopt.h>
#include <string.h>

#include "cli.h"
#include "json_writer.h"

/* The devices, or the sentence why there is none; then what compiles kernels, and where they are kept. */
static void print_cuda(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_status status;
    char path[1024];
    int32_t i = 0;
    for (; !(status = fdm_device_query(FDM_CUDA, i, &device)); i++)
        printf("CUDA: device %d is %s, %d multiprocessors, %lld KiB of shared memory a block, L2 %lld KiB\n", i,
               device.name, device.num_sms, (long long)device.shared_bytes >> 10, (long long)device.l2_bytes >> 10);
    if (i == 0 || status != FDM_ERROR_INVALID_ARGUMENT) /* else it was the index after the last */
        printf("CUDA: %s\n", fdm_last_error());
    printf("compiler: %s\n", fdm_compiler_path(path, sizeof path) ? fdm_last_error() : path);
    fdm_cache_info cache = {.struct_bytes = sizeof cache};
    if (fdm_cache_query(&cache)) {
        printf("cache: %s\n", fdm_last_error());
        return;
    }
    printf("cache: %s, %lld kernels, %lld of at most %lld MiB\n", cache.folder, (long long)cache.num_entries,
           (long long)cache.bytes >> 20, (long long)cache.limit_bytes >> 20);
    if (*cache.ignored)
        printf("cache: %s\n", cache.ignored);
}

/* Every variable with what is wrong with it. */
static void print_settings(void) {
    fdm_setting_info setting = {.struct_bytes = sizeof setting};
    printf("\nsettings\n");
    for (int32_t i = 0; fdm_setting_list(i, &setting) == FDM_OK; i++) {
        printf("  %-32s %-12s ", setting.name, setting.value ? setting.value : "(unset)");
        if (!setting.description)
            printf("UNKNOWN: the library reads no such variable\n");
        else if (!setting.valid)
            printf("INVALID: it must be %s\n", setting.allowed);
        else
            printf("%s\n", setting.description);
    }
}

static void print_text(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    printf("flash-dmattn %s\n\n", fdm_version());
    if (fdm_device_query(FDM_CPU, 0, &device))
        printf("CPU: %s\n", fdm_last_error());
    else
        printf("CPU: best instruction set %s, %d threads for this process, caches L1 %lld KiB, L2 %lld KiB, L3 %lld "
               "KiB\n",
               device.isa, device.num_threads, (long long)device.l1_bytes >> 10, (long long)device.l2_bytes >> 10,
               (long long)device.l3_bytes >> 10);
    if (*device.isa_by_name)
        printf("CPU: %s is slower here than %s and runs by name only\n", device.isa_by_name, device.isa);
    print_cuda();
    printf("\nkernels\n");
    for (int32_t i = 0; fdm_kernel_list(i, &kernel) == FDM_OK; i++)
        printf("  %-28s %-11s %s\n", kernel.name, kernel.available ? "available" : "-", kernel.description);
    print_settings();
}

/* null where a setting stands against it. */
static void put_cpu(struct json_writer *w) {
    fdm_device device = {.struct_bytes = sizeof device};
    if (fdm_device_query(FDM_CPU, 0, &device)) {
        json_put_text(w, "cpu", NULL);
        return;
    }
    json_open(w, "cpu", '{');
    json_put_text(w, "isa", device.isa);
    json_put_text(w, "isa_by_name", *device.isa_by_name ? device.isa_by_name : NULL);
    json_put_integer(w, "num_threads", device.num_threads);
    json_put_integer(w, "l1_bytes", device.l1_bytes);
    json_put_integer(w, "l2_bytes", device.l2_bytes);
    json_put_integer(w, "l3_bytes", device.l3_bytes);
    json_close(w, '}');
}

static void put_settings(struct json_writer *w) {
    fdm_setting_info setting = {.struct_bytes = sizeof setting};
    json_open(w, "settings", '{');
    for (int32_t i = 0; fdm_setting_list(i, &setting) == FDM_OK; i++) {
        json_open(w, setting.name, '{');
        json_put_text(w, "value", setting.value);
        json_put_raw(w, "known", setting.description ? "true" : "false");
        json_put_raw(w, "valid", setting.valid ? "true" : "false");
        json_put_text(w, "allowed", setting.allowed);
        json_close(w, '}');
    }
    json_close(w, '}');
}

static void print_json(void) {
    struct json_writer w = {.stream = stdout};
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    json_open(&w, NULL, '{');
    json_put_text(&w, "version", fdm_version());
    put_cpu(&w);
    json_open(&w, "cuda", '[');
    fdm_device cuda = {.struct_bytes = sizeof cuda};
    char path[1024];
    for (int32_t i = 0; fdm_device_query(FDM_CUDA, i, &cuda) == FDM_OK; i++) {
        json_open(&w, NULL, '{');
        json_put_text(&w, "name", cuda.name);
        json_put_integer(&w, "num_sms", cuda.num_sms);
        json_put_integer(&w, "shared_bytes", cuda.shared_bytes);
        json_put_integer(&w, "l2_bytes", cuda.l2_bytes);
        json_close(&w, '}');
    }
    json_close(&w, ']');
    json_put_text(&w, "compiler", fdm_compiler_path(path, sizeof path) ? NULL : path);
    fdm_cache_info cache = {.struct_bytes = sizeof cache};
    const int cached = !fdm_cache_query(&cache);
    json_put_text(&w, "cache", cached ? cache.folder : NULL);
    json_put_text(&w, "cache_ignored", cached && *cache.ignored ? cache.ignored : NULL);
    json_open(&w, "kernels", '[');
    for (int32_t i = 0; fdm_kernel_list(i, &kernel) == FDM_OK; i++) {
        json_open(&w, NULL, '{');
        json_put_text(&w, "name", kernel.name);
        json_put_text(&w, "family", kernel.family);
        json_put_text(&w, "pass", kernel.pass == FDM_BACKWARD ? "backward" : "forward");
        json_put_raw(&w, "available", kernel.available ? "true" : "false");
        json_put_text(&w, "description", kernel.description);
        json_close(&w, '}');
    }
    json_close(&w, ']');
    put_settings(&w);
    json_close(&w, '}');
    printf("\n");
}

int command_info(int argc, char **argv) {
    static const struct option options[] = {{"json", no_argument, 0, 'j'}, {"help", no_argument, 0, 'h'}, {0}};
    int option, json = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'h') {
            puts("usage: fdm info [--json]\n\nPrints the CPU's instruction set and caches, CUDA devices, the compiler "
                 "and the cache of their\nkernels, all kernels, and every environment variable FLASH_DMATTN_* with its "
                 "value and what is wrong with it.\n\n"
                 "example: FLASH_DMATTN_CPU_ISA=avx2 fdm info");
            return EXIT_FINE;
        }
        if (option == '?')
            return EXIT_USAGE;
        json = 1;
    }
    if (optind < argc)
        return complain(EXIT_USAGE, "info takes no argument '%s'", argv[optind]);
    json ? print_json() : print_text();
    return EXIT_FINE;
}
