"""The rendered files of a conda target, built by the real docker and the real apptainer.

The channel is made here and served on 127.0.0.1 in the place of a public one, with a password; so is the
index that pip asks for rattler and for the wheel on top. Needs root, dockerd, apptainer, mmdebstrap with a
mirror, and an index with py-rattler.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import imagefactory.build
from imagefactory.build.apptainer import ApptainerEngine
from imagefactory.build.assemble import AssembleEngine
from imagefactory.build.base.image import BuiltBase
from imagefactory.build.definition import define
from imagefactory.build.docker import DockerEngine
from imagefactory.build.folders import render, write_definitions
from imagefactory.build.protocol import Engine
from imagefactory.build.secrets import BuildSecrets, find_secrets
from imagefactory.build.sif import SifBuilder
from imagefactory.errors import BuildError
from imagefactory.lock.conda.channels import ChannelAccess
from imagefactory.model import BuildSpec, Lock, LockedPackage, LockedWheel, Mount, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import LineProgress, QuietProgress
from imagefactory.runtime.apptainer import ApptainerRunner
from imagefactory.runtime.apptainer_command import ApptainerCommand
from imagefactory.runtime.docker import DockerRunner
from imagefactory.runtime.docker_daemon import DockerDaemon
from imagefactory.runtime.protocol import Runner
from imagefactory.runtime.unshare import UnshareRunner
from imagefactory.verify.report import SmokeTest
from imagefactory.verify.smoke import smoke
from tests.engines.docker_target import BASE, TARGET, Index, index_server, store_base
from tests.made.supplies import supplies
from tests.made.values import make_lock
from tests.made.wheels import locked, make_wheel
from tests.services.channel_made import PYTHON, MadeChannel, make_channel
from tests.services.channels import ChannelOptions, ChannelServer, Fault, channel_server
from tests.services.children import stdout_of
from tests.services.tier import many

CHANNEL = "https://conda.anaconda.org/made"
USER, CANARY, INDEX_CANARY = "ada", "canary-c0nda-Yt6w", "canary-1ndex-Ub2k"
LISTER = Path(__file__).parents[1] / "e2e" / "lister.py"
PACKAGES = (
    "python-3", "python-libs-", "python_abi-", "numpy-", "packaging-", "tinytool-1.1",
    "tinytorch-2.0-py311_cuda", "cuda-version-12.1", "cuda-cudart-", "tinyprefix-", "scripted-",
    "claims-a-", "claims-b-", "oddpaths-",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A store with a base, a target of conda packages with a wheel on top, and who serves its packages."""

    layout: Layout
    base: BuiltBase
    definition: BuildSpec
    channel: MadeChannel
    server: ChannelServer
    index: Index
    daemon: DockerDaemon
    apptainer: ApptainerCommand

    def secrets(self, lock: Lock | None) -> BuildSecrets:
        """As this machine reaches the channels that the engine names: by a mirror with a password."""
        channels = lock.channels if lock else ()
        assert channels == ((CHANNEL,) if channels else ())
        known = ChannelAccess(
            mirrors=((CHANNEL, f"{self.server.url}/made"),),
            credentials=(("127.0.0.1", {"BasicHTTP": {"username": USER, "password": CANARY}}),),
        )
        return find_secrets(self.index.found(), {}, known.site(channels))

    @property
    def docker(self) -> DockerEngine:
        return DockerEngine(self.layout, self.daemon, codec="zstd", secrets=self.secrets)

    def engine(self, name: str) -> Engine:
        if name == "docker":
            return self.docker
        if name == "assemble":
            return AssembleEngine(self.layout, self.layout.path / "cache", codec="zstd", workers=2)
        return ApptainerEngine(self.layout, self.apptainer, self.secrets)

    def packages(self) -> dict[LockedPackage, Path]:
        """Where the files are, for the engine that takes them from a cache."""
        lock, made = self.definition.lock, self.index.folder / "made"
        paths: dict[LockedPackage, Path] = {one: made / one.filename for one in lock.wheels}
        paths.update({one: self.channel.folder / one.subdir / one.filename for one in lock.conda})
        return paths

    def apptainer_inspect(self, sif: SifArtifact) -> str:
        command = ["apptainer", "inspect", "--all", str(sif.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def runner(self, engine: str) -> Runner:
        if engine == "docker":
            return DockerRunner(self.layout, self.daemon)
        if engine == "assemble":
            return UnshareRunner(self.layout)
        maker = SifBuilder(self.layout, self.apptainer, workers=2)
        return ApptainerRunner(self.apptainer, lambda image: maker.make(image, "x", "fast", QuietProgress()))

    def changed(self, label: str, **changes: Any) -> BuildSpec:
        """Another definition of the target, so that nothing made before answers for it."""
        lock = replace(self.definition.lock, **changes)
        return replace(self.definition, lock=lock, labels=(*self.definition.labels, ("changed", label)))


def rattler_requirements() -> Path:
    return Path(imagefactory.build.__file__).parent / "rattler.txt"


def publish(folder: Path, wheel: Path) -> None:
    place = folder / "simple" / wheel.name.split("-")[0].replace("_", "-")
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(wheel, place)
    (place / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="conda-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def wheel(scratch: Path) -> LockedWheel:
    """The wheel on top, on the index beside the rattler that this machine's own index has."""
    folder = scratch / "index"
    (folder / "made").mkdir(parents=True)
    made = make_wheel(folder / "made", "tinywheel", {"tinywheel.py": b"import tinytool\n\nVALUE = 8\n"})
    publish(folder, made)
    subprocess.run([sys.executable, "-m", "venv", scratch / "pip"], check=True)
    options = f"--quiet --no-deps --require-hashes --dest {folder}/rattler --requirement"
    command = [f"{scratch}/pip/bin/pip", "download", *options.split(), str(rattler_requirements())]
    subprocess.run(command, check=True)
    (rattler,) = (folder / "rattler").glob("py_rattler-*.whl")
    publish(folder, rattler)
    return locked(made)


@pytest.fixture(scope="module")
def bench(
    scratch: Path, wheel: LockedWheel, debian_tar: Path, dockerd: str, apptainer: str
) -> Iterator[Bench]:
    channel = make_channel(scratch / "channels" / "made")
    target = replace(
        TARGET,
        name="tinytorch-2.0-cu121",
        family="tinytorch",
        source="conda",
        framework="tinytorch",
        version="2.0",
        python=PYTHON,
        checks=("packages", "libraries", "import", "unprivileged"),
        requirements=("tinytorch 2.0.*",),
        channels=(CHANNEL,),
        virtual=(("__archspec", "x86_64"), ("__cuda", "12.1"), ("__glibc", "2.36")),
        pip=("tinywheel",),
    )
    lock = replace(
        _lock_of(target.name),
        python=PYTHON,
        conda=channel.locked(*PACKAGES, address=CHANNEL),
        channels=target.channels,
        virtual=target.virtual,
        wheels=(wheel,),
    )
    layout = Layout(scratch / "store")
    users = ChannelOptions(users={USER: CANARY})
    with (
        index_server(scratch / "index", user="bob", password=INDEX_CANARY) as index,
        channel_server(scratch / "channels", users) as server,
        layout.in_use(QuietProgress()),
    ):
        yield Bench(
            layout=layout,
            base=store_base(layout, debian_tar),
            definition=define(target, BASE, lock),
            channel=channel,
            server=server,
            index=index,
            daemon=DockerDaemon({**os.environ, "DOCKER_HOST": dockerd}),
            apptainer=ApptainerCommand(os.environ),
        )


def _lock_of(name: str) -> Lock:
    return make_lock(target=name, python=PYTHON, solver="py-rattler 0.28.0, uv 0.9.1", wheels=())


@dataclass(frozen=True, kw_only=True)
class Made:
    """What an engine made, what it told of it, and what lister.py saw inside."""

    made: Image | SifArtifact
    told: str
    inside: Mapping[str, Any]

    @property
    def contents(self) -> dict[str, tuple[bool, str]]:
        """Path -> whether it can be run, and its content; without byte code and an installer's own notes."""
        return {
            path: (executable, content)
            for path, (_, executable, content) in self.inside["files"].items()
            if not path.endswith(".pyc") and not path.endswith(INSTALLERS_OWN)
        }


RENDERED = ("docker", "apptainer")
ENGINES = ("assemble", *RENDERED)
RUNNERS = {"assemble": "unshare", "docker": "docker", "apptainer": "apptainer"}
INSTALLERS_OWN = tuple(f"tinywheel-1.0.dist-info/{name}" for name in ("INSTALLER", "RECORD", "REQUESTED"))


@pytest.fixture(scope="module")
def made(bench: Bench) -> dict[str, Made]:
    """By engine."""
    return {engine: make(bench, engine, bench.definition) for engine in ENGINES}


def make(bench: Bench, name: str, definition: BuildSpec) -> Made:
    engine, told = bench.engine(name), io.StringIO()
    made = engine.build(definition, supplies(bench.base, bench.packages), LineProgress(told))
    assert engine.find(definition, bench.base) == made
    if name == "assemble":
        assert isinstance(made, Image)
        UnpackedLayers(bench.layout.path / "unpacked").unpack(
            made.layers, bench.layout.blob_path, QuietProgress()
        )
    return Made(made=made, told=told.getvalue(), inside=json.loads(run(bench, name, made, "/mnt/lister.py")))


def run(bench: Bench, name: str, made: Image | SifArtifact, *arguments: str) -> str:
    tools = bench.layout.path / "tools"
    tools.mkdir(exist_ok=True)
    shutil.copy(LISTER, tools)
    argv = ("python", "-B", *arguments)
    spec = RunSpec(argv=argv, mounts=(Mount(source=tools, target="/mnt"),))
    done = bench.runner(name).run(made, spec)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- what the engines leave ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_the_image_passes_the_smoke_test(bench: Bench, made: dict[str, Made], engine: str) -> None:
    trial = SmokeTest(
        image=made[engine].made, definition=bench.definition, nonce="5eed", runner=RUNNERS[engine]
    )
    report = smoke(
        trial,
        bench.runner(engine),
        QuietProgress(),
        records=bench.layout.path / "checks",
        scratch=bench.layout.scratch,
    )
    details = {check.name: (check.state.value, check.detail) for check in report.checks}
    assert report.passed, details
    assert {state for state, _ in details.values()} == {"passed"}
    assert details["packages"][1].startswith("15 packages (14 of conda) as locked")
    assert "1 more that scripts of scripted may have made" in details["packages"][1]
    assert details["import"][1].startswith("tinytorch of tinytorch 2.0")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_environment_is_condas(bench: Bench, made: dict[str, Made], engine: str) -> None:
    inside = made[engine].inside
    assert inside["prefix"] == "/opt/env"
    assert inside["environment"]["CONDA_PREFIX"] == "/opt/env"
    assert "VIRTUAL_ENV" not in inside["environment"]
    assert inside["unreadable"] == []
    assert {"numpy", "tinytorch", "tinytool", "tinywheel"} <= inside["packages"].keys()
    program = (
        "import os, subprocess, tinytorch, tinywheel, ctypes\n"
        "print(tinytorch.cuda, tinytorch.library(), tinytorch.matmul([[2]], [[3]]), tinywheel.VALUE)\n"
        "print(subprocess.check_output(['tinytool'], text=True).strip(), '/',\n"
        "      subprocess.check_output(['tinyprefix'], text=True).strip())\n"
        "print(open('/opt/env/share/tinyprefix.txt').read().strip())\n"
        "print(open('/opt/env/etc/scripted.txt').read().strip())\n"
        "library = ctypes.CDLL('/opt/env/lib/libtinyprefix.so')\n"
        "library.tinyprefix.restype = ctypes.c_char_p\n"
        "print(library.tinyprefix().decode(), sorted(os.listdir('/opt')), os.listdir('/mnt'))\n"
    )
    told = run(bench, engine, made[engine].made, "-c", program).splitlines()
    assert told == [
        "12.1 2.0 cuda12.1 [[6]] 8",
        "tinytool 1.1 / /opt/env/share",
        "home=/opt/env",
        "42",
        "/opt/env/share/tinyprefix ['env'] ['lister.py']",
    ]


def test_the_engines_hold_the_same(made: dict[str, Made]) -> None:
    first, *others = made.values()
    assert len(first.contents) > 500
    for other in others:
        assert other.inside["packages"] == first.inside["packages"]
        differing = {
            path
            for path in first.contents.keys() | other.contents.keys()
            if first.contents.get(path) != other.contents.get(path)
        }
        assert differing == set()


def test_what_is_built_on_stays_as_it_is_by_every_engine(bench: Bench) -> None:
    """Alone, claims-a would keep the path that it and claims-b bring; here it comes later."""
    conda, target = bench.definition.lock.conda, bench.definition.target
    names = {"python", "python-libs", "python_abi", "numpy", "tinytorch", "cuda-version", "cuda-cudart"}
    below = replace(
        bench.definition.lock,
        target="below-2.0-cu121",
        conda=tuple(package for package in conda if package.name in {*names, "claims-b"}),
        wheels=(),
    )
    lock = replace(
        below, target=target.name, conda=tuple(p for p in conda if p in below.conda or "-a" in p.name)
    )
    definition = define(replace(target, on=below.target), BASE, lock, (below,))
    seen = [make(bench, engine, definition).contents for engine in many(("assemble", "docker"), ENGINES)]
    assert all(one == seen[0] for one in seen[1:])
    winner = seen[0]["share/claims/different.txt"][1]
    assert winner == hashlib.sha256(b"of b\n").hexdigest()
    assert "share/claims/a.txt" in seen[0]


def test_the_definitions_own_test_passes(bench: Bench, made: dict[str, Made]) -> None:
    assert isinstance(made["apptainer"].made, SifArtifact)
    command = ["apptainer", "test", str(made["apptainer"].made.path)]
    stdout_of(command)


def test_nobody_but_the_build_learns_of_passwords(bench: Bench, made: dict[str, Made]) -> None:
    docker, apptainer = made["docker"], made["apptainer"]
    assert isinstance(docker.made, Image)
    assert isinstance(apptainer.made, SifArtifact)
    config = bench.layout.blob_path(docker.made.config).read_text()
    shown = json.dumps([config, docker.inside, apptainer.inside])
    for text in (docker.told, apptainer.told, shown):
        assert CANARY not in text
        assert INDEX_CANARY not in text
        assert bench.server.url not in text
    definition = bench.apptainer_inspect(apptainer.made)
    assert CANARY not in definition
    assert bench.server.url not in definition


# --- what stops a build ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", many(("docker",), RENDERED))  # both run one install.py
def test_a_package_that_is_not_the_locked_one_stops_the_build(bench: Bench, engine: str) -> None:
    packages = bench.definition.lock.conda
    other = tuple(replace(p, sha256="0" * 64) if p.name == "tinytool" else p for p in packages)
    with pytest.raises(BuildError) as caught:
        bench.engine(engine).build(
            bench.changed("hash", conda=other), supplies(bench.base, bench.packages), QuietProgress()
        )
    assert ": tinytool-1.1-py_0.conda has the wrong hash: expected sha256 000" in caught.value.message
    assert "\n" not in caught.value.message
    assert "has another file than the locked one" in caught.value.hint


def test_a_channel_that_refuses_or_is_down_is_named(bench: Bench) -> None:
    faults = {  # each with a package less, so that BuildKit's cache has no answer
        "oddpaths": (Fault(status=404), "HTTP status client error (404 Not Found)"),
        "scripted": (Fault(cut="connection", times=2), ""),  # fetched again
    }
    for left_out, (fault, words) in faults.items():
        bench.server.fail("claims-a", fault)
        conda = tuple(package for package in bench.definition.lock.conda if package.name != left_out)
        try:
            build = (
                bench.changed(left_out, conda=conda),
                supplies(bench.base, bench.packages),
                QuietProgress(),
            )
            if not words:
                bench.docker.build(*build)
                continue
            with pytest.raises(BuildError) as caught:
                bench.docker.build(*build)
            assert caught.value.message.endswith(f"{CHANNEL}/linux-64/claims-a-1.0-h1_0.conda: {words}")
        finally:
            bench.server.mend()


# --- by hand ---------------------------------------------------------------------------------------


def test_the_folder_is_all_that_a_build_by_hand_needs(bench: Bench, scratch: Path) -> None:
    """With the secrets that the Dockerfile's head tells of, by nothing but docker."""
    folder = scratch / "by-hand"
    write_definitions(folder, render(bench.definition))
    secrets = scratch / "secrets"
    secrets.mkdir()
    bench.secrets(bench.definition.lock).write(secrets)
    environ = dict(bench.daemon.environ)
    base = bench.daemon.ensure(bench.layout, bench.base.image, "imagefactory/base:by-hand", QuietProgress())
    bench.daemon.tag(base, "imagefactory/base:by-hand")
    command = ["docker", "build", "--quiet", "--network=host", "--build-arg=BASE=imagefactory/base:by-hand"]
    given = [f"--secret=id={file.name},src={file}" for file in sorted(secrets.iterdir())]
    output = stdout_of([*command, *given, str(folder)], env=environ)
    argv = ["docker", "run", "--rm", output.strip(), "python", "-c", "import tinytorch, tinywheel"]
    stdout_of(argv, env=environ)
