"""Which rows of a sequence lie on which rank."""

from __future__ import annotations

import hashlib
from typing import Any, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._arguments import at_least, said
from ._balance import swap_search
from ._ranges import Range, Ranges, intersect, size, union
from ._visible import Mask, needed_keys

DEFAULT_BLOCK = 256
# A permutation of single rows leaves no tile of a kernel whole.
SHORTEST_RUN = 16


def _chunks(total: int, count: int, block: int) -> List[Range]:
    """So many ranges of nearly the same length, which begin at multiples of block; the last may be shorter."""
    blocks = -(-total // block)
    edges = [min(total, blocks * i // count * block) for i in range(count + 1)]
    return list(zip(edges, edges[1:]))


class Layout:
    """Where the positions of a sequence lie: of each rank an ordered list of ranges. A value that every rank has whole.

    Every position is in exactly one range. Ranks may have unlike numbers of rows, or none; nothing is padded. Make one
    by `contiguous`, `zigzag`, `documents`, `balanced`, `from_ranges` or `from_index`.

    Args:
        ranges: for each rank, ranges (first, end) of positions in the order in which the rank's rows lie.
        block: ranges begin at multiples of it, but for those of `documents`, `from_ranges` and `from_index`. A row has
            the bits of one rank's call where its range begins at a multiple of the kernel's rows of a block.

    Raises:
        ValueError: positions are missing or given twice.

    Examples:
        >>> from flash_dmattn.context_parallel import Layout
        >>> layout = Layout.zigzag(1024, 2, block=256)
        >>> layout.ranges
        (((0, 256), (768, 1024)), ((256, 768),))
        >>> layout.positions(0).shape
        torch.Size([512])
    """

    __slots__ = ("ranges", "total", "block", "_digest")

    def __init__(self, ranges: Iterable[Iterable[Range]], block: int = DEFAULT_BLOCK) -> None:
        self.ranges = tuple(tuple(_joined(rank)) for rank in ranges)
        if not self.ranges:
            raise ValueError("ranges is empty; a layout has at least one rank")
        self.block = at_least(1, block, "block")
        together = sorted(each for rank in self.ranges for each in rank)
        self.total = together[-1][1] if together else 0
        last = 0
        for first, end in together:
            if first != last:
                kind = "in no range" if first > last else "in two ranges"
                raise ValueError(f"position {min(first, last)} is {kind}; every position must be in exactly one")
            last = end
        self._digest = hashlib.sha256(repr((self.ranges, self.block)).encode()).hexdigest()

    # ---- making --------------------------------------------------------------------------------------------------

    @classmethod
    def contiguous(cls, total: int, ranks: int, block: int = DEFAULT_BLOCK) -> Layout:
        """Rank r has the r-th part. For full masks, windows and top-W masks: uniform work, and the fewest bytes.

        Args:
            total: positions.
            ranks: how many.
            block: ranges begin at multiples of it. Default 256.

        Returns:
            The layout.

        Raises:
            ValueError: a number is too small.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout
            >>> Layout.contiguous(1000, 2).ranges
            (((0, 512),), ((512, 1000),))
        """
        total, ranks, block = _counts(total, ranks, block)
        return Layout([[each] for each in _chunks(total, ranks, block)], block)

    @classmethod
    def zigzag(cls, total: int, ranks: int, block: int = DEFAULT_BLOCK) -> Layout:
        """Of 2 * ranks chunks, rank r has chunks r and 2 * ranks - 1 - r: equal work under a causal mask.

        Args:
            total: positions.
            ranks: how many.
            block: ranges begin at multiples of it. Default 256.

        Returns:
            The layout.

        Raises:
            ValueError: a number is too small.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout
            >>> Layout.zigzag(1024, 2).ranges
            (((0, 256), (768, 1024)), ((256, 768),))
        """
        total, ranks, block = _counts(total, ranks, block)
        chunks = _chunks(total, 2 * ranks, block)
        return Layout([[chunks[r], chunks[2 * ranks - 1 - r]] for r in range(ranks)], block)

    @classmethod
    def documents(cls, cu_seqlens: Any, ranks: int, block: int = DEFAULT_BLOCK) -> Layout:
        """Long documents lie zigzag over all ranks; one shorter than 2 * ranks blocks goes whole to the rank with the
        fewest pairs of row and key so far.

        Args:
            cu_seqlens: [n + 1] integers that never fall: where documents begin, and the end.
            ranks: how many.
            block: ranges begin at multiples of it, counted from their document's start. Default 256.

        Returns:
            The layout.

        Raises:
            ValueError: offsets fall, or a number is too small.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout
            >>> Layout.documents([0, 100, 250, 300], 2).ranges
            (((100, 250),), ((0, 100), (250, 300)))
        """
        offsets = _offsets(cu_seqlens)
        _, ranks, block = _counts(0, ranks, block)
        parts: List[List[Range]] = [[] for _ in range(ranks)]
        whole = []
        for first, end in zip(offsets, offsets[1:]):
            if end - first < 2 * ranks * block:
                whole.append((first, end))
                continue
            chunks = [(first + a, first + b) for a, b in _chunks(end - first, 2 * ranks, block)]
            for r in range(ranks):
                parts[r] += [chunks[r], chunks[2 * ranks - 1 - r]]
        loads = [0] * ranks
        for first, end in sorted(whole, key=lambda each: each[0] - each[1]):
            r = loads.index(min(loads))
            parts[r].append((first, end))
            loads[r] += (end - first) ** 2
        outside = [(0, offsets[0])] if offsets[0] else []
        parts[-1] += outside  # rows of no document
        return Layout([sorted(part) for part in parts], block)

    @classmethod
    def balanced(
        cls,
        masks: Sequence[Mask],
        ranks: int,
        weights: Optional[Sequence[float]] = None,
        *,
        total: int,
        total_k: Optional[int] = None,
        block: int = DEFAULT_BLOCK,
        tolerance: float = 0.02,
    ) -> Layout:
        """Equal work under any mask, and few keys to fetch, by swap search.

        It begins contiguous; while the heaviest rank is above the mean by more than `tolerance`, it exchanges one of
        its blocks with a lighter block of another rank. Ranks keep equal numbers of blocks.

        Args:
            masks: the masks of a model's layers; one Mask is a list of one.
            ranks: how many.
            weights: how often a model has each mask. Default 1 each.
            total: positions.
            total_k: keys. Default None: as positions.
            block: rows that stay together. Default 256.
            tolerance: of the heaviest rank's work above the mean. Default 0.02.

        Returns:
            The layout.

        Raises:
            ValueError: there is no mask, or not one weight for each.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout, Mask
            >>> layout = Layout.balanced([Mask(is_causal=True)], 2, total=4096)
            >>> layout.imbalance(Mask(is_causal=True)) < 0.02
            True
        """
        total, ranks, block = _counts(total, ranks, block)
        masks = [masks] if isinstance(masks, Mask) else list(masks)
        numbers = [1.0] * len(masks) if weights is None else [float(each) for each in weights]
        if not masks or len(masks) != len(numbers):
            raise ValueError(f"weights has {len(numbers)} numbers for {len(masks)} masks; each mask has one")
        seqlens = (total, total if total_k is None else total_k)
        chunks = swap_search(masks, numbers, seqlens, ranks, block, tolerance)
        return Layout([[(c * block, min(total, (c + 1) * block)) for c in rank] for rank in chunks], block)

    @classmethod
    def from_ranges(cls, ranges: Iterable[Iterable[Range]], block: int = DEFAULT_BLOCK) -> Layout:
        """The caller's own.

        Args:
            ranges: for each rank, ranges (first, end) in the order of its rows.
            block: what the caller made them of; nothing is checked. Default 256.

        Returns:
            The layout.

        Raises:
            ValueError: positions are missing or given twice.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout
            >>> Layout.from_ranges([[(4, 8)], [(0, 4)]]).rows(0)
            4
        """
        return Layout(ranges, block)

    @classmethod
    def from_index(cls, index: Any, ranks: int, block: int = DEFAULT_BLOCK) -> Layout:
        """Of a permutation: row i of the shards, one behind the other, is position index[i].

        Args:
            index: integers [total] or [1, total]. Runs of consecutive positions have at least 16 rows on average.
            ranks: how many; shards are of equal length, as those of PyTorch's load balancers.
            block: what the caller made it of; nothing is checked. Default 256.

        Returns:
            The layout.

        Raises:
            ValueError: index is no permutation, its runs are short, or ranks cannot share its rows equally.

        Examples:
            >>> import torch
            >>> from flash_dmattn.context_parallel import Layout
            >>> Layout.from_index(torch.arange(64).roll(32), 2).ranges
            (((32, 64),), ((0, 32),))
        """
        tensor = torch.as_tensor(index)
        if tensor.dim() == 2 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype is torch.bool:
            raise ValueError(f"index is {said(index)} of {tensor.dtype}; it must be a permutation [total] of integers")
        ranks = at_least(1, ranks, "ranks")
        positions = tensor.tolist()
        total = len(positions)
        if total % ranks:
            raise ValueError(f"index has {total} rows, which {ranks} ranks cannot share equally")
        if sorted(positions) != list(range(total)):
            raise ValueError("index is no permutation: some position is missing or stands twice")
        share = total // ranks
        parts: List[List[Range]] = []
        for r in range(ranks):
            runs: List[Range] = []
            for position in positions[r * share : (r + 1) * share]:
                if runs and runs[-1][1] == position:
                    runs[-1] = (runs[-1][0], position + 1)
                else:
                    runs.append((position, position + 1))
            parts.append(runs)
        count = sum(map(len, parts))
        if count > ranks and total < SHORTEST_RUN * count:
            raise ValueError(
                f"index has runs of {total / count:.1f} rows on average; at least {SHORTEST_RUN} are needed, since no "
                "tile of a kernel stays whole below"
            )
        return Layout(parts, block)

    # Of a zigzag layout of fewer ranks, the pairs of ranges that each of `leaves` ranks would have; None: it is another.
    def leaves(self, rank: int, leaves: int) -> Optional[List[List[Range]]]:
        if self != Layout.zigzag(self.total, self.ranks, self.block):
            return None
        chunks, share = _chunks(self.total, 2 * leaves, self.block), leaves // self.ranks
        return [[chunks[leaf], chunks[2 * leaves - 1 - leaf]] for leaf in range(rank * share, (rank + 1) * share)]

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    @property
    def digest(self) -> str:
        """Equal for equal layouts, on every machine."""
        return self._digest

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Layout) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        counts = [len(rank) for rank in self.ranges]
        return f"Layout({self.total} rows, {self.ranks} ranks, {sum(counts)} ranges, block={self.block})"

    def rows(self, rank: int) -> int:
        """How many rows a rank has.

        Args:
            rank: which.

        Returns:
            The number.

        Raises:
            ValueError: there is no such rank.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout
            >>> Layout.contiguous(1000, 2).rows(1)
            488
        """
        return size(self.ranges[self._rank(rank)])

    def sorted_ranges(self, rank: int) -> Ranges:
        return union(self.ranges[self._rank(rank)])

    def positions(self, rank: int, device: Any = None) -> Tensor:
        """The global position of each row of a rank, for rotary embeddings and losses.

        Args:
            rank: which.
            device: where the tensor is made. Default None: PyTorch's.

        Returns:
            int64 [rows of the rank].

        Raises:
            ValueError: there is no such rank.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout
            >>> Layout.zigzag(8, 2, block=2).positions(0)
            tensor([0, 1, 6, 7])
        """
        parts = [torch.arange(first, end, device=device) for first, end in self.ranges[self._rank(rank)]]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """A rank's rows of a whole tensor; a copy, unless they are one range.

        Args:
            x: the whole tensor.
            dim: the axis of positions.
            rank: which.

        Returns:
            The rows, in the shard's order. Gradients flow.

        Raises:
            ValueError: the axis has not the layout's extent, or there is no such rank.

        Examples:
            >>> import torch
            >>> from flash_dmattn.context_parallel import Layout
            >>> Layout.zigzag(8, 2, block=2).shard(torch.arange(8), 0, 1)
            tensor([2, 3, 4, 5])
        """
        self._check_extent(x, dim, self.total)
        parts = [x.narrow(dim, first, end - first) for first, end in self.ranges[self._rank(rank)]]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else x.narrow(dim, 0, 0)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor of every rank's shard.

        Args:
            parts: the shards, by rank.
            dim: the axis of positions.

        Returns:
            The whole. Gradients flow.

        Raises:
            ValueError: a shard has not its rank's rows.

        Examples:
            >>> import torch
            >>> from flash_dmattn.context_parallel import Layout
            >>> layout, x = Layout.zigzag(8, 2, block=2), torch.arange(8)
            >>> layout.join([layout.shard(x, 0, 0), layout.shard(x, 0, 1)], 0)
            tensor([0, 1, 2, 3, 4, 5, 6, 7])
        """
        whole: List[Tuple[int, Tensor]] = []
        if len(parts) != self.ranks:
            raise ValueError(f"there are {len(parts)} shards for {self.ranks} ranks")
        for rank, part in enumerate(parts):
            self._check_extent(part, dim, self.rows(rank))
            place = 0
            for first, end in self.ranges[rank]:
                whole.append((first, part.narrow(dim, place, end - first)))
                place += end - first
        whole.sort(key=lambda each: each[0])
        return torch.cat([part for _, part in whole], dim) if whole else parts[0].clone()

    def unshard(self, x: Tensor, dim: int, group: Any = None) -> Tensor:
        """The whole tensor, on every rank, of the shards that ranks of a process group have. Collective.

        Args:
            x: this rank's shard.
            dim: the axis of positions.
            group: the process group. Default None: all ranks.

        Returns:
            The whole. No gradient flows.

        Raises:
            ValueError: the shard has not its rank's rows.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout
            >>> def evaluate(layout, logits, group):  # [B, rows of this rank, n], on every rank
            ...     return layout.unshard(logits, 1, group)
        """
        from ._exchange import gather_rows

        rank = torch.distributed.get_rank(group)
        self._check_extent(x, dim, self.rows(rank))
        rows = [self.rows(each) for each in range(self.ranks)]
        moved = x.detach().movedim(dim, 0).contiguous()
        return self.join([each.movedim(0, dim) for each in gather_rows(moved, rows, group)], dim)

    def needed(self, mask: Mask, rank: int, layout_k: Optional[Layout] = None) -> Ranges:
        """Keys that some row of a rank sees.

        Args:
            mask: which keys rows see.
            rank: which.
            layout_k: where keys lie. Default None: as rows.

        Returns:
            Ranges (first, end), sorted; of masks with key intervals, whole pages of 16 keys.

        Raises:
            ValueError: there is no such rank.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout, Mask
            >>> Layout.contiguous(4096, 2).needed(Mask(window_size=(512, 0)), 1)
            [(1536, 4096)]
        """
        keys = (layout_k or self).total
        return needed_keys([self.sorted_ranges(rank)], mask, (self.total, keys))[0]

    # How many keys of others the rank needs.
    def fetched(self, mask: Mask, rank: int, layout_k: Optional[Layout] = None) -> int:
        needed = self.needed(mask, rank, layout_k)
        return size(needed) - size(intersect(needed, (layout_k or self).sorted_ranges(rank)))

    # Of each rank the visible pairs of row and key: its work.
    def visible(self, mask: Mask, seqlen_k: Optional[int] = None) -> List[int]:
        sums = torch.zeros(self.total + 1, dtype=torch.int64)
        sums[1:] = mask.rows_visible((self.total, self.total if seqlen_k is None else seqlen_k)).cumsum(0)
        return [sum(int(sums[end] - sums[first]) for first, end in rank) for rank in self.ranges]

    def imbalance(self, mask: Mask, seqlen_k: Optional[int] = None) -> float:
        """The most work of a rank over the mean, less 1: 0 where all have the same.

        Args:
            mask: which keys rows see; work is counted in pairs of a row and a key that it sees.
            seqlen_k: keys. Default None: as rows.

        Returns:
            A number from 0 on.

        Raises:
            Nothing: an empty mask gives 0.

        Examples:
            >>> from flash_dmattn.context_parallel import Layout, Mask
            >>> round(Layout.contiguous(4096, 2).imbalance(Mask(is_causal=True)), 3)
            0.5
        """
        pairs = self.visible(mask, seqlen_k)
        return max(pairs) * len(pairs) / sum(pairs) - 1 if sum(pairs) else 0.0

    # ---- checks --------------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank is {rank}; this layout has ranks 0 to {self.ranks - 1}")
        return rank

    def _check_extent(self, x: Tensor, dim: int, rows: int) -> None:
        if x.shape[dim] != rows:
            raise ValueError(f"axis {dim} of a tensor of shape {list(x.shape)} has not the layout's {rows} rows")


def _joined(ranges: Iterable[Range]) -> List[Range]:
    """In the given order; one that goes on where the last one ended is a part of it."""
    kept: List[Range] = []
    for each in ranges:
        first, end = (at_least(0, bound, "a bound of a range") for bound in each)
        if end < first:
            raise ValueError(f"a range is ({first}, {end}); its end must not be below its first position")
        if kept and kept[-1][1] == first:
            kept[-1] = (kept[-1][0], end)
        elif first < end:
            kept.append((first, end))
    return kept


def _counts(total: int, ranks: int, block: int) -> Tuple[int, int, int]:
    return at_least(0, total, "total"), at_least(1, ranks, "ranks"), at_least(1, block, "block")


def _offsets(cu_seqlens: Any) -> List[int]:
    offsets = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else [int(each) for each in cu_seqlens]
    if not offsets or any(a > b for a, b in zip(offsets, offsets[1:])) or offsets[0] < 0:
        raise ValueError("cu_seqlens must be numbers from 0 on that never fall, one more than documents")
    return list(offsets)
