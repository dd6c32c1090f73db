"""An all-reduce of one rank through the C interface of NCCL (nccl.h), for frameworks that do not use it."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from ...context import CheckFailure
from .. import reference
from ..context import GpuContext
from ..driver import Driver
from ..libraries import find_nccl, read_version

FLOAT32, SUM = 7, 0

# The network for ranks: one rank meets itself, and there is no other network inside.
MEETING = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def all_reduce(context: GpuContext, values: Any, driver: Driver | None = None) -> tuple[Any, str]:
    """Return the sum over one rank in float32, as float64, and a line about the library.

    A rehearsal only loads the library and returns its input. Raises CheckFailure for an error of NCCL,
    DriverError for one of the driver.
    """
    path = find_nccl(context)
    how = f"NCCL {read_version('nccl', path)}"
    data = values.astype("float32").tobytes()
    if context.rehearsal:
        return values, f"{how}, which was loaded and not used"
    os.environ.update(MEETING)
    library, driver = ctypes.CDLL(path), driver or Driver()
    driver.call("cuInit", 0)
    device = driver.device(0)
    with driver.context(device), driver.memory(len(data)) as source, driver.memory(len(data)) as target:
        driver.write(source, data)
        driver.write(target, bytes(len(data)))
        communicator = ctypes.c_void_p()
        devices = (ctypes.c_int * 1)(device.ordinal)
        _call(library, "ncclCommInitAll", ctypes.byref(communicator), ctypes.c_int(1), devices)
        try:
            count, stream = ctypes.c_size_t(len(data) // 4), ctypes.c_void_p(None)
            ends = ctypes.c_void_p(source), ctypes.c_void_p(target)
            kind, operation = ctypes.c_int(FLOAT32), ctypes.c_int(SUM)
            _call(library, "ncclAllReduce", *ends, count, kind, operation, communicator, stream)
            driver.call("cuCtxSynchronize")
        finally:
            _call(library, "ncclCommDestroy", communicator)
        back = driver.read(target, len(data))
    return reference.numpy.frombuffer(back, "float32").astype("float64").reshape(values.shape), how


def _call(library: Any, name: str, *arguments: Any) -> None:
    function = getattr(library, name)
    function.restype = ctypes.c_int
    code = function(*arguments)
    if code != 0:
        library.ncclGetErrorString.restype = ctypes.c_char_p
        text = library.ncclGetErrorString(ctypes.c_int(code))
        raise CheckFailure(f"{name}: {text.decode('utf-8', 'replace') if text else code}")
