"""Which programs a sandbox may start: those of its own tree, and none of the host's."""

from __future__ import annotations

import os
import struct

from .syscalls import syscall

# Numbers of system calls, the same on every architecture, and values from the kernel's linux/landlock.h.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION, PATH_BENEATH, EXECUTE, REFER = 1, 1, 1, 1 << 13
OLDEST = 2  # Linux 5.19: the first that leaves renaming from folder to folder alone when it is asked to


def is_there() -> bool:
    """Whether the kernel has it, new enough: built in, started with, refused by no container's filter."""
    try:
        return syscall(CREATE_RULESET, None, 0, VERSION) >= OLDEST
    except OSError:
        return False


def start_own_programs_only(*others: int) -> bool:
    """For this process and its children, and `others`, open files. False where Landlock is missing or old.

    The process that starts the command runs the host's Python. Where the image leads that start to
    /proc/self/exe, by a link or by the first line of a script, the command is that very file, and some
    kernels (6.11) let a running program be written to by whoever owns it.
    """
    if not is_there():
        return False
    handled = struct.pack("=Q", EXECUTE | REFER)
    rules = syscall(CREATE_RULESET, handled, len(handled), 0)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", EXECUTE | REFER, root), 0)
        for file in others:
            syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", EXECUTE, file), 0)
        syscall(RESTRICT_SELF, rules, 0)
    finally:
        os.close(root)
        os.close(rules)
    return True
