"""`docker buildx build`: its command line, and what its `--progress=plain` output says.

Pure. The output is lines `#7 [build 2/3] RUN ...` (a step begins or is taken up again),
`#7 0.345 text` (what it prints, seconds first), `#7 DONE 1.2s`, `#7 CACHED`, `#7 ERROR: ...`, and at the
end lines without a number that repeat what failed. Source: BuildKit's util/progress/progressui.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

TAIL_LINES = 40
LONGEST_LINE = 400
LONGEST_NAME = 80

_NUMBERED = re.compile(r"#(\d+) (.*)")
_OUTPUT = re.compile(r"(\d+\.\d+) ?(.*)")
_DONE = re.compile(r"DONE (\d+(?:\.\d+)?)s")
_PLACE = re.compile(r"\[(?:(\S+) +)?(\d+)/(\d+)\] ")
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-_])")
_PREAMBLE = re.compile(r"--[a-z]+=\S+ |set -eu; |if test -e \S+; then export \S+; fi; ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One build. Paths of `context` and secrets are relative to the folder the command runs in.

    `secrets` are (id, where it comes from): `env=NAME` or `src=FILE`. `epoch` is the clock of config
    and history, seconds since 1970. `host_network` gives the build this machine's own network.
    `builder` is the name of docker's context: each has the daemon's own BuildKit under its name.
    """

    context: str
    base: str
    tag: str
    platform: str
    epoch: int
    secrets: tuple[tuple[str, str], ...]
    host_network: bool
    builder: str = "default"


def command(build: Build) -> tuple[str, ...]:
    """The command that builds with the daemon's own BuildKit and leaves the image in that daemon."""
    return (
        *("docker", "buildx", "build", "--builder", build.builder, "--progress=plain", "--load"),
        # An attestation would make the image an index, which a daemon cannot hold.
        "--provenance=false",
        *("--platform", build.platform, "--tag", build.tag),
        *("--build-arg", f"BASE={build.base}", "--build-arg", f"SOURCE_DATE_EPOCH={build.epoch}"),
        *(word for name, source in build.secrets for word in ("--secret", f"id={name},{source}")),
        *(("--network", "host") if build.host_network else ()),
        build.context,
    )


class BuildEventKind(StrEnum):
    BEGAN = "began"
    OUTPUT = "output"
    DONE = "done"
    CACHED = "cached"
    FAILED = "failed"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEvent:
    """One line. `step` is None for what stands outside of all steps.

    `text` is the step's name when it began, what it printed, or why it failed; `seconds` what a step
    that is done took.
    """

    kind: BuildEventKind
    step: int | None
    text: str
    seconds: float = 0.0


def parse_line(line: str) -> BuildEvent:
    """What a line says. Escapes and control characters are gone from `text`; nothing else is changed."""
    numbered = _NUMBERED.fullmatch(line.rstrip("\r\n"))
    if not numbered:
        return BuildEvent(kind=BuildEventKind.OTHER, step=None, text=clean(line))
    step, rest = int(numbered[1]), numbered[2]
    printed, done = _OUTPUT.fullmatch(rest), _DONE.fullmatch(rest)
    if printed:
        return BuildEvent(kind=BuildEventKind.OUTPUT, step=step, text=clean(printed[2]))
    if done:
        return BuildEvent(kind=BuildEventKind.DONE, step=step, text="", seconds=float(done[1]))
    if rest == "CACHED":
        return BuildEvent(kind=BuildEventKind.CACHED, step=step, text="")
    if rest.startswith("ERROR: "):
        # In full: the command comes first, how it ended last.
        return BuildEvent(
            kind=BuildEventKind.FAILED, step=step, text=clean(rest.removeprefix("ERROR: "), longest=len(rest))
        )
    if rest.startswith(("[", "exporting to ")):
        return BuildEvent(kind=BuildEventKind.BEGAN, step=step, text=clean(rest))
    return BuildEvent(kind=BuildEventKind.OTHER, step=step, text=clean(rest))  # transfers, `...`, CANCELED


