"""engine_truth.py: the attention that an engine's step asks for, request by request, in float64."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = True,
    window: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
) -> Tensor:
    """One request: q [Sq, H, D] are its last rows, k and v [Sk, Hkv, D]. Rows that see nothing are 0."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)[None]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        seen &= key <= row
    if window[0] >= 0:
        seen &= key >= row - window[0]
    if window[1] >= 0:
        seen &= key <= row + window[1]
    weights = torch.where(seen, scores, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, rows, 1)
        weights = torch.cat([weights, column], -1)
    weights = torch.softmax(weights, -1).nan_to_num()[..., :keys]
    return torch.einsum("hij,jhd->ihd", weights, v)


def close(found: Tensor, expected: Tensor, dtype: Any) -> None:
    """Every element within the dtype's rounding of the largest expected one; NaN fails."""
    allowed = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    size = expected.abs().amax().clamp(min=1.0) if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected, atol=float(allowed * size), rtol=0.0)
