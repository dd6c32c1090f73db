"""Read and write blobs and manifests of a registry, checked by digest and resumed after errors.

Source: OCI distribution-spec 1.1 and docker/distribution's upload pages; docker-registry 2.8 where it
differs (it sends `Range: 0-0` for no byte and for one, and drops an upload that broke in the middle of a
request).
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from urllib.parse import urlencode

from imagefactory.errors import RegistryError, StoreError
from imagefactory.http import CHUNK, HttpError, RejectedError, TransientError, arriving, read_count, read_some
from imagefactory.oci.manifests import (
    INDEX_TYPES,
    MALFORMED,
    MANIFEST_LIMIT,
    MANIFEST_TYPES,
    Descriptor,
    digest_of,
    media_type_of,
    read_json,
)
from imagefactory.oci.registry.session import SMALL, RegistryRequest, RegistrySession, Response, short_of
from imagefactory.oci.store import REBUILD, Source, check_digest, check_tag_or_digest

_MANIFESTS = (*INDEX_TYPES, *MANIFEST_TYPES)


class RegistryReader:
    """Blobs and manifests of a registry, as Store describes them."""

    def __init__(self, session: RegistrySession) -> None:
        self.session = session

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        check_digest(descriptor.digest)
        with self.session.reporting(repository, f"checking blob {short_of(descriptor)}"):
            return self.session.retry(lambda: self.has_now(repository, descriptor))

    def has_now(self, repository: str, descriptor: Descriptor) -> bool:
        """Return `has` without retries. Raises HttpError."""
        request = RegistryRequest(
            method="HEAD",
            url=self.session.url(repository, f"blobs/{descriptor.digest}"),
            scope=self.session.scope(repository),
        )
        try:
            with self.session.answer(request) as response:
                length = read_count(response.headers.get("Content-Length", ""))
        except RejectedError as error:
            if error.status == 404:
                return False
            raise
        return length in (None, descriptor.size)

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:
        """Read as Store does; resumes after connection errors. A small blob is checked first."""
        check_digest(descriptor.digest)
        reader = _BlobReader(self.session, repository, descriptor)
        with self.session.reporting(repository, f"fetching blob {short_of(descriptor)}"):
            if offset == 0 and descriptor.size <= SMALL:
                whole = self.session.retry(reader.whole)
                yield from (whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK))
                return
            reader.position = offset
            sha256 = hashlib.sha256() if offset == 0 else None
            try:
                while data := self.session.retry(reader.next, progress=lambda: reader.position):
                    if sha256:
                        sha256.update(data)
                    yield data
            finally:
                reader.close()
            if sha256 and f"sha256:{sha256.hexdigest()}" != descriptor.digest:
                raise RejectedError("the received bytes do not match the digest")

    def manifest(self, repository: str, reference: str) -> tuple[Descriptor, bytes] | None:
        self.session.url(repository, check_tag_or_digest(reference))
        with self.session.reporting(repository, f"fetching manifest {reference}"):
            return self.session.retry(lambda: self.manifest_now(repository, reference))

    def manifest_now(self, repository: str, reference: str) -> tuple[Descriptor, bytes] | None:
        """Return `manifest` without retries. Raises HttpError."""
        request = RegistryRequest(
            method="GET",
            url=self.session.url(repository, f"manifests/{reference}"),
            scope=self.session.scope(repository),
            headers={"Accept": ", ".join(_MANIFESTS)},
        )
        try:
            with self.session.answer(request) as response:
                data = read_some(response.raw, MANIFEST_LIMIT)
                expected = reference if ":" in reference else _digest_header(response)
                header = response.headers.get("Content-Type", "").partition(";")[0].strip()
        except RejectedError as error:
            if error.status == 404:
                return None
            raise
        digest = digest_of(data)
        if expected.startswith("sha256:") and expected != digest:
            raise TransientError(f"the registry sent the manifest {digest[:19]}, expected {expected[:19]}")
        try:
            media_type = media_type_of(read_json(data))
        except MALFORMED:
            if data.lstrip()[:1] == b"<":
                text = f"the response for {reference} is a web page, not a manifest"
                raise TransientError(text) from None
            if b'"fsLayers"' in data:
                raise RejectedError(
                    f"{reference} is a manifest of Docker schema 1, which is not supported"
                ) from None
            raise TransientError(f"the response for {reference} is not a manifest") from None
        # Docker and Podman use the header, whatever the bytes say.
        if header in _MANIFESTS and header != media_type:
            raise RejectedError(
                f"the manifest {digest} has the type {media_type}, but the registry sent it as {header}"
            )
        return Descriptor(media_type=media_type, digest=digest, size=len(data)), data


class _BlobReader:
    """One blob of a registry. `next` returns the following bytes, b"" at the end."""

    def __init__(self, session: RegistrySession, repository: str, descriptor: Descriptor) -> None:
        self.session, self.repository, self.descriptor = session, repository, descriptor
        self.url = session.url(repository, f"blobs/{descriptor.digest}")
        self.position = 0
        self.response: Response | None = None
        self.chunks: Iterator[bytes] = iter(())

    def close(self) -> None:
        if self.response is not None:
            self.response.close()
        self.response = None

    def whole(self) -> bytes:
        self.position = 0
        data = b"".join(iter(self.next, b""))
        self.close()
        if digest_of(data) != self.descriptor.digest:
            raise TransientError("the received bytes do not match the digest")
        return data

    def next(self) -> bytes:
        rest = self.descriptor.size - self.position
        try:
            with self.session.faults():
                if rest and self.response is None:
                    self._open()
                data = next(self.chunks, b"")
        except TransientError:
            self.close()
            raise
        if len(data) > rest:
            self.close()
            raise RejectedError(f"the registry sent more than {self.descriptor.size} bytes")
        if rest and not data:
            self.close()
            raise TransientError(f"the registry sent only {self.position} of {self.descriptor.size} bytes")
        self.position += len(data)
        return data

    def _open(self) -> None:
        headers = {"Range": f"bytes={self.position}-"} if self.position else {}
        scope = self.session.scope(self.repository)
        request = RegistryRequest(method="GET", url=self.url, scope=scope, headers=headers)
        self.response = self.session.send(request)
        self.chunks = arriving(self.response.raw)
        if self.response.status_code == 206:
            start = re.match(r"bytes (\d+)-", self.response.headers.get("Content-Range", ""))
            if not start or int(start[1]) != self.position:
                raise TransientError("the registry sent another range of bytes than requested")
        elif self.position:
            self.chunks = _skip(self.chunks, self.position)


def _skip(chunks: Iterable[bytes], count: int) -> Iterator[bytes]:
    for data in chunks:
        if count < len(data):
            yield data[count:]
        count = max(count - len(data), 0)


_BINARY = "application/octet-stream"
_PIECE = 4 << 20  # bytes; the most that GHCR accepts in a request with a Content-Range
_LOST_UPLOAD_CODES = frozenset(
    {"BLOB_UPLOAD_INVALID", "BLOB_UPLOAD_UNKNOWN", "DIGEST_INVALID", "RANGE_INVALID", "SIZE_INVALID"}
)


class RegistryWriter(RegistryReader):
    """Writes blobs and manifests to a registry, as Store describes it."""

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
        """Write as Store does. Raises StoreError if `source` does not return the blob of `descriptor`."""
        check_digest(descriptor.digest)
        with self.session.reporting(repository, f"sending blob {short_of(descriptor)}"):
            try:
                if self.session.retry(lambda: self.has_now(repository, descriptor)):
                    return 0
            except TransientError as error:
                # A blob whose entry was cut by a full disk answers 500 (docker-registry 2.8) until it is sent
                # again.
                if error.status < 500:
                    raise
            upload = _BlobUpload(self, repository, descriptor, source)
            try:
                self.session.retry(upload.attempt, progress=lambda: upload.offset)
            except Exception:
                upload.cancel()
                raise
            return upload.sent

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:
        """Mount a blob as Store does. Return False also if the registry rejects or does not support it."""
        check_digest(descriptor.digest)
        query = urlencode({"mount": descriptor.digest, "from": self.session.path(origin)})
        request = RegistryRequest(
            method="POST",
            url=self.session.url(repository, f"blobs/uploads/?{query}"),
            scope=(*self.session.scope(repository, "pull,push"), *self.session.scope(origin)),
        )

        def attempt() -> bool:
            try:
                with self.session.answer(request) as response:
                    mounted, upload = response.status_code == 201, self.session.location(response)
            except HttpError as error:
                if 400 <= error.status < 500 and error.status not in (408, 425, 429):
                    return False  # no such origin, or not for this account: writing may succeed
                raise
            if not mounted:
                self.cancel_upload(repository, upload)
            return mounted and self.has_now(repository, descriptor)

        with self.session.reporting(repository, f"mounting blob {short_of(descriptor)} from {origin}"):
            return self.session.retry(attempt)

    def check_push(self, repository: str) -> None:
        """Raise RegistryError if this account may not push, by cancelling an upload that never began.

        A registry checks the account first. If its response is unclear, an upload is begun and cancelled.
        docker-registry 2.8 then keeps an empty file for a week.
        """
        scope = self.session.scope(repository, "pull,push")
        uploads = self.session.url(repository, "blobs/uploads/")
        url = f"{uploads}{uuid.uuid4()}?digest={digest_of(b'')}"

        def end() -> bool:
            try:
                with self.session.answer(RegistryRequest(method="PUT", url=url, scope=scope)):
                    return False
            except RejectedError as error:
                if error.status in (401, 403) or error.code in ("DENIED", "UNAUTHORIZED", "NAME_UNKNOWN"):
                    raise
                return error.code in _LOST_UPLOAD_CODES

        def begin() -> str:
            with self.session.answer(RegistryRequest(method="POST", url=uploads, scope=scope)) as response:
                return self.session.location(response)

        with self.session.reporting(repository, "checking whether images may be pushed"):
            if not self.session.retry(end):
                self.cancel_upload(repository, self.session.retry(begin))

    def cancel_upload(self, repository: str, upload: str) -> None:
        """Cancel an upload at the registry, which otherwise removes it after a while."""
        scope = self.session.scope(repository, "pull,push")
        if upload:
            request = RegistryRequest(method="DELETE", url=upload, scope=scope)
            with suppress(HttpError, RegistryError), self.session.answer(request):
                pass

    def put(self, repository: str, data: bytes, media_type: str, tag: str = "") -> tuple[Descriptor, bool]:
        """Put a manifest. Return the digest of its tag afterwards, and whether it is listed as referrer."""
        name = check_tag_or_digest(tag or digest_of(data))
        upload = _ManifestUpload(self, repository, data, media_type, tag)
        with self.session.reporting(repository, f"putting manifest {name}"):
            return self.session.retry(upload.attempt), upload.listed


class _BlobBody:
    """The `size` bytes of a blob from an offset on, which requests sends with a Content-Length."""

    def __init__(self, upload: _BlobUpload, size: int) -> None:
        self.upload, self.size = upload, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        descriptor, rest = self.upload.descriptor, self.size
        last = self.upload.offset + self.size == descriptor.size
        for data in self.upload.source(self.upload.offset):
            if last and len(data) > rest:
                raise StoreError(
                    "blob-mismatch",
                    f"blob {descriptor.digest} has more than its {descriptor.size} bytes",
                    hint=REBUILD,
                )
            part = data[:rest]
            rest -= len(part)
            self.upload.sent += len(part)
            if part:
                yield part
            if not rest and not last:
                return
        if rest:
            raise StoreError(
                "blob-mismatch", f"blob {descriptor.digest} is {rest} bytes too short", hint=REBUILD
            )


class _BlobUpload:
    """The upload of one blob. Call `attempt` until it returns. The registry has confirmed `offset` bytes."""

    def __init__(
        self, writer: RegistryWriter, repository: str, descriptor: Descriptor, source: Source
    ) -> None:
        self.writer, self.session, self.repository = writer, writer.session, repository
        self.descriptor, self.source = descriptor, source
        self.scope = self.session.scope(repository, "pull,push")
        self.url = ""
        self.offset = self.sent = 0
        self.piece = self.session.options.piece
        self.broken = self.closing = False
        # Its report of the received bytes was wrong, so the next attempt sends all in one request.
        self.doubted = self.whole = False

    def attempt(self) -> None:
        """Begin or resume the upload. Raises TransientError if it must be called again."""
        if self.closing:  # the end of the upload was requested, and no response came
            if self._arrived():
                return
            self.closing = False
        if self.url and self.broken:
            self._resume()
        if not self.url:
            self._begin()
        self.broken = True
        try:
            self._send()
        except RejectedError as error:
            if error.status in (413, 416) and error.code not in _LOST_UPLOAD_CODES and self._cut_smaller():
                raise TransientError(str(error), after=0.0) from None
            if error.status not in (404, 416) and error.code not in _LOST_UPLOAD_CODES:
                raise
            if error.code == "DIGEST_INVALID":
                self._check_source()
            self.url, self.closing, self.whole = "", False, self.doubted
            raise TransientError(f"the upload was lost: {error}", after=0.0) from None
        if not self._arrived():
            raise TransientError("the registry accepted the blob, but did not store it")

    def cancel(self) -> None:
        self.writer.cancel_upload(self.repository, self.url)
        self.url = ""

    def _arrived(self) -> bool:
        return self.writer.has_now(self.repository, self.descriptor)

    def _begin(self) -> None:
        url = self.session.url(self.repository, "blobs/uploads/")
        with self.session.answer(RegistryRequest(method="POST", url=url, scope=self.scope)) as response:
            self.url = self.session.location(response)
            least = read_count(response.headers.get("OCI-Chunk-Min-Length", ""))
        if self.piece and least is not None:
            self.piece = max(self.piece, least)
        self.offset = 0
        if not self.url:
            raise RejectedError("the registry returned no address for the upload")

    def _resume(self) -> None:
        """Query how many bytes arrived, and continue there. If unclear, the upload begins again."""
        try:
            arrived = self._query_arrived()
        except RejectedError:
            self.url = ""
            return
        if arrived:
            self.offset = arrived
        else:
            self.cancel()

    def _query_arrived(self) -> int:
        """Return the bytes that the registry reports, 0 for no usable report. Raises HttpError."""
        with self.session.answer(RegistryRequest(method="GET", url=self.url, scope=self.scope)) as response:
            self.url = self.session.location(response) or self.url
            end = _range_end(response.headers)
        # 0-0 may be one byte or none
        return 0 if end is None or end < 1 or end >= self.descriptor.size else end + 1

    def _cut_smaller(self) -> bool:
        """Send smaller pieces from now on. Return False if the pieces are already small."""
        smaller = not self.closing and (not self.piece or self.piece > _PIECE)
        self.piece = min(self.piece or _PIECE, _PIECE)
        return smaller

    def _send(self) -> None:
        rest = self.descriptor.size - self.offset
        if self.offset == 0 and ((rest <= SMALL and not self.piece) or self.whole):
            self._close(_BlobBody(self, rest) if rest else None)
            return
        while self.offset < self.descriptor.size:
            self._patch()
        self._close(None)

    def _patch(self) -> None:
        rest = self.descriptor.size - self.offset
        size = min(self.piece, rest) if self.piece else rest
        end = self.offset + size
        headers = {"Content-Type": _BINARY}
        if size < self.descriptor.size:
            headers["Content-Range"] = f"{self.offset}-{end - 1}"
        request = RegistryRequest(
            method="PATCH",
            url=self.url,
            scope=self.scope,
            headers=headers,
            body=lambda: _BlobBody(self, size),
            patient=True,
        )
        with self.session.answer(request) as response:
            self.url = self.session.location(response) or self.url
            reported = _range_end(response.headers)
        self.offset = end if reported in (None, end - 1) else self._check_arrived(end)

    def _check_arrived(self, end: int) -> int:
        """Return the bytes that arrived, if the response to a request of all bytes does not report `end`.

        ECR's responses are ignored, as no request reports the bytes: the digest at the end decides.
        """
        self.doubted = True
        try:
            arrived = self._query_arrived()
        except RejectedError:
            arrived = 0
        if arrived and not self.offset < arrived <= end:
            self.whole = True
            self.cancel()
            raise TransientError(f"only {arrived} of {end} bytes arrived")
        return arrived or end

    def _close(self, body: _BlobBody | None) -> None:
        self.closing = True
        query = urlencode({"digest": self.descriptor.digest})
        request = RegistryRequest(
            method="PUT",
            url=f"{self.url}{'&' if '?' in self.url else '?'}{query}",
            scope=self.scope,
            headers={"Content-Type": _BINARY},
            body=(lambda: body) if body else b"",
            patient=True,
        )
        with self.session.answer(request) as response:
            stored = _digest_header(response)
        if stored.startswith("sha256:") and stored != self.descriptor.digest:
            raise RejectedError(f"the registry stored another blob than was sent: {stored[:80]}")

    def _check_source(self) -> None:
        sha256 = hashlib.sha256()
        for data in self.source(0):
            sha256.update(data)
        if f"sha256:{sha256.hexdigest()}" != self.descriptor.digest:
            raise StoreError(
                "store-corrupt",
                f"blob {self.descriptor.digest} is corrupt: it cannot be pushed",
                hint=REBUILD,
            )


class _ManifestUpload:
    """The upload of one manifest. Call `attempt` until it returns. `listed` is true for a listed referrer."""

    def __init__(
        self, writer: RegistryWriter, repository: str, data: bytes, media_type: str, tag: str
    ) -> None:
        self.writer, self.repository, self.data, self.tag = writer, repository, data, tag
        self.digest = digest_of(data)
        session = writer.session
        self.request = RegistryRequest(
            method="PUT",
            url=session.url(repository, f"manifests/{tag or self.digest}"),
            scope=session.scope(repository, "pull,push"),
            headers={"Content-Type": media_type},
            body=data,
            patient=True,
        )
        self.sent = self.listed = False

    def attempt(self) -> Descriptor:
        writer, repository = self.writer, self.repository
        if self.sent:  # the last attempt may have succeeded: then later writes are not overwritten
            manifest = writer.manifest_now(repository, self.tag or self.digest)
            if manifest is not None and manifest[0].digest == self.digest:
                return manifest[0]
        self.sent = True
        try:
            with writer.session.answer(self.request) as response:
                stored = _digest_header(response)
                self.listed = bool(response.headers.get("OCI-Subject"))
        except RejectedError as error:
            # docker-registry 2.8 reports this too if another writer is writing the link of a layer.
            if error.code != "DIGEST_INVALID":
                raise
            raise TransientError(str(error), status=error.status) from None
        if stored.startswith("sha256:") and stored != self.digest:
            raise RejectedError(f"the registry stored another manifest than was sent: {stored[:80]}")
        manifest = writer.manifest_now(repository, self.digest)
        if manifest is None or manifest[1] != self.data:
            raise TransientError("the registry accepted the manifest, but does not return it")
        if self.tag:
            manifest = writer.manifest_now(repository, self.tag)
            if manifest is None:
                raise TransientError("the registry accepted the manifest, but did not set its tag")
        return manifest[0]


def _digest_header(response: Response) -> str:
    return response.headers.get("Docker-Content-Digest", "")


def _range_end(headers: Mapping[str, str]) -> int | None:
    """Return the last byte of an upload, from its Range header (`0-1023`)."""
    match = re.fullmatch(r"(?:bytes[= ])?0-(\d{1,18})", headers.get("Range", "").strip())
    return int(match[1]) if match else None
