"""Kits on the real docker and apptainer, with a small image of a real registry. There is no GPU: where one is
wanted, the driver inside is a stand-in and the machine around it made up, both handed in by the test, and a
throwaway key signs what nobody's settings trust.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions.transfer import PushOptions, export_sif, push_target
from imagefactory.actions.verdicts import find_in, read_verification_policy, registry_of
from imagefactory.actions.verify import (
    CollectOptions,
    KitDestination,
    KitResult,
    VerifyOptions,
    collect,
    write_kit,
)
from imagefactory.errors import CheckFailedError, NoGpuError
from imagefactory.model import Outcome
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.runtime.hardware import Places
from imagefactory.settings.choices import SettingValue
from imagefactory.suite.gpu import table
from imagefactory.trust.keys import keys_directory, make_key
from imagefactory.trust.policy import TrustGrant, add_key
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.verify.report import EVIDENCE_KIT
from tests.services import libcuda
from tests.services.apptainer import ORDINARY_UID, as_ordinary_user
from tests.services.children import stdout_of
from tests.services.gpu_factory import NAME
from tests.services.gpu_host import Told, make_host

INSIDE = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"

# The real program, and inside what NVIDIA's own runtime or --nv would bring: the driver's library.
WRAPPER = """\
#!/usr/bin/python3 -I
import os, sys
argv = sys.argv[1:]
mount = ["--mount", "type=bind,source={library},destination={inside},readonly"]
if argv[:1] == ["run"]:
    at = argv.index("--gpus")
    argv[at : at + 2] = mount
elif "exec" in argv:
    at = argv.index("exec") + 1
    argv[at:at] = [mount[0], mount[1].replace("readonly", "ro")]
