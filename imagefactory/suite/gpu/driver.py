"""The CUDA driver's library by ctypes: the calls that T0 makes, and nothing of CUDA's toolkit.

Names and numbers are those of the CUDA Driver API. Calls are asked for by the names that the library exports:
`_v2` where cuda.h puts that name in place of the plain one, which new drivers keep for old programs.
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

SHAPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid": (ctypes.c_char_p, ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.c_char_p, ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDeviceTotalMem_v2": (ctypes.POINTER(ctypes.c_size_t), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
    "cuMemAlloc_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemcpyHtoD_v2": (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_size_t),
    "cuModuleLoadDataEx": (
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_char_p,
        ctypes.c_uint,
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_void_p),
    ),
    "cuModuleGetFunction": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p),
    "cuModuleUnload": (ctypes.c_void_p,),
    "cuLaunchKernel": (
        ctypes.c_void_p,
        *[ctypes.c_uint] * 7,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_void_p),
    ),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class DriverError(Exception):
    """A call answered something else than success. `code` is its CUresult, -1 for a call that is missing."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.call, self.code = call, code


@dataclass(frozen=True)
class Device:
    """`uuid` is `GPU-...`, or `MIG-...` for a slice of a GPU; `parent` then is the GPU's own, else empty."""

    ordinal: int
    handle: int
    name: str
    capability: str
    uuid: str
    parent: str
    memory: int
    prohibited: bool


class Driver:
    """libcuda, opened. Raises OSError where the loader finds none.

    `sources` are kernels in its `language`, `compiled_by` who makes code of them, by the call `compiles`.
    """

    language, compiled_by, compiles = "PTX", "the driver", "cuModuleLoadDataEx"
    file = "libcuda.so"
    sources = kernels.PTX

    def __init__(self, library: str = LIBRARY) -> None:
        self.library = ctypes.CDLL(library)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises DriverError for any answer but success."""
        self.ask(self.library, name, SHAPES[name], arguments)

    def ask(self, library: Any, name: str, shape: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        """Calls what a library exports under that name."""
        try:
            function = getattr(library, name)
        except AttributeError:
            raise DriverError(name, -1, "this driver has no such call") from None
        function.argtypes, function.restype = shape, ctypes.c_int
        code = function(*arguments)
        if code != 0:
            raise DriverError(name, code, self.explain(code))

    def begin(self) -> None:
        """Before any other call."""
        self.call("cuInit", 0)

    def explain(self, code: int) -> str:
        """`CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected`, in the driver's words."""
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            function = getattr(self.library, name, None)
            if function is not None and function(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode("utf-8", "replace"))
        return f"{words[0]} ({code}): {words[1]}" if len(words) == 2 else f"CUDA error {code}"

    def version(self) -> str:
        """The newest CUDA that this driver takes: `12.4`."""
        number = self.read_int("cuDriverGetVersion")
        return f"{number // 1000}.{number % 1000 // 10}"

    def read_int(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def devices(self) -> tuple[Device, ...]:
        return tuple(self.device(ordinal) for ordinal in range(self.read_int("cuDeviceGetCount")))

    def device(self, ordinal: int) -> Device:
        handle = self.read_int("cuDeviceGet", ordinal)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), handle)
        memory = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        attribute = {
            key: self.read_int("cuDeviceGetAttribute", key, handle)
            for key in (COMPUTE_MODE, CAPABILITY_MAJOR, CAPABILITY_MINOR)
        }
        uuid, parent = self._uuids(handle)
        return Device(
            ordinal=ordinal,
            handle=handle,
            name=name.value.decode("utf-8", "replace"),
            capability=f"{attribute[CAPABILITY_MAJOR]}.{attribute[CAPABILITY_MINOR]}",
            uuid=uuid,
            parent=parent,
            memory=memory.value,
            prohibited=attribute[COMPUTE_MODE] == PROHIBITED,
        )

    def _uuids(self, handle: int) -> tuple[str, str]:
        """Of a slice (MIG) the first call tells the GPU, the second, of CUDA 11.4, the slice."""
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
        """The device's primary context, the one that frameworks use, current while it lasts.

        Afterwards the one that was current before is so again: a framework's own, in its process.
        """
        context = ctypes.c_void_p()
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
        """The address of `count` bytes on the device, given back at the end."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), count)
        try:
            yield address.value
        finally:
            self.call("cuMemFree_v2", address.value)

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", address, data, len(data))

    def read(self, address: int, count: int) -> bytes:
        data = ctypes.create_string_buffer(count)
        self.call("cuMemcpyDtoH_v2", data, address, count)
        return data.raw

    def free_memory(self) -> int:
        """Bytes of the device that nobody holds."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextlib.contextmanager
    def module(self, ptx: str) -> Iterator[ctypes.c_void_p]:
        """PTX compiled for the device by the driver; a DriverError ends with what its compiler said."""
        error, info = ctypes.create_string_buffer(LOG_BYTES), ctypes.create_string_buffer(LOG_BYTES)
        options = (ctypes.c_int * 4)(INFO_LOG, INFO_LOG_BYTES, ERROR_LOG, ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 4)(ctypes.addressof(info), LOG_BYTES, ctypes.addressof(error), LOG_BYTES)
        module = ctypes.c_void_p()
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 4, options, values)
        except DriverError as failure:
            said = " ".join(error.value.decode("utf-8", "replace").split())
            text = f"{self.explain(failure.code)}{f'; its compiler says: {said}' if said else ''}"
            raise DriverError(failure.call, failure.code, text) from None
        try:
            yield module
        finally:
            self.call("cuModuleUnload", module)

    def launch(self, module: ctypes.c_void_p, name: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Starts a kernel, `blocks` of 128 threads, and waits for its end. `arguments` are ctypes values."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        self.call("cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, None, pointers, None)
        self.call("cuCtxSynchronize")


THREADS = 128
