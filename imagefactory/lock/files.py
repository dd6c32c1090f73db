"""The files of a lock in lockfiles/, for any source of packages.

A lock of wheels is one requirements file. A lock of conda packages is a conda-lock file, with a requirements
file for packages from PyPI on top. A target without a solution has a record of the reason instead, which is
valid while the request stays the same.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import LockError, os_problem
from imagefactory.fs import replace_text
from imagefactory.lock import export
from imagefactory.lock.conda import facts as conda_facts
from imagefactory.lock.conda import file as conda_file
from imagefactory.lock.git import git_output
from imagefactory.lock.pypi import facts as wheel_facts
from imagefactory.lock.pypi import requirements
from imagefactory.model import Lock, LockedCondaPackage, Target

CONDA = "conda-lock.yml"
WHEELS = "requirements.txt"
UNSOLVABLE = "unsolvable.txt"
NOBODYS = f"sha256:{'0' * 64}"
"""A content hash that no target has."""
MAX_TREE = 1024 * 1024
"""The most characters of the solver's output to store."""


def lock_names(target_name: str, *, conda: bool) -> tuple[str, ...]:
    """Return the names of a target's lock files, the one that always exists first."""
    return tuple(f"{target_name}.{suffix}" for suffix in ((CONDA, WHEELS) if conda else (WHEELS,)))


def lock_path(directory: Path, target: Target) -> Path:
    """Return the file of a target's lock that exists for every lock."""
    return directory / lock_names(target.name, conda=target.conda)[0]


def read_lock(directory: Path, target: Target) -> Lock | None:
    """Return the lock of `target` in `directory`, or None.

    Raises LockError for a malformed or unreadable lock, and for two files of different locks.
    """
    path = lock_path(directory, target)
    try:
        if not path.exists():
            return None
        if not target.conda:
            return requirements.read_lock(path)
        return _read_pair(path, directory / f"{target.name}.{WHEELS}")
    except LockError as error:
        # A file with a corrupt head does not name its target; here it is known.
        error.hint = error.hint.replace("TARGET", target.name)
        raise


def read_locks(directory: Path) -> tuple[Lock, ...]:
    """Return all locks in `directory`, also of targets that are in no recipe. Raises as `read_lock`."""
    of_conda = {path.name.removesuffix(f".{CONDA}"): path for path in directory.glob(f"*.{CONDA}")}
    pairs = [(path, directory / f"{name}.{WHEELS}") for name, path in sorted(of_conda.items())]
    wheels = sorted(set(directory.glob(f"*.{WHEELS}")) - {path for _, path in pairs})
    return (*(_read_pair(*pair) for pair in pairs), *map(requirements.read_lock, wheels))


def _read_pair(path: Path, wheels_path: Path) -> Lock:
    text = requirements.read_text(path)
    lock, named = conda_file.parse_conda_lock(text, str(path)), conda_file.pip_digest(text)
    if not named and not wheels_path.exists():
        return lock
    wheels = requirements.read_text(wheels_path) if wheels_path.exists() else ""
    if hashlib.sha256(wheels.encode()).hexdigest() != named:
        problem = f"{wheels_path}: {path.name} was locked with another version of this file"
        if not wheels_path.exists():
            problem = f"{path}: its file {wheels_path.name} is missing"
        elif not named:
            problem = f"{wheels_path}: {path.name} has no packages from PyPI"
        hint = f"restore both files from one commit, or run imagefactory lock {lock.target}"
        raise LockError("lock-files-mismatch", problem, hint=hint)
    on_top = requirements.parse_lock(wheels, str(wheels_path))
    return replace(lock, wheels=on_top.wheels, origins=on_top.origins, publishers=on_top.publishers)


