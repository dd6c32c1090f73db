"""The table of checks: one function each, called with a Context, answering a Finding or a Failure."""

from __future__ import annotations

from collections.abc import Callable

from ..context import Context, Finding
from . import compiler, compute, cuda, imports, jupyter, libraries, packages, unprivileged

CHECKS: dict[str, Callable[[Context], Finding]] = {
    "packages": packages.check,
    "libraries": libraries.check,
    "import": imports.check,
    "cuda-version": cuda.check,
    "compute": compute.check,
    "compiler": compiler.check,
    "jupyter": jupyter.check,
    "unprivileged": unprivileged.check,
}
