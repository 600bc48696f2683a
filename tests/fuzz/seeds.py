"""Writes the first inputs of the fuzz targets: problems of every kind, and small valid files of every format.

Usage: python tests/fuzz/seeds.py FOLDER. Writes FOLDER/fuzz_problem and FOLDER/fuzz_files, the same bytes every time.
The order of bytes is that in which fuzz_problem.c and fuzz_files.c take them.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Tuple

# ---- fuzz_problem ----------------------------------------------------------------------------------------------------

SOFTCAP, SCALE, WINDOWS = 16, 8, 6  # bits of the options' flags
ONE_BATCH, KV_HEADS, ONE_ROW, ONE_KEY, MASK, BIAS, INTERVALS = 2, 4, 8, 16, 32, 64, 128  # bits of the features


def options(flags: int, family: int) -> List[int]:
    taken = [flags]
    taken += [12] if flags & 2 else []
    taken += [5] if flags & 4 else []
    taken += list(struct.pack(">d", 0.25)) if flags & 8 else []
    taken += [24] if flags & 16 else []
    taken += [40] if flags & 32 else []
    return [*taken, family]


def tensor(gap: int) -> List[int]:
    """Nothing wrong with it; gap > 0: rows that lie apart."""
    return [0, gap, 255] if gap else [1, 255]


def problem(
    backward: int, dtype: int, features: int, packed: int, flags: int, family: int, sizes: Sequence[int], gap: int
) -> bytes:
    """A call that is carried out, small: large ones slow the fuzzer down. sizes are batch, heads_kv - 1, group - 1,
    seqlen_q, seqlen_k, head_dim - 1, and head_dim_v - 1."""
    batch, kv, group, sq, sk, d, dv = sizes
    taken = [1, backward, *options(flags, family), features, 0 if packed else 1, dtype, batch, kv, group]
    taken += [] if packed else [sq, sk]
    taken += [d] if features & 1 else [d, dv]
    count = 5 + 2 * packed + bool(features & MASK)
    for _ in range(count):
        taken += tensor(gap)
    if features & BIAS:
        taken += [1, *tensor(gap)]
    for _ in range(2 * bool(features & INTERVALS)):
        taken += tensor(gap)
    if backward:
        taken += [*tensor(gap), 1, *tensor(gap)]
        for _ in range(3):
            taken += tensor(gap)
        taken += [1, *tensor(gap)] if features & BIAS else []
    return bytes(taken)


def problems() -> Iterator[bytes]:
    dice = random.Random(1)
    combinations = [0, MASK, BIAS, INTERVALS, MASK | BIAS, MASK | INTERVALS, MASK | BIAS | INTERVALS]
    for backward, dtype, parts in itertools.product((0, 1), range(4), combinations):
        features = parts | dice.choice((0, 1, ONE_BATCH, KV_HEADS, ONE_ROW, ONE_KEY, ONE_BATCH | KV_HEADS | 1))
        flags = dice.choice((0, 1, 1, SOFTCAP, SCALE, WINDOWS, 64))
        family = 0 if dtype < 3 else 3  # float64 is the reference family's
        sizes = (dice.randint(1, 2), dice.randint(0, 1), dice.randint(0, 2), dice.choice((1, 3, 7, 17)))
        sizes += (dice.choice((1, 8, 18, 32)), dice.choice((0, 7, 31)), dice.choice((0, 7, 31)))
        packed = dice.randint(0, 3) == 0
        head = problem(backward, dtype, features, packed, flags, family, sizes, dice.choice((0, 0, 3)))
        yield head + bytes(dice.randrange(256) for _ in range(dice.choice((0, 40))))
    # Problems filled by hand, of each pass and feature.
    for flags, dtype in itertools.product((0, 1, 2, 4, 8, 16 | 8 | 1, 32), (2, 3, 4)):
        yield bytes([0, 3, 3, 64, 4, 64, 5, 32, flags, dtype, dtype, *options(1, 0)])


# ---- fuzz_files: the first byte says which format --------------------------------------------------------------------

SAFETENSORS, NPY, PLAN = 0, 1, 2
SAFETENSORS_PIPE, NPY_PIPE = 66, 64  # whose end is not known


def npy(descr: str, shape: Tuple[int, ...], data: bytes, version: int = 1, fortran: bool = False) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    start = 10 if version == 1 else 12
    header += b" " * (-(start + len(header) + 1) % 64) + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def safetensors(tensors: Dict[str, Tuple[str, List[int], int]], metadata: bool = False) -> bytes:
    header: Dict[str, object] = {"__metadata__": {"format": "pt"}} if metadata else {}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(range(256)) * (end // 256) + bytes(range(end % 256))


def plan(**changed: object) -> bytes:
    """What `fdm plan --json` prints, with some of it changed."""
    fields: Dict[str, object] = {"family": "cpu", "kernel": "cpu.forward.avx2", "choice": "CPU_AVX2_512x64"}
    fields.update({"block_m": 512, "block_n": 64, "stages": None, "v_in_registers": None, "shared_bytes": None})
    fields.update({"workspace_bytes": 2414976, "num_threads": 2, "kernel_index": 8, "device.type": 1})
    fields.update({"device.index": 0, "parameters": [2, 0, 0, 0, 0, 0, 0, 0], "reason": "a \"reason\" \u00e9 \\"})
    fields.update({"pass": "forward", "dtype": "float32", "batch": 1, "heads": 8, "heads_kv": 8})
    fields.update({"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64, "head_dim_v": 64, "total_q": 0, "total_k": 0})
    fields.update({"softmax_scale": 0.125, "softcap": 0, "window_left": -1, "window_right": -1, "causal": 0})
    fields.update({"varlen": 0, "deterministic": 0, "needs_lse": 1, "needs_dq": 1, "needs_dk": 1, "needs_dv": 1})
    fields.update({"needs_dbias": 0, "has_dlse": 0, "has_lse_low": 0, "has_intervals": 0, "interval_batch": 1, "interval_heads": 1})
    fields.update({"has_mask": 0, "has_bias": 0, "mask_shape": [1, 1, 1, 1], "bias_shape": [1, 1, 1, 1]})
    fields.update({"bias_dtype": "float32", "has_sink": 0, "num_sinks": 1, "sink_dtype": "float32", "needs_dsink": 0})
    fields.update({"lse_without_sink": 0, "has_seqused_q": 0, "has_seqused_k": 0, "has_cache": 0, "page_size": 0})
    fields.update({"num_pages": 0, "max_pages": 0, "ragged_pages": 0, "has_first_key": 0, "has_cache_row": 0})
    fields.update({"new_rows": 0, "rotary_dim": 0, "rotary_interleaved": 0, "dkv_float32": 0, "add_dkv": 0, "aligned": 1, "scores_aligned": 1})
    fields.update({"invariance": 0, "num_splits": 0, "split_keys": 0, "q_mappable": 1, "keys_mappable": 1, "scores_mappable": 1})
    fields.update(changed)
    return json.dumps(fields).encode()


def files() -> Iterator[bytes]:
    sizes = {"<f4": 4, "<f2": 2, "<f8": 8, "|b1": 1, "|u1": 1, "<i4": 4, "<V2": 2, "|V2": 2}
    for descr, size in sizes.items():
        yield bytes([NPY]) + npy(descr, (2, 3), bytes(6 * size))
    for shape in ((), (0,), (5,), (1, 2, 3, 4), (2, 0, 3)):
        count = 1
        for extent in shape:
            count *= extent
        yield bytes([NPY]) + npy("<f4", shape, bytes(4 * count))
    yield bytes([NPY]) + npy("<f4", (2, 3), bytes(24), version=2)
    yield bytes([NPY]) + npy("<f4", (2, 3), bytes(24), version=3)
    yield bytes([NPY]) + npy("<f4", (2, 3), bytes(24), fortran=True)
    yield bytes([NPY]) + npy(">f4", (2, 3), bytes(24))
    yield bytes([NPY_PIPE]) + npy("<f4", (2, 3), b"")
    yield bytes([SAFETENSORS_PIPE]) + safetensors({"q": ("F32", [2, 3], 24)})
    yield bytes([NPY]) + npy("<f4", (2, 3), bytes(23))
    for dtype, size in {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "BOOL": 1, "U8": 1, "I32": 4}.items():
        yield bytes([SAFETENSORS]) + safetensors({"q": (dtype, [2, 3], 6 * size)})
    yield bytes([SAFETENSORS]) + safetensors({})
    yield bytes([SAFETENSORS]) + safetensors({}, metadata=True)
    all_of = {name: ("F32", [1, 2, 2, 4], 64) for name in ("q", "k", "v", "out")}
    yield bytes([SAFETENSORS]) + safetensors({**all_of, "mask": ("BOOL", [1, 1, 2, 2], 4)}, metadata=True)
    yield bytes([SAFETENSORS]) + safetensors({"scalar": ("F32", [], 4), "none": ("F32", [0, 7], 0)})
    yield bytes([SAFETENSORS]) + safetensors({"a\u00e9\"\\": ("F32", [1] * 8, 4)})
    yield bytes([SAFETENSORS]) + safetensors({"I64": ("I64", [1], 8)})
    yield bytes([SAFETENSORS]) + safetensors({"short": ("F32", [2], 4)})
    yield bytes([PLAN]) + plan()
    backward = {"pass": "backward", "kernel": "cpu.backward.avx2", "kernel_index": 14, "needs_dbias": 1, "has_dlse": 1}
    yield bytes([PLAN]) + plan(**backward, has_bias=1, bias_shape=[1, 8, 1024, 1024])
    yield bytes([PLAN]) + plan(dtype="bfloat16", bias_dtype="bfloat16", has_mask=1, mask_shape=[1, 8, 1024, 1024])
    yield bytes([PLAN]) + plan(varlen=1, total_q=100, total_k=200, has_intervals=1, causal=1, softcap=1.5e1)
    mma = {"family": "mma", "kernel": "mma.forward", "choice": "MMA_Forward_128x64_S2", "kernel_index": 2}
    tiles = {"stages": 2, "v_in_registers": 1, "shared_bytes": 59392, "device.type": 2}
    yield bytes([PLAN]) + plan(**mma, **tiles, dtype="float16", parameters=[13, 0, 0, 0, 0, 0, 0, 0])
    yield bytes([PLAN]) + plan(family="reference", kernel="reference.forward", dtype="float64", softmax_scale=-1e-300)
    yield bytes([PLAN]) + b"[1, {\"a\": [true, false, null]}, \"\\u00e9\\ud83d\\ude00\\n\"]"


def write(folder: Path, inputs: Iterator[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(inputs):
        (folder / f"{index:03d}").write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]) / "fuzz_problem", problems())
    write(Path(sys.argv[1]) / "fuzz_files", files())
