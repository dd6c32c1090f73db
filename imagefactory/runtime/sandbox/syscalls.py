"""Linux system calls that Python lacks, the step in which one failed, and two filters.

The seccomp filter denies system calls to a command. Landlock restricts the programs that a sandbox may start
to its own tree, without the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
MNT_DETACH = 2
# System calls newer than most C libraries; their numbers are the same on every architecture.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 428, 429, 430, 431, 432
SYS_FSPICK = 433
SYS_CLOSE_RANGE, SYS_OPENAT2, SYS_MOUNT_SETATTR = 436, 437, 442
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE = -100, 0x1000, 0x8000, 1
AT_SYMLINK_NOFOLLOW = 0x100
MOVE_FROM_FD, MOVE_TO_FD = 4, 0x40
FSCONFIG_FLAG, FSCONFIG_STRING, FSCONFIG_CREATE, FSCONFIG_RECONFIGURE = 0, 1, 6, 7
FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC, FSPICK_CLOEXEC, FSPICK_EMPTY_PATH = 1, 1, 1, 8
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 2, 4, 8, 0x10
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP = 1, 4, 15, 22
PR_SET_CHILD_SUBREAPER = 36
PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 28, 38, 47
SECUREBITS_LOCKED = (
    0b11101111  # no privileges by uid 0, no fix-ups, no ambient ones; keep_caps off; all locked
)
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
KEYCTL_JOIN_SESSION_KEYRING = 1
OVERLAY_OPTIONS_LIMIT = 4095  # bytes: mount(2) takes one page


class SetupError(Exception):
    """A step that failed before the command was started."""

    def __init__(self, step: str, number: int, detail: str) -> None:
        super().__init__(f"{step}: {detail}")
        self.step, self.number, self.detail = step, number, detail


@contextlib.contextmanager
def step(name: str, about: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = os.strerror(error.errno) if error.errno else str(error)
        raise SetupError(name, error.errno or 0, f"{about}: {text}" if about else text) from error


def check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def syscall(number: int, *arguments: Any) -> int:
    passed = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return check(LIBC.syscall(ctypes.c_long(number), *passed))


def unshare(flags: int) -> None:
    check(LIBC.unshare(ctypes.c_int(flags)))


def enter_user_namespace(map_ids: Callable[[int], int]) -> None:
    """Enter a user namespace. A child outside sets its ids: `map_ids(pid)` returns 0 for success."""
    target, (ready, go) = os.getpid(), os.pipe()
    mapper = os.fork()
    if mapper == 0:
        code = 1
        os.close(go)
        try:
            code = map_ids(target) if os.read(ready, 1) else 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    os.close(ready)
    try:
        with step("user-namespace"):
            unshare(CLONE_NEWUSER)
        os.write(go, b"1")
    finally:
        os.close(go)
        code = os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1])
    if code:
        raise SetupError("user-namespace-map", max(code, 0), os.strerror(max(code, 0)))


def end_with(keeper: int) -> None:
    """Let this process end with its parent, the other end of `keeper`. A change of ids resets that."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(keeper, 0)
    if poll.poll(0):
        os._exit(125)


def reap(child: int) -> int:
    """Reap all processes until `child` ends. Return its exit code, 128 + N for signal N."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def reset_signals() -> None:
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)


def tee(source: int, target: int, count: int) -> int:
    """Copy bytes from pipe to pipe without consuming them. Raises BlockingIOError without bytes."""
    return check(LIBC.tee(source, target, ctypes.c_size_t(count), ctypes.c_uint(os.SPLICE_F_NONBLOCK)))


def prctl(option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    check(LIBC.prctl(ctypes.c_int(option), *(ctypes.c_ulong(value) for value in padded)))


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    source = kind.encode()
    check(LIBC.mount(source, os.fsencode(target), source, ctypes.c_ulong(flags), os.fsencode(options)))


def clone_tree(path: str, *, follow: bool = True) -> int:
    """Return a detached copy of the mounts at `path`, without `follow` of a link itself."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC | (0 if follow else AT_SYMLINK_NOFOLLOW)
    return syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)


def restrict(tree: int, attributes: int) -> None:
    """Add attributes to every mount of a tree. Read-only mounts stay read-only."""
    request = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = AT_EMPTY_PATH | AT_RECURSIVE
    syscall(SYS_MOUNT_SETATTR, tree, b"", flags, request, len(request))


def attach(tree: int, place: int) -> None:
    """Mount a detached tree on an open file or directory, and close both descriptors."""
    move(tree, place)
    os.close(tree)


def move(tree: int, target_fd: int) -> None:
    """Mount a detached tree, and keep `tree` open as the top of the mounted tree."""
    syscall(SYS_MOVE_MOUNT, tree, b"", target_fd, b"", MOVE_FROM_FD | MOVE_TO_FD)
    os.close(target_fd)


