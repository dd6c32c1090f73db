"""Run the GPU suite in an image, on this machine or with a kit; sign and attach the verdict.

    name -> resolve -> preflight (GPU, key, suite) -> run -> report -> sign -> attach -> tags

Without a GPU nothing is fetched, unpacked or started.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.actions.images import make_runner, scratch_directory
from imagefactory.actions.inspect import inspect_artifact
from imagefactory.actions.promote import PromotionRequest, PromotionResult, promote
from imagefactory.actions.resolve import ResolvedImage, check_name, resolve_image
from imagefactory.actions.verdicts import (
    SignedReport,
    attach_signed,
    find_in,
    nonce_store,
    place_of,
    places_of,
    read_signed,
    read_verification_policy,
    sign_report,
    signing_key,
    subject_name,
)
from imagefactory.errors import CheckFailedError, UsageError, os_problem
from imagefactory.fs import explain_full_disk, replace_text
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import rocm_of
from imagefactory.model import CheckState, Outcome, Target
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.sif import stored_sifs
from imagefactory.oci.store import ImageReference, parse_reference
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.emulator import check_not_emulated
from imagefactory.runtime.hardware import SelectedGpu
from imagefactory.runtime.protocol import Runner
from imagefactory.serialize import format_time
from imagefactory.settings.choices import ENGINES
from imagefactory.suite.gpu import table
from imagefactory.suite.gpu.context import Predicted
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.judgement import expires
from imagefactory.trust.policy import read_trust
from imagefactory.trust.verdict import (
    PASSES,
    SignedVerdict,
    Verdict,
    jittered_expiry,
    parse_verdict,
    sign,
    signable,
)
from imagefactory.verify.evidence import LocalEvidence
from imagefactory.verify.gpu_run import (
    VISIBLE,
    VISIBLE_AMD,
    GpuRequest,
    GpuTrial,
    check_level,
    gpu_expectations,
    predict_coverage,
    select_gpus,
    selected_environment,
    timeout_of,
    unusable_gpus_note,
    verify_gpu,
)
from imagefactory.verify.kit.program import BOUND, ERROR, FORMAT, RATE
from imagefactory.verify.kits import KitReport, KitRequest, collect_kit, make_kit, read_nonce
from imagefactory.verify.nonces import (
    NONCE_BYTES,
    NonceError,
    NonceStore,
    NonceSubject,
    check_open,
    format_nonce,
)
from imagefactory.verify.report import (
    FULL,
    NODE,
    Evidence,
    GpuReport,
    Hardware,
    VerifiedImage,
    format_gpu_report,
)
from imagefactory.verify.suite_files import digest_of, suite_argv, suite_digest
from imagefactory.versions import natural

_LOCAL_EVIDENCE = LocalEvidence()


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyDependencies:
    """The inputs of a verification from this machine. `runner` is None to select one by name."""

    evidence: Evidence = _LOCAL_EVIDENCE
    clock: Callable[[], datetime] = utc_now
    random: Callable[[int], bytes] = os.urandom
    runner: Runner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of a verification. An empty `runner` means the setting, or a suitable one.

    `gpus` are the GPUs to use (`all`, `0,1`, UUIDs), empty for those of the batch system. A GPU must have
    the `capability`. The verdict goes to the store, and to `registry` (`host[/path]`) if set. The report
    goes to `output`, None for a file in the store.
    """

    level: str = FULL
    runner: str = ""
    gpus: str = ""
    capability: str = ""
    registry: str = ""
    promote: bool = False
    output: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The result of a verification. `attached` are the places that have the verdict."""

    chosen: ResolvedImage
    report: GpuReport
    path: Path
    signed: SignedReport
    attached: tuple[str, ...] = ()
    promotion: PromotionResult | None = None

    @property
    def passed(self) -> bool:
        return self.report.outcome in PASSES


def verify_and_attach(
    project: Project, name: str, options: VerifyOptions, bench: VerifyDependencies, progress: Progress
) -> VerifyResult:
    """Verify the image with this name. Raises NoGpuError, before anything is fetched, without a GPU."""
    check_name(project, name)
    hardware = bench.evidence.read()
    selected, environ = request_gpus(options.gpus, hardware, project.environ)
    key = signing_key(project, bench.clock())
    if options.promote and key is None:
        raise UsageError(
            "promote-key-missing",
            "--promote needs a signed verdict, and there is no signing key",
            hint="create one: imagefactory key create NAME",
        )
    if options.output:
        check_output(options.output)
    image = resolve_image(project, name, options.registry, progress)
    report = verify_image(
        project, image, hardware, options, bench, progress, selected=selected, environ=environ
    )
    path = write_unsigned_report(project, report, options.output)
    signed = sign_report(project, report, key, bench.clock())
    attached: tuple[str, ...] = ()
    promotion: PromotionResult | None = None
    if signed.signed is not None:
        attached = attach_signed(project, signed.signed, image.where, progress)
        if options.promote:
            promotion = _promote(project, image.definition.target, image.where, bench.clock(), progress)
    return VerifyResult(
        chosen=image, report=report, path=path, signed=signed, attached=attached, promotion=promotion
    )


def verify_image(
    access: Access,
    image: ResolvedImage,
    hardware: Hardware,
    options: VerifyOptions,
    bench: VerifyDependencies,
    progress: Progress,
    *,
    selected: tuple[SelectedGpu, ...],
    environ: Mapping[str, str],
) -> GpuReport:
    """Run the GPU suite in the image on this machine, whose GPUs are `hardware`, on those of `request_gpus`.

    Raises ToolError for an image of another processor and UsageError for a level that does not apply to it,
    before anything is started. The nonce is issued here; `sign_report` spends it.
    """
    target, artifact = image.definition.target, image.made
    check_level(image.definition, options.level)
    if isinstance(artifact, Image):
        check_not_emulated(artifact.name, artifact.architecture)
    if note := unusable_gpus_note(hardware):
        progress.note(note.removeprefix("; "))
    name = runner_name(access, artifact, options.runner)
    nonce = format_nonce(bench.random(NONCE_BYTES))
    run = NonceSubject(subject=image.subject, suite=suite_digest(), level=options.level)
    with access.layout.in_use(progress):
        nonce_store(access).issue(nonce, run, bench.clock())
        request = GpuRequest(
            nonce=nonce,
            level=options.level,
            capability=options.capability,
            predicted=_predicted(access, artifact, hardware, progress),
            environ=environ,
            selected=selected,
        )
        runner = bench.runner
        if runner is None:
            runner = make_runner(access, name, target.name, progress)
            runner.require()
            artifact = runner.prepare(artifact, checked=True)
        trial = GpuTrial(
            made=artifact,
            subject=image.subject,
            definition=image.definition,
            ask=request,
            runner=name,
            hardware=hardware,
        )
        with progress.stage(f"{target.name}: GPU suite ({options.level}), by {name}"):
            return verify_gpu(trial, runner, bench.clock, scratch=scratch_directory(access, name))


def select_run_gpus(text: str) -> tuple[tuple[SelectedGpu, ...], dict[str, str]]:
    """Return the GPUs of `run --gpus`, none for `all`, and the variable that selects them in an image.

    Raises NoGpuError without a GPU, UsageError for a GPU that is not usable.
    """
    hardware = LocalEvidence().read()
    selected = select_gpus(text, hardware)
    return selected, selected_environment(selected, hardware)


def request_gpus(
    text: str, hardware: Hardware, environ: Mapping[str, str]
) -> tuple[tuple[SelectedGpu, ...], dict[str, str]]:
    """Return the GPUs of --gpus, none for all, and an environment that selects them like a batch system.

    Raises UsageError for a GPU that is not usable, and for several MIG slices.
    """
    if not text:
        return (), dict(environ)
    selected = select_gpus(text, hardware, one_slice=True)
    rest = {name: value for name, value in environ.items() if name not in (VISIBLE, VISIBLE_AMD)}
    return selected, {**rest, **selected_environment(selected, hardware)}


def _predicted(
    access: Access, artifact: Image | SifArtifact, hardware: Hardware | None, progress: Progress
) -> dict[str, Predicted]:
    """Return the predictions from a scan of the image, by capability."""
    gpus = [parse_capability(gpu.capability) for gpu in hardware.gpus] if hardware else []
    return predict_coverage(inspect_artifact(access, artifact, progress).contents, gpus)


def runner_name(access: Access, artifact: Image | SifArtifact, requested: str) -> str:
    """Return the requested runner, else the one of the setting, else a suitable one."""
    name = requested or access.settings.runner.value
    if isinstance(artifact, SifArtifact):
        if name not in ("", "apptainer"):
            raise UsageError(
                "runner-no-sif", f"{name} cannot start .sif files", hint="pass --runner apptainer"
            )
        return "apptainer"
    return name or ENGINES[access.settings.engine.value].runner


def check_output(path: Path) -> None:
    """Raise UsageError if the report cannot be written, before minutes of work."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            *os_problem("write", path, error), hint="choose another file: --output FILE"
        ) from error


