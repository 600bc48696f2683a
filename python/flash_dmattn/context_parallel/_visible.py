"""Which keys which rows see, in global positions: what balances a layout and says which keys a rank needs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._arguments import NO_WINDOW, flag_of, interval_pair, said, window_of
from ._ranges import Below, Range, Ranges, marked, union

# Keys are fetched in pages: a hole of fewer keys costs more as a message of its own than as bytes.
PAGE = 16
# Where keys of a window begin is rounded down to this: kernels walk keys in blocks of at most this size, and a row
# has the bits of the whole problem where its blocks begin at the same keys.
KEY_BLOCK = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a row sees, in positions of the whole problem; all that is given holds at once.

    Args:
        is_causal: key j is visible to row i when j <= i + Sk - Sq. Default False.
        window_size: (left, right): i + Sk - Sq - left <= j <= i + Sk - Sq + right; -1 or None = unbounded, the default.
        key_intervals: (start, end), int32 [B|1, h, Sk] or [h, Sk]: key j is visible to rows start <= i < end. Default
            None. `masks.rule_intervals` and `masks.document_intervals` make them of documents and prefixes.

    Raises:
        TypeError, ValueError: an argument is wrong; the sentence says what is allowed.

    Examples:
        >>> from flash_dmattn.context_parallel import Layout, Mask
        >>> Layout.zigzag(4096, 2).imbalance(Mask(is_causal=True))
        0.0
    """

    is_causal: bool = False
    window_size: Any = NO_WINDOW
    key_intervals: Optional[Tuple[Tensor, Tensor]] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_causal", flag_of(self.is_causal, "is_causal"))
        object.__setattr__(self, "window_size", window_of(self.window_size))
        for bound, name in zip(self.window_size, ("window_size[0]", "window_size[1]")):
            if bound < -1:
                raise ValueError(f"{name} is {bound}; it must be -1 (unbounded) or at least 0")
        if self.key_intervals is not None:
            pair = interval_pair(self.key_intervals, None)
            for each in pair:
                if not isinstance(each, Tensor):
                    raise TypeError(f"key_intervals hold {said(each)}; they must be int32 tensors")
            object.__setattr__(self, "key_intervals", tuple(pair))

    # The keys that causal mask and window leave to a range of rows; empty ones are (0, 0).
    def spans(self, rows: Range, seqlens: Tuple[int, int]) -> Range:
        seqlen_q, seqlen_k = seqlens
        shift = seqlen_k - seqlen_q
        left, right = self.window_size
        first, end = 0, seqlen_k
        if left >= 0:
            first = max(0, rows[0] + shift - left)
        if self.is_causal:
            end = rows[1] + shift
        if right >= 0:
            end = min(end, rows[1] + shift + right)
        end = min(max(end, 0), seqlen_k)
        return (first, end) if first < end and rows[0] < rows[1] else (0, 0)

    # The whole mask as start, end [.., Sk] int64, both from 0 to Sq; end < start says as well that no row sees.
    def intervals(self, seqlens: Tuple[int, int], device: Any = None) -> Tuple[Tensor, Tensor]:
        seqlen_q, seqlen_k = seqlens
        given = self.key_intervals
        device = device if given is None else given[0].device
        key = torch.arange(seqlen_k, dtype=torch.int64, device=device) - (seqlen_k - seqlen_q)
        start, end = torch.zeros_like(key), torch.full_like(key, seqlen_q)
        left, right = self.window_size
        if given is not None:
            start, end = torch.maximum(start, given[0].long()), torch.minimum(end, given[1].long())
        if self.is_causal:
            start = torch.maximum(start, key)
        if right >= 0:
            start = torch.maximum(start, key - right)
        if left >= 0:
            end = torch.minimum(end, key + left + 1)
        return start.clamp(0, seqlen_q), end.clamp(0, seqlen_q)

    # int64 [Sq], on the CPU: the keys that each row sees, summed over what intervals have of batch and heads.
    def rows_visible(self, seqlens: Tuple[int, int]) -> Tensor:
        start, end = (two_axes(each).cpu() for each in self.intervals(seqlens))
        end = torch.maximum(start, end)
        steps = torch.zeros(seqlens[0] + 1, dtype=torch.int64)
        ones = torch.ones(start.numel(), dtype=torch.int64)
        steps.index_add_(0, start.flatten(), ones).index_add_(0, end.flatten(), -ones)
        return steps.cumsum(0)[: seqlens[0]]


def two_axes(intervals: Tensor) -> Tensor:
    return intervals.reshape(math.prod(intervals.shape[:-1]), intervals.shape[-1])


def needed_of_spans(rows: Sequence[Range], mask: Mask, seqlens: Tuple[int, int]) -> Ranges:
    spans = (mask.spans(each, seqlens) for each in rows)
    return union((first // KEY_BLOCK * KEY_BLOCK, end) for first, end in spans)


def needed_keys(rows_of: Sequence[Sequence[Range]], mask: Mask, seqlens: Tuple[int, int]) -> List[Ranges]:
    """For each rank, whose sorted rows are given, the keys that some row of it sees: ranges of whole pages."""
    if mask.key_intervals is None:
        return [needed_of_spans(rows, mask, seqlens) for rows in rows_of]
    start, end = (two_axes(each) for each in mask.intervals(seqlens))
    pages = -(-seqlens[1] // PAGE)
    flags = []
    for rows in rows_of:
        below = Below(rows, start.device)
        seen = (below(end) > below(start)).any(0)
        flags.append(torch.nn.functional.pad(seen, (0, pages * PAGE - seqlens[1])).view(pages, PAGE).any(1))
    if not flags:
        return []
    return [marked(each, PAGE, seqlens[1]) for each in torch.stack(flags).cpu()]


def all_keys(rows_of: Sequence[Sequence[Range]], seqlens: Tuple[int, int]) -> List[Ranges]:
    """Every key, for each rank that has rows."""
    return [[(0, seqlens[1])] if rows and seqlens[1] else [] for rows in rows_of]


def hull(ranges: Ranges) -> Ranges:
    """One range from the first position to the last."""
    return [(ranges[0][0], ranges[-1][1])] if ranges else []
