"""Operators of torch.library: their definition, their refusals, and tensors as the extension takes them."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

NO_SECOND_ORDER = "flash_dmattn has no second derivative: its backward pass cannot be differentiated again"
NO_VMAP = "flash_dmattn cannot run under vmap: put the mapped axis into the batch instead"
NO_FUNCTORCH = "flash_dmattn does not run under torch.func transforms: use torch.autograd.grad or backward()"
NO_FORWARD_MODE = "flash_dmattn has no forward-mode derivative: use reverse mode (backward)"

_library = torch.library.Library("flash_dmattn", "DEF")


# ---- definitions -----------------------------------------------------------------------------------------------------


def define(
    name: str,
    arguments: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    returns: str = "Tensor",
    keys: Sequence[str] = ("CPU", "CUDA"),
) -> None:
    """Defines flash_dmattn::name(arguments) -> returns; fake makes outputs of the same shapes and dtypes as run."""
    _library.define(f"{name}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in keys:
        torch.library.impl(_library, name, key)(run)
    torch.library.register_fake(f"flash_dmattn::{name}", fake, lib=_library)


def differentiate(name: str, backward: Callable[..., Any], save: Optional[Callable[..., Any]] = None) -> None:
    """Registers an operator's gradient, and that it refuses vmap."""
    torch.library.register_autograd(f"flash_dmattn::{name}", backward, setup_context=save, lib=_library)
    torch.library.register_vmap(f"flash_dmattn::{name}", _refuse_vmap, lib=_library)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse_second_order(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(NO_SECOND_ORDER)


def _refuse_vmap(*arguments: Any) -> Any:
    raise RuntimeError(NO_VMAP)


def refuse_transforms(tensors: Sequence[Any]) -> None:
    """vmap, forward mode and torch.func end here, with one sentence; compiled code meets them in the operators."""
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
        for interpreter in functorch.get_interpreter_stack():
            if interpreter.key() == functorch.TransformType.Vmap:
                raise RuntimeError(NO_VMAP)
            if interpreter.key() == functorch.TransformType.Jvp:
                raise RuntimeError(NO_FORWARD_MODE)
        raise RuntimeError(NO_FUNCTORCH)
    elif forward_ad._current_level >= 0:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(NO_FORWARD_MODE)


# ---- tensors for the extension ---------------------------------------------------------------------------------------


def as_tuple(tensor: Tensor) -> Tuple[Any, ...]:
    """A tensor for the extension: address, dtype, shape, strides, device."""
    name = str(tensor.dtype)[len("torch.") :]
    kind, index = (2, tensor.device.index) if tensor.is_cuda else (1, 0)
    return tensor.data_ptr(), name, tuple(tensor.shape), tensor.stride(), kind, index


def native_view(tensor: Optional[Tensor]) -> Any:
    """A tensor as functions of the extension take it that know nothing of PyTorch; None stays None."""
    return tensor if tensor is None or hasattr(Tensor, "__dlpack_c_exchange_api__") else as_tuple(tensor)


def allocator_of(tensor: Tensor) -> Callable[[int], Tuple[int, Tensor]]:
    """Workspace beside a tensor, as the extension asks for it."""

    def allocate(num_bytes: int) -> Tuple[int, Tensor]:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
        return memory.data_ptr(), memory

    return allocate


def stream_of(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0


def is_plain(*tensors: Optional[Tensor]) -> bool:
    """Whether the dispatcher would add nothing but its time: eager mode, no subclass, negated view, mode, transform or
    gradient."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or forward_ad._current_level >= 0
        or any(
            each is not None and (type(each) not in (Tensor, torch.nn.Parameter) or each.is_neg()) for each in tensors
        )
        or (torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors))
    )
