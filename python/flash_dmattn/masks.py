"""Masks: as key intervals, O(Sk) memory, where they can express it, and as dense bool tensors.

Key intervals are a pair (start, end) of int32 arrays [B, h, Sk]: key j is visible to the query's raw rows
start[j] <= i < end[j]. They go to `key_intervals=` of every attention function. NumPy arrays in give NumPy arrays out,
torch tensors give torch tensors on the same device, CPU or CUDA, with the same numbers; so do CuPy's and what else
speaks DLPack, as far as outputs go (see `attention`). Functions that get no array return torch tensors where torch is
loaded, NumPy arrays otherwise; `library="numpy"` or `"torch"` decides it, and `device=` makes torch tensors there. On
CUDA devices work runs on the current stream and nothing waits for it unless a function says so.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

from . import _native
from ._arguments import window_of
from ._arrays import Borrowed, borrow, describe, lender_of
from ._device_arrays import CPU, device_of
from ._topk_state import TopKState

__all__ = [
    "TopKState",
    "causal_intervals",
    "create_mask",
    "document_intervals",
    "intervals_from_mask",
    "intervals_to_mask",
    "prefix_intervals",
    "topk_intervals",
    "window_intervals",
]

Intervals = Tuple[Any, Any]


# ---- two array libraries ---------------------------------------------------------------------------------------------


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _library_of(array: Any, name: str) -> str:
    """"torch" for tensors on the CPU, "cuda" for those on CUDA devices, "numpy"."""
    if _is_torch(array):
        if array.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name} is on {array.device}; masks are made on the CPU and on CUDA devices")
        return "cuda" if array.device.type == "cuda" else "torch"
    if hasattr(array, "__array_interface__"):
        return "numpy"
    raise TypeError(f"{name} is a {type(array).__name__}; it must be a torch tensor or a NumPy array")


def _torch_device(device: Any, library: Optional[str]) -> Any:
    """torch.device of a `device` argument, None for None."""
    if device is None:
        return None
    if library not in (None, "torch"):
        raise ValueError(f"library is {library!r}, but device is {device}; only torch tensors are made on a device")
    import torch

    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device is {device}; masks are made on the CPU and on CUDA devices")
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _makes_torch(device: Any, library: Optional[str]) -> bool:
    """Whether a function that got no array makes torch tensors."""
    if library not in (None, "torch", "numpy"):
        raise ValueError(f"library is {library!r}; it must be 'torch', 'numpy' or None")
    return library == "torch" or device is not None or (library is None and sys.modules.get("torch") is not None)


def _numpy_pair(shape: Tuple[int, ...]) -> Tuple[Intervals, Tuple[Any, ...]]:
    """Two uninitialised int32 arrays, and what ends the arguments of the extension's functions."""
    import numpy

    pair = numpy.empty(shape, numpy.int32), numpy.empty(shape, numpy.int32)
    return pair, (describe(pair[0], "start"), describe(pair[1], "end"), 0)


class _Beside:
    """Outputs and workspace beside an array that is not PyTorch's, where it is."""

    def __init__(self, array: Any, name: str) -> None:
        self.name, self.device = name, device_of(array, name)
        self.lender = lender_of(array, self.device, None)

    def borrow(self, array: Any, name: str) -> Optional[Borrowed]:
        return borrow(array, name, self.device, self.lender.stream, False, self.name)

    def pair(self, shape: Tuple[int, ...]) -> Tuple[Intervals, Tuple[Any, ...]]:
        """As _numpy_pair()."""
        pair = self.lender.empty(shape, "int32"), self.lender.empty(shape, "int32")
        views = (borrow(each, "interval", self.device, self.lender.stream, True, self.name) for each in pair)
        return pair, (*(each.arguments() for each in views), self.lender.stream)

    def hand_over(self, pair: Intervals) -> Intervals:
        return self.lender.hand_over(pair[0]), self.lender.hand_over(pair[1])


