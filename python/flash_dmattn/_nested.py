"""Jagged nested tensors as packed calls: their values are packed sequences, their offsets the cu_seqlens."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from . import _torch
from ._arguments import Settings


def _check(tensors: Tuple[Any, ...]) -> None:
    for tensor, name in zip(tensors, ("query", "key", "value")):
        if not (isinstance(tensor, Tensor) and tensor.is_nested and tensor.layout is torch.jagged):
            raise TypeError(f"{name} is not nested and jagged, but query is; give all three as such, or none")
        ragged = tensor._ragged_idx  # type: ignore[attr-defined]
        if tensor.dim() != 4 or ragged != 1:
            raise ValueError(
                f"{name} is a nested tensor of {tensor.dim()} axes, ragged along axis {ragged}; "
                "it must be [batch, seqlen, heads, head_dim], ragged along axis 1"
            )
        if tensor.lengths() is not None:  # type: ignore[attr-defined]
            raise ValueError(f"{name} is a nested tensor with gaps between its sequences; give {name}.contiguous()")
    if tensors[1].offsets() is not tensors[2].offsets():
        raise ValueError("key and value are nested tensors with offsets of their own; make both of one offsets tensor")


def _longest(nested: Any) -> int:
    """Of its sequences. Compiled code cannot look: where the tensor does not say it, the bound is there all rows."""
    known = nested._maybe_max_seqlen
    if known is None:
        known = nested.values().shape[0] if torch.compiler.is_compiling() else nested._get_max_seqlen()
    return known  # type: ignore[no-any-return]


def attend_jagged(
    tensors: Tuple[Any, ...],
    mask: Optional[Tensor],
    bias: Optional[Tensor],
    intervals: Tuple[Any, Any],
    sink: Optional[Tensor],
    rows: Tuple[Any, ...],
    settings: Settings,
    num_results: int,
) -> Any:
    """flash_dmattn_func() of query, key, value [B, ragged, H, D]: out like query, lse [B, H, ragged].

    Masks, biases and intervals are those of flash_dmattn_varlen_func.
    """
    _check(tensors)
    query, key, _ = tensors
    longest = _longest(query), _longest(key)
    offsets = query.offsets().to(torch.int32), key.offsets().to(torch.int32)
    packed = tuple(nested.values() for nested in tensors)
    settings = (*longest, *settings[2:])
    result = _torch.attend_packed(packed, mask, bias, intervals, offsets, sink, rows, settings, num_results)

    def nested_like_query(values: Tensor, ragged: int) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, query.offsets(), jagged_dim=ragged, max_seqlen=longest[0])

    if num_results == 1:
        return nested_like_query(result, 1)
    others = (each if each is None else nested_like_query(each, 2) for each in result[1:])
    return (nested_like_query(result[0], 1), *others)
