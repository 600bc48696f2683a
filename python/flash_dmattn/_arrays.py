"""Attention on NumPy arrays and on anything else that speaks DLPack. Needs neither PyTorch nor, for PyTorch, NumPy."""

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

_DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64", "bool", "int32")


class Borrowed:
    """An array somebody else owns: where it is and how it is laid out (strides in elements)."""

    __slots__ = ("address", "dtype", "shape", "strides", "owner")

    def __init__(self, address: int, dtype: str, shape: Tuple[int, ...], strides: Tuple[int, ...], owner: Any) -> None:
        self.address, self.dtype, self.shape, self.strides, self.owner = address, dtype, shape, strides, owner

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> Borrowed:
        """The same elements with axes of extent 1 put in; nothing else is asked of it."""
        axes = list(zip(self.shape, self.strides))
        strides = [axes.pop(0)[1] if axes and axes[0][0] == extent else 0 for extent in shape]
        return Borrowed(self.address, self.dtype, shape, tuple(strides), self.owner)

    def arguments(self) -> Tuple[int, str, Tuple[int, ...], Tuple[int, ...]]:
        """What the extension takes."""
        return (self.address, self.dtype, self.shape, self.strides)


def borrow(array: Any, name: str) -> Optional[Borrowed]:
    """A NumPy array or DLPack producer, without a copy; None stays None."""
    if array is None:
        return None
    if hasattr(array, "__array_interface__"):
        dtype = array.dtype
        if any(step % dtype.itemsize for step in array.strides):
            raise ValueError(f"{name} has byte strides {array.strides}, which are not multiples of its element")
        strides = tuple(step // dtype.itemsize for step in array.strides)
        address = array.__array_interface__["data"][0]
        borrowed = Borrowed(address, dtype.name, array.shape, strides, array)
    elif hasattr(array, "__dlpack__"):
        owner = array if hasattr(type(array), "__dlpack_c_exchange_api__") else array.__dlpack__()
        address, dtype, shape, strides, device = _native.inspect(owner)
        if device != 1:
            raise NotImplementedError(
                f"{name} is on DLPack device type {device}; this version of flash_dmattn runs on the CPU only"
            )
        borrowed = Borrowed(address, dtype, shape, strides, owner)
    else:
        raise TypeError(f"{name} is a {type(array).__name__}; it must be a NumPy array or have __dlpack__")
    if borrowed.dtype not in _DTYPE_NAMES:
        raise TypeError(f"{name} is {borrowed.dtype}; the library takes {', '.join(_DTYPE_NAMES)}")
    return borrowed


def describe(array: Any, name: str) -> Any:
    """An array as the extension takes it; None stays None."""
    borrowed = borrow(array, name)
    return None if borrowed is None else borrowed.arguments()


def _new_array(shape: Tuple[int, ...], dtype: str) -> Any:
    import numpy

    try:
        return numpy.empty(shape, dtype)
    except TypeError:
        raise TypeError(f"NumPy has no {dtype} here (ml_dtypes adds it): give out= an array of your library") from None


def _is_torch(array: Any) -> bool:
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
    window_size: Sequence[int] = NO_WINDOW,
    key_intervals: Optional[Tuple[Any, Any]] = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    return_lse: bool = False,
    out: Any = None,
    scale: Optional[float] = None,
) -> Any:
    """Attention forward on NumPy arrays or DLPack producers; the arguments mean what they mean in flash_dmattn_func.

    Args:
        q: [B, Sq, H, D]; k, v: [B, Sk, Hkv, D], [B, Sk, Hkv, Dv]. With cu_seqlens_q and cu_seqlens_k (int32 [B + 1]):
            [total_q, H, D], [total_k, Hkv, D], [total_k, Hkv, Dv], as in flash_dmattn_varlen_func.
        out: written and returned when given: an array of out's shape and q's dtype with a contiguous last axis.

    Returns:
        out [B, Sq, H, Dv], or (out, lse) with return_lse; lse [B, H, Sq] float32 (float64 for float64 arrays).
        NumPy arrays, except that torch tensors give torch tensors (with autograd).
    """
    if _is_torch(q) and out is None:
        return _attention_on_torch(
            (q, k, v, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic),
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            {"window_size": window_size, "key_intervals": key_intervals, "return_lse": return_lse, "scale": scale},
        )
    settings = settings_of(
        softmax_scale, scale, is_causal, softcap, deterministic, window_size, max_seqlen_q, max_seqlen_k
    )
    packed = cu_seqlens_q is not None
    start, end = interval_pair(key_intervals) if key_intervals is not None else (None, None)
    q, k, v = borrow(q, "q"), borrow(k, "k"), borrow(v, "v")
    check_axes((q, k, v), ("q", "k", "v"), 3 if packed else 4)
    mask, bias = borrow(attn_mask, "attn_mask"), borrow(attn_bias, "attn_bias")
    cu_seqlens_q, cu_seqlens_k = borrow(cu_seqlens_q, "cu_seqlens_q"), borrow(cu_seqlens_k, "cu_seqlens_k")
    if mask is not None:
        batch, seqlen_k = (cu_seqlens_q.shape[0] - 1, max_seqlen_k) if packed else (q.shape[0], k.shape[1])
        mask = mask_with_four_axes(mask, batch, seqlen_k)
    if bias is not None:
        bias = bias_with_four_axes(bias)
    result = _new_array(q.shape[:-1] + v.shape[-1:], q.dtype) if out is None else out
    if hasattr(result, "flags") and not result.flags.writeable:
        raise ValueError("out is read-only; it is written to")
    rows = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = _new_array(rows, "float64" if q.dtype == "float64" else "float32") if return_lse else None
    intervals = borrow(start, "key_intervals start"), borrow(end, "key_intervals end")
    outputs = borrow(result, "out"), borrow(lse, "lse")
    given = (q, k, v, mask, bias, *intervals, cu_seqlens_q, cu_seqlens_k, *outputs)
    # 0 threads: what FLASH_DMATTN_NUM_THREADS and the machine allow.
    _native.forward(*(each and each.arguments() for each in given), *settings, 0, _arguments.forced_family)
    return (result, lse) if return_lse else result


def _attention_on_torch(positional: Tuple[Any, ...], packing: Tuple[Any, ...], options: dict) -> Any:
    from . import _torch

    if packing[0] is None:
        return _torch.flash_dmattn_func(*positional, **options)
    q, k, v, mask, bias, *rest = positional
    return _torch.flash_dmattn_varlen_func(q, k, v, *packing, *rest, attn_mask=mask, attn_bias=bias, **options)
