"""test_row_intervals.py: ranges of keys for each row, against float64 and against dense masks of the same pairs."""

import numpy as np
import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn import attention, attention_backward, flash_dmattn_func, flash_dmattn_varlen_func

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 37, 61, 4, 2, 16


def ranges_of(*shape, keys=KEYS):
    """(start, end), int32: ranges of any place and length; some are empty, some reach beyond the keys."""
    start = torch.randint(-5, keys + 5, shape, dtype=torch.int32)
    end = start + torch.randint(-3, keys, shape, dtype=torch.int32)
    start[..., ::7] = -(2**31)
    end[..., 3::11] = 2**31 - 1
    return start, end


def mask_of(ranges, heads, keys=KEYS):
    """bool [B|1, H, Sq, Sk] of the pairs that some range holds."""
    first, last = (each.repeat_interleave(heads // each.shape[1], 1)[..., None] for each in ranges)
    key = torch.arange(keys)
    return ((first <= key) & (key < last)).any(2)


def operands(dtype=torch.float32):
    q = torch.randn(BATCH, ROWS, HEADS, DIM, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(BATCH, KEYS, HEADS_KV, DIM, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("shape", [(1, 1, 1), (BATCH, HEADS_KV, 1), (1, HEADS, 2), (BATCH, 1, 4)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_size": (20, 3)}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_forward_and_gradients(shape, options, dtype):
    ranges = ranges_of(*shape, ROWS)
    mask = mask_of(ranges, HEADS)
    q, k, v = operands(dtype)
    out, lse = flash_dmattn_func(q, k, v, row_intervals=ranges, return_lse=True, **options)
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    want, want_lse, _ = truth(
        *wide, mask=mask, causal=options.get("is_causal", False), softcap=options.get("softcap", 0.0),
        window=options.get("window_size", (-1, -1)),
    )  # fmt: skip
    assert_close(out, want, dtype, "out")
    assert_close(lse, want_lse, dtype, "lse")
    dout = torch.randn_like(out)
    out.backward(dout)
    want.backward(dout.double())
    for have, there, name in zip((q, k, v), wide, "qkv"):
        assert_close(have.grad, there.grad, dtype, f"d{name}")


def test_beside_every_other_mask():
    """Key intervals, a dense mask, a bias with a gradient and a sink: as the dense mask of all of them."""
    ranges, pairs = ranges_of(BATCH, HEADS, 2, ROWS), torch.rand(BATCH, 1, ROWS, KEYS) < 0.8
    intervals = torch.zeros(1, 1, KEYS, dtype=torch.int32), torch.randint(0, ROWS, (1, 1, KEYS), dtype=torch.int32)
    bias, sink = torch.randn(1, HEADS_KV, 1, KEYS, requires_grad=True), torch.randn(HEADS)
    q, k, v = operands()
    options = {"attn_bias": bias, "sink": sink, "is_causal": True}
    out = flash_dmattn_func(q, k, v, pairs, row_intervals=ranges, key_intervals=intervals, **options)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
    row = torch.arange(ROWS)[:, None]
    held = (intervals[0][:, :, None] <= row) & (row < intervals[1][:, :, None])
    want = flash_dmattn_func(q, k, v, pairs & held & mask_of(ranges, HEADS), **options)
    torch.testing.assert_close(out, want)
    for have, there in zip(grads, torch.autograd.grad(want.square().sum(), (q, k, v, bias))):
        torch.testing.assert_close(have, there, rtol=1e-4, atol=1e-5)


def test_few_rows_and_probabilities():
    """A row or two take the kernels of generation; the probabilities are those of the same pairs."""
    q, k, v = torch.randn(BATCH, 1, HEADS, DIM), torch.randn(BATCH, 300, HEADS_KV, DIM), torch.randn(BATCH, 300, HEADS_KV, DIM)
    for count in (1, 3):
        ranges = ranges_of(BATCH, HEADS, count, 1, keys=300)
        out, _, probs = flash_dmattn_func(q, k, v, row_intervals=ranges, return_attn_probs=True)
        want, _, expected = truth(q, k, v, mask=mask_of(ranges, HEADS, 300))
        assert_close(out, want, torch.float32, "out")
        assert_close(probs, expected, torch.float32, "probabilities")


def test_packed_sequences_count_their_own_keys():
    lengths = [5, 0, 19, 13]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    total = int(cu[-1])
    q, k, v = (torch.randn(total, heads, DIM, requires_grad=True) for heads in (HEADS, HEADS_KV, HEADS_KV))
    ranges = ranges_of(HEADS_KV, 2, total, keys=19)
    out = flash_dmattn_varlen_func(q, k, v, cu, cu, 19, 19, is_causal=True, row_intervals=ranges)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    parts = []
    for first, last in zip(cu[:-1].tolist(), cu[1:].tolist()):
        part = [each[None, first:last] for each in (q, k, v)]
        own = [each[None, :, :, first:last] for each in ranges]
        parts.append(flash_dmattn_func(*part, is_causal=True, row_intervals=own)[0])
    want = torch.cat(parts)
    torch.testing.assert_close(out, want)
    for have, there in zip(grads, torch.autograd.grad(want.sum(), (q, k, v))):
        torch.testing.assert_close(have, there, rtol=1e-4, atol=1e-5)


def test_arrays_of_numpy():
    q, k, v = (each.detach().numpy() for each in operands())
    ranges = [each.numpy() for each in ranges_of(BATCH, 1, 2, ROWS)]
    out, lse = attention(q, k, v, row_intervals=ranges, return_lse=True)
    grads = attention_backward(np.ones_like(out), q, k, v, out, lse, row_intervals=ranges)
    tensors = [torch.from_numpy(each).requires_grad_() for each in (q, k, v)]
    want = flash_dmattn_func(*tensors, row_intervals=[torch.from_numpy(each) for each in ranges])
    np.testing.assert_array_equal(out, want.detach().numpy())
    want.sum().backward()
    for have, there in zip(grads, tensors):
        np.testing.assert_allclose(have, there.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_compiled_code():
    ranges, (q, k, v) = ranges_of(1, HEADS, 2, ROWS), operands()
    call = torch.compile(lambda *given: flash_dmattn_func(*given[:3], row_intervals=given[3:]), fullgraph=True)
    torch.testing.assert_close(call(q, k, v, *ranges), flash_dmattn_func(q, k, v, row_intervals=ranges))


def test_image_spans_beneath_a_window():
    """The rule of a multimodal model: rows of a span see all of it, other rows the last keys before them."""
    window, span = 8, (10, 22)
    row = torch.arange(40)
    inside = (row >= span[0]) & (row < span[1])
    start = torch.where(inside, (row - window + 1).clamp(max=span[0]), row - window + 1).clamp(min=0)
    end = torch.where(inside, (row + 1).clamp(min=span[1]), row + 1)
    q = torch.randn(1, 40, 1, DIM)
    key = torch.arange(40)
    mask = (key <= row[:, None]) & (key > row[:, None] - window) | inside[:, None] & inside
    pair = [each.to(torch.int32)[None, None, None] for each in (start, end)]
    torch.testing.assert_close(flash_dmattn_func(q, q, q, row_intervals=pair), flash_dmattn_func(q, q, q, mask[None, None]))


def test_bad_input_is_one_sentence():
    q, k, v = operands()
    start, end = ranges_of(1, 1, 1, ROWS)
    for pair, kind, words in (
        (start, TypeError, "row_intervals is"),
        ((start, None), ValueError, "row_end is missing"),
        ((start[0], end[0]), ValueError, "row_start has 3 axes"),
        ((start.long(), end.long()), ValueError, "row_start is int64"),
        ((start[..., 1:], end[..., 1:]), ValueError, "row_start has shape"),
        (ranges_of(1, 1, 5, ROWS), ValueError, "5 ranges a row"),
        (ranges_of(1, 3, 1, ROWS), ValueError, "row intervals have 3 heads"),
    ):
        with pytest.raises(kind, match=words) as caught:
            flash_dmattn_func(q, k, v, row_intervals=pair)
        assert "\n" not in str(caught.value)
