/* plan.h: the plan value, inside the library. */
#ifndef FDM_PLAN_H
#define FDM_PLAN_H

#include "family.h"

/* The family a plan names, NULL when there is none (a plan from JSON may be foreign). */
const struct family *plan_family(const fdm_plan *plan);
/* 1 when the family has the kernel that the plan names, at the row that the plan names. */
int plan_names_row(const fdm_plan *plan, const struct family *family);

#endif
