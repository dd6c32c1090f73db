"""Each extra is a directory that may be deleted: the rest imports, and shows the help of its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from imagefactory.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "imagefactory"
EXTRAS = sorted(path.name for path in (PACKAGE / "extras").iterdir() if (path / "__init__.py").is_file())
# What runs elsewhere, under another name or with another Python, is not imported here.
PROGRAM = """
import importlib, pkgutil, sys
from pathlib import Path
import click
import imagefactory

elsewhere = sys.argv[1].split(",")
assert Path(imagefactory.__file__).is_relative_to(Path.cwd()), imagefactory.__file__
for module in pkgutil.walk_packages(imagefactory.__path__, "imagefactory."):
    if not module.name.startswith(tuple(elsewhere)) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)

from imagefactory.cli import cli

def show(command, path, parent):
    context = click.Context(command, info_name=path[-1], parent=parent)
    assert command.get_help(context)
    print(" ".join(path[1:]))
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            show(child, (*path, name), context)

show(cli, ("imagefactory",), None)
"""
ELSEWHERE = (
    "imagefactory.suite",
    "imagefactory.verify.kit",
    "imagefactory.runtime.sandbox",
    "imagefactory.runtime.spython_child",
    "imagefactory.schedulers.htcondor.node",
    "imagefactory.extras.emulate.inside",
    "imagefactory.extras.wheels.wheel_builder",
    "imagefactory.build.conda_install",
    "imagefactory.build.pyc_server",
)
IGNORED = (".git", ".venv", ".engines", ".*_cache", "__pycache__")
# These check the whole tree, or run commands and options of extras.
WHOLE = (
    "actions/test_new_project.py",
    "actions/test_plan.py",
    "jobs/test_make.py",
    "matrix/test_plan.py",
    "schedulers/htcondor/test_pool.py",
    "settings/test_own_commands.py",
    "test_docs.py",
    "test_error_codes.py",
    "test_house.py",
    "test_site.py",
    "test_wheel.py",
)


def link_without(deleted: tuple[str, ...], root: Path) -> None:
    """Write a tree of links to the package, without some extras."""
    (root / "imagefactory" / "extras").mkdir(parents=True)
    for source in (PACKAGE, PACKAGE / "extras"):
        target = root / source.relative_to(ROOT)
        for path in source.iterdir():
            if path.name not in ("extras", "__pycache__", *deleted):
                (target / path.name).symlink_to(path)
    (root / "imagefactory" / "__init__.py").unlink()
    shutil.copyfile(PACKAGE / "__init__.py", root / "imagefactory" / "__init__.py")


def commands_of(extras: tuple[str, ...]) -> set[str]:
    rows = (row for section in COMMANDS.values() for row in section.items())
    return {path for path, place in rows if place.split(".")[:2] in [["extras", name] for name in extras]}


@pytest.mark.parametrize("deleted", [*((name,) for name in EXTRAS), tuple(EXTRAS)], ids="-".join)
def test_the_rest_works_without_an_extra(deleted: tuple[str, ...], tmp_path: Path) -> None:
    link_without(deleted, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(ELSEWHERE)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    everything = {path for section in COMMANDS.values() for path in section}
    assert everything - commands_of(deleted) <= set(done.stdout.splitlines())
    assert not commands_of(deleted) & set(done.stdout.splitlines())


@cache
def needs_extras(path: Path) -> bool:
    """Return whether a file of the tests uses an extra, its commands, or a helper that does."""
    text = path.read_text(encoding="utf-8")
    paths = (path.split() for path in commands_of(tuple(EXTRAS)))
    calls = (r"\(\s*" * (len(path) == 1) + r"\s*".join(rf'"{word}",?' for word in path) for path in paths)
    if "imagefactory.extras" in text or re.search("|".join(calls), text):
        return True
    helpers = (
        ROOT / f"{name.replace('.', '/')}.py" for name in re.findall(r"from (tests[.\w]*) import", text)
    )
    return any(needs_extras(helper) for helper in helpers if helper.is_file() and helper != path)


@pytest.mark.skipif(os.environ.get("FACTORY_TEST_TIER") != "nightly", reason="tests/run nightly runs it")
def test_the_core_passes_its_tests_without_extras(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
    for name in EXTRAS:
        shutil.rmtree(root / "imagefactory" / "extras" / name)
    unit = ROOT / "tests" / "unit"
    others = {unit / name for name in WHOLE}
    files = [path for path in sorted(unit.rglob("test_*.py")) if not path.is_relative_to(unit / "extras")]
    own = [path for path in files if not needs_extras(path) and path not in others]
    assert len(own) > len(files) / 2
    tests = [str(root / path.relative_to(ROOT)) for path in own]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "FACTORY_TEST_TIER": "short"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
