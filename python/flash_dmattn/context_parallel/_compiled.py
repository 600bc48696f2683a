"""Calls in compiled code: one operator of torch.library, which finds its ContextParallel by a number."""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._arguments import interval_pair
from .._operators import define, differentiate, refuse_second_order
from ._engine import GRADIENTS, lse_dtype
from ._problem import Given

_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = iter(range(1, 1 << 62))

_NAMES = ("query", "key", "value", "attn_mask", "attn_bias", "sink", "windows", "start", "end", "document_ids",
          "prefix_lengths", "cu_seqlens_q", "cu_seqlens_k")  # fmt: skip
_TENSORS = ", ".join(f"Tensor{'' if number < 3 else '?'} {name}" for number, name in enumerate(_NAMES))
_SETTINGS = (
    "int number, int max_seqlen_q, int max_seqlen_k, float? softmax_scale, bool causal, float softcap, int left, int right, "
    "bool deterministic, bool lse_without_sink, int mask_plan"
)
# Of these inputs there are gradients, in the order of GRADIENTS.
_SOURCES = (0, 1, 2, 4, 5)
_FLOWING = "Tensor out, Tensor lse, Tensor lse_low, Tensor? dout, Tensor? dlse, bool[] needs"


def enter(cp: Any) -> int:
    """A number by which compiled code finds the object while it lives."""
    number = next(_numbers)
    _OBJECTS[number] = cp
    return number


def _object(number: int) -> Any:
    cp = _OBJECTS.get(number)
    if cp is None:
        raise RuntimeError("the ContextParallel that this code was compiled with is no more; keep it while the code runs")
    return cp


def _given(tensors: Sequence[Any], left: int, right: int) -> Given:
    q, k, v, mask, bias, sink, windows, start, end, *others = tensors
    window = (left, right) if windows is None else windows
    return Given(q, k, v, mask, bias, sink, window, None if start is None else (start, end), *others)


def _forward(*arguments: Any) -> Tuple[Tensor, Tensor, Tensor]:
    tensors, (number, *settings) = arguments[: len(_NAMES)], arguments[len(_NAMES) :]
    given = _given(tensors, settings[5], settings[6])
    out, lse, low = _object(number)._attend_by_operator(given, tuple(settings))
    return out.contiguous(), lse.contiguous(), out.new_empty(0) if low is None else low.contiguous()


def _forward_fake(*arguments: Any) -> Tuple[Tensor, Tensor, Tensor]:
    q, v, bias = arguments[0], arguments[2], arguments[4]
    rows = [q.shape[-2], q.shape[-3]]
    lse = q.new_empty((q.shape[0], *rows) if q.dim() == 4 else tuple(rows), dtype=lse_dtype(q))
    low = q.new_empty(0) if bias is None else torch.empty_like(lse)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse, low


def _backward(*arguments: Any) -> List[Tensor]:
    count = len(_NAMES)
    tensors, results, flowing, needs = arguments[:count], arguments[count : count + 3], arguments[count + 3 : count + 5], arguments[count + 5]
    number, *settings = arguments[count + 6 :]
    low = results[2] if results[2].numel() or not results[1].numel() else None
    given = _given(tensors, settings[5], settings[6])
    known = (results[0], results[1], low)
    grads = _object(number)._gradients_by_operator(given, tuple(settings), known, flowing, list(needs))
    return [results[0].new_empty(0) if each is None else each.contiguous() for each in grads]


def _backward_fake(*arguments: Any) -> List[Tensor]:
    needs = arguments[len(_NAMES) + 5]
    return [
        arguments[0].new_empty(arguments[source].shape, dtype=arguments[source].dtype) if need else arguments[0].new_empty(0)
        for source, need in zip(_SOURCES, needs)
    ]


def _save(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: len(_NAMES)], *output)
    ctx.settings = inputs[len(_NAMES) :]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor], _: Any) -> Tuple[Any, ...]:
    wanted = ctx.needs_input_grad
    grads: List[Any] = [None] * len(wanted)
    needs = [wanted[source] for source in _SOURCES]
    if any(needs):
        operator: Any = torch.ops.flash_dmattn.over_ranks_backward
        computed = operator(*ctx.saved_tensors, dout, dlse, needs, *ctx.settings)
        for source, need, grad in zip(_SOURCES, needs, computed):
            grads[source] = grad if need else None
    return tuple(grads)


assert len(_SOURCES) == len(GRADIENTS)
define("over_ranks", f"{_TENSORS}, {_SETTINGS}", _forward, _forward_fake, "(Tensor, Tensor, Tensor)")
differentiate("over_ranks", _gradients, _save)
define("over_ranks_backward", f"{_TENSORS}, {_FLOWING}, {_SETTINGS}", _backward, _backward_fake, "Tensor[]")
differentiate("over_ranks_backward", refuse_second_order)


def attend_compiled(number: int, rows: int, given: Given, options: Dict[str, Any], num_results: int) -> Any:
    """The operator's call while code is compiled. rows: of the layout."""
    settings = given.settings(options)
    start, end = (None, None) if given.key_intervals is None else interval_pair(given.key_intervals, None)
    made_for = getattr(given.key_intervals, "seqlen_q", None)
    if made_for is not None and made_for != rows:
        raise ValueError(f"key_intervals were made for {made_for} rows, but the layout has {rows}")
    head = given.query, given.key, given.value, given.attn_mask, given.attn_bias, given.sink, given.windows, start, end
    rest = given.document_ids, given.prefix_lengths, given.cu_seqlens_q, given.cu_seqlens_k
    out, lse, low = torch.ops.flash_dmattn.over_ranks(*head, *rest, number, *settings)
    results = out, lse, None if given.attn_bias is None else low
    return out if num_results == 1 else results[:num_results]
