"""A rank's rows as calls of attention: which rows against which keys of its buffer, and the mask in local terms."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ._ranges import Below, Places, Range, Ranges, size, union
from ._visible import Mask

# Ranges of a rank that get a call each; more become one call, whose mask is key intervals.
MOST_CALLS = 8
_NEVER_DROPPED = torch.iinfo(torch.int32).max


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A call on rows a..b of the shard and keys c..d of the buffer."""

    rows: Range
    keys: Range
    columns: Range  # those keys in the whole problem, where masks and biases have a row axis
    causal: bool
    left: int
    right: int
    start: Optional[Tensor] = None  # int32 [B|1, h, d - c]
    end: Optional[Tensor] = None


def _ascending(ranges: Sequence[Range]) -> List[List[Range]]:
    """A shard's ranges in runs whose positions rise."""
    runs: List[List[Range]] = []
    for each in ranges:
        if runs and runs[-1][-1][1] <= each[0]:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _three_axes(tensor: Tensor) -> Tensor:
    return tensor.reshape(*[1] * (3 - tensor.dim()), *tensor.shape)


def _whole(span: Range, needed: Places) -> bool:
    return span[0] >= span[1] or needed.cut([span]) == [span]


class _Spans:
    """A call for each range of rows, against the keys that causal mask and window leave it."""

    def __init__(self, mask: Mask, seqlens: Tuple[int, int], needed: Ranges) -> None:
        self.mask, self.seqlens, self.buffer, self.needed = mask, seqlens, Places(needed), needed

    def fits(self, ranges: Sequence[Range]) -> bool:
        spans = (self.mask.spans(each, self.seqlens) for each in ranges)
        return len(ranges) <= MOST_CALLS and all(_whole(each, self.buffer) for each in spans)

    def piece(self, rows: Range, place: int) -> Piece:
        """Keys end where the last row's end, so that bottom-right alignment puts every row where it is in the whole."""
        first, end = self.mask.spans(rows, self.seqlens)
        local = (place, place + rows[1] - rows[0])
        if first >= end:
            return Piece(local, (0, 0), (0, 0), False, -1, -1)
        inside = self.buffer.ranges[self._at(first)]
        first = max(inside[0], first // 128 * 128)
        beyond = end - rows[1] - (self.seqlens[1] - self.seqlens[0])
        left, right = self.mask.window_size
        start, last = self._intervals(rows, (first, end))
        return Piece(
            local,
            self.buffer.of((first, end)),
            (first, end),
            self.mask.is_causal,
            left + beyond if left >= 0 else -1,
            max(right - beyond, 0) if right >= 0 else -1,
            start,
            last,
        )

    def _at(self, position: int) -> int:
        import bisect

        return bisect.bisect_right(self.buffer.firsts, position) - 1

    def _intervals(self, rows: Range, keys: Range) -> Tuple[Optional[Tensor], Optional[Tensor]]:
        if self.mask.key_intervals is None:
            return None, None
        start, end = (_three_axes(each)[..., keys[0] : keys[1]] for each in self.mask.key_intervals)
        if rows[0]:
            start, end = (each.clamp(min=rows[0]) - rows[0] for each in (start, end))
        return start, end


def _folded(mask: Mask, seqlens: Tuple[int, int], needed: Ranges, rows: List[Range], place: int, device: torch.device) -> Piece:
    """One call for rising ranges: an interval of global rows is one of theirs, and keys may have holes."""
    start, end = (_three_axes(each.to(device)) for each in mask.intervals(seqlens, device))
    columns = [each[..., first:last] for each in (start, end) for first, last in needed]
    below = Below(rows, device)
    count = len(needed)
    pair = [below(torch.cat(columns[i : i + count], -1)).int() for i in (0, count)] if count else [None, None]
    local = (place, place + size(rows))
    hull = (needed[0][0], needed[-1][1]) if needed else (0, 0)
    return Piece(local, (0, size(needed)), hull, False, -1, -1, pair[0], pair[1])


def make_leaves(
    ranges: Sequence[Range], leaves: Sequence[Sequence[Range]], mask: Mask, seqlens: Tuple[int, int], needed: Ranges
) -> List[List[Piece]]:
    """The calls of each leaf, which are the same whichever rank has its ranges; needed keys are one range."""
    spans, shard = _Spans(mask, seqlens, needed), Places(ranges)
    return [[spans.piece(each, shard.of(each)[0]) for each in leaf if each[0] < each[1]] for leaf in leaves]


def make_pieces(
    ranges: Sequence[Range], mask: Mask, seqlens: Tuple[int, int], needed: Ranges, device: torch.device
) -> List[Piece]:
    """The calls of a rank whose shard has these ranges, and whose buffer has its needed keys."""
    spans = _Spans(mask, seqlens, needed)
    pieces, place = [], 0
    if spans.fits(ranges):
        for each in ranges:
            pieces.append(spans.piece(each, place))
            place += each[1] - each[0]
        return pieces
    for run in _ascending(ranges):
        pieces.append(_folded(mask, seqlens, needed, union(run), place, device))
        place += size(run)
    return pieces
