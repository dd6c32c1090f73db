"""What a place holds for GPUs: a file, a folder, a wheel. One file after another, nothing is executed.

GPU code is looked for in files that begin as ELF, as an archive of objects, or as a container of GPU
code; what else files tell is findings.py's. scan_layers.py does the same for layers and images.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.gpu.fatbin import Reader, scan_file
from imagefactory.gpu.findings import (
    TEXT_LIMIT,
    Found,
    format_contents,
    is_text,
    parse_facts,
    read_name,
    readable_path,
    tells_facts,
)
from imagefactory.gpu.model import Contents
from imagefactory.oci.inflate import DamagedError, inflate
from imagefactory.progress import Progress, Task

HEAD = 24  # bytes by which a file is told
SMALLEST = 64  # bytes; no container of GPU code is smaller
CHUNK = 1 << 17  # small: what one call cannot take in yet is copied
MEMBERS = 100_000  # the most of a zip
DIRECTORY = 32 << 20  # bytes; the largest list of members
PLAIN = 64 << 30  # bytes; the most that an archive may unpack to
_STARTS = (b"\x7fELF", b"!<arch>\n", b"!<thin>\n", b"\x50\xed\x55\xba", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB")

_PACKED = (
    b"PK\x03\x04",
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ\0",
    b"\x28\xb5\x2f\xfd",
)  # zip, gzip, bzip2, xz, zstd


def is_candidate(head: bytes) -> bool:
    """Whether a file that begins so may hold GPU code. `head` is its first `HEAD` bytes."""
    return head.startswith(_STARTS)


class Look:
    """One file of a stream: fed with its bytes in any portions, then closed."""

    def __init__(self, path: str, size: int) -> None:
        self._named, self._size = read_name(path), size
        self._facts = tells_facts(path, size)
        self._head = bytearray()
        self._reader: Reader | None = None
        self._idle = size < SMALLEST or (is_text(path) and not self._facts)

    @property
    def idle(self) -> bool:
        """Whether the rest of the bytes would tell nothing more."""
        return self._idle

    def feed(self, data: bytes | memoryview) -> None:
        if self._reader is not None:
            self._reader.feed(data)
        elif not self._idle:
            self._head += data
            if not self._facts and len(self._head) >= HEAD:
                self._decide()

    def _decide(self) -> None:
        if is_candidate(bytes(self._head[:HEAD])):
            self._reader = Reader(self._named.path, self._size)
            self._reader.feed(bytes(self._head))
        self._head.clear()
        self._idle = self._reader is None

    def close(self) -> Found:
        named = self._named
        facts = parse_facts(named.path, self._head.decode("utf-8", "replace")) if self._facts else ()
        library = self._reader.close() if self._reader is not None else None
        return Found(
            path=named.path, library=library, package=named.package, facts=facts, toolkit=named.toolkit
        )


# --- files and folders ---------------------------------------------------------------------------


def scan_path(path: Path, progress: Progress, *, workers: int = 1) -> Contents:
    """A folder, a wheel, a conda package or one file. A .sif is sif_file.py's.

    Raises UsageError for what cannot be read or is damaged.
    """
    source = str(path) if path.is_dir() else path.name
    return format_contents(source, find_in(path, progress, workers=workers))


def find_in(path: Path, progress: Progress, *, workers: int = 1) -> tuple[Found, ...]:
    """What single files tell, in a place as `scan_path` takes it."""
    if path.is_dir():
        return _find_in_folder(path, progress, workers)
    if path.suffix == ".whl":
        return _find_in_wheel(path, progress, workers)
    if path.name.endswith((".conda", ".tar.bz2")):
        from imagefactory.gpu.scan_conda import find_in_conda

        return find_in_conda(path, progress)
    with readable(path):
        name = readable_path(path.name)
        _refuse_archive(path)
        found, candidate = _look_at(path.absolute().as_posix(), name, path.stat().st_size)
        if candidate:
            found = replace(found, library=scan_file(path, name))
    return (found,) if found else ()


def _refuse_archive(path: Path) -> None:
    """Raises UsageError for a packed file: that nothing was found in it would be no answer."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(262)
    if head.startswith(_PACKED) or head[257:262] == b"ustar":
        raise UsageError(
            f"{path} is an archive or packed, and is not looked into",
            hint="unpack it and name the folder; an image: imagefactory pull, or name it with its registry",
        )


