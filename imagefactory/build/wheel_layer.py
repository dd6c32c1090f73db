"""Convert a wheel to tar entries, without installing it.

pypa/installer decides the path of each file (schemes, scripts, RECORD). The source in this file inflates
with isal in a fixed order, and the destination writes tar entries instead of files.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import posixpath
import re
import stat
import struct
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO, StringIO
from os import PathLike
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from installer import install
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError, InvalidWheelSource
from installer.records import Hash, InvalidRecordEntry, RecordEntry, parse_record_file
from installer.scripts import Script
from installer.sources import WheelContentElement, WheelFile
from installer.utils import SCHEME_NAMES, Scheme, construct_record_file, fix_shebang, parse_entrypoints
from isal import isal_zlib

from imagefactory.errors import BuildError
from imagefactory.oci.inflate import CorruptDataError, inflate
from imagefactory.oci.layers import DeflateStream, TarSegment
from imagefactory.scan.zip import check_list, check_members, data_start

READ = 256 * 1024
PYTHON_SCRIPT = b"#!python"
TEXT = 64 << 20  # bytes; the limit of a file that is read completely
SHORT_TEXT = 1 << 20  # the same for files that become objects many times their size


class PackageMismatchError(BuildError):
    """A package in the cache differs from its lock.

    `name` is the file name of a wheel, or of a linked conda package's record in conda-meta.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPrefix:
    """The environment of a wheel: its `prefix` in the image (`/opt/env`) and its Python (`3.11`).

    `venv` is false if that Python is the environment's own.
    """

    prefix: str
    python: str
    venv: bool = True

    @property
    def site_packages(self) -> str:
        return f"{self.prefix}/lib/python{self.python}/site-packages"

    def folder(self, scheme: str, distribution: str) -> str:
        """Return the scheme's directory inside the image, as in sysconfig and pip."""
        include = f"include/site/python{self.python}" if self.venv else f"include/python{self.python}"
        directories = {
            "purelib": self.site_packages,
            "platlib": self.site_packages,
            "headers": f"{self.prefix}/{include}/{distribution}",
            "scripts": f"{self.prefix}/bin",
            "data": self.prefix,
        }
        return directories[scheme]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFile:
    """One file of a wheel: its path inside the image and its content (`sha256=...`)."""

    path: str
    content: str


class BytecodeCompiler(Protocol):
    def compile(self, path: str, source: bytes) -> bytes | None:
        """Return the .pyc of `source`, or None if it is not valid for this Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedWheelReader:
    """A wheel's open file with a verified hash, and a callback for the number of bytes read."""

    file: IO[bytes]
    report: Callable[[int], None]


class WheelMember:
    """One file of a wheel as a stream of inflated chunks. Its CRC is checked at the end."""

    def __init__(
        self, archive: VerifiedWheelReader, info: zipfile.ZipInfo, record: tuple[str, str, str]
    ) -> None:
        self._archive, self.info, self.record = archive.file, info, record
        self._report = archive.report
        self.size = info.file_size

    def chunks(self) -> Iterator[bytes]:
        self._archive.seek(data_start(self._archive, self.info))
        if self.info.compress_type == zipfile.ZIP_STORED:
            packed = self._packed(self._report)
        elif self.info.compress_type == zipfile.ZIP_DEFLATED:
            packed = inflate(self._packed(self._report))
        else:
            raise BuildError(
                "wheel-invalid",
                f"{self.info.filename} has the unsupported compression method {self.info.compress_type}",
            )
        crc, size = 0, 0
        for chunk in packed:
            crc = isal_zlib.crc32(chunk, crc)
            size += len(chunk)
            if size > self.info.file_size:
                raise BuildError("wheel-invalid", f"{self.info.filename} is larger than its declared size")
            yield chunk
        if crc != self.info.CRC or size != self.info.file_size:
            raise BuildError("wheel-invalid", f"{self.info.filename} is corrupt (wrong CRC)")

    @property
    def deflated(self) -> DeflateStream | None:
        """Its packed bytes, valid once `chunks` reached their end."""
        if self.info.compress_type != zipfile.ZIP_DEFLATED:
            return None

        def chunks() -> Iterator[bytes]:
            self._archive.seek(data_start(self._archive, self.info))
            return self._packed(lambda _: None)

        return DeflateStream(size=self.info.compress_size, crc=self.info.CRC, chunks=chunks)

    def _packed(self, report: Callable[[int], None]) -> Iterator[bytes]:
        remaining = self.info.compress_size
        while remaining:
            data = self._archive.read(min(READ, remaining))
            if not data:
                raise BuildError("wheel-invalid", f"{self.info.filename} is truncated")
            remaining -= len(data)
            report(len(data))
            yield data

    def head(self, count: int) -> bytes:
        head = b""
        for chunk in self.chunks():
            head += chunk
            if len(head) >= count:
                break
        return head[:count]

    def bytes(self, limit: int = TEXT) -> bytes:
        """Return the complete file. Raises BuildError if it is larger than `limit` bytes."""
        if self.size > limit:
            raise BuildError(
                "wheel-too-large",
                f"{self.info.filename} has {self.size:,} bytes, more than the limit {limit:,}",
            )
        return b"".join(self.chunks())


