"""Masks: as key intervals, O(Sk) memory, where they can express it, and as dense bool tensors.

Key intervals are a pair (start, end) of int32 arrays [B, h, Sk]: key j is visible to the query's raw rows
start[j] <= i < end[j]. They go to `key_intervals=` of every attention function, which refuses a pair that was made here
for another number of rows (`KeyIntervals`). NumPy arrays in give NumPy arrays out, torch tensors give torch tensors on
the same device, CPU or CUDA, with the same numbers; so do JAX's, CuPy's and what else speaks DLPack, as far as outputs
go (see `attention`). Functions that get no array return torch tensors where torch is
loaded, NumPy arrays otherwise; `library="numpy"` or `"torch"` decides it, and `device=` makes torch tensors there. On
CUDA devices work runs on the current stream and nothing waits for it unless a function says so.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Optional, Tuple, TypeVar

from . import _native
from ._arguments import (
    KeyIntervals,
    at_least,
    check_layout,
    flag_of,
    integer_of,
    number_of,
    said,
    shape_with,
    window_of,
)
from ._arrays import Borrowed, borrow, borrow_needed, check_byte_order, describe
from ._device_arrays import CPU, device_of, lender_of
from ._key_rules import rule_intervals
from ._mask_plan import MaskPlan
from ._row_masks import blocks_from_lists, from_block_mask, from_flex_ranges, rule_row_intervals
from ._topk_state import TopKState

Array = TypeVar("Array")

__all__ = [
    "KeyIntervals",
    "MaskPlan",
    "TopKState",
    "blocks_from_lists",
    "causal_intervals",
    "create_mask",
    "document_intervals",
    "from_block_mask",
    "from_flex_ranges",
    "intervals_from_mask",
    "intervals_to_mask",
    "key_bias",
    "mask_blocks",
    "prefix_intervals",
    "rule_intervals",
    "rule_row_intervals",
    "topk_intervals",
    "window_intervals",
]


# ---- two array libraries ---------------------------------------------------------------------------------------------


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _on_device(tensor: Any, name: str) -> str:
    """"cpu" or "cuda", of a torch tensor."""
    check_layout(tensor, name)
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name} is on {tensor.device}; masks are made on the CPU and on CUDA devices")
    return str(tensor.device.type)


def _check_torch(tensor: Any, name: str, beside: str) -> None:
    if tensor is not None and not _is_torch(tensor):
        raise TypeError(f"{name} is {said(tensor)}; it must be a torch tensor, as {beside} is")
    if tensor is not None:
        check_layout(tensor, name)


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


def _numpy_pair(shape: Tuple[int, ...]) -> Tuple[Tuple[Any, Any], Tuple[Any, Any]]:
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

    def needed(self, array: Any, name: str) -> Borrowed:
        return borrow_needed(array, name, self.device, self.lender.stream, False, self.name)

    def pair(self, shape: Tuple[int, ...]) -> Tuple[Tuple[Any, Any], Tuple[Any, ...]]:
        """As _numpy_pair()."""
        pair = self.lender.empty(shape, "int32"), self.lender.empty(shape, "int32")
        return pair, (self.written(pair[0]).arguments(), self.written(pair[1]).arguments())

    def written(self, output: Any) -> Borrowed:
        return borrow_needed(output, "the output", self.device, self.lender.stream, True, self.name)

    def hand_over(self, pair: Tuple[Any, Any], seqlen_q: Optional[int]) -> KeyIntervals:
        return KeyIntervals(self.lender.hand_over(pair[0]), self.lender.hand_over(pair[1]), seqlen_q)


def _of_rows(pair: Any, seqlen_q: int) -> KeyIntervals:
    start, end = pair
    return KeyIntervals(start, end, seqlen_q)


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
    places = numpy.argsort(-lowest, axis=-1, kind="stable")
    return -numpy.argsort(places, axis=-1).astype(numpy.float32)


def topk_intervals(
    bias: Any, window_size: int, seqlen_q: Optional[int] = None, key_padding_mask: Any = None
) -> KeyIntervals:
    """The exact causal top-W mask of a per-key bias: row i keeps the W largest biases among the keys it may see.

    Such a bias does not depend on the query: a key that was dropped stays dropped, so the mask is one interval per key.

    Args:
        bias: [B|1, h, Sk] or [B|1, h, 1, Sk], floating, never with an axis of rows; larger wins, of equals the smaller
            index, NaN ranks lowest. No gradient flows through the choice.
        window_size: W >= 1 keys per row; W >= Sk is plain causal.
        seqlen_q: rows of the query; default Sk. Row i may see the keys j <= i + Sk - seqlen_q.
        key_padding_mask: bool [B, Sk], True = a real key; others are never visible and do not count. Default None.

    Returns:
        KeyIntervals (start, end), int32 [B, h, Sk], in raw rows; end is 2**31 - 1 for a key that is never dropped.

    Raises:
        TypeError, ValueError: a shape, a dtype or a number is wrong.
        NotImplementedError: bias is neither on the CPU nor on a CUDA device.

    Examples:
        >>> import torch
        >>> from flash_dmattn import masks
        >>> start, end = masks.topk_intervals(torch.tensor([[[3.0, 1.0, 2.0, 0.0]]]), 2)
        >>> masks.intervals_to_mask(start, end, 4).int().tolist()
        [[[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0]]]]
    """
    window_size = at_least(1, window_size, "window_size")
    if _is_torch(bias):
        return _topk_on_torch(bias, window_size, seqlen_q, key_padding_mask)
    beside = _Beside(bias, "bias")
    check_byte_order(bias, "bias")
    if hasattr(bias, "__array_interface__") and str(bias.dtype) == "float64":
        bias = _ranks(bias)
    given, padding = beside.needed(bias, "bias"), beside.borrow(key_padding_mask, "key_padding_mask")
    if len(given.shape) != 3 and (len(given.shape) != 4 or given.shape[2] != 1):
        raise ValueError(_BIAS_SHAPE.format(list(given.shape)))
    if padding is not None and len(padding.shape) != 2:
        raise ValueError(_PADDING_SHAPE)
    batch = given.shape[0] if padding is None or given.shape[0] != 1 else padding.shape[0]
    pair, outputs = beside.pair((batch, given.shape[1], given.shape[-1]))
    views = given.arguments(), None if padding is None else padding.arguments()
    rows = at_least(0, given.shape[-1] if seqlen_q is None else seqlen_q, "seqlen_q")
    num_bytes = 0 if beside.device[0] == CPU else _native.topk_workspace(*views)
    address, memory = (0, None) if num_bytes == 0 else beside.lender.allocate(num_bytes)
    _native.topk_intervals(*views, *outputs, window_size, rows, address, num_bytes, beside.lender.stream)
    del memory  # lent until here; what lent it uses it again in the order of the stream
    return beside.hand_over(pair, rows)


_BIAS_SHAPE = "bias has shape {}; it must be [batch, heads, seqlen_k], or have a 1 before seqlen_k"
_PADDING_SHAPE = "key_padding_mask must be a bool array [batch, seqlen_k] of the same library as bias"


def _topk_on_torch(bias: Any, window_size: int, seqlen_q: Optional[int], key_padding_mask: Any) -> KeyIntervals:
    import torch

    _on_device(bias, "bias")
    shape = list(bias.shape)
    if bias.ndim == 4 and bias.shape[2] == 1:
        bias = bias.reshape(bias.shape[0], bias.shape[1], bias.shape[3])
    if bias.ndim != 3:
        raise ValueError(_BIAS_SHAPE.format(shape))
    if key_padding_mask is not None and (not _is_torch(key_padding_mask) or key_padding_mask.ndim != 2):
        raise ValueError(_PADDING_SHAPE)
    if bias.dtype is torch.float64:
        bias = _ranks(bias)
    rows = at_least(0, bias.shape[-1] if seqlen_q is None else seqlen_q, "seqlen_q")
    _on_torch()  # defines the operator
    pair = torch.ops.flash_dmattn.topk_intervals(bias.detach(), key_padding_mask, window_size, rows)
    return _of_rows(pair, rows)


def _by_rule(name: str, numbers: Tuple[int, ...], library: Optional[str], device: Any) -> KeyIntervals:
    """Intervals that follow from numbers alone: of rows and keys, and of the rule."""
    there = _torch_device(device, library)
    rows, keys, *rule = numbers
    if not _makes_torch(device, library):
        pair, outputs = _numpy_pair((1, 1, keys))
        getattr(_native, f"{name}_intervals")(*outputs, rows, *rule, 0)
        return _of_rows(pair, rows)
    import torch

    make = getattr(_on_torch(), name)
    make = getattr(torch.ops.flash_dmattn, f"{name}_intervals") if torch.compiler.is_compiling() else make
    return _of_rows(make(*numbers, there or torch.device("cpu")), rows)


def window_intervals(
    seqlen_q: int,
    seqlen_k: int,
    window_size: Tuple[Optional[int], Optional[int]] = (-1, -1),
    causal: bool = False,
    library: Optional[str] = None,
    device: Any = None,
) -> KeyIntervals:
    """A sliding window, and causal, bottom-right aligned.

    Args:
        seqlen_q, seqlen_k: Sq and Sk, at least 0.
        window_size: (left, right): key j is visible to row i when i + Sk - Sq - left <= j <= i + Sk - Sq + right; -1 or
            None = unbounded, the default.
        causal: and when j <= i + Sk - Sq. Default False.
        library: "torch" or "numpy": whose arrays are made. Default None: PyTorch's where it is loaded.
        device: where PyTorch's tensors are made; default None: on the CPU.

    Returns:
        KeyIntervals (start, end), int32 [1, 1, Sk].

    Raises:
        TypeError, ValueError: a number or the library is wrong, or a device is given beside "numpy".
        NotImplementedError: device is neither the CPU nor a CUDA device.

    Examples:
        >>> from flash_dmattn import masks
        >>> start, end = masks.window_intervals(4, 4, (1, 0), library="numpy")  # itself and the one before
        >>> start.tolist(), end.tolist()
        ([[[0, 1, 2, 3]]], [[[2, 3, 4, 5]]])
    """
    rows, keys = at_least(0, seqlen_q, "seqlen_q"), at_least(0, seqlen_k, "seqlen_k")
    (left, right), causal = window_of(window_size), flag_of(causal, "causal")
    return _by_rule("window", (rows, keys, causal, left, right), library, device)


def causal_intervals(seqlen_q: int, seqlen_k: int, library: Optional[str] = None, device: Any = None) -> KeyIntervals:
    """Plain causal: key j is visible to the rows i >= j - (Sk - Sq).

    Args:
        seqlen_q, seqlen_k: Sq and Sk, at least 0.
        library, device: as in `window_intervals`.

    Returns:
        KeyIntervals (start, end), int32 [1, 1, Sk].

    Raises:
        TypeError, ValueError, NotImplementedError: as in `window_intervals`.

    Examples:
        >>> from flash_dmattn import masks
        >>> masks.causal_intervals(3, 3, library="numpy").start.tolist()
        [[[0, 1, 2]]]
    """
    return window_intervals(seqlen_q, seqlen_k, causal=True, library=library, device=device)


def prefix_intervals(
    seqlen_q: int, seqlen_k: int, prefix: int, library: Optional[str] = None, device: Any = None
) -> KeyIntervals:
    """Prefix LM: keys below `prefix` are visible to every row, the others causally.

    Args:
        seqlen_q, seqlen_k: Sq and Sk, at least 0.
        prefix: how many keys every row sees.
        library, device: as in `window_intervals`.

    Returns:
        KeyIntervals (start, end), int32 [1, 1, Sk].

    Raises:
        TypeError, ValueError, NotImplementedError: as in `window_intervals`.

    Examples:
        >>> from flash_dmattn import masks
        >>> masks.prefix_intervals(4, 4, 2, library="numpy").start.tolist()
        [[[0, 0, 2, 3]]]
    """
    rows, keys = at_least(0, seqlen_q, "seqlen_q"), at_least(0, seqlen_k, "seqlen_k")
    prefix = integer_of(prefix, "prefix")
    return _by_rule("prefix", (rows, keys, prefix), library, device)


def document_intervals(cu_seqlens: Any, causal: bool = True, seqlen: Optional[int] = None) -> KeyIntervals:
    """Attention inside documents only, where Sq == Sk == S.

    Args:
        cu_seqlens: int32 [n + 1], rising from 0 to S: where documents begin.
        causal: causal inside a document, the default; False: rows see all of their document.
        seqlen: S, where the caller knows it. Default None: the offsets of a CUDA tensor are read and checked, which
            waits for the device; with it they are not looked at, and keys from the last offset on are never visible.
            Arrays on CUDA devices that are not PyTorch's need it.

    Returns:
        KeyIntervals (start, end), int32 [1, 1, S].

    Raises:
        TypeError, ValueError: the offsets do not start with 0, fall, or do not end with seqlen; seqlen is missing.
        NotImplementedError: cu_seqlens are neither on the CPU nor on a CUDA device.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import masks
        >>> start, end = masks.document_intervals(numpy.array([0, 2, 4], numpy.int32))
        >>> start.tolist(), end.tolist()
        ([[[0, 1, 2, 3]]], [[[2, 2, 4, 4]]])
    """
    on_torch, on_host = _is_torch(cu_seqlens), hasattr(cu_seqlens, "__array_interface__")
    causal = flag_of(causal, "causal")
    check_byte_order(cu_seqlens, "cu_seqlens")
    if on_torch:
        on_host = _on_device(cu_seqlens, "cu_seqlens") == "cpu"
    if on_torch or on_host:
        if cu_seqlens.ndim != 1 or not str(cu_seqlens.dtype).endswith("int32") or len(cu_seqlens) < 1:
            raise ValueError("cu_seqlens must be an int32 array [number of documents + 1]")
        if on_host or seqlen is None:
            seqlen = _last_offset(cu_seqlens, seqlen)
    elif device_of(cu_seqlens, "cu_seqlens") and seqlen is None:
        raise ValueError("seqlen is None; without NumPy and PyTorch the offsets are not read, so it must be given")
    keys = at_least(0, seqlen, "seqlen")
    if on_torch:
        import torch

        _on_torch()  # defines the operator
        return _of_rows(torch.ops.flash_dmattn.document_intervals(cu_seqlens, causal, keys), keys)
    beside = _Beside(cu_seqlens, "cu_seqlens")
    pair, outputs = beside.pair((1, 1, keys))
    given = beside.needed(cu_seqlens, "cu_seqlens").arguments()
    _native.document_intervals(given, *outputs, causal, beside.lender.stream)
    return beside.hand_over(pair, keys)


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


def key_bias(dt: Array, a: Any, exponential: bool = False, key_padding_mask: Any = None) -> Array:
    """The bias of a dynamic mask, of what a projection gives for each key and head: a softplus(dt), [B, h, S].

    Differentiable in dt and a for PyTorch's tensors; one kernel forward and one backward on CUDA devices.

    Args:
        dt: [B, S, h], floating; what `dt_proj` gives. float64 on the CPU only.
        a: [h], floating.
        exponential: exp(a softplus(dt)) instead, as Doge has it. Default False.
        key_padding_mask: bool [B, S], True = a real key; the bias of others is -inf, so that no row sees them. Default
            None.

    Returns:
        [B, h, S], of the dtype that dt and a have together: float32 of float32 and a smaller one. As attn_bias write it
        bias[:, :, None], which says whatever h and Sq are that there is no axis of rows.

    Raises:
        TypeError, ValueError: a shape or a dtype is wrong.
        NotImplementedError: float64 on a CUDA device, or dt is on another device than these two kinds.

    Examples:
        >>> import torch
        >>> from flash_dmattn import masks
        >>> masks.key_bias(torch.zeros(1, 3, 2), torch.ones(2)).shape  # [B, S, h] in, [B, h, S] out
        torch.Size([1, 2, 3])
    """
    exponential = flag_of(exponential, "exponential")
    if a is None:
        raise TypeError("a is None; it must be an array [heads]")
    bias: Array
    if _is_torch(dt):
        bias = _key_bias_on_torch(dt, a, exponential, key_padding_mask)
        return bias
    beside = _Beside(dt, "dt")
    steps, rates = beside.needed(dt, "dt"), beside.needed(a, "a")
    arrays = steps, rates, beside.borrow(key_padding_mask, "key_padding_mask")
    if steps.ndim != 3:
        raise ValueError(f"dt has {steps.ndim} axes; it must be [batch, seqlen, heads]")
    batch, seqlen, heads = steps.shape
    dtypes = {steps.dtype, rates.dtype}
    made = beside.lender.empty(
        (batch, heads, seqlen), dtypes.pop() if len(dtypes) == 1 else "float64" if "float64" in dtypes else "float32"
    )
    views = [None if each is None else each.arguments() for each in arrays]
    _native.key_bias(*views, beside.written(made).arguments(), exponential, beside.lender.stream)
    bias = beside.lender.hand_over(made)
    return bias


def _key_bias_on_torch(dt: Any, a: Any, exponential: bool, key_padding_mask: Any) -> Any:
    import torch

    from ._operators import refuse_transforms

    _on_device(dt, "dt")
    _check_torch(a, "a", "dt")
    _check_torch(key_padding_mask, "key_padding_mask", "dt")
    _on_torch()  # defines the operator
    refuse_transforms((dt, a))
    if dt.ndim != 3:
        raise ValueError(f"dt has {dt.ndim} axes; it must be [batch, seqlen, heads]")
    return torch.ops.flash_dmattn.key_bias(dt, a, key_padding_mask, exponential)


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


def _beside_mask(mask: Any) -> Tuple[_Beside, Borrowed]:
    """For a mask that is not a torch tensor, on the CPU: what makes outputs, and the mask, borrowed."""
    beside = _Beside(mask, "mask")
    if beside.device[0] != CPU:
        kind = type(mask).__name__
        raise NotImplementedError(f"mask is a {kind} on a CUDA device; there only torch tensors are taken")
    return beside, beside.needed(mask, "mask")


def intervals_from_mask(mask: Any) -> Optional[KeyIntervals]:
    """A dense bool mask as key intervals, where it is one interval of rows per key.

    Args:
        mask: bool [Sq, Sk] or [B, h, Sq, Sk], True = visible. A CUDA tensor makes the call wait for the device once.

    Returns:
        KeyIntervals (start, end), int32 [B, h, Sk], or None where the rows of a key are not one interval.

    Raises:
        TypeError, ValueError: the mask's dtype or shape is wrong.
        NotImplementedError: the mask is on a CUDA device and not PyTorch's.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import masks
        >>> masks.intervals_from_mask(numpy.tri(3, dtype=bool)).start.tolist()
        [[[0, 1, 2]]]
        >>> masks.intervals_from_mask(numpy.array([[True], [False], [True]])) is None
        True
    """
    if _is_torch(mask):
        _on_device(mask, "mask")
        planes = _planes(mask)
        pair = _on_torch().from_mask(planes)
        return None if pair is None else _of_rows(pair, planes.shape[2])
    beside, given = _beside_mask(mask)
    planes = _planes(given)
    pair, outputs = beside.pair((*planes.shape[:2], planes.shape[3]))
    exact = ctypes.c_int32()
    _native.intervals_from_mask(planes.arguments(), *outputs, ctypes.addressof(exact), 0)
    return beside.hand_over(pair, planes.shape[2]) if exact.value else None


def intervals_to_mask(start: Any, end: Any, seqlen_q: int) -> Any:
    """The dense bool mask of key intervals; allocates all of it.

    Args:
        start, end: int32 [.., Sk], of one to three axes and of one shape.
        seqlen_q: Sq, at least 0.

    Returns:
        bool [.., Sq, Sk], True = visible.

    Raises:
        TypeError, ValueError: the shapes differ, or have another number of axes.
        NotImplementedError: start is neither on the CPU nor on a CUDA device.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import masks
        >>> start, end = numpy.array([0, 1], numpy.int32), numpy.array([1, 3], numpy.int32)
        >>> masks.intervals_to_mask(start, end, 3).astype(int).tolist()
        [[1, 0], [0, 1], [0, 1]]
    """
    rows, on_torch = at_least(0, seqlen_q, "seqlen_q"), _is_torch(start)
    if on_torch:
        _on_device(start, "start")
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
    """What a dense bool mask shows of each block of block_q rows and block_k keys.

    Args:
        mask: bool [Sq, Sk] or [B, h, Sq, Sk], True = visible.
        block_q, block_k: extents of a block, at least 1; default 128.

    Returns:
        uint8 [.., ceil(Sq / block_q), ceil(Sk / block_k)]: 0 nothing, 1 a part, 2 all. Without a 1 the blocks alone say
        what the mask says.

    Raises:
        TypeError, ValueError: the mask's dtype or shape is wrong, or an extent is below 1.
        NotImplementedError: the mask is on a CUDA device and not PyTorch's.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import masks
        >>> masks.mask_blocks(numpy.tri(4, dtype=bool), 2, 2).tolist()
        [[1, 0], [2, 1]]
    """
    block_q, block_k = at_least(1, block_q, "block_q"), at_least(1, block_k, "block_k")
    if _is_torch(mask):
        import torch

        _on_device(mask, "mask")
        _on_torch()  # defines the operator
        blocks = torch.ops.flash_dmattn.mask_blocks(_planes(mask), block_q, block_k)
        return blocks[0, 0] if mask.ndim == 2 else blocks
    import numpy

    beside, given = _beside_mask(mask)
    planes = _planes(given)
    tiles = -(-planes.shape[2] // block_q), -(-planes.shape[3] // block_k)
    blocks = numpy.empty((*planes.shape[:2], *tiles), bool)  # as the library sees bytes
    _native.mask_blocks(planes.arguments(), describe(blocks, "blocks"), block_q, block_k, 0)
    blocks = blocks.view(numpy.uint8)
    return beside.lender.hand_over(blocks[0, 0] if given.ndim == 2 else blocks)


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
        attention_bias: [B|1, h, Sq|1, Sk] or [B, h, Sk], floating; NaN counts as min_dtype.
        attention_mask: None, bool [B, Sk], bool [B, Sq] (the newest keys; older ones count as real), or 4-D bool.
        batch_size, query_len, key_len: B, Sq, Sk.
        window_size: keys to keep per row (all of them when Sk <= window_size). Of equal biases the smaller index wins.
        min_dtype: the value a hidden key's bias is replaced by; keys with that very bias are not kept.
        block_size: smooths along the keys: a block with more than half of its keys kept is kept whole, others are
            dropped. This may show keys that attention_mask hides: pass causal and padding to the attention call too.
            Default None: 1.
        type: "topk", the default, or "relu" (keeps the keys with bias > 0).

    Returns:
        The mask, broadcast over bias and attention_mask. `topk_intervals` gives the causal top-W mask in O(Sk) memory.

    Raises:
        TypeError, ValueError: an argument is wrong, or a shape can be read in two ways.
        NotImplementedError: attention_bias is neither on the CPU nor on a CUDA device.

    Examples:
        >>> import torch
        >>> from flash_dmattn import masks
        >>> bias = torch.tensor([3.0, 1.0, 2.0]).expand(1, 1, 3, 3)
        >>> causal = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
        >>> lowest = torch.finfo(bias.dtype).min
        >>> masks.create_mask(bias, causal, 1, 3, 3, window_size=2, min_dtype=lowest)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    if type not in ("topk", "relu"):
        raise ValueError(f"type is {type!r}; it must be 'topk' or 'relu'")
    block_size = 1 if block_size is None else at_least(1, block_size, "block_size")
    window_size = at_least(1, window_size, "window_size") if type == "topk" else 0
    batch_size, query_len, key_len = (
        at_least(0, each, name)
        for each, name in ((batch_size, "batch_size"), (query_len, "query_len"), (key_len, "key_len"))
    )
    on_torch = _is_torch(attention_bias)
    if on_torch:
        _on_device(attention_bias, "attention_bias")
        _check_torch(attention_mask, "attention_mask", "attention_bias")
        bias, shown = attention_bias.detach(), attention_mask
    else:
        beside = _Beside(attention_bias, "attention_bias")
        bias, shown = beside.needed(attention_bias, "attention_bias"), beside.borrow(attention_mask, "attention_mask")
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
    _refuse_ambiguous(bias.shape, None if shown is None else shown.shape, query_len)
    bias = bias.reshape(*bias.shape[:2], 1, key_len) if bias.ndim == 3 else bias
    choice = window_size, number_of(min_dtype, "min_dtype"), block_size
    if on_torch:
        import torch

        _on_torch()  # defines the operator
        return torch.ops.flash_dmattn.create_mask(bias, shown, *choice)
    mask = beside.lender.empty(shape_with(bias.shape, None if shown is None else shown.shape), "bool")
    views = bias.arguments(), None if shown is None else shown.arguments(), beside.written(mask).arguments()
    _native.create_mask(*views, *choice, beside.lender.stream)
    return beside.lender.hand_over(mask)


def _refuse_ambiguous(bias: Any, shown: Any, query_len: int) -> None:
    """Shapes of create_mask that can be read in two ways."""
    if len(bias) == 3 and bias[1] > 1 and bias[1] == query_len:
        raise ValueError(
            f"attention_bias has shape {list(bias)}, and its middle axis may count heads or rows of the query: write "
            "attention_bias[:, :, None] for [batch, heads, key_len], attention_bias[:, None] for one of "
            "[batch, query_len, key_len]"
        )
    if shown is not None and len(shown) == 2 and shown[0] > 1 and shown[0] == shown[1] == query_len:
        raise ValueError(
            f"attention_mask has shape {list(shown)}, and its first axis may count sequences or rows of the query: "
            "write attention_mask[:, None, None] for [batch, key_len], attention_mask[None, None] for [query_len, key_len]"
        )


if __name__ == "__main__":
    from ._mask_picture import main

    main()
