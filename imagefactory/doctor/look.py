"""The facts of this machine: its files and programs, and a real test of a sandbox."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import pwd
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from imagefactory.access import Access, conda_channels, debian_mirror, open_registry, package_index, uv_locker
from imagefactory.build.docker import DockerEngine
from imagefactory.build.secrets import find_secrets
from imagefactory.doctor.facts import MODULES, Diagnosis, Disk, MachineFacts, ProbeResult, SandboxAttempt
from imagefactory.doctor.judge import diagnose
from imagefactory.errors import ImagefactoryError, ToolError, extra_hint, redact
from imagefactory.gpu.capability import PLATFORMS, architecture, this_platform
from imagefactory.http import RetryPolicy
from imagefactory.lock.conda.own_tool import find_tool
from imagefactory.lock.debian.archive import (
    AptSource,
    choose_archives,
    find_snapshot,
    reach,
    read_sources,
)
from imagefactory.oci.credentials import find_credentials
from imagefactory.oci.store import split_place
from imagefactory.progress import QUIET
from imagefactory.recipes.read import read_bases
from imagefactory.runtime.apptainer_command import ApptainerCommand
from imagefactory.runtime.devices import (
    find_amd_gpus,
    find_device_nodes,
)
from imagefactory.runtime.docker_daemon import DockerDaemon
from imagefactory.runtime.emulator import find_emulator
from imagefactory.runtime.hardware import (
    UNUSABLE,
    LostGpu,
    NoGpu,
    Places,
    driver_libraries,
    lost_gpus,
    newest_need,
    read_driver,
    read_hardware,
)
from imagefactory.runtime.limits import RunLimits, decide_limits, read_capacity
from imagefactory.runtime.podman import PodmanRunner
from imagefactory.runtime.sandbox.syscalls import has_landlock
from imagefactory.runtime.unshare import attempt
from imagefactory.settings.choices import ENGINES, SOLVERS
from imagefactory.settings.load import Settings

# --- Tests of the services that a build or push needs: engines, package index, Debian's archive, registry


SECONDS = 10
"""The time limit in seconds for one network service."""


def check_services(access: Access, names: Collection[str] | None = None) -> tuple[ProbeResult, ...]:
    """Test engines, the package index, the Debian archive and the registry in parallel.

    `names` selects some.
    """
    questions: dict[str, Callable[[Access], str]] = {
        "docker": _check_docker,
        "apptainer": _check_apptainer,
        "podman": _check_podman,
        "conda": _check_conda,
        "package index": _check_index,
        "debian mirror": _check_mirror,
    }
    if access.settings.registry.value:
        questions["registry"] = _check_registry
    selected = [name for name in questions if names is None or name in names]
    with ThreadPoolExecutor(len(questions)) as pool:
        return tuple(pool.map(lambda name: _check_service(name, lambda: questions[name](access)), selected))


def _check_service(name: str, question: Callable[[], str]) -> ProbeResult:
    try:
        return ProbeResult(name=name, answer=question())
    except ImagefactoryError as error:
        return ProbeResult(name=name, refusal=error.message, remedy=error.hint)
    except ModuleNotFoundError as error:
        extra = name if name in ("docker", "apptainer") else "build"
        return ProbeResult(
            name=name,
            refusal=f"{error.name} is not installed",
            remedy=extra_hint(extra),
        )


def _check_docker(access: Access) -> str:
    engine = DockerEngine(
        access.layout,
        DockerDaemon(access.environ),
        codec=access.settings.codec.value,
        secrets=lambda _: find_secrets(package_index(access), access.environ),
    )
    return engine.require()


def _check_podman(access: Access) -> str:
    return PodmanRunner(access.layout, access.environ, QUIET).require()


def _check_apptainer(access: Access) -> str:
    return f"apptainer {ApptainerCommand(access.environ).require(building=True)}"


def _check_conda(access: Access) -> str:
    """Return the program that solves and links conda packages.

    Channels are not queried, since recipes name them.
    """
    try:
        tools = f"py-rattler {importlib.metadata.version('py-rattler')}"
    except importlib.metadata.PackageNotFoundError:
        raise ToolError(
            "extra-not-installed", "py-rattler is not installed", hint=extra_hint("conda")
        ) from None
    solver = access.settings.solver.value
    if solver != SOLVERS[0]:
        tools += f", {find_tool(solver, access.environ).name()} solves"
    mirrors = conda_channels(access).mirrors
    elsewhere = ", ".join(f"{true} at {redact(mirror)}" for true, mirror in mirrors)
    return tools + (f"; {elsewhere}" if elsewhere else "")


def _check_index(access: Access) -> str:
    index = package_index(access)
    variables = (("UV_HTTP_TIMEOUT", str(SECONDS)), ("UV_HTTP_RETRIES", "0"))
    hurried = replace(index, environment=(*index.environment, *variables))
    locker = uv_locker(hurried)
    locker.reach()
    attests = "" if locker.attests() else ", without publishers of wheels"
    address = f"{redact(index.url)} ({index.origin})" if index.url else index.origin
    return f"{address} answers{attests}"


def _check_mirror(access: Access) -> str:
    """Check that apt can download the files that `lock` and a base build read first."""
    suites = _suites(access.settings)
    reach(debian_mirror(access), suites, seconds=SECONDS)
    return f"{', '.join(suites)} found there"


def _suites(settings: Settings) -> tuple[str, ...]:
    """Return the Debian suites of the project's bases."""
    try:
        bases = read_bases(settings.root_path / "recipes")
    except ImagefactoryError:
        return ("stable",)  # an error in a recipe is not the machine's fault
    return tuple(dict.fromkeys(base.suite for base in bases if base.suite)) or ("stable",)


