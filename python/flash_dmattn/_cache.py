"""Attention on a KV cache, and appending to one: NumPy arrays and DLPack producers on the CPU, and PyTorch's tensors."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

from . import _arguments, _native
from ._arguments import (
    NO_WINDOW,
    Extents,
    Settings,
    bias_with_four_axes,
    check_axes,
    flag_of,
    integer_of,
    range_pair,
    mask_with_four_axes,
    settings_of,
)
from ._arrays import Borrowed, borrow, borrow_needed, is_array, is_torch
from ._device_arrays import CPU, device_of, lender_of, say

# The tensors of a call, by the names of arguments: what is read beside q and the cache, and what says where keys lie.
READ = (
    *("attn_mask", "attn_bias", "sink", "seqused_q", "seqused_k", "cu_seqlens_q"),
    *("row_intervals start", "row_intervals end", "tree"),
)
PLACES = ("block_table", "page_start", "cache_batch_idx", "cache_seqlens", "cache_leftpad")
ADDED = ("key", "value", "cu_seqlens_new", "rotary cos", "rotary sin", "rotary_seqlens")
FORWARD_NAMES = ("query", "key_cache", "value_cache", *READ, *PLACES, *ADDED)
# Of a call with a cache alone, behind its settings: rotary_interleaved, invariance, num_splits, split_keys.
Special = Tuple[bool, int, int, int]
APPEND_NAMES = ("key_cache", "value_cache", *PLACES, *ADDED, "slots", "positions", "query", "cu_seqlens_q")


# torch.compiler.is_compiling, from when _cache_torch is here. Before, and while code is compiled, calls go the long way.
is_compiling: Callable[[], bool] = lambda: True


def rotary_pair(rotary: Any) -> Tuple[Any, Any]:
    """(cos, sin) of a caller's pair; None stands for none."""
    if rotary is None:
        return None, None
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise TypeError(f"rotary is {_arguments.said(rotary)}; it must be a pair (cos, sin) of arrays [positions, pairs]")
    return rotary[0], rotary[1]


def _room(key_cache: Any, block_table: Any, page_start: Any) -> int:
    """The keys that a row of the table can name, or that a row of the cache holds."""
    page = int(key_cache.shape[1])
    return page if block_table is None else page * int(block_table.shape[-1 if page_start is None else 0])


def with_four_axes(tensors: Sequence[Any], settings: Settings) -> Tuple[Any, ...]:
    """The tensors in the order of FORWARD_NAMES, with four axes where they are a mask or a bias."""
    q, k, _, mask, bias, _, _, _, offsets, _, _, _, table, start = tensors[:14]
    check_axes((k, tensors[2]), FORWARD_NAMES[1:3], 4)
    check_axes((q,), ("query",), 4 if offsets is None else 3)
    if mask is None and bias is None:
        return tuple(tensors)
    batch, rows = (offsets.shape[0] - 1, settings[0]) if offsets is not None else q.shape[:2]
    extents = Extents(batch, q.shape[-2], k.shape[2], rows, settings[1] or _room(k, table, start))
    mask = None if mask is None else mask_with_four_axes(mask, extents)
    bias = None if bias is None else bias_with_four_axes(bias, extents)
    return (*tensors[:3], mask, bias, *tensors[5:])


class _Arrays:
    """Arrays of a call on the CPU, and new ones beside them."""

    def __init__(self, first: Any, name: str) -> None:
        self.device, self.first_name = device_of(first, name), name
        if self.device[0] != CPU:
            raise NotImplementedError(f"{name} is on {say(self.device)}; arrays of KV caches are on the CPU, PyTorch's tensors also on CUDA devices")
        self.lender = lender_of(first, self.device, None)

    def read(self, array: Any, name: str) -> Optional[Borrowed]:
        return borrow(array, name, self.device, beside=self.first_name)

    def write(self, array: Any, name: str) -> Borrowed:
        return borrow_needed(array, name, self.device, written=True, beside=self.first_name)

    def all(self, arrays: Sequence[Any], names: Sequence[str], written: Sequence[str]) -> Tuple[Optional[Borrowed], ...]:
        pairs = zip(arrays, names)
        return tuple(self.write(each, name) if name in written else self.read(each, name) for each, name in pairs)


def _views(arrays: Sequence[Optional[Borrowed]]) -> Tuple[Any, ...]:
    return tuple(each and each.arguments() for each in arrays)


