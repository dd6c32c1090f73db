"""`import`: the framework, its companions and the modules of named packages load, in the locked versions.

Every top-level module of the packages that the recipe names is imported by a process of its own. So a module
that crashes, ends the process or hangs costs one answer, and what it writes to stderr is read: NumPy 2 says
only there that a module was compiled for NumPy 1.
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
from .packages import SHOWN, more

SECONDS = 300.0
AT_ONCE = 2
READ = 1 << 18
"""Bytes of what a module writes to stderr that are looked through."""

LOADS, NEEDS_GPU, FAILS = "loads", "needs a GPU", "fails"

NO_PART = {
    *("benchmark", "benchmarks", "conftest", "doc", "docs", "example", "examples", "sample", "samples"),
    *("script", "scripts", "setup", "test", "tests"),
}
"""Folders that some packages leave among the modules by mistake."""

# What a module says for want of a GPU or its driver, which no image brings. The last exception or one that it
# was explicitly raised from must say it: what is missing besides is a fault of the image.
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
    """What came of importing `module` of `package`. `main`: the module is called as its package is."""

    package: str
    module: str
    main: bool
    state: str
    detail: str = ""


def import_named(context: Context) -> list[ImportResult]:
    """Import the modules of all packages that the recipe names. Returns an answer each, in order.

    The second run, as an ordinary user, keeps to each package's main modules.
    """
    wanted = [
        (package, module, main)
        for package in context.expected.named
        if package in context.expected.locked
        for module, main in modules_of(package, files_of(context, package))
        if main or context.expected.uid is None
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda each: run_import(each[1], gpu=context.expected.cuda != table.NO_CUDA), wanted)
        return [ImportResult(*each, *told) for each, told in zip(wanted, found, strict=True)]


def run_import(module: str, *, gpu: bool) -> tuple[str, str]:
    """Return the state of a module that is imported by a process of its own, and why."""
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "import_module.py")
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as answer:
        command = [sys.executable, "-I", "-B", script, str(answer.fileno()), module]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=told,
                pass_fds=[answer.fileno()],
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return FAILS, f"takes more than {SECONDS:.0f} s"
        answer.seek(0)
        told.seek(0)
        return judge(answer.read(READ), told.read(READ).decode("utf-8", "replace"), done.returncode, gpu=gpu)


def judge(answer: bytes, told: str, code: int, *, gpu: bool) -> tuple[str, str]:
    """Return the state, and why, of what a process wrote and how it ended. `gpu`: the image is for GPUs."""
    try:
        errors = [str(error) for error in json.loads(answer)["errors"]]
    except (ValueError, KeyError, TypeError):
        ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        last = ([line.strip() for line in told.splitlines() if line.strip()] or ["no message"])[-1]
        return FAILS, f"ends the process {ended}: {last[:300]}"
    _, warned, after = told.partition("compiled using NumPy 1.x cannot be run in")
    if warned:
        return FAILS, incompatible(after)
    if not errors:
        return LOADS, ""
    if any(GPU_MISSING.search(error) for error in errors):
        return (NEEDS_GPU, errors[0]) if gpu else (FAILS, f"{errors[0]} (the image is for CPUs)")
    because = [f"because of {error}" for error in errors[1:] if error.partition(": ")[2] not in errors[0]]
    return FAILS, ", ".join([errors[0], *because])


def incompatible(after: str) -> str:
    """Return a line for NumPy's warning that a module was compiled for NumPy 1, from the text after it.

    The traceback there ends in the package that loads the module.
    """
    version = re.match(r"\s+NumPy (\S+)", after)
    names = re.findall(r'File "[^"]*/site-packages/(\w+)[/.]', after.partition("_ARRAY_API")[0])
    module, found = names[-1] if names else "it", version[1] if version else "2"
    return f"{module} was compiled for NumPy 1 and cannot run with NumPy {found}"


def faults_of(answers: Iterable[ImportResult]) -> list[str]:
    """Return a line for each module whose failure is the image's.

    Some packages leave modules of their tools beside the one that they are called by: that those do
    not load is no fault while the main one does.
    """
    answers = list(answers)
    main = {answer.package for answer in answers if answer.main and answer.state != FAILS}
    return [
        f"{answer.module} of {answer.package}: {answer.detail}"
        for answer in answers
        if answer.state == FAILS and (answer.main or answer.package not in main)
    ]


# --- which modules a package has -----------------------------------------------------------------


def files_of(context: Context, name: str) -> list[str]:
    """Return the package's files, as seen from the folder of the image's packages."""
    if name in context.expected.conda:
        records, _ = conda.read_records(context.prefix)
        site = os.path.relpath(context.site, context.prefix)
        files = [path for record in records if record.name == name for path in record.files]
        return sorted(conda.within(files, site))
    for distribution in importlib.metadata.distributions(name=name, path=[context.site]):
        return [str(file) for file in distribution.files or ()]
    raise CheckFailure(f"{name} is not installed")


def modules_of(package: str, files: Iterable[str]) -> list[tuple[str, bool]]:
    """Return the modules to import, and for each whether it is called as its package is, or none is."""
    found = public_modules(files)
    own = table.module_of(package).lower()
    called = any(name.lower() == own for name in found)
    return [(name, not called or name.lower() == own) for name in found]


def public_modules(files: Iterable[str]) -> list[str]:
    """Return the names of top-level modules; of a namespace package those of the packages in it."""
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
    """Return `top` if it is a package, else the nearest packages in that namespace, else `top` again."""
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
    """Return the module that a file is, empty for one that is none: `libx.so` is a library, not a module."""
    for suffix in (".py", *importlib.machinery.EXTENSION_SUFFIXES):
        if file.endswith(suffix):
            name = posixpath.basename(file)[: -len(suffix)]
            plain = suffix != ".so" or not name.startswith("lib")
            return name if plain and name.isidentifier() else ""
    return ""


def check(context: Context) -> Finding:
    framework, expected = context.framework, context.expected
    framework.prepare()
    locked = expected.locked
    if expected.distribution not in locked:
        raise CheckFailure(f"the lock holds no {expected.distribution}")
    answers = import_named(context)
    if faults := faults_of(answers):
        raise CheckFailure("; ".join(faults[:SHOWN]) + more(faults))
    elsewhere = {answer.module for answer in answers if answer.state == NEEDS_GPU}
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
            raise CheckFailure(f"{module_name} says it is {found}, locked is {version}")
        loaded[module_name] = f"{module_name} {found}"
    numbers |= {
        "named-modules": sum(answer.state == LOADS for answer in answers),
        "gpu-modules": sum(answer.state == NEEDS_GPU for answer in answers),
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
    found = public_modules(files_of(context, name))
    wanted = table.module_of(name)
    if wanted in found:
        return (wanted,)
    if not found:
        raise CheckFailure(f"{name} brings no Python module: leave `import` out of the recipe's checks")
    return tuple(found)


def describe_named(answers: Sequence[ImportResult]) -> str:
    """Return what came of the packages that the recipe names, none of whose failures is a fault."""
    loaded = [answer for answer in answers if answer.state == LOADS]
    parts = [f"{len(loaded)} modules of {len({answer.package for answer in answers})} named packages load"]
    for state, words in (
        (NEEDS_GPU, NEEDS_GPU),
        (FAILS, "does not load, beside the main module"),
    ):
        found = [answer for answer in answers if answer.state == state]
        shown = ", ".join(f"{answer.module} ({answer.detail})" for answer in found[:SHOWN])
        parts += [f"{words}: {shown}{more(found)}"] if found else []
    return "; ".join(parts)
