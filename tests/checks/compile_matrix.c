/* compile_matrix.c: compiles what the CUDA families would launch for many problems on many architectures, without a
 * device, and demands that nothing spills (beyond what a kernel's request allows) and that the assembler has no remark
 * C75xx.
 *
 * Without --full, problems are drawn so that values of each feature meet in pairs. Without --kernel, each problem is
 * compiled for the kernel that is chosen freely, for those that run only by name, and for ways to run it that no rule
 * chooses: of each problem and kernel one of them, the next each time, with --full each. --share leaves the first
 * compilation of each architecture and entry, beside its part. --seconds mixes the order. --verbose prints a hash of
 * each compilation's machine code, by which two trees are compared.
 * The compilations of one architecture and entry are a group. Its key changes with the kernel's text, the compiler and
 * each constant of each of them. --list prints a line a group: ARCHITECTURE ENTRY COUNT KEY. --known reads such lines.
 * A cache of what compiled before (FLASH_DMATTN_CACHE_DIR) is not used: each run stands for itself. */
#include <elf.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/memory.h"
#include "compile_companions.h"
#include "compile_problems.h"
#include "cuda/compiler.h"
#include "families/families.h"
#include "gpu/merge_on_device.h"
#include "masks/dense/dense_on_device.h"
#include "masks/intervals/intervals_on_device.h"
#include "masks/key_bias/key_bias_on_device.h"
#include "masks/slots/slots_on_device.h"
#include "masks/topk/topk_on_device.h"
#include "parallel/rank_rows.h"
#include "parallel/rows_on_device.h"
#include "subjects.h"

/* ---- the list of distinct compilations ---- */

struct job {
    char arch[16];
    struct cuda_kernel_request request;
    struct cuda_resources resources;
    uint64_t hash; /* of the machine code */
    fdm_status status;
    int32_t group;  /* index of groups[] */
    int32_t forced; /* only a choice code or number leads there, no rule */
    int32_t extra;  /* of another share: the first of its architecture and entry */
    char sentence[256];
};
static struct job *jobs;
static uint64_t *keys; /* of each job as it was listed: those of equal requests are equal */
static int32_t num_jobs, max_jobs, next_job;
static const char *entry_text = ""; /* only kernels whose entry holds it */
static const char *const *demands;  /* only where each of these constants is not 0, or NAME=V is V; WITH_MAX or NULL */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int same_request(const struct cuda_kernel_request *a, const struct cuda_kernel_request *b) {
    if (strcmp(a->file, b->file) != 0 || strcmp(a->entry, b->entry) != 0 || a->num_constants != b->num_constants)
        return 0;
    for (int32_t i = 0; i < a->num_constants; i++)
        if (a->constants[i].value != b->constants[i].value)
            return 0;
    return 1;
}

/* FNV-1a, of whole values too. */
static const uint64_t EMPTY_HASH = 0xcbf29ce484222325ull;
static uint64_t mixed_in(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x100000001b3ull; }

static uint64_t key_of(const char *arch, const struct cuda_kernel_request *request) {
    uint64_t key = EMPTY_HASH;
    for (; *arch; arch++)
        key = mixed_in(key, (unsigned char)*arch);
    for (const char *entry = request->entry; *entry; entry++)
        key = mixed_in(key, (unsigned char)*entry);
    for (int32_t i = 0; i < request->num_constants; i++)
        key = mixed_in(key, (uint64_t)request->constants[i].value);
    return key;
}

static int meets(const struct cuda_kernel_request *request, const char *demand) {
    const size_t length = strcspn(demand, "=");
    for (int32_t i = 0; i < request->num_constants; i++) {
        const struct cuda_constant *c = &request->constants[i];
        if (strlen(c->name) == length && strncmp(c->name, demand, length) == 0)
            return demand[length] ? c->value == atoll(demand + length + 1) : c->value != 0;
    }
    return 0;
}

