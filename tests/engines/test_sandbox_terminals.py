"""A caller's terminals stay the caller's, whichever of descriptors 0, 1 and 2 they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.children import LIMIT, child, wait_for
from tests.services.sandbox import ORDINARY_UID, Caller, scratch_folders

IS_EXCLUSIVE = 0x80045440  # TIOCGEXCL
# What an image does to every terminal that it holds, and what it says of them.
SEIZE = """
import fcntl, json, os, termios
found = {}
for fd in (0, 1, 2):
    if not os.isatty(fd): continue
    state = termios.tcgetattr(fd)
    state[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSANOW, state)
    fcntl.ioctl(fd, termios.TIOCEXCL)
    size = fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))
    found[fd] = [os.ttyname(fd), list(size[:4])]
print(json.dumps(found), file=open("/out/found", "w"))
"""


class Terminal:
    """A terminal of the test's: `keys` is the side that a person sits at."""

    def __init__(self) -> None:
        self.keys, self.program = pty.openpty()
        fcntl.ioctl(self.program, termios.TIOCSWINSZ, struct.pack("4H", 33, 77, 0, 0))
        self.before = termios.tcgetattr(self.program)

    def untouched(self) -> bool:
        exclusive = struct.unpack("i", fcntl.ioctl(self.program, IS_EXCLUSIVE, bytes(4)))[0]
        return exclusive == 0 and termios.tcgetattr(self.program) == self.before

    def shown(self, text: bytes) -> bool:
        """Waits for a text on the screen."""
        seen = b""
        while text not in seen:
            if not select.select([self.keys], [], [], LIMIT)[0]:
                return False
            seen += os.read(self.keys, 65536)
        return True

    def lines_only(self, *, lines: bool) -> None:
        state = termios.tcgetattr(self.program)
        state[3] = state[3] | termios.ICANON if lines else state[3] & ~termios.ICANON
        termios.tcsetattr(self.program, termios.TCSANOW, state)


@pytest.fixture
def terminal(caller: Caller) -> Iterator[Terminal]:
    made = Terminal()
    if caller.name == "user":
        os.fchown(made.program, ORDINARY_UID, ORDINARY_UID)
    yield made
    os.close(made.keys)
    os.close(made.program)


@pytest.fixture
def out(caller: Caller) -> Iterator[Path]:
    folder = caller.ground / f"out-{caller.name}"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def python(caller: Caller, code: str, out: Path, **spec: object) -> list[str]:
    argv = ["python3", "-c", textwrap.dedent(code)]
    return caller.command({"argv": argv, "capture": False, "mounts": [[str(out), "/out", True]], **spec})


@pytest.mark.parametrize("which", ["02", "12", "0", "1", "2", "012"])
def test_no_command_holds_the_callers_terminal(
    caller: Caller, terminal: Terminal, out: Path, which: str
) -> None:
    streams = [terminal.program if str(fd) in which else subprocess.DEVNULL for fd in range(3)]
    pipes = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
    with child(python(caller, SEIZE, out), env=caller.environment(), **pipes) as run:
        assert run.wait(timeout=LIMIT) == 0
    assert (out / "found").read_text().strip() == (
        "{" + ", ".join(f'"{fd}": ["/dev/pts/0", [33, 0, 77, 0]]' for fd in which) + "}"
    )
    assert terminal.untouched()


def test_two_terminals_stay_two(caller: Caller, terminal: Terminal, out: Path) -> None:
    other = Terminal()
    code = "import os; print(os.ttyname(1), os.ttyname(2)); print('second', file=__import__('sys').stderr)"
    pipes = {"stdin": subprocess.DEVNULL, "stdout": terminal.program, "stderr": other.program}
    with child(python(caller, code, out), env=caller.environment(), **pipes) as run:
        assert terminal.shown(b"/dev/pts/0 /dev/pts/1\r\n")
        assert other.shown(b"second\r\n")
        assert run.wait(timeout=LIMIT) == 0


def test_a_co_process_shares_no_terminal(caller: Caller, terminal: Terminal) -> None:
    """The base's Python compiles with the caller's stderr."""
    spec: dict[str, object] = {"argv": ["python3", "-c", "import os; print(os.ttyname(2), os.read(0, 9))"]}
    command = caller.command(spec, mode="start")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": terminal.program}
    with child(command, env=caller.environment(), text=True, **pipes) as run:
        assert "/dev/pts/0 b'hello co-" in run.communicate(timeout=LIMIT)[0]


