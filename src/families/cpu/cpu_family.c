/* family.c of cpu: stub. */
#include <stdio.h>

#include "cpu_family.h"

static int available(int32_t row) {
    (void)row;
    return 1;
}
static int choose(const struct plan_request *request, fdm_plan *plan) {
    (void)request;
    snprintf(plan->reason, sizeof plan->reason, "not built yet");
    return 0;
}
const struct family family_cpu = {"cpu", NULL, 0, available, choose, NULL};