static void add_job(const char *arch, const struct cuda_kernel_request *request) {
    if (!strstr(request->entry, entry_text))
        return;
    for (int32_t i = 0; i < WITH_MAX && demands[i]; i++)
        if (!meets(request, demands[i]))
            return;
    const uint64_t key = key_of(arch, request);
    for (int32_t i = 0; i < num_jobs; i++)
        if (keys[i] == key && strcmp(jobs[i].arch, arch) == 0 && same_request(&jobs[i].request, request))
            return;
    if (num_jobs == max_jobs) {
        max_jobs = max_jobs ? 2 * max_jobs : 256;
        jobs = realloc(jobs, (size_t)max_jobs * sizeof *jobs);
        keys = realloc(keys, (size_t)max_jobs * sizeof *keys);
        if (!jobs || !keys)
            exit(2);
    }
    keys[num_jobs] = key;
    jobs[num_jobs] = (struct job){.request = *request};
    snprintf(jobs[num_jobs++].arch, sizeof jobs[0].arch, "%s", arch);
}

static void add_launches(const char *arch, const struct family *family, const fdm_plan *plan) {
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    const int32_t count = family->launches(family, plan, requests);
    for (int32_t i = 0; i < count; i++)
        add_job(arch, &requests[i]);
}

/* What each CUDA family launches when it is asked. */
static void add_plan(const char *arch, const fdm_problem *problem, const char *kernel) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_options options = fdm_options_default();
    options.kernel = kernel;
    for (int32_t i = 0; families[i] && !fdm_device_from_name(arch, &device); i++) {
        options.family = families[i]->name;
        if (families[i]->launches && !fdm_plan_attention(&device, problem, &options, &plan))
            add_launches(arch, families[i], &plan);
    }
}

/* What a walk over problems lists: of the kernels what rules choose and names ask for; or other ways to run them. */
static int listing_variants, every_variant;
/* Every so many problems are of float32 tensors too: of the covering set every fourth, as those take long. */
static int32_t wide_step = 4;
/* And every so many of a scale below 0, which some forwards are compiled for. */
static int32_t negative_step = 8;

/* A way in which a kernel runs the problem, or each. */
static void add_ways(const char *arch, const struct family *family, const char *kernel, const fdm_problem *problem,
                     int32_t turn) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    int32_t count = 0;
    if (fdm_device_from_name(arch, &device))
        return;
    while (!fdm_plan_variant(&device, problem, kernel, count, &plan))
        count++;
    for (int32_t n = 0; n < count; n++)
        if ((every_variant || n == turn % count) && !fdm_plan_variant(&device, problem, kernel, n, &plan))
            add_launches(arch, family, &plan);
}

/* Of each kernel that takes the problem one way to run it, another for each problem. */
static void add_variants(const char *arch, const fdm_problem *problem, const char *kernel) {
    static int32_t turn;
    turn++;
    for (int32_t i = 0; families[i]; i++)
        for (int32_t row = 0; families[i]->launches && row < families[i]->num_kernels; row++) {
            const struct kernel_info *known = families[i]->kernel(families[i], row);
            if (known->pass == problem->pass && (!kernel || strcmp(kernel, known->name) == 0))
                add_ways(arch, families[i], known->name, problem, turn);
        }
}

static void add_problem(const char *arch, const fdm_problem *problem, const char *kernel) {
    static int32_t counts[2];
    const int32_t count = counts[listing_variants]++, before = num_jobs;
    void (*const add)(const char *, const fdm_problem *, const char *) = listing_variants ? add_variants : add_plan;
    fdm_problem wide = *problem;
    wide.dtype = wide.bias_dtype = FDM_FLOAT32;
    add(arch, problem, kernel);
    if (count % wide_step == 0)
        add(arch, &wide, kernel);
    if (count % negative_step == 0 && problem->pass == FDM_FORWARD) {
        fdm_problem negative = *problem;
        negative.softmax_scale = -problem->softmax_scale;
        add(arch, &negative, kernel);
    }
    for (int32_t i = before; i < num_jobs; i++)
        jobs[i].forced = listing_variants;
}

/* ---- groups: compilations of one architecture and entry ---- */

struct group {
    char arch[16];
    const char *entry;
    uint64_t key;
    int32_t listed; /* how many */
    int32_t known;  /* compiled before, with the same key */
    int32_t begun;  /* the share has one of them */
};
static struct group *groups;
static int32_t num_groups;

