"""PyTorch front end: autograd, torch.library operators, autocast.

Two ways lead to the C library. Plain CPU and CUDA tensors in eager mode call it directly. That costs a few microseconds
less than the dispatcher. Everything that needs the dispatcher (torch.compile, fake tensors, dispatch modes, functorch,
the profiler) goes through the operators flash_dmattn::forward and flash_dmattn::backward.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, Callable, Iterator, Literal, Optional, Sequence, Tuple, TypedDict, Union, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _arguments, _native
from ._arguments import (
    NO_WINDOW,
    Extents,
    Settings,
    bias_with_four_axes,
    check_axes,
    check_layout,
    dense_extents,
    flag_of,
    integer_of,
    interval_pair,
    mask_with_four_axes,
    num_results_of,
    packed_extents,
    refuse_dropout_by_position,
    refuse_keywords,
    row_masks,
    said,
    settings_of,
    with_layout_hint,
)
from ._device_arrays import on_torch_stream
from ._key_rules import joined
from ._mask_plan import MaskPlan, masks_of
from ._fields import BACKWARD, FORWARD, INPUTS, POSITION, RESULTS, SAVED, SETTING, SOURCES, TRACED
from ._operators import (
    NO_FORWARD_MODE,
    NO_SECOND_ORDER,
    as_tuple,
    define,
    differentiate,
    refuse_second_order,
    refuse_transforms,
)


@contextlib.contextmanager
def on_stream(device: torch.device, handle: Optional[int]) -> Iterator[None]:
    """Makes a stream, by its handle, the current one of a CUDA device, after the last one's work. None does nothing."""
    if handle is None:
        yield
        return
    if device.type != "cuda":
        raise ValueError(f"stream is given, but q is on {device}; streams are for tensors on a CUDA device")
    stream = on_torch_stream(device, handle)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


# ---- tensors ---------------------------------------------------------------------------------------------------------


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
    """apply((*inputs, settings, want_lse), *inputs with a gradient)"""

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
        sources = [tensor for tensor in (*saved[len(RESULTS) :], dout, dlse) if tensor is not None]
        mark: Any = _OnceDifferentiable
        return (None, *mark.apply(len(grads) - 1, *grads[1:], *sources))

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
            "describe": None if hasattr(Tensor, "__dlpack_c_exchange_api__") else as_tuple,
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
            "profiler": torch.autograd._profiler_enabled,  # type: ignore[attr-defined]
            "tracer": torch._C._get_tracing_state,
            "forward_ad": forward_ad,
            "arguments": _arguments,
            # Function.apply spends a microsecond and a half on questions that the extension has asked already.
            "apply": super(torch.autograd.Function, _Attention).apply,  # pyright: ignore[reportAttributeAccessIssue]
        }
    )


_use_torch()


# ---- operators -------------------------------------------------------------------------------------------------------


def _settings_from(settings: Tuple[Any, ...], traced: Tuple[Any, ...]) -> Settings:
    """An operator's settings, with traced numbers in their places."""
    numbers = list(settings)
    for (name, _, _), tensor in zip(TRACED, traced):
        if tensor is not None:
            numbers[SETTING[name]] = tensor.item()
    return tuple(numbers)


def _forward_operator(num_results: int, *arguments: Any) -> Tuple[Tensor, ...]:
    inputs, settings, traced = FORWARD.split(arguments)
    return _native.operator_forward(*inputs, _settings_from(settings, traced), num_results)


def _forward_fake(num_results: int, *arguments: Any) -> Tuple[Tensor, ...]:
    q, v, packed = arguments[POSITION["q"]], arguments[POSITION["v"]], arguments[POSITION["cu_seqlens_q"]] is not None
    return (_new_out(q, v), *(_new_lse(q, packed) for _ in range(num_results - 1)))


