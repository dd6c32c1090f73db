"""Reading submit files as condor_submit does, with line numbers: settings, `if`, `queue`.

HTCondor's own parser is not asked: its bindings run what `include command` names, hang on macros that refer
to each other, and tell no lines. Here nothing is run or included. Source: HTCondor's manual, condor_submit
and "Submit file syntax"; compared with the bindings in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.submit.check.language import (
    ALIASES,
    MAX_DEPTH,
    MAX_VALUE,
    Jobs,
    SubmitFile,
    SubmitSetting,
    expand,
)

MAX_BYTES = 1 << 18
MAX_LINES = 5_000
MAX_QUEUES = 50
MAX_SETTINGS = 1_000
ASSUMED = (24, 0, 0)
"""The version of HTCondor by which `if version` is decided: a file does not tell where it is submitted."""
_SETTING = re.compile(r"(\+?)([A-Za-z0-9_][A-Za-z0-9_./]*)\s*=(.*)", re.DOTALL)
_LONG = re.compile(r"(\+?)([A-Za-z0-9_][A-Za-z0-9_./]*)\s*@=\s*(\S+)\s*")
_WORD = re.compile(r"([A-Za-z]+)\b\s*(.*)", re.DOTALL)
_COUNT = re.compile(r"([0-9]{1,9})(?![0-9A-Za-z_.])\s*(.*)", re.DOTALL)
_FROM = re.compile(r"(.*?)(?:^|\s)(in|from|matching)(?=\s|\(|\[|$)(.*)", re.DOTALL | re.IGNORECASE)
_SLICE = re.compile(r"\s*(?:\[([0-9: -]{1,40})\])?\s*")
"""What may stand before a list: which of its items, as Python writes a slice."""
_VERSION = re.compile(r"version\s*(>=|<=|==|!=|>|<)\s*([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?")
_TRUE, _FALSE = ("true", "yes", "t"), ("false", "no", "f")


def read_submit_file(path: Path) -> SubmitFile:
    """Raises UsageError for a file that is too large, no text, or that condor_submit would refuse."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{path}: it has more than {MAX_BYTES // 1024} KiB", hint="is it a submit file? give that"
        )
    try:
        return parse_submit_file(data.decode(), str(path))
    except UnicodeDecodeError:
        raise UsageError(f"{path}: it is no text in UTF-8", hint="is it a submit file? give that") from None


def parse_submit_file(text: str, name: str) -> SubmitFile:
    """Raises UsageError, `name:line: what is wrong`, for what condor_submit would refuse or would execute."""
    reader = _SubmitReader(name)
    for line, statement in _statements(text, name):
        reader.read(line, statement)
    return reader.end()


# --- lines ---------------------------------------------------------------------------------------


