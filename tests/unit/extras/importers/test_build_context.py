"""The build context of a container file: where it is, what belongs to it, and that nothing else is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.errors import RecipeError, UsageError
from imagefactory.extras.importers.build_context import open_context, parse_ignore_rules
from imagefactory.extras.importers.environments import ReadOptions, read_environment_file
from imagefactory.extras.importers.spec import EnvironmentSpec

READING = ReadOptions(pythons=("3.11",))
INSTALLS = "FROM python:3.11\nCOPY . /app\nRUN pip install -r /app/requirements.txt\n"


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write(
        tmp_path / "repo",
        {
            ".git/HEAD": "",
            "requirements.txt": "einops==0.8.0\n",
            "docker/Dockerfile": INSTALLS,
            "docker/requirements.txt": "transformers==4.57.1\n",
        },
    )


def read(path: Path, context: Path | None = None, project: Path | None = None) -> EnvironmentSpec:
    return read_environment_file(
        path, replace(READING, build_context=context, root=project, reserved=("recipes",))
    )


def test_the_context_is_the_root_of_the_work_tree(repository: Path) -> None:
    spec = read(repository / "docker/Dockerfile")
    assert spec.pip == ["einops==0.8.0"]
    assert any(str(repository / "docker/requirements.txt") in line for line in spec.notes)


def test_a_work_tree_whose_git_is_a_file_counts(repository: Path) -> None:
    (repository / ".git/HEAD").unlink()
    (repository / ".git").rmdir()
    (repository / ".git").write_text("gitdir: elsewhere\n")
    assert read(repository / "docker/Dockerfile").pip == ["einops==0.8.0"]


def test_a_person_names_another_context(repository: Path) -> None:
    spec = read(repository / "docker/Dockerfile", context=repository / "docker")
    assert spec.pip == ["transformers==4.57.1"]


def test_without_git_it_is_the_file_s_own_directory(tmp_path: Path) -> None:
    write(tmp_path, {"a/Dockerfile": INSTALLS, "a/requirements.txt": "x\n", "requirements.txt": "y\n"})
    spec = read(tmp_path / "a/Dockerfile")
    assert spec.pip == ["x"]
    assert any(str(tmp_path / "requirements.txt") in line for line in spec.notes)


@pytest.mark.parametrize(
    ("files", "dockerfile", "context"),
    [
        ({"docker/start.sh": ""}, "COPY start.sh /app/\n", "docker"),
        (
            {"docker/requirements.txt": "x"},
            "COPY . /app\nRUN pip install -r /app/requirements.txt\n",
            "docker",
        ),
        ({"docker/deps/x.txt": ""}, "COPY deps/*.txt /app/\n", "docker"),
        (
            {"docker/env.yml": "dependencies: [x]\n"},
            "COPY env.yml /\nRUN conda env create -f /env.yml\n",
            "docker",
        ),
    ],
)
def test_files_that_are_only_in_another_directory_stop_it(
    tmp_path: Path, files: dict[str, str], dockerfile: str, context: str
) -> None:
    write(tmp_path, {".git/HEAD": "", "docker/Dockerfile": f"FROM python:3.11\n{dockerfile}", **files})
    with pytest.raises(RecipeError) as raised:
        read(tmp_path / "docker/Dockerfile")
    assert raised.value.diagnostics[0].code == "file-not-in-context"
    assert raised.value.hint.startswith("pass --context ")
    named = raised.value.hint.removeprefix("pass --context ").partition(",")[0]
    assert Path(named).resolve() == tmp_path / context
    read(tmp_path / "docker/Dockerfile", context=Path(named))  # the hint can be obeyed


def test_a_directory_that_lacks_what_is_found_is_not_named(tmp_path: Path) -> None:
    text = "FROM python:3.11\nCOPY a.txt b.txt /app/\n"
    write(tmp_path, {".git/HEAD": "", "docker/Dockerfile": text, "a.txt": "", "docker/b.txt": ""})
    spec = read(tmp_path / "docker/Dockerfile")
    assert any("'b.txt'" in line or "b.txt" in line for line in spec.lost)


def test_a_directory_above_is_named_where_no_git_says_it(tmp_path: Path) -> None:
    write(tmp_path, {"requirements.txt": "x\n", "docker/Dockerfile": INSTALLS})
    with pytest.raises(RecipeError) as raised:
        read(tmp_path / "docker/Dockerfile")
    named = raised.value.hint.removeprefix("pass --context ").partition(",")[0]
    assert read(tmp_path / "docker/Dockerfile", context=Path(named)).pip == ["x"]


def test_links_out_of_the_context_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"secret.txt": "x\n", "repo/.git/HEAD": "", "repo/Dockerfile": INSTALLS})
    (tmp_path / "repo/requirements.txt").symlink_to(tmp_path / "secret.txt")
    spec = read(tmp_path / "repo/Dockerfile")
    assert spec.pip == []
    assert any("requirements.txt" in line for line in spec.lost)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, {".git/HEAD": "", "Dockerfile": INSTALLS})
    os.mkfifo(tmp_path / "requirements.txt")
    assert read(tmp_path / "Dockerfile").pip == []


@pytest.mark.parametrize(
    ("name", "rules"),
    [(".dockerignore", "*.txt\n"), ("docker/Dockerfile.dockerignore", "requirements.txt\n")],
)
def test_an_excluded_file_is_not_taken(repository: Path, name: str, rules: str) -> None:
    (repository / name).write_text(f"# ours\n{rules}")
    spec = read(repository / "docker/Dockerfile", context=repository)
    assert spec.pip == []
    assert any(f"{name}:2" in line for line in spec.lost)


def test_the_option_says_nothing_of_other_files(tmp_path: Path) -> None:
    write(tmp_path, {"requirements.txt": "x\n"})
    with pytest.raises(UsageError) as caught:
        read(tmp_path / "requirements.txt", context=tmp_path)
    assert caught.value.code == "option-conflict"
    with pytest.raises(UsageError) as caught:
        open_context(tmp_path, selection=tmp_path / "none")
    assert caught.value.code == "option-invalid"


@pytest.mark.parametrize(
    ("rules", "excluded", "included"),
    [
        ("*.md", ["README.md"], ["docs/README.md", "a.mdx"]),
        ("**/*.md", ["README.md", "docs/a/README.md"], ["a.mdx"]),
        ("docs", ["docs", "docs/a/b"], ["docs2", "x/docs"]),
        ("/docs/", ["docs/a"], ["x/docs/a"]),
        ("**/docs", ["docs/a", "x/y/docs/a"], ["x/docs2"]),
        ("a/**/b", ["a/b", "a/x/y/b"], ["b", "a/xb"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ab"]),
        ("**.log", ["x.log", "a/x.log"], ["x.logs"]),
        ("file?.[ch]", ["file1.c", "file2.h"], ["file1.o", "file12.c", "file/.c"]),
        ("[^a].txt", ["b.txt"], ["a.txt"]),
        ("*\n!src\n", ["a", "a/b"], ["src", "src/x"]),
        ("src\n!src/keep\nsrc/keep/not", ["src/x", "src/keep/not"], ["src/keep", "src/keep/x"]),
        ("./a//b/../c", ["a/c"], ["a/b"]),
        ("a\\*b", ["a*b"], ["axb"]),
        ("# a\n\n  b  ", ["b"], ["# a", "a"]),
        ("*/temp*", ["x/temporary", "x/temp/y"], ["temp", "x/y/temp"]),
        (".", [], ["a"]),
    ],
)
def test_ignore_rules_are_moby_s(rules: str, excluded: list[str], included: list[str]) -> None:
    result = parse_ignore_rules(rules, ".dockerignore")
    assert [path for path in (*excluded, *included) if result.excludes(path)] == excluded


def test_no_rule_takes_long() -> None:
    rules = parse_ignore_rules("**/" * 60 + "*a" * 100 + "z", ".dockerignore")
    assert not rules.excludes("a/" * 500 + "a" * 500)


def test_too_many_rules_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        parse_ignore_rules("a\n" * 1001, ".dockerignore")
    assert caught.value.code == "dockerignore-invalid"