def test_lines_typed_before_a_pipe_arrive(caller: Caller, terminal: Terminal, out: Path) -> None:
    pipes = {"stdin": terminal.program, "stdout": subprocess.PIPE, "stderr": terminal.program}
    code = """
    import os, sys
    print("ready", file=sys.stderr)
    while line := os.read(0, 100): os.write(1, repr(line).encode())
    """
    with child(python(caller, code, out), env=caller.environment(), **pipes) as run:
        assert terminal.shown(b"ready\r\n")
        os.write(terminal.keys, b"onx\x7fe\ntw\x04o\n\x04")
        said = run.communicate(timeout=LIMIT)[0]
        assert said.replace(b"'b'", b"") == b"b'one\\ntwo\\n'"
        assert run.returncode == 0


def test_keys_meant_for_a_pager_are_not_taken(caller: Caller, terminal: Terminal, out: Path) -> None:
    pipes = {"stdin": terminal.program, "stdout": subprocess.PIPE, "stderr": terminal.program}
    code = "import sys; print('ready', file=sys.stderr); print(sys.stdin.readline())"
    with child(python(caller, code, out), env=caller.environment(), **pipes) as run:
        terminal.lines_only(lines=False)
        assert terminal.shown(b"ready\r\n")
        os.write(terminal.keys, b"q")
        assert os.read(terminal.program, 9) == b"q"
        terminal.lines_only(lines=True)
        os.write(terminal.keys, b"line\n")
        assert run.communicate(timeout=LIMIT)[0] == b"line\n\n"


@pytest.mark.parametrize("interactive", [False, True])
def test_what_nobody_reads_keeps_no_sandbox_alive(
    caller: Caller, terminal: Terminal, out: Path, interactive: bool
) -> None:
    os.mkfifo(out / "gate")
    (out / "gate").chmod(0o666)
    stdout = terminal.program if interactive else subprocess.DEVNULL
    pipes = {"stdin": terminal.program, "stdout": stdout, "stderr": subprocess.DEVNULL}
    code = "import time; gate = open('/out/gate', 'w'); time.sleep(600)"
    with (
        child(python(caller, code, out), env=caller.environment(), **pipes) as run,
        (out / "gate").open("rb", buffering=0) as gate,  # waits until the command runs
    ):
        os.set_blocking(terminal.keys, False)
        while select.select([], [terminal.keys], [], 0.3)[1]:
            with contextlib.suppress(BlockingIOError):
                os.write(terminal.keys, b"line\n" * 100)
            with contextlib.suppress(BlockingIOError):
                os.read(terminal.keys, 65536)  # the echo
        run.kill()
        assert select.select([gate], [], [], LIMIT)[0]  # its other end is closed
        assert gate.read() == b""


@pytest.mark.parametrize("interactive", [False, True])
def test_a_terminal_that_stands_still_stops_no_limit(
    caller: Caller, terminal: Terminal, out: Path, interactive: bool
) -> None:
    os.mkfifo(out / "gate")
    (out / "gate").chmod(0o666)
    stdin = terminal.program if interactive else subprocess.DEVNULL
    pipes = {"stdin": stdin, "stdout": terminal.program, "stderr": subprocess.DEVNULL}
    code = "gate = open('/out/gate', 'w')\nwhile True: print('x' * 1000)"
    termios.tcflow(terminal.program, termios.TCOOFF)  # Ctrl-S
    with child(python(caller, code, out, timeout=2), env=caller.environment(), **pipes) as run:
        assert (out / "gate").read_text() == ""  # its other end is closed: the command's time is over
        wait_for(lambda: not scratch_folders(caller), "what it has written is removed")
        assert run.poll() is None  # what it has said is still to be shown
        termios.tcflow(terminal.program, termios.TCOON)
        assert terminal.shown(b"x" * 1000)
        while run.poll() is None:
            if select.select([terminal.keys], [], [], 0.1)[0]:
                os.read(terminal.keys, 65536)
        assert run.returncode == 137
    assert terminal.untouched()


