"""The sandbox, tried for real: as root and as an ordinary user, with images that want out.

Needs Linux 5.12 or newer with user namespaces; the tests `as root` need root. The image under test is a
small tree of this machine's own Python, bash and libraries, as layers of an image in a plain folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from imagefactory.runtime.devices import DRIVER_DIRECTORY
from tests.made.gpu_code import forward_libcuda
from tests.made.gpu_suite import make_expectations
from tests.services.children import LIMIT, child
from tests.services.libcuda import UUID, build_libcuda
from tests.services.sandbox import ORDINARY_UID, PYTHON, Caller, add_layer, entry, scratch_folders

SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


# --- it runs -------------------------------------------------------------------------------------


def test_command_sees_the_image_and_its_environment_only(caller: Caller) -> None:
    text = caller.python(
        """
        import os, json
        print(json.dumps([dict(os.environ), os.getuid(), os.getgid(), os.getcwd(), os.uname().nodename,
                          sorted(os.listdir("/opt/lower")), os.listdir("/root") if os.getuid() == 0 else []]))
        """,
        environment=[["X", "1"]],
        workdir="/opt",
    )
    environment, uid, gid, cwd, node, lower, home = json.loads(text)
    environment.pop("LC_CTYPE", None)  # Python sets it itself
    assert environment == {"IMAGE": "yes", "PATH": "/usr/bin:/bin", "X": "1"}
    assert (uid, gid, cwd, node) == (0, 0, "/opt", "imagefactory")
    assert lower == ["new"]
    assert home == []


def test_uid_65534_with_read_only_root(caller: Caller) -> None:
    text = caller.python(
        """
        import os, json, errno
        def attempt(path):
            try:
                open(path, "w").write("x"); return "written"
            except OSError as error:
                return errno.errorcode[error.errno]
        tried = ["/opt/file", "/var/open/x", "/tmp/x", "/dev/shm/x", "/dev/x", "/sys/x"]
        print(json.dumps([os.getuid(), *map(attempt, tried), os.environ.get("HOME")]))
        """,
        uid=65534,
        read_only=True,
    )
    uid, file, open_folder, tmp, shm, dev, sys_, home = json.loads(text)
    assert (uid, tmp, shm, home) == (65534, "written", "written", None)
    assert file in ("EROFS", "EACCES")
    assert open_folder == "EROFS"
    assert dev in ("EROFS", "EACCES")
    assert sys_ in ("EROFS", "EACCES")


@pytest.mark.parametrize(("argv", "code"), [
    (["/bin/bash", "-c", "exit 7"], 7), (["bash", "-c", "kill -TERM $$"], 143),
    (["bash", "-c", "kill -KILL $$"], 137),
    (["no-such-command"], 127), (["/etc/passwd"], 126),
])  # fmt: skip
def test_return_codes(caller: Caller, argv: list[str], code: int) -> None:
    assert caller.run(*argv)["returncode"] == code


def test_image_stays_untouched_and_nothing_is_left(caller: Caller) -> None:
    def state() -> list[tuple[str, int, int, int, int]]:
        found = [path for path in (caller.store / "unpacked").rglob("*") if ".locks" not in path.parts]
        # ctime too: by that a layer is known to be as it was unpacked
        return sorted(
            (str(path), seen.st_size, seen.st_mode, seen.st_mtime_ns, seen.st_ctime_ns)
            for path, seen in ((path, path.lstat()) for path in found)
        )

    caller.run("true")
    before = state()
    assert len(before) > 300
    text = caller.python(
        """
        import os, shutil
        open("/opt/file", "w").write("changed"); os.unlink("/etc/passwd"); shutil.rmtree("/opt/lower")
        os.mkdir("/opt/lower"); os.chmod("/usr/bin/cat", 0o700); open("/new", "w").write("n")
        os.makedirs("/shut/in"); os.chmod("/shut", 0)
        print(open("/opt/file").read(), os.listdir("/opt/lower"))
        """
    )
    assert text == "changed []"
    assert state() == before
    assert scratch_folders(caller) == []
    assert caller.run("cat", "/opt/file")["stdout"] == "image"


def test_mounts_are_read_only_unless_writable(caller: Caller, ground: Path) -> None:
    shown, open_ = ground / f"shown-{caller.name}", ground / f"open-{caller.name}"
    for folder in (shown, open_):
        folder.mkdir()
        (folder / "file").write_text("host")
        if caller.name == "user":
            os.chown(folder, ORDINARY_UID, ORDINARY_UID)
            os.chown(folder / "file", ORDINARY_UID, ORDINARY_UID)
    text = caller.python(
        """
        import errno, os
        for path in ("/deep/in/shown/file", "/deep/in/shown/new", "/open/new"):
            try:
                open(path, "w").write("x"); print("written")
            except OSError as error:
                print(errno.errorcode[error.errno])
        print(open("/deep/in/shown/file").read())
        try:
            os.chmod("/open/new", 0o4755); print("setuid")
        except PermissionError: print("no setuid")
        print(open("/one-file").read())
        """,
        mounts=[
            [str(shown), "/deep/in/shown", False],
            [str(open_), "/open", True],
            [str(shown / "file"), "/one-file", False],
        ],
        read_only=True,
    )
    assert text.split("\n") == ["EROFS", "EROFS", "written", "host", "no setuid", "host"]
    assert (open_ / "new").read_text() == "x"
    assert not (open_ / "new").stat().st_mode & stat.S_ISUID


def test_missing_mount_source_and_workdir_are_told(caller: Caller) -> None:
    told = caller.run("true", mounts=[["/no/such/thing", "/x", False]])
    assert (told["error"], told["code"]) == ("UsageError", "mount-failed")
    assert "/no/such/thing" in str(told["message"])
    told = caller.run("true", workdir="/nowhere")
    assert (told["error"], told["code"]) == ("UsageError", "workdir-not-found")
    assert "/nowhere" in str(told["message"])
    assert scratch_folders(caller) == []


def test_co_process(caller: Caller) -> None:
    code = "import sys; print(sys.stdin.read().upper(), end='')"
    done = caller.run("/usr/bin/python3", "-c", code, mode="start")
    assert done == {"returncode": 0, "stdout": "HELLO CO-PROCESS\n", "stderr": ""}


def test_two_at_once(caller: Caller) -> None:
    gate = caller.ground / f"gate-{caller.name}"
    gate.mkdir()
    gate.chmod(0o777)
    script = "echo $1 > /mine; : > /gate/$1; until set -- /gate/*; [ $# = 3 ]; do sleep 0.1; done; cat /mine"
    with contextlib.ExitStack() as ends:
        runs = []
        for name in "abc":
            argv = ["bash", "-c", script, "bash", name]
            command = caller.command({"argv": argv, "mounts": [[str(gate), "/gate", True]]})
            run = child(command, env=caller.environment(), stdout=subprocess.PIPE, text=True)
            runs.append(ends.enter_context(run))
        said = [json.loads(run.communicate(timeout=LIMIT)[0])["stdout"] for run in runs]
    assert said == ["a\n", "b\n", "c\n"]
    assert scratch_folders(caller) == []


# --- it ends -------------------------------------------------------------------------------------


def marked_processes(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if command[:2] == [b"sleep", marker.encode()]:
            found.append(int(path.parts[2]))
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


# A child that left its session and its parent, and lets go of no pipe.
DAEMON = (
    "import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    "os.execvp('sleep', ['sleep', '{0}'])"
)


def test_timeout_ends_forked_away_children_too(caller: Caller) -> None:
    marker = f"77{os.getpid()}"
    done = caller.run(
        "bash", "-c", f'python3 -c "{DAEMON.format(marker)}"; trap "" TERM INT; sleep {marker}', timeout=5
    )
    assert done["timed_out"] is True
    assert done["returncode"] == 137
    assert float(str(done["seconds"])) > 4.9
    assert wait_until(lambda: not marked_processes(marker))
    assert scratch_folders(caller) == []


def test_end_of_the_command_ends_what_it_left_behind(caller: Caller) -> None:
    marker = f"78{os.getpid()}"
    done = caller.run("bash", "-c", f'python3 -c "{DAEMON.format(marker)}"; echo done')
    assert done["stdout"] == "done\n"
    assert not done["timed_out"]
    assert wait_until(lambda: not marked_processes(marker))


@pytest.mark.parametrize("victim", ["caller", "keeper"])
def test_kill_9_of_either_process_outside_ends_the_sandbox(caller: Caller, victim: str) -> None:
    marker = f"79{os.getpid()}{len(victim)}"
    spec: dict[str, object] = {
        "argv": ["bash", "-c", f'python3 -c "{DAEMON.format(marker)}"; exec sleep {marker}']
    }
    with child(caller.command(spec), env=caller.environment(), **SILENT) as run:
        assert wait_until(lambda: len(marked_processes(marker)) == 2)
        if victim == "caller":
            run.kill()
        else:
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            assert len(children) == 1
            os.kill(int(children[0]), signal.SIGKILL)
        try:
            assert wait_until(lambda: not marked_processes(marker)), "the sandbox lives on"
        finally:
            for left in marked_processes(marker):
                os.kill(left, signal.SIGKILL)
    caller.run("true")  # sweeps what a killed keeper left
    assert wait_until(lambda: scratch_folders(caller) == [])


def test_signals_reach_the_command(caller: Caller) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(33)); "
        "print('ready', flush=True); time.sleep(600)"
    )
    spec: dict[str, object] = {"argv": ["python3", "-c", code], "capture": False}
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with child(caller.command(spec), env=caller.environment(), **pipes) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert run.wait(timeout=LIMIT) == 33


def test_much_output_is_drained_and_cut(caller: Caller) -> None:
    done = caller.run("python3", "-c", "import sys\nfor _ in range(40): sys.stdout.write('x' * (1 << 20))")
    assert done["returncode"] == 0
    assert len(str(done["stdout"])) < (17 << 20)
    assert str(done["stdout"]).endswith("[cut after 16777216 bytes]\n")


def test_interactive_terminal(caller: Caller) -> None:
    pid, master = pty.fork()
    if pid == 0:
        command = caller.command({"argv": ["bash", "--norc", "--noprofile", "-i"], "capture": False})
        os.execvpe(command[0], command, caller.environment())
    output = b""

    def expect(text: bytes) -> None:
        nonlocal output
        end = time.monotonic() + 120
        while text not in output:
            assert time.monotonic() < end, output
            if select.select([master], [], [], 0.2)[0]:
                output += os.read(master, 65536)
        output = output.partition(text)[2]

    try:
        # A line is typed only at a prompt, as bash drops what comes while it changes the terminal.
        expect(b"# ")
        os.write(master, b"python3 -c 'import os; print(os.ttyname(0), os.isatty(2), 6*7)'\n")
        expect(b"/dev/pts/0 True 42")
        expect(b"# ")
        os.write(master, b"sh -c 'echo g\"\"o; exec sleep 500'\n")
        expect(b"go\r\n")  # said by what the terminal belongs to then
        os.write(master, b"\x03")  # Ctrl-C ends the sleep, not the shell
        expect(b"# ")
        os.write(master, b"echo code=$?\n")
        expect(b"code=130")
        expect(b"# ")
        os.write(master, b"sh -c 'echo ag\"\"ain; exec sleep 500'\n")
        expect(b"again\r\n")
        os.write(master, b"\x1a")  # Ctrl-Z: job control
        expect(b"Stopped")
        expect(b"# ")
        # bash ends at once where no job is stopped; else it would want it said twice.
        os.write(master, b'kill -9 %1; while [ "$(jobs -s)" ]; do sleep 1; done; exit 5\n')
        expect(b"exit")
        expect(b"exit")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if select.select([master], [], [], 0.2)[0] and not os.read(master, 65536):
                    break
            except OSError:  # the other side is closed
                break
        with os.fdopen(os.pidfd_open(pid), "rb", buffering=0) as exited:
            assert select.select([exited], [], [], LIMIT)[0], output
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(master)


# --- many layers, long names ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [60, 130])
def test_many_layers_under_a_long_path(caller: Caller, count: int) -> None:
    more = [
        add_layer(
            caller.ground / "blobs",
            f"l{number}",
            [(entry(f"opt/n{number}"), b"."), (entry("opt/last"), str(number).encode())],
        )
        for number in range(count)
    ]
    long = caller.store / ("a" * 120) / ("b,:\\" * 20)
    long.mkdir(parents=True, exist_ok=True)
    if caller.name == "user":
        for folder in (long, long.parent):
            os.chown(folder, ORDINARY_UID, ORDINARY_UID)
    many = Caller(caller.name, caller.ground, long, [*caller.layers, *more])
    for read_only in (False, True):
        text = many.python(
            "import os; print(len(os.listdir('/opt')), open('/opt/last').read())", read_only=read_only
        )
        assert text == f"{count + 3} {count - 1}"


# --- it holds ------------------------------------------------------------------------------------

CTYPES = """
import ctypes, os, errno, json
libc = ctypes.CDLL(None, use_errno=True)
KNOWN = set("null zero full random urandom tty shm pts mqueue ptmx fd stdin stdout stderr".split())
def call(function, *arguments):
    ctypes.set_errno(0)
    result = getattr(libc, function)(*arguments)
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def opened(path, flags=os.O_RDONLY):
    try:
        os.close(os.open(path, flags)); return "opened"
    except OSError as error:
        return errno.errorcode[error.errno]
