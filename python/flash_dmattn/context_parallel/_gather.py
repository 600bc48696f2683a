"""Attention by fetching keys: a few KV heads at a time, of which the next travel while these are computed.

A rank has every key that its rows see, so that each row is finished by one call: nothing is merged.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._torch import _OnceDifferentiable
from . import _engine
from ._engine import Operands, Settings, heads_of
from ._exchange import Fetch, Messages, Return, Table
from ._pieces import Piece
from ._ranges import Range

# What a mask or bias [B|1, h, rows, keys] has: the rank's keys, which travel with K and V; one number for all rows and
# keys; the rank's rows and all keys; the rank's rows, and one number for all keys.
KEYS, CONSTANT, ROWS, ROWS_ALONE = "keys", "one number", "rows and all keys", "rows alone"
OF_ROWS = (ROWS, ROWS_ALONE)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Everything of a call but its tensors."""

    messages: Messages
    table: Table
    pieces: Sequence[Piece]
    sets: Sequence[Range]  # of KV heads
    settings: Settings
    mask_kind: str
    bias_kind: str
    exchanges: bool  # whether any rank needs keys of another
    leaves: Optional[Sequence[Sequence[Piece]]] = None  # the pieces, in the order of a tree by which parts are added
    kernels: Any = None  # WholeKernels, or None: each call's plan is free
    sm_margin: int = 0  # that calls leave to copies, where any rank needs keys of another
    is_ring: bool = False  # a part of a ring's call: gradients are sums over several

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

    @property
    def is_direct(self) -> bool:
        """Whether one call has all keys of the rank, and nobody else has any use for them."""
        table, pieces = self.table, self.pieces
        is_whole = table.is_local and len(pieces) == 1 and pieces[0].keys == (0, table.rows)
        return is_whole and not (self.is_ring or self.exchanges or self.leaves is not None)


# ---- fetching --------------------------------------------------------------------------------------------------------

# The most bytes of keys that are fetched ahead on CUDA devices; of more, the next set alone.
_AHEAD_BYTES = 1 << 30


def _keys_first(scores: Tensor) -> Tensor:
    """[B|1, h, 1, Sk] as [Sk, B|1, h]."""
    return scores[:, :, 0].permute(2, 0, 1)


def _shards(call: Call, operands: Operands, heads: Range) -> Dict[str, List[Tensor]]:
    """What of a set's heads lies with the rank's keys, keys first, by buffers. K and V share one where V stays aligned."""
    heads_kv = operands.k.shape[2]
    k, v = (each.transpose(0, 1)[:, :, heads[0] : heads[1]] for each in (operands.k, operands.v))
    together = all(each.shape[-1] * each.element_size() % 16 == 0 for each in (k, v))
    shards = {"kv": [k, v]} if together else {"k": [k], "v": [v]}
    for name, kind in (("mask", call.mask_kind), ("bias", call.bias_kind)):
        scores = heads_of(getattr(operands, name), 1, heads, heads_kv)
        if scores is not None and kind == KEYS:
            shards[name] = [_keys_first(scores)]
    return shards


class Keys:
    """A set's keys on their way: K, V, and what else lies with keys."""

    def __init__(self, call: Call, operands: Operands, heads: Range) -> None:
        table = call.table
        self.heads, self.head_dim = heads, operands.k.shape[-1]
        self.fetches: List[Fetch] = []
        self.buffers: Dict[str, Tensor] = {}
        in_place = not call.exchanges and table.is_local
        a, b = table.own.pairs[0][0] if table.own.pairs else (0, 0)
        for name, parts in _shards(call, operands, heads).items():
            if in_place:
                self.buffers.update(zip("kv" if name == "kv" else [name], (part[a:b] for part in parts)))
                continue
            width = sum(part.shape[-1] for part in parts)
            self.buffers[name] = parts[0].new_empty((table.size, *parts[0].shape[1:-1], width))
            self.fetches.append(Fetch(call.messages, table, parts, self.buffers[name]))

    def wait(self) -> None:
        """The buffers hold the keys, for what is enqueued from now on."""
        for fetch in self.fetches:
            fetch.finish()

    def rows(self, name: str) -> Tensor:
        """[n, B, h, D|Dv], or of mask or bias [n, B|1, h]."""
        return part_of(self.buffers, name, self.head_dim)

    def operand(self, name: str) -> Tensor:
        """k or v [B, n, h, D|Dv]; mask or bias [B|1, h, 1, n]."""
        if name in ("k", "v"):
            return self.rows(name).transpose(0, 1)
        return self.buffers[name].permute(1, 2, 0).contiguous()[:, :, None]


