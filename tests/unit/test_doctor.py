"""The doctor's judgement over facts of machines that are not at hand, and a look at this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.doctor import (
    MODULES,
    Attempt,
    Disk,
    Facts,
    Finding,
    State,
    can_build,
    decide,
    gather,
    has_subordinate_ids,
    parse_deb822,
    parse_sources_list,
    read_apt_sources,
)
from imagefactory.settings import load_settings

REFUSED = Attempt(refusal="this machine refuses user namespaces (user-namespace: Operation not permitted)")
HEALTHY = Facts(
    python=(3, 11, 2), machine="x86_64", libc=("glibc", "2.36"), kernel="6.1.0-25-amd64", uid=0, user="root",
    cores=8, capabilities=(1 << 41) - 1, seccomp=0, container="",
    sysctls=(("user/max_user_namespaces", "15000"),),
    sandbox=Attempt(refusal=""), tools=(("mmdebstrap", "/usr/bin/mmdebstrap"), ("uv", "/usr/bin/uv")),
    modules=MODULES, keyrings=("/usr/share/keyrings/debian-archive-keyring.gpg",), apt_sources=("bookworm",),
    debian_mirror="", subuid=False, subgid=False,
    disks=(
        Disk(name="store", path="/s", origin="default", free=100_000_000_000, writable=True),
        Disk(name="cache", path="/c", origin="$IMAGEFACTORY_CACHE", free=100_000_000_000, writable=True),
    ),
    gpu_nodes=("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"), driver="550.90.07",
    driver_libraries=("libcuda.so.1",),
)  # fmt: skip


def bad(facts: Facts) -> list[Finding]:
    return [finding for finding in decide(facts) if finding.state is not State.OK]


def test_healthy_machine() -> None:
    assert bad(HEALTHY) == []
    assert can_build(decide(HEALTHY))


@pytest.mark.parametrize(("change", "remedy"), [
    ({"sysctls": (("user/max_user_namespaces", "0"),)}, "sysctl -w user.max_user_namespaces=15000"),
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
    assert (finding.name, finding.state) == ("user namespaces", State.DENIED)
    assert remedy in finding.remedy
    assert not can_build((finding,))


def test_settings_for_ordinary_users_do_not_explain_a_refusal_of_root() -> None:
    facts = replace(HEALTHY, sandbox=REFUSED, sysctls=(("kernel/unprivileged_userns_clone", "0"),))
    (finding,) = bad(facts)
    assert "unprivileged_userns_clone" not in finding.remedy


def test_overlay_denied_is_its_own_finding() -> None:
    refusal = Attempt(
        refusal="this machine refuses a mount that the sandbox needs (overlay: Invalid argument)"
    )
    findings = {
        finding.name: finding for finding in decide(replace(HEALTHY, sandbox=refusal, kernel="5.4.0"))
    }
    assert findings["user namespaces"].state is State.OK
    assert findings["overlay"].state is State.DENIED
    assert findings["kernel"].state is State.MISSING


@pytest.mark.parametrize(("change", "name", "state", "remedy"), [
    ({"python": (3, 10, 4)}, "python", State.MISSING, "3.11"),
    ({"machine": "aarch64"}, "platform", State.MISSING, "x86_64"),
    ({"libc": ("", "")}, "platform", State.WARNING, "glibc"),
    ({"tools": (("uv", "/u"),)}, "mmdebstrap", State.MISSING, "apt-get install mmdebstrap"),
    ({"keyrings": ()}, "debian keyring", State.MISSING, "debian-archive-keyring"),
    ({"apt_sources": ()}, "debian mirror", State.MISSING, "IMAGEFACTORY_DEBIAN_MIRROR"),
    ({"tools": (("mmdebstrap", "/m"),), "modules": tuple(m for m in MODULES if m != "uv")},
     "uv", State.MISSING, "[build]"),
    ({"modules": ("uv", "isal")}, "build packages", State.MISSING, "[build]"),
    ({"cores": 1}, "cores", State.WARNING, ""),
    ({"gpu_nodes": ()}, "GPU", State.WARNING, "imagefactory run --gpus"),
    ({"driver_libraries": ()}, "GPU", State.MISSING, "ldconfig"),
    ({"gpu_nodes": ("/dev/nvidia0",)}, "GPU", State.DENIED, "nvidia-modprobe"),
    ({"uid": 1000, "user": "ann"}, "subordinate ids", State.MISSING, "apt-get install uidmap"),
    ({"uid": 1000, "user": "ann", "tools": (*HEALTHY.tools, ("newuidmap", "/n"))},
     "subordinate ids", State.MISSING,
     "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 ann"),
])  # fmt: skip
def test_single_faults(change: dict[str, object], name: str, state: State, remedy: str) -> None:
    (finding,) = bad(replace(HEALTHY, **change))  # type: ignore[arg-type]
    assert (finding.name, finding.state) == (name, state)
    assert remedy in finding.remedy


def test_what_a_build_needs() -> None:
    assert can_build(decide(replace(HEALTHY, gpu_nodes=(), cores=1)))
    assert not can_build(decide(replace(HEALTHY, keyrings=())))
    assert not can_build(decide(replace(HEALTHY, sandbox=REFUSED)))


def test_disks() -> None:
    full, shut = (replace(disk, free=1_000_000) for disk in HEALTHY.disks)
    findings = bad(replace(HEALTHY, disks=(full, replace(shut, writable=False))))
    assert [(finding.name, finding.state) for finding in findings] == [
        ("store", State.WARNING),
        ("cache", State.DENIED),
    ]
    assert "$IMAGEFACTORY_CACHE" in findings[1].detail
    assert "10.0 GB" in findings[0].detail


def test_a_configured_mirror_needs_no_apt() -> None:
    assert bad(replace(HEALTHY, apt_sources=(), debian_mirror="http://mirror.example/debian")) == []


def test_apt_sources_of_both_formats(tmp_path: Path) -> None:
    one_line = (
        "# deb http://x old main\ndeb [signed-by=/k arch=amd64] http://x bookworm main\n"
        "deb-src http://x src main\n"
    )
    paragraphs = (
        "Types: deb\n# Suites: no\nURIs: http://x\nSuites: trixie trixie-updates\n\n"
        "Types: deb\nEnabled: no\nSuites: sid\n\nTypes: deb-src\nSuites: trixie-src\n"
    )
    assert parse_sources_list(one_line) == ("bookworm",)
    assert parse_deb822(paragraphs) == ("trixie", "trixie-updates")
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(one_line)
    (tmp_path / "sources.list.d/debian.sources").write_text(paragraphs)
    (tmp_path / "sources.list.d/old.save").write_text("deb http://x buster main\n")
    assert read_apt_sources(tmp_path) == ("bookworm", "trixie", "trixie-updates")
    assert read_apt_sources(tmp_path / "none") == ()


def test_subordinate_ids(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text("bob:100000:65536\nann:200000:10\nodd line\n")
    assert has_subordinate_ids(tmp_path / "subuid", "bob")
    assert not has_subordinate_ids(tmp_path / "subuid", "ann")
    assert not has_subordinate_ids(tmp_path / "subgid", "bob")


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin", "IMAGEFACTORY_STORE": str(tmp_path / "new/store"), "HOME": str(tmp_path)}
    facts = gather(load_settings(directory=tmp_path, start=tmp_path, environ=environ), environ=environ)
    assert facts.cores >= 1
    assert facts.disks[0].path == str(tmp_path / "new/store")
    assert facts.disks[0].origin == "$IMAGEFACTORY_STORE"
    assert facts.disks[0].writable
    assert not (tmp_path / "new").exists()
    names = [finding.name for finding in decide(facts)]
    assert len(names) == len(set(names))
