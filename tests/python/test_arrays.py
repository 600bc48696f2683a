"""test_arrays.py: NumPy arrays and DLPack producers, and the package without torch."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn import attention, flash_dmattn_func, flash_dmattn_varlen_func


def arrays(dtype="float32"):
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(dtype) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3))]


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_numpy(dtype):
    q, k, v = arrays(dtype)
    mask = np.random.default_rng(1).random((2, 1, 5, 7)) < 0.8
    bias = np.random.default_rng(2).standard_normal((1, 4, 1, 7)).astype(dtype)
    out, lse = attention(q, k, v, mask, bias, is_causal=True, softcap=3.0, return_lse=True)
    assert isinstance(out, np.ndarray) and out.dtype == dtype
    tensors = [torch.from_numpy(each) for each in (q, k, v, mask, bias)]
    expected, expected_lse, _ = truth(*tensors, causal=True, softcap=3.0)
    assert_close(torch.from_numpy(out), expected, tensors[0].dtype, "out")
    assert_close(torch.from_numpy(lse), expected_lse, torch.float32, "lse")


def test_strided_and_read_only_arrays():
    q, k, v = (each.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for each in arrays())
    k.flags.writeable = False
    assert not q.flags.c_contiguous
    np.testing.assert_array_equal(attention(q, k, v), attention(*(np.ascontiguousarray(each) for each in (q, k, v))))
    wide = np.broadcast_to(arrays()[1][:, :, :1], (2, 7, 4, 8))
    np.testing.assert_allclose(attention(q, wide, wide), attention(q, wide.copy(), wide.copy()))


def test_out():
    q, k, v = arrays()
    out = np.full((2, 5, 4, 6), np.nan, "float32")[..., :3]
    assert attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, attention(q, k, v))
    assert np.isnan(out.base[..., 3:]).all()
    with pytest.raises(ValueError, match="out has shape"):
        attention(q, k, v, out=np.empty((2, 5, 4, 8), "float32"))
    with pytest.raises(ValueError, match="read-only"):
        attention(q, k, v, out=np.broadcast_to(np.float32(0), (2, 5, 4, 3)))


def test_padding_and_intervals():
    q, k, v = arrays()
    keep = np.random.default_rng(1).random((2, 7)) < 0.7
    pair = np.zeros((1, 2, 7), np.int32), np.full((1, 2, 7), 3, np.int32)
    ours = attention(q, k, v, keep, key_intervals=pair)
    theirs = flash_dmattn_func(
        *(torch.from_numpy(each) for each in (q, k, v, keep)), key_intervals=tuple(torch.from_numpy(e) for e in pair)
    )
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_packed():
    q, k, v = (each[0] for each in arrays())
    cu_q, cu_k = np.array([0, 2, 5], np.int32), np.array([0, 4, 7], np.int32)
    ours = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=True)
    tensors = [torch.from_numpy(each) for each in (q, k, v, cu_q, cu_k)]
    np.testing.assert_array_equal(ours, flash_dmattn_varlen_func(*tensors, 3, 4, is_causal=True).numpy())


def test_torch_tensors_keep_autograd():
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    out = attention(q, q, q, is_causal=True)
    assert isinstance(out, torch.Tensor) and out.grad_fn is not None
    assert torch.equal(out, flash_dmattn_func(q, q, q, is_causal=True))


class Producer:
    """Anything that has DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_dlpack_producers():
    q, k, v = arrays()
    out = attention(*(Producer(torch.from_numpy(each)) for each in (q, k, v)), is_causal=True)
    np.testing.assert_array_equal(out, attention(q, k, v, is_causal=True))


def test_dlpack_bfloat16_into_out():
    q = torch.randn(1, 4, 2, 8).bfloat16()
    out = torch.empty_like(q)
    assert attention(Producer(q), Producer(q), Producer(q), out=out) is out
    assert torch.equal(out, flash_dmattn_func(q, q, q))


def test_out_in_place_of_q():
    for dtype in ("float32", "float16", "float64"):
        shapes = (2, 9, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)
        q, k, v = (np.random.default_rng(0).standard_normal(shape).astype(dtype) for shape in shapes)
        expected = attention(q, k, v, is_causal=True)
        assert attention(q, k, v, is_causal=True, out=q) is q
        assert (q == expected).all()