def _backward_operator(*arguments: Any) -> Tuple[Tensor, ...]:
    inputs, known, flowing, needs, settings, perhaps_known, traced = BACKWARD.split(arguments)
    settings = _settings_from(settings, traced)
    grads = _native.operator_backward(*inputs, *known, *perhaps_known, *flowing, needs, settings)
    return tuple(known[0].new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(*arguments: Any) -> Tuple[Tensor, ...]:
    inputs, known, _, needs, *_ = BACKWARD.split(arguments)
    return tuple(
        torch.empty_like(inputs[source]) if need else known[0].new_empty(0) for source, need in zip(SOURCES, needs)
    )


def _save_for_operator(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    tensors, ctx.settings, traced = FORWARD.split(inputs)
    ctx.save_for_backward(*tensors, *output, *[None] * (len(RESULTS) - len(output)), *traced)
    ctx.mark_non_differentiable(*(each for each, field in zip(output, RESULTS) if not field.gradient))
    ctx.set_materialize_grads(False)


def _backward_of_operator(ctx: Any, *of_results: Optional[Tensor]) -> Any:
    wanted = ctx.needs_input_grad
    grads: list[Any] = [None] * len(wanted)
    flowing = [grad for grad, field in zip(of_results, RESULTS) if field.gradient]
    if any(grad is not None for grad in flowing):
        inputs, known, perhaps_known, traced = SAVED.split(ctx.saved_tensors)
        needs = [wanted[source] for source in SOURCES]
        computed = torch.ops.flash_dmattn.backward(
            *inputs, *known, *flowing, *needs, *ctx.settings, *perhaps_known, *traced
        )
        for source, need, grad in zip(SOURCES, needs, computed):
            grads[source] = grad if need else None
    return tuple(grads)


# The second gives also what lse has rounded away, without which the backward is wrong beside huge negative biases.
for _name, _num_results in (("forward", 2), ("forward_beside_bias", 3)):
    _run, _fake = (functools.partial(each, _num_results) for each in (_forward_operator, _forward_fake))
    define(_name, FORWARD.schema, _run, _fake, f"({', '.join(['Tensor'] * _num_results)})")
    differentiate(_name, _backward_of_operator, _save_for_operator)
# A gradient that is not wanted comes back empty.
define("backward", BACKWARD.schema, _backward_operator, _backward_fake, f"({', '.join(['Tensor'] * len(SOURCES))})")
differentiate("backward", refuse_second_order)


# ---- which way -------------------------------------------------------------------------------------------------------


def _keeps_lse_low(inputs: Tuple[Optional[Tensor], ...]) -> bool:
    """Whether a backward may follow beside a bias."""
    if inputs[POSITION["bias"]] is None or not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in (inputs[source] for source in SOURCES))


def _traced_apart(settings: Settings) -> Tuple[Any, ...]:
    """While code is compiled: the settings, and behind them a scale and softcap that are not constants, as tensors."""
    from torch.fx.experimental import symbolic_shapes

    is_static = getattr(symbolic_shapes, "has_static_value", lambda number: True)

    def tensor_of(number: Any) -> Optional[Tensor]:
        if isinstance(number, Tensor):
            return number.detach().reshape(()).to("cpu", torch.float64)
        # A product, since PyTorch turns scalars into tensors inside of arithmetic alone.
        return None if number is None or is_static(number) else torch.ones((), dtype=torch.float64) * number

    own, traced = list(settings), [tensor_of(settings[SETTING[name]]) for name, _, _ in TRACED]
    for (name, _, instead), tensor in zip(TRACED, traced):
        if tensor is not None:
            own[SETTING[name]] = instead
    return (*own, *traced)


def _attend(inputs: Tuple[Optional[Tensor], ...], settings: Tuple[Any, ...], num_results: int) -> Any:
    """out, (out, lse) or (out, lse, lse_low) of arguments in the form the library takes."""
    lse_low = None
    if num_results < 3 and not torch.compiler.is_compiling():
        result = _native.attend(*inputs, settings, num_results == 2, True)
        if result is not None:
            return result
    _check_for_operators(inputs)
    if torch.compiler.is_compiling() and _is_plain(inputs[0]):
        settings = _traced_apart(settings)
    if _keeps_lse_low(inputs) or (num_results == 3 and inputs[POSITION["bias"]] is not None):
        out, lse, lse_low = torch.ops.flash_dmattn.forward_beside_bias(*inputs, *settings)
    else:
        out, lse = torch.ops.flash_dmattn.forward(*inputs, *settings)
    return out if num_results == 1 else (out, lse, lse_low)[:num_results]


_NAMES = tuple(field.argument for field in INPUTS)


def _check_kinds(tensors: Sequence[Any], axes: int) -> None:
    """Raises a sentence unless query, key and value are tensors with `axes` axes."""
    for tensor, name in zip(tensors, _NAMES):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is {said(tensor)}; it must be a torch.Tensor (flash_dmattn.attention takes arrays)"
            )
        check_layout(tensor, name)
    check_axes(tensors, _NAMES, axes)