class WheelSource(WheelFile):
    """A wheel that is read in sorted order. Rejects entries that are not allowed in a wheel."""

    def __init__(self, archive: zipfile.ZipFile, raw: VerifiedWheelReader) -> None:
        super().__init__(archive)
        self._raw = raw
        check_members(raw.file, archive)
        seen: set[str] = set()
        data = f"{self.data_dir}/"
        for info in archive.infolist():
            scheme, slash, _ = info.filename.removeprefix(data).partition("/")
            if (
                info.filename.startswith(data)
                and info.filename != data
                and (not slash or scheme not in SCHEME_NAMES)
            ):
                raise _InvalidWheelError(f"{info.filename!r} is not in a standard directory of {data}")
            _check_entry(info.filename.removesuffix("/"), info.external_attr >> 16)
            if info.filename in seen:
                raise BuildError("wheel-invalid", f"{info.filename} is duplicate")
            seen.add(info.filename)

    def read_dist_info(self, filename: str) -> str:
        # zipfile would inflate the whole member, whatever size the list declares.
        name = posixpath.join(self.dist_info_dir, filename)
        try:
            info = self._zipfile.getinfo(name)
        except KeyError:
            raise _InvalidWheelError(f"the wheel has no {name}") from None
        limit = TEXT if filename == "RECORD" else SHORT_TEXT
        data = WheelMember(self._raw, info, (info.filename, "", "")).bytes(limit)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise _InvalidWheelError(f"{name}, line {line}: not UTF-8 text") from None

    def check_scripts(self) -> None:
        """Raise _InvalidWheelError, with its line if possible, for an invalid entry point."""
        name = f"{self.dist_info_dir}/entry_points.txt"
        if name not in self._zipfile.namelist():
            return
        section, text = "", self.read_dist_info("entry_points.txt")
        for number, line in enumerate(text.splitlines(), 1):
            if heading := re.match(r"\[([^]]*)\]", line.strip()):
                section = heading[1].strip()
            elif (
                section in ("console_scripts", "gui_scripts")
                and _PROGRAM.match(line)
                and not _ENTRY.fullmatch(line.partition("=")[2].strip())
            ):
                message = f"expected NAME = MODULE:FUNCTION, found {line.strip()[:200]!a}"
                raise _InvalidWheelError(f"{name}, line {number}: {message}")
        try:
            list(parse_entrypoints(text))
        except AssertionError:  # what a [DEFAULT] or an indented line adds to a program
            message = "a program is not NAME = MODULE:FUNCTION, because of [DEFAULT] or an indented line"
            raise _InvalidWheelError(f"{name}: {message}") from None

    def get_contents(self) -> Iterator[WheelContentElement]:
        archive: zipfile.ZipFile = self._zipfile
        names = set(archive.namelist())
        rows = parse_record_file(StringIO(self.read_dist_info("RECORD")))
        try:
            records = {row[0]: row for row in rows if row[0] in names}
        except InvalidRecordEntry as error:
            raise _InvalidWheelError(f"{self.dist_info_dir}/RECORD: {error}") from error
        for info in sorted(archive.infolist(), key=lambda item: item.filename):
            if info.is_dir():
                continue
            mode = info.external_attr >> 16
            member = WheelMember(self._raw, info, records.get(info.filename, (info.filename, "", "")))
            executable = bool(stat.S_ISREG(mode) and mode & 0o111)
            yield member.record, cast("BinaryIO", member), executable


