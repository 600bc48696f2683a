"""test_context_parallel.py: layouts and tables by themselves, and attention over 2, 3 and 4 processes on gloo."""

import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
pytest.importorskip("torch.distributed")
from flash_dmattn import masks  # noqa: E402
from flash_dmattn.context_parallel import _engine  # noqa: E402
from flash_dmattn.context_parallel import ContextParallel, Layout, Mask  # noqa: E402
from flash_dmattn.context_parallel._exchange import make_table  # noqa: E402
from flash_dmattn.context_parallel._ranges import intersect, size  # noqa: E402
from flash_dmattn.context_parallel._visible import PAGE, all_keys, needed_keys  # noqa: E402
from flash_dmattn.context_parallel._sets import set_sizes  # noqa: E402

WORKER = pathlib.Path(__file__).with_name("context_parallel_worker.py")


def run_ranks(tmp_path, ranks, *arguments, ends=(), worker=WORKER):
    """Runs a worker; ranks in `ends` end by SIGKILL, the others well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    meeting = str(tmp_path / "meeting")
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(ranks), meeting, *map(str, arguments)],
            env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=150)
            assert process.returncode == (-signal.SIGKILL if rank in ends else 0), (rank, errors)
    finally:
        for process in processes:
            process.kill()


# ---- layouts ---------------------------------------------------------------------------------------------------------


def draw_layout(draw, total, ranks):
    block = draw.choice([1, 3, 16, 256])
    cuts = sorted(draw.randint(0, total) for _ in range(draw.randint(0, 12)))
    if draw.random() < 0.3:
        return Layout.contiguous(total, ranks, block), block
    if draw.random() < 0.4:
        return Layout.zigzag(total, ranks, block), block
    if draw.random() < 0.5:
        return Layout.documents([0, *cuts, total], ranks, block), None
    parts = [[] for _ in range(ranks)]
    ranges = list(zip([0, *cuts], [*cuts, total]))
    draw.shuffle(ranges)
    for each in ranges:
        draw.choice(parts).append(each)
    return Layout.from_ranges(parts), None


def test_layouts_have_every_position_once():
    draw = random.Random(0)
    for _ in range(1500):
        total, ranks = draw.choice([0, 1, 7, 100, 1000, 70001]), draw.choice([1, 2, 3, 8, 64, 1024])
        layout, block = draw_layout(draw, total, ranks)
        assert layout.ranks == ranks and layout.total == total
        ranges = sorted(each for rank in layout.ranges for each in rank)
        assert [first for first, _ in ranges] == [0, *[end for _, end in ranges[:-1]]][: len(ranges)]
        assert not ranges or ranges[-1][1] == total
        assert sum(map(layout.rows, range(ranks))) == total
        if block:
            assert all(first % block == 0 for first, _ in ranges)
            longest = max(map(layout.rows, range(ranks)))
            assert longest <= total // ranks + 2 * block


def test_shards_join_to_the_whole():
    draw = random.Random(1)
    for _ in range(200):
        total, ranks = draw.choice([0, 1, 30, 300]), draw.choice([1, 2, 5])
        layout, _ = draw_layout(draw, total, ranks)
        x = torch.randn(2, total, 3)
        parts = [layout.shard(x, 1, rank) for rank in range(ranks)]
        assert torch.equal(layout.join(parts, 1), x)
        for rank, part in enumerate(parts):
            assert torch.equal(part, x[:, layout.positions(rank)])


def test_layout_of_an_index():
    layout = Layout.zigzag(256, 2, 16)
    index = torch.cat([layout.positions(rank) for rank in range(2)])
    assert Layout.from_index(index, 2).ranges == layout.ranges
    assert Layout.from_index(index[None], 2).ranges == layout.ranges
    with pytest.raises(ValueError, match="runs of 1.0 rows on average"):
        Layout.from_index(torch.arange(64).view(2, 32).t().reshape(-1), 2)
    with pytest.raises(ValueError, match="index is no permutation"):
        Layout.from_index(torch.zeros(64, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="64 rows, which 3 ranks cannot share"):
        Layout.from_index(torch.arange(64), 3)


def test_layouts_that_are_none():
    with pytest.raises(ValueError, match="position 4 is in no range"):
        Layout.from_ranges([[(0, 4)], [(5, 8)]])
    with pytest.raises(ValueError, match="position 3 is in two ranges"):
        Layout.from_ranges([[(0, 4)], [(3, 8)]])
    with pytest.raises(ValueError, match=r"a range is \(4, 2\)"):
        Layout.from_ranges([[(4, 2)]])
    with pytest.raises(ValueError, match="at least one rank"):
        Layout.from_ranges([])
    with pytest.raises(ValueError, match="ranks is 0"):
        Layout.zigzag(8, 0)


# ---- which keys ------------------------------------------------------------------------------------------------------


def draw_mask(draw, rows, keys):
    pair = None
    if draw.random() < 0.5:
        shape = (draw.choice([1, 2]), draw.choice([1, 3]), keys)
        start = torch.randint(-3, rows + 2, shape, dtype=torch.int32)
        pair = (start, torch.where(torch.rand(shape) < 0.2, 2**31 - 1, start + torch.randint(0, 40, shape)).int())
    window = (draw.choice([-1, -1, 0, 9, 60]), draw.choice([-1, -1, 0, 4]))
    return Mask(draw.random() < 0.5, window, pair)


def visible_by_brute_force(mask, rows, keys):
    """bool [n, Sq, Sk]"""
    row, key = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    shift, seen = keys - rows, torch.ones(1, rows, keys, dtype=torch.bool)
    left, right = mask.window_size
    if mask.is_causal:
        seen = seen & (key <= row + shift)
    if left >= 0:
        seen = seen & (key >= row + shift - left)
    if right >= 0:
        seen = seen & (key <= row + shift + right)
    if mask.key_intervals is not None:
        start, end = (each.flatten(0, -2)[:, None] for each in mask.key_intervals)
        seen = seen & (start <= row) & (row < end)
    return seen


def test_needed_keys_are_those_that_rows_see():
    draw = random.Random(2)
    torch.manual_seed(2)
    for _ in range(400):
        rows, ranks = draw.choice([0, 1, 40, 200]), draw.choice([1, 2, 3, 5])
        keys = rows if draw.random() < 0.6 else draw.choice([0, 3, 150])
        layout, mask = draw_layout(draw, rows, ranks)[0], draw_mask(draw, rows, keys)
        seen = visible_by_brute_force(mask, rows, keys)
        pairs = [int(seen[:, layout.positions(rank)].sum()) for rank in range(ranks)]
        assert layout.visible(mask, keys) == pairs
        rows_of = [layout.sorted_ranges(rank) for rank in range(ranks)]
        for rank, needed in enumerate(needed_keys(rows_of, mask, (rows, keys))):
            want = seen[:, layout.positions(rank)].any(0).any(0)
            have = torch.zeros(keys, dtype=torch.bool)
            for first, end in needed:
                have[first:end] = True
            assert not (want & ~have).any(), "a key that a row sees is not fetched"
            if mask.key_intervals is not None:  # nothing but whole pages that hold such a key
                pages = torch.nn.functional.pad(want, (0, -keys % PAGE)).view(-1, PAGE).any(1)
                assert torch.equal(have, pages.repeat_interleave(PAGE)[:keys])


def test_tables_of_all_ranks_fit():
    draw = random.Random(3)
    for _ in range(300):
        total, ranks = draw.choice([0, 1, 50, 400]), draw.choice([1, 2, 3, 7])
        layout, _ = draw_layout(draw, total, ranks)
        mask = draw_mask(draw, total, total)
        rows_of = [layout.sorted_ranges(rank) for rank in range(ranks)]
        needed = needed_keys(rows_of, mask, (total, total)) if draw.random() < 0.8 else all_keys(rows_of, (total, total))
        tables = [make_table(layout.ranges, needed, rank) for rank in range(ranks)]
        x = torch.arange(total)
        for rank, table in enumerate(tables):
            filled = torch.full((table.size,), -1)
            routes = [(route.peer, route) for route in table.receives] + [(rank, table.own)]
            for peer, route in routes:
                shard = layout.shard(x, 0, peer)
                for (a, b), (c, d) in route.pairs:
                    assert (filled[c:d] == -1).all()
                    filled[c:d] = shard[a:b]
            want = torch.cat([torch.arange(*each) for each in needed[rank]] or [torch.zeros(0, dtype=torch.int64)])
            assert torch.equal(filled, want)
            for route in table.receives:  # what is sent is what is expected
                (sent,) = [each for each in tables[route.peer].sends if each.peer == rank]
                assert sent.pairs == route.pairs
            for route in table.sends:
                assert any(each.peer == rank for each in tables[route.peer].receives)


def test_zigzag_is_balanced_under_a_causal_mask():
    mask = Mask(is_causal=True)
    for ranks in (2, 8, 64):
        assert Layout.zigzag(131072, ranks).imbalance(mask) < 1e-3
    assert Layout.contiguous(131072, 8).imbalance(mask) == pytest.approx(0.875, abs=1e-3)
    layout = Layout.zigzag(131072, 8)
    assert sum(layout.fetched(mask, rank) for rank in range(8)) / (7 * 131072) == pytest.approx(0.75, abs=0.02)


def test_swap_search_balances_documents_and_fetches_few_keys():
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(500, 16000, (40,), generator=generator).cumsum(0)
    offsets = torch.cat([torch.zeros(1), lengths[lengths < 65536], torch.tensor([65536])]).int()
    mask = Mask(key_intervals=tuple(masks.document_intervals(offsets)))
    swapped = Layout.balanced([mask], 4, total=65536, block=1024)
    plain = Layout.contiguous(65536, 4)
    assert plain.imbalance(mask) > 0.1 and swapped.imbalance(mask) <= 0.03
    assert len({swapped.rows(rank) for rank in range(4)}) == 1
    fetched = sum(swapped.fetched(mask, rank) for rank in range(4))
    assert fetched <= 0.35 * 3 * 65536


def test_a_window_fetches_what_lies_ahead():
    layout, mask = Layout.contiguous(65536, 4), Mask(window_size=(4096, 0))
    assert [layout.fetched(mask, rank) for rank in range(4)] == [0, 4096, 4096, 4096]
    assert size(intersect(layout.needed(mask, 1), [(16384, 32768)])) == 16384


def test_sets_of_heads():
    for heads in range(1, 40):
        for fewest in range(1, 12):
            for most in range(1, 5):
                sizes = set_sizes(heads, fewest, most)
                assert sum(sizes) == heads and 1 <= len(sizes) <= most and min(sizes) >= min(fewest, heads)


# ---- sums of gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_of_keys_are_added_without_rounding(dtype):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 70, heads, 16).to(dtype) for heads in (4, 2, 2, 4))
    results = _engine.new_results(q, v, False)
    settings = (0, 0, None, True, 0.0, -1, -1, False, False, 0)
    _engine.forward(_engine.Operands(q, k, v), results, settings)
    plain, wide = torch.empty_like(k), torch.empty_like(k)
    more = [None] * 2
    _engine.backward(_engine.Operands(q, k, v), results, (dout, None), (None, plain, wide, *more), settings)
    sums = [torch.full(k.shape, 1.0, dtype=torch.float64 if dtype is torch.float64 else torch.float32) for _ in "kv"]
    with torch.no_grad():
        for _ in range(2):
            given = (None, *sums, *more)
            _engine.backward(_engine.Operands(q, k, v), results, (dout, None), given, settings, add=True)
    for rounded, total in zip((plain, wide), sums):
        apart = ((total.double() - 1) / 2 - rounded.double()).abs().max()
        assert apart <= torch.finfo(dtype).eps * rounded.double().abs().max()
    if dtype in (torch.bfloat16, torch.float16):
        zeros = [torch.zeros_like(each) for each in sums]
        _engine.backward(_engine.Operands(q, k, v), results, (dout, None), (None, *zeros, *more), settings, add=True)
        assert all(torch.equal(a.to(dtype), b) for a, b in zip(zeros, (plain, wide)))
        with pytest.raises(ValueError, match=f"dk and dv are {str(dtype)[6:]}, but add_dkv is 1"):
            _engine.backward(_engine.Operands(q, k, v), results, (dout, None), (None, plain, wide, *more), settings, add=True)


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.rotates(3)
@pytest.mark.parametrize("ranks, count", [(2, 150), (3, 70), (4, 50)])
def test_random_problems(tmp_path, ranks, count):
    run_ranks(tmp_path, ranks, "problems", os.environ.get("FDM_TEST_SEED", 11), count)


@pytest.mark.skipif("FDM_TEST_FAMILY" in os.environ, reason="the plan is not free")
def test_bits_of_one_rank(tmp_path):
    run_ranks(tmp_path, 2, "bits")


@pytest.mark.rotates(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_of_fewer_ranks(tmp_path, ranks):
    run_ranks(tmp_path, ranks, "reproducible")


@pytest.mark.rotates(2)
def test_what_fewer_ranks_cannot_have(tmp_path):
    run_ranks(tmp_path, 2, "refusals")


@pytest.mark.rotates(2)
def test_ranks_that_differ_all_say_so(tmp_path):
    run_ranks(tmp_path, 3, "differences")


@pytest.mark.rotates(2)
@pytest.mark.parametrize("where", ["between", "forward", "backward"])
def test_a_rank_that_is_killed_ends_the_others(tmp_path, where):
    run_ranks(tmp_path, 3, "killed", where, ends=(2,))


@pytest.mark.rotates(2)
def test_a_rank_that_is_late_ends_the_others(tmp_path):
    run_ranks(tmp_path, 2, "late")


def test_negated_views(tmp_path):
    run_ranks(tmp_path, 2, "negated")


def test_one_rank_alone(tmp_path):
    run_ranks(tmp_path, 1, "problems", 3, 30)


def test_arguments_of_the_object():
    with pytest.raises(ValueError, match="algorithm is 'best'; it must be one of auto, gather, ulysses"):
        ContextParallel(Layout.zigzag(64, 2), algorithm="best")
    with pytest.raises(TypeError, match="layout is 3; it must be a Layout"):
        ContextParallel(3)
