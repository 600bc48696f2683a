"""Attention on a KV cache of PyTorch's tensors: operators that write the cache, for eager and compiled code."""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _arguments, _cache, _native
from ._arguments import Settings, check_layout, refuse_negated, said
from ._cache import APPEND_NAMES, FORWARD_NAMES, Special, with_four_axes
from ._fields import NUMBERS
from ._operators import allocator_of, define, is_plain, native_view, refuse_transforms, stream_of

_NUM_FORWARD, _NUM_APPEND = len(FORWARD_NAMES), len(APPEND_NAMES)
_cache.is_compiling = torch.compiler.is_compiling


def _check(tensors: Sequence[Any], names: Sequence[str], needed: int) -> None:
    """Tensors on the CPU or a CUDA device, or a sentence; the first ones may not be None."""
    for tensor, name, place in zip(tensors, names, range(len(names))):
        if tensor is None and place >= needed:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {said(tensor)}; it must be a torch.Tensor, as {names[0]} is")
        check_layout(tensor, name)
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            raise NotImplementedError(f"{name} is on {tensor.device}; KV caches are on the CPU or a CUDA device")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, but calls on a KV cache are forward only: make them under torch.no_grad(), "
                "or use flash_dmattn_varlen_func on packed tensors"
            )
    refuse_transforms(tensors)


def _resolved(tensors: Sequence[Any], written: Sequence[Tuple[Any, str]]) -> Tuple[Any, ...]:
    """The tensors with their numbers in memory. A cache is too large to be copied, and what is written must be there.
    Compiled code cannot ask; there the dispatcher resolves them, or refuses."""
    if torch.compiler.is_compiling():
        return tuple(tensors)
    for tensor, name in written:
        if tensor is not None:
            refuse_negated(tensor, name)
    return tuple(each if each is None else each.resolve_neg() for each in tensors)


# ---- FLASH_DMATTN_CHECK_PAGES -----------------------------------------------------------------------------------------

# By the first word of `fault` of fdm_cache.
_FAULTS = {
    1: "sequence {sequence} has {value} keys after appending, more than the cache has room for",
    2: "block_table of sequence {sequence} holds page {value} in column {column}; the cache has {pages} pages",
    3: "cache_batch_idx of sequence {sequence} is {value}, which is no row",
    4: "page_start of sequence {sequence} is {value}; its list does not lie within block_table",
}


@functools.lru_cache(maxsize=None)
def _checks_pages() -> bool:
    name = "FLASH_DMATTN_CHECK_PAGES"
    value = next(value for each, _, value in _native.settings() if each == name)
    if value not in (None, "", "0", "1"):
        raise ValueError(f"{name} is '{value}'; it must be 0 or 1")
    return value == "1"


def _fault_beside(tensor: Tensor) -> Optional[Tensor]:
    """int32 [4] that a call on a CUDA device writes, where faults are asked for."""
    if not tensor.is_cuda or not _checks_pages() or torch.cuda.is_current_stream_capturing():
        return None
    return torch.zeros(4, dtype=torch.int32, device=tensor.device)


def refuse_fault(words: Sequence[int], pages: int) -> None:
    """ValueError where the four words of a call say that a list names what is not there."""
    kind, sequence, column, value = words
    if kind:
        raise ValueError(_FAULTS[kind].format(sequence=sequence, column=column, value=value, pages=pages))


# ---- attention -------------------------------------------------------------------------------------------------------


def _results(query: Tensor, value_cache: Tensor) -> Tuple[Tensor, Tensor]:
    wide = query.dtype is torch.float64
    rows = (query.shape[1], query.shape[0]) if query.dim() == 3 else (query.shape[0], query.shape[2], query.shape[1])
    out = query.new_empty((*query.shape[:-1], value_cache.shape[3]))
    return out, query.new_empty(rows, dtype=torch.float64 if wide else torch.float32)


