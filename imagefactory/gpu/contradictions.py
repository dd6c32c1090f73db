"""Find differences between a scan, the documentation of the framework, and the metadata of the scanned
packages.

Either source may be wrong: a page may describe another build, and a scan cannot see code that is compiled
later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from imagefactory.gpu.capability import Capability, CodeKind
from imagefactory.gpu.frameworks import (
    Framework,
    conda_builds,
    cuda_of,
    find_framework,
    find_package,
    gates_of,
)
from imagefactory.gpu.knowledge.gpus import capabilities
from imagefactory.gpu.knowledge.packages import DocumentedSupport, WheelScan, documented, scanned_for
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.gpu.predict import predict_code, runs
from imagefactory.gpu.values import Compatibility, GpuLibrary, Prediction, ScanResult, SupportLevel

_GOOD = (Compatibility.YES, Compatibility.PTX)
# Build strings of the pytorch channel begin with the Python, those of conda-forge with the CUDA.
_PYTORCH_CHANNEL = re.compile(r"py[0-9.]+_cuda")
_CONDA_FORGE = {
    "torch": "conda-forge::pytorch",
    "tensorflow": "conda-forge::tensorflow",
    "jax": "conda-forge::jaxlib",
}


def contradictions(contents: ScanResult) -> tuple[str, ...]:
    """Return a line for each difference, those about GPUs first.

    Empty if there is none or nothing is documented.
    """
    framework = find_framework(contents)
    if framework is None:
        return ()
    cuda = cuda_of(contents)
    named = _named(contents, framework)
    row = documented(*named, cuda) if named and cuda else None
    return (*(_of_documents(contents, framework, row) if row else ()), *_of_runtimes(contents, cuda))


def _named(contents: ScanResult, framework: Framework) -> tuple[str, str] | None:
    """Return the name and version under which this build is documented, None if it is not documented."""
    for build, cuda in conda_builds(contents, framework):
        if _PYTORCH_CHANNEL.match(build.build):
            return "pytorch::pytorch", build.version
        if cuda != "cpu":
            known = _CONDA_FORGE.get(framework.name) if build.build.startswith("cuda") else None
            return (known, build.version) if known else None
    package = find_package(contents, framework)
    if package is None or package.build:
        return None
    return framework.name, package.version.partition("+")[0]


def _of_documents(contents: ScanResult, framework: Framework, row: DocumentedSupport) -> list[str]:
    gates = gates_of(contents, framework)
    if not gates:
        return []
    less: dict[str, list[Prediction]] = {}
    more = []
    for capability in capabilities():
        documented, prediction = documented_answer(row, capability), predict_code(contents, capability)
        if documented in _GOOD and prediction.answer in (Compatibility.NO, Compatibility.PARTLY):
            less.setdefault(prediction.reason.replace(f" {capability}", ""), []).append(prediction)
        elif documented is Compatibility.NO and prediction.answer in _GOOD:
            more.append(prediction)
    page = row.source.removeprefix("documented: ")

    def line(predictions: list[Prediction], word: str) -> str:
        names = ", ".join(str(prediction.capability) for prediction in predictions)
        return f"{names}: {word} ({page}); found: {predictions[0].reason}"

    lines = [line(predictions, "documented") for predictions in less.values()]
    if more:
        lines.append(line(more, "not documented"))
    if missing := missing_ptx(row, gates):
        lines.append(f"newer GPUs: PTX is documented ({page}); found: {missing}")
    return lines


def _of_runtimes(contents: ScanResult, cuda: str) -> list[str]:
    """Return a line if the CUDA runtime has another major version than the framework."""
    runtimes = [
        package
        for package in contents.packages
        if package.name.startswith("nvidia-cuda-runtime") or package.name == "cuda-cudart"
    ]
    majors = {package.version.partition(".")[0] for package in runtimes}
    if not cuda or not majors or cuda.partition(".")[0] in majors:
        return []
    names = ", ".join(f"{package.name} {package.version}" for package in runtimes)
    return [f"the framework is built for CUDA {cuda}, but what is installed is {names}"]


def documented_answer(row: DocumentedSupport, capability: Capability) -> Compatibility:
    """Return the meaning of a project's list of targets for a capability, by the rules of predict.py."""
    if row.minimum and capability < row.minimum:
        return Compatibility.NO
    ways = {runs(code, capability) for code in row.codes}
    if SupportLevel.NATIVE in ways:
        return Compatibility.YES
    return Compatibility.PTX if SupportLevel.PTX in ways else Compatibility.NO


