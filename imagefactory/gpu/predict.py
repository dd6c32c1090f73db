"""Predictions from GPU code: the rules below and in drivers.py, applied to a framework.

A prediction is only about existing code. A scan cannot see code that is compiled later (Triton, XLA, NVRTC)
or downloaded later. Only a run shows whether results are right. A prediction is never called verified.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from imagefactory.gpu.amd import amd_capabilities, amd_targets, predict_amd
from imagefactory.gpu.capability import Capability, CodeKind, GpuCode
from imagefactory.gpu.drivers import (
    MinimumDriver,
    cuda_floor,
    driver_version,
    gpu_refusal,
    minimum_driver,
    older,
)
from imagefactory.gpu.forward import ForwardNote, is_consumer, serves_driver
from imagefactory.gpu.frameworks import (
    Framework,
    LibraryRole,
    cpu_only,
    cuda_of,
    find_framework,
    find_package,
    matches,
    role_of,
    variant_of,
)
from imagefactory.gpu.knowledge.gpus import capabilities
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.gpu.knowledge.toolkits import (
    RunTimeCompiler,
    find_compiler,
    forward_names,
    native_driver,
    toolkits_for,
)
from imagefactory.gpu.known_bad import ANSWERS, matching_rules, versions_in, worst_answer
from imagefactory.gpu.values import (
    Compatibility,
    GpuLibrary,
    LibrarySupport,
    ModuleCount,
    Prediction,
    ScanResult,
    SupportLevel,
)

# --- Which GPU code runs on which capability: rules R1 to R5, R8 and R9, pure functions with their sources
# R6 and R7, and the driver's side of R5, are in drivers.py.


INTEGRATED = frozenset(Capability(*pair) for pair in ((5, 3), (6, 2), (7, 2), (8, 7), (11, 0)))
"""Capabilities of Jetson and DRIVE modules."""
FAMILIES = {
    Capability(10, 0): frozenset({Capability(10, 0), Capability(10, 3), Capability(10, 7)}),
    Capability(10, 3): frozenset({Capability(10, 3), Capability(10, 7)}),
    Capability(11, 0): frozenset({Capability(11, 0)}),
    Capability(12, 0): frozenset({Capability(12, 0), Capability(12, 1)}),
    Capability(12, 1): frozenset({Capability(12, 1)}),
}
"""The capabilities that run code with the suffix `f`, by the architecture of the code."""
_FIRST_FP8 = Capability(8, 9)
_FEW = 100  # one of so many modules without code is a special case of a function
_MOST = 10  # times as many: a build for one major, with code from elsewhere linked in
_RENAMED = {Capability(10, 1): Capability(11, 0)}


def renamed(capability: Capability) -> Capability:
    """Return the new name of a capability: since CUDA 13.0, 10.1 is called 11.0. It is the same GPU.

    This is rule R4. Source: NVIDIA, CUDA Toolkit 13.0 release notes and PTX ISA 9.0: sm_101 is renamed to
    sm_110.
    """
    return _RENAMED.get(capability, capability)


def sass_runs(architecture: Capability, capability: Capability) -> bool:
    """Return whether machine code runs on a capability: same major version, and the same or a newer minor
    version.

    These are rules R1 and R2. Integrated GPUs run only code for their exact capability. Source: NVIDIA, CUDA
    Programming Guide, binary compatibility: there is none for Tegra, nor between Tegra and desktop GPUs.
    """
    if architecture in INTEGRATED or capability in INTEGRATED:
        return architecture == capability
    return architecture.major == capability.major and architecture.minor <= capability.minor


def suffix_runs(code: GpuCode, capability: Capability) -> bool:
    """Return whether code with a suffix runs: with `a` on one capability, with `f` on its family.

    Also for PTX.

    This is rule R3. Source: NVIDIA, nvcc documentation, architecture-specific and family-specific targets,
    and the table of families in the CUDA Programming Guide.
    """
    assert code.architecture is not None
    architecture = renamed(code.architecture)
    if code.suffix == "f":
        return capability in FAMILIES.get(architecture, frozenset({architecture}))
    return architecture == capability


def ptx_compiles(architecture: Capability, capability: Capability) -> bool:
    """Return whether a driver can compile plain PTX for a GPU: one of the same or a newer capability.

    This is rule R5. Source: NVIDIA, CUDA Programming Guide, PTX compatibility. `ptx_floor` has the drivers.
    """
    return architecture <= capability


def runs(code: GpuCode, capability: Capability) -> SupportLevel:
    """Return how one piece of code runs on a capability: NATIVE, PTX or NONE.

    By rule R8, LTO-IR does not run, since it is input of a linker. Source: NVIDIA, nvcc documentation,
    `-dlto`. AMD code runs on no CUDA capability.
    """
    if code.architecture is None or code.kind is CodeKind.LTO:
        return SupportLevel.NONE
    architecture, capability = renamed(code.architecture), renamed(capability)
    there = SupportLevel.PTX if code.kind is CodeKind.PTX else SupportLevel.NATIVE
    if code.suffix:
        return there if suffix_runs(code, capability) else SupportLevel.NONE
    decide = ptx_compiles if code.kind is CodeKind.PTX else sass_runs
    return there if decide(architecture, capability) else SupportLevel.NONE


def generic_modules(library: GpuLibrary) -> tuple[ModuleCount, ...]:
    """Return the generic modules of a library: those for two or more major versions, or all if there are
    none.

    This is rule R9. Libraries also have modules for single GPUs that other GPUs do not need; these tell
    nothing about the rest. Targets with the suffix `a` are such extras: alone, they make no module generic.
    If other modules have plain targets of one major version, such extras count (a kernel for 8.0 and newer in
    a library for 7.5 and newer). Source: measured in the modules of torch 1.13.1 to 2.14.1, tensorflow
    2.18.1, onnxruntime-gpu 1.28.0 to 1.31.1.

    If nearly all modules are machine code for the same major version, the library is a build for it, and all
    modules count. LTO-IR, which is already linked or never will be, counts only if there is no other code.
    """
    some = tuple(
        modules for modules in library.modules if any(code.kind is not CodeKind.LTO for code in modules.codes)
    )
    if not any(len(_majors(modules, extras=False)) > 1 for modules in some):
        return some or library.modules
    generic = tuple(modules for modules in some if len(_majors(modules, extras=True)) > 1)
    single = dict.fromkeys((major for modules in some for major in _majors(modules, extras=True)), 0)
    for modules in some:
        majors = _majors(modules, extras=True)
        if len(majors) == 1 and any(code.kind is CodeKind.SASS for code in modules.codes):
            single[majors.pop()] += modules.count
    most = sum(single.values())
    if most in single.values() and most > _MOST * sum(modules.count for modules in generic):
        return some
    return generic


def reach(library: GpuLibrary, capability: Capability, *, gates: bool = False) -> LibrarySupport:
    """Return how much of a library's code runs on one capability, counted over its generic modules.

    `gates` means that the framework must load the library.
    """
    native = ptx = without = 0
    isas: set[str] = set()
    objects = _objects(library)
    for modules in generic_modules(library):
        ways = [(runs(code, capability), code) for code in modules.codes]
        compiled = [code.isa for way, code in ways if way is SupportLevel.PTX]
        if any(way is SupportLevel.NATIVE for way, _ in ways):
            native += modules.count
        elif compiled:
            ptx += modules.count
            isas.add(min(compiled, key=numbers))  # the oldest suitable PTX works with the most drivers
        elif linked := _jit_linked_ptx(modules, objects, capability):
            ptx += modules.count
            isas.add(linked)
        else:
            without += modules.count
    if not native + ptx:
        way = SupportLevel.NONE
    elif without:
        way = SupportLevel.PARTIAL
    else:
        way = SupportLevel.PTX if ptx else SupportLevel.NATIVE
    return LibrarySupport(
        path=library.path,
        reach=way,
        native=native,
        ptx=ptx,
        without=without,
        isa=max(isas, key=numbers, default=""),
        gates=gates,
    )


def usual_codes(library: GpuLibrary) -> tuple[GpuCode, ...]:
    """Return the sorted targets of at least half of the generic modules, or those of all modules if there are
    none.
    """
    counts: dict[GpuCode, int] = {}
    modules = generic_modules(library)
    for module in modules:
        for code in module.codes:
            counts[code] = counts.get(code, 0) + module.count
    half = sum(module.count for module in modules) / 2
    return tuple(sorted(code for code in counts if counts[code] >= half) or sorted(counts))


def _objects(library: GpuLibrary) -> dict[Capability, str]:
    """Return the targets of modules with only plain PTX, each with its newest instruction set version."""
    isas: dict[Capability, str] = {}
    for modules in library.modules:
        code = modules.codes[0] if len(modules.codes) == 1 else None
        if code and code.architecture and code.kind is CodeKind.PTX and not code.suffix:
            isas[code.architecture] = max(isas.get(code.architecture, "0"), code.isa, key=numbers)
    return isas


def _jit_linked_ptx(modules: ModuleCount, objects: dict[Capability, str], capability: Capability) -> str:
    """Return the PTX that a driver must compile in place of a linked module, empty if it cannot.

    Separately compiled code is in a library as one linked module of machine code and as its objects. Builds
    may keep only the PTX of the objects, for the newest of the linked targets. For other GPUs, the driver
    compiles and links all of them. Source: NVIDIA, nvcc documentation, JIT linking; measured in NCCL of
    tensorflow 2.15.1 to 2.20.0: one module that is registered as linked, 116 to 362 of PTX in
    `__nv_relfatbin`.
    """
    targets = {
        code.architecture for code in modules.codes if code.kind is CodeKind.SASS and code.architecture
    }
    if modules.count > 1 or len(targets) < 2 or len(targets) < len(modules.codes):
        return ""
    newest = max(targets)
    return objects.get(newest, "") if ptx_compiles(renamed(newest), renamed(capability)) else ""


def _majors(modules: ModuleCount, *, extras: bool) -> set[int]:
    """Return the major versions of plain targets.

    With `extras`, also those of targets with `a`, if any is plain.
    """
    codes = [code for code in modules.codes if code.kind is not CodeKind.LTO]
    plain = [code for code in codes if code.suffix != "a"]
    counted = codes if extras and plain else plain
    return {renamed(code.architecture).major for code in counted if code.architecture}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeCode:
    """The answer for code that a package compiles while it runs. `cuda` is the CUDA of its compiler."""

    answer: Compatibility
    reason: str
    cuda: str
    source: str

    @property
    def floor(self) -> MinimumDriver:
        """Return the oldest driver: PTX needs one that supports the CUDA that wrote it."""
        if self.answer is not Compatibility.PTX:
            return cuda_floor(self.cuda)
        return MinimumDriver(
            driver=native_driver(self.cuda), reason=f"the first that compiles PTX of CUDA {self.cuda}"
        )


def predict_run_time_code(
    name: str, version: str, cuda: str, packages: Iterable[tuple[str, str]], capability: Capability
) -> RunTimeCode | None:
    """Return the answer for a package that compiles its code while it runs, None if no row is known.

    `cuda` is used if none of the `packages` is its compiler.

    This is rule R10: the compiler must have a target for the GPU, and the package must choose it. If the
    package chooses an older target, its machine code must run there (R1 and R2), or the driver compiles its
    PTX (R5). A compiler takes only names that it knows, so R4 does not apply. Sources: compilers.toml.
    """
    if capability.processor or not (known := find_compiler(name, version, cuda, packages)):
        return None
    row, exact = known
    toolkits = row.toolkits(exact)
    targets = {target for _, some in toolkits for target in some}
    if not targets:
        return None
    limit = _target_limit(row, exact, capability)
    target = min(capability, limit) if limit else capability
    if row.newer and target not in targets:
        target = max((older for older in targets if older < target), default=target)
    cuda, some = next((toolkit for toolkit in toolkits if target in toolkit[1]), toolkits[-1])
    compiles = f"{row.compiler} {cuda} compiles for {some[0]} to {some[-1]}"
    answer, reason = Compatibility.NO, compiles
    if row.minimum and capability < row.minimum:
        reason = f"documented for {row.minimum} and newer"
    elif target not in targets:
        reason += f", not for {target}{_other_toolkit(row, capability, exact)}"
    elif target == capability:
        answer = Compatibility.PTX if row.ptx else Compatibility.YES
        reason += ", and the driver compiles its PTX" if row.ptx else ""
    elif row.newer_to and capability > row.newer_to:
        reason = f"the PTX that {name} {version} compiles for {target} is reported to fail on newer GPUs"
        reason += _other_toolkit(row, capability, exact)
    elif row.ptx or row.newer:
        answer = Compatibility.PTX
        reason += f": for {capability} the driver compiles its PTX for {target}"
    elif sass_runs(target, capability):
        answer = Compatibility.YES
        reason += f", and {target.sm} code runs on {capability}"
    else:
        subject = f"{name} {version} with {row.compiler} {cuda}"
        reason = f"{subject} compiles for {target} on GPUs of {capability}, where that does not run"
        reason += _other_toolkit(row, capability, exact)
    return RunTimeCode(answer=answer, reason=reason, cuda=cuda, source=row.source)


def _target_limit(row: RunTimeCompiler, cuda: str, capability: Capability) -> Capability | None:
    """Return the newest target that a package chooses for a GPU, None for no limit."""
    if capability in INTEGRATED or not row.limited.contains(str(capability)):
        return None
    limits = [newest for first, newest in row.limits if numbers(first) <= numbers(cuda)]
    return limits[-1] if limits else None


def _other_toolkit(row: RunTimeCompiler, capability: Capability, cuda: str) -> str:
    """Return which CUDA version of the compiler would do, as the end of a sentence."""
    known = [] if row.bundled else [known for known in toolkits_for(capability) if known in row.cuda]
    limits = {version: _target_limit(row, version, capability) for version in known}
    fitting = [version for version, limit in limits.items() if not limit or limit >= capability]
    newer = [version for version in fitting if numbers(version) > numbers(cuda)]
    if newer:
        return f"; CUDA {newer[0]} or newer would do"
    return f"; CUDA {fitting[-1]} or older would do" if fitting else ""


_SYSTEM = ("usr/", "opt/", "lib/", "lib64/", "home/", "root/")
_DRIVER = re.compile(r"libcuda\.so\.([0-9.]+)")
# Capabilities of data-center GPUs (V100, A100, H100, B200, B300), besides a few 7.0 workstations.
_DATA_CENTER = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
DRIVER_FACT, OWN = "driver", "of the image itself"
"""The name of the fact about a driver library, and its value for a library that is part of the image."""
SEARCH = "LD_LIBRARY_PATH"
"""The key of the driver fact with the library search path that an image sets."""
COMPAT_DIRECTORY = re.compile(r"(?:^|/)(?:cuda[-_])?compat(?:[-_/]|$)")
"""In the paths of NVIDIA's packages for forward compatibility."""
_SITE = re.compile(r"(?:^|/)(?:site|dist)-packages/")

