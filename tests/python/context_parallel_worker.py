"""context_parallel_worker.py: one rank of test_context_parallel.py: random problems, whole and over the ranks.

Usage: context_parallel_worker.py RANK RANKS MEETING SEED COUNT
"""

import os
import random
import sys
import time

import torch
import torch.distributed as dist
from flash_dmattn import _arguments, flash_dmattn_func, flash_dmattn_varlen_func
from flash_dmattn.context_parallel import ContextParallel, Layout, Mask

_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")


def draw_layout(draw, total, ranks):
    block = draw.choice([1, 2, 4, 8, 16])
    kind = draw.choice(["contiguous", "zigzag", "documents", "balanced", "ranges"])
    if kind == "contiguous":
        return Layout.contiguous(total, ranks, block)
    if kind == "zigzag":
        return Layout.zigzag(total, ranks, block)
    cuts = sorted(draw.randint(0, total) for _ in range(draw.randint(0, 9)))
    if kind == "documents":
        return Layout.documents([0, *cuts, total], ranks, block)
    if kind == "balanced":
        return Layout.balanced([Mask(is_causal=True)], ranks, total=total, block=block)
    parts = [[] for _ in range(ranks)]  # in any order, some ranks empty
    ranges = list(zip([0, *cuts], [*cuts, total]))
    draw.shuffle(ranges)
    for each in ranges:
        draw.choice(parts[: draw.randint(1, ranks)]).append(each)
    return Layout.from_ranges(parts)


def draw_cp(draw, layout, layout_k, heads_kv, groups):
    algorithm = draw.choice(["auto", "gather", "gather", "ulysses"])
    if algorithm == "ulysses" and heads_kv % layout.ranks:
        algorithm = "gather"
    sets = None
    if draw.random() < 0.5:
        sets = [1] * heads_kv if draw.random() < 0.5 else [heads_kv]
    options = {"timeout": 20.0, "algorithm": algorithm, "keys": draw.choice(["auto", "needed", "all"]), "layout_k": layout_k}
    mesh = groups.get(draw.choice(["flat", "two"]))
    if mesh is not None and heads_kv % mesh.size(0) == 0 and algorithm != "ulysses":
        return ContextParallel(layout, mesh, head_sets=None, **options)
    return ContextParallel(layout, head_sets=sets, **options)


