"""The cache of packages: downloads that resume, are checked against the lock, and are stored by hash.

    <cache>/wheels/<first two hex of sha256>/<sha256>/<filename>        a complete, checked file
                                                     /<filename>.part   an incomplete one
                                                     /.lock             locked by the process that fetches it
    <cache>/conda/...                                                   the same for conda archives

A file gets its final name only after its hash was right. A file of that name with the locked size is not
fetched again. A build checks the bytes that it reads against the hash again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from imagefactory.errors import DownloadError, ImagefactoryError, LockError, os_problem, redact
from imagefactory.http import (
    HttpSession,
    Login,
    RejectedError,
    RetryPolicy,
    TransientError,
    WebAccess,
    arriving,
    local_path,
    read_count,
)
from imagefactory.model import LockedCondaPackage, LockedPackage, LockedWheel
from imagefactory.progress import Progress, ProgressTask, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file to fetch from `url` to `path`, with its size and sha256.

    `title` names it in messages. `denied` and `gone` are the hints for a server that requires a login, and
    for one that does not have the file. `read` yields the bytes from an offset on in place of a request to
    `url`, which then only names the source.
    """

    title: str
    url: str
    path: Path
    size: int
    sha256: str
    denied: str
    gone: str
    read: Callable[[int], Iterator[bytes]] | None = None

    @property
    def part(self) -> Path:
        """Return the path of the incomplete file."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def missing_bytes(self) -> int:
        return max(self.size - (_size_of(self.part) or 0), 0)


class PendingDownloads:
    """Packages that are downloaded to `paths` in the cache. Any thread can wait for one of them.

    `stop` ends the downloads; complete files stay.
    """

    def __init__(self, paths: Iterable[tuple[LockedPackage, Path]]) -> None:
        self.paths = dict(paths)
        self.stop = threading.Event()
        self._here: dict[Path, Future[None]] = {path: Future() for path in self.paths.values()}

    def tell(self, package: LockedPackage) -> None:
        """Report that `package` is complete."""
        if not (future := self._here[self.paths[package]]).done():
            future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Report that no more packages will arrive. All waiting threads get `error`."""
        for future in self._here.values():
            if not future.done():
                future.set_exception(error)

    def wait(self, path: Path) -> None:
        """Wait for the package at `path`. Raises the error of its download."""
        self._here[path].result()

    def wait_for_all(self) -> Mapping[LockedPackage, Path]:
        """Return the paths of all packages, once they are complete. Raises the error of a download."""
        for path in self._here:
            self.wait(path)
        return self.paths


CHUNK = 1 << 20
_SPARE = 16 << 20  # bytes to leave free on the disk, for directories and lock files
_LONG_WAIT = 10.0  # seconds of a wait that is reported
_POLL_SECONDS = 0.1  # seconds between checks of a file that another process has locked


_UNAVAILABLE = ("download-rejected", "download-failed", "hash-mismatch")
"""Errors of a download after which another place may have the file."""

Package = TypeVar("Package", bound=LockedPackage)


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """The bytes of one file at a place called `name`, from an offset on."""

    name: str
    read: Callable[[int], Iterator[bytes]]


Fallback = Callable[[Mapping[str, int], ImagefactoryError], Mapping[str, FileOrigin]]
"""Returns sources of files by sha256, of those that it has. It gets their sizes, and why they are missing."""


