"""The reader of fat binaries and offload bundles, over files made by hand: whole, cut, bent, hostile."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagefactory.errors import UsageError, extra_hint
from imagefactory.gpu.capability import parse_code
from imagefactory.gpu.values import GpuLibrary
from imagefactory.scan import fatbin, streams
from imagefactory.scan.fatbin import CodeReader, scan_bytes, scan_file, skippable
from tests.made.errors import fails
from tests.services.tier import many

Scan = Callable[[bytes], Any]

PTX, SASS, LTO, TILE, CONCATENATION = 1, 2, 8, 128, 256
KINDS = {"sm": SASS, "compute": PTX, "lto": LTO}
SUFFIXES = {"": 0, "a": 0x100000, "f": 0x200000}
ZSTD, LZ4 = 0x8000, 0x2000


def header(text: str, *, flags: int = 0, size: int = 0) -> bytes:
    """The 64 bytes of an entry for a code as `str(Code)` writes it, or for `kind:7`."""
    if text.startswith("kind:"):
        kind, major, minor, architecture, bits = int(text[5:]), 0, 0, 80, flags
    else:
        code = parse_code(text)
        assert code.architecture is not None
        kind = KINDS[code.kind]
        major, minor = (int(part) for part in (code.isa or "1.8").split("."))
        architecture = code.architecture.major * 10 + code.architecture.minor
        bits = flags | SUFFIXES[code.suffix] | 0x11
    compressed, plain = (size, 2 * size) if flags & (ZSTD | LZ4) else (0, 0)
    return struct.pack(
        "<HHIQIIHHIQQQQ",
        *(kind, 0x0101, 64, size, compressed, 0, minor, major, architecture, 0, bits, 0, plain),
    )


def entry(text: str, *, flags: int = 0, payload: bytes = b"payload.") -> bytes:
    return header(text, flags=flags, size=len(payload)) + payload


def concatenation(*texts: str) -> bytes:
    """The pieces in turns without options, with empty ones and with some, as nvcc writes them."""
    pieces = b""
    for number, text in enumerate(texts):
        raw, options = header(text), b"-fmad=1 " * (number % 3 - 1)
        if number % 3:
            raw = raw[:20] + struct.pack("<I", 64) + raw[24:] + struct.pack("<II", 72, len(options))
            raw += options + bytes(8 - len(options) % 8)
        pieces += raw
    table = struct.pack("<II", len(texts), 8 + len(pieces)) + pieces
    return (
        struct.pack(
            "<HHIQIIHHIQQQQ", CONCATENATION, 0x0101, 64 + len(table), 8, 8, 64, 1, 0, 0, 0, ZSTD, 0, 16
        )
        + table
        + b"joined.."
    )


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return streams.FATBIN + struct.pack("<Q", len(body)) + body


def module(*texts: str) -> bytes:
    return container(*(entry(text) for text in texts))


def bundle(*ids: str, size: int = 40) -> bytes:
    table = sum(24 + len(text) for text in ids)
    start = 32 + table
    head = streams.BUNDLE + struct.pack("<Q", len(ids))
    for number, text in enumerate(ids):
        head += struct.pack("<QQQ", start + number * size, size, len(text)) + text.encode()
    return head + b"\x5a" * size * len(ids)


def compressed(plain: bytes, *, version: int = 3, method: int = 1, payload: bytes = b"") -> bytes:
    payload = payload or (zstandard.compress(plain) if method else zlib.compress(plain))
    sizes = {1: "<I", 2: "<II", 3: "<QQ"}[version]
    length = 8 + struct.calcsize(sizes) + 8 + len(payload)
    numbers = (len(plain),) if version == 1 else (length, len(plain))
    return (
        b"CCOB" + struct.pack("<HH", version, method) + struct.pack(sizes, *numbers) + b"hashhash" + payload
    )


def streamed(data: bytes, chunk: int) -> GpuLibrary | None:
    reader = CodeReader("lib", len(data))
    for at in range(0, len(data), chunk):
        reader.feed(data[at : at + chunk])
    return reader.close()


@pytest.fixture
def filed(tmp_path: Path) -> Scan:
    def scan(data: bytes) -> GpuLibrary | None:
        path = tmp_path / "lib"
        path.write_bytes(data)
        return scan_file(path, "lib")

    return scan


def modules(library: GpuLibrary | None) -> dict[tuple[str, ...], int]:
    assert library is not None
    return {tuple(map(str, one.codes)): one.count for one in library.modules}


# --- what is there is found ----------------------------------------------------------------------


EVERYTHING = b"".join(
    [
        b"\x7fELF junk" * 9,
        module("sm_50", "sm_80", "compute_80/8.1"),
        module("sm_80", "sm_50", "compute_80/8.1"),
        b"\0" * 5,
        container(concatenation("sm_75", "sm_90a", "sm_75", "sm_75"), entry("sm_100f", flags=ZSTD)),
        b"\x50\xed\x55\xba and more \x50\xed\x55\xba\x02\x00\x10\x00\x08\0\0\0\0\0\0\0",
        container(),
        container(entry("lto_80", flags=LZ4), entry("compute_120f/9.0"), entry("sm_121a")),
        bundle("host-x86_64-unknown-linux--", "hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-"),
        b"CCOB__CLANG_OFFLOAD_BUNDLE__ is a string",
        compressed(bundle("host-x86_64-unknown-linux--", "hipv4-amdgcn-amd-amdhsa--gfx942")),
        b"the end\x50\xed\x55",
    ]
)
EXPECTED = {
    ("compute_80/8.1", "sm_50", "sm_80"): 2,
    ("sm_75", "sm_90a", "sm_100f"): 1,
    (): 1,
    ("compute_120f/9.0", "lto_80", "sm_121a"): 1,
    ("gfx90a:sramecc+:xnack-",): 1,
    ("gfx942",): 1,
}


def test_everything_is_found_whatever_the_chunks(filed: Scan) -> None:
    whole = filed(EVERYTHING)
    assert modules(whole) == EXPECTED
    assert whole is not None
    assert whole.compressions == ("lz4", "none", "zstd")
    assert (whole.path, whole.size, whole.damage, whole.unread) == ("lib", len(EVERYTHING), "", "")
    for chunk in [*range(1, 130), 255, 256, 1000, len(EVERYTHING)]:
        assert streamed(EVERYTHING, chunk) == whole, chunk
    assert scan_bytes(EVERYTHING, "lib") == whole
    assert scan_bytes(memoryview(bytearray(EVERYTHING)), "lib") == whole


def test_a_file_beyond_the_windows_of_the_search(filed: Scan) -> None:
    """Marks at every place around the borders of the windows, whose sizes the search doubles."""
    for place in [
        *range(4070, 4110),
        *range((1 << 18) - 40, (1 << 18) + 40, 7),
        (1 << 20) - 3,
        (3 << 20) + 1,
    ]:
        data = b"\x50\xed\x55" * (place // 3) + b"\0" * (place % 3) + module("sm_86") + b"CCO" * 20
        for found in (filed(data), streamed(data, 1 << 20), streamed(data, 65_521)):
            assert modules(found) == {("sm_86",): 1}, place


def test_the_search_is_the_same_without_the_c_library(monkeypatch: pytest.MonkeyPatch, filed: Scan) -> None:
    monkeypatch.setattr(streams, "_find", streams._find_by_bytes)
    assert modules(filed(EVERYTHING)) == EXPECTED


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF" * 50,
        b"\x50\xed\x55\xba" * 50,
        streams.FATBIN[:6] + b"\x11\0" + bytes(64),  # another header size
        # machine code that writes a header, as NVIDIA's own tools have it
        streams.FATBIN + bytes.fromhex("c745780000803f48894500488b451848c785800000000000") * 3,
        # the same with a size that ends within the file, where no container begins
        b"\x48\xb8" + streams.FATBIN + bytes.fromhex("5000000000000000") + b"\x48\x89\x45\x08" * 30,
        streams.BUNDLE + b"\0%s: not a bundle\0" + b"text of a tool" * 10,
        streams.BUNDLE,
        b"CCOB\x04\0\x01\0" + bytes(64),
        b"CCOB\x03\0\x01\0" + bytes(8),
    ],
)
def test_what_only_looks_like_a_container_is_none(data: bytes, filed: Scan) -> None:
    assert filed(data) is None
    assert streamed(data, 7) is None


def test_what_is_in_a_container_is_not_searched(filed: Scan) -> None:
    inner = module("sm_50")
    assert modules(filed(container(entry("sm_80", payload=inner * 4)))) == {("sm_80",): 1}


def test_unknown_kinds_are_counted_and_told(filed: Scan) -> None:
    data = container(entry("sm_80"), entry(f"kind:{TILE}"), entry("kind:7"), entry("kind:7"))
    found = filed(data + bundle("hip-spirv64-amd-amdhsa--amdgcnspirv"))
    assert modules(found) == {("sm_80",): 1, (): 1}
    assert found.damage == ""
    told = "1 of CUDA Tile IR (type 128), 1 of target hip-spirv64-amd-amdhsa--amdgcnspirv, 2 of type 7"
    assert found.unread == f"{told}, the first at 0x58"
    assert len(filed(container(*(entry(f"kind:{n}") for n in range(300, 900)))).unread) < 400


def test_a_method_of_compression_that_is_not_known(filed: Scan) -> None:
    raw = bytearray(container(entry("sm_80", flags=ZSTD)))
    struct.pack_into("<Q", raw, 16 + 40, 0x400011)
    assert filed(bytes(raw)).compressions == ("other",)


# --- cubins --------------------------------------------------------------------------------------


def cubin(flags: int, abi: int, notes: bytes = b"") -> bytes:
    head = bytearray(b"\x7fELF\x02\x01\x01\x41" + bytes([abi]) + bytes(55))
    struct.pack_into("<HH", head, 16, 2, fatbin.MACHINE_CUDA)
    struct.pack_into("<I", head, 48, flags)
    return bytes(head) + notes + bytes(100)


@pytest.mark.parametrize(
    ("flags", "abi", "notes", "target"),
    [
        (0x500550, 7, b"", "sm_80"),
        (0x5A055A, 7, b"", "sm_90"),
        (0x5A0D5A, 7, b"", "sm_90a"),
        (0x6005A04, 8, b"\0-arch sm_90 -m 64 \0", "sm_90"),
        (0x6005A04, 8, b"\0-arch sm_90a -m 64 \0", "sm_90a"),
        (0x600640A, 8, b"", "sm_100a"),
        (0x6006402, 8, b"\0-arch sm_100f -m 64 \0", "sm_100f"),
        (0x6006402, 8, b"\0-arch sm_90a -m 64 \0", "sm_100"),
    ],
)
def test_cubins(flags: int, abi: int, notes: bytes, target: str, filed: Scan) -> None:
    data = cubin(flags, abi, notes)
    assert modules(filed(data)) == {(target,): 1}
    assert streamed(data, 1) == filed(data)


def test_a_cubin_for_nothing(filed: Scan) -> None:
    assert filed(cubin(0, 8)).damage == "at 0x30: the flags of a cubin have no architecture"


# --- AMD -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(("method", "word"), [(0, "other"), (1, "zstd")])
def test_compressed_bundles(version: int, method: int, word: str, filed: Scan) -> None:
    ids = ("host-x86_64-unknown-linux--", "hipv4-amdgcn-amd-amdhsa--gfx1100", "hip-amdgcn-amd-amdhsa--gfx906")
    data = compressed(bundle(*ids, size=200_000), version=version, method=method)
    found = filed(bytes(4096) + data + bytes(100) + module("sm_80"))
    assert modules(found) == {("gfx1100", "gfx906"): 1, ("sm_80",): 1}
    assert found.compressions == tuple(sorted(["none", word]))


def test_a_frame_that_asks_for_gigabytes_is_read_by_its_first_block(filed: Scan) -> None:
    table = bundle("hipv4-amdgcn-amd-amdhsa--gfx942")[:90]
    block = (len(table) << 3).to_bytes(3, "little") + table
    frame = b"\x28\xb5\x2f\xfd\xc0" + b"\x00" + struct.pack("<Q", 1 << 40) + block + b"\xff" * 40
    assert modules(filed(compressed(b"", payload=frame))) == {("gfx942",): 1}


def test_compressed_bundles_without_zstandard(monkeypatch: pytest.MonkeyPatch, filed: Scan) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with fails("extra-not-installed", "zstandard") as caught:
        filed(compressed(bundle("hipv4-amdgcn-amd-amdhsa--gfx942")))
    assert caught.value.hint == extra_hint("build")
    assert modules(filed(compressed(bundle("hip-amdgcn-amd-amdhsa--gfx942"), method=0))) == {("gfx942",): 1}


@pytest.mark.parametrize(
    "data",
    [
        compressed(b"", payload=b"\x28\xb5\x2f\xfd" + b"\xff" * 60),
        compressed(b"", payload=b"no frame at all, of some length"),
        compressed(b"what is no bundle " * 9),
        compressed(bundle("host-x86_64-unknown-linux--")[:50]),
        compressed(bundle("no target")),
        bundle("hipv4-amdgcn-amd-amdhsa--gfx942", "no target"),
        bundle("hipv4-amdgcn-amd-amdhsa--gfx942", "host-x86_64-unknown-linux--")[:120],
        bundle("hipv4-amdgcn-amd-amdhsa--gfx942")[:-1],
        compressed(bundle("hipv4-amdgcn-amd-amdhsa--gfx942"))[:-1],
    ],
)
def test_damaged_bundles(data: bytes, filed: Scan) -> None:
    found = filed(b"before" + module("sm_80") + data)
    assert modules(found) == {("sm_80",): 1}
    assert found.damage.startswith("at 0x")


def code_object(flags: int, version: int) -> bytes:
    head = bytearray(b"\x7fELF\x02\x01\x01\x40" + bytes([version]) + bytes(55))
    struct.pack_into("<HH", head, 16, 3, fatbin.MACHINE_AMD)
    struct.pack_into("<I", head, 48, flags)
    return bytes(head) + bytes(100)


@pytest.mark.parametrize(
    ("flags", "version", "target"),
    [
        (0x02F, 2, "gfx906"),
        (0x53F, 4, "gfx90a"),
        (0xE3F, 4, "gfx90a:sramecc+:xnack-"),
        (0xB4C, 3, "gfx942:sramecc-:xnack+"),
        (0x041, 4, "gfx1100"),
        (0x1000154, 4, "gfx11-generic"),
        (0x32F, 1, "gfx906:sramecc+:xnack+"),
        (0x02F, 1, "gfx906"),
    ],
)
def test_code_objects_of_amd(flags: int, version: int, target: str, filed: Scan) -> None:
    """As LLVM 20 writes them."""
    found = filed(code_object(flags, version))
    assert modules(found) == {(target,): 1}
    assert streamed(code_object(flags, version), 1) == found


@pytest.mark.parametrize(("flags", "version"), [(0x27, 4), (0x00, 4), (0x02F, 0)])
def test_a_code_object_for_an_unknown_gpu_is_told(flags: int, version: int, filed: Scan) -> None:
    found = filed(code_object(flags, version))
    assert modules(found) == {(): 1}
    assert found.unread == "1 of code for an unknown GPU of AMD's, the first at 0x30"


def test_what_amds_processors_are_called_can_be_kept() -> None:
    for name in fatbin._AMD_PROCESSORS.values():
        assert str(parse_code(name)) == name


# --- damage --------------------------------------------------------------------------------------


def bent(data: bytes, layout: str, at: int, value: int) -> bytes:
    raw = bytearray(data)
    struct.pack_into(layout, raw, at, value)
    return bytes(raw)


TWO = module("sm_80", "sm_90")


@pytest.mark.parametrize(
    ("data", "damage"),
    [
        (bent(TWO, "<Q", 8, len(TWO)), "a fat binary ends at 0x170, past the end of the file"),
        (bent(TWO, "<Q", 8, 2**64 - 1), "a fat binary ends at 0x100000000000000cf"),
        (TWO[:-1], "a fat binary ends at 0x160, past the end of the file"),
        (bent(TWO, "<Q", 8, 80), "the header of an entry in a fat binary is truncated"),
        (
            bent(TWO, "<I", 16 + 4, 2**32 - 1),
            "an entry has 4294967295 + 8 bytes, more than the remaining 144",
        ),
        (bent(TWO, "<I", 16 + 4, 0), "an entry has 0 + 8 bytes"),
        (bent(TWO, "<Q", 16 + 8, 2**64 - 1), "an entry has 64 + 18446744073709551615 bytes"),
        (bent(TWO, "<H", 16 + 2, 0x0102), "an entry has version 0x0102, expected 0x0101"),
        (bent(TWO, "<I", 16 + 28, 0), "an entry has the invalid architecture 0 "),
        (bent(TWO, "<I", 16 + 28, 2**32 - 1), "an entry has the invalid architecture 4294967295"),
        (
            bent(module("compute_80/8.1"), "<H", 16 + 26, 999),
            "an entry has the invalid architecture 80 or PTX version 999.1",
        ),
        (bent(container(concatenation("sm_80")), "<I", 80, 2**32 - 1), "the table of a concatenation"),
        (bent(container(concatenation("sm_80")), "<I", 80, 0), "the table of a concatenation"),
        (bent(container(concatenation("sm_80")), "<I", 36, 2**32 - 1), "the table of a concatenation"),
        (container(concatenation(*["sm_80"] * 1024)), "a concatenation has an invalid header of"),
    ],
)
def test_damage_names_its_offset_and_keeps_what_was_before(data: bytes, damage: str, filed: Scan) -> None:
    before = b"\1" * 104 + module("sm_70")
    found = filed(before + data)
    assert modules(found) == {("sm_70",): 1}
    offset, _, text = found.damage.partition(": ")
    assert text.startswith(damage)
    assert len(before) <= int(offset.removeprefix("at "), 16) <= len(before) + len(data)
    for chunk in (1, 13, 1 << 20):
        assert streamed(before + data, chunk) == found


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with fails("cannot-read-file", "no such file"):
        scan_file(tmp_path / "none", "none")
    with fails("cannot-read-file", "directory"):
        scan_file(tmp_path, "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError):
        scan_file(tmp_path / "pipe", "pipe")


# --- fuzz ----------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    ["sm_50", "sm_75", "sm_80", "sm_90a", "sm_103f", "sm_120", "compute_75/6.3", "compute_90a/8.0", "lto_80"]
)
FORMS = st.tuples(
    st.sampled_from([0, ZSTD, LZ4]), st.binary(max_size=40) | st.just(streams.FATBIN + bytes(99))
)
MARKS = [streams.FATBIN[:4], b"CCOB", streams.BUNDLE, b"\x7fELF\x02\x01"]
JUNK = (st.binary(max_size=40) | st.sampled_from(MARKS)).filter(lambda raw: streams.FATBIN not in raw)
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Laid:
    """A file with its containers: where each begins and ends, and for what it is."""

    data: bytes
    places: tuple[tuple[int, int, tuple[str, ...]], ...]


@st.composite
def laid(draw: st.DrawFn) -> Laid:
    data, places = b"", []
    for texts in draw(st.lists(st.lists(TEXTS, max_size=5), min_size=1, max_size=6)):
        data += draw(JUNK)
        entries = []
        for text in texts:
            flags, payload = draw(FORMS)
            entries.append(entry(text, flags=flags, payload=payload))
        piece = container(concatenation(*texts)) if texts and draw(st.booleans()) else container(*entries)
        order = sorted({parse_code(text) for text in texts}, key=fatbin._order)
        places.append((len(data), len(data) + len(piece), tuple(map(str, order))))
        data += piece
    return Laid(data + draw(JUNK), tuple(places))


@QUICK
@given(laid(), st.integers(1, 200))
def test_random_files_are_read_exactly(filed: Scan, file: Laid, chunk: int) -> None:
    found = filed(file.data)
    assert modules(found) == Counter(codes for _, _, codes in file.places)
    assert found.damage == ""
    assert streamed(file.data, chunk) == found


@QUICK
@given(laid(), st.data(), st.integers(1, 200))
def test_cut_files_tell_what_is_whole(filed: Scan, file: Laid, data: st.DataObject, chunk: int) -> None:
    end = data.draw(st.integers(0, len(file.data)))
    cut = file.data[:end]
    found = filed(cut)
    whole = Counter(codes for _, until, codes in file.places if until <= end)
    assert (modules(found) if found else {}) == whole
    torn = [at for at, until, _ in file.places if at + 24 <= end < until]
    if torn and file.places[[at for at, _, _ in file.places].index(torn[0])][2]:
        assert found is not None
        assert found.damage.startswith(f"at {torn[0]:#x}: ")
    assert streamed(cut, chunk) == found


@QUICK
@given(
    laid(), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6), st.integers(1, 200)
)
def test_bent_files_end_with_an_answer(
    filed: Scan, file: Laid, bends: list[tuple[int, int]], chunk: int
) -> None:
    raw = bytearray(file.data)
    for at, value in bends:
        raw[at % len(raw)] = value
    found = filed(bytes(raw))
    assert found == streamed(bytes(raw), chunk)
    if found and found.damage:
        offset, _, text = found.damage.partition(": ")
        assert int(offset.removeprefix("at "), 16) <= len(raw)
        assert text


# --- hostile files -------------------------------------------------------------------------------

HOSTILE = {
    "entries": lambda: container(header("sm_80") * (fatbin.MAX_ENTRIES + 1)),
    "modules": lambda: container() * (fatbin.MAX_MODULES + 1),
    "different targets": lambda: container(
        *(header(f"compute_80/{n // 100}.{n % 100}") for n in range(fatbin.MAX_CODES + 1))
    ),
    "different sets": lambda: b"".join(
        module(f"sm_{10 + n % 800}", f"sm_{10 + n // 800}a") for n in range(fatbin.MAX_SIGNATURES + 1)
    ),
    "beginnings": lambda: streams.BUNDLE * (fatbin.MAX_FALSE + 1),
}


LIMITS = ("MAX_ENTRIES", "MAX_MODULES", "MAX_CODES", "MAX_SIGNATURES", "MAX_FALSE")


@pytest.mark.parametrize(("what", "limit"), list(zip(HOSTILE, LIMITS, strict=True)))
def test_every_count_has_a_limit(
    what: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fatbin, limit, 50)
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[what]())
    found = scan_file(path, "x")
    assert found is not None
    assert "more than 50 " in found.damage


@pytest.mark.parametrize("what", many(("different sets",), tuple(HOSTILE)))
def test_at_its_limit_a_count_takes_little_memory(what: str, tmp_path: Path) -> None:
    """In a process of its own, so that its memory can be told."""
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[what]())
    program = (
        "import re, sys; from pathlib import Path; from imagefactory.scan.fatbin import scan_file\n"
        "print(scan_file(Path(sys.argv[1]), 'x').damage)\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    damage, kilobytes = done.stdout.splitlines()
    assert damage.startswith("at 0x")
    assert "more than" in damage
    assert int(kilobytes) < 100_000


def test_a_sparse_file_of_a_terabyte_is_jumped_over(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    length = 1 << 40
    body = bent(header("sm_80"), "<Q", 8, length - 16 - 64 - 100)
    with path.open("wb") as file:
        file.write(streams.FATBIN + struct.pack("<Q", length - 16 - 100) + body)
        file.seek(length - 100)
        file.write(b"\0" * 100)
    assert modules(scan_file(path, "sparse")) == {("sm_80",): 1}


# --- what PTX says of itself ---------------------------------------------------------------------

PTX_TEXT = (
    b"//\n// Generated\n//\n\n.version 8.3\n.target %s\n.address_size 64\n" + b".reg .b32 %%r1;\n" * 200
)


def lz4_block(plain: bytes) -> bytes:
    """A raw block: the first 40 bytes as they are, then what repeats those 1, 2 or 16 bytes before it."""
    block, kept, at = b"", b"", 0
    while at < len(plain):
        back, count = 0, 0
        for distance in (1, 2, 16) if at >= 40 else ():
            run = 0
            while at + run < len(plain) and run < 300 and plain[at + run] == plain[at + run - distance]:
                run += 1
            back, count = (distance, run) if run > count else (back, count)
        if count < 4:
            kept, at = kept + plain[at : at + 1], at + 1
            continue
        block += sequence(kept, count - 4) + back.to_bytes(2, "little") + longer(count - 4)
        kept, at = b"", at + count
    return block + sequence(kept, 0)


def sequence(kept: bytes, more: int) -> bytes:
    return bytes([min(len(kept), 15) << 4 | min(more, 15)]) + longer(len(kept)) + kept


def longer(count: int) -> bytes:
    return b"" if count < 15 else b"\xff" * ((count - 15) // 255) + bytes([(count - 15) % 255])


PACKED = {0: bytes, LZ4: lz4_block, ZSTD: zstandard.compress}


@pytest.mark.parametrize("flags", PACKED)
@pytest.mark.parametrize(
    ("header_says", "text_says", "code"),
    [
        ("compute_90/8.3", b"sm_90a", "compute_90a/8.3"),
        ("compute_90/8.3", b"sm_90a, debug", "compute_90a/8.3"),
        ("compute_90/8.3", b"sm_90", "compute_90/8.3"),
        ("compute_100/8.8", b"sm_100f", "compute_100f/8.8"),
        ("compute_90/8.3", b"sm_100", "compute_100/8.3"),
        (
            "compute_90/8.3",
            b"sm_80",
            "compute_90/8.3",
        ),  # the header asks for more
        ("compute_90a/8.3", b"sm_90", "compute_90a/8.3"),
        ("sm_90", b"sm_90a", "sm_90"),  # machine code has no text
    ],
)
def test_ptx_is_for_what_its_text_says(
    flags: int, header_says: str, text_says: bytes, code: str, filed: Scan
) -> None:
    text = entry(header_says, flags=flags, payload=PACKED[flags](PTX_TEXT % text_says))
    data = container(text, entry("sm_80"))
    assert modules(filed(data)) == {tuple(sorted((code, "sm_80"))): 1}
    assert modules(streamed(data, 100)) == modules(filed(data))


@pytest.mark.parametrize("flags", PACKED)
def test_ptx_that_cannot_be_read_goes_by_its_header(flags: int, filed: Scan) -> None:
    for payload in (b"", b"\xff" * 600, b"\x28\xb5\x2f\xfd" + b"\xff" * 60, b"\xf0", b".target sm_"):
        assert modules(filed(container(entry("compute_90/8.3", flags=flags, payload=payload)))) == {
            ("compute_90/8.3",): 1
        }


def test_ptx_without_zstandard_is_told(monkeypatch: pytest.MonkeyPatch, filed: Scan) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    payload = zstandard.compress(PTX_TEXT % b"sm_90a")
    found = filed(container(entry("compute_90/8.3", flags=ZSTD, payload=payload)))
    assert modules(found) == {("compute_90/8.3",): 1}
    assert "zstandard" in found.unread


@QUICK
@given(st.binary(max_size=300), st.integers(0, 2000))
def test_any_bytes_unpack_to_no_more_than_asked(data: bytes, most: int) -> None:
    assert len(streams.lz4_start(data, most)) <= most
    plain = data + bytes(range(256)) + b"ab" * 300
    assert streams.lz4_start(lz4_block(plain), most) == plain[:most]
    assert streams.zstd_start(zstandard.compress(plain), most) == plain[:most]


# --- ELF files -----------------------------------------------------------------------------------


def elf_file(*sections: tuple[int, int, bytes]) -> bytes:
    """An ELF file with sections of (type, flags, content), one after another."""
    body, table = b"", bytes(64)
    for kind, flags, content in sections:
        table += struct.pack("<IIQQQQIIQQ", 0, kind, flags, 0, 64 + len(body), len(content), 0, 0, 1, 0)
        body += content
    head = bytearray(b"\x7fELF\x02\x01\x01" + bytes(57))
    struct.pack_into("<HHI", head, 16, 3, 62, 1)
    struct.pack_into("<Q", head, 40, 64 + len(body))
    struct.pack_into("<HHH", head, 58, 64, len(sections) + 1, 0)
    return bytes(head) + body + table


TEXT, TABLE, DATA = (1, 0x6), (3, 0), (1, 0x2)


def test_machine_code_and_tables_are_passed_over(filed: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    pread = os.pread

    def spy(descriptor: int, count: int, offset: int) -> bytes:
        read.append((offset, count))
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", spy)
    large = b"\x90" * 3_000_000
    data = elf_file((*TEXT, large), (*DATA, module("sm_80") * 3), (*TABLE, large), (*DATA, module("sm_90")))
    assert modules(filed(data)) == {("sm_80",): 3, ("sm_90",): 1}
    assert sum(count for _, count in read) < 100_000
    assert modules(streamed(data, 1 << 16)) == {("sm_80",): 3, ("sm_90",): 1}


def test_sections_at_odds_are_searched_whole(filed: Scan) -> None:
    inside = b"\x90" * 200_000 + module("sm_80")
    data = bytearray(elf_file((*TEXT, inside), (*DATA, b"x" * 64)))
    table = struct.unpack_from("<Q", data, 40)[0]
    struct.pack_into("<Q", data, table + 128 + 24, 200_100)  # the second section lies within the first
    assert modules(filed(bytes(data))) == {("sm_80",): 1}


@QUICK
@given(st.binary(max_size=400), st.integers(0, 60), st.binary(min_size=1, max_size=8))
def test_bent_elf_files_raise_nothing(filed: Scan, tail: bytes, at: int, value: bytes) -> None:
    raw = bytearray(elf_file((*TEXT, b"\x90" * 70_000), (*DATA, module("sm_80"))) + tail)
    raw[at : at + len(value)] = value
    filed(bytes(raw))
    assert isinstance(
        fatbin.skippable(lambda offset, count: bytes(raw[offset : offset + count]), len(raw)), tuple
    )


def program(size: int, *segments: tuple[int, int, int]) -> bytes:
    """An ELF file of `size` bytes with segments of (type, offset, bytes) and its sections told at the end."""
    table = b"".join(
        struct.pack("<IIQQQQQQ", kind, 4, start, 0, 0, length, length, 1) for kind, start, length in segments
    )
    head = bytearray(b"\x7fELF\x02\x01\x01" + bytes(57))
    struct.pack_into("<HHI", head, 16, 3, 62, 1)
    struct.pack_into("<QQ", head, 32, 64, size - 128)
    struct.pack_into("<HHHH", head, 54, 56, len(segments), 64, 2)
    return (bytes(head) + table).ljust(size, b"\0")


READ, RUN, WRITE = 4, 5, 6


def loaded(*segments: tuple[int, bytes], tail: bytes = b"") -> bytes:
    """A shared library of segments (flags, content), one after another; none of them maps `tail`."""
    head = bytearray(program(fatbin.HEADERS, *((1, 0, 0) for _ in segments)))
    struct.pack_into("<Q", head, 40, 0)  # no sections
    struct.pack_into("<H", head, 60, 0)
    at = fatbin.HEADERS
    for number, (flags, content) in enumerate(segments):
        struct.pack_into("<IIQ", head, 64 + 56 * number, 1, flags, at)
        struct.pack_into("<Q", head, 64 + 56 * number + 32, len(content))
        at += len(content)
    return bytes(head) + b"".join(content for _, content in segments) + tail


@pytest.mark.parametrize("chunk", [1000, 1 << 16, 1 << 22])
def test_what_no_program_sees_as_data_is_passed_over(filed: Scan, chunk: int) -> None:
    """By the segments, which stand in front: the same for a file and for a stream."""
    idle = b"\x90" * 100_000
    hidden = idle + module("sm_70") + idle
    data = loaded((READ, module("sm_80")), (RUN, hidden), (WRITE, idle + module("sm_90")), tail=hidden)
    assert modules(filed(data)) == {("sm_80",): 1, ("sm_90",): 1}
    assert streamed(data, chunk) == filed(data)
    # An older linker puts what is only read beside the code, into one segment.
    data = loaded((RUN, hidden), (WRITE, idle + module("sm_90")), tail=hidden)
    assert modules(filed(data)) == {("sm_70",): 1, ("sm_90",): 1}
    assert streamed(data, chunk) == filed(data)
    # It does so too where `.lrodata`, farther away, has a segment that may only be read.
    data = loaded((RUN, hidden), (WRITE, idle + module("sm_90")), (READ, idle), tail=hidden)
    assert modules(filed(data)) == {("sm_70",): 1, ("sm_90",): 1}
    assert streamed(data, chunk) == filed(data)


@pytest.mark.parametrize(
    ("form", "at", "value"),
    [
        ("<H", 16, 1),  # an object, which has no segments to go by
        ("<H", 54, 32),  # of another size
        ("<H", 56, 1000),  # more than are read
        ("<Q", 32, 1 << 40),  # elsewhere
        ("<Q", 64 + 56 + 32, 1 << 40),  # past the end
        ("<I", 64 + 56, 2),  # nothing that holds data is loaded
    ],
)
def test_segments_that_are_not_understood_hide_nothing(filed: Scan, form: str, at: int, value: int) -> None:
    data = bytearray(
        loaded((RUN, b"\x90" * 100_000), (WRITE, b"x" * 100), tail=bytes(100_000) + module("sm_80"))
    )
    struct.pack_into("<I", data, 64 + 4, READ if at == 64 + 56 else RUN)
    if at == 64 + 56:
        struct.pack_into("<I", data, 64, 2)
    struct.pack_into(form, data, at, value)
    found = filed(bytes(data))
    assert modules(found) == {("sm_80",): 1}
    assert streamed(bytes(data), 5000) == found


def test_a_file_that_is_cut_is_said(filed: Scan) -> None:
    """Also where all of its GPU code was in what is missing."""
    whole = program(8192, (1, 0, 1024), (1, 4096, 3072), (4, 8000, 10**9))
    assert filed(whole) is None
    assert filed(whole[:8000]) is None  # all that is loaded is there
    found = filed(whole[:5000])
    assert found.modules == ()
    assert found.damage == "at 0x1388: the file is truncated, expected at least 0x1c00 bytes"
    found = filed(whole[:2000] + module("sm_80"))
    assert modules(found) == {("sm_80",): 1}
    assert found.damage.startswith("at 0x8")
    for data in (whole[:5000], whole[:2000] + module("sm_80"), whole[:100]):
        assert streamed(data, 7) == filed(data)
    linked = bytearray(elf_file((*DATA, b"x" * 4000)))
    struct.pack_into("<H", linked, 16, 1)
    assert filed(bytes(linked)) is None
    assert "truncated" in filed(bytes(linked[:3000])).damage


def test_targets_of_amd_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else bundles for ever other targets would be remembered without end."""
    monkeypatch.setattr(fatbin, "MAX_ENTRIES", 20)
    one = bundle(*(f"hipv4-amdgcn-amd-amdhsa--gfx{number:x}" for number in range(0x900, 0x908)))
    assert scan_bytes(one * 2, "x").damage == ""
    found = scan_bytes(one * 3, "x")
    assert found.damage == f"at {2 * len(one):#x}: the file has more than 20 entries"
    assert [each.count for each in found.modules] == [2]


