"""What makes the sandbox, from the inside: run as `python -I -S sandbox.py PLAN_FD STATUS_FD`.

Only the standard library, and nothing of imagefactory: this file becomes process 1 of a sandbox.
It reads a plan (JSON, made by `unshare.plan`) from PLAN_FD and says on STATUS_FD, as JSON lines, when
the command runs (`started`), how it ended (`ended`) or why it was never started (`failed`).

Two processes come of it. The *keeper* stays outside: it holds locks on the layers, passes signals on,
watches the caller and the clock, relays the terminal and removes the scratch folder. The *init* is
process 1 inside: it builds the file system, gives up every privilege, starts the command and reaps.
If the caller dies, the keeper ends the init; if the keeper dies, the kernel does; and with the init
dies every process of its pid namespace, however often it forked away.

All mounts from the host are cloned as detached trees first and attached after the old root is gone, so
no symbolic link of a stranger's image can lead a mount to a path of the host.
Needs Linux 5.12 (mount_setattr; overlay in user namespaces came with 5.11).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
MNT_DETACH = 2
# System calls newer than most C libraries; their numbers are the same on every architecture.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 428, 429, 430, 431, 432
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE = -100, 0x1000, 0x8000, 1
MOVE_FROM_FD, MOVE_FOLLOWS_LINKS = 4, 0x10
FSCONFIG_CREATE, FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC = 6, 1, 1
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 28, 38, 47
SECUREBITS_LOCKED = (
    0b11101111  # no privileges by uid 0, no fix-ups, no ambient ones; keep_caps off; all locked
)
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
KEYCTL_JOIN_SESSION_KEYRING = 1
OVERLAY_OPTIONS_LIMIT = 4095  # bytes: mount(2) takes one page

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
END_NOW = signal.SIGUSR2

# What a process of any user can read about, or do to, the whole machine. Missing ones are passed over.
MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/config.gz", "/proc/dynamic_debug", "/proc/interrupts",
    "/proc/kallsyms", "/proc/kcore", "/proc/key-users", "/proc/keys", "/proc/kmsg", "/proc/kpagecgroup",
    "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
    "/proc/slabinfo", "/proc/sysrq-trigger", "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo",
)  # fmt: skip
# With a GPU all of /sys is shown (NCCL and NVML read the machine's topology there), except these.
MASKED_SYS = ("/sys/firmware", "/sys/fs", "/sys/kernel", "/sys/power", "/sys/hypervisor")
SYS_PARTS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


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


# --- system calls --------------------------------------------------------------------------------


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


def prctl(option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    check(LIBC.prctl(ctypes.c_int(option), *(ctypes.c_ulong(value) for value in padded)))


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    source = kind.encode()
    check(LIBC.mount(source, os.fsencode(target), source, ctypes.c_ulong(flags), os.fsencode(options)))


def clone_tree(path: str) -> int:
    """A detached copy of the mounts at `path`."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    return syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)


