"""The runs of pip in a definition: of two wheels with one file the one that assemble keeps comes last."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.definition import define, rank_wheels
from imagefactory.build.steps import INPUT, PIP, REQUIREMENTS, steps
from imagefactory.lock.files import format_lock_files
from imagefactory.model import BuildSpec, LockedWheel
from tests.made.values import make_base, make_lock, make_target

PROGRAM = """\
#!/bin/sh
# pip: goes by names, the first name last, and skips what is there.
for last; do :; done
sed -n 's/^\\([a-z0-9-]*\\)==.*/\\1/p' "$last" | sort -r | while read -r name; do
    grep -qx "$name" "$INSTALLED" || echo "$name" >> "$INSTALLED"
done
"""


def wheel(name: str) -> LockedWheel:
    filename = f"{name.replace('-', '_')}-1-py3-none-any.whl"
    return LockedWheel(name=name, version="1", filename=filename, sha256="a" * 64, size=1)


def alone(*named: str) -> BuildSpec:
    wheels = tuple(map(wheel, ("a", "b", "b-b", "c", "d", "e", "torch", "z")))
    return define(make_target(framework="torch", requirements=named), make_base(), make_lock(wheels=wheels))


def above(*named: str) -> BuildSpec:
    whole, below = alone(*named), tuple(map(wheel, ("b", "d", "torch")))
    return replace(
        whole,
        target=replace(whole.target, on="lower-1.0-cu121"),
        under=(make_lock(target="lower-1.0-cu121", wheels=below),),
        named_below=(frozenset({"d", "torch"}),),
    )


def of_pip(definition: BuildSpec) -> Iterator[str]:
    """The commands of the step that runs pip, from the first filter on."""
    (step,) = (one for one in steps(definition) if any("pip --python" in text for text in one.commands))
    yield from (text for text in step.commands if text.startswith((f"{PIP}/bin/pip ", "grep")))


@pytest.mark.parametrize(
    "definition",
    [
        alone("torch"),
        alone("torch", "b-b", "z<2"),
        alone(*(one for one in ("a", "b", "b-b", "c", "d", "e", "torch", "z"))),
        above("c"),
        above("a", "b-b", "c", "e", "z"),
    ],
)
def test_wheels_are_installed_by_falling_rank(definition: BuildSpec, tmp_path: Path) -> None:
    installed, program = tmp_path / "installed", tmp_path / "pip/bin/pip"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (tmp_path / "requirements.txt").write_text(format_lock_files(definition.lock)["requirements.txt"])
    script = "; ".join(("set -eu", *(" ".join(text.split()) for text in of_pip(definition))))
    for inside, outside in ((PIP, "pip"), (INPUT, ""), (REQUIREMENTS, "requirements.txt")):
        script = script.replace(inside, str(tmp_path / outside))
    installed.touch()
    subprocess.run(
        ["sh", "-c", script], check=True, env={"INSTALLED": str(installed), "PATH": "/usr/bin:/bin"}
    )
    ranks = {name: (number, unnamed, name) for number, unnamed, name in rank_wheels(definition).values()}
    assert installed.read_text().split() == sorted(ranks, key=lambda name: ranks[name], reverse=True)


def test_one_rank_is_one_run() -> None:
    every = alone("a", "b", "b-b", "c", "d", "e", "torch", "z")
    assert len(list(of_pip(every))) == 1
    assert len(list(of_pip(alone("torch")))) == 3
