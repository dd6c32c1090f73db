"""What a night does about the sweeps of its store: waits for them, and collects what comes while it comes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from imagefactory.errors import EXIT_CHECK, FactoryError, ToolError
from imagefactory.extras.nightly.changes import NightRow, one_line
from imagefactory.model import Outcome
from imagefactory.settings.load import Settings
from imagefactory.stages.night_steps import Steps
from imagefactory.actions.sweep import SweepStatus, find_sweeps, read_status
from imagefactory.schedulers.sweep_file import read_sweep
from imagefactory.schedulers.underway import state_of
from imagefactory.verify.nonces import LIFETIME

POLL = 30.0
"""Seconds between two looks at the sweeps that are waited for."""
BETWEEN = 20
"""Looks between two collections of what has come so far: ten minutes."""
_OF_ONE = re.compile(r"\bslot[0-9_]+@|(?<=\bdir)_[0-9]+\b")
"""What of a reason differs from job to job, though its cause is one."""
PATIENCE = 40
"""How many looks in a row the pool may not answer: an access point takes minutes to start again."""


def collect_sweeps(settings: Settings, wait: timedelta, steps: Steps) -> None:
    """Collects the sweeps of a store, those of earlier nights too, until nothing on the pool works on them.

    After `wait` the next night goes on with them.
    """
    bench = steps.bench
    folders = [folder for folder in find_sweeps(settings) if _is_open(folder, steps)]
    until, looks, failed = bench.clock() + wait, 0, 0
    with steps.progress.stage(f"waiting for the pool, until {until:%H:%M} UTC at the latest"):
        while True:
            try:
                jobs, failed = sum(_at_work(read_status(one, bench.pools)) for one in folders), 0
            except ToolError as error:
                jobs, failed = 0, failed + 1
                if failed > PATIENCE:
                    steps.fail("pool", error)
                    break
            if not failed and (not jobs or bench.clock() >= until):
                break
            looks += 1
            if looks % BETWEEN == 0:
                _take(folders, steps)
            bench.pause(max(0.0, min(POLL, (until - bench.clock()).total_seconds())))
    _take(folders, steps)
    if jobs:
        are = "job is" if jobs == 1 else "jobs are"
        steps.notes.append(f"{jobs} {are} still on the pool: the next nightly run collects their results")


def _is_open(folder: Path, steps: Steps) -> bool:
    """Whether what comes of it can still be signed. One that cannot be read is told, and left alone."""
    try:
        made = read_sweep(folder).made
        read_status(folder, steps.bench.pools, queue=False)
    except FactoryError as error:
        steps.fail(f"sweep {folder.name}", error)
        return False
    return made + LIFETIME > steps.bench.clock()


def _at_work(status: SweepStatus) -> int:
    """The jobs of a sweep that are not done."""
    return len(status.results) - status.ended if status.driven and not status.settled else 0


def _take(folders: Sequence[Path], steps: Steps) -> None:
    """Collects the sweeps that have news, and tells what of them is not verified."""
    for folder in folders:
        with steps.telling(f"sweep {folder.name}"):
            status = read_status(folder, steps.bench.pools, queue=False)
            if not has_news(status):
                continue
            known = {one.result.node for one in status.collected if one.result.outcome}
            fresh = {(node.target, node.capability) for node in status.sweep.nodes if node.name not in known}
            words = ("collect", "--promote", str(folder))
            # Of the folder itself it only counts what is told here one by one.
            _, told = steps.do(f"sweep {folder.name}", *words, expected=EXIT_CHECK, of=str(folder))
            steps.tell(*(row for row in _unproven(told) if (row.what, row.on) in fresh))


def has_news(status: SweepStatus) -> bool:
    """Whether `collect` has anything to do for a sweep. Pure."""
    known = {one.result.node: one for one in status.collected}
    for result in status.results:
        one = known.get(result.node)
        if result.outcome is None or (one and one.attached):
            continue
        if one is None or one.result.outcome is None or state_of(result.outcome, one):
            return True
    return False


def _unproven(told: Mapping[str, Any]) -> Iterator[NightRow]:
    """What of a sweep has ended and is not verified, of the JSON of `collect`."""
    for row in told.get("results", ()):
        if row.get("outcome") not in (None, Outcome.VERIFIED):
            machine = str(row.get("machine") or "")
            reason = _OF_ONE.sub("", str(row["reason"]))
            why = one_line(
                f"{row['outcome']}: {reason.replace(machine, 'its machine') if machine else reason}"
            )
            yield NightRow(
                what=row["target"],
                on=row["capability"],
                why=why,
                hint=f"its logs: {row['kit']}",
                code=EXIT_CHECK,
                machines=(machine,) if machine else (),
            )
