"""Programs that a kit starts, docker and apptainer by their command lines: followed, printed, ended.

Only the standard library. Inside, the rules are those of imagefactory's own runners: no network, no
capability, no new privileges, nothing of the host's environment but which GPUs are this job's, suite and
expectations read-only.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

EXIT_USAGE, EXIT_TOOL, EXIT_IMAGE = 2, 6, 8
LARGEST_LINE = 2000
MOST_LINES = 4000


class Stop(Exception):
    """The run cannot go on. `code` is the exit code, `outcome` the word of the tables, empty for none."""

    def __init__(self, message: str, code: int, outcome: str = "") -> None:
        super().__init__(message)
        self.code, self.outcome = code, outcome


class EndedProcess(NamedTuple):
    """How the run inside ended. `lines` are its last output."""

    returncode: int
    timed_out: bool
    seconds: float
    lines: Sequence[str]


def follow(argv: Sequence[str], environ: Mapping[str, str], timeout: float) -> EndedProcess:
    """Runs a command, shows its lines as printable ones, and ends it and all below it when time is over."""
    began, timed_out = time.monotonic(), False
    lines: deque[str] = deque(maxlen=40)
    process = subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def show() -> None:
        count = 0
        assert process.stdout is not None
        while line := process.stdout.readline(LARGEST_LINE * 4):
            text = clean(line)
            if not text:
                continue
            lines.append(text)
            count += 1
            if count <= MOST_LINES:
                say(text)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    try:
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
    finally:
        end_group(process)
    reader.join(10)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return EndedProcess(code, timed_out, round(time.monotonic() - began, 3), tuple(lines))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and what it started. apptainer's own processes stay in its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    process = subprocess.run(
        argv, env=dict(environ), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if process.returncode:
        raise Stop(
            f"`{' '.join(argv)}` says: {clean((process.stderr or process.stdout).encode())}", EXIT_TOOL
        )
    return process.stdout


def must(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    process = subprocess.run(
        argv, env=dict(environ), capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    if process.returncode:
        lines = [text for line in (process.stderr or process.stdout).splitlines() if (text := clean(line))]
        message = lines[-1] if lines else f"it ended with {process.returncode}"
        raise Stop(f"the image cannot be pulled: {message}{_login(message)}", EXIT_IMAGE, "pull-failed")


def _login(message: str) -> str:
    """What mends a pull that a registry refuses to strangers."""
    if not re.search(r"\b(40[13]|denied|unauthorized|forbidden|authentication)\b", message, re.IGNORECASE):
        return ""
    return (
        " (make the repository public, as a new one of ghcr.io is not, or let this machine log in with a "
        "token that may read it: `docker login`, for apptainer `apptainer registry login`)"
    )


def clean(line: bytes) -> str:
    """One printable line: nothing of a stranger steers a terminal."""
    text = "".join(
        character if character.isprintable() else " " for character in line.decode("utf-8", "replace")
    )
    return " ".join(text.split())[:LARGEST_LINE]


def say(text: str) -> None:
    """The one place that prints: nothing in a text steers a terminal."""
    printable = "".join(
        character if character.isprintable() or character in "\n\t" else "?" for character in text
    )
    print(printable, file=sys.stderr, flush=True)


RUNNERS = ("docker", "apptainer")

SUITE_MOUNT, EXPECT_MOUNT, REPORT_MOUNT = (
    "/imagefactory/suite",
    "/imagefactory/expect",
    "/imagefactory/report",
)
REPORT = "report.json"
SHARED_MEMORY = "/dev/shm:rw,nosuid,nodev,exec,mode=1777,size=50%"  # noqa: S108 - inside the container
# What a byte of an image's layers becomes unpacked and as a .sif, at least.
UNPACKED, PACKED = 1.3, 0.8
FAST = "-comp zstd -Xcompression-level 1"  # how `apptainer build` compresses; 1.2 and newer take it
# What apptainer sees of the caller's environment; APPTAINER_* stand for options, but for those two folders.
PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_[A-Z]+|TMPDIR|XDG_RUNTIME_DIR|DOCKER_CONFIG|LD_LIBRARY_PATH"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|APPTAINER_(?:CACHEDIR|TMPDIR)|(?i:https?_proxy|all_proxy|no_proxy)"
)


class Kit(NamedTuple):
    """What kit.json says, and the folder that it lies in.

    `subject` has `index`, `manifest`, `config`; `diff_ids` are the digests of the image's plain layers, and
    `machine` is the processor that it is for, empty where it does not say. `size` are the bytes to fetch.
    `reference` is where to pull it (HOST/NAME@sha256:...), empty where it lies in no registry. `sif` says
    that the subject is a .sif file, and `config` the sha256 of that file; else `sifs` are the sha256 of the
    .sif files that the kit's maker made of the image.
    """

    folder: Path
    nonce: str
    subject: Mapping[str, str]
    diff_ids: Sequence[str]
    machine: str
    size: int
    reference: str
    sif: bool
    sifs: Sequence[str]
    plain_http: bool
    suite: str
    level: str
    capability: str
    argv: Sequence[str]
    timeout: float
    expires: str


def docker_argv(kit: Kit, image: str, work: Path, name: str, visible: str) -> list[str]:
    """The command line of docker; `image` is by digest or id, `work` holds suite, expect and report."""
    mounts = [
        option
        for source, target, writable in _mounts(work)
        for option in (
            "--mount",
            _csv("type=bind", f"src={source}", f"dst={target}", "" if writable else "readonly"),
        )
    ]
    return [
        *("docker", "run", "--rm", "--pull", "never", "--name", name, "--gpus", "all", "--network", "none"),
        *("--init", "--log-driver", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"),
        *("--pids-limit", "32768", "--ipc", "private", "--tmpfs", SHARED_MEMORY),
        *("--user", "0:0", "--workdir", "/", "--hostname", "imagefactory"),
        *(("--env", f"CUDA_VISIBLE_DEVICES={visible}") if visible else ()),
        *mounts,
        *("--entrypoint", kit.argv[0], image, *kit.argv[1:]),
    ]  # fmt: skip


def apptainer_argv(kit: Kit, program: str, image: str, work: Path, uid: int) -> list[str]:
    """The command line of apptainer; `image` is a file. /tmp inside is a folder of `work`, on the disk."""
    mounts = [
        option
        for source, target, writable in _mounts(work)
        for option in (
            "--mount",
            _csv("type=bind", f"source={source}", f"destination={target}", "" if writable else "ro"),
        )
    ]
    return [
        *(program, "--silent", "exec", "--nv", "--containall", "--cleanenv", "--no-home", "--no-eval"),
        *("--net", "--network", "none", "--pwd", "/", "--workdir", str(work / "scratch")),
        *(("--no-privs",) if uid == 0 else ()),
        *mounts,
        image,
        *kit.argv,
    ]


def _mounts(work: Path) -> tuple[tuple[Path, str, bool], ...]:
    return (
        (work / "suite", SUITE_MOUNT, False),
        (work / "expect", EXPECT_MOUNT, False),
        (work / "report", REPORT_MOUNT, True),
    )


def _csv(*fields: str) -> str:
    """docker and apptainer both read the value of --mount as a line of CSV: any path is right."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([field for field in fields if field])
    return line.getvalue()


