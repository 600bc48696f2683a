"""Scores of scale * (q k + qv v) over a key-value cache: both products are one over head dims that lie side by side."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from .. import append_kv_cache
from . import _rules
from ._refusals import InvalidArgument
from ._rotary import rotated_at


def append_first(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor,
    rotary: Optional[Tuple[Tensor, Tensor]], moves: bool, cu_seqlens_q: Optional[Tensor], cu_seqlens_k_new: Optional[Tensor], options: Dict[str, Any],
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """Writes k and v behind `lengths`; returns the rotated q and the new lengths. moves: row i of q is rotated by the
    position of new key i, else every row by that of the first new key."""
    first = options.pop("rotary_seqlens", None)
    interleaved = options.pop("rotary_interleaved", False)
    append_kv_cache(
        k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=options.get("block_table"),
        cache_batch_idx=options.get("cache_batch_idx"), cu_seqlens_new=cu_seqlens_k_new, rotary=rotary,
        rotary_interleaved=interleaved, rotary_seqlens=first,
    )  # fmt: skip
    if rotary is not None:
        first = lengths if first is None else first
        if cu_seqlens_q is None:
            positions = first[:, None] + torch.arange(q.shape[1], device=q.device) * int(moves)
        else:
            sequence, row = _rules.places(q.shape[0], cu_seqlens_q)
            positions = first[sequence] + row * int(moves)
        q = rotated_at(q, *rotary, interleaved, positions)
    new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    return q, torch.where(lengths < 0, lengths, lengths + new).to(torch.int32)


def joined(q: Tensor, qv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Query and key of D + Dv dimensions, and the value.

    The key is a view where key and value of each row are neighbours in memory, as in a latent cache. Any other cache is
    copied whole, and the first columns of the copy are the value.
    """
    want = (*q.shape[:-1], v_cache.shape[-1])
    if qv.shape != want:
        raise InvalidArgument(f"qv has shape {list(qv.shape)}; it must be {list(want)}, as q but of v_cache's head dim")
    if _follows(k_cache, v_cache):
        return torch.cat((q, qv), -1), _widened(k_cache, v_cache.shape[-1]), v_cache
    if _follows(v_cache, k_cache):
        return torch.cat((qv, q), -1), _widened(v_cache, k_cache.shape[-1]), v_cache
    both = torch.cat((v_cache, k_cache), -1)
    return torch.cat((qv, q), -1), both, both[..., : v_cache.shape[-1]]


def _follows(first: Tensor, second: Tensor) -> bool:
    """Whether each row of `second` begins where that of `first` ends."""
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.dtype is second.dtype
        and first.shape[:-1] == second.shape[:-1]
        and first.stride() == second.stride()
        and first.stride(-1) == 1
        and first.storage_offset() + first.shape[-1] == second.storage_offset()
    )


def _widened(first: Tensor, more: int) -> Tensor:
    return first.as_strided((*first.shape[:-1], first.shape[-1] + more), first.stride(), first.storage_offset())
