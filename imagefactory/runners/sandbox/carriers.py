"""The caller's descriptors 0, 1 and 2, and the processes that carry bytes to and from them.

Who holds a descriptor of a file opens it anew through /proc/self/fd: for writing what was given for reading,
or from its beginning what was given to add to; and a folder there leads out of the sandbox. So the command
has pipes. What stands behind a terminal or a file may stand still: each has a process that waits for it, and
the keeper, which watches over limits, waits for none.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
from collections.abc import Callable, Sequence

from .syscalls import PR_SET_PDEATHSIG, close_all_but, prctl

PIECE = 1 << 18


class Carriers:
    """Processes that end with this one. The command's descriptors are no files once this is made."""

    def __init__(self, terminals: Sequence[tuple[int, ...]]) -> None:
        self.inward: list[int] = []
        self.outward: list[int] = []
        if _is_file(0):
            source, sink = os.pipe()
            self.inward.append(_start(lambda: _carry(0, sink), 0, sink))
            _take(source, 0)
            os.close(sink)
        groups: dict[tuple[int, int], list[int]] = {}
        for fd in (1, 2):
            if _is_file(fd):
                state = os.fstat(fd)
                groups.setdefault((state.st_dev, state.st_ino), []).append(fd)
        for group in groups.values():  # into one file by one pipe: what was written first stands first
            source, sink = os.pipe()
            self.outward.append(_start(lambda: _carry(source, group[0]), source, group[0]))  # noqa: B023
            os.close(source)
            _take(sink, *group)
        self.terminals = terminals
        self.screens = [self._start_screen(terminal) for terminal in terminals]

    def _start_screen(self, terminal: tuple[int, ...]) -> socket.socket:
        """Shows what a pseudo-terminal gives, which comes later: it is made inside."""
        here, there = socket.socketpair()
        target = next((fd for fd in terminal if fd > 0), None)
        kept = [there.fileno()] if target is None else [there.fileno(), target]
        self.outward.append(_start(lambda: _show(there, target), *kept))
        there.close()
        return here

    def show(self, masters: Sequence[int]) -> None:
        """`masters` are one for each terminal, or none where nothing was started."""
        for screen, master in zip(self.screens, masters, strict=False):
            socket.send_fds(screen, [b"t"], [master])
        for screen in self.screens:
            screen.close()

    def finish(self, caller: int) -> None:
        """Waits until all that was written has come to its place, as long as the caller lives; ends all.

        Nobody may hold the pipes and pseudo-terminals any more.
        """
        poll, waiting = select.poll(), {os.pidfd_open(pid) for pid in self.outward}
        for fd in (*waiting, caller):
            poll.register(fd, select.POLLIN)
        while waiting:
            ended = {fd for fd, _ in poll.poll()}
            if caller in ended:
                break
            for fd in ended:
                poll.unregister(fd)
            waiting -= ended
        for pid in (*self.inward, *self.outward):  # reaped: a container's first process may reap nobody
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _is_file(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode)


def _take(pipe: int, *places: int) -> None:
    for fd in places:
        os.dup2(pipe, fd)
    os.close(pipe)


def _start(work: Callable[[], None], *kept: int) -> int:
    """A process with these descriptors alone."""
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # The keeper's to hear; what was written before is still to come, in the background too.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
                signal.signal(number, signal.SIG_IGN)
            close_all_but(*kept)
            for fd in {0, 1, 2} - {*kept}:
                os.close(fd)
            if os.getppid() == keeper:
                work()
        finally:
            os._exit(0)
    return pid


def _carry(source: int, target: int) -> None:
    """Copies from one descriptor to the other until either ends."""
    while data := os.read(source, PIECE):
        while data:
            data = data[os.write(target, data) :]


def _show(channel: socket.socket, target: int | None) -> None:
    """What a pseudo-terminal gives, until its other side is closed. A terminal that hung up takes no more."""
    received = socket.recv_fds(channel, 1, 1)[1]
    poll = select.poll()
    for master in received:
        poll.register(master, select.POLLIN)
        with contextlib.suppress(OSError):  # EIO: its end
            while True:
                poll.poll()
                try:
                    data = os.read(master, PIECE)
                except BlockingIOError:
                    continue
                while data and target is not None:
                    try:
                        data = data[os.write(target, data) :]
                    except OSError:
                        target = None
