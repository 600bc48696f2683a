"""qv of flash-attn's names beside a key-value cache: scores of scale * (q k + qv v)."""

import itertools

import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn.compat import _cache_qv, flash_attn_cute, flash_attn_interface
from flash_dmattn.compat.flash_attn.layers.rotary import apply_rotary_emb

DIM, DIM_V, HEADS, HEADS_KV, PAGE = 8, 12, 4, 2, 4
HELD = torch.tensor([5, 11], dtype=torch.int32)
NEW = 3
with_kvcache = flash_attn_interface.flash_attn_with_kvcache


def neighbours(first, *shape):
    """Key and value as views of one tensor, `first` before the other, of NaN."""
    latent = torch.full((*shape, DIM + DIM_V), torch.nan)
    return (latent[..., DIM_V:], latent[..., :DIM_V]) if first == "value" else latent.split((DIM, DIM_V), -1)


def filled(key, value, layout, paged):
    """A cache that holds HELD rows of each sequence, the others NaN, and its table."""
    sequences, room = (2, 24)
    shape = (sequences * room // PAGE, PAGE, HEADS_KV) if paged else (sequences, room, HEADS_KV)
    if layout == "apart":
        caches = [torch.full((*shape, each.shape[-1]), torch.nan) for each in (key, value)]
    else:
        caches = neighbours(layout, *shape)
    table = torch.arange(12, dtype=torch.int32).flip(0).view(2, 6) if paged else None
    for cache, full in zip(caches, (key, value)):
        for b, count in enumerate(HELD.tolist()):
            for n in range(count):
                place = (int(table[b, n // PAGE]), n % PAGE) if paged else (b, n)
                cache[place] = full[b, n]
    return caches, table


def problem(rows=NEW):
    torch.manual_seed(7)
    shapes = ((rows, HEADS, DIM), (rows, HEADS, DIM_V), (24, HEADS_KV, DIM), (24, HEADS_KV, DIM_V))
    return [torch.randn(2, *shape) for shape in shapes]


@pytest.mark.parametrize("layout", ["value", "key", "apart"])
@pytest.mark.parametrize("paged, packed", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize(
    "turns, options",
    [(0, {}), (0, {"causal": True}), (8, {"causal": True}), (4, {"rotary_interleaved": False}), (4, {"window_size": (5, 1)})],
)
def test_both_products(layout, paged, packed, turns, options):
    q, qv, key, value = problem()
    (k_cache, v_cache), table = filled(key, value, layout, paged)
    fresh = [torch.stack([each[b, n : n + NEW] for b, n in enumerate(HELD.tolist())]) for each in (key, value)]
    counts = [2, 3] if packed else [NEW, NEW]
    given = dict(options, qv=qv, page_table=table, cache_seqlens=HELD)
    if turns:
        angles = torch.rand(24, turns // 2)
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    rows = q
    if packed:
        rows, given["qv"] = (torch.cat([each[b, :count] for b, count in enumerate(counts)]) for each in (q, qv))
        given |= {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32), "max_seqlen_q": 3}
    out, lse = with_kvcache(rows, k_cache, v_cache, *fresh, return_softmax_lse=True, **given)
    moves = "causal" in options or "window_size" in options
    for b, length in enumerate((HELD + NEW).tolist()):
        mine, keys = q[b : b + 1, : counts[b]], key[b : b + 1, :length].clone()
        if turns:
            tables = given["rotary_cos"], given["rotary_sin"], options.get("rotary_interleaved", True)
            start = int(HELD[b])
            keys[:, start:] = apply_rotary_emb(keys[:, start:], *tables, seqlen_offsets=start)
            by_head = mine if moves else mine.reshape(1, 1, -1, DIM)
            mine = apply_rotary_emb(by_head, *tables, seqlen_offsets=start).reshape(mine.shape)
        wide = torch.cat((mine, qv[b : b + 1, : counts[b]]), -1), torch.cat((keys, value[b : b + 1, :length]), -1)
        bounds = {name: options[name] for name in ("causal", "window_size") if name in options}
        want, want_lse = flash_attn_interface.flash_attn_func(
            *wide, value[b : b + 1, :length], return_attn_probs=True, **bounds
        )
        first = sum(counts[:b])
        got = out[first : first + counts[b]] if packed else out[b]
        got_lse = lse[:, first : first + counts[b]] if packed else lse[b]
        assert_close(got, want[0], torch.float32, "out")
        assert_close(got_lse, want_lse[0], torch.float32, "lse")
        for n in range(length):  # appended to the caller's own cache
            place = (int(table[b, n // PAGE]), n % PAGE) if paged else (b, n)
            torch.testing.assert_close(k_cache[place], keys[0, n])
            assert torch.equal(v_cache[place], value[b, n])


@pytest.mark.parametrize("layout, copies", [("value", False), ("key", False), ("apart", True)])
def test_neighbours_are_not_copied(layout, copies):
    q, qv, key, value = problem()
    (k_cache, v_cache), _ = filled(key, value, layout, True)
    query, wide, _ = _cache_qv.joined(q, qv, k_cache, v_cache)
    assert query.shape[-1] == wide.shape[-1] == DIM + DIM_V
    places = {each.untyped_storage().data_ptr() for each in (k_cache, v_cache)}
    assert (wide.untyped_storage().data_ptr() not in places) is copies
    assert_close((query * wide[:1, :NEW].repeat_interleave(2, 2)).nansum(), sum(
        (each * cache[:1, :NEW].repeat_interleave(2, 2)).nansum() for each, cache in ((q, k_cache), (qv, v_cache))
    ), torch.float32, "scores")  # fmt: skip


def test_a_negative_length_is_no_sequence():
    q, qv, key, value = problem()
    (k_cache, v_cache), _ = filled(key, value, "apart", False)
    before = k_cache.clone(), v_cache.clone()
    lengths = torch.tensor([-1, 11], dtype=torch.int32)
    out = with_kvcache(q, k_cache, v_cache, key[:, :NEW], value[:, :NEW], qv=qv, cache_seqlens=lengths)
    assert not out[0].any() and out[1].isfinite().all() and out[1].any()
    for cache, old in zip((k_cache, v_cache), before):
        assert torch.equal(cache[0].isnan(), old[0].isnan())


def test_pages_of_version_4():
    q, qv, key, value = problem()
    (k_cache, v_cache), table = filled(key, value, "apart", True)
    call = flash_attn_cute.flash_attn_varlen_func
    out, lse = call(q, k_cache, v_cache, qv, page_table=table, seqused_k=HELD, return_lse=True)
    alone, _ = call(None, None, v_cache, qv, page_table=table, seqused_k=HELD)
    assert lse.shape == (2, NEW, HEADS)
    for b, length in enumerate(HELD.tolist()):
        mine = [each[b : b + 1] for each in (q, qv)]
        keys, values = (each[b : b + 1, :length] for each in (key, value))
        want, want_lse, _ = truth(torch.cat(mine, -1), torch.cat((keys, values), -1), values)
        assert_close(out[b], want[0], torch.float32, "out")
        assert_close(lse[b].T, want_lse[0], torch.float32, "lse")
        assert_close(alone[b], truth(mine[1], values, values)[0][0], torch.float32, "qv alone")
    with pytest.raises(ValueError, match="q and qv are both None"):
        call(None, None, v_cache, page_table=table, seqused_k=HELD)


def test_wrong_widths_are_one_sentence():
    q, qv, key, value = problem()
    with pytest.raises(RuntimeError, match="qv has shape"):
        with_kvcache(q, key, value, qv=qv[..., :-1], cache_seqlens=HELD)
    with pytest.raises(RuntimeError, match="qv has shape"):
        with_kvcache(q, key, value, qv=qv[:, :1], cache_seqlens=HELD)
