"""A run of the GPU suite from the host: what is asked for, what is written, and what a run on this CPU's
stand-in for the driver becomes. The suite is the real one, in a process; the GPU is none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import ToolError
from imagefactory.gpu.capability import Capability, CodeKind, GpuCode
from imagefactory.gpu.values import GpuLibrary, ModuleCount, ScanResult
from imagefactory.model import CommandResult, Outcome, RunSpec
from imagefactory.oci.manifests import Image
from imagefactory.suite.gpu import table
from imagefactory.suite.gpu.context import Predicted, parse_request
from imagefactory.verify.evidence import LocalEvidence, parse_evidence
from imagefactory.verify.gpu_run import (
    GpuRequest,
    GpuTrial,
    assigned_gpus,
    choose_gpus,
    gpu_expectations,
    predict_coverage,
    timeout_of,
    verify_gpu,
    visible_gpus,
)
from imagefactory.verify.kit.program import choose_gpus as choose_by_kit
from imagefactory.verify.kit.program import seen_gpus as seen_by_kit
from imagefactory.verify.kit.start import Stop
from imagefactory.verify.report import (
    EVIDENCE_KIT,
    EVIDENCE_LOCAL,
    GpuIdentity,
    GpuReport,
    Hardware,
    VerifiedImage,
    format_gpu_report,
    parse_gpu_report,
)
from imagefactory.verify.suite_files import suite_digest
from imagefactory.views.verdicts import format_gpu_run, format_latencies, format_number
from tests.made.deep import MakeDeep
from tests.made.errors import fails
from tests.made.gpu_run import make_run, never, well_behaved, whole
from tests.made.trial import PREFIX, ProcessRunner, ScriptedRunner, make_definition, make_trial
from tests.made.verdicts import HOST, HOST_OF_TWO, digest
from tests.services import libcuda
from tests.services.gpu_host import Told, make_host

NONCE = "0123456789abcdef0123456789abcdef"
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
OTHER_GPU = GpuIdentity(
    name="Another", capability="9.0", uuid="GPU-99999999-89ab-cdef-0123-456789abcdef", memory=1 << 35
)


def verify(trial: GpuTrial, runner: Any) -> GpuReport:
    with tempfile.TemporaryDirectory() as scratch:
        report = verify_gpu(trial, runner, clock(), scratch=Path(scratch))
        assert list(Path(scratch).iterdir()) == []
    return report


def clock() -> Callable[[], datetime]:
    times = iter(START + timedelta(seconds=n) for n in range(100))
    return lambda: next(times)


def gpu_trial(*, hardware: Hardware | None = HOST, **ask: Any) -> GpuTrial:
    return GpuTrial(
        made=make_trial().image,
        subject=VerifiedImage(
            target="pytorch-1.13-cu117", index=digest("a"), manifest=digest("b"), config=digest("c")
        ),
        definition=make_definition(),
        ask=GpuRequest(**{"nonce": NONCE, "predicted": {}, "level": "quick", **ask}),
        runner="unshare",
        hardware=hardware,
    )


def test_what_is_asked_is_what_the_suite_reads() -> None:
    predicted = {"8.0": Predicted(native=True, ptx=False, runs=True, reason="sm_80 code")}
    ask = GpuRequest(nonce=NONCE, level="quick", capability="8.0", predicted=predicted)
    asked = parse_request(json.dumps(gpu_expectations(make_definition(), ask)))
    assert (asked.level, asked.capability, asked.driver, asked.rehearsal) == ("quick", "8.0", "11.0", False)
    assert asked.predicted == predicted
    assert asked.expected.nonce == NONCE
    assert asked.expected.locked == {"torch": "1.13.1"}
    assert asked.expected.framework == "torch"


def test_what_the_runner_is_asked_for() -> None:
    seen: list[tuple[RunSpec, dict[str, int]]] = []

    class Runner(ScriptedRunner):
        def run(self, image: Image, spec: RunSpec) -> CommandResult:
            modes = {mount.target: mount.source.stat().st_mode & 0o777 for mount in spec.mounts}
            seen.append((spec, modes))
            return super().run(image, spec)

    before = os.umask(0o077)
    try:
        report = verify(gpu_trial(), Runner(write=well_behaved().write))
    finally:
        os.umask(before)
    ((spec, modes),) = seen
    assert report.outcome is Outcome.VERIFIED
    assert spec.argv == (
        "/opt/env/bin/python",
        "-I",
        "-B",
        "/imagefactory/suite/verify.py",
        "/imagefactory/expect/expectations.json",
        "/imagefactory/report/report.json",
    )
    assert (spec.gpus, spec.network, spec.environment, spec.uid) == (True, False, (), 0)
    assert spec.timeout == timeout_of("quick") == 5 * 240 + 60
    assert modes == {
        "/imagefactory/suite": 0o755,
        "/imagefactory/expect": 0o755,
        "/imagefactory/report": 0o777,
    }
    assert {mount.target for mount in spec.mounts if mount.writable} == {"/imagefactory/report"}
    assert (report.suite, report.nonce, report.runner) == (suite_digest(), NONCE, "unshare")
    assert (report.started, report.ended) == (START, START + timedelta(seconds=1))


CUDA = "CUDA_VISIBLE_DEVICES"
LOST = (("lost-gpu-1", "GPU is lost"),)


@pytest.mark.parametrize(
    ("host", "capability", "environ", "inside"),
    [
        (HOST, "", {}, ""),
        (replace(HOST, notes=LOST), "", {}, HOST.gpus[0].uuid),
        (replace(HOST, gpus=(*HOST.gpus, OTHER_GPU)), "", {}, HOST.gpus[0].uuid),
        (replace(HOST, gpus=(*HOST.gpus, OTHER_GPU)), "9.0", {}, OTHER_GPU.uuid),
        (replace(HOST, gpus=(*HOST.gpus, OTHER_GPU)), "", {CUDA: "1"}, "1"),
        (HOST, "", {CUDA: "GPU-0123"}, HOST.gpus[0].uuid),
        (HOST_OF_TWO, "", {CUDA: "1,-1,0"}, "1"),
        (HOST_OF_TWO, "", {CUDA: "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, HOST_OF_TWO.gpus[1].uuid),
    ],
)
def test_which_gpu_the_image_gets_to_see(
    host: Hardware, capability: str, environ: dict[str, str], inside: str
) -> None:
    seen = assigned_gpus(host, environ)
    assert seen is not None
    gpus = choose_gpus(seen, capability)
    assert visible_gpus(host, gpus, environ) == (((CUDA, inside),) if inside else ())
    told = {"gpus": [asdict(gpu) for gpu in host.gpus], "notes": dict(host.notes), "known": host.known}
    by_kit, word = seen_by_kit(told, environ)
    assert [gpu["uuid"] for gpu in choose_by_kit(told, by_kit, capability, "full")] == [
        gpu.uuid for gpu in gpus
    ]
    assert word == (inside if environ else "")


@pytest.mark.parametrize(
    "value", ["", "NoDevFiles", "-1,0", "7", "MIG-89c850dc-38e3-57df-85c7-690c186b68e9", "0,0"]
)
def test_a_job_that_was_given_no_gpu_has_none(value: str) -> None:
    report = verify(gpu_trial(environ={CUDA: value}), ScriptedRunner(write=never))
    assert (report.outcome, report.device) == (Outcome.NO_GPU, None)
    told = {"gpus": [asdict(gpu) for gpu in HOST.gpus], "notes": dict(HOST.notes), "known": HOST.known}
    with pytest.raises(Stop) as caught:
        seen_by_kit(told, {CUDA: value})
    assert (caught.value.outcome, caught.value.code) == ("no-gpu", 9)


@pytest.mark.parametrize("value", ["1", "GPU-76543210"])
def test_a_job_on_a_lost_gpu_is_the_machines_fault(value: str) -> None:
    host = replace(HOST, known=HOST_OF_TWO.known, notes=LOST)
    report = verify(gpu_trial(hardware=host, environ={CUDA: value}), ScriptedRunner(write=never))
    assert report.outcome is Outcome.INFRASTRUCTURE
    told = {"gpus": [asdict(gpu) for gpu in host.gpus], "notes": dict(host.notes), "known": host.known}
    with pytest.raises(Stop) as caught:
        seen_by_kit(told, {CUDA: value})
    assert caught.value.outcome == "infrastructure"


def test_a_job_sees_its_own_gpus_alone() -> None:
    host = replace(HOST_OF_TWO, gpus=(*HOST_OF_TWO.gpus, OTHER_GPU))
    ask = {"capability": "9.0", "environ": {CUDA: HOST_OF_TWO.gpus[0].uuid}}
    assert verify(gpu_trial(hardware=host, **ask), ScriptedRunner(write=never)).outcome is Outcome.WRONG_GPU


@pytest.mark.parametrize(
    ("gpus", "capability", "chosen"),
    [
        (HOST_OF_TWO.gpus, "", HOST_OF_TWO.gpus),
        (HOST_OF_TWO.gpus, "9.0", ()),
        (HOST.gpus, "", ()),
        ((OTHER_GPU, *HOST_OF_TWO.gpus), "", HOST_OF_TWO.gpus),
        ((OTHER_GPU, *HOST_OF_TWO.gpus), "9.0", ()),
        ((OTHER_GPU, *HOST.gpus), "", ()),
    ],
)
def test_several_are_all_of_the_first_capability_that_two_have(
    gpus: tuple[GpuIdentity, ...], capability: str, chosen: tuple[GpuIdentity, ...]
) -> None:
    host = replace(HOST, gpus=gpus)
    assert choose_gpus(host.gpus, capability, several=True) == chosen
    told = {"gpus": [asdict(gpu) for gpu in gpus], "notes": {}}
    if chosen:
        by_kit = [gpu["uuid"] for gpu in choose_by_kit(told, told["gpus"], capability, "several")]
        assert by_kit == [gpu.uuid for gpu in chosen]
        return
    with pytest.raises(Stop) as caught:
        choose_by_kit(told, told["gpus"], capability, "several")
    assert caught.value.outcome == "wrong-gpu"


def test_the_image_sees_all_of_them_or_what_the_batch_system_says() -> None:
    three = replace(HOST_OF_TWO, gpus=(OTHER_GPU, *HOST_OF_TWO.gpus))
    both = ",".join(gpu.uuid for gpu in HOST_OF_TWO.gpus)
    assert visible_gpus(HOST_OF_TWO, HOST_OF_TWO.gpus, {}) == ()
    assert visible_gpus(three, HOST_OF_TWO.gpus, {}) == (("CUDA_VISIBLE_DEVICES", both),)
    assert visible_gpus(three, HOST_OF_TWO.gpus, {CUDA: "0,2"}) == (("CUDA_VISIBLE_DEVICES", "0,2"),)


def test_several_gpus_through_the_runner() -> None:
    report = verify(gpu_trial(hardware=HOST_OF_TWO, level="several"), well_behaved())
    assert (report.outcome, report.gpus) == (Outcome.TOGETHER, 2)
    assert "several suite on 2 x A GPU of the tests (8.0, 16 GiB)" in format_gpu_run(report)
    assert "valid for" not in format_gpu_run(report)


def test_without_several_gpus_nothing_is_started() -> None:
    report = verify(gpu_trial(level="several"), ScriptedRunner(write=never))
    assert report.outcome is Outcome.WRONG_GPU
    assert "A GPU of the tests (8.0)" in report.reason


@pytest.mark.parametrize(
    ("framework", "why"), [("jax", "supports only PyTorch"), ("nvidia-cuda-runtime-cu12", "no framework")]
)
def test_other_frameworks_are_not_asked_of_several(framework: str, why: str) -> None:
    definition = make_definition(framework=framework)
    ask = GpuRequest(nonce=NONCE, level="several", predicted={})
    with fails("suite-not-applicable") as caught:
        gpu_expectations(definition, ask)
    assert why in caught.value.message
    assert "--suite full" in caught.value.hint


def test_without_a_gpu_nothing_is_started() -> None:
    report = verify(gpu_trial(hardware=None), ScriptedRunner(write=never))
    assert (report.outcome, report.device) == (Outcome.NO_GPU, None)


def test_without_a_gpu_of_that_capability_nothing_is_started() -> None:
    report = verify(gpu_trial(capability="9.0"), ScriptedRunner(write=never))
    assert report.outcome is Outcome.WRONG_GPU
    assert re.search(r"9\.0.*A GPU of the tests \(8\.0\)", report.reason)


def test_an_image_that_only_prints_passed() -> None:
    report = verify(gpu_trial(), ScriptedRunner(write=lambda path, asked: None))
    assert report.outcome is Outcome.LOAD_FAILED
    assert report.reason.endswith("PASSED")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_report_that_is_no_plain_file(tmp_path: Path, kind: str) -> None:
    def write(path: Path, asked: dict[str, Any]) -> None:
        secret = tmp_path / "secret"
        secret.write_text(json.dumps(whole(make_run(**asked))))
        {"link": lambda: path.symlink_to(secret), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
            kind
        ]()

    report = verify(gpu_trial(), ScriptedRunner(write=write))
    assert report.outcome is Outcome.LOAD_FAILED
    assert "the report" in report.reason


def test_an_image_that_leaves_deep_folders_is_judged_like_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_deep: MakeDeep
) -> None:
    def write(path: Path, asked: dict[str, Any]) -> None:
        make_deep(path.parent / "deep")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = verify(gpu_trial(), ScriptedRunner(write=write))
    assert report.outcome is Outcome.LOAD_FAILED
    assert list(tmp_path.iterdir()) == []


def test_a_runner_that_cannot_start_it_is_not_the_images_fault() -> None:
    class Refused(ScriptedRunner):
        def run(self, image: Image, spec: RunSpec) -> CommandResult:
            raise ToolError(
                "test-problem", "no usable GPU: /dev/nvidia-uvm is missing", hint="nvidia-modprobe -c 0 -u"
            )

    report = verify(gpu_trial(), Refused(write=never))
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert "/dev/nvidia-uvm is missing (nvidia-modprobe" in report.reason


def test_evidence_of_a_made_up_machine(tmp_path: Path) -> None:
    part = "MIG-22222222-2222-3333-4444-555555555555"
    hardware = LocalEvidence(places=make_host(tmp_path, Told(mig=part))).read()
    assert hardware.kind == EVIDENCE_LOCAL
    assert (hardware.driver, hardware.nodes) == ("550.90.07", ("/dev/nvidia3",))
    (gpu,) = hardware.gpus
    assert hardware.known == (gpu.uuid,)
    assert dict(hardware.notes) == {part: gpu.uuid, "nvml-driver": "550.90.07"}


def test_evidence_of_a_machine_without_a_gpu(tmp_path: Path) -> None:
    places = make_host(tmp_path)
    with fails("gpu-not-visible") as error:
        LocalEvidence(places=places._replace(proc=str(tmp_path / "nowhere"))).read()
    assert "nvidia-smi" in error.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": True},
        {"notes": []},
        {"gpus": [{}]},
        {"driver": "new"},
        {"more": 1},
        {"known": "GPU"},
    ],
)
def test_evidence_that_no_driver_gave(change: dict[str, Any]) -> None:
    good = {
        "format": 1,
        "driver": "550.90.07",
        "gpus": [{"name": "A", "capability": "8.0", "uuid": HOST.known[0], "memory": 1 << 30}],
        "known": list(HOST.known),
        "nodes": ["/dev/nvidia0"],
        "notes": {"nvml-driver": "550.90.07"},
    }
    assert parse_evidence(good, EVIDENCE_KIT, "x").kind == EVIDENCE_KIT
    with fails("document-invalid"):
        parse_evidence({**good, **change}, EVIDENCE_KIT, "x")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    told = Told(uuid=libcuda.UUID, name=libcuda.NAME, memory=libcuda.MEMORY)
    return LocalEvidence(places=make_host(tmp_path_factory.mktemp("host") / "machine", told)).read()


@dataclass
class OnStandIn:
    """This machine's Python as the image, with the stand-in for the driver instead of one."""

    library: Path
    lies: str = ""

    def require(self) -> str:
        return "1"

    def run(self, image: Image, spec: RunSpec) -> CommandResult:
        places = {PREFIX: Path(sys.prefix), **{mount.target: mount.source for mount in spec.mounts}}
        argv = [ProcessRunner._place(argument, places) for argument in spec.argv]
        told = {"LD_LIBRARY_PATH": str(self.library), libcuda.VARIABLE: self.lies, **dict(spec.environment)}
        done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": os.environ["PATH"], **told})
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return CommandResult(returncode=code, stdout=done.stdout, stderr=done.stderr, seconds=0.1)


