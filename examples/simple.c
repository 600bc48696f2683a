/* simple.c: causal attention of three rows in one call. cc simple.c $(pkg-config --cflags --libs flash_dmattn) */
#include <stdio.h>

#include <flash_dmattn.h>

enum { ROWS = 3, HEAD_DIM = 4 };

int main(void) {
    float q_data[ROWS * HEAD_DIM], k_data[ROWS * HEAD_DIM], v_data[ROWS * HEAD_DIM], out_data[ROWS * HEAD_DIM];
    float lse_data[ROWS];
    for (int i = 0; i < ROWS * HEAD_DIM; i++) {
        q_data[i] = 0.1f * (float)i;
        k_data[i] = 0.2f * (float)(i % 5);
        v_data[i] = (float)(i + 1);
    }

    int64_t shape[4] = {1, ROWS, 1, HEAD_DIM}; /* [B, S, H, D] */
    int64_t lse_shape[3] = {1, 1, ROWS};       /* [B, H, S] */
    fdm_tensor q = {.data = q_data, .device = {FDM_CPU, 0}, .ndim = 4, .shape = shape};
    q.dtype = fdm_data_type_of(FDM_FLOAT32);
    fdm_tensor k = q, v = q, out = q, lse = q;
    k.data = k_data;
    v.data = v_data;
    out.data = out_data;
    lse.data = lse_data;
    lse.ndim = 3;
    lse.shape = lse_shape;

    fdm_options options = fdm_options_default();
    options.causal = 1;
    fdm_tensors tensors = {.struct_bytes = sizeof tensors, .q = &q, .k = &k, .v = &v, .out = &out, .lse = &lse};
    fdm_status status = fdm_attention_forward(&tensors, &options, NULL);
    if (status != FDM_OK) {
        fprintf(stderr, "%s: %s\n", fdm_status_name(status), fdm_last_error());
        return 1;
    }
    /* Row 0 sees key 0 alone, so its result is v's first row. */
    printf("out[0] = %g, lse[0] = %g\n", (double)out_data[0], (double)lse_data[0]);
    return out_data[0] == v_data[0] ? 0 : 1;
}
