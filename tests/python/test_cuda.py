"""Attention on CUDA tensors, against float64 on the CPU. Skipped, with one line, where there is no CUDA device."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import flash_dmattn
from flash_dmattn import (
    attention,
    attention_backward,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    masks,
    scaled_dot_product_attention,
)
from flash_dmattn._arrays import borrow

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


@pytest.mark.parametrize("keys", [512, 1100, 2047, 20000])  # up to eight splits of 2048 keys; then a kernel merges them
@pytest.mark.parametrize("head_dim, window", [(64, (-1, -1)), (128, (-1, -1)), (128, (700, 0)), (256, (-1, -1))])
def test_one_query_row(keys, head_dim, window):
    check(*tensors(rows=1, keys=keys, heads=8, heads_kv=2, head_dim=head_dim), window_size=window)


def test_sections_of_heads():
    q, k, v = tensors(batch=1, rows=300, keys=600, heads=110, heads_kv=110, head_dim=128)  # two of 55 heads fit the cache
    for options in ({"is_causal": True}, {"attn_bias": torch.randn(1, 1, 300, 600, device="cuda").to(q.dtype)}):
        out = flash_dmattn_func(q, k, v, **options)
        for first in (0, 37, 74):
            part = [each[:, :, first:first + 36] for each in (q, k, v)]
            assert torch.equal(out[:, :, first:first + 36], flash_dmattn_func(*part, **options))


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
    arguments = (q, k, v, *[None] * 10, 0, 0, None, True, 0.0, -1, -1, False, False)
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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("batch, heads", [(2, 4), (1, 1)])
def test_backward_of_rows_at_multiples_of_16_bytes(head_dim, batch, heads):
    """Such rows of masks and biases are copied ahead, and those of dbias stored 16 bytes at a time."""
    q, k, v = tensors(keys=336, head_dim=head_dim)
    bias = torch.randn(batch, heads, 200, 336, device="cuda").bfloat16()
    mask = torch.rand(batch, heads, 200, 352, device="cuda")[..., :336] < 0.5
    check_gradients(q, k, v, attn_bias=bias)
    check_gradients(q, k, v, attn_bias=bias, attn_mask=mask, is_causal=True)
    wide = torch.empty(batch, heads, 200, 352, device="cuda", dtype=torch.bool)[..., :331]
    wide.copy_(mask[..., :331])
    check_gradients(q, k[:, :331], v[:, :331], attn_mask=wide)


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


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (1, 8)])
def test_deterministic_gradient_of_a_shared_bias_repeats_bit_by_bit(shape):
    q, k, v = tensors(rows=300, keys=333, heads=8, heads_kv=2)
    mask = torch.rand(2, 1, 300, 333, device="cuda") < 0.5
    mask[:, :, 64:192] = False  # rows at which no block has anything to add
    bias = torch.randn(*shape, 300, 333, device="cuda")
    options = {"attn_bias": bias, "attn_mask": mask, "window_size": (150, 20), "deterministic": True}
    first = check_gradients(q, k, v, **options)
    for _ in range(10):
        again = gradients(flash_dmattn_func, (q, k, v), **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_of_groups_of_heads_that_are_split(head_dim, deterministic):
    q, k, v = tensors(batch=1, rows=400, keys=600, heads=24, heads_kv=2, head_dim=head_dim)
    check_gradients(q, k, v, is_causal=True, deterministic=deterministic)
    check_gradients(q, k, v, attn_bias=torch.randn(1, 24, 1, 600, device="cuda"), deterministic=deterministic)
    intervals = masks.topk_intervals(torch.randn(1, 2, 600, device="cuda"), 64, seqlen_q=400)
    check_gradients(q, k, v, key_intervals=intervals, is_causal=True, deterministic=deterministic)


@pytest.mark.parametrize("kind", ["strides", "causal", "window", "part", "intervals", "mask"])  # each compiles kernels of its own
@pytest.mark.parametrize("head_dim, head_dim_v", [(32, 64), (64, 64), (72, 72), (96, 96), (128, 96), (128, 128), (192, 256)])
def test_backward_of_many_units_of_rows(head_dim, head_dim_v, kind):
    """The ring of staged rows turns several times, over heads of a group; tensor maps of views whose strides are 0 or unlike."""
    q, k, v = tensors(rows=420, keys=300, heads=6, head_dim=head_dim, head_dim_v=head_dim_v)
    if kind == "strides":
        for each in (q, q[:, :, :1].expand(-1, -1, 6, -1), q.transpose(1, 2).contiguous().transpose(1, 2)):
            check_gradients(each, k, v)
    elif kind == "causal":
        for each in (q, q[:1].expand(2, -1, -1, -1)):
            check_gradients(each, k, v, is_causal=True)
    elif kind == "window":
        check_gradients(q, k, v, window_size=(130, 70))
    elif kind == "part":
        check_gradients(q[:, 5:410, ::3], k[:, 1:], v[:, 1:], window_size=(-1, 3))
    elif kind == "intervals":
        intervals = masks.topk_intervals(torch.randn(2, 2, 300, device="cuda"), 60, seqlen_q=420)
        check_gradients(q, k, v, key_intervals=intervals, is_causal=True)
    else:
        check_gradients(q, k, v, attn_mask=torch.rand(2, 1, 1, 300, device="cuda") < 0.5)


def test_backward_of_no_batches():
    q, k, v = tensors(batch=0, rows=40, keys=600)
    nothing = torch.zeros(0, 2, 600, dtype=torch.int32, device="cuda")
    for options in ({}, {"key_intervals": (nothing, nothing)}):
        assert [g.shape for g in gradients(flash_dmattn_func, (q, k, v), **options)] == [q.shape, k.shape, v.shape]


def test_a_hundred_deterministic_backwards_on_two_streams_are_the_same_bits():
    q, k, v = tensors(rows=500, keys=700, heads=8, heads_kv=2, head_dim=128)
    bias = torch.randn(1, 1, 1, 700, device="cuda")
    intervals = masks.topk_intervals(torch.randn(2, 2, 700, device="cuda"), 100, seqlen_q=500)
    dense = bias.expand(2, 8, 500, 700).clone()
    for options in ({"is_causal": True}, {"key_intervals": intervals, "attn_bias": dense}):
        out, lse = flash_dmattn_func(q, k, v, return_lse=True, **options)
        inputs = (q, k, v, None, options.get("attn_bias"), *options.get("key_intervals", (None, None)), *[None] * 6)
        upstream = (torch.randn_like(out), torch.randn_like(lse))
        settings = (0, 0, None, options.get("is_causal", False), 0.0, -1, -1, True, False)
        arguments = (*inputs, out, lse, *upstream, True, True, True, False, False, *settings)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        results = []
        for call in range(100):
            with torch.cuda.stream(streams[call % 2]):
                results.append(torch.ops.flash_dmattn.backward(*arguments)[:3])
        torch.cuda.synchronize()
        for again in results[1:]:
            assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(results[0], again))


@pytest.mark.parametrize("dtype, step", [(torch.float16, 2.0**-7), (torch.bfloat16, 2.0**-5)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 5.0}, {"window_size": (20, 4)}])
def test_gradients_match_finite_differences(dtype, step, options):
    """Each input moves by a step along the sign of its gradient, which sums what all elements say; inputs lie on a grid
    on which the step is exact."""
    generator = torch.Generator("cuda").manual_seed(0)

    def grid(*shape):
        values = torch.randn(*shape, device="cuda", generator=generator).clamp(-3, 3)
        return (values / (2 * step)).round().mul(2 * step).to(dtype)

    def weights(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.float64, generator=generator)

    inputs = [grid(1, 24, 4, 32), grid(1, 40, 2, 32), grid(1, 40, 2, 32), grid(1, 4, 24, 40)]
    of_out, of_lse = weights(1, 24, 4, 32), weights(1, 4, 24)

    def loss(q, k, v, bias):
        out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True, **options)
        return (out.double() * of_out).sum() + (torch.where(torch.isfinite(lse), lse, 0.0).double() * of_lse).sum()

    leaves = [each.clone().requires_grad_() for each in inputs]
    for index, gradient in enumerate(torch.autograd.grad(loss(*leaves), leaves)):
        way = step * gradient.double().sign()
        ahead, behind = (
            [(x.double() + sign * way).to(dtype) if n == index else x for n, x in enumerate(inputs)] for sign in (1, -1)
        )
        assert torch.equal(ahead[index].double() - behind[index].double(), 2 * way)
        with torch.no_grad():
            slope = (loss(*ahead) - loss(*behind)).item() / (2 * step)
        assert slope == pytest.approx(gradient.double().abs().sum().item(), rel=0.01)


def test_operator_checks_of_backward_and_masks():
    q, k, v = (tensor.requires_grad_() for tensor in tensors(rows=64, keys=70))
    bias = torch.randn(1, 2, 1, 70, device="cuda", requires_grad=True)
    settings = (0, 0, 0.3, True, 2.0, 30, -1, False, False)
    forward, backward = torch.ops.flash_dmattn.forward.default, torch.ops.flash_dmattn.backward.default
    torch.library.opcheck(forward, (q, k, v, *[None] * 10, *settings[:-2], True, False))
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    inputs = (q, k, v, None, bias.detach(), *[None] * 8)
    out, lse = torch.ops.flash_dmattn.forward(*inputs, *settings)
    torch.library.opcheck(backward, (*inputs, out, lse, out, None, True, True, True, True, False, *settings),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    bias, padding = torch.randn(1, 2, 90, device="cuda"), torch.rand(2, 90, device="cuda") < 0.8
    torch.library.opcheck(torch.ops.flash_dmattn.topk_intervals.default, (bias, padding, 9, 90))


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


# ---- masks -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_waits():
    """A wait for the device is an error inside."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same(have, want):
    """Tensors, or pairs of them, on CUDA and on the CPU."""
    if isinstance(want, tuple):
        assert len(have) == len(want)
        return [same(a, b) for a, b in zip(have, want)]
    assert have.is_cuda and have.dtype is want.dtype and torch.equal(have.cpu(), want)


