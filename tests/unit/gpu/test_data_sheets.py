"""What data sheets say: every row is of a GPU that is known, and is what its neighbours make likely."""

from __future__ import annotations

import pytest

from imagefactory.gpu.knowledge import data_sheets, find_data_sheet, find_gpu
from tests.made.errors import fails


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
