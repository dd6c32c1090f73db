"""The documentation's site: built without a warning, asks nobody for anything, and its reference is whole."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from jsonschema import Draft202012Validator

from docs.error_codes import find_errors
from docs.json_schemas import document_types, file_name
from imagefactory.cli import cli
from imagefactory.errors import EXIT_CODES
from imagefactory.settings.load import load_settings

ROOT = Path(__file__).parents[2]
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|video)[^>]*?\ssrc=[\"']?([^\"' >]+)"
    r"|<link[^>]*?\shref=[\"']?([^\"' >]+)"
    r"|url\([\"']?([^\"')]+)"
)


def test_the_site_is_built_strictly_asks_nobody_and_holds_the_whole_reference(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("sphinx-build")
    assert program.exists(), "requirements/dev.txt has packages that are not installed: ./setup.sh --tests"
    command = (program, "-q", "-W", "--keep-going")
    done = subprocess.run(
        (*command, "-c", "docs", "-d", tmp_path / "doctrees", ".", tmp_path / "site"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    site = tmp_path / "site"
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()

    loaded = list(what_is_loaded(site))
    assert len(loaded) > 100
    assert [row for row in loaded if re.match(r"(?:[a-z]+:)?//", row[1])] == []

    commands = words_of(site / "docs/reference/commands.html")
    assert [name for name in all_commands(cli) if f"\n{name}" not in commands] == []
    keys = set(words_of(site / "docs/reference/recipe-keys.html").split())
    assert schema_keys() - keys == set()
    settings = set(words_of(site / "docs/reference/settings.html").split())
    names = {name for name, _ in load_settings(directory=tmp_path, start=tmp_path, environ={}).rows()}
    assert len(names) > 15
    assert names - {"root"} - settings == set()
    codes = set(words_of(site / "docs/reference/exit-codes.html").split())
    assert {str(code) for code in EXIT_CODES} - codes == set()
    errors = set(words_of(site / "docs/reference/errors.html").split())
    assert {call.code for call in find_errors()} - {"", *errors} == set()
    page = (site / "docs/reference/json.html").read_text(encoding="utf-8")
    schemas = set(re.findall(r'href="\.\./\.\./(schemas/[^"]+)"', page))
    assert schemas == {f"schemas/{file_name(name)}" for name in document_types()}
    for schema in schemas:
        Draft202012Validator.check_schema(json.loads((site / schema).read_text(encoding="utf-8")))


def what_is_loaded(site: Path) -> Iterator[tuple[str, str]]:
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        for found in _LOADED.finditer(path.read_text(encoding="utf-8")):
            yield path.name, next(filter(None, found.groups()))


def words_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8")))


def all_commands(group: click.Group, name: str = "imagefactory") -> Iterator[str]:
    for word, command in group.commands.items():
        yield f"{name} {word}"
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{name} {word}")


def schema_keys() -> set[str]:
    schemas = (json.loads((ROOT / f"recipes/{name}.schema.json").read_text()) for name in ("recipe", "bases"))
    recipe, bases = schemas
    parts = (recipe, recipe["$defs"]["row"], bases["$defs"]["row"], bases["$defs"]["pulled-row"])
    return {key for part in parts for key in part["properties"]}
