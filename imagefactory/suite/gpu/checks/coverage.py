"""T1: does the code of the image run on this GPU, as machine code and as PTX, as predicted?

Each of the two types has a separate process, in which the driver skips the other type. The process may crash,
so `judge`, `spare` and `neither` decide outside of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ...context import Finding
from .. import table
from ..context import GpuContext, Predicted

# Part -> (the kind of code, the field of a prediction that claims it).
CLAIMS = {"native": ("machine code", "native"), "ptx": ("PTX", "ptx")}

# Outcomes of absent code. A library that must skip all its code fails in its own way: some abort, some hang
# while they compile.
ABSENT = (table.NO_KERNEL, table.LOAD_FAILED, table.TIMEOUT)

# Outcomes of claimed PTX that do not matter where machine code runs, with the text for each.
_SPARED = {
    table.DRIVER_TOO_OLD: "and the PTX is newer than this driver's compiler",
    table.LOAD_FAILED: "and with nothing but PTX the libraries do not load",
    table.TIMEOUT: "and with nothing but PTX it takes too long",
}


def check_native_code(context: GpuContext) -> Finding:
    """Run a few operations. The variables of the part disable one type of code (table.PART_ENVIRONMENT)."""
    probe: Any = importlib.import_module("..frameworks.probe", __package__)  # imports numpy
    finding: Finding = probe.run_probe(context)
    return finding


check_ptx_code = check_native_code


def judge(part: str, rows: Sequence[dict[str, Any]], predicted: Predicted | None) -> list[dict[str, Any]]:
    """Compare the only row of the part with the prediction from the host's scan, None without a prediction.

    `works` is 1 if the operations ran and agreed, else 0. `contradiction` is 1 if the prediction differs.
    Missing code that was not predicted is not a failure. The prediction does not cover other failures.
    """
    kind, field = CLAIMS[part]
    (row,) = rows
    claimed = bool(predicted is not None and getattr(predicted, field))
    works = row["state"] == table.PASSED
    if row["state"] == table.NOT_APPLICABLE:
        return [row]
    row = {**row, "numbers": {**row["numbers"], "works": float(works)}}
    scan = predicted.reason if predicted is not None else "nothing was predicted"
    if works and not claimed and predicted is not None:
        _contradict(row, f"{kind} runs that was not found ({scan})")
    elif not works and claimed and row["outcome"] == table.NO_KERNEL:
        _contradict(row, f"{kind} was found ({scan})")
    elif not works and not claimed and row["outcome"] in ABSENT:
        why = "as predicted" if predicted is not None else scan
        row.update(state=table.PASSED, detail=f"no {kind}, {why} ({row['outcome']}: {row['detail']})")
        row["numbers"][f"absent-{row['outcome']}"] = 1.0
        row["outcome"] = ""
    return [row]


def _contradict(row: dict[str, Any], how: str) -> None:
    row["numbers"]["contradiction"] = 1.0
    row["detail"] += f"; this contradicts the prediction: {how}"


def spare(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let `ptx-code` pass if `native-code` ran and the driver did not reject the PTX.

    This GPU does not need the PTX then. Within a CUDA major version, an older driver runs newer machine code
    but may be unable to compile newer PTX (NVIDIA, "CUDA Compatibility", minor version compatibility). A
    library without its usual code may fail or hang in other ways, which contradicts the prediction. PTX that
    the driver finds but cannot use stays a failure.
    """
    (row,) = rows
    outcome = row["outcome"]
    native = any(each["name"] == "native-code" and each["numbers"].get("works") == 1.0 for each in before)
    if row["name"] != "ptx-code" or outcome not in _SPARED or not native:
        return list(rows)
    numbers = {**row["numbers"], f"absent-{outcome}": 1.0}
    if outcome != table.DRIVER_TOO_OLD:
        numbers["contradiction"] = 1.0
    detail = f"machine code runs, {_SPARED[outcome]} ({row['detail']})"
    return [{**row, "state": table.PASSED, "outcome": "", "detail": detail, "numbers": numbers}]


def neither(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let `ptx-code` fail if neither `ptx-code` nor `native-code` ran an operation."""
    (row,) = rows
    both = [*(each for each in before if each["name"] == "native-code"), row]
    if len(both) < 2 or any(each["numbers"].get("works") != 0.0 for each in both):
        return list(rows)
    outcomes = [
        each["outcome"]
        or next((word for word in ABSENT if f"absent-{word}" in each["numbers"]), table.LOAD_FAILED)
        for each in both
    ]
    outcome = table.NO_KERNEL if table.NO_KERNEL in outcomes else outcomes[0]
    detail = f"neither machine code nor PTX of the image runs here; {row['detail']}"
    numbers = {**row["numbers"], "neither": 1.0}
    return [{**row, "state": table.FAILED, "outcome": outcome, "detail": detail, "numbers": numbers}]
