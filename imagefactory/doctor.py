"""What this machine has and lacks for building, running and verifying images, and the remedy for each.

`gather` looks (files, programs, real attempts: a sandbox, engines, what the network should reach),
`decide` judges: tests feed it facts of machines that are not at hand. What the configured engine and
runner do not need keeps nobody from building.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.errors import FactoryError, ToolError
from imagefactory.progress import format_bytes
from imagefactory.settings.choices import ENGINES, SOLVERS
from imagefactory.settings.load import Settings
from imagefactory.verify.runners.gpu_devices import (
    count_gpus,
    find_device_nodes,
    parse_driver_version,
    parse_linker_cache,
    read_linker_cache,
)
from imagefactory.web import redact

if TYPE_CHECKING:
    from imagefactory.lock.pypi.index import PackageIndex

OLDEST_PYTHON = (3, 11)
OLDEST_KERNEL = (5, 12)
OLDEST_GLIBC = (2, 28)
# A PyTorch with CUDA: 2.8 GB of wheels in the cache; 2.5 GB of layers and 5 GB unpacked in the store.
CACHE_BYTES = 4_000_000_000
STORE_BYTES = 10_000_000_000
SYSCTLS = (
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
    "user/max_user_namespaces",
    "user/max_mnt_namespaces",
    "user/max_pid_namespaces",
    "user/max_net_namespaces",
)
TOOLS = ("mmdebstrap", "newuidmap", "uv", "apt-get")
MODULES = ("uv", "isal", "zstandard", "installer", "jinja2", "requests", "tenacity", "rich")
SECONDS = 10
"""How long one thing of the network may take to answer."""
KEYRINGS = ("usr/share/keyrings", "etc/apt/trusted.gpg.d", "etc/apt/keyrings")


class State(StrEnum):
    OK = "ok"
    MISSING = "missing"
    DENIED = "denied"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's answer. `remedy` is a command or a setting, empty when all is well.

    `needed_for` is `build`, `run`, `push`, `gpu` or `comfort`, or the name of an engine or runner that is
    not the configured one: without what is needed for `build` or `run` and is missing or denied, the
    README's first command cannot end well.
    """

    name: str
    state: State
    detail: str
    remedy: str = ""
    needed_for: str = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A thing that was really tried: what the machine said when it refused, else an empty string."""

    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Something that was asked whether it works: what it said (`found`), else why not and what mends it."""

    name: str
    found: str = ""
    refusal: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Free bytes of the file system that holds, or would hold, a folder."""

    name: str
    path: str
    origin: str
    free: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `gather` saw. `sysctls` lacks the names that this kernel does not have.

    `engine` and `runner` are those that a build here uses; `probes` are of engines and of the network.
    """

    python: tuple[int, int, int]
    machine: str
    libc: tuple[str, str]
    kernel: str
    uid: int
    user: str
    cores: int
    capabilities: int
    seccomp: int
    container: str
    sysctls: tuple[tuple[str, str], ...]
    sandbox: Attempt
    tools: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    keyrings: tuple[str, ...]
    apt_sources: tuple[str, ...]
    debian_mirror: str
    subuid: bool
    subgid: bool
    disks: tuple[Disk, ...]
    gpu_nodes: tuple[str, ...]
    driver: str
    driver_libraries: tuple[str, ...]
    engine: str = "assemble"
    runner: str = "unshare"
    probes: tuple[Probe, ...] = ()

    def probe(self, name: str) -> Probe | None:
        return next((probe for probe in self.probes if probe.name == name), None)

    def use(self, name: str) -> str:
        """What an engine or runner is needed for here: `build`, `run`, or itself alone."""
        return "build" if name == self.engine else "run" if name == self.runner else name