class PackageCache:
    """Packages of locks in `folder`, fetched from `source`: a package index, or conda channels."""

    def __init__(
        self, directory: Path, source: WebAccess, *, retry_policy: RetryPolicy | None = None
    ) -> None:
        self.folder = directory
        self._source = source
        self._retry_policy = retry_policy or RetryPolicy()

    def path(self, package: LockedPackage) -> Path:
        """Return the path of a package's file, which may not exist."""
        kind = "wheels" if isinstance(package, LockedWheel) else "conda"
        return self.folder / kind / package.sha256[:2] / package.sha256 / package.filename

    def missing(self, packages: Iterable[Package]) -> tuple[Package, ...]:
        """Return the packages to fetch: those without a file of the locked size."""
        with _disk_errors(self.folder, 0):
            return tuple(package for package in packages if _size_of(self.path(package)) != package.size)

    def fetch(
        self,
        packages: Iterable[Package],
        locate: Callable[[tuple[Package, ...]], Mapping[str, str]],
        progress: Progress,
        *,
        arrivals: PendingDownloads | None = None,
        fallback: Fallback | None = None,
    ) -> dict[Package, Path]:
        """Return the file of each of `packages`, in their order. Missing ones are fetched in parallel.

        `locate` returns the addresses of missing packages by file name, and is not called without missing
        ones. `arrivals` gets each complete file, and may stop the others. If that fails, the packages that
        are still missing come from `fallback`, if it has all of them. Raises DownloadError for a file
        that is not available with the locked size and hash, and for a full disk. The next call continues the
        download.
        """
        requested = tuple(packages)
        paths = {package: self.path(package) for package in requested}
        missing = self.missing(requested)
        arrivals = arrivals or PendingDownloads(paths.items())
        for package in paths.keys() - set(missing):
            arrivals.tell(package)
        if missing:
            self._make_room(self._file(package, "") for package in missing)
            try:
                addresses = locate(missing)
                self._fetch([self._file(row, addresses[row.filename]) for row in missing], arrivals, progress)
            except (DownloadError, LockError) as error:
                # A LockError is about the search for an address: the lock itself was read before.
                other = isinstance(error, LockError) or error.code in _UNAVAILABLE
                files = self._from_fallback(requested, fallback, error) if fallback and other else []
                if not files:
                    raise
                self._fetch(files, arrivals, progress)
            for package in requested:
                arrivals.tell(package)
        return paths

    def _fetch(self, files: Sequence[RemoteFile], arrivals: PendingDownloads, progress: Progress) -> None:
        packages = {path: package for package, path in arrivals.paths.items()}
        fetch_files(
            files,
            self._source,
            progress,
            label="packages",
            retry_policy=self._retry_policy,
            arrived=lambda file: arrivals.tell(packages[file.path]),
            stop=arrivals.stop,
        )

    def _from_fallback(
        self, packages: Sequence[LockedPackage], fallback: Fallback, error: ImagefactoryError
    ) -> list[RemoteFile]:
        """Return the missing packages as files of the fallback, none if it lacks some."""
        missing = self.missing(packages)
        sources = fallback({row.sha256: row.size for row in missing}, error)
        if any(row.sha256 not in sources for row in missing):
            return []
        return [
            replace(self._file(row, source.name), read=source.read)
            for row in missing
            if (source := sources[row.sha256])
        ]

    def _file(self, package: LockedPackage, url: str) -> RemoteFile:
        gone = f"imagefactory lock TARGET --upgrade-package {package.name}"
        denied = "set the user and password of the index (in its URL or in ~/.netrc)"
        if isinstance(package, LockedCondaPackage):
            denied = "write a login for the channel's host in ~/.netrc or ~/.rattler/credentials.json"
        return RemoteFile(
            title=f"{package.name} {package.version}",
            url=url,
            path=self.path(package),
            size=package.size,
            sha256=package.sha256,
            denied=denied,
            gone=gone,
        )

    def adopt(self, packages: Iterable[LockedPackage], directory: Path, progress: Progress) -> int:
        """Copy packages that the cache lacks from `directory`, which has the layout of a cache.

        Each is checked by its size and hash. Returns the number of copies.
        """
        files = [
            self._file(package, source.absolute().as_uri())
            for package in self.missing(packages)
            if (source := directory / self.path(package).relative_to(self.folder)).is_file()
        ]
        copy_files(files, progress)
        return len(files)

    def _make_room(self, files: Iterable[RemoteFile]) -> None:
        """Raise DownloadError before the first byte if the disk is too small."""
        needed = sum(file.missing_bytes for file in files)
        with _disk_errors(self.folder, needed):
            self.folder.mkdir(parents=True, exist_ok=True)
            disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if needed + _SPARE > free:
            raise DownloadError(
                "cache-full",
                f"{self.folder} has {format_bytes(free)} free, but the packages to download need "
                f"{format_bytes(needed)} ({needed} bytes)",
                hint="free some space, or set 'cache' (or $IMAGEFACTORY_CACHE) to a larger disk",
            )


def reporting_sleep(
    sleep: Callable[[float], object], label: str, progress: Progress
) -> Callable[[float], object]:
    """Return `sleep` for the waits between attempts. It reports long ones."""

    def report(seconds: float) -> None:
        if seconds >= _LONG_WAIT:
            progress.note(f"{label}: the server limits requests or fails; waiting {seconds:.0f} seconds")
        sleep(seconds)

    return report