static int32_t group_of(const struct job *job) {
    for (int32_t g = 0; g < num_groups; g++)
        if (strcmp(groups[g].arch, job->arch) == 0 && strcmp(groups[g].entry, job->request.entry) == 0)
            return g;
    return num_groups;
}

static void find_groups(void) {
    groups = calloc((size_t)num_jobs + 1, sizeof *groups);
    if (!groups)
        exit(2);
    for (int32_t i = 0; i < num_jobs; i++) {
        const struct cuda_kernel_request *request = &jobs[i].request;
        const struct cuda_source *text = cuda_source_find(request->file);
        const int32_t g = jobs[i].group = group_of(&jobs[i]);
        if (g == num_groups) {
            const uint64_t begin = mixed_in(EMPTY_HASH, (uint64_t)cuda_compiler_version(0));
            snprintf(groups[g].arch, sizeof groups[g].arch, "%s", jobs[i].arch);
            groups[g].entry = request->entry;
            groups[g].key = text ? mixed_in(mixed_in(begin, text->closure[0]), text->closure[1]) : begin;
            num_groups++;
        }
        groups[g].listed++;
        groups[g].key = mixed_in(mixed_in(groups[g].key, keys[i]), (uint64_t)request->spill_bytes_max);
    }
}

static void print_groups(void) {
    for (int32_t g = 0; g < num_groups; g++)
        printf("%s %s %d %016llx\n", groups[g].arch, groups[g].entry, groups[g].listed,
               (unsigned long long)groups[g].key);
}

/* Leaves of the list what the file of --known does not name; 0 when it cannot be read. */
static int leave_out_known(const char *path) {
    FILE *file = fopen(path, "r");
    char arch[16], entry[64];
    unsigned long long key;
    if (!file)
        return 0;
    while (fscanf(file, "%15s %63s %*d %llx", arch, entry, &key) == 3)
        for (int32_t g = 0; g < num_groups; g++)
            groups[g].known |=
                key == groups[g].key && strcmp(arch, groups[g].arch) == 0 && strcmp(entry, groups[g].entry) == 0;
    const int unread = ferror(file);
    fclose(file);
    if (unread)
        return 0;
    int32_t kept = 0;
    for (int32_t i = 0; i < num_jobs; i++)
        if (!groups[jobs[i].group].known)
            jobs[kept++] = jobs[i];
    num_jobs = kept;
    return 1;
}

/* Leaves of the list what --share says. A compilation's part depends on its place alone; neighbours, which differ in
 * one feature, are spread over all parts. */
static void keep_share(struct share share) {
    uint64_t state = 1;
    int32_t kept = 0;
    for (int32_t i = 0; i < num_jobs; i++) {
        const int first = !groups[jobs[i].group].begun;
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const int own = (state >> 33) % share.parts == share.part;
        groups[jobs[i].group].begun = 1;
        if (first || own) {
            jobs[kept] = jobs[i];
            jobs[kept++].extra = !own;
        }
    }
    num_jobs = kept;
}

/* In another order, the same each time, so that any first part of the list has something of everything. */
static void mix(void) {
    uint64_t state = 1;
    for (int32_t i = num_jobs - 1; i > 0; i--) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const int32_t other = (int32_t)((state >> 33) % (uint64_t)(i + 1));
        const struct job job = jobs[i];
        jobs[i] = jobs[other];
        jobs[other] = job;
    }
}

/* Of the instructions that an ELF file holds, wherever they lie in it and whatever they are called; FNV-1a. */
static uint64_t hash_of_code(const unsigned char *file, size_t bytes) {
    uint64_t hash = EMPTY_HASH;
    Elf64_Ehdr head;
    Elf64_Shdr section;
    if (bytes < sizeof head)
        return 0;
    memcpy(&head, file, sizeof head);
    for (uint32_t i = 0; i < head.e_shnum; i++) {
        const size_t at = head.e_shoff + (size_t)i * sizeof section;
        if (at + sizeof section > bytes)
            return 0;
        memcpy(&section, file + at, sizeof section);
        if (section.sh_type != SHT_PROGBITS || !(section.sh_flags & SHF_EXECINSTR) ||
            section.sh_offset + section.sh_size > bytes)
            continue;
        for (size_t n = 0; n < section.sh_size; n++)
            hash = mixed_in(hash, file[section.sh_offset + n]);
    }
    return hash;
}

