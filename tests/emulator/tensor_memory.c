/* tensor_memory.c: the allocation of tensor memory, and its loads and stores. */
#include "tensor_memory.h"

#include <stdlib.h>
#include <string.h>

#include "emulated_launch.h"

static const uint32_t MARK = 0x7fc0dead;
static const char *const for_columns = "tcgen05.alloc: columns, or the other block of the pair";
static const char *const for_the_pair = "tcgen05.dealloc: the other block of the pair";

struct tensor *tensor_of(struct block *b) {
    if (!b->tensor) {
        b->tensor = calloc(1, sizeof *b->tensor);
        b->tensor->block = b;
        b->tensor->least = TENSOR_COLUMNS;
    }
    b->tensor->used = 1;
    return b->tensor;
}

static void forget_moves(struct tensor *t) {
    for (int w = 0; w < TENSOR_WARPS; w++) {
        for (int i = 0; i < t->num_moves[w]; i++)
            free(t->moves[w][i].words);
        t->num_moves[w] = 0;
    }
}

void tensor_block_begins(struct block *b) {
    struct tensor *t = b->tensor;
    if (!t || !t->used)
        return;
    forget_moves(t);
    for (int w = 0; w < TENSOR_WARPS; w++) {
        free(t->queues[w]);
        t->queues[w] = NULL;
    }
    memset(t->cells, 0, sizeof t->cells);
    memset(t->allocated, 0, sizeof t->allocated);
    memset(t->requests, 0, sizeof t->requests);
    t->least = TENSOR_COLUMNS;
    t->relinquished = t->used = 0;
}

void tensor_block_ended(struct block *b) {
    struct tensor *t = b->tensor;
    if (!t || !t->used)
        return;
    for (unsigned i = 0; i < UNITS; i++)
        if (t->allocated[i]) {
            finding("tensor memory not given back", t->allocated_at, "the block ends with columns from %u on allocated",
                    (t->allocated[i] - 1) * UNIT);
            return;
        }
}

void tensor_check_group(struct block *b, int group, place at) {
    struct grid *g = b->cluster->grid;
    if (b->num_warps > TENSOR_WARPS) {
        finding("wrong tcgen05", at, "a block of more than %d warps: the emulator has no tensor memory for it",
                TENSOR_WARPS);
        thread_fail();
    }
    if (group == 2 && (b->rank | 1) >= b->cluster->num_blocks) {
        finding("wrong tcgen05", at, "cta_group::2 in a cluster of %u: block %u has no other of its pair",
                b->cluster->num_blocks, b->rank);
        thread_fail();
    }
    if (g->tensor_group && g->tensor_group != group)
        finding("mixed cta_group", at, "cta_group::%d here and cta_group::%d before in one kernel", group,
                g->tensor_group);
    g->tensor_group = group;
}

/* ---- columns ---- */

int tensor_is_allocated(const struct tensor *t, uint32_t column, uint32_t count) {
    if (column >= TENSOR_COLUMNS || column + count > TENSOR_COLUMNS)
        return 0;
    for (uint32_t i = column / UNIT; i <= (column + count - 1) / UNIT; i++)
        if (!t->allocated[i])
            return 0;
    return 1;
}

static int fits(const struct tensor *t, uint32_t unit, uint32_t units) {
    for (uint32_t i = unit; i < unit + units; i++)
        if (t->allocated[i])
            return 0;
    return 1;
}

/* Where columns are free in one block, or in both of a pair; -1: nowhere. In random mode not always the first place. */
static int place_of_columns(const struct tensor *t, const struct tensor *other, uint32_t columns) {
    const uint32_t units = columns / UNIT;
    int found = -1;
    for (uint32_t u = 0; u + units <= UNITS; u += units)
        if (fits(t, u, units) && (!other || fits(other, u, units))) {
            found = (int)u;
            if (emulated_settings_now.mode != EMULATED_RANDOM || chance(2))
                break;
        }
    return found;
}

static void wake_warp(struct warp *w) {
    w->tensor_waits = 0;
    for (unsigned lane = 0; lane < LANES; lane++)
        if (w->threads[lane].wait.what == for_columns || w->threads[lane].wait.what == for_the_pair)
            wake(&w->threads[lane]);
}

