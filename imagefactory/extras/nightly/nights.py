"""The nights of a store: one folder each, what the last one said, and the old ones dropped.

<store>/nights/ID/before.json    the plan that it began with
                  log.txt        each command that it ran, and all that it said
                  night.json     what it changed; missing where it was killed
                  sweep          the folder of its sweep, where it made one
<store>/nights/.reserve          room on the disk, given back for the end of a night
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from imagefactory.serialize import format_value, parse_value
from imagefactory.errors import FactoryError, UsageError, os_problem
from imagefactory.fs import entries_of, explain_full_disk, held_alone, remove_inside, replace_text
from imagefactory.extras.nightly.changes import KeptPlan, NightReport
from imagefactory.oci.layout import Layout
from imagefactory.settings.load import Settings
from imagefactory.schedulers.sweep_file import SWEEP

KEPT = 60
"""Nights that are kept; older ones are dropped, and their sweeps with them."""
RESERVE = 4 << 20
"""Bytes of the disk that are kept for a night's log, summary and mail."""
PLAN_FORMAT, NIGHT_FORMAT = "imagefactory.night-plan/1", "imagefactory.night-kept/1"
BEFORE, LOG, NIGHT, SWEPT = "before.json", "log.txt", "night.json", "sweep"
RESERVED = ".reserve"


def nights_folder(settings: Settings) -> Path:
    return settings.store_path / "nights"


@contextmanager
def one_night(settings: Settings) -> Iterator[None]:
    """One night at a time; the system itself lets go of the lock of one that was killed.

    Raises UsageError where another is at work.
    """
    Layout(settings.store_path).make()
    lock = nights_folder(settings) / ".lock"
    refusal = UsageError(
        "night-in-progress",
        f"another nightly run is in progress in {nights_folder(settings)}",
        hint=f"wait for it or end that process; its log is the newest {LOG} there",
    )
    with held_alone(lock, refusal):
        yield


def new_night(settings: Settings, name: str) -> Path:
    """Make the folder of a night that begins; what is older than the last KEPT goes.

    Without room for it, it is a temporary folder elsewhere. Raises StoreError where there is none either.
    """
    Layout(settings.store_path).make()
    folders = _nights(settings)
    for folder in folders[: max(len(folders) - KEPT + 1, 0)]:
        _drop(settings, folder)
    folder = nights_folder(settings) / name
    keep_reserve(settings)
    try:
        folder.mkdir()
    except OSError:
        with explain_full_disk(folder.parent):
            return Path(tempfile.mkdtemp(prefix="imagefactory-night-"))
    return folder


def keep_reserve(settings: Settings) -> None:
    """Take RESERVE bytes of the disk for the end of a night, unless less would be free then."""
    path = nights_folder(settings) / RESERVED
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.exists() and path.stat().st_size == RESERVE):
            path.write_bytes(os.urandom(RESERVE))  # a file system may pack or leave out zeros
        if shutil.disk_usage(path.parent).free < RESERVE:
            release_reserve(settings)
    except OSError:
        release_reserve(settings)


def has_reserve(settings: Settings) -> bool:
    return (nights_folder(settings) / RESERVED).exists()


def release_reserve(settings: Settings) -> None:
    """Give it back: what is written next has room, on a disk that was filled meanwhile."""
    with suppress(OSError):
        (nights_folder(settings) / RESERVED).unlink()


def _nights(settings: Settings) -> list[Path]:
    return [path for path in entries_of(nights_folder(settings)) if path.is_dir()]


def _drop(settings: Settings, folder: Path) -> None:
    """With the sweep that it made. What cannot be removed stays, and is tried again the next night."""
    with suppress(OSError):
        name = (folder / SWEPT).read_text("utf-8").strip() if (folder / SWEPT).is_file() else ""
        sweep = settings.store_path / "sweeps" / Path(name).name
        if name and (sweep / SWEEP).is_file():
            remove_inside(settings.store_path, sweep)
        remove_inside(settings.store_path, folder)


def last_night(settings: Settings) -> NightReport | None:
    """What the last night said that came to its end; None where none did, or that cannot be read."""
    for folder in reversed(_nights(settings)):
        if (folder / NIGHT).is_file():
            try:
                return read_night(folder / NIGHT)
            except FactoryError:
                return None
    return None


def killed_before(settings: Settings) -> KeptPlan | None:
    """The plan that a night began with which was killed, where it was the last: its work is told too."""
    for folder in reversed(_nights(settings)):
        if (folder / NIGHT).is_file():
            return None
        if (folder / BEFORE).is_file():
            with suppress(FactoryError):
                return read_kept_plan(folder / BEFORE)
    return None


def write_kept_plan(path: Path, plan: KeptPlan) -> None:
    _write(path, PLAN_FORMAT, plan)


def read_kept_plan(path: Path) -> KeptPlan:
    """Raises UsageError for a file that is none, StatementError for one that was changed."""
    plan = _read(path, PLAN_FORMAT, KeptPlan, "plan --keep FILE")
    assert isinstance(plan, KeptPlan)
    return plan


def write_night(path: Path, night: NightReport) -> None:
    _write(path, NIGHT_FORMAT, night)


def read_night(path: Path) -> NightReport:
    night = _read(path, NIGHT_FORMAT, NightReport, "night")
    assert isinstance(night, NightReport)
    return night


def _write(path: Path, form: str, value: object) -> None:
    with explain_full_disk(path.parent):
        replace_text(path, json.dumps({"format": form, **format_value(value)}, indent=1) + "\n")


def _read(path: Path, form: str, kind: Any, maker: str) -> object:
    hint = f"pass a file that `{maker}` wrote"
    try:
        row = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint=hint) from error
    except ValueError as error:
        raise UsageError("night-file-not-json", f"{path} is not JSON", hint=hint) from error
    if not isinstance(row, dict) or row.pop("format", "") != form:
        raise UsageError("night-file-invalid", f"{path} is not an {form} file", hint=hint)
    return parse_value(row, kind, str(path))
