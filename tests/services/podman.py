"""Podman's API on a socket, with a storage of its own, and the command on the same storage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services.processes import Job, Program, find, flags, need_root, running
from tests.services.unix import answers

CONTAINERS = """\
[containers]
netns = "host"
default_ulimits = []
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
"""
"""No limits of its own: raising them needs CAP_SYS_RESOURCE, which a root in a container often lacks."""
REGISTRIES = """\
unqualified-search-registries = []
[[registry]]
location = "127.0.0.1"
insecure = true
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodmanService:
    url: str
    """`unix://` and the socket's path, for the docker SDK."""
    command: tuple[str, ...]
    """The podman command on the same images, with its options."""
    environ: Mapping[str, str]
    """What that command needs beside this process's environment."""


@contextmanager
def podman_service(folder: Path) -> Iterator[PodmanService]:
    """Podman with all its data in `folder`. Raises ServiceError when it is missing or does not start."""
    need_root("podman's socket")
    podman = find("podman")
    folder.mkdir(parents=True, exist_ok=True)
    runtime = Path(tempfile.mkdtemp(prefix="ifp-", dir="/run"))  # podman takes 50 characters at most
    settings = {"CONTAINERS_CONF": CONTAINERS, "CONTAINERS_REGISTRIES_CONF": REGISTRIES}
    environ = {}
    for name, text in settings.items():
        (folder / f"{name.lower()}.conf").write_text(text)
        environ[name] = str(folder / f"{name.lower()}.conf")
    options = {
        "root": folder / "storage",
        "runroot": runtime / "run",
        "tmpdir": runtime / "tmp",
        "storage-driver": "overlay",
        "runtime": find("runc"),  # crun refuses a machine with both versions of cgroups
    }
    command = (podman, *flags(options))
    path = runtime / "podman.sock"
    job = Job(
        folder=folder,
        programs=(Program(argv=(*command, "system", "service", "--time", "0", f"unix://{path}")),),
        ready=lambda: answers(path),
        environ=environ,
        remove=(runtime, folder / "storage"),
    )
    with running(job):
        yield PodmanService(url=f"unix://{path}", command=command, environ=environ)
