"""The systemd units that start a nightly run, and the checks of `doctor --for site` about it."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.doctor_site import broken, good, missing, read_small, warn
from imagefactory.actions.new_project import NIGHTLY_FILES
from imagefactory.doctor.facts import Diagnosis
from imagefactory.errors import UsageError
from imagefactory.extras.nightly.nights import LOG, has_reserve, last_nightly, nightly_directory
from imagefactory.settings.choices import local_pool
from imagefactory.settings.load import ENVIRONMENT_PREFIX, NONCE_STORE_KEY, Settings

NAME = "imagefactory-night"
AT = "*-*-* 02:17"
PREFIXES = (ENVIRONMENT_PREFIX, "SBATCH_")
POOL_VARIABLES = ("PATH", "SLURM_CONF", "CONDOR_CONFIG")
_SERVICE = """\
# Written by `imagefactory site nightly --install`.
[Unit]
Description=imagefactory: build, verify and publish what is due in {root}

[Service]
Type=oneshot
WorkingDirectory={root}
{environment}ExecStart={command}
"""
_TIMER = f"""\
# Written by `imagefactory site nightly --install`. A run that the machine missed starts later.
[Unit]
Description=imagefactory: every night

[Timer]
OnCalendar={AT}
Persistent=true

[Install]
WantedBy=timers.target
"""


def format_units(root: str, command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the unit files by name.

    The service gets the PATH and settings of this shell, including those of the pool, but no secrets. Raises
    UsageError for a directory that a unit file cannot contain.
    """
    if not root.isprintable() or root != root.strip() or root.endswith("\\"):
        raise UsageError(
            "project-path-invalid",
            f"the directory {root!r} cannot be part of a systemd unit",
            hint="rename it without control characters, spaces at its ends and a backslash at its end",
        )
    variables = {
        name: text
        for name, text in sorted(environ.items())
        if name in POOL_VARIABLES or (name.startswith(PREFIXES) and name != NONCE_STORE_KEY)
    }
    lines = "".join(f"Environment={_quoted(f'{name}={text}')}\n" for name, text in variables.items())
    # `$` begins a variable only in ExecStart=.
    words = " ".join(_quoted(word).replace("$", "$$") for word in command)
    directory = root.replace("%", "%%")
    service = _SERVICE.format(root=directory, environment=lines, command=words)
    return {f"{NAME}.service": service, f"{NAME}.timer": _TIMER}


def _quoted(word: str) -> str:
    """Quote a word for systemd.syntax(7) and systemd.service(5), where `%` starts a specifier.

    Unprintable characters are written as bytes, since several of them would end a line.
    """
    plain = "".join(
        _ESCAPED.get(character) or (character if character.isprintable() else _bytes_of(character))
        for character in word
    )
    return f'"{plain}"' if plain != word or not word or set(word) & set(" '*?;") else plain


_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}


