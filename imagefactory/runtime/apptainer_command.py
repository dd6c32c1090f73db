"""The adapter around apptainer's command: what it needs of the machine, `build` by spython.

No result is believed because a call returned: the file must appear where nothing was before, be a .sif
with a root file system, and the process must have ended with 0. It appears under a fresh name and is
renamed last, so a file of an earlier time is never taken for a new one, and stays when the new one fails.

The caller's environment does not come in: of it apptainer sees only what says where things are (PASSED).
That leaves out APPTAINER_* and SINGULARITY_*, each of which stands for an option.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from imagefactory.errors import BuildError, ImagefactoryError, ToolError, extra_hint
from imagefactory.fs import explain_full_disk
from imagefactory.trees import remove_tree

CHILD = Path(__file__).with_name("spython_child.py")
PROGRAMS = ("apptainer", "singularity")
OLDEST = (1, 2)
"""Nothing older was ever tried with what is built here."""
SIF_MAGIC_AT, SIF_MAGIC = 32, b"SIF_MAGIC\0"
"""Where a .sif says what it is: after its launch line (the SIF specification, "global header")."""
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
"""How apptainer's own builds pack: as fast as .sif files of images are (build/sif.py)."""

Line = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SifRequest:
    """One .sif to build.

    `spec` is what apptainer calls a build spec (a definition's file name, `oci:FOLDER`), relative to
    `folder`, where the build works; `binds` are pairs of a folder of this machine and where a %post
    sees it, read-only. `hide` takes passwords out of a line.
    """

    folder: Path
    spec: str
    output: Path
    binds: tuple[tuple[Path, str], ...] = ()
    hide: Callable[[str], str] = str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApptainerMachine:
    """What decides whether apptainer can work here; `explain_missing` judges it."""

    version: str
    uid: int
    mksquashfs_help: str | None
    user_namespaces: str
    spython: bool


