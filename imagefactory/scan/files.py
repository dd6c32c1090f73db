"""Find GPU code in a file, a directory or a wheel. Files are read one by one, and never executed.

The file name decides the type. layers.py scans layers and images.
"""

from __future__ import annotations

import bz2
import mmap
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import UsageError, redact
from imagefactory.gpu.frameworks import LibraryRole, role_of
from imagefactory.gpu.values import ScanResult
from imagefactory.http import HttpSession, RejectedError, Response, arriving, read_some
from imagefactory.oci.inflate import PIECE, CorruptDataError, plain_layer
from imagefactory.oci.tar_stream import FILE, TarStream, entries
from imagefactory.progress import QUIET, Progress, ProgressTask
from imagefactory.scan.fatbin import scan_file
from imagefactory.scan.findings import (
    CHUNK,
    HEAD,
    SMALLEST,
    TEXT_LIMIT,
    FileFinding,
    FileScan,
    format_contents,
    is_candidate,
    is_text,
    may_hold_driver_note,
    may_hold_facts,
    only_name_counts,
    parse_facts,
    parse_note,
    read_name,
    readable,
    readable_path,
    stopping_pool,
)
from imagefactory.scan.layers import scan_layer
from imagefactory.scan.zip import (
    PLAIN,
    RemoteMember,
    damaged,
    member_bytes,
    members_of,
    remote_members,
    streamed_bytes,
)

# --- The files of a conda package: `.conda` (a zip with a tar in zstd) and the older `.tar.bz2`
# Paths are relative to the environment's prefix.


_RECORD = 16 << 20  # bytes of a package's own record
_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"


def find_in_conda(path: Path, progress: Progress) -> tuple[FileFinding, ...]:
    """Return a conda package's findings. Raises UsageError if it is corrupt, ToolError without zstandard."""
    with readable(path), progress.task(f"scan {path.name}", total=path.stat().st_size) as task:
        try:
            findings = scan_layer(_bounded(_tar(path, task))).findings
        except CorruptDataError as error:
            raise damaged(path, str(error)) from error
    record = read_name(f"conda-meta/{path.name.removesuffix('.conda').removesuffix('.tar.bz2')}.json")
    # `info/` is about the package and is not installed.
    return (
        *((record,) if record else ()),
        *(finding for finding in findings if not finding.path.startswith("info/")),
    )


def read_index(path: Path) -> bytes:
    """Return the package's own record, `info/index.json`. Raises like `find_in_conda`."""
    with readable(path), QUIET.task(path.name) as task:
        try:
            stream = TarStream(_bounded(_tar(path, task, part="info")))
            for entry in entries(stream):
                if entry.path == "info/index.json" and entry.kind == FILE:
                    if entry.size > _RECORD:
                        raise CorruptDataError(f"its info/index.json has {entry.size} bytes")
                    return entry.read(entry.size)
            raise CorruptDataError("it has no info/index.json")
        except CorruptDataError as error:
            raise damaged(path, str(error)) from error


def _tar(path: Path, task: ProgressTask, part: str = "pkg") -> Iterator[bytes]:
    if path.suffix == ".bz2":
        return _bunzip(_counted(_chunks(path), task))
    members = [member for member in members_of(path) if member.filename.startswith(f"{part}-")]
    if len(members) != 1 or not members[0].filename.endswith(".tar.zst"):
        raise CorruptDataError(f"it has no {part}-*.tar.zst")
    return plain_layer(_ZSTD, _counted(member_bytes(path, members[0]), task))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            yield data


def _counted(chunks: Iterator[bytes], task: ProgressTask) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        task.advance(len(chunk))


def _bounded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = PLAIN
    for chunk in chunks:
        rest -= len(chunk)
        if rest < 0:
            raise CorruptDataError(f"it unpacks to more than {PLAIN} bytes")
        yield chunk


