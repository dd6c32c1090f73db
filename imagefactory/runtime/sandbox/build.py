"""Run a build as root of separate ids: mmdebstrap and the scripts of Debian packages, for a base.

The command has every capability, but not over the machine: its user 0 is an id outside that owns no file and
no process. It sees only the system's programs of the host, read-only, and two directories of the caller. It
has no network, only the devices of DEVICES, and no socket or process of the host. The root is new
(pivot_root), so leaving a chroot leads to the same few files.

It has two processes, as a run. The *keeper* stays outside, is killed with its caller and watches the limits.
The *init* is process 1 inside. If the keeper dies, the kernel kills the init, and with it everything inside.

The current directory is the build's own: `tree` in it becomes /tmp, `input` becomes /input, read-only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from .cgroups import INTERVAL, Watch, let_children_run_as_others, run_before_others, set_limits
from .root import DEVICES, bring_emulator, is_folder, open_segments
from .streams import forget_stdio, read_plan, write_file
from .syscalls import (
    ARCHITECTURES,
    ATTR_NODEV,
    ATTR_NOEXEC,
    ATTR_NOSUID,
    ATTR_RDONLY,
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
    KEYCTL_JOIN_SESSION_KEYRING,
    LIBC,
    MNT_DETACH,
    MS_PRIVATE,
    MS_REC,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    SetupError,
    attach,
    check,
    clone_tree,
    close_all_but,
    end_with,
    enter_user_namespace,
    install_seccomp,
    move,
    new_mount,
    prctl,
    reap,
    reset_signals,
    restrict,
    step,
    syscall,
    unshare,
    wipe_arguments,
)

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
# What the system's programs read of /etc, and a substitute for the rest: no script learns who has an account.
CONFIGURATION = ("alternatives", "ld.so.cache")
ACCOUNTS = {
    "passwd": "root:x:0:0::/root:/bin/sh\n_apt:x:42:65534::/nonexistent:/bin/false\n"
    "nobody:x:65534:65534::/nonexistent:/bin/false\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
}
FOLDERS = ("dev", "dev/shm", "etc", "input", "proc", "root", "run", "sys", "tmp", "var")
MAPS = ("uid_map", "gid_map")


def set_ids(target: int, plan: dict[str, Any]) -> int:
    """Set the ids of process `target`. Ordinary users need newuidmap, as /etc/subuid permits."""
    for name in MAPS:
        if plan["delegated"]:
            tool = f"new{name.replace('_', '')}"
            if os.spawnvp(os.P_WAIT, tool, [tool, str(target), *plan[name].split()]):
                return 1
        else:
            write_file(f"/proc/{target}/{name}", plan[name])
    return 0


class BuildKeeper:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan

    def run(self) -> tuple[int, dict[str, Any]]:
        """Return the command's exit code, and the failed step or the reached limit."""
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.plan["caller"]:
                return 125, {}  # it has died
            run_before_others()
            # If the machine runs out of memory, the kernel kills a process of this build first. Set here by
            # root with CAP_SYS_RESOURCE, it is also the minimum that scripts may set.
            with step("limits"):
                write_file("/proc/self/oom_score_adj", "1000")
            enter_user_namespace(lambda pid: set_ids(pid, self.plan))
            with step("pid-namespace"):
                unshare(CLONE_NEWPID)
            return self.keep()
        except SetupError as error:
            return 125, {"step": error.step, "errno": error.number, "detail": error.detail}

    def keep(self) -> tuple[int, dict[str, Any]]:
        here, there = socket.socketpair()
        with step("fork"):
            init = os.fork()
        if init == 0:
            close_all_but(there.fileno())
            BuildInit(self.plan, there).run()
        there.close()
        forget_stdio()
        let_children_run_as_others()
        text, received = socket.recv_fds(here, 1 << 16, 3)[:2]
        over = (
            self.watch(init, Watch(self.plan["limits"], received, directories=["tree"])) if received else None
        )
        code = os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])
        here.close()  # open until now: its other end tells the init that this process lives
        if not received:
            return 125, json.loads(text or b'{"step": "helper", "errno": 0, "detail": "it was killed"}')
        return code if code >= 0 else 128 - code, {"over": over} if over else {}

    def watch(self, init: int, watch: Watch) -> str | None:
        """Wait until the init ends. Return the limit that ended it, if any."""
        poll = select.poll()
        poll.register(os.pidfd_open(init), select.POLLIN)
        while not poll.poll(INTERVAL):
            if over := watch.over():
                os.kill(init, signal.SIGKILL)
                return over
        return None


