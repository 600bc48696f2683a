"""Attention on NumPy arrays and on anything else that speaks DLPack. Needs neither PyTorch nor, for PyTorch, NumPy."""

from __future__ import annotations

import sys
from typing import Any, Optional, Sequence, Tuple

from . import _native
from ._arguments import (
    NO_WINDOW,
    Settings,
    bias_with_four_axes,
    check_axes,
    interval_pair,
    mask_with_four_axes,
    settings_of,
)

_DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64", "bool", "int32")


def describe(array: Any, name: str) -> Any:
    """An array as the extension takes it: (address, dtype name, shape, strides in elements); None stays None."""
    if array is None or not hasattr(array, "__array_interface__"):
        return array
    dtype = array.dtype
    if dtype.name not in _DTYPE_NAMES:
        raise TypeError(f"{name} is {dtype.name}; the library takes {', '.join(_DTYPE_NAMES)}")
    if any(step % dtype.itemsize for step in array.strides):
        raise ValueError(f"{name} has byte strides {array.strides}, which are not multiples of its element")
    address = array.__array_interface__["data"][0]
    return (address, dtype.name, array.shape, tuple(step // dtype.itemsize for step in array.strides))


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _as_array(array: Any, name: str) -> Any:
    """NumPy's view of an array; other DLPack producers are imported without a copy."""
    import numpy

    if array is None or isinstance(array, numpy.ndarray):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} is a {type(array).__name__}; it must be a NumPy array or have __dlpack__")
    return numpy.from_dlpack(array)


def _settings_with_threads(settings: Settings) -> Tuple[Any, ...]:
    # 0 threads: what FLASH_DMATTN_NUM_THREADS and the machine allow.
    return (*settings, 0, None)


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
    import numpy

    settings = settings_of(
        softmax_scale, scale, is_causal, softcap, deterministic, window_size, max_seqlen_q, max_seqlen_k
    )
    packed = cu_seqlens_q is not None
    start, end = interval_pair(key_intervals) if key_intervals is not None else (None, None)
    named = {"q": q, "k": k, "v": v, "attn_mask": attn_mask, "attn_bias": attn_bias, "key_intervals start": start}
    named |= {"key_intervals end": end, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    arrays = {name: _as_array(array, name) for name, array in named.items()}
    q, k, v, attn_mask, attn_bias = list(arrays.values())[:5]
    check_axes((q, k, v), ("q", "k", "v"), 3 if packed else 4)
    if attn_mask is not None:
        batch, seqlen_k = (len(cu_seqlens_q) - 1, max_seqlen_k) if packed else (q.shape[0], k.shape[1])
        arrays["attn_mask"] = mask_with_four_axes(attn_mask, batch, seqlen_k)
    if attn_bias is not None:
        arrays["attn_bias"] = bias_with_four_axes(attn_bias)
    result = numpy.empty(q.shape[:-1] + v.shape[-1:], q.dtype) if out is None else _as_array(out, "out")
    rows = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = numpy.empty(rows, "float64" if q.dtype == "float64" else "float32") if return_lse else None
    if not result.flags.writeable:
        raise ValueError("out is read-only; it is written to")
    given = [describe(array, name) for name, array in (*arrays.items(), ("out", result), ("lse", lse))]
    _native.forward(*given, *_settings_with_threads(settings))
    result = result if out is None else out
    return (result, lse) if return_lse else result


def _attention_on_torch(positional: Tuple[Any, ...], packing: Tuple[Any, ...], options: dict) -> Any:
    from . import _torch

    if packing[0] is None:
        return _torch.flash_dmattn_func(*positional, **options)
    q, k, v, mask, bias, *rest = positional
    return _torch.flash_dmattn_varlen_func(q, k, v, *packing, *rest, attn_mask=mask, attn_bias=bias, **options)
