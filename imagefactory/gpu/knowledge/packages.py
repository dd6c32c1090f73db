"""Wheels on PyPI: their CUDA, their companions, and the PyPI names of conda packages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.gpu.capability import Capability, CodeKind, GpuCode, parse_capability, parse_code
from imagefactory.gpu.knowledge.tables import covers, numbers, read_table
from imagefactory.gpu.knowledge.toolkits import compilers_of, run_time_compilers
from imagefactory.gpu.values import ROCM, GpuLibrary, InstalledPackage, ModuleCount, ScanResult
from imagefactory.versions import natural

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaWheel:
    """A package on PyPI with a framework version for one CUDA: `package[extras]` uses CUDA `cuda`.

    `version` is a prefix of whole components (`2.3` covers 2.3.1). `python` is the lowest Python version of
    the wheels, empty if every base has it.
    """

    package: str
    version: str
    cuda: str
    extras: tuple[str, ...]
    python: str
    source: str


@cache
def cuda_wheels() -> tuple[CudaWheel, ...]:
    """Return all rows of pypi_cuda.toml, in the order of the file."""
    return tuple(
        CudaWheel(
            package=row["package"],
            version=row["version"],
            cuda=cuda,
            extras=tuple(row.get("extras", ())),
            python=row.get("python", ""),
            source=row["source"],
        )
        for row in read_table("pypi_cuda")["wheel"]
        for cuda in row["cuda"]
    )


def offered(package: str, version: str) -> tuple[CudaWheel, ...]:
    """Return the rows of pypi_cuda.toml for a framework version, empty if there are none.

    The row with the longest matching version is used. If none covers `version`, all rows within `version` are
    used.
    """
    wheels = [wheel for wheel in cuda_wheels() if wheel.package == package]
    covering = [wheel for wheel in wheels if covers(wheel.version, version)]
    if covering:
        longest = max(wheel.version.count(".") for wheel in covering)
        return tuple(wheel for wheel in covering if wheel.version.count(".") == longest)
    return tuple(wheel for wheel in wheels if covers(version, wheel.version))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionPackage:
    """A package that is released with a framework version: its `series` (`0.21`), for these Python
    versions.
    """

    framework: str
    version: str
    package: str
    series: str
    python: tuple[str, ...]
    source: str


@cache
def _companions() -> tuple[CompanionPackage, ...]:
    rows = read_table("companions")["companion"]
    return tuple(CompanionPackage(**row | {"python": tuple(row["python"])}) for row in rows)


def companions(framework: str, version: str, python: str) -> tuple[CompanionPackage, ...]:
    """Return the companions of a framework version that have wheels for a Python version (`3.11`)."""
    return tuple(
        row
        for row in _companions()
        if row.framework == framework and covers(row.version, version) and python in row.python
    )


def companion_names(framework: str) -> frozenset[str]:
    """Return the companions of all versions of a framework."""
    return frozenset(row.package for row in _companions() if row.framework == framework)


def companions_for(framework: str, version: str) -> dict[str, str]:
    """Return the series (`0.21`) of each companion for a framework version, by name.

    A companion without a release for that version has an empty series. If no row covers the version, the
    result is empty.
    """
    known = {
        row.package: row.series
        for row in _companions()
        if row.framework == framework and covers(row.version, version)
    }
    return dict.fromkeys(sorted(companion_names(framework)), "") | known if known else {}


def last_with(companion: str, framework: str) -> str:
    """Return the newest framework version that has a companion, empty if there is none."""
    versions = [
        row.version for row in _companions() if (row.package, row.framework) == (companion, framework)
    ]
    return max(versions, key=numbers, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyBound:
    """A requirement that some `versions` of a package have but do not declare: `needs`, a package and its
    versions.

    With `add` the package is installed even if nothing else requires it. The row applies to `python`
    (`3.13`), or to all if that is empty.
    """

    package: str
    versions: SpecifierSet
    needs: Requirement
    add: bool
    source: str
    python: str = ""


@cache
def bounds() -> tuple[DependencyBound, ...]:
    """Return all rows of bounds.toml, in the order of the file.

    Raises TypeError or ValueError for an invalid row.
    """
    return tuple(parse_bound(**row) for row in read_table("bounds")["bound"])


def parse_bound(
    *, package: str, versions: str, needs: str, source: str, add: bool = False, python: str = ""
) -> DependencyBound:
    """Return a row of bounds.toml. Raises ValueError if it is invalid."""
    from packaging.requirements import Requirement

    needed = Requirement(needs)
    if package != canonicalize_name(package) or needed.name != canonicalize_name(needed.name):
        raise ValueError(f"'{package}' or '{needed.name}' is not a normalized name")
    if needed.extras or needed.marker or needed.url or not (add or needed.specifier):
        raise ValueError(f"'{needs}' is not a name with versions")
    if python and not re.fullmatch(r"3\.[0-9]{1,2}", python):
        raise ValueError(f"'{python}' is not a minor version of Python")
    return DependencyBound(
        package=package,
        versions=SpecifierSet(versions),
        needs=needed,
        add=add,
        source=source,
        python=python,
    )


def newest_cuda() -> int:
    """Return the newest CUDA major version in the table."""
    return max(int(wheel.cuda.partition(".")[0]) for wheel in cuda_wheels())


@cache
def families() -> dict[str, str]:
    """Return the PyPI distribution of the framework of each family (`pytorch` -> `torch`)."""
    return dict(read_table("pypi_cuda")["families"])


@cache
def aliases() -> dict[str, tuple[str, ...]]:
    """Return the distributions for the names that people write (`tf` -> `("tensorflow",)`)."""
    written = {name: tuple(names) for name, names in read_table("pypi_cuda")["aliases"].items()}
    return {family: (name,) for family, name in families().items()} | written


@cache
def known_names() -> frozenset[str]:
    """Return every name under which a table has releases or builds: aliases and distributions."""
    rows = [*read_table("releases")["release"], *read_table("documented")["build"]]
    names = {row["framework"] for row in rows} | {wheel.package for wheel in cuda_wheels()}
    names |= {name for row in run_time_compilers() for name in row.names}
    compiled = {name for row in run_time_compilers() for name in row.names}
    return frozenset({*names, *compiled, *aliases(), *families().values()})


def distributions(name: str, version: str, cuda: str = "") -> tuple[str, ...]:
    """Return the distributions that `name` stands for; of several, those with that release for `cuda`.

    A name that is not an alias stands for itself, and so does an alias without such a release.
    """
    names = aliases().get(name, (name,))
    if len(names) == 1:
        return names
    return tuple(row for row in names if _has_release(row, version, cuda)) or (name,)


def _has_release(name: str, version: str, cuda: str) -> bool:
    cudas = {
        row.cuda for row in releases(name) if covers(row.version, version) or covers(version, row.version)
    }
    cudas |= {row.cuda for row in offered(name, version)}
    cudas |= {known for _, some in compilers_of(name, version) for known in some}
    return any(not cuda or covers(cuda, row) or covers(row, cuda) for row in cudas)


def newest_patch(framework: str, version: str) -> str:
    """Return the newest release of a minor version (`2.7` -> `2.7.1`), else the version."""
    if version.count(".") != 1:
        return version
    tables = (row["newest"] for row in read_table("releases")["patches"] if row["framework"] == framework)
    return next((patch for text in tables for patch in text.split() if covers(version, patch)), version)


@cache
def pypi_names() -> dict[str, tuple[str, ...]]:
    """Return the PyPI names of conda packages that differ from the conda name (`pytorch` -> `("torch",)`)."""
    return {row["conda"]: tuple(row["pypi"]) for row in read_table("conda_pypi")["name"]}


# --- Documentation of projects: the GPU code of each build, and the CUDA versions of each release
# `documented.toml` and `releases.toml` have what a page or a build script of the project says. A scan checks
# it (`scanned` below), and finally a run on such a GPU.


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedSupport:
    """The documented GPU code of a framework build for one CUDA.

    `version` is a prefix of whole components. `codes` are machine code and PTX as the project names them,
    sorted; PTX has no instruction set version, which no project documents. `minimum` is the lowest capability
    in the project's text, or None. `cudnn` is a partial or full version, often empty. `platform` is the
    architecture of the build in OCI format. The row is not about GPUs before `known_from`. A `partial` one is
    from a source that names supported GPUs: nothing is known of the others.
    """

    framework: str
    version: str
    cuda: str
    codes: tuple[GpuCode, ...]
    minimum: Capability | None
    cudnn: str
    source: str
    platform: str = "amd64"
    known_from: Capability | None = None
    partial: bool = False

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """Return the capabilities for which machine code (plain or `a`) or PTX is documented, sorted."""
        return tuple(sorted({code.architecture for code in self.codes if code.architecture}))

    @property
    def ptx(self) -> bool:
        """Return whether PTX is documented, so that newer GPUs than the listed ones may be supported."""
        return any(code.kind is CodeKind.PTX for code in self.codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRelease:
    """One CUDA version for which a framework version was released.

    `version` is a prefix of whole components. `pythons` are minor versions (`3.11`), empty if unknown.
    `cuda` is `rocm6.2` for a build for AMD GPUs. `experimental` is the project's term for unstable builds.
    `any_minor` means that the build uses the CUDA libraries of the machine, so other minor versions of that
    CUDA may work.
    """

    framework: str
    version: str
    cuda: str
    cudnn: str
    pythons: tuple[str, ...]
    experimental: bool
    any_minor: bool
    source: str


@cache
def all_documented() -> tuple[DocumentedSupport, ...]:
    """Return all rows of documented.toml, one for each version and CUDA."""
    return tuple(
        DocumentedSupport(
            framework=row["framework"],
            version=version,
            cuda=cuda,
            codes=tuple(sorted(map(_code, row["codes"].split()))),
            minimum=parse_capability(row["minimum"]) if "minimum" in row else None,
            cudnn=row.get("cudnn", ""),
            source=row["source"],
            platform=platform,
            known_from=parse_capability(row["known_from"]) if "known_from" in row else None,
            partial=row.get("partial", False),
        )
        for row in read_table("documented")["build"]
        for version in row["versions"]
        for cuda in row["cuda"]
        for platform in row.get("platforms", ("amd64",))
    )


@cache  # a table asks once for each GPU
def documented(framework: str, version: str, cuda: str, platform: str = "amd64") -> DocumentedSupport | None:
    """Return the documented GPU code of a framework build, None if there is no row.

    `framework` is the distribution (`torch`), `version` is `2.3` or `2.3.1`, `cuda` is `12.1`, or `12` if the
    framework fixes only the major version. The row with the longest version that covers `version` is used.
    """
    rows = [
        row
        for row in all_documented()
        if (row.framework, row.platform) == (framework, platform)
        and covers(row.version, version)
        and (covers(row.cuda, cuda) or covers(cuda, row.cuda))
    ]
    return max(
        rows, key=lambda row: (row.version.count("."), row.cuda.count("."), natural(row.cuda)), default=None
    )


@cache
def releases(framework: str) -> tuple[FrameworkRelease, ...]:
    """Return all releases of a framework, the newest version and CUDA first.

    Empty for an unknown framework.
    """
    rows = [
        FrameworkRelease(
            framework=framework,
            version=row["version"],
            cuda=cuda,
            cudnn=row.get("cudnn", {}).get(cuda, ""),
            pythons=_pythons(row.get("python", "")),
            experimental=cuda in row.get("experimental", ()),
            any_minor=row.get("any-minor", False),
            source=row["source"],
        )
        for row in read_table("releases")["release"]
        if row["framework"] == framework
        for cuda in [
            *row["cuda"],
            *row.get("experimental", ()),
            *(f"{ROCM}{rocm}" for rocm in row.get("rocm", ())),
        ]
    ]
    return tuple(sorted(rows, key=lambda row: (numbers(row.version), natural(row.cuda)), reverse=True))


def _code(word: str) -> GpuCode:
    """Parse `80` as sm_80, `90a` as sm_90a and `gfx90a`. `120+PTX` is written as `120 compute_120`."""
    return parse_code(word if word.startswith(("compute_", "gfx")) else f"sm_{word}")


def _pythons(text: str) -> tuple[str, ...]:
    """Parse a range such as `3.8-3.11` into its minor versions."""
    if not text:
        return ()
    (major, first), (_, last) = (numbers(end) for end in text.split("-"))
    return tuple(f"{major}.{minor}" for minor in range(first, last + 1))


# --- Other indexes, for packages that PyPI does not have, or only in other releases


_NEWEST = "9999"
"""A version newer than all releases: the upper end of a range without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalIndexRow:
    """The index or page with releases that have no wheels on PyPI.

    `index` is the name of the index in the settings, empty for a page of links to wheels. `versions` are
    these releases, empty for all. `tagged` means that the index has only builds with a tag (`cu118`); the tag
    replaces `{tag}` in `index` and `url`.
    """

    package: str
    index: str
    url: str
    versions: str
    tagged: bool
    source: str

    def with_tag(self, tag: str) -> tuple[str, str]:
        """Return the name and the address of the index for a build tag."""
        return self.index.replace("{tag}", tag), self.url.replace("{tag}", tag)