def read_remains(directory: Path, target: Target) -> Lock | None:
    """Return the packages in two files of different locks, with a content hash of no target.

    A killed write leaves such files. None if one of them is malformed.
    """
    path, wheels_path = lock_path(directory, target), directory / f"{target.name}.{WHEELS}"
    if not target.conda:
        return None
    try:
        lock = conda_file.parse_conda_lock(requirements.read_text(path), str(path))
        on_top = requirements.read_lock(wheels_path) if wheels_path.exists() else None
    except LockError:
        return None
    wheels, publishers = (on_top.wheels, on_top.publishers) if on_top else ((), ())
    return replace(lock, wheels=wheels, publishers=publishers, content_hash=NOBODYS)


def write_lock(directory: Path, lock: Lock) -> None:
    """Write the files of a lock atomically, and remove those that are no longer part of it.

    Raises LockError if they cannot be written, or if imagefactory or conda-lock could not read them again: a
    channel's records may have values that no lock can have.
    """
    texts = format_lock_files(lock)
    _check_readable(lock, texts)
    try:
        for suffix in (WHEELS, CONDA):  # the file that names the other one last
            path = directory / f"{lock.target}.{suffix}"
            if suffix in texts:
                _replace_file(path, texts[suffix])
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise LockError(
            *os_problem("write", directory / lock.target, error),
            hint="check the disk space and the permissions",
        ) from error
    remove_unsolvable(directory, lock.target)


def _check_readable(lock: Lock, texts: Mapping[str, str]) -> None:
    if CONDA in texts:
        try:
            conda_file.parse_conda_lock(texts[CONDA], f"{lock.target}.{CONDA}")
        except LockError as error:
            raise LockError(
                "channel-record-invalid",
                f"{lock.target}: a channel has an invalid record: {error.message}",
                hint="remove this package from the recipe, or get it from another channel",
            ) from error
        if all(package.md5 for package in lock.conda):  # else the lock's own head says which tools read it
            export.read_back(lock, texts[CONDA])


def format_lock_files(lock: Lock) -> dict[str, str]:
    """Return the texts of a lock by file name suffix, `conda-lock.yml` first."""
    if not lock.conda:
        return {WHEELS: requirements.format_lock(lock)}
    if not lock.wheels:
        return {CONDA: conda_file.format_conda_lock(lock)}
    # The solver of the wheels is named last.
    wheels = requirements.format_lock(
        replace(
            lock,
            conda=(),
            channels=(),
            virtual=(),
            note="",
            cutoff=None,
            solver=lock.solver.rpartition(", ")[2],
        )
    )
    named = hashlib.sha256(wheels.encode()).hexdigest()
    return {CONDA: conda_file.format_conda_lock(lock, named), WHEELS: wheels}


def lock_digest(lock: Lock) -> str:
    """Return `sha256:...` of a lock's files in order, as in image labels.

    Publishers are omitted: they change nothing in the image, so its digest must not depend on them.
    """
    texts = format_lock_files(replace(lock, publishers=())).values()
    return "sha256:" + hashlib.sha256("".join(texts).encode()).hexdigest()


def check_facts(lock: Lock, target: Target) -> None:
    """Raise LockError unless `lock` has the target's framework version and CUDA version."""
    if lock.conda:
        conda_facts.check_facts(lock, target)
    else:
        wheel_facts.check_facts(lock, target)


def check_unchanged_packages(lock: Lock, parent_lock: Lock | None) -> None:
    """Raise LockError unless `lock` has every package of the parent lock, file by file."""
    if parent_lock is None:
        return
    packages = set(lock.packages)
    for package in parent_lock.packages:
        if package not in packages:
            raise LockError(
                "lock-parent-mismatch",
                f"{lock.target}: the lock lacks {package.filename} of its parent {parent_lock.target}",
                hint=f"run imagefactory lock {lock.target}",
            )


