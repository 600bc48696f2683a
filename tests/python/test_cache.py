"""Attention on KV caches: pages, lengths, appending, rotary embeddings, against float64 and against contiguous calls."""

from __future__ import annotations

import copy
import itertools
import mmap
import sys
import threading
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest

from flash_dmattn import _arguments, append_kv_cache, attention, flash_dmattn_with_kvcache_func

HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 24, 16


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = True, first: int = 0) -> np.ndarray:
    """One sequence in float64: q [Sq, H, D], k [Sk, Hkv, D], v [Sk, Hkv, Dv]."""
    rows, keys, group = len(q), len(k), q.shape[1] // k.shape[1] if len(k) else 1
    out = np.zeros((rows, q.shape[1], v.shape[-1]))
    for h, i in itertools.product(range(q.shape[1]), range(rows)):
        last = keys - rows + i + 1 if causal else keys
        if last <= first:
            continue
        scores = k[first:last, h // group].astype(np.float64) @ q[i, h].astype(np.float64) / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max())
        out[i, h] = weights @ v[first:last, h // group].astype(np.float64) / weights.sum()
    return out


class Pool:
    """Pages of a cache full of NaN, handed out in a random order, K and V laid out in one of a few ways."""

    def __init__(self, rng: np.random.Generator, pages: int, page: int, layout: str, dtype: Any = np.float32) -> None:
        self.page, self.free = page, list(rng.permutation(pages))
        nan = np.array(np.nan, dtype)
        if layout == "NHD":
            self.k = np.full((pages, page, HEADS_KV, DIM), nan)
            self.v = np.full((pages, page, HEADS_KV, DIM_V), nan)
        elif layout == "HND":
            self.k = np.full((pages, HEADS_KV, page, DIM), nan).transpose(0, 2, 1, 3)
            self.v = np.full((pages, HEADS_KV, page, DIM_V), nan).transpose(0, 2, 1, 3)
        else:  # K and V in one tensor, two layers inside a page
            both = np.full((pages, 2, HEADS_KV, page, DIM + DIM_V), nan)[:, 1].transpose(0, 2, 1, 3)
            self.k, self.v = both[..., :DIM], both[..., DIM:]

    def take(self, count: int) -> List[int]:
        return [int(self.free.pop()) for _ in range(count)]

    def write(self, pages: List[int], k: np.ndarray, v: np.ndarray, first: int = 0) -> None:
        for j in range(first, len(k)):
            self.k[pages[j // self.page], j % self.page] = k[j]
            self.v[pages[j // self.page], j % self.page] = v[j]


def table_of(lists: List[List[int]], columns: int, dtype: Any, garbage: int = -7) -> np.ndarray:
    table = np.full((len(lists), columns), garbage, dtype)
    for row, pages in zip(table, lists):
        row[: len(pages)] = pages
    return table


def lengths_of(lengths: Any) -> np.ndarray:
    return np.array(lengths, np.int32)


# ---- equal bits ----------------------------------------------------------------------------------------------------


def test_levels_of_equal_bits_and_splits() -> None:
    """fdm-checks invariance draws such calls in C; here the arguments reach it."""
    rng, room = rng_of(2), 4096
    k, v, q = normal(rng, 3, room, HEADS_KV, DIM), normal(rng, 3, room, HEADS_KV, DIM_V), normal(rng, 3, 8, HEADS, DIM)
    lengths = lengths_of([3000, 70, 4096])

    def call(rows: slice, batch: int = 3, used: np.ndarray = lengths, **options: Any) -> np.ndarray:
        which = slice(batch)
        return flash_dmattn_with_kvcache_func(
            q[which, rows], k[which], v[which], cache_seqlens=used[which], **options
        )  # fmt: skip

    one, every = slice(7, 8), slice(0, 8)
    alone = call(one, batch=1, invariance=1, max_seqlen_k=3000)
    assert (call(one, invariance=1)[:1] == alone).all()
    split = {n: call(one, num_splits=n) for n in (1, 4)}
    assert (split[1] != split[4]).any()
    np.testing.assert_allclose(split[1], split[4], atol=1e-5)
    assert (call(one, split_keys=room) == split[1]).all() and (call(one, split_keys=1024) != split[1]).any()
    whole, parts = call(every, invariance=2), [call(slice(n, n + 1), used=lengths - 7 + n, invariance=2) for n in range(8)]
    assert (np.concatenate(parts, 1) == whole).all()


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"invariance": 3}, "invariance is 3; it must be 0, 1 or 2"),
        ({"num_splits": -1}, "num_splits is -1"),
        ({"split_keys": 100}, "split_keys 100; they are at least 0, split_keys is a multiple of 64"),
        ({"num_splits": 2, "split_keys": 64}, "only one of them is above 0"),
        ({"invariance": 2, "num_splits": 2}, "beside invariance 2, which splits no keys"),
    ],
)
def test_wrong_levels_and_splits(options: Dict[str, int], sentence: str) -> None:
    cache = np.zeros((1, 64, 1, 8), np.float32)
    with pytest.raises(ValueError, match=sentence):
        flash_dmattn_with_kvcache_func(cache[:, :1], cache, cache, **options)


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 2, 3, 5, 8, 16, 48, 64, 100, 128, 256, 512])
@pytest.mark.parametrize("layout", ["NHD", "HND", "fused"])
@pytest.mark.parametrize("rows", [1, 33])
def test_pages_of_any_size_hold_nan_where_no_key_is(page: int, layout: str, rows: int) -> None:
    rng, lengths = rng_of(page), [0, 1, page, page + 1, 75, 260]
    need = [-(-n // page) for n in lengths]
    pool = Pool(rng, sum(need) + 3, page, layout)
    keys = [(normal(rng, n, HEADS_KV, DIM), normal(rng, n, HEADS_KV, DIM_V)) for n in lengths]
    lists = [pool.take(n) for n in need]
    for pages, (k, v) in zip(lists, keys):
        pool.write(pages, k, v)
    q = normal(rng, len(lengths), rows, HEADS, DIM)
    table = table_of(lists, max(need) + 2, np.int64 if page % 2 else np.int32)
    flat = np.array([page_number for pages in lists for page_number in pages] or [0], np.int32)
    starts = np.cumsum([0, *need]).astype(np.int64)
    call = {"cache_seqlens": lengths_of(lengths), "return_lse": True}
    out, lse = flash_dmattn_with_kvcache_func(q, pool.k, pool.v, block_table=table, **call)
    ragged, _ = flash_dmattn_with_kvcache_func(
        q, pool.k, pool.v, block_table=flat, page_start=starts, max_seqlen_k=table.shape[1] * page, **call
    )
    for b, (k, v) in enumerate(keys):
        np.testing.assert_allclose(out[b], dense(q[b], k, v), atol=2e-5)
    assert np.isposinf(lse[0]).all() and (out[0] == 0).all()
    assert (out == ragged).all()


@pytest.mark.parametrize("family", ["reference", "cpu"])
@pytest.mark.parametrize("rows", [1, 40])
def test_paged_and_contiguous_calls_give_the_same_bits(family: str, rows: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(_arguments, "forced_family", family)
    rng, page, lengths, room = rng_of(5), 16, [300, 17, 160, 1], 320
    pool = Pool(rng, 4 * room // page, page, "NHD")
    k, v = np.full((4, room, HEADS_KV, DIM), np.nan, np.float32), np.full((4, room, HEADS_KV, DIM_V), np.nan, np.float32)
    lists = []
    for b, n in enumerate(lengths):
        k[b, :n], v[b, :n] = normal(rng, n, HEADS_KV, DIM), normal(rng, n, HEADS_KV, DIM_V)
        lists.append(pool.take(-(-n // page)))
        pool.write(lists[-1], k[b, :n], v[b, :n])
    q, used = normal(rng, 4, rows, HEADS, DIM), lengths_of(lengths)
    table = table_of(lists, room // page, np.int32)
    strided = np.full((4, 3 * room // page), 99, np.int32)[:, ::3]
    strided[:] = table
    contiguous = flash_dmattn_with_kvcache_func(q, k, v, cache_seqlens=used)
    for each in (table, strided):
        assert (flash_dmattn_with_kvcache_func(q, pool.k, pool.v, cache_seqlens=used, block_table=each) == contiguous).all()
    order = np.array([2, 0, 3, 1], np.int32)
    picked = flash_dmattn_with_kvcache_func(
        q[order], pool.k, pool.v, cache_seqlens=used[order], block_table=table, cache_batch_idx=order
    )
    assert (picked == contiguous[order]).all()
    if family == "reference":  # a call on pages is the call on the gathered rows, bit for bit
        for b, n in enumerate(lengths):
            alone = attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], is_causal=True)
            assert (alone[0] == contiguous[b]).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_values_that_are_the_first_columns_of_keys(rows: int, monkeypatch: Any) -> None:
    """A latent cache: v = k[..., :512] of the same pages."""
    monkeypatch.setattr(_arguments, "forced_family", "reference")  # the CPU's kernels end at head dim 256
    torch = pytest.importorskip("torch")
    rng, lengths, page, heads = rng_of(17), [40, 0, 5, -1], 16, 16
    cache = torch.full((9, page, 1, 576), float("nan"))
    table = table_of([[7, 2, 4], [], [0], []], 3, np.int32)
    keys = [normal(rng, max(n, 0), 1, 576) for n in lengths]
    for pages, k in zip(table, keys):
        for j in range(len(k)):
            cache[pages[j // page], j % page] = torch.from_numpy(k[j])
    q = normal(rng, 4, rows, heads, 576)
    out = flash_dmattn_with_kvcache_func(
        torch.from_numpy(q), cache, cache[..., :512],
        cache_seqlens=torch.from_numpy(lengths_of(lengths)), block_table=torch.from_numpy(table),
    )  # fmt: skip
    for b, k in enumerate(keys):
        np.testing.assert_allclose(out[b].numpy(), dense(q[b], k, k[..., :512]), atol=2e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="memory that takes no room until it is touched is Linux's here")
def test_offsets_beyond_32_bits() -> None:
    """Pages whose elements and bytes are numbered beyond 2**31 and 2**32: memory that is only there where it is touched."""
    page, pages, step = 16, 5, 1 << 31  # bytes from page to page
    memory = mmap.mmap(-1, pages * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    whole = np.frombuffer(memory, np.float32)
    strides = (step, HEADS_KV * 64 * 4, 64 * 4, 4)
    both = np.lib.stride_tricks.as_strided(whole, (pages, page, HEADS_KV, 64), strides)
    rng = rng_of(3)
    k, v = normal(rng, 3 * page, HEADS_KV, DIM), normal(rng, 3 * page, HEADS_KV, DIM_V)
    order, table = [4, 0, 3], np.array([[4, 0, 3]], np.int32)
    for j in range(3 * page):
        both[order[j // page], j % page, :, :DIM] = k[j]
        both[order[j // page], j % page, :, DIM : DIM + DIM_V] = v[j]
    for rows in (1, 40):
        q = normal(rng, 1, rows, HEADS, DIM)
        out = flash_dmattn_with_kvcache_func(q, both[..., :DIM], both[..., DIM : DIM + DIM_V], block_table=table)
        np.testing.assert_allclose(out[0], dense(q[0], k, v), atol=2e-5)


# ---- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 20])
def test_lengths_beyond_the_room_and_below_zero(rows: int) -> None:
    rng, room = rng_of(9), 24
    k, v = normal(rng, 6, room, HEADS_KV, DIM), normal(rng, 6, room, HEADS_KV, DIM_V)
    q = normal(rng, 6, rows, HEADS, DIM)
    lengths = lengths_of([-1, 0, room, room + 1, 2**31 - 1, -(2**31)])
    out, lse = flash_dmattn_with_kvcache_func(q, k, v, cache_seqlens=lengths, return_lse=True)
    for b, n in enumerate([0, 0, room, room, room, 0]):
        np.testing.assert_allclose(out[b], dense(q[b], k[b, :n], v[b, :n]), atol=2e-5)
        assert np.isposinf(lse[b]).all() == (n == 0)
    new = normal(rng, 6, 3, HEADS_KV, DIM), normal(rng, 6, 3, HEADS_KV, DIM_V)
    before = k.copy()
    flash_dmattn_with_kvcache_func(q, k, v, *new, cache_seqlens=lengths_of([-1, room, room - 1, room + 5, 2**31 - 1, -9]))
    assert (k[2, room - 1] == new[0][2, 0]).all()  # the others had no room, or were no sequences
    before[2, room - 1] = new[0][2, 0]
    assert (k == before).all()


def test_nothing_at_all() -> None:
    k, v = np.zeros((0, 4, HEADS_KV, DIM), np.float32), np.zeros((0, 4, HEADS_KV, DIM_V), np.float32)
    for batch, rows, columns in ((0, 1, 3), (2, 0, 3), (2, 3, 0), (2, 3, 5)):
        q, table = np.ones((batch, rows, HEADS, DIM), np.float32), np.full((batch, columns), -1, np.int32)
        out = flash_dmattn_with_kvcache_func(q, k, v, block_table=table, cache_seqlens=np.zeros(batch, np.int32))
        assert out.shape == (batch, rows, HEADS, DIM_V) and (out == 0).all()


def test_left_padding_hides_keys_and_moves_no_position() -> None:
    rng, first, lengths = rng_of(4), [0, 3, 10, 40], [20, 20, 20, 20]
    k, v = normal(rng, 4, 20, HEADS_KV, DIM), normal(rng, 4, 20, HEADS_KV, DIM_V)
    for b, n in enumerate(first):
        k[b, :n], v[b, :n] = np.nan, np.inf
    for rows in (2, 30):
        q = normal(rng, 4, rows, HEADS, DIM)
        out = flash_dmattn_with_kvcache_func(q, k, v, cache_seqlens=lengths_of(lengths), cache_leftpad=lengths_of(first))
        for b, n in enumerate(first):
            np.testing.assert_allclose(out[b], dense(q[b], k[b], v[b], first=n), atol=2e-5)


def test_packed_mixes_with_rows_of_no_sequence() -> None:
    rng, page = rng_of(8), 8
    counts, lengths = [1, 0, 1, 70, 5], [90, 12, 3, 130, 5]
    pool = Pool(rng, 60, page, "HND")
    keys = [(normal(rng, n, HEADS_KV, DIM), normal(rng, n, HEADS_KV, DIM_V)) for n in lengths]
    lists = [pool.take(-(-n // page)) for n in lengths]
    for pages, (k, v) in zip(lists, keys):
        pool.write(pages, k, v)
    total = sum(counts) + 6
    q = np.full((total, HEADS, DIM), np.nan, np.float32)
    q[: sum(counts)] = normal(rng, sum(counts), HEADS, DIM)
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    out, lse = flash_dmattn_with_kvcache_func(
        *(q, pool.k, pool.v),
        **{"cu_seqlens_q": offsets, "cache_seqlens": lengths_of(lengths), "block_table": table_of(lists, 17, np.int32)},
        return_lse=True,
    )
    for b, (k, v) in enumerate(keys):
        rows = slice(offsets[b], offsets[b + 1])
        np.testing.assert_allclose(out[rows], dense(q[rows], k, v), atol=2e-5)
    assert (out[sum(counts) :] == 0).all() and np.isposinf(lse[:, sum(counts) :]).all()


def test_masks_and_biases_count_keys_of_the_sequence() -> None:
    rng, page, lengths = rng_of(2), 4, [11, 30]
    pool = Pool(rng, 20, page, "NHD")
    keys = [(normal(rng, n, HEADS_KV, DIM), normal(rng, n, HEADS_KV, DIM_V)) for n in lengths]
    lists = [pool.take(-(-n // page)) for n in lengths]
    for pages, (k, v) in zip(lists, keys):
        pool.write(pages, k, v)
    for rows in (1, 21):
        q = normal(rng, 2, rows, HEADS, DIM)
        mask, bias = rng.random((2, 1, rows, 32)) < 0.6, normal(rng, 1, HEADS, rows, 32)
        out = flash_dmattn_with_kvcache_func(
            *(q, pool.k, pool.v),
            **{"cache_seqlens": lengths_of(lengths), "block_table": table_of(lists, 8, np.int32), "window_size": (20, 0)},
            attn_mask=mask,
            attn_bias=bias,
            is_causal=False,
        )
        for b, n in enumerate(lengths):
            alone = attention(
                *(q[b : b + 1], keys[b][0][None], keys[b][1][None]),
                attn_mask=mask[b : b + 1, ..., :n],
                attn_bias=bias[..., :n],
                window_size=(20, 0),
            )
            np.testing.assert_allclose(out[b], alone[0], atol=2e-5)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_row_intervals_count_keys_of_the_sequence(library: str) -> None:
    """Two ranges a row beside pages: as a dense mask of the same pairs; the last key is appended by the call."""
    of = np.asarray if library == "numpy" else pytest.importorskip("torch").from_numpy
    rng, page, lengths, rows = rng_of(3), 4, [11, 30], 5
    pool = Pool(rng, 20, page, "NHD")
    keys = [(normal(rng, n, HEADS_KV, DIM), normal(rng, n, HEADS_KV, DIM_V)) for n in lengths]
    lists = [pool.take(-(-n // page)) for n in lengths]
    for pages, (k, v) in zip(lists, keys):
        pool.write(pages, k[:-1], v[:-1])
    new = [np.stack([pair[each][-1:] for pair in keys]) for each in range(2)]
    q = normal(rng, 2, rows, HEADS, DIM)
    start = rng.integers(-2, 30, (2, HEADS_KV, 2, rows), dtype=np.int32)
    end = start + rng.integers(-1, 12, start.shape, dtype=np.int32)
    start[0, 0, 0, 0], end[1, 1, 1, 2] = -(2**31), 2**31 - 1
    out = flash_dmattn_with_kvcache_func(
        *(of(each) for each in (q, pool.k, pool.v, *new)),
        cache_seqlens=of(lengths_of([n - 1 for n in lengths])),
        block_table=of(table_of(lists, 8, np.int32)),
        row_intervals=(of(start), of(end)),
    )
    for b, n in enumerate(lengths):
        key = np.arange(n)
        held = (start[b, ..., None] <= key) & (key < end[b, ..., None])
        mask = held.any(1).repeat(HEADS // HEADS_KV, 0)[None]
        alone = attention(*(q[b : b + 1], keys[b][0][None], keys[b][1][None]), attn_mask=mask, is_causal=True)
        np.testing.assert_allclose(out[b], alone[0], atol=2e-5)


# ---- rotary ----------------------------------------------------------------------------------------------------------


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, position: int, interleaved: bool) -> np.ndarray:
    """x [.., D] in float64."""
    position, pairs = min(max(position, 0), len(cos) - 1), cos.shape[1]
    x, out = x.astype(np.float64), x.astype(np.float64).copy()
    one = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    other = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    c, s = cos[position].astype(np.float64), sin[position].astype(np.float64)
    out[..., one], out[..., other] = x[..., one] * c - x[..., other] * s, x[..., one] * s + x[..., other] * c
    return out


def tables(pairs: int, positions: int) -> Tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] * 0.7 ** np.arange(pairs)[None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.parametrize("dims", [2, 12, 16, DIM])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows,added", [(1, 1), (5, 2), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(dims: int, interleaved: bool, rows: int, added: int, causal: bool) -> None:
    rng, lengths, start = rng_of(dims + rows), [0, 7, 50], [3, 0, 44]
    cos, sin = tables(dims // 2, 80)
    for given in (None, start):
        k, v = np.zeros((3, 96, HEADS_KV, DIM), np.float32), np.zeros((3, 96, HEADS_KV, DIM_V), np.float32)
        k[:], v[:] = normal(rng, 3, 96, HEADS_KV, DIM), normal(rng, 3, 96, HEADS_KV, DIM_V)
        q = normal(rng, 3, rows, HEADS, DIM)
        new = normal(rng, 3, added, HEADS_KV, DIM), normal(rng, 3, added, HEADS_KV, DIM_V)
        expected, values = k.astype(np.float64), v.copy()
        for b, n in enumerate(lengths):
            first = n if given is None else given[b]
            for t in range(added):
                expected[b, n + t] = turned(new[0][b, t], cos, sin, first + t, interleaved)
                values[b, n + t] = new[1][b, t]
        out = flash_dmattn_with_kvcache_func(
            *(q, k, v, *new),
            **{"cache_seqlens": lengths_of(lengths), "rotary": (cos, sin), "rotary_interleaved": interleaved},
            rotary_seqlens=None if given is None else lengths_of(given),
            is_causal=causal,
        )
        np.testing.assert_allclose(k, expected, atol=1e-6)
        assert (v == values).all()
        for b, n in enumerate(lengths):
            first = n if given is None else given[b]
            rotated = np.stack(
                [turned(q[b, i], cos, sin, first + (i if causal else 0), interleaved) for i in range(rows)]
            )
            np.testing.assert_allclose(out[b], dense(rotated, expected[b, : n + added], v[b, : n + added], causal), atol=3e-5)


def test_a_cached_and_a_fused_run_agree() -> None:
    """In bfloat16 what is turned is rounded once, so that a key is the same from the cache and from the call."""
    dtypes = pytest.importorskip("ml_dtypes")
    rng = rng_of(6)
    cos, sin = tables(8, 64)
    q, new, values = (normal(rng, 2, 3, h, DIM).astype(dtypes.bfloat16) for h in (HEADS, HEADS_KV, HEADS_KV))
    caches = [np.zeros((2, 32, HEADS_KV, DIM), dtypes.bfloat16) for _ in range(4)]
    lengths = lengths_of([4, 9])
    fused = flash_dmattn_with_kvcache_func(q, *caches[:2], new, values, cache_seqlens=lengths, rotary=(cos, sin))
    rotated = append_kv_cache(*caches[2:], new, values, cache_seqlens=lengths, rotary=(cos, sin), query=q)
    apart = flash_dmattn_with_kvcache_func(rotated, *caches[2:], cache_seqlens=lengths + 3)
    assert (fused == apart).all() and (caches[0] == caches[2]).all() and (caches[1] == caches[3]).all()


# ---- appending -------------------------------------------------------------------------------------------------------


def test_sequences_that_share_a_row_see_their_own_new_keys() -> None:
    rng, row = rng_of(1), np.zeros(3, np.int32)
    k, v = normal(rng, 1, 16, HEADS_KV, DIM), normal(rng, 1, 16, HEADS_KV, DIM_V)
    old_k, old_v = k.copy(), v.copy()
    q, new = normal(rng, 3, 1, HEADS, DIM), (normal(rng, 3, 1, HEADS_KV, DIM), normal(rng, 3, 1, HEADS_KV, DIM_V))
    out = flash_dmattn_with_kvcache_func(q, k, v, *new, cache_seqlens=lengths_of([8, 8, 8]), cache_batch_idx=row)
    for b in range(3):
        keys, values = np.concatenate([old_k[0, :8], new[0][b]]), np.concatenate([old_v[0, :8], new[1][b]])
        np.testing.assert_allclose(out[b], dense(q[b], keys, values), atol=2e-5)
    assert any((k[0, 8] == new[0][b, 0]).all() for b in range(3))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots(dtype: Any) -> None:
    rng, page, total = rng_of(2), 5, 9
    k, v = np.full((4, page, HEADS_KV, DIM), np.nan, np.float32), np.full((4, page, HEADS_KV, DIM_V), np.nan, np.float32)
    expected_k, expected_v = k.copy(), v.copy()
    new = normal(rng, total, HEADS_KV, DIM), normal(rng, total, HEADS_KV, DIM_V)
    slots, positions = np.array([3, -1, 19, 20, 7, 0, -(2**31), 2**31 - 1, 12], dtype), np.arange(total)[::-1].astype(dtype)
    cos, sin = tables(4, 6)
    q = normal(rng, total, HEADS, DIM)
    rotated = append_kv_cache(k, v, *new, slots=slots, positions=positions, rotary=(cos, sin), query=q)
    for t, slot in enumerate(slots):
        np.testing.assert_allclose(rotated[t], turned(q[t], cos, sin, int(positions[t]), False), atol=1e-6)
        if 0 <= slot < 4 * page:
            expected_k[slot // page, slot % page] = turned(new[0][t], cos, sin, int(positions[t]), False)
            expected_v[slot // page, slot % page] = new[1][t]
    np.testing.assert_allclose(k, expected_k, atol=1e-6)
    assert np.array_equal(v, expected_v, equal_nan=True)


class Machine:
    """Sequences that come, grow, fork and go, on pages that are used again; every step against float64 on a copy."""

    def __init__(self, seed: int) -> None:
        self.rng, self.page = rng_of(seed), int(rng_of(seed).choice([1, 3, 8, 16]))
        self.pool = Pool(self.rng, 400, self.page, str(self.rng.choice(["NHD", "HND", "fused"])))
        self.users: Dict[int, int] = {}
        self.sequences: List[Tuple[List[int], np.ndarray, np.ndarray]] = []

    def admit(self) -> None:
        empty = np.zeros((0, HEADS_KV, DIM), np.float32), np.zeros((0, HEADS_KV, DIM_V), np.float32)
        self.sequences.append(([], *empty))

    def fork(self) -> None:
        """The pages that are full are shared; the last one is copied."""
        pages, k, v = self.sequences[int(self.rng.integers(len(self.sequences)))]
        whole = len(k) // self.page
        copy = pages[:whole] + self.pool.take(len(pages) - whole)
        for page in copy:
            self.users[page] = self.users.get(page, 0) + 1
        self.pool.write(copy, k, v, whole * self.page)
        self.sequences.append((copy, k.copy(), v.copy()))

    def evict(self) -> None:
        pages, _, _ = self.sequences.pop(int(self.rng.integers(len(self.sequences))))
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.pool.free.insert(0, page)

    def step(self) -> None:
        counts = [int(self.rng.choice([0, 1, 1, 1, 2, 17])) for _ in self.sequences]
        new = normal(self.rng, sum(counts), HEADS_KV, DIM), normal(self.rng, sum(counts), HEADS_KV, DIM_V)
        q, offsets = normal(self.rng, sum(counts), HEADS, DIM), np.cumsum([0, *counts]).astype(np.int32)
        lengths = lengths_of([len(k) for _, k, _ in self.sequences])
        for b, (pages, k, v) in enumerate(self.sequences):
            rows = slice(offsets[b], offsets[b + 1])
            k, v = np.concatenate([k, new[0][rows]]), np.concatenate([v, new[1][rows]])
            for page in self.pool.take(-(-len(k) // self.page) - len(pages)):
                pages.append(page)
                self.users[page] = 1
            self.sequences[b] = pages, k, v
        columns = max((len(pages) for pages, _, _ in self.sequences), default=0) + 1
        table = table_of([pages for pages, _, _ in self.sequences], columns, np.int32, 10**6)
        out = flash_dmattn_with_kvcache_func(
            *(q, self.pool.k, self.pool.v, *new),
            **{"cache_seqlens": lengths, "block_table": table, "cu_seqlens_q": offsets, "cu_seqlens_new": offsets},
        )
        for b, (_, k, v) in enumerate(self.sequences):
            rows = slice(offsets[b], offsets[b + 1])
            np.testing.assert_allclose(out[rows], dense(q[rows], k, v), atol=3e-5)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            kind = self.rng.random()
            if len(self.sequences) < 2 or (kind < 0.3 and len(self.pool.free) > 200):
                self.admit()
            elif kind < 0.4 and len(self.pool.free) > 200:
                self.fork()
            elif kind < 0.6 or len(self.pool.free) < 150 or len(self.sequences) > 8:
                self.evict()
            self.step()


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_admits_forks_and_evicts(seed: int) -> None:
    Machine(seed).run(100)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def _call(**changed: Any) -> Any:
    given: Dict[str, Any] = {
        "query": np.zeros((2, 1, HEADS, DIM), np.float32),
        "key_cache": np.zeros((8, 4, HEADS_KV, DIM), np.float32),
        "value_cache": np.zeros((8, 4, HEADS_KV, DIM_V), np.float32),
        "block_table": np.zeros((2, 3), np.int32),
        "cache_seqlens": lengths_of([4, 9]),
    }
    given.update(changed)
    return flash_dmattn_with_kvcache_func(**given)


NEW = np.zeros((2, 1, HEADS_KV, DIM), np.float32), np.zeros((2, 1, HEADS_KV, DIM_V), np.float32)
TABLES = tables(4, 10)


@pytest.mark.parametrize(
    "changed,words",
    [
        ({"block_table": np.array([[0, 0, 0], [0, 8, 0]])}, "sequence 1 holds page 8 in column 1; the cache has 8 pages"),
        ({"block_table": np.array([[-1, 0, 0], [0, 0, 0]])}, "sequence 0 holds page -1 in column 0"),
        ({"block_table": np.array([[0, 0, 0], [0, 0, 2**31]])}, "holds page 2147483648"),
        ({"block_table": np.zeros((3, 3), np.int32)}, "block_table has extent 3 on axis 0; it must be the batch 2"),
        ({"block_table": np.zeros((2, 3), np.float32)}, "block_table is float32; it must be int32"),
        ({"block_table": np.zeros(5, np.int32)}, "block_table has 1 axes; it needs 2"),
        ({"cache_batch_idx": lengths_of([0, 2])}, "cache_row of sequence 1 is 2; there are 2 rows"),
        ({"block_table": np.zeros(5, np.int32), "page_start": lengths_of([0, 9])}, "page_start of sequence 1 is 9"),
        ({"block_table": None, "page_start": lengths_of([0, 1])}, "page_start is given, but block_table is not"),
        ({"block_table": None}, "k has extent 8 on axis 0; it must be the batch 2"),
        ({"cache_seqlens": np.array([4, 9])}, "cache_seqlens is int64; the library takes"),
        ({"cache_seqlens": lengths_of([4])}, r"lengths has shape \[1\]; it must be \[2\]"),
        ({"seqused_k": lengths_of([4, 9])}, "lengths and seqused_k are both given"),
        ({"key": NEW[0]}, "v_new is missing"),
        ({"key": NEW[0], "value": NEW[1], "cache_seqlens": None}, "k_new is given without lengths"),
        ({"key": NEW[0][:1], "value": NEW[1]}, r"k_new has shape \[1, 1, 2, 24\]; it must be \[2, 1, 2, 24\]"),
        ({"cu_seqlens_new": lengths_of([0, 1, 2])}, "cu_seqlens_new is given, but k_new and v_new are not"),
        ({"rotary": (TABLES[0], TABLES[1][:5])}, "rotary_sin has shape"),
        ({"rotary": tables(13, 4)}, "from 1 to 12 pairs of dims"),
        ({"rotary": TABLES[0]}, "rotary is .*; it must be a pair"),
        ({"rotary_seqlens": lengths_of([1, 1])}, "rotary_start is given, but rotary_cos and rotary_sin are not"),
        ({"query": np.zeros((2, HEADS, DIM), np.float32)}, "query has 3 axes; it needs 4"),
        ({"value_cache": np.zeros((8, 5, HEADS_KV, DIM_V), np.float32)}, "v has shape"),
        ({"key_cache": np.zeros((8, 4, HEADS_KV, DIM), np.float64)}, "k is float64; it must be float32"),
        ({"out": np.zeros((2, 1, HEADS, DIM), np.float32)}, "out has shape"),
    ],
)
def test_refusals(changed: Dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        _call(**changed)
    assert "\n" not in str(caught.value)


def test_a_cache_that_overlaps_what_is_read_is_refused() -> None:
    both = np.zeros((8, 4, HEADS_KV, DIM), np.float32)
    _call(value_cache=both[..., :DIM_V], key_cache=both)  # read alone they may share memory
    with pytest.raises(ValueError, match="k overlaps v in memory"):
        _call(value_cache=both[..., :DIM_V], key_cache=both, key=NEW[0], value=NEW[1])
    read_only = both.copy()
    read_only.flags.writeable = False
    _call(key_cache=read_only)
    with pytest.raises(ValueError, match="key_cache is read-only"):
        _call(key_cache=read_only, key=NEW[0], value=NEW[1])


@pytest.mark.parametrize(
    "changed,words",
    [
        ({"cache_seqlens": None}, "lengths is NULL; appending needs to know where each sequence ends, or slots"),
        ({"slots": np.zeros(2, np.int32)}, "block_table is given beside slots|lengths is given beside slots"),
        ({"query": np.zeros((2, 1, HEADS, DIM), np.float32)}, "q is given, but rotary_cos and rotary_sin are not"),
        ({"positions": np.zeros(2, np.int32)}, "positions are given, but rotary_cos and rotary_sin are not"),
        ({"positions": np.zeros(3, np.int32), "rotary": TABLES}, r"positions has shape \[3\]; it must be \[2\]"),
        ({"block_table": np.full((2, 3), 9, np.int32)}, "holds page 9 in column"),
    ],
)
def test_refusals_of_appending(changed: Dict[str, Any], words: str) -> None:
    given: Dict[str, Any] = {"cache_seqlens": lengths_of([1, 2]), "block_table": np.zeros((2, 3), np.int32)}
    given.update(changed)
    caches = np.zeros((8, 4, HEADS_KV, DIM), np.float32), np.zeros((8, 4, HEADS_KV, DIM_V), np.float32)
    with pytest.raises(ValueError, match=words):
        append_kv_cache(*caches, *NEW, **given)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def _tensors(torch: Any, dtype: Any = None) -> Dict[str, Any]:
    torch.manual_seed(0)
    dtype = dtype or torch.float32
    return {
        "query": torch.randn(2, 3, HEADS, DIM, dtype=dtype),
        "key_cache": torch.randn(8, 4, HEADS_KV, DIM, dtype=dtype),
        "value_cache": torch.randn(8, 4, HEADS_KV, DIM_V, dtype=dtype),
        "key": torch.randn(2, 3, HEADS_KV, DIM, dtype=dtype),
        "value": torch.randn(2, 3, HEADS_KV, DIM_V, dtype=dtype),
        "cache_seqlens": torch.tensor([2, 7], dtype=torch.int32),
        "block_table": torch.tensor([[3, 1, 0], [5, 2, 7]]),
        "rotary": tuple(torch.from_numpy(each).to(dtype) for each in tables(6, 20)),
    }


def test_torch_and_numpy_give_the_same_bits() -> None:
    torch = pytest.importorskip("torch")
    given = _tensors(torch)
    arrays = {
        name: tuple(each.numpy().copy() for each in value) if isinstance(value, tuple) else value.numpy().copy()
        for name, value in given.items()
    }
    out, lse = flash_dmattn_with_kvcache_func(**given, return_lse=True)
    expected, expected_lse = flash_dmattn_with_kvcache_func(**arrays, return_lse=True)
    assert (out.numpy() == expected).all() and (lse.numpy() == expected_lse).all()
    assert (given["key_cache"].numpy() == arrays["key_cache"]).all()
    given["query"].requires_grad_()
    with pytest.raises(ValueError, match="query requires a gradient, but calls on a KV cache are forward only"):
        flash_dmattn_with_kvcache_func(**given)
    with torch.no_grad():
        flash_dmattn_with_kvcache_func(**given)


def _ways(torch: Any) -> Dict[str, Dict[str, Any]]:
    """Changes of _tensors() whose calls the extension takes whole."""
    ranges = torch.ones(2, 1, 1, 3, dtype=torch.int32), torch.full((2, 1, 1, 3), 9, dtype=torch.int32)
    packed = {"query": torch.randn(5, HEADS, DIM), "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)}
    new = {"key": torch.randn(4, HEADS_KV, DIM), "value": torch.randn(4, HEADS_KV, DIM_V)}
    read = {"key": None, "value": None, "rotary": None}
    tree = torch.tensor([[[1], [3], [5]]] * 2, dtype=torch.int32)
    return {
        "as they are": {},
        "lse": {"return_lse": True},
        "out": {"out": torch.empty(2, 3, HEADS, DIM_V), "return_lse": True},
        "float64": _tensors(torch, torch.float64) | {"return_lse": True},
        "parameters": {"query": torch.nn.Parameter(torch.randn(2, 3, HEADS, DIM), requires_grad=False)},
        "no appending": read,
        "no table": read | {"block_table": None, "key_cache": torch.randn(2, 9, HEADS_KV, DIM), "value_cache": torch.randn(2, 9, HEADS_KV, DIM_V)},
        "flat table": {"block_table": torch.tensor([3, 1, 0, 5, 2, 7]), "page_start": torch.tensor([0, 3])},
        "rows of the table": {"cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32)},
        "left padding": {"cache_leftpad": torch.tensor([1, 2], dtype=torch.int32)},
        "used": read | {"cache_seqlens": None, "seqused_k": torch.tensor([5, 7], dtype=torch.int32)},
        "used rows": {"seqused_q": torch.tensor([1, 3], dtype=torch.int32)},
        "packed": packed | {"max_seqlen_q": 3, "return_lse": True, "rotary": None},
        "packed keys": new | {"cu_seqlens_new": torch.tensor([0, 1, 4], dtype=torch.int32)},
        "turned": {"rotary_interleaved": True, "rotary_seqlens": torch.tensor([1, 2], dtype=torch.int32)},
        "mask": {"attn_mask": torch.arange(12).view(1, 1, 1, 12) % 3 != 1},
        "bias": {"attn_bias": torch.randn(1, HEADS, 3, 12)},
        "sink": {"sink": torch.randn(HEADS), "lse_without_sink": True, "return_lse": True},
        "ranges": {"row_intervals": ranges},
        "tree": {"tree": tree},
        "not causal": {"is_causal": False},
        "window": {"window_size": (2, None), "softmax_scale": 0.5, "softcap": 3.0, "max_seqlen_k": 9},
        "one part": {"num_splits": 1, "invariance": 1},
    }


# Two of the same, which must not write into each other's tensors.
def _both(torch: Any, name: str) -> List[Dict[str, Any]]:
    torch.manual_seed(1)
    changed = _ways(torch)[name]
    return [copy.deepcopy({**_tensors(torch), **changed}) for _ in range(2)]


WAYS = (
    *("as they are", "lse", "out", "float64", "parameters", "no appending", "no table", "flat table"),
    *("rows of the table", "left padding", "used", "used rows", "packed", "packed keys", "turned", "mask", "bias", "sink"),
    *("ranges", "tree", "not causal", "window", "one part"),
)


@pytest.mark.parametrize("name", WAYS)
def test_whole_calls_are_what_python_makes_of_them(name: str, monkeypatch: Any) -> None:
    """The extension takes ordinary calls on PyTorch's tensors as they are given. Python sees to the others."""
    torch = pytest.importorskip("torch")
    from flash_dmattn import _cache

    assert set(WAYS) == set(_ways(torch))
    flash_dmattn_with_kvcache_func(**_tensors(torch))  # PyTorch's functions are here from now on
    whole, apart = _both(torch, name)
    with monkeypatch.context() as patch:
        patch.setattr(_cache, "settings_of", None)  # which Python's way calls
        result = flash_dmattn_with_kvcache_func(**whole)
    monkeypatch.setattr(_cache, "is_compiling", lambda: True)
    expected = flash_dmattn_with_kvcache_func(**apart)
    assert (result is whole.get("out")) is (expected is apart.get("out"))
    pairs = [(result, expected)] if isinstance(expected, torch.Tensor) else list(zip(result, expected, strict=True))
    for each in ("key_cache", "value_cache", "out"):
        if each in whole:
            pairs.append((whole[each], apart[each]))
    for one, other in pairs:
        assert one.dtype is other.dtype and one.shape == other.shape and one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["as they are", "lse", "packed", "flat table", "turned", "slots", "no query", "into"])
def test_whole_appends_are_what_python_makes_of_them(name: str, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    from flash_dmattn import _cache

    append_kv_cache(**_tensors(torch))
    positions = {"slots": torch.tensor([3, -1, 31]), "positions": torch.tensor([4, 1, 0]), "query": torch.randn(3, HEADS, DIM)}
    new = {each: value[1] for each, value in _tensors(torch).items() if each in ("key", "value")}
    changes: Dict[str, Dict[str, Any]] = {
        "slots": positions | new | {"cache_seqlens": None, "block_table": None},
        "no query": {"query": None, "rotary": None},
        "into": {"query_out": torch.empty(2, 3, HEADS, DIM)},
        "packed": {"query": torch.randn(5, HEADS, DIM), "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
        "lse": {"query": torch.randn(2, HEADS, 3, DIM).transpose(1, 2)},
    }
    whole, apart = _both(torch, name if name in ("as they are", "flat table", "turned") else "as they are")
    for given in (whole, apart):
        given.update(copy.deepcopy(changes.get(name, {})))
    with monkeypatch.context() as patch:
        patch.setattr(_cache, "rotary_pair", None)
        result = append_kv_cache(**whole)
    monkeypatch.setattr(_cache, "is_compiling", lambda: True)
    expected = append_kv_cache(**apart)
    assert (result is None) is (expected is None) is (name == "no query")
    assert (result is whole.get("query_out", 0)) is (name == "into")
    if result is not None:
        assert result.stride() == expected.stride() and torch.equal(result, expected)
    assert all(torch.equal(whole[each], apart[each]) for each in ("key_cache", "value_cache"))


def _wrong_ways(torch: Any) -> List[Dict[str, Any]]:
    """Changes of _tensors() that one of the two ways, or both, refuse."""
    x = torch.randn
    return [
        {"query": x(3, HEADS, DIM)},
        {"query": x(2, 3, HEADS, DIM).int()},
        {"query": x(2, 3, HEADS, DIM).to_sparse()},
        {"query": x(2, 3, HEADS, DIM, requires_grad=True)},
        {"rotary": (x(20, 6, requires_grad=True), x(20, 6))},
        {"query": x(2, 3, 3, DIM)},
        {"query": x(2, 3, HEADS, DIM).half()},
        {"key_cache": None},
        {"value_cache": x(8, 4, HEADS_KV)},
        {"key": None},
        {"cache_seqlens": [2, 7]},
        {"cache_seqlens": torch.tensor([2, 7])},
        {"cache_seqlens": None},
        {"block_table": torch.full((2, 3), 9)},
        {"block_table": torch.zeros(2, 3)},
        {"attn_mask": torch.ones(1, 1, 1, 12, dtype=torch.uint8)},
        {"attn_mask": torch.ones(12, dtype=torch.bool)},
        {"attn_bias": torch.ones(1, 1, 1, 12, dtype=torch.bool)},
        {"attn_bias": x(1, 1, 1, 7)},
        {"row_intervals": torch.ones(2)},
        {"row_intervals": (torch.ones(2, dtype=torch.int32), None)},
        {"rotary": x(20, 6)},
        {"rotary": (x(20, 6), None)},
        {"window_size": 3},
        {"window_size": None},
        {"window_size": (-2, 0)},
        {"window_size": ("1", 0)},
        {"softcap": -1.0},
        {"softcap": "no"},
        {"softmax_scale": float("nan")},
        {"softmax_scale": True},
        {"is_causal": 2},
        {"is_causal": 0.5},
        {"max_seqlen_k": 2**70},
        {"max_seqlen_q": 1.5},
        {"invariance": 3},
        {"num_splits": 2, "split_keys": 64},
        {"split_keys": None},
        {"return_lse": "yes"},
        {"rotary_interleaved": 2},
        {"lse_without_sink": 5},
        {"out": torch.empty(2, 3, HEADS, DIM)},
        {"out": torch.empty(2, 3, HEADS, DIM_V).half()},
        {"out": torch.empty(2, 3, HEADS, DIM_V, requires_grad=True)},
        {"out": 3},
        {"tree": torch.ones(2, 3, 1, dtype=torch.int32), "is_causal": True},
    ]


@pytest.mark.parametrize("number", range(46))
def test_whole_calls_are_refused_as_python_refuses_them(number: int, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    from flash_dmattn import _cache

    assert len(_wrong_ways(torch)) == 46
    flash_dmattn_with_kvcache_func(**_tensors(torch))
    sentences = []
    for _ in range(2):
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            flash_dmattn_with_kvcache_func(**{**_tensors(torch), **_wrong_ways(torch)[number]})
        sentences.append((caught.type, str(caught.value)))
        monkeypatch.setattr(_cache, "is_compiling", lambda: True)
    assert sentences[0] == sentences[1]


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": 0, "max_seqlen_k": np.int64(9), "window_size": [2, 0]},
        {"softmax_scale": 1, "softcap": np.float32(3)},
        {"return_lse": np.bool_(False), "invariance": True},
        {"row_intervals": None, "attn_mask": np.arange(24).reshape(2, 12) % 3 != 1},
    ],
    ids=str,
)
def test_numbers_of_other_types_go_the_long_way(options: Dict[str, Any], monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    from flash_dmattn import _cache

    results = []
    for _ in range(2):
        given = {each: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for each, value in options.items()}
        results.append(flash_dmattn_with_kvcache_func(**_tensors(torch), **given))
        monkeypatch.setattr(_cache, "is_compiling", lambda: True)
    assert torch.equal(*results)


def test_what_watches_a_call_sees_the_operator() -> None:
    torch = pytest.importorskip("torch")
    with torch.autograd.profiler.profile() as profile:
        flash_dmattn_with_kvcache_func(**_tensors(torch))
        append_kv_cache(**_tensors(torch))
    names = {event.name for event in profile.function_events}
    assert {"flash_dmattn::forward_with_cache", "flash_dmattn::cache_append"} <= names


def _negated(value: Any) -> Any:
    """The same numbers as a view of their opposites; of every tensor in a pair."""
    torch = pytest.importorskip("torch")
    return tuple(map(_negated, value)) if isinstance(value, tuple) else torch._neg_view(-value)


READ_BY_A_CALL = ("query", "key", "value", "cache_seqlens", "block_table", "rotary", "attn_bias", "sink", "row_intervals")


@pytest.mark.parametrize("name", READ_BY_A_CALL)
def test_negated_views_are_read_by_their_numbers(name: str) -> None:
    torch = pytest.importorskip("torch")
    read = {"attn_bias": torch.randn(1, HEADS, 1, 12), "sink": torch.randn(HEADS)}
    read["row_intervals"] = torch.ones(2, 1, 1, 3, dtype=torch.int32), torch.full((2, 1, 1, 3), 9, dtype=torch.int32)
    for out in (False, True):
        plain, given = ({**_tensors(torch), **read} for _ in range(2))
        given[name] = _negated(given[name])
        results = {"out": torch.empty(2, 3, HEADS, DIM_V)} if out else {}
        expected = flash_dmattn_with_kvcache_func(**plain)
        assert torch.equal(flash_dmattn_with_kvcache_func(**given, **results), expected)
        assert all(torch.equal(given[each], plain[each]) for each in ("key_cache", "value_cache"))


@pytest.mark.parametrize("name", ("query", "key", "value", "cache_seqlens", "block_table", "rotary"))
def test_negated_views_are_appended_by_their_numbers(name: str) -> None:
    torch = pytest.importorskip("torch")
    plain, given = _tensors(torch), _tensors(torch)
    given[name] = _negated(given[name])
    assert torch.equal(append_kv_cache(**given), append_kv_cache(**plain))
    assert all(torch.equal(given[each], plain[each]) for each in ("key_cache", "value_cache"))


@pytest.mark.parametrize("name", ("key_cache", "value_cache", "out"))
def test_negated_views_are_not_written(name: str) -> None:
    torch = pytest.importorskip("torch")
    given = {**_tensors(torch), "out": torch.zeros(2, 3, HEADS, DIM_V)}
    calls = [(flash_dmattn_with_kvcache_func, "out"), (append_kv_cache, "query_out")]
    for function, result in calls:
        options = {**given, result: given["out"] if result == "out" else given["query"].clone()}
        if result != "out":
            del options["out"]
        wrong = result if name == "out" else name
        options[wrong] = _negated(options[wrong])
        before = {each: options[each].clone() for each in ("key_cache", "value_cache", result)}
        with pytest.raises(ValueError, match=rf"^{wrong} is a negated view .*: give {wrong}\.resolve_neg\(\)$"):
            function(**options)
        assert all(torch.equal(options[each], before[each]) for each in before)


def test_negated_views_beside_arrays_are_refused() -> None:
    torch = pytest.importorskip("torch")
    given = _tensors(torch)
    cache = _negated(given["key_cache"]), given["value_cache"]
    with pytest.raises(ValueError, match="^key_cache is a negated view"):
        flash_dmattn_with_kvcache_func(given["query"].numpy(), *cache)
    with pytest.raises(ValueError, match="^k is a negated view"):
        attention(given["key"].numpy(), _negated(given["key"]), given["value"].numpy())


def test_compiled_code_writes_the_cache_too() -> None:
    torch = pytest.importorskip("torch")

    def step(given: Dict[str, Any]) -> Any:
        appended = append_kv_cache(
            *(given["key_cache"], given["value_cache"], given["key"], given["value"]),
            **{name: given[name] for name in ("cache_seqlens", "block_table", "rotary")},
            query=given["query"],
        )
        return flash_dmattn_with_kvcache_func(
            *(appended, given["key_cache"], given["value_cache"]),
            cache_seqlens=given["cache_seqlens"] + 3,
            block_table=given["block_table"],
        )

    eager, compiled, fused = _tensors(torch), _tensors(torch), _tensors(torch)
    out = step(eager)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(compiled), out)
    assert torch.equal(eager["key_cache"], compiled["key_cache"])
    assert torch.equal(torch.compile(flash_dmattn_with_kvcache_func, backend="eager", fullgraph=True)(**fused), out)
    assert torch.equal(eager["value_cache"], fused["value_cache"])


def test_operators_follow_the_rules_of_operators() -> None:
    torch = pytest.importorskip("torch")
    given = _tensors(torch)
    cos, sin = given["rotary"]
    places = (given["block_table"], None, None, given["cache_seqlens"], None)
    added = (given["key"], given["value"], None, cos, sin, None)
    settings = (0, 0, None, True, 0.0, -1, -1, False, False, 0)
    caches = given["key_cache"], given["value_cache"]
    forward = (given["query"], *caches, *[None] * 9, *places, *added, *settings, False, 0, 0, 0)
    torch.library.opcheck(torch.ops.flash_dmattn.forward_with_cache.default, forward)
    append = (*caches, *places, *added, None, None, given["query"], None, torch.empty_like(given["query"]), False)
    torch.library.opcheck(torch.ops.flash_dmattn.cache_append.default, append)


def test_threads_beside_each_other() -> None:
    failures: List[Optional[BaseException]] = []

    def work(seed: int) -> None:
        try:
            Machine(seed).run(10)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    "words, sentence",
    [
        ((1, 3, 0, 1025), "sequence 3 has 1025 keys"),
        ((2, 1, 4, -7), "block_table of sequence 1 holds page -7 in column 4; the cache has 64 pages"),
        ((3, 0, 0, 9), "cache_batch_idx of sequence 0 is 9"),
        ((4, 2, 0, -5), "page_start of sequence 2 is -5"),
    ],
)
def test_faults_of_a_device_are_sentences(words: Tuple[int, ...], sentence: str) -> None:
    cache = pytest.importorskip("flash_dmattn._cache_torch")
    cache.refuse_fault((0, 3, 1, 1025), 64)
    with pytest.raises(ValueError, match=sentence):
        cache.refuse_fault(words, 64)