@cache
def _rows() -> dict[str, ExternalIndexRow]:
    table = read_table("indexes")
    urls = {row["name"]: row["url"] for row in table["index"]}
    rows = [(row, row["index"], urls[row["index"]]) for row in table["package"]]
    rows += [(row, "", row["url"]) for row in table["page"]]
    return {
        name: ExternalIndexRow(
            package=name,
            index=index,
            url=url,
            versions=row["versions"],
            tagged=row.get("tagged", False),
            source=row["source"],
        )
        for row, index, url in rows
        for name in row["names"]
    }


def external_indexes(package: str, bounds: str, tag: str = "") -> ExternalIndexRow | None:
    """Return where a package is, if its releases within `bounds` (PEP 440) have no wheels on PyPI.

    None if PyPI may have a wheel. `tag` is the requested build tag.
    """
    row = _rows().get(package)
    if row is None or (row.tagged and not tag) or not _covers(row.versions, bounds):
        return None
    return None if "{tag}" in row.url and not tag else row


def is_known_index(address: str) -> bool:
    """Return whether an address belongs to an index in the table."""
    patterns = (
        re.escape(row["url"].rstrip("/")).replace(r"\{tag\}", "[a-z0-9]+")
        for row in read_table("indexes")["index"]
    )
    return any(re.fullmatch(rf"{pattern}(/simple)?/?", address) for pattern in patterns)