def new_mount(kind: str, attributes: int, **options: str) -> int:
    """Return a new detached file system. A new proc is that of this pid namespace."""
    context = syscall(SYS_FSOPEN, kind.encode(), FSOPEN_CLOEXEC)
    try:
        for name, value in options.items():
            syscall(SYS_FSCONFIG, context, FSCONFIG_STRING, name.encode(), value.encode(), 0)
        syscall(SYS_FSCONFIG, context, FSCONFIG_CREATE, None, None, 0)
        return syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def reconfigure(top: int, *flags: str) -> None:
    """Set options of the file system whose mount has this top directory."""
    context = syscall(SYS_FSPICK, top, b"", FSPICK_EMPTY_PATH | FSPICK_CLOEXEC)
    try:
        for flag in flags:
            syscall(SYS_FSCONFIG, context, FSCONFIG_FLAG, flag.encode(), None, 0)
        syscall(SYS_FSCONFIG, context, FSCONFIG_RECONFIGURE, None, None, 0)
    finally:
        os.close(context)


def close_folder(target_fd: int) -> None:
    """Make the mount with this open top read-only. Mounts below it do not change."""
    request = struct.pack("=QQQQ", ATTR_RDONLY, 0, 0, 0)
    syscall(SYS_MOUNT_SETATTR, target_fd, b"", AT_EMPTY_PATH, request, len(request))


def open_root() -> int:
    """Return this process's root. Only a kernel without openat2 fails here."""
    return open_resolved(AT_FDCWD, "/", RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)


def open_beneath(directory: int, name: str) -> int:
    """Open `name` in an open directory, only as a path. A link is opened itself."""
    return open_resolved(directory, name, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)


def open_resolved(directory: int, name: str, resolve: int) -> int:
    how = struct.pack("=QQQ", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, 0, resolve)
    return syscall(SYS_OPENAT2, directory, os.fsencode(name), how, len(how))


def close_all_but(*descriptors: int) -> None:
    """Close every descriptor above 2 except these. Python's closerange is slow with an old C library."""
    first = 3
    for fd in (*sorted(descriptors), 0xFFFFFFFF):
        if first < fd:
            syscall(SYS_CLOSE_RANGE, first, fd - 1, 0)
        first = max(first, fd + 1)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))


