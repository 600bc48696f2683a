"""Block masks and row intervals: builders from lists, from FlexAttention's BlockMask, from ranges and from rules."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Dict, List, Optional, Tuple

from . import _native
from ._arguments import at_least, said
from ._arrays import borrow_needed, is_torch
from ._device_arrays import device_of, lender_of


def blocks_from_lists(counts: Any, indices: Any, num_blocks: int) -> Any:
    """A block mask of lists: which blocks of keys each row of blocks sees.

    Args:
        counts: int32 [B, h, Q]: how many of a row's indices count.
        indices: int32 [B, h, Q, n]: blocks of keys in any order; behind a row's count they may be anything.
        num_blocks: K = ceil(Sk / b), blocks along the keys.

    Returns:
        bool [B, h, Q, K], for `block_mask=`, of counts' library.

    Raises:
        TypeError, ValueError: a shape or a dtype is wrong; on the CPU also a count above n or an index that is not
            below K. On CUDA devices such a count is n, and such an index names no block.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import masks
        >>> counts, indices = numpy.array([[[1, 2]]], numpy.int32), numpy.array([[[[0, 0], [1, 0]]]], numpy.int32)
        >>> masks.blocks_from_lists(counts, indices, 2)[0, 0].astype(int).tolist()
        [[1, 0], [1, 1]]
    """
    num_blocks = at_least(0, num_blocks, "num_blocks")
    device = device_of(counts, "counts")
    lender = lender_of(counts, device, None)
    lists = [
        borrow_needed(each, name, device, lender.stream, beside="counts")
        for each, name in ((counts, "counts"), (indices, "indices"))
    ]
    if lists[0].ndim != 3:
        raise ValueError(f"counts has {lists[0].ndim} axes; it needs 3: [batch, heads, blocks of rows]")
    blocks = lender.empty((*lists[0].shape, num_blocks), "bool")
    written = borrow_needed(blocks, "blocks", device, lender.stream, True, "counts")
    _native.blocks_from_lists(*(each.arguments() for each in (*lists, written)), lender.stream)
    return lender.hand_over(blocks)


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


_ELEMENTS_AT_ONCE = 1 << 22  # the mask function computes with indices of 8 bytes for each


def from_block_mask(block_mask: Any, max_bytes: int = 1 << 30) -> Dict[str, Any]:
    """FlexAttention's BlockMask: its full blocks as such, its mask function on the others once.

    Args:
        block_mask: a BlockMask whose blocks are multiples of 64 rows and keys. On a CUDA device the call waits for it
            once, so that no CUDA graph captures the call: whether blocks are partial is in the device's memory alone.
        max_bytes: of the dense mask that partial blocks need, B h Sq Sk rounded up to blocks; default 2**30.

    Returns:
        Keywords of one call of attention: block_mask, bool [B, h, ceil(Sq / b), ceil(Sk / b)], and attn_mask, bool
        [B, h, Sq, Sk], which says what is visible in partial blocks; None where there are none.

    Raises:
        TypeError: it is no BlockMask.
        ValueError: its blocks have another size, or the dense mask would be larger than max_bytes.

    Examples:
        >>> import torch
        >>> from flash_dmattn import flash_dmattn_func, masks
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> flex = create_block_mask(lambda b, h, i, j: i // 128 == j // 128, 1, 1, 256, 256, device="cpu")
        >>> made = masks.from_block_mask(flex)
        >>> made["block_mask"][0, 0].int().tolist(), made["attn_mask"]  # no block is partial
        ([[1, 0], [0, 1]], None)
        >>> x = torch.ones(1, 256, 2, 8)
        >>> flash_dmattn_func(x, x, x, **made).shape
        torch.Size([1, 256, 2, 8])
    """
    if not hasattr(block_mask, "kv_indices") or not hasattr(block_mask, "mask_mod"):
        raise TypeError(f"block_mask is {said(block_mask)}; it must be FlexAttention's BlockMask")
    max_bytes = at_least(0, max_bytes, "max_bytes")
    rows, keys = block_mask.BLOCK_SIZE
    if rows % 64 or keys % 64:
        raise ValueError(f"block_mask has blocks of {rows} rows and {keys} keys; both must be multiples of 64")
    partial = _of_lists(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = None
    if block_mask.full_kv_num_blocks is not None:
        full = _of_lists(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    lengths = getattr(block_mask, "seq_lengths", None) or (partial.shape[2] * rows, partial.shape[3] * keys)
    size = 64 if rows % 128 or keys % 128 else 128
    shown = partial if full is None else partial | full
    blocks = shown.repeat_interleave(rows // size, 2).repeat_interleave(keys // size, 3)
    blocks = blocks[:, :, : -(-lengths[0] // size), : -(-lengths[1] // size)].contiguous()
    places = partial.nonzero()  # waits for the device: the host allocates what they need
    if places.shape[0] == 0:
        return {"block_mask": blocks, "attn_mask": None}
    num_bytes = partial.numel() * rows * keys
    if num_bytes > max_bytes:
        raise ValueError(
            f"block_mask has partial blocks, whose dense mask takes {num_bytes} bytes; max_bytes is {max_bytes}"
        )
    dense = _dense_of(block_mask.mask_mod, places, partial.shape, full, (rows, keys), lengths)
    return {"block_mask": blocks, "attn_mask": dense[:, :, : lengths[0], : lengths[1]]}


def _of_lists(counts: Any, indices: Any) -> Any:
    """bool [B, h, Q, K] of FlexAttention's lists, which have room for all K blocks."""
    import torch

    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    blocks = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool, device=indices.device)
    blocks.scatter_(-1, torch.where(listed, indices, indices.shape[-1]).long(), True)
    return blocks[..., :-1]


