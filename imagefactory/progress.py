"""Progress of long work, always on stderr: bars in a terminal, GitHub's log groups, JSON or plain lines.

Work reports to the `Progress` protocol and does not know its output. Results are never printed here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Final, Literal, NotRequired, Protocol, TypedDict

from imagefactory.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_SECONDS = 5.0
_SPEAKING = threading.RLock()
_SILENT = threading.Event()


def silence_progress() -> None:
    """Print no more progress, so that the caller's output is the last.

    Waits for a thread that is printing, unless no one reads its output.
    """
    _SILENT.set()
    _SPEAKING.acquire(timeout=1.0)


_UNITS = re.compile(
    r"(\s*)((?:`[^`\n]*`"
    r"|(?:imagefactory|sudo|uv|\S+ -m pip)(?: [^\s,;()]+)+?(?=$|[,;()]| (?:to|and|or|then)\b)|\S)+)"
)
"""Parts of a line that stay whole, after their blanks: words, text in backticks, commands."""


def wrap_message(text: str, width: int, indent: int = 2) -> str:
    """Return lines of at most `width`. Words, paths and commands stay whole; `next:` lines do too.

    Continuation lines are indented by `indent` more than their line.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrap_line(line, width, indent))


def _wrap_line(line: str, width: int, indent: int) -> list[str]:
    if len(line) <= width or line.startswith("next: "):
        return [line]
    margin = " " * (len(line) - len(line.lstrip()) + indent)
    lines = [""]
    for blanks, unit in _UNITS.findall(line):
        if not lines[-1] or len(lines[-1]) + len(blanks) + len(unit) <= width:
            lines[-1] += blanks + unit
        else:
            lines.append(margin + unit)
    return lines


class ProgressTask(Protocol):
    """One piece of work with a known or growing total."""

    def advance(self, amount: int) -> None:
        """Add `amount` finished units (bytes or items). Thread-safe."""

    def expect(self, total: int) -> None:
        """Set the total, once it is known."""


class Progress(Protocol):
    def stage(self, title: str) -> AbstractContextManager[None]:
        """Begin a stage of the workflow, which contains all reports inside."""

    def task(
        self, title: str, *, total: int = 0, unit: str = "bytes"
    ) -> AbstractContextManager[ProgressTask]:
        """Begin a task. `total` 0 means unknown. `unit` is `bytes` or a plural noun."""

    def note(self, text: str) -> None:
        """Print one line for the user."""


