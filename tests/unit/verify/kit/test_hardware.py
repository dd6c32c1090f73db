"""What the host says of its GPUs: NVML, /proc and device nodes of a made-up machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from imagefactory.verify.kit import hardware
from imagefactory.verify.kit.hardware import NoGpu, Places, parse_major, parse_version, read_hardware
from tests.services.gpu_host import UUID, Told, make_host

MIG = "MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"


def test_all_three_ways_are_read(tmp_path: Path) -> None:
    assert read_hardware(make_host(tmp_path)) == {
        "format": 1,
        "driver": "550.90.07",
        "gpus": [{"name": "Test GPU", "capability": "8.0", "uuid": UUID, "memory": 16 << 30}],
        "known": [UUID],
        "nodes": ["/dev/nvidia3"],
        "notes": {"nvml-driver": "550.90.07"},
    }


def test_an_instance_of_mig_is_told_with_the_gpu_that_it_is_a_part_of(tmp_path: Path) -> None:
    told = read_hardware(make_host(tmp_path, Told(mig=MIG)))
    assert told["notes"][MIG] == UUID
    assert [gpu["uuid"] for gpu in told["gpus"]] == [UUID]


def test_a_driver_that_does_not_know_mig(tmp_path: Path) -> None:
    assert read_hardware(make_host(tmp_path, Told(before_mig=True)))["notes"] == {"nvml-driver": "550.90.07"}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Told(count=0), "NVML counts none"),
        (Told(init=18), "18 .Driver/library version mismatch"),
        (Told(module="535.1.2"), "kernel module is 535.1.2 and NVML of 550.90.07"),
        (Told(known="GPU-????????-????-????-????-????????????"), "tells its UUID"),
        (Told(uuid="GPU-1", known=UUID), "a UUID that is none"),
    ],
)
def test_a_machine_that_contradicts_itself_has_no_usable_gpu(tmp_path: Path, told: Told, said: str) -> None:
    with pytest.raises(NoGpu, match=said):
        read_hardware(make_host(tmp_path, told))


def test_without_a_driver_a_node_or_a_library_there_is_none(tmp_path: Path) -> None:
    places = make_host(tmp_path)
    with pytest.raises(NoGpu, match="not loaded"):
        read_hardware(places._replace(proc=str(tmp_path / "none")))
    with pytest.raises(NoGpu, match="NVML cannot be loaded"):
        read_hardware(places._replace(nvml=str(tmp_path / "libnone.so")))
    with pytest.raises(NoGpu, match="no device"):
        read_hardware(places._replace(dev=str(tmp_path / "none")))
    (tmp_path / "proc/driver/nvidia/gpus/0000:07:00.0/information").unlink()
    with pytest.raises(NoGpu, match="tells its UUID"):
        read_hardware(places)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/tty", "file"])
def test_a_node_must_be_a_device_of_the_driver_with_its_own_number(tmp_path: Path, target: str) -> None:
    places = make_host(tmp_path)
    node = tmp_path / "dev/nvidia3"
    node.unlink()
    (tmp_path / "file").write_text("")
    node.symlink_to(tmp_path / target)
    with pytest.raises(NoGpu, match="no device"):
        read_hardware(places)


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ("Character devices:\n195 nvidia-frontend\n234 nvidia-uvm\n\nBlock devices:\n", 195),
        ("Character devices:\n195 nvidia\n195 nvidiactl\n\nBlock devices:\n", 195),
        ("Character devices:\n234 nvidia-uvm\n\nBlock devices:\n195 nvidia\n", -1),
        ("", -1),
    ],
)
def test_the_major_of_the_driver(text: str, major: int) -> None:
    assert parse_major(text) == major


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC\n",
            "470.256.02",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("GCC version: gcc 12.2.0\n", ""),
    ],
)
def test_the_version_of_both_kernel_modules(text: str, version: str) -> None:
    assert parse_version(text) == version


def test_the_file_works_alone(tmp_path: Path) -> None:
    """As in a kit: no package around it, the interpreter's own modules alone."""
    places = make_host(tmp_path)
    program = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import hardware; "
        "print(json.dumps(hardware.read_hardware(hardware.Places(*json.loads(sys.argv[2])))))"
    )
    folder = str(Path(hardware.__file__).parent)
    argv = [sys.executable, "-I", "-S", "-c", program, folder, json.dumps(places)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["gpus"][0]["uuid"] == UUID


def test_this_program_asks_the_machine_itself_where_nobody_says_otherwise() -> None:
    assert Places() == ("/dev", "/proc", "libnvidia-ml.so.1")
