/* cache_build.c: compiles the kernels of a set of problems for a device that need not be present. */
#include "cache_build.h"

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "json_writer.h"
#include "system/streams.h"
#include "system/system.h"

static const char help[] =
    "usage: fdm cache build --device NAME [--set common|FILE] [--json]\n\n"
    "Compiles the kernels of a set of problems into the cache's folder (FLASH_DMATTN_CACHE_DIR), by NVRTC. The device, "
    "such as sm_90, need not be present. A FILE has a problem on each line, in the words of `fdm plan`; lines that "
    "begin with # are passed over. `fdm cache pack` then makes one file of the folder.\n\n"
    "example: FLASH_DMATTN_CACHE_DIR=/tmp/kernels fdm cache build --device sm_90 --set common\n";

enum { LINE_BYTES = 512, WORDS_MAX = 64, WORKERS_MAX = 32, KERNELS_MAX = 8 };

/* Work of all threads. */
static struct {
    pthread_mutex_t lock;
    fdm_device device;
    fdm_plan *plans;
    int32_t count, next;
    fdm_status status;
    char sentence[512];
} job = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A plan for the words of one line; 0 after a complaint. */
static int add_problem(const char *text, const char *where, int line) {
    char copy[LINE_BYTES], *words[WORDS_MAX] = {"fdm plan"}, *rest = NULL;
    int count = 1;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, " \t\r\n", &rest); word; word = strtok_r(NULL, " \t\r\n", &rest)) {
        if (count == WORDS_MAX - 1)
            return complain(0, "%s:%d: more than %d words", where, line, WORDS_MAX - 2);
        words[count++] = word;
    }
    if (count == 1 || words[1][0] == '#')
        return 1;
    words[count] = NULL;
    fdm_problem problem;
    fdm_options options;
    fdm_plan *plans = realloc(job.plans, (size_t)(job.count + 1) * sizeof *plans);
    if (!plans)
        return complain(0, "no memory for %d problems", job.count + 1);
    job.plans = plans;
    if (!plan_problem(count, words, &problem, &options))
        return complain(0, "%s:%d: it is no problem: %s", where, line, text);
    plans[job.count] = (fdm_plan){.struct_bytes = sizeof *plans};
    fdm_status status = fdm_problem_validate(&problem);
    if (!status)
        status = fdm_plan_attention(&job.device, &problem, &options, &plans[job.count]);
    if (status)
        return complain(0, "%s:%d: %s", where, line, fdm_last_error());
    job.count++;
    return 1;
}

static int read_set(const char *set) {
    char line[LINE_BYTES];
    int number = 0, right = 1;
    if (strcmp(set, "common") == 0) {
        for (int i = 0; common_set[i] && right; i++)
            right = add_problem(common_set[i], "common", i + 1);
        return right;
    }
    FILE *file = system_open_text(set);
    if (!file)
        return complain(0, "the set %s cannot be read: %s", set, strerror(errno));
    while (right && fgets(line, sizeof line, file)) {
        number++;
        line[strcspn(line, "\n")] = 0;
        right = strlen(line) < sizeof line - 2 ? add_problem(line, set, number)
                                               : complain(0, "%s:%d: more than %d bytes", set, number, LINE_BYTES - 2);
    }
    fclose(file);
    return right;
}

static void *compile(void *unused) {
    for (;;) {
        fdm_kernel_resources kernels[KERNELS_MAX] = {{.struct_bytes = sizeof kernels[0]}};
        int32_t count = 0;
        pthread_mutex_lock(&job.lock);
        const int32_t n = job.status ? job.count : job.next++;
        if (n < job.count)
            progress("compiling the kernels of problem %d of %d", n + 1, job.count);
        pthread_mutex_unlock(&job.lock);
        if (n >= job.count)
            return unused;
        const fdm_status status = fdm_plan_resources(&job.plans[n], &job.device, kernels, KERNELS_MAX, &count);
        pthread_mutex_lock(&job.lock);
        if (status && !job.status) {
            job.status = status;
            snprintf(job.sentence, sizeof job.sentence, "%s", fdm_last_error());
        }
        pthread_mutex_unlock(&job.lock);
    }
}

static void compile_all(void) {
    pthread_t workers[WORKERS_MAX];
    const int32_t cpus = system_usable_cpus();
    const int wanted = cpus > WORKERS_MAX ? WORKERS_MAX : cpus;
    int started = 0;
    while (started < wanted - 1 && pthread_create(&workers[started], NULL, compile, NULL) == 0)
        started++;
    compile(NULL);
    while (started > 0)
        pthread_join(workers[--started], NULL);
    progress(NULL);
}

static void tell(int json) {
    fdm_cache_info info = {.struct_bytes = sizeof info};
    (void)fdm_cache_query(&info);
    if (!json) {
        printf("%s: the kernels of %d problems are in %s: %lld entries, %lld bytes\n", job.device.name, job.count,
               info.folder, (long long)info.num_entries, (long long)info.bytes);
        return;
    }
    struct json_writer w = {.stream = stdout};
    json_open(&w, NULL, '{');
    json_put_text(&w, "device", job.device.name);
    json_put_integer(&w, "problems", job.count);
    json_put_text(&w, "folder", info.folder);
    json_put_integer(&w, "entries", info.num_entries);
    json_put_integer(&w, "bytes", info.bytes);
    json_close(&w, '}');
    printf("\n");
}

int command_cache_build(int argc, char **argv) {
    static const struct option options[] = {{"device", required_argument, 0, 'd'},
                                            {"set", required_argument, 0, 's'},
                                            {"json", no_argument, 0, 'j'},
                                            {"help", no_argument, 0, 'h'},
                                            {0}};
    const char *device = NULL, *set = "common";
    int option, json = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1)
        switch (option) {
        case 'd': device = optarg; break;
        case 's': set = optarg; break;
        case 'j': json = 1; break;
        case 'h': fputs(help, stdout); return EXIT_FINE;
        default: return EXIT_USAGE;
        }
    if (optind < argc)
        return complain(EXIT_USAGE, "cache build takes no argument '%s'", argv[optind]);
    if (!device)
        return complain(EXIT_USAGE, "cache build needs --device, such as sm_90");
    job.device = (fdm_device){.struct_bytes = sizeof job.device};
    const fdm_status status = fdm_device_from_name(device, &job.device);
    if (status)
        return fail(status);
    if (job.device.id.type != FDM_CUDA)
        return complain(EXIT_USAGE, "--device is '%s'; kernels are compiled for CUDA devices alone", device);
    if (!read_set(set))
        return EXIT_USAGE;
    compile_all();
    if (job.status)
        return fail_with(job.status, job.sentence);
    tell(json);
    free(job.plans);
    return EXIT_FINE;
}
