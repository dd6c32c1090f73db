"""What the host says of its GPUs: NVML, /proc and device nodes of a made-up machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from imagefactory.runtime.hardware import (
    GLIBC_OF_BASES,
    CdiDevices,
    GlibcNeed,
    LostGpu,
    NoGpu,
    Places,
    SelectedGpu,
    SelectionError,
    cdi_names,
    find_gpu_nodes,
    glibc_problem,
    lost_gpus,
    newer_base,
    newest_need,
    outdated_cdi,
    parse_glibc,
    parse_major,
    parse_version,
    read_cdi,
    read_glibc_need,
    read_hardware,
    read_visible,
    select,
)
from imagefactory.verify import kit
from tests.services.gpu_host import THREADS, UUID, Told, build_library, make_host

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


def test_a_gpu_without_memory_of_its_own_has_the_machines(tmp_path: Path) -> None:
    places = make_host(tmp_path, Told(name="NVIDIA GB10", capability="12.1", memory=0))
    (gpu,) = read_hardware(places)["gpus"]
    assert (gpu["capability"], gpu["memory"]) == ("12.1", 128 << 30)
    (tmp_path / "proc/meminfo").unlink()
    with pytest.raises(NoGpu):
        read_hardware(places)


@pytest.mark.parametrize("lost_in", [0, 1, 2, 3])
@pytest.mark.parametrize(("lost", "code"), [(0, 15), (1, 16)])
def test_one_lost_gpu_of_several_does_not_lose_the_others(
    tmp_path: Path, lost_in: int, lost: int, code: int
) -> None:
    mig = MIG if lost_in == 3 else ""
    told = read_hardware(
        make_host(tmp_path, Told(count=2, lost=lost, lost_in=lost_in, lost_code=code, mig=mig))
    )
    assert [gpu["uuid"] for gpu in told["gpus"]] == [UUID]
    assert list(lost_gpus(told["notes"])) == [lost]
    assert f"answers {code} (" in lost_gpus(told["notes"])[lost]


def test_a_machine_whose_gpus_are_all_lost_names_each(tmp_path: Path) -> None:
    with pytest.raises(
        NoGpu, match=r"^no usable GPU: GPU 0: nvmlDeviceGetHandleByIndex_v2 of NVML answers 15"
    ):
        read_hardware(make_host(tmp_path, Told(lost=0)))


A, B = f"GPU-8932f937{UUID[12:]}", f"GPU-8932aaaa{UUID[12:]}"
OLD = f"MIG-{A}/1/2"
SLICES = {MIG: A, MIG.replace("a", "b"): A}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", []),
        ("NoDevFiles", []),
        ("-1", []),
        ("0", [("0", A)]),
        (" +1, 0 ", [("1", B), ("0", A)]),
        ("1gpu,0", [("1", B), ("0", A)]),  # as strtoul reads it
        ("0,-1,1", [("0", A)]),
        ("0,7,1", [("0", A)]),
        ("0,,1", [("0", A)]),
        ("0,1,0", []),
        ("GPU-8932f937", [(A, A)]),
        (f"{B},{A}", [(B, B), (A, A)]),
        ("GPU-8932", []),  # of both
        (f"{A},GPU-8932f", []),  # twice
        (f"{A},GPU-777,{B}", [(A, A)]),
        (f"{A},1", [(A, A)]),
        (f"1,{A}", [("1", B)]),
        (f"{MIG},{MIG.replace('a', 'b')}", [(MIG, A)]),
        ("MIG-bbbb", [(MIG.replace("a", "b"), A)]),
        ("MIG-777", []),
        (OLD, [(OLD, A)]),
        (OLD.replace("8932", "0000"), []),
        ("all", []),
        ("9" * 5000, []),
    ],
)
def test_cuda_visible_devices_as_cuda_reads_it(text: str, seen: list[tuple[str, str]]) -> None:
    assert read_visible(text, [A, B], SLICES, ordered=True) == seen


NODES = {A: "/dev/nvidia1", B: "/dev/nvidia0"}


@pytest.mark.parametrize(
    ("text", "slices", "gpus"),
    [
        ("0", {}, [(0, A, "/dev/nvidia1")]),
        (f" 1 ,{A}", {}, [(1, B, "/dev/nvidia0"), (0, A, "/dev/nvidia1")]),
        (f"{MIG},1", SLICES, [(0, MIG, "/dev/nvidia1"), (1, B, "/dev/nvidia0")]),
        (B, SLICES, [(1, B, "/dev/nvidia0")]),
    ],
)
def test_gpus_are_selected_by_number_and_uuid(
    text: str, slices: dict[str, str], gpus: list[tuple[int, str, str]]
) -> None:
    assert select(text, [A, B], slices, NODES) == gpus


@pytest.mark.parametrize("text", ["", "2", "-1", "+1", "0,", "0,0", f"0,{A}", A[:12], MIG, "all", "9" * 5000])
def test_a_gpu_that_is_not_there_is_an_error_that_names_those_that_are(text: str) -> None:
    with pytest.raises(SelectionError) as caught:
        select(text, [A, B], {}, NODES)
    assert f"0 ({A}), 1 ({B})" in caught.value.hint


def test_lost_and_divided_gpus_cannot_be_selected() -> None:
    lost = {"lost-gpu-0": "it fell off"}
    assert select("1,2", [A, B], lost, NODES) == [(1, A, "/dev/nvidia1"), (2, B, "/dev/nvidia0")]
    with pytest.raises(SelectionError, match="it fell off"):
        select("0", [A, B], lost, NODES)
    for whole in ("0", A):
        with pytest.raises(SelectionError) as caught:
            select(whole, [A, B], SLICES, NODES)
        assert f"1 ({B}), {MIG} (of GPU 0)" in caught.value.hint
        assert f"0 ({A})" not in caught.value.hint
    two = ",".join(SLICES)
    assert len(select(two, [A, B], SLICES, NODES)) == 2
    with pytest.raises(SelectionError):
        select(two, [A, B], SLICES, NODES, one_slice=True)


def test_the_device_of_a_gpu_is_the_drivers(tmp_path: Path) -> None:
    places = make_host(tmp_path)
    assert find_gpu_nodes(places) == {UUID: "/dev/nvidia3"}
    information = next(tmp_path.glob("proc/driver/nvidia/gpus/*/information"))
    information.write_text(f"GPU UUID: {UUID}\n")
    assert find_gpu_nodes(places) == {UUID: ""}


# As nvidia-ctk 1.17 writes it, shortened, with its hooks.
YAML = """\
---
cdiVersion: 0.5.0
containerEdits:
  env:
    - NVIDIA_VISIBLE_DEVICES=void
  hooks:
    - args: [nvidia-cdi-hook, create-symlinks, --link, libcuda.so.1::/usr/lib/libcuda.so]
      hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
  mounts:
    - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.550.90.07
      hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.550.90.07
