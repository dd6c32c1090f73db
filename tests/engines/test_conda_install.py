"""conda_install.py, and link.py which guards it, run as the programs they are, on packages made here."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.build import conda_install
from imagefactory.build.conda import link
from imagefactory.build.conda_install import Failure, parse_explicit
from tests.services import conda_package
from tests.services.channel_made import ADDRESS, PYTHON, MadeChannel, make_channel
from tests.services.children import LIMIT, child, wait_for
from tests.services.conda_package import PLACEHOLDER, CondaPackage, File, pack

PROGRAM = Path(conda_install.__file__)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeChannel:
    return make_channel(tmp_path_factory.mktemp("channel"), numpy=False)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str

    @property
    def told(self) -> Any:
        return json.loads(self.stdout.splitlines()[-1])

    @property
    def failure(self) -> Any:
        assert self.returncode == 1, self
        return json.loads(self.stderr)


class Bench:
    """A folder to install in, and packages that an explicit list names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, folder / "prefix"
        self.lines: list[str] = []
        self.mirrors: dict[str, str] = {}
        self.auth: dict[str, Any] = {}
        self.archives, self.cache = folder / "archives", folder / "cache"
        self.archives.mkdir()

    def add(self, path: Path) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.lines.append(f"{ADDRESS}/{path.parent.name}/{path.name}#sha256:{digest}")
        (self.archives / path.name).unlink(missing_ok=True)
        (self.archives / path.name).symlink_to(path)

    def made(self, channel: MadeChannel, *starts: str) -> None:
        for start in starts:
            self.add(channel.archive(start))

    def packed(self, *packages: CondaPackage) -> list[Path]:
        channel = self.folder / "packed"
        paths = [pack(channel, package) for package in packages]
        for path in paths:
            self.add(path)
        return paths

    def lists(self, number: int = 1) -> list[str]:
        """The packages in as many lists, by turns."""
        paths = [self.folder / f"explicit-{one}.txt" for one in range(number)]
        for one, path in enumerate(paths):
            path.write_text("\n".join(["# a comment", "@EXPLICIT", *self.lines[one::number]]) + "\n")
        return [*map(str, paths)]

    def command(self, *more: str) -> list[str]:
        """conda_install.py, which fetches."""
        channels = self.folder / "channels.json"
        channels.write_text(json.dumps({"mirrors": self.mirrors, "auth": self.auth}))
        command = [sys.executable, "-I", str(PROGRAM), "--prefix", str(self.prefix)]
        return [*command, *(more or ("--explicit", *self.lists(), "--channels", str(channels)))]

    def fetch(self, *more: str) -> Done:
        return self._run(self.command(*more))

    def run(self, *, lists: int = 1, umask: int = 0o022, shown: str = "/opt/env") -> Done:
        """link.py, which has the packages at hand."""
        command = [sys.executable, "-I", "-m", link.__name__, "--prefix", str(self.prefix), "--as", shown]
        command += ["--packages", str(self.archives), "--cache", str(self.cache)]
        return self._run([*command, "--explicit", *self.lists(lists)], umask)

    def _run(self, command: list[str], umask: int = 0o022) -> Done:
        done = subprocess.run(command, capture_output=True, text=True, umask=umask, timeout=120)
        return Done(done.returncode, done.stdout, done.stderr)

    def left(self) -> set[str]:
        """What lies beside what the test itself put there."""
        return {path.name for path in self.folder.iterdir()} - {
            *("packed", "archives", "cache", "channels.json", "explicit-0.txt")
        }


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def tree(folder: Path) -> dict[str, tuple[str, bool, bytes]]:
    """path -> kind, whether executable, content."""
    found: dict[str, tuple[str, bool, bytes]] = {}
    for path in folder.rglob("*"):
        inside = str(path.relative_to(folder))
        if path.is_symlink():
            found[inside] = ("link", False, str(path.readlink()).encode())
        elif path.is_dir():
            found[inside] = ("folder", False, b"")
        else:
            found[inside] = ("file", bool(path.stat().st_mode & 0o100), path.read_bytes())
    return found


# --- the list ------------------------------------------------------------------------------------


