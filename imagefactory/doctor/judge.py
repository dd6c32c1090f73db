"""Diagnose a machine from its facts: can it build, run and verify images? Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from imagefactory.doctor.facts import MODULES, Diagnosis, Disk, Health, MachineFacts
from imagefactory.errors import extra_hint, redact
from imagefactory.gpu.capability import MACHINES
from imagefactory.progress import format_bytes
from imagefactory.runtime.devices import AmdGpus, count_gpus
from imagefactory.runtime.hardware import FLOOR_GLIBC, GLIBC_OF_BASES, newer_base
from imagefactory.runtime.limits import format_amount
from imagefactory.verify.outcome import clean

# --- Diagnoses of a machine's GPUs. Pure


def diagnose_gpus(facts: MachineFacts) -> list[Diagnosis]:
    """Return a line for the GPUs of each vendor, or one line if there are none."""
    amd = [_amd(facts.amd)] if facts.amd else []
    return amd if amd and not count_gpus(map(Path, facts.gpu_nodes)) else [_nvidia(facts), *amd]


def _amd(gpus: AmdGpus) -> Diagnosis:
    kinds = ", ".join(
        f"{gpus.processors.count(processor)} x {processor}" for processor in dict.fromkeys(gpus.processors)
    )
    driver = f"amdgpu {gpus.driver}" if gpus.driver else "the kernel's own amdgpu"
    detail = f"AMD: {kinds}, {driver}"
    if not any(path.endswith("/dri") for path in gpus.devices):
        remedy = "start this container with --device /dev/dri and --device /dev/kfd"
        return _line(Health.DENIED, f"{detail}; there is no /dev/dri", remedy)
    if gpus.refused:
        remedy = "add yourself to the groups that own them: usermod -aG render,video $USER"
        return _line(Health.DENIED, f"{detail}; you may not open {', '.join(gpus.refused)}", remedy)
    return _line(Health.OK, detail)


def _nvidia(facts: MachineFacts) -> Diagnosis:
    count = count_gpus(Path(node) for node in facts.gpu_nodes)
    if not count:
        detail = "no GPU here: images can be built and smoke-tested, not verified"
        remedy = "go where `nvidia-smi` or `rocminfo` lists one: `imagefactory run --gpus all TARGET -- ...`"
        return _line(Health.WARNING, detail, remedy)
    detail = f"{count} NVIDIA GPU{'s' if count > 1 else ''}, driver {facts.driver or 'of unknown version'}"
    if not any(name.startswith("libcuda.so") for name in facts.driver_libraries):
        remedy = "install the driver's libraries (Debian: apt-get install libcuda1) and run ldconfig"
        return _line(Health.MISSING, f"{detail}; the dynamic linker knows no libcuda.so", remedy)
    if not {"nvidiactl", "nvidia-uvm"} <= {Path(node).name for node in facts.gpu_nodes}:
        detail += "; /dev/nvidiactl or /dev/nvidia-uvm is missing"
        return _line(Health.DENIED, detail, "nvidia-modprobe -c 0 -u")
    if facts.lost_gpus:
        remedy = "nvidia-smi --gpu-reset -i INDEX, or restart the machine"
        detail += f"; cannot be used: {'; '.join(map(clean, facts.lost_gpus))}"
        return _line(Health.WARNING, detail, remedy)
    if facts.driver_glibc > FLOOR_GLIBC:
        detail += f"; its libraries need glibc {'.'.join(map(str, facts.driver_glibc))} in the image"
        if facts.driver_glibc > GLIBC_OF_BASES[0][1]:
            return _line(Health.WARNING, detail, f"use images on {newer_base(facts.driver_glibc)}")
    return _line(Health.OK, detail)


def _line(state: Health, detail: str, remedy: str = "") -> Diagnosis:
    return Diagnosis("GPU", state, detail, remedy, "gpu")


# --- Platforms whose programs this machine runs: its processor's own, and by emulation others. Pure


OLDEST_GLIBC = (2, 28)


def diagnose_processor(facts: MachineFacts) -> Iterator[Diagnosis]:
    kind, version = facts.libc
    detail = f"{facts.machine}, {kind or 'unknown C library'} {version}".rstrip()
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if facts.machine not in MACHINES.values():
        remedy = f"build and run on a machine of {' or '.join(MACHINES.values())}"
        yield Diagnosis("platform", Health.MISSING, f"{detail}: images are for {', '.join(MACHINES)}", remedy)
    elif kind != "glibc" or numbers < OLDEST_GLIBC:
        detail += ": the tools' wheels are made for glibc 2.28 or newer"
        yield Diagnosis(
            "platform", Health.WARNING, detail, "use a machine with a newer glibc, such as Debian 12"
        )
    else:
        yield Diagnosis("platform", Health.OK, detail)
    for probe in facts.emulated:
        note = f" (only images for {probe.name} need it)"
        yield probe.judge(Health.WARNING, use=probe.name, note=note)


OLDEST_PYTHON = (3, 11)
OLDEST_KERNEL = (5, 12)
# A PyTorch with CUDA: 2.8 GB of wheels in the cache; 2.5 GB of layers and 5 GB unpacked in the store.
CACHE_BYTES = 4_000_000_000
STORE_BYTES = 10_000_000_000


def can_build(findings: tuple[Diagnosis, ...]) -> bool:
    """Return whether no part that `build` and its smoke test need is missing or denied."""
    bad = (Health.MISSING, Health.DENIED)
    return not any(finding.state in bad and finding.needed_for in ("build", "run") for finding in findings)


def diagnose(facts: MachineFacts) -> tuple[Diagnosis, ...]:
    return (
        _python(facts),
        *diagnose_processor(facts),
        _kernel(facts),
        *_sandbox(facts),
        *_bounds(facts),
        *_programs(facts),
        *_subordinate_ids(facts),
        *_probes(facts),
        *(_disk(disk) for disk in facts.disks),
        _cores(facts),
        *diagnose_gpus(facts),
    )


def _python(facts: MachineFacts) -> Diagnosis:
    detail = f"Python {'.'.join(map(str, facts.python))}"
    if facts.python[:2] < OLDEST_PYTHON:
        remedy = "use Python 3.11 or newer (Debian 12: apt-get install python3)"
        return Diagnosis("python", Health.MISSING, f"{detail} is too old", remedy)
    return Diagnosis("python", Health.OK, detail)


def _kernel(facts: MachineFacts) -> Diagnosis:
    use = _sandbox_use(facts)
    detail = f"Linux {facts.kernel}" + (f", in a container ({facts.container})" if facts.container else "")
    if _numbers(facts.kernel) < OLDEST_KERNEL:
        detail += ": the unshare runner needs 5.12 (overlay in user namespaces, mount_setattr)"
        return Diagnosis("kernel", Health.MISSING, detail, "boot a newer kernel", use)
    return Diagnosis("kernel", Health.OK, detail, needed_for=use)


def _sandbox_use(facts: MachineFacts) -> str:
    """Return the purpose of the sandbox: the assemble engine runs the Python of the base in it."""
    return "run" if facts.engine == "assemble" else facts.use("unshare")


def _sandbox(facts: MachineFacts) -> list[Diagnosis]:
    """Diagnose user namespaces and overlays, by a real test and the kernel settings that explain an error."""
    refusal, use = facts.sandbox.refusal, _sandbox_use(facts)
    allowed = Diagnosis("user namespaces", Health.OK, "tested: allowed", needed_for=use)
    if not refusal:
        overlay = Diagnosis("overlay", Health.OK, "tested: works in a user namespace", needed_for=use)
        return [allowed, overlay]
    reason, remedy = explain_refusal(facts)
    detail = f"{refusal}; {reason}" if reason else refusal
    if "namespace" in refusal or "private-mounts" in refusal:
        return [Diagnosis("user namespaces", Health.DENIED, detail, remedy, use)]
    return [allowed, Diagnosis("overlay", Health.DENIED, detail, remedy, use)]


def _bounds(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Yield the limits of a run, and whether Landlock restricts a run to its programs."""
    names = ("processes", "memory", "files", "scratch")
    amounts = ", ".join(format_amount(name, getattr(facts.limits, name)) for name in names)
    use, version = _sandbox_use(facts), facts.sandbox.cgroup
    how = f"counted by the kernel: cgroup v{version}" if version else "a look ten times a second; rlimits"
    if facts.sandbox.no_cgroup:
        how += f"; no cgroup: {facts.sandbox.no_cgroup}"
    yield Diagnosis("limits", Health.OK, f"a run may take {amounts} ({how})", needed_for=use)
    if not facts.landlock:
        detail = "off: an image may start the host's Python by way of /proc/self/exe"
        remedy = "boot Linux 5.19 or newer with landlock in `lsm=`"
        yield Diagnosis("landlock", Health.WARNING, detail, remedy, use)


