"""Speed on a CUDA device beside what else is installed, forward and backward, in one run on the same tensors.

Each case times every contender in turn, round after round, with CUDA events and the second-level cache flushed, by
reading, before each sample; a ratio is the median of one contender over the median of another in the same case. FLOPs are
4 B H Sq Sk D, halved when causal, 2.5 times that for a backward; a mask or intervals do not reduce them, so that times
can be compared with dense ones. "Of visible pairs" counts what they leave. One query row is told in bytes of the K and V
that it sees, and of what hides the others, beside a copy that moves as many bytes, half of them read and half written.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from flash_dmattn import flash_dmattn_func, masks

import bench_masks
import bench_report
import bench_selection
from bench_peers import PEERS, Problem, installed
from bench_report import COPY, OURS, PLAN

GRID_SETS = "mask-grid,backward-mask-grid"
SETS = ("forward,shapes,odd,fp16,wide,scores,intervals,decode,backward,backward-shapes,backward-scores,backward-intervals,"
        f"backward-groups,backward-order,{GRID_SETS}")
OWN_SETS = "selection,tiles"  # plans of this library beside each other; only by name


# The device waits before each sample, so that no contender's time is that of the host which launches it. The host of
# cuDNN's flex_attention takes about a millisecond, and more in its first calls.
QUEUE_CYCLES = 500_000
GRID_QUEUE = {"cycles": 4_000_000, "warmups": 12}


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


def cases(names: List[str]) -> Iterator[Case]:
    """The named sets. "forward": 16384 tokens in all, 2048 / D heads."""
    if "forward" in names:
        for head_dim in (64, 128, 256):
            for causal in (False, True):
                for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                    yield Case("forward", 16384 // seqlen, 2048 // head_dim, seqlen, head_dim, causal=causal,
                               peers=("torch flash", "torch cudnn"))
    for name in {"shapes", "backward-shapes"}.intersection(names):
        for head_dim, causal, seqlen, batch, heads, heads_kv in (
            (64, True, 3000, 4, 32, 32), (64, True, 5000, 2, 64, 8), (80, False, 2560, 8, 16, 16),
            (96, True, 1536, 8, 16, 16), (128, True, 3000, 4, 32, 4), (128, True, 5000, 2, 64, 8),
            (192, False, 2560, 4, 8, 8), (192, True, 1536, 8, 8, 8), (256, True, 768, 8, 32, 4),
        ):
            yield Case(name, batch, heads, seqlen, head_dim, causal=causal, heads_kv=heads_kv,
                       backward=name == "backward-shapes", peers=("torch flash", "torch cudnn"))
    if "odd" in names:
        for head_dim, seqlen, *padded in (
            *((d, s, d, p) for d in (64, 128, 256) for s, p in ((1100, 1152), (3000, 3072), (4097, 4224), (8400, 8448))),
            (72, 4224, 80, 4224), (80, 4224, 96, 4224), (112, 4224, 128, 4224), (160, 4224, 192, 4224),
            (200, 4224, 256, 4224), (200, 1536, 256, 1536), (50, 4224, 64, 4224), (100, 4224, 128, 4224), (104, 4224, 128, 4224),
            (120, 4224, 128, 4224), (184, 4224, 192, 4224), (250, 4224, 256, 4224), (248, 4224, 256, 4224),
        ):
            for causal in (False, True):
                yield Case("odd", max(1, 16384 // seqlen), 2048 // head_dim, seqlen, head_dim, causal=causal, peers=(),
                           extra="beside S{1} D{0}".format(*padded))
    if "fp16" in names:
        yield Case("fp16", 1, 8, 8192, 64, dtype=torch.float16, peers=("torch flash", "torch cudnn", "torch efficient"))
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
    if "backward-groups" in names:
        for heads_kv in (1, 4):
            for head_dim in (64, 128):
                for causal in (False, True):
                    for seqlen in (1024, 2048, 4096):
                        yield Case("backward-groups", 1, 32, seqlen, head_dim, causal=causal, heads_kv=heads_kv,
                                   backward=True)
    if "backward-order" in names:
        for head_dim in (64, 128):
            for causal in (False, True):
                for seqlen in (2048, 8192):
                    for extra in ("", "deterministic"):
                        yield Case("backward-order", 1, 16, seqlen, head_dim, causal=causal, extra=extra, backward=True,
                                   peers=())
    for name in GRID_SETS.split(","):
        for head_dim, heads, heads_kv, keys, extra, causal in bench_masks.shapes() if name in names else ():
            yield Case(name, 1, heads, keys, head_dim, causal=causal, heads_kv=heads_kv, extra=extra,
                       backward=name != "mask-grid", peers=("cudnn flex",))
    for name in OWN_SETS.split(","):
        for head_dim in bench_selection.HEAD_DIMS if name in names else ():
            for causal in (False, True):
                for batch, columns, seqlen in bench_selection.shapes(name):
                    yield Case(name, batch, columns // head_dim, seqlen, head_dim, causal=causal, backward=True, peers=())
    if "decode" in names:
        for batch, keys in ((16, 32768), (1, 131072)):
            yield Case("decode", batch, 32, keys, 128, heads_kv=8, rows=1, peers=("torch flash", "torch cudnn"))
        masked = ("torch cudnn", "torch efficient")
        for heads in (16, 64):
            yield Case("decode", 1, heads, 131072, 128, heads_kv=2, rows=1, peers=("torch flash", "torch cudnn"))
        yield Case("decode", 1, 64, 131072, 128, heads_kv=2, rows=4, peers=("torch flash", "torch cudnn"))
        yield Case("decode", 8, 32, 16384, 256, heads_kv=8, rows=1, peers=("torch flash", "torch cudnn"))
        for head_dim in (128, 256):
            yield Case("decode", 8, 32, 16384, head_dim, heads_kv=8, rows=1, dtype=torch.float32, peers=("torch efficient",))
        yield Case("decode", 8, 32, 16384, 128, heads_kv=8, rows=1, extra="padded", peers=masked)
        for window in (2048, 8192, 32768):
            yield Case("decode", 1, 32, 131072, 128, causal=True, heads_kv=8, rows=1, extra=f"top-{window}", peers=masked)


def quick(chosen: List[Case]) -> List[Case]:
    """One case of each set: the first top-W of 4096 keys, else the first of 4096 keys, else the first."""
    names = dict.fromkeys(case.name for case in chosen)
    of_set = {name: [case for case in chosen if case.name == name] for name in names}

    def merit(case: Case) -> Tuple[bool, bool]:
        return case.keys == 4096, case.extra.startswith("top-")

    return [max(of_set[name], key=merit) for name in names]


def make_problem(case: Case, device: str = "cuda") -> Problem:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(case.dtype)

    q = normal(case.batch, case.rows, case.heads, case.head_dim)
    k, v = (normal(case.batch, case.keys, case.heads_kv, case.head_dim) for _ in range(2))
    problem = Problem(q, k, v, case.causal, deterministic=case.extra == "deterministic")
    if case.extra in ("dense bias", "bias of each head"):
        heads = 1 if case.extra == "dense bias" else case.heads
        problem.bias = normal(1, heads, case.rows, case.keys).requires_grad_(case.backward)
    elif case.extra == "dense mask":
        problem.mask = torch.rand(1, 1, case.rows, case.keys, device=device, generator=generator) < 0.5
    elif bench_masks.knows(case.extra):
        bench_masks.add_mask(problem, case.extra)
    elif case.extra == "padded":  # a batch of sequences of Sk / B, 2 Sk / B, ... Sk keys
        lengths = torch.arange(1, case.batch + 1, device=device) * case.keys // case.batch
        problem.mask = torch.arange(case.keys, device=device) < lengths[:, None, None, None]
    elif case.extra.startswith("top-"):
        heads = case.heads_kv if case.rows == 1 else case.heads
        bias = torch.randn(1, heads, case.keys, device=device, generator=generator)
        window = int(case.extra.split()[0].removeprefix("top-"))
        problem.intervals = masks.topk_intervals(bias, window, seqlen_q=case.rows)
        if case.extra.endswith("bias"):
            problem.bias = bias[:, :, None]
    for tensor in (q, k, v):
        tensor.requires_grad_(case.backward)
    return problem


def run_ours(p: Problem) -> torch.Tensor:
    return flash_dmattn_func(p.q, p.k, p.v, p.mask, p.bias, is_causal=p.causal, deterministic=p.deterministic,
                             key_intervals=p.intervals, window_size=p.window or (-1, -1))


def forwards(case: Case, problem: Problem, wanted: Optional[List[str]]) -> Dict[str, Callable[[], torch.Tensor]]:
    """Calls of the contenders; wanted: names of peers, None = the case's own and what is installed of flash-attn."""
    names = wanted
    if names is None:
        names = [*case.peers, *(name for name in installed() if name.startswith("flash-attn") and case.peers)]
    calls: Dict[str, Callable[[], torch.Tensor]] = {OURS: lambda: run_ours(problem)}
    if case.name in GRID_SETS.split(","):
        calls |= bench_masks.ways(problem)
    for name in names:
        why_not = PEERS[name].missing() or PEERS[name].refuses(problem)
        if why_not is None:
            try:
                calls[name] = PEERS[name].prepare(problem)
            except Exception as error:
                why_not = first_line(error)
        if why_not is not None and wanted is not None:
            print(f"    {name} is left out: {why_not}", file=sys.stderr)
    return calls


