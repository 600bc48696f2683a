"""test_compat.py: flash-attn's names: parameters, values against the float64 truth, gradients, refusals, compilation."""

import functools
import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn import flash_dmattn_func
from flash_dmattn.compat import _calls, _kv_cache, flash_attn, flash_attn_cute, flash_attn_interface
from flash_dmattn.compat.flash_attn import functions as fa2
from flash_dmattn.compat.varlen import varlen_attn
from torch._subclasses.fake_tensor import FakeTensorMode

# ---- parameters: flash-attn 2.8.4, its version 3 and 4, as their sources have them ------------------------------------

TAIL = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
SCALES = "q_descale=None k_descale=None v_descale=None"
TAIL3 = (
    f"softmax_scale=None causal=False qv=None {SCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 "
    "pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
)
PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
RAW = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
GRADS = "dout q k v out softmax_lse dq dk dv"
PARAMETERS = {
    (fa2, "flash_attn_func"): f"q k v {TAIL}",
    (fa2, "flash_attn_qkvpacked_func"): f"qkv {TAIL}",
    (fa2, "flash_attn_kvpacked_func"): f"q kv {TAIL}",
    (fa2, "flash_attn_varlen_func"): f"q k v {PACKED} {TAIL} block_table=None",
    (fa2, "flash_attn_varlen_qkvpacked_func"): f"qkv cu_seqlens max_seqlen {TAIL}",
    (fa2, "flash_attn_varlen_kvpacked_func"): f"q kv {PACKED} {TAIL}",
    (fa2, "flash_attn_with_kvcache"): (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
        "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    ),
    (fa2, "_flash_attn_forward"): f"q k v {RAW} return_softmax",
    (fa2, "_flash_attn_varlen_forward"): (
        f"q k v {PACKED} dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 "
        "alibi_slopes=None return_softmax=False block_table=None leftpad_k=None seqused_k=None zero_tensors=False "
        "num_splits=0"
    ),
    (fa2, "_flash_attn_backward"): f"{GRADS} {RAW} deterministic rng_state=None",
    (fa2, "_flash_attn_varlen_backward"): f"{GRADS} {PACKED} {RAW} deterministic rng_state=None zero_tensors=False",
    (flash_attn_interface, "flash_attn_func"): f"q k v {TAIL3}",
    (flash_attn_interface, "flash_attn_varlen_func"): f"q k v {PACKED} seqused_q=None seqused_k=None {TAIL3}",
    (flash_attn_interface, "flash_attn_qkvpacked_func"): (
        f"qkv softmax_scale=None causal=False {SCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
        "deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False"
    ),
    (flash_attn_interface, "flash_attn_combine"): "out_partial lse_partial out=None out_dtype=None",
    (flash_attn_interface, "flash_attn_with_kvcache"): (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
        f"max_seqlen_q=None rotary_seqlens=None {SCALES} softmax_scale=None causal=False window_size=(-1,-1) "
        "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None "
        "sm_margin=0 return_softmax_lse=False"
    ),
    (flash_attn_interface, "get_scheduler_metadata"): (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype=torch.bfloat16 "
        "headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0 "
        "causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"
    ),
    (flash_attn_interface, "_flash_attn_backward"): (
        "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None sequed_k=None max_seqlen_q=None "
        "max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None is_causal=False window_size_left=-1 "
        "window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0"
    ),
    (flash_attn_interface, "_flash_attn_forward"): (
        "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None cu_seqlens_k_new=None "
        "seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None kv_batch_idx=None "
        f"leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None {SCALES} softmax_scale=None causal=False "
        "window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 rotary_interleaved=True "
        "scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0"
    ),
    (flash_attn_cute, "flash_attn_func"): (
        "q k v qv=None gather_kv_indices=None softmax_scale=None causal=False window_size=(None,None) "
        "learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False score_mod=None "
        "score_mod_bwd=None mask_mod=None aux_tensors=None aux_scalars=None block_sparse_tensors=None "
        "block_sparse_tensors_bwd=None return_lse=False"
    ),
    (flash_attn_cute, "flash_attn_varlen_func"): (
        "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None min_seqlen_k=None "
        "seqused_q=None seqused_k=None gather_kv_indices=None page_table=None softmax_scale=None causal=False "
        "window_size=(None,None) learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False "
        "score_mod=None score_mod_bwd=None mask_mod=None block_sparse_tensors=None aux_tensors=None aux_scalars=None "
        "return_lse=False scheduler_metadata=None seqlen_k_per_split=None disable_scheduler_metadata=False"
    ),
    (flash_attn_cute, "flash_attn_combine"): (
        "out_partial lse_partial out=None out_dtype=None cu_seqlens=None seqused=None virtual_batch_idx=None "
        "return_lse=True"
    ),
}


def parameters_of(function):
    """Names and defaults in order; parameters by keyword alone are ours."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            default = parameter.default
            yield name if default is parameter.empty else f"{name}={str(default).replace(' ', '')}"


@pytest.mark.parametrize(("module", "name"), PARAMETERS, ids=lambda each: each if isinstance(each, str) else "")
def test_parameters(module, name):
    assert " ".join(parameters_of(getattr(module, name))) == PARAMETERS[module, name]


def test_names_that_others_import():
    for kind in ("forward", "varlen_forward", "backward", "varlen_backward"):
        assert getattr(fa2, f"_wrapped_flash_attn_{kind}") is getattr(fa2, f"_flash_attn_{kind}")
        assert inspect.isfunction(getattr(fa2, f"_flash_attn_{kind}"))  # ring attention reads its signature
    assert not hasattr(fa2, "flash_attn_cuda") and fa2.USE_TRITON_ROCM is False
    assert {"fwd", "varlen_fwd", "bwd", "varlen_bwd"} <= set(vars(fa2.flash_attn_gpu))
    assert flash_attn.__version__ == "2.8.3" and flash_attn.__provider__ == "flash_dmattn"
    assert fa2.round_multiple(129, 128) == 256 and fa2._get_block_size_n("cpu", 64, False, True) == 128


# ---- values ----------------------------------------------------------------------------------------------------------


def tensors(batch=2, rows=17, keys=23, heads=4, heads_kv=2, dim=16, dim_v=None, dtype=torch.float32, grad=False):
    torch.manual_seed(7)
    shapes = (batch, rows, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim_v or dim)
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def check(call, reference, given, dtype=torch.float32, lse=True, empty=torch.inf):
    """out, lse and gradients of `call` against `reference`: both take (q, k, v) and give (out, lse)."""
    wide = [each.detach().double().requires_grad_() for each in given]
    given = [each.detach().requires_grad_() for each in given]
    out, have_lse = call(*given)
    want, want_lse = reference(*wide)
    assert_close(out, want, dtype, "out")
    if lse:
        seen = want_lse.isfinite()
        assert_close(have_lse[seen], want_lse[seen], torch.float32, "lse")
        assert (have_lse[~seen] == empty).all()
    weights = torch.randn_like(want)
    (out.double() * weights).sum().backward()
    (want * weights).sum().backward()
    for name, have, each in zip(("dq", "dk", "dv"), given, wide):
        assert_close(have.grad, each.grad, dtype, name)


@pytest.mark.parametrize("window", [(-1, -1), (5, -1), (-1, 3), (4, 2), (0, 0), (-7, -2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(17, 23), (23, 17)])
def test_dense(rows, keys, causal, window):
    def call(q, k, v):
        out, lse, nothing = flash_attn.flash_attn_func(
            q, k, v, 0.0, 0.3, causal, window, 5.0, None, False, return_attn_probs=True
        )
        assert nothing.shape == (0,) and nothing.dtype is q.dtype
        return out, lse

    bounds = tuple(max(each, -1) for each in window)
    check(
        call,
        lambda *each: truth(*each, scale=0.3, causal=causal, window=bounds, softcap=5.0)[:2],
        tensors(rows=rows, keys=keys),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    q, k, v = tensors(dtype=dtype)
    assert_close(flash_attn.flash_attn_func(q, k, v, causal=True), truth(q, k, v, causal=True)[0], dtype, "out")


def test_positional_order_is_flash_attns():
    q, k, v = tensors()
    slopes = torch.rand(4)
    by_name = flash_attn.flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=0.4, causal=True, window_size=(6, 0), softcap=7.0, alibi_slopes=slopes
    )
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, 0.0, 0.4, True, (6, 0), 7.0, slopes), by_name)
    window = torch.tensor([6, 0])
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, 0.0, 0.4, True, window, 7.0, slopes), by_name)


def test_a_last_axis_that_is_not_contiguous():
    """flash-attn copies it; autograd's gradient has the tensor's shape."""
    q, k, v = (each.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for each in tensors())
    assert q.stride(-1) != 1
    out = flash_attn.flash_attn_func(q, k, v)
    assert_close(out, truth(q, k, v)[0], torch.float32, "out")
    out.sum().backward()
    assert k.grad.shape == k.shape


def test_own_keywords():
    q, k, v = tensors()
    mask, sink, used = torch.rand(2, 1, 17, 23) > 0.3, torch.randn(4), torch.tensor([23, 9], dtype=torch.int32)
    out = flash_attn.flash_attn_func(q, k, v, attn_mask=mask, s_aux=sink)
    assert torch.equal(out, flash_dmattn_func(q, k, v, attn_mask=mask, sink=sink))
    counted = flash_attn.flash_attn_func(q, k, v, causal=True, seqused_k=used)
    for batch, keys in enumerate(used):
        short = flash_dmattn_func(q[batch : batch + 1], k[batch : batch + 1, :keys], v[batch : batch + 1, :keys],
                                  is_causal=True)  # fmt: skip
        assert_close(counted[batch], short[0], torch.float32, "out")


# ---- packed forms ----------------------------------------------------------------------------------------------------

LENGTHS = ((5, 9), (0, 4), (7, 7), (8, 3), (6, 0))


def packing(lengths=LENGTHS, tail=0):
    rows, keys = (torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in zip(*lengths))
    return rows, keys, max(each[0] for each in lengths), max(each[1] for each in lengths), tail


def packed_tensors(offsets, tail=0, dtype=torch.float32):
    torch.manual_seed(11)
    total_q, total_k = int(offsets[0][-1]) + tail, int(offsets[1][-1]) + tail
    return torch.randn(total_q, 4, 16), torch.randn(total_k, 2, 16), torch.randn(total_k, 2, 16)


def by_sequence(offsets, reference):
    """A reference for dense tensors as one for packed ones, (out, lse)."""

    def whole(q, k, v):
        out = q.new_zeros(q.shape[0], 4, v.shape[-1])
        lse = q.new_full((4, q.shape[0]), torch.inf)
        for b, (row, key) in enumerate(zip(offsets[0][:-1], offsets[1][:-1])):
            rows, keys = slice(row, offsets[0][b + 1]), slice(key, offsets[1][b + 1])
            if rows.stop > rows.start and keys.stop > keys.start:
                each = reference(q[None, rows], k[None, keys], v[None, keys], b)
                out[rows], lse[:, rows] = each[0][0], each[1][0]
        return out, lse

    return whole


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal, tail):
    rows, keys, most_q, most_k, _ = packing()
    most_q, most_k = torch.tensor(most_q), torch.tensor(most_k)  # transformers passes tensors

    def call(q, k, v):
        results = flash_attn.flash_attn_varlen_func(
            q, k, v, rows, keys, most_q, most_k, 0.0, None, causal, (4, -1), return_attn_probs=True
        )
        return results[:2]

    reference = by_sequence((rows, keys), lambda q, k, v, b: truth(q, k, v, causal=causal, window=(4, -1)))
    check(call, reference, packed_tensors((rows, keys), tail))


def test_stacked_forms():
    torch.manual_seed(1)
    qkv = torch.randn(2, 9, 3, 4, 8, requires_grad=True)
    q, k, v = qkv.unbind(2)
    want = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), want)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), want)
    offsets = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = qkv.flatten(0, 1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(flat, offsets, 9, causal=True)
    assert_close(packed, want.flatten(0, 1), torch.float32, "packed")
    other = flash_attn.flash_attn_varlen_kvpacked_func(
        flat[:, 0], flat[:, 1:], offsets, offsets, 9, 9, causal=True, return_attn_probs=True
    )
    assert torch.equal(other[0], packed) and other[1].shape == (4, 18)
    want.sum().backward()
    assert qkv.grad.shape == qkv.shape
    grouped = torch.randn(2, 9, 8, 8)
    q, k, v = grouped[:, :, :4], grouped[:, :, 4:6], grouped[:, :, 6:]
    assert torch.equal(
        flash_attn_interface.flash_attn_qkvpacked_func(grouped, num_heads_q=4),
        flash_attn_interface.flash_attn_func(q, k, v),
    )
    with pytest.raises(RuntimeError, match="num_heads_q is None"):
        flash_attn_interface.flash_attn_qkvpacked_func(grouped)


# ---- ALiBi -----------------------------------------------------------------------------------------------------------


def alibi(slopes, rows, keys):
    """[B|1, H, Sq, Sk], dense."""
    distance = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)).abs()
    return -slopes.double().reshape(-1, slopes.shape[-1], 1, 1) * distance


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (6, -1), (-1, 0), (3, 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(17, 23), (23, 17), (1, 23)])
def test_alibi(rows, keys, causal, window, of_batch):
    slopes = torch.rand(2, 4) if of_batch else torch.rand(4)

    def call(q, k, v):
        return flash_attn.flash_attn_func(
            q, k, v, causal=causal, window_size=window, alibi_slopes=slopes, return_attn_probs=True
        )[:2]

    bias = alibi(slopes, rows, keys)
    check(call, lambda *each: truth(*each, bias=bias, causal=causal, window=window)[:2], tensors(rows=rows, keys=keys))


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 2)])
def test_alibi_of_packed_sequences(causal, window, of_batch):
    rows, keys, *most, _ = packing()
    slopes = torch.rand(len(LENGTHS), 4) if of_batch else torch.rand(4)

    def call(q, k, v):
        return flash_attn.flash_attn_varlen_func(
            q, k, v, rows, keys, *most, causal=causal, window_size=window, alibi_slopes=slopes, return_attn_probs=True
        )[:2]

    def reference(q, k, v, b):
        bias = alibi(slopes[b] if of_batch else slopes, q.shape[1], k.shape[1])
        return truth(q, k, v, bias=bias, causal=causal, window=window)

    check(call, by_sequence((rows, keys), reference), packed_tensors((rows, keys), tail=2))


def test_alibi_beside_other_rules():
    q, k, v = tensors()
    slopes, used = torch.rand(4), torch.tensor([23, 12], dtype=torch.int32)
    mask = torch.rand(2, 1, 1, 23) > 0.3
    for causal in (False, True):
        have = flash_attn.flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes, seqused_k=used)
        for b, n in enumerate(used):
            want = truth(q[b, None], k[b, None, :n], v[b, None, :n], bias=alibi(slopes, 17, int(n)), causal=causal)[0]
            assert_close(have[b, None], want, torch.float32, "out")
    have = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, attn_mask=mask)
    assert_close(have, truth(q, k, v, bias=alibi(slopes, 17, 23), mask=mask, causal=True)[0], torch.float32, "out")
    with pytest.raises(RuntimeError, match="attn_mask is given beside alibi_slopes without causal"):
        flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, attn_mask=mask)
    with pytest.raises(ValueError, match="both given"):
        flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, attn_bias=torch.zeros(1, 1, 1, 23))
    with pytest.raises(RuntimeError, match=r"alibi_slopes has shape \[3\]; it must be \[4\] or \[2, 4\]"):
        flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.rand(3))


def test_alibi_stores_no_square():
    """The bias of a call that is not causal is a view of Sq + Sk numbers a head."""
    from flash_dmattn.compat import _rules

    q, k, _ = tensors(batch=1, rows=300, keys=500)
    lengths = _rules.lengths_of(q, k, None, (None, None))
    bias = _rules.diagonal_bias(torch.rand(1, 4), lengths, 300, 500)
    assert bias.shape == (1, 4, 300, 500) and bias.untyped_storage().nbytes() == 4 * 4 * 799


# ---- version 3 and 4 -------------------------------------------------------------------------------------------------


def test_lse_conventions_of_empty_rows():
    """Version 2: +inf; 3 and 4: -inf, and 3 +inf where k has no rows."""
    q, k, v = tensors(rows=23, keys=17)
    two = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1]
    three = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1]
    four = flash_attn_cute.flash_attn_func(q, k, v, causal=True, return_lse=True)[1]
    assert (two[:, :, :6] == torch.inf).all() and two[:, :, 6:].isfinite().all()
    for other in (three, four):
        assert (other[:, :, :6] == -torch.inf).all() and torch.equal(other[:, :, 6:], two[:, :, 6:])
    none = flash_attn_interface.flash_attn_func(q, k[:, :0], v[:, :0], return_attn_probs=True)[1]
    assert (none == torch.inf).all()
    none = flash_attn_cute.flash_attn_func(q, k[:, :0], v[:, :0], return_lse=True)[1]
    assert (none == -torch.inf).all()


def test_returns_of_version_3_and_4():
    q, k, v = tensors()
    out = flash_attn_interface.flash_attn_func(q, k, v)
    assert torch.equal(out, flash_attn_interface.flash_attn_func(q, k, v, return_attn_probs=True)[0])
    assert torch.equal(out, flash_attn_cute.flash_attn_func(q, k, v)[0])
    assert flash_attn_cute.flash_attn_func(q, k, v)[1] is None
    metadata = flash_attn_interface.get_scheduler_metadata(2, 1, 9, 4, 2, 16, torch.ones(2, dtype=torch.int32))
    assert metadata.shape == (0,) and metadata.dtype is torch.int32


def chunked(rows, keys, chunk, rows_used=None, keys_used=None, causal=False):
    """Which pairs flash-attn 3's chunks and lengths leave visible, [Sq, Sk]."""
    rows_used, keys_used = rows if rows_used is None else rows_used, keys if keys_used is None else keys_used
    position = torch.arange(rows)[:, None] + keys_used - rows_used
    key = torch.arange(keys)
    seen = (key < keys_used) & (torch.arange(rows)[:, None] < rows_used)
    if chunk:
        seen = seen & (position.div(chunk, rounding_mode="floor") == key // chunk)
    return seen & (key <= position) if causal else seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(17, 23), (23, 17)])
