"""Conda targets by the embedded engine, in a real sandbox on a real base that has no Python."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.assemble import AssembleEngine
from imagefactory.build.base.image import BuiltBase
from imagefactory.build.definition import define
from imagefactory.errors import BuildError
from imagefactory.gpu.forward import FORWARD_DIRECTORY
from imagefactory.model import BuildSpec, CommandResult, Lock, LockedPackage, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import collect
from imagefactory.oci.manifests import Image
from imagefactory.progress import QuietProgress
from imagefactory.runtime.devices import GpuDevices
from imagefactory.runtime.unshare import UnshareRunner
from tests.engines import docker_target
from tests.made.supplies import supplies
from tests.made.values import make_base, make_lock
from tests.made.wheels import locked, make_wheel
from tests.services.channel_made import ADDRESS, PYTHON, MadeChannel, make_channel
from tests.services.children import LIMIT, child, stdout_of, wait_for
from tests.services.conda_package import CondaPackage, File, pack

BASE = make_base(python="", packages=(), public="x", where=docker_target.WHERE)  # fmt: skip
TARGET = replace(
    docker_target.TARGET,
    name="tinytorch-2.0-cu121",
    family="tinytorch",
    source="conda",
    framework="tinytorch",
    version="2.0",
    python=PYTHON,
    channels=(ADDRESS,),
    requirements=("tinytorch 2.0.*",),
)
CUDA = f"tinytorch-2.0-py{PYTHON.replace('.', '')}_cuda"
ALL = (
    "python-3", "python-libs", "python_abi", "numpy", "packaging", "click", "tinytool-1.0", CUDA,
    "cuda-version-12.1", "cuda-cudart", "tinyprefix", "oddpaths", "claims-a", "claims-b",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeChannel:
    return make_channel(tmp_path_factory.mktemp("channel"))


@pytest.fixture(scope="module")
def base_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian's essential packages: no Python in it."""
    tar = tmp_path_factory.mktemp("base") / "base.tar"
    command = ["mmdebstrap", "--quiet", "--variant=essential", BASE.suite, str(tar)]
    stdout_of(command)
    return tar


class Factory:
    def __init__(self, folder: Path, base_tar: Path) -> None:
        self.folder, self.layout = folder, Layout(folder / "store")
        self.base: BuiltBase = docker_target.store_base(self.layout, base_tar)
        self.files: dict[LockedPackage, Path] = {}

    def lock(self, made: MadeChannel, *names: str, target: str = TARGET.name) -> Lock:
        packages = made.locked(*names)
        self.files |= {package: made.archive(package.filename) for package in packages}
        return make_lock(
            target=target, python=PYTHON, solver="py-rattler", wheels=(), conda=packages, channels=(ADDRESS,)
        )

    def build(self, lock: Lock, *under: Lock) -> Image:
        return self.engine().build(
            self.define(lock, *under), supplies(self.base, lambda: self.files), QuietProgress()
        )

    def engine(self) -> AssembleEngine:
        return AssembleEngine(self.layout, self.folder / "cache", codec="zstd", workers=2)

    def define(self, lock: Lock, *under: Lock) -> BuildSpec:
        target = replace(TARGET, name=lock.target, on=under[-1].target if under else "")
        return define(target, BASE, lock, under)

    def run(self, image: Image, *argv: str, uid: int = 0) -> CommandResult:
        return UnshareRunner(self.layout).run(image, RunSpec(argv=argv, uid=uid, read_only=True))

    def says(self, image: Image, *argv: str) -> str:
        done = self.run(image, *argv, uid=65534)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory, base_tar: Path) -> Factory:
    return Factory(tmp_path_factory.mktemp("factory"), base_tar)


@pytest.fixture(scope="module")
def lock(factory: Factory, made: MadeChannel) -> Lock:
    return factory.lock(made, *ALL)


@pytest.fixture(scope="module")
def image(factory: Factory, lock: Lock) -> Image:
    return factory.build(lock)


# --- what runs -------------------------------------------------------------------------------------


