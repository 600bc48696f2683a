"""Masks on PyTorch tensors, on the CPU and on CUDA devices: the operators of flash_dmattn.masks.

On CUDA devices they enqueue the C library's kernels on the current stream; nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from . import _native
from ._arguments import shape_with
from ._operators import define, differentiate, native_view, refuse_second_order, stream_of

Pair = Tuple[Tensor, Tensor]


def sortable(values: Tensor) -> Tensor:
    """The same order for a sort that tells -0 from 0: one zero; NaN becomes -inf."""
    return torch.where(values == 0, 0, values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))


def _define_filled(name: str, arguments: str, fill: Any, make: Any, *keys: str) -> Any:
    """Defines an operator of a function that allocates outputs and one that computes them; returns both in one."""

    def run(*given: Any) -> Any:
        outputs = make(*given)
        fill(*given, outputs)
        return outputs

    returns = "Tensor" if make.__annotations__["return"] == "Tensor" else "(Tensor, Tensor)"
    define(name, arguments, run, make, returns, keys or ("CPU", "CUDA"))
    return run


def _beside(tensor: Tensor, shape: Tuple[int, ...]) -> Pair:
    return tensor.new_empty(shape, dtype=torch.int32), tensor.new_empty(shape, dtype=torch.int32)


def _on(device: torch.device, seqlen_k: int) -> Pair:
    start, end = (torch.empty((1, 1, seqlen_k), dtype=torch.int32, device=device) for _ in range(2))
    return start, end


# ---- top-W -----------------------------------------------------------------------------------------------------------


def _topk(bias: Tensor, padding: Optional[Tensor], window_size: int, seqlen_q: int, pair: Pair) -> None:
    given = native_view(bias), native_view(padding)
    address = num_bytes = 0
    if bias.is_cuda:
        num_bytes = _native.topk_workspace(*given)
        workspace = bias.new_empty(num_bytes, dtype=torch.uint8)  # used again in the order of the stream
        address = workspace.data_ptr()
    _native.topk_intervals(*given, *map(native_view, pair), window_size, seqlen_q, address, num_bytes, stream_of(bias))


def _topk_outputs(bias: Tensor, padding: Optional[Tensor], window_size: int, seqlen_q: int) -> Pair:
    batch = bias.shape[0] if padding is None or bias.shape[0] != 1 else padding.shape[0]
    return _beside(bias, (batch, *bias.shape[1:]))


_define_filled(
    "topk_intervals",
    "Tensor bias, Tensor? padding, SymInt window_size, SymInt seqlen_q",
    _topk,
    _topk_outputs,
)


# ---- windows, prefixes, documents ------------------------------------------------------------------------------------


def _window(rows: int, keys: int, causal: bool, left: int, right: int, device: torch.device, pair: Pair) -> None:
    _native.window_intervals(*map(native_view, pair), rows, causal, left, right, stream_of(pair[0]))


def _window_outputs(rows: int, keys: int, causal: bool, left: int, right: int, device: torch.device) -> Pair:
    return _on(device, keys)


window = _define_filled(
    "window_intervals",
    "SymInt seqlen_q, SymInt seqlen_k, bool causal, SymInt left, SymInt right, Device device",
    _window,
    _window_outputs,
    "CompositeExplicitAutograd",
)


def _prefix(rows: int, keys: int, length: int, device: torch.device, pair: Pair) -> None:
    _native.prefix_intervals(*map(native_view, pair), rows, length, stream_of(pair[0]))


def _prefix_outputs(rows: int, keys: int, length: int, device: torch.device) -> Pair:
    return _on(device, keys)


prefix = _define_filled(
    "prefix_intervals",
    "SymInt seqlen_q, SymInt seqlen_k, SymInt prefix, Device device",
    _prefix,
    _prefix_outputs,
    "CompositeExplicitAutograd",
)


def _documents(cu_seqlens: Tensor, causal: bool, seqlen: int, pair: Pair) -> None:
    _native.document_intervals(native_view(cu_seqlens), *map(native_view, pair), causal, stream_of(pair[0]))


def _document_outputs(cu_seqlens: Tensor, causal: bool, seqlen: int) -> Pair:
    return _beside(cu_seqlens, (1, 1, seqlen))


_define_filled("document_intervals", "Tensor cu_seqlens, bool causal, SymInt seqlen", _documents, _document_outputs)


def _rules(*given: Any) -> None:
    *rules, rows, shape, pair = given
    _native.rule_intervals(*map(native_view, rules), *map(native_view, pair), rows, stream_of(pair[0]))


def _rule_outputs(*given: Any) -> Pair:
    *rules, _, shape = given
    return _beside(next(rule for rule in rules if rule is not None), tuple(shape))


_RULES = "document_ids prefix_lengths window_sizes interval_start interval_end cu_seqlens_q cu_seqlens_k"
_define_filled(
    "rule_intervals",
    ", ".join(f"Tensor? {rule}" for rule in _RULES.split()) + ", SymInt seqlen_q, SymInt[] shape",
    _rules,
    _rule_outputs,
)


# ---- dense masks -----------------------------------------------------------------------------------------------------


def from_mask(planes: Tensor) -> Optional[Pair]:
    """A dense mask [B, h, Sq, Sk] as intervals, or None when it is not one per key. A CUDA device is waited for."""
    batch, heads, _, keys = planes.shape
    pair = _beside(planes, (batch, heads, keys))
    exact = planes.new_empty(1, dtype=torch.int32)
    _native.intervals_from_mask(native_view(planes), *map(native_view, pair), exact.data_ptr(), stream_of(planes))
    return pair if int(exact) else None


def _to_mask(start: Tensor, end: Tensor, seqlen_q: int, mask: Tensor) -> None:
    _native.intervals_to_mask(native_view(start), native_view(end), native_view(mask), stream_of(mask))


def _to_mask_output(start: Tensor, end: Tensor, seqlen_q: int) -> Tensor:
    return start.new_empty((*start.shape[:2], seqlen_q, start.shape[2]), dtype=torch.bool)


_define_filled("intervals_to_mask", "Tensor start, Tensor end, SymInt seqlen_q", _to_mask, _to_mask_output)


def _blocks(mask: Tensor, block_q: int, block_k: int, blocks: Tensor) -> None:
    _native.mask_blocks(native_view(mask), native_view(blocks.view(torch.bool)), block_q, block_k, stream_of(mask))


def _blocks_output(mask: Tensor, block_q: int, block_k: int) -> Tensor:
    tiles = (mask.shape[2] + block_q - 1) // block_q, (mask.shape[3] + block_k - 1) // block_k
    return mask.new_empty((*mask.shape[:2], *tiles), dtype=torch.uint8)


_define_filled("mask_blocks", "Tensor mask, SymInt block_q, SymInt block_k", _blocks, _blocks_output)


def _create(
    bias: Tensor, shown: Optional[Tensor], window_size: int, min_value: float, block_size: int, mask: Tensor
) -> None:
    _native.create_mask(*map(native_view, (bias, shown, mask)), window_size, min_value, block_size, stream_of(mask))


def _create_output(
    bias: Tensor, shown: Optional[Tensor], window_size: int, min_value: float, block_size: int
) -> Tensor:
    return bias.new_empty(shape_with(bias.shape, None if shown is None else shown.shape), dtype=torch.bool)


_define_filled(
    "create_mask",
    "Tensor bias, Tensor? attention_mask, SymInt window_size, float min_value, SymInt block_size",
    _create,
    _create_output,
)


# ---- biases ----------------------------------------------------------------------------------------------------------


def _key_bias(dt: Tensor, a: Tensor, padding: Optional[Tensor], exponential: bool, bias: Tensor) -> None:
    _native.key_bias(*map(native_view, (dt, a, padding, bias)), exponential, stream_of(dt))


def _key_bias_output(dt: Tensor, a: Tensor, padding: Optional[Tensor], exponential: bool) -> Tensor:
    batch, seqlen, heads = dt.shape
    return dt.new_empty((batch, heads, seqlen), dtype=torch.promote_types(dt.dtype, a.dtype))


_KEY_BIAS = "Tensor dt, Tensor a, Tensor? padding, bool exponential"
_define_filled("key_bias", _KEY_BIAS, _key_bias, _key_bias_output)


def _key_bias_backward(
    dt: Tensor, a: Tensor, padding: Optional[Tensor], exponential: bool, dbias: Tensor, pair: Pair
) -> None:
    _native.key_bias_backward(*map(native_view, (dt, a, padding, dbias, *pair)), exponential, stream_of(dt))


def _key_bias_gradients(dt: Tensor, a: Tensor, padding: Optional[Tensor], exponential: bool, dbias: Tensor) -> Pair:
    return dt.new_empty(dt.shape), a.new_empty(a.shape)


_define_filled("key_bias_backward", f"{_KEY_BIAS}, Tensor dbias", _key_bias_backward, _key_bias_gradients)


def _save_key_bias(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    dt, a, padding, ctx.exponential = inputs
    ctx.save_for_backward(dt, a, padding)


def _key_bias_autograd(ctx: Any, dbias: Tensor) -> Tuple[Optional[Tensor], ...]:
    ddt, da = torch.ops.flash_dmattn.key_bias_backward(*ctx.saved_tensors, ctx.exponential, dbias)
    return ddt, da, None, None


differentiate("key_bias", _key_bias_autograd, _save_key_bias)
differentiate("key_bias_backward", refuse_second_order)


# ---- slots -----------------------------------------------------------------------------------------------------------


def _new_slot(*tensors: Any) -> Tensor:
    length: Tensor = tensors[5]
    return length.new_empty(length.shape)


def append(*tensors: Optional[Tensor]) -> Tensor:
    """The slot that each head's token got; `tensors` as the operator's."""
    slot = _new_slot(*tensors)
    _native.topk_append(*map(native_view, (*tensors, slot)), stream_of(slot))
    return slot


define(
    "topk_append",
    "Tensor bias, Tensor? k, Tensor? v, Tensor(a!) key, Tensor(b!) slot_bias, Tensor(c!) length, "
    "Tensor(d!)? slot_k, Tensor(e!)? slot_v, Tensor? real",
    append,
    _new_slot,
)
