/* common.c: complaints, option values, medians and memory of the command line tool. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "system/system.h"

int complain(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("fdm: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return code;
}

int fail_with(fdm_status status, const char *sentence) {
    return complain(status == FDM_ERROR_INVALID_ARGUMENT ? EXIT_USAGE : EXIT_WRONG, "%s", sentence);
}
int fail(fdm_status status) { return fail_with(status, fdm_last_error()); }

int parse_integer(const char *option, const char *text, int64_t least, int64_t most, int64_t *value) {
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || *end || errno || number < least || number > most)
        return complain(0, "%s is '%s'; it must be a whole number in %lld..%lld", option, text, (long long)least,
                        (long long)most);
    *value = number;
    return 1;
}

int parse_real(const char *option, const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    if (end == text || *end)
        return complain(0, "%s is '%s'; it must be a number", option, text);
    return 1;
}

int parse_window(const char *text, int64_t *left, int64_t *right) {
    char first[32];
    size_t length = strcspn(text, ",");
    if (text[length] != ',' || length >= sizeof first)
        return complain(0, "--window is '%s'; write LEFT,RIGHT, -1 for unbounded", text);
    memcpy(first, text, length);
    first[length] = 0;
    return parse_integer("--window", first, -1, INT32_MAX, left) &&
           parse_integer("--window", text + length + 1, -1, INT32_MAX, right);
}

int parse_device(const char *text, struct device_choice *choice) {
    int64_t index = 0;
    *choice = (struct device_choice){.automatic = strcmp(text, "auto") == 0, .id = {FDM_CPU, 0}};
    if (choice->automatic || strcmp(text, "cpu") == 0)
        return 1;
    if (strncmp(text, "emulated:", 9) == 0) {
        choice->id.type = FDM_CUDA;
        return use_emulated_device(text + 9);
    }
    if (strcmp(text, "cuda") != 0 && strncmp(text, "cuda:", 5) != 0)
        return complain(0, "--device is '%s'; it must be cpu, cuda, cuda:N or auto", text);
    choice->id.type = FDM_CUDA;
    if (text[4] && !parse_integer("the number in --device", text + 5, 0, INT32_MAX, &index))
        return 0;
    choice->id.index = (int32_t)index;
    return 1;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median_of(double *samples, int32_t count) {
    qsort(samples, (size_t)count, sizeof *samples, compare_doubles);
    return count % 2 ? samples[count / 2] : 0.5 * (samples[count / 2 - 1] + samples[count / 2]);
}

void *allocate(size_t bytes) { return bytes > SIZE_MAX - 64 ? NULL : system_allocate((bytes + 64) / 64 * 64); }
void release(void *memory) { system_release(memory); }

void *allocate_or_exit(size_t bytes) {
    void *memory = allocate(bytes);
    if (!memory)
        exit(complain(EXIT_WRONG, "no memory for %zu bytes", bytes));
    return memory;
}
