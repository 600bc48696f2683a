"""Masks: as key intervals, O(Sk) memory, where they can express it, and as dense bool tensors.

Key intervals are a pair (start, end) of int32 arrays [B, h, Sk]: key j is visible to the query's raw rows
start[j] <= i < end[j]. They go to `key_intervals=` of every attention function. NumPy arrays in give NumPy arrays out,
torch tensors give torch tensors on the same device, CPU or CUDA, with the same numbers. Functions that get no array
return torch tensors where torch is loaded, NumPy arrays otherwise; `library="numpy"` or `"torch"` decides it, and
`device=` makes torch tensors there. On CUDA devices nothing waits for the device unless a function says so.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

from . import _native
from ._arguments import window_of
from ._arrays import describe

__all__ = [
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


def _empty(library: Optional[str], *shapes: Tuple[int, ...]) -> Tuple[Any, ...]:
    """One uninitialised int32 array per shape."""
    if library not in (None, "torch", "numpy"):
        raise ValueError(f"library is {library!r}; it must be 'torch', 'numpy' or None")
    if library == "torch" or (library is None and sys.modules.get("torch") is not None):
        import torch

        return tuple(torch.empty(shape, dtype=torch.int32, device="cpu") for shape in shapes)
    import numpy

    return tuple(numpy.empty(shape, numpy.int32) for shape in shapes)


def _cuda_device(device: Any, library: Optional[str]) -> Any:
    """torch.device of a `device` argument when it is a CUDA device, None for the CPU."""
    if device is None:
        return None
    if library not in (None, "torch"):
        raise ValueError(f"library is {library!r}, but device is {device}; only torch tensors are made on a device")
    import torch

    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device is {device}; masks are made on the CPU and on CUDA devices")
    return device if device.type == "cuda" else None


def _native_view(array: Any, name: str) -> Any:
    """What the extension takes: torch tensors as they are, NumPy arrays described."""
    return array.detach() if _is_torch(array) else describe(array, name)


def _length(value: int, name: str) -> int:
    if value < 0:
        raise ValueError(f"{name} is {value}; it must be >= 0")
    return int(value)


def _on_device() -> Any:
    """Functions in torch operations."""
    from . import _masks_torch

    return _masks_torch


# ---- key intervals ---------------------------------------------------------------------------------------------------


def _ranks(bias: Any) -> Any:
    """float32 numbers in the order of a float64 bias: larger stays larger, of equals the smaller index, NaN lowest."""
    if _is_torch(bias):
        import torch

        order = torch.sort(_on_device().sortable(bias.detach()), dim=-1, descending=True, stable=True).indices
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
    library = _library_of(bias, "bias")
    if bias.ndim == 4 and bias.shape[2] == 1:
        bias = bias.reshape(bias.shape[0], bias.shape[1], bias.shape[3])
    if bias.ndim != 3:
        raise ValueError(
            f"bias has shape {list(bias.shape)}; it must be [batch, heads, seqlen_k], or have a 1 before seqlen_k"
        )
    if key_padding_mask is not None and (
        _is_torch(key_padding_mask) != _is_torch(bias) or key_padding_mask.ndim != 2
    ):
        raise ValueError("key_padding_mask must be a bool array [batch, seqlen_k] of the same library as bias")
    if str(bias.dtype).endswith("float64"):
        bias = _ranks(bias)
    rows = _length(bias.shape[-1] if seqlen_q is None else seqlen_q, "seqlen_q")
    if library != "numpy":
        import torch

        from . import _torch  # noqa: F401  (defines the operator)

        return torch.ops.flash_dmattn.topk_intervals(bias.detach(), key_padding_mask, window_size, rows)
    batch = max(bias.shape[0], 1 if key_padding_mask is None else key_padding_mask.shape[0])
    shape = (batch if bias.shape[0] else 0, *bias.shape[1:])
    start, end = _empty("numpy", shape, shape)
    _native.topk_intervals(
        describe(bias, "bias"),
        describe(key_padding_mask, "key_padding_mask"),
        window_size,
        rows,
        describe(start, "start"),
        describe(end, "end"),
        0,
        0,
        0,
    )
    return start, end


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
    there = _cuda_device(device, library)
    # For a CUDA device the library only checks the arguments.
    count = keys if there is None else 0
    start, end = _empty("torch" if device is not None else library, (1, 1, count), (1, 1, count))
    views = (_native_view(start, "start"), _native_view(end, "end"))
    _native.window_intervals(rows, count, int(causal), left, right, *views)
    return (start, end) if there is None else _on_device().window(rows, keys, (left, right), causal, there)


def causal_intervals(seqlen_q: int, seqlen_k: int, library: Optional[str] = None, device: Any = None) -> Intervals:
    """Plain causal: key j is visible to the rows i >= j - (Sk - Sq). (start, end) [1, 1, Sk]."""
    return window_intervals(seqlen_q, seqlen_k, causal=True, library=library, device=device)


def prefix_intervals(
    seqlen_q: int, seqlen_k: int, prefix: int, library: Optional[str] = None, device: Any = None
) -> Intervals:
    """Prefix LM: keys below `prefix` are visible to every row, the others causally. (start, end) [1, 1, Sk]."""
    rows, keys = _length(seqlen_q, "seqlen_q"), _length(seqlen_k, "seqlen_k")
    there = _cuda_device(device, library)
    count = keys if there is None else 0
    start, end = _empty("torch" if device is not None else library, (1, 1, count), (1, 1, count))
    views = (_native_view(start, "start"), _native_view(end, "end"))
    _native.prefix_intervals(rows, count, prefix, *views)
    return (start, end) if there is None else _on_device().prefix(rows, keys, prefix, there)


def document_intervals(cu_seqlens: Any, causal: bool = True, seqlen: Optional[int] = None) -> Intervals:
    """Attention inside documents only: cu_seqlens int32 [n + 1] from 0 to S; Sq == Sk == S. (start, end) [1, 1, S].

    seqlen: S, where the caller knows it. Without it the offsets of a CUDA tensor are read and checked, which waits for
    the device; with it they are not looked at, and keys from the last offset on are never visible.
    """
    library = _library_of(cu_seqlens, "cu_seqlens")
    if cu_seqlens.ndim != 1 or not str(cu_seqlens.dtype).endswith("int32") or len(cu_seqlens) < 1:
        raise ValueError("cu_seqlens must be an int32 array [number of documents + 1]")
    if library == "cuda" and seqlen is not None:
        return _on_device().documents(cu_seqlens, causal, _length(seqlen, "seqlen"))
    steps = cu_seqlens[1:] - cu_seqlens[:-1]
    if int(cu_seqlens[0]) != 0 or bool((steps < 0).any()):
        raise ValueError("cu_seqlens must start with 0 and must not fall")
    keys = int(cu_seqlens[-1])
    if seqlen is not None and seqlen != keys:
        raise ValueError(f"seqlen is {seqlen}, but cu_seqlens ends with {keys}")
    if library == "cuda":
        return _on_device().documents(cu_seqlens, causal, keys)
    start, end = _empty(library, (1, 1, keys), (1, 1, keys))
    # The library reads the offsets as a C array.
    offsets = cu_seqlens.contiguous() if library == "torch" else cu_seqlens.copy()
    views = (_native_view(start, "start"), _native_view(end, "end"))
    _native.document_intervals(_native_view(offsets, "cu_seqlens"), int(causal), *views)
    return start, end


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
    if library == "cuda":
        return _on_device().from_mask(planes)
    batch, heads, _, keys = planes.shape
    start, end = _empty(library, (batch, heads, keys), (batch, heads, keys))
    for b in range(batch):
        for h in range(heads):
            views = (_native_view(each[b, h], "interval") for each in (start, end))
            if not _native.intervals_from_mask(_native_view(planes[b, h], "mask"), *views):
                return None
    return start, end


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

        order = torch.sort(_on_device().sortable(scores), dim=-1, descending=True, stable=True).indices[..., :count]
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
