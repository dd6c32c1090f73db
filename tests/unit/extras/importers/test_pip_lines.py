"""Lines of requirements files: what is taken, what is lost, and what is only told."""

# ruff: noqa: E501 -- files of others, a line a line
from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.extras.importers.environments import (
    ReadOptions,
    parse_environment_file,
    read_environment_file,
)
from imagefactory.extras.importers.spec import EnvironmentSpec

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def read(text: str, *, file: str = "requirements.txt", **beside: str) -> EnvironmentSpec:
    files = {name.replace("__", "/").replace("_txt", ".txt"): item for name, item in beside.items()}
    return parse_environment_file(text, file, ReadOptions(pythons=("3.11",), beside=files.get, place="."))


@pytest.mark.parametrize(
    ("line", "selection"),
    [
        ("torch [opt-einsum] >= 2.0 , < 3", "torch[opt-einsum]<3,>=2.0"),
        ("numpy (>=1.20)", "numpy>=1.20"),
        ("x==2.0.0-rc1", "x==2.0.0rc1"),
        ("x==v1.0", "x==1.0"),
        ("x==1.0; python_version >= '3.8'  # why", "x==1.0"),
        ("numpy @ file:///croot/numpy_1/work/dist/numpy-1.26.4-cp311-cp311-linux_x86_64.whl#sha256=00", "numpy==1.26.4"),
        ("numpy @ file:///D:/bld/x/dist/numpy-1.26.4-cp311-cp311-win_amd64.whl", "numpy==1.26.4"),
        ("x==1.0 \\\n  --hash=sha256:aa \\\n  --hash=sha256:bb  # why", "x==1.0"),
        ("# ours \\\nx==1.0", "x==1.0"),
        ("x \\\n# between \\", "x"),
        ("num\\\npy==1.0\r", "numpy==1.0"),
        ("./wheels/lab-1.0-py3-none-any.whl", "./wheels/lab-1.0-py3-none-any.whl"),
        ("torch @ https://w.example.org/whl/cu121/torch-2.3.1%2Bcu121-cp311-cp311-linux_x86_64.whl", "torch==2.3.1"),
        ("torch==2.2.1+cu118", "torch==2.2.1"),
        ("torch-scatter==2.1.0+pt113cu117", "torch-scatter==2.1.0"),
    ],
)  # fmt: skip
def test_what_is_kept(line: str, selection: str) -> None:
    spec = read(line)
    assert (spec.pip, spec.lost) == ([selection], [])


@pytest.mark.parametrize(
    "line",
    [
        "numpy=1.26",
        "lab==1.0+lab2",
        "lab @ https://example.org/lab-1.0-py3-none-any.whl",
        "https://example.org/lab.tar.gz",
        "./lab.zip",
        "numpy @ file:///croot/numpy_1699/work",
        "idna @ file:///C:/b/abs_bdhbebrioa/croot/idna_1666125572046/work",
        "-r file:///etc/more.txt",
        "lab @ git+https://${TOKEN}@git.example.org/lab",
        "--pre",
        "h5py --no-binary h5py",
        "--extra-index-url https://pypi.example.org/simple",
        "--index-url https://packages.example.org/team/simple",
        "--find-links ./wheels",
        "-r ../../elsewhere.txt",
        "./nothing",
    ],
)
def test_what_is_lost(line: str) -> None:
    spec = read(f"{line}\n")
    assert len(spec.lost) == 1
    assert spec.lost[0].startswith("requirements.txt:1:1: ")


@pytest.mark.parametrize(
    ("line", "wheel"),
    [
        ("-f https://wheels.example.org/torch-2.3.0+cu121.html", True),
        ("--find-links=https://wheels.example.org/releases", True),
        ("--extra-index-url https://wheels.example.org/repo.html?a=b", True),
        ("--extra-index-url https://wheels.example.org/simple", False),
    ],
)
def test_a_page_of_links_is_no_index(line: str, wheel: bool) -> None:
    """What to write is another thing: settings that name a page as an index would not help."""
    spec = read(f"torch-scatter\n{line}\n")
    (lost,) = spec.lost
    assert lost.startswith("requirements.txt:2:1: ")
    assert ("./wheels/" in lost, "`index`" in lost) == (wheel, not wheel)


