"""T1: does the image's code run on this GPU, as machine code and as PTX, and is that what was predicted.

Each of the two is asked in a process of its own, in which the driver was told to pass over the other kind.
What the answer means is decided outside of it, by `judge` and `neither`, because it may have been a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...context import Finding
from .. import table
from ..context import GpuContext, Predicted

# Part -> (what it looks for, the field of a prediction that claims it).
CLAIMS = {"native": ("machine code", "native"), "ptx": ("PTX", "ptx")}

# Words of a failure that come of code that is not there. A library told to pass over all the code it has
# says what it likes: some abort, some hang while they compile.
ABSENT = (table.NO_KERNEL, table.LOAD_FAILED, table.TIMEOUT)

# What may be said of claimed PTX where machine code runs, and in which words.
_SPARED = {
    table.DRIVER_TOO_OLD: "and the PTX is newer than this driver's compiler",
    table.LOAD_FAILED: "and with nothing but PTX the libraries do not load",
    table.TIMEOUT: "and with nothing but PTX it takes too long",
}


def check_native_code(context: GpuContext) -> Finding:
    """A few operations with the driver's compiler for PTX switched off (CUDA_DISABLE_PTX_JIT)."""
    found: Finding = context.framework.probe(context)
    return found


def check_ptx_code(context: GpuContext) -> Finding:
    """The same with all machine code passed over (CUDA_FORCE_PTX_JIT)."""
    found: Finding = context.framework.probe(context)
    return found


def judge(part: str, rows: Sequence[dict[str, Any]], predicted: Predicted | None) -> list[dict[str, Any]]:
    """The part's one row against what the host's scan predicts, None where it predicts nothing.

    `works` is 1 where the operations ran and agreed, 0 where not; `contradiction` is 1 where that is not what
    was predicted. Code that is not there and was not claimed is no failure; of any other failure the
    prediction says nothing.
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
    """Makes `ptx-code` pass where `native-code` ran and the PTX did not get as far as to be refused.

    This GPU has no use for the PTX then. Within a major version of CUDA an older driver runs newer machine
    code and need not compile newer PTX (NVIDIA, "CUDA Compatibility", minor version compatibility). A library
    that was told to pass over the code that it always runs may fail or hang in its own ways: that differs
    from what was predicted, and is told as such. PTX that the driver finds and cannot use stays a failure.
    """
    (row,) = rows
    word = row["outcome"]
    native = any(one["name"] == "native-code" and one["numbers"].get("works") == 1.0 for one in before)
    if row["name"] != "ptx-code" or word not in _SPARED or not native:
        return list(rows)
    numbers = {**row["numbers"], f"absent-{word}": 1.0}
    if word != table.DRIVER_TOO_OLD:
        numbers["contradiction"] = 1.0
    detail = f"machine code runs, {_SPARED[word]} ({row['detail']})"
    return [{**row, "state": table.PASSED, "outcome": "", "detail": detail, "numbers": numbers}]


def neither(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes `ptx-code` fail where it and `native-code` before it both say that nothing ran."""
    (row,) = rows
    both = [*(one for one in before if one["name"] == "native-code"), row]
    if len(both) < 2 or any(one["numbers"].get("works") != 0.0 for one in both):
        return list(rows)
    words = [_absence(one) for one in both]
    outcome = table.NO_KERNEL if table.NO_KERNEL in words else next(word for word in words if word)
    return [
        {
            **row,
            "state": table.FAILED,
            "outcome": outcome,
            "detail": f"neither machine code nor PTX of the image runs here; {row['detail']}",
            "numbers": {**row["numbers"], "neither": 1.0},
        }
    ]


def _absence(row: dict[str, Any]) -> str:
    """The word by which a row of T1 says that nothing ran."""
    if row["outcome"]:
        return str(row["outcome"])
    return next((word for word in ABSENT if f"absent-{word}" in row["numbers"]), table.LOAD_FAILED)
