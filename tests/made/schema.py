"""The JSON schemas of recipes/, and whether they accept a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parents[2] / "recipes"


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


class Loader(yaml.SafeLoader):
    """YAML 1.2 as editors read it: `on` is a word."""


Loader.yaml_implicit_resolvers = {
    letter: [(tag, rule) for tag, rule in rules if letter not in "oO" or not tag.endswith(":bool")]
    for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def schema_accepts(text: str, name: str = "recipe.schema.json") -> bool:
    return bool(Draft202012Validator(schema(name)).is_valid(yaml.load(text, Loader=Loader)))