os.execv("{program}", ["{program}", *argv])
"""

# run.py on a machine that is made up: it takes no such thing on its command line.
ON_A_MADE_UP_MACHINE = """\
import importlib.machinery, importlib.util, json, os, sys
from pathlib import Path
folder, places = Path(sys.argv[1]), json.loads(sys.argv[2])
spec = importlib.machinery.ModuleSpec("imagefactory_kit", None, is_package=True)
spec.submodule_search_locations = [str(folder / "kit")]
sys.modules["imagefactory_kit"] = importlib.util.module_from_spec(spec)
from imagefactory_kit import hardware, program
sys.exit(program.main(sys.argv[3:], os.environ, folder, hardware.Places(*places)))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A pushed image, the machine that is to verify it, and programs with a stand-in for its driver."""

    factory: Project
    registry: str
    host: Places
    folder: Path

    def kit(self, name: str, level: str = "quick") -> Path:
        options = VerifyOptions(level=level, registry=self.registry)
        write_kit(self.factory, NAME, options, KitDestination(folder=self.folder / name), QuietProgress())
        return self.folder / name

    def collects(self, kit: Path, *, promote: bool = False) -> KitResult:
        now = datetime.now(UTC) + timedelta(seconds=1)
        return collect(self.factory, kit, CollectOptions(promote=promote), now, QuietProgress())

    def programs(self, lies: str = "", into: Path | None = None) -> Path:
        """A folder for PATH: docker and apptainer that bring the stand-in, told to lie, into the image."""
        found = into or self.folder / f"bin {lies}"
        if not found.exists():
            library = libcuda.build_libcuda(found, lies)
            for name in ("docker", "apptainer"):
                program = shutil.which(name)
                assert program
                text = WRAPPER.format(library=library, inside=INSIDE, program=program)
                (found / name).write_text(text)
                (found / name).chmod(0o755)
        return found

    def judged(self, done: KitResult) -> tuple[VerdictStatus, bool]:
        place = registry_of(self.factory, "tiny", self.registry)
        court = read_verification_policy(self.factory, datetime.now(UTC) + timedelta(minutes=1))
        found = find_in(self.factory, place, done.report.subject, court).judged
        newest = max(found, key=lambda one: one.verdict.issued if one.verdict else datetime.min)
        return newest.standing, newest.proves


@pytest.fixture(scope="module")
def ground(
    factory: Project,
    registry: str,
    dockerd: str,
    apptainer: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Ground]:
    environ = {**factory.environ, "DOCKER_CONFIG": os.environ["DOCKER_CONFIG"]}
    plain = SettingValue(value=registry, origin="the test")
    mine = replace(factory, environ=environ, settings=replace(factory.settings, plain_http=plain))
    push_target(mine, mine.targets[0], PushOptions(now=datetime.now(UTC), registry=registry), QuietProgress())
    make_key(keys_directory(environ), "throwaway")
    folder = tmp_path_factory.mktemp("kits")
    told = Told(uuid=libcuda.UUID, name=libcuda.NAME, memory=libcuda.MEMORY)
    host = make_host(folder / "host", told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", dockerd)
        yield Ground(factory=mine, registry=registry, host=host, folder=folder)


def plainly(kit: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """As its user would, on this machine, which has no GPU."""
    command = [sys.executable, "-I", "-S", str(kit / "run.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def made_up(ground: Ground, kit: Path, *argv: str, programs: Path | None) -> subprocess.CompletedProcess[str]:
    """On the made-up machine, with the programs of `programs`, or the real ones."""
    path = f"{programs}:{os.environ['PATH']}" if programs else os.environ["PATH"]
    command = [sys.executable, "-I", "-S", "-c", ON_A_MADE_UP_MACHINE, str(kit)]
    command += [json.dumps(ground.host), *argv]
    environ = {**os.environ, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)


@pytest.mark.parametrize("runner", ["docker", "apptainer"])
def test_without_a_gpu_a_kit_says_so_and_nothing_can_be_made_of_it(ground: Ground, runner: str) -> None:
    kit = ground.kit(f"no-gpu-{runner}")
    done = plainly(kit, "--runner", runner)
    assert done.returncode == 9, done.stderr
    assert "no-gpu" in done.stderr
    assert [path.name for path in (kit / "result").iterdir()] == ["run.json"]
    with pytest.raises(NoGpuError, match="no-gpu"):
        ground.collects(kit, promote=True)


@pytest.mark.parametrize("runner", ["docker", "apptainer"])
def test_a_kit_runs_the_suite_in_the_image_and_comes_back_as_a_verdict(ground: Ground, runner: str) -> None:
    kit = ground.kit(f"good-{runner}")
    done = made_up(ground, kit, "--runner", runner, programs=ground.programs())
    assert done.returncode == 0, done.stderr
    collected = ground.collects(kit)
    report = collected.report
    assert (report.outcome, report.runner) == (Outcome.VERIFIED, runner), report.reason
    assert report.device is not None
    assert report.device.uuid == libcuda.UUID
    assert report.hardware is not None
    assert report.hardware.kind == EVIDENCE_KIT
    passed = [check.name for check in report.checks if check.state.value == "passed"]
    assert passed == list(table.PARTS["driver"])
    assert f"{ground.registry}/tiny" in collected.attached
    assert ground.judged(collected) == (VerdictStatus.WRONG_KEY, False)


def docker_has(reference: str) -> bool:
    argv = ["docker", "image", "inspect", reference]
    return subprocess.run(argv, capture_output=True).returncode == 0


def test_the_image_that_docker_pulled_goes_unless_it_is_kept(ground: Ground) -> None:
    kits = [ground.kit(name) for name in ("gone", "kept", "stays")]
    reference = json.loads((kits[0] / "kit.json").read_bytes())["reference"]
    subprocess.run(["docker", "image", "rm", "--force", reference], capture_output=True)
    run = ("--runner", "docker")
    assert made_up(ground, kits[0], *run, programs=ground.programs()).returncode == 0
    assert not docker_has(reference)
    assert made_up(ground, kits[1], *run, "--keep", programs=ground.programs()).returncode == 0
    assert docker_has(reference)
    assert made_up(ground, kits[2], *run, programs=ground.programs()).returncode == 0
    assert docker_has(reference)  # it was there before
    subprocess.run(["docker", "image", "rm", reference], check=True, capture_output=True)


def test_apptainers_cache_gets_nothing_unless_it_is_kept(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path))
    for argv, cached in ((), False), (("--keep",), True):
        kit = ground.kit(f"cache-{len(argv)}")
        done = made_up(ground, kit, "--runner", "apptainer", *argv, programs=ground.programs())
        assert done.returncode == 0, done.stderr
        assert any(path.stat().st_size > 10_000 for path in tmp_path.rglob("*") if path.is_file()) == cached
        assert not list(kit.rglob("*.sif"))


def test_without_a_network_a_sif_of_the_store_stands_for_the_image(ground: Ground) -> None:
    sif, path = export_sif(
        ground.factory,
        ground.factory.targets[0],
        QuietProgress(),
        output=ground.folder / "tiny.sif",
    )
    kit = ground.kit("offline")
    done = made_up(ground, kit, "--runner", "apptainer", "--image", str(path), programs=ground.programs())
    assert done.returncode == 0, done.stderr
    assert "pulling" not in done.stderr
    report = ground.collects(kit).report
    assert (report.outcome, report.subject.manifest) == (Outcome.VERIFIED, sif.made_from)


def test_an_ordinary_user_runs_a_kit_by_apptainer(ground: Ground, tmp_path: Path) -> None:
    """As on most clusters: no root, no docker, and a home of one's own."""
    kit = ground.kit("ordinary")
    with tempfile.TemporaryDirectory() as name:
        for folder in (kit.name, "host"):
            shutil.copytree(ground.folder / folder, Path(name, "there", folder), symlinks=True)
        programs = ground.programs(into=Path(name, "bin"))
        subprocess.run(["chown", "--recursive", "--no-dereference", str(ORDINARY_UID), name], check=True)
        there = Path(name, "there")
        host = [str(there / Path(place).relative_to(ground.folder)) for place in ground.host]
        python = ["/usr/bin/python3", "-I", "-S", "-c", ON_A_MADE_UP_MACHINE, str(there / "ordinary")]
        stdout_of(
            as_ordinary_user(tmp_path, [*python, json.dumps(host), "--runner", "apptainer"]),
            timeout=300,
            cwd="/",
            env={"PATH": f"{programs}:{os.environ['PATH']}", "HOME": name},
        )
        shutil.copytree(there / "ordinary/result", kit / "result")
    assert ground.collects(kit).report.outcome is Outcome.VERIFIED


