"""transformers' continuous batching: its paged cache, read and appended to where it lies.

`flash_dmattn.integrations.transformers` registers what is here. A step of continuous batching is one packed batch, whose
keys lie in pages that a manager gives out. It comes in one of two forms: lists of cache rows to read and to write, or,
when every request has one new token, a table of pages. transformers 5.17 gives the lists to functions whose name begins
with "paged|"; later versions give them to every function, and drop the prefix.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.generation.continuous_batching import continuous_api, initialization

from .._cache import flash_dmattn_with_kvcache_func
from .._torch import flash_dmattn_varlen_func

# What a model is switched to while it is batched, by the name that it was loaded with. These names have no mask
# function, so no mask of all rows and keys is built.
PAGED_NAMES = {"dmattn": "dmattn_paged", "flash_dmattn": "flash_dmattn_paged"}
NAMES = (*PAGED_NAMES.values(), *("paged|" + name for name in PAGED_NAMES))


class _Layer(NamedTuple):
    """What the cache knows of a layer."""

    group: int  # which list of rows, and which table
    kind: str  # "full_attention" or "sliding_attention"
    window: Optional[int]  # keys that a row sees, itself included; None: all
    pages: Optional[Tuple[Tensor, Tensor]]  # K and V, [pages, page size, Hkv, D]; None: they are a rolling buffer
    step: int = 1  # page numbers are multiples of it: between two pages of K lie V's, and those of other layers


def _layer_of(cache: Any, index: int) -> _Layer:
    allocators = getattr(cache, "layer_to_allocator", None)
    if allocators is not None:
        allocator = allocators[index]
        window = getattr(allocator, "sliding_window", None)
        if window is not None:
            return _Layer(allocator.index, allocator.layer_type, window, None)
        step = allocator.block_physical_stride // allocator.tokens_per_page
        return _Layer(allocator.index, allocator.layer_type, None, allocator.get_cache_for_block_table(index), step)
    group, place = cache.layer_index_to_group_indices[index]  # transformers 5.17
    if cache.sliding_windows[index] != 1:
        return _Layer(group, "sliding_attention", cache.sliding_windows[index], None)
    shape = (-1, cache.block_size, *cache.key_cache[place].shape[1:])
    return _Layer(group, "full_attention", None, (cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)))


def _of_kind(value: Any, kind: str) -> Any:
    """A dict has one entry for each kind of layer."""
    return value[kind] if isinstance(value, dict) else value


def _update(cache: Any, key: Tensor, value: Tensor, layer: int, lists: Dict[str, Any]) -> Tuple[Tensor, Tensor]:
    """The cache's own update: it writes the new keys, and gathers those that the lists name. [keys, Hkv, D]."""
    if hasattr(cache, "layer_to_allocator"):
        key, value = cache.update(key, value, layer, dict(lists))
        return key[0].transpose(0, 1), value[0].transpose(0, 1)
    gathered: Tuple[Tensor, Tensor] = cache.update(key, value, layer, lists["read_index"], lists["write_index"])
    return gathered