def test_a_line_without_a_sha256_is_refused() -> None:
    good = "https://x/linux-64/a-1-0.conda#sha256:" + "0" * 64
    assert parse_explicit(f"@EXPLICIT\n# platform: linux-64\n\n{good}\n", 0)[0].channel == "https://x"
    for bad in (
        "https://x/linux-64/a-1-0.conda",
        "https://x/linux-64/a-1-0.conda#" + "0" * 32,
        "https://x/linux-64/a-1-0.conda#sha256:" + "0" * 63,
        "https://x/linux-64/a-1-0.zip#sha256:" + "0" * 64,
    ):
        with pytest.raises(Failure) as caught:
            parse_explicit(bad, 0)
        assert caught.value.kind == "explicit"


# --- linking -------------------------------------------------------------------------------------


def test_the_same_list_gives_the_same_files(bench: Bench, made: MadeChannel, tmp_path: Path) -> None:
    """Whatever the folder, the umask, and what the cache held; nothing of this machine is in them."""
    names = ("python-3", "python-libs", "tinytool-1.0", "tinyprefix", "claims-a", "claims-b", "oddpaths")
    bench.made(
        made, *names, "packaging", "cuda-version-12.1", "tinytorch-1.0-" + f"py{PYTHON.replace('.', '')}_cuda"
    )
    trees = []
    for number, (cache, umask) in enumerate((("other", 0o077), ("cache", 0o022), ("cache", 0o022))):
        bench.prefix, bench.cache = tmp_path / f"prefix{number}", tmp_path / cache
        assert bench.run(umask=umask).returncode == 0
        trees.append(tree(bench.prefix))
    assert trees[0] == trees[1] == trees[2]
    everything = b"".join(content for _, _, content in trees[0].values())
    assert str(tmp_path).encode() not in everything
    assert str(made.folder).encode() not in everything
    found = trees[0]
    assert found["conda-meta/history"] == ("file", False, b"")
    assert found["share/tinyprefix.txt"][2] == b"home=/opt/env\n"
    library = found["lib/libtinyprefix.so"][2]
    assert b"/opt/env/share/tinyprefix\0" in library
    assert PLACEHOLDER.encode() not in library
    assert found["bin/tinytool"][:2] == ("file", True)
    assert found["bin/tinytool"][2].startswith(f"#!/opt/env/bin/python{PYTHON}\n".encode())
    assert found["bin/python"] == ("link", False, f"python{PYTHON}".encode())
    assert found["share/odd/link"] == ("link", False, b"two words.txt")
    assert found["share/odd/program"][:2] == ("file", True)
    assert {"share/odd/größe-数.txt", "share/odd/$HOME;'\".txt", "share/odd/empty"} <= set(found)
    assert "CACHEDIR.TAG" not in found
    assert not any(path.startswith("__clobbers__") for path in found)
    assert bench.left() == {"other", "prefix0", "prefix1", "prefix2"}


def test_records_say_what_lies_there_and_are_condas(bench: Bench, made: MadeChannel) -> None:
    from rattler import PrefixRecord

    bench.made(made, "python-3", "python-libs", "tinytool-1.1", "packaging", "tinyprefix", "oddpaths")
    assert bench.run().returncode == 0
    listed: set[str] = set()
    for path in sorted((bench.prefix / "conda-meta").glob("*.json")):
        record = PrefixRecord.from_path(path)
        assert record.url.startswith(f"{ADDRESS}/")
        assert record.channel == ADDRESS
        for row in json.loads(path.read_text())["paths_data"]["paths"]:
            file = bench.prefix / row["_path"]
            listed.add(row["_path"])
            if row["path_type"] == "softlink":
                assert file.is_symlink()
                assert set(row) == {"_path", "path_type"}
                continue
            wanted = row.get("sha256_in_prefix") or row["sha256"]
            assert hashlib.sha256(file.read_bytes()).hexdigest() == wanted
            assert file.stat().st_size == row["size_in_bytes"]
    there = {path for path, (kind, _, _) in tree(bench.prefix).items() if kind != "folder"}
    assert {path for path in there if not path.startswith("conda-meta/")} == listed


def test_shipped_byte_code_is_left_out(bench: Bench) -> None:
    """Where its source stands beside it; without one it is all there is."""
    folder = "lib/python3.11/x"
    bench.packed(
        CondaPackage(
            name="pyc",
            files={
                f"{folder}/a.py": b"",
                f"{folder}/__pycache__/a.cpython-311.pyc": b"1",
                f"{folder}/__pycache__/a.cpython-311.opt-1.pyc": b"2",
                f"{folder}/__pycache__/only.cpython-311.pyc": b"3",
                f"{folder}/deep/b.py": b"",
                f"{folder}/deep/__pycache__/b.cpython-311.pyc": b"4",
            },
        )
    )
    assert bench.run().returncode == 0
    left = sorted(str(path.relative_to(bench.prefix / folder)) for path in bench.prefix.rglob("*.py*"))
    assert left == ["__pycache__/only.cpython-311.pyc", "a.py", "deep/b.py"]
    record = json.loads((bench.prefix / "conda-meta/pyc-1.0-0.json").read_text())
    assert len(record["files"]) == 3


