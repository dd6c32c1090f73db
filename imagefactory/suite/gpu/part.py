"""One part of the GPU suite, in a process of its own: runs its checks and writes what they say.

The part's report is written before and after every check, so one that takes the process down leaves a report
that says which check was running.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import table as frameworks
from ..context import CheckFailure
from . import checks, table
from .context import GpuContext, parse_asked

# How the device that T0 found comes to the later parts: as JSON.
DEVICE_VARIABLE = "IMAGEFACTORY_DEVICE"

LARGEST_NUMBER = 1e300  # what the host takes; false for NaN as well


def main(part: str, expectations: str, report: str) -> int:
    """Exit code 0 when every check of the part passed or cannot apply, 1 otherwise."""
    faulthandler.enable()
    with open(expectations, encoding="utf-8") as file:
        asked = parse_asked(file.read())
    context = GpuContext(
        asked=asked,
        framework=None,
        site=sysconfig.get_path("purelib"),
        prefix=sys.prefix,
        device=json.loads(os.environ.get(DEVICE_VARIABLE, "{}")),
    )
    names = table.PARTS[part]
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    fault, context = load_framework(part, context)
    for name in names:
        write_part(report, rows, facts, running=name)
        failed = next((row["name"] for row in rows if row["state"] == table.FAILED), "")
        if failed and part in table.CHAINED:
            row = make_row(name, table.NOT_RUN, f"'{failed}' failed before it")
        else:
            row, found = run_check(name, context, fault)
            facts.update(found)
            context = replace(context, device=facts.get("device", context.device))
        rows.append(row)
        print(f"{name}: {row['state']} - {row['detail']}", flush=True)
    write_part(report, rows, facts, running="")
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if all(row["state"] in (table.PASSED, table.NOT_APPLICABLE) for row in rows) else 1


def load_framework(part: str, context: GpuContext) -> tuple[Exception | None, GpuContext]:
    """The context with its framework, ready for its first import; an exception where that cannot be."""
    name = context.asked.expected.framework
    if part == "driver" or name == frameworks.OTHER:
        return None, context
    try:
        framework = importlib.import_module(f"{__package__}.frameworks.{name}")
        context = replace(context, framework=framework)
        framework.prepare(context)
    except Exception as error:  # whatever an image's package raises
        return error, context
    return None, context


def run_check(
    name: str, context: GpuContext, fault: Exception | None
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The check's row and the facts it found. Any exception of a check is its failure; so is `fault`."""
    expected = context.asked.expected
    began = time.monotonic()
    reason = table.not_applicable(expected.framework, name, expected.locked)
    if reason:
        return make_row(name, table.NOT_APPLICABLE, reason), {}
    facts: Mapping[str, Any] = {}
    try:
        if fault is not None:
            raise fault
        finding = checks.find_check(name)(context)
        row = make_row(name, table.PASSED, finding.detail, numbers=finding.numbers)
        facts = getattr(finding, "facts", {})
    except CheckFailure as failure:
        numbers, facts = getattr(failure, "numbers", {}), getattr(failure, "facts", {})
        row = make_row(name, table.FAILED, failure.detail, outcome=failure.outcome, numbers=numbers)
    except SystemExit as error:
        row = failed_row(name, f"a package ended the process: SystemExit({error.code!r})")
    except Exception as error:
        row = failed_row(name, f"{type(error).__name__}: {error}", outcome=classify(context, error))
    row["seconds"] = round(time.monotonic() - began, 3)
    return row, facts


def classify(context: GpuContext, error: Exception) -> str:
    """The word for an exception of the framework; load-failed where its file has none for it."""
    word: object = getattr(context.framework, "classify", lambda _: table.LOAD_FAILED)(error)
    return word if isinstance(word, str) and word in table.OUTCOMES else table.LOAD_FAILED


def failed_row(name: str, detail: str, *, outcome: str = table.LOAD_FAILED) -> dict[str, Any]:
    return make_row(name, table.FAILED, detail, outcome=outcome)


def make_row(
    name: str, state: str, detail: str, *, outcome: str = "", numbers: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """A row of the report. Numbers that are none are left out, and a check that measured one has failed."""
    values = {key: float(value) for key, value in (numbers or {}).items()}
    odd = sorted(key for key, value in values.items() if not abs(value) <= LARGEST_NUMBER)
    if odd and state == table.PASSED:
        state, outcome = table.FAILED, table.WRONG_NUMBERS
        detail = f"{', '.join(odd)} is no number; {detail}"
    return {
        "name": name,
        "state": state,
        "detail": detail,
        "outcome": outcome,
        "seconds": 0.0,
        "numbers": {key: value for key, value in values.items() if key not in odd},
    }


def write_part(path: str, rows: list[dict[str, Any]], facts: Mapping[str, Any], *, running: str) -> None:
    write_json(path, {"running": running, "facts": dict(facts), "checks": rows})


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Beside and renamed: whoever reads sees a whole document."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, allow_nan=False)
    os.replace(f"{path}.part", path)
