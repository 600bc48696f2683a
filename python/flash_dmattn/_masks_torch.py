"""Masks as key intervals in PyTorch operations, for tensors on CUDA devices: the numbers the C library gives on the CPU.

Nothing waits for the device unless its function says so. Memory is O(Sk) a head.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

NEVER_DROPPED = 2**31 - 1
# Keys that topk() works on at once: bounds its memory, about 100 bytes a key.
_KEYS_AT_ONCE = 1 << 23

Pair = Tuple[Tensor, Tensor]


def sortable(values: Tensor) -> Tensor:
    """The same order for a sort that tells -0 from 0: one zero; NaN becomes -inf."""
    return torch.where(values == 0, 0, values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))


# ---- top-W -----------------------------------------------------------------------------------------------------------


def _stable_partition(values: Tensor, last: Tensor) -> Tuple[Tensor, Tensor]:
    """(values [.., n] with those where `last` at the end, order kept; entries before each place that are not `last`,
    [.., n + 1])."""
    first = (~last).long()
    before = torch.nn.functional.pad(first.cumsum(-1), (1, 0))
    count = before[..., -1:]
    place = torch.arange(values.shape[-1], device=values.device)
    target = torch.where(last, count + place - before[..., :-1], before[..., :-1])
    return torch.empty_like(values).scatter_(-1, target, values), before


def _smallest_of_prefix(order: Tensor, length: Tensor, k: int) -> Tensor:
    """The k-th smallest (from 0) of order[.., :length], for every length [.., m]; order is a permutation of 0 .. n-1.

    A wavelet matrix, one level a bit from the highest: entries whose bit is 0 go before the others, and each query
    follows the half its answer is in. Queries with length <= k give a number without meaning.
    """
    low, high = torch.zeros_like(length), length
    rank = torch.full_like(length, k)
    answer = torch.zeros_like(length)
    for bit in reversed(range(max(1, (order.shape[-1] - 1).bit_length()))):
        order, before = _stable_partition(order, (order >> bit) & 1 > 0)
        zeros = before[..., -1:]
        low_zeros, high_zeros = before.gather(-1, low), before.gather(-1, high)
        count = high_zeros - low_zeros
        is_one = rank >= count
        answer += is_one.long() << bit
        rank = torch.where(is_one, rank - count, rank)
        low = torch.where(is_one, zeros + low - low_zeros, low_zeros)
        high = torch.where(is_one, zeros + high - high_zeros, high_zeros)
    return answer


def _topk_end(bias: Tensor, real: Optional[Tensor], window: int, shift: int) -> Tensor:
    """end [rows, Sk] of biases [rows, Sk]; real = keys that count."""
    keys = bias.shape[-1]
    row = torch.arange(keys, device=bias.device) - shift
    order = torch.sort(sortable(bias), dim=-1, descending=True, stable=True).indices
    if real is not None:
        order, _ = _stable_partition(order, ~real.gather(-1, order))
    place = torch.arange(keys, device=bias.device).expand_as(order)
    larger = torch.empty_like(order).scatter_(-1, order, place)  # keys with a larger bias, for each key
    dropped_by = _smallest_of_prefix(order, larger, min(window, keys) - 1)
    end = torch.where(dropped_by < row + shift, row, dropped_by - shift)
    end = torch.where(larger < window, NEVER_DROPPED, end)
    return end if real is None else torch.where(real, end, row)


def topk(bias: Tensor, padding: Optional[Tensor], window: int, seqlen_q: int) -> Pair:
    """Key j is dropped by the W-th smallest index among the keys with a larger bias (of equals the smaller index)."""
    batch = bias.shape[0]
    if padding is not None:
        padding = _checked_padding(bias, padding)
        batch = padding.shape[0] if batch == 1 else batch
    shape = (batch, *bias.shape[1:])
    heads, keys = bias.shape[1:]
    start = (torch.arange(keys, device=bias.device) - (keys - seqlen_q)).to(torch.int32).expand(shape).contiguous()
    end = torch.empty_like(start)
    if end.numel() == 0:
        return start, end
    biases = bias.expand(shape).reshape(-1, keys)
    real = None if padding is None else padding[:, None].expand(shape).reshape(-1, keys)
    flat, step = end.view(-1, keys), max(1, _KEYS_AT_ONCE // keys)
    for first in range(0, batch * heads, step):
        part = slice(first, first + step)
        flat[part] = _topk_end(biases[part], None if real is None else real[part], window, keys - seqlen_q)
    return start, end


def _checked_padding(bias: Tensor, padding: Tensor) -> Tensor:
    if padding.device != bias.device:
        raise ValueError(f"key_padding_mask is on {padding.device}, but bias is on {bias.device}")
    if padding.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"key_padding_mask is {padding.dtype}; it must be bool")
    if padding.shape[-1] != bias.shape[-1] or (1 not in (len(padding), len(bias)) and len(padding) != len(bias)):
        raise ValueError(
            f"key_padding_mask has shape {list(padding.shape)}; it must be [{bias.shape[0]}, {bias.shape[-1]}]"
        )
    return padding != 0


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
