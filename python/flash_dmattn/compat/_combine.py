"""flash_attn_combine of flash-attn 3 and 4: partial results of one attention, over parts of its keys, into one."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor


def combine(
    out_partial: Tensor, lse_partial: Tensor, out: Optional[Tensor], out_dtype: Optional[torch.dtype]
) -> Tuple[Tensor, Tensor]:
    """(out [..., Dv], lse [...]) of out_partial [n, ..., Dv] and lse_partial [n, ...], added up in the order of parts.

    An lse of -inf or +inf says that a part has no keys; where none has any, out is 0 and lse -inf.
    """
    lse_partial = lse_partial.masked_fill(lse_partial == torch.inf, -torch.inf)
    lse = lse_partial.logsumexp(0)
    share = torch.where(lse == -torch.inf, 0.0, (lse_partial - lse).exp())
    total = torch.zeros_like(out_partial[0], dtype=lse.dtype)
    for part, weight in zip(out_partial, share):
        # What a part without keys holds is not read.
        total += torch.where(weight[..., None] > 0, part * weight[..., None], 0.0)
    if out is not None:
        return out.copy_(total), lse
    return total.to(out_partial.dtype if out_dtype is None else out_dtype), lse
