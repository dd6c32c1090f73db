"""Debian's packages of a recipe: a base of their own, above the one that its rows name."""

from __future__ import annotations

import pytest

from imagefactory.errors import RecipeError
from imagefactory.recipes.expand import expand_lenient
from imagefactory.recipes.recipe import parse_recipe
from tests.made.diagnostics import reports
from tests.made.values import make_base

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
  - version: "2.5"
    cuda: ["12.4"]
"""
ABOVE = "family: mine\ndescription: More\non: pytorch-2.3-cu121\n"


def test_its_targets_stand_on_a_base_of_their_own() -> None:
    recipes = [
        parse_recipe(RECIPE + "system: [ffmpeg, python3]\n", "recipes/pytorch.yaml"),
        parse_recipe(ABOVE + "system: [jq]\n", "recipes/mine.yaml"),
    ]
    bases, targets, faults = expand_lenient(recipes, [make_base()], {})
    assert faults == ()
    assert {target.name: target.base for target in targets} == {
        "mine-2.3-cu121": "debian-12-pytorch-mine",
        "pytorch-2.3-cu121": "debian-12-pytorch",
        "pytorch-2.5-cu124": "debian-12-pytorch",
    }
    below = make_base().packages
    assert {base.name: (base.on, base.packages) for base in bases} == {
        "debian-12": ("", below),
        "debian-12-pytorch": ("debian-12", (*below, "ffmpeg")),
        "debian-12-pytorch-mine": ("debian-12-pytorch", (*below, "ffmpeg", "jq")),
    }
    assert str(bases[1].where) == "recipes/pytorch.yaml:14:9"
    assert {(base.glibc, base.python, base.public) for base in bases} == {
        ("2.36", "3.11", "docker.io/library/debian:12-slim")
    }


def test_without_any_it_is_the_base_itself() -> None:
    recipes = [parse_recipe(RECIPE, "recipes/pytorch.yaml"), parse_recipe(ABOVE, "recipes/mine.yaml")]
    bases, targets, _ = expand_lenient(recipes, [make_base()], {})
    assert [base.name for base in bases] == ["debian-12"]
    assert {target.base for target in targets} == {"debian-12"}


def test_a_base_of_that_name_and_an_image_of_a_registry_are_told() -> None:
    recipe = parse_recipe(RECIPE + "system: [ffmpeg]\n", "recipes/pytorch.yaml")
    _, _, faults = expand_lenient([recipe], [make_base(), make_base(name="debian-12-pytorch")], {})
    assert reports(faults[:1], "recipes/pytorch.yaml:14:9 duplicate-base 'debian-12-pytorch'")
    image = f"docker.io/library/python@sha256:{'1' * 64}"
    _, _, faults = expand_lenient([recipe], [make_base(image=image, packages=())], {})
    assert reports(faults[:1], "14:9 base-not-debian debian-12")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("system: ffmpeg", "14:9 not-a-list system"),
        ("system: []", "14:9 empty-list system"),
        ("system: [FFmpeg]", "14:10 value-invalid system FFmpeg"),
        ("system: [ffmpeg=5.1]", "14:10 value-invalid system ffmpeg=5.1"),
        ("system: {cuda: '12.4'}", "14:9 not-a-list system"),
    ],
)
def test_what_cannot_stand_there_is_told(text: str, fault: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"{RECIPE}{text}\n", "recipes/pytorch.yaml")
    (told,) = caught.value.diagnostics
    assert told.location.startswith("recipes/pytorch.yaml:14:")
    assert reports([told], fault), told
