/* family.c: what every family uses of its interface. */
#include "contract/family.h"

#include <stdio.h>
#include <string.h>

const char *const scheduler_names[SCHEDULER_COUNT] = {"static", "longest", "dynamic"};

int family_refuse(struct refusals *refusals, const char *kernel, const char *clause) {
    if (refusals->count < FAMILY_REFUSALS_MAX) {
        struct refusal *r = &refusals->list[refusals->count++];
        r->kernel = kernel;
        snprintf(r->clause, sizeof r->clause, "%s", clause);
    }
    return 0;
}

const char *kernel_current_name(const char *name) {
    static const struct {
        const char *old, *current;
    } renamed[] = {{"hopper.wide", "hopper.backward_2pass"}, {"mma.wide", "mma.forward_d1024"}};
    for (size_t i = 0; i < sizeof renamed / sizeof renamed[0]; i++)
        if (strcmp(name, renamed[i].old) == 0)
            return renamed[i].current;
    return name;
}

int32_t family_find_kernel(const struct family *family, const char *name) {
    name = kernel_current_name(name);
    for (int32_t i = 0; i < family->num_kernels; i++)
        if (strcmp(family->kernel(family, i)->name, name) == 0)
            return i;
    return -1;
}
