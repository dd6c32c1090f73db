"""The CPU-level smoke test of an image: starts the suite inside it, judges what it wrote, remembers a pass.

What the image says is data from a stranger: the report is read by a strict parser, must bring back
the nonce of this run and hold every check that was asked for. That guards against images that do
no work by mistake; it is no proof against an image that lies on purpose.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from imagefactory.errors import FactoryError, UsageError
from imagefactory.model import CheckResult, CheckState, Completed, Definition, Mount, Outcome, Report, RunSpec
from imagefactory.oci.model import Image, Sif
from imagefactory.progress import Progress, format_seconds
from imagefactory.verify.report_file import (
    ReportFault,
    SuiteCheck,
    format_row,
    how_it_ended,
    parse_fields,
    parse_row,
    read_report,
)
from imagefactory.verify.runners.protocol import Runner
from imagefactory.verify.suite import table

SUITE_FOLDER = Path(__file__).parent / "suite"
SUITE_MOUNT, EXPECT_MOUNT, REPORT_MOUNT = (
    "/imagefactory/suite",
    "/imagefactory/expect",
    "/imagefactory/report",
)
EXPECTATIONS_NAME, REPORT_NAME = "expectations.json", "report.json"
TIMEOUT_SECONDS = 900.0
RECORD_FORMAT = REPORT_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One smoke test to do. `nonce` is fresh random text that the report must bring back.

    `runner` is its name: a pass with one says nothing of another. `timeout` is seconds for each of the
    two runs.
    """

    image: Image | Sif
    definition: Definition
    nonce: str
    runner: str = "unshare"
    timeout: float = TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """The checks of one run of the suite and, if one failed, the word for why."""

    checks: tuple[CheckResult, ...]
    failure: Outcome | None


# --- what is asked -------------------------------------------------------------------------------


@functools.cache
def read_suite() -> Mapping[str, bytes]:
    """The suite's files by relative name, without compiled ones; read once in a process."""
    return MappingProxyType(
        {
            path.relative_to(SUITE_FOLDER).as_posix(): path.read_bytes()
            for path in sorted(SUITE_FOLDER.rglob("*.py"))
            if path.is_file()
        }
    )


def digest_of(files: Mapping[str, bytes]) -> str:
    """sha256 over sorted names and contents, each with its length before it."""
    total = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            total.update(len(part).to_bytes(8, "little") + part)
    return f"sha256:{total.hexdigest()}"


def suite_digest() -> str:
    """The digest by which a passed result names the suite that it passed."""
    return digest_of(read_suite())


def expectations(definition: Definition) -> dict[str, Any]:
    """What the image must be, for the suite: pure, without nonce and user.

    Raises UsageError for a check the suite does not have, or not for this framework: of one that it does
    not know it checks what holds for every package.
    """
    target, lock = definition.target, definition.lock
    unknown = sorted(set(target.checks) - set(table.CHECKS))
    if unknown:
        raise UsageError(
            f"{target.where}: the smoke test has no check '{unknown[0]}'",
            hint=f"the checks are {', '.join(table.CHECKS)}",
        )
    beyond = sorted(set(target.checks) - set(table.OTHER_CHECKS))
    if beyond and target.framework not in table.FRAMEWORKS:
        raise UsageError(
            f"{target.where}: the smoke test knows no '{beyond[0]}' for '{target.framework}', only for "
            f"{', '.join(sorted(table.FRAMEWORKS))}",
            hint=f"write checks: [{', '.join(table.OTHER_CHECKS)}]",
        )
    packages = {wheel.name: wheel.version for wheel in lock.wheels}
    conda = {package.name: f"{package.version} {package.build}" for package in lock.conda}
    versions = {package.name: package.version for package in lock.packages}
    return {
        "format": table.FORMAT,
        "target": target.name,
        "framework": target.framework,
        "version": versions.get(target.framework, target.version),
        "cuda": target.cuda,
        "python": target.python,
        "packages": packages,
        "conda": conda,
        "checks": [name for name in table.CHECKS if name in target.checks],
    }


def required_checks(definition: Definition) -> tuple[str, ...]:
    return tuple(name for name in table.CHECKS if name in definition.target.checks)


# --- the test ------------------------------------------------------------------------------------


def smoke(trial: Trial, runner: Runner, records: Path, progress: Progress) -> Report:
    """Runs the CPU-level checks in the image, or answers from the record of an earlier pass.

    A record is a file in `records`, made only when everything passed, named by the digests of the
    image's config, the suite and the expectations; a record that cannot be read is as good as none.
    A check that fails, a time-out, an image that breaks the rules and a runner that could not start
    it are all results. Raises UsageError for a recipe whose checks the suite does not have.
    """
    files, asked = read_suite(), expectations(trial.definition)
    suite = digest_of(files)
    record = records / record_name(trial.image.config, suite, {**asked, "runner": trial.runner})
    known = read_record(record, trial, suite)
    if known is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="imagefactory-smoke-", ignore_cleanup_errors=True) as folder:
        write_suite(Path(folder, "suite"), files)
        verdicts = _run_all(_Bench(trial=trial, folder=Path(folder), asked=asked), runner, progress)
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
    )
    if report.passed:
        write_record(record, report)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How a run is made: which checks, as whom. `strict` means a read-only root and that the suite looks."""

    name: str
    checks: tuple[str, ...]
    uid: int
    strict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A trial, the folder on the host in which its files lie, and what is asked of the image."""

    trial: Trial
    folder: Path
    asked: Mapping[str, Any]


