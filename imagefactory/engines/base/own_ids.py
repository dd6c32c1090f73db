"""Starts a command in a user namespace where every id is what it is outside. For root; standard library.

Root's own namespace is the machine's, and what is registered with binfmt_misc there holds for all of it.
"""

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000


def write_maps(target: int) -> None:
    for name in ("uid_map", "gid_map"):
        ranges = [line.split() for line in Path(f"/proc/self/{name}").read_text().splitlines()]
        same = "".join(f"{inside} {inside} {count}\n" for inside, _, count in ranges)
        Path(f"/proc/{target}/{name}").write_text(same)


def main(command: list[str]) -> None:
    target, (ready, go) = os.getpid(), os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.close(go)
        if os.read(ready, 1):
            write_maps(target)
        os._exit(0)
    os.close(ready)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        sys.exit(f"no user namespace: {os.strerror(ctypes.get_errno())}")
    os.write(go, b"1")
    os.close(go)
    if os.waitpid(mapper, 0)[1]:
        sys.exit("the ids of a user namespace could not be set")
    os.execvp(command[0], command)  # noqa: S606


main(sys.argv[1:])
