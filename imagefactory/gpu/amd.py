"""Which of AMD's GPUs a piece of code runs on. There is no PTX: a processor matches, or it does not."""

from __future__ import annotations

import re
from functools import cache

from imagefactory.gpu.capability import Code, CodeKind
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.model import Contents, Library


@cache
def generic_processors() -> dict[str, frozenset[str]]:
    """The processors that run the code of each generic one: `gfx11-generic` -> gfx1100, gfx1101, ..."""
    return {row["name"]: frozenset(row["processors"]) for row in read_table("amd")["generic"]}


def sold_processor(name: str) -> str:
    """The processor of a GPU as AMD sells it (`AMD Instinct MI250X` -> `gfx90a`), empty for other names."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    rows = read_table("amd")["sold"]
    return next((row["processor"] for row in rows for one in row["names"] if one.lower() in words), "")


def amd_runs(code: Code, target: str) -> bool:
    """Whether code runs on a GPU of that target ID (`gfx90a:sramecc+:xnack-`, or `gfx90a` alone).

    The processor must be the same, or belong to the generic one that the code is for. A feature that both
    name must be set alike; one that the code does not name runs with either setting, and one that is not
    said of the GPU is not held against the code. Source: LLVM, User Guide for AMDGPU Backend, target ID.
    """
    if code.kind is not CodeKind.AMD:
        return False
    processor, features = _parse(code.processor)
    asked, settings = _parse(target)
    if asked != processor and asked not in generic_processors().get(processor, frozenset()):
        return False
    return all(settings.get(name, on) == on for name, on in features.items())


def amd_reach(library: Library, target: str) -> tuple[int, int]:
    """How many of a library's modules with code for AMD's GPUs run on that target, and how many there are."""
    modules = [one for one in library.modules if any(code.kind is CodeKind.AMD for code in one.codes)]
    fitting = [one for one in modules if any(amd_runs(code, target) for code in one.codes)]
    return sum(one.count for one in fitting), sum(one.count for one in modules)


def amd_targets(contents: Contents) -> tuple[str, ...]:
    """Every target that the code for AMD's GPUs names, sorted."""
    codes = {code for library in contents.libraries for modules in library.modules for code in modules.codes}
    return tuple(sorted(code.processor for code in codes if code.kind is CodeKind.AMD))


def _parse(target: str) -> tuple[str, dict[str, bool]]:
    processor, *features = target.split(":")
    return processor, {feature[:-1]: feature[-1] == "+" for feature in features if feature}