def same_image(kit: Kit, inspected: Mapping[str, Any]) -> bool:
    """Whether what docker tells of an image is the kit's subject: by a digest, or by all of its layers.

    docker names an image by its config or, with containerd's store, by its manifest; one that was loaded
    from a file may get another manifest, its plain layers stay.
    """
    subject = {kit.subject[name] for name in ("index", "manifest", "config")}
    pulled = {str(name).rpartition("@")[2] for name in inspected.get("RepoDigests") or ()}
    layers = list((inspected.get("RootFS") or {}).get("Layers") or ())
    return (
        inspected.get("Id") in subject
        or bool(pulled & subject)
        or (bool(layers) and layers == list(kit.diff_ids))
    )


def reference_of(kit: Kit, named: str) -> str:
    """What to pull: the kit's reference, or the one that was named. Raises Stop unless it is by digest."""
    reference = named or kit.reference
    if not reference:
        raise Stop(
            "the image of this kit lies in no registry: name it with --image (a loaded image for docker, a "
            ".sif file for apptainer)",
            EXIT_USAGE,
        )
    if reference.rpartition("@")[2] not in (kit.subject["index"], kit.subject["manifest"]):
        raise Stop(f"{reference} does not name {kit.subject['manifest']}, which this kit is for", EXIT_USAGE)
    return reference