@pytest.mark.parametrize(
    "line",
    [
        "x; python_version < '3.8'",
        "x @ git+https://git.example.org/x ; sys_platform == 'win32'",
        "--only-binary :all:",
        "--no-build-isolation",
        "--require-hashes",
        "--extra-index-url https://w.example.org/whl/cu121",
        "-f https://w.example.org/whl/torch_stable.html",
        "-i https://pypi.example.org/simple",
    ],
)
def test_what_is_only_told(line: str) -> None:
    spec = read(line)
    assert (spec.pip, spec.lost, len(spec.notes)) == ([], [], 1)


def test_a_package_of_a_repository_is_never_written_by_a_name() -> None:
    spec = read("git+https://git.example.org/lab/CLIP.git#egg=clip\n")
    assert "write clip" not in spec.lost[0]
    assert (spec.pip, spec.sources) == ([], [])
    included = read(f"clip @ git+https://git.example.org/lab/CLIP.git@{COMMIT}\n")
    assert (included.pip, included.lost) == ([], [])
    assert included.sources == [f"git+https://git.example.org/lab/CLIP.git@{COMMIT}"]


def test_several_options_of_one_line() -> None:
    spec = read(
        "--index-url https://me:pw@w.example.org/whl/cu121 --extra-index-url https://x.example.org/a\n"
    )
    assert spec.indexes == ["https://w.example.org/whl/cu121", "https://x.example.org/a"]
    assert (len(spec.notes), len(spec.lost)) == (1, 1)
    assert "pw" not in str(spec)


def test_the_order_is_the_file_s() -> None:
    spec = read("zlib-ng\n-r more.txt\nabc\n", more_txt="torch\nnumpy\n")
    assert spec.pip == ["zlib-ng", "torch", "numpy", "abc"]


def test_python_of_a_project_narrows_the_file_s() -> None:
    files = {"setup.py": "setup(python_requires='>=3.12', install_requires=['a'])"}
    text = "dependencies: [python=3.10, pip, {pip: ['-e .']}]\n"
    spec = parse_environment_file(
        text, "environment.yml", ReadOptions(pythons=("3.11",), beside=files.get, place=".")
    )
    assert (spec.python, len(spec.lost)) == ("3.10.*", 1)
    fits = parse_environment_file(
        text.replace("3.10", "3.12"),
        "environment.yml",
        ReadOptions(pythons=("3.11",), beside=files.get, place="."),
    )
    assert (fits.python, fits.lost) == ("3.12.*", [])


# --- files on a disk -----------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_encodings_of_other_systems(tmp_path: Path, mark: bytes) -> None:
    codec = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le"}.get(mark, "utf-16-be")
    path = tmp_path / "requirements.txt"
    path.write_bytes(mark + "torch==2.5.1\r\nnumpy\r\n".encode(codec))
    assert read_environment_file(path, ReadOptions(pythons=("3.11",))).pip == ["torch==2.5.1", "numpy"]


def test_a_comment_ends_a_continued_line_as_for_pip() -> None:
    spec = read("a==1 \\\n# not this \\\nb==2\r# nor this \\\rc==3\n")
    assert (spec.pip, spec.lost) == (["a==1", "b==2", "c==3"], [])


