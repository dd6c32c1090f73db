"""Predictions for AMD GPUs. AMD code has no PTX: it is for the processor of the GPU, or it does not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from imagefactory.gpu.capability import Capability, CodeKind, GpuCode, parse_capability
from imagefactory.gpu.frameworks import LibraryRole, find_framework, role_of
from imagefactory.gpu.knowledge.gpus import generic_processors, processors
from imagefactory.gpu.values import (
    Compatibility,
    GpuLibrary,
    LibrarySupport,
    Prediction,
    ScanResult,
    SupportLevel,
)

_OBJECTS = (".co", ".hsaco")
"""Code object files.

A library loads only those for the GPU present, so files for other GPUs are not a fault.
"""
_ROCM = ("libamdhip64", "libMIOpen", "librccl", "librocblas", "librocfft", "librocsolver", "librocsparse")
"""Libraries of ROCm, which PyTorch wheels include without a version in the file names."""
NO_RUNTIME = "; ROCm's own libraries are not in it, and must be where it runs"


def amd_runs(code: GpuCode, target: str) -> bool:
    """Return whether code runs on a GPU with that target ID (`gfx90a:sramecc+:xnack-`, or only `gfx90a`).

    The processor must be the same, or belong to the generic processor of the code. If both IDs name a
    feature, its settings must be equal. A feature that only one ID names is not compared. Source: LLVM, User
    Guide for AMDGPU Backend, target ID.
    """
    if code.kind is not CodeKind.AMD:
        return False
    processor, features = _parse(code.processor)
    required, settings = _parse(target)
    if required != processor and required not in generic_processors().get(processor, frozenset()):
        return False
    return all(settings.get(name, on) == on for name, on in features.items())


def count_amd_modules(library: GpuLibrary, target: str) -> tuple[int, int]:
    """Return how many modules of a library with AMD code run on that target, and the number of all these
    modules.
    """
    modules = [
        module for module in library.modules if any(code.kind is CodeKind.AMD for code in module.codes)
    ]
    fitting = [module for module in modules if any(amd_runs(code, target) for code in module.codes)]
    return sum(module.count for module in fitting), sum(module.count for module in modules)


def amd_targets(contents: ScanResult) -> tuple[str, ...]:
    """Return every target of the AMD code, sorted by number."""
    codes = {code for library in contents.libraries for modules in library.modules for code in modules.codes}
    return tuple(sorted((code.processor for code in codes if code.kind is CodeKind.AMD), key=target_order))


def amd_capabilities(contents: ScanResult) -> tuple[Capability, ...]:
    """Return the AMD GPUs to predict for scanned contents: all known ones and the targets of the code.

    The result is empty if there is no AMD code.
    """
    named = {target.partition(":")[0] for target in amd_targets(contents)}
    plain = {processor for name in named for processor in generic_processors().get(name, {name})}
    known = processors() if named else ()
    return tuple(sorted({*map(parse_capability, plain), *known}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _AmdLibrary:
    """A library, or the code objects in one directory.

    `fitting` of `total` modules have code for the target.
    """

    path: str
    fitting: int
    total: int
    gates: bool


def predict_amd(contents: ScanResult, target: str) -> Prediction:
    """Return the prediction of a scan for GPUs with a target ID (`gfx90a`, `gfx90a:xnack-`).

    It is NO if a library that the framework must load has no code for the target. It is PARTLY if other
    libraries, or some of their modules, have none. The code does not tell which driver it needs.
    """
    parts = list(_parts(contents, target))
    answer, reason = _answer(contents, parts, target)
    return Prediction(
        capability=parse_capability(target.partition(":")[0]),
        answer=answer,
        reason=reason,
        driver="",
        driver_reason="",
        libraries=tuple(map(_reach, parts)),
    )


def lacks_runtime(contents: ScanResult) -> bool:
    """Return whether the contents have AMD code but no ROCm libraries: then nothing runs."""
    names = (*contents.toolkit, *(library.path.rpartition("/")[2] for library in contents.libraries))
    return not any(name.startswith(_ROCM) for name in names) and any(map(is_amd, contents.libraries))


def is_amd(library: GpuLibrary) -> bool:
    """Return whether a library has AMD code."""
    return any(code.processor for modules in library.modules for code in modules.codes)


def is_object(library: GpuLibrary) -> bool:
    """Return whether this is a code object file, which a library loads only for its GPU."""
    return library.path.endswith(_OBJECTS)


def _parts(contents: ScanResult, target: str) -> Iterator[_AmdLibrary]:
    framework = find_framework(contents)
    directories: dict[str, list[GpuLibrary]] = {}
    for library in filter(is_amd, contents.libraries):
        if is_object(library):
            directories.setdefault(library.path.rpartition("/")[0], []).append(library)
            continue
        fitting, total = count_amd_modules(library, target)
        gates = role_of(library.path, framework)[0] is LibraryRole.GATES
        yield _AmdLibrary(path=library.path, fitting=fitting, total=total, gates=gates)
    for directory, files in directories.items():
        fits = any(count_amd_modules(library, target)[0] for library in files)
        yield _AmdLibrary(path=f"{directory}/", fitting=int(fits), total=1, gates=False)


def _answer(contents: ScanResult, parts: list[_AmdLibrary], target: str) -> tuple[Compatibility, str]:
    if not parts:
        return Compatibility.NO, "it has no code for AMD's GPUs"
    only = f"only for {', '.join(amd_targets(contents))}"
    if all(part.path.endswith("/") for part in parts):
        return _objects_alone(contents, target, only)
    for part in parts:
        if part.gates and not part.fitting:
            return Compatibility.NO, f"{_name(part)} has no code for {target}, {only}"
    if not any(part.fitting for part in parts):
        return Compatibility.NO, f"no code for {target}, {only}"
    hip = NO_RUNTIME if lacks_runtime(contents) else ""
    if lacking := [_name(part) for part in parts if part.fitting < part.total]:
        some = ", ".join(lacking[:3]) + (", ..." if lacking[3:] else "")
        return (
            Compatibility.PARTLY,
            f"{len(lacking)} of {len(parts)} libraries lack code for {target}: {some}{hip}",
        )
    which = f"all {len(parts)} libraries" if len(parts) > 1 else "its one library"
    have = "have" if len(parts) > 1 else "has"
    return Compatibility.YES, f"{which} with code for AMD's GPUs {have} it for {target}{hip}"


def _objects_alone(contents: ScanResult, target: str, only: str) -> tuple[Compatibility, str]:
    files = list(filter(is_amd, contents.libraries))
    fitting = sum(count_amd_modules(library, target)[0] > 0 for library in files)
    if not fitting:
        return Compatibility.NO, f"no code for {target}, {only}"
    some = f"{fitting} of its {len(files)} code objects" if len(files) > 1 else "its one code object"
    return Compatibility.YES, f"{some} {'is' if fitting == 1 else 'are'} for {target}"


def _reach(part: _AmdLibrary) -> LibrarySupport:
    whole = SupportLevel.NATIVE if part.fitting == part.total else SupportLevel.PARTIAL
    return LibrarySupport(
        path=part.path,
        reach=whole if part.fitting else SupportLevel.NONE,
        native=part.fitting,
        ptx=0,
        without=part.total - part.fitting,
        isa="",
        gates=part.gates,
    )


def _name(part: _AmdLibrary) -> str:
    """Return the name of the file, or of the directory with code objects."""
    return part.path.rpartition("/")[2] or f"{part.path.split('/')[-2]}/"


def target_order(target: str) -> tuple[object, ...]:
    """Return a sort key: processors and target IDs by number, then generic processors, which are not GPUs."""
    try:
        return 0, parse_capability(target.partition(":")[0]), target
    except ValueError:
        return 1, Capability(0, 0), target


def _parse(target: str) -> tuple[str, dict[str, bool]]:
    processor, *features = target.split(":")
    return processor, {feature[:-1]: feature[-1] == "+" for feature in features if feature}
