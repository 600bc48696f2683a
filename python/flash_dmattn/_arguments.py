"""Argument rules that PyTorch and NumPy callers share: shapes and numbers, never data."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

# (max_seqlen_q, max_seqlen_k, softmax_scale, causal, softcap, window_left, window_right, deterministic,
# lse_without_sink, mask_plan): the order the extension takes them in. softmax_scale None = head_dim ** -0.5; max_seqlen
# 0 = found from cu_seqlens; mask_plan: the number of a MaskPlan, 0 = none.
Settings = Tuple[int, int, Optional[float], bool, float, int, int, bool, bool, int]

NO_WINDOW = (-1, -1)

_FLASH_ATTN_ORDER = (
    "flash-attn's functions take dropout_p before the scale, these have no dropout: leave it out and give "
    "softmax_scale, is_causal and softcap by keyword"
)

# Forces a kernel family, "reference" say, on every call of the process (tests do); None lets the plan choose.
forced_family: Optional[str] = None


# ---- single values ---------------------------------------------------------------------------------------------------


def said(value: Any) -> str:
    """A value for a sentence: numbers, texts and tuples as they are, of anything else the kind."""
    shape = getattr(value, "shape", ())
    if shape:
        return f"a {type(value).__name__} of shape {list(shape)}"
    if not isinstance(value, (bool, int, float, complex, str, bytes, tuple, type(None))):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_symbol(value: Any) -> bool:
    """A number that PyTorch traces; a look at its value would fix it."""
    return type(value).__name__ in ("SymInt", "SymFloat")


def flag_of(value: Any, name: str) -> bool:
    """A bool, NumPy's too, or 0 or 1; None is False."""
    if value is True or value is False:
        return value
    if value is None:
        return False
    if type(value) is int and value in (0, 1):
        return value == 1
    if str(getattr(value, "dtype", None)) == "bool" and getattr(value, "shape", None) == ():
        return bool(value)
    if isinstance(value, float) and name == "is_causal":
        raise TypeError(f"{name} is {value}, which is not a bool; {_FLASH_ATTN_ORDER}")
    raise TypeError(f"{name} is {said(value)}; it must be True or False")


def integer_of(value: Any, name: str) -> int:
    """An integer that the library can take, of anything that is one to Python."""
    if type(value) is not int:
        if _is_symbol(value):
            return value  # type: ignore[no-any-return]
        if not hasattr(value, "__index__") or getattr(value, "shape", ()) != ():
            raise TypeError(f"{name} is {said(value)}; it must be an integer")
        try:
            value = value.__index__()
        except TypeError:
            raise TypeError(f"{name} is {said(value)}; it must be an integer") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {value}; it must fit 64 bits")
    return value  # type: ignore[no-any-return]


def at_least(least: int, value: Any, name: str) -> int:
    """An integer of a range that ends at 2**63 - 1."""
    value = integer_of(value, name)
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return value  # type: ignore[no-any-return]


def number_of(value: Any, name: str) -> Any:
    """A float of a number or of a tensor with one element. What PyTorch traces stays as it is."""
    if type(value) is float or _is_symbol(value):
        return value
    if type(value) is not int:
        if hasattr(value, "requires_grad"):
            return _number_of_tensor(value, name)
        if isinstance(value, bool) and name in ("softmax_scale", "softcap"):
            raise TypeError(f"{name} is {value}, which is not a number; {_FLASH_ATTN_ORDER}")
        if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
            raise TypeError(f"{name} is {said(value)}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {said(value)}; it must fit a float32") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {said(value)}; it must be a number") from None


