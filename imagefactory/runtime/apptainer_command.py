"""The adapter for apptainer's command: its requirements, and `build` through spython.

A build succeeds only if the process ends with 0 and a new file is a .sif with a root file system. The file
is written under a new name and renamed last. So an older file is never mistaken for it, and stays if the
build fails.

apptainer sees only variables with paths and addresses (PASSED) of the caller's environment. That excludes
APPTAINER_* and SINGULARITY_*, each of which is an option.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from imagefactory.errors import BuildError, ToolError, extra_hint
from imagefactory.fs import explain_full_disk
from imagefactory.trees import remove_tree

CHILD = Path(__file__).with_name("spython_child.py")
PROGRAMS = ("apptainer", "singularity")
OLDEST = (1, 2)
"""The oldest tested version."""
SIF_MAGIC_AT, SIF_MAGIC = 32, b"SIF_MAGIC\0"
"""Offset and value of the magic of a .sif, after its launch line (SIF specification, "global header")."""
TAIL = 12
LONGEST_LINE = 1 << 16  # bytes; a build may print without an end of line
PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_[A-Z]+|TMPDIR|XDG_RUNTIME_DIR|DOCKER_CONFIG|PYTHONPATH|LD_LIBRARY_PATH"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|(?i:https?_proxy|all_proxy|no_proxy)"
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL_HINT = (
    "install apptainer 1.2 or newer: apt-get install apptainer (if your Debian or Ubuntu has it), or "
    "https://apptainer.org/docs/admin/latest/installation.html"
)
SQUASHFS = "-comp zstd -Xcompression-level 1"
"""The packing of apptainer's own builds, as fast as .sif files of images (build/sif.py)."""

Line = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SifRequest:
    """A .sif to build. `spec` is apptainer's build spec (a definition's file name, `oci:FOLDER`).

    It is in the directory `folder`. `binds` are pairs of a directory of this machine and its path in a
    %post, read-only. `hide` removes passwords from a line.
    """

    folder: Path
    spec: str
    output: Path
    binds: tuple[tuple[Path, str], ...] = ()
    hide: Callable[[str], str] = str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApptainerMachine:
    """The facts that decide whether apptainer works here."""

    version: str
    uid: int
    mksquashfs_help: str | None
    user_namespaces: str
    spython: bool


