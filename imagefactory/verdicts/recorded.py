"""How fast a GPU was seen to be: what verdicts of the full suite hold of it, for emulating one. Pure.

The numbers of the check `profile` are times by the operations or the bytes of one call:
`product-fp16-2147483648`, `move-3145728`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from imagefactory.model import CheckState
from imagefactory.verdicts.model import Judged, Standing, Verdict

PROFILE = "profile"
NEEDED = ("product-fp32", "convolution-fp32", "backward-fp32", "move")
COPIES = ("up-pinned", "up-pageable", "down-pinned", "down-pageable")
SINGLE = ("processors", "context", "kernel", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A GPU as one run met it. `memory` and `context` in bytes, `kernel` and `launch` in seconds; `curves` by
    name as pairs of an amount and its seconds, the smallest first.
    """

    driver: str
    when: datetime
    memory: int
    processors: int
    context: int
    kernel: float
    launch: float
    curves: Mapping[str, tuple[tuple[float, float], ...]]


def find_recorded(judged: Iterable[Judged], device: str) -> Recorded | None:
    """The newest that can be relied on, of a GPU that its driver calls `device`; None without one."""
    found = (
        recorded
        for one in judged
        if one.verdict and one.standing is Standing.GOOD and (recorded := _recorded(one.verdict, device))
    )
    return max(found, key=lambda one: one.when, default=None)


def _recorded(verdict: Verdict, device: str) -> Recorded | None:
    report = verdict.report
    if report.device is None or report.hardware is None or report.device.name != device:
        return None
    numbers = numbers_of(verdict, PROFILE)
    curves = curves_of(numbers)
    if not {*NEEDED, *COPIES} <= set(curves) or not {*SINGLE} <= set(numbers):
        return None
    return Recorded(
        driver=report.hardware.driver,
        when=verdict.issued,
        memory=report.device.memory,
        processors=int(numbers["processors"]),
        context=int(numbers["context"]),
        kernel=numbers["kernel"],
        launch=numbers["launch"],
        curves=curves,
    )


def numbers_of(verdict: Verdict, name: str) -> dict[str, float]:
    """Those of a check that passed; none of another."""
    checks = (check for check in verdict.report.checks if check.name == name)
    return next((dict(check.numbers) for check in checks if check.state is CheckState.PASSED), {})


def curves_of(numbers: Mapping[str, float]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Numbers whose names end with an amount, by what stands before it. Those of no time are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, seconds in numbers.items():
        what, _, amount = name.rpartition("-")
        if what and amount.isdecimal() and int(amount) > 0 and seconds > 0:
            found.setdefault(what, []).append((float(amount), seconds))
    return {what: tuple(sorted(points)) for what, points in found.items()}