def write_unsigned_report(access: Access, report: GpuReport, output: Path | None) -> Path:
    """Write the unsigned report to `output`, or into the store under its nonce. Return the path."""
    path = output or access.layout.path / "reports" / f"{report.nonce}.json"
    with explain_full_disk(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(format_gpu_report(report), indent=1) + "\n")
    return path


def _promote(
    project: Project, target: Target, reference: ImageReference | None, now: datetime, progress: Progress
) -> PromotionResult:
    repo = place_of(project, reference, target.family)
    return promote(project, PromotionRequest(target=target, place=repo, now=now), progress)


# --- Kits, for a machine with a GPU and without imagefactory
# The nonce is spent before anything is attached, and the signed verdict is stored with it until it arrived.
# A call that was killed or met a registry that was down can be repeated: it signs nothing a second time.


@dataclass(frozen=True, slots=True, kw_only=True)
class KitDestination:
    """The directory of a kit, and the directory of its nonce (None for the store)."""

    folder: Path
    nonce_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KitFiles:
    """A kit: its nonce, its image, a reference to pull the image, and the time limit for its result.

    `gpus` are the names of the GPUs that a kit for a node knows, and until when.
    """

    subject: VerifiedImage
    reference: str
    nonce: str
    nonce_dir: Path
    expires: datetime
    gpus: tuple[tuple[str, str], ...] = ()


