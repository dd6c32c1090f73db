"""T0: only the driver. Check that the right GPU exists, computes, and frees memory.

No framework and no CUDA library is used. If these checks fail, the fault is in the machine, or in the way in
which the image got the GPU. It is in the image only if the image contains libcuda.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator, Sequence

from ...context import CheckFailure, Finding
from .. import driver, kernels, table
from ..context import FindingWithFacts, GpuContext, MeasuredFailure
from ..driver import Driver, DriverError
from ..hip import Hip
from ..libraries import mapped_files

# More blocks than a GPU has multiprocessors. The last block has threads without work.
COUNT = 30_011
MEMORY = 256 << 20
LEAK = 64 << 20
SLACK = 16 << 20  # the driver returns memory in pieces of up to 2 MiB and keeps a few
ROUNDS = 5
MODULE, MOUNTS = "/proc/driver/nvidia/version", "/proc/self/mountinfo"
_MODULE = re.compile(r"^NVRM version:.*?\s([0-9]+\.[0-9.]+)\s", re.MULTILINE)
_LIBCUDA = re.compile(r"(/.*)/libcuda\.so\.([0-9]{3,4}\.[0-9.]+)")
_COMPAT = re.compile(r"(?:^|[/_-])compat(?:[/_-]|$)")

OUTCOMES = {
    driver.OUT_OF_MEMORY: table.INFRASTRUCTURE,
    driver.STUB_LIBRARY: table.NO_GPU,
    driver.DEVICE_UNAVAILABLE: table.INFRASTRUCTURE,
    driver.NO_DEVICE: table.NO_GPU,
    driver.INVALID_DEVICE: table.NO_GPU,
    driver.INVALID_IMAGE: table.NO_KERNEL,
    driver.NO_BINARY_FOR_GPU: table.NO_KERNEL,
    driver.INVALID_PTX: table.NO_KERNEL,
    driver.UNSUPPORTED_PTX_VERSION: table.DRIVER_TOO_OLD,
    driver.JIT_COMPILER_NOT_FOUND: table.INFRASTRUCTURE,
    driver.ECC_UNCORRECTABLE: table.INFRASTRUCTURE,
    driver.OPERATING_SYSTEM: table.INFRASTRUCTURE,
    driver.UNKNOWN: table.INFRASTRUCTURE,
    driver.SYSTEM_NOT_READY: table.INFRASTRUCTURE,
    driver.SYSTEM_DRIVER_MISMATCH: table.INFRASTRUCTURE,
    driver.COMPAT_NOT_SUPPORTED: table.DRIVER_TOO_OLD,
}
HINTS = {
    driver.STUB_LIBRARY: "the toolkit's empty libcuda was loaded: remove its directory from LD_LIBRARY_PATH",
    driver.JIT_COMPILER_NOT_FOUND: "the container was not given the driver's libnvidia-ptxjitcompiler.so.1",
    driver.OPERATING_SYSTEM: "the container was not given all of /dev/nvidia*, or may not open them",
    driver.UNKNOWN: "the kernel's modules (nvidia, nvidia-uvm) and /dev/nvidia-uvm are worth a look",
    driver.SYSTEM_NOT_READY: "the machine's fabric manager is not running",
    driver.SYSTEM_DRIVER_MISMATCH: "libcuda and the kernel's module are of different drivers: load the "
    "module again, or remove libcuda from the image",
    driver.COMPAT_NOT_SUPPORTED: "the image brings a libcuda for newer CUDA, which this GPU does not take: "
    "it needs a newer driver",
}


def check_driver(context: GpuContext) -> Finding:
    """Start libcuda, which must support the CUDA version of the image, or start the image's HIP."""
    with driver_outcomes():
        library = start(context)
        version = library.version()
    if context.request.expected.rocm:
        return Finding(f"HIP {version} starts; {library_origin(library)}")
    facts = {"cuda": version, "libcuda": loaded_libcuda(mapped_files())}
    oldest = context.request.driver
    if oldest and [int(n) for n in version.split(".")] < [int(n) for n in oldest.split(".")]:
        raise MeasuredFailure(
            f"the driver takes CUDA up to {version}, the image needs {oldest}",
            outcome=table.DRIVER_TOO_OLD,
            facts=facts,
        )
    needs = f", the image needs {oldest}" if oldest else ""
    return FindingWithFacts(
        f"the driver takes CUDA up to {version}{needs}; {library_origin(library)}", facts=facts
    )


