"""A small image of this machine's own Python, bash and libraries, and callers that run commands in it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import imagefactory

PYTHON = "/usr/bin/python3"
ORDINARY_UID = 61234  # no account has it
TOOLS = (PYTHON, "/bin/bash", "/bin/cat", "/bin/sleep", "/usr/bin/id", "/bin/true", "/bin/sh")
DRIVER = """
import json, os, signal, subprocess, sys
from pathlib import Path
from imagefactory.errors import ImagefactoryError
from imagefactory.model import Mount, RunSpec
from imagefactory.oci.manifests import Descriptor, Image, OciLayer
from imagefactory.runtime.devices import GpuDevices
from imagefactory.runtime.unshare import UnshareRunner

request = json.loads(sys.argv[1])

class Layout:
    path = Path(request["store"])
    def blob_path(self, digest):
        return Path(request["blobs"]) / digest.removeprefix("sha256:")

layers = tuple(
    OciLayer(descriptor=Descriptor(media_type=kind, digest=digest, size=size), diff_id=diff_id, title=title)
    for kind, digest, size, diff_id, title in request["layers"]
)
image = Image(name="t", digest="sha256:0", manifest="sha256:0", config="sha256:0", size=0, layers=layers,
              environment=(("IMAGE", "yes"), ("PATH", "/usr/bin:/bin")), architecture=request["architecture"])
