"""Where what projects document and what their wheels were found to hold differ.

Both are reduced to one question, whether there is code for a capability, by the rules of predict.py. A
difference is no verdict: a scan sees no kernels that are made at run time, and a page may mean another build.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.contradictions import documented_answer, missing_ptx
from imagefactory.gpu.frameworks import Role, cuda_of, find_framework, find_package, role_of
from imagefactory.gpu.knowledge.documents import documented
from imagefactory.gpu.knowledge.gpus import capabilities
from imagefactory.gpu.knowledge.scans import ScannedWheel, scanned_for_amd64
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.gpu.values import Answer, Contents
from imagefactory.gpu.predict import predict_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Capabilities of which a project says something else of one build than the scan of its wheels.

    `documented` is yes, through PTX or no; `found` the scan's answer and `reason` its account, of the first
    of `capabilities`. These are empty where PTX is documented for GPUs to come, and there is none. `wheels`
    are the scanned files.
    """

    framework: str
    version: str
    cuda: str
    capabilities: tuple[Capability, ...]
    documented: Answer
    found: Answer
    reason: str
    wheels: tuple[str, ...]
    documented_source: str
    scanned_source: str


def find_differences() -> tuple[Difference, ...]:
    """All differences: first what is documented and not there; by framework, the newest version first."""
    found = [one for wheels in builds(scanned_for_amd64()) for one in _of_build(wheels)]
    return tuple(sorted(found, key=_order))


def _order(one: Difference) -> tuple[bool, str, list[int], str]:
    return one.documented is Answer.NO, one.framework, [-n for n in numbers(one.version)], one.cuda


def builds(wheels: Iterable[ScannedWheel]) -> Iterator[tuple[ScannedWheel, ...]]:
    """The wheels of one build of a framework for one Python, together: a plugin with its runtime.

    Of builds that differ in Python alone, which hold the same GPU code, the first by file name speaks.
    """
    groups: dict[tuple[str, str, str], list[ScannedWheel]] = {}
    for wheel in sorted(wheels, key=lambda one: one.file):
        part = groups.setdefault((*_family(wheel.package), wheel.version), [])
        if all(wheel.package != other.package for other in part):
            part.append(wheel)
    yield from map(tuple, groups.values())


def _family(package: str) -> tuple[str, str]:
    """`jax-cuda12-plugin` and `jax-cuda12-pjrt` are one build of `jax`, apart from that for CUDA 13."""
    if package.startswith("jax-cuda"):
        return "jax", package.split("-")[1].removeprefix("cuda")
    return package, ""


def _of_build(wheels: tuple[ScannedWheel, ...]) -> Iterator[Difference]:
    contents = together(wheels)
    framework = find_framework(contents)
    if framework is None or not contents.libraries:
        return
    package = find_package(contents, framework)
    version = package.version if package else wheels[0].version
    row = documented(framework.name, version, cuda_of(contents))
    if row is None:
        return

    def difference(
        said: Answer, answer: Answer, cases: list[tuple[Capability, str]], reason: str
    ) -> Difference:
        return Difference(
            framework=framework.name,
            version=version,
            cuda=row.cuda,
            capabilities=tuple(capability for capability, _ in cases),
            documented=said,
            found=answer,
            reason=reason,
            wheels=tuple(wheel.file for wheel in wheels),
            documented_source=row.source,
            scanned_source=wheels[0].source,
        )

    alike: dict[tuple[Answer, Answer], list[tuple[Capability, str]]] = {}
    for capability in capabilities():
        said, prediction = documented_answer(row, capability), predict_code(contents, capability)
        if prediction.answer is not said:
            alike.setdefault((said, prediction.answer), []).append((capability, prediction.reason))
    for (said, answer), cases in alike.items():
        yield difference(said, answer, cases, cases[0][1])
    gates = [one for one in contents.libraries if role_of(one.path, framework)[0] is Role.GATES]
    if missing := missing_ptx(row, gates):
        yield difference(Answer.PTX, Answer.NO, [], missing)


def together(wheels: tuple[ScannedWheel, ...]) -> Contents:
    """What several wheels hold, as one place."""
    parts = [wheel.contents for wheel in wheels]
    libraries = sorted((one for part in parts for one in part.libraries), key=lambda one: one.path)
    return replace(
        parts[0],
        libraries=tuple(libraries),
        packages=tuple(package for part in parts for package in part.packages),
        facts=tuple(fact for part in parts for fact in part.facts),
    )