def padded_call(case: Case) -> Callable[[], torch.Tensor]:
    """Our call for the larger shape that an "odd" case names, with as many blocks of rows to compute."""
    seqlen, head_dim = (int(word[1:]) for word in case.extra.split()[1:])
    padded = make_problem(Case(case.name, case.batch, case.heads, seqlen, head_dim, causal=case.causal))
    return lambda: run_ours(padded)


def visible_pairs(case: Case, problem: Problem) -> Optional[float]:
    """None where nothing hides keys in a way that has to be counted."""
    if problem.row_ranges is not None:
        return bench_masks.visible_pairs(problem)
    pairs = bench_report.visible_pairs(bench_report.cell_of(case.title))
    if pairs is None and problem.mask is not None:
        scores = case.batch * case.heads * case.rows * case.keys
        pairs = float(problem.mask.sum().item()) / problem.mask.numel() * scores
    return pairs


def copy_call(case: Case, problem: Problem) -> Callable[[], torch.Tensor]:
    """A copy on the device that reads and writes, in all, as many bytes as the case has to."""
    moved = bench_report.moved_bytes(bench_report.cell_of(case.title), visible_pairs(case, problem))
    source = torch.randint(0, 255, (int(moved) // 2,), dtype=torch.uint8, device=problem.q.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def runners(case: Case, problem: Problem, wanted: Optional[List[str]] = None) -> Dict[str, Callable[[], Any]]:
    """Calls of the pass that the case measures."""
    if case.name in OWN_SETS.split(","):
        return bench_selection.runners(case.name, problem)
    calls = forwards(case, problem, wanted)
    if case.name == "odd":
        calls["padded shape"] = padded_call(case)
    if case.name == "decode":
        calls[COPY] = copy_call(case, problem)
    if not case.backward:
        return calls
    leaves = [problem.q, problem.k, problem.v]
    leaves += [problem.bias] if problem.bias is not None and problem.bias.requires_grad else []
    return {name: gradients(call, leaves) for name, call in calls.items()}


def differences(calls: Dict[str, Callable[[], Any]]) -> Dict[str, float]:
    """Of each peer's result from ours: the largest norm of a difference over the norm of ours, over the tensors."""
    tensors = {name: call() for name, call in calls.items()}
    ours, *others = (each if isinstance(each, tuple) else (each,) for each in tensors.values())
    found = {}
    for name, theirs in zip(list(tensors)[1:], others):
        pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(ours, theirs)]
        found[name] = max(((a - b).norm() / a.norm()).item() for a, b in pairs)
    return found


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:110]


