"""The claims about one cell (framework x CUDA x driver x capability), the strongest first.

`answer_cell` collects documented facts, predictions of a scan, and verified results of the suite. Each claim
has a rule, a reason and a source. The strongest claim is the answer. Of equally strong claims, negative ones
come first, since each names a condition without which nothing runs. Users can ignore negative and partial
claims by their rules:

    architecture      the build is for another processor than the GPU machine has
    maker             the build is for NVIDIA GPUs and this is an AMD GPU, or the reverse
    cuda-not-offered  that framework version is not built for that CUDA
    unsolvable        locking found no environment
    toolkit-dropped   that CUDA no longer compiles for this old GPU
    not-documented    the capability is neither documented nor compatible with a documented one
    no-target         the compiler that the package runs has no target for the GPU, or is not given it
    no-gpu-code       the framework is a build for CPUs only
    no-code           a library that the framework must load has no code for the GPU
    partly            a library that it loads on demand has no code for the GPU
    driver-floor      the driver is older than the code needs
    driver-gpu        the driver does not support that GPU: too old, or support was removed
    wrong-numbers     the suite ran there and computed wrong results
    no-kernel         the suite ran there and found no code for that GPU
    driver-too-old    the suite ran there, and the driver was too old
    load-failed       the suite ran there, and a library failed to load
    known-bad:ID      a known fault of that combination (an answer, or a warning of a cell)

Positive claims have the rules `documented`, `code` (machine code), `ptx` and `suite`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from imagefactory.gpu import knowledge
from imagefactory.gpu.amd import amd_runs
from imagefactory.gpu.capability import Capability, GpuCode
from imagefactory.gpu.drivers import gpu_floor, gpu_refusal, older
from imagefactory.gpu.frameworks import LibraryRole, cpu_only, cuda_of, find_framework, role_of
from imagefactory.gpu.knowledge.packages import DocumentedSupport, WheelScan
from imagefactory.gpu.knowledge.tables import covers, read_table
from imagefactory.gpu.known_bad import ANSWERS, matching_rules, rules, versions_in, versions_of
from imagefactory.gpu.predict import (
    RunTimeCode,
    predict_code,
    predict_run_time_code,
    run_time_ptx,
    runs,
    with_driver,
)
from imagefactory.gpu.values import (
    Cell,
    CellClaim,
    CellQuery,
    ClaimBasis,
    Compatibility,
    InstalledPackage,
    Prediction,
    ScanResult,
    SupportLevel,
    platform_of,
    rocm_of,
)
from imagefactory.model import Lock, LockedCondaPackage, Target
from imagefactory.versions import natural

_WEIGHT = {ClaimBasis.VERIFIED: 0, ClaimBasis.PREDICTED: 1, ClaimBasis.DOCUMENTED: 2}
_RULES = {
    Compatibility.YES: "code",
    Compatibility.PTX: "ptx",
    Compatibility.PARTLY: "partly",
    Compatibility.NO: "no-code",
}
_EFFECTS = {
    **ANSWERS,
    "costly": Compatibility.YES,
    "some calls fail": Compatibility.PARTLY,
    "may be wrong": Compatibility.PARTLY,
}
NO_TARGET = "no-target"
"""The rule for a GPU that a compiler in the environment has no target for."""
_LAST = 999  # greater than every patch release
_SEVERITY = {
    Compatibility.NO: 0,
    Compatibility.PARTLY: 1,
    Compatibility.PTX: 2,
    Compatibility.YES: 3,
    Compatibility.UNKNOWN: 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEvidence:
    """Evidence about a cell in addition to the tables of gpu/knowledge.

    `contents` is a scan of the built image; None means that the scanned wheels of the query are used.
    `verified` are claims of the suite by capability, only those valid for the image and the driver of the
    query. `unsolvable` is the reason why locking found no environment, empty if it found one or was not
    tried.
    """

    contents: ScanResult | None = None
    verified: Mapping[Capability, CellClaim] = field(default_factory=dict)
    unsolvable: str = ""


NOTHING = CellEvidence()


def cell_query(target: Target, lock: Lock | None, capability: Capability, driver: str = "") -> CellQuery:
    """Return the query whether `target` runs on a GPU.

    `lock` lists its packages; None means that it has no lock.

    A framework from conda is written `channel::package`, as in conda, because documentation about wheels on
    PyPI does not apply to it.
    """
    packages = lock.packages if lock else ()
    framework = target.framework
    if target.source == "conda":
        came = (
            package.url
            for package in packages
            if isinstance(package, LockedCondaPackage) and package.name == framework
        )
        address = next((url.rpartition("/")[0].rpartition("/")[0] for url in came), target.channels[0])
        framework = f"{address.rstrip('/').rpartition('/')[2]}::{framework}"
    return CellQuery(
        framework=framework,
        version=target.version,
        cuda=target.cuda,
        capability=capability,
        driver=driver,
        platform=target.platform.partition("/")[2],
        packages=tuple((package.name, package.version) for package in packages),
        wheels=tuple(package.sha256 for package in packages),
    )


def _platform(question: CellQuery) -> str:
    """Return the architecture of the build: of the target, else the one that the GPU's machine needs."""
    return question.platform or question.host or knowledge.only_host(question.capability) or "amd64"


