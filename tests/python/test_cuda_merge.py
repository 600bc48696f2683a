"""merge() on CUDA tensors, against float64 on the CPU. Skipped, with one line, where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, merge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CUDA tensors are not covered")

INF = float("inf")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def parts_of(dtype=torch.float32, batch=2, rows=37, heads=3, head_dim=64, seed=0):
    """out1, lse1, out2, lse2; some rows without keys in one part or both, where out is NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    parts = []
    for which in range(2):
        out = torch.randn(batch, rows, heads, head_dim, device="cuda", generator=generator)
        lse = 4 * torch.randn(batch, heads, rows, device="cuda", generator=generator)
        if rows > 4:
            lse[:, 0, 1 + which] = INF
            lse[:, :, 4] = INF
        parts += [out.masked_fill(lse.isinf().transpose(1, 2)[..., None], float("nan")).to(dtype), lse]
    return parts


def check(parts):
    dtype = parts[0].dtype
    out, lse = merge(*parts)
    want, want_lse = merge(*(each.detach().cpu().double() for each in parts))
    assert (out.dtype, lse.dtype, out.is_cuda, out.shape, lse.shape) == (
        dtype, torch.float32, True, parts[0].shape, parts[1].shape)  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.cpu().double(), want_lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 20, 64, 80, 128, 256, 1024, 4096])
def test_values(dtype, head_dim):
    check(parts_of(dtype, head_dim=head_dim))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1000, 32), (70000, 1, 1), (3, 2049, 5)], ids=str)
def test_many_rows(shape):
    batch, rows, heads = shape
    check(parts_of(torch.bfloat16, batch, rows, heads, 16))


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (2, 3, 2, 0)], ids=str)
def test_nothing(shape):
    batch, rows, heads, _ = shape
    out, lse = torch.zeros(shape, device="cuda"), torch.ones(batch, heads, rows, device="cuda")
    merged, both = merge(out, lse, out, lse)
    assert merged.shape == shape
    torch.testing.assert_close(both, lse + torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_strides(dtype):
    wide = parts_of(dtype, 2, 20, 6, 48)
    heads_first = [wide[0].transpose(1, 2).contiguous().transpose(1, 2), wide[1], wide[2], wide[3]]
    check(heads_first)
    check([wide[0][:, 3:, 1:5, :32], wide[1][:, 1:5, 3:], wide[2][:, :17, 2:, 16:], wide[3][:, 2:, :17]])
    check([wide[0][..., 1:33], wide[1], wide[2][..., 8:40], wide[3]])  # an address that is no multiple of 16
    check([wide[0][..., ::3], wide[1], wide[2][..., 1::3], wide[3]])  # a last axis that is not contiguous
    check([wide[0][:1].expand(2, -1, -1, -1), wide[1], wide[2], wide[3][:, :1].expand(-1, 6, -1)])


def test_extremes():
    parts = parts_of(torch.float32)
    parts[0].nan_to_num_(0.0), parts[2].nan_to_num_(0.0)
    for a, b in ((3e38, -3e38), (-3e38, 3e38), (3e38, 3e38), (0.0, 88.0), (1e-30, 0.0), (-INF, 1.0), (-INF, INF)):
        check([parts[0], torch.full_like(parts[1], a), parts[2], torch.full_like(parts[3], b)])
    assert merge(parts[0], torch.full_like(parts[1], float("nan")), *parts[2:])[0].isnan()[:, 10].all()


@pytest.mark.parametrize("bias", [-1e4, -1e6, -1e9, -3e38])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_parts_beside_a_low_bias_count_their_keys(dtype, bias):
    q, k = torch.randn(1, 3, 2, 64, device="cuda").to(dtype), torch.zeros(1, 4000, 2, 64, device="cuda", dtype=dtype)
    v = torch.zeros_like(k)
    v[:, 1000:] = 1
    biases = torch.full((1, 1, 1, 4000), bias, device="cuda")
    parts = [
        flash_dmattn_func(q, k[:, keys], v[:, keys], attn_bias=biases[..., keys], return_lse=True, return_lse_low=True)
        for keys in (slice(0, 1000), slice(1000, 4000))
    ]
    whole = flash_dmattn_func(q, k, v, attn_bias=biases, return_lse=True, return_lse_low=True)
    out, lse, lse_low = merge(*parts[0][:2], *parts[1][:2], lse_low1=parts[0][2], lse_low2=parts[1][2])
    torch.testing.assert_close(out, torch.full_like(out, 0.75), atol=4e-3, rtol=0)
    assert ((lse.double() - whole[1].double()) + (lse_low.double() - whole[2].double())).abs().max() < 1e-5
    wide = [each.cpu().double() for each in (*parts[0], *parts[1])]
    want = merge(*wide[:2], *wide[3:5], lse_low1=wide[2], lse_low2=wide[5])
    torch.testing.assert_close(out.cpu().double(), want[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("other", [0.0, 1000.0, -1000.0, INF, -INF])
@pytest.mark.parametrize("where", ["out", "lse", "lse_low"])
def test_nan_stays_nan(where, other):
    parts = [torch.randn(1, 3, 2, 64, device="cuda"), torch.zeros(1, 2, 3, device="cuda")]
    parts += [torch.randn(1, 3, 2, 64, device="cuda"), torch.full((1, 2, 3), other, device="cuda")]
    lows = [torch.zeros(1, 2, 3, device="cuda"), torch.zeros(1, 2, 3, device="cuda")]
    {"out": parts[0][0, 1, 1], "lse": parts[1][0, 1, 1], "lse_low": lows[0][0, 1, 1]}[where].fill_(float("nan"))
    for turned in (False, True):
        order = parts[2:] + parts[:2] if turned else parts
        out, lse, _ = merge(*order, lse_low1=lows[turned], lse_low2=lows[not turned])
        assert out[0, 1, 1].isnan().all() and lse[0, 1, 1].isnan() == (where != "out")
        assert out[0, 0].isfinite().all() and out[0, 2].isfinite().all()


def test_attention_in_two_parts():
    q, k, v = (torch.randn(2, 300, heads, 64, device="cuda", dtype=torch.float32) for heads in (4, 2, 2))
    leaves = [each.requires_grad_() for each in (q, k, v)]
    whole = flash_dmattn_func(q, k, v, return_lse=True)
    first = flash_dmattn_func(q, k[:, :111], v[:, :111], return_lse=True)
    rest = flash_dmattn_func(q, k[:, 111:], v[:, 111:], return_lse=True)
    merged = merge(*first, *rest)
    flows = [torch.randn_like(each) for each in whole]
    for a, b in zip(merged, whole):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    for a, b in zip(torch.autograd.grad(merged, leaves, flows), torch.autograd.grad(whole, leaves, flows)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_packed_attention():
    q, k = torch.randn(900, 4, 64, device="cuda").half(), torch.randn(1200, 2, 64, device="cuda").half()
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, 400, 900], [0, 500, 1200]))
    even = torch.arange(700, device="cuda") % 2 == 0
    call = (q, k, k, cu_q, cu_k, 500, 700)
    parts = [flash_dmattn_varlen_func(*call, attn_mask=mask[None], return_lse=True) for mask in (even, ~even)]
    for found, expected in zip(merge(*parts[0], *parts[1]), flash_dmattn_varlen_func(*call, return_lse=True)):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients(dtype):
    parts = parts_of(dtype)
    for part in parts[::2]:
        part.nan_to_num_(0.0)
    parts = [each.requires_grad_() for each in parts]
    flows = [torch.randn_like(each) for each in merge(*parts)]
    exact = [each.detach().cpu().double().requires_grad_() for each in parts]
    found = torch.autograd.grad(merge(*parts), parts, flows)
    expected = torch.autograd.grad(merge(*exact), exact, [each.cpu().double() for each in flows])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.cpu().double(), b, atol=20 * TOLERANCE[dtype], rtol=20 * TOLERANCE[dtype])


