"""test_ambiguous_calls.py: calls that a caller may have meant otherwise end with a sentence: byte order, shapes, types,
keywords of other libraries, numbers that want a gradient, kinds of tensors and transforms."""

import re

import numpy as np
import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn import (
    attention,
    attention_backward,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    gemm,
    masks,
    merge,
    scaled_dot_product_attention,
    softmax,
)

B, S, H = 3, 5, 4
Q = torch.randn(B, S, H, 8)
OFFSETS = torch.tensor([0, 3, 5], dtype=torch.int32)


def refuses(kind, sentence, function, *arguments, **keywords):
    """One sentence of ours: it names what it was given, and nothing of Python's own."""
    with pytest.raises(kind, match=sentence) as error:
        function(*arguments, **keywords)
    assert "\n" not in str(error.value)


# ---- byte order ------------------------------------------------------------------------------------------------------


def other(array):
    return array.astype(array.dtype.newbyteorder())


def test_arrays_in_the_other_byte_order_are_refused():
    q = Q.numpy()
    mask_bias = np.zeros((B, 1, 1, S), "float32")
    pair = np.zeros((1, 1, S), np.int32), np.full((1, 1, S), S, np.int32)
    out, lse = attention(q, q, q, mask_bias.astype(bool), mask_bias, key_intervals=pair, return_lse=True)
    sentence = r"^{} is [<>][fi]\d, whose bytes are in the other order .*astype\('{}'\)"
    for position, name in enumerate("qkv"):
        arrays = [q, q, q]
        arrays[position] = other(q)
        refuses(TypeError, sentence.format(name, "float32"), attention, *arrays)
        refuses(TypeError, sentence.format(name, "float32"), attention_backward, out, *arrays, out, lse)
    refuses(TypeError, sentence.format("attn_bias", "float32"), attention, q, q, q, attn_bias=other(mask_bias))
    refuses(
        TypeError,
        sentence.format("key_intervals end", "int32"),
        attention,
        q,
        q,
        q,
        key_intervals=(pair[0], other(pair[1])),
    )
    refuses(TypeError, sentence.format("out", "float32"), attention, q, q, q, out=other(np.zeros_like(q)))
    offsets = OFFSETS.numpy()
    refuses(
        TypeError,
        sentence.format("cu_seqlens_k", "int32"),
        attention,
        q[0],
        q[0],
        q[0],
        cu_seqlens_q=offsets,
        cu_seqlens_k=other(offsets),
    )
    for name, given in (("dout", [other(out), q, q, q, out, lse]), ("lse", [out, q, q, q, out, other(lse)])):
        refuses(TypeError, sentence.format(name, "float32"), attention_backward, *given)
    refuses(TypeError, sentence.format("dq", "float32"), attention_backward, out, q, q, q, out, lse, dq=other(q))
    refuses(TypeError, sentence.format("lse2", "float32"), merge, out, lse, out, other(lse))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_masks_refuse_the_other_byte_order(dtype):
    bias = np.random.default_rng(0).standard_normal((B, H, S)).astype(dtype)
    pair, words = masks.topk_intervals(bias, 2), "bytes are in the other order"
    refuses(TypeError, "^bias is .*" + words, masks.topk_intervals, other(bias), 2)
    refuses(TypeError, "^attention_bias is .*" + words, masks.create_mask, other(bias), None, B, 7, S, 2, -1e9)
    refuses(TypeError, "^dt is .*" + words, masks.key_bias, other(bias.transpose(0, 2, 1)), bias[0, :, 0])
    refuses(TypeError, "^a is .*" + words, masks.key_bias, bias.transpose(0, 2, 1), other(bias[0, :, 0]))
    refuses(TypeError, "^end is .*" + words, masks.intervals_to_mask, pair[0], other(pair[1]), S)
    refuses(TypeError, "^cu_seqlens is .*" + words, masks.document_intervals, other(OFFSETS.numpy()))
    refuses(TypeError, words, masks.TopKState.of_prompt, other(bias), 2)
    if dtype != "float64":  # which it does not take
        state = masks.TopKState.of_prompt(bias, 2)
        refuses(TypeError, words, state.append, other(bias[:, :, 0]))


