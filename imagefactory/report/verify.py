"""A run of the GPU suite as a person reads it: each check with its numbers, and what is proven. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from imagefactory.model import CheckResult, CheckState, Outcome
from imagefactory.progress import format_bytes
from imagefactory.views.text import format_fields, format_table, wrap
from imagefactory.verify.model import SEVERAL, GpuReport

WIDTH, MIN_WIDTH = 110, 60
_MARK = {
    CheckState.PASSED: "passed",
    CheckState.FAILED: "FAILED",
    CheckState.NOT_APPLICABLE: "not applicable",
    CheckState.NOT_RUN: "not run",
}
_LATENCY = re.compile(r"(?P<model>.+)-(?P<device>cpu|gpu)-(?P<engine>.+)-(?P<percent>p50|p95)-ms")


def format_gpu_run(report: GpuReport, width: int | None = None) -> str:
    """What ran on what, the checks, the latencies, and the outcome."""
    room = max(min(width or WIDTH, WIDTH), MIN_WIDTH)
    blocks = [_where(report), format_checks(report.checks, room)]
    if latencies := format_latencies(report.checks):
        blocks.append(latencies)
    blocks.append(_outcome(report, room))
    return "\n\n".join(block for block in blocks if block)


def format_checks(checks: Iterable[CheckResult], width: int) -> str:
    """A line or more for each check, its numbers below it; latencies have a table of their own."""
    rows = list(checks)
    names = max((len(check.name) for check in rows), default=0)
    lines = []
    for check in rows:
        seconds = f"{check.seconds:.1f} s" if check.seconds else ""
        first = f"{check.name:<{names}}  {_MARK[check.state]:<14}  {seconds:>8}  "
        text = wrap(check.detail, max(width - len(first), 40)) or [""]
        lines.append(f"{first}{text[0]}".rstrip())
        lines += [" " * len(first) + more for more in text[1:]]
        numbers = [format_number(key, value) for key, value in check.numbers if not _LATENCY.fullmatch(key)]
        lines += [" " * len(first) + more for more in wrap(", ".join(numbers), max(width - len(first), 40))]
    return "\n".join(lines)


def format_number(name: str, value: float) -> str:
    """`error 1.5e-07`, `elements 30011`, `taken 268.4 MB` of `taken-bytes`."""
    if name.endswith("-bytes") and 0 <= value < 1e18:
        return f"{name.removesuffix('-bytes')} {format_bytes(int(value))}"
    whole = value.is_integer() and abs(value) < 1e9
    return f"{name} {int(value) if whole else format(value, '.4g')}"


def format_latencies(checks: Iterable[CheckResult]) -> str:
    """Milliseconds of models by framework and runtime, on CPU and GPU; empty where none were measured."""
    latencies: dict[tuple[str, str, str], dict[str, float]] = {}
    for check in checks:
        for key, value in check.numbers:
            if match := _LATENCY.fullmatch(key):
                row = (match["model"], match["engine"], match["device"])
                latencies.setdefault(row, {})[match["percent"]] = value
    rows = [
        (model, engine, device, *(f"{times[key]:.3f}" if key in times else "" for key in ("p50", "p95")))
        for (model, engine, device), times in latencies.items()
    ]
    return format_table(("model", "by", "on", "p50 ms", "p95 ms"), rows) if rows else ""


def _where(report: GpuReport) -> str:
    device, hardware = report.device, report.hardware
    name = report.subject.target or report.subject.manifest
    if report.rehearsal:
        gpu = "a rehearsal on the CPU"
    elif device is None:
        gpu = "no GPU was met"
    else:
        gpu = f"{gpus_of(report)} ({device.capability}, {device.memory / 2**30:.0f} GiB)"
    driver = f", driver {hardware.driver}" if hardware else ""
    cuda = f", CUDA {report.cuda}" if report.cuda else ""
    return f"{name}  {report.level} suite on {gpu}{driver}{cuda}, by {report.runner}"


def gpus_of(report: GpuReport) -> str:
    """`NVIDIA A100`, or `2 x NVIDIA A100`; `-` where none was met."""
    number = f"{report.gpus} x " if report.level == SEVERAL and report.gpus else ""
    return f"{number}{report.device.name}" if report.device else "-"


def _outcome(report: GpuReport, width: int) -> str:
    fields = [("outcome", f"{report.outcome}: {report.reason}")]
    fields += [("waived", f"{name} did not run, which the recipe waives") for name in report.waived]
    fields += [("contradiction", text) for text in report.contradictions]
    fields += [("manifest", report.subject.manifest)]
    if report.outcome is Outcome.VERIFIED and report.device and report.hardware:
        holds = f"capability {report.device.row}, driver {report.hardware.driver} and newer"
        fields.append(("holds for", holds))
    left = max(len(name) for name, _ in fields) + 2
    folded = [(name, "\n".join(wrap(text, width - left))) for name, text in fields]
    return format_fields(folded, indent="")
