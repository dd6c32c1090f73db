"""The seccomp filter of a sandbox: which system calls a command may not make."""

from __future__ import annotations

import ctypes
import errno
import struct

from .syscalls import PR_SET_SECCOMP, prctl

# Numbers from the kernel's tables (asm/unistd_64.h, asm-generic/unistd.h).
ARCHITECTURES: dict[str, dict[str, int]] = {
    "x86_64": {
        "audit": 0xC000003E, "open": 2, "ioctl": 16, "socket": 41, "creat": 85, "chmod": 90, "fchmod": 91,
        "syslog": 103, "mknod": 133, "pivot_root": 155, "add_key": 248, "request_key": 249, "keyctl": 250,
        "openat": 257, "mknodat": 259, "fchmodat": 268, "perf_event_open": 298, "fanotify_init": 300,
        "fanotify_mark": 301, "open_by_handle_at": 304, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "audit": 0xC00000B7, "ioctl": 29, "mknodat": 33, "pivot_root": 41, "fchmod": 52, "fchmodat": 53,
        "openat": 56, "syslog": 116, "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219,
        "perf_event_open": 241, "fanotify_init": 262, "fanotify_mark": 263, "open_by_handle_at": 265,
        "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
for _table in ARCHITECTURES.values():
    _table.update(io_uring_setup=425, io_uring_enter=426, io_uring_register=427, openat2=437, fchmodat2=452)
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NO_CALL = REFUSE | errno.ENOSYS
NOT_PERMITTED = REFUSE | errno.EPERM
# Reachable without any privilege, wide, and of no use to a computation. The kernel's key rings and vsock
# are not wholly namespaced, its log is the machine's; the rest is there to be attacked.
DENIED = (
    "add_key", "request_key", "keyctl", "perf_event_open", "open_by_handle_at", "bpf", "userfaultfd",
    "syslog", "fanotify_init", "fanotify_mark",
)  # fmt: skip
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


def seccomp_program(machine: str, *, modes: bool = True) -> list[Instruction]:
    """The BPF filter: (code, jump if true, jump if false, constant) each. `modes` denies setuid files."""
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
    for name, (mode, flags) in MODES.items() if modes else ():
        tests = [argument(mode), (JUMP_ANY_BIT, 0, 1, 0o6000), (RETURN, 0, 0, NOT_PERMITTED)]
        guard = [argument(flags), (JUMP_ANY_BIT, 0, len(tests), CREATES)] if flags is not None else []
        rule(name, [*guard, *tests, (RETURN, 0, 0, ALLOW)])
    families = [*allow_one_of(FAMILIES, 0), (RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT)]
    protocols = [
        argument(2),
        *allow_one_of(NETLINK_PROTOCOLS, len(families)),
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


def allow_one_of(values: tuple[int, ...], between: int) -> list[Instruction]:
    """For each of `values` a jump over the refusal behind them, and over `between` instructions more."""
    return [(JUMP_EQUAL, len(values) - place + between, 0, value) for place, value in enumerate(values)]


def install_seccomp(machine: str, *, modes: bool = True) -> None:
    instructions = seccomp_program(machine, modes=modes)
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    code = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("@HP", len(packed) // 8, ctypes.addressof(code))
    header = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(header))
