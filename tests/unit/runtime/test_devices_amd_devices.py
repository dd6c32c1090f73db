"""AMD's GPUs of a made machine: what its kernel tells, and what a run gets of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import ToolError
from imagefactory.model import RunSpec
from imagefactory.runtime.devices import GpuDevices, find_amd_gpus, find_gpus, processor_of
from imagefactory.runtime.unshare import SandboxPaths, plan, read_caller
from tests.made.amd import make_amd_machine


def find(root: Path) -> GpuDevices:
    return find_gpus(dev=root / "dev", proc=root / "proc", sys=root / "sys", programs=(), linker_cache="")


@pytest.mark.parametrize(
    ("version", "name"),
    [(90010, "gfx90a"), (90402, "gfx942"), (110000, "gfx1100"), (120001, "gfx1201"), (90006, "gfx906")],
)
def test_the_kernels_number_is_a_processor(version: int, name: str) -> None:
    assert processor_of(version) == name


def test_what_the_kernel_tells(tmp_path: Path) -> None:
    make_amd_machine(tmp_path, 0, 90010, 90010, 110000, driver="6.12.12")
    found = find_amd_gpus(dev=tmp_path / "dev", sys=tmp_path / "sys")
    assert found is not None
    assert found.processors == ("gfx90a", "gfx90a", "gfx1100")
    assert found.devices == (str(tmp_path / "dev/kfd"), str(tmp_path / "dev/dri"))
    assert (found.driver, found.refused) == ("6.12.12", ())
    assert found.groups == tuple({(tmp_path / "dev/kfd").stat().st_gid} - {0})


def test_a_processor_without_gpus_and_a_container_without_the_device_have_none(tmp_path: Path) -> None:
    assert find_amd_gpus(dev=tmp_path / "dev", sys=tmp_path / "sys") is None
    make_amd_machine(tmp_path, 0)
    assert find_amd_gpus(dev=tmp_path / "dev", sys=tmp_path / "sys") is None
    make_amd_machine(tmp_path, 0, 90010)
    (tmp_path / "dev/kfd").unlink()
    assert find_amd_gpus(dev=tmp_path / "dev", sys=tmp_path / "sys") is None
    with pytest.raises(ToolError, match=r"/nvidia0 .*/kfd ") as caught:
        find(tmp_path)
    assert caught.value.code == "gpu-device-missing"


def test_a_run_gets_the_devices_and_no_library_of_the_machine(tmp_path: Path) -> None:
    make_amd_machine(tmp_path, 0, 90010)
    found = find(tmp_path)
    assert (found.devices, found.libraries) == ((str(tmp_path / "dev/kfd"), str(tmp_path / "dev/dri")), ())
    assert (found.amd, found.nvidia) == (True, False)
    place = SandboxPaths(lower=(tmp_path,), scratch=tmp_path)
    made = plan(place, RunSpec(argv=("true",), gpus=True), read_caller(), gpus=found, tty=False)
    assert made.driver is not None
    assert made.driver["devices"] == found.devices
    assert not {"LD_LIBRARY_PATH"} & {name for name, _ in made.environment}