def _bytes_of(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def enable_commands() -> tuple[str, str]:
    """Return the commands that enable the timer, and that allow runs while the user is logged out."""
    return f"systemctl --user enable --now {NAME}.timer", "loginctl enable-linger"


# --- The checks of the nightly run. `doctor --for site` loads this by name


NIGHTLY_OVERDUE = timedelta(days=2)
"""The age after which the last nightly run or its signed catalog gets a warning."""
CRON_SECONDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyEntry:
    """An entry that starts the nightly run. `words` are its command, none if a CI service runs it.

    `lacking` is why it will not start, and `remedy` the fix. Both are empty if it will start.
    """

    where: str
    words: tuple[str, ...] = ()
    ci: bool = False
    lacking: str = ""
    remedy: str = ""


def examine_nightly(
    access: Access, published: datetime | None, now: datetime, root: Path
) -> Iterator[Diagnosis]:
    """Return the entries that start the nightly run, and how the last run ended.

    `published` is the time of the published catalog. `root` replaces / in paths of this machine.
    """
    yield from _NightlyCheck(access=access, now=now, root=root).nightly(published)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NightlyCheck:
    access: Access
    now: datetime
    root: Path

    @property
    def settings(self) -> Settings:
        return self.access.settings

    def nightly(self, published: datetime | None) -> Iterator[Diagnosis]:
        entries = tuple(self._callers())
        if not entries:
            yield missing("nightly run", "nothing starts one for this project", self._install())
        for entry in entries:
            if entry.lacking:
                yield broken("nightly run", f"{entry.where}: {entry.lacking}", entry.remedy)
            else:
                yield good("nightly run", entry.where)
        yield self._last_night(published, ci=any(entry.ci for entry in entries))
        if entries and not any(entry.ci for entry in entries):
            yield self._messages(entries)
        if has_reserve(self.settings):
            yield good("disk reserve", f"in {nightly_directory(self.settings)}")
        elif not any(entry.ci for entry in entries):
            detail = "no disk space is reserved for the end of a run: the first run reserves it"
            yield warn("disk reserve", detail, self._night())

    def _last_night(self, published: datetime | None, *, ci: bool) -> Diagnosis:
        night, directory = last_nightly(self.settings), nightly_directory(self.settings)
        if night is None and ci:
            if published is None:
                return missing("last night", "no catalog was signed yet", "start the workflow once")
            detail = f"the last one published the catalog of {published:%Y-%m-%d %H:%M} UTC"
            if self.now - published > NIGHTLY_OVERDUE:
                return warn("last night", detail, "see the runs of the workflow")
            return good("last night", detail)
        if night is None:
            return missing("last night", f"no finished run in {directory}", self._night())
        age = self.now - night.ended
        hours = int(age.total_seconds() // 3600)
        detail = f"ended {f'{hours} hours' if age < NIGHTLY_OVERDUE else f'{age.days} days'} ago"
        if night.exit_code:
            first = next(row for row in night.broken if row.exit_code == night.exit_code)
            detail += f", with exit code {night.exit_code}: {first.what}: {first.reason}"
            return warn("last night", detail, f"read the newest {LOG} in {directory}")
        return (
            warn("last night", detail, self._night()) if age > NIGHTLY_OVERDUE else good("last night", detail)
        )

    def _messages(self, entries: tuple[NightlyEntry, ...]) -> Diagnosis:
        options = ("--mail", "--webhook", "--metrics", "--html")
        used = [name for name in options if any(name in entry.words for entry in entries)]
        if {"--mail", "--webhook", "--metrics"} & set(used):
            return good("messages", ", ".join(used))
        detail = "a failed run sends no message: no --mail, --webhook or --metrics"
        return warn("messages", detail, self._install())

    def _install(self) -> str:
        return (
            f"{self._night()} --mail 'mail -s night YOU' --install ~/.config/systemd/user; or in CI: "
            "imagefactory init --github, or --gitlab"
        )

    def _night(self) -> str:
        pool = local_pool(self.access.environ)
        return f"imagefactory site nightly --scheduler {pool}" if pool else "imagefactory site nightly"

    def _callers(self) -> Iterator[NightlyEntry]:
        yield from self._units()
        yield from self._cron()
        for service, files in NIGHTLY_FILES.items():
            path = self.settings.root_path / next(iter(files))
            if "imagefactory" in read_small(path):
                yield NightlyEntry(where=f"{service}: {path}", ci=True)

    def _units(self) -> Iterator[NightlyEntry]:
        environ = self.access.environ
        config_home = environ.get("XDG_CONFIG_HOME", "")
        home = (
            Path(config_home)
            if config_home.startswith("/")
            else Path("/", environ.get("HOME", "")) / ".config"
        )
        system = self.root / "etc/systemd"
        for directory in (home / "systemd/user", system / "user", system / "system"):
            lines = read_small(directory / f"{NAME}.service").splitlines()
            root = str(self.settings.root_path.absolute()).replace("%", "%%")
            if f"WorkingDirectory={root}" not in lines or not (directory / f"{NAME}.timer").is_file():
                continue
            command = next((line for line in lines if line.startswith("ExecStart=")), "")
            entry = NightlyEntry(
                where=str(directory / f"{NAME}.timer"), words=_command_words(command.partition("=")[2])
            )
            enable, linger = enable_commands()
            wants = directory / "timers.target.wants" / f"{NAME}.timer"
            if not (wants.is_symlink() or wants.exists()):
                yield _halted(entry, "the timer is not enabled", enable)
            elif directory == home / "systemd/user" and not self._lingers():
                yield _halted(entry, "it runs only while you are logged in", linger)
            else:
                yield entry

    def _lingers(self) -> bool:
        try:
            return (self.root / "var/lib/systemd/linger" / pwd.getpwuid(os.geteuid()).pw_name).exists()
        except (KeyError, OSError):
            return False

    def _cron(self) -> Iterator[NightlyEntry]:
        """Return the crontab lines that run `imagefactory site nightly` for this project."""
        texts = {"crontab -l": _crontab(self.access.environ)}
        directory = self.root / "etc/cron.d"
        texts |= {
            str(path): read_small(path)
            for path in (sorted(directory.iterdir()) if directory.is_dir() else ())
        }
        root = str(self.settings.root_path.absolute())
        for location, text in texts.items():
            for line in text.splitlines():
                ours = re.search(r"\bimagefactory\b.*\bsite nightly\b", line) and root in line
                if ours and not line.lstrip().startswith("#"):
                    yield NightlyEntry(where=f"cron: {location}", words=_command_words(line))


def _halted(entry: NightlyEntry, lacking: str, remedy: str) -> NightlyEntry:
    return NightlyEntry(where=entry.where, words=entry.words, lacking=lacking, remedy=remedy)


def _command_words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return tuple(text.split())


def _crontab(environ: Mapping[str, str]) -> str:
    program = shutil.which("crontab", path=environ.get("PATH"))
    if program is None:
        return ""
    try:
        process = subprocess.run(
            (program, "-l"),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CRON_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.decode("utf-8", "replace") if process.returncode == 0 else ""
