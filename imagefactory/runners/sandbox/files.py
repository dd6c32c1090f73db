"""The caller's files on descriptors 0, 1 and 2: their bytes go in and out, the files themselves do not.

Who holds a descriptor opens it anew through /proc/self/fd: for writing what was given for reading, or from
its beginning what was given to add to; and a folder there leads out of the sandbox. So the command has pipes.
"""

from __future__ import annotations

import os
import signal
import stat

from .syscalls import PR_SET_PDEATHSIG, close_all_but, prctl

PIECE = 1 << 18


class Carriers:
    """A process for each pipe, which ends with it. The command's descriptors are pipes once this is made."""

    def __init__(self) -> None:
        self.inward: list[int] = []
        self.outward: list[int] = []
        if _is_file(0):
            source, sink = os.pipe()
            self.inward.append(_carry(0, sink))
            _take(source, 0)
            os.close(sink)
        groups: dict[tuple[int, int], list[int]] = {}
        for fd in (1, 2):
            if _is_file(fd):
                state = os.fstat(fd)
                groups.setdefault((state.st_dev, state.st_ino), []).append(fd)
        for group in groups.values():  # into one file by one pipe: what was written first stands first
            source, sink = os.pipe()
            self.outward.append(_carry(source, group[0]))
            os.close(source)
            _take(sink, *group)

    def finish(self) -> None:
        """Waits until all that was written has come to its file. Nobody may hold the pipes any more."""
        for pid in self.inward:
            os.kill(pid, signal.SIGKILL)
        for pid in (*self.inward, *self.outward):
            os.waitpid(pid, 0)


def _is_file(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode)


def _take(pipe: int, *places: int) -> None:
    for fd in places:
        os.dup2(pipe, fd)
    os.close(pipe)


def _carry(source: int, target: int) -> int:
    """Starts what copies from one descriptor to the other until either ends."""
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(
                    number, signal.SIG_IGN
                )  # the keeper's; what was written before is still to come
            close_all_but(source, target)
            for fd in {0, 1, 2} - {source, target}:
                os.close(fd)
            while os.getppid() == keeper and (data := os.read(source, PIECE)):
                while data:
                    data = data[os.write(target, data) :]
        finally:
            os._exit(0)
    return pid
