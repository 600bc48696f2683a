"""PyTorch front end: autograd, torch.library operators, autocast.

Two ways lead to the C library. Plain CPU and CUDA tensors in eager mode call it directly, which costs a few microseconds less
than the dispatcher. Everything that needs the dispatcher (torch.compile, fake tensors, dispatch modes, functorch,
the profiler) goes through the operators flash_dmattn::forward and flash_dmattn::backward.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _arguments, _native
from ._arguments import (
    NO_WINDOW,
    Settings,
    bias_with_four_axes,
    check_axes,
    interval_pair,
    mask_with_four_axes,
    settings_of,
)
from ._device_arrays import on_torch_stream

NO_SECOND_ORDER = "flash_dmattn has no second derivative: its backward pass cannot be differentiated again"
NO_VMAP = "flash_dmattn cannot run under vmap: put the mapped axis into the batch instead"
NO_FUNCTORCH = "flash_dmattn does not run under torch.func transforms: use torch.autograd.grad or backward()"
NO_FORWARD_MODE = "flash_dmattn has no forward-mode derivative: use reverse mode (backward)"


@contextlib.contextmanager
def on_stream(device: torch.device, handle: Optional[int]) -> Iterator[None]:
    """Makes a stream, by its handle, the current one of a CUDA device, after the work of the one before. None: nothing."""
    if handle is None:
        yield
        return
    if device.type != "cuda":
        raise ValueError(f"stream is given, but q is on {device}; streams are for tensors on a CUDA device")
    stream = on_torch_stream(device, handle)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


# ---- tensors --------------------------------------------------------------------------------------------------------------


def _new_out(q: Tensor, v: Tensor) -> Tensor:
    """[B, Sq, H, Dv], or [total_q, H, Dv]; contiguous."""
    head_dim_v = v.shape[-1]
    if q.shape[-1] == head_dim_v and q.is_contiguous():
        return torch.empty_like(q)
    return q.new_empty((*q.shape[:-1], head_dim_v))


def _new_lse(q: Tensor, packed: bool) -> Tensor:
    """[B, H, Sq], or [H, total_q] when packed."""
    if packed:
        total, heads, _ = q.shape
        shape: Tuple[int, ...] = (heads, total)
    else:
        batch, rows, heads, _ = q.shape
        shape = (batch, heads, rows)
    dtype = q.dtype
    if dtype is torch.float32 or dtype is torch.float64:
        return q.new_empty(shape)
    return q.new_empty(shape, dtype=torch.float32)


def _as_tuple(tensor: Tensor) -> Tuple[Any, ...]:
    """A tensor for the extension: address, dtype, shape, strides, device."""
    name = str(tensor.dtype)[len("torch.") :]
    kind, index = (2, tensor.device.index) if tensor.is_cuda else (1, 0)
    return tensor.data_ptr(), name, tuple(tensor.shape), tensor.stride(), kind, index


def native_view(tensor: Tensor) -> Any:
    """A tensor as functions of the extension take it that know nothing of PyTorch."""
    return tensor if hasattr(Tensor, "__dlpack_c_exchange_api__") else _as_tuple(tensor)


# ---- eager autograd --------------------------------------------------------------------------------------------------


class _OnceDifferentiable(torch.autograd.Function):
    """Marks gradients that were computed under create_graph: they are right, but cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Optional[Tensor]) -> Any:
        # The first `count` tensors are gradients; the rest are what they depend on.
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Any:
        raise RuntimeError(NO_SECOND_ORDER)


class _Attention(torch.autograd.Function):
    """apply((settings, want_lse, mask, start, end, cu_seqlens_q, cu_seqlens_k), q, k, v[, bias])"""

    forward = staticmethod(_native.node_forward)

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor] = None) -> Any:
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return _native.node_backward(saved, needs, ctx.settings, dout, dlse)
        with torch.no_grad():
            grads = _native.node_backward(saved, needs, ctx.settings, dout, dlse)
        sources = [tensor for tensor in (*saved[:3], *saved[5:6], dout, dlse) if tensor is not None]
        return (None, *_OnceDifferentiable.apply(len(grads) - 1, *grads[1:], *sources))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(NO_FORWARD_MODE)


