"""The CUDA driver library through ctypes: the calls of T0, without the CUDA toolkit.

Names and numbers are from the CUDA Driver API. Calls have the names that the library exports: `_v2` if cuda.h
replaces the plain name, which new drivers export only for old programs.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import kernels

LIBRARY = "libcuda.so.1"

# CUresult
OUT_OF_MEMORY, STUB_LIBRARY, DEVICE_UNAVAILABLE, NO_DEVICE, INVALID_DEVICE = 2, 34, 46, 100, 101
ECC_UNCORRECTABLE, OPERATING_SYSTEM, UNKNOWN = 214, 304, 999
INVALID_IMAGE, NO_BINARY_FOR_GPU = 200, 209
INVALID_PTX, UNSUPPORTED_PTX_VERSION, JIT_COMPILER_NOT_FOUND = 218, 222, 221
SYSTEM_NOT_READY, SYSTEM_DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED = 802, 803, 804

# CUdevice_attribute
COMPUTE_MODE, CAPABILITY_MAJOR, CAPABILITY_MINOR = 20, 75, 76
PROHIBITED = 2

# CUjit_option
INFO_LOG, INFO_LOG_BYTES, ERROR_LOG, ERROR_LOG_BYTES = 3, 4, 5, 6
LOG_BYTES = 8192

THREADS = 128

POINTER, SIZE, INT, UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
TO_POINTER, TO_SIZE, TO_INT = (ctypes.POINTER(kind) for kind in (POINTER, SIZE, INT))
LAUNCH_SHAPE = (POINTER, *[UINT] * 7, POINTER, TO_POINTER, TO_POINTER)
SHAPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (UINT,),
    "cuDriverGetVersion": (TO_INT,),
    "cuDeviceGetCount": (TO_INT,),
    "cuDeviceGet": (TO_INT, INT),
    "cuDeviceGetName": (ctypes.c_char_p, INT, INT),
    "cuDeviceGetUuid": (ctypes.c_char_p, INT),
    "cuDeviceGetUuid_v2": (ctypes.c_char_p, INT),
    "cuDeviceGetAttribute": (TO_INT, INT, INT),
    "cuDeviceTotalMem_v2": (TO_SIZE, INT),
    "cuDevicePrimaryCtxRetain": (TO_POINTER, INT),
    "cuDevicePrimaryCtxRelease_v2": (INT,),
    "cuCtxPushCurrent_v2": (POINTER,),
    "cuCtxPopCurrent_v2": (TO_POINTER,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (TO_SIZE, TO_SIZE),
    "cuMemAlloc_v2": (TO_POINTER, SIZE),
    "cuMemFree_v2": (POINTER,),
    "cuMemcpyHtoD_v2": (POINTER, ctypes.c_char_p, SIZE),
    "cuMemcpyDtoH_v2": (ctypes.c_char_p, POINTER, SIZE),
    "cuModuleLoadDataEx": (TO_POINTER, ctypes.c_char_p, UINT, TO_INT, TO_POINTER),
    "cuModuleGetFunction": (TO_POINTER, POINTER, ctypes.c_char_p),
    "cuModuleUnload": (POINTER,),
    "cuLaunchKernel": LAUNCH_SHAPE,
    "cuGetErrorName": (INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (INT, ctypes.POINTER(ctypes.c_char_p)),
}


class DriverError(Exception):
    """A failed call. `code` is its CUresult, -1 for a function that the library does not have."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.call, self.code = call, code


@dataclass(frozen=True)
class Device:
    """A GPU.

    `uuid` is `GPU-...`, or `MIG-...` for a slice; `parent` is then the UUID of the whole GPU, else empty.
    """

    ordinal: int
    handle: int
    name: str
    capability: str
    uuid: str
    parent: str
    memory: int
    prohibited: bool


@dataclass(frozen=True)
class Calls:
    """The names of the calls in both libcuda and HIP."""

    start: str = "cuInit"
    count: str = "cuDeviceGetCount"
    allocate: str = "cuMemAlloc_v2"
    free: str = "cuMemFree_v2"
    write: str = "cuMemcpyHtoD_v2"
    read: str = "cuMemcpyDtoH_v2"
    memory: str = "cuMemGetInfo_v2"
    function: str = "cuModuleGetFunction"
    launch: str = "cuLaunchKernel"
    wait: str = "cuCtxSynchronize"
    unload: str = "cuModuleUnload"


