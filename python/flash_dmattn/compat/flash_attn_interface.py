"""flash_attn_interface of flash-attn 3, on our kernels.

pack_gqa, sm_margin, num_splits and scheduler_metadata say how flash-attn's kernels run and change nothing here. lse is
-inf in rows without keys, and +inf where k has no rows at all. Every error is a RuntimeError, and a ValueError, TypeError
or NotImplementedError as well.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from . import _calls, _kv_cache, _refusals
from ._combine import combine
from ._rules import Packing

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def maybe_contiguous(x: Optional[Tensor]) -> Optional[Tensor]:
    return None if x is None else _calls.rows_contiguous(x)


def _refuse_scales(*scales: Any) -> None:
    for scale, name in zip(scales, ("q_descale", "k_descale", "v_descale")):
        if scale is not None:
            _refusals.no_fp8(name)


def joined(
    q: Tensor, k: Tensor, v: Tensor, qv: Optional[Tensor], softmax_scale: Optional[float]
) -> Tuple[Tensor, Tensor, Optional[float]]:
    """(q, k, scale) for scores of scale * (q k + qv v): the axes of heads one behind the other, which copies both."""
    if qv is None:
        return q, k, softmax_scale
    q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    return q, k, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def empty_rows(lse: Tensor, keys: int) -> Tensor:
    """Our lse, which nobody else has yet, with flash-attn 3's number in rows without keys."""
    if keys == 0:
        return lse
    if lse.requires_grad:
        return lse.masked_fill(lse == torch.inf, -torch.inf)
    return lse.nan_to_num_(torch.nan, -torch.inf, -torch.inf)  # the same by one operation