def _use_torch() -> None:
    """Hands the extension what it calls."""
    # What PyTorch's compiled code allocates with.
    compiled = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    _native.use_torch(
        {
            "Tensor": Tensor,
            "Parameter": torch.nn.Parameter,
            "describe": None if hasattr(Tensor, "__dlpack_c_exchange_api__") else _as_tuple,
            "float32": torch.float32,
            "float64": torch.float64,
            "uint8": torch.uint8,
            "bool": torch.bool,
            "is_neg": Tensor.is_neg,
            "empty_like": torch.empty_like,
            "zeros_like": torch.zeros_like,
            "empty_cpu": getattr(compiled, "_empty_strided_cpu", None),
            "empty_cuda": getattr(compiled, "_empty_strided_cuda", None),
            "num_threads": torch.get_num_threads,
            "cuda_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
            "grad_enabled": torch.is_grad_enabled,
            "autocast_enabled": torch.is_autocast_enabled,
            "transforms": torch._C._are_functorch_transforms_active,
            "dispatch_modes": torch._C._len_torch_dispatch_stack,
            "profiler": torch.autograd._profiler_enabled,
            "tracer": torch._C._get_tracing_state,
            "forward_ad": forward_ad,
            "arguments": _arguments,
            # Function.apply spends a microsecond and a half on questions that the extension has asked already.
            "apply": super(torch.autograd.Function, _Attention).apply,
        }
    )


_use_torch()


# ---- operators -------------------------------------------------------------------------------------------------------

