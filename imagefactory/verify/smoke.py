"""The CPU-level smoke test of an image: starts the suite inside it, judges what it wrote, remembers a pass.

What the image says is data from a stranger: the report is read by a strict parser, must bring back
the nonce of this run and hold every check that was asked for. That guards against images that do
no work by mistake; it is no proof against an image that lies on purpose.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imagefactory.errors import ImagefactoryError, StatementError
from imagefactory.fs import add_checksum, check_checksum, locked_temporary_directory, replacing
from imagefactory.model import CheckResult, CheckState, CommandResult, Mount, Outcome, Report, RunSpec
from imagefactory.progress import Progress, format_seconds
from imagefactory.runtime.protocol import Runner
from imagefactory.serialize import format_value, parse_value
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
from imagefactory.verify.smoke_hints import find_hint
from imagefactory.verify.suite_files import (
    EXPECT_MOUNT,
    EXPECTATIONS_NAME,
    REPORT_MOUNT,
    REPORT_NAME,
    SUITE_MOUNT,
    digest_of,
    expectations,
    read_suite,
    required_checks,
    write_suite,
)

# --- Records of smoke tests that passed, and the report as JSON


RECORD_FORMAT = REPORT_FORMAT = 1


def record_name(image: str, suite: str, request: Mapping[str, Any]) -> str:
    """File name of a record: it changes with the image's digest, the suite and what is expected."""
    expected = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    return f"{image.removeprefix('sha256:')}.{suite.removeprefix('sha256:')[:32]}.{expected[:32]}.json"


def read_record(path: Path, trial: SmokeTest, suite: str) -> Report | None:
    """The pass that was kept; None when there is none or what is there is not one of this image and suite."""
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
    """Beside and renamed. A record that cannot be kept costs the next call a run and is no error."""
    document = {"format": RECORD_FORMAT, "report": format_report(report)}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as file:
            file.write(add_checksum(path, json.dumps(document, indent=1, sort_keys=True).encode()))