def run_driver(host: Hardware, runner: Any, **ask: Any) -> GpuReport:
    """The suite's driver part alone: the image has no framework that the suite knows."""
    definition = make_definition(framework="nvidia-cuda-runtime-cu12", checks=("packages",))
    trial = replace(gpu_trial(hardware=host, **ask), definition=definition)
    report = verify(trial, runner)
    assert parse_gpu_report(json.loads(json.dumps(format_gpu_report(report))), "x") == report
    return report


def test_a_run_on_the_stand_in_is_a_report(stand_in: Path, host: Hardware) -> None:
    report = run_driver(host, OnStandIn(stand_in))
    assert report.outcome is Outcome.VERIFIED, report.reason
    assert report.device == host.gpus[0]
    assert report.cuda == "12.4"
    applies = [check.name for check in report.checks if check.state.value == "passed"]
    assert applies == list(table.PARTS["driver"])


@pytest.mark.parametrize(
    ("lies", "outcome"),
    [
        ("capability=", Outcome.NO_GPU),
        ("version=10020", Outcome.DRIVER_TOO_OLD),
        ("kernel=wrong", Outcome.WRONG_NUMBERS),
        ("kernel=never", Outcome.WRONG_NUMBERS),
        ("crash=cuModuleLoadDataEx", Outcome.LOAD_FAILED),
        ("capability=9.0", Outcome.INFRASTRUCTURE),
    ],
)
def test_a_stand_in_that_lies(stand_in: Path, host: Hardware, lies: str, outcome: Outcome) -> None:
    report = run_driver(host, OnStandIn(stand_in, lies))
    assert report.outcome is outcome, report


