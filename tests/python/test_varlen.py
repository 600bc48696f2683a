"""test_varlen.py: packed sequences against one dense call per sequence."""

import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


CASES = [([5, 0, 7, 1], [6, 3, 0, 9]), ([4], [4]), ([0, 0], [0, 2]), ([3, 33, 2], [40, 5, 2])]


@pytest.mark.parametrize("lengths_q, lengths_k", CASES)
@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (False, (2, 1))])
def test_each_sequence_is_a_dense_call(lengths_q, lengths_k, causal, window):
    torch.manual_seed(3)
    longest_q, longest_k = max(lengths_q), max(lengths_k)
    q = torch.randn(sum(lengths_q), 4, 8, requires_grad=True)
    k = torch.randn(sum(lengths_k), 2, 8, requires_grad=True)
    v = torch.randn(sum(lengths_k), 2, 5, requires_grad=True)
    bias = torch.randn(len(lengths_q), 2, 1, longest_k, requires_grad=True)
    mask = torch.rand(1, 4, longest_q, longest_k) < 0.8
    start = torch.randint(-2, 3, (2, sum(lengths_k)), dtype=torch.int32)
    end = torch.randint(2, 40, (2, sum(lengths_k)), dtype=torch.int32)
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    out, lse = flash_dmattn_varlen_func(
        q, k, v, cu_q, cu_k, longest_q, longest_k, 0.4, causal, 2.0,
        attn_mask=mask, attn_bias=bias, window_size=window, key_intervals=(start, end), return_lse=True,
    )  # fmt: skip
    assert out.shape == (sum(lengths_q), 4, 5) and lse.shape == (4, sum(lengths_q))
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, bias)]
    expected = []
    for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k)):
        one_q = exact[0][cu_q[b] : cu_q[b + 1]][None]
        one_k, one_v = (each[cu_k[b] : cu_k[b + 1]][None] for each in exact[1:3])
        pair = tuple(each[None, :, cu_k[b] : cu_k[b + 1]] for each in (start, end))
        one_mask, one_bias = mask[:, :, :rows, :keys], exact[3][b : b + 1, :, :, :keys]
        expected.append(truth(one_q, one_k, one_v, one_mask, one_bias, 0.4, causal, 2.0, window, pair))
        assert_close(out[cu_q[b] : cu_q[b + 1]], expected[-1][0][0], torch.float32, f"out of sequence {b}")
        assert_close(lse[:, cu_q[b] : cu_q[b + 1]], expected[-1][1][0], torch.float32, f"lse of sequence {b}")
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v, bias), dout)
    whole = torch.cat([each[0][0] for each in expected])
    want = torch.autograd.grad(whole, exact, dout.double(), allow_unused=True)
    for name, actual, correct in zip(("dq", "dk", "dv", "dbias"), got, want):
        correct = torch.zeros_like(actual) if correct is None else correct
        assert_close(actual, correct, torch.float32, name)


def test_same_bits_as_dense_for_one_sequence():
    q = torch.randn(1, 9, 2, 16)
    cu = offsets([9])
    packed = flash_dmattn_varlen_func(q[0], q[0], q[0], cu, cu, 9, 9, is_causal=True)
    assert torch.allclose(packed, flash_dmattn_func(q, q, q, is_causal=True)[0], atol=1e-6)


