"""Every watcher says what is done, of how much, and what is left."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import termios

import pytest

from imagefactory import progress
from imagefactory.progress import (
    GitHubLog,
    JsonProgress,
    LineProgress,
    Progress,
    QuietProgress,
    choose_progress,
    format_bytes,
    format_seconds,
    wrap_message,
)
from tests.made.documents import document_faults


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def work(progress: Progress, clock: Clock) -> None:
    with progress.stage("fetch"), progress.task("wheels", total=4_000_000) as task:
        clock.now += 6
        task.advance(1_000_000)
        clock.now += 18
        task.advance(3_000_000)
    progress.note("done")


def test_plain_lines_tell_amount_and_time_left() -> None:
    out, clock = io.StringIO(), Clock()
    work(LineProgress(out, clock=clock), clock)
    assert out.getvalue().splitlines() == [
        "fetch ...",
        "  wheels: 1.0 MB of 4.0 MB, 18s left",
        "  wheels: 4.0 MB of 4.0 MB",
        "  wheels: 4.0 MB of 4.0 MB in 24s",
        "fetch: done in 24s",
        "done",
    ]


def test_github_groups_fold_and_close_when_a_stage_fails() -> None:
    out, clock = io.StringIO(), Clock()
    progress = GitHubLog(out, clock=clock)
    with pytest.raises(RuntimeError), progress.stage("build"):
        raise RuntimeError
    assert out.getvalue().splitlines() == ["::group::build", "::endgroup::"]


def test_github_gets_one_group_of_what_runs_side_by_side() -> None:
    out, clock = io.StringIO(), Clock()
    progress = GitHubLog(out, clock=clock)
    with progress.stage("assemble"), progress.stage("fetch"):
        pass
    assert out.getvalue().splitlines() == [
        "::group::assemble",
        "fetch ...",
        "fetch: done in 0s",
        "assemble: done in 0s",
        "::endgroup::",
    ]


def test_bars_of_work_side_by_side_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, drawn = progress.TerminalProgress(), io.StringIO()
    monkeypatch.setattr(terminal.console, "_file", drawn)
    with terminal.task("packages", total=4_000_000) as packages:
        with terminal.task("installing", total=3, unit="steps") as steps:
            steps.advance(2)
        packages.advance(1_000_000)
    packages_line, steps_line = drawn.getvalue().splitlines()[-2:]
    assert "packages" in packages_line
    assert "1.0/4.0 MB" in packages_line
    assert "2/3 steps" in steps_line
    with terminal.task("again", total=1):
        pass
    assert "packages" not in drawn.getvalue().splitlines()[-1]


def test_json_lines_are_json() -> None:
    out, clock = io.StringIO(), Clock()
    work(JsonProgress(out, clock=clock), clock)
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == ["stage", "task", "task", "task-done", "stage-done", "note"]
    assert [fault for event in events for fault in document_faults(event)] == []
    assert (events[1]["completed"], events[1]["total"], events[1]["unit"]) == (1_000_000, 4_000_000, "bytes")
    assert events[3]["completed"] == 4_000_000


def test_quiet_says_nothing_and_still_takes_everything() -> None:
    work(QuietProgress(), Clock())


def test_auto_is_plain_without_a_terminal_and_groups_on_github() -> None:
    assert type(choose_progress("auto", stream=io.StringIO())) is LineProgress
    assert type(choose_progress("auto", stream=io.StringIO(), github=True)) is GitHubLog


def test_a_task_of_unknown_total_shows_what_is_done() -> None:
    out, clock = io.StringIO(), Clock()
    with LineProgress(out, clock=clock).task("packages", unit="packages") as task:
        task.advance(3)
        task.expect(5)
        task.advance(2)
    assert out.getvalue() == "  packages: 5 of 5 packages in 0s\n"


def test_amounts_are_written_as_people_read_them() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 41_000_000, 2_800_000_000)] == [
        "0 bytes", "999 bytes", "1.0 kB", "41.0 MB", "2.8 GB",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0.4, 59, 60, 3725)] == ["0s", "59s", "1m00s", "1h02m"]


def test_a_terminal_has_lines_where_nothing_draws_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(progress.choose_progress("auto", stream=Tty()), progress.TerminalProgress)
    monkeypatch.setattr(progress, "find_spec", lambda _: None)
    assert isinstance(progress.choose_progress("auto", stream=Tty()), progress.LineProgress)


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b\u202e\r[red]x[/red]"


@pytest.mark.parametrize("style", ["plain", "github", "json"])
def test_no_line_of_progress_steers_a_terminal(style: str) -> None:
    out = io.StringIO()
    watcher = progress.choose_progress(style, stream=out)
    with watcher.stage(HOSTILE), watcher.task(HOSTILE, total=2) as task:
        task.advance(1)
    watcher.note(HOSTILE)
    assert "[red]x[/red]" in out.getvalue()
    assert re.fullmatch(r"[\n -~]*", out.getvalue())


def test_no_bar_or_title_steers_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, drawn = progress.TerminalProgress(), io.StringIO()
    monkeypatch.setattr(terminal.console, "_file", drawn)
    with terminal.stage(HOSTILE), terminal.task(HOSTILE, total=2) as task:
        task.advance(1)
    terminal.note(HOSTILE)
    said = drawn.getvalue()
    assert said.count("[red]x[/red]") >= 4
    assert not re.search("[\x07\x9b\u202e]|\x1b\\]|\x1b\\[2J", said)


def test_no_text_is_a_command_of_a_job_on_github() -> None:
    """The runner takes `::name::` at a line's beginning, blanks left out, and `##[name]` anywhere."""
    out = io.StringIO()
    watcher = progress.choose_progress("github", stream=out)
    with watcher.stage("one\n::stop-commands::x"):
        watcher.note("a\n  ::add-mask::b\r::c::\nd ##[group]e\n::::f")
    lines = out.getvalue().splitlines()
    commands = [line for line in lines if line.lstrip().startswith("::") or "##[" in line]
    assert commands == ["::group::one ::stop-commands::x", "::endgroup::"]


