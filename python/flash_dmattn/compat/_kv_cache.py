"""Attention over a key-value cache: the one place where flash_attn_with_kvcache of every version ends."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import _native, flash_dmattn_with_kvcache_func
from .._arguments import NO_WINDOW, integer_of
from . import _cache_qv, _rules
from ._calls import UNBOUNDED
from ._refusals import InvalidArgument, Unsupported, again
from ._rules import Lengths, Packing, Window


def plain(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cos: Any, sin: Any, interleaved: Any, rotary_seqlens: Any,
    lengths: Any, batch_idx: Any, leftpad: Any, table: Any, cu_seqlens_q: Any, cu_seqlens_k_new: Any, max_seqlen_q: Any,
    softmax_scale: Any, causal: Any, window: Window, softcap: Any, sink: Any, return_lse: Any, within_room: bool,
) -> Any:  # fmt: skip
    """attend_to_cache() of a call in eager mode; NotImplemented where it needs more. within_room: also check_room(), of
    lengths on the CPU."""
    turns = cos is not None
    if torch.compiler.is_compiling() or (k is None) is not (v is None) or turns is not (sin is not None):
        return NotImplemented
    if turns and k is None or k is not None and lengths is None:
        return NotImplemented
    if cu_seqlens_q is not None and not max_seqlen_q:
        max_seqlen_q = q.shape[0] if q.is_cuda else 0
    if type(lengths) is int:
        lengths = _lengths_of_all(lengths, q, k_cache, cu_seqlens_q)
    try:
        return _native.cache_attend(
            q, k_cache, v_cache, None, None, sink, None, None, cu_seqlens_q, None, table, None, batch_idx, lengths,
            leftpad, k, v, cu_seqlens_k_new, rotary_seqlens if turns else None, None, None, (cos, sin) if turns else None,
            max_seqlen_q or 0, 0, softmax_scale, causal, softcap,
            NO_WINDOW if window is UNBOUNDED else (window[0], None if causal else window[1]), False, interleaved, 0, 0, 0,
            return_lse, within_room,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise again(error) from error


def plain_on_pages(
    q: Any, k: Any, v: Any, table: Any, offsets: Any, longest: Any, used: Any, softmax_scale: Any, causal: Any,
    window: Window, softcap: Any, sink: Any, return_lse: Any,
) -> Any:  # fmt: skip
    """plain() of attend_to_pages()."""
    return plain(
        q, k, v, None, None, None, None, False, None, used, None, None, table, offsets, None, longest, softmax_scale,
        causal, window, softcap, sink, return_lse, False,
    )  # fmt: skip


def attend_to_cache(
    q: Any, k_cache: Any, v_cache: Any, *, k: Any, v: Any, cache_seqlens: Any, window: Window, causal: bool,
    rotary_cos: Any, rotary_sin: Any, cu_seqlens_q: Any = None, max_seqlen_q: Optional[int] = None,
    cu_seqlens_k_new: Any = None, qv: Any = None, alibi_slopes: Any = None, attention_chunk: int = 0, **options: Any,
) -> Any:  # fmt: skip
    """flash_attn_with_kvcache() of any version, by flash-attn's names; what kernels alone look at is left out. out, or
    (out, lse) with return_lse, lse +inf in rows without keys."""
    if (k is None) is not (v is None):
        raise InvalidArgument(f"{'v' if k is None else 'k'} is given without {'k' if k is None else 'v'}: give both")
    if k is not None and cache_seqlens is None:
        raise InvalidArgument(
            "k is given without cache_seqlens: appending needs to know where each sequence ends"
        )
    if (rotary_cos is None) is not (rotary_sin is None):
        raise InvalidArgument("one of rotary_cos and rotary_sin is given without the other: give both")
    if rotary_cos is not None and k is None:
        raise InvalidArgument("rotary_cos is given without k: only a call with new keys turns them")
    sources = [each for each in (q, k_cache, v_cache, k, v) if getattr(each, "requires_grad", False)]
    q, k_cache, v_cache, k, v = (each.detach() if isinstance(each, Tensor) else each for each in (q, k_cache, v_cache, k, v))
    if rotary_cos is None:
        options.pop("rotary_seqlens", None)  # it says where nothing turns
    lengths = cache_seqlens
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths = _lengths_of_all(integer_of(lengths, "cache_seqlens"), q, k_cache, cu_seqlens_q)
    most = q.shape[0] if cu_seqlens_q is not None and q.is_cuda else 0  # without a bound, one that is not read there
    rotary = None if rotary_cos is None else (rotary_cos, rotary_sin)
    left, right = window[0], 0 if causal else window[1]
    if qv is not None:
        if options.get("softmax_scale") is None:
            options["softmax_scale"] = (q.shape[-1] + qv.shape[-1]) ** -0.5
        if k is not None and lengths is not None:
            moves = causal or window != (None, None)
            try:
                q, lengths = _cache_qv.append_first(
                    q, k_cache, v_cache, k, v, lengths, rotary, moves, cu_seqlens_q, cu_seqlens_k_new, options
                )
            except (TypeError, ValueError) as error:
                raise again(error) from error
            k = v = rotary = cu_seqlens_k_new = None
        q, k_cache, v_cache = _cache_qv.joined(q, qv, k_cache, v_cache)
    correction = None
    if alibi_slopes is not None or attention_chunk > 0:
        table = options.get("block_table")
        room = k_cache.shape[1] * (1 if table is None else table.shape[1])
        own = _lengths(q, k, lengths, room, cu_seqlens_q, cu_seqlens_k_new)
        if attention_chunk > 0:
            first_keys = options.get("cache_leftpad")
            options["row_intervals"] = _rules.chunks_of_rows(q, cu_seqlens_q, own, attention_chunk, first_keys)
        if alibi_slopes is not None:
            slopes = _rules.slopes_of(alibi_slopes, q, len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1)
            options["attn_bias"], correction = _alibi(slopes, own, q.shape[1], room, right)
    try:
        results = flash_dmattn_with_kvcache_func(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, is_causal=causal,
            window_size=(-1 if left is None else left, -1 if right is None or causal else right),
            rotary=rotary, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q or most,
            cu_seqlens_new=cu_seqlens_k_new, **options,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise again(error) from error
    if correction is not None and options.get("return_lse"):
        results = results[0], results[1] + correction
    if not sources or not torch.is_grad_enabled():
        return results
    if isinstance(results, tuple):
        return tuple(_ForwardOnly.apply(each, *sources) for each in results)  # type: ignore[no-untyped-call]
    return _ForwardOnly.apply(results, *sources)  # type: ignore[no-untyped-call]


def _lengths_of_all(length: int, q: Any, k_cache: Any, cu_seqlens_q: Any) -> Tensor:
    """int32 [B]: the one length of all sequences."""
    sequences = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    return torch.full((sequences,), length, dtype=torch.int32, device=getattr(k_cache, "device", None))


class _ForwardOnly(torch.autograd.Function):
    """A result of tensors that require gradients, which it has none for."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *sources: Tensor) -> Tensor:
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Unsupported(
            "a call on a key-value cache has no backward: use flash_attn_varlen_func on packed tensors without a table of pages"
        )