def _length(value: int, name: str) -> int:
    if value < 0:
        raise ValueError(f"{name} is {value}; it must be >= 0")
    return int(value)


def _on_torch() -> Any:
    """Functions on torch tensors."""
    from . import _masks_torch

    return _masks_torch


# ---- key intervals ---------------------------------------------------------------------------------------------------


def _ranks(bias: Any) -> Any:
    """float32 numbers in the order of a float64 bias: larger stays larger, of equals the smaller index, NaN lowest."""
    if _is_torch(bias):
        import torch

        order = torch.sort(_on_torch().sortable(bias.detach()), dim=-1, descending=True, stable=True).indices
        return -torch.argsort(order, dim=-1).to(torch.float32)
    import numpy

    lowest = numpy.where(numpy.isnan(bias), -numpy.inf, bias)
    order = numpy.argsort(-lowest, axis=-1, kind="stable")
    return -numpy.argsort(order, axis=-1).astype(numpy.float32)


def topk_intervals(
    bias: Any, window_size: int, seqlen_q: Optional[int] = None, key_padding_mask: Any = None
) -> Intervals:
    """The exact causal top-W mask of a per-key bias: row i keeps the W largest biases among the keys it may see.

    Such a bias does not depend on the query: a key that was dropped stays dropped, so the mask is one interval per key.

    Args:
        bias: [B|1, h, Sk] or [B|1, h, 1, Sk], floating; larger wins, of equals the smaller index, NaN ranks lowest. No
            gradient flows through the choice.
        window_size: W >= 1 keys per row; W >= Sk is plain causal.
        seqlen_q: rows of the query; default Sk. Row i may see the keys j <= i + Sk - seqlen_q.
        key_padding_mask: bool [B, Sk], True = a real key; others are never visible and do not count.

    Returns:
        (start, end), int32 [B, h, Sk], in raw rows; end is 2**31 - 1 for a key that is never dropped.
    """
    if _is_torch(bias):
        return _topk_on_torch(bias, window_size, seqlen_q, key_padding_mask)
    beside = _Beside(bias, "bias")
    if hasattr(bias, "__array_interface__") and str(bias.dtype) == "float64":
        bias = _ranks(bias)
    given, padding = beside.borrow(bias, "bias"), beside.borrow(key_padding_mask, "key_padding_mask")
    if len(given.shape) != 3 and (len(given.shape) != 4 or given.shape[2] != 1):
        raise ValueError(_BIAS_SHAPE.format(list(given.shape)))
    if padding is not None and len(padding.shape) != 2:
        raise ValueError(_PADDING_SHAPE)
    batch = given.shape[0] if padding is None or given.shape[0] != 1 else padding.shape[0]
    pair, outputs = beside.pair((batch, given.shape[1], given.shape[-1]))
    views = given.arguments(), None if padding is None else padding.arguments()
    rows = _length(given.shape[-1] if seqlen_q is None else seqlen_q, "seqlen_q")
    num_bytes = 0 if beside.device[0] == CPU else _native.topk_workspace(*views)
    address, memory = (0, None) if num_bytes == 0 else beside.lender.allocate(num_bytes)
    _native.topk_intervals(*views, window_size, rows, *outputs[:2], address, num_bytes, outputs[2])
    del memory  # lent until here; what lent it uses it again in the order of the stream
    return beside.hand_over(pair)


_BIAS_SHAPE = "bias has shape {}; it must be [batch, heads, seqlen_k], or have a 1 before seqlen_k"
_PADDING_SHAPE = "key_padding_mask must be a bool array [batch, seqlen_k] of the same library as bias"


