"""The calls behind the names: flash-attn's arguments, already sorted, into calls of ours, forward and backward."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from .. import _native
from .._arguments import NO_WINDOW, integer_of, settings_of
from .._fields import RESULTS, SOURCES
from .._torch import flash_dmattn_func, flash_dmattn_varlen_func
from . import _rules
from ._refusals import InvalidArgument, Unsupported, WrongType, again

UNBOUNDED: _rules.Window = (None, None)
DENSE = (None, None, 0, 0)


def window_of(window_size: Any) -> _rules.Window:
    """(left, right) of a pair or a tensor of two numbers, in which None and negative numbers are unbounded."""
    if type(window_size) is tuple and window_size == NO_WINDOW:
        return UNBOUNDED
    try:
        left, right = window_size.tolist() if isinstance(window_size, Tensor) else window_size
        if type(left) is not int:
            left = None if left is None else integer_of(left, "window_size")
        if type(right) is not int:
            right = None if right is None else integer_of(right, "window_size")
    except (TypeError, ValueError) as error:
        raise again(error) from None
    return None if left is None or left < 0 else left, None if right is None or right < 0 else right


def packing_of(cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any) -> _rules.Packing:
    """Of a function that takes packed tensors alone: without offsets they would be dense ones."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise WrongType(f"{name} is None; it must be a torch.int32 tensor of batch + 1 elements")
    return cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)


_NOTHING: Dict[Any, Tensor] = {}


def nothing(q: Tensor) -> Tensor:
    """A tensor without elements, of q's dtype: what flash-attn gives for the probabilities. One is kept of each kind."""
    if torch.compiler.is_compiling():
        return q.new_empty(0)
    kind = q.dtype, q.device
    kept = _NOTHING.get(kind)
    if kept is None:
        with torch.inference_mode(False):
            kept = _NOTHING[kind] = torch.empty(0, dtype=kind[0], device=kind[1])
    return kept