# ---- shapes ----------------------------------------------------------------------------------------------------------


def wide(tensor, axes):
    return tensor[(slice(None), None, None) if axes == 2 else (slice(None), slice(None), None)]


def both(q, k, v, **options):
    """PyTorch's function and NumPy's."""
    yield lambda **more: flash_dmattn_func(q, k, v, **options, **more)
    arrays = {name: each.numpy() for name, each in options.items()}
    yield lambda **more: torch.from_numpy(attention(q.numpy(), k.numpy(), v.numpy(), **arrays, **more))


@pytest.mark.parametrize("heads, heads_kv, rows", [(4, 4, 4), (4, 2, 2), (4, 2, 4)])
def test_three_axes_that_may_count_rows(heads, heads_kv, rows):
    """[B, Sq, Sk] is read as [B, h, Sk] where Sq is H or Hkv: nobody guesses."""
    q, k = torch.randn(2, rows, heads, 8), torch.randn(2, 7, heads_kv, 8)
    for name, tensor in (("attn_mask", torch.rand(2, rows, 7) < 0.7), ("attn_bias", torch.randn(2, rows, 7))):
        sentence = rf"{name} has shape \[2, {rows}, 7\], .*{name}\[:, :, None\].*{name}\[:, None\]"
        for call in both(q, k, k, **{name: tensor}):
            refuses(ValueError, sentence, call)
        for four in (tensor[:, :, None], tensor[:, None]):
            option = {name[5:]: four}
            want = truth(q, k, k, **option)[0]
            for call in both(q, k, k, **{name: four}):
                assert_close(call(), want, torch.float32, name)
        packed = (q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1))
        offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (rows, 7)]
        for longest in ((rows, 7), (0, 0)):  # 0: found from the offsets
            refuses(ValueError, sentence, flash_dmattn_varlen_func, *packed, *offsets, *longest, **{name: tensor})
        out = flash_dmattn_varlen_func(*packed, *offsets, 0, 0, **{name: tensor[:, :, None]})
        want = truth(q, k, k, **{name[5:]: tensor[:, :, None]})[0].flatten(0, 1)
        assert_close(out, want, torch.float32, name)
    arrays = [each.numpy() for each in packed]
    options = {"attn_bias": tensor.numpy(), "cu_seqlens_q": offsets[0].numpy(), "cu_seqlens_k": offsets[1].numpy()}
    refuses(ValueError, sentence, attention, *arrays, **options, max_seqlen_q=rows, max_seqlen_k=7)
    refuses(ValueError, sentence, attention, *arrays, **options)


def test_three_axes_that_cannot_count_rows_are_taken():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    for heads in (1, 2, 4):
        bias = torch.randn(2, heads, 7)
        for call in both(q, k, k, attn_bias=bias):
            assert_close(call(), truth(q, k, k, bias=bias[:, :, None])[0], torch.float32, heads)
    # One row: there is nothing to mistake.
    bias = torch.randn(2, 1, 7)
    assert flash_dmattn_func(q[:, :1, :1], k[:, :, :1], k[:, :, :1], attn_bias=bias).shape == (2, 1, 1, 8)


def test_two_axes_that_may_count_rows():
    q = torch.randn(S, S, 2, 8)
    mask = torch.rand(S, S) < 0.7
    sentence = rf"attn_mask has shape \[{S}, {S}\], .*attn_mask\[:, None, None\].*attn_mask\[None, None\]"
    for call in both(q, q, q, attn_mask=mask):
        refuses(ValueError, sentence, call)
    for four in (mask[:, None, None], mask[None, None]):
        for call in both(q, q, q, attn_mask=four):
            assert_close(call(), truth(q, q, q, four)[0], torch.float32, "mask")
    # With other lengths, or one sequence, two axes are padding as ever.
    for given, padding in ((q[:, :3], mask), (q[:1], mask[:1])):
        k = q[: given.shape[0]]
        for call in both(given, k, k, attn_mask=padding):
            assert_close(call(), truth(given, k, k, padding[:, None, None])[0], torch.float32, "padding")