devices:
  - containerEdits:
      deviceNodes:
        - path: /dev/nvidia1
    name: "0"
  - containerEdits:
      deviceNodes:
        - path: /dev/nvidia1
    name: GPU
  - name: all
kind: nvidia.com/gpu
""".replace("name: GPU", f"name: {A}")


def test_names_in_specifications_of_cdi(tmp_path: Path) -> None:
    folders = (str(tmp_path), "/nowhere")
    assert read_cdi(folders) == CdiDevices([], [], [])
    (tmp_path / "nvidia.yaml").write_text(YAML)
    (tmp_path / "other.json").write_text('{"kind": "example.org/net", "devices": [{"name": "eth0"}]}')
    (tmp_path / "notes.txt").write_text(YAML.replace('"0"', '"9"'))
    (tmp_path / "folder.json").mkdir()
    libcuda = "/usr/lib/x86_64-linux-gnu/libcuda.so.550.90.07"
    assert read_cdi(folders) == CdiDevices(["0", A, "all"], ["550.90.07"], [libcuda])
    (tmp_path / "more.json").write_text('{"kind":"nvidia.com/gpu","devices":[{"name":"1"},{"name":"1:0"}]}')
    devices = read_cdi(folders)
    assert devices.names == ["0", "1", "1:0", A, "all"]
    assert outdated_cdi(devices, "550.90.07") == outdated_cdi(devices, "") == ""
    assert outdated_cdi(read_cdi(("/nowhere",)), "560.35") == ""
    assert "550.90.07" in outdated_cdi(devices, "560.35")


def test_cdi_has_the_uuid_or_the_number() -> None:
    devices = CdiDevices(["0", "1", A, "all"], [])
    gpus = [SelectedGpu(0, A, ""), SelectedGpu(1, B, ""), SelectedGpu(1, MIG, "")]
    assert cdi_names(gpus, devices) == [f"nvidia.com/gpu={name}" for name in (A, "1", MIG)]
    assert cdi_names((), devices) == ["nvidia.com/gpu=all"]


def test_indices_count_lost_gpus_and_are_unknown_where_models_differ() -> None:
    lost = {"lost-gpu-0": "GPU is lost"}
    assert read_visible("1,2", [A, B], lost, ordered=True) == [("1", A), ("2", B)]
    assert read_visible("1,0,2", [A, B], lost, ordered=True) == [("1", A)]
    assert read_visible("1,0,2", [A, B], {}, ordered=False) == [("1", ""), ("0", "")]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Told(count=0), "NVML counts none"),
        (Told(init=18), "18 .Driver/library version mismatch"),
        (Told(module="535.1.2"), "kernel module is 535.1.2 and NVML of 550.90.07"),
        (Told(known="GPU-????????-????-????-????-????????????"), "has a UUID"),
        (Told(uuid="GPU-1", known=UUID), "a UUID that is none"),
    ],
)
def test_a_machine_that_contradicts_itself_has_no_usable_gpu(tmp_path: Path, told: Told, said: str) -> None:
    with pytest.raises(NoGpu, match=said):
        read_hardware(make_host(tmp_path, told))


@pytest.mark.parametrize("told", [Told(init=18), Told(module="535.1.2")])
def test_an_nvml_of_another_driver_is_named_and_no_lack_of_a_gpu(tmp_path: Path, told: Told) -> None:
    """An installer had put the driver's libraries of its day into an image (E4S)."""
    places = make_host(tmp_path, told)
    own = tmp_path / "usr/lib/libnvidia-ml.so.610.43"
    own.parent.mkdir(parents=True)
    own.write_bytes(Path(places.nvml).read_bytes())
    with pytest.raises(LostGpu) as raised:
        read_hardware(places._replace(nvml=str(own)))
    assert str(own) in str(raised.value)


