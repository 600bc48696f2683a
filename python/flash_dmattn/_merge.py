"""Two partial results over disjoint keys into one: merge(), for PyTorch tensors, NumPy arrays and DLPack producers."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from . import _native
from ._arrays import Borrowed, borrow, is_torch
from ._device_arrays import CPU, device_of, handle_of, lender_of


def check_merge(arrays: Tuple[Any, ...]) -> bool:
    """Whether the parts are packed; the library checks everything else."""
    for array, name in zip(arrays[::2], ("out1", "out2")):
        if array.ndim not in (3, 4):
            raise ValueError(
                f"{name} has {array.ndim} axes; it needs 4 [batch, seqlen, heads, head_dim] or, packed, "
                "3 [total tokens, heads, head_dim]"
            )
    for array, name in zip(arrays, ("out1", "lse1", "out2", "lse2")):
        axes = arrays[0].ndim - (name in ("lse1", "lse2"))
        if array.ndim != axes:
            raise ValueError(f"{name} has {array.ndim} axes; beside out1 with {arrays[0].ndim} it needs {axes}")
    return arrays[0].ndim == 3


def merge(out1: Any, lse1: Any, out2: Any, lse2: Any, *, stream: Any = None) -> Tuple[Any, Any]:
    """Combines the results of attention to two disjoint sets of keys into the result of attention to all of them.

    `flash_dmattn_func(..., return_lse=True)` over the first keys and over the rest, merged, is the call over all keys.
    PyTorch tensors get gradients, twice differentiable; the result does not depend on the order of the two.

    Args:
        out1, out2: [B, S, H, Dv], or packed [total, H, Dv]; float32, float16, bfloat16, or float64 (on the CPU). Any
            strides.
        lse1, lse2: [B, H, S], or packed [H, total]: natural logarithms of the sums of exponentials, float32 (float64
            where out is). An infinite one means "no keys": what out holds there does not count.
        stream: for arrays on a CUDA device: as in `attention`. Default: the current stream.

    Returns:
        (out, lse), new, in the layout, dtype and library of the parts; out 0 and lse +inf where both have no keys.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match; the sentence says which. NotImplementedError:
            float64 on a CUDA device.
    """
    arrays = (out1, lse1, out2, lse2)
    handle = handle_of(stream)
    if is_torch(out1):
        from . import _merge_torch, _torch

        if handle is None:
            return _merge_torch.merge(*arrays)
        with _torch.on_stream(out1.device, handle):
            return _merge_torch.merge(*arrays)
    device = device_of(out1, "out1")
    if handle is not None and device[0] == CPU:
        raise ValueError("stream is given, but out1 is on the CPU; streams are for arrays on a CUDA device")
    lender = lender_of(out1, device, handle)

    def borrowed(array: Any, name: str, written: bool = False) -> Optional[Borrowed]:
        return borrow(array, name, device, lender.stream, written, "out1")

    given = [borrowed(array, name) for array, name in zip(arrays, ("out1", "lse1", "out2", "lse2"))]
    packed = check_merge(tuple(given))
    results = [lender.empty(each.shape, each.dtype) for each in given[:2]]
    given += [borrowed(results[0], "out", True), borrowed(results[1], "lse", True)]
    if packed:
        given = [each.reshape(1, *each.shape) for each in given]
    _native.merge(*(each.arguments() for each in given), lender.stream)
    return lender.hand_over(results[0]), lender.hand_over(results[1])
