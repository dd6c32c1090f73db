"""What the facts of a machine mean for building, running and verifying images, and what mends it. Pure."""

from __future__ import annotations

import re

from imagefactory.doctor.facts import MODULES, Diagnosis, Disk, Health, MachineFacts
from imagefactory.doctor.gpus import judge_gpus
from imagefactory.doctor.processor import judge_processor
from imagefactory.errors import extra_hint
from imagefactory.progress import format_bytes
from imagefactory.runners.limits import format_amount
from imagefactory.web import redact

OLDEST_PYTHON = (3, 11)
OLDEST_KERNEL = (5, 12)
# A PyTorch with CUDA: 2.8 GB of wheels in the cache; 2.5 GB of layers and 5 GB unpacked in the store.
CACHE_BYTES = 4_000_000_000
STORE_BYTES = 10_000_000_000


def can_build(findings: tuple[Diagnosis, ...]) -> bool:
    """False when something that `build` needs (its smoke test included) is missing or denied."""
    bad = (Health.MISSING, Health.DENIED)
    return not any(finding.state in bad and finding.needed_for in ("build", "run") for finding in findings)


def decide(facts: MachineFacts) -> tuple[Diagnosis, ...]:
    return (
        _python(facts),
        *judge_processor(facts),
        _kernel(facts),
        *_sandbox(facts),
        *_bounds(facts),
        *_programs(facts),
        *_subordinate_ids(facts),
        *_engines(facts),
        *_conda(facts),
        *_network(facts),
        *(_disk(disk) for disk in facts.disks),
        _cores(facts),
        *judge_gpus(facts),
    )


def _python(facts: MachineFacts) -> Diagnosis:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST_PYTHON:
        return Diagnosis(
            name="python",
            state=Health.MISSING,
            detail=f"Python {version} is too old",
            remedy="use Python 3.11 or newer (Debian 12: apt-get install python3)",
        )
    return Diagnosis(name="python", state=Health.OK, detail=f"Python {version}")


def _kernel(facts: MachineFacts) -> Diagnosis:
    detail = f"Linux {facts.kernel}" + (f", in a container ({facts.container})" if facts.container else "")
    if _numbers(facts.kernel) < OLDEST_KERNEL:
        return Diagnosis(
            name="kernel",
            state=Health.MISSING,
            detail=f"{detail}: the unshare runner needs 5.12 (overlay in user namespaces, mount_setattr)",
            remedy="boot a newer kernel",
            needed_for=_sandbox_use(facts),
        )
    return Diagnosis(name="kernel", state=Health.OK, detail=detail, needed_for=_sandbox_use(facts))


def _sandbox_use(facts: MachineFacts) -> str:
    """The assemble engine runs the base's Python in a sandbox, whatever runs its images."""
    return "run" if facts.engine == "assemble" else facts.use("unshare")


def _sandbox(facts: MachineFacts) -> list[Diagnosis]:
    """User namespaces and overlay, from one real attempt and the settings that explain its refusal."""
    refusal, use = facts.sandbox.refusal, _sandbox_use(facts)
    if not refusal:
        return [
            Diagnosis(name="user namespaces", state=Health.OK, detail="tried: allowed", needed_for=use),
            Diagnosis(
                name="overlay", state=Health.OK, detail="tried: works in a user namespace", needed_for=use
            ),
        ]
    reason, remedy = explain_refusal(facts)
    namespaces = "namespace" in refusal or "private-mounts" in refusal
    denied = Diagnosis(
        name="user namespaces" if namespaces else "overlay",
        state=Health.DENIED,
        detail=f"{refusal}; {reason}" if reason else refusal,
        remedy=remedy,
        needed_for=use,
    )
    if namespaces:
        return [denied]
    return [
        Diagnosis(name="user namespaces", state=Health.OK, detail="tried: allowed", needed_for=use),
        denied,
    ]


def _bounds(facts: MachineFacts) -> list[Diagnosis]:
    """What a run may take here, and whether Landlock keeps it to its own programs."""
    names = ("processes", "memory", "files", "scratch")
    amounts = ", ".join(format_amount(name, getattr(facts.limits, name)) for name in names)
    use, version = _sandbox_use(facts), facts.sandbox.cgroup
    how = f"counted by the kernel: cgroup v{version}" if version else "a look ten times a second; rlimits"
    if facts.sandbox.no_cgroup:
        how += f"; no cgroup: {facts.sandbox.no_cgroup}"
    findings = [
        Diagnosis(
            name="limits",
            state=Health.OK,
            detail=f"a run may take {amounts} ({how})",
            needed_for=use,
        )
    ]
    if not facts.landlock:
        findings.append(
            Diagnosis(
                name="landlock",
                state=Health.WARNING,
                detail="off: an image may start the host's Python by way of /proc/self/exe",
                remedy="boot Linux 5.19 or newer with landlock in `lsm=`",
                needed_for=use,
            )
        )
    return findings


def explain_refusal(facts: MachineFacts) -> tuple[str, str]:
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


