"""A lock that a person brings: its very files become the lock of a target, and the files of an image.

uv solves small projects against an index of our own, and nothing is solved here.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.pylock import Pylock
from uv import find_uv_bin

from imagefactory.lock.pypi.requirements import parse_lock
from tests.made.documents import check_printed
from tests.services.factory import COMMAND, Factory, lend, make_root
from tests.services.package_index import Index, package_index

PROJECT = """\
[project]
name = "trainer"
version = "0.1"
requires-python = ">=3.11"
dependencies = ["torch==2.6.0", "einops", "numpy<2; python_version < '3.12'"]
[project.optional-dependencies]
plots = ["markupsafe"]
[dependency-groups]
dev = ["setuptools"]
[tool.uv]
package = false
"""


@dataclass(frozen=True)
class Bringer:
    """An imagefactory project that is a project of uv too, and an index of packages."""

    root: Path
    index: Index
    home: Path

    @property
    def environ(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "IMAGEFACTORY_INDEX": self.index.url,
            "UV_DEFAULT_INDEX": self.index.url,
            "UV_NO_CACHE": "1",
            "UV_HTTP_RETRIES": "0",
            "UV_PYTHON_DOWNLOADS": "never",
        }

    def uv(self, *words: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [find_uv_bin(), *words], cwd=cwd or self.root, env=self.environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *words: str) -> tuple[int, dict[str, Any]]:
        command = [*COMMAND, "-C", str(self.root), *words, "--json"]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=300)
        check_printed(done.stdout)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def ok(self, *words: str) -> dict[str, Any]:
        code, value = self.run(*words)
        assert (code, value["errors"]) == (0, [])
        return value

    def bring(self, file: str | Path, *options: str) -> dict[str, Any]:
        return self.ok("recipe", "import", str(self.root / file), "--family", "mine", "--frozen", *options)

    def locked(self) -> dict[str, str]:
        """The sha256 of each locked wheel."""
        (path,) = (self.root / "lockfiles").glob("mine-*.requirements.txt")
        return {wheel.name: wheel.sha256 for wheel in parse_lock(path.read_text(), str(path)).wheels}


@pytest.fixture
def bringer(tmp_path: Path) -> Iterator[Bringer]:
    root = make_root(tmp_path / "project")
    (tmp_path / "home").mkdir()
    (root / "pyproject.toml").write_text(PROJECT)
    with package_index(tmp_path / "index") as index:
        index.json = True
        index.add(
            "torch", "2.6.0", needs=("nvidia-cuda-runtime-cu12==12.4.127",), tag="cp311-cp311-linux_x86_64"
        )
        index.add(
            "torch", "2.6.0", needs=("nvidia-cuda-runtime-cu12==12.4.127",), tag="cp313-cp313-linux_x86_64"
        )
        index.add("nvidia-cuda-runtime-cu12", "12.4.127", tag="py3-none-manylinux2014_x86_64")
        for name, version in (
            *(("einops", "0.7.0"), ("numpy", "1.26.4"), ("numpy", "2.2.0")),
            *(("markupsafe", "2.1.5"), ("setuptools", "80.9.0")),
        ):
            index.add(name, version, files={f"{name}.py": f"version = {version!r}"})
        bringer = Bringer(root=root, index=index, home=tmp_path / "home")
        bringer.uv("lock")
        index.add("einops", "0.8.0")  # published after the lock
        yield bringer


def of_uv_lock(root: Path) -> dict[str, set[str]]:
    """The hashes that uv.lock has of each package."""
    packages = tomllib.loads((root / "uv.lock").read_text())["package"]
    return {p["name"]: {w["hash"].removeprefix("sha256:") for w in p.get("wheels", [])} for p in packages}


def test_a_uv_lock_is_kept_file_by_file(bringer: Bringer) -> None:
    value = bringer.bring("uv.lock")
    assert (value["frozen"], value["skipped"]) == (True, [])
    assert value["choice"] | {"reasons": []} == {
        "framework": "torch", "version": "2.6.0", "cuda": "12.4", "python": "3.13", "reasons": []
    }  # fmt: skip
    bringer.ok("lock", "mine")
    locked, allowed = bringer.locked(), of_uv_lock(bringer.root)
    assert sorted(locked) == ["einops", "nvidia-cuda-runtime-cu12", "torch"]
    assert all(digest in allowed[name] for name, digest in locked.items())
    einops = (bringer.index.folder / "einops-0.7.0-py3-none-any.whl").read_bytes()
    assert locked["einops"] == hashlib.sha256(einops).hexdigest()
    assert bringer.run("lock", "--check", "mine")[0] == 0
    assert bringer.run("lock", "mine", "--upgrade")[1]["errors"][0]["code"] == "target-frozen"


def test_a_changed_lock_is_noticed_and_taken(bringer: Bringer) -> None:
    bringer.bring("uv.lock", "--extra", "plots", "--group", "dev")
    bringer.ok("lock", "mine")
    before = bringer.locked()
    assert {"markupsafe", "setuptools"} < set(before)
    bringer.uv("lock", "--upgrade-package", "einops")
    code, value = bringer.run("lock", "--check", "mine")
    assert (code, list(value["locks"].values())) == (4, ["stale"])
    bringer.ok("lock", "mine")
    after = bringer.locked()
    assert {name for name in after if after[name] != before[name]} == {"einops"}
    path = next((bringer.root / "lockfiles").glob("mine-*.requirements.txt"))
    path.write_text(path.read_text().replace(after["einops"], before["einops"]).replace("0.8.0", "0.7.0"))
    code, value = bringer.run("lock", "--check", "mine")
    assert (code, list(value["locks"].values())) == (4, ["differs from ./uv.lock in einops"])
    bringer.ok("lock", "mine")
    assert bringer.locked() == after


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pylock.toml", ("export", "--format", "pylock.toml", "-o", "pylock.toml")),
        (
            "requirements.txt",
            ("export", "--format", "requirements.txt", "--no-emit-project", "-o", "requirements.txt"),
        ),
    ],
)
def test_what_uv_exports_gives_the_same_files(bringer: Bringer, file: str, words: tuple[str, ...]) -> None:
    bringer.uv(*words, "--no-dev", "--frozen")
    other = bringer.root.parent / "elsewhere"
    other.mkdir()
    (bringer.root / file).rename(other / file)
    bringer.bring(other / file)  # outside of the project: it is copied next to the recipe
    assert (bringer.root / "recipes/frozen/mine" / file).exists()
    bringer.ok("lock", "mine")
    bringer.ok("lock", "--check", "mine")
    assert sorted(bringer.locked()) == ["einops", "nvidia-cuda-runtime-cu12", "torch"]
    assert all(digest in of_uv_lock(bringer.root)[name] for name, digest in bringer.locked().items())


def test_a_poetry_lock_has_no_sizes_and_the_index_has(bringer: Bringer) -> None:
    rows = tomllib.loads((bringer.root / "uv.lock").read_text())["package"]
    text = ""
    for row in rows:
        if row["name"] in ("einops", "nvidia-cuda-runtime-cu12", "torch"):
            files = [
                f'{{file = "{w["url"].rpartition("/")[2]}", hash = "{w["hash"]}"}}' for w in row["wheels"]
            ]
            text += f'[[package]]\nname = "{row["name"]}"\nversion = "{row["version"]}"\ngroups = ["main"]\n'
            text += f"files = [{', '.join(files)}]\n"
    text += '[metadata]\nlock-version = "2.1"\npython-versions = ">=3.11"\ncontent-hash = "x"\n'
    (bringer.root / "poetry.lock").write_text(text)
    bringer.bring("poetry.lock")
    bringer.ok("lock", "mine")
    assert sorted(bringer.locked()) == ["einops", "nvidia-cuda-runtime-cu12", "torch"]
    assert all(digest in of_uv_lock(bringer.root)[name] for name, digest in bringer.locked().items())


def test_what_cannot_be_kept_stops_with_its_line(bringer: Bringer) -> None:
    (bringer.root / "lib").mkdir()
    (bringer.root / "lib/pyproject.toml").write_text('[project]\nname = "lib"\nversion = "1"\n')
    bringer.index.add_sdist("onlysource", "1.0")
    text = PROJECT.replace('"einops",', '"einops", "lib", "onlysource",')
    (bringer.root / "pyproject.toml").write_text(text + '[tool.uv.sources]\nlib = { path = "lib" }\n')
    bringer.uv("lock")
    words = ("recipe", "import", str(bringer.root / "uv.lock"), "--family", "mine", "--frozen")
    code, value = bringer.run(*words)
    assert (code, value["errors"][0]["code"], value["path"]) == (2, "import-incomplete", "")
    lines = (bringer.root / "uv.lock").read_text().split("\n")
    for name in ("lib", "onlysource"):
        row = lines.index(f'name = "{name}"')
        assert any(
            line.startswith(f"uv.lock:{row}:") or line.startswith(f"uv.lock:{row + 1}:")
            for line in value["skipped"]
        )
    value = bringer.ok(*words, "--partial")
    assert "skip: [lib, onlysource]" in value["recipe"]
    bringer.ok("lock", "mine")


def test_a_line_without_a_name_can_be_skipped_and_another_file_cannot(bringer: Bringer) -> None:
    options = ("--format", "requirements.txt", "--no-emit-project", "--no-dev", "--frozen")
    lines = bringer.uv("export", *options)
    path = bringer.root / "requirements.txt"
    words = ("recipe", "import", str(path), "--family", "mine", "--frozen", "--partial")
    path.write_text(f"-e .\n{lines}-r more.txt\n")
    assert bringer.run(*words)[1]["errors"][0]["code"] == "import-incomplete"
    (bringer.root / "pylock.toml").write_text(lines)
    words_of_toml = (*words[:2], str(bringer.root / "pylock.toml"), *words[3:])
    assert "requirements.txt" in bringer.run(*words_of_toml)[1]["errors"][0]["message"]
    path.write_text(f"-e .\n{lines}")
    assert bringer.run(*words[:-1])[1]["errors"][0]["code"] == "import-incomplete"
    assert len(bringer.ok(*words)["skipped"]) == 1
    bringer.ok("lock", "mine")
    assert sorted(bringer.locked()) == ["einops", "nvidia-cuda-runtime-cu12", "torch"]


SMALL = """\
[project]
name = "trainer"
version = "0.1"
requires-python = "==3.11.*"
dependencies = ["einops", "markupsafe"]
[tool.uv]
package = false
"""
PRINT_FILES = """
import hashlib, json, pathlib, sysconfig
root = pathlib.Path(sysconfig.get_paths()["purelib"])
found = {str(p.relative_to(root)): p for p in root.rglob("*") if p.is_file()}
files = {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in found.items()}
print(json.dumps(files))
"""


def test_an_image_holds_the_files_of_the_lock(base_store: Path, bringer: Bringer, tmp_path: Path) -> None:
    """Each file of each locked wheel is in the image with its bytes, and no other distribution is."""
    root, lent = bringer.root, lend(base_store, tmp_path / "lent")
    (root / "pyproject.toml").write_text(SMALL)
    bringer.uv("lock")
    bringer.index.add("einops", "0.9.0", files={"einops.py": "released = 'after the lock'"})
    environ = {**bringer.environ, "HOME": str(bringer.home)}
    factory = Factory(store=lent.store, cache=lent.cache, root=root, extra=environ)
    factory.run(
        "recipe", "import", str(root / "uv.lock"), "--family", "mine", "--frozen", "--framework", "einops"
    )
    factory.run("lock", "mine")
    target = json.loads(factory.run("list", "mine", "--json").stdout)["targets"][0]["target"]
    assert target == "mine-0.7.0-cpu"
    factory.build(target)
    files = json.loads(factory.run("run", target, "--", "python", "-c", PRINT_FILES).stdout)
    digests = {digest for some in of_uv_lock(root).values() for digest in some}
    wheels = [
        path
        for path in bringer.index.folder.glob("*.whl")
        if hashlib.sha256(path.read_bytes()).hexdigest() in digests
    ]
    assert sorted(path.name.split("-")[0] for path in wheels) == ["einops", "markupsafe"]
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/RECORD"):
                    assert files[name] == hashlib.sha256(wheel.read(name)).hexdigest()
    installed = {name.split("/")[0] for name in files if name.split("/")[0].endswith(".dist-info")}
    assert installed == {"einops-0.7.0.dist-info", "markupsafe-2.1.5.dist-info"}


# --- and out again ---


def test_uv_and_pip_read_what_is_rendered(bringer: Bringer, tmp_path: Path) -> None:
    (bringer.root / "pyproject.toml").write_text(PROJECT.replace(">=3.11", "==3.11.*"))
    bringer.uv("lock")
    bringer.bring("uv.lock")
    bringer.ok("lock", "mine")
    target = bringer.ok("list", "mine")["targets"][0]["target"]

    def render(file: str, kind: str) -> Path:
        command = [*COMMAND, "-C", str(bringer.root), "lock", target, "--render", kind]
        done = subprocess.run(command, env=bringer.environ, capture_output=True, text=True, check=True)
        (tmp_path / file).write_text(done.stdout)
        return tmp_path / file

    names = {"einops", "numpy", "torch", "nvidia-cuda-runtime-cu12"}
    pylock = render("pylock.toml", "pylock")
    Pylock.from_dict(tomllib.loads(pylock.read_text()))
    for file in (pylock, render("requirements.txt", "requirements")):
        options = ("--dry-run", "--no-deps", "--require-hashes", "--target", str(tmp_path / "into"))
        machine = ("--python-version=3.11", "--python-platform=x86_64-manylinux_2_36")
        done = subprocess.run(
            [find_uv_bin(), "pip", "install", "-r", str(file), *options, *machine],
            cwd=tmp_path, env=bringer.environ, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert {
            line.split("==")[0].removeprefix(" + ") for line in done.stderr.splitlines() if "==" in line
        } == names
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--require-hashes",
        "--index-url",
        bringer.index.url,
    ]
    machine = (
        "--python-version=3.11",
        "--platform=linux_x86_64",
        "--platform=manylinux2014_x86_64",
        "--only-binary=:all:",
    )
    into = tmp_path / "files"
    subprocess.run([*pip, *machine, "-r", str(tmp_path / "requirements.txt"), "-d", str(into)], check=True)
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in into.iterdir()}
    assert digests == set(bringer.locked().values())
