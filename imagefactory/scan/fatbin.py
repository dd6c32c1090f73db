"""Find the GPU code in a file by headers: fat binaries and cubins of CUDA, bundles and objects of AMD.

A container is `u32 magic | u16 version 1 | u16 header size 16 | u64 size of its entries`. An entry has a
header of 64 bytes or more: u16 kind at 0, u16 version at 2, u32 header size at 4, u64 padded size of the
data at 8, u32 compressed size at 16, u32 offset of options at 20, u16 minor and major at 24 (of PTX's
instruction set), u32 architecture at 28, u64 flags at 40, u64 uncompressed size at 56. A concatenation (kind
256, CUDA 13.4 `--concat`) has as options a table `u32 count | u32 size`, then for each of its pieces such a
header of 64 bytes, and options if that header has any. All this was measured on the output of nvcc 11.7 to
13.5.

Containers are found by their magic anywhere in the file, since other sections than `.nv_fatbin` have them
too. The inside of a container is skipped, never searched.

The first kilobyte of PTX is decompressed, since headers by other tools than nvcc may lack the suffix: 1,149
entries in TensorFlow 2.16 to 2.20 have 90 in the header and begin with `.target sm_90a`, which a driver
compiles only for 9.0. Nothing else is decompressed, no size in a file decides an allocation, and every count
has a limit. So a hostile file ends with `damage`, not with a hang.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import ToolError, UsageError, os_problem
from imagefactory.gpu.capability import Capability, CodeKind, GpuCode, parse_code
from imagefactory.gpu.values import GpuLibrary, ModuleCount
from imagefactory.scan.streams import (
    BUNDLE,
    FATBIN,
    ZSTD_START,
    BytesPiece,
    ForwardReader,
    ReadRequest,
    Walk,
    has_mark,
    lz4_start,
    zstd_start,
)

# --- ELF files, as far as a search for GPU code needs them: skippable ranges, truncation, targets
# In doubt nothing is skipped: a file with truncated, too long or contradictory tables is searched whole.


HEADER_SIZE = 64
MACHINE_CUDA, MACHINE_AMD = 190, 224

_MAX_SECTIONS = 4096
_SEGMENTS_READ = 64
_LOADED, _RELOCATABLE = 1, 1
_LINKED = (2, 3)  # programs and shared libraries
_MAY_RUN, _MAY_WRITE = 1, 2
_WORTH_PASSING = 1 << 16
_NOBITS = 8
# Symbols, strings, relocations, hashes, the dynamic table, symbol versions: tables written by linkers.
_TABLES = frozenset({2, 3, 4, 5, 6, 9, 11, 0x6FFFFFF6, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF})
_EXECUTABLE = 0x4
_SEGMENT = struct.Struct("<IIQ16xQ16x")  # type, flags, offset in the file, bytes there
HEADERS = HEADER_SIZE + 56 * _SEGMENTS_READ  # bytes that usually contain the table of segments

# AMD processors by the lowest byte of `e_flags`, from 0x20 on, 16 in a line; `-` is none.
_AMD_NAMES = """
600 601 700 701 702 703 704 - 801 802 803 810 900 902 904 906
908 909 90c 1010 1011 1012 1030 1031 1032 1033 602 705 805 1035 1034 90a
940 1100 1013 1150 1103 1036 1101 1102 1200 1250 1151 941 942 - 1201 950
1310 9-generic 10-1-generic 10-3-generic 11-generic 1152 - 1154 1153 12-generic
1251 12-5-generic 1172 1170 1171 9-4-generic
"""
_AMD_PROCESSORS = {0x20 + at: f"gfx{name}" for at, name in enumerate(_AMD_NAMES.split()) if name != "-"}

Read = Callable[[int, int], bytes]


def elf_machine(head: bytes) -> int:
    """Return the machine of a 64-bit ELF file from its first bytes, 0 for other files."""
    if len(head) < HEADER_SIZE or head[:6] != b"\x7fELF\x02\x01":
        return 0
    return int(struct.unpack_from("<H", head, 18)[0])


def parse_cubin_target(head: bytes) -> GpuCode | None:
    """Return the target of a cubin from its first bytes, None for invalid flags.

    The lowest byte of `e_flags` is the number and 0x800 the suffix `a`. From version 8 of the ABI (sm_100 in
    CUDA 12, all of CUDA 13) it is the second byte and 0x8. CUDA 13 has the suffix only in the options of
    ptxas in `.note.nv.tkinfo` (measured with ptxas 12.1 to 13.5).
    """
    flags = struct.unpack_from("<I", head, 48)[0]
    number, narrow = (flags >> 8 & 0xFF, flags & 0x8) if head[8] >= 8 else (flags & 0xFF, flags & 0x800)
    if number < 10:
        return None
    match = re.search(rb"-arch[ =]sm_%d([af]?)[ \0]" % number, head)
    suffix = match[1].decode() if match else ""
    architecture = Capability(number // 10, number % 10)
    return GpuCode(CodeKind.SASS, architecture, suffix=suffix or ("a" if narrow else ""))


def parse_amd_target(head: bytes) -> GpuCode | None:
    """Return the target of an AMD code object from its first bytes, None if unknown.

    In `e_flags` the lowest byte is the processor. The next bytes are its features: each must be off (2), on
    (3), or may be either. Before version 4 of the code object (2 in `e_ident`) they are only the features
    that are on. Source: LLVM, User Guide for AMDGPU Backend, ELF header.
    """
    flags, version = struct.unpack_from("<I", head, 48)[0], head[8]
    processor = _AMD_PROCESSORS.get(flags & 0xFF, "")
    if not processor or not version:
        return None
    if version == 1:
        settings = (("sramecc", "+" if flags & 0x200 else ""), ("xnack", "+" if flags & 0x100 else ""))
    else:
        words = ("", "", "-", "+")
        settings = (("sramecc", words[flags >> 10 & 3]), ("xnack", words[flags >> 8 & 3]))
    features = "".join(f":{name}{setting}" for name, setting in settings if setting)
    return GpuCode(CodeKind.AMD, None, processor=processor + features)


def lacks_tables(head: bytes, size: int) -> bool:
    """Return whether the table of sections would be past the end of a file of `size` bytes."""
    if len(head) < HEADER_SIZE or head[:6] != b"\x7fELF\x02\x01":
        return False
    table, (entry, count) = struct.unpack_from("<Q", head, 40)[0], struct.unpack_from("<HH", head, 58)
    return bool(table + entry * count > size)


def loaded_end(head: bytes) -> int:
    """Return the least length of a file that can be loaded or linked, from its first bytes; 0 if unknown.

    `head` is from a file that `lacks_tables`.
    """
    kind, sections = struct.unpack_from("<H", head, 16)[0], struct.unpack_from("<Q", head, 40)[0]
    if kind == _RELOCATABLE:
        return int(sections)
    return max((end for _, _, end in _loaded(head)), default=0)


def _loaded(head: bytes) -> list[tuple[int, int, int]]:
    """Return flags, start and end in the file of the loaded segments in `head`."""
    position, (entry, count) = struct.unpack_from("<Q", head, 32)[0], struct.unpack_from("<HH", head, 54)
    loaded = []
    for number in range(min(count, _SEGMENTS_READ)):
        at = position + number * entry
        if entry != _SEGMENT.size or at + entry > len(head):
            break
        kind, flags, offset, length = _SEGMENT.unpack_from(head, at)
        if kind == _LOADED:
            loaded.append((flags, offset, offset + length))
    return loaded


def unmapped(head: bytes, size: int) -> tuple[tuple[int, int], ...]:
    """Return ranges (start, end) of a linked file that no program can read as data after loading.

    They come from its first `HEADERS` bytes, so that streams can be checked too. They are unmapped parts
    (symbols, debugging) and segments of machine code, unless the linker put data next to the code: then the
    first segment may be executable (`.lrodata` has a read-only segment of its own, as in cuBLASLt 12.8 and
    cuDNN 9.10). GPU code is registered from memory, so these ranges have none.
    """
    if len(head) < HEADER_SIZE or head[:6] != b"\x7fELF\x02\x01":
        return ()
    kind, position = struct.unpack_from("<H", head, 16)[0], struct.unpack_from("<Q", head, 32)[0]
    entry, count = struct.unpack_from("<HH", head, 54)
    if kind not in _LINKED or entry != _SEGMENT.size or position + entry * count > min(len(head), HEADERS):
        return ()
    loaded = _loaded(head)
    first = min(loaded, key=lambda segment: segment[1], default=(_MAY_RUN, 0, 0))
    apart = not first[0] & (_MAY_RUN | _MAY_WRITE)
    data = [segment for segment in loaded if not apart or segment[0] & (_MAY_RUN | _MAY_WRITE) != _MAY_RUN]
    mapped = _joined([(start, end) for _, start, end in data])
    if not mapped or mapped[-1][1] > size:
        return ()
    passed = zip([HEADERS, *(end for _, end in mapped)], [*(start for start, _ in mapped), size], strict=True)
    return tuple((start, end) for start, end in passed if end - start >= _WORTH_PASSING)


def skippable(read: Read, size: int) -> tuple[tuple[int, int], ...]:
    """Return ranges (start, end) of a file without GPU code: machine code of the host and linkers' tables.

    `read(offset, count)` returns bytes of the file. Empty for a file that is not a 64-bit ELF file.
    """
    head = read(0, HEADER_SIZE)
    if len(head) < HEADER_SIZE or head[:6] != b"\x7fELF\x02\x01":
        return ()
    table, (entry, count) = struct.unpack_from("<Q", head, 40)[0], struct.unpack_from("<HH", head, 58)
    if entry != 64 or not 0 < count <= _MAX_SECTIONS or table + entry * count > size:
        return ()
    raw = read(table, entry * count)
    if len(raw) < entry * count:
        return ()
    passed: list[tuple[int, int]] = []
    used: list[tuple[int, int]] = []
    for at in range(0, len(raw), entry):
        kind, flags = struct.unpack_from("<IQ", raw, at + 4)
        start, length = struct.unpack_from("<QQ", raw, at + 24)
        if kind == _NOBITS or not length:
            continue
        if start + length > size:
            return ()
        idle = kind in _TABLES or flags & _EXECUTABLE
        (passed if idle else used).append((start, start + length))
    ranges = sorted(_joined(passed))
    if any(start < until and since < end for start, end in used for since, until in ranges):
        return ()
    return tuple((start, end) for start, end in ranges if end - start >= _WORTH_PASSING)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


# --- AMD GPU code in a file: clang's offload bundles, plain and compressed (`.hip_fatbin`)
# A bundle begins with a table of its targets (clang's documentation of clang-offload-bundler):
# `"__CLANG_OFFLOAD_BUNDLE__" | u64 entries`, then for each `u64 offset | u64 size | u64 length | id`. An id
# is `hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-`. A compressed one begins with `"CCOB" | u16 version |
# u16 method` and the sizes of the whole, compressed and not (u32, in version 3 u64; version 1 lacks the
# first), then a hash of 8 bytes. Only its beginning is decompressed.


MAX_TARGETS = 512
MAX_TABLE = 1 << 16
_MAX_ID = 256
_ID = re.compile(r"([a-z][a-z0-9]*)(?:-[A-Za-z0-9_.]*){3,}(?:[:][a-z0-9:+-]*)?")
_PROCESSOR = re.compile(r"-(gfx[0-9a-f]+(?:-[0-9-]*generic|-generic)?(?::[a-z]+[+-])*)\Z")


class CorruptBundleError(Exception):
    """An invalid bundle or container at `offset` in the file."""

    def __init__(self, offset: int, text: str) -> None:
        super().__init__(text)
        self.offset = offset


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBundle:
    """The targets of one bundle and its end. `compression` is as in `GpuLibrary`.

    `unread` has targets that are not AMD processors.
    """

    codes: tuple[GpuCode, ...]
    unread: tuple[str, ...]
    end: int
    compression: str


class NotABundleError(Exception):
    """A magic that occurs by chance, such as a string constant of a tool that reads bundles."""


Steps = Generator[ReadRequest, BytesPiece, OffloadBundle]


def read_bundle(at: int, size: int) -> Steps:
    """Return the plain bundle at offset `at`. Raises NotABundleError and CorruptBundleError."""
    start = at + len(BUNDLE)
    raw = (yield ReadRequest(start, 8)).data
    if len(raw) < 8:
        raise NotABundleError
    count = int.from_bytes(raw, "little")
    if not 0 < count <= MAX_TARGETS:
        raise NotABundleError
    position, end, names = start + 8, start + 8, []
    for number in range(count):
        entry = (yield ReadRequest(position, 24)).data
        if len(entry) < 24:
            raise CorruptBundleError(position, "the table of an offload bundle is truncated")
        offset, length, name_length = struct.unpack("<QQQ", entry)
        if not 0 < name_length <= _MAX_ID or position + 24 + name_length - at > MAX_TABLE:
            if not number:
                raise NotABundleError
            raise CorruptBundleError(position, f"an offload bundle has a target name of {name_length} bytes")
        name = (yield ReadRequest(position + 24, name_length)).data
        if len(name) < name_length:
            raise CorruptBundleError(position, "the table of an offload bundle is truncated")
        if at + offset + length > size:
            raise CorruptBundleError(position, "an offload bundle reaches past the end of the file")
        names.append((position, name))
        position += 24 + name_length
        end = max(end, position, at + offset + length)
    codes, unread = _targets(names)
    return OffloadBundle(codes=codes, unread=unread, end=end, compression="none")


def read_compressed_bundle(at: int, size: int) -> Steps:
    """Read the compressed bundle at offset `at`.

    Raises NotABundleError, CorruptBundleError, and ToolError without zstandard.
    """
    head = (yield ReadRequest(at, 32)).data
    if len(head) < 24:
        raise NotABundleError
    version, method = struct.unpack_from("<HH", head, 4)
    header = {1: 20, 2: 24, 3: 32}[version]
    end = size  # version 1 does not have it
    if version > 1:
        end = at + struct.unpack_from("<I" if version == 2 else "<Q", head, 8)[0]
    if end <= at + header:
        raise NotABundleError
    if end > size:
        raise CorruptBundleError(at, "a compressed offload bundle reaches past the end of the file")
    payload = (yield ReadRequest(at + header, min(end - at - header, ZSTD_START))).data
    table = _inflated(payload) if method == 0 else zstd_start(payload, MAX_TABLE)
    if not table.startswith(BUNDLE):
        raise CorruptBundleError(at + header, "a compressed offload bundle has no content")
    steps = read_bundle(0, 1 << 64)
    try:
        request = next(steps)
        while True:
            request = steps.send(
                BytesPiece(request.offset, table[request.offset : request.offset + request.length])
            )
    except StopIteration as stop:
        inner: OffloadBundle = stop.value
    except (NotABundleError, CorruptBundleError) as error:
        raise CorruptBundleError(
            at + header, "the table of a compressed offload bundle is not readable"
        ) from error
    return OffloadBundle(
        codes=inner.codes,
        unread=inner.unread,
        end=at + header if version == 1 else end,
        compression="other" if method == 0 else "zstd",
    )


def _targets(names: list[tuple[int, bytes]]) -> tuple[tuple[GpuCode, ...], tuple[str, ...]]:
    """Return the processors and other targets of device code, without the host."""
    codes, unread = set(), []
    for position, name in names:
        text = name.decode("ascii", "replace")
        match = _ID.fullmatch(text)
        if not match:
            raise CorruptBundleError(position, f"an offload bundle has the invalid target {text[:60]!a}")
        if match[1] == "host":
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


MAX_ENTRIES = 1 << 18  # headers read of one file, including concatenations and AMD targets
MAX_MODULES = 1 << 17
MAX_SIGNATURES = 1 << 14  # different sets of targets
MAX_CODES = 1 << 12  # different targets
MAX_OPTIONS = 1 << 16  # bytes of a concatenation's header
MAX_FALSE = 10_000  # marks without a container
_MAX_UNREAD = 8

_CUBIN_HEAD = 1 << 20  # bytes in which the notes of a cubin are searched
_MAX_WHOLE_BYTES = 1 << 20  # bytes that are searched at once if they arrive so
_ENTRY = struct.Struct("<HHIQIIHHIQQQQ")
_ENTRY_VERSION = 0x0101
_ALIGNMENT = 8  # of a container by nvcc and the linker
_CODE_KINDS = {1: CodeKind.PTX, 2: CodeKind.SASS, 8: CodeKind.LTO}
_TILE, _CONCATENATION = 128, 256
_LZ4, _ZSTD, _SUFFIX_A, _SUFFIX_F = 0x2000, 0x8000, 0x100000, 0x200000
_SUFFIXES = {b"a": _SUFFIX_A, b"f": _SUFFIX_F}
_TEXT = 1 << 10  # bytes of PTX in which its target is searched; nvcc writes it within the first 300
_TARGET = re.compile(rb"^[ \t]*\.target[ \t]+sm_([0-9]{2,3})([af]?)\b", re.MULTILINE)


class CodeReader:
    """Finds the GPU code in consecutive bytes. Only a window of them is in memory.

    `path` is the library's name in the result, `size` the number of bytes to come.
    """

    def __init__(self, path: str, size: int) -> None:
        self._fed = 0
        self._size = size
        self._head: bytearray | None = bytearray()  # until the skippable ranges are known
        self._passed: tuple[tuple[int, int], ...] = ()
        self._findings = _FatbinParser(path, size)
        self._forward = ForwardReader(self._findings.walk())

    def feed(self, chunk: bytes | memoryview) -> None:
        """Process the next bytes. Raises ToolError if a package for AMD's compressed code is missing."""
        end = self._fed + len(chunk)
        if self._head is not None:
            self._head += chunk[: HEADERS - len(self._head)]
            if len(self._head) == HEADERS:
                self._passed, self._head = unmapped(bytes(self._head), self._size), None
        while want := self._forward.wants:
            offset, count = want
            if self._forward.searching:
                offset, count = _next_ranges(self._passed, offset, count)
            if offset >= end:
                break
            start = offset - self._fed
            if (
                not start
                and self._forward.searching
                and isinstance(chunk, bytes)
                and len(chunk) <= _MAX_WHOLE_BYTES
            ):
                piece = chunk  # whole, not copied piece by piece
            else:
                piece = bytes(chunk[start : start + count])
            self._forward.give(offset, piece)
        self._fed = end

    def close(self) -> GpuLibrary | None:
        """Return the result, None without GPU code."""
        self._forward.end()
        return self._findings.library()


