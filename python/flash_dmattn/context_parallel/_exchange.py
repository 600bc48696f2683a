"""What travels between ranks: tables that every rank makes alike, and the messages that follow from them."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._agree import Health, wait_for
from ._ranges import Places, Range, Ranges, size

# So many ranges of rows are copied one by one; more by their rows' numbers, in one go.
FEW_RANGES = 4


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Route:
    """Rows of one rank for another: pairs of (range in the owner's rows, range in the reader's buffer), in order."""

    peer: int
    pairs: Tuple[Tuple[Range, Range], ...]

    @functools.cached_property
    def rows(self) -> int:
        return self.owned.count

    @functools.cached_property
    def owned(self) -> Rows:
        return Rows([owned for owned, _ in self.pairs])

    @functools.cached_property
    def read(self) -> Rows:
        return Rows([read for _, read in self.pairs])


@dataclasses.dataclass(frozen=True)
class Table:
    """What a rank sends and receives so that it has its needed keys, one behind the other, in a buffer."""

    needed: Tuple[Range, ...]
    sends: Tuple[Route, ...]
    receives: Tuple[Route, ...]
    own: Route
    rows: int  # of the rank's shard

    @functools.cached_property
    def size(self) -> int:
        """Rows of the buffer."""
        return size(self.needed)

    @property
    def received(self) -> int:
        return sum(route.rows for route in self.receives)

    @property
    def is_local(self) -> bool:
        """Whether the buffer is nothing but one range of the rank's own rows."""
        return not self.receives and len(self.own.pairs) <= 1


def _route(owner: Sequence[Range], needed: Ranges, peer: int) -> Route:
    places, buffer = Places(owner), Places(needed)
    return Route(peer, tuple((places.of(each), buffer.of(each)) for each in places.cut(needed)))


