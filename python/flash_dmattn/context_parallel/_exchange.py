"""What travels between ranks: tables that every rank makes alike, and the messages that follow from them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._agree import Health, wait_for
from ._ranges import Places, Range, Ranges, size

# Of one peer: so many ranges are received where they belong; more travel as one message and are spread by a copy.
DIRECT_RUNS = 4


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Route:
    """Rows of one rank for another: pairs of (range in the owner's rows, range in the reader's buffer), in order."""

    peer: int
    pairs: Tuple[Tuple[Range, Range], ...]

    @property
    def rows(self) -> int:
        return sum(b - a for (a, b), _ in self.pairs)


@dataclasses.dataclass(frozen=True)
class Table:
    """What a rank sends and receives so that it has its needed keys, one behind the other, in a buffer."""

    needed: Tuple[Range, ...]
    sends: Tuple[Route, ...]
    receives: Tuple[Route, ...]
    own: Route
    rows: int  # of the rank's shard

    @property
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


# ---- messages --------------------------------------------------------------------------------------------------------


class Messages:
    """Sends and receives between the ranks of a process group, by its own backend.

    On CUDA devices they are enqueued on a stream of their own, so that they run under the caller's work.
    """

    def __init__(self, group: Any, device: torch.device, timeout: Optional[datetime.timedelta], health: Health) -> None:
        self.group, self.device, self.timeout, self.health = group, device, timeout, health
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.peers = [_global_rank(group, rank) for rank in range(self.ranks)]
        self.stream: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.bytes_sent = self.bytes_received = 0

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is enqueued inside runs on the communication stream."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield

    def event(self) -> Any:
        """Of what is enqueued so far on the current stream."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @staticmethod
    def after(event: Any) -> None:
        """The current stream goes on when the event has happened."""
        if event is not None:
            event.wait()

    def start(self, sends: List[Tuple[int, Tensor]], receives: List[Tuple[int, Tensor]]) -> List[Any]:
        """One grouped exchange; contiguous tensors, which stay as they are until finish()."""
        operations = []
        for peer, tensor in sends:
            if not tensor.numel():
                continue
            self.bytes_sent += tensor.numel() * tensor.element_size()
            operations.append(dist.P2POp(dist.isend, tensor, self.peers[peer], self.group))
        for peer, tensor in receives:
            if not tensor.numel():
                continue
            self.bytes_received += tensor.numel() * tensor.element_size()
            operations.append(dist.P2POp(dist.irecv, tensor, self.peers[peer], self.group))
        with self.health.watch():
            return dist.batch_isend_irecv(operations) if operations else []

    def finish(self, works: List[Any]) -> None:
        """On the CPU the messages have arrived then; on CUDA devices the current stream waits for them."""
        with self.health.watch():
            for work in works:
                wait_for(work, self.timeout if self.stream is None else None)


def _global_rank(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank) if group is not None and group is not dist.group.WORLD else rank


def _split(route: Route) -> bool:
    """Whether each range is a message of its own."""
    return len(route.pairs) <= DIRECT_RUNS


class Fetch:
    """Rows that others have on their way into buffers. Tensors have rows on axis 0."""

    def __init__(self, messages: Messages, table: Table, shards: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self.messages, self.table, self.buffers = messages, table, buffers
        self.staged: List[Tuple[Route, Tensor, Tensor]] = []
        sends: List[Tuple[int, Tensor]] = []
        receives: List[Tuple[int, Tensor]] = []
        for shard, buffer in zip(shards, buffers):
            for route in table.sends:
                packed = torch.cat([shard[a:b] for (a, b), _ in route.pairs])
                sends += [(route.peer, each) for each in _messages_of(route, packed)]
            for route in table.receives:
                if _split(route):
                    receives += [(route.peer, buffer[a:b]) for _, (a, b) in route.pairs]
                else:
                    packed = buffer.new_empty((route.rows, *buffer.shape[1:]))
                    self.staged.append((route, packed, buffer))
                    receives.append((route.peer, packed))
        self.kept = sends
        self.works = messages.start(sends, receives)
        for shard, buffer in zip(shards, buffers):
            for (a, b), (c, d) in table.own.pairs:
                buffer[c:d].copy_(shard[a:b])

    def finish(self) -> None:
        self.messages.finish(self.works)
        for route, packed, buffer in self.staged:
            pieces = packed.split([b - a for (a, b), _ in route.pairs])
            for piece, (_, (c, d)) in zip(pieces, route.pairs):
                buffer[c:d].copy_(piece)
        self.kept.clear()
        self.staged.clear()


def _messages_of(route: Route, packed: Tensor) -> Sequence[Tensor]:
    """A route's rows, one behind the other, as the messages in which they travel."""
    if not _split(route):
        return [packed]
    pieces: Sequence[Tensor] = packed.split([b - a for (a, b), _ in route.pairs])
    return pieces


class Return:
    """Parts of gradients on their way from those who have them in buffers to the rows' owners, who add them.

    Parts are added in the order of ranks: the sums do not depend on which arrives first.
    """

    def __init__(self, messages: Messages, table: Table, buffers: Sequence[Tensor]) -> None:
        self.messages, self.table, self.buffers = messages, table, buffers
        sends: List[Tuple[int, Tensor]] = []
        receives: List[Tuple[int, Tensor]] = []
        self.parts: List[List[Tuple[Route, Tensor]]] = []
        for buffer in buffers:
            for route in table.receives:  # whence the keys came
                if _split(route):
                    sends += [(route.peer, buffer[a:b]) for _, (a, b) in route.pairs]
                else:
                    sends.append((route.peer, torch.cat([buffer[a:b] for _, (a, b) in route.pairs])))
            parts = []
            for route in table.sends:
                packed = buffer.new_empty((route.rows, *buffer.shape[1:]))
                parts.append((route, packed))
                receives += [(route.peer, each) for each in _messages_of(route, packed)]
            self.parts.append(parts)
        self.kept = sends
        self.works = messages.start(sends, receives)

    def finish(self) -> List[Tensor]:
        """Sums [rows of the shard, ..], in the order of the buffers."""
        self.messages.finish(self.works)
        sums = []
        for buffer, parts in zip(self.buffers, self.parts):
            total = buffer.new_zeros((self.table.rows, *buffer.shape[1:]))
            own = [(self.table.own, None)] if self.table.own.pairs else []
            every: List[Tuple[Route, Optional[Tensor]]] = [*parts, *own]
            for route, packed in sorted(every, key=lambda each: each[0].peer):
                place = 0
                for (a, b), (c, d) in route.pairs:
                    total[a:b] += buffer[c:d] if packed is None else packed[place : place + b - a]
                    place += b - a
            sums.append(total)
        self.kept.clear()
        return sums


def gather_rows(x: Tensor, rows: Sequence[int], group: Any) -> List[Tensor]:
    """Every rank's tensor [its rows, ..], which may have unlike numbers of rows."""
    most = max(rows, default=0)
    padded = x.new_zeros((most, *x.shape[1:]))
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=group)
    return [part[:count] for part, count in zip(parts, rows)]
