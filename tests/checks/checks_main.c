/* checks_main.c: fdm-checks: the table of its subjects, and the one that the command line names. */
#include <stdio.h>

#include "checks.h"
#include "launches.h"
#include "subjects.h"

#define MASK_OPTIONS "emulate seed repeat rotate until-wrong"
static const struct subject subjects[] = {
    {"attention", "every kernel on random problems, against the float64 reference",
     "kernel emulate cuda seed repeat right seconds ways rotate threads far until-wrong launches json",
     attention_checks},
    {"serving", "the same, with seqused, and forwards on a cache: pages, appending, rotary embeddings",
     "kernel emulate cuda seed repeat right seconds ways rotate threads until-wrong launches json", serving_checks},
    {"cache", "fdm_cache_append(), and one plan for lists that change, on a device against the CPU",
     "kernel " MASK_OPTIONS, cache_checks},
    {"invariance", "one sequence in calls that differ in all else: the same bits, on a device or the CPU", MASK_OPTIONS,
     invariance_checks},
    {"cases", "every kernel on a list of named problems, against the float64 reference",
     "kernel group emulate cuda seed repeat share rotate until-wrong launches", cases_checks},
    {"broken", "faults planted in kernels are found", "group emulate repeat", broken_checks},
    {"placement", "results in the place of inputs or between them: the same bits", "kernel emulate share rotate",
     placement_checks},
    {"chain", "attention after attention on one stream, against the CPU", "emulate repeat", chain_checks},
    {"merge", "fdm_merge() on a device, against the CPU", "emulate", merge_checks},
    {"masks topk", "fdm_topk_intervals() on a device, against the CPU and the definition", MASK_OPTIONS " keys",
     topk_checks},
    {"masks interval", "other key intervals on a device, against the CPU", MASK_OPTIONS, interval_checks},
    {"masks dense", "dense masks on a device, against the CPU", MASK_OPTIONS, dense_checks},
    {"masks same", "one mask said as key intervals, as row intervals and as a dense mask, on a device", MASK_OPTIONS,
     same_mask_checks},
    {"masks slots", "top-W slots while tokens come, against the CPU and all tokens so far", MASK_OPTIONS, slots_checks},
    {"masks key-bias", "fdm_key_bias() and its backward on a device, against the CPU", MASK_OPTIONS, key_bias_checks},
    {"softmax", "every softmax kernel, against float64", "kernel emulate share rotate large", softmax_checks},
    {"gemm", "every gemm kernel, against float64", "kernel emulate share rotate most from large", gemm_checks},
    {"compile", "CUDA kernels compile for every architecture, and do not spill; needs no device",
     "kernel arch entry with seed share seconds full variants known list json verbose", compile_checks},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) {
    struct options options;
    const int code = options_read(&options, subjects, argc, argv);
    if (code >= 0)
        return code;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (options.emulate && !emulate_device(options.emulate))
        return 2;
    const int result = options.subject->run(&options);
    return options.launches && !launches_include(options.launches) ? 1 : result;
}
