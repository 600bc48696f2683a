"""softmax() on CUDA tensors, against float64 torch on the CPU. Skipped, with one line, where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch
from flash_dmattn import softmax

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CUDA tensors are not covered")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (3 * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7, 33), (300, 256), (2, 3, 5, 1000), (2, 1, 2, 3, 64), (3, 70001)], ids=str)
def test_values_and_gradients(dtype, log, shape):
    x = numbers(*shape, dtype=dtype).requires_grad_()
    exact = x.detach().cpu().double().requires_grad_()
    function = torch.log_softmax if log else torch.softmax
    out, want = softmax(x, scale=0.5, log=log), function(0.5 * exact, -1)
    scale = 20 if log else 1
    torch.testing.assert_close(out.cpu().double(), want, atol=scale * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    flow = numbers(*shape, dtype=dtype, seed=1)
    (found,) = torch.autograd.grad(out, x, flow)
    (wanted,) = torch.autograd.grad(want, exact, flow.cpu().double())
    size = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.cpu().double(), wanted, atol=8 * TOLERANCE[dtype] * size, rtol=0.02)


def test_masks_and_dead_rows():
    x = numbers(4, 3, 20, 50)
    for shape in ((4, 3, 20, 50), (4, 1, 20, 50), (1, 1, 20, 1), (20, 50), (50,)):
        mask = torch.rand(shape, device="cuda") < 0.5
        want = torch.softmax(x.double().masked_fill(~mask, -torch.inf), -1).nan_to_num(0.0)
        torch.testing.assert_close(softmax(x, mask).double(), want, atol=1e-6, rtol=1e-5)
    dead = torch.full((2, 9), -torch.inf, device="cuda", requires_grad=True)
    assert (softmax(dead) == 0).all() and (softmax(dead, log=True) == -torch.inf).all()
    assert (torch.autograd.grad(softmax(dead).sum(), dead)[0] == 0).all()


def test_views():
    wide = numbers(40, 6, 130, dtype=torch.float16)
    for view in (wide[:, 1:4, 3:100], wide.transpose(0, 1), wide[..., ::2], wide[:1].expand(5, -1, -1)):
        torch.testing.assert_close(softmax(view).float(), torch.softmax(view.float(), -1), atol=6e-4, rtol=2e-3)


def test_kernels_by_name():
    x = numbers(50, 4096, dtype=torch.bfloat16)
    want = torch.softmax(x.double(), -1).bfloat16()
    for name in ("naive", "online", "vector", "resident", "split"):
        torch.testing.assert_close(softmax(x, kernel=f"softmax.{name}"), want, atol=1e-3, rtol=1e-2)


def test_operators_streams_graphs_and_compile():
    x = numbers(30, 1000)
    want = softmax(x)
    operators = torch.ops.flash_dmattn
    torch.library.opcheck(operators.softmax, (x.clone().requires_grad_(), None, 1.0, False, None))
    assert torch.equal(torch.compile(softmax, fullgraph=True)(x), want)
    stream = torch.cuda.Stream()
    found = softmax(x, stream=stream.cuda_stream)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = softmax(x)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, want) and torch.equal(captured, want)


def test_second_derivatives():
    x = numbers(4, 9).requires_grad_()
    for log in (False, True):
        function = torch.log_softmax if log else torch.softmax
        found, wanted = (
            torch.autograd.grad(torch.autograd.grad(y.square().sum(), x, create_graph=True)[0].sin().sum(), x)[0]
            for y in (softmax(x, log=log), function(x, -1))
        )
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