def test_sentences_show_the_shape_that_was_passed():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    for name, tensor in (("attn_mask", torch.ones(2, 3, 7, dtype=torch.bool)), ("attn_bias", torch.zeros(2, 3, 7))):
        for call in both(q, k, k, **{name: tensor}):
            refuses(ValueError, rf"{name} has shape \[2, 3, 7\]; with three axes it is .*{name}\[:, None\]", call)
    for call in both(q, k, k, attn_mask=torch.ones(5, 7, dtype=torch.bool)):
        refuses(ValueError, r"attn_mask has shape \[5, 7\]; .*attn_mask\[None, None\]", call)


def test_create_mask_refuses_shapes_of_two_readings():
    bias, shown = torch.randn(2, 6, 7), torch.ones(7, 7, dtype=torch.bool)
    refuses(
        ValueError,
        r"attention_bias has shape \[2, 6, 7\].*\[:, :, None\]",
        masks.create_mask,
        bias,
        None,
        2,
        6,
        7,
        3,
        -1e9,
    )
    refuses(
        ValueError,
        r"attention_mask has shape \[7, 7\].*\[None, None\]",
        masks.create_mask,
        bias[:1, :1].expand(7, 1, 7),
        shown,
        7,
        7,
        7,
        3,
        -1e9,
    )
    assert masks.create_mask(bias[:, :, None], None, 2, 6, 7, 3, -1e9).shape == (2, 6, 1, 7)


def test_a_square_bias_of_topk_has_one_reading():
    """It takes no axis of rows, so that a prompt may have as many tokens as there are heads."""
    bias = torch.randn(2, 4, 4)
    assert all(map(torch.equal, masks.topk_intervals(bias, 2), masks.topk_intervals(bias[:, :, None], 2)))


def test_a_call_that_looks_like_bhsd_hears_of_the_function_for_it():
    q, k = torch.randn(2, 8, 64, 16), torch.randn(2, 2, 96, 16)
    words = "scaled_dot_product_attention"
    for function, arrays in ((flash_dmattn_func, (q, k, k)), (attention, [each.numpy() for each in (q, k, k)])):
        refuses(ValueError, words, function, *arrays)
        right = (
            [each.transpose(1, 2) for each in (q, k, k)]
            if function is flash_dmattn_func
            else [each.swapaxes(1, 2) for each in arrays]
        )
        with pytest.raises(ValueError) as error:
            function(right[0], right[1][..., :8], right[2])
        assert words not in str(error.value)
    with pytest.raises(ValueError, match="mask has shape.*" + words):
        flash_dmattn_func(q, q, q, torch.ones(2, 1, 64, 64, dtype=torch.bool))


# ---- types -----------------------------------------------------------------------------------------------------------

FUNCTIONS = ((flash_dmattn_func, Q), (attention, Q.numpy()))
NOT_NUMBERS = ["0.5", b"1", [0.5], object(), 1j, np.zeros(3), torch.zeros(2), True]