def scan_folder(folder: Path, progress: Progress, *, workers: int = 1) -> Contents:
    """All regular files below, each inode once, links not followed; of `/` not what is no disk."""
    return format_contents(str(folder), _find_in_folder(folder, progress, workers))


def _find_in_folder(folder: Path, progress: Progress, workers: int) -> tuple[Found, ...]:
    files = sorted(_files(folder))
    total = sum(size for _, size in files)
    root = folder.absolute().as_posix().rstrip("/")
    with (
        progress.task(f"scan {folder.name or folder}", total=total) as task,
        stopping_pool(workers) as pool,
    ):

        def look(file: str, named: Found, size: int) -> Found:
            with readable(Path(file)):
                found = replace(named, library=scan_file(Path(file), named.path))
            task.advance(size)
            return found

        # Most files show by name or first bytes that they hold no code: only the others are worth a thread.
        found: list[Found | Future[Found]] = []
        small = 0
        for path, size in files:
            file = f"{root}/{path}"
            with readable(file):
                named, candidate = _look_at(file, readable_path(path), size)
            if candidate:
                found.append(pool.submit(look, file, named, size))
                continue
            small += size
            if small > CHUNK:
                task.advance(small)
                small = 0
            if named:
                found.append(named)
        task.advance(small)
        return tuple(one for entry in found if (one := entry if isinstance(entry, Found) else entry.result()))


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Relative path and size of the regular files that may tell something."""
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    not_on_disk = {"proc", "sys", "dev"} if folder.resolve() == Path("/") else set()
    while waiting:
        below = waiting.pop()
        with readable(folder / below), os.scandir(folder / below) as entries:
            for entry in entries:
                path = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if path not in not_on_disk:
                        waiting.append(path)
                    continue
                # Names of libraries tell versions whatever they are: `libcudart.so.12` is often a link.
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISLNK(facts.st_mode) and read_name(readable_path(path)).toolkit:
                    yield path, 0
                if stat.S_ISREG(facts.st_mode) and (facts.st_dev, facts.st_ino) not in seen:
                    seen.add((facts.st_dev, facts.st_ino))
                    yield path, facts.st_size


def _look_at(file: str, path: str, size: int) -> tuple[Found, bool]:
    """What a file's name and text tell, and whether its first bytes say that it may hold GPU code."""
    named = read_name(path)
    facts: tuple[tuple[str, str, str], ...] = ()
    candidate = False
    if tells_facts(file, size):  # by the whole place: a folder may itself be `torch`
        with Path(file).open("rb") as handle:
            facts = parse_facts(file, handle.read(TEXT_LIMIT).decode("utf-8", "replace"))
    elif size >= SMALLEST and not is_text(path):
        handle_number = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            candidate = is_candidate(os.pread(handle_number, HEAD, 0))
        finally:
            os.close(handle_number)
    return Found(
        path=path, library=None, package=named.package, facts=facts, toolkit=named.toolkit
    ), candidate


@contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """Turns the operating system's refusal to read `path` into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", hint="name what this user may read") from error


@contextmanager
def stopping_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose waiting work is dropped when one fails or the user interrupts."""
    pool = ThreadPoolExecutor(max_workers=max(1, workers))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# --- wheels --------------------------------------------------------------------------------------


def scan_wheel(path: Path, progress: Progress, *, workers: int = 1) -> Contents:
    """What a wheel installs, paths as below site-packages. Members are inflated in threads, never kept.

    Raises UsageError for a file that is no zip, is damaged, has members that overlap, or that would
    unpack to more than 64 GB.
    """
    return format_contents(path.name, _find_in_wheel(path, progress, workers))


def _find_in_wheel(path: Path, progress: Progress, workers: int) -> tuple[Found, ...]:
    with readable(path):
        members = members_of(path)
        # The largest first: the last to end should not be the one that takes longest.
        members.sort(key=lambda one: -one.compress_size)
        total = sum(one.compress_size for one in members)
        with (
            progress.task(f"scan {path.name}", total=total) as task,
            stopping_pool(workers) as pool,
        ):
            found = pool.map(lambda member: _look_in(path, member, task), members)
            return tuple(one for one in found if one)


