"""The process groups along which keys and heads travel."""

from __future__ import annotations

from typing import Any, Tuple

import torch.distributed as dist


def groups_of(group_or_mesh: Any) -> Tuple[Any, Any, Any]:
    """The group of all ranks, that of heads or None, that of keys or None."""
    dimensions = getattr(group_or_mesh, "ndim", None)
    if dimensions is None:
        group = dist.group.WORLD if group_or_mesh is None else group_or_mesh
        return group, None, group
    mesh = group_or_mesh
    if dimensions == 1:
        return mesh.get_group(), None, mesh.get_group()
    if dimensions != 2:
        raise ValueError(f"the mesh has {dimensions} dimensions; it has one, or two: heads, then keys")
    flat = mesh._flatten() if hasattr(mesh, "_flatten") else None
    if flat is None:
        raise NotImplementedError("a mesh of two dimensions needs a PyTorch whose DeviceMesh can be flattened")
    heads, keys = mesh.get_group(0), mesh.get_group(1)
    return flat.get_group(), heads if mesh.size(0) > 1 else None, keys
