"""Doge of Hugging Face transformers with its dynamic mask as key intervals, two integers a key.

    import flash_dmattn.integrations.doge as doge
    model = doge.use_key_intervals(AutoModelForCausalLM.from_pretrained(name))

With attn_implementation="dmattn" alone a Doge model computes as it is written: a dense bias [B, H, Sq, Sk] in every
layer, of which torch.topk keeps `keep_window_size` keys a row. Here each layer makes one bias a key and its intervals,
so memory is O(Sk) and keys that no row sees cost nothing. docs/transformers.md says where the two differ.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.doge.modeling_doge import DogeAttention, apply_rotary_pos_emb

from .. import masks
from .._torch import flash_dmattn_func
from .transformers import CausalMask, dmattn_mask, flash_dmattn_attention_forward, refuse_probabilities

__all__ = ["DogeIntervalAttention", "use_key_intervals"]

NAME = "dmattn_intervals"


def _mask(*arguments: Any, allow_is_causal_skip: bool = True, **options: Any) -> Optional[Tensor]:
    """Doge asks for a mask with values, for the layers that are replaced here; without padding these need none."""
    return dmattn_mask(*arguments, allow_is_causal_skip=True, **options)


AttentionInterface.register(NAME, flash_dmattn_attention_forward)
AttentionMaskInterface.register(NAME, _mask)


class DogeIntervalAttention(DogeAttention):
    """DogeAttention of transformers with the same parameters; `use_key_intervals` makes layers of a model such.

    Args:
        config, layer_idx: as DogeAttention takes them.

    Raises:
        NotImplementedError: in a call: attention_dropout in training, or probabilities are asked for.
        TypeError: in a call: a mask that is not bool.

    Examples:
        >>> from flash_dmattn.integrations.doge import DogeIntervalAttention
        >>> from transformers.models.doge.modeling_doge import DogeAttention
        >>> issubclass(DogeIntervalAttention, DogeAttention)
        True
    """

    exponential: bool

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Tuple[Tensor, Tensor],
        attention_mask: Optional[Tensor] = None,
        past_key_values: Any = None,
        output_attentions: Optional[bool] = None,
        **unused: Any,
    ) -> Tuple[Tensor, None]:
        if self.training and self.attention_dropout:
            raise NotImplementedError(
                f"attention_dropout is {self.attention_dropout}; flash_dmattn has no dropout: set it to 0"
            )
        refuse_probabilities(self, output_attentions)
        batch, rows, _ = hidden_states.shape
        shape = (batch, rows, -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))

        offset, attention_mask = self._place(attention_mask, rows, k.shape[1], past_key_values)
        k, v = k[:, : rows + offset], v[:, : rows + offset]  # nobody may see the rest of a static cache
        bias = masks.key_bias(self.dt_proj(v.flatten(2)), self.A, self.exponential)  # [B, Hkv, Sk]
        if attention_mask is not None:
            attention_mask = attention_mask[..., : k.shape[1]]
        real = None if attention_mask is None else attention_mask[:, 0].any(-2)
        intervals = masks.topk_intervals(bias, self.keep_window_size, rows, real)
        bias = bias[:, :, None]
        out = flash_dmattn_func(q, k, v, attention_mask, bias, self.scaling, is_causal=True, key_intervals=intervals)
        return self.o_proj(out.flatten(2)), None

    def _place(self, mask: Optional[Tensor], rows: int, keys: int, cache: Any) -> Tuple[int, Optional[Tensor]]:
        """Which key the first row is at, and a mask with values where there is padding."""
        if isinstance(mask, CausalMask) and mask.stored is None and tuple(mask.shape[2:]) == (rows, keys):
            return mask.offset, None
        if mask is None:
            return keys - rows, None
        if mask.dtype != torch.bool:
            raise TypeError(f"attention_mask is {mask.dtype}; key intervals need a bool mask")
        return int(cache.get_seq_length(self.layer_idx)) - rows if cache is not None else keys - rows, mask


def use_key_intervals(model: transformers.PreTrainedModel, exponential: bool = True) -> transformers.PreTrainedModel:
    """Makes every attention layer of a Doge model a DogeIntervalAttention, in place.

    Args:
        model: a model with DogeAttention layers, without a sliding window.
        exponential: the bias is exp(A softplus(dt)), as in Doge, the default; False: A softplus(dt), as in flash-dmattn
            since 1.2.1.

    Returns:
        The model.

    Raises:
        ValueError: the model has no DogeAttention, or has a sliding window.

    Examples:
        >>> from flash_dmattn.integrations.doge import use_key_intervals
        >>> from transformers import DogeConfig, DogeForCausalLM
        >>> config = DogeConfig(vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        ...                     num_attention_heads=2, num_key_value_heads=1)
        >>> model = use_key_intervals(DogeForCausalLM(config))
        >>> type(model.model.layers[0].self_attn).__name__
        'DogeIntervalAttention'
    """
    layers = [module for module in model.modules() if isinstance(module, DogeAttention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no DogeAttention; this is for Doge models")
    if getattr(model.config, "sliding_window", None) is not None:
        raise ValueError(
            f"sliding_window is {model.config.sliding_window}; a choice among the keys of a window has no key intervals: "
            'use attn_implementation="dmattn"'
        )
    model.set_attn_implementation(NAME)
    for layer in layers:
        layer.__class__ = DogeIntervalAttention
        setattr(layer, "exponential", exponential)
    return model
