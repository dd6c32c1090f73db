"""Check the documentation: its commands parse, its links work, its sentences are short, its words plain."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from imagefactory.cli import cli
from imagefactory.matrix.plan import AVOIDED as AVOIDED_RULE
from imagefactory.matrix.plan import SKIP_RULES
from imagefactory.model import CheckState, Outcome
from imagefactory.schedulers import cells
from imagefactory.suite import table as smoke
from imagefactory.suite.gpu import table as gpu
from imagefactory.trust.verdict import VerdictStatus
from tests.made.source import FILES, HOUSE, nodes

ROOT = HOUSE.parent
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


def console_lines(page: str) -> Iterator[str]:
    """Yield each line of the page's console blocks that runs imagefactory; a backslash continues a line."""
    for block in re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        for line in re.sub(r"\\\n *", "", block).splitlines():
            if re.match(r"(\$ )?imagefactory ", line):
                yield line


def usage_problems(words: list[str]) -> list[str]:
    """Parse a command line, and return what click would reject; files need not exist."""
    found = command_of(words)
    if found is None:
        return [f"no such command: {' '.join(words)}"]
    command, rest = found
    context = click.Context(command, info_name=command.name)
    try:
        values, extra, _ = command.make_parser(context).parse_args(list(rest))
        for parameter in command.params:
            value = values.get(parameter.name or "")
            if isinstance(parameter.type, click.Choice | click.IntRange) and isinstance(value, str):
                parameter.type.convert(value, parameter, context)
            elif parameter.required and not value:
                return [f"{command.name}: {parameter.name} is missing"]
    except click.UsageError as error:
        return [f"{command.name}: {error.format_message()}"]
    return [f"{command.name}: unexpected {word}" for word in extra]


def test_every_command_to_copy_parses() -> None:
    lines = [(page, line) for page in PAGES for line in console_lines(page)]
    assert len(lines) > 100
    assert [
        (page, line, problem)
        for page, line in lines
        for words in calls(line)
        for problem in usage_problems(words)
    ] == []


SHELLS = (
    *ROOT.glob(".github/workflows/*.yml"),
    *ROOT.glob(".github/*.sh"),
    *ROOT.glob("imagefactory/shipped/**/*.yml"),
)


@pytest.mark.parametrize("path", SHELLS, ids=lambda path: path.name)
def test_every_command_of_a_workflow_parses(path: Path) -> None:
    text = re.sub(r"\\\n *", "", path.read_text())
    lines = re.findall(
        r"^(?: *-? *|(?! *#).*?bin/)imagefactory(?: -C [^ ]+)? ((?!--).*)$", text, re.MULTILINE
    )
    lines = [re.sub(r"\$\{\{.*?\}\}", "x", line) for line in lines]
    assert [
        (line, problem)
        for line in lines
        for words in calls(f"imagefactory {line}")
        for problem in usage_problems(words)
    ] == []


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


def test_every_command_is_named_on_a_page() -> None:
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in cli.commands if not re.search(rf"[`\s]{name}\b", pages)] == []


# --- language -------------------------------------------------------------------------------------

RECORDS = ("docs/architecture.md", "docs/benchmarks.md", "docs/dev/decisions.md", "benchmarks/README.md")
"""Pages that developers read: their sentences are not counted."""


def paragraphs(page: str) -> Iterator[str]:
    """Yield a page's prose: no code blocks, tables, headings or comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        lines = [line.strip() for line in part.splitlines() if not re.match(r"\s*(#|\||!\[|:|\{)", line)]
        yield re.sub(r"^([-*]|\d+\.) ", "", " ".join(lines).strip())


def sentence_lengths(page: str) -> list[int]:
    sentences = (row for text in paragraphs(page) for row in re.split(r"(?<=[.!?:])\s+", text))
    return [count for row in sentences if (count := len(row.split())) > 1]


def test_sentences_are_short() -> None:
    lengths = [count for page in PAGES if page not in RECORDS for count in sentence_lengths(page)]
    assert sum(lengths) / len(lengths) <= 15
    assert sum(count > 30 for count in lengths) <= 0.04 * len(lengths)


AVOIDED = {
    "alone": "only",
    "anew": "again, rebuild",
    "asks?|asked|asking": "request, require",
    "at hand": "available",
    "behind": "outdated",
    "believes?|believed": "trust",
    "beside": "next to, with",
    "borne": "retried, tolerated",
    "by hand": "manually",
    "factory|factories": "project",
    "folders?": "directory",
    "foretells?|foretold": "predict",
    "go on|goes on|went on": "continue",
    "heeded": "ignored",
    "held": "pinned, checked against",
    "holds?": "is valid, contains",
    "in hand": "in progress, queued",
    "in vain": "never succeeds",
    "is no": "is not a",
    "kinds?": "type",
    "lapses?|lapsed": "expire",
    "left out|passed over": "skipped, excluded",
    "lies in|lie in|stands in|stand in": "is in",
    "mends?|mended": "fix, repair",
    "nobody|whoever": "no one, anyone who",
    "proofs?|proven": "verdict, verified",
    "refused": "rejected",
    "rights": "permissions",
    "strangers'?": "untrusted",
    "tells?|told|telling": "print, report, show",
    "tried": "tested",
    "what there is": "available images",
    "wish|wishes": "request, requirement",
    "without a word": "silently",
}
"""Words that many readers do not know in this sense, and what to write instead."""

CORRECT = (
    r"Connection refused",
    r"Tried to allocate",
    r"\b(behind) (a|the|your) (proxy|firewall|load balancer)",
    r"\b(job|jobs|it) (is|are|was|stays) held",
    r"\bHTCondor holds",
    r"\b(hold|held) (jobs?|reason|\(|no-match)",
    r"\bask (your|the) (\w+'s )?(facilitator|center|administrator|users|owner|operator|staff|maintainers)",
    r"\b(ask|asks|asked) for\b",
    r"\bthere (is|was) no\b",
)
"""Where an avoided word is the field's own term."""
_AVOIDED = re.compile(rf"(?<![\w`./-])(?:{'|'.join(AVOIDED)})(?![\w`./=-])", re.IGNORECASE)


