"""test_forward.py: results of the forward call against float64, and the shapes of masks and biases it accepts."""

import pytest
import torch
from conftest import assert_close, call, random_problem, truth
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func


@pytest.mark.parametrize("seed", range(60))
def test_random_problem_matches_float64(seed):
    p = random_problem(seed)
    out, lse = call(flash_dmattn_func, p, return_lse=True)
    expected, expected_lse, _ = truth(**p)
    assert out.dtype == p["q"].dtype
    assert lse.dtype == (torch.float64 if p["q"].dtype == torch.float64 else torch.float32)
    assert_close(out, expected, p["q"].dtype, f"out of seed {seed}")
    assert_close(lse, expected_lse, torch.float32 if lse.dtype == torch.float32 else torch.float64, "lse")


@pytest.mark.parametrize("seed", range(12))
def test_probabilities(seed):
    p = random_problem(seed)
    out, lse, probs = call(flash_dmattn_func, p, return_attn_probs=True)
    expected = truth(**p)[2]
    assert probs.dtype == p["q"].dtype and not probs.requires_grad
    assert_close(probs, expected, p["q"].dtype, "probs")
    assert torch.all(probs[expected == 0] == 0)


def test_returns():
    q = torch.randn(2, 5, 4, 8)
    assert isinstance(flash_dmattn_func(q, q, q), torch.Tensor)
    out, lse = flash_dmattn_func(q, q, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 5)
    assert len(flash_dmattn_func(q, q, q, return_attn_probs=True)) == 3


def test_positional_order_is_upstreams():
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 9, 2, 8)
    mask, bias = torch.rand(1, 2, 6, 9) < 0.8, torch.randn(1, 2, 6, 9)
    by_position = flash_dmattn_func(q, k, k, mask, bias, 0.5, True, 4.0, True)
    by_name = flash_dmattn_func(
        q, k, k, attn_mask=mask, attn_bias=bias, softmax_scale=0.5, is_causal=True, softcap=4.0, deterministic=True
    )
    assert torch.equal(by_position, by_name)
    assert_close(by_position, truth(q, k, k, mask, bias, 0.5, True, 4.0)[0], torch.float32, "out")


def test_scale_is_an_alias_and_zero_is_not_the_default():
    q = torch.randn(1, 4, 1, 8)
    assert torch.equal(flash_dmattn_func(q, q, q, scale=0.25), flash_dmattn_func(q, q, q, softmax_scale=0.25))
    zero = flash_dmattn_func(q, q, q, softmax_scale=0.0)
    assert torch.allclose(zero, q.mean(1, keepdim=True).expand_as(q), atol=1e-6)


def test_two_axis_mask_is_padding():
    q = torch.randn(2, 5, 2, 8)
    keep = torch.tensor([[True, True, False, True, False], [True, False, False, False, False]])
    expected = truth(q, q, q, keep[:, None, None, :])[0]
    assert_close(flash_dmattn_func(q, q, q, keep), expected, torch.float32, "padding")
    assert_close(
        flash_dmattn_func(q, q, q, keep[:1]), truth(q, q, q, keep[:1, None, None])[0], torch.float32, "one row"
    )


def test_three_axes_have_no_query_axis():
    q = torch.randn(2, 5, 4, 8)
    mask, bias = torch.rand(2, 2, 5) < 0.7, torch.randn(2, 4, 5)
    out = flash_dmattn_func(q, q[:, :, :2], q[:, :, :2], mask, bias)
    expected = truth(q, q[:, :, :2], q[:, :, :2], mask[:, :, None], bias[:, :, None])[0]
    assert_close(out, expected, torch.float32, "out")


def test_row_without_keys():
    q = torch.randn(1, 4, 2, 8)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[0, 0, 2] = False
    out, lse = flash_dmattn_func(q, q, q, mask, return_lse=True)
    assert torch.all(out[0, 2] == 0) and torch.all(lse[0, :, 2] == torch.inf)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_empty(batch, seqlen_q, seqlen_k):
    q, k = torch.randn(batch, seqlen_q, 2, 8), torch.randn(batch, seqlen_k, 2, 8)
    q.requires_grad_(), k.requires_grad_()
    out, lse = flash_dmattn_func(q, k, k, return_lse=True)
    assert out.shape == q.shape and torch.all(out == 0)
    assert torch.all(lse == torch.inf)
    out.sum().backward()
    assert torch.all(q.grad == 0) and torch.all(k.grad == 0)


