"""Capabilities and GPU code, as they are written and read back."""

from __future__ import annotations

import pytest

from imagefactory.gpu.capability import Capability, CodeKind, parse_capability, parse_code


@pytest.mark.parametrize(
    ("text", "major", "minor"),
    [("8.6", 8, 6), ("86", 8, 6), ("sm_120", 12, 0), ("compute_75", 7, 5), ("10.3", 10, 3)],
)
def test_capabilities(text: str, major: int, minor: int) -> None:
    assert parse_capability(text) == Capability(major, minor)
    assert parse_capability(str(Capability(major, minor))) == Capability(major, minor)


def test_a_processor_of_amd_is_a_capability_after_all_of_cuda() -> None:
    texts = ["gfx1100", "12.1", "gfx90a", "gfx942", "gfx908", "9.0", "gfx1030"]
    ordered = ["9.0", "12.1", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100"]
    assert [str(one) for one in sorted(map(parse_capability, texts))] == ordered
    assert parse_capability("gfx90a") == Capability(9, 0, "gfx90a") != Capability(9, 0)
    assert parse_capability("gfx90a").sm == "gfx90a"


@pytest.mark.parametrize(
    "text",
    [
        "gfx",
        "gfx90",
        "gfx9-generic",
        "gfx90a:xnack-",
        "gfx90g",
        "GFX90a",
        "",
        "8",
        "sm_90a",
        "8.66",
        "A100",
        "8.6.1",
        "-8.6",
    ],
)
def test_what_is_no_capability(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 8\.6"):
        parse_capability(text)


def test_capabilities_are_ordered_by_their_numbers() -> None:
    texts = ["10.0", "9.0", "12.1", "7.5", "12.0"]
    assert [str(one) for one in sorted(map(parse_capability, texts))] == [
        "7.5",
        "9.0",
        "10.0",
        "12.0",
        "12.1",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "sm_80",
        "sm_90a",
        "sm_100f",
        "sm_120",
        "compute_80/8.1",
        "compute_90a/8.3",
        "lto_80",
        "gfx90a",
        "gfx906:sramecc+:xnack-",
        "gfx1100",
        "gfx9-4-generic",
        "gfx11-generic",
    ],
)
def test_code_reads_back(text: str) -> None:
    assert str(parse_code(text)) == text


@pytest.mark.parametrize("text", ["sm_80/8.1", "sm_8", "compute80", "gfx", "sm_90b", "sm_80 ", ""])
def test_what_is_no_code(text: str) -> None:
    with pytest.raises(ValueError, match="write sm_86"):
        parse_code(text)


def test_the_parts_of_code() -> None:
    code = parse_code("compute_90a/8.3")
    assert (code.kind, code.architecture, code.suffix, code.isa) == (
        CodeKind.PTX,
        Capability(9, 0),
        "a",
        "8.3",
    )
