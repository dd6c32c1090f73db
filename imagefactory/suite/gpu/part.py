"""One part of the GPU suite, in a separate process: runs its checks and writes their results.

It writes the report of the part before and after every check. So if a check ends the process, the report
names that check.
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
from ..context import CheckFailure, write_json
from . import checks, table
from .context import GpuContext, parse_request
from .frameworks import results

# Tells later parts the device of T0, as JSON.
DEVICE_VARIABLE = "IMAGEFACTORY_DEVICE"

LARGEST_NUMBER = 1e300  # what the host accepts; false for NaN as well


def main(part: str, expectations: str, report: str) -> int:
    """Return 0 when every check of the part passed or cannot apply, 1 otherwise."""
    faulthandler.enable()
    with open(expectations, encoding="utf-8") as file:
        request = parse_request(file.read())
    context = GpuContext(
        request=request,
        framework=None,
        site=sysconfig.get_path("purelib"),
        prefix=sys.prefix,
        device=json.loads(os.environ.get(DEVICE_VARIABLE, "{}")),
    )
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    fault, context = load_framework(part, context)
    for name in table.PARTS[part]:
        write_json(report, {"running": name, "facts": facts, "checks": rows})
        failed = next((row["name"] for row in rows if row["state"] == table.FAILED), "")
        if failed and part in table.CHAINED:
            row = make_row(name, table.NOT_RUN, f"'{failed}' failed before it")
        else:
            row, discovered = run_check(name, context, fault)
            facts.update(discovered)
            context = replace(context, device=facts.get("device", context.device))
        rows.append(row)
        print(f"{name}: {row['state']} - {row['detail']}", flush=True)
    write_json(report, {"running": "", "facts": facts, "checks": rows})
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if all(row["state"] in (table.PASSED, table.NOT_APPLICABLE) for row in rows) else 1


def load_framework(part: str, context: GpuContext) -> tuple[Exception | None, GpuContext]:
    """Return the context with its framework, ready for the first import, or why that failed."""
    name = context.request.expected.framework
    if part == "driver" or name == frameworks.OTHER:
        return None, context
    try:
        framework = importlib.import_module(f"{__package__}.frameworks.{name}")
        context = replace(context, framework=framework)
        if hasattr(framework, "prepare"):
            framework.prepare(context)
    except Exception as error:  # whatever an image's package raises
        return error, context
    return None, context


def run_check(
    name: str, context: GpuContext, fault: Exception | None
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the row and facts of a check. An exception in a check is its failure, and so is `fault`."""
    expected = context.request.expected
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
        outcome = results.classify(error) if context.framework else table.LOAD_FAILED
        row = failed_row(name, f"{type(error).__name__}: {error}", outcome=outcome)
    row["seconds"] = round(time.monotonic() - began, 3)
    return row, facts


def failed_row(name: str, detail: str, *, outcome: str = table.LOAD_FAILED) -> dict[str, Any]:
    return make_row(name, table.FAILED, detail, outcome=outcome)


def make_row(
    name: str, state: str, detail: str, *, outcome: str = "", numbers: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return a row of the report without NaN and infinity. A check that measured one of these has failed."""
    values = {key: float(value) for key, value in (numbers or {}).items()}
    odd = sorted(key for key, value in values.items() if not abs(value) <= LARGEST_NUMBER)
    if odd and state == table.PASSED:
        state, outcome = table.FAILED, table.WRONG_NUMBERS
        detail = f"{', '.join(odd)} is not a number; {detail}"
    return {
        "name": name,
        "state": state,
        "detail": detail,
        "outcome": outcome,
        "seconds": 0.0,
        "numbers": {key: value for key, value in values.items() if key not in odd},
    }