def missing_ptx(row: DocumentedSupport, gates: Sequence[GpuLibrary]) -> str:
    """Return a sentence about documented PTX that required libraries do not have, empty if none is
    missing.
    """
    codes = {code for library in gates for modules in library.modules for code in modules.codes}
    there = {code.architecture for code in codes if code.kind is CodeKind.PTX}
    missing = [code for code in row.codes if code.kind is CodeKind.PTX and code.architecture not in there]
    if not missing or not gates:
        return ""
    names = ", ".join(sorted(library.path.rpartition("/")[2] for library in gates))
    older = " ".join(sorted({str(code) for code in codes if code.kind is CodeKind.PTX}))
    rest = f"its PTX is {older}" if older else "GPUs newer than its machine code have nothing to run"
    return f"{missing[-1]} is not in {names}: {rest}"


# --- Differences between what projects document and the scans of their wheels
# Both answer one question: is there code for a capability, by the rules of predict.py? A difference is not a
# verdict: a scan sees no kernels that are compiled at run time, and a page may mean another build.


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityDifference:
    """Capabilities for which the documentation of a project differs from the scan of its wheels.

    `documented` is the documented answer (yes, through PTX, or no). `found` and `reason` are the scan's
    answer for the first of `capabilities`; they are empty if PTX for future GPUs is documented but missing.
    `wheels` are the names of the scanned files.
    """

    framework: str
    version: str
    cuda: str
    capabilities: tuple[Capability, ...]
    documented: Compatibility
    found: Compatibility
    reason: str
    wheels: tuple[str, ...]
    documented_source: str
    scanned_source: str


def find_differences() -> tuple[CapabilityDifference, ...]:
    """Return all differences: documented but missing code first, then by framework, the newest version
    first.
    """

    def order(difference: CapabilityDifference) -> tuple[bool, str, list[int], str]:
        newest = [-n for n in numbers(difference.version)]
        return difference.documented is Compatibility.NO, difference.framework, newest, difference.cuda

    differences = [difference for wheels in builds(scanned_for("amd64")) for difference in _of_build(wheels)]
    return tuple(sorted(differences, key=order))


def builds(wheels: Iterable[WheelScan]) -> Iterator[tuple[WheelScan, ...]]:
    """Yield the wheels of each build of a framework for one Python, such as a plugin with its runtime.

    Builds that differ only in Python have equal GPU code, so only the first one by file name is used.
    """
    groups: dict[tuple[str, str, str], list[WheelScan]] = {}
    for wheel in sorted(wheels, key=lambda wheel: wheel.file):
        part = groups.setdefault((*_family(wheel.package), wheel.version), [])
        if all(wheel.package != other.package for other in part):
            part.append(wheel)
    yield from map(tuple, groups.values())


def _family(package: str) -> tuple[str, str]:
    """Return the framework and its build: `jax-cuda12-plugin` and `jax-cuda12-pjrt` are one build of
    `jax`.
    """
    if package.startswith("jax-cuda"):
        return "jax", package.split("-")[1].removeprefix("cuda")
    return package, ""


def _of_build(wheels: tuple[WheelScan, ...]) -> Iterator[CapabilityDifference]:
    contents = merge_contents(wheels)
    framework = find_framework(contents)
    if framework is None or not contents.libraries:
        return
    package = find_package(contents, framework)
    version = package.version if package else wheels[0].version
    row = documented(framework.name, version, cuda_of(contents))
    if row is None:
        return

    def difference(
        claimed: Compatibility, answer: Compatibility, cases: list[tuple[Capability, str]], reason: str
    ) -> CapabilityDifference:
        return CapabilityDifference(
            framework=framework.name,
            version=version,
            cuda=row.cuda,
            capabilities=tuple(capability for capability, _ in cases),
            documented=claimed,
            found=answer,
            reason=reason,
            wheels=tuple(wheel.file for wheel in wheels),
            documented_source=row.source,
            scanned_source=wheels[0].source,
        )

    alike: dict[tuple[Compatibility, Compatibility], list[tuple[Capability, str]]] = {}
    for capability in capabilities():
        claimed, prediction = documented_answer(row, capability), predict_code(contents, capability)
        if prediction.answer is not claimed:
            alike.setdefault((claimed, prediction.answer), []).append((capability, prediction.reason))
    for (claimed, answer), cases in alike.items():
        yield difference(claimed, answer, cases, cases[0][1])
    if missing := missing_ptx(row, gates_of(contents, framework)):
        yield difference(Compatibility.PTX, Compatibility.NO, [], missing)


def merge_contents(wheels: tuple[WheelScan, ...]) -> ScanResult:
    """Merge the contents of several wheels, as if they were installed together."""
    parts = [wheel.contents for wheel in wheels]
    libraries = sorted(
        (library for part in parts for library in part.libraries), key=lambda library: library.path
    )
    return replace(
        parts[0],
        libraries=tuple(libraries),
        packages=tuple(package for part in parts for package in part.packages),
        facts=tuple(fact for part in parts for fact in part.facts),
    )
