"""From what a person names to a report of the GPU suite, and from a report to a verdict.

    subjects.choose_image -> verify_image -> sign_report -> verdicts.attach_signed, promote

Without a GPU on this machine nothing is fetched, unpacked or started.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.errors import StatementError, UsageError
from imagefactory.factory import Factory
from imagefactory.files import replace_text
from imagefactory.model import Outcome
from imagefactory.oci.model import Image, Sif
from imagefactory.progress import Progress
from imagefactory.settings.choices import ENGINES
from imagefactory.subjects import Chosen, check_name, choose_image
from imagefactory.verify.evidence import LocalEvidence
from imagefactory.verify.model import FULL, Evidence, GpuReport, Hardware, Subject
from imagefactory.verify.nonces import NONCE_BYTES, Ledger, Run, format_nonce
from imagefactory.workflow import ready_runner

if TYPE_CHECKING:
    from imagefactory.promoting import Promotion
    from imagefactory.verify.keys import SigningKey
    from imagefactory.verify.runners.protocol import Runner
    from imagefactory.verify.statement import Signed
    from imagefactory.verify.suite.gpu.context import Predicted


_HERE = LocalEvidence()


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a verification needs of this machine. `runner` is None for the one that is asked for by name."""

    evidence: Evidence = _HERE
    clock: Callable[[], datetime] = _now
    random: Callable[[int], bytes] = os.urandom
    runner: Runner | None = None


# --- the run -------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One verification. `attached` are the places that have the verdict, `promotion` what became of tags."""

    chosen: Chosen
    report: GpuReport
    path: Path
    signed: SignedReport
    attached: tuple[str, ...] = ()
    promotion: Promotion | None = None

    @property
    def verified(self) -> bool:
        return self.report.outcome is Outcome.VERIFIED


def verify_target(
    factory: Factory, name: str, options: VerifyOptions, bench: Bench, progress: Progress
) -> Verified:
    """All of it, for one name. Raises NoGpuError where this machine has no GPU, and fetches nothing then."""
    from imagefactory.promoting import Promoting, promote
    from imagefactory.verdicts import attach_signed, local_place, place_of

    check_name(factory, name)
    bench.evidence.read()
    key = signing_key(factory)
    if options.promote and key is None:
        raise UsageError(
            "--promote needs a verdict, and no key signs here", hint="imagefactory keys new NAME"
        )
    if options.output:
        check_output(options.output)
    chosen = choose_image(factory, name, options.registry, progress)
    target, where = chosen.definition.target, chosen.where
    report = verify_image(factory, chosen, options, bench, progress)
    path = keep_report(factory, report, options.output)
    signed = sign_report(factory, report, key, bench.clock())
    attached = attach_signed(factory, signed.signed, where, progress) if signed.signed else ()
    moved = None
    if options.promote and signed.signed:
        place = place_of(factory, where) if where else local_place(factory, target.family)
        moved = promote(factory, Promoting(target=target, place=place, now=bench.clock()), progress)
    return Verified(
        chosen=chosen, report=report, path=path, signed=signed, attached=attached, promotion=moved
    )


def predicted_of(
    factory: Factory, chosen: Chosen, hardware: Hardware | None, progress: Progress
) -> dict[str, Predicted]:
    """What a scan of the image lets one expect, by capability."""
    from imagefactory.gpu.capability import parse_capability
    from imagefactory.inspection import inspect_made
    from imagefactory.verify.predicted import predict_coverage

    contents = inspect_made(factory, chosen.made, progress).contents
    here = [parse_capability(gpu.capability) for gpu in hardware.gpus] if hardware else []
    return predict_coverage(contents, here)


def verify_image(
    factory: Factory, chosen: Chosen, options: VerifyOptions, bench: Bench, progress: Progress
) -> GpuReport:
    """Runs the GPU suite in the image on this machine.

    Raises NoGpuError where the machine shows no GPU, before anything is started. The nonce is issued here and
    spent by `sign_report`.
    """
    from imagefactory.verify.gpu import GpuAsk, GpuTrial, verify_gpu
    from imagefactory.verify.smoke import suite_digest

    hardware = bench.evidence.read()
    name = runner_name(factory, chosen.made, options.runner)
    nonce = format_nonce(bench.random(NONCE_BYTES))
    run = Run(subject=chosen.subject, suite=suite_digest(), level=options.level)
    with factory.layout.in_use(progress):
        ledger(factory).issue(nonce, run, bench.clock())
        ask = GpuAsk(
            nonce=nonce,
            level=options.level,
            capability=options.capability,
            predicted=predicted_of(factory, chosen, hardware, progress),
            visible=factory.environ.get("CUDA_VISIBLE_DEVICES", ""),
        )
        runner, made = bench.runner, chosen.made
        if runner is None:
            runner, made = ready_runner(factory, made, name, chosen.definition.target.name, progress)
        trial = GpuTrial(
            made=made,
            subject=chosen.subject,
            definition=chosen.definition,
            ask=ask,
            runner=name,
            hardware=hardware,
        )
        with progress.stage(f"{chosen.definition.target.name}: GPU suite ({options.level}), by {name}"):
            return verify_gpu(trial, runner, bench.clock)


