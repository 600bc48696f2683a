/* text.h: a kernel's text as the host's compiler takes it (text.c), and the texts that it includes. */
#ifndef FDM_EMULATOR_TEXT_H
#define FDM_EMULATOR_TEXT_H

/* The text with the same lines; to be released with free(). */
char *text_rewrite(const char *text);

/* prelude.h, emulator.h and the stand-ins of src/cuda/ptx, made by embed_texts.py. */
struct embedded_text {
    const char *name, *text;
};
extern const struct embedded_text embedded_texts[];
extern const int num_embedded_texts;

#endif
