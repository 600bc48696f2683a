"""Attention on CUDA tensors, against float64 on the CPU. Skipped, with one line, where there is no CUDA device."""

from __future__ import annotations

import threading

import pytest
import torch

import flash_dmattn
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, masks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CUDA tensors are not covered")

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}


def tensors(dtype=torch.bfloat16, batch=2, rows=200, keys=333, heads=4, heads_kv=2, head_dim=64, head_dim_v=None, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    head_dim_v = head_dim_v or head_dim
    return (normal(batch, rows, heads, head_dim), normal(batch, keys, heads_kv, head_dim),
            normal(batch, keys, heads_kv, head_dim_v))


def error(have, want):
    return ((have.double().cpu() - want.double().cpu()).norm() / want.double().cpu().norm()).item()


def on_cpu(value):
    """float64 on the CPU, where the reference family computes; other dtypes as they are."""
    if isinstance(value, tuple):
        return tuple(on_cpu(each) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    return value.cpu().double() if value.is_floating_point() else value.cpu()


def check(q, k, v, **options):
    out, lse = flash_dmattn_func(q, k, v, return_lse=True, **options)
    assert out.is_cuda and lse.is_cuda and out.dtype is q.dtype and lse.dtype is torch.float32
    wide = {name: on_cpu(value) for name, value in options.items()}
    want, want_lse = flash_dmattn_func(on_cpu(q), on_cpu(k), on_cpu(v), return_lse=True, **wide)
    assert error(out, want) < TOLERANCE[q.dtype]
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isposinf(lse).cpu(), ~seen)
    assert (lse.cpu().double() - want_lse)[seen].abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_forward(dtype, head_dim, causal):
    check(*tensors(dtype, head_dim=head_dim), is_causal=causal)


def test_wide_heads():
    check(*tensors(torch.float16, head_dim=512), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_features(dtype):
    q, k, v = tensors(dtype, rows=256, keys=256)
    mask = torch.rand(1, 2, 256, 256, device="cuda") < 0.5
    bias = torch.randn(2, 4, 256, 256, device="cuda", dtype=dtype)
    check(q, k, v, attn_mask=mask)
    check(q, k, v, attn_bias=bias, is_causal=True)
    check(q, k, v, attn_bias=bias.float()[:, :1, :1], attn_mask=mask, softcap=3.0)
    check(q, k, v, window_size=(30, 10))
    check(q, k, v, softmax_scale=-0.3)
    check(q, k, v, attn_mask=torch.rand(2, 256, device="cuda") < 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_top_w_intervals(dtype):
    q, k, v = tensors(dtype, rows=700, keys=700)
    bias = torch.randn(2, 2, 700, device="cuda")
    intervals = masks.topk_intervals(bias, 64)
    assert intervals[0].is_cuda
    check(q, k, v, attn_bias=bias, key_intervals=intervals, is_causal=True)


def test_views_and_odd_addresses():
    q, k, v = tensors()
    q_bhsd = q.transpose(1, 2).contiguous().transpose(1, 2)
    check(q_bhsd, k.expand(2, 333, 2, 64), v, is_causal=True)
    wide = torch.randn(2, 200, 4, 71, device="cuda", dtype=torch.bfloat16)
    check(wide[..., 3:67], k, v)


def test_packed_sequences():
    lengths_q, lengths_k = [5, 0, 130, 64], [9, 3, 200, 0]
    offsets_q = torch.tensor([0, 5, 5, 135, 199], dtype=torch.int32, device="cuda")
    offsets_k = torch.tensor([0, 9, 12, 212, 212], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(total, heads, 64, device="cuda", dtype=torch.float16)
               for total, heads in ((199, 4), (212, 2), (212, 2)))
    out = flash_dmattn_varlen_func(q, k, v, offsets_q, offsets_k, 130, 200, is_causal=True)
    for b in range(4):
        rows, keys = slice(offsets_q[b], offsets_q[b + 1]), slice(offsets_k[b], offsets_k[b + 1])
        if lengths_q[b] and lengths_k[b]:
            want = flash_dmattn_func(*(on_cpu(x)[None] for x in (q[rows], k[keys], v[keys])), is_causal=True)
            assert error(out[rows], want[0]) < 1e-3
        else:
            assert not out[rows].any()
    with pytest.raises(ValueError, match="max_seqlen_k"):
        flash_dmattn_varlen_func(q, k, v, offsets_q, offsets_k, 130, 0)


def test_streams_graphs_and_threads():
    q, k, v = tensors(rows=512, keys=512)
    want = flash_dmattn_func(q, k, v, is_causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = q * 1  # enqueued on the stream: the call must follow it there
        assert torch.equal(flash_dmattn_func(late, k, v, is_causal=True), want)
    graph = torch.cuda.CUDAGraph()
    static = q.clone()
    mask = torch.rand(1, 1, 512, 512, device="cuda") < 0.5  # a call with workspace
    masked = flash_dmattn_func(q, k, v, attn_mask=mask)
    with torch.cuda.graph(graph):
        captured = flash_dmattn_func(static, k, v, is_causal=True)
        captured_mask = flash_dmattn_func(static, k, v, attn_mask=mask)
    static.zero_()
    graph.replay()
    static.copy_(q)
    graph.replay()
    assert torch.equal(captured, want) and torch.equal(captured_mask, masked)
    results = [None] * 24

    def work(index):
        with torch.cuda.stream(stream if index % 2 else torch.cuda.current_stream()):
            results[index] = flash_dmattn_func(q, k, v, is_causal=True)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)


def test_compile_and_operator_checks():
    q, k, v = tensors(rows=64, keys=64)
    compiled = torch.compile(lambda *x: flash_dmattn_func(*x, is_causal=True) * 2, fullgraph=True)
    assert torch.equal(compiled(q, k, v), flash_dmattn_func(q, k, v, is_causal=True) * 2)
    arguments = (q, k, v, *[None] * 6, 0, 0, None, True, 0.0, -1, -1, False)
    torch.library.opcheck(torch.ops.flash_dmattn.forward.default, arguments,
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def test_autocast_and_probabilities():
    q, k, v = tensors(torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert flash_dmattn_func(q, k, v).dtype is torch.bfloat16
    q, k, v = tensors(rows=50, keys=60)
    out, lse, probs = flash_dmattn_func(q, k, v, return_attn_probs=True)
    assert probs.is_cuda and (probs.float().sum(-1) - 1).abs().max() < 0.02


def gradients(function, tensors_in, dlse_weight=0.0, **options):
    """Gradients of a fixed sum of out and lse with respect to q, k, v and, where there is one, the bias."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors_in]
    bias = options.pop("attn_bias", None)
    if bias is not None:
        bias = bias.detach().requires_grad_()
        options["attn_bias"] = bias
    out, lse = function(*leaves, return_lse=True, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device, torch.bfloat16)
    loss = (out * weight.to(out.dtype)).sum()
    if dlse_weight:
        loss = loss + dlse_weight * torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse)).sum()
    return torch.autograd.grad(loss, leaves + ([bias] if bias is not None else []))


def check_gradients(q, k, v, **options):
    have = gradients(flash_dmattn_func, (q, k, v), **options)
    wide = {name: on_cpu(value) for name, value in options.items()}
    want = gradients(flash_dmattn_func, (on_cpu(q), on_cpu(k), on_cpu(v)), **wide)
    for mine, truth in zip(have, want):
        assert mine.is_cuda and mine.shape == truth.shape
        assert error(mine, truth) < 2 * TOLERANCE[q.dtype]
    return have


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_backward(dtype, head_dim, causal):
    check_gradients(*tensors(dtype, head_dim=head_dim), is_causal=causal)


@pytest.mark.parametrize("shape", [(2, 4, 200, 333), (1, 4, 200, 333), (2, 1, 1, 333), (1, 2, 1, 333), (1, 2, 200, 333)])
@pytest.mark.parametrize("dtype, of_tensors", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16),
                                               (torch.float32, torch.float32)])
def test_gradient_of_a_bias(shape, dtype, of_tensors):
    bias = torch.randn(shape, device="cuda").to(dtype)
    grads = check_gradients(*tensors(of_tensors), attn_bias=bias, is_causal=True)
    assert grads[3].dtype is dtype


def test_gradient_of_a_bias_of_rows_is_zero():
    bias = torch.randn(2, 4, 200, 1, device="cuda")
    have = gradients(flash_dmattn_func, tensors(), attn_bias=bias)
    assert have[3].shape == bias.shape and have[3].abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_of_masks_windows_softcap_and_lse(dtype):
    q, k, v = tensors(dtype, head_dim=128)
    check_gradients(q, k, v, attn_mask=torch.rand(2, 1, 200, 333, device="cuda") < 0.5)
    check_gradients(q, k, v, window_size=(40, 3))
    check_gradients(q, k, v, softcap=5.0, dlse_weight=0.3)
    intervals = masks.topk_intervals(torch.randn(2, 4, 333, device="cuda"), 32, seqlen_q=200)
    check_gradients(q, k, v, key_intervals=intervals, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_of_packed_sequences(dtype):
    lengths = [5, 130, 0, 64]
    cu = torch.tensor([0, 5, 135, 135, 199], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(199, 2, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    out = flash_dmattn_varlen_func(q, k, v, cu, cu, max_seqlen_q=130, max_seqlen_k=130, is_causal=True)
    have = torch.autograd.grad(out.float().sum(), (q, k, v))
    first = 0
    for length in lengths:
        part = [tensor[first:first + length].detach()[None].requires_grad_() for tensor in (q, k, v)]
        if length:
            want = torch.autograd.grad(flash_dmattn_func(*part, is_causal=True).float().sum(), part)
            for mine, alone in zip(have, want):
                assert error(mine[first:first + length], alone[0]) < 2 * TOLERANCE[dtype]
        first += length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deterministic_backward_repeats_bit_by_bit(dtype):
    q, k, v = tensors(dtype, rows=700, keys=700, heads=8, heads_kv=2)
    first = gradients(flash_dmattn_func, (q, k, v), is_causal=True, deterministic=True)
    for _ in range(10):
        again = gradients(flash_dmattn_func, (q, k, v), is_causal=True, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_a_bias_alone(dtype):
    q, k, v = tensors(dtype)
    bias = torch.randn(1, 4, 1, 333, device="cuda", requires_grad=True)
    flash_dmattn_func(q, k, v, attn_bias=bias).float().square().sum().backward()
    assert bias.grad.abs().max() > 0 and q.grad is None


def test_compiled_backward_is_the_same():
    q, k, v = tensors(rows=128, keys=128)

    def loss(q, k, v):
        return flash_dmattn_func(q, k, v, is_causal=True, deterministic=True).float().square().sum()

    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    have = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    assert all(error(a, b) < 1e-2 for a, b in zip(have, want))


def test_what_is_not_there_is_said():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="deterministic"):
        bias = torch.randn(1, 1, 200, 333, device="cuda", requires_grad=True)
        flash_dmattn_func(q, k, v, attn_bias=bias, deterministic=True).sum().backward()
    with pytest.raises(ValueError, match="cpu"):
        flash_dmattn_func(q, k.cpu(), v)
    with pytest.raises(NotImplementedError, match="head dims are at most 256"):
        flash_dmattn_func(*tensors(torch.float32, head_dim=264))
    assert flash_dmattn.get_available_backends()[0] == "cuda"
