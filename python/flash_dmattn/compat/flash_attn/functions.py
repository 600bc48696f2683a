"""flash_attn.flash_attn_interface of flash-attn 2.8.3, on our kernels: public functions and the private ones in use.

Parameters by keyword alone are ours: s_aux are sinks [H], seqused_k int32 [B] the keys of each sequence that count, and
attn_mask, attn_bias and key_intervals are those of flash_dmattn_func. Every error is a RuntimeError, and a ValueError,
TypeError or NotImplementedError as well. lse is +inf in rows without keys.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .. import _calls, _kv_cache, _refusals

USE_TRITON_ROCM = False


def maybe_contiguous(x: Optional[Tensor]) -> Optional[Tensor]:
    return None if x is None else _calls.rows_contiguous(x)


def round_multiple(x: int, m: int) -> int:
    return (x + m - 1) // m * m


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys of a tile. flash-attn's tests lay dropout masks out by it; there are none here."""
    return 128 if head_dim <= 64 else 64


# ---- public functions ------------------------------------------------------------------------------------------------


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    key_intervals: Optional[Tuple[Tensor, Tensor]] = None,
) -> Any:
    """out [B, Sq, H, Dv] of q [B, Sq, H, D], k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv]; with return_attn_probs also lse
    [B, H, Sq] and a tensor without elements."""
    if dropout_p:
        _refusals.no_dropout(dropout_p)
    window = _calls.window_of(window_size)
    results = None
    if key_intervals is None and alibi_slopes is attn_mask is attn_bias is seqused_k is None:
        results = _calls.plain(
            q, k, v, _calls.DENSE, s_aux, softmax_scale, causal, window, softcap, deterministic, return_attn_probs
        )
    if results is None:
        results = _calls.attend(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window=window, softcap=softcap,
            deterministic=deterministic, alibi_slopes=alibi_slopes, sink=s_aux, used=(None, seqused_k),
            attn_mask=attn_mask, attn_bias=attn_bias, key_intervals=key_intervals, return_lse=return_attn_probs,
        )  # fmt: skip
    return (*results, _calls.nothing(q)) if return_attn_probs else results


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
    *,
    s_aux: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    key_intervals: Optional[Tuple[Tensor, Tensor]] = None,
) -> Any:
    """out [total_q, H, Dv] of packed q [total_q, H, D], k [total_k, Hkv, D] and v [total_k, Hkv, Dv]; with
    return_attn_probs also lse [H, total_q] and a tensor without elements. With block_table, int32 [B, columns], k and v are
    pages [P, page size, Hkv, D and Dv]."""
    if dropout_p:
        _refusals.no_dropout(dropout_p)
    if block_table is not None and seqused_k is not None:
        cu_seqlens_k = seqused_k  # which says how long the sequences are
    packing = _calls.packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = _calls.window_of(window_size)
    results = None
    if block_table is not None:
        if key_intervals is None and alibi_slopes is attn_mask is attn_bias is None:
            if seqused_k is None:
                seqused_k = cu_seqlens_k.diff()
            results = _kv_cache.plain_on_pages(
                q, k, v, block_table, cu_seqlens_q, packing[2], seqused_k, softmax_scale, causal, window, softcap, s_aux,
                return_attn_probs,
            )  # fmt: skip
            if results is not NotImplemented:
                return (*results, _calls.nothing(q)) if return_attn_probs else results
        results = _kv_cache.attend_to_pages(
            q, k, v, block_table, packing, seqused_k, window=window, causal=causal, softmax_scale=softmax_scale,
            softcap=softcap, sink=s_aux, return_lse=return_attn_probs, alibi_slopes=alibi_slopes, attn_mask=attn_mask,
            attn_bias=attn_bias, key_intervals=key_intervals,
        )  # fmt: skip
    elif key_intervals is None and alibi_slopes is attn_mask is attn_bias is seqused_k is None:
        results = _calls.plain(
            q, k, v, packing, s_aux, softmax_scale, causal, window, softcap, deterministic, return_attn_probs
        )
    if results is None:
        results = _calls.attend(
            q, k, v, packing, softmax_scale=softmax_scale, causal=causal, window=window, softcap=softcap,
            deterministic=deterministic, alibi_slopes=alibi_slopes, sink=s_aux, used=(None, seqused_k),
            attn_mask=attn_mask, attn_bias=attn_bias, key_intervals=key_intervals, return_lse=return_attn_probs,
        )  # fmt: skip
    return (*results, _calls.nothing(q)) if return_attn_probs else results


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv [B, S, 3, H, D], without a copy."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of q [B, Sq, H, D] and kv [B, Sk, 2, Hkv, D], without a copy."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of qkv [total, 3, H, D], without a copy."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of q [total_q, H, D] and kv [total_k, 2, Hkv, D], without a copy."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Optional[Tensor] = None,
) -> Any:
    """out [B, Sq, H, Dv] of q [B, Sq, H, D] and a cache; (out, lse) with return_softmax_lse, lse [B, H, Sq].

    k_cache and v_cache are [B or more, Sk, Hkv, D and Dv], or pages [pages, page_size, Hkv, D and Dv] of any size with
    block_table [B, columns]. k and v [B, Sn, Hkv, D and Dv] are written into them behind cache_seqlens before.
    Beside block_table lengths are read to be compared with it, but not while a CUDA stream is captured. num_splits
    changes nothing. ALiBi is a bias of [B, H, Sk] numbers, of [B, H, Sq, Sk] where rows see keys to their right.
    """
    window = _calls.window_of(window_size)
    results = NotImplemented
    read_here = block_table is not None and not (isinstance(cache_seqlens, Tensor) and cache_seqlens.is_cpu)
    if read_here:
        _kv_cache.check_room(k_cache, k, cache_seqlens, block_table)
    if alibi_slopes is None:
        results = _kv_cache.plain(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, None, cache_seqlens, cache_batch_idx,
            cache_leftpad, block_table, None, None, 0, softmax_scale, causal, window, softcap, s_aux, return_softmax_lse,
            True,
        )  # fmt: skip
    if results is not NotImplemented:
        return results
    if not read_here:
        _kv_cache.check_room(k_cache, k, cache_seqlens, block_table)
    return _kv_cache.attend_to_cache(
        q, k_cache, v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window=window, softcap=softcap,
        rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes, return_lse=return_softmax_lse, sink=s_aux,
    )  # fmt: skip