@pytest.mark.parametrize(
    ("text", "selection", "notes"),
    [
        ("joblib==0.14.1 \\\n    --hash=sha256:06 \\\n    # via scikit-learn\nnumpy==1.18.1 \\\n    --hash=sha256:17\n",
         ["joblib==0.14.1", "numpy==1.18.1"], 0),
        ("anyio \\\n    >1.0.0\n", ["anyio>1.0.0"], 0),
        ("requests==2.25.0 \\\n# comment\n", ["requests==2.25.0"], 0),
        ("lxml==4.9.2\n  --hash sha256:7b51\n", ["lxml==4.9.2"], 1),
        ("a==1; extra != 'dev'\nb==1 ; extra == 'dev'\n", ["a==1"], 1),
        ("https://x.org/a-0.1-cp310-cp310-win_amd64.whl; platform_system == 'Windows'\na==0.1\n", ["a==0.1"], 1),
    ],
)  # fmt: skip
def test_files_of_public_reports(text: str, selection: list[str], notes: int) -> None:
    spec = read(text)
    assert (spec.pip, spec.lost, len(spec.notes)) == (selection, [], notes)


def test_files_are_named_by_file_too() -> None:
    spec = read("-r file:more.txt\n-c file:bounds.txt\n", **{"more.txt": "a==1\n", "bounds.txt": "b<2\n"})
    assert (spec.pip, spec.constraints, spec.lost) == (["a==1"], ["b<2"], [])
    spec = read(
        "-r file:my%20own.txt\n--requirement=file:./b.txt\n", **{"my own.txt": "a==1\n", "b.txt": "b\n"}
    )
    assert (spec.pip, spec.lost) == (["a==1", "b"], [])
    for outside in ("file:///srv/more.txt", "file:%2e%2e/more.txt", "file:a%00.txt", "file:/more.txt"):
        assert len(read(f"-r {outside}\n").lost) == 1


@pytest.mark.parametrize(
    ("data", "result"),
    [
        (codecs.BOM_UTF32_LE + "a==1\n".encode("utf-32-le"), ["a==1"]),
        ("# -*- coding: latin-1 -*-\n# Gr\u00fc\u00dfe\na==1\n".encode("latin-1"), ["a==1"]),
        ("#!/x\n# vim: set fileencoding=cp1252 :\n# \u20ac\na==1\n".encode("cp1252"), ["a==1"]),
        (b"# coding: punycode\na==1\n", ["a==1"]),  # none that files are written in: UTF-8
    ],
)
def test_a_file_may_say_its_encoding(tmp_path: Path, data: bytes, result: list[str]) -> None:
    path = tmp_path / "requirements.txt"
    path.write_bytes(data)
    assert read_environment_file(path, ReadOptions(pythons=("3.11",))).pip == result


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("a==1\nb==2\n".encode("utf-16-le"), "is UTF-16"),
        ("# Gr\u00fc\u00dfe\n".encode("latin-1"), "is not UTF-8"),
        (b"# coding: utf-8\n# \xff\n", "is not UTF-8"),
        (b"# coding: latin-none\na\n", "is not LATIN-NONE"),
        (b"a==1\n" * 99 + b"\0", "contains zero bytes"),
    ],
)
def test_an_encoding_that_cannot_be_read_is_named(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "requirements.txt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=named):
        read_environment_file(path, ReadOptions(pythons=("3.11",)))


def test_files_above_are_read_up_to_the_work_tree(tmp_path: Path) -> None:
    """Not beyond, by whatever way."""
    (tmp_path / "secret.txt").write_text("secret\n")
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "base file.txt").write_text("torch==2.5.1\n")
    (tmp_path / "repo" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "repo" / "gpu").mkdir()
    path = tmp_path / "repo" / "gpu" / "requirements.txt"
    path.write_text("-r '../base file.txt'\n-r ../../secret.txt\n-r ../link.txt\nnumpy\n")
    spec = read_environment_file(path, ReadOptions(pythons=("3.11",)))
    assert (spec.pip, len(spec.lost)) == (["torch==2.5.1", "numpy"], 2)
    (tmp_path / "repo" / ".git").rmdir()
    assert read_environment_file(path, ReadOptions(pythons=("3.11",))).pip == ["numpy"]
    project = read_environment_file(path, ReadOptions(pythons=("3.11",), root=tmp_path / "repo"))
    assert project.pip == ["torch==2.5.1", "numpy"]