def test_attention_chunk(rows, keys, causal):
    seen = chunked(rows, keys, 5, causal=causal)[None, None]

    def call(q, k, v):
        return flash_attn_interface.flash_attn_func(q, k, v, None, causal, attention_chunk=5, return_attn_probs=True)

    check(call, lambda *each: truth(*each, mask=seen)[:2], tensors(rows=rows, keys=keys), empty=-torch.inf)


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_used_lengths(causal, chunk):
    """Keys and rows past them may hold anything; alignment is by the used lengths."""
    rows, keys, *most, _ = packing(((9, 12), (6, 11), (7, 5), (3, 8)))
    used_q, used_k = (torch.tensor(each, dtype=torch.int32) for each in ((9, 4, 7, 0), (7, 11, 0, 5)))

    def call(q, k, v):
        return flash_attn_interface.flash_attn_varlen_func(
            q, k, v, rows, keys, *most, used_q, used_k, causal=causal, attention_chunk=chunk, return_attn_probs=True
        )

    def reference(q, k, v, b):
        seen = chunked(q.shape[1], k.shape[1], chunk, int(used_q[b]), int(used_k[b]), causal)
        return truth(q, k, v, mask=seen[None, None])

    given = packed_tensors((rows, keys))
    check(call, by_sequence((rows, keys), reference), given, empty=-torch.inf)
    clean = call(*given)[0]
    given[1][7:12], given[2][7:12] = torch.nan, torch.nan  # past the first sequence's 7 keys
    assert torch.equal(call(*given)[0], clean)


