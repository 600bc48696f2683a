"""gemm() on PyTorch tensors: the operator flash_dmattn::gemm, and its gradient by two of the same products."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from . import _native
from ._arguments import check_layout
from ._operators import allocator_of, define, differentiate, is_plain, native_view, refuse_transforms, stream_of


def _new_out(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    shape = (a.shape[-2], b.shape[-1])
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty(shape)
    batch = a.shape[0] if a.dim() == 3 else 1
    return a.new_empty((b.shape[0] if batch == 1 and b.dim() == 3 else batch, *shape))


def _matrix(tensor: Optional[Tensor]) -> Any:
    """For the extension; a copy where neither rows nor columns are contiguous."""
    if tensor is None:
        return None
    unit = [extent <= 1 or stride == 1 for extent, stride in zip(tensor.shape[-2:], tensor.stride()[-2:])]
    return native_view(tensor if any(unit) else tensor.contiguous())


def _gemm(
    a: Tensor, b: Tensor, c: Optional[Tensor], alpha: float, beta: float, accumulate16: bool, kernel: Optional[str]
) -> Tensor:
    out = _new_out(a, b)
    views = (_matrix(each) for each in (a, b, c, out))
    _native.gemm(*views, alpha, beta, accumulate16, kernel, allocator_of(a), stream_of(a))
    return out


# ---- gradient --------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    a, b, c, ctx.alpha, ctx.beta, ctx.accumulate16, ctx.kernel = inputs
    ctx.c_shape = None if c is None else c.shape
    ctx.save_for_backward(a, b)


def _summed(grad: Tensor, shape: Any) -> Tensor:
    """Over batches that shared an operand."""
    if grad.dim() == 3 and (len(shape) == 2 or shape[0] == 1) and grad.shape[0] != 1:
        grad = grad.sum(0, keepdim=True)
    return grad.reshape(shape)


def _backward(ctx: Any, dout: Tensor) -> Tuple[Optional[Tensor], ...]:
    """dA = alpha dC B^T, dB = alpha A^T dC, dC = beta dC."""
    a, b = ctx.saved_tensors
    da = db = dc = None
    product = torch.ops.flash_dmattn.gemm
    settings = (ctx.alpha, 0.0, ctx.accumulate16, ctx.kernel)
    if ctx.needs_input_grad[0]:
        da = _summed(product(dout, b.mT, None, *settings), a.shape)
    if ctx.needs_input_grad[1]:
        db = _summed(product(a.mT, dout, None, *settings), b.shape)
    if ctx.c_shape is not None and ctx.needs_input_grad[2]:
        dc = _summed(ctx.beta * dout, ctx.c_shape)
    return (da, db, dc, *[None] * len(settings))


define(
    "gemm",
    "Tensor a, Tensor b, Tensor? c, float alpha, float beta, bool accumulate_float16, str? kernel",
    _gemm,
    _new_out,
)
differentiate("gemm", _backward, _save)


def gemm(
    a: Tensor, b: Any, c: Any, alpha: float, beta: float, accumulate_float16: bool, kernel: Optional[str]
) -> Tensor:
    """flash_dmattn.gemm() of tensors."""
    for tensor, name in ((a, "a"), (b, "b"), (c, "c")):
        if tensor is None and name == "c":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor, as a is")
        check_layout(tensor, name)
        if tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device}, but a is on {a.device}")
        if tensor.dim() not in (2, 3):
            raise ValueError(f"{name} has {tensor.dim()} axes; it needs 2, or 3 with a batch")
    refuse_transforms((a, b, c))
    run = _gemm if is_plain(a, b, c) else torch.ops.flash_dmattn.gemm
    return run(a, b, c, alpha, beta, accumulate_float16, kernel)
