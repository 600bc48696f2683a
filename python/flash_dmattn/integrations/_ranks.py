"""transformers over several ranks: each has some rows of a sequence, and attention layers look across all of them."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ..context_parallel import ContextParallel

_ATTRIBUTE = "_flash_dmattn_ranks"
_IGNORED_LABEL = -100


class _Ranks:
    """What an attention layer holds; a copy of the model holds the same, and a saved one holds none."""

    def __init__(self, cp: Optional[ContextParallel]) -> None:
        self.cp = cp

    def __deepcopy__(self, memo: Any) -> _Ranks:
        return self

    def __reduce__(self) -> Any:
        return _Ranks, (None,)


class _Active(threading.local):
    """The ranks of the model that is running on this thread."""

    cp: Optional[ContextParallel] = None
    depth = 0


_active = _Active()


def is_active() -> bool:
    return _active.cp is not None


# ---- masks -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RanksMask:
    """What a model's mask means for all rows of a sequence. It stands where transformers has a tensor."""

    causal: bool = False
    left: int = -1
    right: int = -1

    def beside(self, other: RanksMask) -> RanksMask:
        def least(one: int, two: int) -> int:
            return max(one, two) if one < 0 or two < 0 else min(one, two)

        return RanksMask(self.causal or other.causal, least(self.left, other.left), least(self.right, other.right))


def _meaning(function: Any) -> RanksMask:
    """Of a mask function of transformers', which counts the rank's rows; any other is refused.

    transformers takes a rank's positions, which jump from one range to the next, for those of packed sequences. What it
    makes of them is left out here: whoever packs sequences gives cu_seq_lens_q."""
    name = getattr(function, "__qualname__", "")
    cells = getattr(function, "__closure__", None) or ()
    values = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells))) if cells else {}
    if getattr(function, "__module__", "") == "transformers.masking_utils":
        if name == "causal_mask_function":
            return RanksMask(causal=True)
        if name in ("bidirectional_mask_function", "packed_sequence_mask_function.<locals>.inner_mask"):
            return RanksMask()
        if name == "sliding_window_overlay.<locals>.inner_mask":
            return RanksMask(left=values["sliding_window"] - 1)
        if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return RanksMask(left=values["sliding_window"], right=values["sliding_window"])
        if name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
            return _meaning(values["mask_function"])
        if name == "and_masks.<locals>.and_mask":
            made = RanksMask()
            for each in values["mask_functions"]:
                made = made.beside(_meaning(each))
            return made
    raise NotImplementedError(
        f"the model's mask is {name or function}; over several ranks a mask is causal or full, with or without a sliding "
        "window"
    )


def ranks_mask(mask_function: Any, attention_mask: Optional[Tensor]) -> RanksMask:
    """What transformers' mask functions are told, while a model runs over several ranks."""
    _refuse_padding(attention_mask)
    return RanksMask(causal=True) if mask_function is None else _meaning(mask_function)


def _refuse_padding(attention_mask: Any) -> None:
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or not bool(attention_mask.all()):
        raise NotImplementedError(
            "attention_mask is given; over several ranks a sequence has no padding, and packed sequences are given by "
            "cu_seq_lens_q"
        )


# ---- attention -------------------------------------------------------------------------------------------------------


def ranks_of(module: Any) -> Optional[ContextParallel]:
    held = getattr(module, _ATTRIBUTE, None)
    return None if held is None else held.cp


def attention_over_ranks(
    cp: ContextParallel,
    module: Any,
    tensors: Tuple[Tensor, Tensor, Tensor],
    mask: Any,
    beside: Dict[str, Any],
    layer: Dict[str, Any],
) -> Tensor:
    """tensors: [B, heads, rows, D]. beside: what is refused where it is not None. layer: the attention function's own
    is_causal, scaling, softcap, s_aux, key_intervals and cu_seq_lens_q."""
    for name, value in beside.items():
        if value is not None:
            raise NotImplementedError(f"{name} is given; over several ranks models run without it")
    if mask is not None and not isinstance(mask, RanksMask):
        raise NotImplementedError("attention_mask is a tensor; over several ranks a mask is causal or full, with or without a window")
    causal = layer["is_causal"] if layer["is_causal"] is not None else getattr(module, "is_causal", True)
    meant = RanksMask(causal=bool(causal)) if mask is None else mask
    q, k, v = (each.transpose(1, 2) for each in tensors)
    options: Dict[str, Any] = {
        "softmax_scale": layer["scaling"],
        "softcap": layer["softcap"],
        "is_causal": meant.causal,
        "window_size": (meant.left, meant.right),
        "key_intervals": layer["key_intervals"],
        "sink": layer["s_aux"],
    }
    offsets = layer["cu_seq_lens_q"]
    if offsets is None:
        out: Tensor = cp.flash_dmattn_func(q, k, v, **options)
        return out
    if q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is given for a batch of {q.shape[0]}; packed sequences are a batch of one")
    packed: Tensor = cp.flash_dmattn_varlen_func(q[0], k[0], v[0], offsets, offsets, **options)
    return packed[None]


# ---- models ----------------------------------------------------------------------------------------------------------


def _parameters(module: Any) -> List[str]:
    return list(inspect.signature(module.forward).parameters)


