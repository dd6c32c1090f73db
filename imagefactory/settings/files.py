"""The files of settings and trust: of the project, the user and the site.

Also the projects that a user trusts.

    <root>/imagefactory.toml
    $XDG_CONFIG_HOME/imagefactory/imagefactory.toml     the user's (~/.config)
    $XDG_CONFIG_DIRS/imagefactory/imagefactory.toml     the site's, each directory in that list (/etc/xdg)
    $XDG_CONFIG_HOME/imagefactory/trusted/<sha256 of the path>     "<sha256 of the file> '<path>'"

The nearest file with a key decides; tables are not merged. So users without a project have settings too, and
the staff of a site sets the registry, the catalog and the trusted keys for everyone. Trust in a project
depends on its real path and on the content of its imagefactory.toml: if one of them changes, the project is
not trusted.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from imagefactory.errors import UsageError, os_problem, redact
from imagefactory.fs import replace_text
from imagefactory.settings.sources import RestrictedSetting

FILE_NAME = "imagefactory.toml"
CENTERS = "centers"
"""The directory next to the user's file with a file for each additional center."""
CHECKED_ELSEWHERE = ("policy", "trust")
"""Tables of imagefactory.toml that trust/policy.py parses."""
TABLES = {
    "mirrors": '"docker.io" = "registry.example.org/hub"',
    "indexes": 'pytorch-cu128 = "https://packages.example.org/cu128/simple"',
    "channels": '"conda-forge" = "https://mirror.example.org/conda-forge"',
}
_TABLE_VALUES = {
    "mirrors": "the address of a registry",
    "indexes": "the name of an index or its address",
    "channels": "a channel or its place",
}
SITE_CONFIG_DIRS = "/etc/xdg"
"""The default of XDG_CONFIG_DIRS. Source: XDG Base Directory Specification."""
ROOT = 0
MAX_BYTES = 1 << 20


def files_of(root: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files of settings, the nearest first, without duplicates. They may not exist."""
    return tuple(dict.fromkeys((root / FILE_NAME, *own_files(environ))))


def own_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files of the user and the site, the nearest first. They may not exist.

    Relative directories in XDG_CONFIG_DIRS are ignored, as the specification requires.
    """
    directories = (environ.get("XDG_CONFIG_DIRS") or SITE_CONFIG_DIRS).split(":")
    sites = (
        Path(directory) / "imagefactory" / FILE_NAME for directory in directories if directory.startswith("/")
    )
    return tuple(dict.fromkeys((user_file(environ), *sites)))


def user_file(environ: Mapping[str, str]) -> Path:
    """Return the user's file, which may not exist.

    A relative HOME is ignored, because it could be a directory of any project.
    """
    home, config_home = Path("/", environ.get("HOME", "")), environ.get("XDG_CONFIG_HOME", "")
    return (
        (Path(config_home) if config_home.startswith("/") else home / ".config") / "imagefactory" / FILE_NAME
    )


def center_directory(environ: Mapping[str, str]) -> Path:
    return user_file(environ).parent / CENTERS


def center_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files of additional centers, by name."""
    return tuple(sorted(center_directory(environ).glob("*.toml")))


def read_document(path: Path) -> dict[str, Any]:
    """Return the tables and keys of a file, empty if it does not exist.

    Raises UsageError if it is not TOML.
    """
    return parse_document(read_content(path) or b"", path)


def read_content(path: Path) -> bytes | None:
    """Return the bytes of a settings file, None if it does not exist. Raises UsageError."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError("settings-file-invalid", f"{path} is not a file", hint="remove or rename it")
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            *os_problem("read", path, error), hint="check its permissions and the HOME variable"
        ) from error
    if len(data) > MAX_BYTES:
        raise UsageError(
            "settings-file-invalid",
            f"{path} is larger than {MAX_BYTES} bytes",
            hint="check that it is your settings file",
        )
    return data


