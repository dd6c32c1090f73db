"""A checked submit file as a person reads it, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from imagefactory.extras.lint.findings import QueueCheckResult, ReachableGpus, Severity, SubmitCheckResult
from imagefactory.extras.lint.image import join_causes
from imagefactory.views.text import format_table, wrap

WIDTH, MIN_WIDTH = 110, 60


def format_check(checked: SubmitCheckResult, width: int | None = None) -> str:
    """Findings by line, as compilers tell them; then where the jobs of each `queue` get; then the answer."""
    room = max(min(width or WIDTH, WIDTH), MIN_WIDTH)
    blocks = [list(_findings(checked, room)), *(list(_reach(jobs, room)) for jobs in checked.jobs)]
    return "\n\n".join("\n".join(block) for block in [*blocks, [summary(checked)]] if block)


def summary(checked: SubmitCheckResult) -> str:
    """`train.sub: 2 things are wrong, 1 can be had better`."""
    found = checked.all_findings
    bad = sum(one.severity is Severity.WRONG for one in found)
    better = len(found) - bad
    parts = [f"{bad} thing{'s are' if bad != 1 else ' is'} wrong"] if bad else ["nothing is wrong"]
    parts += [f"{better} can be had better"] if better else []
    return f"{checked.name}: {', '.join(parts)}"


def _findings(checked: SubmitCheckResult, width: int) -> Iterator[str]:
    for finding in checked.all_findings:
        where = f"{finding.line}:{finding.column}" if finding.column else f"{finding.line}"
        first = f"{checked.name}:{where}: {finding.severity}: "
        text = f"{finding.message} [{finding.rule}]"
        lines = wrap(first + text, width)
        yield lines[0]
        yield from ("  " + line for line in lines[1:])
        if finding.hint:
            yield from ("    " + line for line in wrap(finding.hint, width - 4))


def _reach(jobs: QueueCheckResult, width: int) -> Iterator[str]:
    many = "some jobs" if jobs.count is None else f"{jobs.count} job{'s' if jobs.count != 1 else ''}"
    which = f" of {jobs.target}" if jobs.target else ""
    if not jobs.gpu:
        yield f"{jobs.title}: {many}{which}, asking for no GPU"
        return
    if not jobs.known:
        yield f"{jobs.title}: {many}{which}; no inventory tells how many GPUs that reaches"
        return
    share = f"{jobs.gpus} of {jobs.total} GPU{'s' if jobs.total != 1 else ''}"
    yield f"{jobs.title}: {many}{which}, each can get {share} of this pool"
    if jobs.reached:
        header = ("CAPABILITY", "GPUS", "FREE", "IMAGE", "WHY")
        yield from format_table(header, [_row(one) for one in jobs.reached], width).splitlines()
    if jobs.causes:
        rest = f" the other {jobs.total - jobs.gpus}" if jobs.gpus else ""
        yield from wrap(f"why not{rest}: {join_causes(jobs.causes)}", width)


def _row(one: ReachableGpus) -> tuple[str, ...]:
    unsure = f"{one.unsure} of them may not take it (START or what changes)" if one.unsure else ""
    why = "; ".join(part for part in (one.why, unsure) if part)
    return one.capability, str(one.gpus), str(one.free), one.image or "not known", why


def check_json(checked: SubmitCheckResult) -> Mapping[str, object]:
    """`{file, wrong, findings: [...], queues: [...]}`; a count that a list outside decides is null."""
    return {
        "file": checked.name,
        "wrong": checked.wrong,
        "findings": [
            {
                "line": finding.line,
                "column": finding.column or None,
                "rule": finding.rule,
                "severity": finding.severity.value,
                "message": finding.message,
                "hint": finding.hint,
            }
            for finding in checked.all_findings
        ],
        "queues": [
            {
                "line": jobs.line,
                "jobs": jobs.count,
                "image": jobs.image,
                "target": jobs.target,
                "gpus": jobs.gpus if jobs.known else None,
                "of": jobs.total if jobs.known else None,
                "reached": jobs.reached,
                "missed": [{"gpus": count, "why": cause} for cause, count in jobs.causes],
            }
            for jobs in checked.jobs
        ],
    }
