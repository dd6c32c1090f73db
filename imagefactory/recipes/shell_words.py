"""Shell text -> simple commands, whose words keep their places. Nothing is run.

Quotes, variables that are known, line continuations, operators and here-documents are read as POSIX has them
(Shell Command Language, 2.2 to 2.9). What only a running shell decides is told apart: a word that holds
`$(...)` or a variable that nobody set is not `known`, and commands in conditions, loops, functions and
pipes are not `plain`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from imagefactory.model import Where
from imagefactory.recipes.yaml_tree import refused

MOST_COMMANDS = 5_000
MOST_CHARACTERS = 4096
"""Of a word: variables made of variables grow without end."""
_MOST_EXPANDED = 1024 * 1024
_OPERATOR = re.compile(r"&&|\|\||;;|[;&|()\n]")
_REDIRECT = re.compile(r"[0-9]*(?:<<-?|>>|>&|<&|>\||[<>]|&>)")
_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?([-+])((?:[^{}]|\{[^{}]*\})*))?\})", re.ASCII
)
_OPENERS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_PASSED = ("then", "else", "elif", "do", "!", "time")
_GROUPS = ("(", "{")


@dataclass(frozen=True, slots=True)
class Word:
    """A word without its quotes; as written where it is not `known`, but to a shell that runs."""

    text: str
    where: Where
    known: bool = True


@dataclass(frozen=True, slots=True)
class Redirect:
    """A file that a command reads (`<`) or writes (`>`). `word` is the one before it, and `joined`: no blank
    stands between them, as in `numpy<2`."""

    operator: str
    target: str
    word: Word | None
    joined: bool

    def __str__(self) -> str:
        return f"{self.operator}{self.target}"


@dataclass(slots=True, kw_only=True)
class Command:
    """`text` is the source on one line, `script` its here-document, `sent` files that it reads or writes."""

    where: Where
    text: str = ""
    words: list[Word] = field(default_factory=list)
    plain: bool = True
    script: str = ""
    script_where: Where | None = None
    sent: list[Redirect] = field(default_factory=list)


def split_words(text: str, where: Where, variables: Mapping[str, str]) -> list[Word]:
    """Words without operators, as Dockerfiles have them. Raises RecipeError for a quote without its end."""
    return list(_Reader(text, where, variables, ends=" \t\n").rest())


def read_commands(
    text: str, where: Where, variables: Mapping[str, str], *, joined: bool
) -> Iterator[Command]:
    """The commands of a script; `variables` is asked anew at each. Raises RecipeError as `split_words` does.

    `joined`: lines that end in a backslash are one to whoever hands it over, comments included.
    """
    reader = _Reader(text, where, variables, ends=" \t\n;&|()<>")
    reader.joined = joined
    return _Script(reader).commands()


class _Reader:
    """A text, and how far it is read."""

    def __init__(self, text: str, first: Where, variables: Mapping[str, str], *, ends: str) -> None:
        self.text, self.first, self.variables, self.ends = text, first, variables, ends
        self.at = 0
        self.joined = False
        self._expanded = 0
        self._plain = re.compile(rf"[^{re.escape(ends)}\\'\"$`]+")
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]

    def place(self, at: int) -> Where:
        row = bisect_right(self._starts, at) - 1
        column = at - self._starts[row] + (self.first.column if row == 0 else 1)
        return Where(file=self.first.file, line=self.first.line + row, column=column)

    def rest(self) -> Iterator[Word]:
        while self.skip():
            yield from self.words()

    def skip(self) -> bool:
        """Passes blanks (here, line ends among them only where words alone are read) and continued lines."""
        blanks = r"(?:[ \t]|\\\n)*" if "|" in self.ends else r"(?:[ \t\n]|\\\n)*"
        found = re.compile(blanks).match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.at < len(self.text)

    def words(self) -> list[Word]:
        """The word that begins here; several where a variable without quotes holds several."""
        start, parts, known, quoted = self.at, [""], True, False
        while self.at < len(self.text) and (char := self.text[self.at]) not in self.ends:
            if char == "\\":
                piece = self.text[self.at + 1 : self.at + 2]
                parts[-1] += "" if piece == "\n" else piece
                self.at += 2
            elif char in "'\"":
                piece, sure = self._quoted(char)
                parts[-1] += piece
                known, quoted = known and sure, True
            elif char in "$`":
                piece, sure = self._expansion()
                known &= sure
                first, *more = re.split(r"\s+", piece) if "|" in self.ends else [piece]
                parts[-1] += first
                parts += more
            else:
                found = self._plain.match(self.text, self.at)
                assert found
                parts[-1] += found[0]
                self.at = found.end()
            if sum(map(len, parts)) > MOST_CHARACTERS:
                raise refused(
                    self.place(start),
                    "word-too-long",
                    f"has a word of more than {MOST_CHARACTERS} characters",
                    "split it",
                )
        where = self.place(start)
        if not known:
            return [Word(self.text[start : self.at], where, known=False)]
        return [Word(part, where) for part in parts if part or (quoted and len(parts) == 1)]

    def _quoted(self, quote: str) -> tuple[str, bool]:
        start, known = self.at, True
        piece: list[str] = []
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == quote:
                self.at += 1
                return "".join(piece), known
            if (
                quote == '"'
                and char == "\\"
                and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n")
            ):
                piece.append(self.text[self.at + 1].strip("\n"))
                self.at += 2
            elif quote == "'" and self.joined and self.text.startswith("\\\n", self.at):
                self.at += 2
            elif quote == '"' and char in "$`":
                more, sure = self._expansion()
                piece.append(more)
                known &= sure
            else:
                piece.append(char)
                self.at += 1
        raise refused(self.place(start), "quote-unclosed", f"a quote ({quote}) is not closed", "close it")

    def _expansion(self) -> tuple[str, bool]:
        """What stands for `$...` or a command in backticks, and whether it is known."""
        if found := _VARIABLE.match(self.text, self.at):
            self.at = found.end()
            value = self.variables.get(found[1] or found[2])
            self._expanded += len(value or "")
            if self._expanded > _MOST_EXPANDED:
                raise refused(
                    self.place(self.at),
                    "variables-too-long",
                    "has variables that grow too long",
                    "write their values",
                )
            if found[3] and (found[3] == "+") == bool(value):
                value = _VARIABLE.sub(lambda one: self.variables.get(one[1] or one[2], "$"), found[4])
                return value, "$" not in value
            return ("$", False) if value is None else (value, True)
        opened = self.text[self.at : self.at + 2]
        if opened in ("$(", "${"):
            self.at = self.close(self.at + 1)
        elif opened[0] == "`":
            end = self.text.find("`", self.at + 1)
            self.at = len(self.text) if end < 0 else end + 1
        else:
            self.at += 2 if re.match(r"\$[0-9@*#?$!-]", opened) else 1
            return "$", len(opened) < 2 or opened[1] in self.ends
        return "$", False

    def close(self, at: int) -> int:
        """The place behind the bracket that closes the one at `at`."""
        pair, depth = {"(": "()", "{": "{}"}[self.text[at]], 0
        for found in re.compile(r"\\.|[(){}]", re.DOTALL).finditer(self.text, at):
            if found[0] in pair:
                depth += 1 if found[0] == pair[0] else -1
            if depth == 0:
                return found.end()
        raise refused(
            self.place(at),
            "bracket-unclosed",
            f"a bracket ({pair[0]}) is not closed",
            "close it",
        )


class _Script:
    """Simple commands, and the blocks that they stand in."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader
        self.blocks: list[str] = []
        self.pending: list[tuple[Command, str, bool]] = []  # here-documents whose lines are still to come

    def commands(self) -> Iterator[Command]:
        reader, before, begun, doubtful, count = self.reader, "", -1, False, 0
        while reader.skip() or begun >= 0:
            count += 1
            if count > MOST_COMMANDS:
                raise refused(
                    reader.first, "too-many-commands", f"has more than {MOST_COMMANDS} commands", "split it"
                )
            start, inside = reader.at, self._conditional()
            command, operator = self._simple()
            self._open_and_close(command, operator)
            ended = reader.at >= len(reader.text)
            if inside or self._conditional() or before == "|" or operator == "|":
                begun = start if begun < 0 else begun
                if not ended and (self._conditional() or operator == "|"):
                    before = operator
                    continue
                block = Command(where=reader.place(begun), text=self._source(begun), plain=False)
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

    def _conditional(self) -> bool:
        return any(block not in _GROUPS for block in self.blocks)

    def _source(self, start: int) -> str:
        return re.sub(r"(?:\s|\\\n)+", " ", self.reader.text[start : self.reader.at]).strip(" ;&|\n")

    def _simple(self) -> tuple[Command, str]:
        """The command that begins here, and the operator that ends it."""
        reader, operator = self.reader, ""
        start = reader.at
        command = Command(where=reader.place(start))
        while reader.skip():
            if reader.text[reader.at] == "#":
                self._comment()
            elif found := _REDIRECT.match(reader.text, reader.at):
                joined = reader.at > start and not reader.text[reader.at - 1].isspace()
                reader.at = found.end()
                self._redirect(command, found[0], joined=joined)
            elif found := _OPERATOR.match(reader.text, reader.at):
                command.text = self._source(start)
                reader.at = found.end()
                operator = found[0]
                break
            else:
                command.words += reader.words()
        command.text = command.text or self._source(start)
        if operator == "\n":
            self._here_documents()
        return command, operator

    def _comment(self) -> None:
        line = r"(?:\\\n|[^\n])*" if self.reader.joined else r"[^\n]*"
        found = re.compile(line).match(self.reader.text, self.reader.at)
        self.reader.at = found.end() if found else self.reader.at

    def _redirect(self, command: Command, operator: str, *, joined: bool) -> None:
        reader = self.reader
        if not reader.skip():
            return
        if reader.text[reader.at] == "(":  # the output of another command as a file
            reader.at = reader.close(reader.at)
            return
        quoted = reader.at
        words = reader.words() or [Word("", reader.place(quoted))]
        target = words[0].text
        if "<<" in operator:
            self.pending.append((command, target, operator.endswith("-")))
        elif target != "/dev/null" and not operator.endswith("&"):
            plain = operator.lstrip("0123456789")
            word = command.words[-1] if command.words else None
            command.sent.append(Redirect(plain, target, word, joined))

    def _here_documents(self) -> None:
        reader = self.reader
        for command, end, tabs in self.pending:
            start, lines = reader.at, []
            while True:
                if reader.at >= len(reader.text):
                    raise refused(
                        command.where,
                        "heredoc-unclosed",
                        f"a here-document (<<{ascii(end)[1:-1]}) does not end",
                        "end it",
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

    def _open_and_close(self, command: Command, operator: str) -> None:
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
