/* command_info.c: fdm info. */
#include <getopt.h>
#include <string.h>

#include "cli.h"
#include "json_writer.h"

/* The devices, or the sentence why there is none; then what compiles kernels, and where they are kept. */
static void print_cuda(void) {
    fdm_device device;
    fdm_status status;
    char path[1024];
    int32_t i = 0;
    for (; !(status = fdm_device_query(FDM_CUDA, i, &device)); i++)
        printf("CUDA: device %d is %s, %d multiprocessors, %lld KiB of shared memory a block, L2 %lld KiB\n", i,
               device.name, device.num_sms, (long long)device.shared_bytes >> 10, (long long)device.l2_bytes >> 10);
    if (i == 0 || status != FDM_ERROR_INVALID_ARGUMENT) /* else it was the index after the last */
        printf("CUDA: %s\n", fdm_last_error());
    printf("compiler: %s\n", fdm_compiler_path(path, sizeof path) ? fdm_last_error() : path);
    fdm_cache_info cache;
    if (fdm_cache_query(&cache)) {
        printf("cache: %s\n", fdm_last_error());
        return;
    }
    printf("cache: %s, %lld kernels, %lld of at most %lld MiB\n", cache.folder, (long long)cache.num_entries,
           (long long)cache.bytes >> 20, (long long)cache.limit_bytes >> 20);
    if (*cache.ignored)
        printf("cache: %s\n", cache.ignored);
}

static void print_text(const fdm_device *device) {
    fdm_kernel_info kernel;
    fdm_setting_info setting;
    printf("flash-dmattn %s\n\n", fdm_version());
    printf("CPU: best instruction set %s, %d threads for this process, caches L1 %lld KiB, L2 %lld KiB, L3 %lld KiB\n",
           device->isa, device->num_threads, (long long)device->l1_bytes >> 10, (long long)device->l2_bytes >> 10,
           (long long)device->l3_bytes >> 10);
    print_cuda();
    printf("\nkernels\n");
    for (int32_t i = 0; fdm_kernel_list(i, &kernel) == FDM_OK; i++)
        printf("  %-28s %-11s %s\n", kernel.name, kernel.available ? "available" : "-", kernel.description);
    printf("\nsettings\n");
    for (int32_t i = 0; fdm_setting_list(i, &setting) == FDM_OK; i++)
        printf("  %-32s %-12s %s\n", setting.name, setting.value ? setting.value : "(unset)", setting.description);
}

static void print_json(const fdm_device *device) {
    struct json_writer w = {stdout, 0};
    fdm_kernel_info kernel;
    fdm_setting_info setting;
    json_open(&w, NULL, '{');
    json_put_text(&w, "version", fdm_version());
    json_open(&w, "cpu", '{');
    json_put_text(&w, "isa", device->isa);
    json_put_integer(&w, "num_threads", device->num_threads);
    json_put_integer(&w, "l1_bytes", device->l1_bytes);
    json_put_integer(&w, "l2_bytes", device->l2_bytes);
    json_put_integer(&w, "l3_bytes", device->l3_bytes);
    json_close(&w, '}');
    json_open(&w, "cuda", '[');
    fdm_device cuda;
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
    fdm_cache_info cache;
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
    json_open(&w, "settings", '{');
    for (int32_t i = 0; fdm_setting_list(i, &setting) == FDM_OK; i++)
        json_put_text(&w, setting.name, setting.value);
    json_close(&w, '}');
    json_close(&w, '}');
    printf("\n");
}

int command_info(int argc, char **argv) {
    static const struct option options[] = {{"json", no_argument, 0, 'j'}, {"help", no_argument, 0, 'h'}, {0}};
    int option, json = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'h') {
            puts("usage: fdm info [--json]\n\nPrints the CPU's instruction set and caches, CUDA devices, the compiler "
                 "and "
                 "the cache of their kernels, all kernels, and settings.\n\n"
                 "example: FLASH_DMATTN_CPU_ISA=avx2 fdm info");
            return EXIT_FINE;
        }
        if (option == '?')
            return EXIT_USAGE;
        json = 1;
    }
    if (optind < argc)
        return complain(EXIT_USAGE, "info takes no argument '%s'", argv[optind]);
    fdm_device device;
    if (fdm_device_query(FDM_CPU, 0, &device))
        return complain(EXIT_WRONG, "%s", fdm_last_error());
    json ? print_json(&device) : print_text(&device);
    return EXIT_FINE;
}
