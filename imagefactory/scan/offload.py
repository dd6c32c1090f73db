"""AMD's GPU code in a file: clang's offload bundles, plain and compressed (`.hip_fatbin`).

A bundle begins with a table of its targets (clang's documentation of clang-offload-bundler):
`"__CLANG_OFFLOAD_BUNDLE__" | u64 entries`, then for each `u64 offset | u64 size | u64 length | id`, where an
id is `hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-`. A compressed one begins with
`"CCOB" | u16 version | u16 method` and the sizes of the whole, compressed and not (u32, in version 3 u64;
version 1 lacks the first), then a hash of 8 bytes. Only its beginning is decompressed.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Generator
from dataclasses import dataclass

from imagefactory.gpu.capability import Code, parse_code
from imagefactory.scan.streams import BUNDLE, Piece, Request
from imagefactory.scan.packed import ZSTD_START, zstd_start

MAX_TARGETS = 512
MAX_TABLE = 1 << 16
_MAX_ID = 256
_ID = re.compile(r"([a-z][a-z0-9]*)(?:-[A-Za-z0-9_.]*){3,}(?:[:][a-z0-9:+-]*)?")
_PROCESSOR = re.compile(r"-(gfx[0-9a-f]+(?:-[0-9-]*generic|-generic)?(?::[a-z]+[+-])*)\Z")


class Damaged(Exception):
    """A bundle or container that cannot be what it says; `offset` is where in the file."""

    def __init__(self, offset: int, text: str) -> None:
        super().__init__(text)
        self.offset = offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The targets of one bundle and where it ends. `compression` as in `model.Library`.

    `unread` names targets that are not AMD's processors.
    """

    codes: tuple[Code, ...]
    unread: tuple[str, ...]
    end: int
    compression: str


class NotOne(Exception):
    """The mark stands there by chance (a string constant of a tool that reads bundles)."""


Steps = Generator[Request, Piece, Bundle]


def read_bundle(at: int, size: int) -> Steps:
    """The plain bundle at offset `at` of a file of `size` bytes. Raises NotOne and Damaged."""
    start = at + len(BUNDLE)
    raw = (yield Request(start, 8)).data
    if len(raw) < 8:
        raise NotOne
    count = int.from_bytes(raw, "little")
    if not 0 < count <= MAX_TARGETS:
        raise NotOne
    place, end, names = start + 8, start + 8, []
    for number in range(count):
        entry = (yield Request(place, 24)).data
        if len(entry) < 24:
            raise Damaged(place, "the table of an offload bundle is cut off")
        offset, length, name_length = struct.unpack("<QQQ", entry)
        if not 0 < name_length <= _MAX_ID or place + 24 + name_length - at > MAX_TABLE:
            if not number:
                raise NotOne
            raise Damaged(place, f"a target's name of {name_length} bytes in an offload bundle")
        name = (yield Request(place + 24, name_length)).data
        if len(name) < name_length:
            raise Damaged(place, "the table of an offload bundle is cut off")
        if at + offset + length > size:
            raise Damaged(place, "an offload bundle reaches past the end of the file")
        names.append((place, name))
        place += 24 + name_length
        end = max(end, place, at + offset + length)
    codes, unread = _targets(names)
    return Bundle(codes=codes, unread=unread, end=end, compression="none")


def read_compressed_bundle(at: int, size: int) -> Steps:
    """The compressed bundle at offset `at`. Raises NotOne, Damaged, and ToolError without zstandard."""
    head = (yield Request(at, 32)).data
    if len(head) < 24:
        raise NotOne
    version, method = struct.unpack_from("<HH", head, 4)
    header = {1: 20, 2: 24, 3: 32}[version]
    end = size  # version 1 does not tell
    if version > 1:
        end = at + struct.unpack_from("<I" if version == 2 else "<Q", head, 8)[0]
    if end <= at + header:
        raise NotOne
    if end > size:
        raise Damaged(at, "a compressed offload bundle reaches past the end of the file")
    payload = (yield Request(at + header, min(end - at - header, ZSTD_START))).data
    table = _inflated(payload) if method == 0 else zstd_start(payload, MAX_TABLE)
    if not table.startswith(BUNDLE):
        raise Damaged(at + header, "a compressed offload bundle that holds none")
    steps = read_bundle(0, 1 << 64)
    try:
        request = next(steps)
        while True:
            request = steps.send(
                Piece(request.offset, table[request.offset : request.offset + request.length])
            )
    except StopIteration as stop:
        inner: Bundle = stop.value
    except (NotOne, Damaged) as error:
        raise Damaged(at + header, "the table in a compressed offload bundle cannot be read") from error
    return Bundle(
        codes=inner.codes,
        unread=inner.unread,
        end=at + header if version == 1 else end,
        compression="other" if method == 0 else "zstd",
    )


def _targets(names: list[tuple[int, bytes]]) -> tuple[tuple[Code, ...], tuple[str, ...]]:
    """Processors, and what else device code is for; the host has none."""
    codes, unread = set(), []
    for place, name in names:
        text = name.decode("ascii", "replace")
        found = _ID.fullmatch(text)
        if not found:
            raise Damaged(place, f"an offload bundle for {text[:60]!a}, which names no target")
        if found[1] == "host":
            continue
        processor = _PROCESSOR.search(text)
        try:
            codes.add(parse_code(processor[1] if processor else text))
        except ValueError:
            unread.append(text[:60])
    return tuple(sorted(codes, key=str)), tuple(sorted(unread))


def _inflated(payload: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(payload, MAX_TABLE)
    except zlib.error:
        return b""
