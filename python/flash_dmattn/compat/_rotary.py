"""Rotary embedding of rows at given positions, in torch operations with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ._refusals import InvalidArgument


def rotated_at(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """A new tensor: x [..., H, D] rotated by the rows `positions` [...] of cos and sin [rows, R / 2].

    A position outside of the tables takes their first or last row. Products are float32 (float64 for float64) and
    rounded once.
    """
    width = 2 * cos.shape[-1]
    if width > x.shape[-1] or cos.shape != sin.shape:
        raise InvalidArgument(
            f"cos has shape {list(cos.shape)} and sin {list(sin.shape)}; both must be [rows, at most {x.shape[-1] // 2}]"
        )
    positions = positions.clamp(min=0, max=max(cos.shape[0] - 1, 0))
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions][..., None, :].to(wide) for table in (cos, sin))
    turned, kept = x[..., :width].to(wide), x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        rotated = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((rotated.to(x.dtype), kept), dim=-1)
