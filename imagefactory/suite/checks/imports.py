"""`import`: the framework and its companions load, in their locked versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import time
from collections.abc import Iterable

from .. import conda, table
from ..context import Context, Failure, Finding, same_release, same_version

NO_PART = {"benchmarks", "doc", "docs", "examples", "test", "tests"}
"""Folders that some packages leave among the modules by mistake."""


def check(context: Context) -> Finding:
    framework, expected = context.framework, context.expected
    framework.prepare()
    locked = expected.locked
    if expected.distribution not in locked:
        raise Failure(f"the lock holds no {expected.distribution}")
    pairs = framework.MODULES or tuple((expected.distribution, name) for name in find_modules(context))
    numbers, loaded = {}, {}
    for distribution, module_name in pairs:
        if distribution not in locked or module_name in loaded:
            continue
        began = time.monotonic()
        module = importlib.import_module(module_name)
        numbers[f"{module_name}-seconds"] = round(time.monotonic() - began, 3)
        if expected.framework == table.OTHER:  # many say no version, or not that of their package
            loaded[module_name] = f"{module_name} of {distribution} {locked[distribution]}"
            continue
        found, version = module.__version__, locked[distribution]
        if not agrees(found, version, built=distribution in expected.conda):
            raise Failure(f"{module_name} says it is {found}, locked is {version}")
        loaded[module_name] = f"{module_name} {found}"
    return Finding(", ".join(loaded.values()), numbers)


def agrees(found: str, locked: str, *, built: bool) -> bool:
    """Whether a module's version is the locked one; `built` for packages that conda built from sources."""
    if built:
        return same_release(found, locked)
    return same_version(found if "+" in locked else found.partition("+")[0], locked)


def find_modules(context: Context) -> tuple[str, ...]:
    """What the framework's package is imported as: the module of its name, else all that it brings."""
    name = context.expected.distribution
    modules = top_modules(_files(context, name))
    wanted = table.module_of(name)
    if wanted in modules:
        return (wanted,)
    found = tuple(sorted(each for each in modules if not each.startswith("_") and each not in NO_PART))
    if not found:
        raise Failure(f"{name} brings no Python module: leave `import` out of the recipe's checks")
    return found


def _files(context: Context, name: str) -> Iterable[str]:
    """The package's files, as seen from the folder of the image's packages."""
    if name in context.expected.conda:
        records, _ = conda.read_records(context.prefix)
        site = os.path.relpath(context.site, context.prefix)
        files = [path for record in records if record.name == name for path in record.files]
        return conda.within(files, site)
    for distribution in importlib.metadata.distributions(name=name, path=[context.site]):
        return [str(file) for file in distribution.files or ()]
    raise Failure(f"{name} is not installed")


def top_modules(files: Iterable[str]) -> set[str]:
    """Names that can be imported, of files below a folder of the module search path."""
    found = set()
    for file in files:
        first, _, rest = file.partition("/")
        name = first if rest else first.partition(".")[0]
        if file.endswith((".py", ".so")) and name.isidentifier():
            found.add(name)
    return found
