"""Hugging Face transformers: `import flash_dmattn.integrations.transformers` registers "dmattn".

    import flash_dmattn.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dmattn")

"flash_dmattn" is an alias. transformers takes every name with "flash" in it for a FlashAttention kernel: models that
list the kernels they are compatible with replace the name, chunked attention refuses long sequences. Write "dmattn".
Continuous batching takes the same names; "paged|dmattn" is what it is called in transformers 5.17.

Without padding a causal mask is a CausalMask: a tensor that stores nothing until a model computes with it. The attention
function recognises it and runs causal attention over the keys that were written; a model that adds a bias of its own to
it gets the mask's real values. Under torch.compile and tracing masks are dense.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Tuple

import torch
import torch.distributed
import transformers.modeling_utils
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .._arguments import interval_pair
from .._torch import flash_dmattn_func, flash_dmattn_varlen_func

__all__ = ["CausalMask", "dmattn_mask", "enable_context_parallel", "flash_dmattn_attention_forward", "rank_inputs"]

NAMES = ("dmattn", "flash_dmattn")

if TYPE_CHECKING or torch.distributed.is_available():
    from . import _ranks
    from ._ranks import enable_context_parallel, rank_inputs
else:
    _ranks = None

    def enable_context_parallel(*arguments: Any, **keywords: Any) -> Any:
        raise ImportError("this PyTorch has no torch.distributed, which context parallelism needs")

    rank_inputs = enable_context_parallel

_aten = torch.ops.aten


# ---- masks -----------------------------------------------------------------------------------------------------------


class CausalMask(Tensor):
    """A bool mask [B, 1, Sq, Sk] that is stored once somebody computes with it.

    Key j is visible to row i when j <= i + offset. From then on its stored values count: whoever got them may have
    changed them.

    Args:
        shape: (B, 1, Sq, Sk).
        offset: the key that the first row is at.
        device: where the stored values would be.

    Raises:
        Nothing: transformers and `dmattn_mask` give it what it takes.

    Examples:
        >>> import torch
        >>> from flash_dmattn.integrations.transformers import CausalMask
        >>> mask = CausalMask((1, 1, 2, 4), 1, torch.device("cpu"))
        >>> mask.stored is None, (mask[0, 0] & True).int().tolist()
        (True, [[1, 1, 0, 0], [1, 1, 1, 0]])
    """

    offset: int
    stored: Optional[Tensor]

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: Tuple[int, int, int, int], offset: int, device: torch.device) -> CausalMask:
        strides = (0, shape[2] * shape[3], shape[3], 1)
        mask = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=torch.bool, device=device)
        mask.offset, mask.stored = offset, None
        return mask

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    def dense(self) -> Tensor:
        """The values, which the mask holds from then on.

        Returns:
            bool [B, 1, Sq, Sk]; the batch is an expanded axis.

        Raises:
            Nothing: a mask has values always.

        Examples:
            >>> import torch
            >>> from flash_dmattn.integrations.transformers import CausalMask
            >>> CausalMask((1, 1, 2, 2), 0, torch.device("cpu")).dense().int().tolist()
            [[[[1, 0], [1, 1]]]]
        """
        if self.stored is None:
            row = torch.arange(self.shape[2], device=self.device)[:, None] + self.offset
            visible = torch.arange(self.shape[3], device=self.device)[None, :] <= row
            self.stored = visible.expand(self.shape)  # the strides of __new__
        return self.stored

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        mask = arguments[0] if arguments else None
        if isinstance(mask, cls) and mask.stored is None and _is_a_copy(function, arguments, keywords):
            batch, heads, rows, keys = mask.shape
            return cls((batch, heads, rows, keys), mask.offset, keywords.get("device") or mask.device)
        return function(*tree_map_only(cls, cls.dense, arguments), **tree_map_only(cls, cls.dense, keywords))


def _is_a_copy(function: Any, arguments: Tuple[Any, ...], keywords: Any) -> bool:
    """What the operation gives of a mask has the same values: a view, a copy, here or on another device, or a slice that
    leaves nothing out: mask[:, :, :, :n] with n >= Sk."""
    if function in (_aten.detach.default, _aten.alias.default):
        return True
    if function in (_aten.clone.default, _aten._to_copy.default):
        same = keywords.get("dtype") in (None, torch.bool)
        return same and keywords.get("memory_format") in (None, torch.preserve_format)
    if function is not _aten.slice.Tensor:
        return False
    whole: Tuple[Any, ...] = (*arguments, *(0, None, None, 1)[len(arguments) - 1 :])
    mask, axis, first, last, step = whole
    return first in (None, 0) and (last is None or last >= mask.shape[axis]) and step == 1


def _needs_dense() -> bool:
    """Somebody records or transforms what happens to tensors."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def dmattn_mask(
    batch_size: int,
    q_length: Optional[int] = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    *,
    allow_is_causal_skip: bool = True,
    device: Any = "cpu",
    **options: Any,
) -> Optional[Tensor]:
    """The mask function transformers calls: as sdpa_mask, with a CausalMask where that leaves a causal mask out.

    The absence of a mask means different things in different places (upper-left causal over the first keys of a static
    cache, all keys, a sum with a bias that is yet to come), so a causal mask is never left out, but for a single row
    that sees every key.

    Args:
        batch_size: B.
        q_length, kv_length: Sq and Sk. Default None and 0, as transformers 4 gives cache_position instead.
        q_offset, kv_offset: the positions of the first row and the first key. Default 0.
        allow_is_causal_skip: a CausalMask may be returned, the default.
        device: where the mask is; default "cpu".
        options: what else sdpa_mask takes.

    Returns:
        A bool tensor [B, 1, Sq, Sk], a CausalMask of that shape, or None.

    Raises:
        TypeError: q_length is None and there is no cache_position. What sdpa_mask raises goes through.

    Examples:
        >>> from flash_dmattn.integrations.transformers import dmattn_mask
        >>> mask = dmattn_mask(1, 3, 3)
        >>> type(mask).__name__, tuple(mask.shape)
        ('CausalMask', (1, 1, 3, 3))
    """
    if _ranks is not None and _ranks.is_active():
        over_ranks: Any = _ranks.ranks_mask(options.get("mask_function"), options.get("attention_mask"))
        return over_ranks  # type: ignore[no-any-return]
    skip = allow_is_causal_skip and not _needs_dense()
    positions = options.get("cache_position")
    if positions is not None:
        # transformers 4: the positions of the rows instead of their first and their number.
        count: int = positions.shape[0]
        rows, q_length, device = {}, count, positions.device
    elif q_length is None:
        raise TypeError("q_length is None; it must be the number of rows where no cache_position is given")
    else:
        rows = {"q_length": q_length, "q_offset": q_offset, "device": device}
    call = functools.partial(
        sdpa_mask, batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, **rows, **options
    )
    mask = call(allow_is_causal_skip=skip)
    if mask is not None or not skip:
        return mask
    offset = int(q_offset if positions is None else positions[0]) - int(kv_offset)
    if q_length == 1 and offset + 1 >= kv_length:
        return None
    if offset < 0 or offset + q_length > kv_length:
        return call(allow_is_causal_skip=False)
    return CausalMask((batch_size, 1, q_length, kv_length), offset, torch.device(device))


