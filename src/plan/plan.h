/* plan.h: the plan value, inside the library. */
#ifndef FDM_PLAN_H
#define FDM_PLAN_H

#include "contract/family.h"

/* The plan of the one-call form on this machine's device: fdm_plan_attention()'s, made again only when it can differ
 * from that of the thread's last call. `problem` comes from tensors on the device. *measures: 1 where the call may
 * measure its class. */
fdm_status plan_call(fdm_device_id id, const fdm_problem *problem, const fdm_options *options, fdm_plan *plan,
                     int *measures);
/* The same by rules alone, whatever was kept. */
fdm_status plan_by_rules(const fdm_device *device, const fdm_problem *problem, const fdm_options *options,
                         fdm_plan *plan);
/* A kernel's plan of this choice code, as fdm_plan_variant() gives it. */
fdm_status plan_of_choice(const fdm_device *device, const fdm_problem *problem, const char *kernel, const char *choice,
                          int32_t num_threads, fdm_plan *plan);
/* Puts the choice that was kept for the problem's class in the place of the rules' plan, or says in its reason why not.
 * 1: the class was measured, whatever came of it. */
int plan_apply_kept(const fdm_device *device, fdm_plan *plan);
/* Puts the way of the least predicted time in its place, where the model is sure that it is faster. */
void plan_apply_predicted(const fdm_device *device, fdm_plan *plan);
/* A caller's plan, whole: itself or `*room`. NULL with a sentence: it is none, or of a newer version. */
const fdm_plan *plan_read(const fdm_plan *plan, fdm_plan *room);
/* The family a plan names, NULL when there is none (a plan from JSON may be foreign). */
const struct family *plan_family(const fdm_plan *plan);
/* 1 when the family has the kernel that the plan names, at the index that the plan names. */
int plan_names_row(const fdm_plan *plan, const struct family *family);
/* Whether it is the name of a kernel, or has the form of a choice code. */
int plan_knows_kernel(const char *name);
/* Whether a tuner times the kernel on this device: those that are chosen freely, and on the CPU those of its better
 * instruction sets. */
int plan_may_tune(const fdm_device *device, const char *kernel);

#endif
