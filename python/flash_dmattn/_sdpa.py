"""scaled_dot_product_attention() with the signature, the layout and the meaning of PyTorch's."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _torch
from ._arguments import flag_of, said


def _check(query: Any, key: Any, value: Any, mask: Any, dropout_p: Any) -> None:
    for tensor, name in ((query, "query"), (key, "key"), (value, "value"), (mask, "attn_mask")):
        if not isinstance(tensor, Tensor) and not (tensor is None and name == "attn_mask"):
            raise TypeError(f"{name} is {said(tensor)}; it must be a torch.Tensor")
        if tensor is not None and not (name == "attn_mask" or 2 <= tensor.dim() <= 4):
            raise ValueError(f"{name} has {tensor.dim()} axes; it needs 4 [batch, heads, seqlen, head_dim], 3 or 2")
    if type(dropout_p) not in (int, float) or dropout_p != 0:
        raise NotImplementedError(f"dropout_p is {said(dropout_p)}; flash_dmattn has no dropout: it must be 0.0")


def _four_axes(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]


def _offsets(nested: Any) -> Tensor:
    offsets: Tensor = nested.offsets()
    return offsets


def _common(extents: Sequence[int]) -> int:
    """What extents broadcast to; 0 where they do not."""
    extent = next((each for each in extents if each != 1), 1)
    return extent if all(each in (1, extent) for each in extents) else 0


def _shapes(tensors: Sequence[Tensor]) -> str:
    return "query, key and value have the shapes " + ", ".join(str(list(each.shape)) for each in tensors)


def _broadcast(
    tensors: Sequence[Tensor], mask: Optional[Tensor], gqa: bool
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """q, k, v and the mask with four axes; an axis of sequences or heads of extent 1 becomes as long as the others'."""
    q, k, v = (_four_axes(each) for each in tensors)
    if q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2]:
        raise ValueError(
            f"{_shapes(tensors)}; query and key must have one head dim, key and value as many rows as each other"
        )
    batch, heads_kv = _common([each.shape[0] for each in (q, k, v)]), _common([k.shape[1], v.shape[1]])
    if batch == 0 or heads_kv == 0:
        raise ValueError(f"{_shapes(tensors)}; their axes of sequences and heads must be as long as each other, or 1")
    heads = q.shape[1] if q.shape[1] != 1 else heads_kv
    if not gqa and heads_kv not in (1, heads):
        raise ValueError(f"{_shapes(tensors)}; write enable_gqa=True where query heads share those of key and value")
    if mask is not None:
        full = (batch, heads, q.shape[2], k.shape[2])[4 - max(each.dim() for each in tensors) :]
        if mask.dim() > len(full) or any(have not in (1, want) for have, want in zip(mask.shape[::-1], full[::-1])):
            raise ValueError(f"attn_mask has shape {list(mask.shape)}; it must broadcast to {list(full)}")
        mask = _four_axes(mask)
    q, k, v = (
        each if each.shape[0] == batch and each.shape[1] == extent else each.expand(batch, extent, -1, -1)
        for each, extent in ((q, heads), (k, heads_kv), (v, heads_kv))
    )
    return q, k, v, mask


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention by this library's kernels, differentiable, masks included.

    Args:
        query: [B, H, Sq, D], or [H, Sq, D], or [Sq, D]; dtypes as in flash_dmattn_func. An axis B or H may be 1.
        key, value: [B, H, Sk, D] and [B, H, Sk, Dv], with as few axes as query, query's dtype; an axis B or H may be 1.
        attn_mask: bool, True = visible, or of query's dtype or float32, added to the scores; broadcast from the right
            to [B, H, Sq, Sk]. A mask that requires a gradient gets one. Default None.
        dropout_p: must be 0, the default.
        is_causal: row i sees the keys j <= i, counted from the upper left corner, whatever Sq and Sk are; not beside
            an attn_mask. (flash_dmattn_func counts from the lower right one.) Default False.
        scale: default D ** -0.5.
        enable_gqa: key and value may have fewer heads, of which each serves H / Hkv heads of query. Default False.

    Returns:
        [B, H, Sq, Dv], a view of [B, Sq, H, Dv]. A row that sees no key is 0.

    Raises:
        TypeError, ValueError: an argument is wrong, or attn_mask is given beside is_causal.
        NotImplementedError: dropout_p is not 0, or no kernel of the tensors' device takes the problem.

    Examples:
        >>> import torch
        >>> from flash_dmattn import scaled_dot_product_attention
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> out = scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5)
        True
    """
    is_causal = flag_of(is_causal, "is_causal")
    _check(query, key, value, attn_mask, dropout_p)
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask is given and is_causal is True; as with PyTorch's function, give one of them")
    window, gqa = (-1, -1), flag_of(enable_gqa, "enable_gqa")
    if query.is_nested:
        q, k, v, mask = query, key, value, attn_mask
        if is_causal and not (key.is_nested and _offsets(query) is _offsets(key)):
            raise ValueError("is_causal is True, but query and key are nested tensors with offsets of their own")
    else:
        q, k, v, mask = _broadcast((query, key, value), attn_mask, gqa)
        rows, keys = q.shape[2], k.shape[2]
        if is_causal and keys > rows:  # nobody sees the rest
            k, v = k[:, :, :rows], v[:, :, :rows]
        elif is_causal and rows > keys:  # the library's own causal mask ends at the last row
            is_causal, window = False, (-1, rows - keys)
    kinds = (mask, None) if mask is None or mask.dtype is torch.bool else (None, mask)
    visible, bias = kinds
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out = _torch.flash_dmattn_func(q, k, v, visible, bias, scale, is_causal, window_size=window).transpose(1, 2)
    axes = max(each.dim() for each in (query, key, value))
    return out if axes == 4 else out[(0,) * (4 - axes)]
