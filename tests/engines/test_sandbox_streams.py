"""The caller's descriptors 0, 1 and 2 stay the caller's, whatever they are. Nothing on its way is lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.services.children import LIMIT, child
from tests.services.sandbox import ORDINARY_UID, Caller

KINDS = ("pipe", "fifo", "socket", "file")
# What an image does with all that it was given: it writes where it may only read, and the other way round.
SEIZE = """
import fcntl, os, sys
words = b"\\necho PWNED\\n"
for fd in (0, 1, 2):
    with open(f"/proc/self/fdinfo/{fd}") as info: flags = int(info.read().split("flags:")[1].split()[0], 8)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK | os.O_APPEND)
    for mode in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        try: os.write(os.open(f"/proc/self/fd/{fd}", mode | os.O_NONBLOCK), b"" if fd else words)
        except OSError: pass
    try: os.write(fd, b"" if fd else words)
    except OSError: pass
    try: fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
    except OSError: pass
    try: fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError: pass
"""


@pytest.fixture
def folder(caller: Caller) -> Iterator[Path]:
    made = caller.ground / f"streams-{caller.name}"
    made.mkdir()
    if caller.name == "user":
        os.chown(made, ORDINARY_UID, ORDINARY_UID)
    yield made
    shutil.rmtree(made)


@contextlib.contextmanager
def given_as(kind: str, text: bytes, folder: Path) -> Iterator[int]:
    """A descriptor to read `text` from. It is short enough for a pipe."""
    if kind == "pipe":
        source, sink = os.pipe()
    elif kind == "fifo":
        os.mkfifo(folder / "fifo")
        source = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        sink = os.open(folder / "fifo", os.O_WRONLY)
        os.set_blocking(source, True)
    elif kind == "socket":
        pair = socket.socketpair()
        source, sink = (end.detach() for end in pair)
    else:
        (folder / "given").write_bytes(text)
        source, sink = os.open(folder / "given", os.O_RDWR), os.open("/dev/null", os.O_WRONLY)
    os.write(sink, text)
    os.close(sink)
    try:
        yield source
    finally:
        os.close(source)


def command(caller: Caller, *argv: str, **spec: object) -> list[str]:
    return caller.command({"argv": argv, "capture": False, **spec})


def outer_script(caller: Caller, images: Sequence[Sequence[str]]) -> bytes:
    """A script that runs each command in an image, and says where it is after each."""
    lines = []
    for number, argv in enumerate(images):
        lines += [shlex.join(command(caller, *argv)), f"echo outer {number}"]
    return "\n".join([*lines, "echo end", ""]).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_on_stdin_is_the_callers(caller: Caller, folder: Path, kind: str) -> None:
    """`... | bash` with a run inside: no word of the image's is run, and no line of the script is lost."""
    script = outer_script(
        caller, [["true"], ["python3", "-c", SEIZE], ["bash", "-c", "read -rn 3 x; echo $x"]]
    )
    script = script.replace(b"echo outer 2", b"abcecho outer 2")  # of which the last one reads three
    with given_as(kind, script, folder) as source:
        done = subprocess.run(
            ["bash"], stdin=source, capture_output=True, env=caller.environment(), timeout=LIMIT, check=False
        )
    assert done.stdout.split(b"\n") == [b"outer 0", b"outer 1", b"abc", b"outer 2", b"end", b""], done
    assert done.returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_over_lines_gives_each_to_one_run(caller: Caller, folder: Path, kind: str) -> None:
    run = shlex.join(command(caller, "bash", "-c", "read -r x; echo image $x"))
    loop = f'while read -r x; do echo outer $x; {run}; done; echo "[$x]"'
    with given_as(kind, b"1\n2\n3\n4\nhalf", folder) as source:
        done = subprocess.run(
            ["bash", "-c", loop], stdin=source, capture_output=True, env=caller.environment(), timeout=LIMIT,
            check=False,
        )  # fmt: skip
    assert done.stdout.split(b"\n") == [b"outer 1", b"image 2", b"outer 3", b"image 4", b"[half]", b""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [8, 10_000, 1 << 20])
def test_all_of_stdin_is_read_whatever_the_command_takes_at_once(
    caller: Caller, folder: Path, kind: str, size: int
) -> None:
    text = os.urandom(60_000)
    code = f"import os\nwhile data := os.read(0, {size}): os.write(1, data)"
    with given_as(kind, text, folder) as source:
        argv = command(caller, "python3", "-c", code)
        done = subprocess.run(
            argv, stdin=source, stdout=subprocess.PIPE, env=caller.environment(), timeout=LIMIT, check=False
        )
    assert done.stdout == text
    assert done.returncode == 0


