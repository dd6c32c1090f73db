"""Runs of the GPU suite, verdicts, promotions and repairs as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from imagefactory.actions.promote import PromotionResult, RevokeResult
from imagefactory.model import CheckResult, CheckState, Outcome
from imagefactory.progress import format_bytes
from imagefactory.serialize import format_time
from imagefactory.trust.attached import RepairResult
from imagefactory.trust.claims import SOON, VerdictAges
from imagefactory.trust.judgement import VerdictSet
from imagefactory.trust.verdict import RevokedCell, Verdict, VerdictStatus, VerificationResult
from imagefactory.verify.report import NODES, SEVERAL, GpuReport
from imagefactory.views.text import format_fields, format_table, wrap

# --- Runs of the GPU suite


WIDTH, MIN_WIDTH = 110, 60
_MARK = {
    CheckState.PASSED: "passed",
    CheckState.FAILED: "FAILED",
    CheckState.NOT_APPLICABLE: "not applicable",
    CheckState.NOT_RUN: "not run",
}
_LATENCY = re.compile(r"(?P<model>.+)-(?P<device>cpu|gpu)-(?P<engine>.+)-(?P<percent>p50|p95)-ms")


def format_gpu_run(report: GpuReport, width: int | None = None) -> str:
    """Return the GPU, the checks, the latencies, and the outcome of a run."""
    room = max(min(width or WIDTH, WIDTH), MIN_WIDTH)
    machine = "\n".join(line for line in (_machine_text(report), forward_note(report)) if line)
    blocks = [machine, format_checks(report.checks, room)]
    if latencies := format_latencies(report.checks):
        blocks.append(latencies)
    blocks.append(_outcome(report, room))
    return "\n\n".join(block for block in blocks if block)


def forward_note(report: GpuReport) -> str:
    """Return which libcuda answered, if it was the image's and not that of the driver, else empty."""
    facts = dict(report.hardware.notes) if report.hardware else {}
    if facts.get("libcuda-source") != "compat":
        return ""
    return f"by forward compatibility: libcuda {facts['libcuda-version']} of the image ({facts['libcuda']})"


def format_checks(checks: Iterable[CheckResult], width: int) -> str:
    """Return each check with its numbers. Latencies are in a separate table."""
    rows = list(checks)
    names = max((len(check.name) for check in rows), default=0)
    lines = []
    for check in rows:
        seconds = f"{check.seconds:.1f} s" if check.seconds else ""
        first = f"{check.name:<{names}}  {_MARK[check.state]:<14}  {seconds:>8}  "
        text = wrap(check.detail, max(width - len(first), 40)) or [""]
        lines.append(f"{first}{text[0]}".rstrip())
        lines += [" " * len(first) + more for more in text[1:]]
        numbers = [format_number(key, value) for key, value in check.numbers if not _LATENCY.fullmatch(key)]
        lines += [" " * len(first) + more for more in wrap(", ".join(numbers), max(width - len(first), 40))]
    return "\n".join(lines)


def format_number(name: str, value: float) -> str:
    """Return a number with its name: `error 1.5e-07`, `elements 30011`, `taken 268.4 MB` for
    `taken-bytes`.
    """
    if name.endswith("-bytes") and 0 <= value < 1e18:
        return f"{name.removesuffix('-bytes')} {format_bytes(int(value))}"
    whole = value.is_integer() and abs(value) < 1e9
    return f"{name} {int(value) if whole else format(value, '.4g')}"


def format_latencies(checks: Iterable[CheckResult]) -> str:
    """Return a table of model latencies in milliseconds by framework and runtime, empty if not measured."""
    latencies: dict[tuple[str, str, str], dict[str, float]] = {}
    for check in checks:
        for key, value in check.numbers:
            if match := _LATENCY.fullmatch(key):
                row = (match["model"], match["engine"], match["device"])
                latencies.setdefault(row, {})[match["percent"]] = value
    rows = [
        (model, engine, device, *(f"{times[key]:.3f}" if key in times else "" for key in ("p50", "p95")))
        for (model, engine, device), times in latencies.items()
    ]
    return format_table(("model", "by", "on", "p50 ms", "p95 ms"), rows) if rows else ""


