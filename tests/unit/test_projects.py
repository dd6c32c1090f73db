"""The facts of `tests/run projects`, its table in the docs, and its own reader of files."""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.projects import imported, measure, requested

PROJECTS = measure.load()


def test_each_project_is_one_file_at_one_commit() -> None:
    assert len(PROJECTS) >= 40
    assert len({one.name for one in PROJECTS}) == len(PROJECTS)
    for one in PROJECTS:
        assert re.fullmatch(r"[0-9a-f]{40}", one.commit), one.name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", one.repository), one.name
        assert not any(name.startswith("/") or ".." in name for name in (one.file, *one.beside)), one.name
        assert one.new in measure.NEW_WORDS, one.name
        assert one.lock in measure.LOCK_WORDS, one.name
        assert re.split("[;:]", one.image)[0] in measure.IMAGE_WORDS, one.name


def test_each_project_has_a_stand_in_of_the_same_files() -> None:
    for one in PROJECTS:
        folder = measure.SHAPES / one.name
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert found == {one.file, *one.beside}
    assert {path.name for path in measure.SHAPES.iterdir()} == {one.name for one in PROJECTS}


def test_the_table_of_the_docs_has_the_rows_of_the_facts() -> None:
    assert measure.table(PROJECTS) in measure.PAGE.read_text()


def test_results_are_taken_over_into_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FACTS", "PAGE"):
        copy = tmp_path / name
        copy.write_text(getattr(measure, name).read_text())
        monkeypatch.setattr(measure, name, copy)
    first, second = PROJECTS[:2]
    stopped = measure.Result(
        first.name, real=True, new=measure.STOPS, error=f'{first.name}-1-cu1: no "torch"'
    )
    locked = measure.Result(second.name, real=True, new=measure.IMPORTS, lock=measure.LOCKS)
    locked.image = 'fails: no "x" | y'
    measure.write([stopped, locked])
    locked.image = measure.NONE  # of a run without --build
    measure.write([locked])
    rows = {one.name: one for one in measure.load(tmp_path / "FACTS")}
    assert rows[second.name].image == "fails: no 'x' ' y"
    assert list(rows) == [one.name for one in PROJECTS]
    assert (rows[first.name].new, rows[first.name].lock, rows[first.name].why) == ("stops", "-", "no 'torch'")
    assert (rows[second.name].new, rows[second.name].lock, rows[second.name].why) == ("imports", "locks", "")
    assert measure.table(list(rows.values())) in (tmp_path / "PAGE").read_text()


@pytest.mark.parametrize(
    ("advice", "obeyed"),
    [
        ("set it: --framework torch=VERSION --cuda VERSION (such as 12.4)", ["torch=2.6", "12.4"]),
        ("--framework torch=2.7.1 --cuda 12.6, or --extends x-1-cu126", ["torch=2.7.1", "12.6"]),
        ("write the recipe without these: --partial", ["--partial"]),
        ("fix the line", []),
    ],
)
def test_a_hint_is_obeyed_by_options_that_the_row_lists(advice: str, obeyed: list[str]) -> None:
    answers = ("--framework", "torch=2.6", "--cuda", "12.4", "--partial")
    assert [value or option for option, value in measure.advised(advice, answers)] == obeyed


FILES = {
    "requirements.txt": "torch==2.6.0\n-r more/extra.txt\nnumpy<2 ; python_version < '3.9'\n-e .\n# six\n",
    "more/extra.txt": "tqdm >=4 # fine\n",
    "pyproject.toml": (
        '[project]\nname = "x"\ndependencies = ["torch==2.6.0"]\n'
        '[project.optional-dependencies]\ntrain = ["tqdm>=4"]\n'
    ),
    "environment.yml": "dependencies:\n  - python\n  - pip:\n    - torch==2.6.0\n    - -r more/extra.txt\n",
    "Dockerfile": (
        "FROM x\nRUN apt-get install -y git && pip install --no-cache-dir \\\n  # why\n  torch==2.6.0 -f https://x\n"
        "RUN python -m pip install -r /app/extra.txt\n"
    ),
}


@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml", "environment.yml", "Dockerfile"])
def test_what_a_file_asks_for(tmp_path: Path, name: str) -> None:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    found = requested.read(tmp_path / name, tmp_path, extras=("train",))
    names = [f"{one.name}{one.specifier}" for one in found.requirements if requested.applies(one, "3.11")]
    assert names == ["torch==2.6.0", "tqdm>=4"]


