"""The lock that a target had before its present one, as git keeps it: asked twice, whatever the number."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import LockError
from imagefactory.lock.files import lock_names, read_lock
from imagefactory.lock.git import ask_git
from imagefactory.model import Lock, Target

_COMMIT = "\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerLock:
    """A lock that was committed before the present one: `day` (2026-11-22) is when the present one came."""

    lock: Lock
    day: str


def former_locks(folder: Path, targets: Sequence[Target]) -> Mapping[str, FormerLock]:
    """By target's name, those that have one. Empty where git is missing or `folder` is in no repository.

    A shallow clone knows only what it has. A lock that cannot be read any more is passed over.
    """
    log = ask_git(folder, "log", "--no-renames", f"--format={_COMMIT}%H %cs", "--name-only", "--", ".")
    files = {name: target for target in targets for name in _names(target)}
    days: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for commit, day, names in _commits(log.decode("utf-8", "replace")):
        for touched in {files[name].name for name in names if name in files}:
            if touched in days:
                wanted.setdefault(touched, commit)
            else:
                days[touched] = day
    kept = [target for target in targets if target.name in wanted]
    asked = [(f"{wanted[one.name]}:./{name}", one, name) for one in kept for name in _names(one)]
    texts = _blobs(folder, [request for request, _, _ in asked])
    found: dict[str, FormerLock] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for (_, _, name), text in zip(asked, texts, strict=False):
            if text is not None:
                (Path(scratch) / name).write_bytes(text)
        for target in kept:
            try:
                lock = read_lock(Path(scratch), target)
            except LockError:  # of a format that nobody writes any more
                continue
            if lock is not None:
                found[target.name] = FormerLock(lock=lock, day=days[target.name])
    return found


def _names(target: Target) -> tuple[str, ...]:
    return lock_names(target.name, conda=target.conda)


def _commits(log: str) -> Iterator[tuple[str, str, list[str]]]:
    """Commit, day and the names of the files that it touched, the newest first."""
    for part in log.split(_COMMIT)[1:]:
        head, *lines = part.splitlines()
        commit, _, day = head.partition(" ")
        yield commit, day, [line.rpartition("/")[2] for line in lines if line]


def _blobs(folder: Path, names: Iterable[str]) -> list[bytes | None]:
    """What git has under each `commit:./file`, None for what it has not."""
    listed = list(names)
    if not listed:
        return []
    said = ask_git(folder, "cat-file", "--batch", given="".join(f"{name}\n" for name in listed).encode())
    found: list[bytes | None] = []
    at = 0
    while at < len(said):
        end = said.index(b"\n", at)
        words = said[at:end].split(b" ")
        at = end + 1
        if len(words) == 3 and words[1] == b"blob":
            size = int(words[2])
            found.append(said[at : at + size])
            at += size + 1
        else:
            found.append(None)
    return found