def _check_for_operators(inputs: Sequence[Any]) -> None:
    """Dense tensors on a device that operators run on, or a sentence."""
    device = inputs[0].device
    for tensor, name in zip(inputs, _NAMES):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {said(tensor)}; it must be a torch.Tensor, as query is")
        check_layout(tensor, name)
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            raise NotImplementedError(
                f"{name} is on {tensor.device}; this version of flash_dmattn runs on the CPU and on CUDA devices"
            )
        if tensor.device.type != device.type:
            raise ValueError(f"{name} is on {tensor.device}, but query is on {device}")
        if not _is_plain(tensor):
            _meet_subclass()


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _meet_subclass() -> None:
    """Brings what shards the operators where a DTensor may have come; nothing else imports torch.distributed.tensor."""
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("._distributed", __package__)


# torch.compiler.assume_constant_result, which would import the compiler: it is called while code is compiled.
_meet_subclass._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _inputs(
    tensors: Tuple[Any, ...],
    mask: Any,
    bias: Any,
    intervals: Tuple[Any, Any],
    offsets: Tuple[Any, Any],
    sink: Any,
    rows: Tuple[Any, ...],
    extents: Extents,
) -> Tuple[Optional[Tensor], ...]:
    """Everything that was given, checked, in the order and form that the library takes."""
    for each, name in ((mask, "attn_mask"), (bias, "attn_bias"), (sink, "sink")):
        if isinstance(each, Tensor):
            check_layout(each, name)
    mask = None if mask is None else mask_with_four_axes(mask, extents)
    bias = None if bias is None else bias_with_four_axes(bias, extents)
    return _autocast((*tensors, mask, bias, *intervals, *offsets, sink, *rows))