def examine(settings: Settings, *, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Looks at this machine. The sandbox is really tried, in a child process and a temporary folder."""
    return decide(gather(settings, environ=environ))


def can_build(findings: tuple[Finding, ...]) -> bool:
    """False when something that `build` needs (its smoke test included) is missing or denied."""
    bad = (State.MISSING, State.DENIED)
    return not any(finding.state in bad and finding.needed_for in ("build", "run") for finding in findings)


# --- judging -------------------------------------------------------------------------------------


def decide(facts: Facts) -> tuple[Finding, ...]:
    return (
        _python(facts),
        _processor(facts),
        _kernel(facts),
        *_sandbox(facts),
        *_programs(facts),
        *_subordinate_ids(facts),
        *_engines(facts),
        *_conda(facts),
        *_network(facts),
        *(_disk(disk) for disk in facts.disks),
        _cores(facts),
        *_gpus(facts),
    )


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST_PYTHON:
        return Finding(
            name="python",
            state=State.MISSING,
            detail=f"Python {version} is too old",
            remedy="use Python 3.11 or newer (Debian 12: apt-get install python3)",
        )
    return Finding(name="python", state=State.OK, detail=f"Python {version}")


def _processor(facts: Facts) -> Finding:
    kind, version = facts.libc
    detail = f"{facts.machine}, {kind or 'unknown C library'} {version}".rstrip()
    if facts.machine != "x86_64":
        return Finding(
            name="platform",
            state=State.MISSING,
            detail=f"{detail}: images are linux/amd64",
            remedy="build and run on an x86_64 machine",
        )
    if kind != "glibc" or _numbers(version) < OLDEST_GLIBC:
        return Finding(
            name="platform",
            state=State.WARNING,
            detail=f"{detail}: the tools' wheels are made for glibc 2.28 or newer",
            remedy="use a machine with a newer glibc, such as Debian 12",
        )
    return Finding(name="platform", state=State.OK, detail=detail)


def _kernel(facts: Facts) -> Finding:
    detail = f"Linux {facts.kernel}" + (f", in a container ({facts.container})" if facts.container else "")
    if _numbers(facts.kernel) < OLDEST_KERNEL:
        return Finding(
            name="kernel",
            state=State.MISSING,
            detail=f"{detail}: the unshare runner needs 5.12 (overlay in user namespaces, mount_setattr)",
            remedy="boot a newer kernel",
            needed_for=_sandbox_use(facts),
        )
    return Finding(name="kernel", state=State.OK, detail=detail, needed_for=_sandbox_use(facts))


def _sandbox_use(facts: Facts) -> str:
    """The assemble engine runs the base's Python in a sandbox, whatever runs its images."""
    return "run" if facts.engine == "assemble" else facts.use("unshare")


def _sandbox(facts: Facts) -> list[Finding]:
    """User namespaces and overlay, from one real attempt and the settings that explain its refusal."""
    refusal, use = facts.sandbox.refusal, _sandbox_use(facts)
    if not refusal:
        return [
            Finding(name="user namespaces", state=State.OK, detail="tried: allowed", needed_for=use),
            Finding(
                name="overlay", state=State.OK, detail="tried: works in a user namespace", needed_for=use
            ),
        ]
    reason, remedy = explain_refusal(facts)
    namespaces = "namespace" in refusal or "private-mounts" in refusal
    denied = Finding(
        name="user namespaces" if namespaces else "overlay",
        state=State.DENIED,
        detail=f"{refusal}; {reason}" if reason else refusal,
        remedy=remedy,
        needed_for=use,
    )
    if namespaces:
        return [denied]
    return [
        Finding(name="user namespaces", state=State.OK, detail="tried: allowed", needed_for=use),
        denied,
    ]


def explain_refusal(facts: Facts) -> tuple[str, str]:
    """(why, command) for a sandbox that this machine refused; the settings of Debian, Ubuntu and RHEL."""
    sysctls = dict(facts.sysctls)
    for name in ("user", "mnt", "pid", "net"):
        key = f"user/max_{name}_namespaces"
        if sysctls.get(key) == "0":
            dotted = key.replace("/", ".")
            return f"{dotted} is 0", f"sysctl -w {dotted}=15000"
    if facts.uid and sysctls.get("kernel/unprivileged_userns_clone") == "0":
        return "kernel.unprivileged_userns_clone is 0", "sysctl -w kernel.unprivileged_userns_clone=1"
    if facts.uid and sysctls.get("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts user namespaces (kernel.apparmor_restrict_unprivileged_userns is 1)",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        )
    if facts.seccomp or facts.container:
        where = facts.container or "a process with a seccomp filter"
        return (
            f"this is {where}, whose filter or covered /proc forbids it",
            "start the container with: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined",
        )
    if _numbers(facts.kernel) < OLDEST_KERNEL:
        return "the kernel is too old", "boot Linux 5.12 or newer"
    return "", "look at `dmesg` for what refused it"


def _programs(facts: Facts) -> list[Finding]:
    tools = dict(facts.tools)
    findings = []
    if "mmdebstrap" in tools:
        findings.append(Finding(name="mmdebstrap", state=State.OK, detail=tools["mmdebstrap"]))
    else:
        findings.append(
            Finding(
                name="mmdebstrap",
                state=State.MISSING,
                detail="bases are made with it",
                remedy="apt-get install mmdebstrap",
            )
        )
    if facts.keyrings:
        findings.append(Finding(name="debian keyring", state=State.OK, detail=facts.keyrings[0]))
    else:
        findings.append(
            Finding(
                name="debian keyring",
                state=State.MISSING,
                detail="packages of a base are trusted by it",
                remedy="apt-get install debian-archive-keyring",
            )
        )
    asked = facts.probe("debian mirror")
    if facts.debian_mirror or facts.apt_sources:
        where = (
            f"set to {redact(facts.debian_mirror)}"
            if facts.debian_mirror
            else f"as apt's: {', '.join(facts.apt_sources)}"
        )
        sources = Finding(
            name="debian mirror",
            state=State.DENIED if asked and asked.refusal else State.OK,
            detail=f"{where}; {asked.refusal or asked.found}" if asked else where,
            remedy=asked.remedy if asked else "",
        )
    else:
        sources = Finding(
            name="debian mirror",
            state=State.MISSING,
            detail="apt has no Debian sources here, and no mirror is set",
            remedy="set IMAGEFACTORY_DEBIAN_MIRROR, or debian-mirror in imagefactory.toml",
        )
    findings.append(sources)
    if "uv" in tools or "uv" in facts.modules:
        findings.append(Finding(name="uv", state=State.OK, detail=tools.get("uv", "Python package")))
    else:
        findings.append(
            Finding(
                name="uv",
                state=State.MISSING,
                detail="locks are solved with it",
                remedy="pip install 'imagefactory[build]'",
            )
        )
    lacking = [name for name in MODULES if name not in facts.modules and name != "uv"]
    if lacking:
        findings.append(
            Finding(
                name="build packages",
                state=State.MISSING,
                detail=f"not installed: {', '.join(lacking)}",
                remedy="pip install 'imagefactory[build]'",
            )
        )
    else:
        findings.append(
            Finding(
                name="build packages", state=State.OK, detail="the extra [build], with zstandard and isal"
            )
        )
    return findings


def _engines(facts: Facts) -> list[Finding]:
    """docker and apptainer: needed where the settings name them, else told as what one could use."""
    findings = []
    for name in ("docker", "apptainer"):
        probe, use = facts.probe(name), facts.use(name)
        if probe is None:
            continue
        if not probe.refusal:
            findings.append(Finding(name=name, state=State.OK, detail=probe.found, needed_for=use))
            continue
        needed = use in ("build", "run")
        findings.append(
            Finding(
                name=name,
                state=State.MISSING if needed else State.WARNING,
                detail=probe.refusal if needed else f"{probe.refusal} (only --engine {name} needs it)",
                remedy=probe.remedy,
                needed_for=use,
            )
        )
    return findings


def _conda(facts: Facts) -> list[Finding]:
    """What recipes of conda packages need; the others do without."""
    probe = facts.probe("conda")
    if probe is None:
        return []
    if not probe.refusal:
        return [Finding(name="conda", state=State.OK, detail=probe.found, needed_for="conda")]
    detail = f"{probe.refusal} (only recipes with `source: conda` need it)"
    return [
        Finding(name="conda", state=State.WARNING, detail=detail, remedy=probe.remedy, needed_for="conda")
    ]


def _network(facts: Facts) -> list[Finding]:
    """What builds and pushes reach; a registry only where one is set."""
    findings = []
    for name, use in (("package index", "build"), ("registry", "push")):
        probe = facts.probe(name)
        if probe is not None:
            findings.append(
                Finding(
                    name=name,
                    state=State.DENIED if probe.refusal else State.OK,
                    detail=probe.refusal or probe.found,
                    remedy=probe.remedy,
                    needed_for=use,
                )
            )
    return findings


def _subordinate_ids(facts: Facts) -> list[Finding]:
    """mmdebstrap as an ordinary user needs a range of ids of its own; running images does not."""
    if facts.uid == 0:
        return []
    if "newuidmap" not in dict(facts.tools):
        return [
            Finding(
                name="subordinate ids",
                state=State.MISSING,
                detail="newuidmap is not installed: bases cannot be made as an ordinary user",
                remedy="apt-get install uidmap",
            )
        ]
    if not (facts.subuid and facts.subgid):
        files = [
            name
            for name, there in (("/etc/subuid", facts.subuid), ("/etc/subgid", facts.subgid))
            if not there
        ]
        return [
            Finding(
                name="subordinate ids",
                state=State.MISSING,
                detail=f"no line for '{facts.user}' in {' and '.join(files)}",
                remedy=f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {facts.user}",
            )
        ]
    return [Finding(name="subordinate ids", state=State.OK, detail=f"for '{facts.user}', with newuidmap")]


def _disk(disk: Disk) -> Finding:
    needed = STORE_BYTES if disk.name == "store" else CACHE_BYTES
    detail = f"{disk.path} ({disk.origin}): {format_bytes(disk.free)} free"
    setting = f"set IMAGEFACTORY_{disk.name.upper()} to a folder elsewhere"
    if not disk.writable:
        return Finding(name=disk.name, state=State.DENIED, detail=f"{detail}, not writable", remedy=setting)
    if disk.free < needed:
        return Finding(
            name=disk.name,
            state=State.WARNING,
            detail=f"{detail}; one PyTorch with CUDA wants {format_bytes(needed)}",
            remedy=f"free space there (`imagefactory store gc`), or {setting}",
        )
    return Finding(name=disk.name, state=State.OK, detail=detail)


def _cores(facts: Facts) -> Finding:
    state = State.OK if facts.cores > 1 else State.WARNING
    return Finding(name="cores", state=state, detail=f"{facts.cores} for this process", needed_for="comfort")


def _gpus(facts: Facts) -> list[Finding]:
    count = count_gpus(Path(node) for node in facts.gpu_nodes)
    if not count:
        return [
            Finding(
                name="GPU",
                state=State.WARNING,
                detail="no NVIDIA GPU here: images can be built and smoke-tested, not verified",
                remedy="run it where `nvidia-smi` lists a GPU: `imagefactory run --gpus TARGET -- ...`",
                needed_for="gpu",
            )
        ]
    detail = f"{count} NVIDIA GPU{'s' if count > 1 else ''}, driver {facts.driver or 'of unknown version'}"
    if not any(name.startswith("libcuda.so") for name in facts.driver_libraries):
        return [
            Finding(
                name="GPU",
                state=State.MISSING,
                detail=f"{detail}; the dynamic linker knows no libcuda.so",
                remedy="install the driver's libraries (Debian: apt-get install libcuda1) and run ldconfig",
                needed_for="gpu",
            )
        ]
    names = {Path(node).name for node in facts.gpu_nodes}
    if not {"nvidiactl", "nvidia-uvm"} <= names:
        return [
            Finding(
                name="GPU",
                state=State.DENIED,
                detail=f"{detail}; /dev/nvidiactl or /dev/nvidia-uvm is missing",
                remedy="nvidia-modprobe -c 0 -u",
                needed_for="gpu",
            )
        ]
    return [Finding(name="GPU", state=State.OK, detail=detail, needed_for="gpu")]


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


# --- looking -------------------------------------------------------------------------------------


def gather(settings: Settings, *, environ: Mapping[str, str], root: Path = Path("/")) -> Facts:
    """The facts of this machine; `root` is where its files are found."""
    status = _fields((root / "proc/self/status").read_text())
    user = _user_name()
    nodes = find_device_nodes(root / "dev")
    version = root / "proc/driver/nvidia/version"
    return Facts(
        python=sys.version_info[:3],
        machine=platform.machine(),
        libc=platform.libc_ver(),
        kernel=platform.release(),
        uid=os.geteuid(),
        user=user,
        cores=len(os.sched_getaffinity(0)),
        capabilities=int(status.get("CapEff", "0"), 16),
        seccomp=int(status.get("Seccomp", "0")),
        container=_container(root, environ),
        sysctls=tuple(
            (name, path.read_text().strip())
            for name in SYSCTLS
            if (path := root / "proc/sys" / name).is_file()
        ),
        sandbox=try_sandbox(),
        tools=tuple(
            (name, found) for name in TOOLS if (found := shutil.which(name, path=environ.get("PATH")))
        ),
        modules=tuple(name for name in MODULES if importlib.util.find_spec(name)),
        keyrings=tuple(
            str(path)
            for folder in KEYRINGS
            for pattern in ("debian-archive-keyring.*", "debian-archive-*-stable.*")
            for path in sorted((root / folder).glob(pattern))
        ),
        apt_sources=read_apt_sources(root / "etc/apt"),
        debian_mirror=settings.debian_mirror.value,
        subuid=has_subordinate_ids(root / "etc/subuid", user),
        subgid=has_subordinate_ids(root / "etc/subgid", user),
        disks=(
            _look_at_disk("store", settings.store_path, settings.store.origin),
            _look_at_disk("cache", settings.cache_path, settings.cache.origin),
        ),
        gpu_nodes=tuple(map(str, nodes)),
        driver=parse_driver_version(version.read_text()) if version.is_file() else "",
        driver_libraries=_driver_libraries() if nodes else (),
        engine=settings.engine.value,
        runner=settings.runner.value or ENGINES[settings.engine.value].runner,
        probes=ask_all(settings, environ),
    )


def ask_all(settings: Settings, environ: Mapping[str, str]) -> tuple[Probe, ...]:
    """Asks engines, package index, Debian's archive and the registry, all at once: each may be slow."""
    questions: dict[str, Callable[[], str]] = {
        "docker": lambda: _ask_docker(settings, environ),
        "apptainer": lambda: _ask_apptainer(environ),
        "conda": lambda: _ask_conda(settings, environ),
        "package index": lambda: _ask_index(settings, environ),
        "debian mirror": lambda: _ask_mirror(settings, environ),
    }
    if settings.registry.value:
        questions["registry"] = lambda: _ask_registry(settings, environ)
    with ThreadPoolExecutor(len(questions)) as pool:
        return tuple(pool.map(lambda name: _ask(name, questions[name]), questions))


def _ask(name: str, question: Callable[[], str]) -> Probe:
    try:
        return Probe(name=name, found=question())
    except FactoryError as error:
        return Probe(name=name, refusal=error.message, remedy=error.hint)
    except ModuleNotFoundError as error:
        extra = name if name in ("docker", "apptainer") else "build"
        return Probe(
            name=name,
            refusal=f"{error.name} is not installed",
            remedy=f"pip install 'imagefactory[{extra}]'",
        )


def _index(settings: Settings, environ: Mapping[str, str]) -> PackageIndex:
    from imagefactory.lock.pypi.index import find_index, trusting

    found = find_index(settings.index, environ=environ, prefix=Path(sys.prefix))
    return trusting(found, settings.certificates_path)


def _ask_docker(settings: Settings, environ: Mapping[str, str]) -> str:
    from imagefactory.engines.docker import DockerEngine
    from imagefactory.engines.docker_daemon import DockerDaemon
    from imagefactory.engines.site import find_secrets
    from imagefactory.oci.layout import Layout

    engine = DockerEngine(
        Layout(settings.store_path),
        DockerDaemon(environ),
        codec=settings.codec.value,
        secrets=lambda _: find_secrets(_index(settings, environ), environ),
    )
    return engine.require()


def _ask_apptainer(environ: Mapping[str, str]) -> str:
    from imagefactory.engines.apptainer_command import ApptainerCommand

    return f"apptainer {ApptainerCommand(environ).require(building=True)}"


def _ask_conda(settings: Settings, environ: Mapping[str, str]) -> str:
    """What solves and links conda's packages. Channels are not asked: recipes say which."""
    from imagefactory.lock.conda.channels import find_channels

    try:
        found = f"py-rattler {importlib.metadata.version('py-rattler')}"
    except importlib.metadata.PackageNotFoundError:
        raise ToolError("py-rattler is not installed", hint="pip install 'imagefactory[conda]'") from None
    solver = settings.solver.value
    if solver != SOLVERS[0]:
        from imagefactory.lock.conda.own_tool import find_tool

        found += f", {find_tool(solver, environ).name()} solves"
    channels = find_channels(settings.channels.value, environ, "")
    elsewhere = ", ".join(f"{true} at {redact(asked)}" for true, asked in channels.mirrors)
    return found + (f"; {elsewhere}" if elsewhere else "")


def _ask_index(settings: Settings, environ: Mapping[str, str]) -> str:
    from imagefactory.lock.pypi.uv import UvLocker

    index = _index(settings, environ)
    patience = (("UV_HTTP_TIMEOUT", str(SECONDS)), ("UV_HTTP_RETRIES", "0"))
    impatient = replace(index, environment=(*index.environment, *patience))
    UvLocker(impatient, python=Path(sys.executable)).reach()
    return f"{redact(index.url)} ({index.origin}) answers" if index.url else f"{index.origin} answers"


def _ask_mirror(settings: Settings, environ: Mapping[str, str]) -> str:
    """Asks for what `lock` and a base's build begin with, by apt's own means."""
    from imagefactory.lock.debian.archive import reach
    from imagefactory.lock.debian.sources import find_mirror

    found = find_mirror(settings.debian_mirror.value, Path(), environ, etc_apt=Path("/etc/apt"))
    suites = _suites(settings)
    reach(replace(found, certificates=settings.certificates.value), suites, seconds=SECONDS)
    return f"{', '.join(suites)} found there"


def _suites(settings: Settings) -> tuple[str, ...]:
    """The suites of the factory's bases."""
    from imagefactory.recipes.read import read_bases

    try:
        bases = read_bases(settings.root_path / "recipes")
    except FactoryError:
        return ("stable",)  # a recipe's fault is not the machine's
    return tuple(dict.fromkeys(base.suite for base in bases if base.suite)) or ("stable",)


def _ask_registry(settings: Settings, environ: Mapping[str, str]) -> str:
    from imagefactory.oci.credentials import find_credentials
    from imagefactory.oci.mirrors import split_place
    from imagefactory.oci.registry.client import Registry
    from imagefactory.oci.registry.exchange import Patience, RegistryOptions

    host, _ = split_place(settings.registry.value)
    credentials = find_credentials(environ)
    options = RegistryOptions(
        credentials=credentials,
        certificates=Path(trusted) if (trusted := _index(settings, environ).certificates) else None,
        plain_hosts=settings.plain_hosts,
        patience=Patience(attempts=1, connect=SECONDS, read=SECONDS),
    )
    registry, known = Registry(host, options), credentials(host)
    try:
        registry.check()
    finally:
        registry.close()
    kept = f"with the credentials from {known.origin or 'a helper'}" if known else "without credentials"
    return f"{settings.registry.value} answers {kept}"


def try_sandbox() -> Attempt:
    """Makes a sandbox with everything but a command: what refuses it would refuse every run."""
    from imagefactory.verify.runners.unshare import attempt

    try:
        with tempfile.TemporaryDirectory(prefix="imagefactory-doctor-") as folder:
            attempt(Path(folder) / "run")
    except FactoryError as error:
        return Attempt(refusal=error.message)
    return Attempt(refusal="")


def read_apt_sources(folder: Path) -> tuple[str, ...]:
    """Suites that apt knows, from both formats of its sources; () if none."""
    suites: dict[str, None] = {}
    for path in (folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))):
        if not path.is_file() or path.suffix not in (".list", ".sources"):
            continue
        text = path.read_text(errors="replace")
        suites.update(
            dict.fromkeys(parse_sources_list(text) if path.suffix == ".list" else parse_deb822(text))
        )
    return tuple(suites)


