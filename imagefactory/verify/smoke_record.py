"""Records of smoke tests that passed, and the report as JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imagefactory.serialize import format_value, parse_value
from imagefactory.errors import StatementError
from imagefactory.fs import replacing, seal, unseal
from imagefactory.model import CheckResult, Outcome, Report
from imagefactory.verify.model import Trial
from imagefactory.verify.suite_files import required_checks

RECORD_FORMAT = REPORT_FORMAT = 1


def record_name(image: str, suite: str, asked: Mapping[str, Any]) -> str:
    """File name of a record: it changes with the image's digest, the suite and what is expected."""
    expected = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return f"{image.removeprefix('sha256:')}.{suite.removeprefix('sha256:')[:32]}.{expected[:32]}.json"


def read_record(path: Path, trial: Trial, suite: str) -> Report | None:
    """The pass that was kept; None when there is none or what is there is not one of this image and suite."""
    try:
        document = json.loads(unseal(path) or b"null")
        kept = document["report"]
        whole = (
            document["format"] == RECORD_FORMAT
            and kept["image"] == trial.image.digest
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
            checks=parse_value(kept["checks"], tuple[CheckResult, ...], "record"),
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
            file.write(seal(path, json.dumps(document, indent=1, sort_keys=True).encode()))


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
