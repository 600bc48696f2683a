"""Attention by keys of one rank at a time, where memory has no room for all that a rank needs.

In step t each rank has the keys that it needs of the rank t before it, while those of the next step travel. Each step
gives a part of the result of every row, in float32, and parts are merged in the order of steps.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import _native
from .._arguments import Settings
from .._fields import SETTING
from .._operators import native_view, stream_of
from . import _engine
from ._engine import Operands
from ._exchange import Messages, Return, Table, make_table
from ._gather import Call, Gradients, Keys, Parts, Set, wide
from ._pieces import Piece, make_pieces
from ._ranges import Range, Ranges, intersect, size, union
from ._visible import Mask
from .layout import Layout

Result = Tuple[Tensor, Tensor, Tensor]  # out, lse and lse_low of a rank's rows


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Keys of one owner. Each fold is the calls on some of them, which together have every row once."""

    table: Table
    folds: List[List[Piece]]
    exchanges: bool  # whether any rank gets keys of another


def _moved(piece: Piece, by: int) -> Piece:
    return dataclasses.replace(piece, keys=(piece.keys[0] + by, piece.keys[1] + by))


def make_steps(
    layouts: Tuple[Layout, Layout],
    needed: Sequence[Ranges],
    mask: Mask,
    rank: int,
    has_columns: bool,
    device: torch.device,
) -> List[Step]:
    """layouts: of rows, and of keys. needed: of each rank, sorted. has_columns: a mask or bias has a column for every
    key, so that the keys of a fold are one range."""
    rows, keys = layouts
    ranks, seqlens = rows.ranks, (rows.total, keys.total)
    owned = [union(each) for each in keys.ranges]
    steps = []
    for step in range(ranks):
        parts = [intersect(needed[each], owned[(each - step) % ranks]) for each in range(ranks)]
        folds, place = [], 0
        apart = [[each] for each in parts[rank]] if has_columns else [parts[rank]] if parts[rank] else []
        for part in apart or ([[]] if step == 0 else []):  # the first step has every row, with keys or without
            made = make_pieces(rows.ranges[rank], mask, seqlens, part, device)
            folds.append([_moved(piece, place) for piece in made])
            place += size(part)
        steps.append(Step(make_table(keys.ranges, parts, rank), folds, step > 0 and any(parts)))
    return steps


@dataclasses.dataclass(frozen=True, eq=False)
class RingCall:
    """Everything of a call but its tensors."""

    messages: Messages
    steps: Sequence[Step]
    settings: Settings
    mask_kind: str
    bias_kind: str
    sm_margin: int = 0

    def forward(self, operands: Operands) -> List[Optional[Tensor]]:
        return forward(self, operands)

    def backward(
        self,
        operands: Operands,
        results: Sequence[Optional[Tensor]],
        flowing: Tuple[Tensor, Optional[Tensor]],
        needs: Dict[str, bool],
    ) -> List[Optional[Tensor]]:
        return backward(self, operands, results, flowing, needs)

    def of_step(self, step: Step, heads: Range) -> Call:
        kinds = self.mask_kind, self.bias_kind
        return Call(
            self.messages, step.table, (), [heads], self.settings, *kinds, step.exchanges, is_ring=True, sm_margin=self.sm_margin
        )


def _widened(operands: Operands) -> Operands:
    """What calls on the CPU get: 16-bit tensors in float32, so that parts are not rounded. CUDA kernels get them as
    they are, and their parts are rounded once each."""
    if operands.q.is_cuda:
        return operands
    dtype = wide(operands.q.dtype)
    bias, sink = (None if each is None else each.to(dtype) for each in (operands.bias, operands.sink))
    return operands._replace(q=operands.q.to(dtype), bias=bias, sink=sink)


def _all_steps(call: RingCall, operands: Operands) -> Iterator[Tuple[Step, Call, Set]]:
    """Steps in their order, of which the next one's keys travel while the caller computes."""
    heads = (0, operands.k.shape[2])
    coming: Optional[Tuple[Call, Keys]] = None
    for number, step in enumerate(call.steps):
        if coming is None:
            own = call.of_step(step, heads)
            coming = own, Keys(own, operands, heads)
        (current, keys), coming = coming, None
        if number + 1 < len(call.steps):
            following = call.of_step(call.steps[number + 1], heads)
            coming = following, Keys(following, operands, heads)
        keys.wait()
        made = Set(current, operands, keys)
        made.k, made.v = (each if operands.q.is_cuda else each.to(operands.q.dtype) for each in (made.k, made.v))
        yield step, current, made


