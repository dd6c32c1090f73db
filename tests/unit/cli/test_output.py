"""Failures of single targets: told by name, and the others have their turn."""

from __future__ import annotations

import json
import os
import re

import click
import pytest

from imagefactory.cli.output import (
    ErrorDocument,
    TargetFailures,
    colorize,
    confirm,
    error_json,
    exit_with_first_failure,
    has_gpu,
    has_scheduler,
    next_after_build,
    print_errors,
    print_json,
    print_json_document,
    print_result,
    write_terminal,
)
from imagefactory.errors import (
    EXIT_BUILD,
    EXIT_LOCK,
    BuildError,
    ImagefactoryError,
    LockError,
    NoGpuError,
    UnsolvableError,
    UsageError,
)


def test_what_the_system_refused_is_told_and_the_next_has_its_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = TargetFailures()
    with failures.of("pytorch"):
        raise PermissionError(13, "Permission denied", "/store")
    with failures.of("jax"):
        raise LockError("lock-missing", "jax has no lock")
    assert [(name, error.exit_code) for name, error in failures.errors] == [
        ("pytorch", EXIT_BUILD),
        ("jax", EXIT_LOCK),
    ]
    said = capsys.readouterr().err
    assert "pytorch: cannot use /store: permission denied" in said
    assert "jax has no lock" in said
    assert "jax: jax" not in said


def test_a_bug_is_no_targets_failure() -> None:
    failures = TargetFailures()
    with pytest.raises(TypeError), failures.of("pytorch"):
        raise TypeError
    assert failures.errors == []


def test_the_exit_code_is_the_earliest_failed_stages() -> None:
    def run(*errors: ImagefactoryError) -> None:
        with exit_with_first_failure() as failures:
            for error in errors:
                failures.add(error)

    with pytest.raises(click.exceptions.Exit) as ended:
        run(BuildError("disk-full", "no space left"), LockError("lock-missing", "no lock"))
    assert ended.value.exit_code == EXIT_LOCK
    run()


def test_a_solvers_account_goes_into_the_document() -> None:
    failures = TargetFailures()
    with failures.of("jax"):
        raise UnsolvableError("no-solution", "no solution", hint="ask for less", tree="a needs b")
    assert failures.as_json() == [
        {
            "target": "jax",
            "code": "no-solution",
            "exit_code": EXIT_LOCK,
            "message": "no solution",
            "hint": "ask for less",
            "tree": "a needs b",
        }
    ]


def painted(text: str, *, terminal: bool, monkeypatch: pytest.MonkeyPatch, **environ: str) -> str:
    monkeypatch.setattr(os, "isatty", lambda _: terminal)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return colorize(text, 1)


def test_a_terminal_shows_answers_in_colour_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "TARGET  RUNS  WHY\na  yes [1]  no reason\nb  Yp!  no\noutcome  verified: all\nerror: no such"
    seen = painted(text, terminal=True, monkeypatch=monkeypatch, TERM="xterm")
    assert click.unstyle(seen) == text
    found = re.findall("\x1b\\[(\\d+)m([^\x1b]*)\x1b", seen)
    assert found == [("32", "yes"), ("32", "Yp!"), ("31", "no"), ("32", "verified"), ("31", "error:")]
    for plain in ({"TERM": "dumb"}, {}, {"TERM": "xterm", "NO_COLOR": "1"}):
        assert painted(text, terminal=True, monkeypatch=monkeypatch, **plain) == text
    assert painted(text, terminal=False, monkeypatch=monkeypatch, TERM="xterm") == text


# --- what strangers wrote, on a terminal -----------------------------------------------------------

HOSTILE = "a\x1b]0;owned\x07b\x1b[2Jc\x9bd\u202ee\x08f\rg\x7fh\udce9i\u200bj\U000e0041k\u2028l"
STEERS = re.compile(r"[^\n\t -~]")  # all that is hostile is beyond plain ASCII


@pytest.mark.parametrize("stream", [1, 2])
def test_nothing_that_is_printed_steers_a_terminal(capsys: pytest.CaptureFixture[str], stream: int) -> None:
    write_terminal(stream, f"one\ttwo\n{HOSTILE}\r\nthree")
    said = capsys.readouterr()
    text = said.out if stream == 1 else said.err
    assert not STEERS.search(text)
    assert text.startswith("one\ttwo\na?")
    assert text.endswith("l\nthree\n")


def test_errors_hints_and_results_are_printed_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(HOSTILE)
    print_errors(UsageError("test-problem", HOSTILE, hint=HOSTILE), HOSTILE)
    assert not STEERS.search("".join(capsys.readouterr()))


def test_what_people_write_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("Müller · 5 µs → ok", "日本語", "عربي", "a\tb\n\nc", "🚀"):
        write_terminal(1, text)
        assert capsys.readouterr().out == f"{text}\n"


def test_a_document_keeps_its_values_and_steers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(ErrorDocument(format="imagefactory.error/1", errors=[error_json(UsageError("a", HOSTILE))]))
    said = capsys.readouterr().out
    assert json.loads(said)["errors"][0]["message"] == HOSTILE
    assert not STEERS.search(said)
    print_json_document(json.dumps({"name": HOSTILE}, ensure_ascii=False))
    said = capsys.readouterr().out
    assert json.loads(said)["name"] == HOSTILE.encode("utf-16", "surrogatepass").decode(
        "utf-16", "surrogatepass"
    )
    assert not STEERS.search(said)


def test_colours_are_the_only_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    monkeypatch.setattr("click._compat.should_strip_ansi", lambda *_: False)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    write_terminal(2, f"error: {HOSTILE}")
    said = capsys.readouterr().err
    assert set(re.findall(r"\x1b\[\d+m", said)) == {"\x1b[31m", "\x1b[0m"}
    assert not STEERS.search(re.sub(r"\x1b\[\d+m", "", said))


@pytest.mark.parametrize(
    ("machine", "images", "words"),
    [
        ({"gpu": True, "scheduler": True}, ["a"], "verify a"),
        ({"gpu": True, "registry": True}, ["a"], "push a b"),
        ({"gpu": True, "registry": True, "pushed": True}, ["a"], "verify a"),
        ({"scheduler": True}, ["a"], "sweep start a"),
        ({"scheduler": True, "pushed": True}, ["a"], "sweep start a"),
        ({"scheduler": True}, [], "run a -- python"),
        ({}, ["a"], "run a -- python"),
        ({"registry": True}, [], "push a b"),
        ({"pushed": True}, ["a"], "verify a --kit kit"),
        ({"gpu": True, "pushed": True}, [], "image promote a b"),
    ],
)
def test_the_next_command_works_on_this_machine(
    machine: dict[str, bool], images: list[str], words: str
) -> None:
    has = {"gpu": False, "scheduler": False} | machine
    assert " ".join(next_after_build(["a", "b"], images, **has)) == words


def test_a_machine_without_gpu_and_scheduler_has_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise NoGpuError("gpu-not-visible", "none")

    monkeypatch.setattr("imagefactory.verify.evidence.LocalEvidence.read", fail)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert (has_gpu(), has_scheduler()) == (False, False)


def test_a_question_is_printed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("click.confirm", lambda text, err: asked.append(text) or True)
    assert confirm(HOSTILE)
    assert not STEERS.search(asked[0])


def test_on_github_no_text_is_a_command_of_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_terminal(1, "a\n::add-mask::b")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    write_terminal(1, "a\n ::add-mask::b")
    assert capsys.readouterr().out == "a\n::add-mask::b\na\n : :add-mask::b\n"
