"""Verdicts, tags and mended lists as a person reads them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from imagefactory.serialize import format_time
from imagefactory.model import CheckState
from imagefactory.views.text import format_table
from imagefactory.report.verify import gpus_of
from imagefactory.actions.promote import Promotion
from imagefactory.stages.revoke import Revoke
from imagefactory.trust.claims import SOON, ProofAges
from imagefactory.verdicts.found import Found
from imagefactory.trust.verdict import Judged, RevokedCell, Standing, Verdict
from imagefactory.verdicts.reconcile import Reconciled

_HEADER = (
    "OUTCOME", "VALID", "CAPABILITY", "GPU", "DRIVER", "SUITE", "CHECKS", "SIGNED BY", "EVIDENCE",
    "ISSUED", "EXPIRES", "VERDICT",
)  # fmt: skip
_DROP = ("SUITE", "EVIDENCE", "ISSUED", "CHECKS", "SIGNED BY", "VERDICT", "GPU")


def format_ages(ages: ProofAges) -> str:
    """`oldest verdict of 2026-09-01; 3 expire within 14 days`."""
    if ages.oldest is None:
        return "no valid verdict"
    soon = f"{ages.lapsing} expire{'s' if ages.lapsing == 1 else ''} within {SOON.days} days"
    return f"oldest verdict of {ages.oldest:%Y-%m-%d}; {soon}"


def format_verdicts(
    images: Sequence[Found], keys: Mapping[str, str], width: int | None = None, *, numbers: bool = False
) -> str:
    """A table for each image; `keys` gives names of keys by their ids. With `numbers` every check too."""
    return "\n\n".join(_image(image, keys, width, numbers=numbers) for image in images)


def _image(image: Found, keys: Mapping[str, str], width: int | None, *, numbers: bool) -> str:
    tags = f"  ({', '.join(image.tags)})" if image.tags else ""
    lines = [f"{image.place}@{image.subject.index}{tags}"]
    if not image.judged:
        lines.append("no verdict holds" if image.revoked else "not-tested: no verdict")
    else:
        lines.append(format_table(_HEADER, [_row(judged, keys) for judged in image.judged], width, _DROP))
    lines += [
        f"{short(judged.name)} {judged.standing}: {judged.why}"
        for judged in image.judged
        if judged.standing is not Standing.GOOD
    ]
    lines += [f"{row.where}: {row.said}" for row in image.revoked]
    lines += [f"not heeded: {why}" for why in image.ignored]
    if numbers:
        for judged in image.judged:
            lines += _checks(judged, width)
    return "\n".join(lines)


def revoked_json(row: RevokedCell) -> dict[str, object]:
    """Who took what back, when and why, for programs. The capability is null for all GPUs."""
    return {
        "digest": row.subject.index,
        "manifest": row.subject.manifest,
        "capability": row.capability or None,
        "by": row.by,
        "keyid": row.keyid,
        "when": format_time(row.when),
        "why": row.why,
    }


def _row(judged: Judged, keys: Mapping[str, str]) -> tuple[str, ...]:
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


def _valid(judged: Judged) -> str:
    """`yes` where the verdict counts, whatever its outcome is, else why it does not."""
    return "yes" if judged.standing is Standing.GOOD else judged.standing.value


def passed(verdict: Verdict) -> str:
    """`17 of 18`: the checks that passed of those that apply."""
    states = [check.state for check in verdict.report.checks]
    apply = [state for state in states if state is not CheckState.NOT_APPLICABLE]
    return f"{apply.count(CheckState.PASSED)} of {len(apply)}"


def _checks(judged: Judged, width: int | None) -> list[str]:
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
    table = format_table(("CHECK", "STATE", "TIME", "NUMBERS"), rows, width, ("TIME",))
    said = [f"contradicts the prediction: {one}" for one in report.contradictions]
    return ["", f"{short(judged.name)}: {report.reason or report.outcome.value}", *said, table]


def short(digest: str) -> str:
    """The first 12 hex digits."""
    return digest.removeprefix("sha256:")[:12]


def format_promotion(promotion: Promotion, width: int | None = None, *, dry_run: bool = False) -> str:
    """One line a tag: where it points to now, and why."""
    failed = {tag for tag, _ in promotion.faults}
    rows = []
    for fate in promotion.fates:
        if fate.missing and fate.wanted != fate.before and not (fate.moved and fate.tag in failed):
            what = "waits" if not fate.moved else "removed, waits"
        elif fate.missing and not fate.moved:
            what = "not approved"
        elif not fate.moved:
            what = "stays" if fate.before else "not set"
        elif fate.tag in failed:
            what = "cannot be removed" if not fate.after else "cannot be moved"
        else:
            what = ("would be " if dry_run else "") + ("moved" if fate.after else "removed")
        there = fate.before if fate.tag in failed else fate.after
        rows.append((fate.tag, what, short(there) or "-", fate.why))
    return f"{promotion.target} in {promotion.place}\n" + format_table(
        ("TAG", "", "IMAGE", "WHY"), rows, width
    )


def format_revoke(revoked: Revoke) -> str:
    """What was taken back, by which statement."""
    taken = ", ".join(short(one) for one in revoked.taken)
    return f"{revoked.place}@{revoked.subject.manifest}\n  revoked {taken}\n  by {revoked.digest}"


def format_reconciled(done: Sequence[Reconciled]) -> str:
    """One line a repository."""
    lines = []
    for repository in done:
        said = [f"{repository.listed} listed"]
        said += [f"{len(repository.mended)} mended"] if repository.mended else []
        said += [f"{repository.gone} of images that are gone"] if repository.gone else []
        said += [f"{repository.expired} expired"] if repository.expired else []
        said += [f"{repository.damaged} damaged lines of the journal dropped"] if repository.damaged else []
        lines.append(f"{repository.place}: {', '.join(said)}")
    return "\n".join(lines or ["nothing was attached from here"])