def test_extra_queries():
    """qv: scores of q k + qv v, scaled by the width of both."""
    q, k, v = tensors(dim=8, dim_v=12)
    qv = torch.randn(2, 17, 4, 12)
    wide = [torch.cat(pair, -1) for pair in ((q, qv), (k, v))]
    want, want_lse, _ = truth(wide[0], wide[1], v, causal=True)
    out, lse = flash_attn_interface.flash_attn_func(q, k, v, causal=True, qv=qv, return_attn_probs=True)
    assert_close(out, want, torch.float32, "out")
    assert_close(lse, want_lse, torch.float32, "lse")
    out, lse = flash_attn_cute.flash_attn_func(q, k, v, qv, causal=True, return_lse=True)
    assert_close(out, want, torch.float32, "out")
    assert_close(lse.transpose(1, 2), want_lse, torch.float32, "lse")
    alone, _ = flash_attn_cute.flash_attn_func(None, None, v, qv)
    assert_close(alone, truth(qv, v, v)[0], torch.float32, "qv alone")
    offsets = torch.tensor([0, 23, 46], dtype=torch.int32)
    packed, lse = flash_attn_cute.flash_attn_varlen_func(
        None, None, v.flatten(0, 1), qv, cu_seqlens_k=offsets, max_seqlen_k=23, return_lse=True
    )
    assert_close(packed, alone, torch.float32, "packed values")
    assert lse.shape == (2, 17, 4)
    with pytest.raises(ValueError, match="q and qv are both None"):
        flash_attn_cute.flash_attn_varlen_func(None, None, v.flatten(0, 1), cu_seqlens_k=offsets)


