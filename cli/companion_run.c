/* companion_run.c: device, buffers and time of the companion operations' benchmarks. */
#include "companion_run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "json_writer.h"

int companion_read_options(const struct companion_command *command, void *request, int argc, char **argv) {
    int option;
    optind = 1;
    while ((option = getopt_long(argc, argv, "", command->options, NULL)) != -1) {
        if (option == command->help_option) {
            fputs(command->help, stdout);
            return EXIT_FINE;
        }
        if (option == '?' || !command->set(request, option, optarg))
            return EXIT_USAGE;
    }
    return optind < argc ? complain(EXIT_USAGE, "%s takes no argument '%s'", command->operation, argv[optind]) : -1;
}

int companion_device(const char *text, int plan_only, fdm_device *device) {
    device->struct_bytes = sizeof *device;
    struct device_choice choice;
    if (plan_only && strncmp(text, "cuda", 4) != 0)
        return fdm_device_from_name(text, device) == FDM_OK || complain(0, "%s", fdm_last_error());
    if (!parse_device(text, &choice))
        return 0;
    if (choice.automatic)
        choice.id = (fdm_device_id){FDM_CUDA, 0};
    if (choice.id.type != FDM_CUDA)
        return complain(0, "--device is '%s'; the companions run on CUDA devices: cuda, cuda:N", text);
    return fdm_device_query(FDM_CUDA, choice.id.index, device) == FDM_OK || complain(0, "%s", fdm_last_error());
}

/* ---- buffers ---- */

/* About normal: three uniform numbers of a fixed sequence. */
static double random_normal(uint64_t *state) {
    double sum = 0;
    for (int i = 0; i < 3; i++) {
        *state = *state * 6364136223846793005ull + 1442695040888963407ull;
        sum += (double)(*state >> 40) / (1 << 23) - 1;
    }
    return sum;
}

static void set(struct companion_buffer *b, int64_t i, double value) {
    if (b->dtype == FDM_FLOAT32)
        ((float *)b->host)[i] = (float)value;
    else
        ((uint16_t *)b->host)[i] =
            b->dtype == FDM_FLOAT16 ? float_to_float16((float)value) : float_to_bfloat16((float)value);
}

