"""Pipes and small files of the sandbox's processes, and the carriers of the caller's descriptors 0, 1 and 2.

A command can open its descriptors again through /proc/self/fd, and write to one that was open for reading.
So it could write to a script that a shell reads from a pipe, truncate a file, or leave the sandbox through a
directory. It could also set flags that all users of the descriptor share. So the command always gets pipes
that only this run uses.

A terminal, a file or a reader may block. Each has a process that waits for it (`Carriers`). The keeper,
which watches the limits, does not wait.
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
    """Return the caller's plan, None if the caller died meanwhile, and close other descriptors above 2."""
    close_all_but(plan_fd, status_fd)
    fill_stdio()
    for fd in (plan_fd, status_fd):
        os.set_inheritable(fd, False)
    try:
        plan: dict[str, Any] = json.loads(read_all(plan_fd))
    except ValueError:
        return None
    return plan


def write_file(path: str, text: str, *, directory: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read_file(path: str, *, directory: int | None = None) -> str:
    """Return all of a small file of the kernel."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
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
    """Open closed descriptors. Otherwise later files would get their numbers and reach the command."""
    while (fd := os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) < 3:
        os.set_inheritable(fd, True)
    os.close(fd)


def forget_stdio(*except_: int) -> None:
    """Close our copies of the pipes, so that their other ends notice when the command closes them."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        if fd not in except_:
            os.dup2(null, fd)
    os.close(null)


PIECE = 1 << 18
PAGE = os.sysconf("SC_PAGE_SIZE")
LARGEST_BURST = 16 * PAGE
LONGEST_WAIT = 0.05  # seconds between two checks of a pipe, which does not report that it is empty
NULL_DEVICE = os.makedev(1, 3)
# A closed reader, and descriptors that cannot be read or written: the command notices by itself.
EXPECTED = (errno.EPIPE, errno.ECONNRESET, errno.EISDIR, errno.EBADF, errno.ENOTCONN, errno.EINVAL)


class Carriers:
    """Processes that copy streams, and end with this one. The constructor makes the descriptors pipes.

    Terminals and /dev/null stay unchanged: the command gets its own.
    """

    def __init__(self, terminals: Sequence[tuple[int, ...]]) -> None:
        self.awaited: list[int] = []
        self.others: list[int] = []  # these may wait for a device for ever
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
        for group in groups.values():  # a pipe for each file, to keep the order of writes
            source, sink = os.pipe()
            with contextlib.suppress(OSError):  # beyond this user's limit for pipes
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
        """Start a process for the output of a pseudo-terminal, which is created later, inside."""
        here, there = socket.socketpair()
        target = next((fd for fd in terminal if fd > 0), None)
        descriptors = [there.fileno()] if target is None else [there.fileno(), target]
        self.awaited.append(_start(lambda: _show(there, target), *descriptors))
        there.close()
        return here

    def show(self, masters: Sequence[int]) -> None:
        """Send a master for each terminal, or none if nothing was started."""
        for screen, master in zip(self.screens, masters, strict=False):
            socket.send_fds(screen, [b"t"], [master])
        for screen in self.screens:
            screen.close()

    def finish(self, caller: int) -> str:
        """Wait until all output has arrived, while the caller lives, and end all. Return why bytes were lost.

        The pipes and pseudo-terminals must be closed.
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
        for pid in self.processes:  # reaped here: a container's first process may not
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
    """Start a process with only these descriptors. It ends with the number of the error that stopped it."""
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = errno.EIO
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # The keeper handles these; earlier output is still carried, in the background too.
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


class Source(Protocol):
    """Input that can be read without consuming it."""

    fd: int

    def peek(self) -> bytes:
        """Return the next bytes, at most LARGEST_BURST; nothing at the end. Raises BlockingIOError."""

    def take(self, count: int) -> None:
        """Consume `count` bytes of a peek."""


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
    """A file whose position all users of its descriptor share."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def peek(self) -> bytes:
        return os.pread(self.fd, LARGEST_BURST, os.lseek(self.fd, 0, os.SEEK_CUR))

    def take(self, count: int) -> None:
        os.lseek(self.fd, count, os.SEEK_CUR)


def find_source(fd: int) -> type[PipeSource | SocketSource | FileSource] | None:
    """Return the source of a descriptor, None if reading always consumes the bytes."""
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
    """Copy only the input that the command reads, because the caller may read the rest.

    Bytes are consumed when the command has read them. A pipe reports to its writer that a page is free, not
    that all pages are. So it is as large as its content, and grows for a command that reads all of it at
    once.
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
        except BlockingIOError:  # another reader was first
            continue
        if not seen:
            return
        size = PAGE << max(0, (min(len(seen), burst) // PAGE).bit_length() - 1)
        if size != capacity:
            try:
                capacity = fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, size)
            except OSError:  # beyond this user's limit for pipes, or the command wrote to it
                size = burst = limit = PAGE
        written = os.write(sink, seen[:size])
        wait = 0.0
        while True:
            gone = dict(room.poll())[sink] & select.POLLERR
            unread = _unread(sink)
            if gone or not unread:
                break
            limit, capacity = max(PAGE, size // 2), 0  # it reads less at once, or enlarged the pipe
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
    """Write to a descriptor, which may be non-blocking because others share its flags."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            poll.poll()


def _show(channel: socket.socket, target: int | None) -> None:
    """Copy the output of a pseudo-terminal until its other side is closed, or the terminal hangs up."""
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