def _topk_on_torch(bias: Any, window_size: int, seqlen_q: Optional[int], key_padding_mask: Any) -> Intervals:
    import torch

    _library_of(bias, "bias")
    if bias.ndim == 4 and bias.shape[2] == 1:
        bias = bias.reshape(bias.shape[0], bias.shape[1], bias.shape[3])
    if bias.ndim != 3:
        raise ValueError(_BIAS_SHAPE.format(list(bias.shape)))
    if key_padding_mask is not None and (not _is_torch(key_padding_mask) or key_padding_mask.ndim != 2):
        raise ValueError(_PADDING_SHAPE)
    if bias.dtype is torch.float64:
        bias = _ranks(bias)
    rows = _length(bias.shape[-1] if seqlen_q is None else seqlen_q, "seqlen_q")
    _on_torch()  # defines the operator
    return torch.ops.flash_dmattn.topk_intervals(bias.detach(), key_padding_mask, window_size, rows)


def window_intervals(
    seqlen_q: int,
    seqlen_k: int,
    window_size: Tuple[Optional[int], Optional[int]] = (-1, -1),
    causal: bool = False,
    library: Optional[str] = None,
    device: Any = None,
) -> Intervals:
    """Sliding window (left, right), -1 or None = unbounded, and causal, bottom-right aligned: (start, end) [1, 1, Sk]."""
    rows, keys = _length(seqlen_q, "seqlen_q"), _length(seqlen_k, "seqlen_k")
    left, right = window_of(window_size)
    there = _torch_device(device, library)
    if not _makes_torch(device, library):
        pair, outputs = _numpy_pair((1, 1, keys))
        _native.window_intervals(rows, int(causal), left, right, *outputs)
        return pair
    import torch

    make = _on_torch().window
    make = torch.ops.flash_dmattn.window_intervals if torch.compiler.is_compiling() else make
    return make(rows, keys, bool(causal), left, right, there or torch.device("cpu"))


def causal_intervals(seqlen_q: int, seqlen_k: int, library: Optional[str] = None, device: Any = None) -> Intervals:
    """Plain causal: key j is visible to the rows i >= j - (Sk - Sq). (start, end) [1, 1, Sk]."""
    return window_intervals(seqlen_q, seqlen_k, causal=True, library=library, device=device)


def prefix_intervals(
    seqlen_q: int, seqlen_k: int, prefix: int, library: Optional[str] = None, device: Any = None
) -> Intervals:
    """Prefix LM: keys below `prefix` are visible to every row, the others causally. (start, end) [1, 1, Sk]."""
    rows, keys = _length(seqlen_q, "seqlen_q"), _length(seqlen_k, "seqlen_k")
    there = _torch_device(device, library)
    if not _makes_torch(device, library):
        pair, outputs = _numpy_pair((1, 1, keys))
        _native.prefix_intervals(rows, prefix, *outputs)
        return pair
    import torch

    make = _on_torch().prefix
    make = torch.ops.flash_dmattn.prefix_intervals if torch.compiler.is_compiling() else make
    return make(rows, keys, prefix, there or torch.device("cpu"))


def document_intervals(cu_seqlens: Any, causal: bool = True, seqlen: Optional[int] = None) -> Intervals:
    """Attention inside documents only: cu_seqlens int32 [n + 1] from 0 to S; Sq == Sk == S. (start, end) [1, 1, S].

    seqlen: S, where the caller knows it. Without it the offsets of a CUDA tensor are read and checked, which waits for
    the device; with it they are not looked at, and keys from the last offset on are never visible. Arrays on CUDA
    devices that are not PyTorch's need it.
    """
    on_torch, on_host = _is_torch(cu_seqlens), hasattr(cu_seqlens, "__array_interface__")
    if on_torch:
        on_host = _library_of(cu_seqlens, "cu_seqlens") == "torch"
    if on_torch or on_host:
        if cu_seqlens.ndim != 1 or not str(cu_seqlens.dtype).endswith("int32") or len(cu_seqlens) < 1:
            raise ValueError("cu_seqlens must be an int32 array [number of documents + 1]")
        if on_host or seqlen is None:
            seqlen = _last_offset(cu_seqlens, seqlen)
    elif seqlen is None:
        raise ValueError("seqlen is None; without NumPy and PyTorch the offsets are not read, so it must be given")
    keys = _length(seqlen, "seqlen")
    if on_torch:
        import torch

        _on_torch()  # defines the operator
        return torch.ops.flash_dmattn.document_intervals(cu_seqlens, bool(causal), keys)
    beside = _Beside(cu_seqlens, "cu_seqlens")
    pair, outputs = beside.pair((1, 1, keys))
    _native.document_intervals(beside.borrow(cu_seqlens, "cu_seqlens").arguments(), int(causal), *outputs)
    return beside.hand_over(pair)


