"""The libraries of frameworks: which ones must have code for a GPU, and how to recognize a build for CPUs.

The rows are in `knowledge/frameworks.toml`, each with a source. No other file is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache

from imagefactory.gpu.capability import Capability, CodeKind, parse_capability
from imagefactory.gpu.knowledge.packages import offered
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.knowledge.toolkits import ptx_cuda
from imagefactory.gpu.values import GpuLibrary, InstalledPackage, ScanResult, built_for
from imagefactory.versions import natural


class LibraryRole(StrEnum):
    """The role of a library's code in a prediction."""

    GATES = "must load"
    ON_DEMAND = "on demand"
    REPORT = "reported only"
    OTHER = "not the framework's"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalLibraries:
    """Libraries that only some functions use; `what` describes these functions.

    With `begins`, only some modules of a library are optional: those without code for older capabilities.
    """

    library: str
    what: str
    begins: Capability | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A row of frameworks.toml. Libraries are shell patterns that match the name or the end of the path."""

    name: str
    packages: tuple[str, ...]
    must_load: tuple[str, ...]
    on_demand: tuple[OptionalLibraries, ...]
    runtime: str
    pip: str
    conda: str
    source: str


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return all rows of frameworks.toml, in the order of the file."""
    tables = read_table("frameworks")
    return tuple(
        Framework(
            name=row["name"],
            packages=tuple(row["packages"]),
            must_load=tuple(row["must_load"]),
            on_demand=tuple(
                OptionalLibraries(
                    library=part["library"],
                    what=part["what"],
                    begins=parse_capability(part["begins"]) if "begins" in part else None,
                    source=part["source"],
                )
                for part in tables["on_demand"]
                if part["framework"] == row["name"]
            ),
            runtime=row["runtime"],
            pip=row["pip"],
            conda=row["conda"],
            source=row["source"],
        )
        for row in tables["framework"]
    )


def required_framework(package: str) -> str:
    """Return the framework that every release of a package requires (`vllm` -> `torch`), empty if unknown."""
    rows = read_table("frameworks")["requires"]
    return next((row["framework"] for row in rows if package in row["names"]), "")


def find_framework(contents: ScanResult) -> Framework | None:
    """Return the framework in scanned contents: the first one whose libraries exist, else whose package
    exists.
    """
    for framework in frameworks():
        if any(matches(library.path, framework.must_load) for library in contents.libraries):
            return framework
    return next((framework for framework in frameworks() if find_package(contents, framework)), None)


def find_package(contents: ScanResult, framework: Framework) -> InstalledPackage | None:
    """Return the package that has the framework's version, or create it from the facts of the framework.

    If there are a conda record and a Python package, the conda record is returned, because it names the
    build.
    """
    packages = [
        package for name in framework.packages for package in contents.packages if package.name == name
    ]
    if packages:
        return next((package for package in packages if package.build), packages[0])
    version = _facts(contents, framework).get("version", "")
    return InstalledPackage(name=framework.name, version=version) if version else None


def gates_of(contents: ScanResult, framework: Framework) -> list[GpuLibrary]:
    """Return the libraries that a framework must load."""
    return [
        library for library in contents.libraries if role_of(library.path, framework)[0] is LibraryRole.GATES
    ]


def role_of(path: str, framework: Framework | None) -> tuple[LibraryRole, str]:
    """Return the role of a library in an image with `framework`, and the functions that use it if only some
    do.

    Libraries of other frameworks are loaded on demand.
    """
    if framework is not None:
        if matches(path, framework.must_load):
            return LibraryRole.GATES, ""
        for row in framework.on_demand:
            if row.begins is None and matches(path, (row.library,)):
                return LibraryRole.ON_DEMAND, row.what
    for row in read_table("frameworks")["report"]:
        if matches(path, tuple(row["library"])):
            return LibraryRole.REPORT, ""
    for other in frameworks():
        if other is not framework and matches(
            path, (*other.must_load, *(o.library for o in other.on_demand))
        ):
            return LibraryRole.ON_DEMAND, other.name
    return LibraryRole.OTHER, ""


