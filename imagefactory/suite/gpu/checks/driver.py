"""T0: the driver alone. Is there a GPU, is it the right one, does it compute, does it give memory back.

Nothing of a framework or of CUDA's toolkit takes part: where these fail, the machine is at fault or the way
in which the GPU was given to the image, not the image; save where the image brings a libcuda of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ...context import CheckFailure, Finding
from .. import driver, kernels, table
from ..context import Discovery, GpuContext, Refusal
from ..driver import Device, Driver, DriverError
from ..hip import Hip
from ..libraries import mapped_files

# More blocks than a GPU has multiprocessors; no multiple of one, so that the last has threads without work.
COUNT = 30_011
MEMORY = 256 << 20
LEAK = 64 << 20
SLACK = 16 << 20  # the driver hands out memory in pieces of up to 2 MiB and keeps a few
ROUNDS = 5
MODULE, MOUNTS = "/proc/driver/nvidia/version", "/proc/self/mountinfo"
_MODULE = re.compile(r"^NVRM version:.*?\s([0-9]+\.[0-9.]+)\s", re.MULTILINE)
_LIBCUDA = re.compile(r"(/.*)/libcuda\.so\.([0-9]{3,4}\.[0-9.]+)")
_COMPAT = re.compile(r"(?:^|[/_-])compat(?:[/_-]|$)")

WORDS = {
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
    driver.STUB_LIBRARY: "the toolkit's empty libcuda was loaded: take its folder out of LD_LIBRARY_PATH",
    driver.JIT_COMPILER_NOT_FOUND: "the container was not given the driver's libnvidia-ptxjitcompiler.so.1",
    driver.OPERATING_SYSTEM: "the container was not given all of /dev/nvidia*, or may not open them",
    driver.UNKNOWN: "the kernel's modules (nvidia, nvidia-uvm) and /dev/nvidia-uvm are worth a look",
    driver.SYSTEM_NOT_READY: "the machine's fabric manager is not running",
    driver.SYSTEM_DRIVER_MISMATCH: "libcuda and the kernel's module are of different drivers: load the "
    "module anew, or take away a libcuda that the image brings",
    driver.COMPAT_NOT_SUPPORTED: "the image brings a libcuda for newer CUDA, which this GPU does not take: "
    "it needs a newer driver",
}


def check_driver(context: GpuContext) -> Finding:
    """libcuda is there, starts, and takes the CUDA that the image was made for; or the image's HIP starts."""
    with driver_words():
        library = start(context)
        version = library.version()
    if context.asked.expected.rocm:
        return Finding(f"HIP {version} starts; {loaded_from(library)}")
    facts = {"cuda": version}
    oldest = context.asked.driver
    if oldest and _numbers(version) < _numbers(oldest):
        raise Refusal(
            f"the driver takes CUDA up to {version}, the image needs {oldest}",
            outcome=table.DRIVER_TOO_OLD,
            facts=facts,
        )
    needs = f", the image needs {oldest}" if oldest else ""
    return Discovery(f"the driver takes CUDA up to {version}{needs}; {loaded_from(library)}", facts=facts)


def check_device(context: GpuContext) -> Finding:
    """There is a GPU, and it is of the capability that was asked for."""
    wanted = context.asked.capability
    with driver_words():
        devices = start(context).devices()
    if not devices:
        raise CheckFailure("the driver counts no GPU", outcome=table.NO_GPU)
    device = choose(devices, wanted)
    alike = [each.uuid for each in devices if each.capability == device.capability]
    facts = {"device": describe(device), "visible": len(devices), "alike": alike}
    numbers = {"devices": len(devices), "memory-bytes": device.memory}
    slice_of = f", a slice of {device.parent}" if device.parent else ""
    detail = f"{device.name}, {device.capability}, {device.uuid}{slice_of}"
    if wanted and device.capability != wanted:
        raise Refusal(
            f"capability {wanted} was asked for, this is {detail}",
            outcome=table.WRONG_GPU,
            numbers=numbers,
            facts=facts,
        )
    if device.prohibited:
        raise Refusal(
            f"{detail}, is in the compute mode that prohibits all programs (nvidia-smi -c 0 lifts it)",
            outcome=table.INFRASTRUCTURE,
            numbers=numbers,
            facts=facts,
        )
    return Discovery(detail, numbers, facts=facts)


def check_vector_add(context: GpuContext) -> Finding:
    """The driver compiles PTX, or HIPRTC HIP, and the GPU adds two vectors, exactly."""
    vectors = kernels.make_vectors(context.asked.expected.nonce, COUNT)
    with driver_words(), opened(context) as library:
        found = combine(library, vectors, library.sources.add)
    wrong = kernels.compare(found, vectors.total())
    if wrong:
        raise CheckFailure(wrong, outcome=table.WRONG_NUMBERS)
    how = f"{library.language} that {library.compiled_by} compiled"
    return Finding(f"{COUNT} sums by {how}, all exact", {"elements": COUNT})


