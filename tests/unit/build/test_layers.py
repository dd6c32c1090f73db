"""The base's Python as a child: what is said when it is another one, or ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from imagefactory.build.layers import BaseCompiler
from imagefactory.errors import BuildError
from tests.made.errors import fails

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def compiler(program: str = "", python: str = PYTHON, errors: int = subprocess.DEVNULL) -> BaseCompiler:
    """Of this machine's Python, or of one that runs `program` in the server's place."""

    def start(command: tuple[str, ...]) -> subprocess.Popen[bytes]:
        words = [*command[:-1], program or command[-1]]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=errors)

    return BaseCompiler(start, python, sys.executable)


def test_a_python_that_ends_is_said() -> None:
    made = compiler(f"print('{f'cpython-{PYTHON}'.replace('.', ''):<16}', end='')")
    with pytest.raises(BuildError) as caught, made.wheel():
        made.compile("a.py", b"x = 1")
    assert caught.value.code == "bytecode-failed"


def test_a_python_that_was_killed_is_said_to_be() -> None:
    made = compiler(f"print('{f'cpython-{PYTHON}'.replace('.', ''):<16}', end=''); raise SystemExit(137)")
    with pytest.raises(BuildError, match="killed") as raised, made.wheel():
        made.compile("a.py", b"x = 1")
    assert raised.value.code == "bytecode-failed"
    assert "imagefactory doctor" in raised.value.hint


def test_another_python_than_the_locks_is_refused() -> None:
    made = compiler(python="3.1")
    with fails("base-python-mismatch", r"cpython-\d+.* cpython-31"):
        made.compile("a.py", b"")
    made.close()


def test_what_a_base_answers_is_bounded() -> None:
    tag = f"{f'cpython-{PYTHON}'.replace('.', ''):<16}".encode()
    endless = "import os\nwhile True: os.write(1, bytes(1 << 16))"
    made = compiler(f"import sys, os\nos.write(1, {tag + bytes([255] * 4)!r})\n{endless}")
    with pytest.raises(BuildError, match="4294967295") as caught, made.wheel():
        made.compile("a.py", b"x = 1")
    assert caught.value.code == "bytecode-failed"
    made = compiler(f"import os\nos.write(1, {bytes([255] * 16)!r})")
    with fails("base-python-mismatch"):
        made.compile("a.py", b"")
    made.close()


def test_a_python_that_does_not_run_is_said() -> None:
    made = compiler("raise SystemExit(1)")
    with fails("base-python-fails"):
        made.compile("a.py", b"")
    made.close()


def test_what_a_base_prints_is_one_clean_line_of_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    """However much it prints: nothing waits, nothing of it reaches the terminal as it is."""
    said = "'x' * 3000000 + '\\n\\x1b]0;title\\x07no glibc\\n'"
    program = f"import sys; sys.stderr.write({said}); raise SystemExit(1)"
    made = compiler(program, errors=subprocess.PIPE)
    with fails("base-python-fails", "no glibc") as raised:
        made.compile("a.py", b"")
    made.close()
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 300
    assert capfd.readouterr() == ("", "")


def test_one_child_compiles_wheel_after_wheel() -> None:
    made = compiler()
    with made.wheel():
        first = made.compile("a.py", b"x = 1\n")
        assert made.compile("b.py", b"x = = 1\n") is None
    with made.wheel():
        assert made.compile("a.py", b"x = 1\n") == first
    made.close()
    assert first is not None
