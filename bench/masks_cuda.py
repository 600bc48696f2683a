#!/usr/bin/env python3
"""masks_cuda.py: how long key intervals of top-W take on a CUDA device, their share of a training step in one graph, what W
costs and gains, and what a generated token costs with the slots of masks.TopKState beside attention to all keys.

Times are those of CUDA graphs replayed, medians with quartiles, in microseconds; the bytes of the second-level cache are
left as the replay before leaves them, as between the layers of a model. Usage: masks_cuda.py [--json FILE] [--samples N] [--parts builds steps windows generation]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import torch
from flash_dmattn import flash_dmattn_func, masks

# heads, keys, W
BUILDS = ((16, 1024, 64), (16, 2048, 128), (16, 8192, 512), (16, 32768, 2048), (32, 65536, 4096), (8, 131072, 8192), (1, 1 << 20, 1 << 16))
# query heads, KV heads, head dim, keys, windows
GENERATION = (32, 8, 128, 131072, (512, 2048, 8192, 32768))
STEPS = ((1, 16, 128, 8192, 512), (1, 16, 128, 32768, 2048))
# heads, head dim, keys, keys over W
WINDOWS = (16, 128, (8192, 32768), (64, 32, 16, 8, 4, 2))


def captured(call, times: int = 1) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def timed(call, samples: int, replays: int = 20, in_a_row: int = 1) -> dict:
    """A call of which a graph holds `in_a_row`, one after the other."""
    graph, times = captured(call, in_a_row), []
    for _ in range(samples + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / replays / in_a_row)
    low, median, high = statistics.quantiles(times[3:], n=4)
    return {"us": round(median, 2), "quartiles": [round(low, 2), round(high, 2)], "samples": [round(each, 2) for each in times[3:]]}


def kernels_of(call) -> dict:
    """Microseconds of each kernel of a call, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    return {each.key: round(each.device_time_total / 10, 2) for each in found.key_averages() if each.device_time_total}


def builds(samples: int) -> list:
    rows = []
    for heads, keys, window in BUILDS:
        for dtype in (torch.float32, torch.bfloat16):
            for name, bias in (("normal", torch.randn(1, heads, keys)), ("relu", torch.randn(1, heads, keys).relu()),
                               ("rising", torch.arange(keys).float().expand(1, heads, keys))):
                bias = bias.to(dtype).cuda()
                call = lambda bias=bias, window=window: masks.topk_intervals(bias, window)
                row = {"heads": heads, "keys": keys, "window": window, "dtype": str(dtype)[6:], "bias": name, **timed(call, samples)}
                if name == "normal":
                    row["kernels"] = kernels_of(call)
                print(row, flush=True)
                rows.append(row)
    return rows


