"""Parse shell text to simple commands, whose words keep their location. Nothing is run.

Quotes, known variables, line continuations, operators and here-documents follow POSIX (Shell Command
Language, 2.2 to 2.9); arrays and redirections follow bash(1).

    split_shell_words  the words of a Dockerfile's line
    read_commands      the commands of an installation, strictly: an open quote is an error. Commands in
                       conditions, loops, functions and pipes are not `plain`
    read_shell         all commands of any script that a person runs: nothing in it is an error

A word is not `known` if only a running shell can decide it: it has `$(...)`, or a variable without a value.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from imagefactory.model import SourceLocation
from imagefactory.recipes.yaml_tree import recipe_problem

MOST_COMMANDS = 5_000
MOST_CHARACTERS = 4096
"""The most characters of a word, because variables in variables can grow without end."""
_MOST_EXPANDED = 1024 * 1024
_OPERATOR = re.compile(r"&&|\|\||;;|[;&|()\n]")
_REDIRECT = re.compile(r"[0-9]*(?:<<<|<<-?|<[&>]?|>[>&|]?)|&>>?")
_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?([-+])((?:[^{}]|\{[^{}]*\})*))?\})", re.ASCII
)
_OPENERS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_PASSED = ("then", "else", "elif", "do", "!", "time")
_GROUPS = ("(", "{")
_INSIDE = re.compile(r'\\|[^"\\$`]+')
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BEFORE = ("if", "while", "until", "{", *_PASSED, "exec", "nohup", "command", "builtin")
_SETS = ("export", "declare", "typeset", "local", "readonly", "read", "unset", "for", "printf", "mapfile")


class _Piece(NamedTuple):
    """A part of a word. `name` is its variable, `splits` whether a shell splits it at blanks."""

    text: str
    known: bool = True
    name: str = ""
    splits: bool = False


@dataclass(frozen=True, slots=True)
class RunWord:
    """A word without quotes. A word that is not `known` is unchanged, or partly expanded by `read_shell`."""

    text: str
    where: SourceLocation
    known: bool = True
    pieces: tuple[_Piece, ...] = field(default=(), repr=False, compare=False)

    def after(self, count: int) -> RunWord:
        """Return the value in `--option=value`, or in `NAME=value`."""
        return replace(self, text=self.text[count:])


@dataclass(frozen=True, slots=True)
class ShellRedirect:
    """A file that is read (`<`) or written (`>`), `joined` to the `word` before it as in `numpy<2`."""

    operator: str
    target: str
    word: RunWord | None
    joined: bool

    def __str__(self) -> str:
        return f"{self.operator}{self.target}"


@dataclass(slots=True, kw_only=True)
class RunCommand:
    """A command: its source `text` on one line, its here-document `script`, and its files `sent`."""

    where: SourceLocation
    text: str = ""
    words: list[RunWord] = field(default_factory=list)
    plain: bool = True
    script: str = ""
    script_where: SourceLocation | None = None
    sent: list[ShellRedirect] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """A simple command, without redirections and words such as `then`. `sets` are its own variables."""

    words: tuple[RunWord, ...]
    sets: Mapping[str, RunWord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """The commands of a script in their order, and the variables that it sets for all of them."""

    commands: tuple[ShellCommand, ...]
    sets: Mapping[str, RunWord]


def split_shell_words(text: str, location: SourceLocation, variables: Mapping[str, str]) -> list[RunWord]:
    """Return words without operators, as in Dockerfiles. Raises RecipeError for an unclosed quote."""
    return list(_ShellReader(text, location, variables, ends=" \t\n").rest())


def read_commands(
    text: str, location: SourceLocation, variables: Mapping[str, str], *, joined: bool
) -> Iterator[RunCommand]:
    """Yield the commands of a script. `variables` is read again for each. Raises RecipeError.

    With `joined` the caller joins lines that end in a backslash, comments included.
    """
    return _RunScript(_ShellReader(text, location, variables, ends=_ENDS, joined=joined)).commands()


def read_shell(text: str) -> Shell:
    """Return all commands of a script, also those in its conditions, functions and pipes.

    A variable is known if the script sets it once, to a literal, outside of any condition.
    """
    start = SourceLocation(file="", line=1, column=1)
    reader = _ShellReader(text.replace("\r\n", "\n"), start, {}, ends=_ENDS, loose=True)
    all_words = list(_RunScript(reader).all_words())
    values = _constants(all_words)
    commands: list[ShellCommand] = []
    sets: dict[str, RunWord] = {}
    for raw in all_words:
        words = [_fill(word, values) for word in raw]
        count = 0
        while count < len(words) and (_ASSIGNED.match(words[count].text) or words[count].text in _BEFORE):
            count += 1
        assignments = _assignments(words[:count])
        rest = words[count:]
        if rest:
            commands.append(ShellCommand(words=tuple(rest), sets=assignments))
            assignments = _assignments(rest[1:]) if rest[0].text == "export" else {}
        sets |= assignments
    return Shell(commands=tuple(commands), sets=sets)


def _assignments(words: Sequence[RunWord]) -> dict[str, RunWord]:
    matches = ((word, _ASSIGNED.match(word.text)) for word in words)
    return {match[1]: word.after(match.end()) for word, match in matches if match}


def _constants(commands: Sequence[Sequence[RunWord]]) -> Mapping[str, str]:
    """Return the variables that are set once, to a literal, at a command that always runs."""
    times: Counter[str] = Counter()
    literals: dict[str, RunWord] = {}
    depth = 0
    for words in commands:
        first = words[0].text
        depth += (first in _OPENERS or first == "{") - (first in (*_OPENERS.values(), "}"))
        assigned = [match for word in words if (match := _ASSIGNED.match(word.text))]
        times.update(match[1] for match in assigned)
        if first in _SETS:
            names = (_NAME.match(word.text) for word in words[1:] if not _ASSIGNED.match(word.text))
            times.update(name[0] for name in names if name)
        if not depth and len(assigned) == len(words) - (first == "export"):
            for word in words:
                if (match := _ASSIGNED.match(word.text)) and match[2] == "=":
                    literals[match[1]] = word
    values: dict[str, str] = {}
    for name, word in literals.items():  # in the order of the script: one may be in the next
        filled = _fill(word, values)
        if times[name] == 1 and filled.known and len(filled.text) <= MOST_CHARACTERS:
            values[name] = filled.text[len(name) + 1 :]
    return values


def _fill(word: RunWord, values: Mapping[str, str]) -> RunWord:
    """Return a word of `read_shell` with its variables replaced by their values."""
    known = all(piece.known or piece.name in values for piece in word.pieces)
    text = "".join(values.get(piece.name, piece.text) for piece in word.pieces)
    return RunWord(text, word.where, known)


_ENDS = " \t\n;&|()<>"


class _ShellReader:
    """A text and the reading position. With `loose` nothing is an error, and variables have no value yet."""

    def __init__(
        self,
        text: str,
        first: SourceLocation,
        variables: Mapping[str, str],
        *,
        ends: str,
        joined: bool = False,
        loose: bool = False,
    ) -> None:
        self.text, self.first, self.variables, self.ends = text, first, variables, ends
        self.joined, self.loose, self.shell = joined, loose, ends == _ENDS
        self.at = 0
        self._expanded = 0
        special = ends + "\\'\"$`" + ("*?[" if loose else "")
        self._plain = re.compile(f"[^{re.escape(special)}]+")
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(self, position: int) -> SourceLocation:
        row = bisect_right(self._starts, position) - 1
        column = position - self._starts[row] + (self.first.column if row == 0 else 1)
        return SourceLocation(file=self.first.file, line=self.first.line + row, column=column)

    def rest(self) -> Iterator[RunWord]:
        while self.skip():
            yield from self.words()

    def skip(self) -> bool:
        """Skip blanks and continued lines, and line ends if only words are read."""
        blanks = r"(?:[ \t]|\\\n)*" if self.shell else r"(?:[ \t\n]|\\\n)*"
        match = re.compile(blanks).match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.at < len(self.text)

    def words(self) -> list[RunWord]:
        """Return the word that begins here, or several words of an unquoted variable."""
        start = self.at
        pieces = tuple(self._pieces())
        location = self.place(start)
        if self.loose:
            return [RunWord("".join(piece.text for piece in pieces), location, pieces=pieces)]
        if sum(len(piece.text) if piece.known else 1 for piece in pieces) > MOST_CHARACTERS:
            message = f"a word has more than {MOST_CHARACTERS} characters"
            raise recipe_problem(location, "word-too-long", message, "shorten the word")
        if not all(piece.known for piece in pieces):
            return [RunWord(self.text[start : self.at], location, known=False)]
        parts = [""]
        for piece in pieces:
            first, *more = re.split(r"\s+", piece.text) if self.shell and piece.splits else [piece.text]
            parts[-1] += first
            parts += more
        solid = len(parts) == 1 and not all(piece.splits for piece in pieces)
        return [RunWord(part, location) for part in parts if part or solid]

    def _pieces(self) -> Iterator[_Piece]:
        start = self.at
        while self.at < len(self.text):
            position, char = self.at, self.text[self.at]
            if char == "(" and self.shell and _ASSIGNED.fullmatch(self.text, start, position):  # an array
                self.at = self.close(position)
                yield _Piece(self.text[position : self.at], known=False)
            elif char in self.ends:
                return
            elif char == "\\":
                self.at += 2
                if (piece := self.text[position + 1 : self.at]) not in ("", "\n"):
                    yield _Piece(piece)
            elif char in "'\"":
                yield from self._quoted(char)
            elif char in "$`":
                yield self._expansion(splits=True)
            elif self.loose and (char in "*?[" or (char == "~" and position == start)):
                self.at += 1
                yield _Piece(char, known=False)
            else:
                match = self._plain.match(self.text, position)
                assert match
                self.at = match.end()
                yield _Piece(match[0])

    def _quoted(self, quote: str) -> Iterator[_Piece]:
        start = self.at
        self.at += 1
        yield _Piece("")
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == quote:
                self.at += 1
                return
            if quote == "'":
                end = self.text.find(quote, self.at)
                piece = self.text[self.at : end if end >= 0 else None]
                self.at += len(piece)
                yield _Piece(piece.replace("\\\n", "") if self.joined else piece)
            elif char in "$`":
                yield self._expansion()
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                yield _Piece(self.text[self.at + 1].strip("\n"))
                self.at += 2
            else:
                match = _INSIDE.match(self.text, self.at)
                assert match
                self.at = match.end()
                yield _Piece(match[0])
        if not self.loose:
            message = f"a quote ({quote}) is not closed"
            raise recipe_problem(self.place(start), "quote-unclosed", message, f"add the closing {quote}")

    def _expansion(self, *, splits: bool = False) -> _Piece:
        """Return the value of `$...` or of a command in backticks, or its text without a value."""
        start = self.at
        if match := _VARIABLE.match(self.text, start):
            self.at = match.end()
            name, usual = match[1] or match[2], match[3]
            if self.loose:
                return _Piece(match[0], known=False, name="" if usual else name)
            value = self.variables.get(name)
            self._expanded += len(value or "")
            if self._expanded > _MOST_EXPANDED:
                message = f"the values of variables have more than {_MOST_EXPANDED} characters"
                raise recipe_problem(self.place(self.at), "variables-too-long", message, "use shorter values")
            if usual and (usual == "+") == bool(value):
                value = _VARIABLE.sub(lambda match: self.variables.get(match[1] or match[2], "$"), match[4])
                return _Piece(value, "$" not in value, splits=splits)
            return _Piece(value or "", value is not None, splits=splits)
        opened, known = self.text[start : start + 2], False
        if opened in ("$(", "${"):
            self.at = self.close(start + 1)
        elif opened[0] == "`":
            end = self.text.find("`", start + 1)
            self.at = len(self.text) if end < 0 else end + 1
        else:
            self.at += 2 if re.match(r"\$[0-9@*#?$!-]", opened) else 1
            known = len(opened) < 2 or opened[1] in self.ends
        return _Piece(self.text[start : self.at], known, splits=splits)

    def close(self, position: int) -> int:
        """Return the position after the bracket that closes the one at `position`."""
        opened, depth = self.text[position], 0
        for match in _BRACKETS[opened].finditer(self.text, position):
            depth += {opened: 1, ")": -1, "}": -1}.get(match[0], 0)
            if depth == 0:
                return match.end()
        if self.loose:
            return len(self.text)
        message = f"a bracket ({opened}) is not closed"
        raise recipe_problem(self.place(position), "bracket-unclosed", message, "add the closing bracket")


_BRACKETS = {
    "(": re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<=\s)#[^\n]*|[()]""", re.DOTALL),
    "{": re.compile(r"\\.|[{}]", re.DOTALL),
}
"""The characters that open, close or hide a bracket."""


