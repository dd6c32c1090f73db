"""Blobs, manifests and lists on their way out of a registry, checked by their digests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

from imagefactory.oci.manifests import (
    INDEX_TYPES,
    MALFORMED,
    MANIFEST_LIMIT,
    MANIFEST_TYPES,
    digest_of,
    media_type_of,
    read_json,
)
from imagefactory.oci.model import Descriptor
from imagefactory.oci.registry.exchange import SMALL, Ask, short_of
from imagefactory.oci.registry.session import RegistrySession, Response
from imagefactory.oci.store import check_digest, check_wanted
from imagefactory.http import CHUNK, RefusedError, TransientError, arriving, read_count, read_some

_ACCEPT = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))


class Download:
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
        ask = Ask(
            method="HEAD",
            url=self.session.place(repository, f"blobs/{descriptor.digest}"),
            scope=self.session.scope(repository),
        )
        try:
            with self.session.answer(ask) as response:
                length = read_count(response.headers.get("Content-Length", ""))
        except RefusedError as error:
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
                raise RefusedError("the received bytes do not match the digest")

    def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        """As Store has it."""
        self.session.place(repository, check_wanted(wanted))
        with self.session.told(repository, f"fetching manifest {wanted}"):
            return self.session.retry(lambda: self.manifest_now(repository, wanted))

    def manifest_now(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        """As `manifest`, asked once: raises the two errors of exchange.py."""
        url = self.session.place(repository, f"manifests/{wanted}")
        ask = Ask(method="GET", url=url, scope=self.session.scope(repository), headers={"Accept": _ACCEPT})
        try:
            with self.session.answer(ask) as response:
                data = read_some(response.raw, MANIFEST_LIMIT)
                told = wanted if ":" in wanted else response.headers.get("Docker-Content-Digest", "")
                header = response.headers.get("Content-Type", "").partition(";")[0].strip()
        except RefusedError as error:
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
                raise RefusedError(f"{wanted} is a manifest of Docker schema 1") from None
            raise TransientError(f"the response for {wanted} is not a manifest") from None
        # Docker and Podman go by the header, whatever the bytes say.
        if header in (*INDEX_TYPES, *MANIFEST_TYPES) and header != media_type:
            raise RefusedError(f"the manifest {digest} has the type {media_type}, its header {header}")
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
            raise RefusedError(f"it sent more than {self.descriptor.size} bytes")
        if left and not data:
            self.close()
            raise TransientError(f"it sent only {self.position} of {self.descriptor.size} bytes")
        self.position += len(data)
        return data

    def _open(self) -> None:
        headers = {"Range": f"bytes={self.position}-"} if self.position else {}
        ask = Ask(method="GET", url=self.place, scope=self.session.scope(self.repository), headers=headers)
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
