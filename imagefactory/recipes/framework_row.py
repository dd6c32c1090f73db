"""What an environment says of its framework: which one, from where, which version, for which CUDA. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from imagefactory.errors import UsageError
from imagefactory.gpu import knowledge
from imagefactory.gpu.builds import built_for
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.model import Target
from imagefactory.recipes.match_spec import Spec, parse_spec
from imagefactory.recipes.values import RULES, canonical
from imagefactory.recipes.wish import CPU_ONLY, Wish, minor_python
from imagefactory.versions import natural

# A framework's name on conda's channels -> on PyPI. The first that a file names is its framework.
FRAMEWORKS = {
    "pytorch-gpu": "torch",
    "pytorch": "torch",
    "tensorflow-gpu": "tensorflow",
    "tensorflow": "tensorflow",
    "jaxlib": "jax",
}
# Packages whose version is that of CUDA, the surest first.
_CUDA_PACKAGES = (
    "pytorch-cuda",
    "cuda-version",
    "cudatoolkit",
    "cuda-toolkit",
    "cuda",
    "cuda-cudart",
    "cuda-runtime",
)
_CUDA = "VERSION (such as 12.4)"
_FIRST = ("torch", "tensorflow", "jax")
"""Frameworks that an image is for where a file names others of PyPI too."""
_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The framework in what a file asks for."""

    framework: str
    source: str
    wish: Wish

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its match specs among conda's packages, those with a version first; a bare one if there is none."""
        found = [spec for spec in map(parse_spec, self.wish.conda) if spec.name == self.framework]
        return tuple(sorted(found, key=lambda spec: not spec.version)) or (Spec(name=self.framework),)

    @property
    def requirement(self) -> str:
        """Its requirement among PyPI's."""
        return next((text for text in self.wish.pip if pypi_name(text) == self.framework), self.framework)

    @property
    def bounds(self) -> str:
        """Its bounds as the file has them, empty for any version."""
        if self.source == "conda":
            return self.specs[0].version
        more = (one for one in self.wish.constraints if pypi_name(one) == self.framework)
        lines = (self.requirement, *more)
        return ",".join(filter(None, (re.sub(r"^[^\[<>=!~]*(\[[^\]]*\])?", "", one) for one in lines)))

    @property
    def version(self) -> str:
        """`2.3` or `2.3.1`; empty where the file leaves it open."""
        return next(filter(None, map(_release, self.bounds.split(","))), "")

    def cuda(self, version: str) -> str:
        """The CUDA that packages beside it, its build, its channels or its wheels tell; empty for none."""
        offers = self.offers(version)
        if self.source == "pypi" and version and len(offers) == 1:
            return offers[0]
        if told := self.told_cuda():
            return self._as_offered(told, offers)
        below = self._as_offered(self.wish.below, offers)
        return below if not offers or below in offers else ""

    def told_cuda(self) -> str:
        """What the file says itself: `cpu` for a build without CUDA, empty where it says nothing."""
        if CPU_ONLY in self.wish.hints:
            return "cpu"
        built, beside = self._own_build(), self._cuda_beside()
        builds = (self.wish.builds.get(self.framework, ""), *(spec.build for spec in self.specs))
        glued = any(re.search(r"cuda[0-9]{3}", build) for build in builds)
        if told := (beside or built) if glued else (built or beside):
            return told
        hints = self.wish.hints
        for word in (*(spec.build for spec in self.specs), *self.wish.channels, *hints):
            if found := re.search(r"cuda-?([0-9]{2})\.([0-9])|cu(?:da)?([0-9]{2})([0-9])(?![0-9])", word):
                return f"{found[1] or found[3]}.{found[2] or found[4]}"
        return "cpu" if "/cpu" in hints and self.source == "pypi" else ""

    def _cuda_beside(self) -> str:
        """What packages say whose version is that of CUDA.

        They say it better than a build of conda-forge, `cuda120`: it is made with 12.0 and runs with any 12.
        """
        specs = {spec.name: spec for spec in map(parse_spec, self.wish.conda)}
        words = [specs[name].version for name in _CUDA_PACKAGES if name in specs]
        words += re.findall(r"(?<=nvidia-cuda-runtime-cu)[0-9]{2}(==[0-9.]+)", " ".join(self.wish.pip))
        found = (re.match(r"(?:==|~=)?([0-9]+\.[0-9])", word) for word in words)
        return next((one[1] for one in found if one), "")

    def refuse_rocm(self) -> None:
        """Raises UsageError where the file means a build for AMD's GPUs: no row is written for those."""
        names = (self.requirement, self.wish.builds.get(self.framework, ""), *self.wish.pip, *self.wish.hints)
        found = next(filter(None, (re.search(r"\brocm-?([0-9][0-9.]*)?", name) for name in names)), None)
        if found and self.source == "pypi":
            rocm = f" {found[1]}" if found[1] else ""
            raise UsageError(
                f"{self.wish.file} means a build of {self.framework} for ROCm{rocm}",
                hint="write its row by hand, with rocm in place of cuda (docs/recipes.md), or take another: "
                "--cuda VERSION",
            )

    def _own_build(self) -> str:
        """What its own build tag or build string says."""
        build = self.wish.builds.get(self.framework, "")
        if self.source == "pypi":
            found = re.match(r"cu([0-9]{2})([0-9])(?![0-9])", build)
            return f"{found[1]}.{found[2]}" if found else "cpu" if build.startswith("cpu") else ""
        builds = filter(None, map(built_for, (build, *(spec.build.replace("*", "") for spec in self.specs))))
        return next((told for told in builds if told == "cpu" or "." in told), "")

    def offers(self, version: str) -> tuple[str, ...]:
        """The CUDA versions that PyPI offers its version with."""
        found = {wheel.cuda for wheel in knowledge.offered(self.framework, version)} if version else set()
        return tuple(sorted(found, key=natural))

    def _as_offered(self, cuda: str, offers: Sequence[str]) -> str:
        """`12` where PyPI's wheels bind only the major version."""
        major = cuda.partition(".")[0]
        return major if self.source == "pypi" and major in offers else cuda

    def other_cuda(self, cuda: str) -> bool:
        """Whether the file means another CUDA."""
        told = self.told_cuda()
        return bool(told) and self._as_offered(told, (cuda,)) != cuda

    def other_below(self, cuda: str) -> bool:
        """Whether the image below has another CUDA than the framework will."""
        return bool(self.wish.below) and self._as_offered(self.wish.below, (cuda,)) != cuda

    def refuse_other_build(self, version: str, targets: Sequence[Target], *, index: str = "") -> None:
        """Raises UsageError where the file means a build for the CPU, or one that its source has not.

        `index` is how to name another index that has it.
        """
        told, offers = self.told_cuda(), self.offers(version)
        what = f"{self.framework} {version}".strip()
        if told == "cpu":
            raise UsageError(
                f"{self.wish.file} means a build of {what} without CUDA",
                hint=f"say which CUDA the image shall have: --cuda {offers[-1] if offers else _CUDA}",
            )
        if self.source != "pypi" or not told or not offers or self._as_offered(told, offers) in offers:
            return
        others = [conda for conda, pypi in FRAMEWORKS.items() if pypi == self.framework]
        named = [one for one in targets if one.framework in (self.framework, *others) and one.cuda == told]
        ways = [
            f"take PyPI's: --cuda {offers[-1]}",
            *(f"build on it: --on {one.name}" for one in named[:_FEW]),
        ]
        if index:
            ways.append(f"take that build: {index}, and run this command again")
        if others:
            conda = _of_source(self.framework, "conda", set())
            ways.append(f"ask conda-forge: --source conda --framework {conda}={version} --cuda {told}")
        raise UsageError(
            f"{self.wish.file} means {what} for CUDA {told}, and PyPI has it for CUDA {' and '.join(offers)}",
            hint="; or ".join(ways),
        )

    def extras(self, version: str, cuda: str) -> tuple[str, ...]:
        """Its own extras, and those without which its CUDA libraries do not come."""
        if self.source == "conda":
            return ()
        written = re.findall(r"\[([^\]]*)\]", self.requirement)
        own = {canonical(extra.strip()) for extra in (written[0].split(",") if written else ())}
        for wheel in knowledge.offered(self.framework, version):
            own |= {*wheel.extras} if wheel.cuda == cuda else set()
        return tuple(sorted(own))

    def fitting(self, targets: Sequence[Target], cuda: str) -> tuple[Target, ...]:
        """The targets that have what the file asks for, the newest version first."""
        found = [
            one
            for one in targets
            if (_pypi(one.framework), one.source) == (_pypi(self.framework), self.source)
            and not one.on
            and cuda in ("", one.cuda, one.cuda.partition(".")[0])
            and _allows(self.bounds, one.version)
            and fits_python(one.python, self.wish.python)
        ]
        return tuple(sorted(found, key=lambda one: natural(one.version), reverse=True))

    def _some_cuda(self, version: str) -> str:
        """The CUDA versions that a version was released for, as an example for a person."""
        known = [
            one.cuda
            for one in knowledge.releases(_pypi(self.framework))
            if version and (covers(one.version, version) or covers(version, one.version))
        ]
        return f"VERSION (such as {' or '.join(dict.fromkeys(known[:_FEW]))})" if known else _CUDA

    def ask(self, version: str, cuda: str, targets: Sequence[Target]) -> UsageError:
        """What to say where the file leaves the version or the CUDA open."""
        missing = [what for what, found in (("version", version), ("CUDA", cuda)) if not found]
        said = cuda or self._some_cuda(version)
        hint = f"say it: --framework {self.framework}={version or 'VERSION'} --cuda {said}"
        if fitting := [f"--on {one.name}" for one in self.fitting(targets, cuda)[:_FEW]]:
            hint += f"; or build on a target that fits: {' or '.join(fitting)}"
        return UsageError(
            f"{self.wish.file} does not say which {' and which '.join(missing)} of {self.framework} it means",
            hint=hint,
        )