def parse_sources_list(text: str) -> tuple[str, ...]:
    """Suites of one-line sources: `deb [options] address suite component...`."""
    lines = (re.match(r"^\s*deb\s+(?:\[[^\]]*\]\s+)?\S+\s+(\S+)", line) for line in text.splitlines())
    return tuple(match[1] for match in lines if match)


def parse_deb822(text: str) -> tuple[str, ...]:
    """Suites of sources in paragraphs; those with `Enabled: no` are left out."""
    suites: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = "\n".join(line for line in paragraph.splitlines() if not line.startswith("#"))
        fields = {
            key.lower(): value for key, value in re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", lines, re.MULTILINE)
        }
        if fields.get("enabled", "yes").strip().lower() != "no" and "deb" in fields.get("types", "").split():
            suites += fields.get("suites", "").split()
    return tuple(suites)


def has_subordinate_ids(path: Path, user: str) -> bool:
    """Whether /etc/subuid or /etc/subgid gives `user` a range of at least 65,536 ids."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return False
    fields = [line.split(":") for line in lines]
    return any(len(f) == 3 and f[0] == user and f[2].isdigit() and int(f[2]) >= 65536 for f in fields)


def _fields(text: str) -> dict[str, str]:
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _container(root: Path, environ: Mapping[str, str]) -> str:
    """The container this runs in, by the marks that docker, podman and systemd leave; "" if none."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    return environ.get("container", "")


def _look_at_disk(name: str, path: Path, origin: str) -> Disk:
    there = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=there):
            writable = True
    except OSError:
        writable = False
    return Disk(
        name=name, path=str(path), origin=origin, free=shutil.disk_usage(there).free, writable=writable
    )


def _driver_libraries() -> tuple[str, ...]:
    try:
        text = read_linker_cache()
    except (FactoryError, subprocess.SubprocessError):
        return ()
    return tuple(name for name, _ in parse_linker_cache(text, machine=platform.machine()))
