"""Attention over a key-value cache: the one place where flash_attn_with_kvcache of every version ends."""

from __future__ import annotations

from typing import Any

from .._arguments import said
from ._refusals import InvalidArgument, Unsupported


def attend_to_cache(q: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
    """flash_attn_with_kvcache() of any version; `options` are its other arguments, by flash-attn's names.

    Caches have no kernels yet: a call is refused after the arguments that contradict each other are.
    """
    k, v, lengths = options.get("k"), options.get("v"), options.get("cache_seqlens")
    if (k is None) is not (v is None):
        raise InvalidArgument(f"{'v' if k is None else 'k'} is given without {'k' if k is None else 'v'}: give both")
    if k is not None and lengths is None:
        raise InvalidArgument(
            "k is given without cache_seqlens: appending needs to know where each sequence ends"
        )
    if any(getattr(each, "requires_grad", False) for each in (q, k_cache, v_cache, k, v)):
        raise Unsupported(
            "a tensor of flash_attn_with_kvcache requires a gradient, but cache calls are forward only: use "
            "flash_attn_varlen_func on packed tensors"
        )
    raise Unsupported(
        f"k_cache is {said(k_cache)}, but flash_dmattn has no key-value cache yet: give the keys in use to "
        "flash_attn_func, or packed to flash_attn_varlen_func"
    )