_library = torch.library.Library("flash_dmattn", "DEF")
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? interval_start, Tensor? interval_end, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
_SETTINGS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float? softmax_scale, bool causal, float softcap, SymInt window_left, "
    "SymInt window_right, bool deterministic"
)
_library.define(f"forward({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
# The same, and what lse has rounded away, without which the backward is wrong beside huge negative biases.
_library.define(
    f"forward_beside_bias({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
# A gradient that is not wanted comes back empty.
_library.define(
    f"backward({_INPUTS}, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, bool needs_dq, bool needs_dk, "
    f"bool needs_dv, bool needs_dbias, {_SETTINGS}, Tensor? lse_low=None) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_library, "forward", "CUDA")
@torch.library.impl(_library, "forward", "CPU")
def _forward_operator(*arguments: Any) -> Tuple[Tensor, Tensor]:
    return _native.operator_forward(*arguments[:9], arguments[9:], False)


@torch.library.impl(_library, "forward_beside_bias", "CUDA")
@torch.library.impl(_library, "forward_beside_bias", "CPU")
def _forward_beside_bias_operator(*arguments: Any) -> Tuple[Tensor, Tensor, Tensor]:
    return _native.operator_forward(*arguments[:9], arguments[9:], True)


@torch.library.impl(_library, "backward", "CUDA")
@torch.library.impl(_library, "backward", "CPU")
def _backward_operator(*arguments: Any) -> Tuple[Tensor, ...]:
    lse_low = arguments[25] if len(arguments) > 25 else None
    grads = _native.operator_backward(*arguments[:17], arguments[17:25], lse_low)
    return tuple(arguments[9].new_empty(0) if grad is None else grad for grad in grads)


@torch.library.register_fake("flash_dmattn::forward", lib=_library)
def _forward_fake(*arguments: Any) -> Tuple[Tensor, Tensor]:
    return _new_out(arguments[0], arguments[2]), _new_lse(arguments[0], arguments[7] is not None)


@torch.library.register_fake("flash_dmattn::forward_beside_bias", lib=_library)
def _forward_beside_bias_fake(*arguments: Any) -> Tuple[Tensor, Tensor, Tensor]:
    out, lse = _forward_fake(*arguments)
    return out, lse, torch.empty_like(lse)


@torch.library.register_fake("flash_dmattn::backward", lib=_library)
def _backward_fake(*arguments: Any) -> Tuple[Tensor, ...]:
    sources = (arguments[0], arguments[1], arguments[2], arguments[4])
    return tuple(
        torch.empty_like(tensor) if need else arguments[9].new_empty(0)
        for tensor, need in zip(sources, arguments[13:17])
    )


def _save_for_operator(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.mark_non_differentiable(*output[2:])
    ctx.settings = inputs[9:]
    ctx.set_materialize_grads(False)


def _backward_of_operator(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor], *of_lse_low: Any) -> Any:
    if dout is None and dlse is None:
        return (None,) * 17
    saved = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = (wanted[0], wanted[1], wanted[2], wanted[4])
    lse_low = saved[11] if len(saved) > 11 else None
    grads = torch.ops.flash_dmattn.backward(*saved[:11], dout, dlse, *needs, *ctx.settings, lse_low)
    dq, dk, dv, dbias = (grad if need else None for grad, need in zip(grads, needs))
    return (dq, dk, dv, None, dbias) + (None,) * 12


def _refuse_second_order(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(NO_SECOND_ORDER)


def _refuse_vmap(*arguments: Any) -> Any:
    raise RuntimeError(NO_VMAP)


torch.library.register_autograd(
    "flash_dmattn::forward", _backward_of_operator, setup_context=_save_for_operator, lib=_library
)
torch.library.register_autograd(
    "flash_dmattn::forward_beside_bias", _backward_of_operator, setup_context=_save_for_operator, lib=_library
)
torch.library.register_autograd("flash_dmattn::backward", _refuse_second_order, lib=_library)
torch.library.register_vmap("flash_dmattn::forward", _refuse_vmap, lib=_library)
torch.library.register_vmap("flash_dmattn::forward_beside_bias", _refuse_vmap, lib=_library)
torch.library.register_vmap("flash_dmattn::backward", _refuse_vmap, lib=_library)


# ---- which way -------------------------------------------------------------------------------------------------------


def _refuse_transforms(tensors: Sequence[Optional[Tensor]]) -> None:
    """vmap, forward mode and torch.func end here, with one sentence."""
    if torch._C._are_functorch_transforms_active():
        for interpreter in torch._C._functorch.get_interpreter_stack():
            if interpreter.key() == torch._C._functorch.TransformType.Vmap:
                raise RuntimeError(NO_VMAP)
            if interpreter.key() == torch._C._functorch.TransformType.Jvp:
                raise RuntimeError(NO_FORWARD_MODE)
        raise RuntimeError(NO_FUNCTORCH)
    elif forward_ad._current_level >= 0:
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(NO_FORWARD_MODE)


def _keeps_lse_low(inputs: Tuple[Optional[Tensor], ...]) -> bool:
    """Whether a backward may follow beside a bias."""
    if inputs[4] is None or not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in (*inputs[:3], inputs[4]))


def _attend(inputs: Tuple[Optional[Tensor], ...], settings: Settings, want_lse: bool) -> Any:
    """out or (out, lse) of arguments that were checked, in the form the library takes."""
    if not torch.compiler.is_compiling():
        result = _native.attend(*inputs, settings, want_lse, True)
        if result is not None:
            return result
        _refuse_transforms(inputs)
    if _keeps_lse_low(inputs):
        out, lse, _ = torch.ops.flash_dmattn.forward_beside_bias(*inputs, *settings)
    else:
        out, lse = torch.ops.flash_dmattn.forward(*inputs, *settings)
    return (out, lse) if want_lse else out


def _check_tensors(tensors: Sequence[Any], axes: int) -> None:
    for tensor, name in zip(tensors, ("query", "key", "value")):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor (flash_dmattn.attention takes arrays)"
            )
        if not (tensor.is_cpu or tensor.is_cuda or tensor.is_meta):
            raise NotImplementedError(
                f"{name} is on {tensor.device}; this version of flash_dmattn runs on the CPU and on CUDA devices"
            )
        if tensor.device.type != tensors[0].device.type:
            raise ValueError(f"{name} is on {tensor.device}, but query is on {tensors[0].device}")
    check_axes(tensors, ("query", "key", "value"), axes)


def _autocast(inputs: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
    """Where autocast is on, q, k, v in its dtype; a bias that is neither that nor float32 follows."""
    q, k, v, mask, bias, *rest = inputs
    kind = "cuda" if q.is_cuda else "cpu"  # type: ignore[union-attr]
    if q.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return inputs
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if bias is not None and bias.dtype is not torch.float32:
        bias = bias.to(dtype)
    return (q, k, v, mask, bias, *rest)


# ---- public functions ------------------------------------------------------------------------------------------------


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    deterministic: Optional[bool] = None,
    return_attn_probs: Optional[bool] = None,
    *,
    window_size: Sequence[Optional[int]] = NO_WINDOW,
    key_intervals: Optional[Tuple[Tensor, Tensor]] = None,
    return_lse: bool = False,
    scale: Optional[float] = None,
) -> Any:
    """Attention with any mask and bias: softmax(softcap(softmax_scale * Q K^T) + bias, visible keys only) V.

    Args:
        query: [B, Sq, H, D], float32, float16, bfloat16, or float64 (slow: runs on the reference kernels), on the CPU;
            float32, float16 and bfloat16 on CUDA devices. Any strides
            with a contiguous last axis, so `x.transpose(1, 2)` of a [B, H, S, D] tensor works and copies nothing.
        key, value: [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv], query's dtype; H is a multiple of Hkv.
        attn_mask: bool, True = visible; [B|1, H|Hkv|1, Sq|1, Sk|1], [B, h, Sk] (no query axis), or [B|1, Sk] (padding).
        attn_bias: added to the scores after softcap; [B|1, H|Hkv|1, Sq|1, Sk|1] or [B, h, Sk]; query's dtype or
            float32. -inf makes a key invisible. Its gradient has its own shape.
        softmax_scale: default D ** -0.5; any finite number, 0 and negative too. `scale` is an alias.
        is_causal: key j is visible to row i when j <= i + Sk - Sq. Default False.
        softcap: scores become softcap * tanh(score / softcap); default 0 = none.
        deterministic: the same bits for the same inputs whatever the thread count; always so on the CPU.
        return_attn_probs: also return lse and the probabilities [B, H, Sq, Sk] (allocates them; no gradient).
        window_size: (left, right): i + Sk - Sq - left <= j <= i + Sk - Sq + right; -1 or None = unbounded.
        key_intervals: (start, end), int32 [B|1, H|Hkv|1, Sk]: key j is visible to rows start <= i < end.
        return_lse: also return lse.

    Returns:
        out [B, Sq, H, Dv]; (out, lse) with return_lse, lse [B, H, Sq] float32 natural log, differentiable; (out, lse,
        probs) with return_attn_probs. A row without a visible key gives out 0, lse +inf and zero gradients.

    Raises:
        TypeError, ValueError: an argument is wrong; the sentence says what is allowed.
        NotImplementedError: a problem that no kernel of the tensors' device takes. CUDA devices take float16 and
            bfloat16 (head dims to 1024 forward, to 256 backward).
    """
    settings = settings_of(softmax_scale, scale, is_causal, softcap, deterministic, window_size)
    start, end = (None, None) if key_intervals is None else interval_pair(key_intervals)
    if not return_attn_probs and not torch.compiler.is_compiling():
        result = _native.attend(
            query, key, value, attn_mask, attn_bias, start, end, None, None, settings, return_lse, False
        )
        if result is not None:
            return result
    _check_tensors((query, key, value), 4)
    if attn_mask is not None:
        attn_mask = mask_with_four_axes(attn_mask, query.shape[0], key.shape[1])
    if attn_bias is not None:
        attn_bias = bias_with_four_axes(attn_bias)
    inputs = _autocast((query, key, value, attn_mask, attn_bias, start, end, None, None))
    if not return_attn_probs:
        return _attend(inputs, settings, return_lse)
    out, lse = _attend(inputs, settings, True)
    with torch.no_grad():
        return out, lse, _probabilities(inputs, settings, lse.dtype)


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    deterministic: Optional[bool] = None,
    return_attn_probs: Optional[bool] = None,
    block_table: Optional[Tensor] = None,
    *,
    attn_mask: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    window_size: Sequence[Optional[int]] = NO_WINDOW,
    key_intervals: Optional[Tuple[Tensor, Tensor]] = None,
    return_lse: bool = False,
    scale: Optional[float] = None,
) -> Any:
    """Attention over sequences of different lengths, packed one after the other.

    Args:
        query: [total_q, H, D]; key, value: [total_k, Hkv, D] and [total_k, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], rising from 0 to total_q and total_k: sequence b is rows
            cu_seqlens[b] .. cu_seqlens[b + 1] - 1. Empty sequences are legal.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths.
        attn_mask, attn_bias: as in flash_dmattn_func with Sq, Sk = max_seqlen_q, max_seqlen_k; indices count from the
            start of each sequence.
        key_intervals: (start, end), int32 [H|Hkv|1, total_k], rows counted from the start of each sequence.
        Everything else as in flash_dmattn_func; causal and window align per sequence.

    Returns:
        out [total_q, H, Dv], or (out, lse) with lse [H, total_q].
    """
    if block_table is not None:
        raise NotImplementedError("block_table is given, but this version of flash_dmattn has no paged key-value cache")
    if return_attn_probs:
        raise ValueError("return_attn_probs is for flash_dmattn_func; packed sequences have no probabilities tensor")
    settings = settings_of(
        softmax_scale, scale, is_causal, softcap, deterministic, window_size, max_seqlen_q, max_seqlen_k
    )
    _check_tensors((query, key, value), 3)
    for offsets, name in ((cu_seqlens_q, "cu_seqlens_q"), (cu_seqlens_k, "cu_seqlens_k")):
        if not isinstance(offsets, Tensor) or offsets.dtype is not torch.int32:
            kind = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
            raise TypeError(f"{name} is {kind}; it must be a torch.int32 tensor of batch + 1 elements")
    start = end = None
    if attn_mask is not None:
        attn_mask = mask_with_four_axes(attn_mask, cu_seqlens_q.shape[0] - 1, max_seqlen_k)
    if attn_bias is not None:
        attn_bias = bias_with_four_axes(attn_bias)
    if key_intervals is not None:
        start, end = interval_pair(key_intervals)
    inputs = _autocast((query, key, value, attn_mask, attn_bias, start, end, cu_seqlens_q, cu_seqlens_k))
    return _attend(inputs, settings, return_lse)


def flash_dmattn_func_auto(backend: Optional[str] = None, **kwargs: Any) -> Callable[..., Any]:
    """The attention function; kwargs become its defaults. backend: "cpu", "cuda" or None; tensors run where they are."""
    if backend not in (None, "cpu") and not (backend == "cuda" and _native.cuda_devices()):
        known = ["cuda", "cpu"] if _native.cuda_devices() else ["cpu"]
        raise ValueError(f"Unknown backend: {backend}. Available backends: {known}")
    return functools.partial(flash_dmattn_func, **kwargs) if kwargs else flash_dmattn_func


# ---- probabilities ---------------------------------------------------------------------------------------------------


def _per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """[B, h, ..] -> [B, H, ..], each head repeated for the query heads it serves."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _visible_pairs(seqlen_q: int, seqlen_k: int, settings: Settings, device: torch.device) -> Tensor:
    """[Sq, Sk]: what causal and window leave visible."""
    _, _, _, causal, _, left, right, _ = settings
    row = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        visible &= key <= row
    if left >= 0:
        visible &= key >= row - left
    if right >= 0:
        visible &= key <= row + right
    return visible


def _probabilities(inputs: Sequence[Any], settings: Settings, dtype: torch.dtype) -> Tensor:
    """softmax of the visible scores, [B, H, Sq, Sk], computed in `dtype`, returned in q's; 0 where not visible."""
    q, k, _, mask, bias, start, end, _, _ = inputs
    heads, seqlen_q, seqlen_k = q.shape[2], q.shape[1], k.shape[1]
    _, _, scale, _, softcap, _, _, _ = settings
    scores = q.to(dtype).transpose(1, 2) @ _per_query_head(k.to(dtype).permute(0, 2, 3, 1), heads)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible_pairs(seqlen_q, seqlen_k, settings, q.device)
    if bias is not None:
        wide = _per_query_head(bias.to(dtype), heads)
        scores = scores + wide
        visible = visible & (wide > -torch.inf)
    if mask is not None:
        visible = visible & _per_query_head(mask, heads)
    if start is not None:
        row = torch.arange(seqlen_q, device=q.device)[:, None]
        first, last = (_per_query_head(each, heads)[:, :, None, :] for each in (start, end))
        visible = visible & (first <= row) & (row < last)
    probs = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return torch.where(visible, probs, 0.0).to(q.dtype)
