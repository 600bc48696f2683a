"""How DTensors shard the operators of attention: over batch, over heads, or not. Imported when the first one comes.

A rank attends to its own sequences or heads, and nothing is exchanged. A mask, bias or pair of intervals that all
sequences or heads share stays whole on every rank; the gradient of such a bias is the sum over the ranks.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, List, Tuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

WHOLE, BATCH, HEADS = -1, 0, 1
_NUM_INPUTS = 9

Ways = List[Tuple[List[Any], List[Any]]]


def _tokens(way: int) -> Any:
    """Of q, k, v, out [B, S, H, D] and their gradients."""
    return Replicate() if way == WHOLE else Shard(0 if way == BATCH else 2)


def _rows(way: int) -> Any:
    """Of lse [B, H, Sq] and its kin."""
    return Replicate() if way == WHOLE else Shard(way)


def _scores(spec: Any, way: int) -> Any:
    """Of a mask, bias or interval, [B|1, h, ..]."""
    return Replicate() if way == WHOLE or spec.shape[way] == 1 else Shard(way)


def _inputs(specs: Tuple[Any, ...], way: int) -> List[Any]:
    """Of q, k, v, mask, bias, start, end, cu_seqlens_q, cu_seqlens_k."""
    scores = [spec and _scores(spec, way) for spec in specs[3:7]]
    return [_tokens(way)] * 3 + scores + [spec and Replicate() for spec in specs[7:_NUM_INPUTS]]


def _ways(specs: Tuple[Any, ...]) -> List[int]:
    """The ways along one axis of the mesh. PyTorch combines them along all, so heads need to divide by every product
    of its extents that they are not fewer than: a rank must have whole groups of query heads."""
    if specs[7] is not None or specs[8] is not None:
        return [WHOLE]  # sequences of packed tensors lie anywhere
    extents, heads_kv = specs[0].mesh.shape, specs[1].shape[2]
    chosen = (each for count in range(1, len(extents) + 1) for each in itertools.combinations(extents, count))
    divide = all(heads_kv % parts == 0 for parts in map(math.prod, chosen) if parts <= heads_kv)
    return [WHOLE, BATCH, HEADS] if divide else [WHOLE, BATCH]


def _forward(num_outputs: int) -> Any:
    def shard(*specs: Any) -> Ways:
        rest = [None] * (len(specs) - _NUM_INPUTS)
        return [([_tokens(way), *[_rows(way)] * (num_outputs - 1)], _inputs(specs, way) + rest) for way in _ways(specs)]

    return shard


def _backward(*specs: Any) -> Ways:
    dout, dlse, lse_low = specs[11], specs[12], specs[25] if len(specs) > 25 else None
    ways: Ways = []
    for way in _ways(specs):
        bias = specs[4]
        shared = bias is not None and _scores(bias, way) == Replicate()
        dbias = Partial() if shared and way != WHOLE else _rows(way) if bias is not None else Replicate()
        given = [_tokens(way), _rows(way), dout and _tokens(way), dlse and _rows(way)]
        rest = [None] * 12 + [lse_low and _rows(way)] + [None] * (len(specs) - 26)
        ways.append(([_tokens(way)] * 3 + [dbias], _inputs(specs, way) + given + rest[: len(specs) - 13]))
    return ways


_operators = torch.ops.flash_dmattn
register_sharding(_operators.forward.default)(_forward(2))
register_sharding(_operators.forward_beside_bias.default)(_forward(3))
register_sharding(_operators.backward.default)(_backward)