@pytest.mark.parametrize("function, x", FUNCTIONS)
def test_types_of_options(function, x):
    for value in NOT_NUMBERS:
        for name in ("softmax_scale", "softcap"):
            refuses(TypeError, f"{name} is .*number", function, x, x, x, **{name: value})
    for name in ("is_causal", "deterministic", "return_lse"):
        for value in ("yes", 2, 1.0, [True], torch.tensor(True), np.ones(2, bool)):
            refuses(TypeError, f"{name} is .*(True or False|not a bool)", function, x, x, x, **{name: value})
    for window, kind in (
        ((2**70, 0), ValueError),
        ((0, -(2**70)), ValueError),
        ((1.5, 0), TypeError),
        (("1", 0), TypeError),
    ):
        refuses(kind, "window_size", function, x, x, x, window_size=window)
    refuses(ValueError, "softmax_scale is 1000.*must fit a float32", function, x, x, x, softmax_scale=10**400)
    for position, name in enumerate(("query", "key", "value") if function is flash_dmattn_func else "qkv"):
        for value in (None, "x", 3, [1.0]):
            tensors = [x, x, x]
            tensors[position] = value
            refuses(TypeError, f"^{name} is", function, *tensors)
    for name in ("attn_mask", "attn_bias", "key_intervals"):
        for value in ("x", [1], object()):
            refuses(TypeError, f"^{name} is", function, x, x, x, **{name: value})
    refuses(TypeError, "unexpected keyword argument 'is_casual'", function, x, x, x, is_casual=True)


@pytest.mark.parametrize("function, x", FUNCTIONS)
def test_kinds_of_bools_and_numbers_that_are_taken(function, x):
    want, plain = function(x, x, x, is_causal=True), function(x, x, x)
    for value in (1, np.bool_(True)):
        assert (function(x, x, x, is_causal=value) == want).all()
    for value in (0, None, np.bool_(False), False):
        assert (function(x, x, x, is_causal=value) == plain).all()
    want = function(x, x, x, softmax_scale=0.5, softcap=2.0)
    for value in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor([0.5])):
        assert (function(x, x, x, softmax_scale=value, softcap=2) == want).all()
        assert (function(x, x, x, scale=value, softcap=value * 4) == want).all()
    assert (
        function(x, x, x, window_size=(np.int64(2), torch.tensor(0))) == function(x, x, x, window_size=(2, 0))
    ).all()


def test_types_of_packed_calls():
    q = Q[0]
    for value in ("3", 3.0, None, [3]):
        refuses(
            TypeError, "max_seqlen_q is .*an integer", flash_dmattn_varlen_func, q, q, q, OFFSETS, OFFSETS, value, 3
        )
        refuses(
            TypeError,
            "max_seqlen_k is .*an integer",
            attention,
            *[q.numpy()] * 3,
            cu_seqlens_q=OFFSETS.numpy(),
            cu_seqlens_k=OFFSETS.numpy(),
            max_seqlen_k=value,
        )
    refuses(ValueError, "max_seqlen_k is .*64 bits", flash_dmattn_varlen_func, q, q, q, OFFSETS, OFFSETS, 3, 2**70)
    refuses(TypeError, "cu_seqlens_k is None", flash_dmattn_varlen_func, q, q, q, OFFSETS, None, 3, 3)
    want = flash_dmattn_varlen_func(q, q, q, OFFSETS, OFFSETS, 3, 3)
    assert torch.equal(flash_dmattn_varlen_func(q, q, q, OFFSETS, OFFSETS, torch.tensor(3), np.int32(3)), want)


def test_types_of_masks():
    for bias in (torch.randn(2, 4, 7), np.zeros((2, 4, 7), "float32")):
        for value in ("3", 3.5, None, [3]):
            refuses(TypeError, "window_size is .*an integer", masks.topk_intervals, bias, value)
            refuses(TypeError, "window_size is .*an integer", masks.create_mask, bias, None, 2, 5, 7, value, -1e9)
            refuses(TypeError, "window_size is .*an integer", masks.TopKState.of_prompt, bias, value)
        refuses(ValueError, "window_size is .*64 bits", masks.topk_intervals, bias, 2**70)
        refuses(TypeError, "seqlen_q is 2.5; it must be an integer", masks.topk_intervals, bias, 3, 2.5)
        refuses(TypeError, "min_dtype is '0'; it must be a number", masks.create_mask, bias, None, 2, 5, 7, 3, "0")
        refuses(TypeError, "attention_mask is", masks.create_mask, bias, "mask", 2, 5, 7, 3, -1e9)
        refuses(TypeError, "exponential is 'no'", masks.key_bias, bias, bias[0, 0], "no")
        refuses(TypeError, "^a is None", masks.key_bias, bias, None)
    refuses(TypeError, "seqlen_k is '5'; it must be an integer", masks.causal_intervals, 5, "5")
    refuses(TypeError, "prefix is 1.5", masks.prefix_intervals, 5, 5, 1.5)
    refuses(TypeError, "causal is 'yes'", masks.window_intervals, 5, 5, causal="yes")
    refuses(TypeError, "cu_seqlens is a list", masks.document_intervals, [0, 5])
    refuses(TypeError, "block_q is 1.5", masks.mask_blocks, torch.ones(5, 5, dtype=torch.bool), 1.5)


