"""softmax() on PyTorch tensors: the operators flash_dmattn::softmax and softmax_backward, and their gradients."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _native, _torch
from ._arguments import check_layout

_library = torch.library.Library("flash_dmattn", "FRAGMENT")
_library.define(
    "softmax(Tensor x, Tensor? mask, float scale, bool log, str? kernel) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "softmax_backward(Tensor out, Tensor dout, float scale, bool log, str? kernel) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_AXES = 4  # that the library takes


def allocator_of(tensor: Tensor) -> Callable[[int], Tuple[int, Tensor]]:
    """Workspace beside a tensor, as the extension asks for it."""

    def allocate(num_bytes: int) -> Tuple[int, Tensor]:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
        return memory.data_ptr(), memory

    return allocate


def stream_of(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0


def is_plain(*tensors: Optional[Tensor]) -> bool:
    """Whether the dispatcher would add nothing but its time: eager mode, no subclass, mode, transform or gradient."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
        or any(each is not None and type(each) not in (Tensor, torch.nn.Parameter) for each in tensors)
        or (torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors))
    )


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
    views = (None if each is None else _torch.native_view(each) for each in tensors)
    _native.softmax(backward, *views, scale, log, kernel, stream_of(first), allocator_of(first))


@torch.library.impl(_library, "softmax", "CUDA")
@torch.library.impl(_library, "softmax", "CPU")
def _softmax(x: Tensor, mask: Optional[Tensor], scale: float, log: bool, kernel: Optional[str]) -> Tensor:
    out = x.new_empty(x.shape)
    hidden = None if mask is None else _mask_rows(mask, x)
    _run(False, (_rows(x), hidden, _rows(out), None, None), scale, log, kernel)
    return out


@torch.library.impl(_library, "softmax_backward", "CUDA")
@torch.library.impl(_library, "softmax_backward", "CPU")
def _softmax_backward(out: Tensor, dout: Tensor, scale: float, log: bool, kernel: Optional[str]) -> Tensor:
    dx = out.new_empty(out.shape)
    _run(True, (None, None, _rows(out), _rows(dout), _rows(dx)), scale, log, kernel)
    return dx


@torch.library.register_fake("flash_dmattn::softmax", lib=_library)
def _softmax_fake(x: Tensor, mask: Optional[Tensor], scale: float, log: bool, kernel: Optional[str]) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("flash_dmattn::softmax_backward", lib=_library)
def _softmax_backward_fake(out: Tensor, dout: Tensor, scale: float, log: bool, kernel: Optional[str]) -> Tensor:
    return out.new_empty(out.shape)


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


torch.library.register_autograd("flash_dmattn::softmax", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd(
    "flash_dmattn::softmax_backward", _double_backward, setup_context=_save_backward, lib=_library
)
torch.library.register_vmap("flash_dmattn::softmax", _torch.refuse_vmap, lib=_library)
torch.library.register_vmap("flash_dmattn::softmax_backward", _torch.refuse_vmap, lib=_library)


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
    _torch.refuse_transforms((x, mask))
    run = _softmax if is_plain(x, mask) else torch.ops.flash_dmattn.softmax
    return run(x, mask, scale, log, kernel)
