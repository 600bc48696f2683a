"""test_merge.py: two partial results are the whole, in value and gradient, for PyTorch tensors and for arrays."""

import numpy as np
import pytest
import torch
from flash_dmattn import attention, flash_dmattn_func, flash_dmattn_varlen_func, merge

INF = float("inf")


def formula(out1, lse1, out2, lse2):
    """(out, lse) in torch operations; rows without keys in a part count for nothing."""
    has1, has2 = ~lse1.isinf(), ~lse2.isinf()
    low = torch.where(has1, lse1, -INF), torch.where(has2, lse2, -INF)
    some = has1 | has2
    top = torch.maximum(*low).detach()
    top = torch.where(some, top, 0.0)
    weights = [torch.where(has, torch.exp(torch.where(has, lse, 0.0) - top), 0.0) for has, lse in ((has1, lse1), (has2, lse2))]
    total = torch.where(some, weights[0] + weights[1], 1.0)
    out = 0
    for has, weight, part in ((has1, weights[0], out1), (has2, weights[1], out2)):
        share = (weight / total).transpose(-1, -2)[..., None]
        out = out + share * torch.where(has.transpose(-1, -2)[..., None], part, 0.0)
    return out, torch.where(some, top + torch.log(total), INF)


def random_parts(dtype=torch.float64, shape=(2, 5, 3, 4), empty=True, packed=False, seed=0):
    torch.manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = []
    for which in range(2):
        out, lse = torch.randn(shape).to(dtype), 2 * torch.randn(shape[0], shape[2], shape[1], dtype=wide)
        if empty:
            lse[:, 0, 1 + which] = INF
            lse[:, :, 3] = INF  # in both
        parts += [out, lse]
    return [each.flatten(0, 1) if each.dim() == 4 else each.transpose(0, 1).flatten(1) for each in parts] if packed else parts


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values(dtype, packed):
    parts = random_parts(dtype, packed=packed)
    for part, lse in (parts[:2], parts[2:]):
        part[lse.isinf().transpose(-1, -2)] = float("nan")  # must not count
    expected = formula(*(each.double() for each in parts))
    out, lse = merge(*parts)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (dtype, parts[1].dtype, parts[0].shape, parts[1].shape)
    torch.testing.assert_close(out.double(), expected[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-6, rtol=1e-6)
    for a, b in zip(merge(*parts[2:], *parts[:2]), (out, lse)):
        assert torch.equal(a, b)


def test_strides():
    wide = random_parts(torch.float32, (2, 7, 4, 6))
    views = [each[:, 1::2].transpose(1, 2).contiguous().transpose(1, 2)[..., :3] for each in wide[::2]]
    rows = [each[:, :, 1::2].flip(0).transpose(0, 2).contiguous().transpose(0, 2) for each in wide[1::2]]
    parts = [views[0], rows[0], views[1][..., [2, 1, 0]], rows[1]]
    for found, expected in zip(merge(*parts), merge(*(each.contiguous() for each in parts))):
        assert torch.equal(found, expected)
    broadcast = [parts[0][:1].expand(2, -1, -1, -1), parts[1], parts[2], parts[3][:, :1].expand(-1, 4, -1)]
    for found, expected in zip(merge(*broadcast), merge(*(each.contiguous() for each in broadcast))):
        assert torch.equal(found, expected)


def test_attention_in_two_parts():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 11, 2, 8), torch.randn(2, 11, 2, 5)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    whole = flash_dmattn_func(q, k, v, return_lse=True)
    first = flash_dmattn_func(q, k[:, :4], v[:, :4], return_lse=True)
    rest = flash_dmattn_func(q, k[:, 4:], v[:, 4:], return_lse=True)
    merged = merge(*first, *rest)
    flows = [torch.randn_like(each) for each in whole]
    for a, b in zip(merged, whole):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(merged, leaves, flows), torch.autograd.grad(whole, leaves, flows)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_no_keys_of_attention():
    """lse of a row without keys, as attention gives it."""
    q, none = torch.randn(1, 3, 2, 8), torch.randn(1, 0, 2, 8)
    empty, full = flash_dmattn_func(q, none, none, return_lse=True), flash_dmattn_func(q, q, q, return_lse=True)
    for found, expected in zip(merge(*empty, *full), full):
        assert torch.equal(found, expected)
    out, lse = merge(*empty, *empty)
    assert (out == 0).all() and (lse == INF).all()


