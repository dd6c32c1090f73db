"""The lock before the present one, in a repository of git's own making."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.extras.nightly.night import last_commit
from imagefactory.lock.files import former_locks, lock_moves, write_lock
from imagefactory.model import LockedWheel
from tests.made.values import make_lock, make_target

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *IDENTITY, *arguments], check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository whose locks lie in a folder of their own."""
    git(tmp_path, "init", "-q")
    (tmp_path / "lockfiles").mkdir()
    return tmp_path / "lockfiles"


def commit(folder: Path, day: str) -> None:
    git(folder, "add", "-A", "..")
    when = f"{day}T12:00:00Z"
    subprocess.run(
        ["git", "-C", str(folder), *IDENTITY, "commit", "-q", "-m", "x", "--date", when],
        check=True,
        capture_output=True,
        env={"GIT_COMMITTER_DATE": when, "PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )


def wheel(version: str) -> LockedWheel:
    return LockedWheel(
        name="one",
        version=version,
        filename=f"one-{version}-py3-none-any.whl",
        sha256=("1" if version == "1.0" else "2") * 64,
        size=1,
    )


def test_the_lock_before_the_present_one_is_found(folder: Path) -> None:
    target = make_target()
    old = replace(make_lock(), target=target.name, wheels=(wheel("1.0"),))
    new = replace(old, wheels=(wheel("2.0"),))
    write_lock(folder, old)
    commit(folder, "2026-11-01")
    (folder.parent / "README").write_text("another commit, of no lock")
    commit(folder, "2026-11-02")
    write_lock(folder, new)
    commit(folder, "2026-11-03")
    found = former_locks(folder, [target])
    assert set(found) == {target.name}
    assert found[target.name].day == "2026-11-03"
    assert [str(move) for move in lock_moves(found[target.name].lock, new)] == ["one 1.0 -> 2.0"]


def test_a_first_lock_has_none_before_it(folder: Path) -> None:
    target = make_target()
    write_lock(folder, replace(make_lock(), target=target.name))
    commit(folder, "2026-11-01")
    assert former_locks(folder, [target]) == {}


def test_one_that_cannot_be_read_any_more_is_passed_over(folder: Path) -> None:
    target = make_target()
    lock = replace(make_lock(), target=target.name)
    write_lock(folder, lock)
    (path,) = folder.iterdir()
    text = path.read_text()
    path.write_text("of another time\n")
    commit(folder, "2026-11-01")
    path.write_text(text)
    commit(folder, "2026-11-02")
    assert former_locks(folder, [target]) == {}


def test_outside_of_a_repository_there_is_none(tmp_path: Path) -> None:
    assert former_locks(tmp_path, [make_target()]) == {}
    assert former_locks(tmp_path / "nowhere", [make_target()]) == {}


@pytest.mark.parametrize("look", [last_commit, lambda folder: former_locks(folder, [make_target()])])
def test_the_settings_of_a_repository_run_no_program(folder: Path, look: Callable[[Path], object]) -> None:
    """A clone that came as an archive has a .git/config of its maker's."""
    ran, evil = folder.parent / "ran", folder.parent / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {ran}\n")
    evil.chmod(0o755)
    write_lock(folder, replace(make_lock(), target=make_target().name))
    commit(folder, "2026-01-01")
    text = subprocess.run(
        ["git", "-C", folder, "cat-file", "commit", "HEAD"], check=True, capture_output=True, text=True
    ).stdout
    head, _, message = text.partition("\n\n")
    signed = f"{head}\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n -----END PGP SIGNATURE-----\n\n{message}"
    made = subprocess.run(
        ["git", "-C", folder, "hash-object", "-t", "commit", "-w", "--stdin"],
        input=signed,
        check=True,
        capture_output=True,
        text=True,
    )
    git(folder, "update-ref", "HEAD", made.stdout.strip())
    for name in ("gpg.program", "core.fsmonitor", "core.pager", "core.sshCommand"):
        git(folder, "config", name, str(evil))
    git(folder, "config", "log.showSignature", "true")
    subprocess.run(["git", "-C", folder, "log", "-1"], check=False, capture_output=True)
    assert ran.exists()  # so git itself would
    ran.unlink()
    look(folder)
    assert not ran.exists()


def test_what_a_partial_clone_lacks_is_not_fetched(folder: Path) -> None:
    """It would be by a program of its configuration, which can allow every protocol."""
    ran, evil = folder.parent / "ran", folder.parent / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {ran}\n")
    evil.chmod(0o755)
    lock = replace(make_lock(), target=make_target().name)
    for day, one in (("2026-01-01", lock), ("2026-01-02", replace(lock, solver="uv 9"))):
        write_lock(folder, one)
        commit(folder, day)
    git(folder.parent, "init", "-q", "--bare", "away")
    for name, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", str(folder.parent / "away")),
        ("remote.origin.promisor", "true"),
        ("remote.origin.uploadpack", str(evil)),
        ("protocol.file.allow", "always"),
    ):
        git(folder, "config", name, value)
    name = next(path.name for path in folder.iterdir() if path.is_file())
    gone = subprocess.run(
        ["git", "-C", folder, "rev-parse", f"HEAD~1:./{name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (folder.parent / ".git/objects" / gone[:2] / gone[2:]).unlink()
    subprocess.run(["git", "-C", folder, "cat-file", "-e", gone], check=False, capture_output=True)
    assert ran.exists()  # so git itself would
    ran.unlink()
    assert former_locks(folder, [make_target()]) == {}
    assert not ran.exists()
