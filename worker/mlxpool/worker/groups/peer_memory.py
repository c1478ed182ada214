"""Memory of a CUDA GPU that the GPUs of other processes on the machine write, by the driver's API.

The libraries libcuda and NVML come with the driver, so they exist wherever MLX computes on a CUDA
GPU. Only NVML knows the links of GPUs that this process does not see.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

HANDLE_BYTES = 64
IDENTITY_BYTES = 16
_LAZY_ENABLE_PEER_ACCESS = 1
_P2P_OVER_NVLINK = 2  # argument of nvmlDeviceGetP2PStatus
_SUCCESS = 0


class PeerMemoryError(RuntimeError):
    """The driver refused a call; the message has the call and the driver's name of the error."""


class PeerMemory(Protocol):
    """Allocates memory of this process's GPU, and maps memory of other processes."""

    def identity(self) -> bytes:
        """Returns IDENTITY_BYTES bytes by which other processes know the GPU.

        Raises PeerMemoryError.
        """

    def over_nvlink(self, identity: bytes) -> bool:
        """Returns whether NVLink is known to connect the GPU with the GPU of this identity."""

    def allocate(self, size: int) -> int:
        """Allocates `size` bytes of zeros; returns their address. Raises PeerMemoryError."""

    def export(self, address: int) -> bytes:
        """Returns a handle of HANDLE_BYTES, by which another process maps the memory.

        Raises PeerMemoryError.
        """

    def open(self, handle: bytes) -> int:
        """Maps memory that another process exported; returns its address in this process.

        Raises PeerMemoryError if this GPU cannot access the memory: on another machine, in another
        container, or on a GPU without a peer link.
        """

    def close(self, address: int) -> None:
        """Unmaps memory that `open` mapped."""

    def free(self, address: int) -> None:
        """Frees memory that `allocate` returned."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaPeerMemory:
    """Implements PeerMemory by libcuda, on MLX's GPU: the first that this process sees."""

    def __init__(
        self, library: ctypes.CDLL | None = None, management: ctypes.CDLL | None = None
    ) -> None:
        """Raises PeerMemoryError without a driver or a GPU.

        `library`, `management`: replace libcuda and NVML.
        """
        try:
            self._cuda = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerMemoryError(f"NVIDIA's driver is not installed: {error}") from error
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._device, self._management = device, management

    def identity(self) -> bytes:
        """Returns the UUID of the GPU; see PeerMemory."""
        identity = (ctypes.c_ubyte * IDENTITY_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(identity), self._device)
        return bytes(identity)

    def over_nvlink(self, identity: bytes) -> bool:
        """Returns whether NVLink connects this GPU with another GPU; see PeerMemory.

        False for a part of a GPU (MIG), which has no NVLink.
        """
        own = self.identity()
        if own == identity:
            return False
        try:
            nvml = self._management or ctypes.CDLL("libnvidia-ml.so.1")
            if nvml.nvmlInit_v2() != _SUCCESS:
                return False
            try:
                return _nvlink_between(nvml, own, identity)
            finally:
                nvml.nvmlShutdown()
        except (OSError, AttributeError):
            return False

    def allocate(self, size: int) -> int:
        """Allocates `size` bytes of zeros; see PeerMemory."""
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            try:
                self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
                self._call("cuCtxSynchronize")
            except PeerMemoryError:
                with suppress(PeerMemoryError):
                    self._call("cuMemFree_v2", address)
                raise
        return address.value

    def export(self, address: int) -> bytes:
        """Returns a handle of HANDLE_BYTES, by which another process maps the memory.

        See PeerMemory.
        """
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Maps memory that another process exported; see PeerMemory."""
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                given,
                ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
            )
        return address.value

    def close(self, address: int) -> None:
        """Unmaps memory that `open` mapped; see PeerMemory."""
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def free(self, address: int) -> None:
        """Frees memory that `allocate` returned; see PeerMemory."""
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Returns a context in which MLX's CUDA context is this thread's current context."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self._cuda, name)(*arguments)
        except AttributeError as error:
            raise PeerMemoryError(f"NVIDIA's driver has no {name}") from error
        if code != _SUCCESS:
            raise PeerMemoryError(f"{name} failed: {self._error_name(code)}")

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        known = self._cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) == _SUCCESS
        return (text.value or b"").decode() if known else f"error {code}"


def _nvlink_between(nvml: ctypes.CDLL, *identities: bytes) -> bool:
    """Returns whether NVLink connects two GPUs; `nvml`: the initialised library NVML."""
    devices = []
    for identity in identities:
        device, name = ctypes.c_void_p(), f"GPU-{uuid.UUID(bytes=identity)}".encode()
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)) != _SUCCESS:
            return False
        devices.append(device)
    status = ctypes.c_int(-1)
    code = nvml.nvmlDeviceGetP2PStatus(*devices, _P2P_OVER_NVLINK, ctypes.byref(status))
    return bool(code == _SUCCESS and status.value == _SUCCESS)
