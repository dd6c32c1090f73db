"""What mmdebstrap is given to install from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagefactory.build.base.fetch import BaseArchives
from imagefactory.build.base.make import _write_repository
from imagefactory.errors import BuildError
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.runtime.build_sandbox import INPUT, prepare_directory
from tests.made.errors import fails
from tests.made.programs import Program
from tests.made.values import make_base


@pytest.fixture
def narrow_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def fetched(tmp_path: Path) -> BaseArchives:
    deb = tmp_path / "hello_1.0_amd64.deb"
    deb.write_bytes(b"a deb")
    deb.chmod(0o644)
    package = DebianPackage(
        name="hello", version="1.0", architecture="amd64", sha256=hashlib.sha256(b"a deb").hexdigest(), size=5
    )
    base = make_base()
    lock = BaseLock(
        base=base.name, suite=base.suite, content_hash="", source_date_epoch=0, packages=(package,)
    )
    return BaseArchives(base=base, lock=lock, debs=(deb,), moved=())


@pytest.mark.usefixtures("narrow_umask")
@pytest.mark.parametrize("linked", [True, False])
def test_another_user_can_read_the_repository_whatever_the_umask(
    linked: bool, fetched: BaseArchives, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mmdebstrap runs with other ids; the cache may be on another file system."""

    def refuse(self: Path, target: Path) -> None:
        raise OSError

    if not linked:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    program("dpkg-deb", "Package: hello\nVersion: 1.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    prepare_directory(tmp_path)
    repository = tmp_path / INPUT
    _write_repository(fetched, repository)
    made = [repository, *repository.iterdir()]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in made} == {
        "input": "0o755",
        "hello_1.0_amd64.deb": "0o644",
        "Packages": "0o644",
        "Release": "0o644",
        "dpkg.cfg": "0o644",
    }
    index = (repository / "Packages").read_bytes()
    release = (repository / "Release").read_text()
    assert f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n" in release


def test_what_dpkg_cannot_read_is_said(
    fetched: BaseArchives, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("dpkg-deb", fails="not a Debian format archive\n", code=2)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    prepare_directory(tmp_path)
    with fails(BuildError, "deb-invalid", match=r"hello_1\.0_amd64\.deb.* not a Debian format"):
        _write_repository(fetched, tmp_path / INPUT)
