"""The pages for people: every command and option that they name is there, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from imagefactory.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
_CALL = re.compile(r"(?:^|[`$ (;&])imagefactory ([^`\n]*)")
_SHORT = re.compile(rf"`((?:{'|'.join(cli.commands)}) [^`\n]*)`")


def calls(text: str) -> Iterator[list[str]]:
    """The words of every call, to the end of its line, code span or comment; `lock --check` is one too."""
    for found in (*_CALL.finditer(text), *_SHORT.finditer(text)):
        part = re.split(r"\s+#\s|&&|\s>>?\s|;|\|", found[1])[0]
        try:
            yield shlex.split(part)
        except ValueError:  # an apostrophe of a sentence
            yield part.split()


def command_of(words: list[str]) -> tuple[click.Command, list[str]] | None:
    """The command that the words begin with, and what follows; None for prose (`imagefactory builds ...`)."""
    found: click.Command = cli
    while isinstance(found, click.Group) and words and words[0] in found.commands:
        found, words = found.commands[words[0]], words[1:]
    return None if found is cli else (found, words)


def test_files_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert text.count("\n") <= 120
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", text)) - {
        "cli/x.py",
        "stages/x.py",
        "report/x.py",
        "table.py",
    }
    assert len(named) > 30
    places = (ROOT, ROOT / "imagefactory")
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()


def test_the_architecture_draws_the_layers_that_are_held() -> None:
    drawn = re.search(r"```text\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = (
        [re.split(r"  +", line)[0].replace(" · ", " | ") for line in drawn[1].splitlines()] if drawn else []
    )
    assert rooms == [layer for layer in layers if layer != "__main__"]


def named_options(command: click.Command) -> set[str]:
    names = {"--help", "-h"}
    for parameter in command.params:
        names |= (
            {*parameter.opts, *parameter.secondary_opts} if isinstance(parameter, click.Option) else set()
        )
    return names


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_a_page_writes_is_there(page: str) -> None:
    faults = []
    for words in calls((ROOT / page).read_text(encoding="utf-8")):
        found = command_of(words)
        if found is None:
            continue
        command, rest = found
        own = rest[: rest.index("--")] if "--" in rest else rest
        written = [word.split("=")[0].rstrip(".,:)") for word in own if re.match(r"--?[a-z]", word)]
        after = {"--arguments": 1}  # what belongs to somebody else's program
        skip = {
            own[i + n]
            for i, word in enumerate(own)
            for n in range(1, after.get(word, 0) + 1)
            if i + n < len(own)
        }
        known = named_options(command)
        faults += [f"{command.name} {word}" for word in written if word not in known and word not in skip]
    assert faults == []


def test_console_blocks_name_commands_that_are_there() -> None:
    """Prose may say that imagefactory builds; a line to copy may not."""
    ours = [
        line
        for page in PAGES
        for block in re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        for line in block.splitlines()
        if re.match(r"(\$ )?imagefactory ", line)
    ]
    assert len(ours) > 60
    assert [line for line in ours if command_of(next(calls(line))) is None] == []


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings, as GitHub and the site write them."""
    plain = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    faults = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if "://" in link:
            continue
        where, _, anchor = link.partition("#")
        place = (ROOT / page).parent / where if where else ROOT / page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            faults.append(link)
    assert faults == []


def test_the_front_page_is_short() -> None:
    assert 600 <= len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800


def test_the_front_page_begins_with_what_sets_up_and_runs() -> None:
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks[:2] == [
        "./setup.sh && .venv/bin/imagefactory build pytorch-2.3-cu121\n",
        "./setup.sh --tests && tests/run\n",
    ]


def test_every_command_is_told_of_somewhere() -> None:
    told = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in cli.commands if not re.search(rf"[`\s]{name}\b", told)] == []


def test_nothing_is_told_twice() -> None:
    """What stands in two places is true in one of them before long. (The changelog tells what was.)"""
    seen: dict[str, str] = {}
    twice = []
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        words = re.findall(r"[\w.%'-]+", prose.lower())
        for start in range(len(words) - 11):
            run = " ".join(words[start : start + 12])
            if seen.setdefault(run, page) != page:
                twice.append(f"{seen[run]}, {page}: {run}")
    assert twice == []
