"""What the CUDA benchmark measures against: PyTorch's back ends, FlexAttention, and, where they are installed, flash-attn
and cuDNN's flex_attention.

A peer is given the same tensors. What it needs in another form (a dense additive mask, a block mask, compiled code) is
made before the clock starts.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import masks

# A dense additive mask above this is not made, nor are more scores for the math back end, which keeps several copies.
DENSE_BYTES_MAX = 5 << 30
MATH_SCORES_MAX = 1.2e9


@dataclass
class Problem:
    """One call: q, k, v are [B, S, H, D]; bias and mask [B|1, h, Sq|1, Sk]; intervals (start, end) [B|1, h, Sk] of each
    key's rows. window is (left, right). row_ranges (first, end) [Sq] say everything that is hidden once more, as each
    row's keys."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool = False
    mask: Optional[torch.Tensor] = None
    bias: Optional[torch.Tensor] = None
    intervals: Optional[Tuple[torch.Tensor, torch.Tensor]] = None
    deterministic: bool = False
    window: Optional[Tuple[int, int]] = None
    row_ranges: Optional[Tuple[torch.Tensor, torch.Tensor]] = None

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    @property
    def keys(self) -> int:
        return self.k.shape[1]

    @property
    def is_plain(self) -> bool:
        return self.mask is None and self.bias is None and self.intervals is None and self.window is None

    @property
    def grouped(self) -> bool:
        return self.heads != self.k.shape[2]

    def heads_first(self) -> List[torch.Tensor]:
        return [tensor.transpose(1, 2) for tensor in (self.q, self.k, self.v)]


Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """missing() says why it is not on this machine, refuses(problem) why it does not take one; prepare(problem) gives
    the call, whose result is [B, Sq, H, D]; plan(problem) a call that makes what prepare() made of the mask."""

    missing: Callable[[], Optional[str]]
    refuses: Callable[[Problem], Optional[str]]
    prepare: Callable[[Problem], Call]
    plan: Optional[Callable[[Problem], Callable[[], object]]] = None


# ---- PyTorch's scaled_dot_product_attention --------------------------------------------------------------------------


def _additive_shape(p: Problem) -> Tuple[int, int, int, int]:
    """Of bias, mask, intervals, window and causal as one tensor; the heads are 1 or all of the query's."""
    parts = [each for each in (p.bias, p.mask) if each is not None] + ([p.intervals[0]] if p.intervals else [])
    heads = 1 if all(part.shape[1] == 1 for part in parts) else p.heads
    return max((part.shape[0] for part in parts), default=1), heads, p.rows, p.keys


