"""What the two processes read and write: pipes, small files, and a terminal that is relayed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import termios
import tty


def write_file(path: str, text: str, *, folder: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def receive_terminal(channel: socket.socket) -> int | None:
    """The sandbox's side sends it, or ends without."""
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    return fds[0] if fds else None


class Relay:
    """The caller's terminal in raw mode on one side, the sandbox's own pseudo-terminal on the other."""

    def __init__(self, master: int) -> None:
        self.master, self.open = master, True
        self.saved = termios.tcgetattr(0)
        self.resize()
        signal.signal(signal.SIGWINCH, lambda *_: self.resize())
        tty.setraw(0)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(0, termios.TCSADRAIN, self.saved)

    def resize(self) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def register(self, poll: select.poll) -> None:
        poll.register(0, select.POLLIN)
        poll.register(self.master, select.POLLIN)

    def pass_on(self, events: dict[int, int], poll: select.poll) -> None:
        if 0 in events:
            typed = read_some(0)
            if typed:
                write_all(self.master, typed)
            else:
                poll.unregister(0)
        if self.master in events:
            shown = read_some(self.master)
            if shown:
                write_all(1, shown)
            else:
                poll.unregister(self.master)
                self.open = False

    def drain(self) -> None:
        """What was written just before the end."""
        while self.open and (shown := read_some(self.master)):
            write_all(1, shown)


def read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # a pseudo-terminal whose other side is closed says EIO
        return b""


def read_all(fd: int) -> bytes:
    data = b""
    while chunk := os.read(fd, 65536):
        data += chunk
    os.close(fd)
    return data


def write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def forget_stdio() -> None:
    """The command alone holds the pipes, so that their other ends see it close them."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
