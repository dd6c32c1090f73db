"""Parse submit files like condor_submit, with line numbers: settings, `if`, `queue`.

HTCondor's parser is not used: its bindings execute `include command`, hang on recursive macros, and have no
line numbers. Here, no command is run and no file is included. Source: HTCondor manual, condor_submit and
"Submit file syntax". Tests compare this parser with the bindings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.extras.lint.classads import literal

# --- Values and their macros. Pure
# The size of an expanded macro is limited. Function macros (`$ENV(HOME)`, `$F(...)`, `$INT(...)`) are not
# expanded: their value is unknown. Source: HTCondor's manual, "Submitting a job: macros".


MAX_VALUE = 32_768
MAX_DEPTH = 30
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
FUNCTION = re.compile(r"(?<!\$)\$[A-Za-z_]+\(")
"""The beginning of a function macro, whose value is known only at submission."""
ALIASES = {
    "containerimage": "container_image",
    "dockerimage": "docker_image",
    "get_env": "getenv",
    "gpusmaxcapability": "gpus_maximum_capability",
    "gpusmincapability": "gpus_minimum_capability",
    "gpusminmemory": "gpus_minimum_memory",
    "gpusminruntime": "gpus_minimum_runtime",
    "requestcpus": "request_cpus",
    "requestdisk": "request_disk",
    "requestgpus": "request_gpus",
    "requestmemory": "request_memory",
    "requiregpus": "require_gpus",
}
"""Aliases of commands: the attributes that they set, and aliases in condor_submit."""
_OF_THE_QUEUE = {
    "cluster": "1",
    "clusterid": "1",
    "process": "0",
    "procid": "0",
    "itemindex": "0",
    "row": "0",
    "step": "0",
    "node": "#pArAlLeLnOdE#",
    "dollar": "$",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitSetting:
    """One line `key = value`. `key` is in lower case, `my.x` for `+x`; `written` is the original spelling.

    `end` is the last line of its statement. `before` is an earlier setting of the key that no job used, or
    None.
    """

    key: str
    written: str
    value: str
    line: int
    end: int
    before: SubmitSetting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatement:
    """The jobs of one `queue`. `count` is None if a list outside the file decides it.

    `settings` are the values at this line, by key. `variables` are the names that the list sets. `used` are
    the macros in this line and in other lines without a key.
    """

    line: int
    count: int | None
    settings: Mapping[str, SubmitSetting]
    variables: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()

    def value(self, key: str) -> str:
        """Return the value of `key` with macros expanded, empty if it is not set.

        Raises UsageError for macros that are recursive or expand to too much text.
        """
        setting = self.settings.get(key)
        return expand(setting.value, self.settings).strip() if setting else ""

    @property
    def requests_gpus(self) -> bool:
        """Return whether the jobs request GPUs. A value known only at submission counts as a request."""
        return bool(self.unknown("request_gpus")) or self.value("request_gpus") not in ("", "0")

    def unknown(self, key: str) -> str:
        """Return the macro in a value that is known only at submission (`$(name)` or `$ENV(...)`), or ""."""
        setting = self.settings.get(key)
        if setting is None:
            return ""
        if match := FUNCTION.search(self.value(key)):
            return match[0] + "...)"
        return next((f"$({name})" for name in self.references(key) if name in self.variables), "")

    def undefined(self, key: str) -> tuple[str, ...]:
        """Return the macros that this file does not set and that have no default. They expand to ""."""
        known = {*self.settings, *self.variables, *_OF_THE_QUEUE}
        return tuple(name for name in self.references(key) if name not in known)

    def references(self, key: str) -> tuple[str, ...]:
        """Return all macros that a value uses, in lower case, without those that use their default."""
        names: dict[str, None] = {}
        waiting = [self.settings[key].value] if key in self.settings else []
        while waiting:
            for name, default in _macros(waiting.pop()):
                if name in names or (default is not None and name not in {*self.settings, *self.variables}):
                    continue
                names[name] = None
                if name in self.settings:
                    waiting.append(self.settings[name].value)
        return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFile:
    """A submit file. `notes` are (line, text) about skipped lines and assumptions."""

    name: str
    jobs: tuple[QueueStatement, ...]
    notes: tuple[tuple[int, str], ...] = ()


def expand(text: str, settings: Mapping[str, SubmitSetting]) -> str:
    """Expand `$(name)` and `$(name:default)` like when a job is queued.

    Unset macros are empty. The default also applies to a macro with an empty value. Raises UsageError above
    MAX_VALUE characters or MAX_DEPTH levels.
    """
    return _MacroExpansion(settings).of(text, 0)


class _MacroExpansion:
    """An expansion. Values of macros are cached, so that a chain of doublings is fast."""

    def __init__(self, settings: Mapping[str, SubmitSetting]) -> None:
        self.settings = settings
        self.values: dict[str, str] = {}

    def of(self, text: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise UsageError(
                "macro-recursive",
                f"macros refer to each other more than {MAX_DEPTH} levels deep",
                hint="write the value itself",
            )
        parts: list[str] = []
        size = position = 0
        for start, end, name, default in _outer_macros(text):
            parts += [text[position:start], self._macro(name, default, depth)]
            position = end
            size += len(parts[-2]) + len(parts[-1])
            if size > MAX_VALUE:
                break
        parts.append(text[position:])
        if size + len(parts[-1]) > MAX_VALUE:
            raise UsageError(
                "submit-value-too-long",
                f"macros expand to more than {MAX_VALUE} characters",
                hint="write shorter values",
            )
        return "".join(parts)

    def _macro(self, name: str, default: str | None, depth: int) -> str:
        if name not in self.settings:
            return self.of(_OF_THE_QUEUE.get(name, default or ""), depth + 1)
        if not self.settings[name].value:  # as good as unset: the default counts
            return self.of(default or "", depth + 1)
        if name not in self.values:
            self.values[name] = self.of(self.settings[name].value, depth + 1)
        return self.values[name]


def macro_names(text: str) -> frozenset[str]:
    """Return the names of the macros in a text, in lower case."""
    return frozenset(name for name, _ in _macros(text))


def _macros(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the macros in a value as (name, default), including those in defaults."""
    for _, _, name, default in _outer_macros(text):
        yield name, default
        yield from _macros(default or "")


