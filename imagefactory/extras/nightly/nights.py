"""The nightly runs of a store: a directory for each, the last report, and the removal of old runs.

<store>/nights/ID/before.json    the plan at its start
                  log.txt        each command that it ran, with its output
                  night.json     what `site nightly --json` prints; missing if the run was killed
                  sweep          the directory of its sweep, if it started one
<store>/nights/.reserve          disk space that is freed at the end of a run
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
    NIGHTLY_FORMAT,
    PLAN_FORMAT,
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
from imagefactory.serialize import format_value, parse_value, plain
from imagefactory.settings.load import Settings
from imagefactory.verify.report import Evidence

MAX_RUNS = 60
"""The limit of stored runs. Older ones are removed with their sweeps."""
RESERVE = 4 << 20
"""Reserved bytes on the disk for the log, summary and mail of a run."""
BEFORE, LOG, NIGHTLY_FILE, SWEPT = "before.json", "log.txt", "night.json", "sweep"
RESERVED = ".reserve"


def nightly_directory(settings: Settings) -> Path:
    return settings.store_path / "nights"


@contextmanager
def nightly_lock(settings: Settings) -> Iterator[None]:
    """Lock the store for one nightly run. The system releases the lock if the run is killed.

    Raises UsageError if another run is in progress.
    """
    Layout(settings.store_path).make()
    lock = nightly_directory(settings) / ".lock"
    refusal = UsageError(
        "night-in-progress",
        f"another nightly run is in progress in {nightly_directory(settings)}",
        hint=f"wait for it, or stop that process; see the newest {LOG} there",
    )
    with exclusive_lock(lock, refusal):
        yield


def create_nightly(settings: Settings, name: str) -> Path:
    """Create the directory of a new run, and remove all except the last MAX_RUNS.

    If the disk is full, use a temporary directory elsewhere. Raises StoreError if that is full too.
    """
    Layout(settings.store_path).make()
    directories = _nightly_runs(settings)
    for directory in directories[: max(len(directories) - MAX_RUNS + 1, 0)]:
        _drop(settings, directory)
    directory = nightly_directory(settings) / name
    allocate_reserve(settings)
    try:
        directory.mkdir()
    except OSError:
        with explain_full_disk(directory.parent):
            return Path(tempfile.mkdtemp(prefix="imagefactory-night-"))
    return directory


def allocate_reserve(settings: Settings) -> None:
    """Reserve RESERVE bytes on the disk for the end of a run, unless less than that would stay free."""
    path = nightly_directory(settings) / RESERVED
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.exists() and path.stat().st_size == RESERVE):
            path.write_bytes(os.urandom(RESERVE))  # a file system may compress or skip zeros
        if shutil.disk_usage(path.parent).free < RESERVE:
            release_reserve(settings)
    except OSError:
        release_reserve(settings)


def has_reserve(settings: Settings) -> bool:
    return (nightly_directory(settings) / RESERVED).exists()


def release_reserve(settings: Settings) -> None:
    """Free the reserved bytes, so that the next files fit on a full disk."""
    with suppress(OSError):
        (nightly_directory(settings) / RESERVED).unlink()


def _nightly_runs(settings: Settings) -> list[Path]:
    return [path for path in entries_of(nightly_directory(settings)) if path.is_dir()]


def _drop(settings: Settings, directory: Path) -> None:
    """Remove a run with its sweep. If a part cannot be removed, the next run tries again."""
    with suppress(OSError):
        name = (directory / SWEPT).read_text("utf-8").strip() if (directory / SWEPT).is_file() else ""
        sweep = settings.store_path / "sweeps" / Path(name).name
        if name and (sweep / SWEEP).is_file():
            remove_inside(settings.store_path, sweep)
        remove_inside(settings.store_path, directory)


def last_nightly(settings: Settings) -> NightlyReport | None:
    """Return the report of the last finished run, None if there is none or it is unreadable."""
    for directory in reversed(_nightly_runs(settings)):
        if (directory / NIGHTLY_FILE).is_file():
            try:
                return read_nightly(directory / NIGHTLY_FILE)
            except ImagefactoryError:
                return None
    return None


def killed_before(settings: Settings) -> SavedPlan | None:
    """Return the plan of the last run if that was killed, since the next report includes its work."""
    for directory in reversed(_nightly_runs(settings)):
        if (directory / NIGHTLY_FILE).is_file():
            return None
        if (directory / BEFORE).is_file():
            with suppress(ImagefactoryError):
                return read_saved_plan(directory / BEFORE)
    return None


def write_plan(
    path: Path,
    plan: VerificationPlan,
    *,
    created: datetime,
    registry: str,
    names: tuple[str, ...],
    devices: tuple[PlanGpu, ...],
    waiting: tuple[str, ...],
) -> None:
    """Write a plan with its request to a file (SavedPlan)."""
    request = SavedPlan(created=created, registry=registry, names=names, devices=devices, waiting=waiting)
    write_saved_plan(path, save_plan(plan, request))


def write_saved_plan(path: Path, plan: SavedPlan) -> None:
    _write(path, plan)


def read_saved_plan(path: Path) -> SavedPlan:
    """Read a saved plan. Raises UsageError for other files, StatementError for invalid fields."""
    plan = _read(path, PLAN_FORMAT, SavedPlan, "plan --keep FILE")
    assert isinstance(plan, SavedPlan)
    return plan


def write_nightly(path: Path, night: NightlyReport) -> None:
    _write(path, night)


def read_nightly(path: Path) -> NightlyReport:
    night = _read(path, NIGHTLY_FORMAT, NightlyReport, "night")
    assert isinstance(night, NightlyReport)
    return night


def _write(path: Path, value: SavedPlan | NightlyReport) -> None:
    with explain_full_disk(path.parent):
        replace_text(path, json.dumps(format_value(value), indent=1) + "\n")


def _read(path: Path, form: str, kind: Any, maker: str) -> object:
    hint = f"pass a file that `{maker}` wrote"
    try:
        row = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint=hint) from error
    except ValueError as error:
        raise UsageError("night-file-not-json", f"{path} is not JSON", hint=hint) from error
    if not isinstance(row, dict) or row.get("format") != form:
        raise UsageError("night-file-invalid", f"{path} does not have the format {form}", hint=hint)
    return parse_value(row, kind, str(path))


# --- The steps of a run: commands of imagefactory, each in its own process, and their failures


class CommandRunner(Protocol):
    """A function that runs imagefactory with `words`, appends to the log, and returns exit code and
    output.
    """

    def __call__(self, words: Sequence[str]) -> tuple[int, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyDependencies:
    """What a run uses from this process."""

    clock: Callable[[], datetime]
    pause: Callable[[float], None]
    pools: Pools
    evidence: Evidence
    run: CommandRunner


@dataclass(kw_only=True)
class StepRunner:
    """A runner of steps.

    It collects `notes` and `failures` without duplicates. `faults` are those of recipes.
    """

    dependencies: NightlyDependencies
    progress: Progress
    faults: tuple[str, ...]
    failures: list[NightlyRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def do(
        self, task_name: str, *words: str, expected: int = 0, of: str = ""
    ) -> tuple[int, Mapping[str, Any]]:
        """Run an imagefactory command, report its errors, and return its exit code and JSON.

        Errors with the `expected` exit code are not reported. With `of`, only errors with that name are
        reported.
        """
        command = command_of(words)
        with self.progress.stage(
            command if " " in command or task_name == command else f"{command} {task_name}"
        ):
            try:
                code, output = self.dependencies.run((*words, "--json"))
            except (ImagefactoryError, OSError) as error:
                self.fail(task_name, error)
                return EXIT_BUILD, {}
        document = _document(output)
        errors = [row for row in document.get("errors", ()) if isinstance(row, dict)]
        for row in errors:
            name, exit_code = str(row.get("target") or task_name), int(row.get("exit_code", 1))
            reported = exit_code == EXIT_USAGE and row.get("message") == "\n".join(self.faults)
            if not reported and (exit_code != expected or of not in ("", name)):
                reason, hint = (
                    as_single_line(str(row.get("message", ""))),
                    as_single_line(str(row.get("hint", ""))),
                )
                self.tell(
                    NightlyRow(what=as_single_line(name), reason=reason, hint=hint, exit_code=exit_code)
                )
        if code != 0 and not errors:
            reason = f"`imagefactory {command}` ended with exit code {code}"
            self.tell(NightlyRow(what=task_name, reason=reason, hint="see the log", exit_code=max(code, 1)))
        return code, document

    @contextmanager
    def reporting_errors(self, task_name: str) -> Iterator[None]:
        """Report an error of this block, and continue after the block."""
        try:
            yield
        except (ImagefactoryError, OSError) as error:
            self.fail(task_name, error)

    def fail(self, task_name: str, error: ImagefactoryError | OSError) -> None:
        if isinstance(error, ImagefactoryError):
            reason, hint, code = error.message, error.hint, error.exit_code
        else:
            reason, hint, code = str(error), "check the disk and its permissions", EXIT_BUILD
        self.tell(
            NightlyRow(
                what=task_name, reason=as_single_line(reason), hint=as_single_line(hint), exit_code=code
            )
        )

    def tell(self, *rows: NightlyRow) -> None:
        """Add each failure once, since a sweep is collected several times."""
        self.failures += [row for row in rows if row not in self.failures]


def command_of(words: Sequence[str]) -> str:
    """Return the command of a step, including its group."""
    return " ".join(words[: 2 if words[0] in ("image", "site", "sweep", "verdict") else 1])


def _document(output: str) -> Mapping[str, Any]:
    try:
        value = json.loads(output)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# --- Post one JSON document to the webhook of a chat or a monitor


LARGEST = 4096
_WEBHOOK = "pass https://..., or the path of a file that contains the address"


def read_address(address: str) -> str:
    """Return the address, or the content of the file that contains it, since it may be a secret.

    Raises UsageError unless it is https://, or http:// on this machine. No message contains the address.
    """
    text = address
    if "://" not in address:
        try:
            with Path(address).expanduser().open(encoding="utf-8") as file:
                text = file.read(LARGEST).strip()
        except OSError as error:
            raise UsageError(*os_problem("read", address, error), hint=_WEBHOOK) from error
        except UnicodeDecodeError as error:
            raise UsageError("webhook-not-utf8", f"{address} is not UTF-8", hint=_WEBHOOK) from error
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
    """The connection to the webhook, with the proxy of the environment and the user's netrc."""

    certificates: str
    proxy: str = ""

    def login(self, url: str) -> Login:  # noqa: ARG002
        return None


def post_json(
    access: Access, url: str, value: Mapping[str, object], retry_policy: RetryPolicy | None = None
) -> None:
    """Post the document, with retries. Raises CheckFailedError if the server does not accept it."""
    hook = _Webhook(certificates=package_index(access).certificates)
    host = urlsplit(url).netloc.rpartition("@")[2]
    headers, data = {"Content-Type": "application/json"}, json.dumps(value, default=plain).encode()
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
    """Return the text without the path and query of the address, which may be a secret."""
    parts = urlsplit(url)
    for secret in (url, parts.path.strip("/"), parts.query):
        text = text.replace(secret, "...") if secret else text
    return text