"""

# What an image may try that must fail, and the errors that are a refusal. Each is an expression.
ESCAPES = {
    "mount": ("call('mount', b'tmpfs', b'/opt', b'tmpfs', 0, b'')", {"EPERM"}),
    "remount": ("call('mount', None, b'/', None, 32 | 4096, None)", {"EPERM"}),
    "remount proc": ("call('mount', None, b'/proc/sys', None, 32 | 4096, None)", {"EPERM"}),
    "umount": ("call('umount2', b'/proc/sys', 2)", {"EPERM"}),
    "chroot": ("call('chroot', b'/opt')", {"EPERM"}),
    "pivot": ("call('syscall', 155, b'.', b'.')", {"EPERM"}),
    "user namespace": ("call('unshare', 0x10000000)", {"EPERM", "ENOSPC"}),
    "mount namespace": ("call('unshare', 0x00020000)", {"EPERM"}),
    "join a namespace": ("call('setns', os.open('/proc/self/ns/net', 0), 0)", {"EPERM"}),
    "device": ("call('mknod', b'/tmp/disk', 0o60666, os.makedev(8, 0))", {"EPERM"}),
    "memory device": ("call('mknod', b'/tmp/mem', 0o20666, os.makedev(1, 1))", {"EPERM"}),
    "open by handle": ("call('open_by_handle_at', -100, ctypes.create_string_buffer(16), 0)", {"EPERM"}),
    "key ring": ("call('syscall', 250, 0, -3, 1)", {"EPERM"}),
    "add key": ("call('syscall', 248, b'user', b'x', b'y', 1, -4)", {"EPERM"}),
    "bpf": ("call('syscall', 321, 0, 0, 0)", {"EPERM"}),
    "io_uring": ("call('syscall', 425, 1, ctypes.create_string_buffer(256))", {"ENOSYS"}),
    "userfaultfd": ("call('syscall', 323, 1)", {"EPERM"}),
    "perf": ("call('syscall', 298, ctypes.create_string_buffer(128), 0, -1, -1, 0)", {"EPERM"}),
    "openat2": ("call('syscall', 437, -100, b'/', ctypes.create_string_buffer(24), 24)", {"ENOSYS"}),
    "reboot": ("call('reboot', 0)", {"EPERM"}),
    "host name": ("call('sethostname', b'x', 1)", {"EPERM"}),
    "clock": ("call('settimeofday', ctypes.create_string_buffer(16), None)", {"EPERM"}),
    "setuid file": ("call('chmod', b'/opt/file', 0o4755)", {"EPERM"}),
    "setgid file by open": ("call('open', b'/tmp/s', os.O_CREAT | os.O_WRONLY, 0o2755)", {"EPERM"}),
    "trace init": ("call('ptrace', 16, 1, 0, 0)", {"EPERM"}),
    "kill init": ("(call('kill', 1, 9), os.path.exists('/proc/1/stat'))[1] and 'alive'", {"alive"}),
    "program of init": ("opened('/proc/1/exe')", {"EACCES", "EPERM"}),
    "root of init": ("opened('/proc/1/root/')", {"EACCES", "EPERM"}),
    "cwd of init": ("opened('/proc/1/cwd/')", {"EACCES", "EPERM"}),
    "memory of init": ("opened('/proc/1/mem')", {"EACCES", "EPERM"}),
    "environment of init": ("opened('/proc/1/environ')", {"EACCES", "EPERM"}),
    "files of init": ("sorted({opened(f'/proc/1/fd/{fd}') for fd in range(64)})[0]", {"EACCES"}),
    "kernel settings": ("opened('/proc/sys/kernel/core_pattern', os.O_WRONLY)", {"EROFS", "EACCES"}),
    "host name setting": ("opened('/proc/sys/kernel/hostname', os.O_WRONLY)", {"EROFS", "EACCES"}),
    "namespace limit": ("opened('/proc/sys/user/max_user_namespaces', os.O_WRONLY)", {"EROFS", "EACCES"}),
    "interrupts": ("opened('/proc/irq/default_smp_affinity', os.O_WRONLY)", {"EROFS", "EACCES", "ENOENT"}),
    "cgroup": ("opened('/sys/fs/cgroup')", {"ENOENT"}),
    "release agent": ("call('mount', b'cgroup', b'/opt', b'cgroup', 0, b'memory')", {"EPERM"}),
    "firmware": ("opened('/sys/firmware')", {"ENOENT"}),
    "processors": ("opened('/sys/devices/system/cpu/online', os.O_WRONLY)", {"EROFS", "EACCES", "ENOENT"}),
    "disks": ("str(sorted(set(os.listdir('/dev')) - KNOWN))", {"[]"}),
    "kernel log": ("opened('/dev/kmsg')", {"ENOENT"}),
    "vsock": ("call('socket', 40, 1, 0)", {"EAFNOSUPPORT"}),
    "packets": ("call('socket', 17, 3, 0)", {"EAFNOSUPPORT"}),
    "netlink of the firewall": ("call('socket', 16, 3, 12)", {"EPROTONOSUPPORT"}),
    "netlink of audits": ("call('socket', 16, 3, 9)", {"EPROTONOSUPPORT"}),
    "kernel log by a call": ("call('klogctl', 10, None, 0)", {"EPERM"}),
    "fanotify": ("call('fanotify_init', 0x200, 0)", {"EPERM"}),
    "raw socket": ("call('socket', 2, 3, 1)", {"EPERM"}),
    "type into a terminal": ("call('ioctl', 0, 0x5412, b'x')", {"EPERM"}),
    "type with high bits": ("call('ioctl', 0, ctypes.c_ulong(0x100005412), b'x')", {"EPERM"}),
    "raise priority": ("call('setpriority', 0, 0, -20)", {"EACCES", "EPERM"}),
    "regain id": ("call('setresuid', 12345, 12345, 12345)", {"EPERM", "EINVAL"}),
    "regain groups": ("call('setgroups', 1, ctypes.byref(ctypes.c_int(6)))", {"EPERM"}),
}  # fmt: skip


def test_escapes_are_refused(caller: Caller) -> None:
    listed = "\n".join(f"found[{name!r}] = {code}" for name, (code, _) in ESCAPES.items())
    text = caller.python(f"{CTYPES}\nfound = {{}}\n{listed}\nprint(json.dumps(found))")
    found = json.loads(text.splitlines()[-1])
    wrong = {name: found[name] for name, (_, refusals) in ESCAPES.items() if found[name] not in refusals}
    assert wrong == {}


def test_interfaces_can_be_listed(caller: Caller) -> None:
    """By netlink, as NCCL and glibc do."""
    code = "import socket; socket.socket(16, 3, 0); socket.socket(16, 3, 15); print(socket.if_nameindex())"
    assert caller.python(code) == "[(1, 'lo')]"


def test_masked_files_are_empty(caller: Caller) -> None:
    masked = (
        "kcore",
        "keys",
        "kallsyms",
        "timer_list",
        "sysrq-trigger",
        "key-users",
        "kpageflags",
        "interrupts",
    )
    text = caller.python(
        f"""
        import json, os
        found = {{}}
        for name in {masked!r}:
            path = "/proc/" + name
            if os.path.exists(path):
                os.stat(path)
                try: found[name] = len(open(path, "rb").read(100))
                except PermissionError: found[name] = 0
        for name in ("acpi", "scsi"):
            if os.path.isdir("/proc/" + name): found[name] = len(os.listdir("/proc/" + name))
        print(json.dumps(found))
        """
    )
    found = json.loads(text)
    assert len(found) >= 3
    assert set(found.values()) == {0}


def test_no_capability_in_any_set(caller: Caller) -> None:
    text = str(caller.run("cat", "/proc/self/status")["stdout"])
    state = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(state[name], 16) == 0, name
    assert state["NoNewPrivs"] == "1"
    assert state["Seccomp"] == "2"


def test_setuid_program_gains_nothing(caller: Caller) -> None:
    assert str(caller.run("id-setuid", "-u", uid=65534)["stdout"]).strip() == "65534"
    program = next((caller.store / "unpacked").glob("*/usr/bin/id-setuid"))
    assert not program.stat().st_mode & (stat.S_ISUID | stat.S_ISGID)


def test_no_process_of_the_host_is_seen(caller: Caller) -> None:
    text = caller.python(
        f"""
        import os, json
        seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        commands = [open(f"/proc/{{pid}}/cmdline").read().strip(chr(0)) for pid in seen if pid != os.getpid()]
        try: os.kill({os.getpid()}, 0); reached = True
        except ProcessLookupError: reached = False
        print(json.dumps([seen, commands, reached]))
        """
    )
    seen, commands, reached = json.loads(text)
    assert seen == [1, 2]
    assert commands == [""]  # the init's, which named paths of the host
    assert reached is False


def test_no_file_of_the_host_is_left_open(caller: Caller) -> None:
    leaked = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        code = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
        command = caller.command({"argv": ["python3", "-c", code]})
        done = subprocess.run(
            command, env=caller.environment(), pass_fds=(leaked,), capture_output=True, text=True, check=True
        )
        assert json.loads(json.loads(done.stdout)["stdout"]) == [0, 1, 2, 3]  # 3 reads the folder
    finally:
        os.close(leaked)


def test_the_host_cannot_be_read_from_inside(caller: Caller) -> None:
    """Paths of the host lead nowhere; mountinfo names no path of the store but scratch folders' own."""
    store = str(caller.store)
    text = caller.python(
        f"""
        import os
        for path in ({store!r}, {str(caller.ground)!r}, "/home", "/boot", "/etc/shadow", "/../../etc/shadow",
                     "/proc/1/root/etc/shadow", "/proc/self/root/../etc/shadow",
                     "/proc/self/cwd/../../../etc/shadow"):
            try:
                os.stat(path); print("SEEN", path)
            except OSError: pass
        os.chdir("/")
        for _ in range(50): os.chdir("..")
        print("opt" in os.listdir("."), os.path.exists("boot"), open("/etc/passwd").read().count("\\n"))
        """
    )
    assert text == "True False 1"


