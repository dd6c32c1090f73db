"""What mmdebstrap is given to install from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.base import make
from imagefactory.build.base.fetch import BaseArchives
from imagefactory.build.base.make import _write_repository
from imagefactory.errors import ToolError
from imagefactory.model import BaseLock, DebianPackage
from imagefactory.runtime.build_sandbox import INPUT, IdMaps, prepare_directory
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
    with fails("deb-invalid", r"hello_1\.0_amd64\.deb.* not a Debian format"):
        _write_repository(fetched, tmp_path / INPUT)


WHOLE = "         0          0 4294967295\n"


READY = make.BuilderFacts(
    is_root=False,
    mmdebstrap="1.3.5",
    has_newuidmap=True,
    names=("ada", "1000"),
    uid_map=WHOLE,
    gid_map=WHOLE,
    subuid="bob:1:65536\nada:100000:65536\n",
    subgid="1000:200000:65536\n",
)


ROOT = replace(READY, is_root=True, names=("root", "0"))


@pytest.mark.parametrize(
    ("facts", "changes", "hint"),
    [
        (READY, {"mmdebstrap": ""}, "sudo apt-get install mmdebstrap uidmap"),
        (ROOT, {"mmdebstrap": ""}, "apt-get install mmdebstrap"),
        (READY, {"has_newuidmap": False}, "sudo apt-get install uidmap"),
        (READY, {"subuid": "ada:100000:10\nbob:1:65536\nada\n"}, "usermod --add-subuids"),
        (READY, {"subgid": ""}, "usermod --add-subuids"),
        (ROOT, {"uid_map": "0 100000 65536\n"}, "two ranges"),
    ],
)
def test_what_is_missing_is_said_with_the_command_that_mends_it(
    facts: make.BuilderFacts, changes: dict[str, str], hint: str
) -> None:
    with pytest.raises(ToolError) as caught:
        make.choose_ids(replace(facts, **changes))  # type: ignore[arg-type]
    assert hint in caught.value.hint


def test_an_ordinary_user_builds_with_subordinate_ids() -> None:
    assert make.choose_ids(READY) == IdMaps(
        uid_map="0 100000 65536", gid_map="0 200000 65536", delegated=True
    )


def test_root_builds_with_ids_of_nobody_and_needs_no_delegation() -> None:
    assert make.choose_ids(replace(ROOT, has_newuidmap=False, subuid="", subgid="")) == IdMaps(
        uid_map="0 1878982656 65536", gid_map="0 1878982656 65536", delegated=False
    )


@pytest.mark.parametrize(
    ("id_map", "first"),
    [
        ("0 1000 1\n1 100000 65536\n", 1),  # a rootless container
        ("0 100000 200000\n", 134464),
        ("0 100000 65536\n", None),
        ("0 100000 65537\n", 1),
        ("0 0 1\n", None),
        ("", None),
    ],
)
def test_roots_own_id_is_never_in_a_build(id_map: str, first: int | None) -> None:
    assert make.unused_ids(id_map) == first


@pytest.mark.parametrize("line", ["ada:0:65536", "ada:-1:65536", "ada:100000:65536:9", "ada:100000", ""])
def test_lines_that_delegate_nothing(line: str) -> None:
    assert make.delegated_ids(f"{line}\n", ("ada",)) is None
