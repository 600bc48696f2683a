/* global.c: global memory: bounds, additions and hand-overs; and the hooks of plain loads and stores, which the
 * compiler puts into a kernel's text (-fsanitize=thread, without its runtime). */
#include <stdlib.h>
#include <string.h>

#include "emulated_launch.h"
#include "state.h"

/* ---- allocations, sorted by address ---- */

struct range {
    uintptr_t from, to;
};
static struct range *ranges;
static size_t num_ranges, max_ranges, last_range;

void global_add(void *memory, size_t bytes) {
    size_t at = num_ranges;
    if (num_ranges == max_ranges) {
        max_ranges = 2 * max_ranges + 16;
        ranges = realloc(ranges, max_ranges * sizeof *ranges);
    }
    while (at > 0 && ranges[at - 1].from > (uintptr_t)memory) {
        ranges[at] = ranges[at - 1];
        at--;
    }
    ranges[at] = (struct range){(uintptr_t)memory, (uintptr_t)memory + bytes};
    num_ranges++;
}
void global_remove(void *memory) {
    for (size_t i = 0; i < num_ranges; i++)
        if (ranges[i].from == (uintptr_t)memory) {
            global_shadow_forget();
            memmove(&ranges[i], &ranges[i + 1], (--num_ranges - i) * sizeof *ranges);
            return;
        }
}

static int in_range(uintptr_t from, size_t bytes) {
    if (last_range < num_ranges && from >= ranges[last_range].from && from + bytes <= ranges[last_range].to)
        return 1;
    for (size_t i = 0; i < num_ranges; i++)
        if (from >= ranges[i].from && from + bytes <= ranges[i].to) {
            last_range = i;
            return 1;
        }
    return 0;
}

/* The grid's parameters are read as global memory is. */
static int in_parameters(uintptr_t from, size_t bytes) {
    const struct grid *g = CURRENT->block->cluster->grid;
    for (int i = 0; i < 8 && g->parameters[i]; i++)
        if (from >= (uintptr_t)g->parameters[i] && from + bytes <= (uintptr_t)g->parameters[i] + g->kernel->sizes[i])
            return 1;
    return 0;
}

/* Constants of the kernel's text. */
static int in_module(const struct thread *t, uintptr_t from) {
    const struct kernel *k = t->block->cluster->grid->kernel;
    return from >= k->base && from < k->end;
}

int global_range(const void *at, size_t bytes, const char *what, place here) {
    if (in_range((uintptr_t)at, bytes))
        return 1;
    finding("out of bounds", here, "%s: %zu bytes at global address %p are not inside of one allocation", what, bytes,
            at);
    return 0;
}

/* ---- additions and hand-overs ---- */

void emu_red_add(float *at, const float *x, int count, EMU_PLACE) {
    if ((uintptr_t)at % (4 * (size_t)count))
        finding("misaligned", HERE, "red.add of %d floats at %p", count, (void *)at);
    if (!global_range(at, (size_t)count * 4, "red.add", HERE))
        return;
    shadow_settle(CURRENT);
    global_write(CURRENT->block, NULL, at, (size_t)count * 4, 1, HERE);
    for (int i = 0; i < count; i++)
        at[i] += x[i];
}
/* Counted as an acquire and a release: what kernels use atomic additions for, with a fence beside them. */
static void atomic_access(void *at, place here) {
    struct thread *t = CURRENT;
    shadow_settle(t);
    if (!emulated_settings_now.check)
        return;
    global_acquire(t->block, at);
    global_write(t->block, NULL, at, 4, 1, here);
    global_release(t->block, at);
}

/* 0 where nothing lies there. Then the caller reads and writes 4 bytes, and ends it. */
static int begin_atomic(void *at, const char *what, place here) {
    const struct block *shared = block_of_window((uintptr_t)at);
    if (!shared && !global_range(at, 4, what, here))
        return 0;
    if (!shared)
        atomic_access(at, here);
    return 1;
}
static void end_atomic(void) {
    progress();
    yield_warp();
}

