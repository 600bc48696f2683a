"""flash_attn.layers.rotary: rotary embedding in torch operations with gradients."""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ..._refusals import InvalidArgument
from ..._rotary import rotated_at
from ..._rules import places


def _positions(x: Tensor, offsets: Union[int, Tensor], cu_seqlens: Optional[Tensor]) -> Tensor:
    """The row of the tables for each row of x: [S] or [B, S] of [B, S, H, D], [total] of packed [total, H, D]."""
    if cu_seqlens is None:
        row = torch.arange(x.shape[1], device=x.device)
        return row + offsets[:, None] if isinstance(offsets, Tensor) else row + offsets
    sequence, row = places(x.shape[0], cu_seqlens)
    return row + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, offsets: Union[int, Tensor], cu_seqlens: Optional[Tensor]
) -> Tensor:
    return rotated_at(x, cos, sin, interleaved, _positions(x, offsets, cu_seqlens))


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Union[int, Tensor] = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
) -> Tensor:
    """x [B, S, H, D], or packed [total, H, D] with cu_seqlens int32 [B + 1], rotated by cos, sin [rows, R / 2].

    Dimensions from R on stay. interleaved pairs dimensions (2t, 2t + 1), else (t, t + R / 2). Row i of sequence b takes
    row seqlen_offsets[b] + i of the tables, the last one past their end. inplace: x is written and returned.
    """
    rotated = _rotate(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def _query_and_key(qkv: Tensor, num_heads_q: Optional[int]) -> Tuple[Tensor, Tensor]:
    """Views of [B, S, 3, H, D], or of [B, S, H + 2 Hkv, D] with num_heads_q = H."""
    if qkv.dim() == 5:
        return qkv[:, :, 0], qkv[:, :, 1]
    if num_heads_q is None:
        raise InvalidArgument("num_heads_q is None, but qkv has 4 axes: say how many heads the query has")
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : (num_heads_q + qkv.shape[2]) // 2]


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Optional[Tensor] = None,
    sin_k: Optional[Tensor] = None,
    interleaved: bool = False,
    seqlen_offsets: Union[int, Tensor] = 0,
    num_heads_q: Optional[int] = None,
) -> Tensor:
    """qkv with query and key rotated in place: [B, S, 3, H, D], or [B, S, H + 2 Hkv, D] with num_heads_q = H."""
    q, k = _query_and_key(qkv, num_heads_q)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(
        k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets
    )
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Union[int, Tensor] = 0
) -> Tensor:
    """kv [B, S, 2, Hkv, D] with the key rotated in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv
