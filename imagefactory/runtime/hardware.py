"""The NVIDIA GPUs of a host, from three sources that must agree: NVML, /proc of the driver, and device nodes.

It also reads which GPUs a user or a batch system selects, and the CDI specifications by which Docker and
Podman find them. It uses only the standard library of Python 3.9, because every kit contains this file:
verify/kit has a link. No result is cached. The environment affects only where libnvidia-ml.so.1 is found.

Sources: NVML API reference (functions, buffer sizes, return codes); the driver's README, "Using the /proc
file system interface"; proc_devices(5); CUDA C++ Programming Guide, "CUDA Environment Variables"; CDI
specification 0.5 and nvidia-container-toolkit, pkg/nvcdi/namer.go (names of devices: index, UUID, or both
since 1.15).
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

FORMAT = 1
UNUSABLE = "no usable GPU: "
HINT = "run this where `nvidia-smi` lists a GPU"

# The last form is MIG's before driver 470.
UUID = re.compile(
    r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|MIG-GPU-[0-9a-f-]{36}/[0-9]+/[0-9]+"
)
MAJOR = re.compile(r"^\s*([0-9]+)\s+nvidia(?:-frontend)?$", re.MULTILINE)
VERSION = re.compile(r"^NVRM version:.*?\s([0-9]+\.[0-9]+(?:\.[0-9]+)?)\s", re.MULTILINE)
NVML = re.compile(r"/\S*/libnvidia-ml\.so\.[0-9]{3,4}\.[0-9.]+")
LARGEST_FILE = 1 << 16

MEMORY = re.compile(r"^MemTotal:\s+([0-9]+) kB$", re.MULTILINE)
LOST = "lost-gpu-"
"""The prefix in the name of a note about an unusable GPU. NVML's index follows; the text is the reason."""
PCI_ORDER = "PCI_BUS_ID"
"""The value of CUDA_DEVICE_ORDER for the order of NVML."""

BUFFER = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE, the largest of the queried texts
MIG_ENABLED = 1
NOT_SUPPORTED = 3
INSUFFICIENT_SIZE = 7
VERSION_MISMATCH = 18  # NVML is from another driver than the kernel module


class NoGpu(Exception):
    """There is no usable NVIDIA GPU. The message is one line with the reason."""


class LostGpu(NoGpu):
    """The machine has GPUs, but none is usable: a fault of the machine."""


class Places(NamedTuple):
    """The places with GPU data of a machine: two directories and the name of the NVML library."""

    dev: str = "/dev"
    proc: str = "/proc"
    nvml: str = "libnvidia-ml.so.1"


MACHINE = Places()


def read_hardware(places: Places = MACHINE) -> dict[str, Any]:
    """Return the GPUs of the host as plain JSON values.

    `driver` is the version of the kernel module. `gpus` are from NVML, each with `name`, `capability`
    (`8.0`), `uuid` (`GPU-...`) and `memory` in bytes. `known` are the UUIDs below /proc/driver/nvidia/gpus.
    `nodes` are the paths of the driver's character devices. `notes` are other facts, name -> text: for each
    MIG instance `MIG-...` -> the UUID of its whole GPU, `nvml-driver`, and for each unusable GPU
    `lost-gpu-INDEX` -> the reason. For a GPU that shares the memory of the machine, `memory` is that of the
    machine.

    Raises NoGpu if one of the three sources shows none, or if NVML belongs to another driver.
    """
    if not Path(places.proc, "driver/nvidia/version").is_file():
        raise NoGpu("no GPU: the NVIDIA driver is not loaded (there is no /proc/driver/nvidia)")
    driver = read_driver(places.proc)
    if not driver:
        raise NoGpu(f"{UNUSABLE}/proc/driver/nvidia/version has no version")
    nodes = find_nodes(places)
    if not nodes:
        raise NoGpu("no GPU: there is no device /dev/nvidia0, /dev/nvidia1, ... of the driver")
    # NVML first: the UUID of a GPU not used since the driver was loaded is only known after NVML's query.
    gpus, notes = ask_nvml(places.nvml, read_memory(places.proc))
    known = find_known(places)
    if not known:
        raise NoGpu(f"{UNUSABLE}no file below /proc/driver/nvidia/gpus has a UUID")
    if notes["nvml-driver"] != driver:
        raise LostGpu(
            f"{UNUSABLE}the kernel module is {driver} and NVML of {notes['nvml-driver']}{_loaded()}"
        )
    return {"format": FORMAT, "driver": driver, "gpus": gpus, "known": known, "nodes": nodes, "notes": notes}


def read_driver(proc: str = MACHINE.proc) -> str:
    """Return the version of the loaded kernel module, "" if there is none."""
    try:
        return parse_version(_read(Path(proc, "driver/nvidia/version")))
    except OSError:
        return ""


def parse_version(text: str) -> str:
    """Return the version in /proc/driver/nvidia/version, of the closed or the open module; "" if there is
    none.
    """
    match = VERSION.search(text)
    return match[1] if match else ""


def parse_information(text: str) -> dict[str, str]:
    """Return the fields of /proc/driver/nvidia/gpus/*/information by name: `GPU UUID`, `Model`, ..."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_major(text: str) -> int:
    """Return the major number of NVIDIA GPUs in /proc/devices (`195 nvidia-frontend`), -1 if there is
    none.
    """
    match = MAJOR.search(text.partition("Block devices:")[0])
    return int(match[1]) if match else -1


def find_known(places: Places) -> list[str]:
    """Return the sorted UUIDs that the kernel module lists. An unknown UUID is `GPU-????...`."""
    return sorted(find_gpu_nodes(places))


def find_gpu_nodes(places: Places = MACHINE) -> dict[str, str]:
    """Return the devices of the GPUs that the kernel module lists, by UUID. NVML may count differently."""
    nodes = {}
    for path in Path(places.proc, "driver/nvidia/gpus").glob("*/information"):
        try:
            facts = parse_information(_read(path))
        except OSError:
            continue
        if UUID.fullmatch(facts.get("GPU UUID", "")):
            minor = facts.get("Device Minor", "")
            nodes[facts["GPU UUID"]] = f"/dev/nvidia{minor}" if minor.isdecimal() else ""
    return nodes


def find_nodes(places: Places) -> list[str]:
    """Return the device nodes of GPUs (`/dev/nvidia0`): character devices with the driver's major number."""
    try:
        major = parse_major(_read(Path(places.proc, "devices")))
    except OSError:
        return []
    devices = []
    for path in Path(places.dev).glob("nvidia*"):
        match = re.fullmatch(r"nvidia([0-9]+)", path.name)
        if not match:
            continue
        try:
            facts = path.stat()
        except OSError:
            continue
        numbers = (os.major(facts.st_rdev), os.minor(facts.st_rdev))
        if stat.S_ISCHR(facts.st_mode) and numbers == (major, int(match[1])):
            devices.append((int(match[1]), f"/dev/{path.name}"))
    return [path for _, path in sorted(devices)]


def read_memory(proc: str) -> int:
    """Return the memory of the machine in bytes, 0 if /proc/meminfo lacks it."""
    try:
        match = MEMORY.search(_read(Path(proc, "meminfo")))
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def _read(path: Path, limit: int = LARGEST_FILE) -> str:
    with path.open("rb") as file:
        return file.read(limit).decode("utf-8", "replace")


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def ask_nvml(library: str, shared: int = 0) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the GPUs of NVML, and notes.

    `shared` is the memory for a GPU without separate memory, 0 if unknown.

    Raises NoGpu if the library is missing, returns an error or lists no usable GPU.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise NoGpu(f"{UNUSABLE}NVML cannot be loaded ({error})") from None
    _call(nvml, "nvmlInit_v2")
    try:
        return _ask(nvml, shared)
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any, shared: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    notes = {"nvml-driver": _text(nvml, "nvmlSystemGetDriverVersion")}
    count = ctypes.c_uint()
    _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    if not count.value:
        raise NoGpu("no GPU: NVML counts none")
    gpus, lost = [], []
    for index in range(count.value):
        device = ctypes.c_void_p()
        try:
            _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            gpu = _describe(nvml, device, shared)
            parts = _mig(nvml, device)
        except NoGpu as error:
            notes[f"{LOST}{index}"] = str(error).removeprefix(UNUSABLE)
            lost.append(f"GPU {index}: {notes[f'{LOST}{index}']}")
            continue
        gpus.append(gpu)
        notes.update(dict.fromkeys(parts, gpu["uuid"]))
    if not gpus:
        raise LostGpu(f"{UNUSABLE}{'; '.join(lost)}")
    return gpus, notes


def busy_gpus(library: str) -> list[str]:
    """Return the UUIDs of GPUs on which programs compute now, by NVML.

    Without a buffer, NVML only counts the programs, in each version of this function. Raises NoGpu.
    """
    nvml, count, busy = ctypes.CDLL(library), ctypes.c_uint(), []
    _call(nvml, "nvmlInit_v2")
    try:
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            device, programs = ctypes.c_void_p(), ctypes.c_uint()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                continue  # a lost GPU
            code = nvml.nvmlDeviceGetComputeRunningProcesses(device, ctypes.byref(programs), None)
            if code == INSUFFICIENT_SIZE or programs.value:
                busy.append(_text(nvml, "nvmlDeviceGetUUID", device))
    finally:
        nvml.nvmlShutdown()
    return busy


def _describe(nvml: Any, device: ctypes.c_void_p, shared: int) -> dict[str, Any]:
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    code = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    if code not in (0, NOT_SUPPORTED):
        raise _refusal(nvml, "nvmlDeviceGetMemoryInfo", code)
    size = shared if code else int(memory.total)  # GB10 and Jetson: the processor's memory is the GPU's
    if not size:
        raise NoGpu(f"{UNUSABLE}neither NVML nor /proc/meminfo reports its memory")
    _call(nvml, "nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
    uuid = _text(nvml, "nvmlDeviceGetUUID", device)
    if not UUID.fullmatch(uuid):
        raise NoGpu(f"{UNUSABLE}NVML gives a UUID that is none: {uuid!r}")
    return {
        "name": _text(nvml, "nvmlDeviceGetName", device),
        "capability": f"{major.value}.{minor.value}",
        "uuid": uuid,
        "memory": size,
    }


def _mig(nvml: Any, device: ctypes.c_void_p) -> list[str]:
    """Return the UUIDs of a GPU's MIG instances, none if its driver or the GPU does not support MIG."""
    now, pending, count = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    try:
        code = nvml.nvmlDeviceGetMigMode(device, ctypes.byref(now), ctypes.byref(pending))
        if code or now.value != MIG_ENABLED:
            return []
        _call(nvml, "nvmlDeviceGetMaxMigDeviceCount", device, ctypes.byref(count))
    except AttributeError:  # NVML of a driver older than 450
        return []
    uuids = []
    for index in range(count.value):
        part = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, ctypes.c_uint(index), ctypes.byref(part)):
            uuids.append(_text(nvml, "nvmlDeviceGetUUID", part))
    return [uuid for uuid in uuids if UUID.fullmatch(uuid)]


def _text(nvml: Any, function: str, *arguments: Any) -> str:
    text = ctypes.create_string_buffer(BUFFER)
    _call(nvml, function, *arguments, text, ctypes.c_uint(BUFFER))
    return text.value.decode("utf-8", "replace")


def _call(nvml: Any, function: str, *arguments: Any) -> None:
    """Call NVML. Raises NoGpu with the message of NVML for any code except NVML_SUCCESS (0)."""
    code = getattr(nvml, function)(*arguments)
    if code:
        raise _refusal(nvml, function, code)


def _refusal(nvml: Any, function: str, code: int) -> NoGpu:
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    message = (nvml.nvmlErrorString(code) or b"").decode("utf-8", "replace")
    if code == VERSION_MISMATCH:
        return LostGpu(f"{UNUSABLE}{function} of NVML answers {code} ({message}){_loaded()}")
    return NoGpu(f"{UNUSABLE}{function} of NVML answers {code} ({message})")


def _loaded() -> str:
    """Return the loaded NVML file and a hint, if its name has a version: an image may contain another
    NVML.
    """
    try:
        libraries = sorted(set(NVML.findall(_read(Path("/proc/self/maps"), 1 << 22))))
    except OSError:
        libraries = []
    of = f" by {', '.join(libraries)}" if libraries else ""
    return f"{of}; reload the module or restart the machine, or remove an NVML that an image brings"


# --- The GPUs of a job