@pytest.mark.parametrize("suffix", [".conda", ".tar.bz2"])
def test_a_package_from_before_paths_json(bench: Bench, suffix: str) -> None:
    hook = File(data=b"#!/bin/sh\n", executable=True)
    text = File(data=f"home={PLACEHOLDER}\n".encode(), prefix="text")
    files = {"share/t.txt": text, "share/link": File(link="t.txt"), "bin/.old-post-link.sh": hook}
    bench.packed(CondaPackage(name="old", version="1!2.0", files=files, suffix=suffix, old=True))
    bench.lines = [line.replace("!", "%21") for line in bench.lines]
    assert bench.run().told["scripts"] == [["old", "1!2.0", 0]]
    assert (bench.prefix / "share/t.txt").read_text() == "home=/opt/env\n"
    record = json.loads((bench.prefix / "conda-meta/old-1!2.0-0.json").read_text())
    assert record["files"] == ["bin/.old-post-link.sh", "share/link", "share/t.txt"]


def test_claims_are_settled_the_same_way_and_told(bench: Bench, made: MadeChannel) -> None:
    bench.made(made, "claims-b", "claims-a")
    told = bench.run().told
    assert told["claims"] == [
        {"path": "share/claims/different.txt", "kept": "claims-a", "lost": "claims-b", "same": False},
        {"path": "share/claims/same.txt", "kept": "claims-a", "lost": "claims-b", "same": True},
    ]
    assert told["lost"] == {"claims-b": ["share/claims/different.txt", "share/claims/same.txt"]}
    assert (bench.prefix / "share/claims/different.txt").read_text() == "of a\n"
    record = json.loads((bench.prefix / "conda-meta/claims-b-1.0-h1_0.json").read_text())
    assert record["files"] == ["share/claims/b.txt"]


def test_an_earlier_list_keeps_its_paths(bench: Bench, made: MadeChannel) -> None:
    bench.made(made, "claims-b", "claims-a")
    told = bench.run(lists=2).told
    assert told["lost"] == {"claims-a": ["share/claims/different.txt", "share/claims/same.txt"]}
    assert (bench.prefix / "share/claims/different.txt").read_text() == "of b\n"
    record = json.loads((bench.prefix / "conda-meta/claims-b-1.0-h1_0.json").read_text())
    assert "share/claims/different.txt" in record["files"]
    assert "original_path" not in json.dumps(record)


def test_a_file_where_another_has_a_folder(bench: Bench) -> None:
    bench.packed(
        CondaPackage(name="a", files={"x": b"file"}),
        CondaPackage(name="b", files={"x/deep": b"below"}, depends=("a",)),
    )
    told = bench.run().told
    assert told["claims"] == [{"path": "x", "kept": "b", "lost": "a", "same": False}]
    assert told["lost"] == {"a": ["x"]}
    assert (bench.prefix / "x/deep").read_bytes() == b"below"
    assert json.loads((bench.prefix / "conda-meta/a-1.0-0.json").read_text())["files"] == []


# --- post-link scripts -----------------------------------------------------------------------------


def script(text: str) -> File:
    return File(data=f"#!/bin/sh\n{text}\n".encode(), executable=True)


def test_scripts_run_when_told_in_order(bench: Bench) -> None:
    text = (
        'echo "$PKG_NAME $PKG_VERSION $PKG_BUILDNUM" >> "$PREFIX/order.txt"\necho hi > $PREFIX/.messages.txt'
    )
    bench.packed(
        CondaPackage(name="a", depends=("z",), files={"bin/.a-post-link.sh": script(text)}),
        CondaPackage(name="z", version="2.5", build="h_3", files={"bin/.z-post-link.sh": script(text)}),
    )
    told = bench.run()
    assert told.told["scripts"] == [["z", "2.5", 3], ["a", "1.0", 0]]
    assert not (bench.prefix / "order.txt").exists()
    (bench.folder / "told").write_text(told.stdout.splitlines()[-1])
    assert bench.fetch("--run-scripts", str(bench.folder / "told")).returncode == 0
    assert (bench.prefix / "order.txt").read_text() == "z 2.5 3\na 1.0 0\n"
    assert not (bench.prefix / ".messages.txt").exists()