static fdm_status compile(struct job *job) {
    struct cuda_compiler compiler;
    struct cuda_binary binary;
    char target[CUDA_TARGET_BYTES];
    fdm_status status = cuda_compiler_find(0, &compiler);
    cuda_target_of(job->arch, cuda_source_find(job->request.file), target);
    if (!status)
        status = cuda_compile(&compiler, target, &job->request, &binary);
    if (status)
        return status;
    job->resources = binary.resources;
    job->hash = hash_of_code(binary.code, binary.bytes);
    memory_release(binary.code);
    return FDM_OK;
}

static time_t last_begin; /* no compilation begins later; 0: there is no such time */

static void *work(void *unused) {
    for (;;) {
        pthread_mutex_lock(&lock);
        const int over = next_job == num_jobs || (last_begin && time(NULL) > last_begin);
        const int32_t mine = over ? -1 : next_job++;
        pthread_mutex_unlock(&lock);
        if (over)
            return unused;
        struct job *job = &jobs[mine];
        job->status = compile(job);
        if (job->status)
            snprintf(job->sentence, sizeof job->sentence, "%.255s", fdm_last_error());
        if (isatty(STDERR_FILENO))
            fprintf(stderr, "\r%d of %d\033[K", mine + 1, num_jobs);
    }
}