class ApptainerCommand:
    """apptainer as it is installed here. `environ` is the caller's environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    # --- what is here ------------------------------------------------------------------------------

    @property
    def search(self) -> str:
        """Where programs are looked for: the caller's PATH, then the system's folders."""
        return f"{self.environ.get('PATH', '')}:{SYSTEM_PATH}".lstrip(":")

    def find(self) -> str:
        """The absolute path of apptainer's program. Raises ToolError when there is none."""
        for name in PROGRAMS:
            found = shutil.which(name, path=self.search)
            if found:
                return found
        raise ToolError("tool-missing", "apptainer is not installed", hint=INSTALL_HINT)

    def version(self) -> str:
        """Such as `1.4.5`. Raises ToolError for a program that is not apptainer."""
        program = self.find()
        said = self._ask([program, "--version"])
        found = re.search(r"apptainer version (\d+\.\d+\S*)", said)
        if not found:
            raise ToolError(
                "tool-unexpected",
                f"{program} is not apptainer (it prints: {said.strip()[:80]})",
                hint=INSTALL_HINT,
            )
        return found[1]

    def require(self, *, building: bool) -> str:
        """The version. Raises ToolError, with what mends it, when it cannot build or run here."""
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
        """What apptainer is started with: PASSED of the caller's environment and `extra`."""
        kept = {name: value for name, value in self.environ.items() if PASSED.fullmatch(name)}
        return {**kept, "PATH": self.search, **(extra or {})}

    # --- build -------------------------------------------------------------------------------------

    def build(self, order: SifRequest, line: Line) -> None:
        """Makes `order.output`. `line` hears what the build prints, passwords taken out.

        Raises BuildError with the last lines, StoreError for a full disk; `output` then is as it was.
        """
        arguments = ["--disable-cache", "--mksquashfs-args", SQUASHFS]
        for source, target in order.binds:
            arguments += ["--mount", mount_option(source, target)]

        def command(made: Path) -> list[str]:
            return ["build", *arguments, str(made), order.spec]

        def fail(why: str) -> ImagefactoryError:
            return BuildError(
                "apptainer-build-failed",
                f"apptainer could not build {order.output.name}: {why}",
                hint=_build_hint(why),
            )

        def heard(text: str) -> None:
            line(order.hide(text))

        with self._made(order.output, order.folder, fail) as work:
            work.run(command(work.made), heard, order.hide)
            work.insist_on_sif()

    @contextlib.contextmanager
    def _made(
        self, output: Path, folder: Path, fail: Callable[[str], ImagefactoryError]
    ) -> Iterator[_SpythonCall]:
        """A fresh folder beside `output` in which a new .sif appears; a whole one is moved to `output`."""
        program = self.find()
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
            made = (scratch / "made.sif").absolute()
            yield _SpythonCall(made=made, folder=folder, program=program, environment=environment, fail=fail)
            with explain_full_disk(output.parent):
                made.replace(output)
        finally:
            with contextlib.suppress(OSError):
                remove_tree(scratch)

    # --- small questions ---------------------------------------------------------------------------

    def _ask(self, command: list[str]) -> str:
        try:
            done = subprocess.run(
                command,
                env=self.environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(
                "tool-not-started", f"cannot start {command[0]}: {error}", hint=INSTALL_HINT
            ) from error
        return done.stdout + done.stderr

    def _mksquashfs_help(self) -> str:
        program = shutil.which("mksquashfs", path=self.search)
        # Its help has the compressors it was built with; older ones print it for -help alone.
        return self._ask([program, "-help"]) if program else ""

    def _user_namespaces(self) -> str:
        """Why an ordinary user gets no user namespace here; empty where one does."""
        program = shutil.which("unshare", path=self.search)
        if not program:
            return ""  # nobody to ask; apptainer says it itself
        try:
            done = subprocess.run(
                [program, "--user", "--map-root-user", "true"],
                env=self.environment(), capture_output=True, text=True, check=False, timeout=60,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{program} did not answer within a minute"
        return done.stderr.strip() if done.returncode else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SpythonCall:
    """One call of spython: where the file is to appear, and in whose words its failure is told."""

    made: Path
    folder: Path
    program: str
    environment: Mapping[str, str]
    fail: Callable[[str], ImagefactoryError]

    def run(self, arguments: list[str], line: Line, hide: Callable[[str], str]) -> None:
        """Raises what `fail` makes of a process that did not end with 0."""
        tail: deque[str] = deque(maxlen=TAIL)
        # -P: this folder's modules are not to be found before the libraries of the same names.
        process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), *arguments],
            cwd=self.folder, env=dict(self.environment), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            while raw := process.stdout.readline(LONGEST_LINE):
                text = hide(clean(raw.decode(errors="replace")))
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
            ended = f"it ended with {code if code > 0 else 128 - code}"
            raise self.fail("\n  ".join([f"{ended}; its last output:" if tail else ended, *tail]))

    def insist_on_sif(self) -> None:
        """Raises what `fail` makes of a missing file and of one that is no whole .sif."""
        try:
            with self.made.open("rb") as file:
                magic = file.read(SIF_MAGIC_AT + len(SIF_MAGIC))[SIF_MAGIC_AT:]
        except FileNotFoundError:
            raise self.fail("it reported success, but there is no file") from None
        if magic != SIF_MAGIC:
            raise self.fail("its output is not a .sif")
        done = subprocess.run(
            [self.program, "sif", "list", str(self.made)],
            env=dict(self.environment), capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode or "FS (Squashfs/*System" not in done.stdout:
            raise self.fail("its output is a .sif without a root file system")


# --- pure decisions ------------------------------------------------------------------------------


def explain_missing(machine: ApptainerMachine, *, building: bool) -> ToolError | None:
    """The first thing that keeps apptainer from working here, or None."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", machine.version)[:2])
    if numbers < OLDEST:
        return ToolError("tool-too-old", f"apptainer {machine.version} is too old", hint=INSTALL_HINT)
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
            f"apptainer does not work for you here: no user namespaces ({machine.user_namespaces})",
            hint="run imagefactory doctor: it shows which setting to change; or be root",
        )
    return None


def lacking_capabilities(status: str, *, last: int, uid: int) -> tuple[str, ...]:
    """The capabilities that root lacks here; none for other users.

    `status` is the text of /proc/self/status, `last` the highest bit the kernel knows (cap_last_cap).

    apptainer as root asks for all of them and fails where a container or virtual machine withholds one,
    unless it is told to drop it.
    """
    found = re.search(r"^CapPrm:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if uid or not found:
        return ()
    permitted = int(found[1], 16)
    return tuple(name for bit, name in enumerate(CAPABILITIES[: last + 1]) if not permitted & 1 << bit)


def mount_option(source: Path, target: str, *, writable: bool = False) -> str:
    """The value of `--mount`, which is a line of CSV: paths with commas and colons are right too."""
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
"""By bit, as in the kernel's uapi/linux/capability.h."""


def _drop_caps() -> dict[str, str]:
    status = Path("/proc/self/status").read_text()
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    lacking = lacking_capabilities(status, last=last, uid=os.geteuid())
    return {"APPTAINER_DROP_CAPS": ",".join(lacking)} if lacking else {}


def clean(text: str) -> str:
    """One printable line: no colour and no control character of a build reaches a terminal."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).rstrip()
    return "".join(letter if letter.isprintable() else " " for letter in plain)


def _build_hint(why: str) -> str:
    if "no space left" in why.lower():
        return "free some space at the store: building a .sif needs space for the unpacked image"
    return "fix the problem in its last output, then run the same command again"
