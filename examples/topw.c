/* topw.c: a dynamic mask: scores choose the W keys that each row sees, and attention of them is compared with loops.
 * cc -std=c11 topw.c $(pkg-config --cflags --libs flash_dmattn) -lm */
#include <math.h>
#include <stdio.h>

#include <flash_dmattn.h>

enum { ROWS = 64, HEAD_DIM = 8, WINDOW = 6 };

static float q[ROWS][HEAD_DIM], k[ROWS][HEAD_DIM], v[ROWS][HEAD_DIM], out[ROWS][HEAD_DIM], score[ROWS];
static int32_t start[ROWS], end[ROWS];

static fdm_tensor tensor_of(void *data, fdm_dtype dtype, int32_t ndim, int64_t *shape) {
    const fdm_data_type type = fdm_data_type_of(dtype);
    return (fdm_tensor){.data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = type, .shape = shape};
}

/* A row sees a key when fewer than WINDOW keys of its prefix come before that one. */
static int sees(int row, int key) {
    int before = 0;
    for (int other = 0; other <= row; other++)
        before += score[other] > score[key] || (score[other] == score[key] && other < key);
    return before < WINDOW;
}

/* The sum of squared differences of a row from loops. */
static double squares_of(int row) {
    double sum = 0, weighted[HEAD_DIM] = {0}, squares = 0;
    for (int key = 0; key <= row; key++) {
        double product = 0;
        if (!sees(row, key))
            continue;
        for (int d = 0; d < HEAD_DIM; d++)
            product += (double)q[row][d] * (double)k[key][d];
        const double weight = exp(product / sqrt(HEAD_DIM) + (double)score[key]);
        sum += weight;
        for (int d = 0; d < HEAD_DIM; d++)
            weighted[d] += weight * (double)v[key][d];
    }
    for (int d = 0; d < HEAD_DIM; d++)
        squares += pow((double)out[row][d] - weighted[d] / sum, 2);
    return squares;
}

int main(void) {
    int64_t shape[4] = {1, ROWS, 1, HEAD_DIM}, of_keys[3] = {1, 1, ROWS}, of_bias[4] = {1, 1, 1, ROWS};
    fdm_tensor q_tensor = tensor_of(q, FDM_FLOAT32, 4, shape), k_tensor = tensor_of(k, FDM_FLOAT32, 4, shape);
    fdm_tensor v_tensor = tensor_of(v, FDM_FLOAT32, 4, shape), out_tensor = tensor_of(out, FDM_FLOAT32, 4, shape);
    fdm_tensor bias = tensor_of(score, FDM_FLOAT32, 4, of_bias); /* the scores choose keys, and are added as a bias */
    fdm_tensor starts = tensor_of(start, FDM_INT32, 3, of_keys), ends = tensor_of(end, FDM_INT32, 3, of_keys);
    for (int i = 0; i < ROWS; i++) {
        score[i] = sinf((float)(i * i));
        for (int d = 0; d < HEAD_DIM; d++) {
            q[i][d] = sinf((float)(i + 3 * d));
            k[i][d] = cosf((float)(2 * i + d));
            v[i][d] = sinf((float)(5 * i - d));
        }
    }

    fdm_tensors tensors = {.struct_bytes = sizeof tensors, .q = &q_tensor, .k = &k_tensor, .v = &v_tensor};
    tensors.bias = &bias, tensors.interval_start = &starts, tensors.interval_end = &ends, tensors.out = &out_tensor;
    fdm_options options = fdm_options_default();
    options.causal = 1;
    if (fdm_topk_intervals(&bias, NULL, WINDOW, ROWS, &starts, &ends, NULL, 0, NULL) != FDM_OK ||
        fdm_attention_forward(&tensors, &options, NULL) != FDM_OK) {
        fprintf(stderr, "topw: %s\n", fdm_last_error());
        return 1;
    }
    double squares = 0;
    for (int row = 0; row < ROWS; row++)
        squares += squares_of(row);
    printf("topw: %d of %d keys a row, distance from plain loops %.1e\n", WINDOW, ROWS, sqrt(squares));
    return sqrt(squares) < 1e-4 ? 0 : 1; /* 1 for NaN, too */
}
