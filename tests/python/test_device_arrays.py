"""test_device_arrays.py: arrays on CUDA devices in attention(), with a pretended device: producers and memory that say
CUDA and lie in host memory, and an extension that runs such calls on the CPU."""

import gc
import sys
import types

import numpy as np
import pytest
import torch
from flash_dmattn import _arrays, _device_arrays, _native, attention, attention_backward

NUM_TENSORS = {"forward": 15, "backward": 22}  # of functions of the extension


class Pretended:
    """An array on CUDA device `index`, as far as DLPack tells."""

    def __init__(self, array, index=0, kind=2, read_only=False):
        self.array, self.index, self.kind, self.read_only, self.streams = array, index, kind, read_only, []

    def __dlpack_device__(self):
        return (self.kind, self.index)

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        a = self.array
        strides = tuple(step // a.itemsize for step in a.strides)
        return _native.export((a.ctypes.data, a.dtype.name, a.shape, strides, self.kind, self.index), self)


class WithNamespace(Pretended):
    """One whose library takes arrays in by from_dlpack."""

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda array: ("taken", array))


class Device:
    """What the extension was asked for."""

    def __init__(self):
        self.calls, self.memory, self.waits = [], {}, 0


@pytest.fixture
def device(monkeypatch):
    state = Device()

    def pretend(function, count):
        def run(*arguments):
            if not callable(arguments[-1]):
                return function(*arguments)
            tensors, settings, (stream, allocate) = arguments[:count], arguments[count:-2], arguments[-2:]
            assert all(tensor is None or tensor[4:] == (2, 0) for tensor in tensors)
            state.calls.append((stream, allocate))
            function(*(tensor and tensor[:4] for tensor in tensors), *settings)

        return run

    def take(index, num_bytes):
        memory = np.full(max(1, num_bytes), 0xFF, np.uint8)
        state.memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def wait(index):
        state.waits += 1

    for name, count in NUM_TENSORS.items():
        monkeypatch.setattr(_native, name, pretend(getattr(_native, name), count))
    monkeypatch.setattr(_native, "allocate", take)
    monkeypatch.setattr(_native, "release", lambda index, address: state.memory.pop(address))
    monkeypatch.setattr(_native, "synchronize", wait)
    return state


def arrays(dtype="float32"):
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(dtype) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3))]


def test_outputs_are_ours_where_the_library_lends_nothing(device):
    plain = arrays()
    expected, expected_lse = attention(*plain, is_causal=True, return_lse=True)
    q, k, v = (Pretended(each) for each in plain)
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    assert isinstance(out, _device_arrays.DeviceArray) and out.shape == (2, 5, 4, 3) and out.dtype == "float32"
    assert out.__dlpack_device__() == (2, 0) and out.ndim == 4
    for ours, theirs in ((out, expected), (lse, expected_lse)):
        np.testing.assert_array_equal(device.memory[ours._tensor[0]].view("float32").reshape(ours.shape), theirs)
    # The legacy default stream: handle 0, which DLPack calls 1.
    assert [stream for stream, _ in device.calls] == [0] and q.streams == k.streams == v.streams == [1]
    again = attention(out, out, out)
    assert again.shape == out.shape and device.waits == 0


def test_memory_is_given_back_when_the_last_capsule_goes(device):
    out = attention(*(Pretended(each) for each in arrays()))
    capsule = out.__dlpack__()
    del out
    gc.collect()
    assert len(device.memory) == 1
    address, dtype, shape, *_ = _native.inspect(capsule)
    assert (dtype, shape) == ("float32", (2, 5, 4, 3)) and address in device.memory
    del capsule
    gc.collect()
    assert not device.memory


def test_a_consumer_takes_the_capsule_and_frees_it(device):
    memory = _device_arrays.DeviceMemory(0, 24)
    host = torch.utils.dlpack.from_dlpack(_native.export((memory.address, "float32", (2, 3), (3, 1), 1, 0), memory))
    host.fill_(2.0)
    assert (device.memory[memory.address].view("float32") == 2).all()
    del memory
    gc.collect()
    assert len(device.memory) == 1
    del host
    gc.collect()
    assert not device.memory


def test_another_stream_waits(device):
    out = attention(*(Pretended(each) for each in arrays()), stream=48)
    assert device.calls[0][0] == 48
    for consumer, waits in ((48, 0), (-1, 0), (None, 1), (7, 2)):
        out.__dlpack__(stream=consumer)
        assert device.waits == waits
    default = attention(*(Pretended(each) for each in arrays()), stream=0)
    default.__dlpack__(stream=1)
    default.__dlpack__()
    assert device.waits == 2
    with pytest.raises(BufferError, match="another device"):
        out.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="not copied"):
        out.__dlpack__(copy=True)


