"""The kernel that one rank would run on the whole problem: calls on parts of it that run the same have its bits."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from .. import _arguments, _native
from ._engine import GRADIENTS, Operands, Settings, changed, lse_dtype
from ._gather import KEYS, OF_ROWS, ROWS
from ._problem import Problem

_Shape = Tuple[int, ...]
# Bytes from one tensor that is only described to the next.
_APART = 1 << 40


def _strides(shape: _Shape) -> _Shape:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class WholeKernels:
    """Choice codes of forward and backward; None where the plan is left free."""

    def __init__(self, problem: Problem, heads_ranks: int) -> None:
        self.kept: Dict[bool, Optional[str]] = {}
        self.operands, self.settings = problem.operands, self._settings(problem)
        self.shapes = self._shapes(problem, heads_ranks)
        self.needs = problem.needs_gradient()
        self.forward = self._code(False, None)

    @staticmethod
    def _settings(problem: Problem) -> Settings:
        left, right = problem.mask.window_size
        return changed(problem.settings, causal=problem.mask.is_causal, window_left=left, window_right=right)

    @staticmethod
    def _shapes(problem: Problem, heads_ranks: int) -> List[Optional[_Shape]]:
        """Of the inputs in the whole problem, of which these operands may have a part of the heads."""
        q, k, v, mask, bias, *_ = problem.operands
        sink = problem.operands.sink
        rows, keys = problem.seqlens
        shapes: List[Optional[_Shape]] = []
        for tensor, length in ((q, rows), (k, keys), (v, keys)):
            shapes.append((tensor.shape[0], length, tensor.shape[2] * heads_ranks, tensor.shape[3]))

        def heads(number: int) -> int:
            return number if number == 1 else number * heads_ranks

        for scores, kind in ((mask, problem.mask_kind), (bias, problem.bias_kind)):
            extents = (rows if kind in OF_ROWS else 1, keys if kind in (ROWS, KEYS) else 1)
            shapes.append(None if scores is None else (scores.shape[0], heads(scores.shape[1]), *extents))
        pair = problem.mask.key_intervals
        start = None if pair is None else (1,) * (3 - pair[0].dim()) + tuple(pair[0].shape)
        whole = None if start is None else (start[0], heads(start[1]), start[2])
        shapes += [whole, whole, None, None]
        shapes.append(None if sink is None else (*sink.shape[:-1], sink.shape[-1] * heads_ranks))
        return [*shapes, *[None] * (len(Operands._fields) - len(shapes))]

    def backward(self, has_dlse: bool) -> Optional[str]:
        if has_dlse not in self.kept:
            self.kept[has_dlse] = self._code(True, has_dlse)
        return self.kept[has_dlse]

    def _code(self, backward: bool, has_dlse: Optional[bool]) -> Optional[str]:
        q = self.operands.q
        if _arguments.forced_family is not None or q.dtype is torch.float64 or not q.numel():
            return None
        inputs = [(shape, each) for shape, each in zip(self.shapes, self.operands)]
        out_shape = (*_of(self.shapes[0])[:3], _of(self.shapes[2])[3])
        lse_shape = (out_shape[0], out_shape[2], out_shape[1])
        lse = lse_dtype(q)
        described: List[Any] = [(shape, _dtype(each, name)) for (shape, each), name in zip(inputs, Operands._fields)]
        results = [(out_shape, q.dtype), (lse_shape, lse), (lse_shape if self.operands.bias is not None else None, lse)]
        described += results
        if backward:
            described += [results[0], results[1] if has_dlse else (None, lse)]
            for name, need in zip(GRADIENTS, self.needs):
                place = Operands._fields.index(name)
                described.append(described[place] if need else (None, q.dtype))
        device = (2, q.device.index) if q.is_cuda else (1, 0)
        tensors = [_described(shape, dtype, number, device) for number, (shape, dtype) in enumerate(described)]
        where: Tuple[Any, ...] = (0, None) if q.is_cuda else ()
        threads = 0 if q.is_cuda else torch.get_num_threads()
        plan = _native.plan_backward if backward else _native.plan
        try:
            return plan(*tensors, *self.settings, threads, None, None, False, *where)[2]
        except NotImplementedError:
            return None


def _of(shape: Optional[_Shape]) -> _Shape:
    assert shape is not None
    return shape


def _dtype(tensor: Optional[torch.Tensor], name: str) -> torch.dtype:
    if tensor is None:
        return torch.int32
    return tensor.dtype


def _described(shape: Optional[Sequence[int]], dtype: torch.dtype, number: int, device: Tuple[int, int]) -> Any:
    if shape is None:
        return None
    whole = tuple(shape)
    return (number + 1) * _APART, str(dtype)[len("torch.") :], whole, _strides(whole), *device
