"""Sets of KV heads that travel together: how many, and how large."""

from __future__ import annotations

import math
from typing import List, Optional, Sequence

import torch

from ._gather import OF_ROWS
from ._pieces import MOST_CALLS
from ._problem import Problem
from ._ranges import Range
from .layout import Layout

MOST_SETS = 4
# Estimates by which sets are chosen on CUDA devices, of an H100 or H200 and its NVLink: multiply-adds and bytes a second
# of a rank, and what an exchange takes that moves nothing.
_FLOPS, _BANDWIDTH, _LATENCY = 600e12, 300e9, 20e-6
# A set is worth its launches where it is computed for so long, and longer by so much for each call on a range of rows:
# what the host takes on an H200. Sets are worth it at all where a copy is not much shorter.
_SECONDS_OF_A_SET, _SECONDS_OF_A_CALL, _SHARE_OF_A_COPY = 0.3e-3, 60e-6, 0.03


def set_sizes(heads_kv: int, fewest: int, most: int = MOST_SETS) -> List[int]:
    """The first and the last set are the fewest heads that are worth a launch: nothing hides the first one's keys and
    the last one's gradients. Those between share the rest."""
    fewest = max(1, fewest)
    if heads_kv < 2 * fewest or most < 2:
        return [heads_kv]
    if heads_kv < 3 * fewest or most < 3:
        return [fewest, heads_kv - fewest]
    between = heads_kv - 2 * fewest
    if between <= 3 * fewest or most < 4:
        return [fewest, between, fewest]
    return [fewest, between // 2, between - between // 2, fewest]


def _fewest_heads(problem: Problem, layout: Layout) -> int:
    """KV heads whose blocks of 128 rows give every multiprocessor of every rank work, of the rank's longest range."""
    q, k, *_ = problem.operands
    longest = min(max((end - first for first, end in ranges), default=0) for ranges in layout.ranges)
    blocks = max(1, -(-longest // 128)) * max(1, q.shape[0]) * (q.shape[2] // k.shape[2])
    return math.ceil(0.9 * torch.cuda.get_device_properties(q.device).multi_processor_count / blocks)


def _pairs(problem: Problem, layout: Layout, may_wait: bool) -> float:
    """Of the busiest rank in one query head. Key intervals on a device are looked at where the host may wait for it."""
    rows, keys = problem.seqlens
    pair = problem.mask.key_intervals
    if pair is not None and may_wait:
        lists = max(1, pair[0].numel() // max(1, keys))
        return max(layout.visible(problem.mask, keys)) / lists
    left, right = problem.mask.window_size
    seen = keys / 2 if problem.mask.is_causal else keys
    if left >= 0:
        seen = min(seen, left + 1 + (0 if problem.mask.is_causal else max(right, 0)))
    return rows / layout.ranks * seen


def _most_sets(problem: Problem, fetched: Sequence[int], layout: Layout, may_wait: bool) -> int:
    """By the time of a forward."""
    q, k, v, *_ = problem.operands
    depth = k.shape[3] + v.shape[3]
    work = 2.0 * q.shape[0] * q.shape[2] * depth * _pairs(problem, layout, may_wait) / _FLOPS
    copy = _LATENCY + max(fetched) * k.shape[0] * k.shape[2] * depth * k.element_size() / _BANDWIDTH
    calls = min(MOST_CALLS, max(map(len, layout.ranges)))
    worth = _SECONDS_OF_A_SET + _SECONDS_OF_A_CALL * calls
    return 1 if copy < _SHARE_OF_A_COPY * work else max(1, min(MOST_SETS, int(work / worth)))


def choose_sets(
    problem: Problem, fetched: Sequence[int], layout: Layout, sizes: Optional[List[int]], may_wait: bool
) -> List[Range]:
    """Ranges of KV heads; alike on every rank. fetched: of each rank the keys of others; sizes: the caller's wish.
    may_wait: whether the host may wait for a device's key intervals."""
    heads_kv, bias = problem.operands.k.shape[2], problem.operands.bias
    # The gradient of a bias that heads share is summed by one call, and rounded once.
    shared = bias is not None and problem.bias_kind in OF_ROWS and bias.shape[1] == 1
    if (shared and problem.needs_gradient()[3]) or not any(fetched):
        sizes = [heads_kv]
    elif sizes is not None:
        if sum(sizes) != heads_kv or min(sizes, default=0) < 1:
            raise ValueError(f"head_sets is {sizes}; its numbers are from 1 on, and their sum is {heads_kv}")
    elif problem.operands.q.is_cuda:
        sizes = set_sizes(heads_kv, _fewest_heads(problem, layout), _most_sets(problem, fetched, layout, may_wait))
    else:
        sizes = set_sizes(heads_kv, 1)
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return list(zip(edges, edges[1:]))
