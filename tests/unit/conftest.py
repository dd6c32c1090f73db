"""For all of these tests: what a developer or his site has set on this machine is none of their business."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from imagefactory.actions import build, plan, sweep_images
from imagefactory.actions import transfer as pushing
from imagefactory.cli import sweeps
from imagefactory.cli import sweeps as cancel
from imagefactory.cli import sweeps as status
from imagefactory.errors import BuildError, UnreachableError
from imagefactory.model import Target
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import Image
from imagefactory.plugins import has_extra
from imagefactory.project import Project, load_project
from imagefactory.schedulers.htcondor.pool import HTCondor
from imagefactory.schedulers.inventory import write_inventory
from imagefactory.settings import files
from imagefactory.settings.load import ENVIRONMENT_PREFIX, load_settings
from imagefactory.trust.keys import keys_directory, make_key
from imagefactory.trust.policy import TrustGrant, add_key
from tests.made.command import Call, Said, say
from tests.made.deep import MakeDeep, make_deep
from tests.made.factory import NAME, put_image
from tests.made.families import make_root
from tests.made.programs import Program
from tests.made.pushed import push, put_base, put_built
from tests.made.registry import RegistryMadeHere, Ways, registry_made_here
from tests.made.signing import Bench
from tests.made.sweep import PoolMadeHere
from tests.made.sweep_site import Site
from tests.made.trusted import write_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def site_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Not its settings, trust and keys, in files and variables, nor its umask: a test makes its own.

    Gives where a site's settings are on a machine where no test runs.
    """
    empty = str(tmp_path_factory.mktemp("no-settings"))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith((ENVIRONMENT_PREFIX, "XDG_"))]:
            patch.delenv(name)
        patch.setenv("HOME", empty)
        patch.setenv("XDG_CONFIG_DIRS", empty)
        real = files.SITE_CONFIG_DIRS
        patch.setattr(files, "SITE_CONFIG_DIRS", empty)  # of tests that name an environment
        umask = os.umask(0o022)
        yield real
        os.umask(umask)


@pytest.fixture(name="make_deep")
def deep_maker(tmp_path: Path) -> Iterator[MakeDeep]:
    """`make_deep` in `tmp_path`, which goes at the end: pytest recurses into what a failed test leaves."""
    yield make_deep
    subprocess.run(["rm", "-rf", tmp_path], check=True)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command line in this process, on a store and cache of the test's own."""
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("IMAGEFACTORY_CACHE", str(tmp_path / "cache"))

    return lambda *arguments, root=ROOT: say(capsys, *(("-C", str(root)) if root else ()), *arguments)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index, no channel and no Debian archive answers `new`."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnreachableError("index-unreachable", "cannot reach the index", hint="check the network")

    if has_extra("importers"):
        monkeypatch.setattr("imagefactory.extras.importers.new.solve_target", refuse)
        monkeypatch.setattr("imagefactory.extras.importers.new.unknown_debian_packages", refuse)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the repository's recipes and locks that a test may break."""
    folder = tmp_path / "root"
    for name in ("recipes", "lockfiles"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "definitions").mkdir()
    return folder


