/* tune_problems.h: the problems of `fdm tune`, from its words and from files of them. */
#ifndef FDM_CLI_TUNE_PROBLEMS_H
#define FDM_CLI_TUNE_PROBLEMS_H

#include "flash_dmattn.h"

enum { TUNE_TEXT_BYTES = 512 };
enum tune_operation { TUNE_ATTENTION, TUNE_GEMM, TUNE_SOFTMAX };
struct tune_problem {
    enum tune_operation operation;
    fdm_problem problem;
    fdm_gemm_problem gemm; /* of the operation's */
    fdm_softmax_problem softmax;
    int64_t window;             /* W of top-W, 0 = not said */
    char text[TUNE_TEXT_BYTES]; /* the words that say it */
};
struct tune_problems {
    struct tune_problem *list;
    int32_t count;
};

/* Words as of `fdm plan`, or of `fdm plan --op OP` from --op on. 1, or 0 after a complaint that begins with `where`. */
int tune_add_words(struct tune_problems *problems, const char *text, const char *where);
/* A problem on each line: such words, or an object of JSON whose keys are the options' names, true for those without a
 * value. Lines that are empty or begin with # are passed over. */
int tune_read_file(struct tune_problems *problems, const char *path);

#endif