def test_packed_attention():
    q, k = torch.randn(9, 4, 8), torch.randn(12, 2, 8)
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32) for each in ([0, 4, 9], [0, 5, 12]))
    even = torch.arange(7) % 2 == 0
    call = (q, k, k, cu_q, cu_k, 5, 7)
    parts = [flash_dmattn_varlen_func(*call, attn_mask=mask[None], return_lse=True) for mask in (even, ~even)]
    for found, expected in zip(merge(*parts[0], *parts[1]), flash_dmattn_varlen_func(*call, return_lse=True)):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed):
    parts = [each.requires_grad_() for each in random_parts(packed=packed, empty=False)]
    assert torch.autograd.gradcheck(merge, parts)
    assert torch.autograd.gradcheck(lambda *each: merge(*each)[0], parts)
    assert torch.autograd.gradcheck(lambda *each: merge(*each)[1], parts)
    assert torch.autograd.gradgradcheck(merge, parts)


def test_gradients_of_rows_without_keys():
    parts = [each.requires_grad_() for each in random_parts()]
    flows = torch.randn_like(parts[0]), torch.randn_like(parts[1])
    found = torch.autograd.grad(merge(*parts), parts, flows)
    expected = torch.autograd.grad(formula(*parts), parts, flows)
    for a, b, part in zip(found, expected, parts):
        torch.testing.assert_close(a, torch.where(b.isnan(), 0.0, b), atol=1e-10, rtol=1e-10)
    for index in (1, 3):
        assert (found[index][parts[index].isinf()] == 0).all()
    # Whatever flows in.
    flows[1][parts[1].isinf() & parts[3].isinf()] = float("nan")
    found = torch.autograd.grad(merge(*parts), parts, flows)
    assert all(each.isfinite().all() for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_every_dtype(dtype):
    parts = [each.requires_grad_() for each in random_parts(dtype)]
    out, lse = merge(*parts)
    flows = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), parts, flows)
    exact = [each.detach().double().requires_grad_() for each in parts]
    expected = torch.autograd.grad(merge(*exact), exact, [each.double() for each in flows])
    for a, b, part in zip(found, expected, parts):
        assert a.dtype == part.dtype and a.shape == part.shape
        torch.testing.assert_close(a.double(), b, atol=20 * TOLERANCE[dtype], rtol=20 * TOLERANCE[dtype])


def test_one_gradient():
    parts = random_parts(empty=False)
    parts[1].requires_grad_()
    out, _ = merge(*parts)
    (grad,) = torch.autograd.grad(out.sum(), parts[1])
    assert grad.shape == parts[1].shape
    with torch.no_grad():
        assert merge(*parts)[0].grad_fn is None


def test_operator_and_compile():
    parts = random_parts(torch.float32, empty=False)
    out1, lse1, out2, lse2 = (each.requires_grad_() for each in parts)
    low = torch.randn_like(lse1) * 1e-7
    torch.library.opcheck(torch.ops.flash_dmattn.merge, (out1, lse1, None, out2, lse2, None))
    torch.library.opcheck(torch.ops.flash_dmattn.merge, (out1, lse1, None, out2, lse2, low))
    for keywords in ({}, {"lse_low1": low}):
        torch._dynamo.reset()
        compiled = torch.compile(merge, backend="aot_eager", fullgraph=True)
        for found, expected in zip(compiled(*parts, **keywords), merge(*parts, **keywords), strict=True):
            torch.testing.assert_close(found, expected)
        (grad,) = torch.autograd.grad(compiled(*parts, **keywords)[0].sum(), parts[0])
        torch.testing.assert_close(grad, torch.autograd.grad(merge(*parts, **keywords)[0].sum(), parts[0])[0])


def test_arrays():
    for packed in (False, True):
        parts = random_parts(torch.float32, packed=packed)
        arrays = [each.numpy() for each in parts]
        for found, expected in zip(merge(*arrays), merge(*parts)):
            assert isinstance(found, np.ndarray) and (found == expected.numpy()).all()
        low = (1e-7 * torch.randn_like(parts[1])).numpy()
        for found, expected in zip(
            merge(*arrays, lse_low2=low), merge(*parts, lse_low2=torch.from_numpy(low)), strict=True
        ):
            assert isinstance(found, np.ndarray) and (found == expected.numpy()).all()
    strided = np.asfortranarray(arrays[0]), *arrays[1:]
    assert (merge(*strided)[0] == merge(*arrays)[0]).all()


# ---- what lse rounds away ----