def _machine_text(report: GpuReport) -> str:
    device, hardware = report.device, report.hardware
    name = report.subject.target or report.subject.manifest
    if report.rehearsal:
        gpu = "a rehearsal on the CPU"
    elif device is None:
        gpu = "no GPU was met"
    else:
        gpu = f"{gpus_of(report)} ({device.capability}, {device.memory / 2**30:.0f} GiB)"
    driver = f", driver {hardware.driver}" if hardware else ""
    cuda = f", CUDA {report.cuda}" if report.cuda else ""
    return f"{name}  {report.level} suite on {gpu}{driver}{cuda}, by {report.runner}"


def gpus_of(report: GpuReport) -> str:
    """Return the GPUs of a report: `NVIDIA A100`, `2 x NVIDIA A100`, `2 nodes with NVIDIA A100`, or `-`."""
    several = {SEVERAL: "x", NODES: "nodes with"}.get(report.level)
    number = f"{report.gpus} {several} " if several and report.gpus else ""
    return f"{number}{report.device.name}" if report.device else "-"


def _outcome(report: GpuReport, width: int) -> str:
    fields = [("outcome", f"{report.outcome}: {report.reason}")]
    fields += [("waived", f"{name} did not run, which the recipe waives") for name in report.waived]
    fields += [("contradiction", text) for text in report.contradictions]
    fields += [("manifest", report.subject.manifest)]
    if report.outcome is Outcome.VERIFIED and report.device and report.hardware:
        holds = f"capability {report.device.row}, driver {report.hardware.driver} and newer"
        fields.append(("valid for", holds))
    name_width = max(len(name) for name, _ in fields) + 2
    folded = [(name, "\n".join(wrap(text, width - name_width))) for name, text in fields]
    return format_fields(folded, indent="")


_HEADER = (
    "OUTCOME", "VALID", "CAPABILITY", "GPU", "DRIVER", "SUITE", "CHECKS", "SIGNED BY", "EVIDENCE",
    "ISSUED", "VALID UNTIL", "VERDICT",
)  # fmt: skip
_DROP = ("SUITE", "EVIDENCE", "ISSUED", "CHECKS", "SIGNED BY", "VERDICT", "GPU")


def format_ages(ages: VerdictAges) -> str:
    """Return `oldest verdict of 2026-09-01; 3 expire within 14 days`."""
    if ages.oldest is None:
        return "no valid verdict"
    soon = f"{ages.expiring} expire{'s' if ages.expiring == 1 else ''} within {SOON.days} days"
    return f"oldest verdict of {ages.oldest:%Y-%m-%d}; {soon}"


def format_verdicts(
    images: Sequence[VerdictSet], keys: Mapping[str, str], width: int | None = None, *, numbers: bool = False
) -> str:
    """Return a table for each image. With `numbers`, every check is included. `keys` are names by key id."""
    return "\n\n".join(_image(image, keys, width, numbers=numbers) for image in images)


def _image(image: VerdictSet, keys: Mapping[str, str], width: int | None, *, numbers: bool) -> str:
    tags = f"  ({', '.join(image.tags)})" if image.tags else ""
    lines = [f"{image.place}@{image.subject.index}{tags}"]
    if not image.judged:
        lines.append("no valid verdict" if image.revoked else "not-tested: no verdict")
    else:
        lines.append(format_table(_HEADER, [_row(judged, keys) for judged in image.judged], width, _DROP))
    lines += [
        f"{short(judged.name)} {judged.standing}: {judged.why}"
        for judged in image.judged
        if judged.standing is not VerdictStatus.GOOD
    ]
    lines += [f"{row.where}: {row.summary}" for row in image.revoked]
    lines += [f"ignored: {reason}" for reason in image.ignored]
    if numbers:
        for judged in image.judged:
            lines += _checks(judged, width)
    return "\n".join(lines)


class RevokedRow(TypedDict):
    """A revocation of an image."""

    digest: str
    manifest: str
    capability: str | None
    """The GPUs that it applies to; null for all."""
    key: str
    """The name of the key that signed it."""
    keyid: str
    revoked: str
    """The time."""
    reason: str


def revoked_json(row: RevokedCell) -> RevokedRow:
    return RevokedRow(
        digest=row.subject.index,
        manifest=row.subject.manifest,
        capability=row.capability or None,
        key=row.by,
        keyid=row.keyid,
        revoked=format_time(row.when),
        reason=row.why,
    )