def _dense_of(mask_mod: Any, partial: Any, shape: Any, full: Any, block: Any, lengths: Any) -> Any:
    """bool [B, h, Q * rows, K * keys]: full blocks whole, and those of `partial`, [n, 4], as the function says."""
    import torch

    (batch, heads, across, down), (rows, keys), device = shape, block, partial.device
    dense = torch.zeros(batch, heads, across, rows, down, keys, dtype=torch.bool, device=device)
    if full is not None:
        dense |= full[:, :, :, None, :, None]
    over_keys = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    of_blocks = torch.vmap(over_rows, in_dims=(0, 0, 0, 0))
    for places in partial.split(max(1, _ELEMENTS_AT_ONCE // (rows * keys))):
        b, h, row, key = places.unbind(1)
        # Blocks that reach over an end ask for what is there; the rest is cut off.
        i = (row[:, None] * rows + torch.arange(rows, device=device)).clamp(max=max(lengths[0] - 1, 0))
        j = (key[:, None] * keys + torch.arange(keys, device=device)).clamp(max=max(lengths[1] - 1, 0))
        dense[b, h, row, :, key] = of_blocks(b, h, i, j).to(torch.bool)
    return dense.reshape(batch, heads, across * rows, down * keys)


# ---- row intervals ---------------------------------------------------------------------------------------------------


def from_flex_ranges(ranges: Any, batch: int = 1) -> Tuple[Any, Any]:
    """The ranges of cudnn.flex_attention as row intervals.

    Args:
        ranges: int32 [h, 2 m + 1, B S]: a row sees the keys below its first number, and those from the first to
            before the second of each pair of the others; m from 0 to 3. A PyTorch or NumPy array.
        batch: B, by which the last axis is divided. Default 1.

    Returns:
        (start, end), int32 [B, h, m + 1, S], for `row_intervals=`.

    Raises:
        TypeError, ValueError: the shape or the dtype is wrong, or there are more than 4 ranges.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import masks
        >>> start, end = masks.from_flex_ranges(numpy.array([[[1, 1], [0, 2], [0, 4]]], numpy.int32))
        >>> start.tolist(), end.tolist()
        ([[[[0, 0], [0, 2]]]], [[[[1, 1], [0, 4]]]])
    """
    batch = at_least(1, batch, "batch")
    shape: Tuple[int, ...] = tuple(getattr(ranges, "shape", ()))
    if len(shape) != 3 or shape[1] % 2 == 0 or shape[2] % batch:
        raise ValueError(
            f"ranges is {f'of shape {list(shape)}' if shape else said(ranges)}; it must be [heads, an odd number, "
            f"a multiple of batch {batch}]"
        )
    if shape[1] > 7:
        raise ValueError(f"ranges has {shape[1]} numbers a row, {(shape[1] + 1) // 2} ranges; at most 4 are taken")
    if not str(ranges.dtype).endswith("int32"):
        raise TypeError(f"ranges is {ranges.dtype}; it must be int32")
    library = _library_of(ranges)
    parts = library.swapaxes(ranges.reshape(*shape[:2], batch, -1), 1, 2)  # [h, B, 2 m + 1, S]
    parts = library.swapaxes(parts, 0, 1)
    return library.concatenate((library.zeros_like(parts[:, :, :1]), parts[:, :, 1::2]), 2), parts[:, :, 0::2]


def rule_row_intervals(
    document_ids: Any = None,
    prefix_lengths: Any = None,
    window_sizes: Any = None,
    *,
    seqlen_q: Optional[int] = None,
    seqlen_k: Optional[int] = None,
) -> Tuple[Any, Any]:
    """Rules that hold at once, as one range of keys a row; `rule_intervals` gives key intervals of the same pairs.

    Args:
        document_ids: int32 [B|1, S], rising along S: rows see the keys of their own document; Sq = Sk = S.
        prefix_lengths: int32 [B|1]: rows see the keys below their sequence's number, and the others causally.
        window_sizes: int32 [h, 2]: (left, right) of each head, -1 = unbounded.
        seqlen_q, seqlen_k: Sq and Sk. Default None: S of document_ids, and Sq the same as Sk.

    Returns:
        (start, end), int32 [B|1, h|1, 1, Sq], for `row_intervals=`, of the rules' library: PyTorch's or NumPy's.

    Raises:
        TypeError, ValueError: a shape or a dtype is wrong, no rule is given, or nothing says how many keys there are.

    Examples:
        >>> import numpy
        >>> from flash_dmattn import masks
        >>> start, end = masks.rule_row_intervals(numpy.array([[0, 0, 1, 1]], numpy.int32))
        >>> start[0, 0, 0].tolist(), end[0, 0, 0].tolist()
        ([0, 0, 2, 2], [2, 2, 4, 4])
    """
    rules = {
        "document_ids": (document_ids, 2),
        "prefix_lengths": (prefix_lengths, 1),
        "window_sizes": (window_sizes, 2),
    }
    given: List[Any] = [rule for rule, _ in rules.values() if rule is not None]
    if not given:
        raise ValueError("no rule is given; document_ids, prefix_lengths and window_sizes are")
    for name, (rule, ndim) in rules.items():
        if rule is not None and (getattr(rule, "ndim", 0) != ndim or not str(rule.dtype).endswith("int32")):
            raise TypeError(f"{name} is {said(rule)}; it must be an int32 array of {ndim} axes")
        if rule is not None and is_torch(rule) != is_torch(given[0]):
            raise TypeError(f"{name} is of another library than the other rules")
    keys = document_ids.shape[1] if seqlen_k is None and document_ids is not None else seqlen_k
    if keys is None:
        raise ValueError("seqlen_k is None, and no document_ids say how many keys there are")
    keys = at_least(0, keys, "seqlen_k")
    rows = keys if seqlen_q is None else at_least(0, seqlen_q, "seqlen_q")
    if document_ids is not None and not document_ids.shape[1] == rows == keys:
        raise ValueError(
            f"document_ids have {document_ids.shape[1]} keys, but Sq is {rows} and Sk {keys}; they must be the same"
        )
    library = _library_of(given[0])
    place = {"device": given[0].device} if is_torch(given[0]) else {}
    own = library.arange(keys - rows, keys, dtype=library.int32, **place)  # the key that lies beside each row
    start, end = library.zeros_like(own)[None, None], library.full_like(own, keys)[None, None]
    if document_ids is not None:
        first, last = _document_ends(document_ids)
        start, end = library.maximum(start, first[:, None]), library.minimum(end, last[:, None])
    if prefix_lengths is not None:
        end = library.minimum(end, library.maximum(own + 1, prefix_lengths[:, None, None]))
    if window_sizes is not None:
        if window_sizes.shape[1] != 2 or bool((window_sizes < -1).any()):
            raise ValueError("window_sizes must be [heads, 2], each side at least 0, or -1 for unbounded")
        # Past either length a side hides nothing, and sums fit.
        far = rows + keys
        left, right = (library.where(each < 0, far, each).clip(max=far)[:, None] for each in window_sizes.T)
        start, end = library.maximum(start, own - left), library.minimum(end, own + right + 1)
    start, end = (library.broadcast_to(each, _wider(start.shape, end.shape))[:, :, None] for each in (start, end))
    return _int32(start), _int32(end)


def _wider(first: Any, second: Any) -> Tuple[int, ...]:
    return tuple(max(pair) for pair in zip(first, second))


def _int32(array: Any) -> Any:
    return array.int() if is_torch(array) else array.astype("int32")


def _document_ends(ids: Any) -> Tuple[Any, Any]:
    """Of each place in [B, S]: where its document begins and ends."""
    if is_torch(ids):
        import torch

        if bool((ids[:, 1:] < ids[:, :-1]).any()):
            raise ValueError("document_ids fall; they must not")
        ids = ids.contiguous()
        first, last = (torch.searchsorted(ids, ids, right=right, out_int32=True) for right in (False, True))
        return first, last
    import numpy

    if bool((ids[:, 1:] < ids[:, :-1]).any()):
        raise ValueError("document_ids fall; they must not")
    first, last = numpy.empty_like(ids), numpy.empty_like(ids)
    for n, own in enumerate(ids):
        first[n], last[n] = numpy.searchsorted(own, own, "left"), numpy.searchsorted(own, own, "right")
    return first, last


def _library_of(array: Any) -> Any:
    return sys.modules["torch"] if is_torch(array) else importlib.import_module("numpy")
