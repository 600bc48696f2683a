/* kernel_names.c: labels, variants and refusals of kernels, from their names and choice codes. */
#include "kernel_names.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { PARTS_MAX = 12 };

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

struct search {
    const fdm_device *device;
    const fdm_problem *problem;
    const fdm_kernel_info *kernel;
    const char *parts[PARTS_MAX]; /* of the first code, after the name */
    int32_t num_parts, count, most;
    char (*codes)[KERNEL_CODE_MAX];
};

/* Plans with a name or code; 1 when this kernel takes it. */
static int plan_named(const struct search *s, const char *name, fdm_plan *plan) {
    fdm_options options = fdm_options_default();
    options.family = s->kernel->family;
    options.kernel = name;
    return !fdm_plan_attention(s->device, s->problem, &options, plan) && strcmp(plan->kernel, s->kernel->name) == 0;
}

static void try_code(struct search *s, const char *code) {
    fdm_plan plan;
    if (s->count < s->most && strcmp(code, s->codes[0]) != 0 && plan_named(s, code, &plan) &&
        strcmp(plan.choice, code) == 0)
        memcpy(s->codes[s->count++], plan.choice, KERNEL_CODE_MAX);
}

/* The words that may end a code. */
static const char *const last_words[] = {"QRegs", "F16Acc", "Cluster2", "VinRegs"};
enum { NUM_LAST_WORDS = sizeof last_words / sizeof last_words[0] };

static int is_last_word(const char *part) {
    for (int i = 0; i < NUM_LAST_WORDS; i++)
        if (strcmp(part, last_words[i]) == 0)
            return 1;
    return 0;
}

static void vary(struct search *s, int32_t part, const char *code);

static void vary_with(struct search *s, int32_t part, const char *code, const char *text) {
    char longer[KERNEL_CODE_MAX];
    if (snprintf(longer, sizeof longer, "%s_%s", code, text) < (int)sizeof longer)
        vary(s, part + 1, longer);
}

static void vary_number(struct search *s, int32_t part, const char *code, char letter) {
    static const int stages[] = {1, 2, 3, 4, 5, 0}, k_columns[] = {64, 128, 192, 256, 320, 0},
                     v_keys[] = {16, 32, 64, 0};
    char text[16];
    for (const int *n = letter == 'S' ? stages : letter == 'K' ? k_columns : v_keys; *n; n++) {
        snprintf(text, sizeof text, "%c%d", letter, *n);
        vary_with(s, part, code, text);
    }
}

static void vary_tile(struct search *s, int32_t part, const char *code) {
    static const int rows[] = {16, 32, 64, 128, 0}, keys[] = {16, 32, 48, 64, 96, 128, 192, 256, 0};
    char text[16];
    for (const int *m = rows; *m; m++)
        for (const int *n = keys; *n; n++) {
            snprintf(text, sizeof text, "%dx%d", *m, *n);
            vary_with(s, part, code, text);
        }
}

/* Every code that starts with `code` and goes on with alternatives of the parts from this one on. */
static void vary(struct search *s, int32_t part, const char *code) {
    char longer[KERNEL_CODE_MAX];
    if (part == s->num_parts) {
        try_code(s, code);
        for (int i = 0; i < NUM_LAST_WORDS; i++)
            if (snprintf(longer, sizeof longer, "%s_%s", code, last_words[i]) < (int)sizeof longer)
                try_code(s, longer);
        return;
    }
    const char *text = s->parts[part];
    int first, second, end = 0;
    if (sscanf(text, "%dx%d%n", &first, &second, &end) == 2 && !text[end]) {
        vary_tile(s, part, code);
    } else if (strchr("SKV", text[0]) && isdigit((unsigned char)text[1])) {
        vary_number(s, part, code, text[0]);
    } else if (strcmp(text, "Swizzle") == 0 || strcmp(text, "Pad") == 0) {
        vary_with(s, part, code, "Swizzle");
        vary_with(s, part, code, "Pad");
    } else {
        vary_with(s, part, code, text);
    }
}

/* Cuts the first code into its name, which is returned, and the parts to vary. */
static const char *cut(struct search *s, char *code) {
    const char *rest = after_name(s->kernel->name, code);
    if (!rest)
        return NULL;
    char *part = code + (rest - code);
    while (part && s->num_parts < PARTS_MAX) {
        *part++ = 0;
        s->parts[s->num_parts++] = part;
        part = strchr(part, '_');
    }
    while (s->num_parts > 0 && is_last_word(s->parts[s->num_parts - 1]))
        s->num_parts--;
    return code;
}

int32_t kernel_variants(const fdm_device *device, const fdm_problem *problem, const fdm_kernel_info *kernel,
                        int32_t most, char (*codes)[KERNEL_CODE_MAX]) {
    struct search s = {.device = device, .problem = problem, .kernel = kernel, .most = most, .codes = codes};
    fdm_plan plan;
    char first[KERNEL_CODE_MAX];
    if (most < 1 || !plan_named(&s, kernel->name, &plan))
        return 0;
    memcpy(codes[s.count++], plan.choice, sizeof plan.choice);
    memcpy(first, plan.choice, sizeof first);
    const char *name = most > 1 ? cut(&s, first) : NULL;
    if (name)
        vary(&s, 0, name);
    return s.count;
}

/* ---- refusals ---- */

const char *kernel_refusal(const fdm_kernel_info *kernel) {
    const char *text = fdm_last_error();
    char lead[128];
    snprintf(lead, sizeof lead, ": %s: ", kernel->family);
    const char *clause = strstr(text, lead);
    if (!clause)
        return text;
    clause += strlen(lead);
    snprintf(lead, sizeof lead, "kernel '%s' ", kernel->name);
    return strncmp(clause, lead, strlen(lead)) == 0 ? clause + strlen(lead) : clause;
}