def restrict(tree: int, attributes: int) -> None:
    """Adds attributes to every mount of a tree: what was read-only before stays so."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = AT_EMPTY_PATH | AT_RECURSIVE
    syscall(SYS_MOUNT_SETATTR, tree, b"", flags, wanted, len(wanted))


def attach(tree: int, target: str) -> None:
    flags = MOVE_FROM_FD | MOVE_FOLLOWS_LINKS
    syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(target), flags)
    os.close(tree)


def new_proc() -> int:
    """A detached /proc of this pid namespace."""
    context = syscall(SYS_FSOPEN, b"proc", FSOPEN_CLOEXEC)
    try:
        syscall(SYS_FSCONFIG, context, FSCONFIG_CREATE, None, None, 0)
        return syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC)
    finally:
        os.close(context)


# --- seccomp -------------------------------------------------------------------------------------

# Numbers from the kernel's tables (asm/unistd_64.h, asm-generic/unistd.h).
ARCHITECTURES: dict[str, dict[str, int]] = {
    "x86_64": {
        "audit": 0xC000003E, "open": 2, "ioctl": 16, "socket": 41, "creat": 85, "chmod": 90, "fchmod": 91,
        "mknod": 133, "pivot_root": 155, "add_key": 248, "request_key": 249, "keyctl": 250, "openat": 257,
        "mknodat": 259, "fchmodat": 268, "perf_event_open": 298, "open_by_handle_at": 304, "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "audit": 0xC00000B7, "ioctl": 29, "mknodat": 33, "pivot_root": 41, "fchmod": 52, "fchmodat": 53,
        "openat": 56, "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219,
        "perf_event_open": 241, "open_by_handle_at": 265, "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
for _table in ARCHITECTURES.values():
    _table.update(io_uring_setup=425, io_uring_enter=426, io_uring_register=427, openat2=437, fchmodat2=452)

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NO_CALL = REFUSE | errno.ENOSYS
NOT_PERMITTED = REFUSE | errno.EPERM

# Reachable without any privilege, wide, and of no use to a computation. The kernel's key rings and vsock
# are not wholly namespaced; the rest is there to be attacked.
DENIED = ("add_key", "request_key", "keyctl", "perf_event_open", "open_by_handle_at", "bpf", "userfaultfd")
UNKNOWN = ("io_uring_setup", "io_uring_enter", "io_uring_register", "openat2")
# system call -> (index of its mode argument, index of its flags argument): setuid and setgid files made by
# uid 0 of the sandbox would be the caller's on a writable mount of the host.
MODES: dict[str, tuple[int, int | None]] = {
    "chmod": (1, None), "fchmod": (1, None), "fchmodat": (2, None), "fchmodat2": (2, None),
    "creat": (1, None), "mknod": (1, None), "mknodat": (2, None), "open": (2, 1), "openat": (3, 2),
}  # fmt: skip
CREATES = 0o100 | 0o20000000  # O_CREAT, O_TMPFILE
FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

Instruction = tuple[int, int, int, int]


def seccomp_program(machine: str) -> list[Instruction]:
    """The BPF filter: (code, jump if true, jump if false, constant) each."""
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
    for name, (mode, flags) in MODES.items():
        tests = [argument(mode), (JUMP_ANY_BIT, 0, 1, 0o6000), (RETURN, 0, 0, NOT_PERMITTED)]
        guard = [argument(flags), (JUMP_ANY_BIT, 0, len(tests), CREATES)] if flags is not None else []
        rule(name, [*guard, *tests, (RETURN, 0, 0, ALLOW)])
    several = len(FAMILIES)
    families = [(JUMP_EQUAL, several - place, 0, family) for place, family in enumerate(FAMILIES)]
    rule(
        "socket", [argument(0), *families, (RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    )
    injection = [item for request in TERMINAL_INJECTION for item in (
        (JUMP_EQUAL, 0, 1, request), (RETURN, 0, 0, NOT_PERMITTED)
    )]  # fmt: skip
    rule("ioctl", [argument(1), *injection, (RETURN, 0, 0, ALLOW)])
    program.append((RETURN, 0, 0, ALLOW))
    return program


def install_seccomp(machine: str) -> None:
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in seccomp_program(machine))
    code = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("@HP", len(packed) // 8, ctypes.addressof(code))
    header = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(header))


# --- the keeper ----------------------------------------------------------------------------------


def make_scratch(parent: str) -> tuple[str, int]:
    """A new folder under `parent`, locked as long as this process lives; dead ones there are removed."""
    with step("scratch", parent):
        os.makedirs(parent, mode=0o700, exist_ok=True)
        os.chmod(parent, 0o700)
        gate = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(gate, fcntl.LOCK_EX)
        try:
            for name in os.listdir(parent):
                old = os.path.join(parent, name)
                try:
                    fd = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                except FileNotFoundError:  # its own keeper has just removed it
                    continue
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(old)
                except BlockingIOError:
                    pass
                finally:
                    os.close(fd)
            folder = tempfile.mkdtemp(dir=parent)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        finally:
            os.close(gate)
        for name, mode in (
            ("root", 0o755),
            ("skeleton", 0o755),
            ("upper", 0o755),
            ("work", 0o700),
            ("tmp", 0o1777),
        ):
            path = os.path.join(folder, name)
            os.mkdir(path)
            os.chmod(path, mode)
    return folder, lock


def remove(folder: str) -> None:
    """rm -rf, also through folders whose modes shut their owner out."""

    def unlock(_: Callable[..., Any], path: str, __: Any) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.chmod(path, 0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)

    shutil.rmtree(folder, onerror=unlock)


def make_skeleton(folder: str, plan: dict[str, Any]) -> None:
    """The mount points that an image may lack: the lowest layer, so that all the image has wins."""
    folders = ["/proc", "/sys", "/dev", "/tmp"]
    files = ["/etc/hosts", *(["/etc/resolv.conf"] if plan["network"] else [])]
    if plan["driver"]:
        folders.append(plan["driver"]["folder"])
    for entry in plan["mounts"]:
        (folders if os.path.isdir(entry["source"]) else files).append(entry["target"])
    for name in (*folders, *map(os.path.dirname, files)):
        place = folder + name
        os.makedirs(place, mode=0o755, exist_ok=True)
    for name in files:
        with open(folder + name, "a"):
            pass


def lock_layers(paths: Sequence[str]) -> list[int]:
    """Shared locks: while they are held, the layers are not collected."""
    held = []
    for path in paths:
        with step("layers", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.append(fd)
            fcntl.flock(fd, fcntl.LOCK_SH)
            seen, now = os.fstat(fd), os.stat(path)
            if (seen.st_dev, seen.st_ino) != (now.st_dev, now.st_ino):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return held


def enter_user_namespace(plan: dict[str, Any]) -> None:
    """A user namespace for this process, mapped by a child that stayed outside."""
    target = os.getpid()
    ready, go = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        code = 0
        os.close(go)
        try:
            if os.read(ready, 1):
                if plan["deny_setgroups"]:
                    write_file(f"/proc/{target}/setgroups", "deny")
                write_file(f"/proc/{target}/uid_map", plan["uid_map"])
                write_file(f"/proc/{target}/gid_map", plan["gid_map"])
        except OSError as error:
            code = error.errno or 1
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
    with step("pid-namespace"):
        unshare(CLONE_NEWPID)


def write_file(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


class Keeper:
    def __init__(self, plan: dict[str, Any], status: int) -> None:
        self.plan, self.status = plan, status
        self.init = 0
        self.end_now = False
        self.timed_out = False

    def say(self, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.status, json.dumps(fields).encode() + b"\n")

    def run(self) -> int:
        plan = self.plan
        caller = os.pidfd_open(plan["caller"])
        if os.getppid() != plan["caller"]:
            return 1  # it died before we looked
        for number in (*FORWARDED, END_NOW):
            signal.signal(number, self.on_signal)
        scratch = ""
        try:
            held = lock_layers(plan["lower"])
            scratch, lock = make_scratch(plan["scratch"])
            with step("scratch", scratch):
                make_skeleton(os.path.join(scratch, "skeleton"), plan)
                with open(os.path.join(scratch, "hosts"), "w") as hosts:
                    hosts.write(f"127.0.0.1 localhost {plan['hostname']}\n::1 localhost\n")
            enter_user_namespace(plan)
            code = self.keep(caller, scratch)
            del held, lock
        except SetupError as error:
            self.say(event="failed", step=error.step, errno=error.number, detail=error.detail)
            code = 125
        finally:
            if scratch:
                remove(scratch)
        return code

    def on_signal(self, number: int, _: Any) -> None:
        if number == END_NOW:
            self.end_now = True
            self.kill_init(signal.SIGKILL)
        else:
            self.kill_init(number)

    def kill_init(self, number: int) -> None:
        if self.init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init, number)

    def keep(self, caller: int, scratch: str) -> int:
        report, report_in = os.pipe()
        alive_out, alive = os.pipe()
        terminal, terminal_in = socket.socketpair()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, END_NOW))
        with step("fork"):
            self.init = os.fork()
        if self.init == 0:
            os.close(report)
            os.close(alive)
            terminal.close()
            os.close(self.status)
            os.close(caller)
            Init(self.plan, scratch, report_in, alive_out, terminal_in).run(mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(report_in)
        os.close(alive_out)
        terminal_in.close()
        if not self.plan["tty"]:
            forget_stdio()
        init = os.pidfd_open(self.init)
        master = receive_terminal(terminal) if self.plan["tty"] else None
        failure = read_all(report)
        if failure:
            os.waitpid(self.init, 0)
            self.init = 0
            found = json.loads(failure)
            raise SetupError(found["step"], found["errno"], found["detail"])
        self.say(event="started")
        began = time.monotonic()
        with contextlib.ExitStack() as shown:
            relay = None if master is None else shown.enter_context(Relay(master))
            self.watch(caller, init, relay, began)
            if relay:
                relay.drain()
        code = os.waitstatus_to_exitcode(os.waitpid(self.init, 0)[1])
        self.init = 0
        seconds = time.monotonic() - began
        if code < 0:
            code = 128 - code
        self.say(event="ended", returncode=code, timed_out=self.timed_out, seconds=seconds)
        return code

    def watch(self, caller: int, init: int, relay: Relay | None, began: float) -> None:
        """Returns when the init has ended: by itself, by the clock, or because the caller is gone."""
        poll = select.poll()
        poll.register(init, select.POLLIN)
        poll.register(caller, select.POLLIN)
        if relay:
            relay.register(poll)
        deadline = None if self.plan["timeout"] is None else began + self.plan["timeout"]
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            events = dict(poll.poll(left))
            if init in events:
                return
            if caller in events:
                poll.unregister(caller)
                self.kill_init(signal.SIGKILL)
            if relay:
                relay.pass_on(events, poll)
            if deadline is not None and time.monotonic() >= deadline:
                self.timed_out, deadline = True, None
                self.kill_init(signal.SIGKILL)


def receive_terminal(channel: socket.socket) -> int | None:
    """The sandbox's side sends it, or ends without."""
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    return fds[0] if fds else None


