"""gemm() on CUDA tensors, against float64 torch. Skipped, with one line, where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch
from flash_dmattn import gemm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CUDA tensors are not covered")

DTYPES = (torch.float16, torch.bfloat16)


def numbers(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def check(found, want, k):
    eps = 1e-3 if found.dtype is torch.float16 else 8e-3
    torch.testing.assert_close(found.double(), want, atol=eps * max(1, k) ** 0.5, rtol=2 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", [(128, 256, 512), (1000, 1096, 2048), (16, 8192, 1024), (7, 13, 5), (3, 4, 0)], ids=str)
def test_values(dtype, layout, shape):
    m, n, k = shape
    a = numbers(m, k, dtype=dtype) if layout[0] == "N" else numbers(k, m, dtype=dtype).T
    b = numbers(k, n, dtype=dtype, seed=1) if layout[1] == "N" else numbers(n, k, dtype=dtype, seed=1).T
    c = numbers(m, n, dtype=dtype, seed=2)
    check(gemm(a, b), a.double() @ b.double(), k)
    check(gemm(a, b, c, 0.5, -2.0), 0.5 * (a.double() @ b.double()) - 2.0 * c.double(), k)


def test_batches_and_gradients():
    a, b, c = numbers(6, 96, 200), numbers(200, 136, seed=1), numbers(1, 96, 136, seed=2)
    leaves = [each.requires_grad_() for each in (a, b, c)]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    out, want = gemm(*leaves), exact[0] @ exact[1] + exact[2]
    check(out, want.detach(), 200)
    flow = numbers(6, 96, 136, seed=3)
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, flow), torch.autograd.grad(want, exact, flow.double()), strict=True
    ):
        check(found, wanted, 6 * 136)


def test_splits_give_the_same_bits():
    a, b = numbers(256, 65536), numbers(65536, 256, seed=1)
    first = gemm(a, b)
    assert all(torch.equal(gemm(a, b), first) for _ in range(5))
    check(first, a.double() @ b.double(), 65536)


def test_operators_graphs_and_compile():
    a, b = numbers(256, 512), numbers(512, 384, seed=1)
    want = gemm(a, b)
    torch.library.opcheck(torch.ops.flash_dmattn.gemm, (a, b, None, 1.0, 0.0, False, None))
    assert torch.equal(torch.compile(gemm, fullgraph=True)(a, b), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemm(a, b)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, want)