def _run_all(bench: _Bench, runner: Runner, progress: Progress) -> Verdicts:
    """One run as root, then one as an ordinary user where the recipe asks for it."""
    required = bench.asked["checks"]
    plain = tuple(name for name in required if name != "unprivileged")
    verdicts = Verdicts(checks=(), failure=None)
    with progress.task("checks", total=len(required), unit="checks") as task:
        if plain:
            verdicts = _run(bench, runner, _Way(name="root", checks=plain, uid=0, strict=False))
            task.advance(len(plain))
        if "unprivileged" not in required:
            return verdicts
        if verdicts.failure is not None:
            reason = "not tried, because the run as root did not pass"
            skipped = _nothing_ran(("unprivileged",), CheckState.NOT_RUN, reason, verdicts.failure)
            return replace(verdicts, checks=(*verdicts.checks, *skipped.checks))
        framework = table.FRAMEWORKS.get(bench.asked["framework"], table.OTHER)
        checks = table.unprivileged_checks(framework, required)
        way = _Way(name="unprivileged", checks=checks, uid=table.UNPRIVILEGED_UID, strict=True)
        merged = merge(verdicts, _run(bench, runner, way))
        task.advance(1)
    return merged


def _run(bench: _Bench, runner: Runner, way: _Way) -> Verdicts:
    """One run of the suite, judged."""
    trial, nonce = bench.trial, f"{bench.trial.nonce}-{way.name}"
    asked = {
        **bench.asked,
        "checks": list(way.checks),
        "nonce": nonce,
        "uid": way.uid if way.strict else None,
    }
    report = _prepare(bench.folder, way.name, asked)
    try:
        completed = runner.run(trial.image, _spec(bench, way))
    except FactoryError as error:
        hint = f" ({error.hint})" if error.hint else ""
        reason = f"the runner could not start it: {error.message}{hint}"
        return _nothing_ran(way.checks, CheckState.NOT_RUN, reason, Outcome.INFRASTRUCTURE)
    try:
        found = parse_report(read_report(report), nonce)
    except ReportFault as fault:
        if completed.timed_out:
            reason = f"stopped after {format_seconds(trial.timeout)}, before it wrote a report"
            return _nothing_ran(way.checks, CheckState.FAILED, reason, Outcome.TIMEOUT)
        reason = f"{fault}; {how_it_ended(completed)}"
        return _nothing_ran(way.checks, CheckState.FAILED, reason, Outcome.LOAD_FAILED)
    return judge(found, way.checks, completed, bench.asked)


def _prepare(folder: Path, name: str, asked: Mapping[str, Any]) -> Path:
    """Writes the expectations and makes the report's folder; answers where the report will be."""
    expect, report = folder / f"{name}-expect", folder / f"{name}-report"
    expect.mkdir()
    (expect / EXPECTATIONS_NAME).write_text(json.dumps(asked, indent=1, sort_keys=True), encoding="utf-8")
    (expect / EXPECTATIONS_NAME).chmod(0o644)
    expect.chmod(0o755)
    report.mkdir()
    # The image's user writes here, whoever that is on the host; the folder above is closed to others.
    report.chmod(0o777)
    return report / REPORT_NAME


def _spec(bench: _Bench, way: _Way) -> RunSpec:
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
            Mount(source=bench.folder / "suite", target=SUITE_MOUNT),
            Mount(source=bench.folder / f"{way.name}-expect", target=EXPECT_MOUNT),
            Mount(source=bench.folder / f"{way.name}-report", target=REPORT_MOUNT, writable=True),
        ),
        timeout=bench.trial.timeout,
    )


def _nothing_ran(names: Sequence[str], state: CheckState, reason: str, failure: Outcome) -> Verdicts:
    checks = tuple(
        CheckResult(name=name, state=state, detail=reason, seconds=0.0, numbers=()) for name in names
    )
    return Verdicts(checks=checks, failure=failure)


def write_suite(folder: Path, files: Mapping[str, bytes]) -> None:
    """A copy that every user can read, whatever this machine's umask: the bytes the digest speaks of."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o644)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(0o755)


# --- reading what the image wrote ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """What the suite wrote. `running` names the check it was in when it last wrote, empty at the end."""

    running: str
    rows: tuple[SuiteCheck, ...]


def parse_report(data: bytes, nonce: str) -> SuiteReport:
    """Raises ReportFault for anything but a report of this suite's format with this nonce."""
    document = parse_fields(data, ("format", "nonce", "target", "python", "running", "checks"))
    if document["format"] != table.FORMAT:
        raise ReportFault("its report has another format")
    if document["nonce"] != nonce:
        raise ReportFault("its report does not bring back the nonce of this run")
    running, rows = document["running"], document["checks"]
    if not isinstance(rows, list) or not isinstance(running, str) or running not in ("", *table.CHECKS):
        raise ReportFault("its report names no checks")
    words = (table.LOAD_FAILED, table.WRONG_NUMBERS)
    return SuiteReport(running=running, rows=tuple(parse_row(row, table.CHECKS, words) for row in rows))


