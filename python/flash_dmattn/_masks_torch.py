"""Key intervals on PyTorch tensors, on the CPU and on CUDA devices: the operators flash_dmattn::*_intervals.

On CUDA devices they enqueue the C library's kernels on the current stream; nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from . import _native
from ._torch import native_view

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
        def run(*given: Any) -> Pair:
            pair = make(*given)
            fill(*given, pair)
            return pair

        tags = (torch.Tag.pt2_compliant_tag,)
        _library.define(f"{name}({arguments}) -> (Tensor, Tensor)", tags=tags)
        for key in keys:
            torch.library.impl(_library, name, key)(run)
        torch.library.register_fake(f"flash_dmattn::{name}", make, lib=_library)
        return run

    return register


def _views(pair: Pair) -> Tuple[Any, Any, int]:
    """What ends the arguments of the extension's functions."""
    return native_view(pair[0]), native_view(pair[1]), _stream_of(pair[0])


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
    start, end, stream = _views(pair)
    _native.topk_intervals(*given, window_size, seqlen_q, start, end, address, num_bytes, stream)


def _topk_outputs(bias: Tensor, padding: Optional[Tensor], window_size: int, seqlen_q: int) -> Pair:
    batch = bias.shape[0] if padding is None or bias.shape[0] != 1 else padding.shape[0]
    return _beside(bias, (batch, *bias.shape[1:]))


_define(
    "topk_intervals", "Tensor bias, Tensor? padding, SymInt window_size, SymInt seqlen_q", "CPU", "CUDA"
)(_topk, _topk_outputs)


# ---- windows, prefixes, documents ------------------------------------------------------------------------------------


def _window(rows: int, keys: int, causal: bool, left: int, right: int, device: torch.device, pair: Pair) -> None:
    _native.window_intervals(rows, causal, left, right, *_views(pair))


def _window_outputs(rows: int, keys: int, causal: bool, left: int, right: int, device: torch.device) -> Pair:
    return _on(device, keys)


window = _define(
    "window_intervals",
    "SymInt seqlen_q, SymInt seqlen_k, bool causal, SymInt left, SymInt right, Device device",
    "CompositeExplicitAutograd",
)(_window, _window_outputs)


def _prefix(rows: int, keys: int, length: int, device: torch.device, pair: Pair) -> None:
    _native.prefix_intervals(rows, length, *_views(pair))


def _prefix_outputs(rows: int, keys: int, length: int, device: torch.device) -> Pair:
    return _on(device, keys)


prefix = _define(
    "prefix_intervals", "SymInt seqlen_q, SymInt seqlen_k, SymInt prefix, Device device", "CompositeExplicitAutograd"
)(_prefix, _prefix_outputs)


def _documents(cu_seqlens: Tensor, causal: bool, seqlen: int, pair: Pair) -> None:
    _native.document_intervals(native_view(cu_seqlens), causal, *_views(pair))


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
    if not planes.is_cuda:
        return pair if _native.intervals_from_mask(native_view(planes), *_views(pair), 0) else None
    exact = planes.new_empty(1, dtype=torch.int32)
    _native.intervals_from_mask(native_view(planes), *_views(pair), exact.data_ptr())
    return pair if int(exact) else None


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
