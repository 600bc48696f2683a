"""context_parallel_worker.py: one rank of test_context_parallel.py: random problems, whole and over the ranks.

Usage: context_parallel_worker.py RANK RANKS MEETING problems SEED COUNT
       context_parallel_worker.py RANK RANKS MEETING bits|reproducible|refusals|differences|killed|late [WHERE]
"""

import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
from flash_dmattn import _arguments, flash_dmattn_func, flash_dmattn_varlen_func, masks
from flash_dmattn.context_parallel import ContextParallel, Layout, Mask, RemoteError

_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")


def draw_ranges(draw, total, ranks, cuts):
    """The ranges between cuts in any order, some ranks empty."""
    parts = [[] for _ in range(ranks)]
    ranges = list(zip([0, *cuts], [*cuts, total]))
    draw.shuffle(ranges)
    for each in ranges:
        draw.choice(parts[: draw.randint(1, ranks)]).append(each)
    return Layout.from_ranges(parts)


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
    return draw_ranges(draw, total, ranks, cuts)


def draw_cp(draw, layout, layout_k, problem, groups):
    heads_kv = problem.shape[2]
    algorithm = draw.choice(["auto", "gather", "gather", "ulysses", "ring", "ring"])
    if algorithm == "ulysses" and heads_kv % layout.ranks:
        algorithm = "gather"
    if algorithm == "ring" and problem.dtype is torch.float64:  # no gradients in it
        algorithm = "gather"
    sets = None
    if draw.random() < 0.5:
        sets = [1] * heads_kv if draw.random() < 0.5 else [heads_kv]
    options = {"timeout": 20.0, "algorithm": algorithm, "keys": draw.choice(["auto", "needed", "all"]), "layout_k": layout_k}
    if algorithm == "auto" and draw.random() < 0.5:
        options["memory"] = draw.choice([0, 1000])
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


TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def expect(is_right, *about):
    assert is_right, about


def say(*what):
    """Of a part of a check that begins."""


def close(have, want, dtype, what):
    assert have.shape == want.shape and have.dtype == want.dtype, (what, have.shape, want.shape, have.dtype, want.dtype)
    if not want.numel():
        return
    have, want = have.detach().double(), want.detach().double()
    expect(torch.equal(have.isinf(), want.isinf()), what, "rows without keys")
    finite = ~want.isinf()
    scale = max(1.0, float(want[finite].abs().max())) if finite.any() else 1.0
    apart = float((have - want)[finite].abs().max()) if finite.any() else 0.0
    expect(apart <= TOLERANCE[dtype] * scale, what, apart, scale)


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


def check_bytes(problem, cp):
    """What arrived is what the table says."""
    explained = cp.explain()
    if explained["algorithm"] != "gather" or problem.mask is not None or problem.bias is not None:
        return
    batch, _, heads_kv, dim, dim_v = problem.shape
    row = batch * heads_kv * (dim + dim_v) * problem.q.element_size()
    assert explained["bytes_received"] == explained["keys_fetched"][cp.rank] * row, explained


def run_problems(rank, ranks, seed, count):
    groups = {}
    if ranks == 4:
        groups["two"] = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "keys"))
    began = time.monotonic()
    for number in range(int(count)):
        draw = random.Random(f"{seed} {number}")
        torch.manual_seed(draw.randrange(2**31))
        problem = Problem(draw, ranks)
        layout = draw_layout(draw, problem.total, ranks)
        layout_k = None if problem.total_k == problem.total else draw_layout(draw, problem.total_k, ranks)
        if all(each.rows(r) == 1 for each in (layout, layout_k or layout) for r in range(ranks)):
            continue  # [1, 1] may be a row's, a key's or all pairs' number
        try:
            cp = draw_cp(draw, layout, layout_k, problem, groups)
            check(problem, cp)
            check_bytes(problem, cp)
        except BaseException:
            about = problem.shape, problem.dtype, problem.total, problem.total_k, problem.packed, problem.options
            kinds = [None if each is None else tuple(each.shape) for each in (problem.mask, problem.bias, problem.sink)]
            print(f"rank {rank} problem {seed} {number}: {about} {kinds} {layout.ranges}", file=sys.stderr)
            raise
    print(f"{count} problems in {time.monotonic() - began:.1f} s")