def wipe_arguments() -> None:
    """Overwrite this process's command line, which has host paths that processes inside could read."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), after pid and comm
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)


# Numbers from the kernel's tables (asm/unistd_64.h, asm-generic/unistd.h).
ARCHITECTURES: dict[str, dict[str, int]] = {
    "x86_64": {
        "audit": 0xC000003E, "open": 2, "ioctl": 16, "socket": 41, "fsync": 74, "fdatasync": 75, "creat": 85,
        "chmod": 90, "fchmod": 91, "syslog": 103, "mknod": 133, "pivot_root": 155, "sync": 162,
        "add_key": 248, "request_key": 249, "keyctl": 250, "openat": 257, "mknodat": 259, "fchmodat": 268,
        "sync_file_range": 277, "perf_event_open": 298, "fanotify_init": 300, "fanotify_mark": 301,
        "open_by_handle_at": 304, "syncfs": 306, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "audit": 0xC00000B7, "ioctl": 29, "mknodat": 33, "pivot_root": 41, "fchmod": 52, "fchmodat": 53,
        "openat": 56, "sync": 81, "fsync": 82, "fdatasync": 83, "sync_file_range": 84, "syslog": 116,
        "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241,
        "fanotify_init": 262, "fanotify_mark": 263, "open_by_handle_at": 265, "syncfs": 267, "bpf": 280,
        "userfaultfd": 282,
    },
}  # fmt: skip
for _table in ARCHITECTURES.values():
    _table.update(io_uring_setup=425, io_uring_enter=426, io_uring_register=427, openat2=437, fchmodat2=452)
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NOTHING_DONE = REFUSE | 0  # the call returns 0
NO_CALL = REFUSE | errno.ENOSYS
NOT_PERMITTED = REFUSE | errno.EPERM
# Reachable without any privilege, large, and not needed for a computation. The kernel's key rings and vsock
# are not fully namespaced, and its log is the machine's. The rest is attack surface.
DENIED = (
    "add_key", "request_key", "keyctl", "perf_event_open", "open_by_handle_at", "bpf", "userfaultfd",
    "syslog", "fanotify_init", "fanotify_mark",
)  # fmt: skip
# A build's directory is thrown away: nothing in it must survive a power failure. dpkg waits for the disk at
# each package, about half of the seconds of a base on a busy disk.
SYNCS = ("fsync", "fdatasync", "sync", "syncfs", "sync_file_range")
UNKNOWN = ("io_uring_setup", "io_uring_enter", "io_uring_register", "openat2")
# system call -> (index of its mode argument, index of its flags argument): setuid and setgid files made by
# uid 0 of the sandbox would be the caller's on a writable mount of the host.
MODES: dict[str, tuple[int, int | None]] = {
    "chmod": (1, None), "fchmod": (1, None), "fchmodat": (2, None), "fchmodat2": (2, None),
    "creat": (1, None), "mknod": (1, None), "mknodat": (2, None), "open": (2, 1), "openat": (3, 2),
}  # fmt: skip
CREATES = 0o100 | 0o20000000  # O_CREAT, O_TMPFILE
FAMILIES = (1, 2, 10)  # unix, inet, inet6
NETLINK, NETLINK_PROTOCOLS = 16, (0, 15, 20)  # interfaces and routes, hot-plugging, RDMA: what NCCL looks at
TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
Instruction = tuple[int, int, int, int]


def seccomp_program(machine: str, *, build: bool = False) -> list[Instruction]:
    """Return the BPF filter as rows of four numbers. A build may create setuid files, and never syncs.

    The numbers are code, jump if true, jump if false, constant.
    """
    calls = ARCHITECTURES[machine]

    def argument(index: int) -> Instruction:
        return (LOAD, 0, 0, 16 + 8 * index)

    program: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, calls["audit"]),
        (RETURN, 0, 0, NO_CALL),  # 32-bit calls have other numbers
        (LOAD, 0, 0, 0),
        (JUMP_AT_LEAST, 0, 1, 0x40000000),
        (RETURN, 0, 0, NO_CALL),  # x32
    ]

    def rule(name: str, body: list[Instruction]) -> None:
        if name in calls:
            program.extend([(JUMP_EQUAL, 0, len(body), calls[name]), *body])

    for name in DENIED:
        rule(name, [(RETURN, 0, 0, NOT_PERMITTED)])
    for name in UNKNOWN:
        rule(name, [(RETURN, 0, 0, NO_CALL)])
    for name in SYNCS if build else ():
        rule(name, [(RETURN, 0, 0, NOTHING_DONE)])
    for name, (mode, flags) in () if build else MODES.items():
        tests = [argument(mode), (JUMP_ANY_BIT, 0, 1, 0o6000), (RETURN, 0, 0, NOT_PERMITTED)]
        guard = [argument(flags), (JUMP_ANY_BIT, 0, len(tests), CREATES)] if flags is not None else []
        rule(name, [*guard, *tests, (RETURN, 0, 0, ALLOW)])
    families = [*allow_any(FAMILIES, 0), (RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT)]
    protocols = [
        argument(2),
        *allow_any(NETLINK_PROTOCOLS, len(families)),
        (RETURN, 0, 0, REFUSE | errno.EPROTONOSUPPORT),
    ]
    netlink = (JUMP_EQUAL, 0, len(protocols), NETLINK)
    rule("socket", [argument(0), netlink, *protocols, *families, (RETURN, 0, 0, ALLOW)])
    injection = [item for request in TERMINAL_INJECTION for item in (
        (JUMP_EQUAL, 0, 1, request), (RETURN, 0, 0, NOT_PERMITTED)
    )]  # fmt: skip
    rule("ioctl", [argument(1), *injection, (RETURN, 0, 0, ALLOW)])
    program.append((RETURN, 0, 0, ALLOW))
    return program


def allow_any(values: tuple[int, ...], between: int) -> list[Instruction]:
    """Return a jump for each of `values`, over the rejection and `between` more instructions."""
    return [(JUMP_EQUAL, len(values) - number + between, 0, value) for number, value in enumerate(values)]


def install_seccomp(machine: str, *, build: bool = False) -> None:
    instructions = seccomp_program(machine, build=build)
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    code = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("@HP", len(packed) // 8, ctypes.addressof(code))
    header = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(header))


# Numbers of system calls, the same on every architecture, and values from the kernel's linux/landlock.h.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION, PATH_BENEATH, EXECUTE, REFER = 1, 1, 1, 1 << 13
OLDEST = 2  # Linux 5.19: the first that leaves renaming from folder to folder alone when it is asked to


def has_landlock() -> bool:
    """Return whether Landlock is usable: new enough, enabled, and allowed by a container's filter."""
    try:
        return syscall(CREATE_RULESET, None, 0, VERSION) >= OLDEST
    except OSError:
        return False


def start_own_programs_only(*others: int) -> bool:
    """Restrict this process and its children to programs of their own tree and `others`, open files.

    Return False if Landlock is missing or too old. The process that starts the command runs the host's
    Python. The image can redirect that start to /proc/self/exe, by a link or the first line of a script.
    Then the command is that file, and some kernels (6.11) let its owner write to a running program.
    """
    if not has_landlock():
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
