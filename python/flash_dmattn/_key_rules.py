"""Rules of a sequence that hold at once, as key intervals: documents, prefixes, windows of each head."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

from . import _native
from ._arguments import NO_WINDOW, KeyIntervals, at_least, interval_pair, refuse_causal_prefixes, said

# In the order of the extension.
_NAMES = (
    "document_ids", "prefix_lengths", "window_sizes", "interval_start", "interval_end", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


def _shape_of(rules: Sequence[Any], seqlen_k: Optional[int], packed: bool) -> Tuple[int, ...]:
    """[B, h, Sk] of what is written, packed [h, total_k]: the larger of what the rules have."""
    ids, prefixes, windows, start, *_ = (None if rule is None else tuple(rule.shape) for rule in rules)
    for shape, axes, name in ((ids, 2, _NAMES[0]), (prefixes, 1, _NAMES[1]), (windows, 2, _NAMES[2])):
        if shape is not None and len(shape) != axes:
            raise ValueError(f"{name} has {len(shape)} axes; it needs {axes}")
    if start is not None and len(start) != 3 - packed:
        raise ValueError(f"key_intervals have {len(start)} axes; they need {3 - packed}")
    ids = None if packed else ids  # which are refused there
    keys = ids[1] if ids is not None else start[-1] if start is not None else seqlen_k
    if keys is None:
        raise ValueError("seqlen_k is None; neither document_ids nor key_intervals say how many keys there are")
    if seqlen_k is not None and seqlen_k != keys:
        raise ValueError(f"seqlen_k is {seqlen_k}, but {'document_ids' if ids else 'key_intervals'} have {keys} keys")
    heads = max(windows[0] if windows else 1, start[-2] if start else 1)
    if packed:
        return heads, keys
    return max(1, *(shape[0] for shape in (ids, prefixes, start) if shape is not None), 1), heads, keys


def rule_intervals(
    document_ids: Any = None,
    prefix_lengths: Any = None,
    window_sizes: Any = None,
    key_intervals: Any = None,
    *,
    seqlen_q: Optional[int] = None,
    seqlen_k: Optional[int] = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
) -> KeyIntervals:
    """Documents, prefixes, windows and key intervals that hold at once: a row sees a key where all given let it.

    Args:
        document_ids: int32 [B|1, S], rising along S: rows see the keys of their own document; Sq = Sk = S. On CUDA
            devices it is not checked that they rise. Default None, as of the other rules.
        prefix_lengths: int32 [B|1]: rows see the keys below their sequence's number, and the others causally.
        window_sizes: int32 [h, 2]: (left, right) of each head; -1 = unbounded.
        key_intervals: (start, end), int32 [B|1, h, Sk], packed [h, total_k]. Where it and window_sizes have unlike
            heads, one number is a multiple of the other: groups of heads share one.
        seqlen_q: rows of the query; default Sk. Ignored where sequences are packed.
        seqlen_k: keys, of all sequences where they are packed; needed where no other argument says it.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1]: packed sequences; document_ids are refused then.

    Returns:
        KeyIntervals (start, end), int32 [B, h, Sk], packed [h, total_k]. One kernel on CUDA devices.

    Raises:
        TypeError: a rule is no array, or of another library than the first.
        ValueError: no rule is given, shapes do not fit each other, or on the CPU a number is not allowed.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import masks
        >>> ids = numpy.array([[7, 7, 8, 8, 8]], numpy.int32)
        >>> start, end = masks.rule_intervals(ids)
        >>> start.tolist(), end.tolist()
        ([[[0, 0, 2, 2, 2]]], [[[2, 2, 5, 5, 5]]])
    """
    pair = (None, None) if key_intervals is None else interval_pair(key_intervals, None)
    rules = (document_ids, prefix_lengths, window_sizes, *pair, cu_seqlens_q, cu_seqlens_k)
    given = [(rule, name) for rule, name in zip(rules, _NAMES) if rule is not None]
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if not given:
        raise ValueError("no rule is given; document_ids, prefix_lengths, window_sizes and key_intervals are")
    for rule, name in given:
        if not hasattr(rule, "shape"):
            raise TypeError(f"{name} is {said(rule)}; it must be an int32 array")
    shape = _shape_of(rules, seqlen_k, packed)
    rows = 0 if packed else at_least(0, shape[-1] if seqlen_q is None else seqlen_q, "seqlen_q")
    from .masks import _Beside, _is_torch, _on_device, _on_torch

    if _is_torch(given[0][0]):
        import torch

        for rule, name in given:
            if not _is_torch(rule):
                raise TypeError(f"{name} is {said(rule)}; it must be a torch tensor, as {given[0][1]} is")
            _on_device(rule, name)
        _on_torch()  # defines the operator
        start, end = torch.ops.flash_dmattn.rule_intervals(*rules, rows, list(shape))
        return KeyIntervals(start, end, None if packed else rows)
    beside = _Beside(*given[0])
    borrowed = [beside.borrow(rule, name) for rule, name in zip(rules, _NAMES)]
    outputs, written = beside.pair(shape)
    _native.rule_intervals(*(each and each.arguments() for each in borrowed), *written, rows, beside.lender.stream)
    return beside.hand_over(outputs, None if packed else rows)


def joined(
    key_intervals: Any,
    window_size: Any,
    rules: Tuple[Any, Any],
    is_causal: Any,
    q: Any,
    k: Any,
    offsets: Tuple[Any, Any] = (None, None),
) -> Tuple[Any, Any]:
    """(key_intervals, window_size) of a call whose rules (document_ids, prefix_lengths) or array of windows are a part
    of the former now. q, k: [B, S, H, D], packed [total, H, D]."""
    document_ids, prefix_lengths = rules
    refuse_causal_prefixes(prefix_lengths, is_causal)
    windows = None
    if getattr(window_size, "ndim", 0) == 2:
        windows, window_size = window_size, NO_WINDOW
    if document_ids is None and prefix_lengths is None and windows is None:
        return key_intervals, window_size
    rows, keys = (each.shape[0 if offsets[0] is not None else 1] for each in (q, k))
    made = rule_intervals(
        document_ids,
        prefix_lengths,
        windows,
        key_intervals,
        seqlen_q=rows,
        seqlen_k=keys,
        cu_seqlens_q=offsets[0],
        cu_seqlens_k=offsets[1],
    )
    return made, window_size