def test_the_limits_of_offload_tables() -> None:
    ids = [f"hipv4-amdgcn-amd-amdhsa--gfx{n:x}" for n in range(0x600, 0x600 + fatbin.MAX_TARGETS + 1)]
    assert scan_bytes(bundle(*ids), "x") is None
    assert modules(scan_bytes(bundle(*ids[:-1]), "x")) == {tuple(sorted(one[25:] for one in ids[:-1])): 1}


WORTH = 1 << 17


def elf_with_code(sections: int, listed: int) -> bytes:
    """A file with a range of machine code and a table of so many sections, of which it lists `listed`."""
    table = 64 + WORTH
    head = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", table)
    head = head.ljust(58, b"\0") + struct.pack("<HHH", 64, listed, 0)
    code = struct.pack("<IIQQQQ", 0, 1, 4, 0, 64, WORTH).ljust(64, b"\0")
    return head + bytes(WORTH) + code * sections


def skipped(data: bytes, size: int) -> tuple[tuple[int, int], ...]:
    return skippable(lambda offset, count: data[offset : offset + count], size)


def test_machine_code_is_passed_over() -> None:
    data = elf_with_code(sections=1, listed=1)
    assert skipped(data, len(data)) == ((64, 64 + WORTH),)


def test_a_table_that_goes_beyond_the_file_tells_nothing() -> None:
    data = elf_with_code(sections=1, listed=2)
    assert skipped(data, len(data)) == ()
    # It was longer when its size was asked, and is cut where an entry ends or within one.
    assert skipped(data, len(data) + 64) == ()
    assert skipped(data[:-10], len(data) + 64) == ()