# ---- keywords of other libraries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("function, x", FUNCTIONS)
def test_keywords_of_flash_attn(function, x):
    plain = function(x, x, x)
    neutral = {"dropout_p": 0.0, "alibi_slopes": None, "return_softmax": False, "num_splits": 0, "enable_gqa": False}
    assert (function(x, x, x, **neutral) == plain).all()
    for name, value in (
        ("causal", True),
        ("causal", False),
        ("dropout_p", 0.1),
        ("alibi_slopes", [0.5]),
        ("return_softmax", True),
        ("return_softmax_lse", True),
        ("enable_gqa", True),
        ("num_splits", 2),
    ):
        refuses(TypeError, f"^{name} is .*no {name}.*these have no dropout", function, x, x, x, **{name: value})


def test_keywords_of_flash_attn_in_packed_calls():
    packed = [Q[0]] * 3 + [OFFSETS, OFFSETS, 3, 3]
    plain = flash_dmattn_varlen_func(*packed)
    assert torch.equal(flash_dmattn_varlen_func(*packed, dropout_p=0.0, alibi_slopes=None), plain)
    for options in ({"causal": True}, {"dropout_p": 0.1}, {"alibi_slopes": torch.zeros(4)}):
        refuses(TypeError, "these have no dropout", flash_dmattn_varlen_func, *packed, **options)
    for position in (0.0, 0):
        refuses(
            TypeError, "softmax_scale is 0.* by position; .*no dropout", flash_dmattn_varlen_func, *packed, position
        )
    # A scale of 0 by its name is legal, and so is another one by position.
    mean = flash_dmattn_varlen_func(*packed, softmax_scale=0.0)
    assert_close(mean[0], Q[0, :3].mean(0), torch.float32, "mean")
    assert torch.equal(flash_dmattn_varlen_func(*packed, 0.3), flash_dmattn_varlen_func(*packed, softmax_scale=0.3))
    assert torch.equal(
        attention(
            *packed[:3], cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, max_seqlen_q=3, max_seqlen_k=3, softmax_scale=0.0
        ),
        mean,
    )


# ---- numbers that want a gradient ------------------------------------------------------------------------------------


def test_a_learned_scale_is_refused():
    learned = torch.nn.Parameter(torch.tensor(0.3))
    for name in ("softmax_scale", "scale", "softcap"):
        shown = "softmax_scale" if name == "scale" else name
        sentence = f"{shown} is a tensor that requires a gradient.*{shown}.detach"
        refuses(TypeError, sentence, flash_dmattn_func, Q, Q, Q, **{name: learned})
        refuses(TypeError, sentence, attention, *[Q.numpy()] * 3, **{name: learned})
        refuses(TypeError, sentence, flash_dmattn_varlen_func, *[Q[0]] * 3, OFFSETS, OFFSETS, 3, 3, **{name: learned})
        want = flash_dmattn_func(Q, Q, Q, **{name: learned.item()})
        assert torch.equal(flash_dmattn_func(Q, Q, Q, **{name: learned.detach()}), want)
        with torch.no_grad():
            assert torch.equal(flash_dmattn_func(Q, Q, Q, **{name: learned}), want)
    refuses(TypeError, "requires a gradient", scaled_dot_product_attention, Q, Q, Q, scale=learned)
    refuses(TypeError, "alpha is a tensor that requires a gradient", gemm, Q[0, 0], Q[0, 0].T, alpha=learned)
    refuses(TypeError, "scale is a tensor that requires a gradient", softmax, Q, scale=learned)
    with pytest.raises(TypeError, match="requires a gradient"):
        torch.func.grad(lambda scale: flash_dmattn_func(Q, Q, Q, softmax_scale=scale).sum())(torch.tensor(0.3))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.tensor(0.3), torch.tensor(1.0))
        refuses(TypeError, "softmax_scale is a tensor with a tangent", flash_dmattn_func, Q, Q, Q, softmax_scale=dual)


