"""The mask grid: causal, window, documents and prefix masks in the CUDA benchmark, as this library and as its peers take
them."""

from __future__ import annotations

import random
from typing import Any, Callable, Dict, Iterator, Tuple

import torch

from flash_dmattn import flash_dmattn_func, masks

from bench_peers import Problem
from bench_report import KEPT, OURS, PLAN, ROWS

SHAPES = ((64, 32, 32), (128, 16, 16), (128, 32, 4), (256, 8, 8))  # head dim, query heads, KV heads
LENGTHS = (8192, 32768)
DOCUMENTS = 12
# A title's extra words and whether the mask is causal.
KINDS = (("alone", True), ("window-1024", True), (f"{DOCUMENTS} documents", True), (f"{DOCUMENTS} documents", False),
         ("prefix-2048", False))


def shapes() -> Iterator[Tuple[int, int, int, int, str, bool]]:
    """(head dim, heads, KV heads, keys, extra, causal) of the 40 cells."""
    for head_dim, heads, heads_kv in SHAPES:
        for keys in LENGTHS:
            for extra, causal in KINDS:
                yield head_dim, heads, heads_kv, keys, extra, causal


def knows(extra: str) -> bool:
    return extra in (kind for kind, _ in KINDS)


def document_bounds(keys: int) -> torch.Tensor:
    """[DOCUMENTS + 1]: the random cuts of a sequence, the same in each run."""
    cuts = random.Random(keys).sample(range(keys // 128, keys - keys // 128), DOCUMENTS - 1)
    return torch.tensor([0, *sorted(cuts), keys])


def row_ranges(extra: str, causal: bool, keys: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """(first, end) [keys] of the keys that each row sees; both rise with the row."""
    row = torch.arange(keys)
    first, end = torch.zeros_like(row), row + 1 if causal else torch.full_like(row, keys)
    kind, _, number = extra.partition("-")
    if kind == "window":
        first = (row - int(number)).clamp(min=0)
    elif kind == "prefix":
        end = (row + 1).clamp(min=min(int(number), keys))
    elif extra.endswith("documents"):
        bounds = document_bounds(keys)
        document = torch.searchsorted(bounds, row, right=True) - 1
        first, end = bounds[document], torch.minimum(end, bounds[document + 1])
    return first, end


def key_intervals(first: torch.Tensor, end: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """(start, end) [1, 1, keys] of the rows that see each key: the same mask, said the other way."""
    key = torch.arange(len(first))
    pair = (torch.searchsorted(bound.contiguous(), key, right=True) for bound in (end, first))
    start, stop = (each.int().view(1, 1, -1) for each in pair)
    return start, stop


def add_mask(problem: Problem, extra: str) -> None:
    """Gives a problem of Sq = Sk the mask that a title names."""
    first, end = row_ranges(extra, problem.causal, problem.keys)
    device = problem.q.device
    problem.row_ranges = first.to(device), end.to(device)
    kind, _, number = extra.partition("-")
    if kind == "window":
        problem.window = int(number), 0
    elif kind != "alone":
        start, stop = key_intervals(first, end)
        problem.intervals = start.to(device), stop.to(device)


def visible_pairs(problem: Problem) -> float:
    first, end = problem.row_ranges  # type: ignore[misc]
    return float((end - first).sum().item()) * problem.q.shape[0] * problem.heads


def _said(problem: Problem) -> Dict[str, Dict[str, Any]]:
    """The mask as arguments: as it is, and as one range of keys a row, as peers take it."""
    first, end = (bound.int().view(1, 1, 1, -1) for bound in problem.row_ranges)  # type: ignore[union-attr]
    by_keys = {"is_causal": problem.causal, "key_intervals": problem.intervals, "window_size": problem.window or (-1, -1)}
    return {"": by_keys, ROWS: {"row_intervals": (first, end)}}


def ways(problem: Problem) -> Dict[str, Callable[[], torch.Tensor]]:
    """Calls of ours with the mask said by rows, and with plans that are kept. A peer's plan is kept, too."""
    q, k, v = problem.q, problem.k, problem.v
    said = _said(problem)
    calls: Dict[str, Callable[[], torch.Tensor]] = {OURS + ROWS: lambda: flash_dmattn_func(q, k, v, **said[ROWS])}
    for name, mask in said.items():
        plan = masks.MaskPlan(q, k, **mask)
        calls[OURS + name + KEPT] = lambda plan=plan: flash_dmattn_func(q, k, v, mask_plan=plan)
    return calls


def plan_calls(problem: Problem) -> Dict[str, Callable[[], Any]]:
    """Calls that make the plans of ways()."""
    q, k = problem.q, problem.k
    return {OURS + name + PLAN: lambda mask=mask: masks.MaskPlan(q, k, **mask) for name, mask in _said(problem).items()}
