"""Attention on JAX arrays through XLA's foreign function interface: under jit, grad, vmap and shard_map.

    from flash_dmattn.jax import attention
    out = attention(q, k, v, is_causal=True)                 # [B, S, H, D]
    gradients = jax.grad(lambda q: attention(q, k, v).sum())(q)

Arrays are float32, float16 or bfloat16, and on the CPU float64 too.
`pip install flash-dmattn[jax]` brings JAX.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
except ImportError as error:
    raise ImportError("flash_dmattn.jax needs JAX: pip install flash-dmattn[jax]") from error

from . import _native
from ._arguments import (
    NO_WINDOW,
    Settings,
    bias_with_four_axes,
    check_axes,
    dense_extents,
    interval_pair,
    mask_with_four_axes,
    refuse_causal_prefixes,
    row_masks,
    settings_of,
)

__all__ = ["attention"]

for _target, _platform, _handler in _native.xla_handlers():
    jax.ffi.register_ffi_target(_target, _handler, platform=_platform)

_INPUTS, _RESULTS, _ = _native.attention_fields()
_FLOWING = [name for *_, name in _RESULTS if name]
_GRADIENTS = [name for *_, name in _INPUTS if name]
# The position of every tensor of a call, in the order of native_fields.h.
_PLACES = {name: n for n, name in enumerate([*(row[0] for row in (*_INPUTS, *_RESULTS)), *_FLOWING, *_GRADIENTS])}

Arrays = Dict[str, Any]


def _manual_axes(array: Any) -> FrozenSet[str]:
    """The axes of shard_map()'s mesh along which an array differs between devices."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def _varying(array: Any, axes: FrozenSet[str]) -> Any:
    """The array as one that differs along these axes."""
    missing = tuple(axes - _manual_axes(array))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _call(target: str, settings: Settings, given: Arrays, results: Dict[str, jax.ShapeDtypeStruct]) -> Arrays:
    """One custom call: arrays by name, and the results' shapes by name."""
    axes = frozenset().union(*map(_manual_axes, given.values()))
    places = np.array([_PLACES[name] for name in (*given, *results)], np.int64)
    run = jax.ffi.ffi_call(target, list(results.values()), vmap_method=_vmap_method(given))
    # NaN: the default scale.
    numbers = np.array([math.nan if value is None else value for value in settings], np.float64)
    made = run(*given.values(), places=places, settings=numbers)
    return {name: _varying(each, axes) for name, each in zip(results, made)}


