"""test_topk_state.py: generation with the slots of a top-W mask against attention to all tokens so far."""

import numpy as np
import pytest
import torch
from conftest import assert_close
from flash_dmattn import attention, flash_dmattn_func, masks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def step_by_step(prompt, window, dtype, device, steps=100, heads=4, heads_kv=2, padded=False):
    """Yields the state, what a row sees in it, and what it sees in all tokens."""
    torch.manual_seed(prompt)
    total, dim = prompt + steps, 16
    k, v = (torch.randn(2, total, heads_kv, dim, device=device, dtype=dtype) for _ in range(2))
    bias = torch.randint(-20, 20, (2, heads_kv, total), device=device).to(dtype) / 8  # some of them equal
    real = torch.rand(2, total, device=device) < 0.8 if padded else None
    state = masks.TopKState.of_prompt(
        bias[..., :prompt], window, k[:, :prompt], v[:, :prompt], None if real is None else real[:, :prompt]
    )
    for t in range(prompt, total):
        part = slice(t, t + 1)
        slot = state.append(bias[..., t], k[:, part], v[:, part], None if real is None else real[:, t])
        q = torch.randn(2, 1, heads, dim, device=device, dtype=dtype)
        have = flash_dmattn_func(q, state.k, state.v, attn_bias=state.bias)
        upto = slice(0, t + 1)
        pair = masks.topk_intervals(bias[..., upto], window, 1, None if real is None else real[:, upto])
        want = flash_dmattn_func(q, k[:, upto], v[:, upto], attn_bias=bias[..., upto], key_intervals=pair)
        yield state, slot, have, want, pair


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt, window, padded", [(0, 8, False), (30, 64, True), (150, 24, False), (90, 33, True)])
def test_a_hundred_steps_are_the_full_recomputation(prompt, window, padded, dtype, device):
    for state, slot, have, want, (_, end) in step_by_step(prompt, window, dtype, device, padded=padded):
        assert_close(have, want, dtype, "out")
        kept = end == 2**31 - 1
        assert torch.equal((state.key >= 0).sum(-1), kept.sum(-1))
        assert kept.gather(-1, state.key.clamp(min=0).long())[state.key >= 0].all()
        newest = (state.length - 1)[..., None]
        assert torch.equal((state.key == newest).any(-1), slot >= 0)


def test_negated_views_are_refused():
    bias, rows, new = torch.randn(1, 2, 5), torch.randn(1, 5, 2, 4), torch.randn(1, 1, 2, 4)
    state = masks.TopKState.of_prompt(bias, 3, rows, rows)
    for name in ("bias", "k", "v"):
        prompt, token = {"bias": bias, "k": rows, "v": rows}, {"bias": bias[..., 0], "k": new, "v": new}
        for call, given in ((lambda **all: masks.TopKState.of_prompt(window_size=3, **all), prompt), (state.append, token)):
            given[name] = torch._neg_view(-given[name])
            with pytest.raises(ValueError, match=f"^{name} is a negated view"):
                call(**given)


def test_numpy_is_torch():
    rng = np.random.default_rng(0)
    bias, k = rng.standard_normal((1, 2, 40)).astype(np.float32), rng.standard_normal((1, 40, 2, 8)).astype(np.float32)
    ours = masks.TopKState.of_prompt(bias[..., :30], 8, k[:, :30], k[:, :30])
    theirs = masks.TopKState.of_prompt(
        torch.from_numpy(bias[..., :30]), 8, torch.from_numpy(k[:, :30]), torch.from_numpy(k[:, :30])
    )
    for t in range(30, 40):
        slot = ours.append(bias[..., t], k[:, t : t + 1], k[:, t : t + 1])
        rows = torch.from_numpy(k[:, t : t + 1])
        same = theirs.append(torch.from_numpy(bias[..., t]), rows, rows)
        np.testing.assert_array_equal(slot, same.numpy())
    for name in ("key", "bias", "length", "k", "v"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name).numpy())
    out = attention(k[:, :1], ours.k, ours.v, attn_bias=ours.bias)
    assert out.shape == (1, 1, 2, 8)