class Problem:
    """Whole tensors, the same on every rank."""

    def __init__(self, draw, ranks):
        self.packed = draw.random() < 0.25
        self.dtype = draw.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16])
        self.total = draw.choice([0, 1, 2, 5, 17, 33, 64, 100, 130, 200])
        self.total_k = self.total if draw.random() < 0.8 else draw.choice([0, 1, 40, 150])
        heads_kv = draw.choice([1, 2, 3, ranks, 2 * ranks])
        heads = heads_kv * draw.choice([1, 1, 2, 3])
        batch = 1 if self.packed else draw.choice([1, 1, 2, 3])
        dim, dim_v = draw.choice([(8, 8), (16, 16), (8, 5), (12, 24)])
        self.shape = batch, heads, heads_kv, dim, dim_v
        self.q, self.k, self.v = (
            self.leaf(batch, rows, h, d)
            for rows, h, d in ((self.total, heads, dim), (self.total_k, heads_kv, dim), (self.total_k, heads_kv, dim_v))
        )
        self.sink = self.leaf(*draw.choice([(heads,), (2, heads)])) if draw.random() < 0.3 else None
        self.options = {"softcap": draw.choice([0.0, 0.0, 0.0, 3.0]), "softmax_scale": draw.choice([None, 0.3])}
        self.options["is_causal"] = draw.random() < 0.6
        self.options["lse_without_sink"] = draw.random() < 0.5
        if draw.random() < 0.3:
            self.options["window_size"] = (draw.choice([-1, 0, 7, 50]), draw.choice([-1, 0, 5]))
        self.mask = self.bias = self.intervals = None
        if self.packed:
            self.draw_packed(draw)
        else:
            self.draw_dense(draw)

    def leaf(self, *shape):
        return torch.randn(shape, dtype=torch.float64).to(self.dtype).requires_grad_()

    def scores_shape(self, draw):
        batch, heads, heads_kv = self.shape[:3]
        rows, keys = draw.choice([(self.total, self.total_k), (self.total, self.total_k), (1, self.total_k), (1, self.total_k), (self.total, 1), (1, 1)])
        return draw.choice([1, batch]), draw.choice([1, heads, heads_kv]), rows, keys

    def draw_dense(self, draw):
        batch, heads, heads_kv = self.shape[:3]
        if draw.random() < 0.3:
            self.mask = torch.rand(self.scores_shape(draw)) < 0.7
        if draw.random() < 0.4:
            bias = torch.randn(self.scores_shape(draw), dtype=torch.float64)
            wide = torch.float32 if self.dtype is torch.bfloat16 and draw.random() < 0.5 else self.dtype
            self.bias = bias.to(wide)
            if draw.random() < 0.2:
                self.bias = torch.full_like(self.bias, -1e6)
            self.bias.requires_grad_(draw.random() < 0.8)
        square = self.total == self.total_k
        kind = draw.choice(["none", "none", "intervals", "documents", "prefixes", "windows"])
        shape = (draw.choice([1, batch]), draw.choice([1, heads, heads_kv]), self.total_k)
        if kind == "intervals":
            start = torch.randint(-5, self.total + 1, shape, dtype=torch.int32)
            end = torch.where(torch.rand(shape) < 0.3, 2**31 - 1, start + torch.randint(0, 90, shape)).int()
            self.options["key_intervals"] = (start, end)
        elif kind == "documents" and square and self.total:
            ids = torch.randint(0, 5, (draw.choice([1, batch]), self.total)).sort(1)[0].int()
            self.options["document_ids"] = ids
        elif kind == "prefixes":
            self.options["is_causal"] = False
            self.options["prefix_lengths"] = torch.randint(0, self.total_k + 1, (draw.choice([1, batch]),)).int()
        elif kind == "windows" and self.total_k:
            self.options["window_size"] = torch.randint(-1, 30, (draw.choice([heads, heads_kv]), 2)).int()

    def draw_packed(self, draw):
        count = draw.randint(0, 5)
        cut = lambda total: [0, *sorted(draw.randint(0, total) for _ in range(count)), total]
        first = cut(self.total)
        second = first if self.total == self.total_k and draw.random() < 0.7 else cut(self.total_k)
        self.offsets = [torch.tensor(each, dtype=torch.int32) for each in (first, second)]
        heads, heads_kv = self.shape[1:3]
        if draw.random() < 0.3:
            shape = (draw.choice([1, heads, heads_kv]), self.total_k)
            start = torch.randint(-5, 40, shape, dtype=torch.int32)
            self.options["key_intervals"] = (start, start + torch.randint(0, 60, shape, dtype=torch.int32))

    def whole(self):
        results = {"return_lse": True, "sink": self.sink, **self.options}
        if self.packed:
            longest = [int(each.diff().max()) for each in self.offsets]
            out, lse = flash_dmattn_varlen_func(self.q[0], self.k[0], self.v[0], *self.offsets, *longest, **results)
            return out[None], lse[None]
        return flash_dmattn_func(self.q, self.k, self.v, self.mask, self.bias, **results)

    @staticmethod
    def scores_of(scores, cp):
        """A rank's part of a mask, a bias or its gradient."""
        if scores is None or scores.shape[2] == scores.shape[3] == 1:
            return scores
        return cp.layout.shard(scores, 2, cp.rank) if scores.shape[2] != 1 else cp.layout_k.shard(scores, 3, cp.rank)

    def over_ranks(self, cp):
        """(inputs, outputs) of this rank."""
        shards = [cp.layout.shard(self.q.detach(), 1, cp.rank)]
        shards += [cp.layout_k.shard(each.detach(), 1, cp.rank) for each in (self.k, self.v)]
        shards = [each.clone().requires_grad_() for each in shards]
        bias = self.scores_of(self.bias, cp)
        if bias is not None:
            bias = bias.detach().clone().requires_grad_(self.bias.requires_grad)
        sink = None if self.sink is None else self.sink.detach().clone().requires_grad_()
        results = {"return_lse": True, "sink": sink, **self.options}
        if self.packed:
            out, lse = cp.flash_dmattn_varlen_func(*(each[0] for each in shards), *self.offsets, **results)
            return (*shards, bias, sink), (out[None], lse[None])
        mask = self.scores_of(self.mask, cp)
        return (*shards, bias, sink), cp.flash_dmattn_func(*shards, mask, bias, **results)


TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def close(have, want, dtype, what):
    assert have.shape == want.shape and have.dtype == want.dtype, (what, have.shape, want.shape, have.dtype, want.dtype)
    if not want.numel():
        return
    have, want = have.detach().double(), want.detach().double()
    assert torch.equal(have.isinf(), want.isinf()), what
    finite = ~want.isinf()
    scale = max(1.0, float(want[finite].abs().max())) if finite.any() else 1.0
    apart = float((have - want)[finite].abs().max()) if finite.any() else 0.0
    assert apart <= TOLERANCE[dtype] * scale, (what, apart, scale)


def check(problem, cp):
    inputs, outputs = problem.over_ranks(cp)
    wanted = problem.whole()
    dout, dlse = torch.randn_like(wanted[0]), torch.randn_like(wanted[1])
    finite = ~wanted[1].isinf()
    dlse = torch.where(finite, dlse, 0.0)
    leaves = [each for each in (problem.q, problem.k, problem.v, problem.bias, problem.sink) if each is not None]
    leaves = [each for each in leaves if each.requires_grad]
    whole = dict(zip(map(id, leaves), torch.autograd.grad(wanted, leaves, (dout, dlse), allow_unused=True)))
    layout, layout_k, rank = cp.layout, cp.layout_k, cp.rank
    close(outputs[0], layout.shard(wanted[0], 1, rank), problem.dtype, "out")
    close(outputs[1], layout.shard(wanted[1], 2, rank), problem.dtype, "lse")
    mine = [each for each in inputs if each is not None and each.requires_grad]
    flowing = layout.shard(dout, 1, rank), layout.shard(dlse, 2, rank)
    grads = dict(zip(map(id, mine), torch.autograd.grad(outputs, mine, flowing, allow_unused=True)))
    for name, given, local in zip("qkvbs", (problem.q, problem.k, problem.v, problem.bias, problem.sink), inputs):
        if given is None or not given.requires_grad:
            continue
        want, have = whole[id(given)], grads[id(local)]
        want = torch.zeros_like(given) if want is None else want
        have = torch.zeros_like(local) if have is None else have
        if name in "qkv":
            want = (layout if name == "q" else layout_k).shard(want, 1, rank)
        elif name == "s" or given.shape[2] == given.shape[3] == 1:
            total = have.double()
            dist.all_reduce(total)
            have = total.to(want.dtype)
        else:
            want = problem.scores_of(want, cp)
        close(have, want, problem.dtype, "d" + name)


def main():
    rank, ranks, meeting, seed, count = sys.argv[1:]
    rank, ranks = int(rank), int(ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=ranks)
    groups = {}
    if ranks == 4:
        groups["two"] = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "keys"))
    began = time.monotonic()
    for number in range(int(count)):
        if os.environ.get("CP_VERBOSE"):
            print(number, flush=True)
        draw = random.Random(f"{seed} {number}")
        torch.manual_seed(draw.randrange(2**31))
        problem = Problem(draw, ranks)
        layout = draw_layout(draw, problem.total, ranks)
        layout_k = None if problem.total_k == problem.total else draw_layout(draw, problem.total_k, ranks)
        try:
            cp = draw_cp(draw, layout, layout_k, problem.shape[2], groups)
            check(problem, cp)
        except BaseException as error:
            about = problem.shape, problem.dtype, problem.total, problem.total_k, problem.packed, problem.options
            kinds = [None if each is None else tuple(each.shape) for each in (problem.mask, problem.bias, problem.sink)]
            print(f"rank {rank} problem {seed} {number}: {about} {kinds} {layout.ranges}", file=sys.stderr)
            raise error
    if rank == 0:
        print(f"{count} problems in {time.monotonic() - began:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