# ---- attention -------------------------------------------------------------------------------------------------------


def _sum_of_biases(*terms: Any) -> Optional[Tensor]:
    """The sum of the biases that are there, in a dtype the library takes; the last argument is query's dtype."""
    *biases, dtype = terms
    present: List[Tensor] = [bias for bias in biases if bias is not None]
    if not present:
        return None
    total = functools.reduce(torch.add, present)
    return total if total.dtype in (dtype, torch.float32) else total.to(dtype)


def _first_keys(tensor: Any, axis: int, keys: int, count: int) -> Any:
    """The part of a tensor that belongs to the first `count` of `keys` keys, which lie along `axis`."""
    return tensor if tensor is None or tensor.shape[axis] != keys else tensor.narrow(axis, 0, count)


def refuse_probabilities(module: torch.nn.Module, output_attentions: Optional[bool]) -> None:
    """transformers asks for them by an argument or in a model's configuration, and would take nothing for an answer."""
    if output_attentions is None:
        output_attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    if output_attentions:
        raise NotImplementedError(
            'output_attentions is True, but attn_implementation="dmattn" makes no tensor of probabilities: use "eager"'
        )


def flash_dmattn_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    position_bias: Optional[Tensor] = None,
    attention_bias: Optional[Tensor] = None,
    key_intervals: Optional[Tuple[Tensor, Tensor]] = None,
    s_aux: Optional[Tensor] = None,
    cache: Any = None,
    sliding_window: Optional[int] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    max_length_q: Any = 0,
    max_length_k: Any = 0,
    output_attentions: Optional[bool] = None,
    **unused: Any,
) -> Tuple[Tensor, None]:
    """The attention function that transformers calls.

    Without a mask the module's is_causal decides, and causal means what it means in transformers: row i sees the keys
    j <= i, also where the cache holds more keys than there are rows; a single row sees every key.

    Args:
        module: the layer; its is_causal and configuration are asked.
        query, key, value: [B, H, Sq, D] and [B, Hkv, Sk, D]; dtypes as in flash_dmattn_func.
        attention_mask: bool (True = visible) or additive, [B|1, H|1, Sq|1, Sk], or None.
        dropout: must be 0, the default.
        scaling: as softmax_scale of flash_dmattn_func. Default None.
        is_causal: instead of the module's. Default None.
        softcap: as in flash_dmattn_func. Default None.
        position_bias, attention_bias: added to the scores; these and an additive mask may need gradients. Default None.
        key_intervals: as in flash_dmattn_func. Default None.
        s_aux: [H]: one sink logit per query head. Default None.
        cache: the paged cache of continuous batching, in which the keys are. Default None.
        sliding_window: how many keys a row of a paged cache sees; elsewhere the mask says so. Default None: what the
            cache keeps.
        cu_seq_lens_q, cu_seq_lens_k: without a mask: a batch of one holds packed sequences. Default None.
        max_length_q, max_length_k: the longest of them. Default 0.
        output_attentions: False, or None, the default: what the configuration says, which must not be True.
        unused: what else transformers gives: with a cache its lists, else not looked at.

    Returns:
        ([B, Sq, H, D], None).

    Raises:
        NotImplementedError: dropout or probabilities are asked for, or a mask, a bias, key intervals or attention that
            is not causal with a paged cache.
        TypeError, ValueError: as flash_dmattn_func.

    Examples:
        >>> import torch
        >>> from flash_dmattn.integrations.transformers import flash_dmattn_attention_forward
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
        >>> out, none = flash_dmattn_attention_forward(torch.nn.Module(), q, k, v, None)
        >>> out.shape, none
        (torch.Size([1, 4, 2, 8]), None)
    """
    if dropout:
        raise NotImplementedError(
            f"dropout is {dropout}; flash_dmattn has no dropout: set the model's attention_dropout to 0"
        )
    refuse_probabilities(module, output_attentions)
    if cache is not None:
        beside = (attention_mask, position_bias, attention_bias, key_intervals)
        if is_causal is False or any(each is not None for each in beside):
            raise NotImplementedError(
                "continuous batching with flash_dmattn is causal attention with sliding windows; this model gives a mask "
                "or a bias of its own, or is not causal: use \"paged|eager\""
            )
        lengths = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        lists = {**unused, **lengths, "max_length_q": max_length_q, "max_length_k": max_length_k}
        layer = (scaling, softcap, s_aux, sliding_window)
        return _paged.paged_attention(module, query, key, value, cache, lists, *layer), None
    ranks = None if _ranks is None else _ranks.ranks_of(module)
    if ranks is not None:
        of_layer = {"is_causal": is_causal, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        biases = {"position_bias": position_bias, "attention_bias": attention_bias}
        return _ranks.attention_over_ranks(
            ranks, module, (query, key, value), attention_mask, biases,
            {**of_layer, "key_intervals": key_intervals, "cu_seq_lens_q": cu_seq_lens_q},
        ), None
    rows, keys = query.shape[2], key.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal, offset = bool(causal) and attention_mask is None and rows > 1, 0
    if isinstance(attention_mask, CausalMask):
        if attention_mask.stored is None and tuple(attention_mask.shape[2:]) == (rows, keys):
            causal, offset, attention_mask = True, attention_mask.offset, None
        else:
            attention_mask = attention_mask.dense()
    visible = attention_mask if attention_mask is not None and attention_mask.dtype == torch.bool else None
    bias = _sum_of_biases(None if visible is not None else attention_mask, position_bias, attention_bias, query.dtype)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if attention_mask is None and cu_seq_lens_q is not None and bias is None and key_intervals is None:
        options: Any = {"softmax_scale": scaling, "is_causal": causal, "softcap": softcap, "sink": s_aux}
        packed: Any = (q[0], k[0], v[0], cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return flash_dmattn_varlen_func(*packed, **options)[None], None
    if causal and keys > rows + offset:
        # Nobody may see the rest. Without it the last row sees the last key, as the library's causal mask has it.
        count = rows + offset
        k, v, bias = k[:, :count], v[:, :count], _first_keys(bias, -1, keys, count)
        if key_intervals is not None:
            start, end = interval_pair(key_intervals, q)
            key_intervals = _first_keys(start, -1, keys, count), _first_keys(end, -1, keys, count)
    return flash_dmattn_func(
        q, k, v, visible, bias, scaling, causal, softcap, key_intervals=key_intervals, sink=s_aux
    ), None


# ---- registration ----------------------------------------------------------------------------------------------------


def _all_names() -> Tuple[str, ...]:
    return NAMES if _paged is None else (*NAMES, *_paged.NAMES)


def _not_for_ours(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load` fetches the FlashAttention kernel of a name; ours is none of them."""

    @functools.wraps(load)
    def load_kernel(implementation: Any, *arguments: Any, **keywords: Any) -> Any:
        return None if implementation in _all_names() else load(implementation, *arguments, **keywords)

    return load_kernel


@functools.lru_cache(maxsize=None)
def _computes_attention_itself(module: str) -> bool:
    """The source of a model's module has attention layers, and none asks transformers for the attention function."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return False
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return own is not None and "ALL_ATTENTION_FUNCTIONS" not in source and "AttentionInterface" not in source


def _refuse_others(choose: Callable[..., Any]) -> Callable[..., Any]:
    """`choose` settles a model's implementation. Models with attention of their own would add our bool masks as 0 and 1."""

    @functools.wraps(choose)
    def choose_implementation(self: Any, requested: Any, *arguments: Any, **keywords: Any) -> Any:
        if requested in _all_names() and _computes_attention_itself(type(self).__module__):
            raise ValueError(
                f'{type(self).__name__} computes attention itself and asks for no attention function, so '
                f'attn_implementation="{requested}" cannot serve it: use "eager"'
            )
        return choose(self, requested, *arguments, **keywords)

    return choose_implementation


try:
    from . import _continuous_batching
except ImportError:  # transformers 4
    _paged: Any = None
else:
    _paged = _continuous_batching
    _paged.register(flash_dmattn_attention_forward)
for _name in NAMES:
    AttentionInterface.register(_name, flash_dmattn_attention_forward)
    AttentionMaskInterface.register(_name, dmattn_mask)
_modeling: Any = transformers.modeling_utils
_modeling.PreTrainedModel.get_correct_attn_implementation = _refuse_others(
    _modeling.PreTrainedModel.get_correct_attn_implementation
)
if hasattr(_modeling, "lazy_import_flash_attention"):
    _modeling.lazy_import_flash_attention = _not_for_ours(_modeling.lazy_import_flash_attention)
