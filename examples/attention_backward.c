/* attention_backward.c: gradients of causal attention, compared with a difference quotient of the loss sum(out * dout).
 * cc -std=c11 attention_backward.c $(pkg-config --cflags --libs flash_dmattn) -lm */
#include <math.h>
#include <stdio.h>

#include <flash_dmattn.h>

enum { ROWS = 24, HEADS = 2, HEAD_DIM = 8, COUNT = ROWS * HEADS * HEAD_DIM, NUM_INPUTS = 3 };

static float inputs[NUM_INPUTS][COUNT], gradients[NUM_INPUTS][COUNT]; /* of q, k, v */
static float out[COUNT], dout[COUNT], lse[HEADS * ROWS];

static fdm_tensor tensor_of(void *data, int32_t ndim, int64_t *shape) {
    const fdm_data_type float32 = fdm_data_type_of(FDM_FLOAT32);
    return (fdm_tensor){.data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = float32, .shape = shape};
}

/* A direction in the space of all inputs. */
static float direction(int input, int i) { return cosf((float)(input + 5 * i)); }

/* The inputs at a distance along the direction from where they begin. */
static void place_inputs(float distance) {
    for (int input = 0; input < NUM_INPUTS; input++)
        for (int i = 0; i < COUNT; i++)
            inputs[input][i] = sinf((float)(input * COUNT + i)) + distance * direction(input, i);
}

/* The loss where a forward succeeds, NAN where it does not. */
static double loss_at(float distance, const fdm_tensors *tensors, const fdm_options *options) {
    double loss = 0;
    place_inputs(distance);
    if (fdm_attention_forward(tensors, options, NULL) != FDM_OK)
        return NAN;
    for (int i = 0; i < COUNT; i++)
        loss += (double)out[i] * (double)dout[i];
    return loss;
}

int main(void) {
    int64_t shape[4] = {1, ROWS, HEADS, HEAD_DIM}, lse_shape[3] = {1, HEADS, ROWS}; /* [B, S, H, D] and [B, H, S] */
    fdm_tensor given[NUM_INPUTS], wanted[NUM_INPUTS];
    fdm_tensor out_tensor = tensor_of(out, 4, shape), dout_tensor = tensor_of(dout, 4, shape);
    fdm_tensor lse_tensor = tensor_of(lse, 3, lse_shape);
    for (int input = 0; input < NUM_INPUTS; input++) {
        given[input] = tensor_of(inputs[input], 4, shape);
        wanted[input] = tensor_of(gradients[input], 4, shape);
    }
    for (int i = 0; i < COUNT; i++)
        dout[i] = sinf((float)(3 * i));
    fdm_options options = fdm_options_default();
    options.causal = 1;
    fdm_tensors tensors = {.struct_bytes = sizeof tensors, .q = &given[0], .k = &given[1], .v = &given[2]};
    tensors.out = &out_tensor, tensors.lse = &lse_tensor;

    const float step = 0.01f;
    const double above = loss_at(step, &tensors, &options), below = loss_at(-step, &tensors, &options);
    const double quotient = (above - below) / (2 * (double)step);
    const double loss = loss_at(0, &tensors, &options); /* leaves out and lse, which the backward reads */
    tensors.dout = &dout_tensor, tensors.dq = &wanted[0], tensors.dk = &wanted[1], tensors.dv = &wanted[2];
    const fdm_status status = isnan(loss) ? FDM_ERROR_INTERNAL : fdm_attention_backward(&tensors, &options, NULL);
    if (status != FDM_OK || isnan(quotient)) {
        fprintf(stderr, "attention_backward: %s\n", fdm_last_error());
        return 1;
    }
    double slope = 0;
    for (int input = 0; input < NUM_INPUTS; input++)
        for (int i = 0; i < COUNT; i++)
            slope += (double)gradients[input][i] * (double)direction(input, i);
    printf("attention_backward: slope by the gradients %.4f, by a difference quotient %.4f\n", slope, quotient);
    return fabs(slope - quotient) < 1e-3 * fmax(1, fabs(slope)) ? 0 : 1;
}
