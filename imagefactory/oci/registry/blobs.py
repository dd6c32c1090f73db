"""Blobs and manifests on their way into a registry, resumed where a connection breaks.

Source: OCI distribution-spec 1.1 and docker/distribution's upload pages; what docker-registry 2.8 does where
it differs (it answers `Range: 0-0` for no byte and for one, and drops an upload that broke in the middle of
a request).
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from urllib.parse import urlencode

from imagefactory.errors import RegistryError, StoreError
from imagefactory.http import CHUNK, RejectedError, TransientError, arriving, read_count, read_some
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
from imagefactory.oci.store import Source, check_digest, check_tag_or_digest

# --- Blobs, manifests and lists on their way out of a registry, checked by their digests


_ACCEPT = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))


class RegistryDownloader:
    """What a registry has, asked for through `session`."""

    def __init__(self, session: RegistrySession) -> None:
        self.session = session

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        """As Store has it."""
        check_digest(descriptor.digest)
        with self.session.told(repository, f"asking for blob {short_of(descriptor)}"):
            return self.session.retry(lambda: self.holds(repository, descriptor))

    def holds(self, repository: str, descriptor: Descriptor) -> bool:
        """As `has`, asked once: raises the two errors of exchange.py."""
        ask = RegistryRequest(
            method="HEAD",
            url=self.session.place(repository, f"blobs/{descriptor.digest}"),
            scope=self.session.scope(repository),
        )
        try:
            with self.session.answer(ask) as response:
                length = read_count(response.headers.get("Content-Length", ""))
        except RejectedError as error:
            if error.status == 404:
                return False
            raise
        return length in (None, descriptor.size)

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:
        """As Store has it; goes on where a connection breaks. A small blob is checked before it is given."""
        check_digest(descriptor.digest)
        reader = _BlobReader(self.session, repository, descriptor)
        with self.session.told(repository, f"fetching blob {short_of(descriptor)}"):
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

    def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        """As Store has it."""
        self.session.place(repository, check_tag_or_digest(wanted))
        with self.session.told(repository, f"fetching manifest {wanted}"):
            return self.session.retry(lambda: self.manifest_now(repository, wanted))

    def manifest_now(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        """As `manifest`, asked once: raises the two errors of exchange.py."""
        url = self.session.place(repository, f"manifests/{wanted}")
        ask = RegistryRequest(
            method="GET", url=url, scope=self.session.scope(repository), headers={"Accept": _ACCEPT}
        )
        try:
            with self.session.answer(ask) as response:
                data = read_some(response.raw, MANIFEST_LIMIT)
                told = wanted if ":" in wanted else response.headers.get("Docker-Content-Digest", "")
                header = response.headers.get("Content-Type", "").partition(";")[0].strip()
        except RejectedError as error:
            if error.status == 404:
                return None
            raise
        digest = digest_of(data)
        if told.startswith("sha256:") and told != digest:
            raise TransientError(f"it sent the manifest {digest[:19]}, not {told[:19]}")
        try:
            media_type = media_type_of(read_json(data))
        except MALFORMED:
            if data.lstrip()[:1] == b"<":
                page = f"the response for {wanted} is a web page, not a manifest"
                raise TransientError(page) from None
            if b'"fsLayers"' in data:
                raise RejectedError(f"{wanted} is a manifest of Docker schema 1") from None
            raise TransientError(f"the response for {wanted} is not a manifest") from None
        # Docker and Podman go by the header, whatever the bytes say.
        if header in (*INDEX_TYPES, *MANIFEST_TYPES) and header != media_type:
            raise RejectedError(f"the manifest {digest} has the type {media_type}, its header {header}")
        return Descriptor(media_type=media_type, digest=digest, size=len(data)), data


class _BlobReader:
    """One blob on its way out; `next` gives the following bytes, b"" at the end."""

    def __init__(self, session: RegistrySession, repository: str, descriptor: Descriptor) -> None:
        self.session, self.repository = session, repository
        self.place = session.place(repository, f"blobs/{descriptor.digest}")
        self.descriptor, self.position = descriptor, 0
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
        left = self.descriptor.size - self.position
        try:
            with self.session.faults():
                if left and self.response is None:
                    self._open()
                data = next(self.chunks, b"")
        except TransientError:
            self.close()
            raise
        if len(data) > left:
            self.close()
            raise RejectedError(f"it sent more than {self.descriptor.size} bytes")
        if left and not data:
            self.close()
            raise TransientError(f"it sent only {self.position} of {self.descriptor.size} bytes")
        self.position += len(data)
        return data

    def _open(self) -> None:
        headers = {"Range": f"bytes={self.position}-"} if self.position else {}
        ask = RegistryRequest(
            method="GET", url=self.place, scope=self.session.scope(self.repository), headers=headers
        )
        self.response = self.session.request(ask)
        self.chunks = arriving(self.response.raw)
        skip = self.position
        if self.response.status_code == 206:
            came = re.match(r"bytes (\d+)-", self.response.headers.get("Content-Range", ""))
            if not came or int(came[1]) != self.position:
                raise TransientError("it sent another range of bytes than requested")
            skip = 0
        if skip:
            self.chunks = _skip(self.chunks, skip)


def _skip(chunks: Iterable[bytes], count: int) -> Iterator[bytes]:
    for data in chunks:
        if count >= len(data):
            count -= len(data)
            continue
        yield data[count:]
        count = 0


_BINARY = "application/octet-stream"
_PIECE = 4 << 20  # bytes; the most that GHCR takes in a request with a Content-Range
_LOST_UPLOAD_CODES = frozenset(
    {"BLOB_UPLOAD_INVALID", "BLOB_UPLOAD_UNKNOWN", "DIGEST_INVALID", "RANGE_INVALID", "SIZE_INVALID"}
)


class RegistryUploader:
    """What is brought into a registry through `session`, and looked for there by `download`."""

    def __init__(self, session: RegistrySession, download: RegistryDownloader) -> None:
        self.session, self.download = session, download

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
        """As Store has it. Raises StoreError where `source` does not give the blob of `descriptor`."""
        check_digest(descriptor.digest)
        with self.session.told(repository, f"sending blob {short_of(descriptor)}"):
            try:
                if self.session.retry(lambda: self.download.holds(repository, descriptor)):
                    return 0
            except TransientError as error:
                # A blob whose entry was cut by a full disk answers 500 (docker-registry 2.8) until the blob
                # is sent anew, and sending mends it.
                if error.status < 500:
                    raise
            upload = _BlobUpload(self, repository, descriptor, source)
            try:
                self.session.retry(upload.go, progress=lambda: upload.offset)
            except Exception:
                upload.cancel()
                raise
            return upload.sent

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:
        """As Store has it. A registry that may not or cannot mount says no; that is no error."""
        check_digest(descriptor.digest)
        query = urlencode({"mount": descriptor.digest, "from": self.session.path(origin)})
        url = self.session.place(repository, f"blobs/uploads/?{query}")
        scope = (*self.session.scope(repository, "pull,push"), *self.session.scope(origin))

        def ask() -> bool:
            try:
                with self.session.answer(RegistryRequest(method="POST", url=url, scope=scope)) as response:
                    made, upload = response.status_code == 201, self.session.location(response)
            except (RejectedError, TransientError) as error:
                if 400 <= error.status < 500 and error.status not in (408, 425, 429):
                    return False  # no such origin, or not for this account: writing may do
                raise
            if not made:
                self.forget(repository, upload)
                return False
            return self.download.holds(repository, descriptor)

        with self.session.told(repository, f"mounting blob {short_of(descriptor)} from {origin}"):
            return self.session.retry(ask)

    def check(self, repository: str) -> None:
        """Ask whether this account may send blobs there, by ending an upload that nobody began.

        A registry looks at the account first. If its answer does not tell, an upload is begun and ended, of
        which docker-registry 2.8 keeps an empty file for a week.
        """
        scope = self.session.scope(repository, "pull,push")
        uploads = self.session.place(repository, "blobs/uploads/")

        def end() -> bool:
            ask = RegistryRequest(
                method="PUT", url=f"{uploads}{uuid.uuid4()}?digest={digest_of(b'')}", scope=scope
            )
            try:
                with self.session.answer(ask):
                    return False
            except RejectedError as error:
                if error.status in (401, 403) or error.code in ("DENIED", "UNAUTHORIZED", "NAME_UNKNOWN"):
                    raise
                return error.code in _LOST_UPLOAD_CODES

        def begin() -> str:
            with self.session.answer(RegistryRequest(method="POST", url=uploads, scope=scope)) as response:
                return self.session.location(response)

        with self.session.told(repository, "asking whether images may be sent"):
            if not self.session.retry(end):
                self.forget(repository, self.session.retry(begin))

    def forget(self, repository: str, upload: str) -> None:
        """Tells the registry that an upload ends here. A kindness: it sweeps what it is not told of."""
        if upload:
            with suppress(TransientError, RejectedError, RegistryError):
                ask = RegistryRequest(
                    method="DELETE", url=upload, scope=self.session.scope(repository, "pull,push")
                )
                with self.session.answer(ask):
                    pass

    def put(self, repository: str, data: bytes, media_type: str, tag: str = "") -> tuple[Descriptor, bool]:
        """Puts a manifest; gives what its tag or digest names then, and whether it lists it as a referrer."""
        wanted = check_tag_or_digest(tag or digest_of(data))
        put = _ManifestPut(self, repository, data, media_type)
        put.url = self.session.place(repository, f"manifests/{wanted}")
        put.tag = tag
        with self.session.told(repository, f"putting manifest {wanted}"):
            return self.session.retry(put.go), put.listed


class _BlobBody:
    """Bytes of a blob from an offset on, `size` of them, as requests sends them: with a Content-Length."""

    def __init__(self, upload: _BlobUpload, size: int) -> None:
        self.upload, self.size = upload, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        descriptor, left = self.upload.descriptor, self.size
        last = self.upload.offset + self.size == descriptor.size
        for data in self.upload.source(self.upload.offset):
            if last and len(data) > left:
                raise StoreError(
                    "blob-mismatch", f"blob {descriptor.digest} has more than its {descriptor.size} bytes"
                )
            part = data[:left]
            left -= len(part)
            self.upload.sent += len(part)
            if part:
                yield part
            if not left and not last:
                return
        if left:
            raise StoreError("blob-mismatch", f"blob {descriptor.digest} ended {left} bytes too early")


class _BlobUpload:
    """One blob on its way in: `go` until it returns. `offset` is what the registry has confirmed."""

    def __init__(
        self, owner: RegistryUploader, repository: str, descriptor: Descriptor, source: Source
    ) -> None:
        self.owner, self.session, self.repository = owner, owner.session, repository
        self.descriptor, self.source = descriptor, source
        self.scope = self.session.scope(repository, "pull,push")
        self.url = ""
        self.offset = self.sent = 0
        self.piece = self.session.options.piece
        self.broken = self.closing = False
        self.doubted = self.whole = False  # its word on what arrived was wrong; so all goes in one request

    def go(self) -> None:
        """Begins or goes on. Raises TransientError where it is to be called again."""
        if self.closing:  # the end of the upload was asked for, and no answer came
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
            raise TransientError("the registry accepted the blob, but does not have it")

    def _arrived(self) -> bool:
        return self.owner.download.holds(self.repository, self.descriptor)

    def _begin(self) -> None:
        url = self.session.place(self.repository, "blobs/uploads/")
        with self.session.answer(RegistryRequest(method="POST", url=url, scope=self.scope)) as response:
            self._note(response)
            least = read_count(response.headers.get("OCI-Chunk-Min-Length", ""))
        if self.piece and least is not None:
            self.piece = max(self.piece, least)
        self.offset = 0
        if not self.url:
            raise RejectedError("it returned no address for the upload")

    def _note(self, response: Response) -> None:
        self.url = self.session.location(response) or self.url

    def _resume(self) -> None:
        """Asks how much arrived. On any doubt the upload begins anew."""
        try:
            arrived = self._ask_arrived()
        except RejectedError:
            self.url = ""
            return
        if not arrived:
            self.cancel()
            return
        self.offset = arrived

    def _ask_arrived(self) -> int:
        """The bytes that the registry has by its own word, 0 where that says nothing. Raises
        RejectedError.
        """
        with self.session.answer(RegistryRequest(method="GET", url=self.url, scope=self.scope)) as response:
            self._note(response)
            end = _range_end(response.headers)
        # 0-0 may be one byte or none
        return 0 if end is None or end < 1 or end >= self.descriptor.size else end + 1

    def _cut_smaller(self) -> bool:
        """Sends pieces from now on that every registry takes. False where they are no larger already."""
        smaller = not self.closing and (not self.piece or self.piece > _PIECE)
        self.piece = min(self.piece or _PIECE, _PIECE)
        return smaller

    def _send(self) -> None:
        left = self.descriptor.size - self.offset
        if self.offset == 0 and ((left <= SMALL and not self.piece) or self.whole):
            self._close(_BlobBody(self, left) if left else None)
            return
        while self.offset < self.descriptor.size:
            self._patch()
        self._close(None)

    def _patch(self) -> None:
        left = self.descriptor.size - self.offset
        size = min(self.piece, left) if self.piece else left
        end = self.offset + size
        headers = {"Content-Type": _BINARY}
        if size < self.descriptor.size:
            headers["Content-Range"] = f"{self.offset}-{end - 1}"
        ask = RegistryRequest(
            method="PATCH",
            url=self.url,
            scope=self.scope,
            headers=headers,
            body=lambda: _BlobBody(self, size),
            patient=True,
        )
        with self.session.answer(ask) as response:
            self._note(response)
            told = _range_end(response.headers)
        self.offset = end if told in (None, end - 1) else self._judge(end)

    def _judge(self, end: int) -> int:
        """How much arrived, where the answer to a request that took all does not say `end`.

        ECR's answers do not count, and it has no page that does: then the digest at the end decides.
        """
        self.doubted = True
        try:
            arrived = self._ask_arrived()
        except RejectedError:
            arrived = 0
        if arrived and not self.offset < arrived <= end:
            self.whole = True
            self.cancel()
            raise TransientError(f"{arrived} of {end} bytes arrived")
        return arrived or end

    def _close(self, body: _BlobBody | None) -> None:
        self.closing = True
        query = urlencode({"digest": self.descriptor.digest})
        ask = RegistryRequest(
            method="PUT",
            url=f"{self.url}{'&' if '?' in self.url else '?'}{query}",
            scope=self.scope,
            headers={"Content-Type": _BINARY},
            body=(lambda: body) if body else b"",
            patient=True,
        )
        with self.session.answer(ask) as response:
            told = response.headers.get("Docker-Content-Digest", "")
        if told.startswith("sha256:") and told != self.descriptor.digest:
            raise RejectedError(f"it stored another blob than was sent: {told[:80]}")

    def _check_source(self) -> None:
        sha256 = hashlib.sha256()
        for data in self.source(0):
            sha256.update(data)
        if f"sha256:{sha256.hexdigest()}" != self.descriptor.digest:
            raise StoreError(
                "store-corrupt",
                f"blob {self.descriptor.digest} is corrupt: it cannot be pushed",
                hint="run imagefactory build TARGET: it builds what is missing",
            )

    def cancel(self) -> None:
        self.owner.forget(self.repository, self.url)
        self.url = ""


class _ManifestPut:
    """One manifest on its way in: `go` until it returns. `listed`: the registry lists it as a referrer."""

    def __init__(self, owner: RegistryUploader, repository: str, data: bytes, media_type: str) -> None:
        self.owner, self.repository, self.data, self.media_type = owner, repository, data, media_type
        self.digest = digest_of(data)
        self.url = self.tag = ""
        self.tried = self.listed = False

    def go(self) -> Descriptor:
        session, download, repository = self.owner.session, self.owner.download, self.repository
        if self.tried:  # the last one may have arrived: then nothing is put again over what came later
            manifest = download.manifest_now(repository, self.tag or self.digest)
            if manifest is not None and manifest[0].digest == self.digest:
                return manifest[0]
        self.tried = True
        ask = RegistryRequest(
            method="PUT",
            url=self.url,
            scope=session.scope(repository, "pull,push"),
            headers={"Content-Type": self.media_type},
            body=self.data,
            patient=True,
        )
        try:
            with session.answer(ask) as response:
                told = response.headers.get("Docker-Content-Digest", "")
                self.listed = bool(response.headers.get("OCI-Subject"))
        except RejectedError as error:
            # docker-registry 2.8 says so too where another writer is writing the link of a layer anew.
            if error.code != "DIGEST_INVALID":
                raise
            raise TransientError(str(error), status=error.status) from None
        if told.startswith("sha256:") and told != self.digest:
            raise RejectedError(f"it stored another manifest than was sent: {told[:80]}")
        manifest = download.manifest_now(repository, self.digest)
        if manifest is None or manifest[1] != self.data:
            raise TransientError("the registry accepted the manifest, but does not return it")
        if self.tag:
            manifest = download.manifest_now(repository, self.tag)
            if manifest is None:
                raise TransientError("the registry accepted the manifest, but does not have its tag")
        return manifest[0]


def _range_end(headers: Mapping[str, str]) -> int | None:
    """The last byte that an upload has, by its Range header (`0-1023`)."""
    found = re.fullmatch(r"(?:bytes[= ])?0-(\d{1,18})", headers.get("Range", "").strip())
    return int(found[1]) if found else None