def write_kit(
    project: Project, name: str, options: VerifyOptions, destination: KitDestination, progress: Progress
) -> KitFiles:
    """Write a kit for the image of a name, with the level, capability and registry of the options.

    Raises UsageError if the directory is not empty.
    """
    check_name(project, name)
    image = resolve_image(project, name, options.registry, progress)
    definition, reference = image.definition, image.where
    if rocm_of(definition.target.cuda):
        raise UsageError(
            "amd-not-supported",
            f"{definition.target.name} is for AMD GPUs, and kits support only NVIDIA GPUs",
            hint="run imagefactory verify on the machine itself",
        )
    check_level(definition, options.level)
    signed = signed_numbers(project, image, utc_now()) if options.level == NODE else None
    predicted: dict[str, Predicted] = {}
    if signed is None:  # the level `node` has no coverage checks
        with project.layout.in_use(progress):
            predicted = _predicted(project, image.made, None, progress)
    request = GpuRequest(
        nonce=format_nonce(os.urandom(NONCE_BYTES)),
        level=options.level,
        capability=options.capability,
        predicted=predicted,
    )
    kit = KitRequest(
        subject=image.subject,
        made=image.made,
        asked=gpu_expectations(definition, request),
        argv=suite_argv(definition),
        waive=definition.target.waive,
        timeout=timeout_of(options.level),
        reference=str(reference) if reference else "",
        plain_http=open_registry(project, reference.registry).plain if reference else False,
        sifs=tuple(
            row.artifact.file.digest
            for row in stored_sifs(project.layout, image.subject.manifest)
            if isinstance(row.artifact, SifArtifact)
        ),
        signed=signed,
    )
    nonces = nonce_store(project, destination.nonce_dir)
    issued = make_kit(destination.folder, kit, nonces, utc_now())
    gpus = tuple((name, row["expires"]) for name, row in signed["gpus"].items()) if signed else ()
    return KitFiles(
        subject=image.subject,
        reference=kit.reference,
        nonce=request.nonce,
        nonce_dir=nonces.folder,
        expires=max(datetime.fromisoformat(end) for _, end in gpus) if gpus else issued.expires,
        gpus=gpus,
    )


def signed_numbers(project: Project, image: ResolvedImage, now: datetime) -> dict[str, Any]:
    """Return signed.json of a kit for a node: the numbers of the image's valid verdicts, by GPU.

    Raises CheckFailedError if no verdict counts.
    """
    policy = read_verification_policy(project, now)
    verdicts = {
        judged.name: judged.verdict
        for repo, subject in places_of(project, image.subject, image.where)
        for judged in find_in(project, repo, subject, policy).judged
        if judged.proves and judged.verdict
    }
    if not verdicts:
        name = image.definition.target.name
        raise CheckFailedError(
            "not-verified",
            f"{name} is not verified on any GPU, so a node cannot be compared with it",
            hint=f"verify it on a GPU that works: imagefactory verify {name}",
        )
    ends = {name: expires(verdict, policy.trust) for name, verdict in verdicts.items()}
    reports = [(verdict.report, ends[name]) for name, verdict in verdicts.items()]
    return format_signed_numbers(reports, image.definition.target.waive)


