"""What old code imports and its files do not ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.extras.importers.setup_files import FITTING, add_needs, find_imports
from imagefactory.extras.importers.spec import EnvironmentSpec


def wish_of(
    tmp_path: Path, code: str, pip: tuple[str, ...] = (), python: str = "", **other: object
) -> EnvironmentSpec:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool/main.py").write_text(code)
    spec = EnvironmentSpec("requirements.txt", pip=list(pip), python=python, **other)  # type: ignore[arg-type]
    add_needs(spec, tmp_path)
    return spec


@pytest.mark.parametrize(
    ("code", "before", "pip", "constraints"),
    [
        ("import pkg_resources as pkg\n", ("torch",), ["torch", "setuptools<82"], []),
        (
            "import os\nfrom pkg_resources import packaging\n",
            ("setuptools>=70",),
            ["setuptools>=70"],
            ["setuptools<82"],
        ),
        ("import pkg_resources\n", ("setuptools==83.0.0",), ["setuptools==83.0.0"], []),
        ("from distutils.util import strtobool\n", (), ["setuptools"], []),
        ("import distutils\nimport pkg_resources\n", (), ["setuptools<82"], []),
        ("import distutils\n", ("setuptools>=60",), ["setuptools>=60"], []),
    ],
)
def test_setuptools_for_what_it_brings(
    tmp_path: Path, code: str, before: tuple[str, ...], pip: list[str], constraints: list[str]
) -> None:
    spec = wish_of(tmp_path, code, before)
    assert (spec.pip, spec.constraints, spec.lost) == (pip, constraints, [])
    named = "setuptools" in str(before) and "distutils" in code and "pkg_resources" not in code
    assert [note.split(" ")[0] for note in spec.notes] == (
        [] if named else [f"tool/main.py:{code.count(chr(10))}:1:"]
    )


@pytest.mark.parametrize(
    ("code", "python", "bounded"),
    [
        ("import imp\n", "", "<3.12"),
        ("from cgi import escape\n", ">=3.8", "<3.13,>=3.8"),
        ("import imp\n", ">=3.12", ">=3.12"),
        ("import imp\n", "3.11", "3.11"),
        ("import importlib\nfrom imports import x\n", "", ""),
    ],
)
def test_python_for_a_module_that_a_later_one_removed(
    tmp_path: Path, code: str, python: str, bounded: str
) -> None:
    spec = wish_of(tmp_path, code, python=python)
    assert spec.python == bounded
    assert bool(spec.notes) == (python != bounded)


def test_what_is_locked_or_of_conda_stays(tmp_path: Path) -> None:
    spec = wish_of(tmp_path, "import pkg_resources, imp\n", locked=True)
    assert (spec.pip, spec.python, spec.notes) == ([], "", [])
    (tmp_path / "again").mkdir()
    spec = wish_of(tmp_path / "again", "import pkg_resources\n", conda=["numpy"])
    assert (spec.pip, spec.notes) == ([], [])


def test_optional_imports_and_other_code_do_not_count(tmp_path: Path) -> None:
    files = {
        "a.py": "try:\n    import pkg_resources\nexcept ImportError:\n    pass\n",
        "setup.py": "import distutils\n",
        "tests/b.py": "import imp\n",
        ".git/c.py": "import imp\n",
        "env/pyvenv.cfg": "",
        "env/lib/d.py": "import imp\n",
        "e.txt": "import imp\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "broken.py").symlink_to("nowhere")
    assert find_imports(tmp_path) == {}


def test_the_fitting_release_is_within_the_bound() -> None:
    assert int(FITTING.split(".")[0]) < 82