def _attend(
    q: Tensor, k: Tensor, v: Tensor, packing: Optional[Packing], qv: Optional[Tensor], softmax_scale: Optional[float],
    return_lse: bool, **options: Any,
) -> Any:  # fmt: skip
    q, k, softmax_scale = joined(q, k, v, qv, softmax_scale)
    results = _calls.attend(q, k, v, packing, softmax_scale=softmax_scale, return_lse=return_lse, **options)
    if not return_lse:
        return results
    return results[0], empty_rows(results[1], k.shape[1 if packing is None else 0])


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """out [B, Sq, H, Dv] of q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] and qv [B, Sq, H, Dv]; (out, lse)
    with return_attn_probs, lse [B, H, Sq].

    attention_chunk c: a row at position p sees keys of chunk p // c alone, backward too. qv copies q and k.
    """
    if q_descale is not None or k_descale is not None or v_descale is not None:
        _refuse_scales(q_descale, k_descale, v_descale)
    window = _calls.window_of(window_size)
    if qv is None and not attention_chunk:
        results = _calls.plain(
            q, k, v, _calls.DENSE, None, softmax_scale, causal, window, softcap, deterministic, return_attn_probs
        )
        if results is not None:
            if not return_attn_probs or _calls.rows_have_keys(q, k, causal, window):
                return results
            return results[0], empty_rows(results[1], k.shape[1])
    return _attend(
        q, k, v, None, qv, softmax_scale, return_attn_probs, causal=causal, window=window, chunk=attention_chunk,
        softcap=softcap, deterministic=deterministic,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """out [total_q, H, Dv] of packed q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv] and qv [total_q, H,
    Dv]; (out, lse) with return_attn_probs, lse [H, total_q].

    seqused_q, seqused_k: int32 [B], rows and keys of each sequence that count; out is 0 in the other rows.
    """
    if q_descale is not None or k_descale is not None or v_descale is not None:
        _refuse_scales(q_descale, k_descale, v_descale)
    packing = _calls.packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = _calls.window_of(window_size)
    if seqused_q is seqused_k is qv is None and not attention_chunk:
        results = _calls.plain(
            q, k, v, packing, None, softmax_scale, causal, window, softcap, deterministic, return_attn_probs
        )
        if results is not None:
            return (results[0], empty_rows(results[1], k.shape[0])) if return_attn_probs else results
    return _attend(
        q, k, v, packing, qv, softmax_scale, return_attn_probs, causal=causal, window=window,
        chunk=attention_chunk, softcap=softcap, deterministic=deterministic, used=(seqused_q, seqused_k),
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: Optional[int] = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv [B, S, 3, H, D], or [B, S, H + 2 Hkv, D] with num_heads_q = H, without a copy."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None:
            raise _refusals.InvalidArgument(
                "num_heads_q is None, but qkv has 4 axes: say how many heads the query has"
            )
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads_kv, heads_kv), dim=2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Optional[Tensor] = None, out_dtype: Optional[torch.dtype] = None
) -> Tuple[Tensor, Tensor]:
    """(out, lse) of parts: out_partial [n, ..., Dv] and lse_partial [n, ...], of which an infinite one has no keys."""
    return combine(out_partial, lse_partial, out, out_dtype)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """out [B, Sq, H, Dv] of q [B, Sq, H, D] and a cache, or packed [total_q, H, Dv] with cu_seqlens_q; (out, lse) with
    return_softmax_lse, lse [B, H, Sq] or [H, total_q].

    k_cache and v_cache are [B or more, Sk, Hkv, D and Dv], or pages [pages, page_size, Hkv, D and Dv] of any size with
    page_table [B, columns]. k and v are written into them behind cache_seqlens before. qv [B, Sq, H, Dv] adds
    qv v to the scores; it copies q, and the whole cache where key and value of a row are not neighbours in memory.
    """
    if q_descale is not None or k_descale is not None or v_descale is not None:
        _refuse_scales(q_descale, k_descale, v_descale)
    window = _calls.window_of(window_size)
    results = NotImplemented
    if qv is None and not attention_chunk:
        results = _kv_cache.plain(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, cache_seqlens,
            cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, softmax_scale,
            causal, window, softcap, None, return_softmax_lse, False,
        )  # fmt: skip
    if results is NotImplemented:
        results = _kv_cache.attend_to_cache(
            q, k_cache, v_cache, k=k, v=v, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
            block_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens, softmax_scale=softmax_scale, causal=causal,
            window=window, attention_chunk=attention_chunk, softcap=softcap, rotary_interleaved=rotary_interleaved,
            return_lse=return_softmax_lse,
        )  # fmt: skip
    return (results[0], empty_rows(results[1], k_cache.shape[1])) if return_softmax_lse else results


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> Tensor:
    """int32 [0]: there is no schedule that could be made before a call."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


# ---- private functions -----------------------------------------------------------------------------------------------


def _packing_of(
    q: Tensor, k: Tensor, cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor], max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
) -> Optional[Packing]:  # fmt: skip
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise _refusals.Unsupported("one of cu_seqlens_q and cu_seqlens_k is None: give both, and pack q, k and v")
    rows, keys = (q.shape[0] if max_seqlen_q is None else max_seqlen_q), max_seqlen_k
    return cu_seqlens_q, cu_seqlens_k, int(rows), k.shape[0] if keys is None else int(keys)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Optional[Tensor] = None,
    v_new: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    out_: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    page_table: Optional[Tensor] = None,
    kv_batch_idx: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    seqlens_rotary: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, out_accum, lse_accum); the last two hold nothing."""
    _refuse_scales(q_descale, k_descale, v_descale)
    if page_table is not None:
        _refusals.no_table("page_table")
    for each, name in ((k_new, "k_new"), (kv_batch_idx, "kv_batch_idx"), (leftpad_k, "leftpad_k")):
        if each is not None:
            raise _refusals.Unsupported(f"{name} is given, but flash_dmattn has no key-value cache yet: pass None")
    out, lse = _attend(
        q, k, v, _packing_of(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), qv, softmax_scale, True,
        causal=causal, window=_calls.window_of((window_size_left, window_size_right)), chunk=attention_chunk,
        softcap=softcap, used=(seqused_q, seqused_k),
    )  # fmt: skip
    none = lse.new_empty(0)
    return (out if out_ is None else out_.copy_(out)), lse, none, none


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    sequed_q: Optional[Tensor] = None,
    sequed_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    dq: Optional[Tensor] = None,
    dk: Optional[Tensor] = None,
    dv: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """delta, float32. Writes dq, dk and dv where they are given; out and softmax_lse may be of more keys than k."""
    lse = softmax_lse.masked_fill(softmax_lse == -torch.inf, torch.inf)
    return _calls.backward(
        dout, (q, k, v), out, lse, (dq, dk, dv),
        _packing_of(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), softmax_scale=softmax_scale,
        causal=is_causal, window=_calls.window_of((window_size_left, window_size_right)), softcap=softcap,
        deterministic=deterministic, used=(sequed_q, sequed_k),
    )  # fmt: skip
