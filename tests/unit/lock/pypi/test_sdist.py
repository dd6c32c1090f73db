"""Source distributions: which one a requirement means, and what it says it is built with."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from imagefactory.errors import LockError, UsageError
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.lock.pypi.sdist import DEFAULT_REQUIRES, build_requires, choose_sdist

PYPROJECT = '[build-system]\nrequires = ["setuptools>=61", "numpy ; python_version < \'3.13\'"]\n'


def files(*names: str, yanked: str = "") -> list[IndexFile]:
    return [IndexFile(filename=n, url=f"https://x/{n}", sha256="1" * 64, yanked=n == yanked) for n in names]


def test_the_newest_that_fits_and_is_not_yanked() -> None:
    offered = files(
        "torch_scatter-2.0.9.tar.gz",
        "torch_scatter-2.1.10.tar.gz",
        "torch_scatter-2.1.9.zip",
        "torch_scatter-2.1.11.tar.gz",
        "torch_scatter-2.2.0-cp311-cp311-linux_x86_64.whl",
        "torch_scatter-2.3.0rc1.tar.gz",
        yanked="torch_scatter-2.1.11.tar.gz",
    )
    file, version = choose_sdist(Requirement("torch-scatter"), offered)
    assert (file.filename, str(version)) == ("torch_scatter-2.1.10.tar.gz", "2.1.10")
    assert choose_sdist(Requirement("torch-scatter<2.1"), offered)[0].filename == "torch_scatter-2.0.9.tar.gz"
    with pytest.raises(LockError, match=r"no source distribution of torch-scatter==9") as caught:
        choose_sdist(Requirement("torch-scatter==9"), offered)
    assert "git+https://" in caught.value.hint


def archive(folder: Path, kind: str, **contents: str) -> Path:
    """An archive whose files lie below one folder; `__` in a name is `/`."""
    path = folder / f"ops-1.0.{kind}"
    named = {f"ops-1.0/{name.replace('__', '/')}": text for name, text in contents.items()}
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as out:
            for name, text in named.items():
                out.writestr(name, text)
        return path
    with tarfile.open(path, "w:gz") as tar:
        for name, text in named.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_what_an_archive_is_built_with(tmp_path: Path, kind: str) -> None:
    contents = {"sub__pyproject.toml": "[build-system]\nrequires = ['other']\n", "pyproject.toml": PYPROJECT}
    made = archive(tmp_path, kind, **contents)
    assert build_requires(made) == ("setuptools>=61", 'numpy; python_version < "3.13"')
    assert build_requires(archive(tmp_path, kind, **{"setup.py": "x"})) == DEFAULT_REQUIRES


def test_what_a_folder_is_built_with(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither pyproject\.toml nor setup\.py"):
        build_requires(tmp_path)
    (tmp_path / "setup.py").write_text("x")
    assert build_requires(tmp_path) == DEFAULT_REQUIRES
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    assert build_requires(tmp_path)[0] == "setuptools>=61"


@pytest.mark.parametrize(
    "text", ["[build-system", "build-system = 3", "[build-system]\nrequires = ['a b c']"]
)
def test_a_pyproject_that_is_none_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError, match="cannot be read as a package's source"):
        build_requires(tmp_path)


def test_a_file_that_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "ops.tar.gz").write_text("no archive")
    with pytest.raises(UsageError, match=r"ops\.tar\.gz cannot be read"):
        build_requires(tmp_path / "ops.tar.gz")
