"""One wheel becomes tar entries: what pip would install, in one order, with fixed owners and times."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import re
import stat
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from imagefactory.build.layers import BaseCompiler
from imagefactory.build.wheel_layer import (
    SHORT_TEXT,
    TEXT,
    BytecodeCompiler,
    InstalledFile,
    InstallPrefix,
    lay_wheel,
)
from imagefactory.errors import BuildError
from imagefactory.oci.layers import END_OF_ARCHIVE, SPLICE, TarSegment, codec
from tests.made.errors import fails
from tests.made.wheels import add_nested, add_packed, locked, make_wheel

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PLACE = InstallPrefix(prefix="/opt/env", python=PYTHON)
SITE = f"opt/env/lib/python{PYTHON}/site-packages"


@pytest.fixture
def compiler() -> Iterator[BaseCompiler]:
    """The real server, in this Python instead of a base's."""

    def start(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            (sys.executable, *argv[1:]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0"},
        )

    made = BaseCompiler(start, PYTHON)
    yield made
    made.close()


class Sink:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def lay(
    path: Path, compiler: BaseCompiler, tmp_path: Path, name: str = "zstd"
) -> tuple[tarfile.TarFile, tuple[InstalledFile, ...], str]:
    sink, plain = Sink(), hashlib.sha256()
    segment = TarSegment(codec(name), sink, plain, epoch=1)
    with compiler.wheel() as open_compiler:
        laid = lay_wheel(
            path, PLACE, segment, open_compiler, sha256=locked(path).sha256, report=lambda _: None
        )
    segment.raw(END_OF_ARCHIVE)
    segment.close()
    layer = tmp_path / "layer"
    layer.write_bytes(sink.data)
    archive = tarfile.TarFile(fileobj=io.BytesIO(b"".join(codec(name).decompress(layer))))
    return archive, laid, plain.hexdigest()


FILES = {
    "demo/__init__.py": b"NAME = 'demo'\n",
    "demo/broken.py": b"def (:\n",
    "demo/tests/test_demo.py": b"assert True\n",
    "demo/data.bin": bytes(range(256)) * 9000,
    "demo-1.0.data/scripts/tool": b"#!python\nprint('tool')\n",
    "demo-1.0.data/data/share/demo/readme.txt": b"hello\n",
    "demo-1.0.data/headers/demo.h": b"#define DEMO 1\n",
    "demo-1.0.dist-info/entry_points.txt": b"[console_scripts]\ndemo-run = demo:main\n",
}


def test_everything_lands_where_pip_would_put_it(compiler: BaseCompiler, tmp_path: Path) -> None:
    archive, laid, _ = lay(make_wheel(tmp_path, "demo", FILES), compiler, tmp_path)
    names = {m.name for m in archive.getmembers() if m.isfile()}
    tag = f"cpython-{PYTHON.replace('.', '')}"
    assert names == {
        f"{SITE}/demo/__init__.py",
        f"{SITE}/demo/broken.py",
        f"{SITE}/demo/tests/test_demo.py",
        f"{SITE}/demo/data.bin",
        f"{SITE}/demo/__pycache__/__init__.{tag}.pyc",
        f"{SITE}/demo-1.0.dist-info/RECORD",
        f"{SITE}/demo-1.0.dist-info/INSTALLER",
        f"{SITE}/demo-1.0.dist-info/WHEEL",
        f"{SITE}/demo-1.0.dist-info/METADATA",
        f"{SITE}/demo-1.0.dist-info/entry_points.txt",
        "opt/env/bin/tool",
        "opt/env/bin/demo-run",
        "opt/env/share/demo/readme.txt",
        f"opt/env/include/site/python{PYTHON}/demo/demo.h",
    }
    assert {file.path for file in laid} == {name for name in names if not name.endswith(".pyc")}
    assert archive.getmember("opt/env/bin/tool").mode == 0o755
    assert _text(archive, "opt/env/bin/tool").startswith("#!/opt/env/bin/python\n")
    assert _text(archive, "opt/env/bin/demo-run").startswith("#!/opt/env/bin/python\n")
    record = _text(archive, f"{SITE}/demo-1.0.dist-info/RECORD")
    assert "../../../bin/tool,sha256=" in record
    assert "../../../share/demo/readme.txt,sha256=" in record


def _bytes(archive: tarfile.TarFile, name: str) -> bytes:
    handle = archive.extractfile(name)
    assert handle is not None
    return handle.read()


def _text(archive: tarfile.TarFile, name: str) -> str:
    return _bytes(archive, name).decode()


def test_the_installed_wheel_works(compiler: BaseCompiler, tmp_path: Path) -> None:
    """Unpacked and imported by a Python that may not write: the unchecked .pyc is what it takes."""
    archive, _, _ = lay(make_wheel(tmp_path, "demo", FILES), compiler, tmp_path)
    archive.extractall(tmp_path / "root")
    site = tmp_path / "root" / SITE
    (site / "demo" / "__init__.py").write_text("NAME = 'changed: unchecked byte code is not looked behind'\n")
    code = "import demo, importlib.metadata as m; print(demo.NAME, m.version('demo'), len(m.files('demo')))"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert done.stdout == "demo 1.0 13\n", done.stderr


def test_the_order_of_the_zip_does_not_matter(compiler: BaseCompiler, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    digests = set()
    for folder, order in zip(folders, (1, -1), strict=True):
        folder.mkdir()
        digests.add(lay(make_wheel(folder, "demo", FILES, order=order), compiler, folder)[2])
        # RECORD's rows are sorted anew, so only the order of entries could differ.
    assert len(digests) == 1


def test_byte_code_does_not_depend_on_what_was_compiled_before(
    compiler: BaseCompiler, tmp_path: Path
) -> None:
    """A frozenset or an interned name shared with an earlier file changes the bytes marshal writes."""
    source = b"".join(b"def %c(x):\n    return x in {'alpha', 'beta', 'a b'}\n" % name for name in b"fg")
    other = b"KEEP = ('alpha', 'a b', frozenset({'alpha'}))\nX = {'alpha', 'beta', 'a b'} \n" * 20
    demo = make_wheel(tmp_path, "demo", {"demo.py": source})
    first = lay(demo, compiler, tmp_path)[2]
    for number in range(3):
        lay(make_wheel(tmp_path, f"other{number}", {"other.py": other}), compiler, tmp_path)
    assert lay(demo, compiler, tmp_path)[2] == first


def test_a_shipped_pycache_is_left_out(compiler: BaseCompiler, tmp_path: Path) -> None:
    files = {"demo/__pycache__/evil.cpython-311.pyc": b"evil", "demo/a.py": b""}
    archive, _, _ = lay(make_wheel(tmp_path, "demo", files), compiler, tmp_path)
    assert not [name for name in archive.getnames() if "evil" in name]


@pytest.mark.parametrize(
    ("path", "mode", "message"),
    [
        ("/etc/passwd", 0, "not a path inside"),
        ("demo/../../../../etc/passwd", 0, "not a path inside"),
        ("demo\\..\\x", 0, "not a path inside"),
        ("./demo/x", 0, "not a path inside"),
        ("demo/a\x0cb", 0, "not a path inside"),
        ("demo/.wh.a.py", 0, r"'demo/\.wh\.a\.py'|/\.wh\.a\.py'"),
        ("demo/link", stat.S_IFLNK | 0o777, "a link or a device"),
        ("demo/pipe", stat.S_IFIFO | 0o644, "a link or a device"),
        ("demo/root", stat.S_IFREG | 0o4755, "setuid"),
        ("demo-1.0.data/elsewhere/x", 0, "'demo-1.0.data/elsewhere/x'"),
    ],
)
def test_what_no_wheel_may_hold_is_refused_by_name(
    compiler: BaseCompiler, tmp_path: Path, path: str, mode: int, message: str
) -> None:
    wheel = make_wheel(tmp_path, "demo", {path: b"x"}, modes={path: mode} if mode else {})
    with fails("wheel-invalid", message) as caught:
        lay(wheel, compiler, tmp_path)
    assert caught.value.message.startswith("demo-1.0-py3-none-any.whl: ")


# What stands where in a member's own header.
FLAGS, METHOD, CRC, PACKED, SIZE, NAME = 6, 8, 14, 18, 22, 30


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (NAME, "'demo/d.bin' has the name 'eemo/d.bin'"),
        (METHOD, "'demo/d.bin' has the method '9'"),
        (CRC, "'demo/d.bin' has the CRC"),
        (PACKED, "'demo/d.bin' has the packed size"),
        (SIZE, "'demo/d.bin' has the size '4097' in its own header, '4096' in the list"),
        (FLAGS, "'demo/d.bin' is encrypted"),
    ],
)
def test_a_header_that_differs_from_the_list_is_refused(
    compiler: BaseCompiler, tmp_path: Path, at: int, message: str
) -> None:
    wheel = make_wheel(tmp_path, "demo", {"demo/d.bin": bytes(4096)})
    data = bytearray(wheel.read_bytes())
    place = data.index(b"demo/d.bin") - NAME + at
    data[place] ^= 1
    wheel.write_bytes(data)
    with fails("wheel-invalid", re.escape(message)):
        lay(wheel, compiler, tmp_path)