def _outer_macros(text: str) -> Iterator[tuple[int, int, str, str | None]]:
    """Yield start, end, name and default of each macro. `$$(x)` is skipped, since the machine expands it."""
    position = text.find("$(")
    while position >= 0:
        macro = None if position > 0 and text[position - 1] == "$" else _macro_at(text, position)
        if macro:
            name, default, end = macro
            yield position, end, name, default
            position = text.find("$(", end)
        else:
            position = text.find("$(", position + 2)


def _macro_at(text: str, start: int) -> tuple[str, str | None, int] | None:
    """Return name, default and end of the macro whose `$(` is at `start`, or None."""
    name = _NAME.match(text, start + 2)
    if name is None or name.end() - start > MAX_DEPTH * 10:
        return None
    if text[name.end() : name.end() + 1] == ")":
        return name[0].lower(), None, name.end() + 1
    if text[name.end() : name.end() + 1] != ":":
        return None
    depth, position = 1, name.end() + 1
    while position < len(text) and position - start <= MAX_VALUE:
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return name[0].lower(), text[name.end() + 1 : position], position + 1
        position += 1
    return None


Lists = Callable[[str], str | None]
"""A function that returns the text of a file with items of a `queue`, or None if it cannot be read."""

MAX_BYTES = 1 << 18
MAX_LINES = 5_000
MAX_QUEUES = 50
MAX_SETTINGS = 1_000
ASSUMED = (24, 0, 0)
"""The HTCondor version for `if version`, because it is unknown where the file will be submitted."""
_SETTING = re.compile(r"(\+?)([A-Za-z0-9_][A-Za-z0-9_./]*)\s*=(.*)", re.DOTALL)
_LONG = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_./]*)\s*@=\s*(\S+)\s*")
_STATEMENT = re.compile(r"([A-Za-z]+)\b\s*(.*)", re.DOTALL)
_MACRO_COUNT = re.compile(r"\$[A-Za-z_]+\([^()]*\)\s*(.*)", re.DOTALL)
_UNSET = re.compile(r"(?<!\$)\$\(([A-Za-z_][A-Za-z0-9_.]*)\)")
_MOST = 1_000_000_000
_FROM = re.compile(r"(.*?)(?:^|\s)(in|from|matching)(?=\s|\(|\[|$)(.*)", re.DOTALL | re.IGNORECASE)
_SLICE = re.compile(r"\s*(?:\[([0-9: -]{1,40})\])?\s*")
"""A Python slice before a list. It selects items."""
_VERSION = re.compile(r"version\s*(>=|<=|==|!=|>|<)\s*([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?")
_TRUE, _FALSE = ("true", "yes", "t"), ("false", "no", "f")