def _bunzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield consecutive streams, in pieces of at most 256 KiB."""
    stream, begun = bz2.BZ2Decompressor(), False
    for chunk in chunks:
        data = chunk
        while data or (begun and not stream.needs_input):
            try:
                piece = stream.decompress(data, PIECE)
            except OSError as error:
                raise CorruptDataError(str(error)) from error
            begun, data = True, b""
            if piece:
                yield piece
            if stream.eof:
                data = stream.unused_data
                stream, begun = bz2.BZ2Decompressor(), False
    if begun:
        raise CorruptDataError("the data is truncated")


_PACKED = (
    b"PK\x03\x04",
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ\0",
    b"\x28\xb5\x2f\xfd",
)  # zip, gzip, bzip2, xz, zstd


# --- files and directories -----------------------------------------------------------------------


def scan_path(path: Path, progress: Progress, *, workers: int = 1) -> ScanResult:
    """Scan a directory, a wheel, a conda package or a file. For a .sif see sif.py.

    Raises UsageError for an unreadable or corrupt file.
    """
    source = str(path) if path.is_dir() else path.name
    return format_contents(source, find_in(path, progress, workers=workers))


def find_in(path: Path, progress: Progress, *, workers: int = 1) -> tuple[FileFinding, ...]:
    """Return the findings of single files in the paths that `scan_path` accepts."""
    if path.is_dir():
        return _find_in_directory(path, progress, workers)
    if path.suffix == ".whl":
        return _find_in_wheel(path, progress, workers)
    if path.name.endswith((".conda", ".tar.bz2")):
        return find_in_conda(path, progress)
    with readable(path):
        name = readable_path(path.name)
        _check_not_archive(path)
        finding, candidate = _classify_file(path.absolute().as_posix(), name, path.stat().st_size)
        if candidate:
            finding = replace(finding, library=scan_file(path, name))
    return (finding,) if finding else ()


def _check_not_archive(path: Path) -> None:
    """Raise UsageError for a compressed file, because an empty result would be misleading."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(262)
    if head.startswith(_PACKED) or head[257:262] == b"ustar":
        raise UsageError(
            "scan-archive-unsupported",
            f"{path} is an archive or compressed file, which cannot be scanned",
            hint="unpack it and pass the directory; for an image, pass its name with the registry",
        )


def scan_directory(directory: Path, progress: Progress, *, workers: int = 1) -> ScanResult:
    """Scan all regular files below a directory, each inode once, without links; of `/` only disks."""
    return format_contents(str(directory), _find_in_directory(directory, progress, workers))


def _find_in_directory(directory: Path, progress: Progress, workers: int) -> tuple[FileFinding, ...]:
    files = sorted(_files(directory))
    total = sum(size for _, size in files)
    root = directory.absolute().as_posix().rstrip("/")
    with (
        progress.task(f"scan {directory.name or directory}", total=total) as task,
        stopping_pool(workers) as pool,
    ):

        def look(file: str, named: FileFinding, size: int) -> FileFinding:
            with readable(Path(file)):
                finding = replace(named, library=scan_file(Path(file), named.path))
            task.advance(size)
            return finding

        # Most files have no code by their name or first bytes: only the others get a thread.
        findings: list[FileFinding | Future[FileFinding]] = []
        small = 0
        for path, size in files:
            file = f"{root}/{path}"
            with readable(file):
                named, candidate = _classify_file(file, readable_path(path), size)
            if candidate:
                findings.append(pool.submit(look, file, named, size))
                continue
            small += size
            if small > CHUNK:
                task.advance(small)
                small = 0
            if named:
                findings.append(named)
        task.advance(small)
        return tuple(
            finding
            for entry in findings
            if (finding := entry if isinstance(entry, FileFinding) else entry.result())
        )


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield relative path and size of the regular files to scan."""
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    not_on_disk = {"proc", "sys", "dev"} if directory.resolve() == Path("/") else set()
    while waiting:
        below = waiting.pop()
        with readable(directory / below), os.scandir(directory / below) as entries:
            # By name: of a file's several names the same one is reported in any directory order.
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if path not in not_on_disk:
                        waiting.append(path)
                    continue
                # Names of libraries have versions even if they are links, such as `libcudart.so.12`.
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISLNK(facts.st_mode):
                    named = read_name(readable_path(path))
                    if named and named.toolkit:
                        yield path, 0
                if stat.S_ISREG(facts.st_mode) and (facts.st_dev, facts.st_ino) not in seen:
                    seen.add((facts.st_dev, facts.st_ino))
                    yield path, facts.st_size


def _classify_file(file: str, path: str, size: int) -> tuple[FileFinding, bool]:
    """Return the finding from a file's name and text, and whether its first bytes may be GPU code."""
    named = read_name(path) or FileFinding(path=path)
    facts, candidate = named.facts, False
    if may_hold_facts(file, size):  # by the whole path: the directory itself may be `torch`
        with Path(file).open("rb") as handle:
            facts = parse_facts(file, handle.read(TEXT_LIMIT).decode("utf-8", "replace"))
    elif size >= SMALLEST and not is_text(path):
        handle_number = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            candidate = is_candidate(os.pread(handle_number, HEAD, 0))
            if candidate and may_hold_driver_note(path):
                with mmap.mmap(handle_number, 0, access=mmap.ACCESS_READ) as whole:
                    facts += parse_note(path, whole)
        finally:
            os.close(handle_number)
    return replace(named, facts=facts), candidate


