"""test_merge.py: two partial results are the whole, in value and gradient, for PyTorch tensors and for arrays."""

import numpy as np
import pytest
import torch
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, merge

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
    torch.library.opcheck(torch.ops.flash_dmattn.merge, tuple(each.requires_grad_() for each in parts))
    torch._dynamo.reset()
    compiled = torch.compile(merge, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*parts), merge(*parts)):
        torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(compiled(*parts)[0].sum(), parts[0])
    torch.testing.assert_close(grad, torch.autograd.grad(merge(*parts)[0].sum(), parts[0])[0])


def test_arrays():
    for packed in (False, True):
        parts = random_parts(torch.float32, packed=packed)
        arrays = [each.numpy() for each in parts]
        for found, expected in zip(merge(*arrays), merge(*parts)):
            assert isinstance(found, np.ndarray) and (found == expected.numpy()).all()
    strided = np.asfortranarray(arrays[0]), *arrays[1:]
    assert (merge(*strided)[0] == merge(*arrays)[0]).all()


def test_refusals():
    out1, lse1, out2, lse2 = random_parts(torch.float32)

    def refuse(kind, sentence, *parts, **keywords):
        with pytest.raises(kind, match=sentence):
            merge(*parts, **keywords)
        if all(isinstance(each, torch.Tensor) for each in parts):
            with pytest.raises(kind, match=sentence):
                merge(*(each.numpy() for each in parts), **keywords)

    refuse(ValueError, r"out2 has shape \[2, 5, 3, 3\]; it must be \[2, 5, 3, 4\]", out1, lse1, out2[..., :3], lse2)
    refuse(ValueError, "lse2 is float64; it must be float32", out1, lse1, out2, lse2.double())
    refuse(ValueError, "out2 is float16; it must be float32", out1, lse1, out2.half(), lse2)
    refuse(ValueError, "out1 is int32; it must be float32, float16", out1.int(), lse1, out2, lse2)
    refuse(ValueError, "out1 has 2 axes; it needs 4", out1[0, 0], lse1, out2, lse2)
    refuse(ValueError, "lse1 has 4 axes; beside out1 with 4 it needs 3", out1, out1, out2, lse2)
    refuse(ValueError, "out2 has 3 axes; beside out1 with 4 it needs 4", out1, lse1, out2[0], lse2)
    refuse(ValueError, "stream is given, but (q|out1) is on (the CPU|cpu)", out1, lse1, out2, lse2, stream=0)
    refuse(TypeError, "lse1 is a list; it must be a torch.Tensor", out1, [1], out2, lse2)
    with pytest.raises(RuntimeError, match="under vmap"):
        torch.vmap(merge)(*(each[None] for each in random_parts(torch.float32)))
