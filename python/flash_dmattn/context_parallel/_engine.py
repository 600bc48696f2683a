"""Attention on views of tensors, into views of tensors: one call of the library, without autograd."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import _arguments, _native
from .._fields import INPUTS, POSITION, SETTING, SOURCES, TENSORS
from .._operators import allocator_of, native_view, stream_of

Settings = Tuple[Any, ...]


class Operands(NamedTuple):
    """The tensors of a call, in the order of the extension. q: [B, Sq, H, D]; k, v: [B, Sk, Hkv, D|Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Optional[Tensor] = None
    bias: Optional[Tensor] = None
    interval_start: Optional[Tensor] = None
    interval_end: Optional[Tensor] = None
    cu_seqlens_q: Optional[Tensor] = None
    cu_seqlens_k: Optional[Tensor] = None
    sink: Optional[Tensor] = None
    row_start: Optional[Tensor] = None
    row_end: Optional[Tensor] = None
    block_mask: Optional[Tensor] = None


assert Operands._fields == tuple(field.name for field in INPUTS)
_RESULTS = ("out", "lse", "lse_low")


def changed(settings: Settings, **values: Any) -> Settings:
    """The settings of a call with other numbers."""
    numbers = list(settings)
    for name, value in values.items():
        numbers[SETTING[name]] = value
    return tuple(numbers)


def _run(
    function: Any,
    tensors: Sequence[Optional[Tensor]],
    q: Tensor,
    settings: Settings,
    kernel: Any,
    add: bool,
    sm_margin: int,
) -> None:
    where: Tuple[Any, ...] = (stream_of(q), allocator_of(q), sm_margin) if q.is_cuda else ()
    threads = 0 if q.is_cuda else torch.get_num_threads()
    views = [*map(native_view, tensors)]
    if kernel is not None and _arguments.forced_family is None:
        try:
            function(*views, *settings, threads, None, kernel, add, *where)
            return
        except NotImplementedError:  # the call is too small for the whole problem's kernel, say
            pass
    function(*views, *settings, threads, _arguments.forced_family, None, add, *where)


def forward(
    operands: Operands,
    results: Sequence[Optional[Tensor]],
    settings: Settings,
    kernel: Optional[str] = None,
    sm_margin: int = 0,
) -> None:
    """results: out, lse, lse_low, written; lse_low may be None. kernel: the choice code to run where it can. sm_margin:
    multiprocessors of a CUDA device that are left to others."""
    _run(_native.forward, (*operands, *results), operands.q, settings, kernel, False, sm_margin)


def backward(
    operands: Operands,
    results: Sequence[Optional[Tensor]],
    flowing: Sequence[Optional[Tensor]],
    gradients: Sequence[Optional[Tensor]],
    settings: Settings,
    kernel: Optional[str] = None,
    add: bool = False,
    sm_margin: int = 0,
) -> None:
    """flowing: dout and dlse; gradients: of q, k, v, bias and sink, written, each None where it is not wanted. add:
    those of k and v are added to what is there, which is float32 or float64."""
    _run(_native.backward, (*operands, *results, *flowing, *gradients), operands.q, settings, kernel, add, sm_margin)


GRADIENTS = tuple(INPUTS[source].name for source in SOURCES)
assert len(TENSORS) == len(INPUTS) + len(_RESULTS) + 2 + len(GRADIENTS) and POSITION["out"] == len(INPUTS)


def heads_of(tensor: Optional[Tensor], axis: int, heads: Tuple[int, int], heads_kv: int) -> Optional[Tensor]:
    """What belongs to a range of KV heads, of a tensor with 1, Hkv or H heads on an axis."""
    if tensor is None or tensor.shape[axis] == 1:
        return tensor
    group = tensor.shape[axis] // heads_kv
    return tensor.narrow(axis, heads[0] * group, (heads[1] - heads[0]) * group)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def new_results(q: Tensor, v: Tensor, has_bias: bool) -> List[Optional[Tensor]]:
    """out [B, Sq, H, Dv], lse and, beside a bias, lse_low [B, H, Sq]."""
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[-1]))
    lse = q.new_empty((batch, heads, rows), dtype=lse_dtype(q))
    return [out, lse, torch.empty_like(lse) if has_bias else None]