def test_network_is_empty_unless_asked_for(caller: Caller) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port = server.getsockname()[1]
        name = f"imagefactory-test-{os.getpid()}-{caller.name}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        code = f"""
        import socket, os
        def reach(family, address):
            client = socket.socket(family); client.settimeout(3)
            try:
                client.connect(address); return "reached"
            except OSError as error:
                return type(error).__name__
        print(reach(socket.AF_INET, ("127.0.0.1", {port})), reach(socket.AF_UNIX, chr(0) + {name!r}),
              sorted(name for _, name in socket.if_nameindex()), socket.gethostbyname("localhost"))
        inside = socket.create_server(("127.0.0.1", 0))
        print(reach(socket.AF_INET, inside.getsockname()))
        """
        assert caller.python(code).split("\n") == [
            "ConnectionRefusedError ConnectionRefusedError ['lo'] 127.0.0.1",
            "reached",
        ]
        assert caller.python(code, network=True).startswith("reached ")


def test_images_with_links_in_the_place_of_mount_points(caller: Caller) -> None:
    blobs = caller.ground / "blobs"
    for name, target in (("tmp", "/etc"), ("proc", "../../../proc")):
        bad = add_layer(
            blobs, f"link-{name}", [(entry(name, mode=0o777, kind=tarfile.SYMTYPE, link=target), b"")]
        )
        told = Caller(caller.name, caller.ground, caller.store, [*caller.layers, bad]).run("true")
        assert told["error"] == "StoreError"
    victim = caller.ground / f"victim-{caller.name}"
    victim.mkdir(exist_ok=True)
    if caller.name == "user":
        os.chown(victim, ORDINARY_UID, ORDINARY_UID)
    link = add_layer(
        blobs, "link-mount", [(entry("suite", mode=0o777, kind=tarfile.SYMTYPE, link=str(victim)), b"")]
    )
    led = Caller(caller.name, caller.ground, caller.store, [*caller.layers, link])
    led.run("true", mounts=[[str(caller.ground / "blobs"), "/suite/in", False]])
    assert list(victim.iterdir()) == []


def test_gpu_asked_for_and_none_there(caller: Caller) -> None:
    if Path("/dev/nvidia0").exists():
        done = caller.run("bash", "-c", "nvidia-smi -L", gpus=True)
        assert "GPU 0" in str(done["stdout"])
        return
    told = caller.run("true", gpus=True)
    assert (told["error"], told["code"]) == ("ToolError", "gpu-device-missing")


@pytest.mark.parametrize(
    ("driver", "model", "chosen"),
    [
        ("535.54.03", "NVIDIA A100-PCIE-40GB", True),
        ("535.54.03", "NVIDIA GeForce RTX 3090", False),
        ("580.65.06", "NVIDIA A100-PCIE-40GB", False),
        ("", "", False),
    ],
)
def test_a_libcuda_for_older_drivers_comes_first_where_it_must(
    caller: Caller, ground: Path, driver: str, model: str, chosen: bool
) -> None:
    """As NVIDIA's hook does it for docker, in the directory where that looks, through the image's links."""
    own, place = ground / "libcuda.so.1", "usr/local/cuda-12.9/compat"
    own.write_bytes(b"")
    compat = add_layer(ground / "blobs", "compat", [
        (entry(f"{place}/libcuda.so.575.57.08"), forward_libcuda("12.9", (535, 575))),
        (entry(f"{place}/libcuda.so.1", mode=0o777, kind=tarfile.SYMTYPE, link="libcuda.so.575.57.08"), b""),
        (entry("usr/local/cuda", mode=0o777, kind=tarfile.SYMTYPE, link="/usr/local/cuda-12.9"), b""),
    ])  # fmt: skip
    one = Caller(caller.name, ground, caller.store, [*caller.layers, compat])
    one.gpus = {"devices": [], "libraries": [str(own)], "links": [], "programs": [], "driver": driver,
                "models": [model]}  # fmt: skip
    done = one.run("sh", "-c", "echo $LD_LIBRARY_PATH", gpus=True, environment=[["LD_LIBRARY_PATH", "/mine"]])
    first = "/usr/local/cuda/compat:" if chosen else ""
    assert done["stdout"] == f"{first}/mine:{DRIVER_DIRECTORY}/libraries\n"


@pytest.mark.parametrize(
    ("lie", "failed", "outcome"),
    [
        ("", "", ""),
        ("kernel=wrong", "vector-add", "wrong-numbers"),
        ("crash=cuInit", "driver", "load-failed"),
    ],
)
def test_the_gpu_suite_asks_the_driver(
    caller: Caller, ground: Path, lie: str, failed: str, outcome: str
) -> None:
    """T0 inside an image, on the stand-in for libcuda: the driver is all that it needs."""
    folder = ground / f"t0-{caller.name}-{failed}"
    for part in ("expect", "report"):
        (folder / part).mkdir(parents=True)
    build_libcuda(folder / "driver", lie)
    asked = make_expectations(framework="numpy", packages={"numpy": "2.0.0"}, capability="8.0")
    (folder / "expect/expectations.json").write_text(json.dumps(asked))
    (folder / "report").chmod(0o777)
    done = caller.run(
        PYTHON, "-I", "-B", "/imagefactory/suite/verify.py",
        "/expect/expectations.json", "/report/report.json",
        mounts=[
            [str(ground / "python/imagefactory/suite"), "/imagefactory/suite", False],
            [str(folder / "driver"), "/driver", False],
            [str(folder / "expect"), "/expect", False],
            [str(folder / "report"), "/report", True],
        ],
        environment=[["LD_LIBRARY_PATH", "/driver"]],
        read_only=True,
        timeout=60,
    )  # fmt: skip
    report = json.loads((folder / "report/report.json").read_text())
    rows = {row["name"]: row for row in report["checks"]}
    assert done["returncode"] == (1 if failed else 0), done
    assert [name for name, row in rows.items() if row["state"] == "failed"] == ([failed] if failed else [])
    if failed:
        assert rows[failed]["outcome"] == outcome
    else:
        assert report["device"]["uuid"] == UUID
        assert rows["driver-controls"]["state"] == "passed"


def test_layers_in_use_are_not_collected(caller: Caller) -> None:
    marker = f"80{os.getpid()}"
    spec: dict[str, object] = {"argv": ["sleep", marker]}
    collect = (
        "import sys; from pathlib import Path; from imagefactory.oci.unpack import UnpackedLayers;"
        "from imagefactory.fs import Removal;"
        f"unpacked = UnpackedLayers(Path({str(caller.store / 'unpacked')!r}));"
        "print(len(unpacked.collect([], Removal(unpacked.folder, dry_run=False))))"
    )
    prefix = caller.command(spec)[: caller.command(spec).index(PYTHON)]
    ask = [*prefix, PYTHON, "-c", collect]
    asking = {"env": caller.environment(), "capture_output": True, "check": True, "timeout": LIMIT}
    with child(caller.command(spec), env=caller.environment(), **SILENT):
        assert wait_until(lambda: bool(marked_processes(marker)))
        used = len(list((caller.store / "unpacked").glob("[0-9a-f]*")))
        gone = int(subprocess.run(ask, **asking).stdout)
        assert gone == used - len(caller.layers)
        assert len(list((caller.store / "unpacked").glob("[0-9a-f]*"))) == len(caller.layers)

    def none_left() -> bool:
        subprocess.run(ask, **asking)
        return not list((caller.store / "unpacked").glob("[0-9a-f]*"))

    assert wait_until(none_left)
    assert sys.version_info >= (3, 11)
