"""The process that stays outside: it prepares, starts the init, watches it and cleans up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from .cgroups import (
    INTERVAL,
    Group,
    NoCgroup,
    Watch,
    find_parent,
    let_children_run_as_others,
    look_at,
    read_own,
    run_as_others,
    run_before_others,
)
from .init import Init
from .root import REFRESH, bring_emulator
from .streams import Carriers, forget_stdio, read_all, read_plan, write_file
from .syscalls import (
    CLONE_NEWNS,
    CLONE_NEWPID,
    SetupError,
    close_all_but,
    enter_user_namespace,
    reconfigure,
    step,
    unshare,
)
from .terminals import FORWARDED, Relay, find_terminals, poll_all, receive_groups, relayed
from .trees import directory_lock, remove_tree, unlocked_directories

END_NOW = signal.SIGUSR2


def make_scratch(parent: str) -> tuple[str, int, list[str]]:
    """Create a directory in `parent`, locked while this process lives, and delete those of dead processes.

    Return its path, its lock, and the paths that cannot be deleted, which stop no run.
    """
    undeletable: list[str] = []

    def hear(error: OSError) -> None:
        undeletable.append(f"{error.filename}: {error.strerror}")

    with step("scratch", parent):
        os.makedirs(parent, mode=0o700, exist_ok=True)
        os.chmod(parent, 0o700)
        with directory_lock(parent):
            for dead in unlocked_directories(parent, hear):
                try:
                    remove_tree(dead)
                except OSError as error:
                    hear(error)
            directory = tempfile.mkdtemp(dir=parent)
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for name, mode in (
            ("root", 0o755),
            ("skeleton", 0o755),
            ("upper", 0o755),
            ("work", 0o700),
            ("tmp", 0o1777),
            ("empty", 0o755),
        ):
            path = os.path.join(directory, name)
            os.mkdir(path)
            os.chmod(path, mode)
    return directory, lock, undeletable


def make_skeleton(directory: str, plan: dict[str, Any]) -> None:
    """Create the mount points that an image may lack, as the lowest layer, which the image's own replace."""
    directories = ["/proc", "/sys", "/dev", "/tmp"]
    files = ["/etc/hosts", *(["/etc/resolv.conf"] if plan["network"] else [])]
    if plan["driver"]:
        directories.append(plan["driver"]["folder"])
    for entry in plan["mounts"]:
        (directories if os.path.isdir(entry["source"]) else files).append(entry["target"])
    places = [(name, True) for name in (*directories, *map(os.path.dirname, files))]
    for name, is_folder in [*places, *((name, False) for name in files)]:
        try:
            if is_folder:
                os.makedirs(directory + name, mode=0o755, exist_ok=True)
            else:
                os.close(os.open(directory + name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise SetupError("mount", errno.EISDIR, f"{name} is a file and a directory at once") from error


def lock_layers(paths: Sequence[str]) -> list[int]:
    """Return shared locks, which protect the layers from collection."""
    locks = []
    for path in paths:
        with step("layers", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            locks.append(fd)
            fcntl.flock(fd, fcntl.LOCK_SH)
            seen, now = os.fstat(fd), os.stat(path)
            if (seen.st_dev, seen.st_ino) != (now.st_dev, now.st_ino):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return locks


def enter_namespaces(plan: dict[str, Any]) -> None:
    """Enter a user namespace, and a pid namespace for children.

    Also a mount namespace if overlays need a refresh, because only there the overlays of the sandbox can be
    changed.
    """
    enter_mapped(plan)
    if not all(entry["writable"] or entry["bind"] for entry in plan["mounts"]):
        with step("namespaces"):
            unshare(CLONE_NEWNS)
    with step("pid-namespace"):
        unshare(CLONE_NEWPID)


def enter_emulated(plan: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Enter another namespace for an ordinary user who is not 0 inside: only 0 has binfmt_misc's table.

    Return the plan of the namespace below it, and the registered emulator.
    """
    outside = {key: plan[key].split()[1] for key in ("uid_map", "gid_map")}
    enter_mapped(plan | {key: f"0 {number} 1\n" for key, number in outside.items()})
    with step("namespaces"):
        unshare(CLONE_NEWNS)
    below = {key: f"{plan[key].split()[0]} 0 1\n" for key in outside}
    return plan | below, [bring_emulator(plan["emulator"])]


def enter_mapped(plan: dict[str, Any]) -> None:
    def map_ids(pid: int) -> int:
        if plan["deny_setgroups"]:
            write_file(f"/proc/{pid}/setgroups", "deny")
        write_file(f"/proc/{pid}/uid_map", plan["uid_map"])
        write_file(f"/proc/{pid}/gid_map", plan["gid_map"])
        return 0

    enter_user_namespace(map_ids)


class Keeper:
    def __init__(self, plan: dict[str, Any], status: int) -> None:
        self.plan, self.status = plan, status
        self.init = 0
        self.emulator: list[int] = []
        self.end_now = False
        self.began = 0.0
        self.timed_out = False
        self.over: str | None = None
        self.group: Group | None = None
        self.no_group = ""  # why
        self.ended: dict[str, Any] = {}
        self.overlays: list[int] = []

    def say(self, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.status, json.dumps(fields).encode() + b"\n")

    def run(self) -> int:
        try:
            caller = os.pidfd_open(self.plan["caller"])
        except ProcessLookupError:
            return 1  # it has died, and nobody is there to be told
        if os.getppid() != self.plan["caller"]:
            return 1
        for number in (*FORWARDED, END_NOW):
            signal.signal(number, self.on_signal)
        try:
            with step("helper"):
                return self.prepare(caller)
        except SetupError as error:
            self.say(event="failed", step=error.step, errno=error.number, detail=error.detail)
            return 125

    def prepare(self, caller: int) -> int:
        plan = self.plan
        with step("streams"):
            carriers = Carriers(find_terminals(interactive=plan["tty"]))
        with contextlib.ExitStack() as stack:
            self.make_group()
            if self.group:
                stack.callback(self.group.end)
            locks = lock_layers(plan["lower"])
            scratch, lock, undeletable = make_scratch(plan["scratch"])
            try:
                for text in undeletable:
                    self.say(event="left", text=text)
                with step("scratch", scratch):
                    make_skeleton(os.path.join(scratch, "skeleton"), plan)
                    with open(os.path.join(scratch, "hosts"), "w") as hosts:
                        hosts.write(f"127.0.0.1 localhost {plan['hostname']}\n::1 localhost\n")
                run_before_others()
                if plan["emulator"] and plan["deny_setgroups"] and plan["uid"]:
                    plan, self.emulator = enter_emulated(plan)
                enter_namespaces(plan)
                code = self.keep(caller, scratch, carriers, stack)
            finally:
                run_as_others()
                with contextlib.suppress(OSError):  # the next sandbox says what stays, and `image prune`
                    remove_tree(scratch)
                for fd in (*locks, lock):
                    os.close(fd)
            lost = carriers.finish(caller)
            self.say(event="ended", returncode=code, lost=lost, **self.ended)
            return code

    def make_group(self) -> None:
        """Create a group for the run, if this machine allows one. Without a group only the watch counts."""
        memory, processes = self.plan["limits"]["memory"], self.plan["limits"]["processes"]
        if memory is None and processes is None:
            return
        try:
            parent = find_parent(*read_own(), look_at)
            if isinstance(parent, NoCgroup):
                self.no_group = parent.reason
            else:
                self.group = Group(parent, memory=memory, processes=processes)
        except OSError as error:
            self.no_group = f"the kernel refuses it: {error}"

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

    def keep(self, caller: int, scratch: str, carriers: Carriers, stack: contextlib.ExitStack) -> int:
        """Start the init and wait for it. `stack` restores the terminals at the end."""
        report, report_in = os.pipe()
        alive_out, alive = os.pipe()
        terminal, terminal_in = socket.socketpair()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, END_NOW))
        with step("fork"):
            self.init = os.fork()
        if self.init == 0:
            # The process that builds an untrusted root must not have directories, locks and pipes of this
            # one.
            close_all_but(report_in, alive_out, terminal_in.fileno(), *self.emulator)
            Init(self.plan, scratch, report_in, alive_out, terminal_in, self.emulator).run(mask)
        let_children_run_as_others()
        if self.group:
            try:
                self.group.add(self.init)
            except OSError as error:
                self.group, self.no_group = None, f"the kernel refuses it: {error}"
        os.write(alive, b"1")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self.end_now:  # asked for before there was an init to end
            self.kill_init(signal.SIGKILL)
        os.close(report_in)
        os.close(alive_out)
        terminal_in.close()
        forget_stdio(*(fd for group in carriers.terminals for fd in group))
        init = os.pidfd_open(self.init)
        seen, masters, self.overlays = receive_groups(terminal, 3)
        terminal.close()
        failure = read_all(report)
        if failure:
            os.waitpid(self.init, 0)
            self.init = 0
            problem = json.loads(failure)
            raise SetupError(problem["step"], problem["errno"], problem["detail"])
        try:
            with step("refresh"):
                self.refresh()
        except SetupError:
            self.kill_init(signal.SIGKILL)
            os.waitpid(self.init, 0)
            raise
        # An init that was killed before it could send them needs no watch.
        written = [mount["source"] for mount in self.plan["mounts"] if mount["scratch"]]
        directories = (scratch, *written)
        watch = Watch(self.plan["limits"], seen, directories=directories, group=self.group) if seen else None
        self.say(event="started", group=self.group.version if self.group else 0, no_group=self.no_group)
        self.began = time.monotonic()
        carriers.show(masters)
        relays = stack.enter_context(relayed(masters, carriers.terminals, interactive=self.plan["tty"]))
        self.watch(caller, init, relays, watch)
        code = os.waitstatus_to_exitcode(os.waitpid(self.init, 0)[1])
        self.init = 0
        os.close(alive)  # open until now: its other end tells the init that this process lives
        seconds = time.monotonic() - self.began
        if code < 0:
            code = 128 - code
        if self.group and self.over is None:  # the kernel has ended processes since the last look
            self.over = self.group.over_memory()
        if self.over is not None:
            code = 128 + signal.SIGKILL
        self.ended = {"timed_out": self.timed_out, "over": self.over, "seconds": seconds}
        return code

    def refresh(self) -> None:
        for top in self.overlays:
            reconfigure(top, "ro")  # as it is already: the overlay forgets what is not in use

    def watch(self, caller: int, init: int, relays: list[Relay], watch: Watch | None) -> None:
        """Wait until the init ends: by itself, by a limit, or because the caller died."""
        deadline = None if self.plan["timeout"] is None else self.began + self.plan["timeout"]
        look, stale = self.began, self.began + REFRESH
        watched = {init, caller}
        while True:
            wait = INTERVAL
            if deadline is not None:
                wait = min(wait, int(max(0.0, deadline - time.monotonic()) * 1000) + 1)
            events = poll_all(watched, relays, wait)
            if init in events:
                return
            if caller in events:
                watched.remove(caller)
                self.kill_init(signal.SIGKILL)
            for relay in relays:
                relay.pass_on(events)
            if deadline is not None and time.monotonic() >= deadline:
                self.timed_out, deadline = True, None
                self.kill_init(signal.SIGKILL)
            if self.overlays and time.monotonic() >= stale:
                with contextlib.suppress(OSError):  # it could at first
                    self.refresh()
                stale = time.monotonic() + REFRESH
            if watch and self.over is None and time.monotonic() >= look:
                self.over, look = watch.over(), time.monotonic() + INTERVAL / 1000
                if self.over is not None:
                    self.kill_init(signal.SIGKILL)


def main(plan_fd: int, status_fd: int) -> int:
    plan = read_plan(plan_fd, status_fd)
    return 1 if plan is None else Keeper(plan, status_fd).run()