def test_a_name_with_a_nul_is_refused(compiler: BaseCompiler, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "demo", {"demo/d.py?": b"x"})
    wheel.write_bytes(wheel.read_bytes().replace(b"demo/d.py?", b"demo/d.py\0"))
    with fails("wheel-invalid", r"'demo/d\.py\\x00'"):
        lay(wheel, compiler, tmp_path)


def test_members_that_overlap_are_refused(compiler: BaseCompiler, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "demo", FILES)
    add_nested(wheel)
    with fails("wheel-invalid", "'outer'"):
        lay(wheel, compiler, tmp_path)


def test_a_wheel_whose_beginning_is_lost_is_refused(compiler: BaseCompiler, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "demo", FILES)
    wheel.write_bytes(wheel.read_bytes()[50:])
    with fails("wheel-invalid"):
        lay(wheel, compiler, tmp_path)


class Unseekable(io.BytesIO):
    """Makes zipfile write sizes behind the members."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise OSError(offset, whence)

    def tell(self) -> int:
        raise OSError


@pytest.mark.parametrize("stream", [io.BytesIO, Unseekable], ids=["zip64", "sizes behind"])
def test_other_headers_of_real_wheels_are_read(
    compiler: BaseCompiler, tmp_path: Path, stream: type[io.BytesIO]
) -> None:
    wheel = make_wheel(tmp_path, "demo", {**FILES, "demo/\u00e9.txt": b"name in UTF-8"})
    wanted = lay(wheel, compiler, tmp_path)[2]
    written = stream()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            copied = zipfile.ZipInfo(info.filename)
            copied.external_attr, copied.compress_type = info.external_attr, info.compress_type
            with new.open(copied, "w", force_zip64=True) as member:
                member.write(old.read(info))
    wheel.write_bytes(written.getvalue())
    assert lay(wheel, compiler, tmp_path)[2] == wanted


LARGE = bytes(TEXT + 1)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < len(LARGE) // 4
    finally:
        tracemalloc.stop()


def bomb(folder: Path, path: str, data: bytes = LARGE) -> Path:
    """A wheel of a few hundred kB with a large file that its RECORD does not name."""
    wheel = make_wheel(folder, "demo", FILES)
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(path, data)
    return wheel


@pytest.mark.parametrize(
    ("path", "target"),
    [("demo-1.0.data/scripts/program", "opt/env/bin/program"), ("demo/d.bin", f"{SITE}/demo/d.bin")],
)
def test_a_large_file_is_not_held_in_memory(
    compiler: BaseCompiler, tmp_path: Path, path: str, target: str
) -> None:
    wheel, plain = bomb(tmp_path, path), hashlib.sha256()
    segment = TarSegment(codec("zstd"), Sink(), plain, epoch=1)
    with little_memory(), compiler.wheel() as opened:
        laid = lay_wheel(wheel, PLACE, segment, opened, sha256=locked(wheel).sha256, report=lambda _: None)
    digest = base64.urlsafe_b64encode(hashlib.sha256(LARGE).digest()).rstrip(b"=").decode()
    assert InstalledFile(path=target, content=f"sha256={digest}") in laid


@pytest.mark.parametrize(
    ("path", "data", "most"),
    [
        ("demo-1.0.data/scripts/tool.py", b"#!python" + LARGE, TEXT),
        ("demo-1.0.dist-info/entry_points.txt", bytes(SHORT_TEXT + 1), SHORT_TEXT),
        ("demo/large.py", LARGE, TEXT),
    ],
)
def test_code_or_text_that_is_large_is_refused(
    compiler: BaseCompiler, tmp_path: Path, path: str, data: bytes, most: int
) -> None:
    # Its RECORD names it: Python files that it does not name are not compiled.
    wheel = make_wheel(tmp_path, "demo", {path: data})
    with (
        little_memory(),
        fails("wheel-too-large", rf"{path} .*{len(data):,} .*{most:,}"),
    ):
        lay(wheel, compiler, tmp_path)


def test_a_text_that_is_larger_than_it_says_is_refused(compiler: BaseCompiler, tmp_path: Path) -> None:
    path = "demo-1.0.dist-info/entry_points.txt"
    wheel = make_wheel(tmp_path, "demo", {path: LARGE})
    size = struct.pack("<I", len(LARGE))
    data = wheel.read_bytes()
    assert data.count(size) == 2
    wheel.write_bytes(data.replace(size, struct.pack("<I", 10)))
    with little_memory(), fails("wheel-invalid", path):
        lay(wheel, compiler, tmp_path)


def test_an_endless_list_of_members_is_refused(
    compiler: BaseCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagefactory.scan.zip.MEMBERS", 3)
    with fails("wheel-invalid", "11 members"):
        lay(make_wheel(tmp_path, "demo", FILES), compiler, tmp_path)


@pytest.mark.parametrize(
    ("entry_points", "named"),
    [
        ("../../../etc/profile.d/x = demo:main", "etc/profile.d/x'"),
        ("a\tb = demo:main", "a\\tb'"),
        ("tool = demo", "entry_points.txt, line 2"),
        ("[broken", "entry_points.txt"),
    ],
)
def test_entry_points_cannot_name_what_they_like(
    compiler: BaseCompiler, tmp_path: Path, entry_points: str, named: str
) -> None:
    text = f"[console_scripts]\n{entry_points}\n".encode()
    wheel = make_wheel(tmp_path, "demo", {"demo-1.0.dist-info/entry_points.txt": text})
    with fails("wheel-invalid", message=named):
        lay(wheel, compiler, tmp_path)


RECORD, INFO = "demo-1.0.dist-info/RECORD", "demo-1.0.dist-info/WHEEL"
POINTS = "demo-1.0.dist-info/entry_points.txt"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (POINTS, "[console_scripts]\nok = a:b\np = मॉड्यूल:main\n", f"{POINTS}, line 3: "),
        (POINTS, "[gui_scripts]\np = module\n", f"{POINTS}, line 2: "),
        (POINTS, b"[console_scripts]\np\xfc = a:b\n", f"{POINTS}, line 2: not UTF-8 text"),
        (POINTS, "p = a:b\n", "entry_points.txt, line: 1"),
        (POINTS, "\ufeff[console_scripts]\np = a:b\n", "entry_points.txt, line: 1"),
        (POINTS, "[console_scripts]\na = a:b\na = a:b\n", "entry_points.txt [line 3]"),
        (POINTS, "[DEFAULT]\nq = 1\n[console_scripts]\na = a:b\n", f"{POINTS}: "),
        (POINTS, "[console_scripts]\na = a:b\n  c d\n", f"{POINTS}: "),
        (RECORD, "demo/__init__.py,sha256=aa\n", f"{RECORD}: Row Index 0: "),
        (RECORD, "demo/__init__.py,sha256,3\n", "RECORD, demo/__init__.py: "),
        (RECORD, None, f"the wheel has no {RECORD}"),
        (POINTS, "[console_scripts]\na = a:\n", f"{POINTS}, line 2: "),
        (RECORD, "demo/__init__.py,sha256=aa,3,x,y,z\n", "got 6"),
        (INFO, None, f"the wheel has no {INFO}"),
        (INFO, "Wheel-Version: 9.0\n", "Wheel-Version 9.0"),
        ("demo-1.0.data/scripts", "x", "'demo-1.0.data/scripts'"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_told_with_its_member(
    compiler: BaseCompiler, tmp_path: Path, name: str, data: bytes | str | None, said: str
) -> None:
    wheel = make_wheel(tmp_path, "demo", FILES)
    with zipfile.ZipFile(wheel) as archive:
        files = {one: archive.read(one) for one in archive.namelist()} | {name: data}
    with zipfile.ZipFile(wheel, "w") as archive:
        for one, text in files.items():
            if text is not None:
                archive.writestr(one, text)
    with fails("wheel-invalid") as raised:
        lay(wheel, compiler, tmp_path)
    assert raised.value.message.startswith(f"{wheel.name}: ")
    assert said in raised.value.message
    assert "object at" not in raised.value.message


def test_a_wheel_that_could_not_be_unpacked_is_named(compiler: BaseCompiler, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "demo", {f"demo/{'a' * 300}": b""})
    with pytest.raises(BuildError, match=rf"^demo-1\.0.*\.whl: '{SITE}/demo/aaa.* 300 bytes"):
        lay(wheel, compiler, tmp_path)


NOISE = random.Random(1).randbytes(2 * SPLICE)


def test_gzip_takes_large_files_as_the_wheel_has_them(compiler: BaseCompiler, tmp_path: Path) -> None:
    names = ("demo/a.so", "demo-1.0.data/scripts/program")  # RECORD knows the first; pip moves the second
    packed = [zlib.compress(NOISE + name.encode(), 9, -zlib.MAX_WBITS) for name in names]
    wheel = make_wheel(tmp_path, "demo", FILES)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("demo/stored.so", NOISE)
    for name, data in zip(names, packed, strict=True):
        add_packed(wheel, name, data, NOISE + name.encode())
    archive, _, wanted = lay(wheel, compiler, tmp_path)
    spliced, _, found = lay(wheel, compiler, tmp_path, "gzip")
    assert found == wanted
    layer = (tmp_path / "layer").read_bytes()
    assert all(layer.count(b"\xff" + data) == 1 for data in packed)
    for name in (f"{SITE}/demo/a.so", "opt/env/bin/program", f"{SITE}/demo/stored.so"):
        assert _bytes(spliced, name) == _bytes(archive, name)


@pytest.mark.parametrize("name", ["zstd", "gzip"])
@pytest.mark.parametrize(
    ("behind", "plain", "word"),
    [
        (b"\0", NOISE, "more data"),
        (bytes(1 << 20), NOISE, "more data"),
        (b"", NOISE[:-1] + b"\0", "CRC"),
        (b"", NOISE + b"\0", "CRC"),
        (b"", NOISE[:-1], "larger"),
    ],
    ids=["a byte more", "much more", "another CRC", "shorter", "longer"],
)
def test_a_member_that_is_not_what_the_list_says_is_refused(
    compiler: BaseCompiler, tmp_path: Path, name: str, behind: bytes, plain: bytes, word: str
) -> None:
    wheel = make_wheel(tmp_path, "demo", FILES)
    add_packed(wheel, "demo/a.so", zlib.compress(NOISE, 9, -zlib.MAX_WBITS) + behind, plain)
    with fails("wheel-invalid", rf"^demo-1\.0.*{word}"):
        lay(wheel, compiler, tmp_path, name)


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_damaged_wheel_is_an_error_that_names_it(compiler: BaseCompiler, tmp_path: Path, at: float) -> None:
    wheel = make_wheel(tmp_path, "demo", {"demo/data.py": bytes(range(256)) * 4000})
    data = bytearray(wheel.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    wheel.write_bytes(data)
    with pytest.raises(BuildError, match=r"^demo-1\.0"):
        lay(wheel, compiler, tmp_path)


def test_a_truncated_wheel_is_an_error_that_names_it(compiler: BaseCompiler, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "demo", FILES)
    wheel.write_bytes(wheel.read_bytes()[:-40])
    with fails("wheel-invalid", r"^demo-1\.0"):
        lay(wheel, compiler, tmp_path)


def test_a_base_of_another_python_is_refused() -> None:
    def start(_: tuple[str, ...]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["printf", "%-16s", "cpython-27"], stdin=-1, stdout=-1)

    compiler = BaseCompiler(start, "3.11")
    with pytest.raises(BuildError, match="cpython-27") as caught, compiler.wheel():
        pass
    assert caught.value.code == "base-python-mismatch"
    compiler.close()


def test_a_compiler_that_dies_is_an_error(tmp_path: Path) -> None:
    def start(_: tuple[str, ...]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["printf", "%-16s", f"cpython-{PYTHON.replace('.', '')}"], stdin=-1, stdout=-1
        )

    dying: BytecodeCompiler = BaseCompiler(start, PYTHON)
    with fails("bytecode-failed"):
        dying.compile("/x.py", b"")


def test_after_a_bad_wheel_the_next_one_compiles(compiler: BaseCompiler, tmp_path: Path) -> None:
    good = make_wheel(tmp_path, "demo", FILES)
    wanted = lay(good, compiler, tmp_path)[2]
    bad = make_wheel(tmp_path, "bad", {"bad/a.py": b"A = 1\n", "bad/z": b"x"}, modes={"bad/z": 0o4755})
    with fails("wheel-invalid", "'bad/z'"):
        lay(bad, compiler, tmp_path)
    assert lay(good, compiler, tmp_path)[2] == wanted


def test_every_byte_of_a_wheel_is_reported_at_most_twice(compiler: BaseCompiler, tmp_path: Path) -> None:
    """Progress counts what is read; .py files are read once more to be compiled."""
    wheel, seen = make_wheel(tmp_path, "demo", {"demo/d.bin": bytes(10_000_000)}), []
    segment = TarSegment(codec("zstd"), Sink(), hashlib.sha256(), epoch=1)
    with compiler.wheel() as open_compiler:
        lay_wheel(wheel, PLACE, segment, open_compiler, sha256=locked(wheel).sha256, report=seen.append)
    assert 0.8 * wheel.stat().st_size < sum(seen) <= wheel.stat().st_size