def test_without_a_driver_a_node_or_a_library_there_is_none(tmp_path: Path) -> None:
    places = make_host(tmp_path)
    with pytest.raises(NoGpu, match="not loaded"):
        read_hardware(places._replace(proc=str(tmp_path / "none")))
    with pytest.raises(NoGpu, match="NVML cannot be loaded"):
        read_hardware(places._replace(nvml=str(tmp_path / "libnone.so")))
    with pytest.raises(NoGpu, match="no device"):
        read_hardware(places._replace(dev=str(tmp_path / "none")))
    (tmp_path / "proc/driver/nvidia/gpus/0000:07:00.0/information").unlink()
    with pytest.raises(NoGpu, match="has a UUID"):
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
    folder = str(Path(kit.__file__).parent)
    argv = [sys.executable, "-I", "-S", "-c", program, folder, json.dumps(places)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["gpus"][0]["uuid"] == UUID


def test_this_program_asks_the_machine_itself_where_nobody_says_otherwise() -> None:
    assert Places() == ("/dev", "/proc", "libnvidia-ml.so.1")


def test_the_glibc_that_libraries_need(tmp_path: Path) -> None:
    paths = {}
    for name, data in (
        ("libcuda.so.550.90.07", build_library("#include <string.h>\nvoid *f = memcpy;")),
        ("libnvidia-ptxjitcompiler.so.1", build_library(THREADS)),
        ("libnvidia-ml.so.1", build_library("int f(void) { return 1; }", "-nostdlib")),
        ("libnvidia-pkcs11.so.1", b"no library"),
        ("libnvidia-nvvm.so.4", b"\x7fELF\2\1" + b"\xff" * 58),
    ):
        paths[name] = tmp_path / name
        paths[name].write_bytes(data)
    assert read_glibc_need(paths["libcuda.so.550.90.07"]) == (2, 14)
    assert read_glibc_need(paths["libnvidia-ptxjitcompiler.so.1"]) == (2, 34)
    for name in ("libnvidia-ml.so.1", "libnvidia-pkcs11.so.1", "libnvidia-nvvm.so.4"):
        assert read_glibc_need(paths[name]) == (0,)
    assert read_glibc_need(tmp_path / "nothing") == (0,)
    need = newest_need(map(str, paths.values()))
    assert need == ((2, 34), str(paths["libnvidia-ptxjitcompiler.so.1"]))
    assert newest_need([]).version == (0,)
    paths["libnvidia-pkcs11.so.1"].write_bytes(build_library(THREADS))
    assert newest_need([str(paths["libnvidia-pkcs11.so.1"])]).version == (0,)  # CUDA does not load it


def test_every_beginning_of_a_library_is_read_to_an_end(tmp_path: Path) -> None:
    path, data = tmp_path / "libcuda.so.1", build_library(THREADS)
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        assert read_glibc_need(path) in ((0,), (2, 34))


@pytest.mark.parametrize(
    ("text", "version", "fits"),
    [
        ("glibc 2.31\n", (2, 31), False),
        ("glibc 2.34\n", (2, 34), True),
        ("glibc 2.41\n", (2, 41), True),
        ("glibc 2.4\n", (2, 4), False),
        ("getconf: unknown variable\n", (0,), True),
        ("", (0,), True),
    ],
)
def test_an_image_with_an_older_glibc(text: str, version: tuple[int, ...], fits: bool) -> None:
    assert parse_glibc(text) == version
    problem = glibc_problem(GlibcNeed((2, 34), "/usr/lib/libcuda.so.1"), version)
    assert (problem == "") == fits
    if not fits:
        for word in ("libcuda.so.1", "2.34", text.split()[1]):
            assert word in problem


def test_bases_that_are_new_enough() -> None:
    assert newer_base((2, 34)).endswith("debian-12 or ubuntu-24.04 or debian-13")
    assert newer_base((2, 38)).endswith("ubuntu-24.04 or debian-13")
    assert newer_base((2, 50)) == "a newer base"
    bases = yaml.safe_load(Path(__file__).parents[3].joinpath("recipes/bases.yaml").read_text())["bases"]
    known = {name: ".".join(map(str, glibc)) for name, glibc in GLIBC_OF_BASES}
    assert [known[base["name"]] for base in bases] == [base["glibc"] for base in bases]
