"""Process 1 inside: it builds the file system, drops every privilege, starts the command and reaps."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import termios
from typing import Any

from .cgroups import let_children_run_as_others, set_limits
from .root import Root, bring_emulator
from .streams import forget_stdio, is_null, write_file
from .syscalls import (
    ARCHITECTURES,
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUTS,
    KEYCTL_JOIN_SESSION_KEYRING,
    LIBC,
    PR_CAP_AMBIENT,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NAME,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_SECUREBITS,
    SECUREBITS_LOCKED,
    SetupError,
    check,
    close_all_but,
    end_with,
    install_seccomp,
    prctl,
    raise_loopback,
    reap,
    reset_signals,
    start_own_programs_only,
    step,
    syscall,
    unshare,
    wipe_arguments,
)
from .terminals import FORWARDED, find_terminals, open_terminal, send_groups


class Init:
    def __init__(
        self,
        plan: dict[str, Any],
        scratch: str,
        report: int,
        alive: int,
        terminal: socket.socket,
        emulator: list[int],
    ) -> None:
        self.plan, self.scratch = plan, scratch
        self.report, self.alive, self.terminal, self.emulator = report, alive, terminal, emulator
        self.groups = find_terminals(interactive=plan["tty"])

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
        end_with(self.alive)
        os.read(self.alive, 1)  # the keeper writes when it has put this process into its group
        os.umask(0o022)
        os.setsid()
        with step("limits"):  # if memory runs out before the watch sees it, this run dies first
            write_file("/proc/self/oom_score_adj", "1000")
        with step("namespaces"):
            unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
        if not self.plan["network"]:
            with step("network-namespace"):
                unshare(CLONE_NEWNET)
                raise_loopback()
        with step("hostname"):
            socket.sethostname(self.plan["hostname"])
        # Before the root: it is the machine's file, and its way there is the machine's.
        if self.plan["emulator"] and not self.emulator:
            self.emulator = [bring_emulator(self.plan["emulator"])]
        root = Root(self.plan, self.scratch)
        root.build()
        with step("terminal"):
            followers = self.open_terminals(root.shown, root.overlays)
        root.protect_proc()
        self.give_up_privileges()
        if not self.plan["argv"]:
            return 0  # a trial: everything but a command
        return self.serve(followers, mask)

    def open_terminals(self, visible: list[int], overlays: list[int]) -> list[int]:
        """Create a pseudo-terminal for each terminal. The keeper gets the other sides."""
        followers, masters = [], list[int]()
        for group in self.groups:
            owner = (self.plan["uid"], self.plan["gid"])
            master, follower = open_terminal(group, owner, interactive=self.plan["tty"] and 0 in group)
            followers.append(follower)
            masters.append(master)
        send_groups(self.terminal, visible, masters, overlays)
        for fd in (*visible, *masters, *overlays):
            os.close(fd)
        self.terminal.close()
        return followers

    def give_up_privileges(self) -> None:
        plan = self.plan
        with step("privileges"):
            check(LIBC.prctl(ctypes.c_int(PR_SET_NAME), b"init"))
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
            end_with(self.alive)
            wipe_arguments()
            install_seccomp(plan["machine"])

    def serve(self, followers: list[int], mask: set[signal.Signals | int]) -> int:
        for number in FORWARDED:
            signal.signal(number, self.forward)
        let_children_run_as_others()
        child = os.fork()
        if child == 0:
            self.become_command(followers)
        self.child = child
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came during the set-up is passed on now
        os.close(self.report)
        for follower in followers:
            os.close(follower)
        forget_stdio()
        return reap(child)

    def forward(self, number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, number)

    def become_command(self, followers: list[int]) -> None:
        plan = self.plan
        try:
            reset_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if plan["tty"]:
                os.setsid()
                fcntl.ioctl(followers[0], termios.TIOCSCTTY, 0)
            for group, follower in zip(self.groups, followers, strict=True):
                for fd in group:
                    os.dup2(follower, fd)
            for fd in (0, 1, 2):
                if is_null(fd):  # the caller's is on a mount where its owner may change its mode
                    os.dup2(os.open("/dev/null", os.O_RDWR), fd)
            if self.report != 3:
                os.dup2(self.report, 3, inheritable=False)
            close_all_but(3, *self.emulator)
            with step("limits"):
                set_limits(plan["limits"])
            with step("landlock"):
                start_own_programs_only(*self.emulator)
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
        except ValueError as error:  # a text that no program can be given
            os.write(3, json.dumps({"step": "command", "errno": 0, "detail": str(error)}).encode())
        finally:
            os._exit(125)
