"""context_parallel_devices.py: context parallelism on P devices against one of them, in one command.

    NCCL_NVLS_ENABLE=0 python3 -m torch.distributed.run --nproc-per-node 2 tests/python/context_parallel_devices.py

Random problems (few kinds of them, since each has kernels of its own), bits of one device, repeats, and gradients that
1, 2, 4 devices have alike. What is wrong is printed, and the rest goes on. Without a device the same runs on gloo.
"""

import argparse
import collections
import faulthandler
import json
import os
import random
import subprocess
import sys
import time

import context_parallel_worker as worker
import torch
import torch.distributed as dist
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, masks
from flash_dmattn.context_parallel import ContextParallel, Layout, Mask

KINDS = (
    "causal", "full", "window", "topw", "documents", "packed", "mask", "row bias", "key bias", "sink", "softcap",
    "fp16", "float32", "atomic",
)  # fmt: skip
complaints = []
PATIENCE_S = 40  # of a problem; then each thread's calls are printed, and the process ends


def note(is_right, *about):
    """In place of an assertion: the other ranks are not left waiting."""
    if not is_right:
        complaints.append(about)


class Problem(worker.Problem):
    """Whole tensors of one kind, the same on every rank."""

    def __init__(self, draw, kind, device, small):
        self.kind, self.device, self.packed = kind, device, kind == "packed"
        self.dtype = {"fp16": torch.float16, "float32": torch.float32}.get(kind, torch.bfloat16)
        self.total = self.total_k = draw.choice([64, 100, 192] if small else [1024, 1536, 2000, 2816, 4096])
        heads, heads_kv = draw.choice([(2, 2), (4, 2), (4, 4), (8, 4), (8, 1)])
        dim = 16 if small else 64 if kind in ("fp16", "float32") else 128
        batch = 1 if self.packed else draw.choice([1, 1, 2])
        self.shape = batch, heads, heads_kv, dim, dim
        self.q, self.k, self.v = (self.leaf(batch, self.total, h, dim) for h in (heads, heads_kv, heads_kv))
        self.sink = self.leaf(heads) if kind == "sink" else None
        self.mask = self.bias = self.intervals = None
        self.options = {"deterministic": kind != "atomic"}
        self.options["is_causal"] = kind not in ("full", "topw", "documents", "mask")
        self.draw_kind(draw, kind)

    def leaf(self, *shape):
        return torch.randn(shape, device=self.device).to(self.dtype).requires_grad_()

    def draw_kind(self, draw, kind):
        batch, heads, heads_kv = self.shape[:3]
        one = draw.choice([1, batch])
        if kind == "window":
            self.options["window_size"] = (draw.choice([0, 100, self.total // 4]), 0)
        elif kind == "topw":
            bias = torch.randn(one, heads_kv, self.total, device=self.device)
            self.options["key_intervals"] = tuple(masks.topk_intervals(bias, draw.choice([10, self.total // 8])))
        elif kind == "documents":
            ids = torch.randint(0, 5, (one, self.total), device=self.device).sort(1)[0].int()
            self.options["document_ids"] = ids
        elif kind == "packed":
            cuts = sorted(draw.randint(0, self.total) for _ in range(draw.randint(0, 5)))
            self.offsets = [torch.tensor([0, *cuts, self.total], dtype=torch.int32, device=self.device)] * 2
        elif kind == "mask":
            self.mask = torch.rand(one, 1, self.total, self.total, device=self.device) < 0.7
        elif kind == "row bias":
            self.bias = torch.randn(one, heads, self.total, self.total, device=self.device).to(self.dtype).requires_grad_()
        elif kind == "key bias":
            self.bias = torch.randn(one, heads_kv, 1, self.total, device=self.device).requires_grad_()
        elif kind == "softcap":
            self.options["softcap"] = 3.0


def draw_layout(draw, total, ranks, small):
    block = draw.choice([8, 16]) if small else draw.choice([64, 128, 256])
    kind = draw.choice(["contiguous", "zigzag", "zigzag", "documents", "balanced", "ranges"])
    if kind in ("contiguous", "zigzag"):
        return getattr(Layout, kind)(total, ranks, block)
    cuts = sorted(draw.randint(0, total) for _ in range(draw.randint(1, 5)))
    if kind == "documents":
        return Layout.documents([0, *cuts, total], ranks, block)
    if kind == "balanced":
        return Layout.balanced([Mask(is_causal=True)], ranks, total=total, block=max(block, total // (4 * ranks)))
    return worker.draw_ranges(draw, total, ranks, cuts)


def draw_cp(draw, problem, ranks, mesh, small):
    """The same object on every rank, and what it is called in the counts."""
    layout, heads_kv = draw_layout(draw, problem.total, ranks, small), problem.shape[2]
    keys = draw.choice(["auto", "needed", "all"])
    algorithm = draw.choice(["auto", "gather", "gather", "ulysses", "ring", "both"])
    if algorithm == "ulysses" and heads_kv % ranks or algorithm == "both" and (mesh is None or heads_kv % mesh.size(0)):
        algorithm = "gather"
    if algorithm == "both":
        return ContextParallel(layout, mesh, keys=keys, algorithm=draw.choice(["auto", "ring"])), "both"
    sets = draw.choice([None, [1] * heads_kv, [heads_kv]])
    margin = draw.choice([0, 0, 16])
    return ContextParallel(layout, None, algorithm, keys, head_sets=sets, sm_margin=margin), algorithm


def compile_kind(number, device):
    """One device's kernels of a kind into the cache of kernels."""
    for seed in range(8):
        draw = random.Random(seed)
        problem = Problem(draw, KINDS[number], device, False)
        out, lse = problem.whole()
        leaves = [each for each in (problem.q, problem.k, problem.v, problem.bias, problem.sink) if each is not None]
        leaves = [each for each in leaves if each.requires_grad]
        torch.autograd.grad((out, lse), leaves, (torch.randn_like(out), torch.zeros_like(lse)))
    torch.cuda.synchronize()


def compile_ahead(ranks):
    """By a process a kind, shared out over the devices."""
    given = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    every = [
        subprocess.Popen([sys.executable, __file__, "--compile", f"{number}"], env={**given, "DEVICE": f"{number % ranks}"})
        for number in range(len(KINDS))
    ]
    for process in every:
        process.wait()


def same_everywhere(number, device, op):
    tensor = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    return float(tensor)


def run_problems(options, device):
    """How many of each kind and each algorithm, until the problems or the time end."""
    ranks, rank, small = dist.get_world_size(), dist.get_rank(), device.type == "cpu"
    mesh = dist.init_device_mesh(device.type, (2, ranks // 2)) if ranks in (4, 8) else None
    counts, began = collections.Counter(), time.monotonic()
    for number in range(options.problems):
        if number % 10 == 0 and same_everywhere(time.monotonic() - began, device, dist.ReduceOp.MAX) > options.seconds:
            break
        draw = random.Random(f"{options.seed} {number}")
        torch.manual_seed(draw.randrange(2**31))
        kind = KINDS[number % len(KINDS)]
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        problem = Problem(draw, kind, device, small)
        cp, algorithm = draw_cp(draw, problem, ranks, mesh, small)
        about = f"problem {options.seed} {number}: {kind}, {problem.shape}, {problem.total} rows, {algorithm}"
        before = len(complaints)
        try:
            worker.check(problem, cp)
            worker.check_bytes(problem, cp)
        except Exception:
            print(f"rank {rank}, {about}, {cp.layout.ranges}", file=sys.stderr, flush=True)
            raise
        for each in complaints[before:]:
            print(f"WRONG: rank {rank}, {about}, {cp.explain()}, {cp.layout.ranges}: {each}", flush=True)
        counts[kind] += 1
        counts[algorithm] += 1
    faulthandler.cancel_dump_traceback_later()
    return counts


def say(*what):
    """How far a check of bits has come: a rank that hangs ends with it."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    if dist.get_rank() == 0:
        print(f"    {time.strftime('%H:%M:%S')}", *what, flush=True)


def phase(name, device, work):
    """Runs it; says what was wrong on any rank."""
    began, before = time.monotonic(), len(complaints)
    counts = work()
    faulthandler.cancel_dump_traceback_later()
    found = int(same_everywhere(len(complaints) - before, device, dist.ReduceOp.SUM))
    seconds = time.monotonic() - began
    if dist.get_rank() == 0:
        print(f"{name}: {found} wrong, {seconds:.1f} s {dict(counts) if counts else ''}", flush=True)
    for each in complaints[before:]:
        if name != "problems":
            print(f"WRONG: rank {dist.get_rank()}, {name}: {each}", flush=True)
    return {"wrong": found, "seconds": seconds, "counts": counts or {}}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60, help="for the random problems")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10, help="of each problem of the check of bits")
    parser.add_argument("--json", default="", help="where the counts are written")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse()
    on_cuda = torch.cuda.is_available()
    if options.compile is not None:
        return compile_kind(options.compile, torch.device("cuda", int(os.environ["DEVICE"])))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worker.expect, worker.say = note, say
    worker.TOLERANCE[torch.float32] = 1e-4  # of kernels that multiply bfloat16 parts of numbers
    half, dim, count = ((torch.bfloat16,), 128, 12) if on_cuda else ((torch.float32,), 16, 2)
    phases = {
        "compiling": lambda: compile_ahead(ranks) if on_cuda and rank == 0 else None,
        "problems": lambda: run_problems(options, device),
        "bits": lambda: worker.run_bits(rank, ranks, device, dim, half, count, options.repeats if on_cuda else 1),
        "reproducible": lambda: worker.run_reproducible(rank, ranks, device, dim, half, 128 if on_cuda else 32),
    }
    found = {name: phase(name, device, work) for name, work in phases.items()}
    if rank == 0 and options.json:
        about = torch.cuda.get_device_name(device) if on_cuda else "cpu"
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None
        with open(options.json, "w") as file:
            versions = {"torch": torch.__version__, "nccl": nccl}
            json.dump({"device": about, "ranks": ranks, **versions, "options": vars(options), "phases": found}, file, indent=1)
    dist.destroy_process_group()
    return 1 if any(each["wrong"] for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
