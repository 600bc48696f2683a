#!/usr/bin/env python3
"""host_time.py: what a warm call costs the host in Python: forward, calls on caches, appending, and flash-attn's names.

Usage: host_time.py [--device cuda|cpu] [--calls N] [--batches N] [--only GROUP ...] [--json FILE]
A group holds ways to compute the same tiny problem: our own call, those that flash-attn's names make of it, and on the
CPU the floor, which is the extension's call into results that are there already. A batch is `calls` calls back to back,
then a wait that is not counted; batches of all ways of all groups take turns. Times are the thread's processor time,
in microseconds a call: quartiles over batches. "over" is the median of the differences to the group's first way, batch
by batch. A group that begins with "plain forward" is compared with that.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch

import flash_dmattn
from flash_dmattn import (
    _native,
    append_kv_cache,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    flash_dmattn_with_kvcache_func,
)
from flash_dmattn.compat import flash_attn_cute, flash_attn_interface
from flash_dmattn.compat.flash_attn import functions as flash_attn
from flash_dmattn.compat.varlen import varlen_attn

from bench_attention import cpu_model
from masks_cuda import commit

Call = Callable[[], Any]
Groups = Dict[str, Dict[str, Call]]
BASE, OWN, FLOOR = "plain forward", "own call", "floor"
KEYS, DIM = 4, 64
SETTINGS = (0, 0, None, False, 0.0, -1, -1, False, False, 0)


class Problem:
    """One sequence of one row and four keys, two query heads on one KV head: dense, packed and as a cache of one page."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def integers(*numbers: int) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device).to(dtype)

        self.q, self.k, self.v = normal(1, 1, 2, DIM), normal(1, KEYS, 1, DIM), normal(1, KEYS, 1, DIM)
        self.leaf = self.q.clone().requires_grad_()
        self.packed = self.q[0], self.k[0], self.v[0], integers(0, 1), integers(0, KEYS), 1, KEYS
        self.new = normal(1, 1, 1, DIM), normal(1, 1, 1, DIM)
        self.lengths, self.before, self.table = integers(KEYS), integers(KEYS - 1), integers(0)[None]
        self.rows = integers(0, 1)
        self.slots, self.rows_of_slots = torch.tensor([KEYS - 1], device=device), [each[0] for each in self.new]
        self.rotary = normal(2 * KEYS, DIM // 2), normal(2 * KEYS, DIM // 2)
        self.out = torch.empty_like(self.q)

    def floor(self, cached: bool, table: Any = None, new: Sequence[Any] = (None, None)) -> Call:
        """The extension's call with results that are there, on the CPU."""
        tensors, none = (self.q, self.k, self.v), [None] * 10
        if not cached:
            return lambda: _native.forward(*tensors, *none, self.out, None, None, *SETTINGS, 1, None, None, False)
        length = self.lengths if new[0] is None else self.before
        given = (*none[:9], table, None, None, length, None, *new, *none[:4], self.out, None, None)
        return lambda: _native.cache_forward(*tensors, *given, *SETTINGS, False, 0, 0, 0, 1, None)


def groups_of_own(p: Problem) -> Groups:
    """Our own calls, beside the plain forward."""
    dense, packed, cached = flash_dmattn_func, flash_dmattn_varlen_func, flash_dmattn_with_kvcache_func
    read, written = {"cache_seqlens": p.lengths}, {"cache_seqlens": p.before, "block_table": p.table}
    ways: Dict[str, Call] = {
        BASE: lambda: dense(p.q, p.k, p.v),
        "packed": lambda: packed(*p.packed),
        "cache": lambda: cached(p.q, p.k, p.v, **read),
        "cache, given out": lambda: cached(p.q, p.k, p.v, **read, out=p.out),
        "cache, pages": lambda: cached(p.q, p.k, p.v, **read, block_table=p.table),
        "cache, pages, new keys": lambda: cached(p.q, p.k, p.v, *p.new, **written),
        "cache, pages, new keys, rotary, lse": lambda: cached(
            p.q, p.k, p.v, *p.new, **written, rotary=p.rotary, return_lse=True
        ),
        "append": lambda: append_kv_cache(p.k, p.v, *p.new, **written),
        "append to slots": lambda: append_kv_cache(p.k, p.v, *p.rows_of_slots, slots=p.slots),
        "append, turned query": lambda: append_kv_cache(p.k, p.v, *p.new, **written, rotary=p.rotary, query=p.q),
    }
    if p.q.is_cpu:
        ways |= {
            f"{FLOOR}: forward": p.floor(False),
            f"{FLOOR}: cache": p.floor(True),
            f"{FLOOR}: cache, pages": p.floor(True, p.table),
            f"{FLOOR}: cache, pages, new keys": p.floor(True, p.table, p.new),
        }
    return {"own": ways}


def groups_of_dense_names(p: Problem) -> Groups:
    """flash-attn's names of dense and packed calls, each beside our own call."""
    dense, packed, three, four = flash_dmattn_func, flash_dmattn_varlen_func, flash_attn_interface, flash_attn_cute
    tensors, leaves = (p.q, p.k, p.v), (p.leaf, p.k, p.v)
    return {
        "forward": {
            OWN: lambda: dense(*tensors),
            "version 2": lambda: flash_attn.flash_attn_func(*tensors),
            "version 3": lambda: three.flash_attn_func(*tensors),
            "version 4": lambda: four.flash_attn_func(*tensors),
        },
        "forward, window": {
            OWN: lambda: dense(*tensors, is_causal=True, window_size=(2, -1)),
            "version 2": lambda: flash_attn.flash_attn_func(*tensors, causal=True, window_size=(2, 0)),
            "version 3": lambda: three.flash_attn_func(*tensors, causal=True, window_size=(2, 0)),
            "version 4": lambda: four.flash_attn_func(*tensors, causal=True, window_size=(2, None)),
        },
        "forward, lse": {
            OWN: lambda: dense(*tensors, return_lse=True),
            "version 2": lambda: flash_attn.flash_attn_func(*tensors, return_attn_probs=True),
            "version 3": lambda: three.flash_attn_func(*tensors, return_attn_probs=True),
            "version 4": lambda: four.flash_attn_func(*tensors, return_lse=True),
        },
        "forward, gradients": {
            OWN: lambda: dense(*leaves),
            "version 2": lambda: flash_attn.flash_attn_func(*leaves),
            "version 3": lambda: three.flash_attn_func(*leaves),
            "version 4": lambda: four.flash_attn_func(*leaves),
        },
        "packed": {
            OWN: lambda: packed(*p.packed),
            "version 2": lambda: flash_attn.flash_attn_varlen_func(*p.packed),
            "version 3": lambda: three.flash_attn_varlen_func(*p.packed),
            "version 4": lambda: four.flash_attn_varlen_func(
                *p.packed[:3], None, *p.packed[3:5], max_seqlen_q=1, max_seqlen_k=KEYS
            ),
            "PyTorch's name": lambda: varlen_attn(*p.packed, enable_gqa=True),
        },
    }


def groups_of_cache_names(p: Problem) -> Groups:
    """flash-attn's names of calls on a cache, each beside our own call."""
    cached, three, four = flash_dmattn_with_kvcache_func, flash_attn_interface, flash_attn_cute
    with_cache = {"version 2": flash_attn.flash_attn_with_kvcache, "version 3": three.flash_attn_with_kvcache}
    tensors, rotary = (p.q, p.k, p.v), {"rotary_cos": p.rotary[0], "rotary_sin": p.rotary[1]}
    tables = {"version 2": "block_table", "version 3": "page_table"}
    read, written, free = {"cache_seqlens": p.lengths}, {"cache_seqlens": p.before}, {"is_causal": False}
    groups: Groups = {
        "cache": {OWN: lambda: cached(*tensors, **read, **free)},
        "cache, lse": {OWN: lambda: cached(*tensors, **read, **free, return_lse=True)},
        "cache, new keys": {OWN: lambda: cached(*tensors, *p.new, **written, block_table=p.table, rotary=p.rotary)},
        "cache, one length": {
            OWN: lambda: cached(
                *tensors, cache_seqlens=torch.full((1,), KEYS, dtype=torch.int32, device=p.q.device), **free
            )
        },
        "pages, packed rows": {
            OWN: lambda: cached(
                p.packed[0], p.k, p.v, **read, **free, block_table=p.table, cu_seqlens_q=p.rows, max_seqlen_q=1
            ),
            "version 2": lambda: flash_attn.flash_attn_varlen_func(
                p.packed[0], p.k, p.v, *p.packed[3:], block_table=p.table, seqused_k=p.lengths
            ),
            "version 4": lambda: four.flash_attn_varlen_func(
                p.packed[0], p.k, p.v, cu_seqlens_q=p.rows, max_seqlen_q=1, page_table=p.table, seqused_k=p.lengths
            ),
            "PyTorch's name": lambda: varlen_attn(
                p.packed[0], p.k, p.v, *p.packed[3:], enable_gqa=True, seqused_k=p.lengths, block_table=p.table
            ),
        },
    }
    for version, call in with_cache.items():
        table = {tables[version]: p.table}
        groups["cache"][version] = lambda call=call: call(*tensors, **read)
        groups["cache, lse"][version] = lambda call=call: call(*tensors, **read, return_softmax_lse=True)
        groups["cache, new keys"][version] = lambda call=call, table=table: call(
            *tensors, *p.new, **written, **table, **rotary, causal=True, rotary_interleaved=False
        )
        groups["cache, one length"][version] = lambda call=call: call(*tensors, cache_seqlens=KEYS)
    return groups


def measure(groups: Groups, calls: int, batches: int, wait: Call) -> Dict[str, Dict[str, Dict[str, Any]]]:
    samples: Dict[Tuple[str, str], List[float]] = {(group, way): [] for group in groups for way in groups[group]}
    for batch in range(batches + 2):  # two to warm up
        for (group, way), taken in samples.items():
            call = groups[group][way]
            begin = time.thread_time()
            for _ in range(calls):
                call()
            microseconds = (time.thread_time() - begin) / calls * 1e6
            wait()
            if batch >= 2:
                taken.append(microseconds)
    results: Dict[str, Dict[str, Dict[str, Any]]] = {}
    for (group, way), taken in samples.items():
        first = samples[group, next(iter(groups[group]))]
        results.setdefault(group, {})[way] = {
            "quartiles": statistics.quantiles(taken, n=4),
            "least": min(taken),
            "over": statistics.median(one - other for one, other in zip(taken, first)),
            "samples": taken,
        }
    return results


def table(results: Dict[str, Dict[str, Dict[str, Any]]]) -> None:
    print(f"{'':56s} {'25 %':>8s} {'median':>8s} {'75 %':>8s} {'over':>8s}")
    for group, ways in results.items():
        for way, found in ways.items():
            numbers = " ".join(f"{value:8.2f}" for value in (*found["quartiles"], found["over"]))
            print(f"{group:20s} {way:35s} {numbers}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--only", nargs="+", default=[], metavar="GROUP")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    problem = Problem(options.device)
    groups = {**groups_of_own(problem), **groups_of_dense_names(problem), **groups_of_cache_names(problem)}
    unknown = set(options.only) - set(groups)
    if unknown or min(options.calls, options.batches - 1) < 1:
        parser.error(f"groups are {', '.join(groups)}; calls are at least 1, batches 2")
    groups = {name: ways for name, ways in groups.items() if not options.only or name in options.only}
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    results = measure(groups, options.calls, options.batches, wait)
    print(f"flash_dmattn {flash_dmattn.__version__}, PyTorch {torch.__version__}, {options.device}; us a call")
    table(results)
    if options.json:
        facts = {
            "command": " ".join(["bench/host_time.py", *arguments]),
            "commit": commit(),
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "processor": cpu_model(),
            "versions": {
                "flash_dmattn": flash_dmattn.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "microseconds": results,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
