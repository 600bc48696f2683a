"""test_tree.py: trees of drafts beside a KV cache: against dense masks of the same pairs, and chains against causal."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
from flash_dmattn import flash_dmattn_with_kvcache_func

HEADS, HEADS_KV, DIM = 4, 2, 16


def parents_of(rng: np.random.Generator, nodes: int) -> List[int]:
    return [int(rng.integers(-1, node)) for node in range(nodes)]


def seen_of(parents: List[int]) -> np.ndarray:
    """bool [nodes, nodes]: a node sees itself and what its parent sees."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def bits_of(seen: np.ndarray, words: int, rng: np.random.Generator) -> np.ndarray:
    """uint32 [nodes, words]: the bits behind the last node are drawn."""
    bits = rng.random((len(seen), 32 * words)) < 0.5
    bits[:, : len(seen)] = seen
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


def cache_of(rng: np.random.Generator, lengths: List[int], page: int) -> Dict[str, Any]:
    """Pages whose unused rows are NaN, in a random order."""
    counts = [-(-length // page) for length in lengths]
    order, table = list(rng.permutation(sum(counts) + 2)), np.full((len(lengths), max(counts) + 1), -9, np.int32)
    k, v = np.full((2, sum(counts) + 2, page, HEADS_KV, DIM), np.nan, np.float32)
    for row, length, count in zip(table, lengths, counts):
        row[:count] = [order.pop() for _ in range(count)]
        for key in range(length):
            at = row[key // page], key % page
            k[at], v[at] = rng.standard_normal((2, HEADS_KV, DIM), dtype=np.float32)
    return {"key_cache": k, "value_cache": v, "block_table": table, "cache_seqlens": np.array(lengths, np.int32)}


def mask_of(trees: List[np.ndarray], lengths: List[int], rows: int, room: int) -> np.ndarray:
    """bool [B, 1, rows, room]: all keys before the draft, and those of the tree."""
    mask = np.zeros((len(trees), 1, rows, room), bool)
    for dense, seen, length in zip(mask, trees, lengths):
        nodes = len(seen)
        dense[0, :nodes, : length - nodes] = True
        dense[0, :nodes, length - nodes : length] = seen
    return mask


def draw(seed: int, nodes: List[int]) -> Tuple[np.random.Generator, Dict[str, Any], List[np.ndarray], List[int]]:
    rng = np.random.default_rng(seed)
    lengths = [count + int(rng.integers(0, 200)) for count in nodes]
    return rng, cache_of(rng, lengths, int(rng.choice([1, 5, 16, 64]))), [seen_of(parents_of(rng, n)) for n in nodes], lengths


@pytest.mark.parametrize("nodes", [2, 3, 8, 31, 32, 33, 64])
@pytest.mark.parametrize("options", [{}, {"window_size": (40, 3)}, {"softcap": 3.0}], ids=str)
def test_trees_are_dense_masks_of_the_same_pairs(nodes: int, options: Dict[str, Any]) -> None:
    rng, cache, trees, lengths = draw(nodes, [nodes] * 3)
    query = rng.standard_normal((3, nodes, HEADS, DIM), dtype=np.float32)
    tree = np.stack([bits_of(seen, -(-nodes // 32), rng) for seen in trees])
    room = cache["block_table"].shape[1] * cache["key_cache"].shape[1]
    mask = mask_of(trees, lengths, nodes, room)
    want, want_lse = flash_dmattn_with_kvcache_func(query, **cache, attn_mask=mask, is_causal=False, return_lse=True, **options)
    out, lse = flash_dmattn_with_kvcache_func(query, **cache, tree=tree, return_lse=True, **options)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    signed = flash_dmattn_with_kvcache_func(query, **cache, tree=tree.view(np.int32), **options)
    assert (signed == out).all()


def test_packed_drafts_of_unlike_sizes() -> None:
    sizes = [1, 40, 0, 7, 64]
    rng, cache, trees, lengths = draw(1, sizes)
    rows, words = sum(sizes), 2
    query = rng.standard_normal((rows + 2, HEADS, DIM), dtype=np.float32)
    offsets = np.concatenate([[1], 1 + np.cumsum(sizes)]).astype(np.int32)
    tree = np.full((rows + 2, words), 0xFFFFFFFF, np.uint32)
    tree[1:-1] = np.concatenate([bits_of(seen, words, rng) for seen in trees])
    packing = {"cu_seqlens_q": offsets, "max_seqlen_q": 64}
    room = cache["block_table"].shape[1] * cache["key_cache"].shape[1]
    mask = mask_of(trees, lengths, 64, room)
    out = flash_dmattn_with_kvcache_func(query, **cache, **packing, tree=tree)
    want = flash_dmattn_with_kvcache_func(query, **cache, **packing, attn_mask=mask, is_causal=False)
    np.testing.assert_allclose(out, want, atol=2e-6)
    assert not out[0].any() and not out[-1].any()


@pytest.mark.parametrize("nodes", [1, 2, 4, 40])
@pytest.mark.parametrize("invariance", [0, 1])
def test_chains_have_the_bits_of_causal_calls(nodes: int, invariance: int) -> None:
    rng, cache, _, _ = draw(nodes, [nodes] * 2)
    query = rng.standard_normal((2, nodes, HEADS, DIM), dtype=np.float32)
    tree = np.stack([bits_of(np.tri(nodes, dtype=bool), -(-nodes // 32), rng)] * 2)
    options = {"return_lse": True, "invariance": invariance}
    for have, want in zip(
        flash_dmattn_with_kvcache_func(query, **cache, tree=tree, **options),
        flash_dmattn_with_kvcache_func(query, **cache, is_causal=True, **options),
    ):
        assert (have == want).all()


def test_appended_drafts() -> None:
    """The draft is what the call appends."""
    rng, cache, trees, lengths = draw(3, [6, 6])
    query = rng.standard_normal((2, 6, HEADS, DIM), dtype=np.float32)
    tree = np.stack([bits_of(seen, 1, rng) for seen in trees])
    want = flash_dmattn_with_kvcache_func(query, **cache, tree=tree)
    new = np.empty((2, 2, 6, HEADS_KV, DIM), np.float32)
    page = cache["key_cache"].shape[1]
    for b, length in enumerate(lengths):
        for row in range(6):
            at = cache["block_table"][b, (length - 6 + row) // page], (length - 6 + row) % page
            new[:, b, row] = cache["key_cache"][at], cache["value_cache"][at]
            cache["key_cache"][at] = cache["value_cache"][at] = np.nan
    before = {**cache, "cache_seqlens": cache["cache_seqlens"] - 6}
    assert (flash_dmattn_with_kvcache_func(query, **before, key=new[0], value=new[1], tree=tree) == want).all()


def test_keys_of_a_draft_that_no_row_sees_hold_anything() -> None:
    rng, cache, _, lengths = draw(4, [5])
    query = rng.standard_normal((1, 5, HEADS, DIM), dtype=np.float32)
    seen = np.eye(5, dtype=bool)
    seen[:, 3] = False
    tree = bits_of(seen, 1, rng)[None]
    want = flash_dmattn_with_kvcache_func(query, **cache, tree=tree)
    key, page = lengths[0] - 2, cache["key_cache"].shape[1]
    at = cache["block_table"][0, key // page], key % page
    cache["key_cache"][at] = cache["value_cache"][at] = np.nan
    assert (flash_dmattn_with_kvcache_func(query, **cache, tree=tree) == want).all() and np.isfinite(want).all()


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"is_causal": True}, "tree is given beside a causal mask"),
        ({"tree": np.zeros((2, 5, 2), np.uint32)}, r"tree has shape \[2, 5, 2\]; it must be \[2, 5, 1\]"),
        ({"tree": np.zeros((5, 1), np.uint32)}, "tree has 2 axes; it needs 3"),
        ({"tree": np.zeros((2, 5, 1), np.float32)}, "tree is float32; it must be uint32"),
        ({"invariance": 2}, "which invariance 2 does not allow"),
    ],
)
def test_what_is_refused(given: Dict[str, Any], sentence: str) -> None:
    rng, cache, _, _ = draw(5, [5, 5])
    query = rng.standard_normal((2, 5, HEADS, DIM), dtype=np.float32)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=sentence):
        flash_dmattn_with_kvcache_func(query, **cache, **{"tree": np.zeros((2, 5, 1), np.uint32), **given})


def test_torch_eager_compiled_and_opcheck() -> None:
    torch = pytest.importorskip("torch")
    rng, cache, trees, _ = draw(6, [9, 9])
    query = rng.standard_normal((2, 9, HEADS, DIM), dtype=np.float32)
    tree = np.stack([bits_of(seen, 1, rng) for seen in trees])
    want = flash_dmattn_with_kvcache_func(query, **cache, tree=tree)
    tensors = {name: torch.from_numpy(each) for name, each in cache.items()}
    q, words = torch.from_numpy(query), torch.from_numpy(tree.view(np.int32))
    for each in (words, words.view(torch.uint32)):
        assert (flash_dmattn_with_kvcache_func(q, **tensors, tree=each).numpy() == want).all()
    compiled = torch.compile(flash_dmattn_with_kvcache_func, backend="eager", fullgraph=True)
    assert (compiled(q, **tensors, tree=words).numpy() == want).all()
    places = (tensors["block_table"], None, None, tensors["cache_seqlens"], None)
    caches = tensors["key_cache"].nan_to_num(), tensors["value_cache"].nan_to_num()
    settings = (0, 0, None, False, 0.0, -1, -1, False, False, 0)
    arguments = (q, *caches, *[None] * 8, words, *places, *[None] * 6, *settings, False, 0, 0, 0)
    torch.library.opcheck(torch.ops.flash_dmattn.forward_with_cache.default, arguments)
