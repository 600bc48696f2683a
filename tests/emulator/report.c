/* report.c: places in kernels' texts, and one sentence for each finding. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulated_launch.h"
#include "state.h"

enum { PLACES_MAX = 1 << 16, CODE = 1u << 31, TOLD_MAX = 512, TOLD_EACH = 1 };

static struct {
    const char *file;
    int line;
} places[PLACES_MAX];
static uint16_t buckets[PLACES_MAX];
static uint32_t num_places = 1;

place place_of(const char *file, int line) {
    uint32_t hash = ((uint32_t)((uintptr_t)file >> 4) * 2654435761u ^ (uint32_t)line * 40503u) % PLACES_MAX;
    for (;; hash = (hash + 1) % PLACES_MAX) {
        const uint16_t n = buckets[hash];
        if (n && places[n].file == file && places[n].line == line)
            return n;
        if (!n)
            break;
    }
    if (num_places == PLACES_MAX / 2) { /* kernels come and go: begin anew */
        memset(buckets, 0, sizeof buckets);
        num_places = 1;
        return place_of(file, line);
    }
    places[num_places].file = file;
    places[num_places].line = line;
    buckets[hash] = (uint16_t)num_places;
    return num_places++;
}

place place_of_code(uintptr_t code) {
    const struct thread *t = CURRENT;
    return t ? CODE | (uint32_t)(code - t->block->cluster->grid->kernel->base) : 0;
}

static const char *short_name(const char *file) {
    if (strncmp(file, "./", 2) == 0)
        file += 2;
    return file;
}

/* From the debug information of the kernel's shared object. */
static void ask_for_line(const char *file, uint32_t offset, char *text, size_t size) {
    char command[512], line[400] = "";
    snprintf(command, sizeof command, "addr2line -e %s 0x%x 2>/dev/null", file, offset - 1);
    FILE *pipe = popen(command, "r");
    if (pipe && !fgets(line, sizeof line, pipe))
        line[0] = 0;
    if (pipe)
        pclose(pipe);
    line[strcspn(line, "\n (")] = 0;
    const char *at = strstr(line, "/./");
    const char *name = at ? at + 3 : line;
    if (!*name || *name == '?')
        snprintf(text, size, "instruction 0x%x", offset);
    else
        snprintf(text, size, "%s", name);
}

const char *place_text(place at) {
    static char texts[4][420];
    static unsigned turn;
    char *text = texts[turn++ % 4];
    const struct thread *t = CURRENT;
    if (at & CODE && t)
        ask_for_line(t->block->cluster->grid->kernel->file, at & ~CODE, text, sizeof texts[0]);
    else if (at && at < num_places)
        snprintf(text, sizeof texts[0], "%s:%d", short_name(places[at].file), places[at].line);
    else
        snprintf(text, sizeof texts[0], "an unknown line");
    return text;
}

const char *thread_text(const struct thread *t) {
    static char texts[4][80];
    static unsigned turn;
    char *text = texts[turn++ % 4];
    const struct emu_dim b = t->block->index;
    snprintf(text, sizeof texts[0], "block (%u,%u,%u) thread %u", b.x, b.y, b.z, t->number);
    return text;
}

const char *component_text(const struct cluster *c, uint32_t component) {
    static char texts[4][80];
    static unsigned turn;
    char *text = texts[turn++ % 4];
    const unsigned threads = c->blocks[0]->num_threads;
    if (component < c->num_blocks * threads) {
        if (c->num_blocks > 1)
            snprintf(text, sizeof texts[0], "thread %u of block %u of the cluster", component % threads,
                     component / threads);
        else
            snprintf(text, sizeof texts[0], "thread %u", component);
        return text;
    }
    const uint32_t agent = (component - c->num_blocks * threads) % NUM_AGENTS;
    if (agent < MBARRIERS_MAX)
        snprintf(text, sizeof texts[0], "TMA");
    else if (agent < AGENT_BULK && c->grid->tensor_group)
        snprintf(text, sizeof texts[0], "tcgen05.mma of warp %u", agent - AGENT_PRODUCTS);
    else if (agent < AGENT_BULK)
        snprintf(text, sizeof texts[0], "wgmma of warpgroup %u", (agent - AGENT_PRODUCTS) / 4);
    else if (agent >= AGENT_TENSOR)
        snprintf(text, sizeof texts[0], "tcgen05.%s of warp %u", agent % 2 == AGENT_TENSOR % 2 ? "ld" : "st",
                 (agent - AGENT_TENSOR) / 2);
    else
        snprintf(text, sizeof texts[0], "a bulk copy from shared memory");
    return text;
}

/* ---- findings ---- */

static struct {
    char kernel[64];
    const char *kind;
    place at;
    int count;
} told[TOLD_MAX];
static int num_told;
static char last[1200];

const char *emulated_last_finding(void) { return last; }
void emulated_forget(void) {
    num_told = 0;
    last[0] = 0;
    device.findings = 0;
}
int emulated_found(const char *kind) {
    int found = 0;
    for (int i = 0; i < num_told; i++)
        found += strcmp(told[i].kind, kind) == 0 ? told[i].count : 0;
    return found;
}
int emulated_quiet(void) { return emulated.quiet; }

/* Of one kind, kernel and line one is told, and all are counted. */
static int told_before(const char *kernel, const char *kind, place at) {
    for (int i = 0; i < num_told; i++)
        if (told[i].at == at && told[i].kind == kind && strcmp(told[i].kernel, kernel) == 0)
            return told[i].count++ >= TOLD_EACH;
    if (num_told == TOLD_MAX)
        num_told = 0;
    snprintf(told[num_told].kernel, sizeof told[0].kernel, "%.63s", kernel);
    told[num_told].kind = kind;
    told[num_told].at = at;
    told[num_told++].count = 1;
    return 0;
}

void emu_print(const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "%s: ", thread_text(CURRENT));
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}

void finding(const char *kind, place at, const char *format, ...) {
    static const char *const modes[] = {"early", "latest", "random"};
    char sentence[700];
    const struct thread *t = CURRENT;
    const char *kernel = t ? t->block->cluster->grid->kernel->name : "?";
    device.findings++;
    if (told_before(kernel, kind, at))
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    snprintf(last, sizeof last, "FOUND %s: %s (kernel %s at %s, %s, seed %llu, mode %s)", kind, sentence, kernel,
             place_text(at), t ? thread_text(t) : "no thread", (unsigned long long)emulated.seed, modes[emulated.mode]);
    if (!emulated.quiet)
        fprintf(stderr, "%s\n", last);
}
