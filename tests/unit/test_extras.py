"""Each extra is a directory that may be deleted: the rest imports, and shows the help of its commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def copy_without(deleted: tuple[str, ...], root: Path) -> None:
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
    copy_without(deleted, tmp_path)
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
