"""torch.nn.attention.varlen's function by this library's kernels, with its signature."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

from torch import Tensor

from . import _calls, _kv_cache, _refusals

__all__ = ["varlen_attn"]


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Optional[Tensor],
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: Optional[float] = None,
    window_size: Tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    num_splits: Optional[int] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """torch.nn.attention.varlen.varlen_attn, on the CPU too, differentiable with seqused_k too.

    Args:
        query: [total_q, H, D], dtypes as in flash_dmattn_func.
        key, value: [total_k, Hkv, D] and [total_k, Hkv, Dv], query's dtype.
        cu_seq_q, cu_seq_k: int32 [B + 1], where each sequence begins, and where the last one ends.
        max_q, max_k: upper bounds on the lengths.
        return_aux: an AuxRequest of PyTorch's; with its lse also lse is returned. Default None.
        scale: default D ** -0.5.
        window_size: (left, right), -1 = unbounded; (-1, 0) is causal, aligned to the end of each sequence.
        enable_gqa: key and value may have fewer heads, of which each serves H / Hkv heads of query. Default False.
        seqused_k: int32 [B]: keys of each sequence that count; default None = all.
        block_table: int32 or int64 [B, columns]: key and value are pages [P, page size, Hkv, D and Dv], without
            gradients; key j of a sequence is row j % page size of the page in column j // page size. Default None.
        num_splits: changes nothing here; default None.

    Returns:
        out [total_q, H, Dv]; (out, lse) with return_aux.lse, lse [H, total_q] float32, +inf in rows without keys.

    Raises:
        ValueError, TypeError: an argument is wrong.
        NotImplementedError: no kernel of the tensors' device takes the problem.

    Examples:
        >>> import torch
        >>> from flash_dmattn.compat.varlen import varlen_attn
        >>> x, cu_seq = torch.ones(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> varlen_attn(x, x, x, cu_seq, cu_seq, 3, 3, window_size=(-1, 0)).shape
        torch.Size([5, 2, 8])
    """
    if cu_seq_k is None and (block_table is None or seqused_k is None):
        raise _refusals.InvalidArgument("cu_seq_k is None: say where each sequence of key begins, int32 [batch + 1]")
    if cu_seq_q is None:
        raise _refusals.InvalidArgument("cu_seq_q is None: say where each sequence of query begins, int32 [batch + 1]")
    if not enable_gqa and query.shape[1] != key.shape[-2]:
        raise _refusals.InvalidArgument(
            f"query has {query.shape[1]} heads and key {key.shape[-2]}: write enable_gqa=True where they share them"
        )
    return_lse = return_aux is not None and bool(return_aux.lse)
    packing: Any = (cu_seq_q, cu_seq_k, int(max_q), int(max_k))
    window = _calls.window_of(window_size)
    if block_table is not None:
        return _kv_cache.attend_to_pages(  # type: ignore[no-any-return]
            query, key, value, block_table, packing, seqused_k, window=window, causal=False, softmax_scale=scale,
            softcap=0.0, sink=None, return_lse=return_lse,
        )  # fmt: skip
    if seqused_k is None:
        result = _calls.plain(query, key, value, packing, None, scale, False, window, 0.0, False, return_lse)
        if result is not None:
            return result  # type: ignore[no-any-return]
    return _calls.attend(  # type: ignore[no-any-return]
        query, key, value, packing, softmax_scale=scale, window=window, used=(None, seqused_k), return_lse=return_lse
    )
