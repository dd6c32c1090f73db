"""Which GPU code runs on which capability: rules R1 to R5, R8 and R9, each a pure function with its source.

R6 and R7, and the driver's side of R5, are in drivers.py.
"""

from __future__ import annotations

from imagefactory.gpu.capability import Capability, Code, CodeKind
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.gpu.values import Library, LibraryReach, Modules, Reach

INTEGRATED = frozenset(Capability(*pair) for pair in ((5, 3), (6, 2), (7, 2), (8, 7), (11, 0)))
"""Capabilities of Jetson and DRIVE modules."""
FAMILIES = {
    Capability(10, 0): frozenset({Capability(10, 0), Capability(10, 3), Capability(10, 7)}),
    Capability(10, 3): frozenset({Capability(10, 3), Capability(10, 7)}),
    Capability(11, 0): frozenset({Capability(11, 0)}),
    Capability(12, 0): frozenset({Capability(12, 0), Capability(12, 1)}),
    Capability(12, 1): frozenset({Capability(12, 1)}),
}
"""What code with the suffix `f` runs on, by the architecture it is for."""
_MOST = 10  # times as many: a build for one major, into which something for more was linked
_RENAMED = {Capability(10, 1): Capability(11, 0)}


# --- one piece of code ---------------------------------------------------------------------------


def renamed(capability: Capability) -> Capability:
    """R4: 10.1 is called 11.0 since CUDA 13.0; it is the same GPU.

    Source: NVIDIA, CUDA Toolkit 13.0 release notes and PTX ISA 9.0: sm_101 is renamed to sm_110.
    """
    return _RENAMED.get(capability, capability)


def sass_runs(architecture: Capability, capability: Capability) -> bool:
    """R1 and R2: machine code runs on its own major, from its own minor on; integrated GPUs run theirs alone.

    Source: NVIDIA, CUDA Programming Guide, binary compatibility: there is none for Tegra, nor between it and
    the desktop.
    """
    if architecture in INTEGRATED or capability in INTEGRATED:
        return architecture == capability
    return architecture.major == capability.major and architecture.minor <= capability.minor


def suffix_runs(code: Code, capability: Capability) -> bool:
    """R3: `a` is for one capability alone, `f` for those of its family; this holds for PTX too.

    Source: NVIDIA, nvcc documentation, architecture-specific and family-specific targets, and the CUDA
    Programming Guide's table of families.
    """
    assert code.architecture is not None
    architecture = renamed(code.architecture)
    if code.suffix == "f":
        return capability in FAMILIES.get(architecture, frozenset({architecture}))
    return architecture == capability


def ptx_compiles(architecture: Capability, capability: Capability) -> bool:
    """R5: a driver compiles plain PTX for any GPU of its capability or newer.

    Source: NVIDIA, CUDA Programming Guide, PTX compatibility. Which drivers do, `ptx_driver` says.
    """
    return architecture <= capability


def runs(code: Code, capability: Capability) -> Reach:
    """How one piece of code serves a capability: NATIVE, PTX or NONE.

    R8: LTO-IR is input of a linker and runs nowhere. Source: NVIDIA, nvcc documentation, `-dlto`. AMD's
    code runs on no capability.
    """
    if code.architecture is None or code.kind is CodeKind.LTO:
        return Reach.NONE
    architecture, capability = renamed(code.architecture), renamed(capability)
    there = Reach.PTX if code.kind is CodeKind.PTX else Reach.NATIVE
    if code.suffix:
        return there if suffix_runs(code, capability) else Reach.NONE
    decide = ptx_compiles if code.kind is CodeKind.PTX else sass_runs
    return there if decide(architecture, capability) else Reach.NONE


# --- one library ---------------------------------------------------------------------------------


def generic_modules(library: Library) -> tuple[Modules, ...]:
    """R9: the modules that speak for a library: those made for two or more majors; all if there is none.

    Libraries also hold modules for single GPUs that others do without; those say nothing about the rest.
    Targets with the suffix `a` are such extras: they alone make no module generic, but beside plain targets
    of one major they do where others are (a kernel for 8.0 and newer in a library for 7.5 and newer). Source:
    measured, the modules of torch 1.13.1 to 2.14.1, tensorflow 2.18.1, onnxruntime-gpu 1.28.0 to 1.31.1.

    Where nearly all modules are machine code for one and the same major, the library is a build for it and
    all speak. LTO-IR, which is linked already or never will be, speaks where there is nothing else.
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


def reach(library: Library, capability: Capability, *, gates: bool = False) -> LibraryReach:
    """How far a library's code serves one capability, counted over its generic modules.

    `gates` is handed on: whether the framework must load it.
    """
    native = ptx = without = 0
    isas: set[str] = set()
    objects = _objects(library)
    for modules in generic_modules(library):
        ways = [(runs(code, capability), code) for code in modules.codes]
        compiled = [code.isa for way, code in ways if way is Reach.PTX]
        if any(way is Reach.NATIVE for way, _ in ways):
            native += modules.count
        elif compiled:
            ptx += modules.count
            isas.add(min(compiled, key=numbers))  # the oldest that serves asks least of the driver
        elif linked := _linked_anew(modules, objects, capability):
            ptx += modules.count
            isas.add(linked)
        else:
            without += modules.count
    if not native + ptx:
        way = Reach.NONE
    elif without:
        way = Reach.PARTIAL
    else:
        way = Reach.PTX if ptx else Reach.NATIVE
    return LibraryReach(
        path=library.path,
        reach=way,
        native=native,
        ptx=ptx,
        without=without,
        isa=max(isas, key=numbers, default=""),
        gates=gates,
    )


def usual_codes(library: Library) -> tuple[Code, ...]:
    """The targets of at least half of the generic modules, sorted; of all modules where none is so usual."""
    counts: dict[Code, int] = {}
    modules = generic_modules(library)
    for one in modules:
        for code in one.codes:
            counts[code] = counts.get(code, 0) + one.count
    half = sum(one.count for one in modules) / 2
    return tuple(sorted(code for code in counts if counts[code] >= half) or sorted(counts))


def _objects(library: Library) -> dict[Capability, str]:
    """The targets of modules of plain PTX alone, each with the newest version of its instruction set."""
    found: dict[Capability, str] = {}
    for modules in library.modules:
        code = modules.codes[0] if len(modules.codes) == 1 else None
        if code and code.architecture and code.kind is CodeKind.PTX and not code.suffix:
            found[code.architecture] = max(found.get(code.architecture, "0"), code.isa, key=numbers)
    return found


def _linked_anew(modules: Modules, objects: dict[Capability, str], capability: Capability) -> str:
    """The PTX that a driver must compile in place of a linked module; empty where that cannot be.

    Separately compiled code stands in a library as one linked module of machine code and as its objects, of
    which builds may keep the PTX alone, for the newest of the linked targets. For other GPUs the driver
    compiles and links all of them. Source: NVIDIA, nvcc documentation, JIT linking; measured, NCCL in
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


def _majors(modules: Modules, *, extras: bool) -> set[int]:
    """The majors of plain targets; where there are any, with `extras` those of targets with `a` too."""
    codes = [code for code in modules.codes if code.kind is not CodeKind.LTO]
    plain = [code for code in codes if code.suffix != "a"]
    counted = codes if extras and plain else plain
    return {renamed(code.architecture).major for code in counted if code.architecture}