def test_a_script_that_fails_is_named(bench: Bench) -> None:
    bench.packed(
        CondaPackage(name="bad", files={"bin/.bad-post-link.sh": script("echo no such thing; exit 3")})
    )
    (bench.folder / "told").write_text(bench.run().stdout.splitlines()[-1])
    failure = bench.fetch("--run-scripts", str(bench.folder / "told")).failure
    assert failure["packages"] == ["bad"]
    assert "ended with 3: no such thing" in failure["message"]


# --- what is no package ----------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("harm", ["flipped", "cut", "longer", "other"])
def test_a_tampered_package_is_refused_by_its_hash(bench: Bench, harm: str, warm: bool) -> None:
    (path,) = bench.packed(CondaPackage(name="a", files={"x": os.urandom(5000)}))
    if warm:
        assert bench.run().returncode == 0
        bench.prefix = bench.folder / "again"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    other = pack(bench.folder / "elsewhere", CondaPackage(name="a", files={"x": b"evil"})).read_bytes()
    harmed = {
        "flipped": bytes(data),
        "cut": path.read_bytes()[:-100],
        "longer": path.read_bytes() + b"x",
        "other": other,
    }
    path.write_bytes(harmed[harm])
    failure = bench.run().failure
    assert failure["error"] == "hash"
    assert failure["packages"] == [path.name]
    assert not bench.prefix.exists()


@pytest.mark.parametrize("suffix", [".conda", ".tar.bz2"])
def test_a_file_that_is_no_package_is_said_so(bench: Bench, suffix: str) -> None:
    path = bench.folder / "packed/linux-64" / f"a-1.0-0{suffix}"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"<html>Sorry</html>")
    bench.add(path)
    failure = bench.run().failure
    assert failure["error"] == "package"
    assert f"{path.name} is no sound package" in failure["message"]


def test_a_package_whose_own_record_is_malformed_is_said_so(bench: Bench) -> None:
    bench.packed(CondaPackage(name="a", extra={"depends": "null"}))
    failure = bench.run().failure
    assert failure["error"] == "package"
    assert "a-1.0-0.conda is no sound package: invalid type: string" in failure["message"]


def test_a_package_under_anothers_name_is_refused(bench: Bench) -> None:
    (path,) = bench.packed(CondaPackage(name="a"))
    renamed = path.rename(path.with_name("b-1.0-0.conda"))
    bench.lines.clear()
    bench.add(renamed)
    assert bench.run().failure["message"] == "b-1.0-0.conda contains a-1.0-0"


@pytest.mark.parametrize("suffix", [".conda", ".tar.bz2"])
@pytest.mark.parametrize(
    "path",
    ["../out", "x/../../o", "/tmp/out-of-the-prefix", "conda-meta/x", "a//b", "./a", "a\nb", "a/.wh.b"],
)
def test_a_path_outside_the_prefix_is_refused(bench: Bench, path: str, suffix: str) -> None:
    bench.packed(CondaPackage(name="e", files={path: b"evil"}, suffix=suffix))
    failure = bench.run().failure
    assert failure["error"] == "path"
    assert repr(path) in failure["message"]
    assert bench.left() == set()
    assert not Path("/tmp/out-of-the-prefix").exists()


@pytest.mark.parametrize("name", ["../out", "a/b", "..", ""])
def test_an_entry_point_outside_bin_is_refused(bench: Bench, name: str) -> None:
    bench.packed(CondaPackage(name="e", noarch="python", entry_points=(f"{name} = e:main",)))
    assert bench.run().failure["error"] == "path"


def test_site_packages_outside_the_prefix_are_refused(bench: Bench) -> None:
    bench.packed(
        CondaPackage(name="python", version="3.11.0", extra={"python_site_packages_path": "../../out"}),
        CondaPackage(name="e", noarch="python", files={"site-packages/e.py": b""}),
    )
    assert bench.run().failure["packages"] == ["python-3.11.0-0.conda"]


