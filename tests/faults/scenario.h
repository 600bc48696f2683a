/* scenario.h: tests that each need a process of their own, because what they look at is done once a process. */
#ifndef FDM_SCENARIO_H
#define FDM_SCENARIO_H

struct scenario {
    const char *name;
    void (*run)(void);
    const char *environment; /* "NAME=value NAME=value"; '%' is the number of the walk, '@' the tests' folder */
    int walk;                /* 1: run for n = 1, 2, ... until one sets scenario_past_the_end */
};

/* Without arguments: every scenario as one cmocka test, each in a process with its environment. With a scenario's name:
 * that one, here. The number of failures. */
int scenarios_main(int argc, char **argv, const struct scenario *scenarios, int count);

/* Set in a walk where nothing was left to fail. */
extern int scenario_past_the_end;

/* A folder of this process, removed when it ends. */
const char *scenario_folder(void);
/* Runs the body in a forked child, which must end well. */
void scenario_fork(void (*body)(void));

#endif