def test_a_clone_that_is_installed_from_its_directory_is_its_address(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "FROM x\nRUN git clone --depth 1 https://host/A/B-c.git && cd B-c \\\n  && pip install -e .\n"
        "WORKDIR /app\nRUN pip install -e . ./more\n"
    )
    found = requested.read(tmp_path / "Dockerfile", tmp_path)
    assert found.unread == ["-e https://host/A/B-c.git", "-e .", "./more"]


def test_requirements_that_a_lock_does_not_meet() -> None:
    asked = [Requirement(text) for text in ("a>=2", "B-b", "c", "d; sys_platform == 'win32'", "e<2")]
    missing = requested.unmet(asked, {"a": "1.0", "b-b": "1", "e": "1.9rc1"}, "3.11")
    assert [what.split(":")[0] for _, what in missing] == ["a>=2", "c"]


def test_cuda_majors_of_a_lock() -> None:
    assert requested.cuda_majors({"nvidia-cublas-cu12": "12.4", "nvidia-cuda-runtime": "13.0"}) == {
        "12",
        "13",
    }


def test_modules_that_a_projects_code_imports(tmp_path: Path) -> None:
    files = {
        "train.py": "import os, torch.nn, own, pkg_resources\ntry:\n    import optional\nexcept: pass\n",
        "own/__init__.py": "from . import a\nfrom own import b\nfrom PIL import Image\ndef f(): import z\n",
        "own/a.py": "import b\nif 1:\n    import conditional\n",
        "own/b.py": "from __future__ import annotations\n",
        "tests/test_x.py": "import pytest\n",
        "old.py": "print 'Python 2'\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert imported.modules(tmp_path) == ["PIL", "pkg_resources", "torch"]


def test_imports_that_fail_and_modules_that_no_package_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_import.py").write_text("print('noise')\nimport sys\nsys.exit('no libGL')\n")
    (tmp_path / "fine_at_import.py").write_text("print('noise')\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["asyncore", "exits_at_import", "fine_at_import", "no_such_module"]
    monkeypatch.setattr(imported, "BROUGHT_ALONG", {"asyncore"})
    monkeypatch.setitem(sys.modules, "asyncore", None)
    found = imported.try_imports(names)
    assert found["imports"] == ["fine_at_import"]
    assert found["absent"] == ["no_such_module"]
    assert set(found["fails"]) == {"asyncore", "exits_at_import"}
    assert measure.imported(json.dumps(found), "").startswith("fails: ")
    assert measure.imported(json.dumps(found | {"fails": {}}), "").startswith("imports; ")
    assert measure.imported("", "torch\nnumba\n") == "fails: numba ended the process"


def test_a_whole_project_of_a_directory_or_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = PROJECTS[0]
    tree = tmp_path / project.repository / project.commit
    (tree / "package").mkdir(parents=True)
    (tree / "package/code.py").write_text("")
    assert measure.bring_all(project, str(tmp_path), tmp_path / "copy")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as writer:
        writer.add(tree, f"{project.name}-{project.commit}")
    addresses = []

    def fetch(address: str, largest: int) -> bytes:
        addresses.append(address)
        return archive.getvalue()

    monkeypatch.setattr(measure, "_fetch", fetch)
    assert measure.bring_all(project, measure.HOST, tmp_path / "unpacked")
    assert addresses == [f"{measure.ARCHIVES}/{project.repository}/tar.gz/{project.commit}"]
    for name in ("copy", "unpacked"):
        assert (tmp_path / name / "package/code.py").is_file()
    assert not measure.bring_all(project, str(tmp_path / "nowhere"), tmp_path / "none")


def test_a_smoke_tests_hint_is_written_into_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "x.yaml"
    recipe.write_text('python: "3.13"\npackages: [tqdm]\n')
    advice = "add system: [libgl1, libx11-6] and packages: [setuptools<82] to the recipe, then lock"
    assert measure.obey(advice, recipe)
    assert yaml.safe_load(recipe.read_text()) == {
        "python": "3.13",
        "packages": ["tqdm", "setuptools<82"],
        "system": ["libgl1", "libx11-6"],
    }
    assert not measure.obey("the checks above say why", recipe)
