"""Lists of ranges [first, end) of positions, sorted and apart: what a rank has, and what it needs."""

from __future__ import annotations

import bisect
from typing import Iterable, List, Sequence, Tuple

import torch
from torch import Tensor

Range = Tuple[int, int]
Ranges = List[Range]


def union(ranges: Iterable[Range]) -> Ranges:
    """Sorted; ranges that touch become one, and empty ones vanish."""
    joined: Ranges = []
    for first, end in sorted(each for each in ranges if each[0] < each[1]):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((first, end))
    return joined


def intersect(some: Sequence[Range], others: Sequence[Range]) -> Ranges:
    """Of two sorted lists."""
    common: Ranges = []
    i = j = 0
    while i < len(some) and j < len(others):
        first, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if first < end:
            common.append((first, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return common


def size(ranges: Iterable[Range]) -> int:
    return sum(end - first for first, end in ranges)


class Places:
    """Where positions of a list of ranges lie when the ranges are put one behind the other, in the list's order."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = sorted((first, end, 0) for first, end in ranges if first < end)
        starts, place = {}, 0
        for first, end in ranges:
            if first < end:
                starts[first] = place
                place += end - first
        self.ranges = [(first, end, starts[first]) for first, end, _ in self.ranges]
        self.firsts = [first for first, _, _ in self.ranges]

    def of(self, wanted: Range) -> Range:
        """Of a range that lies within one of the list."""
        first, end, place = self.ranges[bisect.bisect_right(self.firsts, wanted[0]) - 1]
        assert first <= wanted[0] and wanted[1] <= end, "a range is not among the rank's"
        return place + wanted[0] - first, place + wanted[1] - first

    def cut(self, wanted: Iterable[Range]) -> Ranges:
        """Parts of sorted ranges that the list has, as global ranges of which each lies in one range of the list."""
        return intersect(list(wanted), [(first, end) for first, end, _ in self.ranges])


class Below:
    """How many positions of a sorted list lie below a number: it makes intervals of global rows those of a rank."""

    def __init__(self, ranges: Sequence[Range], device: torch.device) -> None:
        first = torch.tensor([each[0] for each in ranges], dtype=torch.int64, device=device)
        length = torch.tensor([each[1] - each[0] for each in ranges], dtype=torch.int64, device=device)
        self.first, self.length = first, length
        self.before = length.cumsum(0) - length

    def __call__(self, positions: Tensor) -> Tensor:
        if not self.first.numel():
            return torch.zeros_like(positions)
        at = torch.searchsorted(self.first, positions.contiguous(), right=True) - 1
        known = at.clamp(min=0)
        inside = torch.minimum((positions - self.first[known]).clamp(min=0), self.length[known])
        return torch.where(at < 0, 0, self.before[known] + inside)


def marked(flags: Tensor, step: int, total: int) -> Ranges:
    """The ranges of pages of `step` positions whose flag, of a bool tensor on the CPU, is set."""
    padded = torch.zeros(flags.numel() + 2, dtype=torch.int8)
    padded[1:-1] = flags
    edges = padded.diff()
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return [(first * step, min(total, end * step)) for first, end in zip(starts, ends)]
