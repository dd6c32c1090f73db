"""The source of a package: what it says it is built with, and what of its folder is copied."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.lock.pypi import sources
from imagefactory.lock.pypi.sources import DEFAULT_REQUIRES, copy_source, leads_out, read_project
from tests.made.errors import fails

PYPROJECT = '[build-system]\nrequires = ["setuptools>=61", "numpy ; python_version < \'3.13\'"]\n'
NAMED = '[project]\nname = "My_Ops"\n'


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
    assert read_project(made).requires == ("setuptools>=61", 'numpy; python_version < "3.13"')
    assert read_project(archive(tmp_path, kind, **{"setup.py": "x"})).requires == DEFAULT_REQUIRES


def test_a_source_with_hundreds_of_dependencies(tmp_path: Path) -> None:
    """apache-beam has 230 with those of its extras."""
    lines = "".join(f"Requires-Dist: a{one}; extra == 'all'\n" for one in range(500))
    info = f"Metadata-Version: 2.2\nName: my-ops\nVersion: 1.0\n{lines}"
    found = read_project(archive(tmp_path, "tar.gz", **{"setup.py": "x", "PKG-INFO": info}))
    assert len(found.dependencies or ()) == 500


def test_what_a_folder_is_built_with(tmp_path: Path) -> None:
    with fails("package-source-invalid", message="neither pyproject.toml nor setup.py"):
        read_project(tmp_path)
    (tmp_path / "setup.py").write_text("x")
    assert read_project(tmp_path).requires == DEFAULT_REQUIRES
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    assert read_project(tmp_path).requires[0] == "setuptools>=61"


@pytest.mark.parametrize(
    "text",
    [
        "[build-system",
        "build-system = 3",
        "[build-system]\nrequires = ['a b c']",
        "[build-system]\nrequires = ['a @ file:///etc']",
        f"[build-system]\nrequires = {['a'] * 1000}",
        "[project]\nname = '../a'",
        "project = 3",
        "a = " + "[" * 50_000,
        "#" * (sources.TEXT + 1),
    ],
)
def test_a_pyproject_that_is_none_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with fails("package-source-invalid"):
        read_project(tmp_path)


def test_a_file_that_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "ops.tar.gz").write_text("no archive")
    with fails("package-source-invalid", message="ops.tar.gz"):
        read_project(tmp_path / "ops.tar.gz")


# --- archives that are made to be read ---------------------------------------------------------------


def packed(folder: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    path = folder / "ops-1.0.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def of_type(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    return info


def bomb(folder: Path) -> Path:
    """A header of many gigabytes of zeros, which pack into a few kilobytes for each megabyte."""
    info = tarfile.TarInfo("ops-1.0/data")
    info.size = 1 << 40
    path = folder / "ops-1.0.tar.gz"
    with gzip.open(path, "wb") as out:
        out.write(info.tobuf())
        for _ in range(70):
            out.write(bytes(1 << 20))
    return path


def large_text(folder: Path) -> Path:
    return packed(folder, [(tarfile.TarInfo("ops-1.0/pyproject.toml"), b"#" * (sources.TEXT + 1))])


def large_text_in_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ops-1.0.zip", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("ops-1.0/pyproject.toml", b"#" * (100 << 20))
    return folder / "ops-1.0.zip"


def large_header(folder: Path) -> Path:
    info = tarfile.TarInfo("ops-1.0/a")
    info.pax_headers = {"comment": "c" * (2 << 20)}
    return packed(folder, [(info, b"")])


def sparse(folder: Path) -> Path:
    return packed(folder, [(of_type("ops-1.0/a", tarfile.GNUTYPE_SPARSE), b"")])


def cut(folder: Path) -> Path:
    path = large_text(folder)
    path.write_bytes(path.read_bytes()[:-20])
    return path


def many(folder: Path) -> Path:
    return packed(folder, [(tarfile.TarInfo(f"ops-1.0/{number}"), b"") for number in range(30)])


@pytest.mark.parametrize("make", [bomb, large_text, large_text_in_zip, large_header, sparse, cut, many])
def test_an_archive_is_read_to_its_limits(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MEMBERS", 20)
    with fails("package-source-invalid"):
        read_project(make(tmp_path))


def test_a_project_names_itself(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.toml").write_text(NAMED)
    (tmp_path / "pyproject.toml").symlink_to("sub/mine.toml")
    assert read_project(tmp_path).name == "my-ops"


# --- copying a folder --------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("ops/src/build", "ops/.git", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret" / "key").write_text("private")
    (tmp_path / "ops" / ".git" / "config").symlink_to("/etc/passwd")
    (tmp_path / "ops" / "src" / "a.py").write_text("a")
    (tmp_path / "ops" / "run.sh").write_text("b")
    (tmp_path / "ops" / "run.sh").chmod(0o4755)
    (tmp_path / "ops" / "same.py").symlink_to("src/../src/a.py")
    return tmp_path / "ops"


def test_a_copy_has_the_files_and_links_of_the_source(package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    content = copy_source(package, copy, 100)
    found = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*"))
    assert found == ["run.sh", "same.py", "src", "src/a.py"]
    assert os.readlink(copy / "same.py") == "src/../src/a.py"  # noqa: PTH115 - as it is
    assert (copy / "run.sh").stat().st_mode & 0o7777 == 0o755
    assert (copy / "src/a.py").stat().st_mtime_ns == (package / "src/a.py").stat().st_mtime_ns
    assert copy_source(package, tmp_path / "again", 100) == content
    (package / "same.py").unlink()
    (package / "same.py").symlink_to("run.sh")
    assert copy_source(package, tmp_path / "other", 100) != content


def device(folder: Path) -> None:
    try:
        os.mknod(folder / "zero", 0o20644, os.makedev(1, 5))
    except PermissionError:  # an ordinary user has none
        os.mkfifo(folder / "zero")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "key").symlink_to("../secret/key"),
        lambda folder: (folder / "key").symlink_to("/dev/zero"),
        lambda folder: (folder / "key").symlink_to("src/../../secret"),
        lambda folder: ((folder / "up").symlink_to("."), (folder / "key").symlink_to("up/../secret/key")),
        lambda folder: os.mkfifo(folder / "src" / "pipe"),
        device,
        lambda folder: (folder / "large").write_bytes(bytes(101)),
        lambda folder: os.truncate(os.open(folder / "hole", os.O_CREAT | os.O_WRONLY), 1 << 40),
        lambda folder: (folder / "/".join("d" * 120)).mkdir(parents=True),
    ],
)
def test_nothing_from_outside_is_copied(
    package: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    change(package)
    with pytest.raises(UsageError):
        copy_source(package, tmp_path / "copy", 100)
    copied = (path for path in (tmp_path / "copy").rglob("*") if path.is_file())
    assert all("private" not in path.read_text() for path in copied)


def test_entries_are_counted(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TREE", sources.TREE._replace(entries=3))
    with fails("cannot-copy-file", message="3 entries"):
        copy_source(package, tmp_path / "copy", 100)


@pytest.mark.parametrize(
    ("links", "out"),
    [
        ({"a": "b"}, False),
        ({"a": "nothing/../b"}, False),
        ({"a": ".."}, True),
        ({"d/a": ".."}, False),
        ({"d/a": "../.."}, True),
        ({"a": "/b"}, True),
        ({"a": ""}, False),
        ({"a": "b/c", "b": "/etc"}, True),
        ({"a": "b/../c", "b": "d/e/f"}, False),
        ({"d/e/a": "../../b/../x", "b": "."}, True),
        ({"a": "a"}, False),
        ({"a": "b", "b": "a/.."}, False),
        ({"a": "b//./c/", "b": "c"}, False),
    ],
)
def test_where_links_lead(links: dict[str, str], out: bool) -> None:
    assert leads_out(next(iter(links)), links) is out


# --- what it says of itself --------------------------------------------------------------------------

INFO = "Metadata-Version: {version}\nName: Ops\nVersion: 1.0\n"


@pytest.mark.parametrize(
    ("contents", "dependencies"),
    [
        ({"PKG-INFO": INFO.format(version="2.2") + "Requires-Dist: numpy<2\n"}, ("numpy<2",)),
        ({"PKG-INFO": INFO.format(version="2.2")}, ()),
        ({"PKG-INFO": INFO.format(version="2.2") + "Dynamic: Requires-Dist\n"}, None),
        ({"PKG-INFO": INFO.format(version="1.2")}, None),
        ({"pyproject.toml": NAMED + 'version = "1.0"\ndependencies = ["numpy<2"]\n'}, ("numpy<2",)),
        ({"pyproject.toml": NAMED + 'dynamic = ["dependencies"]\n'}, None),
        (
            {
                "PKG-INFO": INFO.format(version="1.2"),
                "src__ops.egg-info__PKG-INFO": INFO.format(version="1.2"),
                "src__ops.egg-info__requires.txt": (
                    "numpy\n\n[:python_version < '3.8']\ntyping\n\n[gpu]\ncupy; sys_platform == 'linux'\n"
                ),
            },
            (
                "numpy",
                "typing; (python_version < '3.8')",
                "cupy; (sys_platform == 'linux') and extra == \"gpu\"",
            ),
        ),
        ({"ops.egg-info__PKG-INFO": INFO.format(version="1.2"), "setup.py": "setup()"}, ()),
        ({"setup.cfg": "[metadata]\nname = ops\n[options]\ninstall_requires =\n  numpy\n"}, ("numpy",)),
        ({"setup.py": "setup(install_requires=open('r').read())"}, None),
    ],
)
def test_what_it_requires_is_read_and_never_run(
    tmp_path: Path, contents: dict[str, str], dependencies: tuple[str, ...] | None
) -> None:
    assert read_project(archive(tmp_path, "tar.gz", **contents)).dependencies == dependencies


def test_its_version_python_and_languages(tmp_path: Path) -> None:
    texts = {
        "PKG-INFO": INFO.format(version="2.1") + "Requires-Python: >=3.9\n",
        "setup.py": "try:\n    import torch\nexcept ImportError: pass\nfrom numpy import get_include\n",
        "csrc__ops.cu": "kernel",
        "csrc__ops.cpp": "host",
    }
    for kind in ("tar.gz", "zip"):
        found = read_project(archive(tmp_path, kind, **texts))
        assert (found.name, found.version, found.python) == ("ops", "1.0", ">=3.9")
        assert found.code == {"C++", "CUDA"}
        assert {"torch", "numpy"} <= found.imports


def test_a_version_that_only_a_build_knows_is_none(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = ops\nversion = attr: ops.__version__\n")
    assert (read_project(tmp_path).name, read_project(tmp_path).version) == ("ops", "")


@pytest.mark.parametrize("name", ["PKG-INFO", "setup.cfg"])
def test_metadata_that_is_none_is_told(tmp_path: Path, name: str) -> None:
    bad = {"PKG-INFO": INFO.format(version="2.2") + "Requires-Dist: a b c\n", "setup.cfg": "no section"}
    with fails("package-source-invalid"):
        read_project(archive(tmp_path, "tar.gz", **{name: bad[name]}))


def test_names_at_the_top_are_skipped_only_there(package: Path, tmp_path: Path) -> None:
    (package / "wheels").mkdir()
    (package / "src" / "wheels").mkdir()
    copy_source(package, tmp_path / "copy", 100, skipped=("wheels",))
    found = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("wheels")}
    assert found == {"src/wheels"}
