"""The framework of an environment: its name, source, version and CUDA. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.extras.importers.spec import CPU_ONLY, EnvironmentSpec, minor_python
from imagefactory.gpu import knowledge
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.gpu.values import built_for
from imagefactory.recipes.edit import FRAMEWORKS
from imagefactory.recipes.values import RULES, CondaSpec, canonical, parse_spec, within
from imagefactory.versions import natural

# Packages with the version of CUDA, the most reliable first.
_CUDA_PACKAGES = (
    "pytorch-cuda",
    "cuda-version",
    "cudatoolkit",
    "cuda-toolkit",
    "cuda",
    "cuda-cudart",
    "cuda-runtime",
)
_FOR_CUDA = re.compile(r".+-cu(?:da)?([0-9]{2})[0-9x]?(?:-.*)?")
_CUDA = "VERSION (such as 12.4)"
_FIRST = ("torch", "tensorflow", "jax")
"""The frameworks that are preferred if a file lists several PyPI frameworks."""
_OTHERS = tuple(name for name in knowledge.families().values() if name not in (*_FIRST, "numba"))
_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRow:
    """The framework in the requirements of a file.

    In the docstrings of this class, "the file" is that file.
    """

    framework: str
    source: str
    spec: EnvironmentSpec

    @property
    def conda_specs(self) -> tuple[CondaSpec, ...]:
        """Return the match specs of the framework, those with a version first.

        Without any, return its name.
        """
        packages = [item for item in map(parse_spec, self.spec.conda) if item.name == self.framework]
        packages.sort(key=lambda item: not item.version)
        return tuple(packages) or (CondaSpec(name=self.framework),)

    @property
    def requirements(self) -> tuple[str, ...]:
        """Return the PyPI requirements of the framework.

        If only other packages require it, return its name.
        """
        requirements = tuple(text for text in self.spec.pip if pypi_name(text) == self.framework)
        return requirements or (self.framework,)

    @property
    def bounds(self) -> str:
        """Return the bounds of the framework in the file, empty for any version."""
        if self.source == "conda":
            return self.conda_specs[0].version
        more = (text for text in self.spec.constraints if pypi_name(text) == self.framework)
        return ",".join(filter(None, map(bounds_in, (*self.requirements, *more))))

    @property
    def version(self) -> str:
        """Return `2.3` or `2.3.1`, empty if the file does not set the version."""
        return next(filter(None, map(_release, self.bounds.split(","))), "")

    def allows(self, version: str) -> bool:
        """Return whether some release of a version or series is within the bounds in the file."""
        return version == self.version or series_within(self.bounds, version)

    def covers(self, version: str) -> bool:
        """Return whether every release of a version or series is within the bounds in the file."""
        if not self.bounds or (version == self.version and version.count(".") > 1):
            return True
        return all(within(self.bounds, release) for release in _releases(version))

    def known(self) -> tuple[str, ...]:
        """Return the versions in the table of facts that the file allows, the oldest first."""
        return tuple(version for version in self._series() if self.allows(version))

    @property
    def newest(self) -> str:
        """Return the newest version in the table of facts, without checking the file; empty for none."""
        return "".join(self._series()[-1:])

    def _series(self) -> list[str]:
        versions = {wheel.version for wheel in knowledge.cuda_wheels() if wheel.package == self.framework}
        return sorted(versions, key=natural)

    def range_with(self, cuda: str) -> str:
        """Return the bounds of the PyPI wheels for `cuda` (`12.4`, or `12` for any such release).

        Empty if no known version has it.
        """
        series = self._series()
        fitting = [
            version
            for version in series
            if self._as_offered(cuda, self.offers(version)) in self.offers(version)
            or cuda in {offer.partition(".")[0] for offer in self.offers(version)}
        ]
        if not fitting:
            return ""
        first = last = series.index(fitting[-1])
        while first and series[first - 1] in fitting:
            first -= 1
        above = f",<{series[last + 1]}" if last + 1 < len(series) else ""
        return f">={series[first]}{above}"

    def cuda(self, version: str) -> str:
        """Return the CUDA version set by other packages, the framework's build, channels or wheels; else
        "".
        """
        offers = self.offers(version)
        if self.source == "pypi" and version and len(offers) == 1:
            return offers[0]
        if named_cuda := self._named_cuda(version):
            return named_cuda
        if explicit := self.explicit_cuda():
            return self._as_offered(explicit, offers)
        below = self._as_offered(self.spec.below, offers)
        return below if not offers or below in offers else ""

    def explicit_cuda(self) -> str:
        """Return the CUDA version that the file sets: `cpu` for a build without CUDA, "" if it sets none."""
        if CPU_ONLY in self.spec.hints:
            return "cpu"
        built, beside = self._own_build(), self._cuda_of_packages()
        builds = (self.spec.builds.get(self.framework, ""), *(package.build for package in self.conda_specs))
        glued = any(re.search(r"cuda[0-9]{3}", build) for build in builds)
        if cuda := (beside or built) if glued else (built or beside):
            return cuda
        hints = self.spec.hints
        for word in (*(package.build for package in self.conda_specs), *self.spec.channels, *hints):
            if match := re.search(r"cuda-?([0-9]{2})\.([0-9])|cu(?:da)?([0-9]{2})([0-9])(?![0-9])", word):
                return f"{match[1] or match[3]}.{match[2] or match[4]}"
        return "cpu" if "/cpu" in hints and self.source == "pypi" else ""

    def _cuda_of_packages(self) -> str:
        """Return the version of packages that have the version of CUDA.

        It is more exact than a build of conda-forge: `cuda120` is built with 12.0 and runs with any 12.
        """
        packages = {package.name: package for package in map(parse_spec, self.spec.conda)}
        words = [packages[name].version for name in _CUDA_PACKAGES if name in packages]
        words += re.findall(r"(?<=nvidia-cuda-runtime-cu)[0-9]{2}(==[0-9.]+)", " ".join(self.spec.pip))
        matches = (re.match(r"(?:==|~=)?([0-9]+\.[0-9])", word) for word in words)
        return next((match[1] for match in matches if match), "")

    def cuda_in_package_name(self) -> tuple[str, str]:
        """Return a package with a CUDA major version in its name, and the version (`cupy-cuda12x`, `12`).

        Both are empty if there is no such name, or if the names differ.
        """
        names = [name for name in map(pypi_name, self.spec.pip) if name != self.framework]
        majors = {match[1]: name for name in names if (match := _FOR_CUDA.fullmatch(name))}
        return (
            next(((name, major) for major, name in majors.items()), ("", ""))
            if len(majors) == 1
            else ("", "")
        )

    def reject_rocm(self) -> None:
        """Raise UsageError if the file requires a build for AMD GPUs, for which no row is written."""
        names = (
            *self.requirements,
            self.spec.builds.get(self.framework, ""),
            *self.spec.pip,
            *self.spec.hints,
        )
        match = next(filter(None, (re.search(r"\brocm-?([0-9][0-9.]*)?", name) for name in names)), None)
        if match and self.source == "pypi":
            rocm = f" {match[1]}" if match[1] else ""
            raise UsageError(
                "rocm-not-supported",
                f"{self.spec.file} requires {self.framework} for ROCm{rocm}, which recipe import "
                "does not support",
                hint="write a row with rocm instead of cuda in the recipe (docs/platforms.md), or use CUDA: "
                "--cuda VERSION",
            )

    def _named_cuda(self, version: str) -> str:
        """Return the CUDA version in the framework's extras (`jax[cuda12_local]`) or in the name of a
        package.
        """
        if self.source != "pypi" or not version:
            return ""
        words = (*self._written_extras(), *re.findall(r"cuda[0-9]+x?$", self.framework))
        majors = set(filter(None, map(_cuda_in, words))) or set(filter(None, self.cuda_in_package_name()[1:]))
        offers = self.offers(version) or tuple(majors)
        return majors.pop() if len(majors) == 1 and majors & set(offers) else ""

    def required_cuda(self) -> str:
        """Return the CUDA version that the file sets, or else that of the extras (`jax[cuda11_cudnn86]`)."""
        majors = set(filter(None, map(_cuda_in, self._written_extras()))) if self.source == "pypi" else set()
        return self.explicit_cuda() or (majors.pop() if len(majors) == 1 else "")

    def _written_extras(self) -> set[str]:
        written = ",".join(re.findall(r"\[([^\]]*)\]", " ".join(self.requirements)))
        return {canonical(extra.strip()) for extra in written.split(",") if extra.strip()}

    def _own_build(self) -> str:
        """Return the CUDA version in the build tag or build string of the framework."""
        build = self.spec.builds.get(self.framework, "")
        if self.source == "pypi":
            match = re.match(r"cu([0-9]{2})([0-9])(?![0-9])", build)
            return f"{match[1]}.{match[2]}" if match else "cpu" if build.startswith("cpu") else ""
        builds = filter(
            None, map(built_for, (build, *(item.build.replace("*", "") for item in self.conda_specs)))
        )
        return next((cuda for cuda in builds if cuda == "cpu" or "." in cuda), "")

    def offers(self, version: str) -> tuple[str, ...]:
        """Return the CUDA versions for which PyPI has wheels of a framework version."""
        cudas = {wheel.cuda for wheel in knowledge.offered(self.framework, version)} if version else set()
        return tuple(sorted(cudas, key=natural))

    def _as_offered(self, cuda: str, offers: Sequence[str]) -> str:
        """Return the major version (`12`) if wheels on PyPI depend only on that, else `cuda`."""
        major = cuda.partition(".")[0]
        return major if self.source == "pypi" and major in offers else cuda

    def other_cuda(self, cuda: str) -> bool:
        """Return whether the file sets another CUDA version."""
        stated = self.explicit_cuda()
        return bool(stated) and self._as_offered(stated, (cuda,)) != cuda

    def other_below(self, cuda: str) -> bool:
        """Return whether the base image has another CUDA version than the framework will use."""
        return bool(self.spec.below) and self._as_offered(self.spec.below, (cuda,)) != cuda

    def other_build(self, version: str) -> str:
        """Return the problem if the file requires a CPU build, or a build that its source does not have."""
        cuda, offers = self.required_cuda(), self.offers(version)
        message = f"{self.spec.file} requires {self.framework} {version}"
        if cuda == "cpu":
            return f"{message.strip()} without CUDA"
        if self.source != "pypi" or not cuda:
            return ""
        if not version and not self.range_with(cuda) and self.known():
            return f"{message.strip()} for CUDA {cuda}, but no known build on PyPI is for it"
        if not offers or self._as_offered(cuda, offers) in offers:
            return ""
        return f"{message.strip()} for CUDA {cuda}, but PyPI has it only for CUDA {' and '.join(offers)}"

    def conda_name(self) -> str:
        """Return the name of the framework on conda channels, empty if unknown."""
        others = any(pypi == self.framework for pypi in FRAMEWORKS.values())
        return _of_source(self.framework, "conda", set()) if others else ""

    def reject_other_build(self, version: str, *, index: str = "") -> None:
        """Raise UsageError if the file requires a CPU build, or a build that its source does not have.

        `index` is the hint that names an index with that build.
        """
        if message := self.other_build(version):
            cuda, offers = self.required_cuda(), self.offers(version)
            ways = [f"use the build on PyPI: --cuda {offers[-1] if offers else _CUDA}"]
            if cuda != "cpu" and index:
                ways.append(f"use that build: {index}, and run this command again")
            if cuda != "cpu" and version and (conda := self.conda_name()):
                ways.append(
                    f"use the conda-forge build: --source conda --framework {conda}={version} --cuda {cuda}"
                )
            raise UsageError("framework-conflict", message, hint="; or ".join(ways))

    def reject_version(self, version: str) -> None:
        """Raise UsageError if the bounds in the file exclude a version, or some of its releases."""
        asks = f"{self.spec.file} asks for {self.framework}{self.bounds}"
        if not self.allows(version):
            known = " or ".join(self.known()[-_FEW:])
            allowed = f", such as {known}," if known else ""
            raise UsageError(
                "option-conflict",
                f"{asks}, but --framework sets {version}",
                hint=f"remove VERSION from --framework, or choose one{allowed} that the file allows",
            )
        if not self.covers(version):
            raise UsageError(
                "choice-required",
                f"{asks}, but some releases of {version} are outside these bounds",
                hint=f"choose one release: --framework {self.framework}={version}.N",
            )

    def extras(self, version: str, cuda: str) -> tuple[str, ...]:
        """Return the extras in the file, and those that install the CUDA libraries of the framework."""
        if self.source == "conda":
            return ()
        written_extras = self._written_extras() - {*self.other_extras(cuda)}
        for wheel in knowledge.offered(self.framework, version):
            written_extras |= {*wheel.extras} if wheel.cuda == cuda else set()
        return tuple(sorted(written_extras))

    def other_extras(self, cuda: str) -> tuple[str, ...]:
        """Return the extras in the file that are for another CUDA major version."""
        major = cuda.partition(".")[0]
        written_extras = self._written_extras() if self.source == "pypi" else set()
        return tuple(sorted(extra for extra in written_extras if _cuda_in(extra) not in ("", major)))

    def released_for(self, version: str) -> tuple[str, ...]:
        """Return the CUDA versions for which a framework version was released on any index, the newest
        first.
        """
        known = [
            row.cuda
            for row in knowledge.releases(_pypi(self.framework))
            if version and (covers(row.version, version) or covers(version, row.version))
        ]
        return tuple(dict.fromkeys(known))

    def pythons(self, version: str) -> tuple[str, ...]:
        """Return the Python versions for which a framework version was released, empty if unknown."""
        rows = (row for row in knowledge.releases(_pypi(self.framework)) if covers(row.version, version))
        return next((row.pythons for row in rows), ())

    def _some_cuda(self, version: str) -> str:
        """Return example CUDA versions for a hint."""
        known = self.released_for(version)
        return f"VERSION (such as {' or '.join(known[:_FEW])})" if known else _CUDA

    def ask(self, version: str, cuda: str) -> UsageError:
        """Return the error for a missing version or CUDA version that the solver cannot choose."""
        missing = [
            field_name for field_name, value in (("version", version), ("CUDA version", cuda)) if not value
        ]
        cuda = cuda or self._some_cuda(version)
        return UsageError(
            "choice-required",
            f"{self.spec.file} does not set the {' and the '.join(missing)} of {self.framework}",
            hint=f"set it: --framework {self.framework}={version or 'VERSION'} --cuda {cuda}",
        )


def find_framework(spec: EnvironmentSpec, named: str, source: str) -> tuple[str, str]:
    """Return the name and source of the framework, from the file and the user's choice.

    `source` may be empty.

    Raises UsageError if the file has no framework.
    """
    framework = named_framework(spec, named, source)
    if not framework[0]:
        raise UsageError(
            "framework-missing",
            f"{spec.file} has no GPU framework that the smoke test supports",
            hint="choose its main package with --framework NAME, or extend a target: --extends TARGET",
        )
    return framework


def named_framework(spec: EnvironmentSpec, named: str, source: str) -> tuple[str, str]:
    """Return the same as `find_framework`, with an empty name if there is no framework."""
    conda, pip = {parse_spec(text).name for text in spec.conda}, {pypi_name(text) for text in spec.pip}
    if named:
        if not source:
            in_pip = canonical(named) in pip and named.lower() not in conda
            source = "conda" if not in_pip and (conda or spec.channels or not pip) else "pypi"
        return _of_source(named, source, conda), source
    for name in FRAMEWORKS if source != "pypi" else ():
        if name in conda:
            return name, "conda"
    if "jax" in conda and source != "pypi":  # it brings jaxlib, which has the code for GPUs
        return "jaxlib", "conda"
    if source == "conda":
        name = next((conda for conda, pypi_framework in FRAMEWORKS.items() if pypi_framework in pip), "")
        return (_of_source(name, source, conda) if name else ""), source
    return first_framework(pip), "pypi" if pip else source


def first_framework(names: Collection[str], others: Collection[str] = ()) -> str:
    """Return the main framework of an image: one of the file's `names`, or of their dependencies `others`.

    Empty if there is none. numba counts only with numba-cuda, without which it generates code for CPUs.
    tensorflow-cpu does not count, since such a file reads data with TensorFlow and uses the GPU with another
    framework. The same applies to TensorFlow in a file with the CUDA plugin of JAX.
    """
    if any(re.fullmatch(r"jax-cuda[0-9]+-plugin", name) for name in names):
        names = {*names, "jax"} - {"tensorflow"}
    if "tensorflow-cpu" in names and {*_FIRST}.intersection(others) - {"tensorflow"}:
        others = {*others} - {"tensorflow"}
    for some, ranked in ((names, _FIRST), (others, _FIRST), (names, _OTHERS), (others, _OTHERS)):
        if framework := next((name for name in ranked if name in some), ""):
            return framework
    return "numba" if "numba-cuda" in {*names, *others} else ""


def _of_source(named: str, source: str, conda: set[str]) -> str:
    """Return the name of a framework in its source: torch on PyPI is pytorch on conda."""
    if source == "pypi":
        known = FRAMEWORKS.get(named.lower(), "")
        return known or canonical(named)
    others = [
        name
        for name, pypi_framework in FRAMEWORKS.items()
        if pypi_framework == canonical(named) and name in conda
    ]
    usual = {"torch": "pytorch", "jax": "jaxlib"}.get(canonical(named), named.lower())
    return named.lower() if named.lower() in conda and usual != "jaxlib" else next(iter(others), usual)


def _cuda_in(word: str) -> str:
    """Return the CUDA major version in an extra or at the end of a name, empty if there is none."""
    match = re.match(r"cu(?:da)?-?([0-9]{2})(?![0-9])", word)
    return match[1] if match else ""


def _pypi(framework: str) -> str:
    """Return the name of a framework on PyPI."""
    return FRAMEWORKS.get(framework, framework)


def pypi_name(requirement: str) -> str:
    """Return the distribution of a requirement."""
    return canonical(re.split(r"[ \[<>=!~]", requirement, maxsplit=1)[0])


def exact_pins(requirements: Iterable[str]) -> dict[str, str]:
    """Return the releases of requirements with an exact version (`demo==1.2.3`), by name."""
    pins = ((pypi_name(text), re.fullmatch(r"===?([0-9][^*,]*)", bounds_in(text))) for text in requirements)
    return {name: match[1] for name, match in pins if match}


def fits_python(python: str, bounds: str) -> bool:
    """Return whether some patch version of a Python version is within conda bounds."""
    if not bounds or minor_python(bounds):
        return minor_python(bounds) in ("", python)
    return within(bounds, f"{python}.5")


def bounds_in(requirement: str) -> str:
    """Return the bounds of a PyPI requirement, empty for none."""
    return re.sub(r"^[^\[<>=!~]*(\[[^\]]*\])?", "", requirement)


def series_within(bounds: str, version: str) -> bool:
    """Return whether bounds allow some release of a version or series (`2.3`)."""
    return not bounds or any(within(bounds, release) for release in _releases(version))


def _releases(version: str) -> tuple[str, ...]:
    """Return a release unchanged, or possible releases of a series."""
    return (version,) if version.count(".") > 1 else tuple(f"{version}.{n}" for n in (*range(10), 99))


def _release(bounds: str) -> str:
    """Return the version of an exact requirement for a recipe row, empty for a range and a pre-release.

    A row with `2.3` means any release of that series, but `==2.3` means only 2.3.0.
    """
    match = re.fullmatch(r"(==)?([0-9]+(?:\.[0-9]+){1,3})(\.\*|[._]?post.*)?", bounds)
    if not match or not RULES["version"].allows(match[2]):
        return ""
    return f"{match[2]}.0" if match[1] and not match[3] and match[2].count(".") == 1 else match[2]
