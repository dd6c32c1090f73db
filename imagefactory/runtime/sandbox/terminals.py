"""Relay the caller's terminals to pseudo-terminals of the sandbox. A command never gets the originals.

If 0 and 1 are terminals the command is interactive: the caller's terminal is raw, and the pseudo-terminal
does the rest. Otherwise other programs use that terminal too, such as a pager after a pipe. So its mode
stays, and this process reads lines while the terminal delivers lines: a program that reads keys changes its
mode.

`run_relayed` starts a program of the host with such pipes and terminals, because apptainer passes the
caller's descriptors on to the image: python -I -S .../sandbox relay ...
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import termios
import tty
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .streams import Carriers, fill_stdio, forget_stdio
from .syscalls import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, close_all_but, prctl

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

LOOK_AGAIN = 250  # milliseconds until the next check of a terminal that another program uses now
END_OF_FILE = b"\x04"
INPUT, OUTPUT, LOCAL, CHARACTERS = 0, 1, 3, 6  # of what tcgetattr gives


def find_terminals(*, interactive: bool) -> list[tuple[int, ...]]:
    """Return the terminals among descriptors 0, 1 and 2, grouped by terminal."""
    devices = {fd: os.fstat(fd).st_rdev for fd in (0, 1, 2) if os.isatty(fd)}
    return group_terminals(devices, interactive=interactive)


def group_terminals(devices: dict[int, int], *, interactive: bool) -> list[tuple[int, ...]]:
    """Group descriptors by their terminals' numbers. For an interactive command 0 and 1 are the same."""
    same = {devices[1]: devices[0]} if interactive else {}
    groups: dict[int, list[int]] = {}
    for fd, device in sorted(devices.items()):
        groups.setdefault(same.get(device, device), []).append(fd)
    return [tuple(group) for group in groups.values()]


def open_terminal(group: tuple[int, ...], owner: tuple[int, int], *, interactive: bool) -> tuple[int, int]:
    """Return a new pseudo-terminal for a caller's: the relay's side and the command's."""
    master, follower = os.openpty()
    os.fchown(follower, *owner)
    copy_size(group[0], follower)
    if not interactive:
        # The caller's terminal edits lines, echoes and makes signals; here lines are only lines.
        state = termios.tcgetattr(follower)
        state[INPUT], state[LOCAL] = 0, termios.ICANON
        state[OUTPUT] &= ~termios.OPOST
        for special in (termios.VERASE, termios.VKILL, termios.VEOL):
            state[CHARACTERS][special] = b"\0"
        state[CHARACTERS][termios.VEOF] = END_OF_FILE
        termios.tcsetattr(follower, termios.TCSANOW, state)
    return master, follower


def copy_size(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8)))


def send_groups(channel: socket.socket, *groups: list[int]) -> None:
    """Send all descriptors. The kernel takes 253 at once."""
    for number, group in enumerate(groups):
        for start in range(0, len(group), 200):
            socket.send_fds(channel, [bytes([number])], group[start : start + 200])


def receive_groups(channel: socket.socket, count: int) -> list[list[int]]:
    """Return what `send_groups` sent, after the other side is closed. The init sends all or nothing."""
    groups: list[list[int]] = [[] for _ in range(count)]
    while True:
        number, received, _, _ = socket.recv_fds(channel, 1, 200)
        if not number:
            return groups
        groups[number[0]] += received


class Relay:
    """A terminal of the caller on one side, the sandbox's own pseudo-terminal on the other.

    Input passes here; output passes in a separate process (`Carriers`).
    """

    def __init__(self, master: int, group: tuple[int, ...], *, interactive: bool) -> None:
        self.master, self.group, self.interactive = master, group, interactive
        self.reads = 0 in group
        self.pending = b""  # typed, and not yet read
        os.set_blocking(master, False)  # a command that reads nothing must not block
        self.resize()
        self.saved = None
        with contextlib.suppress(termios.error):  # hung up, as all reads and writes will show
            if interactive:
                self.saved = termios.tcgetattr(0)
                tty.setraw(0, termios.TCSANOW)  # keep what was typed before

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(termios.error):
            if self.saved is not None:
                termios.tcsetattr(0, termios.TCSADRAIN, self.saved)

    def resize(self) -> None:
        copy_size(self.group[0], self.master)

    def may_read(self) -> bool:
        """Return whether input now is for this command."""
        if self.interactive:
            return True
        try:
            if os.tcgetpgrp(0) != os.getpgrp():
                return False  # in the background
        except OSError:
            pass  # a terminal that starts no jobs
        try:
            return bool(termios.tcgetattr(0)[LOCAL] & termios.ICANON)
        except termios.error:
            return False

    def register(self, poll: select.poll) -> int | None:
        """Register the next event, and return the milliseconds until the next check (None: no limit)."""
        if self.pending:
            poll.register(self.master, select.POLLOUT)
        elif self.reads and self.may_read():
            poll.register(0, select.POLLIN)
        elif self.reads:
            return LOOK_AGAIN
        return None

    def pass_on(self, events: dict[int, int]) -> None:
        if self.reads and 0 in events and self.may_read():
            self.take(events[0])
        if self.pending:
            with contextlib.suppress(OSError):  # full, or at its end: the next check shows it
                self.pending = self.pending[os.write(self.master, self.pending) :]
        if events.get(self.master, 0) & select.POLLHUP:  # the other side is closed for good
            self.reads, self.pending = False, b""

    def take(self, event: int) -> None:
        try:
            typed = os.read(0, 65536)
        except OSError:  # hung up, or it has just become another program's
            typed = b""
        if typed:
            whole = self.interactive or typed.endswith(b"\n")
            self.pending = typed if whole else typed + END_OF_FILE  # as a terminal delivers part of a line
        elif self.interactive or event & (select.POLLHUP | select.POLLERR):
            self.reads = False
        else:
            self.pending = END_OF_FILE


