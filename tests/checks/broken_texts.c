/* broken_texts.c: the checker's own test on kernels of CUDA devices: the emulated device compiles each with one fault
 * in its text (EMULATED_PLANT), and the problems that are drawn or listed have to find it. What the faults need is what
 * small problems with shapeless masks do not have: each is of another kind. A run ends at the first wrong result. Where
 * it has a seed, that is one which shows the fault now; the seeds after it are for the day when drawing has changed. */
#define _GNU_SOURCE /* mkdtemp */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checks.h"
#include "subjects.h"

enum { ARGUMENTS_MAX = 16 };

static const struct fault {
    const char *name;
    const char *file, *words, *instead; /* what stands there, and the fault */
    const char *arguments[ARGUMENTS_MAX];
} faults[] = {
    {"splits as many as the longest sequence has",
     "families/mma/decode/mma_decode.cu",
     "mma_decode_parts(keys, at.seqlen_q * a.group)",
     "a.num_splits",
     {"invariance", "--seed", "3", "--repeat", "60"}},
    {"maxima raised by a vote of rows",
     "families/mma/forward/mma_forward.cu",
     "bool careful = !OPTIMISTIC || !settled || FAST_PATH;",
     "bool careful = !settled || FAST_PATH;",
     {"invariance", "--seed", "8", "--repeat", "60"}},
    {"a page read past its length",
     "gpu/cache.cuh",
     "(int)min(before + added, room)",
     "(int)min(before + added + 1, room)",
     {"serving", "--kernel", "mma.decode", "--seed", "26", "--repeat", "200"}},
    {"a bit of a tree too far",
     "gpu/tree.cuh",
     ">> t % 32 & 1",
     ">> (t + 1) % 32 & 1",
     {"invariance", "--seed", "2", "--repeat", "60"}},
    {"a table column too far",
     "gpu/cache.cuh",
     "entry.at = s.entries + (int64_t)column *",
     "entry.at = s.entries + (int64_t)(column + 1) *",
     {"serving", "--kernel", "mma.decode", "--seed", "5", "--repeat", "200"}},
    {"a stale tail",
     "gpu/append.cu",
     "own >= s.seqlen_k - s.cached",
     "own + 1 >= s.seqlen_k - s.cached",
     {"serving", "--kernel", "mma.forward", "--seed", "3", "--repeat", "200"}},
    {"a stale tail where decode appends",
     "families/mma/decode/mma_decode_append.cuh",
     "n < all.seqlen_k - at.in_cache.cached",
     "n + 1 < all.seqlen_k - at.in_cache.cached",
     {"serving", "--kernel", "mma.decode", "--seed", "32", "--repeat", "200"}},
    {"rows turned as the first where decode appends",
     "families/mma/decode/mma_decode_append.cuh",
     "a.rotary.moves ? r / a.group : 0",
     "0 * r",
     {"cache", "--kernel", "mma.decode", "--seed", "7", "--repeat", "200"}},
    {"a new key turned as the next in its tile",
     "families/mma/decode/mma_decode.cu",
     "warp * WARP_KEYS + key - begin, first + key)",
     "warp * WARP_KEYS + key - begin, first + key + 1)",
     {"cache", "--kernel", "mma.decode", "--seed", "6", "--repeat", "200"}},
    {"a length taken before the append",
     "gpu/cache.cuh",
     "(int)min(before + added, room)",
     "(int)min(before, room)",
     {"serving", "--kernel", "mma.decode", "--seed", "10", "--repeat", "200"}},
    {"a stale tail of a latent cache",
     "families/hopper/latent/hopper_latent.cu",
     "if (keys >= BLOCK_N)",
     "if (keys >= 0)",
     {"serving", "--kernel", "hopper.latent", "--seed", "46", "--repeat", "400"}},
    {"a missing page of a latent cache seen",
     "families/hopper/latent/hopper_latent.cu",
     "boxes = ld_shared_4(there(base, step));",
     "boxes = 15;",
     {"cache", "--kernel", "hopper.latent", "--seed", "1", "--repeat", "200"}},
    {"maxima of the other warpgroup not followed",
     "families/hopper/latent/hopper_latent.cu",
     "rows.max[half] = m;",
     "rows.max[half] = m > rows.max[half] + 1000 ? m : rows.max[half];",
     {"serving", "--kernel", "hopper.latent", "--seed", "174", "--repeat", "1000"}},
    {"one rotated dim too many",
     "gpu/append.cu",
     "pairs = dim / 2, turned = pairs / UNIT;",
     "pairs = dim / 2, turned = pairs / UNIT + (dim < a.in.head_dim);",
     {"cache", "--seed", "5", "--repeat", "200"}},
    {"a page outside of the cache read",
     "gpu/cache.cuh",
     "at.page >= (uint64_t)c.num_pages)",
     "at.page > (uint64_t)c.num_pages)",
     {"cache", "--seed", "29", "--repeat", "200"}},
    {"a wrong page not reported",
     "gpu/cache_fault.cu",
     "page < 0 || page >= c.num_pages",
     "page < 0 || page > c.num_pages",
     {"cache", "--seed", "6", "--repeat", "200"}},
    {"rows before the first key seen",
     "families/mma/forward/mma_forward.cu",
     "CACHE ? max(first_key(a, at, row), at.padding)",
     "0 ? max(first_key(a, at, row), at.padding)",
     {"serving", "--kernel", "mma.forward", "--seed", "36", "--repeat", "200"}},
    {"a page that is none seen as zeros",
     "families/mma/forward/mma_forward_pages.cuh",
     "return has_no_page(c, find(t, n));",
     "return false;",
     {"cache", "--kernel", "mma.forward", "--seed", "1", "--repeat", "200"}},
    {"a page read past its length by TMA",
     "families/hopper/forward/hopper_forward.cu",
     "const int keys = facts().seqlen_k - last_tile * BLOCK_N;",
     "const int keys = facts().seqlen_k - last_tile * BLOCK_N + 1;",
     {"serving", "--kernel", "hopper.forward", "--seed", "12", "--repeat", "400"}},
    {"a page that TMA does not find seen as zeros",
     "families/hopper/forward/hopper_pages.cuh",
     "has_no_page(a.in.cache, at)",
     "false",
     {"cache", "--kernel", "hopper.forward", "--seed", "1", "--repeat", "200"}},
    {"values that TMA reads in the page of other keys",
     "families/hopper/forward/hopper_pages.cuh",
     "load_v_parts(step - 1, before, head);\n            before = own;",
     "load_v_parts(step - 1, own, head);\n            before = own;",
     {"cache", "--kernel", "hopper.forward", "--seed", "2", "--repeat", "200"}},
    {"a tile's last row of a mask ignored",
     "gpu/block_mask.cu",
     "min(a.block_m, a.seqlen_q - first_row)",
     "min(a.block_m - 1, a.seqlen_q - first_row)",
     {"cases", "--group", "last row of a tile", "--kernel", "mma.forward"}},
    {"a list of keys that wraps too late",
     "families/hopper/forward/hopper_gather.cu",
     "(whole_taken + thread) % LIST",
     "(whole_taken + thread) % (2 * LIST)",
     {"cases", "--group", "a long list"}},
    {"a tile called full that is not",
     "gpu/tile_plan.cu",
     "run_of_bits(word, (rows.first + TILE - 1) / TILE,",
     "run_of_bits(word, rows.first / TILE,",
     {"cases", "--group", "tile plans"}},
    {"a tile called hidden that is seen",
     "gpu/tile_plan.cu",
     "(rows.last + TILE - 1) / TILE) : 0;",
     "rows.last / TILE) : 0;",
     {"cases", "--group", "tile plans"}},
    {"a range of keys that holds its end",
     "gpu/row_ranges.cuh",
     "key < row.end[n * r.end_range]",
     "key <= row.end[n * r.end_range]",
     {"cases", "--group", "row intervals", "--kernel", "mma.decode"}},
    {"a range of keys of the wrong head",
     "gpu/row_ranges.cuh",
     "h = head / r.group,",
     "h = 0 * head,",
     {"cases", "--group", "row intervals", "--kernel", "mma.decode"}},
    {"a tile called full whose first keys ranges leave out",
     "gpu/row_ranges.cuh",
     "tiles.full |= run_of_bits(word, (start + tile_keys - 1) / tile_keys,",
     "tiles.full |= run_of_bits(word, start / tile_keys,",
     {"cases", "--group", "row intervals", "--kernel", "mma.forward32"}},
    {"a tile called hidden whose first keys ranges hold",
     "gpu/row_ranges.cuh",
     "(end + tile_keys - 1) / tile_keys);",
     "end / tile_keys);",
     {"cases", "--group", "row intervals", "--kernel", "mma.forward32"}},
    {"tiles of rows of the keys beside a block's",
     "families/hopper/backward/hopper_key_list.cuh",
     ">> key_tile % 32 & ((1u << BLOCK_N / 64) - 1)",
     ">> (key_tile ^ 2) % 32 & ((1u << BLOCK_N / 64) - 1)",
     {"cases", "--group", "row intervals", "--kernel", "hopper.backward"}},
    {"ranges of a tile in part left out",
     "families/hopper/backward/hopper_key_list.cuh",
     "__ballot_sync(0xffffffff, !(full >> n & 1))",
     "__ballot_sync(0xffffffff, !(full & 1))",
     {"cases", "--group", "row intervals", "--kernel", "hopper.backward"}},
    {"a range of keys one too long",
     "families/hopper/backward/hopper_backward_common.cuh",
     "(uint32_t)(start | (end - start) << 8) : 0",
     "(uint32_t)(start | (end + 1 - start) << 8) : 0",
     {"cases", "--group", "row intervals", "--kernel", "hopper.backward"}},
    {"a block of 64 keys where blocks have 128",
     "gpu/row_ranges.cuh",
     "(uint32_t)key >> b.shift,",
     "(uint32_t)key >> 6,",
     {"cases", "--group", "block masks", "--kernel", "mma.forward32"}},
    {"a tile called full of which a block is hidden",
     "gpu/row_block_mask.cu",
     "full &= visible;",
     "full |= visible;",
     {"cases", "--group", "squares of blocks", "--kernel", "mma.backward"}},
    {"a tile called hidden whose first block is seen",
     "gpu/row_block_mask.cu",
     "seen |= visible;",
     "seen = visible;",
     {"cases", "--group", "squares of blocks", "--kernel", "mma.backward"}},
    {"a bit of the tile plan transposed",
     "gpu/tile_plan.cu",
     "words[threadIdx.x % 32] >> threadIdx.x / 32 & 1",
     "words[threadIdx.x % 32] >> (threadIdx.x / 32 ^ 1) & 1",
     {"cases", "--group", "tile plans"}},
    {"the bits of a kept plan beside their tiles",
     "gpu/kept_plan.cu",
     "plan.seen[item] &= seen;",
     "plan.seen[item] &= seen << 1;",
     {"cases", "--group", "squares of a plan"}},
    {"a tile of a kept plan called full of which a part is",
     "gpu/kept_plan.cu",
     "full &= a.plan.full[at] >> n % 32 & 1;",
     "full = a.plan.full[at] >> n % 32 & 1;",
     {"cases", "--group", "squares of a plan"}},
    {"keys called hidden that the last rows of a block see",
     "gpu/seen_tiles.cuh",
     "const int end = (min(first_row + rows, a.seqlen_q) + TILE_PLAN_TILE - 1) / TILE_PLAN_TILE;",
     "const int end = first_row / TILE_PLAN_TILE + 1;",
     {"cases", "--group", "seen tiles", "--kernel", "mma.forward"}},
    {"keys called hidden in the tile beside theirs",
     "gpu/seen_tiles.cuh",
     ">> tile % 32;",
     ">> (tile ^ 1) % 32;",
     {"cases", "--group", "seen tiles", "--kernel", "mma.forward32"}},
    {"two blocks of rows in one place of the order",
     "gpu/tile_plan.cu",
     "order[before] = i;",
     "order[before] = i & ~1;",
     {"cases", "--group", "wide heads"}},
    {"ranges of the wrong keys of a tile",
     "families/hopper/backward_2pass/hopper_backward_2pass_dq.cu",
     "ranges[n / 8]",
     "ranges[0]",
     {"cases", "--group", "wide heads"}},
    {"the mask of a tile in part left out",
     "families/hopper/backward_2pass/hopper_backward_2pass_dq.cu",
     "is_there ? ~plan.full[at] : 0",
     "is_there ? plan.full[at] : 0",
     {"cases", "--group", "wide heads"}},
    {"sorted keys written as they lie",
     "families/hopper/backward/hopper_backward_common.cuh",
     "const bool computed = k.steps > 0;",
     "const bool computed = k.steps > 0 && !are_sorted(a);",
     {"cases", "--group", "wide heads"}},
    {"heads that neither kernel runs",
     "families/hopper/forward/hopper_forward.cu",
     "a.gathers && is_scattered",
     "a.gathers && !is_scattered",
     {"cases", "--group", "tile plans"}},
    {"a range of rows one too long",
     "families/hopper/forward/hopper_work.cuh",
     "(uint32_t)(last - first) << 16",
     "(uint32_t)(last - first + 1) << 16",
     {"cases", "--group", "tile plans"}},
    {"rows that see a part of a warp's keys taken for covered",
     "families/hopper/backward/hopper_key_list.cuh",
     "__reduce_max_sync(0xffffffff, (int)ld_shared_4(at))",
     "__reduce_min_sync(0xffffffff, (int)ld_shared_4(at))",
     {"cases", "--group", "runs of keys"}},
    {"a block of keys that never begins",
     "gpu/block_order.cu",
     "to[1 + place] = block;",
     "to[1 + place] = min(block, a.blocks - 2);",
     {"cases", "--group", "runs of keys"}},
    {"keys that neither launch takes",
     "families/hopper/backward/hopper_backward.cu",
     "if (scattered != GATHER)",
     "if (scattered != GATHER || RUNS)",
     {"cases", "--group", "runs of keys"}},
    {"a split's last part lost",
     "families/hopper/forward/hopper_forward.cu",
     "f.last_tile = min(f.first_tile + each, f.last_tile)",
     "f.last_tile = f.batch % splits == splits - 1 ? f.first_tile : min(f.first_tile + each, f.last_tile)",
     {"cases", "--group", "keys in splits"}},
    {"splits from the 65th on lost",
     "gpu/combine_splits.cu",
     "weights[threadIdx.x] = weight",
     "weights[threadIdx.x] = threadIdx.x < 64 ? weight : 0.0f",
     {"cases", "--group", "many splits", "--kernel", "mma.decode"}},
    {"a stride in 32 bits",
     "families/mma/forward/mma_forward_load.cuh",
     "typedef int64_t row_distance",
     "typedef int row_distance",
     {"cases", "--group", "apart", "--kernel", "mma.forward"}},
    {"exponentials wrong on the FMA pipe",
     "cuda/exp2.cuh",
     "0.24221076f",
     "0.28221076f",
     {"cases", "--group", "exponentials on the FMA pipe"}},
    {"rows of no sequence left",
     "gpu/unused_rows.cuh",
     "clear_unused_rows(out, rows, head, a.head_dim_v, thread, threads);",
     ";",
     {"cases", "--group", "rows of no sequence", "--kernel", "mma.forward"}},
    {"rows of no sequence left by a backward",
     "gpu/backward_rows.cu",
     "if ((VARLEN || SEQUSED) && GRID_X == 0)",
     "if (0)",
     {"cases", "--group", "rows of no sequence", "--kernel", "mma.backward"}},
    {"a spoiled row not done again",
     "families/hopper/forward/hopper_rows.cuh",
     "return redo ? redo_or(spoiled) : 0;",
     "return 0;",
     {"cases", "--group", "NaN in hidden keys", "--kernel", "hopper.forward"}},
    {"a spoiled row of dQ not done again",
     "families/mma/float32/mma_backward32.cu",
     "if (REDO && !OWNS_KEYS && share == 0 && a.dq.data)",
     "if (0)",
     {"cases", "--group", "NaN in hidden keys", "--kernel", "mma.backward32"}},
    {"half of the columns left out of scores",
     "families/mma/backward_d1024/mma_backward_d1024.cu",
     "c[i / 2][i % 2][e] += __uint_as_float(word[e]);",
     ";",
     {"cases", "--group", "wide columns"}},
    {"a slice loaded over the one at work",
     "families/mma/backward_d1024/mma_backward_d1024.cu",
     "load_slice(stage == 0 ? STAGES - 1 : stage - 1);",
     "load_slice(stage);",
     {"cases", "--group", "wide columns"}},
    {"halves of scores read before they are there",
     "families/mma/backward_d1024/mma_backward_d1024.cu",
     "barrier_sync(1 + group + GROUPS * (share / 2), 64);",
     ";",
     {"cases", "--group", "wide columns"}},
    {"hidden keys not taken out",
     "families/mma/backward/mma_backward_sums.cuh",
     "if (!SCRUB || carried.scrubbed)",
     "if (true)",
     {"cases", "--group", "NaN in hidden keys", "--kernel", "mma.backward"}},
    {"hidden keys not taken out of a list",
     "families/hopper/backward/hopper_backward.cu",
     "if (SCRUB && k.steps > 0)",
     "if (false)",
     {"cases", "--group", "NaN in hidden keys", "--kernel", "hopper.backward"}},
    {"a row of NaN taken for empty",
     "gpu/scores.cuh",
     "bool empty = sum == 0.0f;",
     "bool empty = !(sum > 0.0f);",
     {"cases", "--group", "NaN in a row"}},
    {"a row of NaN that sees no key",
     "families/mma/backward/mma_backward_load.cuh",
     "clear_empty_rows<HEAD_DIM / 8, STAGE_ROWS, PANEL_ROWS>(stage.q, stage.rows);",
     ";",
     {"cases", "--group", "NaN without keys", "--kernel", "mma.backward"}},
    {"a combination of splits halved",
     "gpu/combine_splits.cu",
     "weights[threadIdx.x] = weight",
     "weights[threadIdx.x] = 0.5f * weight",
     {"chain"}},
    {"a key seen that a bias hides from a row of NaN",
     "families/mma/decode/mma_decode.cu",
     "seen = seen && f.bias[half][n] != MINUS_INF",
     "seen = seen && true",
     {"cases", "--group", "NaN without keys", "--kernel", "mma.decode"}},
    {"a sink left out of the sum",
     "gpu/scores.cuh",
     "total = sum + ex2_approx(apart > far ? far : apart)",
     "total = sum + 0.0f * apart",
     {"cases", "--group", "ordinary sinks", "--kernel", "mma.forward"}},
    {"a sink that joins without its 1",
     "families/hopper/forward/hopper_rows.cuh",
     "threadIdx.x % 4 == 0 ? 1.0f : 0.0f",
     "0.0f",
     {"cases", "--group", "ordinary sinks", "--kernel", "hopper.forward"}},
    {"a row's share in dsink of the other sign",
     "gpu/backward_rows.cu",
     "alone ? dlse : dlse - delta",
     "alone ? dlse : dlse + delta",
     {"cases", "--group", "ordinary sinks", "--kernel", "mma.backward"}},
    {"a row of NaN whose sinks alone count",
     "gpu/backward_rows.cu",
     "if (!(fabsf(lse - sink) <=",
     "if (true || !(fabsf(lse - sink) <=",
     {"cases", "--group", "sinks alone"}},
    {"a row of dQ done again without its sinks",
     "gpu/redo_dq.cuh",
     "a.lse_rows[place] / a.lse_factor",
     "in.lse.data[batch * in.lse.batch + head * in.lse.head + i * in.lse.row]",
     {"cases", "--group", "NaN beside sinks"}},
    {"the last rows left out of dsink",
     "gpu/dsink.cuh",
     "(rows + 3) / 4",
     "rows / 4",
     {"cases", "--group", "ordinary sinks", "--kernel", "mma.backward32"}},
    {"lse_low of a merge lost", "gpu/merge.cu", "= s.lse_low;", "= 0.0f;", {"merge"}},
    {"a bound that keeps a key too few",
     "masks/topk/topk_threshold.cu",
     "bound.kept = span.room;",
     "bound.kept = span.room - 1;",
     {"masks", "topk", "--repeat", "300"}},
    {"a window a row short",
     "masks/intervals/interval_rules.cu",
     "a.left + 1",
     "a.left",
     {"masks", "interval", "--repeat", "400"}},
    {"a document that lacks its last key",
     "masks/intervals/key_rules.cu",
     "rows.last = at + first_above(",
     "rows.last = at - 1 + first_above(",
     {"masks", "interval", "--repeat", "400"}},
    {"the window of the head before",
     "masks/intervals/key_rules.cu",
     "a.windows.data + h / a.windows.group",
     "a.windows.data + max(h - 1, 0) / a.windows.group",
     {"masks", "interval", "--repeat", "400"}},
    {"a prefix of the first sequence for all",
     "masks/intervals/key_rules.cu",
     "a.prefixes.data[b * a.prefixes.batch]",
     "a.prefixes.data[0]",
     {"masks", "interval", "--repeat", "400"}},
    {"intervals that hold their end",
     "masks/dense/intervals_to_mask.cu",
     "i < end[n]",
     "i <= end[n]",
     {"masks", "dense", "--repeat", "400"}},
    {"an index behind a list's count taken in",
     "masks/dense/blocks_from_lists.cu",
     "n < count;",
     "n <= count;",
     {"masks", "dense", "--repeat", "400"}},
    {"the best slot taken for the worst",
     "masks/slots/topk_append.cu",
     "(order < worst)",
     "(order > worst)",
     {"masks", "slots", "--repeat", "60"}},
    {"sums of warps lost",
     "masks/key_bias/key_bias.cu",
     "sums[threadIdx.x / 32] = sum;",
     "sums[threadIdx.x / 32] = 0.0f;",
     {"masks", "key-bias", "--repeat", "300"}},
    {"a maximum without its scale",
     "companions/softmax/softmax_naive.cu",
     "element_at(a, r, column) * scale2);",
     "element_at(a, r, column));",
     {"softmax", "--kernel", "softmax.naive", "--share", "0/9"}},
    {"the last of k left out",
     "companions/gemm/gemm_naive.cu",
     "k < a.k",
     "k < a.k - 1",
     {"gemm", "--kernel", "gemm.naive", "--most", "5"}},
};

