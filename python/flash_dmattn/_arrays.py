"""Attention on NumPy arrays and on anything else that speaks DLPack, on the CPU and on CUDA devices.

Needs neither PyTorch nor, for PyTorch, NumPy.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import _arguments, _native
from ._arguments import (
    NO_WINDOW,
    Settings,
    bias_with_four_axes,
    check_axes,
    check_layout,
    dense_extents,
    flag_of,
    integer_of,
    interval_pair,
    mask_with_four_axes,
    num_results_of,
    packed_extents,
    refuse_keywords,
    refuse_negated,
    row_masks,
    settings_of,
    with_layout_hint,
)
from ._device_arrays import CPU, CUDA, Device, device_of, dlpack_stream, handle_of, lender_of, say
from ._fields import POSITION
from ._key_rules import joined

_DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64", "bool", "int32")
# The second dtype that these arguments may have.
_OTHER_DTYPES = {name: "int64" for name in ("block_table", "page_start", "slots", "positions")}
_OTHER_DTYPES["tree"] = "uint32"


class Borrowed:
    """An array somebody else owns: where it is and how it is laid out (strides in elements)."""

    __slots__ = ("address", "dtype", "shape", "strides", "device", "owner")

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: Tuple[int, ...],
        strides: Tuple[int, ...],
        device: Device,
        owner: Any,
    ) -> None:
        self.address, self.dtype, self.shape, self.strides = address, dtype, shape, strides
        self.device, self.owner = device, owner

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> Borrowed:
        """The same elements with axes of extent 1 put in; nothing else is asked of it."""
        axes = list(zip(self.shape, self.strides))
        strides = [axes.pop(0)[1] if axes and axes[0][0] == extent else 0 for extent in shape]
        return Borrowed(self.address, self.dtype, shape, tuple(strides), self.device, self.owner)

    def arguments(self) -> Tuple[Any, ...]:
        """What the extension takes."""
        return (self.address, self.dtype, self.shape, self.strides, *self.device)


def check_byte_order(array: Any, name: str) -> None:
    """NumPy alone has arrays whose numbers have their bytes in the other order, and names them as any other."""
    if not getattr(getattr(array, "dtype", None), "isnative", True):
        raise TypeError(
            f"{name} is {array.dtype.str}, whose bytes are in the other order than this machine's: give "
            f"{name}.astype({array.dtype.name!r})"
        )


def _borrow_numpy(array: Any, name: str, written: bool) -> Borrowed:
    if not hasattr(array, "flags"):
        import numpy

        array = numpy.asarray(array)  # shares its memory
    check_byte_order(array, name)
    dtype = array.dtype
    if any(step % dtype.itemsize for step in array.strides):
        raise ValueError(f"{name} has byte strides {array.strides}, which are not multiples of its element")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is read-only; it is written to")
    strides = tuple(step // dtype.itemsize for step in array.strides)
    return Borrowed(array.__array_interface__["data"][0], dtype.name, array.shape, strides, (CPU, 0), array)


def _capsule(array: Any, stream: Optional[int]) -> Any:
    """A DLPack capsule. On a CUDA device the producer makes `stream` wait for the work that writes the array."""
    if is_torch(array):
        array = array.detach()
    options = {} if stream is None else {"stream": stream}
    try:
        # Only capsules since DLPack 1.0 say that they are read-only, and not every library makes them.
        return array.__dlpack__(max_version=(1, 0), **options)
    except TypeError:
        return array.__dlpack__(**options)


def borrow(
    array: Any,
    name: str,
    device: Optional[Device] = None,
    stream: int = 0,
    written: bool = False,
    beside: str = "q",
) -> Optional[Borrowed]:
    """A NumPy array or DLPack producer, without a copy; None stays None.

    device: where it must be, because `beside` is there; None = on the CPU. stream: handle that CUDA arrays are read on.
    """
    if array is None:
        return None
    if is_torch(array):
        check_layout(array, name)
        refuse_negated(array, name)
    where = device_of(array, name)
    if where != (device or (CPU, 0)):
        if device is None:
            raise NotImplementedError(f"{name} is on {say(where)}; this function takes arrays on the CPU only")
        raise ValueError(
            f"{name} is on {say(where)}, but {beside} is on {say(device)}; the arrays of a call are on one device"
        )
    if hasattr(array, "__array_interface__"):
        borrowed = _borrow_numpy(array, name, written)
    else:
        has_table = where[0] == CPU and hasattr(type(array), "__dlpack_c_exchange_api__")
        owner = array if has_table else _capsule(array, dlpack_stream(stream) if where[0] == CUDA else None)
        address, dtype, shape, strides, _, _, read_only = _native.inspect(owner)
        if written and read_only:
            raise ValueError(f"{name} is read-only; it is written to")
        borrowed = Borrowed(address, dtype, shape, strides, where, owner)
    if borrowed.dtype not in _DTYPE_NAMES and borrowed.dtype != _OTHER_DTYPES.get(name):
        raise TypeError(f"{name} is {borrowed.dtype}; the library takes {', '.join(_DTYPE_NAMES)}")
    return borrowed


def borrow_needed(
    array: Any,
    name: str,
    device: Optional[Device] = None,
    stream: int = 0,
    written: bool = False,
    beside: str = "q",
) -> Borrowed:
    """borrow() of an array that must be there."""
    borrowed = borrow(array, name, device, stream, written, beside)
    if borrowed is None:
        raise TypeError(f"{name} is None; it must be an array")
    return borrowed


def describe(array: Any, name: str) -> Any:
    """An array as the extension takes it; None stays None."""
    borrowed = borrow(array, name)
    return None if borrowed is None else borrowed.arguments()


def is_array(thing: Any) -> bool:
    """Whether it can be borrowed."""
    return any(hasattr(thing, name) for name in ("__array_interface__", "__dlpack__", "__cuda_array_interface__"))


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


# ---- attention -------------------------------------------------------------------------------------------------------


def _longest(offsets: Optional[Borrowed]) -> int:
    """The longest of packed sequences, where the host can read their offsets; else 0."""
    if offsets is None or offsets.device[0] != CPU or offsets.ndim != 1 or offsets.dtype != "int32":
        return 0
    values = (ctypes.c_int32 * offsets.shape[0]).from_address(offsets.address)
    return max((last - first for first, last in zip(values[:-1], values[1:])), default=0)


class _Call:
    """A call on arrays: where they are, who makes others beside them, and what was given, in the library's order."""

    def __init__(self, q: Any, stream: Any) -> None:
        handle = handle_of(stream)
        self.device = device_of(q, "q")
        if handle is not None and self.device[0] == CPU:
            raise ValueError("stream is given, but q is on the CPU; streams are for arrays on a CUDA device")
        self.lender = lender_of(q, self.device, handle)

    def borrow(self, array: Any, name: str) -> Optional[Borrowed]:
        return borrow(array, name, self.device, self.lender.stream)

    def required(self, array: Any, name: str) -> Borrowed:
        return borrow_needed(array, name, self.device, self.lender.stream)

    def take(
        self,
        tensors: Sequence[Any],
        mask: Any,
        bias: Any,
        intervals: Any,
        offsets: Sequence[Any],
        sink: Any,
        row_intervals: Any,
        block_mask: Any,
        settings: Settings,
    ) -> None:
        """Borrows all that both passes read."""
        q, k, v = (self.required(array, name) for array, name in zip(tensors, ("q", "k", "v")))
        cu_q, cu_k = (self.borrow(each, name) for each, name in zip(offsets, ("cu_seqlens_q", "cu_seqlens_k")))
        check_axes((q, k, v), ("q", "k", "v"), 4 if cu_q is None else 3)
        if cu_q is None:
            extents = dense_extents(q.shape, k.shape)
        else:
            longest = [most or _longest(offsets) for most, offsets in zip(settings[:2], (cu_q, cu_k))]
            extents = packed_extents(q.shape, k.shape, cu_q.shape, longest)
        mask, bias = (
            self.borrow(each, name) if is_array(each) else each
            for each, name in ((mask, "attn_mask"), (bias, "attn_bias"))
        )
        mask = None if mask is None else mask_with_four_axes(mask, extents)
        bias = None if bias is None else bias_with_four_axes(bias, extents)
        pair = (None, None) if intervals is None else interval_pair(intervals, q, settings[0])
        start, end = self.borrow(pair[0], "key_intervals start"), self.borrow(pair[1], "key_intervals end")
        names = "row_intervals start", "row_intervals end", "block_mask"
        rows = (self.borrow(each, name) for each, name in zip(row_masks(row_intervals, block_mask), names))
        self.given: Tuple[Any, ...] = (q, k, v, mask, bias, start, end, cu_q, cu_k, self.borrow(sink, "sink"), *rows)

    def output(self, array: Any, name: str, shape: Tuple[int, ...], dtype: str) -> Tuple[Any, Borrowed]:
        """The caller's array, or a new one; as it is, and borrowed."""
        if array is None:
            array = self.lender.empty(shape, dtype)
        return array, borrow_needed(array, name, self.device, self.lender.stream, True)

    def rows(self) -> Tuple[Tuple[int, ...], str]:
        """Shape and dtype of lse."""
        q = self.given[0]
        shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
        return shape, "float64" if q.dtype == "float64" else "float32"

    def run(self, function: Any, others: Sequence[Optional[Borrowed]], settings: Settings) -> None:
        arrays = (each and each.arguments() for each in (*self.given, *others))
        on_device = () if self.device[0] == CPU else (self.lender.stream, self.lender.allocate)
        # 0 threads: what FLASH_DMATTN_NUM_THREADS and the machine allow.
        function(*arrays, *settings, 0, _arguments.forced_family, None, False, *on_device)

    def hand_over(self, array: Any, given: Any) -> Any:
        """What the caller receives: his own array, or a new one in the form of his library."""
        return self.lender.hand_over(array) if given is None else given


def attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    attn_bias: Any = None,
    softmax_scale: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    deterministic: Optional[bool] = None,
    *,
    window_size: Any = NO_WINDOW,
    key_intervals: Optional[Tuple[Any, Any]] = None,
    row_intervals: Optional[Tuple[Any, Any]] = None,
    block_mask: Any = None,
    document_ids: Any = None,
    prefix_lengths: Any = None,
    sink: Any = None,
    lse_without_sink: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    return_lse: bool = False,
    return_lse_low: bool = False,
    out: Any = None,
    scale: Optional[float] = None,
    stream: Any = None,
    **others: Any,
) -> Any:
    """Attention forward on NumPy arrays or DLPack producers; the same function as flash_dmattn_func.

    Args:
        q: [B, Sq, H, D], float32, float16, bfloat16 or float64 (CPU only). Packed: [total_q, H, D].
        k, v: [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv], q's dtype; H is a multiple of Hkv. Packed: [total_k, Hkv, D or Dv].
        attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic, window_size, key_intervals,
            row_intervals, block_mask, document_ids, prefix_lengths, sink: as in flash_dmattn_func, defaults too.
            Packed sequences are documents.
        lse_without_sink, scale: as in flash_dmattn_func.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1]: sequences are packed, as in flash_dmattn_varlen_func. Default None.
        max_seqlen_q, max_seqlen_k: upper bounds on the packed lengths; default 0: found from cu_seqlens, on the CPU.
        return_lse: also return lse. Default False.
        return_lse_low: also return lse and what it has rounded away, which `attention_backward` needs beside biases of
            -1e4 and below; None without a bias. Default False.
        out: written and returned when given: an array of out's shape and q's dtype with a contiguous last axis.
        stream: for arrays on a CUDA device: the stream to run on, as the driver's handle (0 = the legacy default
            stream) or an object with `__cuda_stream__`. It waits for the work that writes the arrays, as far as their
            library knows of it, and the call does not wait for it. Default: the current stream of CuPy or PyTorch for
            their arrays, else the legacy default stream.
        others: none; a keyword of flash-attn at the value that changes nothing is taken.

    Returns:
        out [B, Sq, H, Dv]; (out, lse) with return_lse, lse [B, H, Sq] float32 (float64 for float64 arrays); (out, lse,
        lse_low) with return_lse_low. Arrays of q's library: JAX's give JAX's. Where it has no `__array_namespace__`
        with a from_dlpack, they are NumPy arrays on the CPU, and on a CUDA device arrays that only speak DLPack.
        PyTorch's tensors give PyTorch's, with autograd unless out is given.

    Raises:
        TypeError, ValueError: an argument is wrong, or arrays are on different devices; the sentence says what is
            allowed.
        NotImplementedError: no kernel of the arrays' device takes the problem.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import attention
        >>> q = k = v = numpy.ones((1, 4, 2, 8), numpy.float32)
        >>> out, lse = attention(q, k, v, is_causal=True, return_lse=True)
        >>> out.shape, lse.shape, out.dtype.name
        ((1, 4, 2, 8), (1, 2, 4), 'float32')
    """
    if others:
        refuse_keywords("attention", others)
    num_results = num_results_of(return_lse, return_lse_low, None)
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if is_torch(q) and out is None:
        return _attention_on_torch(
            (q, k, v, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic),
            packing,
            {
                "window_size": window_size,
                "key_intervals": key_intervals,
                "row_intervals": row_intervals,
                "block_mask": block_mask,
                "document_ids": document_ids,
                "prefix_lengths": prefix_lengths,
                "sink": sink,
                "lse_without_sink": lse_without_sink,
                "return_lse": return_lse,
                "return_lse_low": return_lse_low,
                "scale": scale,
            },
            handle_of(stream),
        )
    longest = integer_of(max_seqlen_q, "max_seqlen_q"), integer_of(max_seqlen_k, "max_seqlen_k")
    rules, offsets = (document_ids, prefix_lengths), (cu_seqlens_q, cu_seqlens_k)
    key_intervals, window_size = joined(key_intervals, window_size, rules, is_causal, q, k, offsets)
    settings = settings_of(
        softmax_scale, scale, is_causal, softcap, deterministic, window_size, *longest, lse_without_sink
    )
    call = _Call(q, stream)
    lse = lse_low = low = rows = None
    try:
        call.take(
            (q, k, v), attn_mask, attn_bias, key_intervals, packing[:2], sink, row_intervals, block_mask, settings
        )
        query, _, value, _, bias, *_ = call.given
        result, written = call.output(out, "out", query.shape[:-1] + value.shape[-1:], query.dtype)
        if num_results > 1:
            lse, rows = call.output(None, "lse", *call.rows())
        if num_results > 2 and bias is not None:
            lse_low, low = call.output(None, "lse_low", *call.rows())
        call.run(_native.forward, (written, rows, low), settings)
    except ValueError as error:
        raise with_layout_hint(error, q, k) from None
    result = call.hand_over(result, out)
    if num_results == 1:
        return result
    rest = (None if each is None else call.hand_over(each, None) for each in (lse, lse_low)[: num_results - 1])
    return (result, *rest)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    attn_mask: Any = None,
    attn_bias: Any = None,
    softmax_scale: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    deterministic: Optional[bool] = None,
    *,
    window_size: Any = NO_WINDOW,
    key_intervals: Optional[Tuple[Any, Any]] = None,
    row_intervals: Optional[Tuple[Any, Any]] = None,
    block_mask: Any = None,
    document_ids: Any = None,
    prefix_lengths: Any = None,
    sink: Any = None,
    lse_without_sink: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dlse: Any = None,
    lse_low: Any = None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dbias: Any = None,
    dsink: Any = None,
    scale: Optional[float] = None,
    stream: Any = None,
    **others: Any,
) -> Tuple[Any, ...]:
    """The gradients of `attention`, on NumPy arrays or DLPack producers. PyTorch's tensors count as arrays here.

    Args:
        dout: the gradient that flows into out, of its shape and dtype.
        q, k, v, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic, window_size, key_intervals,
            row_intervals, block_mask, document_ids, prefix_lengths, sink: as the forward call had them.
        lse_without_sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale: as the forward call had them.
        out, lse: what `attention` returned.
        dlse: the gradient that flows into lse, of its shape and dtype; default None: none does.
        lse_low: what `attention` returned with return_lse_low. Default None: the weights of rows whose biases are all
            -1e4 or below are then wrong.
        return_dbias, return_dsink: also return the gradient of attn_bias, of sink, in its shape and dtype. Default
            False.
        dq, dk, dv, dbias, dsink: written and returned when given: arrays like q, k, v, attn_bias and sink; the first
            three with a contiguous last axis.
        stream: as in `attention`.
        others: none; a keyword of flash-attn at the value that changes nothing is taken.

    Returns:
        (dq, dk, dv), and behind them dbias and dsink where they are wanted, in the library of q.

    Raises:
        TypeError, ValueError: an argument is wrong, or a gradient is wanted of a bias or sink that is None.
        NotImplementedError: no kernel of the arrays' device takes the problem.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import attention, attention_backward
        >>> q = k = v = numpy.ones((1, 4, 2, 8), numpy.float32)
        >>> out, lse = attention(q, k, v, is_causal=True, return_lse=True)
        >>> dq, dk, dv = attention_backward(numpy.ones_like(out), q, k, v, out, lse, is_causal=True)
        >>> dv[0, :, 0, 0].round(2)  # how often each key was read
        array([2.08, 1.08, 0.58, 0.25], dtype=float32)
    """
    if others:
        refuse_keywords("attention_backward", others)
    longest = integer_of(max_seqlen_q, "max_seqlen_q"), integer_of(max_seqlen_k, "max_seqlen_k")
    rules, offsets = (document_ids, prefix_lengths), (cu_seqlens_q, cu_seqlens_k)
    key_intervals, window_size = joined(key_intervals, window_size, rules, is_causal, q, k, offsets)
    settings = settings_of(
        softmax_scale, scale, is_causal, softcap, deterministic, window_size, *longest, lse_without_sink
    )
    call = _Call(q, stream)
    call.take((q, k, v), attn_mask, attn_bias, key_intervals, offsets, sink, row_intervals, block_mask, settings)
    known = [call.required(each, name) for each, name in ((out, "out"), (lse, "lse"))]
    flowing = [call.required(dout, "dout"), call.borrow(dlse, "dlse")]
    given = (dq, dk, dv, dbias, dsink)
    made: List[Tuple[Any, Optional[Borrowed]]] = [
        call.output(array, name, source.shape, source.dtype)
        for array, name, source in zip(given, ("dq", "dk", "dv"), call.given[:3])
    ]
    wants_dbias = flag_of(return_dbias, "return_dbias") or dbias is not None
    wants_dsink = flag_of(return_dsink, "return_dsink") or dsink is not None
    made.append(_dbias(call, attn_bias, dbias) if wants_dbias else (None, None))
    made.append(_dsink(call, dsink) if wants_dsink else (None, None))
    written = [borrowed for _, borrowed in made]
    call.run(_native.backward, (*known, call.borrow(lse_low, "lse_low"), *flowing, *written), settings)
    return tuple(call.hand_over(array, own) for (array, _), own in zip(made, given) if array is not None)


