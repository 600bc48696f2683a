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
from ._arguments import shape_with, window_of
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
    "key_bias",
    "mask_blocks",
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


def _numpy_pair(shape: Tuple[int, ...]) -> Tuple[Intervals, Tuple[Any, Any]]:
    """Two uninitialised int32 arrays, as they are and as the extension takes them."""
    import numpy

    pair = numpy.empty(shape, numpy.int32), numpy.empty(shape, numpy.int32)
    return pair, (describe(pair[0], "start"), describe(pair[1], "end"))


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
        return pair, (self.written(pair[0]).arguments(), self.written(pair[1]).arguments())

    def written(self, output: Any) -> Borrowed:
        return borrow(output, "the output", self.device, self.lender.stream, True, self.name)

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
    _native.topk_intervals(*views, *outputs, window_size, rows, address, num_bytes, beside.lender.stream)
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
        _native.window_intervals(*outputs, rows, int(causal), left, right, 0)
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
        _native.prefix_intervals(*outputs, rows, prefix, 0)
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
    given = beside.borrow(cu_seqlens, "cu_seqlens").arguments()
    _native.document_intervals(given, *outputs, int(causal), beside.lender.stream)
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


# ---- biases ----------------------------------------------------------------------------------------------------------


def key_bias(dt: Any, a: Any, exponential: bool = False, key_padding_mask: Any = None) -> Any:
    """The bias of a dynamic mask, of what a projection gives for each key and head: a softplus(dt), [B, h, S].

    Differentiable in dt and a for torch tensors; one kernel forward and one backward on CUDA devices.

    Args:
        dt: [B, S, h], floating; what `dt_proj` gives.
        a: [h], floating.
        exponential: exp(a softplus(dt)) instead, as Doge has it.
        key_padding_mask: bool [B, S], True = a real key; the bias of others is -inf, so that no row sees them.

    Returns:
        [B, h, S], of the dtype that dt and a have together: float32 of float32 and a smaller one.
    """
    if _is_torch(dt):
        import torch

        _library_of(dt, "dt")
        _on_torch()  # defines the operator
        if dt.ndim != 3:
            raise ValueError(f"dt has {dt.ndim} axes; it must be [batch, seqlen, heads]")
        return torch.ops.flash_dmattn.key_bias(dt, a, key_padding_mask, bool(exponential))
    beside = _Beside(dt, "dt")
    arrays = beside.borrow(dt, "dt"), beside.borrow(a, "a"), beside.borrow(key_padding_mask, "key_padding_mask")
    if len(arrays[0].shape) != 3:
        raise ValueError(f"dt has {len(arrays[0].shape)} axes; it must be [batch, seqlen, heads]")
    batch, seqlen, heads = arrays[0].shape
    dtypes = {arrays[0].dtype, arrays[1].dtype}
    bias = beside.lender.empty(
        (batch, heads, seqlen), dtypes.pop() if len(dtypes) == 1 else "float64" if "float64" in dtypes else "float32"
    )
    views = [None if each is None else each.arguments() for each in arrays]
    _native.key_bias(*views, beside.written(bias).arguments(), bool(exponential), beside.lender.stream)
    return beside.lender.hand_over(bias)


# ---- dense masks -----------------------------------------------------------------------------------------------------


def _planes(mask: Any) -> Any:
    """A bool mask [Sq, Sk] or [B, h, Sq, Sk] with four axes."""
    if not str(mask.dtype).endswith("bool"):
        raise TypeError(f"mask is {mask.dtype}; it must be bool, True = visible")
    if mask.ndim not in (2, 4):
        raise ValueError(
            f"mask has {mask.ndim} axes; it needs 2 [seqlen_q, seqlen_k] or 4 [batch, heads, seqlen_q, seqlen_k]"
        )
    return mask.reshape(1, 1, *mask.shape) if mask.ndim == 2 else mask


def intervals_from_mask(mask: Any) -> Optional[Intervals]:
    """A dense bool mask [Sq, Sk] or [B, h, Sq, Sk] as (start, end) [B, h, Sk]; None when it is not one per key.

    Of a CUDA tensor it waits for the device once, to know which.
    """
    library = _library_of(mask, "mask")
    planes = _planes(mask)
    if library != "numpy":
        return _on_torch().from_mask(planes)
    import numpy

    pair, outputs = _numpy_pair((*planes.shape[:2], planes.shape[3]))
    exact = numpy.empty(1, numpy.int32)
    _native.intervals_from_mask(describe(planes, "mask"), *outputs, exact.ctypes.data, 0)
    return pair if exact[0] else None