def _run(tensors: Sequence[Any], numbers: Sequence[Any], out: Tensor, lse: Optional[Tensor]) -> None:
    fault = _fault_beside(out)
    views = map(native_view, (*tensors, out, lse, fault))
    on_cuda = (stream_of(out), allocator_of(out)) if out.is_cuda else ()
    _native.cache_forward(*views, *numbers, torch.get_num_threads(), _arguments.forced_family, *on_cuda)
    if fault is not None:
        refuse_fault(fault.tolist(), tensors[1].shape[0])


def _forward_operator(*arguments: Any) -> Tuple[Tensor, Tensor]:
    tensors, numbers = arguments[:_NUM_FORWARD], arguments[_NUM_FORWARD:]
    results = _results(tensors[0], tensors[2])
    _run(tensors, numbers, *results)
    return results


def _forward_fake(*arguments: Any) -> Tuple[Tensor, Tensor]:
    return _results(arguments[0], arguments[2])


def _declared(names: Sequence[str], written: Sequence[str], needed: int) -> str:
    marks = dict(zip(written, ("(a!)", "(b!)", "(c!)")))
    kinds = ("" if place < needed else "?" for place in range(len(names)))
    return ", ".join(f"Tensor{marks.get(name, '')}{kind} {name.replace(' ', '_')}" for name, kind in zip(names, kinds))


define(
    "forward_with_cache",
    f"{_declared(FORWARD_NAMES, FORWARD_NAMES[1:3], 3)}, {', '.join(text for text, _ in NUMBERS)}, "
    "bool rotary_interleaved, int invariance, int num_splits, int split_keys",
    _forward_operator,
    _forward_fake,
    "(Tensor, Tensor)",
)


def forward(tensors: Sequence[Any], settings: Settings, special: Special, return_lse: bool, out: Any) -> Any:
    """flash_dmattn_with_kvcache_func() of tensors in the order of FORWARD_NAMES."""
    _check(tensors, FORWARD_NAMES, 3)
    tensors = with_four_axes(tensors, settings)
    if out is not None:
        _check((out,), ("out",), 1)
    tensors = _resolved(tensors, (*zip(tensors[1:3], FORWARD_NAMES[1:3]), (out, "out")))
    if out is None and not is_plain(*tensors):
        out, lse = torch.ops.flash_dmattn.forward_with_cache(*tensors, *settings, *special)
        return (out, lse) if return_lse else out
    result, lse = _results(tensors[0], tensors[2])
    result = result if out is None else out
    _run(tensors, (*settings, *special), result, lse if return_lse else None)
    return (result, lse) if return_lse else result


# ---- appending -------------------------------------------------------------------------------------------------------


def _append_operator(*arguments: Any) -> None:
    fault = _fault_beside(arguments[0])
    _native.cache_append(*map(native_view, (*arguments[:-1], fault)), arguments[-1], stream_of(arguments[0]))
    if fault is not None:
        refuse_fault(fault.tolist(), arguments[0].shape[0])


def _append_fake(*arguments: Any) -> None:
    return None


define(
    "cache_append",
    f"{_declared((*APPEND_NAMES, 'query_out'), ('key_cache', 'value_cache', 'query_out'), 2)}, bool rotary_interleaved",
    _append_operator,
    _append_fake,
    "()",
)


def append(tensors: Sequence[Any], interleaved: bool, query_out: Any) -> Any:
    """append_kv_cache() of tensors in the order of APPEND_NAMES."""
    _check(tensors, APPEND_NAMES, 2)
    if query_out is not None:
        _check((query_out,), ("query_out",), 1)
    tensors = _resolved(tensors, (*zip(tensors, APPEND_NAMES[:2]), (query_out, "query_out")))
    query = tensors[APPEND_NAMES.index("query")]
    result = torch.empty_like(query) if query is not None and query_out is None else query_out
    run = _append_operator if is_plain(*tensors, result) else torch.ops.flash_dmattn.cache_append
    run(*tensors, result, interleaved)
    return result