def _checked_arguments(module: Any, cp: ContextParallel, keywords: Dict[str, Any]) -> Dict[str, Any]:
    """The keywords of a model's forward, with positions of the rank's rows."""
    taken, made = _parameters(module), dict(keywords)
    _refuse_padding(made.pop("attention_mask", None))
    if made.get("past_key_values") is not None:
        raise NotImplementedError("past_key_values are given; over several ranks a model runs without a cache")
    if "use_cache" in taken:
        made["use_cache"] = False
    tokens = next((made[name] for name in ("input_ids", "inputs_embeds") if made.get(name) is not None), None)
    rows = cp.layout.rows(cp.rank)
    if tokens is not None and tokens.shape[1] != rows:
        raise ValueError(f"the input has {tokens.shape[1]} tokens; the layout gives this rank {rows}")
    if "position_ids" not in taken:
        raise NotImplementedError(f"{type(module).__name__} takes no position_ids, so that it cannot know where its rows are")
    device = next(module.parameters()).device if tokens is None else tokens.device
    own = cp.positions(device)[None]
    given = made.get("position_ids")
    packed = made.get("cu_seq_lens_q") is not None or made.get("key_intervals") is not None
    if given is None:
        made["position_ids"] = own
    elif not packed and not torch.equal(given, own.expand_as(given)):
        raise ValueError("position_ids are not the layout's; packed sequences are given by cu_seq_lens_q beside them")
    return made


def _before(cp: ContextParallel) -> Callable[..., Any]:
    def enter(module: Any, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Any:
        if _active.depth == 0:
            if len(arguments) > 1:
                raise TypeError("over several ranks a model takes its tokens by position and all else by name")
            named = dict(zip(_parameters(module), arguments))
            keywords = _checked_arguments(module, cp, {**keywords, **named})
            arguments = ()
        _active.depth += 1
        _active.cp = cp
        return arguments, keywords

    return enter


def _after(module: Any, arguments: Any, output: Any) -> None:
    _active.depth = max(0, _active.depth - 1)
    if _active.depth == 0:
        _active.cp = None


def enable_context_parallel(model: Any, cp: ContextParallel) -> None:
    """Makes attention layers of a model look across the ranks of `cp`. Each rank then gives the model its rows.

    The model's forward gets tokens [B, rows of this rank]. Positions are the layout's. Causal and full masks and sliding
    windows count positions of the whole sequence; `cu_seq_lens_q`, int32 [n + 1] of all ranks' rows, beside position_ids
    makes it packed sequences. Padding, caches and other masks are refused. `rank_inputs` deals out tokens and labels.

    Args:
        model: a PreTrainedModel with attn_implementation="dmattn".
        cp: the ranks. A model has one: enabling another replaces it.

    Returns:
        Nothing.

    Raises:
        TypeError: cp is no ContextParallel.
        ValueError: the model has another attention implementation.

    Examples:
        >>> from flash_dmattn.integrations.transformers import enable_context_parallel, rank_inputs
        >>> def train(model, cp, tokens):  # in each process; the losses of ranks are summed
        ...     enable_context_parallel(model, cp)
        ...     return model(**rank_inputs(cp, tokens, tokens)).loss
    """
    from transformers import PreTrainedModel

    from .transformers import NAMES

    if not isinstance(cp, ContextParallel):
        raise TypeError(f"cp is a {type(cp).__name__}; it must be a ContextParallel")
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if chosen not in NAMES:
        raise ValueError(f'the model has attn_implementation="{chosen}"; over several ranks it is "dmattn"')
    for handle in getattr(model, "_flash_dmattn_hooks", ()):
        handle.remove()
    hooks = []
    for module in model.modules():
        setattr(module, _ATTRIBUTE, _Ranks(cp))
        if isinstance(module, PreTrainedModel):
            hooks.append(module.register_forward_pre_hook(_before(cp), with_kwargs=True))
            hooks.append(module.register_forward_hook(_after, always_call=True))
    model._flash_dmattn_hooks = hooks


def rank_inputs(cp: ContextParallel, input_ids: Tensor, labels: Optional[Tensor] = None) -> Dict[str, Any]:
    """A rank's part of a batch, as keywords of a language model. Labels are shifted before they are dealt out.

    The model's loss is then the rank's part of the mean over all tokens: the sum over ranks is the loss of one rank, and
    so are summed gradients of parameters.

    Args:
        cp: the ranks.
        input_ids: integers [B, S], the whole batch, the same on every rank.
        labels: [B, S], -100 where a token does not count, not yet shifted: most often input_ids. Default None.

    Returns:
        input_ids, and with labels also labels, shift_labels [B, rows of this rank] and num_items_in_batch.

    Raises:
        ValueError: S is not the layout's.

    Examples:
        >>> from flash_dmattn.integrations.transformers import rank_inputs
        >>> def part(cp, tokens):
        ...     return rank_inputs(cp, tokens, tokens)["shift_labels"]
    """
    made: Dict[str, Any] = {"input_ids": cp.layout.shard(input_ids, 1, cp.rank).contiguous()}
    if labels is not None:
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED_LABEL)
        made["shift_labels"] = cp.layout.shard(shifted, 1, cp.rank).contiguous()
        made["labels"] = made["shift_labels"]
        made["num_items_in_batch"] = (shifted != _IGNORED_LABEL).sum()
    return made