def intervals_to_mask(start: Any, end: Any, seqlen_q: int) -> Any:
    """The dense bool mask [.., Sq, Sk] of key intervals int32 [.., Sk], of one to three axes; allocates all of it."""
    rows, on_torch = _length(seqlen_q, "seqlen_q"), _is_torch(start)
    if on_torch:
        _library_of(start, "start")
    else:
        beside = _Beside(start, "start")
        start, end = beside.borrow(start, "start"), beside.borrow(end, "end")
    if start.ndim not in (1, 2, 3) or tuple(start.shape) != tuple(end.shape):
        raise ValueError(
            f"start has shape {list(start.shape)} and end {list(end.shape)}; they must be of one shape, with one to "
            "three axes"
        )
    lead, keys = tuple(start.shape[:-1]), start.shape[-1]
    four = ((1, 1) + lead)[-2:] + (rows, keys)
    start, end = (each.reshape(*four[:2], keys) for each in (start, end))
    if on_torch:
        import torch

        _on_torch()  # defines the operator
        return torch.ops.flash_dmattn.intervals_to_mask(start, end, rows).reshape(*lead, rows, keys)
    mask = beside.lender.empty((*lead, rows, keys), "bool")
    output = beside.written(mask).reshape(*four).arguments()
    _native.intervals_to_mask(start.arguments(), end.arguments(), output, beside.lender.stream)
    return beside.lender.hand_over(mask)


def mask_blocks(mask: Any, block_q: int = 128, block_k: int = 128) -> Any:
    """What a dense bool mask [Sq, Sk] or [B, h, Sq, Sk] shows of each block of block_q rows and block_k keys.

    Returns:
        uint8 [.., ceil(Sq / block_q), ceil(Sk / block_k)]: 0 nothing, 1 a part, 2 all. Without a 1 the blocks alone say
        what the mask says.
    """
    library = _library_of(mask, "mask")
    planes = _planes(mask)
    if block_q < 1 or block_k < 1:
        raise ValueError(f"blocks are {block_q} x {block_k}; each side must be at least 1")
    if library != "numpy":
        import torch

        _on_torch()  # defines the operator
        blocks = torch.ops.flash_dmattn.mask_blocks(planes, block_q, block_k)
    else:
        import numpy

        blocks = numpy.empty((*planes.shape[:2], -(-planes.shape[2] // block_q), -(-planes.shape[3] // block_k)), bool)
        _native.mask_blocks(describe(planes, "mask"), describe(blocks, "blocks"), block_q, block_k, 0)
        blocks = blocks.view(numpy.uint8)
    return blocks[0, 0] if mask.ndim == 2 else blocks


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
        attention_bias: [B|1, h, Sq|1, Sk] or [B, h, Sk]; NaN counts as min_dtype.
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
    if type not in ("topk", "relu"):
        raise ValueError(f"type is {type!r}; it must be 'topk' or 'relu'")
    if block_size is not None and block_size <= 0:
        raise ValueError(f"block_size is {block_size}; it must be positive")
    if type == "topk" and window_size < 1:
        raise ValueError(f"window_size is {window_size}; it must be at least 1")
    on_torch = _is_torch(attention_bias)
    if on_torch:
        _library_of(attention_bias, "attention_bias")
        bias, shown = attention_bias.detach(), attention_mask
    else:
        beside = _Beside(attention_bias, "attention_bias")
        bias, shown = (
            beside.borrow(each, name)
            for each, name in ((attention_bias, "attention_bias"), (attention_mask, "attention_mask"))
        )
    if bias.ndim not in (3, 4) or bias.shape[-1] != key_len:
        raise ValueError(
            f"attention_bias has shape {list(bias.shape)}; it must have 4 axes and end with key_len {key_len}"
        )
    if shown is not None and shown.ndim != 4:
        if shown.ndim != 2 or shown.shape[0] != batch_size or shown.shape[1] not in (query_len, key_len):
            raise ValueError(
                f"attention_mask has shape {list(shown.shape)}; it must be [{batch_size}, {key_len}], "
                f"[{batch_size}, {query_len}] or have 4 axes"
            )
    bias = bias.reshape(*bias.shape[:2], 1, key_len) if bias.ndim == 3 else bias
    choice = 0 if type == "relu" else window_size, float(min_dtype), block_size or 1
    if on_torch:
        import torch

        _on_torch()  # defines the operator
        return torch.ops.flash_dmattn.create_mask(bias, shown, *choice)
    mask = beside.lender.empty(shape_with(bias.shape, None if shown is None else shown.shape), "bool")
    views = bias.arguments(), None if shown is None else shown.arguments(), beside.written(mask).arguments()
    _native.create_mask(*views, *choice, beside.lender.stream)
    return beside.lender.hand_over(mask)


if __name__ == "__main__":
    from ._mask_picture import main

    main()
