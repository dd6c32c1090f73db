"""HIP's library by ctypes: what driver.py does with libcuda, on AMD's GPUs.

Names, numbers and error codes are those of the HIP runtime API and of HIPRTC. The library is the image's own,
as all of ROCm is: of the machine it takes the kernel's driver alone. What processor a device is stands in a
structure whose layout differs between HIP 5 and 6, so it is looked for in the whole of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from typing import Any

from . import kernels
from .driver import THREADS, Device, Driver, DriverError

# The newest first; in the loader's reach, or where ROCm is installed.
LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "/opt/rocm/lib/libamdhip64.so")
COMPILERS = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "/opt/rocm/lib/libhiprtc.so")

PROPERTIES_BYTES = 1 << 14  # more than the structure has in any version
PROCESSOR = re.compile(rb"(gfx[0-9]{1,2}[0-9a-f]{2})(?::[a-z]+[+-])*\0")
LOG_BYTES = 8192

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
SHAPES: dict[str, tuple[Any, ...]] = {
    "hipInit": (ctypes.c_uint,),
    "hipRuntimeGetVersion": (ctypes.POINTER(_INT),),
    "hipGetDeviceCount": (ctypes.POINTER(_INT),),
    "hipSetDevice": (_INT,),
    "hipDeviceGetName": (ctypes.c_char_p, _INT, _INT),
    "hipDeviceGetUuid": (ctypes.c_char_p, _INT),
    "hipDeviceTotalMem": (ctypes.POINTER(_SIZE), _INT),
    "hipGetDeviceProperties": (ctypes.c_char_p, _INT),
    "hipGetDevicePropertiesR0600": (ctypes.c_char_p, _INT),
    "hipDeviceSynchronize": (),
    "hipMemGetInfo": (ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)),
    "hipMalloc": (ctypes.POINTER(_POINTER), _SIZE),
    "hipFree": (_POINTER,),
    "hipMemcpyHtoD": (_POINTER, ctypes.c_char_p, _SIZE),
    "hipMemcpyDtoH": (ctypes.c_char_p, _POINTER, _SIZE),
    "hipModuleLoadData": (ctypes.POINTER(_POINTER), ctypes.c_char_p),
    "hipModuleGetFunction": (ctypes.POINTER(_POINTER), _POINTER, ctypes.c_char_p),
    "hipModuleUnload": (_POINTER,),
    "hipModuleLaunchKernel": (
        _POINTER,
        *[ctypes.c_uint] * 7,
        _POINTER,
        ctypes.POINTER(_POINTER),
        ctypes.POINTER(_POINTER),
    ),
    "hiprtcCreateProgram": (
        ctypes.POINTER(_POINTER),
        ctypes.c_char_p,
        ctypes.c_char_p,
        _INT,
        _POINTER,
        _POINTER,
    ),
    "hiprtcCompileProgram": (_POINTER, _INT, ctypes.POINTER(ctypes.c_char_p)),
    "hiprtcGetProgramLogSize": (_POINTER, ctypes.POINTER(_SIZE)),
    "hiprtcGetProgramLog": (_POINTER, ctypes.c_char_p),
    "hiprtcGetCodeSize": (_POINTER, ctypes.POINTER(_SIZE)),
    "hiprtcGetCode": (_POINTER, ctypes.c_char_p),
    "hiprtcDestroyProgram": (ctypes.POINTER(_POINTER),),
}


class Hip(Driver):
    """libamdhip64 and libhiprtc, opened. Raises OSError where the loader finds none."""

    language, compiled_by, compiles = "HIP", "HIPRTC", "hiprtcCompileProgram"
    file = "libamdhip64.so"
    sources = kernels.HIP

    def __init__(self) -> None:
        super().__init__(_first(LIBRARIES))
        self.compiler = ctypes.CDLL(_first(COMPILERS))
        self.processor = ""

    def begin(self) -> None:
        self.call("hipInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        library = self.compiler if name.startswith("hiprtc") else self.library
        self.ask(library, name, SHAPES[name], arguments)

    def explain(self, code: int) -> str:
        """`hipErrorNoDevice (100): no ROCm-capable device is detected`, in HIP's words."""
        words = []
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = getattr(self.library, name)
            function.restype = ctypes.c_char_p
            words.append((function(_INT(code)) or b"").decode("utf-8", "replace"))
        return f"{words[0]} ({code}): {words[1]}" if all(words) else f"HIP error {code}"

    def version(self) -> str:
        """HIP's own: `7.0` of 70051831."""
        number = self.read_int("hipRuntimeGetVersion")
        return f"{number // 10_000_000}.{number // 100_000 % 100}"

    def devices(self) -> tuple[Device, ...]:
        return tuple(self.device(ordinal) for ordinal in range(self.read_int("hipGetDeviceCount")))

    def device(self, ordinal: int) -> Device:
        name, raw = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        memory = _SIZE()
        self.call("hipDeviceGetName", name, len(name), ordinal)
        self.call("hipDeviceTotalMem", ctypes.byref(memory), ordinal)
        self.call("hipDeviceGetUuid", raw, ordinal)
        return Device(
            ordinal=ordinal,
            handle=ordinal,
            name=name.value.decode("utf-8", "replace"),
            capability=self.processor_of(ordinal),
            uuid=f"GPU-{raw.raw.decode('ascii', 'replace')}",  # the 16 digits that the kernel calls unique_id
            parent="",
            memory=memory.value,
            prohibited=False,
        )

    def processor_of(self, ordinal: int) -> str:
        """`gfx90a`, without its features."""
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        call = "hipGetDevicePropertiesR0600"
        if not hasattr(self.library, call):
            call = "hipGetDeviceProperties"
        self.call(call, properties, ordinal)
        found = PROCESSOR.search(properties.raw)
        if found is None:
            raise DriverError(call, -1, "it tells no processor")
        return found[1].decode()

    @contextlib.contextmanager
    def context(self, device: Device) -> Iterator[None]:
        """The device is the thread's while it lasts: HIP has one context of its own for each."""
        self.call("hipSetDevice", device.ordinal)
        self.processor = device.capability
        yield

    @contextlib.contextmanager
    def memory(self, count: int) -> Iterator[int]:
        address = _POINTER()
        self.call("hipMalloc", ctypes.byref(address), count)
        try:
            yield address.value or 0
        finally:
            self.call("hipFree", address)

    def write(self, address: int, data: bytes) -> None:
        self.call("hipMemcpyHtoD", address, data, len(data))

    def read(self, address: int, count: int) -> bytes:
        data = ctypes.create_string_buffer(count)
        self.call("hipMemcpyDtoH", data, address, count)
        return data.raw

    def free_memory(self) -> int:
        free, total = _SIZE(), _SIZE()
        self.call("hipMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextlib.contextmanager
    def module(self, source: str) -> Iterator[ctypes.c_void_p]:
        """HIP compiled for the device by HIPRTC; a DriverError ends with what the compiler said."""
        module = _POINTER()
        self.call("hipModuleLoadData", ctypes.byref(module), self.compile(source))
        try:
            yield module
        finally:
            self.call("hipModuleUnload", module)

    def compile(self, source: str) -> bytes:
        """The code object."""
        program, size = _POINTER(), _SIZE()
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
        size = _SIZE()
        self.call("hiprtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        self.call("hiprtcGetProgramLog", program, log)
        return " ".join(log.value.decode("utf-8", "replace").split())[:LOG_BYTES]

    def launch(self, module: ctypes.c_void_p, name: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        function = _POINTER()
        self.call("hipModuleGetFunction", ctypes.byref(function), module, name.encode())
        pointers = (_POINTER * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        self.call("hipModuleLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, None, pointers, None)
        self.call("hipDeviceSynchronize")


def _first(names: tuple[str, ...]) -> str:
    """The first that opens. Raises the first one's OSError where none does."""
    fault = None
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            fault = fault or error
        else:
            return name
    raise fault or OSError(names[0])