def read_submit_file(path: Path) -> SubmitFile:
    """Read a submit file. Raises UsageError if it is too large, not text, or condor_submit rejects it."""
    return parse_submit_file(read_text(path), str(path), read_neighbor_lists(path))


def read_text(path: Path) -> str:
    """Read a text file. Raises UsageError if it is too large or not UTF-8."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(
            "job-file-too-large", f"{path} is larger than {MAX_BYTES // 1024} KiB", hint="pass a submit file"
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(
            "job-file-not-text", f"{path} is not UTF-8 text", hint="pass a submit file"
        ) from None


def read_neighbor_lists(path: Path) -> Lists:
    """Return a reader of the lists in the directory of a submit file."""
    return lambda name: _read_list(path.parent / name)


def read_edfs(environ: Mapping[str, str]) -> Callable[[str], str | None]:
    """Return a reader of EDFs, which finds them as the Container Engine of CSCS does from this directory.

    Source: docs.cscs.ch, "EDF search path" (2026-08).
    """
    default = f"{environ['HOME']}/.edf" if environ.get("HOME") else ""
    places = [place for place in environ.get("EDF_PATH", default).split(":") if place]

    def read(name: str) -> str | None:
        paths = [Path(name)] if "/" in name or name.endswith(".toml") else []
        paths = paths or [Path(place, f"{name}.toml") for place in places]
        return next((text for path in paths if (text := _read_list(path)) is not None), None)

    return read


def _read_list(path: Path) -> str | None:
    """Return the text of a list, or None: another program may still have to write it."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    return None if len(data) > MAX_BYTES else data.decode(errors="replace")


def split_lines(text: str) -> list[str]:
    """Split a text into lines, including line endings of other systems."""
    return re.split(r"\r\n|\n|\r", text)


def parse_submit_file(text: str, name: str, lists: Lists = lambda _: None) -> SubmitFile:
    """Parse a submit file.

    Raises UsageError (`name:line: problem`) for statements that condor_submit rejects or would execute.
    """
    if text.startswith("#!"):
        write = "imagefactory job write TARGET --site slurm writes a batch script, which has #SBATCH lines"
        raise UsageError(
            "submit-file-is-script", f"{name}:1: this is a script, not a submit file", hint=write
        )
    reader = _SubmitReader(name, lists)
    for line, end, statement in _statements(text, name):
        reader.read(line, end, statement)
    return reader.end()


# --- lines ---------------------------------------------------------------------------------------