def _check_registry(access: Access) -> str:
    place = access.settings.registry.value
    retry_policy = RetryPolicy(attempts=1, connect=SECONDS, read=SECONDS)
    host = split_place(place)[0]
    registry, known = (
        open_registry(access, host, retry_policy=retry_policy),
        find_credentials(access.environ)(host),
    )
    try:
        registry.check()
    finally:
        registry.close()
    login = f"with the credentials from {known.origin or 'a helper'}" if known else "without credentials"
    return f"{place} answers {login}"


SYSCTLS = (
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
    "user/max_user_namespaces",
    "user/max_mnt_namespaces",
    "user/max_pid_namespaces",
    "user/max_net_namespaces",
)
TOOLS = ("mmdebstrap", "newuidmap", "uv", "apt-get")


KEYRINGS = ("usr/share/keyrings", "etc/apt/trusted.gpg.d", "etc/apt/keyrings")


def examine_machine(
    settings: Settings, *, environ: Mapping[str, str], services: Collection[str] | None = None
) -> tuple[Diagnosis, ...]:
    """Examine this machine. It starts a real sandbox in a child process and a temporary directory.

    If `services` is set, only these engines and network services are tested.
    """
    return diagnose(gather_machine_facts(settings, environ=environ, services=services))


def gather_machine_facts(
    settings: Settings,
    *,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    services: Collection[str] | None = None,
) -> MachineFacts:
    """Return the facts of this machine. `root` replaces / in paths of its files."""
    status = _fields((root / "proc/self/status").read_text())
    user = _user_name()
    nodes = find_device_nodes(root / "dev")
    libraries = driver_libraries() if nodes else []
    limits = decide_limits({}, read_capacity(settings.store_path))
    sources = read_sources(root / "etc/apt")
    return MachineFacts(
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
        sandbox=try_sandbox(limits),
        tools=tuple(
            (name, program) for name in TOOLS if (program := shutil.which(name, path=environ.get("PATH")))
        ),
        modules=tuple(name for name in MODULES if importlib.util.find_spec(name)),
        keyrings=tuple(
            str(path)
            for directory in KEYRINGS
            for pattern in ("debian-archive-keyring.*", "debian-archive-*-stable.*")
            for path in sorted((root / directory).glob(pattern))
        ),
        apt_sources=tuple(dict.fromkeys(source.suite for source in sources)),
        debian_mirror=settings.debian_mirror.value,
        debian_snapshot=find_snapshot(
            settings.debian_snapshot.value, _main_archive(settings, sources), environ
        ),
        subuid=has_subordinate_ids(root / "etc/subuid", user),
        subgid=has_subordinate_ids(root / "etc/subgid", user),
        disks=(
            _read_disk("store", settings.store_path, settings.store.origin),
            _read_disk("cache", settings.cache_path, settings.cache.origin),
        ),
        gpu_nodes=tuple(map(str, nodes)),
        driver=read_driver(str(root / "proc")),
        driver_libraries=tuple(Path(path).name for path in libraries),
        driver_glibc=newest_need(libraries).version,
        lost_gpus=find_unusable_gpus(Places(dev=str(root / "dev"), proc=str(root / "proc"))) if nodes else (),
        amd=find_amd_gpus(dev=root / "dev", sys=root / "sys"),
        engine=settings.engine.value,
        runner=settings.runner.value or ENGINES[settings.engine.value].runner,
        probes=check_services(Access(settings=settings, environ=environ), services),
        limits=limits,
        landlock=has_landlock(),
        emulated=tuple(try_emulated()),
    )