def format_bytes(count: float) -> str:
    """Return a size in decimal units, as for downloads: 2.8 GB, 41.0 MB, 512 bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{int(count)} bytes"


def format_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole}s"


class _NoTask:
    def advance(self, amount: int) -> None:
        pass

    def expect(self, total: int) -> None:
        pass


class QuietProgress:
    """A progress without output."""

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:  # noqa: ARG002
        yield

    @contextmanager
    def task(self, title: str, *, total: int = 0, unit: str = "bytes") -> Iterator[ProgressTask]:  # noqa: ARG002
        yield _NoTask()

    def note(self, text: str) -> None:
        pass


QUIET = QuietProgress()


class _LineTask:
    def __init__(self, lines: LineProgress, title: str, *, total: int, unit: str) -> None:
        self.lines, self.title, self.total, self.unit = lines, title, total, unit
        self.done = 0
        self.began = self.spoke = lines.clock()

    def advance(self, amount: int) -> None:
        self.done += amount
        now = self.lines.clock()
        if now - self.spoke >= LINE_EVERY_SECONDS:
            self.spoke = now
            self.lines.tell(self, now)

    def expect(self, total: int) -> None:
        self.total = total

    def describe(self, now: float) -> str:
        def amount(count: int) -> str:
            return format_bytes(count) if self.unit == "bytes" else f"{count} {self.unit}"

        elapsed = max(now - self.began, 1e-6)
        if not self.total:
            return amount(self.done)
        finished = amount(self.done) if self.unit == "bytes" else str(self.done)
        text = f"{finished} of {amount(self.total)}"
        if self.total < 100 * self.done < 100 * self.total:  # the first hundredth allows no estimate
            text += f", {format_seconds(elapsed * (self.total - self.done) / self.done)} left"
        return text


class LineProgress:
    """Plain lines for logs: a line when a stage begins and ends, one every few seconds during its work."""

    def __init__(self, stream: IO[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock

    def write(self, text: str) -> None:
        self.put(text)

    def put(self, line: str, *, wrap: bool = True) -> None:
        text = printable(line)
        if wrap and self.stream.isatty():
            text = wrap_message(text, os.get_terminal_size(self.stream.fileno()).columns or len(text))
        # The reader is gone, or the log is on a full disk: the work continues.
        with _SPEAKING, contextlib.suppress(OSError):
            if not _SILENT.is_set():
                self.stream.write(f"{text}\n")
                self.stream.flush()

    def tell(self, task: _LineTask, now: float) -> None:
        self.write(f"{task.title}: {task.describe(now)}")

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        self.write(f"{title} ...")
        began = self.clock()
        yield
        self.write(f"{title}: done in {format_seconds(self.clock() - began)}")

    @contextmanager
    def task(self, title: str, *, total: int = 0, unit: str = "bytes") -> Iterator[ProgressTask]:
        task = _LineTask(self, f"  {title}", total=total, unit=unit)
        yield task
        now = self.clock()
        self.write(f"  {title}: {task.describe(now)} in {format_seconds(now - task.began)}")

    def note(self, text: str) -> None:
        self.write(text)


def without_commands(text: str) -> str:
    """Return `text` without commands of GitHub Actions: `::name::` or `##[name]`."""
    return re.sub(r"(?m)^([^\S\n]*:)(?=:)", r"\1 ", text).replace("##[", "# #[")


class GitHubLog(LineProgress):
    """Lines in one group for each stage, as in GitHub Actions' log viewer.

    Groups do not nest: a stage inside or next to another is in its group.
    """

    _alone = threading.Lock()

    def write(self, text: str) -> None:
        self.put(without_commands(text))

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        if not self._alone.acquire(blocking=False):
            with super().stage(title):
                yield
            return
        try:
            self.put(f"::group::{' '.join(title.split())}")
            began = self.clock()
            yield
            self.write(f"{title}: done in {format_seconds(self.clock() - began)}")
        finally:
            self.put("::endgroup::")
            self._alone.release()


_EVENT: Final = "imagefactory.progress/1"


class ProgressEvent(TypedDict):
    """One line of `--progress json` on stderr."""

    format: Literal["imagefactory.progress/1"]
    event: Literal["note", "stage", "stage-done", "task", "task-done"]
    text: NotRequired[str]
    """Of a note."""
    title: NotRequired[str]
    completed: NotRequired[int]
    """How much of a task is done."""
    total: NotRequired[int]
    """The size of a task; 0 if unknown."""
    unit: NotRequired[str]
    seconds: NotRequired[float]


class JsonProgress(LineProgress):
    """One JSON object in each line, for other programs."""

    def write(self, text: str) -> None:
        self._emit({"format": _EVENT, "event": "note", "text": text.strip()})

    def tell(self, task: _LineTask, now: float) -> None:  # noqa: ARG002
        self._emit(
            {
                "format": _EVENT,
                "event": "task",
                "title": task.title,
                "completed": task.done,
                "total": task.total,
                "unit": task.unit,
            }
        )

    def _emit(self, event: ProgressEvent) -> None:
        self.put(json.dumps(event), wrap=False)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        began = self.clock()
        self._emit({"format": _EVENT, "event": "stage", "title": title})
        yield
        seconds = round(self.clock() - began, 3)
        self._emit({"format": _EVENT, "event": "stage-done", "title": title, "seconds": seconds})

    @contextmanager
    def task(self, title: str, *, total: int = 0, unit: str = "bytes") -> Iterator[ProgressTask]:
        task = _LineTask(self, title, total=total, unit=unit)
        yield task
        seconds = round(self.clock() - task.began, 3)
        self._emit(
            {
                "format": _EVENT,
                "event": "task-done",
                "title": title,
                "completed": task.done,
                "unit": unit,
                "seconds": seconds,
            }
        )


class _BarTask:
    def __init__(self, bars: RichProgress, identity: TaskID) -> None:
        self.bars, self.identity = bars, identity

    def advance(self, amount: int) -> None:
        self.bars.advance(self.identity, amount)

    def expect(self, total: int) -> None:
        self.bars.update(self.identity, total=total)


class TerminalProgress:
    """Bars with amounts and time left, drawn by rich; parallel work has one bar each."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self._lock = threading.Lock()
        self._bars: RichProgress | None = None
        self._open = 0

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        began, heading = time.monotonic(), f"[bold]{_escaped(title)}[/bold]"
        self.console.print(f"{heading} ...")
        yield
        self.console.print(f"{heading}: done in {format_seconds(time.monotonic() - began)}")

    @contextmanager
    def task(self, title: str, *, total: int = 0, unit: str = "bytes") -> Iterator[ProgressTask]:
        with self._lock:
            bars = self._bars = self._bars or _start_bars(self.console)
            self._open += 1
        try:
            yield _BarTask(bars, bars.add_task(_escaped(title), total=total or None, unit=unit))
        except BaseException:  # an error or Ctrl-C: its message follows without a bar above it
            bars.live.transient = True
            raise
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._bars = None
                    bars.stop()

    def note(self, text: str) -> None:
        self.console.print(wrap_message(printable(text), self.console.width), markup=False, soft_wrap=True)


def _escaped(text: str) -> str:
    """Return a text for rich without markup and terminal control characters."""
    from rich.markup import escape

    return escape(printable(text))


def _start_bars(console: Console) -> RichProgress:
    from rich import progress as bars
    from rich.text import Text

    download, speed = bars.DownloadColumn(), bars.TransferSpeedColumn()

    class Amount(bars.ProgressColumn):
        """Bytes and their rate, or numbers of other things."""

        def render(self, task: bars.Task) -> Text:
            if task.fields["unit"] == "bytes":
                return Text.assemble(download.render(task), " ", speed.render(task))
            total = "?" if task.total is None else f"{task.total:.0f}"
            return Text(f"{task.completed:.0f}/{total} {task.fields['unit']}", style="progress.download")

    remaining = bars.TimeRemainingColumn()
    drawn = bars.Progress("  {task.description}", bars.BarColumn(), Amount(), remaining, console=console)
    drawn.start()
    return drawn


def choose_progress(style: str, *, stream: IO[str] | None = None, github: bool = False) -> Progress:
    """Return the progress for `style`: one of STYLES, or quiet for `-q`."""
    out = stream or sys.stderr
    if style == "auto":  # a light install has no rich, so lines are printed
        drawn = out.isatty() and find_spec("rich") is not None
        style = "github" if github else ("terminal" if drawn else "plain")
    makers: dict[str, Callable[[], Progress]] = {
        "terminal": TerminalProgress,
        "plain": lambda: LineProgress(out),
        "github": lambda: GitHubLog(out),
        "json": lambda: JsonProgress(out),
        "quiet": QuietProgress,
    }
    return makers[style]()


STYLES = ("auto", "terminal", "plain", "github", "json")
