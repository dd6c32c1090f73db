"""A project keeps to its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import NothingSelectedError, RecipeError, UsageError
from imagefactory.project import PROJECT_DIRECTORIES, Project, load_lenient
from imagefactory.settings.load import load_settings
from tests.made.families import make_root


def read(root: Path) -> Project:
    environ = {"HOME": str(root.parent / "home")}
    return load_lenient(load_settings(directory=root, start=root, environ=environ), environ)


@pytest.mark.parametrize(
    "name", [*PROJECT_DIRECTORIES, "lockfiles/bases", "definitions/one", "lockfiles/one.lock"]
)
def test_a_link_out_of_a_project_is_an_error(tmp_path: Path, name: str) -> None:
    root = make_root(tmp_path / "root")
    assert read(root).targets
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError) as caught:
        read(root)
    assert (caught.value.code, str(path) in caught.value.message) == ("link-leaves-project", True)


def test_a_link_inside_of_a_project_is_none(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    (root / "definitions").mkdir()
    (root / "shared").mkdir()
    (root / "definitions/one").symlink_to("../shared")
    (tmp_path / "link").symlink_to(root)
    assert read(tmp_path / "link").targets


def without_two(tmp_path: Path, printed: list[str]) -> Project:
    """Return a project whose family two is invalid; notes go to `printed`."""
    root = make_root(tmp_path / "root")
    (root / "recipes/two.yaml").write_text("family: two\n")
    environ = {"HOME": str(tmp_path / "home")}
    settings = load_settings(directory=root, start=root, environ=environ)
    return load_lenient(settings, environ, printed.append)


@pytest.mark.parametrize("name", ["one-12.1-cu121", "one-12.1", "one", "one-*"])
def test_an_invalid_recipe_does_not_stop_another_family(tmp_path: Path, name: str) -> None:
    printed: list[str] = []
    project = without_two(tmp_path, printed)
    assert {target.family for target in project.select((name,))} == {"one"}
    assert [line.partition(":")[0] for line in printed] == ["note"]
    assert "(two)" in printed[0]


@pytest.mark.parametrize("name", ["two", "two-12.1-cu121", "two-12.1", "*", "t*", "two-*"])
def test_a_name_of_an_invalid_recipe_reports_its_problems(tmp_path: Path, name: str) -> None:
    printed: list[str] = []
    project = without_two(tmp_path, printed)
    with pytest.raises(RecipeError) as caught:
        project.select((name,))
    assert [problem.location.partition(":")[0] for problem in caught.value.diagnostics] == [
        "recipes/two.yaml" for _ in project.invalid["two"]
    ]
    assert not printed


def test_without_names_all_problems_are_reported(tmp_path: Path) -> None:
    project = without_two(tmp_path, [])
    with pytest.raises(RecipeError):
        project.select(())
    with pytest.raises(NothingSelectedError):
        project.select(("nothing",))