def judge(
    report: SuiteReport, names: Sequence[str], completed: Completed, asked: Mapping[str, Any]
) -> Verdicts:
    """Every check that was asked for, once and in order: passed only if the run as a whole says so too."""
    rows: dict[str, SuiteCheck] = {}
    for row in report.rows:
        if row.result.name in rows or row.result.name not in names:
            fault = f"its report has the check '{row.result.name}' without need"
            return _nothing_ran(names, CheckState.FAILED, fault, Outcome.LOAD_FAILED)
        rows[row.result.name] = row
    framework = table.FRAMEWORKS.get(asked["framework"], table.OTHER)
    locked = {**{name: text.partition(" ")[0] for name, text in asked["conda"].items()}, **asked["packages"]}
    failure: Outcome | None = None
    results = []
    for name in names:
        result, word = _judge_one(name, rows.get(name), report, completed)
        excused = table.check_not_applicable(framework, name, locked)
        if result.state is CheckState.NOT_APPLICABLE and not excused:
            result = replace(result, state=CheckState.FAILED, detail="claims not to apply, but it does")
            word = Outcome.LOAD_FAILED
        results.append(result)
        failure = failure or word
    if failure is None and (completed.timed_out or completed.returncode != 0 or report.running):
        # A pass is the whole run's: a process that hangs or dies on its way out is none.
        reason = "it did not end in time" if completed.timed_out else how_it_ended(completed)
        reason = f"all checks say they passed, but {reason}"
        results[-1] = replace(results[-1], state=CheckState.FAILED, detail=reason)
        failure = Outcome.TIMEOUT if completed.timed_out else Outcome.LOAD_FAILED
    return Verdicts(checks=tuple(results), failure=failure)


def _judge_one(
    name: str, row: SuiteCheck | None, report: SuiteReport, completed: Completed
) -> tuple[CheckResult, Outcome | None]:
    if row is not None:
        if row.result.state in (CheckState.PASSED, CheckState.NOT_APPLICABLE):
            return row.result, None
        return row.result, Outcome(row.outcome or table.LOAD_FAILED)
    if completed.timed_out:
        word, reason = Outcome.TIMEOUT, "stopped: it took too long"
    else:
        word, reason = Outcome.LOAD_FAILED, how_it_ended(completed)
    if name == report.running:
        return CheckResult(name=name, state=CheckState.FAILED, detail=reason, seconds=0.0), word
    missing = (
        f"'{report.running}' came first and did not end" if report.running else "its report leaves it out"
    )
    return CheckResult(name=name, state=CheckState.NOT_RUN, detail=missing, seconds=0.0), word


def merge(first: Verdicts, second: Verdicts) -> Verdicts:
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
    return Verdicts(checks=(*first.checks, check), failure=first.failure or second.failure)


# --- records of what passed ----------------------------------------------------------------------


def record_name(config: str, suite: str, asked: Mapping[str, Any]) -> str:
    """File name of a record: it changes with the image's content, the suite and what is expected."""
    expected = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return f"{config.removeprefix('sha256:')}.{suite.removeprefix('sha256:')[:32]}.{expected[:32]}.json"


def read_record(path: Path, trial: Trial, suite: str) -> Report | None:
    """The pass that was kept; None when there is none or what is there is not one of this image and suite."""
    try:
        document = json.loads(path.read_bytes())
        kept = document["report"]
        whole = (
            document["format"] == RECORD_FORMAT
            and kept["config"] == trial.image.config
            and kept["suite"] == suite
            and kept["passed"] is True
            and {row["name"] for row in kept["checks"]} == set(required_checks(trial.definition))
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
            checks=tuple(
                CheckResult(
                    name=row["name"],
                    state=CheckState(row["state"]),
                    detail=str(row["detail"]),
                    seconds=float(row["seconds"]),
                    numbers=tuple((str(key), float(value)) for key, value in sorted(row["numbers"].items())),
                )
                for row in kept["checks"]
            ),
            from_record=True,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_record(path: Path, report: Report) -> None:
    """Beside and renamed. A record that cannot be kept costs the next call a run and is no error."""
    document = {"format": RECORD_FORMAT, "report": format_report(report)}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(prefix=f".{path.name[:16]}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1, sort_keys=True)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            Path(beside).replace(path)
        except OSError:
            Path(beside).unlink(missing_ok=True)


# --- showing it ----------------------------------------------------------------------------------


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
        "from_record": report.from_record,
        "checks": [format_row(check) for check in report.checks],
    }


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
