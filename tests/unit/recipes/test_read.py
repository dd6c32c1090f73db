"""Near-valid recipes: nothing but RecipeError ever comes out, and nothing unexpected gets in."""

# ruff: noqa: E501 -- the pieces are a table
from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from rattler import MatchSpec

from imagefactory.errors import RecipeError
from imagefactory.model import BaseSpec, Target
from imagefactory.oci.store import parse_reference
from imagefactory.recipes import edit, values
from imagefactory.recipes import values as match_spec
from imagefactory.recipes.bases import all_bases
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.read import read_bases
from imagefactory.recipes.recipe import parse_recipe

FOLDER = Path(__file__).parents[3] / "recipes"
TEXTS = [
    path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml")) if path.name != "bases.yaml"
]
TEXTS.append(edit.scaffold("lab", read_bases(FOLDER), framework="torch").text)
BASES = read_bases(FOLDER)
TEXTS.append(
    TEXTS[0]
    .replace("base: debian-12\n", f'base: docker.io/nvidia/cuda:12.4@sha256:{"0a" * 32}\nglibc: "2.35"\n', 1)
    .replace(
        "    base: debian-13\n",
        f'    base: quay.io/a/b@sha256:{"1b" * 32}\n    glibc: "2.28"\n    interpreter: /usr/local/bin/python3.13\n',
    )
)

CONDA = """\
family: stack
description: PyTorch from conda
source: conda
framework: pytorch
channels: [pytorch, nvidia/label/cuda-12.1.0, "https://conda.anaconda.org/conda-forge/", file:///srv/lab]
channel-priority: disabled
platform: linux/amd64
base: debian-12
python: "3.12"
virtual: {archspec: x86_64_v2, glibc: "2.28"}
capabilities: ["8.0"]
packages: [numpy, "file:///srv/lab::zlib"]
pip: [Einops>=0.7]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
    packages: [pytorch-cuda=12.1, "conda-forge::scipy 1.11*", "mkl >=2023, <2024"]
    constraints: ["pytorch=*=*cuda*", "mkl <2024.1", "python 3.12.4"]
  - version: "2.7"
    cuda: ["12"]
    channels: [conda-forge, nvidia]
    virtual: {cuda: "12.4"}
    python: "3.13"
    packages: [xz=5.2.6=h166bdaf_0, openssl==1.1.1w]
    pip: [rich]
"""
ON = """\
family: lab
description: ours
packages: [Pandas]
environment: {B: c}
matrix:
  - on: stack-2.3-cu121
    packages: ["xarray=2024.*", "conda-forge::dask"]
    constraints: ["dask * py*"]
    pip: ["Rich[x] >= 13"]
  - on: wheels-2.5-cu124
    packages: ["Polars[all] >= 1"]
    constraints: [pandas<3]
    checks: [import]
"""
# What ON is built on. A text under test may not make these targets again.
BELOW = [
    parse_recipe(CONDA, "recipes/stack.yaml"),
    parse_recipe(
        (FOLDER / "pytorch.yaml").read_text(encoding="utf-8").replace("family: pytorch", "family: wheels"),
        "recipes/wheels.yaml",
    ),
]
# The recipes built on pytorch stand on the same targets by their name here, those on others on one of them.
TEXTS = [text.replace("on: pytorch-", "on: wheels-") for text in TEXTS]
TEXTS = [re.sub(r"on: (jax|tensorflow)-\S+", "on: wheels-2.3-cu121", text) for text in TEXTS]
TEXTS += [CONDA.replace("family: stack", "family: other"), ON]

NASTY = [
    "\n", "\r", "\r\n", "\t", "\x00", "\x07", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\udc80", "é", "\uff10",
    '"', "'", "\\", "\\\n", "`id`", "$(id)", "${X}", "{{7*7}}", "{%", "#", " #", ": ", "- ", "? ", "|", ">", "&a ", "*a", "!!int ",
    "!!python/object/apply:os.system [id]", "<<: *a", "---\n", "...\n", "%YAML 1.1\n", "%post\n", "; rm -rf /", " && id", "../",
    "{", "}", "[", "]", ",", "[" * 30, "{a: " * 30, "@", "%", "^", "~", "no", "null", "0x10", "1e3", "2.10", ".inf", "1:30",
    "2020-01-01", "--index-url x", "-r x", " @ https://x/y", "; os_name=='x'", "==1.*", ">=1.*", "===1", "~=1", "!1", "+local",
    "=*=*", " * *cuda*", "|>=2", "[build=x]", "r::", "https://x/y::", "=1=0", " >=1 py*", "__cuda", "on: stack-2.3-cu121", "\non: lab-2.3-cu121",
    "virtual: {cuda: \"99.9\"}", "channels: [defaults]", "conda", "pypi", "\nRUN id\n", "\n  cuda: ['12']", "\nfamily: x", '"\\n"', '"\\x00"', '"\\U00110000"', '"\\ud800"', "A" * 300,
]  # fmt: skip

Mutation = Callable[[str], str]


def _insert(position: float, piece: str) -> Mutation:
    return lambda text: text[: (at := int(position * len(text)))] + piece + text[at:]