@pytest.mark.parametrize("window", [(-3, None), (None, -2), (6, -1), (-2, 8)])
def test_negative_bounds_of_version_4(window):
    """None is unbounded there; a negative number is a bound."""
    rows, keys = 17, 23
    place = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if window[0] is not None:
        seen &= place >= -window[0]
    if window[1] is not None:
        seen &= place <= window[1]

    def call(q, k, v):
        return flash_attn_cute.flash_attn_func(q, k, v, window_size=window, return_lse=True)

    check(call, lambda *each: truth(*each, mask=seen[None, None])[:2], tensors(), empty=-torch.inf)


def test_sinks_of_version_4():
    q, k, v = tensors(rows=23, keys=17, grad=True)
    sink = torch.randn(4, requires_grad=True)
    out, lse = flash_attn_cute.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    want, want_lse = flash_dmattn_func(q, k, v, is_causal=True, sink=sink, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch.equal(lse[:, :, :6], sink[None, :, None].expand(2, 4, 6))
    (out.sum() + lse.sum()).backward()
    assert sink.grad is not None and sink.grad.abs().sum() > 0
    used = torch.tensor([23, 10], dtype=torch.int32)
    out, lse = flash_attn_cute.flash_attn_varlen_func(q, k, v, seqused_q=used, learnable_sink=sink, return_lse=True)
    assert (out[1, 10:] == 0).all() and (lse[1, :, 10:] == torch.inf).all() and lse[1, :, :10].isfinite().all()


@pytest.mark.parametrize("packed", ["q", "k", "none", "both"])
def test_which_side_version_4_packs(packed):
    q, k, v = tensors()
    used_q, used_k = (torch.tensor(each, dtype=torch.int32) for each in ((17, 6), (9, 23)))
    want, want_lse = flash_attn_cute.flash_attn_varlen_func(
        q, k, v, seqused_q=used_q, seqused_k=used_k, causal=True, return_lse=True
    )
    for b in range(2):
        rows, keys = int(used_q[b]), int(used_k[b])
        each = truth(q[b, None, :rows], k[b, None, :keys], v[b, None, :keys], causal=True)[0]
        assert_close(want[b, None, :rows], each, torch.float32, "out")
        assert (want[b, rows:] == 0).all()
    offsets = {name: torch.tensor([0, n, 2 * n], dtype=torch.int32) for name, n in (("q", 17), ("k", 23))}
    given = dict(seqused_q=used_q, seqused_k=used_k, causal=True, return_lse=True)
    if packed in ("q", "both"):
        q, given["cu_seqlens_q"], given["max_seqlen_q"] = q.flatten(0, 1), offsets["q"], 17
    if packed in ("k", "both"):
        k, v, given["cu_seqlens_k"] = k.flatten(0, 1), v.flatten(0, 1), offsets["k"]
    out, lse = flash_attn_cute.flash_attn_varlen_func(q, k, v, **given)
    assert out.shape[:-1] == q.shape[:-1]
    assert_close(out.reshape(want.shape), want, torch.float32, "out")
    lse = lse.unflatten(1, (2, 17)).transpose(0, 1) if packed in ("q", "both") else lse
    seen = want_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert_close(lse[seen], want_lse[seen], torch.float32, "lse")


@pytest.mark.parametrize("combine", [flash_attn_interface.flash_attn_combine, flash_attn_cute.flash_attn_combine])
def test_combine(combine):
    """Of parts of the keys; parts without keys may hold anything, and lse -inf or +inf."""
    q, k, v = tensors()
    want, want_lse, _ = truth(q, k, v)
    parts = [flash_dmattn_func(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 9), slice(9, 23))]
    outs = torch.stack([*(out for out, _ in parts), torch.full_like(parts[0][0], torch.nan)])
    for empty in (torch.inf, -torch.inf):
        lses = torch.stack([*(lse.transpose(1, 2) for _, lse in parts), torch.full((2, 17, 4), empty)])
        out, lse = combine(outs, lses, out_dtype=torch.bfloat16)
        assert out.dtype is torch.bfloat16
        assert_close(out, want, torch.bfloat16, "out")
        assert_close(lse.transpose(1, 2), want_lse, torch.float32, "lse")
        written = torch.empty(2, 17, 4, 16)
        assert combine(outs, lses, written)[0] is written
        assert_close(written, want, torch.float32, "written")
        out, lse = combine(outs[2:], lses[2:])
        assert (out == 0).all() and (lse == -torch.inf).all()


# ---- private functions -----------------------------------------------------------------------------------------------


def test_private_forward_and_backward():
    q, k, v = tensors(dtype=torch.float64)
    out, lse, nothing, state = fa2._wrapped_flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    assert nothing.shape == (0,) and state.tolist() == [0, 0] and state.dtype is torch.int64
    dout = torch.randn_like(out)
    dq, dk, dv = map(torch.empty_like, (q, k, v))
    delta = fa2._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    wide = [each.clone().requires_grad_() for each in (q, k, v)]
    truth(*wide, scale=0.25, causal=True)[0].backward(dout)
    for have, each in zip((dq, dk, dv), wide):
        assert_close(have, each.grad, torch.float64, "gradient")
    assert delta.dtype is torch.float32
    assert_close(delta, (dout * out).sum(-1).transpose(1, 2), torch.float32, "delta")


def test_backward_by_out_and_lse_of_more_keys():
    """Ring attention: each part of the keys with the results of all. In float64, which the reference kernels run, O and
    lse are computed anew."""
    q, k, v = tensors(grad=True)
    out, lse, _ = truth(q, k, v)
    dout = torch.randn_like(out)
    out.backward(dout)
    out, lse, dout = out.float(), lse.float(), dout.float()
    total, parts = torch.zeros_like(q), []
    with torch.no_grad():
        for part in (slice(0, 9), slice(9, 23)):
            block = k[:, part].contiguous(), v[:, part].contiguous()
            grads = [torch.full_like(each, torch.nan) for each in (q, *block)]
            fa2._flash_attn_backward(dout, q, *block, out, lse, *grads, 0.0, 0.25, False, -1, -1, 0.0, None, True)
            total += grads[0]
            parts.append(grads[1:])
    assert_close(total, q.grad, torch.float32, "dq")
    for index, whole in enumerate((k.grad, v.grad)):
        assert_close(torch.cat([part[index] for part in parts], 1), whole, torch.float32, "dk, dv")