def find_framework(wish: Wish, named: str, source: str) -> tuple[str, str]:
    """The framework's name and its source, by the file and by what the person says; `source` may be empty."""
    conda, pip = {parse_spec(text).name for text in wish.conda}, {pypi_name(text) for text in wish.pip}
    if named:
        if not source:
            in_pip = canonical(named) in pip and named.lower() not in conda
            source = "conda" if not in_pip and (conda or wish.channels or not pip) else "pypi"
        return _of_source(named, source, conda), source
    for name in FRAMEWORKS if source != "pypi" else ():
        if name in conda:
            return name, "conda"
    if "jax" in conda and source != "pypi":  # it brings jaxlib, which has the code for GPUs
        return "jaxlib", "conda"
    others = (name for name in knowledge.families().values() if name not in _FIRST)
    for name in (*_FIRST, *others) if source != "conda" else ():
        if name in pip:
            return name, "pypi"
    if source == "conda" and (name := next((conda for conda, own in FRAMEWORKS.items() if own in pip), "")):
        return _of_source(name, source, conda), source
    raise UsageError(
        f"{wish.file} names no framework that the smoke test knows",
        hint="say which of its packages the image is for: --framework NAME, or build it --on TARGET",
    )


def _of_source(named: str, source: str, conda: set[str]) -> str:
    """A framework's name where it comes from: PyPI's torch is conda's pytorch."""
    if source == "pypi":
        known = FRAMEWORKS.get(named.lower(), "")
        return known or canonical(named)
    others = [name for name, own in FRAMEWORKS.items() if own == canonical(named) and name in conda]
    usual = {"torch": "pytorch", "jax": "jaxlib"}.get(canonical(named), named.lower())
    return named.lower() if named.lower() in conda and usual != "jaxlib" else next(iter(others), usual)


