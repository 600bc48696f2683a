"""Mask plans: which tiles of rows and keys masks show, made once for the calls that have the same masks."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Optional, Sequence, Tuple

from . import _native
from ._arguments import (
    NO_WINDOW,
    dense_extents,
    integer_of,
    interval_pair,
    mask_with_four_axes,
    packed_extents,
    row_masks,
    said,
    settings_of,
)
from ._arrays import borrow, borrow_needed, is_torch
from ._device_arrays import device_of, lender_of


class MaskPlan:
    """Masks of calls, and which tiles of 64 rows and 64 keys they show: made once, read by forward, backward and layers.

    A call takes it as `mask_plan=` in the place of its masks, is_causal and window_size. On CUDA devices the kernels
    that look for hidden tiles before they begin then read the plan; on the CPU it only holds the masks. It is made on
    PyTorch's current stream. Code of torch.compile is compiled anew for each plan.

    Args:
        query, key: tensors of the calls' shapes and device, [B, S, heads, D], packed [total, heads, D].
        attn_mask, is_causal, window_size, key_intervals, row_intervals, block_mask: as in flash_dmattn_func;
            window_size as a pair. The plan holds them. What they hold must not change: calls would be wrong.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: packed sequences: as in flash_dmattn_varlen_func.

    Raises:
        TypeError, ValueError: an argument is wrong. A call of other shapes, heads or packing refuses the plan. So does
            a backward after the plan is gone: it must live until then.

    Examples:
        >>> import torch
        >>> from flash_dmattn import flash_dmattn_func, masks
        >>> q, k, v = (torch.ones(1, 128, 2, 8) for _ in range(3))
        >>> plan = masks.MaskPlan(q, k, block_mask=torch.eye(2).bool()[None, None], is_causal=True)
        >>> for layer in range(2):
        ...     q = flash_dmattn_func(q, k, v, mask_plan=plan)
        >>> q.shape
        torch.Size([1, 128, 2, 8])
    """

    def __init__(
        self,
        query: Any,
        key: Any,
        attn_mask: Any = None,
        *,
        is_causal: Optional[bool] = None,
        window_size: Sequence[Optional[int]] = NO_WINDOW,
        key_intervals: Any = None,
        row_intervals: Any = None,
        block_mask: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
    ) -> None:
        self.number = 0
        for each, name in ((query, "query"), (key, "key")):
            if not is_torch(each):
                raise TypeError(f"{name} is {said(each)}; it must be a torch.Tensor")
        offsets = cu_seqlens_q, cu_seqlens_k
        longest = integer_of(max_seqlen_q, "max_seqlen_q"), integer_of(max_seqlen_k, "max_seqlen_k")
        if attn_mask is not None:
            packed = cu_seqlens_q is not None
            extents = (
                packed_extents(query.shape, key.shape, cu_seqlens_q.shape, longest)
                if packed
                else dense_extents(query.shape, key.shape)
            )
            attn_mask = mask_with_four_axes(attn_mask, extents)
        pair: Tuple[Any, Any] = (None, None)
        if key_intervals is not None:
            pair = interval_pair(key_intervals, query, longest[0])
        self.masks: Dict[str, Any] = {
            "attn_mask": attn_mask, "is_causal": is_causal, "window_size": window_size,
            "key_intervals": key_intervals, "row_intervals": row_intervals, "block_mask": block_mask,
        }  # fmt: skip
        settings = settings_of(None, None, is_causal, None, None, window_size, *longest)
        tensors = (query, key, key, attn_mask, *pair, *offsets, *row_masks(row_intervals, block_mask))
        self._memory, self.number = _make(tuple(None if each is None else each.detach() for each in tensors), settings)

    def __del__(self, native: Any = _native) -> None:
        if self.__dict__.get("number"):
            with contextlib.suppress(Exception):
                native.mask_plan_drop(self.number)

    def __repr__(self) -> str:
        given = ", ".join(name for name, mask in self.masks.items() if _is_given(name, mask))
        return f"MaskPlan({given})"


_NAMES = (
    "query", "key", "key", "attn_mask", "key_intervals start", "key_intervals end", "cu_seqlens_q", "cu_seqlens_k",
    "row_intervals start", "row_intervals end", "block_mask",
)  # fmt: skip


def _make(tensors: Sequence[Any], settings: Tuple[Any, ...]) -> Tuple[Any, int]:
    """The plan's memory and number."""
    device = device_of(tensors[0], _NAMES[0])
    lender = lender_of(tensors[0], device, None)
    arrays = [borrow(each, name, device, lender.stream) for each, name in zip(tensors, _NAMES)]
    given = [each and each.arguments() for each in arrays]
    num_bytes = _native.mask_plan(*given, None, *settings, lender.stream)
    memory = lender.empty((num_bytes,), "bool")
    borrowed = borrow_needed(memory, "memory", device, lender.stream, True, "query")
    given = [each and each.arguments() for each in arrays]
    return memory, _native.mask_plan(*given, borrowed.arguments(), *settings, lender.stream)


def _is_given(name: str, mask: Any) -> bool:
    return mask is not None and not (name == "window_size" and isinstance(mask, tuple) and mask == NO_WINDOW)


def masks_of(mask_plan: MaskPlan, given: Dict[str, Any]) -> Tuple[Any, ...]:
    """The masks that a plan holds, in the order of its arguments; beside it a call may have none of its own."""
    if not isinstance(mask_plan, MaskPlan):
        raise TypeError(f"mask_plan is {said(mask_plan)}; it must be a masks.MaskPlan")
    for name, mask in given.items():
        if _is_given(name, mask):
            raise ValueError(f"{name} is given beside mask_plan, which holds the masks of the call")
    return tuple(mask_plan.masks.values())