def test_out_between_the_rows_of_its_inputs():
    both = np.random.default_rng(0).standard_normal((2, 9, 4, 2, 8)).astype("float32")  # q, k, v, out of two heads
    q, k, v, out = (both[:, :, n] for n in range(4))
    expected = attention(q.copy(), k.copy(), v.copy())
    assert attention(q, k, v, out=out) is out
    assert (out == expected).all()


@pytest.mark.parametrize("wrap", [lambda array: array, torch.from_numpy], ids=["numpy", "torch"])
def test_out_over_its_inputs(wrap):
    memory = np.random.default_rng(0).standard_normal(4 * 144 + 8).astype("float32")
    q, k, v = (memory[n * 144 : (n + 1) * 144].reshape(1, 9, 2, 8) for n in range(3))
    bias = memory[3 * 144 : 3 * 144 + 81].reshape(1, 1, 9, 9)
    before = memory.copy()
    for first, name in ((144, "k"), (288, "v"), (8, "q"), (432, "bias"), (150, "k"), (2 * 144 - 8, "k")):
        out = memory[first : first + 144].reshape(1, 9, 2, 8)
        with pytest.raises(ValueError, match=f"out overlaps {name} in memory; it is written"):
            attention(wrap(q), wrap(k), wrap(v), attn_bias=wrap(bias), out=wrap(out))
        assert (memory == before).all()


def test_dtypes_that_are_not_taken_are_named():
    q, k, v = (torch.from_numpy(each) for each in arrays())
    for dtype, name in ((torch.int64, "int64"), (torch.complex64, "complex64"), (torch.uint16, "uint16")):
        with pytest.raises(TypeError, match=f"^k is {name}; the library takes"):
            attention(q.numpy(), Producer(k.to(dtype)), v.numpy())


def test_the_extension_takes_capsules_and_producers():
    from flash_dmattn import _arguments, _native

    q = torch.randn(1, 4, 2, 8)
    out = torch.empty_like(q)
    settings = (0, 0, None, False, 0.0, -1, -1, False, False, 0, 1, _arguments.forced_family, None, False)
    tensors = (Producer(q), q.__dlpack__(), q, *[None] * 10, Producer(out), None, None)
    _native.forward(*tensors, *settings)
    assert torch.equal(out, flash_dmattn_func(q, q, q))
    with pytest.raises(TypeError, match="is not a tensor"):
        _native.forward(3, *tensors[1:], *settings)
    with pytest.raises(TypeError, match="30 arguments are needed"):
        _native.forward(q)


def test_errors():
    q, k, v = arrays()
    with pytest.raises(TypeError, match="q is a list"):
        attention([1.0], k, v)
    with pytest.raises(TypeError, match="q is int64"):
        attention(q.astype("int64"), k, v)
    with pytest.raises(ValueError, match="stride 2 on its last axis"):
        attention(q[..., ::2], k[..., ::2], v)
    with pytest.raises(ValueError, match="negative strides"):
        attention(q[:, ::-1], k, v)
    with pytest.raises(TypeError, match="must be bool"):
        attention(q, k, v, np.ones((2, 1, 5, 7)))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy
import os
import flash_dmattn
from flash_dmattn import _arguments, masks
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
q = numpy.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype("float32")
start, end = masks.causal_intervals(5, 5)
assert isinstance(start, numpy.ndarray)
a = flash_dmattn.attention(q, q, q, is_causal=True)
b = flash_dmattn.attention(q, q, q, key_intervals=(start, end))
numpy.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
try:
    flash_dmattn.flash_dmattn_func
except ImportError as error:
    assert "needs PyTorch" in str(error)
else:
    raise AssertionError("no ImportError")
"""

LAZY = """
import sys
import flash_dmattn
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert flash_dmattn.__version__ and flash_dmattn.get_available_backends() == ["cpu"]
"""


@pytest.mark.parametrize("program", [WITHOUT_TORCH, LAZY])
def test_import_in_a_fresh_process(program):
    subprocess.run([sys.executable, "-c", program], check=True)