def _row(judged: VerificationResult, keys: Mapping[str, str]) -> tuple[str, ...]:
    verdict = judged.verdict
    if verdict is None:
        return ("-", _valid(judged), *["-"] * (len(_HEADER) - 3), short(judged.name))
    report = verdict.report
    device, hardware = report.device, report.hardware
    return (
        report.outcome.value,
        _valid(judged),
        device.row if device else "-",
        gpus_of(report),
        hardware.driver if hardware else "-",
        f"{report.level} {short(report.suite)}",
        passed(verdict),
        keys.get(verdict.keyid, f"key {verdict.keyid[:12]}"),
        hardware.kind if hardware else "-",
        f"{verdict.issued:%Y-%m-%d}",
        f"{verdict.expires:%Y-%m-%d}",
        short(judged.name),
    )


def _valid(judged: VerificationResult) -> str:
    """Return `yes` if the verdict counts, whatever its outcome, else the reason why it does not."""
    return "yes" if judged.standing is VerdictStatus.GOOD else judged.standing.value


def passed(verdict: Verdict) -> str:
    """Return `17 of 18`: the number of passed checks, and of checks that apply."""
    states = [check.state for check in verdict.report.checks]
    apply = [state for state in states if state is not CheckState.NOT_APPLICABLE]
    return f"{apply.count(CheckState.PASSED)} of {len(apply)}"


def _checks(judged: VerificationResult, width: int | None) -> list[str]:
    if judged.verdict is None:
        return []
    report = judged.verdict.report
    rows = [
        (
            check.name,
            check.state.value,
            f"{check.seconds:.1f}s",
            ", ".join(f"{name} {number:.6g}" for name, number in check.numbers) or check.detail,
        )
        for check in report.checks
    ]
    table = format_table(("CHECK", "STATUS", "TIME", "NUMBERS"), rows, width, ("TIME",))
    notes = [f"contradicts the prediction: {text}" for text in report.contradictions]
    notes += [forward] if (forward := forward_note(report)) else []
    return ["", f"{short(judged.name)}: {report.reason or report.outcome.value}", *notes, table]


def short(digest: str) -> str:
    """Return the first 12 hex digits of a digest."""
    return digest.removeprefix("sha256:")[:12]


def format_promotion(promotion: PromotionResult, width: int | None = None, *, dry_run: bool = False) -> str:
    """Return a line for each tag: its image and the reason."""
    failed = {tag for tag, _ in promotion.faults}
    rows = []
    for decision in promotion.fates:
        if (
            decision.missing
            and decision.wanted != decision.before
            and not (decision.moved and decision.tag in failed)
        ):
            action_text = "waits" if not decision.moved else "removed, waits"
        elif decision.missing and not decision.moved:
            action_text = "not approved"
        elif not decision.moved:
            action_text = "stays" if decision.before else "not set"
        elif decision.tag in failed:
            action_text = "cannot be removed" if not decision.after else "cannot be moved"
        else:
            action_text = ("would be " if dry_run else "") + ("moved" if decision.after else "removed")
        there = decision.before if decision.tag in failed else decision.after
        rows.append((decision.tag, action_text, short(there) or "-", decision.why))
    return f"{promotion.target} in {promotion.place}\n" + format_table(
        ("TAG", "", "IMAGE", "WHY"), rows, width
    )


def format_revoke(revoked: RevokeResult) -> str:
    """Return the revoked verdicts, and the digest of the revocation."""
    digests = ", ".join(short(digest) for digest in revoked.taken)
    image = f"{revoked.place}@{revoked.subject.manifest}"
    if not revoked.digest:
        return f"{image}\n  would revoke {digests}"
    return f"{image}\n  revoked {digests}\n  by {revoked.digest}"


def format_reconciled(results: Sequence[RepairResult]) -> str:
    """Return a line for each repository."""
    lines = []
    for repository in results:
        parts = [f"{repository.listed} listed"]
        parts += [f"{len(repository.repaired)} repaired"] if repository.repaired else []
        parts += [f"{repository.gone} of images that are gone"] if repository.gone else []
        parts += [f"{repository.expired} expired"] if repository.expired else []
        parts += [f"{repository.damaged} damaged lines of the journal dropped"] if repository.damaged else []
        lines.append(f"{repository.place}: {', '.join(parts)}")
    return "\n".join(lines or ["nothing was attached from here"])