class BuildInit:
    def __init__(self, plan: dict[str, Any], keeper: socket.socket) -> None:
        self.plan, self.keeper = plan, keeper
        self.emulator: list[int] = []

    def run(self) -> None:
        code = 125
        try:
            code = self.live()
        except SetupError as error:
            self.fail(error.step, error.number, error.detail)
        except BaseException as error:
            self.fail("bug", 0, f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)

    def fail(self, name: str, number: int, detail: str) -> None:
        with contextlib.suppress(OSError):
            self.keeper.sendall(json.dumps({"step": name, "errno": number, "detail": detail}).encode())

    def live(self) -> int:
        end_with(self.keeper.fileno())
        os.umask(0o022)
        os.setsid()
        with step("namespaces"):
            unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
        with step("network-namespace"):
            unshare(CLONE_NEWNET)
        with step("hostname"):
            socket.sethostname("localhost")
        proc = self.build_root()
        self.give_up_privileges()
        return self.serve(proc)

    def build_root(self) -> int:
        """Create the new root and enter it, as user 0 from then on. Return its /proc, open."""
        with step("private-mounts"):
            check(LIBC.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
        closed = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
        # All that only the caller may reach is opened while this process still is the caller, outside.
        target_fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        trees = {"tmp": tree("tree", ATTR_NOSUID | ATTR_NODEV), "input": tree("input", closed | ATTR_NOEXEC)}
        links = {name: os.readlink(f"/{name}") for name in SYSTEM if os.path.islink(f"/{name}")}
        system = (*(name for name in SYSTEM if name not in links), *(f"etc/{name}" for name in CONFIGURATION))
        trees |= {path: tree(f"/{path}", closed) for path in system if os.path.exists(f"/{path}")}
        device = ATTR_NOSUID | ATTR_NOEXEC
        trees |= {
            f"dev/{name}": tree(f"/dev/{name}", device) for name in DEVICES if os.path.exists(f"/dev/{name}")
        }
        with step("privileges"):
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        end_with(self.keeper.fileno())
        if self.plan["emulator"]:
            self.emulator = [bring_emulator(self.plan["emulator"])]
        with step("proc"):
            proc = new_mount("proc", ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC)
        with step("pivot"):
            root = new_mount("tmpfs", ATTR_NOSUID | ATTR_NODEV, mode="0755", size="1m")
            move(root, target_fd)
            os.fchdir(root)
            os.close(root)
            syscall(ARCHITECTURES[self.plan["machine"]]["pivot_root"], b".", b".")
            check(LIBC.umount2(b".", ctypes.c_int(MNT_DETACH)))
            os.chdir("/")
        sys.path.clear()  # from here on no file is a module of ours
        sys.meta_path.clear()
        with step("mount"):
            for name in FOLDERS:
                os.mkdir(name, 0o755)
            for name, target in (*links.items(), ("dev/fd", "/proc/self/fd")):
                os.symlink(target, name)
            trees |= {
                "proc": os.dup(proc),
                "dev/shm": new_mount("tmpfs", ATTR_NOSUID | ATTR_NODEV, mode="1777", size="64m"),
            }
            for path, fd in trees.items():
                mount_at(fd, path)
            for name, text in ACCOUNTS.items():
                with open(f"etc/{name}", "w") as file:
                    file.write(text)
        return proc

    def give_up_privileges(self) -> None:
        with step("privileges"):
            calls = ARCHITECTURES[self.plan["machine"]]
            with contextlib.suppress(OSError):  # a kernel without key rings
                syscall(calls["keyctl"], KEYCTL_JOIN_SESSION_KEYRING, None)
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            prctl(PR_SET_DUMPABLE, 0)  # nothing inside follows /proc/1/exe, which is the host's Python
            wipe_arguments()
            install_seccomp(self.plan["machine"], build=True)

    def serve(self, proc: int) -> int:
        let_children_run_as_others()
        child = os.fork()
        if child == 0:
            self.become_command()
        visible = [proc, open_segments(proc), os.open("/dev/shm", os.O_PATH | os.O_CLOEXEC)]
        socket.send_fds(self.keeper, [b"{}"], visible)
        for fd in visible:
            os.close(fd)
        forget_stdio()
        return reap(child)

    def become_command(self) -> None:
        plan = self.plan
        try:
            reset_signals()
            close_all_but()
            set_limits(plan["limits"])
            environment = {os.fsencode(key): os.fsencode(value) for key, value in plan["environment"]}
            os.execvpe(plan["argv"][0], plan["argv"], environment)
        except OSError as error:
            os.write(2, f"{plan['argv'][0]}: {error.strerror}\n".encode(errors="replace"))
        finally:
            os._exit(127)


def tree(path: str, attributes: int) -> int:
    with step("mount-source", path):
        cloned = clone_tree(path)
        restrict(cloned, attributes)
        return cloned


def mount_at(fd: int, path: str) -> None:
    """Mount a detached tree below the new root, on a file or directory that is created if necessary."""
    if is_folder(fd):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    attach(fd, os.open(path, os.O_PATH | os.O_CLOEXEC))


def main(plan_fd: int, status_fd: int) -> int:
    plan = read_plan(plan_fd, status_fd)
    if plan is None:
        return 1
    code, report = BuildKeeper(plan).run()
    if report:
        with contextlib.suppress(BrokenPipeError):
            os.write(status_fd, json.dumps(report).encode())
    return code
