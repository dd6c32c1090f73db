"""Check a submit file for a pool against an inventory and a catalog. Pure.

    SubmitFile + CheckContext -> check_submit_file() -> SubmitCheckResult

A finding is WRONG if jobs would fail, never start, or run an image that is not verified or may change. It is
ADVICE if there is a better way. Nothing in a file is executed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from imagefactory.errors import UsageError
from imagefactory.extras.lint.classads import literal
from imagefactory.extras.lint.findings import (
    CheckContext,
    FileLocation,
    QueueCheckResult,
    ReachableGpus,
    Severity,
    SubmitCheckResult,
    SubmitFinding,
    advice,
    join_causes,
    wrong,
)
from imagefactory.extras.lint.image import (
    JobImage,
    KnownImage,
    MutableNames,
    catalog_findings,
    find_catalog_image,
    grounds_of,
    image_findings,
    narrow,
    nowhere,
    reached_by,
    read_image,
    revoked_on,
    unused_gpu_request,
    unverified,
)
from imagefactory.extras.lint.reach import UNDEFINED, JobReachability, JobRequest, find_reach, read_request
from imagefactory.extras.lint.reader import QueueStatement, SubmitFile, split_lines
from imagefactory.extras.lint.rules import command_findings, old_gpu_findings, own_name, site_findings
from imagefactory.jobs.offer import ImageEvidence
from imagefactory.schedulers.pool import ImageKind, Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import format_size, image_disk
from imagefactory.trust.verdict import RevokedCell

_FEW = 6


def check_submit_file(file: SubmitFile, around: CheckContext) -> SubmitCheckResult:
    """Return the findings of a file. Raises UsageError, with the line, if a value cannot be expanded."""
    findings = [advice(line, "note", text) for line, text in file.notes]
    if not file.jobs:
        findings.append(
            wrong(1, "no-queue", "the file has no queue line, so it submits no jobs", "add a line queue")
        )
    jobs = []
    for jobs_ in file.jobs:
        try:
            jobs.append(_check(jobs_, around))
        except UsageError as error:
            raise UsageError(
                "submit-value-invalid", f"{file.name}:{jobs_.line}: {error.message}", hint=error.hint
            ) from error
    return SubmitCheckResult(name=file.name, jobs=tuple(jobs), findings=tuple(findings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueueCheck:
    """A `queue` statement and the facts about it. A field is None if the fact is unknown."""

    jobs: QueueStatement
    request: JobRequest
    image: JobImage | None
    known: KnownImage | None
    grounds: ImageEvidence | None
    reach: JobReachability | None
    around: CheckContext


def _check(jobs: QueueStatement, around: CheckContext) -> QueueCheckResult:
    image = read_image(jobs)
    request = read_request(jobs, (image.needs,) if image and image.needs else ())
    images = around.catalog.images if around.catalog else ()
    known = find_catalog_image(image, images) if image else None
    case = _QueueCheck(
        jobs=jobs,
        request=request,
        image=image,
        known=known,
        grounds=grounds_of(known, around),
        reach=find_reach(request, around.inventory) if around.inventory is not None else None,
        around=around,
    )
    reached = tuple(reached_by(case.reach.reached if case.reach else (), case.grounds))
    findings = [
        *command_findings(jobs, request),
        *_old_gpus(case),
        *site_findings(jobs, around.site),
        *_below_site(case),
        *_image_findings(case),
        *_reach_findings(case),
        *_unverified(case, reached),
    ]
    return QueueCheckResult(
        line=jobs.line,
        count=jobs.count,
        image=image.address if image else "",
        target=known.image.target if known else "",
        known=case.reach is not None,
        total=len(case.reach.places) if case.reach else 0,
        reached=reached,
        causes=tuple(case.reach.causes.items()) if case.reach else (),
        gpu=jobs.requests_gpus,
        findings=tuple(findings),
        title=f"queue in line {jobs.line}",
    )


# --- the image -----------------------------------------------------------------------------------


def _old_gpus(case: _QueueCheck) -> Iterator[SubmitFinding]:
    """Report old GPU attributes: WRONG if the pool is known to lack them, else ADVICE."""
    inventory = case.around.inventory
    has = {
        name.lower() for machine in (inventory.machines if inventory else ()) for name in machine.attributes
    }
    known = case.around.site.nested or bool(has)
    severity = Severity.WRONG if known else Severity.ADVICE
    yield from old_gpu_findings(case.jobs, severity, frozenset(has))


def _below_site(case: _QueueCheck) -> Iterator[SubmitFinding]:
    """Report a job for GPUs that are older than any of the site. With an inventory, its GPUs decide."""
    site, key = case.around.site, "gpus_maximum_capability"
    most = literal(case.jobs.value(key)) if key in case.jobs.settings else None
    if case.reach is not None or not site.lowest or isinstance(most, bool | str | None):
        return
    if most < float(site.lowest):
        text = f"{site.title} has no GPU below {site.lowest}, so the job never starts"
        yield wrong(case.jobs.settings[key].line, "no-match", text, f"remove {key}, or choose another image")


def _image_findings(case: _QueueCheck) -> Iterator[SubmitFinding]:
    image, jobs, catalog = case.image, case.jobs, case.around.catalog
    yield from image_findings(
        jobs,
        image,
        MutableNames(
            site=case.around.site, images=catalog.images if catalog else (), digest=case.around.digest
        ),
    )
    if image is None or not image.pinned:
        return
    yield from catalog_findings(image, case.known, catalog, FileLocation(jobs.settings[image.key].line))
    sent = jobs.value("transfer_container").lower() not in ("false", "no", "0")
    if case.known and case.request.disk and sent:
        size = case.known.sif.size if case.known.sif else case.known.image.size
        needed = image_disk(image.kind or ImageKind.SIF, size, case.known.image.unpacked)
        if image.kind in (ImageKind.SIF, ImageKind.OSDF, ImageKind.ORAS) and case.request.disk < needed:
            request = format_size(case.request.disk)
            text = f"request_disk is {request}, but the image needs {format_size(needed)}"
            location = jobs.settings["request_disk"].line
            yield wrong(
                location,
                "disk",
                text,
                "request that much plus what the job writes; otherwise HTCondor holds the job",
            )


# --- the GPUs ------------------------------------------------------------------------------------


def _reach_findings(case: _QueueCheck) -> Iterator[SubmitFinding]:
    reach, inventory = case.reach, case.around.inventory
    if reach is None or inventory is None or not case.jobs.requests_gpus:
        return
    yield from _unknown_attributes(case, inventory)
    if not reach.places:
        yield advice(case.jobs.line, "no-match", "the inventory has no GPU")
    elif not reach.reached:
        reason = join_causes(reach.causes.items())
        text = f"none of {len(reach.places)} GPUs matches, so the jobs never start: {reason}"
        yield wrong(case.jobs.line, "no-match", text, "list the GPUs of the pool: imagefactory gpus")


def _unknown_attributes(case: _QueueCheck, inventory: Inventory) -> Iterator[SubmitFinding]:
    """Report attributes in `requirements` that no GPU machine has, if they make it undefined."""
    has = {name.lower() for machine in inventory.machines for name in machine.attributes}
    expression = case.request.requirements
    if expression is None or not has or not case.reach:
        return
    if not any(gpu.cause == UNDEFINED for gpu in case.reach.places):
        return
    attribute_names = {*has, *(name.lower() for name in case.request.ad)}
    names = [name for name in expression.names if name.lower() not in attribute_names]
    names = [name for name in names if not own_name(name)]  # these have a finding of their own
    if names and "requirements" in case.jobs.settings:
        text = (
            f"no machine with GPUs has the attribute {', '.join(names[:_FEW])}, so requirements is undefined"
        )
        line = case.jobs.settings["requirements"].line
        yield wrong(line, "unheard", text, "remove it from requirements, or correct its name")


def _unverified(case: _QueueCheck, reached: Sequence[ReachableGpus]) -> Iterator[SubmitFinding]:
    """Report reachable GPUs without a verdict, and verified GPUs that the jobs exclude."""
    if case.known is None or case.image is None:
        return
    setting = case.jobs.settings[case.image.key]
    if not case.known.image.gpu:
        if case.jobs.requests_gpus:
            yield unused_gpu_request(
                case.known, FileLocation(case.jobs.settings["request_gpus"].line), "request_gpus"
            )
        return
    yield from unverified(case.known, reached, FileLocation(setting.line))
    if case.reach is None:
        if case.grounds is not None and not case.grounds.verified:
            yield nowhere(case.known, case.grounds, FileLocation(setting.line))
        elif case.grounds is not None:
            for row in _reached_revoked(case, case.grounds):
                yield revoked_on(case.known, row, FileLocation(setting.line))
        return
    yield from narrow(case.known, case.grounds, case.reach.places, FileLocation(case.jobs.line))


def _reached_revoked(case: _QueueCheck, grounds: ImageEvidence) -> Iterator[RevokedCell]:
    """Yield the revocations on GPUs that the jobs accept, if there is no inventory."""
    for row in (row for row in grounds.revoked if row.capability):
        gpu = PoolGpu(
            id="", uuid="", name="", capability=row.capability, memory=1 << 50, driver="", cuda="99.9",
            mig=False, free=True,
        )  # fmt: skip
        machine = PoolMachine(name="", attributes={}, start="", gpus=(gpu,))
        reach = find_reach(case.request, Inventory(pool="", taken=row.when, machines=(machine,)))
        if reach.reached:
            yield row


# --- Automatic fixes of a submit file. Pure


_ROUNDS = 20
"""The limit of rounds. Overlapping edits wait for the next round, because line numbers change."""


def fix_text(text: str, check: Callable[[str], SubmitCheckResult]) -> str:
    """Return `text` with all edits applied. A statement with a comment inside stays unchanged."""
    for _ in range(_ROUNDS):
        fixed = _apply_edits(text, check(text))
        if fixed == text:
            break
        text = fixed
    return text


def format_diff(name: str, before: str, after: str) -> str:
    """Return the changes as a unified diff, empty if there are none."""
    old, new = split_lines(before), split_lines(after)
    return "\n".join(difflib.unified_diff(old, new, name, f"{name} (mended)", lineterm="", n=1))


def _apply_edits(text: str, checked: SubmitCheckResult) -> str:
    lines = split_lines(text)
    edited: set[int] = set()
    edits = [edit for finding in checked.all_findings for edit in finding.edits]
    for edit in sorted(edits, key=lambda item: -item.first):
        edited_lines = set(range(edit.first, edit.last + 1))
        if edited_lines & edited or any(
            lines[line_number - 1].lstrip().startswith("#") for line_number in edited_lines
        ):
            continue
        edited |= edited_lines
        lines[edit.first - 1 : edit.last] = edit.text
    return ("\r\n" if "\r\n" in text else "\n").join(lines)


# --- Secrets in a submit file or a batch script, which anyone who sees the file can read. Pure
# They are recognized by common variable names and token formats. A value that the job reads from elsewhere at
# run time (`$(cat ...)`, `$HOME/...`) is not a secret. Findings never contain the value.


_NAMED = re.compile(
    r"""\b([A-Za-z][A-Za-z0-9_]*(?:API_?KEY|ACCESS_?KEY|SECRET|TOKEN|PASSWORD|PASSWD)(?:_[A-Za-z0-9_]*)?)
        \s*=\s*["']*(?P<value>[^\s"';,$`(<]{8,})""",
    re.IGNORECASE | re.VERBOSE,
)
_FORMS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})"),
    "an AWS key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "an OpenAI key": re.compile(r"\bsk-(?:proj-)?[A-Za-z0-9_-]{32,}"),
    "a Weights & Biases key": re.compile(r"\bwandb\s+login\s+(?:-\S+\s+)*[0-9a-f]{40}\b"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
_PLACE = re.compile(r"[~./]")
HINT = "create a new one, keep it in a file that only you can read, and read it in the program"


def secret_findings(text: str) -> Iterator[SubmitFinding]:
    """Yield a finding for each line with a secret."""
    for number, line in enumerate(text.splitlines(), start=1):
        named = [(match[1], match) for match in _NAMED.finditer(line) if not _PLACE.match(match["value"])]
        formed = [(name, match) for name, form in _FORMS.items() if (match := form.search(line))]
        for name, hit in (named or formed)[:1]:
            message = f"{name} is visible to everyone who can read this file"
            yield wrong(number, "secret", message, HINT, column=hit.start() + 1)


def with_secrets(checked: SubmitCheckResult, text: str) -> SubmitCheckResult:
    """Return the result with the findings about secrets in the text."""
    return replace(checked, findings=(*checked.findings, *secret_findings(text)))
