"""What starts a nightly run: systemd units of a user, and the lines of `doctor --for site` about it."""

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
from imagefactory.schedulers.pool import local_pool
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
# Written by `imagefactory site nightly --install`. A night that the machine slept through is made up for.
[Unit]
Description=imagefactory: every night

[Timer]
OnCalendar={AT}
Persistent=true

[Install]
WantedBy=timers.target
"""


def format_units(root: str, command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The files by their names. The service gets this shell's PATH and settings, also those of the pool's own
    commands, but no secret.

    Raises UsageError for a folder that a line of such a file cannot name.
    """
    if not root.isprintable() or root != root.strip() or root.endswith("\\"):
        raise UsageError(
            "project-path-invalid",
            f"systemd units cannot name the directory {root!r}",
            hint="rename it: no control characters, no space at either end, no backslash at the end",
        )
    kept = {
        name: text
        for name, text in sorted(environ.items())
        if name in POOL_VARIABLES or (name.startswith(PREFIXES) and name != NONCE_STORE_KEY)
    }
    lines = "".join(f"Environment={_quoted(f'{name}={text}')}\n" for name, text in kept.items())
    # A `$` begins a variable on ExecStart= alone.
    words = " ".join(_quoted(word).replace("$", "$$") for word in command)
    folder = root.replace("%", "%%")
    service = _SERVICE.format(root=folder, environment=lines, command=words)
    return {f"{NAME}.service": service, f"{NAME}.timer": _TIMER}


def _quoted(word: str) -> str:
    """A word as systemd.syntax(7) and systemd.service(5) read it; `%` begins a specifier there.

    What is not printable, of which several characters end a line, is written by its bytes.
    """
    plain = "".join(_ESCAPED.get(one) or (one if one.isprintable() else _bytes_of(one)) for one in word)
    return f'"{plain}"' if plain != word or not word or set(word) & set(" '*?;") else plain


_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}


def _bytes_of(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def enabling() -> tuple[str, str]:
    """What a person types: the timer now and at each start; and nights while he is logged out."""
    return f"systemctl --user enable --now {NAME}.timer", "loginctl enable-linger"


# --- What of a nightly run is set up. `doctor --for site` loads this by name


NIGHTLY_OVERDUE = timedelta(days=2)
"""A last nightly run, or its signed catalog, that is older gets a warning."""
CRON_SECONDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyEntry:
    """What starts the nightly run. `words` are those of its command, none where a CI service runs it.

    `lacking` says why it will not start, `remedy` what mends that; both are empty where it will.
    """

    where: str
    words: tuple[str, ...] = ()
    ci: bool = False
    lacking: str = ""
    remedy: str = ""


def examine_nightly(access: Access, made: datetime | None, now: datetime, root: Path) -> Iterator[Diagnosis]:
    """Return what starts the nightly run, and how the last one ended.

    `made` is the time of the published catalog; files of this machine are read below `root`.
    """
    yield from _NightlyCheck(access=access, now=now, root=root).nightly(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NightlyCheck:
    access: Access
    now: datetime
    root: Path

    @property
    def settings(self) -> Settings:
        return self.access.settings

    def nightly(self, made: datetime | None) -> Iterator[Diagnosis]:
        found = tuple(self._callers())
        if not found:
            yield missing("nightly run", "nothing starts one for this project", self._install())
        for one in found:
            if one.lacking:
                yield broken("nightly run", f"{one.where}: {one.lacking}", one.remedy)
            else:
                yield good("nightly run", one.where)
        yield self._last_night(made, ci=any(one.ci for one in found))
        if found and not any(one.ci for one in found):
            yield self._messages(found)
        if has_reserve(self.settings):
            yield good("disk reserve", f"in {nightly_directory(self.settings)}")
        elif not any(one.ci for one in found):
            said = "no room on the disk is kept for the end of a night: the first night takes it"
            yield warn("disk reserve", said, self._night())

    def _last_night(self, made: datetime | None, *, ci: bool) -> Diagnosis:
        night, folder = last_nightly(self.settings), nightly_directory(self.settings)
        if night is None and ci:
            if made is None:
                return missing("last night", "it signed no catalogue yet", "start the workflow once")
            said = f"the catalogue of {made:%Y-%m-%d %H:%M} UTC is the last trace of one"
            if self.now - made > NIGHTLY_OVERDUE:
                return warn("last night", said, "look at the workflow's runs")
            return good("last night", said)
        if night is None:
            return missing("last night", f"none came to its end in {folder}", self._night())
        age = self.now - night.ended
        hours = int(age.total_seconds() // 3600)
        said = f"ended {f'{hours} hours' if age < NIGHTLY_OVERDUE else f'{age.days} days'} ago"
        if night.code:
            first = next(row for row in night.broken if row.code == night.code)
            said += f", with exit code {night.code}: {first.what}: {first.why}"
            return warn("last night", said, f"read the newest {LOG} in {folder}")
        return warn("last night", said, self._night()) if age > NIGHTLY_OVERDUE else good("last night", said)

    def _messages(self, found: tuple[NightlyEntry, ...]) -> Diagnosis:
        options = ("--mail", "--webhook", "--metrics", "--html")
        used = [name for name in options if any(name in one.words for one in found)]
        if {"--mail", "--webhook", "--metrics"} & set(used):
            return good("messages", ", ".join(used))
        said = "a night that fails tells nobody: no --mail, --webhook or --metrics"
        return warn("messages", said, self._install())

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
        own = environ.get("XDG_CONFIG_HOME", "")
        home = Path(own) if own.startswith("/") else Path("/", environ.get("HOME", "")) / ".config"
        system = self.root / "etc/systemd"
        for folder in (home / "systemd/user", system / "user", system / "system"):
            lines = read_small(folder / f"{NAME}.service").splitlines()
            root = str(self.settings.root_path.absolute()).replace("%", "%%")
            if f"WorkingDirectory={root}" not in lines or not (folder / f"{NAME}.timer").is_file():
                continue
            command = next((line for line in lines if line.startswith("ExecStart=")), "")
            one = NightlyEntry(
                where=str(folder / f"{NAME}.timer"), words=_command_words(command.partition("=")[2])
            )
            enable, linger = enabling()
            wants = folder / "timers.target.wants" / f"{NAME}.timer"
            if not (wants.is_symlink() or wants.exists()):
                yield _halted(one, "the timer is not enabled", enable)
            elif folder == home / "systemd/user" and not self._lingers():
                yield _halted(one, "it runs only while you are logged in", linger)
            else:
                yield one

    def _lingers(self) -> bool:
        try:
            return (self.root / "var/lib/systemd/linger" / pwd.getpwuid(os.geteuid()).pw_name).exists()
        except (KeyError, OSError):
            return False

    def _cron(self) -> Iterator[NightlyEntry]:
        """Lines for `imagefactory site nightly` that name this project."""
        texts = {"crontab -l": _crontab(self.access.environ)}
        folder = self.root / "etc/cron.d"
        texts |= {
            str(path): read_small(path) for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        }
        root = str(self.settings.root_path.absolute())
        for where, text in texts.items():
            for line in text.splitlines():
                ours = re.search(r"\bimagefactory\b.*\bsite nightly\b", line) and root in line
                if ours and not line.lstrip().startswith("#"):
                    yield NightlyEntry(where=f"cron: {where}", words=_command_words(line))


def _halted(one: NightlyEntry, lacking: str, remedy: str) -> NightlyEntry:
    return NightlyEntry(where=one.where, words=one.words, lacking=lacking, remedy=remedy)


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
        done = subprocess.run(
            (program, "-l"),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CRON_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""