def _pypi(framework: str) -> str:
    """A framework's name on PyPI."""
    return FRAMEWORKS.get(framework, framework)


def pypi_name(requirement: str) -> str:
    """The distribution that a requirement names."""
    return canonical(re.split(r"[ \[<>=!~]", requirement, maxsplit=1)[0])


def fits_python(python: str, bounds: str) -> bool:
    """Whether some patch version of a Python is within conda's bounds."""
    if not bounds or minor_python(bounds):
        return minor_python(bounds) in ("", python)
    return _within(bounds, (f"{python}.5",))


def _allows(bounds: str, version: str) -> bool:
    """Whether some release of a series is within bounds."""
    releases = (version,) if version.count(".") > 1 else (f"{version}.0", f"{version}.1", f"{version}.99")
    return not bounds or _within(bounds, releases)


def _within(bounds: str, releases: Sequence[str]) -> bool:
    try:
        parts = (part if not part[:1].isdigit() else f"=={part}" for part in bounds.split(","))
        allowed = SpecifierSet(",".join(parts))
    except InvalidSpecifier:
        return False
    return any(allowed.contains(one) for one in releases)


def _release(bounds: str) -> str:
    """The version that one pin names, as a recipe's row writes it; empty for a range."""
    found = re.fullmatch(r"(?:==)?([0-9]+(?:\.[0-9]+){1,3})(?:\.\*|[._]?[a-z].*)?", bounds)
    return found[1] if found and RULES["version"].allows(found[1]) else ""
