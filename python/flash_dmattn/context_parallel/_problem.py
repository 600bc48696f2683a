"""The arguments of a context-parallel call, checked on this rank, and what all ranks have to have alike."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._arguments import (
    NO_WINDOW,
    Extents,
    Settings,
    bias_with_four_axes,
    check_layout,
    interval_pair,
    mask_with_four_axes,
    refuse_causal_prefixes,
    said,
    settings_of,
)
from .._fields import SETTING
from .._key_rules import rule_intervals
from .._torch import _autocast, _check_kinds
from ._engine import Operands, changed
from ._gather import CONSTANT, KEYS, ROWS, ROWS_ALONE
from ._kept import KeptMasks, sources_of
from ._visible import Mask
from .layout import Layout


class Given(NamedTuple):
    """The tensors of a call as they came, and what its mask is made of. Packed where cu_seqlens_q is not None."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    attn_bias: Any = None
    sink: Any = None
    window_size: Any = NO_WINDOW
    key_intervals: Any = None
    document_ids: Any = None
    prefix_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None

    @property
    def windows(self) -> Any:
        """One window of each head, or None."""
        return self.window_size if isinstance(self.window_size, Tensor) else None

    def settings(self, options: Dict[str, Any]) -> Settings:
        """options: softmax_scale, scale, is_causal, softcap, deterministic, lse_without_sink, as they came."""
        window = NO_WINDOW if self.windows is not None else self.window_size
        return settings_of(**options, window_size=window)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Local tensors, and the mask in global positions. Causal mask and window are the mask's, not the settings'."""

    operands: Operands
    mask: Mask
    settings: Settings
    seqlens: Tuple[int, int]
    # Where mask and bias may lie by this rank's extents, until ranks have agreed on one.
    mask_kinds: List[str]
    bias_kinds: List[str]
    # Whether query, key, value, bias and sink want gradients; None: as autograd would have it.
    needs: Optional[List[bool]] = None

    @property
    def mask_kind(self) -> str:
        return self.mask_kinds[0]

    @property
    def bias_kind(self) -> str:
        return self.bias_kinds[0]

    @property
    def has_columns(self) -> bool:
        """Whether a mask or bias has a column for every key, so that needed keys are to be one range of them."""
        return ROWS in (self.mask_kind, self.bias_kind)

    def choices(self) -> Dict[str, List[str]]:
        return {"attn_mask": self.mask_kinds, "attn_bias": self.bias_kinds}

    def agreed(self, chosen: Dict[str, str]) -> Problem:
        problem = dataclasses.replace(self, mask_kinds=[chosen["attn_mask"]], bias_kinds=[chosen["attn_bias"]])
        problem.__dict__["text"] = self.text
        return problem

    def needs_gradient(self) -> List[bool]:
        if self.needs is not None:
            return self.needs
        q, k, v, _, bias, *_ = self.operands
        sink = self.operands.sink
        enabled = torch.is_grad_enabled()
        return [enabled and each is not None and each.requires_grad for each in (q, k, v, bias, sink)]

    @functools.cached_property
    def text(self) -> str:
        """fields(), to look kept things up by."""
        return repr(self.fields())

    def fields(self) -> Dict[str, Any]:
        """What ranks must have alike, by the names of a sentence."""
        q, k, v, mask, bias, *_ = self.operands
        sink = self.operands.sink
        start = None if self.mask.key_intervals is None else self.mask.key_intervals[0]
        gradients = [name for name, need in zip(("query", "key", "value", "attn_bias", "sink"), self.needs_gradient()) if need]
        return {
            "batch": q.shape[0],
            "heads": (q.shape[2], k.shape[2]),
            "head dims": (q.shape[3], v.shape[3]),
            "dtype": str(q.dtype),
            "device": q.device.type,
            "mask": ("causal" if self.mask.is_causal else "", tuple(self.mask.window_size)),
            "key_intervals": None if start is None else tuple(start.shape),
            "attn_mask": _described(mask),
            "attn_bias": _described(bias),
            "sink": None if sink is None else (tuple(sink.shape), str(sink.dtype)),
            "options": self.settings,
            "gradients": gradients,
        }


def _described(scores: Optional[Tensor]) -> Any:
    """Of a mask or bias: what does not depend on the rank's numbers of rows and keys."""
    return None if scores is None else (tuple(scores.shape[:2]), str(scores.dtype))