class Driver:
    """A loaded libcuda. Raises OSError if the loader finds none.

    `sources` are kernels in its `language`. `compiled_by` compiles them with the call `compiles`.
    """

    language, compiled_by, compiles = "PTX", "the driver", "cuModuleLoadDataEx"
    file = "libcuda.so"
    sources = kernels.PTX
    calls = Calls()
    shapes = SHAPES

    def __init__(self, library: str = LIBRARY) -> None:
        self.library = ctypes.CDLL(library)

    def library_of(self, name: str) -> Any:  # noqa: ARG002
        return self.library

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises DriverError for any result except success."""
        try:
            function = getattr(self.library_of(name), name)
        except AttributeError:
            raise DriverError(name, -1, "this driver does not have this function") from None
        function.argtypes, function.restype = self.shapes[name], INT
        code = function(*arguments)
        if code != 0:
            raise DriverError(name, code, self.explain(code))

    def begin(self) -> None:
        """Initialize the library. Call this before all other functions."""
        self.call(self.calls.start, 0)

    def explain(self, code: int) -> str:
        """Return the driver's text for an error: `CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is
        detected`.
        """
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            function = getattr(self.library, name, None)
            if function is not None and function(INT(code), ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode("utf-8", "replace"))
        return f"{words[0]} ({code}): {words[1]}" if len(words) == 2 else f"CUDA error {code}"

    def version(self) -> str:
        """Return the newest CUDA version that this driver supports: `12.4`."""
        number = self.read_int("cuDriverGetVersion")
        return f"{number // 1000}.{number % 1000 // 10}"

    def read_int(self, name: str, *arguments: Any) -> int:
        value = INT()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def devices(self) -> tuple[Device, ...]:
        return tuple(self.device(ordinal) for ordinal in range(self.read_int(self.calls.count)))

    def device(self, ordinal: int) -> Device:
        handle = self.read_int("cuDeviceGet", ordinal)
        name, memory = ctypes.create_string_buffer(256), SIZE()
        self.call("cuDeviceGetName", name, len(name), handle)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        mode, major, minor = (
            self.read_int("cuDeviceGetAttribute", key, handle)
            for key in (COMPUTE_MODE, CAPABILITY_MAJOR, CAPABILITY_MINOR)
        )
        uuid, parent = self._uuids(handle)
        return Device(
            ordinal=ordinal,
            handle=handle,
            name=name.value.decode("utf-8", "replace"),
            capability=f"{major}.{minor}",
            uuid=uuid,
            parent=parent,
            memory=memory.value,
            prohibited=mode == PROHIBITED,
        )

    def _uuids(self, handle: int) -> tuple[str, str]:
        """Return the UUID of a device, and for a MIG slice also that of its whole GPU, else "".

        For a slice, cuDeviceGetUuid returns the UUID of the GPU, and cuDeviceGetUuid_v2 (CUDA 11.4) its own.
        """
        whole = self._uuid("cuDeviceGetUuid", handle)
        try:
            own = self._uuid("cuDeviceGetUuid_v2", handle)
        except DriverError as error:
            if error.code != -1:
                raise
            own = whole
        return (f"GPU-{own}", "") if own == whole else (f"MIG-{own}", f"GPU-{whole}")

    def _uuid(self, call: str, handle: int) -> str:
        raw = ctypes.create_string_buffer(16)
        self.call(call, raw, handle)
        text = raw.raw.hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    @contextlib.contextmanager
    def context(self, device: Device) -> Iterator[None]:
        """Make the primary context of the device current, which frameworks use too.

        Afterwards the previous context is current again: that of a framework in its process.
        """
        context = POINTER()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.handle)
        try:
            self.call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self.call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", device.handle)

    @contextlib.contextmanager
    def memory(self, count: int) -> Iterator[int]:
        """Yield the address of `count` bytes on the device. They are freed at the end."""
        address = POINTER()
        self.call(self.calls.allocate, ctypes.byref(address), count)
        try:
            yield address.value or 0
        finally:
            self.call(self.calls.free, address)

    def write(self, address: int, data: bytes) -> None:
        self.call(self.calls.write, address, data, len(data))

    def read(self, address: int, count: int) -> bytes:
        data = ctypes.create_string_buffer(count)
        self.call(self.calls.read, data, address, count)
        return data.raw

    def free_memory(self) -> int:
        """Return the free bytes of the device."""
        free, total = SIZE(), SIZE()
        self.call(self.calls.memory, ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextlib.contextmanager
    def module(self, source: str) -> Iterator[ctypes.c_void_p]:
        """Compile a kernel for the device. A DriverError ends with the compiler's message."""
        module = self.load(source)
        try:
            yield module
        finally:
            self.call(self.calls.unload, module)

    def load(self, source: str) -> ctypes.c_void_p:
        error, info = ctypes.create_string_buffer(LOG_BYTES), ctypes.create_string_buffer(LOG_BYTES)
        options = (INT * 4)(INFO_LOG, INFO_LOG_BYTES, ERROR_LOG, ERROR_LOG_BYTES)
        values = (POINTER * 4)(ctypes.addressof(info), LOG_BYTES, ctypes.addressof(error), LOG_BYTES)
        module = POINTER()
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), source.encode(), 4, options, values)
        except DriverError as failure:
            log = " ".join(error.value.decode("utf-8", "replace").split())
            text = f"{self.explain(failure.code)}{f'; its compiler says: {log}' if log else ''}"
            raise DriverError(failure.call, failure.code, text) from None
        return module

    def launch(self, module: ctypes.c_void_p, name: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Run a kernel with `blocks` of 128 threads and wait for its end. `arguments` are ctypes values."""
        function = POINTER()
        self.call(self.calls.function, ctypes.byref(function), module, name.encode())
        pointers = (POINTER * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        self.call(self.calls.launch, function, blocks, 1, 1, THREADS, 1, 1, 0, None, pointers, None)
        self.call(self.calls.wait)
