"""test_gradients.py: gradients against float64 maths; which are computed; what autograd modes do."""

import pytest
import torch
from conftest import assert_close, call, random_problem, truth
from flash_dmattn import flash_dmattn_func
from torch.utils.checkpoint import checkpoint


def gradients(outputs, upstream, leaves):
    return torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)


@pytest.mark.parametrize("seed", range(60))
def test_random_problem_matches_float64(seed):
    p = random_problem(seed)
    names = [name for name in ("q", "k", "v", "bias") if p[name] is not None]
    ours = {**p, **{name: p[name].detach().requires_grad_() for name in names}}
    exact = {**p, **{name: p[name].detach().to(torch.float64, copy=True).requires_grad_() for name in names}}
    out, lse = call(flash_dmattn_func, ours, return_lse=True)
    expected_out, expected_lse, _ = truth(**exact)
    dout = torch.randn_like(out)
    # A row without keys has no finite lse to differentiate.
    dlse = torch.where(torch.isfinite(expected_lse), torch.randn_like(expected_lse), 0.0)
    got = gradients((out, lse), (dout, dlse.to(lse.dtype)), [ours[name] for name in names])
    want = gradients((expected_out, expected_lse), (dout.double(), dlse), [exact[name] for name in names])
    for name, actual, expected in zip(names, got, want):
        assert actual.shape == p[name].shape and actual.dtype == p[name].dtype
        assert_close(actual, expected, p["q"].dtype, f"d{name} of seed {seed}")


def small(dtype=torch.float64):
    torch.manual_seed(1)
    q = torch.randn(2, 5, 4, 3, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 6, 2, 3, dtype=dtype, requires_grad=True)
    v = torch.randn(2, 6, 2, 2, dtype=dtype, requires_grad=True)
    return q, k, v


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 1, 1, 6), (2, 2, 1, 6), (1, 4, 5, 1), (1, 2, 5, 6), (1, 1, 1, 1)])
def test_gradcheck(shape):
    q, k, v = small()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(1, 2, 5, 6) < 0.8

    def function(q, k, v, bias):
        return flash_dmattn_func(q, k, v, mask, bias, is_causal=True, softcap=2.0, window_size=(4, -1), return_lse=True)

    mask[..., 0] = True  # every row keeps a key, so that lse is finite
    bias.data[..., 0] += 0.1
    q, k = q.detach()[:, :5].requires_grad_(), k.detach().requires_grad_()

    def bounded(*tensors):
        out, lse = function(*tensors)
        return out, torch.where(torch.isfinite(lse), lse, 0.0)

    assert torch.autograd.gradcheck(bounded, (q, k, v, bias))


def test_gradcheck_float32():
    q, k, v = small(torch.float32)
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_dmattn_func(q, k, v, is_causal=True), (q, k, v), eps=1e-2, atol=2e-2, rtol=2e-2
    )


def test_lse_only():
    q, k, v = small()
    flash_dmattn_func(q, k, v, return_lse=True)[1].sum().backward()
    exact = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    truth(*exact)[1].sum().backward()
    assert_close(q.grad, exact[0].grad, torch.float64, "dq")
    assert_close(k.grad, exact[1].grad, torch.float64, "dk")
    assert torch.all(v.grad == 0)


def test_bias_only_training():
    q, k, v = (tensor.detach() for tensor in small(torch.float32))
    bias = torch.randn(1, 2, 1, 6, requires_grad=True)
    flash_dmattn_func(q, k, v, attn_bias=bias).square().sum().backward()
    exact = bias.detach().double().requires_grad_()
    truth(q, k, v, bias=exact)[0].square().sum().backward()
    assert_close(bias.grad, exact.grad, torch.float32, "dbias")


def test_expanded_bias_gets_a_gradient_of_the_expanded_shape():
    q, k, v = small(torch.float32)
    bias = torch.randn(1, 1, 1, 6, requires_grad=True)
    wide = bias.expand(2, 4, 5, 6)
    wide.retain_grad()
    flash_dmattn_func(q, k, v, attn_bias=wide).square().sum().backward()
    assert wide.grad.shape == (2, 4, 5, 6)
    assert_close(bias.grad, wide.grad.sum((0, 1, 2), keepdim=True)[..., :], torch.float32, "dbias")
    assert wide.grad.std(dim=1).max() > 0