# --- wheels --------------------------------------------------------------------------------------


def scan_wheel(path: Path, progress: Progress, *, workers: int = 1) -> ScanResult:
    """Scan a wheel, with paths relative to site-packages. Members are inflated in threads, never stored.

    Raises UsageError for a file that is not a zip, is corrupt, has overlapping members, or would unpack to
    more than 64 GB.
    """
    return format_contents(path.name, _find_in_wheel(path, progress, workers))


def _find_in_wheel(path: Path, progress: Progress, workers: int) -> tuple[FileFinding, ...]:
    with readable(path):
        members = members_of(path)
        # The largest first: a long scan should not be the last one.
        members.sort(key=lambda member: -member.compress_size)
        total = sum(member.compress_size for member in members)
        with (
            progress.task(f"scan {path.name}", total=total) as task,
            stopping_pool(workers) as pool,
        ):
            findings = pool.map(lambda member: _scan_contents(path, member, task), members)
            return tuple(finding for finding in findings if finding)


def _scan_contents(path: Path, member: zipfile.ZipInfo, task: ProgressTask) -> FileFinding | None:
    finding = _scan_member(path, member, member_bytes(path, member))
    task.advance(member.compress_size)
    return finding


def _scan_member(path: Path, member: zipfile.ZipInfo, pieces: Iterator[bytes]) -> FileFinding | None:
    name = _installed_path(member)
    look = FileScan(name, member.file_size)
    try:
        while not look.idle and (piece := next(pieces, b"")):
            look.feed(piece)
    except CorruptDataError as error:
        raise damaged(path, f"{name}: {error}") from error
    return look.close()


def _installed_path(member: zipfile.ZipInfo) -> str:
    return readable_path(re.sub(r"^[^/]+\.data/(?:pure|plat)lib/", "", member.filename))


# --- wheels on a server, read by ranges. Nothing is stored


_GAP = 1 << 20  # bytes that are read and dropped, because another request would take longer
_RUN = 64 << 20  # bytes of one request, so that a large wheel is read by several threads
_COMPILER = re.compile(r"ptxas|libnvrtc[-.].*|libnvvm\.so.*|.*libdevice.*\.bc|libtvm\.so|libtilelang.*\.so")


