"""What packages need to be built from source."""

from __future__ import annotations

import re

from packaging.utils import canonicalize_name

from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.source_builds import source_build


def test_every_row_names_its_source_and_what_exists() -> None:
    rows = read_table("source_builds")["package"]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["name"] == canonicalize_name(row["name"])
        assert re.match(r"(measured 20\d\d-\d\d|documented): .{20,}", row["source"]), row
        assert set(row["code"]) <= {"C++", "CUDA", "Fortran", "Rust"}
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name) for name in row.get("debian", ()))
        assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", key) for key in row.get("environment", ()))


def test_a_package_is_found_by_its_normalized_name() -> None:
    found = source_build("flash-attn")
    assert found
    assert found.code == {"C++", "CUDA"}
    assert dict(found.environment) == {"FLASH_ATTENTION_FORCE_BUILD": "TRUE"}
    assert source_build("filterpy") is None
