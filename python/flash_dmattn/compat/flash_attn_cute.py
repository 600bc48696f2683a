"""flash_attn.cute of flash-attn 4, on our kernels.

Every function returns (out, lse), with lse None unless return_lse. lse is -inf in rows without keys, or the logarithm of
their sinks. num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split and disable_scheduler_metadata say
how flash-attn's kernels run and change nothing here. Every error is a RuntimeError, and a ValueError, TypeError or
NotImplementedError as well.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from . import _calls, _kv_cache, _refusals
from ._combine import combine
from ._rules import Packing
from .flash_attn_interface import empty_rows, joined

__version__ = "4.0.0"
__provider__ = "flash_dmattn"
__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

Results = Tuple[Tensor, Optional[Tensor]]


def _refuse(**functions: Any) -> None:
    """What flash_dmattn has no counterpart of: anything but None and empty."""
    for name, value in functions.items():
        if value is not None:
            _refusals.no_score_function(name)


def _alone(qv: Optional[Tensor]) -> Tensor:
    """The query of a call without q."""
    if qv is None:
        raise _refusals.InvalidArgument("q and qv are both None: give one of them")
    return qv


def _attend(
    q: Optional[Tensor], k: Optional[Tensor], v: Tensor, qv: Optional[Tensor], packing: Optional[Packing],
    window_size: Any, softmax_scale: Optional[float], return_lse: bool, **options: Any,
) -> Results:  # fmt: skip
    if q is None or k is None:
        qv = _alone(qv)
        q, k, scale = qv, v, qv.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    else:
        q, k, scale = joined(q, k, v, qv, softmax_scale)
    left, right = window_size
    results = _calls.attend(
        q, k, v, packing, window=(left, right), softmax_scale=scale, return_lse=return_lse, **options
    )
    if not return_lse:
        return results, None
    lse = results[1] if options["sink"] is not None else empty_rows(results[1], 1)
    return results[0], lse if qv is None else lse.transpose(-1, -2)


def _is_plain(window_size: Any) -> bool:
    """Whether no bound is negative, which is a bound here."""
    return all(bound is None or (type(bound) is int and bound >= 0) for bound in window_size)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Optional[Tensor] = None,
    gather_kv_indices: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[Optional[int], Optional[int]] = (None, None),
    learnable_sink: Optional[Tensor] = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    score_mod: Optional[Callable[..., Any]] = None,
    score_mod_bwd: Optional[Callable[..., Any]] = None,
    mask_mod: Optional[Callable[..., Any]] = None,
    aux_tensors: Optional[list[Tensor]] = None,
    aux_scalars: Optional[Tuple[Any, ...]] = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Results:
    """(out [B, Sq, H, Dv], lse [B, H, Sq]) of q [B, Sq, H, D], k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv].

    window_size: None is unbounded, a negative number a bound. learnable_sink: [H]. qv [B, Sq, H, Dv] copies q and k and
    gives lse [B, Sq, H].
    """
    if score_mod is not None or mask_mod is not None or gather_kv_indices is not None:
        _refuse(score_mod=score_mod, mask_mod=mask_mod, gather_kv_indices=gather_kv_indices)
    if block_sparse_tensors is not None or aux_tensors is not None or aux_scalars is not None:
        _refuse(block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
    window = _calls.UNBOUNDED if window_size == (None, None) else window_size
    if qv is None and (window is _calls.UNBOUNDED or _is_plain(window)):
        results = _calls.plain(
            q, k, v, _calls.DENSE, learnable_sink, softmax_scale, causal, window, softcap, deterministic, return_lse
        )
        if results is not None:
            if not return_lse:
                return results, None
            if learnable_sink is None and not _calls.rows_have_keys(q, k, causal, window):
                return results[0], empty_rows(results[1], 1)
            return results  # type: ignore[no-any-return]
    return _attend(
        q, k, v, qv, None, window_size, softmax_scale, return_lse, causal=causal, softcap=softcap,
        deterministic=deterministic, sink=learnable_sink,
    )  # fmt: skip


def _even(tensor: Tensor) -> Tuple[Tensor, int]:
    """cu_seqlens and the length of sequences [B, S, ...]."""
    batch, length = tensor.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=tensor.device) * length, length


def _flat(*tensors: Any) -> Any:
    """[B, S, ...] as [B * S, ...]; None stays None."""
    return tuple(None if each is None else each.flatten(0, 1) for each in tensors)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    min_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    gather_kv_indices: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[Optional[int], Optional[int]] = (None, None),
    learnable_sink: Optional[Tensor] = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    score_mod: Optional[Callable[..., Any]] = None,
    score_mod_bwd: Optional[Callable[..., Any]] = None,
    mask_mod: Optional[Callable[..., Any]] = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Optional[list[Tensor]] = None,
    aux_scalars: Optional[Tuple[Any, ...]] = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: Optional[int] = None,
    disable_scheduler_metadata: bool = False,
) -> Results:
    """(out, lse) of packed q [total_q, H, D], k [total_k, Hkv, D] and v [total_k, Hkv, Dv], or of q, or of k and v, with
    axes [B, S] where cu_seqlens_q or cu_seqlens_k is None. out has q's axes; lse is [H, total_q] or [B, H, Sq].

    seqused_q, seqused_k: int32 [B], rows and keys that count; out is 0 in the other rows.
    """
    if score_mod is not None or mask_mod is not None or gather_kv_indices is not None:
        _refuse(score_mod=score_mod, mask_mod=mask_mod, gather_kv_indices=gather_kv_indices)
    if block_sparse_tensors is not None or aux_tensors is not None or aux_scalars is not None:
        _refuse(block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
    if page_table is not None:
        for bound in window_size:
            if bound is not None and bound < 0:
                raise _refusals.Unsupported(f"window_size is {window_size} beside page_table; its bounds must be None or from 0")
        pages: Any = None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q or 0), 0)
        if cu_seqlens_q is None and cu_seqlens_k is not None and seqused_k is None:
            seqused_k = cu_seqlens_k.diff()
        rows_last = qv is None
        if q is None or k is None:
            q, k, qv = _alone(qv), v, None
        results = NotImplemented
        if qv is None and seqused_q is None and seqused_k is not None:
            results = _kv_cache.plain_on_pages(
                q, k, v, page_table, cu_seqlens_q, 0 if pages is None else pages[2], seqused_k, softmax_scale, causal,
                window_size, softcap, learnable_sink, return_lse,
            )  # fmt: skip
        if results is NotImplemented:
            results = _kv_cache.attend_to_pages(
                q, k, v, page_table, pages, seqused_k, window=window_size, causal=causal, softmax_scale=softmax_scale,
                softcap=softcap, sink=learnable_sink, return_lse=return_lse, qv=qv, seqused_q=seqused_q,
            )  # fmt: skip
        if not return_lse:
            return results, None
        lse = results[1] if learnable_sink is not None else empty_rows(results[1], 1)
        return results[0], lse if rows_last else lse.transpose(-1, -2)
    options = dict(
        causal=causal, softcap=softcap, deterministic=deterministic, sink=learnable_sink, used=(seqused_q, seqused_k)
    )
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return _attend(q, k, v, qv, None, window_size, softmax_scale, return_lse, **options)
    first = q if q is not None else _alone(qv)
    shape = first.shape[:2]
    if cu_seqlens_q is None:
        cu_seqlens_q, max_seqlen_q = _even(first)
        q, qv = _flat(q, qv)
    if cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k = _even(v)
        k, v = _flat(k, v)
    # The bounds may be left out: no sequence is longer than all rows.
    longest = [int(shape[0] if max_seqlen_q is None else max_seqlen_q)]
    longest.append(int(v.shape[0] if max_seqlen_k is None else max_seqlen_k))
    packing = cu_seqlens_q, cu_seqlens_k, longest[0], longest[1]
    if seqused_q is seqused_k is qv is None and window_size == (None, None) and not return_lse:
        window = _calls.UNBOUNDED
        out = _calls.plain(
            q, k, v, packing, learnable_sink, softmax_scale, causal, window, softcap, deterministic, False
        )
        if out is not None:
            return (out if first.dim() == 3 else out.unflatten(0, shape)), None
    out, lse = _attend(q, k, v, qv, packing, window_size, softmax_scale, return_lse, **options)
    if first.dim() == 4:
        out = out.unflatten(0, shape)
        if lse is not None:
            lse = lse.unflatten(0, shape) if qv is not None else lse.unflatten(1, shape).transpose(0, 1)
    return out, lse


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Optional[Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    cu_seqlens: Optional[Tensor] = None,
    seqused: Optional[Tensor] = None,
    virtual_batch_idx: Optional[Tensor] = None,
    return_lse: bool = True,
) -> Results:
    """(out, lse) of parts: out_partial [n, ..., Dv] and lse_partial [n, ...], of which an infinite one has no keys.

    cu_seqlens, seqused and virtual_batch_idx say how rows are dealt to flash-attn's blocks; here every row is combined.
    """
    result, lse = combine(out_partial, lse_partial, out, out_dtype)
    return result, lse if return_lse else None
