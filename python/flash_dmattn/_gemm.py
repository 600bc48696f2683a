"""Matrix products on CUDA devices: gemm(), for PyTorch tensors and DLPack arrays."""

from __future__ import annotations

from typing import Any, Optional

from . import _native
from ._arguments import flag_of, number_of
from ._arrays import Borrowed, borrow_needed, is_torch
from ._device_arrays import CPU, device_of, handle_of, lender_of


def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: float = 1.0,
    beta: Optional[float] = None,
    *,
    accumulate_float16: bool = False,
    kernel: Optional[str] = None,
    stream: Any = None,
) -> Any:
    """`alpha * a @ b + beta * c` on a CUDA device, summed in float32. PyTorch's tensors get gradients of a, b and c.

    Args:
        a: [m, k] or [batch, m, k], float16 or bfloat16. Rows or columns are contiguous: a transposed matrix is a view.
            A batch of 1, or none, is shared by all.
        b: [k, n] or [batch, k, n], a's dtype.
        c: [m, n] or [batch, m, n], a's dtype. Default None: nothing is added.
        alpha: a finite number; default 1.
        beta: a finite number; default: 1 where c is given, else 0.
        accumulate_float16: float16 sums, of float16 operands. Default False.
        kernel: one kernel by name ("gemm.naive", ...); default: chosen.
        stream: as in `attention`. Default: the current stream.

    Returns:
        [m, n], or [batch, m, n] where a or b has three axes: an array of a's dtype and library.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not match.
        NotImplementedError: a is on the CPU, or of another dtype.

    Examples:
        >>> import torch
        >>> from flash_dmattn import gemm
        >>> a = torch.ones(2, 8, dtype=torch.float16, device="cuda")
        >>> gemm(a, a.T, alpha=0.5).tolist()
        [[4.0, 4.0], [4.0, 4.0]]
    """
    if beta is None:
        beta = 0.0 if c is None else 1.0
    alpha, beta = float(number_of(alpha, "alpha")), float(number_of(beta, "beta"))
    settings = (alpha, beta, flag_of(accumulate_float16, "accumulate_float16"), kernel)
    handle = handle_of(stream)
    if is_torch(a):
        from . import _gemm_torch, _torch

        with _torch.on_stream(a.device, handle):
            return _gemm_torch.gemm(a, b, c, *settings)
    device = device_of(a, "a")
    if device[0] == CPU:
        raise NotImplementedError("a is on the CPU; gemm is for arrays on a CUDA device (numpy.matmul)")
    lender = lender_of(a, device, handle)

    def borrowed(array: Any, name: str, written: bool = False) -> Borrowed:
        return borrow_needed(array, name, device, lender.stream, written, "a")

    left, right = borrowed(a, "a"), borrowed(b, "b")
    old = None if c is None else borrowed(c, "c")
    for each, name in ((left, "a"), (right, "b")):
        if each.ndim not in (2, 3):
            raise ValueError(f"{name} has {each.ndim} axes; it needs 2, or 3 with a batch")
    batches = [each.shape[0] for each in (left, right) if each.ndim == 3]
    shape = (left.shape[-2], right.shape[-1])
    result = lender.empty((next((n for n in batches if n != 1), 1), *shape) if batches else shape, left.dtype)
    views = (each and each.arguments() for each in (left, right, old, borrowed(result, "out", True)))
    _native.gemm(*views, *settings, lender.allocate, lender.stream)
    return lender.hand_over(result)
