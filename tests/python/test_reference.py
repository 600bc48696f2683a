"""test_reference.py: the reference family itself, against float64 PyTorch and finite differences."""

import flash_dmattn
import pytest
import torch
from conftest import assert_close, call, random_problem, truth
from flash_dmattn import _arguments


@pytest.fixture(autouse=True)
def reference_only(monkeypatch):
    monkeypatch.setattr(_arguments, "forced_family", "reference")


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_every_dtype_matches_float64(seed):
    """Rounded once: half an ulp of the dtype and no more, at any size."""
    p = random_problem(seed)
    p["q"], p["k"], p["v"] = (p[name].detach() for name in "qkv")
    out, lse = call(flash_dmattn.flash_dmattn_func, p, return_lse=True)
    want, want_lse, _ = truth(**p)
    dtype = p["q"].dtype
    assert torch.equal(torch.isnan(out), torch.isnan(want))
    error = (out.double() - want).abs()
    ulp = torch.finfo(dtype).eps / 2 * want.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (error <= ulp * 1.001 + 1e-12).all()
    assert_close(lse, want_lse, torch.float64 if dtype == torch.float64 else torch.float32, "lse")


@pytest.mark.parametrize("seed", range(1100, 1112))
def test_gradients_match_finite_differences(seed):
    p = random_problem(seed)
    for name in ("q", "k", "v", "bias"):
        if p[name] is not None:
            p[name] = p[name].double()
    p["softcap"] = 3.0 if seed % 2 else 0.0
    leaves = [p[name] for name in ("q", "k", "v", "bias") if p[name] is not None]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    direction = [torch.randn_like(leaf) for leaf in leaves]
    weights = torch.randn(*p["q"].shape[:3], p["v"].shape[3], dtype=torch.float64)

    def loss(moved):
        names = [name for name in ("q", "k", "v", "bias") if p[name] is not None]
        out, lse = call(flash_dmattn.flash_dmattn_func, p | dict(zip(names, moved)), return_lse=True)
        return (out * weights).sum() + torch.where(torch.isinf(lse), 0.0, lse).sin().sum()

    gradients = torch.autograd.grad(loss(leaves), leaves)
    slope = sum((g * d).sum() for g, d in zip(gradients, direction)).item()
    step = 1e-5
    with torch.no_grad():
        ahead, behind = (
            loss([leaf + sign * step * d for leaf, d in zip(leaves, direction)]).item() for sign in (1, -1)
        )
    assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-5, abs=1e-5)


def test_head_dim_above_the_kernels():
    q, k, v = (torch.randn(1, 3, 2, 1024) for _ in range(3))
    out = flash_dmattn.flash_dmattn_func(q, k, v)
    assert_close(out, truth(q, k, v)[0], torch.float32, "out")