def _last_offset(cu_seqlens: Any, seqlen: Optional[int]) -> int:
    """The number of keys that offsets end with, which is what `seqlen` says."""
    steps = cu_seqlens[1:] - cu_seqlens[:-1]
    if int(cu_seqlens[0]) != 0 or bool((steps < 0).any()):
        raise ValueError("cu_seqlens must start with 0 and must not fall")
    keys = int(cu_seqlens[-1])
    if seqlen is not None and seqlen != keys:
        raise ValueError(f"seqlen is {seqlen}, but cu_seqlens ends with {keys}")
    return keys


def intervals_from_mask(mask: Any) -> Optional[Intervals]:
    """A dense bool mask [Sq, Sk] or [B, h, Sq, Sk] as (start, end) [B, h, Sk]; None when it is not one per key.

    Of a CUDA tensor it waits for the device once, to know which.
    """
    library = _library_of(mask, "mask")
    if not str(mask.dtype).endswith("bool"):
        raise TypeError(f"mask is {mask.dtype}; it must be bool, True = visible")
    if mask.ndim not in (2, 4):
        raise ValueError(
            f"mask has {mask.ndim} axes; it needs 2 [seqlen_q, seqlen_k] or 4 [batch, heads, seqlen_q, seqlen_k]"
        )
    planes = mask.reshape(1, 1, *mask.shape) if mask.ndim == 2 else mask
    if library != "numpy":
        return _on_torch().from_mask(planes)
    pair, outputs = _numpy_pair((*planes.shape[:2], planes.shape[3]))
    return pair if _native.intervals_from_mask(describe(planes, "mask"), *outputs, 0) else None


def intervals_to_mask(start: Any, end: Any, seqlen_q: int) -> Any:
    """The dense bool mask [.., Sq, Sk] of key intervals [.., Sk]; allocates all of it."""
    if _library_of(start, "start") != "numpy":
        import torch

        row = torch.arange(seqlen_q, device=start.device)[:, None]
    else:
        import numpy

        row = numpy.arange(seqlen_q)[:, None]
    return (start[..., None, :] <= row) & (row < end[..., None, :])


# ---- dense masks -----------------------------------------------------------------------------------------------------


def _padding_with_four_axes(mask: Any, batch: int, seqlen_q: int, seqlen_k: int) -> Any:
    """A mask [B, Sk], or [B, Sq] of the newest keys (older ones are real), as [B, 1, 1, Sk]."""
    if mask.ndim == 4:
        return mask
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (seqlen_q, seqlen_k):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; it must be [{batch}, {seqlen_k}], "
            f"[{batch}, {seqlen_q}] or have 4 axes"
        )
    missing = seqlen_k - mask.shape[1]
    if missing > 0:
        if _is_torch(mask):
            import torch

            mask = torch.cat([mask.new_ones(batch, missing), mask], dim=1)
        else:
            import numpy

            mask = numpy.concatenate([numpy.ones((batch, missing), bool), mask], axis=1)
    return mask[:, None, None, -seqlen_k:] if seqlen_k else mask[:, None, None, :0]