def _statements(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Logical lines with the number of their first. A `\\` at the end joins the next; `#` is a comment."""
    lines = text.splitlines() if "\r" in text else text.split("\n")
    if len(lines) > MAX_LINES:
        raise UsageError(f"{name}: it has more than {MAX_LINES} lines", hint="is it a submit file? give that")
    number = 0
    while number < len(lines):
        first, line = number, lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        while line.endswith("\\") and number < len(lines):
            more = lines[number].strip()
            if more.startswith("#"):  # HTCondor takes a part of the comment for the value
                raise _fault(name, number + 1, "a comment within a line that goes on", "move it above")
            line, number = line[:-1] + more, number + 1
        if match := _LONG.fullmatch(line):
            end = f"@{match[3]}"
            own = []
            while number < len(lines) and lines[number].strip() != end:
                own.append(lines[number])
                number += 1
            if number == len(lines):
                raise _fault(name, first + 1, f"'{match[2]} @={match[3]}' has no end", f"write a line {end}")
            number += 1
            told = [part for part in map(str.strip, own) if part and not part.startswith("#")]
            line = f"{match[1]}{match[2]} = " + " ".join(part.removesuffix("\\") for part in told)
        elif re.match(r"queue\b", line, re.IGNORECASE) and _opens_list(line):
            while number < len(lines) and lines[number].strip() != ")":
                line += "\n" + lines[number].strip()
                number += 1
            if number == len(lines):
                raise _fault(name, first + 1, "the list of queue has no end", "write a line )")
            number += 1
            line += "\n)"
        yield first + 1, line


def _opens_list(line: str) -> bool:
    found = _FROM.fullmatch(line)
    return found is not None and _list_of(found)[1].startswith("(") and ")" not in found[3]


def _list_of(found: re.Match[str]) -> tuple[str, str]:
    """The slice of a list, without its brackets, and the list, of a match of _FROM."""
    part = _SLICE.match(found[3])
    return (part[1] or "", found[3][part.end() :].rstrip()) if part else ("", found[3])


def _fault(name: str, line: int, what: str, hint: str = "") -> UsageError:
    return UsageError(f"{name}:{line}: {what}", hint=hint)


# --- statements ----------------------------------------------------------------------------------


class _SubmitReader:
    """Goes through the statements of one file, in their order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings: dict[str, SubmitSetting] = {}
        self.jobs: list[Jobs] = []
        self.notes: list[tuple[int, str]] = []
        self.branches: list[tuple[int, bool, bool, bool]] = []
        """Of each open `if`: its line, whether this branch holds, whether one did, whether `else` came."""

    def read(self, line: int, text: str) -> None:
        word = _WORD.match(text)
        keyword, rest = (word[1].lower(), word[2]) if word else ("", "")
        if keyword in ("if", "elif", "else", "endif") and not rest.startswith("="):
            self._branch(line, keyword, rest.strip())
        elif all(holds for _, holds, _, _ in self.branches):
            if keyword == "queue":
                self._queue(line, rest)
            elif keyword in ("include", "use", "warning", "error") and not rest.startswith("="):
                self._direct(line, keyword, rest)
            else:
                self._set(line, text)

    def end(self) -> SubmitFile:
        if self.branches:
            raise _fault(self.name, self.branches[-1][0], "this 'if' has no 'endif'", "write endif")
        return SubmitFile(name=self.name, jobs=tuple(self.jobs), notes=tuple(self.notes))

    def _set(self, line: int, text: str) -> None:
        match = _SETTING.fullmatch(text)
        if not match:
            raise _fault(self.name, line, f"'{text[:60]}' is no 'command = value'", "write command = value")
        key = match[2].lower() if not match[1] else f"my.{match[2].lower()}"
        value = self._appended(line, key, match[3].strip())
        if len(value) > MAX_VALUE:
            raise _fault(self.name, line, f"a value of more than {MAX_VALUE} characters", "write less")
        if len(self.settings) >= MAX_SETTINGS:
            raise _fault(self.name, line, f"more than {MAX_SETTINGS} different commands", "write fewer")
        before = self.settings.get(key)
        if before is not None and self.jobs and before.line < self.jobs[-1].line:
            before = None  # jobs that were queued above had it
        if before is not None:
            before = replace(before, before=None)  # one is enough to tell, and chains of thousands are not
        written = match[1] + match[2]
        self.settings[key] = SubmitSetting(key=key, written=written, value=value, line=line, before=before)

    def _appended(self, line: int, key: str, value: str) -> str:
        """Its own name in a value is what it was before, at once; others are filled when a job is queued."""
        if "$(" not in value:
            return value
        before = self.settings.get(key)
        own = re.compile(rf"(?<!\$)\$\({re.escape(key)}(?::([^()]*))?\)", re.IGNORECASE)
        if before is None or not before.value:
            return own.sub(lambda found: found[1] or "", value)
        if len(value) + len(own.findall(value)) * len(before.value) > MAX_VALUE:
            raise _fault(self.name, line, f"a value of more than {MAX_VALUE} characters", "write less")
        return own.sub(lambda _: before.value, value)

    def _direct(self, line: int, keyword: str, rest: str) -> None:
        if keyword == "include":
            raise _fault(
                self.name,
                line,
                "includes are neither read nor run here",
                "write the included lines into the file, or check what condor_submit -dump shows",
            )
        if keyword == "error":
            raise _fault(self.name, line, f"it ends with the error '{rest.lstrip(': ')[:80]}'")
        if keyword == "use":
            self.notes.append((line, f"'use {rest[:40]}' is set by the site's configuration: not looked at"))

    # --- if

    def _branch(self, line: int, keyword: str, rest: str) -> None:
        if keyword == "if":
            outside = all(holds for _, holds, _, _ in self.branches)
            if len(self.branches) >= MAX_DEPTH:
                raise _fault(self.name, line, f"more than {MAX_DEPTH} nested 'if'", "write it plainer")
            holds = outside and self._holds(line, rest)
            self.branches.append((line, holds, holds or not outside, False))
            return
        if not self.branches:
            raise _fault(self.name, line, f"'{keyword}' without 'if'", f"take '{keyword}' away")
        first, _, done, last = self.branches.pop()
        if keyword == "endif":
            return
        if last:
            raise _fault(self.name, line, f"'{keyword}' after 'else'", f"take '{keyword}' away")
        holds = not done and (keyword == "else" or self._holds(line, rest))
        self.branches.append((first, holds, done or holds, keyword == "else"))

    def _holds(self, line: int, condition: str) -> bool:
        text = expand(condition, self.settings).strip()
        negated, text = text.startswith("!"), text.removeprefix("!").strip()
        return self._plain(line, text) is not negated

    def _plain(self, line: int, text: str) -> bool:
        word, _, name = text.partition(" ")
        if word.lower() == "defined":
            name = name.strip().lower()
            set_to = self.settings.get(name)
            return bool(set_to and set_to.value) or bool(re.fullmatch(r"[0-9.]+|true|false", name))
        if found := _VERSION.fullmatch(text.lower()):
            self.notes.append((line, f"'if version' is decided as for {'.'.join(map(str, ASSUMED))}"))
            return _compare(found[1], tuple(int(part or 0) for part in found.groups()[1:]))
        if text.lower() in _TRUE:
            return True
        if not text or text.lower() in _FALSE:
            return False
        try:
            return float(text) != 0
        except ValueError:
            raise _fault(
                self.name,
                line,
                f"'{text[:60]}' is no condition of condor_submit",
                "write true, false, a number, 'defined name' or 'version >= 23.9.0'",
            ) from None

    # --- queue

    def _queue(self, line: int, rest: str) -> None:
        if len(self.jobs) >= MAX_QUEUES:
            raise _fault(self.name, line, f"more than {MAX_QUEUES} queue lines", "write one with a list")
        text = expand(rest, self.settings).strip()
        count: int | None = 1
        if found := _COUNT.match(text):
            count, text = int(found[1]), found[2]
        variables: tuple[str, ...] = ()
        if text:
            variables, items = self._items(line, text)
            count = None if items is None else (count or 0) * items
        others = {own: self.settings[other] for other, own in ALIASES.items() if other in self.settings}
        settings = {**others, **self.settings}
        self.jobs.append(Jobs(line=line, count=count, settings=settings, variables=variables))

    def _items(self, line: int, text: str) -> tuple[tuple[str, ...], int | None]:
        """The variables of a list and how many items it has; None where these are not in the file."""
        match = _FROM.fullmatch(text)
        if not match:
            raise _fault(
                self.name,
                line,
                f"'queue {text[:60]}' is not understood",
                "write queue 10, or queue x in (a b)",
            )
        if match[2].lower() == "from" and match[3].rstrip().endswith("|"):
            raise _fault(
                self.name, line, "the list comes from a program, which is not run here", "save the list first"
            )
        names = tuple(name.lower() for name in re.split(r"[,\s]+", match[1]) if name) or ("item",)
        part, given = _list_of(match)
        rows = re.fullmatch(r"\((.*)\)", given, re.DOTALL)
        if rows is None or match[2].lower() == "matching":
            return names, None
        separator = r"\n" if match[2].lower() == "from" or "\n" in rows[1] else r"[,\s]+"
        every = [row for row in re.split(separator, rows[1]) if row.strip()]
        return names, _count(len(every), part)


def _count(items: int, part: str) -> int | None:
    """How many of them a slice leaves; None for one that cannot be read here."""
    if not part:
        return items
    bounds = [one.strip() for one in part.split(":")]
    try:
        return (
            len(range(items)[slice(*(int(one) if one else None for one in bounds))]) if ":" in part else None
        )
    except (TypeError, ValueError):
        return None


def _compare(how: str, asked: tuple[int, ...]) -> bool:
    return {
        ">=": asked <= ASSUMED,
        "<=": asked >= ASSUMED,
        "==": asked == ASSUMED,
        "!=": asked != ASSUMED,
        ">": asked < ASSUMED,
        "<": asked > ASSUMED,
    }[how]