def _check_entry(name: str, mode: int) -> None:
    _check_path(name)
    kind = stat.S_IFMT(mode)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise BuildError(
            "wheel-invalid", f"{name!r} is a link or a device, and wheels may contain only files"
        )
    if mode & (stat.S_ISUID | stat.S_ISGID):
        raise BuildError("wheel-invalid", f"{name!r} is setuid or setgid")


def _check_path(path: str) -> None:
    parts = path.split("/")
    if {"", ".", ".."} & set(parts) or "\\" in path or not path.isprintable():
        raise BuildError("wheel-invalid", f"{path!r} is not a path inside the environment")
    if any(part.startswith(".wh.") for part in parts):  # a whiteout in layers
        raise BuildError("wheel-invalid", f"{path!r} is not a valid name in an image")


class _InvalidWheelError(ValueError):
    """A problem of a wheel: its member, and the reason."""


_PROGRAM = re.compile(r"[^\s#;=][^=]*=")
_ENTRY = re.compile(r"[\w.]+\s*:\s*[\w.]+\s*(\[.*\])?")
"""`MODULE:CALLABLE` in installer's form. The letters of `re` exclude combining marks."""


class LayerDestination(WheelDestination):
    """Writes the files of pypa/installer as tar entries below `place`."""

    def __init__(self, segment: TarSegment, install_prefix: InstallPrefix, distribution: str) -> None:
        self.segment, self.place, self.distribution = segment, install_prefix, distribution
        self.laid: list[InstalledFile] = []
        self.sources: list[tuple[str, WheelMember]] = []

    def write_script(self, name: str, module: str, attr: str, section: str) -> RecordEntry:
        script = Script(name, module, attr, section)  # type: ignore[arg-type]
        filename, data = script.generate(f"{self.place.prefix}/bin/python", "posix")
        return self._put(Scheme("scripts"), filename, data, executable=True)

    def write_file(
        self, scheme: Scheme, path: str | PathLike[str], stream: BinaryIO | WheelMember, is_executable: bool
    ) -> RecordEntry:
        path = str(path)
        if not isinstance(stream, WheelMember):
            return self._put(scheme, path, stream.read(), executable=is_executable)
        if scheme == "scripts":
            # pip marks every script as a program, whatever the wheel's own mode says.
            return self._put(scheme, path, self._started(stream), executable=True)
        entry = RecordEntry.from_elements(path, *stream.record[1:])
        if entry.hash_ is None:
            return self._put(scheme, path, stream, executable=is_executable)
        target = self._target(scheme, path)
        self.segment.file(
            target, stream.chunks(), size=stream.size, executable=is_executable, deflated=stream.deflated
        )
        self.laid.append(InstalledFile(path=target, content=str(entry.hash_)))
        if path.endswith(".py") and scheme in ("purelib", "platlib") and "tests" not in path.split("/"):
            self.sources.append((target, stream))
        return RecordEntry(path, entry.hash_, stream.size)

    def finalize_installation(
        self, scheme: Scheme, record_file_path: str, records: Iterable[tuple[Scheme, RecordEntry]]
    ) -> None:
        site = self._target(scheme, "")

        def prefix_of(other: Scheme) -> str | None:
            directory = self._target(other, "")
            return None if directory == site else posixpath.relpath(directory, site) + "/"

        with construct_record_file(records, prefix_of) as stream:
            self._put(scheme, record_file_path, stream.read(), executable=False)

    def _target(self, scheme: str, path: str) -> str:
        directory = self.place.folder(scheme, self.distribution).lstrip("/")
        if path:
            _check_path(path)  # entry points name scripts, and those pass through here too
        return f"{directory}/{path}" if path else directory

    def _started(self, script: WheelMember) -> bytes | WheelMember:
        """Return a Python script with the environment's own interpreter; other programs unchanged."""
        if script.head(len(PYTHON_SCRIPT)) != PYTHON_SCRIPT:
            return script
        with fix_shebang(BytesIO(script.bytes()), f"{self.place.prefix}/bin/python") as fixed:
            return fixed.read()

    def _put(self, scheme: Scheme, path: str, data: bytes | WheelMember, *, executable: bool) -> RecordEntry:
        """Write a file without a hash in RECORD."""
        target, sha256 = self._target(scheme, path), hashlib.sha256()
        deflated = None
        if isinstance(data, WheelMember):
            chunks, size, deflated = data.chunks(), data.size, data.deflated
        else:
            chunks, size = iter([data]), len(data)
        fed = _fed(sha256, chunks)
        self.segment.file(target, fed, size=size, executable=executable, deflated=deflated)
        digest = base64.urlsafe_b64encode(sha256.digest()).rstrip(b"=").decode()
        self.laid.append(InstalledFile(path=target, content=f"sha256={digest}"))
        return RecordEntry(path, Hash("sha256", digest), size)


