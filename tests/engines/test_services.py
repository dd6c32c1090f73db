"""The services of the tests themselves: they answer, they are apart from others, and nothing stays."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from tests.services import PodmanService, RegistryOptions, ServiceError, docker_daemon, registry_server
from tests.services.processes import Job, Program, running

ROOT = Path(__file__).parents[2]
USERS = {"ada": "a password: with a colon"}


def ask(
    method: str, url: str, *, headers: dict[str, str] | None = None, data: bytes | None = None
) -> tuple[int, dict[str, str]]:
    request = urllib.request.Request(url, method=method, headers=headers or {}, data=data)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, dict(reply.headers)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers)


def basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def test_the_registry_takes_an_upload(registry: str) -> None:
    assert registry.startswith("127.0.0.1:")
    status, headers = ask("POST", f"http://{registry}/v2/some/where/blobs/uploads/", data=b"")
    assert status == 202
    assert headers["Location"].startswith(f"http://{registry}/")


def test_a_registry_asks_for_a_password(tmp_path: Path) -> None:
    with registry_server(tmp_path, RegistryOptions(users=USERS)) as server:
        url = f"{server.address}/v2/"
        status, headers = ask("GET", url)
        assert (status, headers["Www-Authenticate"].split()[0]) == (401, "Basic")
        assert ask("GET", url, headers=basic("ada", USERS["ada"]))[0] == 200
        assert ask("GET", url, headers=basic("ada", "another"))[0] == 401


def test_a_registry_asks_for_a_token(tmp_path: Path) -> None:
    with registry_server(tmp_path, RegistryOptions(users=USERS, tokens=True)) as server:
        assert server.tokens is not None
        upload = f"{server.address}/v2/some/where/blobs/uploads/"
        status, headers = ask("POST", upload, data=b"")
        assert status == 401
        assert f'realm="{server.tokens.realm}"' in headers["Www-Authenticate"]
        # It names the actions in no fixed order.
        asked = re.search(r'scope="repository:some/where:(\w+),(\w+)"', headers["Www-Authenticate"])
        assert asked
        assert {*asked.groups()} == {"pull", "push"}
        scope = f"{server.tokens.realm}?scope=repository:some/where:pull,push"

        def token(headers: dict[str, str]) -> dict[str, str]:
            with urllib.request.urlopen(urllib.request.Request(scope, headers=headers)) as reply:
                return {"Authorization": f"Bearer {json.load(reply)['token']}"}

        assert ask("POST", upload, headers=token({}), data=b"")[0] == 401  # nobody may only pull
        assert ask("POST", upload, headers=token(basic("ada", USERS["ada"])), data=b"")[0] == 202
        assert ask("GET", scope, headers=basic("ada", "another"))[0] == 401
        server.tokens.seconds = -5
        assert ask("POST", upload, headers=token(basic("ada", USERS["ada"])), data=b"")[0] == 401


def test_a_registry_that_is_full_refuses(tmp_path: Path) -> None:
    with registry_server(tmp_path, RegistryOptions(size=1 << 20)) as server:
        _, headers = ask("POST", f"{server.address}/v2/some/where/blobs/uploads/", data=b"")
        status, _ = ask("PATCH", headers["Location"], data=os.urandom(4 << 20))
        assert status >= 500
    assert not server.storage.exists()


def test_a_registry_starts_again_where_it_was(tmp_path: Path) -> None:
    kept = RegistryOptions(storage=tmp_path / "kept", deletes=False)
    with registry_server(tmp_path / "first", kept) as first:
        ask("POST", f"{first.address}/v2/some/where/blobs/uploads/", data=b"")
    again = RegistryOptions(storage=tmp_path / "kept", port=int(first.host.partition(":")[2]))
    with registry_server(tmp_path / "second", again) as second:
        assert second.host == first.host
        assert list(second.storage.rglob("startedat"))  # the upload is still known


def docker(host: str, *arguments: str, data: bytes | None = None) -> str:
    done = subprocess.run(
        ["docker", "--host", host, *arguments], input=data, capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def a_root(what: str = 'puts("42"); return 0;') -> bytes:
    """A root with one static program, /answer."""
    source = f"#include <stdio.h>\n#include <unistd.h>\nint main(void) {{ {what} }}\n".encode()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "answer")
        subprocess.run(["gcc", "-static", "-x", "c", "-", "-o", str(made)], input=source, check=True)
        program = made.read_bytes()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("answer")
        info.size, info.mode = len(program), 0o755
        tar.addfile(info, io.BytesIO(program))
    return buffer.getvalue()


def test_dockerd_runs_an_image_and_pushes_it(dockerd: str, registry: str, tmp_path: Path) -> None:
    name = f"{registry}/tests/answer:1"
    docker(dockerd, "import", "-", name, data=a_root())
    assert docker(dockerd, "run", "--rm", name, "/answer") == "42\n"
    assert "digest: sha256:" in docker(dockerd, "push", name)
    (tmp_path / "Dockerfile").write_text(f'FROM {name}\nRUN ["/answer"]\n')
    docker(dockerd, "buildx", "build", "--progress=plain", "--load", "--tag", "built", str(tmp_path))
    assert docker(dockerd, "run", "--rm", "built", "/answer") == "42\n"
    docker(dockerd, "image", "rm", "built", name)


def test_podman_pulls_over_its_socket_and_runs(
    podman_session: PodmanService, dockerd: str, registry: str
) -> None:
    name = f"{registry}/tests/answer:2"
    docker(dockerd, "import", "-", name, data=a_root())
    docker(dockerd, "push", name)
    environ = {**os.environ, **podman_session.environ}
    command = [*podman_session.command, "run", "--rm", name, "/answer"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.stdout == "42\n", done.stderr
    assert name in docker(podman_session.url, "images", "--format", "{{.Repository}}:{{.Tag}}")


def test_apptainer_builds_and_runs(apptainer: str, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(a_root())) as tar:
        tar.extractall(tmp_path / "root")
    (tmp_path / "root" / "bin").mkdir()
    sif = tmp_path / "answer.sif"
    build = [apptainer, "build", "--fakeroot", str(sif), str(tmp_path / "root")]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([apptainer, "exec", str(sif), "/answer"], capture_output=True, text=True)
    assert done.stdout == "42\n", done.stderr


def traces(bridge: str) -> list[str]:
    """Links and rules of this machine that name `bridge`."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    return [line for line in (links + rules).splitlines() if bridge in line]


