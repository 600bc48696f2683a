"""Arrays without PyTorch's operators: where they are, whose memory outputs and workspace get, and on which stream.

NumPy, CuPy and PyTorch make their own outputs; on CUDA devices the last two lend from pools that reuse memory in the
order of the stream. For every other library the memory is ours (on CUDA devices the C library's), and outputs are handed
to the caller's library through DLPack where it has from_dlpack.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any, Iterator, List, Optional, Tuple

from . import _native

CPU, CUDA = 1, 2
# DLPack's device types that these two can read: pinned host memory, and managed memory.
_READABLE = {1: CPU, 3: CPU, 2: CUDA, 13: CUDA}
# The legacy default stream goes by two handles; DLPack forbids the first.
_LEGACY = (0, 1)

Device = Tuple[int, int]


def device_of(array: Any, name: str) -> Device:
    """(CPU or CUDA, index) of a NumPy array or DLPack producer, or a sentence."""
    if hasattr(array, "__array_interface__"):
        return CPU, 0
    if hasattr(array, "__dlpack_device__"):
        kind, index = (int(each) for each in array.__dlpack_device__())
        if kind in _READABLE:
            return _READABLE[kind], index if _READABLE[kind] == CUDA else 0
        raise NotImplementedError(
            f"{name} is on DLPack device type {kind}; it must be on the CPU (type 1) or on a CUDA device (type 2)"
        )
    if hasattr(array, "__dlpack__"):
        return CPU, 0
    given = type(array).__name__
    if hasattr(array, "__cuda_array_interface__"):
        raise TypeError(
            f"{name} is a {given}, which has __cuda_array_interface__ but not __dlpack__: give cupy.asarray({name}) or "
            f"torch.as_tensor({name})"
        )
    raise TypeError(f"{name} is a {given}; it must be a NumPy array or have __dlpack__")


def say(device: Device) -> str:
    return "the CPU" if device[0] == CPU else f"CUDA device {device[1]}"


def handle_of(stream: Any) -> Optional[int]:
    """The driver's handle of a stream argument; None stays None."""
    if stream is None:
        return None
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, int) and not isinstance(stream, bool):
        if 0 <= stream < 2**64:
            return stream
        raise ValueError(f"stream is {stream}; a CUDA stream's handle is >= 0 (0 is the legacy default stream)")
    raise TypeError(
        f"stream is a {type(stream).__name__}; it must be a CUDA stream's handle as an int, or have __cuda_stream__"
    )


def dlpack_stream(handle: int) -> int:
    """A handle as DLPack's consumers name it to producers."""
    return 1 if handle in _LEGACY else handle


# ---- arrays of ours --------------------------------------------------------------------------------------------------