def answer_cell(question: CellQuery, evidence: CellEvidence = NOTHING) -> Cell:
    """Return all claims on a query, the strongest first, and matching known faults as warnings.

    If the build is for another processor, there is only that claim. A release is answered by its builds for
    the processor next to the GPU.
    """
    elsewhere = another_processor(question.platform, question.host) if question.platform else None
    if elsewhere:
        return Cell(question=question, claims=(elsewhere,))
    if foreign := another_maker(question):
        return Cell(question=question, claims=(foreign,))
    refusal, source = gpu_refusal(question.capability, question.driver) if question.driver else ("", "")
    if refusal:  # no machine can run it, whatever else is known
        return Cell(question=question, claims=(_no("driver-gpu", refusal, source),))
    contents = None if evidence.unsolvable else evidence.contents or scanned_contents(question)
    claims = [*_documented(question, evidence)]
    if contents is not None:
        claims += _predicted(question, contents)
    if verified := evidence.verified.get(question.capability):
        claims.append(verified)
    faults = dict(_known_bad_claims(question, contents))
    answers = [
        claim
        for claim, effect in faults.items()
        if effect in ANSWERS and (claims or claim.answer is Compatibility.NO)
    ]
    claims = sorted((*claims, *answers), key=_order)
    if not claims and not question.platform and _platform(question) != "amd64":
        other = answer_cell(replace(question, platform="amd64", host=""), evidence)
        claims = [_unknown_platform(question)] if other.claims else []
    cell = Cell(
        question=question, claims=tuple(claims), warnings=tuple(f for f in faults if f not in answers)
    )
    newer = _run_time_claim(cell, contents)
    return replace(cell, warnings=(*cell.warnings, newer)) if newer else cell


def _run_time_claim(cell: Cell, contents: ScanResult | None) -> CellClaim | None:
    """Return a warning if the driver is older than the CUDA that compiles code at run time."""
    question = cell.question
    if not question.driver or question.capability.processor:
        return None
    if (
        cell.answer in (Compatibility.NO, Compatibility.UNKNOWN)
        or cell.claims[0].basis is ClaimBasis.VERIFIED
    ):
        return None
    if (compiled := run_time_code(question)) and compiled.answer is Compatibility.YES:
        return None  # the compiler writes machine code
    cuda = (cuda_of(contents) if contents else "") or question.cuda
    reason = run_time_ptx(cuda, question.driver)
    if not reason:
        return None
    source = _source("cuda_drivers", "driver", cuda)
    return replace(_no("run-time-ptx", reason, source), answer=Compatibility.YES)


def _order(claim: CellClaim) -> tuple[int, int]:
    """Return the sort key.

    Known faults are as strong as a scan of the code, even if they are only documented. So is a compiler
    without a target: a scan does not see the code that it would have to compile.
    """
    strong = claim.rule == NO_TARGET or claim.rule.startswith("known-bad:")
    weight = _WEIGHT[ClaimBasis.PREDICTED] if strong else _WEIGHT[claim.basis]
    return weight, _SEVERITY[claim.answer]


_HOST = "the processor next to the GPU: gpus.toml, or the machine in the query"


