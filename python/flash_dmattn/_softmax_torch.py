"""softmax() on PyTorch tensors: the operators flash_dmattn::softmax and softmax_backward, and their gradients."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from . import _native
from ._arguments import check_layout
from ._operators import allocator_of, define, differentiate, is_plain, native_view, refuse_transforms, stream_of

_AXES = 4  # that the library takes


def _rows(tensor: Tensor) -> Tensor:
    """At most four axes, the last contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor if tensor.dim() <= _AXES else tensor.flatten(0, tensor.dim() - _AXES)


def _mask_rows(mask: Tensor, x: Tensor) -> Tensor:
    """The axes of _rows(x), of the same extents or 1."""
    mask = mask[(None,) * (x.dim() - mask.dim())]
    first = x.dim() - _AXES + 1
    if first > 1 and any(extent > 1 for extent in mask.shape[:first]):
        mask = mask.expand(*x.shape[:first], *mask.shape[first:])
    return mask if first <= 1 else mask.flatten(0, first - 1)


def _run(backward: bool, tensors: Tuple[Optional[Tensor], ...], scale: float, log: bool, kernel: Optional[str]) -> None:
    first = next(each for each in tensors if each is not None)
    _native.softmax(*map(native_view, tensors), backward, scale, log, kernel, allocator_of(first), stream_of(first))


def _softmax(x: Tensor, mask: Optional[Tensor], scale: float, log: bool, kernel: Optional[str]) -> Tensor:
    out = x.new_empty(x.shape)
    hidden = None if mask is None else _mask_rows(mask, x)
    _run(False, (_rows(x), hidden, _rows(out), None, None), scale, log, kernel)
    return out


def _softmax_backward(out: Tensor, dout: Tensor, scale: float, log: bool, kernel: Optional[str]) -> Tensor:
    dx = out.new_empty(out.shape)
    _run(True, (None, None, _rows(out), _rows(dout), _rows(dx)), scale, log, kernel)
    return dx


def _like_first(first: Tensor, *others: Any) -> Tensor:
    return first.new_empty(first.shape)


# ---- gradients -------------------------------------------------------------------------------------------------------

# The ladder's naive rung has no backward.
_FORWARD_ONLY = ("softmax.naive",)


def _save(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.scale, ctx.log, kernel = inputs
    ctx.kernel = None if kernel in _FORWARD_ONLY else kernel
    ctx.save_for_backward(output)


def _backward(ctx: Any, dout: Tensor) -> Tuple[Optional[Tensor], ...]:
    (out,) = ctx.saved_tensors
    return torch.ops.flash_dmattn.softmax_backward(out, dout, ctx.scale, ctx.log, ctx.kernel), None, None, None, None


def _save_backward(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    out, dout, ctx.scale, ctx.log, ctx.kernel = inputs
    ctx.save_for_backward(out, dout)


def _double_backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
    """Of dx = scale out (dout - sum(out dout)), or scale (dout - exp(out) sum(dout)), by out and by dout."""
    out, dout = ctx.saved_tensors
    wide, flow, g = out.float(), dout.float(), grad.float()
    if ctx.log:
        hidden = wide == -torch.inf
        flow, g = flow.masked_fill(hidden, 0.0), g.masked_fill(hidden, 0.0)
        share = wide.exp()
        by_out = -ctx.scale * share * flow.sum(-1, keepdim=True) * g
        by_dout = ctx.scale * (g - (share * g).sum(-1, keepdim=True)).masked_fill(hidden, 0.0)
    else:
        weighed = (wide * g).sum(-1, keepdim=True)
        by_out = ctx.scale * (g * (flow - (wide * flow).sum(-1, keepdim=True)) - flow * weighed)
        by_dout = ctx.scale * wide * (g - weighed)
    return by_out.to(out.dtype), by_dout.to(dout.dtype), None, None, None


_SETTINGS = "float scale, bool log, str? kernel"
define("softmax", f"Tensor x, Tensor? mask, {_SETTINGS}", _softmax, _like_first)
define("softmax_backward", f"Tensor out, Tensor dout, {_SETTINGS}", _softmax_backward, _like_first)
differentiate("softmax", _backward, _save)
differentiate("softmax_backward", _double_backward, _save_backward)


def softmax(x: Tensor, mask: Any, scale: float, log: bool, kernel: Optional[str]) -> Tensor:
    """flash_dmattn.softmax() of a tensor."""
    check_layout(x, "x")
    if x.dim() == 0:
        raise ValueError("x has 0 axes; softmax is along the last one")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask is a {type(mask).__name__}; it must be a torch.Tensor, as x is")
        check_layout(mask, "mask")
        if mask.device != x.device:
            raise ValueError(f"mask is on {mask.device}, but x is on {x.device}")
        if mask.dim() > x.dim():
            raise ValueError(f"mask has {mask.dim()} axes, but x has {x.dim()}")
    refuse_transforms((x, mask))
    run = _softmax if is_plain(x, mask) else torch.ops.flash_dmattn.softmax
    return run(x, mask, scale, log, kernel)
