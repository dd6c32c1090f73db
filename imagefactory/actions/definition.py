"""From a target and its locks to its definition, and to the texts of its folder."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from imagefactory.actions.locked import base_locks, parent_locks, parent_requirements, require_lock
from imagefactory.build.base.image import BlobSink
from imagefactory.build.definition import define
from imagefactory.build.folders import check_definitions, copied_files, render, write_definitions
from imagefactory.build.layer_lock import changed_inputs, image_of
from imagefactory.build.steps import LARGEST_COPY
from imagefactory.errors import Diagnostic, LockError, RecipeError, StaleError
from imagefactory.lock.layers import layers_path, read_layer_lock, wrong_entries
from imagefactory.lock.pypi.local import local_files
from imagefactory.model import BuildSpec, FilesSpec, OwnFile, Target
from imagefactory.oci.manifests import Image
from imagefactory.project import Project
from imagefactory.recipes.values import RULES

# --- The files of a factory that recipes put into their images: found by their globs, and hashed


def find_own_files(root: Path, wanted: Iterable[FilesSpec]) -> tuple[OwnFile, ...]:
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
            raise _file_problem(
                one, "files-no-match", "matches no file", f"write a path or a glob below {root}"
            )
        for file in files:
            base, pivot, _ = one.pattern.partition("/./")
            start = root / base if pivot else root
            path = f"{one.folder.rstrip('/')}/{file.relative_to(start).as_posix()}"
            if one.folder == "/" and not RULES["folder"].allows(path):
                raise _file_problem(
                    one, "files-system-path", f"adds {path}, a system path", "use another directory than /"
                )
            other = found.get(path)
            if other and other.source != file:
                problem = f"adds {path}, and so does {other.source}"
                raise _file_problem(one, "files-path-conflict", problem, "name one of them")
            found[path] = other or _own_file(one, path, file)
    return tuple(found[path] for path in sorted(found, key=lambda path: path.split("/")))


def _files(root: Path, one: FilesSpec) -> Iterator[Path]:
    said = one.pattern.split("/")
    for path in sorted(root.glob(one.pattern)):
        for file in sorted(path.rglob("*")) if path.is_dir() else (path,):
            parts = file.relative_to(root).parts
            hidden = [part for part in parts if part.startswith(".") or part == "__pycache__"]
            if not file.is_dir() and all(part in said for part in hidden):
                if not file.resolve().is_relative_to(root.resolve()):
                    problem = f"matches {file}, a link out of {root}"
                    raise _file_problem(one, "files-outside-project", problem, "copy the file it points to")
                if ".git" in file.resolve().relative_to(root.resolve()).parts:  # with the user's tokens
                    problem = f"matches {file}, which belongs to git"
                    raise _file_problem(one, "files-in-git", problem, "name files of the project")
                yield file


def _own_file(one: FilesSpec, path: str, file: Path) -> OwnFile:
    try:
        state = file.stat()
        if not stat.S_ISREG(state.st_mode):
            raise _file_problem(one, "files-not-regular", f"matches {file}, not a regular file", "omit it")
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        problem = f"matches {file}, which cannot be read: {error.strerror}"
        raise _file_problem(one, "files-unreadable", problem, "check its permissions") from error
    executable = bool(state.st_mode & stat.S_IXUSR)
    return OwnFile(path=path, source=file, sha256=digest, size=state.st_size, executable=executable)


def _file_problem(one: FilesSpec, code: str, problem: str, fix: str) -> RecipeError:
    return RecipeError([Diagnostic(code, str(one.where), f"'{one.pattern}' in 'files' {problem}", fix)])


def define_target(factory: Project, target: Target) -> BuildSpec:
    """What an image of the target is made of. Raises LockError where it is not locked, StaleError."""
    lock, under = require_lock(factory, target), parent_locks(factory, target)
    files = find_own_files(factory.settings.root_path, target.files)
    made = define(target, factory.base_of(target), lock, under, files)
    return replace(
        made,
        local=local_files(lock, factory.settings.root_path),
        named_below=parent_requirements(factory, target),
    )


def render_target(factory: Project, target: Target) -> dict[str, str]:
    """The texts of definitions/<target>/, by file name."""
    return render(define_target(factory, target))


def write_definition(factory: Project, target: Target, *, check: bool = False) -> tuple[str, ...]:
    """What of definitions/<target>/ was stale; it is written then, unless this is a `check`."""
    definition, folder = define_target(factory, target), factory.definition_folder(target)
    files = render(definition)
    copied = copied_files(definition, largest=LARGEST_COPY)
    stale = check_definitions(folder, files, copied)
    if stale and not check:
        write_definitions(folder, files, copied)
    return stale


# --- Layer locks of a factory: whether they hold, what an image is by them, and what was made against them


def layers_state(factory: Project, target: Target) -> str:
    """`ok`, `stale`, `malformed`, or empty for a target without a layer lock."""
    try:
        if read_layer_lock(factory.lock_folder, target.name) is None:
            return ""
        return "ok" if promised_image(factory, target) else "stale"
    except StaleError:
        return "stale"
    except LockError:
        return "malformed"


def promised_image(factory: Project, target: Target, blobs: BlobSink | None = None) -> Image | None:
    """The target's image by its layer lock, None where there is none or it is stale.

    Its config, manifest and index are added to `blobs`. Raises LockError and StaleError as `define_target`
    does, and LockError for a layer lock that is malformed.
    """
    lock = read_layer_lock(factory.lock_folder, target.name)
    if lock is None:
        return None
    definition = define_target(factory, target)
    bases = base_locks(factory, definition.base)
    return None if changed_inputs(lock, definition, bases) else image_of(lock, definition, bases, blobs)


def verify_layer_lock(factory: Project, definition: BuildSpec, made: Image, made_with: str) -> None:
    """Raises LockError where layers made here of what the layer lock says are not as it says.

    One that is stale, or of layers that are made with other tools, is told and not held to.
    """
    target = definition.target.name
    lock = read_layer_lock(factory.lock_folder, target)
    bases = base_locks(factory, definition.base)
    if lock is None or not bases or not made_with:
        return
    path = layers_path(factory.lock_folder, target)
    if moved := changed_inputs(lock, definition, bases):
        factory.tell(f"{path} is outdated: {moved} (imagefactory lock --deep {target})")
    elif lock.made_with != made_with:
        factory.tell(
            f"{path} is of layers by {lock.made_with}: layers by {made_with} are not checked against it"
        )
    elif wrong := wrong_entries(lock, made.layers, str(path)):
        raise LockError(
            "layer-lock-mismatch",
            "\n".join(wrong),
            hint=f"rebuild and compare each layer: imagefactory lock --check --deep {target}",
        )