unsigned emu_atomic_add(unsigned *at, unsigned x, EMU_PLACE) {
    if (!begin_atomic(at, "an atomic addition", HERE))
        return 0;
    const unsigned before = *at;
    *at += x;
    end_atomic();
    return before;
}
unsigned emu_atomic_cas(unsigned *at, unsigned compare, unsigned x, EMU_PLACE) {
    if (!begin_atomic(at, "an atomic compare-and-swap", HERE))
        return 0;
    const unsigned before = *at;
    *at = before == compare ? x : before;
    end_atomic();
    return before;
}
float emu_atomic_add_float(float *at, float x, EMU_PLACE) {
    if (!begin_atomic(at, "an atomic addition", HERE))
        return 0;
    const float before = *at;
    *at += x;
    yield_warp();
    return before;
}
unsigned emu_load_acquire(const unsigned *at, EMU_PLACE) {
    if (!global_range(at, 4, "ld.acquire", HERE))
        return 0;
    poll(HERE); /* others may go on: the caller may be waiting for a change */
    if (emulated_settings_now.check)
        global_acquire(CURRENT->block, at);
    return *at;
}
void emu_store_release(unsigned *at, unsigned x, EMU_PLACE) {
    if (!global_range(at, 4, "st.release", HERE))
        return;
    if (emulated_settings_now.check)
        global_release(CURRENT->block, at);
    *at = x;
    progress();
    yield_warp();
}
/* Order nothing, and are no race. */
unsigned emu_load_relaxed(const unsigned *at, EMU_PLACE) {
    if (!global_range(at, 4, "ld.relaxed", HERE))
        return 0;
    poll(HERE);
    return *at;
}
unsigned long long emu_load_relaxed_8(const unsigned long long *at, EMU_PLACE) {
    if ((uintptr_t)at % 8)
        finding("misaligned", HERE, "ld.relaxed of 8 bytes at %p", (const void *)at);
    if (!global_range(at, 8, "ld.relaxed", HERE))
        return 0;
    poll(HERE);
    return *at;
}
void emu_store_relaxed_8(unsigned long long *at, unsigned long long x, EMU_PLACE) {
    if ((uintptr_t)at % 8)
        finding("misaligned", HERE, "st.relaxed of 8 bytes at %p", (void *)at);
    if (!global_range(at, 8, "st.relaxed", HERE))
        return;
    *at = x;
    progress();
    yield_warp();
}

/* ---- hooks ---- */

static void shared_access(struct thread *t, uintptr_t address, uint32_t bytes, int write, uintptr_t code) {
    struct block *b = block_of_window(address), *of;
    const place at = place_of_code(code);
    uint32_t offset;
    if (b != t->block) {
        finding("bad address", at, "a plain access to the shared memory of another block");
        return;
    }
    if (!shared_range((uint32_t)(address - (uintptr_t)b->window), bytes, 1, write ? "a store" : "a load", &of, &offset,
                      at))
        thread_fail();
    const struct actor a = actor_of(t);
    banks_note(t, offset, bytes, at);
    write ? shadow_write(b, offset, bytes, &a, NULL, at) : shadow_read(b, offset, bytes, &a, at);
}

static inline void access(void *pointer, uint32_t bytes, int write, void *code) {
    struct thread *t = CURRENT;
    const uintptr_t address = (uintptr_t)pointer;
    if (!t)
        return;
    if (on_a_stack(address)) {
        if (t->block->warpgroups[t->warp->number / 4])
            wgmma_touch(t, address, bytes, write, place_of_code((uintptr_t)code));
        if (t->warp->tensor_pending)
            tensor_touch(t, address, bytes, write, place_of_code((uintptr_t)code));
        return;
    }
    shadow_settle(t);
    if (in_window(address)) {
        yield_at_access();
        shared_access(t, address, bytes, write, (uintptr_t)code);
        return;
    }
    if (in_range(address, bytes)) {
        const place at = place_of_code((uintptr_t)code);
        write ? global_write(t->block, t, pointer, bytes, 0, at) : global_read(t->block, pointer, bytes, at);
        return;
    }
    if (in_parameters(address, bytes) || in_module(t, address))
        return;
    finding("out of bounds", place_of_code((uintptr_t)code), "%s of %u bytes at address %p, which nobody has allocated",
            write ? "a store" : "a load", bytes, pointer);
    thread_fail();
}

#define CODE __builtin_return_address(0)
#define HOOK(BYTES)                                                                     \
    EXPORT void __tsan_read##BYTES(void *at) { access(at, BYTES, 0, CODE); }            \
    EXPORT void __tsan_write##BYTES(void *at) { access(at, BYTES, 1, CODE); }           \
    EXPORT void __tsan_unaligned_read##BYTES(void *at) { access(at, BYTES, 0, CODE); }  \
    EXPORT void __tsan_unaligned_write##BYTES(void *at) { access(at, BYTES, 1, CODE); } \
    EXPORT void __tsan_volatile_read##BYTES(void *at) { access(at, BYTES, 0, CODE); }   \
    EXPORT void __tsan_volatile_write##BYTES(void *at) { access(at, BYTES, 1, CODE); }  \
    EXPORT void __tsan_read_write##BYTES(void *at) { access(at, BYTES, 0, CODE), access(at, BYTES, 1, CODE); }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
EXPORT void __tsan_read_range(void *at, size_t bytes) { access(at, (uint32_t)bytes, 0, CODE); }
EXPORT void __tsan_write_range(void *at, size_t bytes) { access(at, (uint32_t)bytes, 1, CODE); }
EXPORT void __tsan_func_entry(void *at) { (void)at; }
EXPORT void __tsan_func_exit(void) {}
EXPORT void __tsan_init(void) {}
EXPORT void __tsan_vptr_update(void *at, void *to) { (void)at, (void)to; }
EXPORT void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    access((void *)(uintptr_t)from, (uint32_t)bytes, 0, CODE);
    access(to, (uint32_t)bytes, 1, CODE);
    return memcpy(to, from, bytes);
}
EXPORT void *__tsan_memset(void *to, int value, size_t bytes) {
    access(to, (uint32_t)bytes, 1, CODE);
    return memset(to, value, bytes);
}