def _kinds(scores: Optional[Tensor], name: str, rows: Tuple[int, int], seqlen_k: int) -> List[str]:
    """Where a mask or bias of four axes may lie. rows: the rank's rows and keys."""
    if scores is None:
        return [CONSTANT]
    extents = tuple(scores.shape[2:])
    fits = {
        KEYS: extents == (1, rows[1]),
        CONSTANT: extents == (1, 1),
        ROWS: extents == (rows[0], seqlen_k),
        ROWS_ALONE: extents == (rows[0], 1),
    }
    kinds = [kind for kind, fit in fits.items() if fit]
    if not kinds:
        raise ValueError(
            f"{name} has shape {list(scores.shape)}; on this rank it is [.., .., {rows[0]}, {seqlen_k}], the rank's "
            f"rows and all keys, or [.., .., 1, {rows[1]}], the rank's keys"
        )
    return kinds


def _check_shards(q: Tensor, k: Tensor, v: Tensor, rows: Tuple[int, int]) -> None:
    for tensor, name, count in ((q, "query", rows[0]), (k, "key", rows[1]), (v, "value", rows[1])):
        if tensor.shape[1] != count:
            raise ValueError(f"{name} has {tensor.shape[1]} rows; the layout gives this rank {count}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] or v.shape[2] != k.shape[2]:
        raise ValueError(
            f"query, key and value have {q.shape[2]}, {k.shape[2]} and {v.shape[2]} heads; those of key and value are "
            "one number, of which the query's is a multiple"
        )
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"query, key and value have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; batches are equal, "
            "and so are the head dims of query and key"
        )


def _contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def problem_of(
    tensors: Tuple[Any, Any, Any],
    scores: Tuple[Any, Any],
    mask: Mask,
    sink: Any,
    settings: Settings,
    rows: Tuple[int, int],
    seqlens: Tuple[int, int],
) -> Problem:
    """tensors: q, k, v [B, rows, heads, D]; scores: mask and bias. rows: of this rank; seqlens: of the whole."""
    _check_kinds(tensors, 4)
    q, k, v = tensors
    _check_shards(q, k, v, rows)
    extents = Extents(q.shape[0], q.shape[2], k.shape[2], *rows)
    for each, name in zip((*scores, sink), ("attn_mask", "attn_bias", "sink")):
        if isinstance(each, Tensor):
            check_layout(each, name)
            if each.device != q.device:
                raise ValueError(f"{name} is on {each.device}, but query is on {q.device}")
        elif each is not None and name == "sink":
            raise TypeError(f"sink is {said(each)}; it must be a torch.Tensor")
    shown = None if scores[0] is None else mask_with_four_axes(scores[0], extents)
    bias = None if scores[1] is None else bias_with_four_axes(scores[1], extents)
    given: Any = _autocast((q, k, v, shown, bias, None, None, None, None, sink))
    operands = Operands(*(each.resolve_neg() if isinstance(each, Tensor) else each for each in given))
    operands = operands._replace(
        q=_contiguous_rows(operands.q), k=_contiguous_rows(operands.k), v=_contiguous_rows(operands.v)
    )
    kinds = [_kinds(each, name, rows, seqlens[1]) for each, name in ((shown, "attn_mask"), (bias, "attn_bias"))]
    pair = mask.key_intervals
    if pair is not None and (pair[0].shape[-1] != seqlens[1] or pair[0].shape != pair[1].shape):
        raise ValueError(
            f"key_intervals have shapes {[list(each.shape) for each in pair]}; every rank gives those of all "
            f"{seqlens[1]} keys"
        )
    whole = changed(settings, causal=False, window_left=-1, window_right=-1)
    return Problem(operands, mask, whole, seqlens, kinds[0], kinds[1])


def problem_given(
    given: Given, settings: Settings, layouts: Tuple[Layout, Layout], rank: int, kept: KeptMasks
) -> Problem:
    """layouts: of rows, and of keys. kept: masks of earlier calls."""
    seqlens, rows = (layouts[0].total, layouts[1].total), (layouts[0].rows(rank), layouts[1].rows(rank))
    numbers: Any = settings
    window = given.windows if given.windows is not None else tuple(numbers[SETTING["window_left"] :][:2])
    sources = sources_of(given.window_size, given.key_intervals, given.document_ids, given.prefix_lengths)
    tensors = given.query, given.key, given.value
    if given.cu_seqlens_q is None:
        made_of = window, given.key_intervals, given.document_ids, given.prefix_lengths, seqlens
        mask = kept.get(sources, settings, lambda: mask_of(settings, *made_of))
    else:
        offsets = given.cu_seqlens_q, given.cu_seqlens_k
        _check_packed(tensors, offsets)
        of_packed = window, given.key_intervals, given.prefix_lengths, offsets, seqlens
        mask = kept.get(sources + offsets, settings, lambda: packed_mask(settings, *of_packed))
        tensors = given.query[None], given.key[None], given.value[None]
    return problem_of(tensors, (given.attn_mask, given.attn_bias), mask, given.sink, settings, rows, seqlens)


