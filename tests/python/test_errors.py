"""test_errors.py: what is refused, and that the sentence says what to write instead."""

import flash_dmattn
import pytest
import torch
from flash_dmattn import (
    attention,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    get_available_backends,
    masks,
)

Q = torch.randn(2, 5, 4, 8)
OFFSETS = torch.tensor([0, 3, 5], dtype=torch.int32)


def refuse(kind, sentence, *arguments, **keywords):
    with pytest.raises(kind, match=sentence):
        flash_dmattn_func(*(arguments or (Q, Q, Q)), **keywords)


def test_masks():
    refuse(ValueError, r"write attn_mask\[None, None\]", attn_mask=torch.ones(7, 5, dtype=torch.bool))
    refuse(TypeError, r"attn_mask=\(mask > 0\).*attn_bias=mask", attn_mask=torch.ones(2, 1, 5, 5))
    refuse(TypeError, "must be bool", attn_mask=torch.ones(2, 1, 5, 5, dtype=torch.uint8))
    refuse(ValueError, "attn_mask has 1 axes", attn_mask=torch.ones(5, dtype=torch.bool))
    refuse(ValueError, "axis 3 must be 1 or the key length 5", attn_mask=torch.ones(2, 1, 5, 4, dtype=torch.bool))
    refuse(ValueError, "axis 1 must be 1, 4", attn_mask=torch.ones(2, 3, 5, 5, dtype=torch.bool))


def test_biases():
    refuse(ValueError, r"write attn_bias\[None, None\]", attn_bias=torch.zeros(5, 5))
    refuse(TypeError, "a bool mask goes to attn_mask", attn_bias=torch.ones(2, 1, 5, 5, dtype=torch.bool))
    refuse(ValueError, "bias is float16; it must be float32", attn_bias=torch.zeros(2, 1, 5, 5, dtype=torch.float16))
    refuse(ValueError, "axis 0 must be 1 or the batch 2", attn_bias=torch.zeros(3, 1, 5, 5))


def test_numbers():
    refuse(ValueError, "both softmax_scale and its alias scale", softmax_scale=1.0, scale=1.0)
    refuse(ValueError, "softmax_scale is nan; it must be finite", softmax_scale=float("nan"))
    refuse(ValueError, "softmax_scale is inf", softmax_scale=float("inf"))
    refuse(ValueError, "softcap is -1; it must be finite and >= 0", softcap=-1.0)
    refuse(ValueError, r"window is \(-2, 0\)", window_size=(-2, 0))
    refuse(ValueError, r"must be a pair \(left, right\)", window_size=(1, 2, 3))


def test_tensors():
    refuse(TypeError, "query is a list", [1], Q, Q)
    refuse(ValueError, "key has 3 axes; it needs 4", Q, Q[0], Q)
    refuse(ValueError, "k is float16; it must be float32", Q, Q.half(), Q)
    refuse(ValueError, "dtype is int32", Q.int(), Q.int(), Q.int())
    refuse(ValueError, "not a multiple of the 3 heads", Q, Q[:, :, :3], Q[:, :, :3])
    refuse(ValueError, r"k has shape \[2, 5, 4, 4\]; it must be \[2, 5, 4, 8\]", Q, Q[..., :4], Q)
    refuse(ValueError, "on its last axis; it must be contiguous", torch.randn(2, 8, 4, 5).transpose(1, 3), Q, Q)


def test_foreign_dtypes():
    refuse(ValueError, "^q is int8; the library takes float32, float16", *[Q.to(torch.int8)] * 3)
    refuse(ValueError, "^k is int64; it must be float32", Q, Q.long(), Q)
    refuse(ValueError, "^q is complex64; ", *[Q.to(torch.complex64)] * 3)
    refuse(ValueError, "^q is float8_e4m3fn; ", *[Q.to(torch.float8_e4m3fn)] * 3)
    refuse(ValueError, "^bias is int8; ", attn_bias=torch.zeros(1, 1, 5, 5, dtype=torch.int8))
    with pytest.raises(TypeError, match="^q is int8; the library takes"):
        attention(Q.to(torch.int8).numpy(), Q.numpy(), Q.numpy())