def test_private_packed_functions():
    rows, keys, *most, _ = packing()
    q, k, v = packed_tensors((rows, keys))
    given = (rows, keys, *most, 0.0, 0.25, True)
    out, lse, *_ = fa2._flash_attn_varlen_forward(q, k, v, *given, num_splits=1)
    want = flash_attn.flash_attn_varlen_func(q, k, v, *given, return_attn_probs=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    wide = [each.requires_grad_() for each in (q, k, v)]
    dout = torch.randn_like(out)
    flash_attn.flash_attn_varlen_func(*wide, *given).backward(dout)
    grads = [torch.empty_like(each) for each in wide]
    with torch.no_grad():
        fa2._flash_attn_varlen_backward(dout, *wide, out, lse, *grads, *given, -1, -1, 0.0, None, False)
        three = [torch.empty_like(each) for each in wide]
        back = flash_attn_interface._flash_attn_backward
        flipped = lse.masked_fill(lse == torch.inf, -torch.inf)
        back(dout, *wide, out, flipped, rows, keys, None, None, *most, *three, 0.25, True)
    for have, other, each in zip(grads, three, wide):
        assert torch.equal(have, each.grad) and torch.equal(other, have)


def test_functions_of_the_extension():
    q, k, v = tensors()
    gpu = fa2.flash_attn_gpu
    given = torch.full_like(q, torch.nan)
    out, lse, *_ = gpu.fwd(q, k, v, given, None, 0.0, 0.25, True, -1, -1, 0.0, False, None)
    assert out is given and torch.equal(out, flash_attn.flash_attn_func(q, k, v, 0.0, 0.25, True))
    dout = torch.randn_like(out)
    dq, dk, dv, _ = gpu.bwd(
        dout, q, k, v, out, lse, None, None, None, None, 0.0, 0.25, True, -1, -1, 0.0, False, None, None
    )
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (17, 23)]
    flat = [each.flatten(0, 1) for each in (q, k, v)]
    most = 17, 23
    bounds = 0.25, False, True, -1, -1, 0.0
    packed, packed_lse, *_ = gpu.varlen_fwd(
        *flat, None, *offsets, None, None, None, None, *most, 0.0, *bounds, False, None, 0
    )
    assert_close(packed.reshape(out.shape), out, torch.float32, "out")
    grads = gpu.varlen_bwd(
        dout.flatten(0, 1), *flat, packed, packed_lse, None, None, None, *offsets, None, *most, 0.0, *bounds, False, None,
        None,
    )  # fmt: skip
    for have, want in zip(grads, (dq, dk, dv)):
        assert_close(have.reshape(want.shape), want, torch.float32, "gradient")
    for call in (gpu.fwd, gpu.varlen_fwd, gpu.bwd, gpu.varlen_bwd):
        names = inspect.signature(call).parameters
        with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
            call(**{name: torch.Generator() if name == "gen" else None for name in names})


# ---- refusals --------------------------------------------------------------------------------------------------------

USED = torch.tensor([3, 3], dtype=torch.int32)
EIGHT_PAGES = torch.arange(8, dtype=torch.int32).view(2, 4)


def in_pages(*tensors):
    """[2, 24 or less, h, d] as eight pages of six rows; zeros for what lacks."""
    return [torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 24 - each.shape[1])).view(8, 6, *each.shape[2:]) for each in tensors]


REFUSED = {
    "dropout_p is 0.1, but flash_dmattn has no dropout yet": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, 0.1),
    "alibi_slopes is given beside a table of pages": lambda q, k, v: flash_attn.flash_attn_varlen_func(
        q, k, v, USED, USED, 3, 3, alibi_slopes=torch.rand(4), block_table=USED
    ),
    "q_descale is given, but flash_dmattn has no float8": lambda q, k, v: flash_attn_interface.flash_attn_func(
        q, k, v, q_descale=torch.ones(2, 2)
    ),
    "v_descale is given": lambda q, k, v: flash_attn_interface.flash_attn_varlen_func(
        q, k, v, USED, USED, 3, 3, v_descale=torch.ones(2, 2)
    ),
    "score_mod is given, but flash_dmattn takes no Python functions": lambda q, k, v: flash_attn_cute.flash_attn_func(
        q, k, v, score_mod=print
    ),
    "block_sparse_tensors is given": lambda q, k, v: flash_attn_cute.flash_attn_func(q, k, v, block_sparse_tensors=q),
    "aux_tensors is given": lambda q, k, v: flash_attn_cute.flash_attn_varlen_func(q, k, v, aux_tensors=[q]),
    "gather_kv_indices is given": lambda q, k, v: flash_attn_cute.flash_attn_func(q, k, v, gather_kv_indices=q),
    "page_table is given": lambda q, k, v: flash_attn_interface._flash_attn_forward(q, k, v, page_table=USED),
    "seqused_q is given beside a table of pages": lambda q, k, v: flash_attn_cute.flash_attn_varlen_func(
        q, k, v, seqused_q=USED, page_table=USED
    ),
    "its bounds must be None or from 0": lambda q, k, v: flash_attn_cute.flash_attn_varlen_func(
        q, k, v, window_size=(-2, None), page_table=USED
    ),
    "k_new is given": lambda q, k, v: flash_attn_interface._flash_attn_forward(q, k, v, k),
    "a call on a key-value cache has no backward": lambda q, k, v: (
        flash_attn.flash_attn_with_kvcache(q.clone().requires_grad_(), k, v).sum().backward()
    ),
    "alibi_slopes are given to a private backward function": lambda q, k, v: fa2._flash_attn_backward(
        q, q, k, v, q, q, None, None, None, 0.0, 1.0, True, -1, -1, 0.0, torch.rand(4), False
    ),
    "num_splits is 2 beside block_table": lambda q, k, v: fa2._flash_attn_varlen_forward(
        q, k, v, USED, USED, 3, 3, 0.0, 1.0, True, block_table=USED, num_splits=2
    ),
}  # fmt: skip
WRONG = {
    "k is given without cache_seqlens": lambda q, k, v: flash_attn.flash_attn_with_kvcache(q, k, v, k, v),
    "rotary_cos is given without k": lambda q, k, v: flash_attn.flash_attn_with_kvcache(
        q, k, v, rotary_cos=q[0, :, 0, :4], rotary_sin=q[0, :, 0, :4], cache_seqlens=4
    ),
    "block_table": lambda q, k, v: flash_attn.flash_attn_with_kvcache(q, k, v, block_table=USED, cache_seqlens=4),
    "cache_seqlens of sequence 1 is 25, but block_table holds 4 pages of 6 rows": lambda q, k, v: (
        flash_attn.flash_attn_with_kvcache(q, *in_pages(k, v), cache_seqlens=torch.tensor([24, 25]), block_table=EIGHT_PAGES)
    ),
    "cache_seqlens of sequence 1 is 26, but block_table holds 4 pages of 6 rows": lambda q, k, v: (
        flash_attn.flash_attn_with_kvcache(q, *in_pages(k, v), cache_seqlens=torch.tensor([24, 26], dtype=torch.int32), block_table=EIGHT_PAGES)
    ),
    "cache_seqlens of sequence 0 is 21 before 4 new keys, but block_table holds 4 pages": lambda q, k, v: (
        flash_attn.flash_attn_with_kvcache(
            q, *in_pages(k, v), k[:, :4], v[:, :4], cache_seqlens=USED * 7, block_table=EIGHT_PAGES
        )
    ),
    "cache_seqlens of sequence 0 is 20 before 5 new keys, but block_table holds 4 pages": lambda q, k, v: (
        flash_attn.flash_attn_with_kvcache(
            q, *in_pages(k, v), k[:, :5], v[:, :5], cache_seqlens=20, block_table=EIGHT_PAGES
        )
    ),
    "v is given without k": lambda q, k, v: flash_attn.flash_attn_with_kvcache(q, k, v, None, v),
    "heads": lambda q, k, v: flash_attn.flash_attn_func(q[:, :, :3], k, v),
    "softcap is -1": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, softcap=-1.0),
    "q and qv are both None": lambda q, k, v: flash_attn_cute.flash_attn_func(None, None, v),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(sentence):
    with pytest.raises(RuntimeError, match=sentence) as caught:
        REFUSED[sentence](*tensors())
    assert isinstance(caught.value, (NotImplementedError, ValueError))


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_arguments(sentence):
    """flash-attn's callers catch RuntimeError, ours ValueError."""
    with pytest.raises(RuntimeError, match=sentence) as caught:
        WRONG[sentence](*tensors())
    assert isinstance(caught.value, ValueError)


