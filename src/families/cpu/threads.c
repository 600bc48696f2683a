/* threads.c: stub, serial. */
#include "threads.h"

int32_t threads_available(void) { return 1; }
int32_t threads_for(int32_t wanted, const fdm_executor *executor) {
    (void)wanted;
    (void)executor;
    return 1;
}
void threads_run(const fdm_executor *executor, int32_t n, void (*body)(void *, int32_t), void *argument) {
    (void)executor;
    for (int32_t i = 0; i < n; i++)
        body(argument, i);
}
void threads_shutdown(void) {}