def _number_of_tensor(value: Any, name: str) -> Any:
    import torch

    value = torch.as_tensor(value)  # compiled code has NumPy's numbers as arrays with all of a tensor's attributes
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if value.requires_grad and torch.is_grad_enabled():
        learn = ", or multiply query by it and give softmax_scale=1.0" if name == "softmax_scale" else ""
        raise TypeError(
            f"{name} is a tensor that requires a gradient, and the library computes none for it: give {name}.detach()"
            f"{learn}"
        )
    if value.numel() != 1 or value.dtype is torch.bool or value.is_complex():
        raise TypeError(f"{name} is {said(value)}, {value.dtype}; it must be a number")
    if not traced and torch.autograd.forward_ad._current_level >= 0:
        if torch.autograd.forward_ad.unpack_dual(value).tangent is not None:
            raise TypeError(f"{name} is a tensor with a tangent, and the library computes no derivative by it")
    return value if traced else float(value)


# ---- settings of a call ----------------------------------------------------------------------------------------------


def window_of(window_size: Any) -> Tuple[int, int]:
    """(left, right) of a caller's pair, in which None and -1 are unbounded. Signs are checked by the library."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size is {said(window_size)}; it must be a pair (left, right), -1 or None for unbounded"
        )
    left, right = window_size
    left = -1 if left is None else integer_of(left, "window_size[0]")
    return left, -1 if right is None else integer_of(right, "window_size[1]")


def settings_of(
    softmax_scale: Optional[float],
    scale: Optional[float],
    is_causal: Optional[bool],
    softcap: Optional[float],
    deterministic: Optional[bool],
    window_size: Sequence[Optional[int]],
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    lse_without_sink: Optional[bool] = None,
    mask_plan: int = 0,
) -> Settings:
    """Fills in the defaults. Whether numbers are in range is checked by the library, which says what is allowed."""
    if scale is not None:
        if softmax_scale is not None:
            raise ValueError("both softmax_scale and its alias scale are given; give one of them")
        softmax_scale = scale
    left, right = NO_WINDOW if window_size is NO_WINDOW else window_of(window_size)
    return (
        max_seqlen_q,
        max_seqlen_k,
        None if softmax_scale is None else number_of(softmax_scale, "softmax_scale"),
        False if is_causal is None else flag_of(is_causal, "is_causal"),
        0.0 if softcap is None else number_of(softcap, "softcap"),
        left,
        right,
        False if deterministic is None else flag_of(deterministic, "deterministic"),
        False if lse_without_sink is None else flag_of(lse_without_sink, "lse_without_sink"),
        mask_plan,
    )


# What other libraries' functions take: the value that changes nothing, and what to write in place of any other.
_FOREIGN_KEYWORDS: Dict[str, Tuple[Any, str]] = {
    "causal": (None, "write is_causal"),
    "dropout_p": (0.0, "there is no dropout"),
    "alibi_slopes": (None, "write an attn_bias of -slope[h] * abs(i + Sk - Sq - j)"),
    "return_softmax": (False, "write return_attn_probs"),
    "return_softmax_lse": (False, "write return_lse"),
    "num_splits": (0, "the plan decides it"),
    "enable_gqa": (False, "the shapes say it"),
}


def refuse_keywords(function: str, keywords: Dict[str, Any]) -> None:
    """Keywords that a function does not have: a sentence, but for those of other libraries at their default."""
    for name, value in keywords.items():
        if name not in _FOREIGN_KEYWORDS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        default, instead = _FOREIGN_KEYWORDS[name]
        if value is not default and not (type(value) in (int, float) and value == default):
            raise TypeError(f"{name} is {said(value)}, but {function} has no {name}: {instead}. {_FLASH_ATTN_ORDER}")


def refuse_dropout_by_position(value: Any) -> None:
    """A scale of 0 that is given by position is flash-attn's dropout_p."""
    if type(value) in (int, float) and value == 0:
        raise TypeError(f"softmax_scale is {value} by position; {_FLASH_ATTN_ORDER}")


# ---- masks and biases ------------------------------------------------------------------------------------------------


