"""METADATA of a wheel on an index: beside it (PEP 658), else out of it, of which little is fetched."""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any

from imagefactory.http import RefusedError, Web, local_path, read_some, redact

_WHOLE = 100_000_000  # bytes of a wheel that is fetched whole where its server knows no ranges
_WINDOW = 1 << 16  # bytes asked at once; a wheel's directory is at its end


def read_metadata(web: Web, url: str) -> str:
    """METADATA of the wheel at `url`. Raises RefusedError, TransientError, OSError, BadZipFile, KeyError."""
    if path := local_path(url):
        return _inside(io.BytesIO(path.read_bytes()))
    try:
        return web.patience.retry(lambda: _fetch(web, f"{url}.metadata", {})).decode("utf-8")
    except RefusedError:
        size = web.size(url)
    try:
        return _inside(io.BufferedReader(_Remote(web, url, size), _WINDOW))
    except _NoRangesError:
        if size > _WHOLE:
            raise
        return _inside(io.BytesIO(web.patience.retry(lambda: _fetch(web, url, {}))))


def _inside(wheel: Any) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(
            (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)), "METADATA"
        )
        return archive.read(name).decode("utf-8")


class _NoRangesError(RefusedError):
    """A server that sends all of a file or nothing."""


def _fetch(web: Web, url: str, headers: dict[str, str]) -> bytes:
    with web.open(url, headers=headers) as response:
        if headers and response.status_code != 206:
            raise _NoRangesError(f"{redact(url)}: the server sends no part of a file")
        return read_some(response.raw, _WHOLE)


class _Remote(io.RawIOBase):
    """A file on a server, read where it is asked for."""

    def __init__(self, web: Web, url: str, size: int) -> None:
        self._web, self._url, self._size, self._at = web, url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        end = min(self._at + len(into), self._size)
        if end <= self._at:
            return 0
        asked = {"Range": f"bytes={self._at}-{end - 1}"}
        came = self._web.patience.retry(lambda: _fetch(self._web, self._url, asked))
        into[: len(came)] = came
        self._at += len(came)
        return len(came)
