"""Argument rules that PyTorch and NumPy callers share: shapes and numbers, never data."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

# (max_seqlen_q, max_seqlen_k, softmax_scale, causal, softcap, window_left, window_right, deterministic): the order the
# extension takes them in. softmax_scale None = head_dim ** -0.5; max_seqlen 0 = found from cu_seqlens.
Settings = Tuple[int, int, Optional[float], bool, float, int, int, bool]

NO_WINDOW = (-1, -1)

_FLASH_ATTN_ORDER = (
    "flash-attn's functions take dropout_p before the scale, these have no dropout: leave it out and give softmax_scale, "
    "is_causal and softcap by keyword"
)

# Forces a kernel family, "reference" say, on every call of the process (tests do); None lets the plan choose.
forced_family: Optional[str] = None


def window_of(window_size: Any) -> Tuple[int, int]:
    """(left, right) of a caller's pair, in which None and -1 are unbounded. Numbers are checked by the library."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; it must be a pair (left, right), -1 or None for unbounded")
    left, right = (-1 if bound is None else bound for bound in window_size)
    if not (hasattr(left, "__index__") and hasattr(right, "__index__")):
        raise TypeError(f"window_size is {window_size!r}; its bounds must be integers, -1 or None for unbounded")
    return left, right


def settings_of(
    softmax_scale: Optional[float],
    scale: Optional[float],
    is_causal: Optional[bool],
    softcap: Optional[float],
    deterministic: Optional[bool],
    window_size: Sequence[Optional[int]],
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> Settings:
    """Fills in the defaults. Numbers are checked by the library, which says what is allowed."""
    if scale is not None:
        if softmax_scale is not None:
            raise ValueError("both softmax_scale and its alias scale are given; give one of them")
        softmax_scale = scale
    if isinstance(is_causal, float) or isinstance(softcap, bool):
        name, value = ("is_causal", is_causal) if isinstance(is_causal, float) else ("softcap", softcap)
        raise TypeError(f"{name} is {value}, which is not {'a bool' if name == 'is_causal' else 'a number'}; {_FLASH_ATTN_ORDER}")
    left, right = NO_WINDOW if window_size is NO_WINDOW else window_of(window_size)
    return (
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        bool(is_causal),
        0.0 if softcap is None else softcap,
        left,
        right,
        bool(deterministic),
    )


def mask_with_four_axes(mask: Any, batch: int, seqlen_k: int) -> Any:
    """A bool mask as [B|1, h, Sq|1, Sk|1]: 4-D as it is, 3-D [B, h, Sk] has no query axis, 2-D is padding [B|1, Sk]."""
    if isinstance(mask, (int, float)):
        raise TypeError(
            f"attn_mask is the number {mask}; it must be a bool mask, True = visible. {_FLASH_ATTN_ORDER}"
        )
    if str(mask.dtype).rpartition(".")[2] != "bool":
        raise TypeError(
            f"attn_mask is {mask.dtype}; it must be bool with True = visible: write attn_mask=(mask > 0) for a mask of "
            "ones and zeros, or attn_bias=mask for one that is added to the scores"
        )
    if mask.ndim == 4:
        return mask
    shape = tuple(mask.shape)
    if mask.ndim == 3:
        return mask.reshape(shape[0], shape[1], 1, shape[2])
    if mask.ndim == 2 and shape[1] == seqlen_k and shape[0] in (1, batch):
        return mask.reshape(shape[0], 1, 1, shape[1])
    if mask.ndim == 2:
        raise ValueError(
            f"attn_mask has shape {list(shape)}; a mask of two axes is a padding mask [{batch} or 1, {seqlen_k}]: "
            "write attn_mask[None, None] for one of [seqlen_q, seqlen_k]"
        )
    raise ValueError(
        f"attn_mask has {mask.ndim} axes; it needs 4 [batch, heads, seqlen_q, seqlen_k], 3 [batch, heads, seqlen_k] or "
        "2 [batch, seqlen_k]"
    )


def bias_with_four_axes(bias: Any) -> Any:
    """A bias as [B|1, h, Sq|1, Sk|1]: 4-D as it is, 3-D [B, h, Sk] has no query axis."""
    if isinstance(bias, (int, float)):
        raise TypeError(f"attn_bias is the number {bias}; it must be a tensor that is added to the scores. {_FLASH_ATTN_ORDER}")
    if str(bias.dtype).rpartition(".")[2] == "bool":
        raise TypeError("attn_bias is bool; a bool mask goes to attn_mask")
    if bias.ndim == 4:
        return bias
    if bias.ndim == 3:
        shape = tuple(bias.shape)
        return bias.reshape(shape[0], shape[1], 1, shape[2])
    raise ValueError(
        f"attn_bias has {bias.ndim} axes; it needs 4 [batch, heads, seqlen_q, seqlen_k] or 3 [batch, heads, seqlen_k]: "
        "write attn_bias[None, None] for [seqlen_q, seqlen_k], attn_bias[:, None, None] for [batch, seqlen_k]"
    )


def interval_pair(key_intervals: Any) -> Tuple[Any, Any]:
    """Splits key_intervals into (start, end)."""
    if isinstance(key_intervals, (tuple, list)) and len(key_intervals) == 2:
        return key_intervals[0], key_intervals[1]
    raise TypeError(
        "key_intervals must be a pair (start, end) of int32 arrays; key j is visible to rows start <= i < end"
    )


def check_axes(arrays: Sequence[Any], names: Sequence[str], axes: int) -> None:
    """Every array has `axes` axes, or a sentence."""
    layout = "[batch, seqlen, heads, head_dim]" if axes == 4 else "[total tokens, heads, head_dim]"
    for array, name in zip(arrays, names):
        if array.ndim != axes:
            raise ValueError(f"{name} has {array.ndim} axes; it needs {axes}: {layout}")


def shape_with(bias: Sequence[int], mask: Optional[Sequence[int]]) -> Tuple[int, ...]:
    """Of bias [B, h, Sq, Sk] and a mask of four axes, or [B, n], broadcast."""
    if mask is None:
        return tuple(bias)
    mask = mask if len(mask) == 4 else (mask[0], 1, 1, 1)
    return tuple(have if other == 1 else other for have, other in zip(bias, mask))
