"""A project keeps to its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import UsageError
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