@pytest.mark.parametrize("way", ["direct", "operator", "compiled", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_at_the_lowest_bias_average(way, dtype):
    """Each weight is 1 / 6, which lse in float32 cannot say beside such a bias."""
    leaves = small(dtype)
    bias = torch.full((1, 2, 5, 6), torch.finfo(dtype).min, dtype=dtype, requires_grad=True)

    def attend(q, k, v, bias):
        out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True)
        return out, lse

    torch._dynamo.reset()
    if way == "compiled":
        out, lse = torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves, bias)
    elif way == "checkpoint":
        out, lse = checkpoint(attend, *leaves, bias, use_reentrant=False)
    elif way == "operator":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out, lse = attend(*leaves, bias)
        assert any(event.key == "flash_dmattn::forward_beside_bias" for event in profile.key_averages())
    else:
        out, lse = attend(*leaves, bias)
    assert torch.all(lse == torch.finfo(dtype).min)
    upstream = torch.randn_like(out)
    got = gradients(out, upstream, (*leaves, bias))
    exact = [tensor.detach().double().requires_grad_() for tensor in (*leaves, bias)]
    want = gradients(truth(*exact[:3], bias=exact[3])[0], upstream.double(), exact)
    for name, actual, of_truth in zip(("dq", "dk", "dv", "dbias"), got, want):
        assert_close(actual, of_truth, dtype, name)


def test_expanded_keys():
    q = torch.randn(2, 5, 4, 8, requires_grad=True)
    k = torch.randn(2, 5, 1, 8, requires_grad=True)
    flash_dmattn_func(q, k.expand(2, 5, 4, 8), k.expand(2, 5, 4, 8)).square().sum().backward()
    exact = k.detach().double().requires_grad_()
    truth(q.detach(), exact, exact)[0].square().sum().backward()
    assert_close(k.grad, exact.grad, torch.float32, "dk")


def test_only_wanted_gradients_are_computed():
    q, k, v = (tensor.detach() for tensor in small(torch.float32))
    bias = torch.randn(1, 2, 1, 6)

    def computed(*tensors):
        out = flash_dmattn_func(*tensors[:3], attn_bias=tensors[3])
        with torch.no_grad():
            return [gradient is not None for gradient in out.grad_fn.apply(torch.ones_like(out))[1:]]

    assert computed(q, k, v.requires_grad_(), bias) == [False, False, True, False, False]
    assert computed(q.requires_grad_(), k, v.detach(), bias.requires_grad_()) == [True, False, False, True, False]


def test_upstream_gradient_may_be_expanded():
    q, k, v = small(torch.float32)
    dout = torch.ones(()).expand(2, 5, 4, 2)
    got = torch.autograd.grad(flash_dmattn_func(q, k, v), (q, k, v), dout)
    want = torch.autograd.grad(flash_dmattn_func(q, k, v), (q, k, v), dout.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_nothing_is_saved_without_gradients():
    q, k, v = small(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            assert flash_dmattn_func(q, k, v).grad_fn is None
        assert flash_dmattn_func(q.detach(), k.detach(), v.detach()).grad_fn is None
        assert not saved
        assert flash_dmattn_func(q, k, v).grad_fn is not None
    assert saved


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    q, k, v = small(torch.float32)
    want = torch.autograd.grad(flash_dmattn_func(q, k, v, is_causal=True).square().sum(), (q, k, v))
    out = checkpoint(lambda *x: flash_dmattn_func(*x, is_causal=True), q, k, v, use_reentrant=reentrant)
    out.square().sum().backward()
    assert all(torch.equal(a.grad, b) for a, b in zip((q, k, v), want))


def test_changed_input_is_noticed():
    q, k, v = small(torch.float32)
    scaled = q * 1
    out = flash_dmattn_func(scaled, k, v)
    scaled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivative_is_refused():
    q, k, v = small(torch.float32)
    (dq,) = torch.autograd.grad(flash_dmattn_func(q, k, v).square().sum(), q, create_graph=True)
    want = torch.autograd.grad(flash_dmattn_func(q, k, v).square().sum(), q)[0]
    assert torch.allclose(dq, want)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_vmap_is_refused():
    x = torch.randn(3, 1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="cannot run under vmap"):
        torch.vmap(lambda t: flash_dmattn_func(t, t, t))(x)


def test_forward_mode_is_refused():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: flash_dmattn_func(t, t, t), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            flash_dmattn_func(dual, q, q)
        flash_dmattn_func(q, q, q)


def test_functional_reverse_mode_is_refused():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="torch.func transforms"):
        torch.func.grad(lambda t: flash_dmattn_func(t, q, q).sum())(q)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast(bias_dtype):
    q, k, v = small(torch.float32)
    bias = torch.randn(1, 2, 1, 6, dtype=bias_dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_dmattn_func(q, k, v, attn_bias=bias)
        assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert q.grad.dtype == torch.float32 and bias.grad.dtype == bias_dtype
    expected = truth(q.detach().bfloat16(), k.detach().bfloat16(), v.detach().bfloat16(), bias=bias.detach())[0]
    assert_close(out, expected, torch.bfloat16, "out")


def test_autocast_off_and_float64():
    q, k, v = small()
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_dmattn_func(q, k, v).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert flash_dmattn_func(q.float(), k.float(), v.float()).dtype == torch.float32