def rows_contiguous(tensor: Tensor) -> Tensor:
    """With a contiguous last axis, as flash-attn makes them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def plain(
    q: Any, k: Any, v: Any, packing: Any, sink: Any, softmax_scale: Any, causal: Any, window: _rules.Window,
    softcap: Any, deterministic: Any, return_lse: bool,
) -> Any:  # fmt: skip
    """out or (out, lse) of a call in eager mode; None where it needs more: attend() does it then.

    packing: (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), the integers 0 and the rest None when dense.
    """
    if torch.compiler.is_compiling():
        return None
    rows, keys, *longest = packing
    bounds: Any = NO_WINDOW if window is UNBOUNDED else window
    try:
        settings = settings_of(softmax_scale, None, causal, softcap, deterministic, bounds, *longest)
        return _native.attend(q, k, v, *[None] * 4, rows, keys, sink, None, None, None, settings, return_lse, False)
    except (TypeError, ValueError):
        return None  # attend() makes the last axis contiguous, or says what is wrong


def rows_have_keys(q: Tensor, k: Tensor, causal: Any, window: _rules.Window) -> bool:
    """Whether every row of a dense call of plain() sees a key: its own, or any where nothing bounds them."""
    keys = k.shape[1]
    return keys > 0 and (q.shape[1] <= keys or (not causal and window == UNBOUNDED))


def attend(q: Any, k: Any, v: Any, packing: Optional[_rules.Packing] = None, **options: Any) -> Any:
    """_attend(), with errors that callers of flash-attn catch."""
    try:
        return _attend(q, k, v, packing, **options)
    except (TypeError, ValueError) as error:
        raise again(error) from None


def _attend(
    q: Any,
    k: Any,
    v: Any,
    packing: Optional[_rules.Packing],
    *,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window: _rules.Window = UNBOUNDED,
    softcap: float = 0.0,
    deterministic: bool = False,
    alibi_slopes: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    key_intervals: Any = None,
    used: Tuple[Any, Any] = (None, None),
    chunk: int = 0,
    return_lse: bool = False,
) -> Any:
    """out, or (out, lse) with lse +inf in rows without keys. used: (seqused_q, seqused_k). window: None = unbounded; a
    negative bound is one."""
    q, k, v = (rows_contiguous(each) if isinstance(each, Tensor) else each for each in (q, k, v))
    common = dict(softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic, sink=sink)
    left, right = window
    if causal and right is not None and right >= 0:
        right = None
    lengths = used[0] is not None or used[1] is not None
    ruled = lengths or bool(chunk) or any(bound is not None and bound < 0 for bound in (left, right))
    if alibi_slopes is None and not ruled:
        bounds = tuple(-1 if bound is None else bound for bound in (left, right))
        call = dict(is_causal=causal, window_size=bounds if bounds != NO_WINDOW else NO_WINDOW)
        return _ours(q, k, v, packing, attn_mask, attn_bias, key_intervals, return_lse, {**common, **call})
    if packing is not None and packing[0].shape[0] < 2:  # no sequence: no rule
        return _ours(q, k, v, packing, None, None, None, return_lse, common)
    window = left, 0 if causal and right is None else right
    rules = _Rules(q, k, packing, used, window, chunk, key_intervals, ruled)
    if alibi_slopes is not None:
        if attn_bias is not None:
            raise InvalidArgument("alibi_slopes and attn_bias are both given: add the one to the other")
        if rules.reverses and attn_mask is not None:
            raise Unsupported("attn_mask is given beside alibi_slopes without causal: write ALiBi as attn_bias")
        return rules.with_alibi(v, alibi_slopes, attn_mask, return_lse, common)
    results = _ours(q, k, v, packing, attn_mask, attn_bias, rules.intervals(), return_lse, common)
    if used[0] is None or sink is None or not return_lse:
        return results
    return results[0], rules.lse_of_used_rows(results[1])


def _ours(
    q: Any, k: Any, v: Any, packing: Optional[_rules.Packing], mask: Any, bias: Any, intervals: Any, return_lse: bool,
    options: Dict[str, Any],
) -> Any:  # fmt: skip
    options = dict(options, attn_mask=mask, attn_bias=bias, key_intervals=intervals, return_lse=return_lse)
    if packing is None:
        dense: Any = flash_dmattn_func
        return dense(q, k, v, **options)
    packed: Any = flash_dmattn_varlen_func
    return packed(q, k, v, *packing, **options)


class _Rules:
    """A call whose mask or bias depends on lengths."""

    def __init__(
        self, q: Tensor, k: Tensor, packing: Optional[_rules.Packing], used: Tuple[Any, Any], window: _rules.Window,
        chunk: int, key_intervals: Any, ruled: bool,
    ) -> None:  # fmt: skip
        self.q, self.k, self.packing, self.window, self.chunk = q, k, packing, window, chunk
        self.lengths = _rules.lengths_of(q, k, packing, used)
        self.given = None if key_intervals is None else tuple(key_intervals)
        self.ruled = ruled  # by more than causal and window, which the library knows
        self.reverses = window[1] is None or window[1] > 0

    def intervals(self) -> Any:
        own = _rules.intervals_of(self.k, self.packing, self.lengths, self.window, self.chunk)
        return _rules.both(own, self.given)

    def lse_of_used_rows(self, lse: Tensor) -> Tensor:
        """A row beyond seqused_q is none, whatever a sink says."""
        if self.packing is None:
            row = torch.arange(self.q.shape[1], device=lse.device)
            return lse.masked_fill((row >= self.lengths.rows[:, None])[:, None], torch.inf)
        sequence, row = _rules.places(self.q.shape[0], self.packing[0])
        return lse.masked_fill(row >= self.lengths.rows[sequence], torch.inf)

    def with_alibi(self, v: Tensor, alibi_slopes: Tensor, mask: Any, return_lse: bool, options: Dict[str, Any]) -> Any:
        q, k, packing, lengths = self.q, self.k, self.packing, self.lengths
        batch = q.shape[0] if packing is None else packing[0].shape[0] - 1
        slopes = _rules.slopes_of(alibi_slopes, q, batch)
        seqlen_q, seqlen_k = (q.shape[1], k.shape[1]) if packing is None else packing[2:]
        rows = q.shape[0] if packing is not None else seqlen_q
        if self.reverses:
            return self._in_reverse(v, _rules.diagonal_bias(slopes, lengths, seqlen_q, seqlen_k), return_lse, options)
        bias = _rules.key_bias(slopes, lengths, seqlen_k)
        if self.ruled:
            results = _ours(q, k, v, packing, mask, bias, self.intervals(), False, self._with_low(options, return_lse))
        else:  # the right bound is 0: causal
            left = -1 if self.window[0] is None else self.window[0]
            call = dict(self._with_low(options, return_lse), is_causal=True, window_size=(left, -1))
            results = _ours(q, k, v, packing, mask, bias, self.given, False, call)
        if not return_lse:
            return results
        out, lse, low = results
        lse = lse + _rules.row_bias(slopes, lengths, rows, packing)
        return out, lse if low is None else lse + low

    @staticmethod
    def _with_low(options: Dict[str, Any], return_lse: bool) -> Dict[str, Any]:
        return dict(options, return_lse_low=True) if return_lse else options

    def _in_reverse(self, v: Tensor, bias: Tensor, return_lse: bool, options: Dict[str, Any]) -> Any:
        packing, pair = self.packing, self.given
        if self.ruled or self.window != UNBOUNDED:
            pair = self.intervals()
        if pair is not None:
            pair = _rules.reversed_intervals(pair, self.k, packing, self.lengths)
        index = _rules.reversal(self.q, packing)
        axis = 1 if packing is None else 0
        q = _rules.reverse(self.q, index, axis)
        results = _ours(q, self.k, v, packing, None, bias, pair, return_lse, options)
        if not return_lse:
            return _rules.reverse(results, index, axis)
        out, lse = results
        return _rules.reverse(out, index, axis), _rules.reverse(lse, index, lse.dim() - 1)


# ---- backward --------------------------------------------------------------------------------------------------------


def backward(
    dout: Tensor,
    tensors: Tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    outputs: Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]],
    packing: Optional[_rules.Packing] = None,
    *,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window: _rules.Window = UNBOUNDED,
    softcap: float = 0.0,
    deterministic: bool = False,
    alibi_slopes: Optional[Tensor] = None,
    used: Tuple[Any, Any] = (None, None),
) -> Tensor:
    """Writes dq, dk and dv where they are given, from out and lse as they come: they may be of more keys than k holds.

    Returns delta, float32 [B, H, Sq], packed [H, total_q]: the sum of dout * out of each row.
    """
    if alibi_slopes is not None:
        raise Unsupported(
            "alibi_slopes are given to a private backward function of flash-attn: call flash_attn_func, whose backward "
            "takes them"
        )
    left, right = (-1 if bound is None else bound for bound in window)
    pair: Any = (None, None)
    if used != (None, None):
        lengths = _rules.lengths_of(tensors[0], tensors[1], packing, used)
        bounds = window[0], 0 if causal else window[1]
        pair, causal, left, right = _rules.intervals_of(tensors[1], packing, lengths, bounds, 0), False, -1, -1
    offsets, longest = ((None, None), (0, 0)) if packing is None else (packing[:2], packing[2:])
    settings = settings_of(softmax_scale, None, causal, softcap, deterministic, (left, right), *longest)
    dout, out = rows_contiguous(dout), rows_contiguous(out)
    with torch.no_grad():
        inputs = (*map(rows_contiguous, tensors), None, None, *pair, *offsets, None, None, None, None)
        needs = [source < 3 for source in SOURCES]
        low = [None] * (len(RESULTS) - 2)
        grads = torch.ops.flash_dmattn.backward(*inputs, out, lse, dout, None, *needs, *settings, *low)
        for grad, output in zip(grads, outputs):
            if output is not None:
                output.copy_(grad)
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2)