def test_ordinary_calls_are_taken_whole(monkeypatch):
    from flash_dmattn import _torch

    q = torch.randn(9, 2, 16)
    cu = offsets([4, 5])
    mask = torch.rand(1, 1, 5, 5) < 0.7
    leaf = q.clone().requires_grad_()
    calls = [
        lambda: flash_dmattn_varlen_func(q, q, q, cu, cu, 5, 5, is_causal=True, return_lse=True),
        lambda: flash_dmattn_varlen_func(q, q, q, cu, cu, 5, 5, attn_mask=mask, window_size=(2, 1)),
        lambda: torch.autograd.grad(flash_dmattn_varlen_func(leaf, q, q, cu, cu, 5, 5).sum(), leaf),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "attend_packed", None)  # Python's way
        whole = [call() for call in calls]
    monkeypatch.setattr(_torch._native, "attend", lambda *arguments: None)
    for one, call in zip(whole, calls, strict=True):
        other = call()
        one, other = (each if isinstance(each, tuple) else (each,) for each in (one, other))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_dense_tensors_are_not_taken_for_packed_ones():
    q, cu = torch.randn(2, 4, 2, 16), offsets([4, 4])
    wrong = [
        ((None, None), TypeError, "^cu_seqlens_q is None; it must be a torch.int32 tensor of batch \\+ 1 elements$"),
        ((cu, None), TypeError, "^cu_seqlens_k is None; it must be"),
        ((cu, cu.long()), TypeError, r"^cu_seqlens_k is torch.int64, of shape \[3\]; it must be"),
        ((cu, cu[None]), TypeError, r"^cu_seqlens_k is torch.int32, of shape \[1, 3\]; it must be"),
        ((cu, cu), ValueError, "^query has 4 axes; it needs 3"),
    ]
    for given, kind, sentence in wrong:
        with pytest.raises(kind, match=sentence):
            flash_dmattn_varlen_func(q, q, q, *given, 4, 4)
        if kind is TypeError:
            with pytest.raises(kind, match=sentence):
                flash_dmattn_varlen_func(q[0], q[0], q[0], *given, 4, 4)


def test_padding_mask_of_two_axes():
    q = torch.randn(7, 2, 8)
    cu = offsets([3, 4])
    keep = torch.tensor([[True, False, True, True], [True, True, True, False]])
    out = flash_dmattn_varlen_func(q, q, q, cu, cu, 4, 4, attn_mask=keep)
    for b, (first, last) in enumerate([(0, 3), (3, 7)]):
        one = q[None, first:last]
        expected = truth(one, one, one, keep[b : b + 1, None, None, : last - first])[0][0]
        assert_close(out[first:last], expected, torch.float32, f"sequence {b}")


def in_the_middle(tensor, before, after):
    """The rows of a packed tensor between rows of no sequence, which are NaN."""
    bad = [torch.full((rows, *tensor.shape[1:]), float("nan")) for rows in (before, after)]
    return torch.cat([bad[0], tensor, bad[1]]).requires_grad_()


@pytest.mark.parametrize("lengths_q, lengths_k", [([3, 4], [3, 7]), ([0, 5], [4, 0]), ([], [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_no_sequence(lengths_q, lengths_k, dtype):
    torch.manual_seed(5)
    q = torch.randn(sum(lengths_q), 4, 16, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(sum(lengths_k), 2, 16, dtype=dtype, requires_grad=True) for _ in range(2))
    dout = torch.randn(sum(lengths_q), 4, 16, dtype=dtype)
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)

    def both(q, k, v, cu_q, cu_k, dout):
        out, lse = flash_dmattn_varlen_func(q, k, v, cu_q, cu_k, 7, 7, is_causal=True, return_lse=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), dout)

    want = both(q, k, v, cu_q, cu_k, dout)
    wide = [in_the_middle(each.detach(), *rest) for each, rest in zip((q, k, v), ((2, 3), (1, 5), (1, 5)))]
    got = both(*wide, cu_q + 2, cu_k + 1, in_the_middle(dout, 2, 3).detach())
    for name, wide, exact, first in zip(("out", "lse", "dq", "dk", "dv"), got, want, (2, 2, 2, 1, 1)):
        if name == "lse":
            wide, exact = wide.T, exact.T
        rows = slice(first, first + exact.shape[0])
        assert_close(wide[rows], exact.detach().double(), dtype, name)
        rest = torch.cat([wide[: rows.start], wide[rows.stop :]])
        assert torch.equal(rest, torch.full_like(rest, float("inf") if name == "lse" else 0)), name