def _covers(versions: str, bounds: str) -> bool:
    """Return whether `versions` contains all releases within `bounds` that a solver would choose."""
    try:
        there, required = SpecifierSet(versions, prereleases=True), SpecifierSet(bounds, prereleases=True)
    except InvalidSpecifier:
        return False
    if required.contains(_NEWEST):
        return there.contains(_NEWEST)
    named = {re.sub(r"\.\*$", "", bound.version) for bound in (*there, *required)}
    allowed = [bound for bound in (*named, "0") if required.contains(Version(bound))]
    some = [bound for bound in allowed if bound != "0"] or allowed
    return bool(some) and all(there.contains(bound) for bound in some)


# --- Scans of framework wheels (`scanned.toml`), by the wheel's sha256
# `python -m imagefactory.actions.scan_wheels` writes the rows; do not edit them. So the contents of a wheel
# are known without a download: the hash in a lock fixes its bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelScan:
    """A scanned wheel: `contents.source` is its file name, `source` is when and how it was scanned."""

    package: str
    version: str
    file: str
    sha256: str
    contents: ScanResult
    source: str


@cache
def scanned_wheels() -> tuple[WheelScan, ...]:
    """Return all rows of scanned.toml, in the order of the file."""
    return tuple(_wheel(row) for row in read_table("scanned").get("wheel", ()))


