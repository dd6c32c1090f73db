"""Pipes and small files of the sandbox's processes, and the carriers of the caller's descriptors 0, 1 and 2.

A command that holds a descriptor can open what is behind it again, through /proc/self/fd: for writing what
was given for reading. So a script that a shell reads from a pipe would be the command's to write, a file
would be emptied, a directory would lead out of the sandbox. It could also set the flags that all holders of
the descriptor share. So whatever the caller has, the command gets pipes that only this run uses.

A terminal, a file or a reader may stand still. Each has a process that waits for it (`Carriers`). The keeper,
which watches the limits, waits for none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import stat
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .syscalls import PR_SET_PDEATHSIG, close_all_but, prctl, tee


def read_plan(plan_fd: int, status_fd: int) -> dict[str, Any] | None:
    """The plan that the caller writes, None if it died meanwhile. No other descriptor above 2 stays open."""
    close_all_but(plan_fd, status_fd)
    fill_stdio()
    for fd in (plan_fd, status_fd):
        os.set_inheritable(fd, False)
    try:
        plan: dict[str, Any] = json.loads(read_all(plan_fd))
    except ValueError:
        return None
    return plan


def write_file(path: str, text: str, *, folder: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read_file(path: str, *, folder: int | None = None) -> str:
    """All of a small file, as the kernel shows its settings and counts."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    return read_all(fd).decode()


def read_all(fd: int) -> bytes:
    data = read_rest(fd)
    os.close(fd)
    return data


def read_rest(fd: int) -> bytes:
    data = b""
    while chunk := os.read(fd, 65536):
        data += chunk
    return data


def fill_stdio() -> None:
    """Closed ones would be given to the next files that are opened, and those to the command."""
    while (fd := os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) < 3:
        os.set_inheritable(fd, True)
    os.close(fd)


def forget_stdio(*except_: int) -> None:
    """The command alone holds the pipes, so that their other ends see it close them."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        if fd not in except_:
            os.dup2(null, fd)
    os.close(null)


PIECE = 1 << 18
PAGE = os.sysconf("SC_PAGE_SIZE")
LARGEST_BURST = 16 * PAGE
LONGEST_WAIT = 0.05  # seconds between two looks at a pipe that says nothing when it is empty
NULL_DEVICE = os.makedev(1, 3)
# A reader that is gone, and descriptors that cannot be read or written: the command sees that by itself.
EXPECTED = (errno.EPIPE, errno.ECONNRESET, errno.EISDIR, errno.EBADF, errno.ENOTCONN, errno.EINVAL)


class Carriers:
    """Processes that end with this one. The command's descriptors are pipes once this is made.

    Terminals and /dev/null stay as they are: the command gets its own.
    """

    def __init__(self, terminals: Sequence[tuple[int, ...]]) -> None:
        self.awaited: list[int] = []
        self.others: list[int] = []  # that may wait for a device for ever
        others = {0, 1, 2}.difference(*terminals)
        if 0 in others and not is_null(0):
            source, sink = os.pipe()
            carrier = _start(lambda: _feed_from(0, sink), 0, sink)
            (self.awaited if find_source(0) else self.others).append(carrier)
            _take(source, 0)
            os.close(sink)
        groups: dict[tuple[int, int], list[int]] = {}
        for fd in (1, 2):
            if fd in others and not is_null(fd):
                state = os.fstat(fd)
                groups.setdefault((state.st_dev, state.st_ino), []).append(fd)
        for group in groups.values():  # into one file by one pipe: what was written first stands first
            source, sink = os.pipe()
            with contextlib.suppress(OSError):  # beyond what this user may have in pipes
                fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, PIECE)
            self.awaited.append(_start(lambda: _carry(source, group[0]), source, group[0]))  # noqa: B023
            os.close(source)
            _take(sink, *group)
        self.terminals = terminals
        self.screens = [self._start_screen(terminal) for terminal in terminals]

    @property
    def processes(self) -> list[int]:
        return [*self.awaited, *self.others]

    def _start_screen(self, terminal: tuple[int, ...]) -> socket.socket:
        """Shows what a pseudo-terminal gives, which comes later: it is made inside."""
        here, there = socket.socketpair()
        target = next((fd for fd in terminal if fd > 0), None)
        descriptors = [there.fileno()] if target is None else [there.fileno(), target]
        self.awaited.append(_start(lambda: _show(there, target), *descriptors))
        there.close()
        return here

    def show(self, masters: Sequence[int]) -> None:
        """`masters` are one for each terminal, or none where nothing was started."""
        for screen, master in zip(self.screens, masters, strict=False):
            socket.send_fds(screen, [b"t"], [master])
        for screen in self.screens:
            screen.close()

    def finish(self, caller: int) -> str:
        """Wait until all that was written has come to its place, as long as the caller lives; end all.

        No one may hold the pipes and pseudo-terminals any more. Return why bytes were lost, else "".
        """
        poll = select.poll()
        waiting = {os.pidfd_open(pid) for pid in self.awaited}
        for fd in (*waiting, caller):
            poll.register(fd, select.POLLIN)
        while waiting:
            ended = {fd for fd, _ in poll.poll()}
            if caller in ended:
                break
            for fd in ended:
                poll.unregister(fd)
            waiting -= ended
        codes = []
        for pid in self.processes:  # reaped: a container's first process may reap nobody
            os.kill(pid, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return next((os.strerror(code) for code in codes if code > 0), "")


def is_null(fd: int) -> bool:
    status = os.fstat(fd)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == NULL_DEVICE


def _take(pipe: int, *places: int) -> None:
    for fd in places:
        os.dup2(pipe, fd)
    os.close(pipe)


def _start(work: Callable[[], None], *descriptors: int) -> int:
    """Start a process with these descriptors alone. It ends with the number of the error that stopped it."""
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = errno.EIO
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # The keeper's to hear; what was written before is still to come, in the background too.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
                signal.signal(number, signal.SIG_IGN)
            close_all_but(*descriptors)
            for fd in {0, 1, 2} - {*descriptors}:
                os.close(fd)
            if os.getppid() == keeper:
                work()
            code = 0
        except OSError as error:
            code = 0 if error.errno in EXPECTED else min(error.errno or errno.EIO, 255)
        finally:
            os._exit(code)
    return pid


# --- to the command --------------------------------------------------------------------------------


class Source(Protocol):
    """What can be looked at before it is taken."""

    fd: int

    def peek(self) -> bytes:
        """Return what comes next, at most LARGEST_BURST; nothing at the end. Raises BlockingIOError."""

    def take(self, count: int) -> None:
        """Take `count` bytes that were looked at."""


class PipeSource:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.copies, self.copy = os.pipe()
        self.null = os.open("/dev/null", os.O_WRONLY)

    def peek(self) -> bytes:
        count = tee(self.fd, self.copy, LARGEST_BURST)
        return os.read(self.copies, count) if count else b""

    def take(self, count: int) -> None:
        while count > 0:
            count -= os.splice(self.fd, self.null, count, flags=os.SPLICE_F_NONBLOCK) or count


class SocketSource:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.socket = socket.socket(fileno=fd)

    def peek(self) -> bytes:
        return self.socket.recv(LARGEST_BURST, socket.MSG_PEEK | socket.MSG_DONTWAIT)

    def take(self, count: int) -> None:
        self.socket.recv(count, socket.MSG_DONTWAIT)


class FileSource:
    """A file whose position all that hold its descriptor share."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def peek(self) -> bytes:
        return os.pread(self.fd, LARGEST_BURST, os.lseek(self.fd, 0, os.SEEK_CUR))

    def take(self, count: int) -> None:
        os.lseek(self.fd, count, os.SEEK_CUR)


