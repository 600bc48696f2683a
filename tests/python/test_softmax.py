"""test_softmax.py: softmax() on the emulated CUDA device by way of DLPack, where a build has one; and refusals."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from flash_dmattn import softmax

EMULATOR = pathlib.Path(
    os.environ.get("FDM_EMULATOR", pathlib.Path(__file__).parents[2] / "build" / "tests" / "emulator")
)

PROGRAM = '''
import numpy as np
from flash_dmattn import _native, softmax
from flash_dmattn._device_arrays import DeviceArray

class Array:
    """Numbers on the device, by DLPack alone."""
    def __init__(self, values):
        import ctypes
        self.array = None if values.dtype == bool else DeviceArray(values.shape, values.dtype.name, (2, 0), 0)
        if self.array is None:
            from flash_dmattn._device_arrays import DeviceMemory
            self.memory = DeviceMemory(0, values.size)
            address = self.memory.address
            strides = tuple(step for step in values.strides)
            self.tensor = (address, "bool", values.shape, strides, 2, 0)
        else:
            address = self.array._memory.address
        self.shape = values.shape
        ctypes.memmove(address, np.ascontiguousarray(values).ctypes.data, values.nbytes)
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options) if self.array is not None else _native.export(self.tensor, self.memory)

def numbers(result, dtype):
    import ctypes
    _native.synchronize(0)
    values = np.empty(result.shape, dtype)
    ctypes.memmove(values.ctypes.data, result._memory.address, values.nbytes)
    return values

random = np.random.default_rng(0)
for dtype, tolerance in ((np.float32, 2e-6), (np.float16, 6e-4)):
    for shape in ((5, 33), (2, 3, 7), (400,)):
        x = (3 * random.standard_normal(shape)).astype(dtype)
        keep = random.random(shape) < 0.7
        z = np.where(keep, -0.5 * x.astype(np.float64), -np.inf)
        e = np.exp(z - z.max(-1, keepdims=True))
        want = e / e.sum(-1, keepdims=True)
        found = numbers(softmax(Array(x), Array(keep), -0.5), dtype)
        assert np.abs(found - want).max() <= tolerance, (dtype, shape)
        found = numbers(softmax(Array(x), Array(keep), -0.5, log=True), dtype)
        some = keep.nonzero()
        assert np.abs(found[some] - np.log(want[some])).max() <= 10 * tolerance, (dtype, shape)
        assert (found[~keep] == -np.inf).all()
print("right")
'''


@pytest.mark.skipif(not (EMULATOR / "libcuda.so.1").exists(), reason="no emulated device in build/: not covered")
def test_values_on_the_emulated_device(tmp_path):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(EMULATOR), "EMULATED_DEVICES": "sm_90"}
    environment["FLASH_DMATTN_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "right", run.stdout + run.stderr


def test_refusals():
    with pytest.raises(NotImplementedError, match="x is on the CPU; softmax is for tensors on a CUDA device"):
        softmax(torch.zeros(3, 4))
    with pytest.raises(NotImplementedError, match="x is on the CPU; softmax is for arrays on a CUDA device"):
        softmax(np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="mask has 3 axes, but x has 2"):
        softmax(torch.zeros(3, 4), torch.ones(1, 3, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask is a list"):
        softmax(torch.zeros(3, 4), [True])


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 5, dtype=torch.float16, requires_grad=True)
        out = softmax(x)
        assert out.shape == x.shape and out.dtype == x.dtype


def test_second_derivative():
    """The formulas of the gradient's gradient, with the operator's own gradient in float64 torch operations."""
    from flash_dmattn import _softmax_torch

    class Context:
        pass

    torch.manual_seed(0)
    for log in (False, True):
        x = torch.randn(3, 6, dtype=torch.float64)
        out = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
        leaves = [out.requires_grad_(), torch.randn(3, 6, dtype=torch.float64).requires_grad_()]
        y, d = leaves
        dx = 0.7 * (d - y.exp() * d.sum(-1, keepdim=True)) if log else 0.7 * y * (d - (y * d).sum(-1, keepdim=True))
        grad = torch.randn(3, 6, dtype=torch.float64)
        ctx = Context()
        ctx.scale, ctx.log, ctx.saved_tensors = 0.7, log, leaves
        found = _softmax_torch._double_backward(ctx, grad)[:2]
        for a, b in zip(found, torch.autograd.grad(dx, leaves, grad)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
