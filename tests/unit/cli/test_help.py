"""Every command as a person meets it: in its group, on one whole line, with the options that all share."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from imagefactory import errors
from imagefactory.cli import cli
from imagefactory.cli.arguments import MANY_OPTIONS, CommandGroup, leaf_commands
from tests.made.command import Call

SILENT = {
    "run": "its output is the command's",
    "emulate": "the same",
    "completion": "it prints a script for a shell",
}
"""Commands without --json, and why."""
LAST = {
    "completion": "a shell reads it",
    "emulate": "its output is the command's",
    "export": "its report ends with the other program's command",
    "init": "its report ends with it: a folder may have to be entered first",
    "report": "it ends with the files",
    "run": "its output is the command's",
    "attest": "it ends with the signed statements",
    "audit": "it answers a question",
    "sbom": "it ends with the file",
    "config": "it answers a question",
    "show": "keys: it answers a question",
}
"""Commands that name no next one, and why."""
SHAPES = {
    "--user": "key: in the user's own file; run: as which user, as in Docker",
    "--check": "lock, render: what the project has; image audit: which checks",
    "--output": "where it is written: a file, a folder, or a name in this folder",
    "-o": "the same",
    "--gpus": "how many; run, verify: which",
}
"""Options that take another shape in another command: one meaning all the same."""


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


ALL = dict(commands())


VERBS = re.compile(
    "Accept|Add|Build|Check|Copy|Create|Emulate|Export|Join|Leave|List|Lock|Manage|Move|Print|Pull|Push|Remove|"
    "Replace|Restore|Revoke|Run|Search|Show|Sign|Start|Stop|Trust|Update|Verify|Write"
)
"""The words that a first line may begin with."""


def pages(group: click.Group = cli, context: click.Context | None = None) -> Iterator[click.Context]:
    """The context of each command and group."""
    context = context or group.context_class(group, info_name="imagefactory", max_content_width=80)
    yield context
    for name, command in group.commands.items():
        below = command.context_class(command, parent=context, info_name=name)
        yield from pages(command, below) if isinstance(command, click.Group) else (below,)


PAGES = {context.command_path: context for context in pages()}


@pytest.mark.parametrize("path", PAGES)
def test_a_help_page_fits_80_columns_and_breaks_no_word(path: str) -> None:
    text = PAGES[path].get_help()
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"[a-z]-$|\\ ", text, re.MULTILINE)
    assert all(line.count("`") % 2 == 0 for line in text.splitlines())


@pytest.mark.parametrize("path", [path for path in PAGES if path != "imagefactory"])
def test_help_begins_with_one_short_line_that_says_what_the_command_does(path: str) -> None:
    first, *more = inspect.cleandoc(PAGES[path].command.help or "").split("\n\n")
    assert len(first) <= 60
    assert VERBS.fullmatch(first.split()[0].rstrip(","))
    assert first.endswith(".")
    if not isinstance(PAGES[path].command, click.Group):
        assert more[0].startswith("\b\n"), "examples come next"


@pytest.mark.parametrize("path", PAGES)
def test_examples_in_help_name_commands_and_options_that_exist(path: str) -> None:
    text = (PAGES[path].command.help or "").replace("\\\n", " ")
    for line in re.findall(r"^ *imagefactory (.+?)(?:   .*)?$", text, re.MULTILINE):
        words = shlex.split(re.split(r" && | > ", line)[0])
        words = words[2:] if words[0] == "-C" else words
        own = words[: words.index("--")] if "--" in words else words
        command: click.Command = cli
        while isinstance(command, click.Group):
            command = command.commands[own.pop(0)]
        known = {name for option in command.params for name in option.opts}
        assert {word for word in own if re.match("-[a-zA-Z-]", word)} <= known, line


@pytest.mark.parametrize("path", PAGES)
def test_many_options_have_sections_and_common_ones_come_last(path: str) -> None:
    context = PAGES[path]
    options = [option for option in context.command.get_params(context) if isinstance(option, click.Option)]
    titles = re.findall(r"^([A-Z][A-Za-z ]+):$", context.get_help(), re.MULTILINE)
    if isinstance(context.command, click.Group):
        return
    if len(options) <= MANY_OPTIONS:
        assert titles == ["Options"]
    else:
        assert "Options" not in titles, "each option has a section"
        assert len(titles) > 2
        assert titles[-1] == "Common options"


@pytest.mark.parametrize("words", [(), ("image",), ("recipe",), ("key",)])
def test_help_shows_each_command_on_one_whole_line(words: tuple[str, ...]) -> None:
    text = CliRunner().invoke(cli, [*words, "--help"], terminal_width=80).output
    group = cli.commands[words[0]] if words else cli
    assert isinstance(group, CommandGroup)
    for name, command in group.commands.items():
        line = next(line for line in text.splitlines() if line.split()[:1] == [name])
        first = (command.help or "").split("\n\n")[0]
        assert " ".join(line.split()[1:]) == first.partition(". ")[0].rstrip(".")


def test_help_has_a_heading_for_each_purpose() -> None:
    text = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    found = re.findall(r"^([A-Z][a-z ]+):$", text, re.MULTILINE)
    assert found == ["Options", "Start", "Use images", "Build images", "Verify", "Run a site"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("biuld",), "did you mean `imagefactory build`?"),
        (("image", "lst"), "did you mean `imagefactory image list`?"),
        (("version",), "did you mean `imagefactory --version`?"),
        (("ls",), "did you mean `imagefactory list`?"),
        (("site", "leave"), "did you mean `imagefactory site remove`?"),
        (("find",), "did you mean `imagefactory search`?"),
        (("login",), "`docker login HOST`"),
        (("images",), "did you mean `imagefactory image list`?"),
        (("prune",), "did you mean `imagefactory image prune`?"),
        (("sweep", "colect"), "did you mean `imagefactory sweep collect`?"),
        (("status",), "did you mean `imagefactory sweep status`?"),
        (("frobnicate",), "`imagefactory --help` lists the commands"),
    ],
)
def test_an_unknown_command_has_a_suggestion(words: tuple[str, ...], hint: str, call: Call) -> None:
    said = call(*words)
    assert (said.code, said.error_codes) == (errors.EXIT_USAGE, ("command-unknown",))
    assert f"hint: {hint}" in said.err


def test_help_as_a_command_is_the_help_of_its_words(call: Call) -> None:
    for words in ((), ("build",), ("image", "list")):
        assert call("help", *words).out == call(*words, "--help").out
    assert call("help", "build", "more").error_codes == ("command-unknown",)


def test_help_lists_the_exit_codes(call: Call) -> None:
    listed = dict(line.split(maxsplit=1) for line in call("help", "exit-codes").out.splitlines())
    assert listed == {str(code): meaning for code, meaning in errors.EXIT_CODES.items()}


def test_every_command_can_be_quiet_and_answers_in_json() -> None:
    for name, command in ALL.items():
        spelt = [word for one in command.params for word in one.opts]
        assert {"-q", "--quiet"} <= set(spelt), name
        assert len(spelt) == len(set(spelt)), name
        assert ("--json" in spelt) == (name not in SILENT), name
    assert list(ALL.values()) == list(leaf_commands(cli))


def test_an_option_means_the_same_in_every_command() -> None:
    shapes: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for command in ALL.values():
        for one in command.params:
            if isinstance(one, click.Option):
                for word in one.opts:
                    shapes[word].add((one.is_flag, one.nargs, type(one.type).__name__))
    assert not {word for word, found in shapes.items() if len(found) > 1} - SHAPES.keys()


@pytest.mark.parametrize("name", ALL)
def test_wrong_words_are_an_error_in_json_too(name: str, call: Call) -> None:
    said = call(*name.split(), "--no-such-option", *([] if name in SILENT else ["--json"]))
    assert said.code == errors.EXIT_USAGE
    assert "no-such-option" in said.err
    if name not in SILENT:
        (error,) = json.loads(said.out)["errors"]
        assert (error["code"], error["exit_code"]) == ("invalid-arguments", errors.EXIT_USAGE)
        assert "no-such-option" in error["message"]


def test_every_command_ends_with_the_next_one() -> None:
    for name, command in ALL.items():
        assert command.callback is not None
        module = sys.modules[inspect.unwrap(command.callback).__module__]
        told = "print_next_command(" in inspect.getsource(module)
        assert told or name.split()[-1] in LAST, name


def test_the_next_command_is_told_to_people_alone(call: Call) -> None:
    name = "pytorch-2.3-cu121"
    last = call("show", name).err.splitlines()[-1]
    assert re.fullmatch(rf"next: imagefactory -C \S+ build {re.escape(name)}", last)
    for quiet in (("-q",), ("--json",)):
        assert call("show", name, *quiet).err == ""
