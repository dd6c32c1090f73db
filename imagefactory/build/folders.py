"""The directories in definitions/: render, write and check their files."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from imagefactory.build.render import render_apptainer, render_dockerfile
from imagefactory.build.steps import INSTALLER, LINKER, OWN, WHEELS, explicit_lists
from imagefactory.errors import ImagefactoryError, UsageError, os_problem
from imagefactory.fs import remove_inside, replace_bytes
from imagefactory.lock.files import format_lock_files
from imagefactory.model import BuildSpec, OwnFile

_INSTALLER = Path(__file__).with_name("conda_install.py")
_LINKER = Path(__file__).parent / LINKER
_OF_LOCKS = re.compile(r"requirements\.txt|conda-lock\.yml|explicit(-\d+)?\.txt|install\.py|rattler\.txt")
"""The files that exist only for some locks."""
DIFF_LINES = 12
"""The lines of a difference that `check_definitions` shows for a file."""


def render(definition: BuildSpec) -> dict[str, str]:
    """Return file name -> text of a target's directory, which is all that its build needs.

    With conda packages it has their explicit lists, and the program that installs them with its
    requirements.
    """
    lock = definition.lock
    files = {
        "Dockerfile": render_dockerfile(definition),
        "apptainer.def": render_apptainer(definition),
        **format_lock_files(lock),
    }
    if lock.conda:
        files |= explicit_lists(definition)
        files[INSTALLER] = _INSTALLER.read_text(encoding="utf-8")
        files[LINKER] = _LINKER.read_text(encoding="utf-8")
    return files


def copied_files(definition: BuildSpec, *, largest: int | None = None) -> dict[str, OwnFile]:
    """Return the files to copy into a target's directory: project files, and wheels up to `largest` bytes."""
    wheels = (file for file in definition.local if largest is None or file.size <= largest)
    return {
        **{f"{OWN}{file.path}": file for file in definition.files},
        **{f"{WHEELS}/{wheel.path}": wheel for wheel in wheels},
    }


def write_definitions(
    directory: Path, files: Mapping[str, str], copied: Mapping[str, OwnFile] | None = None
) -> None:
    """Write `files` (path inside `directory`, with `/` -> text) and `copied` files, each atomically.

    Unchanged files are not touched. Files of earlier renderings that are no longer rendered are removed.
    Raises UsageError for a path outside the directory, and for a file that cannot be written.
    """
    try:
        for path in directory.glob("*.*"):
            if _OF_LOCKS.fullmatch(path.name) and path.name not in files and path.is_file():
                remove_inside(directory, path)
        for path in (*(directory / OWN).rglob("*"), *(directory / WHEELS).glob("*")):
            if not path.is_dir() and path.relative_to(directory).as_posix() not in (copied or {}):
                remove_inside(directory, path)
    except OSError as error:
        raise _unusable(directory, error) from error
    every: dict[str, str | OwnFile] = {**files, **(copied or {})}
    for name, content in sorted(every.items()):
        path = _place(directory, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.parent.resolve().is_relative_to(directory.resolve()):
                raise UsageError(
                    "link-leaves-project", f"{path} is a link to outside {directory}", hint="remove the link"
                )
            data, mode = _data(content)
            if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
                replace_bytes(path, data)
            if mode and stat.S_IMODE(path.stat().st_mode) != mode:
                path.chmod(mode)
            # A remainder of an earlier kill.
            for leftover in path.parent.glob(f".{path.name}.????????"):
                remove_inside(directory, leftover)
        except OSError as error:
            raise _unusable(path, error) from error


def check_definitions(
    directory: Path, files: Mapping[str, str], copied: Mapping[str, OwnFile] | None = None
) -> tuple[str, ...]:
    """Return the differences between rendered and existing files of `directory`, one entry for each file.

    An entry has the file and the beginning of the difference. Files that are not rendered are listed too.
    Raises UsageError for an unreadable file.
    """
    faults = []
    every: dict[str, str | OwnFile] = {**files, **(copied or {})}
    try:
        there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
        for name, content in sorted(every.items()):
            path = _place(directory, name)
            if name not in there:
                faults.append(f"{path}: missing")
                continue
            if path.is_symlink():  # never show the content of its target
                faults.append(f"{path}: stale\n  (it is a link)")
                continue
            (data, mode), present = _data(content), path.read_bytes()
            if present != data:
                faults.append(f"{path}: stale\n{_difference(_text(present), _text(data))}")
            elif mode and (mode ^ path.stat().st_mode) & stat.S_IXUSR:
                faults.append(f"{path}: stale\n  (only the right to execute it differs)")
    except OSError as error:
        raise _unusable(directory, error) from error
    faults.extend(f"{directory / name}: no recipe makes it" for name in sorted(there - set(every)))
    return tuple(faults)


def _data(content: str | OwnFile) -> tuple[bytes, int]:
    """Return a file's content, and its required mode, 0 for any."""
    if isinstance(content, str):
        return content.encode(), 0
    return content.source.read_bytes(), 0o755 if content.executable else 0o644


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _difference(present: str, rendered: str) -> str:
    lines = list(
        difflib.unified_diff(
            present.splitlines(), rendered.splitlines(), "as it is", "as rendered", n=1, lineterm=""
        )
    )
    if not lines:
        return "  (only line ends differ)"
    rest = len(lines) - DIFF_LINES
    lines_of = [f"  {text}" for text in lines[:DIFF_LINES]]
    return "\n".join([*lines_of, f"  ... and {rest} more lines"] if rest > 0 else lines_of)


def _place(directory: Path, name: str) -> Path:
    pure = PurePosixPath(name)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or not name.isprintable():
        raise UsageError(
            "path-invalid",
            f"{name!r} is not a path inside {directory}",
            hint="use a relative path without '..'",
        )
    return directory / pure


def _unusable(path: Path, error: OSError) -> ImagefactoryError:
    return UsageError(
        *os_problem("write", path, error), hint="check the owner, permissions and free space of its directory"
    )
