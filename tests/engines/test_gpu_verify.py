"""`verify` through the real unshare runner into a small image of this machine's own Python. The driver is a
stand-in and the machine's GPU made up, both handed in by the test: what comes out is a report that nobody's
settings trust.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions.verdicts import find_in, local_place, read_verification_policy
from imagefactory.actions.verify import VerifyDependencies, VerifyOptions, VerifyResult, verify_and_attach
from imagefactory.model import CheckState, Outcome
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.runtime.devices import GpuDevices
from imagefactory.runtime.unshare import UnshareRunner
from imagefactory.suite.gpu import table
from imagefactory.trust.keys import keys_directory, make_key
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.verify.evidence import LocalEvidence
from tests.services import libcuda
from tests.services.gpu_factory import NAME
from tests.services.gpu_host import Told, make_host

ROOT = Path(__file__).parents[2]


def verify(factory: Project, folder: Path, lies: str = "") -> VerifyResult:
    """On a made-up machine whose GPU is the stand-in's, through the runner that `verify` uses."""
    library = libcuda.build_libcuda(folder / "driver", lies)
    told = Told(uuid=libcuda.UUID, name=libcuda.NAME, memory=libcuda.MEMORY)
    devices = GpuDevices(devices=(), libraries=(str(library),), links=(), programs=(), driver=told.driver)
    runner = UnshareRunner(factory.layout, find=lambda: devices)
    bench = VerifyDependencies(evidence=LocalEvidence(places=make_host(folder / "host", told)), runner=runner)
    return verify_and_attach(
        factory, NAME, VerifyOptions(level="quick", runner="unshare"), bench, QuietProgress()
    )


def test_a_run_in_a_real_image_is_a_report_that_nobody_trusts(factory: Project, tmp_path: Path) -> None:
    key = make_key(keys_directory(factory.environ), "throwaway")
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
    court = read_verification_policy(factory, datetime.now(UTC) + timedelta(minutes=1))
    (judged,) = find_in(factory, local_place(factory, "any"), done.chosen.subject, court).judged
    assert (judged.standing, judged.proves) == (VerdictStatus.WRONG_KEY, False)


@pytest.mark.parametrize(
    ("lies", "outcome"), [("kernel=wrong", Outcome.WRONG_NUMBERS), ("capability=", Outcome.NO_GPU)]
)
def test_a_lie_of_the_driver_is_seen(factory: Project, tmp_path: Path, lies: str, outcome: Outcome) -> None:
    report = verify(factory, tmp_path, lies).report
    assert report.outcome is outcome, report.reason


def test_the_command_itself_takes_no_stand_in(factory: Project, tmp_path: Path) -> None:
    """Neither variables nor libraries on the path make a GPU of a stand-in."""
    library = libcuda.build_libcuda(tmp_path)
    environ = {**factory.environ, "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "imagefactory", "-C", factory.settings.root.value, "verify", NAME]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert libcuda.NAME not in done.stdout
    if not Path("/proc/driver/nvidia/version").exists():
        assert done.returncode == 9
        assert f"error: {NAME}: no-gpu: no GPU" in done.stderr