def _alibi(slopes: Tensor, lengths: Lengths, seqlen_q: int, room: int, right: Optional[int]) -> Any:
    """The bias, and what it leaves out of lse. A bias of keys alone serves where no key is to the right of its row."""
    if right == 0 or seqlen_q == 1 and right is None:
        return _rules.key_bias(slopes, lengths, room), _rules.row_bias(slopes, lengths, seqlen_q, None)
    return _rules.pair_bias(slopes, lengths, seqlen_q, room), None


def _lengths(q: Tensor, k: Any, held: Optional[Tensor], room: int, offsets: Any, new_offsets: Any) -> Lengths:
    """Rows of each sequence and its keys after appending; int32 [B], or [1] where all have the same."""

    def same(number: int) -> Tensor:
        return torch.full((1,), number, dtype=torch.int32, device=q.device)

    rows = same(q.shape[1]) if offsets is None else offsets.diff()
    keys = same(room) if held is None else held
    if k is not None:
        keys = keys + (k.shape[1] if new_offsets is None else new_offsets.diff())
    return Lengths(rows, keys, rows)


def check_room(k_cache: Any, k: Any, cache_seqlens: Any, block_table: Any) -> None:
    """Raises where keys of a sequence have no column of the table. It reads the lengths, and so waits for a CUDA device,
    but not while a stream is captured or code is compiled."""
    both = (k_cache, block_table)
    if not all(isinstance(each, Tensor) for each in both) or k_cache.dim() != 4 or block_table.dim() != 2:
        return
    if torch.compiler.is_compiling() or k_cache.device.type not in ("cpu", "cuda"):
        return
    if k_cache.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    lengths = cache_seqlens.tolist() if isinstance(cache_seqlens, Tensor) else [cache_seqlens]
    new = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 0
    columns, page = block_table.shape[1], k_cache.shape[1]
    for sequence, length in enumerate(lengths):
        if isinstance(length, int) and length >= 0 and length + new > columns * page:
            raise InvalidArgument(
                f"cache_seqlens of sequence {sequence} is {length}{f' before {new} new keys' if new else ''}, but block_table "
                f"holds {columns} pages of {page} rows"
            )


def attend_to_pages(
    q: Any, k: Any, v: Any, table: Any, packing: Optional[Packing], used: Any, *, window: Window, causal: bool,
    softmax_scale: Optional[float], softcap: float, sink: Any, return_lse: bool, qv: Any = None, **others: Any,
) -> Any:  # fmt: skip
    """A function of packed tensors whose k and v are pages [P, page size, Hkv, D and Dv]. Lengths are those of `used`,
    int32 [B], else of the packing's keys. out, or (out, lse), lse +inf in rows without keys."""
    for name, value in others.items():
        if value is not None:
            raise Unsupported(f"{name} is given beside a table of pages, which flash_dmattn does not take together yet")
    if used is None and packing is not None and packing[1] is not None:
        used = packing[1].diff()
    offsets, longest = (None, 0) if packing is None else (packing[0], packing[2])
    if qv is None:
        results = plain_on_pages(
            q, k, v, table, offsets, longest, used, softmax_scale, causal, window, softcap, sink, return_lse
        )
        if results is not NotImplemented:
            return results
    return attend_to_cache(
        q, k, v, k=None, v=None, cache_seqlens=used, window=window, causal=causal, rotary_cos=None, rotary_sin=None,
        cu_seqlens_q=offsets, max_seqlen_q=longest, block_table=table, softmax_scale=softmax_scale, softcap=softcap,
        sink=sink, return_lse=return_lse, qv=qv,
    )  # fmt: skip