def check_memory_returned(context: GpuContext) -> Finding:
    """Memory that is taken is gone from what is free, and is free again after."""
    with driver_words(), opened(context) as library:
        size = min(MEMORY, library.free_memory() // 4)
        taken, missing = measure(library, size, leak=0)
    numbers = {"asked-bytes": size, "taken-bytes": taken, "missing-bytes": missing}
    if taken < size - SLACK:
        raise Refusal(
            f"of {size} bytes that were taken the driver counts {taken}",
            outcome=table.WRONG_NUMBERS,
            numbers=numbers,
        )
    if missing > SLACK:
        raise Refusal(
            f"{missing} of {size} bytes did not come back", outcome=table.LOAD_FAILED, numbers=numbers
        )
    return Finding(f"{size >> 20} MiB taken and given back", numbers)


def check_driver_controls(context: GpuContext) -> Finding:
    """Negative controls: what is wrong on purpose must be seen, or the checks before prove nothing."""
    vectors = kernels.make_vectors(f"{context.asked.expected.nonce}-controls", COUNT)
    total = vectors.total()
    unseen = []
    with driver_words(), opened(context) as library:
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


# --- what the checks do it with ------------------------------------------------------------------


@contextlib.contextmanager
def driver_words() -> Iterator[None]:
    """Turns an answer of the driver into a CheckFailure with the tables' word for it."""
    try:
        yield
    except DriverError as error:
        hint = f" ({HINTS[error.code]})" if error.code in HINTS and error.call.startswith("cu") else ""
        raise CheckFailure(f"{error}{hint}", outcome=WORDS.get(error.code, table.LOAD_FAILED)) from error


def start(context: GpuContext) -> Driver:
    """libcuda or HIP, started. Raises CheckFailure where there is none, DriverError where it does not
    start.
    """
    if context.asked.expected.rocm:
        try:
            library: Driver = Hip()
        except OSError as error:
            raise CheckFailure(
                f"the image's ROCm is not there: {error}", outcome=table.LOAD_FAILED
            ) from error
    else:
        try:
            library = Driver()
        except OSError as error:
            raise CheckFailure(
                f"no driver was given to the container: {error}", outcome=table.NO_GPU
            ) from error
    try:
        library.begin()
    except DriverError as error:
        own = brought_libcuda(mapped_files(), error.code)
        if own:
            raise CheckFailure(f"{error}; {own}", outcome=table.LOAD_FAILED) from error
        raise
    return library


def brought_libcuda(paths: Sequence[str], code: int) -> str:
    """What to say of a libcuda of another driver that the image itself brings; empty where there is none.

    What a container was given lies on a mount. NVIDIA's own for older drivers (cuda-compat) is a fault where
    it does not fit the module alone (803).
    """
    for path in paths:
        found = _LIBCUDA.fullmatch(path)
        compat = found and _COMPAT.search(found[1])
        if not found or code == driver.STUB_LIBRARY or (compat and code != driver.SYSTEM_DRIVER_MISMATCH):
            continue
        module = _MODULE.search(_read(MODULE))
        given = [line.split()[4] for line in _read(MOUNTS).splitlines() if len(line.split()) > 4]
        mounted = any(path == place or path.startswith(f"{place}/") for place in given if place != "/")
        if module and module[1] != found[2] and not mounted:
            do = "take its folder out of LD_LIBRARY_PATH" if compat else "remove it from the image"
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
    """The driver with the context of the device that was found, current."""
    library = start(context)
    found = [device for device in library.devices() if device.uuid == context.device["uuid"]]
    if not found:
        raise CheckFailure(f"{context.device['uuid']} is gone", outcome=table.INFRASTRUCTURE)
    with library.context(found[0]):
        yield library


def choose(devices: Sequence[Device], capability: str) -> Device:
    """The first of the capability that is asked for, else the first."""
    return next((device for device in devices if device.capability == capability), devices[0])


def describe(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "capability": device.capability,
        "uuid": device.uuid,
        "memory": device.memory,
    }


def combine(library: Driver, vectors: kernels.Vectors, ptx: str | None) -> bytes:
    """What lies in the result and behind it after a kernel of `ptx`, or after none, has run."""
    size, count = 4 * vectors.count, vectors.count
    blocks = -(-count // driver.THREADS)
    start_with = kernels.poison(count)
    with contextlib.ExitStack() as held:
        left, right, result = (
            held.enter_context(library.memory(each)) for each in (size, size, len(start_with))
        )
        library.write(left, vectors.left.tobytes())
        library.write(right, vectors.right.tobytes())
        library.write(result, start_with)
        if ptx is not None:
            with library.module(ptx) as module:
                arguments = (*map(ctypes.c_uint64, (left, right, result)), ctypes.c_uint32(count))
                library.launch(module, kernels.ENTRY, blocks, arguments)
        return library.read(result, len(start_with))


def measure(library: Driver, size: int, *, leak: int) -> tuple[int, int]:
    """Bytes that were gone while `size` were held, and bytes still missing after, `leak` of them kept.

    Other programs may take and give memory meanwhile, so the best of several rounds counts: what never comes
    back is missing in each. The leak is given back in the end.
    """
    rounds = []
    for _ in range(ROUNDS):
        with contextlib.ExitStack() as kept:
            before = library.free_memory()
            with library.memory(size):
                taken = before - library.free_memory()
            if leak:
                kept.enter_context(library.memory(leak))
            missing = before - library.free_memory()
        rounds.append((taken, missing))
        if taken >= size - SLACK and abs(missing - leak) <= SLACK:
            break
    return min(rounds, key=lambda one: abs(one[1] - leak) + max(0, size - one[0]))


def loaded_from(library: Driver) -> str:
    """Where the loader found it: of libcuda the driver's own, or one that the image brings (cuda-compat)."""
    name = library.file.partition(".")[0]
    return f"{name} is {', '.join(path for path in mapped_files() if library.file in path)}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
