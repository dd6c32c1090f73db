"""T0 on the stand-in for HIP: what is right passes, each lie is seen, with the tables' word for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from imagefactory.model import CommandResult, Outcome, RunSpec
from imagefactory.oci.manifests import Image
from imagefactory.suite.gpu import table
from imagefactory.suite.gpu.context import Predicted
from imagefactory.verify.evidence import AmdPlaces, read_amd
from imagefactory.verify.gpu_run import GpuRequest, GpuTrial, verify_gpu
from imagefactory.verify.report import GpuReport, Hardware, VerifiedImage
from tests.made.amd import UNIQUE, make_amd_machine
from tests.made.gpu_suite import Ground, copy_suite, make_expectations
from tests.made.trial import PREFIX, ProcessRunner, make_definition, make_trial
from tests.made.verdicts import HOST, digest

SOURCE = Path(__file__).parents[1] / "services/libhip.c"
LIBRARIES = ("libamdhip64.so.7", "libhiprtc.so.7")
GOOD = make_expectations(
    capability="gfx90a", framework="numpy", packages={"numpy": "2.0.0"}, cuda="rocm7", driver="", predicted={}
)
# What the stand-in is told -> (the check that fails, its word, a part of what it says).
LIES = {
    "processor=": ("driver", "no-gpu", "hipErrorNoDevice (100): no ROCm-capable device"),
    "fail=hipInit:303": ("driver", "load-failed", "HIP error 303"),
    "fail=hipInit:304": ("driver", "infrastructure", "HIP error 304"),
    "processor=gfx1100": ("device", "wrong-gpu", "capability gfx90a was asked for, this is stand-in"),
    "processor=none": ("device", "load-failed", "the result contains no processor name"),
    "fail=hipMalloc:2": ("vector-add", "infrastructure", "hipMalloc"),
    "fail=hipModuleLoadData:209": ("vector-add", "no-kernel", "hipModuleLoadData"),
    "fail=hiprtcCompileProgram:6": ("vector-add", "load-failed", "its compiler says: error: expected ';'"),
    "fail=hipModuleLaunchKernel:719": ("vector-add", "load-failed", "hipModuleLaunchKernel: HIP error 719"),
    "kernel=never": ("vector-add", "wrong-numbers", "30011 of 30011 elements are wrong"),
    "kernel=wrong": ("vector-add", "wrong-numbers", "1 of 30011 elements are wrong: [15005]"),
    "memory=leak": ("memory-returned", "load-failed", "did not come back"),
    "kernel=always": ("driver-controls", "wrong-numbers", "a kernel that subtracts gave the sum"),
    "source=any": ("driver-controls", "wrong-numbers", "HIP that is none was compiled"),
}


def build(folder: Path, *options: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{name}"]
        subprocess.run([*command, *options, str(SOURCE), "-o", str(folder / name)], check=True)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("hip"))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_suite(tmp_path_factory.mktemp("suite"))


def test_everything_passes_on_an_honest_driver(suite: Path, library: Path, tmp_path: Path) -> None:
    ran = Ground(suite=suite, library=library, folder=tmp_path / "run").run(GOOD)
    assert ran.code == 0, ran.errors
    assert {name: ran.rows[name]["state"] for name in table.PARTS["driver"]} == dict.fromkeys(
        table.PARTS["driver"], "passed"
    )
    assert (ran.report["device"], ran.report["cuda"]) == (
        {
            "name": "stand-in of the tests 0",
            "capability": "gfx90a",
            "uuid": "GPU-00000000fafbfc00",
            "memory": 64 << 30,
        },
        "",
    )
    assert ran.rows["driver"]["detail"].startswith("HIP 7.0 starts; libamdhip64 is ")
    assert ran.rows["vector-add"]["detail"] == "30011 sums by HIP that HIPRTC compiled, all exact"


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_seen(suite: Path, library: Path, tmp_path: Path, lie: str) -> None:
    check, word, text = LIES[lie]
    ran = Ground(suite=suite, library=library, folder=tmp_path / "run").run(GOOD, lie, part="driver")
    row = ran.rows[check]
    assert (ran.code, row["state"], row["outcome"]) == (1, "failed", word), row
    assert text in row["detail"]


def test_hip_5_tells_the_processor_too(suite: Path, tmp_path: Path) -> None:
    old = build(tmp_path / "old", "-DOLD")
    ran = Ground(suite=suite, library=old, folder=tmp_path / "run").run(GOOD, part="driver")
    assert ran.code == 0, ran.rows


def test_an_image_without_rocm_did_not_load(suite: Path, tmp_path: Path) -> None:
    ran = Ground(suite=suite, library=tmp_path, folder=tmp_path / "run").run(GOOD, part="driver")
    assert ran.states()["driver"] == ("failed", "load-failed")
    assert "the image's ROCm is not there: libamdhip64.so.7" in ran.rows["driver"]["detail"]


def test_of_several_gpus_the_one_asked_for(suite: Path, library: Path, tmp_path: Path) -> None:
    ground = Ground(suite=suite, library=library, folder=tmp_path / "run")
    ran = ground.run(GOOD, "processor=gfx1100,gfx90a", part="driver")
    assert ran.report["facts"]["device"]["uuid"] == "GPU-00000000fafbfc01"
    assert ran.report["facts"]["visible"] == 2


# --- from the host -------------------------------------------------------------------------------


@dataclass
class OnStandIn:
    """This machine's Python as the image, with the stand-in for ROCm instead of one."""

    library: Path
    lies: str = ""

    def require(self) -> str:
        return "1"

    def run(self, image: Image, spec: RunSpec) -> CommandResult:
        places = {PREFIX: Path(sys.prefix), **{mount.target: mount.source for mount in spec.mounts}}
        argv = [ProcessRunner._place(argument, places) for argument in spec.argv]
        told = {"LD_LIBRARY_PATH": str(self.library), "IMAGEFACTORY_TEST_LIBCUDA": self.lies}
        environment = {"PATH": os.environ["PATH"], **told, **dict(spec.environment)}
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return CommandResult(returncode=code, stdout=done.stdout, stderr=done.stderr, seconds=0.1)