def members_of(path: Path) -> list[zipfile.ZipInfo]:
    """The files of a zip that may tell something. Raises UsageError for a hostile or damaged one."""
    size = path.stat().st_size
    try:
        _check_directory(path, size)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise damaged(path, str(error)) from error
    end = size
    for member in sorted(members, key=lambda one: -one.header_offset):
        if member.header_offset + member.compress_size > end or member.header_offset < 0:
            raise damaged(path, f"{member.filename[:80]!r} overlaps with another member")
        end = member.header_offset
    if sum(member.file_size for member in members) > PLAIN:
        raise damaged(path, f"it would unpack to more than {PLAIN} bytes")
    return [member for member in members if not member.is_dir()]


def _check_directory(path: Path, size: int) -> None:
    """Raises ValueError where the zip's list of members is too long to be read (APPNOTE 4.3.14, 4.3.16)."""
    with path.open("rb") as file:
        file.seek(max(0, size - 65_557 - 20))
        tail = file.read()
        at = len(tail) - 22  # where it stands without a comment, and zipfile looks first
        if tail[at : at + 4] != b"PK\x05\x06" or tail[-2:] != b"\0\0":
            at = tail.rfind(b"PK\x05\x06")
        if at < 0:
            raise ValueError("it is no zip archive")
        found = [struct.unpack_from("<HI", tail.ljust(at + 22), at + 10)]
        if at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07":
            found = [(found[0][0] % 0xFFFF, found[0][1] % 0xFFFFFFFF)]
            # The larger record stands where this says, or right before, where zipfile takes it.
            told = int.from_bytes(tail[at - 12 : at - 4], "little")
            for place in (min(told, size), max(0, size - len(tail) + at - 76)):
                file.seek(place)
                record = file.read(56)
                if record[:4] == b"PK\x06\x06":
                    found.append(struct.unpack_from("<QQ", record.ljust(56), 32))
    count, length = map(max, zip(*found, strict=True))
    if count > MEMBERS or length > DIRECTORY:
        raise ValueError(f"it lists {count} members in {length} bytes")


def _look_in(path: Path, member: zipfile.ZipInfo, task: Task) -> Found:
    name = readable_path(re.sub(r"^[^/]+\.data/(?:pure|plat)lib/", "", member.filename))
    look = Look(name, member.file_size)
    pieces = member_bytes(path, member)
    try:
        while not look.idle and (piece := next(pieces, b"")):
            look.feed(piece)
    except DamagedError as error:
        raise damaged(path, f"{name}: {error}") from error
    task.advance(member.compress_size)
    return look.close()


def member_bytes(path: Path, member: zipfile.ZipInfo) -> Iterator[bytes]:
    """The member's plain bytes, exactly as many as it says. Raises DamagedError."""
    left = member.file_size
    for piece in _inflated(_packed_bytes(path, member), member.compress_type):
        left -= len(piece)
        if left < 0:
            break
        yield piece
    if left:
        raise DamagedError(f"it does not hold the {member.file_size} bytes that the archive's list says")


def _inflated(packed: Iterator[bytes], method: int) -> Iterator[bytes]:
    if method == zipfile.ZIP_STORED:
        return packed
    if method == zipfile.ZIP_DEFLATED:
        return inflate(packed)
    raise DamagedError(f"it is packed by method {method}, which wheels do not use")


def _packed_bytes(path: Path, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(member.header_offset)
        header = file.read(30)
        if header[:4] != b"PK\x03\x04" or len(header) < 30:
            raise DamagedError(f"no member begins at byte {member.header_offset}")
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        left = member.compress_size
        while left and (data := file.read(min(left, CHUNK))):
            left -= len(data)
            yield data
    if left:
        raise DamagedError("the file is cut")


def damaged(path: Path, why: str) -> UsageError:
    kind = "wheel" if path.suffix == ".whl" else "conda package"
    return UsageError(f"{path} is no proper {kind}: {why}", hint="fetch it again")