def test_the_environments_own_python_runs_its_packages(factory: Factory, image: Image) -> None:
    program = """
import ctypes, json, numpy, ssl, sqlite3, sys, tinytorch
prefix = ctypes.CDLL(sys.prefix + "/lib/libtinyprefix.so").tinyprefix
prefix.restype = ctypes.c_char_p
print(json.dumps([sys.prefix, numpy.__version__, tinytorch.library(), tinytorch.matmul([[2]], [[3]]),
                  prefix().decode(), json.__cached__, numpy.__cached__]))
"""
    site = f"/opt/env/lib/python{PYTHON}"
    tag = f"cpython-{PYTHON.replace('.', '')}"
    assert json.loads(factory.says(image, "python", "-c", program)) == [
        "/opt/env",
        "1.26.4",
        "2.0 cuda12.1",
        [[6]],
        "/opt/env/share/tinyprefix",
        f"{site}/json/__pycache__/__init__.{tag}.pyc",
        f"{site}/site-packages/numpy/__pycache__/__init__.{tag}.pyc",
    ]


def test_a_libcuda_of_a_package_is_used_on_older_drivers(
    factory: Factory, made: MadeChannel, image: Image, tmp_path: Path
) -> None:
    """It is where NVIDIA's hook looks, and there our own sandbox finds it too."""
    lock = factory.lock(made, *ALL, "cuda-compat-impl")
    more = factory.build(lock)
    assert "NVIDIA_REQUIRE_CUDA" in dict(image.environment)
    assert "NVIDIA_REQUIRE_CUDA" not in dict(more.environment)
    path = f"{FORWARD_DIRECTORY}/libcuda.so.1"
    assert factory.says(more, "readlink", "-f", path) == "/opt/env/cuda-compat/libcuda.so.575.57.08\n"
    (tmp_path / "libcuda.so.1").touch()
    for driver, chosen in (("535.54.03", True), ("580.65.06", False)):
        devices = GpuDevices(
            devices=(), libraries=(str(tmp_path / "libcuda.so.1"),), links=(), programs=(), driver=driver
        )
        runner = UnshareRunner(factory.layout, find=[devices].pop)
        spec = RunSpec(argv=("sh", "-c", "echo $LD_LIBRARY_PATH"), gpus=True)
        assert runner.run(more, spec).stdout.startswith(FORWARD_DIRECTORY) == chosen


def test_programs_links_and_odd_names(factory: Factory, image: Image) -> None:
    assert factory.says(image, "tinytool") == "tinytool 1.0\n"
    assert factory.says(image, "tinyprefix") == "/opt/env/share\n"
    assert factory.says(image, "/opt/env/share/odd/up") == "odd\n"
    assert factory.says(image, "cat", "/opt/env/share/odd/link", "/opt/env/share/odd/größe-数.txt") == (
        "blank\nletters\n"
    )
    assert factory.says(image, "cat", "/opt/env/share/claims/different.txt") == "of a\n"


def test_no_byte_code_is_made_at_run_time(factory: Factory, image: Image) -> None:
    """All of it is there and holds, so that nothing is compiled: -v tells of each module's code."""
    done = factory.run(image, "python", "-v", "-c", "import json, numpy, tinytorch, click, asyncio")
    assert done.returncode == 0
    assert "matches /opt/env" in done.stderr
    assert "could not create" not in done.stderr
    assert "wrote " not in done.stderr


def test_the_records_hold_in_the_image(factory: Factory, image: Image) -> None:
    program = """
import glob, hashlib, json, os
for name in glob.glob("/opt/env/conda-meta/*.json"):
    for row in json.load(open(name))["paths_data"]["paths"]:
        path = "/opt/env/" + row["_path"]
        if row["path_type"] == "softlink":
            assert os.path.islink(path), path
        else:
            wanted = row.get("sha256_in_prefix") or row["sha256"]
            assert hashlib.sha256(open(path, "rb").read()).hexdigest() == wanted, path
print("held")
"""
    assert factory.says(image, "python", "-c", program) == "held\n"


# --- the same bytes --------------------------------------------------------------------------------


