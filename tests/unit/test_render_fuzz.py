"""Whatever a recipe holds, the Dockerfile's instructions are the model's, as a public parser reads them."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import extract_key_values
from hypothesis import example, given, settings
from hypothesis import strategies as st

from imagefactory.errors import RecipeError, UsageError
from imagefactory.model import Base, Definition, Lock, LockedWheel, Target, Where
from imagefactory.recipes.expand import expand
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.render.apptainer import render_apptainer
from imagefactory.render.define import define
from imagefactory.render.dockerfile import Instruction, instructions, render_dockerfile

WHERE = Where(file="recipes/pytorch.yaml", line=1, column=1)
BASE = Base(
    name="debian-12",
    suite="bookworm",
    python="3.11",
    glibc="2.36",
    packages=("gcc", "python3", "python3-venv"),
    public="docker.io/library/debian:12-slim",
    where=WHERE,
)


def lock_for(target: Target) -> Lock:
    wheel = LockedWheel(
        name=re.sub(r"[-_.]+", "-", target.framework).lower(),
        version=f"{target.version}.1",
        filename=f"{target.framework}-{target.version}.1-py3-none-any.whl",
        sha256="1" * 64,
        size=1000,
    )
    return Lock(
        target=target.name,
        content_hash="sha256:" + "0" * 64,
        python=target.python,
        platform="manylinux_2_36_x86_64",
        solver="uv 0.9.1",
        wheels=(wheel,),
    )


def parsed(text: str) -> tuple[Instruction, ...]:
    """The instructions as dockerfile-parse finds them, in the model's terms."""
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    found = []
    for each in parser.structure:
        keyword, value = each["instruction"], each["value"]
        if keyword in ("ENV", "LABEL"):
            pairs = extract_key_values(env_replace=False, args={}, envs={}, instruction_value=value)
            found.append(Instruction(keyword=keyword, pairs=tuple(pairs)))
        elif keyword != "COMMENT":
            found.append(split_flags(keyword, value.split()))
    return tuple(found)


def split_flags(keyword: str, words: list[str]) -> Instruction:
    """dockerfile-parse knows no flags: by Docker's reference they are the words with `--` in front."""
    count = next((n for n, word in enumerate(words) if not word.startswith("--")), len(words))
    return Instruction(keyword=keyword, flags=tuple(words[:count]), value=" ".join(words[count:]))


def section_names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.lstrip().startswith("%")]


SECTIONS = [
    "%arguments", "%files", "%post", "%environment", "%labels", "%runscript", "%test", "%help",
]  # fmt: skip

# --- values ----------------------------------------------------------------------------------------

BITS = st.sampled_from(
    [
        "a", "B9", " ", "'", '"', "\\", "$HOME", "${PATH}", "$(id)", "`id`", "#", "# escape=`", "%post",
        "[[ 7*7 ]]", "[% if %]", "{{7*7}}", "{{ BASE }}", "{%", "}}", "\n", "\\\n", "\nRUN id\n", "\r", "\0",
        "\u2028", "\u0085", "\u202e", "é", "=", "A=b", ";", "&&", "<<EOF", "FROM x", "ONBUILD", "\t", "\x7f",
    ]
)  # fmt: skip
HOSTILE_TEXT = st.lists(BITS, max_size=6).map("".join)
KIND_TEXT = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S"), include_characters=" "), max_size=30
)
NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,12}", fullmatch=True)


def make_definition(
    environment: list[tuple[str, str]], labels: list[tuple[str, str]], description: str
) -> Definition:
    target = Target(
        name="pytorch-2.3-cu121",
        family="pytorch",
        description=description,
        source="pypi",
        framework="torch",
        version="2.3",
        cuda="12.1",
        python="3.11",
        base="debian-12",
        platform="linux/amd64",
        capabilities=("8.0",),
        checks=(),
        requirements=("torch==2.3.*",),
        constraints=(),
        environment=(),
        where=WHERE,
    )
    made = define(target, BASE, lock_for(target))
    return replace(
        made,
        environment=(*made.environment, *environment),
        labels=(*made.labels, *labels),
    )


def may_stand(value: str) -> bool:
    return value.isprintable() and not value.endswith("\\") and "{{" not in value


@settings(deadline=None, max_examples=300)
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
        with pytest.raises(UsageError, match="cannot stand"):
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
    (target,) = expand(parse_recipe(recipe_text(VALID), "recipes/pytorch.yaml"), (BASE,))
    assert target.environment == (("OMP_PLACES", "cores"),)


PLACED = re.compile(r"recipes/pytorch\.yaml:\d+:\d+: ")


@settings(deadline=None, max_examples=400)
@given(values=near_valid())
def test_a_recipe_is_refused_or_means_what_it_says(values: dict[str, str]) -> None:
    try:
        targets = expand(parse_recipe(recipe_text(values), "recipes/pytorch.yaml"), (BASE,))
    except RecipeError as error:
        faults = error.faults
        targets = ()
    else:
        faults = ()
    assert bool(targets) is not bool(faults)
    assert [fault for fault in faults if not PLACED.match(fault)] == []
    for target in targets:
        definition = define(target, BASE, lock_for(target))
        assert parsed(render_dockerfile(definition)) == instructions(definition)
        assert section_names(render_apptainer(definition)) == SECTIONS
        for _, value in definition.environment:
            assert value in render_apptainer(definition)
