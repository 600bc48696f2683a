"""Softmax along the last axis on CUDA devices: softmax(), for PyTorch tensors and DLPack arrays."""

from __future__ import annotations

from typing import Any, Optional

from . import _native
from ._arguments import flag_of, number_of
from ._arrays import Borrowed, borrow_needed, is_torch
from ._device_arrays import CPU, device_of, handle_of, lender_of


def softmax(
    x: Any, mask: Any = None, scale: float = 1.0, *, log: bool = False, kernel: Optional[str] = None, stream: Any = None
) -> Any:
    """Softmax, or log-softmax, of `scale * x` along the last axis, on a CUDA device; float32 inside.

    Unlike torch.softmax a row of nothing but -inf, or without an element that the mask leaves, gives 0 (log-softmax:
    -inf) and a gradient of 0. PyTorch's tensors get gradients of x, twice differentiable.

    Args:
        x: [..., columns], float32, float16 or bfloat16, 1 to 4 axes (PyTorch's tensors: any number); fewer than 2^30
            rows, and columns. The last axis of an array is contiguous.
        mask: bool, of x's shape or 1 on any axis; where it is False, an element counts as -inf. Default None.
        scale: a finite number; default 1.
        log: log-softmax. Default False.
        kernel: one kernel by name ("softmax.naive", ...); default: chosen.
        stream: as in `attention`. Default: the current stream.

    Returns:
        An array of x's shape, dtype and library.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not match.
        NotImplementedError: x is on the CPU, or of another dtype.

    Examples:
        >>> import torch
        >>> from flash_dmattn import softmax
        >>> x = torch.zeros(2, 4, device="cuda")
        >>> mask = torch.tensor([True, True, False, False], device="cuda")
        >>> softmax(x, mask).tolist()
        [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]
    """
    scale, log = float(number_of(scale, "scale")), flag_of(log, "log")
    handle = handle_of(stream)
    if is_torch(x):
        from . import _softmax_torch, _torch

        with _torch.on_stream(x.device, handle):
            return _softmax_torch.softmax(x, mask, scale, log, kernel)
    device = device_of(x, "x")
    if device[0] == CPU:
        raise NotImplementedError("x is on the CPU; softmax is for arrays on a CUDA device (scipy.special.softmax)")
    lender = lender_of(x, device, handle)

    def borrowed(array: Any, name: str, written: bool = False) -> Borrowed:
        return borrow_needed(array, name, device, lender.stream, written, "x")

    given, hidden = borrowed(x, "x"), None if mask is None else borrowed(mask, "mask")
    result = lender.empty(given.shape, given.dtype)
    out = borrowed(result, "out", True)
    views = (each and each.arguments() for each in (given, hidden, out))
    _native.softmax(*views, None, None, False, scale, log, kernel, lender.allocate, lender.stream)
    return lender.hand_over(result)