class NoRangesError(RejectedError):
    """A server that cannot send parts of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWheel:
    """A wheel on a server: what its list of members says (`named`), and the `runs` of members to read.

    `skipped` are bytes of members that cannot change an answer.
    """

    filename: str
    url: str
    named: tuple[FileFinding, ...]
    runs: tuple[tuple[RemoteMember, ...], ...]
    skipped: int

    @property
    def size(self) -> int:
        """The bytes to read."""
        return sum(member.end - member.start for run in self.runs for member in run)


def open_remote_wheel(web: HttpSession, url: str, filename: str, size: int, *, every: bool) -> RemoteWheel:
    """Return a wheel on a server, of which only the list of members was read.

    Without `every`, libraries that choose their own code (cuBLAS, cuDNN) are skipped. Raises NoRangesError
    for a server without ranges, HttpError, and UsageError for a hostile or corrupt list.
    """

    def read_range(start: int, end: int) -> bytes:
        def read(response: Response) -> bytes:
            check_range(response, start)
            return read_some(response.raw, end - start)

        return web.request(url, read, headers={"Range": f"bytes={start}-{end - 1}"})

    named: list[FileFinding | None] = []
    runs: list[list[RemoteMember]] = []
    skipped = 0
    for member in remote_members(read_range, size, filename):
        name = _installed_path(member.info)
        reported = not every and role_of(name, None)[0] is LibraryRole.REPORT
        if reported or only_name_counts(name, member.info.file_size):
            skipped += member.info.compress_size if reported else 0
            named.append(_compiler(name, read_name(name)))
            continue
        begin, last = (runs[-1][0].start, runs[-1][-1].end) if runs else (0, 0)
        if not runs or member.start - last > _GAP or last - begin > _RUN:
            runs.append([])
        runs[-1].append(member)
    return RemoteWheel(
        filename=filename,
        url=url,
        named=tuple(finding for finding in named if finding),
        runs=tuple(map(tuple, runs)),
        skipped=skipped,
    )


def _compiler(path: str, finding: FileFinding | None) -> FileFinding | None:
    """Return a finding with the name of a compiler for GPUs (NVRTC, ptxas), which makes code at run time."""
    name = path.rpartition("/")[2]
    if not _COMPILER.fullmatch(name):
        return finding
    finding = finding or FileFinding(path=path)
    return replace(finding, toolkit=finding.toolkit or name)


def compilers(contents: ScanResult) -> tuple[str, ...]:
    """Return the compilers for GPUs in streamed contents, by their file names."""
    return tuple(name for name in contents.toolkit if _COMPILER.fullmatch(name))


def check_range(response: Response, start: int) -> None:
    """Raise NoRangesError unless a response is the part of the file from `start` on."""
    content_range = response.headers.get("Content-Range", "")
    if response.status_code != 206 or not content_range.startswith(f"bytes {start}-"):
        raise NoRangesError(f"{redact(response.url)}: the server cannot send a part of a file")


def scan_run(
    web: HttpSession, wheel: RemoteWheel, run: Sequence[RemoteMember], task: ProgressTask
) -> tuple[FileFinding, ...]:
    """Return the findings of neighboring members, which are read in as few requests as possible.

    Raises like `open_remote_wheel`.
    """
    findings: list[FileFinding | None] = []

    def attempt() -> None:
        while len(findings) < len(run):
            start, end = run[len(findings)].start, run[-1].end
            with web.open(wheel.url, headers={"Range": f"bytes={start}-{end - 1}"}) as response:
                check_range(response, start)
                _scan_stream(TarStream(arriving(response.raw)), start)

    def _scan_stream(stream: TarStream, start: int) -> None:
        for member in run[len(findings) :]:
            gap = member.start - start - stream.position
            if gap > _GAP:
                return
            stream.skip(gap)
            path = Path(wheel.filename)
            finding = _scan_member(path, member.info, streamed_bytes(stream, member))
            findings.append(_compiler(_installed_path(member.info), finding))
            task.advance(member.end - member.start)

    try:
        web.retry_policy.retry(attempt, progress=lambda: len(findings))
    except CorruptDataError as error:  # it ended early
        raise damaged(Path(wheel.filename), str(error)) from error
    return tuple(finding for finding in findings if finding)