@contextlib.contextmanager
def relayed(
    masters: Sequence[int], groups: Sequence[tuple[int, ...]], *, interactive: bool
) -> Iterator[list[Relay]]:
    """Relay the caller's terminals, with their sizes, and restore them at the end."""
    with contextlib.ExitStack() as stack:
        relays = [
            stack.enter_context(Relay(master, group, interactive=interactive and 0 in group))
            for master, group in zip(masters, groups, strict=False)
        ]

        def resize(*_: Any) -> None:
            for relay in relays:
                relay.resize()

        signal.signal(signal.SIGWINCH, resize)
        if not interactive:
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background this process does not stop
        yield relays


def poll_all(descriptors: Iterable[int], relays: Sequence[Relay], wait: int) -> dict[int, int]:
    """Return the events of descriptors and relays, after at most `wait` milliseconds."""
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    waits = [pause for relay in relays if (pause := relay.register(poll)) is not None]
    return dict(poll.poll(min([*waits, wait])))


END_NOW = signal.SIGUSR2
LONGEST_WAIT = 1000  # milliseconds


def run_relayed(lost: int, passed: int, argv: Sequence[str]) -> int:
    """Run `argv` with the descriptor `passed` too. Write the reason for lost bytes to `lost`."""
    parent = os.getppid()
    caller = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 1
    close_all_but(lost, passed, caller)
    fill_stdio()
    os.set_inheritable(lost, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what outlives the program stays below this process
    interactive = os.isatty(0) and os.isatty(1)
    groups = find_terminals(interactive=interactive)
    carriers = Carriers(groups)
    owner = (os.geteuid(), -1)
    pairs = [open_terminal(group, owner, interactive=interactive and 0 in group) for group in groups]
    masters = [master for master, _ in pairs]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, END_NOW))
    child = os.fork()
    if child == 0:
        _become(argv, groups, [follower for _, follower in pairs], passed, interactive=interactive)
    ended = os.pidfd_open(child)

    def end_all(*_: Any) -> None:
        for pid in descendants(os.getpid(), but=carriers.processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def forward(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.signal(END_NOW, end_all)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(passed)
    for _, follower in pairs:
        os.close(follower)
    forget_stdio(*(fd for group in groups for fd in group))
    carriers.show(masters)
    with relayed(masters, groups, interactive=interactive) as relays:
        if not _wait(ended, caller, relays):
            end_all()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        end_all()  # its children have the pipes open
        os.write(lost, carriers.finish(caller).encode())
    return code if code >= 0 else 128 - code


def _wait(ended: int, caller: int, relays: Sequence[Relay]) -> bool:
    """Wait until the program or its caller ends. Return False for the caller."""
    while True:
        events = poll_all((ended, caller), relays, LONGEST_WAIT)
        if ended in events or caller in events:
            return ended in events
        for relay in relays:
            relay.pass_on(events)


def _become(
    argv: Sequence[str],
    groups: Sequence[tuple[int, ...]],
    followers: Sequence[int],
    passed: int,
    *,
    interactive: bool,
) -> None:
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if interactive:
            fcntl.ioctl(followers[0], termios.TIOCSCTTY, 0)
        for group, follower in zip(groups, followers, strict=True):
            for fd in group:
                os.dup2(follower, fd)
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        close_all_but(passed)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(argv[0], tuple(argv))
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def descendants(pid: int, *, but: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the child processes of `pid` at all levels, without those in `but` and their children."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", errors="replace") as stat:
                # The name before it may hold blanks and brackets (proc(5)).
                parent = int(stat.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    processes, waiting = [], [pid]
    while waiting:
        below = [child for child in children.get(waiting.pop(), []) if child not in but]
        processes += below
        waiting += below
    return tuple(processes)