def check_changed_intervals(cp, mine, call):
    """A mask is known again by its tensors, but not once they hold something else."""
    if "key_intervals" not in call:
        return
    start, end = (each.clone() for each in call["key_intervals"])
    before = cp.flash_dmattn_func(*mine, key_intervals=(start, end))
    assert torch.equal(before, cp.flash_dmattn_func(*mine, key_intervals=(start, end)))
    start[..., :300] = 2**31 - 1
    after = cp.flash_dmattn_func(*mine, key_intervals=(start, end))
    assert torch.equal(after, cp.flash_dmattn_func(*mine, key_intervals=(start.clone(), end.clone())))
    assert not torch.equal(before, after) or cp.rank > 0


def run_bits(rank, ranks, device="cpu", dim=32, dtypes=(torch.float32, torch.bfloat16), count=16, repeats=1):
    """Outputs and the gradient of query have one rank's bits; with heads exchanged, all have."""
    draw = random.Random(5)
    for number in range(count):
        torch.manual_seed(number)
        dtype = draw.choice(dtypes)
        total, heads_kv, group = draw.choice([1024, 2048]), ranks * draw.choice([1, 2]), draw.choice([1, 2])
        heads = heads_kv * group, heads_kv, heads_kv, heads_kv * group
        q, k, v, dout = (torch.randn(1, total, h, dim, device=device).to(dtype) for h in heads)
        call, layout = draw.choice([
            ({"is_causal": True}, Layout.zigzag(total, ranks, 512)),
            ({"is_causal": True, "window_size": (300, 0)}, Layout.contiguous(total, ranks, 512)),
            ({"key_intervals": tuple(masks.topk_intervals(torch.randn(1, heads_kv, total, device=device), 100))},
             Layout.contiguous(total, ranks, 512)),
        ])  # fmt: skip
        whole = [each.clone().requires_grad_() for each in (q, k, v)]
        want = flash_dmattn_func(*whole, **call, deterministic=True)
        wanted = torch.autograd.grad(want, whole, dout)
        for algorithm in ("gather", "ulysses"):
            say("bits", number, algorithm, [*call], q.shape, heads_kv)
            cp = ContextParallel(layout, algorithm=algorithm, timeout=30)
            mine = [layout.shard(each, 1, rank).clone().requires_grad_() for each in (q, k, v)]
            repeated = []
            for _ in range(1 + repeats):
                out = cp.flash_dmattn_func(*mine, **call, deterministic=True)
                repeated.append((out, *torch.autograd.grad(out, mine, layout.shard(dout, 1, rank))))
            for again in repeated[1:]:
                same = [torch.equal(a, b) for a, b in zip(repeated[0], again)]
                expect(all(same), number, algorithm, "not repeatable", same)
            check_changed_intervals(cp, mine, call)
            same = 4 if algorithm == "ulysses" else 2
            for name, have, one in list(zip(("out", "dq", "dk", "dv"), repeated[0], (want, *wanted)))[:same]:
                expect(torch.equal(have, layout.shard(one, 1, rank)), number, algorithm, name, [*call], dtype, total)


