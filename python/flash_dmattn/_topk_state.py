"""TopKState: the keys of a top-W mask while tokens are generated, W slots a head, so that a step reads W keys at most."""

from __future__ import annotations

from typing import Any, Tuple

from . import _native
from ._arguments import at_least, refuse_negated
from ._arrays import describe, is_torch


class TopKState:
    """The W keys a head that later rows can see, with their K and V; what `masks.topk_intervals` says, kept up to date.

    The bound that a key must pass only rises, so a key that is dropped never comes back and its slot is free for the
    token that takes its place. Attention of one row is attention to the slots: their order does not matter, and an
    empty slot has a bias of -inf. `of_prompt` makes a state; the constructor takes arrays as they are.

    Tensors of PyTorch on the CPU or a CUDA device (on its current stream; nothing waits, and `append` can be captured
    in a graph, as it always works on the same memory, and traced by torch.compile), or NumPy arrays.

    Args:
        key: int32 [B, h, W]: which key is in a slot, counted from 0 at the first token; -1 = an empty slot. h is the
            number of KV heads, or of query heads where each has a bias and K and V of its own.
        bias: [B, h, W], in the dtype of the biases: what was given for the key; -inf in an empty slot.
        length: int32 [B, h]: tokens so far.
        k, v: [B, W, h, D] and [B, W, h, Dv], or None, the default.

    Raises:
        Nothing: `append` checks the arrays.

    Examples:
        >>> import torch
        >>> from flash_dmattn import flash_dmattn_func, masks
        >>> bias, k, v = torch.randn(1, 2, 6), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
        >>> state = masks.TopKState.of_prompt(bias, 4, k, v)
        >>> slot = state.append(torch.randn(1, 2), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8))
        >>> q = torch.randn(1, 1, 2, 8)
        >>> flash_dmattn_func(q, state.k, state.v, attn_bias=state.bias).shape  # reads 4 keys a head
        torch.Size([1, 1, 2, 8])
        >>> state.length.tolist()
        [[7, 7]]
    """

    def __init__(self, key: Any, bias: Any, length: Any, k: Any = None, v: Any = None) -> None:
        """Takes arrays as they are; `of_prompt` makes them."""
        self.key, self.bias, self.length, self.k, self.v = key, bias, length, k, v

    @classmethod
    def of_prompt(
        cls,
        bias: Any,
        window_size: int,
        k: Any = None,
        v: Any = None,
        key_padding_mask: Any = None,
        block_table: Any = None,
    ) -> TopKState:
        """The state after the tokens of a prompt.

        Args:
            bias: [B, h, S], floating; S may be 0. No gradient flows through it.
            window_size: W >= 1 slots a head.
            k, v: [B, S, h, D] and [B, S, h, Dv], or None, the default.
            key_padding_mask: bool [B, S], True = a real token; others are never visible and do not count. Default None.
            block_table: int32 [B, n], where the prompt's k and v lie in pages [num_pages, page_size, h, D]: token t of
                sequence b is row t % page_size of page block_table[b, t // page_size]. Pages without a kept key are not
                looked at; when this returns (on a CUDA device: in the order of its stream) all may be given back.
                Default None: no pages.

        Returns:
            A TopKState of new memory.

        Raises:
            TypeError, ValueError: a shape, a dtype or a number is wrong.

        Examples:
            >>> import numpy
            >>> from flash_dmattn import masks
            >>> state = masks.TopKState.of_prompt(numpy.array([[[3.0, 1.0, 2.0]]], numpy.float32), 2)
            >>> sorted(state.key[0, 0].tolist())
            [0, 2]
        """
        from .masks import topk_intervals

        if bias.ndim != 3:
            raise ValueError(f"bias has shape {list(bias.shape)}; it must be [batch, heads, seqlen]")
        window_size = at_least(1, window_size, "window_size")
        _refuse_negated(bias, k, v)
        bias = bias.detach() if is_torch(bias) else bias
        _, end = topk_intervals(bias, window_size, key_padding_mask=key_padding_mask)
        batch, heads, _ = bias.shape
        rows = [None if each is None else _new(each, (batch, window_size, heads, each.shape[-1])) for each in (k, v)]
        slots = (batch, heads, window_size)
        state = cls(_new(end, slots), _new(bias, slots), _new(end, (batch, heads)), *rows)
        for each in rows:
            if each is not None:
                each[:] = 0  # a slot that nothing was written to holds numbers
        table = None if block_table is None else _view(block_table)
        _native.topk_fill(*state._arguments(bias, k, v), _view(end), table, _stream(bias))
        return state

    def append(self, bias: Any, k: Any = None, v: Any = None, real: Any = None) -> Any:
        """One more token of each head. It takes an empty slot, or that of the worst key where it is better.

        Args:
            bias: [B, h], of the state's dtype.
            k, v: [B, 1, h, D] and [B, 1, h, Dv], or None, the default, as in the state.
            real: bool [B]; False = a token that is never visible and does not count. Default None: all are real.

        Returns:
            int32 [B, h]: the slot that the token got, -1 when none.

        Raises:
            TypeError, ValueError: a shape or a dtype does not match the state.

        Examples:
            >>> import numpy
            >>> from flash_dmattn import masks
            >>> state = masks.TopKState.of_prompt(numpy.array([[[3.0, 1.0]]], numpy.float32), 2)
            >>> state.append(numpy.array([[0.5]], numpy.float32)).tolist()  # worse than both
            [[-1]]
        """
        if is_torch(self.key):
            return self._append_torch(bias, k, v, real)
        slot = _new(self.length, self.length.shape)
        views = None if real is None else _view(real), _view(slot)
        _native.topk_append(*self._arguments(bias, k, v), *views, 0)
        return slot

    def _append_torch(self, bias: Any, k: Any, v: Any, real: Any) -> Any:
        import torch

        from . import _masks_torch

        new = (None if each is None else each.detach() for each in (bias, k, v))
        append: Any = torch.ops.flash_dmattn.topk_append
        if not torch.compiler.is_compiling():  # code that is compiled goes by the dispatcher, which resolves them
            append = _masks_torch.append
            _refuse_negated(bias, k, v)
        return append(*new, self.key, self.bias, self.length, self.k, self.v, real)

    def _arguments(self, bias: Any, k: Any, v: Any) -> Tuple[Any, ...]:
        arrays = (bias, k, v, self.key, self.bias, self.length, self.k, self.v)
        return tuple(None if each is None else _view(each) for each in arrays)


# ---- two array libraries ---------------------------------------------------------------------------------------------


def _refuse_negated(bias: Any, k: Any, v: Any) -> None:
    for each, name in ((bias, "bias"), (k, "k"), (v, "v")):
        if is_torch(each):
            refuse_negated(each, name)


def _view(array: Any) -> Any:
    if is_torch(array):
        from ._operators import native_view

        return native_view(array.detach())
    return describe(array, "an array of the state")


def _new(like: Any, shape: Any) -> Any:
    if is_torch(like):
        return like.new_empty(tuple(shape))
    import numpy

    return numpy.empty(shape, like.dtype)


def _stream(array: Any) -> int:
    if not is_torch(array):
        return 0
    from ._operators import stream_of

    return stream_of(array)
