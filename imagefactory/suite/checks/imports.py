"""The check `import`: the framework, its companions and the modules of named packages load in the locked
versions.

Each top-level module of the packages in the recipe is imported in a separate process. So a module that
crashes, exits or hangs affects only its result. The stderr is read too, because NumPy 2 reports only there
that a module was compiled for NumPy 1.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .. import conda, table
from ..context import CheckFailure, Context, Finding, same_release, same_version
from .packages import SHOWN, more, shorten

SECONDS = 300.0
AT_ONCE = 2
READ = 1 << 18  # bytes of a module's stderr to search

LOADS, NEEDS_GPU, FAILS = "loads", "needs a GPU", "fails"

NO_PART = {
    *("benchmark", "benchmarks", "conftest", "doc", "docs", "example", "examples", "sample", "samples"),
    *("script", "scripts", "setup", "test", "tests"),
}
"""Directories that some packages install among the modules by mistake."""

# Texts of a module that lacks a GPU or its driver, which no image brings. The last exception or one of its
# explicit causes must have one of them: whatever else is missing is a fault of the image.
GPU_MISSING = re.compile(
    r"\blib(cuda|nvidia-ml|nvcuvid|nvidia-encode|nvoptix)\.so"
    r"|Found no NVIDIA driver"
    r"|No CUDA GPUs are available"
    r"|no CUDA-capable device"
    r"|CUDA driver version is insufficient"
    r"|cudaErrorInsufficientDriver|cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE"
    r"|NVML Shared Library Not Found"
    r"|CUDA driver library cannot be found|Error at driver init"
    r"|\b0 active drivers\b"
)


@dataclass(frozen=True)
class ImportResult:
    """The import of `module` from `package`. `main` means that the module has the name of its package."""

    package: str
    module: str
    main: bool
    state: str
    detail: str = ""


def import_named(context: Context) -> list[ImportResult]:
    """Import the modules of all packages in the recipe. Return the results in order.

    The second run, as an ordinary user, imports only the main modules of each package.
    """
    expected = context.expected

    def run(module: tuple[str, str, bool]) -> ImportResult:
        return ImportResult(*module, *run_import(module[1], gpu=expected.cuda != table.NO_CUDA))

    modules = [
        (package, module, main)
        for package in expected.named
        if package in expected.locked
        for module, main in modules_of(package, files_of(context, package))
        if main or expected.uid is None
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, modules))


def run_import(module: str, *, gpu: bool) -> tuple[str, str]:
    """Import a module in a separate process. Return its state and the reason."""
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "import_module.py")
    null = subprocess.DEVNULL
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as answer:
        number = answer.fileno()
        command = [sys.executable, "-I", "-B", script, str(number), module]
        try:
            code = subprocess.run(
                command, stdin=null, stdout=null, stderr=log, pass_fds=[number], timeout=SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return FAILS, f"takes more than {SECONDS:.0f} s"
        answer.seek(0)
        log.seek(0)
        return judge(answer.read(READ), log.read(READ).decode("utf-8", "replace"), code, gpu=gpu)


def judge(answer: bytes, log: str, code: int, *, gpu: bool) -> tuple[str, str]:
    """Return the state and the reason, from the output and exit code of a process.

    `gpu`: the image is for GPUs.
    """
    try:
        errors = [str(error) for error in json.loads(answer)["errors"]]
    except (ValueError, KeyError, TypeError):
        ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        last = ([line.strip() for line in log.splitlines() if line.strip()] or ["no message"])[-1]
        return FAILS, f"ends the process {ended}: {last[:300]}"
    _, warned, after = log.partition("compiled using NumPy 1.x cannot be run in")
    if warned:
        return FAILS, incompatible(after)
    if not errors:
        return LOADS, ""
    if any(GPU_MISSING.search(error) for error in errors):
        return (NEEDS_GPU, errors[0]) if gpu else (FAILS, f"{errors[0]} (the image is for CPUs)")
    because = [f"because of {error}" for error in errors[1:] if error.partition(": ")[2] not in errors[0]]
    return FAILS, ", ".join([errors[0], *because])


def incompatible(after: str) -> str:
    """Return a line for NumPy's warning that a module was compiled for NumPy 1, from the text after the
    warning.

    The traceback there ends in the package that loads the module.
    """
    version = re.match(r"\s+NumPy (\S+)", after)
    names = re.findall(r'File "[^"]*/site-packages/(\w+)[/.]', after.partition("_ARRAY_API")[0])
    module, number = names[-1] if names else "it", version[1] if version else "2"
    return f"{module} was compiled for NumPy 1 and cannot run with NumPy {number}"


def faults_of(answers: Iterable[ImportResult]) -> list[str]:
    """Return a line for each module whose failure is a fault of the image.

    Some packages install modules of their tools next to the main module. These need not load if the main
    module does.
    """
    answers = list(answers)
    main = {answer.package for answer in answers if answer.main and answer.state != FAILS}
    return [
        f"{answer.module} of {answer.package}: {answer.detail}"
        for answer in answers
        if answer.state == FAILS and (answer.main or answer.package not in main)
    ]


def files_of(context: Context, name: str) -> list[str]:
    """Return the files of a package, relative to the directory of packages in the image."""
    if name in context.expected.conda:
        records, _ = conda.read_records(context.prefix)
        site = os.path.relpath(context.site, context.prefix)
        files = [path for record in records if record.name == name for path in record.files]
        return sorted(conda.within(files, site))
    for distribution in importlib.metadata.distributions(name=name, path=[context.site]):
        return [str(file) for file in distribution.files or ()]
    raise CheckFailure(f"{name} is not installed")


def modules_of(package: str, files: Iterable[str]) -> list[tuple[str, bool]]:
    """Return the modules to import, each with whether it is a main module: it has the package's name, or none
    has.
    """
    modules = public_modules(files)
    own = table.module_of(package).lower()
    named = any(name.lower() == own for name in modules)
    return [(name, not named or name.lower() == own) for name in modules]


def public_modules(files: Iterable[str]) -> list[str]:
    """Return the names of top-level modules. For a namespace package, return the packages in it."""
    folders: dict[str, set[str]] = {}
    modules = set()
    for file in files:
        folder, _, last = file.rpartition("/")
        name = module_name(last)
        if not name or not all(part.isidentifier() for part in folder.split("/") if folder):
            continue
        if folder:
            folders.setdefault(folder, set()).add(name)
        else:
            modules.add(name)
    for top in {folder.partition("/")[0] for folder in folders}:
        modules.update(packages_in(top, folders))
    return sorted(
        name for name in modules if not name.startswith("_") and name.partition(".")[0] not in NO_PART
    )


def packages_in(top: str, folders: Mapping[str, set[str]]) -> list[str]:
    """Return `top` if it is a package, else the nearest packages in that namespace, else `top`."""
    if "__init__" in folders.get(top, ()):
        return [top]
    inside = sorted(
        folder for folder, names in folders.items() if folder.startswith(f"{top}/") and "__init__" in names
    )
    nearest = [
        folder
        for folder in inside
        if not any(folder.startswith(f"{other}/") for other in inside)
        and not any(part.startswith("_") or part in NO_PART for part in folder.split("/"))
    ]
    return [folder.replace("/", ".") for folder in nearest] or [top]


def module_name(file: str) -> str:
    """Return the module name of a file, "" for other files: `libx.so` is a library."""
    for suffix in (".py", *importlib.machinery.EXTENSION_SUFFIXES):
        if file.endswith(suffix):
            name = posixpath.basename(file)[: -len(suffix)]
            plain = suffix != ".so" or not name.startswith("lib")
            return name if plain and name.isidentifier() else ""
    return ""


def check(context: Context) -> Finding:
    expected, locked = context.expected, context.expected.locked
    if expected.distribution not in locked:
        raise CheckFailure(f"the lock has no {expected.distribution}")
    answers = import_named(context)
    if faults := faults_of(answers):
        raise CheckFailure("; ".join(faults[:SHOWN]) + more(faults))
    elsewhere = {answer.module for answer in answers if answer.state == NEEDS_GPU}
    pairs = context.framework.MODULES or tuple(
        (expected.distribution, name) for name in find_modules(context)
    )
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
        if expected.framework == table.OTHER:  # some have no version, or another one than their package
            loaded[module_name] = f"{module_name} of {distribution} {locked[distribution]}"
            continue
        version = module.__version__
        if not agrees(version, locked[distribution], built=distribution in expected.conda):
            raise CheckFailure(f"{module_name} says it is {version}, locked is {locked[distribution]}")
        loaded[module_name] = f"{module_name} {version}"
    numbers |= {
        "named-modules": sum(answer.state == LOADS for answer in answers),
        "gpu-modules": sum(answer.state == NEEDS_GPU for answer in answers),
    }
    details = [", ".join(loaded.values()), *([describe_named_packages(answers)] if answers else [])]
    return Finding("; ".join(details), numbers)


def agrees(version: str, locked: str, *, built: bool) -> bool:
    """Return whether the version of a module is the locked one.

    `built`: conda built the package from sources.
    """
    if built:
        return same_release(version, locked)
    return same_version(version if "+" in locked else version.partition("+")[0], locked)


def find_modules(context: Context) -> tuple[str, ...]:
    """Return the module with the name of the framework's package, else all its modules."""
    name = context.expected.distribution
    modules = public_modules(files_of(context, name))
    if table.module_of(name) in modules:
        return (table.module_of(name),)
    if not modules:
        raise CheckFailure(f"{name} brings no Python module: leave `import` out of the recipe's checks")
    return tuple(modules)


def describe_named_packages(answers: Sequence[ImportResult]) -> str:
    """Return a line about the packages in the recipe, if none of their failures is a fault."""
    loaded = sum(answer.state == LOADS for answer in answers)
    parts = [f"{loaded} modules of {len({answer.package for answer in answers})} named packages load"]
    for state, words in ((NEEDS_GPU, NEEDS_GPU), (FAILS, "does not load, but the main module does")):
        lines = [f"{answer.module} ({answer.detail})" for answer in answers if answer.state == state]
        parts += [f"{words}: {shorten(lines)}"] if lines else []
    return "; ".join(parts)
