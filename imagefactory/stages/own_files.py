"""The files of a factory that recipes put into their images: found by their globs, and hashed."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.model import FilesWanted, OwnFile
from imagefactory.recipes.values import RULES


def find_own_files(root: Path, wanted: Iterable[FilesWanted]) -> tuple[OwnFile, ...]:
    """What the globs find below `root`, sorted by path inside. A file keeps its path from the root on, or
    from the pivot `/./` of its pattern on, as in Docker's `COPY --parents`.

    A folder stands for all in it. What a name with a leading dot hides, and byte code, is left out unless
    the pattern itself says it. Raises RecipeError for a pattern that finds nothing, a link that leads out of
    the root, a file that cannot be read, and two files for one path.
    """
    found: dict[str, OwnFile] = {}
    for one in wanted:
        files = list(_files(root, one))
        if not files:
            raise _fault(one, "files-no-match", "matches no file", f"write a path or a glob below {root}")
        for file in files:
            base, pivot, _ = one.pattern.partition("/./")
            start = root / base if pivot else root
            path = f"{one.folder.rstrip('/')}/{file.relative_to(start).as_posix()}"
            if one.folder == "/" and not RULES["folder"].allows(path):
                raise _fault(
                    one, "files-system-path", f"adds {path}, a system path", "use another directory than /"
                )
            other = found.get(path)
            if other and other.source != file:
                problem = f"adds {path}, and so does {other.source}"
                raise _fault(one, "files-path-conflict", problem, "name one of them")
            found[path] = other or _own_file(one, path, file)
    return tuple(found[path] for path in sorted(found, key=lambda path: path.split("/")))


def _files(root: Path, one: FilesWanted) -> Iterator[Path]:
    said = one.pattern.split("/")
    for path in sorted(root.glob(one.pattern)):
        for file in sorted(path.rglob("*")) if path.is_dir() else (path,):
            parts = file.relative_to(root).parts
            hidden = [part for part in parts if part.startswith(".") or part == "__pycache__"]
            if not file.is_dir() and all(part in said for part in hidden):
                if not file.resolve().is_relative_to(root.resolve()):
                    problem = f"matches {file}, a link out of {root}"
                    raise _fault(one, "files-outside-project", problem, "copy the file it points to")
                if ".git" in file.resolve().relative_to(root.resolve()).parts:  # with the user's tokens
                    problem = f"matches {file}, which belongs to git"
                    raise _fault(one, "files-in-git", problem, "name files of the project")
                yield file


def _own_file(one: FilesWanted, path: str, file: Path) -> OwnFile:
    try:
        state = file.stat()
        if not stat.S_ISREG(state.st_mode):
            raise _fault(one, "files-not-regular", f"matches {file}, not a regular file", "omit it")
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        problem = f"matches {file}, which cannot be read: {error.strerror}"
        raise _fault(one, "files-unreadable", problem, "check its permissions") from error
    executable = bool(state.st_mode & stat.S_IXUSR)
    return OwnFile(path=path, source=file, sha256=digest, size=state.st_size, executable=executable)


def _fault(one: FilesWanted, code: str, problem: str, fix: str) -> RecipeError:
    return RecipeError([Diagnostic(code, str(one.where), f"'{one.pattern}' in 'files' {problem}", fix)])