def test_another_store_gives_the_same_digest(
    tmp_path: Path, base_tar: Path, made: MadeChannel, image: Image
) -> None:
    other = Factory(tmp_path, base_tar)
    before = os.umask(0o077)
    try:
        assert other.build(other.lock(made, *ALL)).digest == image.digest
    finally:
        os.umask(before)


def test_one_changed_package_writes_one_layer(
    factory: Factory, made: MadeChannel, image: Image, lock: Lock
) -> None:
    newer = factory.lock(made, *("tinytool-1.1" if name == "tinytool-1.0" else name for name in ALL))
    changed = factory.build(newer)
    pairs = zip(image.layers, changed.layers, strict=True)
    assert sum(one.descriptor != other.descriptor for one, other in pairs) == 1
    assert factory.says(changed, "tinytool") == "tinytool 1.1\n"
    assert factory.build(lock).digest == image.digest


def test_a_target_on_it_shares_its_layers_and_takes_wheels(
    factory: Factory, made: MadeChannel, image: Image, lock: Lock, tmp_path: Path
) -> None:
    path = make_wheel(
        tmp_path, "extra", {
            "extra/__init__.py": b"import numpy\n\ndef main():\n    print('extra', numpy.arange(3).sum())\n",
            "extra-1.0.dist-info/entry_points.txt": b"[console_scripts]\nextra = extra:main\n",
        },
    )  # fmt: skip
    wheel = locked(path)
    factory.files[wheel] = path
    more = factory.lock(made, *ALL, target="more-2.0-cu121")
    above = factory.build(replace(more, wheels=(wheel,)), lock)
    assert above.layers[: len(image.layers)] == image.layers
    assert factory.says(above, "extra") == "extra 3\n"


# --- post-link scripts -------------------------------------------------------------------------------


def test_a_script_runs_in_the_base(factory: Factory, made: MadeChannel) -> None:
    scripted = factory.build(factory.lock(made, *ALL, "scripted"))
    assert factory.says(scripted, "cat", "/opt/env/etc/scripted.txt") == "42\n"
    assert scripted.layers[-1].title == "post-link scripts: scripted"


def packed(made: MadeChannel, factory: Factory, script: str, **files: File | bytes) -> Lock:
    """A lock with one more package, whose post-link script is `script`."""
    name = "s" + hashlib.sha256(script.encode()).hexdigest()[:8]
    hook = File(data=f"#!/bin/bash\nset -e\n{script}\n".encode(), executable=True)
    package = CondaPackage(name=name, files={f"bin/.{name}-post-link.sh": hook, **files})
    pack(made.folder, package)
    made.index()
    return factory.lock(made, *ALL, f"{name}-1.0")


def test_what_a_script_removes_is_gone(factory: Factory, made: MadeChannel) -> None:
    steps = (
        'cd "$PREFIX"',
        "rm share/tinyprefix.txt",
        "ln -s /etc/hostname share/host",
        "umask 077",
        "mkdir d",
    )
    lock = packed(made, factory, "\n".join(steps))
    image = factory.build(lock)
    assert factory.run(image, "test", "-e", "/opt/env/share/tinyprefix.txt").returncode == 1
    assert factory.says(image, "readlink", "/opt/env/share/host") == "/etc/hostname\n"
    assert factory.says(image, "stat", "-c", "%a", "/opt/env/d") == "755\n"


def test_a_source_that_a_script_changes_is_compiled_anew(factory: Factory, made: MadeChannel) -> None:
    module = f'"$PREFIX/lib/python{PYTHON}/site-packages/tinytool/__init__.py"'
    image = factory.build(packed(made, factory, f"echo 'NAME = 7' >> {module}"))
    assert factory.says(image, "python", "-c", "import tinytool; print(tinytool.NAME)") == "7\n"


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of somebody who answers on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname(), timeout=5):
            pass
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "script",
    [
        "echo evil > /etc/evil",
        f"cat {__file__}",
        "exec 3<>/dev/tcp/127.0.0.1/PORT",
        "mount -t tmpfs none /mnt",
        "yes",
        'cd "$PREFIX"; for n in {1..200}; do mkdir d; cd d; done',
        'mkfifo "$PREFIX/fifo"',
        'truncate -s 1T "$PREFIX/hole"',
    ],
    ids=["base", "host", "network", "mount", "endless output", "deep folders", "fifo", "hole"],
)
def test_a_script_stays_in_its_sandbox(
    factory: Factory, made: MadeChannel, listener: int, script: str
) -> None:
    with pytest.raises(BuildError) as caught:
        factory.build(packed(made, factory, script.replace("PORT", str(listener))))
    codes = ("post-link-failed", "post-link-files-invalid", "file-type-unsupported")
    assert caught.value.code in codes
    assert list(factory.layout.tmp.iterdir()) == []