static void give_columns(struct tensor *t, unsigned warp, uint32_t unit) {
    struct request_of_columns *r = &t->requests[warp];
    struct block *b = t->block;
    const uint32_t address = unit * UNIT;
    const struct actor a = actor_of(&b->warps[warp].threads[0]);
    for (uint32_t i = unit; i < unit + r->columns / UNIT; i++) {
        t->allocated[i] = unit + 1;
        for (uint32_t c = i * UNIT; c < (i + 1) * UNIT; c++)
            for (unsigned q = 0; q < QUARTERS; q++)
                t->cells[q][c] = (struct cell){0};
    }
    for (unsigned lane = 0; lane < TENSOR_LANES; lane++)
        for (uint32_t c = address; c < address + r->columns; c++)
            memcpy(&t->words[lane][c], &(int32_t){UNWRITTEN}, 4);
    shadow_write(b, r->shared, 4, &a, &address, r->at);
    memcpy(b->window + r->shared, &address, 4);
    t->allocated_at = r->at;
    t->version++;
    r->operation = 0;
    progress();
    wake_warp(&b->warps[warp]);
}

static struct tensor *other_of(const struct tensor *t) {
    return tensor_of(t->block->cluster->blocks[t->block->rank ^ 1]);
}

/* The warp of the pair's other block that has come too; -1: none has. */
static int partner_of(const struct tensor *t, int operation) {
    const struct tensor *other = other_of(t);
    for (int w = 0; w < TENSOR_WARPS; w++)
        if (other->requests[w].operation == operation)
            return w;
    return -1;
}

static void check_partners(const struct tensor *t, unsigned warp, int partner) {
    const struct request_of_columns *r = &t->requests[warp], *o = &other_of(t)->requests[partner];
    if (r->columns != o->columns || r->shared != o->shared || r->address != o->address || (int)warp != partner)
        finding("wrong tcgen05", r->at,
                "the blocks of a pair differ: warp %u with %u columns at 0x%x, warp %d with %u at 0x%x", warp,
                r->columns, r->shared, partner, o->columns, o->shared);
}

static void grant(struct tensor *t) {
    for (unsigned w = 0; w < TENSOR_WARPS; w++) {
        const struct request_of_columns *r = &t->requests[w];
        const int pair = r->group == 2;
        if (r->operation != OP_TENSOR_ALLOC)
            continue;
        const int partner = pair ? partner_of(t, OP_TENSOR_ALLOC) : 0;
        if (partner < 0)
            continue;
        const int unit = place_of_columns(t, pair ? other_of(t) : NULL, r->columns);
        if (unit < 0)
            continue;
        if (pair) {
            check_partners(t, w, partner);
            give_columns(other_of(t), (unsigned)partner, (uint32_t)unit);
        }
        give_columns(t, w, (uint32_t)unit);
    }
}

