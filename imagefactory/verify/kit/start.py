"""Start Docker, Podman, Apptainer and pyxis through their command lines, with the options of a kit.

It uses only the standard library. The rules are the same as for imagefactory's runners: no network, no
capabilities, no new privileges, suite and expectations read-only, and from the environment of the host only
the GPUs of the job. pyxis cannot keep most of them: its containers have the network and variables of the job.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .forward import FIRST, HEAD, LOOK, LOOK_SECONDS, read_look
from .hardware import (
    ALL,
    CDI_FOLDERS,
    FLOOR_GLIBC,
    MAKE_CDI,
    PROBE_GLIBC,
    CdiDevices,
    SelectedGpu,
    cdi_names,
    driver_libraries,
    glibc_problem,
    newer_base,
    newest_need,
    outdated_cdi,
    parse_glibc,
    read_cdi,
    read_driver,
)

EXIT_USAGE, EXIT_TOOL, EXIT_IMAGE = 2, 6, 8
LARGEST_LINE = 2000
MOST_LINES = 4000


class Stop(Exception):
    """The run cannot continue. `code` is the exit code, `outcome` an outcome of the suite or empty."""

    def __init__(self, message: str, code: int, outcome: str = "") -> None:
        super().__init__(message)
        self.code, self.outcome = code, outcome


class EndedProcess(NamedTuple):
    """The end of the process in the image. `lines` are the end of its output."""

    returncode: int
    timed_out: bool
    seconds: float
    lines: Sequence[str]


def follow(argv: Sequence[str], environ: Mapping[str, str], timeout: float) -> EndedProcess:
    """Run a command, print its lines, and end it with all its children after `timeout` seconds."""
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
            text = clean(line.decode("utf-8", "replace"))
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
    """End a command and its child processes. Processes that apptainer itself started stay in its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def capture(
    argv: Sequence[str], environ: Mapping[str, str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. After `timeout` seconds its exit code is 124."""
    try:
        return subprocess.run(
            argv,
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"it did not end in {timeout} s")


def read_start(argv: Sequence[str], environ: Mapping[str, str], most: int) -> bytes:
    """Return at most the first `most` bytes that a command prints in LOOK_SECONDS, and end it."""
    process = subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    timer = threading.Timer(LOOK_SECONDS, end_group, (process,))
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout as output:
            return output.read(most)
    finally:
        timer.cancel()
        end_group(process)


def ask(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the output of a command. Raises Stop if it fails."""
    process = capture(argv, environ)
    if process.returncode:
        raise Stop(f"`{' '.join(argv)}` says: {clean(process.stderr or process.stdout)}", EXIT_TOOL)
    return process.stdout


def run_or_stop(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run a command that pulls an image. Raises Stop with its last line if it fails."""
    process = capture(argv, environ)
    if process.returncode:
        lines = [text for line in (process.stderr or process.stdout).splitlines() if (text := clean(line))]
        message = lines[-1] if lines else f"it ended with {process.returncode}"
        raise Stop(f"the image cannot be pulled: {message}{_login(message)}", EXIT_IMAGE, "pull-failed")


def _login(message: str) -> str:
    """Return the hint for a pull that requires a login."""
    if not re.search(r"\b(40[13]|denied|unauthorized|forbidden|authentication)\b", message, re.IGNORECASE):
        return ""
    return (
        " (make the repository public, as a new one of ghcr.io is not, or let this machine log in with a "
        "token that may read it: `docker login`, for apptainer `apptainer registry login`)"
    )


def clean(text: str) -> str:
    """Return one printable line, so that untrusted text cannot control a terminal."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(line.split())[:LARGEST_LINE]


def say(text: str) -> None:
    """Print a text to stderr without terminal control characters."""
    line = "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)
    print(line, file=sys.stderr, flush=True)


RUNNERS = ("docker", "podman", "apptainer", "pyxis")
NODE = "node"
"""The level of a kit that checks a node again and again. It never pulls its image."""
NODES, MEETING = "nodes", "IMAGEFACTORY_MEETING"
"""The level for several nodes of a job, and the variable by which they find each other in the suite."""

SUITE_MOUNT, EXPECT_MOUNT, REPORT_MOUNT = (
    "/imagefactory/suite",
    "/imagefactory/expect",
    "/imagefactory/report",
)
REPORT = "report.json"
SHARED_MEMORY = "/dev/shm:rw,nosuid,nodev,exec,mode=1777,size=50%"  # noqa: S108 - inside the container
# The smallest factors from a byte of an image's layers to its unpacked size and its .sif size.
UNPACKED, PACKED = 1.3, 0.8
FAST = "-comp zstd -Xcompression-level 1"  # compression of `apptainer build`; supported from 1.2 on
# The caller's variables that apptainer sees; APPTAINER_* are options, except for these two directories.
PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_[A-Z]+|TMPDIR|XDG_RUNTIME_DIR|DOCKER_CONFIG|LD_LIBRARY_PATH"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|APPTAINER_(?:CACHEDIR|TMPDIR)|(?i:https?_proxy|all_proxy|no_proxy)"
)


class Kit(NamedTuple):
    """The contents of kit.json, and the directory of the kit.

    `subject` has `index`, `manifest`, `config`. `diff_ids` are the digests of the uncompressed layers.
    `machine` is the processor of the image, empty if unknown. `size` is the download size in bytes.
    `reference` is the address for a pull (HOST/NAME@sha256:...), empty if the image is in no registry. `sif`
    means that the subject is a .sif file, and `config` its sha256. Otherwise `sifs` are the sha256 of .sif
    files that the author of the kit built from the image.
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


CONTAINED = ("--containall", "--cleanenv", "--no-home", "--no-eval")
ALONE = (*CONTAINED, "--net", "--network", "none")
FABRICS = ("infiniband", "cxi[0-9]*")
"""Device nodes of InfiniBand and Slingshot in /dev, which --containall hides."""
INTERFACES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
"""Variables by which a site names the interfaces of its nodes."""


def gpu_options(gpus: Sequence[SelectedGpu], devices: CdiDevices) -> list[str]:
    """Return the options of docker or podman for these GPUs, for all without any.

    They come by CDI if its specifications name GPUs. podman may ignore --gpus.
    """
    if devices.names:
        return [word for name in cdi_names(gpus, devices) for word in ("--device", name)]
    uuids = ",".join(gpu.uuid for gpu in gpus)
    return ["--gpus", f'"device={uuids}"' if uuids else ALL]  # docker reads CSV


def check_glibc(libraries: Sequence[str], probe: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise Stop if the driver's libraries need a newer glibc than the image, of which `probe` prints it."""
    need = newest_need(libraries)
    if need.version > FLOOR_GLIBC:
        problem = glibc_problem(need, parse_glibc(capture(probe, environ).stdout))
        if problem:
            raise Stop(f"{problem}: use an image on {newer_base(need.version)}", EXIT_TOOL, "infrastructure")


def docker_argv(
    kit: Kit, image: str, work: Path, name: str, visible: str, gpus: Sequence[str], program: str = "docker"
) -> list[str]:
    """Return the command line of docker or podman. `gpus` are the options of `gpu_options`.

    `image` is a digest or id; `work` contains suite, expect and report.
    """
    return [
        *(program, "run", "--rm", "--pull", "never", "--name", name, *gpus, "--network", "none"),
        *("--init", "--log-driver", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"),
        *("--pids-limit", "32768", "--ipc", "private", "--tmpfs", SHARED_MEMORY),
        *("--user", "0:0", "--workdir", "/", "--hostname", "imagefactory"),
        *(("--env", f"CUDA_VISIBLE_DEVICES={visible}") if visible else ()),
        *_mounts(work, "src", "dst", "readonly"),
        *("--entrypoint", kit.argv[0], image, *kit.argv[1:]),
    ]  # fmt: skip


def apptainer_argv(kit: Kit, program: str, image: str, work: Path, uid: int, forward: str = "") -> list[str]:
    """Return the command line of apptainer.

    `image` is a file. /tmp in the image is on the disk, in `work`. `forward` is the directory of the image's
    libcuda if programs must use it, empty for the machine's own. On several nodes, the image has the network.
    """
    contained = ALONE if kit.level != NODES else (*CONTAINED, *fabric_options())
    return [
        *(program, "--silent", "exec", "--nv", *contained, "--pwd", "/", "--workdir", str(work / "scratch")),
        *(("--no-privs",) if uid == 0 else ()),
        *_mounts(work, "source", "destination", "ro"),
        image,
        *(("/bin/sh", "-c", FIRST, forward) if forward else ()),
        *kit.argv,
    ]


def nodes_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Apptainer sets in the image what nodes need to meet."""
    return {f"APPTAINERENV_{name}": environ[name] for name in (MEETING, *INTERFACES) if name in environ}


def fabric_options(dev: str = "/dev") -> list[str]:
    """Return the options for the device nodes of fast networks."""
    devices = sorted(str(path) for name in FABRICS for path in Path(dev).glob(name))
    return [word for path in devices for word in ("--bind", path)]


def _mounts(work: Path, source: str, target: str, readonly: str) -> Iterator[str]:
    """Yield the mount options. source, target and readonly are the keywords of the program, the values CSV
    lines.
    """
    for name, mount in (("suite", SUITE_MOUNT), ("expect", EXPECT_MOUNT), ("report", REPORT_MOUNT)):
        line = io.StringIO()
        fields = ["type=bind", f"{source}={work / name}", f"{target}={mount}"]
        csv.writer(line, lineterminator="").writerow([*fields, *([] if name == "report" else [readonly])])
        yield from ("--mount", line.getvalue())


def _check_started(ended: EndedProcess, program: str, codes: Sequence[int], work: Path) -> EndedProcess:
    """Return `ended`. Raises Stop if the exit code is one of the program itself and there is no report."""
    if ended.returncode in codes and not (work / "report" / REPORT).exists():
        message = ended.lines[-1] if ended.lines else "no output"
        raise Stop(f"{program} did not start it: {message}", EXIT_TOOL, "infrastructure")
    return ended


def same_image(kit: Kit, inspected: Mapping[str, Any]) -> bool:
    """Return whether docker's description matches the subject of the kit: by a digest, or by all of its
    layers.

    docker identifies an image by its config or, with containerd's store, by its manifest. An image loaded
    from a file may get another manifest, but its layers stay the same.
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
    """Return the address to pull: `named`, or the reference of the kit.

    Raises Stop unless it has a digest.
    """
    reference = named or kit.reference
    if not reference:
        raise Stop(
            "the image of this kit is not in a registry: pass it with --image (a loaded image for docker, a "
            ".sif file for apptainer)",
            EXIT_USAGE,
        )
    if reference.rpartition("@")[2] not in (kit.subject["index"], kit.subject["manifest"]):
        raise Stop(f"{reference} does not name {kit.subject['manifest']}, which this kit is for", EXIT_USAGE)
    return reference


def check_free_space(folder: Path, needed: float, setting: str) -> None:
    """Raise Stop if the disk of `folder` has fewer than `needed` free bytes. `setting` is the hint."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Stop(
            f"{folder} has {free / 1e9:.1f} GB free, and the image takes {needed / 1e9:.1f} GB at least: "
            f"free some, or {setting}",
            EXIT_TOOL,
            "infrastructure",
        )


class Docker:
    """A runner that uses the docker command."""

    name = "docker"

    def __init__(self, kit: Kit, environ: Mapping[str, str], *, keep: bool) -> None:
        self.kit, self.environ, self.keep = kit, dict(environ), keep
        self.pulled, self.devices = "", CdiDevices((), ())
        self._plain: tuple[str, ...] = ()  # docker's daemon knows itself which registries are plain

    def require(self) -> None:
        """Raise Stop if docker is missing, does not respond, or is podman."""
        if self.kit.sif:
            raise Stop("this kit is for a .sif file, which docker cannot run: --runner apptainer", EXIT_USAGE)
        if shutil.which("docker", path=self.environ.get("PATH")) is None:
            raise Stop("not installed", EXIT_TOOL)
        if "podman" in ask([self.name, "--version"], self.environ).lower():
            raise Stop("this docker is podman, which may ignore --gpus: use --runner podman", EXIT_TOOL)
        ask([self.name, "version", "--format", "{{.Server.Version}}"], self.environ)
        # Docker 25 or newer with CDI. Older ones have no such field.
        facts = json.loads(ask([self.name, "info", "--format", "{{json .}}"], self.environ))
        self._read_cdi(facts.get("CDISpecDirs") or ())

    def _read_cdi(self, folders: Sequence[str]) -> None:
        """Read the specifications of CDI. Raises Stop if they are for another driver than the loaded one."""
        self.devices = read_cdi(folders)
        problem = outdated_cdi(self.devices, read_driver())
        if problem:
            raise Stop(f"{problem}: {MAKE_CDI}", EXIT_TOOL)

    def fetch(self, named: str, _: Path) -> str:
        """Return the id of the image. Raises Stop if it is not available, or is another image."""
        here = self._inspect(named) if named else None
        if here is None:
            reference = reference_of(self.kit, named)
            here = self._inspect(reference)
            if here is None and self.kit.level == NODE:
                hint = f"{self.name} pull {reference}"
                raise Stop(f"the image is not on this machine: {hint}", EXIT_IMAGE)
            if here is None:
                self._check_disk()
                say(f"pulling {reference}")
                self.pulled = reference
                run_or_stop([self.name, "pull", "--quiet", *self._plain, reference], self.environ)
                here = self._inspect(reference)
        if here is None or not same_image(self.kit, here):
            raise Stop(f"{named or self.kit.reference} is not the image that this kit is for", EXIT_USAGE)
        return str(here["Id"])

    def run(
        self, image: str, work: Path, visible: str, gpus: Sequence[SelectedGpu], _: Mapping[str, Any]
    ) -> EndedProcess:
        """Run the container with these GPUs, all for none. Raises Stop if it was not started.

        NVIDIA's hook, which gives the container its GPUs, chooses the libcuda.
        """
        name = f"imagefactory-kit-{self.kit.nonce[:12]}-{os.getpid()}"
        closed = ("--network", "none", "--cap-drop", "ALL", "--read-only", "--entrypoint", PROBE_GLIBC[0])
        probe = (self.name, "run", "--rm", "--pull", "never", *closed, image, *PROBE_GLIBC[1:])
        libraries = self.devices.libraries if self.devices.names else driver_libraries()
        check_glibc(libraries, probe, self.environ)
        options = gpu_options(gpus, self.devices)
        argv = docker_argv(self.kit, image, work, name, visible, options, self.name)
        try:
            ended = follow(argv, self.environ, self.kit.timeout)
        finally:
            # A container whose process hangs in the driver cannot be removed.
            limit = 5.0 if self.kit.level == NODE else None
            capture([self.name, "rm", "--force", "--volumes", name], self.environ, limit)
        return _check_started(ended, self.name, (125, 126, 127), work)

    def clear(self) -> None:
        """Remove the image that `fetch` pulled, unless `keep` is set. docker keeps an image that has another
        name.
        """
        if not self.pulled or self.keep or self._inspect(self.pulled) is None:
            return
        process = capture([self.name, "image", "rm", "--", self.pulled], self.environ)
        if process.returncode:
            message = clean(process.stderr) or f"it ended with {process.returncode}"
            say(f"left: {self.pulled}: {message}")

    def _check_disk(self) -> None:
        """Check the free disk space if the docker daemon is on this machine and reports its directory."""
        process = capture([self.name, "info", "--format", "{{.DockerRootDir}}"], self.environ)
        root = Path(process.stdout.strip() or "/nowhere")
        here = self.environ.get("DOCKER_HOST", "unix:").startswith("unix:")
        if process.returncode == 0 and here and root.is_dir():
            check_free_space(root, self.kit.size * UNPACKED, "move docker's data-root")

    def _inspect(self, image: str) -> Mapping[str, Any] | None:
        argv = [self.name, "image", "inspect", "--format", "{{json .}}", "--", image]
        process = capture(argv, self.environ)
        if process.returncode:
            return None
        description: dict[str, Any] = json.loads(process.stdout)
        if re.fullmatch("[0-9a-f]{64}", str(description.get("Id"))):  # podman's
            description["Id"] = f"sha256:{description['Id']}"
        return description


class Podman(Docker):
    """A runner that uses the podman command, which gives GPUs by CDI from 4.1 on."""

    name = "podman"

    def __init__(self, kit: Kit, environ: Mapping[str, str], *, keep: bool) -> None:
        super().__init__(kit, environ, keep=keep)
        self._plain = ("--tls-verify=false",) if kit.plain_http else ()

    def require(self) -> None:
        """Raise Stop if podman is missing, too old, or has no specification of the GPUs."""
        if self.kit.sif:
            raise Stop("this kit is for a .sif file, which podman cannot run: --runner apptainer", EXIT_USAGE)
        if shutil.which("podman", path=self.environ.get("PATH")) is None:
            raise Stop("not installed", EXIT_TOOL)
        text = ask(["podman", "--version"], self.environ)
        if tuple(int(part) for part in re.findall("[0-9]+", text)[:2]) < (4, 1):
            raise Stop(f"{clean(text)} gives no GPUs to containers: 4.1 or newer is needed", EXIT_TOOL)
        self._read_cdi(CDI_FOLDERS)
        if not self.devices.names:
            raise Stop(f"podman finds no GPUs: {MAKE_CDI}", EXIT_TOOL)

    def _check_disk(self) -> None:
        """Check the free disk space of podman's storage."""
        process = capture(["podman", "info", "--format", "{{.Store.GraphRoot}}"], self.environ)
        root = Path(process.stdout.strip() or "/nowhere")
        if process.returncode == 0 and root.is_dir():
            check_free_space(root, self.kit.size * UNPACKED, "set graphroot in storage.conf to another disk")


class Apptainer:
    """A runner that uses apptainer."""

    name = "apptainer"

    def __init__(self, kit: Kit, environ: Mapping[str, str], *, keep: bool) -> None:
        self.kit, self.keep = kit, keep
        self.environ = {name: value for name, value in environ.items() if PASSED.fullmatch(name)}
        self.program, self.version = "apptainer", ""
        self.inside = nodes_environment(environ) if kit.level == NODES else {}

    def require(self) -> None:
        """Raise Stop if apptainer is missing."""
        path = self.environ.get("PATH")
        program = next((name for name in ("apptainer", "singularity") if shutil.which(name, path=path)), "")
        output = ask([program, "--version"], self.environ) if program else ""
        if "apptainer version" not in output:
            raise Stop("not installed (a kit needs docker, podman 4.1 or apptainer)", EXIT_TOOL)
        self.program, self.version = program, output.split()[-1]

    def fetch(self, named: str, work: Path) -> str:
        """Return the .sif file to run. Raises Stop if it is not available, or is another image."""
        if named and Path(named).is_file():
            return self._checked(Path(named).absolute())
        if self.kit.level == NODE:
            raise Stop("the image must be a .sif file on this machine: --image FILE.sif", EXIT_USAGE)
        reference, path = reference_of(self.kit, named), work / "image.sif"
        plain = [*(["--no-https"] * self.kit.plain_http), *(["--disable-cache"] * (not self.keep))]
        self._check_disk(work)
        say(f"pulling {reference}")
        if self.kit.sif:
            run_or_stop([self.program, "pull", *plain, str(path), f"oras://{reference}"], self.environ)
            return self._checked(path)
        # `pull` would compress with gzip, which takes many minutes for an image of some GB.
        fast = re.match(r"1\.[01]\b", self.version) is None
        how = ("build", "--mksquashfs-args", FAST) if fast else ("pull",)
        run_or_stop([self.program, *how, *plain, str(path), f"docker://{reference}"], self.environ)
        return str(path)

    def clear(self) -> None:
        """Do nothing: the .sif is in the directory of the run, and `keep` applies to apptainer's cache."""

    def _check_disk(self, work: Path) -> None:
        """Check the free disk space for the .sif, and for the layers and their unpacked files."""
        check_free_space(
            work, self.kit.size * (1 if self.kit.sif else PACKED), "move the kit to another disk"
        )
        if not self.kit.sif:
            folder = self.environ.get("APPTAINER_TMPDIR") or self.environ.get("TMPDIR") or "/tmp"  # noqa: S108
            if Path(folder).is_dir():
                check_free_space(
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
                else "first `imagefactory image export TARGET --format sif`, then the kit"
            )
            text = f"{path} is not a .sif that this kit knows: {hint} {' '.join(known)}".rstrip()
            raise Stop(text, EXIT_USAGE)
        return str(path)

    def run(
        self, image: str, work: Path, visible: str, gpus: Sequence[SelectedGpu], host: Mapping[str, Any]
    ) -> EndedProcess:
        """Run the .sif with the libcuda that NVIDIA's hook would choose, since apptainer has no hook.

        `host` has all GPUs of the machine.
        """
        (work / "scratch").mkdir()
        # Read by apptainer itself if it uses nvidia-container-cli. Else --nv binds all GPUs.
        inside = {"NVIDIA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus) or ALL, **self.inside}
        if visible:
            inside["APPTAINERENV_CUDA_VISIBLE_DEVICES"] = visible
        privileges = ["--no-privs"] * (os.geteuid() == 0)
        probe = (self.program, "--silent", "exec", *ALONE, *privileges, image, *PROBE_GLIBC)
        check_glibc(driver_libraries(), probe, self.environ)
        look = [self.program, "--silent", "exec", *ALONE, *privileges, image, "/bin/sh", "-c", LOOK]
        output = read_start(look, self.environ, 2 * HEAD)
        forward = read_look(output, host["driver"], [gpu["name"] for gpu in host["gpus"]])
        argv = apptainer_argv(self.kit, self.program, image, work, os.geteuid(), forward)
        ended = follow(argv, {**self.environ, **inside}, self.kit.timeout)
        return _check_started(ended, self.name, (255,), work)


IMPORTED, CACHE = "image.sqsh", "enroot"
# What srun prints if pyxis, another plugin or Slurm itself did not start the task.
NOT_A_TASK = re.compile(r"error: (?:pyxis|spank): |srun: error: (?!.*\btask)")
OF_SLURM = re.compile(r"SLURM_.*|XDG_.*|ENROOT_(?:CONFIG|DATA|RUNTIME|TEMP)_PATH")


class Pyxis:
    """A runner that uses enroot and srun's plugin pyxis, inside a job. Source: enroot 4.1, pyxis 0.24.

    Only a request by name chooses it: anywhere else, srun would wait for a job.
    """

    name = "pyxis"

    def __init__(self, kit: Kit, environ: Mapping[str, str], *, keep: bool) -> None:  # noqa: ARG002
        self.kit = kit
        self.environ = {
            name: value
            for name, value in environ.items()
            if (PASSED.fullmatch(name) or OF_SLURM.fullmatch(name)) and name != "LD_LIBRARY_PATH"
        }

    def require(self) -> None:
        """Raise Stop outside a job, and without pyxis or an enroot that takes digests."""
        if self.kit.sif:
            raise Stop("this kit is for a .sif file, which pyxis cannot run: --runner apptainer", EXIT_USAGE)
        if self.kit.level == NODE:
            raise Stop("pyxis imports its image each time, which a kit for nodes never does", EXIT_USAGE)
        if "SLURM_JOB_ID" not in self.environ:
            raise Stop("this is not a job of Slurm", EXIT_TOOL)
        for program in ("srun", "enroot"):
            if shutil.which(program, path=self.environ.get("PATH")) is None:
                raise Stop(f"{program} is not installed", EXIT_TOOL)
        if "--container-image" not in ask(["srun", "--help"], self.environ):
            raise Stop("srun has no plugin pyxis", EXIT_TOOL)
        version = clean(ask(["enroot", "version"], self.environ))
        if tuple(map(int, re.findall("[0-9]+", version)[:1])) < (4,):
            raise Stop(f"enroot {version} gets no image by digest: 4.0 or newer is needed", EXIT_TOOL)

    def fetch(self, named: str, work: Path) -> str:
        """Import the image into `work`. Raises Stop if it is not available, or is another image.

        enroot checks the digests of config and layers, but not of the manifest that names them. So its cache
        is empty before, and must have the config of this kit then.
        """
        reference, path, cache = reference_of(self.kit, named), work / IMPORTED, work / CACHE
        host, _, rest = reference.partition("/")
        check_free_space(work, self.kit.size * (1 + PACKED), "set TMPDIR to another disk")
        cache.mkdir()
        say(f"pulling {reference}")
        plain = {"ENROOT_ALLOW_HTTP": "yes"} if self.kit.plain_http else {}
        environ = {**self.environ, **plain, "ENROOT_CACHE_PATH": str(cache)}
        run_or_stop(["enroot", "import", "--output", str(path), f"docker://{host}#{rest}"], environ)
        if not (cache / self.kit.subject["config"].partition(":")[2]).is_file():
            raise Stop(f"{reference} is not the image that this kit is for", EXIT_USAGE)
        shutil.rmtree(cache, ignore_errors=True)
        return str(path)

    def run(
        self, image: str, work: Path, visible: str, _: Sequence[SelectedGpu], __: Mapping[str, Any]
    ) -> EndedProcess:
        """Run a step of the job in the image. Raises Stop if it was not started.

        The step has the devices of the job, of which `visible` selects.
        """
        if re.search("[:,]", str(work)):
            raise Stop(f"pyxis cannot mount {work}: move the kit to a path without ':' and ','", EXIT_USAGE)
        environ = {name: value for name, value in self.environ.items() if name != "TMPDIR"}
        environ.update({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
        ended = follow(pyxis_argv(self.kit, image, work, self.environ), environ, self.kit.timeout)
        report = work / "report" / REPORT
        if ended.returncode and not report.exists():
            for line in ended.lines:
                if NOT_A_TASK.search(line):
                    raise Stop(f"srun did not start it: {line}", EXIT_TOOL, "infrastructure")
        return ended

    def clear(self) -> None:
        """Do nothing: the imported image is in the directory of the run."""


def pyxis_argv(kit: Kit, image: str, work: Path, environ: Mapping[str, str]) -> list[str]:
    """Return the command line of srun. `image` is a .sqsh file.

    A step gets cores only if it requests them. enroot's login shell may have reset the PATH of the image.
    """
    cores = environ.get("SLURM_CPUS_PER_TASK", "")
    mounts = (("suite", SUITE_MOUNT, ":ro"), ("expect", EXPECT_MOUNT, ":ro"), ("report", REPORT_MOUNT, ""))
    return [
        *("srun", "--ntasks=1", *([f"--cpus-per-task={cores}"] if cores else []), "--export=ALL"),
        f"--container-image={image}",
        f"--container-mounts={','.join(f'{work / name}:{place}{flags}' for name, place, flags in mounts)}",
        *("--container-workdir=/", "--no-container-mount-home", "--no-container-entrypoint"),
        *("sh", "-c", 'export PATH="${1%/*}:$PATH"; exec "$@"', "sh", *kit.argv),
    ]


def choose_runner(
    name: str, kit: Kit, environ: Mapping[str, str], *, keep: bool
) -> Docker | Apptainer | Pyxis:
    """Return the runner with this name, or the first one that works here. Raises Stop if none does.

    With `keep`, the pulled image is not removed.
    """
    reasons = []
    for kind in (Docker, Podman, Apptainer, Pyxis):
        if kit.level == NODES and kind is not Apptainer:
            reasons.append(f"{kind.name}: it runs no image on several nodes")
        elif name == kind.name or (not name and kind is not Pyxis):
            runner: Docker | Apptainer | Pyxis = kind(kit, environ, keep=keep)
            try:
                runner.require()
            except Stop as stop:
                reasons.append(f"{runner.name}: {stop}")
                continue
            return runner
    raise Stop("; ".join(reasons), EXIT_TOOL)