def test_wrong_types():
    q, k, v = tensors()
    for window in ((1.5, 0), ("1", 0)):
        with pytest.raises(TypeError):
            flash_attn.flash_attn_func(q, k, v, window_size=window)
    with pytest.raises(RuntimeError, match="must be a torch.Tensor") as caught:
        flash_attn.flash_attn_func(q, k, [1.0])
    assert isinstance(caught.value, TypeError)


WITHOUT_OFFSETS = {
    "of version 2": lambda x, rows, keys: flash_attn.flash_attn_varlen_func(x, x, x, rows, keys, 17, 17),
    "with lse": lambda x, rows, keys: flash_attn.flash_attn_varlen_func(x, x, x, rows, keys, 17, 17, return_attn_probs=True),
    "beside lengths": lambda x, rows, keys: flash_attn.flash_attn_varlen_func(x, x, x, rows, keys, 17, 17, seqused_k=USED),
    "of pages": lambda x, rows, keys: flash_attn.flash_attn_varlen_func(
        x, x, x, rows, keys, 17, 17, block_table=USED[:, None] * 0
    ),
    "keys in one": lambda x, rows, keys: flash_attn.flash_attn_varlen_kvpacked_func(
        x, torch.stack((x, x), 1), rows, keys, 17, 17
    ),
    "backward": lambda x, rows, keys: fa2._flash_attn_varlen_backward(
        x, x, x, x, x, x[..., 0].mT.contiguous(), None, None, None, rows, keys, 17, 17, 0.0, 0.25, True, -1, -1, 0.0, None, False
    ),
    "of version 3": lambda x, rows, keys: flash_attn_interface.flash_attn_varlen_func(x, x, x, rows, keys, 17, 17),
    "of version 3, beside lengths": lambda x, rows, keys: flash_attn_interface.flash_attn_varlen_func(
        x, x, x, rows, keys, 17, 17, None, USED
    ),
}  # fmt: skip


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("call", WITHOUT_OFFSETS)
def test_packed_functions_need_offsets(call, missing):
    """Without them tensors of four axes would be a dense call, or one on a dense cache."""
    offsets = torch.tensor([0, 17, 34], dtype=torch.int32)
    rows = None if missing == "cu_seqlens_q" else offsets
    sentence = f"^{missing} is None; it must be a torch.int32 tensor of batch \\+ 1 elements$"
    for keys in (offsets, None) if rows is None else (None,):
        with pytest.raises(RuntimeError, match=sentence) as caught:
            WITHOUT_OFFSETS[call](tensors()[0], rows, keys)
        assert isinstance(caught.value, TypeError)


# ---- key-value caches ------------------------------------------------------------------------------------

# Keys in the cache of two sequences, before appending.
CACHED = torch.tensor([5, 11], dtype=torch.int32)


def cached_call(function, q, k, v, new, paged, **options):
    """out and lse of a call that appends `new` rows of k and v to a cache, whose unused rows are NaN, and the cache."""
    caches = []
    for full in (k, v):
        cache = full.clone()
        for sequence, length in enumerate(CACHED.tolist()):
            cache[sequence, length:] = torch.nan
        caches.append(cache)
    if paged:  # pages of 4 rows, those of the second sequence first
        table = torch.tensor([[6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5]], dtype=torch.int32)
        caches = [torch.cat([cache[1], cache[1, :1], cache[0], cache[0, :1]]).view(12, 4, *cache.shape[2:]) for cache in caches]
        options["page_table" if function is flash_attn_interface.flash_attn_with_kvcache else "block_table"] = table
    rows = [torch.stack([full[b, n : n + new] for b, n in enumerate(CACHED.tolist())]) for full in (k, v)]
    results = function(q, *caches, *rows, cache_seqlens=CACHED, return_softmax_lse=True, **options)
    return results, caches


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("function", [flash_attn.flash_attn_with_kvcache, flash_attn_interface.flash_attn_with_kvcache])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (3, 0)}, {"softcap": 2.0}])
def test_cached_keys_are_those_of_a_dense_call(function, paged, options):
    q, k, v = tensors(rows=3, keys=23)
    (out, lse), caches = cached_call(function, q, k, v, 3, paged, **options)
    for b, length in enumerate((CACHED + 3).tolist()):
        one = slice(b, b + 1)
        want = flash_attn.flash_attn_func(q[one], k[one, :length], v[one, :length], return_attn_probs=True, **options)
        torch.testing.assert_close(out[one], want[0])
        torch.testing.assert_close(lse[one], want[1])
        start = b == 0 and paged and 6 or 0
        written = caches[0][start : start + 6].reshape(24, 2, 16) if paged else caches[0][b]
        assert torch.equal(written[:length], k[b, :length])


SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0625], [1.0, 0.3, 0.2, 0.1]])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 0)}, {"window_size": (4, 2)}])
def test_alibi_beside_a_cache_is_that_of_a_dense_call(options, rows, paged):
    q, k, v = tensors(rows=rows, keys=23)
    (out, lse), _ = cached_call(flash_attn.flash_attn_with_kvcache, q, k, v, 3, paged, alibi_slopes=SLOPES, **options)
    for b, length in enumerate((CACHED + 3).tolist()):
        one = slice(b, b + 1)
        want = flash_attn.flash_attn_func(
            q[one], k[one, :length], v[one, :length], alibi_slopes=SLOPES[b], return_attn_probs=True, **options
        )
        torch.testing.assert_close(out[one], want[0])
        torch.testing.assert_close(lse[one], want[1])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pads", [None, torch.tensor([2, 5], dtype=torch.int32)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 1)}])