def _largest(scores: Any, count: int) -> Any:
    """True at the `count` largest entries of the last axis; of equals the smaller index."""
    if _is_torch(scores):
        import torch

        order = torch.sort(_on_torch().sortable(scores), dim=-1, descending=True, stable=True).indices[..., :count]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
    import numpy

    order = numpy.argsort(-scores.astype(numpy.float64), axis=-1, kind="stable")[..., :count]
    keep = numpy.zeros(scores.shape, bool)
    numpy.put_along_axis(keep, order, True, axis=-1)
    return keep


def _smooth_blocks(keep: Any, block_size: int) -> Any:
    """Each block of keys becomes all True when more than half of it is, else all False. The last block may be short."""
    smoothed = keep.clone() if _is_torch(keep) else keep.copy()
    whole = keep.shape[-1] // block_size * block_size
    for part, size in ((slice(0, whole), block_size), (slice(whole, None), keep.shape[-1] - whole)):
        if size > 0:
            most = keep[..., part].reshape(*keep.shape[:-1], -1, size).sum(-1) * 2 > size
            smoothed[..., part] = most.repeat_interleave(size, -1) if _is_torch(keep) else most.repeat(size, -1)
    return smoothed


def create_mask(
    attention_bias: Any,
    attention_mask: Any,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float,
    block_size: Optional[int] = None,
    type: str = "topk",  # noqa: A002  (the name upstream gave it)
) -> Any:
    """A dense dynamic mask, bool, True = visible, with the meaning it has in flash-dmattn 1.2.

    Args:
        attention_bias: [B|1, h, Sq|1, Sk] or [B, h, Sk].
        attention_mask: None, bool [B, Sk], bool [B, Sq] (the newest keys; older ones count as real), or 4-D bool.
        batch_size, query_len, key_len: B, Sq, Sk.
        window_size: keys to keep per row (all of them when Sk <= window_size). Of equal biases the smaller index wins.
        min_dtype: the value a hidden key's bias is replaced by; keys with that very bias are not kept.
        block_size: smooths along the keys: a block with more than half of its keys kept is kept whole, others are
            dropped. This may show keys that attention_mask hides: pass causal and padding to the attention call too.
        type: "topk", or "relu" (keeps the keys with bias > 0).

    Returns:
        The mask, broadcast over bias and attention_mask. `topk_intervals` gives the causal top-W mask in O(Sk) memory.
    """
    library = _library_of(attention_bias, "attention_bias")
    if library == "cuda" and attention_mask is not None and attention_mask.device != attention_bias.device:
        raise ValueError(
            f"attention_mask is on {attention_mask.device}, but attention_bias is on {attention_bias.device}"
        )
    if type not in ("topk", "relu"):
        raise ValueError(f"type is {type!r}; it must be 'topk' or 'relu'")
    if block_size is not None and block_size <= 0:
        raise ValueError(f"block_size is {block_size}; it must be positive")
    if type == "topk" and window_size < 1:
        raise ValueError(f"window_size is {window_size}; it must be at least 1")
    bias = attention_bias.detach() if library != "numpy" else attention_bias
    bias = bias[:, :, None, :] if bias.ndim == 3 else bias
    if bias.ndim != 4 or bias.shape[-1] != key_len:
        raise ValueError(
            f"attention_bias has shape {list(bias.shape)}; it must have 4 axes and end with key_len {key_len}"
        )
    if library != "numpy":
        from torch import where
    else:
        from numpy import where
    bias = where(bias != bias, min_dtype, bias)
    if attention_mask is not None:
        bias = where(_padding_with_four_axes(attention_mask, batch_size, query_len, key_len), bias, min_dtype)
    if type == "relu":
        keep = bias > 0
    else:
        keep = _largest(bias, min(window_size, key_len)) & (bias != min_dtype)
    return _smooth_blocks(keep, block_size) if block_size is not None and block_size > 1 else keep


if __name__ == "__main__":
    from ._mask_picture import main

    main()
