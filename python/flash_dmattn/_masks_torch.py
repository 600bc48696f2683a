"""Masks on PyTorch tensors, on the CPU and on CUDA devices: the operators of flash_dmattn.masks.

On CUDA devices they enqueue the C library's kernels on the current stream; nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from . import _native
from ._arguments import shape_with
from ._torch import native_view, refuse_second_order, refuse_transforms, refuse_vmap  # noqa: F401

Pair = Tuple[Tensor, Tensor]

_library = torch.library.Library("flash_dmattn", "FRAGMENT")


def sortable(values: Tensor) -> Tensor:
    """The same order for a sort that tells -0 from 0: one zero; NaN becomes -inf."""
    return torch.where(values == 0, 0, values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))


def _stream_of(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0


def _define(name: str, arguments: str, *keys: str) -> Any:
    """Registers a function that fills outputs for the arguments, and one that makes them; returns both in one."""

    def register(fill: Any, make: Any) -> Any:
        def run(*given: Any) -> Any:
            outputs = make(*given)
            fill(*given, outputs)
            return outputs

        tags = (torch.Tag.pt2_compliant_tag,)
        returns = "Tensor" if make.__annotations__["return"] == "Tensor" else "(Tensor, Tensor)"
        _library.define(f"{name}({arguments}) -> {returns}", tags=tags)
        for key in keys:
            torch.library.impl(_library, name, key)(run)
        torch.library.register_fake(f"flash_dmattn::{name}", make, lib=_library)
        return run

    return register


def _views(pair: Pair) -> Tuple[Any, Any]:
    return native_view(pair[0]), native_view(pair[1])


def _beside(tensor: Tensor, shape: Tuple[int, ...]) -> Pair:
    return tensor.new_empty(shape, dtype=torch.int32), tensor.new_empty(shape, dtype=torch.int32)


def _on(device: torch.device, seqlen_k: int) -> Pair:
    start, end = (torch.empty((1, 1, seqlen_k), dtype=torch.int32, device=device) for _ in range(2))
    return start, end


# ---- top-W -----------------------------------------------------------------------------------------------------------


def _topk(bias: Tensor, padding: Optional[Tensor], window_size: int, seqlen_q: int, pair: Pair) -> None:
    given = native_view(bias), None if padding is None else native_view(padding)
    address = num_bytes = 0
    if bias.is_cuda:
        num_bytes = _native.topk_workspace(*given)
        workspace = bias.new_empty(num_bytes, dtype=torch.uint8)  # used again in the order of the stream
        address = workspace.data_ptr()
    _native.topk_intervals(*given, *_views(pair), window_size, seqlen_q, address, num_bytes, _stream_of(bias))


def _topk_outputs(bias: Tensor, padding: Optional[Tensor], window_size: int, seqlen_q: int) -> Pair:
    batch = bias.shape[0] if padding is None or bias.shape[0] != 1 else padding.shape[0]
    return _beside(bias, (batch, *bias.shape[1:]))


_define(
    "topk_intervals", "Tensor bias, Tensor? padding, SymInt window_size, SymInt seqlen_q", "CPU", "CUDA"
)(_topk, _topk_outputs)


# ---- windows, prefixes, documents ------------------------------------------------------------------------------------


def _window(rows: int, keys: int, causal: bool, left: int, right: int, device: torch.device, pair: Pair) -> None:
    _native.window_intervals(*_views(pair), rows, causal, left, right, _stream_of(pair[0]))


def _window_outputs(rows: int, keys: int, causal: bool, left: int, right: int, device: torch.device) -> Pair:
    return _on(device, keys)


window = _define(
    "window_intervals",
    "SymInt seqlen_q, SymInt seqlen_k, bool causal, SymInt left, SymInt right, Device device",
    "CompositeExplicitAutograd",
)(_window, _window_outputs)


def _prefix(rows: int, keys: int, length: int, device: torch.device, pair: Pair) -> None:
    _native.prefix_intervals(*_views(pair), rows, length, _stream_of(pair[0]))


def _prefix_outputs(rows: int, keys: int, length: int, device: torch.device) -> Pair:
    return _on(device, keys)


prefix = _define(
    "prefix_intervals", "SymInt seqlen_q, SymInt seqlen_k, SymInt prefix, Device device", "CompositeExplicitAutograd"
)(_prefix, _prefix_outputs)


def _documents(cu_seqlens: Tensor, causal: bool, seqlen: int, pair: Pair) -> None:
    _native.document_intervals(native_view(cu_seqlens), *_views(pair), causal, _stream_of(pair[0]))


def _document_outputs(cu_seqlens: Tensor, causal: bool, seqlen: int) -> Pair:
    return _beside(cu_seqlens, (1, 1, seqlen))


_define("document_intervals", "Tensor cu_seqlens, bool causal, SymInt seqlen", "CPU", "CUDA")(
    _documents, _document_outputs
)


# ---- dense masks -----------------------------------------------------------------------------------------------------


def from_mask(planes: Tensor) -> Optional[Pair]:
    """A dense mask [B, h, Sq, Sk] as intervals, None when it is not one per key; on a CUDA device waits to know that."""
    batch, heads, _, keys = planes.shape
    pair = _beside(planes, (batch, heads, keys))
    exact = planes.new_empty(1, dtype=torch.int32)
    _native.intervals_from_mask(native_view(planes), *_views(pair), exact.data_ptr(), _stream_of(planes))
    return pair if int(exact) else None


def _to_mask(start: Tensor, end: Tensor, seqlen_q: int, mask: Tensor) -> None:
    _native.intervals_to_mask(native_view(start), native_view(end), native_view(mask), _stream_of(mask))


def _to_mask_output(start: Tensor, end: Tensor, seqlen_q: int) -> Tensor:
    return start.new_empty((*start.shape[:2], seqlen_q, start.shape[2]), dtype=torch.bool)


_define("intervals_to_mask", "Tensor start, Tensor end, SymInt seqlen_q", "CPU", "CUDA")(_to_mask, _to_mask_output)


def _blocks(mask: Tensor, block_q: int, block_k: int, blocks: Tensor) -> None:
    _native.mask_blocks(native_view(mask), native_view(blocks.view(torch.bool)), block_q, block_k, _stream_of(mask))


def _blocks_output(mask: Tensor, block_q: int, block_k: int) -> Tensor:
    tiles = (mask.shape[2] + block_q - 1) // block_q, (mask.shape[3] + block_k - 1) // block_k
    return mask.new_empty((*mask.shape[:2], *tiles), dtype=torch.uint8)


_define("mask_blocks", "Tensor mask, SymInt block_q, SymInt block_k", "CPU", "CUDA")(_blocks, _blocks_output)


def _create(
    bias: Tensor, shown: Optional[Tensor], window_size: int, min_value: float, block_size: int, mask: Tensor
) -> None:
    given = native_view(bias), None if shown is None else native_view(shown), native_view(mask)
    _native.create_mask(*given, window_size, min_value, block_size, _stream_of(mask))


def _create_output(
    bias: Tensor, shown: Optional[Tensor], window_size: int, min_value: float, block_size: int
) -> Tensor:
    return bias.new_empty(shape_with(bias.shape, None if shown is None else shown.shape), dtype=torch.bool)


_define(
    "create_mask",
    "Tensor bias, Tensor? attention_mask, SymInt window_size, float min_value, SymInt block_size",
    "CPU",
    "CUDA",
)(_create, _create_output)


# ---- biases ----------------------------------------------------------------------------------------------------------


def _key_bias(dt: Tensor, a: Tensor, padding: Optional[Tensor], exponential: bool, bias: Tensor) -> None:
    views = (None if each is None else native_view(each) for each in (dt, a, padding, bias))
    _native.key_bias(*views, exponential, _stream_of(dt))


def _key_bias_output(dt: Tensor, a: Tensor, padding: Optional[Tensor], exponential: bool) -> Tensor:
    batch, seqlen, heads = dt.shape
    return dt.new_empty((batch, heads, seqlen), dtype=torch.promote_types(dt.dtype, a.dtype))


_define("key_bias", "Tensor dt, Tensor a, Tensor? padding, bool exponential", "CPU", "CUDA")(
    _key_bias, _key_bias_output
)


def _key_bias_backward(
    dt: Tensor, a: Tensor, padding: Optional[Tensor], exponential: bool, dbias: Tensor, pair: Pair
) -> None:
    views = (None if each is None else native_view(each) for each in (dt, a, padding, dbias, *pair))
    _native.key_bias_backward(*views, exponential, _stream_of(dt))


def _key_bias_gradients(dt: Tensor, a: Tensor, padding: Optional[Tensor], exponential: bool, dbias: Tensor) -> Pair:
    return dt.new_empty(dt.shape), a.new_empty(a.shape)


_define("key_bias_backward", "Tensor dt, Tensor a, Tensor? padding, bool exponential, Tensor dbias", "CPU", "CUDA")(
    _key_bias_backward, _key_bias_gradients
)


def _save_key_bias(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    dt, a, padding, ctx.exponential = inputs
    ctx.save_for_backward(dt, a, padding)


def _key_bias_autograd(ctx: Any, dbias: Tensor) -> Tuple[Optional[Tensor], ...]:
    ddt, da = torch.ops.flash_dmattn.key_bias_backward(*ctx.saved_tensors, ctx.exponential, dbias)
    return ddt, da, None, None


torch.library.register_autograd(
    "flash_dmattn::key_bias", _key_bias_autograd, setup_context=_save_key_bias, lib=_library
)
torch.library.register_autograd("flash_dmattn::key_bias_backward", refuse_second_order, lib=_library)
torch.library.register_vmap("flash_dmattn::key_bias", refuse_vmap, lib=_library)


# ---- slots -----------------------------------------------------------------------------------------------------------

_library.define(
    "topk_append(Tensor bias, Tensor? k, Tensor? v, Tensor(a!) key, Tensor(b!) slot_bias, Tensor(c!) length, "
    "Tensor(d!)? slot_k, Tensor(e!)? slot_v, Tensor? real) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_library, "topk_append", "CUDA")
@torch.library.impl(_library, "topk_append", "CPU")
def append(*tensors: Optional[Tensor]) -> Tensor:
    """The slot that each head's token got; `tensors` as the operator's."""
    length = tensors[5]
    slot = length.new_empty(length.shape)
    views = [None if each is None else native_view(each) for each in tensors]
    _native.topk_append(*views[:8], views[8], native_view(slot), _stream_of(slot))
    return slot


@torch.library.register_fake("flash_dmattn::topk_append", lib=_library)
def _append_fake(*tensors: Optional[Tensor]) -> Tensor:
    return tensors[5].new_empty(tensors[5].shape)