@pytest.fixture
def call_families(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Call:
    """The command line on a factory of the families `one` and `two`; it must end with `code`."""
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("IMAGEFACTORY_CACHE", str(tmp_path / "cache"))
    root = make_root(tmp_path / "root")

    def run(*arguments: str, store: str = "store", code: int = 0) -> Said:
        monkeypatch.setenv("IMAGEFACTORY_STORE", str(tmp_path / store))
        said = say(capsys, "-C", str(root), *arguments)
        assert said.code == code, said
        return said

    return run


@pytest.fixture(params=[False], ids=["fallback"])
def bench(
    request: pytest.FixtureRequest, call_families: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    call = call_families
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    call("key", "create", "lab")
    # Some verdicts are minutes old, and just after midnight those are of yesterday.
    yesterday = datetime.now(UTC) - timedelta(days=1)
    call("key", "trust", "lab", "--since", yesterday.strftime("%Y-%m-%d"))
    with registry_made_here(Ways(referrers=request.param)) as made:
        yield Bench(call, tmp_path, made)


@pytest.fixture
def factory(tmp_path: Path) -> Project:
    """A factory of the family pytorch, of which one target is locked."""
    root = tmp_path / "root"
    for folder in ("recipes", "lockfiles/bases"):
        (root / folder).mkdir(parents=True)
    files = ("recipes/bases.yaml", "recipes/pytorch.yaml", f"lockfiles/{NAME}.requirements.txt")
    for name in (*files, "lockfiles/bases/debian-12.lock"):
        shutil.copy(ROOT / name, root / name)
    environ = {
        "HOME": str(tmp_path / "home"),
        "PATH": os.environ["PATH"],
        "IMAGEFACTORY_STORE": str(tmp_path / "store"),
        "IMAGEFACTORY_CACHE": str(tmp_path / "cache"),
    }
    write_settings(root, "", environ)
    return load_project(load_settings(directory=root, start=root, environ=environ), environ)


@pytest.fixture
def target(factory: Project) -> Target:
    return next(one for one in factory.targets if one.name == NAME)


@pytest.fixture
def registry() -> Iterator[RegistryMadeHere]:
    with registry_made_here() as made:
        yield made


@pytest.fixture
def pushed(factory: Project, target: Target, registry: RegistryMadeHere) -> str:
    """The digest of the candidate that a push of what the lock gives left in the registry."""
    put_base(factory, target)
    put_built(factory, target)
    return push(factory, target, registry)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder that is all of PATH: what is not made there is not installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.fixture
def program(programs: Path, tmp_path: Path) -> Program:
    """Makes a command that notes where it is called with what, prints and ends."""

    def make(name: str, prints: str = "", *, fails: str = "", code: int = 0) -> None:
        (tmp_path / f"{name}.out").write_text(prints)
        (tmp_path / f"{name}.err").write_text(fails)
        file = programs / name
        file.write_text(
            f'#!/bin/sh\nprintf \'%s\\n\' "$PWD" {name} "$@" END >>{tmp_path}/calls\n'
            f'while IFS= read -r line; do printf "%s\\n" "$line"; done <{tmp_path}/{name}.out\n'
            f'while IFS= read -r line; do printf "%s\\n" "$line"; done <{tmp_path}/{name}.err >&2\n'
            f"exit {code}\n"
        )
        file.chmod(0o755)

    return make


@pytest.fixture
def condor(programs: Path) -> HTCondor:
    return HTCondor(environ={"PATH": str(programs)})


@pytest.fixture
def site(
    factory: Project, target: Target, registry: RegistryMadeHere, monkeypatch: pytest.MonkeyPatch
) -> Site:
    """A factory with an image and a trusted key, a registry, and a pool of two GPUs. Nothing can be built."""

    def find_built(factory: Project, target: Target) -> Image | None:
        return factory.layout.image(reference(target))

    def build_target(*_: object) -> None:
        raise BuildError("test-problem", "nothing is built in this test")

    for stage in (build, plan, pushing, sweep_images):
        monkeypatch.setattr(stage, "find_built", find_built)
    monkeypatch.setattr(sweep_images, "build_target", build_target)
    put_image(factory, target)
    key = make_key(keys_directory(factory.environ), "lab")
    today = datetime.now(UTC).date()
    grant = TrustGrant(key=key, since=today - timedelta(days=1), until=today + timedelta(days=9))
    write_settings(factory.settings.root_path, add_key("", grant, "imagefactory.toml"), factory.environ)
    return Site(factory=factory, target=target, registry=registry, pool=PoolMadeHere())


@pytest.fixture
def pool(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PoolMadeHere:
    """The commands see this site's pool, store and root, and an inventory in `pool.json`."""
    for name, value in site.factory.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(site.factory.settings.root_path)
    for module in (cancel, status, sweeps):
        monkeypatch.setattr(module, "find_pool", site.opens)
    monkeypatch.setattr(sweeps, "POLL", 0.0)
    bench = sweeps.sweep_dependencies
    monkeypatch.setattr(sweeps, "sweep_dependencies", lambda: replace(bench(), pause=lambda _: None))
    write_inventory(tmp_path / "pool.json", site.pool.gpus)
    return site.pool
