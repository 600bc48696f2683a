"""What torch.utils.flop_counter.FlopCounterMode counts for the operators: matrix products, a causal mask as a half."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ._fields import BACKWARD, FORWARD, POSITION, SETTING

BACKWARD_PASSES = 2.5  # forward passes: five products of the forward's two


def _lengths(offsets: Tensor, longest: int) -> Sequence[int]:
    """Of packed sequences; as long as they may be where the offsets cannot be read."""
    if type(offsets) is Tensor and not offsets.is_meta:
        return offsets.diff().tolist()
    return [longest] * (offsets.shape[0] - 1)


def _pairs(q: Tensor, k: Tensor, offsets: Tuple[Optional[Tensor], Optional[Tensor]], longest: Tuple[int, int]) -> int:
    """Rows times keys of all sequences."""
    if offsets[0] is None or offsets[1] is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    return sum(rows * keys for rows, keys in zip(_lengths(offsets[0], longest[0]), _lengths(offsets[1], longest[1])))


def _attention(inputs: Sequence[Any], settings: Sequence[Any]) -> int:
    q, k, v, *offsets = (inputs[POSITION[name]] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    pairs = _pairs(q, k, (offsets[0], offsets[1]), (settings[SETTING["max_seqlen_q"]], settings[SETTING["max_seqlen_k"]]))
    flops: int = 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])
    return flops // 2 if settings[SETTING["causal"]] else flops


_operators = torch.ops.flash_dmattn


@register_flop_formula([_operators.forward, _operators.forward_beside_bias], get_raw=True)
def _forward(*arguments: Any, out_val: Any = None, **keywords: Any) -> int:
    inputs, settings, _ = FORWARD.split(arguments)
    return _attention(inputs, settings)


@register_flop_formula(_operators.backward, get_raw=True)
def _backward(*arguments: Any, out_val: Any = None, **keywords: Any) -> int:
    inputs, _, _, _, settings, *_ = BACKWARD.split(arguments)
    return int(BACKWARD_PASSES * _attention(inputs, settings))


@register_flop_formula(_operators.gemm, get_raw=True)
def _gemm(a: Tensor, b: Tensor, *arguments: Any, out_val: Tensor, **keywords: Any) -> int:
    return 2 * out_val.numel() * a.shape[-1]