class Relay:
    """The caller's terminal in raw mode on one side, the sandbox's own pseudo-terminal on the other."""

    def __init__(self, master: int) -> None:
        import termios
        import tty

        self.master, self.open = master, True
        self.termios = termios
        self.saved = termios.tcgetattr(0)
        self.resize()
        signal.signal(signal.SIGWINCH, lambda *_: self.resize())
        tty.setraw(0)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.termios.tcsetattr(0, self.termios.TCSADRAIN, self.saved)

    def resize(self) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(0, self.termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.master, self.termios.TIOCSWINSZ, size)

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


# --- the init ------------------------------------------------------------------------------------


class Init:
    def __init__(
        self, plan: dict[str, Any], scratch: str, report: int, alive: int, terminal: socket.socket
    ) -> None:
        self.plan, self.scratch = plan, scratch
        self.report, self.alive, self.terminal = report, alive, terminal

    def run(self, mask: set[signal.Signals | int]) -> None:
        code = 125
        try:
            code = self.live(mask)
        except SetupError as error:
            fields = {"step": error.step, "errno": error.number, "detail": error.detail}
            os.write(self.report, json.dumps(fields).encode())
        except BaseException as error:
            with contextlib.suppress(OSError):
                detail = f"{type(error).__name__}: {error}"
                os.write(self.report, json.dumps({"step": "bug", "errno": 0, "detail": detail}).encode())
        finally:
            os._exit(code)

    def live(self, mask: set[signal.Signals | int]) -> int:
        self.tie_to_keeper()
        os.umask(0o022)
        os.setsid()
        with step("namespaces"):
            unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
        if not self.plan["network"]:
            with step("network-namespace"):
                unshare(CLONE_NEWNET)
                raise_loopback()
        with step("hostname"):
            socket.sethostname(self.plan["hostname"])
        self.build_root()
        with step("terminal"):
            follower = self.open_terminal()
        with step("limits"):
            write_file("/proc/sys/user/max_user_namespaces", "0")
        self.protect_proc()
        self.give_up_privileges()
        if not self.plan["argv"]:
            return 0  # a trial: everything but a command
        return self.serve(follower, mask)

    def tie_to_keeper(self) -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        poll = select.poll()
        poll.register(self.alive, 0)
        if poll.poll(0):
            os._exit(125)

    # The file system

    def build_root(self) -> None:
        plan = self.plan
        with step("private-mounts"):
            check(LIBC.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
        closed = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
        mounts = [("/etc/hosts", self.tree(os.path.join(self.scratch, "hosts"), closed))]
        root = os.path.join(self.scratch, "root")
        self.mount_overlay(root)
        with step("proc"):
            proc = new_proc()
        device = ATTR_NOSUID | ATTR_NOEXEC
        devices = [
            (f"/dev/{name}", self.tree(f"/dev/{name}", device))
            for name in DEVICES
            if os.path.exists(f"/dev/{name}")
        ]
        driver = plan["driver"] or {"devices": [], "libraries": [], "programs": [], "links": []}
        # Without noexec: a driver may map memory of its devices as code.
        devices += [(path, self.tree(path, ATTR_NOSUID)) for path in driver["devices"]]
        libraries = [
            (
                f"{driver['folder']}/{part}/{os.path.basename(path)}",
                self.tree(path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV),
            )
            for part in ("libraries", "programs")
            for path in driver[part]
        ]
        parts = ("/sys",) if plan["driver"] else tuple(path for path in SYS_PARTS if os.path.isdir(path))
        system = [(path, self.tree(path, closed | ATTR_NOEXEC)) for path in parts]
        if plan["network"] and os.path.exists("/etc/resolv.conf"):
            mounts.append(("/etc/resolv.conf", self.tree("/etc/resolv.conf", closed)))
        for entry in plan["mounts"]:
            held = ATTR_NOSUID | ATTR_NODEV | (0 if entry["writable"] else ATTR_RDONLY)
            mounts.append((entry["target"], self.tree(entry["source"], held)))
        scratch_tmp = (
            None if self.in_memory else self.tree(os.path.join(self.scratch, "tmp"), ATTR_NOSUID | ATTR_NODEV)
        )
        with step("pivot"):
            os.chdir(root)
            syscall(ARCHITECTURES[plan["machine"]]["pivot_root"], b".", b".")
            check(LIBC.umount2(b".", ctypes.c_int(MNT_DETACH)))
            os.chdir("/")
        # From here on every path is the image's.
        for path in ("/proc", "/sys", "/dev", "/tmp"):
            with step("image", path):
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with step("proc"):
            attach(proc, "/proc")
        with step("dev"):
            self.make_dev(devices)
        with step("sys"):
            self.make_sys(system)
        with step("tmp"):
            if scratch_tmp is None:
                mount("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, "mode=1777")
            else:
                attach(scratch_tmp, "/tmp")
        if plan["driver"]:
            with step("driver"):
                self.make_driver(driver, libraries)
        for target, tree in mounts:
            with step("mount", target):
                self.make_target(target, tree)
                attach(tree, target)

    def tree(self, path: str, attributes: int) -> int:
        with step("mount-source", path):
            cloned = clone_tree(path)
            restrict(cloned, attributes)
            return cloned

    def mount_overlay(self, root: str) -> None:
        """Layers by the shortest names there are: numbers of open folders, read from /proc/self/fd."""
        plan = self.plan
        lower = [*reversed(plan["lower"]), os.path.join(self.scratch, "skeleton")]
        self.in_memory = plan["read_only"]
        with step("layers"):
            opened = [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in lower]
        options = "userxattr,lowerdir=" + ":".join(map(str, opened))
        flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if plan["read_only"] else 0)
        if len(options) > OVERLAY_OPTIONS_LIMIT - 40:
            raise SetupError("layers", errno.E2BIG, f"{len(opened)} layers are too many for one overlay")
        with step("overlay"):
            os.chdir("/proc/self/fd")
            if plan["read_only"]:
                mount("overlay", root, flags, options)
            else:
                try:
                    self.mount_writable(root, flags, options, self.scratch)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EREMOTE):
                        raise
                    # This file system cannot be an upper one (NFS, overlay): keep the changes in memory.
                    self.in_memory = True
                    mount("tmpfs", self.scratch, MS_NOSUID | MS_NODEV, "mode=0700")
                    for name in ("root", "upper", "work", "tmp"):
                        os.mkdir(os.path.join(self.scratch, name), 0o755)
                    self.mount_writable(root, flags, options, self.scratch)
            os.chdir("/")
        for fd in opened:
            os.close(fd)

    def mount_writable(self, root: str, flags: int, options: str, folder: str) -> None:
        upper, work = (
            os.open(os.path.join(folder, name), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            for name in ("upper", "work")
        )
        try:
            mount("overlay", root, flags, f"{options},upperdir={upper},workdir={work}")
        finally:
            os.close(upper)
            os.close(work)

    def make_dev(self, devices: list[tuple[str, int]]) -> None:
        mount("tmpfs", "/dev", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k")
        for path, tree in devices:
            self.make_target(path, tree)
            attach(tree, path)
        for name in ("shm", "pts", "mqueue"):
            os.mkdir(f"/dev/{name}", 0o755)
        mount("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777")
        mount("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
        mount("mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0"}
        links |= {"stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
        for name, target in links.items():
            os.symlink(target, f"/dev/{name}")
        close_folder("/dev")

    def make_sys(self, parts: list[tuple[str, int]]) -> None:
        if self.plan["driver"]:
            for path, tree in parts:
                attach(tree, path)
            for path in MASKED_SYS:
                if os.path.isdir(path):
                    mount("tmpfs", path, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0555")
            return
        mount("tmpfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0755,size=64k")
        for path, tree in parts:
            os.makedirs(path)
            attach(tree, path)
        close_folder("/sys")

    def make_driver(self, driver: dict[str, Any], files: list[tuple[str, int]]) -> None:
        mount("tmpfs", driver["folder"], MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
        for target, tree in files:
            self.make_target(target, tree)
            attach(tree, target)
        for name, target in driver["links"]:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, f"{driver['folder']}/libraries/{name}")
        close_folder(driver["folder"])

    def make_target(self, target: str, tree: int) -> None:
        """The place for a mount: the skeleton has it, unless a link of the image leads elsewhere."""
        if os.path.exists(target):
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def protect_proc(self) -> None:
        """What is the machine's and not a process's: read-only, or covered. Comes last, as we write there."""
        with step("proc-masks"):
            for name in sorted(os.listdir("/proc")):
                path = f"/proc/{name}"
                found = os.lstat(path)
                if name.isdigit() or stat.S_ISLNK(found.st_mode):
                    continue
                if path in MASKED:
                    if stat.S_ISDIR(found.st_mode):
                        mount("tmpfs", path, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0555")
                    else:
                        attach(clone_tree("/dev/null"), path)
                elif stat.S_ISDIR(found.st_mode) or found.st_mode & 0o222:
                    tree = clone_tree(path)
                    restrict(tree, ATTR_RDONLY)
                    attach(tree, path)

    def open_terminal(self) -> int | None:
        """A pseudo-terminal of the sandbox's own; its other side goes to the keeper."""
        if not self.plan["tty"]:
            self.terminal.close()
            return None
        master, follower = os.openpty()
        os.fchown(follower, self.plan["uid"], self.plan["gid"])
        socket.send_fds(self.terminal, [b"t"], [master])
        os.close(master)
        self.terminal.close()
        return follower

    # Privileges

    def give_up_privileges(self) -> None:
        plan = self.plan
        with step("privileges"):
            write_file("/proc/self/comm", "init")
            with contextlib.suppress(OSError):  # a kernel without key rings
                calls = ARCHITECTURES[plan["machine"]]
                syscall(calls["keyctl"], KEYCTL_JOIN_SESSION_KEYRING, None)
            prctl(PR_CAP_AMBIENT, 4)
            for capability in range(64):
                try:
                    prctl(PR_CAPBSET_DROP, capability)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    break  # one more than the kernel knows
            prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED)
            if not plan["deny_setgroups"]:
                os.setgroups([])
            os.setresgid(plan["gid"], plan["gid"], plan["gid"])
            os.setresuid(plan["uid"], plan["uid"], plan["uid"])
            header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
            check(LIBC.capset(header, nothing))
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            # The kernel forgets both when credentials change. Not dumpable: nothing inside may trace this
            # process or follow its /proc/1/exe, which is the host's Python.
            prctl(PR_SET_DUMPABLE, 0)
            self.tie_to_keeper()
            wipe_arguments()
            install_seccomp(plan["machine"])

    # The command

    def serve(self, follower: int | None, mask: set[signal.Signals | int]) -> int:
        for number in FORWARDED:
            signal.signal(number, self.forward)
        child = os.fork()
        if child == 0:
            self.become_command(follower)
        self.child = child
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came during the set-up is passed on now
        os.close(self.report)
        if follower is not None:
            os.close(follower)
        forget_stdio()
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code

    def forward(self, number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, number)

    def become_command(self, follower: int | None) -> None:
        plan = self.plan
        try:
            for number in signal.valid_signals():
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if follower is not None:
                os.setsid()
                fcntl.ioctl(follower, 0x540E, 0)  # TIOCSCTTY
                for fd in (0, 1, 2):
                    os.dup2(follower, fd)
            if self.report != 3:
                os.dup2(self.report, 3, inheritable=False)
            os.closerange(4, 1 << 30)
            with step("workdir", plan["workdir"]):
                os.chdir(plan["workdir"])
            environment = {os.fsencode(key): os.fsencode(value) for key, value in plan["environment"]}
            os.execvpe(plan["argv"][0], plan["argv"], environment)
        except SetupError as error:
            os.write(
                3, json.dumps({"step": error.step, "errno": error.number, "detail": error.detail}).encode()
            )
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            os.write(2, f"{plan['argv'][0]}: {error.strerror}\n".encode(errors="replace"))
            os._exit(127 if missing else 126)
        finally:
            os._exit(125)


def close_folder(path: str) -> None:
    """Makes the mount at `path` read-only; mounts below it keep their own state."""
    wanted = struct.pack("=QQQQ", ATTR_RDONLY, 0, 0, 0)
    syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), 0, wanted, len(wanted))


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))


def wipe_arguments() -> None:
    """Overwrites this process's command line: any process inside can read it, and it names host paths."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), after pid and comm
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)


def main(plan_fd: int, status_fd: int) -> int:
    for fd in (plan_fd, status_fd):
        os.set_inheritable(fd, False)
    plan = json.loads(read_all(plan_fd))
    return Keeper(plan, status_fd).run()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
