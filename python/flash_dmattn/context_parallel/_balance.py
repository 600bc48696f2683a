"""Swap search: which blocks of rows go to which rank, so that all have the same work and few keys travel."""

from __future__ import annotations

from typing import List, Sequence, Set, Tuple

import torch
from torch import Tensor

from ._visible import Mask, two_axes

# Of the blocks of two ranks, the pairs whose exchange is looked at, by how well each evens the two ranks out.
_PAIRS_LOOKED_AT = 48


def _seen(mask: Mask, seqlens: Tuple[int, int], block: int) -> List[Set[int]]:
    """For each block of rows, the blocks of keys that some row of it sees."""
    blocks_q, blocks_k = (-(-length // block) for length in seqlens)
    start, end = (two_axes(each).cpu() for each in mask.intervals(seqlens))
    visible = end > start
    first, last = start // block, (end - 1) // block
    counts = torch.zeros(blocks_k, blocks_q + 1, dtype=torch.int32)
    ones = torch.ones(1, dtype=torch.int32)
    key_block = (torch.arange(seqlens[1]) // block).expand_as(start)
    for at, sign in ((first, 1), (last + 1, -1)):
        counts.index_put_((key_block[visible], at[visible]), sign * ones, accumulate=True)
    touched: Tensor = counts.cumsum(1)[:, :blocks_q] > 0
    sets: List[Set[int]] = [set() for _ in range(blocks_q)]
    for key, row in touched.nonzero().tolist():
        sets[row].add(key)
    return sets


def _work(masks: Sequence[Mask], weights: Sequence[float], seqlens: Tuple[int, int], block: int) -> List[float]:
    """Of each block of rows: visible pairs, each mask's share of all pairs times its weight."""
    blocks = -(-seqlens[0] // block)
    total = torch.zeros(blocks, dtype=torch.float64)
    for mask, weight in zip(masks, weights):
        rows = mask.rows_visible(seqlens).double()
        padded = torch.nn.functional.pad(rows, (0, blocks * block - seqlens[0])).view(blocks, block)
        total += weight * padded.sum(1)
    return total.tolist()


class _Ranks:
    """Blocks of every rank, their work, and how many of its blocks need each block of keys."""

    def __init__(self, parts: List[List[int]], work: List[float], seen: List[Set[int]]) -> None:
        self.parts, self.work, self.seen = parts, work, seen
        self.loads = [sum(work[c] for c in part) for part in parts]
        self.users: List[dict[int, int]] = [{} for _ in parts]
        for rank, part in enumerate(parts):
            for c in part:
                self._add(rank, c, 1)

    def _add(self, rank: int, block: int, sign: int) -> None:
        users = self.users[rank]
        for key in self.seen[block]:
            left = users.get(key, 0) + sign
            if left:
                users[key] = left
            else:
                del users[key]

    def growth(self, rank: int, goes: int, comes: int) -> int:
        """How many more blocks of keys of others the rank needs; blocks of rows bring their own keys."""
        users, leaving, coming = self.users[rank], self.seen[goes], self.seen[comes]
        more = sum(1 for key in coming if key not in users)
        fewer = sum(1 for key in leaving if users[key] == 1 and key not in coming)
        return more - fewer + (goes in users) - (comes in users)

    def exchange(self, one: int, mine: int, two: int, yours: int) -> None:
        for rank, goes, comes in ((one, mine, yours), (two, yours, mine)):
            self._add(rank, goes, -1)
            self._add(rank, comes, 1)
            self.parts[rank][self.parts[rank].index(goes)] = comes
            self.loads[rank] += self.work[comes] - self.work[goes]

    def best(self, heavy: int, light: int) -> Tuple[float, int, int]:
        """The exchange with the least growth of what is fetched for the balance gained: (growth, mine, yours)."""
        apart = self.loads[heavy] - self.loads[light]
        pairs = []
        for mine in self.parts[heavy]:
            for yours in self.parts[light]:
                moved = self.work[mine] - self.work[yours]
                if 0 < moved < apart:
                    gained = min(moved, apart - moved)
                    pairs.append((-gained, mine, yours))
        pairs.sort()
        found = (float("inf"), -1, -1)
        for negative, mine, yours in pairs[:_PAIRS_LOOKED_AT]:
            more = self.growth(heavy, mine, yours) + self.growth(light, yours, mine)
            cost = (max(more, 0) + 1) / -negative
            found = min(found, (cost, mine, yours))
        return found


def swap_search(
    masks: Sequence[Mask],
    weights: Sequence[float],
    seqlens: Tuple[int, int],
    ranks: int,
    block: int,
    tolerance: float,
) -> List[List[int]]:
    """Blocks of rows of each rank, sorted."""
    work = _work(masks, weights, seqlens, block)
    seen = [set().union(*sets) for sets in zip(*(_seen(mask, seqlens, block) for mask in masks))]
    edges = [len(work) * r // ranks for r in range(ranks + 1)]
    state = _Ranks([list(range(a, b)) for a, b in zip(edges, edges[1:])], work, seen)
    mean = sum(work) / ranks
    for _ in range(4 * len(work)):
        heavy = state.loads.index(max(state.loads))
        if state.loads[heavy] <= (1 + tolerance) * mean:
            break
        others = sorted((each for each in range(ranks) if each != heavy), key=lambda each: state.loads[each])
        choices = [(state.best(heavy, light), light) for light in others[:8]]
        choices = [each for each in choices if each[0][1] >= 0]
        if not choices:
            break
        (_, mine, yours), light = min(choices)
        state.exchange(heavy, mine, light, yours)
    return [sorted(part) for part in state.parts]
