"""Where a place differs from what its framework's project documents, and from itself.

Neither side is taken for the truth: a page may mean another build, a scan sees no code that is made later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from imagefactory.gpu.capability import Capability, CodeKind
from imagefactory.gpu.frameworks import (
    Framework,
    Role,
    conda_builds,
    cuda_of,
    find_framework,
    find_package,
    role_of,
)
from imagefactory.gpu.knowledge.documents import Documented, documented
from imagefactory.gpu.knowledge.gpus import capabilities
from imagefactory.gpu.values import Answer, Contents, Library, Prediction, Reach
from imagefactory.gpu.predict import predict_code, runs

_GOOD = (Answer.YES, Answer.PTX)
# Build strings of the pytorch channel begin with the Python, those of conda-forge with the CUDA.
_PYTORCH_CHANNEL = re.compile(r"py[0-9.]+_cuda")
_CONDA_FORGE = {
    "torch": "conda-forge::pytorch",
    "tensorflow": "conda-forge::tensorflow",
    "jax": "conda-forge::jaxlib",
}


def contradictions(contents: Contents) -> tuple[str, ...]:
    """One line for each, those about GPUs first. Empty where nothing is documented or all agrees."""
    framework = find_framework(contents)
    if framework is None:
        return ()
    cuda = cuda_of(contents)
    named = _named(contents, framework)
    row = documented(*named, cuda) if named and cuda else None
    return (*(_of_documents(contents, framework, row) if row else ()), *_of_runtimes(contents, cuda))


def _named(contents: Contents, framework: Framework) -> tuple[str, str] | None:
    """Under which name and version documents speak of this build, None for builds of which none does."""
    for one, told in conda_builds(contents, framework):
        if _PYTORCH_CHANNEL.match(one.build):
            return "pytorch::pytorch", one.version
        if told != "cpu":
            known = _CONDA_FORGE.get(framework.name) if one.build.startswith("cuda") else None
            return (known, one.version) if known else None
    package = find_package(contents, framework)
    if package is None or package.build:
        return None
    return framework.name, package.version.partition("+")[0]


def _of_documents(contents: Contents, framework: Framework, row: Documented) -> list[str]:
    gates = [one for one in contents.libraries if role_of(one.path, framework)[0] is Role.GATES]
    if not gates:
        return []
    less: dict[str, list[Prediction]] = {}
    more = []
    for capability in capabilities():
        said, found = documented_answer(row, capability), predict_code(contents, capability)
        if said in _GOOD and found.answer in (Answer.NO, Answer.PARTLY):
            less.setdefault(found.reason.replace(f" {capability}", ""), []).append(found)
        elif said is Answer.NO and found.answer in _GOOD:
            more.append(found)
    lines = [f"{_listed(some)}: documented ({_page(row)}); found: {some[0].reason}" for some in less.values()]
    if more:
        lines.append(f"{_listed(more)}: not documented ({_page(row)}); found: {more[0].reason}")
    if missing := missing_ptx(row, gates):
        lines.append(f"newer GPUs: PTX is documented ({_page(row)}); found: {missing}")
    return lines


def _of_runtimes(contents: Contents, cuda: str) -> list[str]:
    """A runtime of another major than the framework was built for is not the one that it loads."""
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


def documented_answer(row: Documented, capability: Capability) -> Answer:
    """What a project's own list of targets means for a capability, by the rules of rules.py."""
    if row.minimum and capability < row.minimum:
        return Answer.NO
    ways = {runs(code, capability) for code in row.codes}
    if Reach.NATIVE in ways:
        return Answer.YES
    return Answer.PTX if Reach.PTX in ways else Answer.NO


def missing_ptx(row: Documented, gates: Sequence[Library]) -> str:
    """Which documented PTX no library that must load has, as a sentence; empty where all is there."""
    codes = {code for library in gates for modules in library.modules for code in modules.codes}
    there = {code.architecture for code in codes if code.kind is CodeKind.PTX}
    missing = [code for code in row.codes if code.kind is CodeKind.PTX and code.architecture not in there]
    if not missing or not gates:
        return ""
    names = ", ".join(sorted(library.path.rpartition("/")[2] for library in gates))
    older = " ".join(sorted({str(code) for code in codes if code.kind is CodeKind.PTX}))
    rest = f"its PTX is {older}" if older else "GPUs newer than its machine code have nothing to run"
    return f"{missing[-1]} is not in {names}: {rest}"


def _listed(some: list[Prediction]) -> str:
    return ", ".join(str(one.capability) for one in some)


def _page(row: Documented) -> str:
    return row.source.removeprefix("documented: ")