def scanned_for(platform: str) -> tuple[WheelScan, ...]:
    """Return the scanned wheels for an architecture in OCI format."""
    arm64 = platform == "arm64"
    return tuple(wheel for wheel in scanned_wheels() if wheel.file.endswith("_aarch64.whl") is arm64)


def parse_scanned(text: str) -> tuple[WheelScan, ...]:
    """Parse the text of scanned.toml into rows, in the order of the text."""
    return tuple(_wheel(row) for row in tomllib.loads(text).get("wheel", ()))


@cache
def scanned(sha256: str) -> ScanResult | None:
    """Return the contents of the wheel with this hash (64 hex digits), None if it was not scanned.

    Libraries that a framework does not use may be missing.
    """
    row = _by_hash().get(sha256)
    return _wheel(row).contents if row else None


def scanned_release(package: str, version: str, platform: str) -> ScanResult | None:
    """Return the contents of a scanned wheel of a release for an architecture, None if none was scanned."""
    for sha256, row in _by_hash().items():
        same = (row["package"], row["version"]) == (package, version)
        if same and row["file"].endswith("_aarch64.whl") is (platform == "arm64"):
            return scanned(sha256)
    return None


@cache
def _by_hash() -> dict[str, dict[str, Any]]:
    return {row["sha256"]: row for row in read_table("scanned").get("wheel", ())}


