"""test_key_rules.py: documents, prefixes and windows of each head, in every form of array, against dense masks."""

import numpy as np
import pytest
import torch

import flash_dmattn
from flash_dmattn import attention, attention_backward, flash_dmattn_func, flash_dmattn_varlen_func, masks

B, S, H, HKV, D = 2, 40, 4, 2, 16


def tensors(batch=B, rows=S, keys=S, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, rows, H, D), (batch, keys, HKV, D), (batch, keys, HKV, D)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


IDS = torch.tensor([[0] * 7 + [1] * 20 + [5] * 13, [-2] * 33 + [9] * 7], dtype=torch.int32)
PREFIXES = torch.tensor([3, 21], dtype=torch.int32)
WINDOWS = torch.tensor([[3, 0], [-1, 2], [0, -1], [-1, -1]], dtype=torch.int32)
RULES = {
    "documents": {"document_ids": IDS},
    "documents of one": {"document_ids": IDS[:1]},
    "prefixes": {"prefix_lengths": PREFIXES},
    "windows": {"window_size": WINDOWS},
    "windows of groups": {"window_size": WINDOWS[:2]},
    "all": {"document_ids": IDS, "prefix_lengths": PREFIXES, "window_size": WINDOWS},
}


def dense(rows=S, keys=S, document_ids=None, prefix_lengths=None, window_size=None, **_):
    """The mask [B, H, rows, keys] by definition."""
    i, j = torch.arange(rows)[:, None] + (keys - rows), torch.arange(keys)[None]
    seen = torch.ones(B, H, rows, keys, dtype=torch.bool)
    if document_ids is not None:
        seen &= (document_ids[:, :, None] == document_ids[:, None, :])[:, None]
    if prefix_lengths is not None:
        seen &= ((j < prefix_lengths[:, None, None]) | (j <= i))[:, None]
    if window_size is not None:
        wide = window_size.repeat_interleave(H // len(window_size), 0)
        left, right = wide[None, :, :1, None], wide[None, :, 1:, None]
        seen &= ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    return seen


def gradients(out, given):
    return torch.autograd.grad(out, given, torch.arange(out.numel()).reshape(out.shape).sin())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_torch(name, causal):
    rules, given = RULES[name], tensors()
    if causal and "prefix_lengths" in rules:
        pytest.skip("prefixes are causal by themselves")
    out = flash_dmattn_func(*given, is_causal=causal, **rules)
    expected = flash_dmattn_func(*given, attn_mask=dense(**rules), is_causal=causal)
    torch.testing.assert_close(out, expected)
    for actual, right in zip(gradients(out, given), gradients(expected, given)):
        torch.testing.assert_close(actual, right)


@pytest.mark.parametrize("name", ["prefixes", "windows"])
def test_fewer_rows_than_keys(name):
    given = tensors(rows=9)
    out = flash_dmattn_func(*given, **RULES[name])
    torch.testing.assert_close(out, flash_dmattn_func(*given, attn_mask=dense(rows=9, **RULES[name])))


def test_beside_key_intervals():
    given = tensors()
    pair = masks.topk_intervals(torch.randn(B, HKV, S, generator=torch.Generator().manual_seed(3)), 11)
    out = flash_dmattn_func(*given, key_intervals=pair, **RULES["all"])
    wide = masks.intervals_to_mask(*pair, S).repeat_interleave(H // HKV, 1)
    expected = flash_dmattn_func(*given, attn_mask=dense(**RULES["all"]) & wide)
    torch.testing.assert_close(out, expected)
    jax = pytest.importorskip("jax")
    from flash_dmattn.jax import attention as attend

    arrays = [jax.numpy.asarray(each.detach().numpy()) for each in given]
    out = attend(*arrays, key_intervals=[each.numpy() for each in pair], **as_numpy(RULES["all"]))
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=1e-5)


def as_numpy(rules):
    return {name: each.numpy() for name, each in rules.items()}


@pytest.mark.parametrize("name", RULES)
def test_numpy(name):
    q, k, v = (each.detach().numpy() for each in tensors())
    rules, mask = as_numpy(RULES[name]), dense(**RULES[name]).numpy()
    out, lse = attention(q, k, v, return_lse=True, **rules)
    expected, right = attention(q, k, v, attn_mask=mask, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    ours = attention_backward(q, q, k, v, out, lse, **rules)
    for actual, wanted in zip(ours, attention_backward(q, q, k, v, expected, right, attn_mask=mask)):
        np.testing.assert_allclose(actual, wanted, atol=1e-5)
    same = attention(*tensors(), **RULES[name])  # torch tensors in the function for arrays
    np.testing.assert_allclose(same.detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_jax(name):
    jax = pytest.importorskip("jax")
    from flash_dmattn.jax import attention as attend

    q, k, v = (jax.numpy.asarray(each.detach().numpy()) for each in tensors())
    rules, mask = as_numpy(RULES[name]), dense(**RULES[name]).numpy()

    def loss(q, k, v, **masked):
        return jax.numpy.sin(attend(q, k, v, **masked)).sum()

    with_rules = jax.jit(jax.grad(lambda q, k, v, rules: loss(q, k, v, **rules), (0, 1, 2)))(q, k, v, rules)
    with_mask = jax.grad(lambda q, k, v: loss(q, k, v, attn_mask=mask), (0, 1, 2))(q, k, v)
    for actual, right in zip(with_rules, with_mask):
        np.testing.assert_allclose(actual, right, atol=2e-5)


def test_jax_refuses():
    pytest.importorskip("jax")
    from flash_dmattn.jax import attention as attend

    q, k, v = (each.detach().numpy() for each in tensors())
    for rules, words in (
        ({"document_ids": IDS[0].numpy()}, "document_ids has shape"),
        ({"prefix_lengths": PREFIXES.numpy(), "is_causal": True}, "beside is_causal"),
        ({"prefix_lengths": IDS.numpy()}, "prefix_lengths has shape"),
        ({"window_size": IDS.numpy()}, "window_size has shape"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(q, k, v, **rules)


def test_packed():
    """Prefixes and windows count from the start of each sequence."""
    lengths = (7, 0, 21), (12, 5, 21)
    offsets = [torch.tensor([0, *np.cumsum(each)], dtype=torch.int32) for each in lengths]
    q, k, v = (torch.randn(sum(each), heads, D) for each, heads in zip((lengths[0], *[lengths[1]] * 2), (H, HKV, HKV)))
    prefixes = torch.tensor([2, 1, 15], dtype=torch.int32)
    rules = {"prefix_lengths": prefixes, "window_size": WINDOWS}
    out = flash_dmattn_varlen_func(q, k, v, *offsets, 21, 21, **rules)
    for b in range(3):
        (first, last), (begin, end) = ((int(each[b]), int(each[b + 1])) for each in offsets)
        if first == last:
            continue
        own = {"prefix_lengths": prefixes[b : b + 1], "window_size": WINDOWS}
        alone = flash_dmattn_func(q[None, first:last], k[None, begin:end], v[None, begin:end], **own)
        torch.testing.assert_close(out[first:last], alone[0])
    packed = {"cu_seqlens_q": offsets[0].numpy(), "cu_seqlens_k": offsets[1].numpy()}
    arrays = attention(q.numpy(), k.numpy(), v.numpy(), **packed, **as_numpy(rules))
    np.testing.assert_allclose(arrays, out.numpy(), atol=1e-6)
    with pytest.raises(ValueError, match="document_ids are given beside cu_seqlens"):
        attention(q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], document_ids=IDS)
    with pytest.raises(ValueError, match="document_ids are given beside cu_seqlens"):
        attention(q.numpy(), k.numpy(), v.numpy(), **packed, document_ids=IDS.numpy())


def test_compiled():
    given = tensors()

    def call(*given):
        return flash_dmattn_func(*given, **RULES["all"])

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given))


def test_pair():
    pair = masks.rule_intervals(IDS, PREFIXES, WINDOWS)
    assert pair.seqlen_q == S and list(pair.start.shape) == list(pair.end.shape) == [B, H, S]
    assert torch.equal(masks.intervals_to_mask(*pair, S), dense(**RULES["all"]))
    arrays = masks.rule_intervals(IDS.numpy(), window_sizes=WINDOWS.numpy())
    assert isinstance(arrays.start, np.ndarray)
    packed = masks.rule_intervals(
        prefix_lengths=torch.zeros(2, dtype=torch.int32), seqlen_k=9,
        cu_seqlens_q=torch.tensor([0, 3, 6], dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 3, 6], dtype=torch.int32),
    )  # fmt: skip
    assert packed.seqlen_q is None and list(packed.start.shape) == [1, 9]
    assert (packed.start[0, 6:] > packed.end[0, 6:]).all()  # keys of no sequence


@pytest.mark.parametrize(
    "rules, error, words",
    [
        ({}, ValueError, "no rule is given"),
        ({"document_ids": 3}, TypeError, "document_ids is the number 3|document_ids is 3"),
        ({"prefix_lengths": PREFIXES}, ValueError, "seqlen_k is None"),
        ({"document_ids": IDS[0]}, ValueError, "document_ids has 1 axes; it needs 2"),
        ({"document_ids": IDS.flip(1)}, ValueError, "document_ids fall from"),
        ({"document_ids": IDS, "seqlen_q": 3}, ValueError, "seqlen_q is 3 and there are 40 keys"),
        ({"document_ids": IDS, "seqlen_k": 3}, ValueError, "seqlen_k is 3, but document_ids have 40 keys"),
        ({"document_ids": IDS.long()}, ValueError, "document_ids is .*int32"),
        ({"window_sizes": WINDOWS - 5, "seqlen_k": 9}, ValueError, "window_sizes holds -"),
        ({"document_ids": IDS, "prefix_lengths": PREFIXES.numpy()}, TypeError, "must be a torch tensor"),
        ({"document_ids": IDS, "key_intervals": (IDS, IDS)}, ValueError, "key_intervals have 2 axes; they need 3"),
    ],
)
def test_refusals(rules, error, words):
    with pytest.raises(error, match=words):
        masks.rule_intervals(**rules)


def test_functions_refuse():
    given = tensors()
    with pytest.raises(ValueError, match="beside is_causal"):
        flash_dmattn_func(*given, prefix_lengths=PREFIXES, is_causal=True)
    with pytest.raises(ValueError, match="window_size is .* it must be a pair"):
        flash_dmattn_func(*given, window_size=WINDOWS[0])
    with pytest.raises(ValueError, match="interval heads|heads; it must be"):
        flash_dmattn_func(*given, window_size=WINDOWS[:3])
    nested = [torch.nested.nested_tensor([each[0]], layout=torch.jagged) for each in given]
    with pytest.raises(NotImplementedError, match="nested tensors"):
        flash_dmattn_func(*nested, prefix_lengths=PREFIXES)
    assert flash_dmattn.masks.rule_intervals is masks.rule_intervals