def steps(samples: int) -> list:
    """What dt_proj gives, to its bias and intervals, forward and backward in one graph, and its parts. The names of the step's
    kernels say whether one of PyTorch's is among them."""
    rows = []
    for batch, heads, dim, keys, window in STEPS:
        q, k, v = (torch.randn(batch, keys, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        dt = torch.randn(batch, keys, heads, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        a = torch.ones(heads, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dout = torch.randn_like(q)
        leaf = masks.key_bias(dt, a).detach().requires_grad_()
        dbias = torch.randn_like(leaf)
        pair = masks.topk_intervals(leaf, window)

        def attend(bias, intervals, inputs):
            out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, key_intervals=intervals)
            return torch.autograd.grad(out, (q, k, v, *inputs), dout)

        def step():
            bias = masks.key_bias(dt, a)
            return attend(bias, masks.topk_intervals(bias, window), (dt, a))

        parts = {"bias": lambda: masks.key_bias(dt, a), "intervals": lambda: masks.topk_intervals(leaf, window),
                 "bias_and_gradients": lambda: torch.autograd.grad(masks.key_bias(dt, a), (dt, a), dbias),
                 "attention": lambda: attend(leaf, pair, (leaf,)), "step": step}
        times = {name: timed(call, samples, 5) for name, call in parts.items()}
        attention = times["attention"]["us"]
        row = {"heads": heads, "head_dim": dim, "keys": keys, "window": window, **times,
               "share_of_building": round((times["step"]["us"] - attention) / attention, 4), "kernels": kernels_of(step)}
        print(row, flush=True)
        rows.append(row)
    return rows


def windows(samples: int) -> list:
    """Forward and backward by W, beside those of a plain causal mask, and the building of the intervals."""
    rows = []
    heads, dim, lengths, parts = WINDOWS
    for keys in lengths:
        q, k, v = (torch.randn(1, keys, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        bias = torch.randn(1, heads, keys, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dout = torch.randn_like(q)

        def attend(inputs, **options):
            return torch.autograd.grad(flash_dmattn_func(q, k, v, is_causal=True, **options), inputs, dout)

        rows.append({"keys": keys, "window": None, "attention": timed(lambda: attend((q, k, v)), samples, 5)})
        print(rows[-1], flush=True)
        for part in parts:
            window = keys // part
            pair = masks.topk_intervals(bias, window)
            options = {"attn_bias": bias, "key_intervals": pair}
            row = {"keys": keys, "window": window, "build": timed(lambda: masks.topk_intervals(bias, window), samples),
                   "attention": timed(lambda: attend((q, k, v, bias), **options), samples, 5)}
            both = row["build"]["us"] + row["attention"]["us"]
            dense = next(each for each in rows if each["keys"] == keys)["attention"]["us"]
            rows.append({**row, "times_causal": round(dense / both, 3)})
            print(rows[-1], flush=True)
    return rows


def generation(samples: int) -> list:
    """One row of a long sequence: all keys, the intervals of top-W, and its slots; one graph each, and eight in a row in one
    graph, as the layers of a model are, where the host does not count. What is small stays in the second-level cache."""
    def both(call) -> dict:
        return {**timed(call, samples), "in_a_row": timed(call, samples, 20, 8)}

    heads, heads_kv, dim, keys, windows = GENERATION
    k, v = (torch.randn(1, keys, heads_kv, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(1, heads_kv, keys, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 1, heads, dim, device="cuda", dtype=torch.bfloat16)
    one_bias, one_k, one_v = bias[..., -1].clone(), k[:, -1:].clone(), v[:, -1:].clone()
    dense = both(lambda: flash_dmattn_func(q, k, v))
    biased = both(lambda: flash_dmattn_func(q, k, v, attn_bias=bias))
    rows = [{"keys": keys, "heads": heads, "heads_kv": heads_kv, "dense": dense, "dense_with_bias": biased}]
    print(rows[0], flush=True)
    for window in windows:
        pair = masks.topk_intervals(bias, window, 1)
        state = masks.TopKState.of_prompt(bias, window, k, v)
        want = flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=pair)
        error = float((flash_dmattn_func(q, state.k, state.v, attn_bias=state.bias) - want).abs().max())

        def step(state=state):
            state.append(one_bias, one_k, one_v)
            return flash_dmattn_func(q, state.k, state.v, attn_bias=state.bias)

        calls = {"intervals": lambda pair=pair: flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=pair), "slots_step": step,
                 "append": lambda state=state: state.append(one_bias, one_k, one_v),
                 "attend": lambda state=state: flash_dmattn_func(q, state.k, state.v, attn_bias=state.bias)}
        row = {"window": window, "difference": error, **{name: both(call) for name, call in calls.items()}}
        row["times_dense"] = round(dense["us"] / row["slots_step"]["us"], 2)
        row["kernels"] = kernels_of(step)
        row["times_dense_in_a_row"] = round(dense["in_a_row"]["us"] / row["slots_step"]["in_a_row"]["us"], 2)
        print(row, flush=True)
        rows.append(row)
    return rows


def commit() -> str:
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not known"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--parts", nargs="+", default=["builds", "steps", "windows", "generation"])
    arguments = parser.parse_args()
    parts = {"builds": builds, "steps": steps, "windows": windows, "generation": generation}
    result = {"command": " ".join(["bench/masks_cuda.py", *sys.argv[1:]]), "commit": commit(), "device": torch.cuda.get_device_name(),
              "torch": torch.__version__, **{name: parts[name](arguments.samples) for name in arguments.parts}}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