def variant_of(path: str) -> str:
    """Return the CUDA version (`124`) of a library that exists once for each CUDA, empty for other
    libraries.
    """
    for row in read_table("frameworks")["variant"]:
        if match := re.fullmatch(row["library"], path.rpartition("/")[2]):
            return match[1]
    return ""


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path matches a pattern: by its name, or by its end if the pattern contains a slash."""
    name = path.rpartition("/")[2]
    return any(
        fnmatchcase("/" + path, "*/" + pattern) if "/" in pattern else fnmatchcase(name, pattern)
        for pattern in patterns
    )


def cuda_of(contents: ScanResult) -> str:
    """Return the CUDA version of scanned contents (`12.1`, or `12`), empty if unknown.

    These sources are tried in order: the framework's statement about its build, the build string of a
    package, the installed runtime, the name of the plugin, the file names of CUDA libraries, and the newest
    PTX. The PTX version is that of the compiler; only its major version is used, since a compiler can write
    older PTX.
    """
    framework = find_framework(contents)
    if framework is not None:
        facts = _facts(contents, framework)
        version = facts.get("cuda") or facts.get("cuda_version") or ""
        if not version:
            version = next((cuda for _, cuda in conda_builds(contents, framework) if cuda != "cpu"), "")
        if _VERSION.match(version):
            return _minor(version)
    runtimes = [package for package in contents.packages if _RUNTIME.fullmatch(package.name)]
    if runtimes:
        return _minor(max(runtimes, key=lambda package: len(package.name)).version)
    majors = [match[1] for package in contents.packages if (match := _PLUGIN.fullmatch(package.name))]
    files = [match[1] for package in contents.toolkit if (match := _CUDART.fullmatch(package))]
    if files or majors:
        return _minor(max(files, key=len)) if files else majors[0]
    return ptx_compiler(contents).partition(".")[0]


def ptx_compiler(contents: ScanResult) -> str:
    """Return the oldest CUDA version that may have written the newest PTX, empty without PTX."""
    known = ptx_cuda()
    versions = [
        known[code.isa]
        for library in contents.libraries
        if role_of(library.path, None)[0] is not LibraryRole.REPORT
        for modules in library.modules
        for code in modules.codes
        if code.isa in known
    ]
    return max(versions, key=natural, default="")


def cpu_only(contents: ScanResult) -> str:
    """Return why a framework computes on the CPU, and what to install instead; empty if it uses a GPU."""
    framework = find_framework(contents)
    if framework is None or not framework.must_load or any(_has_gpu_code(contents, framework)):
        return ""
    package = find_package(contents, framework)
    if package is None:
        return ""
    facts = _facts(contents, framework)
    if facts.get("hip") or facts.get("is_rocm_build") == "True":
        return ""
    if _VERSION.match(built := facts.get("cuda") or facts.get("cuda_version") or ""):
        return (
            f"{package.name} {package.version} was built for CUDA {_minor(built)}, but its libraries with "
            "code for GPUs are missing: install it again"
        )
    cpu_builds = [build for build, cuda in conda_builds(contents, framework) if cuda == "cpu"]
    package = cpu_builds[0] if cpu_builds else package
    version = package.version.partition("+")[0]
    build = f" (build {package.build})" if package.build else ""
    plugin = not package.build and framework.name == "jax"
    message = "is here without a CUDA plugin" if plugin else "has no code for GPUs"
    return (
        f"{package.name} {package.version}{build} {message} and computes only on the CPU: "
        f"install {_instead(framework, version, conda=bool(package.build))} instead"
    )


def conda_builds(contents: ScanResult, framework: Framework) -> list[tuple[InstalledPackage, str]]:
    """Return the conda packages of a framework whose build string contains a CUDA version or `cpu`."""
    some = [package for package in contents.packages if package.build and package.name in framework.packages]
    if not some:
        return []
    return [(package, cuda) for package in some if (cuda := built_for(package.build))]


def _instead(framework: Framework, version: str, *, conda: bool) -> str:
    """Return requirements for the same version with GPU support, one for each CUDA version on PyPI."""
    if conda:
        return f'"{framework.conda.format(version=version)}"'
    wheels = offered(framework.name, version)
    if not wheels:
        return f'"{framework.pip.format(version=version)}"'
    named = [
        f'"{wheel.package}{f"[{wheel.extras[0]}]" if wheel.extras else ""}=={version}" (CUDA {wheel.cuda})'
        for wheel in wheels
    ]
    return " or ".join(named)


_VERSION = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){0,3}\Z")
_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu[0-9]+)?|cuda-cudart|cudatoolkit")
_PLUGIN = re.compile(r"jax-cuda([0-9]+)-(?:plugin|pjrt)")
_CUDART = re.compile(r"libcudart(?:-[0-9a-f]{8})?\.so\.([0-9.]+)")


def _has_gpu_code(contents: ScanResult, framework: Framework) -> list[str]:
    """Return the libraries that must load and exist, others beside them, or those that have AMD code."""
    beside = tuple(
        f"{top}/*" for name in framework.must_load for top, inside, _ in [name.partition("/")] if inside
    )
    return [
        library.path
        for library in contents.libraries
        if matches(library.path, (*framework.must_load, *beside))
        or any(code.kind is CodeKind.AMD for modules in library.modules for code in modules.codes)
    ]


def _facts(contents: ScanResult, framework: Framework) -> dict[str, str]:
    """Return a framework's statements about its build, which are stored under the name of its module."""
    module = framework.name.partition("-")[0]
    return {key: value for name, key, value in contents.facts if name == module}


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