def check_device(context: GpuContext) -> Finding:
    """Find a GPU of the requested capability."""
    capability = context.request.capability
    with driver_outcomes():
        devices = start(context).devices()
    if not devices:
        raise CheckFailure("the driver counts no GPU", outcome=table.NO_GPU)
    device = next((each for each in devices if each.capability == capability), devices[0])
    facts = {
        "device": {key: getattr(device, key) for key in ("name", "capability", "uuid", "memory")},
        "visible": len(devices),
        "alike": [each.uuid for each in devices if each.capability == device.capability],
    }
    numbers = {"devices": len(devices), "memory-bytes": device.memory}
    slice_of = f", a slice of {device.parent}" if device.parent else ""
    detail = f"{device.name}, {device.capability}, {device.uuid}{slice_of}"
    if capability and device.capability != capability:
        raise MeasuredFailure(
            f"capability {capability} was asked for, this is {detail}",
            outcome=table.WRONG_GPU,
            numbers=numbers,
            facts=facts,
        )
    if device.prohibited:
        raise MeasuredFailure(
            f"{detail}, is in the compute mode that prohibits all programs (nvidia-smi -c 0 lifts it)",
            outcome=table.INFRASTRUCTURE,
            numbers=numbers,
            facts=facts,
        )
    return FindingWithFacts(detail, numbers, facts=facts)


def check_vector_add(context: GpuContext) -> Finding:
    """Add two vectors exactly on the GPU. The driver compiles PTX for it, or HIPRTC compiles HIP."""
    vectors = kernels.make_vectors(context.request.expected.nonce, COUNT)
    with driver_outcomes(), opened(context) as library:
        result = combine(library, vectors, library.sources.add)
    if wrong := kernels.compare(result, vectors.total()):
        raise CheckFailure(wrong, outcome=table.WRONG_NUMBERS)
    how = f"{library.language} that {library.compiled_by} compiled"
    return Finding(f"{COUNT} sums by {how}, all exact", {"elements": COUNT})


def check_memory_returned(context: GpuContext) -> Finding:
    """Check that allocated memory is not free, and is free again after it is freed."""
    with driver_outcomes(), opened(context) as library:
        size = min(MEMORY, library.free_memory() // 4)
        allocated, missing = measure(library, size, leak=0)
    numbers = {"asked-bytes": size, "taken-bytes": allocated, "missing-bytes": missing}
    if allocated < size - SLACK:
        raise MeasuredFailure(
            f"of {size} bytes that were taken the driver counts {allocated}",
            outcome=table.WRONG_NUMBERS,
            numbers=numbers,
        )
    if missing > SLACK:
        raise MeasuredFailure(
            f"{missing} of {size} bytes did not come back", outcome=table.LOAD_FAILED, numbers=numbers
        )
    return Finding(f"{size >> 20} MiB taken and given back", numbers)


def check_driver_controls(context: GpuContext) -> Finding:
    """Check that deliberate errors are detected. Otherwise the previous checks would verify nothing."""
    vectors = kernels.make_vectors(f"{context.request.expected.nonce}-controls", COUNT)
    total = vectors.total()
    unseen = []
    with driver_outcomes(), opened(context) as library:
        subtracted = combine(library, vectors, library.sources.subtract)
        if not kernels.compare(subtracted, total):
            unseen.append("a kernel that subtracts gave the sum")
        if kernels.compare(subtracted, vectors.difference()):
            unseen.append("a kernel that subtracts did not give the difference")
        if not kernels.compare(combine(library, vectors, None), total):
            unseen.append("the sum was there though no kernel ran")
        try:
            combine(library, vectors, library.sources.broken)
        except DriverError as error:
            if error.call != library.compiles:
                raise
        else:
            unseen.append(f"{library.language} that is none was compiled")
        _, missing = measure(library, LEAK, leak=LEAK)
        if missing < LEAK - SLACK:
            unseen.append(f"{LEAK} bytes that were kept were not missed")
    whole = total + kernels.POISON * kernels.GUARD
    for at in (0, len(total) - 1, len(whole) - 1):
        if not kernels.compare(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :], total):
            unseen.append(f"a wrong bit in byte {at} passed")
    if unseen:
        raise CheckFailure("; ".join(unseen), outcome=table.WRONG_NUMBERS)
    return Finding("what was made wrong on purpose was seen", {"controls": 8})


