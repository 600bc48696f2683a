"""test_backward_arrays.py: attention_backward on NumPy arrays and DLPack producers, and arrays of other libraries."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import random_problem
from flash_dmattn import attention, attention_backward, flash_dmattn_func, flash_dmattn_varlen_func, masks, merge


def as_array(value):
    return None if value is None else value.detach().numpy()


@pytest.mark.parametrize("seed", [seed for seed in range(80) if random_problem(seed)["q"].dtype != torch.bfloat16][:40])
def test_random_problems_give_autograds_gradients(seed):
    p = random_problem(seed)
    names = [name for name in ("q", "k", "v", "bias") if p[name] is not None]
    leaves = {name: p[name].detach().requires_grad_() for name in names}
    settings = {
        "softmax_scale": p["scale"],
        "is_causal": p["causal"],
        "softcap": p["softcap"],
        "window_size": p["window"],
    }
    out, lse = flash_dmattn_func(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        p["mask"],
        leaves.get("bias"),
        return_lse=True,
        key_intervals=p["intervals"],
        **settings,
    )
    dout, dlse = torch.randn_like(out), torch.where(torch.isfinite(lse), torch.randn_like(lse), 0.0)
    want = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    arrays = [as_array(p[name]) for name in ("q", "k", "v", "mask", "bias")]
    pair = p["intervals"] and tuple(each.numpy() for each in p["intervals"])
    result, rows, low = attention(*arrays, key_intervals=pair, return_lse_low=True, **settings)
    assert (low is None) == (p["bias"] is None)
    have = attention_backward(
        dout.numpy(),
        *arrays[:3],
        result,
        rows,
        *arrays[3:],
        key_intervals=pair,
        dlse=dlse.numpy(),
        lse_low=low,
        return_dbias=p["bias"] is not None,
        **settings,
    )
    assert len(have) == len(names)
    for name, ours, theirs in zip(names, have, want):
        assert isinstance(ours, np.ndarray) and ours.dtype == as_array(p[name]).dtype
        np.testing.assert_array_equal(ours, theirs.numpy(), err_msg=name)


def problem():
    generator = np.random.default_rng(0)
    q, k, v, dout = (
        generator.standard_normal(shape).astype("float32")
        for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3), (2, 5, 4, 3))
    )
    return q, k, v, dout


def test_packed():
    q, k, v, dout = (each[0] for each in problem())
    offsets = np.array([0, 2, 5], np.int32), np.array([0, 4, 7], np.int32)
    packing = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    out, lse = attention(q, k, v, is_causal=True, return_lse=True, **packing)
    leaves = [torch.from_numpy(each).requires_grad_() for each in (q, k, v)]
    packed = flash_dmattn_varlen_func(*leaves, *map(torch.from_numpy, offsets), 3, 4, is_causal=True)
    want = torch.autograd.grad(packed, leaves, torch.from_numpy(dout))
    for ours, theirs in zip(attention_backward(dout, q, k, v, out, lse, is_causal=True, **packing), want):
        np.testing.assert_array_equal(ours, theirs.numpy())


def test_rows_at_the_lowest_bias_need_lse_low():
    q, k, v, dout = problem()
    bias = np.full((1, 1, 1, 7), np.finfo("float32").min, "float32")
    out, lse, low = attention(q, k, v, attn_bias=bias, return_lse_low=True)
    _, _, dv = attention_backward(dout, q, k, v, out, lse, attn_bias=bias, lse_low=low)
    np.testing.assert_allclose(dv[:, 0, 0], dout[:, :, :2].sum((1, 2)) / 7, rtol=1e-5)


def test_outputs_of_the_caller():
    q, k, v, dout = problem()
    bias = np.zeros((2, 2, 7), "float32")
    out, lse = attention(q, k, v, attn_bias=bias, return_lse=True)
    want = attention_backward(dout, q, k, v, out, lse, attn_bias=bias, return_dbias=True)
    assert want[3].shape == bias.shape
    own = [np.full(each.shape, np.nan, "float32") for each in (q, k, v, bias)]
    names = ("dq", "dk", "dv", "dbias")
    have = attention_backward(dout, q, k, v, out, lse, attn_bias=bias, **dict(zip(names, own)))
    for name, ours, given, theirs in zip(names, have, own, want):
        assert ours is given, name
        np.testing.assert_array_equal(ours, theirs)
    (dq, *_) = attention_backward(dout, q, k, v, out, lse, attn_bias=bias, dq=own[0])
    assert dq is own[0]


def test_torch_tensors_count_as_arrays():
    q, k, v, dout = (torch.from_numpy(each).bfloat16() for each in problem())
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    want = torch.autograd.grad(flash_dmattn_func(*leaves), leaves, dout)
    out, lse, low = attention(q, k, v, return_lse_low=True)
    assert isinstance(out, torch.Tensor) and low is None
    for ours, theirs in zip(attention_backward(dout, *leaves, out, lse), want):
        assert isinstance(ours, torch.Tensor) and not ours.requires_grad and torch.equal(ours, theirs)


def test_errors():
    q, k, v, dout = problem()
    out, lse = attention(q, k, v, return_lse=True)

    def refuse(kind, sentence, *arguments, **options):
        with pytest.raises(kind, match=sentence):
            attention_backward(*arguments, **options)

    refuse(ValueError, "dbias is wanted, but attn_bias is None", dout, q, k, v, out, lse, return_dbias=True)
    refuse(
        ValueError,
        r"dbias has shape \[1, 1, 1, 7\]; it must be \[1, 1, 7\], as attn_bias",
        dout,
        q,
        k,
        v,
        out,
        lse,
        attn_bias=np.zeros((1, 1, 7), "float32"),
        dbias=np.zeros((1, 1, 1, 7), "float32"),
    )
    refuse(TypeError, "lse is None; it must be an array", dout, q, k, v, out, None)
    refuse(TypeError, "dout is None", None, q, k, v, out, lse)
    refuse(ValueError, r"dout has shape \[2, 5, 4, 2\]", dout[..., :2], q, k, v, out, lse)
    refuse(ValueError, "dq is read-only", dout, q, k, v, out, lse, dq=np.broadcast_to(q, q.shape))
    refuse(TypeError, "causal is True, but attention_backward has no causal", dout, q, k, v, out, lse, causal=True)


# ---- other libraries -------------------------------------------------------------------------------------------------


class Foreign:
    """An array of a library that speaks the array API standard, on the CPU."""

    def __init__(self, array):
        self.array = array if isinstance(array, np.ndarray) else np.from_dlpack(array)

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        import types

        return types.SimpleNamespace(from_dlpack=Foreign)


def test_arrays_come_back_as_their_librarys():
    q, k, v, dout = problem()
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    foreign = [Foreign(each) for each in (q, k, v)]
    results = attention(*foreign, is_causal=True, return_lse=True)
    gradients = attention_backward(Foreign(dout), *foreign, *results, is_causal=True)
    wanted = attention_backward(dout, q, k, v, out, lse, is_causal=True)
    merged, bias = merge(*results, *results), np.random.default_rng(1).standard_normal((2, 2, 7)).astype("float32")
    pair, dense = masks.topk_intervals(Foreign(bias), 2), np.tri(5, 7, 2, dtype=bool)
    found = masks.intervals_from_mask(Foreign(dense))
    made = [
        *zip((*results, *gradients), (out, lse, *wanted)),
        *zip(merged, merge(out, lse, out, lse)),
        *zip(pair, masks.topk_intervals(bias, 2)),
        *zip(found, masks.intervals_from_mask(dense)),
        (masks.intervals_to_mask(*pair, 7), masks.intervals_to_mask(*masks.topk_intervals(bias, 2), 7)),
        (masks.mask_blocks(Foreign(dense), 2, 3), masks.mask_blocks(dense, 2, 3)),
        (masks.create_mask(Foreign(bias), None, 2, 5, 7, 3, -1e9), masks.create_mask(bias, None, 2, 5, 7, 3, -1e9)),
    ]
    for ours, plain in made:
        assert type(ours) is Foreign and ours.array.dtype == plain.dtype
        np.testing.assert_array_equal(ours.array, plain)
    assert pair.seqlen_q == 7 and found.seqlen_q == 5
    assert attention(*foreign, key_intervals=masks.topk_intervals(Foreign(bias), 2, 5)).array.shape == out.shape


JAX = """
import jax, jax.numpy as jnp, numpy as np, sys
from flash_dmattn import attention, attention_backward, masks
assert "torch" not in sys.modules
for dtype in (jnp.float32, jnp.bfloat16):
    q = jax.random.normal(jax.random.key(0), (2, 5, 4, 8)).astype(dtype)
    out, lse = attention(q, q, q, is_causal=True, return_lse=True)
    results = out, lse, *attention_backward(out, q, q, q, out, lse, is_causal=True)
    assert all(isinstance(each, jax.Array) for each in results)
    assert [each.dtype for each in results] == [dtype, jnp.float32, dtype, dtype, dtype]
    wide = attention(*[np.asarray(q.astype(jnp.float32))] * 3, is_causal=True)
    assert np.abs(np.asarray(out.astype(jnp.float32)) - wide).max() < (1e-6 if dtype == jnp.float32 else 2e-2)
pair = masks.topk_intervals(q[..., 0].swapaxes(1, 2), 3)
assert all(isinstance(each, jax.Array) for each in pair)
attention(q, q, q, key_intervals=pair)
"""


def test_jax():
    pytest.importorskip("jax", reason="JAX is not installed: its arrays are covered by a library that stands for it")
    subprocess.run([sys.executable, "-c", JAX], check=True, timeout=300)
