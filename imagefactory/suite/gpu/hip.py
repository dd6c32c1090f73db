"""The HIP library through ctypes: the calls of driver.py for AMD GPUs.

Names, numbers and error codes are from the HIP runtime API and HIPRTC. The library is part of the image, like
all of ROCm; only the kernel driver belongs to the machine. The processor of a device is in a structure whose
layout differs between HIP 5 and 6, so the whole structure is searched.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from typing import Any

from . import kernels
from .driver import (
    INT,
    LAUNCH_SHAPE,
    LOG_BYTES,
    POINTER,
    SIZE,
    TO_INT,
    TO_POINTER,
    TO_SIZE,
    Calls,
    Device,
    Driver,
    DriverError,
)

# The newest first; in the loader's reach, or where ROCm is installed.
LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "/opt/rocm/lib/libamdhip64.so")
COMPILERS = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "/opt/rocm/lib/libhiprtc.so")

PROPERTIES_BYTES = 1 << 14  # more than the structure has in any version
PROCESSOR = re.compile(rb"(gfx[0-9]{1,2}[0-9a-f]{2})(?::[a-z]+[+-])*\0")

SHAPES: dict[str, tuple[Any, ...]] = {
    "hipInit": (ctypes.c_uint,),
    "hipRuntimeGetVersion": (TO_INT,),
    "hipGetDeviceCount": (TO_INT,),
    "hipSetDevice": (INT,),
    "hipDeviceGetName": (ctypes.c_char_p, INT, INT),
    "hipDeviceGetUuid": (ctypes.c_char_p, INT),
    "hipDeviceTotalMem": (TO_SIZE, INT),
    "hipGetDeviceProperties": (ctypes.c_char_p, INT),
    "hipGetDevicePropertiesR0600": (ctypes.c_char_p, INT),
    "hipDeviceSynchronize": (),
    "hipMemGetInfo": (TO_SIZE, TO_SIZE),
    "hipMalloc": (TO_POINTER, SIZE),
    "hipFree": (POINTER,),
    "hipMemcpyHtoD": (POINTER, ctypes.c_char_p, SIZE),
    "hipMemcpyDtoH": (ctypes.c_char_p, POINTER, SIZE),
    "hipModuleLoadData": (TO_POINTER, ctypes.c_char_p),
    "hipModuleGetFunction": (TO_POINTER, POINTER, ctypes.c_char_p),
    "hipModuleUnload": (POINTER,),
    "hipModuleLaunchKernel": LAUNCH_SHAPE,
    "hiprtcCreateProgram": (TO_POINTER, ctypes.c_char_p, ctypes.c_char_p, INT, POINTER, POINTER),
    "hiprtcCompileProgram": (POINTER, INT, ctypes.POINTER(ctypes.c_char_p)),
    "hiprtcGetProgramLogSize": (POINTER, TO_SIZE),
    "hiprtcGetProgramLog": (POINTER, ctypes.c_char_p),
    "hiprtcGetCodeSize": (POINTER, TO_SIZE),
    "hiprtcGetCode": (POINTER, ctypes.c_char_p),
    "hiprtcDestroyProgram": (TO_POINTER,),
}


class Hip(Driver):
    """A loaded libamdhip64 and libhiprtc. Raises OSError if the loader finds none."""

    language, compiled_by, compiles = "HIP", "HIPRTC", "hiprtcCompileProgram"
    file = "libamdhip64.so"
    sources = kernels.HIP
    shapes = SHAPES
    calls = Calls(
        start="hipInit",
        count="hipGetDeviceCount",
        allocate="hipMalloc",
        free="hipFree",
        write="hipMemcpyHtoD",
        read="hipMemcpyDtoH",
        memory="hipMemGetInfo",
        function="hipModuleGetFunction",
        launch="hipModuleLaunchKernel",
        wait="hipDeviceSynchronize",
        unload="hipModuleUnload",
    )

    def __init__(self) -> None:
        super().__init__(_first(LIBRARIES))
        self.compiler = ctypes.CDLL(_first(COMPILERS))
        self.processor = ""

    def library_of(self, name: str) -> Any:
        return self.compiler if name.startswith("hiprtc") else self.library

    def explain(self, code: int) -> str:
        """Return HIP's text for an error: `hipErrorNoDevice (100): no ROCm-capable device is detected`."""
        words = []
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = getattr(self.library, name)
            function.restype = ctypes.c_char_p
            words.append((function(INT(code)) or b"").decode("utf-8", "replace"))
        return f"{words[0]} ({code}): {words[1]}" if all(words) else f"HIP error {code}"

    def version(self) -> str:
        """Return the version of HIP: `7.0` for 70051831."""
        number = self.read_int("hipRuntimeGetVersion")
        return f"{number // 10_000_000}.{number // 100_000 % 100}"

    def device(self, ordinal: int) -> Device:
        name, raw = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        memory = SIZE()
        self.call("hipDeviceGetName", name, len(name), ordinal)
        self.call("hipDeviceTotalMem", ctypes.byref(memory), ordinal)
        self.call("hipDeviceGetUuid", raw, ordinal)
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        call = "hipGetDevicePropertiesR0600"
        if not hasattr(self.library, call):
            call = "hipGetDeviceProperties"
        self.call(call, properties, ordinal)
        processor = PROCESSOR.search(properties.raw)
        if processor is None:
            raise DriverError(call, -1, "the result contains no processor name")
        return Device(
            ordinal=ordinal,
            handle=ordinal,
            name=name.value.decode("utf-8", "replace"),
            capability=processor[1].decode(),  # `gfx90a`, without its features
            uuid=f"GPU-{raw.raw.decode('ascii', 'replace')}",  # the 16 digits that the kernel calls unique_id
            parent="",
            memory=memory.value,
            prohibited=False,
        )

    @contextlib.contextmanager
    def context(self, device: Device) -> Iterator[None]:
        """Select the device for this thread: HIP has one context for each device."""
        self.call("hipSetDevice", device.ordinal)
        self.processor = device.capability
        yield

    def load(self, source: str) -> ctypes.c_void_p:
        module = POINTER()
        self.call("hipModuleLoadData", ctypes.byref(module), self._compile(source))
        return module

    def _compile(self, source: str) -> bytes:
        """Return the code object."""
        program, size = POINTER(), SIZE()
        options = (ctypes.c_char_p * 1)(f"--offload-arch={self.processor}".encode())
        self.call("hiprtcCreateProgram", ctypes.byref(program), source.encode(), b"suite", 0, None, None)
        try:
            try:
                self.call("hiprtcCompileProgram", program, 1, options)
            except DriverError as failure:
                text = f"HIPRTC error {failure.code}; its compiler says: {self._log(program)}"
                raise DriverError(failure.call, failure.code, text) from None
            self.call("hiprtcGetCodeSize", program, ctypes.byref(size))
            code = ctypes.create_string_buffer(size.value)
            self.call("hiprtcGetCode", program, code)
        finally:
            self.call("hiprtcDestroyProgram", ctypes.byref(program))
        return code.raw

    def _log(self, program: ctypes.c_void_p) -> str:
        size = SIZE()
        self.call("hiprtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        self.call("hiprtcGetProgramLog", program, log)
        return " ".join(log.value.decode("utf-8", "replace").split())[:LOG_BYTES]


def _first(names: tuple[str, ...]) -> str:
    """Return the first library that loads. Raises the OSError of the first one if none does."""
    fault = None
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            fault = fault or error
        else:
            return name
    raise fault or OSError(names[0])