def _replace_word(position: float, piece: str) -> Mutation:
    def mutate(text: str) -> str:
        words = list(re.finditer(r"[A-Za-z0-9_./\"=*<>-]+", text))
        if not words:
            return text
        word = words[int(position * len(words))]
        return text[: word.start()] + piece + text[word.end() :]

    return mutate


def _append_to_word(position: float, piece: str) -> Mutation:
    def mutate(text: str) -> str:
        ends = [word.end() for word in re.finditer(r"[A-Za-z0-9_./=*<>-]+", text)]
        at = ends[int(position * len(ends))] if ends else 0
        return text[:at] + piece + text[at:]

    return mutate


def _on_line(position: float, kind: str) -> Mutation:
    def mutate(text: str) -> str:
        lines = text.split("\n")
        at = int(position * len(lines))
        changed = {
            "twice": [lines[at], lines[at]],
            "gone": [],
            "in": ["  " + lines[at]],
            "out": [lines[at][2:]],
            "unquoted": [lines[at].replace('"', "")],
            "swapped letters": [re.sub(r"([a-z])([a-z])", r"\2\1", lines[at], count=1)],
        }[kind]
        return "\n".join([*lines[:at], *changed, *lines[at + 1 :]])

    return mutate


POSITION = st.floats(0, 1, exclude_max=True)
PIECE = st.one_of(st.sampled_from(NASTY), st.text(max_size=6))
MUTATION = st.one_of(
    st.builds(_insert, POSITION, PIECE),
    st.builds(_replace_word, POSITION, PIECE),
    st.builds(_append_to_word, POSITION, PIECE),
    st.builds(
        _on_line, POSITION, st.sampled_from(["twice", "gone", "in", "out", "unquoted", "swapped letters"])
    ),
)

PLAIN = r"[A-Za-z0-9][A-Za-z0-9.-]*"
ALLOWED = {
    "name": r"[a-z0-9.-]+",
    "family": r"[a-z0-9-]+",
    "description": r"[A-Za-z0-9 .,;:()/+_=-]+",
    "source": "pypi|conda",
    "framework": PLAIN,
    "version": r"[0-9.]+",
    "cuda": r"[0-9.]+|none",
    "python": r"3\.[0-9]+",
    "base": r"[a-z0-9-]+",
    "platform": "linux/(amd64|arm64)",
    "capabilities": r"[0-9]+\.[0-9]",
    "checks": r"[a-z-]+",
    "channels": r"https://[a-z0-9.:-]+(/[A-Za-z0-9._-]+)+|file://(/[A-Za-z0-9._+-]+)+",
    "priority": "strict|disabled",
    "on": r"|[a-z0-9.-]+",
}
PYPI_REQUIREMENT = r"[a-z0-9-]+(\[[a-z0-9,-]+\])?[A-Za-z0-9.*=<>!~,]*"
REQUIREMENTS = {
    "pypi": (PYPI_REQUIREMENT, r"[a-z0-9-]+[=<>!~][A-Za-z0-9.*=<>!~,]*"),
    "conda": (r"([A-Za-z0-9._+:/-]+::)?_?[a-z0-9._-]+( [A-Za-z0-9._+!*=<>~,]+){0,2}",) * 2,
}


def assert_clean(target: Target) -> None:
    for field, pattern in ALLOWED.items():
        value = getattr(target, field)
        for text in value if isinstance(value, tuple) else (value,):
            assert isinstance(text, str)
            assert re.fullmatch(pattern, text, re.ASCII), (field, text)
    for name, text in target.environment:
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*", name, re.ASCII)
        assert re.fullmatch(r"[A-Za-z0-9_./:=,+@%-]*", text, re.ASCII)
        assert name not in values.RESERVED_VARIABLES
    conda = target.source == "conda"
    requirement, constraint = REQUIREMENTS[target.source]
    for texts, pattern in ((target.requirements, requirement), (target.constraints, constraint)):
        for text in texts:
            assert re.fullmatch(pattern, text, re.ASCII), text
            (assert_match_spec if conda else assert_requirement)(text)
    for text in target.pip:
        assert re.fullmatch(PYPI_REQUIREMENT, text, re.ASCII), text
        assert_requirement(text)
    if not conda:
        assert (target.channels, target.virtual, target.pip) == ((), (), ())
        return
    assert target.channels
    virtual = dict(target.virtual)
    assert set(virtual) == {"__archspec", "__glibc"} | ({"__cuda"} if target.gpu else set())
    archspec, cuda, glibc = virtual["__archspec"], virtual.get("__cuda", "12.4"), virtual["__glibc"]
    assert re.fullmatch(r"x86_64(_v[234])?|aarch64", archspec, re.ASCII)
    assert re.fullmatch(r"(9|1[0-3]|[1-8])\.[0-9]{1,2}", cuda, re.ASCII)
    assert re.fullmatch(r"2\.[0-9]{1,2}", glibc, re.ASCII)


def assert_requirement(text: str) -> None:
    """The public parser agrees to the letter."""
    requirement = Requirement(text)
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    assert f"{requirement.name}{extras}{requirement.specifier}" == text
    assert not requirement.url
    assert not requirement.marker