def make_table(owners: Sequence[Sequence[Range]], needed: Sequence[Ranges], rank: int) -> Table:
    """owners: of each rank the ranges of its shard, in the shard's order. needed: of each rank, sorted."""
    ranks = range(len(owners))
    sends = (_route(owners[rank], needed[r], r) for r in ranks if r != rank)
    receives = (_route(owners[r], needed[rank], r) for r in ranks if r != rank)
    return Table(
        tuple(needed[rank]),
        tuple(each for each in sends if each.pairs),
        tuple(each for each in receives if each.pairs),
        _route(owners[rank], needed[rank], rank),
        size(owners[rank]),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


class Rows:
    """Rows of a tensor by ranges: views of it where they are few, else by a tensor of numbers, which is made once."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges, self.count = ranges, size(ranges)
        self._numbers: Dict[torch.device, Tensor] = {}

    @property
    def are_few(self) -> bool:
        return len(self.ranges) <= FEW_RANGES

    def numbers(self, device: torch.device) -> Tensor:
        if device not in self._numbers:
            parts = [torch.arange(first, end) for first, end in self.ranges]
            self._numbers[device] = torch.cat(parts).to(device)
        return self._numbers[device]

    def take(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """These rows of tensors, whose last axes lie one behind the other in `out`."""
        if not self.are_few:
            numbers = self.numbers(out.device)
            _beside([part.index_select(0, numbers) for part in parts], out)
            return
        place = 0
        for first, end in self.ranges:
            _beside([part[first:end] for part in parts], out[place : place + end - first])
            place += end - first

    def put(self, rows: Tensor, out: Tensor) -> None:
        """Into these rows of `out`."""
        if not self.are_few:
            out.index_copy_(0, self.numbers(out.device), rows)
            return
        for part, (first, end) in zip(rows.split([end - first for first, end in self.ranges]), self.ranges):
            out[first:end].copy_(part)

    def add(self, rows: Tensor, out: Tensor) -> None:
        if not self.are_few:
            out.index_add_(0, self.numbers(out.device), rows)
            return
        for part, (first, end) in zip(rows.split([end - first for first, end in self.ranges]), self.ranges):
            out[first:end] += part


def _beside(parts: Sequence[Tensor], out: Tensor) -> None:
    if len(parts) == 1:
        out.copy_(parts[0])
    else:
        torch.cat(list(parts), -1, out=out)


# ---- messages --------------------------------------------------------------------------------------------------------


class Messages:
    """One message from each rank of a process group to each other, by the group's own backend.

    On CUDA devices they run on the group's stream, after what the current stream has got so far and beside what comes.
    """

    def __init__(self, group: Any, device: torch.device, timeout: Optional[datetime.timedelta], health: Health) -> None:
        self.group, self.device, self.timeout, self.health = group, device, timeout, health
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.peers = [_global_rank(group, rank) for rank in range(self.ranks)]
        self.bytes_received = 0

    def start(self, sends: Dict[int, Tensor], receives: Dict[int, Tensor], like: Tensor) -> List[Any]:
        """By peer; contiguous tensors, which stay as they are until finish(). like: of which dtype they are."""
        self.bytes_received += sum(each.numel() * each.element_size() for each in receives.values())
        if self.ranks == 1:
            return []
        with self.health.watch():
            if self.device.type == "cuda":
                none = like.new_empty(0)
                arriving, leaving = (
                    [tensors.get(rank, none) for rank in range(self.ranks)] for tensors in (receives, sends)
                )
                return [dist.all_to_all(arriving, leaving, group=self.group, async_op=True)]
            return self._one_by_one(sends, receives)

    def _one_by_one(self, sends: Dict[int, Tensor], receives: Dict[int, Tensor]) -> List[Any]:
        """gloo has no all-to-all of tensors that lie apart."""
        operations = []
        for kind, tensors in ((dist.isend, sends), (dist.irecv, receives)):
            for peer, tensor in sorted(tensors.items()):
                if tensor.numel():
                    operations.append(dist.P2POp(kind, tensor, self.peers[peer], self.group))
        return dist.batch_isend_irecv(operations) if operations else []

    def finish(self, works: List[Any]) -> None:
        """On the CPU the messages have arrived then; on CUDA devices the current stream waits for them."""
        with self.health.watch():
            for work in works:
                wait_for(work, None if self.device.type == "cuda" else self.timeout)


def _global_rank(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank) if group is not None and group is not dist.group.WORLD else rank


class Fetch:
    """Rows that others have on their way into a buffer. Rows are on axis 0; a row is that of `parts` one by one."""

    def __init__(self, messages: Messages, table: Table, parts: Sequence[Tensor], buffer: Tensor) -> None:
        self.messages, self.table, self.parts, self.buffer = messages, table, parts, buffer
        self.staged: List[Tuple[Route, Tensor]] = []
        sends: Dict[int, Tensor] = {}
        receives: Dict[int, Tensor] = {}
        for route in table.sends:
            sends[route.peer] = buffer.new_empty((route.rows, *buffer.shape[1:]))
            route.owned.take(parts, sends[route.peer])
        for route in table.receives:
            if len(route.pairs) == 1:
                first, end = route.pairs[0][1]
                receives[route.peer] = buffer[first:end]
            else:
                receives[route.peer] = buffer.new_empty((route.rows, *buffer.shape[1:]))
                self.staged.append((route, receives[route.peer]))
        self.kept = sends
        self.works = messages.start(sends, receives, buffer)

    def finish(self) -> None:
        own = self.table.own
        if own.pairs and own.owned.are_few:
            for (a, b), (c, d) in own.pairs:
                _beside([part[a:b] for part in self.parts], self.buffer[c:d])
        elif own.pairs:
            rows = self.buffer.new_empty((own.rows, *self.buffer.shape[1:]))
            own.owned.take(self.parts, rows)
            own.read.put(rows, self.buffer)
        self.messages.finish(self.works)
        for route, rows in self.staged:
            route.read.put(rows, self.buffer)
        self.kept = {}
        self.staged.clear()


class Return:
    """Parts of gradients on their way from those who have them in buffers to the rows' owners, who add them.

    Parts are added in the order of ranks: the sums do not depend on which arrives first.
    """

    def __init__(self, messages: Messages, table: Table, buffer: Tensor) -> None:
        self.messages, self.table, self.buffer = messages, table, buffer
        sends: Dict[int, Tensor] = {}
        self.parts: Dict[int, Tensor] = {}
        for route in table.receives:  # whence the keys came
            if len(route.pairs) == 1:
                first, end = route.pairs[0][1]
                sends[route.peer] = buffer[first:end]
            else:
                sends[route.peer] = buffer.new_empty((route.rows, *buffer.shape[1:]))
                route.read.take([buffer], sends[route.peer])
        for route in table.sends:
            self.parts[route.peer] = buffer.new_empty((route.rows, *buffer.shape[1:]))
        self.kept = sends
        self.works = messages.start(sends, self.parts, buffer)

    def finish(self, by_tree: bool = False) -> Tensor:
        """Sums [rows of the shard, ..]; by_tree: by a balanced binary tree over ranks, which are a power of two."""
        self.messages.finish(self.works)
        self.kept = {}
        if by_tree:
            return self._subtree(0, self.messages.ranks)
        total = self._zeros()
        for route in sorted((*self.table.sends, self.table.own), key=lambda each: each.peer):
            self._add(route, total)
        return total

    def _zeros(self) -> Tensor:
        return self.buffer.new_zeros((self.table.rows, *self.buffer.shape[1:]))

    def _subtree(self, first: int, end: int) -> Tensor:
        if end - first > 1:
            middle = (first + end) // 2
            return self._subtree(first, middle).add_(self._subtree(middle, end))
        total = self._zeros()
        for route in (*self.table.sends, self.table.own):
            if route.peer == first:
                self._add(route, total)
        return total

    def _add(self, route: Route, total: Tensor) -> None:
        """A rank's part."""
        if route is not self.table.own:
            route.owned.add(self.parts[route.peer], total)
        elif route.owned.are_few:
            for (a, b), (c, d) in route.pairs:
                total[a:b] += self.buffer[c:d]
        else:
            route.owned.add(self.buffer.index_select(0, route.read.numbers(total.device)), total)


def gather_rows(x: Tensor, rows: Sequence[int], group: Any) -> List[Tensor]:
    """Every rank's tensor [its rows, ..], which may have unlike numbers of rows."""
    most = max(rows, default=0)
    padded = x.new_zeros((most, *x.shape[1:]))
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=group)
    return [part[:count] for part, count in zip(parts, rows)]
