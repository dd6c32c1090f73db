"""Tables of cells: framework versions on GPUs, and the fewest images for all of them. No I/O."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from packaging.utils import canonicalize_name

from imagefactory.errors import UnknownAnswerError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.cells import NOTHING, CellEvidence, answer_cell, cell_query
from imagefactory.gpu.drivers import driver_fix
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.gpu.knowledge.toolkits import forward_names
from imagefactory.gpu.predict import INTEGRATED
from imagefactory.gpu.values import (
    Cell,
    CellClaim,
    CellQuery,
    ClaimBasis,
    Compatibility,
    ScanResult,
    minor_version,
    platform_of,
    rocm_of,
)
from imagefactory.model import Lock, Target
from imagefactory.trust.claims import verified_claims
from imagefactory.trust.verdict import VerificationResult
from imagefactory.versions import natural

ANY = Capability(0, 0)
"""The placeholder in a candidate's query before a GPU is chosen."""
OLDEST = Capability(5, 0)
"""The first column of a table. No framework in the tables is built for older GPUs."""
RUNS = (Compatibility.YES, Compatibility.PTX)
"""The answers for code that runs completely."""
_PADDLE = re.compile(
    r"\.post(1[0-2][0-9])$"
)  # PaddlePaddle before 3.0 has no "+cu": 2.2.2.post112 is for 11.2
_RELEASE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9]+(?:\.[0-9]+)*(?:\.post[0-9]+)?)"
    r"(?:\+(?:cu([0-9]{2,3})|(rocm[0-9.]+)))?"
)
_NOT = 3
Grade = tuple[int, int]
"""The quality of an image on a GPU, lower is better: 1 for PTX, then the uncertainty (`_DOUBT`)."""
_DOUBT = {ClaimBasis.VERIFIED: 0, ClaimBasis.PREDICTED: 1, ClaimBasis.DOCUMENTED: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverCandidate:
    """A framework version with a CUDA version: a target of the recipes, or a release without a recipe.

    `name` is the target's, empty for a release. One candidate of a `group` is enough: the family of a
    target, else the framework. `question` has no capability and driver yet. `lock` is the state of the
    target's lock: unless it is `ok`, only the recipe's versions are known. `verdicts` are those on its
    image. `requested` is the version of the request, if the candidate is its newest patch.
    """

    name: str
    group: str
    question: CellQuery
    evidence: CellEvidence = NOTHING
    lock: str = ""
    verdicts: tuple[VerificationResult, ...] = ()
    requested: str = ""

    @property
    def title(self) -> str:
        question = self.question
        made_for = platform_of(question.cuda) if question.cuda else "CUDA not known"
        return self.name or f"{question.framework} {question.version}, {made_for}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatGpu:
    """A GPU in a query. `driver` is empty for any, `count` is the number of such GPUs.

    `host` is the architecture of its machine's processor, empty for any.
    """

    name: str
    capability: Capability
    driver: str = ""
    count: int = 1
    host: str = ""

    @property
    def title(self) -> str:
        name = "" if self.name == str(self.capability) else f"{self.name}, "
        kind = "processor" if self.capability.processor else "compute capability"
        host = f", with {self.host}" if self.host else ""
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{name}{kind} {self.capability}{host}{driver}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatRow:
    """One candidate and its cells, in the order of the GPUs or capabilities.

    `fix` is what would work instead on the one GPU of the table, or the next step if that is not known.
    """

    candidate: CoverCandidate
    cells: tuple[Cell, ...]
    fix: str = ""


def rows(candidates: Iterable[CoverCandidate], gpus: Sequence[CompatGpu]) -> tuple[CompatRow, ...]:
    """Return the cells of every candidate on every GPU, in this order."""
    keys = [(gpu.capability, gpu.driver, gpu.host) for gpu in gpus]
    distinct = dict(zip(keys, gpus, strict=True))

    def row(candidate: CoverCandidate) -> CompatRow:
        cells = {key: cell(candidate, gpu) for key, gpu in distinct.items()}
        return CompatRow(candidate=candidate, cells=tuple(cells[key] for key in keys))

    return tuple(map(row, candidates))


def cell(candidate: CoverCandidate, gpu: CompatGpu) -> Cell:
    question = replace(candidate.question, capability=gpu.capability, driver=gpu.driver, host=gpu.host)
    claims = {**candidate.evidence.verified, **verified_claims(candidate.verdicts, gpu.driver)}
    return answer_cell(question, replace(candidate.evidence, verified=claims))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEvidence:
    """The evidence about a target: its lock if current, and the lock's state.

    `unsolvable` is the reason for no solution, or empty. `image` is the scan of its image in the store. It
    is used with its `verdicts` only while the image has the locked packages.
    """

    lock: Lock | None
    state: str
    unsolvable: str = ""
    image: ScanResult | None = None
    verdicts: tuple[VerificationResult, ...] = ()


def candidate_of(target: Target, known: TargetEvidence) -> CoverCandidate:
    """Return the candidate of a target, from its lock, or from its recipe without a lock."""
    question, image = cell_query(target, known.lock, ANY), known.image
    contents = image if image and _has_locked_packages(image, question) else None
    evidence = CellEvidence(unsolvable=known.unsolvable, contents=contents)
    return CoverCandidate(
        name=target.name,
        group=target.family,
        question=question,
        evidence=evidence,
        lock=known.state,
        verdicts=known.verdicts if contents else (),
    )


def _has_locked_packages(image: ScanResult, question: CellQuery) -> bool:
    """Return whether an image has the locked version of every package that both name."""
    installed = {package.name: package.version for package in image.packages}
    both = [(name, version) for name, version in question.packages if name in installed]
    return bool(both) and all(installed[name] == version for name, version in both)


def releases(framework: str) -> tuple[CoverCandidate, ...]:
    """Return the known versions of a distribution (`torch`) x CUDA, with or without a recipe."""
    known = {(release.version, release.cuda): release for release in knowledge.releases(framework)}
    return newest_first(_release(framework, version, cuda) for version, cuda in known)


def _release(framework: str, version: str, cuda: str) -> CoverCandidate:
    question = CellQuery(framework=framework, version=version, cuda=cuda, capability=ANY)
    return CoverCandidate(name="", group=framework, question=question)


def exact_releases(text: str, cuda: str = "") -> tuple[CoverCandidate, ...]:
    """Return the version in `torch==2.6` or `torch==2.6.0+cu124`, with `cuda` or each known CUDA version.

    An unknown version is one candidate without CUDA. Raises UsageError for a text without a version.
    """
    match = _RELEASE.fullmatch(text.strip())
    if not match:
        raise UsageError(
            "release-invalid", f"'{text[:60]}' has no version", hint="write torch==2.6, or torch==2.6.0+cu124"
        )
    name, written, local = canonicalize_name(match[1]), match[2], match[3] or ""
    if name == "paddlepaddle-gpu" and (post := _PADDLE.search(written)):
        local = local or post[1]
    local_cuda = f"{local[:-1]}.{local[-1]}" if local else match[4] or ""
    if cuda and local_cuda and cuda != local_cuda:
        raise UsageError(
            "option-conflict",
            f"{text} is a build for {platform_of(local_cuda)}, not for {platform_of(cuda)}",
            hint=f"pass only one CUDA version, {local_cuda} or {cuda}",
        )
    requested_cuda = cuda or local_cuda
    return newest_first(
        replace(_release(framework, version, cuda), requested=written if version != written else "")
        for framework in knowledge.distributions(name, written, requested_cuda)
        for version in (knowledge.newest_patch(framework, written),)
        for cuda in ({requested_cuda} if requested_cuda else _cudas(framework, version))
    )


def for_maker(candidates: Sequence[CoverCandidate], gpu: CompatGpu) -> list[CoverCandidate]:
    """Return targets, and the releases for GPUs of this maker (CUDA or ROCm); all releases without any."""

    def fits(candidate: CoverCandidate) -> bool:
        return bool(rocm_of(candidate.question.cuda)) is bool(gpu.capability.processor)

    built = {candidate.question.framework for candidate in candidates if fits(candidate)}
    return [
        candidate
        for candidate in candidates
        if candidate.name or fits(candidate) or candidate.question.framework not in built
    ]


def _cudas(framework: str, version: str) -> set[str]:
    """Return the CUDA versions for which a release is known, or one empty text without any.

    Without a list of all its CUDA versions, those count for which its code for amd64 is documented.
    """
    rows = knowledge.releases(framework)
    known = {row.cuda for row in rows if covers(row.version, version) or covers(version, row.version)}
    known |= {row.cuda for row in knowledge.offered(framework, version)}
    compilers = {cuda for _, cudas in knowledge.compilers_of(framework, version) for cuda in cudas}
    documented = {
        row.cuda
        for row in knowledge.all_documented()
        if (row.framework, row.platform) == (framework, "amd64") and covers(row.version, version)
    }
    return known or compilers or documented or {""}


def check_known(table: Sequence[CompatRow]) -> None:
    """Raise UnknownAnswerError if all rows are releases of which nothing is known."""
    if not table or any(row.candidate.name or any(cell.claims for cell in row.cells) for row in table):
        return
    questions = [row.candidate.question for row in table]
    named = [
        f"{question.framework} {question.version}{question.cuda and f' for CUDA {question.cuda}'}"
        for question in questions
    ]
    known = sorted({row.version for row in knowledge.releases(questions[0].framework)}, key=natural)
    index = bisect(known, natural(questions[0].version), key=natural)
    nearest_versions = ", ".join(known[max(index - 2, 0) : index + 2])
    hint = (
        f"the nearest known versions are {nearest_versions}"
        if nearest_versions
        else "`imagefactory compat` lists what is known"
    )
    verb = "is not a known release" if len(named) == 1 else "are not known releases"
    raise UnknownAnswerError(
        "release-unknown",
        f"{' and '.join(named)} {verb}, so it is not known on which GPUs that runs",
        hint=f"{hint}; to scan a wheel: imagefactory compat FILE.whl",
    )


def with_fixes(table: Sequence[CompatRow], gpu: CompatGpu) -> tuple[CompatRow, ...]:
    """Return the rows of one GPU, those that do not run there with what would work instead."""
    return tuple(replace(row, fix=fix_of(row.candidate, row.cells[0], gpu)) for row in table)


def fix_of(candidate: CoverCandidate, answer: Cell, gpu: CompatGpu) -> str:
    """Return what would work instead of a candidate on a GPU, or the next step if that is not known.

    Empty if it runs there.
    """
    question, claim = candidate.question, answer.claims[0] if answer.claims else None
    if serves(answer):
        return ""
    if answer.answer is Compatibility.UNKNOWN or claim is None:
        release = f"look it up: imagefactory compat {question.framework}=={question.version}"
        return f"run imagefactory verify {candidate.name}" if candidate.name else release
    if claim.rule == "driver-gpu":
        any_driver = replace(gpu, driver="")
        more = fix_of(candidate, cell(candidate, any_driver), any_driver)
        return driver_fix(gpu.capability, gpu.driver) + (f" and {more}" if more else "")
    if claim.rule == "driver-floor":
        return _floor_fix(claim, question.cuda, gpu)
    framework, version = question.framework, question.version
    running = _running(framework, replace(gpu, name="", count=1))
    same = [cuda for other, cuda in running if covers(other, version) or covers(version, other)]
    if tags := [_tag(cuda) for cuda in same if cuda != question.cuda]:
        return f"{tags[0]} of the same release"
    patch = knowledge.newest_patch(framework, minor_version(version))
    if natural(patch) > natural(version) and serves(cell(_release(framework, patch, question.cuda), gpu)):
        return f"{framework} {patch}"
    versions = sorted({other for other, _ in running}, key=natural)
    newer = [other for other in versions if natural(other) > natural(version)]
    if not newer:
        return f"{framework} {versions[-1]}" if versions else ""
    amd = bool(gpu.capability.processor)
    known = {
        row.version
        for row in knowledge.releases(framework)
        if bool(rocm_of(row.cuda)) is amd and natural(row.version) >= natural(newer[0])
    }
    return f"{framework} {newer[0]}{' or newer' if known <= set(newer) else ''}"


@cache
def _running(framework: str, gpu: CompatGpu) -> tuple[tuple[str, str], ...]:
    """Return the releases of a framework (version, CUDA) that run on a GPU."""
    others = [_release(framework, row.version, row.cuda) for row in knowledge.releases(framework)]
    return tuple((row.question.version, row.question.cuda) for row in others if serves(cell(row, gpu)))


def _tag(cuda: str) -> str:
    """Return the tag of a build, as in its version: `cu126`, `rocm6.2`."""
    return cuda if rocm_of(cuda) else f"cu{cuda.replace('.', '')}"


def _floor_fix(claim: CellClaim, cuda: str, gpu: CompatGpu) -> str:
    """Return the driver that a GPU needs, and the package for older ones on data-center GPUs.

    Source: NVIDIA, CUDA Compatibility, forward compatibility.
    """
    driver = f"driver {claim.driver} or newer" if claim.driver else ""
    if "." not in cuda or gpu.name not in forward_names():
        return driver
    return f"{driver}, or the package cuda-compat-{cuda.replace('.', '-')} (forward compatibility)"


def with_releases(candidates: Iterable[CoverCandidate], framework: str) -> tuple[CoverCandidate, ...]:
    """Return candidates and the other versions x CUDA of their framework, the newest first."""
    candidate_list = tuple(candidates)
    questions = [candidate.question for candidate in candidate_list]
    built = {(question.framework, question.version, question.cuda) for question in questions}
    more = (
        row
        for row in releases(framework)
        if (framework, row.question.version, row.question.cuda) not in built
    )
    return newest_first((*candidate_list, *more))


def columns(*, amd: bool = False) -> tuple[CompatGpu, ...]:
    """Return the capabilities of discrete GPUs, with any driver; with `amd` AMD's processors.

    GPUs integrated with an ARM processor (rule R2) are skipped, because no x86-64 image runs there.
    """
    cuda = tuple(row for row in knowledge.capabilities() if row not in INTEGRATED and row >= OLDEST)
    every = knowledge.processors() if amd else cuda
    return tuple(CompatGpu(name=str(capability), capability=capability) for capability in every)


def newest_first(candidates: Iterable[CoverCandidate]) -> tuple[CoverCandidate, ...]:
    """Return candidates by framework version, then CUDA, the newest first. The order of equal ones stays."""

    def order(candidate: CoverCandidate) -> tuple[object, ...]:
        return natural(candidate.question.version), natural(candidate.question.cuda)

    return tuple(sorted(candidates, key=order, reverse=True))


def severe_rules(cell: Cell) -> tuple[CellClaim, ...]:
    """Return the known faults of a cell that runs, without those that only take time."""
    return tuple(
        claim for claim in cell.warnings if claim.answer is not Compatibility.YES and cell.answer in RUNS
    )


def serves(cell: Cell) -> bool:
    """Return whether an image is useful on a GPU: it runs, without known faults or wrong results."""
    return _rank(cell) < _NOT


def by_group(candidates: Iterable[CoverCandidate]) -> tuple[tuple[str, tuple[CoverCandidate, ...]], ...]:
    """Return candidates by group, in the order of its first."""
    groups: dict[str, list[CoverCandidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.group, []).append(candidate)
    return tuple((group, tuple(some)) for group, some in groups.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverChoice:
    """An image of a cover and its GPUs, each with the cell of the image on that GPU."""

    candidate: CoverCandidate
    serves: tuple[tuple[CompatGpu, Cell], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnservedGpu:
    """A GPU that no image serves: the best candidate, its answer there, and the reason."""

    gpu: CompatGpu
    candidate: CoverCandidate | None
    claim: CellClaim | None
    answer: Compatibility


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """The fewest images of a group that serve the GPUs, and the GPUs that no image of it serves."""

    group: str
    images: tuple[CoverChoice, ...]
    unserved: tuple[UnservedGpu, ...]


def cover(group: str, candidates: Sequence[CoverCandidate], gpus: Sequence[CompatGpu]) -> Cover:
    """Return the exact minimum of images; of several minima the one with the best grades, then the newest.

    A GPU is served by an image that runs there without faults. Without such an image, by one in which some
    calls fail. Then by PTX that no scan has found: a page lists the framework's own code, and scans find
    libraries without PTX. An image that does not run or computes wrong results serves no GPU.
    """
    table = rows(newest_first(candidates), gpus)
    best = [min((_rank(row.cells[index]) for row in table), default=_NOT) for index in range(len(gpus))]
    graded = [
        {i: _grade(cell) for i, cell in enumerate(row.cells) if _rank(cell) == best[i] < _NOT}
        for row in table
    ]
    chosen = fewest(graded)
    cells: dict[int, list[tuple[CompatGpu, Cell]]] = {index: [] for index in chosen}
    for number, gpu in enumerate(gpus):
        able = [index for index in chosen if number in graded[index]]
        if able:
            first = min(able, key=lambda index: (graded[index][number], index))
            cells[first].append((gpu, table[first].cells[number]))
    served = frozenset[int]().union(*graded)
    return Cover(
        group=group,
        images=tuple(
            CoverChoice(candidate=table[index].candidate, serves=tuple(cells[index])) for index in chosen
        ),
        unserved=tuple(_unserved(table, i, gpu) for i, gpu in enumerate(gpus) if i not in served),
    )


def fewest(graded: Sequence[Mapping[int, Grade]]) -> tuple[int, ...]:
    """Return indexes of the fewest of `graded` that have all elements, each with a grade.

    Of several such sets, the one with the lowest sum of its elements' best grades, then the first by
    indexes. The result is exact: the search branches on the element with the fewest options, with one more
    image at each round. It skips elements that come with another one, and options no better than an earlier
    one.
    """
    useful = [
        index
        for index, grades in enumerate(graded)
        if grades and not any(_replaces(other, grades) for other in graded[:index])
    ]
    union = frozenset[int]().union(*graded)
    holders = {frozenset(index for index in useful if element in graded[index]) for element in union}
    needed = sorted(sorted(holder) for holder in holders if not any(other < holder for other in holders))
    sets = [
        frozenset(i for i, holder in enumerate(needed) if index in holder) for index in range(len(graded))
    ]
    elements = frozenset(range(len(needed)))
    for size in range(len(useful) + 1):
        if covers := _of_size(sets, useful, elements, size):
            return min(covers, key=lambda chosen: (_cost([graded[index] for index in chosen], union), chosen))
    return ()


def _replaces(grades: Mapping[int, Grade], other: Mapping[int, Grade]) -> bool:
    return all(element in grades and grades[element] <= grade for element, grade in other.items())


def _cost(chosen: Sequence[Mapping[int, Grade]], union: Iterable[int]) -> Grade:
    grades = [min(grades_of[element] for grades_of in chosen if element in grades_of) for element in union]
    return sum(first for first, _ in grades), sum(second for _, second in grades)


def _of_size(
    sets: Sequence[frozenset[int]], useful: Sequence[int], elements: frozenset[int], size: int
) -> list[tuple[int, ...]]:
    """Return all covers of `elements` by at most `size` sets, each sorted."""
    covers: set[tuple[int, ...]] = set()
    seen: set[tuple[int, ...]] = set()

    def go(chosen: tuple[int, ...], missing: frozenset[int]) -> None:
        if not missing:
            covers.add(chosen)
            return
        free = size - len(chosen)
        if free * max(len(sets[index] & missing) for index in useful) < len(missing):
            return
        rarest = min(missing, key=lambda element: (sum(element in sets[index] for index in useful), element))
        for index in useful:
            more = tuple(sorted((*chosen, index)))
            if rarest in sets[index] and more not in seen:
                seen.add(more)
                go(more, missing - sets[index])

    go((), elements)
    return list(covers)


def _rank(cell: Cell) -> int:
    """Return 0 for a complete run, 1 if some calls fail, 2 for PTX only documented, `_NOT` for the rest."""
    answers = {claim.answer for claim in severe_rules(cell)}
    if cell.answer not in RUNS or Compatibility.NO in answers:
        return _NOT
    if _grade(cell) == (1, _DOUBT[ClaimBasis.DOCUMENTED]):
        return 2
    return 1 if answers else 0


def _grade(cell: Cell) -> Grade:
    return int(cell.answer is Compatibility.PTX), _DOUBT[cell.claims[0].basis]


def _unserved(table: Sequence[CompatRow], number: int, gpu: CompatGpu) -> UnservedGpu:
    if not table:
        return UnservedGpu(gpu=gpu, candidate=None, claim=None, answer=Compatibility.NO)
    order = (*RUNS, Compatibility.PARTLY, Compatibility.UNKNOWN, Compatibility.NO)
    row = min(table, key=lambda row: order.index(row.cells[number].answer))
    nearest = row.cells[number]
    against = (
        tuple(claim for claim in severe_rules(nearest) if claim.answer is Compatibility.NO) or nearest.claims
    )
    claim = against[0] if against else None
    answer = claim.answer if claim else Compatibility.UNKNOWN
    return UnservedGpu(gpu=gpu, candidate=row.candidate, claim=claim, answer=answer)