static void ask_for_columns(struct warp *w, struct request_of_columns *r) {
    struct tensor *t = tensor_of(w->block);
    if (r->columns < UNIT || r->columns > TENSOR_COLUMNS || (r->columns & (r->columns - 1))) {
        finding("wrong tcgen05", r->at, "tcgen05.alloc of %u columns: a power of two from 32 to 512", r->columns);
        thread_fail();
    }
    if (t->relinquished)
        finding("wrong tcgen05", r->at, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    if (r->columns > t->least)
        finding("wrong tcgen05", r->at, "tcgen05.alloc of %u columns after one of %u: sizes may not grow", r->columns,
                t->least);
    t->least = r->columns < t->least ? r->columns : t->least;
    t->requests[w->number] = *r;
    w->tensor_waits = 1;
    grant(t);
}

static void free_columns(struct tensor *t, unsigned warp) {
    struct request_of_columns *r = &t->requests[warp];
    const uint32_t unit = r->address / UNIT;
    for (uint32_t i = unit; i < UNITS && t->allocated[i] == unit + 1; i++)
        t->allocated[i] = 0;
    t->version++;
    r->operation = 0;
    progress();
    wake_warp(&t->block->warps[warp]);
}

static void give_back(struct warp *w, const struct request_of_columns *r) {
    struct tensor *t = tensor_of(w->block);
    const uint32_t unit = r->address / UNIT;
    uint32_t units = 0;
    while (r->address % UNIT == 0 && unit + units < UNITS && t->allocated[unit + units] == unit + 1)
        units++;
    if (!units || units * UNIT != r->columns) {
        finding("wrong tcgen05", r->at, "tcgen05.dealloc of %u columns at 0x%x, where %u are allocated", r->columns,
                r->address, units * UNIT);
        thread_fail();
    }
    for (unsigned q = 0; q < QUARTERS; q++)
        if (order_dealloc((struct columns){t, q, r->address, r->columns}, &w->threads[0], r->at))
            break;
    t->requests[w->number] = *r;
    w->tensor_waits = 1;
    const int partner = r->group == 2 ? partner_of(t, OP_TENSOR_DEALLOC) : -1;
    if (r->group == 2 && partner < 0)
        return;
    if (r->group == 2) {
        check_partners(t, w->number, partner);
        free_columns(other_of(t), (unsigned)partner);
    }
    free_columns(t, w->number);
    grant(t);
    if (r->group == 2)
        grant(other_of(t));
}

void emu_tensor_alloc(int group, unsigned shared, unsigned columns, EMU_PLACE) {
    struct thread *t = CURRENT;
    struct block *of;
    struct request_of_columns r = {.operation = OP_TENSOR_ALLOC, .group = group, .columns = columns, .at = HERE};
    tensor_check_group(t->block, group, r.at);
    if (!shared_range(shared, 4, 4, "tcgen05.alloc", &of, &r.shared, r.at))
        thread_fail();
    meet(OP_TENSOR_ALLOC, ~0u, &r, r.at);
    while (t->warp->tensor_waits)
        wait_for(for_columns, columns, 0, r.at);
}

void emu_tensor_dealloc(int group, unsigned tensor, unsigned columns, EMU_PLACE) {
    struct thread *t = CURRENT;
    struct request_of_columns r = {
        .operation = OP_TENSOR_DEALLOC, .group = group, .columns = columns, .address = tensor, .at = HERE};
    tensor_check_group(t->block, group, r.at);
    meet(OP_TENSOR_DEALLOC, ~0u, &r, r.at);
    while (t->warp->tensor_waits)
        wait_for(for_the_pair, tensor, columns, r.at);
}

void emu_tensor_relinquish(int group, EMU_PLACE) {
    const place at = HERE;
    tensor_check_group(CURRENT->block, group, at);
    meet(OP_TENSOR_RELINQUISH, ~0u, NULL, at);
}

/* ---- loads and stores ---- */

struct request {
    uint32_t tensor;
    int count, stores;
    uint32_t *r;
};

static void make_move(struct tensor *t, struct move *m) {
    if (m->moved)
        return;
    m->moved = 1;
    for (unsigned lane = 0; lane < LANES; lane++) {
        float *at = &t->words[m->lane + lane][m->column];
        uint32_t *words = m->words + lane * m->count;
        if (m->stores)
            memcpy(at, words, m->count * 4);
        else
            memcpy(words, at, m->count * 4);
    }
}

/* 0 with a finding where the warp may not touch these. */
static int check_address(const struct warp *w, const struct tensor *t, const struct request *r, place at) {
    const uint32_t lane = r->tensor >> 16, column = r->tensor & 0xffff, own = w->number % QUARTERS * LANES;
    const char *what = r->stores ? "st" : "ld";
    if (lane != own) {
        finding("wrong lanes", at, "tcgen05.%s of lanes from %u on by warp %u, which may touch lanes %u to %u", what,
                lane, w->number, own, own + LANES - 1);
        return 0;
    }
    if (!tensor_is_allocated(t, column, (uint32_t)r->count)) {
        finding("wrong columns", at, "tcgen05.%s of columns %u to %u, which are not all allocated", what, column,
                column + (uint32_t)r->count - 1);
        return 0;
    }
    return 1;
}

static void begin_move(struct warp *w, struct meeting *meeting) {
    struct tensor *t = tensor_of(w->block);
    const struct request *first = meeting->operands[0];
    const place at = meeting->at;
    for (unsigned lane = 1; lane < LANES; lane++)
        if (((const struct request *)meeting->operands[lane])->tensor != first->tensor) {
            finding("wrong tcgen05", at, "lane %u gives another address of tensor memory than lane 0", lane);
            thread_fail();
        }
    if (!check_address(w, t, first, at) || t->num_moves[w->number] == MOVES_MAX)
        thread_fail();
    const int stores = first->stores;
    const uint32_t number = ++w->tensor_issued[stores], column = first->tensor & 0xffff, count = (uint32_t)first->count;
    const struct columns c = {t, w->number % QUARTERS, column, count};
    if (emulated_settings_now.check)
        stores ? order_store(c, w, number, at) : order_load(c, w, number, at);
    t->version++;
    struct move *m = &t->moves[w->number][t->num_moves[w->number]++];
    *m = (struct move){
        .lane = first->tensor >> 16, .column = column, .count = count, .stores = stores, .at = at, .words = NULL};
    m->words = malloc((size_t)LANES * count * 4);
    for (unsigned lane = 0; lane < LANES; lane++) {
        m->registers[lane] = ((const struct request *)meeting->operands[lane])->r;
        if (stores)
            memcpy(m->words + lane * count, m->registers[lane], count * 4);
        for (uint32_t i = 0; i < count && !stores; i++)
            m->registers[lane][i] = MARK;
    }
    w->tensor_pending += !stores;
    const enum emulated_mode mode = emulated_settings_now.mode;
    if (mode == EMULATED_EARLY || (mode == EMULATED_RANDOM && chance(2)))
        make_move(t, m);
}

static void end_moves(struct warp *w, int stores) {
    struct tensor *t = tensor_of(w->block);
    int left = 0;
    for (int i = 0; i < t->num_moves[w->number]; i++) {
        struct move *m = &t->moves[w->number][i];
        if (m->stores != stores) {
            t->moves[w->number][left++] = *m;
            continue;
        }
        make_move(t, m);
        for (unsigned lane = 0; lane < LANES && !stores; lane++)
            memcpy(m->registers[lane], m->words + lane * m->count, m->count * 4);
        w->tensor_pending -= !stores;
        free(m->words);
    }
    t->num_moves[w->number] = left;
    w->tensor_waited[stores] = w->tensor_issued[stores];
}

void tensor_touch(struct thread *thread, uintptr_t address, uint32_t bytes, int write, place at) {
    const struct tensor *t = thread->block->tensor;
    const unsigned warp = thread->warp->number;
    for (int i = 0; i < t->num_moves[warp]; i++) {
        const struct move *m = &t->moves[warp][i];
        const uintptr_t from = (uintptr_t)m->registers[thread->lane];
        if (!m->stores && address + bytes > from && address < from + m->count * 4)
            finding("register touched", at, "a register of the tcgen05.ld of %s is %s before tcgen05.wait::ld",
                    place_text(m->at), write ? "written" : "read");
    }
}

static void move_registers(uint32_t tensor, void *r, int count, int stores, place at) {
    struct thread *t = CURRENT;
    struct request request = {tensor, count, stores, r};
    if (t->block->num_warps > TENSOR_WARPS)
        tensor_check_group(t->block, 1, at);
    meet(stores ? OP_TENSOR_STORE : OP_TENSOR_LOAD, ~0u, &request, at);
}
void emu_tensor_load(void *r, int count, unsigned tensor, EMU_PLACE) { move_registers(tensor, r, count, 0, HERE); }
void emu_tensor_store(unsigned tensor, const void *r, int count, EMU_PLACE) {
    move_registers(tensor, (void *)(uintptr_t)r, count, 1, HERE);
}
void emu_tensor_wait(int stores, EMU_PLACE) { meet(OP_TENSOR_WAIT, ~0u, &stores, HERE); }

void emu_tensor_fence(int after, EMU_PLACE) {
    struct thread *t = CURRENT;
    (void)emu_file, (void)emu_line;
    shadow_settle(t);
    if (!emulated_settings_now.check)
        return;
    if (after) {
        struct clocks *before = t->tensor_known;
        t->tensor_known = clocks_keep(t->known);
        clocks_drop(before);
    } else {
        memcpy(t->tensor_published, t->warp->tensor_waited, sizeof t->tensor_published);
    }
}

void tensor_execute(struct warp *w, struct meeting *m) {
    switch (m->operation) {
    case OP_TENSOR_ALLOC: ask_for_columns(w, m->operands[0]); break;
    case OP_TENSOR_DEALLOC: give_back(w, m->operands[0]); break;
    case OP_TENSOR_RELINQUISH: tensor_of(w->block)->relinquished = 1; break;
    case OP_TENSOR_WAIT: end_moves(w, *(const int *)m->operands[0]); break;
    default: begin_move(w, m);
    }
}
