"""How fast a GPU was seen to be: what verdicts of the full suite hold of it, for emulating one. Pure.

The numbers of the check `profile` are times by the operations or the bytes of one call:
`product-fp16-2147483648-s`, `move-3145728-s`. Those of `all-reduce`, of several GPUs, are by bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from imagefactory.model import CheckState
from imagefactory.trust.verdict import Judged, Standing, Verdict

PROFILE, ALL_REDUCE, PEER = "profile", "all-reduce", "peer"
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
    """The newest that can be relied on, of a GPU that its driver calls `device`; None without one.

    What several of them sent each other is the newest verdict's on those.
    """
    its = sorted(
        (one.verdict for one in judged if one.verdict and one.standing is Standing.GOOD),
        key=lambda verdict: verdict.issued,
        reverse=True,
    )
    its = [verdict for verdict in its if verdict.report.device and verdict.report.device.name == device]
    found = next((recorded for verdict in its if (recorded := _recorded(verdict))), None)
    peers = next((peers for verdict in its if (peers := _peers(verdict))), ())
    return replace(found, curves={**found.curves, PEER: peers}) if found and peers else found


def _peers(verdict: Verdict) -> tuple[tuple[float, float], ...]:
    """Seconds by the bytes that each GPU of an all-reduce sends: in a ring of n, 2 (n - 1) / n of its own."""
    count = verdict.report.gpus
    sums = curves_of(numbers_of(verdict, ALL_REDUCE)).get(ALL_REDUCE, ())
    return tuple((size * 2 * (count - 1) / count, took) for size, took in sums) if count > 1 else ()


def _recorded(verdict: Verdict) -> Recorded | None:
    report = verdict.report
    if report.device is None or report.hardware is None:
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
    """Those of a check that passed, without the units in their names; none of another."""
    checks = (check for check in verdict.report.checks if check.name == name)
    passed = (check for check in checks if check.state is CheckState.PASSED)
    return next((without_units(dict(check.numbers)) for check in passed), {})


def without_units(numbers: Mapping[str, float]) -> dict[str, float]:
    """Seconds and bytes by the names of what they are of."""
    return {name.removesuffix("-s").removesuffix("-bytes"): value for name, value in numbers.items()}


def curves_of(numbers: Mapping[str, float]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Numbers whose names end with an amount, by what stands before it. Those of no time are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, seconds in numbers.items():
        what, _, amount = name.rpartition("-")
        if what and amount.isdecimal() and int(amount) > 0 and seconds > 0:
            found.setdefault(what, []).append((float(amount), seconds))
    return {what: tuple(sorted(points)) for what, points in found.items()}