# torch.compile would copy the whole cache for every layer: the call writes into a view of it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    lists: Dict[str, Any],
    scaling: Optional[float],
    softcap: Optional[float],
    sink: Optional[Tensor],
    sliding_window: Optional[int],
) -> Tensor:
    """A step of continuous batching for one layer: appends the new keys, and attends to each request's.

    Args:
        module: the layer; its layer_idx is asked.
        query, key, value: [1, H, T, D] and [1, Hkv, T, D]: the new tokens of all requests, one behind the other.
        cache: the paged cache.
        lists: cu_seq_lens_q, cu_seq_lens_k, read_index, write_index, block_table and the longest lengths, as
            transformers gives them.
        scaling, softcap, sink, sliding_window: of the layer; None where it has none.

    Returns:
        [1, T, H, D].
    """
    index: int = module.layer_idx  # type: ignore[assignment]
    layer = _layer_of(cache, index)
    window = layer.window if sliding_window is None else sliding_window
    offsets, used = lists["cu_seq_lens_q"], _of_kind(lists["cu_seq_lens_k"], layer.kind)
    longest_q, longest_k = (
        int(_of_kind(lists.get("max_seqlen_" + each, lists.get("max_length_" + each, 0)), layer.kind)) for each in "qk"
    )
    options: Dict[str, Any] = {"softmax_scale": scaling, "is_causal": True, "softcap": softcap, "sink": sink}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    options["max_seqlen_q"] = longest_q
    table = lists.get("block_table")
    if table is not None:
        if layer.pages is None:
            raise NotImplementedError("block_table is given for a layer whose cache is a rolling buffer")
        lengths = used.diff() - 1  # before the new key; -1 for the requests that fill a batch up
        keys, values = (pages[:: layer.step] for pages in layer.pages)
        options.update(cache_seqlens=lengths, block_table=table[layer.group] // layer.step, cu_seqlens_new=offsets)
        out = flash_dmattn_with_kvcache_func(q, keys, values, k, v, cu_seqlens_q=offsets, **options)
        return out[None]
    options["max_seqlen_k"] = longest_k
    rows = lists["read_index"][layer.group]
    if layer.pages is None or rows.numel() == 0:
        keys, values = _update(cache, key, value, index, lists)
        return flash_dmattn_varlen_func(q, keys, values, offsets, used, **options)[None]
    _update(cache, key, value, index, {**lists, "read_index": [each[:0] for each in lists["read_index"]]})
    keys, values = (pages.flatten(0, 1).unsqueeze(1) for pages in layer.pages)  # pages of one key
    options.update(seqused_k=used.diff(), block_table=rows, page_start=used)
    out = flash_dmattn_with_kvcache_func(q, keys, values, cu_seqlens_q=offsets, **options)
    return out[None]


def _keep_ours(switch: Callable[..., None]) -> Callable[..., None]:
    """`switch` gives a model an attention that can be batched, and knows none but transformers' own."""

    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *arguments: Any, **keywords: Any) -> None:
        name = model.config._attn_implementation
        if name in PAGED_NAMES:
            model.set_attn_implementation(PAGED_NAMES[name])
            self._original_attn_impl = name
        elif name not in NAMES:
            switch(self, model, *arguments, **keywords)

    return switch_to_cb_friendly_attn


def _allow_tables(ensure: Callable[..., None]) -> Callable[..., None]:
    """`ensure` takes tables of pages away from whatever is not FlashAttention 2 or 3 on a device."""

    @functools.wraps(ensure)
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, *arguments: Any, **keywords: Any) -> None:
        if config._attn_implementation not in NAMES:
            ensure(config, cb_config, *arguments, **keywords)
            return
        # transformers 5.17 asks for the kinds of layers later.
        kinds_of = getattr(initialization, "group_layers_by_attn_type", lambda _: ())
        if "sliding_attention" in kinds_of(config):
            cb_config.max_blocks_per_request = 0

    return ensure_decode_fast_path_is_available


def _with_a_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for names without masks, by which no padded batch may be computed."""

    @functools.wraps(function)
    def paged_forward(module: torch.nn.Module, *arguments: Any, cache: Any = None, **keywords: Any) -> Any:
        if cache is None:
            raise ValueError(
                'no paged cache is given, so this is not continuous batching: load the model with attn_implementation="dmattn"'
            )
        return function(module, *arguments, cache=cache, **keywords)

    return paged_forward


def register(function: Callable[..., Any]) -> None:
    """Makes `function` what a batched model calls, and lets the manager take our names."""
    for name in NAMES:
        AttentionInterface.register(name, _with_a_cache(function))
    manager: Any = continuous_api.ContinuousBatchingManager
    manager.switch_to_cb_friendly_attn = _keep_ours(manager.switch_to_cb_friendly_attn)
    module: Any = initialization
    module.ensure_decode_fast_path_is_available = _allow_tables(module.ensure_decode_fast_path_is_available)
