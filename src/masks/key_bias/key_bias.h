/* key_bias.h: the bias of a dynamic mask, one number a key and head, and its gradient; for C and CUDA C. */
#ifndef FDM_PROBLEM_KEY_BIAS_H
#define FDM_PROBLEM_KEY_BIAS_H

#ifndef __CUDACC__
#    include <stdint.h>
#endif

struct key_bias_tensor { /* a number for each batch, key and head; strides in elements, 0 where it is the same */
    char *data;          /* NULL: not wanted */
    int64_t batch, key, head;
    int32_t dtype, reserved; /* enum fdm_dtype; on CUDA devices GPU_FLOAT32, GPU_FLOAT16 or GPU_BFLOAT16 */
};

struct key_bias_call {
    struct key_bias_tensor dt, a;   /* what a projection gives for a key and head, and a factor a head */
    struct key_bias_tensor bias;    /* written; backward: the gradient that flows in */
    struct key_bias_tensor ddt, da; /* backward, written: the gradients of dt and of a */
    const uint8_t *padding;         /* [B, S], not zero = a real key; NULL: all are */
    int64_t padding_batch, padding_key;
    int32_t batch, heads, num_keys;
    int32_t exponential; /* the bias is exp(a softplus(dt)), else a softplus(dt) */
};

#ifndef __CUDACC__
void key_bias_on_cpu(const struct key_bias_call *call);
void key_bias_backward_on_cpu(const struct key_bias_call *call);
#endif

#endif