def _statements(text: str, name: str) -> Iterator[tuple[int, int, str]]:
    """Yield the logical lines with their first and last line numbers. A `\\` at the end joins the next line.

    `#` begins a comment. A comment inside a continued line is dropped if it also ends in `\\`. Otherwise it
    ends the line, and HTCondor adds its last letter to the value, which raises UsageError here.
    """
    lines = split_lines(text)
    if len(lines) > MAX_LINES:
        raise UsageError(
            "job-file-too-large", f"{name} has more than {MAX_LINES} lines", hint="pass a submit file"
        )
    number = 0
    while number < len(lines):
        first, line = number, lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        while line.endswith("\\") and number < len(lines):
            more, number = lines[number].strip(), number + 1
            if not more.startswith("#"):
                line = line[:-1] + more
            elif not more.endswith("\\"):
                raise UsageError(
                    "submit-comment-misplaced",
                    f"{name}:{number}: the last letter of a comment inside a continued line becomes part "
                    f"of the value",
                    hint="move the comment above the line",
                )
        if match := _LONG.fullmatch(line):
            end = f"@{match[2]}"
            statement = []
            while number < len(lines) and lines[number].strip() != end:
                statement.append(lines[number])
                number += 1
            if number == len(lines):
                raise UsageError(
                    "submit-block-unclosed",
                    f"{name}:{first + 1}: '{match[1]} @={match[2]}' is not closed",
                    hint=f"add a line {end}",
                )
            number += 1
            parts = [part for part in map(str.strip, statement) if part and not part.startswith("#")]
            line = f"{match[1]} = " + " ".join(part.removesuffix("\\") for part in parts)
        elif re.match(r"queue\b", line, re.IGNORECASE) and _opens_list(line):
            while number < len(lines) and lines[number].strip() != ")":
                row = lines[number].strip()
                line += "" if row.startswith("#") else "\n" + row
                number += 1
            if number == len(lines):
                raise UsageError(
                    "submit-block-unclosed",
                    f"{name}:{first + 1}: the list of queue is not closed",
                    hint="add a line )",
                )
            number += 1
            line += "\n)"
        yield first + 1, number, line


def _opens_list(line: str) -> bool:
    match = _FROM.fullmatch(line)
    return match is not None and _list_of(match)[1].startswith("(") and ")" not in match[3]


def _list_of(match: re.Match[str]) -> tuple[str, str]:
    """Return the slice (without brackets) and the list in a match of _FROM."""
    part = _SLICE.match(match[3])
    return (part[1] or "", match[3][part.end() :].rstrip()) if part else ("", match[3])


# --- statements ----------------------------------------------------------------------------------