double companion_get(const struct companion_buffer *b, int64_t index) {
    if (b->dtype == FDM_FLOAT32)
        return ((const float *)b->host)[index];
    const uint16_t bits = ((const uint16_t *)b->host)[index];
    return b->dtype == FDM_FLOAT16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

void companion_make(struct companion_buffer *b, fdm_device_id device, fdm_dtype dtype, int32_t ndim,
                    const int64_t *shape, double size) {
    enum { PERIOD = 1 << 20 }; /* of the random numbers, which are made on one processor */
    uint64_t state = (uint64_t)(uintptr_t)b;
    *b = (struct companion_buffer){.elements = 1, .dtype = dtype};
    for (int32_t i = 0; i < ndim; i++)
        b->elements *= b->shape[i] = shape[i];
    b->bytes = b->elements * fdm_dtype_bytes(dtype);
    b->host = allocate_or_exit((size_t)b->bytes + 64);
    memset(b->host, 0xff, (size_t)b->bytes);
    for (int64_t i = 0; size > 0 && i < b->elements && i < PERIOD; i++)
        set(b, i, size * random_normal(&state));
    for (int64_t at = PERIOD; size > 0 && at < b->elements; at += PERIOD) {
        const int64_t left = b->elements - at, bytes = fdm_dtype_bytes(dtype);
        memcpy((char *)b->host + at * bytes, b->host, (size_t)((left < PERIOD ? left : PERIOD) * bytes));
    }
    void *there = NULL;
    if (fdm_memory_allocate(device, (size_t)b->bytes, &there) ||
        fdm_memory_copy(there, device, b->host, (fdm_device_id){FDM_CPU, 0}, (size_t)b->bytes))
        exit(complain(EXIT_WRONG, "%s", fdm_last_error()));
    b->tensor = (fdm_tensor){
        .data = there, .device = device, .ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = b->shape};
}

void companion_release(struct companion_buffer *b) {
    fdm_memory_release(b->tensor.device, b->tensor.data);
    release(b->host);
}

/* ---- time ---- */

/* The mean of `count` calls. */
static fdm_status sample(fdm_timer *timer, fdm_status (*call)(void *), void *context, int64_t count, double *seconds) {
    fdm_status status = fdm_timer_start(timer, NULL);
    for (int64_t i = 0; !status && i < count; i++)
        status = call(context);
    if (!status && !(status = fdm_timer_stop(timer, NULL, seconds)))
        *seconds /= (double)count;
    return status;
}

static fdm_status measure(fdm_device_id device, fdm_status (*call)(void *context), void *context, int32_t iters,
                          struct companion_time *time) {
    fdm_timer *timer = NULL;
    double *seconds = allocate_or_exit((size_t)iters * sizeof *seconds), once = 0;
    fdm_status status = call(context); /* compiles */
    if (!status)
        status = fdm_timer_create(device, &timer);
    for (int warm = 0; !status && warm < 2; warm++)
        status = sample(timer, call, context, 3, &once);
    const int64_t count = emulated_device() || once <= 0 || once > 1e-3 ? 1 : (int64_t)(1e-3 / once) + 1;
    for (int32_t i = 0; !status && i < iters; i++)
        status = sample(timer, call, context, count, &seconds[i]);
    if (!status) {
        time->median = median_of(seconds, iters);
        time->quartile_low = seconds[iters / 4];
        time->quartile_high = seconds[iters - 1 - iters / 4];
    }
    fdm_timer_release(timer);
    release(seconds);
    return status;
}

fdm_status companion_time_plan(fdm_device_id device, const fdm_companion_choice *choice,
                               fdm_status (*call)(void *context), void *context, void **workspace, int32_t iters,
                               struct companion_row *row) {
    const size_t bytes = (size_t)choice->workspace_bytes;
    fdm_status status;
    *workspace = NULL;
    if (bytes && (status = fdm_memory_allocate(device, bytes, workspace)))
        return status;
    status = measure(device, call, context, iters, &row->time);
    fdm_memory_release(device, *workspace);
    memcpy(row->kernel, choice->kernel, sizeof row->kernel);
    memcpy(row->choice, choice->choice, sizeof row->choice);
    return status;
}

/* ---- output ---- */

static void print_row(const struct companion_row *row, const char *unit, double *best) {
    printf("%s: time:%.6fms, %s:%.2f (%+.2f%%)\n", row->kernel, row->time.median * 1e3, unit, row->rate,
           *best > 0 ? 100 * (row->rate / *best - 1) : 0.0);
    *best = fmax(*best, row->rate);
    fflush(stdout);
}

static int compare_rows(const void *a, const void *b) {
    const double x = ((const struct companion_row *)a)->time.median, y = ((const struct companion_row *)b)->time.median;
    return (x > y) - (x < y);
}

static void print_table(struct companion_row *rows, int32_t count, const char *unit, int has_errors) {
    qsort(rows, (size_t)count, sizeof *rows, compare_rows);
    printf("\n%-24s %-36s %12s %21s %10s%s\n", "kernel", "choice", "median ms", "quartiles", unit,
           has_errors ? "  worst row" : "");
    for (int32_t i = 0; i < count; i++) {
        const struct companion_row *r = &rows[i];
        printf("%-24s %-36s %12.4f %10.4f %10.4f %10.2f", r->kernel, r->choice, r->time.median * 1e3,
               r->time.quartile_low * 1e3, r->time.quartile_high * 1e3, r->rate);
        has_errors ? printf("  %.2e\n", r->worst_error) : printf("\n");
    }
}

static void print_json(const struct companion_row *rows, int32_t count, const char *unit, int has_errors) {
    struct json_writer w = {.stream = stdout};
    json_open(&w, NULL, '[');
    for (int32_t i = 0; i < count; i++) {
        const struct companion_row *r = &rows[i];
        json_open(&w, NULL, '{');
        json_put_text(&w, "kernel", r->kernel);
        json_put_text(&w, "choice", r->choice);
        json_put_real(&w, "seconds", r->time.median);
        json_put_real(&w, "seconds_quartile_low", r->time.quartile_low);
        json_put_real(&w, "seconds_quartile_high", r->time.quartile_high);
        json_put_real(&w, unit, r->rate);
        if (has_errors)
            json_put_real(&w, "worst_row_error", r->worst_error);
        json_close(&w, '}');
    }
    json_close(&w, ']');
    puts("");
}

int companion_bench(const struct companion_bench *b) {
    enum { KERNELS_MAX = 16 };
    static struct companion_row rows[KERNELS_MAX];
    const char *name, *description;
    int32_t count = 0;
    double best = 0;
    int wrong = 0;
    for (int32_t i = 0; count < KERNELS_MAX && b->kernel(i, &name, &description) == FDM_OK; i++) {
        if (b->only && strcmp(b->only, name) != 0)
            continue;
        const fdm_status status = b->time(b->context, name, &rows[count]);
        if (status == FDM_ERROR_UNSUPPORTED)
            continue;
        if (status)
            return fail(status);
        wrong |= b->check && !(rows[count].worst_error <= b->limit);
        if (!b->json)
            print_row(&rows[count], b->unit, &best);
        count++;
    }
    if (count == 0)
        return complain(EXIT_WRONG, "no kernel of %s%s%s takes the %s: %s", b->operation, b->only ? " named " : "",
                        b->only ? b->only : "", b->subject, fdm_last_error());
    b->json ? print_json(rows, count, b->json_unit, b->check) : print_table(rows, count, b->unit, b->check);
    return wrong ? complain(EXIT_WRONG, "a kernel differs from float64") : EXIT_FINE;
}

void companion_print_choice(const char *device, const fdm_companion_choice *choice, int explain, int json) {
    if (json) {
        struct json_writer w = {.stream = stdout};
        json_open(&w, NULL, '{');
        json_put_text(&w, "device", device);
        json_put_text(&w, "kernel", choice->kernel);
        json_put_text(&w, "choice", choice->choice);
        json_put_integer(&w, "shared_bytes", choice->shared_bytes);
        json_put_integer(&w, "workspace_bytes", choice->workspace_bytes);
        json_put_text(&w, "reason", choice->reason);
        json_close(&w, '}');
        puts("");
        return;
    }
    printf("%s: kernel %s, choice %s\n  shared     %lld bytes\n  workspace  %lld bytes\n", device, choice->kernel,
           choice->choice, (long long)choice->shared_bytes, (long long)choice->workspace_bytes);
    if (!explain) {
        printf("  because    %s\n", choice->reason);
        return;
    }
    const char *reason = choice->reason;
    for (int step = 1; *reason; step++) {
        const char *end = strstr(reason, "; ");
        const int length = end ? (int)(end - reason) : (int)strlen(reason);
        printf("  %d. %.*s\n", step, length, reason);
        reason += length + (end ? 2 : 0);
    }
}
