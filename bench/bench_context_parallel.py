"""Context parallelism beside one card, in one run on the same tensors: time, exactness, bytes and where the time goes.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 bench/bench_context_parallel.py --peers --json results.json

P is what torchrun starts. Every case is checked against one card first. Samples of one card and of all ranks take turns;
a time of all ranks is that of the slowest, and a ratio is of medians. "compute" is the rank's own calls on keys that are
there already, "copy" its exchanges alone: what is above both is what the overlap costs. "predicted" is what fdm plan
--ranks says of the case. Without a GPU the same program runs on gloo with small sizes (--small), to be tested.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import flash_dmattn
import torch
import torch.distributed as dist
from flash_dmattn import flash_dmattn_func, masks
from flash_dmattn.context_parallel import ContextParallel, Layout, Mask
from flash_dmattn.context_parallel._engine import Operands, changed, forward, new_results
from flash_dmattn.context_parallel._exchange import Fetch
from flash_dmattn.context_parallel._pieces import make_pieces

KINDS = ("causal", "window", "documents", "topw")
SHAPES = ((8192, 32, 4), (8192, 16, 16), (32768, 32, 4), (32768, 16, 16), (65536, 16, 16))
LONG = ((32768, 16, 16), (32768, 32, 4))
CELLS = [("causal", each) for each in SHAPES] + [(kind, each) for kind in KINDS[1:] for each in LONG]
SMALL = ((256, 4, 2), (512, 4, 4))
NUM_DOCUMENTS = 12
FEWEST_REPEATS = 5  # back to back, so that the host runs ahead as in a model of several layers
# A layout is balanced where the heaviest rank has so little more work than the mean. A window of S / 16 over two ranks
# has 0.032.
BALANCED = 0.035


def _falling_lengths(total: int, count: int, longest: int) -> List[int]:
    """Offsets of documents whose lengths fall evenly from the longest on, as fdm plan --varlen takes them."""
    mean = total / count
    spread, offsets, end = min(longest - mean, mean), [0], 0.0
    for number in range(count):
        end += mean + spread * (1 - 2 * number / (count - 1))
        offsets.append(int(end + 0.5) if number + 1 < count else total)
    return offsets


class Case:
    """A problem: whole tensors, alike on every rank, and how it is said to one rank and to all."""

    def __init__(self, kind: str, shape: Tuple[int, int, int], head_dim: int, device: torch.device, options: Any) -> None:
        self.kind, self.device = kind, device
        self.seqlen, self.heads, self.heads_kv = shape
        self.head_dim = head_dim
        generator = torch.Generator(device).manual_seed(1)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def draw(heads: int) -> torch.Tensor:
            tensor = torch.randn(1, self.seqlen, heads, head_dim, device=device, generator=generator)
            return tensor.to(dtype)

        self.q, self.k, self.v, self.dout = draw(self.heads), draw(self.heads_kv), draw(self.heads_kv), draw(self.heads)
        self.call: Dict[str, Any] = {"is_causal": True}
        self.mask = Mask(is_causal=True)
        self.asked = ["--causal"]  # of fdm plan
        offsets: Optional[List[int]] = None
        if kind == "window":
            self.call["window_size"] = (self.seqlen // 16, 0)
            self.mask = Mask(is_causal=True, window_size=self.call["window_size"])
            self.asked += ["--window", f"{self.seqlen // 16},0"]
        elif kind == "topw":
            bias = torch.randn(1, self.heads_kv, self.seqlen, device=device, generator=generator)
            self._take_intervals(masks.topk_intervals(bias, self.seqlen // 16))
            self.asked = ["--topk", f"{self.seqlen // 16}"]
        elif kind == "documents":
            longest = self.seqlen // 8
            offsets = _falling_lengths(self.seqlen, NUM_DOCUMENTS, longest)
            cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
            self._take_intervals(masks.document_intervals(cu_seqlens, seqlen=self.seqlen))
            self.asked += ["--varlen", "--batch", f"{NUM_DOCUMENTS}", "--total", f"{self.seqlen}", "--seqlen-q", f"{longest}"]
        self.layout_name, self.layout = self._choose_layout(offsets)
        sets = options.sets if kind == "causal" else None
        self.cp, *others = (
            ContextParallel(self.layout, None, options.algorithm, head_sets=sets, sm_margin=margin)
            for margin in options.margins
        )
        self.others = dict(zip(options.margins[1:], others))

    def _take_intervals(self, pair: Any) -> None:
        self.call = {"key_intervals": tuple(pair)}
        self.mask = Mask(key_intervals=tuple(pair))

    def _choose_layout(self, offsets: Optional[List[int]]) -> Tuple[str, Layout]:
        """Zigzag under a causal mask; else of the balanced ones the one by which fewest keys travel."""
        ranks, block = dist.get_world_size(), min(256, max(8, self.seqlen // 32))
        if self.kind == "causal":
            return "zigzag", Layout.zigzag(self.seqlen, ranks, block)
        layouts = {
            "contiguous": Layout.contiguous(self.seqlen, ranks, block),
            "zigzag": Layout.zigzag(self.seqlen, ranks, block),
            "balanced": Layout.balanced([self.mask], ranks, total=self.seqlen, block=max(block, self.seqlen // 64)),
        }
        if offsets is not None:
            layouts["documents"] = Layout.documents(offsets, ranks, block)

        def rank_of(name: str) -> Tuple[float, int]:
            layout = layouts[name]
            fetched = max(layout.fetched(self.mask, rank) for rank in range(ranks))
            return max(layout.imbalance(self.mask), BALANCED), fetched

        name = min(layouts, key=rank_of)
        return name, layouts[name]

    def name(self) -> str:
        return f"{self.kind} S{self.seqlen} H{self.heads}/{self.heads_kv} D{self.head_dim}"

    def shards(self) -> List[torch.Tensor]:
        rank = dist.get_rank()
        every = (self.q, self.k, self.v, self.dout)
        return [self.layout.shard(each, 1, rank).contiguous() for each in every]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of one repeat, on this rank, after all ranks have come here."""
    synchronize(device)
    dist.barrier()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


