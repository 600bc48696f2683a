/* quota.h: how many CPUs the process's control groups leave it. */
#ifndef FDM_CPU_QUOTA_H
#define FDM_CPU_QUOTA_H

#include <stdint.h>

/* CPUs that the cgroup quotas (v1 and v2, own group and its parents) allow, rounded up; 0 = no limit. Reads
 * /proc/self/cgroup, /proc/self/mountinfo and the groups' files, all below `root` ("" = the real ones). */
int32_t quota_cpus(const char *root);

#endif
