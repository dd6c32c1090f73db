"""Turn a target and its locks into its definition, and write the files of its directory."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from imagefactory.actions.locked import base_locks, require_locked
from imagefactory.build.base.image import BlobSink
from imagefactory.build.definition import define
from imagefactory.build.folders import check_definitions, copied_files, render, write_definitions
from imagefactory.build.layer_lock import changed_inputs, image_of
from imagefactory.build.steps import LARGEST_COPY
from imagefactory.errors import Diagnostic, LockError, RecipeError, StaleError, os_reason
from imagefactory.lock.layers import layers_path, read_layer_lock, wrong_entries
from imagefactory.lock.pypi.requirements import local_files
from imagefactory.model import BaseLock, BuildSpec, FilesSpec, OwnFile, Target
from imagefactory.oci.manifests import Image
from imagefactory.project import Project
from imagefactory.recipes.values import RULES, named_packages


def find_own_files(root: Path, specs: Iterable[FilesSpec]) -> tuple[OwnFile, ...]:
    """Return the project's files that match globs of a recipe below `root`, sorted by path inside the image.

    A file keeps its path relative to the root, or relative to the `/./` in its pattern, as in Docker's `COPY
    --parents`. A directory stands for all of its files. Hidden files and byte code are skipped unless the
    pattern names them. Raises RecipeError for a pattern without a match, a link to outside the root, an
    unreadable file, and two files with one path.
    """
    by_path: dict[str, OwnFile] = {}
    for spec in specs:
        files = list(_files(root, spec))
        if not files:
            fix = f"write a path or a glob below {root}"
            raise _file_problem(spec, "files-no-match", "matches no file", fix)
        for file in files:
            base, pivot, _ = spec.pattern.partition("/./")
            start = root / base if pivot else root
            path = f"{spec.folder.rstrip('/')}/{file.relative_to(start).as_posix()}"
            if spec.folder == "/" and not RULES["folder"].allows(path):
                problem = f"adds {path}, a system path"
                raise _file_problem(spec, "files-system-path", problem, "use another directory than /")
            other = by_path.get(path)
            if other and other.source != file:
                problem = f"adds {path}, and so does {other.source}"
                raise _file_problem(spec, "files-path-conflict", problem, "name one of them")
            by_path[path] = other or _own_file(spec, path, file)
    return tuple(by_path[path] for path in sorted(by_path, key=lambda path: path.split("/")))


def _files(root: Path, spec: FilesSpec) -> Iterator[Path]:
    named = spec.pattern.split("/")
    for path in sorted(root.glob(spec.pattern)):
        for file in sorted(path.rglob("*")) if path.is_dir() else (path,):
            parts = file.relative_to(root).parts
            hidden = [part for part in parts if part.startswith(".") or part == "__pycache__"]
            if not file.is_dir() and all(part in named for part in hidden):
                if not file.resolve().is_relative_to(root.resolve()):
                    problem = f"matches {file}, a link to outside {root}"
                    raise _file_problem(
                        spec, "files-outside-project", problem, "replace it by a copy of its target"
                    )
                if ".git" in file.resolve().relative_to(root.resolve()).parts:  # with the user's tokens
                    problem = f"matches {file}, which belongs to git"
                    raise _file_problem(spec, "files-in-git", problem, "remove this pattern")
                yield file


def _own_file(spec: FilesSpec, path: str, file: Path) -> OwnFile:
    try:
        state = file.stat()
        if not stat.S_ISREG(state.st_mode):
            problem = f"matches {file}, which is not a regular file"
            raise _file_problem(spec, "files-not-regular", problem, "change the pattern to exclude it")
        with file.open("rb") as file_handle:
            digest = hashlib.file_digest(file_handle, "sha256").hexdigest()
    except OSError as error:
        problem = f"matches {file}, which cannot be read: {os_reason(error)}"
        raise _file_problem(spec, "files-unreadable", problem, "check its permissions") from error
    executable = bool(state.st_mode & stat.S_IXUSR)
    return OwnFile(path=path, source=file, sha256=digest, size=state.st_size, executable=executable)


def _file_problem(spec: FilesSpec, code: str, problem: str, fix: str) -> RecipeError:
    return RecipeError([Diagnostic(code, str(spec.where), f"'{spec.pattern}' in 'files' {problem}", fix)])


def define_target(project: Project, target: Target) -> BuildSpec:
    """Return all inputs of the target's image. Raises LockError and StaleError like `require_locked`."""
    root, locked = project.settings.root_path, require_locked(project, target)
    assert locked.lock is not None
    parents = tuple(parent.lock for parent in locked.parents if parent.lock)
    files = find_own_files(root, target.files)
    return replace(
        define(target, locked.base.base, locked.lock, parents, files),
        local=local_files(locked.lock, root),
        named_below=tuple(named_packages(parent.target) for parent in locked.parents),
    )


def render_target(project: Project, target: Target) -> dict[str, str]:
    """Return the texts of definitions/<target>/, by file name."""
    return render(define_target(project, target))


def write_definition(project: Project, target: Target, *, check: bool = False) -> tuple[str, ...]:
    """Write the outdated files of definitions/<target>/, with `check` none. Return their names."""
    definition, directory = define_target(project, target), project.definition_folder(target)
    files = render(definition)
    copied = copied_files(definition, largest=LARGEST_COPY)
    stale = check_definitions(directory, files, copied)
    if stale and not check:
        write_definitions(directory, files, copied)
    return stale


# --- Layer locks: whether they are current, the image they promise, and a check of built layers


def layers_state(project: Project, target: Target) -> str:
    """Return `ok`, `stale` or `malformed`, or an empty text for a target without a layer lock."""
    try:
        if read_layer_lock(project.lock_folder, target.name) is None:
            return ""
        return "ok" if promised_image(project, target) else "stale"
    except StaleError:
        return "stale"
    except LockError:
        return "malformed"


def promised_image(project: Project, target: Target, blobs: BlobSink | None = None) -> Image | None:
    """Return the image that the target's layer lock describes, None if it is missing or stale.

    Its config, manifest and index are added to `blobs`. Raises LockError and StaleError as `define_target`
    does, and LockError for a layer lock that is malformed.
    """
    lock = read_layer_lock(project.lock_folder, target.name)
    if lock is None:
        return None
    definition = define_target(project, target)
    bases = base_locks(project, definition.base)
    return None if changed_inputs(lock, definition, bases) else image_of(lock, definition, bases, blobs)


def verify_layer_lock(
    project: Project,
    definition: BuildSpec,
    image: Image,
    toolchain_of: Callable[[BuildSpec], str],
    *,
    bases: tuple[BaseLock, ...],
) -> None:
    """Raise LockError if built layers differ from the layer lock.

    `toolchain_of` is that of the engine. An outdated layer lock, or one for layers by other tools, is only
    reported.
    """
    target = definition.target.name
    lock = read_layer_lock(project.lock_folder, target)
    if lock is None or not bases or not (toolchain := toolchain_of(definition)):
        return
    path = layers_path(project.lock_folder, target)
    if moved := changed_inputs(lock, definition, bases):
        project.tell(f"{path} is outdated: {moved} (imagefactory lock --layers {target})")
    elif lock.toolchain != toolchain:
        project.tell(
            f"layers not checked: {path} is for layers by {lock.toolchain}, these are by {toolchain}"
        )
    elif wrong := wrong_entries(lock, image.layers, str(path)):
        raise LockError(
            "layer-lock-mismatch",
            "\n".join(wrong),
            hint=f"to compare all layers, run imagefactory lock --check --layers {target}",
        )
