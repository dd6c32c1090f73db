"""The GPU suite in an image on this machine, and the report of it.

Without a GPU nothing is fetched, unpacked or started.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.actions.images import PromotionRequest
from imagefactory.actions.inspect import inspect_artifact
from imagefactory.actions.promote import PromotionResult, promote
from imagefactory.actions.resolve import ResolvedImage, resolve_image
from imagefactory.actions.runner import make_runner, scratch_directory
from imagefactory.actions.verdicts import (
    attach_signed,
    local_place,
    nonce_store,
    place_of,
    places_of,
    read_signed,
    signing_key,
    subject_name,
)
from imagefactory.errors import CheckFailedError, UsageError, os_problem
from imagefactory.fs import explain_full_disk, replace_text
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.capability import parse_capability
from imagefactory.model import Outcome, Target
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.sif import stored_sifs
from imagefactory.oci.store import ImageReference, parse_reference
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.emulator import check_not_emulated
from imagefactory.runtime.protocol import Runner
from imagefactory.settings.choices import ENGINES
from imagefactory.suite.gpu.context import Predicted
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.keys import SigningKey
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
    GpuRequest,
    GpuTrial,
    check_level,
    gpu_expectations,
    predict_coverage,
    suite_argv,
    timeout_of,
    unusable_gpus_note,
    verify_gpu,
)
from imagefactory.verify.kits import KitReport, KitRequest, collect_kit, make_kit, read_nonce
from imagefactory.verify.nonces import (
    NONCE_BYTES,
    NonceError,
    NonceStore,
    NonceSubject,
    check_open,
    format_nonce,
)
from imagefactory.verify.report import FULL, Evidence, GpuReport, Hardware, VerifiedImage, format_gpu_report
from imagefactory.verify.suite_files import digest_of, suite_digest

_LOCAL_EVIDENCE = LocalEvidence()


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyDependencies:
    """What a verification needs of this machine. `runner` is None for the one that is asked for by name."""

    evidence: Evidence = _LOCAL_EVIDENCE
    clock: Callable[[], datetime] = utc_now
    random: Callable[[int], bytes] = os.urandom
    runner: Runner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """`runner` is empty for the setting, or for what fits. `capability` must be that of the GPU, if given.

    The verdict goes to the store and, with `registry` (`host[/path]`), there too. `output` is where the
    report goes, None for the store's own place.
    """

    level: str = FULL
    runner: str = ""
    capability: str = ""
    registry: str = ""
    promote: bool = False
    output: Path | None = None


def predicted_of(
    access: Access, chosen: ResolvedImage, hardware: Hardware | None, progress: Progress
) -> dict[str, Predicted]:
    """What a scan of the image lets one expect, by capability."""
    contents = inspect_artifact(access, chosen.made, progress).contents
    here = [parse_capability(gpu.capability) for gpu in hardware.gpus] if hardware else []
    return predict_coverage(contents, here)


def verify_image(
    access: Access,
    chosen: ResolvedImage,
    options: VerifyOptions,
    bench: VerifyDependencies,
    progress: Progress,
) -> GpuReport:
    """Runs the GPU suite in the image on this machine.

    Raises NoGpuError where the machine shows no GPU, ToolError for an image of another processor, UsageError
    for a level that it cannot be asked, before anything is started. The nonce is issued here and spent by
    `sign_report`.
    """
    check_level(chosen.definition, options.level)
    if isinstance(chosen.made, Image):
        check_not_emulated(chosen.made.name, chosen.made.architecture)
    hardware = bench.evidence.read()
    if lost := unusable_gpus_note(hardware):
        progress.note(lost.removeprefix("; "))
    name = runner_name(access, chosen.made, options.runner)
    nonce = format_nonce(bench.random(NONCE_BYTES))
    run = NonceSubject(subject=chosen.subject, suite=suite_digest(), level=options.level)
    with access.layout.in_use(progress):
        nonce_store(access).issue(nonce, run, bench.clock())
        ask = GpuRequest(
            nonce=nonce,
            level=options.level,
            capability=options.capability,
            predicted=predicted_of(access, chosen, hardware, progress),
            environ=access.environ,
        )
        runner, made = bench.runner, chosen.made
        if runner is None:
            runner = make_runner(access, name, chosen.definition.target.name, progress)
            runner.require()
            made = runner.prepare(made, checked=True)
        trial = GpuTrial(
            made=made,
            subject=chosen.subject,
            definition=chosen.definition,
            ask=ask,
            runner=name,
            hardware=hardware,
        )
        with progress.stage(f"{chosen.definition.target.name}: GPU suite ({options.level}), by {name}"):
            return verify_gpu(trial, runner, bench.clock, scratch=scratch_directory(access, name))


def runner_name(access: Access, made: Image | SifArtifact, asked: str) -> str:
    """The runner that was asked for, else the setting's, else what fits."""
    wanted = asked or access.settings.runner.value
    if isinstance(made, SifArtifact):
        if wanted not in ("", "apptainer"):
            raise UsageError(
                "runner-no-sif", f"{wanted} cannot start .sif files", hint="pass --runner apptainer"
            )
        return "apptainer"
    return wanted or ENGINES[access.settings.engine.value].runner