def test_a_caller_who_ends_waits_for_no_terminal(caller: Caller, terminal: Terminal, out: Path) -> None:
    os.mkfifo(out / "gate")
    (out / "gate").chmod(0o666)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": terminal.program, "stderr": subprocess.DEVNULL}
    code = "gate = open('/out/gate', 'w'); print('x' * 1000)"
    termios.tcflow(terminal.program, termios.TCOOFF)
    with child(python(caller, code, out), env=caller.environment(), **pipes) as run:
        assert (out / "gate").read_text() == ""
        wait_for(lambda: not scratch_folders(caller), "what it has written is removed")
        (keeper,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        ended = os.pidfd_open(int(keeper))
        run.kill()
        assert select.select([ended], [], [], LIMIT)[0]
        os.close(ended)


REAPER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
with open(sys.argv[1] + ".in") as typed, open(sys.argv[1], "wb") as shown:
    assert subprocess.run(sys.argv[2:], stdin=typed, stdout=shown).returncode == 0
try:
    os.waitpid(-1, os.WNOHANG)
    print("somebody is left")
except ChildProcessError:
    print("nobody")
"""


def test_who_carries_is_reaped(caller: Caller, terminal: Terminal, out: Path) -> None:
    """Else each command leaves a dead process in a container whose first process reaps nobody."""
    (out / "said.in").write_text("typed\n")
    command = python(caller, "import sys; print(sys.stdin.readline() * 9)", out)
    argv = [sys.executable, "-c", REAPER, str(out / "said"), *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": terminal.program, "text": True}
    with child(argv, env=caller.environment(), **pipes) as run:
        assert run.communicate(timeout=LIMIT)[0] == "nobody\n"
    assert (out / "said").read_text() == "typed\n" * 9 + "\n"


def test_an_interactive_command_keeps_its_other_streams(
    caller: Caller, terminal: Terminal, out: Path
) -> None:
    code = "import os, sys; print(os.isatty(0), os.isatty(1)); print('to the file', file=sys.stderr)"
    with (out / "errors").open("wb") as errors:
        pipes = {"stdin": terminal.program, "stdout": terminal.program, "stderr": errors}
        with child(python(caller, code, out), env=caller.environment(), **pipes) as run:
            assert terminal.shown(b"True True\r\n")
            assert run.wait(timeout=LIMIT) == 0
    assert (out / "errors").read_bytes() == b"to the file\n"
    assert terminal.untouched()


@pytest.mark.parametrize("which", ["02", "012"])
def test_a_terminal_that_hangs_up_ends_nothing_by_itself(caller: Caller, out: Path, which: str) -> None:
    """Only its session's processes hear of it; these are none."""
    for name in ("ready", "gate"):
        os.mkfifo(out / name)
        (out / name).chmod(0o666)
    terminal = Terminal()
    streams = [terminal.program if str(fd) in which else subprocess.DEVNULL for fd in range(3)]
    pipes = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
    code = """
    open("/out/ready", "w"); open("/out/gate").read(); print("x" * 99)
    open("/out/end", "w").write("end")
    """
    with child(python(caller, code, out), env=caller.environment(), **pipes) as run:
        (out / "ready").read_text()
        os.close(terminal.program)
        os.close(terminal.keys)
        (out / "gate").write_text("")
        run.wait(timeout=LIMIT)
    assert (out / "end").read_text() == "end"


def test_a_run_in_the_background_is_not_stopped(caller: Caller, out: Path) -> None:
    """By a shell with jobs, on its terminal, when something has been typed."""
    os.mkfifo(out / "gate")
    (out / "gate").chmod(0o666)
    pid, keys = pty.fork()
    if pid == 0:
        command = python(caller, "import os; os.open('/out/gate', os.O_RDONLY); print('x' * 9)", out)
        script = '"$@" | cat & read -r typed; echo typed=$typed; : > gate; wait $!; echo ended=$?'
        os.chdir(out)
        os.execvpe("bash", ["bash", "-m", "-c", script, "bash", *command], caller.environment())
    try:
        os.write(keys, b"mine\n")
        seen = b""
        while b"ended=" not in seen and select.select([keys], [], [], LIMIT)[0]:
            seen += os.read(keys, 65536)
        assert b"typed=mine\r\n" in seen
        assert b"xxxxxxxxx\r\n" in seen
        assert b"ended=0" in seen
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(keys)
