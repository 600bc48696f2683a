"""_tune.py: timing the ways to run a problem on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

from . import _native

_DEVICES = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True)
class TunedWay:
    """One way to run a problem, as `tune` found it.

    Args:
        kernel: the kernel's name.
        choice: the choice code of its tile.
        state: "timed", "not timed" (the limit of time came first), "wrong" or "failed".
        is_rule: whether it is the choice of the rules.
        seconds: the median time of a call; None where it was not timed.
        why: what was wrong or failed; "" otherwise.

    Raises:
        Nothing: any values are taken.

    Examples:
        >>> from flash_dmattn import TunedWay
        >>> TunedWay("mma.forward", "MMA_Forward_128x64_S2", "timed", True, 1e-3, "").is_rule
        True
    """

    kernel: str
    choice: str
    state: str
    is_rule: bool
    seconds: Optional[float]
    why: str


def _device_of(device: str) -> Tuple[int, int]:
    name, colon, index = device.partition(":")
    if name not in _DEVICES or (colon and not index.isdigit()) or (name == "cpu" and colon):
        raise ValueError(f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:N'")
    return _DEVICES[name], int(index or 0)


def _ways(found: _native._Tuned) -> Tuple[int, list[TunedWay]]:
    return found[0], [TunedWay(*row) for row in found[4]]


def tune(
    query: Sequence[int],
    key: Sequence[int],
    value: Optional[Sequence[int]] = None,
    *,
    backward: bool = False,
    is_causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    topk: int = 0,
    row_intervals: int = 0,
    block_mask: int = 0,
    tree: bool = False,
    seqused: bool = False,
    cached: bool = False,
    page_size: int = 0,
    page_start: bool = False,
    cache_batch_idx: bool = False,
    cache_leftpad: bool = False,
    new_keys: int = 0,
    rotary_dim: int = 0,
    dtype: str = "bfloat16",
    device: str = "cuda",
    seconds: float = 2.0,
    keep: bool = True,
) -> Tuple[int, list[TunedWay]]:
    """Times the ways to run attention of these shapes on a device, and keeps the best for the class of problems.

    Each way is checked against the choice of the rules, on random tensors that are allocated on the device and given
    back. Later calls of the class take what was kept, in every process of the user; FLASH_DMATTN_TUNE=0 ignores it.
    docs/tuning.md lists the classes. Lengths within a call, and those of a cache, fall from the longest to half of it.

    Args:
        query: the shape [B, Sq, H, D].
        key: the shape [B, Sk, Hkv, D]; of a cache, too, whose sequences have room for Sk keys.
        value: the shape [B, Sk, Hkv, Dv]; None: that of key.
        backward: the backward in place of the forward.
        is_causal: the causal mask, bottom-right aligned.
        window_size: keys to the left and right that a row sees; -1 = all.
        topk: W of a top-W mask by key intervals and its bias, causal; 0 = none.
        row_intervals: ranges of keys that a row sees, 1 to 4; 0 = none.
        block_mask: 64 or 128, the size of the blocks of a mask of them; 0 = none.
        tree: the rows are a draft whose bits say which of its keys they see.
        seqused: seqused_q and seqused_k are given. Beside a cache seqused_k takes the place of cache_seqlens.
        cached: key and value are a KV cache, as they are with any of the next six.
        page_size: rows of a page; 0: the cache is contiguous.
        page_start, cache_batch_idx, cache_leftpad: the call has such a tensor.
        new_keys: keys of each sequence that the call appends; 0 = none.
        rotary_dim: dims of query and new keys that turn; 0 = none.
        dtype: "bfloat16", "float16" or "float32".
        device: "cuda", "cuda:N" or "cpu".
        seconds: device time at most; compilation comes on top of it.
        keep: whether the result is kept.

    Returns:
        The number of the best way in the list, and the list. Way 0 is the choice of the rules, which stays the best
        unless another takes at least 1 % less time.

    Raises:
        ValueError: a shape, dtype or device is wrong.
        NotImplementedError: no kernel takes the problem.
        RuntimeError: the device is not there, or failed.

    Examples:
        >>> from flash_dmattn import tune
        >>> best, ways = tune((1, 64, 2, 32), (1, 64, 2, 32), dtype="float32", device="cpu", seconds=0.05, keep=False)
        >>> ways[0].is_rule
        True
    """
    shapes = [tuple(query), tuple(key), tuple(key if value is None else value)]
    for name, shape in zip(("query", "key", "value"), shapes):
        if len(shape) != 4:
            raise ValueError(f"{name} is a shape of {len(shape)} axes; it needs 4: [batch, seqlen, heads, head_dim]")
    (batch, rows, heads, head_dim), key_shape, value_shape = shapes
    if key_shape[0] != batch or key_shape[3] != head_dim or value_shape[:3] != key_shape[:3]:
        raise ValueError(f"query {shapes[0]}, key {key_shape} and value {value_shape} do not fit together")
    found = _native.tune(
        *_device_of(device),
        backward,
        dtype,
        batch,
        heads,
        key_shape[2],
        rows,
        key_shape[1],
        head_dim,
        value_shape[3],
        is_causal,
        *window_size,
        topk,
        seconds,
        keep,
        (row_intervals, block_mask, tree, seqused),
        (
            bool(cached or page_size or page_start or cache_batch_idx or cache_leftpad or new_keys or rotary_dim),
            page_size,
            new_keys,
            rotary_dim,
            page_start,
            cache_batch_idx,
            cache_leftpad,
        ),
    )
    return _ways(found)


def tune_gemm(
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    a_transposed: bool = False,
    b_transposed: bool = False,
    has_c: bool = False,
    dtype: str = "bfloat16",
    device: str = "cuda",
    seconds: float = 2.0,
    keep: bool = True,
) -> Tuple[int, list[TunedWay]]:
    """Times the ways to multiply matrices of these shapes, and keeps the best for later calls of `gemm`.

    Args:
        m: rows of a and out.
        n: columns of b and out.
        k: columns of a and rows of b.
        batch: products.
        a_transposed: a is the transposed view of contiguous memory: its columns are contiguous.
        b_transposed: the same of b.
        has_c: a third matrix is added, as where beta is not 0.
        dtype: "bfloat16" or "float16".
        device: "cuda" or "cuda:N".
        seconds: device time at most; compilation comes on top of it.
        keep: whether the result is kept.

    Returns:
        The number of the best way in the list, and the list, as `tune` gives them.

    Raises:
        ValueError: a number, dtype or device is wrong.
        NotImplementedError: no kernel takes the problem, as on the CPU.
        RuntimeError: the device is not there, or failed.

    Examples:
        >>> from flash_dmattn import tune_gemm
        >>> tune_gemm(64, 64, 64, device="cpu")
        Traceback (most recent call last):
            ...
        NotImplementedError: gemm runs on CUDA devices only, ...
    """
    return _ways(
        _native.tune_gemm(
            *_device_of(device), dtype, batch, m, n, k, not a_transposed, not b_transposed, has_c, seconds, keep
        )
    )


def tune_softmax(
    rows: int,
    columns: int,
    *,
    backward: bool = False,
    log: bool = False,
    masked: bool = False,
    dtype: str = "bfloat16",
    device: str = "cuda",
    seconds: float = 2.0,
    keep: bool = True,
) -> Tuple[int, list[TunedWay]]:
    """Times the ways to make softmax along rows of these shapes, and keeps the best for later calls of `softmax`.

    Args:
        rows: rows of x: the product of all axes but the last.
        columns: elements of a row.
        backward: the backward in place of the forward.
        log: log-softmax.
        masked: a mask of x's shape, in the forward.
        dtype: "bfloat16", "float16" or "float32".
        device: "cuda" or "cuda:N".
        seconds: device time at most; compilation comes on top of it.
        keep: whether the result is kept.

    Returns:
        The number of the best way in the list, and the list, as `tune` gives them.

    Raises:
        ValueError: a number, dtype or device is wrong.
        NotImplementedError: no kernel takes the problem, as on the CPU.
        RuntimeError: the device is not there, or failed.

    Examples:
        >>> from flash_dmattn import tune_softmax
        >>> tune_softmax(64, 64, device="cpu")
        Traceback (most recent call last):
            ...
        NotImplementedError: softmax runs on CUDA devices only, ...
    """
    return _ways(
        _native.tune_softmax(*_device_of(device), backward, dtype, rows, columns, log, masked, seconds, keep)
    )