def slowest(seconds: float, device: torch.device) -> float:
    number = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number)


def medians(works: Dict[str, Callable[[], Any]], device: torch.device, samples: int) -> Dict[str, List[float]]:
    """Samples of each work, in turns: every sample is the slowest rank's."""
    repeats = {}
    for name, work in works.items():
        for _ in range(2):
            work()
        once = slowest(timed(work, device, 1), device)
        repeats[name] = max(FEWEST_REPEATS if device.type == "cuda" else 1, min(20, int(0.01 / max(once, 1e-6))))
    taken: Dict[str, List[float]] = {name: [] for name in works}
    for _ in range(samples):
        for name, work in works.items():
            taken[name].append(slowest(timed(work, device, repeats[name]), device))
    return taken


# ---- parts of the time -----------------------------------------------------------------------------------------------


def compute_alone(case: Case) -> Optional[Callable[[], Any]]:
    """The rank's calls, all heads in one, on keys that are there: no exchange."""
    rank, seqlens = dist.get_rank(), (case.seqlen, case.seqlen)
    pieces = make_pieces(case.layout.ranges[rank], case.mask, seqlens, [(0, case.seqlen)], case.device)
    q = case.layout.shard(case.q, 1, rank).contiguous()
    out, lse, _ = new_results(q, case.v, False)
    assert out is not None and lse is not None
    settings = (0, 0, None, False, 0.0, -1, -1, False, False)

    def work() -> None:
        for piece in pieces:
            (a, b), (c, d) = piece.rows, piece.keys
            given = Operands(q[:, a:b], case.k[:, c:d], case.v[:, c:d], None, None, piece.start, piece.end)
            how = changed(settings, causal=piece.causal, window_left=piece.left, window_right=piece.right)
            forward(given, (out[:, a:b], lse[:, :, a:b], None), how)

    return work


def copy_alone(case: Case) -> Optional[Callable[[], Any]]:
    """The exchanges of a forward, set after set."""
    explained = case.cp.explain()
    if explained["algorithm"] != "gather":
        return None
    from flash_dmattn.context_parallel._exchange import make_table
    from flash_dmattn.context_parallel._visible import needed_keys

    layout, rank = case.layout, dist.get_rank()
    rows_of = [layout.sorted_ranges(each) for each in range(layout.ranks)]
    table = make_table(layout.ranges, needed_keys(rows_of, case.mask, (case.seqlen, case.seqlen)), rank)
    _, k, v, _ = case.shards()
    messages = case.cp._messages_on(case.device)

    def work() -> None:
        fetches = []
        for a, b in explained["sets"]:
            shards = [each.transpose(0, 1)[:, :, a:b] for each in (k, v)]
            buffer = k.new_empty((table.size, 1, b - a, 2 * case.head_dim))
            fetches.append(Fetch(messages, table, shards, buffer))
        for fetch in fetches:
            fetch.finish()

    return work