def check_output(path: Path) -> None:
    """Raises UsageError where no report can be written: before minutes of work, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            *os_problem("write", path, error), hint="choose another file: --output FILE"
        ) from error


def write_unsigned_report(access: Access, report: GpuReport, output: Path | None) -> Path:
    """Writes the unsigned report beside and renames it; without `output` into the store, by its nonce."""
    path = output or access.layout.path / "reports" / f"{report.nonce}.json"
    data = json.dumps(format_gpu_report(report), indent=1) + "\n"
    with explain_full_disk(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, data)
    return path


# --- Kits: written for a machine that has a GPU and no factory; what came back made into a verdict and
# attached
#     write_kit ... verify.kit_collect -> sign, spend the nonce -> attach_signed, promote
# The nonce is spent before anything is attached, and what was signed is kept with it until it has arrived.
# So a
# call that was killed or met a registry that was down is simply made again; it signs nothing a second time.


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """`ledger` is the folder that issued the nonces, None for the store's.

    `registry` (`host[/path]`) is where verdicts go beside the store; empty for where the kit's image was to
    be pulled from. With `promote` tags follow.
    """

    ledger: Path | None = None
    registry: str = ""
    promote: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KitResult:
    """A kit's verdict, where it is attached now, and what became of tags. `again`: it was signed before."""

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
    factory: Project, folder: Path, options: CollectOptions, now: datetime, progress: Progress
) -> KitResult:
    """All of it, for one kit. Raises as `collect_kit` does, and UsageError where no key signs here.

    CheckFailedError where the run says nothing of the image (`infrastructure`, `not-tested`), StatementError
    where the host's evidence does not show the GPU that the suite met: then nothing is spent.
    """
    kept = nonce_store(factory, options.ledger)
    made = known = unsettled(kept, folder)
    if made is None:
        travels = options.ledger is not None
        collected = collect_kit(folder, kept, now, factory.environ, again=travels)
        where = _image_source(factory, collected.report, collected.reference, options.registry)
        if travels and (before := _signed_before(factory, collected.report, where, now)):
            verdict, attached = before
            moved = _promote(factory, verdict.report, where, now, progress) if options.promote else None
            return KitResult(verdict=verdict, attached=attached, again=True, promotion=moved)
        check_open(kept.look(collected.report.nonce), now)
        with factory.layout.in_use(progress):
            write_unsigned_report(factory, collected.report, None)
        made = sign_kit(factory, collected, kept, now)
    signed, reference = made
    report = signed.verdict.report
    where = _image_source(factory, report, reference, options.registry)
    attached = attach_signed(factory, signed, where, progress)
    moved = _promote(factory, report, where, now, progress) if options.promote else None
    kept.settle(report.nonce)  # last: where tags could not be moved, the same call can be made again
    return KitResult(verdict=signed.verdict, attached=attached, again=known is not None, promotion=moved)


def _promote(
    factory: Project, report: GpuReport, where: ImageReference | None, now: datetime, progress: Progress
) -> PromotionResult:
    target = _target(factory, report, "so its tags cannot be moved")
    place = place_of(factory, where) if where else local_place(factory, target.family)
    return promote(factory, PromotionRequest(target=target, place=place, now=now), progress)


def _signed_before(
    factory: Project, report: GpuReport, where: ImageReference | None, now: datetime
) -> tuple[Verdict, tuple[str, ...]] | None:
    """The verdict of this very run that lies by its image already, and the places that have it.

    A ledger that is named may be a copy, as jobs of CI get one each time: it does not always know what became
    of its nonces. Raises NonceError (replayed) if the verdict is of another result.
    """
    key = signing_key(factory, now)
    keys = {key.keyid: key.public} if key else {}
    keys |= {one.keyid: one.public for one in read_trust(factory.settings.files).keys}
    there: dict[str, Verdict] = {}
    for place, subject in places_of(factory, report.subject, where):
        if verdict := read_signed(place, subject.manifest, keys).get(report.nonce):
            there[subject_name(place)] = verdict
            if _result_of(verdict.report) != _result_of(report):
                raise NonceError(
                    "nonce-replayed",
                    f"the nonce {report.nonce} was spent on another result",
                    hint="one kit gives one verdict: make a new one",
                )
    return (next(iter(there.values())), tuple(there)) if there else None


def _result_of(report: GpuReport) -> GpuReport:
    """What the machine brought back, without what this imagefactory made of it."""
    return replace(report, outcome=Outcome.NOT_TESTED, reason="", contradictions=())


def unsettled(ledger: NonceStore, folder: Path) -> tuple[SignedVerdict, str] | None:
    """What an earlier call signed for this kit and could not attach, and the kit's reference; mostly None."""
    try:
        data = ledger.unsettled(read_nonce(folder))
    except NonceError:
        return None
    return parse_signed(data) if data else None