def part_of(buffers: Dict[str, Tensor], name: str, head_dim: int) -> Tensor:
    if name in buffers or name not in ("k", "v"):
        return buffers[name]
    both = buffers["kv"]
    return both[..., :head_dim] if name == "k" else both[..., head_dim:]


def _all_keys(call: Call, operands: Operands) -> Iterator[Keys]:
    """Sets in their order, of which the next ones travel while the caller computes."""
    ahead = 2
    if operands.k.is_cuda:
        row = operands.k.shape[0] * operands.k.shape[2] * (operands.k.shape[3] + operands.v.shape[3])
        whole = call.table.size * row * operands.k.element_size()
        ahead = len(call.sets) if whole <= _AHEAD_BYTES else 2
    coming: List[Keys] = []
    for number in range(len(call.sets)):
        for later in range(number + len(coming), min(number + ahead, len(call.sets))):
            coming.append(Keys(call, operands, call.sets[later]))
        keys = coming.pop(0)
        keys.wait()
        yield keys


# ---- operands of a piece ---------------------------------------------------------------------------------------------


def _rows_of(scores: Optional[Tensor], kind: str, piece: Piece) -> Optional[Tensor]:
    """Of a mask or bias with a row axis."""
    if scores is None:
        return None
    scores = scores[:, :, piece.rows[0] : piece.rows[1]]
    return scores[..., piece.columns[0] : piece.columns[1]] if kind == ROWS else scores


