/* emulated_driver.c: the pretended driver's modules, launches and memory where they are executed; see fake_state.h. */
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "emulated_launch.h"
#include "fake_state.h"
#include "state.h"

struct module {
    void *library;
    char file[64];
    uintptr_t base, end;
};

/* ---- modules ---- */

static size_t bytes_of(const void *image) {
    const Elf64_Ehdr *e = image;
    return e->e_shoff + (size_t)e->e_shnum * e->e_shentsize;
}

static uintptr_t span_of(const void *image) {
    const Elf64_Ehdr *e = image;
    const Elf64_Phdr *p = (const Elf64_Phdr *)((const char *)image + e->e_phoff);
    uintptr_t end = 0;
    for (int i = 0; i < e->e_phnum; i++)
        if (p[i].p_type == PT_LOAD && p[i].p_vaddr + p[i].p_memsz > end)
            end = p[i].p_vaddr + p[i].p_memsz;
    return end;
}

static cu_result load(cu_module module, const void *image) {
    const size_t bytes = bytes_of(image);
    const int file = memfd_create("kernel", MFD_CLOEXEC);
    struct module *m = calloc(1, sizeof *m);
    struct link_map *map;
    if (file < 0 || write(file, image, bytes) != (ssize_t)bytes)
        return INVALID_IMAGE;
    snprintf(m->file, sizeof m->file, "/proc/%d/fd/%d", (int)getpid(), file);
    m->library = dlopen(m->file, RTLD_NOW | RTLD_LOCAL);
    if (!m->library) {
        fprintf(stderr, "emulated: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    if (dlinfo(m->library, RTLD_DI_LINKMAP, &map) == 0)
        m->base = map->l_addr;
    m->end = m->base + span_of(image);
    module->executable = m;
    return 0;
}

static cu_result function(cu_function f, const char *name) {
    struct module *m = f->module->executable;
    char symbol[128];
    struct kernel *k = calloc(1, sizeof *k);
    snprintf(k->name, sizeof k->name, "%s", name);
    snprintf(symbol, sizeof symbol, "emu_enter_%s", name);
    *(void **)&k->enter = dlsym(m->library, symbol);
    snprintf(symbol, sizeof symbol, "emu_sizes_%s", name);
    k->sizes = dlsym(m->library, symbol);
    snprintf(symbol, sizeof symbol, "emu_bounds_%s", name);
    k->bounds = dlsym(m->library, symbol);
    k->file = m->file;
    k->base = m->base;
    k->end = m->end;
    if (!k->enter || !k->sizes || !k->bounds) {
        free(k);
        return NOT_FOUND;
    }
    f->kernel = k;
    return 0;
}

static cu_result launch(const struct fake_launch *l, cu_function f, void **parameters) {
    struct emulated_launch e = {.kernel = f->kernel,
                                .shared_bytes = l->shared_bytes,
                                .limit_bytes = (unsigned)f->device->shared_bytes,
                                .cluster = l->cluster,
                                .programmatic = l->programmatic,
                                .cooperative = l->cooperative,
                                .parameters = parameters};
    memcpy(e.grid, l->grid, sizeof e.grid);
    memcpy(e.block, l->block, sizeof e.block);
    if (f->kernel->bounds[0] && (int)(e.block[0] * e.block[1] * e.block[2]) > f->kernel->bounds[0])
        return INVALID_VALUE;
    return emulated_enqueue(&e);
}

/* ---- memory: its end is the end of a page, as far as an alignment of 256 allows; unreadable pages around it ---- */

enum { PAGE = 4096, ALIGNMENT = 256, FILLED = 1 << 30 }; /* larger memory is left to be made where it is touched */

static size_t mapped(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE + 2 * PAGE; }

static void *allocate(size_t bytes) {
    const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, all = mapped(rounded);
    unsigned char *pages = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED)
        return NULL;
    if (mprotect(pages + PAGE, all - 2 * PAGE, PROT_READ | PROT_WRITE)) {
        munmap(pages, all);
        return NULL;
    }
    unsigned char *memory = pages + all - PAGE - rounded;
    if (bytes <= FILLED)
        memset(memory, 0xff, rounded);
    global_add(memory, bytes);
    return memory;
}

static void release(void *memory, size_t bytes) {
    const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, all = mapped(rounded);
    global_remove(memory);
    munmap((unsigned char *)memory + rounded + PAGE - all, all);
}

static const struct fake_hooks hooks = {load, function, launch, emulated_run, allocate, release, emulated_seconds};

/* ---- settings, devices ---- */

static int64_t count_findings(void) { return device.findings; }
const char *emulated_last_finding(void);
void emulated_forget(void);
int emulated_found(const char *kind);

EXPORT struct emulated emulated = {.seed = 1,
                                   .mode = EMULATED_RANDOM,
                                   .check = 1,
                                   .findings = count_findings,
                                   .last_finding = emulated_last_finding,
                                   .begin = emulated_begin,
                                   .forget = emulated_forget,
                                   .found = emulated_found};

static long number_of(const char *name, long unset) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : unset;
}

static void read_settings(void) {
    const char *mode = getenv("EMULATED_MODE");
    emulated.seed = (uint64_t)number_of("EMULATED_SEED", 1);
    emulated.check = (int)number_of("EMULATED_CHECK", 1);
    emulated.strict = (int)number_of("EMULATED_STRICT", 0);
    emulated.unordered = (int)number_of("EMULATED_UNORDERED", 0);
    emulated.switches = (int)number_of("EMULATED_SWITCH", 0);
    emulated.banks = (int)number_of("EMULATED_BANKS", 0);
    emulated.trace = (int)number_of("EMULATED_TRACE", 0);
    if (mode && *mode)
        emulated.mode = *mode == 'e' ? EMULATED_EARLY : *mode == 'l' ? EMULATED_LATEST : EMULATED_RANDOM;
}

/* EMULATED_DEVICES=sm_80,sm_90: for the pretended driver, which wants numbers. */
static void read_devices(void) {
    static const struct {
        const char *name, *facts;
    } known[] = {{"sm_80", "8.0:166912"}, {"sm_86", "8.6:101376"},   {"sm_89", "8.9:101376"},
                 {"sm_90", "9.0:232448"}, {"sm_100", "10.0:232448"}, {"sm_120", "12.0:101376"}};
    const char *at = getenv("EMULATED_DEVICES");
    char facts[512] = "";
    while (at && *at) {
        const size_t length = strcspn(at, ",");
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
            if (strlen(known[i].name) == length && strncmp(known[i].name, at, length) == 0)
                snprintf(facts + strlen(facts), sizeof facts - strlen(facts), "%s%s:emulated %s", *facts ? "," : "",
                         known[i].facts, known[i].name);
        at += length + (at[length] == ',');
    }
    if (*facts)
        setenv("FAKE_CUDA_DEVICES", facts, 1);
}

/* Kernels find this library's functions, and the library finds the stand-in for NVRTC, which lies beside this one. */
__attribute__((constructor)) static void begin(void) {
    Dl_info own;
    char path[4096];
    struct rlimit files;
    fake_hooks = &hooks;
    read_settings();
    read_devices();
    numbers_prepare();
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    if (!dladdr((void *)(uintptr_t)begin, &own))
        return;
    dlopen(own.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
    const char *slash = strrchr(own.dli_fname, '/');
    snprintf(path, sizeof path, "%.*s/libnvrtc.so.13", slash ? (int)(slash - own.dli_fname) : 1,
             slash ? own.dli_fname : ".");
    if (!dlopen(path, RTLD_NOW | RTLD_LOCAL))
        fprintf(stderr, "emulated: %s\n", dlerror());
}