def avoided_words(text: str) -> list[str]:
    """Return the avoided words in a text, each with what follows it; code spans are skipped."""
    text = re.sub("|".join(CORRECT), "", re.sub(r"`[^`]*`", "", text), flags=re.IGNORECASE)
    return [" ".join(text[found.start() :].split()[:4]) for found in _AVOIDED.finditer(text)]


PINNED = ("build/steps.py", "build/conda_install.py", "lock/conda/file.py", "lock/pypi/requirements.py")
"""Their strings are parts of locks and definitions, so new words there would change all digests."""


def user_strings() -> Iterator[str]:
    """Yield the strings of imagefactory/ that have a space and are not docstrings, and all help pages."""
    for path in set(FILES) - {HOUSE / name for name in PINNED}:
        docstrings = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        for node in nodes(path):
            if id(node) not in docstrings and isinstance(node, ast.Constant):
                text = node.value
                if isinstance(text, str) and " " in text.strip():
                    yield text
    yield from (command.help or "" for command in walk(cli))


def walk(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield command
        if isinstance(command, click.Group):
            yield from walk(command)


def test_pages_use_plain_words() -> None:
    pages = [page for page in PAGES if page not in RECORDS]
    found = [(page, words) for page in pages for text in paragraphs(page) for words in avoided_words(text)]
    assert found == []


def test_messages_and_help_use_plain_words() -> None:
    found = [words for text in user_strings() for words in avoided_words(text)]
    assert found == []


def test_the_reference_names_every_outcome_rule_and_check() -> None:
    outcomes = (ROOT / "docs/reference/outcomes.md").read_text(encoding="utf-8")
    swept = (cells.NEWEST, cells.BLOCKED, cells.QUEUED, cells.UNCOLLECTED, cells.CLAIMED, cells.MIG)
    words = {
        *Outcome,
        *VerdictStatus,
        *CheckState,
        *SKIP_RULES,
        AVOIDED_RULE,
        *swept,
        cells.BUDGET,
        cells.BAD_MACHINE,
    }
    assert {word for word in words if f"`{word}`" not in outcomes} == set()
    suite = (ROOT / "docs/reference/suite.md").read_text(encoding="utf-8")
    parts = {*smoke.CHECKS, *gpu.PARTS, *gpu.PARTS["several"]} - {"several"}
    assert {part for part in parts if f"`{part}`" not in suite} == set()


def test_the_site_is_accessible() -> None:
    from docs.conf import ROOT as CONFIGURED_ROOT
    from docs.conf import accessible, html_css_files, html_static_path

    table = '<div class="table-wrapper docutils container"><th class="head"><p></p></th></div>'
    page = (
        f'<aside class="sidebar-drawer"></aside>{table}<pre>a</pre><aside class="toc-drawer no-toc"></aside>'
    )
    result = accessible(page)
    assert re.findall(r"<(aside|div|pre) (aria-label|tabindex)=", result) == [
        ("aside", "aria-label"),
        ("div", "tabindex"),
        ("pre", "tabindex"),
        ("aside", "aria-label"),
    ]
    assert len(set(re.findall(r'aria-label="([^"]+)"', result))) == 2
    assert "<th" not in result
    assert accessible(result) == result
    for name in html_css_files:
        assert (CONFIGURED_ROOT / "docs" / html_static_path[0] / name).is_file()
