"""Starts a program as the first process of a root of its own. Run as a file, with a JSON order as argument.

The order: `root`, `pid_file`, `host`, `argv`, `environ`, and `mounts`, each a folder or file of this machine
and the place in the root that shows it. The root is mounted read-only and has its own processes and host
name; the network is the machine's. When this program ends, in whatever way, the kernel ends all in there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID = 0x00020000, 0x04000000, 0x20000000
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def must(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def enter(order: dict[str, Any]) -> None:
    """In the child: makes the root and becomes the program."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    mount("--make-rprivate", "/")
    root = Path(order["root"])
    mount("--bind", str(root), str(root))
    mount("-o", "remount,bind,ro", str(root))
    mount("-t", "proc", "proc", str(root / "proc"))
    for folder in ("sys", "dev"):
        mount("--rbind", f"/{folder}", str(root / folder))
    for source, place in order["mounts"]:
        mount("--bind", source, str(root / place.lstrip("/")))
    os.chdir(root)
    call = LIBC.syscall
    must(call(155, b".", b"."))  # pivot_root: the old root lies over the new one until it is unmounted
    must(LIBC.umount2(b".", 2))  # MNT_DETACH
    os.chroot(".")
    os.chdir("/")
    LIBC.sethostname(order["host"].encode(), len(order["host"]))
    os.umask(0o022)
    os.execve(order["argv"][0], order["argv"], order["environ"])


def main(order: dict[str, Any]) -> int:
    must(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID))
    child = os.fork()
    if child == 0:
        try:
            enter(order)
        except BaseException as error:
            print(f"{order['argv'][0]}: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def end(*_: int | FrameType | None) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    beside = Path(order["pid_file"]).with_suffix(".new")
    beside.write_text(str(child))
    beside.replace(order["pid_file"])  # whoever waits for the file never reads an empty one
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
