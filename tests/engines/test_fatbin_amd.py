"""The reader against AMD's code in two wheels of the index: bundles in the clear, and compressed ones."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from imagefactory.scan.fatbin import scan_bytes, scan_file
from tests.services.nvcc import install_wheels

PINS = {
    "bitsandbytes==0.50.2": "55348a9a4a21bfd99cf8c7b32fe67b4030ae5c2a05738e03c1747f65fa6ec283",
    "jax-rocm60-plugin==0.5.0": "05414df017d473b77cae3b04e69d199cbdaa2ddb7cff0801edbae84f37a74308",
}
ID = re.compile(rb"hipv4-amdgcn-amd-amdhsa--(gfx[0-9a-z:+-]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("wheels") / "site"
    install_wheels(folder, PINS)
    yield folder
    shutil.rmtree(folder)


def found_in(path: Path) -> tuple[Counter[str], tuple[str, ...]]:
    """How many bundles have code for each target, and the compressions."""
    library = scan_file(path, path.name)
    assert library is not None, path
    assert library == scan_bytes(path.read_bytes(), path.name)
    assert (library.damage, library.unread) == ("", "")
    counts: Counter[str] = Counter()
    for one in library.modules:
        for code in one.codes:
            counts[str(code)] += one.count
    return counts, library.compressions


def test_bundles_in_the_clear(site: Path) -> None:
    libraries = [
        path for path in (site / "jax_rocm60_plugin").glob("*.so") if b"CLANG_OFF" in path.read_bytes()
    ]
    assert len(libraries) == 4
    for path in libraries:
        counts, compressions = found_in(path)
        assert counts == Counter(name.decode() for name in ID.findall(path.read_bytes())), path
        assert compressions == ("none",)
        assert {"gfx900", "gfx942", "gfx1201"} <= set(counts)


def test_compressed_bundles(site: Path) -> None:
    """Held against bundles that are decompressed whole."""
    libraries = sorted((site / "bitsandbytes").glob("libbitsandbytes_rocm*.so"))
    assert len(libraries) == 6
    versions = set()
    for path in libraries:
        data, expected = path.read_bytes(), Counter[str]()
        for mark in re.finditer(rb"CCOB([\x02\x03])\0\x01\0", data):
            width, head = (4, 24) if mark[1] == b"\x02" else (8, 32)
            length = int.from_bytes(data[mark.end() : mark.end() + width], "little")
            payload = data[mark.start() + head : mark.start() + length]
            versions.add(mark[1])
            plain = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
            expected += Counter(name.decode() for name in ID.findall(plain[:8192]))
        counts, compressions = found_in(path)
        assert counts == expected, path
        assert compressions == ("zstd",)
        assert {"gfx908", "gfx90a", "gfx942", "gfx1201"} <= set(counts)
    assert versions == {b"\x02", b"\x03"}
