"""Forward speed on a CUDA device beside PyTorch's own attention, in one run on the same tensors.

Each case times every back end in turn, round after round, with CUDA events and the second-level cache flushed before
each sample; a ratio is the median of one back end over the median of another in the same case. FLOPs are
4 B H Sq Sk D, halved when causal; a mask or intervals do not reduce them, so that times can be compared with dense ones.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import flash_dmattn_func, masks

PEERS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


SETS = "forward,fp16,wide,scores,intervals,decode,backward,backward-scores,backward-intervals"


class Case:
    """One problem: tensors are made when it is run."""

    def __init__(self, name: str, batch: int, heads: int, seqlen: int, head_dim: int, *, causal: bool = False,
                 dtype: torch.dtype = torch.bfloat16, heads_kv: int = 0, rows: int = 0, extra: str = "",
                 backward: bool = False, peers: Tuple[str, ...] = ("torch flash",)) -> None:
        self.name, self.batch, self.heads, self.heads_kv = name, batch, heads, heads_kv or heads
        self.rows, self.keys, self.head_dim, self.causal = rows or seqlen, seqlen, head_dim, causal
        self.dtype, self.extra, self.backward, self.peers = dtype, extra, backward, peers

    @property
    def title(self) -> str:
        shape = f"B{self.batch} H{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads else "")
        length = f"S{self.keys}" if self.rows == self.keys else f"Sq{self.rows} Sk{self.keys}"
        kind = str(self.dtype)[6:]
        return f"{shape} {length} D{self.head_dim} {kind}{' causal' if self.causal else ''} {self.extra}".rstrip() + (
            " backward" if self.backward else ""
        )

    @property
    def flops(self) -> float:
        products = 4.0 * self.batch * self.heads * self.rows * self.keys * self.head_dim / (2 if self.causal else 1)
        return products * (2.5 if self.backward else 1.0)

    @property
    def bytes(self) -> float:
        return 2.0 * self.batch * self.heads_kv * self.keys * self.head_dim * 2


def cases(names: List[str]) -> Iterator[Case]:
    """The named sets. "forward": 16384 tokens in all, 2048 / D heads."""
    if "forward" in names:
        for head_dim in (64, 128, 256):
            for causal in (False, True):
                for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                    yield Case("forward", 16384 // seqlen, 2048 // head_dim, seqlen, head_dim, causal=causal,
                               peers=("torch flash", "torch cudnn"))
    if "fp16" in names:
        yield Case("fp16", 1, 8, 8192, 64, dtype=torch.float16, peers=tuple(PEERS))
    if "wide" in names:
        for batch, heads, seqlen, head_dim in ((1, 8, 8192, 512), (1, 48, 16384, 512), (1, 8, 8192, 1024)):
            yield Case("wide", batch, heads, seqlen, head_dim, dtype=torch.float16, peers=("torch efficient",))
    if "scores" in names:
        for extra in ("dense bias", "dense mask"):
            for seqlen in (4096, 8192):
                yield Case("scores", 1, 16, seqlen, 128, extra=extra, peers=("torch efficient", "torch cudnn"))
    if "intervals" in names:
        for heads, head_dim, seqlen in ((16, 128, 4096), (16, 128, 8192), (16, 128, 16384), (32, 64, 8192)):
            yield Case("intervals", 1, heads, seqlen, head_dim, causal=True, extra="", peers=("torch cudnn",))
            yield Case("intervals", 1, heads, seqlen, head_dim, causal=True, extra=f"top-{seqlen // 16}", peers=())
            yield Case("intervals", 1, heads, seqlen, head_dim, causal=True, extra=f"top-{seqlen // 16} and bias",
                       peers=())
    if "backward" in names:
        for head_dim in (64, 128, 256):
            for causal in (False, True):
                for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                    yield Case("backward", 16384 // seqlen, 2048 // head_dim, seqlen, head_dim, causal=causal,
                               backward=True, peers=("torch flash", "torch cudnn"))
    if "backward-scores" in names:
        for extra in ("dense bias", "dense mask", "bias of each head"):
            yield Case("backward-scores", 1, 16, 8192, 128, extra=extra, backward=True, peers=("torch efficient",))
    if "backward-intervals" in names:
        yield Case("backward-intervals", 1, 16, 8192, 128, causal=True, backward=True, peers=("torch cudnn",))
        yield Case("backward-intervals", 1, 16, 8192, 128, causal=True, extra="deterministic", backward=True, peers=())
        yield Case("backward-intervals", 1, 16, 8192, 128, causal=True, extra="top-512", backward=True, peers=())
    if "decode" in names:
        for batch, keys in ((16, 32768), (1, 131072)):
            yield Case("decode", batch, 32, keys, 128, heads_kv=8, rows=1, peers=("torch flash", "torch cudnn"))


def runners(case: Case) -> Dict[str, Callable[[], Any]]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(case.dtype)

    q = normal(case.batch, case.rows, case.heads, case.head_dim)
    k, v = (normal(case.batch, case.keys, case.heads_kv, case.head_dim) for _ in range(2))
    options: Dict[str, Any] = {"is_causal": case.causal}
    mask: Optional[torch.Tensor] = None
    if case.extra in ("dense bias", "bias of each head"):
        heads = 1 if case.extra == "dense bias" else case.heads
        options["attn_bias"] = mask = normal(1, heads, case.rows, case.keys).requires_grad_(case.backward)
    elif case.extra == "dense mask":
        options["attn_mask"] = mask = torch.rand(1, 1, case.rows, case.keys, device="cuda", generator=generator) < 0.5
    elif case.extra.startswith("top-"):
        bias = torch.randn(1, case.heads, case.keys, device="cuda", generator=generator)
        options["key_intervals"] = masks.topk_intervals(bias, case.keys // 16)
        if case.extra.endswith("bias"):
            options["attn_bias"] = bias
    if case.extra == "deterministic":
        options["deterministic"] = True
    if case.backward:
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]

    def peer(backend: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    *heads_first, attn_mask=mask, is_causal=case.causal, enable_gqa=case.heads != case.heads_kv
                )

        return call

    with_peers: Dict[str, Callable[[], Any]] = {"flash_dmattn": lambda: flash_dmattn_func(q, k, v, **options)}
    for name in case.peers:
        with_peers[name] = peer(PEERS[name])
    if case.backward:
        leaves = [q, k, v] + ([mask] if mask is not None and mask.requires_grad else [])
        return {name: gradients(call, leaves) for name, call in with_peers.items()}
    return with_peers


def gradients(forward: Callable[[], Any], leaves: List[torch.Tensor]) -> Callable[[], Any]:
    """The backward alone: the forward is run at the first call."""
    saved: List[torch.Tensor] = []

    def call() -> Any:
        if not saved:
            out = forward()
            saved.extend((out, torch.randn_like(out)))
        return torch.autograd.grad(saved[0], leaves, saved[1], retain_graph=True)

    return call


def time_interleaved(calls: Dict[str, Callable[[], Any]], rounds: int) -> Dict[str, List[float]]:
    """Seconds, one list for each call that runs; the others are left out."""
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    usable: Dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            usable[name] = call
        except (RuntimeError, NotImplementedError) as problem:
            print(f"    {name}: {str(problem).splitlines()[0][:110]}", file=sys.stderr)
    events: Dict[str, List[Any]] = {name: [] for name in usable}
    for _ in range(rounds):
        for name, call in usable.items():
            flush.zero_()
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            call()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e-3 for a, b in pairs] for name, pairs in events.items()}


def ceilings() -> Dict[str, float]:
    """Device copy in bytes read and written a second, and a bfloat16 matrix product of 8192, in FLOP a second."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = time_interleaved({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, 7)
    return {
        "copy_bytes_per_second": 2 * source.numel() / statistics.median(times["copy"]),
        "product_flops": 2 * 8192**3 / statistics.median(times["product"]),
    }


