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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from imagefactory.access import Access, package_index
from imagefactory.errors import (
    EXIT_BUILD,
    EXIT_USAGE,
    CheckFailedError,
    ImagefactoryError,
    UsageError,
    os_problem,
)
from imagefactory.extras.nightly.changes import (
    NightlyReport,
    NightlyRow,
    SavedPlan,
    as_single_line,
    save_plan,
)
from imagefactory.fs import entries_of, exclusive_lock, explain_full_disk, remove_inside, replace_text
from imagefactory.http import (
    LOOPBACK,
    HttpError,
    HttpSession,
    Login,
    RejectedError,
    RetryPolicy,
    check_address,
    network_of_name,
)
from imagefactory.matrix.plan import PlanGpu, VerificationPlan
from imagefactory.oci.layout import Layout
from imagefactory.progress import Progress
from imagefactory.schedulers.pool import Pools
from imagefactory.schedulers.sweep_file import SWEEP
from imagefactory.serialize import format_value, parse_value
from imagefactory.settings.load import Settings
from imagefactory.verify.report import Evidence

MAX_RUNS = 60
"""Nights that are kept; older ones are dropped, and their sweeps with them."""
RESERVE = 4 << 20
"""Bytes of the disk that are kept for a night's log, summary and mail."""
PLAN_FORMAT, NIGHTLY_FORMAT = "imagefactory.night-plan/1", "imagefactory.night-kept/1"
BEFORE, LOG, NIGHTLY_FILE, SWEPT = "before.json", "log.txt", "night.json", "sweep"
RESERVED = ".reserve"


def nightly_directory(settings: Settings) -> Path:
    return settings.store_path / "nights"


@contextmanager
def nightly_lock(settings: Settings) -> Iterator[None]:
    """One night at a time; the system itself lets go of the lock of one that was killed.

    Raises UsageError where another is at work.
    """
    Layout(settings.store_path).make()
    lock = nightly_directory(settings) / ".lock"
    refusal = UsageError(
        "night-in-progress",
        f"another nightly run is in progress in {nightly_directory(settings)}",
        hint=f"wait for it or end that process; its log is the newest {LOG} there",
    )
    with exclusive_lock(lock, refusal):
        yield


def create_nightly(settings: Settings, name: str) -> Path:
    """Make the folder of a night that begins; what is older than the last KEPT goes.

    Without room for it, it is a temporary folder elsewhere. Raises StoreError where there is none either.
    """
    Layout(settings.store_path).make()
    folders = _nightly_runs(settings)
    for folder in folders[: max(len(folders) - MAX_RUNS + 1, 0)]:
        _drop(settings, folder)
    folder = nightly_directory(settings) / name
    allocate_reserve(settings)
    try:
        folder.mkdir()
    except OSError:
        with explain_full_disk(folder.parent):
            return Path(tempfile.mkdtemp(prefix="imagefactory-night-"))
    return folder


def allocate_reserve(settings: Settings) -> None:
    """Take RESERVE bytes of the disk for the end of a night, unless less would be free then."""
    path = nightly_directory(settings) / RESERVED
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.exists() and path.stat().st_size == RESERVE):
            path.write_bytes(os.urandom(RESERVE))  # a file system may pack or leave out zeros
        if shutil.disk_usage(path.parent).free < RESERVE:
            release_reserve(settings)
    except OSError:
        release_reserve(settings)


def has_reserve(settings: Settings) -> bool:
    return (nightly_directory(settings) / RESERVED).exists()


def release_reserve(settings: Settings) -> None:
    """Give it back: what is written next has room, on a disk that was filled meanwhile."""
    with suppress(OSError):
        (nightly_directory(settings) / RESERVED).unlink()


def _nightly_runs(settings: Settings) -> list[Path]:
    return [path for path in entries_of(nightly_directory(settings)) if path.is_dir()]