def lost_gpus(notes: Mapping[str, str]) -> dict[int, str]:
    """Return the reasons why GPUs are unusable, by NVML index."""
    lost = {name[len(LOST) :]: text for name, text in notes.items() if name.startswith(LOST)}
    return {int(index): text for index, text in lost.items() if index.isdecimal() and len(index) < 4}


def lost_note(notes: Mapping[str, str]) -> str:
    """Return a note about unusable GPUs, as a suffix of a message."""
    return "".join(f"; GPU {index} cannot be used: {why}" for index, why in lost_gpus(notes).items())


def choose(capabilities: Sequence[str], capability: str, *, several: bool) -> list[int]:
    """Return the position of the first GPU with this capability, or of the first GPU for "".

    With `several`, return all positions of the first capability that at least two GPUs have.
    """
    for first in capabilities:
        alike = [index for index, other in enumerate(capabilities) if other == first]
        if capability in ("", first) and (len(alike) > 1 or not several):
            return alike if several else alike[:1]
    return []


def names_lost(text: str, uuids: Sequence[str], known: Sequence[str], notes: Mapping[str, str]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES starts with an unusable GPU. `known` are the UUIDs in /proc."""
    first, lost = text.split(",")[0].strip(), lost_gpus(notes)
    if number := re.match(r"\+?([0-9]{1,4})(?![0-9])", first):
        return int(number[1]) in lost
    others = [uuid for uuid in known if uuid not in uuids and uuid.startswith(first)]
    return bool(lost and first.startswith("GPU-") and others)


def _by_index(uuids: Sequence[str], notes: Mapping[str, str]) -> list[str]:
    """Return the UUIDs in NVML's order, "" for an unusable GPU."""
    lost, rest = lost_gpus(notes), iter(uuids)
    return ["" if index in lost else next(rest, "") for index in range(len(uuids) + len(lost))]


class SeenGpu(NamedTuple):
    """An entry of CUDA_VISIBLE_DEVICES, and the UUID of its whole GPU.

    The UUID is empty for an index in an order that only CUDA knows.
    """

    entry: str
    uuid: str


def read_visible(
    text: str, uuids: Sequence[str], notes: Mapping[str, str], *, ordered: bool
) -> list[SeenGpu]:
    """Return the GPUs that CUDA shows to a program for a value of CUDA_VISIBLE_DEVICES, in that order.

    `uuids` are the GPUs of NVML. `ordered` means that CUDA has the same order as NVML: for GPUs of one model,
    or with CUDA_DEVICE_ORDER=PCI_BUS_ID. As in CUDA, the first invalid entry ends the list. A duplicate
    entry, or a prefix of two UUIDs, makes the list empty. All entries have the format of the first one. Of
    several MIG slices, a program sees only the first.
    """
    by_index = _by_index(uuids, notes)
    names = {uuid: uuid for uuid in uuids}
    names.update({name: uuid for name, uuid in notes.items() if name.startswith("MIG-")})
    gpus: list[SeenGpu] = []
    for entry in map(str.strip, text.split(",")):
        number = re.match(r"\+?([0-9]{1,4})(?![0-9])", entry)
        old = re.fullmatch(r"MIG-(GPU-[0-9a-f-]{36})/[0-9]+/[0-9]+", entry)
        fitting = [name for name in names if entry.startswith(("GPU-", "MIG-")) and name.startswith(entry)]
        if number and int(number[1]) < len(by_index):
            index = int(number[1])
            gpu = SeenGpu(str(index), by_index[index] if ordered else "")
        elif old:
            gpu = SeenGpu(entry, names.get(old[1], ""))
        elif fitting:
            gpu = SeenGpu(fitting[0], names[fitting[0]])
        else:
            break
        if len(fitting) > 1 or gpu.entry in [before.entry for before in gpus]:
            return []
        other = bool(gpus) and _form(gpus[0].entry) != _form(gpu.entry)
        if other or not (gpu.uuid or (number and not ordered)):
            break
        gpus.append(gpu)
    return gpus[:1] if gpus and _form(gpus[0].entry) == "MIG-" else gpus


def visible_value(gpus: Sequence[SeenGpu], notes: Mapping[str, str], *, pci: bool) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a container, where CUDA may use another order.

    `pci` means that CUDA_DEVICE_ORDER is PCI_BUS_ID outside.
    """
    sliced = {uuid for name, uuid in notes.items() if name.startswith("MIG-")}
    by_uuid = [pci and gpu.entry.isdigit() and gpu.uuid not in sliced for gpu in gpus]
    return ",".join(gpu.uuid if plain else gpu.entry for plain, gpu in zip(by_uuid, gpus))  # noqa: B905 - Python 3.9


def _form(entry: str) -> str:
    return "index" if entry.isdigit() else entry[:4]


# --- The GPUs that a user selects


ALL = "all"
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
CDI_KIND = "nvidia.com/gpu"
MAKE_CDI = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
LARGEST_SPEC = 1 << 22
_NUMBER = re.compile("[0-9]{1,4}")
# In JSON and YAML. Hooks have `hookName`.
_KIND = re.compile(r"""(?<![A-Za-z])kind["']?\x20*:\x20*["']?nvidia\.com/gpu["'\s,}]""")
_NAME = re.compile(r"""(?<![A-Za-z])name["']?[ ]*:[ ]*["']?([A-Za-z0-9][A-Za-z0-9_.:-]*)""")
_HOST_PATH = re.compile(r"""(?<![A-Za-z])hostPath["']?\x20*:\x20*["']?(/[^\s"',}]+)""")
_DRIVER = re.compile(r"libcuda\.so\.([0-9]+\.[0-9]+(?:\.[0-9]+)?)")


class SelectionError(Exception):
    """A value of --gpus has a GPU that cannot be used. `hint` names those that can."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.hint = hint


class SelectedGpu(NamedTuple):
    """A GPU or a MIG slice, by the UUID that CUDA_VISIBLE_DEVICES takes.

    `number` is NVML's index of the whole GPU, `node` its device (`/dev/nvidia1`), empty if unknown.
    """

    number: int
    uuid: str
    node: str


def select(
    text: str,
    uuids: Sequence[str],
    notes: Mapping[str, str],
    nodes: Mapping[str, str],
    *,
    one_slice: bool = False,
) -> list[SelectedGpu]:
    """Return the GPUs of a value of --gpus, in its order: indices of NVML, UUIDs of GPUs or MIG slices.

    `uuids` are the usable GPUs of NVML, `nodes` the devices by UUID. Nothing is skipped. Raises
    SelectionError, with `one_slice` also for several MIG slices: a program of CUDA sees only the first.
    """
    by_index, lost = _by_index(uuids, notes), lost_gpus(notes)
    slices = {name: uuid for name, uuid in notes.items() if name.startswith("MIG-")}
    gpus: list[SelectedGpu] = []
    for entry in (part.strip() for part in text.split(",")):
        number = int(entry) if _NUMBER.fullmatch(entry) else -1
        uuid = by_index[number] if 0 <= number < len(by_index) else entry
        whole = slices.get(uuid, uuid)
        problem = ""
        if number in lost:
            problem = f"GPU {number} cannot be used: {lost[number]}"
        elif whole not in uuids:
            problem = f"this machine has no GPU {entry[:80]!a}"
        elif uuid in slices.values():
            problem = f"GPU {entry} is divided into MIG slices, and programs use a slice"
        elif uuid in [gpu.uuid for gpu in gpus]:
            problem = f"GPU {entry} is selected twice"
        if problem:
            whole_gpus = [
                f"{index} ({name})"
                for index, name in enumerate(by_index)
                if name and name not in slices.values()
            ]
            parts = [f"{name} (of GPU {by_index.index(parent)})" for name, parent in slices.items()]
            raise SelectionError(problem, f"select from {', '.join([*whole_gpus, *parts])}, or all")
        gpus.append(SelectedGpu(by_index.index(whole), uuid, nodes.get(whole, "")))
    if one_slice and len(gpus) > 1 and any(gpu.uuid in slices for gpu in gpus):
        raise SelectionError("the suite uses one MIG slice: CUDA programs see only the first", "pass one")
    return gpus


class CdiDevices(NamedTuple):
    """The GPUs in CDI specifications (`0`, `GPU-...`, `all`), with the versions and files of their driver."""

    names: Sequence[str]
    drivers: Sequence[str]
    libraries: Sequence[str] = ()


def read_cdi(folders: Sequence[str] = CDI_FOLDERS) -> CdiDevices:
    """Return the NVIDIA GPUs that the specifications in these directories describe."""
    names: set[str] = set()
    drivers: set[str] = set()
    libraries: set[str] = set()
    for path in sorted(path for folder in folders for path in Path(folder).glob("*")):
        if path.suffix in (".json", ".yaml", ".yml") and path.is_file():
            try:
                text = _read(path, LARGEST_SPEC)
            except OSError:  # unreadable for the engine too, if it runs as this user
                continue
            if _KIND.search(text):
                names.update(_NAME.findall(text))
                drivers.update(_DRIVER.findall(text))
                libraries.update(
                    path for path in _HOST_PATH.findall(text) if Path(path).name.startswith(_LOADED)
                )
    return CdiDevices(sorted(names), sorted(drivers), sorted(libraries))


def cdi_names(gpus: Sequence[Sequence[Any]], devices: CdiDevices) -> list[str]:
    """Return the names of GPUs for `--device`. `gpus` are like SelectedGpu, none for all.

    A UUID comes first: a job that sees a part of the GPUs counts from 0, the specification counts all.
    """
    names = []
    for index, uuid, _ in gpus:
        by_index = uuid not in devices.names and uuid.startswith("GPU-")
        names.append(f"{CDI_KIND}={index if by_index else uuid}")
    return names or [f"{CDI_KIND}={ALL}"]


def outdated_cdi(devices: CdiDevices, driver: str) -> str:
    """Return the problem if the specifications are for other drivers than the loaded one, "" if not."""
    if not driver or not devices.drivers or driver in devices.drivers:
        return ""
    drivers = ", ".join(devices.drivers)
    return f"the CDI specification of the GPUs is for driver {drivers}, and the loaded one is {driver}"


# --- The driver's libraries, and the C library that they need


LIBRARIES = (
    "libcuda.so",
    "libcudadebugger.so",
    "libnvidia-allocator.so",
    "libnvidia-cfg.so",
    "libnvidia-gpucomp.so",
    "libnvidia-ml.so",
    "libnvidia-nvvm.so",
    "libnvidia-nvvm70.so",
    "libnvidia-opencl.so",
    "libnvidia-pkcs11-openssl3.so",
    "libnvidia-pkcs11.so",
    "libnvidia-ptxjitcompiler.so",
    "libnvidia-tileiras.so",
)
CACHE_LINE = re.compile(r"^\s+(?P<name>\S+) \((?P<flags>[^)]*)\) => (?P<path>/.+)$")
CACHE_ARCHITECTURES = {"x86_64": "x86-64", "aarch64": "AArch64"}
LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig")
# Programs of CUDA load these. Others are for debuggers, OpenCL or confidential computing, and may need more.
_LOADED = ("libcuda.so", "libnvidia-gpucomp.so", "libnvidia-ml.so", "libnvidia-nvvm", "libnvidia-ptxjit")
FLOOR_GLIBC = (2, 17)
"""The glibc of manylinux2014: older images run no wheel of a framework."""
GLIBC_OF_BASES = (("debian-12", (2, 36)), ("ubuntu-24.04", (2, 39)), ("debian-13", (2, 41)))
PROBE_GLIBC = ("getconf", "GNU_LIBC_VERSION")
"""Prints `glibc 2.36` in an image. The tool comes with the C library."""
_VERNEED, _WEAK = 0x6FFFFFFE, 2
_SECTIONS, _TABLE = 4096, 1 << 24  # limits, in entries and bytes
_GLIBC = re.compile(rb"GLIBC_([0-9]{1,4}(?:\.[0-9]{1,4}){1,2})")
_RELR = b"GLIBC_ABI_DT_RELR"  # glibc 2.36 and newer


def parse_linker_cache(text: str, *, machine: str) -> tuple[tuple[str, str], ...]:
    """Return (soname, path) of the driver's libraries in the output of `ldconfig -p`, for this architecture.

    The first line for a soname is used, as in the dynamic linker.
    """
    architecture = CACHE_ARCHITECTURES.get(machine, machine)
    libraries: dict[str, str] = {}
    for line in text.splitlines():
        match = CACHE_LINE.match(line)
        if not match or architecture not in [part.strip() for part in match["flags"].split(",")]:
            continue
        name = match["name"]
        if any(name == library or name.startswith(library + ".") for library in LIBRARIES):
            libraries.setdefault(name, match["path"])
    return tuple(sorted(libraries.items()))


def read_linker_cache() -> str:
    """Return the output of `ldconfig -p`, "" without ldconfig."""
    for program in LDCONFIG:
        if Path(program).is_file():
            return subprocess.run(
                [program, "-p"], capture_output=True, text=True, check=False, env={}, stdin=subprocess.DEVNULL
            ).stdout
    return ""


def driver_libraries() -> list[str]:
    """Return the paths of the driver's libraries in the dynamic linker's cache."""
    return [path for _, path in parse_linker_cache(read_linker_cache(), machine=os.uname().machine)]


class GlibcNeed(NamedTuple):
    """The newest glibc (`(2, 34)`) that a library needs, (0,) for none, and the path of the library."""

    version: tuple[int, ...]
    library: str


def newest_need(paths: Iterable[str]) -> GlibcNeed:
    """Return the newest need of the libraries that CUDA programs load, of those in `paths`."""
    files = sorted({path for path in paths if Path(path).name.startswith(_LOADED)})
    return max((GlibcNeed(read_glibc_need(Path(path)), path) for path in files), default=GlibcNeed((0,), ""))


def read_glibc_need(path: Path) -> tuple[int, ...]:
    """Return the newest glibc that a 64-bit library needs, (0,) for none or another file.

    Source: Linux Standard Base 5.0, Core, symbol versioning: the section .gnu.version_r.
    """
    newest: tuple[int, ...] = (0,)
    try:
        with path.open("rb") as file:
            for name in _needed_versions(file):
                match = _GLIBC.fullmatch(name)
                version = (
                    (2, 36) if name == _RELR else tuple(map(int, match[1].split(b"."))) if match else (0,)
                )
                newest = max(newest, version)
    except (OSError, struct.error):
        pass  # unreadable or cut: then the program says more
    return newest


def _needed_versions(file: BinaryIO) -> Iterator[bytes]:
    """Yield the names of the versions in .gnu.version_r, without weak ones."""
    head = file.read(64)
    if head[:6] != b"\x7fELF\2\1":
        return
    (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    if size != 64 or count > _SECTIONS:
        return
    file.seek(start)
    table = file.read(size * count)
    sections = [struct.unpack_from("<4xI16xQQI", table, at) for at in range(0, size * count, size)]
    for kind, offset, length, link in sections:
        if kind != _VERNEED or link >= len(sections):
            continue
        data, names = _bytes_at(file, offset, length), _bytes_at(file, *sections[link][1:3])
        at = 0
        for _ in range(_SECTIONS):
            count, aux, step = struct.unpack_from("<2xH4xII", data, at)
            entry = at + aux
            for _ in range(count):
                flags, name, further = struct.unpack_from("<4xH2xII", data, entry)
                if not flags & _WEAK:
                    yield names[name : names.find(b"\0", name)]
                entry += further
                if not further:
                    break
            if not step:
                break
            at += step


def _bytes_at(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(min(length, _TABLE))


def parse_glibc(text: str) -> tuple[int, ...]:
    """Return (2, 36) for the output `glibc 2.36` of PROBE_GLIBC, (0,) for other texts."""
    match = re.match(r"glibc ([0-9]{1,4})\.([0-9]{1,4})", text)
    return (int(match[1]), int(match[2])) if match else (0,)


def glibc_problem(need: GlibcNeed, version: tuple[int, ...]) -> str:
    """Return the problem of an image with glibc `version`, "" for none or (0,), an unknown version."""
    if version == (0,) or need.version <= version:
        return ""
    needed, present = (".".join(map(str, numbers)) for numbers in (need.version, version))
    return (
        f"{Path(need.library).name} of this machine's driver needs glibc {needed} and the image has "
        f"{present}, so programs in it cannot use the GPU"
    )


def newer_base(version: tuple[int, ...]) -> str:
    """Return what to build images on for drivers that need this glibc: `a newer base, such as debian-13`."""
    known = [name for name, glibc in GLIBC_OF_BASES if glibc >= version]
    return f"a newer base, such as {' or '.join(known)}" if known else "a newer base"