@pytest.fixture
def host(tmp_path: Path) -> Hardware:
    make_amd_machine(tmp_path, 0, 90010)
    found = read_amd(AmdPlaces(dev=tmp_path / "dev", proc=tmp_path / "proc", sys=tmp_path / "sys"))
    assert found is not None
    return found


def run_driver(host: Hardware | None, runner: OnStandIn) -> GpuReport:
    """The driver part alone: the image has no framework that the suite knows."""
    plain = make_definition(framework="nvidia-cuda-runtime-cu12", checks=("packages",))
    definition = replace(plain, target=replace(plain.target, cuda="rocm7", capabilities=("gfx90a",)))
    predicted = {"gfx90a": Predicted(native=True, ptx=False, runs=True, reason="it has code")}
    trial = GpuTrial(
        made=make_trial().image,
        subject=VerifiedImage(target="x", index=digest("a"), manifest=digest("b"), config=digest("c")),
        definition=definition,
        ask=GpuRequest(nonce="0123456789abcdef0123456789abcdef", level="quick", predicted=predicted),
        runner="unshare",
        hardware=host,
    )
    with TemporaryDirectory() as scratch:
        return verify_gpu(trial, runner, clock(), scratch=Path(scratch))


def clock() -> Callable[[], datetime]:
    start = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return iter(start + timedelta(seconds=n) for n in range(100)).__next__


def test_a_gpu_that_the_kernel_knows_is_met(library: Path, host: Hardware) -> None:
    report = run_driver(host, OnStandIn(library))
    assert report.outcome is Outcome.VERIFIED, report.reason
    assert report.device == host.gpus[0]
    assert (report.device.uuid, report.device.name) == (f"GPU-{UNIQUE:016x}", "AMD Instinct MI250X")
    assert report.cuda == ""


def test_another_gpu_than_the_kernels_is_no_verdict(library: Path, host: Hardware) -> None:
    stranger = replace(host, gpus=(replace(host.gpus[0], uuid="GPU-00000000deadbeef"),))
    assert run_driver(stranger, OnStandIn(library)).outcome is Outcome.INFRASTRUCTURE
    wrong = replace(host, gpus=(replace(host.gpus[0], capability="gfx942"),))
    assert run_driver(wrong, OnStandIn(library)).outcome is Outcome.INFRASTRUCTURE


def test_on_a_machine_of_the_other_maker_nothing_is_started(library: Path) -> None:
    report = run_driver(HOST, OnStandIn(library))
    assert report.outcome is Outcome.WRONG_GPU
    assert report.reason.startswith("asked for a GPU of AMD's, this machine has ")
