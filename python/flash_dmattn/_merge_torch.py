"""merge() on PyTorch tensors: the operator flash_dmattn::merge, and its gradient in torch operations."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _native
from ._arguments import check_layout
from ._merge import NAMES, check_merge
from ._operators import define, differentiate, native_view, refuse_transforms, stream_of

Results = Tuple[Tensor, Tensor, Tensor]


def _new_results(*parts: Any) -> Results:
    """out, lse and lse_low, like those of the first part."""
    out1, lse1 = parts[:2]
    return out1.new_empty(out1.shape), lse1.new_empty(lse1.shape), lse1.new_empty(lse1.shape)


def _merge(*parts: Any) -> Results:
    results, packed = _new_results(*parts), parts[0].dim() == 3
    tensors = (each[None] if packed and each is not None else each for each in (*parts, *results))
    _native.merge(*map(native_view, tensors), stream_of(results[0]))
    return results


# ---- gradient --------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: Tuple[Optional[Tensor], ...], output: Results) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _row(rows: Tensor) -> Tensor:
    """[B, H, S] as [B, S, H, 1], [H, total] as [total, H, 1]."""
    return rows.transpose(-1, -2)[..., None]


def _backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor], _: Any) -> Tuple[Optional[Tensor], ...]:
    """With the share w = exp(lse_i - lse) of a part: dout_i = w dout, dlse_i = w (dlse + dout . (out_i - out)).

    Both logarithms are what they have rounded away longer."""
    *parts, out, lse, lse_low = ctx.saved_tensors
    grads: list[Optional[Tensor]] = [None] * len(NAMES)
    if dout is None and dlse is None:
        return tuple(grads)
    needs = ctx.needs_input_grad
    wide = lse.dtype
    for index in (NAMES.index("out1"), NAMES.index("out2")):
        part, rows, low = parts[index : index + 3]
        if not (needs[index] or needs[index + 1]):
            continue
        has_keys = ~rows.isinf()
        # The inner choice keeps inf - inf out of the gradient's own gradient.
        apart = (rows - lse) + ((0.0 if low is None else low) - lse_low)
        share = torch.where(has_keys, torch.exp(torch.where(has_keys, apart, 0.0)), 0.0)
        if needs[index] and dout is not None:
            grads[index] = (_row(share) * dout.to(wide)).to(part.dtype)
        if needs[index + 1]:
            inner = dlse if dlse is not None else torch.zeros_like(lse)
            if dout is not None:
                moved = torch.where(_row(has_keys), part.to(wide) - out.to(wide), 0.0)
                inner = inner + (dout.to(wide) * moved).sum(-1).transpose(-1, -2)
            # A row without keys has no gradient, whatever flows in.
            grads[index + 1] = torch.where(has_keys, share * inner, 0.0)
    return tuple(grads)


_DECLARED = ", ".join(f"{'Tensor?' if name.startswith('lse_low') else 'Tensor'} {name}" for name in NAMES)
define("merge", _DECLARED, _merge, _new_results, "(Tensor, Tensor, Tensor)")
differentiate("merge", _backward, _save)


def merge(parts: Sequence[Optional[Tensor]]) -> Results:
    """flash_dmattn.merge() of tensors in the order of NAMES: (out, lse, lse_low)."""
    out1: Any = parts[0]
    for tensor, name in zip(parts, NAMES):
        if tensor is None and name in ("lse_low1", "lse_low2"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor, as out1 is")
        check_layout(tensor, name)
        if tensor.device != out1.device:
            raise ValueError(f"{name} is on {tensor.device}, but out1 is on {out1.device}")
    check_merge(parts)
    refuse_transforms(parts)
    results: Results = torch.ops.flash_dmattn.merge(*parts)
    return results
