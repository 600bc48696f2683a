"""test_sinks.py: learnable sinks: both conventions of lse, gradients, and what becomes of rows that see no key."""

import numpy as np
import pytest
import torch
from conftest import assert_close, truth, visible_pairs
from flash_dmattn import attention, attention_backward, flash_dmattn_func, flash_dmattn_varlen_func, merge

ROWS, KEYS, HEADS = 21, 30, 4


def inputs(dtype=torch.float32, rows=ROWS, keys=KEYS, sinks=(HEADS,), sink_dtype=None, grad=True):
    torch.manual_seed(3)
    shapes = ((2, rows, HEADS, 16), (2, keys, 2, 16), (2, keys, 2, 8))
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    sink = (torch.randn(sinks) * 2).to(sink_dtype or dtype)
    return [each.requires_grad_(grad) for each in (q, k, v, sink)]


def with_sinks(q, k, v, sink, without=False, **options):
    """(out, lse) in float64 by the formula, differentiable."""
    out, lse, _ = truth(q, k, v, **options)
    logit = sink.double().reshape(-1, HEADS).logsumexp(0)[:, None]
    seen = torch.isfinite(lse)
    of_keys = torch.where(seen, lse, 0.0)
    kept = torch.where(seen, torch.sigmoid(of_keys - logit), 0.0)
    whole = torch.where(seen, torch.logaddexp(of_keys, logit), logit.expand(lse.shape))
    return out * kept.transpose(1, 2)[..., None], lse if without else whole


def finite(x):
    return torch.where(torch.isfinite(x), x, 0.0)