def insist_on_room(folder: Path, needed: float, setting: str) -> None:
    """Raises Stop, before the work, where the disk of `folder` lacks these bytes. `setting` moves it."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Stop(
            f"{folder} has {free / 1e9:.1f} GB free, and the image takes {needed / 1e9:.1f} GB at least: "
            f"free some, or {setting}",
            EXIT_TOOL,
            "infrastructure",
        )


# --- docker --------------------------------------------------------------------------------------


class Docker:
    """Runs the kit by docker's command."""

    name = "docker"

    def __init__(self, kit: Kit, environ: Mapping[str, str], *, keep: bool) -> None:
        self.kit, self.environ, self.keep = kit, dict(environ), keep
        self.pulled = ""

    def require(self) -> None:
        """Raises Stop where docker is missing, does not answer or is podman in its clothes."""
        if self.kit.sif:
            raise Stop("this kit is for a .sif file, which docker cannot run: --runner apptainer", EXIT_USAGE)
        if shutil.which("docker", path=self.environ.get("PATH")) is None:
            raise Stop("there is no docker here; --runner apptainer may do", EXIT_TOOL)
        if "podman" in ask(["docker", "--version"], self.environ).lower():
            raise Stop("this docker is podman, which may ignore --gpus: use --runner apptainer", EXIT_TOOL)
        ask(["docker", "version", "--format", "{{.Server.Version}}"], self.environ)

    def fetch(self, named: str, _: Path) -> str:
        """The image that runs, by its id. Raises Stop for one that cannot be had, or is another."""
        here = self._inspect(named) if named else None
        if here is None:
            reference = reference_of(self.kit, named)
            here = self._inspect(reference)
            if here is None:
                self._insist_on_room()
                say(f"pulling {reference}")
                self.pulled = reference
                must(["docker", "pull", "--quiet", reference], self.environ)
                here = self._inspect(reference)
        if here is None or not same_image(self.kit, here):
            raise Stop(f"{named or self.kit.reference} is not the image that this kit is for", EXIT_USAGE)
        return str(here["Id"])

    def run(self, image: str, work: Path, visible: str) -> EndedProcess:
        """Raises Stop where the container was not started."""
        name = f"imagefactory-kit-{self.kit.nonce[:12]}-{os.getpid()}"
        argv = docker_argv(self.kit, image, work, name, visible)
        try:
            ended = follow(argv, self.environ, self.kit.timeout)
        finally:
            subprocess.run(
                ["docker", "rm", "--force", "--volumes", name],
                env=self.environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        if ended.returncode in (125, 126, 127) and not (work / "report" / REPORT).exists():
            message = ended.lines[-1] if ended.lines else "no word"
            raise Stop(f"docker did not start it: {message}", EXIT_TOOL, "infrastructure")
        return ended

    def clear(self) -> None:
        """Takes away what `fetch` pulled, unless it is to be kept. docker keeps what has another name."""
        if not self.pulled or self.keep or self._inspect(self.pulled) is None:
            return
        argv = ["docker", "image", "rm", "--", self.pulled]
        process = subprocess.run(
            argv, env=self.environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if process.returncode:
            message = clean(process.stderr.encode()) or f"it ended with {process.returncode}"
            say(f"left: {self.pulled}: {message}")

    def _insist_on_room(self) -> None:
        """Where docker's daemon is on this machine and says where it keeps its images."""
        argv = ["docker", "info", "--format", "{{.DockerRootDir}}"]
        process = subprocess.run(
            argv, env=self.environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        root = Path(process.stdout.strip() or "/nowhere")
        here = self.environ.get("DOCKER_HOST", "unix:").startswith("unix:")
        if process.returncode == 0 and here and root.is_dir():
            insist_on_room(root, self.kit.size * UNPACKED, "move docker's data-root")

    def _inspect(self, image: str) -> Mapping[str, Any] | None:
        argv = ["docker", "image", "inspect", "--format", "{{json .}}", "--", image]
        process = subprocess.run(
            argv, env=self.environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if process.returncode:
            return None
        result: Mapping[str, Any] = json.loads(process.stdout)
        return result


# --- apptainer -----------------------------------------------------------------------------------


class Apptainer:
    """Runs the kit by apptainer."""

    name = "apptainer"

    def __init__(self, kit: Kit, environ: Mapping[str, str], *, keep: bool) -> None:
        self.kit, self.keep = kit, keep
        self.environ = {name: value for name, value in environ.items() if PASSED.fullmatch(name)}
        self.program, self.version = "apptainer", ""

    def require(self) -> None:
        """Raises Stop where apptainer is missing."""
        path = self.environ.get("PATH")
        program = next((name for name in ("apptainer", "singularity") if shutil.which(name, path=path)), "")
        output = ask([program, "--version"], self.environ) if program else ""
        if "apptainer version" not in output:
            raise Stop("there is no apptainer here", EXIT_TOOL)
        self.program, self.version = program, output.split()[-1]

    def fetch(self, named: str, work: Path) -> str:
        """The .sif file that runs. Raises Stop for one that cannot be had, or is another."""
        if named and Path(named).is_file():
            return self._checked(Path(named).absolute())
        reference, path = reference_of(self.kit, named), work / "image.sif"
        plain = [
            *(["--no-https"] if self.kit.plain_http else []),
            *([] if self.keep else ["--disable-cache"]),
        ]
        self._insist_on_room(work)
        say(f"pulling {reference}")
        if self.kit.sif:
            must([self.program, "pull", *plain, str(path), f"oras://{reference}"], self.environ)
            return self._checked(path)
        # `pull` would compress with gzip, which takes many minutes for an image of some GB.
        fast = re.match(r"1\.[01]\b", self.version) is None
        how = ("build", "--mksquashfs-args", FAST) if fast else ("pull",)
        must([self.program, *how, *plain, str(path), f"docker://{reference}"], self.environ)
        return str(path)

    def clear(self) -> None:
        """The .sif goes with the folder of the run, and without `keep` apptainer's cache gets nothing."""

    def _insist_on_room(self, work: Path) -> None:
        """For the .sif, and for the layers and what they unpack to, of which it is made."""
        insist_on_room(work, self.kit.size * (1 if self.kit.sif else PACKED), "move the kit to another disk")
        if not self.kit.sif:
            folder = self.environ.get("APPTAINER_TMPDIR") or self.environ.get("TMPDIR") or "/tmp"  # noqa: S108
            if Path(folder).is_dir():
                insist_on_room(
                    Path(folder), self.kit.size * (1 + UNPACKED), "set APPTAINER_TMPDIR to another disk"
                )

    def _checked(self, path: Path) -> str:
        total = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                total.update(data)
        known = [self.kit.subject["config"]] if self.kit.sif else list(self.kit.sifs)
        if f"sha256:{total.hexdigest()}" not in known:
            hint = (
                "take one of these"
                if known
                else "first `imagefactory export TARGET --format sif`, then the kit"
            )
            raise Stop(
                f"{path} is no .sif that this kit knows: {hint} {' '.join(known)}".rstrip(), EXIT_USAGE
            )
        return str(path)

    def run(self, image: str, work: Path, visible: str) -> EndedProcess:
        (work / "scratch").mkdir()
        inside = {"APPTAINERENV_CUDA_VISIBLE_DEVICES": visible} if visible else {}
        argv = apptainer_argv(self.kit, self.program, image, work, os.geteuid())
        ended = follow(argv, {**self.environ, **inside}, self.kit.timeout)
        if ended.returncode == 255 and not (work / "report" / REPORT).exists():
            message = ended.lines[-1] if ended.lines else "no word"
            raise Stop(f"apptainer did not start it: {message}", EXIT_TOOL, "infrastructure")
        return ended


def choose_runner(name: str, kit: Kit, environ: Mapping[str, str], *, keep: bool) -> Docker | Apptainer:
    """The one that was asked for, or the first that works here. Raises Stop where none does.

    With `keep` what it pulls stays on the machine.
    """
    runners: list[Docker | Apptainer] = [
        Docker(kit, environ, keep=keep),
        Apptainer(kit, environ, keep=keep),
    ]
    reasons = []
    for runner in runners:
        if name in ("", runner.name):
            try:
                runner.require()
            except Stop as stop:
                reasons.append(f"{runner.name}: {stop}")
                continue
            return runner
    raise Stop("; ".join(reasons), EXIT_TOOL)