def format_signed_numbers(
    reports: Iterable[tuple[GpuReport, datetime]], waive: Sequence[str]
) -> dict[str, Any]:
    """Return signed.json from verified reports and their expiry. Pure. kit/program.py describes it.

    The checks in `waive` need not run.
    """
    gpus: dict[str, dict[str, Any]] = {}
    for report, end in reports:
        assert report.device is not None
        assert report.hardware is not None
        new = {"expires": format_time(end), "driver": report.hardware.driver, "checks": {}}
        row = gpus.setdefault(report.device.name, new)
        row["expires"] = max(row["expires"], new["expires"])
        row["driver"] = min(row["driver"], new["driver"], key=natural)
        for check in report.checks:
            if check.state is not CheckState.PASSED:
                continue
            numbers, known = dict(check.numbers), row["checks"].setdefault(check.name, {})
            for name, value in numbers.items():
                bound = numbers.get(f"{name.removesuffix(ERROR)}{BOUND}", 0.0)
                if name.endswith(RATE):
                    known[name] = min(value, known.get(name, value))
                elif name.endswith(ERROR) and bound:
                    known[name] = max(value / bound, known.get(name, 0.0))
    checks = [name for name in table.checks_of(NODE) if name not in waive]
    return {"format": FORMAT, "checks": checks, "alone": list(table.PARTS["driver"]), "gpus": gpus}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """Options of `collect`. `nonce_dir` is the directory that issued the nonces, None for the store.

    With `promote` tags move. Verdicts go to the store and to `registry` (`host[/path]`), empty for the
    registry of the kit's image.
    """

    nonce_dir: Path | None = None
    registry: str = ""
    promote: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KitResult:
    """The verdict of a kit, and the places that have it. `again` is true if it was signed before."""

    verdict: Verdict
    attached: tuple[str, ...]
    again: bool
    promotion: PromotionResult | None = None

    @property
    def report(self) -> GpuReport:
        return self.verdict.report

    @property
    def passed(self) -> bool:
        return self.report.outcome in PASSES


def collect(
    project: Project, directory: Path, options: CollectOptions, now: datetime, progress: Progress
) -> KitResult:
    """Sign and attach the results of a kit. Raises as `collect_kit`, and UsageError without a key.

    Raises CheckFailedError if the run has no result about the image (`infrastructure`, `not-tested`),
    StatementError if the host's evidence lacks the GPU of the suite. Then the nonce is not spent.
    """
    nonces = nonce_store(project, options.nonce_dir)
    signed = earlier = unsettled(nonces, directory)
    if signed is None:
        copied = options.nonce_dir is not None
        kit = collect_kit(directory, nonces, now, project.environ, again=copied)
        reference = _image_source(project, kit.report, kit.reference, options.registry)
        if copied and (before := _signed_before(project, kit.report, reference, now)):
            verdict, attached = before
            promotion = _promote_kit(project, verdict.report, reference, options, now, progress)
            return KitResult(verdict=verdict, attached=attached, again=True, promotion=promotion)
        check_open(nonces.look(kit.report.nonce), now)
        with project.layout.in_use(progress):
            write_unsigned_report(project, kit.report, None)
        signed = _sign_kit(project, kit, nonces, now)
    verdict = signed[0].verdict
    reference = _image_source(project, verdict.report, signed[1], options.registry)
    attached = attach_signed(project, signed[0], reference, progress)
    promotion = _promote_kit(project, verdict.report, reference, options, now, progress)
    nonces.settle(verdict.report.nonce)  # last: if tags could not be moved, the same call can be repeated
    return KitResult(verdict=verdict, attached=attached, again=earlier is not None, promotion=promotion)


def _promote_kit(
    project: Project,
    report: GpuReport,
    reference: ImageReference | None,
    options: CollectOptions,
    now: datetime,
    progress: Progress,
) -> PromotionResult | None:
    if not options.promote:
        return None
    return _promote(
        project, _target(project, report, "so its tags cannot be moved"), reference, now, progress
    )