def test_stream_objects_and_what_producers_hear(device):
    class Stream:
        def __cuda_stream__(self):
            return (0, 96)

    q, k, v = (Pretended(each) for each in arrays())
    mask = Pretended(np.ones((2, 1, 5, 7), bool))
    attention(q, k, v, mask, stream=Stream())
    assert device.calls[0][0] == 96 and mask.streams == q.streams == [96]
    with pytest.raises(ValueError, match="stream is -1"):
        attention(q, k, v, stream=-1)
    with pytest.raises(TypeError, match="stream is a str"):
        attention(q, k, v, stream="0")
    with pytest.raises(ValueError, match="q is on the CPU"):
        attention(*arrays(), stream=0)
    with pytest.raises(ValueError, match="q is on cpu"):
        attention(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), stream=0)


def test_the_library_takes_outputs_in(device):
    q, k, v = (WithNamespace(each) for each in arrays())
    (word, out), (_, lse) = attention(q, k, v, return_lse=True)
    assert word == "taken" and isinstance(out, _device_arrays.DeviceArray) and lse.shape == (2, 4, 5)


def test_out_packed_and_intervals(device):
    q, k, v = arrays()
    pair = np.zeros((1, 2, 7), np.int32), np.full((1, 2, 7), 3, np.int32)
    out = Pretended(np.full((2, 5, 4, 3), np.nan, "float32"))
    result = attention(*(Pretended(each) for each in (q, k, v)), key_intervals=[Pretended(e) for e in pair], out=out)
    assert result is out
    offsets = np.array([0, 2, 5], np.int32), np.array([0, 4, 7], np.int32)
    packed = attention(
        *(Pretended(each[0]) for each in (q, k, v)),
        cu_seqlens_q=Pretended(offsets[0]),
        cu_seqlens_k=Pretended(offsets[1]),
        max_seqlen_q=3,
        max_seqlen_k=4,
    )
    have = device.memory[packed._tensor[0]].view("float32").reshape(5, 4, 3)
    np.testing.assert_array_equal(out.array, attention(q, k, v, key_intervals=pair))
    plain = attention(*(each[0] for each in (q, k, v)), cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    np.testing.assert_array_equal(have, plain)
    assert len(device.calls) == 2


def test_backward(device):
    q, k, v = arrays()
    dout, bias = np.ones((2, 5, 4, 3), "float32"), np.zeros((1, 1, 1, 7), "float32")
    out, lse = attention(q, k, v, attn_bias=bias, return_lse=True)
    there = [Pretended(each) for each in (dout, q, k, v, out, lse)]
    dq = Pretended(np.full_like(q, np.nan))
    have = attention_backward(*there, attn_bias=Pretended(bias), return_dbias=True, dq=dq, stream=48)
    assert have[0] is dq and device.calls[0][0] == 48 and all(each.streams == [48] for each in there)
    found = [dq.array, *(device.memory[each._tensor[0]].view("float32").reshape(each.shape) for each in have[1:])]
    for ours, plain in zip(found, attention_backward(dout, q, k, v, out, lse, attn_bias=bias, return_dbias=True)):
        np.testing.assert_array_equal(ours, plain)
    with pytest.raises(ValueError, match="^dout is on the CPU, but q is on CUDA device 0"):
        attention_backward(dout, *there[1:])


def test_managed_and_pinned_memory(device):
    managed = attention(*(Pretended(each, kind=13) for each in arrays()))
    assert managed.__dlpack_device__() == (2, 0) and len(device.calls) == 1
    assert _device_arrays.device_of(Pretended(arrays()[0], kind=3), "q") == (_device_arrays.CPU, 0)


def test_refusals(device):
    q, k, v = arrays()
    there = [Pretended(each) for each in (q, k, v)]
    with pytest.raises(ValueError, match="^k is on the CPU, but q is on CUDA device 0; "):
        attention(there[0], k, there[2])
    with pytest.raises(ValueError, match="^v is on CUDA device 1, but q is on CUDA device 0; "):
        attention(*there[:2], Pretended(v, index=1))
    with pytest.raises(ValueError, match="^attn_mask is on CUDA device 0, but q is on the CPU; "):
        attention(q, k, v, Pretended(np.ones((2, 7), bool)))
    with pytest.raises(ValueError, match="^key_intervals end is on the CPU"):
        start = np.zeros((1, 1, 7), np.int32)
        attention(*there, key_intervals=(Pretended(start), start))
    with pytest.raises(NotImplementedError, match="^q is on DLPack device type 10; "):
        attention(Pretended(q, kind=10), *there[1:])
    with pytest.raises(ValueError, match="^k has 3 axes"):
        attention(there[0], Pretended(k[0]), there[2])

    class Numba:
        __cuda_array_interface__ = {"version": 3}

    with pytest.raises(TypeError, match="give cupy.asarray"):
        attention(Numba(), *there[1:])
    with pytest.raises(ValueError, match="out is on the CPU"):
        attention(*there, out=np.empty((2, 5, 4, 3), "float32"))
    assert not device.calls


def test_read_only_outputs_are_refused(device, monkeypatch):
    """A capsule of DLPack 1.0 says so; here the flag is set by hand in what the extension reads."""
    inspect = _native.inspect
    monkeypatch.setattr(_arrays._native, "inspect", lambda capsule: (*inspect(capsule)[:6], True))
    with pytest.raises(ValueError, match="out is read-only"):
        attention(*(Pretended(each) for each in arrays()), out=Pretended(np.empty((2, 5, 4, 3), "float32")))


def test_the_extension_reads_the_flag_of_a_versioned_capsule():
    array = np.zeros(3, "float32")
    assert _native.inspect(array.__dlpack__(max_version=(1, 0)))[6] is False
    with pytest.raises(TypeError, match="must be a tuple"):
        _native.export(array, None)
    with pytest.raises(TypeError, match="2 arguments"):
        _native.export(array)
    array.flags.writeable = False
    assert _native.inspect(array.__dlpack__(max_version=(1, 0)))[6] is True


class Stack:
    """The part of CuPy that is used, on host memory."""

    class ndarray(Pretended):  # noqa: N801
        @property
        def dtype(self):
            return self.array.dtype

    def __init__(self):
        self.entered, self.current = [], 64
        stack = self

        class Place:
            def __init__(self, *what):
                self.what = what

            def __enter__(self):
                stack.entered.append(self.what)

            def __exit__(self, *error):
                stack.entered.pop()

        def empty(shape, dtype):
            assert ("device", 0) in stack.entered
            stack.seen = list(stack.entered)
            return Stack.ndarray(np.full(shape, np.nan, dtype))

        def alloc(num_bytes):
            memory = np.empty(num_bytes, np.uint8)
            return types.SimpleNamespace(ptr=memory.ctypes.data, memory=memory)

        self.empty = empty
        self.cuda = types.SimpleNamespace(
            Device=lambda index: Place("device", index),
            Stream=types.SimpleNamespace(from_external=lambda each: Place("stream", each.__cuda_stream__()[1])),
            ExternalStream=lambda handle: Place("old stream", handle),
            get_current_stream=lambda index: types.SimpleNamespace(ptr=stack.current),
            alloc=alloc,
        )
        self.module = types.SimpleNamespace(ndarray=Stack.ndarray, empty=empty, cuda=self.cuda)


def test_cupy_lends_outputs_on_its_current_stream(device, monkeypatch):
    stack = Stack()
    monkeypatch.setitem(sys.modules, "cupy", stack.module)
    q, k, v = (Stack.ndarray(each) for each in arrays())
    out, lse = attention(q, k, v, return_lse=True)
    assert isinstance(out, Stack.ndarray) and isinstance(lse, Stack.ndarray) and not np.isnan(out.array).any()
    assert device.calls[0][0] == 64 and q.streams == [64] and stack.seen == [("device", 0)]
    attention(q, k, v, stream=32)
    assert device.calls[1][0] == 32 and stack.seen == [("device", 0), ("stream", 32)]
    del stack.cuda.Stream.from_external  # CuPy before 14
    attention(q, k, v, stream=32)
    assert stack.seen == [("device", 0), ("old stream", 32)]
    address, memory = device.calls[1][1](256)
    assert address == memory.ptr and not stack.entered


@pytest.mark.skipif(_native.cuda_devices() > 0, reason="a CUDA device is here: nothing to be refused")
def test_without_a_driver_a_sentence_says_so():
    with pytest.raises((NotImplementedError, OSError), match="CUDA|cuda"):
        attention(*(Pretended(each) for each in arrays("float16")))
    with pytest.raises((NotImplementedError, OSError), match="CUDA|cuda"):
        _native.allocate(0, 16)
    with pytest.raises((NotImplementedError, OSError), match="CUDA|cuda"):
        _native.synchronize(0)
