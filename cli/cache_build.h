/* cache_build.h: fdm cache build. */
#ifndef FDM_CLI_CACHE_BUILD_H
#define FDM_CLI_CACHE_BUILD_H

#include "flash_dmattn.h"

/* Problems, each the options of `fdm plan`; ends with NULL. */
extern const char *const common_set[];

/* The options of `fdm plan` that say a problem, from the first word on. argv[0] is not looked at. 1, or 0 after a
 * complaint. Words that `options` keeps stay the caller's. */
int plan_problem(int argc, char **argv, fdm_problem *problem, fdm_options *options);

/* fdm cache build [--device NAME] [--set common|FILE] [--json] */
int command_cache_build(int argc, char **argv);

#endif
