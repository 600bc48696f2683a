/* attention_forward.c: causal attention of two heads in one call, compared with plain loops.
 * cc -std=c11 attention_forward.c $(pkg-config --cflags --libs flash_dmattn) -lm */
#include <math.h>
#include <stdio.h>

#include <flash_dmattn.h>

enum { ROWS = 48, HEADS = 2, HEAD_DIM = 8 };

static float q[ROWS][HEADS][HEAD_DIM], k[ROWS][HEADS][HEAD_DIM], v[ROWS][HEADS][HEAD_DIM], out[ROWS][HEADS][HEAD_DIM];
static float lse[HEADS][ROWS];

static void fill(float *data, int count, int seed) {
    for (int i = 0; i < count; i++)
        data[i] = sinf((float)(seed * count + i));
}

static fdm_tensor tensor_of(void *data, int32_t ndim, int64_t *shape) {
    const fdm_data_type float32 = fdm_data_type_of(FDM_FLOAT32);
    return (fdm_tensor){.data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = float32, .shape = shape};
}

/* How far one row's results are from those of loops over the keys that it sees: the sum of squared differences. */
static double squares_of(int head, int row) {
    double sum = 0, weighted[HEAD_DIM] = {0};
    for (int key = 0; key <= row; key++) {
        double score = 0;
        for (int d = 0; d < HEAD_DIM; d++)
            score += (double)q[row][head][d] * (double)k[key][head][d];
        const double weight = exp(score / sqrt(HEAD_DIM));
        sum += weight;
        for (int d = 0; d < HEAD_DIM; d++)
            weighted[d] += weight * (double)v[key][head][d];
    }
    double squares = pow((double)lse[head][row] - log(sum), 2);
    for (int d = 0; d < HEAD_DIM; d++)
        squares += pow((double)out[row][head][d] - weighted[d] / sum, 2);
    return squares;
}

int main(void) {
    int64_t shape[4] = {1, ROWS, HEADS, HEAD_DIM}, lse_shape[3] = {1, HEADS, ROWS}; /* [B, S, H, D] and [B, H, S] */
    fdm_tensor q_tensor = tensor_of(q, 4, shape), k_tensor = tensor_of(k, 4, shape), v_tensor = tensor_of(v, 4, shape);
    fdm_tensor out_tensor = tensor_of(out, 4, shape), lse_tensor = tensor_of(lse, 3, lse_shape);
    fill(&q[0][0][0], ROWS * HEADS * HEAD_DIM, 1);
    fill(&k[0][0][0], ROWS * HEADS * HEAD_DIM, 2);
    fill(&v[0][0][0], ROWS * HEADS * HEAD_DIM, 3);

    fdm_options options = fdm_options_default();
    options.causal = 1;
    const fdm_tensors tensors = {.struct_bytes = sizeof tensors,
                                 .q = &q_tensor,
                                 .k = &k_tensor,
                                 .v = &v_tensor,
                                 .out = &out_tensor,
                                 .lse = &lse_tensor};
    const fdm_status status = fdm_attention_forward(&tensors, &options, NULL);
    if (status != FDM_OK) {
        fprintf(stderr, "attention_forward: %s: %s\n", fdm_status_name(status), fdm_last_error());
        return 1;
    }

    double squares = 0;
    for (int head = 0; head < HEADS; head++)
        for (int row = 0; row < ROWS; row++)
            squares += squares_of(head, row);
    printf("attention_forward: version %s, distance from plain loops %.1e\n", fdm_version(), sqrt(squares));
    return sqrt(squares) < 1e-4 ? 0 : 1; /* 1 for NaN, too */
}
