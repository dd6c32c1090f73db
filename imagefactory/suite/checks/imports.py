"""`import`: the framework, its companions and what else the recipe names load, in the locked versions."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence

from .. import table
from ..context import Context, Failure, Finding, same_release, same_version
from . import named
from .packages import SHOWN, more


def check(context: Context) -> Finding:
    framework, expected = context.framework, context.expected
    framework.prepare()
    locked = expected.locked
    if expected.distribution not in locked:
        raise Failure(f"the lock holds no {expected.distribution}")
    answers = named.import_named(context)
    if faults := named.faults_of(answers):
        raise Failure("; ".join(faults[:SHOWN]) + more(faults))
    elsewhere = {answer.module for answer in answers if answer.state == named.NEEDS_GPU}
    pairs = framework.MODULES or tuple((expected.distribution, name) for name in find_modules(context))
    numbers, loaded = {}, {}
    for distribution, module_name in pairs:
        if distribution not in locked or module_name in loaded:
            continue
        if expected.framework == table.OTHER and module_name in elsewhere:
            loaded[module_name] = f"{module_name} of {distribution} {locked[distribution]}, which needs a GPU"
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
    numbers |= {
        "named-modules": sum(answer.state == named.LOADS for answer in answers),
        "gpu-modules": sum(answer.state == named.NEEDS_GPU for answer in answers),
    }
    details = [", ".join(loaded.values()), *([describe_named(answers)] if answers else [])]
    return Finding("; ".join(details), numbers)


def agrees(found: str, locked: str, *, built: bool) -> bool:
    """Whether a module's version is the locked one; `built` for packages that conda built from sources."""
    if built:
        return same_release(found, locked)
    return same_version(found if "+" in locked else found.partition("+")[0], locked)


def find_modules(context: Context) -> tuple[str, ...]:
    """What the framework's package is imported as: the module of its name, else all that it brings."""
    name = context.expected.distribution
    found = named.public_modules(named.files_of(context, name))
    wanted = table.module_of(name)
    if wanted in found:
        return (wanted,)
    if not found:
        raise Failure(f"{name} brings no Python module: leave `import` out of the recipe's checks")
    return tuple(found)


def describe_named(answers: Sequence[named.Answer]) -> str:
    """Return what came of the packages that the recipe names, none of whose failures is a fault."""
    loaded = [answer for answer in answers if answer.state == named.LOADS]
    parts = [f"{len(loaded)} modules of {len({answer.package for answer in answers})} named packages load"]
    for state, words in (
        (named.NEEDS_GPU, named.NEEDS_GPU),
        (named.FAILS, "does not load, beside the main module"),
    ):
        found = [answer for answer in answers if answer.state == state]
        shown = ", ".join(f"{answer.module} ({answer.detail})" for answer in found[:SHOWN])
        parts += [f"{words}: {shown}{more(found)}"] if found else []
    return "; ".join(parts)