def _drop(settings: Settings, folder: Path) -> None:
    """With the sweep that it made. What cannot be removed stays, and is tried again the next night."""
    with suppress(OSError):
        name = (folder / SWEPT).read_text("utf-8").strip() if (folder / SWEPT).is_file() else ""
        sweep = settings.store_path / "sweeps" / Path(name).name
        if name and (sweep / SWEEP).is_file():
            remove_inside(settings.store_path, sweep)
        remove_inside(settings.store_path, folder)


def last_nightly(settings: Settings) -> NightlyReport | None:
    """What the last night said that came to its end; None where none did, or that cannot be read."""
    for folder in reversed(_nightly_runs(settings)):
        if (folder / NIGHTLY_FILE).is_file():
            try:
                return read_nightly(folder / NIGHTLY_FILE)
            except ImagefactoryError:
                return None
    return None


def killed_before(settings: Settings) -> SavedPlan | None:
    """The plan that a night began with which was killed, where it was the last: its work is told too."""
    for folder in reversed(_nightly_runs(settings)):
        if (folder / NIGHTLY_FILE).is_file():
            return None
        if (folder / BEFORE).is_file():
            with suppress(ImagefactoryError):
                return read_saved_plan(folder / BEFORE)
    return None


def keep_plan(
    path: Path,
    plan: VerificationPlan,
    *,
    made: datetime,
    registry: str,
    names: tuple[str, ...],
    devices: tuple[PlanGpu, ...],
    waiting: tuple[str, ...],
) -> None:
    """Write a plan with its request to a file: see SavedPlan."""
    request = SavedPlan(made=made, registry=registry, names=names, devices=devices, waiting=waiting)
    write_saved_plan(path, save_plan(plan, request))


def write_saved_plan(path: Path, plan: SavedPlan) -> None:
    _write(path, PLAN_FORMAT, plan)


def read_saved_plan(path: Path) -> SavedPlan:
    """Raises UsageError for a file that is none, StatementError for one that was changed."""
    plan = _read(path, PLAN_FORMAT, SavedPlan, "plan --keep FILE")
    assert isinstance(plan, SavedPlan)
    return plan


def write_nightly(path: Path, night: NightlyReport) -> None:
    _write(path, NIGHTLY_FORMAT, night)


def read_nightly(path: Path) -> NightlyReport:
    night = _read(path, NIGHTLY_FORMAT, NightlyReport, "night")
    assert isinstance(night, NightlyReport)
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


# --- The steps of a night: this program's own commands, each in a process of its own, and what went wrong


