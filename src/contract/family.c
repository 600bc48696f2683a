/* family.c: what every family uses of its interface. */
#include "contract/family.h"

#include <stdio.h>
#include <string.h>

#include "base/kernel_name.h"

const char *const scheduler_names[SCHEDULER_COUNT] = {"static", "longest", "dynamic"};

int family_refuse(struct refusals *refusals, const char *kernel, const char *clause) {
    if (refusals->count < FAMILY_REFUSALS_MAX) {
        struct refusal *r = &refusals->list[refusals->count++];
        r->kernel = kernel;
        snprintf(r->clause, sizeof r->clause, "%s", clause);
    }
    return 0;
}

int32_t family_find_kernel(const struct family *family, const char *name) {
    name = kernel_current_name(name);
    for (int32_t i = 0; i < family->num_kernels; i++)
        if (strcmp(family->kernel(family, i)->name, name) == 0)
            return i;
    return -1;
}