def test_the_argument_order_of_flash_attn():
    """Its functions take dropout_p where these take something else."""
    refuse(TypeError, "attn_mask is the number 0.0; .*no dropout", Q, Q, Q, 0.0)
    refuse(TypeError, "attn_mask is the number 0.0", Q, Q, Q, 0.0, 0.125)
    refuse(TypeError, "softmax_scale is True, which is not a number; .*no dropout", Q, Q, Q, 0.0, 0.125, True)
    refuse(TypeError, "attn_bias is the number 0.1", attn_bias=0.1)
    with pytest.raises(TypeError, match="attn_mask is the number 0.0; .*no dropout"):
        attention(Q.numpy(), Q.numpy(), Q.numpy(), 0.0)
    packed = [Q.flatten(0, 1)] * 3 + [torch.tensor([0, 5, 10], dtype=torch.int32)] * 2 + [5, 5]
    for rest, sentence in (
        ((0.1, 0.125), "is_causal is 0.125, which is not a bool"),
        ((0.1, None, True), "softcap is True"),
        ((0.0,), "softmax_scale is 0.0 by position"),
        ((0.0, 0.125), "softmax_scale is 0.0 by position"),
        ((0, None, True), "softmax_scale is 0 by position"),
    ):
        with pytest.raises(TypeError, match=sentence + ".*no dropout"):
            flash_dmattn_varlen_func(*packed, *rest)


def test_windows():
    for window, same in (((None, None), (-1, -1)), ((None, 0), (-1, 0)), ([2, None], (2, -1))):
        assert torch.equal(flash_dmattn_func(Q, Q, Q, window_size=window), flash_dmattn_func(Q, Q, Q, window_size=same))
        array = Q.numpy()
        assert (attention(array, array, array, window_size=window) == attention(array, array, array, window_size=same)).all()
        pairs = (masks.window_intervals(5, 7, each, library="torch") for each in (window, same))
        assert all(torch.equal(a, b) for a, b in zip(*pairs))
    for window in (None, 3, (1, 2, 3)):
        refuse(ValueError, "window_size is .*; it must be a pair", window_size=window)
    refuse(TypeError, r"window_size\[0\] is 3.0; it must be an integer", window_size=(3.0, 0))


def test_intervals():
    pair = torch.zeros(1, 1, 5, dtype=torch.int32), torch.ones(1, 1, 5, dtype=torch.int32)
    refuse(TypeError, r"must be a pair \(start, end\)", key_intervals=pair[0])
    refuse(ValueError, "interval_end has 2 axes; it needs 3", key_intervals=(pair[0], pair[1][0]))
    refuse(ValueError, "must be int32", key_intervals=(pair[0].float(), pair[1]))
    refuse(ValueError, "key intervals have 3 heads", key_intervals=tuple(each.expand(1, 3, 5) for each in pair))


def test_operators_say_the_same():
    with pytest.raises(ValueError, match="softcap is -1"):
        torch.ops.flash_dmattn.forward(Q, Q, Q, *[None] * 10, 0, 0, None, False, -1.0, -1, -1, False, False, 0)


def test_varlen():
    q = Q[0]

    def refuse_varlen(kind, sentence, *arguments, **keywords):
        with pytest.raises(kind, match=sentence):
            flash_dmattn_varlen_func(q, q, q, *arguments, **keywords)

    refuse_varlen(NotImplementedError, "block_table", OFFSETS, OFFSETS, 3, 3, block_table=OFFSETS)
    refuse_varlen(
        ValueError, "return_attn_probs is for flash_dmattn_func", OFFSETS, OFFSETS, 3, 3, return_attn_probs=True
    )
    words = r"cu_seqlens_q is torch.int64, of shape \[3\]; it must be a torch.int32"
    refuse_varlen(TypeError, words, OFFSETS.long(), OFFSETS, 3, 3)
    refuse_varlen(
        ValueError, "cu_seqlens_k ends with 5; the packed tensors have 5|max_seqlen_q is 2", OFFSETS, OFFSETS, 2, 3
    )
    refuse_varlen(ValueError, "must not fall", OFFSETS, torch.tensor([0, 6, 5], dtype=torch.int32), 3, 6)
    with pytest.raises(ValueError, match="query has 4 axes; it needs 3"):
        flash_dmattn_varlen_func(Q, q, q, OFFSETS, OFFSETS, 3, 3)


def test_error_leaves_the_library_usable():
    refuse(ValueError, "softcap", softcap=-1.0)
    assert flash_dmattn_func(Q, Q, Q).shape == Q.shape


def test_public_names():
    for module in (flash_dmattn, masks):
        assert set(module.__all__) <= set(dir(module)) and all(getattr(module, name) is not None for name in module.__all__)
    assert {"masks", "attention_backward", "scaled_dot_product_attention"} <= set(flash_dmattn.__all__)
    assert "KeyIntervals" in masks.__all__
    assert "float32 (head dims to 256)" in flash_dmattn_func.__doc__


def test_backends():
    assert get_available_backends() == ["cpu"]
    assert flash_dmattn_func_auto() is flash_dmattn_func
    assert torch.equal(
        flash_dmattn_func_auto("cpu", is_causal=True)(Q, Q, Q), flash_dmattn_func(Q, Q, Q, is_causal=True)
    )
    with pytest.raises(ValueError, match=r"Unknown backend: triton. Available backends: \['cpu'\]"):
        flash_dmattn_func_auto("triton")