class _SubmitReader:
    """A reader of the statements in a file, in order."""

    def __init__(self, name: str, lists: Lists) -> None:
        self.name = name
        self.lists = lists
        self.settings: dict[str, SubmitSetting] = {}
        self.jobs: list[QueueStatement] = []
        self.notes: list[tuple[int, str]] = []
        self.branches: list[tuple[int, bool, bool, bool]] = []
        """For each open `if`: its line, whether this branch applies, whether an earlier one did, and whether
        `else` was read.
        """
        self.used: set[str] = set()

    def read(self, line: int, end: int, text: str) -> None:
        word = _STATEMENT.match(text)
        keyword, rest = (word[1].lower(), word[2]) if word else ("", "")
        if keyword in ("if", "elif", "else", "endif") and not rest.startswith("="):
            self.used |= macro_names(rest) | {part.lower() for part in rest.split()}
            self._branch(line, keyword, rest.strip())
        elif all(holds for _, holds, _, _ in self.branches):
            if keyword == "queue":
                self._queue(line, rest)
            elif keyword in ("include", "use", "warning", "error") and not rest.startswith("="):
                self._direct(line, keyword, rest)
            else:
                self._set(line, end, text)

    def end(self) -> SubmitFile:
        if self.branches:
            raise UsageError(
                "submit-block-unclosed",
                f"{self.name}:{self.branches[-1][0]}: 'if' without 'endif'",
                hint="add a line endif",
            )
        return SubmitFile(name=self.name, jobs=tuple(self.jobs), notes=tuple(self.notes))

    def _set(self, line: int, end: int, text: str) -> None:
        match = _SETTING.fullmatch(text)
        if not match:
            raise UsageError(
                "submit-line-invalid",
                f"{self.name}:{line}: '{text[:60]}' is not 'command = value'",
                hint="write command = value",
            )
        key = match[2].lower() if not match[1] else f"my.{match[2].lower()}"
        value = self._appended(line, key, match[3].strip())
        if len(value) > MAX_VALUE:
            raise UsageError(
                "submit-value-too-long",
                f"{self.name}:{line}: the value has more than {MAX_VALUE} characters",
                hint="write a shorter value",
            )
        if len(self.settings) >= MAX_SETTINGS:
            raise UsageError(
                "job-file-too-large",
                f"{self.name}:{line}: more than {MAX_SETTINGS} different commands",
                hint="write fewer commands",
            )
        before = self.settings.get(key)
        if before is not None and self.jobs and before.line < self.jobs[-1].line:
            before = None  # jobs that were queued above had it
        if before is not None:
            before = replace(before, before=None)  # avoids chains of thousands
        written = match[1] + match[2]
        self.settings[key] = SubmitSetting(
            key=key, written=written, value=value, line=line, end=end, before=before
        )

    def _appended(self, line: int, key: str, value: str) -> str:
        """Replace the macro of the key itself by its earlier value.

        Other macros expand when a job is queued.
        """
        if "$(" not in value:
            return value
        before = self.settings.get(key)
        macro_pattern = re.compile(rf"(?<!\$)\$\({re.escape(key)}(?::([^()]*))?\)", re.IGNORECASE)
        if before is None or not before.value:
            return macro_pattern.sub(lambda match: match[1] or "", value)
        if len(value) + len(macro_pattern.findall(value)) * len(before.value) > MAX_VALUE:
            raise UsageError(
                "submit-value-too-long",
                f"{self.name}:{line}: the value has more than {MAX_VALUE} characters",
                hint="write a shorter value",
            )
        return macro_pattern.sub(lambda _: before.value, value)

    def _direct(self, line: int, keyword: str, rest: str) -> None:
        if keyword == "include":
            raise UsageError(
                "submit-include-unsupported",
                f"{self.name}:{line}: imagefactory does not read or run included files",
                hint="copy the included lines into the file, or check the output of condor_submit -dump",
            )
        if keyword == "error":
            raise UsageError(
                "submit-error-statement",
                f"{self.name}:{line}: condor_submit stops at this line: '{rest.lstrip(': ')[:80]}'",
                hint="correct the condition above it, or remove the error statement",
            )
        if keyword == "use":
            self.notes.append(
                (line, f"'use {rest[:40]}' depends on the configuration of the site and is not checked")
            )

    # --- if

    def _branch(self, line: int, keyword: str, rest: str) -> None:
        if keyword == "if":
            outside = all(holds for _, holds, _, _ in self.branches)
            if len(self.branches) >= MAX_DEPTH:
                raise UsageError(
                    "submit-condition-invalid",
                    f"{self.name}:{line}: more than {MAX_DEPTH} nested 'if'",
                    hint=f"nest at most {MAX_DEPTH} levels",
                )
            holds = outside and self._holds(line, rest)
            self.branches.append((line, holds, holds or not outside, False))
            return
        if not self.branches:
            raise UsageError(
                "submit-condition-invalid",
                f"{self.name}:{line}: '{keyword}' without 'if'",
                hint=f"remove '{keyword}'",
            )
        first, _, matched, last = self.branches.pop()
        if keyword == "endif":
            return
        if last:
            raise UsageError(
                "submit-condition-invalid",
                f"{self.name}:{line}: '{keyword}' after 'else'",
                hint=f"remove '{keyword}'",
            )
        holds = not matched and (keyword == "else" or self._holds(line, rest))
        self.branches.append((first, holds, matched or holds, keyword == "else"))

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
        if match := _VERSION.fullmatch(text.lower()):
            self.notes.append(
                (line, f"'if version' is evaluated as for HTCondor {'.'.join(map(str, ASSUMED))}")
            )
            return _compare(match[1], tuple(int(part or 0) for part in match.groups()[1:]))
        if text.lower() in _TRUE:
            return True
        if not text or text.lower() in _FALSE:
            return False
        try:
            return float(text) != 0
        except ValueError:
            raise UsageError(
                "submit-condition-invalid",
                f"{self.name}:{line}: '{text[:60]}' is not a condition of condor_submit",
                hint="write true, false, a number, 'defined name' or 'version >= 23.9.0'",
            ) from None

    # --- queue

    def _queue(self, line: int, rest: str) -> None:
        if len(self.jobs) >= MAX_QUEUES:
            raise UsageError(
                "job-file-too-large",
                f"{self.name}:{line}: more than {MAX_QUEUES} queue lines",
                hint="write one queue line with a list",
            )
        self.used |= macro_names(rest)
        text = expand(_UNSET.sub(self._unset, rest), self.settings).strip()
        count: int | None = 1
        if match := _MACRO_COUNT.fullmatch(text):
            count, text = None, match[1]
        elif text:
            count, text = self._count(line, text)
        variables: tuple[str, ...] = ()
        if text:
            variables, items = self._items(line, text)
            count = None if items is None or count is None else count * items
        others = {alias: self.settings[other] for other, alias in ALIASES.items() if other in self.settings}
        settings = {**others, **self.settings}
        self.jobs.append(
            QueueStatement(
                line=line,
                count=count,
                settings=settings,
                variables=variables,
                used=frozenset(self.used),
            )
        )

    def _count(self, line: int, text: str) -> tuple[int, str]:
        """Return the number (or expression) at the start of a `queue`, 1 by default, and the rest."""
        listed = _FROM.fullmatch(text)
        count_text = listed[1] if listed else text
        for end in sorted(
            {len(count_text), *(space.start() for space in re.finditer(r"\s+", count_text))}, reverse=True
        ):
            number = literal(text[:end])
            if isinstance(number, int | float) and not isinstance(number, bool):
                if not 0 <= number <= _MOST:
                    raise UsageError(
                        "submit-queue-invalid",
                        f"{self.name}:{line}: 'queue {text[:60]}' is not a number of jobs",
                        hint="write queue 10",
                    )
                return int(number), text[end:].strip()
        return 1, text

    def _unset(self, macro: re.Match[str]) -> str:
        """Mark an unset macro as unknown, because a command line or a DAG may set it."""
        return macro[0] if macro[1].lower() in self.settings else f"$UNSET({macro[1]})"

    def _items(self, line: int, text: str) -> tuple[tuple[str, ...], int | None]:
        """Return the variables of a list and its number of items, None if the items are not in the file."""
        match = _FROM.fullmatch(text)
        if not match or not match[3].strip():
            raise UsageError(
                "submit-queue-invalid",
                f"{self.name}:{line}: 'queue {text[:60]}' is not valid",
                hint="write queue 10, or queue x in (a b)",
            )
        names = tuple(name.lower() for name in re.split(r"[,\s]+", match[1]) if name) or ("item",)
        part, items = _list_of(match)
        kind, rows = match[2].lower(), re.fullmatch(r"\((.*)\)", items, re.DOTALL)
        if kind == "matching" or (kind == "from" and rows is None and _unknown_list_error(items)):
            return names, None  # a program prints this list, and nothing is run here
        listed = rows[1] if rows else self.lists(items.strip()) if kind == "from" else items
        if listed is None:
            return names, None
        separator = r"\n" if kind == "from" or (rows and "\n" in listed) else r"[,\s]+"
        every = [row for row in re.split(separator, listed) if row.strip()]
        return names, _count(len(every), part)


def _unknown_list_error(items: str) -> bool:
    return items.rstrip().endswith("|") or bool(FUNCTION.search(items))


def _count(items: int, part: str) -> int | None:
    """Return the number of items in a slice, None for an invalid slice."""
    if not part:
        return items
    bounds = [bound.strip() for bound in part.split(":")]
    try:
        return (
            len(range(items)[slice(*(int(bound) if bound else None for bound in bounds))])
            if ":" in part
            else None
        )
    except (TypeError, ValueError):
        return None


def _compare(how: str, version: tuple[int, ...]) -> bool:
    return {
        ">=": version <= ASSUMED,
        "<=": version >= ASSUMED,
        "==": version == ASSUMED,
        "!=": version != ASSUMED,
        ">": version < ASSUMED,
        "<": version > ASSUMED,
    }[how]