def assert_match_spec(text: str) -> None:
    """So does the solver's."""
    spec, read = match_spec.parse_spec(text), MatchSpec(text)
    assert str(spec) == text
    assert read.name
    assert read.name.normalized == spec.name
    assert str(read.version or "*") != "*" if spec.version else str(read.version or "*") == "*"
    assert (read.build or "") == spec.build
    assert (read.channel.base_url.rstrip("/") if read.channel else "") == spec.channel


def assert_clean_base(base: BaseSpec) -> None:
    assert re.fullmatch(r"[a-z0-9-]+-[0-9a-f]{12}", base.name, re.ASCII)
    for reference in (base.image, base.public):
        parsed = parse_reference(reference)  # what fetches it agrees
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", parsed.digest)
        assert str(parsed) == reference
    assert re.fullmatch(r"(/[A-Za-z0-9_][A-Za-z0-9._+-]*)+", base.python_path, re.ASCII)
    assert re.fullmatch(r"2\.[0-9]+", base.glibc, re.ASCII)


def read(text: str) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Targets and faults; any exception but RecipeError fails the test."""
    try:
        recipe = parse_recipe(text, "recipes/fuzz.yaml")
        own = all_bases(BASES, [recipe])[len(BASES) :]
        for base in own:
            assert_clean_base(base)
        targets = expand_all([*BELOW, recipe], [*BASES, *own])
        return tuple(target for target in targets if target.where.file == recipe.where.file), ()
    except RecipeError as error:
        return (), error.faults


def assert_only_recipe_errors(text: str) -> None:
    targets, faults = read(text)
    assert targets or faults
    for target in targets:
        assert_clean(target)
    for fault in faults:
        assert re.fullmatch(r"recipes/fuzz\.yaml(:\d+:\d+)?: [ -~]+", fault), fault
        assert len(fault) < 1000


@given(text=st.sampled_from(TEXTS), mutations=st.lists(MUTATION, min_size=1, max_size=3))
def test_near_valid_recipes(text: str, mutations: list[Mutation]) -> None:
    for mutate in mutations:
        text = mutate(text)
    assert_only_recipe_errors(text)


@given(
    field=st.sampled_from(
        [
            "description",
            "version",
            "cuda",
            "packages",
            "constraints",
            "value",
            "variable",
            "extras",
            "pip",
            "channels",
        ]
    ),
    source=st.sampled_from(values.SOURCES),
    text=st.one_of(
        PIECE,
        st.builds("{}{}".format, st.sampled_from(["a", "numpy", "numpy<2", "A", "1.2"]), PIECE),
        st.from_regex(values.RULES["package"].pattern, fullmatch=True),
        st.from_regex(values.RULES["constraint"].pattern, fullmatch=True),
        st.from_regex(values.RULES["match spec"].pattern, fullmatch=True),
    ),
)
def test_any_text_in_any_field(field: str, source: str, text: str) -> None:
    row = {
        "version": "99.1",
        "cuda": ["12"],
        "packages": [],
        "constraints": [],
        "extras": [],
        "environment": {},
        "pip": [],
        "channels": ["conda-forge"],
        "virtual": {"cuda": "12.4"},
    }
    for key in ("pip", "channels", "virtual") if source == "pypi" else ("extras",):
        del row[key]
    if field not in ("description", "value", "variable", *row):
        return
    recipe = {
        "family": "lab", "description": "d", "source": source, "framework": "lab", "platform": "linux/amd64",
        "base": "debian-12", "python": "3.11", "capabilities": ["8.0"], "matrix": [row],
    }  # fmt: skip
    if source == "conda":
        recipe["channels"] = ["conda-forge"]
    if field == "description":
        recipe["description"] = text
    elif field in ("value", "variable"):
        row["environment"] = {"A": text} if field == "value" else {text: "a"}
    else:
        row[field] = text if field == "version" else [text]
    written = yaml.dump(recipe, default_style='"', allow_unicode=False)
    assert_only_recipe_errors(written.replace("!!null ", ""))


def test_the_unchanged_texts_are_accepted() -> None:
    """So that a mutation is what makes a fault."""
    for text in TEXTS:
        targets, faults = read(text)
        assert targets, faults
        for target in targets:
            assert_clean(target)


@pytest.mark.parametrize("rule", sorted(values.RULES))
def test_no_rule_hangs_on_what_it_refuses(rule: str) -> None:
    """Patterns that backtrack would for hours, and meet the limit of a test; sound ones take milliseconds."""
    found = values.RULES[rule]
    for start, repeated in itertools.product(
        ["a", "1", "a[", "a<", "a==", ""], ["a", "1", "a-", "1.", "==1,", "a,"]
    ):
        text = start + repeated * found.limit * 10
        assert not found.allows(text[: found.limit - 1] + "\n")
        assert not re.fullmatch(found.pattern, text[: found.limit * 10 - 1] + "\n", re.ASCII)


@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    assert_only_recipe_errors(data.decode("latin-1"))
    assert_only_recipe_errors(data.decode("utf-8", "surrogateescape"))