def halves(ranks):
    """The groups 0, 1, .. of all ranks, and of half as many, and so on."""
    groups = []
    while ranks:
        members = [dist.new_group(list(range(first, first + ranks))) for first in range(0, dist.get_world_size(), ranks)]
        groups.append((ranks, members[dist.get_rank() // ranks]))
        ranks //= 2
    return groups


def run_reproducible(rank, ranks, device="cpu", dim=16, dtypes=(torch.float32, torch.bfloat16), block=32):
    """Gradients of keys have the same bits on 1, 2 and 4 ranks."""
    groups, total = halves(ranks), 22 * block - 4
    calls = ({"is_causal": True}, {"is_causal": True, "window_size": (3 * block + 4, 0)}, {})
    for number, call in enumerate(calls):
        for dtype in dtypes:
            torch.manual_seed(number)
            q, k, v, dout = (torch.randn(1, total, h, dim, device=device).to(dtype) for h in (4, 2, 2, 4))
            bias = torch.randn(1, 2, 1, total, device=device) if number == 0 else None
            found = []
            for count, members in groups:
                say("reproducible", number, count, dtype)
                layout = Layout.zigzag(total, count, block)
                cp = ContextParallel(layout, members, reproducible_ranks=8, timeout=30)
                mine = [layout.shard(each, 1, cp.rank).clone().requires_grad_() for each in (q, k, v)]
                keys = None if bias is None else layout.shard(bias, 3, cp.rank).clone().requires_grad_()
                out = cp.flash_dmattn_func(*mine, None, keys, deterministic=True, **call)
                leaves = mine if keys is None else [*mine, keys]
                grads = torch.autograd.grad(out, leaves, layout.shard(dout, 1, cp.rank))
                parts = [out, *grads[:3]] + ([grads[3].movedim(3, 1)] if keys is not None else [])
                found.append([layout.unshard(each, 1, members) for each in parts])
            for fewer in found[1:]:
                for name, one, other in zip(("out", "dq", "dk", "dv", "dbias"), found[0], fewer):
                    expect(torch.equal(one, other), name, call, dtype, float((one - other).abs().max()))
            whole = [each.clone().requires_grad_() for each in (q, k, v)]
            wanted = torch.autograd.grad(flash_dmattn_func(*whole, None, bias, **call), whole, dout)
            for name, one, other in zip(("dq", "dk", "dv"), found[0][1:], wanted):
                close(one, other, dtype, name)


def run_refusals(rank, ranks):
    text = sentence_of(lambda: ContextParallel(Layout.contiguous(700, ranks), reproducible_ranks=8))
    assert "must lie as Layout.zigzag has them" in text, text
    text = sentence_of(lambda: ContextParallel(Layout.zigzag(700, ranks), reproducible_ranks=6))
    assert "must be a power of two and a multiple of" in text, text


# ---- faults ----------------------------------------------------------------------------------------------------------


def tensors_of(layout, rank, heads=2, dtype=torch.float32):
    torch.manual_seed(rank)
    return [torch.randn(1, layout.rows(rank), heads, 8).to(dtype).requires_grad_() for _ in range(3)]


def sentence_of(action, kind=ValueError):
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


def all_said(text):
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    return said


def run_differences(rank, ranks):
    """One rank differs from the others: every rank raises the same sentence, and goes on."""
    layout, other = Layout.zigzag(96, ranks, 8), Layout.contiguous(96, ranks, 8)
    last = rank == ranks - 1
    text = sentence_of(lambda: ContextParallel(other if last else layout, timeout=20))
    assert "differ in layout: rank" in text and len(set(all_said(text))) == 1, text
    text = sentence_of(lambda: ContextParallel(layout, keys="all" if last else "needed", timeout=20))
    assert "differ in keys: rank" in text and "all" in text and "needed" in text, text
    cp = ContextParallel(layout, timeout=20)
    q, k, v = tensors_of(layout, rank)
    rows = layout.rows(rank)
    bias = torch.zeros(1, 1, 1, rows)
    whole = torch.zeros(1, 1, rows, 96)
    more = tensors_of(layout, rank, heads=4)
    half = [each.to(torch.bfloat16) for each in (q, k, v)]
    frozen = [each.detach() for each in (q, k, v)]
    for field, mine, theirs in (
        ("is_causal", lambda: cp.flash_dmattn_func(q, k, v, is_causal=True), lambda: cp.flash_dmattn_func(q, k, v)),
        ("heads", lambda: cp.flash_dmattn_func(*more), lambda: cp.flash_dmattn_func(q, k, v)),
        ("dtype", lambda: cp.flash_dmattn_func(*half), lambda: cp.flash_dmattn_func(q, k, v)),
        ("options", lambda: cp.flash_dmattn_func(q, k, v, softcap=2.0), lambda: cp.flash_dmattn_func(q, k, v)),
        ("attn_bias", lambda: cp.flash_dmattn_func(q, k, v, None, bias), lambda: cp.flash_dmattn_func(q, k, v)),
        ("where attn_bias lies", lambda: cp.flash_dmattn_func(q, k, v, None, bias),
         lambda: cp.flash_dmattn_func(q, k, v, None, whole)),
        ("gradients", lambda: cp.flash_dmattn_func(*frozen), lambda: cp.flash_dmattn_func(q, k, v)),
    ):
        text = sentence_of(mine if last else theirs)
        assert f"differ in {'mask' if field == 'is_causal' else field}: rank" in text, (field, text)
        assert len(set(all_said(text))) == 1, all_said(text)
    wrong = torch.zeros(1, rows + 1, 2, 8)
    text = sentence_of(lambda: cp.flash_dmattn_func(wrong if last else q, k, v))
    want = "query has" if last else f"rank {ranks - 1} of a context-parallel call was given what it cannot take"
    assert want in text, text
    text = sentence_of(lambda: cp.flash_dmattn_func(q, k, 3 if last else v), (TypeError, ValueError))
    assert "value is 3" in text, text
    out = cp.flash_dmattn_func(q, k, v, is_causal=True)
    out.sum().backward()
    first = torch.autograd.grad(cp.flash_dmattn_func(q, k, v).sum(), q, create_graph=True)[0]
    text = sentence_of(lambda: first.sum().backward(), RuntimeError)
    assert "no second derivative" in text, text
    text = sentence_of(lambda: torch.func.vmap(lambda x: cp.flash_dmattn_func(x, k, v))(q[None]), RuntimeError)
    assert "cannot run under vmap" in text, text
    compiled = torch.compile(lambda x: cp.flash_dmattn_func(2 * x, k, v, is_causal=True).sin(), backend="eager")
    assert torch.allclose(compiled(q), cp.flash_dmattn_func(2 * q, k, v, is_causal=True).sin())
    small = ContextParallel(layout, memory=0, timeout=20)
    assert torch.allclose(small.flash_dmattn_func(q, k, v, is_causal=True), out, atol=1e-6)
    assert small.explain()["algorithm"] == "ring" and "memory is 0" in small.explain()["why"], small.explain()
    ring, wide = ContextParallel(layout, algorithm="ring", timeout=20), [each.detach().double().requires_grad_() for each in (q, k, v)]
    text = sentence_of(lambda: ring.flash_dmattn_func(*wide), NotImplementedError)
    assert "the ring has no gradients" in text, text
    checked = ContextParallel(layout, check_every_call=True, timeout=20)
    intervals = (torch.zeros(1, 1, 96, dtype=torch.int32), torch.full((1, 1, 96), 96 - last, dtype=torch.int32))
    text = sentence_of(lambda: checked.flash_dmattn_func(q, k, v, key_intervals=intervals))
    assert "differ in values of key_intervals" in text, text


def end_at(cp, number):
    """This process ends, as by kill -9, before its exchange of this number."""
    messages = cp._messages_on(torch.device("cpu"))
    start, count = messages.start, [0]

    def counted(*arguments):
        count[0] += 1
        if count[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(*arguments)

    messages.start = counted


def run_killed(rank, ranks, where):
    """The last rank ends; the others get a sentence in time, and their object refuses what follows."""
    layout = Layout.zigzag(64 * ranks, ranks, 8)
    timeout = 5.0
    cp = ContextParallel(layout, algorithm="gather", timeout=timeout, head_sets=[1, 1])
    q, k, v = tensors_of(layout, rank)
    if rank == ranks - 1:
        if where == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        end_at(cp, {"forward": 2, "backward": 4}[where])
    began = time.monotonic()

    def step():
        cp.flash_dmattn_func(q, k, v, is_causal=True).sum().backward()

    text = sentence_of(step, RemoteError)
    assert time.monotonic() - began < timeout + 2, time.monotonic() - began
    assert "a peer of rank" in text and "failed, ended or was late" in text, text
    again = sentence_of(step, RemoteError)
    assert "takes no more calls" in again, again
    os._exit(0)  # a group without one of its ranks is not taken apart in order


def run_late(rank, ranks):
    layout = Layout.contiguous(64, ranks, 8)
    cp = ContextParallel(layout, timeout=1.5)
    q, k, v = tensors_of(layout, rank)
    if rank == ranks - 1:
        time.sleep(4.5)
        os._exit(0)
    began = time.monotonic()
    text = sentence_of(lambda: cp.flash_dmattn_func(q, k, v), RemoteError)
    assert 1 < time.monotonic() - began < 3.5, time.monotonic() - began
    assert "was late" in text, text
    os._exit(0)


def run_negated(rank, ranks):
    """Views that negate what their memory holds are read by their numbers, and have their gradients."""
    layout = Layout.contiguous(64, ranks, 8)
    cp = ContextParallel(layout, timeout=20)
    plain = tensors_of(layout, rank)
    bias, sink = torch.linspace(-1, 1, 64).expand(1, 1, plain[0].shape[1], 64).clone(), torch.tensor([0.5, -1.0])
    results = []
    for negated in (False, True):
        leaves = [each.detach().clone().requires_grad_() for each in (*plain, bias, sink)]
        q, k, v, added, logits = (torch._neg_view(-each) if negated else each for each in leaves)
        out = cp.flash_dmattn_func(q, k, v, attn_bias=added, sink=logits, is_causal=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        expect(torch.equal(one, other), "negated")


def main():
    rank, ranks, meeting, mode, *others = sys.argv[1:]
    rank, ranks = int(rank), int(ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=ranks)
    modes = {
        "problems": run_problems, "bits": run_bits, "reproducible": run_reproducible, "differences": run_differences,
        "killed": run_killed, "late": run_late, "refusals": run_refusals, "negated": run_negated,
    }  # fmt: skip
    modes[mode](rank, ranks, *others)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
