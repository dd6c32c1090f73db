"""The values of a submit file, and the macros in them. Pure.

What a macro may grow to is bounded. Functions of macros (`$ENV(HOME)`, `$F(...)`, `$INT(...)`) stay as they
are written: a value that has one is not known. Source: HTCondor's manual, "Submitting a job: macros".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imagefactory.errors import UsageError

MAX_VALUE = 32_768
MAX_DEPTH = 30
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
FUNCTION = re.compile(r"(?<!\$)\$[A-Za-z_]+\(")
"""The beginning of a function of macros, whose value only the submission tells."""
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
"""Second names of commands: those of the attributes that they set, and condor_submit's own."""
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
    """One line `key = value`. `key` is in small letters, `my.x` for `+x`; `written` is as it stands there.

    `end` is the last line of its statement. `before` is what the same key was set to above, for no jobs at
    all; None where there is no such line.
    """

    key: str
    written: str
    value: str
    line: int
    end: int
    before: SubmitSetting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """What one `queue` submits. `count` is None where a list decides that is not in the file.

    `settings` are by key, as they stand when this line is reached. `variables` are names that the list gives,
    `used` macros that this and other lines without a key have.
    """

    line: int
    count: int | None
    settings: Mapping[str, SubmitSetting]
    variables: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()

    def value(self, key: str) -> str:
        """What `key` comes to, macros expanded; empty where it is not set.

        Raises UsageError where macros grow too large or refer to each other in a circle.
        """
        setting = self.settings.get(key)
        return expand(setting.value, self.settings).strip() if setting else ""

    @property
    def asks_gpus(self) -> bool:
        """Whether its jobs request GPUs, or may: where only the submission tells, they do."""
        return bool(self.unknown("request_gpus")) or self.value("request_gpus") not in ("", "0")

    def unknown(self, key: str) -> str:
        """What of a value only its submission tells, `$(name)` of a list or `$ENV(...)`; empty for none."""
        setting = self.settings.get(key)
        if setting is None:
            return ""
        if found := FUNCTION.search(self.value(key)):
            return found[0] + "...)"
        return next((f"$({name})" for name in self.references(key) if name in self.variables), "")

    def undefined(self, key: str) -> tuple[str, ...]:
        """Macros without a default that nothing in this file sets: they are empty."""
        known = {*self.settings, *self.variables, *_OF_THE_QUEUE}
        return tuple(name for name in self.references(key) if name not in known)

    def references(self, key: str) -> tuple[str, ...]:
        """All macros that a value comes to use, in small letters, less those that their default serves."""
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
    """A submit file. `notes` are (line, text) of what was passed over or assumed."""

    name: str
    jobs: tuple[Jobs, ...]
    notes: tuple[tuple[int, str], ...] = ()


def expand(text: str, settings: Mapping[str, SubmitSetting]) -> str:
    """`$(name)` and `$(name:default)` by what `settings` say, as when a job is queued; unset ones are empty,
    and the default counts where it is set to nothing.

    Raises UsageError where that exceeds MAX_VALUE characters or MAX_DEPTH levels.
    """
    return _Expansion(settings).of(text, 0)


class _Expansion:
    """One expansion; what a macro comes to is kept, so that a chain of doublings costs nothing."""

    def __init__(self, settings: Mapping[str, SubmitSetting]) -> None:
        self.settings = settings
        self.done: dict[str, str] = {}

    def of(self, text: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise UsageError(
                "macro-recursive",
                f"macros refer to each other more than {MAX_DEPTH} levels deep",
                hint="write the value itself",
            )
        parts: list[str] = []
        size = at = 0
        for start, end, name, default in _outer_macros(text):
            parts += [text[at:start], self._macro(name, default, depth)]
            at = end
            size += len(parts[-2]) + len(parts[-1])
            if size > MAX_VALUE:
                break
        parts.append(text[at:])
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
        if name not in self.done:
            self.done[name] = self.of(self.settings[name].value, depth + 1)
        return self.done[name]


def macro_names(text: str) -> frozenset[str]:
    """The macros that a text names, in small letters."""
    return frozenset(name for name, _ in _macros(text))


def _macros(text: str) -> Iterator[tuple[str, str | None]]:
    """The macros in a value as (name, default), those inside of defaults too."""
    for _, _, name, default in _outer_macros(text):
        yield name, default
        yield from _macros(default or "")


def _outer_macros(text: str) -> Iterator[tuple[int, int, str, str | None]]:
    """Start, end, name and default of each macro. `$$(x)` is none: the machine fills it."""
    at = text.find("$(")
    while at >= 0:
        found = None if at > 0 and text[at - 1] == "$" else _macro_at(text, at)
        if found:
            name, default, end = found
            yield at, end, name, default
            at = text.find("$(", end)
        else:
            at = text.find("$(", at + 2)


def _macro_at(text: str, start: int) -> tuple[str, str | None, int] | None:
    """Name, default and end of the macro whose `$(` stands at `start`; None where it is none."""
    name = _NAME.match(text, start + 2)
    if name is None or name.end() - start > MAX_DEPTH * 10:
        return None
    if text[name.end() : name.end() + 1] == ")":
        return name[0].lower(), None, name.end() + 1
    if text[name.end() : name.end() + 1] != ":":
        return None
    depth, at = 1, name.end() + 1
    while at < len(text) and at - start <= MAX_VALUE:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return name[0].lower(), text[name.end() + 1 : at], at + 1
        at += 1
    return None