def another_processor(platform: str, host: str) -> CellClaim | None:
    """Return NO if the processor of the GPU machine cannot run a build for `platform`, None if it can."""
    if not host or host == platform:
        return None
    reason = f"it is built for {platform}, but the processor next to that GPU is {host}"
    return _no("architecture", reason, _HOST)


def _unknown_platform(question: CellQuery) -> CellClaim:
    """Return UNKNOWN for a release, if no build for the processor of the GPU's machine is known."""
    reason = f"no build for {_platform(question)} is known, which the processor next to that GPU needs"
    return replace(_no("architecture", reason, _HOST), answer=Compatibility.UNKNOWN)


def another_maker(question: CellQuery) -> CellClaim | None:
    """Return NO if the build is for GPUs of another vendor, else None."""
    amd = bool(question.capability.processor)
    if not question.cuda or amd == bool(rocm_of(question.cuda)):
        return None
    whose = "AMD's" if amd else "NVIDIA's"
    reason = f"it is built for {platform_of(question.cuda)}, and {question.capability} is {whose}"
    return _no("maker", reason, "what the target or the release is built for")


def predict_other_processor(prediction: Prediction, platform: str, host: str) -> Prediction:
    """Return the prediction for GPUs in machines with processor `host`: NO if the build is for another
    one.
    """
    elsewhere = another_processor(platform, host) if platform else None
    if elsewhere is None:
        if platform != "arm64" or host:
            return prediction
        # Most GPUs exist with both processors, and most machines have the other one.
        return replace(prediction, reason=f"{prediction.reason}, next to an arm64 processor")
    return replace(prediction, answer=Compatibility.NO, reason=elsewhere.reason, driver="", warnings=())


def _documented(question: CellQuery, evidence: CellEvidence) -> Iterator[CellClaim]:
    if evidence.unsolvable:
        yield _no("unsolvable", evidence.unsolvable, "the solver, when the target was last locked")
    if not question.packages:  # a lock proves that it is offered
        yield from _offer(question)
    yield from _toolkit(question)
    if compiled := run_time_code(question):
        no = compiled.answer is Compatibility.NO
        claim = (
            _no(NO_TARGET, compiled.reason, compiled.source)
            if no
            else _yes(compiled.answer, compiled.reason, compiled.source)
        )
        yield _with_floor(claim, question, compiled.cuda)
    row = knowledge.documented(question.framework, question.version, question.cuda, _platform(question))
    if row is None or (row.known_from and question.capability < row.known_from):
        return
    listed = _listed(question, row)
    if listed.answer is not Compatibility.NO or not row.partial:
        yield _with_floor(listed, question, max(question.cuda, row.cuda, key=len))


def run_time_code(question: CellQuery) -> RunTimeCode | None:
    """Return the answer for code that the framework of a query compiles while it runs."""
    name = question.framework.rpartition("::")[2]
    return predict_run_time_code(
        name, question.version, question.cuda, question.packages, question.capability
    )


def _offer(question: CellQuery) -> Iterator[CellClaim]:
    """Yield NO if the framework version was not released for that CUDA.

    Yield nothing if only its wheels on PyPI are known, since other indexes have more. For ROCm and for arm64
    they have: AMD and NVIDIA build the same releases for other versions.
    """
    name, version, cuda = question.framework, question.version, question.cuda
    if not cuda or rocm_of(cuda) or _platform(question) != "amd64":
        return
    if any(not row.pins for row, _ in knowledge.compilers_of(name, version)):
        return  # the compiler is in the wheel, whatever CUDA is next to it
    rows = [
        row
        for row in knowledge.releases(name)
        if covers(row.version, version) or covers(version, row.version)
    ]
    major = cuda.partition(".")[0]
    if any(row.any_minor and covers(major, row.cuda) and covers(major, cuda) for row in rows):
        return  # no source says that it does not run with these libraries
    known = {row.cuda: row.source for row in rows}
    known |= {row.cuda: row.source for row in knowledge.offered(name, version)}
    known = {other: source for other, source in known.items() if not rocm_of(other)}
    if rows and not any(covers(other, cuda) or covers(cuda, other) for other in known):
        offers = " and ".join(sorted(known, key=natural))
        reason = f"{name} {version} is built for CUDA {offers}, not for {cuda}"
        yield _no("cuda-not-offered", reason, next(iter(known.values())))