def is_complete(file: RemoteFile) -> bool:
    """Return whether a file of the right size is at its path."""
    return _size_of(file.path) == file.size


class LocalFiles:
    """The access to files of this machine: `file:` addresses."""

    certificates = proxy = ""

    def login(self, url: str) -> Login:  # noqa: ARG002
        return None


def copy_files(files: Sequence[RemoteFile], progress: Progress) -> None:
    """Copy files of this machine, as `fetch_files` does."""
    if files:
        fetch_files(files, LocalFiles(), progress, label="files", retry_policy=RetryPolicy(attempts=1))


def fetch_files(
    files: Iterable[RemoteFile],
    source: WebAccess,
    progress: Progress,
    *,
    label: str,
    retry_policy: RetryPolicy,
    arrived: Callable[[RemoteFile], object] = lambda _: None,
    stop: threading.Event | None = None,
) -> None:
    """Fetch `files` in parallel, each checked by its size and hash. `arrived` gets each complete one.

    Long waits that a server requires are reported. `stop` ends the transfers. Raises DownloadError; the
    next call continues incomplete files.
    """
    web, signal = HttpSession(source, retry_policy=retry_policy), _StopSignal(stop)
    # The largest first: the last to end should not be the one that takes longest.
    queue = sorted(files, key=lambda file: (-file.size, file.title))
    total = sum(file.missing_bytes for file in queue)

    try:
        with progress.task(label, total=total) as task, ThreadPoolExecutor(retry_policy.threads) as pool:
            transfers = [
                _Transfer(
                    file=file,
                    web=web,
                    retry_policy=retry_policy,
                    sleep=reporting_sleep(signal.wait, label, progress),
                    stop=signal,
                    arrived=arrived,
                    count=_DownloadProgress(task, file.size - file.missing_bytes),
                )
                for file in queue
            ]
            futures = [pool.submit(transfer.run) for transfer in transfers]
            try:
                finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # an error or an interrupt: the other transfers end at their next chunk
                if any(not future.done() or future.exception() for future in futures):
                    signal.set()
                for future in futures:
                    future.cancel()
            errors = [future.exception() for future in futures if future in finished]
            failed = [error for error in errors if error and not isinstance(error, _DownloadCancelledError)]
            if failed or signal.is_set():
                raise (*failed, _DownloadCancelledError())[0]
    finally:
        web.close()


class _DownloadCancelledError(Exception):
    """Another transfer failed, or the user interrupted. The part file stays."""


class _StopSignal:
    """Ends the transfers of one call, when one of them failed or when the caller's event is set."""

    def __init__(self, outer: threading.Event | None) -> None:
        self._own, self._outer = threading.Event(), outer or threading.Event()

    def set(self) -> None:
        self._own.set()

    def is_set(self) -> bool:
        return self._own.is_set() or self._outer.is_set()

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.is_set() and (rest := end - time.monotonic()) > 0:
            self._own.wait(min(rest, _POLL_SECONDS))
        return self.is_set()


