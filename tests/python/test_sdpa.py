"""test_sdpa.py: scaled_dot_product_attention against PyTorch's function of that name."""

import random

import pytest
import torch
from flash_dmattn import scaled_dot_product_attention

theirs = torch.nn.functional.scaled_dot_product_attention


def random_call(seed):
    """(query, key, value), mask, keywords; of two to four axes, with a mask of any of PyTorch's kinds."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    axes = r.choice([4, 4, 4, 3, 2])
    batch, heads = r.choice([1, 2, 3]), r.choice([1, 2, 4])
    rows, keys = r.choice([1, 3, 8, 33]), r.choice([1, 5, 8, 40])
    head_dim, head_dim_v = r.choice([4, 8, 16]), r.choice([4, 8])
    shares = axes == 4 and r.random() < 0.3
    heads_kv = r.choice([h for h in (1, 2, 4) if heads % h == 0]) if shares else heads
    lead = [(batch, n) for n in (heads, heads_kv, heads_kv)]
    shapes = [(*lead[0], rows, head_dim), (*lead[1], keys, head_dim), (*lead[2], keys, head_dim_v)]
    tensors = [torch.randn(shape[4 - axes :], requires_grad=True) for shape in shapes]
    kind = r.choice([None, None, "bool", "float", "learned"])
    mask = None
    if kind:
        full = (batch, heads, rows, keys)[4 - r.randint(2, axes) :]
        shape = [extent if r.random() < 0.7 else 1 for extent in full]
        mask = torch.rand(shape) < 0.8 if kind == "bool" else torch.randn(shape, requires_grad=kind == "learned")
    options = {"scale": r.choice([None, 0.3]), "is_causal": kind is None and r.random() < 0.6}
    return tensors, mask, {**options, **({"enable_gqa": True} if shares else {})}


@pytest.mark.parametrize("seed", range(120))
def test_random_calls(seed):
    tensors, mask, options = random_call(seed)
    leaves = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    out = scaled_dot_product_attention(*tensors, mask, **options)
    want = theirs(*tensors, mask, **options)
    # A row that sees nothing is 0, and its gradients too; PyTorch's is either that or NaN.
    empty = (
        None if mask is None or mask.dtype != torch.bool else ~mask.expand(*want.shape[:-1], -1).any(-1, keepdim=True)
    )
    if empty is not None:
        assert not out.masked_select(empty).any()
        want = want.masked_fill(empty, 0.0)
    assert out.shape == want.shape and torch.allclose(out, want, atol=2e-5)
    if empty is None or not empty.any():
        dout = torch.randn_like(want)
        for ours, other in zip(*(torch.autograd.grad(each, leaves, dout) for each in (out, want))):
            assert ours.shape == other.shape and torch.allclose(ours, other, atol=5e-5)


@pytest.mark.parametrize("rows, keys", [(5, 9), (9, 5), (6, 6), (1, 7), (7, 1)])
def test_causal_is_counted_from_the_upper_left(rows, keys):
    q, k = torch.randn(2, 3, rows, 8), torch.randn(2, 3, keys, 8)
    upper_left = torch.ones(rows, keys, dtype=torch.bool).tril()
    out = scaled_dot_product_attention(q, k, k, is_causal=True)
    assert torch.allclose(out, theirs(q, k, k, upper_left), atol=2e-5)


def test_axes_of_extent_one_are_shared():
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(3, 1, 6, 8), torch.randn(3, 4, 6, 8)
    assert torch.allclose(
        scaled_dot_product_attention(q, k, v), theirs(q.expand(3, -1, -1, -1), k.expand(-1, 4, -1, -1), v), atol=2e-5
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_a_mask_in_float32(dtype):
    q, mask = torch.randn(2, 3, 6, 8).to(dtype), torch.randn(6, 6)
    out = scaled_dot_product_attention(q, q, q, mask)
    assert out.dtype == dtype and torch.allclose(out.float(), theirs(q.float(), q.float(), q.float(), mask), atol=5e-2)


def test_compiled():
    torch._dynamo.reset()
    fast = torch.compile(scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, keys in ((5, 7), (6, 9), (8, 8), (9, 4)):
        q, k = torch.randn(2, 4, rows, 8), torch.randn(2, 4, keys, 8)
        assert torch.equal(fast(q, k, k, is_causal=True), scaled_dot_product_attention(q, k, k, is_causal=True))
        mask = torch.randn(rows, keys)
        assert torch.equal(fast(q, k, k, mask), scaled_dot_product_attention(q, k, k, mask))


def test_what_is_refused():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool)

    def refuse(kind, sentence, *arguments, **options):
        with pytest.raises(kind, match=sentence):
            scaled_dot_product_attention(*arguments, **options)

    refuse(ValueError, r"\[2, 4, 5, 8\], \[2, 2, 5, 8\], .*; write enable_gqa=True", q, k, k)
    refuse(ValueError, "attn_mask is given and is_causal is True", q, q, q, mask, is_causal=True)
    refuse(NotImplementedError, "dropout_p is 0.1; flash_dmattn has no dropout", q, q, q, dropout_p=0.1)
    refuse(TypeError, "is_causal is 'yes'", q, q, q, is_causal="yes")
    refuse(
        ValueError,
        r"attn_mask has shape \[3, 5, 5\]; it must broadcast to \[2, 4, 5, 5\]",
        q,
        q,
        q,
        mask.expand(3, 5, 5),
    )
    refuse(ValueError, r"attn_mask has shape \[1, 5, 5\]; it must broadcast to \[5, 5\]", *[q[0, 0]] * 3, mask[None])
    refuse(ValueError, "one head dim", q, q[..., :4], q)
    refuse(ValueError, "as many rows", q, q, q[:, :, :4])
    refuse(ValueError, "as long as each other", q, q[:1].expand(3, -1, -1, -1), q)
    refuse(ValueError, "query has 5 axes", q[None], q, q)
    refuse(TypeError, "value is None", q, q, None)
    refuse(TypeError, "attn_mask is 3", q, q, q, 3)