def explain_refusal(facts: MachineFacts) -> tuple[str, str]:
    """Return the reason for a failed sandbox and a command.

    It knows the settings of Debian, Ubuntu and RHEL.
    """
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
        context = facts.container or "a process with a seccomp filter"
        return (
            f"this is {context}, whose filter or covered /proc forbids it",
            "start the container with: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined",
        )
    if _numbers(facts.kernel) < OLDEST_KERNEL:
        return "the kernel is too old", "boot Linux 5.12 or newer"
    return "", "read the reason in `dmesg`"


def _programs(facts: MachineFacts) -> list[Diagnosis]:
    """Return a line for each program and package that a build needs."""
    tools = dict(facts.tools)
    uv = tools.get("uv", "Python package" if "uv" in facts.modules else "")
    lacking = ", ".join(name for name in MODULES if name not in facts.modules and name != "uv")
    packages = "" if lacking else "the extra [build], with zstandard and isal"
    keyring = "".join(facts.keyrings[:1])
    apt, extra = "apt-get install", extra_hint("build")
    rows = (
        ("mmdebstrap", tools.get("mmdebstrap"), "bases are made with it", f"{apt} mmdebstrap"),
        ("debian keyring", keyring, "packages of a base are trusted by it", f"{apt} debian-archive-keyring"),
        ("uv", uv, "locks are solved with it", extra),
        ("build packages", packages, f"not installed: {lacking}", extra),
    )
    lines = [
        Diagnosis(name, Health.OK, path) if path else Diagnosis(name, Health.MISSING, missing, remedy)
        for name, path, missing, remedy in rows
    ]
    return [*lines[:2], _mirror(facts), _snapshot(facts), *lines[2:]]


