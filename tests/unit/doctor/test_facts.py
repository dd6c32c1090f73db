"""The doctor's judgement over facts of machines that are not at hand, and a look at this one."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.access import Access
from imagefactory.doctor import look
from imagefactory.doctor.facts import (
    MODULES,
    Diagnosis,
    Disk,
    Health,
    MachineFacts,
    ProbeResult,
    SandboxAttempt,
)
from imagefactory.doctor.judge import can_build, diagnose, explain_refusal
from imagefactory.doctor.look import (
    _check_conda,
    examine_machine,
    find_unusable_gpus,
    gather_machine_facts,
    has_subordinate_ids,
)
from imagefactory.errors import ToolError
from imagefactory.runtime.devices import AmdGpus
from imagefactory.settings.load import load_settings
from tests.services.gpu_host import Told, make_host

REACHED = {"package index", "debian mirror", "registry", "docker"}
REFUSED = SandboxAttempt(
    refusal="this machine refuses user namespaces (user-namespace: Operation not permitted)"
)
HEALTHY = MachineFacts(
    python=(3, 11, 2), machine="x86_64", libc=("glibc", "2.36"), kernel="6.1.0-25-amd64", uid=0, user="root",
    cores=8, capabilities=(1 << 41) - 1, seccomp=0, container="",
    sysctls=(("user/max_user_namespaces", "15000"),),
    sandbox=SandboxAttempt(refusal=""), tools=(("mmdebstrap", "/usr/bin/mmdebstrap"), ("uv", "/usr/bin/uv")),
    modules=MODULES, keyrings=("/usr/share/keyrings/debian-archive-keyring.gpg",), apt_sources=("bookworm",),
    debian_mirror="", debian_snapshot="https://snapshots.example.org", subuid=False, subgid=False,
    disks=(
        Disk(name="store", path="/s", origin="default", free=100_000_000_000, writable=True),
        Disk(name="cache", path="/c", origin="$IMAGEFACTORY_CACHE", free=100_000_000_000, writable=True),
    ),
    gpu_nodes=("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"), driver="550.90.07",
    driver_libraries=("libcuda.so.1",),
    probes=(
        ProbeResult(name="docker", answer="docker 26.1.5, buildx 0.13.1"),
        ProbeResult(name="apptainer", answer="apptainer 1.4.5"),
        ProbeResult(name="conda", answer="py-rattler 0.28.0"),
        ProbeResult(name="package index", answer="uv's default answers"),
        ProbeResult(name="debian mirror", answer="bookworm found there"),
        ProbeResult(name="registry", answer="registry.example.org answers without credentials"),
    ),
)  # fmt: skip


def refusing(*names: str, **changes: object) -> MachineFacts:
    """HEALTHY where these probes were refused."""
    probes = tuple(
        replace(probe, answer="", refusal="no answer", remedy="mend it") if probe.name in names else probe
        for probe in HEALTHY.probes
    )
    return replace(HEALTHY, probes=probes, **changes)  # type: ignore[arg-type]


def bad(facts: MachineFacts) -> list[Diagnosis]:
    return [finding for finding in diagnose(facts) if finding.state is not Health.OK]


def test_healthy_machine() -> None:
    assert bad(HEALTHY) == []
    assert can_build(diagnose(HEALTHY))


@pytest.mark.parametrize(("change", "remedy"), [
    ({"sysctls": (("user/max_user_namespaces", "0"),)}, "sysctl -w user.max_user_namespaces=15000"),
    ({"sysctls": (("user/max_net_namespaces", "0"),)}, "sysctl -w user.max_net_namespaces=15000"),
    ({"sysctls": (("kernel/unprivileged_userns_clone", "0"),), "uid": 1000},
     "sysctl -w kernel.unprivileged_userns_clone=1"),
    ({"sysctls": (("kernel/apparmor_restrict_unprivileged_userns", "1"),), "uid": 1000},
     "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ({"container": "docker"}, "--security-opt seccomp=unconfined"),
    ({"seccomp": 2}, "--security-opt seccomp=unconfined"),
    ({}, "dmesg"),
])  # fmt: skip
def test_why_user_namespaces_are_denied(change: dict[str, object], remedy: str) -> None:
    facts = replace(HEALTHY, sandbox=REFUSED, subuid=True, subgid=True,
                    tools=(*HEALTHY.tools, ("newuidmap", "/usr/bin/newuidmap")), **change)  # type: ignore[arg-type] # fmt: skip
    (finding,) = bad(facts)
    assert (finding.name, finding.state) == ("user namespaces", Health.DENIED)
    assert remedy in finding.remedy
    assert not can_build((finding,))


@pytest.mark.parametrize(
    ("attempt", "detail"),
    [
        (SandboxAttempt(refusal="", cgroup=2), "(counted by the kernel: cgroup v2)"),
        (SandboxAttempt(refusal="", no_cgroup="no bus"), "ten times a second; rlimits; no cgroup: no bus)"),
    ],
)
def test_what_counts_a_run_is_said(attempt: SandboxAttempt, detail: str) -> None:
    findings = diagnose(replace(HEALTHY, sandbox=attempt))
    (limits,) = (finding for finding in findings if finding.name == "limits")
    assert limits.detail.endswith(detail)
    assert limits.state is Health.OK


def test_settings_for_ordinary_users_do_not_explain_a_refusal_of_root() -> None:
    facts = replace(HEALTHY, sandbox=REFUSED, sysctls=(("kernel/unprivileged_userns_clone", "0"),))
    (finding,) = bad(facts)
    assert "unprivileged_userns_clone" not in finding.remedy


def test_overlay_denied_is_its_own_finding() -> None:
    refusal = SandboxAttempt(
        refusal="this machine refuses a mount that the sandbox needs (overlay: Invalid argument)"
    )
    findings = {
        finding.name: finding for finding in diagnose(replace(HEALTHY, sandbox=refusal, kernel="5.4.0"))
    }
    assert findings["user namespaces"].state is Health.OK
    assert findings["overlay"].state is Health.DENIED
    assert findings["kernel"].state is Health.MISSING


@pytest.mark.parametrize(("change", "name", "state", "remedy"), [
    ({"python": (3, 10, 4)}, "python", Health.MISSING, "3.11"),
    ({"machine": "riscv64"}, "platform", Health.MISSING, "x86_64 or aarch64"),
    ({"emulated": (ProbeResult(name="linux/arm64", refusal="no",
    remedy="apt-get install qemu-user-static"),)},
     "linux/arm64", Health.WARNING, "qemu-user-static"),
    ({"libc": ("", "")}, "platform", Health.WARNING, "glibc"),
    ({"tools": (("uv", "/u"),)}, "mmdebstrap", Health.MISSING, "apt-get install mmdebstrap"),
    ({"keyrings": ()}, "debian keyring", Health.MISSING, "debian-archive-keyring"),
    ({"debian_snapshot": ""}, "debian snapshot", Health.WARNING, "debian-snapshot"),
    ({"apt_sources": ()}, "debian mirror", Health.MISSING, "IMAGEFACTORY_DEBIAN_MIRROR"),
    ({"tools": (("mmdebstrap", "/m"),), "modules": tuple(m for m in MODULES if m != "uv")},
     "uv", Health.MISSING, "[build]"),
    ({"modules": ("uv", "isal")}, "build packages", Health.MISSING, "[build]"),
    ({"cores": 1}, "cores", Health.WARNING, ""),
    ({"landlock": False}, "landlock", Health.WARNING, "boot Linux 5.19"),
    ({"gpu_nodes": ()}, "GPU", Health.WARNING, "imagefactory run --gpus all"),
    ({"lost_gpus": ("GPU 1: GPU is lost",)}, "GPU", Health.WARNING, "--gpu-reset"),
    ({"driver_libraries": ()}, "GPU", Health.MISSING, "ldconfig"),
    ({"driver_glibc": (2, 39)}, "GPU", Health.WARNING, "ubuntu-24.04"),
    ({"gpu_nodes": ("/dev/nvidia0",)}, "GPU", Health.DENIED, "nvidia-modprobe"),
    ({"uid": 1000, "user": "ann"}, "subordinate ids", Health.MISSING, "apt-get install uidmap"),
    ({"uid": 1000, "user": "ann", "tools": (*HEALTHY.tools, ("newuidmap", "/n"))},
     "subordinate ids", Health.MISSING,
     "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 ann"),
])  # fmt: skip
def test_single_faults(change: dict[str, object], name: str, state: Health, remedy: str) -> None:
    (finding,) = bad(replace(HEALTHY, **change))  # type: ignore[arg-type]
    assert (finding.name, finding.state) == (name, state)
    assert remedy in finding.remedy


AMD = AmdGpus(
    processors=("gfx90a", "gfx90a", "gfx1100"), devices=("/dev/kfd", "/dev/dri"), groups=(44,), driver=""
)


@pytest.mark.parametrize(
    ("change", "state", "told", "remedy"),
    [
        ({}, Health.OK, "AMD: 2 x gfx90a, 1 x gfx1100, the kernel's own amdgpu", ""),
        ({"driver": "6.12.12"}, Health.OK, "amdgpu 6.12.12", ""),
        ({"devices": ("/dev/kfd",)}, Health.DENIED, "there is no /dev/dri", "--device /dev/dri"),
        ({"refused": ("/dev/kfd",)}, Health.DENIED, "you may not open /dev/kfd", "usermod -aG render,video"),
    ],
)
def test_gpus_of_amd(change: dict[str, object], state: Health, told: str, remedy: str) -> None:
    facts = replace(HEALTHY, gpu_nodes=(), amd=replace(AMD, **change))  # type: ignore[arg-type]
    (line,) = [one for one in diagnose(facts) if one.name == "GPU"]
    assert line.state is state
    assert told in line.detail
    assert remedy in line.remedy
    assert len([one for one in diagnose(replace(HEALTHY, amd=AMD)) if one.name == "GPU"]) == 2


def test_what_a_build_imports_is_looked_for() -> None:
    """All of the extra `build` and what registries are asked with, by names that can be imported."""
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    wanted = [*extras["optional-dependencies"]["build"], "requests", "tenacity"]
    assert set(MODULES) == {re.split(r"[<>=]", name)[0] for name in wanted}
    assert all(importlib.util.find_spec(name) for name in MODULES)


def test_what_a_build_needs() -> None:
    assert can_build(diagnose(replace(HEALTHY, gpu_nodes=(), cores=1)))
    assert not can_build(diagnose(replace(HEALTHY, keyrings=())))
    assert not can_build(diagnose(replace(HEALTHY, sandbox=REFUSED)))


def test_disks() -> None:
    full, shut = (replace(disk, free=1_000_000) for disk in HEALTHY.disks)
    findings = bad(replace(HEALTHY, disks=(full, replace(shut, writable=False))))
    assert [(finding.name, finding.state) for finding in findings] == [
        ("store", Health.WARNING),
        ("cache", Health.DENIED),
    ]
    assert "$IMAGEFACTORY_CACHE" in findings[1].detail
    assert "10.0 GB" in findings[0].detail


def test_a_configured_mirror_needs_no_apt() -> None:
    mirror = "http://ann:hunter2@mirror.example/debian"
    facts = replace(HEALTHY, apt_sources=(), debian_mirror=mirror)
    assert bad(facts) == []
    assert not any("hunter2" in finding.detail for finding in diagnose(facts))


@pytest.mark.parametrize("engine", ["docker", "apptainer"])
def test_an_engine_is_needed_where_it_is_the_configured_one(engine: str) -> None:
    (finding,) = bad(refusing(engine))
    assert (finding.name, finding.state, finding.needed_for) == (engine, Health.WARNING, engine)
    assert f"only --engine {engine} needs it" in finding.detail
    assert can_build((finding,))
    (finding,) = bad(refusing(engine, engine=engine, runner=engine))
    assert (finding.state, finding.needed_for, finding.remedy) == (Health.MISSING, "build", "mend it")
    assert not can_build((finding,))
    (finding,) = bad(refusing(engine, runner=engine))
    assert (finding.state, finding.needed_for) == (Health.MISSING, "run")


def test_a_sandbox_is_needed_by_the_unshare_runner_and_by_assemble() -> None:
    refused = replace(HEALTHY, sandbox=REFUSED)
    assert not can_build(diagnose(replace(refused, engine="docker", runner="unshare")))
    assert not can_build(diagnose(replace(refused, engine="assemble", runner="docker")))
    by_docker = replace(refused, engine="docker", runner="docker")
    assert can_build(diagnose(by_docker))
    (finding,) = bad(by_docker)
    assert (finding.state, finding.needed_for) == (Health.DENIED, "unshare")


def test_what_the_network_refuses() -> None:
    for name, needed_for in (("package index", "build"), ("debian mirror", "build"), ("registry", "push")):
        (finding,) = bad(refusing(name))
        assert (finding.name, finding.state, finding.needed_for) == (name, Health.DENIED, needed_for)
        assert "no answer" in finding.detail
        assert finding.remedy == "mend it"
        assert can_build((finding,)) == (needed_for == "push")


def test_conda_is_for_recipes_of_conda_alone() -> None:
    (finding,) = bad(refusing("conda"))
    assert (finding.state, finding.needed_for, finding.remedy) == (Health.WARNING, "conda", "mend it")
    assert can_build((finding,))


def test_what_conda_works_with_is_told(tmp_path: Path) -> None:
    def ask(**more: str) -> str:
        environ = {"PATH": "/usr/bin", "HOME": str(tmp_path), **more}
        settings = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
        return _check_conda(Access(settings=settings, environ=environ))

    assert re.fullmatch(r"py-rattler [0-9.]+", ask())
    elsewhere = ask(IMAGEFACTORY_CHANNELS="conda-forge=http://127.0.0.1:1/forge")
    assert elsewhere.endswith("; https://conda.anaconda.org/conda-forge at http://127.0.0.1:1/forge")
    with pytest.raises(ToolError):
        ask(IMAGEFACTORY_SOLVER="micromamba")


def test_subordinate_ids(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text("bob:100000:65536\nann:200000:10\nodd line\n")
    assert has_subordinate_ids(tmp_path / "subuid", "bob")
    assert not has_subordinate_ids(tmp_path / "subuid", "ann")
    assert not has_subordinate_ids(tmp_path / "subgid", "bob")


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    nowhere = "http://ann:hunter2@127.0.0.1:1"
    environ = {
        "PATH": "/usr/bin",
        "HOME": str(tmp_path),
        "IMAGEFACTORY_STORE": str(tmp_path / "new/store"),
        "IMAGEFACTORY_INDEX": f"{nowhere}/simple",
        "IMAGEFACTORY_DEBIAN_MIRROR": f"{nowhere}/debian",
        "IMAGEFACTORY_REGISTRY": "127.0.0.1:1/images",
        "DOCKER_HOST": f"unix://{tmp_path}/docker.sock",
    }
    facts = gather_machine_facts(
        load_settings(directory=tmp_path, start=tmp_path, environ=environ), environ=environ
    )
    assert facts.cores >= 1
    assert facts.disks[0].path == str(tmp_path / "new/store")
    assert facts.disks[0].origin == "$IMAGEFACTORY_STORE"
    assert facts.disks[0].writable
    assert not (tmp_path / "new").exists()
    findings = diagnose(facts)
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    unreached = {finding.name: finding for finding in findings if finding.name in REACHED}
    assert set(unreached) == REACHED
    for finding in unreached.values():
        assert finding.state in (Health.DENIED, Health.WARNING)
        assert finding.remedy
    assert not any("hunter2" in finding.detail + finding.remedy for finding in findings)


def test_a_nonsensical_mirror_is_not_ok(tmp_path: Path) -> None:
    environ = {
        "PATH": "/usr/bin",
        "HOME": str(tmp_path),
        "IMAGEFACTORY_INDEX": "http://127.0.0.1:1/simple",
        "IMAGEFACTORY_DEBIAN_MIRROR": "nonsense",
        "DOCKER_HOST": f"unix://{tmp_path}/docker.sock",
    }
    settings = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    findings = {finding.name: finding for finding in examine_machine(settings, environ=environ)}
    assert findings["debian mirror"].state is Health.DENIED
    assert "'nonsense' is not a valid address" in findings["debian mirror"].detail
    assert "registry" not in findings
    assert not can_build(tuple(findings.values()))


@pytest.mark.parametrize(
    "limit", ["user.max_user_namespaces", "user.max_mnt_namespaces", "user.max_pid_namespaces"]
)
def test_a_limit_of_zero_is_seen_in_proc(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of the kernel's documentation (admin-guide/sysctl/user), where one of them is 0."""
    monkeypatch.setattr(look, "try_sandbox", lambda _: REFUSED)
    monkeypatch.setattr(look, "check_services", lambda access, names: ())
    files = {"self/status": "CapEff:\t0\nSeccomp:\t0\n", f"sys/{limit.replace('.', '/')}": "0\n"}
    for name, text in files.items():
        path = tmp_path / "proc" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    settings = load_settings(directory=tmp_path, start=tmp_path, environ={"HOME": str(tmp_path)})
    facts = gather_machine_facts(settings, environ={}, root=tmp_path)
    assert explain_refusal(facts) == (f"{limit} is 0", f"sysctl -w {limit}=15000")


def test_a_lost_gpu_is_found_with_its_index(tmp_path: Path) -> None:
    (one,) = find_unusable_gpus(make_host(tmp_path / "a", Told(count=2, lost=1)))
    assert one.startswith("GPU 1: ")
    (alone,) = find_unusable_gpus(make_host(tmp_path / "b", Told(lost=0)))
    assert alone.startswith("GPU 0: ")
    assert find_unusable_gpus(make_host(tmp_path / "c")) == ()
    assert find_unusable_gpus(make_host(tmp_path / "d", Told(count=0))) == ()
