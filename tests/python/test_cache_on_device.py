"""test_cache_on_device.py: calls on caches that the extension takes whole, on the emulated CUDA device.

A PyTorch without CUDA has no tensors there; stand-ins with what the extension asks of tensors take their place.
"""

import os
import pathlib
import subprocess
import sys

import pytest

EMULATOR = pathlib.Path(
    os.environ.get("FDM_EMULATOR", pathlib.Path(__file__).parents[2] / "build" / "tests" / "emulator")
)

PROGRAM = '''
import ctypes
import numpy as np
import torch
from flash_dmattn import _cache_torch, _native, _torch, append_kv_cache, flash_dmattn_with_kvcache_func

streams, made = [], []

class Tensor:
    """Numbers on the device as a tensor of PyTorch's."""
    requires_grad = False
    def __init__(self, values):
        self.values = np.ascontiguousarray(values)
        self.dtype = getattr(torch, self.values.dtype.name)
        self.address = _native.allocate(0, max(self.values.nbytes, 1))
        ctypes.memmove(self.address, self.values.ctypes.data, self.values.nbytes)
    def is_neg(self):
        return False
    def describe(self):
        strides = tuple(step // self.values.itemsize for step in self.values.strides)
        return self.address, self.values.dtype.name, self.values.shape, strides, 2, 0
    def read(self):
        _native.synchronize(0)
        read = np.empty_like(self.values)
        ctypes.memmove(read.ctypes.data, self.address, read.nbytes)
        return read.astype(np.float32)

def empty(shape, strides, dtype):
    made.append((shape, str(dtype)))
    return Tensor(np.full(shape, 77, str(dtype)[len("torch."):]))

def stream_of(device):
    streams.append(device)
    return 0

class Told:
    use_torch = staticmethod(lambda names: _native.use_torch({
        **names, "Tensor": Tensor, "describe": Tensor.describe, "is_neg": Tensor.is_neg, "empty_cuda": empty,
        "cuda_stream": stream_of,
    }))

_torch._native = Told
_torch._use_torch()
random = np.random.default_rng(0)
def numbers(*shape):
    return random.standard_normal(shape).astype(np.float16)

def close(have, want):
    assert np.abs(have.read() - want).max() < 3e-3

q, k, v, key, value = numbers(2, 1, 4, 64), numbers(4, 16, 2, 64), numbers(4, 16, 2, 64), numbers(2, 1, 2, 64), numbers(2, 1, 2, 64)
places = {"cache_seqlens": np.array([9, 20], np.int32), "block_table": np.array([[2, 0], [1, 3]], np.int32)}
on_device = {name: Tensor(each) for name, each in places.items()}
wide = [each.astype(np.float32) for each in (q, k, v, key, value)]
want, want_lse = flash_dmattn_with_kvcache_func(*wide, **places, return_lse=True)
given = [Tensor(each) for each in (q, k, v, key, value)]
out, lse = flash_dmattn_with_kvcache_func(*given, **on_device, return_lse=True)
close(out, want), close(lse, want_lse), close(given[1], wide[1]), close(given[2], wide[2])
assert made == [((2, 1, 4, 64), "torch.float16"), ((2, 4, 1), "torch.float32")] and streams == [0]
out = Tensor(np.zeros_like(q))
assert flash_dmattn_with_kvcache_func(*given, **on_device, out=out) is out and len(made) == 2
close(out, want)
assert append_kv_cache(given[1], given[2], given[4], given[3], **on_device) is None
assert append_kv_cache(wide[1], wide[2], wide[4], wide[3], **places) is None
rotary = numbers(40, 16), numbers(40, 16)
turned = append_kv_cache(
    given[1], given[2], None, None, query=given[0], rotary=tuple(map(Tensor, rotary)), **on_device
)
want = append_kv_cache(
    wide[1], wide[2], None, None, query=wide[0], rotary=tuple(each.astype(np.float32) for each in rotary), **places
)
close(turned, want), close(given[1], wide[1]), close(given[2], wide[2])
assert len(made) == 3 and streams == [0] * 4
print("right")
'''


def run(tmp_path, **more):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(EMULATOR), "EMULATED_DEVICES": "sm_90", **more}
    environment["FLASH_DMATTN_CACHE_DIR"] = str(tmp_path)
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not (EMULATOR / "libcuda.so.1").exists(), reason="no emulated device in build/: not covered")
def test_whole_calls_on_the_emulated_device(tmp_path):
    result = run(tmp_path)
    assert result.stdout.strip() == "right", result.stdout + result.stderr
    # Where faults are asked for, the call is Python's, which knows no stand-ins.
    assert "query is a Tensor" in run(tmp_path, FLASH_DMATTN_CHECK_PAGES="1").stderr
