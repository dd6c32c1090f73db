"""The exact text of the most important errors of recipes and builds."""

from __future__ import annotations

import pytest

from imagefactory.build.assembly import settle_claims
from imagefactory.build.base.pulled import check_carried
from imagefactory.build.definition import define
from imagefactory.errors import ImagefactoryError, RecipeError
from imagefactory.model import CommandResult
from imagefactory.recipes.bases import parse_bases
from imagefactory.recipes.expand import expand_all, select
from imagefactory.recipes.recipe import parse_recipe
from tests.made.values import make_base, make_lock, make_target

RECIPE = """\
family: pytorch
description: small
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
packages: [numpy]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
"""
BASES = """\
bases:
  - {name: debian-12, suite: bookworm, python: "3.11", glibc: "2.36", packages: [python3], public: a.b/c:12}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("packages:", "pakages:", "9:1: unknown key 'pakages' (did you mean 'packages'?)"),
        ("framework: torch\n", "", "1:1: 'framework' is missing (write framework: torch)"),
        (
            '"2.3"',
            "2.3",
            "11:14: 'version' must be text, but YAML reads '2.3' as a number (write it in quotes: \"2.3\")",
        ),
        (
            "family: pytorch",
            "family: Py_Torch",
            "1:9: 'family' has the invalid value 'Py_Torch' "
            '(write lower-case letters, digits and single hyphens, such as "pytorch")',
        ),
        ("debian-12", "debain-12", "6:7: no base 'debain-12' (did you mean 'debian-12'?)"),
        (
            '"12.1"',
            '"12.4"',
            '12:12: torch 2.3 on PyPI is built for CUDA 12.1, not 12.4 (write "12.1")',
        ),
        (
            "source: pypi",
            "source: pypi\nchannels: [conda-forge]",
            "4:1: 'channels' requires source: conda (remove it, or write source: conda)",
        ),
        ("pytorch", "&a pytorch", "1:9: anchors and aliases (&, *) are not supported (repeat the value)"),
    ],
)
def test_problem_of_a_recipe(old: str, new: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        expand_all(
            [parse_recipe(RECIPE.replace(old, new, 1), "recipes/torch.yaml")],
            parse_bases(BASES, "recipes/bases.yaml"),
        )
    assert caught.value.message == f"recipes/torch.yaml:{message}"


def test_unknown_target() -> None:
    with pytest.raises(ImagefactoryError) as caught:
        select([make_target()], ["pytorch-2.3-cu118"])
    assert caught.value.message == "no target 'pytorch-2.3-cu118'"
    assert caught.value.hint == "of pytorch-2.3 there is pytorch-2.3-cu121"


def test_outdated_lock() -> None:
    with pytest.raises(ImagefactoryError) as caught:
        define(make_target(), make_base(), make_lock(wheels=()))
    assert caught.value.message == "the lock of pytorch-2.3-cu121 has no torch"
    assert caught.value.hint == "run imagefactory lock pytorch-2.3-cu121"


def test_packages_with_one_file() -> None:
    with pytest.raises(ImagefactoryError) as caught:
        settle_claims([("a.whl", "sha256=x", "s/x"), ("b.whl", "sha256=y", "s/x/f")], {})
    assert caught.value.message == "/s/x is a file in a.whl and a directory in b.whl"
    assert caught.value.hint == "remove one of the two packages from the recipe, or choose another version"


def test_base_image_with_another_python() -> None:
    base = make_base(image="docker.io/x/y@sha256:0", interpreter="/usr/bin/python3.11")
    probed = CommandResult(returncode=0, stdout="3.12\nglibc 2.36\n", stderr="", seconds=0.1)
    with pytest.raises(ImagefactoryError) as caught:
        check_carried(base, probed)
    assert caught.value.message == (
        "recipes/pytorch.yaml:7:5: docker.io/x/y@sha256:0 has Python 3.12 at /usr/bin/python3.11, not 3.11"
    )
    assert caught.value.hint == ('write python: "3.12", or set interpreter: to the path of its Python 3.11')
