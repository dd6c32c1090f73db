"""A dockerd of the tests' own, beside any other: its bridge, its containerd, its sockets, its rules.

Another dockerd of the machine keeps its chains of iptables: this one gets none (`--iptables=false`), and what
its containers need to reach a network are three rules of ours that name its bridge, taken away at the end.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services.processes import Job, Program, ServiceError, find, flags, need_root, running, search_path
from tests.services.unix import answers

OWN_PLUGINS = Path(__file__).parents[2] / ".engines/docker/usr/libexec/docker/cli-plugins"


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerDaemon:
    host: str
    """For DOCKER_HOST."""
    command: str
    """The docker command that fits it; buildx needs `write_config`."""
    bridge: str
    cdi: Path
    """CDI specifications put here are devices that containers may ask for."""
    log: Path


def write_config(folder: Path, auths: dict[str, dict[str, str]] | None = None) -> Path:
    """A folder for DOCKER_CONFIG with nothing of this machine's user but the place of buildx; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"auths": auths or {}, "cliPluginsExtraDirs": [str(OWN_PLUGINS)]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def free_network() -> ipaddress.IPv4Network:
    """A /24 that no route of this machine leads into."""
    told = subprocess.run([find("ip"), "-json", "-4", "route"], capture_output=True, text=True, check=True)
    taken = [
        ipaddress.IPv4Network(route["dst"])
        for route in json.loads(told.stdout or "[]")
        if route["dst"] != "default" and "dst" in route
    ]
    for third in range(256):
        network = ipaddress.IPv4Network(f"172.29.{(third + os.getpid()) % 256}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise ServiceError("172.29.0.0/16 is full: no network for the tests' dockerd")


@contextmanager
def docker_daemon(folder: Path, *, containerd_snapshotter: bool = False) -> Iterator[DockerDaemon]:
    """A dockerd with all its data in `folder`, which is emptied of it at the end; its logs stay.

    `containerd_snapshotter` keeps images in containerd, which BuildKit needs to push zstd layers.

    Raises ServiceError when it is missing, when this is not root, or when it does not start.
    """
    need_root("dockerd")
    dockerd, containerd, command = find("dockerd"), find("containerd"), find("docker")
    ip, iptables = find("ip"), find("iptables")
    folder.mkdir(parents=True, exist_ok=True)
    # Sockets' paths may have 107 characters, and this holds state that is gone after a reboot.
    runtime = Path(tempfile.mkdtemp(prefix="ifd-", dir="/run"))
    bridge = f"if-{runtime.name.removeprefix('ifd-')[:10]}"
    network = free_network()
    rules = (
        ("-t", "nat", "POSTROUTING", "-s", str(network), "!", "-o", bridge, "-j", "MASQUERADE"),
        ("-t", "filter", "FORWARD", "-i", bridge, "-j", "ACCEPT"),
        ("-t", "filter", "FORWARD", "-o", bridge, "-j", "ACCEPT"),
    )

    def rule(action: str, parts: tuple[str, ...]) -> tuple[str, ...]:
        table, chain, rest = parts[:2], parts[2], parts[3:]
        return (iptables, "-w", *table, action, chain, *rest)

    cdi = folder / "cdi"
    cdi.mkdir(exist_ok=True)
    features = {"cdi": True, "containerd-snapshotter": containerd_snapshotter}
    (folder / "daemon.json").write_text(
        json.dumps({"features": features, "cdi-spec-dirs": [str(cdi)], "shutdown-timeout": 5})
    )
    (folder / "containerd.toml").write_text('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
    inner, outer = runtime / "containerd.sock", runtime / "docker.sock"
    containers = {
        "config": folder / "containerd.toml",
        "address": inner,
        "root": folder / "containerd",
        "state": runtime / "containerd",
        "log-level": "warn",
    }
    images = {
        "config-file": folder / "daemon.json",
        "host": f"unix://{outer}",
        "containerd": inner,
        "group": 0,
        "pidfile": runtime / "docker.pid",
        "data-root": folder / "data",
        "exec-root": runtime / "docker",
        "bridge": bridge,
        "iptables": "false",
        "ip6tables": "false",
    }
    programs = (
        Program(argv=(containerd, *flags(containers)), ready=inner),
        Program(argv=(dockerd, *flags(images))),
    )
    job = Job(
        folder=folder,
        programs=programs,
        ready=lambda: answers(outer),
        environ={"DOCKER_CONFIG": str(write_config(folder / "config"))},
        before=(
            (ip, "link", "add", bridge, "type", "bridge"),
            (ip, "address", "add", f"{network[1]}/{network.prefixlen}", "dev", bridge),
            (ip, "link", "set", bridge, "up"),
            *(rule("-I", parts) for parts in rules),
        ),
        afterwards=(*(rule("-D", parts) for parts in rules), (ip, "link", "delete", bridge)),
        remove=(runtime, folder / "data", folder / "containerd"),
    )
    with running(job):
        yield DockerDaemon(
            host=f"unix://{outer}",
            command=command,
            bridge=bridge,
            cdi=cdi,
            log=folder / "dockerd.log",
        )


def need_buildx(command: str, config: Path) -> None:
    """Raises ServiceError unless `docker buildx` runs with `config`."""
    environ = {**os.environ, "PATH": search_path(), "DOCKER_CONFIG": str(config)}
    done = subprocess.run([command, "buildx", "version"], capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise ServiceError(f"docker buildx: {done.stderr.strip()}; run ./setup.sh --tests as root")
