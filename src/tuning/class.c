/* class.c: the words that say a device and a problem's class. docs/tuning.md lists the edges. */
#include "tuning/class.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cuda/cuda.h"

/* The least of 2^e (n + i) / n with i = 1 .. n that is not below `value`; INT64_MAX for all above a quarter of it. */
static int64_t edge_of(int64_t value, int64_t parts) {
    int64_t octave = 1;
    if (value <= parts)
        return value < 0 ? 0 : value;
    if (value > INT64_MAX / 4)
        return INT64_MAX;
    while (2 * octave < value)
        octave *= 2;
    const int64_t step = octave / parts;
    return octave + (value - octave + step - 1) / step * step;
}

int64_t tuning_length_edge(int64_t length) {
    return length <= 8 ? edge_of(length, 8) : edge_of(length, length > 4096 ? 4 : 8);
}
int64_t tuning_batch_edge(int64_t count) { return edge_of(count, 4); }

/* A window's side: -1 without one, else its octave. */
static int64_t side_edge(int64_t side) {
    return side < 0 ? -1 : side == INT64_MAX ? INT64_MAX : edge_of(side + 1, 1) - 1;
}

/* "b1hq0k1" as the axes that a mask or bias has: 1 where an axis is one for all. */
static void name_axes(char *text, size_t size, const int64_t *shape) {
    snprintf(text, size, "%d%d%d%d", shape[0] > 1, shape[1] > 1, shape[2] > 1, shape[3] > 1);
}

static void name_scores(const fdm_problem *p, char *text, size_t size) {
    char mask[8] = "no", bias[8] = "no";
    if (p->has_mask)
        name_axes(mask, sizeof mask, p->mask_shape);
    if (p->has_bias)
        name_axes(bias, sizeof bias, p->bias_shape);
    snprintf(text, size, "mask %s, bias %s %s, intervals %d%d%d, row ranges %d, blocks %d%s, sinks %d%d", mask, bias,
             p->has_bias ? fdm_dtype_name(p->bias_dtype) : "", p->has_intervals,
             p->has_intervals && !p->varlen && p->interval_batch > 1, p->has_intervals && p->interval_heads > 1,
             p->has_row_intervals ? p->row_ranges : 0, p->block_mask_size, p->has_tree ? ", tree" : "",
             p->has_sink ? p->num_sinks : 0, p->lse_without_sink);
}

/* What few problems have, "" of the others. Pages, rows and lists that a cache has besides those of the call are in no
 * class: no call reads them. */
static void name_rest(const fdm_problem *p, char *text, size_t size) {
    static const char *const lengths[] = {"", ", lengths 01", ", lengths 10", ", lengths 11"};
    char cache[112] = "";
    const int64_t new_keys = p->batch > 0 ? (p->new_rows + p->batch - 1) / p->batch : 0;
    if (p->has_cache)
        snprintf(cache, sizeof cache, ", cache of pages %d%s%s%s, new %lld, rotary %d%s", p->page_size,
                 p->ragged_pages ? " in lists" : "", p->has_cache_row ? " by rows" : "",
                 p->has_first_key ? " padded" : "", (long long)tuning_length_edge(new_keys), p->rotary_dim,
                 p->rotary_interleaved ? " pairs" : "");
    snprintf(text, size, "%s%s%s%s%s", lengths[2 * (p->has_seqused_q != 0) + (p->has_seqused_k != 0)], cache,
             p->value_in_key ? ", v in k" : "", p->dkv_float32 ? ", wide dk dv" : "",
             p->pass == FDM_BACKWARD && p->add_dkv ? ", added dk dv" : "");
}

static int name_problem(const fdm_problem *p, char *text, size_t size) {
    char scores[160], rest[160];
    const int backward = p->pass == FDM_BACKWARD;
    name_scores(p, scores, sizeof scores);
    name_rest(p, rest, sizeof rest);
    return snprintf(text, size,
                    "%s %s, D %lld %lld, group %lld, heads %lld, rows %lld, keys %lld, packed %lld %lld, causal %d, "
                    "window %lld "
                    "%lld, softcap %d, %s, low lse %d, gradients %d%d%d%d%d%d, aligned %d%d%d%d%d%s",
                    backward ? "backward" : "forward", fdm_dtype_name(p->dtype), (long long)p->head_dim,
                    (long long)p->head_dim_v, (long long)(p->heads / (p->heads_kv ? p->heads_kv : 1)),
                    (long long)tuning_batch_edge(p->batch * p->heads), (long long)tuning_length_edge(p->seqlen_q),
                    (long long)tuning_length_edge(p->seqlen_k),
                    (long long)(p->varlen ? tuning_length_edge(p->total_q / (p->batch ? p->batch : 1)) : 0),
                    (long long)(p->varlen ? tuning_length_edge(p->total_k / (p->batch ? p->batch : 1)) : 0), p->causal,
                    (long long)side_edge(p->window_left), (long long)side_edge(p->window_right), p->softcap > 0, scores,
                    p->has_lse_low, backward && p->needs_dq, backward && p->needs_dk, backward && p->needs_dv,
                    backward && p->needs_dbias, backward && p->needs_dsink, backward && p->has_dlse, p->aligned,
                    p->scores_aligned, p->q_mappable, p->keys_mappable, p->scores_mappable, rest) < (int)size;
}

fdm_status tuning_key_of(const fdm_device *device, const char *class, int32_t num_threads, char key[TUNING_KEY_BYTES]) {
    char product[64] = "";
    int32_t driver;
    const int cuda = device->id.type == FDM_CUDA;
    const fdm_status status = cuda ? cuda_device_product(device->id.index, product, sizeof product, &driver) : FDM_OK;
    if (status)
        return status;
    for (char *at = product; *at; at++)
        *at = *at < ' ' || *at > '~' || *at == '"' || *at == '\\' ? '_' : *at;
    if (cuda)
        snprintf(key, TUNING_KEY_BYTES, "%s %s, %d multiprocessors, %lld shared, %lld L2; %s", device->name, product,
                 device->num_sms, (long long)device->shared_bytes, (long long)device->l2_bytes, class);
    else
        snprintf(key, TUNING_KEY_BYTES, "%s, %d threads, caches %lld %lld %lld; %s", device->name, num_threads,
                 (long long)device->l1_bytes, (long long)device->l2_bytes, (long long)device->l3_bytes, class);
    return FDM_OK;
}

fdm_status tuning_key(const fdm_device *device, const fdm_problem *problem, int32_t num_threads,
                      char key[TUNING_KEY_BYTES]) {
    char class[640];
    return name_problem(problem, class, sizeof class)
               ? tuning_key_of(device, class, num_threads, key)
               : error_set(FDM_ERROR_INTERNAL, "the words of a problem's class have more than %zu bytes", sizeof class);
}

fdm_status tuning_maker(const fdm_device *device, char maker[TUNING_MAKER_BYTES]) {
    char product[64];
    int32_t driver = 0;
    const fdm_status status =
        device->id.type == FDM_CUDA ? cuda_device_product(device->id.index, product, sizeof product, &driver) : FDM_OK;
    if (!status)
        snprintf(maker, TUNING_MAKER_BYTES, "flash_dmattn %s, sources %016llx, driver %d, NVRTC %d", FDM_VERSION,
                 (unsigned long long)cuda_sources_hash(), driver, device->nvrtc_version);
    return status;
}
