"""The values of the doctor: facts about a machine, and diagnoses."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from imagefactory.runtime.devices import AmdGpus
from imagefactory.runtime.limits import RunLimits

MODULES = ("uv", "isal", "zstandard", "installer", "jinja2", "requests", "tenacity", "rich")


class Health(StrEnum):
    OK = "ok"
    MISSING = "missing"
    DENIED = "denied"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the doctor's report. `remedy` is a command or a setting, empty if there is no problem.

    `needed_for` is `build`, `run`, `push`, `gpu` or `comfort`, or an engine or runner other than the
    configured one. If a part for `build` or `run` is missing or denied, the first command in the README
    fails.
    """

    name: str
    state: Health
    detail: str
    remedy: str = ""
    needed_for: str = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxAttempt:
    """The result of starting a sandbox: the error of the machine, or "".

    `cgroup` is the version of the control group that limited the sandbox, 0 if none did, for the reason
    `no_cgroup`.
    """

    refusal: str
    cgroup: int = 0
    no_cgroup: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The `answer` of a service, or else its error and a fix."""

    name: str
    answer: str = ""
    refusal: str = ""
    remedy: str = ""

    def judge(self, refused: Health, *, use: str, note: str = "") -> Diagnosis:
        """Return the diagnosis. If the service does not work, `refused` is its state and `note` a remark."""
        if self.refusal:
            return Diagnosis(self.name, refused, f"{self.refusal}{note}", self.remedy, use)
        return Diagnosis(self.name, Health.OK, self.answer, needed_for=use)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The free bytes in the file system of a directory, which may not exist yet."""

    name: str
    path: str
    origin: str
    free: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts about a machine. `sysctls` has only names that the kernel supports.

    `engine` and `runner` are the configured ones. `probes` are the results for engines and the network,
    `emulated` those for other platforms.
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
    sandbox: SandboxAttempt
    tools: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    keyrings: tuple[str, ...]
    apt_sources: tuple[str, ...]
    debian_mirror: str
    debian_snapshot: str
    subuid: bool
    subgid: bool
    disks: tuple[Disk, ...]
    gpu_nodes: tuple[str, ...]
    driver: str
    driver_libraries: tuple[str, ...]
    driver_glibc: tuple[int, ...] = (0,)
    lost_gpus: tuple[str, ...] = ()
    amd: AmdGpus | None = None
    engine: str = "assemble"
    runner: str = "unshare"
    probes: tuple[ProbeResult, ...] = ()
    limits: RunLimits = field(default_factory=RunLimits)
    landlock: bool = True
    emulated: tuple[ProbeResult, ...] = ()

    def probe(self, name: str) -> ProbeResult | None:
        return next((probe for probe in self.probes if probe.name == name), None)

    def use(self, name: str) -> str:
        """Return the purpose of an engine or runner here: `build`, `run`, or its name."""
        return "build" if name == self.engine else "run" if name == self.runner else name
