"""test_compat_padding.py: flash_attn.bert_padding and flash_attn.layers.rotary: values and gradients by other means."""

import pytest
import torch
from flash_dmattn.compat.flash_attn import bert_padding
from flash_dmattn.compat.flash_attn.layers import rotary

# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_unpad_and_pad(dtype):
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]).to(dtype)
    x = torch.randn(3, 4, 2, 5, dtype=torch.float64, requires_grad=True)
    rows, indices, offsets, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()])
    assert indices.tolist() == [0, 1, 5, 6, 7] and indices.dtype is torch.int64
    assert offsets.tolist() == [0, 2, 5, 5] and offsets.dtype is torch.int32
    assert longest == 3 and type(longest) is int
    assert used.tolist() == [2, 3, 0] and used.dtype is torch.int32
    back = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(back, torch.where(mask.bool()[:, :, None, None], x, 0.0))
    back.square().sum().backward()
    assert torch.equal(x.grad, 2 * back)


def test_rows_that_are_allocated_but_unused():
    mask, unused = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[0, 0, 1, 0]])
    rows, indices, offsets, longest, used = bert_padding.unpad_input(torch.arange(4.0)[None, :, None], mask, unused)
    assert rows.flatten().tolist() == [0, 1, 2] and indices.tolist() == [0, 1, 2]
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 3], 3, [2])


def test_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    rows, indices, offsets, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :5], x[1])))
    assert indices.tolist() == [*range(5), *range(6, 12)]
    assert (offsets.tolist(), offsets.dtype, longest) == ([0, 2, 5, 11], torch.int32, 6)


def test_gradients_of_the_axis_functions():
    index = torch.tensor([3, 0])
    x, y = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2))
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_first_axis(x, index), x)
    assert torch.autograd.gradcheck(lambda y: bert_padding.index_put_first_axis(y, index, 5), y)
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_first_axis_residual(x, index), x)


# ---- rotary ----------------------------------------------------------------------------------------------------------


def tables(rows=12, width=4):
    angle = torch.arange(rows)[:, None] * torch.rand(width, generator=torch.Generator().manual_seed(5))
    return angle.cos(), angle.sin()


def turned(x, cos, sin, interleaved, position):
    """One row [H, D] at a position, by complex numbers in float64."""
    width = cos.shape[1]
    a, b = (x[:, 0 : 2 * width : 2], x[:, 1 : 2 * width : 2]) if interleaved else (x[:, :width], x[:, width : 2 * width])
    z = torch.complex(a.double(), b.double()) * torch.complex(cos[position].double(), sin[position].double())
    both = (z.real, z.imag)
    whole = torch.stack(both, -1).flatten(1) if interleaved else torch.cat(both, -1)
    return torch.cat((whole, x[:, 2 * width :].double()), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 3, "tensor"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved, offset, dtype):
    cos, sin = tables()
    x = torch.randn(2, 5, 3, 10).to(dtype)
    offsets = torch.tensor([4, 0]) if offset == "tensor" else offset
    have = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    for b in range(2):
        for i in range(5):
            place = i + (int(offsets[b]) if offset == "tensor" else offset)
            want = turned(x[b, i], cos, sin, interleaved, place)
            assert torch.allclose(have[b, i].double(), want, atol=1e-6 if dtype is torch.float32 else 3e-2)
    assert have.dtype is dtype and torch.equal(have[..., 8:], x[..., 8:])


def test_rotary_of_packed_sequences():
    cos, sin = tables()
    x, offsets = torch.randn(7, 3, 8), torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    have = rotary.apply_rotary_emb(x, cos, sin, cu_seqlens=offsets, max_seqlen=4)
    assert torch.equal(have[:4], rotary.apply_rotary_emb(x[None, :4], cos, sin)[0])
    assert torch.equal(have[4:], rotary.apply_rotary_emb(x[None, 4:], cos, sin)[0])
    moved = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([2, 9, 1]), cu_seqlens=offsets)
    assert torch.equal(moved[4:], rotary.apply_rotary_emb(x[None, 4:], cos, sin, seqlen_offsets=1)[0])


def test_rotary_in_place_and_past_the_tables():
    cos, sin = tables(rows=4)
    x = torch.randn(1, 6, 3, 8)
    want = rotary.apply_rotary_emb(x, cos, sin)
    assert torch.equal(want[:, 4:], rotary.apply_rotary_emb(x[:, 4:], cos[3:].expand(2, 4), sin[3:].expand(2, 4)))
    assert rotary.apply_rotary_emb(x, cos, sin, inplace=True) is x and torch.equal(x, want)


def test_rotary_gradients():
    cos, sin = (each.double() for each in tables())
    x = torch.randn(1, 4, 2, 10, dtype=torch.float64, requires_grad=True)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda x: rotary.apply_rotary_emb(x, cos, sin, interleaved), x)


def test_rotary_of_stacked_tensors():
    cos, sin = tables()
    qkv = torch.randn(2, 5, 3, 4, 8)
    q, k, v = (each.clone() for each in qkv.unbind(2))
    kv = torch.stack((k, v), 2)
    grouped = torch.cat((q, k[:, :, :2], v[:, :, :2]), 2)
    assert rotary.apply_rotary_emb_qkv_(qkv, cos, sin) is qkv
    want = [rotary.apply_rotary_emb(each, cos, sin) for each in (q, k)]
    assert torch.equal(qkv, torch.stack((*want, v), 2))
    assert torch.equal(rotary.apply_rotary_emb_kv_(kv, cos, sin), torch.stack((want[1], v), 2))
    rotary.apply_rotary_emb_qkv_(grouped, cos, sin, num_heads_q=4)
    assert torch.equal(grouped, torch.cat((want[0], want[1][:, :, :2], v[:, :, :2]), 2))
    with pytest.raises(ValueError, match="num_heads_q is None"):
        rotary.apply_rotary_emb_qkv_(grouped, cos, sin)


def test_rotary_tables_that_do_not_fit():
    cos, sin = tables(width=8)
    with pytest.raises(RuntimeError, match=r"cos has shape \[12, 8\] and sin \[12, 8\]; both must be \[rows, at most 4\]"):
        rotary.apply_rotary_emb(torch.randn(1, 4, 2, 8), cos, sin)
