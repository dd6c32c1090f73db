"""GPUs by name: as people type them and as drivers report them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import UsageError
from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.knowledge import data_sheets, find_data_sheet, find_gpu
from imagefactory.gpu.values import mig_profile
from tests.made.errors import fails


@pytest.mark.parametrize(
    ("name", "gpu", "capability"),
    [
        ("V100", "V100", "7.0"),
        ("v100", "V100", "7.0"),
        ("Tesla V100-SXM2-32GB", "V100", "7.0"),
        ("Tesla V100-SXM2-32GB-LS", "V100", "7.0"),
        ("GRID A100D-4C", "A100D", "8.0"),
        ("Tesla K40m", "K40m", "3.5"),
        ("NVIDIA GeForce GT 710", "GT 710", "3.5"),
        ("NVIDIA GeForce MX150", "MX150", "6.1"),
        ("NVIDIA GeForce MX450", "MX450", "7.5"),
        ("NVIDIA RTX A400", "RTX A400", "8.6"),
        ("NVIDIA RTX A1000 6GB Laptop GPU", "RTX A1000", "8.6"),
        ("NVIDIA A10M", "A10M", "8.6"),
        ("NVIDIA RTX 3500 Ada Generation Laptop GPU", "RTX 3500 Ada", "8.9"),
        ("NVIDIA RTX PRO 1000 Blackwell Generation Laptop GPU", "RTX PRO 1000 Blackwell", "12.0"),
        ("Tesla V100-PCIE-16GB", "V100", "7.0"),
        ("Tesla V100S-PCIE-32GB", "V100S", "7.0"),
        ("Tesla V100-DGXS-32GB", "V100", "7.0"),
        ("Tesla P100-PCIE-16GB", "P100", "6.0"),
        ("Tesla T4", "T4", "7.5"),
        ("Tesla M40 24GB", "M40", "5.2"),
        ("Quadro M620", "Quadro M620", "5.0"),
        ("Quadro M5000M", "Quadro M5000M", "5.2"),
        ("NVIDIA A100-SXM4-40GB", "A100", "8.0"),
        ("NVIDIA A100 80GB PCIe", "A100", "8.0"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100", "8.0"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "H100", "9.0"),
        ("GRID A100-10C", "A100", "8.0"),
        ("NVIDIA A40-48Q", "A40", "8.6"),
        ("NVIDIA A10G", "A10G", "8.6"),
        ("NVIDIA H100 NVL", "H100", "9.0"),
        ("NVIDIA H100 PCIe", "H100", "9.0"),
        ("NVIDIA H200", "H200", "9.0"),
        ("NVIDIA GH200 480GB", "GH200", "9.0"),
        ("NVIDIA B200", "B200", "10.0"),
        ("NVIDIA B300 SXM6 AC", "B300", "10.3"),
        ("NVIDIA L40S", "L40S", "8.9"),
        ("NVIDIA GB10", "GB10", "12.1"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", "12.0"),
        ("rtx5090", "RTX 5090", "12.0"),
        ("5090", "RTX 5090", "12.0"),
        ("RTX 3090Ti", "RTX 3090 Ti", "8.6"),
        ("1080ti", "GTX 1080 Ti", "6.1"),
        ("GTX 1080 Ti", "GTX 1080 Ti", "6.1"),
        ("1080", "GTX 1080", "6.1"),
        ("NVIDIA GeForce GTX 1060 6GB", "GTX 1060", "6.1"),
        ("GeForce RTX 2080 SUPER", "RTX 2080 SUPER", "7.5"),
        ("NVIDIA GeForce GTX 1660 Ti with Max-Q Design", "GTX 1660 Ti", "7.5"),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", "RTX 3070", "8.6"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090", "8.9"),
        ("Quadro RTX 6000", "Quadro RTX 6000", "7.5"),
        ("RTX 8000", "Quadro RTX 8000", "7.5"),
        ("NVIDIA RTX A6000", "RTX A6000", "8.6"),
        ("A6000", "RTX A6000", "8.6"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "8.9"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell", "12.0"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell", "12.0"),
        ("NVIDIA TITAN X (Pascal)", "TITAN X (Pascal)", "6.1"),
        ("GeForce GTX TITAN X", "GTX TITAN X (Maxwell)", "5.2"),
        ("NVIDIA TITAN Xp COLLECTORS EDITION", "TITAN Xp", "6.1"),
        ("NVIDIA TITAN RTX", "TITAN RTX", "7.5"),
        ("Orin (nvgpu)", "Jetson AGX Orin", "8.7"),
        ("GTX3090", "RTX 3090", "8.6"),
        ("RTX4080S", "RTX 4080 SUPER", "8.9"),
        ("RTX 4070TiS", "RTX 4070 Ti SUPER", "8.9"),
        ("RTX 5090D v2", "RTX 5090", "12.0"),
        ("RTX 50 series", "RTX 50 series", "12.0"),
        ("RTX 30xx", "RTX 30 series", "8.6"),
        ("RTX40-series", "RTX 40 series", "8.9"),
        ("Hopper", "Hopper", "9.0"),
        ("GeForce GTX 680", "GTX 680", "3.0"),
        ("A100-PG509-200", "A100", "8.0"),
        ("NVIDIA Jetson AGX Thor Developer Kit", "Jetson AGX Thor", "11.0"),
        ("NVIDIA RTX PRO 4000 Blackwell SFF Edition", "RTX PRO 4000 Blackwell SFF", "12.0"),
    ],
)
def test_names_as_people_and_drivers_write_them(name: str, gpu: str, capability: str) -> None:
    found = knowledge.find_gpu(name)
    assert (found.name, str(found.capability)) == (gpu, capability)


PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@pytest.mark.parametrize(
    ("name", "gpu", "part"),
    [
        (f"{PRO} MIG 1g.24gb+gfx", "RTX PRO 6000 Blackwell", "1g.24gb+gfx"),
        (f"{PRO} MIG 1g.24gb+me.all", "RTX PRO 6000 Blackwell", "1g.24gb+me.all"),
        (f"{PRO} MIG 2g.48gb-me", "RTX PRO 6000 Blackwell", "2g.48gb-me"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb+me", "H100", "1c.3g.40gb+me"),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED", "A100", "1g.5gb"),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me", "H100", "1g.10gb.me"),
        ("a100_1g.5gb", "A100", "1g.5gb"),
        ("nvidia_a100_80gb_pcie_mig_1g.10gb", "A100", "1g.10gb"),
        ("NVIDIA A100-1-5CME", "A100", "1-5cme"),
        ("NVIDIA-GeForce-RTX-3090-SHARED", "RTX 3090", ""),
        ("Tesla-T4-SHARED", "T4", ""),
        ("NVIDIA H20-3e", "H20", ""),
    ],
)
def test_slices_and_shared_gpus_are_known_by_their_gpu(name: str, gpu: str, part: str) -> None:
    assert (knowledge.find_gpu(name).name, mig_profile(name)) == (gpu, part)


@pytest.mark.parametrize(
    "name", ["RTX 6000", "rtx6000", "RTX 4000", "RTX 5000", "TITAN X", "titan", "Quadro"]
)
def test_a_name_of_several_capabilities_is_refused_with_its_choices(name: str) -> None:
    with fails("gpu-ambiguous") as caught:
        knowledge.find_gpu(name)
    assert "capability" in caught.value.hint
    choices = caught.value.message.partition("capabilities: ")[2]
    assert len({part.rpartition("(")[2] for part in choices.split(", ")}) > 1, choices


def test_the_choices_of_an_ambiguous_name_can_be_written_as_they_stand() -> None:
    with pytest.raises(UsageError) as caught:
        knowledge.find_gpu("RTX 6000")
    choices = caught.value.message.partition("capabilities: ")[2].split(", ")
    assert choices == ["RTX 6000 Ada (8.9)", "Quadro RTX 6000 (7.5)", "RTX PRO 6000 Blackwell (12.0)"]
    for choice in choices:
        name, _, capability = choice.rpartition(" (")
        assert knowledge.find_gpu(name).capability == parse_capability(capability.rstrip(")"))


@pytest.mark.parametrize(
    ("name", "near"),
    [("V10", "V100"), ("RTX 509O", "RTX 5090"), ("H1O0", "H100"), ("GTX 1080 To", "GTX 1080 Ti")],
)
def test_an_unknown_name_gets_near_spellings(name: str, near: str) -> None:
    with fails("gpu-unknown") as caught:
        knowledge.find_gpu(name)
    assert f"did you mean {near}" in caught.value.hint


@pytest.mark.parametrize("name", ["", "NVIDIA", "GPU", "Tesla 32GB", "\x00", "no such thing"])
def test_a_name_that_says_nothing_is_unknown(name: str) -> None:
    with fails("gpu-unknown") as caught:
        knowledge.find_gpu(name)
    assert "compute_cap" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "gpu", "processor"),
    [
        ("MI300X", "MI300X", "gfx942"),
        ("AMD Instinct MI250X OAM", "MI250X", "gfx90a"),
        ("Radeon RX 7900 XT", "RX 7900 XT", "gfx1100"),
        ("amd radeon rx 7900 xtx", "RX 7900 XTX", "gfx1100"),
        ("RX 9070 XT", "RX 9070 XT", "gfx1201"),
        ("AMD Radeon PRO W7900 Dual Slot", "W7900", "gfx1100"),
        ("GFX90a", "gfx90a", "gfx90a"),
        ("Radeon 8060S (Ryzen AI MAX+ 395)", "Ryzen AI Max", "gfx1151"),
        ("AMD RX7600", "RX 7600", "gfx1102"),
        ("7900 XTX 24GB", "RX 7900 XTX", "gfx1100"),
        ("RX6700XT", "RX 6700 XT", "gfx1031"),
        ("RX 9070XT", "RX 9070 XT", "gfx1201"),
        ("Radeon RX Vega 56", "Vega 56", "gfx900"),
    ],
)
def test_a_gpu_of_amd_has_a_processor(name: str, gpu: str, processor: str) -> None:
    found = knowledge.find_gpu(name)
    assert (found.name, str(found.capability)) == (gpu, processor)


@pytest.mark.parametrize("name", ["MI999", "Radeon RX 1", "gfx", "gfx90x"])
def test_an_unknown_gpu_of_amd_is_told_with_what_to_write(name: str) -> None:
    with fails("gpu-unknown"):
        knowledge.find_gpu(name)


def test_every_gpu_of_amd_finds_itself() -> None:
    for gpu in knowledge.amd_gpus():
        assert knowledge.find_gpu(f"AMD {gpu.name}").name == gpu.name
    assert [str(one) for one in knowledge.processors()] == [
        "gfx803", "gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950",
        "gfx1010", "gfx1012", "gfx1030", "gfx1031", "gfx1032", "gfx1100", "gfx1101", "gfx1102", "gfx1103",
        "gfx1150", "gfx1151", "gfx1200", "gfx1201",
    ]  # fmt: skip


@given(st.text(max_size=300))
def test_any_text_is_a_gpu_or_a_usage_error(name: str) -> None:
    told = ""
    try:
        told = knowledge.find_gpu(name).name
    except UsageError as error:
        told = error.message
    assert told.isprintable()
    assert 0 < len(told) < 500


@pytest.mark.parametrize("gpu", knowledge.gpus(), ids=lambda gpu: gpu.name)
def test_every_known_name_finds_itself(gpu: knowledge.GpuModel) -> None:
    for name in (gpu.name, f"NVIDIA {gpu.name}", gpu.name.lower(), gpu.name.replace(" ", "-")):
        assert knowledge.find_gpu(name) == gpu


def test_capabilities_are_those_of_known_gpus() -> None:
    known = knowledge.capabilities()
    assert list(known) == sorted(set(known))
    assert {Capability(7, 0), Capability(9, 0), Capability(12, 1)} <= set(known)
    assert Capability(10, 1) not in known  # called 11.0 since CUDA 13.0


SOURCE = re.compile(r"(measured 20\d\d-\d\d|documented): .{20,}|reported: [\w.-]+/[\w.-]+ #\d+")


FOLDER = Path(knowledge.__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.name)
def test_every_row_has_a_source(path: Path) -> None:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = [row for table in tables.values() if isinstance(table, list) for row in table]
    assert rows
    for row in rows:
        assert re.match(
            r"(measured 20\d\d-\d\d|documented): .{20,}|reported: [\w.-]+/[\w.-]+ #\d+", row["source"]
        ), row


def test_drivers_go_up_with_cuda() -> None:
    drivers = knowledge.cuda_drivers()

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    known = sorted(drivers, key=numbers)
    assert [numbers(drivers[cuda]) for cuda in known] == sorted(numbers(drivers[cuda]) for cuda in known)
    assert drivers["12.1"] == "530.30.02"


def test_each_row_is_of_a_gpu_that_is_known_by_its_own_name_and_its_drivers() -> None:
    sheets = data_sheets()
    assert len({sheet.name for sheet in sheets}) == len(sheets) > 20
    for sheet in sheets:
        assert find_gpu(sheet.device).capability == sheet.capability
        assert find_data_sheet(sheet.name)[0] == sheet
        assert find_data_sheet(sheet.device)[0] == sheet


def test_numbers_are_of_the_right_size() -> None:
    """A thousand times too much or too little is the likeliest mistake of a table."""
    for sheet in data_sheets():
        assert 8 << 30 < sheet.memory < 200 << 30
        assert 250e9 < sheet.bandwidth < 10e12
        assert sheet.link in (16e9, 32e9, 64e9)
        assert sheet.link <= sheet.peer <= 900e9
        assert (sheet.peer > sheet.link) == (
            "SXM" in sheet.source or "NVLink" in sheet.source or "HGX" in sheet.source
        )
        assert 5e12 < sheet.flops["fp32"] < 200e12
        assert sheet.flops["fp16"] > sheet.flops["fp32"] > sheet.flops["fp64"]
        assert ("tf32" in sheet.flops) == ("bf16" in sheet.flops) == (sheet.capability.major >= 8)
        if "tf32" in sheet.flops:
            assert sheet.flops["bf16"] == sheet.flops["fp16"] > sheet.flops["tf32"] >= sheet.flops["fp32"]


def test_memory_that_is_seen_is_less_than_what_is_sold() -> None:
    for sheet in data_sheets():
        sold = find_gpu(sheet.gpu).memory
        assert not sold or any(0.9 < sheet.memory / (size * 1e9) < 1.08 for size in sold), sheet.name


@pytest.mark.parametrize(
    ("name", "found", "others"),
    [
        ("A100", "A100-SXM4-40GB", 3),
        ("a100 80gb", "A100-SXM4-80GB", 1),
        ("v100-32gb", "V100-SXM2-32GB", 1),
        ("RTX4090", "RTX-4090", 0),
        ("NVIDIA L40S", "L40S", 0),
        ("L4", "L4", 0),
    ],
)
def test_names_that_people_write(name: str, found: str, others: int) -> None:
    sheet, more = find_data_sheet(name)
    assert (sheet.name, len(more)) == (found, others)


@pytest.mark.parametrize(("name", "code"), [("GTX 970", "data-sheet-unknown"), ("nonsense", "gpu-unknown")])
def test_a_gpu_without_a_data_sheet(name: str, code: str) -> None:
    with fails(code) as raised:
        find_data_sheet(name)
    assert raised.value.hint.startswith("known are B200, H200, ")