# ---- private functions that diffusers, xformers and ring attention call ----------------------------------------------


def _rest(q: Tensor) -> Tuple[Tensor, Tensor]:
    """Behind out and lse: no probabilities, and a state of a generator that drew nothing."""
    return q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, S, rng_state); the last two hold nothing."""
    out, lse, _ = flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, False,
        True,
    )  # fmt: skip
    return (out, lse, *_rest(q))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, S, rng_state); the last two hold nothing."""
    if leftpad_k is not None:
        _refusals.no_table("leftpad_k")
    if block_table is not None and num_splits > 1:
        raise _refusals.InvalidArgument(f"num_splits is {num_splits} beside block_table; give 0 or 1")
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, False, True, block_table, seqused_k=seqused_k,
    )  # fmt: skip
    return (out, lse, *_rest(q))


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
) -> Tensor:
    """delta, float32 [B, H, Sq]. Writes dq, dk and dv where they are given; out and softmax_lse may be of more keys."""
    if dropout_p:
        _refusals.no_dropout(dropout_p)
    return _calls.backward(
        dout, (q, k, v), out, softmax_lse, (dq, dk, dv), softmax_scale=softmax_scale, causal=causal,
        window=_calls.window_of((window_size_left, window_size_right)), softcap=softcap, deterministic=deterministic,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> Tensor:
    """delta, float32 [H, total_q]. Writes dq, dk and dv where they are given; out and softmax_lse may be of more keys."""
    if dropout_p:
        _refusals.no_dropout(dropout_p)
    return _calls.backward(
        dout, (q, k, v), out, softmax_lse, (dq, dk, dv),
        _calls.packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), softmax_scale=softmax_scale, causal=causal,
        window=_calls.window_of((window_size_left, window_size_right)), softcap=softcap, deterministic=deterministic,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


# ---- the functions of flash-attn's extension -------------------------------------------------------------------------


def _into(out: Optional[Tensor], results: Sequence[Tensor]) -> Tuple[Tensor, ...]:
    """(out, ...) of a forward, in the caller's out where there is one."""
    if out is None:
        return tuple(results)
    return (out.copy_(results[0]), *results[1:])


def _fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Optional[Tensor], alibi_slopes: Optional[Tensor], p_dropout: float,
    softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    return_softmax: bool, gen: Any,
) -> Tuple[Tensor, ...]:  # fmt: skip
    if gen is not None:
        _refusals.no_generator()
    return _into(
        out,
        _flash_attn_forward(
            q, k, v, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax,
        ),
    )  # fmt: skip


def _varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Optional[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    seqused_k: Optional[Tensor], leftpad_k: Optional[Tensor], block_table: Optional[Tensor],
    alibi_slopes: Optional[Tensor], max_seqlen_q: int, max_seqlen_k: int, p_dropout: float, softmax_scale: float,
    zero_tensors: bool, is_causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    return_softmax: bool, gen: Any, num_splits: int = 0,
) -> Tuple[Tensor, ...]:  # fmt: skip
    if gen is not None:
        _refusals.no_generator()
    return _into(
        out,
        _flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, is_causal,
            window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k,
            seqused_k, zero_tensors, num_splits,
        ),
    )  # fmt: skip


def _gradients(inputs: Sequence[Tensor], outputs: Sequence[Optional[Tensor]]) -> list[Tensor]:
    return [torch.empty_like(each) if given is None else given for each, given in zip(inputs, outputs)]


def _bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Optional[Tensor],
    dk: Optional[Tensor], dv: Optional[Tensor], alibi_slopes: Optional[Tensor], p_dropout: float, softmax_scale: float,
    is_causal: bool, window_size_left: int, window_size_right: int, softcap: float, deterministic: bool, gen: Any,
    rng_state: Optional[Tensor],
) -> Tuple[Tensor, ...]:  # fmt: skip
    if gen is not None:
        _refusals.no_generator()
    dq, dk, dv = _gradients((q, k, v), (dq, dk, dv))
    delta = _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, p_dropout, softmax_scale, is_causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    return dq, dk, dv, delta


def _varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Optional[Tensor],
    dk: Optional[Tensor], dv: Optional[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    alibi_slopes: Optional[Tensor], max_seqlen_q: int, max_seqlen_k: int, p_dropout: float, softmax_scale: float,
    zero_tensors: bool, is_causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    deterministic: bool, gen: Any, rng_state: Optional[Tensor],
) -> Tuple[Tensor, ...]:  # fmt: skip
    if gen is not None:
        _refusals.no_generator()
    dq, dk, dv = _gradients((q, k, v), (dq, dk, dv))
    delta = _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout,
        softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
        zero_tensors,
    )  # fmt: skip
    return dq, dk, dv, delta


flash_attn_gpu = SimpleNamespace(fwd=_fwd, varlen_fwd=_varlen_fwd, bwd=_bwd, varlen_bwd=_varlen_bwd)