def test_chunks_beside_a_cache_are_those_of_a_dense_call(options, pads, packed, paged):
    q, k, v = tensors(rows=3, keys=23)
    counts = [2, 3] if packed else [3, 3]
    given = dict(options, attention_chunk=4, cache_leftpad=pads, rotary_seqlens=CACHED)
    rows = q
    if packed:
        rows = torch.cat([q[b, :count] for b, count in enumerate(counts)])
        given |= {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32), "max_seqlen_q": 3}
    (out, _), _ = cached_call(flash_attn_interface.flash_attn_with_kvcache, rows, k, v, 3, paged, **given)
    for b, length in enumerate((CACHED + 3).tolist()):
        first = 0 if pads is None else int(pads[b])
        mine = q[b : b + 1, : counts[b]], *(each[b : b + 1, first:length] for each in (k, v))
        want = flash_attn_interface.flash_attn_func(*mine, attention_chunk=4, **options)
        got = out[sum(counts[:b]) : sum(counts[: b + 1])] if packed else out[b]
        torch.testing.assert_close(got, want[0])


def test_one_length_of_all_sequences_and_no_rows_without_keys():
    q, k, v = tensors(rows=1, keys=9)
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4)
    torch.testing.assert_close(out, flash_attn.flash_attn_func(q, k[:, :4], v[:, :4]))
    for module, empty in ((flash_attn, torch.inf), (flash_attn_interface, -torch.inf)):
        out, lse = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=0, return_softmax_lse=True)
        assert not out.any() and (lse == empty).all()


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_a_cache_may_be_on_a_cuda_device(module):
    """Of pretended tensors: one length of all sequences becomes a tensor on their device, and nothing is refused."""
    with FakeTensorMode():
        q, *others = (torch.empty(2, n, h, 16, device="cuda") for n, h in ((2, 4), (9, 2), (9, 2), (2, 2), (2, 2)))
        out, lse = module.flash_attn_with_kvcache(q, *others, cache_seqlens=4, return_softmax_lse=True)
        if module is flash_attn_interface:  # packed rows, without a bound of their number
            offsets = torch.empty(3, dtype=torch.int32, device="cuda")
            packed = module.flash_attn_with_kvcache(q.flatten(0, 1), *others, cache_seqlens=4, cu_seqlens_q=offsets)
            assert packed.shape == (4, 4, 16)
    assert out.shape == q.shape and lse.shape == (2, 4, 2) and out.device == lse.device == q.device


IN_PAGES, OF_THEM = (7, 0, 21), (3, 2, 4)


def pages_of(full, size=4):
    """Packed keys as pages of NaN but for them, in falling order, and the table."""
    table, pages, first = torch.full((3, 7), 99, dtype=torch.int32), torch.full((9, size, *full.shape[1:]), torch.nan), 0
    free = list(range(9))
    for b, length in enumerate(IN_PAGES):
        for column in range(-(-length // size)):
            page = table[b, column] = free.pop()
            part = full[first + column * size : min(first + (column + 1) * size, first + length)]
            pages[page, : len(part)] = part
        first += length
    return pages, table


@pytest.mark.parametrize("version", [2, 4, "torch"])
@pytest.mark.parametrize("given", ["offsets", "lengths"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}, {"softcap": 2.0}, {"sink": True}], ids=str)
def test_packed_functions_take_pages(version, given, options):
    """What the packed keys themselves give; one sequence has none."""
    torch.manual_seed(1)
    q, k, v = torch.randn(9, 4, 16), torch.randn(28, 2, 16), torch.randn(28, 2, 16)
    offsets = [torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32) for counts in (OF_THEM, IN_PAGES)]
    pages, table = zip(*(pages_of(each) for each in (k, v)))
    options, used = dict(options), torch.tensor(IN_PAGES, dtype=torch.int32) if given == "lengths" else None
    sink = torch.randn(4) if options.pop("sink", False) else None
    if version == "torch":
        if options.pop("causal", False):
            options["window_size"] = (-1, 0)
        if sink is not None or "softcap" in options:
            pytest.skip("PyTorch's function has neither")
        call = functools.partial(varlen_attn, enable_gqa=True, return_aux=SimpleNamespace(lse=True), **options)
        want = call(q, k, v, *offsets, 4, 21)
        have = call(q, *pages, offsets[0], None if used is not None else offsets[1], 4, 21, seqused_k=used, block_table=table[0])
    elif version == 2:
        call = functools.partial(flash_attn.flash_attn_varlen_func, return_attn_probs=True, s_aux=sink, **options)
        want = call(q, k, v, *offsets, 4, 21)[:2]
        have = call(q, *pages, *offsets, 4, 21, seqused_k=used, block_table=table[0])[:2]
    else:
        call = functools.partial(flash_attn_cute.flash_attn_varlen_func, return_lse=True, learnable_sink=sink, **options)
        want = call(q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=4, max_seqlen_k=21)
        known = {"cu_seqlens_k": offsets[1]} if used is None else {"seqused_k": used}
        have = call(q, *pages, cu_seqlens_q=offsets[0], page_table=table[0], **known)
    for one, other in zip(have, want):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5)
    assert torch.isinf(have[1][:, 3:5]).all() or sink is not None


# ---- calls that the extension takes whole ----------------------------------------------------------------------------

NEW_KEYS = torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 16)
TABLES = torch.randn(40, 8), torch.randn(40, 8)
PACKED_ROWS = torch.tensor([0, 3, 5], dtype=torch.int32)
FIRST_KEYS = torch.tensor([1, 4], dtype=torch.int32)


def cache_of_version(version):
    return (flash_attn if version == 2 else flash_attn_interface).flash_attn_with_kvcache


