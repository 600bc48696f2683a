/* key_bias_on_cpu.c: the bias of a dynamic mask and its gradient on the CPU, in double. */
#include "masks/key_bias/key_bias.h"

#include <math.h>

#include "base/half.h"
#include "flash_dmattn.h"

static char *place_of(const struct key_bias_tensor *t, int64_t b, int64_t s, int64_t h) {
    return t->data + (b * t->batch + s * t->key + h * t->head) * fdm_dtype_bytes((fdm_dtype)t->dtype);
}

static double value_at(const struct key_bias_tensor *t, int64_t b, int64_t s, int64_t h) {
    const void *at = place_of(t, b, s, h);
    switch (t->dtype) {
    case FDM_FLOAT64: return *(const double *)at;
    case FDM_FLOAT32: return (double)*(const float *)at;
    case FDM_FLOAT16: return (double)float16_to_float(*(const uint16_t *)at);
    default: return (double)bfloat16_to_float(*(const uint16_t *)at);
    }
}

static void set_value(const struct key_bias_tensor *t, int64_t b, int64_t s, int64_t h, double value) {
    void *at = place_of(t, b, s, h);
    switch (t->dtype) {
    case FDM_FLOAT64: *(double *)at = value; return;
    case FDM_FLOAT32: *(float *)at = (float)value; return;
    case FDM_FLOAT16: *(uint16_t *)at = float_to_float16((float)value); return;
    default: *(uint16_t *)at = float_to_bfloat16((float)value); return;
    }
}

static int is_real(const struct key_bias_call *c, int64_t b, int64_t s) {
    return !c->padding || c->padding[b * c->padding_batch + s * c->padding_key] != 0;
}

/* Of x and exp(-|x|). */
static double softplus(double x, double e) { return (x < 0 ? 0 : x) + log1p(e); }
static double sigmoid(double x, double e) { return (x < 0 ? e : 1) / (1 + e); }

void key_bias_on_cpu(const struct key_bias_call *c) {
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t h = 0; h < c->heads; h++) {
            const double a = value_at(&c->a, b, 0, h);
            for (int64_t s = 0; s < c->num_keys; s++) {
                const double x = value_at(&c->dt, b, s, h), z = a * softplus(x, exp(-fabs(x)));
                set_value(&c->bias, b, s, h, !is_real(c, b, s) ? -INFINITY : c->exponential ? exp(z) : z);
            }
        }
}

void key_bias_backward_on_cpu(const struct key_bias_call *c) {
    for (int64_t h = 0; h < c->heads; h++) {
        const double a = value_at(&c->a, 0, 0, h);
        double sum = 0;
        for (int64_t b = 0; b < c->batch; b++)
            for (int64_t s = 0; s < c->num_keys; s++) {
                const double x = value_at(&c->dt, b, s, h), e = exp(-fabs(x)), plus = softplus(x, e);
                double dz = is_real(c, b, s) ? value_at(&c->bias, b, s, h) : 0;
                if (c->exponential && dz != 0)
                    dz *= exp(a * plus);
                sum += dz == 0 ? 0 : dz * plus; /* what no row sees has no part in it, whatever dt is */
                if (c->ddt.data)
                    set_value(&c->ddt, b, s, h, dz == 0 ? 0 : dz * a * sigmoid(x, e));
            }
        if (c->da.data)
            set_value(&c->da, 0, 0, h, sum);
    }
}
