"""What became of a node's jobs, by HTCondor's log of them. Pure.

The reader is the POST script's own (node/post.py), for three reasons: DAGMan's decision and ours then rest
on the same words; it needs nothing beside Python; and it goes on after what is no event. The bindings'
JobEventLog ends at the first byte that is not UTF-8, and passes over a log that begins with anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from imagefactory.schedulers.htcondor.ads import read_gpu
from imagefactory.schedulers.htcondor.node.post import EXECUTING, OWN_LIMITS, Event, follow, machine_of, split_events
from imagefactory.schedulers.pool import Ending, JobAttempt, PoolGpu
from imagefactory.verify.suite_report import clean

LIMITS_OVER = "removed by its limits"
"""How the text of an attempt begins that its own `periodic_remove` ended."""
RAN_OUT = f"{LIMITS_OVER} while it ran"

MOST_JOBS = 1000
LOCAL_DAY = timedelta(days=1)

_ATTRIBUTE = re.compile(r"\s+([A-Za-z_][A-Za-z0-9_.]{0,99}) = (.+)")
_PAIR = re.compile(
    r"\s*([A-Za-z_][A-Za-z0-9_.]{0,99}) = "
    r'("(?:[^"\\]|\\.)*"|[+-]?[0-9.]+(?:[Ee][+-]?[0-9]+)?|true|false|undefined)\s*(?:;|$)',
    re.IGNORECASE,
)
_SLOT = re.compile(r"\s*SlotName: ([A-Za-z0-9_.@-]{1,255})")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[Ee][+-]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,254}")


def parse_attempts(
    data: bytes, latest: datetime, to_utc: Callable[[datetime], datetime]
) -> tuple[JobAttempt, ...]:
    """The jobs of a node's log, the oldest first; at most the last MOST_JOBS.

    Logs have local times, some without a year: `to_utc` takes a naive time to UTC, and no time is later than
    `latest` by more than a day.
    """
    jobs: dict[str, list[Event]] = {}
    for event in split_events(data):
        jobs.setdefault(event.job, []).append(event)
    clock = _LogClock(latest, to_utc)
    return tuple(_attempt(job, events, clock) for job, events in list(jobs.items())[-MOST_JOBS:])


def _attempt(job: str, events: list[Event], clock: _LogClock) -> JobAttempt:
    last = follow(events)
    starts = [event for event in events if event.number == EXECUTING]
    told = _attributes(starts[-1]) if starts else {}
    text = last.text
    if last.ending == Ending.REMOVED and OWN_LIMITS in last.text:
        why = last.trouble or last.step
        text = RAN_OUT if last.cut else f"{LIMITS_OVER}: {why}" if why else LIMITS_OVER
    return JobAttempt(
        job=job,
        ending=Ending(last.ending) if last.ending else Ending.LOST,
        code=last.code,
        text=clean(text),
        machine=machine_of(last, starts, last.text) if last.over and not starts else _machine(told),
        slot=_slot(starts[-1]) if starts else "",
        gpu=_gpu(told),
        submitted=clock.read(events[0].time),
        started=clock.read(starts[-1].time) if starts else None,
        ended=clock.read(events[-1].time) if last.over else None,
    )


# --- the startd's words --------------------------------------------------------------------------

Value = str | float | bool | Mapping[str, str | float | bool]


def _attributes(event: Event) -> dict[str, Value]:
    """What the startd said of the slot, by names in small letters; what cannot be read is left out."""
    attributes: dict[str, Value] = {}
    for line in event.lines:
        match = _ATTRIBUTE.fullmatch(line)
        if not match:
            continue
        name, text = match[1].lower(), match[2].strip()
        value = _nested(text[1:-1]) if text.startswith("[") and text.endswith("]") else _plain(text)
        if value is not None:
            attributes[name] = value
    return attributes


def _nested(text: str) -> dict[str, str | float | bool] | None:
    """`Id = "GPU-a0223334"; Capability = 8.0`, None for anything but plain values."""
    attributes: dict[str, str | float | bool] = {}
    at = 0
    while text[at:].strip():
        match = _PAIR.match(text, at)
        if not match:
            return None
        value = _plain(match[2])
        if value is not None:
            attributes[match[1].lower()] = value
        at = match.end()
    return attributes


def _plain(text: str) -> str | float | bool | None:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return float(text) if _NUMBER.fullmatch(text) else None


def _gpu(told: Mapping[str, Value]) -> PoolGpu | None:
    """The one GPU that the job was given; None where it was given none, or several."""
    assigned = told.get("assignedgpus")
    ids = [one for one in re.split(r"[,\s]+", assigned) if one] if isinstance(assigned, str) else []
    if len(ids) != 1:
        return None
    common = {
        name.removeprefix("gpus_"): value
        for name, value in told.items()
        if name.startswith("gpus_") and not isinstance(value, Mapping)
    }
    own = told.get("gpus_" + re.sub(r"[^A-Za-z0-9_]", "_", ids[0]).lower())
    found = read_gpu(ids[0], {**common, **own} if isinstance(own, Mapping) else common, free=False)
    return found if isinstance(found, PoolGpu) else None


def _machine(told: Mapping[str, Value]) -> str:
    name = told.get("machine")
    return name if isinstance(name, str) and _NAME.fullmatch(name) else ""


def _slot(event: Event) -> str:
    return next((match[1] for line in event.lines if (match := _SLOT.fullmatch(line))), "")


# --- times ---------------------------------------------------------------------------------------


class _LogClock:
    """Times of a log in UTC."""

    def __init__(self, latest: datetime, to_utc: Callable[[datetime], datetime]) -> None:
        self._latest, self._to_utc = latest, to_utc

    def read(self, text: str) -> datetime:
        """A time that is none (`99:99:99`) is the latest: what was said then still counts."""
        try:
            return self._aware(text)
        except (ValueError, OverflowError):
            return self._latest

    def _aware(self, text: str) -> datetime:
        if "/" not in text:
            given = datetime.fromisoformat(text)
            return given.astimezone(UTC) if given.tzinfo else self._to_utc(given)
        date, _, time = text.partition(" ")
        month, day, *years = date.split("/")
        if years:
            year = int(years[0]) if len(years[0]) > 2 else 2000 + int(years[0])
            return self._to_utc(datetime.fromisoformat(f"{year:04}-{month}-{day} {time}"))
        year = self._latest.year + 1
        while True:
            try:
                found = self._to_utc(datetime.fromisoformat(f"{year:04}-{month}-{day} {time}"))
            except ValueError:  # February 29th
                found = None
            if found is not None and found <= self._latest + LOCAL_DAY:
                return found
            year -= 1
            if year < self._latest.year - 8:
                return self._latest
