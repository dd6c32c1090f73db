"""What an image does with its stdin changes nothing of the caller's but how far it was read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagefactory.runtime import sandbox

RELAY = (sys.executable, "-I", "-S", str(Path(sandbox.__file__).parent), "relay")
IMAGE = r"""
import fcntl, json, os, sys
taken, wrote = b"", False
FLAGS = (os.O_NONBLOCK, os.O_ASYNC, os.O_DIRECT, os.O_APPEND)
for name, number in json.loads(sys.argv[1]):
    try:
        if name == "read": taken += os.read(0, number)
        elif name == "write":
            wrote = True
            again = os.open("/proc/self/fd/0", (os.O_WRONLY, os.O_RDWR)[number % 2] | os.O_NONBLOCK)
            try: os.write(again, b"W" * number)
            finally: os.close(again)  # else its next read has no end
        elif name == "size": fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, number)
        elif name == "flags": fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) ^ FLAGS[number % 4])
        elif name == "lock": fcntl.flock(number % 3, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif name == "open":
            flags = (os.O_RDWR, os.O_TRUNC, os.O_PATH)[number % 3] | os.O_NONBLOCK
            os.close(os.open("/proc/self/fd/%d" % (number % 3), flags))
    except OSError: pass
os.write(1, json.dumps([taken.hex(), wrote]).encode())
"""
ATTEMPTS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from([1, 3, 4095, 4096, 4097, 10_000, 65_536, 1 << 20])),
        st.tuples(st.just("write"), st.integers(1, 5000)),
        st.tuples(st.just("size"), st.sampled_from([1, 4096, 8192, 65_536, 1 << 20])),
        st.tuples(st.sampled_from(["flags", "lock", "open"]), st.integers(0, 11)),
    ),
    max_size=8,
)


@contextlib.contextmanager
def given_as(kind: str, text: bytes, pieces: int) -> Iterator[int]:
    """A descriptor to read `text` from, which comes in so many pieces."""
    with tempfile.TemporaryFile() as file:
        if kind == "file":
            file.write(text)
            file.seek(0)
            yield file.fileno()
            return
        source, sink = os.pipe() if kind == "pipe" else (end.detach() for end in socket.socketpair())

        def write() -> None:
            with os.fdopen(sink, "wb", buffering=0) as into, contextlib.suppress(OSError):
                size = len(text) // pieces + 1
                for start in range(0, len(text), size):
                    into.write(text[start : start + size])

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield source
        finally:
            os.close(source)
            writer.join()


@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
@given(
    attempts=ATTEMPTS, length=st.sampled_from([0, 5, 4096, 4097, 30_000, 200_000]), pieces=st.integers(1, 9)
)
@settings(max_examples=20)
def test_what_is_left_of_stdin_is_what_was_not_read(
    kind: str, attempts: list[tuple[str, int]], length: int, pieces: int
) -> None:
    text = b"".join(b"%d\n" % number for number in range(length))[:length]
    files = os.memfd_create("lost"), os.memfd_create("passed")
    command = [*RELAY, *map(str, files), sys.executable, "-c", IMAGE, json.dumps(attempts)]
    try:
        with given_as(kind, text, pieces) as source:
            flags = fcntl.fcntl(source, fcntl.F_GETFL)
            done = subprocess.run(
                command, stdin=source, stdout=subprocess.PIPE, pass_fds=files, timeout=120, check=False
            )
            assert fcntl.fcntl(source, fcntl.F_GETFL) == flags
            with os.fdopen(os.dup(source), "rb") as rest:
                left = rest.read()
        taken, wrote = json.loads(done.stdout)
        if wrote:  # it may pretend to have read less, or have read its own words
            assert text.endswith(left)
        else:
            assert bytes.fromhex(taken) + left == text
        assert os.pread(files[0], 99, 0) == b""
    finally:
        for fd in files:
            os.close(fd)