def _dense_mask(p: Problem) -> Optional[torch.Tensor]:
    """What PyTorch takes as attn_mask: nothing, the bias or mask itself, or all rules added up."""
    if p.is_plain:
        return None
    if p.intervals is None and not p.causal and p.window is None and (p.mask is None or p.bias is None):
        alone = p.mask if p.bias is None else p.bias
        if alone.dtype in (torch.bool, p.q.dtype) and alone.shape[1] in (1, p.heads):  # type: ignore[union-attr]
            return alone
    score = torch.zeros(_additive_shape(p), dtype=p.q.dtype, device=p.q.device)

    def wide(part: torch.Tensor) -> torch.Tensor:
        return part.repeat_interleave(score.shape[1] // part.shape[1], dim=1)

    hide = score.masked_fill_
    if p.bias is not None:
        score += wide(p.bias.detach())
    if p.mask is not None:
        hide(~wide(p.mask), -torch.inf)
    if p.causal:
        hide(~masks.intervals_to_mask(*masks.causal_intervals(p.rows, p.keys, device=p.q.device), p.rows), -torch.inf)
    if p.window is not None:
        pair = masks.window_intervals(p.rows, p.keys, p.window, device=p.q.device)
        hide(~masks.intervals_to_mask(*pair, p.rows), -torch.inf)
    if p.intervals is not None:
        for head in range(score.shape[1]):
            group = score.shape[1] // p.intervals[0].shape[1]
            start, end = (each[:, head // group] for each in p.intervals)
            score[:, head].masked_fill_(~masks.intervals_to_mask(start, end, p.rows), -torch.inf)
    return score


def _sdpa(backend: SDPBackend) -> Peer:
    def refuses(p: Problem) -> Optional[str]:
        if p.deterministic:
            return "it has no switch for a deterministic backward in one call"
        if backend is SDPBackend.FLASH_ATTENTION and not p.is_plain:
            return "it takes no mask and no bias"
        if backend is SDPBackend.MATH and p.q.shape[0] * p.heads * p.rows * p.keys > MATH_SCORES_MAX:
            return "its scores would not fit"
        if not p.is_plain:
            batch, heads, rows, keys = _additive_shape(p)
            if batch * heads * rows * keys * p.q.element_size() > DENSE_BYTES_MAX:
                return "its dense mask would not fit"
        if p.causal and p.is_plain and p.rows != p.keys:
            return "its causal mask is aligned to the first key"
        return None

    def prepare(p: Problem) -> Call:
        tensors, mask = p.heads_first(), _dense_mask(p)
        options = {"attn_mask": mask, "is_causal": p.causal and mask is None, "enable_gqa": p.grouped}

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*tensors, **options).transpose(1, 2)

        return call

    return Peer(lambda: None, refuses, prepare)


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


def _head_of(tensor: torch.Tensor, heads: int) -> Callable[[Any], Any]:
    """The head of a tensor with fewer heads that serves a query head."""
    group = heads // tensor.shape[1]
    return (lambda h: h) if group == 1 else (lambda h: h // group) if tensor.shape[1] > 1 else (lambda h: h * 0)


def flex_rules(p: Problem) -> Tuple[Optional[Callable[..., Any]], Optional[Callable[..., Any]]]:
    """(mask_mod, score_mod) that say what the problem says; None where nothing is to be said."""
    rules: List[Callable[..., Any]] = []
    shift = p.keys - p.rows
    if p.causal:
        rules.append(lambda b, h, i, j: j <= i + shift)
    if p.window is not None:
        left, right = p.window
        rules.append(lambda b, h, i, j: (i + shift - j <= left) & (j - i - shift <= right))
    if p.mask is not None:
        rules.append(_lookup(p.mask, p.heads))
    if p.intervals is not None:
        start, end = (_lookup(each[:, :, None], p.heads) for each in p.intervals)
        rules.append(lambda b, h, i, j: (start(b, h, i, j) <= i) & (i < end(b, h, i, j)))
    score_mod = None
    if p.bias is not None:
        added = _lookup(p.bias, p.heads)

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + added(b, h, i, j)

    if not rules:
        return None, score_mod

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        visible = rules[0](b, h, i, j)
        for rule in rules[1:]:
            visible = visible & rule(b, h, i, j)
        return visible

    return mask_mod, score_mod


def _lookup(tensor: torch.Tensor, heads: int) -> Callable[..., Any]:
    """tensor[b, h, i, j], with axes of extent 1 broadcast."""
    head = _head_of(tensor, heads)
    batch = (lambda b: b) if tensor.shape[0] > 1 else (lambda b: b * 0)
    row = (lambda i: i) if tensor.shape[2] > 1 else (lambda i: i * 0)
    return lambda b, h, i, j: tensor[batch(b), head(h), row(i), j]


def _flex_refuses(p: Problem) -> Optional[str]:
    return "it has no switch for a deterministic backward" if p.deterministic else None


def _flex_prepare(p: Problem) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    on_cuda = p.q.is_cuda
    torch._dynamo.reset()  # each problem is compiled for its own shapes, whatever was compiled before
    mask_mod, score_mod = flex_rules(p)
    block_mask = None
    if mask_mod is not None:
        parts = [each for each in (p.mask, p.intervals and p.intervals[0]) if each is not None]
        batch = p.q.shape[0] if any(part.shape[0] > 1 for part in parts) else None
        heads = p.heads if any(part.shape[1] > 1 for part in parts) else None
        # Compiled, it does not keep all scores' booleans at once.
        make = torch.compile(create_block_mask) if on_cuda else create_block_mask
        block_mask = make(mask_mod, batch, heads, p.rows, p.keys, p.q.device)
    attend = torch.compile(flex_attention, dynamic=False) if on_cuda else flex_attention
    tensors = p.heads_first()

    def call() -> torch.Tensor:
        out = attend(*tensors, score_mod=score_mod, block_mask=block_mask, enable_gqa=p.grouped)
        return out.transpose(1, 2)

    return call


# ---- cuDNN's flex_attention ------------------------------------------------------------------------------------------


def _is_missing(module: str) -> Callable[[], Optional[str]]:
    """missing() of a peer that is a module."""

    def missing() -> Optional[str]:
        try:
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        return None if found else f"{module} is not installed"

    return missing


def _cudnn_flex_refuses(p: Problem) -> Optional[str]:
    if p.deterministic:
        return "it has no switch for a deterministic backward"
    return None if p.row_ranges is not None else "it takes ranges of keys a row alone"


def _cudnn_flex_plan(p: Problem) -> Callable[[], Any]:
    module = importlib.import_module("cudnn.flex_attention")
    first, end = p.row_ranges  # type: ignore[misc]
    ranges = torch.stack([torch.zeros_like(first), first, end]).int()[None].repeat(1, 1, p.q.shape[0]).contiguous()
    return lambda: module.create_mask_plan(ranges, p.q, p.k, p.v)


def _cudnn_flex_prepare(p: Problem) -> Call:
    attend = importlib.import_module("cudnn.flex_attention").flex_attn_func
    plan = _cudnn_flex_plan(p)()

    def call() -> torch.Tensor:
        result = attend(p.q, p.k, p.v, mask_plan=plan)
        return result[0] if isinstance(result, (tuple, list)) else result

    return call


# ---- flash-attn ------------------------------------------------------------------------------------------------------


def _flash_attn(module: str) -> Peer:
    """flash_attn_func(q, k, v, causal=) of a module; it gives out, or a tuple with out first."""

    def refuses(p: Problem) -> Optional[str]:
        if p.deterministic:
            return "it is not asked for a deterministic backward here"
        if not p.is_plain:
            return "it takes no mask and no bias"
        return None if p.q.shape[-1] <= 256 else "its head dims end at 256"

    def prepare(p: Problem) -> Call:
        function = importlib.import_module(module).flash_attn_func

        def call() -> torch.Tensor:
            result = function(p.q, p.k, p.v, causal=p.causal)
            return result[0] if isinstance(result, (tuple, list)) else result

        return call

    return Peer(_is_missing(module), refuses, prepare)


PEERS: Dict[str, Peer] = {
    "torch flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "torch cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "torch efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "torch math": _sdpa(SDPBackend.MATH),
    "flex": Peer(lambda: None, _flex_refuses, _flex_prepare),
    "cudnn flex": Peer(_is_missing("cudnn.flex_attention"), _cudnn_flex_refuses, _cudnn_flex_prepare, _cudnn_flex_plan),
    "flash-attn 2": _flash_attn("flash_attn"),
    "flash-attn 3": _flash_attn("flash_attn_interface"),
    "flash-attn 4": _flash_attn("flash_attn.cute"),
    "our flash_attn": _flash_attn("flash_dmattn.compat.flash_attn.functions"),  # this library by flash-attn 2's name
}


def installed() -> List[str]:
    return [name for name, peer in PEERS.items() if peer.missing() is None]
