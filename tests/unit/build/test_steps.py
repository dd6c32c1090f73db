"""Whatever a recipe holds, the Dockerfile's instructions are the model's, as a public parser reads them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from imagefactory.build.definition import define
from imagefactory.build.render import render_apptainer, render_dockerfile
from imagefactory.errors import RecipeError
from imagefactory.model import BuildSpec, Lock, LockedWheel, Target
from imagefactory.recipes.expand import expand
from imagefactory.recipes.recipe import parse_recipe
from tests.made.errors import fails
from tests.made.rendered import (
    BITS,
    HOSTILE_TEXT,
    NAMES,
    SECTIONS,
    instructions,
    may_stand,
    parsed,
    section_names,
)
from tests.made.values import make_base, make_lock, make_target


def lock_for(target: Target) -> Lock:
    wheel = LockedWheel(
        name=re.sub(r"[-_.]+", "-", target.framework).lower(),
        version=f"{target.version}.1",
        filename=f"{target.framework}-{target.version}.1-py3-none-any.whl",
        sha256="1" * 64,
        size=1000,
    )
    return make_lock(target=target.name, python=target.python, wheels=(wheel,))


# --- values ----------------------------------------------------------------------------------------

KIND_TEXT = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S"), include_characters=" "), max_size=30
)


def make_definition(
    environment: list[tuple[str, str]], labels: list[tuple[str, str]], description: str
) -> BuildSpec:
    target = make_target(description=description)
    made = define(target, make_base(), lock_for(target))
    return replace(
        made,
        environment=(*made.environment, *environment),
        labels=(*made.labels, *labels),
    )


@given(
    environment=st.lists(st.tuples(NAMES, HOSTILE_TEXT | KIND_TEXT), max_size=4),
    labels=st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,5}(\.[a-z]{1,5}){0,2}", fullmatch=True), HOSTILE_TEXT | KIND_TEXT),
        max_size=3,
    ),
    description=HOSTILE_TEXT | KIND_TEXT,
)
@example(environment=[("A", "it's '' \"'\" \\\\x $")], labels=[], description="escape=`")
def test_values_come_through_whole_or_are_refused(environment, labels, description) -> None:
    definition = make_definition(environment, labels, description)
    if all(map(may_stand, [description, *(value for _, value in (*environment, *labels))])):
        assert parsed(render_dockerfile(definition)) == instructions(definition)
        if all(value == value.strip() for _, value in definition.labels):
            assert section_names(render_apptainer(definition)) == SECTIONS
        return
    for render_one in (render_dockerfile, render_apptainer):
        with fails("value-not-quotable"):
            render_one(definition)


# --- whole recipes ---------------------------------------------------------------------------------

VALID = {
    "family": "pytorch",
    "description": "PyTorch with CUDA libraries",
    "framework": "torch",
    "version": "2.3",
    "cuda": "12.1",
    "python": "3.11",
    "variable": "OMP_PLACES",
    "value": "cores",
    "package": "numpy",
}


def recipe_text(values: dict[str, str]) -> str:
    """A recipe whose values are YAML double-quoted strings, so every character reaches the parser."""
    quoted = {key: json.dumps(value) for key, value in values.items()}
    return (
        "family: {family}\ndescription: {description}\nsource: pypi\nframework: {framework}\n"
        'platform: linux/amd64\nbase: debian-12\npython: {python}\ncapabilities: ["8.0"]\n'
        "checks: [packages]\npackages: [{package}]\nenvironment:\n  {variable}: {value}\n"
        "matrix:\n  - version: {version}\n    cuda: [{cuda}]\n"
    ).format(**quoted)


@st.composite
def near_valid(draw: st.DrawFn) -> dict[str, str]:
    """A valid recipe with up to two values bent: a bit put in somewhere, or a value of another kind."""
    values = dict(VALID)
    for key in draw(st.lists(st.sampled_from(sorted(VALID)), max_size=2)):
        if draw(st.booleans()):
            place = draw(st.integers(0, len(values[key])))
            values[key] = values[key][:place] + draw(BITS) + values[key][place:]
        else:
            values[key] = draw(st.sampled_from(sorted(VALID.values())) | KIND_TEXT)
    return values


def test_the_valid_recipe_is_valid() -> None:
    (target,) = expand(parse_recipe(recipe_text(VALID), "recipes/pytorch.yaml"), (make_base(),))
    assert target.environment == (("OMP_PLACES", "cores"),)


PLACED = re.compile(r"recipes/pytorch\.yaml:\d+:\d+: ")


@given(values=near_valid())
def test_a_recipe_is_refused_or_means_what_it_says(values: dict[str, str]) -> None:
    try:
        targets = expand(parse_recipe(recipe_text(values), "recipes/pytorch.yaml"), (make_base(),))
    except RecipeError as error:
        faults = error.faults
        targets = ()
    else:
        faults = ()
    assert bool(targets) is not bool(faults)
    assert [fault for fault in faults if not PLACED.match(fault)] == []
    for target in targets:
        definition = define(target, make_base(), lock_for(target))
        assert parsed(render_dockerfile(definition)) == instructions(definition)
        assert section_names(render_apptainer(definition)) == SECTIONS
        for name, value in definition.environment:
            assert value in render_apptainer(definition) or name == "HOME"