class ApptainerCommand:
    """The installed apptainer. `environ` is the caller's environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    @property
    def search(self) -> str:
        """The search path of programs: the caller's PATH, then the system's directories."""
        return f"{self.environ.get('PATH', '')}:{SYSTEM_PATH}".lstrip(":")

    def find(self) -> str:
        """Return the absolute path of apptainer's program. Raises ToolError if there is none."""
        for name in PROGRAMS:
            if program := shutil.which(name, path=self.search):
                return program
        raise ToolError("tool-missing", "apptainer is not installed", hint=INSTALL_HINT)

    def version(self) -> str:
        """Return a version such as `1.4.5`. Raises ToolError for a program that is not apptainer."""
        program = self.find()
        output = self._output([program, "--version"])
        version = re.search(r"apptainer version (\d+\.\d+\S*)", output)
        if not version:
            raise ToolError(
                "tool-unexpected",
                f"{program} is not apptainer (it prints: {output.strip()[:80]})",
                hint=INSTALL_HINT,
            )
        return version[1]

    def require(self, *, building: bool) -> str:
        """Return the version. Raises ToolError with the fix if apptainer cannot build or run here."""
        version = self.version()
        uid = os.geteuid()
        machine = ApptainerMachine(
            version=version,
            uid=uid,
            mksquashfs_help=self._mksquashfs_help() if building else None,
            user_namespaces=self._user_namespaces() if uid else "",
            spython=find_spec("spython") is not None,
        )
        error = explain_missing(machine, building=building)
        if error:
            raise error
        return version

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of apptainer: the caller's variables in PASSED, and `extra`."""
        passed = {name: value for name, value in self.environ.items() if PASSED.fullmatch(name)}
        return {**passed, "PATH": self.search, **(extra or {})}

    def build(self, request: SifRequest, line: Line) -> None:
        """Build `request.output`. `line` gets each line of the build, without passwords.

        Raises BuildError with the last lines, StoreError for a full disk. Then `output` is unchanged.
        """
        output, program = request.output, self.find()
        with explain_full_disk(output.parent):
            output.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=output.absolute().parent, prefix=".apptainer-"))
        try:
            # spython knows apptainer only by its old name.
            (scratch / "bin").mkdir()
            (scratch / "bin" / "singularity").symlink_to(program)
            (scratch / "tmp").mkdir()
            environment = self.environment({"APPTAINER_TMPDIR": str(scratch / "tmp"), **_drop_caps()})
            environment["PATH"] = f"{scratch / 'bin'}:{environment['PATH']}"
            sif = (scratch / "new.sif").absolute()
            call = _SpythonCall(request=request, sif=sif, program=program, environment=environment)
            call.run(line)
            call.check_sif()
            with explain_full_disk(output.parent):
                sif.replace(output)
        finally:
            with contextlib.suppress(OSError):
                remove_tree(scratch)

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def _output(self, command: list[str]) -> str:
        try:
            process = self._run(command)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(
                "tool-not-started", f"cannot start {command[0]}: {error}", hint=INSTALL_HINT
            ) from error
        return process.stdout + process.stderr

    def _mksquashfs_help(self) -> str:
        program = shutil.which("mksquashfs", path=self.search)
        # Its help lists its compressors; older ones print it only for -help.
        return self._output([program, "-help"]) if program else ""

    def _user_namespaces(self) -> str:
        """Return the reason why an ordinary user gets no user namespace, or an empty text."""
        program = shutil.which("unshare", path=self.search)
        if not program:
            return ""  # unknown; apptainer reports it itself
        try:
            process = self._run([program, "--user", "--map-root-user", "true"])
        except subprocess.TimeoutExpired:
            return f"{program} did not answer within a minute"
        return process.stderr.strip() if process.returncode else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SpythonCall:
    """A call of spython that builds `sif`."""

    request: SifRequest
    sif: Path
    program: str
    environment: Mapping[str, str]

    def fail(self, reason: str) -> BuildError:
        hint = "fix the problem that apptainer printed, then run the same command again"
        if "no space left" in reason.lower():
            hint = "free space on the disk of the store, enough for the unpacked image"
        return BuildError(
            "apptainer-build-failed",
            f"apptainer could not build {self.request.output.name}: {reason}",
            hint=hint,
        )

    def run(self, line: Line) -> None:
        """Run spython. Raises BuildError if the process does not end with 0."""
        arguments = ["build", "--disable-cache", "--mksquashfs-args", SQUASHFS]
        for source, target in self.request.binds:
            arguments += ["--mount", mount_option(source, target)]
        arguments += [str(self.sif), self.request.spec]
        tail: deque[str] = deque(maxlen=TAIL)
        # -P: modules of this directory must not hide libraries of the same names.
        process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), *arguments],
            cwd=self.request.folder, env=dict(self.environment), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            while raw := process.stdout.readline(LONGEST_LINE):
                text = self.request.hide(clean(raw.decode(errors="replace")))
                if text:
                    tail.append(text)
                    line(text)
            code = process.wait()
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()
        if code:
            ended = f"its exit code was {code if code > 0 else 128 - code}"
            raise self.fail("\n  ".join([f"{ended}; its last output:" if tail else ended, *tail]))

    def check_sif(self) -> None:
        """Check the built file. Raises BuildError for a missing file and an incomplete .sif."""
        try:
            with self.sif.open("rb") as file:
                magic = file.read(SIF_MAGIC_AT + len(SIF_MAGIC))[SIF_MAGIC_AT:]
        except FileNotFoundError:
            raise self.fail("it reported success, but wrote no file") from None
        if magic != SIF_MAGIC:
            raise self.fail("its output is not a .sif")
        listing = subprocess.run(
            [self.program, "sif", "list", str(self.sif)],
            env=dict(self.environment), capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if listing.returncode or "FS (Squashfs/*System" not in listing.stdout:
            raise self.fail("its output is a .sif without a root file system")


def explain_missing(machine: ApptainerMachine, *, building: bool) -> ToolError | None:
    """Return the first problem that prevents apptainer from working, or None."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", machine.version)[:2])
    if numbers < OLDEST:
        return ToolError(
            "tool-too-old",
            f"apptainer {machine.version} is too old, expected 1.2 or newer",
            hint=INSTALL_HINT,
        )
    if building and not machine.spython:
        return ToolError(
            "extra-not-installed", "the Python package spython is not installed", hint=extra_hint("apptainer")
        )
    if building and not machine.mksquashfs_help:
        return ToolError("tool-missing", "mksquashfs is not installed", hint="apt-get install squashfs-tools")
    if building and not re.search(r"^\s+zstd\b", machine.mksquashfs_help or "", re.MULTILINE):
        return ToolError(
            "tool-too-old",
            "this mksquashfs does not support zstd",
            hint="install squashfs-tools 4.4 or newer",
        )
    if machine.uid and machine.user_namespaces:
        return ToolError(
            "user-namespaces-denied",
            f"apptainer needs user namespaces, and this machine denies them ({machine.user_namespaces})",
            hint="run imagefactory doctor: it shows which setting to change",
        )
    return None


def lacking_capabilities(status: str, *, last: int, uid: int) -> tuple[str, ...]:
    """Return the capabilities that root lacks, none for other users.

    `status` is the text of /proc/self/status, `last` the highest bit of the kernel (cap_last_cap). As root,
    apptainer requests all capabilities, and fails in a container or virtual machine without one, unless an
    option drops it.
    """
    match = re.search(r"^CapPrm:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if uid or not match:
        return ()
    permitted = int(match[1], 16)
    return tuple(name for bit, name in enumerate(CAPABILITIES[: last + 1]) if not permitted & 1 << bit)


def mount_option(source: Path, target: str, *, writable: bool = False) -> str:
    """Return the value of `--mount`, a line of CSV, so that paths may have commas and colons."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"destination={target}", *([] if writable else ["ro"])]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


# fmt: off
CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID",
    "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP", "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_IPC_LOCK",
    "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT", "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE", "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG",
    "CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
)
# fmt: on
"""Names by bit, as in the kernel's uapi/linux/capability.h."""


def _drop_caps() -> dict[str, str]:
    status = Path("/proc/self/status").read_text()
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    lacking = lacking_capabilities(status, last=last, uid=os.geteuid())
    return {"APPTAINER_DROP_CAPS": ",".join(lacking)} if lacking else {}


def clean(text: str) -> str:
    """Return a printable line, so that no color or control character of a build reaches a terminal."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).rstrip()
    return "".join(letter if letter.isprintable() else " " for letter in plain)
