"""Masks as key intervals in PyTorch operations, for CUDA tensors: the numbers the C library gives on the CPU.

Nothing waits for the device unless its function says so. A call costs the host about ten microseconds an operation, so
few operations on large tensors are better than many on small ones.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

NEVER_DROPPED = 2**31 - 1
# Counters of a level of _smallest_of_prefix(): about 16 bytes each while it works.
_COUNTERS = 1 << 23
_DIGIT_BITS = range(3, 8)

Pair = Tuple[Tensor, Tensor]


def sortable(values: Tensor) -> Tensor:
    """The same order for a sort that tells -0 from 0: one zero; NaN becomes -inf."""
    return torch.where(values == 0, 0, values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))


# ---- top-W -----------------------------------------------------------------------------------------------------------


def _digit_bits(keys: int, num_bits: int) -> int:
    """Bits of a level's digit: few levels, and counters within their bound."""
    fitting = [bits for bits in _DIGIT_BITS if keys << bits <= _COUNTERS]
    levels = -(-num_bits // max(fitting, default=_DIGIT_BITS[0]))
    return -(-num_bits // levels)


def _smallest_of_prefix(order: Tensor, length: Tensor, k: int) -> Tensor:
    """The k-th smallest (from 0) of order[:, :length], for each length [rows, n]; order [rows, n] permutes 0 .. n-1.

    A wavelet tree, one level a digit from the highest: a node holds the entries of one range of 2^s numbers, in their
    order, at the places of that very range. A query knows its node and how many of the node's entries are in its
    prefix; counters of the digits tell which child has the answer. Lengths up to k give a number without meaning.
    """
    keys, num_bits = order.shape[-1], max(1, (order.shape[-1] - 1).bit_length())
    width = _digit_bits(order.numel(), num_bits)
    node = torch.zeros_like(length)  # its first number, and place
    count = torch.where(length > k, length, keys)
    rank = torch.full_like(length, k, dtype=torch.int32)
    for shift in range((num_bits - 1) // width * width, -1, -width):
        digit = torch.arange(1 << width, device=order.device, dtype=torch.int32)[:, None]
        have = ((order >> shift) & ((1 << width) - 1)).to(torch.int32)
        upto = torch.nn.functional.pad((have[:, None] <= digit).cumsum(-1, dtype=torch.int32), (1, 0))
        place = (node + count)[:, None].expand(-1, 1 << width, -1)
        # Nodes before this one are full, so what they add is known: 2^shift entries of each digit.
        seen = upto.gather(-1, place) - (node >> width).to(torch.int32)[:, None] * (digit + 1)
        below = seen <= rank[:, None]
        before = torch.where(below, seen, 0).amax(1)
        count = (torch.where(below, keys, seen).amin(1) - before).long()
        node = node + (below.sum(1) << shift)
        rank = rank - before
        if shift:
            order = order.gather(-1, torch.sort(order >> shift, dim=-1, stable=True).indices)
    return node


def _topk_end(bias: Tensor, real: Optional[Tensor], window: int, shift: int) -> Tensor:
    """end [rows, Sk] of biases [rows, Sk]; real = keys that count."""
    keys = bias.shape[-1]
    row = torch.arange(keys, device=bias.device) - shift
    order = torch.sort(sortable(bias), dim=-1, descending=True, stable=True).indices
    if real is not None:
        padded = (~real.gather(-1, order)).to(torch.uint8)
        order = order.gather(-1, torch.sort(padded, dim=-1, stable=True).indices)
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
    flat, step = end.view(-1, keys), max(1, (_COUNTERS >> _DIGIT_BITS[0]) // keys)
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
