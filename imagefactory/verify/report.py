"""A GPU report as JSON and back: what `verify` writes, what a kit's result becomes, what a verdict signs.

The parser takes exactly what the formatter gives. What it reads may come from a stranger: sizes are capped,
texts are one printable line, and a value that the report's own fields contradict is refused. The shapes stand
in verdict.schema.json too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from imagefactory.errors import StatementError
from imagefactory.model import CheckResult, CheckState, Completed, Outcome
from imagefactory.verify.model import LEVELS, EvidenceKind, GpuIdentity, GpuReport, Hardware, Subject
from imagefactory.verify.suite_report import format_row

T = TypeVar("T")

FORMAT = 1
LARGEST_NUMBER = 1e300
MOST_ROWS = 256
LONGEST_TEXT = 4096
MOST_SAID = 10
HIDDEN = (
    "\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb"
)
"""Characters that steer a terminal or hide in a text: controls, bidirectional marks, halves of pairs."""

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
CAPABILITY = re.compile(r"[1-9][0-9]?\.[0-9]")
UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NONCE = re.compile(r"[A-Za-z0-9_-]{16,128}")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
NODE = re.compile(r"/dev/nvidia[0-9]{1,3}")
VERSION = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,3}")
_OUTCOMES, _STATES = tuple(Outcome), tuple(CheckState)
_LINE = re.compile(f"[^{HIDDEN}]*")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{6})?Z")


def format_time(time: datetime) -> str:
    """`2026-11-22T02:15:26Z`, with microseconds where there are some."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def format_gpu_report(report: GpuReport) -> dict[str, Any]:
    """The report as JSON; `format` is its version. Tuples are lists, numbers of a check a flat object."""
    return {
        "format": FORMAT,
        "subject": {
            "target": report.subject.target,
            "index": report.subject.index,
            "manifest": report.subject.manifest,
            "config": report.subject.config,
        },
        "suite": report.suite,
        "level": report.level,
        "nonce": report.nonce,
        "started": format_time(report.started),
        "ended": format_time(report.ended),
        "runner": report.runner,
        "hardware": None if report.hardware is None else format_hardware(report.hardware),
        "device": None if report.device is None else format_gpu(report.device),
        "cuda": report.cuda,
        "checks": [format_row(check) for check in report.checks],
        "outcome": report.outcome.value,
        "reason": report.reason,
        "waived": list(report.waived),
        "contradictions": list(report.contradictions),
        "rehearsal": report.rehearsal,
    }


def format_hardware(hardware: Hardware) -> dict[str, Any]:
    return {
        "kind": hardware.kind.value,
        "driver": hardware.driver,
        "gpus": [format_gpu(gpu) for gpu in hardware.gpus],
        "known": list(hardware.known),
        "nodes": list(hardware.nodes),
        "notes": [{"name": name, "text": text} for name, text in hardware.notes],
    }


def format_gpu(gpu: GpuIdentity) -> dict[str, Any]:
    return {"name": gpu.name, "capability": gpu.capability, "uuid": gpu.uuid, "memory": gpu.memory}


def parse_gpu_report(value: object, where: str) -> GpuReport:
    """The report that `format_gpu_report` made this of. `where` is what messages begin with.

    Raises StatementError for anything else: a missing or further field, a value of another kind, a text with
    characters that steer a terminal, a check twice, an end before its start.
    """
    row = fields(
        value,
        where,
        "format subject suite level nonce started ended runner hardware device cuda checks outcome reason "
        "waived contradictions rehearsal",
    )
    if row["format"] != FORMAT or isinstance(row["format"], bool):
        raise fault(f"{where}: format", f"this version reads {FORMAT}")
    subject = fields(row["subject"], f"{where}: subject", "target index manifest config")
    device, hardware = row["device"], row["hardware"]
    report = GpuReport(
        subject=Subject(
            target=word(subject["target"], f"{where}: subject.target", NAME, empty=True),
            index=word(subject["index"], f"{where}: subject.index", DIGEST),
            manifest=word(subject["manifest"], f"{where}: subject.manifest", DIGEST),
            config=word(subject["config"], f"{where}: subject.config", DIGEST),
        ),
        suite=word(row["suite"], f"{where}: suite", DIGEST),
        level=_one_of(row["level"], f"{where}: level", LEVELS),
        nonce=word(row["nonce"], f"{where}: nonce", NONCE),
        started=parse_time(row["started"], f"{where}: started"),
        ended=parse_time(row["ended"], f"{where}: ended"),
        runner=word(row["runner"], f"{where}: runner", NAME),
        hardware=None if hardware is None else parse_hardware(hardware, f"{where}: hardware"),
        device=None if device is None else parse_gpu(device, f"{where}: device"),
        cuda=word(row["cuda"], f"{where}: cuda", VERSION, empty=True),
        checks=_items(row["checks"], f"{where}: checks", _parse_check),
        outcome=Outcome(_one_of(row["outcome"], f"{where}: outcome", _OUTCOMES)),
        reason=line(row["reason"], f"{where}: reason"),
        waived=_items(row["waived"], f"{where}: waived", lambda name, at: word(name, at, NAME)),
        contradictions=_items(row["contradictions"], f"{where}: contradictions", line),
        rehearsal=_flag(row["rehearsal"], f"{where}: rehearsal"),
    )
    names = [check.name for check in report.checks]
    if len(set(names)) != len(names):
        raise fault(f"{where}: checks", "a check stands there twice")
    if report.ended < report.started:
        raise fault(f"{where}: ended", "that is before it started")
    return report