def parts_beside_a_low_bias(bias=-1e9, counts=(1000, 3000), **options):
    """q, k, v of equal keys, v 0, 1, 2 ... in part after part; each part's and the whole's keyword arguments."""
    total = sum(counts)
    q, k = torch.randn(1, 3, 2, 8, **options), torch.zeros(1, total, 2, 8, **options)
    number = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    v = number[None, :, None, None].expand(1, -1, 2, 8).to(q.dtype).contiguous()
    return q, k, v, torch.full((1, 1, 1, total), bias, **options)


def in_parts(q, k, v, bias, counts):
    """(out, lse, lse_low) of the parts, one after the other."""
    results, first = [], 0
    for count in counts:
        keys = slice(first, first + count)
        options = {"attn_bias": bias[..., keys], "return_lse": True, "return_lse_low": True}
        results.append(flash_dmattn_func(q, k[:, keys], v[:, keys], **options))
        first += count
    return results


@pytest.mark.parametrize("bias", [0.0, -1e4, -1e6, -1e9, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_beside_a_low_bias_count_their_keys(dtype, bias):
    counts = (1000, 3000, 4000)
    q, k, v, low_bias = parts_beside_a_low_bias(bias, counts, dtype=dtype)
    expected = flash_dmattn_func(q, k, v, attn_bias=low_bias, return_lse=True, return_lse_low=True)
    torch.testing.assert_close(expected[0], torch.full_like(q, 1.375), atol=8e-3, rtol=0)
    parts = in_parts(q, k, v, low_bias, counts)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        merged = parts[order[0]]
        for part in order[1:]:
            out, lse, lse_low = parts[part]
            merged = merge(merged[0], merged[1], out, lse, lse_low1=merged[2], lse_low2=lse_low)
        torch.testing.assert_close(merged[0], expected[0], atol=1.6e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0)
        apart = (merged[1].double() - expected[1].double()) + (merged[2].double() - expected[2].double())
        assert apart.abs().max() < 1e-5
    arrays = [[(each.float() if dtype == torch.bfloat16 else each).numpy() for each in part] for part in parts]
    out, lse, lse_low = merge(*arrays[0][:2], *arrays[1][:2], lse_low1=arrays[0][2], lse_low2=arrays[1][2])
    assert np.allclose(out, 0.75, atol=1e-6)


def test_a_low_part_that_is_not_given_is_0():
    q, k, v, bias = parts_beside_a_low_bias()
    (out1, lse1, low1), (out2, lse2, low2) = in_parts(q, k, v, bias, (1000, 3000))
    assert torch.allclose(merge(out1, lse1, out2, lse2)[0], torch.tensor(0.5))
    assert torch.allclose(merge(out1, lse1, out2, lse2, lse_low2=low2)[0], torch.tensor(3000 / 3001))
    assert torch.allclose(merge(out1, lse1, out2, lse2, lse_low1=low1)[0], torch.tensor(1 / 1001))
    zeros = torch.zeros_like(lse1)
    for a, b in zip(merge(out1, lse1, out2, lse2, lse_low1=zeros), merge(out1, lse1, out2, lse2)):
        assert torch.equal(a, b)


def test_gradients_beside_a_low_bias():
    counts = (300, 100)
    q, k, v, bias = parts_beside_a_low_bias(-1e9, counts)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    whole = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True)
    first, rest = in_parts(q, k, v, bias, counts)
    merged = merge(*first[:2], *rest[:2], lse_low1=first[2], lse_low2=rest[2])
    assert not first[2].requires_grad and not merged[2].requires_grad
    flows = torch.randn_like(q), torch.randn_like(whole[1])
    found, expected = (torch.autograd.grad(each[:2], leaves, flows) for each in (merged, whole))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_gradients_with_low_parts():
    out1, lse1, out2, lse2 = (each.requires_grad_() for each in random_parts(empty=False))
    lows = {"lse_low1": torch.randn_like(lse1), "lse_low2": torch.randn_like(lse2)}  # as large as they like
    call = lambda *parts: merge(*parts, **lows)[:2]  # noqa: E731
    # lse + lse_low is what it is: the derivative of the sum is that of lse, whose part of it is rounded.
    expected = formula(out1, lse1 + lows["lse_low1"], out2, lse2 + lows["lse_low2"])
    flows = [torch.randn_like(each) for each in expected]
    parts = (out1, lse1, out2, lse2)
    for a, b in zip(torch.autograd.grad(call(*parts), parts, flows), torch.autograd.grad(expected, parts, flows)):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    assert torch.autograd.gradcheck(call, parts)
    assert torch.autograd.gradgradcheck(call, parts)


def test_lse_low_of_attention():
    def same(found, expected):
        return all(a is b is None or torch.equal(torch.as_tensor(a), b) for a, b in zip(found, expected, strict=True))

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 3)
    q[:, 0] = 0  # row 0 has 7 equal scores
    for bias in (None, torch.full((1, 1, 1, 7), -1e6)):
        out, lse, lse_low = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True, return_lse_low=True)
        expected, expected_lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        if bias is None:
            assert lse_low is None
        else:
            torch.testing.assert_close(lse[..., 0] + 1e6 + lse_low[..., 0], torch.tensor(7.0).log().expand(2, 4))
            assert (lse_low != 0).all()
        arrays = [each.numpy() for each in (q, k, v)]
        array = None if bias is None else bias.numpy()
        found = attention(*arrays, attn_bias=array, return_lse=True, return_lse_low=True)
        assert isinstance(found[0], np.ndarray) and same(found, (out, lse, lse_low))
        assert same(attention(q, k, v, attn_bias=bias, return_lse_low=True), (out, lse, lse_low))
        torch._dynamo.reset()
        compiled = torch.compile(flash_dmattn_func, backend="aot_eager", fullgraph=True)
        assert same(compiled(q, k, v, attn_bias=bias, return_lse_low=True), (out, lse, lse_low))


