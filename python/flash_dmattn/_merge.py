"""Two partial results over disjoint keys into one: merge(), for PyTorch tensors, NumPy arrays and DLPack producers."""

from __future__ import annotations

from typing import Any, Sequence, Tuple

from . import _native
from ._arrays import Borrowed, borrow_needed, is_torch
from ._device_arrays import CPU, device_of, handle_of, lender_of


NAMES = ("out1", "lse1", "lse_low1", "out2", "lse2", "lse_low2")  # in the order of every call below


def check_merge(arrays: Sequence[Any]) -> bool:
    """Whether the parts are packed; the library checks everything else. Low parts may be None."""
    out1 = arrays[0]
    for array, name in zip(arrays[::3], NAMES[::3]):
        if array.ndim not in (3, 4):
            raise ValueError(
                f"{name} has {array.ndim} axes; it needs 4 [batch, seqlen, heads, head_dim] or, packed, "
                "3 [total tokens, heads, head_dim]"
            )
    for array, name in zip(arrays, NAMES):
        axes = out1.ndim - (name not in ("out1", "out2"))
        if array is not None and array.ndim != axes:
            raise ValueError(f"{name} has {array.ndim} axes; beside out1 with {out1.ndim} it needs {axes}")
    return bool(out1.ndim == 3)


def merge(
    out1: Any, lse1: Any, out2: Any, lse2: Any, *, lse_low1: Any = None, lse_low2: Any = None, stream: Any = None
) -> Tuple[Any, ...]:
    """Combines the results of attention to two disjoint sets of keys into the result of attention to all of them.

    `flash_dmattn_func(..., return_lse=True)` over the first keys and over the rest, merged, is the call over all keys.
    PyTorch's tensors get gradients, twice differentiable. The bits do not depend on the order of the two.

    Args:
        out1, out2: [B, S, H, Dv], or packed [total, H, Dv]; float32, float16, bfloat16, or float64 (on the CPU). Any
            strides.
        lse1, lse2: [B, H, S], or packed [H, total]: natural logarithms of the sums of exponentials, float32 (float64
            where out is). An infinite one means "no keys": what out holds there does not count, and gradients there are
            zero. NaN stays NaN.
        lse_low1, lse_low2: like lse: what it has rounded away, from `return_lse_low=True`; default None: 0. Where every
            bias of a row is -1e4 or below, lse alone no longer tells parts of many keys from parts of few. No gradient.
        stream: for arrays on a CUDA device, as in `attention`. Default: the current stream.

    Returns:
        (out, lse), or (out, lse, lse_low) when a low part is given; new, in the layout, dtype and library of the parts;
        out 0 and lse +inf where both have no keys.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not match; the sentence says which.
        NotImplementedError: float64 on a CUDA device.

    Examples:
        >>> import torch
        >>> from flash_dmattn import flash_dmattn_func, merge
        >>> q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
        >>> first = flash_dmattn_func(q, k[:, :4], v[:, :4], return_lse=True)
        >>> rest = flash_dmattn_func(q, k[:, 4:], v[:, 4:], return_lse=True)
        >>> out, lse = merge(*first, *rest)
        >>> torch.allclose(out, flash_dmattn_func(q, k, v), atol=1e-5)
        True
    """
    arrays = (out1, lse1, lse_low1, out2, lse2, lse_low2)
    with_low = lse_low1 is not None or lse_low2 is not None
    handle = handle_of(stream)
    if is_torch(out1):
        from . import _merge_torch, _torch

        if handle is None:
            return _merge_torch.merge(arrays)[: 2 + with_low]
        with _torch.on_stream(out1.device, handle):
            return _merge_torch.merge(arrays)[: 2 + with_low]
    device = device_of(out1, "out1")
    if handle is not None and device[0] == CPU:
        raise ValueError("stream is given, but out1 is on the CPU; streams are for arrays on a CUDA device")
    lender = lender_of(out1, device, handle)

    def borrowed(array: Any, name: str, written: bool = False) -> Borrowed:
        return borrow_needed(array, name, device, lender.stream, written, "out1")

    low = ("lse_low1", "lse_low2")
    given = [None if each is None and name in low else borrowed(each, name) for each, name in zip(arrays, NAMES)]
    packed = check_merge(given)
    like = [borrowed(out1, "out1"), *[borrowed(lse1, "lse1")] * (1 + with_low)]
    results = [lender.empty(each.shape, each.dtype) for each in like]
    written = [borrowed(each, name, True) for each, name in zip(results, ("out", "lse", "lse_low"))]
    views = [each and (each.reshape(1, *each.shape) if packed else each).arguments() for each in (*given, *written)]
    _native.merge(*views, *[None] * (not with_low), lender.stream)
    return tuple(lender.hand_over(each) for each in results)