class Extents(NamedTuple):
    """What masks and biases broadcast to; in packed calls the lengths are max_seqlen_q and max_seqlen_k."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int


def dense_extents(q: Sequence[int], k: Sequence[int]) -> Extents:
    """Of the shapes of q [B, Sq, H, D] and k [B, Sk, Hkv, D]."""
    return Extents(q[0], q[2], k[2], q[1], k[1])


def packed_extents(q: Sequence[int], k: Sequence[int], cu_seqlens_q: Sequence[int], longest: Sequence[int]) -> Extents:
    """Of the shapes of q [total_q, H, D], k [total_k, Hkv, D] and cu_seqlens_q [B + 1], and the longest sequences."""
    return Extents(cu_seqlens_q[0] - 1, q[1], k[1], longest[0], longest[1])


def _without_query_axis(tensor: Any, name: str, extents: Extents) -> Any:
    """[B|1, h, Sk|1] as [B|1, h, 1, Sk|1]. Where the middle axis may as well count rows, nobody guesses."""
    shape, (batch, heads, heads_kv, rows, keys) = tuple(tensor.shape), extents
    if shape[0] not in (1, batch) or shape[1] not in (1, heads, heads_kv) or shape[2] not in (1, keys):
        some = f"1, {heads_kv} or {heads}" if heads_kv != heads else f"1 or {heads}"
        raise ValueError(
            f"{name} has shape {list(shape)}; with three axes it is [{batch} or 1, {some} heads, {keys} or 1]: write "
            f"{name}[:, None] for [batch, seqlen_q, seqlen_k]"
        )
    if shape[1] > 1 and shape[1] == rows:
        raise ValueError(
            f"{name} has shape {list(shape)}, and its middle axis may count heads or rows of the query: write "
            f"{name}[:, :, None] for [batch, heads, seqlen_k], {name}[:, None] for [batch, seqlen_q, seqlen_k]"
        )
    return tensor.reshape(shape[0], shape[1], 1, shape[2])


def _padding(mask: Any, extents: Extents) -> Any:
    """A mask [B|1, Sk] as [B|1, 1, 1, Sk]."""
    shape, (batch, _, _, rows, keys) = tuple(mask.shape), extents
    if shape[1] != keys or shape[0] not in (1, batch):
        raise ValueError(
            f"attn_mask has shape {list(shape)}; a mask of two axes is a padding mask [{batch} or 1, {keys}]: "
            "write attn_mask[None, None] for one of [seqlen_q, seqlen_k]"
        )
    if shape[0] > 1 and shape[0] == rows and shape[0] == keys:
        raise ValueError(
            f"attn_mask has shape {list(shape)}, and its first axis may count sequences or rows of the query: write "
            "attn_mask[:, None, None] for a padding mask [batch, seqlen_k], attn_mask[None, None] for one of "
            "[seqlen_q, seqlen_k]"
        )
    return mask.reshape(shape[0], 1, 1, shape[1])


def mask_with_four_axes(mask: Any, extents: Extents) -> Any:
    """A bool mask as [B|1, h, Sq|1, Sk|1]: 4-D as it is, 3-D [B, h, Sk] has no query axis, 2-D is padding [B|1, Sk]."""
    if isinstance(mask, (int, float)):
        raise TypeError(f"attn_mask is the number {mask}; it must be a bool mask, True = visible. {_FLASH_ATTN_ORDER}")
    if not hasattr(mask, "dtype"):
        raise TypeError(f"attn_mask is {said(mask)}; it must be a bool mask, True = visible")
    if str(mask.dtype).rpartition(".")[2] != "bool":
        raise TypeError(
            f"attn_mask is {mask.dtype}; it must be bool with True = visible: write attn_mask=(mask > 0) for a mask of "
            "ones and zeros, or attn_bias=mask for one that is added to the scores"
        )
    if mask.ndim == 4:
        return mask
    if mask.ndim == 3:
        return _without_query_axis(mask, "attn_mask", extents)
    if mask.ndim == 2:
        return _padding(mask, extents)
    raise ValueError(
        f"attn_mask has {mask.ndim} axes; it needs 4 [batch, heads, seqlen_q, seqlen_k], 3 [batch, heads, seqlen_k] or "
        "2 [batch, seqlen_k]"
    )


def bias_with_four_axes(bias: Any, extents: Extents) -> Any:
    """A bias as [B|1, h, Sq|1, Sk|1]: 4-D as it is, 3-D [B, h, Sk] has no query axis."""
    if isinstance(bias, (int, float)):
        raise TypeError(
            f"attn_bias is the number {bias}; it must be a tensor that is added to the scores. {_FLASH_ATTN_ORDER}"
        )
    if not hasattr(bias, "dtype"):
        raise TypeError(f"attn_bias is {said(bias)}; it must be a tensor that is added to the scores")
    if str(bias.dtype).rpartition(".")[2] == "bool":
        raise TypeError("attn_bias is bool; a bool mask goes to attn_mask")
    if bias.ndim == 4:
        return bias
    if bias.ndim == 3:
        return _without_query_axis(bias, "attn_bias", extents)
    raise ValueError(
        f"attn_bias has {bias.ndim} axes; it needs 4 [batch, heads, seqlen_q, seqlen_k] or 3 [batch, heads, seqlen_k]: "
        "write attn_bias[None, None] for [seqlen_q, seqlen_k], attn_bias[:, None, None] for [batch, seqlen_k]"
    )


def shape_with(bias: Sequence[int], mask: Optional[Sequence[int]]) -> Tuple[int, ...]:
    """Of bias [B, h, Sq, Sk] and a mask of four axes, or [B, n], broadcast."""
    if mask is None:
        return tuple(bias)
    mask = mask if len(mask) == 4 else (mask[0], 1, 1, 1)
    return tuple(have if other == 1 else other for have, other in zip(bias, mask))


# ---- key intervals ---------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    start: Any
    end: Any


class KeyIntervals(_Pair):
    """(start, end), a pair that also knows how many rows of a query it was made for.

    Functions of attention refuse one that was made for another number of rows; a plain pair of arrays is taken as it
    is.

    Args:
        start, end: int32 [B|1, h, Sk]: key j is visible to rows start <= i < end.
        seqlen_q: the number of rows; default None = not known, nothing is compared. Copies and pickles keep it; what
            makes a named tuple anew from its items (a map over a tree of tensors, say) gives None.

    Raises:
        Nothing: the functions that take it check it.

    Examples:
        >>> from flash_dmattn import masks
        >>> intervals = masks.causal_intervals(2, 4)
        >>> start, end = intervals
        >>> intervals.seqlen_q, start.tolist()
        (2, [[[-2, -1, 0, 1]]])
    """

    seqlen_q: Optional[int] = None

    def __new__(cls, start: Any, end: Any, seqlen_q: Optional[int] = None) -> KeyIntervals:
        pair = super().__new__(cls, start, end)
        pair.seqlen_q = seqlen_q
        return pair

    def __repr__(self) -> str:
        return f"KeyIntervals(start={self.start!r}, end={self.end!r}, seqlen_q={self.seqlen_q})"


def _pair(given: Any, name: str, meaning: str) -> Tuple[Any, Any]:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"{name} is {said(given)}; it must be a pair (start, end) of int32 arrays; {meaning}")
    return given[0], given[1]


def interval_pair(key_intervals: Any, q: Any, max_seqlen_q: int = 0) -> Tuple[Any, Any]:
    """Splits key_intervals into (start, end); q is [B, Sq, H, D], or packed, with sequences of max_seqlen_q rows."""
    start, end = _pair(key_intervals, "key_intervals", "key j is visible to rows start <= i < end")
    made_for = getattr(key_intervals, "seqlen_q", None)
    if made_for is not None:
        rows = max_seqlen_q or (q.shape[1] if getattr(q, "ndim", 0) == 4 else made_for)
        if rows != made_for:
            raise ValueError(
                f"key_intervals were made for {made_for} rows, but the query has {rows}: make them with seqlen_q={rows}"
            )
    return start, end


def range_pair(row_intervals: Any) -> Tuple[Any, Any]:
    """Splits row_intervals into (start, end)."""
    if row_intervals is None:
        return None, None
    return _pair(row_intervals, "row_intervals", "row i sees the keys start <= j < end of each of its ranges")


def row_masks(row_intervals: Any, block_mask: Any) -> Tuple[Any, Any, Any]:
    """(start, end, block_mask): row_intervals in two, and what stands behind them in native_fields.h."""
    if isinstance(block_mask, (tuple, list)) or hasattr(block_mask, "kv_indices"):
        raise TypeError(
            f"block_mask is {said(block_mask)}; it must be a bool array: masks.blocks_from_lists makes one of counts "
            "and indices, masks.from_block_mask of FlexAttention's"
        )
    return (*range_pair(row_intervals), block_mask)


def refuse_causal_prefixes(prefix_lengths: Any, is_causal: Any) -> None:
    if prefix_lengths is not None and is_causal:
        raise ValueError(
            "prefix_lengths are given beside is_causal, which hides their prefixes: leave it out; keys past the prefix "
            "are causal without it"
        )


# ---- tensors ---------------------------------------------------------------------------------------------------------

def check_layout(tensor: Any, name: str) -> None:
    """A tensor of PyTorch's that is an array of numbers, or a sentence."""
    import torch

    if tensor.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; query, key and value may be, where all are of the layout torch.jagged"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "a quantized tensor" if tensor.is_quantized else f"a tensor of the layout {tensor.layout}"
        raise TypeError(f"{name} is {kind}; it must be dense")


