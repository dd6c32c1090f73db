"""Shell text as words and commands: of installations, and of any script."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import RecipeError
from imagefactory.model import SourceLocation
from imagefactory.recipes.shell_words import (
    MOST_COMMANDS,
    RunCommand,
    ShellCommand,
    read_commands,
    read_shell,
    split_shell_words,
)
from tests.made.diagnostics import reports

START = SourceLocation(file="f", line=3, column=5)


def commands(text: str, *, joined: bool = False, **variables: str) -> list[RunCommand]:
    return list(read_commands(text, START, variables, joined=joined))


def words(text: str, **variables: str) -> list[str]:
    (command,) = commands(text, **variables)
    return [word.text for word in command.words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pip install 'a b' \"c d\" e\\ f g'h'\"i\"", ["pip", "install", "a b", "c d", "e f", "ghi"]),
        ('echo "a\\"b\\n" \'\\n\' ""', ["echo", 'a"b\\n', "\\n", ""]),
        ("pip install \\\n  a \\\n b # what for", ["pip", "install", "a", "b"]),
        ("a#b c", ["a#b", "c"]),
        ("x=$A ${A} \"$A\" '$A' pre${A}post", ["x=1", "1", "1", "$A", "pre1post"]),
        ('pip $MANY "$MANY"', ["pip", "a", "b", "a b"]),
        ("${NO:-d} ${A:-d} ${A:+s} ${NO:-$A}", ["d", "1", "s", "1"]),
        ("cmd 2>&1 >/dev/null </dev/null a", ["cmd", "a"]),
        ("cmd <<< x a", ["cmd", "a"]),
    ],
)
def test_words_are_a_shell_s(text: str, expected: list[str]) -> None:
    assert words(text, A="1", MANY="a b") == expected


@pytest.mark.parametrize(
    "word", ["$(ls)", "`ls`", "$NO", '"x$(a "b" (c))y"', "${A%%x}", "$1", "$((1+2))", "a${NO}"]
)
def test_what_only_a_shell_knows_is_kept_as_written(word: str) -> None:
    (command,) = commands(f"pip install {word} more", A="1")
    assert [(one.text, one.known) for one in command.words] == [
        ("pip", True),
        ("install", True),
        (word, False),
        ("more", True),
    ]


@pytest.mark.parametrize(
    ("text", "plain", "doubtful"),
    [
        ("a && b; c", ["a", "b", "c"], []),
        ("a || b && c", ["a", "c"], ["b"]),
        ("a | b && c", ["c"], ["a | b"]),
        ("if a; then b; fi; c", ["c"], ["if a; then b; fi"]),
        ("for x in 1 2; do\n b $x\ndone\nc", ["c"], ["for x in 1 2; do b $x done"]),
        ("f() { a; }\nb", ["b"], ["f() { a; }"]),
        ("case x in a) b;; *) c;; esac && d", ["d"], ["case x in a) b;; *) c;; esac"]),
        ("[ -f x ] && b\nc", ["[ -f x ]", "c"], ["b"]),
        ("(a; b) && { c; }", ["a", "b", "c"], []),
        ("while a; do if b; then c; fi; done", [], ["while a; do if b; then c; fi; done"]),
        ("if a; then b", [], ["if a; then b"]),
    ],
)
def test_what_always_runs_is_plain(text: str, plain: list[str], doubtful: list[str]) -> None:
    found = commands(text)
    assert [" ".join(one.text for one in command.words) for command in found if command.plain] == plain
    assert [command.text for command in found if not command.plain] == doubtful


def test_every_word_has_its_place() -> None:
    first, second = commands("a \\\n  b && \\\n c 'd'", joined=True)
    assert [str(word.where) for word in (*first.words, *second.words)] == ["f:3:5", "f:4:3", "f:5:2", "f:5:4"]


def test_a_here_document_belongs_to_its_command() -> None:
    first, second = commands("cat <<'X' > y\n b\nX\nc <<-Z\n\td\n\tZ\n")
    assert (first.script, [*map(str, first.sent)], str(first.script_where)) == (" b", [">y"], "f:4:1")
    assert (second.script, [word.text for word in second.words]) == ("\td", ["c"])


def test_a_bound_without_quotes_is_a_file() -> None:
    (command,) = commands("pip install torch>=2,<3 a < 2 2>/dev/null b1>=3")
    assert [word.text for word in command.words] == ["pip", "install", "torch", "a", "b1"]
    assert [(str(one), one.word and one.word.text, one.joined) for one in command.sent] == [
        (">=2,", "torch", True),
        ("<3", "torch", True),
        ("<2", "a", False),
        (">=3", "b1", True),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb 'c", "f:4:3 quote-unclosed"),
        ('b "c', "f:3:7 quote-unclosed"),
        ("a $(b", "f:3:8 bracket-unclosed"),
        ("cat <<X\na\n", "heredoc-unclosed"),
        ("a\n" * (MOST_COMMANDS + 1), f"too-many-commands {MOST_COMMANDS}"),
        ("x" * 5000, "word-too-long 4096"),
        ("$LONG " * 2000, "3:6298 variables-too-long"),
    ],
)
def test_what_is_no_script_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        commands(text, LONG="x" * 1000)
    assert reports(raised.value.diagnostics, said), raised.value


def test_a_dockerfile_s_words_have_no_operators() -> None:
    found = split_shell_words("A=1;b C='d & e' \\\n F=$A", START, {"A": "x y"})
    assert [word.text for word in found] == ["A=1;b", "C=d & e", "F=x y"]


@given(st.text(alphabet="ab $(){}'\"`\\\n;&|<>#=-if fi do done case esac", max_size=60), st.booleans())
def test_any_text_is_read_or_refused(text: str, joined: bool) -> None:
    with suppress(RecipeError):
        for command in read_commands(text, START, {"a": "b"}, joined=joined):
            assert command.words or command.script or command.text


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
        ("a <(b c) &>> d\r\ne", [["a"], ["b", "c"], ["e"]]),
        ("a $(b ')' \"(\") c", [["a", "$(b ')' \"(\")", "c"]]),
        ("a 'b", [["a", "b"]]),
        ("a <<X\nb", [["a"]]),
        ("a \"b$\" c", [["a", "b$", "c"]]),
        ("a ''", [["a", ""]]),
    ],
)  # fmt: skip
def test_words_of_any_script(script: str, commands: list[list[str]]) -> None:
    assert texts(script) == commands


def test_where_words_stand() -> None:
    (command,) = read_shell("#!/bin/sh\n\n  run 'a\nb' \\\n   c").commands
    assert [(word.where.line, word.where.column) for word in command.words] == [(3, 3), (3, 7), (5, 4)]


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
        ("A=1 I=$A.sif\nrun $I", "1.sif", True),
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
def test_any_text_is_read_as_a_script(script: str) -> None:
    lines = script.count("\n") + 1
    for command in read_shell(script).commands:
        assert command.words
        assert all(1 <= word.where.line <= lines and word.where.column >= 1 for word in command.words)
