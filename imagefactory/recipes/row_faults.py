"""What is wrong with a row that its recipe alone cannot show: its base, its source, the target below. Pure.

Each fault is one line that names file:line:column, and what to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from imagefactory.gpu import knowledge
from imagefactory.gpu.builds import platform_of, rocm_of
from imagefactory.gpu.platforms import AMD64, MACHINES
from imagefactory.model import NO_CUDA, Base, Target, Where
from imagefactory.recipes.model import MatrixRow, Recipe
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


def requirement_places(recipes: Iterable[Recipe], target: Target) -> dict[str, Where]:
    """Return where the row of a target has each of its own requirements and constraints."""
    found: dict[str, Where] = {}
    for row in (row for recipe in recipes for row in recipe.matrix if row.where == target.where):
        for key in ("packages", "constraints", "pip"):
            for index, text in enumerate(getattr(row, key)):
                found.setdefault(text, place_of(row, f"{key}.{index}"))
    return found


def addition_faults(row: MatrixRow, under: Target) -> Iterator[str]:
    """What the source of the target below does not take."""
    source = Source(kind=under.source, framework=under.framework, channels=under.channels, on=under.name)
    for key, rule in zip(("packages", "constraints"), REQUIREMENT_RULES[under.source], strict=True):
        for index, text in enumerate(getattr(row, key)):
            fault = requirement_fault(text, key, source)
            if not RULES[rule].allows(text):
                what = f"'{key}' of {under.source}, as {under.name} is, cannot be {show(text)}"
                fault = what, f"write {RULES[rule].write}"
            if fault:
                yield f"{place_of(row, f'{key}.{index}')}: {fault[0]} ({fault[1]})"
    for check in row.checks:
        fault = check_fault(check, under.framework)
        if check in GPU_CHECKS and not under.gpu:
            fault = f"'{check}' is a check of images for GPUs, and {under.name} is for CPUs", "remove it"
        if fault:
            yield f"{place_of(row, f'checks.{check}')}: {fault[0]} ({fault[1]})"
    for key in ("capabilities", "waive"):
        if getattr(row, key) and not under.gpu:
            yield f"{place_of(row, key)}: '{key}' speaks of GPUs, and {under.name} is for CPUs (remove it)"
    for text in row.capabilities if under.gpu else ():
        if text.startswith("gfx") != bool(rocm_of(under.cuda)):
            what = f"{text} runs nothing of {under.name}, for {platform_of(under.cuda)}"
            yield f"{place_of(row, 'capabilities')}: {what} (remove it)"
    if row.pip and under.source != "conda":
        yield (
            f"{place_of(row, 'pip.0')}: all packages of {under.name} are PyPI's: there is no 'pip' beside "
            "them (write these under 'packages')"
        )


def exclude_faults(row: MatrixRow, target: Target) -> Iterator[str]:
    """Yield what cannot be left out of a target."""
    named = named_packages(target)
    for index, name in enumerate(row.exclude):
        place = place_of(row, f"exclude.{index}")
        if name in named:
            yield f"{place}: '{name}' is excluded, and {target.name} asks for it (remove one of the two)"
        elif target.source == "conda" and not target.pip:
            yield f"{place}: 'exclude' leaves out packages from PyPI, and {target.name} has none (remove it)"


def base_faults(row: MatrixRow, base: Base | None, names: Sequence[str]) -> Iterator[str]:
    if base is None:
        near = nearest(row.base, names)
        hint = f"did you mean '{near}'?" if near else f"the bases are {', '.join(names) or 'none yet'}"
        yield f"{place_of(row, 'base')}: there is no base '{row.base}' ({hint})"


def virtual_faults(row: MatrixRow, index: int, base: Base | None, platform: str) -> Iterator[str]:
    """What no machine has, or none that the image is for."""
    cuda, virtual = row.cuda[index], dict(row.virtual)
    if base and "glibc" in virtual and natural(virtual["glibc"]) > natural(base.glibc):
        yield (
            f"{place_of(row, 'virtual.glibc')}: base '{base.name}' carries glibc {base.glibc}, older than "
            f'{virtual["glibc"]} (write "{base.glibc}" or less, or leave it out)'
        )
    machine = MACHINES.get(platform, "")
    if "archspec" in virtual and not virtual["archspec"].startswith(machine):
        yield (
            f"{place_of(row, 'virtual.archspec')}: no machine of {platform} is '{virtual['archspec']}' "
            f"(write {machine}, leave it out, or write rows by platform)"
        )
    if cuda == NO_CUDA:
        return
    driver, newest = virtual.get("cuda") or cuda, knowledge.newest_cuda()
    place = place_of(row, "virtual.cuda" if "cuda" in virtual else f"cuda.{index}")
    if "." not in driver:
        yield (
            f"{place}: CUDA {cuda} leaves open which drivers the packages may count on "
            f'(write virtual: {{cuda: "{cuda}.4"}} with the oldest that the image is for)'
        )
    elif int(driver.partition(".")[0]) > newest or not RULES["driver"].allows(driver):
        yield f"{place}: no driver is known for CUDA {driver} (write a version of CUDA {newest} or older)"
    elif natural(driver.partition(".")[0]) < natural(cuda.partition(".")[0]):
        yield (
            f"{place}: a driver for CUDA {driver} runs nothing of CUDA {cuda} "
            f"(write a version of CUDA {cuda.partition('.')[0]}, or leave it out)"
        )


def source_faults(row: MatrixRow, index: int, platform: str) -> Iterator[str]:
    """What the source is known not to offer. What the table lacks is left to the solver: a version, and all
    that is for another platform than amd64."""
    cuda, name = row.builds[index], f"{row.framework} {row.version}"
    wheels = knowledge.offered(row.framework, row.version)
    if cuda == NO_CUDA or rocm_of(cuda):
        whose = "CPUs" if cuda == NO_CUDA else "AMD's GPUs"
        yield from _cpu_faults(row, name, {extra for wheel in wheels for extra in wheel.extras}, whose)
        return
    if platform != AMD64 or not wheels or row.framework in dict(row.origins):  # of PyPI's alone it is known
        return
    fitting = [wheel for wheel in wheels if wheel.cuda == cuda]
    if not fitting:
        known = sorted({wheel.cuda for wheel in wheels}, key=natural)
        offers = " and ".join(known)
        write = " or ".join(f'"{version}"' for version in known)
        place = place_of(row, f"cuda.{index}")
        yield f"{place}: {name} on PyPI is built for CUDA {offers}, not {cuda} (write {write})"
        return
    wheel = fitting[0]
    if missing := [extra for extra in wheel.extras if extra not in row.extras]:
        yield (
            f"{place_of(row, 'extras')}: {name} on PyPI comes with CUDA {cuda} only through "
            f"{' and '.join(map(repr, missing))} (write extras: [{', '.join(wheel.extras)}])"
        )
    if wheel.python and natural(row.python) < natural(wheel.python):
        yield (
            f"{place_of(row, 'python')}: {name} on PyPI needs Python {wheel.python} or newer, not "
            f"{row.python} (write a base that carries it)"
        )


def _cpu_faults(row: MatrixRow, name: str, gpu_extras: set[str], whose: str) -> Iterator[str]:
    """What brings CUDA although the row is for others. What the table does not know the lock tells."""
    if re.search(r"(^|-)(gpu|cu(da)?[0-9]+x?)$", row.framework):
        such = "tensorflow-rocm" if row.rocm else "onnxruntime"
        yield (
            f"{place_of(row, 'framework')}: '{row.framework}' is built for CUDA, and the row is for {whose} "
            f"(name the build for {whose} in the row, such as framework: {such})"
        )
    for extra in sorted(gpu_extras.intersection(row.extras)):
        yield (
            f"{place_of(row, 'extras')}: the extra '{extra}' of {name} brings CUDA, and the row is for "
            f"{whose} (remove it)"
        )