class _DownloadProgress:
    """The progress of one file. Bytes that arrive twice count once, so the total stays right."""

    def __init__(self, task: ProgressTask, already: int) -> None:
        self._task, self._most = task, already

    def reached(self, position: int) -> None:
        if position > self._most:
            self._task.advance(position - self._most)
            self._most = position


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    """The download of one file."""

    file: RemoteFile
    web: HttpSession
    retry_policy: RetryPolicy
    sleep: Callable[[float], object]
    stop: _StopSignal
    arrived: Callable[[RemoteFile], object]
    count: _DownloadProgress

    def run(self) -> None:
        with _disk_errors(self.file.path.parent, self.file.size):
            self.file.path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                if _size_of(self.file.path) != self.file.size:
                    self._fetch()
            self.count.reached(self.file.size)
        self.arrived(self.file)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the file for this process; the lock ends with the process."""
        with (self.file.path.parent / ".lock").open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self.stop.wait(_POLL_SECONDS):
                        raise _DownloadCancelledError from None
            yield

    def _fetch(self) -> None:
        """Fetch, check, rename. Wrong bytes are deleted and fetched again once."""
        wrong = ""
        for _ in range(2):
            got = self._download()
            if got == self.file.sha256:
                self.file.part.replace(self.file.path)
                return
            wrong = got
            self.file.part.unlink()
        raise DownloadError(
            "hash-mismatch",
            f"{self.file.title}: the file from {redact(self.file.url)} has the wrong hash: "
            f"expected sha256 {self.file.sha256}, found {wrong}",
            hint="use another mirror or network: this one changed the file",
        )

    def _download(self) -> str:
        """Fetch the file, and return its sha256. Stops after repeated failures without progress."""
        title, hints = self.file.title, dict.fromkeys((401, 403), self.file.denied)
        hints |= dict.fromkeys((404, 410), self.file.gone)
        try:
            return self.retry_policy.retry(self._continue, progress=self._part_size, sleep=self.sleep)
        except RejectedError as error:
            other = "check the index, proxy and certificates: imagefactory doctor"
            raise DownloadError(
                "download-rejected",
                f"{title}: {error}",
                hint=hints.get(error.status, other),
            ) from error
        except TransientError as error:
            raise DownloadError(
                "download-failed",
                f"{title}: {error}",
                hint="run the same command again later: the download continues",
            ) from error

    def _continue(self) -> str:
        """Append the bytes after those in `part`, in one attempt. Return the sha256 of the file."""
        if self.stop.is_set():
            raise _DownloadCancelledError
        size, digest = self.file.size, hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self.file.part, flags, 0o644), "ab") as file:
            position = file.tell()
            if position > size:
                position = 0
                file.truncate(0)
            if position:
                with self.file.part.open("rb") as prefix:
                    while chunk := prefix.read(CHUNK):
                        digest.update(chunk)
            if position < size:
                with self._source(position) as (start, chunks):
                    if start != position:  # the server ignores the requested range
                        position, digest = 0, hashlib.sha256()
                        file.truncate(0)
                    position = self._write(file, position, chunks, digest.update)
            os.fdatasync(file.fileno())  # the bytes must be on the disk before the name
        if position > size:
            self.file.part.unlink()
            raise RejectedError(f"{redact(self.file.url)} has more than {size} bytes, the size in the lock")
        return digest.hexdigest()

    def _write(
        self, file: BinaryIO, position: int, chunks: Iterator[bytes], update: Callable[[bytes], None]
    ) -> int:
        try:
            for chunk in chunks:
                if self.stop.is_set():
                    raise _DownloadCancelledError
                file.write(chunk)
                update(chunk)
                position += len(chunk)
                if position > self.file.size:
                    return position
                self.count.reached(position)
        finally:
            file.flush()
        if position < self.file.size:
            raise TransientError(f"{redact(self.file.url)} ended after {position} of {self.file.size} bytes")
        return position

    @contextmanager
    def _source(self, position: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Yield the position at which the bytes of the source begin, and the bytes."""
        if self.file.read:
            yield position, self.file.read(position)
            return
        local = local_path(self.file.url)
        if local:
            if not local.is_file():
                raise RejectedError(f"{local} does not exist", status=404)
            with local.open("rb") as file:
                file.seek(position)
                yield position, iter(lambda: file.read(CHUNK), b"")
            return
        size = self.file.size
        headers = {"Range": f"bytes={position}-"} if position else {}
        try:
            with self.web.open(self.file.url, headers=headers) as response:
                start, whole = 0, read_count(response.headers.get("Content-Length", ""))
                if response.status_code == 206:
                    content_range = response.headers.get("Content-Range", "")
                    if content_range != f"bytes {position}-{size - 1}/{size}":
                        self.file.part.unlink(missing_ok=True)
                        raise TransientError(
                            f"{redact(self.file.url)} returned the wrong range '{content_range}'"
                        )
                    start = position
                elif whole not in (None, size):
                    raise RejectedError(
                        f"{redact(self.file.url)} has {whole} bytes, expected {size} of the lock"
                    )
                yield start, arriving(response.raw)
        except RejectedError as error:
            if error.status != 416:
                raise
            self.file.part.unlink(missing_ok=True)  # a part that the server cannot continue
            raise TransientError(str(error)) from error

    def _part_size(self) -> int:
        return _size_of(self.file.part) or 0


def _size_of(path: Path) -> int | None:
    """Return the bytes of a file that other processes may rename or remove; None for no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


@contextmanager
def _disk_errors(directory: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                "cache-full",
                f"the disk of {directory} is full: {needed} bytes are needed",
                hint="free some space, or set 'cache' (or $IMAGEFACTORY_CACHE) to a larger disk",
            ) from error
        raise DownloadError(
            *os_problem("write", error.filename or directory, error),
            hint="set 'cache' (or $IMAGEFACTORY_CACHE) to a directory that you can write",
        ) from error