# --- interruptions -----------------------------------------------------------------------------------

_BUILD = """
import os, pickle, signal, sys
from pathlib import Path
from imagefactory.build.assemble import AssembleEngine
from imagefactory.oci.layout import Layout
from imagefactory.progress import QuietProgress
from tests.made.supplies import supplies
with open(sys.argv[1], "rb") as file:
    folder, definition, base, files = pickle.load(file)
mine, left = os.getpid(), int(sys.argv[2])
def count(event, _):
    global left
    left -= 1
    if not left and os.getpid() == mine:
        os.kill(mine, signal.SIGKILL)
sys.addaudithook(count)
engine = AssembleEngine(Layout(folder / "store"), folder / "cache", codec="zstd", workers=2)
engine.build(definition, supplies(base, lambda: files), QuietProgress())
"""
"""It ends after so many events of sys.audit: moments that no machine is too fast or too slow for."""


def in_session(leader: int) -> list[str]:
    """The processes of a session, whose leader may be gone."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, fields = path.read_text().rpartition(")")  # the name before may hold anything
        except OSError:
            continue
        state, _, _, session = fields.split()[:4]
        if int(session) == leader and state != "Z":
            found.append(path.parent.name)
    return found


def was_killed(order: Path, moment: int) -> bool:
    """Builds until `moment`; whether it was killed there, and not done before. Its children end with it."""
    with child([sys.executable, "-c", _BUILD, str(order), str(moment)]) as process:
        code = process.wait(timeout=LIMIT)
        assert code in (0, -signal.SIGKILL)
        try:
            wait_for(lambda: not in_session(process.pid), "its children end")
        finally:
            for left in in_session(process.pid):
                os.kill(int(left), signal.SIGKILL)
    return code != 0


def whole_packages(factory: Factory, lock: Lock) -> int:
    """How many of the packages are unpacked. Each is whole or not there: py-rattler renames it."""
    kept = factory.folder / "cache" / "conda-pkgs"
    folders = [kept / f"{package.name}-{package.version}-{package.build}" for package in lock.conda]
    there = [folder for folder in folders if folder.exists()]
    for folder in there:
        rows = json.loads((folder / "info/paths.json").read_text())["paths"]
        assert all(os.path.lexists(folder / row["_path"]) for row in rows)
    return len(there)


def test_killed_at_any_moment_and_built_again(
    tmp_path: Path, base_tar: Path, made: MadeChannel, image: Image
) -> None:
    """What a kill left stands in nobody's way, and a collection takes it."""
    import pickle

    other = Factory(tmp_path, base_tar)
    lock = other.lock(made, *ALL)
    order = tmp_path / "order"
    order.write_bytes(pickle.dumps((tmp_path, other.define(lock), other.base, other.files)))
    moment, killed = 200, 0
    while was_killed(order, moment):
        whole_packages(other, lock)
        moment, killed = moment * 3 // 2, killed + 1
    assert killed >= 3
    assert whole_packages(other, lock) == len(lock.conda)
    assert other.build(lock).digest == image.digest
    collect(other.layout, QuietProgress())
    assert list(other.layout.tmp.iterdir()) == []
    assert other.says(other.build(lock), "tinytool") == "tinytool 1.0\n"


def test_what_was_unpacked_holds_whatever_was_refused(factory: Factory, image: Image, lock: Lock) -> None:
    assert whole_packages(factory, lock) == len(lock.conda)
