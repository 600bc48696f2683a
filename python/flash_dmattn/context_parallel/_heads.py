"""The operands of a call by heads: what lies with rows or keys travels, and each rank keeps its heads of the rest."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch
from torch import Tensor

from ._engine import Operands
from ._gather import KEYS, OF_ROWS
from ._problem import Problem
from ._ulysses import Exchange, back_to_rows, own_heads, to_heads


def _moved_scores(scores: Optional[Tensor], kind: str, rows: Exchange, keys: Exchange) -> Optional[Tensor]:
    if scores is None:
        return None
    if kind in OF_ROWS:
        return to_heads(scores, rows, 2, 1)
    return to_heads(scores, keys, 3, 1) if kind == KEYS else own_heads(scores, 1, rows)


def moved_operands(problem: Problem, rows: Exchange, keys: Exchange) -> Operands:
    """All rows and keys of this rank's heads."""
    q, k, v, mask, bias, *_ = problem.operands
    sink = problem.operands.sink
    return Operands(
        to_heads(q, rows, 1, 2),
        to_heads(k, keys, 1, 2),
        to_heads(v, keys, 1, 2),
        _moved_scores(mask, problem.mask_kind, rows, keys),
        _moved_scores(bias, problem.bias_kind, rows, keys),
        sink=own_heads(sink, -1, rows),
    )


def _at_own_heads(gradient: Tensor, like: Tensor, axis: int, exchange: Exchange) -> Tensor:
    """Of what every rank has whole: zeros for the heads of others."""
    if like.shape[axis] == 1:
        return gradient
    whole = torch.zeros(like.shape, dtype=gradient.dtype, device=gradient.device)
    own_heads(whole, axis, exchange).copy_(gradient)
    return whole


def returned_gradients(
    problem: Problem, gradients: Sequence[Optional[Tensor]], rows: Exchange, keys: Exchange
) -> List[Optional[Tensor]]:
    """Gradients of moved operands, in the order of GRADIENTS, as those of the rank's own."""
    operands = problem.operands
    made: List[Optional[Tensor]] = []
    of_tokens: Any = ((operands.q, rows), (operands.k, keys), (operands.v, keys))
    for (tensor, exchange), gradient in zip(of_tokens, gradients):
        made.append(None if gradient is None else back_to_rows(gradient, exchange, 1, 2, tensor.shape[2] == 1))
    bias, sink = gradients[3:]
    if bias is not None and operands.bias is not None:
        shared = operands.bias.shape[1] == 1
        if problem.bias_kind in OF_ROWS:
            bias = back_to_rows(bias, rows, 2, 1, shared)
        elif problem.bias_kind == KEYS:
            bias = back_to_rows(bias, keys, 3, 1, shared)
        else:
            bias = _at_own_heads(bias, operands.bias, 1, rows)
    if sink is not None and operands.sink is not None:
        sink = _at_own_heads(sink, operands.sink, -1, rows)
    return [*made, bias, sink]