def scan_file(path: Path, name: str) -> GpuLibrary | None:
    """Return the GPU code in a file, None without any. `name` is the library's name in the result.

    Only the parts that may have such code are read. Raises UsageError for an unreadable file, and ToolError
    like `CodeReader.feed`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        size = os.fstat(descriptor).st_size
        findings = _FatbinParser(name, size)
        forward = ForwardReader(findings.walk())
        passed = unmapped(os.pread(descriptor, HEADERS, 0), size)
        passed = passed or skippable(lambda offset, count: os.pread(descriptor, count, offset), size)
        while want := forward.wants:
            offset, count = want
            if forward.searching:
                offset, count = _next_ranges(passed, offset, count)
            data = os.pread(descriptor, count, offset)
            if not data:
                break
            forward.give(offset, data)
        forward.end()
        return findings.library()
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)


def may_have_code(data: bytes) -> bool:
    """Return whether `CodeReader` may report something about a whole file, faster than by reading it."""
    head = data[:HEADER_SIZE]
    return elf_machine(head) in (MACHINE_CUDA, MACHINE_AMD) or lacks_tables(head, len(data)) or has_mark(data)


def scan_bytes(buffer: bytes | memoryview | mmap.mmap, path: str) -> GpuLibrary | None:
    """Return the GPU code in a file in memory. `path` is its name in the result."""
    with memoryview(buffer) as view:
        reader = CodeReader(path, len(view))
        reader.feed(view)
        return reader.close()


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(*os_problem("read", path, error), hint="check that it exists and that you can read it")


def _next_ranges(passed: tuple[tuple[int, int], ...], offset: int, count: int) -> tuple[int, int]:
    """Return the next bytes to search, without the ranges `passed`."""
    for start, end in passed:
        if start <= offset < end:
            offset = end
        elif offset < start:
            return offset, min(count, start - offset)
    return offset, count


class _FatbinParser:
    """Parses one file, and has its results so far."""

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        self._size = size
        self._modules: dict[tuple[GpuCode, ...], int] = {}
        self._count = 0
        self._entries = 0
        self._false = 0
        self._codes: dict[tuple[int, int, int, int, int], GpuCode] = {}
        self._amd: dict[str, GpuCode] = {}
        self._compressions: set[str] = set()
        self._unread: dict[str, int] = {}
        self._unread_at = 0
        self._damage = ""

    def library(self) -> GpuLibrary | None:
        if not self._modules and not self._damage:
            return None
        modules = (ModuleCount(codes=codes, count=count) for codes, count in self._modules.items())
        return GpuLibrary(
            path=self._path,
            size=self._size,
            modules=tuple(sorted(modules, key=lambda module: tuple(map(str, module.codes)))),
            compressions=tuple(sorted(self._compressions)),
            damage=self._damage,
            unread=self._describe_unread(),
        )

    def walk(self) -> Walk:
        try:
            head = (yield ReadRequest(0, HEADER_SIZE)).data
            machine = elf_machine(head)
            if machine == MACHINE_CUDA:
                self._cubin((yield ReadRequest(0, _CUBIN_HEAD)).data)
                return
            if machine == MACHINE_AMD:
                self._code_object(head)
                return
            end = 0
            if lacks_tables(head, self._size):
                end = loaded_end((yield ReadRequest(0, HEADERS)).data)
            yield from self._search()
            if end > self._size:
                raise CorruptBundleError(
                    self._size, f"the file is truncated, expected at least {end:#x} bytes"
                )
        except CorruptBundleError as damage:
            self._damage = f"at {damage.offset:#x}: {damage}"

    def _cubin(self, head: bytes) -> None:
        code = parse_cubin_target(head)
        if code is None:
            raise CorruptBundleError(48, "the flags of a cubin have no architecture")
        self._compressions.add("none")
        self._add(0, {code})

    def _code_object(self, head: bytes) -> None:
        code = parse_amd_target(head)
        if code is None:
            self._leave(48, "code for an unknown GPU of AMD's")
        self._compressions.add("none")
        self._add(0, {code} if code else set())

    def _search(self) -> Walk:
        at = 0
        while True:
            at, mark = yield ReadRequest(at, 0)
            if not mark:
                return
            try:
                if mark == FATBIN:
                    at = yield from self._container(at)
                else:
                    read = read_bundle if mark == BUNDLE else read_compressed_bundle
                    bundle = yield from read(at, self._size)
                    self._compressions.add(bundle.compression)
                    for target in bundle.unread:
                        self._leave(at, f"target {target}")
                    for _ in bundle.codes:
                        self._count_entry(at)
                    self._add(at, {self._amd.setdefault(code.processor, code) for code in bundle.codes})
                    at = bundle.end
            except NotABundleError:
                self._false += 1
                if self._false > MAX_FALSE:
                    raise CorruptBundleError(
                        at, f"more than {MAX_FALSE} magic numbers of containers without a container"
                    ) from None
                at += len(mark)

    def _container(self, at: int) -> Generator[ReadRequest, BytesPiece, int]:
        """Read the container at `at` and return its end."""
        head = (yield ReadRequest(at, 32)).data
        if len(head) < 16:
            raise CorruptBundleError(at, "the header of a fat binary is truncated")
        position = at + 16
        end: int = position + int.from_bytes(head[8:16], "little")
        # Tools that create or read fat binaries have the same bytes in their machine code, at any offset.
        doubtful = end > self._size or (at % _ALIGNMENT and end > position)
        if doubtful and (len(head) < 24 or struct.unpack_from("<H", head, 18)[0] != _ENTRY_VERSION):
            raise NotABundleError
        if end > self._size:
            raise CorruptBundleError(at, f"a fat binary ends at {end:#x}, past the end of the file")
        codes: set[GpuCode] = set()
        compressions: set[str] = set()
        while position < end:
            position = yield from self._entry(position, end, (codes, compressions))
        self._compressions |= compressions
        self._add(at, codes)
        return end

    def _entry(
        self, at: int, end: int, into: tuple[set[GpuCode], set[str]]
    ) -> Generator[ReadRequest, BytesPiece, int]:
        """Read the entry header at `at`, in a container that ends at `end`. Return the next position."""
        raw = (yield ReadRequest(at, _ENTRY.size)).data if at + _ENTRY.size <= end else b""
        if len(raw) < _ENTRY.size:
            raise CorruptBundleError(at, "the header of an entry in a fat binary is truncated")
        kind, version, header, padded, compressed, options, *_ = _ENTRY.unpack(raw)
        flags, uncompressed = struct.unpack_from("<Q", raw, 40)[0], struct.unpack_from("<Q", raw, 56)[0]
        if version != _ENTRY_VERSION:
            raise CorruptBundleError(
                at, f"an entry has version {version:#06x}, expected {_ENTRY_VERSION:#06x}"
            )
        if header < _ENTRY.size or header + padded > end - at:
            raise CorruptBundleError(
                at, f"an entry has {header} + {padded} bytes, more than the remaining {end - at}"
            )
        codes, compressions = into
        if flags & _ZSTD:
            compressions.add("zstd")
        elif flags & _LZ4:
            compressions.add("lz4")
        else:
            compressions.add("other" if compressed and uncompressed > compressed else "none")
        if kind == _CONCATENATION:
            if header > MAX_OPTIONS:
                raise CorruptBundleError(at, f"a concatenation has an invalid header of {header} bytes")
            table = (yield ReadRequest(at, header)).data[options:]
            self._concatenation(at, table, codes)
        else:
            text = b""
            most = min(compressed or padded, padded, ZSTD_START if flags & _ZSTD else _TEXT)
            if kind == 1 and most and not flags & (_SUFFIX_A | _SUFFIX_F):
                text = self._ptx(at, flags, (yield ReadRequest(at + header, most)).data)
            self._code(at, raw, codes, text)
        return int(at + header + padded)

    def _ptx(self, at: int, flags: int, packed: bytes) -> bytes:
        """Return the first kilobyte of PTX. Unreadable PTX is counted as unread, and nothing returned."""
        if not flags & _ZSTD:
            return lz4_start(packed, _TEXT) if flags & _LZ4 else packed
        try:
            return zstd_start(packed, _TEXT)
        except ToolError:
            self._leave(at, "PTX by only its header, because zstandard is not installed")
            return b""

    def _concatenation(self, at: int, table: bytes, codes: set[GpuCode]) -> None:
        count, length = struct.unpack_from("<II", table) if len(table) >= 8 else (0, 0)
        pieces, position = 0, 8
        while position + _ENTRY.size <= min(length, len(table)):
            piece = table[position : position + _ENTRY.size]
            self._code(at, piece, codes)
            pieces, position = pieces + 1, position + _ENTRY.size
            (options,) = struct.unpack_from("<I", piece, 20)
            if options:  # the offset of a text, its length, the text with a nul, padded
                length_of_text = int.from_bytes(table[position + 4 : position + 8], "little")
                position += 8 + (length_of_text // 8 + 1) * 8
        if not pieces or (pieces, position) != (count, length):
            raise CorruptBundleError(at, "the table of a concatenation is larger than its header")

    def _code(self, at: int, raw: bytes, codes: set[GpuCode], text: bytes = b"") -> None:
        """Add the target of an entry, from its header, or for PTX from its text."""
        self._count_entry(at)
        kind = struct.unpack_from("<H", raw)[0]
        minor, major, architecture = struct.unpack_from("<HHI", raw, 24)
        suffix = struct.unpack_from("<Q", raw, 40)[0] & (_SUFFIX_A | _SUFFIX_F)
        if kind != 1:
            minor = major = 0  # of the format of its ELF file, or nothing
        if target := _TARGET.search(text):
            architecture = max(architecture, int(target[1]))
            suffix |= _SUFFIXES.get(target[2], 0)
        key = (kind, architecture, suffix, major, minor)
        code = self._codes.get(key)
        if code is None:
            if kind not in _CODE_KINDS:
                self._leave(at, f"CUDA Tile IR (type {_TILE})" if kind == _TILE else f"type {kind}")
                return
            if not 10 <= architecture <= 999 or major > 99 or minor > 99:
                raise CorruptBundleError(
                    at, f"an entry has the invalid architecture {architecture} or PTX version {major}.{minor}"
                )
            if len(self._codes) == MAX_CODES:
                raise CorruptBundleError(at, f"the file has more than {MAX_CODES} different targets")
            code = self._codes[key] = GpuCode(
                _CODE_KINDS[kind],
                Capability(architecture // 10, architecture % 10),
                suffix="a" if suffix & _SUFFIX_A else "f" if suffix else "",
                isa=f"{major}.{minor}" if kind == 1 else "",
            )
        codes.add(code)

    def _count_entry(self, at: int) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise CorruptBundleError(at, f"the file has more than {MAX_ENTRIES} entries")

    def _add(self, at: int, codes: set[GpuCode]) -> None:
        self._count += 1
        if self._count > MAX_MODULES:
            raise CorruptBundleError(at, f"the file has more than {MAX_MODULES} fat binaries")
        signature = tuple(sorted(codes, key=_order))
        if signature not in self._modules and len(self._modules) == MAX_SIGNATURES:
            raise CorruptBundleError(
                at, f"the file has fat binaries for more than {MAX_SIGNATURES} different sets of targets"
            )
        self._modules[signature] = self._modules.get(signature, 0) + 1

    def _leave(self, at: int, message: str) -> None:
        """Count an unknown entry."""
        if not self._unread:
            self._unread_at = at
        if message not in self._unread and len(self._unread) >= _MAX_UNREAD:
            message = "other types"
        self._unread[message] = self._unread.get(message, 0) + 1

    def _describe_unread(self) -> str:
        if not self._unread:
            return ""
        counts = ", ".join(f"{count} of {message}" for message, count in sorted(self._unread.items()))
        return f"{counts}, the first at {self._unread_at:#x}"


def _order(code: GpuCode) -> tuple[str, Capability, str, str, str]:
    return (code.kind, code.architecture or Capability(0, 0), code.suffix, code.isa, code.processor)
