"""Attention on CUDA tensors, against float64 on the CPU. Skipped, with one line, where there is no CUDA device."""

from __future__ import annotations

import threading

import pytest
import torch

import flash_dmattn
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, masks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CUDA tensors are not covered")

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_forward(dtype, head_dim, causal):
    check(*tensors(dtype, head_dim=head_dim), is_causal=causal)


def test_wide_heads():
    check(*tensors(torch.float16, head_dim=512), is_causal=True)


def test_features():
    q, k, v = tensors(rows=256, keys=256)
    mask = torch.rand(1, 2, 256, 256, device="cuda") < 0.5
    bias = torch.randn(2, 4, 256, 256, device="cuda", dtype=torch.bfloat16)
    check(q, k, v, attn_mask=mask)
    check(q, k, v, attn_bias=bias, is_causal=True)
    check(q, k, v, attn_bias=bias.float()[:, :1, :1], attn_mask=mask, softcap=3.0)
    check(q, k, v, window_size=(30, 10))
    check(q, k, v, softmax_scale=-0.3)
    check(q, k, v, attn_mask=torch.rand(2, 256, device="cuda") < 0.5)


def test_top_w_intervals():
    q, k, v = tensors(rows=700, keys=700)
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


def test_what_is_not_there_is_said():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="backward"):
        flash_dmattn_func(q.requires_grad_(), k, v).sum().backward()
    with pytest.raises(ValueError, match="cpu"):
        flash_dmattn_func(q.detach(), k.cpu(), v)
    with pytest.raises(NotImplementedError, match="float16"):
        flash_dmattn_func(q.detach().float(), k.float(), v.float())
    assert flash_dmattn.get_available_backends()[0] == "cuda"