def _wheel(row: dict[str, Any]) -> WheelScan:
    contents = ScanResult(
        source=row["file"],
        libraries=tuple(_library(entry) for entry in row.get("library", ())),
        packages=(InstalledPackage(name=row["package"], version=row["version"]),),
        facts=tuple((entry[0], entry[1], entry[2]) for entry in row.get("facts", ())),
    )
    return WheelScan(
        package=row["package"],
        version=row["version"],
        file=row["file"],
        sha256=row["sha256"],
        contents=contents,
        source=row["source"],
    )


def _library(row: dict[str, Any]) -> GpuLibrary:
    return GpuLibrary(
        path=row["path"],
        size=row["size"],
        modules=tuple(_modules(text) for text in row["modules"]),
        compressions=tuple(row.get("compressions", ())),
        unread=row.get("unread", ""),
    )


def _modules(text: str) -> ModuleCount:
    """Parse `332 sm_50 compute_80/8.1`: the number of modules that have code for exactly these targets."""
    count, *codes = text.split()
    return ModuleCount(count=int(count), codes=tuple(sorted(parse_code(code) for code in codes)))


# --- Requirements to build packages from source that their own files do not declare: a table with sources


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBuild:
    """One row of source_builds.toml."""

    name: str
    code: frozenset[str]
    debian: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    architectures: tuple[tuple[str, tuple[str, ...]], ...]
    source: str

    def variables(self, capabilities: Iterable[str]) -> Mapping[str, str]:
        """Return the environment variables of the build for these compute capabilities ("8.6")."""
        variables = dict(self.environment)
        for name, values in self.architectures:
            architectures = {_architecture(capability, values) for capability in capabilities} - {""}
            if architectures:
                variables[name] = ";".join(sorted(architectures, key=int))
        return variables


def _architecture(capability: str, values: Iterable[str]) -> str:
    """Return the newest value whose code runs on a capability: same major version, and not newer."""
    major, _, minor = capability.partition(".")
    number = int(major + minor[:1])
    fits = [value for value in values if value[:-1] == major and int(value) <= number]
    return max(fits, key=int, default="")


def source_build(name: str) -> SourceBuild | None:
    """Return the row of a package by its normalized name, None if there is no row."""
    return _build_rows().get(name)


@cache
def _build_rows() -> dict[str, SourceBuild]:
    return {
        row["name"]: SourceBuild(
            name=row["name"],
            code=frozenset(row["code"]),
            debian=tuple(row.get("debian", ())),
            environment=tuple(row.get("environment", {}).items()),
            architectures=tuple((key, tuple(v)) for key, v in row.get("architectures", {}).items()),
            source=row["source"],
        )
        for row in read_table("source_builds")["package"]
    }