def test_nothing_of_a_dockerd_stays(tmp_path: Path) -> None:
    with docker_daemon(tmp_path) as daemon:
        assert len(traces(daemon.bridge)) == 4
        docker(daemon.host, "import", "-", "answer", data=a_root())
        docker(daemon.host, "run", "--name", "answers", "answer", "/answer")
    assert traces(daemon.bridge) == []
    assert not (tmp_path / "data").exists()
    assert not Path(daemon.host.removeprefix("unix://")).parent.exists()
    assert daemon.log.exists()


KILLED = """\
import sys, time
from pathlib import Path
from tests.services import docker_daemon
with docker_daemon(Path(sys.argv[1])) as daemon:
    print(daemon.host, daemon.bridge, flush=True)
    time.sleep(600)
"""


def test_a_killed_test_run_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, bridge = process.stdout.readline().split()
        docker(host, "import", "-", "waits", data=a_root("pause(); return 0;"))
        docker(host, "run", "--detach", "waits", "/answer")
        assert traces(bridge)
        process.send_signal(signal.SIGKILL)

    def left() -> list[str]:
        folders = [str(tmp_path / name) for name in ("data", "containerd") if (tmp_path / name).exists()]
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return [*folders, *traces(bridge), *(line for line in mounts if str(tmp_path) in line)]

    until = time.monotonic() + 300
    while left() and time.monotonic() < until:
        time.sleep(0.2)
    assert left() == []


def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    program = Program(argv=("/bin/sh", "-c", "echo the reason; exit 3"))
    job = Job(folder=tmp_path, programs=(program,), ready=lambda: False)
    with pytest.raises(ServiceError, match=r"(?s)ended at once.*the reason"), running(job):
        pass
    unprepared = replace(job, before=(("/bin/sh", "-c", "echo no bridge; false"),))
    with pytest.raises(ServiceError, match=r"(?s)ended at once.*no bridge"), running(unprepared):
        pass