def sign_kit(
    access: Access, collected: KitReport, ledger: NonceStore, now: datetime
) -> tuple[SignedVerdict, str]:
    """Signs what a kit brought back, and spends its nonce on that; gives the kit's reference too."""
    report = collected.report
    if not signable(report):
        raise CheckFailedError(
            "kit-not-signable",
            f"{report.outcome}: {report.reason}",
            hint="nothing was signed; run the kit again, on that machine or another",
        )
    days = read_trust(access.settings.files).policy.days
    signed = sign(report, _key(access, now), now=now, days=jittered_expiry(report, days))
    data = format_signed(signed, collected.reference)
    ledger.spend(report.nonce, collected.run, result=digest_of({"signed": data}), now=now, signed=data)
    return signed, collected.reference


def format_signed(signed: SignedVerdict, reference: str) -> bytes:
    texts = {
        "envelope": signed.envelope.decode("ascii"),
        "test_result": signed.test_result.decode("ascii"),
        "reference": reference,
    }
    return json.dumps(texts, sort_keys=True).encode()


def parse_signed(data: bytes) -> tuple[SignedVerdict, str]:
    """Raises StatementError for what this program did not sign."""
    texts = json.loads(data)
    envelope, test_result = texts["envelope"].encode("ascii"), texts["test_result"].encode("ascii")
    opened = parse_envelope(envelope, "the ledger")
    verdict = parse_verdict(opened.payload, "the ledger", opened.keyid)
    signed = SignedVerdict(verdict=verdict, envelope=envelope, test_result=test_result)
    return signed, str(texts["reference"])


def _key(access: Access, now: datetime) -> SigningKey:
    key = signing_key(access, now)
    if key is None:
        raise UsageError(
            "kit-key-missing",
            "no signing key on this machine, so the kit's result cannot be signed",
            hint="imagefactory keys new NAME, or set IMAGEFACTORY_SIGNING_KEY to the file of a key",
        )
    return key


def _image_source(
    factory: Project, report: GpuReport, reference: str, registry: str
) -> ImageReference | None:
    """Where the image lies beside the store: the registry that is named, else that of the kit."""
    if not registry:
        return parse_reference(reference) if reference else None
    target = _target(factory, report, "so its repository is not known")
    host, path = registry_place(factory, registry)
    return ImageReference(
        registry=host, repository=repository_of(path, target.family), digest=report.subject.index
    )


def _target(factory: Project, report: GpuReport, why: str) -> Target:
    name = report.subject.target
    target = next((one for one in factory.targets if one.name == name), None)
    if target is None:
        raise UsageError(
            "target-not-in-project",
            f"this project has no target '{name}', {why}",
            hint="collect it in the project that created the kit (-C DIR), or omit --registry and --promote",
        )
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class KitDestination:
    """Where a kit is written, and the ledger that remembers its nonce: None for the store's."""

    folder: Path
    ledger: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KitFiles:
    """A kit: its nonce, for which image, where that can be pulled, and until when it can be collected."""

    subject: VerifiedImage
    reference: str
    nonce: str
    ledger: Path
    expires: datetime


def write_kit(
    factory: Project, name: str, options: VerifyOptions, place: KitDestination, progress: Progress
) -> KitFiles:
    """Writes a kit for the image that `name` means. Nothing is run, so this machine needs no GPU.

    Of the options, those of what is asked count. Raises UsageError where the folder holds something.
    """
    chosen = resolve_image(factory, name, options.registry, progress)
    definition, where = chosen.definition, chosen.where
    if rocm_of(definition.target.cuda):
        raise UsageError(
            "amd-not-supported",
            f"{definition.target.name} is for AMD GPUs, and kits support only NVIDIA GPUs",
            hint="run imagefactory verify on the machine itself",
        )
    check_level(definition, options.level)
    with factory.layout.in_use(progress):
        predicted = predicted_of(factory, chosen, None, progress)
    nonce = format_nonce(os.urandom(NONCE_BYTES))
    ask = GpuRequest(nonce=nonce, level=options.level, capability=options.capability, predicted=predicted)
    order = KitRequest(
        subject=chosen.subject,
        made=chosen.made,
        asked=gpu_expectations(definition, ask),
        argv=suite_argv(definition),
        waive=definition.target.waive,
        timeout=timeout_of(options.level),
        reference=str(where) if where else "",
        plain_http=open_registry(factory, where.registry).plain if where else False,
        sifs=tuple(
            kept.found.file.digest
            for kept in stored_sifs(factory.layout, chosen.subject.manifest)
            if isinstance(kept.found, SifArtifact)
        ),
    )
    kept = nonce_store(factory, place.ledger)
    issued = make_kit(place.folder, order, kept, utc_now())
    return KitFiles(
        subject=chosen.subject,
        reference=order.reference,
        nonce=nonce,
        ledger=kept.folder,
        expires=issued.expires,
    )