@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
def test_flags_and_locks_of_the_callers_descriptors_stay(caller: Caller, folder: Path, kind: str) -> None:
    with given_as(kind, b"", folder) as source, given_as(kind, b"", folder) as other:
        before = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (source, other)]
        with child(
            [*command(caller, "bash", "-c", 'python3 -c "$0"; read -r < /gate', SEIZE,
                      mounts=[[str(gate(caller, folder)), "/gate", True]])],
            stdin=source, stdout=other if kind != "pipe" else None, stderr=subprocess.DEVNULL,
            env=caller.environment(),
        ) as run:  # fmt: skip
            with (folder / "gate").open("w") as opened:  # it waits for this after it has done all
                assert [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (source, other)] == before
                if kind == "file":
                    fcntl.flock(os.open(folder / "given", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
                opened.write("go\n")
            run.wait(timeout=LIMIT)
        assert [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (source, other)] == before


def gate(caller: Caller, folder: Path) -> Path:
    os.mkfifo(folder / "gate")
    if caller.name == "user":
        os.chown(folder / "gate", ORDINARY_UID, ORDINARY_UID)
    return folder / "gate"


def test_what_others_wrote_to_the_callers_pipe_is_not_read(caller: Caller) -> None:
    code = """
import os
for fd in (0, 1, 2):
    for mode in (os.O_RDONLY, os.O_RDWR):
        try: os.write(2, b"seen " + os.read(os.open(f"/proc/self/fd/{fd}", mode | os.O_NONBLOCK), 99))
        except OSError: pass
"""
    source, sink = os.pipe()
    os.write(sink, b"for the next program\n")
    argv = command(caller, "python3", "-c", code)
    done = subprocess.run(
        argv, stdout=sink, stderr=subprocess.PIPE, env=caller.environment(), timeout=LIMIT, check=False
    )
    os.close(sink)
    assert (os.read(source, 99), done.stderr.replace(b"seen ", b"")) == (b"for the next program\n", b"")
    os.close(source)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_both_outputs_into_one_pipe_keep_their_order(caller: Caller, kind: str) -> None:
    code = "import os\nfor n in range(2000): os.write(1 + n % 2, b'%d\\n' % n)"
    if kind == "pipe":
        source, sink = os.pipe()
    else:
        source, sink = (end.detach() for end in socket.socketpair())
    argv = command(caller, "python3", "-c", code)
    with (
        child(argv, stdout=sink, stderr=sink, env=caller.environment()) as run,
        os.fdopen(source, "rb") as said,
    ):
        os.close(sink)
        assert said.read().split() == [b"%d" % n for n in range(2000)]
        assert run.wait(timeout=LIMIT) == 0


def test_a_reader_that_goes_ends_the_command_as_a_pipe_does(caller: Caller) -> None:
    argv = command(caller, "bash", "-c", "while echo y; do :; done; echo 'went on' >&2")
    with child(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=caller.environment()) as run:
        assert run.stdout.read(2) == b"y\n"
        run.stdout.close()
        assert run.wait(timeout=LIMIT) == 128 + 13
        assert run.stderr.read() == b""


def test_a_caller_whose_pipe_does_not_block_gets_all(caller: Caller) -> None:
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    argv = command(caller, "python3", "-c", "import os\nfor n in range(64): os.write(1, bytes(65536))")
    with child(argv, stdout=sink, env=caller.environment()) as run, os.fdopen(source, "rb") as said:
        os.close(sink)
        assert len(said.read()) == 64 * 65536
        assert run.wait(timeout=LIMIT) == 0


def test_output_that_has_no_room_is_an_error(caller: Caller) -> None:
    """The command has ended well: it wrote to a pipe."""
    errors, sink = os.pipe()
    # The driver prints errors on its own stdout, which is the full device: so its traceback says it too.
    argv = command(caller, "echo", "lost")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            argv, stdout=full, stderr=sink, env=caller.environment(), timeout=LIMIT, check=False
        )
    os.close(sink)
    with os.fdopen(errors, "rb") as said:
        assert said.read()
    assert done.returncode != 0


def test_no_mode_of_a_device_is_changed(caller: Caller) -> None:
    """As root the image's user owns them on the host too."""
    code = """
import os
for path in ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"):
    found = os.stat(path)  # each is set to what it is: where that works, nothing is lost
    for change in (
        lambda: os.chmod(path, found.st_mode & 0o7777), lambda: os.chown(path, found.st_uid, found.st_gid),
        lambda: os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns)),
    ):
        try: print("changed", path, change())
        except OSError: pass
for fd in (0, 1, 2):
    if os.readlink(f"/proc/self/fd/{fd}") != "/dev/null": continue
    try: print("changed", fd, os.fchmod(fd, os.fstat(fd).st_mode & 0o7777))
    except OSError: pass
print(len(open("/dev/zero", "rb").read(9)), open("/dev/null", "w").write("x"))
"""
    with child(
        command(caller, "python3", "-c", code), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=caller.environment(),
    ) as run:  # fmt: skip
        assert run.communicate(timeout=LIMIT)[0] == b"9 1\n"
