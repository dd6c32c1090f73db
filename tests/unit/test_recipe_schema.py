"""The JSON schemas that editors use say the same as the parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from imagefactory import recipes
from imagefactory.errors import RecipeError

FOLDER = Path(__file__).parents[2] / "recipes"
FILES = sorted(path for path in FOLDER.glob("*.yaml"))

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
environment: {A: b}
matrix:
  - version: "2.3"
    cuda: ["12.1"]
"""


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


def schema_accepts(text: str, name: str = "recipe.schema.json") -> bool:
    return bool(Draft202012Validator(schema(name)).is_valid(yaml.safe_load(text)))


def parser_accepts(text: str) -> bool:
    try:
        recipes.parse_recipe(text, "recipes/x.yaml")
    except RecipeError:
        return False
    return True


@pytest.mark.parametrize("name", ["recipe.schema.json", "bases.schema.json"])
def test_the_schema_is_sound_and_says_the_parsers_rules(name: str) -> None:
    Draft202012Validator.check_schema(schema(name))
    for rule, written in schema(name)["$defs"].items():
        if rule == "row":
            continue
        allowed = recipes.RULES[rule.replace("-", " ")]
        if "enum" in written:
            assert written["enum"] == list(
                {"source": recipes.SOURCES, "platform": recipes.PLATFORMS, "check": recipes.SMOKE_CHECKS}[
                    rule
                ]
            )
        else:
            assert (written["pattern"], written["maxLength"]) == (f"^(?:{allowed.pattern})$", allowed.limit)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_trees_files_are_valid_and_name_their_schema(path: Path) -> None:
    name = "bases.schema.json" if path.name == recipes.BASES_FILE else "recipe.schema.json"
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# yaml-language-server: $schema={name}\n")
    assert schema_accepts(text, name)


def test_a_scaffold_is_valid() -> None:
    assert schema_accepts(recipes.scaffold("jax", recipes.read_bases(FOLDER)))


def test_the_sample_is_accepted_by_both() -> None:
    assert schema_accepts(RECIPE)
    assert parser_accepts(RECIPE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("packages", "pakages"),
        ("    cuda", "    cudda"),
        ("framework: torch\n", ""),
        ('capabilities: ["8.0"]', "capabilities: []"),
        ('"2.3"', "2.3"),
        ('"2.3"', '">=2.3"'),
        ('["12.1"]', "[12.1]"),
        ('["12.1"]', "[]"),
        ('["12.1"]', '["12.1", "12.1"]'),
        ('"3.11"', "3.11"),
        ("[numpy]", "numpy"),
        ("[numpy]", '["numpy @ https://x/y.whl"]'),
        ("[numpy]", '["numpy; os_name"]'),
        ("[numpy]", '["-r x"]'),
        ("[numpy]", "[numpy]\nconstraints: [numpy]"),
        ("[numpy]", "[numpy]\nchecks: [gpu-burn]"),
        ("family: pytorch", "family: no"),
        ("family: pytorch", "family: PyTorch"),
        ("family: pytorch", f"family: {'a' * 41}"),
        ("small", '"{{7*7}}"'),
        ("small", '"a\\nRUN id"'),
        ("small", ""),
        ("source: pypi", "source: conda"),
        ("linux/amd64", "linux/arm64"),
        ("{A: b}", "{a: b}"),
        ("{A: b}", "{A: 1}"),
        ("{A: b}", "{A: $x}"),
        ("{A: b}", "{PATH: x}"),
        ("{A: b}", "{NVIDIA_X: x}"),
        ("{A: b}", "[A]"),
    ],
)
def test_faults_are_refused_by_both(old: str, new: str) -> None:
    text = RECIPE.replace(old, new, 1)
    assert text != RECIPE
    assert not parser_accepts(text)
    assert not schema_accepts(text)