spec = request["spec"]
spec["argv"] = tuple(spec["argv"])
spec["limits"] = tuple(map(tuple, spec.get("limits", ())))
spec["environment"] = tuple(map(tuple, spec.get("environment", ())))
spec["mounts"] = tuple(
    Mount(source=Path(m[0]), target=m[1], writable=m[2], bind=m[3:] == [True], scratch="scratch" in m[3:])
    for m in spec.get("mounts", ())
)
found = GpuDevices(**request["gpus"]) if request["gpus"] else None
runner = UnshareRunner(Layout(), find=lambda: found) if found else UnshareRunner(Layout())
try:
    if request["mode"] == "start":
        lower = runner.unpacked.unpack(layers, Layout().blob_path, runner.progress)
        process = runner.start(lower, RunSpec(**spec), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        out, _ = process.communicate(b"hello co-process\\n")
        print(json.dumps({"returncode": process.returncode, "stdout": out.decode(), "stderr": ""}))
    else:
        done = runner.run(image, RunSpec(**spec))
        if spec.get("capture", True):
            print(json.dumps({"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr,
                              "seconds": done.seconds, "timed_out": done.timed_out, "over": done.over}))
        else:
            sys.exit(done.returncode)
except ImagefactoryError as error:
    told = {"code": error.code, "message": error.message, "hint": error.hint}
    print(json.dumps({"error": type(error).__name__, **told}))
"""


def add_layer(blobs: Path, title: str, entries: list[tuple[tarfile.TarInfo, bytes | Path]]) -> list[object]:
    buffer = blobs / f"{title}.part"
    with tarfile.open(buffer, "w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in entries:
            if isinstance(content, Path):
                info.size = content.stat().st_size
                with content.open("rb") as file:
                    archive.addfile(info, file)
            else:
                info.size = len(content) if info.isreg() else 0
                archive.addfile(info, io.BytesIO(content))
    with buffer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    buffer.chmod(0o644)
    buffer.rename(blobs / digest)
    size = (blobs / digest).stat().st_size
    return ["application/vnd.oci.image.layer.v1.tar", f"sha256:{digest}", size, f"sha256:{digest}", title]


def entry(name: str, *, mode: int = 0o644, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.type, info.linkname, info.mtime = mode, kind, link, 1_700_000_000
    return info


def host_files() -> Iterator[tuple[tarfile.TarInfo, Path]]:
    wanted: dict[str, Path] = {}
    for tool in TOOLS:
        wanted[f"usr/bin/{Path(tool).name}"] = Path(tool).resolve()
        for line in subprocess.run(
            ["ldd", tool], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            if found := re.search(r"(/\S+) \(0x", line):
                wanted["usr/" + found[1].removeprefix("/usr").lstrip("/")] = Path(found[1]).resolve()
    version = subprocess.run([PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                             capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    library = Path(f"/usr/lib/python{version}")
    for path in library.rglob("*"):
        parts = path.relative_to(library).parts
        if path.is_file() and not {"__pycache__", "test", "dist-packages", "site-packages"} & set(parts):
            wanted[str(path).lstrip("/")] = path.resolve()
    for module in library.glob("lib-dynload/_ctypes*.so"):
        for line in subprocess.run(
            ["ldd", module], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            if found := re.search(r"(/\S+) \(0x", line):
                wanted["usr/" + found[1].removeprefix("/usr").lstrip("/")] = Path(found[1]).resolve()
    for name, path in sorted(wanted.items()):
        yield entry(name, mode=0o755 if os.access(path, os.X_OK) else 0o644), path


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that an ordinary user may enter, with the blobs, a copy of the package and the driver."""
    folder = Path(tempfile.mkdtemp(prefix="imagefactory-sandbox-"))  # pytest's own folders are 0700
    folder.chmod(0o755)
    (folder / "blobs").mkdir(mode=0o755)
    package = Path(imagefactory.__file__).parent
    shutil.copytree(package, folder / "python/imagefactory", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "driver.py").write_text(DRIVER)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def layers(ground: Path) -> list[list[object]]:
    blobs = ground / "blobs"
    links = [
        (entry(name, mode=0o777, kind=tarfile.SYMTYPE, link=f"usr/{name}"), b"")
        for name in ("bin", "lib", "lib64")
    ]
    folders = [(entry(name, mode=mode, kind=tarfile.DIRTYPE), b"") for name, mode in (
        ("usr", 0o755), ("usr/bin", 0o755), ("etc", 0o755), ("opt", 0o755), ("opt/lower", 0o755),
        ("root", 0o700), ("var", 0o755), ("var/open", 0o777),
    )]  # fmt: skip
    files = [
        (entry("etc/passwd"), b"root:x:0:0::/root:/bin/sh\n"),
        (entry("opt/lower/gone"), b"1"),
        (entry("opt/file"), b"image"),
    ]
    base = add_layer(blobs, "base", [*folders, *links, *host_files(), *files])
    setuid = entry("usr/bin/id-setuid", mode=0o4755)
    top = add_layer(blobs, "top", [
        (entry("opt/lower/.wh.gone"), b""), (entry("opt/lower/new"), b"2"), (setuid, Path("/usr/bin/id")),
    ])  # fmt: skip
    return [base, top]


class Caller:
    """Runs the driver as one user, with one store; `gpus` stands for the machine's own GPUs.

    `architecture` is what the image says that it is for.
    """

    def __init__(self, name: str, ground: Path, store: Path, layers: list[list[object]]) -> None:
        self.name, self.ground, self.store, self.layers = name, ground, store, layers
        self.gpus: dict[str, object] = {}
        self.architecture = ""

    def command(self, spec: dict[str, object], *, mode: str = "run") -> list[str]:
        request = {"store": str(self.store), "blobs": str(self.ground / "blobs"), "layers": self.layers,
                   "spec": spec, "mode": mode, "gpus": self.gpus,
                   "architecture": self.architecture}  # fmt: skip
        python = [PYTHON, str(self.ground / "driver.py"), json.dumps(request)]
        if self.name == "user" and os.geteuid() == 0:
            identity = [f"--reuid={ORDINARY_UID}", f"--regid={ORDINARY_UID}", "--clear-groups"]
            return ["setpriv", *identity, "--inh-caps=-all", "--bounding-set=-all", *python]
        return python

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.ground / "python"), "PATH": "/usr/bin:/bin", "HOST_SECRET": "xyzzy"}

    def run(self, *argv: str, mode: str = "run", **spec: object) -> dict[str, object]:
        done = subprocess.run(
            self.command({"argv": argv, **spec}, mode=mode), capture_output=True, text=True,
            env=self.environment(), cwd="/", timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result: dict[str, object] = json.loads(done.stdout)
        return result

    def python(self, code: str, **spec: object) -> str:
        """The output of Python code inside; it must end well."""
        done = self.run("python3", "-c", textwrap.dedent(code), **spec)
        assert done.get("returncode") == 0, done
        return str(done["stdout"]).strip()


@pytest.fixture(params=["root", "user"])
def caller(request: pytest.FixtureRequest, ground: Path, layers: list[list[object]]) -> Caller:
    if request.param == "root" and os.geteuid() != 0:
        pytest.fail("needs root: the engines suite tries the sandbox as root and as an ordinary user")
    store = ground / f"store-{request.param}"
    store.mkdir(exist_ok=True)
    if request.param == "user" and os.geteuid() == 0:
        os.chown(store, ORDINARY_UID, ORDINARY_UID)
    return Caller(request.param, ground, store, layers)


def init_of(keeper: int) -> int:
    """Process 1 of a sandbox, seen from outside; the keeper's other children carry bytes."""
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    own = Path(f"/proc/{keeper}/ns/pid").readlink()
    (init,) = (int(pid) for pid in children if Path(f"/proc/{pid}/ns/pid").readlink() != own)
    return init


def scratch_folders(caller: Caller) -> list[Path]:
    return list((caller.store / "run").glob("*"))
