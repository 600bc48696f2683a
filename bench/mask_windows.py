#!/usr/bin/env python3
"""mask_windows.py: what W costs and gains on the CPU: key intervals of top-W, forward and backward with their bias, beside
a plain causal mask, in float32. All calls take turns, so that a busy machine slows them alike; medians and quartiles.

Usage: mask_windows.py [--keys 4096] [--heads 4] [--head-dim 64] [--rounds 9]. On CUDA devices: masks_cuda.py --parts windows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Callable, Dict, List

import torch
from flash_dmattn import flash_dmattn_func, masks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("keys", 4096), ("heads", 4), ("head-dim", 64), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    shape = 1, options.keys, options.heads, options.head_dim
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    bias, dout = torch.randn(1, options.heads, options.keys, requires_grad=True), torch.randn(shape)

    def causal() -> None:
        torch.autograd.grad(flash_dmattn_func(q, k, v, is_causal=True), (q, k, v), dout)

    def with_window(window: int) -> Callable[[], None]:
        def call() -> None:
            pair = masks.topk_intervals(bias, window)
            out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, key_intervals=pair)
            torch.autograd.grad(out, (q, k, v, bias), dout)

        return call

    calls: Dict[str, Callable[[], object]] = {"causal": causal}
    for part in (64, 32, 16, 8, 4, 2):
        window = max(1, options.keys // part)
        calls[f"W {window}"] = with_window(window)
        calls[f"W {window}, intervals"] = lambda window=window: masks.topk_intervals(bias, window)
    times: Dict[str, List[float]] = {name: [] for name in calls}
    for n in range(options.rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if n > 0:  # the first round warms up
                times[name].append((time.perf_counter() - began) * 1e3)
    for name, samples in times.items():
        low, median, high = statistics.quantiles(samples, n=4)
        print(f"{name:<24}{median:9.2f} ms   {low:.2f} .. {high:.2f}")


if __name__ == "__main__":
    main()
