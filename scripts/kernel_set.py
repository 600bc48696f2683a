#!/usr/bin/env python3
"""kernel_set.py: writes cli/common_set.c, the problems whose kernels `fdm cache build --set common` compiles.

They are the benchmark's bfloat16 cells of head dims 64, 128 and 256 (bench/bench_cuda.py and the mask, packed and sink
cases of bench/before_after.py), each forward and backward but for decoding, and the models of MODELS at the lengths of
LENGTHS. Two problems that get the same kernels cost one compilation. Usage: kernel_set.py [--check]
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

try:
    import bench_cuda
    import before_after
    import torch
except ImportError as error:  # the benchmark needs the installed package
    print(f"kernel set: not compared: {error}")
    sys.exit(sys.argv[1:] != ["--check"])

OUT = ROOT / "cli" / "common_set.c"
HEAD_DIMS = (64, 128, 256)
# Heads, KV heads, head dim, window (0: none), sinks: as the models' public configurations say.
MODELS = {
    "Llama 3 8B, Mistral 7B v0.3, Qwen 3 8B": (32, 8, 128, 0, False),
    "Llama 3 70B": (64, 8, 128, 0, False),
    "Llama 3.2 1B": (32, 8, 64, 0, False),
    "Qwen 2.5 7B": (28, 4, 128, 0, False),
    "Gemma 3 12B, full layers": (16, 8, 256, 0, False),
    "Gemma 3 12B, local layers": (16, 8, 256, 1023, False),
    "gpt-oss, full layers": (64, 8, 64, 0, True),
    "gpt-oss, local layers": (64, 8, 64, 127, True),
}
LENGTHS = (512, 2048, 8192, 32768)
DECODE_KEYS = (2048, 16384)


def line(batch: int, heads: int, heads_kv: int, rows: int, keys: int, dim: int, backward: bool = False, *words: str) -> str:
    shape = [f"--batch {batch}"] * (batch != 1) + [f"--heads {heads}"] + [f"--heads-kv {heads_kv}"] * (heads_kv != heads)
    shape += [f"--seqlen-q {rows}"] + [f"--seqlen-k {keys}"] * (keys != rows) + [f"--head-dim {dim}", "--dtype bf16"]
    return " ".join([*shape, *["--pass backward"] * backward, *words])


def literal(text: str) -> str:
    """A line of C of at most 120 columns, or two."""
    if len(text) > 110:
        at = text.rindex(" ", 0, 110)
        text = text[:at] + '"\n    "' + text[at:]
    return f'    "{text}",\n'


def cells() -> list[str]:
    """Of the benchmark."""
    lines = []
    sets = ["forward", "shapes", "intervals", "backward", "backward-shapes", "backward-intervals", "decode"]
    for case in bench_cuda.cases(sets):
        if case.dtype != torch.bfloat16 or case.head_dim not in HEAD_DIMS or "deterministic" in case.extra:
            continue
        words = ["--causal"] * case.causal + ["--intervals"] * ("top-" in case.extra or case.extra == "padded")
        words += ["--key-bias"] * ("and bias" in case.extra)
        lines.append(line(case.batch, case.heads, case.heads_kv, case.rows, case.keys, case.head_dim, case.backward, *words))
    for _, shape, dtype, options, hides in [*before_after.cases(), *before_after.mask_cases(), *before_after.sink_cases()]:
        batch, heads, heads_kv, rows, keys, dim = shape
        if dtype != torch.bfloat16 or dim not in HEAD_DIMS or "family" in options or hides in ("mask", "bias"):
            continue
        words = ["--causal"] * options.get("causal", 0) + ["--varlen"] * (hides == "packed")
        words += ["--intervals"] * (hides in ("padding", "intervals", "documents", "prefix", "top-W"))
        words += [f"--window {options['window_left']},-1"] if "window_left" in options else []
        lines += [line(batch, heads, heads_kv, rows, keys, dim, False, *words)]
        lines += [line(batch, heads, heads_kv, rows, keys, dim, True, *words)] * (rows > 8)
    return lines


def models() -> list[str]:
    lines = []
    for heads, heads_kv, dim, window, sinks in MODELS.values():
        words = ["--causal"] + ([f"--window {window},-1"] if window else []) + ["--sink"] * sinks
        lines += [line(1, heads, heads_kv, s, s, dim, backward, *words) for s in LENGTHS for backward in (False, True)]
        lines += [line(batch, heads, heads_kv, 1, keys, dim, False, *words) for batch in (1, 16) for keys in DECODE_KEYS]
        lines += [line(4, heads, heads_kv, 2048, 2048, dim, backward, *words, "--varlen") for backward in (False, True)]
        if not window and not sinks:
            top = [*words, "--intervals", "--key-bias"]
            lines += [line(1, heads, heads_kv, 8192, 8192, dim, backward, *top) for backward in (False, True)]
    return lines


def main() -> int:
    lines = sorted(set(cells() + models()))
    text = """/* common_set.c: made by scripts/kernel_set.py: problems whose kernels `fdm cache build --set common` compiles. */
#include "cache_build.h"

const char *const common_set[] = {
""" + "".join(map(literal, lines)) + "    NULL,\n};\n"
    if sys.argv[1:] == ["--check"]:
        if OUT.read_text() != text:
            print("cli/common_set.c is not what scripts/kernel_set.py writes")
            return 1
        return 0
    OUT.write_text(text)
    print(f"{len(lines)} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
