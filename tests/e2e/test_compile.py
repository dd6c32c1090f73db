"""A package without a wheel, compiled in a target's image by its own Python and compiler."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.errors import EXIT_BUILD, EXIT_LIMIT, EXIT_LOCK, EXIT_STALE, EXIT_USAGE
from imagefactory.oci.layout import Layout
from tests.services.factory import TINY_RECIPE, Factory, lend, make_root

TARGET = "tiny-12.1-cu121"
SETUP = """\
from setuptools import Extension, setup

setup(name="ops", version="1.0", ext_modules=[Extension("ops", ["ops.cc"])])
"""
OPS = """\
#include <Python.h>
static PyObject *twice(PyObject *, PyObject *number) { return PyLong_FromLong(2 * PyLong_AsLong(number)); }
static PyMethodDef METHODS[] = {{"twice", twice, METH_O, nullptr}, {}};
static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "ops", nullptr, -1, METHODS};
PyMODINIT_FUNC PyInit_ops() { return PyModule_Create(&MODULE); }
"""


@pytest.fixture(scope="module")
def mine(base_store: Path, scratch: Path) -> Factory:
    folder = scratch / "compile"
    made = replace(lend(base_store, folder), root=make_root(folder / "root", tiny=TINY_RECIPE))
    made.run("lock", TARGET)
    made.build(TARGET, "--no-test")
    (made.root / "ops").mkdir()
    (made.root / "ops" / "setup.py").write_text(SETUP)
    (made.root / "ops" / "ops.cc").write_text(OPS)
    return made


def compiled(mine: Factory, source: Path) -> tuple[Path, bool]:
    said = json.loads(mine.run("recipe", "build-wheel", "--json", str(source), "--in", TARGET).stdout)
    return Path(said["wheel"]), said["built"]


def test_it_works_where_it_was_made_for_and_the_same_gives_the_same(mine: Factory, tmp_path: Path) -> None:
    source = mine.root / "ops"
    wheel, made = compiled(mine, source)
    assert (wheel.name, made) == ("ops-1.0-cp311-cp311-linux_x86_64.whl", True)
    assert wheel.parent == mine.root / "wheels"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = ("run", "--mount", f"{tmp_path}:/ops", "--env", "PYTHONPATH=/ops", TARGET, "--", "python")
    assert mine.run(*command, "-c", "import ops; print(ops.twice(21))").stdout == "42\n"
    assert compiled(mine, source) == (wheel, False)
    before = wheel.read_bytes()
    wheel.with_name(f"{wheel.name}.json").unlink()
    assert compiled(mine, source) == (wheel, True)
    assert wheel.read_bytes() == before


def test_what_does_not_compile_says_where(mine: Factory, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "ops.cc").write_text("int broken(\n")
    done = mine.run("recipe", "build-wheel", str(tmp_path), "--in", TARGET, code=None)
    assert done.returncode != 0
    assert "ops.cc:1:" in done.stderr
    assert "if it needs nvcc: PyPI has it from CUDA 13 on" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("code", "limit", "exit_code"),
    [
        ("held = []\nwhile True: held.append(bytearray(1 << 20))", "memory=300M", EXIT_LIMIT),
        (
            "out = open('/build/source/f', 'wb')\nwhile True: out.write(bytes(1 << 16))",
            "scratch=50M",
            EXIT_LIMIT,
        ),
        ("import time\ntime.sleep(1000)", "time=2s", EXIT_LIMIT),
        ("import os\nos.mkfifo('/build/out/x.whl')", "time=1h", EXIT_BUILD),
        ("import os\nos.symlink('/etc/passwd', '/build/out/x.whl')", "time=1h", EXIT_BUILD),
    ],
    ids=["memory", "scratch", "time", "fifo", "link"],
)
def test_a_hostile_build_takes_nothing_and_leaves_nothing(
    mine: Factory, tmp_path: Path, code: str, limit: str, exit_code: int
) -> None:
    (tmp_path / "setup.py").write_text(
        f"{code}\nfrom setuptools import setup\nsetup(name='x', version='1.0')\n"
    )
    before = set((mine.root / "wheels").glob("*"))
    mine.run("recipe", "build-wheel", str(tmp_path), "--in", TARGET, "--limit", limit, code=exit_code)
    assert set((mine.root / "wheels").glob("*")) == before
    assert list((mine.store / "run").glob("compile-*")) == []


def test_a_link_out_of_a_folder_stops_it(mine: Factory, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "key").symlink_to("/etc/passwd")
    done = mine.run("recipe", "build-wheel", str(tmp_path), "--in", TARGET, code=EXIT_USAGE)
    assert "key" in done.stderr


# --- a recipe whose packages have no wheels ----------------------------------------------------------

OWN = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"
[project]
name = "mylab"
version = "0.3"
dependencies = ["docopt==0.6.2", "idna"]
[project.scripts]
mylab = "mylab:main"
"""
MAIN = """\
import docopt, ffmpy, idna
def main():
    print(docopt.__version__, idna.__version__)
"""


def test_lock_builds_what_has_no_wheel_and_the_image_runs_it(mine: Factory) -> None:
    """An sdist of the index, one that only the project's own code requires, and that code itself."""
    package = mine.root / "src" / "mylab"
    (package / "mylab").mkdir(parents=True)
    (package / "pyproject.toml").write_text(OWN)
    (package / "mylab" / "__init__.py").write_text(MAIN)
    recipe = mine.root / "recipes" / "lab.yaml"
    text = TINY_RECIPE.replace("family: tiny", "family: lab").replace(
        'packages: ["idna==3.7", "markupsafe==2.1.5"]',
        "packages:\n  - idna==3.7   # as the paper\n  - ffmpy==0.3.1\n  - ./src/mylab",
    )
    recipe.write_text(text)
    lab = "lab-12.1-cu121"
    (row,) = json.loads(mine.run("list", "--json", lab).stdout)["targets"]
    assert row["lock"] == "to build"
    (error,) = json.loads(mine.run("lock", "--json", lab, code=EXIT_LOCK).stdout)["errors"]
    assert {one["name"]: one["version"] for one in error["packages"]} == {
        "docopt": "0.6.2",
        "ffmpy": "0.3.1",
        "mylab": "0.3",
    }
    assert error["hint"] == f"run imagefactory lock {lab} --build"
    assert recipe.read_text() == text
    assert mine.run("build", lab, code=EXIT_STALE).returncode == EXIT_STALE

    (result,) = json.loads(mine.run("lock", "--build", "--json", lab).stdout)["results"]
    assert {one["name"] for one in result["built"]} == {"docopt", "ffmpy", "mylab"}
    assert all((mine.root / one["path"]).is_file() for one in result["built"])
    assert "# as the paper" in recipe.read_text()
    mine.run("lock", "--check", lab)
    assert not any("-build" in tag for tag in Layout(mine.store).tags())
    mine.build(lab, "--no-test")
    assert mine.run("run", lab, "--", "mylab").stdout == "0.6.2 3.7\n"

    made = {path: path.stat().st_mtime_ns for path in (mine.root / "wheels").glob("*.whl")}
    recipe.write_text(text)  # as after a command that was interrupted
    (result,) = json.loads(mine.run("lock", "--build", "--json", lab).stdout)["results"]
    assert {path: path.stat().st_mtime_ns for path in made} == made
