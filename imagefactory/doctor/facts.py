"""The values of the doctor: the facts of a machine, and the diagnoses."""

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
    """One line of the doctor's report. `remedy` is a command or a setting, empty if all is well.

    `needed_for` is `build`, `run`, `push`, `gpu` or `comfort`, or an engine or runner that is not the
    configured one. If something for `build` or `run` is missing or denied, the README's first command fails.
    """

    name: str
    state: Health
    detail: str
    remedy: str = ""
    needed_for: str = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxAttempt:
    """The attempt to start a sandbox: the machine's refusal, else an empty string.

    `cgroup` is the version of the control group that counted it, or 0 and the reason in `no_cgroup`.
    """

    refusal: str
    cgroup: int = 0
    no_cgroup: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The `answer` of a service, else its refusal and a remedy."""

    name: str
    answer: str = ""
    refusal: str = ""
    remedy: str = ""

    def judge(self, refused: Health, *, use: str, note: str = "") -> Diagnosis:
        """Return its line: `refused` and `note` are the state and a remark for one that does not work."""
        if self.refusal:
            return Diagnosis(self.name, refused, f"{self.refusal}{note}", self.remedy, use)
        return Diagnosis(self.name, Health.OK, self.answer, needed_for=use)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Free bytes of the file system of a directory, which may not exist yet."""

    name: str
    path: str
    origin: str
    free: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The result of `gather_machine_facts`. `sysctls` lacks the names that this kernel does not have.

    `engine` and `runner` are those that a build here uses; `probes` are of engines and of the network, and
    `emulated` of other platforms.
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
    subuid: bool
    subgid: bool
    disks: tuple[Disk, ...]
    gpu_nodes: tuple[str, ...]
    driver: str
    driver_libraries: tuple[str, ...]
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
        """Return what an engine or runner is needed for here: `build`, `run`, or only itself."""
        return "build" if name == self.engine else "run" if name == self.runner else name
