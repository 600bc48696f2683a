"""From rows to heads and back: every rank gets all rows of its own heads, by one all-to-all."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._agree import Health, wait_for
from ._ranges import Places, union
from .layout import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """The ranks of a group, and which of the group's rows each has. layout counts the group's rows alone."""

    group: Any
    rank: int
    layout: Layout
    health: Health
    timeout: Optional[datetime.timedelta] = None

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    def _move(self, packed: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Rows for each rank, one behind the other, to what each rank sent."""
        moved = packed.new_empty((sum(receives), *packed.shape[1:]))
        if math.prod(packed.shape[1:]):
            with self.health.watch():
                work = dist.all_to_all_single(
                    moved, packed, list(receives), list(sends), group=self.group, async_op=True
                )
                wait_for(work, None if packed.is_cuda else self.timeout)
        return moved

    def gather(self, x: Tensor, shared: bool) -> Tensor:
        """[own rows, h, ..] to [all rows, h / ranks, ..]; shared: all heads to every rank."""
        ranks, rows = self.ranks, x.shape[0]
        if shared:
            packed = x.expand(ranks, *x.shape).reshape(ranks * rows, *x.shape[1:])
        else:
            split = x.reshape(rows, ranks, x.shape[1] // ranks, *x.shape[2:]).transpose(0, 1)
            packed = split.reshape(ranks * rows, *split.shape[2:])
        counts = [self.layout.rows(rank) for rank in range(ranks)]
        moved = self._move(packed.contiguous(), [rows] * ranks, counts)
        return self.layout.join(moved.split(counts), 0)

    def scatter(self, y: Tensor, shared: bool) -> Tensor:
        """The way back: [all rows, h / ranks, ..] to [own rows, h, ..]; shared: the sum over ranks, in their order."""
        ranks, rows = self.ranks, self.layout.rows(self.rank)
        packed = torch.cat([self.layout.shard(y, 0, rank) for rank in range(ranks)])
        counts = [self.layout.rows(rank) for rank in range(ranks)]
        moved = self._move(packed, counts, [rows] * ranks).view(ranks, rows, *y.shape[1:])
        if not shared:
            joined = moved.transpose(0, 1)
            return joined.reshape(rows, ranks * y.shape[1], *y.shape[2:])
        total = moved[0].clone()
        for part in moved[1:]:
            total += part
        return total


def _first(x: Tensor, rows: int, heads: int) -> Tensor:
    """Axes of rows and heads ahead."""
    return x.movedim((rows, heads), (0, 1))


def _back(x: Tensor, rows: int, heads: int) -> Tensor:
    return x.movedim((0, 1), (rows, heads))


def back_to_rows(gradient: Tensor, exchange: Exchange, rows: int, heads: int, shared: bool) -> Tensor:
    """The gradient of what to_heads() was given; where all heads share one, the sum over ranks in float32."""
    wide = gradient.float() if shared and gradient.dtype is not torch.float64 else gradient
    mine = exchange.scatter(_first(wide, rows, heads).contiguous(), shared)
    return _back(mine, rows, heads).to(gradient.dtype)


class _ToHeads(torch.autograd.Function):
    """apply(x, exchange, axis of rows, axis of heads, shared)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, rows: int, heads: int, shared: bool) -> Tensor:
        ctx.arguments = exchange, rows, heads, shared
        return _back(exchange.gather(_first(x, rows, heads), shared), rows, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return back_to_rows(gradient, *ctx.arguments), None, None, None, None


class _ToRows(torch.autograd.Function):
    """apply(x, exchange, axis of rows, axis of heads)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, rows: int, heads: int) -> Tensor:
        ctx.arguments = exchange, rows, heads
        return _back(exchange.scatter(_first(x, rows, heads).contiguous(), False), rows, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exchange, rows, heads = ctx.arguments
        return _back(exchange.gather(_first(gradient, rows, heads), False), rows, heads), None, None, None


def to_heads(x: Tensor, exchange: Exchange, rows: int, heads: int) -> Tensor:
    """All rows of the rank's heads, of the rank's rows of all heads; where all heads share one, of that."""
    to: Any = _ToHeads
    result: Tensor = to.apply(x, exchange, rows, heads, x.shape[heads] == 1)
    return result


def to_rows(x: Tensor, exchange: Exchange, rows: int, heads: int) -> Tensor:
    """The way back."""
    to: Any = _ToRows
    result: Tensor = to.apply(x, exchange, rows, heads)
    return result


def own_heads(x: Any, axis: int, exchange: Exchange) -> Any:
    """The rank's heads of a tensor that every rank has whole."""
    if x is None or x.shape[axis] == 1:
        return x
    share = x.shape[axis] // exchange.ranks
    return x.narrow(axis, exchange.rank * share, share)


def within(layout: Layout, members: Sequence[int]) -> Layout:
    """The rows of some ranks of a layout, numbered in the order of their positions."""
    places = Places(union(each for rank in members for each in layout.ranges[rank]))
    parts: List[List[Any]] = []
    for rank in members:
        parts.append([places.of(each) for each in layout.ranges[rank]])
    return Layout(parts, layout.block)