class CommandRunner(Protocol):
    """Runs this program with `words`, tells the log, and gives its exit code and what it printed."""

    def __call__(self, words: Sequence[str]) -> tuple[int, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyDependencies:
    """What a night takes from this process."""

    clock: Callable[[], datetime]
    pause: Callable[[float], None]
    pools: Pools
    evidence: Evidence
    run: CommandRunner


@dataclass(kw_only=True)
class StepRunner:
    """Runs steps and remembers their `failures`, each once, and `notes`. `faults` are those of recipes."""

    bench: NightlyDependencies
    progress: Progress
    faults: tuple[str, ...]
    failures: list[NightlyRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def do(self, what: str, *words: str, expected: int = 0, of: str = "") -> tuple[int, Mapping[str, Any]]:
        """Runs a command of this program, and tells its errors but for those of the code that is `expected`
        (with `of`, of that name alone). Gives its exit code and its JSON."""
        command = command_of(words)
        with self.progress.stage(command if " " in command or what == command else f"{command} {what}"):
            try:
                code, said = self.bench.run((*words, "--json"))
            except (ImagefactoryError, OSError) as error:
                self.fail(what, error)
                return EXIT_BUILD, {}
        told = _document(said)
        errors = [row for row in told.get("errors", ()) if isinstance(row, dict)]
        for row in errors:
            name, own = str(row.get("target") or what), int(row.get("exit_code", 1))
            told_already = own == EXIT_USAGE and row.get("message") == "\n".join(self.faults)
            if not told_already and (own != expected or of not in ("", name)):
                why, hint = (
                    as_single_line(str(row.get("message", ""))),
                    as_single_line(str(row.get("hint", ""))),
                )
                self.tell(NightlyRow(what=as_single_line(name), why=why, hint=hint, code=own))
        if code != 0 and not errors:
            why = f"`imagefactory {command}` ended with exit code {code}"
            self.tell(NightlyRow(what=what, why=why, hint="see the log", code=max(code, 1)))
        return code, told

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """What goes wrong here is told, and ends nothing else."""
        try:
            yield
        except (ImagefactoryError, OSError) as error:
            self.fail(what, error)

    def fail(self, what: str, error: ImagefactoryError | OSError) -> None:
        if isinstance(error, ImagefactoryError):
            why, hint, code = error.message, error.hint, error.exit_code
        else:
            why, hint, code = str(error), "check the disk and its permissions", EXIT_BUILD
        self.tell(NightlyRow(what=what, why=as_single_line(why), hint=as_single_line(hint), code=code))

    def tell(self, *rows: NightlyRow) -> None:
        """Each once: a sweep is collected several times."""
        self.failures += [row for row in rows if row not in self.failures]


def command_of(words: Sequence[str]) -> str:
    """Return the command of a step, with its group."""
    return " ".join(words[: 2 if words[0] in ("image", "site", "sweep", "verdict") else 1])


def _document(said: str) -> Mapping[str, Any]:
    try:
        found = json.loads(said)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- One JSON document to an address that the user names, as a chat or a monitor takes it


LARGEST = 4096
_WEBHOOK = "pass https://..., or the path of a file that holds the address"


def read_address(given: str) -> str:
    """Return the address, or the first line of the file that holds it: it may be a secret.

    Raises UsageError for what is no https:// address, or http:// of this machine. No message repeats it.
    """
    text = given
    if "://" not in given:
        try:
            with Path(given).expanduser().open(encoding="utf-8") as file:
                text = file.read(LARGEST).strip()
        except OSError as error:
            raise UsageError(*os_problem("read", given, error), hint=_WEBHOOK) from error
        except UnicodeDecodeError as error:
            raise UsageError("webhook-not-utf8", f"{given} is not UTF-8", hint=_WEBHOOK) from error
    try:
        parts = urlsplit(text)
        check_address(text)
        local = parts.scheme == "http" and network_of_name(parts.hostname or "") == LOOPBACK
    except (ValueError, RejectedError):
        parts, local = urlsplit(""), False
    if not (parts.hostname and (parts.scheme == "https" or local)) or not text.isprintable() or " " in text:
        raise UsageError(
            "webhook-invalid",
            "the --webhook address must start with https://",
            hint="http:// is allowed only for a service on this machine",
        )
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Webhook:
    """How the address is reached: by the environment's proxy, and with the user's netrc."""

    certificates: str
    proxy: str = ""

    def login(self, url: str) -> Login:  # noqa: ARG002
        return None


def post_json(
    access: Access, url: str, value: Mapping[str, object], retry_policy: RetryPolicy | None = None
) -> None:
    """Send the document, trying again what may pass. Raises CheckFailedError where nobody took it."""
    hook = _Webhook(certificates=package_index(access).certificates)
    host = urlsplit(url).netloc.rpartition("@")[2]
    headers, data = {"Content-Type": "application/json"}, json.dumps(value).encode()
    try:
        with HttpSession(hook, retry_policy=retry_policy or RetryPolicy(attempts=3)) as web:
            web.request(url, lambda _: None, method="POST", headers=headers, data=data)
    except HttpError as error:
        raise CheckFailedError(
            "webhook-failed",
            f"{host} did not accept the report of the nightly run: {_without(url, str(error))}",
            hint="check the address of --webhook",
        ) from None


def _without(url: str, text: str) -> str:
    """A reason without the path and query of the address, which may be a secret."""
    parts = urlsplit(url)
    for secret in (url, parts.path.strip("/"), parts.query):
        text = text.replace(secret, "...") if secret else text
    return text
