"""The commands of shell scripts: words, where they stand, and what only the running script knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.submit.check.batch.shell import ShellCommand, read_shell


def texts(script: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in read_shell(script).commands]


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        ("a b 'c d' \"e f\" g\\ h i\\\nj", [["a", "b", "c d", "e f", "g h", "ij"]]),
        ("a # b\nc#d", [["a"], ["c#d"]]),
        ("a && b || c; d | e & f", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("if a; then b; else c; fi", [["a"], ["b"], ["c"], ["fi"]]),
        ("exec time a b", [["a", "b"]]),
        ("A=1 B=2 a --x=3", [["a", "--x=3"]]),
        ("a > b 2>&1 < c &> d e", [["a", "e"]]),
        ("a <<END b\napptainer run x\nEND\nc", [["a", "b"], ["c"]]),
        ("a <<-'E F'\n\tb\n\tE F\nc <<< d e", [["a"], ["c", "e"]]),
        ("x=(a b\nc) ; d", [["d"]]),
        ('a "$(b "c d" | e)" f', [["a", '$(b "c d" | e)', "f"]]),
        ("a `b c` ${d:-e f} $((1 + 2))g", [["a", "`b c`", "${d:-e f}", "$((1 + 2))g"]]),
        ("(a; b)", [["a"], ["b"]]),
        ("a ''", [["a", ""]]),
    ],
)  # fmt: skip
def test_words(script: str, commands: list[list[str]]) -> None:
    assert texts(script) == commands


def test_where_words_stand() -> None:
    (command,) = read_shell("#!/bin/sh\n\n  run 'a\nb' \\\n   c").commands
    assert [(word.line, word.column) for word in command.words] == [(3, 3), (3, 7), (5, 4)]


def last(script: str) -> ShellCommand:
    return read_shell(script).commands[-1]


@pytest.mark.parametrize(
    ("script", "text", "known"),
    [
        ("I=a.sif\nrun $I", "a.sif", True),
        ("D=/x\nexport I=\"$D/a.sif\"\nrun ${I}", "/x/a.sif", True),
        ("I=a.sif; I=b.sif\nrun $I", "$I", False),
        ("if a; then\nI=a.sif\nfi\nrun $I", "$I", False),
        ("for I in a b; do\nrun $I\ndone\nrun $I", "$I", False),
        ("I=a\nread I\nrun $I", "$I", False),
        ("I=$(ls)\nrun $I", "$I", False),
        ("I=$1\nrun $I", "$I", False),
        ("I=a.sif run $I", "$I", False),
        ("I=(a b)\nrun $I", "$I", False),
        ("run ~/a.sif", "~/a.sif", False),
        ("run *.sif", "*.sif", False),
        ("run '$I'", "$I", True),
    ],
)  # fmt: skip
def test_what_is_known_before_it_runs(script: str, text: str, known: bool) -> None:
    word = last(script).words[-1] if "done" not in script else last(script).words[1]
    assert (word.text, word.known) == (text, known)


def test_variables_of_one_command_and_of_all() -> None:
    shell = read_shell("export A=1\nB=2\nC=3 run\n")
    assert {name: word.text for name, word in shell.sets.items()} == {"A": "1", "B": "2"}
    assert {name: word.text for name, word in shell.commands[-1].sets.items()} == {"C": "3"}


@given(st.text(alphabet="ab =$(){}'\"`\\\n<>&|;#*-", max_size=60))
def test_any_text_is_read_to_its_end(script: str) -> None:
    lines = script.count("\n") + 1
    for command in read_shell(script).commands:
        assert command.words
        assert all(1 <= word.line <= lines and word.column >= 1 for word in command.words)
