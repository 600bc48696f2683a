/* kernel_name.h: names that kernels had in older libraries, and the kernels that a text on a command line chooses. */
#ifndef FDM_KERNEL_NAME_H
#define FDM_KERNEL_NAME_H

#include <string.h>

#include "flash_dmattn.h"

/* The name that a kernel has today, of a name that it may have had in an older library; else `name`. */
static inline const char *kernel_current_name(const char *name) {
    static const char *const renamed[][2] = {{"hopper.wide", "hopper.backward_2pass"},
                                             {"mma.wide", "mma.forward_d1024"}};
    for (size_t i = 0; i < sizeof renamed / sizeof renamed[0]; i++)
        if (strcmp(name, renamed[i][0]) == 0)
            return renamed[i][1];
    return name;
}

/* Whether `word` holds the text; of a text with '*', which stands for any characters, whether it is the whole word. */
static inline int kernel_text_fits(const char *text, const char *word) {
    const char *star = NULL, *at = word;
    if (!strchr(text, '*'))
        return strstr(word, text) != NULL;
    while (*word)
        if (*text == '*')
            star = ++text, at = word;
        else if (*text == *word)
            text++, word++;
        else if (star)
            text = star, word = ++at;
        else
            return 0;
    return text[strspn(text, "*")] == 0;
}

/* Whether the text chooses the kernel `name`: where it is a kernel's name, today's or an older one, that kernel alone;
 * else all whose names it fits. NULL chooses all. */
static inline int kernel_is_chosen(const char *text, const char *name) {
    fdm_kernel_info known = {.struct_bytes = sizeof known};
    if (!text)
        return 1;
    const char *current = kernel_current_name(text);
    for (int32_t i = 0; fdm_kernel_list(i, &known) == FDM_OK; i++)
        if (strcmp(known.name, current) == 0)
            return strcmp(name, current) == 0;
    return kernel_text_fits(text, name);
}

#endif
