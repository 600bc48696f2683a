"""test_upstream_defects.py: suspected defects of flash-dmattn 1.2, results and gradients against float64 by the formula."""

import pytest
import torch
from conftest import assert_close, truth, visible_pairs
from flash_dmattn import flash_dmattn_func, masks

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def leaves(dtype, seqlen_q, seqlen_k, heads=2, dim=16):
    shapes = [(1, seqlen_q, heads, dim), (1, seqlen_k, heads, dim), (1, seqlen_k, heads, dim)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def check(inputs, mask=None, bias=None, intervals=None, **options):
    """out, lse and every gradient of one call; returns out, lse and the gradients. bias gets a gradient if it wants one."""
    dtype = inputs[0].dtype
    wanted = inputs + ([bias] if bias is not None and bias.requires_grad else [])
    out, lse = flash_dmattn_func(*inputs, mask, bias, key_intervals=intervals, return_lse=True, **options)
    upstream = torch.randn(out.shape, dtype=dtype)
    gradients = torch.autograd.grad(out, wanted, upstream)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact_bias = None if bias is None else bias.detach().double().requires_grad_(bias.requires_grad)
    true_out, true_lse, _ = truth(*exact, mask, exact_bias, intervals=intervals, **options)
    true_wanted = exact + ([exact_bias] if len(wanted) > len(exact) else [])
    true_gradients = torch.autograd.grad(true_out, true_wanted, upstream.double())
    assert_close(out, true_out, dtype, "out")
    assert_close(lse, true_lse, dtype, "lse")
    for name, ours, true in zip(["dq", "dk", "dv", "dbias"], gradients, true_gradients):
        assert_close(ours, true, dtype, name)
    return out, lse, gradients


@both
def test_1_stale_query_tile(dtype):
    # A key block that only the upper rows see: tiles go from inactive to active along the backward walk.
    mask = torch.zeros(1, 1, 300, 300, dtype=torch.bool)
    mask[..., :60, 130:260] = True
    mask[..., 200:, :10] = True
    check(leaves(dtype, 300, 300), mask)


@both
def test_1_rising_bias_is_a_sliding_window(dtype):
    # The 256 largest of the visible keys are the 256 newest.
    start, end = masks.topk_intervals(torch.arange(2048.0).expand(1, 1, 2048), 256, 2048)
    inputs = leaves(dtype, 2048, 2048, heads=1)
    out, _, _ = check(inputs, intervals=(start, end))
    window = flash_dmattn_func(*inputs, is_causal=True, window_size=(255, 0))
    assert_close(out.detach(), window.detach(), dtype, "out against the sliding window")


@both
def test_1_falling_bias_keeps_the_first_keys(dtype):
    start, end = masks.topk_intervals(-torch.arange(2048.0).expand(1, 1, 2048), 256, 2048)
    _, _, (_, dk, dv) = check(leaves(dtype, 2048, 2048, heads=1), intervals=(start, end))
    assert torch.all(dk[:, 256:] == 0) and torch.all(dv[:, 256:] == 0) and torch.all(dv[:, :256] != 0)


@both
def test_2_softcap_with_bias(dtype):
    # The cap is multiplied back, and the bias stands outside the tanh.
    inputs = [(4 * tensor.detach()).requires_grad_() for tensor in leaves(dtype, 20, 20)]
    check(inputs, bias=(10 * torch.randn(1, 2, 20, 20)).requires_grad_(), softcap=5.0)


@both
@pytest.mark.parametrize("seqlen_k", [65, 80, 112, 127, 129])
def test_3_key_tail(seqlen_k, dtype):
    mask = torch.rand(1, 1, 70, seqlen_k) < 0.5
    check(leaves(dtype, 70, seqlen_k), mask, torch.randn(1, 1, 70, seqlen_k).requires_grad_())


@both
def test_4_row_tail_is_not_read(dtype):
    # What follows the last row of the bias is NaN, what follows the last row of the mask shows every key.
    bias, mask = torch.full((80, 67), torch.nan), torch.ones(80, 67, dtype=torch.bool)
    bias[:67], mask[:67] = torch.randn(67, 67), torch.rand(67, 67) < 0.5
    check(leaves(dtype, 67, 67), mask[:67][None, None], bias[:67][None, None])


@both
def test_5_rows_without_keys(dtype):
    mask = torch.zeros(1, 1, 200, 1, dtype=torch.bool)
    mask[:, :, 150:] = True
    out, lse, (dq, _, _) = check(leaves(dtype, 200, 200), mask)
    assert torch.all(out[:, :150] == 0) and torch.all(lse[..., :150] == torch.inf) and torch.all(dq[:, :150] == 0)


def test_6_scale_is_never_ignored():
    q = torch.randn(1, 8, 1, 16)
    assert not torch.allclose(flash_dmattn_func(q, q, q, scale=3.0), flash_dmattn_func(q, q, q))


@both
def test_7_fewer_keys_than_the_window(dtype):
    causal = visible_pairs(128, 128, True)
    lowest = torch.finfo(torch.float32).min
    keep = masks.create_mask(torch.randn(1, 1, 1, 128), causal[None, None], 1, 128, 128, 1024, lowest)
    assert torch.equal(keep[0, 0], causal)
    check(leaves(dtype, 128, 128), intervals=masks.topk_intervals(torch.randn(1, 2, 128), 1024, 128))