def test_views_are_not_copied_and_agree():
    bhsd = torch.randn(2, 4, 6, 8)
    view = bhsd.transpose(1, 2)
    assert torch.equal(flash_dmattn_func(view, view, view), flash_dmattn_func(*[view.contiguous()] * 3))
    wide = torch.randn(2, 6, 1, 8).expand(2, 6, 4, 8)
    assert_close(flash_dmattn_func(view, wide, wide), truth(view, wide, wide)[0], torch.float32, "expanded")
    packed = torch.randn(2, 6, 3, 4, 8)
    q, k, v = packed.unbind(2)
    assert_close(flash_dmattn_func(q, k, v), truth(q, k, v)[0], torch.float32, "slices")


def test_lowest_finite_bias_is_ordinary():
    q = torch.randn(1, 3, 1, 8)
    bias = torch.full((1, 1, 3, 3), torch.finfo(torch.float32).min)
    assert_close(
        flash_dmattn_func(q, q, q, attn_bias=bias), q.mean(1, keepdim=True).expand_as(q), torch.float32, "mean"
    )


def test_minus_infinity_bias_hides():
    q = torch.randn(1, 5, 1, 8)
    bias = torch.zeros(1, 1, 1, 5)
    bias[..., 3] = -torch.inf
    keep = torch.tensor([[True, True, True, False, True]])
    assert torch.allclose(flash_dmattn_func(q, q, q, attn_bias=bias), flash_dmattn_func(q, q, q, keep), atol=1e-6)


def test_threads_do_not_change_bits():
    q = torch.randn(2, 130, 4, 32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(flash_dmattn_func(q, q, q, is_causal=True, deterministic=True))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_float64_runs_on_the_reference_family():
    from flash_dmattn import _native

    q = torch.randn(1, 3, 1, 4, dtype=torch.float64)
    none = [None] * 10
    plan = _native.plan(q, q, q, *none, torch.empty_like(q), None, None, 0, 0, None, False, 0.0, -1, -1, False, False, 0, 1, None, None, False)
    assert plan[0] == "reference"


def test_inference_mode():
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.inference_mode():
        out = flash_dmattn_func(q, q, q)
        assert out.is_inference()
    assert torch.equal(out, flash_dmattn_func(q, q, q))


def test_negated_view():
    plain = torch.randn(1, 4, 2, 8)
    view = torch._neg_view(-plain)
    assert view.is_neg()
    assert torch.equal(flash_dmattn_func(view, view, view), flash_dmattn_func(plain, plain, plain))
    beside = {
        "attn_bias": torch.randn(1, 2, 4, 4),
        "sink": torch.randn(2),
        "key_intervals": (torch.zeros(1, 1, 4, dtype=torch.int32), torch.tensor([[[1, 2, 3, 4]]], dtype=torch.int32)),
        "row_intervals": (torch.zeros(1, 1, 1, 4, dtype=torch.int32), torch.ones(1, 1, 1, 4, dtype=torch.int32)),
    }
    for name, value in beside.items():
        negated = tuple(torch._neg_view(-each) for each in value) if isinstance(value, tuple) else torch._neg_view(-value)
        expected = flash_dmattn_func(plain, plain, plain, **{name: value})
        assert torch.equal(flash_dmattn_func(plain, plain, plain, **{name: negated}), expected)
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    negated = torch._neg_view(-offsets)
    packed = [plain[0]] * 3
    assert torch.equal(
        flash_dmattn_varlen_func(*packed, negated, negated, 3, 3), flash_dmattn_varlen_func(*packed, offsets, offsets, 3, 3)
    )


def test_operators_beside_the_dispatcher_leave_negated_views_to_it():
    from flash_dmattn._operators import is_plain

    assert is_plain(torch.ones(1)) and not is_plain(torch.ones(1), torch._neg_view(torch.ones(1)))


def test_probabilities_of_lowest_biases():
    q = torch.randn(1, 3, 1, 8)
    bias = torch.full((1, 1, 3, 3), torch.finfo(torch.float32).min)
    assert torch.allclose(
        flash_dmattn_func(q, q, q, None, bias, return_attn_probs=True)[2], torch.full((1, 1, 3, 3), 1 / 3)
    )


def test_default_device_does_not_matter():
    from flash_dmattn import masks

    q = torch.randn(1, 4, 2, 8)
    expected = flash_dmattn_func(q, q, q, is_causal=True, return_attn_probs=True)
    with torch.device("meta"):
        pair = masks.causal_intervals(4, 4, "torch")
        ours = flash_dmattn_func(q, q, q, key_intervals=pair, is_causal=True, return_attn_probs=True)
        assert masks.intervals_to_mask(*pair, 4).device.type == "cpu"
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
