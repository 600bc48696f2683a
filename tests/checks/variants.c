/* variants.c: the way in which a kernel runs a problem, where it has several: the rules' own, or one that they do not
 * choose here, by its choice code. */
#include <string.h>

#include "checks.h"

/* Of a way and a kernel alone, so that few specialisations run many problems (--ways). */
static uint64_t number_of(const struct trial *t, const char *kernel) {
    uint64_t number = t->way;
    for (; *kernel; kernel++)
        number = (number ^ (unsigned char)*kernel) * 0x100000001b3u + 0x9e3779b97f4a7c15u;
    return number ^ number >> 29;
}

void trial_variant(const struct trial *t, const fdm_plan *rules, char *code, size_t size) {
    const uint64_t number = number_of(t, rules->kernel);
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    int32_t ways = 0;
    *code = 0;
    if (number % 2 || fdm_device_query(rules->device.type, rules->device.index, &device))
        return;
    while (fdm_plan_variant(&device, &rules->problem, rules->kernel, ways, &plan) == FDM_OK)
        ways++;
    if (ways < 2 || fdm_plan_variant(&device, &rules->problem, rules->kernel,
                                     1 + (int32_t)(number / 2 % (uint64_t)(ways - 1)), &plan))
        return;
    if (t->mild || !sums_in_float16(plan.choice))
        snprintf(code, size, "%s", plan.choice);
}
