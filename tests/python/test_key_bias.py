"""test_key_bias.py: the bias of a dynamic mask and its gradients against PyTorch's operations."""

import numpy as np
import pytest
import torch
from flash_dmattn import flash_dmattn_func, masks
from torch.nn.functional import softplus

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def by_operations(dt, a, exponential, real=None):
    """In float64."""
    bias = (a.double() * softplus(dt.double(), threshold=1000.0)).transpose(1, 2)
    bias = bias.exp() if exponential else bias
    return bias if real is None else bias.masked_fill(~real[:, None], -torch.inf)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponential", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "of_dt, of_a", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16"), ("float64", "float64")]
)
def test_it_is_the_operations(of_dt, of_a, padded, exponential, device):
    if device == "cuda" and of_dt == "float64":
        pytest.skip("the library computes float64 on the CPU only")
    of_dt, of_a = getattr(torch, of_dt), getattr(torch, of_a)
    wide = torch.randn(2, 70, 3 + 5, device=device).mul(2).to(of_dt)
    dt = wide[..., 5:].detach().requires_grad_()  # not contiguous
    a = torch.tensor([1.0, -0.5, 0.0], device=device).to(of_a).requires_grad_()
    real = torch.rand(2, 70, device=device) < 0.7 if padded else None
    bias = masks.key_bias(dt, a, exponential, real)
    want = by_operations(dt, a, exponential, real)
    assert bias.dtype == torch.promote_types(of_dt, of_a) and bias.shape == (2, 3, 70)
    rtol = TOLERANCE[bias.dtype]
    torch.testing.assert_close(bias.double(), want, rtol=rtol, atol=rtol)
    flow = torch.randn_like(bias)
    flow = flow if real is None else flow * real[:, None]
    have, expected = (torch.autograd.grad(each, (dt, a), flow.to(each.dtype)) for each in (bias, want))
    for found, right in zip(have, expected):
        assert found.dtype == right.dtype
        scale = float(right.double().abs().max())
        torch.testing.assert_close(found.double(), right.double(), rtol=2 * TOLERANCE[found.dtype], atol=2 * TOLERANCE[found.dtype] * scale)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_learns_through_it(device):
    """From dt to the loss and back, with keys that nobody sees, one of them NaN."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16, device=device) for _ in range(3))
    dt = torch.randn(1, 40, 2, device=device)
    real = torch.ones(1, 40, dtype=torch.bool, device=device)
    real[0, 7] = False
    grads = []
    for number in (0.5, torch.nan):
        given = dt.clone()
        given[0, 7] = number
        given.requires_grad_()
        a = torch.ones(2, device=device, requires_grad=True)
        bias = masks.key_bias(given, a, key_padding_mask=real)
        pair = masks.topk_intervals(bias, 6, key_padding_mask=real)
        out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, key_intervals=pair)
        grads.append(torch.autograd.grad(out.square().mean(), (given, a)))
    for one, other in zip(*grads):
        assert torch.equal(one, other) and one.abs().sum() > 0


def test_numpy_is_torch():
    rng = np.random.default_rng(0)
    dt, a = rng.standard_normal((2, 9, 3)).astype(np.float32), rng.standard_normal(3)
    bias = masks.key_bias(dt, a, True)
    assert bias.dtype == np.float64 and bias.shape == (2, 3, 9)
    np.testing.assert_array_equal(bias, masks.key_bias(torch.from_numpy(dt), torch.from_numpy(a), True).numpy())


@pytest.mark.parametrize("device", DEVICES)
def test_operator_checks(device):
    dt, a = torch.randn(2, 20, 3, device=device, requires_grad=True), torch.randn(3, device=device, requires_grad=True)
    real = torch.rand(2, 20, device=device) < 0.5
    for padding in (None, real):
        torch.library.opcheck(torch.ops.flash_dmattn.key_bias.default, (dt, a, padding, True))


def test_refused():
    with pytest.raises(ValueError, match="dt has 2 axes"):
        masks.key_bias(torch.randn(3, 4), torch.randn(4))
    with pytest.raises(ValueError, match=r"a has shape \[3\]; it must be \[4\]"):
        masks.key_bias(torch.randn(2, 3, 4), torch.randn(3))
    with pytest.raises(ValueError, match="padding is float32"):
        masks.key_bias(torch.randn(2, 3, 4), torch.randn(4), key_padding_mask=torch.ones(2, 3))
