"""`verify` through the real unshare runner into a small image of this machine's own Python. The driver is a
stand-in and the machine's GPU made up, both handed in by the test: what comes out is a report that nobody's
settings trust.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.engines.base.image import write_index
from imagefactory.factory import Factory, read_factory
from imagefactory.lock.files import write_lock
from imagefactory.model import CheckState, Lock, LockedWheel, Outcome
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import CONFIG_TYPE, MANIFEST_TYPE, canonical_json, format_descriptor
from imagefactory.progress import Quiet
from imagefactory.runners.gpu_devices import GpuDevices
from imagefactory.runners.unshare import UnshareRunner
from imagefactory.settings.load import load_settings
from imagefactory.stages.define import define_target
from imagefactory.stages.lock import wanted_hash
from imagefactory.stages.verdicts import find_in, local_place, read_court
from imagefactory.stages.verify import VerifyBench, VerifyOptions
from imagefactory.suite.gpu import table
from imagefactory.verdicts.keys import keys_folder, make_key
from imagefactory.verdicts.model import Standing
from imagefactory.verify.evidence import LocalEvidence
from imagefactory.workflow import Verified, prove_image
from tests.services import libcuda
from tests.services.gpu_host import Told, make_host
from tests.services.sandbox import PYTHON, entry, host_files

ROOT = Path(__file__).parents[2]
NAME = "tiny-12.1-cu121"
RECIPE = f"""\
family: tiny
description: The CUDA runtime alone
source: pypi
framework: nvidia-cuda-runtime-cu12
platform: linux/amd64
base: debian-12
python: "{sys.version_info[0]}.{sys.version_info[1]}"
capabilities: ["8.0"]
checks: [packages]
matrix:
  - version: "12.1"
    cuda: ["12.1"]
"""


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """One locked target, and in the store an image that says it was made of that lock."""
    folder = tmp_path_factory.mktemp("gpu-verify")
    root = folder / "root"
    (root / "recipes").mkdir(parents=True)
    (root / "imagefactory.toml").write_text("")
    (root / "recipes/tiny.yaml").write_text(RECIPE)
    shutil.copy(ROOT / "recipes/bases.yaml", root / "recipes")
    environ = {
        "HOME": str(folder / "home"),
        "PATH": os.environ["PATH"],
        "IMAGEFACTORY_STORE": str(folder / "store"),
    }
    made = read_factory(load_settings(directory=root, start=root, environ=environ), environ)
    (target,) = made.targets
    wheel = LockedWheel(
        name=target.framework,
        version="12.1.105",
        filename="nvidia_cuda_runtime_cu12-12.1.105-py3-none-manylinux1_x86_64.whl",
        sha256="0" * 64,
        size=1,
    )
    lock = Lock(
        target=target.name,
        content_hash=wanted_hash(made, target),
        python=target.python,
        platform="manylinux_2_36_x86_64",
        solver="uv 0.9.1",
        wheels=(wheel,),
    )
    write_lock(made.lock_folder, lock)
    put_image(made)
    return made


def put_image(factory: Factory) -> None:
    (target,), layout = factory.targets, factory.layout
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder in ("usr", "usr/bin", "opt", "opt/env", "opt/env/bin", "etc"):
            archive.addfile(entry(folder, mode=0o755, kind=tarfile.DIRTYPE))
        for name in ("bin", "lib", "lib64"):
            archive.addfile(entry(name, mode=0o777, kind=tarfile.SYMTYPE, link=f"usr/{name}"))
        archive.addfile(entry("opt/env/bin/python", mode=0o777, kind=tarfile.SYMTYPE, link=PYTHON))
        for info, path in host_files():
            info.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(info, file)
    layer = layout.add(packed.getvalue(), "application/vnd.oci.image.layer.v1.tar")
    labels = dict(define_target(factory, target).labels)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin"], "Labels": labels},
        "rootfs": {"diff_ids": [layer.digest]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(layer)],
    }
    layout.tag(reference(target), write_index(layout, manifest, "linux/amd64"))


def verify(factory: Factory, folder: Path, lies: str = "") -> Verified:
    """On a made-up machine whose GPU is the stand-in's, through the runner that `verify` uses."""
    library = libcuda.build_libcuda(folder / "driver", lies)
    told = Told(uuid=libcuda.UUID, name=libcuda.NAME, memory=libcuda.MEMORY)
    devices = GpuDevices(devices=(), libraries=(str(library),), links=(), programs=(), driver=told.driver)
    runner = UnshareRunner(factory.layout, find=lambda: devices)
    bench = VerifyBench(evidence=LocalEvidence(places=make_host(folder / "host", told)), runner=runner)
    return prove_image(factory, NAME, VerifyOptions(level="quick", runner="unshare"), bench, Quiet())


def test_a_run_in_a_real_image_is_a_report_that_nobody_trusts(factory: Factory, tmp_path: Path) -> None:
    key = make_key(keys_folder(factory.environ), "throwaway")
    done = verify(factory, tmp_path)
    report = done.report
    assert report.outcome is Outcome.VERIFIED, report.reason
    assert report.device is not None
    assert (report.device.name, report.device.uuid) == (libcuda.NAME, libcuda.UUID)
    states = {check.name: check.state for check in report.checks}
    assert [name for name, state in states.items() if state is CheckState.PASSED] == list(
        table.PARTS["driver"]
    )
    assert done.signed.signed is not None
    assert done.signed.signed.verdict.keyid == key.keyid
    court = read_court(factory, datetime.now(UTC) + timedelta(minutes=1))
    (judged,) = find_in(factory, local_place(factory, "any"), done.chosen.subject, court).judged
    assert (judged.standing, judged.proves) == (Standing.WRONG_KEY, False)


@pytest.mark.parametrize(
    ("lies", "outcome"), [("kernel=wrong", Outcome.WRONG_NUMBERS), ("capability=", Outcome.NO_GPU)]
)
def test_a_lie_of_the_driver_is_seen(factory: Factory, tmp_path: Path, lies: str, outcome: Outcome) -> None:
    report = verify(factory, tmp_path, lies).report
    assert report.outcome is outcome, report.reason


def test_the_command_itself_takes_no_stand_in(factory: Factory, tmp_path: Path) -> None:
    """Neither variables nor libraries on the path make a GPU of a stand-in."""
    library = libcuda.build_libcuda(tmp_path)
    environ = {**factory.environ, "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "imagefactory", "-C", factory.settings.root.value, "verify", NAME]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert libcuda.NAME not in done.stdout
    if not Path("/proc/driver/nvidia/version").exists():
        assert done.returncode == 9
        assert f"error: {NAME}: no-gpu: no GPU" in done.stderr