__all__ = ["INTEGRATED", "optional", "predict", "predict_all", "predict_code", "reach", "runs", "with_driver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LibraryPrediction:
    library: GpuLibrary
    reach: LibrarySupport
    role: LibraryRole
    what: str


def predict(contents: ScanResult, capability: Capability, driver: str = "", *, gpu: str = "") -> Prediction:
    """Return the prediction for one capability.

    It follows from the code (`predict_code`), reduced by known faults. With a `driver` it is for that driver
    (`with_driver`, which documents the errors). For AMD GPUs it is that of `predict_amd`, and does not depend
    on the driver. `gpu` is the name of the GPU, if known.
    """
    faults = matching_rules(versions_in(contents), capability, driver)
    bare = replace(predict_code(contents, capability), warnings=tuple(map(str, faults)))
    if not capability.processor:
        bare = _forward(bare, contents, driver, gpu) or (with_driver(bare, driver) if driver else bare)
        bare = replace(bare, warnings=(*bare.warnings, *_driver_warnings(bare, contents, driver, gpu)))
    fault = worst_answer(faults)
    if fault is None or bare.answer in (Compatibility.NO, Compatibility.UNKNOWN):
        return bare
    answer = ANSWERS[fault.effect]
    none = answer is Compatibility.NO
    return replace(
        bare,
        answer=answer,
        reason=str(fault),
        driver="" if none else bare.driver,
        driver_reason="" if none else bare.driver_reason,
        warnings=tuple(warning for warning in bare.warnings if warning != str(fault)),
    )


def _driver_warnings(bare: Prediction, contents: ScanResult, driver: str, gpu: str) -> Iterable[str]:
    """Yield warnings about libraries of the driver, if the code would run."""
    libraries = dict(_own_libraries(contents))
    if libraries:
        wrong = [name for name, version in libraries.items() if driver and version != driver_version(driver)]
        yield (
            f"the image itself has {_join(libraries)}, which the driver brings: only "
            f"driver {_join(dict.fromkeys(libraries.values()))} works with that"
            f"{', not ' + driver if wrong else ''}; remove it from the image"
        )
    if not driver and bare.answer is not Compatibility.NO and (forced := _forced_libcuda(contents)):
        yield (
            f"{SEARCH} of the image always loads libcuda.so {forced[1]}, which fails with newer drivers "
            f"(error 803) and on GPUs that are not for data centers (804): remove {forced[0]} from it"
        )
    if not driver or bare.answer in (Compatibility.NO, Compatibility.UNKNOWN):
        return
    for version in _compat_libraries(contents):
        if older(version, driver):
            yield (
                f"driver {driver} is newer than libcuda.so {version} of the image: a library path that puts "
                "its directory first fails (error 803)"
            )
        elif is_consumer(gpu) and serves_driver(version, _note(contents, version), driver_version(driver)):
            yield (
                f"NVIDIA's container toolkit gives {gpu} libcuda.so {version} of the image, and CUDA fails "
                'there (error 804): set cuda-compat-mode = "disabled" in its config.toml'
            )
    by_forward = bool(bare.driver) and older(driver, bare.driver)  # then the image's own libcuda compiles
    framework = find_framework(contents)
    compiled = _run_time_code(contents, framework, bare.capability) if framework else None
    machine_code = compiled is not None and compiled.answer is Compatibility.YES
    if not (by_forward or machine_code) and (newer := run_time_ptx(cuda_of(contents), driver)):
        yield newer


def run_time_ptx(cuda: str, driver: str) -> str:
    """Return a warning if PTX from run-time compilation is too new for the driver, else ""."""
    floor = native_driver(cuda) if cuda else ""
    if not floor or not older(driver, floor):
        return ""
    return (
        f"what compiles at run time (Triton, XLA, NVRTC) makes PTX of CUDA {cuda}, which driver {driver} "
        f"does not know (from {floor} on)"
    )


def _own_libraries(contents: ScanResult) -> list[tuple[str, str]]:
    """Return the driver libraries that are part of the image: name and driver version."""
    drivers = [(key, value) for name, key, value in contents.facts if name == DRIVER_FACT]
    return [(name, name.partition(".so.")[2]) for name, value in drivers if value == OWN]


def _compat_libraries(contents: ScanResult) -> list[str]:
    """Return the driver versions of libcuda files for forward compatibility in the image, the newest
    first.
    """
    libraries = {name for name, _ in _own_libraries(contents)}
    versions = [
        match[1] for name in contents.toolkit if name not in libraries and (match := _DRIVER.fullmatch(name))
    ]
    return sorted((version for version in versions if "." in version), key=numbers, reverse=True)


def _note(contents: ScanResult, version: str) -> ForwardNote | None:
    """Return the note of the libcuda of `version`, None without one."""
    for name, key, value in contents.facts:
        cuda, separator, drivers = value.removeprefix("CUDA ").partition(" for drivers ")
        if name == DRIVER_FACT and key == f"libcuda.so.{version}" and separator:
            return ForwardNote(cuda, tuple(map(int, re.findall(r"[0-9]+", drivers))))
    return None


def forward_libraries(contents: ScanResult) -> tuple[str, ...]:
    """Return a line for each libcuda for forward compatibility, the newest first: its drivers and GPUs."""
    lines = []
    for version in _compat_libraries(contents):
        note = _note(contents, version)
        drivers = f"from {', '.join(map(str, note.drivers))}" if note else "whose branch is older"
        lines.append(f"libcuda.so {version} is for older drivers {drivers}, on data-center GPUs")
    return tuple(lines)


def is_data_center(capability: Capability, gpu: str) -> bool:
    """Return whether a GPU is known to support forward compatibility, by its capability or its name.

    `gpu` is a display name (`A40 (8.6)`) or a name of NVML (`Tesla T4`, `NVIDIA A40`), or empty.
    """
    words = re.split(r"[ ,(-]", gpu.removeprefix("NVIDIA ").removeprefix("Tesla "))
    return (capability.major, capability.minor) in _DATA_CENTER or words[0] in forward_names()


def _forced(bare: Prediction, contents: ScanResult, driver: str, gpu: str) -> Prediction | None:
    """Return NO if the image always loads its own libcuda, and CUDA fails with it, else None.

    Source: CUDA Driver API, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803) and
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804).
    """
    if not (library := _forced_libcuda(contents)):
        return None
    path, version = library
    host = driver_version(driver)
    reason = ""
    if is_consumer(gpu):
        reason = f"{gpu} does not support that (error 804)"
    elif host and (older(version, host) or older(host, version)):
        served = serves_driver(version, _note(contents, version), host)
        reason = "" if served else f"it does not work with driver {driver} (error 803)"
    if not reason or bare.answer is Compatibility.NO:
        return None
    reason = f"{SEARCH} of the image always loads libcuda.so {version}, and {reason}: remove {path} from it"
    return replace(bare, answer=Compatibility.NO, reason=reason, driver="", driver_reason="")


def _forced_libcuda(contents: ScanResult) -> tuple[str, str] | None:
    """Return the directory of a libcuda for older drivers in the image's library path, and its version."""
    paths = [value for name, key, value in contents.facts if (name, key) == (DRIVER_FACT, SEARCH)]
    forced = [path for value in paths for path in value.split(":") if COMPAT_DIRECTORY.search(path)]
    versions = _compat_libraries(contents)
    return (forced[0], versions[0]) if forced and versions else None


def _forward(bare: Prediction, contents: ScanResult, driver: str, gpu: str) -> Prediction | None:
    """Return the prediction with the driver library in the image, None without one or if it is not needed.

    Source: NVIDIA, CUDA Compatibility, forward compatibility: only data-center GPUs support such a library,
    with drivers of some branches; others fail with error 804.
    """
    versions = _compat_libraries(contents)
    if forced := _forced(bare, contents, driver, gpu):
        return forced
    if not versions or not bare.driver:
        return None
    newest = versions[0]
    note = _note(contents, newest)
    branches = ", ".join(map(str, note.drivers)) if note else ""
    older_drivers = f"drivers {branches}" if branches else "older drivers"
    only = f"libcuda.so {newest} is here for {older_drivers}, and works only on data-center GPUs"
    if older(newest, bare.driver):
        return None
    if not driver:
        return replace(bare, driver_reason=f"{bare.driver_reason}; {only}")
    if not older(driver, bare.driver) or gpu_refusal(bare.capability, driver)[0]:
        return None
    cause = f"driver {driver} is older than {bare.driver}, {bare.driver_reason}"
    if note and not serves_driver(newest, note, driver_version(driver)):
        reason = f"{cause}, and libcuda.so {newest} is for drivers {branches or 'of Jetson boards'}"
        return replace(bare, answer=Compatibility.NO, reason=reason)
    if is_consumer(gpu):
        reason = f"{cause}; {only}, which {gpu} is not (error 804)"
        return replace(bare, answer=Compatibility.NO, reason=reason)
    if note and is_data_center(bare.capability, gpu):
        how = (
            f"with driver {driver} by forward compatibility: libcuda.so {newest} must come first in the path"
        )
        return replace(bare, reason=f"{bare.reason}; {how}")
    reason = f"{cause}, but {only}"
    return replace(bare, answer=Compatibility.UNKNOWN, reason=reason, driver="", driver_reason="")


def predict_code(contents: ScanResult, capability: Capability) -> Prediction:
    """Return the prediction of a scan for one capability (R9): the lowest one of the libraries that must
    load.

    A library without code for it in most modules counts as missing. The prediction is PARTLY if fewer modules
    lack code, or if libraries that only some functions use have none. Without a framework, all libraries
    count except those with the role report-only.
    """
    if capability.processor:
        return predict_amd(contents, str(capability))
    framework = find_framework(contents)
    parts = _parts(contents, framework, capability)
    answer, reason = _answer(contents, framework, parts, capability)
    counted = [part for part in parts if part.reach.gates]
    floor = minimum_driver(cuda_of(contents), capability, [(part.library, part.reach) for part in counted])
    compiled = _run_time_code(contents, framework, capability) if framework else None
    if compiled and _decides(compiled.answer, answer, own_code=bool(framework and framework.must_load)):
        answer, reason = compiled.answer, compiled.reason
        floors = [known for known in (floor, compiled.floor) if known.driver]
        floor = max(floors, key=lambda known: numbers(known.driver), default=floor)
    elif compiled and answer in (Compatibility.YES, Compatibility.PTX):
        reason += f"; {compiled.reason}"
    no_driver = answer in (Compatibility.NO, Compatibility.UNKNOWN)
    return Prediction(
        capability=capability,
        answer=answer,
        reason=reason,
        driver="" if no_driver else floor.driver,
        driver_reason="" if no_driver else floor.reason,
        libraries=tuple(part.reach for part in parts),
    )


def _decides(compiled: Compatibility, answer: Compatibility, *, own_code: bool) -> bool:
    """Return whether the code that a framework compiles decides, and not the code in its libraries."""
    if not own_code:
        return answer is Compatibility.UNKNOWN
    return answer not in (Compatibility.NO, Compatibility.UNKNOWN) and (
        compiled is Compatibility.NO or (compiled, answer) == (Compatibility.PTX, Compatibility.YES)
    )


def predict_all(contents: ScanResult, driver: str = "") -> tuple[Prediction, ...]:
    """Return the prediction for every known capability, the oldest first.

    AMD GPUs are included if there is code for them. If all code is for AMD GPUs, there are only AMD GPUs.
    """
    amd = amd_capabilities(contents)
    cuda = () if amd and all(map(_is_amd, contents.libraries)) else capabilities()
    return tuple(predict(contents, capability, driver) for capability in (*cuda, *amd))


def with_driver(prediction: Prediction, driver: str) -> Prediction:
    """Return the prediction for GPUs with that driver: NO if it is too old for the code or does not support
    the GPU.

    Raises ValueError if `driver` is not a driver version.
    """
    refusal, _ = gpu_refusal(prediction.capability, driver)
    if prediction.answer is Compatibility.NO:
        return prediction
    if refusal:
        return replace(prediction, answer=Compatibility.NO, reason=refusal)
    if prediction.answer is Compatibility.UNKNOWN:
        return prediction
    if not prediction.driver:
        reason = (
            f"{prediction.reason}; whether driver {driver} will do is not known: {prediction.driver_reason}"
        )
        return replace(prediction, reason=reason)
    if not older(driver, prediction.driver):
        return prediction
    reason = f"driver {driver} is older than {prediction.driver}, {prediction.driver_reason}"
    return replace(prediction, answer=Compatibility.NO, reason=reason)


def _parts(
    contents: ScanResult, framework: Framework | None, capability: Capability
) -> list[_LibraryPrediction]:
    cuda_digits = cuda_of(contents).replace(".", "")
    roles = [(library, *_role(library, framework)) for library in contents.libraries]
    if any(variant_of(library.path) == cuda_digits for library, _, _ in roles):
        roles = [
            (
                library,
                LibraryRole.REPORT if variant_of(library.path) not in ("", cuda_digits) else role,
                role_text,
            )
            for library, role, role_text in roles
        ]
    if framework is None:  # every library counts; those that only report count if they are the only ones
        nothing_else = all(role is LibraryRole.REPORT for _, role, _ in roles)
        roles = [
            (
                library,
                LibraryRole.GATES if role is not LibraryRole.REPORT or nothing_else else role,
                role_text,
            )
            for library, role, role_text in roles
        ]
    return [
        _LibraryPrediction(
            library=library,
            reach=reach(library, capability, gates=role is LibraryRole.GATES),
            role=role,
            what=role_text,
        )
        for library, role, role_text in roles
    ]


def _role(library: GpuLibrary, framework: Framework | None) -> tuple[LibraryRole, str]:
    """Return the role of a library by frameworks.py.

    Libraries outside Python packages belong to the system.
    """
    role, role_text = role_of(library.path, framework)
    if _is_amd(library) or (role is LibraryRole.OTHER and framework and not _in_package(library.path)):
        return LibraryRole.REPORT, ""
    return role, role_text


def _codes(library: GpuLibrary) -> list[GpuCode]:
    return [code for modules in library.modules for code in modules.codes]


def _is_amd(library: GpuLibrary) -> bool:
    """Return whether all code of a library is for AMD GPUs."""
    codes = _codes(library)
    return bool(codes) and all(code.kind is CodeKind.AMD for code in codes)


def _answer(
    contents: ScanResult, framework: Framework | None, parts: list[_LibraryPrediction], capability: Capability
) -> tuple[Compatibility, str]:
    """Return the answer and its reason, without considering the driver."""
    if sentence := cpu_only(contents):
        return Compatibility.NO, sentence
    gates = [part for part in parts if part.role is LibraryRole.GATES]
    if all(_is_amd(part.library) for part in gates):
        if framework is not None and not framework.must_load:
            cuda = cuda_of(contents)
            reason = f"how {_subject(contents, framework)} compiles with CUDA {cuda} is not known"
            return Compatibility.UNKNOWN, reason if cuda else f"the CUDA of {framework.name} is not known"
        return _nothing(contents, framework)
    damaged = next((part for part in gates if part.library.damage), None)
    if damaged:
        return Compatibility.UNKNOWN, f"{_name(damaged.library.path)} is damaged: {damaged.library.damage}"
    if framework is None:
        return _without_framework(gates, capability)
    subject = _subject(contents, framework)
    stopped = [part for part in gates if part.reach.reach is SupportLevel.NONE]
    if stopped:
        return Compatibility.NO, _no_code(stopped[0], capability)
    missing = [
        part
        for part in gates
        if part.reach.reach is SupportLevel.PARTIAL and not _newer_only(part.library, framework, capability)
    ]
    if missing:
        worst = max(missing, key=lambda part: part.reach.without / _total(part.reach))
        if worst.reach.without * 2 > _total(worst.reach):
            return Compatibility.NO, _some_code(worst, str(capability))
        alone = [_alone(part.library, framework, capability) for part in missing]
        if all(alone):
            return (
                Compatibility.PARTLY,
                f"{subject} runs on {capability}, all but {_join(alone)}: {_some_code(worst)}",
            )
        how = " through PTX" if any(part.reach.ptx for part in gates) else ""
        return Compatibility.PARTLY, f"{subject} starts on {capability}{how}, but {_some_code(worst)}"
    lacking = [
        part
        for part in parts
        if part.role in (LibraryRole.ON_DEMAND, LibraryRole.OTHER)
        and (
            part.library.damage
            or part.reach.reach is SupportLevel.NONE
            or (
                part.reach.reach is SupportLevel.PARTIAL
                and not _newer_only(part.library, framework, capability)
            )
        )
    ]
    special = [part for part in lacking if _for_others(part)]
    lacking = [part for part in lacking if part not in special]
    if lacking:
        role_text = _join(dict.fromkeys(part.what or _package(part.library.path) for part in lacking))
        but = ", but" if role_text == framework.name else f", all but {role_text}:"
        return Compatibility.PARTLY, f"{subject} runs on {capability}{but} {_lacking(lacking)}"
    return _full(gates, capability, special)


def _lacking_modules(library: GpuLibrary, capability: Capability) -> list[ModuleCount]:
    return [
        modules
        for modules in generic_modules(library)
        if all(runs(code, capability) is SupportLevel.NONE for code in modules.codes)
    ]


def _newer_only(library: GpuLibrary, framework: Framework, capability: Capability) -> bool:
    """Return whether the modules without code for a GPU are for what it cannot do.

    They begin at 8.9, where number formats and instructions begin that older GPUs do not have, or their
    targets have suffixes. They are at most half. If a row says which function they are for, it decides.
    Sources: NVIDIA, PTX ISA, FP8 from sm_89 on; measured in _C of vllm 0.21.0 on 8.0.
    """
    if any(row.begins and matches(library.path, (row.library,)) for row in framework.on_demand):
        return False
    lacking = _lacking_modules(library, capability)
    if 2 * sum(row.count for row in lacking) > sum(row.count for row in generic_modules(library)):
        return False
    begins = [
        min((code.architecture or capability for code in row.codes), default=capability) for row in lacking
    ]
    special = [all(code.suffix for code in row.codes) for row in lacking]
    return all(
        alone or (first > capability and first >= _FIRST_FP8)
        for first, alone in zip(begins, special, strict=True)
    )


def _alone(library: GpuLibrary, framework: Framework, capability: Capability) -> str:
    """Return the functions that use the missing code of a library, empty if other functions do, or may."""
    lacking = _lacking_modules(library, capability)
    for row in framework.on_demand:
        begins = row.begins
        if begins is not None and matches(library.path, (row.library,)):
            oldest = [min(code.architecture or begins for code in modules.codes) for modules in lacking]
            if all(begins <= architecture for architecture in oldest):
                return row.what
    return ""


def _for_others(part: _LibraryPrediction) -> bool:
    """Return whether a library is only for other GPUs, so that nothing is missing without it.

    All its code has a suffix (`sm_90a`): it was written for these GPUs alone, beside code for all. Source:
    NVIDIA, CUDA Programming Guide, architecture-specific features; measured in FlashMLA of vllm 0.13.0 and
    CUTLASS of torchao 0.14.0.
    """
    codes = [code for code in _codes(part.library) if code.kind is not CodeKind.LTO]
    return not part.library.damage and bool(codes) and all(code.suffix for code in codes)


def optional(contents: ScanResult) -> bool:
    """Return whether all GPU code of a package is for single GPUs, so that others do without the package."""
    codes = [code for library in contents.libraries for code in _codes(library)]
    return bool(codes) and all(code.suffix for code in codes)


def _full(
    gates: list[_LibraryPrediction], capability: Capability, special: Sequence[_LibraryPrediction] = ()
) -> tuple[Compatibility, str]:
    answer, reason = _full_reason(gates, capability)
    if special:
        names = _join(dict.fromkeys(_name(part.library.path) for part in special))
        targets = _join(
            sorted({str(code).partition("/")[0] for part in special for code in _codes(part.library)})
        )
        reason += f"; without {names}, only for {targets}"
    return answer, reason


def _full_reason(gates: list[_LibraryPrediction], capability: Capability) -> tuple[Compatibility, str]:
    compiled = [part for part in gates if part.reach.reach is SupportLevel.PTX]
    if compiled:
        gate = max(compiled, key=lambda part: numbers(part.reach.isa))
        codes = _serving(gate.library, capability, SupportLevel.PTX)
        return Compatibility.PTX, (
            f"{_name(gate.library.path)} has no machine code for {capability} in {gate.reach.ptx} of "
            f"{_total(gate.reach)} modules: the driver compiles their PTX ({codes}, ISA {gate.reach.isa})"
        )
    gate = max(gates, key=lambda part: part.reach.native)
    codes = _serving(gate.library, capability, SupportLevel.NATIVE)
    runs_there = "" if codes.startswith(capability.sm) else f", which runs on {capability}"
    modules = f"all {gate.reach.native} modules" if gate.reach.native > 1 else "its one module"
    if gate.reach.without:
        modules = f"{gate.reach.native} of {_total(gate.reach)} modules"
    return Compatibility.YES, f"{_name(gate.library.path)} has {codes} code{runs_there}, in {modules}"


def _without_framework(parts: list[_LibraryPrediction], capability: Capability) -> tuple[Compatibility, str]:
    """Return the answer without a framework: all libraries count, and the one with the most modules decides.

    CUDA libraries choose their code by GPU, so for them some code is enough.
    """
    lacking = [part for part in parts if part.reach.reach is SupportLevel.NONE]
    if len(lacking) == len(parts):
        return Compatibility.NO, _no_code(parts[0], capability)
    whole = [part for part in parts if role_of(part.library.path, None)[0] is not LibraryRole.REPORT]
    # A library for single GPUs (`sm_90a` alone) is an extra, as such modules are in a library (R9).
    plain = [part for part in whole if not _for_others(part)]
    largest = max(plain or whole, key=lambda part: _total(part.reach), default=None)
    if largest and largest.reach.without * 2 > _total(largest.reach):
        return Compatibility.NO, _some_code(largest, str(capability))
    missing = [
        part
        for part in whole
        if part.reach.reach is SupportLevel.PARTIAL and part.reach.without * _FEW > _total(part.reach)
    ]
    special = [part for part in lacking if _for_others(part)] if not all(map(_for_others, parts)) else []
    lacking = [part for part in lacking if part not in special]
    if lacking or missing:
        count = f"{len(lacking) + len(missing)} of {len(parts)} libraries lack code for {capability}: "
        return Compatibility.PARTLY, (count if len(parts) > 1 else "") + _lacking([*lacking, *missing])
    return _full([part for part in parts if part not in special], capability, special)


def _run_time_code(contents: ScanResult, framework: Framework, capability: Capability) -> RunTimeCode | None:
    package = find_package(contents, framework)
    if package is None:
        return None
    return predict_run_time_code(
        package.name,
        package.version,
        cuda_of(contents),
        [(installed.name, installed.version) for installed in contents.packages],
        capability,
    )


def _nothing(contents: ScanResult, framework: Framework | None) -> tuple[Compatibility, str]:
    amd = amd_targets(contents)
    if amd:
        return Compatibility.NO, f"its GPU code is AMD's ({_join(amd[:4])}{', ...' if len(amd) > 4 else ''})"
    if framework is None:
        return Compatibility.UNKNOWN, "no GPU code was found"
    return Compatibility.UNKNOWN, f"none of the libraries that {framework.name} must load were found"


def _no_code(part: _LibraryPrediction, capability: Capability) -> str:
    codes = sorted({code for modules in part.library.modules for code in modules.codes})
    if codes and all(code.kind is CodeKind.LTO for code in codes):
        return f"{_name(part.library.path)} contains only LTO-IR, which only a linker can use"
    if not codes:
        unread = f": {part.library.unread}" if part.library.unread else ""
        return f"{_name(part.library.path)} contains no code that a scan can read{unread}"
    usual = " ".join(map(str, usual_codes(part.library)))
    ptx = "" if any(code.kind is CodeKind.PTX for code in codes) else " and no PTX"
    return f"{_name(part.library.path)} has no code for {capability}, only {usual}{ptx}"


def _some_code(part: _LibraryPrediction, there: str = "it") -> str:
    count, total = part.reach.without, _total(part.reach)
    return f"{count} of {total} modules of {_name(part.library.path)} {_have(count)} no code for {there}"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _total(support: LibrarySupport) -> int:
    return support.native + support.ptx + support.without


def _lacking(parts: list[_LibraryPrediction]) -> str:
    damaged = [f"{_name(part.library.path)} is damaged" for part in parts if part.library.damage]
    whole = [part for part in parts if not part.library.damage]
    none = [_name(part.library.path) for part in whole if part.reach.reach is SupportLevel.NONE]
    some = [_some_code(part) for part in whole if part.reach.reach is SupportLevel.PARTIAL]
    names = f"{_join(none[:3])}{', ...' if len(none) > 3 else ''}"
    sentences = [f"{names} {_have(len(none))} no code for it"] if none else []
    return "; ".join([*sentences, *some[:2], *damaged[:1]])


def _serving(library: GpuLibrary, capability: Capability, way: SupportLevel) -> str:
    """Return the code that runs on a capability in most of the modules.

    If there is one module, return its newest code.
    """
    best: dict[str, int] = {}
    generic = generic_modules(library)
    if all(runs(code, capability) is not way for module in generic for code in module.codes):
        generic = library.modules  # the objects of a linked module
    for modules in generic:
        fitting = [code for code in modules.codes if runs(code, capability) is way]
        if fitting:
            name = str(max(fitting)).partition("/")[0]
            best[name] = best.get(name, 0) + modules.count
    return max(best, key=lambda name: best[name], default="")


def _subject(contents: ScanResult, framework: Framework) -> str:
    package = find_package(contents, framework)
    return f"{package.name} {package.version}" if package else framework.name


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _in_package(path: str) -> bool:
    return bool(_SITE.search(path)) or not path.startswith(_SYSTEM)


def _package(path: str) -> str:
    """Return the directory of an unknown library, which is its name for people."""
    site = _SITE.search(path)
    inner = path[site.end() :] if site else path
    return inner.partition("/")[0].removesuffix(".libs")


def _join(words: Iterable[str]) -> str:
    return ", ".join(words)
