"""What packages need to be built from source."""

from __future__ import annotations

import re

import pytest
from packaging.utils import canonicalize_name

from imagefactory.gpu.knowledge.packages import source_build
from imagefactory.gpu.knowledge.tables import read_table


def test_every_row_names_its_source_and_what_exists() -> None:
    rows = read_table("source_builds")["package"]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["name"] == canonicalize_name(row["name"])
        assert re.match(
            r"documented: [\w.-]+/[\w.-]+ \S+( and \S+)? at [0-9a-f]{8}\b.{20,}", row["source"]
        ), row
        assert set(row["code"]) <= {"C++", "CUDA", "Fortran", "Rust"}
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name) for name in row.get("debian", ()))
        for key in ("environment", "architectures"):
            assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in row.get(key, ()))


def test_a_package_is_found_by_its_normalized_name() -> None:
    found = source_build("flash-attn")
    assert found
    assert found.code == {"C++", "CUDA"}
    assert dict(found.environment) == {"FLASH_ATTENTION_FORCE_BUILD": "TRUE"}
    assert source_build("filterpy") is None


@pytest.mark.parametrize(
    ("capabilities", "architectures"),
    [
        (("8.0", "9.0"), "80;90"),
        (("8.6", "8.9+PTX"), "80"),
        (("12.0", "10.3", "11.0"), "100;110;120"),
        (("7.5",), None),
    ],
)
def test_a_build_that_reads_a_variable_of_its_own_compiles_for_the_targets_gpus(
    capabilities: tuple[str, ...], architectures: str | None
) -> None:
    found = source_build("flash-attn")
    assert found
    assert found.variables(capabilities).get("FLASH_ATTN_CUDA_ARCHS") == architectures


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("mamba-ssm", {"MAMBA_FORCE_BUILD": "TRUE", "MAMBA_KEEP_CUDA_BUILD": "TRUE"}),
        ("apex", {"APEX_CPP_EXT": "1", "APEX_CUDA_EXT": "1"}),
    ],
)
def test_extensions_are_compiled_not_left_out(name: str, variables: dict[str, str]) -> None:
    found = source_build(name)
    assert found
    assert found.variables(("8.0",)) == variables
