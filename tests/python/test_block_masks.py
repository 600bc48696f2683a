"""test_block_masks.py: block masks and their builders, against dense masks of the same pairs."""

import numpy as np
import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn import attention, attention_backward, flash_dmattn_func, flash_dmattn_varlen_func, masks

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 150, 300, 4, 2, 16


def blocks_of(heads, size, rows=ROWS, keys=KEYS, batch=BATCH):
    return torch.rand(batch, heads, -(-rows // size), -(-keys // size)) < 0.5


def dense(blocks, size, rows=ROWS, keys=KEYS):
    """bool [B, H, Sq, Sk] of the same pairs."""
    wide = blocks.repeat_interleave(HEADS // blocks.shape[1], 1)
    return wide.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :rows, :keys]


def operands(dtype=torch.float32, rows=ROWS, keys=KEYS):
    q = torch.randn(BATCH, rows, HEADS, DIM, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(BATCH, keys, HEADS_KV, DIM, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


def results(given, *masked, **options):
    out, lse = flash_dmattn_func(*given, *masked, return_lse=True, **options)
    loss = out.float().square().sum() + lse.masked_fill(lse == torch.inf, 0).sum()
    sources = [each for each in (*given, options.get("attn_bias")) if each is not None]
    return out, lse, *torch.autograd.grad(loss, sources)


def assert_same(have, want, dtype=torch.float32):
    for each, other in zip(have, want):
        assert_close(each, other, dtype, "result")


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", [1, HEADS_KV, HEADS])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_size": (70, 3), "softcap": 4.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_to_a_dense_mask(size, heads, options, dtype):
    blocks, given = blocks_of(heads, size), operands(dtype)
    assert_same(
        results(given, block_mask=blocks, **options), results(given, dense(blocks, size), **options), dtype
    )


def test_beside_every_other_mask():
    blocks, pairs = blocks_of(HEADS, 64), torch.rand(BATCH, 1, ROWS, KEYS) < 0.9
    intervals = torch.zeros(1, 1, KEYS, dtype=torch.int32), torch.randint(60, ROWS, (1, 1, KEYS), dtype=torch.int32)
    start = torch.randint(0, 90, (1, HEADS_KV, 2, ROWS), dtype=torch.int32)
    bias = torch.randn(1, HEADS_KV, 1, KEYS, requires_grad=True)
    options = {
        "attn_bias": bias, "sink": torch.randn(HEADS), "is_causal": True, "key_intervals": intervals,
        "row_intervals": (start, start + 150),
    }  # fmt: skip
    given = operands()
    want = results(given, pairs & dense(blocks, 64), **options)
    assert_same(results(given, pairs, block_mask=blocks, **options), want)


def test_few_rows_and_probabilities():
    """Rows of generation: blocks that no row sees are left out, whatever they hold."""
    q, k, v = (each.detach() for each in operands(rows=2, keys=700))
    blocks = blocks_of(HEADS_KV, 64, 2, 700)
    blocks[:, :, :, 3] = False
    for each in (k, v):
        each[:, 192:256] = torch.nan
    out, _, probs = flash_dmattn_func(q, k, v, block_mask=blocks, return_attn_probs=True)
    for each in (k, v):
        each[:, 192:256] = 0
    want, _, expected = truth(q, k, v, mask=dense(blocks, 64, 2, 700))
    assert_close(out, want, torch.float32, "out")
    assert not probs[:, :, :, 192:256].any()
    assert_close(flash_dmattn_func(q, k, v, block_mask=blocks, return_attn_probs=True)[2], expected, torch.float32, "p")


def test_a_hidden_block_has_no_effect():
    """NaN in keys that no row sees reaches neither results nor gradients."""
    given = operands()
    blocks = blocks_of(1, 64)
    blocks[..., 1] = False
    want = results(given, block_mask=blocks)
    with torch.no_grad():
        for each in given[1:]:
            each[:, 64:128] = torch.nan
    for have, there in zip(results(given, block_mask=blocks), want):
        torch.testing.assert_close(have, there, rtol=0, atol=0)


def test_packed_sequences_have_blocks_of_their_own():
    lengths = [150, 0, 64, 70]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    q, k, v = (torch.randn(int(cu[-1]), heads, DIM, requires_grad=True) for heads in (HEADS, HEADS_KV, HEADS_KV))
    blocks = blocks_of(HEADS_KV, 64, 150, 150, 4)
    out = flash_dmattn_varlen_func(q, k, v, cu, cu, 150, 150, is_causal=True, block_mask=blocks)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    parts = []
    for b, (first, last) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist())):
        mask = dense(blocks[b : b + 1], 64, last - first, last - first)
        parts.append(flash_dmattn_func(*(each[None, first:last] for each in (q, k, v)), mask, is_causal=True)[0])
    want = torch.cat(parts)
    assert_same((out, *grads), (want, *torch.autograd.grad(want.sum(), (q, k, v))))


def test_arrays_of_numpy():
    q, k, v = (each.detach().numpy() for each in operands())
    blocks = blocks_of(1, 128).numpy()
    out, lse = attention(q, k, v, block_mask=blocks, return_lse=True)
    grads = attention_backward(np.ones_like(out), q, k, v, out, lse, block_mask=blocks)
    tensors = [torch.from_numpy(each).requires_grad_() for each in (q, k, v)]
    want = flash_dmattn_func(*tensors, block_mask=torch.from_numpy(blocks))
    np.testing.assert_array_equal(out, want.detach().numpy())
    want.sum().backward()
    for have, there in zip(grads, tensors):
        np.testing.assert_allclose(have, there.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_compiled_code():
    blocks, given = blocks_of(HEADS, 64), operands()
    call = torch.compile(lambda *each: flash_dmattn_func(*each[:3], block_mask=each[3]), fullgraph=True)
    torch.testing.assert_close(call(*given, blocks), flash_dmattn_func(*given, block_mask=blocks))


def test_jax():
    """Row intervals and a block mask of each KV head, under jit and grad; vmap folds into the batch."""
    jax = pytest.importorskip("jax")
    from flash_dmattn.jax import attention as attend

    given = [each.detach() for each in operands()]
    start = torch.randint(0, 200, (BATCH, HEADS_KV, 2, ROWS), dtype=torch.int32)
    own = {"row_intervals": (start, start + 150), "block_mask": blocks_of(HEADS_KV, 64)}
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jax.numpy.asarray(each.numpy()) for each in given]
        rest = jax.tree.map(lambda each: jax.numpy.asarray(each.numpy()), own)
        loss = jax.jit(jax.grad(lambda *each: attend(*each, **rest).sum(), argnums=(0, 1, 2)))
        gradients, out = loss(*arrays), attend(*arrays, **rest)
        both = jax.vmap(lambda *each: attend(*each, **rest))(*(jax.numpy.stack([each, each]) for each in arrays))
    sources = [each.requires_grad_() for each in given]
    want = flash_dmattn_func(*sources, **own)
    np.testing.assert_allclose(np.asarray(out), want.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(both[1]), np.asarray(out), rtol=1e-5, atol=1e-5)
    for have, there in zip(gradients, torch.autograd.grad(want.sum(), sources)):
        np.testing.assert_allclose(np.asarray(have), there.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "kind", "sentence"),
    [
        (torch.ones(1, 1, 3, 5).bool()[0], ValueError, "block_mask has 3 axes"),
        (torch.ones(1, 1, 3, 5), ValueError, "block_mask is float32; it must be bool"),
        (torch.ones(1, 1, 3, 4).bool(), ValueError, r"must be \[3, 5\] for blocks of 64, or \[2, 3\] for blocks of 128"),
        (torch.ones(3, 1, 3, 5).bool(), ValueError, "block_mask has batch 3; it must be 1 or 2"),
        (torch.ones(1, 3, 3, 5).bool(), ValueError, "block_mask has 3 heads; it must have 1, 2 or 4"),
        ((1, 2), TypeError, "masks.blocks_from_lists makes one of counts and indices"),
    ],
)
def test_bad_input(blocks, kind, sentence):
    with pytest.raises(kind, match=sentence):
        flash_dmattn_func(*operands(), block_mask=blocks)


# ---- builders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_blocks_from_lists(library):
    blocks = blocks_of(HEADS_KV, 64)
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = torch.argsort(blocks.int(), -1, descending=True).int()
    indices[torch.arange(blocks.shape[-1]) >= counts[..., None]] = 99  # behind the counts anything may stand
    given = (counts, indices) if library == "torch" else (counts.numpy(), indices.numpy())
    made = masks.blocks_from_lists(*given, blocks.shape[-1])
    assert isinstance(made, torch.Tensor if library == "torch" else np.ndarray)
    assert (torch.as_tensor(made) == blocks).all()


@pytest.mark.parametrize(
    ("counts", "indices", "kind", "sentence"),
    [
        ([[[3]]], [[[[0, 1]]]], ValueError, r"counts holds 3 at \[0, 0, 0\]; it must be in 0..2"),
        ([[[2]]], [[[[0, 2]]]], ValueError, r"indices holds 2 at \[0, 0, 0, 1\]; blocks has 2 blocks of keys"),
        ([[2]], [[[[0, 1]]]], ValueError, "counts has 2 axes"),
        ([[[1], [1]]], [[[[0, 1]]]], ValueError, "indices has shape"),
    ],
)
def test_lists_that_are_wrong(counts, indices, kind, sentence):
    with pytest.raises(kind, match=sentence):
        masks.blocks_from_lists(np.array(counts, np.int32), np.array(indices, np.int32), 2)


FLEX = {
    "causal": lambda b, h, i, j: i >= j,
    "documents": lambda b, h, i, j: i // 100 == j // 100,
    "of heads": lambda b, h, i, j: (i - j < 64 * (h + 1)) & (j <= i + b),
    "whole blocks": lambda b, h, i, j: i // 128 >= j // 128,
}


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize(("rows", "keys", "size"), [(384, 384, 128), (300, 500, 128), (384, 512, 256), (200, 320, 64)])
def test_from_block_mask(name, rows, keys, size):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    made_of = FLEX[name], BATCH, HEADS, rows, keys
    made = masks.from_block_mask(flex.create_block_mask(*made_of, device="cpu", BLOCK_SIZE=size))
    whole = rows % size == keys % size == 0 and size <= 128  # FlexAttention calls a block beyond an end partial
    assert (made["attn_mask"] is None) == (name == "whole blocks" and whole)
    given = operands(rows=rows, keys=keys)
    want = results(given, flex.create_mask(*made_of, device="cpu"))
    assert_same(results(given, **made), want)


def test_block_masks_that_are_not_taken():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    causal = FLEX["causal"]
    with pytest.raises(ValueError, match="dense mask takes 65536 bytes; max_bytes is 1000"):
        masks.from_block_mask(flex.create_block_mask(causal, 1, 1, 256, 256, device="cpu"), max_bytes=1000)
    with pytest.raises(ValueError, match="both must be multiples of 64"):
        masks.from_block_mask(flex.create_block_mask(causal, 1, 1, 256, 256, device="cpu", BLOCK_SIZE=32))
    with pytest.raises(TypeError, match="must be FlexAttention's BlockMask"):
        masks.from_block_mask(torch.ones(1, 1, 2, 2).bool())
    with pytest.raises(TypeError, match="masks.from_block_mask of FlexAttention's"):
        flash_dmattn_func(*operands(), block_mask=flex.create_block_mask(causal, 1, 1, ROWS, KEYS, device="cpu"))


RULES = {
    "documents": {"document_ids": torch.randint(0, 9, (BATCH, KEYS), dtype=torch.int32).sort(1).values},
    "prefixes": {"prefix_lengths": torch.tensor([0, 120], dtype=torch.int32), "seqlen_q": ROWS, "seqlen_k": KEYS},
    "windows": {"window_sizes": torch.tensor([[40, 0], [-1, 9]], dtype=torch.int32), "seqlen_q": ROWS, "seqlen_k": KEYS},
}
RULES["all"] = {**RULES["prefixes"], **RULES["windows"], **RULES["documents"], "seqlen_q": KEYS}


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", RULES)
def test_rules_in_two_ways(name, library):
    """Row intervals of rules are the pairs that their key intervals are."""
    rules = RULES[name]
    rows = rules.get("seqlen_q", KEYS)
    own = rules if library == "torch" else {k: getattr(v, "numpy", lambda v=v: v)() for k, v in rules.items()}
    start, end = (torch.as_tensor(each) for each in masks.rule_row_intervals(**own))
    assert start.dtype is end.dtype is torch.int32 and start.shape[-2:] == (1, rows)
    key = torch.arange(KEYS)
    held = ((start[..., None] <= key) & (key < end[..., None]))[:, :, 0]
    want = masks.intervals_to_mask(*masks.rule_intervals(**rules), rows)
    assert (held == want).all()
    given = operands(rows=rows)
    assert_same(results(given, row_intervals=(start, end)), results(given, key_intervals=masks.rule_intervals(**rules)))


def test_ranges_of_flex_attention():
    """Keys below the first number, and those of the pairs behind it; heads, numbers, rows of all sequences."""
    numbers = torch.randint(0, KEYS, (HEADS, 5, BATCH * ROWS), dtype=torch.int32)
    start, end = masks.from_flex_ranges(numbers, BATCH)
    assert start.shape == end.shape == (BATCH, HEADS, 3, ROWS)
    key, parts = torch.arange(KEYS), numbers.view(HEADS, 5, BATCH, ROWS).permute(2, 0, 3, 1)[..., None]
    want = (key < parts[:, :, :, 0]) | ((parts[:, :, :, 1] <= key) & (key < parts[:, :, :, 2]))
    want |= (parts[:, :, :, 3] <= key) & (key < parts[:, :, :, 4])
    assert (((start[..., None] <= key) & (key < end[..., None])).any(2) == want).all()
    flash_dmattn_func(*operands(), row_intervals=(start, end))
    with pytest.raises(ValueError, match="at most 4 are taken"):
        masks.from_flex_ranges(torch.zeros(1, 9, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="an odd number"):
        masks.from_flex_ranges(torch.zeros(1, 4, 4, dtype=torch.int32))