/* Compiles the list, by a thread for each core; what no time was left for leaves the list. */
static void compile_jobs(void) {
    pthread_t threads[16];
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const int32_t count = cores < 1 ? 1 : cores > 16 ? 16 : (int32_t)cores;
    int32_t started = 0;
    for (; started < count - 1; started++)
        if (pthread_create(&threads[started], NULL, work, NULL))
            break;
    work(NULL);
    for (int32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    if (next_job < num_jobs)
        printf("the time ended before %d of them\n", num_jobs - next_job);
    num_jobs = next_job;
}

static int is_bad(const struct job *job) {
    return job->status || job->resources.spill_bytes > job->request.spill_bytes_max || job->resources.remarks > 0;
}

/* A line for each group: how many were listed, compiled, failed or spilled more than is allowed, and spilled at all;
 * and the most registers and spilled bytes. Shares add up to the whole. */
static int write_json(const char *path) {
    FILE *file = fopen(path, "a");
    if (!file)
        return 0;
    for (int32_t g = 0; g < num_groups; g++) {
        int32_t compiled = 0, failed = 0, spilled = 0, spill_max = 0, registers_max = 0;
        for (int32_t i = 0; i < num_jobs; i++) {
            const struct cuda_resources *r = &jobs[i].resources;
            if (jobs[i].group != g)
                continue;
            compiled += !jobs[i].extra;
            failed += !jobs[i].extra && is_bad(&jobs[i]);
            spilled += !jobs[i].extra && r->spill_bytes > 0;
            spill_max = r->spill_bytes > spill_max ? r->spill_bytes : spill_max;
            registers_max = r->registers > registers_max ? r->registers : registers_max;
        }
        if (compiled > 0)
            fprintf(file,
                    "{\"architecture\": \"%s\", \"entry\": \"%s\", \"key\": \"%016llx\", \"listed\": %d, "
                    "\"compiled\": %d, \"failed\": %d, \"spilled\": %d, \"spill_bytes_max\": %d, "
                    "\"registers_max\": %d}\n",
                    groups[g].arch, groups[g].entry, (unsigned long long)groups[g].key, groups[g].listed, compiled,
                    failed, spilled, spill_max, registers_max);
    }
    return fclose(file) == 0;
}

static int report(int verbose) {
    int32_t wrong = 0, most = 0, known[2] = {0}, largest[2] = {0}; /* [1]: that no rule chooses */
    for (int32_t i = 0; i < num_jobs; i++) {
        const struct job *job = &jobs[i];
        const int32_t spill = job->resources.spill_bytes;
        const int bad = is_bad(job);
        wrong += bad;
        known[job->forced] += !bad && spill > 0;
        largest[job->forced] = !bad && spill > largest[job->forced] ? spill : largest[job->forced];
        most = job->resources.registers > most ? job->resources.registers : most;
        if (!bad && !verbose)
            continue;
        printf("%s %s %s: %d registers, %d spill bytes, %d remarks, code %016llx%s%s\n ", bad ? "WRONG" : "fine",
               job->arch, job->request.entry, job->resources.registers, job->resources.spill_bytes,
               job->resources.remarks, (unsigned long long)job->hash, job->status ? ", " : "", job->sentence);
        for (int32_t c = 0; c < job->request.num_constants; c++)
            if (job->request.constants[c].value)
                printf(" %s=%lld", job->request.constants[c].name, (long long)job->request.constants[c].value);
        printf("\n");
    }
    printf("%d specialisations compiled, at most %d registers, %d spill or fail\n", num_jobs, most, wrong);
    for (int forced = 0; forced < 2; forced++)
        if (known[forced] > 0)
            printf("%d%s spill within what their kernels allow, at most %d bytes\n", known[forced],
                   forced ? " that no rule chooses" : "", largest[forced]);
    return wrong > 0 || num_jobs == 0;
}

/* Every pair of values of two features in some problem: the others are drawn. */
static void add_covering(const char *arch, uint64_t seed, const char *kernel) {
    for (int32_t a = 0; a < NUM_FEATURES; a++)
        for (int32_t b = a + 1; b < NUM_FEATURES; b++)
            for (int32_t n = 0; n < features[a].num_values * features[b].num_values; n++) {
                int32_t choice[NUM_FEATURES];
                for (int32_t f = 0; f < NUM_FEATURES; f++) {
                    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
                    /* rare features are rare, so that common ones meet without them too */
                    choice[f] = (seed >> 33) % 2 ? 0 : (int32_t)((seed >> 40) % (uint64_t)features[f].num_values);
                }
                choice[a] = n % features[a].num_values;
                choice[b] = n / features[a].num_values;
                const fdm_problem problem = problem_of(choice);
                add_problem(arch, &problem, kernel);
            }
}

/* The backward: each head dim with each way in which features meet. */
static void add_backward(const char *arch, const char *kernel) {
    for (int32_t d = 0; d < backward_head_dims(); d++)
        for (int32_t length = 0; length < 2; length++)
            for (int32_t set = 0; set < backward_sets(); set++) {
                const fdm_problem p = backward_problem(set, d, length);
                add_problem(arch, &p, kernel);
            }
}

static void add_all(const char *arch, const char *kernel) {
    int32_t choice[NUM_FEATURES] = {0};
    for (int32_t f = 0; f < NUM_FEATURES;) {
        const fdm_problem problem = problem_of(choice);
        add_problem(arch, &problem, kernel);
        for (f = 0; f < NUM_FEATURES && ++choice[f] == features[f].num_values; f++)
            choice[f] = 0;
    }
}

/* What no plan launches. */
static void add_merge(const char *arch) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    struct cuda_kernel_request request;
    for (int32_t i = 0; i < 6; i++) {
        merge_request(dtypes[i / 2], i % 2, &request);
        add_job(arch, &request);
    }
}

static void add_rank_rows(const char *arch) {
    static const int32_t units[] = {16, 4, 2, 1};
    struct cuda_kernel_request request;
    for (int32_t action = RANK_ROWS_COPY; action <= RANK_ROWS_WIDEN_BFLOAT16; action++)
        for (int32_t i = 0; i < 4; i++) {
            const int widens = action >= RANK_ROWS_WIDEN_FLOAT16;
            if (action != RANK_ROWS_COPY && units[i] != 16 && units[i] != (widens ? 2 : 4))
                continue;
            rank_rows_request(action, units[i], &request);
            add_job(arch, &request);
        }
}

