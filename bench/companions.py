"""companions.py: gemm and softmax on a CUDA device beside torch's, in turns; JSON to the file that is named.

Usage: companions.py gemm|softmax RESULT.json [SECONDS] [SIZE | KERNEL ...]. SIZE, of gemm, instead of all: 4096 for a square, 16x8192x8192
for m, n and k, in bfloat16, or with :fp16 behind; a KERNEL by name is timed beside the chosen one in each. Samples of all contenders of a
case alternate; medians. A row of softmax moves what a copy of the tensor moves: x read, out written; the backward's copy is that of two
inputs and one output. torch's product is cuBLAS.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch
from flash_dmattn import _native, gemm, softmax


def seconds_of(call, count: int) -> float:
    torch.cuda._sleep(4_000_000)  # the host runs ahead: what it takes to launch is not in the sample
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / count


def measure(calls: dict, rounds: int = 9) -> tuple:
    """Medians of each, and all samples; a contender that fails is a sentence."""
    samples: dict = {name: [] for name in calls}
    failed, counts = {}, {}
    for name, call in calls.items():
        try:
            seconds_of(call, 2)
            counts[name] = 3 if seconds_of(call, 2) > 1e-4 else 10
        except (RuntimeError, NotImplementedError) as error:
            failed[name] = str(error).splitlines()[0]
    for _ in range(rounds):
        for name, call in calls.items():
            if name not in failed:
                samples[name].append(seconds_of(call, counts[name]))
    return {name: failed.get(name) or statistics.median(samples[name]) for name in calls}, {n: s for n, s in samples.items() if s}


def softmax_case(dtype: torch.dtype, columns: int, megabytes: int) -> dict:
    rows = max(1, (megabytes << 20) // columns // dtype.itemsize)
    x = torch.randn(rows, columns, device="cuda", dtype=dtype)
    out, dx, y = torch.empty_like(x), torch.empty_like(x), torch.softmax(x, -1)
    kernels = ("naive", "online", "vector", "resident", "ring", "split") if columns == 4096 else ()
    calls = {"copy": lambda: out.copy_(x), "torch": lambda: torch.softmax(x, -1, out=out), "ours": lambda: softmax(x)}
    calls["torch log"] = lambda: torch.log_softmax(x, -1)
    calls["ours log"] = lambda: softmax(x, log=True)
    for name in kernels:
        calls[name] = lambda name=name: softmax(x, kernel=f"softmax.{name}")
    calls["torch backward"] = lambda: torch.ops.aten._softmax_backward_data(x, y, -1, dtype)
    calls["ours backward"] = lambda: torch.ops.flash_dmattn.softmax_backward(y, x, 1.0, False, None)
    seconds, samples = measure(calls)
    moved = 2 * x.numel() * x.itemsize
    result = {"dtype": str(dtype)[6:], "rows": rows, "columns": columns, "bytes": moved // 2, "seconds": seconds, "samples": samples}
    result["copy_gb_per_second"] = moved / seconds["copy"] * 1e-9
    for name in ("torch", "ours"):
        result[f"{name}_of_copy"] = seconds["copy"] / seconds[name] if isinstance(seconds[name], float) else None
    if isinstance(seconds["ours backward"], float):
        result["backward_of_copy"] = 1.5 * seconds["copy"] / seconds["ours backward"]
    return result


# From the slowest on, without gemm.naive; in the form of their names.
LADDER = ("gemm.sliced-k", "gemm.mma-warp", "gemm.mma+stage2", "gemm.mma+stage2+pad", "gemm.mma+stage2+swizzle",
          "gemm.mma+stage3", "gemm.mma+stage4", "gemm.mma+stage5", "gemm.mma+order", "gemm.mma+ahead", "gemm.mma+wide", "gemm.mma",
          "gemm.mma-tma", "gemm.hopper")
# Without wgmma; of every square beside gemm.hopper.
PORTABLE = "gemm.mma-tma"


def gemm_case(dtype: torch.dtype, m: int, n: int, k: int, kernels: tuple = ()) -> dict:
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn(n, k, device="cuda", dtype=dtype).T  # as of a linear layer's weight
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    calls = {"torch": lambda: torch.matmul(a, b, out=out), "ours": lambda: gemm(a, b)}
    rows = b.contiguous()
    calls |= {"torch NN": lambda: torch.matmul(a, rows, out=out), "ours NN": lambda: gemm(a, rows)}
    if not kernels and (m, n, k) == (4096, 4096, 4096):
        kernels = LADDER
    calls |= {name: lambda name=name: gemm(a, b, kernel=name) for name in kernels}
    copy = torch.empty_like(rows)
    if m <= 64:
        calls["copy"] = lambda: copy.copy_(rows)
    seconds, samples = measure(calls)
    if m == n == k:  # each alone: what runs before another takes power that the other lacks
        alone = {"gemm.hopper": b, PORTABLE: b, "gemm.hopper NN": rows, f"{PORTABLE} NN": rows}
        for name, right in alone.items():
            medians, all_samples = measure({f"{name} alone": lambda name=name, right=right: gemm(a, right, kernel=name.split()[0])})
            seconds |= medians
            samples |= all_samples
    error = (gemm(a, b).float() - torch.matmul(a, b).float()).abs().max().item()
    result = {"dtype": str(dtype)[6:], "m": m, "n": n, "k": k, "seconds": seconds, "samples": samples, "largest_difference": error}
    for name in ("torch", "ours", "ours NN"):
        result[f"{name}_tflops"] = 2e-12 * m * n * k / seconds[name] if isinstance(seconds[name], float) else None
    for name in ("", " NN"):
        if isinstance(seconds[f"ours{name}"], float):
            result[f"of_torch{name}"] = seconds[f"torch{name}"] / seconds[f"ours{name}"]
        if isinstance(seconds.get(f"{PORTABLE}{name} alone"), float) and isinstance(seconds[f"gemm.hopper{name} alone"], float):
            result[f"portable_of_hopper{name}"] = seconds[f"gemm.hopper{name} alone"] / seconds[f"{PORTABLE}{name} alone"]
    if m <= 64 and isinstance(seconds["ours"], float):
        result["of_copy"] = seconds["copy"] / 2 / seconds["ours"]
    return result


def size_of(text: str) -> tuple:
    size, _, dtype = text.partition(":")
    extents = [int(each) for each in size.split("x")]
    return (torch.float16 if dtype == "fp16" else torch.bfloat16, *(extents * 3 if len(extents) == 1 else extents))


def cases(name: str, named: list[str]):
    kernels = tuple(each for each in named if "." in each)
    for each in named:
        if "." not in each:
            yield lambda each=each: gemm_case(*size_of(each), kernels)
    if named:
        return
    if name == "softmax":
        sizes = (256, 264, 512, 520, 1000, 1024, 1040, 2048, 2056, 4096, 4104, 8192, 8704, 16384, 17408, 32768, 33792, 65536, 66560, 131072,
                 135168, 262144, 266240, 524288, 1048576)
        for columns in sizes:
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                if dtype is not torch.float16 or columns in (256, 4096, 131072, 1048576):
                    yield lambda dtype=dtype, columns=columns: softmax_case(dtype, columns, 256)
        for columns in (256, 4096, 33792, 65536, 131072, 262144, 1048576):
            for dtype in (torch.bfloat16, torch.float32):
                yield lambda dtype=dtype, columns=columns: softmax_case(dtype, columns, 64)
        return
    for m in (1, 16, 64):
        yield lambda m=m: gemm_case(torch.bfloat16, m, 8192, 8192)
    for size in (8192, 4096, 2048, 1024, *(n * 1024 for n in (3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16))):
        yield lambda size=size: gemm_case(torch.bfloat16, size, size, size)
    for size in (n * 1024 for n in range(1, 17)):
        yield lambda size=size: gemm_case(torch.float16, size, size, size)


def commit() -> str:
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main(arguments: list[str]) -> None:
    until = time.time() + (float(arguments[2]) if len(arguments) > 2 else 1e9)
    results = []
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "version": _native.version(), "commit": commit(),
             "command": " ".join(["bench/companions.py", *arguments])}
    for case in cases(arguments[0], arguments[3:]):
        if time.time() > until:
            break
        results.append(case())
        print({key: value for key, value in results[-1].items() if key not in ("seconds", "samples")}, flush=True)
        with open(arguments[1], "w") as file:
            json.dump({**facts, "cases": results}, file)
    ratios = [each["of_torch"] for each in results if each.get("of_torch") and each["m"] > 64]
    if ratios:
        print(f"of torch, geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.4f}, least {min(ratios):.4f}")
    for name in ("", " NN"):
        ratios = [each[f"portable_of_hopper{name}"] for each in results if f"portable_of_hopper{name}" in each]
        if ratios:
            print(f"{PORTABLE}{name} of gemm.hopper, geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.4f}, least {min(ratios):.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
