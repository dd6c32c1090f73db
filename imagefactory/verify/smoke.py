"""The CPU-level smoke test: runs the suite inside an image, checks its report and records a pass.

The report is untrusted: a strict parser reads it, and it must have the nonce of this run and every required
check. That detects broken images, but not an image that forges a report.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from imagefactory.errors import ImagefactoryError, StatementError
from imagefactory.fs import add_checksum, check_checksum, locked_temporary_directory, replacing
from imagefactory.model import CheckResult, CheckState, CommandResult, Outcome, Report, RunSpec
from imagefactory.progress import Progress, format_seconds
from imagefactory.runtime.protocol import Runner
from imagefactory.serialize import FormattedAs, format_value, parse_value
from imagefactory.suite import table
from imagefactory.verify.outcome import (
    InvalidReportError,
    SmokeReport,
    SuiteCheck,
    exit_summary,
    parse_smoke_report,
    read_report,
)
from imagefactory.verify.report import SmokeTest
from imagefactory.verify.suite_files import (
    REPORT_NAME,
    digest_of,
    expectations,
    read_suite,
    required_checks,
    suite_argv,
    suite_mounts,
    write_suite,
)

RECORD_FORMAT = 1


def record_name(image: str, suite: str, request: Mapping[str, Any]) -> str:
    """Return the file name of a record: it contains the digests of image, suite and expectations."""
    expected = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    return f"{image.removeprefix('sha256:')}.{suite.removeprefix('sha256:')[:32]}.{expected[:32]}.json"


def read_record(path: Path, trial: SmokeTest, suite: str) -> Report | None:
    """Return a recorded pass, None if there is none for this image and suite, or it cannot be read."""
    try:
        document = json.loads(check_checksum(path) or b"null")
        report = document["report"]
        whole = (
            document["format"] == RECORD_FORMAT
            and report["image"] == trial.image.digest
            and report["suite"] == suite
            and report["passed"] is True
            and {row["name"] for row in report["checks"]} == set(required_checks(trial.definition))
        )
        if not whole:
            return None
        return Report(
            target=trial.definition.target.name,
            image=trial.image.digest,
            config=trial.image.config,
            suite=suite,
            passed=True,
            failure=None,
            gpu=Outcome.NOT_TESTED,
            checks=parse_value(report["checks"], tuple[CheckResult, ...], "record"),
            from_record=True,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StatementError):
        return None


def write_record(path: Path, report: Report) -> None:
    """Write a record. Errors are ignored: the next call then runs the test again."""
    document = {"format": RECORD_FORMAT, "report": format_report(report)}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as file:
            file.write(add_checksum(path, json.dumps(document, indent=1, sort_keys=True).encode()))


class SmokeReportRow(TypedDict):
    """The result of the CPU-level smoke test of an image."""

    format: Literal[1]
    target: str
    image: str
    config: str
    suite: str
    level: Literal["cpu"]
    passed: bool
    failure: str | None
    """The outcome of a test that did not pass."""
    gpu: str
    """`not-tested`: this test uses no GPU."""
    hint: str
    """What to write in the recipe; empty if unknown."""
    from_record: bool
    """Whether an earlier test of the same image passed, and no new one was started."""
    checks: Annotated[Sequence[object], FormattedAs(tuple[CheckResult, ...])]


def format_report(report: Report) -> SmokeReportRow:
    """Return the report as JSON; `format` is its version."""
    return SmokeReportRow(
        format=1,
        target=report.target,
        image=report.image,
        config=report.config,
        suite=report.suite,
        level="cpu",
        passed=report.passed,
        failure=report.failure.value if report.failure else None,
        gpu=report.gpu.value,
        hint=report.hint,
        from_record=report.from_record,
        checks=format_value(report.checks, tuple[CheckResult, ...]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeOutcome:
    """The checks of one run of the suite and, if one failed, the outcome."""

    checks: tuple[CheckResult, ...]
    failure: Outcome | None


def smoke(trial: SmokeTest, runner: Runner, progress: Progress, *, records: Path, scratch: Path) -> Report:
    """Run the CPU-level checks in the image. A pass is recorded in `records` for `get_smoke_report`.

    The image writes its report below `scratch`. A failed check, a time-out, an invalid report and a runner
    that cannot start the image are results, not errors. Raises UsageError for a recipe with checks that the
    suite does not have.
    """
    from imagefactory.verify.smoke_hints import find_hint

    files, request = read_suite(), expectations(trial.definition)
    suite = digest_of(files)
    with locked_temporary_directory("smoke-", scratch) as directory:
        write_suite(directory / "suite", files)
        outcome = _run_all(trial, directory, request, runner, progress)
    report = Report(
        target=trial.definition.target.name,
        image=trial.image.digest,
        config=trial.image.config,
        suite=suite,
        passed=outcome.failure is None,
        failure=outcome.failure,
        gpu=Outcome.NOT_TESTED,
        checks=outcome.checks,
        from_record=False,
        hint=find_hint(trial.definition, outcome.checks),
    )
    if report.passed:
        write_record(_record_of(trial, records, suite), report)
    return report


def get_smoke_report(trial: SmokeTest, records: Path) -> Report | None:
    """Return the report of an earlier pass, None if there is none or it cannot be read."""
    suite = digest_of(read_suite())
    return read_record(_record_of(trial, records, suite), trial, suite)


def _record_of(trial: SmokeTest, records: Path, suite: str) -> Path:
    request = {**expectations(trial.definition), "runner": trial.runner}
    return records / record_name(trial.image.digest, suite, request)


def _run_all(
    trial: SmokeTest, directory: Path, request: Mapping[str, Any], runner: Runner, progress: Progress
) -> SmokeOutcome:
    """Run the suite as root and, if the recipe requires it, as an ordinary user at the same time."""
    required = request["checks"]
    plain = tuple(name for name in required if name != "unprivileged")
    outcome = SmokeOutcome(checks=(), failure=None)
    with (
        progress.task("checks", total=len(required), unit="checks") as task,
        ThreadPoolExecutor(1, thread_name_prefix="smoke") as pool,
    ):
        second = None
        if "unprivileged" in required:
            framework = table.FRAMEWORKS.get(request["framework"], table.OTHER)
            checks = table.unprivileged_checks(framework, required)
            run = partial(_run, trial, directory, request, runner, checks=checks)
            second = pool.submit(run, uid=table.UNPRIVILEGED_UID)
        try:
            if plain:
                outcome = _run(trial, directory, request, runner, checks=plain, uid=0)
                task.advance(len(plain))
            if second:
                outcome = merge(outcome, second.result())
                task.advance(1)
        except BaseException:
            runner.stop()
            raise
    return outcome


def _run(
    trial: SmokeTest,
    directory: Path,
    request: Mapping[str, Any],
    runner: Runner,
    *,
    checks: tuple[str, ...],
    uid: int,
) -> SmokeOutcome:
    """Run the suite once. An ordinary user gets a read-only root, and the suite checks the user id."""
    name = "unprivileged" if uid else "root"
    nonce = f"{trial.nonce}-{name}"
    run_fields = {"checks": list(checks), "nonce": nonce, "uid": uid or None}
    spec = RunSpec(
        argv=suite_argv(trial.definition, "smoke.py"),
        uid=uid,
        read_only=bool(uid),
        mounts=suite_mounts(directory / "suite", directory / name, {**request, **run_fields}),
        timeout=trial.timeout,
    )
    try:
        completed = runner.run(trial.image, spec)
    except ImagefactoryError as error:
        hint = f" ({error.hint})" if error.hint else ""
        reason = f"the runner could not start it: {error.message}{hint}"
        return _nothing_ran(checks, CheckState.NOT_RUN, reason, Outcome.INFRASTRUCTURE)
    try:
        report = parse_smoke_report(read_report(directory / name / "report" / REPORT_NAME), nonce)
    except InvalidReportError as fault:
        if completed.timed_out:
            reason = f"stopped after {format_seconds(trial.timeout)}, before it wrote a report"
            return _nothing_ran(checks, CheckState.FAILED, reason, Outcome.TIMEOUT)
        reason = f"{fault}; {exit_summary(completed)}"
        return _nothing_ran(checks, CheckState.FAILED, reason, Outcome.LOAD_FAILED)
    return smoke_outcome(report, checks, completed, request)


def _nothing_ran(names: Sequence[str], state: CheckState, reason: str, failure: Outcome) -> SmokeOutcome:
    checks = tuple(CheckResult(name=name, state=state, detail=reason, seconds=0.0) for name in names)
    return SmokeOutcome(checks=checks, failure=failure)


def smoke_outcome(
    report: SmokeReport, names: Sequence[str], completed: CommandResult, request: Mapping[str, Any]
) -> SmokeOutcome:
    """Return every required check, once and in order.

    A check passes only if the run as a whole ended normally.
    """
    rows: dict[str, SuiteCheck] = {}
    for row in report.rows:
        if row.result.name in rows or row.result.name not in names:
            fault = f"the report has the unexpected check '{row.result.name}'"
            return _nothing_ran(names, CheckState.FAILED, fault, Outcome.LOAD_FAILED)
        rows[row.result.name] = row
    framework = table.FRAMEWORKS.get(request["framework"], table.OTHER)
    conda = {name: text.partition(" ")[0] for name, text in request["conda"].items()}
    locked = {**conda, **request["packages"]}
    failure: Outcome | None = None
    results = []
    for name in names:
        result, word = _outcome_of(name, rows.get(name), report, completed)
        excused = table.check_not_applicable(framework, name, locked)
        if result.state is CheckState.NOT_APPLICABLE and not excused:
            result = replace(result, state=CheckState.FAILED, detail="claims not to apply, but it does")
            word = Outcome.LOAD_FAILED
        results.append(result)
        failure = failure or word
    if failure is None and (completed.timed_out or completed.returncode != 0 or report.running):
        # A pass applies to the whole run: a process that hangs or crashes at exit has failed.
        reason = "it did not end in time" if completed.timed_out else exit_summary(completed)
        reason = f"all checks say they passed, but {reason}"
        results[-1] = replace(results[-1], state=CheckState.FAILED, detail=reason)
        failure = Outcome.TIMEOUT if completed.timed_out else Outcome.LOAD_FAILED
    return SmokeOutcome(checks=tuple(results), failure=failure)


def _outcome_of(
    name: str, row: SuiteCheck | None, report: SmokeReport, completed: CommandResult
) -> tuple[CheckResult, Outcome | None]:
    if row is not None:
        if row.result.state in (CheckState.PASSED, CheckState.NOT_APPLICABLE):
            return row.result, None
        return row.result, Outcome(row.outcome or table.LOAD_FAILED)
    if completed.timed_out:
        word, reason = Outcome.TIMEOUT, "stopped after too long"
    else:
        word, reason = Outcome.LOAD_FAILED, exit_summary(completed)
    if name == report.running:
        return CheckResult(name=name, state=CheckState.FAILED, detail=reason, seconds=0.0), word
    missing = (
        f"'{report.running}' started before this check and did not finish"
        if report.running
        else "the report has no result of this check"
    )
    return CheckResult(name=name, state=CheckState.NOT_RUN, detail=missing, seconds=0.0), word


def merge(first: SmokeOutcome, second: SmokeOutcome) -> SmokeOutcome:
    """Add the unprivileged run as one check. It passed if all checks in that run did."""
    worst = next((check for check in second.checks if check.state is not CheckState.PASSED), None)
    detail = f"{worst.name}: {worst.detail}" if worst else second.checks[0].detail if second.checks else ""
    check = CheckResult(
        name="unprivileged",
        state=worst.state if worst else CheckState.PASSED,
        detail=detail,
        seconds=round(sum(check.seconds for check in second.checks), 3),
        numbers=tuple(
            (f"{check.name}-{key}", value) for check in second.checks for key, value in check.numbers
        ),
    )
    return SmokeOutcome(checks=(*first.checks, check), failure=first.failure or second.failure)


def format_table(report: Report) -> tuple[str, ...]:
    """Return lines for a person: one for each check, then the status on CPU and GPU."""
    width = max((len(check.name) for check in report.checks), default=0)
    states = max((len(check.state.value) for check in report.checks), default=0)
    lines = [
        f"{check.name:<{width}}  {check.state.value:<{states}}  {check.seconds:6.1f} s  {check.detail}"
        for check in report.checks
    ]
    known = " (known from an earlier run)" if report.from_record else ""
    status = f"passed{known}" if report.passed else f"failed ({report.failure})"
    return (*lines, f"CPU-level smoke test: {status}; on a GPU: {report.gpu.value}")