def _autocast(inputs: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
    """Where autocast is on, q, k, v in its dtype; a bias that is neither that nor float32 follows."""
    q, k, v, mask, bias, *rest = inputs
    assert q is not None and k is not None and v is not None  # checked: _check_kinds()
    kind = "cuda" if q.is_cuda else "cpu"
    if q.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return inputs
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if bias is not None and bias.dtype is not torch.float32:
        bias = bias.to(dtype)
    return (q, k, v, mask, bias, *rest)


# ---- public functions ------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Options(TypedDict, total=False):
        """Keywords that do not change what is returned."""

        window_size: Union[Sequence[Optional[int]], Tensor]
        key_intervals: Optional[Tuple[Tensor, Tensor]]
        row_intervals: Optional[Tuple[Tensor, Tensor]]
        block_mask: Optional[Tensor]
        mask_plan: Optional[MaskPlan]
        prefix_lengths: Optional[Tensor]
        sink: Optional[Tensor]
        lse_without_sink: bool
        scale: Optional[float]

    class _DenseOptions(_Options, total=False):
        document_ids: Optional[Tensor]

    class _PackedOptions(_Options, total=False):
        attn_mask: Optional[Tensor]
        attn_bias: Optional[Tensor]


@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = ..., attn_bias: Optional[Tensor] = ...,
    softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ..., softcap: Optional[float] = ...,
    deterministic: Optional[bool] = ..., return_attn_probs: Literal[None, False] = ..., *,
    return_lse: Literal[False] = ..., return_lse_low: Literal[False] = ..., **options: Unpack[_DenseOptions],
) -> Tensor: ...
@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = ..., attn_bias: Optional[Tensor] = ...,
    softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ..., softcap: Optional[float] = ...,
    deterministic: Optional[bool] = ..., return_attn_probs: Literal[None, False] = ..., *,
    return_lse: Literal[True], return_lse_low: Literal[False] = ..., **options: Unpack[_DenseOptions],
) -> Tuple[Tensor, Tensor]: ...
@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = ..., attn_bias: Optional[Tensor] = ...,
    softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ..., softcap: Optional[float] = ...,
    deterministic: Optional[bool] = ..., return_attn_probs: Literal[None, False] = ..., *,
    return_lse: bool = ..., return_lse_low: Literal[True], **options: Unpack[_DenseOptions],
) -> Tuple[Tensor, Tensor, Optional[Tensor]]: ...
@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = ..., attn_bias: Optional[Tensor] = ...,
    softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ..., softcap: Optional[float] = ...,
    deterministic: Optional[bool] = ..., *, return_attn_probs: Literal[True],
    return_lse: bool = ..., return_lse_low: Literal[False] = ..., **options: Unpack[_DenseOptions],
) -> Tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = ..., attn_bias: Optional[Tensor] = ...,
    softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ..., softcap: Optional[float] = ...,
    deterministic: Optional[bool] = ..., return_attn_probs: Optional[bool] = ..., *,
    return_lse: bool, return_lse_low: bool = ..., **options: Unpack[_DenseOptions],
) -> Any: ...
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
    window_size: Union[Sequence[Optional[int]], Tensor] = NO_WINDOW,
    key_intervals: Optional[Tuple[Tensor, Tensor]] = None,
    row_intervals: Optional[Tuple[Tensor, Tensor]] = None,
    block_mask: Optional[Tensor] = None,
    mask_plan: Optional[MaskPlan] = None,
    document_ids: Optional[Tensor] = None,
    prefix_lengths: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    lse_without_sink: bool = False,
    return_lse: bool = False,
    return_lse_low: bool = False,
    scale: Optional[float] = None,
    **others: Any,
) -> Any:
    """Attention with any mask and bias: softmax(softcap(softmax_scale * Q K^T) + bias, visible keys only) V.

    Args:
        query: [B, Sq, H, D]. The CPU takes float32, float16, bfloat16 and float64 (slow: the reference kernels run it).
            CUDA devices take float32, float16 and bfloat16. Strides are any with a contiguous last axis, so
            `x.transpose(1, 2)` of a [B, H, S, D] tensor works and copies nothing.
        key, value: [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv], query's dtype; H is a multiple of Hkv.
        attn_mask: bool, True = visible; [B|1, H|Hkv|1, Sq|1, Sk|1], [B, h, Sk] (no query axis), or [B|1, Sk] (padding).
            Where the axes of a shorter shape may also be [B, Sq, Sk] or [Sq, Sk], write four: mask[:, :, None].
        attn_bias: added to the scores after softcap; [B|1, H|Hkv|1, Sq|1, Sk|1] or [B, h, Sk], as the mask; query's
            dtype or float32. -inf makes a key invisible. Its gradient has its own shape.
        softmax_scale: default D ** -0.5; any finite number, 0 and negative too; no gradient flows into it.
        is_causal: key j is visible to row i when j <= i + Sk - Sq. Default False.
        softcap: scores become softcap * tanh(score / softcap); default 0 = none.
        deterministic: the same bits for the same inputs whatever the thread count; always so on the CPU. Default False.
        return_attn_probs: also return lse and the probabilities [B, H, Sq, Sk], of query's dtype. This alone stores
            Sq * Sk numbers; no gradient flows into them. Default False.
        window_size: (left, right): i + Sk - Sq - left <= j <= i + Sk - Sq + right; -1 or None = unbounded, the default.
            Or int32 [H|Hkv, 2], on query's device: that of each head.
        key_intervals: (start, end), int32 [B|1, H|Hkv|1, Sk]: key j is visible to rows start <= i < end. A
            masks.KeyIntervals that was made for another number of rows is refused.
        row_intervals: (start, end), int32 [B|1, H|Hkv|1, n, Sq], n from 1 to 4: row i sees the keys start <= j < end of
            each of its n ranges, as far as the other masks say. Default None.
        block_mask: bool [B|1, H|Hkv|1, ceil(Sq / b), ceil(Sk / b)], b 64 or 128, True = the rows and keys of the block
            see each other, as far as the other masks say. Default None.
        mask_plan: a masks.MaskPlan, which holds the masks of the call, is_causal and window_size among them; none is
            given beside it. Default None.
        document_ids: int32 [B|1, S], rising along S, Sq = Sk = S: rows see the keys of their own document. Default None.
        prefix_lengths: int32 [B|1]: rows see the keys below it, and the others causally, without is_causal. These two
            and an array of windows become key intervals by masks.rule_intervals; where several calls have the same,
            make them once. Default None.
        sink: [H] or [n, H], float32, float16 or bfloat16: learned logits that join the sum of each row of their head
            and have no value, so that a row of probabilities adds up to less than 1. Its gradient has its shape and
            dtype.
        lse_without_sink: lse is the logarithm of the sum over keys alone, as `merge` takes it; out is the same. Default
            False.
        return_lse: also return lse. Default False.
        return_lse_low: also return lse, and behind it what lse has rounded away, or None without a bias. `merge` needs
            it where every bias of a row may be -1e4 or below. No gradient flows into it. Default False.
        scale: an alias of softmax_scale.
        others: none; a keyword of flash-attn at the value that changes nothing is taken.

    Returns:
        out [B, Sq, H, Dv]; (out, lse) with return_lse, lse [B, H, Sq] float32 natural log, differentiable; (out, lse,
        lse_low) with return_lse_low, lse_low like lse; (out, lse, probs) with return_attn_probs. A row without a
        visible key gives out 0, lse +inf (with sinks their logarithm) and zero gradients.

    Raises:
        TypeError, ValueError: an argument is wrong; the sentence says what is allowed.
        NotImplementedError: a problem that no kernel of the tensors' device takes. CUDA devices take float16 and
            bfloat16 (head dims to 1024) and float32 (head dims to 256).
        RuntimeError: a second derivative, vmap, forward mode or a transform of torch.func is asked for.

    Examples:
        >>> import torch
        >>> from flash_dmattn import flash_dmattn_func
        >>> q, k, v = (torch.ones(1, 4, heads, 8) for heads in (2, 1, 1))  # two query heads share one KV head
        >>> padding = torch.tensor([[True, True, True, False]])
        >>> out, lse = flash_dmattn_func(q, k, v, attn_mask=padding, is_causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 4, 2, 8]), torch.Size([1, 2, 4]))
    """
    if others:
        refuse_keywords("flash_dmattn_func", others)
    num_results = num_results_of(return_lse, return_lse_low, return_attn_probs)
    window: Any = window_size
    if mask_plan is not None:
        attn_mask, is_causal, window, key_intervals, row_intervals, block_mask = masks_of(
            mask_plan,
            {
                "attn_mask": attn_mask, "is_causal": is_causal, "window_size": window, "key_intervals": key_intervals,
                "row_intervals": row_intervals, "block_mask": block_mask, "document_ids": document_ids,
                "prefix_lengths": prefix_lengths,
            },  # fmt: skip
        )
    if document_ids is not None or prefix_lengths is not None or isinstance(window, Tensor):
        rules = document_ids, prefix_lengths
        if getattr(query, "is_nested", False):
            raise NotImplementedError(
                "document_ids, prefix_lengths and windows of each head are not taken beside nested tensors; "
                "flash_dmattn_varlen_func takes the last two"
            )
        _check_kinds((query, key, value), 4)
        key_intervals, window = joined(key_intervals, window, rules, is_causal, query, key)
    settings = settings_of(
        softmax_scale, scale, is_causal, softcap, deterministic, window, lse_without_sink=lse_without_sink,
        mask_plan=0 if mask_plan is None else mask_plan.number,
    )  # fmt: skip
    pair = (None, None) if key_intervals is None else interval_pair(key_intervals, query)
    rows = row_masks(row_intervals, block_mask)
    tensors = (query, key, value)
    try:
        if num_results < 3 and not torch.compiler.is_compiling():
            wanted = num_results == 2, False
            given = (*tensors, attn_mask, attn_bias, *pair, None, None, sink, *rows)
            result = _native.attend(*given, settings, *wanted)
            if result is not None:
                return result
        refuse_transforms((*tensors, attn_mask, attn_bias, *pair, sink, *rows))
        if getattr(query, "is_nested", False) and query.layout is torch.jagged and not return_attn_probs:
            from ._nested import attend_jagged

            return attend_jagged(tensors, attn_mask, attn_bias, pair, sink, rows, settings, num_results)
        _check_kinds(tensors, 4)
        extents = dense_extents(query.shape, key.shape)
        inputs = _inputs(tensors, attn_mask, attn_bias, pair, (None, None), sink, rows, extents)
        if not return_attn_probs:
            return _attend(inputs, settings, num_results)
        out, lse = _attend(inputs, settings, 2)
    except ValueError as error:
        raise with_layout_hint(error, query, key) from None
    with torch.no_grad():
        return out, lse, _probabilities(inputs, settings, lse.dtype)