def _toolkit(question: CellQuery) -> Iterator[CellClaim]:
    """Yield NO if the toolkit cannot compile machine code or PTX for such an old GPU."""
    targets = [code.architecture for code in knowledge.targets_of(question.cuda) if code.architecture]
    if targets and question.capability < min(targets):
        reason = f"CUDA {question.cuda} compiles for {min(targets)} and newer"
        yield _no("toolkit-dropped", reason, _source("cuda_targets", "toolkit", question.cuda))


def _listed(question: CellQuery, row: DocumentedSupport) -> CellClaim:
    """Return the meaning of a documented list of targets for a capability, by the rules for each type of
    code.
    """
    capability = question.capability
    if row.minimum and capability < row.minimum:
        return _no("not-documented", f"documented for {row.minimum} and newer", row.source)
    if code := _serving(row.codes, capability, SupportLevel.NATIVE):
        exact = code.architecture == capability or code.processor == str(capability)
        reason = f"{capability} is documented" if exact else f"{code} is documented and runs on {capability}"
        return _yes(Compatibility.YES, reason, row.source)
    if code := _serving(row.codes, capability, SupportLevel.PTX):
        return _yes(Compatibility.PTX, f"{code} is documented, for the driver to compile", row.source)
    listed = " ".join(map(str, row.codes))
    return _no("not-documented", f"documented for {listed}: none of it runs on {capability}", row.source)


def _serving(codes: Sequence[GpuCode], capability: Capability, how: SupportLevel) -> GpuCode | None:
    """Return the newest code that runs on a capability in this way."""
    if capability.processor:
        fits = how is SupportLevel.NATIVE
        return next((code for code in codes if fits and amd_runs(code, str(capability))), None)
    return next((code for code in sorted(codes, reverse=True) if runs(code, capability) is how), None)


def _with_floor(claim: CellClaim, question: CellQuery, cuda: str) -> CellClaim:
    """Return a positive claim with its oldest driver, or NO if the driver of the query is older.

    Machine code needs the first driver of its CUDA major version. PTX needs a driver that supports the CUDA
    version that wrote it. If only the CUDA major version is known, drivers older than its first one fail; the
    exact limit is unknown.
    """
    if claim.answer is Compatibility.NO or question.capability.processor:
        return claim
    floor = knowledge.minor_floors().get(int(cuda.partition(".")[0])) or knowledge.native_driver(cuda)
    if claim.answer is Compatibility.PTX:
        floor = knowledge.native_driver(cuda) or floor
    if floor and question.driver and older(question.driver, floor):
        reason = f"CUDA {cuda} needs driver {floor} or newer, not {question.driver}"
        return replace(_no("driver-floor", reason, _source("cuda_drivers", "driver", cuda)), driver=floor)
    if claim.answer is Compatibility.PTX and "." not in cuda:
        return replace(claim, driver="")
    known = gpu_floor(question.capability)
    return replace(claim, driver=known.driver if known and floor and older(floor, known.driver) else floor)


def _source(table: str, kind: str, cuda: str) -> str:
    """Return the source of the first row of a table about a CUDA version, or about a major version."""
    for row in read_table(table)[kind]:
        versions = [row["cuda"]] if isinstance(row["cuda"], str) else row["cuda"]
        if any(covers(cuda, version) for version in versions):
            return str(row["source"])
    return ""


def _no(rule: str, reason: str, source: str) -> CellClaim:
    return CellClaim(
        basis=ClaimBasis.DOCUMENTED, answer=Compatibility.NO, rule=rule, reason=reason, source=source
    )


def _yes(answer: Compatibility, reason: str, source: str) -> CellClaim:
    return CellClaim(
        basis=ClaimBasis.DOCUMENTED, answer=answer, rule="documented", reason=reason, source=source
    )


