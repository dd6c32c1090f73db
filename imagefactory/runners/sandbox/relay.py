"""Starts a program of the host's that runs an image, and gives it pipes and terminals of its own.

For apptainer, which hands the caller's descriptors on to the image: python -I -S .../sandbox relay ...
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .carriers import Carriers
from .init import FORWARDED
from .streams import fill_stdio, forget_stdio
from .syscalls import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, close_all_but, prctl
from .terminals import Relay, find_terminals, open_terminal

END_NOW = signal.SIGUSR2
LONGEST_WAIT = 1000  # milliseconds


def main(lost: int, passed: int, argv: Sequence[str]) -> int:
    """Run `argv` with the descriptor `passed` too. Write to `lost` why bytes were lost on their way."""
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
    own = (os.geteuid(), -1)
    pairs = [open_terminal(group, own, interactive=interactive and 0 in group) for group in groups]
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
    with contextlib.ExitStack() as shown:
        relays = [
            shown.enter_context(Relay(master, group, interactive=interactive and 0 in group))
            for master, group in zip(masters, groups, strict=True)
        ]
        if not interactive:
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background this process does not stop

        def resize(*_: Any) -> None:
            for relay in relays:
                relay.resize()

        signal.signal(signal.SIGWINCH, resize)
        if not _wait(ended, caller, relays):
            end_all()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        end_all()  # what it left holds the pipes
        os.write(lost, carriers.finish(caller).encode())
    return code if code >= 0 else 128 - code


def _wait(ended: int, caller: int, relays: Sequence[Relay]) -> bool:
    """Return when the program has ended, or, False then, its caller."""
    while True:
        poll = select.poll()
        for fd in (ended, caller):
            poll.register(fd, select.POLLIN)
        waits = [wait for relay in relays if (wait := relay.register(poll)) is not None]
        events = dict(poll.poll(min([*waits, LONGEST_WAIT])))
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
    """Every process below `pid`, found by who its parent is; `but` and what is below these left out."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name before it may hold blanks and brackets (proc(5)).
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = [child for child in children.get(waiting.pop(), []) if child not in but]
        found += below
        waiting += below
    return tuple(found)