def explicit(lock: Lock) -> str:
    """Return the conda packages as conda's explicit list: an address with its sha256 in each line.

    Dependencies come first, for installers that do not solve.
    """
    lines = [f"# platform: {conda_file.platform_subdir(lock)}", "@EXPLICIT"]
    lines += [f"{package.url}#sha256:{package.sha256}" for package in in_order(lock.conda)]
    return "\n".join(lines) + "\n"


def in_order(packages: Iterable[LockedCondaPackage]) -> tuple[LockedCondaPackage, ...]:
    """Return packages after their dependencies, otherwise by name. A cycle begins with its first name."""
    by_name: Mapping[str, LockedCondaPackage] = {
        package.name: package for package in sorted(packages, key=lambda package: package.name)
    }
    needs = {
        name: [need for spec in package.depends if (need := spec.partition(" ")[0]) in by_name]
        for name, package in by_name.items()
    }
    ordered: dict[str, LockedCondaPackage] = {}
    entered: set[str] = set()
    for first in by_name:
        path = [(first, iter(needs[first]))]
        entered.add(first)
        while path:
            name, rest = path[-1]
            need = next((need for need in rest if need not in entered), "")
            if not need:
                path.pop()
                ordered.setdefault(name, by_name[name])
            else:
                entered.add(need)
                path.append((need, iter(needs[need])))
    return tuple(ordered.values())


