"""The projects that a user trusts: each by its real path and the content of its imagefactory.toml.

    $XDG_CONFIG_HOME/imagefactory/trusted/<sha256 of the path>     "<sha256 of the file> '<path>'"

A change of the file ends the trust, until the user gives it again. So does a move of the folder.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.fs import replace_text
from imagefactory.settings.files import FILE_NAME, MAX_BYTES, ROOT, user_file
from imagefactory.settings.sources import RestrictedSetting


class UntrustedProjectError(UsageError):
    """A project sets what only a trusted one may set. `content` is what was read of its file."""

    def __init__(self, file: Path, content: bytes, settings: tuple[RestrictedSetting, ...]) -> None:
        self.file, self.content, self.settings = file, content, settings
        first, *others = settings
        place = f"{file}:{first.line}" if first.line else str(file)
        names = ", ".join(f"'{one.name}'" for one in others)
        more = f"; also {names}" if others else ""
        super().__init__(
            "project-not-trusted",
            f"{place}: '{first.name}' is allowed only in a project that you trust ({first.reason}){more}",
            hint=f"read the file; to trust it: {trust_command(file.parent)}",
        )


def trust_command(root: Path) -> str:
    """Return the command that trusts the project in `root`."""
    return f"imagefactory -C {shlex.quote(str(root))} settings --trust"


def is_trusted(root: Path, content: bytes, environ: Mapping[str, str]) -> bool:
    """Return whether the user trusts the project in `root` with this imagefactory.toml."""
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
    """Record that the user trusts the project in `root` with this imagefactory.toml; return the record."""
    path = _record(root, environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(path, _text(root, content))
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    return path


def untrust_project(root: Path, environ: Mapping[str, str]) -> bool:
    """Remove the record; return whether there was one."""
    path = _record(root, environ)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(*os_problem("delete", path, error), hint="check its permissions") from error
    return True


def refuse_foreign_project(root: Path, user: int, environ: Mapping[str, str]) -> None:
    """Raise UsageError for a project that others could have put above the current folder.

    The file, what it links to, and its folder belong to this user or to root, and only a folder with the
    sticky bit may be writable by everyone (/tmp). For root, the user who called sudo counts too, as for git.
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
    for path, (own, target) in states.items():
        if own.st_uid not in owners or target.st_uid not in owners:
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