# ---- checks ----------------------------------------------------------------------------------------------------------


def apart(have: torch.Tensor, want: torch.Tensor) -> Dict[str, float]:
    """The largest difference over the largest wanted number, and the share of equal elements."""
    difference = (have.double() - want.double()).abs().max() if want.numel() else torch.zeros(())
    scale = want.double().abs().max() if want.numel() else torch.ones(())
    equal = (have == want).double().mean() if want.numel() else torch.ones(())
    return {"error": float(difference / scale.clamp(min=1e-30)), "equal": float(equal)}


def check(case: Case, backward: bool) -> Dict[str, Dict[str, float]]:
    """Outputs and gradients of this rank against one card's; the worst of all ranks."""
    rank, found = dist.get_rank(), {}
    leaves = [each.detach().requires_grad_(backward) for each in (case.q, case.k, case.v)]
    *local, dout = case.shards()
    local = [each.requires_grad_(backward) for each in local]
    want = flash_dmattn_func(*leaves, **case.call)
    have = case.cp.flash_dmattn_func(*local, **case.call)
    found["out"] = apart(have.detach(), case.layout.shard(want.detach(), 1, rank))
    if backward:
        wanted = torch.autograd.grad(want, leaves, case.dout)
        gradients = torch.autograd.grad(have, local, dout)
        for name, one, all_ranks in zip(("dq", "dk", "dv"), wanted, gradients):
            found[name] = apart(all_ranks, case.layout.shard(one, 1, rank))
    for numbers in found.values():
        numbers["error"] = slowest(numbers["error"], case.device)
        numbers["equal"] = -slowest(-numbers["equal"], case.device)
    limit = 0.03 if case.q.dtype is torch.bfloat16 else 1e-4
    wrong = {name: numbers for name, numbers in found.items() if not numbers["error"] <= limit}
    if wrong:
        raise SystemExit(f"{case.name()}: results differ from one card's: {wrong}")
    return found


def repeatable(case: Case, times: int) -> bool:
    """Whether gradients have the same bits each time."""
    *local, dout = case.shards()
    local = [each.requires_grad_() for each in local]

    def gradients() -> List[torch.Tensor]:
        out = case.cp.flash_dmattn_func(*local, deterministic=True, **case.call)
        return [out.detach(), *torch.autograd.grad(out, local, dout)]

    first = gradients()
    same = all(torch.equal(a, b) for _ in range(times) for a, b in zip(first, gradients()))
    return slowest(0.0 if same else 1.0, case.device) == 0.0


# ---- a case ----------------------------------------------------------------------------------------------------------


def forward_works(case: Case) -> Dict[str, Callable[[], Any]]:
    q, k, v, _ = case.shards()

    def one_card() -> None:
        with torch.no_grad():
            flash_dmattn_func(case.q, case.k, case.v, **case.call)

    def all_ranks() -> None:
        with torch.no_grad():
            case.cp.flash_dmattn_func(q, k, v, **case.call)

    works = {"one card": one_card, "ranks": all_ranks}
    for margin, cp in case.others.items():

        def with_margin(cp: ContextParallel = cp) -> None:
            with torch.no_grad():
                cp.flash_dmattn_func(q, k, v, **case.call)

        works[f"ranks, {margin} SMs left"] = with_margin
    for name, make in (("compute", compute_alone), ("copy", copy_alone)):
        work = make(case)
        if work is not None:
            works[name] = work
    return works


def backward_works(case: Case) -> Dict[str, Callable[[], Any]]:
    leaves = [each.detach().requires_grad_() for each in (case.q, case.k, case.v)]
    *local, dout = case.shards()
    local = [each.requires_grad_() for each in local]
    whole = flash_dmattn_func(*leaves, **case.call)
    works = {"one card": lambda: torch.autograd.grad(whole, leaves, case.dout, retain_graph=True)}
    for name, cp in {"ranks": case.cp, **{f"ranks, {margin} SMs left": cp for margin, cp in case.others.items()}}.items():
        part = cp.flash_dmattn_func(*local, **case.call)
        works[name] = lambda part=part: torch.autograd.grad(part, local, dout, retain_graph=True)
    return works