# ---- kinds of tensors, transforms ------------------------------------------------------------------------------------


def test_sparse_and_quantized_tensors():
    for tensor in (Q.to_sparse(), Q.to_mkldnn(), torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)):
        words = "quantized" if tensor.is_quantized else re.escape(str(tensor.layout))
        refuses(TypeError, f"query is .*{words}.*; it must be dense", flash_dmattn_func, tensor, Q, Q)
        refuses(TypeError, f"value is .*{words}", flash_dmattn_func, Q, Q, tensor)
        refuses(TypeError, f"attn_bias is .*{words}", flash_dmattn_func, Q, Q, Q, attn_bias=tensor)
        refuses(TypeError, f"query is .*{words}", scaled_dot_product_attention, tensor, Q, Q)
        refuses(TypeError, f"k is .*{words}", attention, Q.numpy(), tensor, Q.numpy())
        refuses(TypeError, f"out1 is .*{words}", merge, tensor, Q, Q, Q)
        refuses(TypeError, f"bias is .*{words}", masks.topk_intervals, tensor, 3)
    sparse = torch.ones(B, S, dtype=torch.bool).to_sparse()
    refuses(TypeError, "attn_mask is .*sparse", flash_dmattn_func, Q, Q, Q, sparse)
    refuses(
        TypeError,
        "key_intervals start is .*sparse",
        flash_dmattn_func,
        Q,
        Q,
        Q,
        key_intervals=(torch.zeros(1, 1, S, dtype=torch.int32).to_sparse(), torch.zeros(1, 1, S, dtype=torch.int32)),
    )


def transforms():
    one, lse = torch.ones(H), torch.zeros(B, H, S)
    return {
        "dense": lambda q: flash_dmattn_func(q, q, q),
        "probabilities": lambda q: flash_dmattn_func(q, q, q, return_attn_probs=True)[0],
        "packed": lambda q: flash_dmattn_varlen_func(q[0], q[0], q[0], OFFSETS, OFFSETS, 3, 3),
        "arrays": lambda q: attention(q, q, q),
        "sdpa": lambda q: scaled_dot_product_attention(q, q, q),
        "merge": lambda q: merge(q, lse, q, lse)[0],
        "key_bias": lambda q: masks.key_bias(q[..., 0], one),
    }


@pytest.mark.parametrize("name", list(transforms()))
def test_transforms_are_refused(name):
    function = transforms()[name]
    refuses(RuntimeError, "cannot run under vmap", torch.func.vmap(function), Q[None].expand(2, -1, -1, -1, -1))
    for transform in (torch.func.grad(lambda q: function(q).sum()), torch.func.jacrev(function)):
        refuses(RuntimeError, "torch.func transforms", transform, Q)
    refuses(RuntimeError, "no forward-mode derivative", torch.func.jvp, function, (Q,), (Q,))
    with torch.autograd.forward_ad.dual_level():
        refuses(RuntimeError, "no forward-mode derivative", function, torch.autograd.forward_ad.make_dual(Q, Q))


def test_the_bias_of_a_dynamic_mask_has_no_second_derivative():
    dt, a = Q[..., 0].clone().requires_grad_(), torch.ones(H, requires_grad=True)
    (first,) = torch.autograd.grad(masks.key_bias(dt, a).square().sum(), dt, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()