class Set:
    """The operands of a set's pieces."""

    def __init__(self, call: Call, operands: Operands, keys: Keys) -> None:
        heads, self.keys = keys.heads, keys
        self.heads_kv, self.heads = operands.k.shape[2], heads
        self.call, self.operands = call, operands
        group = operands.q.shape[2] // self.heads_kv
        self.query_heads = (heads[0] * group, heads[1] * group)
        self.k, self.v = keys.operand("k"), keys.operand("v")
        self.scores: Dict[str, Optional[Tensor]] = {}
        for name, kind in (("mask", call.mask_kind), ("bias", call.bias_kind)):
            whole = getattr(operands, name)
            mine = None if whole is None else keys.operand(name) if kind == KEYS else self.of_heads(whole, 1)
            self.scores[name] = mine

    def of_heads(self, tensor: Optional[Tensor], axis: int) -> Optional[Tensor]:
        return heads_of(tensor, axis, self.heads, self.heads_kv)

    def rows(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Of [B, Sq, H, D]."""
        return tensor[:, piece.rows[0] : piece.rows[1], self.query_heads[0] : self.query_heads[1]]

    def row_numbers(self, tensor: Optional[Tensor], piece: Piece) -> Optional[Tensor]:
        """Of [B, H, Sq]."""
        if tensor is None:
            return None
        return tensor[:, self.query_heads[0] : self.query_heads[1], piece.rows[0] : piece.rows[1]]

    def sink(self) -> Optional[Tensor]:
        sink = self.operands.sink
        return None if sink is None else sink[..., self.query_heads[0] : self.query_heads[1]].contiguous()

    def scores_of(self, name: str, kind: str, piece: Piece) -> Optional[Tensor]:
        scores = self.scores[name]
        if scores is None or kind == CONSTANT:
            return scores
        return scores[..., piece.keys[0] : piece.keys[1]] if kind == KEYS else _rows_of(scores, kind, piece)

    def piece(self, piece: Piece) -> Operands:
        return Operands(
            self.rows(self.operands.q, piece),
            self.k[:, piece.keys[0] : piece.keys[1]],
            self.v[:, piece.keys[0] : piece.keys[1]],
            self.scores_of("mask", self.call.mask_kind, piece),
            self.scores_of("bias", self.call.bias_kind, piece),
            self.of_heads(piece.start, 1),
            self.of_heads(piece.end, 1),
            None,
            None,
            self.sink(),
        )

    def settings(self, piece: Piece) -> Settings:
        return _engine.changed(
            self.call.settings, causal=piece.causal, window_left=piece.left, window_right=piece.right
        )


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward(call: Call, operands: Operands) -> List[Optional[Tensor]]:
    """out, lse, lse_low of the rank's rows."""
    results = _engine.new_results(operands.q, operands.v, operands.bias is not None)
    out, lse, lse_low = results
    assert out is not None and lse is not None
    for keys in _all_keys(call, operands):
        current = Set(call, operands, keys)
        for piece in call.pieces:
            written = (current.rows(out, piece), current.row_numbers(lse, piece), current.row_numbers(lse_low, piece))
            code = None if call.kernels is None else call.kernels.forward
            _engine.forward(current.piece(piece), written, current.settings(piece), code, call.sm_margin)
    return results


# ---- backward --------------------------------------------------------------------------------------------------------


def wide(dtype: torch.dtype) -> torch.dtype:
    """What parts of a gradient are added in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Parts:
    """A set's parts of the gradients of keys, for all keys of the buffer: float32, keys first."""

    def __init__(self, keys: Keys, wanted: Sequence[str]) -> None:
        self.head_dim = keys.head_dim
        self.buffers: Dict[str, Tensor] = {}
        together = "kv" in keys.buffers and "k" in wanted and "v" in wanted
        for name in (["kv", *wanted[2:]] if together else wanted):
            like = keys.rows(name) if name != "kv" else keys.buffers[name]
            self.buffers[name] = torch.zeros(like.shape, dtype=wide(like.dtype), device=like.device)

    def add(self, later: Parts) -> Parts:
        for name, buffer in self.buffers.items():
            buffer += later.buffers[name]
        return self

    def view(self, name: str, piece: Piece) -> Tensor:
        """In the shape of the operand."""
        part = part_of(self.buffers, name, self.head_dim)[piece.keys[0] : piece.keys[1]]
        return part.transpose(0, 1) if name in ("k", "v") else part.permute(1, 2, 0)[:, :, None]


class Gradients:
    """Whole gradients of the rank's tensors, which sets and pieces fill in."""

    def __init__(self, call: Call, operands: Operands, needs: Dict[str, bool]) -> None:
        self.call, self.operands, self.needs = call, operands, needs
        self.of: Dict[str, Optional[Tensor]] = dict.fromkeys(_engine.GRADIENTS)
        for name in ("q", "k", "v"):
            tensor = getattr(operands, name)
            if needs[name]:
                of_parts = call.is_ring and name == "q"
                self.of[name] = torch.zeros_like(tensor, dtype=wide(tensor.dtype)) if of_parts else torch.empty_like(tensor)
        for name, kind in (("bias", call.bias_kind), ("sink", CONSTANT)):
            tensor = getattr(operands, name)
            if needs[name]:
                dtype = tensor.dtype if kind in OF_ROWS and not call.is_ring else wide(tensor.dtype)
                self.of[name] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
        # Kernels add their part of dk and dv in float32. A tree wants parts of their own, and so do float32 on CUDA.
        is_half = operands.q.dtype in (torch.float16, torch.bfloat16)
        self.adds = not call.is_direct and call.leaves is None and (is_half or not operands.q.is_cuda)
        self.traveling = [name for name in ("k", "v") if needs[name] and not call.is_direct]
        self.traveling += ["bias"] if needs["bias"] and call.bias_kind == KEYS else []

    def targets(self, current: Set, parts: Parts, piece: Piece, given: Operands) -> Tuple[List[Any], List[Any]]:
        """What a call writes, in the order of the extension, and (part, written) pairs to be added after it."""
        written: List[Any] = []
        added = []
        for name in _engine.GRADIENTS:
            operand = getattr(given, name)
            if operand is None or not self.needs[name]:
                written.append(None)
                continue
            whole = self.of[name]
            assert whole is not None
            if name == "q" and not self.call.is_ring:
                written.append(current.rows(whole, piece))
            elif name in ("k", "v") and self.call.is_direct:
                written.append(current.of_heads(whole, 2))
            elif name in ("k", "v") and self.adds:
                written.append(parts.view(name, piece))
            elif name == "bias" and self.call.bias_kind in OF_ROWS and not self.call.is_ring:
                written.append(_rows_of(current.of_heads(whole, 1), self.call.bias_kind, piece))
            else:
                dtype = wide(operand.dtype) if name in ("k", "v") else operand.dtype
                own = torch.empty_like(operand, memory_format=torch.contiguous_format, dtype=dtype)
                written.append(own)
                added.append((self._part(name, whole, current, parts, piece), own))
        return written, added

    def _part(self, name: str, whole: Tensor, current: Set, parts: Parts, piece: Piece) -> Tensor:
        if name in self.traveling:
            return parts.view(name, piece)
        if name == "q":
            return current.rows(whole, piece)
        if name == "sink":
            return whole[..., current.query_heads[0] : current.query_heads[1]]
        part = _rows_of(current.of_heads(whole, 1), self.call.bias_kind, piece) if self._has_rows(name) else current.of_heads(whole, 1)
        assert part is not None
        return part

    def _has_rows(self, name: str) -> bool:
        return name == "bias" and self.call.bias_kind in OF_ROWS

    def take(self, heads: Range, sums: Dict[str, Tensor]) -> None:
        """The sums of a set's parts, keys first."""
        for name in self.traveling:
            whole, total = self.of[name], part_of(sums, name, self.operands.k.shape[-1])
            assert whole is not None
            if name == "bias":  # where heads of several sets share it
                part = heads_of(whole, 1, heads, self.operands.k.shape[2])
                assert part is not None
                part += total.permute(1, 2, 0)[:, :, None]
            else:
                whole[:, :, heads[0] : heads[1]].copy_(total.transpose(0, 1))

    def finished(self) -> List[Optional[Tensor]]:
        every = []
        for name in _engine.GRADIENTS:
            gradient, tensor = self.of[name], getattr(self.operands, name)
            every.append(None if gradient is None else gradient.to(tensor.dtype))
        return every


class _Returning:
    """A set's parts on their way to the keys' owners."""

    def __init__(self, call: Call, heads: Range, parts: Parts) -> None:
        self.heads, self.by_tree = heads, call.leaves is not None
        self.back = {name: Return(call.messages, call.table, buffer) for name, buffer in parts.buffers.items()}

    def finish(self, gradients: Gradients) -> None:
        gradients.take(self.heads, {name: back.finish(self.by_tree) for name, back in self.back.items()})


def _sum_of_tree(leaves: Sequence[Sequence[Piece]], computed: Callable[[Sequence[Piece]], Parts]) -> Parts:
    """By a balanced binary tree over a power of two leaves, with as many parts at a time as it is deep."""
    stack: List[Tuple[int, Parts]] = []
    for leaf in leaves:
        level, parts = 0, computed(leaf)
        while stack and stack[-1][0] == level:
            level, parts = level + 1, stack.pop()[1].add(parts)
        stack.append((level, parts))
    return stack[-1][1]


def _with_wide_bias(call: Call, operands: Operands, needs: Dict[str, bool]) -> Operands:
    """A bias and sinks whose gradients are sums of parts, in float32, so that parts are not rounded."""
    if needs["bias"] and call.bias_kind not in OF_ROWS and operands.bias is not None:
        operands = operands._replace(bias=operands.bias.to(wide(operands.bias.dtype)))
    if needs["sink"] and operands.sink is not None:
        operands = operands._replace(sink=operands.sink.to(wide(operands.sink.dtype)))
    return operands


def backward(
    call: Call,
    given: Operands,
    results: Sequence[Optional[Tensor]],
    flowing: Tuple[Tensor, Optional[Tensor]],
    needs: Dict[str, bool],
) -> List[Optional[Tensor]]:
    """Gradients of q, k, v, bias and sink; of what all ranks have alike, the rank's own part."""
    gradients = Gradients(call, given, needs)
    operands = _with_wide_bias(call, given, needs)
    returning: Optional[_Returning] = None
    for keys in _all_keys(call, operands):
        current = Set(call, operands, keys)

        def computed(pieces: Sequence[Piece], current: Set = current, keys: Keys = keys) -> Parts:
            parts = Parts(keys, gradients.traveling)
            for piece in pieces:
                _backward_of_piece(current, parts, piece, gradients, results, flowing)
            return parts

        parts = computed(call.pieces) if call.leaves is None else _sum_of_tree(call.leaves, computed)
        if gradients.traveling:
            before, returning = returning, _Returning(call, keys.heads, parts)
            if before is not None:
                before.finish(gradients)
    if returning is not None:
        returning.finish(gradients)
    return gradients.finished()


def _backward_of_piece(
    current: Set,
    parts: Parts,
    piece: Piece,
    gradients: Gradients,
    results: Sequence[Optional[Tensor]],
    flowing: Tuple[Tensor, Optional[Tensor]],
) -> None:
    given = current.piece(piece)
    out, lse, lse_low = results
    assert out is not None
    known = current.rows(out, piece), current.row_numbers(lse, piece), current.row_numbers(lse_low, piece)
    above = current.rows(flowing[0], piece), current.row_numbers(flowing[1], piece)
    written, added = gradients.targets(current, parts, piece, given)
    kernels = current.call.kernels
    code = None if kernels is None else kernels.backward(above[1] is not None)
    settings, margin = current.settings(piece), current.call.sm_margin
    _engine.backward(given, known, above, written, settings, code, gradients.adds, margin)
    for part, own in added:
        part += own


# ---- autograd --------------------------------------------------------------------------------------------------------


class GatherAttention(torch.autograd.Function):
    """apply(call, mask, q, k, v, bias, sink) -> out, lse, lse_low (or an empty tensor)"""

    @staticmethod
    def forward(ctx: Any, call: Any, mask: Optional[Tensor], *tensors: Any) -> Any:
        q, k, v, bias, sink = tensors
        operands = Operands(q, k, v, mask, bias, sink=sink)
        out, lse, lse_low = call.forward(operands)
        ctx.save_for_backward(*operands, out, lse, lse_low)
        ctx.call = call
        ctx.set_materialize_grads(False)
        low = q.new_empty(0) if lse_low is None else lse_low
        ctx.mark_non_differentiable(low)
        return out, lse, low

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor], _: Any) -> Any:
        *given, out, lse, lse_low = ctx.saved_tensors
        needs = dict(zip(_engine.GRADIENTS, ctx.needs_input_grad[2:]))
        if not any(needs.values()):
            return (None,) * 7
        with torch.no_grad():
            above = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
            grads = ctx.call.backward(Operands(*given), (out, lse, lse_low), (above, dlse), needs)
        if not torch.is_grad_enabled():
            return (None, None, *grads)
        mark: Any = _OnceDifferentiable
        sources = [each for each in (*given, dout, dlse) if each is not None]
        return (None, None, *mark.apply(len(grads), *grads, *sources))