def _without_dropout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a packed function: an argument of 0 after max_seqlen_k, given by position, is flash-attn's dropout_p."""

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) > 7:
            refuse_dropout_by_position(arguments[7])
        return function(*arguments, **keywords)

    return checked


@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ...,
    softcap: Optional[float] = ..., deterministic: Optional[bool] = ..., return_attn_probs: Optional[bool] = ...,
    block_table: None = ..., *, return_lse: Literal[False] = ...,
    return_lse_low: Literal[False] = ..., **options: Unpack[_PackedOptions],
) -> Tensor: ...
@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ...,
    softcap: Optional[float] = ..., deterministic: Optional[bool] = ..., return_attn_probs: Optional[bool] = ...,
    block_table: None = ..., *, return_lse: Literal[True],
    return_lse_low: Literal[False] = ..., **options: Unpack[_PackedOptions],
) -> Tuple[Tensor, Tensor]: ...
@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ...,
    softcap: Optional[float] = ..., deterministic: Optional[bool] = ..., return_attn_probs: Optional[bool] = ...,
    block_table: None = ..., *, return_lse: bool = ...,
    return_lse_low: Literal[True], **options: Unpack[_PackedOptions],
) -> Tuple[Tensor, Tensor, Optional[Tensor]]: ...
@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: Optional[float] = ..., is_causal: Optional[bool] = ...,
    softcap: Optional[float] = ..., deterministic: Optional[bool] = ..., return_attn_probs: Optional[bool] = ...,
    block_table: None = ..., *, return_lse: bool,
    return_lse_low: bool = ..., **options: Unpack[_PackedOptions],
) -> Any: ...
@_without_dropout
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
    window_size: Union[Sequence[Optional[int]], Tensor] = NO_WINDOW,
    key_intervals: Optional[Tuple[Tensor, Tensor]] = None,
    row_intervals: Optional[Tuple[Tensor, Tensor]] = None,
    block_mask: Optional[Tensor] = None,
    mask_plan: Optional[MaskPlan] = None,
    prefix_lengths: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    lse_without_sink: bool = False,
    return_lse: bool = False,
    return_lse_low: bool = False,
    scale: Optional[float] = None,
    **others: Any,
) -> Any:
    """Attention over sequences of different lengths, packed one after the other; everything counts per sequence.

    Args:
        query: [total_q, H, D], dtypes as in flash_dmattn_func.
        key, value: [total_k, Hkv, D] and [total_k, Hkv, Dv], query's dtype.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], rising from 0 to total_q and total_k: sequence b is rows
            cu_seqlens[b] .. cu_seqlens[b + 1] - 1. Empty sequences are legal.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths.
        attn_mask, attn_bias: as in flash_dmattn_func with Sq, Sk = max_seqlen_q, max_seqlen_k; indices count from the
            start of each sequence.
        key_intervals: (start, end), int32 [H|Hkv|1, total_k], rows counted from the start of each sequence.
        row_intervals: (start, end), int32 [H|Hkv|1, n, total_q], keys counted from the start of each sequence.
        block_mask: as in flash_dmattn_func with Sq, Sk = max_seqlen_q, max_seqlen_k.
        mask_plan: as in flash_dmattn_func, made with the same cu_seqlens.
        softmax_scale, is_causal, softcap, deterministic, window_size, prefix_lengths, sink, lse_without_sink,
            return_lse, return_lse_low: as in flash_dmattn_func.
        scale, others: as in flash_dmattn_func.
        return_attn_probs, block_table: False and None, the defaults: packed sequences have no tensor of probabilities,
            and there is no paged cache.

    Returns:
        out [total_q, H, Dv]; (out, lse) with return_lse, lse [H, total_q]; (out, lse, lse_low) with return_lse_low.

    Raises:
        TypeError, ValueError: an argument is wrong; the sentence says what is allowed.
        NotImplementedError: block_table is given, or no kernel of the tensors' device takes the problem.
        RuntimeError: as in flash_dmattn_func.

    Examples:
        >>> import torch
        >>> from flash_dmattn import flash_dmattn_varlen_func
        >>> q = k = v = torch.ones(5, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)  # sequences of two and of three rows
        >>> flash_dmattn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3, is_causal=True).shape
        torch.Size([5, 2, 8])
    """
    if others:
        refuse_keywords("flash_dmattn_varlen_func", others)
    if block_table is not None:
        raise NotImplementedError("block_table is given, but this version of flash_dmattn has no paged key-value cache")
    num_results = num_results_of(return_lse, return_lse_low, None)
    if flag_of(return_attn_probs, "return_attn_probs"):
        raise ValueError("return_attn_probs is for flash_dmattn_func; packed sequences have no probabilities tensor")
    longest = integer_of(max_seqlen_q, "max_seqlen_q"), integer_of(max_seqlen_k, "max_seqlen_k")
    offsets = cu_seqlens_q, cu_seqlens_k
    window: Any = window_size
    if mask_plan is not None:
        attn_mask, is_causal, window, key_intervals, row_intervals, block_mask = masks_of(
            mask_plan,
            {
                "attn_mask": attn_mask, "is_causal": is_causal, "window_size": window, "key_intervals": key_intervals,
                "row_intervals": row_intervals, "block_mask": block_mask, "prefix_lengths": prefix_lengths,
            },  # fmt: skip
        )
    if prefix_lengths is not None or isinstance(window, Tensor):
        _check_kinds((query, key, value), 3)
        rules = None, prefix_lengths
        key_intervals, window = joined(key_intervals, window, rules, is_causal, query, key, offsets)
    settings = settings_of(
        softmax_scale, scale, is_causal, softcap, deterministic, window, *longest, lse_without_sink,
        0 if mask_plan is None else mask_plan.number,
    )  # fmt: skip
    tensors = (query, key, value)
    pair = (None, None) if key_intervals is None else interval_pair(key_intervals, query, longest[0])
    rows = row_masks(row_intervals, block_mask)
    if num_results < 3 and not (cu_seqlens_q is None or cu_seqlens_k is None or torch.compiler.is_compiling()):
        given = (*tensors, attn_mask, attn_bias, *pair, *offsets, sink, *rows)
        try:
            result = _native.attend(*given, settings, num_results == 2, False)
        except (TypeError, ValueError):  # the rules below say what is wrong, or the library again
            result = None
        if result is not None:
            return result
    refuse_transforms((*tensors, attn_mask, attn_bias, sink))
    for each, name in ((cu_seqlens_q, "cu_seqlens_q"), (cu_seqlens_k, "cu_seqlens_k")):
        if not isinstance(each, Tensor) or each.dtype is not torch.int32 or each.dim() != 1:
            kind = f"{each.dtype}, of shape {list(each.shape)}" if isinstance(each, Tensor) else said(each)
            raise TypeError(f"{name} is {kind}; it must be a torch.int32 tensor of batch + 1 elements")
    return attend_packed(tensors, attn_mask, attn_bias, pair, offsets, sink, rows, settings, num_results)