def format_report(report: Report) -> dict[str, Any]:
    """The report as JSON; `format` is its version."""
    return {
        "format": REPORT_FORMAT,
        "target": report.target,
        "image": report.image,
        "config": report.config,
        "suite": report.suite,
        "level": "cpu",
        "passed": report.passed,
        "failure": report.failure.value if report.failure else None,
        "gpu": report.gpu.value,
        "hint": report.hint,
        "from_record": report.from_record,
        "checks": format_value(report.checks, tuple[CheckResult, ...]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeOutcome:
    """The checks of one run of the suite and, if one failed, the word for why."""

    checks: tuple[CheckResult, ...]
    failure: Outcome | None


def smoke(trial: SmokeTest, runner: Runner, progress: Progress, *, records: Path, scratch: Path) -> Report:
    """Runs the CPU-level checks in the image, and keeps a pass in `records` for `recall_smoke`.

    The image writes its report below `scratch`.

    A check that fails, a time-out, an image that breaks the rules and a runner that could not start
    it are all results. Raises UsageError for a recipe whose checks the suite does not have.
    """
    files, request = read_suite(), expectations(trial.definition)
    suite = digest_of(files)
    with locked_temporary_directory("smoke-", scratch) as folder:
        write_suite(folder / "suite", files)
        verdicts = _run_all(_SmokeDirectory(trial=trial, folder=folder, asked=request), runner, progress)
    report = Report(
        target=trial.definition.target.name,
        image=trial.image.digest,
        config=trial.image.config,
        suite=suite,
        passed=verdicts.failure is None,
        failure=verdicts.failure,
        gpu=Outcome.NOT_TESTED,
        checks=verdicts.checks,
        from_record=False,
        hint=find_hint(trial.definition, verdicts.checks),
    )
    if report.passed:
        write_record(_record_of(trial, records, suite), report)
    return report


def get_smoke_report(trial: SmokeTest, records: Path) -> Report | None:
    """The report of an earlier pass, None where there is none.

    A record is a file in `records`, made only when everything passed, named by the digests of the
    image, the suite and the expectations; a record that cannot be read is as good as none.
    """
    suite = digest_of(read_suite())
    return read_record(_record_of(trial, records, suite), trial, suite)


def _record_of(trial: SmokeTest, records: Path, suite: str) -> Path:
    request = {**expectations(trial.definition), "runner": trial.runner}
    return records / record_name(trial.image.digest, suite, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunMode:
    """How a run is made: which checks, as whom. `strict` means a read-only root and that the suite looks."""

    name: str
    checks: tuple[str, ...]
    uid: int
    strict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _SmokeDirectory:
    """A trial, the folder on the host in which its files lie, and what is asked of the image."""

    trial: SmokeTest
    folder: Path
    asked: Mapping[str, Any]


def _run_all(bench: _SmokeDirectory, runner: Runner, progress: Progress) -> SmokeOutcome:
    """One run as root, then one as an ordinary user where the recipe asks for it."""
    required = bench.asked["checks"]
    plain = tuple(name for name in required if name != "unprivileged")
    verdicts = SmokeOutcome(checks=(), failure=None)
    with progress.task("checks", total=len(required), unit="checks") as task:
        if plain:
            verdicts = _run(bench, runner, _RunMode(name="root", checks=plain, uid=0, strict=False))
            task.advance(len(plain))
        if "unprivileged" not in required:
            return verdicts
        if verdicts.failure is not None:
            reason = "not tried, because the run as root did not pass"
            skipped = _nothing_ran(("unprivileged",), CheckState.NOT_RUN, reason, verdicts.failure)
            return replace(verdicts, checks=(*verdicts.checks, *skipped.checks))
        framework = table.FRAMEWORKS.get(bench.asked["framework"], table.OTHER)
        checks = table.unprivileged_checks(framework, required)
        way = _RunMode(name="unprivileged", checks=checks, uid=table.UNPRIVILEGED_UID, strict=True)
        merged = merge(verdicts, _run(bench, runner, way))
        task.advance(1)
    return merged


def _run(bench: _SmokeDirectory, runner: Runner, way: _RunMode) -> SmokeOutcome:
    """One run of the suite, judged."""
    trial, nonce = bench.trial, f"{bench.trial.nonce}-{way.name}"
    request = {
        **bench.asked,
        "checks": list(way.checks),
        "nonce": nonce,
        "uid": way.uid if way.strict else None,
    }
    report = _prepare(bench.folder, way.name, request)
    try:
        completed = runner.run(trial.image, _spec(bench, way))
    except ImagefactoryError as error:
        hint = f" ({error.hint})" if error.hint else ""
        reason = f"the runner could not start it: {error.message}{hint}"
        return _nothing_ran(way.checks, CheckState.NOT_RUN, reason, Outcome.INFRASTRUCTURE)
    try:
        smoke_report = parse_smoke_report(read_report(report), nonce)
    except InvalidReportError as fault:
        if completed.timed_out:
            reason = f"stopped after {format_seconds(trial.timeout)}, before it wrote a report"
            return _nothing_ran(way.checks, CheckState.FAILED, reason, Outcome.TIMEOUT)
        reason = f"{fault}; {exit_summary(completed)}"
        return _nothing_ran(way.checks, CheckState.FAILED, reason, Outcome.LOAD_FAILED)
    return smoke_outcome(smoke_report, way.checks, completed, bench.asked)


def _prepare(folder: Path, name: str, request: Mapping[str, Any]) -> Path:
    """Writes the expectations and makes the report's folder; answers where the report will be."""
    expect, report = folder / f"{name}-expect", folder / f"{name}-report"
    expect.mkdir()
    (expect / EXPECTATIONS_NAME).write_text(json.dumps(request, indent=1, sort_keys=True), encoding="utf-8")
    (expect / EXPECTATIONS_NAME).chmod(0o644)
    expect.chmod(0o755)
    report.mkdir()
    # The image's user writes here, whoever that is on the host; the folder above is closed to others.
    report.chmod(0o777)
    return report / REPORT_NAME


def _spec(bench: _SmokeDirectory, way: _RunMode) -> RunSpec:
    return RunSpec(
        argv=(
            f"{bench.trial.definition.prefix}/bin/python",
            "-I",
            "-B",
            f"{SUITE_MOUNT}/smoke.py",
            f"{EXPECT_MOUNT}/{EXPECTATIONS_NAME}",
            f"{REPORT_MOUNT}/{REPORT_NAME}",
        ),
        uid=way.uid,
        read_only=way.strict,
        mounts=(
            Mount(source=bench.folder / "suite", target=SUITE_MOUNT, bind=True),
            Mount(source=bench.folder / f"{way.name}-expect", target=EXPECT_MOUNT, bind=True),
            Mount(
                source=bench.folder / f"{way.name}-report", target=REPORT_MOUNT, writable=True, scratch=True
            ),
        ),
        timeout=bench.trial.timeout,
    )


def _nothing_ran(names: Sequence[str], state: CheckState, reason: str, failure: Outcome) -> SmokeOutcome:
    checks = tuple(
        CheckResult(name=name, state=state, detail=reason, seconds=0.0, numbers=()) for name in names
    )
    return SmokeOutcome(checks=checks, failure=failure)


# --- what one makes of its report ----------------------------------------------------------------


def smoke_outcome(
    report: SmokeReport, names: Sequence[str], completed: CommandResult, request: Mapping[str, Any]
) -> SmokeOutcome:
    """Every check that was asked for, once and in order: passed only if the run as a whole says so too."""
    rows: dict[str, SuiteCheck] = {}
    for row in report.rows:
        if row.result.name in rows or row.result.name not in names:
            fault = f"its report has the check '{row.result.name}' without need"
            return _nothing_ran(names, CheckState.FAILED, fault, Outcome.LOAD_FAILED)
        rows[row.result.name] = row
    framework = table.FRAMEWORKS.get(request["framework"], table.OTHER)
    locked = {
        **{name: text.partition(" ")[0] for name, text in request["conda"].items()},
        **request["packages"],
    }
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
        # A pass is the whole run's: a process that hangs or dies on its way out is none.
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
        word, reason = Outcome.TIMEOUT, "stopped: it took too long"
    else:
        word, reason = Outcome.LOAD_FAILED, exit_summary(completed)
    if name == report.running:
        return CheckResult(name=name, state=CheckState.FAILED, detail=reason, seconds=0.0), word
    missing = (
        f"'{report.running}' came first and did not end" if report.running else "its report leaves it out"
    )
    return CheckResult(name=name, state=CheckState.NOT_RUN, detail=missing, seconds=0.0), word


def merge(first: SmokeOutcome, second: SmokeOutcome) -> SmokeOutcome:
    """The unprivileged run becomes one check of the report: passed when all of its checks passed."""
    bad = [check for check in second.checks if check.state is not CheckState.PASSED]
    worst = bad[0] if bad else None
    detail = (
        f"{worst.name}: {worst.detail}" if worst else "; ".join(check.detail for check in second.checks[:1])
    )
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
    """Lines for a person: one a check, then what is proven and what is not."""
    width = max((len(check.name) for check in report.checks), default=0)
    states = max((len(check.state.value) for check in report.checks), default=0)
    lines = [
        f"{check.name:<{width}}  {check.state.value:<{states}}  {check.seconds:6.1f} s  {check.detail}"
        for check in report.checks
    ]
    if report.passed:
        known = " (known from an earlier run)" if report.from_record else ""
        lines.append(f"CPU-level smoke test: passed{known}; on a GPU: {report.gpu.value}")
    else:
        lines.append(f"CPU-level smoke test: failed ({report.failure}); on a GPU: {report.gpu.value}")
    return tuple(lines)
