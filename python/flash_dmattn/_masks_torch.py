"""Masks as key intervals in PyTorch operations, for CUDA tensors: the numbers the C library gives on the CPU.

Nothing waits for the device unless its function says so. A call costs the host about ten microseconds an operation, so
few operations on large tensors are better than many on small ones.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

NEVER_DROPPED = 2**31 - 1

Pair = Tuple[Tensor, Tensor]


def sortable(values: Tensor) -> Tensor:
    """The same order for a sort that tells -0 from 0: one zero; NaN becomes -inf."""
    return torch.where(values == 0, 0, values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))


# ---- windows, prefixes, documents ------------------------------------------------------------------------------------


def _as_pair(start: Any, end: Any, like: Tensor) -> Pair:
    """Two numbers or int64 tensors [Sk] as int32 [1, 1, Sk]."""
    limits = torch.iinfo(torch.int32)
    each = (torch.zeros_like(like) + bound for bound in (start, end))
    first, last = (bound.clamp(limits.min, limits.max).to(torch.int32)[None, None] for bound in each)
    return first, last


def window(seqlen_q: int, seqlen_k: int, window_size: Tuple[int, int], causal: bool, device: torch.device) -> Pair:
    """Sliding window and causal; the arguments are legal."""
    left, right = window_size[0], 0 if causal else window_size[1]
    unbounded = seqlen_q + seqlen_k
    row = torch.arange(seqlen_k, device=device) - (seqlen_k - seqlen_q)
    start = 0 if right < 0 or right > unbounded else row - right
    end = NEVER_DROPPED if left < 0 or left >= unbounded else row + left + 1
    return _as_pair(start, end, row)


def prefix(seqlen_q: int, seqlen_k: int, length: int, device: torch.device) -> Pair:
    """Prefix LM; the arguments are legal."""
    key = torch.arange(seqlen_k, device=device)
    return _as_pair(torch.where(key < length, 0, key - (seqlen_k - seqlen_q)), NEVER_DROPPED, key)


def documents(cu_seqlens: Tensor, causal: bool, seqlen: int) -> Pair:
    """Attention inside documents; keys from the last offset on are never visible."""
    key = torch.arange(seqlen, device=cu_seqlens.device)
    offsets = cu_seqlens.long().contiguous()
    following = torch.searchsorted(offsets, key, right=True)  # the first offset above the key
    inside = following < len(offsets)
    first = offsets[(following - 1).clamp(min=0)]
    last = torch.where(inside, offsets[following.clamp(max=len(offsets) - 1)], key)
    return _as_pair(torch.where(inside & (not causal), first, key), last, key)


# ---- dense masks -----------------------------------------------------------------------------------------------------


def from_mask(planes: Tensor) -> Optional[Pair]:
    """A dense mask [B, h, Sq, Sk] as intervals, None when it is not one per key. Waits for the device, to know that."""
    batch, heads, rows, keys = planes.shape
    if rows == 0 or planes.numel() == 0:
        bounds = torch.full((batch, heads, keys), rows, dtype=torch.int32, device=planes.device)
        return bounds, bounds.clone()
    rises = (planes[..., 1:, :] & ~planes[..., :-1, :]).sum(-2) + planes[..., 0, :]
    if bool((rises > 1).any()):
        return None
    count = planes.sum(-2)
    first = torch.where(count > 0, planes.to(torch.uint8).argmax(-2), rows)
    last = first + count
    last = torch.where((count > 0) & (last == rows), NEVER_DROPPED, last)
    return first.to(torch.int32), last.to(torch.int32)