def _signed_before(
    project: Project, report: GpuReport, reference: ImageReference | None, now: datetime
) -> tuple[Verdict, tuple[str, ...]] | None:
    """Return the attached verdict of this run, and the places that have it; None if there is none.

    A named nonce directory may be a copy, as in CI jobs, so it does not know all spent nonces. Raises
    NonceError (replayed) if the verdict is for another result.
    """
    key = signing_key(project, now)
    keys = {key.keyid: key.public} if key else {}
    keys |= {trusted.keyid: trusted.public for trusted in read_trust(project.settings.files).keys}
    verdicts: dict[str, Verdict] = {}
    for repo, subject in places_of(project, report.subject, reference):
        if verdict := read_signed(repo, subject.manifest, keys).get(report.nonce):
            verdicts[subject_name(repo)] = verdict
            if _result_of(verdict.report) != _result_of(report):
                raise NonceError(
                    "nonce-replayed",
                    f"the nonce {report.nonce} was used for another result",
                    hint="create a new kit: each kit gives one verdict",
                )
    return (next(iter(verdicts.values())), tuple(verdicts)) if verdicts else None


def _result_of(report: GpuReport) -> GpuReport:
    """Return the report without the fields that this imagefactory derived."""
    return replace(report, outcome=Outcome.NOT_TESTED, reason="", contradictions=())


def unsettled(nonces: NonceStore, directory: Path) -> tuple[SignedVerdict, str] | None:
    """Return the verdict that an earlier call signed and could not attach, and the kit's reference."""
    try:
        data = nonces.unsettled(read_nonce(directory))
    except NonceError:
        return None
    return parse_signed(data) if data else None


def _sign_kit(access: Access, kit: KitReport, nonces: NonceStore, now: datetime) -> tuple[SignedVerdict, str]:
    """Sign the report of a kit and spend its nonce. Return the verdict and the kit's reference."""
    report = kit.report
    if not signable(report):
        raise CheckFailedError(
            "kit-not-signable",
            f"{report.outcome}: {report.reason}",
            hint="run the kit again, on the same or another machine",
        )
    key = signing_key(access, now)
    if key is None:
        raise UsageError(
            "kit-key-missing",
            "no signing key on this machine, so the kit's result cannot be signed",
            hint="run imagefactory key create NAME, or set IMAGEFACTORY_SIGNING_KEY to the file of a key",
        )
    days = read_trust(access.settings.files).policy.days
    signed = sign(report, key, now=now, days=jittered_expiry(report, days))
    data = format_signed(signed, kit.reference)
    nonces.spend(report.nonce, kit.run, result=digest_of({"signed": data}), now=now, signed=data)
    return signed, kit.reference


def format_signed(signed: SignedVerdict, reference: str) -> bytes:
    texts = {
        "envelope": signed.envelope.decode("ascii"),
        "test_result": signed.test_result.decode("ascii"),
        "reference": reference,
    }
    return json.dumps(texts, sort_keys=True).encode()


def parse_signed(data: bytes) -> tuple[SignedVerdict, str]:
    """Return the verdict and its reference. Raises StatementError if this program did not sign it."""
    texts = json.loads(data)
    envelope, test_result = texts["envelope"].encode("ascii"), texts["test_result"].encode("ascii")
    opened = parse_envelope(envelope, "the nonce store")
    verdict = parse_verdict(opened.payload, "the nonce store", opened.keyid)
    signed = SignedVerdict(verdict=verdict, envelope=envelope, test_result=test_result)
    return signed, str(texts["reference"])


def _image_source(
    project: Project, report: GpuReport, reference: str, registry: str
) -> ImageReference | None:
    """Return where the image is besides the store: in the named registry, else in the kit's registry."""
    if not registry:
        return parse_reference(reference) if reference else None
    target = _target(project, report, "so its repository is not known")
    host, path = registry_place(project, registry)
    return ImageReference(
        registry=host, repository=repository_of(path, target.family), digest=report.subject.index
    )


def _target(project: Project, report: GpuReport, reason: str) -> Target:
    target = project.target(report.subject.target)
    if target is None:
        raise UsageError(
            "target-not-in-project",
            f"this project has no target '{report.subject.target}', {reason}",
            hint="collect it in the project that created the kit (-C DIR), or omit --registry and --promote",
        )
    return target
