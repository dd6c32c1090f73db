"""Run the requested checks and write the report.

The report is written again after every check. So if a framework ends the process, the report names the
running check.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import sysconfig
import time
from typing import Any

from . import checks, table
from .context import CheckFailure, Context, Expected, Finding, parse_expected, write_json


def main(expectations: str, report: str) -> int:
    """Return 0 when every requested check passed or cannot apply, 1 otherwise."""
    faulthandler.enable()
    with open(expectations, encoding="utf-8") as file:
        expected = parse_expected(file.read())
    framework: Any = importlib.import_module(f"{__package__}.frameworks.{expected.framework}")
    if hasattr(framework, "prepare"):
        framework.prepare()
    context = Context(expected, framework, site=sysconfig.get_path("purelib"), prefix=sys.prefix)
    rows: list[dict[str, Any]] = []
    for name in expected.checks:
        write_report(report, expected, rows, running=name)
        rows.append(run_check(name, context))
        print(f"{name}: {rows[-1]['state']} - {rows[-1]['detail']}", flush=True)
    write_report(report, expected, rows, running="")
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if all(row["state"] in (table.PASSED, table.NOT_APPLICABLE) for row in rows) else 1


def run_check(name: str, context: Context) -> dict[str, Any]:
    """Return a row of the report. Any exception of a check is a failure of that check."""
    began = time.monotonic()
    state, outcome, numbers = table.FAILED, "", {}
    reason = table.check_not_applicable(context.expected.framework, name, context.expected.locked)
    if reason:
        state, detail = table.NOT_APPLICABLE, reason
    else:
        try:
            finding: Finding = checks.CHECKS[name](context)
            state, detail, numbers = table.PASSED, finding.detail, dict(finding.numbers)
        except CheckFailure as failure:
            detail, outcome = failure.detail, failure.outcome
        except Exception as error:
            detail, outcome = f"{type(error).__name__}: {error}", table.LOAD_FAILED
        except SystemExit as error:
            detail, outcome = f"a package ended the process: SystemExit({error.code!r})", table.LOAD_FAILED
    return {
        "name": name,
        "state": state,
        "detail": detail,
        "outcome": outcome,
        "seconds": round(time.monotonic() - began, 3),
        "numbers": {key: float(value) for key, value in numbers.items()},
    }


def write_report(path: str, expected: Expected, rows: list[dict[str, Any]], *, running: str) -> None:
    document = {
        "format": table.FORMAT,
        "nonce": expected.nonce,
        "target": expected.target,
        "python": ".".join(map(str, sys.version_info[:3])),
        "running": running,
        "checks": rows,
    }
    write_json(path, document, allow_nan=True)
