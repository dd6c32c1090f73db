"""What is wrong with a row that its recipe alone cannot show: its base, its source, the target below."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from imagefactory.errors import Diagnostic
from imagefactory.gpu import knowledge
from imagefactory.gpu.builds import platform_of, rocm_of
from imagefactory.gpu.platforms import AMD64, MACHINES
from imagefactory.model import NO_CUDA, Base, Target, Where
from imagefactory.recipes.family import MatrixRow, Recipe
from imagefactory.recipes.values import (
    GPU_CHECKS,
    REQUIREMENT_RULES,
    RULES,
    Source,
    check_fault,
    named_packages,
    requirement_fault,
)
from imagefactory.recipes.yaml_tree import show
from imagefactory.versions import natural, nearest


def place_of(row: MatrixRow, key: str) -> Where:
    return dict(row.places).get(key, row.where)


def _at(row: MatrixRow, key: str, code: str, what: str, write: str) -> Diagnostic:
    return Diagnostic(code, str(place_of(row, key)), what, write)


def requirement_places(recipes: Iterable[Recipe], target: Target) -> dict[str, Where]:
    """Return where the row of a target has each of its own requirements and constraints."""
    found: dict[str, Where] = {}
    for row in (row for recipe in recipes for row in recipe.matrix if row.where == target.where):
        for key in ("packages", "constraints", "pip"):
            for index, text in enumerate(getattr(row, key)):
                found.setdefault(text, place_of(row, f"{key}.{index}"))
    return found


def addition_faults(row: MatrixRow, under: Target) -> Iterator[Diagnostic]:
    """What the source of the target below does not take."""
    source = Source(kind=under.source, framework=under.framework, channels=under.channels, on=under.name)
    for key, rule in zip(("packages", "constraints"), REQUIREMENT_RULES[under.source], strict=True):
        for index, text in enumerate(getattr(row, key)):
            fault = requirement_fault(text, key, source)
            if not RULES[rule].allows(text):
                what = f"'{key}' of {under.source}, as {under.name} is, cannot be {show(text)}"
                fault = "value-invalid", what, f"write {RULES[rule].write}"
            if fault:
                yield _at(row, f"{key}.{index}", *fault)
    for check in row.checks:
        fault = check_fault(check, under.framework)
        if check in GPU_CHECKS and not under.gpu:
            what = f"'{check}' checks GPU images, and {under.name} is for CPUs"
            fault = "gpu-only-key", what, "remove it"
        if fault:
            yield _at(row, f"checks.{check}", *fault)
    for key in ("capabilities", "waive"):
        if getattr(row, key) and not under.gpu:
            what = f"'{key}' is for GPUs, and {under.name} is for CPUs"
            yield _at(row, key, "gpu-only-key", what, "remove it")
    for text in row.capabilities if under.gpu else ():
        if text.startswith("gfx") != bool(rocm_of(under.cuda)):
            what = f"{text} cannot run {under.name}, which is for {platform_of(under.cuda)}"
            yield _at(row, "capabilities", "capability-mismatch", what, "remove it")
    if row.pip and under.source != "conda":
        what = f"'pip' requires a conda target, and {under.name} takes all packages from PyPI"
        yield _at(row, "pip.0", "key-not-for-source", what, "write these under 'packages'")


def exclude_faults(row: MatrixRow, target: Target) -> Iterator[Diagnostic]:
    """Yield what cannot be left out of a target."""
    named = named_packages(target)
    for index, name in enumerate(row.exclude):
        key = f"exclude.{index}"
        if name in named:
            what = f"'{name}' is excluded, but {target.name} requires it"
            yield _at(row, key, "exclude-conflict", what, "remove one of the two")
        elif target.source == "conda" and not target.pip:
            what = f"'exclude' is for PyPI packages, and {target.name} has none"
            yield _at(row, key, "key-not-for-source", what, "remove it")


def base_faults(row: MatrixRow, base: Base | None, names: Sequence[str]) -> Iterator[Diagnostic]:
    if base is None:
        near = nearest(row.base, names)
        hint = f"did you mean '{near}'?" if near else f"the bases are {', '.join(names) or 'none yet'}"
        yield _at(row, "base", "base-unknown", f"no base '{row.base}'", hint)


def virtual_faults(row: MatrixRow, index: int, base: Base | None, platform: str) -> Iterator[Diagnostic]:
    """What no machine has, or none that the image is for."""
    cuda, virtual = row.cuda[index], dict(row.virtual)
    if base and "glibc" in virtual and natural(virtual["glibc"]) > natural(base.glibc):
        what = f"base '{base.name}' has glibc {base.glibc}, older than {virtual['glibc']}"
        write = f'write "{base.glibc}" or less, or remove it'
        yield _at(row, "virtual.glibc", "glibc-too-new", what, write)
    machine = MACHINES.get(platform, "")
    if "archspec" in virtual and not virtual["archspec"].startswith(machine):
        what = f"'{virtual['archspec']}' is not a processor of {platform}"
        write = f"write {machine}, remove it, or write a row per platform"
        yield _at(row, "virtual.archspec", "archspec-mismatch", what, write)
    if cuda == NO_CUDA:
        return
    driver, newest = virtual.get("cuda") or cuda, knowledge.newest_cuda()
    key = "virtual.cuda" if "cuda" in virtual else f"cuda.{index}"
    if "." not in driver:
        what = f"CUDA {cuda} does not say which driver the packages need"
        write = f'write virtual: {{cuda: "{cuda}.4"}} with the oldest supported driver'
        yield _at(row, key, "driver-missing", what, write)
    elif int(driver.partition(".")[0]) > newest or not RULES["driver"].allows(driver):
        what = f"no driver is known for CUDA {driver}"
        yield _at(row, key, "driver-unknown", what, f"write a version of CUDA {newest} or older")
    elif natural(driver.partition(".")[0]) < natural(cuda.partition(".")[0]):
        what = f"a driver for CUDA {driver} cannot run CUDA {cuda}"
        write = f"write a version of CUDA {cuda.partition('.')[0]}, or remove it"
        yield _at(row, key, "driver-mismatch", what, write)


def source_faults(row: MatrixRow, index: int, platform: str) -> Iterator[Diagnostic]:
    """What the source is known not to offer. What the table lacks is left to the solver: a version, and all
    that is for another platform than amd64."""
    cuda, name = row.builds[index], f"{row.framework} {row.version}"
    wheels = knowledge.offered(row.framework, row.version)
    if cuda == NO_CUDA or rocm_of(cuda):
        whose = "CPUs" if cuda == NO_CUDA else "AMD GPUs"
        yield from _cpu_faults(row, name, {extra for wheel in wheels for extra in wheel.extras}, whose)
        return
    if platform != AMD64 or not wheels or row.framework in dict(row.origins):  # of PyPI's alone it is known
        return
    fitting = [wheel for wheel in wheels if wheel.cuda == cuda]
    if not fitting:
        known = sorted({wheel.cuda for wheel in wheels}, key=natural)
        offers = " and ".join(known)
        write = " or ".join(f'"{version}"' for version in known)
        what = f"{name} on PyPI is built for CUDA {offers}, not {cuda}"
        yield _at(row, f"cuda.{index}", "cuda-not-offered", what, f"write {write}")
        return
    wheel = fitting[0]
    if missing := [extra for extra in wheel.extras if extra not in row.extras]:
        what = f"{name} on PyPI has CUDA {cuda} only with the extras {' and '.join(map(repr, missing))}"
        yield _at(row, "extras", "extras-missing", what, f"write extras: [{', '.join(wheel.extras)}]")
    if wheel.python and natural(row.python) < natural(wheel.python):
        what = f"{name} on PyPI needs Python {wheel.python} or newer, not {row.python}"
        yield _at(row, "python", "python-too-old", what, "choose a base that has it")


def _cpu_faults(row: MatrixRow, name: str, gpu_extras: set[str], whose: str) -> Iterator[Diagnostic]:
    """What brings CUDA although the row is for others. What the table does not know the lock tells."""
    if re.search(r"(^|-)(gpu|cu(da)?[0-9]+x?)$", row.framework):
        such = "tensorflow-rocm" if row.rocm else "onnxruntime"
        what = f"'{row.framework}' is built for CUDA, and the row is for {whose}"
        write = f"write the build for {whose} in the row, such as framework: {such}"
        yield _at(row, "framework", "build-mismatch", what, write)
    for extra in sorted(gpu_extras.intersection(row.extras)):
        what = f"the extra '{extra}' of {name} brings CUDA, and the row is for {whose}"
        yield _at(row, "extras", "build-mismatch", what, "remove it")