def parse_document(data: bytes, path: Path) -> dict[str, Any]:
    """Parse the bytes of the TOML file at `path`. Raises UsageError if it is not TOML."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(
            "settings-file-invalid",
            f"{path} is not TOML: {error}",
            hint='write each setting as key = "value"',
        ) from error


def parse_values(document: Mapping[str, Any], path: Path, known: Collection[str]) -> dict[str, str]:
    """Return the settings in a document by name. Raises UsageError for an unknown key or a wrong type."""
    result = {}
    for key, value in document.items():
        if key in CHECKED_ELSEWHERE:
            continue
        if key not in known:
            raise UsageError(
                "setting-unknown",
                f"{path}: unknown setting '{key}'",
                hint=f"the settings are {', '.join(sorted(known))}",
            )
        if key in TABLES:
            result[key] = _table(path, key, value)
            continue
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise UsageError(
                "setting-invalid", f"{path}: '{key}' is not a string", hint=f'write {key} = "..."'
            )
        result[key] = str(value)
    return result


def _table(path: Path, key: str, value: object) -> str:
    """Return a table in the format of its environment variable, which is then checked."""
    if not isinstance(value, dict) or not all(isinstance(address, str) for address in value.values()):
        raise UsageError(
            "setting-invalid",
            f"{path}: '{key}' is not a table of strings",
            hint=f"write [{key}], followed by lines such as {TABLES[key]}",
        )
    for text in (text for pair in value.items() for text in pair if "," in text or "=" in text):
        value_type = _TABLE_VALUES[key]
        raise UsageError(
            "setting-invalid",
            f"{path}: '{without_secrets(text)}' in '{key}' is not {value_type}",
            hint=f"write one line for each: {TABLES[key]}",
        )
    return ",".join(f"{prefix}={address}" for prefix, address in value.items())


def without_secrets(text: str) -> str:
    """Return a value without parts that may be a password, a token or a query."""
    return redact(text.rpartition("@")[2])


# --- trusted projects ---


class UntrustedProjectError(UsageError):
    """A project sets values that only a trusted project may set. `content` has the bytes of its file."""

    def __init__(self, file: Path, content: bytes, settings: tuple[RestrictedSetting, ...]) -> None:
        self.file, self.content, self.settings = file, content, settings
        first, *others = settings
        location = f"{file}:{first.line}" if first.line else str(file)
        names = ", ".join(f"'{setting.name}'" for setting in others)
        more = f"; also {names}" if others else ""
        super().__init__(
            "project-not-trusted",
            f"{location}: '{first.name}' is allowed only in a project that you trust ({first.reason}){more}",
            hint=f"read the file; to trust it: {trust_command(file.parent)}",
        )


def trust_command(root: Path) -> str:
    """Return the command that trusts the project in `root`."""
    return f"imagefactory -C {shlex.quote(str(root))} config --trust"


def is_trusted(root: Path, content: bytes, environ: Mapping[str, str]) -> bool:
    """Return whether the user trusts the project in `root` with this content of imagefactory.toml."""
    path = _record(root, environ)
    try:
        with path.open("rb") as file:
            # Another user's record would be that user's decision.
            if os.fstat(file.fileno()).st_uid not in (ROOT, os.geteuid()):
                return False
            return file.read(MAX_BYTES) == _text(root, content).encode()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(
            *os_problem("read", path, error), hint="check its permissions and the HOME variable"
        ) from error


def trust_project(root: Path, content: bytes, environ: Mapping[str, str]) -> Path:
    """Record that the user trusts the project in `root` with this content. Return the path of the record."""
    path = _record(root, environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(path, _text(root, content))
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    return path


def untrust_project(root: Path, environ: Mapping[str, str]) -> bool:
    """Remove the record of trust. Return whether there was one."""
    path = _record(root, environ)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(*os_problem("delete", path, error), hint="check its permissions") from error
    return True


def check_project_owner(root: Path, user: int, environ: Mapping[str, str]) -> None:
    """Raise UsageError for a project that another user could have created in a parent directory.

    The file, its link target, and its directory must belong to this user or to root. Only a directory with
    the sticky bit (/tmp) may be writable by everyone. For root, files of the user who called sudo are
    accepted too, as in git.
    """
    owners = {ROOT, user}
    caller = environ.get("SUDO_UID", "")
    if user == ROOT and caller.isascii() and caller.isdigit():
        owners.add(int(caller))
    file = root / FILE_NAME
    try:
        states = {file: (file.lstat(), file.stat()), root: (root.lstat(), root.stat())}
    except OSError as error:
        raise UsageError(*os_problem("read", file, error), hint="check its permissions") from error
    hint = f"to use that project: imagefactory -C {shlex.quote(str(root))} ..., or {trust_command(root)}"
    for path, (owner_uid, target) in states.items():
        if owner_uid.st_uid not in owners or target.st_uid not in owners:
            raise UsageError(
                "project-owner-not-trusted",
                f"{path} belongs to another user, who could decide what is built here",
                hint=hint,
            )
        if target.st_mode & stat.S_IWOTH and not (path == root and target.st_mode & stat.S_ISVTX):
            raise UsageError(
                "project-world-writable", f"every user of this machine can write {path}", hint=hint
            )


def _record(root: Path, environ: Mapping[str, str]) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()
    return user_file(environ).parent / "trusted" / name


def _text(root: Path, content: bytes) -> str:
    # The name of the record decides; the path is for people who read it.
    return f"{hashlib.sha256(content).hexdigest()} {os.path.realpath(root)!a}\n"
