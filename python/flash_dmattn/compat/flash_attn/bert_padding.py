"""flash_attn.bert_padding: padded rows into packed ones and back, in torch operations with gradients."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input` [n, ...] at int64 `indices`."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with `values` at int64 `indices`, 0 elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> Tuple[Tensor, Tensor]:
    """The rows at `indices`, and `input`, through which a gradient flows as well."""
    return index_first_axis(input, indices), input.view_as(input)


def _offsets(lengths: Tensor) -> Tensor:
    """int32 [n + 1]: the sums of int32 lengths, from 0 on."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max().item()) if lengths.numel() else 0


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of hidden_states [B, S, ...] that attention_mask or unused_mask [B, S], bool or 0 and 1, has.

    Returns (rows [total, ...], their int64 indices among B * S, cu_seqlens int32 [B + 1], the longest length as an int,
    how many rows of each sequence attention_mask has, int32 [B]).
    """
    held = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = held.sum(dim=-1, dtype=torch.int32)
    indices = held.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _offsets(lengths), _longest(lengths), attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> Tuple[Tensor, Tensor, Tensor, int]:
    """Packs hidden_states [B, S, ...] whose rows hold several sequences: attention_mask_in_length [B, S] lists their
    lengths, 0 behind the last.

    Returns (rows [total, ...], their int64 indices among B * S, cu_seqlens int32, the longest length as an int).
    """
    place = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    indices = (place < attention_mask_in_length.sum(dim=-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0].to(torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _offsets(lengths), _longest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """[batch, seqlen, ...] with rows [total, ...] at `indices` among batch * seqlen, 0 elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])
