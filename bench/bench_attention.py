"""Measures attention against PyTorch's own, in one run, on the same tensors: `python -m flash_dmattn.bench --help`.

Contenders take turns sample by sample, so that a machine that slows down slows all of them. A ratio is the median of
the ratios of neighbouring samples. Tensors lie in the layout the peer prefers ([B, H, S, D]; ours gets a view), masks
that the peer needs in another form are made outside the measured time.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import _native, flash_dmattn_func, masks

from bench_report import check_writable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
OURS = "flash-dmattn"
# Beside one query row: K and V read in order, all of their bytes added up as integers; what memory gives at best.
READ = "memory-read"
# A sample lasts at least this long, in calls of the same kind, so that the clock's own cost does not matter.
SAMPLE_SECONDS = 2e-3
# The math path of SDPA makes B*H*Sq*Sk scores several times over; above this many it is left out.
MATH_SCORES_MAX = 160e6


@dataclass(frozen=True)
class Cell:
    """One problem to measure."""

    B: int
    H: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    dtype: str
    causal: bool = False
    mask: float = 0.0  # share of visible pairs of a random dense mask; 0 = no mask
    bias: bool = False  # a per-key bias [B, Hkv, 1, Sk]
    pair_bias: bool = False  # a bias of every pair [B, Hkv, Sq, Sk]
    bias_gradient: bool = False  # the backward gives the gradient of that bias too
    topk: int = 0  # dynamic mask: the W largest biases of each row's visible keys; 0 = none
    threads: int = 0  # 0 = as it is
    mode: str = "alone"  # or "after-torch": each sample follows a parallel PyTorch operation

    def title(self) -> str:
        extras = ["causal"] * self.causal + ["bias"] * self.bias + ["bias of pairs"] * self.pair_bias
        extras += ["with its gradient"] * self.bias_gradient
        extras += [f"mask {self.mask:g}"] if self.mask else []
        extras += [f"top-{self.topk}"] if self.topk else []
        extras += [f"{self.threads} threads"] if self.threads else []
        extras += [self.mode] if self.mode != "alone" else []
        heads = f"H{self.H}" if self.H == self.Hkv else f"H{self.H}/{self.Hkv}"
        rows = f"S{self.Sk}" if self.Sq == self.Sk else f"S{self.Sq}x{self.Sk}"
        return " ".join([f"B{self.B} {heads} {rows} D{self.D} {self.dtype}", *extras])


# ---- the tensors of a cell -------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """Inputs of all contenders: q, k, v are [B, H, S, D]; peer_mask is what the peer is given instead of ours."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    mask: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]
    intervals: Optional[Tuple[torch.Tensor, torch.Tensor]]
    peer_mask: Optional[torch.Tensor]
    visible_pairs: float


def make_problem(cell: Cell) -> Problem:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[cell.dtype])

    q = normal(cell.B, cell.H, cell.Sq, cell.D)
    k, v = (normal(cell.B, cell.Hkv, cell.Sk, cell.D) for _ in range(2))
    has_bias = cell.bias or cell.pair_bias or cell.topk
    bias = normal(cell.B, cell.Hkv, cell.Sq if cell.pair_bias else 1, cell.Sk) if has_bias else None
    mask = torch.rand(cell.B, 1, cell.Sq, cell.Sk, generator=generator) < cell.mask if cell.mask else None
    pair = masks.topk_intervals(bias, cell.topk, cell.Sq) if cell.topk and bias is not None else None
    visible = visible_of(cell, mask, pair)
    share = 1.0 if visible is None else int(visible.sum()) / max(1, visible.numel())
    pairs = cell.B * cell.H * cell.Sq * cell.Sk * share
    peer = peer_mask_of(cell, mask, pair, bias)
    return Problem(q, k, v, normal(*q.shape), mask, bias, pair, peer, pairs)