def _mirror(facts: MachineFacts) -> Diagnosis:
    name, probe = "debian mirror", facts.probe("debian mirror")
    if facts.debian_mirror:
        context = f"set to {redact(facts.debian_mirror)}"
    elif facts.apt_sources:
        context = f"as apt's: {', '.join(facts.apt_sources)}"
    else:
        remedy = "set IMAGEFACTORY_DEBIAN_MIRROR, or debian-mirror in imagefactory.toml"
        return Diagnosis(name, Health.MISSING, "apt has no Debian sources here, and no mirror is set", remedy)
    if probe is None:
        return Diagnosis(name, Health.OK, context)
    line = probe.judge(Health.DENIED, use="build")
    return replace(line, detail=f"{context}; {line.detail}")


def _snapshot(facts: MachineFacts) -> Diagnosis:
    name = "debian snapshot"
    if facts.debian_snapshot:
        return Diagnosis(name, Health.OK, f"{redact(facts.debian_snapshot)} has what the mirror drops")
    detail = "not set: a base whose packages the mirror drops gets newer ones, and another digest"
    remedy = "set debian-snapshot to the address of Debian's snapshot service, or a copy of it"
    return Diagnosis(name, Health.WARNING, detail, remedy, needed_for="comfort")


def _probes(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Yield the tested services: configured engines, conda, the index, and a registry if one is set."""
    rows = [
        ("conda", "conda", Health.WARNING, " (only recipes with `source: conda` need it)"),
        ("package index", "build", Health.DENIED, ""),
        ("registry", "push", Health.DENIED, ""),
    ]
    for name in ("apptainer", "docker", "podman"):
        use = facts.use(name)
        needed = use in ("build", "run")
        if name == "podman" and not needed:
            continue
        note = "" if needed else f" (only --engine {name} needs it)"
        rows.insert(0, (name, use, Health.MISSING if needed else Health.WARNING, note))
    for name, use, refused, note in rows:
        if probe := facts.probe(name):
            yield probe.judge(refused, use=use, note=note)


def _subordinate_ids(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Yield the diagnosis of the id ranges that mmdebstrap needs for an ordinary user."""
    if facts.uid == 0:
        return
    name, user = "subordinate ids", facts.user
    files = [file for file in ("subuid", "subgid") if not getattr(facts, file)]
    if "newuidmap" not in dict(facts.tools):
        detail = "newuidmap is not installed: bases cannot be made as an ordinary user"
        yield Diagnosis(name, Health.MISSING, detail, "apt-get install uidmap")
    elif files:
        detail = f"no line for '{user}' in {' and '.join(f'/etc/{file}' for file in files)}"
        remedy = f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
        yield Diagnosis(name, Health.MISSING, detail, remedy)
    else:
        yield Diagnosis(name, Health.OK, f"for '{user}', with newuidmap")


def _disk(disk: Disk) -> Diagnosis:
    needed = STORE_BYTES if disk.name == "store" else CACHE_BYTES
    detail = f"{disk.path} ({disk.origin}): {format_bytes(disk.free)} free"
    setting = f"set IMAGEFACTORY_{disk.name.upper()} to another directory"
    if not disk.writable:
        return Diagnosis(disk.name, Health.DENIED, f"{detail}, not writable", setting)
    if disk.free < needed:
        detail += f"; one PyTorch with CUDA wants {format_bytes(needed)}"
        remedy = f"free space there (`imagefactory image prune`), or {setting}"
        return Diagnosis(disk.name, Health.WARNING, detail, remedy)
    return Diagnosis(disk.name, Health.OK, detail)


def _cores(facts: MachineFacts) -> Diagnosis:
    state = Health.OK if facts.cores > 1 else Health.WARNING
    return Diagnosis("cores", state, f"{facts.cores} for this process", needed_for="comfort")


def _numbers(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
