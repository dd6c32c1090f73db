"""Failures of single targets: told by name, and the others have their turn."""

from __future__ import annotations

import os
import re

import click
import pytest

from imagefactory.cli.output import Failures, collecting, paint
from imagefactory.errors import EXIT_BUILD, EXIT_LOCK, BuildError, FactoryError, LockError, UnsolvableError


def test_what_the_system_refused_is_told_and_the_next_has_its_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = Failures()
    with failures.of("pytorch"):
        raise PermissionError(13, "Permission denied", "/store")
    with failures.of("jax"):
        raise LockError("jax has no lock")
    assert [(name, error.exit_code) for name, error in failures.errors] == [
        ("pytorch", EXIT_BUILD),
        ("jax", EXIT_LOCK),
    ]
    said = capsys.readouterr().err
    assert "pytorch: /store: Permission denied" in said
    assert "jax has no lock" in said
    assert "jax: jax" not in said


def test_a_bug_is_no_targets_failure() -> None:
    failures = Failures()
    with pytest.raises(TypeError), failures.of("pytorch"):
        raise TypeError
    assert failures.errors == []


def test_the_exit_code_is_the_earliest_failed_stages() -> None:
    def run(*errors: FactoryError) -> None:
        with collecting() as failures:
            for error in errors:
                failures.add(error)

    with pytest.raises(click.exceptions.Exit) as ended:
        run(BuildError("no space left"), LockError("no lock"))
    assert ended.value.exit_code == EXIT_LOCK
    run()


def test_a_solvers_account_goes_into_the_document() -> None:
    failures = Failures()
    with failures.of("jax"):
        raise UnsolvableError("no solution", hint="ask for less", tree="a needs b")
    assert failures.as_json() == [
        {
            "target": "jax",
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
    return paint(text, 1)


def test_a_terminal_shows_answers_in_colour_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "TARGET  RUNS  WHY\na  yes [1]  no reason\nb  Yp!  no\noutcome  verified: all\nerror: no such"
    seen = painted(text, terminal=True, monkeypatch=monkeypatch, TERM="xterm")
    assert click.unstyle(seen) == text
    found = re.findall("\x1b\\[(\\d+)m([^\x1b]*)\x1b", seen)
    assert found == [("32", "yes"), ("32", "Yp!"), ("31", "no"), ("32", "verified"), ("31", "error:")]
    for plain in ({"TERM": "dumb"}, {}, {"TERM": "xterm", "NO_COLOR": "1"}):
        assert painted(text, terminal=True, monkeypatch=monkeypatch, **plain) == text
    assert painted(text, terminal=False, monkeypatch=monkeypatch, TERM="xterm") == text