def _vmap_method(given: Arrays) -> str:
    """Whether an axis that vmap() puts in front can become a part of the batch: all arrays must have the batch's own
    extent. Sinks have no batch axis, and a mask or bias may broadcast over the batch."""
    batch = given["q"].shape[0]
    folds = "sink" not in given and all(array.shape[0] == batch for array in given.values())
    return "broadcast_all" if folds else "sequential"


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _run_forward(settings: Settings, given: Arrays) -> Arrays:
    """out, lse and, beside a bias, lse_low."""
    q, v = given["q"], given["v"]
    precision = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), precision)
    results = {"out": jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype), "lse": rows}
    if "bias" in given:
        results["lse_low"] = rows
    return _call("flash_dmattn_forward", settings, given, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(settings: Settings, wants_lse: bool, given: Arrays) -> Any:
    made = _run_forward(settings, given)
    return (made["out"], made["lse"]) if wants_lse else made["out"]


def _attend_forward(settings: Settings, wants_lse: bool, given: Arrays) -> Tuple[Any, Any]:
    made = _run_forward(settings, given)
    return (made["out"], made["lse"]) if wants_lse else made["out"], (given, made)


def _attend_backward(settings: Settings, wants_lse: bool, saved: Tuple[Arrays, Arrays], flowing: Any) -> Tuple[Arrays]:
    given, made = saved
    dout, dlse = flowing if wants_lse else (flowing, None)
    read = {**given, **made, "dout": dout, **({"dlse": dlse} if wants_lse else {})}
    named = {row[0]: row[-1] for row in _INPUTS if row[-1] and row[0] in given}
    gradients = _call("flash_dmattn_backward", settings, read, {named[name]: _like(given[name]) for name in named})

    def gradient_of(name: str) -> Any:
        if name not in named:
            return None  # what is no number has none
        made = gradients[named[name]]
        # shard_map(): what is the same on some devices has the sum of their gradients.
        shared = tuple(_manual_axes(made) - _manual_axes(given[name]))
        return jax.lax.psum(made, shared) if shared else made

    return ({name: gradient_of(name) for name in given},)


_attend.defvjp(_attend_forward, _attend_backward)


def _with_heads_of_all(*arrays: Any) -> List[Any]:
    """[B, h, Sk], of as many heads as the one with most: groups of heads share one of the others."""
    most = max(array.shape[1] for array in arrays)
    return [jnp.repeat(array, most // array.shape[1], 1) for array in arrays]


def _joined(
    key_intervals: Any, window_size: Any, document_ids: Any, prefix_lengths: Any, is_causal: bool, rows: int, keys: int
) -> Tuple[Any, Any]:
    """As _key_rules.joined(), by JAX's own operations: XLA makes them a part of the program."""
    has_windows = getattr(window_size, "ndim", 0) == 2
    if document_ids is None and prefix_lengths is None and not has_windows:
        return key_intervals, window_size
    refuse_causal_prefixes(prefix_lengths, is_causal)
    place = jnp.arange(keys, dtype=jnp.int32) - (keys - rows)  # the row that lies beside each key
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    start, end = jnp.full((1, 1, keys), low, jnp.int32), jnp.full((1, 1, keys), high, jnp.int32)
    if document_ids is not None:
        ids = jnp.asarray(document_ids)
        if ids.ndim != 2 or ids.shape[1] != keys or rows != keys:
            raise ValueError(f"document_ids has shape {list(ids.shape)}; it must be [B or 1, S] with Sq = Sk = S")
        bounds = [jax.vmap(lambda each, side=side: jnp.searchsorted(each, each, side))(ids) for side in ("left", "right")]
        start, end = (bound.astype(jnp.int32)[:, None] for bound in bounds)
    if prefix_lengths is not None:
        lengths = jnp.asarray(prefix_lengths)
        if lengths.ndim != 1:
            raise ValueError(f"prefix_lengths has shape {list(lengths.shape)}; it must be [B or 1]")
        inside = jnp.arange(keys) < lengths[:, None, None]
        start = jnp.maximum(start, jnp.where(inside, low, place))
    if has_windows:
        windows, window_size = jnp.asarray(window_size, jnp.int32), NO_WINDOW
        if windows.shape[1] != 2:
            raise ValueError(f"window_size has shape {list(windows.shape)}; it must be [heads, 2]")
        # Past either length a side hides nothing, and sums fit.
        left, right = (jnp.minimum(windows[:, n, None], rows + keys) for n in range(2))
        start = jnp.maximum(start, jnp.where(right < 0, low, place - right))
        end = jnp.minimum(end, jnp.where(left < 0, high, place + left + 1))
    if key_intervals is not None:
        pair = interval_pair(key_intervals, None)
        start, end, first, last = _with_heads_of_all(start, end, jnp.asarray(pair[0]), jnp.asarray(pair[1]))
        start, end = jnp.maximum(start, first), jnp.minimum(end, last)
    return jnp.broadcast_arrays(start, end), window_size


def attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    attn_bias: Any = None,
    softmax_scale: Optional[float] = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    *,
    window_size: Any = NO_WINDOW,
    key_intervals: Optional[Tuple[Any, Any]] = None,
    row_intervals: Optional[Tuple[Any, Any]] = None,
    block_mask: Any = None,
    document_ids: Any = None,
    prefix_lengths: Any = None,
    sink: Any = None,
    return_lse: bool = False,
) -> Any:
    """softmax(q k^T softmax_scale + attn_bias) v over the keys that each row sees, on JAX arrays.

    Args:
        q: [B, Sq, H, D], float32, float16, bfloat16 or, on the CPU, float64.
        k, v: [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv], q's dtype; H is a multiple of Hkv.
        attn_mask: bool [B|1, h, Sq|1, Sk|1], h of 1, Hkv or H; True: the row sees the key. Also [B, h, Sk], and
            [B, Sk] for padding. Default None.
        attn_bias: added to the scores; [B|1, h, Sq|1, Sk|1] or [B, h, Sk]. Default None.
        softmax_scale: default D ** -0.5.
        is_causal: row i sees keys j <= i + Sk - Sq. Default False.
        softcap: above 0: scores become softcap * tanh(score / softcap), before the bias. Default 0.
        deterministic: gradients have the same bits every time. The CPU's always have. Default False.
        window_size: (left, right): keys from i + Sk - Sq - left to i + Sk - Sq + right; None or -1: no limit, the
            default. Or int32 [H|Hkv, 2]: that of each head.
        key_intervals: (start, end), int32 [B, h, Sk]: key j is seen by rows start <= i < end. Default None.
        row_intervals: (start, end), int32 [B|1, h, n, Sq], n from 1 to 4: row i sees the keys start <= j < end of each
            of its n ranges. On the CPU only. Default None.
        block_mask: bool [B|1, h, ceil(Sq / b), ceil(Sk / b)], b 64 or 128: True: the rows and keys of the block see
            each other. On the CPU only. Default None.
        document_ids: int32 [B|1, S], rising along S, Sq = Sk = S: rows see the keys of their own document. Default None.
        prefix_lengths: int32 [B|1]: rows see the keys below it, and the others causally, without is_causal. Default None.
        sink: [H] or [n, H]: logits that join the sum of each row of their head. Default None.
        return_lse: also return the logarithm of each row's sum, [B, H, Sq] float32 (float64 for float64 arrays). Default
            False.

    Returns:
        out [B, Sq, H, Dv] of q's dtype, or (out, lse). Differentiable with regard to q, k, v, attn_bias and sink, also
        through lse. vmap() folds its axis into the batch where every array has the batch's own extent, and runs the
        calls one after the other where a mask or bias broadcasts over the batch, or beside sinks. Under jit() on
        several devices, use shard_map() over batch or heads.

    Raises:
        TypeError, ValueError: about shapes and dtypes, while tracing.
        jax.errors.JaxRuntimeError: the library's sentence about what it does not take, when the result is awaited.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from flash_dmattn.jax import attention
        >>> q, k, v = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 1, 8)), jnp.ones((1, 4, 1, 8))
        >>> jax.jit(lambda q: attention(q, k, v, is_causal=True))(q).shape
        (1, 4, 2, 8)
        >>> dv = jax.grad(lambda v: attention(q, k, v, is_causal=True).sum())(v)
        >>> [round(float(each), 2) for each in dv[0, :, 0, 0]]  # how often each key was read, by two heads
        [4.17, 2.17, 1.17, 0.5]
    """
    given: Arrays = {"q": jnp.asarray(q), "k": jnp.asarray(k), "v": jnp.asarray(v)}
    check_axes(tuple(given.values()), tuple(given), 4)
    for name, array in given.items():
        if array.dtype != given["q"].dtype:
            raise TypeError(f"{name} is {array.dtype} and q is {given['q'].dtype}; they must be the same")
    extents = dense_extents(given["q"].shape, given["k"].shape)
    if attn_mask is not None:
        given["mask"] = jnp.asarray(mask_with_four_axes(attn_mask, extents))
    if attn_bias is not None:
        given["bias"] = jnp.asarray(bias_with_four_axes(attn_bias, extents))
    key_intervals, window_size = _joined(
        key_intervals, window_size, document_ids, prefix_lengths, is_causal, given["q"].shape[1], given["k"].shape[1]
    )
    if key_intervals is not None:
        start, end = interval_pair(key_intervals, given["q"])
        given |= {"interval_start": jnp.asarray(start, jnp.int32), "interval_end": jnp.asarray(end, jnp.int32)}
    start, end, blocks = row_masks(row_intervals, block_mask)
    if row_intervals is not None:
        given |= {"row_start": jnp.asarray(start, jnp.int32), "row_end": jnp.asarray(end, jnp.int32)}
    if blocks is not None:
        given["block_mask"] = jnp.asarray(blocks)
    if sink is not None:
        given["sink"] = jnp.asarray(sink)
    settings = settings_of(softmax_scale, None, is_causal, softcap, deterministic, window_size)
    return _attend(settings, bool(return_lse), given)
