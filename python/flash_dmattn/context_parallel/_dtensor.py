"""DTensors as arguments of a context-parallel call: their local parts go in, and results come back placed alike."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import said
from ._problem import Given

# Where axes of query [B, Sq, H, D] or [total, H, D] are in lse.
_LSE_AXES = {4: {0: 0, 1: 2, 2: 1}, 3: {0: 1, 1: 0}}
_TOKENS = ("query", "key", "value")
_Restore = Callable[[Any], Any]


def has_dtensors(given: Given) -> bool:
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(each, module.DTensor) for each in given)


def to_local(given: Given, group: Any) -> Tuple[Given, _Restore]:
    """The rank's parts, and what makes DTensors of results. Rows lie along the mesh's axes that make up `group`."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    query: Any = given.query
    for name in _TOKENS:
        each = getattr(given, name)
        if not isinstance(each, DTensor):
            raise TypeError(f"{name} is {said(each)} beside DTensors; query, key and value are DTensors, or none is")
        if each.device_mesh != query.device_mesh or each.placements != query.placements:
            raise ValueError(f"{name} is placed as {each.placements}; query, which is placed as {query.placements}, and it are alike")
    rows = query.dim() - 3
    for placement in query.placements:
        if type(placement) not in (Shard, Replicate):
            raise ValueError(f"query is placed as {query.placements}; it must be Shard or Replicate along each axis of the mesh")
    _check_rows(query, [type(each) is Shard and each.dim == rows for each in query.placements], group)

    def local(name: str, each: Any) -> Any:
        if not isinstance(each, DTensor) or name in _TOKENS:
            return each.to_local() if isinstance(each, DTensor) else each
        if each.device_mesh != query.device_mesh:
            raise ValueError(f"{name} is on another mesh than query")
        # Where query is cut and this is not, a rank has its own part of the gradient.
        cut = [type(mine) is Replicate and type(its) is Shard for mine, its in zip(each.placements, query.placements)]
        flows = [Partial() if apart else mine for mine, apart in zip(each.placements, cut)]
        return each.to_local(grad_placements=flows)

    def pair(name: str, each: Any) -> Any:
        return tuple(local(name, one) for one in each) if isinstance(each, tuple) and len(each) == 2 else local(name, each)

    made = Given(*(pair(name, each) for name, each in zip(Given._fields, given)))
    shape = (*query.shape[:-1], given.value.shape[-1])
    axes = _LSE_AXES.get(query.dim(), {})
    lse_shape = [0] * len(axes)
    for axis, at in axes.items():
        lse_shape[at] = query.shape[axis]
    lse_placements = [Shard(axes[each.dim]) if type(each) is Shard else each for each in query.placements]

    def placed(part: Any, extents: Sequence[int], placements: Any) -> Any:
        strides = tuple(math.prod(extents[axis + 1 :]) for axis in range(len(extents)))
        return DTensor.from_local(
            part, query.device_mesh, placements, run_check=False, shape=torch.Size(extents), stride=strides
        )

    def restore(results: Any) -> Any:
        if isinstance(results, Tensor):
            return placed(results, shape, query.placements)
        out, *others = results
        numbers = (None if each is None else placed(each, lse_shape, lse_placements) for each in others)
        return placed(out, shape, query.placements), *numbers

    return made, restore


def _check_rows(query: Any, along: List[bool], group: Any) -> None:
    """The ranks along the mesh's axes that cut rows are those of the group, in its order."""
    mesh = query.device_mesh
    coordinate = mesh.get_coordinate()
    place = tuple(slice(None) if cuts else at for cuts, at in zip(along, coordinate))
    members = mesh.mesh[place].flatten().tolist()
    wanted = dist.get_process_group_ranks(group)
    if members != wanted:
        raise ValueError(
            f"query is placed as {query.placements}, by which its rows lie on ranks {members}; this ContextParallel has "
            f"ranks {wanted}"
        )
