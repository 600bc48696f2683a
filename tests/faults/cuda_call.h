/* cuda_call.h: small attention calls on the pretended devices, and what every failed call must leave behind. */
#ifndef FDM_CUDA_CALL_H
#define FDM_CUDA_CALL_H

#include "fake_cuda.h"
#include "flash_dmattn.h"

/* The pretended driver and compiler; fail the test where they are not what was loaded. */
const struct fake_cuda *fake_driver(void);
const struct fake_nvrtc *fake_compiler(void);
/* Puts the pretended compiler where it is looked for, and the cache of kernels into the scenario's folder. */
void use_fake_compiler(void);
void use_fresh_cache(void);
/* The same for a file of the test's choice: a link to `target` under the compiler's name. */
void install_compiler(const char *target, int major);

/* One kernel; a block mask and a kernel; two kernels, the second launched early; one kernel that may have clusters.
 */
enum cuda_call_kind { CALL_FORWARD, CALL_MASKED, CALL_DECODE, CALL_WIDE, NUM_CALL_KINDS };
struct cuda_call {
    fdm_device_id device;
    void *memory; /* of all tensors */
    size_t bytes;
    int64_t q_shape[4], k_shape[4], lse_shape[3], mask_shape[4];
    fdm_tensor q, k, v, out, lse, mask, dq, dk, dv;
    fdm_tensors tensors;
    fdm_options options;
};
/* Allocates the tensors on the device; to be released in any case. */
fdm_status cuda_call_make(struct cuda_call *call, enum cuda_call_kind kind, int32_t device);
fdm_status cuda_call_run(struct cuda_call *call, void *stream);
/* The backward of the call's tensors; what flows in is out. */
fdm_status cuda_call_run_backward(struct cuda_call *call, fdm_plan *plan);
/* Of the workspace that the last run was lent; a status that the call itself does not see. */
fdm_status cuda_call_workspace_status(void);
void cuda_call_release(struct cuda_call *call);
/* All three. */
fdm_status cuda_call_once(enum cuda_call_kind kind, int32_t device, void *stream);

/* Gets a kernel that no other number gives: the pretended compiler takes any constant. */
fdm_status get_kernel(int32_t device, int64_t number);
/* Files of the cache; `path` receives the last one's. */
int count_entries(char *path, size_t size);

/* The last call's status and one clear sentence that has `words` in it. */
void assert_refused(fdm_status status, fdm_status wanted, const char *words);
void assert_sentence(void);
/* Attention on the CPU gives the right numbers. */
void assert_cpu_works(void);

#endif
