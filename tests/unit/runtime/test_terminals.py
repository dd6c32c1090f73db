"""Relayed terminals of a sandbox, and a program of the host with pipes and terminals of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagefactory.runtime import sandbox
from imagefactory.runtime.sandbox.terminals import END_NOW, Relay, descendants, group_terminals
from tests.services.children import LIMIT, child, wait_for

PROGRAM = Path(sandbox.__file__).parent


@contextlib.contextmanager
def told() -> Iterator[tuple[int, int]]:
    """Files for what was lost, and to be passed on."""
    files = os.memfd_create("lost"), os.memfd_create("passed")
    try:
        yield files
    finally:
        for fd in files:
            os.close(fd)


def command(files: tuple[int, int], *argv: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(PROGRAM), "relay", *map(str, files), *argv]


def test_a_script_on_stdin_is_the_callers() -> None:
    with told() as files:
        write = "echo 'echo PWNED' > /proc/self/fd/0; echo passed >&" + str(files[1])
        inner = [
            command(files, "true"),
            command(files, "bash", "-c", write),
            command(files, "head", "-c", "0"),
        ]
        script = (
            "\n".join(f"{shlex.join(argv)}; echo {number}" for number, argv in enumerate(inner))
            + "\necho end\n"
        )
        source, sink = os.pipe()
        os.write(sink, script.encode())
        os.close(sink)
        flags = fcntl.fcntl(source, fcntl.F_GETFL)
        done = subprocess.run(["bash"], stdin=source, stdout=subprocess.PIPE, pass_fds=files, check=False)
        assert done.stdout.split() == [b"0", b"1", b"2", b"end"]
        assert fcntl.fcntl(source, fcntl.F_GETFL) == flags
        os.close(source)
        assert [os.pread(fd, 99, 0) for fd in files] == [b"", b"passed\n"]


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("exit 0", 0)])
def test_exit_codes(script: str, code: int) -> None:
    with told() as files:
        done = subprocess.run(command(files, "bash", "-c", script), pass_fds=files, check=False)
    assert done.returncode == code


def test_what_has_no_room_is_told() -> None:
    with told() as files, Path("/dev/full").open("w") as full:
        done = subprocess.run(command(files, "echo", "lost"), pass_fds=files, stdout=full, check=False)
        assert done.returncode == 0
        assert b"No space left" in os.pread(files[0], 99, 0)


def test_what_the_program_leaves_ends_with_it() -> None:
    """Else it would hold the pipes, and the relay wait for it."""
    with told() as files:
        left = "(trap '' HUP; setsid sleep 612345 & disown); echo started"
        done = subprocess.run(
            command(files, "bash", "-c", left),
            pass_fds=files,
            stdout=subprocess.PIPE,
            timeout=LIMIT,
            check=False,
        )
        assert done.stdout == b"started\n"


@pytest.mark.parametrize("how", ["asked", "caller"])
def test_all_ends_when_it_is_asked_for_or_the_caller_is_gone(how: str) -> None:
    with told() as files:
        argv = command(files, "bash", "-c", "echo started; sleep 600 & sleep 600")
        outer = [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run(sys.argv[2:], pass_fds=eval(sys.argv[1]))",
        ]
        with child([*outer, repr(files), *argv], pass_fds=files, stdout=subprocess.PIPE) as run:
            assert run.stdout.readline() == b"started\n"
            (relay,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            below = [int(relay), *descendants(int(relay))]
            handles = [os.pidfd_open(pid) for pid in below]
            if how == "caller":
                run.kill()
            else:
                os.kill(int(relay), END_NOW)
            wait_for(lambda: len(select.select(handles, [], [], 1)[0]) == len(handles), "all below to end")
            for fd in handles:
                os.close(fd)


def test_a_terminal_is_one_of_its_own() -> None:
    keys, program = pty.openpty()
    with told() as files:
        say = "tty; stty -echo; read -r x; echo got $x"
        argv = command(files, "bash", "-c", say)
        with child(argv, pass_fds=files, stdin=program, stdout=program, stderr=program) as run:
            seen = b""
            while b"\n" not in seen:
                seen += os.read(keys, 1000)
            assert seen.strip() != os.ttyname(program).encode()
            os.write(keys, b"typed\r")
            while b"got typed" not in seen:
                seen += os.read(keys, 1000)
            assert run.wait(timeout=LIMIT) == 0
    os.close(keys)
    os.close(program)


HERE, THERE, TTY = 34816, 34817, 1280


@pytest.mark.parametrize(
    ("devices", "interactive", "groups"),
    [
        ({}, False, []),
        ({0: HERE, 2: HERE}, False, [(0, 2)]),
        ({1: HERE, 2: THERE}, False, [(1,), (2,)]),
        ({0: HERE, 1: HERE, 2: HERE}, True, [(0, 1, 2)]),
        ({0: HERE, 1: HERE}, True, [(0, 1)]),
        ({0: TTY, 1: HERE, 2: HERE}, True, [(0, 1, 2)]),  # `< /dev/tty`: the same by another name
        ({0: TTY, 1: HERE, 2: HERE}, False, [(0,), (1, 2)]),
        ({0: HERE, 1: HERE, 2: THERE}, True, [(0, 1), (2,)]),
    ],
)
def test_groups(devices: dict[int, int], interactive: bool, groups: list[tuple[int, ...]]) -> None:
    assert group_terminals(devices, interactive=interactive) == groups


def test_what_was_typed_before_the_relay_goes_in() -> None:
    """A prompt may be shown a moment before the caller's terminal is raw."""
    pid, typing = pty.fork()
    if pid == 0:  # its terminal is the caller's; it says by its exit code whether the line went in
        try:
            select.select([0], [], [], 60)
            master, follower = os.openpty()
            with Relay(master, (0, 1), interactive=True) as relay:
                typed = bool(select.select([0], [], [], 0)[0])
                if typed:
                    relay.pass_on({0: select.POLLIN})
                os._exit(0 if typed and os.read(follower, 100) == b"typed early\n" else 1)
        finally:
            os._exit(2)
    try:
        os.write(typing, b"typed early\n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(typing)
