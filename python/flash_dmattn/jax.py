"""Attention on JAX arrays through XLA's foreign function interface: under jit, grad, vmap and shard_map.

    from flash_dmattn.jax import attention
    out = attention(q, k, v, is_causal=True)                 # [B, S, H, D]
    gradients = jax.grad(lambda q: attention(q, k, v).sum())(q)

Arrays are float32, float16 or bfloat16, and on the CPU float64 too. The handlers for CUDA were never run on a device.
`pip install flash-dmattn[jax]` brings JAX.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, Optional, Sequence, Tuple

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


def _manual_axes(array: Any) -> frozenset:
    """The axes of shard_map()'s mesh along which an array differs between devices."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def _varying(array: Any, axes: frozenset) -> Any:
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
    window_size: Sequence[Optional[int]] = NO_WINDOW,
    key_intervals: Optional[Tuple[Any, Any]] = None,
    sink: Any = None,
    return_lse: bool = False,
) -> Any:
    """softmax(q k^T softmax_scale + attn_bias) v over the keys that each row sees, on JAX arrays.

    Args:
        q: [B, Sq, H, D]; k: [B, Sk, Hkv, D]; v: [B, Sk, Hkv, Dv], of one dtype; H is a multiple of Hkv.
        attn_mask: bool [B|1, h, Sq|1, Sk|1], h of 1, Hkv or H; True: the row sees the key. Also [B, h, Sk], and
            [B, Sk] for padding.
        attn_bias: added to the scores; [B|1, h, Sq|1, Sk|1] or [B, h, Sk].
        softmax_scale: default D^-0.5.
        is_causal: row i sees keys j <= i + Sk - Sq.
        softcap: above 0: scores become softcap * tanh(score / softcap), before the bias.
        deterministic: gradients have the same bits every time. The CPU's always have.
        window_size: (left, right): keys from i + Sk - Sq - left to i + Sk - Sq + right; None or -1: no limit.
        key_intervals: (start, end), int32 [B, h, Sk]: key j is seen by rows start <= i < end.
        sink: [H] or [n, H]: logits that join the sum of each row of their head.
        return_lse: also return the logarithm of each row's sum, [B, H, Sq] float32.

    Returns:
        out [B, Sq, H, Dv] of q's dtype, or (out, lse). Differentiable with regard to q, k, v, attn_bias and sink, also
        through lse. vmap() folds its axis into the batch where every array has the batch's own extent, and runs the
        calls one after the other where a mask or bias broadcasts over the batch, or beside sinks. Under jit() on
        several devices, use shard_map() over batch or heads.

    Raises:
        TypeError, ValueError: about shapes and dtypes, while tracing.
        jax.errors.JaxRuntimeError: the library's sentence about what it does not take, when the result is awaited.
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
    if key_intervals is not None:
        start, end = interval_pair(key_intervals, given["q"])
        given |= {"interval_start": jnp.asarray(start, jnp.int32), "interval_end": jnp.asarray(end, jnp.int32)}
    if sink is not None:
        given["sink"] = jnp.asarray(sink)
    settings = settings_of(softmax_scale, None, is_causal, softcap, deterministic, window_size)
    return _attend(settings, bool(return_lse), given)
