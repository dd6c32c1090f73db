"""What a container is made of, what the daemon's words mean, and whose container it is. No daemon here."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.build.docker import parse_version
from imagefactory.errors import ImagefactoryError, ToolError, UsageError
from imagefactory.model import Mount, RunSpec
from imagefactory.runtime import docker
from imagefactory.runtime.devices import AmdGpus
from imagefactory.runtime.docker import check_request, explain, is_alive, not_started
from imagefactory.runtime.docker_daemon import DockerDaemon

SPEC = RunSpec(argv=("python", "-c", "print(1)"))


def arguments(spec: RunSpec, **options: Any) -> dict[str, Any]:
    return docker.arguments(spec, owner="owner", **options)


def test_container_has_no_power_and_no_network() -> None:
    made = arguments(SPEC)
    assert made["entrypoint"] == ["python", "-c", "print(1)"]
    assert "command" not in made
    assert made["cap_drop"] == ["ALL"]
    assert made["security_opt"] == ["no-new-privileges:true"]
    assert made["network_mode"] == "none"
    assert made["user"] == "0:0"
    assert made["use_config_proxy"] is False
    assert made["device_requests"] is None
    assert not made["read_only"]
    assert made["init"]
    assert 0 < made["pids_limit"] <= 65536


def test_what_is_asked_for_is_given() -> None:
    spec = replace(
        SPEC, uid=65534, network=True, read_only=True, workdir="/inside", environment=(("A", "x=y"),),
        mounts=(
            Mount(source=Path("/a"), target="/inside/deep"),
            Mount(source=Path("/b"), target="/inside/", writable=True),
        ),
    )  # fmt: skip
    made = arguments(spec)
    assert (made["network_mode"], made["hostname"]) == ("host", None)
    assert (made["user"], made["working_dir"], made["read_only"]) == ("65534:65534", "/inside", True)
    assert made["environment"] == ["A=x=y"]
    assert set(made["tmpfs"]) == {"/tmp", "/dev/shm"}
    assert [(m["Target"], m["Source"], m["ReadOnly"]) for m in made["mounts"]] == [
        ("/inside", "/b", False),
        ("/inside/deep", "/a", True),
    ]


def test_gpus_are_asked_for_by_their_makers_ways() -> None:
    spec = replace(SPEC, gpus=True)
    amd = AmdGpus(
        processors=("gfx90a",), devices=("/dev/kfd", "/dev/dri"), groups=(44, 109), driver="", refused=()
    )
    alone = arguments(spec, amd=amd, nvidia=False)
    assert alone["devices"] == ["/dev/kfd:/dev/kfd:rwm", "/dev/dri:/dev/dri:rwm"]
    assert (alone["group_add"], alone["device_requests"]) == ([44, 109], None)
    both = arguments(spec, amd=amd)
    assert (len(both["devices"]), len(both["device_requests"])) == (2, 1)
    for none in (arguments(SPEC, amd=amd), arguments(spec)):
        assert (none["devices"], none["group_add"]) == (None, None)


def test_limits_that_are_asked_for_are_dockers_own() -> None:
    plain = arguments(SPEC)
    assert (plain["mem_limit"], plain["ulimits"]) == (None, [])
    spec = replace(SPEC, limits=(("processes", 50), ("memory", 1 << 30), ("files", 99)))
    made = arguments(spec)
    (files,) = made["ulimits"]
    assert (made["pids_limit"], made["mem_limit"]) == (50, 1 << 30)
    assert (files.name, files.soft, files.hard) == ("nofile", 99, 99)
    assert arguments(replace(SPEC, limits=(("processes", None),)))["pids_limit"] == -1
    with pytest.raises(UsageError, match=r"docker .*scratch") as caught:
        check_request(replace(SPEC, limits=(("scratch", 1),)))
    assert caught.value.code == "option-conflict"


def test_gpus_are_all_of_them_or_the_named_ones() -> None:
    (request,) = arguments(replace(SPEC, gpus=True))["device_requests"]
    assert (request.count, request.capabilities, request.device_ids) == (-1, [["gpu"]], [])
    (request,) = arguments(replace(SPEC, gpus=True), names=("nvidia.com/gpu=all",))["device_requests"]
    assert (request.driver, request.device_ids) == ("cdi", ["nvidia.com/gpu=all"])
    assert arguments(SPEC, names=("nvidia.com/gpu=all",))["device_requests"] is None
    named = replace(
        SPEC, gpus=True, selected_gpus=((1, "GPU-b", "/dev/nvidia1"), (0, "GPU-a", "/dev/nvidia0"))
    )
    (request,) = arguments(named)["device_requests"]  # without CDI, docker's nvidia driver takes UUIDs
    assert (request.count, request.capabilities, request.device_ids) == (0, [["gpu"]], ["GPU-b", "GPU-a"])


def test_terminal_has_a_kind() -> None:
    assert "TERM=xterm" in arguments(SPEC, tty=True)["environment"]
    own = replace(SPEC, environment=(("TERM", "vt100"),))
    assert arguments(own, tty=True)["environment"] == ["TERM=vt100"]
    assert arguments(SPEC)["environment"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"argv": ()},
        {"argv": ("",)},
        {"argv": ("a\0b",)},
        {"environment": (("A=B", "x"),)},
        {"environment": (("", "x"),)},
        {"workdir": "work"},
        {"uid": -1},
        {"uid": 2**32 - 1},
        {"mounts": (Mount(source=Path("/a"), target="/"),)},
        {"mounts": (Mount(source=Path("/a"), target="//"),)},
        {"mounts": (Mount(source=Path("/a"), target="/x/../etc"),)},
        {"mounts": (Mount(source=Path("/a"), target="/proc/1"),)},
        {"mounts": (Mount(source=Path("a"), target="/x"),)},
    ],
)
def test_spec_that_cannot_be(change: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        check_request(replace(SPEC, **change))  # type: ignore[arg-type]
    assert caught.value.hint


EXEC = "failed to create task for container: OCI runtime create failed: unable to start container process: "


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (EXEC + 'exec: "nope": executable file not found in $PATH: unknown', 127),
        (EXEC + 'exec: "./x": stat ./x: no such file or directory: unknown', 127),
        (EXEC + 'exec: "/etc/passwd": permission denied: unknown', 126),
        (EXEC + "exec /x: exec format error", 126),
    ],
)
def test_command_that_cannot_be_started_is_a_result(said: str, code: int) -> None:
    ended = not_started(said)
    assert ended.returncode == code
    assert "exec" in ended.stderr


@pytest.mark.parametrize(
    ("said", "error", "code", "hint"),
    [
        (
            'could not select device driver "" with capabilities: [[gpu]]',
            ToolError,
            "docker-gpu-unavailable",
            "nvidia-ctk",
        ),
        (
            "nvidia-container-cli: initialization error: no such file or directory",
            ToolError,
            "docker-gpu-unavailable",
            "nvidia-ctk",
        ),
        (
            'invalid mount config for type "bind": bind source path does not exist: /x',
            UsageError,
            "mount-failed",
            "paths",
        ),
        (
            EXEC + "error mounting /x: no such file or directory",
            ToolError,
            "command-not-started",
            "docker info",
        ),
        (EXEC + 'exec: "docker-init": executable file not found in $PATH', ToolError, "tool-missing", "tini"),
        ("something else", ToolError, "command-not-started", "docker info"),
    ],
)
def test_refusals_of_the_daemon_are_errors(
    said: str, error: type[ImagefactoryError], code: str, hint: str
) -> None:
    with pytest.raises(error) as caught:
        not_started(said)
    assert caught.value.code == code
    assert hint in caught.value.hint
    assert type(explain(said)) is error


def test_owners() -> None:
    boot = docker.boot_id()
    mine = docker.this_process()
    assert is_alive(mine, boot)
    gone = re.sub(
        r"\d+$", lambda found: str(int(found[0]) + 1), mine
    )  # the number was given to another process
    assert not is_alive(gone, boot)
    assert not is_alive(f"{boot}/{2**22 + 1}/1", boot)
    elsewhere = mine.replace(boot, "0" * 8 + boot[8:])
    assert is_alive(elsewhere, boot)
    assert is_alive("no label of ours", boot)
    assert str(os.getpid()) in mine


@pytest.mark.parametrize(
    ("text", "version"),
    [("26.1.5+dfsg1", (26, 1, 5)), ("v0.13.1", (0, 13, 1)), ("20.10.24", (20, 10, 24)), ("dev", ())],
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def test_daemon_that_is_not_there_says_where_and_what_to_do(tmp_path: Path) -> None:
    place = f"unix://{tmp_path}/docker.sock"
    with pytest.raises(ToolError) as caught:
        DockerDaemon({"DOCKER_HOST": place}).facts()
    assert caught.value.code == "docker-not-running"
    assert place in caught.value.message
    assert "systemctl start docker" in caught.value.hint