def _dbias(call: _Call, attn_bias: Any, dbias: Any) -> Tuple[Any, Borrowed]:
    """The gradient of a bias: in the caller's shape, and borrowed with four axes."""
    bias = call.given[POSITION["bias"]]
    if bias is None:
        raise ValueError("dbias is wanted, but attn_bias is None")
    shape = call.required(attn_bias, "attn_bias").shape
    array, borrowed = call.output(dbias, "dbias", shape, bias.dtype)
    if borrowed.shape != shape:
        raise ValueError(f"dbias has shape {list(borrowed.shape)}; it must be {list(shape)}, as attn_bias")
    return array, borrowed.reshape(*bias.shape)


def _dsink(call: _Call, dsink: Any) -> Tuple[Any, Borrowed]:
    sink = call.given[POSITION["sink"]]
    if sink is None:
        raise ValueError("dsink is wanted, but sink is None")
    return call.output(dsink, "dsink", sink.shape, sink.dtype)


def _attention_on_torch(
    positional: Tuple[Any, ...], packing: Tuple[Any, ...], options: Dict[str, Any], handle: Optional[int]
) -> Any:
    from . import _torch

    q, k, v, mask, bias, *rest = positional
    packed: Any = _torch.flash_dmattn_varlen_func
    with _torch.on_stream(q.device, handle):
        if packing[0] is None:
            return _torch.flash_dmattn_func(*positional, **options)
        if options.pop("document_ids") is not None:
            raise ValueError("document_ids are given beside cu_seqlens, which say the documents")
        return packed(
            q, k, v, *packing, softmax_scale=rest[0], is_causal=rest[1], softcap=rest[2], deterministic=rest[3],
            attn_mask=mask, attn_bias=bias, **options,
        )