def runner_name(factory: Factory, made: Image | Sif, asked: str) -> str:
    """The runner that was asked for, else the setting's, else what fits."""
    wanted = asked or factory.settings.runner.value
    if isinstance(made, Sif):
        if wanted not in ("", "apptainer"):
            raise UsageError(f"{wanted} starts no .sif files", hint="--runner apptainer")
        return "apptainer"
    return wanted or ENGINES[factory.settings.engine.value].runner


def ledger(factory: Factory) -> Ledger:
    """The nonces of this store."""
    return Ledger(factory.layout.path / "nonces")


def check_output(path: Path) -> None:
    """Raises UsageError where no report can be written: before minutes of work, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"--output: {path} cannot be written: {error.strerror}", hint="name another file"
        ) from error


def keep_report(factory: Factory, report: GpuReport, output: Path | None) -> Path:
    """Writes the unsigned report beside and renames it; without `output` into the store, by its nonce."""
    from imagefactory.files import explain_full_disk
    from imagefactory.verify.report import format_gpu_report

    path = output or factory.layout.path / "reports" / f"{report.nonce}.json"
    data = json.dumps(format_gpu_report(report), indent=1) + "\n"
    with explain_full_disk(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, data)
    return path


# --- from a report to a verdict ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedReport:
    """`signed` is None where the report stays one; `why` says so in a line."""

    signed: Signed | None
    why: str


def signing_key(factory: Factory) -> SigningKey | None:
    """The key that signs on this machine, None where it holds none. Raises for one that cannot be used."""
    from imagefactory.verify.keys import find_key, read_signing_key

    path = find_key(factory.settings.signing_key.value, factory.environ)
    return read_signing_key(path) if path else None


def sign_report(factory: Factory, report: GpuReport, key: SigningKey | None, now: datetime) -> SignedReport:
    """Spends the nonce of a run of this machine and signs its report.

    What cannot be signed (no key, no run on a GPU that the host knows) stays a report. Raises NonceError.
    """
    from imagefactory.verify.envelope import format_json
    from imagefactory.verify.report import format_gpu_report
    from imagefactory.verify.statement import SIGNABLE, sign
    from imagefactory.verify.trust import read_trust

    if report.outcome not in SIGNABLE:
        return SignedReport(signed=None, why=f"unsigned: '{report.outcome}' says nothing of the image")
    if key is None:
        return SignedReport(signed=None, why="unsigned: no key (imagefactory keys new NAME)")
    run = Run(subject=report.subject, suite=report.suite, level=report.level)
    result = hashlib.sha256(format_json(format_gpu_report(report))).hexdigest()
    days = read_trust(factory.settings.files).policy.days
    try:
        signed = sign(report, key, now=now, days=days)
    except StatementError as error:
        return SignedReport(signed=None, why=f"unsigned: {error.message}")
    ledger(factory).spend(report.nonce, run, result=f"sha256:{result}", now=now)
    return SignedReport(signed=signed, why=f"signed by '{key.name}'")


# --- kits ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KitPlace:
    """Where a kit is written, and the ledger that remembers its nonce: None for the store's."""

    folder: Path
    ledger: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KitWritten:
    """A kit: its nonce, for which image, where that can be pulled, and until when it can be collected."""

    subject: Subject
    reference: str
    nonce: str
    ledger: Path
    expires: datetime


def write_kit(
    factory: Factory, name: str, options: VerifyOptions, place: KitPlace, progress: Progress
) -> KitWritten:
    """Writes a kit for the image that `name` means. Nothing is run, so this machine needs no GPU.

    Of the options, those of what is asked count. Raises UsageError where the folder holds something.
    """
    from imagefactory.oci.sif import kept_sifs
    from imagefactory.publish import open_registry
    from imagefactory.verify.gpu import GpuAsk, ask_gpu, suite_argv, timeout_of
    from imagefactory.verify.kit.make import KitOrder, make_kit

    chosen = choose_image(factory, name, options.registry, progress)
    definition, where = chosen.definition, chosen.where
    with factory.layout.in_use(progress):
        predicted = predicted_of(factory, chosen, None, progress)
    nonce = format_nonce(os.urandom(NONCE_BYTES))
    ask = GpuAsk(nonce=nonce, level=options.level, capability=options.capability, predicted=predicted)
    order = KitOrder(
        subject=chosen.subject,
        made=chosen.made,
        asked=ask_gpu(definition, ask),
        argv=suite_argv(definition),
        waive=definition.target.waive,
        timeout=timeout_of(options.level),
        reference=str(where) if where else "",
        plain_http=open_registry(factory, where.registry).plain if where else False,
        sifs=tuple(
            kept.found.file.digest
            for kept in kept_sifs(factory.layout, chosen.subject.manifest)
            if isinstance(kept.found, Sif)
        ),
    )
    kept = Ledger(place.ledger) if place.ledger else ledger(factory)
    issued = make_kit(place.folder, order, kept, _now())
    return KitWritten(
        subject=chosen.subject,
        reference=order.reference,
        nonce=nonce,
        ledger=kept.folder,
        expires=issued.expires,
    )
