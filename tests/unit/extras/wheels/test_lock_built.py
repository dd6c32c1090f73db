"""Wheels that were built, in the text of a recipe."""

from __future__ import annotations

import pytest

from imagefactory.errors import UsageError
from imagefactory.extras.wheels.lock import ProjectWheel, write_wheels
from imagefactory.model import Target
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.recipe import parse_recipe
from tests.made.values import make_base

HEAD = """\
family: lab
description: small
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
"""
GIT = f"git+https://git.example.org/lab/ops@{'a' * 40}"


def targets(text: str) -> tuple[Target, ...]:
    return expand_all([parse_recipe(text, "recipes/lab.yaml")], [make_base()])


def wheel(name: str, source: str, tag: str = "py3-none-any") -> ProjectWheel:
    path = f"./wheels/{name.replace('-', '_')}-1.0-{tag}.whl"
    return ProjectWheel(name=name, version="1.0", path=path, source=source)


WHEELS = (
    wheel("filterpy", "filterpy-1.0.zip"),
    wheel("ops", GIT, "cp311-cp311-linux_x86_64"),
    wheel("lab-code", "./src"),
    wheel("docopt", "docopt-1.0.tar.gz"),
)
BLOCK = f"""\
matrix:
  - version: "2.3"
    cuda: ["12.1"]
    packages:
      - numpy<2   # as the paper
      - 'filterpy>=0.9'  # mine
      - {GIT}
      - "./src"
    constraints: [idna<4]
"""
FLOW = f"""\
packages: ["filterpy>=0.9", numpy<2, {GIT}, ./src]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
"""
LONG = f"""\
packages: [filterpy>=0.9,
           numpy<2,
           {GIT},   # the kernels
           ./src]
matrix:
  - {{version: "2.3", cuda: ["12.1"]}}
"""
NOWHERE = f"""\
matrix:
  - version: "2.3"
    cuda: ["12.1"]
    packages: [filterpy, "{GIT}", ./src]
"""


@pytest.mark.parametrize("text", [BLOCK, FLOW, LONG, NOWHERE])
def test_each_stands_for_what_it_was_built_from_and_all_else_stays(text: str) -> None:
    (before,) = targets(HEAD + text)
    made = write_wheels(HEAD + text, before, WHEELS, (before,))
    (after,) = targets(made)
    assert after.sources == ()
    assert dict(after.origins) == {one.name: one.path for one in WHEELS}
    kept = {one for one in before.requirements if not one.startswith("filterpy")}
    assert set(after.requirements) == kept | {f"{one.name}==1.0" for one in WHEELS}
    assert after.constraints == before.constraints
    for comment in ("# as the paper", "# mine", "# the kernels"):
        assert made.count(comment) == text.count(comment)
    for one in WHEELS:
        assert f"built from {one.source}" in made


def test_added_ones_alone_get_a_list() -> None:
    for row in ('  - version: "2.3"\n    cuda: ["12.1"]\n', '  - {version: "2.3", cuda: ["12.1"]}\n'):
        text = f"{HEAD}matrix:\n{row}"
        (before,) = targets(text)
        (after,) = targets(write_wheels(text, before, WHEELS[3:], (before,)))
        assert dict(after.origins) == {"docopt": WHEELS[3].path}


def test_an_entry_with_extras_stays_beside_its_wheel() -> None:
    for text in ('packages: ["lab-code[gpu]>=1"]\n', "packages:\n  - lab-code[gpu]>=1\n"):
        whole = f'{HEAD}{text}matrix:\n  - version: "2.3"\n    cuda: ["12.1"]\n'
        (before,) = targets(whole)
        (after,) = targets(write_wheels(whole, before, [wheel("lab-code", "lab-code-1.0.zip")], (before,)))
        assert {"lab-code[gpu]>=1", "lab-code==1.0"} <= set(after.requirements)
        assert "lab-code" in dict(after.origins)


def test_what_rows_share_is_replaced_only_by_what_fits_all() -> None:
    rows = 'matrix:\n  - version: "2.3"\n    cuda: ["12.1"]\n  - version: "2.4"\n    cuda: ["12.1"]\n'
    text = f"{HEAD}packages: [filterpy, ops]\n{rows}"
    first, second = targets(text)
    after = targets(write_wheels(text, first, WHEELS[:1], (first, second)))
    assert all("filterpy" in dict(one.origins) for one in after)
    with pytest.raises(UsageError) as caught:
        write_wheels(text, first, [wheel("ops", "ops-1.0.zip", "cp311-cp311-linux_x86_64")], (first, second))
    assert caught.value.code == "wheel-fits-one-target"
    assert second.name in caught.value.message
    added = [wheel("more", "more-1.0.zip", "cp311-cp311-linux_x86_64")]
    one, other = targets(write_wheels(text, first, added, (first, second)))
    assert ("more" in dict(one.origins), "more" in dict(other.origins)) == (True, False)


def test_what_is_built_on_another_has_its_own_list() -> None:
    below = parse_recipe(f'{HEAD}matrix:\n  - version: "2.3"\n    cuda: ["12.1"]\n', "recipes/lab.yaml")
    text = "family: own\ndescription: small\non: lab-2.3-cu121\npackages: [./src]\n"

    def own(written: str) -> Target:
        every = expand_all([below, parse_recipe(written, "recipes/own.yaml")], [make_base()])
        return next(one for one in every if one.family == "own")

    before = own(text)
    assert before.sources == ("./src",)
    after = own(write_wheels(text, before, WHEELS[2:], (before,)))
    assert (after.sources, set(dict(after.origins))) == ((), {"lab-code", "docopt"})


def test_a_value_in_another_form_than_its_text_stops_it() -> None:
    text = HEAD + 'matrix:\n  - version: "2.3"\n    cuda: ["12.1"]\n    packages: ["filter\\x70y"]\n'
    (before,) = targets(text)
    with pytest.raises(UsageError) as caught:
        write_wheels(text, before, WHEELS[:1], (before,))
    assert caught.value.code == "entry-not-plain"