@contextlib.contextmanager
def driver_outcomes() -> Iterator[None]:
    """Convert an error of the driver into a CheckFailure with its outcome."""
    try:
        yield
    except DriverError as error:
        hint = f" ({HINTS[error.code]})" if error.code in HINTS and error.call.startswith("cu") else ""
        raise CheckFailure(f"{error}{hint}", outcome=OUTCOMES.get(error.code, table.LOAD_FAILED)) from error


def start(context: GpuContext) -> Driver:
    """Start libcuda or HIP. Raises CheckFailure if there is none, DriverError if it does not start."""
    rocm = context.request.expected.rocm
    try:
        library: Driver = Hip() if rocm else Driver()
    except OSError as error:
        if rocm:
            raise CheckFailure(f"the image's ROCm is not there: {error}") from error
        raise CheckFailure(f"no driver was given to the container: {error}", outcome=table.NO_GPU) from error
    try:
        library.begin()
    except DriverError as error:
        if own := image_libcuda_fault(mapped_files(), error.code):
            raise CheckFailure(f"{error}; {own}") from error
        raise
    return library


def image_libcuda_fault(paths: Sequence[str], code: int) -> str:
    """Return the fault of a libcuda of another driver that is part of the image, empty without one.

    The libcuda of the machine is on a mount. NVIDIA's cuda-compat for older drivers is a fault only if it
    does not match the kernel module (803).
    """
    for path in paths:
        match = _LIBCUDA.fullmatch(path)
        compat = match and _COMPAT.search(match[1])
        if not match or code == driver.STUB_LIBRARY or (compat and code != driver.SYSTEM_DRIVER_MISMATCH):
            continue
        module = _MODULE.search(_read(MODULE))
        mounts = [line.split()[4] for line in _read(MOUNTS).splitlines() if len(line.split()) > 4]
        mounted = any(path == place or path.startswith(f"{place}/") for place in mounts if place != "/")
        if module and module[1] != match[2] and not mounted:
            do = "remove its directory from LD_LIBRARY_PATH" if compat else "remove it from the image"
            return f"the image brings {path}, and this machine's driver is {module[1]}: {do}"
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@contextlib.contextmanager
def opened(context: GpuContext) -> Iterator[Driver]:
    """Make the context of the T0 device current."""
    library = start(context)
    devices = [device for device in library.devices() if device.uuid == context.device["uuid"]]
    if not devices:
        raise CheckFailure(f"{context.device['uuid']} is gone", outcome=table.INFRASTRUCTURE)
    with library.context(devices[0]):
        yield library


def combine(library: Driver, vectors: kernels.Vectors, source: str | None) -> bytes:
    """Run the kernel in `source`, if any. Return the result and the bytes after it."""
    size, count = 4 * vectors.count, vectors.count
    poison = kernels.poison(count)
    with (
        library.memory(size) as augend,
        library.memory(size) as addend,
        library.memory(len(poison)) as result,
    ):
        library.write(augend, vectors.left.tobytes())
        library.write(addend, vectors.right.tobytes())
        library.write(result, poison)
        if source is not None:
            with library.module(source) as module:
                arguments = (*map(ctypes.c_uint64, (augend, addend, result)), ctypes.c_uint32(count))
                library.launch(module, kernels.ENTRY, -(-count // driver.THREADS), arguments)
        return library.read(result, len(poison))


def measure(library: Driver, size: int, *, leak: int) -> tuple[int, int]:
    """Return the bytes missing while `size` bytes are allocated, and afterwards, with `leak` bytes not freed.

    Other programs may allocate and free memory meanwhile, so the best of several rounds is used. A real leak
    is missing in each round. A deliberate leak is freed at the end.
    """
    rounds = []
    for _ in range(ROUNDS):
        with contextlib.ExitStack() as leaks:
            before = library.free_memory()
            with library.memory(size):
                allocated = before - library.free_memory()
            if leak:
                leaks.enter_context(library.memory(leak))
            missing = before - library.free_memory()
        rounds.append((abs(missing - leak) + max(0, size - allocated), allocated, missing))
        if allocated >= size - SLACK and abs(missing - leak) <= SLACK:
            break
    return min(rounds)[1:]


def loaded_libcuda(paths: Sequence[str]) -> str:
    """Return the libcuda among the files that a process has mapped, an empty text without one."""
    return next((path for path in paths if os.path.basename(path).startswith("libcuda.so")), "")


def library_origin(library: Driver) -> str:
    """Return where the loader found the library: the driver's libcuda, or the image's (cuda-compat)."""
    name = library.file.partition(".")[0]
    return f"{name} is {', '.join(path for path in mapped_files() if library.file in path)}"