def _said_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return ""


def facts() -> Dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "clocks": _said_by("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": _said_by("git", "rev-parse", "HEAD"),
        "command": " ".join(["python -m flash_dmattn.bench", *sys.argv[1:]]),
    }


def show(case: Case, seconds: Dict[str, List[float]], copy: float) -> None:
    ours = statistics.median(seconds["flash_dmattn"])
    print(case.title)
    for name, samples in seconds.items():
        median, quartiles = statistics.median(samples), statistics.quantiles(samples, n=4)
        speed = f"{case.bytes / median / 1e12:6.2f} TB/s ({case.bytes / median / copy:4.0%} of a copy)" if (
            case.name == "decode") else f"{case.flops / median / 1e12:7.1f} TFLOPS"
        print(f"    {name:16s} {median * 1e3:9.4f} ms [{quartiles[0] * 1e3:.4f}, {quartiles[2] * 1e3:.4f}]  {speed}"
              f"  {median / ours:5.2f}x")


def summarise(results: List[Dict[str, Any]]) -> None:
    """Geometric mean and least of each peer's time over ours, by set."""
    for name in dict.fromkeys(result["set"] for result in results):
        for peer in PEERS:
            ratios = [statistics.median(result["seconds"][peer]) / statistics.median(result["seconds"]["flash_dmattn"])
                      for result in results if result["set"] == name and peer in result["seconds"]]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                print(f"{name}: {peer} takes {mean:.3f}x our time in the geometric mean of {len(ratios)} cases, "
                      f"at least {min(ratios):.3f}x")


def main(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.bench --device cuda", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default=SETS, help=f"sets, comma separated; all of them: {SETS}")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=pathlib.Path, help="write every sample there")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench: PyTorch sees no CUDA device", file=sys.stderr)
        return 1
    warnings.filterwarnings("ignore")
    limits = ceilings()
    print(f"{torch.cuda.get_device_name()}: copy {limits['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
          f"bfloat16 product {limits['product_flops'] / 1e12:.0f} TFLOPS")
    results: List[Dict[str, Any]] = []
    for case in cases(options.cases.split(",")):
        seconds = time_interleaved(runners(case), options.rounds)
        if "flash_dmattn" not in seconds:
            continue
        show(case, seconds, limits["copy_bytes_per_second"])
        results.append({"set": case.name, "title": case.title, "flops": case.flops, "seconds": seconds})
    summarise(results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"facts": facts(), "ceilings": limits, "results": results}, indent=1) + "\n")
    return 0
