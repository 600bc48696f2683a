/* banks.c: counts conflicts of shared-memory banks on request, by kernel and line.
 *
 * 32 banks of four bytes; an instruction of a warp needs one turn for each different word of its fullest bank. Eight
 * lanes are served together where each moves 16 bytes, sixteen where 8 (measured by many; not in the PTX manual). Lanes
 * come to an instruction one after the other here: an instruction ends when one of them comes to its line again. */
#include <stdio.h>
#include <string.h>

#include "emulated_launch.h"
#include "state.h"

enum { LINES_MAX = 256, OPEN_MAX = 4, BANKS = 32 };

struct open_access {
    place at;
    uint32_t lanes, bytes;
    uint32_t address[LANES];
};
static struct open_access open_accesses[SLOTS_MAX * CLUSTER_MAX * WARPS_MAX][OPEN_MAX];

static struct line {
    char kernel[64], where[160];
    place at;
    uint64_t instructions, turns, least;
} lines[LINES_MAX];
static int num_lines;

static unsigned turns_of(const struct open_access *o, uint32_t lanes) {
    uint32_t words[BANKS][LANES * 4];
    unsigned count[BANKS] = {0}, most = 0;
    for (uint32_t m = lanes; m; m &= m - 1) {
        const uint32_t first = o->address[__builtin_ctz(m)] / 4,
                       last = (o->address[__builtin_ctz(m)] + o->bytes - 1) / 4;
        for (uint32_t word = first; word <= last; word++) {
            const unsigned bank = word % BANKS;
            unsigned i = 0;
            while (i < count[bank] && words[bank][i] != word)
                i++;
            if (i == count[bank])
                words[bank][count[bank]++] = word;
            most = count[bank] > most ? count[bank] : most;
        }
    }
    return most;
}

static struct line *line_of(place at, const char *kernel) {
    for (int i = 0; i < num_lines; i++)
        if (lines[i].at == at && strcmp(lines[i].kernel, kernel) == 0)
            return &lines[i];
    if (num_lines == LINES_MAX)
        return NULL;
    struct line *l = &lines[num_lines++];
    *l = (struct line){.at = at};
    snprintf(l->kernel, sizeof l->kernel, "%.63s", kernel);
    snprintf(l->where, sizeof l->where, "%.159s", place_text(at));
    return l;
}

static void finish(struct open_access *o) {
    const unsigned together = o->bytes == 16 ? 8 : o->bytes == 8 ? 16 : 32;
    struct line *l = CURRENT ? line_of(o->at, CURRENT->block->cluster->grid->kernel->name) : NULL;
    for (unsigned from = 0; l && from < LANES; from += together) {
        const uint32_t part = o->lanes & (together == 32 ? ~0u : ((1u << together) - 1) << from);
        if (!part)
            continue;
        l->turns += turns_of(o, part);
        l->least++;
    }
    if (l)
        l->instructions++;
    o->lanes = 0;
}

void banks_note(const struct thread *t, uint32_t address, uint32_t bytes, place at) {
    if (!emulated_settings_now.banks)
        return;
    const struct cluster *c = t->block->cluster;
    struct open_access *open = open_accesses[(c->slot * CLUSTER_MAX + t->block->rank) * WARPS_MAX + t->warp->number];
    struct open_access *mine = NULL, *unused = NULL;
    for (int i = 0; i < OPEN_MAX && !mine; i++) {
        if (open[i].lanes && open[i].at == at && open[i].bytes == bytes)
            mine = &open[i];
        else if (!open[i].lanes)
            unused = &open[i];
    }
    if (mine && mine->lanes >> t->lane & 1)
        finish(mine);
    if (!mine && !unused) {
        finish(&open[0]);
        unused = &open[0];
    }
    mine = mine ? mine : unused;
    mine->at = at;
    mine->bytes = bytes;
    mine->lanes |= 1u << t->lane;
    mine->address[t->lane] = address;
    if (mine->lanes == ~0u)
        finish(mine);
}

void banks_report(void) {
    for (int i = 0; i < num_lines; i++)
        if (lines[i].turns > lines[i].least)
            fprintf(stderr, "banks: %s at %s: %llu instructions of a warp, %llu turns where %llu would do\n",
                    lines[i].kernel, lines[i].where, (unsigned long long)lines[i].instructions,
                    (unsigned long long)lines[i].turns, (unsigned long long)lines[i].least);
    num_lines = 0;
    memset(open_accesses, 0, sizeof open_accesses);
}
