"""Arrays on CUDA devices without PyTorch's operators: whose allocator lends outputs and workspace, and on which stream.

CuPy and PyTorch lend from their own pools, which reuse memory in the order of the stream. For every other library the
memory is the C library's, and outputs are handed to the caller's library through DLPack where it has from_dlpack.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator, Optional, Tuple

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
    kind = type(array).__name__
    if hasattr(array, "__cuda_array_interface__"):
        raise TypeError(
            f"{name} is a {kind}, which has __cuda_array_interface__ but not __dlpack__: give cupy.asarray({name}) or "
            f"torch.as_tensor({name})"
        )
    raise TypeError(f"{name} is a {kind}; it must be a NumPy array or have __dlpack__")


def say(device: Device) -> str:
    return "the CPU" if device[0] == CPU else f"CUDA device {device[1]}"


def handle_of(stream: Any) -> Optional[int]:
    """The driver's handle of a stream argument; None stays None."""
    if stream is None:
        return None
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream >= 0:
            return stream
        raise ValueError(f"stream is {stream}; a CUDA stream's handle is >= 0 (0 is the legacy default stream)")
    raise TypeError(
        f"stream is a {type(stream).__name__}; it must be a CUDA stream's handle as an int, or have __cuda_stream__"
    )


def dlpack_stream(handle: int) -> int:
    """A handle as DLPack's consumers name it to producers."""
    return 1 if handle in _LEGACY else handle


# ---- arrays of ours --------------------------------------------------------------------------------------------------


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
    """A contiguous array on a CUDA device that other libraries take through DLPack (`from_dlpack`)."""

    def __init__(self, shape: Tuple[int, ...], dtype: str, index: int, stream: int) -> None:
        self.shape, self.dtype, self.stream = tuple(shape), dtype, stream
        elements = 1
        strides = []
        for extent in reversed(self.shape):
            strides.insert(0, elements)
            elements *= extent
        self._memory = DeviceMemory(index, elements * _ITEM_BYTES[dtype])
        self._tensor = (self._memory.address, dtype, self.shape, tuple(strides), CUDA, index)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device=cuda:{self._memory.index})"

    def __dlpack_device__(self) -> Device:
        return CUDA, self._memory.index

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
            raise BufferError(f"the array is on CUDA device {self._memory.index}; it is not copied to another device")
        if copy:
            raise BufferError("the array shares its memory; it is not copied")
        if stream != -1 and dlpack_stream(1 if stream is None else stream) != dlpack_stream(self.stream):
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
        import cupy

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
    def __init__(self, like: Any, index: int, stream: Optional[int]) -> None:
        import torch

        self.torch, self.device = torch, torch.device("cuda", index)
        self.context = on_torch_stream(self.device, stream)
        self.stream = torch.cuda.current_stream(self.device).cuda_stream if stream is None else stream

    def empty(self, shape: Tuple[int, ...], dtype: str) -> Any:
        with self.torch.cuda.stream(self.context):
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


class _Own:
    def __init__(self, like: Any, index: int, stream: Optional[int]) -> None:
        self.like, self.index, self.stream = like, index, stream or 0

    def empty(self, shape: Tuple[int, ...], dtype: str) -> Any:
        return DeviceArray(shape, dtype, self.index, self.stream)

    def allocate(self, num_bytes: int) -> Tuple[int, Any]:
        memory = DeviceMemory(self.index, num_bytes)
        return memory.address, memory

    def hand_over(self, array: Any) -> Any:
        namespace = getattr(self.like, "__array_namespace__", None)
        convert = getattr(namespace(), "from_dlpack", None) if namespace is not None else None
        return array if convert is None or not isinstance(array, DeviceArray) else convert(array)


def lender_for(array: Any, index: int, stream: Optional[int]) -> Any:
    """Who lends memory beside `array` on CUDA device `index`: `.stream` is the handle to run on (the library's current
    stream when none is given), `.empty(shape, dtype)` an array, `.allocate(bytes)` (address, owner), and
    `.hand_over(array)` what the caller receives."""
    for module, kind, lender in (("cupy", "ndarray", _Cupy), ("torch", "Tensor", _Torch)):
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(array, getattr(loaded, kind, ())):
            return lender(array, index, stream)
    return _Own(array, index, stream)