# ---- forward ---------------------------------------------------------------------------------------------------------


def _merge(total: Optional[Result], part: Sequence[Optional[Tensor]]) -> Result:
    """Into the total, in its place."""
    out, lse, low = part
    assert out is not None and lse is not None
    out = out.to(wide(out.dtype))
    if total is None:
        return out, lse, torch.zeros_like(lse) if low is None else low
    tensors = (*total, out, lse, low, *total)
    _native.merge(*map(native_view, tensors), stream_of(out))
    return total


def _sink_part(total: Result, sink: Tensor) -> List[Optional[Tensor]]:
    """Sinks are a key without a value that every row sees."""
    out, lse, _ = total
    number = sink.to(lse.dtype)
    number = number if number.dim() == 1 else number.logsumexp(0)
    return [torch.zeros_like(out), number[None, :, None].expand(lse.shape).contiguous(), None]


def _without_sink(operands: Operands) -> Operands:
    return operands._replace(sink=None)


def forward(call: RingCall, given: Operands) -> List[Optional[Tensor]]:
    """out, lse, lse_low of the rank's rows."""
    operands, has_bias = _widened(given), given.bias is not None
    total: Optional[Result] = None
    for step, _, current in _all_steps(call, _without_sink(operands)):
        for fold in step.folds:
            part = _engine.new_results(operands.q, operands.v, has_bias)
            out, lse, low = part
            assert out is not None
            for piece in fold:
                written = current.rows(out, piece), current.row_numbers(lse, piece), current.row_numbers(low, piece)
                _engine.forward(current.piece(piece), written, current.settings(piece), None, call.sm_margin)
            total = _merge(total, part)
    assert total is not None
    out, lse, low = total
    if operands.sink is not None:
        kept = [each.clone() for each in (lse, low)]
        out, lse, low = _merge(total, _sink_part(total, operands.sink))
        numbers: Tuple[object, ...] = tuple(call.settings)
        if numbers[SETTING["lse_without_sink"]]:
            lse, low = kept
    return [out.to(given.q.dtype), lse, low if has_bias else None]


# ---- backward --------------------------------------------------------------------------------------------------------


def _added(sums: Dict[str, Tensor], back: Dict[str, Return], head_dim: int) -> None:
    """K and V share a buffer in some steps, and not in others."""
    for name, each in back.items():
        total = each.finish()
        parts = {"k": total[..., :head_dim], "v": total[..., head_dim:]} if name == "kv" else {name: total}
        for own, part in parts.items():
            sums[own] = sums[own].add_(part) if own in sums else part


def backward(
    call: RingCall,
    given: Operands,
    results: Sequence[Optional[Tensor]],
    flowing: Tuple[Tensor, Optional[Tensor]],
    needs: Dict[str, bool],
) -> List[Optional[Tensor]]:
    """Gradients of q, k, v, bias and sink; of what all ranks have alike, the rank's own part."""
    operands, heads = _widened(given), (0, given.k.shape[2])
    out, lse, low = results
    assert out is not None
    if not given.q.is_cuda:
        out, flowing = out.to(operands.q.dtype), (flowing[0].to(operands.q.dtype), flowing[1])
    gradients: Optional[Gradients] = None
    sums: Dict[str, Tensor] = {}
    going: Dict[str, Return] = {}
    is_first = True
    for step, current_call, current in _all_steps(call, operands):
        gradients = gradients or Gradients(current_call, given, needs)
        parts = Parts(current.keys, gradients.traveling)
        for fold in step.folds:
            # The gradient of a sink depends on a row's whole result: the first fold has it.
            gradients.needs = {**needs, "sink": needs["sink"] and is_first}
            is_first = False
            for piece in fold:
                known = current.rows(out, piece), current.row_numbers(lse, piece), current.row_numbers(low, piece)
                above = current.rows(flowing[0], piece), current.row_numbers(flowing[1], piece)
                written, added = gradients.targets(current, parts, piece, current.piece(piece))
                given_piece, settings = current.piece(piece), current.settings(piece)
                _engine.backward(
                    given_piece, known, above, written, settings, None, gradients.adds, call.sm_margin
                )
                for part, own in added:
                    part += own
        _added(sums, going, given.k.shape[-1])
        going = {name: Return(call.messages, step.table, buffer) for name, buffer in parts.buffers.items()}
    _added(sums, going, given.k.shape[-1])
    assert gradients is not None
    gradients.needs = needs
    if gradients.traveling:
        gradients.take(heads, sums)
    return gradients.finished()
