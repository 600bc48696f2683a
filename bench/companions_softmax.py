"""companions_softmax.py: softmax on a CUDA device beside torch's and a copy, in turns; JSON to the file that is named.

Usage: companions_softmax.py RESULT.json [MEGABYTES [SECONDS]]. A row moves what a copy of the tensor moves: x read, out written; the
backward's copy is that of two inputs and one output. Samples of all contenders of a case alternate; medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from flash_dmattn import _native, softmax


def seconds_of(call, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / count


def measure(calls: dict, rounds: int = 9) -> dict:
    """Medians of each; a contender that fails is a sentence."""
    samples: dict = {name: [] for name in calls}
    failed = {}
    for name, call in calls.items():
        try:
            seconds_of(call, 2)
        except (RuntimeError, NotImplementedError) as error:
            failed[name] = str(error).splitlines()[0]
    for _ in range(rounds):
        for name, call in calls.items():
            if name not in failed:
                samples[name].append(seconds_of(call, 3))
    return {name: failed.get(name) or statistics.median(samples[name]) for name in calls}


def case(dtype: torch.dtype, columns: int, megabytes: int) -> dict:
    rows = max(1, (megabytes << 20) // columns // dtype.itemsize)
    x = torch.randn(rows, columns, device="cuda", dtype=dtype)
    out, dx, y = torch.empty_like(x), torch.empty_like(x), torch.softmax(x, -1)
    kernels = ("naive", "online", "vector", "resident", "split") if columns == 4096 else ("split",)
    calls = {"copy": lambda: out.copy_(x), "torch": lambda: torch.softmax(x, -1, out=out), "ours": lambda: softmax(x)}
    calls["torch log"] = lambda: torch.log_softmax(x, -1)
    calls["ours log"] = lambda: softmax(x, log=True)
    for name in kernels:
        calls[name] = lambda name=name: softmax(x, kernel=f"softmax.{name}")
    calls["torch backward"] = lambda: torch.ops.aten._softmax_backward_data(x, y, -1, dtype)
    calls["ours backward"] = lambda: torch.ops.flash_dmattn.softmax_backward(y, x, 1.0, False, None)
    seconds = measure(calls)
    moved = 2 * x.numel() * x.itemsize
    result = {"dtype": str(dtype)[6:], "rows": rows, "columns": columns, "bytes": moved // 2, "seconds": seconds}
    result["copy_gb_per_second"] = moved / seconds["copy"] * 1e-9
    for name in ("torch", "ours"):
        result[f"{name}_of_copy"] = seconds["copy"] / seconds[name] if isinstance(seconds[name], float) else None
    if isinstance(seconds["ours backward"], float):
        result["backward_of_copy"] = 1.5 * seconds["copy"] / seconds["ours backward"]
    return result


def main(arguments: list[str]) -> None:
    megabytes = int(arguments[1]) if len(arguments) > 1 else 256
    until = time.time() + (float(arguments[2]) if len(arguments) > 2 else 1e9)
    results = []
    sizes = (256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
    for columns in sizes:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            if time.time() > until or (dtype is torch.float16 and columns not in (256, 4096, 131072, 1048576)):
                continue
            results.append(case(dtype, columns, megabytes))
            row = results[-1]
            print(row["dtype"], row["columns"], {k: v for k, v in row.items() if k.endswith(("copy", "second"))}, flush=True)
            with open(arguments[0], "w") as file:
                json.dump({"device": torch.cuda.get_device_name(), "version": _native.version(), "cases": results}, file)


if __name__ == "__main__":
    main(sys.argv[1:])
