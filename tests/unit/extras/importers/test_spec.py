"""Folders and repositories that no index has."""

from __future__ import annotations

import pytest

from imagefactory.extras.importers.spec import (
    EnvironmentSpec,
    add_directory,
    add_git,
    git_of_archive,
    recipe_path,
)
from imagefactory.model import SourceLocation

HERE = SourceLocation(file="requirements.txt", line=1, column=1)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("place", "name", "expected"),
    [
        (".", ".", "."),
        (".", "src/lab", "./src/lab"),
        ("sub", "..", "."),
        ("sub", "../other", "./other"),
        ("sub", "../..", ""),
        (".", "/etc", ""),
        (".", "a b", ""),
        (".", ".hidden", ""),
        (None, ".", ""),
    ],
)
def test_paths_as_recipes_write_them(place: str | None, name: str, expected: str) -> None:
    assert recipe_path(place, name) == expected


def test_a_folder_is_a_source_or_a_loss() -> None:
    spec = EnvironmentSpec(file="x")
    assert add_directory(spec, ".", "lab", HERE)
    assert add_directory(spec, ".", "./lab", HERE)
    assert (spec.sources, spec.lost, len(spec.notes)) == (["./lab"], [], 1)
    assert not add_directory(spec, None, "lab", HERE)
    assert "imagefactory init" in spec.lost[0]


@pytest.mark.parametrize(
    ("address", "source"),
    [
        (f"https://git.example.org/lab/ops@{COMMIT}", f"git+https://git.example.org/lab/ops@{COMMIT}"),
        (f"https://git.example.org/lab/ops.git@{COMMIT}#egg=ops", f"git+https://git.example.org/lab/ops.git@{COMMIT}"),
    ],
)  # fmt: skip
def test_a_commit_is_a_source(address: str, source: str) -> None:
    spec = EnvironmentSpec(file="x")
    add_git(spec, address, HERE)
    assert (spec.sources, spec.lost) == ([source], [])


def test_a_subdirectory_is_part_of_it() -> None:
    spec = EnvironmentSpec(file="x")
    add_git(spec, f"https://git.example.org/lab/ops@{COMMIT}", HERE, directory="python/ops")
    assert spec.sources == [f"git+https://git.example.org/lab/ops@{COMMIT}#subdirectory=python/ops"]


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("https://git.example.org/lab/ops", "`git ls-remote https://git.example.org/lab/ops HEAD`"),
        ("https://git.example.org/lab/ops@v1.0", "`git ls-remote https://git.example.org/lab/ops v1.0`"),
        ("https://git.example.org/lab/ops@fix/it", "`git ls-remote https://git.example.org/lab/ops fix/it`"),
        ("https://git.example.org/lab/ops@0123abc", "git rev-parse 0123abc"),
        (f"ssh://git@git.example.org/lab/ops@{COMMIT}", f"git+https://git.example.org/lab/ops@{COMMIT}"),
        (f"https://me:secret@git.example.org/lab/ops@{COMMIT}", f"git+https://git.example.org/lab/ops@{COMMIT}"),
        ("https://git.example.org/$(id)", "git+https://HOST/REPOSITORY@COMMIT"),
    ],
)  # fmt: skip
def test_other_revisions_are_lost_with_a_way(address: str, hint: str) -> None:
    spec = EnvironmentSpec(file="x")
    add_git(spec, address, HERE)
    assert spec.sources == []
    assert hint in spec.lost[0]
    assert "secret" not in spec.lost[0]


def test_an_extra_of_a_repository_is_told() -> None:
    spec = EnvironmentSpec(file="x")
    add_git(spec, f"https://git.example.org/lab/ops@{COMMIT}", HERE, extras="fast")
    assert (len(spec.sources), len(spec.lost)) == (1, 1)


def test_archives_that_hosts_pack() -> None:
    at = "https://git.example.org/lab/ops"
    assert git_of_archive(f"{at}/archive/{COMMIT}.zip") == f"{at}@{COMMIT}"
    assert git_of_archive(f"{at}/archive/refs/tags/v1.tar.gz") == f"{at}@v1"
    assert git_of_archive("https://example.org/a.zip") == ""