@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("sinks", [(HEADS,), (3, HEADS)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_and_gradients(dtype, sinks, without):
    """More rows than keys: the first ones see none."""
    given = inputs(dtype, rows=KEYS + 5, sinks=sinks)
    wide = [each.detach().double().requires_grad_() for each in given]
    out, lse = flash_dmattn_func(*given[:3], is_causal=True, sink=given[3], lse_without_sink=without, return_lse=True)
    want_out, want_lse = with_sinks(*wide, without, causal=True)
    assert_close(out, want_out, dtype, "out")
    assert_close(lse, want_lse, torch.float32 if dtype is torch.bfloat16 else dtype, "lse")
    weights, of_lse = torch.randn_like(want_out), torch.randn_like(want_lse)
    ((out.double() * weights).sum() + (finite(lse).double() * of_lse).sum()).backward()
    ((want_out * weights).sum() + (finite(want_lse) * of_lse).sum()).backward()
    for name, have, want in zip(("dq", "dk", "dv", "dsink"), given, wide):
        assert have.grad.dtype is have.dtype
        assert_close(have.grad, want.grad, dtype, name)


@pytest.mark.parametrize("without", [False, True])
def test_gradcheck(without):
    given = inputs(torch.float64, rows=4, keys=5, sinks=(2, HEADS))

    def attend(q, k, v, sink):
        return flash_dmattn_func(q, k, v, is_causal=True, sink=sink, lse_without_sink=without, return_lse=True)

    assert torch.autograd.gradcheck(attend, given)


@pytest.mark.parametrize("sink_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_sink_has_a_dtype_of_its_own(sink_dtype):
    given = inputs(torch.float32, sink_dtype=sink_dtype)
    wide = [each.detach().double().requires_grad_() for each in given]
    flash_dmattn_func(*given[:3], sink=given[3]).square().sum().backward()
    with_sinks(*wide)[0].square().sum().backward()
    assert given[3].grad.dtype is sink_dtype
    assert_close(given[3].grad, wide[3].grad, sink_dtype, "dsink")


def test_dsink_alone():
    q, k, v, sink = inputs(grad=False)
    sink.requires_grad_()
    flash_dmattn_func(q, k, v, sink=sink).square().sum().backward()
    wide = sink.detach().double().requires_grad_()
    with_sinks(q, k, v, wide)[0].square().sum().backward()
    assert_close(sink.grad, wide.grad, torch.float32, "dsink")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minus_infinity_gives_the_same_bits_as_no_sink(dtype):
    q, k, v, sink = inputs(dtype)
    bare = [each.detach().clone().requires_grad_() for each in (q, k, v)]
    with torch.no_grad():
        sink.fill_(-torch.inf)
    results = flash_dmattn_func(q, k, v, is_causal=True, sink=sink, return_lse=True)
    want = flash_dmattn_func(*bare, is_causal=True, return_lse=True)
    assert all(map(torch.equal, results, want))
    for pair in (results, want):
        (pair[0].float().square().sum() + pair[1].sum()).backward()
    assert all(torch.equal(have.grad, each.grad) for have, each in zip((q, k, v), bare)) and not sink.grad.any()


def test_infinite_and_nan_sinks():
    q, k, v, sink = inputs()
    with torch.no_grad():
        sink[1], sink[2] = torch.inf, torch.nan
    out, lse = flash_dmattn_func(q, k, v, sink=sink, return_lse=True)
    assert not out[:, :, 1].any() and (lse[:, 1] == torch.inf).all()
    assert out[:, :, 2].isnan().all() and lse[:, 2].isnan().all()
    assert out[:, :, (0, 3)].isfinite().all()
    (dsink,) = torch.autograd.grad(out[:, :, 1].sum(), sink)
    assert dsink[1] == 0


def test_rows_without_keys():
    q, k, v, sink = inputs(grad=False)
    mask = torch.zeros(2, 1, ROWS, KEYS, dtype=torch.bool)
    out, lse = flash_dmattn_func(q, k, v, mask, sink=sink, return_lse=True)
    assert not out.any() and torch.equal(lse, sink[None, :, None].expand(lse.shape))
    assert (flash_dmattn_func(q, k, v, mask, sink=sink, lse_without_sink=True, return_lse=True)[1] == torch.inf).all()


def test_rows_without_keys_may_hold_nan():
    """Padding in front of a sequence: what it holds and what flows into it changes nothing."""
    q, k, v, sink = inputs(rows=KEYS + 5, grad=False)
    grads = []
    for bad in (0.0, torch.nan):
        given = [each.clone() for each in (q, k, v, sink)]
        given[0][:, :5] = bad
        for each in given:
            each.requires_grad_()
        out = flash_dmattn_func(*given[:3], is_causal=True, sink=given[3])
        flowing = torch.ones_like(out)
        flowing[:, :5] = bad
        out.backward(flowing)
        grads.append([each.grad for each in given])
    assert all(map(torch.equal, *grads)) and not any(each.isnan().any() for each in grads[0])


def test_parts_merge_and_meet_the_sink_after():
    q, k, v, sink = inputs(grad=False)
    options = {"sink": sink, "lse_without_sink": True, "return_lse": True}
    bare = {"return_lse": True}
    whole, lse = flash_dmattn_func(q, k, v, **options)
    parts = [flash_dmattn_func(q, k[:, at], v[:, at], **bare) for at in (slice(0, 13), slice(13, KEYS))]
    out, of_keys = merge(*parts[0], *parts[1])
    assert_close(of_keys, lse, torch.float32, "lse")
    kept = torch.sigmoid(of_keys - sink[:, None]).transpose(1, 2)[..., None]
    assert_close(out * kept, whole, torch.float32, "out")


def test_packed_sequences():
    q, k, v, sink = inputs()
    rows, keys = [ROWS, 7], [KEYS, 12]
    cu_q, cu_k = (torch.tensor([0, each[0], sum(each)], dtype=torch.int32) for each in (rows, keys))
    packed = [torch.cat([x[0, : n[0]], x[1, : n[1]]]) for x, n in ((q, rows), (k, keys), (v, keys))]
    out = flash_dmattn_varlen_func(*packed, cu_q, cu_k, ROWS, KEYS, is_causal=True, sink=sink)
    apart = [
        flash_dmattn_func(q[b : b + 1, : rows[b]], k[b : b + 1, : keys[b]], v[b : b + 1, : keys[b]], is_causal=True,
                          sink=sink)[0]
        for b in range(2)
    ]
    assert_close(out, torch.cat(apart), torch.float32, "out")
    have = torch.autograd.grad(out.square().sum(), (q, sink), retain_graph=True)
    want = torch.autograd.grad(torch.cat(apart).square().sum(), (q, sink))
    for name, one, other in zip(("dq", "dsink"), have, want):
        assert_close(one, other, torch.float32, name)


def test_a_bias_that_keys_share_has_a_gradient_beside_sinks():
    """It moves the keys' scores against the sinks."""
    q, k, v, sink = inputs(grad=False)
    bias = torch.randn(2, HEADS, ROWS, 1, requires_grad=True)
    wide = bias.detach().double().requires_grad_()
    flash_dmattn_func(q, k, v, attn_bias=bias, sink=sink).square().sum().backward()
    with_sinks(q, k, v, sink, bias=wide.expand(2, HEADS, ROWS, KEYS))[0].square().sum().backward()
    assert_close(bias.grad, wide.grad, torch.float32, "dbias")


def test_probabilities_add_up_to_less_than_one():
    q, k, v, sink = inputs(grad=False)
    out, lse, probs = flash_dmattn_func(q, k, v, is_causal=True, sink=sink, return_attn_probs=True)
    values = v.repeat_interleave(2, dim=2).transpose(1, 2)
    assert_close((probs @ values).transpose(1, 2), out, torch.float32, "out")
    assert_close(1 - probs.sum(-1), torch.exp(sink[:, None] - lse), torch.float32, "the sinks' share")


def test_compiled_code():
    q, k, v, sink = inputs()
    compiled = torch.compile(lambda *x: flash_dmattn_func(*x[:3], is_causal=True, sink=x[3]) * 2, fullgraph=True)
    plain = flash_dmattn_func(q, k, v, is_causal=True, sink=sink) * 2
    result = compiled(q, k, v, sink)
    assert torch.equal(result, plain)
    have, want = (torch.autograd.grad(each.sum(), (q, sink)) for each in (result, plain))
    assert all(map(torch.equal, have, want))


def test_arrays():
    q, k, v, sink = (each.numpy() for each in inputs(sinks=(2, HEADS), grad=False))
    out, lse = attention(q, k, v, is_causal=True, sink=sink, return_lse=True)
    dout = np.ones_like(out)
    *rest, dsink = attention_backward(dout, q, k, v, out, lse, is_causal=True, sink=sink, return_dsink=True)
    leaves = [torch.from_numpy(each).requires_grad_() for each in (q, k, v, sink)]
    flash_dmattn_func(*leaves[:3], is_causal=True, sink=leaves[3]).sum().backward()
    assert len(rest) == 3 and all(np.array_equal(a, b.grad.numpy()) for a, b in zip((*rest, dsink), leaves))
    mine = np.empty_like(sink)
    assert attention_backward(dout, q, k, v, out, lse, is_causal=True, sink=sink, dsink=mine)[-1] is mine


def test_windows_and_groups():
    """As gpt-oss has them: 8 query heads to a KV head, a window, sinks in bfloat16."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 40, heads, 64, dtype=torch.bfloat16) for heads in (8, 1, 1))
    sink = torch.randn(8, dtype=torch.bfloat16)
    out = flash_dmattn_func(q, k, v, is_causal=True, window_size=(9, 0), sink=sink)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).double() / 8
    scores = scores.masked_fill(~visible_pairs(40, 40, True, (9, 0)), -torch.inf)
    scores = torch.cat((scores, sink.double()[None, :, None, None].expand(1, 8, 40, 1)), -1)
    probs = scores.softmax(-1)[..., :40]
    assert_close(out, (probs @ v.transpose(1, 2).double()).transpose(1, 2), torch.bfloat16, "out")


@pytest.mark.parametrize("sink, error, words", [
    (torch.zeros(3), ValueError, r"sink has shape \[3\]; it must be \[4\]"),
    (torch.zeros(1, 2, HEADS), ValueError, r"sink has 3 axes; its shape is \[heads of q\] or \[n, heads of q\]"),
    (torch.zeros(0, HEADS), ValueError, "a head has 0 sinks; it must have one at least"),
    (torch.zeros(HEADS, dtype=torch.int32), (TypeError, ValueError), "sink is int32; it must be float32"),
    (torch.zeros(HEADS, dtype=torch.float64), ValueError, "sink is float64; it must be float32, float16 or bfloat16"),
    (0.5, TypeError, "sink is 0.5; it must be a torch.Tensor"),
])
def test_bad_sinks(sink, error, words):
    with pytest.raises(error, match=words):
        flash_dmattn_func(*inputs(grad=False)[:3], sink=sink)
