"""test_nested.py: jagged nested tensors as packed calls."""

import pytest
import torch
from conftest import assert_close
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, scaled_dot_product_attention

LENGTHS = (3, 5, 2)


def jagged(values, offsets):
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def problem():
    """Leaves, and nested tensors made of them."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 3, 8, 10])
    leaves = [torch.randn(10, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    return leaves, [jagged(each, offsets) for each in leaves]


def packed(leaves, **options):
    offsets = torch.tensor([0, 3, 8, 10], dtype=torch.int32)
    return flash_dmattn_varlen_func(*leaves, offsets, offsets, 5, 5, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_a_jagged_call_is_a_packed_call(causal):
    leaves, (q, k, v) = problem()
    options = {"is_causal": causal, "softcap": 3.0, "return_lse": True, "attn_bias": torch.randn(3, 1, 1, 5)}
    out, lse = flash_dmattn_func(q, k, v, **options)
    want, want_lse = packed(leaves, **options)
    assert out.is_nested and out.layout is torch.jagged and out.shape == q.shape and (out + q).shape == q.shape
    assert torch.equal(out.values(), want) and torch.equal(lse.values(), want_lse)
    assert [part.shape for part in lse.unbind()] == [(4, length) for length in LENGTHS]
    have = torch.autograd.grad(out.values().square().sum() + lse.values().sum(), leaves)
    for ours, theirs in zip(have, torch.autograd.grad(want.square().sum() + want_lse.sum(), leaves)):
        assert_close(ours, theirs, torch.float32, "gradient")
    for part, given in zip(
        flash_dmattn_func(q, k, v, is_causal=causal).unbind(), zip(q.unbind(), k.unbind(), v.unbind())
    ):
        assert_close(
            part, flash_dmattn_func(*(each[None] for each in given), is_causal=causal)[0], torch.float32, "part"
        )


def test_lengths_of_query_and_key_may_differ():
    q = torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (1, 4)], layout=torch.jagged)
    offsets = torch.tensor([0, 6, 9])
    k, v = (jagged(torch.randn(9, 4, 8), offsets) for _ in range(2))
    for part, given in zip(
        flash_dmattn_func(q, k, v, is_causal=True).unbind(), zip(q.unbind(), k.unbind(), v.unbind())
    ):
        assert_close(part, flash_dmattn_func(*(each[None] for each in given), is_causal=True)[0], torch.float32, "part")


def test_sdpa_takes_them_as_pytorchs_does():
    _, nested = problem()
    ours = scaled_dot_product_attention(*(each.transpose(1, 2) for each in nested), is_causal=True, enable_gqa=True)
    assert torch.equal(ours.transpose(1, 2).values(), flash_dmattn_func(*nested, is_causal=True).values())


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    leaves, nested = problem()
    fast = torch.compile(
        lambda q, k, v: flash_dmattn_func(q, k, v, is_causal=True), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    out = fast(*nested)
    assert_close(out.values(), packed(leaves, is_causal=True), torch.float32, "out")
    torch.autograd.grad(out.values().sum(), leaves)


def test_what_is_refused():
    leaves, (q, k, v) = problem()

    def refuse(kind, sentence, *tensors, **options):
        with pytest.raises(kind, match=sentence):
            flash_dmattn_func(*tensors, **options)

    refuse(TypeError, "key is not nested and jagged, but query is", q, leaves[1], v)
    refuse(TypeError, "key is a nested tensor", leaves[0][None], k, v)
    refuse(ValueError, "offsets of their own", q, k, jagged(leaves[2], torch.tensor([0, 3, 8, 10])))
    refuse(ValueError, "ragged along axis 2; it must be", q.transpose(1, 2), k, v)
    refuse(
        TypeError,
        "query is a nested tensor; .*torch.jagged",
        torch.nested.nested_tensor([leaves[0], leaves[0][:3]]),
        k,
        v,
    )
    refuse(TypeError, "query is a nested tensor", q, k, v, return_attn_probs=True)
    gaps = torch.nested.narrow(
        torch.randn(3, 6, 4, 8), 1, torch.tensor([0, 1, 0]), torch.tensor([3, 2, 4]), torch.jagged
    )
    refuse(ValueError, r"gaps between its sequences; give query.contiguous\(\)", gaps, gaps, gaps)
    with pytest.raises(ValueError, match="offsets of their own"):
        scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, *[jagged(leaves[0], k.offsets().clone())] * 2)), is_causal=True
        )