def _predicted(question: CellQuery, contents: ScanResult) -> Iterator[CellClaim]:
    """Yield the prediction of the scan for the driver of the query, nothing if it is unknown."""
    bare = predict_code(contents, question.capability)
    if bare.answer is Compatibility.UNKNOWN:
        return
    driver = "" if question.capability.processor else question.driver  # AMD code does not name a driver
    prediction = with_driver(bare, driver) if driver else bare
    rule = _RULES[prediction.answer]
    if prediction.answer is Compatibility.NO:
        rule = (
            "driver-floor"
            if bare.answer is not Compatibility.NO
            else "no-gpu-code"
            if cpu_only(contents)
            else rule
        )
    yield CellClaim(
        basis=ClaimBasis.PREDICTED,
        answer=prediction.answer,
        rule=rule,
        reason=prediction.reason,
        source=f"scan of {contents.source}",
        driver=prediction.driver,
    )


def scanned_contents(question: CellQuery) -> ScanResult | None:
    """Return the merged contents of the scanned wheels of a query, None if its framework was not scanned.

    If the query lists no wheels (no recipe uses it), the newest scanned wheels of that version and CUDA are
    used.
    """
    scans = [scan for sha256 in question.wheels if (scan := knowledge.scanned(sha256))]
    if not question.wheels:
        scans = _scanned_releases(question)
    packages = tuple(
        InstalledPackage(name=name, version=version) for name, version in sorted(question.packages)
    )
    contents = ScanResult(
        source=", ".join(scan.source for scan in scans),
        libraries=tuple(sorted((lib for scan in scans for lib in scan.libraries), key=lambda lib: lib.path)),
        packages=packages or tuple(package for scan in scans for package in scan.packages),
        facts=tuple(fact for scan in scans for fact in scan.facts),
    )
    framework = find_framework(contents)
    roles = [role_of(library.path, framework)[0] for library in contents.libraries]
    return contents if framework and LibraryRole.GATES in roles else None


def _scanned_releases(question: CellQuery) -> list[ScanResult]:
    name, version, cuda = question.framework, question.version, question.cuda
    if not any(covers(row.cuda, cuda) or covers(cuda, row.cuda) for row in knowledge.offered(name, version)):
        return []  # the scanned wheels on PyPI are for another CUDA
    plugin = f"{name}-cuda{cuda.partition('.')[0]}-"
    newest: dict[str, WheelScan] = {}
    for wheel in knowledge.scanned_for(_platform(question)):
        if covers(version, wheel.version) and (wheel.package == name or wheel.package.startswith(plugin)):
            other = newest.get(wheel.package)
            if other is None or natural(wheel.version) > natural(other.version):
                newest[wheel.package] = wheel
    return [wheel.contents for wheel in newest.values()]


def _known_bad_claims(question: CellQuery, contents: ScanResult | None) -> Iterator[tuple[CellClaim, str]]:
    """Yield a claim for each known fault that matches the scan, the lock, or the framework version.

    For a partial version (`2.3`), only faults in all of its releases match. A fault that only costs time or
    memory is YES. A fault in some calls is PARTLY, and so is one that computes wrong results on GPUs of every
    capability, since it is not specific to this one. All others are NO.
    """
    name, version = question.framework.rpartition("::")[2], question.version
    builds = (row for row in knowledge.releases(name) if covers(row.version, version) and row.cudnn)
    cudnn = "" if question.packages else next((row.cudnn for row in builds if row.cuda == question.cuda), "")
    build = (("build-cuda", question.cuda), *([("cudnn", cudnn)] if cudnn else []))
    locked = (*(question.packages or ((name, version),)), *build)
    newest = version if version.count(".") > 1 else f"{version}.{_LAST}"
    last = (*(question.packages or ((name, newest),)), *build)
    first, final = [versions_in(contents)] * 2 if contents else (versions_of(locked), versions_of(last))
    capability, driver = question.capability, question.driver
    fitting = {fault.id for fault in matching_rules(final, capability, driver)}
    everywhere = {rule.id for rule in rules() if not rule.capabilities}
    for fault in matching_rules(first, capability, driver):
        if fault.id not in fitting:
            continue
        answer = _EFFECTS.get(fault.effect, Compatibility.NO)
        if fault.effect == "wrong results" and fault.id in everywhere:
            answer = Compatibility.PARTLY
        yield replace(_no(f"known-bad:{fault.id}", str(fault), fault.source), answer=answer), fault.effect