class HostMemory:
    """Memory of the host, aligned to 64 bytes, which libraries want that share it."""

    index = 0

    def __init__(self, num_bytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(num_bytes + 63)
        self.address = (ctypes.addressof(self._buffer) + 63) // 64 * 64


class DeviceMemory:
    """Memory of a CUDA device; given back, after a wait for the device, when nobody refers to it."""

    def __init__(self, index: int, num_bytes: int) -> None:
        self.index = index
        self.address = _native.allocate(index, num_bytes)

    def __del__(self, native: Any = _native) -> None:
        address = self.__dict__.pop("address", 0)
        if address:
            with contextlib.suppress(Exception):
                native.release(self.index, address)


_ITEM_BYTES = {"bool": 1, "int32": 4, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class DeviceArray:
    """A contiguous array that other libraries take through DLPack (`from_dlpack`)."""

    def __init__(self, shape: Tuple[int, ...], dtype: str, device: Device, stream: int) -> None:
        self.shape, self.dtype, self.stream = tuple(shape), dtype, stream
        elements = 1
        strides: List[int] = []
        for extent in reversed(self.shape):
            strides.insert(0, elements)
            elements *= extent
        num_bytes = elements * _ITEM_BYTES[dtype]
        self._memory = HostMemory(num_bytes) if device[0] == CPU else DeviceMemory(device[1], num_bytes)
        self._tensor = (self._memory.address, dtype, self.shape, tuple(strides), *device)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, on {say(self.__dlpack_device__())})"

    def __dlpack_device__(self) -> Device:
        return self._tensor[4:]

    def __dlpack__(
        self,
        *,
        stream: Optional[int] = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: Optional[bool] = None,
    ) -> Any:
        """A capsule. Waits for the device where the consumer's stream is not the one that wrote the array."""
        if dl_device is not None and tuple(int(each) for each in dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is on {say(self.__dlpack_device__())}; it is not copied to another device")
        if copy:
            raise BufferError("the array shares its memory; it is not copied")
        on_cuda = self.__dlpack_device__()[0] == CUDA
        if on_cuda and stream != -1 and dlpack_stream(1 if stream is None else stream) != dlpack_stream(self.stream):
            _native.synchronize(self._memory.index)
        return _native.export(self._tensor, self._memory)


# ---- who lends memory ------------------------------------------------------------------------------------------------


class _Handle:
    """A stream's handle in the form of the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> Tuple[int, int]:
        return 0, self._handle


class _Cupy:
    def __init__(self, like: Any, index: int, stream: Optional[int]) -> None:
        import cupy  # pyright: ignore[reportMissingImports]

        self.cupy, self.like, self.index, self._given = cupy, like, index, stream
        self.stream = int(cupy.cuda.get_current_stream(index).ptr) if stream is None else stream

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        cuda, stream = self.cupy.cuda, contextlib.nullcontext()
        with cuda.Device(self.index):
            if self._given is not None and hasattr(cuda.Stream, "from_external"):
                stream = cuda.Stream.from_external(_Handle(self._given))
            elif self._given is not None:
                stream = cuda.ExternalStream(self._given)
            with stream:
                yield

    def empty(self, shape: Tuple[int, ...], dtype: str) -> Any:
        with self._there():
            return self.cupy.empty(shape, self.like.dtype if str(self.like.dtype) == dtype else dtype)

    def allocate(self, num_bytes: int) -> Tuple[int, Any]:
        with self._there():
            memory = self.cupy.cuda.alloc(num_bytes)
        return int(memory.ptr), memory

    def hand_over(self, array: Any) -> Any:
        return array


class _Torch:
    def __init__(self, like: Any, device: Device, stream: Optional[int]) -> None:
        import torch

        self.torch, self.context, self.stream = torch, None, 0
        self.device = torch.device("cuda", device[1]) if device[0] == CUDA else torch.device("cpu")
        if device[0] == CUDA:
            self.context = on_torch_stream(self.device, stream)
            self.stream = torch.cuda.current_stream(self.device).cuda_stream if stream is None else stream

    def empty(self, shape: Tuple[int, ...], dtype: str) -> Any:
        on_stream = contextlib.nullcontext() if self.context is None else self.torch.cuda.stream(self.context)
        with on_stream:
            return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def allocate(self, num_bytes: int) -> Tuple[int, Any]:
        memory = self.empty((num_bytes,), "uint8")
        return memory.data_ptr(), memory

    def hand_over(self, array: Any) -> Any:
        return array


def on_torch_stream(device: Any, handle: Optional[int]) -> Any:
    """PyTorch's object for a stream handle; None for the current one."""
    import torch

    if handle is None:
        return None
    return torch.cuda.default_stream(device) if handle in _LEGACY else torch.cuda.ExternalStream(handle, device=device)


class _NumPy:
    """For NumPy arrays, and on the CPU for those whose library takes nothing in."""

    stream = 0

    def empty(self, shape: Tuple[int, ...], dtype: str) -> Any:
        import numpy

        try:
            return numpy.empty(shape, dtype)
        except TypeError:
            raise TypeError(
                f"NumPy has no {dtype} here (ml_dtypes adds it): give out= an array of your library"
            ) from None

    def hand_over(self, array: Any) -> Any:
        return array


class _Own:
    def __init__(self, like: Any, device: Device, stream: Optional[int]) -> None:
        self.like, self.device, self.stream = like, device, stream or 0

    def empty(self, shape: Tuple[int, ...], dtype: str) -> Any:
        return DeviceArray(shape, dtype, self.device, self.stream)

    def allocate(self, num_bytes: int) -> Tuple[int, Any]:
        memory = DeviceMemory(self.device[1], num_bytes)
        return memory.address, memory

    def hand_over(self, array: Any) -> Any:
        convert = _taker(self.like)
        return array if convert is None else convert(array)


def _taker(array: Any) -> Any:
    """from_dlpack of the array's library, or None."""
    namespace = getattr(array, "__array_namespace__", None)
    return None if namespace is None else getattr(namespace(), "from_dlpack", None)


def lender_of(array: Any, device: Device, stream: Optional[int]) -> Any:
    """Who makes arrays beside `array`: `.stream` is the handle to run on (the library's current stream when none is
    given), `.empty(shape, dtype)` an array, `.allocate(bytes)`, on CUDA devices, (address, owner), and
    `.hand_over(array)` what the caller receives."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        return _Torch(array, device, stream)
    if device[0] == CPU:
        return _NumPy() if hasattr(array, "__array_interface__") or _taker(array) is None else _Own(array, device, None)
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return _Cupy(array, device[1], stream)
    return _Own(array, device, stream)
