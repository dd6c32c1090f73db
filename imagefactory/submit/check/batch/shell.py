"""The commands of a shell script, with where each word stands. Nothing is run, and nothing is guessed. Pure.

Words are known where nothing is filled in when the script runs: literals, and variables that the whole script
sets once, to a literal, outside of any condition. Here-documents, arithmetic and the inside of `$(...)` are
passed over. Source: POSIX, "Shell Command Language", and bash(1).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_FILLED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)")
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select", "{"), ("fi", "esac", "done", "}")
_BEFORE = (
    "if",
    "while",
    "until",
    "{",
    "then",
    "else",
    "elif",
    "do",
    "!",
    "time",
    "exec",
    "nohup",
    "command",
    "builtin",
)
_SETS = ("export", "declare", "typeset", "local", "readonly", "read", "unset", "for", "printf", "mapfile")
_ENDS = ";&|()\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word and where it begins. `text` is as the shell makes it; where it is not `known`, as it is
    written, without the quotes. `begin` is what it certainly begins with, up to the first unknown part."""

    text: str
    line: int
    column: int
    known: bool
    begin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """A simple command, without redirections and words such as `then`. `sets` are variables for it alone."""

    words: tuple[Word, ...]
    sets: Mapping[str, Word]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """The commands in the order in which they stand, and the variables that hold for all of the script."""

    commands: tuple[ShellCommand, ...]
    sets: Mapping[str, Word]


@dataclass(slots=True)
class _Raw:
    """A word being read: literal text, or the name of a variable (empty for what is never known)."""

    line: int
    column: int
    parts: list[tuple[bool, str, str]] = field(default_factory=list)

    def literal(self, text: str) -> None:
        if self.parts and self.parts[-1][0]:
            text = self.parts.pop()[1] + text
        self.parts.append((True, text, text))

    def filled(self, name: str, written: str) -> None:
        self.parts.append((False, name, written))

    @property
    def text(self) -> str:
        return "".join(written for _, _, written in self.parts)


def read_shell(text: str) -> Shell:
    """All commands of a script."""
    raw = list(_Lexer(text).commands())
    values = _values(raw)
    commands: list[ShellCommand] = []
    sets: dict[str, Word] = {}
    for words in raw:
        made = [_word(one, values) for one in words]
        own: dict[str, Word] = {}
        depth = 0
        while depth < len(made) and (
            (found := _ASSIGNED.match(made[depth].text)) or made[depth].text in _BEFORE
        ):
            if found:
                own[found[1]] = _after(made[depth], found.end())
            depth += 1
        if depth < len(made):
            commands.append(ShellCommand(words=tuple(made[depth:]), sets=own))
            if made[depth].text == "export":
                own = {
                    found[1]: _after(one, found.end())
                    for one in made[depth + 1 :]
                    if (found := _ASSIGNED.match(one.text))
                }
                sets |= own
        else:
            sets |= own
    return Shell(commands=tuple(commands), sets=sets)


def _after(word: Word, count: int) -> Word:
    return Word(
        text=word.text[count:],
        line=word.line,
        column=word.column,
        known=word.known,
        begin=word.begin[count:],
    )


def _values(commands: Sequence[Sequence[_Raw]]) -> Mapping[str, str]:
    """Variables that are set once, to a literal, where the script certainly comes by."""
    times: Counter[str] = Counter()
    found: dict[str, list[tuple[bool, str, str]]] = {}
    depth = 0
    for words in commands:
        texts = [one.text for one in words]
        depth += sum(one in _OPENS for one in texts[:1]) - sum(one in _CLOSES for one in texts[:1])
        sets = texts[0] in _SETS
        assigned = [one for one in words if _ASSIGNED.match(one.text)]
        alone = len(assigned) == len(words) or (texts[0] == "export" and len(assigned) == len(words) - 1)
        for one in words[1:] if sets else ():
            if match := _NAME.match(one.text):
                times[match[0]] += 0 if one in assigned else 1
        for one in assigned:
            match = _ASSIGNED.match(one.text)
            assert match is not None
            times[match[1]] += 1
            if alone and not depth and match[2] == "=" and one.parts[0][0]:
                first = one.parts[0][1].partition("=")[2]
                found[match[1]] = [(True, first, first), *one.parts[1:]]
    values: dict[str, str] = {}
    for name, parts in found.items():  # in the order of the script: one may stand in the next
        filled = [text if literal else values.get(text) for literal, text, _ in parts]
        if times[name] == 1 and all(one is not None for one in filled):
            values[name] = "".join(one or "" for one in filled)
    return values


def _word(raw: _Raw, values: Mapping[str, str]) -> Word:
    made, begin, known = [], "", True
    for literal, text, written in raw.parts:
        value = text if literal else values.get(text)
        known = known and value is not None
        made.append(written if value is None else value)
        begin = "".join(made) if known else begin
    return Word(text="".join(made), line=raw.line, column=raw.column, known=known, begin=begin)