def _programs(facts: MachineFacts) -> list[Diagnosis]:
    tools = dict(facts.tools)
    findings = []
    if "mmdebstrap" in tools:
        findings.append(Diagnosis(name="mmdebstrap", state=Health.OK, detail=tools["mmdebstrap"]))
    else:
        findings.append(
            Diagnosis(
                name="mmdebstrap",
                state=Health.MISSING,
                detail="bases are made with it",
                remedy="apt-get install mmdebstrap",
            )
        )
    if facts.keyrings:
        findings.append(Diagnosis(name="debian keyring", state=Health.OK, detail=facts.keyrings[0]))
    else:
        findings.append(
            Diagnosis(
                name="debian keyring",
                state=Health.MISSING,
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
        sources = Diagnosis(
            name="debian mirror",
            state=Health.DENIED if asked and asked.refusal else Health.OK,
            detail=f"{where}; {asked.refusal or asked.found}" if asked else where,
            remedy=asked.remedy if asked else "",
        )
    else:
        sources = Diagnosis(
            name="debian mirror",
            state=Health.MISSING,
            detail="apt has no Debian sources here, and no mirror is set",
            remedy="set IMAGEFACTORY_DEBIAN_MIRROR, or debian-mirror in imagefactory.toml",
        )
    findings.append(sources)
    if "uv" in tools or "uv" in facts.modules:
        findings.append(Diagnosis(name="uv", state=Health.OK, detail=tools.get("uv", "Python package")))
    else:
        findings.append(
            Diagnosis(
                name="uv", state=Health.MISSING, detail="locks are solved with it", remedy=extra_hint("build")
            )
        )
    lacking = [name for name in MODULES if name not in facts.modules and name != "uv"]
    if lacking:
        findings.append(
            Diagnosis(
                name="build packages",
                state=Health.MISSING,
                detail=f"not installed: {', '.join(lacking)}",
                remedy=extra_hint("build"),
            )
        )
    else:
        findings.append(
            Diagnosis(
                name="build packages", state=Health.OK, detail="the extra [build], with zstandard and isal"
            )
        )
    return findings


def _engines(facts: MachineFacts) -> list[Diagnosis]:
    """docker and apptainer: needed where the settings name them, else told as what one could use."""
    findings = []
    for name in ("docker", "apptainer"):
        probe, use = facts.probe(name), facts.use(name)
        if probe is None:
            continue
        if not probe.refusal:
            findings.append(Diagnosis(name=name, state=Health.OK, detail=probe.found, needed_for=use))
            continue
        needed = use in ("build", "run")
        findings.append(
            Diagnosis(
                name=name,
                state=Health.MISSING if needed else Health.WARNING,
                detail=probe.refusal if needed else f"{probe.refusal} (only --engine {name} needs it)",
                remedy=probe.remedy,
                needed_for=use,
            )
        )
    return findings


def _conda(facts: MachineFacts) -> list[Diagnosis]:
    """What recipes of conda packages need; the others do without."""
    probe = facts.probe("conda")
    if probe is None:
        return []
    if not probe.refusal:
        return [Diagnosis(name="conda", state=Health.OK, detail=probe.found, needed_for="conda")]
    detail = f"{probe.refusal} (only recipes with `source: conda` need it)"
    return [
        Diagnosis(name="conda", state=Health.WARNING, detail=detail, remedy=probe.remedy, needed_for="conda")
    ]


def _network(facts: MachineFacts) -> list[Diagnosis]:
    """What builds and pushes reach; a registry only where one is set."""
    findings = []
    for name, use in (("package index", "build"), ("registry", "push")):
        probe = facts.probe(name)
        if probe is not None:
            findings.append(
                Diagnosis(
                    name=name,
                    state=Health.DENIED if probe.refusal else Health.OK,
                    detail=probe.refusal or probe.found,
                    remedy=probe.remedy,
                    needed_for=use,
                )
            )
    return findings


def _subordinate_ids(facts: MachineFacts) -> list[Diagnosis]:
    """mmdebstrap as an ordinary user needs a range of ids of its own; running images does not."""
    if facts.uid == 0:
        return []
    if "newuidmap" not in dict(facts.tools):
        return [
            Diagnosis(
                name="subordinate ids",
                state=Health.MISSING,
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
            Diagnosis(
                name="subordinate ids",
                state=Health.MISSING,
                detail=f"no line for '{facts.user}' in {' and '.join(files)}",
                remedy=f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {facts.user}",
            )
        ]
    return [Diagnosis(name="subordinate ids", state=Health.OK, detail=f"for '{facts.user}', with newuidmap")]


def _disk(disk: Disk) -> Diagnosis:
    needed = STORE_BYTES if disk.name == "store" else CACHE_BYTES
    detail = f"{disk.path} ({disk.origin}): {format_bytes(disk.free)} free"
    setting = f"set IMAGEFACTORY_{disk.name.upper()} to a folder elsewhere"
    if not disk.writable:
        return Diagnosis(
            name=disk.name, state=Health.DENIED, detail=f"{detail}, not writable", remedy=setting
        )
    if disk.free < needed:
        return Diagnosis(
            name=disk.name,
            state=Health.WARNING,
            detail=f"{detail}; one PyTorch with CUDA wants {format_bytes(needed)}",
            remedy=f"free space there (`imagefactory store gc`), or {setting}",
        )
    return Diagnosis(name=disk.name, state=Health.OK, detail=detail)


def _cores(facts: MachineFacts) -> Diagnosis:
    state = Health.OK if facts.cores > 1 else Health.WARNING
    return Diagnosis(
        name="cores", state=state, detail=f"{facts.cores} for this process", needed_for="comfort"
    )


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