_HEADER = (
    ("imagefactory unsolvable", r"1"),
    ("target:", r"[a-z0-9]+(?:[._-][a-z0-9]+)*"),
    ("content-hash:", r"sha256:[0-9a-f]{64}"),
    ("to try again:", r"imagefactory lock [a-z0-9]+(?:[._-][a-z0-9]+)*"),
    ("what to do:", r".+"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsolvableTarget:
    """The record of a target without a solution: `reason` and `hint`, and the solver's output `tree`.

    It is valid while `content_hash` is that of the target.
    """

    target: str
    content_hash: str
    reason: str
    hint: str
    tree: str


def format_unsolvable(record: UnsolvableTarget) -> str:
    """Return the text of a record; `parse_unsolvable` is the inverse."""
    values = ("1", record.target, record.content_hash, f"imagefactory lock {record.target}", record.hint)
    lines = [f"# {key} {value}" for (key, _), value in zip(_HEADER, values, strict=True)]
    lines += [f"# why: {line}".rstrip() for line in record.reason.split("\n")]
    return "\n".join([*lines, *record.tree.split("\n")]) + "\n"


def parse_unsolvable(text: str, file: str) -> UnsolvableTarget:
    """Return the record in `text`. Raises LockError `file:line: problem`."""
    lines = text.split("\n")
    values = []
    for index, (key, pattern) in enumerate(_HEADER):
        line = lines[index] if index < len(lines) else ""
        value = line.removeprefix(f"# {key} ")
        if value == line or not re.fullmatch(pattern, value):
            raise LockError(
                "lock-malformed", f"{file}:{index + 1}: expected '# {key} ...'", hint=f"delete {file}"
            )
        values.append(value)
    end = next((i for i in range(len(_HEADER), len(lines)) if not lines[i].startswith("# why:")), len(lines))
    reason_lines = [
        line.removeprefix("# why:").removeprefix(" ").rstrip() for line in lines[len(_HEADER) : end]
    ]
    reason = "\n".join(reason_lines)
    if not reason or lines[-1] != "" or len(text) > 2 * MAX_TREE:
        raise LockError(
            "lock-malformed", f"{file}:{end}: the file is incomplete or too long", hint=f"delete {file}"
        )
    for index, line in enumerate(lines):
        if line != _plain(line):
            raise LockError(
                "lock-malformed", f"{file}:{index + 1}: invisible characters", hint=f"delete {file}"
            )
    tree = "\n".join(lines[end:-1])
    return UnsolvableTarget(
        target=values[1], content_hash=values[2], reason=reason, hint=values[4], tree=tree
    )


def read_unsolvable(directory: Path, target: Target) -> UnsolvableTarget | None:
    """Return the record of a target in `directory`, or None. Raises LockError for a malformed one."""
    path = directory / f"{target.name}.{UNSOLVABLE}"
    return parse_unsolvable(requirements.read_text(path), str(path)) if path.exists() else None


def write_unsolvable(directory: Path, record: UnsolvableTarget) -> None:
    """Write a record, with a very long output truncated. Raises LockError."""
    path = directory / f"{record.target}.{UNSOLVABLE}"
    reason = "\n".join(_plain(line) for line in record.reason.split("\n")).strip() or "unknown"
    tree = "\n".join(_plain(line) for line in record.tree[:MAX_TREE].split("\n"))
    hint = _plain(" ".join(record.hint.split())) or "change the recipe"
    try:
        _replace_file(path, format_unsolvable(replace(record, reason=reason, hint=hint, tree=tree)))
    except OSError as error:
        raise LockError(
            *os_problem("write", path, error), hint="check the disk space and the permissions"
        ) from error


def remove_unsolvable(directory: Path, target_name: str) -> None:
    (directory / f"{target_name}.{UNSOLVABLE}").unlink(missing_ok=True)


def _plain(line: str) -> str:
    """Return a line without terminal controls and trailing blanks."""
    return "".join(character for character in line if character.isprintable()).rstrip()


def _replace_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


_COMMIT = "\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRevision:
    """A lock committed before the current one, which was committed on `day` (2026-11-22)."""

    lock: Lock
    day: str


def former_locks(directory: Path, targets: Sequence[Target]) -> Mapping[str, LockRevision]:
    """Return the previous lock of each target that has one, by name; empty without git or a repository.

    A shallow clone has only some. An unreadable lock is skipped.
    """
    log = git_output(directory, "log", "--no-renames", f"--format={_COMMIT}%H %cs", "--name-only", "--", ".")
    files = {name: target for target in targets for name in _names(target)}
    days: dict[str, str] = {}
    commits: dict[str, str] = {}
    for commit, day, names in _commits(log.decode("utf-8", "replace")):
        for touched in {files[name].name for name in names if name in files}:
            if touched in days:
                commits.setdefault(touched, commit)
            else:
                days[touched] = day
    revised = [target for target in targets if target.name in commits]
    requests = [
        (f"{commits[target.name]}:./{name}", target, name) for target in revised for name in _names(target)
    ]
    texts = _blobs(directory, [request for request, _, _ in requests])
    revisions: dict[str, LockRevision] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for (_, _, name), text in zip(requests, texts, strict=False):
            if text is not None:
                (Path(scratch) / name).write_bytes(text)
        for target in revised:
            try:
                lock = read_lock(Path(scratch), target)
            except LockError:  # of an obsolete format
                continue
            if lock is not None:
                revisions[target.name] = LockRevision(lock=lock, day=days[target.name])
    return revisions


def _names(target: Target) -> tuple[str, ...]:
    return lock_names(target.name, conda=target.conda)


def _commits(log: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield commit, day and names of changed files, the newest first."""
    for part in log.split(_COMMIT)[1:]:
        head, *lines = part.splitlines()
        commit, _, day = head.partition(" ")
        yield commit, day, [line.rpartition("/")[2] for line in lines if line]


def _blobs(directory: Path, names: Iterable[str]) -> list[bytes | None]:
    """Return git's content of each `commit:./file`, None for missing ones."""
    listed = list(names)
    if not listed:
        return []
    output = git_output(
        directory, "cat-file", "--batch", stdin="".join(f"{name}\n" for name in listed).encode()
    )
    blobs: list[bytes | None] = []
    position = 0
    while position < len(output):
        end = output.index(b"\n", position)
        words = output[position:end].split(b" ")
        position = end + 1
        if len(words) == 3 and words[1] == b"blob":
            size = int(words[2])
            blobs.append(output[position : position + size])
            position += size + 1
        else:
            blobs.append(None)
    return blobs
