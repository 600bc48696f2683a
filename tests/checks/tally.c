/* tally.c: counts what each kernel of a run has done, and reports it. */
#include "tally.h"

#include <stdio.h>
#include <string.h>

#include "base/kernel_name.h"
#include "checks.h"
#include "launches.h"

const char *tally_runner(const struct tally *k) { return *k->code ? k->code : k->name; }
const char *tally_family(const struct tally *k) { return *k->family ? k->family : NULL; }

int32_t tally_kernels(struct tally *kernels, const char *only, int cuda) {
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    int32_t count = 0, missing = 0;
    for (int32_t i = 0; fdm_kernel_list(i, &info) == FDM_OK; i++) {
        if (strcmp(info.family, "reference") == 0 || !kernel_is_chosen(only, info.name) ||
            ((is_emulated() || cuda) && !is_on_device(info.family)))
            continue;
        if (!info.available) {
            printf("%s%s", missing++ ? ", " : "not covered on this machine: ", info.name);
            continue;
        }
        struct tally *k = &kernels[count++];
        *k = (struct tally){.pass = info.pass};
        snprintf(k->name, sizeof k->name, "%s", info.name);
        snprintf(k->family, sizeof k->family, "%s", info.family);
        if (is_on_device(info.family))
            launches_expect(info.name, info.pass);
    }
    printf(missing ? "\n" : "");
    fdm_device device = {.struct_bytes = sizeof device};
    if (count == 0 && only && !fdm_device_query(FDM_CUDA, 0, &device)) /* a choice code: one variant of a kernel */
        for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
            kernels[count] = (struct tally){.pass = (fdm_pass)pass};
            snprintf(kernels[count++].name, sizeof kernels->name, "%s", only);
        }
    return count;
}

int tally_write(const char *path, const struct tally *kernels, int32_t count, uint64_t seed, uint64_t seeds) {
    FILE *file = fopen(path, "a");
    for (int32_t i = 0; file && i < count; i++) {
        const struct tally *k = &kernels[i];
        fdm_device device = {.struct_bytes = sizeof device};
        if (fdm_device_query(is_on_device(tally_family(k)) ? FDM_CUDA : FDM_CPU, 0, &device))
            continue;
        fprintf(
            file,
            "{\"kernel\": \"%s\", \"device\": \"%s\", \"emulated\": %s, \"seed\": %llu, \"seeds\": %llu, \"right\": "
            "%lld, \"wrong\": %lld, \"refused\": %lld}\n",
            k->name, device.name, is_emulated() ? "true" : "false", (unsigned long long)seed, (unsigned long long)seeds,
            (long long)(k->accepted - k->wrong), (long long)k->wrong, (long long)k->refused);
    }
    return file && fclose(file) == 0;
}

int tally_any_wrong(const struct tally *kernels, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        if (kernels[i].wrong)
            return 1;
    return 0;
}

int64_t tally_report(struct tally *kernels, int32_t count, uint64_t problems, int64_t *accepted) {
    enum { FEW_PROBLEMS = 50 };
    int64_t wrong = 0;
    for (int32_t i = 0; i < count; i++) {
        struct tally *k = &kernels[i];
        if (!*k->family && k->accepted == 0 && kernels[count - 1 - i].accepted > 0)
            continue; /* the choice code is of the other pass */
        printf("%-28s %8lld right, %lld wrong, %lld refused", k->name, (long long)(k->accepted - k->wrong),
               (long long)k->wrong, (long long)k->refused);
        printf(k->by_code ? ", %lld by choice code\n" : "\n", (long long)k->by_code);
        if (k->accepted == 0 && problems > FEW_PROBLEMS) {
            printf("WRONG %s accepted no problem\n", k->name);
            k->wrong = 1;
        }
        *accepted += k->accepted;
        wrong += k->wrong;
    }
    if (problems > 1)
        launches_report();
    printf("%lld passed, %lld failed\n", (long long)(*accepted - wrong), (long long)wrong);
    return wrong;
}