class _Lexer:
    """Reads a script letter by letter."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line, self.start = 1, 0
        self.documents: list[tuple[str, bool]] = []

    def commands(self) -> Iterator[list[_Raw]]:
        words: list[_Raw] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self._newline(2)
            elif letter == "#":
                self._skip_to("\n")
            elif letter in "<>" or (letter == "&" and self.text[self.at + 1 : self.at + 2] == ">"):
                self._redirect()
            elif letter in _ENDS:
                if letter == "\n":
                    self._newline(1)
                    self._pass_documents()
                else:
                    self.at += 1
                if words:
                    yield words
                words = []
            else:
                word = self._word()
                if not (word.text.isdigit() and self.text[self.at : self.at + 1] in ("<", ">")):
                    words.append(word)
        if words:
            yield words

    def _newline(self, count: int) -> None:
        self.at += count
        self.line, self.start = self.line + 1, self.at

    def _move(self, end: int) -> None:
        """To `end`, counting the lines that are passed."""
        passed = self.text[self.at : end]
        if "\n" in passed:
            self.line += passed.count("\n")
            self.start = self.at + passed.rindex("\n") + 1
        self.at = end

    def _skip_to(self, mark: str) -> None:
        found = self.text.find(mark, self.at)
        self._move(len(self.text) if found < 0 else found)

    def _redirect(self) -> None:
        """Passes over `>file`, `2>&1`, `<<END` and `<<<word`; `<(...)` opens a command."""
        mark = re.compile(r"<<<|<<-?|&?>>?[&|]?|<[&>]?").match(self.text, self.at)
        self.at = mark.end() if mark else self.at + 1
        if self.text[self.at : self.at + 1] == "(":
            return
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        if self.text[self.at : self.at + 1] in ("", *_ENDS):
            return
        word = self._word()
        if mark and mark[0] in ("<<", "<<-"):
            self.documents.append((word.text, mark[0] == "<<-"))

    def _pass_documents(self) -> None:
        for end, tabs in self.documents:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self._move(min(stop + 1, len(self.text)))
                if (line.lstrip("\t") if tabs else line).rstrip("\r") == end:
                    break
        self.documents = []

    def _word(self) -> _Raw:
        word = _Raw(line=self.line, column=self.at - self.start + 1)
        begun = self.at
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "\\":
                if self.text.startswith("\\\n", self.at):
                    self._newline(2)
                else:
                    word.literal(self.text[self.at + 1 : self.at + 2])
                    self._move(min(self.at + 2, len(self.text)))
            elif letter == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                word.literal(self.text[self.at + 1 : end])
                self._move(min(end + 1, len(self.text)))
            elif letter == '"':
                self.at += 1
                self._quoted(word)
            elif letter in "$`":
                self._filled(word)
            elif letter == "(" and self.text[self.at - 1] == "=" and self.at > begun:
                end = self._closed(self.at)  # an array
                word.filled("", self.text[self.at : end])
                self._move(end)
            elif letter in " \t\r<>" or letter in _ENDS:
                break
            else:
                if letter in "*?[" or (letter == "~" and self.at == begun):
                    word.filled("", letter)
                else:
                    word.literal(letter)
                self.at += 1
        if not word.parts:
            word.literal("")
        return word

    def _quoted(self, word: _Raw) -> None:
        word.literal("")
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter = self.text[self.at]
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                word.literal(self.text[self.at + 1 : self.at + 2].strip("\n"))
                self._move(self.at + 2)
            elif letter in "$`":
                self._filled(word)
            else:
                word.literal(letter)
                self._move(self.at + 1)
        self.at = min(self.at + 1, len(self.text))

    def _filled(self, word: _Raw) -> None:
        """`$NAME`, `${NAME}`; all else that is filled in is never known."""
        found = _FILLED.match(self.text, self.at + 1) if self.text[self.at] == "$" else None
        if found:
            word.filled(found[1] or found[2], self.text[self.at : found.end()])
            self.at = found.end()
            return
        mark = self.text[self.at : self.at + 2]
        if mark[0] == "`":
            end = self.text.find("`", self.at + 1)
            end = len(self.text) if end < 0 else end + 1
        elif mark in ("$(", "${"):
            end = self._closed(self.at + 1)
        else:
            end = min(self.at + 2, len(self.text))
        word.filled("", self.text[self.at : end])
        self._move(end)

    def _closed(self, start: int) -> int:
        """Where the bracket that opens at `start` is closed; the end of the text where it is not."""
        opens = self.text[start]
        closes, depth, at = {"(": ")", "{": "}"}[opens], 0, start
        while at < len(self.text):
            letter = self.text[at]
            if letter == "\\":
                at += 1
            elif letter == "'":
                end = self.text.find("'", at + 1)
                at = len(self.text) if end < 0 else end
            elif letter == opens:
                depth += 1
            elif letter == closes:
                depth -= 1
                if not depth:
                    return at + 1
            at += 1
        return len(self.text)