def gradients(forward: Callable[[], Any], leaves: List[torch.Tensor]) -> Callable[[], Any]:
    """The backward alone: the forward is run at the first call."""
    saved: List[torch.Tensor] = []

    def call() -> Any:
        if not saved:
            out = forward()
            generator = torch.Generator(out.device).manual_seed(1)
            saved.extend((out, torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=generator)))
        return torch.autograd.grad(saved[0], leaves, saved[1], retain_graph=True)

    return call


def time_interleaved(calls: Dict[str, Callable[[], Any]], rounds: int, cycles: int = QUEUE_CYCLES,
                     warmups: int = 3) -> Dict[str, List[float]]:
    """Seconds, one list for each call that runs; the others are left out. The device waits `cycles` before each."""
    # Read, not written: what is written has to go back to memory in the sample's time, 9 us of it on an H200.
    flush = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    usable: Dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        try:
            for _ in range(warmups):
                call()
            torch.cuda.synchronize()
            usable[name] = call
        except Exception as error:
            print(f"    {name}: {first_line(error)}", file=sys.stderr)
    seconds: Dict[str, List[float]] = {name: [] for name in usable}
    for _ in range(rounds):
        for name, call in usable.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(cycles)
            torch.amax(flush)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()  # what is queued behind a sample takes 0.5 to 1.5 us of its time on an H200
            seconds[name].append(start.elapsed_time(end) * 1e-3)
    return seconds


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


def clocks() -> str:
    return _said_by("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader")


def plan_calls(problem: Problem, contenders: Dict[str, Any]) -> Dict[str, Callable[[], Any]]:
    """Calls that make what a contender makes of the mask before its own calls; the host's time is theirs, too."""
    plans = {name: PEERS[name].plan for name in contenders if name in PEERS}
    return bench_masks.plan_calls(problem) | {name + PLAN: plan(problem) for name, plan in plans.items() if plan is not None}


