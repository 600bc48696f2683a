"""Attention on NumPy arrays and on anything else that speaks DLPack, on the CPU and on CUDA devices.

Needs neither PyTorch nor, for PyTorch, NumPy.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Sequence, Tuple

from . import _arguments, _native
from ._arguments import (
    NO_WINDOW,
    bias_with_four_axes,
    check_axes,
    interval_pair,
    mask_with_four_axes,
    settings_of,
)
from ._device_arrays import CPU, CUDA, Device, device_of, dlpack_stream, handle_of, lender_for, say

_DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64", "bool", "int32")


class Borrowed:
    """An array somebody else owns: where it is and how it is laid out (strides in elements)."""

    __slots__ = ("address", "dtype", "shape", "strides", "device", "owner")

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: Tuple[int, ...],
        strides: Tuple[int, ...],
        device: Device,
        owner: Any,
    ) -> None:
        self.address, self.dtype, self.shape, self.strides = address, dtype, shape, strides
        self.device, self.owner = device, owner

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> Borrowed:
        """The same elements with axes of extent 1 put in; nothing else is asked of it."""
        axes = list(zip(self.shape, self.strides))
        strides = [axes.pop(0)[1] if axes and axes[0][0] == extent else 0 for extent in shape]
        return Borrowed(self.address, self.dtype, shape, tuple(strides), self.device, self.owner)

    def arguments(self) -> Tuple[Any, ...]:
        """What the extension takes."""
        return (self.address, self.dtype, self.shape, self.strides, *self.device)


def _borrow_numpy(array: Any, name: str, written: bool) -> Borrowed:
    dtype = array.dtype
    if any(step % dtype.itemsize for step in array.strides):
        raise ValueError(f"{name} has byte strides {array.strides}, which are not multiples of its element")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is read-only; it is written to")
    strides = tuple(step // dtype.itemsize for step in array.strides)
    return Borrowed(array.__array_interface__["data"][0], dtype.name, array.shape, strides, (CPU, 0), array)


def _capsule(array: Any, stream: Optional[int], written: bool) -> Any:
    """A DLPack capsule. On a CUDA device the producer makes `stream` wait for the work that writes the array."""
    if is_torch(array):
        array = array.detach()
    options = {} if stream is None else {"stream": stream}
    if written:
        # Only capsules since DLPack 1.0 say that they are read-only, and not every library makes them.
        try:
            return array.__dlpack__(max_version=(1, 0), **options)
        except TypeError:
            pass
    return array.__dlpack__(**options)


def borrow(
    array: Any,
    name: str,
    device: Optional[Device] = None,
    stream: int = 0,
    written: bool = False,
    beside: str = "q",
) -> Optional[Borrowed]:
    """A NumPy array or DLPack producer, without a copy; None stays None.

    device: where it must be, because `beside` is there; None = on the CPU. stream: handle that CUDA arrays are read on.
    """
    if array is None:
        return None
    where = device_of(array, name)
    if where != (device or (CPU, 0)):
        if device is None:
            raise NotImplementedError(f"{name} is on {say(where)}; this function takes arrays on the CPU only")
        raise ValueError(
            f"{name} is on {say(where)}, but {beside} is on {say(device)}; the arrays of a call are on one device"
        )
    if hasattr(array, "__array_interface__"):
        borrowed = _borrow_numpy(array, name, written)
    else:
        has_table = where[0] == CPU and hasattr(type(array), "__dlpack_c_exchange_api__")
        owner = array if has_table else _capsule(array, dlpack_stream(stream) if where[0] == CUDA else None, written)
        address, dtype, shape, strides, _, _, read_only = _native.inspect(owner)
        if written and read_only:
            raise ValueError(f"{name} is read-only; it is written to")
        borrowed = Borrowed(address, dtype, shape, strides, where, owner)
    if borrowed.dtype not in _DTYPE_NAMES:
        raise TypeError(f"{name} is {borrowed.dtype}; the library takes {', '.join(_DTYPE_NAMES)}")
    return borrowed


def describe(array: Any, name: str) -> Any:
    """An array as the extension takes it; None stays None."""
    borrowed = borrow(array, name)
    return None if borrowed is None else borrowed.arguments()


class _NumPyLender:
    """Outputs of arrays on the CPU."""

    stream = 0

    def empty(self, shape: Tuple[int, ...], dtype: str) -> Any:
        import numpy

        try:
            return numpy.empty(shape, dtype)
        except TypeError:
            raise TypeError(
                f"NumPy has no {dtype} here (ml_dtypes adds it): give out= an array of your library"
            ) from None

    def hand_over(self, array: Any) -> Any:
        return array


def lender_of(array: Any, device: Device, handle: Optional[int]) -> Any:
    """Who lends outputs where `array` is; `.stream` is the handle to run on."""
    return _NumPyLender() if device[0] == CPU else lender_for(array, device[1], handle)


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    attn_bias: Any = None,
    softmax_scale: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    deterministic: Optional[bool] = None,
    *,
    window_size: Sequence[Optional[int]] = NO_WINDOW,
    key_intervals: Optional[Tuple[Any, Any]] = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    return_lse: bool = False,
    out: Any = None,
    scale: Optional[float] = None,
    stream: Any = None,
) -> Any:
    """Attention forward on NumPy arrays or DLPack producers; the arguments mean what they mean in flash_dmattn_func.

    Args:
        q: [B, Sq, H, D]; k, v: [B, Sk, Hkv, D], [B, Sk, Hkv, Dv]. With cu_seqlens_q and cu_seqlens_k (int32 [B + 1]):
            [total_q, H, D], [total_k, Hkv, D], [total_k, Hkv, Dv], as in flash_dmattn_varlen_func.
        out: written and returned when given: an array of out's shape and q's dtype with a contiguous last axis.
        stream: for arrays on a CUDA device: the stream to run on, as the driver's handle (0 = the legacy default
            stream) or an object with __cuda_stream__. It waits for the work that writes the arrays, as far as their
            library knows of it, and the call does not wait for it. Default: the current stream of CuPy or PyTorch for
            their arrays, else the legacy default stream.

    Returns:
        out [B, Sq, H, Dv], or (out, lse) with return_lse; lse [B, H, Sq] float32 (float64 for float64 arrays).
        On the CPU NumPy arrays; on a CUDA device arrays of q's library, or, where it has neither an allocator known
        here nor from_dlpack, an array that only speaks DLPack. torch tensors give torch tensors (with autograd).
    """
    handle = handle_of(stream)
    if is_torch(q) and out is None:
        return _attention_on_torch(
            (q, k, v, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic),
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            {"window_size": window_size, "key_intervals": key_intervals, "return_lse": return_lse, "scale": scale},
            handle,
        )
    settings = settings_of(
        softmax_scale, scale, is_causal, softcap, deterministic, window_size, max_seqlen_q, max_seqlen_k
    )
    device = device_of(q, "q")
    if handle is not None and device[0] == CPU:
        raise ValueError("stream is given, but q is on the CPU; streams are for arrays on a CUDA device")
    lender = lender_of(q, device, handle)

    def borrowed(array: Any, name: str, written: bool = False) -> Optional[Borrowed]:
        return borrow(array, name, device, lender.stream, written)

    packed = cu_seqlens_q is not None
    start, end = interval_pair(key_intervals) if key_intervals is not None else (None, None)
    q, k, v = borrowed(q, "q"), borrowed(k, "k"), borrowed(v, "v")
    check_axes((q, k, v), ("q", "k", "v"), 3 if packed else 4)
    mask, bias = (
        each if isinstance(each, (int, float)) else borrowed(each, name)
        for each, name in ((attn_mask, "attn_mask"), (attn_bias, "attn_bias"))
    )
    cu_seqlens_q, cu_seqlens_k = borrowed(cu_seqlens_q, "cu_seqlens_q"), borrowed(cu_seqlens_k, "cu_seqlens_k")
    if mask is not None:
        batch, seqlen_k = (cu_seqlens_q.shape[0] - 1, max_seqlen_k) if packed else (q.shape[0], k.shape[1])
        mask = mask_with_four_axes(mask, batch, seqlen_k)
    if bias is not None:
        bias = bias_with_four_axes(bias)
    result = lender.empty(q.shape[:-1] + v.shape[-1:], q.dtype) if out is None else out
    rows = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = lender.empty(rows, "float64" if q.dtype == "float64" else "float32") if return_lse else None
    intervals = borrowed(start, "key_intervals start"), borrowed(end, "key_intervals end")
    outputs = borrowed(result, "out", True), borrowed(lse, "lse")
    given = (q, k, v, mask, bias, *intervals, cu_seqlens_q, cu_seqlens_k, *outputs)
    on_device = () if device[0] == CPU else (lender.stream, lender.allocate)
    # 0 threads: what FLASH_DMATTN_NUM_THREADS and the machine allow.
    _native.forward(*(each and each.arguments() for each in given), *settings, 0, _arguments.forced_family, *on_device)
    result = lender.hand_over(result) if out is None else out
    return (result, lender.hand_over(lse)) if return_lse else result


def _attention_on_torch(
    positional: Tuple[Any, ...], packing: Tuple[Any, ...], options: dict, handle: Optional[int]
) -> Any:
    from . import _torch

    q, k, v, mask, bias, *rest = positional
    with _torch.on_stream(q.device, handle):
        if packing[0] is None:
            return _torch.flash_dmattn_func(*positional, **options)
        return _torch.flash_dmattn_varlen_func(q, k, v, *packing, *rest, attn_mask=mask, attn_bias=bias, **options)