def test_a_stand_in_that_is_none_of_the_hosts_gpus(stand_in: Path) -> None:
    report = run_driver(HOST, OnStandIn(stand_in))
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert "is none of this host's" in report.reason


def test_an_image_without_a_driver_inside(tmp_path: Path, host: Hardware) -> None:
    report = run_driver(host, OnStandIn(tmp_path))
    assert report.outcome is not Outcome.VERIFIED
    assert report.device is None


def make_contents(*codes: GpuCode) -> ScanResult:
    modules = (ModuleCount(codes=tuple(sorted(codes)), count=10),)
    return ScanResult(
        source="x", libraries=(GpuLibrary(path="torch/lib/libtorch_cuda.so", size=1, modules=modules),)
    )


def sass(major: int, minor: int) -> GpuCode:
    return GpuCode(CodeKind.SASS, Capability(major, minor))


def ptx(major: int, minor: int) -> GpuCode:
    return GpuCode(CodeKind.PTX, Capability(major, minor), isa="8.0")


def test_what_a_scan_lets_one_expect() -> None:
    found = predict_coverage(make_contents(sass(7, 0), sass(8, 0), ptx(8, 0)), [Capability(13, 5)])
    told = {key: (row.native, row.ptx, row.runs) for key, row in found.items()}
    assert told["7.0"] == (True, False, True)
    assert told["8.0"] == (True, True, True)
    assert told["8.6"] == (True, True, True)
    assert told["9.0"] == told["13.5"] == (False, True, True)
    assert told["6.0"] == (False, False, False)
    assert "no code for 6.0" in found["6.0"].reason


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("elements", 30011.0, "elements 30011"),
        ("error", 1.5e-7, "error 1.5e-07"),
        ("taken-bytes", 2.684e8, "taken 268.4 MB"),
        ("taken-bytes", -1.0, "taken-bytes -1"),
        ("taken-bytes", 1e300, "taken-bytes 1e+300"),
    ],
)
def test_numbers_are_short_whatever_they_are(name: str, value: float, told: str) -> None:
    assert format_number(name, value) == told