def graph_of(case: Case, backward: bool) -> Callable[[], Any]:
    """All ranks' pass as a CUDA graph: what the host takes between launches is left out."""
    stream, graph = torch.cuda.Stream(case.device), torch.cuda.CUDAGraph()
    *local, dout = case.shards()
    local = [each.requires_grad_(backward) for each in local]
    stream.wait_stream(torch.cuda.current_stream(case.device))
    with torch.cuda.stream(stream), torch.set_grad_enabled(backward):
        part = case.cp.flash_dmattn_func(*local, **case.call)

        def work() -> Any:
            if backward:
                return torch.autograd.grad(part, local, dout, retain_graph=True)
            return case.cp.flash_dmattn_func(*local, **case.call)

        work()
        torch.cuda.synchronize(case.device)
        dist.barrier()
        with torch.cuda.graph(graph, stream=stream):
            results = work()

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def predicted(case: Case, name: str, options: Any) -> Optional[Dict[str, float]]:
    """What fdm plan --ranks says of the pass, and "device", of the device alone; None without a device to say it of."""
    tool = shutil.which("fdm") or shutil.which("fdm", path=str(pathlib.Path(flash_dmattn.__file__).parents[1] / "bin"))
    if not options.device_name or tool is None:
        return None
    command = [
        tool, "plan", "--device", options.device_name, "--pass", name, "--seqlen-q", f"{case.seqlen}",
        "--heads", f"{case.heads}", "--heads-kv", f"{case.heads_kv}", "--head-dim", f"{case.head_dim}", "--dtype", "bf16",
        *case.asked, "--ranks", f"{dist.get_world_size()}", "--layout", case.layout_name, "--algorithm", "gather", "--json",
    ]  # fmt: skip
    forecasts = []
    for more in ([], ["--host-start", "-1", "--host-exchange", "-1", "--sums-bandwidth", "-1"]):
        said = subprocess.run(command + more, capture_output=True, text=True, check=False)
        if said.returncode:
            raise SystemExit(f"{' '.join(command + more)}: {said.stderr}")
        forecasts.append(json.loads(said.stdout))
    whole, device = forecasts
    return {"one card": whole["one_rank_seconds"], "ranks": whole["seconds"], "device": device["seconds"]}