class _RunScript:
    """Simple commands, and the blocks around them."""

    def __init__(self, reader: _ShellReader) -> None:
        self.reader = reader
        self.blocks: list[str] = []
        self.pending: list[tuple[RunCommand, str, bool]] = []  # here-documents whose lines are still to come

    def commands(self) -> Iterator[RunCommand]:
        reader, before, begun, doubtful, count = self.reader, "", -1, False, 0
        while reader.skip() or begun >= 0:
            count += 1
            if count > MOST_COMMANDS:
                message = f"the script has more than {MOST_COMMANDS} commands"
                raise recipe_problem(reader.first, "too-many-commands", message, "split the script")
            start, inside = reader.at, self._conditional()
            command, operator = self._simple()
            self._open_and_close(command, operator)
            ended = reader.at >= len(reader.text)
            if inside or self._conditional() or before == "|" or operator == "|":
                begun = start if begun < 0 else begun
                if not ended and (self._conditional() or operator == "|"):
                    before = operator
                    continue
                block = RunCommand(where=reader.place(begun), text=self._source(begun), plain=False)
                begun = -1
                if block.text:
                    yield block
            elif command.words or command.script:
                command.plain = before != "||" and not doubtful
                yield command
            tested = bool(command.words) and command.words[0].text in ("[", "[[", "test")
            doubtful = operator in ("&&", "||") and (doubtful or tested)
            before = operator
            if ended:
                return

    def all_words(self) -> Iterator[list[RunWord]]:
        """Yield the words of each simple command."""
        while self.reader.skip():
            if words := self._simple()[0].words:
                yield words

    def _conditional(self) -> bool:
        return any(block not in _GROUPS for block in self.blocks)

    def _source(self, start: int) -> str:
        return re.sub(r"(?:\s|\\\n)+", " ", self.reader.text[start : self.reader.at]).strip(" ;&|\n")

    def _simple(self) -> tuple[RunCommand, str]:
        """Return the command that begins here, and the operator that ends it."""
        reader, operator = self.reader, ""
        start = reader.at
        command = RunCommand(where=reader.place(start))
        while reader.skip():
            if reader.text[reader.at] == "#":
                self._comment()
            elif match := _REDIRECT.match(reader.text, reader.at):
                joined = reader.at > start and not reader.text[reader.at - 1].isspace()
                reader.at = match.end()
                self._redirect(command, match[0], joined=joined)
            elif match := _OPERATOR.match(reader.text, reader.at):
                command.text = self._source(start)
                reader.at = match.end()
                operator = match[0]
                break
            else:
                command.words += reader.words()
        command.text = command.text or self._source(start)
        if operator == "\n":
            self._here_documents()
        return command, operator

    def _comment(self) -> None:
        line = r"(?:\\\n|[^\n])*" if self.reader.joined else r"[^\n]*"
        match = re.compile(line).match(self.reader.text, self.reader.at)
        self.reader.at = match.end() if match else self.reader.at

    def _redirect(self, command: RunCommand, operator: str, *, joined: bool) -> None:
        reader = self.reader
        if not reader.skip():
            return
        if reader.text[reader.at] == "(":  # the output of another command as a file
            reader.at = reader.at if reader.loose else reader.close(reader.at)
            return
        target = next((word.text for word in reader.words()), "")
        plain = operator.lstrip("0123456789")
        if plain in ("<<", "<<-"):
            self.pending.append((command, target, plain == "<<-"))
        elif target != "/dev/null" and not plain.endswith("&") and plain != "<<<":
            word = command.words[-1] if command.words else None
            command.sent.append(ShellRedirect(plain, target, word, joined))

    def _here_documents(self) -> None:
        reader = self.reader
        for command, end, tabs in self.pending:
            start, lines = reader.at, []
            while True:
                if reader.at >= len(reader.text):
                    if reader.loose:
                        break
                    message = f"a here-document (<<{ascii(end)[1:-1]}) does not end"
                    raise recipe_problem(
                        command.where, "heredoc-unclosed", message, f"add the line {ascii(end)[1:-1]}"
                    )
                line = self._line()
                if (line.lstrip("\t") if tabs else line) == end:
                    break
                lines.append(line)
            command.script, command.script_where = "\n".join(lines), reader.place(start)
        self.pending = []

    def _line(self) -> str:
        end = self.reader.text.find("\n", self.reader.at)
        end = len(self.reader.text) if end < 0 else end
        line = self.reader.text[self.reader.at : end]
        self.reader.at = end + 1
        return line

    def _open_and_close(self, command: RunCommand, operator: str) -> None:
        words, blocks, reader = command.words, self.blocks, self.reader
        while words:
            first = words[0].text
            if first in _OPENERS:
                blocks.append(_OPENERS[first])
                break
            if first == "{":
                blocks.append("{")
            elif first == "}" or (blocks and first == blocks[-1]):
                if blocks and blocks[-1] in (first, "{"):
                    blocks.pop()
                if blocks and blocks[-1] == "function":
                    blocks.pop()
            elif first not in _PASSED:
                break
            words.pop(0)
        if operator == "(":
            if words and reader.text.startswith(")", reader.at):
                reader.at += 1
                blocks.append("function")
            else:
                blocks.append("(")
        elif operator == ")" and blocks and blocks[-1] == "(":
            blocks.pop()
