"""Own files of a factory: what the globs of a recipe find, and what stops."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from imagefactory.actions.definition import find_own_files
from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.model import FilesSpec, SourceLocation


@pytest.fixture
def root(tmp_path: Path) -> Path:
    names = "train.py src/net.py src/data/set.csv src/.env src/__pycache__/net.pyc start.sh"
    for name in names.split():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "root" / "start.sh").chmod(0o755)
    return tmp_path / "root"


def wanted(*patterns: str, folder: str = "/app") -> list[FilesSpec]:
    where = SourceLocation(file="recipes/mine.yaml", line=5, column=9)
    return [FilesSpec(folder=folder, pattern=pattern, where=where) for pattern in patterns]


def fault(root: Path, *patterns: str, folder: str = "/app") -> Diagnostic:
    with pytest.raises(RecipeError) as caught:
        find_own_files(root, wanted(*patterns, folder=folder))
    return only(caught.value)


def only(error: RecipeError) -> Diagnostic:
    (found,) = error.diagnostics
    assert isinstance(found, Diagnostic)
    return found


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["train.py"], ["train.py"]),
        (["src"], ["src/data/set.csv", "src/net.py"]),
        (["src/**/*"], ["src/data/set.csv", "src/net.py"]),
        (["**/*.py"], ["src/net.py", "train.py"]),
        (["train.py", "*.py"], ["train.py"]),
        (["src/.env"], ["src/.env"]),
        (["*"], ["src/data/set.csv", "src/net.py", "start.sh", "train.py"]),
    ],
)
def test_a_file_keeps_its_path_and_what_is_hidden_stays_out(
    root: Path, patterns: list[str], found: list[str]
) -> None:
    files = find_own_files(root, wanted(*patterns))
    assert [file.path for file in files] == [f"/app/{path}" for path in found]
    assert [file.source for file in files] == [root / path for path in found]
    assert [file.sha256 for file in files] == [hashlib.sha256(path.encode()).hexdigest() for path in found]
    assert [file.executable for file in files] == [path == "start.sh" for path in found]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("src/./*", ["data/set.csv", "net.py"]),
        ("src/./data", ["data/set.csv"]),
        ("src/data/./set.csv", ["set.csv"]),
        ("src/./.env", [".env"]),
    ],
)
def test_a_file_keeps_its_path_from_the_pivot_on(root: Path, pattern: str, found: list[str]) -> None:
    files = find_own_files(root, wanted(pattern))
    assert [file.path for file in files] == [f"/app/{path}" for path in found]
    assert [file.source for file in files] == [root / pattern.partition("/./")[0] / path for path in found]


def test_files_may_lie_at_the_root_but_in_no_folder_of_the_system(root: Path) -> None:
    files = find_own_files(root, wanted("start.sh", "src/data", folder="/"))
    assert [file.path for file in files] == ["/src/data/set.csv", "/start.sh"]
    assert (
        find_own_files(root, wanted("start.sh", folder="/usr/local/bin"))[0].path == "/usr/local/bin/start.sh"
    )
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/x").write_text("x")
    assert fault(root, "usr", folder="/").code == "files-system-path"


def test_a_pattern_that_finds_nothing_stops_with_its_place(root: Path) -> None:
    found = fault(root, "train.py", "tests/*.py")
    assert (found.code, found.location) == ("files-no-match", "recipes/mine.yaml:5:9")
    assert "'tests/*.py'" in found.message


def test_a_link_may_lead_to_another_file_and_not_out(root: Path) -> None:
    (root / "inner.py").symlink_to("train.py")
    (file,) = find_own_files(root, wanted("inner.py"))
    assert (file.path, file.size) == ("/app/inner.py", len("train.py"))
    (root.parent / "secret").write_text("x")
    (root / "outer.py").symlink_to("../secret")
    found = fault(root, "*.py")
    assert (found.code, str(root / "outer.py") in found.message) == ("files-outside-project", True)


def test_two_files_for_one_path_stop(root: Path) -> None:
    (root / "net.py").write_text("another")
    with pytest.raises(RecipeError) as caught:
        find_own_files(root, [*wanted("src/net.py"), *wanted("net.py", folder="/app/src")])
    found = only(caught.value)
    assert (found.code, "/app/src/net.py" in found.message) == ("files-path-conflict", True)


@pytest.mark.parametrize("pattern", [".git/config", ".git", "**/config", "link"])
def test_the_tokens_of_git_reach_no_image(root: Path, pattern: str) -> None:
    (root / ".git").mkdir()
    (root / ".git/config").write_text("[http]\n\textraheader = secret\n")
    (root / "link").symlink_to(".git/config")
    assert fault(root, pattern).code == ("files-no-match" if "*" in pattern else "files-in-git")