def _forward_on_arrays(
    tensors: Sequence[Any], settings: Settings, special: Special, return_lse: bool, out: Any
) -> Any:
    call = _Arrays(tensors[0], "query")
    written = ("key_cache", "value_cache") if tensors[FORWARD_NAMES.index("key")] is not None else ()
    for array, name in zip(tensors[:3], FORWARD_NAMES):
        borrow_needed(array, name, call.device)
    given = with_four_axes(call.all(tensors, FORWARD_NAMES, written), settings)
    q, value = given[0], given[2]
    result = call.lender.empty((*q.shape[:-1], value.shape[3]), q.dtype) if out is None else out
    shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = call.lender.empty(shape, "float64" if q.dtype == "float64" else "float32") if return_lse else None
    results = call.write(result, "out"), None if lse is None else call.write(lse, "lse")
    # 0 threads: what FLASH_DMATTN_NUM_THREADS and the machine allow.
    _native.cache_forward(*_views((*given, *results)), None, *settings, *special, 0, _arguments.forced_family)
    result = call.lender.hand_over(result) if out is None else out
    return (result, call.lender.hand_over(lse)) if return_lse else result


def flash_dmattn_with_kvcache_func(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    key: Any = None,
    value: Any = None,
    *,
    cache_seqlens: Any = None,
    seqused_k: Any = None,
    seqused_q: Any = None,
    block_table: Any = None,
    page_start: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    cu_seqlens_new: Any = None,
    rotary: Optional[Tuple[Any, Any]] = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Any = None,
    attn_mask: Any = None,
    attn_bias: Any = None,
    row_intervals: Optional[Tuple[Any, Any]] = None,
    tree: Any = None,
    is_causal: Optional[bool] = None,
    window_size: Any = NO_WINDOW,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    sink: Any = None,
    lse_without_sink: bool = False,
    return_lse: bool = False,
    out: Any = None,
    invariance: int = 0,
    num_splits: int = 0,
    split_keys: int = 0,
) -> Any:
    """Attention of new query rows to a KV cache, which new keys and values are appended to before. Forward only.

    The cache lies in pages of any size, or is contiguous, and any strides are taken but for the last axis: heads before
    or after the rows of a page, K and V in one tensor. What it holds beyond a sequence's length never reaches a result.
    A call takes sequences of one row and of thousands together. PyTorch's tensors, and arrays on the CPU.

    Args:
        query: [B, Sq, H, D], or packed [total_q, H, D] with cu_seqlens_q.
        key_cache, value_cache: with block_table [pages, page_size, Hkv, D and Dv], else [rows, seqlen, Hkv, D and Dv];
            written where key is given.
        key, value: [B, N, Hkv, D and Dv], or packed [total_new, Hkv, D and Dv] with cu_seqlens_new: appended behind each
            sequence's last key; default None: nothing is.
        cache_seqlens: int32 [B]: keys in the cache before appending; negative: no sequence, whose rows see no key.
            Default None: as many as there is room for; with key needed, or seqused_k.
        seqused_k: int32 [B]: the same after appending; in the place of cache_seqlens.
        seqused_q: int32 [B]: how many of a sequence's rows count; default None: all.
        block_table: int32 or int64 [rows, columns]: key j of a sequence is row j % page_size of the page in column
            j // page_size; entries behind its last key may hold anything. Flat [n] with page_start.
        page_start: int32 or int64 [B] or [B + 1]: sequence b has the pages of block_table from page_start[b] on.
        cache_batch_idx: int32 [B]: which row of block_table, or of a cache without one, is a sequence's. Default None:
            row b.
        cache_leftpad: int32 [B]: keys before it are not visible. Default None: 0.
        cu_seqlens_q: int32 [B + 1]: query is packed, as in flash_dmattn_varlen_func. Default None.
        max_seqlen_q: a bound of the packed sequences' rows; default 0: found from cu_seqlens_q, on the CPU alone.
        max_seqlen_k: the most keys of a sequence that count; default 0: as many as there is room for.
        cu_seqlens_new: int32 [B + 1], of packed key and value. Default None.
        rotary: (cos, sin), each [positions, R / 2] in query's dtype or float32: query and key turn by rotary embeddings
            of their first R dims. Row t of key turns by position cache_seqlens + t, row i of query by cache_seqlens + i
            under a causal mask or window, else by cache_seqlens. Default None: nothing turns.
        rotary_interleaved: pairs are (0, 1), (2, 3), ..; default False: (0, R / 2), (1, R / 2 + 1), ..
        rotary_seqlens: int32 [B]: in the place of cache_seqlens there. Default None.
        attn_mask, attn_bias: as in flash_dmattn_func, their last axis the number of the key: max_seqlen_k or 1 long.
        row_intervals: (start, end), int32 [B|1, H|Hkv|1, n, Sq], packed [H|Hkv|1, n, total_q], n from 1 to 4: row i sees
            the keys start <= j < end of each of its n ranges, as far as the other masks say; j counts from the first
            key of the sequence, in the cache or appended. Default None.
        tree: uint32 or int32 [B, Sq, words], packed [total_q, words], with a word for each 32 of Sq or max_seqlen_q
            rows. The last Sq keys of a sequence are a draft of its Sq rows that count: row i sees key t of the draft
            where bit t % 32 of word t // 32 is set, its own bit too, and every key before the draft as far as the other
            masks say. Default None: no tree.
        is_causal: row i of a sequence of Sq rows sees keys up to (keys after appending) - Sq + i. Default None: True,
            but False beside a tree, which stands in its place.
        window_size, softmax_scale, softcap, sink, lse_without_sink: as in flash_dmattn_func.
        return_lse: also return lse. Default False.
        out: written and returned when given: of the result's shape and query's dtype.
        invariance: on what the bits of a row may depend beside itself. Default 0: on the whole call. 1: on its own
            sequence, not on the batch, on lengths of others, pages and bounds; rows of calls with many rows
            (max_seqlen_q * H / Hkv above 64, on the CPU 16) and with few are computed in two ways. 2: on the keys that
            it sees, not on how rows are cut into calls; slower for few rows.
        num_splits: the parts that keys are split into; 1: they are not. Default 0: as planned. No kernel for many rows
            takes more than 1.
        split_keys: the keys of a part, a multiple of 64; default 0: as planned. At most one of the two.

    Returns:
        out [B, Sq, H, Dv] or [total_q, H, Dv]; (out, lse) with return_lse, lse [B, H, Sq] or [H, total_q]. Rows that see
        no key have out 0 and lse +inf.

    Raises:
        TypeError, ValueError: an argument is wrong, a page lies outside of the cache, or a gradient is asked for.
        NotImplementedError: arrays are not on the CPU, or no kernel of a CUDA device takes the call.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import flash_dmattn_with_kvcache_func
        >>> pages = numpy.zeros((2, 8, 16, 1, 64), numpy.float32)  # K and V: 8 pages of 16 keys of one head
        >>> new = numpy.ones((1, 1, 1, 64), numpy.float32)
        >>> table, length = numpy.array([[5, 2]], numpy.int32), numpy.array([20], numpy.int32)
        >>> out = flash_dmattn_with_kvcache_func(
        ...     numpy.ones((1, 1, 4, 64), numpy.float32), *pages, new, new, cache_seqlens=length, block_table=table
        ... )
        >>> out.shape, bool(pages[0, 2, 4].all())  # key 20 is row 4 of page 2
        ((1, 1, 4, 64), True)
    """
    if not is_compiling():
        result = _native.cache_attend(
            query, key_cache, value_cache, attn_mask, attn_bias, sink, seqused_q, seqused_k, cu_seqlens_q, tree,
            block_table, page_start, cache_batch_idx, cache_seqlens, cache_leftpad, key, value, cu_seqlens_new,
            rotary_seqlens, out, row_intervals, rotary, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, softcap,
            window_size, lse_without_sink, rotary_interleaved, invariance, num_splits, split_keys, return_lse, False,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    longest = integer_of(max_seqlen_q, "max_seqlen_q"), integer_of(max_seqlen_k, "max_seqlen_k")
    settings = settings_of(
        softmax_scale, None, tree is None if is_causal is None else is_causal, softcap, False, window_size, *longest, flag_of(lse_without_sink, "lse_without_sink")
    )
    tensors = (
        *(query, key_cache, value_cache, attn_mask, attn_bias, sink, seqused_q, seqused_k, cu_seqlens_q),
        *range_pair(row_intervals),
        tree,
        *(block_table, page_start, cache_batch_idx, cache_seqlens, cache_leftpad),
        *(key, value, cu_seqlens_new, *rotary_pair(rotary), rotary_seqlens),
    )
    with_lse = flag_of(return_lse, "return_lse")
    special = (
        flag_of(rotary_interleaved, "rotary_interleaved"), integer_of(invariance, "invariance"),
        integer_of(num_splits, "num_splits"), integer_of(split_keys, "split_keys"),
    )  # fmt: skip
    if is_torch(query):
        from . import _cache_torch

        return _cache_torch.forward(tensors, settings, special, with_lse, out)
    for array, name in zip(tensors[3:5], READ):
        if array is not None and not is_array(array):
            raise TypeError(f"{name} is {_arguments.said(array)}; it must be an array")
    return _forward_on_arrays(tensors, settings, special, with_lse, out)


def append_kv_cache(
    key_cache: Any,
    value_cache: Any,
    key: Any,
    value: Any,
    *,
    cache_seqlens: Any = None,
    block_table: Any = None,
    page_start: Any = None,
    cache_batch_idx: Any = None,
    cu_seqlens_new: Any = None,
    slots: Any = None,
    positions: Any = None,
    rotary: Optional[Tuple[Any, Any]] = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Any = None,
    query: Any = None,
    cu_seqlens_q: Any = None,
    query_out: Any = None,
) -> Any:
    """Appends keys and values to a KV cache, and turns them and a query by rotary embeddings, without attention.

    Args:
        key_cache, value_cache: the cache, as in flash_dmattn_with_kvcache_func; written.
        key, value: [B, N, Hkv, D and Dv], or packed [total_new, Hkv, D and Dv] with cu_seqlens_new or slots. Both may be
            None where a query is turned.
        cache_seqlens, block_table, page_start, cache_batch_idx, cu_seqlens_new: as in flash_dmattn_with_kvcache_func;
            cache_seqlens is needed without slots.
        slots: int32 or int64 [total_new]: key goes to row slot % page_size of page slot // page_size, or nowhere where
            the slot is negative or beyond the cache. Default None.
        positions: int32 or int64 [total_new]: the position that turns each row of key, and of query. Default None:
            cache_seqlens or rotary_seqlens and the row's number.
        rotary, rotary_interleaved, rotary_seqlens: as in flash_dmattn_with_kvcache_func.
        query: [B, Sq, H, D], or packed [total_q, H, D] with cu_seqlens_q or slots: turned as under a causal mask.
            Default None.
        cu_seqlens_q: int32 [B + 1], of a packed query. Default None.
        query_out: where the turned query goes, which query itself may be; default None: a new array.

    Returns:
        The turned query; None where none was given.

    Raises:
        TypeError, ValueError: an argument is wrong, or a page lies outside of the cache.
        NotImplementedError: arrays are not on the CPU, or no kernel of a CUDA device takes the call.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import append_kv_cache
        >>> k, v = numpy.zeros((2, 4, 8, 1, 16), numpy.float32)  # 4 pages of 8 keys of one head
        >>> new = numpy.ones((3, 1, 16), numpy.float32)
        >>> append_kv_cache(k, v, new, new, slots=numpy.array([9, -1, 31]))
        >>> numpy.argwhere(k[:, :, 0, 0]).tolist()
        [[1, 1], [3, 7]]
    """
    if not is_compiling():
        result = _native.append_to_cache(
            key_cache, value_cache, block_table, page_start, cache_batch_idx, cache_seqlens, key, value, cu_seqlens_new,
            rotary_seqlens, slots, positions, query, cu_seqlens_q, query_out, rotary, rotary_interleaved,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    tensors = (
        *(key_cache, value_cache, block_table, page_start, cache_batch_idx, cache_seqlens, None),
        *(key, value, cu_seqlens_new, *rotary_pair(rotary), rotary_seqlens, slots, positions, query, cu_seqlens_q),
    )
    interleaved = flag_of(rotary_interleaved, "rotary_interleaved")
    if is_torch(key_cache):
        from . import _cache_torch

        return _cache_torch.append(tensors, interleaved, query_out)
    call = _Arrays(key_cache, "key_cache")
    given = call.all(tensors, APPEND_NAMES, ("key_cache", "value_cache") if key is not None else ())
    turned = given[APPEND_NAMES.index("query")]
    result = query_out
    if turned is not None and query_out is None:
        result = call.lender.empty(turned.shape, turned.dtype)
    written = None if result is None else call.write(result, "query_out")
    _native.cache_append(*_views((*given, written)), None, interleaved, 0)
    return result if result is None or query_out is not None else call.lender.hand_over(result)
