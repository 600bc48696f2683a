"""test_gemm.py: gemm() without a device: refusals, shapes under fake tensors, and the gradient's formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flash_dmattn import gemm


def test_refusals():
    a = torch.zeros(3, 4, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="a is on the CPU; gemm is for tensors on a CUDA device"):
        gemm(a, a.T)
    with pytest.raises(NotImplementedError, match="a is on the CPU; gemm is for arrays on a CUDA device"):
        gemm(np.zeros((3, 4), np.float16), np.zeros((4, 3), np.float16))
    with pytest.raises(ValueError, match="b has 1 axes; it needs 2, or 3 with a batch"):
        gemm(a, torch.zeros(4, dtype=torch.float16))
    with pytest.raises(TypeError, match="b is a list"):
        gemm(a, [1])
    with pytest.raises(ValueError, match=r"b is \[3, 4\]; it must be \[1, 4, 4\]"):
        gemm(a, a)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b = torch.empty(5, 2, 7, dtype=torch.bfloat16), torch.empty(7, 3, dtype=torch.bfloat16)
        assert gemm(a, b).shape == (5, 2, 3)
        assert gemm(a[:1], b.expand(4, 7, 3)).shape == (4, 2, 3)
        assert gemm(a[0], b).shape == (2, 3)


def test_gradient_formula(monkeypatch):
    from flash_dmattn import _gemm_torch

    class Context:
        needs_input_grad = (True, True, True)

    def product(a, b, c, alpha, beta, accumulate16, kernel):
        return alpha * (a @ b)

    class Operators:
        class flash_dmattn:
            gemm = staticmethod(product)

    class Torch:
        ops = Operators

    monkeypatch.setattr(_gemm_torch, "torch", Torch)
    torch.manual_seed(0)
    for a_shape, b_shape, c_shape in (((4, 5), (5, 3), (4, 3)), ((2, 4, 5), (5, 3), (1, 4, 3)), ((1, 4, 5), (2, 5, 3), (4, 3))):
        a, b, c = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (a_shape, b_shape, c_shape))
        out = 0.5 * (a @ b) - 2.0 * c
        flow = torch.randn_like(out)
        context = Context()
        context.saved_tensors, context.c_shape, context.alpha, context.beta = (a, b), c.shape, 0.5, -2.0
        context.accumulate16, context.kernel = False, None
        for found, wanted in zip(_gemm_torch._backward(context, flow), torch.autograd.grad(out, (a, b, c), flow)):
            torch.testing.assert_close(found, wanted)