def _check_packed(tensors: Tuple[Any, ...], offsets: Tuple[Any, ...]) -> None:
    for each, name in zip(offsets, ("cu_seqlens_q", "cu_seqlens_k")):
        if not isinstance(each, Tensor) or each.dtype is not torch.int32 or each.dim() != 1:
            raise TypeError(f"{name} is {said(each)}; it must be a torch.int32 tensor of batch + 1 elements")
    for each, name in zip(tensors, ("query", "key", "value")):
        if not isinstance(each, Tensor) or each.dim() != 3:
            raise ValueError(f"{name} is {said(each)}; it must be a tensor [rows of this rank, heads, head dim]")


# ---- masks -----------------------------------------------------------------------------------------------------------


def mask_of(
    settings: Settings,
    window: Any,
    key_intervals: Any,
    document_ids: Any,
    prefix_lengths: Any,
    seqlens: Tuple[int, int],
) -> Mask:
    """The mask of a dense call; documents, prefixes and windows of each head become key intervals."""
    numbers: Any = settings
    causal = numbers[SETTING["causal"]]
    refuse_causal_prefixes(prefix_lengths, causal)
    pair = None if key_intervals is None else interval_pair(key_intervals, None)
    made_for = getattr(key_intervals, "seqlen_q", None)
    if made_for is not None and made_for != seqlens[0]:
        raise ValueError(f"key_intervals were made for {made_for} rows, but the layout has {seqlens[0]}")
    windows = window if isinstance(window, Tensor) else None
    if document_ids is not None or prefix_lengths is not None or windows is not None:
        made = rule_intervals(
            document_ids, prefix_lengths, windows, pair, seqlen_q=seqlens[0], seqlen_k=seqlens[1]
        )
        pair = (made.start, made.end)
    left, right = (-1, -1) if windows is not None else window
    return Mask(causal, (left, right), pair)


def _packed_windows(windows: Any, window: Tuple[int, int], causal: bool, device: torch.device) -> Tensor:
    """int32 [n, 2]: the window of each head, with the causal mask in it."""
    made = windows if windows is not None else torch.tensor([window], dtype=torch.int32)
    made = made.to(device)
    if causal:
        made = torch.stack((made[:, 0], torch.zeros_like(made[:, 1])), 1)
    return made


def packed_mask(
    settings: Settings,
    window: Any,
    key_intervals: Any,
    prefix_lengths: Any,
    offsets: Tuple[Tensor, Tensor],
    seqlens: Tuple[int, int],
) -> Mask:
    """The mask of a packed call, as intervals of rows of the packed tensor."""
    numbers: Any = settings
    causal = numbers[SETTING["causal"]]
    refuse_causal_prefixes(prefix_lengths, causal)
    cu_q, cu_k = offsets
    pair = None if key_intervals is None else interval_pair(key_intervals, None)
    windows = window if isinstance(window, Tensor) else None
    bounds: Any = (-1, -1) if windows is not None else window
    given = _packed_windows(windows, bounds, causal, cu_q.device)
    start, end = rule_intervals(
        None, prefix_lengths, given, pair, seqlen_k=seqlens[1], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
    )
    begin, length = cu_q.long()[:-1], cu_q.long().diff()
    key = torch.arange(seqlens[1], device=cu_q.device)
    sequence = (torch.searchsorted(cu_k.long(), key, right=True) - 1).clamp(0, max(len(begin) - 1, 0))
    if not len(begin):
        zero = torch.zeros(1, 1, seqlens[1], dtype=torch.int32, device=cu_q.device)
        return Mask(False, (-1, -1), (zero, zero))
    first = torch.minimum(start.long().clamp(min=0), length[sequence])
    last = torch.minimum(end.long().clamp(min=0), length[sequence])
    outside = (key < cu_k[0]) | (key >= cu_k[-1])
    last = torch.where(outside, 0, last)
    return Mask(False, (-1, -1), tuple((each + begin[sequence]).int()[None] for each in (first, last)))  # type: ignore[arg-type]