@pytest.mark.parametrize("library", ["numpy", "cpu", *DEVICES[1:]])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_a_prompt_in_pages(library, page_size):
    torch.manual_seed(page_size)
    batch, tokens, heads = 2, 50, 3
    needed = -(-tokens // page_size)
    bias, k, v = torch.randn(batch, heads, tokens), torch.randn(batch, tokens, heads, 8), torch.randn(batch, tokens, heads, 5)
    table = torch.randperm(batch * needed + 4)[: batch * needed].reshape(batch, needed).to(torch.int32)
    pages = [torch.full((batch * needed + 4, page_size, heads, each.shape[-1]), torch.nan) for each in (k, v)]
    for t in range(tokens):
        for paged, each in zip(pages, (k, v)):
            paged[table[:, t // page_size].long(), t % page_size] = each[:, t]
    end = masks.topk_intervals(bias, 6)[1]
    if page_size == 1:
        table[((end == 2**31 - 1).any(1)).logical_not()] = -1  # no kept key: not looked at
    want = masks.TopKState.of_prompt(bias, 6, k, v)
    given = (bias, *pages, table) if library != "numpy" else tuple(each.numpy() for each in (bias, *pages, table))
    given = given if library == "numpy" else tuple(each.to(library) for each in given)
    have = masks.TopKState.of_prompt(given[0], 6, *given[1:3], block_table=given[3])
    for name in ("key", "bias", "length", "k", "v"):
        assert torch.equal(torch.as_tensor(getattr(have, name)).cpu(), getattr(want, name)), name


def test_keys_alone():
    state = masks.TopKState.of_prompt(torch.tensor([[[3.0, 1.0]]]), 2)
    assert state.k is None and state.key.tolist() == [[[0, 1]]]
    assert state.append(torch.tensor([[1.0]])).item() == -1  # of equals the first stays
    assert state.append(torch.tensor([[2.0]])).item() == 1
    assert state.key.tolist() == [[[0, 3]]] and state.length.item() == 4


def test_refused():
    with pytest.raises(ValueError, match="window_size is 0"):
        masks.TopKState.of_prompt(torch.randn(1, 1, 3), 0)
    with pytest.raises(ValueError, match="bias has shape"):
        masks.TopKState.of_prompt(torch.randn(1, 3), 2)
    state = masks.TopKState.of_prompt(torch.randn(1, 1, 3), 2)
    with pytest.raises(ValueError, match="slots.k is NULL, but k is given"):
        state.append(torch.randn(1, 1), torch.randn(1, 1, 1, 4))
    table = torch.full((1, 3), 9, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_table has page 9; k has 2 pages"):
        masks.TopKState.of_prompt(torch.randn(1, 1, 3), 2, torch.randn(2, 1, 1, 4), block_table=table)
    with pytest.raises(ValueError, match="slots.bias is float32; it must be float16"):
        state.append(torch.randn(1, 1).half())
    with pytest.raises(ValueError, match="bias has 3 axes; it needs 2"):
        state.append(torch.randn(1, 1, 1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_is_compiled_whole(backend):
    torch.manual_seed(0)
    bias, k = torch.randn(2, 2, 30), torch.randn(2, 30, 2, 8)
    state, same = (masks.TopKState.of_prompt(bias[..., :20], 6, k[:, :20], k[:, :20]) for _ in range(2))

    def step(of, bias, k):
        slot = of.append(bias, k, k)
        return slot, flash_dmattn_func(k, of.k, of.v, attn_bias=of.bias)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for t in range(20, 30):
        arguments = bias[..., t].clone(), k[:, t : t + 1].clone()
        for have, want in zip(compiled(state, *arguments), step(same, *arguments)):
            assert torch.equal(have, want)
    assert torch.equal(state.key, same.key) and torch.equal(state.k, same.k)


@pytest.mark.parametrize("device", DEVICES)
def test_operator_checks(device):
    bias, k = torch.randn(2, 2, 30, device=device), torch.randn(2, 30, 2, 8, device=device)
    state = masks.TopKState.of_prompt(bias[..., :20], 6, k[:, :20], k[:, :20])
    rows = k[:, 20:21].clone()
    slots = (state.key, state.bias, state.length, state.k, state.v)
    for real in (None, torch.tensor([True, False], device=device)):
        torch.library.opcheck(
            torch.ops.flash_dmattn.topk_append.default, (bias[..., 20].clone(), rows, rows.clone(), *slots, real)
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_a_step_in_a_graph():
    torch.manual_seed(0)
    bias, k = torch.randn(2, 2, 300, device="cuda"), torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.float16)
    state, same = (masks.TopKState.of_prompt(bias[..., :200], 32, k[:, :200], k[:, :200]) for _ in range(2))
    one_bias, one_k, q = bias[..., 200].clone(), k[:, 200:201].clone(), torch.randn_like(k[:, :1])

    def step(of):
        of.append(one_bias, one_k, one_k)
        return flash_dmattn_func(q, of.k, of.v, attn_bias=of.bias)

    step(same)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(state)
    for t in range(200, 300):
        one_bias.copy_(bias[..., t])
        one_k.copy_(k[:, t : t + 1])
        graph.replay()
        if t > 200:
            want = step(same)
            assert torch.equal(out, want) and torch.equal(state.key, same.key)
