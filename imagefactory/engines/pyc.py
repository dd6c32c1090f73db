"""The .pyc files of an image, made by the image's own Python inside the base."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from imagefactory.serialize import shown_line
from imagefactory.errors import BuildError
from imagefactory.trees import printable

_LONGEST_COMPLAINT = 2000
SERVER = Path(__file__).with_name("pyc_server.py")
LARGEST = 256 << 20  # bytes of a .pyc; a source may have 64 MiB


class BaseCompiler:
    """Compiles with the Python of a base image, through `pyc_server.py` running in it.

    `start` starts a command inside the unpacked base with pipes on its three streams: nothing of a base
    reaches the terminal. It is called
    when the first source comes. `interpreter` is the absolute path of that Python, empty for Debian's.
    Raises BuildError when the base's Python is not `python` (`3.11`) or stops answering.
    """

    def __init__(
        self,
        start: Callable[[tuple[str, ...]], subprocess.Popen[bytes]],
        python: str,
        interpreter: str = "",
    ) -> None:
        self._start, self._python = start, python
        self._interpreter = interpreter or f"/usr/bin/python{python}"
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: _Complaints | None = None

    @contextmanager
    def wheel(self) -> Iterator[BaseCompiler]:
        """All sources of one wheel are compiled inside this."""
        process = self._running()
        self._write(process, b"W")
        try:
            yield self
        except BaseException:
            self.close()  # the server is in the middle of a wheel: the next one starts another
            raise
        self._write(process, b"E")

    def compile(self, path: str, source: bytes) -> bytes | None:
        process = self._running()
        name = path.encode("utf-8", "surrogateescape")
        header = len(name).to_bytes(4, "big") + name + len(source).to_bytes(4, "big")
        self._write(process, b"F" + header + source)
        size = int.from_bytes(self._read(process, 4), "big")
        if size > LARGEST:
            raise BuildError(
                "bytecode-failed", f"the base's Python reports {size} bytes of bytecode for {path}"
            )
        return self._read(process, size) or None

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                _pipe(process.stdin).close()
            _pipe(process.stdout).close()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = self._start((self._interpreter, "-s", "-S", "-P", "-c", SERVER.read_text()))
            if self._process.stderr is not None:
                self._complaints = _Complaints(self._process.stderr)
            try:
                tag = printable(self._read(self._process, 16).decode(errors="replace").strip())
            except BuildError:
                said = self._complaints.text() if self._complaints else ""
                raise BuildError(
                    "base-python-fails",
                    f"{self._interpreter} does not run in the base{said}",
                    hint="choose another base, for example with a newer glibc",
                ) from None
            wanted = "cpython-" + self._python.replace(".", "")
            if tag != wanted:
                raise BuildError("base-python-mismatch", f"the base's Python is {tag}, expected {wanted}")
        return self._process

    def _write(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        try:
            pipe = _pipe(process.stdin)
            pipe.write(data)
            pipe.flush()
        except BrokenPipeError:
            raise _gone(process) from None

    def _read(self, process: subprocess.Popen[bytes], count: int) -> bytes:
        data = _pipe(process.stdout).read(count)
        if len(data) != count:
            raise _gone(process)
        return data


class _Complaints:
    """What a process writes to stderr, read as it comes: the last of it is kept."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept, self._thread = b"", threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._kept = (self._kept + data)[-_LONGEST_COMPLAINT:]

    def text(self) -> str:
        """The last line of a process that has ended, after a colon; empty where there is none."""
        self._thread.join(timeout=10)
        lines = self._kept.decode("utf-8", "replace").split("\n")
        last = next((line for line in map(shown_line, reversed(lines)) if line), "")
        return f": {last}" if last else ""


class Compilers:
    """Compilers for threads: each is lent to one package at a time, and only where that has sources.

    `ready` returns when `make` can give a new one.
    """

    def __init__(self, ready: Callable[[], None], make: Callable[[], BaseCompiler]) -> None:
        self._ready, self._make = ready, make
        self._idle: list[BaseCompiler] = []

    @contextmanager
    def package(self) -> Iterator[OnDemand]:
        """All sources of one package are compiled inside this."""
        with ExitStack() as held:
            yield OnDemand(lambda: held.enter_context(self._lent()))

    @contextmanager
    def _lent(self) -> Iterator[BaseCompiler]:
        self._ready()
        try:
            compiler = self._idle.pop()
        except IndexError:
            compiler = self._make()
        try:
            with compiler.wheel():
                yield compiler
        finally:
            self._idle.append(compiler)

    def close(self) -> None:
        """Ends all; nothing is lent any more."""
        while self._idle:
            self._idle.pop().close()


@dataclass(slots=True)
class OnDemand:
    """Asks `lend` for a compiler when the first source comes."""

    lend: Callable[[], BaseCompiler]
    lent: BaseCompiler | None = None

    def compile(self, path: str, source: bytes) -> bytes | None:
        self.lent = self.lent or self.lend()
        return self.lent.compile(path, source)


KILLED = 128 + signal.SIGKILL
"""How the sandbox tells of a command that was killed: by a limit of a run, or for want of memory."""


def _gone(process: subprocess.Popen[bytes]) -> BuildError:
    with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its pipes and does not end
        process.wait(timeout=10)
    said = "the base's Python ended while it compiled .py files"
    if process.returncode != KILLED:
        return BuildError("bytecode-failed", said)
    return BuildError(
        "bytecode-failed",
        f"{said}: it was killed",
        hint="it took more than a run may (`imagefactory doctor` says what), or the machine is out of memory",
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
