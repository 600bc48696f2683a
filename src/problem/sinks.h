/* sinks.h: learnable sinks: logits of a query head that join the sum of each of its rows and have no value. */
#ifndef FDM_SINKS_H
#define FDM_SINKS_H

#include <math.h>

#include "problem/problem.h"

/* What fdm_problem_validate() asks of a problem's sinks. */
fdm_status sinks_validate(const fdm_problem *problem);
/* Checks sink and, in the backward, dsink, and adds both to problem and attention. Nothing where there are none. */
fdm_status sinks_resolve(const fdm_tensors *tensors, fdm_problem *problem, struct attention *attention);

/* On the CPU: the logarithm of the sum of exp(sink) of a head; -inf where there are no sinks. */
double sinks_logit(const struct attention *attention, int64_t head);
/* On the CPU, where dsink is wanted: writes that of a head from the gradient of its logit. */
void sinks_store_gradient(const struct attention *attention, int64_t head, double gradient);

/* The logarithm `lse` of a sum, +inf where no key is seen, and what a sink of logit `sink` makes of it: how much it
 * grows, which is +inf where the sink is. */
static inline double sinks_growth(double lse, double sink) {
    const double apart = sink - lse;
    return apart > 0 ? apart + log1p(exp(-apart)) : log1p(exp(apart));
}

#endif