def refuse_negated(tensor: Any, name: str) -> None:
    """A sentence about a tensor of PyTorch's whose memory holds the opposite of its numbers."""
    if tensor.is_neg():
        raise ValueError(
            f"{name} is a negated view (torch.Tensor.is_neg), whose memory holds the opposite of its numbers: give "
            f"{name}.resolve_neg()"
        )


def num_results_of(return_lse: Any, return_lse_low: Any, return_attn_probs: Any) -> int:
    """1: out; 2: also lse; 3: also lse_low or the probabilities."""
    if return_lse is return_lse_low is False and return_attn_probs is None:
        return 1
    low, probs = flag_of(return_lse_low, "return_lse_low"), flag_of(return_attn_probs, "return_attn_probs")
    if low and probs:
        raise ValueError("return_lse_low and return_attn_probs are both given; the third result can be one of them")
    return 3 if low or probs else 2 if flag_of(return_lse, "return_lse") else 1


def check_axes(arrays: Sequence[Any], names: Sequence[str], axes: int) -> None:
    """Every array has `axes` axes, or a sentence."""
    layout = "[batch, seqlen, heads, head_dim]" if axes == 4 else "[total tokens, heads, head_dim]"
    for array, name in zip(arrays, names):
        if array.ndim != axes:
            raise ValueError(f"{name} has {array.ndim} axes; it needs {axes}: {layout}")


def with_layout_hint(error: ValueError, q: Any, k: Any) -> ValueError:
    """The error of a call, and who takes its tensors where their axes 1 and 2 seem to have changed places."""
    shapes: Any = [tuple(getattr(each, "shape", ())) for each in (q, k)]
    if any(len(shape) != 4 for shape in shapes) or not any(word in str(error) for word in ("shape", "heads", "length")):
        return error
    (_, heads, _, _), (_, heads_kv, keys, _) = shapes
    if keys <= heads_kv or heads_kv == 0 or heads == 0 or heads % heads_kv:
        return error
    return ValueError(
        f"{error}. If the tensors are [batch, heads, seqlen, head_dim], give them to "
        "flash_dmattn.scaled_dot_product_attention, or give their .transpose(1, 2)"
    )