def visible_of(cell: Cell, mask: Any, pair: Any) -> Optional[torch.Tensor]:
    """What mask, intervals and causal leave visible, dense; None = everything."""
    if mask is None and pair is None and not cell.causal:
        return None
    visible = masks.intervals_to_mask(*masks.causal_intervals(cell.Sq, cell.Sk, "torch"), cell.Sq)
    if not cell.causal and not pair:
        visible = torch.ones_like(visible)
    if mask is not None:
        visible = visible & mask
    return visible if pair is None else visible & masks.intervals_to_mask(*pair, cell.Sq)


def peer_mask_of(cell: Cell, mask: Any, pair: Any, bias: Any) -> Optional[torch.Tensor]:
    """Mask and bias as one additive tensor with -inf; None where is_causal says it all."""
    if mask is None and bias is None and (not cell.causal or cell.Sq == cell.Sk or cell.Sq == 1):
        return None
    visible = visible_of(cell, mask, pair)
    shape = (cell.B, cell.H if bias is not None else 1, cell.Sq, cell.Sk)
    score = torch.zeros(shape, dtype=DTYPES[cell.dtype])
    if bias is not None:
        score = score + bias.repeat_interleave(cell.H // cell.Hkv, dim=1)
    if visible is not None:
        wide = visible.repeat_interleave(shape[1] // visible.shape[1], dim=1)
        score = score.masked_fill(~wide, -torch.inf)
    return score


# ---- contenders ------------------------------------------------------------------------------------------------------


def run_ours(cell: Cell, p: Problem) -> torch.Tensor:
    """[B, H, Sq, D], a view."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (p.q, p.k, p.v))
    return flash_dmattn_func(q, k, v, p.mask, p.bias, is_causal=cell.causal, key_intervals=p.intervals).transpose(1, 2)


def run_peer(cell: Cell, p: Problem) -> torch.Tensor:
    causal = cell.causal and p.peer_mask is None and cell.Sq > 1
    return scaled_dot_product_attention(
        p.q, p.k, p.v, attn_mask=p.peer_mask, is_causal=causal, enable_gqa=cell.H != cell.Hkv
    )


def read_memory(_: Cell, p: Problem) -> torch.Tensor:
    return p.k.view(torch.int64).sum() + p.v.view(torch.int64).sum()


def contender(name: str) -> Tuple[Callable[[Cell, Problem], torch.Tensor], Callable[[], Any]]:
    """What to call, and the context to call it in."""
    if name in (OURS, READ):
        return (run_ours if name == OURS else read_memory), contextlib.nullcontext
    return run_peer, lambda: sdpa_kernel([PEERS[name]])


def contenders_of(cell: Cell, p: Problem, wanted: List[str]) -> List[str]:
    """Those of `wanted` that take the problem."""
    names = []
    for name in [OURS, *wanted]:
        if name == "sdpa-math" and cell.B * cell.H * cell.Sq * cell.Sk > MATH_SCORES_MAX:
            continue
        if cell.bias_gradient and name not in (OURS, "sdpa-math"):  # no other has a gradient of its mask
            continue
        function, context = contender(name)
        try:
            with torch.no_grad(), context():
                function(cell, p)
        except RuntimeError as error:
            if name == OURS:
                raise
            if not any(phrase in str(error) for phrase in ("No available kernel", "No viable backend")):
                print(f"{name} does not run {cell.title()}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        names.append(name)
    return names + [READ] * (cell.Sq == 1)


def action_of(name: str, cell: Cell, p: Problem, direction: str) -> Callable[[], Any]:
    """What one call of a pass is, as a function without arguments."""
    function, context = contender(name)
    if direction == "forward":
        return lambda: function(cell, p)
    leaves = [tensor.detach().requires_grad_() for tensor in (p.q, p.k, p.v)]
    own = replace(p, q=leaves[0], k=leaves[1], v=leaves[2])
    if cell.bias_gradient:
        leaves.append((p.bias if name == OURS else p.peer_mask).detach().requires_grad_())  # type: ignore[union-attr]
        own = replace(own, bias=leaves[3]) if name == OURS else replace(own, peer_mask=leaves[3])
    with torch.enable_grad(), context():
        out = function(cell, own)
    return lambda: torch.autograd.grad(out, leaves, p.dout, retain_graph=True)


# ---- measuring -------------------------------------------------------------------------------------------------------


def seconds_of(action: Callable[[], Any], calls: int) -> float:
    begin = seconds_of.clock()  # type: ignore[attr-defined]
    for _ in range(calls):
        action()
    return (seconds_of.clock() - begin) / calls  # type: ignore[attr-defined]


seconds_of.clock = time.perf_counter  # type: ignore[attr-defined]


def disturb() -> None:
    """A parallel PyTorch operation, after which its threads still spin."""
    torch.mm(disturb.matrix, disturb.matrix)  # type: ignore[attr-defined]


disturb.matrix = torch.ones(384, 384)  # type: ignore[attr-defined]


def measure(
    actions: Dict[str, Callable[[], Any]],
    iterations: int,
    context_of: Callable[[str], Any] = lambda name: contextlib.nullcontext(),
    disturbed: bool = False,
) -> Dict[str, List[float]]:
    """Milliseconds per call of each action, `iterations` samples each, taken in turns."""
    calls = {}
    for name, action in actions.items():
        with context_of(name):
            first = min(seconds_of(action, 1) for _ in range(2))
        calls[name] = 1 if disturbed else max(1, math.ceil(SAMPLE_SECONDS / max(first, 1e-7)))
    samples: Dict[str, List[float]] = {name: [] for name in actions}
    for turn in range(iterations):
        for name in actions if turn % 2 == 0 else reversed(actions):
            if disturbed:
                disturb()
            with context_of(name):
                samples[name].append(1e3 * seconds_of(actions[name], calls[name]))
    return samples


def measured(cell: Cell, p: Problem, direction: str, names: List[str], iterations: int) -> Dict[str, List[float]]:
    """measure() of a pass by each contender."""
    actions = {name: action_of(name, cell, p, direction) for name in names}
    with torch.set_grad_enabled(direction == "backward"):
        return measure(actions, iterations, lambda name: contender(name)[1](), cell.mode != "alone")


def summary(samples: List[float]) -> Dict[str, float]:
    ordered = sorted(samples)
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return {"median_ms": median, "quartile_low_ms": low, "quartile_high_ms": high}


def flops_of(cell: Cell, p: Problem, direction: str) -> Tuple[float, float]:
    """Nominal (4 B H Sq Sk D, halved when causal) and useful (visible pairs only); a backward counts 2.5
    times, a step is a forward and a backward."""
    factor = 4.0 * cell.D * {"forward": 1.0, "backward": 2.5, "step": 3.5}[direction]
    nominal = cell.B * cell.H * cell.Sq * cell.Sk * (0.5 if cell.causal and cell.Sq > 1 else 1.0)
    return factor * nominal, factor * p.visible_pairs


def result_of(cell: Cell, p: Problem, direction: str, samples: Dict[str, List[float]]) -> Dict[str, Any]:
    nominal, useful = flops_of(cell, p, direction)
    rows = {}
    for name, values in samples.items():
        row: Dict[str, Any] = summary(values)
        row["tflops"] = nominal / row["median_ms"] * 1e-9
        row["useful_tflops"] = useful / row["median_ms"] * 1e-9
        row["speedup_of_ours"] = statistics.median(peer / ours for peer, ours in zip(values, samples[OURS]))
        row["samples_ms"] = values
        rows[name] = row
    return {"cell": asdict(cell), "title": cell.title(), "pass": direction, "results": rows}


@contextlib.contextmanager
def threads_of(cell: Cell) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(cell.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- correctness -----------------------------------------------------------------------------------------------------


def exact_rows(cell: Cell, p: Problem, rows: torch.Tensor) -> Dict[str, torch.Tensor]:
    """out and dq [B, H, rows, D] in float64, from q, k, v as they are."""
    group = cell.H // cell.Hkv
    q = p.q[:, :, rows].double().requires_grad_()
    k, v = (tensor.double().repeat_interleave(group, dim=1) for tensor in (p.k, p.v))
    scores = q @ k.transpose(2, 3) * cell.D**-0.5
    if p.bias is not None:
        bias = p.bias[:, :, rows] if cell.pair_bias else p.bias
        scores = scores + bias.double().repeat_interleave(group, dim=1)
    visible = visible_of(cell, p.mask, p.intervals)
    if visible is not None:
        visible = visible[:, :, rows].repeat_interleave(cell.H // visible.shape[1], dim=1)
        scores = scores.masked_fill(~visible, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    (dq,) = torch.autograd.grad(out, q, p.dout[:, :, rows].double())
    return {"forward": out.detach(), "backward": dq}


class Errors:
    """Largest errors of out or dq against float64, on a few rows, relative to the largest value. Rows that see no key are
    left out: PyTorch gives NaN there."""

    def __init__(self, cell: Cell, p: Problem, direction: str) -> None:
        self.rows = torch.linspace(0, cell.Sq - 1, min(8, cell.Sq)).long()
        self.expected = exact_rows(cell, p, self.rows)[direction]
        self.known = torch.isfinite(self.expected)
        # A gradient may be zero throughout: rows with one visible key have none.
        self.size = self.expected[self.known].abs().max().clamp(min=1e-3)

    def of(self, actual: torch.Tensor) -> float:
        """Of [B, H, Sq, D]."""
        rows = actual[:, :, self.rows].double()
        return ((rows[self.known] - self.expected[self.known]).abs().max() / self.size).item()


def check(cell: Cell, p: Problem, direction: str, names: List[str]) -> Dict[str, float]:
    """The errors of each contender."""
    errors = Errors(cell, p, direction)
    found = {}
    for name in names:
        with torch.set_grad_enabled(direction == "backward"), contender(name)[1]():
            actual = action_of(name, cell, p, direction)()
        found[name] = errors.of(actual[0] if direction == "backward" else actual)
    return found


# ---- overhead --------------------------------------------------------------------------------------------------------


def overhead() -> Dict[str, Dict[str, float]]:
    """Microseconds of a call on tensors so small that only the way to the kernel counts."""
    q = torch.randn(1, 2, 1, 8)
    view, leaf = q.transpose(1, 2), q.clone().requires_grad_()
    leaf_view = leaf.transpose(1, 2)
    actions = {
        "forward": {
            OURS: lambda: flash_dmattn_func(q, q, q),
            "sdpa": lambda: scaled_dot_product_attention(view, view, view),
        },
        "forward with gradients": {
            OURS: lambda: flash_dmattn_func(leaf, q, q),
            "sdpa": lambda: scaled_dot_product_attention(leaf_view, view, view),
        },
        "forward and backward": {
            OURS: lambda: flash_dmattn_func(leaf, q, q).sum().backward(),
            "sdpa": lambda: scaled_dot_product_attention(leaf_view, view, view).sum().backward(retain_graph=True),
        },
    }
    result = {}
    for what, pair in actions.items():
        best = {name: math.inf for name in pair}
        for _ in range(30):
            for name, action in pair.items():
                best[name] = min(best[name], seconds_of(action, 200) * 1e6)
        result[what] = best
        print(f"{what:24s} " + "  ".join(f"{name} {value:7.2f} us" for name, value in best.items()))
    return result


# ---- which cells -----------------------------------------------------------------------------------------------------


def grid(options: argparse.Namespace) -> List[Cell]:
    """The cells of the options; what is not given takes the values of the standard grid."""
    cells = []
    for dtype in options.dtype or ["fp32", "bf16"]:
        for d in options.D or [64, 128]:
            lengths, head_counts = options.S or [512, 2048, 4096], options.H or [max(1, 512 // d)]
            for s, batch, heads in itertools.product(lengths, options.B, head_counts):
                for causal in (False, True) if options.causal is None else (options.causal,):
                    cell = Cell(batch, heads, options.Hkv or heads, s, s, d, dtype, causal)
                    cells.append(replace(cell, mask=options.mask or 0.0, bias=options.bias, topk=options.topk or 0))
                    cells[-1] = replace(cells[-1], pair_bias=options.pair_bias, bias_gradient=options.bias_gradient)
    if options.decode:
        cells = [replace(cell, Sq=1, causal=False) for cell in cells if not cell.causal or options.causal is not None]
    modes = ["alone", "after-torch"] if options.mode == "both" else [options.mode]
    threads = options.threads or [0]
    return [replace(cell, mode=mode, threads=count) for cell in cells for mode in modes for count in threads]


def sweep(kind: str, options: argparse.Namespace) -> List[Cell]:
    """Cells that differ in one thing: threads, S, or the share of keys that a dynamic mask leaves visible."""
    d, dtype = (options.D or [64])[0], (options.dtype or ["bf16"])[0]
    heads = options.H[0] if options.H else max(1, 512 // d)
    s = (options.S or [2048])[0]
    base = Cell(options.B[0], heads, options.Hkv or heads, s, s, d, dtype, causal=True)
    if kind == "threads":
        most = torch.get_num_threads()
        counts = sorted({1, most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
        return [replace(base, threads=count) for count in counts]
    if kind == "S":
        return [replace(base, Sq=length, Sk=length) for length in (256, 512, 1024, 2048, 4096)]
    return [replace(base, topk=max(1, s // part)) for part in (64, 16, 8, 4, 2, 1)]


# ---- reports ---------------------------------------------------------------------------------------------------------


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit_of() -> Optional[str]:
    """The commit of the checkout that this lies in; None without git."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def facts() -> Dict[str, Any]:
    return {
        "command": " ".join(["python -m flash_dmattn.bench", *sys.argv[1:]]),
        "commit": commit_of(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": {"cpu": cpu_model(), **_native.device(), "torch_threads": torch.get_num_threads()},
        "versions": {
            "flash_dmattn": _native.version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "mkldnn": torch.backends.mkldnn.is_available(),
            "mkl": torch.backends.mkl.is_available(),
        },
    }


def geometric_mean(values: List[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def print_row(record: Dict[str, Any]) -> None:
    results = record["results"]
    ours = results[OURS]
    text = f"{record['title']:44s} {record['pass']:8s} {ours['median_ms']:9.3f} ms {ours['useful_tflops']:7.3f} TFLOP/s"
    for name, row in results.items():
        if name != OURS:
            text += f"  {name} {row['median_ms']:9.3f} ms x{row['speedup_of_ours']:.2f}"
    if "error_against_float64" in record:
        text += "  error " + " / ".join(f"{value:.1e}" for value in record["error_against_float64"].values())
    print(text, flush=True)


def print_means(records: List[Dict[str, Any]]) -> Dict[str, float]:
    """Geometric means of the speedups over each peer, over the cells it ran."""
    means = {}
    for direction in dict.fromkeys(record["pass"] for record in records):
        rows = [record["results"] for record in records if record["pass"] == direction]
        for peer in dict.fromkeys(name for row in rows for name in row if name not in (OURS, READ)):
            chosen = [row[peer]["speedup_of_ours"] for row in rows if peer in row]
            means[f"{direction} over {peer}"] = mean = geometric_mean(chosen)
            print(f"geometric mean, {direction} over {peer}, {len(chosen)} cells: x{mean:.2f}")
    return means


def write_csv(path: Path, records: List[Dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        cell_names = list(records[0]["cell"]) if records else []
        columns = ["median_ms", "quartile_low_ms", "quartile_high_ms", "tflops", "useful_tflops", "speedup_of_ours"]
        writer.writerow([*cell_names, "pass", "contender", *columns])
        for record in records:
            for name, row in record["results"].items():
                cell = [record["cell"][each] for each in cell_names]
                writer.writerow([*cell, record["pass"], name, *(row[column] for column in columns)])


def run_cell(cell: Cell, options: argparse.Namespace) -> List[Dict[str, Any]]:
    with threads_of(cell):
        p = make_problem(cell)
        names = contenders_of(cell, p, options.peer or list(PEERS))
        records = []
        for direction in ("forward", "backward") if options.direction == "both" else (options.direction,):
            if direction == "backward" and cell.Sq == 1:
                continue
            record = result_of(cell, p, direction, measured(cell, p, direction, names, options.iters))
            if options.check:
                compared = [name for name in names if name != READ]
                record["error_against_float64"] = check(cell, p, direction, compared)
            print_row(record)
            records.append(record)
    return records


def parse(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda has options of its own (cpu)")
    parser.add_argument("--mask-grid", action="store_true", help="masks of contiguous runs on a CUDA device, beside peers")
    parser.add_argument("--jax", action="store_true", help="in JAX, beside jax.nn.dot_product_attention, on JAX's device")
    parser.add_argument("--B", type=int, nargs="+", default=[1], help="batches (1)")
    parser.add_argument("--H", type=int, nargs="+", help="query heads (512 / D)")
    parser.add_argument("--Hkv", type=int, help="key and value heads (H)")
    parser.add_argument("--S", type=int, nargs="+", help="sequence lengths (512 2048 4096)")
    parser.add_argument("--D", type=int, nargs="+", help="head dims (64 128)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="(fp32 bf16)")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: both")
    parser.add_argument("--mask", type=float, help="dense random mask with this share of visible pairs")
    parser.add_argument("--bias", action="store_true", help="per-key bias")
    parser.add_argument("--pair-bias", action="store_true", help="a bias of every pair of row and key")
    parser.add_argument("--bias-gradient", action="store_true", help="the backward gives the gradient of --pair-bias too")
    parser.add_argument("--topk", type=int, metavar="W", help="dynamic mask: the W largest biases of each row")
    parser.add_argument("--decode", action="store_true", help="one query row")
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts (PyTorch's own)")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread, where others load the machine")
    parser.add_argument("--mode", choices=("alone", "after-torch", "both"), default="alone")
    parser.add_argument("--sweep", choices=("threads", "S", "visible"), nargs="+", help="instead of the grid")
    parser.add_argument("--peer", choices=PEERS, nargs="+", help="default: all that run")
    parser.add_argument("--iters", type=int, default=7, help="samples per contender and cell (7)")
    parser.add_argument("--check", action="store_true", help="compare a few rows of each cell with float64")
    parser.add_argument("--overhead", action="store_true", help="only the cost of a call on tiny tensors")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, raw samples too")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots (needs matplotlib)")
    options = parser.parse_args(arguments)
    check_writable(parser, options.json, options.csv)
    if options.bias_gradient and not options.pair_bias:
        parser.error("--bias-gradient needs --pair-bias: it is that bias whose gradient is wanted")
    if options.jax and (options.peer or options.threads or options.sweep or options.mode != "alone"):
        parser.error("--jax goes with no --peer, --threads, --sweep or --mode")
    if options.jax and options.bias_gradient:
        parser.error("--jax measures no gradient of a bias")
    if options.cpu_time and options.threads != [1]:
        parser.error("--cpu-time needs --threads 1: the other threads' time is not counted")
    return options


def main(arguments: Optional[List[str]] = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    on_cuda = any(pair == ("--device", "cuda") for pair in zip(given, given[1:])) or "--device=cuda" in given
    if on_cuda or "--mask-grid" in given:
        import bench_cuda

        return bench_cuda.main(given)
    options = parse(arguments)
    seconds_of.clock = time.thread_time if options.cpu_time else time.perf_counter  # type: ignore[attr-defined]
    report: Dict[str, Any] = facts()
    device = report["device"]
    print(f"{device['cpu']}, {device['isa']}, {device['torch_threads']} threads; torch {report['versions']['torch']}")
    if options.overhead:
        report["overhead_us"] = overhead()
    else:
        kinds = {kind: sweep(kind, options) for kind in options.sweep} if options.sweep else {"grid": grid(options)}
        run = run_cell
        if options.jax:
            import bench_jax

            report["versions"] |= bench_jax.VERSIONS
            run = bench_jax.run_cell
        records = []
        for kind, cells in kinds.items():
            records += [{"kind": kind, **record} for cell in cells for record in run(cell, options)]
        report["geometric_means"] = print_means(records)
        report["records"] = records
        if options.csv:
            write_csv(options.csv, records)
        if options.plot:
            import bench_plots

            bench_plots.write(options.plot, report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    errors = [row for record in report.get("records", []) for row in record.get("error_against_float64", {}).items()]
    return int(any(not error < 0.05 for name, error in errors if name == OURS))


if __name__ == "__main__":
    sys.exit(main())