def test_a_log_on_a_full_disk_ends_no_work() -> None:
    class Full(io.StringIO):
        writes = 0

        def flush(self) -> None:
            self.writes += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    stream = Full()
    with LineProgress(stream).stage("build"):
        pass
    assert stream.writes == 2


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("error: a short line", ["error: a short line"]),
        ("error: five words of a sentence", ["error: five words of a", "  sentence"]),
        (
            "hint: see `imagefactory recipe update --help`",
            ["hint: see", "  `imagefactory recipe update --help`"],
        ),
        (
            "hint: imagefactory lock one two, then build",
            ["hint:", "  imagefactory lock one two,", "  then build"],
        ),
        (
            "cannot read /a/path/of/one-long/word-with-hyphens",
            ["cannot read", "  /a/path/of/one-long/word-with-hyphens"],
        ),
        ("  ok    name: and its detail", ["  ok    name: and its", "    detail"]),
        ("next: imagefactory build pytorch-2.3-cu121", ["next: imagefactory build pytorch-2.3-cu121"]),
        ("one\ntwo words that are too long", ["one", "two words that are too", "  long"]),
    ],
)
def test_messages_are_wrapped_without_broken_words_and_commands(text: str, lines: list[str]) -> None:
    assert wrap_message(text, 22).split("\n") == lines


def test_json_lines_are_whole_on_a_terminal() -> None:
    controller, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 40))
    text = "a note of many words that is longer than the terminal is wide, so that text is wrapped"
    with os.fdopen(controller, "rb", buffering=0) as reader, os.fdopen(terminal, "w") as stream:
        JsonProgress(stream).note(text)
        JsonProgress(stream).note("end")
        output = b""
        while b'"end"}' not in output:
            output += reader.read(4096)
    assert [json.loads(line)["text"] for line in output.decode().splitlines()] == [text, "end"]
