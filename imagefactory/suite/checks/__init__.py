"""The table of checks: functions that get a Context, and return a Finding or raise a CheckFailure."""

from __future__ import annotations

from collections.abc import Callable

from ..context import Context, Finding
from . import framework, imports, libraries, packages, usage

CHECKS: dict[str, Callable[[Context], Finding]] = {
    "packages": packages.check,
    "libraries": libraries.check,
    "import": imports.check,
    "cuda-version": framework.check_cuda,
    "compute": framework.check_compute,
    "compiler": framework.check_compiler,
    "jupyter": usage.check_jupyter,
    "unprivileged": usage.check_unprivileged,
}