def test_a_lie_of_the_driver_comes_back_too(ground: Ground) -> None:
    kit = ground.kit("lie")
    done = made_up(ground, kit, "--runner", "docker", programs=ground.programs("kernel=wrong"))
    assert done.returncode == 9, done.stderr
    assert ground.collects(kit).report.outcome is Outcome.WRONG_NUMBERS


def test_a_docker_without_nvidias_runtime_has_not_run_it(ground: Ground) -> None:
    kit = ground.kit("no-runtime")
    done = made_up(ground, kit, "--runner", "docker", programs=None)
    assert done.returncode == 6, done.stderr
    assert "could not select device driver" in done.stderr
    with pytest.raises(CheckFailedError, match="infrastructure"):
        ground.collects(kit)


@pytest.mark.parametrize("runner", ["docker", "apptainer"])
def test_an_image_that_hangs_is_ended_with_all_that_it_started(ground: Ground, runner: str) -> None:
    kit = ground.kit(f"hang-{runner}")
    row = json.loads((kit / "kit.json").read_bytes())
    (kit / "kit.json").write_text(json.dumps({**row, "timeout": 5.0}))
    done = made_up(ground, kit, "--runner", runner, programs=ground.programs("hang=cuInit"))
    assert done.returncode == 9, done.stderr
    assert json.loads((kit / "result/run.json").read_bytes())["timed_out"]
    until = time.monotonic() + 60
    while seeing(kit) and time.monotonic() < until:  # what was killed takes a moment to be gone
        time.sleep(0.05)
    assert seeing(kit) == []


def seeing(kit: Path) -> list[str]:
    """The processes that this kit's suite is mounted for, of whatever container."""
    work = f"{kit.parent.name}/{kit.name}/.work-"
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/mountinfo") if work in _read(path)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def check_nodes(ground: Ground) -> None:
    """A kit for nodes runs again and again, and writes nothing into its directory."""
    kit = ground.kit("node", "node")
    before = sorted(path.name for path in kit.iterdir())
    reference = json.loads((kit / "kit.json").read_bytes())["reference"]
    subprocess.run(["docker", "image", "rm", "--force", reference], capture_output=True)
    done = made_up(ground, kit, "--runner", "docker", programs=ground.programs())
    assert (done.returncode, docker_has(reference)) == (8, False), done.stderr
    subprocess.run(["docker", "pull", "--quiet", reference], check=True, capture_output=True)
    for lies, code, word in (("", 0, "passed"), ("kernel=wrong", 9, "failed")):
        done = made_up(ground, kit, "--runner", "docker", programs=ground.programs(lies))
        assert (done.returncode, done.stdout.count("\n")) == (code, 1), done.stderr
        assert done.stdout.startswith(f'ImagefactoryNode = "{word}: ')
    done = made_up(ground, kit, "--runner", "apptainer", programs=ground.programs())
    assert done.returncode == 2, done.stderr  # apptainer runs a .sif, which nobody named
    assert sorted(path.name for path in kit.iterdir()) == before


def test_trusted_and_promoted_the_tag_of_the_capability_follows(ground: Ground) -> None:
    kit = ground.kit("promoted")
    made_up(ground, kit, "--runner", "docker", programs=ground.programs())
    folder = keys_directory(ground.factory.environ)
    from imagefactory.trust.keys import read_public

    today = datetime.now(UTC).date()
    grant = TrustGrant(
        key=read_public("throwaway", folder), since=today - timedelta(days=1), until=today + timedelta(days=2)
    )
    settings = ground.factory.settings.root_path / "imagefactory.toml"
    before = settings.read_text()
    settings.write_text(add_key(before, grant, settings.name))
    try:
        done = ground.collects(kit, promote=True)
        assert ground.judged(done) == (VerdictStatus.GOOD, True)
        assert done.promotion is not None
        assert "12.1-cu121-sm80" in [fate.tag for fate in done.promotion.fates if fate.moved]
        check_nodes(ground)
    finally:
        settings.write_text(before)