def whole_calls(q, k, v):
    """By name: a call on rows q [2, 3, 4, 16] and keys k and v [2, 23, 2, 16], which it may write."""
    packed, pages = torch.cat((q[0], q[1, :2])), in_pages(k, v)
    calls = {}
    for version, table in ((2, "block_table"), (3, "page_table")):
        call = functools.partial(cache_of_version(version), cache_seqlens=CACHED)
        names = {"return_softmax_lse": True}
        calls |= {
            f"{version}": lambda call=call: call(q, k, v),
            f"{version}, lse": lambda call=call: call(q, k, v, **names, causal=True),
            f"{version}, no lengths": lambda call=call: call(q, k, v, cache_seqlens=None),
            f"{version}, one length": lambda call=call: call(q, k, v, cache_seqlens=7, softmax_scale=0.5),
            f"{version}, new keys": lambda call=call: call(q, k, v, *NEW_KEYS, causal=True),
            f"{version}, turned": lambda call=call: call(
                q, k, v, *NEW_KEYS, rotary_cos=TABLES[0], rotary_sin=TABLES[1], rotary_interleaved=False, window_size=(4, 0)
            ),
            f"{version}, window": lambda call=call: call(q, k, v, window_size=(4, 1), softcap=3.0, causal=True),
            f"{version}, pages": lambda call=call, table=table: call(q, *pages, *NEW_KEYS, **{table: EIGHT_PAGES}, **names),
            f"{version}, padding": lambda call=call: call(q, k, v, cache_leftpad=FIRST_KEYS, cache_batch_idx=USED % 2),
        }
    two, four = flash_attn.flash_attn_varlen_func, flash_attn_cute.flash_attn_varlen_func
    three = functools.partial(flash_attn_interface.flash_attn_with_kvcache, cache_seqlens=CACHED, cu_seqlens_q=PACKED_ROWS)
    calls |= {
        "2, sink": lambda: cache_of_version(2)(q, k, v, cache_seqlens=CACHED, s_aux=torch.ones(4)),
        "3, packed": lambda: three(packed, k, v, max_seqlen_q=3, causal=True),
        "3, packed, no bound": lambda: three(packed, k, v, return_softmax_lse=True),
        "3, places of turning": lambda: cache_of_version(3)(
            q, k, v, *NEW_KEYS, None, *TABLES, cache_seqlens=CACHED, rotary_seqlens=FIRST_KEYS
        ),
        "2, packed pages": lambda: two(
            packed, *pages, PACKED_ROWS, PACKED_ROWS, 3, 3, causal=True, block_table=EIGHT_PAGES, return_attn_probs=True
        ),
        "2, packed pages, lengths": lambda: two(
            packed, *pages, PACKED_ROWS, None, 3, 3, block_table=EIGHT_PAGES, seqused_k=CACHED, s_aux=torch.ones(4)
        ),
        "4, packed pages": lambda: four(
            packed, *pages, cu_seqlens_q=PACKED_ROWS, page_table=EIGHT_PAGES, seqused_k=CACHED, return_lse=True
        ),
        "4, pages": lambda: four(q, *pages, page_table=EIGHT_PAGES, seqused_k=CACHED, max_seqlen_q=9, window_size=(4, None)),
        "torch, pages": lambda: varlen_attn(
            packed, *pages, PACKED_ROWS, None, 3, 3, enable_gqa=True, seqused_k=CACHED, block_table=EIGHT_PAGES
        ),
    }
    return calls, (k, v, *pages)


def whole_dense_calls(q, k, v):
    calls, rows, keys = {}, torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([0, 0, 46], dtype=torch.int32)
    flat = [each.flatten(0, 1) for each in (q, k, v)]
    for name, options in {"": {}, "causal": {"causal": True}, "window": {"window_size": (2, 1)}}.items():
        for few in (False, True):  # rows without keys
            given = (q, k[:, :2], v[:, :2]) if few else (q, k, v)
            three, four = flash_attn_interface.flash_attn_func, flash_attn_cute.flash_attn_func
            kind = f"{name}{', few keys' if few else ''}"
            calls[f"3 {kind}"] = functools.partial(three, *given, return_attn_probs=True, **options)
            calls[f"4 {kind}"] = functools.partial(four, *given, return_lse=True, **options)
        three = flash_attn_interface.flash_attn_varlen_func
        calls[f"3 {name}, packed"] = functools.partial(three, *flat, rows, keys, 3, 46, return_attn_probs=True, **options)
    sink = torch.ones(4)
    calls["4, sink"] = functools.partial(flash_attn_cute.flash_attn_func, q, k, v, learnable_sink=sink, return_lse=True)
    return calls, ()


CALLS = [(whole_calls, name) for name in whole_calls(*tensors(rows=3))[0]]
CALLS += [(whole_dense_calls, name) for name in whole_dense_calls(*tensors(rows=3))[0]]


@pytest.mark.parametrize("calls, name", CALLS, ids=lambda each: each if isinstance(each, str) else None)
def test_whole_calls_are_what_python_makes_of_them(calls, name, monkeypatch):
    results = []
    for whole in (True, False):
        torch.manual_seed(3)
        made, written = calls(*tensors(rows=3))
        with monkeypatch.context() as patch:
            if whole:
                patch.setattr(_kv_cache, "attend_to_cache", None)
                patch.setattr(_calls, "attend", None)
            else:
                patch.setattr(_kv_cache._native, "cache_attend", lambda *arguments: NotImplemented)
                patch.setattr(_calls, "plain", lambda *arguments: None)
            result = made[name]()
        results.append((*(result if isinstance(result, tuple) else (result,)), *written))
    for one, other in zip(*results, strict=True):
        assert (one is other is None) or torch.equal(one, other)


def test_errors_of_whole_calls_are_those_of_python(monkeypatch):
    q, k, v = tensors(rows=3)
    lengths = {"cache_seqlens": CACHED}
    wrong = [
        {"k_cache": k[0]},
        {"q": q[:, :, :3]},
        {"q": q[0]},
        {"cache_seqlens": CACHED.long()},
        {"cache_seqlens": CACHED[:1]},
        {"softcap": -1.0},
        {"softmax_scale": "1"},
        {"causal": 0.5},
        {"k": NEW_KEYS[0]},
        {"k": NEW_KEYS[0], "v": NEW_KEYS[1], "rotary_cos": TABLES[0]},
        {"rotary_cos": TABLES[0], "rotary_sin": TABLES[1]},
        {"k": NEW_KEYS[0], "v": NEW_KEYS[1], "cache_seqlens": None},
        {"window_size": (1.5, 0)},
        {"cache_leftpad": FIRST_KEYS.float()},
    ]
    for version in (2, 3):
        for changed in wrong:
            sentences = []
            for whole in (True, False):
                with monkeypatch.context() as patch, pytest.raises(RuntimeError) as caught:
                    if not whole:
                        patch.setattr(_kv_cache._native, "cache_attend", lambda *arguments: NotImplemented)
                    cache_of_version(version)(**{"q": q, "k_cache": k, "v_cache": v, **lengths, **changed})
                sentences.append((caught.type, str(caught.value)))
            assert sentences[0] == sentences[1]


# ---- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "packed", "alibi", "version 3", "version 4"])
def test_compiles_as_one_graph(name):
    q, k, v = tensors(grad=True)
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (17, 23)]
    slopes = torch.rand(4)
    calls = {
        "dense": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(5, -1)),
        "packed": lambda q, k, v: flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *offsets, 17, 23, causal=True
        ).reshape(q.shape),
        "alibi": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes),
        "version 3": lambda q, k, v: flash_attn_interface.flash_attn_func(
            q, k, v, attention_chunk=4, return_attn_probs=True
        )[0],
        "version 4": lambda q, k, v: flash_attn_cute.flash_attn_func(q, k, v, causal=True)[0],
    }  # fmt: skip
    compiled = torch.compile(calls[name], fullgraph=True, backend="aot_eager")
    want = calls[name](q, k, v)
    out = compiled(q, k, v)
    assert_close(out, want, torch.float32, "out")
    dout = torch.randn_like(out)
    for have, each in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout)):
        assert_close(have, each, torch.float32, "gradient")