def find_source(fd: int) -> type[PipeSource | SocketSource | FileSource] | None:
    """Return how a descriptor is looked at, None where bytes that were read cannot be left there."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        return PipeSource
    if stat.S_ISSOCK(mode):
        return SocketSource
    return FileSource if stat.S_ISREG(mode) or stat.S_ISBLK(mode) else None


def _feed_from(fd: int, sink: int) -> None:
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        return
    source = find_source(fd)
    if source:
        _feed(source(fd), sink)
    else:
        _carry(fd, sink)


def _feed(source: Source, sink: int) -> None:
    """Give the command what it reads, and take no more than that: the caller may want to read the rest.

    Bytes are taken when the command has read them. A pipe tells its writer that one page is free, not that
    all are. So it is as large as what is in it, and grows for a command that reads all of it at once.
    """
    ready, room = select.poll(), select.poll()
    ready.register(source.fd, select.POLLIN)
    ready.register(sink, 0)
    room.register(sink, select.POLLOUT)
    burst, limit, capacity = PAGE, LARGEST_BURST, 0
    while True:
        if sink in dict(ready.poll()):
            return  # no one is left to read
        try:
            seen = source.peek()
        except BlockingIOError:  # somebody else was first
            continue
        if not seen:
            return
        size = PAGE << max(0, (min(len(seen), burst) // PAGE).bit_length() - 1)
        if size != capacity:
            try:
                capacity = fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, size)
            except OSError:  # beyond what this user may have in pipes, or the command wrote to it
                size = burst = limit = PAGE
        written = os.write(sink, seen[:size])
        wait = 0.0
        while True:
            gone = dict(room.poll())[sink] & select.POLLERR
            unread = _unread(sink)
            if gone or not unread:
                break
            limit, capacity = max(PAGE, size // 2), 0  # it reads less at once, or made the pipe larger
            wait = min(LONGEST_WAIT, wait * 2 or 0.001)
            time.sleep(wait)
        source.take(written - min(unread, written))
        if gone:
            return
        burst = min(burst * 2, limit)


def _unread(pipe: int) -> int:
    count = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return int.from_bytes(count, "little")


# --- from the command ------------------------------------------------------------------------------


def _carry(source: int, target: int) -> None:
    """Copy from one descriptor to the other until either ends."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(target, 0)
    while target not in dict(poll.poll()):
        try:
            data = os.read(source, PIECE)
        except BlockingIOError:
            continue
        if not data:
            return
        _write_all(target, data)


def _write_all(target: int, data: bytes) -> None:
    """Write to a descriptor whose flags are not ours to change: others may have made it non-blocking."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            poll.poll()


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
                        _write_all(target, data)
                        break
                    except OSError:
                        target = None