/* Only these subjects say at which element a result is wrong. */
static int is_of_attention(const struct fault *fault) {
    return strncmp(fault->arguments[0], "--", 2) == 0 || strcmp(fault->arguments[0], "cases") == 0;
}

/* And these run to their end. */
static int runs_on(const struct fault *fault) {
    static const char *const subjects[] = {"merge", "chain", "softmax", "gemm"};
    for (size_t n = 0; n < sizeof subjects / sizeof subjects[0]; n++)
        if (strcmp(fault->arguments[0], subjects[n]) == 0)
            return 1;
    return 0;
}

/* The program itself with the fault's arguments, its output in the folder; returns its exit code. */
static int run(const struct fault *fault, const char *folder, const char *log) {
    const pid_t child = fork();
    if (child == 0) {
        char plant[1024];
        const char *arguments[ARGUMENTS_MAX + 8] = {"fdm-checks"};
        int count = 1;
        for (int i = 0; i < ARGUMENTS_MAX && fault->arguments[i]; i++)
            arguments[count++] = fault->arguments[i];
        arguments[count++] = "--emulate", arguments[count++] = "sm_90";
        if (!runs_on(fault))
            arguments[count++] = "--until-wrong";
        snprintf(plant, sizeof plant, "%s=>%s=>%s", fault->file, fault->words, fault->instead);
        setenv("EMULATED_PLANT", plant, 1);
        setenv("EMULATED_MODE", "early", 1); /* these faults show in results */
        setenv("EMULATED_CHECK", "0", 1);
        setenv("FLASH_DMATTN_CACHE_DIR", folder, 1);
        const int out = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(out, STDOUT_FILENO);
        dup2(out, STDERR_FILENO);
        execv("/proc/self/exe", (char *const *)(uintptr_t)arguments);
        _exit(3);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}

/* The first line that begins so and holds the words. */
static int find_line(const char *log, const char *begin, const char *words, char *line, int size) {
    FILE *file = fopen(log, "r");
    int found = 0;
    while (file && !found && fgets(line, size, file))
        found = strncmp(line, begin, strlen(begin)) == 0 && strstr(line, words);
    if (file)
        fclose(file);
    return found;
}

/* A text that does not hold the words any more, or does not compile, is no fault that was caught, whatever check says
 * so. */
static int is_caught(const struct fault *fault, const char *folder) {
    char log[64], line[300] = "", other[1024];
    snprintf(log, sizeof log, "%s/log", folder);
    const int code = run(fault, folder, log);
    const int found = find_line(log, "WRONG", "", line, sizeof line);
    const int of_results = !is_of_attention(fault) || strstr(line, " at element ") || strstr(line, "LAUNCH_FAILED") ||
                           strstr(line, "the mask plan calls");
    const int caught = code == 1 && found && of_results && strncmp(line, "WRONG no ", 9) != 0 &&
                       !find_line(log, "", "NVRTC does not compile", other, sizeof other);
    line[strcspn(line, "\n")] = 0;
    printf("%-40s %s%.160s\n", fault->name, caught ? "caught: " : "MISSED: ", line);
    return caught;
}

static void remove_folder(const char *folder) {
    char command[96];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command))
        printf("%s is left\n", folder);
}

int broken_texts(const struct options *o) {
    const int count = sizeof faults / sizeof faults[0];
    int missed = 0, tried = 0;
    for (int i = 0; i < count; i++) {
        char folder[] = "/tmp/fdm-broken-XXXXXX";
        if (o->group && !strstr(faults[i].name, o->group))
            continue;
        if (!mkdtemp(folder)) {
            perror("fdm-checks: a folder for kernels");
            return 2;
        }
        tried++;
        missed += !is_caught(&faults[i], folder);
        remove_folder(folder);
    }
    printf("%d passed, %d failed\n", tried - missed, missed);
    return missed > 0 || tried == 0;
}
