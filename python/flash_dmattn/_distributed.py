"""How DTensors shard the operators of attention: over batch, over heads, or not. Imported when the first one comes.

A rank attends to its own sequences or heads, and nothing is exchanged. A mask, bias or pair of intervals that all
sequences or heads share stays whole on every rank; the gradient of such a bias is the sum over the ranks.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ._fields import BACKWARD, FORWARD, INPUTS, POSITION, RESULTS, SOURCES, Signature

WHOLE, BATCH, HEADS = -1, 0, 1

Ways = List[Tuple[List[Any], List[Any]]]


def _placed(axes: Optional[str], spec: Any, way: int) -> Any:
    """Of a tensor whose axes native_fields.h names so; None where there is no tensor."""
    if axes is None or spec is None:
        return None
    if way == WHOLE or axes == "offsets":
        return Replicate()
    if axes == "heads":  # [H] or [n, H]
        return Shard(len(spec.shape) - 1) if way == HEADS else Replicate()
    if axes == "tokens":  # [B, S, H, D]
        return Shard(0 if way == BATCH else 2)
    return Replicate() if axes != "rows" and spec.shape[way] == 1 else Shard(way)  # [B|1, h, ..], or [B, H, Sq]


def _arguments(signature: Signature, specs: Sequence[Any], way: int) -> List[Any]:
    return [_placed(axes, spec, way) for axes, spec in zip(signature.axes, specs)]


def _ways(specs: Tuple[Any, ...]) -> List[int]:
    """The ways along one axis of the mesh. PyTorch combines them along all, so heads need to divide by every product
    of its extents that they are not fewer than: a rank must have whole groups of query heads."""
    if any(spec is not None for field, spec in zip(INPUTS, specs) if field.axes == "offsets"):
        return [WHOLE]  # sequences of packed tensors lie anywhere
    extents, heads_kv = specs[POSITION["q"]].mesh.shape, specs[POSITION["k"]].shape[2]
    chosen = (each for count in range(1, len(extents) + 1) for each in itertools.combinations(extents, count))
    divide = all(heads_kv % parts == 0 for parts in map(math.prod, chosen) if parts <= heads_kv)
    return [WHOLE, BATCH, HEADS] if divide else [WHOLE, BATCH]


def _forward(num_results: int) -> Any:
    def shard(*specs: Any) -> Ways:
        results = RESULTS[:num_results]
        return [
            ([_placed(field.axes, specs[0], way) for field in results], _arguments(FORWARD, specs, way))
            for way in _ways(specs)
        ]

    return shard


def _gradient(placed: Any, way: int) -> Any:
    """Of an input: one that all ranks share, a bias, gets the sum of theirs. Of none, an empty tensor."""
    return Replicate() if placed is None else Partial() if way != WHOLE and placed == Replicate() else placed


def _backward(*specs: Any) -> Ways:
    ways = [(way, _arguments(BACKWARD, specs, way)) for way in _ways(specs)]
    return [([_gradient(arguments[source], way) for source in SOURCES], arguments) for way, arguments in ways]


_operators = torch.ops.flash_dmattn
register_sharding(_operators.forward.default)(_forward(2))
register_sharding(_operators.forward_beside_bias.default)(_forward(3))
register_sharding(_operators.backward.default)(_backward)