def test_streams_graphs_and_the_same_bits():
    parts = parts_of(torch.bfloat16)
    expected = merge(*parts)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    found = merge(*parts, stream=stream.cuda_stream)
    stream.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = [each.clone() for each in parts]  # merged only when the stream has come to it
        again = merge(*late)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = merge(*parts)
    for each in captured:
        each.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for results in (found, again, captured):
        assert all(torch.equal(a, b) for a, b in zip(results, expected))
    assert all(torch.equal(a, b) for a, b in zip(merge(*parts[2:], *parts[:2]), expected))


def test_in_place():
    """fdm_merge() lets the result take the place of either part; through the extension, as merge() gives new tensors."""
    from flash_dmattn import _native
    from flash_dmattn._operators import native_view

    for dtype in TOLERANCE:
        for head_dim in (64, 3, 1024):
            for place in (0, 2):
                parts = parts_of(dtype, 3, 333, 5, head_dim)
                expected = merge(*parts)
                results = parts[place : place + 2]
                stream = torch.cuda.current_stream().cuda_stream
                out1, lse1, out2, lse2, out, lse = map(native_view, [*parts, *results])
                _native.merge(out1, lse1, None, out2, lse2, None, out, lse, None, stream)
                assert all(torch.equal(a, b) for a, b in zip(results, expected))


def test_operator_and_compile():
    parts = parts_of(torch.float32)
    for part in parts[::2]:
        part.nan_to_num_(0.0)
    out1, lse1, out2, lse2 = (each.requires_grad_() for each in parts)
    torch.library.opcheck(torch.ops.flash_dmattn.merge, (out1, lse1, None, out2, lse2, 1e-7 * torch.randn_like(lse2)))
    compiled = torch.compile(merge, fullgraph=True)
    for found, expected in zip(compiled(*parts), merge(*parts)):
        torch.testing.assert_close(found, expected)


def test_arrays():
    cupy = pytest.importorskip("cupy")
    parts = parts_of(torch.float32)
    found = merge(*(cupy.from_dlpack(each) for each in parts))
    assert all(isinstance(each, cupy.ndarray) for each in found)
    for a, b in zip(found, merge(*parts)):
        assert torch.equal(torch.from_dlpack(a), b)


def test_refusals():
    out1, lse1, out2, lse2 = parts_of()
    with pytest.raises(NotImplementedError, match="out1 is float64, which is merged on the CPU only"):
        merge(out1.double(), lse1.double(), out2.double(), lse2.double())
    with pytest.raises(ValueError, match="lse2 is on cpu, but out1 is on cuda"):
        merge(out1, lse1, out2, lse2.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device: a second is not covered")
def test_another_device():
    parts = [each.to("cuda:1") for each in parts_of(torch.float16)]
    check(parts)
    assert merge(*parts)[0].device.index == 1 and torch.cuda.current_device() == 0