SPECIAL = torch.tensor([torch.nan, -torch.inf, torch.inf, 0.0, -0.0, 1.0, -1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "keys, rows, window",
    [(1, 1, 1), (33, 33, 4), (300, 7, 300), (1000, 1500, 50), (20000, 20000, 999), (100000, 100000, 5000)],
)
def test_top_w_is_that_of_the_cpu(dtype, keys, rows, window):
    generator = torch.Generator().manual_seed(keys)
    spread = torch.randn(2, 3, keys, generator=generator)
    ties = torch.randint(-3, 4, (2, 3, keys), generator=generator).float()
    odd = SPECIAL[torch.randint(len(SPECIAL), (2, 3, keys), generator=generator)]
    padding = torch.rand(2, keys, generator=generator) < 0.7
    for bias in (spread, ties, odd, odd[:, :, None]):
        bias = bias.to(dtype)
        for keep in (None, padding):
            want = masks.topk_intervals(bias, window, rows, keep)
            there = bias.cuda(), None if keep is None else keep.cuda()
            with nothing_waits():
                have = masks.topk_intervals(there[0], window, rows, there[1])
            same(have, want)


def test_top_w_refuses_on_cuda_what_it_refuses_on_the_cpu():
    bias = torch.randn(2, 1, 8, device="cuda")
    for window, options, sentence in (
        (0, {}, "window_size is 0"),
        (3, {"key_padding_mask": torch.ones(2, 8, dtype=torch.bool)}, "padding is on DLPack device 1:0, but bias is on 2:0"),
        (3, {"key_padding_mask": torch.ones(2, 7, dtype=torch.bool, device="cuda")}, "padding has shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            masks.topk_intervals(bias, window, **options)
    with pytest.raises(ValueError, match="bias is int32"):
        masks.topk_intervals(bias.int(), 3)


def test_other_interval_masks_are_those_of_the_cpu():
    for rows, keys in ((6, 6), (40, 90), (90, 40), (0, 3), (3, 0)):
        with nothing_waits():
            have = [masks.window_intervals(rows, keys, window, causal, device="cuda")
                    for window in ((-1, -1), (2, 0), (0, 3), (100, 100)) for causal in (False, True)]
            have.append(masks.causal_intervals(rows, keys, device="cuda"))
            have.append(masks.prefix_intervals(rows, keys, 5, device="cuda"))
        want = [masks.window_intervals(rows, keys, window, causal, "torch")
                for window in ((-1, -1), (2, 0), (0, 3), (100, 100)) for causal in (False, True)]
        want += [masks.causal_intervals(rows, keys, "torch"), masks.prefix_intervals(rows, keys, 5, "torch")]
        for a, b in zip(have, want):
            same(a, b)
    for offsets in ([0], [0, 5], [0, 3, 3, 700], [0, 0, 4, 4]):
        cu = torch.tensor(offsets, dtype=torch.int32)
        for causal in (True, False):
            want = masks.document_intervals(cu, causal)
            same(masks.document_intervals(cu.cuda(), causal), want)
            there = cu.cuda()
            with nothing_waits():
                have = masks.document_intervals(there, causal, seqlen=offsets[-1])
            same(have, want)
    with pytest.raises(ValueError, match="must not fall"):
        masks.document_intervals(torch.tensor([0, 4, 2], dtype=torch.int32, device="cuda"))


def test_dense_masks_are_those_of_the_cpu():
    start = torch.randint(-2, 60, (2, 3, 110), dtype=torch.int32)
    end = torch.randint(0, 120, (2, 3, 110), dtype=torch.int32)
    dense = masks.intervals_to_mask(start, end, 80)
    same(masks.intervals_to_mask(start.cuda(), end.cuda(), 80), dense)
    same(masks.intervals_from_mask(dense.cuda()), masks.intervals_from_mask(dense))
    same(masks.intervals_from_mask(dense[0, 0].cuda()), masks.intervals_from_mask(dense[0, 0]))
    assert masks.intervals_from_mask(torch.rand(50, 50, device="cuda") < 0.5) is None
    lowest = torch.finfo(torch.float32).min
    bias = torch.randint(-2, 3, (2, 2, 80, 110)).float() * torch.tensor([1.0, -1.0]).repeat(55)
    padding, newest = torch.rand(2, 110) < 0.8, torch.rand(2, 80) < 0.8
    for mask in (None, padding, newest, torch.rand(2, 1, 80, 110) < 0.5):
        for options in ({}, {"block_size": 16}, {"type": "relu"}):
            want = masks.create_mask(bias, mask, 2, 80, 110, 30, lowest, **options)
            there = bias.cuda(), None if mask is None else mask.cuda()
            with nothing_waits():
                have = masks.create_mask(*there, 2, 80, 110, 30, lowest, **options)
            same(have, want)
    same(masks.mask_blocks(dense.cuda(), 16, 48), masks.mask_blocks(dense, 16, 48))
    with pytest.raises(ValueError, match="attention_mask is on DLPack device 1:0, but mask is on 2:0"):
        masks.create_mask(bias.cuda(), padding, 2, 80, 110, 30, lowest)


def test_top_w_and_attention_in_one_graph():
    q, k, v = tensors(rows=512, keys=512)
    bias = torch.randn(2, 4, 512, device="cuda")

    def call():
        pair = masks.topk_intervals(bias, 32)
        return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, key_intervals=pair)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    bias.copy_(torch.randn_like(bias))
    graph.replay()
    assert torch.equal(captured, call())


# ---- attention(): arrays of other libraries --------------------------------------------------------------------------


class Producer:
    """A tensor of which only DLPack is known."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_arrays_that_only_speak_dlpack():
    q, k, v = tensors(torch.float16, rows=300, keys=300)
    mask = torch.rand(2, 1, 300, 300, device="cuda") < 0.5  # a call with workspace
    want, want_lse = flash_dmattn_func(q, k, v, mask, return_lse=True)
    out, lse = attention(*(Producer(each) for each in (q, k, v, mask)), return_lse=True)
    assert out.__dlpack_device__() == (2, 0)
    assert torch.equal(torch.from_dlpack(out), want) and torch.equal(torch.from_dlpack(lse), want_lse)
    stream = torch.cuda.Stream()
    out = attention(*(Producer(each.clone()) for each in (q, k, v, mask)), stream=stream.cuda_stream)
    assert torch.equal(torch.from_dlpack(out), want)
    given = torch.full_like(want, torch.nan)
    assert attention(*(Producer(each) for each in (q, k, v, mask)), out=given) is given
    assert torch.equal(given, want)


def test_torch_tensors_with_out_and_stream():
    q, k, v = tensors()
    want, want_lse = flash_dmattn_func(q, k, v, is_causal=True, return_lse=True)
    out = torch.full_like(want, torch.nan)
    assert attention(q.requires_grad_(), k, v, is_causal=True, out=out) is out and torch.equal(out, want)
    stream = torch.cuda.Stream()
    for handle in (0, stream.cuda_stream):
        late = q.detach() * 1
        have, lse = attention(late, k, v, is_causal=True, stream=handle, return_lse=True)
        torch.cuda.synchronize()
        assert torch.equal(have, want) and torch.equal(lse, want_lse)
    with pytest.raises(ValueError, match="^k is on the CPU, but q is on CUDA device 0"):
        attention(q, k.cpu(), v, out=out)


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    q, k, v = tensors(torch.float16, rows=300, keys=300)
    intervals = masks.topk_intervals(torch.randn(2, 2, 300, device="cuda"), 40)
    mask = torch.rand(2, 1, 300, 300, device="cuda") < 0.5
    want, want_lse = flash_dmattn_func(q, k, v, mask, is_causal=True, key_intervals=intervals, return_lse=True)
    arrays = [cupy.from_dlpack(each) for each in (q, k, v, mask)]
    pair = [cupy.from_dlpack(each) for each in intervals]
    torch.cuda.synchronize()
    out, lse = attention(*arrays, is_causal=True, key_intervals=pair, return_lse=True)
    assert isinstance(out, cupy.ndarray) and out.dtype == "float16" and lse.dtype == "float32"
    torch.cuda.synchronize()
    assert torch.equal(torch.from_dlpack(out), want) and torch.equal(torch.from_dlpack(lse), want_lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = arrays[0] * 1  # enqueued on the stream: the call must follow it there
        out = attention(late, *arrays[1:], is_causal=True, key_intervals=pair) * 1
    stream.synchronize()
    assert torch.equal(torch.from_dlpack(out), want)
    out = attention(*arrays, is_causal=True, key_intervals=pair, stream=stream)
    given = cupy.empty_like(out)
    assert attention(*arrays, is_causal=True, key_intervals=pair, stream=stream.ptr, out=given) is given
    stream.synchronize()
    assert (out == given).all() and torch.equal(torch.from_dlpack(given), want)
    with pytest.raises(ValueError, match="^v is on the CPU"):
        attention(*arrays[:2], arrays[2].get())
    with pytest.raises(NotImplementedError, match="^v is on CUDA device 0; this function takes arrays on the CPU only"):
        borrow(arrays[2], "v")


def test_other_ways_in():
    """PyTorch's signature, jagged nested tensors, the backward pass on arrays, a scale that compiled code computes."""
    q, k, v = tensors(torch.float16, rows=300, keys=300)
    options = {"is_causal": True, "deterministic": True}
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    want, want_lse = flash_dmattn_func(*leaves, return_lse=True, **options)
    dout = torch.randn_like(want)
    gradients = torch.autograd.grad(want, leaves, dout)
    out, lse, _ = attention(q, k, v, return_lse_low=True, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert all(map(torch.equal, attention_backward(dout, q, k, v, out, lse, **options), gradients))
    bhsd = [each.transpose(1, 2) for each in (q, k, v)]
    assert error(scaled_dot_product_attention(*bhsd, is_causal=True, enable_gqa=True).transpose(1, 2), want) < 1e-3
    offsets = torch.tensor([0, 300, 600], device="cuda")
    jagged = [torch.nested.nested_tensor_from_jagged(each.flatten(0, 1), offsets) for each in (q, k, v)]
    assert error(flash_dmattn_func(*jagged, is_causal=True).values(), want.flatten(0, 1)) < 1e-3
    torch._dynamo.reset()
    fast = torch.compile(lambda q, scale: flash_dmattn_func(q, k, v, scale=scale), dynamic=True, backend="aot_eager")
    for scale in (0.5, 0.25, torch.tensor(0.3, device="cuda")):
        assert error(fast(q, scale), flash_dmattn_func(q, k, v, scale=scale)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_rows_at_the_lowest_bias_average(dtype, options):
    """Each weight is one by the number of keys, which lse in float32 cannot say beside such a bias."""
    q, k, v = (tensor.requires_grad_() for tensor in tensors(dtype, rows=65, keys=257))
    heads = q.shape[2]
    for shape in ((1, heads, 65, 257), (1, 1, 1, 257), (1, 1, 65, 257)):
        kind = torch.float32 if dtype is torch.float16 else dtype  # float16's lowest is not so low
        bias = torch.full(shape, torch.finfo(kind).min, device="cuda", dtype=kind, requires_grad=True)
        out = flash_dmattn_func(q, k, v, attn_bias=bias, **options)
        upstream = torch.randn_like(out)
        dv, dbias = torch.autograd.grad(out, (v, bias), upstream)
        group = heads // v.shape[2]
        want = upstream.double().sum(1).unflatten(1, (-1, group)).sum(2) / 257
        assert (dv.double() - want[:, None]).abs().max() < 0.02 * want.abs().max()
        assert dbias.isfinite().all() and dbias.double().abs().max() < 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 200, 333), (1, 4, 200, 333), (2, 1, 200, 333), (1, 1, 200, 1), (2, 4, 200, 1)])
def test_shared_biases_have_deterministic_gradients(dtype, shape):
    q, k, v = tensors(dtype, rows=200, keys=333)
    bias = torch.randn(shape, device="cuda", requires_grad=True)
    results = []
    for options in ({"deterministic": True}, {"deterministic": True}, {}):
        out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True, is_causal=True, **options)
        upstream = (out.square().detach(), lse.sin().detach())
        results.append(torch.autograd.grad((out, lse), bias, upstream)[0])
    assert torch.equal(results[0], results[1])
    assert (results[0] - results[2]).abs().max() <= 1e-4 * results[2].abs().max()


def test_what_is_not_there_is_said():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="k is on the CPU, but q is on CUDA device 0"):
        flash_dmattn_func(q, k.cpu(), v)
    with pytest.raises(NotImplementedError, match="head dims are at most 256"):
        flash_dmattn_func(*tensors(torch.float32, head_dim=264))
    assert flash_dmattn.get_available_backends()[0] == "cuda"


def test_masks_of_arrays_that_only_speak_dlpack():
    bias, padding = torch.randn(2, 3, 1, 400, device="cuda").half(), torch.rand(2, 400, device="cuda") < 0.7
    want = masks.topk_intervals(bias, 50, 300, padding)
    have = masks.topk_intervals(Producer(bias), 50, 300, Producer(padding))
    same(tuple(torch.from_dlpack(each) for each in have), tuple(each.cpu() for each in want))
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32, device="cuda")
    have = masks.document_intervals(Producer(offsets), seqlen=70)
    same(tuple(torch.from_dlpack(each) for each in have), masks.document_intervals(offsets.cpu()))
