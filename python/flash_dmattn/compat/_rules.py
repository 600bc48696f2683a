"""What flash-attn says by numbers and ours by tensors: used lengths, chunks and bounds of windows as key intervals,
ALiBi as a bias of each key or, beside rows in reverse order, of each diagonal."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ._refusals import InvalidArgument

FAR = 2**30  # farther than any key
Window = Tuple[Optional[int], Optional[int]]
Pair = Tuple[Tensor, Tensor]
# cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
Packing = Tuple[Tensor, Tensor, int, int]


class Lengths(NamedTuple):
    """Of each sequence, int32 [B], or [1] where all have the same: rows and keys that count, and rows there are."""

    rows: Tensor
    keys: Tensor
    all_rows: Tensor


def lengths_of(q: Tensor, k: Tensor, packing: Optional[Packing], used: Tuple[Any, Any]) -> Lengths:
    """used: (seqused_q, seqused_k), int32 [B] or None."""

    def held(tensor: Tensor, index: int) -> Tensor:
        if packing is not None:
            return packing[index].diff()  # type: ignore[union-attr]
        return torch.full((1,), tensor.shape[1], dtype=torch.int32, device=q.device)

    rows, keys = held(q, 0), held(k, 1)
    both = [
        have if want is None else torch.minimum(want.to(torch.int32).clamp(min=0), have)
        for have, want in ((rows, used[0]), (keys, used[1]))
    ]
    return Lengths(both[0], both[1], rows)


def places(total: int, offsets: Tensor) -> Pair:
    """Of each of `total` packed rows: the sequence that has it, and its number there; some number for rows of none."""
    row = torch.arange(total, dtype=torch.int32, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:], row, right=True).clamp(max=offsets.shape[0] - 2)
    return sequence, row - offsets[sequence]


def _spread(numbers: Tensor, sequence: Optional[Tensor]) -> Tensor:
    """A number of each sequence beside keys [B, 1, Sk], packed [1, total_k]."""
    return numbers[:, None, None] if sequence is None else numbers[sequence][None]


def intervals_of(k: Tensor, packing: Optional[Packing], lengths: Lengths, window: Window, chunk: int) -> Pair:
    """Key intervals of a window whose bounds may be negative, of chunks, and of the rows and keys that count."""
    sequence = None
    if packing is None:
        key = torch.arange(k.shape[1], dtype=torch.int32, device=k.device)[None, None]
    else:
        sequence, local = places(k.shape[0], packing[1])
        key = local[None]
    rows, keys = _spread(lengths.rows, sequence), _spread(lengths.keys, sequence)
    shift = keys - rows
    start, end = torch.zeros_like(key + shift), rows + torch.zeros_like(key)
    left, right = (None if bound is None else max(-FAR, min(bound, FAR)) for bound in window)
    if right is not None:
        start = torch.maximum(start, key - shift - right)
    if left is not None:
        end = torch.minimum(end, key - shift + left + 1)
    if chunk > 0:
        first = key - key % chunk - shift
        start, end = torch.maximum(start, first), torch.minimum(end, first + chunk)
    return start, torch.where((key >= 0) & (key < keys), end, 0)


def chunks_of_rows(
    q: Tensor, offsets: Optional[Tensor], lengths: Lengths, chunk: int, first_keys: Optional[Tensor]
) -> Pair:
    """Row intervals, int32 [B|1, 1, 1, Sq], packed [1, 1, total_q]: a row sees keys of its own chunk. Chunks are counted
    from first_keys, int32 [B], on; None: from key 0."""
    before = torch.zeros_like(lengths.keys) if first_keys is None else first_keys
    shift = lengths.keys - before - lengths.rows
    if offsets is None:
        position = shift[:, None] + torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        before = before[:, None]
    else:
        sequence, row = places(q.shape[0], offsets)
        position, before = (shift[sequence] + row)[None], before[sequence][None]
    start = position - position % chunk + before
    start, end = start.to(torch.int32)[:, None, None], (start + chunk).to(torch.int32)[:, None, None]
    return (start, end) if offsets is None else (start[0], end[0])


def both(first: Optional[Pair], second: Optional[Pair]) -> Optional[Pair]:
    """The intervals of keys that are visible by both pairs."""
    if first is None or second is None:
        return first or second
    return torch.maximum(first[0], second[0]), torch.minimum(first[1], second[1])


# ---- ALiBi -----------------------------------------------------------------------------------------------------------


def slopes_of(alibi_slopes: Any, q: Tensor, batch: int) -> Tensor:
    """[B|1, H], float32, or float64 beside a float64 query."""
    heads = q.shape[-2]
    shape = tuple(getattr(alibi_slopes, "shape", ()))
    if shape not in ((heads,), (batch, heads)):
        raise InvalidArgument(f"alibi_slopes has shape {list(shape)}; it must be [{heads}] or [{batch}, {heads}]")
    slopes: Tensor = alibi_slopes.detach().to(torch.float64 if q.dtype is torch.float64 else torch.float32)
    return slopes if slopes.dim() == 2 else slopes[None]


def key_bias(slopes: Tensor, lengths: Lengths, seqlen_k: int) -> Tensor:
    """[B|1, H, 1, Sk]: slope * (j - last key). Where no key is to the right of its row this differs from ALiBi by one
    number a row, which changes lse alone; row_bias() is that number."""
    key = torch.arange(seqlen_k, device=slopes.device)
    away = (key - (lengths.keys[:, None] - 1)).to(slopes.dtype)
    return slopes[:, :, None, None] * away[:, None, None]


def row_bias(slopes: Tensor, lengths: Lengths, seqlen_q: int, packing: Optional[Packing]) -> Tensor:
    """[B|1, H, Sq], packed [H, total_q]: ALiBi less key_bias(), slope * (last row - i)."""
    if packing is None:
        row = torch.arange(seqlen_q, device=slopes.device)
        return slopes[:, :, None] * (lengths.rows[:, None] - 1 - row).to(slopes.dtype)[:, None]
    sequence, row = places(seqlen_q, packing[0])
    mine = slopes[sequence] if slopes.shape[0] > 1 else slopes
    return (mine * (lengths.rows[sequence] - 1 - row).to(slopes.dtype)[:, None]).transpose(0, 1)


def pair_bias(slopes: Tensor, lengths: Lengths, seqlen_q: int, seqlen_k: int) -> Tensor:
    """[B|1, H, Sq, Sk]: ALiBi, -slope * |distance|."""
    row = torch.arange(seqlen_q, device=slopes.device)[:, None] + (lengths.keys - lengths.rows)[:, None, None]
    away = (row - torch.arange(seqlen_k, device=slopes.device)).abs().to(slopes.dtype)
    return -slopes[:, :, None, None] * away[:, None]


def diagonal_bias(slopes: Tensor, lengths: Lengths, seqlen_q: int, seqlen_k: int) -> Tensor:
    """[B|1, H, Sq, Sk], a view of Sq + Sk numbers a head: ALiBi beside rows in reverse order. There the number depends
    on the sum of row and key alone."""
    middle = lengths.keys - lengths.rows + lengths.all_rows - 1
    place = torch.arange(max(seqlen_q + seqlen_k - 1, 1), device=slopes.device)
    away = (place - middle[:, None]).abs().to(slopes.dtype)
    numbers = (-slopes[:, :, None] * away[:, None]).contiguous()
    batch, heads, count = numbers.shape
    return numbers.as_strided((batch, heads, seqlen_q, seqlen_k), (heads * count, count, 1, 1))


# ---- rows in reverse order -------------------------------------------------------------------------------------------


def reversal(q: Tensor, packing: Optional[Packing]) -> Optional[Tensor]:
    """The row that takes each packed row's place; None for dense tensors, whose axis is flipped."""
    if packing is None:
        return None
    offsets = packing[0]
    sequence, row = places(q.shape[0], offsets)
    length = offsets.diff()[sequence]
    held = (row >= 0) & (row < length)
    place = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    return torch.where(held, place + length - 1 - 2 * row, place)


def reverse(rows: Tensor, index: Optional[Tensor], axis: int) -> Tensor:
    return rows.flip(axis) if index is None else rows.index_select(axis, index)


def reversed_intervals(pair: Pair, k: Tensor, packing: Optional[Packing], lengths: Lengths) -> Pair:
    """Key intervals of rows in reverse order."""
    sequence = None if packing is None else places(k.shape[0], packing[1])[0]
    rows = _spread(lengths.all_rows, sequence)
    start, end = (torch.minimum(each.clamp(min=0), rows) for each in pair)
    return rows - end, rows - start
