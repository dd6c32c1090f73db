"""What every store of images offers, and how what is in it is named.

Two stores: an image layout on disk (layout.py) and a registry (registry/client.py). One
suite of contract tests runs over both. All that is kept (images, .sif files, verdicts) is manifests
and the blobs they name, so one piece of code (transfer.py) moves anything from any store to any other.

Digests are `sha256:<64 hex>`, sizes bytes. A repository is a path such as `pytorch` or
`site/pytorch`; a store on disk keeps one pool of blobs for all repositories.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from imagefactory.errors import UsageError
from imagefactory.oci.manifests import Descriptor

# Distribution specification, "Pulling manifests": names, and tags of at most 128 characters.
REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")

Source = Callable[[int], Iterator[bytes]]
"""The bytes of a blob from an offset on. Called again with another offset when a transfer resumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReference:
    """Where an image lies: `host/repository:tag@digest`; `registry` is empty for the store on disk.

    At least one of `tag` and `digest` is set; a digest, where there is one, decides.
    """

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def wanted(self) -> str:
        """What a store is asked for: the digest, else the tag."""
        return self.digest or self.tag

    def __str__(self) -> str:
        place = f"{self.registry}/{self.repository}" if self.registry else self.repository
        return place + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> ImageReference:
    """`host[:port]/repository[:tag][@sha256:...]`, the host written out (docker.io, 127.0.0.1:5000).

    Raises UsageError for what is no such reference, for one without a host and for one that names
    neither a tag nor a digest.
    """
    rest, at, digest = text.rpartition("@") if "@" in text else (text, "", "")
    if "@" in rest or (at and "/" in digest):
        raise UsageError(
            "reference-has-login",
            "a reference must not contain a user or password",
            hint="write HOST/NAME:TAG, and log in with docker login HOST",
        )
    host, slash, path = rest.partition("/")
    if not slash or not HOST.fullmatch(host) or not ("." in host or ":" in host or host == "localhost"):
        raise UsageError(
            "reference-incomplete",
            f"'{text}' has no registry host",
            hint="write the host too: registry.example.org/pytorch:2.3-cu121",
        )
    repository, colon, tag = path.partition(":")
    if (
        not REPOSITORY.fullmatch(repository)
        or (colon and not TAG.fullmatch(tag))
        or (at and not DIGEST.fullmatch(digest))
    ):
        raise UsageError(
            "reference-invalid",
            f"'{text}' is not an image reference",
            hint="write HOST/NAME:TAG or HOST/NAME@sha256:...",
        )
    if not tag and not digest:
        raise UsageError(
            "reference-incomplete", f"'{text}' has neither a tag nor a digest", hint=f"write {text}:TAG"
        )
    return ImageReference(registry=host, repository=repository, tag=tag, digest=digest)


def check_repository(text: str) -> str:
    """`text`, or UsageError where it is no repository."""
    if not REPOSITORY.fullmatch(text):
        raise UsageError(
            "reference-invalid",
            f"{text[:160]!r} is not a repository",
            hint="write it in lower case: site/pytorch",
        )
    return text


def check_digest(text: str) -> str:
    """`text`, or UsageError where it is no digest."""
    if not DIGEST.fullmatch(text):
        raise UsageError("reference-invalid", f"{text[:160]!r} is not a sha256 digest")
    return text


def check_tag_or_digest(text: str) -> str:
    """`text`, or UsageError where it is neither a tag nor a digest."""
    if not (DIGEST.fullmatch(text) or TAG.fullmatch(text)):
        raise UsageError("reference-invalid", f"{text[:160]!r} is neither a tag nor a digest")
    return text


class Store(Protocol):
    """Blobs, manifests, tags and referrers. Every method may raise StoreError or RegistryError."""

    @property
    def name(self) -> str:
        """What a person calls it: a host, or a folder."""

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        """Whether `repository` holds this blob in its size."""

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:
        """The blob's bytes from `offset` on, in chunks.

        Ends only when exactly `descriptor.size - offset` bytes came and, from offset 0, when they are
        what the digest says; raises otherwise, also in the middle.
        """

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
        """Puts a blob from `source`; gives the bytes that were sent for it (0 when it was there).

        The blob is there, whole and with its digest, when this returns; a partial one is never visible.
        """

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:
        """Makes a blob of the repository `origin` one of `repository` too, if the store can; says whether."""

    def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        """The manifest of a tag or digest, checked against its digest, or None when there is none."""

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        """Puts a manifest whose blobs are there; the descriptor carries the digest the store confirmed.

        A manifest with a `subject` becomes one of the subject's referrers.
        """

    def tags(self, repository: str) -> tuple[str, ...]:
        """The repository's tags, sorted; none for a repository that does not exist."""

    def untag(self, repository: str, tag: str) -> None:
        """Removes a tag; nothing happens when there is none."""

    def referrers(self, repository: str, digest: str, artifact_type: str = "") -> tuple[Descriptor, ...]:
        """The manifests whose subject is `digest`, those of one artifact type where that is asked for."""