def _fed(digest: hashlib._Hash, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def lay_wheel(
    wheel: Path,
    install_prefix: InstallPrefix,
    segment: TarSegment,
    compiler: BytecodeCompiler,
    *,
    sha256: str,
    report: Callable[[int], None],
) -> tuple[InstalledFile, ...]:
    """Write all files of `wheel` below `install_prefix` into `segment`, its .pyc files last.

    Directories named `tests` get no byte code, which would be a fifth of it: jobs do not import them.
    `report` is called with the number of bytes read. Return the files without .pyc. Raises
    PackageMismatchError for a file without this `sha256`, and BuildError with the wheel's name for invalid
    entries: paths outside, paths that cannot be unpacked, links, setuid files.
    """
    with _naming_wheel(wheel), open_verified(wheel, sha256) as raw, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # shipped __pycache__ is skipped, as by pip
        check_list(raw)
        with zipfile.ZipFile(raw) as archive:
            source = WheelSource(archive, VerifiedWheelReader(file=raw, report=report))
            source.check_scripts()
            destination = LayerDestination(segment, install_prefix, source.distribution)
            install(source, destination, {"INSTALLER": b"imagefactory\n"})
            for target, member in destination.sources:
                pyc = compiler.compile(f"/{target}", member.bytes())
                if pyc is not None:
                    path = cached_path(target, install_prefix.python)
                    segment.file(path, [pyc], size=len(pyc), executable=False)
            return tuple(destination.laid)


@contextmanager
def open_verified(wheel: Path, sha256: str) -> Iterator[IO[bytes]]:
    """Open the file and verify its bytes. Later reads use the same open file."""
    try:
        file = wheel.open("rb")
    except FileNotFoundError as error:  # another build found it changed and fetches it again
        raise _altered(wheel, "is not there") from error
    with file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            raise _altered(wheel, f"has sha256 {digest}, locked is {sha256}")
        yield file


def unpack_wheel(wheel: Path, directory: Path, *, sha256: str, most: int) -> int:
    """Unpack a wheel's packages to `directory`/site, its programs to `directory`/bin. Return their bytes.

    Raises as `lay_wheel`, and BuildError for more bytes than `most`.
    """
    size = 0
    with _naming_wheel(wheel):
        for member, executable in _members(wheel, sha256):
            parts = member.info.filename.split("/")
            path = directory / "site" / member.info.filename
            if len(parts) > 2 and parts[0].endswith(".data"):
                if parts[1] not in ("scripts", "purelib", "platlib"):
                    continue
                path = (directory / ("bin" if parts[1] == "scripts" else "site")).joinpath(*parts[2:])
            size += member.size
            if size > most:
                raise BuildError("wheel-too-large", f"it unpacks to more than {most:,} bytes, the free space")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                out.writelines(member.chunks())
            if executable or parts[1:2] == ["scripts"]:
                path.chmod(0o755)
    return size


def check_wheel(wheel: Path, sha256: str) -> None:
    """Check a wheel. Raises as `lay_wheel`, and BuildError for a file that differs from RECORD."""
    with _naming_wheel(wheel):
        for member, _ in _members(wheel, sha256):
            name, (_, recorded, _) = member.info.filename, member.record
            kind, _, value = recorded.partition("=")
            if name.endswith((".dist-info/RECORD", ".dist-info/RECORD.jws", ".dist-info/RECORD.p7s")):
                kind = "sha256"  # it has no row of its own
            elif kind not in ("sha256", "sha384", "sha512"):
                raise BuildError("wheel-invalid", f"RECORD has no hash of {name}")
            digest = hashlib.new(kind)
            for chunk in member.chunks():
                digest.update(chunk)
            if value and base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode() != value:
                raise BuildError("wheel-invalid", f"{name} differs from its hash or size in RECORD")


def _members(wheel: Path, sha256: str) -> Iterator[tuple[WheelMember, bool]]:
    """Yield the files of a wheel, and whether each is a program."""
    with open_verified(wheel, sha256) as raw:
        check_list(raw)
        with zipfile.ZipFile(raw) as archive:
            source = WheelSource(archive, VerifiedWheelReader(file=raw, report=lambda _: None))
            for _, member, executable in source.get_contents():
                yield cast("WheelMember", member), executable


@contextmanager
def _naming_wheel(wheel: Path) -> Iterator[None]:
    """Add the wheel's name to errors."""
    try:
        yield
    except PackageMismatchError:
        raise
    except BuildError as error:
        raise BuildError(
            error.code, f"{wheel.name}: {error.message}", hint=error.hint or _fix_hint(wheel)
        ) from error
    except _UNSOUND as error:
        text = f"{wheel.name}: not a valid wheel: {_reason(error)}"
        raise BuildError("wheel-invalid", text, hint=_fix_hint(wheel)) from error


def _reason(error: Exception) -> str:
    """Return a library's error in one line. Some have the text after an object, some have no text."""
    if isinstance(error, InvalidRecordEntry):
        return f"RECORD, {next(iter(error.elements), '')[:200]}: {error}"
    text = error.args[-1] if isinstance(error, InvalidWheelSource) and error.args else error
    if isinstance(error, configparser.Error):  # its one text is that of the programs
        text = str(error).replace("'<string>'", "entry_points.txt")
    return " ".join(str(text).split()) or type(error).__name__


def _altered(wheel: Path, message: str) -> PackageMismatchError:
    error = PackageMismatchError("package-altered", f"{wheel.name} {message}", hint=_fix_hint(wheel))
    error.name = wheel.name
    return error


# Errors of zipfile, installer and their parsers for a file that is not a wheel.
_UNSOUND: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    CorruptDataError,
    InstallerError,
    InvalidRecordEntry,
    configparser.Error,
    csv.Error,
    struct.error,
    AssertionError,
    RuntimeError,
    LookupError,
    ValueError,
    EOFError,
)


def _fix_hint(wheel: Path) -> str:
    return f"if the file is corrupt, delete it and rebuild: rm {wheel}"


def cached_path(source: str, python: str) -> str:
    """Return the path of a source's byte code."""
    directory, _, name = source.rpartition("/")
    tag = "cpython-" + python.replace(".", "")
    return f"{directory}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"


def with_byte_code(paths: Collection[str], python: str) -> frozenset[str]:
    """Return the paths, and those of the byte code of the sources among them."""
    return frozenset((*paths, *(cached_path(path, python) for path in paths if path.endswith(".py"))))