def facts() -> Dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "clocks": clocks(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": _said_by("git", "rev-parse", "HEAD"),
        "command": " ".join(["python -m flash_dmattn.bench", *sys.argv[1:]]),
    }


def measure(case: Case, options: argparse.Namespace) -> Optional[Dict[str, Any]]:
    """One case's entry of the report; None when we do not take it."""
    problem = make_problem(case)
    calls = runners(case, problem, options.peers)
    is_grid = case.name in GRID_SETS.split(",")
    seconds = time_interleaved(calls, options.rounds, **(GRID_QUEUE if is_grid else {}))
    if OURS not in seconds:
        return None
    result = {"set": case.name, "title": case.title, "flops": case.flops, "seconds": seconds}
    cell = bench_report.cell_of(case.title)
    result["useful_flops"] = bench_report.useful_flops(cell, visible_pairs(case, problem) or 0.0)
    if is_grid:
        result["clocks"] = clocks()
        result["seconds"] |= time_interleaved(plan_calls(problem, seconds), options.rounds, 0)
    if case.name in OWN_SETS.split(","):
        result["plans"] = {name: calls[name].plan for name in seconds}  # type: ignore[attr-defined]
    if options.check:
        result["difference_from_ours"] = differences({name: calls[name] for name in calls if name in seconds and name != COPY})
    return result


def record(options: argparse.Namespace) -> Dict[str, Any]:
    """Measures, and tells as it goes; interrupted, it gives what was measured until then."""
    warnings.filterwarnings("ignore")
    limits = ceilings()
    print(f"{torch.cuda.get_device_name()}: copy {limits['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
          f"bfloat16 product {limits['product_flops'] / 1e12:.0f} TFLOPS")
    report: Dict[str, Any] = {"facts": facts(), "ceilings": limits, "results": []}
    report["facts"]["peers"] = {name: peer.missing() or "installed" for name, peer in PEERS.items()}
    chosen = list(cases(options.cases.split(",")))
    if options.quick:
        chosen = quick(chosen)
    try:
        for case in chosen:
            result = measure(case, options)
            if result is not None:
                report["results"].append(result)
                bench_report.show(bench_report.rows(report | {"results": [result]}), case.title)
                for name, difference in result.get("difference_from_ours", {}).items():
                    print(f"    {name:16s} differs from ours by {difference:.1e} of the norm")
    except KeyboardInterrupt:
        print(f"interrupted after {len(report['results'])} of {len(chosen)} cases", file=sys.stderr)
    return report


def parse(arguments: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.bench --device cuda", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default=SETS, help=f"sets, comma separated: {SETS}; or {OWN_SETS}")
    parser.add_argument("--mask-grid", action="store_const", const=GRID_SETS, dest="cases",
                        help=f"masks of contiguous runs, forward and backward: --cases {GRID_SETS}")
    parser.add_argument("--quick", action="store_true", help="one case of each set")
    parser.add_argument("--peers", help=f"comma separated, or all: {','.join(PEERS)}; default: each set's own")
    parser.add_argument("--rounds", type=int, default=11, help="samples per contender and case (11)")
    parser.add_argument("--check", action="store_true", help="tell how far each peer's result is from ours")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="write medians, quartiles and speeds there")
    parser.add_argument("--plot", type=pathlib.Path, metavar="DIR", help="write plots (needs matplotlib)")
    parser.add_argument("--from", type=pathlib.Path, metavar="FILE", dest="recorded",
                        help="report what a JSON file holds, without measuring; needs no device")
    options = parser.parse_args(arguments)
    bench_report.check_writable(parser, options.json, options.csv)
    for name in options.cases.split(","):
        if name not in f"{SETS},{OWN_SETS}".split(","):
            parser.error(f"--cases has {name!r}; the sets are {SETS},{OWN_SETS}")
    if options.peers is not None:
        options.peers = list(PEERS) if options.peers == "all" else options.peers.split(",")
        for name in options.peers:
            if name not in PEERS:
                parser.error(f"--peers has {name!r}; the peers are {','.join(PEERS)}, or all")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    return options


def main(arguments: List[str]) -> int:
    options = parse(arguments)
    if options.recorded is not None:
        report = json.loads(options.recorded.read_text())
        for result in report["results"]:
            bench_report.show(bench_report.rows(report | {"results": [result]}), result["title"])
    elif torch.cuda.is_available():
        report = record(options)
    else:
        print("bench: PyTorch sees no CUDA device", file=sys.stderr)
        return 1
    bench_report.summarise(bench_report.rows(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.csv:
        bench_report.write_csv(options.csv, report)
    if options.plot:
        import bench_plots

        bench_plots.write_cuda(options.plot, report)
    return 0