def test_no_way_out_through_links(bench: Bench) -> None:
    """Within a package py-rattler refuses it. Between two, linked at once, the link gives way or, where it
    comes second, the whole is refused; it is never followed."""
    outside = bench.folder / "outside"
    outside.mkdir()
    link = File(link=str(outside))
    bench.packed(CondaPackage(name="e", files={"d": link, "d/evil": b"x"}))
    assert bench.run().failure["error"] == "link"
    bench.lines.clear()
    bench.packed(
        CondaPackage(name="f", files={"d": link}),
        CondaPackage(name="g", files={"d/evil": b"x"}, depends=("f",)),
    )
    done = bench.run()
    assert list(outside.iterdir()) == []
    if done.returncode == 0:
        assert not (bench.prefix / "d").is_symlink()
    else:
        assert done.failure["error"] == "link"


def test_links_are_kept_as_they_are_and_not_followed(bench: Bench) -> None:
    """Where they lead to is a matter of the image; nothing of this machine's file gets into the records."""
    bench.packed(
        CondaPackage(name="e", files={"abs": File(link="/etc/hostname"), "up": File(link="../../../x")})
    )
    assert bench.run().returncode == 0
    assert str((bench.prefix / "abs").readlink()) == "/etc/hostname"
    assert str((bench.prefix / "up").readlink()) == "../../../x"
    text = (bench.prefix / "conda-meta/e-1.0-0.json").read_text()
    assert hashlib.sha256(Path("/etc/hostname").read_bytes()).hexdigest() not in text


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of this machine, which a package would like to have."""
    path = tmp_path / "packed" / "secret.txt"
    path.parent.mkdir()
    path.write_text("mine\n")
    return path


def test_a_link_that_is_told_to_be_a_file_is_refused(bench: Bench, secret: Path) -> None:
    """py-rattler would read what it leads to, to write the prefix into it."""
    for number, kind in enumerate(("hardlink", "softlink")):
        bench.lines.clear()
        link = File(link=str(secret), kind=kind, prefix="text")
        bench.packed(CondaPackage(name=f"e{number}", files={"x": link}))
        failure = bench.run().failure
        assert failure["error"] == "path"
        assert failure["packages"] == [f"e{number}-1.0-0.conda"]
        assert not bench.prefix.exists()
    link = File(link=str(secret), prefix="text")
    bench.lines.clear()
    bench.packed(CondaPackage(name="old", files={"x": link}, suffix=".tar.bz2", old=True))
    assert "link 'x'" in bench.run().failure["message"]
    assert bench.left() == set()


def test_an_empty_placeholder_is_one_too(bench: Bench, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conda_package, "PLACEHOLDER", "")
    bench.packed(CondaPackage(name="e", files={"x": File(link=str(secret), prefix="text")}))
    assert "link 'x'" in bench.run().failure["message"]


def test_a_package_may_have_rattlers_own_mark(bench: Bench) -> None:
    bench.packed(CondaPackage(name="a", files={"CACHEDIR.TAG": b"mine\n"}), CondaPackage(name="b"))
    assert bench.run().returncode == 0
    assert (bench.prefix / "CACHEDIR.TAG").read_text() == "mine\n"


def test_a_file_below_a_link_is_not_taken_from_this_machine(bench: Bench, secret: Path) -> None:
    files = {"l": File(link=str(secret.parent)), "l/secret.txt": File(absent=True)}
    bench.packed(CondaPackage(name="e", files=files))
    assert "below a link" in bench.run().failure["message"]
    assert bench.left() == set()


@pytest.mark.parametrize("warm", [False, True])
def test_a_second_list_of_paths_is_refused(bench: Bench, warm: bool) -> None:
    """The first one is read from the archive, the last one is what lies there unpacked."""
    (path,) = bench.packed(CondaPackage(name="e", files={"x": b"x"}, suffix=".tar.bz2"))
    evil = json.dumps({"paths": [{"_path": "../x", "path_type": "hardlink"}], "paths_version": 1}).encode()
    with tarfile.open(path) as old:
        members = [(entry, old.extractfile(entry)) for entry in old]
        with tarfile.open(path.with_suffix(".new"), "w:bz2") as new:
            for entry, file in members:
                new.addfile(entry, file)
            entry = tarfile.TarInfo("info/paths.json")
            entry.size = len(evil)
            new.addfile(entry, io.BytesIO(evil))
    path.with_suffix(".new").rename(path)
    bench.lines.clear()
    bench.add(path)
    for _ in range(1 + warm):
        failure = bench.run().failure
        assert failure["message"].startswith("e-1.0-0.tar.bz2 holds info/paths.json twice, or ")
    assert bench.left() == set()


def test_a_changed_list_in_the_cache_is_refused_once(bench: Bench) -> None:
    bench.packed(CondaPackage(name="a", files={"x": b"x"}))
    assert bench.run().returncode == 0
    bench.prefix = bench.folder / "again"
    (bench.cache / "a-1.0-0/info/paths.json").write_text('{"paths": [], "paths_version": 1}')
    assert "has changed since" in bench.run().failure["message"]
    assert bench.run().returncode == 0
    assert (bench.prefix / "x").read_text() == "x"


@pytest.mark.parametrize("of", ["another", "itself", "folder", "script"])
def test_an_entry_point_is_not_written_through_what_lies_there(bench: Bench, secret: Path, of: str) -> None:
    link = File(link=str(secret))
    at = {"script": "python-scripts/tool", "folder": "bin"}.get(of, "bin/tool")
    noarch: dict[str, Any] = {"name": "e", "noarch": "python", "entry_points": ("tool = e:main",)}
    python = CondaPackage(name="python", version="3.11.0", files={"bin/python3.11": b"x"})
    if of == "folder":
        python = replace(python, files={})
    if of in ("another", "folder"):
        bench.packed(python, CondaPackage(name="a", files={at: link}), CondaPackage(**noarch))
    else:
        bench.packed(python, CondaPackage(**noarch, files={at: link}))
    failure = bench.run().failure
    assert failure["error"] == "path"
    assert "bin/tool is an entry point of e" in failure["message"]
    assert secret.read_text() == "mine\n"


def test_two_packages_may_have_the_same_entry_point(bench: Bench) -> None:
    python = CondaPackage(name="python", version="3.11.0", files={"bin/python3.11": b"x"})
    one, other = (
        CondaPackage(name=name, noarch="python", entry_points=(text,))
        for name, text in (("a", "tool = a:main"), ("b", "tool=a:main"))
    )
    bench.packed(python, one, other)
    assert bench.run().returncode == 0
    bench.prefix = bench.folder / "other"
    bench.packed(CondaPackage(name="c", noarch="python", entry_points=("tool = c:main",)))
    assert bench.run().failure["packages"] == ["c", "a"]


def test_everybody_may_read_and_only_root_write(bench: Bench) -> None:
    modes = {"suid": 0o4755, "open": 0o666, "closed": 0o600, "mine": 0o700, "shut": 0o200}
    files = {name: File(data=b"x", mode=mode) for name, mode in modes.items()}
    bench.packed(CondaPackage(name="a", files=files))
    assert bench.run().returncode == 0
    found = {name: oct((bench.prefix / name).lstat().st_mode & 0o7777) for name in modes}
    wanted = {"suid": "0o755", "open": "0o644", "closed": "0o644", "mine": "0o755", "shut": "0o644"}
    assert found == wanted


def test_a_prefix_that_is_not_empty_is_left_alone(bench: Bench) -> None:
    bench.packed(CondaPackage(name="a"))
    bench.prefix.mkdir()
    (bench.prefix / "mine").write_text("x")
    assert bench.fetch().failure["error"] == "prefix"
    assert [path.name for path in bench.prefix.iterdir()] == ["mine"]


# --- fetching ------------------------------------------------------------------------------------


@dataclass
class Site:
    """A server of one folder: faults by file name, credentials it wants, what it was asked."""

    folder: Path
    faults: dict[str, list[str]] = field(default_factory=dict)
    wants: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)  # what "hold" waits for
    address: str = ""
    redirect: str = ""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(folder=tmp_path / "packed")

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            login, reach = self.headers.get("Authorization", ""), self.headers.get("Range", "")
            found.asked.append((self.path, login, reach))
            name = self.path.rpartition("/")[2]
            fault = (found.faults.get(name) or [""]).pop(0)
            if found.redirect and self.headers["Host"] not in found.redirect:
                self.send_response(302)
                self.send_header("Location", found.redirect + self.path)
                self.end_headers()
                return
            if found.wants and login != found.wants:
                self.send_error(401)
                return
            if fault.isdigit():
                self.send_error(int(fault))
                return
            inside = self.path.removeprefix("/t/secret").lstrip("/")
            file = found.folder / inside
            if not file.is_file():
                self.send_error(404)
                return
            data, start = file.read_bytes(), 0
            if reach:
                start = int(reach.removeprefix("bytes=").removesuffix("-"))
                self.send_response(206)
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if fault == "hold":
                found.go_on.wait()
            self.wfile.write(data[start : len(data) // 2 if fault == "cut" else None])

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        found.address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield found
        found.go_on.set()
        server.shutdown()


def test_a_torn_download_is_begun_again(bench: Bench, site: Site) -> None:
    (path,) = bench.packed(CondaPackage(name="a", files={"x": os.urandom(100_000)}))
    bench.mirrors[ADDRESS] = site.address
    site.faults[path.name] = ["cut", "503"]
    assert bench.fetch().returncode == 0
    assert len(site.asked) == 3


def test_docker_and_the_assemble_engine_link_alike(bench: Bench, made: MadeChannel, site: Site) -> None:
    bench.made(made, "claims-b", "claims-a", "tinyprefix")
    site.folder, bench.mirrors[ADDRESS] = made.folder, site.address
    assert bench.fetch().returncode == 0
    fetched = tree(bench.prefix)
    shutil.rmtree(bench.prefix)
    assert bench.run(shown=str(bench.prefix)).returncode == 0
    assert tree(bench.prefix) == fetched


def test_the_longest_mirror_wins(bench: Bench, site: Site) -> None:
    bench.packed(CondaPackage(name="a"))
    bench.mirrors = {ADDRESS.rpartition("/")[0]: "http://127.0.0.1:9", ADDRESS: site.address}
    assert bench.fetch().returncode == 0


def test_a_harmed_package_is_refused_by_its_hash(bench: Bench, site: Site) -> None:
    (path,) = bench.packed(CondaPackage(name="a"))
    path.write_bytes(path.read_bytes() + b"x")
    bench.mirrors[ADDRESS] = site.address
    assert bench.fetch().failure["error"] == "hash"
    assert bench.left() == set()


def test_a_package_that_is_gone_is_said_at_once_without_the_mirrors_address(bench: Bench, site: Site) -> None:
    (path,) = bench.packed(CondaPackage(name="a"))
    path.unlink()
    bench.mirrors[ADDRESS] = site.address.replace("http://", "http://me:secret@")
    failure = bench.fetch().failure
    assert failure["message"] == f"{ADDRESS}/linux-64/a-1.0-0.conda: HTTP status client error (404 Not Found)"
    assert len(site.asked) == 1
    assert site.asked[0][1] == "Basic " + base64.b64encode(b"me:secret").decode()


@pytest.mark.parametrize(
    ("credential", "login", "path"),
    [
        ({"BearerToken": "abc"}, "Bearer abc", "/linux-64/"),
        ({"BasicHTTP": {"username": "u", "password": "p"}}, "Basic dTpw", "/linux-64/"),
        ({"CondaToken": "secret"}, "", "/t/secret/linux-64/"),
    ],
)
def test_credentials_as_rattler_writes_them(
    bench: Bench, site: Site, credential: Mapping[str, Any], login: str, path: str
) -> None:
    bench.packed(CondaPackage(name="a"))
    bench.mirrors[ADDRESS], bench.auth["127.0.0.1"], site.wants = site.address, credential, login
    done = bench.fetch()
    assert done.returncode == 0, done
    assert site.asked == [(f"{path}a-1.0-0.conda", login, "")]
    assert "secret" not in (bench.prefix / "conda-meta/a-1.0-0.json").read_text()


def test_credentials_do_not_follow_a_redirect(bench: Bench, site: Site, tmp_path: Path) -> None:
    bench.packed(CondaPackage(name="a"))
    bench.mirrors[ADDRESS], bench.auth["127.0.0.1"] = site.address, {"BearerToken": "abc"}
    site.redirect = site.address.replace("127.0.0.1", "localhost")
    assert bench.fetch().returncode == 0
    assert [login for _, login, _ in site.asked] == ["Bearer abc", ""]


def test_killed_while_fetching_and_run_again(bench: Bench, site: Site) -> None:
    (path,) = bench.packed(CondaPackage(name="a"))
    bench.mirrors[ADDRESS] = site.address
    site.faults[path.name] = ["hold"]
    with child(bench.command()) as process:
        wait_for(lambda: site.asked, "the server is asked")
        process.kill()
        assert process.wait(timeout=LIMIT) == -signal.SIGKILL
    assert not bench.prefix.exists()
    assert bench.fetch().returncode == 0
    assert (bench.prefix / "conda-meta/a-1.0-0.json").exists()