def torch_samples(case: Case, samples: int) -> Dict[str, List[float]]:
    """PyTorch's own context parallelism on the same tensors, causal masks alone: {} where it cannot."""
    if case.kind != "causal" or case.device.type != "cuda" or case.heads != case.heads_kv:
        return {}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    tensors = [each.transpose(1, 2).contiguous() for each in (case.q, case.k, case.v, case.dout)]
    functional: Any = torch.nn.functional  # whose function the context replaces
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4, no_restore_buffers=set(tensors)):
        *leaves, dout = tensors
        leaves = [each.detach().requires_grad_() for each in leaves]
        out = functional.scaled_dot_product_attention(*leaves, is_causal=True)

        def ahead() -> None:
            with torch.no_grad():
                functional.scaled_dot_product_attention(*leaves, is_causal=True)

        works = {
            "torch forward": ahead,
            "torch backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        }
        return medians(works, case.device, samples)


def measure(case: Case, options: Any) -> Dict[str, Any]:
    checks = check(case, not options.forward_only)
    explained = case.cp.explain()
    record: Dict[str, Any] = {
        "case": case.name(),
        "algorithm": explained["algorithm"],
        "why": explained["why"],
        "sets": explained.get("sets"),
        "keys_fetched": explained.get("keys_fetched"),
        "bytes_received_rank_0": explained.get("bytes_received"),
        "layout": case.layout_name,
        "calls": explained["calls"],
        "imbalance": case.layout.imbalance(case.mask),
        "checks": checks,
        "passes": {},
    }
    if not options.forward_only and options.repeats:
        record["repeatable"] = repeatable(case, options.repeats)
    passes = {"forward": forward_works} if options.forward_only else {"forward": forward_works, "backward": backward_works}
    for name, works in passes.items():
        made = works(case)
        if options.graphs:
            made["ranks, graph"] = graph_of(case, name == "backward")
        samples = medians(made, case.device, options.samples)
        middle = {what: statistics.median(taken) for what, taken in samples.items()}
        record["passes"][name] = {
            "seconds": middle,
            "samples": samples,
            "speedup": middle["one card"] / middle["ranks"],
            "speedup of the graph": middle["one card"] / middle["ranks, graph"] if options.graphs else None,
            "predicted": predicted(case, name, options),
        }
    if options.peers:
        try:
            taken = torch_samples(case, options.samples)
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            record["torch"] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            record["torch"] = {name: {"seconds": statistics.median(each), "samples": each} for name, each in taken.items()}
    return record


def show(record: Dict[str, Any]) -> None:
    equal = ", ".join(f"{name} {100 * numbers['equal']:.2f} %" for name, numbers in record["checks"].items())
    how = f"{record['algorithm']}, {record['layout']}, sets {record['sets']}, {record['calls']} calls"
    how += f", imbalance {100 * record['imbalance']:.1f} %"
    print(f"{record['case']}: {how}")
    if isinstance(record.get("torch"), str):
        print(f"    torch: {record['torch']}")
    for name, numbers in record["torch"].items() if isinstance(record.get("torch"), dict) else ():
        print(f"    {name}: {1e3 * numbers['seconds']:.3f} ms")
    print(f"    equal to one card: {equal}; repeatable {record.get('repeatable')}")
    for name, numbers in record["passes"].items():
        times = ", ".join(f"{what} {1e3 * each:.3f} ms" for what, each in numbers["seconds"].items())
        for what, seconds in (numbers["predicted"] or {}).items():
            if what not in numbers["seconds"]:
                continue
            times += f", {what} predicted {1e3 * seconds:.3f} ms ({seconds / numbers['seconds'][what] - 1:+.1%})"
        graph = f" ({numbers['speedup of the graph']:.2f}x in a graph)" if numbers["speedup of the graph"] else ""
        print(f"    {name}: {numbers['speedup']:.2f}x{graph}; {times}", flush=True)


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="", help=f"of {','.join(KINDS)}; default: all of them on their own shapes")
    parser.add_argument("--shapes", default="", help="S:H:Hkv,.. of each kind")
    parser.add_argument("--margins", default="0", help="multiprocessors left to copies, 0,16 say: each is measured")
    parser.add_argument("--device-name", default=None, help="of fdm plan; default that of the device, without one none")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--algorithm", default="gather", help="auto, gather or ulysses")
    parser.add_argument("--sets", default="", help="KV heads of each set, 2,6,6,2 say; of causal cases")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=3, help="of the check that bits are repeatable; 0: none")
    parser.add_argument("--peers", action="store_true", help="PyTorch's context parallelism beside it")
    parser.add_argument("--graphs", action="store_true", help="passes of all ranks as CUDA graphs, too")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--small", action="store_true", help="sizes for a machine without a GPU")
    parser.add_argument("--json", default="", help="where results are written")
    options = parser.parse_args()
    options.sets = [int(each) for each in options.sets.split(",")] if options.sets else None
    options.margins = [int(each) for each in options.margins.split(",")]
    cells, shapes = CELLS, SMALL if options.small else SHAPES
    if options.shapes:
        shapes = tuple(tuple(map(int, each.split(":"))) for each in options.shapes.split(","))
    if options.kinds or options.shapes or options.small:
        cells = [(kind, shape) for kind in (options.kinds or ",".join(KINDS)).split(",") for shape in shapes]
    options.cells = cells
    return options


def write(options: Any, device: torch.device, records: List[Dict[str, Any]]) -> None:
    on_cuda = device.type == "cuda"
    about = {
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "records": records,
    }
    with open(options.json, "w") as file:
        json.dump(about, file, indent=1)


def show_errors(records: List[Dict[str, Any]]) -> None:
    """Of the predicted times of all ranks."""
    passes = [each for record in records for each in record["passes"].values() if each["predicted"]]
    errors = [abs(each["predicted"]["ranks"] / each["seconds"]["ranks"] - 1) for each in passes]
    if errors:
        print(f"predicted times of ranks: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}", flush=True)


def main() -> None:
    options = parse()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    if on_cuda and options.device_name is None:
        options.device_name = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    records: List[Dict[str, Any]] = []
    for kind, shape in options.cells:
        case = Case(kind, shape, options.head_dim, device, options)
        records.append(measure(case, options))
        del case
        if dist.get_rank() == 0:
            show(records[-1])
            if options.json:
                write(options, device, records)
    if dist.get_rank() == 0:
        show_errors(records)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