static void add_masks(const char *arch) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    struct cuda_kernel_request request;
    fdm_device device = {.struct_bytes = sizeof device};
    if (fdm_device_from_name(arch, &device))
        exit(2);
    for (int32_t i = 0; i < 6 * TOPK_NUM_KERNELS; i++) {
        topk_request((enum topk_kernel)(i / 6), dtypes[i / 2 % 3], topk_cut_of(i % 2 ? TOPK_KEYS_MAX : 1).chunk,
                     &request);
        add_job(arch, &request);
    }
    interval_rules_request(&request);
    add_job(arch, &request);
    key_rules_request(&request);
    add_job(arch, &request);
    intervals_from_mask_request(&request);
    add_job(arch, &request);
    for (int32_t backward = 0; backward < 2; backward++) {
        key_bias_request(backward, key_bias_parts(backward, device.compute_major), &request);
        add_job(arch, &request);
    }
    intervals_to_mask_request(&request);
    add_job(arch, &request);
    blocks_from_lists_request(&request);
    add_job(arch, &request);
    for (int32_t i = 0; i < 6; i++) {
        create_mask_request(dtypes[i / 2], create_mask_threads(i % 2 ? INT32_MAX : 1), &request);
        add_job(arch, &request);
    }
    for (int32_t i = 0; i < 9; i++) { /* append in a small and a large block, fill */
        topk_slots_request(i >= 6, dtypes[i % 3], i < 3 ? 1 : INT32_MAX / 2, &request);
        add_job(arch, &request);
    }
}

static void add_forward(const char *arch, uint64_t seed, const char *kernel) {
    every_variant ? add_all(arch, kernel) : add_covering(arch, seed, kernel);
}

/* The kernels that run only where they are named. */
static void add_by_name(const char *arch, uint64_t seed) {
    for (int32_t i = 0; families[i]; i++)
        for (int32_t row = 0; families[i]->launches && row < families[i]->num_kernels; row++)
            if (families[i]->chosen_freely && !families[i]->chosen_freely(families[i], row))
                add_forward(arch, seed, families[i]->kernel(families[i], row)->name);
}

/* What rules choose, then the kernels that run only by name, then other ways; or the last alone. */
static void add_kernels(const char *arch, uint64_t seed, const char *kernel, int variants_alone) {
    for (listing_variants = variants_alone; listing_variants < (kernel && !variants_alone ? 1 : 2);
         listing_variants++) {
        add_backward(arch, kernel);
        add_forward(arch, seed, kernel);
        for (int32_t i = 0; !listing_variants && i < decode_problems(kernel); i++)
            add_plan(arch, &(const fdm_problem[]){decode_problem(i)}[0], "mma.decode");
        for (int32_t i = 0; !listing_variants && i < latent_problems(kernel); i++)
            add_plan(arch, &(const fdm_problem[]){latent_problem(i)}[0], "hopper.latent");
        if (!listing_variants)
            list_companions(arch, kernel, every_variant, add_job);
        if (!kernel && !listing_variants) {
            add_merge(arch);
            add_rank_rows(arch);
            add_masks(arch);
            add_by_name(arch, seed);
        }
    }
}

int compile_checks(const struct options *o) {
    static const char *const archs[] = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"};
    if (o->full)
        every_variant = wide_step = negative_step = 1;
    entry_text = o->entry ? o->entry : "";
    demands = o->with;
    for (size_t i = 0; i < sizeof archs / sizeof archs[0]; i++)
        if (!o->arch || strcmp(o->arch, archs[i]) == 0)
            add_kernels(archs[i], given_or(o->seed, 1), o->kernel, o->variants);
    find_groups();
    if (o->list) {
        print_groups();
        return 0;
    }
    const int32_t listed = num_jobs;
    if (o->known && !leave_out_known(o->known)) {
        fprintf(stderr, "fdm-checks compile: %s cannot be read\n", o->known);
        return 2;
    }
    keep_share(o->share);
    printf("%d of %d specialisations\n", num_jobs, listed);
    if (o->known && num_jobs == 0)
        return 0; /* all was compiled before as it is now */
    if (o->seconds != NOT_GIVEN) {
        mix();
        last_begin = time(NULL) + (time_t)o->seconds;
    }
    compile_jobs();
    if (o->json && !write_json(o->json)) {
        fprintf(stderr, "fdm-checks compile: %s cannot be written\n", o->json);
        return 2;
    }
    return report(o->verbose);
}