def try_sandbox(limits: RunLimits) -> SandboxAttempt:
    """Start a sandbox without a command. An error in it would occur in every run."""
    try:
        with tempfile.TemporaryDirectory(prefix="imagefactory-doctor-") as directory:
            version, reason = attempt(Path(directory) / "run", limits=limits)
    except ImagefactoryError as error:
        return SandboxAttempt(refusal=error.message)
    return SandboxAttempt(refusal="", cgroup=version, no_cgroup=reason)


def try_emulated() -> Iterator[ProbeResult]:
    """Test whether the sandbox can run programs of other platforms."""
    for name in (name for name in PLATFORMS if name != this_platform()):
        try:
            emulator = find_emulator(architecture(name))
            with tempfile.TemporaryDirectory(prefix="imagefactory-doctor-") as directory:
                attempt(Path(directory) / "run", emulator=emulator)
        except ImagefactoryError as error:
            yield ProbeResult(name=name, refusal=error.message, remedy=error.hint)
        else:
            how = "brought by the sandbox" if emulator and emulator.own else "registered on this machine"
            yield ProbeResult(
                name=name, answer=f"emulated, slowly: {emulator.program if emulator else ''}, {how}"
            )


def has_subordinate_ids(path: Path, user: str) -> bool:
    """Return whether /etc/subuid or /etc/subgid assigns `user` a range of at least 65,536 ids."""
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
    """Return the type of container in which this process runs, by the files of docker, podman and systemd;
    else "".
    """
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    return environ.get("container", "")


def _read_disk(name: str, path: Path, origin: str) -> Disk:
    there = next((directory for directory in (path, *path.parents) if directory.is_dir()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=there):
            writable = True
    except OSError:
        writable = False
    return Disk(
        name=name, path=str(path), origin=origin, free=shutil.disk_usage(there).free, writable=writable
    )


def find_unusable_gpus(places: Places) -> tuple[str, ...]:
    """Return the NVIDIA GPUs that the driver cannot use, and why."""
    try:
        notes = read_hardware(places)["notes"]
    except LostGpu as error:
        return (str(error).removeprefix(UNUSABLE),)
    except NoGpu:
        return ()  # the driver's own lines report it
    return tuple(f"GPU {index}: {reason}" for index, reason in lost_gpus(notes).items())


def _main_archive(settings: Settings, sources: Sequence[AptSource]) -> str:
    """Return the address of Debian's archive, empty for none."""
    try:
        return choose_archives(settings.debian_mirror.value, sources)[0]
    except ToolError:  # the row of the mirror says it
        return ""