def test_lse_low_of_packed_attention():
    q, k = torch.randn(9, 4, 8), torch.randn(12, 2, 8)
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32) for each in ([0, 4, 9], [0, 5, 12]))
    call = (q, k, k, cu_q, cu_k, 5, 7)
    bias = torch.full((1, 1, 1, 7), -1e9)
    even = torch.arange(7) % 2 == 0
    parts = [
        flash_dmattn_varlen_func(*call, attn_bias=bias.masked_fill(mask, -INF), return_lse=True, return_lse_low=True)
        for mask in (even, ~even)
    ]
    merged = merge(*parts[0][:2], *parts[1][:2], lse_low1=parts[0][2], lse_low2=parts[1][2])
    expected = flash_dmattn_varlen_func(*call, attn_bias=bias, return_lse=True, return_lse_low=True)
    torch.testing.assert_close(merged[0], expected[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(merged[1] - expected[1] + merged[2], expected[2], atol=1e-5, rtol=1e-5)
    assert flash_dmattn_varlen_func(*call, return_lse_low=True)[2] is None


def test_lse_low_comes_with_lse():
    q, cu = torch.randn(1, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    for function, tensors in ((flash_dmattn_func, (q, q, q)), (attention, [q.numpy()] * 3), (attention, (q, q, q))):
        assert len(function(*tensors, return_lse_low=True)) == 3
    assert len(flash_dmattn_varlen_func(q[0], q[0], q[0], cu, cu, 3, 3, return_lse_low=True)) == 3
    with pytest.raises(ValueError, match="return_lse_low and return_attn_probs are both given"):
        flash_dmattn_func(q, q, q, return_lse=True, return_lse_low=True, return_attn_probs=True)


# ---- NaN ----


@pytest.mark.parametrize("other", [0.0, 1000.0, -1000.0, INF, -INF, float("nan")])
@pytest.mark.parametrize("where", ["out", "lse", "lse_low"])
def test_nan_stays_nan(where, other):
    """A NaN of a part with keys, however small its share; and in what flows back through it."""
    parts = [torch.randn(1, 3, 2, 4), torch.zeros(1, 2, 3), torch.randn(1, 3, 2, 4), torch.full((1, 2, 3), other)]
    lows = [torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)]
    {"out": parts[0][0, 1, 1], "lse": parts[1][0, 1, 1], "lse_low": lows[0][0, 1, 1]}[where].fill_(float("nan"))
    for each in parts:
        each.requires_grad_()
    for turned in (False, True):
        order = parts[2:] + parts[:2] if turned else parts
        out, lse, lse_low = merge(*order, lse_low1=lows[turned], lse_low2=lows[not turned])
        assert out[0, 1, 1].isnan().all() and lse[0, 1, 1].isnan() == (where != "out" or other != other)
        clean = torch.ones(1, 3, 2, dtype=torch.bool)
        clean[0, 1, 1] = False
        assert out[clean].isnan().any() == (other != other)
        if other == other:
            grads = torch.autograd.grad(out.sum() + lse.sum(), parts)
            assert grads[1][0, 1, 1].isnan()
            assert not any(grad[0, 0].isnan().any() for grad in grads)
        arrays = [each.detach().numpy() for each in (*order, lows[turned], lows[not turned])]
        found = merge(*arrays[:4], lse_low1=arrays[4], lse_low2=arrays[5])
        for a, b in zip(found, (out, lse, lse_low), strict=True):
            assert np.array_equal(a, b.detach().numpy(), equal_nan=True)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_of_attention_stays_nan(where):
    """A NaN in Q, in K or in V of one part reaches each row that has or sees it, as in one call."""
    q, k, v = tensors = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    tensors[where][0, 4, 1, 3] = float("nan")
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    whole = flash_dmattn_func(q, k, v, attn_mask=seen[None, None], return_lse=True)
    parts = [
        flash_dmattn_func(q, k[:, keys], v[:, keys], attn_mask=seen[None, None, :, keys], return_lse=True)
        for keys in (slice(0, 3), slice(3, 6))
    ]
    for out, lse in (whole, merge(*parts[0], *parts[1]), merge(*parts[1], *parts[0])):
        spoiled = out.isnan().any(-1)[0, :, 1]
        assert spoiled[4] and (where == 0 or spoiled[5]) and lse[0, 1, 4].isnan() == (where != 2)
        assert out[:, :, 0].isfinite().all() and lse[:, 0].isfinite().all()


# ---- errors ----


def test_refusals():
    out1, lse1, out2, lse2 = random_parts(torch.float32)

    def refuse(kind, sentence, *parts, **keywords):
        with pytest.raises(kind, match=sentence):
            merge(*parts, **keywords)
        tensors = (*parts, *(each for name, each in keywords.items() if name != "stream"))
        if all(isinstance(each, torch.Tensor) for each in tensors):
            arrays = {name: each if name == "stream" else each.numpy() for name, each in keywords.items()}
            with pytest.raises(kind, match=sentence):
                merge(*(each.numpy() for each in parts), **arrays)

    refuse(ValueError, r"out2 has shape \[2, 5, 3, 3\]; it must be \[2, 5, 3, 4\]", out1, lse1, out2[..., :3], lse2)
    refuse(ValueError, "lse2 is float64; it must be float32", out1, lse1, out2, lse2.double())
    refuse(ValueError, "out2 is float16; it must be float32", out1, lse1, out2.half(), lse2)
    refuse(ValueError, "out1 is int32; it must be float32, float16", out1.int(), lse1, out2, lse2)
    refuse(ValueError, "out1 has 2 axes; it needs 4", out1[0, 0], lse1, out2, lse2)
    refuse(ValueError, "lse1 has 4 axes; beside out1 with 4 it needs 3", out1, out1, out2, lse2)
    refuse(ValueError, "out2 has 3 axes; beside out1 with 4 it needs 4", out1, lse1, out2[0], lse2)
    refuse(ValueError, "stream is given, but (q|out1) is on (the CPU|cpu)", out1, lse1, out2, lse2, stream=0)
    refuse(TypeError, "lse1 is a list; it must be a torch.Tensor", out1, [1], out2, lse2)
    refuse(TypeError, "lse1 is a NoneType; it must be a torch.Tensor", out1, None, out2, lse2)
    refuse(TypeError, "lse_low2 is a float; it must be a torch.Tensor", out1, lse1, out2, lse2, lse_low2=0.0)
    refuse(ValueError, "lse_low1 has 2 axes; beside out1 with 4 it needs 3", out1, lse1, out2, lse2, lse_low1=lse1[0])
    refuse(ValueError, "lse_low2 is float64; it must be float32", out1, lse1, out2, lse2, lse_low2=lse2.double())
    short = {"lse_low1": lse1[..., :4]}
    refuse(ValueError, r"lse_low1 has shape \[2, 3, 4\]; it must be \[2, 3, 5\]", out1, lse1, out2, lse2, **short)
    arrays = [each.numpy() for each in (out1, lse1, out2, lse2)]
    for place, name in ((1, "lse1"), (2, "out2"), (3, "lse2")):
        with pytest.raises(TypeError, match=f"{name} is None; it must be an array"):
            merge(*arrays[:place], None, *arrays[place + 1 :])
    with pytest.raises(RuntimeError, match="under vmap"):
        torch.vmap(merge)(*(each[None] for each in random_parts(torch.float32)))
