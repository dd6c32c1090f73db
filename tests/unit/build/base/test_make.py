"""What mmdebstrap is given to install from."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.base import look, make
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


HELLO = "Package: hello\nVersion: 1.0\nArchitecture: amd64\n"


def control_tar(control: str = HELLO, **files: str) -> bytes:
    """What `dpkg-deb --ctrl-tarfile` prints. In names `_` stands for `/`."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for name, text in {"control": control, **files}.items():
            member = tarfile.TarInfo(f"./{name.replace('_', '/')}")
            member.size, member.mode, member.mtime = len(text), 0o6755, 1_600_000_000
            archive.addfile(member, io.BytesIO(text.encode()))
    return output.getvalue()


@pytest.fixture
def dpkg_deb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file whose bytes `dpkg-deb` prints."""
    output, folder = tmp_path / "control.tar", tmp_path / "bin"
    folder.mkdir()
    (folder / "dpkg-deb").write_text(f"#!/bin/sh\nexec /bin/cat {output}\n")
    (folder / "dpkg-deb").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return output


@pytest.mark.usefixtures("narrow_umask")
@pytest.mark.parametrize("linked", [True, False])
def test_another_user_can_read_the_repository_whatever_the_umask(
    linked: bool, fetched: BaseArchives, tmp_path: Path, dpkg_deb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mmdebstrap runs with other ids; the cache may be on another file system."""

    def refuse(self: Path, target: Path) -> None:
        raise OSError

    if not linked:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    dpkg_deb.write_bytes(control_tar(md5sums="", postinst="#!/bin/sh\n"))
    prepare_directory(tmp_path)
    repository = tmp_path / INPUT
    _write_repository(fetched, repository)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in [repository, *repository.rglob("*")]}
    executable = {"input", "info", "hello.postinst", "hello.md5sums"}
    assert {name for name, mode in modes.items() if mode == 0o755} == executable
    assert {mode for name, mode in modes.items() if name not in executable} == {0o644}
    assert {"hello_1.0_amd64.deb", "Packages", "Release", "dpkg.cfg", "unpack", "configure"} <= modes.keys()
    assert (repository / "info/hello.postinst").stat().st_mtime == 1_600_000_000
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


@pytest.mark.parametrize(
    "content",
    [
        b"not a tar" * 100,
        control_tar("Version: 1.0\n"),
        control_tar(HELLO.replace("hello", "../../hello")),
        control_tar(HELLO.replace("1.0", "2.0")),
        control_tar(**{"_.._.._escape": "x"}),
        control_tar(**{"post.inst": "x"}),
    ],
)
def test_control_data_of_another_package_is_refused(
    content: bytes, fetched: BaseArchives, tmp_path: Path, dpkg_deb: Path
) -> None:
    dpkg_deb.write_bytes(content)
    prepare_directory(tmp_path)
    with fails("deb-invalid"):
        _write_repository(fetched, tmp_path / INPUT)
    assert not list((tmp_path / INPUT / "info").glob("*"))


def control(name: str, *fields: str, **files: str) -> look.ControlData:
    text = "\n".join((f"Package: {name}", "Version: 1", "Architecture: amd64", *fields)) + "\n"
    return make.parse_control(control_tar(text, md5sums="", **files))


def test_packages_that_scripts_or_triggers_concern_are_left_to_dpkg() -> None:
    assert control("a").is_plain
    assert control("a", postinst="x", triggers="activate-noawait ldconfig\n").is_plain
    assert not make.parse_control(control_tar()).is_plain
    assert not control("a", preinst="dpkg-divert --add /bin/sh").is_plain
    assert not control("a", triggers="interest-noawait /usr/lib\n").is_plain
    assert not control("a", conffiles="remove-on-upgrade /etc/a\n").is_plain


def test_an_unpacked_package_is_in_dpkgs_words() -> None:
    both = control("a", "Multi-Arch: same", conffiles="/etc/a\n/etc/b\n")
    assert both.info_name == "a:amd64"
    assert control("a", "Multi-Arch: foreign").info_name == "a"
    assert both.unpacked_stanza.strip().splitlines()[-4:] == [
        "Status: install ok unpacked", "Conffiles:", " /etc/a newinstall", " /etc/b newinstall"
    ]  # fmt: skip


def test_what_essential_packages_need_is_essential() -> None:
    rows = [
        control("dpkg", "Essential: yes", "Pre-Depends: libc6 (>= 2), tar:any", "Depends: x-or-y | other"),
        control("libc6", "Depends: loop"),
        control("loop", "Depends: libc6, missing"),
        control("tar"),
        control("other"),
        control("y", "Provides: x-or-y (= 1), z"),
        control("g++", "Depends: dpkg"),
        control("apt", "Depends: gpgv"),
        control("gpgv"),
    ]
    needed = [row.fields["Package"] for row in look.essential_packages(rows)]
    assert needed == ["dpkg", "libc6", "loop", "tar", "other", "y", "apt", "gpgv"]


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