def parse_hardware(value: object, where: str) -> Hardware:
    """Raises StatementError for anything but what `format_hardware` gives."""
    row = fields(value, where, "kind driver gpus known nodes notes")
    return Hardware(
        kind=EvidenceKind(_one_of(row["kind"], f"{where}.kind", tuple(EvidenceKind))),
        driver=word(row["driver"], f"{where}.driver", VERSION, empty=True),
        gpus=_items(row["gpus"], f"{where}.gpus", parse_gpu),
        known=_items(row["known"], f"{where}.known", lambda uuid, at: word(uuid, at, UUID)),
        nodes=_items(row["nodes"], f"{where}.nodes", lambda node, at: word(node, at, NODE)),
        notes=_items(row["notes"], f"{where}.notes", _parse_note),
    )


def parse_gpu(value: object, where: str) -> GpuIdentity:
    """Raises StatementError for anything but what `format_gpu` gives."""
    row = fields(value, where, "name capability uuid memory")
    memory = row["memory"]
    if isinstance(memory, bool) or not isinstance(memory, int) or not 0 <= memory < 1 << 53:
        raise fault(f"{where}.memory", "that is no count of bytes")
    return GpuIdentity(
        name=line(row["name"], f"{where}.name"),
        capability=word(row["capability"], f"{where}.capability", CAPABILITY),
        uuid=word(row["uuid"], f"{where}.uuid", UUID),
        memory=memory,
    )


def _parse_check(value: object, where: str) -> CheckResult:
    row = fields(value, where, "name state detail seconds numbers")
    numbers = row["numbers"]
    if not isinstance(numbers, dict) or len(numbers) > MOST_ROWS:
        raise fault(f"{where}.numbers", f"that is no object of at most {MOST_ROWS} numbers")
    seconds = _number(row["seconds"], f"{where}.seconds")
    if seconds < 0:
        raise fault(f"{where}.seconds", "that is below 0")
    return CheckResult(
        name=word(row["name"], f"{where}.name", NAME),
        state=CheckState(_one_of(row["state"], f"{where}.state", _STATES)),
        detail=line(row["detail"], f"{where}.detail"),
        seconds=seconds,
        numbers=tuple(
            (line(name, f"{where}.numbers"), _number(number, f"{where}.numbers.{name}"))
            for name, number in sorted(numbers.items())
        ),
    )


def _parse_note(value: object, where: str) -> tuple[str, str]:
    row = fields(value, where, "name text")
    return line(row["name"], f"{where}.name"), line(row["text"], f"{where}.text")


# --- the parts of any such document ---------------------------------------------------------------


def fault(where: str, what: str) -> StatementError:
    return StatementError(
        f"{shown(where)}: {what}",
        hint="it was not written by this program, or was changed since: verify again",
    )


def shown(text: str) -> str:
    """A stranger's text for a message: one line, not long, nothing in it that steers a terminal."""
    return re.sub(f"[{HIDDEN}]", "?", text[:200])


def fields(value: object, where: str, names: str) -> Mapping[str, Any]:
    """An object with exactly these fields. Raises StatementError."""
    wanted = set(names.split())
    if not isinstance(value, dict):
        raise fault(where, "that is no object")
    for name in sorted(wanted ^ set(value)):
        raise fault(
            where, f"'{shown(name)}' is missing" if name in wanted else f"'{shown(name)}' is no field"
        )
    return value


def word(value: object, where: str, pattern: re.Pattern[str], *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (pattern.fullmatch(value) or (empty and not value)):
        raise fault(where, "that value has not the form it must have")
    return value


def line(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not _LINE.fullmatch(value):
        raise fault(where, f"that is not one printable line of at most {LONGEST_TEXT} characters")
    return value


def parse_completed(row: Mapping[str, Any], where: str, longest: float) -> Completed:
    """How a suite's process ended, by run.json: its code, its seconds (below `longest`), its last lines.

    Raises StatementError for a value that neither a kit nor a job writes.
    """
    code, seconds, said = row["returncode"], row["seconds"], row["said"]
    whole = (
        isinstance(row["timed_out"], bool)
        and isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and 0 <= seconds < longest
        and isinstance(code, int)
        and not isinstance(code, bool)
        and 0 <= code < 256
        and isinstance(said, list)
        and len(said) <= MOST_SAID
    )
    if not whole:
        raise fault(where, "it tells an end that no run has")
    return Completed(
        returncode=code,
        stdout="\n".join(line(text, f"{where}: said") for text in said),
        stderr="",
        seconds=float(seconds),
        timed_out=row["timed_out"],
    )


def parse_time(value: object, where: str) -> datetime:
    """An aware time in UTC. Raises StatementError for any other form than `format_time` gives."""
    if isinstance(value, str) and _TIME.fullmatch(value):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            if format_time(time) == value:
                return time
    raise fault(where, "that is no time such as 2026-01-31T12:00:00Z")


def _items(value: object, where: str, parse: Callable[[object, str], T]) -> tuple[T, ...]:
    if not isinstance(value, list) or len(value) > MOST_ROWS:
        raise fault(where, f"that is no list of at most {MOST_ROWS}")
    return tuple(parse(item, f"{where}[{number}]") for number, item in enumerate(value))


def _one_of(value: object, where: str, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise fault(where, f"that is none of {', '.join(known)}")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        raise fault(where, "that is no number")  # of NaN too: it is not smaller than anything
    return float(value)


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise fault(where, "that is neither true nor false")
    return value