def clean(line: str, *, longest: int = LONGEST_LINE) -> str:
    """`line` as a terminal shows it at its end: without colours, redrawn beginnings, control characters."""
    text = _ESCAPES.sub("", line.rstrip("\r\n")).rpartition("\r")[2]
    text = "".join(c if c.isprintable() else " " for c in text).rstrip()
    return text if len(text) <= longest else text[:longest] + " ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFailure:
    """Why a build failed: the step's short name (empty outside of one), the reason, the last lines."""

    step: str
    reason: str
    tail: tuple[str, ...]


class Transcript:
    """What a build has said so far."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._tails: dict[int | None, deque[str]] = {}
        self._failed: BuildEvent | None = None
        self._finished: set[tuple[str, str]] = set()
        self._stages: dict[str, int] = {}

    def feed(self, line: str) -> BuildEvent:
        """Takes in one line and gives what it says."""
        event = parse_line(line)
        if event.kind is BuildEventKind.BEGAN and event.step is not None:
            self._names[event.step] = event.text
            place = _PLACE.match(event.text)
            if place:
                self._stages[place[1] or ""] = int(place[3])
        elif event.kind is BuildEventKind.FAILED:
            self._failed = event
        elif event.kind in (BuildEventKind.DONE, BuildEventKind.CACHED) and event.step is not None:
            place = _PLACE.match(self._names.get(event.step, ""))
            if place:
                self._finished.add((place[1] or "", place[2]))
        elif event.text and event.kind in (BuildEventKind.OUTPUT, BuildEventKind.OTHER):
            self._tails.setdefault(event.step, deque(maxlen=TAIL_LINES)).append(event.text)
        return event

    @property
    def finished(self) -> int:
        """How many instructions of the Dockerfile are done."""
        return len(self._finished)

    @property
    def total(self) -> int:
        """How many there are, as far as the stages have shown themselves."""
        return sum(self._stages.values())

    def counts(self, step: int | None) -> bool:
        """Whether a step is an instruction of the Dockerfile."""
        return step is not None and _PLACE.match(self._names.get(step, "")) is not None

    def name(self, step: int | None) -> str:
        """A step's name, short: `build 3/3: RUN pip install ...`."""
        text = self._names.get(step, "") if step is not None else ""
        place = _PLACE.match(text)
        if place:
            stage = f"{place[1]} " if place[1] else ""
            text = f"{stage}{place[2]}/{place[3]}: {_PREAMBLE.sub('', ' '.join(text[place.end() :].split()))}"
        return text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + " ..."

    def failure(self) -> BuildFailure:
        """Why the build failed, once it has."""
        outside = tuple(self._tails.get(None, ()))
        if self._failed is not None:
            tail = tuple(self._tails.get(self._failed.step, ()))
            return BuildFailure(
                step=self.name(self._failed.step), reason=_reason(self._failed.text), tail=tail
            )
        errors = [text.removeprefix("ERROR: ") for text in outside if text.startswith("ERROR: ")]
        return BuildFailure(step="", reason=errors[-1] if errors else "it gave no reason", tail=outside)


def _reason(text: str) -> str:
    """BuildKit repeats the whole command before it says how it ended."""
    return f"exit code {text.rpartition(' ')[2]}" if re.search(r"exit code: \d+$", text) else clean(text)


_COLLECTED = re.compile(r"Installing collected packages: (.+)")
_FETCHING = re.compile(r"\s*Downloading (\S+?)(?:-\S*)? \((\d{3,}(?:\.\d+)? MB|[\d.]+ GB)\)")


def pip_note(text: str) -> str:
    """What a person wants to know of pip's many lines: large downloads and the installation; else empty."""
    collected, fetching = _COLLECTED.match(text), _FETCHING.match(text)
    if collected:
        return f"installing {count(collected[1].split(', '))}"
    return f"downloading {fetching[1]}, {fetching[2]}" if fetching else ""


def count(names: Iterable[str]) -> str:
    number = len(list(names))
    return f"{number} package{'' if number == 1 else 's'}"
