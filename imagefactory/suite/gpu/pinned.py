"""Copies between page-locked memory and the GPU by the driver, as every framework does them below."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

from .driver import Driver, DriverError


@dataclass(frozen=True)
class Copied:
    """`up` and `down` are seconds, the better of two; `back` is what came back."""

    back: bytes
    up: float
    down: float


def copy_pinned(data: bytes, driver: Driver | None = None) -> Copied:
    """There and back on the first device, twice: the first time pages are touched. Raises DriverError."""
    driver = driver or Driver()
    driver.call("cuInit", 0)
    with driver.context(driver.device(0)), driver.memory(len(data)) as there:
        near, far = _lock(driver, len(data)), _lock(driver, len(data))
        try:
            ctypes.memmove(near, data, len(data))
            up = min(_timed(driver, "cuMemcpyHtoD_v2", there, near, len(data)) for _ in range(2))
            down = min(_timed(driver, "cuMemcpyDtoH_v2", far, there, len(data)) for _ in range(2))
            return Copied(back=ctypes.string_at(far, len(data)), up=up, down=down)
        finally:
            for address in (near, far):
                _call(driver, "cuMemFreeHost", ctypes.c_void_p(address))


def _lock(driver: Driver, count: int) -> int:
    address = ctypes.c_void_p()
    _call(driver, "cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(count), ctypes.c_uint(0))
    return int(address.value or 0)


def _timed(driver: Driver, name: str, to: int, start: int, count: int) -> float:
    began = time.perf_counter()
    _call(driver, name, ctypes.c_uint64(to), ctypes.c_uint64(start), ctypes.c_size_t(count))
    return time.perf_counter() - began


def _call(driver: Driver, name: str, *arguments: Any) -> None:
    """As the driver's own `call`, of functions it has no shapes for: arguments are ctypes values."""
    function = getattr(driver.library, name)
    function.argtypes, function.restype = None, ctypes.c_int
    code = function(*arguments)
    if code != 0:
        raise DriverError(name, code, driver.explain(code))
