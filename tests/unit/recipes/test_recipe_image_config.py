"""What a recipe says of its images' config: own files, and how a container starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.errors import RecipeError
from imagefactory.model import ContainerStart, FilesSpec, SourceLocation
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.recipe import parse_recipe
from tests.made.diagnostics import reports
from tests.made.values import make_base

FILE = "recipes/pytorch.yaml"
RECIPE = """\
family: pytorch
description: PyTorch, small
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
"""
OWN = """\
files:
  /app: [train.py, "src/**/*.py"]
  /usr/local/bin: [start.sh]
workdir: /app
user: "1000:100"
entrypoint: [start.sh]
command: [python, train.py, --lr, "0.1", --lr, "0.1"]
"""
START = ContainerStart(
    entrypoint=("start.sh",),
    command=("python", "train.py", "--lr", "0.1", "--lr", "0.1"),
    workdir="/app",
    user="1000:100",
)


def test_own_files_and_start_of_a_family() -> None:
    (target,) = expand_all([parse_recipe(RECIPE + OWN, FILE)], [make_base()])
    first = RECIPE.count("\n") + 1
    assert target.files == tuple(
        FilesSpec(
            folder=folder, pattern=pattern, where=SourceLocation(file=FILE, line=first + line, column=column)
        )
        for folder, pattern, line, column in (
            ("/app", "train.py", 1, 10),
            ("/app", "src/**/*.py", 1, 20),
            ("/usr/local/bin", "start.sh", 2, 20),
        )
    )
    assert target.start == START


@pytest.mark.parametrize(
    ("own", "start"),
    [
        ("", START),
        ("command: [bash]\n", replace(START, command=("bash",))),
        ("entrypoint: [sh]\n", replace(START, entrypoint=("sh",), command=())),
    ],
)
def test_what_is_built_on_a_target_starts_as_that_one_where_it_says_nothing(
    own: str, start: ContainerStart
) -> None:
    above = f"family: mine\ndescription: More\non: pytorch-2.3-cu121\nfiles: {{/app: [more.py]}}\n{own}"
    recipes = [parse_recipe(RECIPE + OWN, FILE), parse_recipe(above, "recipes/mine.yaml")]
    targets = expand_all(recipes, [make_base()])
    mine = next(target for target in targets if target.family == "mine")
    assert mine.start == start
    assert [one.pattern for one in mine.files] == ["train.py", "src/**/*.py", "start.sh", "more.py"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("files: {/lib/x: [a]}", "12:9 value-invalid files /lib/x"),
        ("files: {/usr/bin: [a]}", "12:9 value-invalid files /usr/bin"),
        ("files: {/opt/env/lib: [a]}", "12:9 value-invalid files /opt/env/lib"),
        ("files: {app: [a]}", "12:9 value-invalid files app"),
        ("files: {/app: [../a]}", "12:16 value-invalid /app ../a"),
        ("files: {/app: [/etc/passwd]}", "12:16 value-invalid /app /etc/passwd"),
        ("files: {/app: a.py}", "12:15 not-a-list /app"),
        ("files: {/app: []}", "12:15 empty-list /app"),
        ("files: [a.py]", "12:8 not-a-mapping files"),
        ("user: 1000", "12:7 quotes-missing 1000"),
        ("user: bob", "12:7 value-invalid user bob"),
        (
            "command: python train.py",
            "12:10 not-a-list command",
        ),
        ("command: []", "12:10 empty-list command"),
        ('entrypoint: ["{{x}}"]', "12:14 value-invalid entrypoint"),
        ("workdir: app", "12:10 value-invalid workdir app"),
    ],
)
def test_what_cannot_stand_there_is_told_with_its_place(line: str, fault: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"{RECIPE}{line}\n", FILE)
    (told,) = caught.value.diagnostics
    assert told.location.startswith(f"{FILE}:{RECIPE.count(chr(10)) + 1}:")
    assert reports([told], fault), told
