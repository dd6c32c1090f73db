"""Diagnostics with `logging`: the commands that run and the requests that are sent, with times.

`-v` prints them to stderr, IMAGEFACTORY_LOG=FILE appends them to a file. Progress is in progress.py.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, TextIO

from imagefactory.errors import UsageError, os_problem, printable, redact
from imagefactory.progress import without_commands

LOG_VARIABLE = "IMAGEFACTORY_LOG"
_ROOT = logging.getLogger("imagefactory")
_COMMANDS = logging.getLogger("imagefactory.command")
_HIDDEN = "****"
_ASSIGNING_OPTION = re.compile(r"-e|--build-arg|--env")
_ASSIGNMENT = re.compile(r"((?:--build-arg=|--env=)?[^=\s-][^=\s]*=).*", re.DOTALL)
_SENSITIVE = r"[\w-]*(?:token|password|passwd|secret|api_?-?key|credential)[\w-]*"
_SECRET_OPTION = re.compile(rf"(?i)-{_SENSITIVE}")
_SECRET_VALUE = re.compile(rf"(?i)((?:authorization:\s*|\b{_SENSITIVE}\s*[=:])).*", re.DOTALL)


class _RedactingFormatter(logging.Formatter):
    """A formatter that removes passwords, tokens, queries and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(super().format(record)))


class _StderrHandler(logging.Handler):
    """A handler that writes to the current stderr, so that progress bars stay below its lines."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        with suppress(OSError):  # stderr is closed, and the work continues
            print(without_commands(text) if os.environ.get("GITHUB_ACTIONS") else text, file=sys.stderr)


class _FileHandler(logging.StreamHandler[TextIO]):
    def close(self) -> None:
        self.stream.close()
        super().close()


def start_logging(*, verbose: bool, file: str = "") -> None:
    """Send diagnostics to stderr if `verbose`, and to `file` (mode 0600) if one is set.

    Raises UsageError for a file that cannot be written.
    """
    stop_logging()
    if verbose:
        _add(_StderrHandler(), "%(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S")
    if file:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                *os_problem("write", file, error), hint=f"set {LOG_VARIABLE} to a file that you can write"
            ) from error
        handler = _FileHandler(os.fdopen(descriptor, "a", encoding="utf-8"))
        _add(handler, "%(asctime)s %(process)d %(name)s %(message)s")


def stop_logging() -> None:
    """Undo `start_logging`."""
    for handler in tuple(_ROOT.handlers):
        if isinstance(handler, _StderrHandler | _FileHandler):
            _ROOT.removeHandler(handler)
            handler.close()
    _ROOT.setLevel(logging.NOTSET)


def _add(handler: logging.Handler, line: str, times: str | None = None) -> None:
    handler.setFormatter(_RedactingFormatter(line, times))
    _ROOT.addHandler(handler)
    _ROOT.setLevel(logging.DEBUG)
    for logger in (_ROOT, _COMMANDS, logging.getLogger("imagefactory.http")):
        logger.disabled = False  # a library that configures logging may have disabled them
    _hear_commands()


@cache
def _hear_commands() -> None:
    """Log each command that this process starts. Python raises an event for each (PEP 578)."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and _ROOT.handlers:
            _, argv, directory, _ = arguments
            words = [argv] if isinstance(argv, str | bytes | os.PathLike) else argv
            prefix = f" (in {os.fsdecode(directory)})" if directory else ""
            _COMMANDS.debug("run: %s%s", shlex.join(without_secrets(map(os.fsdecode, words))), prefix)

    sys.addaudithook(hear)


def without_secrets(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command, with `****` for the values of variables and of options for secrets."""
    option = ""
    for word in words:
        if _SECRET_OPTION.fullmatch(option) and not word.startswith("-"):
            yield _HIDDEN
        elif _ASSIGNING_OPTION.fullmatch(option) or word.startswith(("--build-arg=", "--env=")):
            yield _ASSIGNMENT.sub(rf"\1{_HIDDEN}", word)
        else:
            yield _SECRET_VALUE.sub(rf"\1{_HIDDEN}", word)
        option = word