def test_the_table_names_the_target_or_the_digest_where_none_is_known() -> None:
    report = verify(gpu_trial(hardware=None), ScriptedRunner(write=never))
    nameless = replace(report, subject=replace(report.subject, target=""))
    assert format_gpu_run(report).startswith("pytorch-1.13-cu117  quick suite on no GPU was met")
    assert format_gpu_run(nameless).startswith(f"{digest('b')}  quick suite")


def test_the_table_shows_checks_numbers_and_latencies(stand_in: Path, host: Hardware) -> None:
    report = run_driver(host, OnStandIn(stand_in))
    text = format_gpu_run(report)
    assert f"quick suite on {libcuda.NAME} (8.0, 16 GiB), driver 550.90.07, CUDA 12.4, by unshare" in text
    assert "\nvector-add  " in text
    assert "valid for  capability 8.0, driver 550.90.07 and newer" in text
    numbers = (
        ("alexnet-cpu-torch-p50-ms", 30.0),
        ("alexnet-gpu-onnxruntime-p50-ms", 1.25),
        ("alexnet-gpu-onnxruntime-p95-ms", 1.5),
        ("alexnet-gpu-torch-error", 1e-7),
    )
    check = replace(report.checks[-1], numbers=numbers)
    assert format_latencies([check]).splitlines() == [
        "model    by           on   p50 ms  p95 ms",
        "alexnet  torch        cpu  30.000",
        "alexnet  onnxruntime  gpu  1.250   1.500",
    ]
    assert format_latencies(report.checks) == ""
    assert "alexnet-gpu-torch-error 1e-07" in format_gpu_run(replace(report, checks=(check,)))
