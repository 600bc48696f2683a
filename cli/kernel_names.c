/* kernel_names.c: labels, variants and refusals of kernels, from their names and choice codes. */
#include "kernel_names.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* What is left of a choice code after the kernel's own name: "_S2_Pad" of MMA_SplitQ_S2_Pad and mma.split-q; NULL when
 * the code does not start with the name. */
static const char *after_name(const char *name, const char *code) {
    for (; *name; name++) {
        if (!isalnum((unsigned char)*name))
            continue;
        code += *code == '_';
        if (tolower((unsigned char)*code++) != tolower((unsigned char)*name))
            return NULL;
    }
    return *code == '_' ? code : NULL;
}

static int is_stages(const char *part, size_t length) { return length == 2 && part[0] == 'S' && isdigit(part[1]); }
static int is_word(const char *part, size_t length, const char *word) {
    return length == strlen(word) && strncmp(part, word, length) == 0;
}

void kernel_label(const fdm_kernel_info *kernel, const char *code, char *label) {
    const char *variant = strchr(kernel->name, '.');
    const char *rest = kernel->device_type == FDM_CUDA && *code ? after_name(kernel->name, code) : "";
    size_t used =
        (size_t)snprintf(label, KERNEL_LABEL_MAX, "%s(%s", kernel->family, variant ? variant + 1 : kernel->name);
    if (!rest) /* a code of another form: as it is */
        used += (size_t)snprintf(label + used, KERNEL_LABEL_MAX - used, "+%s", code);
    for (; rest && *rest && used < KERNEL_LABEL_MAX - KERNEL_CODE_MAX; rest += strcspn(rest, "_")) {
        const size_t length = strcspn(++rest, "_");
        if (is_word(rest, length, "Pad"))
            continue;
        const int stages = is_stages(rest, length);
        used += (size_t)snprintf(label + used, KERNEL_LABEL_MAX - used, stages ? "+stage" : "+");
        for (size_t i = stages ? 1 : 0; i < length; i++)
            label[used++] = (char)tolower((unsigned char)rest[i]);
    }
    snprintf(label + used, KERNEL_LABEL_MAX - used, ")");
}

/* ---- variants ---- */

int32_t kernel_variants(const fdm_device *device, const fdm_problem *problem, const fdm_kernel_info *kernel,
                        int32_t most, char (*codes)[KERNEL_CODE_MAX]) {
    fdm_plan plan = {.struct_bytes = sizeof plan};
    int32_t count = 0;
    for (int32_t n = 0; count < most && !fdm_plan_variant(device, problem, kernel->name, n, &plan); n++) {
        int32_t same = 0;
        while (same < count && strcmp(codes[same], plan.choice) != 0)
            same++;
        if (same == count)
            memcpy(codes[count++], plan.choice, KERNEL_CODE_MAX);
    }
    return count;
}

/* ---- refusals ---- */

const char *kernel_refusal(const fdm_device *device, const fdm_kernel_info *kernel) {
    const char *text = fdm_last_error();
    char lead[256];
    snprintf(lead, sizeof lead, "%s cannot run this problem on %s: ", kernel->name, device->name);
    return strncmp(text, lead, strlen(lead)) == 0 ? text + strlen(lead) : text;
}
