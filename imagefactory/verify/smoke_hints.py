"""Hints for a failed smoke test: what to add to the recipe, as far as tables know it. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from imagefactory.lock.pypi.system_libraries import package_of_library
from imagefactory.model import BuildSpec, CheckResult, CheckState
from imagefactory.recipes.values import package_of
from imagefactory.suite.checks.libraries import DRIVER_LIBRARIES

_LIBRARY = re.compile(r"\blib[A-Za-z0-9_+.-]*?\.so(?:\.[0-9]+)*")
_MODULE = re.compile(r"No module named '([A-Za-z0-9_.]+)'")
_NUMPY_1 = "was compiled for NumPy 1"


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def find_hint(definition: BuildSpec, checks: Iterable[CheckResult]) -> str:
    """Return what to add to the recipe, empty if no hint fits the failed checks."""
    details = " ".join(check.detail for check in checks if check.state is CheckState.FAILED)
    system = find_system(details)
    packages = [text for text in find_packages(details) if may_add(text, definition)]
    constraints = [text for text in ("numpy<2",) if _NUMPY_1 in details and may_add(text, definition)]
    lists = {
        "pip" if definition.target.source == "conda" else "packages": packages,
        "constraints": constraints,
    }
    if not definition.base.image:
        lists = {"system": system, **lists}
    parts = [f"{key}: [{', '.join(names)}]" for key, names in lists.items() if names]
    if unknown := find_unknown_modules(details):
        parts.append(f"the packages that have the modules {', '.join(unknown)}")
    hints = [f"add {' and '.join(parts)} to the recipe, then lock and build again"] if parts else []
    if system and definition.base.image:
        hints.append(f"take a base that has {', '.join(system)}, Debian's names")
    return "; ".join(hints)


def find_system(details: str) -> list[str]:
    """Return the Debian packages with the files that a text reports as missing."""
    names = (name for name in _LIBRARY.findall(details) if name not in DRIVER_LIBRARIES)
    packages = [package_of_library(name) for name in names]
    packages += [row["system"] for row in _table()["message"] if row["text"] in details]
    return sorted({name for name in packages if name})


def find_packages(details: str) -> list[str]:
    """Return requirements for the modules that a text reports as missing."""
    rows = _module_rows()
    missing = {module for name in _MODULE.findall(details) for module in (name, name.partition(".")[0])}
    return sorted({rows[name] for name in missing if name in rows})


def find_unknown_modules(details: str) -> list[str]:
    """Return missing top-level modules that no table has. A module within a package is not one to add."""
    return sorted(
        {name for name in _MODULE.findall(details) if "." not in name and name not in _module_rows()}
    )


def _module_rows() -> dict[str, str]:
    return {**_table()["distribution"], **{row["name"]: row["package"] for row in _table()["module"]}}


def may_add(requirement: str, definition: BuildSpec) -> bool:
    """Return whether the recipe's own bounds, and the parent's lock, allow a requirement."""
    name = package_of(requirement)
    if any(package.name == name for lock in definition.under for package in lock.packages):
        return False
    target = definition.target
    requirements = (*(target.requirements if target.source == "pypi" else ()), *target.pip)
    if (sample := _table()["fits"].get(requirement)) is None:  # without a bound: one more package
        return name not in {package.name for package in definition.lock.packages} | {*target.exclude}
    bounds = [
        Requirement(text).specifier for text in requirements if package_of(text) == name and text[0] != "."
    ]
    return all(bound.contains(sample) for bound in bounds)
