/* launches.h: which CUDA kernels a run has launched, and which it has not: each kernel by the values of its constants,
 * so that a way to run that no problem of the run took is told. */
#ifndef FDM_LAUNCHES_H
#define FDM_LAUNCHES_H

#include "flash_dmattn.h"

/* Whatever the plans of this attention kernel launch, for problems of all kinds, may be launched from now on. */
void launches_expect(const char *kernel, fdm_pass pass);
/* A plan was executed. */
void launches_count(const fdm_plan *plan);
/* A line for each family: how often each kernel was launched, and what never was. */
void launches_report(void);
/* "combine_splits" or "hopper_forward.SPLITS=1", several with commas between them: prints what of them was not
 * launched, and returns 0 then. */
int launches_include(const char *list);

#endif
