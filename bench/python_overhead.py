#!/usr/bin/env python3
"""python_overhead.py: what one call costs the host in Python: flash_dmattn_func beside PyTorch's SDPA, on tiny tensors.

Usage: python_overhead.py [--device cuda|cpu] [--calls N] [--batches N] [--json FILE]
A batch is `calls` calls back to back, then a wait that is not counted; batches of the two take turns. Printed: median
microseconds a call, with quartiles. On CUDA, SDPA is its flash kernel, tensors are bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, Callable, Dict, List

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_dmattn
from flash_dmattn import flash_dmattn_func


def actions_on(device: str) -> Dict[str, Dict[str, Callable[[], Any]]]:
    """Each pair computes the same; SDPA sees the heads before the rows."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 64, 2, 64, device=device).to(dtype) for _ in range(3))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    heads_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    leaves_first = [tensor.clone().requires_grad_() for tensor in heads_first]
    gradient, gradient_first = torch.randn_like(q), torch.randn_like(heads_first[0])

    def without_gradients(function: Callable[..., Any], tensors: List[torch.Tensor]) -> Callable[[], Any]:
        def action() -> Any:
            with torch.no_grad():
                return function(*tensors)

        return action

    def both_passes(function: Callable[..., Any], tensors: List[torch.Tensor], grad: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*tensors), tensors, grad)

    sdpa, ours = scaled_dot_product_attention, flash_dmattn_func
    return {
        "forward": {"sdpa": lambda: sdpa(*heads_first), "flash_dmattn": lambda: ours(q, k, v)},
        "forward under no_grad": {
            "sdpa": without_gradients(sdpa, leaves_first),
            "flash_dmattn": without_gradients(ours, leaves),
        },
        "forward with gradients": {"sdpa": lambda: sdpa(*leaves_first), "flash_dmattn": lambda: ours(*leaves)},
        "forward and backward": {
            "sdpa": both_passes(sdpa, leaves_first, gradient_first),
            "flash_dmattn": both_passes(ours, leaves, gradient),
        },
    }


def microseconds(action: Callable[[], Any], calls: int, wait: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        action()
    taken = time.perf_counter() - begin
    wait()
    return taken / calls * 1e6


def measure(device: str, calls: int, batches: int) -> Dict[str, Dict[str, List[float]]]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    result: Dict[str, Dict[str, List[float]]] = {}
    for what, pair in actions_on(device).items():
        samples: Dict[str, List[float]] = {name: [] for name in pair}
        for batch in range(batches + 2):  # two to warm up
            for name, action in pair.items():
                taken = microseconds(action, calls, wait)
                if batch >= 2:
                    samples[name].append(taken)
        result[what] = {name: statistics.quantiles(values, n=4) for name, values in samples.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        result = measure(options.device, options.calls, options.batches)
    print(f"flash_dmattn {flash_dmattn.__version__}, PyTorch {torch.__version__}, {options.device}; us a call")
    print(f"{'':24s} {'':14s} {'25 %':>8s} {'median':>8s} {'75 %':>8s}")
    for what, pair in result.items():
        for name, quartiles in pair.items():
            print(f"{what:24s} {name:14s} " + " ".join(f"{value:8.2f}" for value in quartiles))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "device": options.device, "quartiles": result}, file, indent=1)


if __name__ == "__main__":
    main()
