"""Hugging Face transformers: `import flash_dmattn.integrations.transformers` registers "flash_dmattn".

    import flash_dmattn.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_dmattn")

transformers takes every name with "flash" in it for a FlashAttention kernel: it would load one, and models that list
the kernels they are compatible with replace the name. The first is prevented here for this one name; for such models
the same function is registered as "dmattn" too.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple

import torch
import transformers.modeling_utils
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .._torch import flash_dmattn_func, flash_dmattn_varlen_func

NAMES = ("flash_dmattn", "dmattn")


def _sum_of_biases(*terms: Any) -> Optional[Tensor]:
    """The sum of the biases that are there, in a dtype the library takes; the last argument is query's dtype."""
    *biases, dtype = terms
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    total = sum(present[1:], present[0])
    return total if total.dtype in (dtype, torch.float32) else total.to(dtype)


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
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    **unused: Any,
) -> Tuple[Tensor, None]:
    """The attention function transformers calls: query, key, value [B, H|Hkv, S, D] -> ([B, Sq, H, D], None).

    attention_mask is bool (True = visible) or additive; position_bias and attention_bias are added to the scores, and
    all of them may need gradients. key_intervals as in flash_dmattn_func. s_aux: one sink logit per query head. Without
    a mask, cu_seq_lens_q and _k say that a batch of one holds packed sequences.
    """
    if dropout:
        raise NotImplementedError(
            f"dropout is {dropout}; flash_dmattn has no dropout: set the model's attention_dropout to 0"
        )
    if cache is not None:
        raise NotImplementedError(
            "a paged cache is given, but this version of flash_dmattn has no paged key-value cache"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    visible = attention_mask if attention_mask is not None and attention_mask.dtype == torch.bool else None
    bias = _sum_of_biases(None if visible is not None else attention_mask, position_bias, attention_bias, query.dtype)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if attention_mask is None and cu_seq_lens_q is not None and bias is None and key_intervals is None:
        packed = (q[0], k[0], v[0], cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        out, lse = flash_dmattn_varlen_func(*packed, scaling, is_causal, softcap, return_lse=True)
        out, lse = out[None], lse[None]
    else:
        is_causal = is_causal and attention_mask is None and query.shape[2] > 1
        out, lse = flash_dmattn_func(
            q, k, v, visible, bias, scaling, is_causal, softcap, key_intervals=key_intervals, return_lse=True
        )
    if s_aux is not None:
        # A sink adds exp(s_aux) to the denominator of every row and nothing to the numerator.
        kept = torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None]).transpose(1, 2)
        out = (out * kept[..., None]).to(out.dtype)
    return out, None


def _not_for_ours(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load` fetches the FlashAttention kernel of a name; ours is none of them."""

    @functools.wraps(load)
    def load_kernel(implementation: Any, *arguments: Any, **keywords: Any) -> Any:
        return None if implementation in NAMES else load(implementation, *arguments, **keywords)

    return load_kernel


for _name in NAMES:
    AttentionInterface.register(_name, flash_dmattn_attention_forward)
    AttentionMaskInterface.register(_name, sdpa_mask)
if hasattr(transformers.modeling_utils, "lazy_import_flash_attention"):
    transformers.modeling_utils.lazy_import_flash_attention = _not_for_ours(
        transformers.modeling_utils.lazy_import_flash_attention
    )