def attend_packed(
    tensors: Tuple[Any, ...],
    mask: Any,
    bias: Any,
    intervals: Tuple[Any, Any],
    offsets: Tuple[Tensor, Tensor],
    sink: Optional[Tensor],
    rows: Tuple[Any, ...],
    settings: Settings,
    num_results: int,
) -> Any:
    """flash_dmattn_varlen_func(), its settings checked."""
    _check_kinds(tensors, 3)
    longest: Sequence[int] = settings[:2]
    if 0 in longest and offsets[0].is_cpu and any(getattr(each, "ndim", 4) != 4 for each in (mask, bias)):
        longest = [most or max(each.diff().tolist(), default=0) for most, each in zip(longest, offsets)]
    extents = packed_extents(tensors[0].shape, tensors[1].shape, offsets[0].shape, longest)
    return _attend(_inputs(tensors, mask, bias, intervals, offsets, sink, rows, extents), settings, num_results)


def flash_dmattn_func_auto(backend: Optional[str] = None, **kwargs: Any) -> Callable[..., Any]:
    """flash_dmattn_func, with other defaults where keywords are given. Tensors run where they are.

    Args:
        backend: "cpu", "cuda" or None, the default: one that this installation must have.
        kwargs: keywords of flash_dmattn_func that every call gets.

    Returns:
        A function with the arguments and results of flash_dmattn_func.

    Raises:
        ValueError: this installation does not have the back end.

    Examples:
        >>> import torch
        >>> from flash_dmattn import flash_dmattn_func_auto
        >>> attend = flash_dmattn_func_auto("cpu", is_causal=True)
        >>> x = torch.ones(1, 4, 2, 8)
        >>> attend(x, x, x).shape
        torch.Size([1, 4, 2, 8])
    """
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
    numbers: Any = settings
    causal, left, right = (numbers[SETTING[name]] for name in ("causal", "window_left", "window_right"))
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
    """softmax of the visible scores and the sinks, [B, H, Sq, Sk], computed in `dtype`, returned in q's; 0 where not
    visible."""
    q, k, _, mask, bias, start, end, _, _, sink, *ranges, blocks = inputs
    heads, seqlen_q, seqlen_k = q.shape[2], q.shape[1], k.shape[1]
    numbers: Any = settings
    scale, softcap = numbers[SETTING["softmax_scale"]], numbers[SETTING["softcap"]]
    scores = q.to(dtype).transpose(1, 2) @ _per_query_head(k.to(dtype).permute(0, 2, 3, 1), heads)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if isinstance(softcap, Tensor):
        scores = torch.where(softcap > 0, softcap * torch.tanh(scores / softcap), scores)
    elif softcap > 0:
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
    if ranges[0] is not None:
        key = torch.arange(seqlen_k, device=q.device)
        first, last = (_per_query_head(each, heads)[..., None] for each in ranges)  # [B, H, n, Sq, 1]
        visible = visible & ((first <= key) & (key < last)).any(2)
    if blocks is not None:
        size = 64 if 64 * blocks.shape[2] >= seqlen_q and 64 * blocks.shape[3] >= seqlen_k else 128
        wide = _per_query_head(blocks, heads).repeat_interleave(size, 2).repeat_interleave(size, 3)
        visible = visible & wide[:, :, :seqlen_q, :seqlen_k].bool()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        logits = sink.to(dtype).reshape(-1, heads).logsumexp(0)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, logits), dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :seqlen_k]
    return torch.where(visible, probs, 0.0).to(q.dtype)
